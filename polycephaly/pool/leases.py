"""Leases: tasks of a pool that another process runs for a while.

    queue ──lease──> another process (server/joined.py) ──done──> on_settled
      ^                        │ │ not begun
      ├── requeue_unstarted <──┘ │ the process is lost
      └────────── on_lost <──────┘ (run again if `retries` allow, otherwise rejected)

A leased task counts as parked: the dispatcher does not end before it is settled or returned. All
functions are called while holding the reactor's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from .dispatcher_base import DispatcherBase
from .task import Task
from .task_state import ENDING

# Tasks that cannot be leased, after which the search for others behind them is given up.
_MAX_SKIPPED_TASKS = 1000


def lease(
    dispatcher: DispatcherBase, max_tasks: int, can_lease: Callable[[Task], bool]
) -> list[Task]:
    """Take at most `max_tasks` tasks for which `can_lease` is true from the queue. No drone has
    any of them.
    """
    dispatcher.queue_inbound()
    taken: list[Task] = []
    skipped: list[Task] = []
    with suppress(IndexError):
        while len(taken) < max_tasks and len(skipped) < _MAX_SKIPPED_TASKS:
            task = dispatcher.assignment.queue.popleft()
            if task.promise.done():
                dispatcher.assignment.leave_queue(task)
            else:
                (taken if can_lease(task) else skipped).append(task)
    dispatcher.assignment.queue.extendleft(reversed(skipped))
    dispatcher.state.leased(taken)
    return taken


def requeue_unstarted(dispatcher: DispatcherBase, tasks: list[Task]) -> None:
    """Queue tasks again that the other process had not begun."""
    dispatcher.state.lease_ended(tasks)
    if dispatcher.has_ended:
        error = dispatcher.refusal or RuntimeError(f"{dispatcher.config.name} has ended")
        dispatcher.reject_or_retry(tasks, error, may_retry=False)
    else:
        dispatcher.requeue([task for task in tasks if not task.promise.done()])


def on_lost(dispatcher: DispatcherBase, tasks: list[Task], error: BaseException) -> None:
    """Handle tasks that the other process may have begun before it was lost."""
    dispatcher.state.lease_ended(tasks)
    dispatcher.reject_or_retry(tasks, error, may_retry=not dispatcher.has_ended)


def on_settled(dispatcher: DispatcherBase, tasks: list[Task]) -> None:
    """Forget tasks that are settled, or were given back to the pool that they came from."""
    for task in tasks:
        task.state = ENDING
        dispatcher.unsettled.pop(task, None)
    dispatcher.state.parked.difference_update(tasks)
