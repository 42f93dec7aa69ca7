"""Resources: tasks that need something limited wait until enough of it is free.

    options(resources={"db": 1}) ──> waiting, in order ──all free──> in flight at a drone
                                                                          │
                                        free again <──left flight, for any reason

A task holds its resources from when it is sent until it is answered, given back, or lost with the
drone. A task that was cancelled after it was sent holds them until its drone has stopped it.

While a task waits for resources, tasks behind it that need others, or none, may be sent before it.
Those that need the same ones wait, even if enough is free for them: see `take_next`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from .drone_record import DroneRecord
from .queues import insert_in_order
from .task import Task


class Resources:
    """The resources of one pool, and the tasks that wait for them."""

    def __init__(
        self, sizes: Iterable[tuple[str, int]], leave_queue: Callable[[Task], None]
    ) -> None:
        self._leave_queue = leave_queue
        self.sizes = dict(sizes)
        self._free = dict(self.sizes)
        # Keys: what the tasks need, and the only drone that may run them, or None. Each queue is
        # ordered by priority.
        self.queues: dict[tuple[object, object], deque[Task]] = {}
        # The drone kept for the first task whose resources are free and that found no idle drone.
        # Until it begins that task, it is sent nothing from the pool's queue.
        self.reserved: DroneRecord | None = None

    def free(self) -> dict[str, int]:
        """Return how much of each resource no task holds. Any thread may call this."""
        return dict(self._free)

    def add(self, task: Task, *, first: bool = False) -> None:
        """Let `task` wait behind the tasks of its priority; if `first`, before them."""
        queue = self.queues.setdefault((task.resources, task.target), deque())
        insert_in_order(queue, task, first=first)

    def release(self, task: Task) -> None:
        """Note that `task` has left flight."""
        for name, amount in task.resources:
            self._free[name] += amount

    def queues_of(self, drone: DroneRecord | None) -> list[deque[Task]]:
        """Return the queues of the tasks that only `drone` may run; None: that any may run."""
        return [queue for key, queue in self.queues.items() if key[1] is drone]

    def remove_queues(self, drone: DroneRecord) -> list[deque[Task]]:
        """Take the queues of the tasks that only `drone` may run, which has died."""
        if self.reserved is drone:
            self.reserved = None
        return [self.queues.pop(key) for key in [*self.queues] if key[1] is drone]

    def take_next(
        self,
        queue: deque[Task],
        find_taker: Callable[[Task], DroneRecord | None],
        next_free: Callable[[], DroneRecord | None],
    ) -> tuple[DroneRecord, Task] | None:
        """Take the first task that can begin, with its resources, and the drone for it. None if
        there is none. One that any drone may run is not taken before the head of `queue`, the
        pool's, if that one comes first, by priority and then by call.

        A task that has to wait for its resources claims them: no task behind it gets any of these.
        Otherwise tasks that need little would overtake it for ever. A task for one drone that is
        busy claims nothing, because it could not use them now.
        """
        self.reserved = None
        claimed: set[str] = set()
        for waiting in sorted(self._heads(), key=lambda each: _sort_key(each[0])):
            task = waiting[0]
            if task.target is None and queue and _sort_key(queue[0]) < _sort_key(task):
                continue
            names = {name for name, _ in task.resources}
            drone = find_taker(task)
            if names & claimed or any(self._free[name] < needed for name, needed in task.resources):
                if drone is not None or task.target is None:
                    claimed |= names
            elif drone is None:
                self.reserved = self.reserved or task.target or next_free()
            else:
                for name, amount in task.resources:
                    self._free[name] -= amount
                return drone, waiting.popleft()
        return None

    def _heads(self) -> list[deque[Task]]:
        """Drop settled tasks from the heads of the queues, and return those that have others."""
        for key, queue in [*self.queues.items()]:
            while queue and queue[0].promise.done():
                self._leave_queue(queue.popleft())
            if not queue:
                del self.queues[key]
        return [*self.queues.values()]


def _sort_key(task: Task) -> tuple[int, int]:
    """Return the sort key among the tasks of several queues: priority, then order of the calls."""
    return -task.priority, task.call_number
