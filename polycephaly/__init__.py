"""Run Python functions in forked copies of the current process.

The five most used names are `Drone`, `Pool`, `promise`, `Promise` and `green`. Names are loaded on
first use, so that ``import polycephaly`` costs next to nothing.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if "t" in sys.abiflags:  # many operations are atomic only because one thread runs at a time
    raise ImportError(
        "polycephaly needs a CPython with the global interpreter lock, and this is a "
        "free-threaded build (see sys.abiflags): use the usual build, python3.x instead of "
        "python3.xt"
    )

from .runtime import first_in_child as _first_in_child  # noqa: F401

__all__ = [
    "ChannelClosed",
    "Deadlock",
    "Drone",
    "DroneDied",
    "Graph",
    "ItemLost",
    "Kept",
    "Lost",
    "Pool",
    "Pore",
    "PoreClosed",
    "Promise",
    "RemoteError",
    "Retry",
    "Shared",
    "Stack",
    "Timeline",
    "Waiting",
    "as_completed",
    "connect",
    "doit",
    "flow",
    "gather",
    "green",
    "promise",
    "race",
    "resumed",
    "rng",
    "serve",
]

if TYPE_CHECKING:
    from . import green
    from . import joblib as joblib
    from .engines.remote.client import connect
    from .errors import ChannelClosed, Deadlock, DroneDied, ItemLost, Lost, PoreClosed, RemoteError
    from .pool.drone import Drone, doit, promise
    from .pool.flow import flow
    from .pool.flow_graph import Graph
    from .pool.pool import Pool
    from .pool.retry import Retry
    from .pool.stacks import Stack
    from .pool.waiting import Waiting
    from .promises.combining import as_completed, gather, race
    from .promises.promise import Promise
    from .runtime.random_numbers import rng
    from .runtime.version import __version__ as __version__
    from .server.server import serve
    from .store.kept import Kept
    from .store.pores import Pore
    from .store.resume.summary import resumed
    from .store.shared import Shared
    from .timeline import Timeline


def _warn_of_namesake() -> None:
    """Warn if the other distribution that has a package `polycephaly` is installed in this place.

    Its files overwrite ours, or ours were written over them, and to uninstall it removes ours.
    """
    try:
        beside = os.listdir(os.path.dirname(os.path.dirname(__file__)))
    except OSError:  # in a zip file, or in a program made by PyInstaller
        return
    for name in beside:
        if name.lower().startswith("polycephaly-") and name.endswith(".dist-info"):
            import warnings

            warnings.warn(
                f"{name.removesuffix('.dist-info')} is another project's distribution, whose "
                "package has the same name and the same place as this one; this one is "
                "polycephaly-drones: pip uninstall polycephaly && pip install --force-reinstall "
                "--no-deps polycephaly-drones",
                RuntimeWarning,
                stacklevel=3,
            )


_warn_of_namesake()

_MODULES = {
    "ChannelClosed": "errors",
    "Deadlock": "errors",
    "Drone": "pool.drone",
    "DroneDied": "errors",
    "Graph": "pool.flow_graph",
    "ItemLost": "errors",
    "Kept": "store.kept",
    "Lost": "errors",
    "Pool": "pool.pool",
    "Pore": "store.pores",
    "PoreClosed": "errors",
    "Promise": "promises.promise",
    "RemoteError": "errors",
    "Retry": "pool.retry",
    "Shared": "store.shared",
    "Stack": "pool.stacks",
    "Timeline": "timeline",
    "Waiting": "pool.waiting",
    "__version__": "runtime.version",
    "as_completed": "promises.combining",
    "connect": "engines.remote.client",
    "doit": "pool.drone",
    "flow": "pool.flow",
    "gather": "promises.combining",
    "green": "green",
    "joblib": "joblib",
    "load_ipython_extension": "integrations.jupyter",
    "promise": "pool.drone",
    "race": "promises.combining",
    "resumed": "store.resume.summary",
    "rng": "runtime.random_numbers",
    "serve": "server.server",
    "unload_ipython_extension": "integrations.jupyter",
}


if not TYPE_CHECKING:  # with a `__getattr__`, type checkers would accept any name

    def __getattr__(name):
        path = _MODULES.get(name)
        if path is None:
            raise AttributeError(
                f"module 'polycephaly' has no attribute {name!r}{_cure_of(name)}",
                name=name,
                obj=sys.modules[__name__],
            )
        from importlib import import_module

        if name == "green":
            from ._compat import check_platform

            check_platform(any_unix=True)
            from .runtime.fork_guard import guard

            # A fork in another thread must not fall into this import: the drone would have half of
            # the package, and its locks, for ever.
            with guard:
                import_module(f"{__name__}.green")
        module = import_module(f"{__name__}.{path}")
        value = globals()[name] = module if path == name else getattr(module, name)
        return value


_OF_POOLS = ("apply", "apply_async", "imap", "map", "resize", "shutdown", "starmap", "submit")
_OF_GREEN = (
    "Barrier", "Channel", "Event", "Group", "Lock", "Semaphore", "after", "call", "par", "run",
    "select", "sleep", "spawn", "timeout",
)  # fmt: skip
_OF_OTHERS = {
    "get": "a promise has .value",
    "init": "nothing has to be started before the first Pool",
    "put": "use pool.share(value)",
    "remote": "use pool.promise(f, *args)",
    "wait": "use concurrent.futures.wait(promises)",
}


def _cure_of(name: str) -> str:
    if name in _OF_POOLS:
        return f": a pool has it, pool.{name}(...)"
    if name in _OF_GREEN:
        return f": use polycephaly.green.{name}"
    return f": {_OF_OTHERS[name]}" if name in _OF_OTHERS else ""


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "joblib"])
