"""Letting time pass, and limiting how much of it something takes."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Generator
from time import monotonic
from types import TracebackType, coroutine
from typing import Any

from .scheduler import PARK, YIELDED, scheduler
from .thread import Cancelled, GreenThread, Wake, here, outside
from .timers import Timer

__all__ = ["current", "sleep", "timeout"]


@coroutine
def sleep(seconds: float) -> Generator[Any, Any, None]:
    """Parks this green thread for so many seconds; 0 lets the others that are ready go first.

    >>> from polycephaly import green
    >>> green.run(green.sleep, 0.01)
    """
    if get_ident() != scheduler.owner:
        raise outside("green.sleep", "time.sleep, or asyncio.sleep")
    if not seconds >= 0:
        raise ValueError(f"sleep takes a number of seconds from 0 on, not {seconds!r}")
    thread = scheduler.current
    if seconds == 0:
        scheduler.timers.fire()  # a time limit that is over counts now
        thread._value = YIELDED
        scheduler.ready.append(thread)
        yield PARK
        return
    wake = Wake()
    timer = scheduler.timers.set(monotonic() + seconds, wake.now)
    try:
        yield PARK
    except BaseException:
        scheduler.timers.call_off(timer)
        raise


def current() -> GreenThread[Any]:
    """The green thread that runs here, be it a plain function. Raises `RuntimeError` outside of one."""
    thread = here()
    if thread is None:
        raise RuntimeError("no green thread runs here")
    return thread


class timeout:
    """``async with green.timeout(seconds):`` ends what is in the block when its time is over, with `TimeoutError`.

    The await that the block is at then raises `Cancelled`, which becomes `TimeoutError` at the end of the block. A
    foreign call cannot be broken off; the block ends when it has returned. Blocks may be nested. `None`: no limit.

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
        self._timer: Timer | None = None
        self._error: Cancelled | None = None

    async def __aenter__(self) -> timeout:
        self._thread = current()
        if self.seconds is not None:
            self._timer = scheduler.timers.set(monotonic() + self.seconds, self._expire)
        return self

    def _expire(self) -> None:
        self.expired = True
        self._error = Cancelled(f"{self.seconds} s are over")
        self._thread._interrupt(self._error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._timer is not None:
            scheduler.timers.call_off(self._timer)
        if self._error is None:
            return
        if error is not self._error:
            await self._meet(self._error)
        if error is None or error is self._error:
            raise TimeoutError(f"not done within {self.seconds} s") from error

    async def _meet(self, interruption: Cancelled) -> None:
        """The interruption is on its way, and must not hit what comes after the block: it is waited for here."""
        try:
            while interruption.on_its_way:
                await sleep(0)
        except Cancelled as late:
            if late is not interruption:
                raise
