"""Virtual time for tests of green threads, in which an hour of `sleep` takes no time.

    with testing.virtual_time() as clock:      the time stands still while a green thread runs,
        green.run(main)                        and jumps to the next timer when all wait

Like trio's `MockClock` with `autojump_threshold=0`, except that the scheduler knows which threads
wait, so that nothing has to be guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ..promises import promise
from ..runtime.checks import check_seconds
from ..runtime.clock import monotonic
from .report import can_other_threads_act
from .scheduler import scheduler
from .sleeping import sleep

__all__ = ["Clock", "all_waiting", "virtual_time"]


class Clock:
    """The time of the green threads of this process, within `virtual_time`.

    Any thread may call the methods.
    """

    def __init__(self, jumps: bool) -> None:
        self._jumps = jumps
        self._now = 0.0

    def time(self) -> float:
        """Return the virtual seconds since the beginning of the block."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass at once.

        Timers that are due by then go off afterwards, in order.

        Parameters
        ----------
        seconds
            The virtual seconds to add.

        Raises
        ------
        TypeError
            If `seconds` is not a number.
        ValueError
            If `seconds` is negative or NaN.
        """
        step = check_seconds("the time to advance", seconds, 0)
        scheduler.run_in_owner(lambda: self._set_time(self._now + step))

    def _set_time(self, when: float) -> None:
        self._now = max(self._now, when)

    def _try_jump(self, when: float) -> bool:
        """Jump to `when` and return True, if all green threads wait. Called by `Timers`."""
        waits_for_others = scheduler.external_waits or scheduler.transport is not None
        if not self._jumps or scheduler.ready or waits_for_others:
            return False
        if scheduler.native_calls and can_other_threads_act(dict(promise.waiting_threads)):
            return False
        self._set_time(when)
        return True


@contextmanager
def virtual_time(*, jumps: bool = True) -> Iterator[Clock]:
    """Give the green threads of this process a virtual time, for a test.

    Parameters
    ----------
    jumps
        Jump to the next timer when all green threads wait. If False, only `Clock.advance` moves
        the time.

    Yields
    ------
    Clock
        The virtual time of the ``with`` block.

    Raises
    ------
    RuntimeError
        Within another `virtual_time`, or if channels connect to other processes, which have their
        own time.

    Notes
    -----
    `green.sleep`, `green.timeout`, `green.after` and all time limits within green threads use the
    virtual time. The time stands still while a green thread runs, or a plain function that one has
    called, or while one waits for a promise that others, such as a drone, settle. Limits in plain
    threads (``promise.result(1)``, ``channel.get(1)``) use real time.

    Examples
    --------
    >>> from polycephaly import green
    >>> from polycephaly.green import testing
    >>> with testing.virtual_time() as clock:
    ...     green.run(green.sleep, 3600)
    ...     clock.time()
    3600.0
    """
    timers = scheduler.timers
    if timers.jump is not None:
        raise RuntimeError(
            "virtual_time cannot be nested: all green threads of a process have the same time"
        )
    if scheduler.transport is not None:
        raise RuntimeError(
            "virtual_time cannot be used while channels connect this process to others, which "
            "have their own time"
        )
    clock = Clock(jumps)

    scheduler.run_in_owner(partial(timers.switch_clock, clock.time, clock._try_jump))
    try:
        yield clock
    finally:
        scheduler.run_in_owner(partial(timers.switch_clock, monotonic, None))


async def all_waiting() -> None:
    """Park until all other green threads wait: for each other, for a timer, or for the end of a
    plain function.

    Examples
    --------
    >>> from polycephaly import green
    >>> from polycephaly.green import testing
    >>> async def main():
    ...     channel = green.Channel()
    ...     sender = green.spawn(channel.send, "here")
    ...     await testing.all_waiting()
    ...     return sender.done(), await channel.receive()
    >>> green.run(main)
    (False, 'here')
    """
    me = scheduler.current
    _observers.add(me)
    try:
        while not _observers.issuperset(scheduler.ready):
            await sleep(0)
    finally:
        _observers.discard(me)


_observers: set[object] = set()
"""The green threads in `all_waiting`, which do not wait for each other."""
