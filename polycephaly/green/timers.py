"""The scheduler's alarm clock: a heap of things to do at some time.

Only the scheduler's owner touches it. A timer that is called off stays in the heap, marked, until its time or
until the marked ones are the majority; then all of those go at once, so that a loop under a long `timeout` costs
no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic

__all__ = ["Timer", "Timers"]

_FEW = 64  # so many that were called off are not worth a sweep


class Timer:
    """`action` is called by the scheduler's owner once, unless it was called off before."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], object]) -> None:
        self.action: Callable[[], object] | None = action


class Timers:
    """Times are `time.monotonic` seconds. What is due at the same time goes off in the order of setting."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._called_off = 0

    def set(self, when: float, action: Callable[[], object]) -> Timer:
        timer = Timer(action)
        heappush(self.heap, (when, next(self._order), timer))
        return timer

    def call_off(self, timer: Timer) -> None:
        if timer.action is None:
            return
        timer.action = None
        self._called_off += 1
        if self._called_off > _FEW and self._called_off * 2 > len(self.heap):
            self.heap[:] = [entry for entry in self.heap if entry[2].action is not None]
            heapify(self.heap)
            self._called_off = 0

    def fire(self) -> None:
        """Does what is due."""
        heap, now = self.heap, monotonic()
        while heap and heap[0][0] <= now:
            timer = heappop(heap)[2]
            action, timer.action = timer.action, None
            if action is None:
                self._called_off -= 1
            else:
                action()

    def left(self) -> float | None:
        """Seconds until the next one is due, None where there is none."""
        heap = self.heap
        while heap and heap[0][2].action is None:
            heappop(heap)
            self._called_off -= 1
        return max(0.0, heap[0][0] - monotonic()) if heap else None

    def forget(self) -> None:
        self.heap.clear()
        self._called_off = 0
