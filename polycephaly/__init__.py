"""Polycephaly: one Python image grows more heads.

The five names for most days are `Drone`, `Pool`, `promise`, `Promise` and `green`.
Names are loaded when first used, so that ``import polycephaly`` costs next to nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if "t" in sys.abiflags:  # much here is atomic only while one thread runs at a time
    raise ImportError(
        "polycephaly needs a CPython with the global interpreter lock, and this is a free-threaded build of it "
        "(sys.abiflags says so): use the usual build, python3.x instead of python3.xt"
    )

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
    "Shared",
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
    "serve",
]

if TYPE_CHECKING:
    from . import green
    from . import joblib as joblib
    from .combining import as_completed, gather, race
    from .dataflow import flow
    from .drone import Drone, doit, promise
    from .errors import ChannelClosed, Deadlock, DroneDied, ItemLost, Lost, PoreClosed, RemoteError
    from .graph import Graph
    from .kept import Kept
    from .net.client import connect
    from .net.server import serve
    from .pool import Pool
    from .pores import Pore
    from .promises import Promise
    from .shared import Shared
    from .timeline import Timeline
    from .waiting import Waiting

_HOMES = {
    "ChannelClosed": "errors",
    "Deadlock": "errors",
    "Drone": "drone",
    "DroneDied": "errors",
    "Graph": "graph",
    "ItemLost": "errors",
    "Kept": "kept",
    "Lost": "errors",
    "Pool": "pool",
    "Pore": "pores",
    "PoreClosed": "errors",
    "Promise": "promises",
    "RemoteError": "errors",
    "Shared": "shared",
    "Timeline": "timeline",
    "Waiting": "waiting",
    "as_completed": "combining",
    "connect": "net.client",
    "doit": "drone",
    "flow": "dataflow",
    "gather": "combining",
    "green": "green",
    "joblib": "joblib",
    "load_ipython_extension": "jupyter",
    "promise": "drone",
    "race": "combining",
    "serve": "net.server",
    "unload_ipython_extension": "jupyter",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'polycephaly' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"{__name__}.{home}")
    value = globals()[name] = module if home == name else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
