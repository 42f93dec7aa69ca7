"""Coroutine functions that a drone overlaps (``Pool(n, width=k)``): each runs as a green thread.

    main thread ──begin──> green threads ──end──> `ended`, and the bell ──> main thread: takes them, sends the results

The main thread hears, begins and sends; between these it waits for the bell as well as for its
sockets."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..green import GreenThread

__all__ = ["Ended", "Overlap"]


class Ended(NamedTuple):
    """A task that has ended, and the times when it began and ended (`time.monotonic`)."""

    number: int
    thread: GreenThread[Any]
    started: float
    finished: float


class Overlap:
    """The tasks of a drone that run beside each other. The main thread's, where nothing else is
    said."""

    def __init__(self) -> None:
        self.running: dict[int, GreenThread[Any]] = {}  # in the order in which they began
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ended: deque[Ended] = deque()

    def begin(self, number: int, coro: Any) -> None:
        """Runs a coroutine, or what else `green.spawn` takes."""
        from ..green import spawn

        started = monotonic()
        thread = spawn(coro)
        self.running[number] = thread

        def ended(_: object) -> None:  # called by the scheduler
            self._ended.append(Ended(number, thread, started, monotonic()))
            os.eventfd_write(self.bell, 1)

        thread._hook(ended)

    def take_ended(self) -> list[Ended]:
        """Those that have ended since the last time. The bell is stilled first: what ends after
        that rings again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        taken = []
        while self._ended:
            each = self._ended.popleft()
            del self.running[each.number]
            taken.append(each)
        return taken

    def interrupt(self, numbers: set[int]) -> None:
        """From any thread; 0 is for all."""
        for number, thread in list(self.running.items()):
            if number in numbers or 0 in numbers:
                thread._interrupt(KeyboardInterrupt("interrupted by the controller"))
