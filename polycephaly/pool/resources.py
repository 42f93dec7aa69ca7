"""Resources: tasks that need something limited wait until enough of it is free.

    options(resources={"db": 1}) ──> waiting, in order ──all free──> in flight at a drone
                                                                          │
                                        free again <──left flight, for any reason

A task holds its resources from when it is sent until it is answered, given back, or lost with the
drone. A task that was cancelled after it was sent holds them until its drone has stopped it.

While a task waits for resources, tasks behind it that need others, or none, may be sent before it.
Those that need the same ones wait, even if enough is free for them: see `dispatch`. Callers hold
the reactor's lock, unless a method says otherwise.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable

from .dispatcher_base import DispatcherBase
from .drone_handle import DroneHandle
from .interfaces import State
from .task import Task


class Resources:
    """The resources of one pool, and the tasks that wait for them."""

    def __init__(self, dispatcher: DispatcherBase, sizes: Iterable[tuple[str, int]]) -> None:
        self._dispatcher = dispatcher
        self.sizes = dict(sizes)
        self._free = dict(sizes)
        # Keys: what the tasks need, and the only drone that may run them, or None. Each queue is
        # ordered by priority.
        self.queues: dict[tuple[object, object], deque[Task]] = {}
        # The drone kept for the first task whose resources are free and that found no idle drone.
        # Until it begins that task, it is sent nothing from the pool's queue.
        self.reserved: DroneHandle | None = None

    def free(self) -> dict[str, int]:
        """Return how much of each resource no task holds. Any thread may call this."""
        return dict(self._free)

    def add(self, task: Task, *, first: bool = False) -> None:
        """Let `task` wait behind the tasks of its priority; if `first`, before them."""
        queue = self.queues.setdefault((task.resources, task.target), deque())
        insert_in_order(queue, task, first=first)
        self._dispatcher.parked.add(task)
        # The reactor then calls `Dispatcher.dispatch`, even if the pool's queue is empty.
        self._dispatcher.needs_dispatch = True

    def dispatch(self, now: float) -> None:
        """Send tasks whose resources are free. One that any drone may run is not sent before the
        head of the pool's queue if that one comes first, by priority and then by call.

        A task that has to wait for its resources claims them: no task behind it gets any of these.
        Otherwise tasks that need little would overtake it for ever. A task for one drone that is
        busy claims nothing, because it could not use them now.
        """
        while self._send_one(now):
            pass
        for key in [key for key, queue in self.queues.items() if not queue]:
            del self.queues[key]

    def _send_one(self, now: float) -> bool:
        """Send the first task that can be sent. Return whether a task has left its queue, so that
        another try may succeed.
        """
        dispatcher = self._dispatcher
        self.reserved = None
        heads = [queue for queue in self.queues.values() if self._drop_settled(queue)]
        claimed: set[str] = set()
        for queue in sorted(heads, key=lambda queue: _place(queue[0])):
            task = queue[0]
            names = {name for name, _ in task.resources}
            handle = self._taker(task)
            if self._comes_later(task):
                continue
            if names & claimed or any(self._free[name] < needed for name, needed in task.resources):
                if handle is not None or task.target is None:
                    claimed |= names
                continue
            if handle is None:
                self.reserved = self.reserved or task.target or self._next_taker()
                continue
            one = deque([queue.popleft()])
            dispatcher.parked.discard(task)
            for name, amount in task.resources:
                self._free[name] -= amount
            if dispatcher.send(handle, one, 1, now):
                return True
            for name, amount in task.resources:
                self._free[name] += amount
            if not one:  # the task was just cancelled, or waits for kept values
                return True
            queue.appendleft(task)
            dispatcher.parked.add(task)
        return False

    def drain(self, handle: DroneHandle) -> list[Task]:
        """Take the tasks that only `handle` may run, which has died."""
        keys = [key for key in self.queues if key[1] is handle]
        taken = [task for key in keys for task in self._dispatcher.drain(self.queues.pop(key))]
        self._dispatcher.parked.difference_update(taken)
        return taken

    def release(self, task: Task) -> None:
        """Note that `task` has left flight."""
        for name, amount in task.resources:
            self._free[name] += amount
        self._dispatcher.needs_dispatch = True

    def _drop_settled(self, queue: deque[Task]) -> bool:
        """Drop settled tasks from the head; return False if no others are left."""
        while queue and queue[0].promise.done():
            task = queue.popleft()
            self._dispatcher.parked.discard(task)
            self._dispatcher.leave_queue(task)
        return bool(queue)

    def _comes_later(self, task: Task) -> bool:
        """Return whether a task in the pool's queue comes before `task`."""
        queue = self._dispatcher.queue
        return task.target is None and bool(queue) and _place(queue[0]) < _place(task)

    def _taker(self, task: Task) -> DroneHandle | None:
        """Return a drone that can begin `task` at once: the one with its kept values, if possible.

        A task that waited in a busy drone would hold its resources without using them.
        """
        dispatcher = self._dispatcher
        takers = [
            handle
            for handle in dispatcher.handles
            if (task.target is None or task.target is handle)
            and (not handle.in_flight or (task.definition.overlaps and handle.overlapping))
            and handle.can_take(dedicated=task.target is not None)
            and handle.tasks_left(dispatcher.config.max_tasks) > 0
        ]
        return min(
            takers,
            key=lambda each: (each is not task.preferred_drone, each.overlapping),
            default=None,
        )

    def _next_taker(self) -> DroneHandle | None:
        """Return the drone that is expected to be free first."""
        ready = [
            handle
            for handle in self._dispatcher.handles
            if handle.state is State.READY and not handle.unresponsive
        ]
        return min(
            ready, key=lambda each: (each.unknown, each.overlapping, each.load), default=None
        )


def insert_in_order(queue: deque[Task], task: Task, *, first: bool = False) -> None:
    """Insert `task` behind the tasks of the same or a higher priority; if `first`, only behind
    those of a higher priority.
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
