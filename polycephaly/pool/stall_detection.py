"""Stuck: a program that waits for what nobody will do.

    somebody waits for work ── which waits for a promise ── ... ── which only the program can settle ──> a warning, once

Circles of promises are refused when they are closed (promises/promise.py). But nobody can know what
a program will settle by hand; so where a pool has had nothing to run for
`tuning.stall_report_seconds`, and somebody waits, it is said for what. In turns."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from ..promises.promise import Promise
from ..runtime.tuning import tuning
from .task import Task

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["StallDetector"]


class StallDetector:
    """A crew's."""

    def __init__(self, crew: Dispatcher) -> None:
        self._crew = crew
        self._looks = False  # or has said it

    def look_soon(self) -> None:
        """From any thread."""
        if not self._looks:
            self._crew.hub.post(self.look_later)

    def look_later(self) -> None:
        if not self._looks:
            self._looks = True
            self._crew.hub.after(tuning.stall_report_seconds, self._look)

    def _look(self) -> None:
        crew = self._crew
        self._looks = False
        if crew.queue or any(link.flight or link.pinned or link.favoured for link in crew.links):
            if crew.waiting:
                self.look_later()
            return
        seen: set[Any] = set()  # each once, however many wait for it
        for work in [*crew.waiting]:  # others add some meanwhile
            by_hand = by_hand_for(work, seen)
            if by_hand is not None:
                more = f", and {len(crew.waiting) - 1} more wait" if len(crew.waiting) > 1 else ""
                said = f"{crew.plan.name} has nothing to run: {work._named()} waits for {by_hand!r}{more}"
                cure = "somebody has to settle that by hand. If it is this work that should, it waits for itself"
                self._looks = True  # it is said once
                crew.hub.deliver(partial(warnings.warn, f"{said}; {cure}", RuntimeWarning, 2))
                return


def by_hand_for(work: Task, seen: set[Any]) -> Promise[Any] | None:
    """A promise that nobody but the program settles, for which it waits in the end; none that was
    `seen` before."""
    todo: list[Any] = [work]
    while todo:
        each = todo.pop()
        if each not in seen and isinstance(each, Promise) and not each.done():
            seen.add(each)
            needed = list(each._waits_for())
            if not needed and type(each) is Promise:
                return each
            todo += needed
    return None
