"""Leases: tasks of a pool that another process runs for a while.

    queue ──lend──> another process (server/joined.py) ──done──> settled
      ^                │ │ not begun
      ├── come_back <──┘ │ the process is lost
      └───── lost <──────┘ (run again if `retries` allow, otherwise rejected)

A leased task counts as held: the dispatcher does not end before it is settled or returned. All
methods are called while holding the reactor's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from .task import Task

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["Leases"]

# Tasks that cannot be leased, after which the search for others behind them is given up.
_PASSED_MOST = 1000


class Leases:
    """The leased tasks of one pool."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def lend(self, most: int, which: Callable[[Task], bool]) -> list[Task]:
        """Take at most `most` tasks for which `which` is true from the queue. No drone has any of
        them."""
        dispatcher = self._dispatcher
        taken: list[Task] = []
        passed: list[Task] = []
        with suppress(IndexError):
            while len(taken) < most and len(passed) < _PASSED_MOST:
                task = dispatcher.queue.popleft()
                if not task.done():
                    (taken if which(task) else passed).append(task)
        dispatcher.queue.extendleft(reversed(passed))
        for task in taken:
            task.lent = True
        dispatcher.held.update(taken)
        return taken

    def come_back(self, tasks: list[Task]) -> None:
        """Queue tasks again that the other process had not begun."""
        dispatcher = self._dispatcher
        self._take_back(tasks)
        if dispatcher.over:
            dispatcher.lose(
                tasks,
                dispatcher.refusal or RuntimeError(f"{dispatcher.config.name} has ended"),
                again=False,
            )
        else:
            dispatcher.requeue([task for task in tasks if not task.done()])
        dispatcher.look_for_end = True

    def lost(self, tasks: list[Task], error: BaseException) -> None:
        """Handle tasks that the other process may have begun before it was lost."""
        dispatcher = self._dispatcher
        self._take_back(tasks)
        dispatcher.lose(tasks, error, again=not dispatcher.over)
        dispatcher.look_for_end = True

    def settled(self, tasks: list[Task]) -> None:
        self._dispatcher.held.difference_update(tasks)
        self._dispatcher.look_for_end |= self._dispatcher.closing

    def _take_back(self, tasks: list[Task]) -> None:
        for task in tasks:
            task.lent = task.runs_elsewhere = False
        self._dispatcher.held.difference_update(tasks)
