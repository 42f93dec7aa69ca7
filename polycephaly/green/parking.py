"""What a green thread awaits when all it does is wait to be woken: 48 bytes, where a generator's
frame takes 200.

An awaitable that is its own iterator, as the interpreter asks for it: `__next__` is called when the
await begins, and yields `PARK`; then either `send` with what the thread was given (`__next__` again
where that is None), or `throw`."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TypeVar

from .scheduler import PARK, scheduler
from .thread import AROUND, GreenThread, outside

__all__ = ["Parking", "parks"]

F = TypeVar("F", bound=Callable[..., Any])


def parks(fn: F) -> F:
    """Marks a plain function that gives a `Parking`: `spawn` takes it for the coroutine function
    that it stands for."""
    fn.parks = True  # type: ignore[attr-defined]
    return fn


class Parking:
    """To be derived from. `enter` leaves word where the thread waits, `leave` takes it back."""

    __slots__ = ("thread",)

    is_parking = True
    name = "this"
    instead = AROUND

    def __init__(self) -> None:
        self.thread: GreenThread[Any] | None = None

    def enter(self, thread: GreenThread[Any]) -> bool:
        """Called once, by the owner. False: there is nothing to wait for. It may raise
        `StopIteration` with a value."""
        raise NotImplementedError

    def leave(self) -> None:
        """The wait was broken off."""
        raise NotImplementedError

    def wake(self, value: Any = None) -> None:
        """The owner wakes it; `value` is what the await gives."""
        thread = self.thread
        assert thread is not None
        thread._value = value
        scheduler.ready.append(thread)

    def __await__(self) -> Generator[Any, Any, Any]:
        if self.thread is not None:
            raise RuntimeError(f"what {self.name} gave was awaited before: call it again")
        return self  # type: ignore[return-value]  # it does what a generator does

    def __iter__(self) -> Parking:
        return self

    def __next__(self) -> Any:
        if self.thread is None:
            if get_ident() != scheduler.owner:
                raise outside(self.name, self.instead)
            self.thread = thread = scheduler.current
            if self.enter(thread):
                return PARK
        raise StopIteration

    def send(self, value: Any) -> Any:
        if value is None:
            return self.__next__()
        raise StopIteration(value)

    def __repr__(self) -> str:
        return f"<waits in {self.name}>"

    def throw(self, error: BaseException, *_: Any) -> NoReturn:
        self.leave()
        raise error

    def close(self) -> None:
        if self.thread is not None:
            self.leave()
