"""The places where drones run, and the options by which programs choose one."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from .dispatcher import Dispatcher
from .engine import Engine
from .mistaken_names import cures_of


class Machine(Protocol):
    """The place where drones run: this machine, or a cluster."""

    def default_size(self) -> int:
        """Return the number of drones of a pool, if the program does not give one."""

    def check(self, size: int, running: int = 0) -> None:
        """Check that there is room for `size` drones, of which so many run already.
        Raises `OSError` if not, and `ValueError` for wrong requirements of the drones.
        """

    def open(self, dispatcher: Dispatcher) -> Engine:
        """Make the engine, in the thread that asks for drones. Raises `OSError` if the machine
        forbids that.
        """


RAY_OPTIONS = (
    "address", "num_cpus", "num_gpus", "resources", "memory", "accelerator_type", "runtime_env",
    "scheduling_strategy", "label_selector",
)  # fmt: skip


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
    cures = cures_of(options)
    if cures:
        raise TypeError(f"{unexpected}: {'; '.join(cures)}")
    if name not in list(_MACHINES):  # a list, because `name` may be unhashable
        raise ValueError(f"unknown engine {name!r}: use {', '.join(map(repr, _MACHINES))}")
    if options and name != "ray":
        hint = " (engine='ray' has)" if options.keys() <= set(RAY_OPTIONS) else ""
        raise TypeError(f"{unexpected}: the {name} engine has no such option{hint}")
    module, _, attribute = _MACHINES[name].partition(":")
    machine: Machine = getattr(import_module(module), attribute)(**options)
    return machine
