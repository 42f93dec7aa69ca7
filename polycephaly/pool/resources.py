"""Resources: tasks that need what is scarce wait until enough of it is free.

    options(resources={"db": 1}) ──> waiting, in order ──all free──> in flight at a drone
                                                                          │
                                        free again <──left flight, for any reason

A drone holds the resources of a task from sending on, until the task has left flight: was answered,
given back, or lost with the drone. A cancelled task holds them until its drone has stopped it.

While a task waits for resources, tasks behind it that need others, or none, are sent before it. All
methods are called while holding the reactor's lock, unless they say otherwise.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable

from .dispatcher_base import DispatcherBase
from .drone_handle import DroneHandle
from .task import Task

__all__ = ["Resources", "insert_in_order"]


class Resources:
    """The resources of one pool, and the tasks that wait for them."""

    def __init__(self, dispatcher: DispatcherBase, sizes: Iterable[tuple[str, int]]) -> None:
        self._dispatcher = dispatcher
        self.sizes = dict(sizes)
        self._free = dict(sizes)
        # By what a task needs, and the only drone that may run it. Each queue is in order.
        self._queues: dict[tuple[object, object], deque[Task]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def count(self, target: DroneHandle | None) -> int:
        """Return how many tasks wait that only `target` may run, or, if None, any drone."""
        # A copy, because other threads call this.
        return sum(len(queue) for key, queue in list(self._queues.items()) if key[1] is target)

    def queues(self) -> list[deque[Task]]:
        return list(self._queues.values())

    def free(self) -> dict[str, int]:
        """Return how much of each resource no task holds. Any thread may call this."""
        return dict(self._free)

    def add(self, task: Task, *, first: bool = False) -> None:
        """Let `task` wait behind those of its priority, or `first` among them."""
        dispatcher = self._dispatcher
        queue = self._queues.setdefault((task.resources, task.target), deque())
        insert_in_order(queue, task, first=first)
        dispatcher.park(task)
        dispatcher.dedicated_waiting = True

    def dispatch(self, now: float) -> None:
        """Send the tasks whose resources are free, but none before a task that comes first in the
        pool's queue.

        A task that only lacks resources claims those that it needs: no task behind it gets them.
        """
        while self._send_one(now):
            pass
        for key in [key for key, queue in self._queues.items() if not queue]:
            del self._queues[key]

    def _send_one(self, now: float) -> bool:
        dispatcher = self._dispatcher
        heads = [queue for queue in self._queues.values() if self._has_live_head(queue)]
        claimed: set[str] = set()
        for queue in sorted(heads, key=lambda queue: _place(queue[0])):
            task = queue[0]
            names = {name for name, _ in task.resources}
            handle = None if self._comes_later(task) else self._taker(task)
            if handle is None or names & claimed:
                continue
            if not self._are_free(task):
                claimed |= names
                continue
            one = deque([queue.popleft()])
            dispatcher.parked.discard(task)
            for name, amount in task.resources:
                self._free[name] -= amount
            if dispatcher.send(handle, one, 1, now):
                return True
            for name, amount in task.resources:
                self._free[name] += amount
            if not one:  # just cancelled, or it waits for kept values
                return True
            queue.appendleft(task)
            dispatcher.park(task)
        return False

    def have_tasks(self) -> bool:
        """Return whether a task waits that is not settled yet."""
        return any(self._has_live_head(queue) for queue in self._queues.values())

    def drain(self, handle: DroneHandle) -> list[Task]:
        """Take the tasks that only `handle` may run, which has died."""
        keys = [key for key in self._queues if key[1] is handle]
        taken = [task for key in keys for task in self._queues.pop(key)]
        self._dispatcher.parked.difference_update(taken)
        return taken

    def release(self, task: Task) -> None:
        """Note that `task` has left flight."""
        for name, amount in task.resources:
            self._free[name] += amount
        self._dispatcher.dedicated_waiting = True

    def _has_live_head(self, queue: deque[Task]) -> bool:
        """Drop settled tasks from the head; return False if no others are left."""
        while queue and queue[0].done():
            self._dispatcher.parked.discard(queue.popleft())
        return bool(queue)

    def _comes_later(self, task: Task) -> bool:
        """Return whether a task in the pool's queue comes before `task`."""
        queue = self._dispatcher.queue
        return task.target is None and bool(queue) and _place(queue[0]) < _place(task)

    def _are_free(self, task: Task) -> bool:
        return all(self._free[name] >= amount for name, amount in task.resources)

    def _taker(self, task: Task) -> DroneHandle | None:
        """Return a drone that can begin `task` at once: the one with its kept values, if possible.

        A task that waited in a drone would hold its resources idly.
        """
        dispatcher = self._dispatcher
        takers = [
            handle
            for handle in dispatcher.handles
            if (task.target is None or task.target is handle)
            and (not handle.in_flight or handle.overlapping)
            and handle.can_take(dedicated=task.target is not None)
            and handle.tasks_left(dispatcher.config.max_tasks) > 0
        ]
        return min(
            takers,
            key=lambda each: (each is not task.preferred_drone, each.overlapping),
            default=None,
        )


def insert_in_order(queue: deque[Task], task: Task, *, first: bool = False) -> None:
    """Insert `task` behind the tasks of the same or a higher priority; if `first`, only behind
    those of a higher one.
    """
    if first and (not queue or queue[0].priority <= task.priority):
        queue.appendleft(task)
    elif first:
        queue.insert(bisect_left(queue, -task.priority, key=_descending), task)
    elif not queue or queue[-1].priority >= task.priority:
        queue.append(task)
    else:
        queue.insert(bisect_right(queue, -task.priority, key=_descending), task)


def _descending(task: Task) -> int:
    return -task.priority


def _place(task: Task) -> tuple[int, int]:
    """Return the sort key among the tasks of several queues: priority, then order of the calls."""
    return -task.priority, task.call_number
