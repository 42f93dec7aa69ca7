"""The interface between a pool and the engine that runs its drones.

    Dispatcher ─────────> Supervisor ──────────> Engine ──────────> DroneHandle
    tasks, order, time    which drones exist     starts a drone     messages to one drone
                             ^ on_started, on_died, ...    │
                             └─────────────────────────────┘

    start   `Engine.start` returns a handle; the engine calls the supervisor's `on_started` or
            `on_not_started`
    submit  `DroneHandle.send` of a WORK message; `handlers.handle_message` receives the answers
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
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .drone_handle import DroneHandle
    from .supervisor import Supervisor

__all__ = ["Engine", "Machine", "find_machine"]


class Engine:
    """Starts drones. Sets the supervisor's `registry`, whose functions are pickled against the
    latest snapshot.
    """

    def begin(self) -> None:
        """Prepare to start drones: the first call while holding the reactor's lock."""

    def initializer(
        self, initializer: Callable[..., object], initargs: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the callable and the arguments to use in place of the initializer's. Called in the
        thread that asks for drones.
        """
        return initializer, initargs

    def can_start(self) -> bool:
        """Return False while a new snapshot is being taken, or if there is no room for a drone."""
        return True

    def start(self, number: int, name: str, index: int) -> DroneHandle | None:
        """Start the drone with this index. None if that failed, which has then been reported."""
        raise NotImplementedError

    def reclaim(self, handle: DroneHandle) -> None:
        """Reuse the resources of a drone that has ended."""

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

    def end(self) -> None:
        """Release all resources; no drone is left, and none will be started."""


class Machine(Protocol):
    """The place where drones run: this machine, or a cluster."""

    def default_size(self) -> int:
        """Return the number of drones of a pool, if the program does not give one."""

    def check(self, size: int) -> None:
        """Check that there is room for `size` drones. Raises `OSError` if not, and `ValueError` for
        wrong requirements of the drones.
        """

    def open(self, supervisor: Supervisor) -> Engine:
        """Make the engine, in the thread that asks for drones. Raises `OSError` if the machine
        forbids that.
        """


_OPTION_NAMES_HERE = {
    **dict.fromkeys(
        ("max_workers", "n_jobs", "n_workers", "num_workers", "processes"), "`drones`: Pool(4)"
    ),
    **dict.fromkeys(("context", "mp_context", "start_method"), "`start`: None, 'fork' or 'spawn'"),
    **dict.fromkeys(
        ("max_calls", "max_tasks_per_child", "maxtasksperchild", "worker_lifespan"),
        "`max_tasks`, of a Pool",
    ),
    "max_concurrency": "`width`",
    "max_retries": "`retries`, of a Pool",
    "task_timeout": "`timeout`",
    "thread_name_prefix": "`name`",
}
"""Options of other libraries, and their names here."""

_RAY_OPTIONS = {
    "accelerator_type",
    "address",
    "label_selector",
    "memory",
    "num_cpus",
    "num_gpus",
    "resources",
    "runtime_env",
    "scheduling_strategy",
}


_MACHINES = {
    "local": "polycephaly.engines.local.engine:ThisMachine",
    "inline": "polycephaly.engines.inline:ThisProcess",
    "ray": "polycephaly.engines.ray:connect_cluster",
}
"""By the name of an engine: its function from options to a `Machine`. Loaded when first used."""


def find_machine(name: str, options: dict[str, Any]) -> Machine:
    """Return the machine of the engine called `name`, with `options` of that engine.

    Raises `ValueError` for an unknown engine, `TypeError` for unknown options.
    """
    unexpected = f"unexpected {', '.join(sorted(options))}"
    cures = [
        f"instead of {each}, use {_OPTION_NAMES_HERE[each]}"
        for each in options
        if each in _OPTION_NAMES_HERE
    ]
    if cures:
        raise TypeError(f"{unexpected}: {'; '.join(cures)}")
    if name not in list(_MACHINES):  # a list, because `name` may be unhashable
        raise ValueError(f"unknown engine {name!r}: use {', '.join(map(repr, _MACHINES))}")
    if options and name != "ray":
        hint = " (engine='ray' has)" if options.keys() <= _RAY_OPTIONS else ""
        raise TypeError(f"{unexpected}: the {name} engine has no such option{hint}")
    module, _, attribute = _MACHINES[name].partition(":")
    machine: Machine = getattr(import_module(module), attribute)(**options)
    return machine
