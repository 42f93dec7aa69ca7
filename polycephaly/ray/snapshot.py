"""What `__main__` holds, for drones that are no forks of it.

    names of __main__ ──> functions and classes: their code, with the drone's `__main__` for their globals
                     └──> all else that can be pickled, and is not too large
    the rest ──> left out, with the reason, which a `NameError` tells

So code strings find what the main image has defined, and functions and classes travel as names afterwards, as they do
to a fork. Data are copies: large ones are better shared or pushed.
"""

from __future__ import annotations

import io
import sys
from pickle import loads
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle

from ..wire.capture import MainSnapshot, capture, main_namespace, pickled_size

__all__ = ["Snapshot", "enter", "take"]

LARGEST = 16 << 20
"""Bytes of one name's pickle."""


class Snapshot(NamedTuple):
    """Pickles by name, definitions first."""

    definitions: dict[str, bytes]
    data: dict[str, bytes]
    left_out: dict[str, str]


def take() -> Snapshot:
    """Of this image as it is now."""
    definitions: dict[str, bytes] = {}
    data: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    names = {name: value for name, value in list(main_namespace().items()) if not name.startswith("__")}
    for name, value in names.items():
        if isinstance(value, (FunctionType, type)) and getattr(value, "__module__", None) == "__main__":
            _try(name, definitions, left_out, lambda value=value: _definition(value))
    defined = MainSnapshot(definitions)
    for name, value in names.items():
        if name not in definitions and name not in left_out:
            _try(name, data, left_out, lambda value=value: _captured(value, defined))
    return Snapshot(definitions, data, left_out)


def enter(snapshot: Snapshot) -> MainSnapshot:
    """Puts it into this image's `__main__`; what cannot be opened here is not there."""
    main = main_namespace()
    for name, pickled in {**snapshot.definitions, **snapshot.data}.items():
        try:
            main[name] = loads(pickled)
        except Exception as error:
            print(f"{name} of the main image is not here: {type(error).__name__}: {error}", file=sys.stderr)
    return MainSnapshot([*snapshot.definitions, *snapshot.data])


def _try(name: str, into: dict[str, bytes], left_out: dict[str, str], pickled: Any) -> None:
    try:
        made = pickled()
        _check_size(len(made))
        into[name] = made
    except _TooLarge as error:
        left_out[name] = str(error)
    except Exception as error:
        left_out[name] = f"it cannot be pickled: {type(error).__name__}: {error}"


class _TooLarge(Exception):
    """To be copied to every drone."""


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise _TooLarge(f"it is too large to be copied to every drone ({size >> 20:,} MiB): share or push it")


def _captured(value: Any, defined: MainSnapshot) -> bytes:
    _check_size(pickled_size(value, defined))  # first: what is left out should not cost its memory once more
    return capture(value, defined)


def _definition(value: Any) -> bytes:
    file = io.BytesIO()
    _Definitions(file, protocol=5).dump(value)
    return file.getvalue()


class _Definitions(cloudpickle.Pickler):  # type: ignore[misc]
    """By value, and with the other image's `__main__` for globals."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and obj.__globals__ is main_namespace() and isinstance(reduced, tuple):
            function, args, state, *rest = reduced
            args = (args[0], _Main(), *args[2:])
            slots, attributes = state
            attributes["__globals__"] = {}
            return (function, args, (slots, attributes), *rest)
        return reduced


class _Main:
    """Is unpickled as the other image's `__main__`."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return main_namespace, ()
