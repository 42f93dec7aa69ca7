"""Polycephaly: one Python image grows more heads.

The five names for most days are `Drone`, `Pool`, `promise`, `Promise` and (from a later release) `green`.
Names are loaded when first used, so that ``import polycephaly`` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Drone",
    "DroneDied",
    "Pool",
    "Promise",
    "RemoteError",
    "as_completed",
    "doit",
    "gather",
    "promise",
    "race",
]

if TYPE_CHECKING:
    from .drone import Drone, doit, promise
    from .errors import DroneDied, RemoteError
    from .pool import Pool
    from .promises import Promise, as_completed, gather, race

_HOMES = {
    "Drone": "drone",
    "DroneDied": "errors",
    "Pool": "pool",
    "Promise": "promises",
    "RemoteError": "errors",
    "as_completed": "promises",
    "doit": "drone",
    "gather": "promises",
    "promise": "drone",
    "race": "promises",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'polycephaly' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
