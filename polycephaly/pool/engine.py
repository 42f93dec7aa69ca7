"""The seam between a crew and whatever runs its drones.

    Crew ── what is done, by whom, when ──> Roster ── which drones there are ──> Engine ── starts one ──> Link
                                              ^                                    │                        │
                                              └──── started, died, not_started ────┘                        │
    handlers.py <── messages (wire/messages.py) ── a drone <── messages: work, cancel, recall, stop ─────────┘

    start     `Engine.start` gives a link; the roster is told by `started` or `not_started` submit
    `Link.send` of a WORK message; answers go to `hearing.hear` cancel    `Link.send` of a CANCEL
    message watch     `Link.pulse`, `waits`, `why_quiet`, `memory`, `started`, `sent`; the roster is
    told of its end by `died` stop      `Link.send` of a STOP message; `Link.kill`

All that callers see (order, credit, retries, time limits, errors, timelines) is made above this
seam, once. Engines are made in the thread that asks for drones, of whose image they take a
snapshot; then all happens in turns of the hub, where nothing may wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .drone_handle import DroneHandle
    from .supervisor import Supervisor

__all__ = ["Engine", "Machine", "machine"]


class Engine(Protocol):
    """Sets the roster's `book`, of definitions made against its newest snapshot."""

    def begin(self) -> None:
        """The first turn: drones will be asked for now."""

    def initializer(
        self, initializer: Callable[..., object], initargs: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """What is to be called in its place, with which arguments."""

    def can_start(self) -> bool:
        """False while a new snapshot is being taken, or when there is no place for one more."""

    def start(self, number: int, name: str, index: int) -> DroneHandle | None:
        """Has a drone started, the one of that index; None where that failed, which was told."""

    def released(self, handle: DroneHandle) -> None:
        """Nothing of it is left."""

    def snapshot(self) -> Any:
        """A new one of this image, taken in the thread that asks for it. Raises `OSError`."""

    def adopt(self, snapshot: Any) -> None:
        """From here on drones are started from it."""

    def discard(self, snapshot: Any) -> None:
        """Nobody wants it any more. In any thread, outside turns."""

    def left_out(self, name: str) -> str | None:
        """Why the newest snapshot has that name of `__main__` not, if that has a reason."""

    def share(self, obj: Any) -> Any:
        """A handle of the value, for many calls. In any thread."""

    def end(self) -> None:
        """No drone is left, or will be started."""


class Machine(Protocol):
    """Where drones run: this machine, or a cluster."""

    def usual(self) -> int:
        """How many drones a pool has there, if nobody says it."""

    def check(self, size: int) -> None:
        """Is there room for so many? Raises `OSError`, or `ValueError` for what was asked of the
        drones."""

    def open(self, supervisor: Supervisor) -> Engine:
        """In the thread that asks for drones. Raises `OSError` where the machine forbids it."""


_TASKS = "`max_tasks`, of a Pool"
_HERE = {
    **dict.fromkeys(
        ("max_workers", "n_jobs", "n_workers", "num_workers", "processes"), "`drones`: Pool(4)"
    ),
    **dict.fromkeys(("context", "mp_context", "start_method"), "`start`: None, 'fork' or 'spawn'"),
    **dict.fromkeys(
        ("max_calls", "max_tasks_per_child", "maxtasksperchild", "worker_lifespan"), _TASKS
    ),
    "max_concurrency": "`width`",
    "max_retries": "`retries`, of a Pool",
    "task_timeout": "`timeout`",
    "thread_name_prefix": "`name`",
}
"""What other libraries call it, and what that is here."""

_OF_RAY = {
    "accelerator_type", "address", "label_selector", "memory", "num_cpus", "num_gpus", "resources", "runtime_env",
    "scheduling_strategy",
}  # fmt: skip


def machine(name: object, options: dict[str, Any]) -> Machine:
    """The engine of that name, with options of its own. Raises `ValueError` for one that there is
    not, `TypeError` for options that it has not."""
    unexpected = f"unexpected {', '.join(sorted(options))}"
    known = [f"{each} is here {_HERE[each]}" for each in options if each in _HERE]
    if known:
        raise TypeError(f"{unexpected}; {'; '.join(known)}")
    if name == "local":
        if options:
            whose = " (engine='ray' has)" if options.keys() <= _OF_RAY else ""
            raise TypeError(f"{unexpected}: the local engine has no such option{whose}")
        from ..engines.local.engine import ThisMachine

        return ThisMachine()
    if name == "ray":
        from ..engines.ray import reach

        return reach(options)
    raise ValueError(f"unknown engine {name!r}: use 'local' or 'ray'")
