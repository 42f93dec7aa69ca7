"""Overlapped tasks of a drone (``Pool(n, width=k)``): each coroutine runs as a green thread.

    main thread ──begin──> green threads ──end──> `ended`, `wake` ──> main thread: sends results

The main thread receives, begins and sends. Between these steps it waits for messages, or until
`wake` is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..promises.promise import when_settled
from ..runtime.clock import monotonic

if TYPE_CHECKING:
    from ..green import GreenThread

    # Number, thread, whether the value stays in the drone, start and end.
    EndedTask = tuple[int, GreenThread[Any], bool, float, float]


class Overlap:
    """The tasks of a drone that run beside each other.

    Only the main thread may use it, except where noted.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        """`wake` is called, in any thread, after a task was added to `ended`."""
        self.running: dict[int, GreenThread[Any]] = {}  # in the order in which they began
        self.ended: deque[EndedTask] = deque()
        self._wake = wake

    def begin(self, number: int, coro: Any, keeps: bool) -> None:
        """Run a coroutine, or another object that `green.spawn` takes."""
        from ..green import spawn

        started = monotonic()
        thread = spawn(coro)
        self.running[number] = thread

        def on_end(_: object) -> None:  # called by the scheduler
            self.ended.append((number, thread, keeps, started, monotonic()))
            self._wake()

        when_settled(thread, on_end)

    def take_ended(self) -> list[EndedTask]:
        """Return the tasks that have ended since the last call."""
        taken = []
        while self.ended:
            taken.append(self.ended.popleft())
            del self.running[taken[-1][0]]
        return taken

    def holder(self) -> int:
        """Return the number of the task that does not await and so lets no other run, or 0."""
        from ..green.watchdog import watchdog

        thread = watchdog.holder()
        while thread is not None:
            for number, each in list(self.running.items()):
                if each is thread:
                    return number
            thread = thread.parent
        return 0

    def interrupt(self, numbers: set[int]) -> None:
        """Interrupt those of these tasks that run. Any thread may call it."""
        for number, thread in list(self.running.items()):
            if number in numbers:
                thread.interrupt(KeyboardInterrupt("interrupted by the controller"))
