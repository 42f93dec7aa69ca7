"""Timers: a heap of callbacks, each with a time.

The time is real, or that of a test (green/testing.py, tests/in_time.py). The scheduler of green
threads and each event loop have one `Timers` object. Only the owner may touch more than `now`: the
scheduler's thread, or the holder of the loop's lock.

A cancelled timer stays in the heap, marked, until it would be the next one, or until the marked
ones are the majority and are removed together. So a loop under a long `timeout` costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

from .clock import monotonic

_MAX_UNSWEPT_TIMERS = 64  # cancelled timers, up to which no sweep is worth its time


class Alarm(Protocol):
    """An entry of the heap. The owner calls `fire` once, unless cancelled before."""

    is_over: bool
    """True after the alarm has fired or was cancelled."""

    def fire(self) -> object: ...


class Timer:
    """An alarm that calls the given function."""

    __slots__ = ("fire", "is_over", "owner")

    def __init__(self, action: Callable[[], object]) -> None:
        self.fire = action
        self.is_over = False
        self.owner: object = None  # with which the timer ends: see `Timers.cancel_of`


def _do_nothing() -> None:
    pass


class Timers:
    """Timers of one owner. Times are seconds of `now`.

    Timers with the same time fire in order of setting.
    """

    def __init__(self) -> None:
        self.now: Callable[[], float] = monotonic
        self.jump: Callable[[float], bool] | None = None
        """In a test's time: advance it to `when` and return True, if all threads wait."""
        self.heap: list[tuple[float, int, Alarm]] = []
        self.due_at = inf
        """When the next alarm is due; infinite if there is none. For a glance in each turn."""
        self._order = count()
        self._cancelled = 0

    def set(self, when: float, action: Callable[[], object]) -> Timer:
        timer = Timer(action)
        self.add(when, timer)
        return timer

    def after(self, seconds: float, action: Callable[[], object]) -> Timer:
        return self.set(self.now() + seconds, action)

    def add(self, when: float, alarm: Alarm) -> None:
        heappush(self.heap, (when, next(self._order), alarm))
        self.due_at = self.heap[0][0]

    def cancel(self, alarm: Alarm) -> None:
        if alarm.is_over:
            return
        alarm.is_over = True
        if type(alarm) is Timer:
            alarm.fire = _do_nothing  # frees the objects that the callback holds
        self._cancelled += 1
        if self._cancelled > _MAX_UNSWEPT_TIMERS and self._cancelled * 2 > len(self.heap):
            self.heap[:] = [entry for entry in self.heap if not entry[2].is_over]
            heapify(self.heap)
            self._cancelled = 0
        self._find_next()

    def _find_next(self) -> None:
        """Drop cancelled alarms up to the next one that is not."""
        heap = self.heap
        while heap and heap[0][2].is_over:
            heappop(heap)
            self._cancelled -= 1
        self.due_at = heap[0][0] if heap else inf

    def cancel_of(self, owner: object) -> None:
        """Cancel the timers of an owner that has ended, so that they do not keep it."""
        for _, _, alarm in [*self.heap]:
            if type(alarm) is Timer and alarm.owner is owner:
                alarm.owner = None
                self.cancel(alarm)

    def fire_due(self) -> None:
        """Call all alarms that are due."""
        heap, now = self.heap, self.now()
        while heap and heap[0][0] <= now:
            alarm = heappop(heap)[2]
            if alarm.is_over:
                self._cancelled -= 1
            else:
                alarm.is_over = True
                alarm.fire()
        self._find_next()

    def seconds_left(self) -> float | None:
        """Return the seconds until the next alarm is due, or None if there is none.

        In a test's time, None is also returned while a thread runs, because the time stands still
        then.
        """
        self._find_next()
        if not self.heap:
            return None
        remaining = self.due_at - self.now()
        if remaining <= 0:
            return 0.0
        if self.jump is not None:
            return 0.0 if self.jump(self.due_at) else None
        return remaining

    def switch_clock(self, now: Callable[[], float], jump: Callable[[float], bool] | None) -> None:
        """Switch to another clock. The time that is left of each alarm stays the same."""
        change = now() - self.now()
        self.heap[:] = [(when + change, order, alarm) for when, order, alarm in self.heap]
        self.now, self.jump = now, jump
        self._find_next()

    def clear(self) -> None:
        self.heap.clear()
        self._cancelled = 0
        self.due_at = inf
