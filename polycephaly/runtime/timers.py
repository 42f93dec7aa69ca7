"""Timers: a heap of things to do at some time. The time is real, or a test's (green/testing.py,
tests/in_time.py).

The scheduler of green threads, the hub and each connection have one. Only its owner touches more
than `now`: the scheduler's thread, the hub's turn, the connection's thread. A timer that is called
off stays in the heap, marked, until its time or until the marked ones are the majority; then all of
those go at once, so that a loop under a long `timeout` costs no memory."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic
from typing import Protocol

__all__ = ["Alarm", "Timer", "Timers"]

_FEW = 64  # so many that were called off are not worth a sweep


class Alarm(Protocol):
    """`go_off` is called by the owner, once, unless it was called off before."""

    off: bool
    """It has gone off, or was called off."""

    def go_off(self) -> object: ...


class Timer:
    """An alarm that calls `go_off`."""

    __slots__ = ("go_off", "off")

    def __init__(self, action: Callable[[], object]) -> None:
        self.go_off = action
        self.off = False


def _nothing() -> None:
    pass


class Timers:
    """Times are seconds of `now`. What is due at the same time goes off in the order of setting."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = monotonic
        self.jump: Callable[[float], bool] | None = None
        """In a test's time: make it `when`, and return True, if everybody waits."""
        self.heap: list[tuple[float, int, Alarm]] = []
        self._order = count()
        self._called_off = 0

    def set(self, when: float, action: Callable[[], object]) -> Timer:
        timer = Timer(action)
        self.add(when, timer)
        return timer

    def add(self, when: float, alarm: Alarm) -> None:
        heappush(self.heap, (when, next(self._order), alarm))

    def call_off(self, alarm: Alarm) -> None:
        if alarm.off:
            return
        alarm.off = True
        if type(alarm) is Timer:
            alarm.go_off = _nothing  # what it held is not kept until its time
        self._called_off += 1
        if self._called_off > _FEW and self._called_off * 2 > len(self.heap):
            self.heap[:] = [entry for entry in self.heap if not entry[2].off]
            heapify(self.heap)
            self._called_off = 0

    def fire(self) -> None:
        """Does what is due."""
        heap, now = self.heap, self.now()
        while heap and heap[0][0] <= now:
            alarm = heappop(heap)[2]
            if alarm.off:
                self._called_off -= 1
            else:
                alarm.off = True
                alarm.go_off()

    def left(self) -> float | None:
        """Seconds until the next one is due, None if there is none; or if that is not told, because
        a test's time stands still while somebody runs."""
        heap = self.heap
        while heap and heap[0][2].off:
            heappop(heap)
            self._called_off -= 1
        if not heap:
            return None
        left = max(0.0, heap[0][0] - self.now())
        if left and self.jump is not None:
            return 0.0 if self.jump(heap[0][0]) else None
        return left

    def keep_to(self, now: Callable[[], float], jump: Callable[[float], bool] | None) -> None:
        """From now on, in this time. What was set for later comes when as much of it has passed."""
        change = now() - self.now()
        self.heap[:] = [(when + change, order, alarm) for when, order, alarm in self.heap]
        self.now, self.jump = now, jump

    def forget(self) -> None:
        self.heap.clear()
        self._called_off = 0
