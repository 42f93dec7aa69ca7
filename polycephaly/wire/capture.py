"""Pickling across images that share a past.

    value ──> plain C pickler ──────────────────────────────> bytes          (most values: under 1 us)
                 │ fails, or names something of __main__
                 └──> Capture, a cloudpickle.Pickler ───────> bytes
                         what `__main__` held at the snapshot: by reference
                         all else that cannot be imported:     by value

A forked drone holds what `__main__` held when the snapshot was taken, so a function or class of that time
travels as its name, even if it was typed at a prompt. What was defined, or bound anew, since then travels by
value. `MainSnapshot` knows which is which; both ends have one, since results travel under the same rule.

The plain pickler would write `__main__.f` for a function that the other side never saw. So its output is
kept only where the bytes `__main__` do not occur in it; a false alarm costs time, never correctness.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from pickle import dumps
from types import FunctionType
from typing import Any
from weakref import ref

import cloudpickle

__all__ = ["ATOMS", "MainSnapshot", "capture"]

ATOMS = (type(None), bool, int, float, complex, str, bytes)
"""Immutable types: for these, the same object is the same value for ever."""


class MainSnapshot:
    """What `__main__` held at one moment.

    Functions, classes and whatever else allows it are held weakly, so that the snapshot keeps nothing alive
    but containers that cannot be (list, dict, set): those it keeps, since an `id` alone may be used again.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        """Of `names` only, where given: what a spawned image found when it imported the main module."""
        self._held: dict[str, Any] = {}
        main = main_namespace()
        for name in list(main) if names is None else names:
            if name in main and not name.startswith("__"):
                self._held[name] = _hold(main[name])

    def has(self, name: str) -> bool:
        return name in self._held

    def names(self) -> list[str]:
        return list(self._held)

    def unchanged(self, name: str, value: object) -> bool:
        """Was `value` bound to `name` then?"""
        held = self._held.get(name, self)
        if isinstance(held, ref):
            held = held()
            return held is not None and held is value
        return held is value or (isinstance(value, ATOMS) and type(held) is type(value) and held == value)

    def holds(self, definition: Any) -> bool:
        """May this function or class of `__main__` go by reference, being there under its own name?"""
        path = getattr(definition, "__qualname__", "").split(".")
        if "<locals>" in path or not self.has(path[0]):
            return False
        found = main_namespace().get(path[0])
        if not self.unchanged(path[0], found):
            return False
        for step in path[1:]:
            found = getattr(found, step, None)
        return found is definition


def main_namespace() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


def capture(value: object, snapshot: MainSnapshot) -> bytes:
    """`value` as it is now, as bytes for an image that shares `snapshot`.

    Raises whatever the value's own pickling raises.
    """
    try:
        plain = dumps(value, 5)
    except Exception:  # a lambda, a local class, ...: only the by-value pickler can tell what is really wrong
        plain = b"__main__"
    if b"__main__" not in plain:
        return plain
    target = io.BytesIO()
    _Capture(target, snapshot).dump(value)
    return target.getvalue()


class _Capture(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, target: io.BytesIO, snapshot: MainSnapshot) -> None:
        super().__init__(target, protocol=5)
        self._snapshot = snapshot

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (type, FunctionType)):
            return super().reducer_override(obj)
        if getattr(obj, "__module__", None) == "__main__" and self._snapshot.holds(obj):
            return NotImplemented  # the plain way: by reference
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and obj.__globals__ is main_namespace():
            self._leave_shared_globals(reduced)
        return reduced

    def _leave_shared_globals(self, reduced: Any) -> None:
        """Of a by-value function's captured globals, what the other image has anyway goes as its name.

        Without this, ``lambda i: table[i]`` would carry the whole table each time.
        """
        if not (isinstance(reduced, tuple) and len(reduced) == 6 and isinstance(reduced[2], tuple)):
            return  # cloudpickle found it importable
        captured = reduced[2][1].get("__globals__", {})
        for name, value in captured.items():
            if self._snapshot.unchanged(name, value):
                captured[name] = _Shared(name)


class _Shared:
    """Is pickled as a name, and unpickled as what the other image's `__main__` has under it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _look_up, (self._name,)


def _look_up(name: str) -> Any:
    looked_up.append(name)
    try:
        return main_namespace()[name]
    except KeyError:
        raise NameError(f"name {name!r} is not defined: it was deleted in this drone", name=name) from None


looked_up: list[str] = []
"""Names that were found in `__main__` while unpickling: who wants to know clears it before."""


def _hold(value: Any) -> Any:
    try:
        return ref(value)
    except TypeError:
        return value
