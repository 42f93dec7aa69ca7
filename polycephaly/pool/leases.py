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

    def __init__(self, crew: Dispatcher) -> None:
        self._crew = crew

    def lend(self, most: int, which: Callable[[Task], bool]) -> list[Task]:
        """Takes from the queue at most so many, of those that `which` is true of: no drone has got
        them."""
        crew = self._crew
        taken: list[Task] = []
        passed: list[Task] = []
        with suppress(IndexError):
            while len(taken) < most and len(passed) < _PASSED_MOST:
                work = crew.queue.popleft()
                if not work.done():
                    (taken if which(work) else passed).append(work)
        crew.queue.extendleft(reversed(passed))
        for work in taken:
            work.lent = True
        crew.held.update(taken)
        return taken

    def come_back(self, works: list[Task]) -> None:
        """They were not begun."""
        crew = self._crew
        self._take_back(works)
        if crew.over:
            crew.lose(
                works, crew.refusal or RuntimeError(f"{crew.plan.name} has ended"), again=False
            )
        else:
            crew.requeue([work for work in works if not work.done()])
        crew.look_for_end = True

    def lost(self, works: list[Task], error: BaseException) -> None:
        """They were perhaps begun: nobody knows what became of them."""
        crew = self._crew
        self._take_back(works)
        crew.lose(works, error, again=not crew.over)
        crew.look_for_end = True

    def settled(self, works: list[Task]) -> None:
        self._crew.held.difference_update(works)
        self._crew.look_for_end |= self._crew.closing

    def _take_back(self, works: list[Task]) -> None:
        for work in works:
            work.lent = work.runs_elsewhere = False
        self._crew.held.difference_update(works)
