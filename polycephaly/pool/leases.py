"""Lending: work of a crew that another process runs for a while.

    crew.queue ──lend──> another process (server/joined.py) ── done ──> settled
         ^                        │ gone                  ── not begun ──> come_back
         └────────────────────────┴── lost: rejected, or run again where its `retries` allow

What is lent counts as held: the crew does not end before it is settled or back. All in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from .task import Task

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["Leases"]

_PASSED_MOST = (
    1000  # pieces of work that cannot be lent, before it is given up to look for such behind them
)


class Leases:
    """A crew's."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def lend(self, most: int, which: Callable[[Task], bool]) -> list[Task]:
        """Takes from the queue at most so many, of those that `which` is true of: no drone has got
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
        """They were not begun."""
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
        """They were perhaps begun: nobody knows what became of them."""
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
