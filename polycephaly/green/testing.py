"""A test's own time for green threads: an hour of `sleep` takes none.

    with testing.virtual_time() as clock:      the time stands still while anybody runs,
        green.run(main)                        and jumps to the next timer when all wait

As trio's `MockClock` with `autojump_threshold=0`, but that nothing has to be guessed: the scheduler
knows who waits."""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic

from ..promises import promise
from .report import somebody_else_could_act
from .scheduler import scheduler
from .sleeping import sleep

__all__ = ["Clock", "all_waiting", "virtual_time"]


class Clock:
    """The time of the green threads of this process, within `virtual_time`. For any thread."""

    def __init__(self, jumps: bool) -> None:
        self._jumps = jumps
        self._now = 0.0

    def time(self) -> float:
        """Return the seconds that have passed since the beginning of the block."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once. What is due by then happens afterwards, in its order.

        Raises `ValueError` for a negative number, and for what is none.
        """
        if not seconds >= 0:
            raise ValueError(f"advance takes a number of seconds from 0 on, not {seconds!r}")
        _in_the_scheduler(lambda: self._to(self._now + seconds))

    def _to(self, when: float) -> None:
        self._now = max(self._now, when)

    def _jump(self, when: float) -> bool:
        """For `Timers`."""
        waits_for_others = scheduler.outside or scheduler.mail is not None
        if not self._jumps or scheduler.ready or waits_for_others:
            return False
        if scheduler.away and somebody_else_could_act(dict(promise.waiting)):
            return False
        self._to(when)
        return True


@contextmanager
def virtual_time(*, jumps: bool = True) -> Iterator[Clock]:
    """Give the green threads of this process a time of their own, for a test, and return its
    `Clock`.

    `green.sleep`, `green.timeout`, `green.after` and whatever has a time limit within green threads
    keep to it. The time stands still while a green thread runs, or a plain function that one has
    called, or while one waits for a promise that others settle (a drone, say). When all wait, it
    jumps to the next of these times; with ``jumps=False`` it moves by `Clock.advance` alone. Limits
    in plain threads (``promise.result(1)``, ``channel.get(1)``) are of real time. Raises
    `RuntimeError` within another `virtual_time`, and where channels go to other processes, which
    have their own time.

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
            "virtual_time is the time of all green threads of a process: it cannot be nested"
        )
    if scheduler.mail is not None:
        raise RuntimeError(
            "virtual_time is not for a process whose channels go to others, which have their own time"
        )
    clock = Clock(jumps)

    _in_the_scheduler(partial(timers.keep_to, clock.time, clock._jump))
    try:
        yield clock
    finally:
        _in_the_scheduler(partial(timers.keep_to, monotonic, None))


def _in_the_scheduler(act: Callable[[], None]) -> None:
    if scheduler.in_step():
        act()
        return
    done = allocate_lock()
    done.acquire()

    def do() -> None:
        act()
        done.release()

    scheduler.post(do)
    done.acquire()


async def all_waiting() -> None:
    """Park until all other green threads wait: for each other, for a time, or for a plain
    function's end.

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
    while scheduler.ready:
        await sleep(0)
