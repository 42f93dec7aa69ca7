"""`sleep`, time limits (`timeout`), and `current`, the calling green thread."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Awaitable
from typing import Any

from ..runtime.checks import check_seconds
from ..runtime.timers import Timer
from .parking import Parking, parks
from .scheduler import YIELDED, scheduler
from .thread import Cancelled, GreenThread, calling_thread, outside_error


class _Sleep(Parking):
    """The awaitable of `sleep`, which is also the alarm in the heap of timers."""

    __slots__ = ("is_over", "seconds")

    name = "green.sleep"
    alternative = "time.sleep, or asyncio.sleep"

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.is_over = False

    def enter(self) -> bool:
        if self.seconds > 0:
            scheduler.timers.add(scheduler.timers.now() + self.seconds, self)
        else:
            scheduler.timers.fire_due()  # a time limit that has expired takes effect now
            self.is_over = True
            thread: Any = self.thread
            thread.next_send = YIELDED
            scheduler.ready.append(thread)
        return True

    fire = Parking.wake

    def send(self, value: Any) -> Any:
        return self.__next__()

    def leave(self) -> None:
        scheduler.timers.cancel(self)


@parks
def sleep(seconds: float) -> Awaitable[None]:
    """Park the calling green thread for `seconds`.

    Parameters
    ----------
    seconds
        The duration; with 0, the threads that are ready run first.

    Raises
    ------
    TypeError
        If `seconds` is not a number.
    ValueError
        If `seconds` is negative or NaN.
    RuntimeError
        If awaited outside of a green thread.

    Examples
    --------
    >>> from polycephaly import green
    >>> green.run(green.sleep, 0.01)
    """
    return _Sleep(check_seconds("the time of a sleep", seconds, 0))


def current() -> GreenThread[Any]:
    """Return the calling green thread, which may be a plain function.

    Returns
    -------
    GreenThread
        The green thread whose code calls.

    Raises
    ------
    RuntimeError
        If the caller is not a green thread.
    """
    thread = calling_thread()
    if thread is None:
        raise RuntimeError("no green thread runs here")
    return thread


class timeout:  # noqa: N801 - reads like a function
    """A time limit for a block: ``async with green.timeout(seconds):``.

    Parameters
    ----------
    seconds
        The limit; None for no limit.

    Raises
    ------
    TimeoutError
        At the end of the block, if the limit has interrupted the block.
    TypeError
        If `seconds` is not a number.
    ValueError
        If `seconds` is negative or NaN.
    RuntimeError
        If used outside of a green thread, or for a second block.

    Notes
    -----
    When the limit expires, the await in progress raises `Cancelled`. The end of the block turns
    that into `TimeoutError`. A foreign call cannot be interrupted, so the block then ends after the
    call has returned. Blocks may be nested. Once the thread itself is cancelled, a limit that
    expires later interrupts nothing more: the clean-up takes the time that it needs.

    Examples
    --------
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
        self.seconds = None if seconds is None else check_seconds("timeout", seconds, 0)
        self.expired = False
        self._is_used = False
        self._thread: Any = None
        self._timer: Timer | None = None
        self._error: Cancelled | None = None

    async def __aenter__(self) -> timeout:
        if get_ident() != scheduler.owner:
            raise outside_error(
                "green.timeout", "asyncio.timeout, or the time limit of the function that waits"
            )
        if self._is_used:
            raise RuntimeError("a timeout can be used for one block only: make another timeout")
        self._is_used = True
        self._thread = scheduler.current
        self._cancel_count = self._thread.cancel_count
        if self.seconds is not None:
            self._timer = scheduler.timers.after(self.seconds, self._expire)
        return self

    def _expire(self) -> None:
        self.expired = True
        if self._thread.cancel_count != self._cancel_count:
            return  # the thread is being cancelled
        self._error = Cancelled(f"the time limit of {self.seconds:g} s has expired")
        self._thread.interrupt(self._error)

    async def __aexit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if self._timer is not None:
            scheduler.timers.cancel(self._timer)
        own_error, thread = self._error, self._thread
        # An error's traceback has the frame of the block, which may hold this object: no cycle.
        self._error = self._thread = None
        if own_error is None:
            return
        # If not raised yet, the error must not be raised in code after the block.
        own_error.withdrawn = True
        # A block that ended without the error has completed just in time, and may have been given
        # a value, which must not be lost. A foreign call that returned too late is different: the
        # block itself caused that delay.
        if error is own_error and thread.cancel_count != self._cancel_count:
            return  # the thread was also cancelled, and the error counts as that
        if error is own_error or (error is None and own_error.in_call):
            del thread
            raise TimeoutError(f"the block was not done within {self.seconds:g} s") from error
