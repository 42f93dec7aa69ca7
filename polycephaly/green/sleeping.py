"""Letting time pass, and limiting how much of it something takes."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Awaitable
from types import TracebackType
from typing import Any

from ..runtime.timers import Timer
from .parking import Parking, parks
from .scheduler import YIELDED, scheduler
from .thread import Cancelled, GreenThread, here, outside

__all__ = ["current", "sleep", "timeout"]


class _Sleep(Parking):
    """Its own alarm."""

    __slots__ = ("off", "seconds")

    name = "green.sleep"
    instead = "time.sleep, or asyncio.sleep"

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.off = False

    def enter(self, thread: GreenThread[Any]) -> bool:
        if self.seconds > 0:
            scheduler.timers.add(scheduler.timers.now() + self.seconds, self)
        else:
            scheduler.timers.fire()  # a time limit that is over counts now
            self.off = True
            thread._value = YIELDED
            scheduler.ready.append(thread)
        return True

    def go_off(self) -> None:
        self.wake()

    def send(self, value: Any) -> Any:
        return self.__next__()

    def leave(self) -> None:
        scheduler.timers.call_off(self)


@parks
def sleep(seconds: float) -> Awaitable[None]:
    """Parks this green thread for so many seconds; 0 lets the others that are ready go first.

    >>> from polycephaly import green
    >>> green.run(green.sleep, 0.01)
    """
    if not seconds >= 0:
        raise ValueError(f"sleep takes a number of seconds from 0 on, not {seconds!r}")
    return _Sleep(seconds)


def current() -> GreenThread[Any]:
    """The green thread that runs here, be it a plain function. Raises `RuntimeError` outside of
    one."""
    thread = here()
    if thread is None:
        raise RuntimeError("no green thread runs here")
    return thread


class timeout:
    """``async with green.timeout(seconds):`` ends what is in the block when its time is over, with
    `TimeoutError`.

    The await that the block is at then raises `Cancelled`, which becomes `TimeoutError` at the end
    of the block. A foreign call cannot be broken off; the block ends when it has returned. Blocks
    may be nested. `None`: no limit.

    >>> from polycephaly import green
    >>> async def main():
    ...     try:
    ...         async with green.timeout(0.01):
    ...             await green.Channel().receive()
    ...     except TimeoutError:
    ...         return "too late"
    >>> green.run(main)
    'too late'
    """

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not seconds >= 0:
            raise ValueError(f"a timeout is a number of seconds from 0 on, not {seconds!r}")
        self.seconds = seconds
        self.expired = False
        self._thread: Any = None
        self._timer: Timer | None = None
        self._error: Cancelled | None = None

    async def __aenter__(self) -> timeout:
        if get_ident() != scheduler.owner:
            raise outside(
                "green.timeout", "asyncio.timeout, or the time limits of what is waited for"
            )
        if self._thread is not None:
            raise RuntimeError("a timeout is for one block; make another one")
        self._thread = scheduler.current
        self._cancels = self._thread._cancels
        if self.seconds is not None:
            self._timer = scheduler.timers.set(scheduler.timers.now() + self.seconds, self._expire)
        return self

    def _expire(self) -> None:
        self.expired = True
        if self._thread._cancels != self._cancels:
            return  # it is being cancelled
        self._error = Cancelled(f"{self.seconds} s are over")
        self._thread._interrupt(self._error)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            scheduler.timers.call_off(self._timer)
        if self._error is None:
            return
        self._error.called_off = (
            True  # if it has not been raised yet, it must not hit what comes after the block
        )
        # Whoever ended without it was in time but for being told so: it may have been given
        # something, which must not get lost. A foreign call that came back too late is the block's
        # own delay.
        if error is self._error and self._thread._cancels != self._cancels:
            return  # cancelled on top of that: it passes for that
        if error is self._error or (error is None and self._error.in_call):
            raise TimeoutError(f"not done within {self.seconds} s") from error
