"""`Parking`: an awaitable that parks a green thread until it is woken.

A `Parking` takes 48 bytes, where the frame of a generator takes 200. The object is its own iterator
and follows the protocol of the interpreter: `__next__` is called when the await begins, and yields
`PARK`. Then either `send` is called with the value given to the thread (`__next__` again if that is
None), or `throw`.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TypeVar

from .scheduler import PARK, scheduler
from .thread import GREEN_RUN_ADVICE, GreenThread, outside_error

F = TypeVar("F", bound=Callable[..., Any])


def parks(fn: F) -> F:
    """Mark a plain function that returns a `Parking`, so that `spawn` treats it as a coroutine
    function.
    """
    fn.parks = True  # type: ignore[attr-defined]
    return fn


class Parking:
    """The base class of such awaitables.

    `enter` registers the thread where it waits, and `leave` takes the registration back.
    """

    __slots__ = ("thread",)

    is_parking = True
    alternative = GREEN_RUN_ADVICE

    def __init__(self) -> None:
        self.thread: GreenThread[Any] | None = None

    @property
    def name(self) -> str:
        """The operation, for errors and reports."""
        raise NotImplementedError

    def enter(self) -> bool:
        """Begin the wait. Return False if there is nothing to wait for.

        Called once, by the owner. May raise `StopIteration` with the value of the await.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Clean up after an interrupted wait."""
        raise NotImplementedError

    def wake(self, value: Any = None) -> None:
        """Wake the thread, whose await returns `value`. For the owner only."""
        thread = self.thread
        assert thread is not None
        thread.next_send = value
        scheduler.ready.append(thread)

    def __await__(self) -> Generator[Any, Any, Any]:
        if self.thread is not None:
            raise RuntimeError(
                f"an awaitable of {self.name} was awaited twice: call {self.name} again"
            )
        return self  # type: ignore[return-value]  # implements the methods of a generator

    def __iter__(self) -> Parking:
        return self

    def __next__(self) -> Any:
        if self.thread is None:
            if get_ident() != scheduler.owner:
                raise outside_error(self.name, self.alternative)
            self.thread = scheduler.current
            if self.enter():
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
        try:
            raise error
        finally:
            del error, self  # no cycle through the error's traceback

    def close(self) -> None:
        if self.thread is not None:
            self.leave()
