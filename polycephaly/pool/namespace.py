"""The drone's side of `drone[name]`, `name in drone`, `push` and `pull`.

They are plain functions, called as tasks like any other.
"""

from __future__ import annotations

from typing import Any

from ..errors import NoSuchName
from ..wire.main_names import main_namespace


def push(**names: Any) -> None:
    main_namespace().update(names)


def pull(*names: str) -> tuple[Any, ...]:
    namespace = main_namespace()
    for name in names:
        if name not in namespace:
            raise NoSuchName(f"name {name!r} is not defined", name=name)
    return tuple(namespace[name] for name in names)


def has(name: str) -> bool:
    return name in main_namespace()
