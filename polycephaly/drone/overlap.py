"""Overlapped tasks of a drone (``Pool(n, width=k)``): each coroutine runs as a green thread.

    main thread ──begin──> green threads ──end──> `_ended`, eventfd ──> main thread: sends results

The main thread receives, begins and sends. Between these steps it waits for the eventfd as well as
for its sockets.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..green import GreenThread

    # Number, thread, whether the value stays in the drone, start and end.
    EndedTask = tuple[int, GreenThread[Any], bool, float, float]


class Overlap:
    """The tasks of a drone that run beside each other.

    Only the main thread may use it, except where noted.
    """

    def __init__(self) -> None:
        self.running: dict[int, GreenThread[Any]] = {}  # in the order in which they began
        self.wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ended: deque[EndedTask] = deque()

    def begin(self, number: int, coro: Any, keeps: bool) -> None:
        """Run a coroutine, or another object that `green.spawn` takes."""
        from ..green import spawn

        started = monotonic()
        thread = spawn(coro)
        self.running[number] = thread

        def on_end(_: object) -> None:  # called by the scheduler
            self._ended.append((number, thread, keeps, started, monotonic()))
            os.eventfd_write(self.wakeup_fd, 1)

        thread.add_done_callback(on_end)

    def take_ended(self) -> list[EndedTask]:
        """Return the tasks that have ended since the last call.

        The eventfd is cleared first, so a task that ends after that sets it again.
        """
        with suppress(BlockingIOError):
            os.eventfd_read(self.wakeup_fd)
        taken = []
        while self._ended:
            taken.append(self._ended.popleft())
            del self.running[taken[-1][0]]
        return taken

    def interrupt(self, numbers: set[int]) -> None:
        """Interrupt these tasks, or all if 0 is among the numbers. Any thread may call it."""
        for number, thread in list(self.running.items()):
            if number in numbers or 0 in numbers:
                thread.interrupt(KeyboardInterrupt("interrupted by the controller"))
