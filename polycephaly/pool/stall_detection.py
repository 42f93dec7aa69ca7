"""Stall detection: warns if a program waits for a promise that only the program can settle.

    a thread waits for a task ──> which waits for a promise ──> ... ──> a promise settled by hand

A cycle of promises is refused when it is closed (promises/promise.py). But no code can know which
promises a program will settle by hand. So if a pool has had nothing to run for
`tuning.stall_report_seconds`, and a thread waits for a task, one warning names the promise. All
methods but `look_soon` are called while holding the reactor's lock."""

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
    """The stall detection of one pool."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._looks = False  # a look is scheduled, or the warning was given

    def look_soon(self) -> None:
        """Schedule a look. Any thread may call this."""
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
        seen: set[Any] = set()  # each is visited once, however many tasks wait for it
        for task in [*dispatcher.waiting]:  # a copy, because other threads add tasks meanwhile
            by_hand = by_hand_for(task, seen)
            if by_hand is not None:
                more = (
                    f", and {len(dispatcher.waiting) - 1} more wait"
                    if len(dispatcher.waiting) > 1
                    else ""
                )
                said = f"{dispatcher.config.name} has nothing to run: {task._named()} waits for {by_hand!r}{more}"
                cure = "somebody has to settle that by hand. If it is this work that should, it waits for itself"
                self._looks = True  # the warning is given once
                dispatcher.reactor.deliver(
                    partial(warnings.warn, f"{said}; {cure}", RuntimeWarning, 2)
                )
                return


def by_hand_for(task: Task, seen: set[Any]) -> Promise[Any] | None:
    """Return a promise, not `seen` before, for which `task` waits in the end and which only the
    program settles. None if there is none."""
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
