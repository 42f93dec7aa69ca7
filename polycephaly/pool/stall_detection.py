"""Stall detection: warns if a program waits for a promise that only the program can settle.

    a thread waits for a task ──> which waits for a promise ──> ... ──> a promise settled by hand

A cycle of promises is refused when it is closed (promises/promise.py). But no code can know which
promises a program will settle by hand. So if a pool has had nothing to run for
`tuning.stall_report_seconds`, and a thread waits for a task, one warning names the promise. All
methods but `request_check` are called while holding the reactor's lock.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

from ..promises.promise import Promise, name_of, pending_upstream
from ..runtime.tuning import tuning
from .dispatcher_base import DispatcherBase
from .task import Task


class StallDetector:
    """The stall detection of one pool."""

    def __init__(self, dispatcher: DispatcherBase) -> None:
        self._dispatcher = dispatcher
        self._is_scheduled = False  # a check is scheduled, or the warning was given

    def request_check(self) -> None:
        """Schedule a check. Any thread may call this."""
        if not self._is_scheduled:
            self._dispatcher.post(self.schedule_check)

    def schedule_check(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._dispatcher.call_later(tuning.stall_report_seconds, self._check)

    def _check(self) -> None:
        dispatcher = self._dispatcher
        self._is_scheduled = False
        if (
            dispatcher.inbound
            or dispatcher.assignment.queue
            or any(
                handle.in_flight or handle.dedicated or handle.preferred
                for handle in dispatcher.handles
            )
        ):
            if dispatcher.state.awaiting_inputs:
                self.schedule_check()
            return
        seen: set[Promise[Any]] = set()  # each is visited once, however many tasks wait for it
        # A copy: other threads add tasks meanwhile.
        for task in [*dispatcher.state.awaiting_inputs]:
            promise = unsettled_root(task, seen)
            if promise is not None:
                others = len(dispatcher.state.awaiting_inputs) - 1
                more = f", and {others} more wait" if others > 0 else ""
                name = name_of(task.promise)
                message = (
                    f"{dispatcher.config.name} has nothing to run: {name} waits for "
                    f"{promise!r}{more}; the program has to settle that promise. If the waiting "
                    "task should settle the promise, the task waits for itself"
                )
                self._is_scheduled = True  # the warning is given once
                dispatcher.reactor.deliver(partial(warnings.warn, message, RuntimeWarning, 2))
                return


def unsettled_root(task: Task, seen: set[Promise[Any]]) -> Promise[Any] | None:
    """Return a promise, not `seen` before, for which `task` waits in the end and which only the
    program settles. None if there is none.
    """
    for each in pending_upstream([task.promise], seen):
        if type(each) is Promise and not each._dependencies():
            return each
    return None
