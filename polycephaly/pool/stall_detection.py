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

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._looks = False  # or has said it

    def look_soon(self) -> None:
        """From any thread."""
        if not self._looks:
            self._dispatcher.reactor.post(self.look_later)

    def look_later(self) -> None:
        if not self._looks:
            self._looks = True
            self._dispatcher.reactor.after(tuning.stall_report_seconds, self._look)

    def _look(self) -> None:
        dispatcher = self._dispatcher
        self._looks = False
        if dispatcher.queue or any(
            handle.in_flight or handle.dedicated or handle.preferred
            for handle in dispatcher.handles
        ):
            if dispatcher.waiting:
                self.look_later()
            return
        seen: set[Any] = set()  # each once, however many wait for it
        for task in [*dispatcher.waiting]:  # others add some meanwhile
            by_hand = by_hand_for(task, seen)
            if by_hand is not None:
                more = (
                    f", and {len(dispatcher.waiting) - 1} more wait"
                    if len(dispatcher.waiting) > 1
                    else ""
                )
                said = f"{dispatcher.config.name} has nothing to run: {task._named()} waits for {by_hand!r}{more}"
                cure = "somebody has to settle that by hand. If it is this work that should, it waits for itself"
                self._looks = True  # it is said once
                dispatcher.reactor.deliver(
                    partial(warnings.warn, f"{said}; {cure}", RuntimeWarning, 2)
                )
                return


def by_hand_for(task: Task, seen: set[Any]) -> Promise[Any] | None:
    """A promise that nobody but the program settles, for which it waits in the end; none that was
    `seen` before."""
    todo: list[Any] = [task]
    while todo:
        each = todo.pop()
        if each not in seen and isinstance(each, Promise) and not each.done():
            seen.add(each)
            needed = list(each._waits_for())
            if not needed and type(each) is Promise:
                return each
            todo += needed
    return None
