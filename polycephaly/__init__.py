"""Polycephaly: one Python image grows more heads.

The five names for most days are `Drone`, `Pool`, `promise`, `Promise` and `green`.
Names are loaded when first used, so that ``import polycephaly`` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "ChannelClosed",
    "Deadlock",
    "Drone",
    "DroneDied",
    "Pool",
    "Promise",
    "RemoteError",
    "Shared",
    "Timeline",
    "as_completed",
    "connect",
    "doit",
    "gather",
    "green",
    "promise",
    "race",
    "serve",
]

if TYPE_CHECKING:
    from . import green
    from . import joblib as joblib
    from .drone import Drone, doit, promise
    from .errors import ChannelClosed, Deadlock, DroneDied, RemoteError
    from .net.client import connect
    from .net.server import serve
    from .pool import Pool
    from .promises import Promise, as_completed, gather, race
    from .shared import Shared
    from .timeline import Timeline

_HOMES = {
    "ChannelClosed": "errors",
    "Deadlock": "errors",
    "Drone": "drone",
    "DroneDied": "errors",
    "Pool": "pool",
    "Promise": "promises",
    "RemoteError": "errors",
    "Shared": "shared",
    "Timeline": "timeline",
    "as_completed": "promises",
    "connect": "net.client",
    "doit": "drone",
    "gather": "promises",
    "green": "green",
    "joblib": "joblib",
    "load_ipython_extension": "jupyter",
    "promise": "drone",
    "race": "promises",
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
