"""The interface between a pool and the engine that runs its drones.

    PoolState ──────────> Supervisor ──────────> Engine ──────────> DroneHandle
    which drones exist    has them started       starts a drone     messages to one drone
       ^                     │ ^ on_started, on_died, ...    │
       └──────events─────────┘ └─────────────────────────────┘

    start   `Engine.start` returns a handle; the engine calls the supervisor's `on_started` or
            `on_not_started`
    submit  `DroneHandle.send` of a WORK message; `handlers.handle_records` receives the answers
    cancel  `DroneHandle.send` of a CANCEL message
    watch   `DroneHandle.heartbeat`, `is_waiting`, `stall_reason`, `memory`, `last_started`,
            `last_answered`; the engine calls the supervisor's `on_died`
    stop    `DroneHandle.send` of a STOP message; `DroneHandle.kill`

All behaviour that callers see (order, credit, retries, time limits, errors, timelines) is
implemented once, above this interface. An engine is made in the thread that asks for drones, and
takes a snapshot of that process. Unless they say otherwise, its methods are called while holding
the reactor's lock, and must not block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .drone_handle import DroneHandle


class Engine:
    """Starts drones. Sets the dispatcher's `registry`, whose functions are pickled against the
    latest snapshot.
    """

    name: str
    """The engine's name, as `Pool` takes it."""
    runs_here = False
    """Whether tasks run in this process, and see its data as they are."""

    def begin(self) -> None:
        """Prepare to start drones: the first call while holding the reactor's lock."""

    def initializer(
        self, initializer: Callable[..., object], initargs: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the callable and the arguments to use in place of the initializer's. Called in the
        thread that asks for drones.
        """
        return initializer, initargs

    def why_no_forks(self) -> str | None:
        """Return why the drones are not forks of this process, with the cure; None if they are."""
        return f"drones of engine={self.name!r} are none"

    def can_start(self) -> bool:
        """Return False while a new snapshot is being taken, or if there is no room for a drone."""
        return True

    def make_room(self, size: int) -> None:
        """Prepare for `size` drones at a time."""

    def start(self, number: int, name: str, index: int) -> DroneHandle | None:
        """Start the drone with this index. None if that failed, which the engine reports later, by
        a post of the supervisor's `on_start_error`.
        """
        raise NotImplementedError

    def reclaim(self, handle: DroneHandle) -> None:
        """Reuse the resources of a drone that has ended."""

    def give_up_starts(self) -> None:
        """Kill what is still being started, because the pool is being ended."""

    def snapshot(self) -> Any:
        """Take a new snapshot of this process, in the calling thread. Raises `OSError`."""
        raise NotImplementedError

    def adopt(self, snapshot: Any) -> None:
        """Start all further drones from `snapshot`."""
        raise NotImplementedError

    def discard(self, snapshot: Any) -> None:
        """Release a snapshot that is not needed. Called in any thread, without the reactor's
        lock.
        """

    def loss(self) -> BaseException | None:
        """Return the error of the pool if the cluster on which its drones run is gone, from which
        other errors follow. None if the cluster is there, or if there is none.
        """
        return None

    def left_out(self, name: str) -> str | None:
        """Return why `name` of `__main__` is missing from the latest snapshot, or None if the
        reason is unknown. Called without the reactor's lock.
        """
        return None

    def share(self, obj: Any) -> Any:
        """Return a handle of `obj` for many calls. Any thread may call this."""
        raise NotImplementedError

    def frames_address(self, task: int) -> str | None:
        """Return where the frames of a failed task are kept; None if they are not."""
        return None

    def shared_memory(self) -> tuple[int | None, int | None]:
        """Return the bytes of shared memory in use, and their limit; None if the engine has none.
        Any thread may call this.
        """
        return None, None

    def native_threads(self) -> int | None:
        """Return how many threads the native libraries of a drone may use that starts now; 0 if
        they are left alone, None if the engine has no such limit. Any thread may call this.
        """
        return None

    def end_at_once(self) -> None:
        """End what the drones, which were killed, are started by, and all that is left of them.
        Nothing that they send is read any more.
        """

    def end(self) -> None:
        """Release all resources; no drone is left, and none will be started."""
