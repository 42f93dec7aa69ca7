"""The names of `__main__` that two processes share: `MainSnapshot`.

A forked drone holds the content that `__main__` had when the snapshot was taken. So an object that
was bound to a name then, and still is, travels as that name.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any
from weakref import ref

_FORGOTTEN = object()
ATOMIC_TYPES = (type(None), bool, int, float, complex, str, bytes)
"""Immutable types: for these, the same object has the same value for ever."""


def goes_with_calls(value: object) -> bool:
    """Return whether `value` must be sent with each call, though the drone has the same name: a
    handle or a channel, whose copy in a forked process would not work.
    """
    return hasattr(type(value), "_goes_with_calls")


class MainSnapshot:
    """The content of `__main__` at one moment.

    Objects that allow weak references are referenced weakly. All others (lists, dicts, tuples,
    texts, numbers) are kept alive by the snapshot, because their `id` alone could be reused.
    """

    may_shrink = False
    """True if a name may be missing later that was there before."""

    def __init__(self, names: Iterable[str] | None = None, left_out: Iterable[str] = ()) -> None:
        """Record `names` only, if given: a spawned process passes the names that it found when it
        imported the main module, or that were sent to that process. For the `left_out` names, only
        a change can be detected.
        """
        main = main_namespace()

        def held(some: Iterable[str]) -> dict[str, Any]:
            return {n: hold(main[n]) for n in some if n in main and not n.startswith("__")}

        self._values = held(list(main) if names is None else names)
        self._left_out = held(left_out)

    def forget_values(self) -> None:
        """Forget what the names were bound to, because no process is left that has it. From then on
        everything of `__main__` counts as changed.

        Otherwise a list of promises in a global name would be kept alive by the snapshot of the
        next pool, for as long as anything refers to that pool.
        """
        self._values = dict.fromkeys(self._values, _FORGOTTEN)
        self._left_out = dict.fromkeys(self._left_out, _FORGOTTEN)

    def add(self, pushed: Mapping[str, object]) -> None:
        """Record names that were pushed to the other process, as far as `__main__` has the same
        objects: functions that read these need not bring them.
        """
        main = main_namespace()
        for name, value in pushed.items():
            # A definition that was pushed is a copy, whose globals are not those of `__main__`.
            if main.get(name, self) is value and not isinstance(value, (FunctionType, type)):
                self._values[name] = hold(value)

    def has(self, name: str) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        return list(self._values)

    def unchanged(self, name: str, value: object) -> bool:
        """Return whether `value` was bound to `name` at the snapshot."""
        return self._is_same(self._values.get(name, self), value)

    def _is_same(self, held: object, value: object) -> bool:
        if isinstance(held, Weak):
            held = held()
            return held is not None and held is value
        return held is value or (
            type(value) in ATOMIC_TYPES
            and type(held) is type(value)
            and held == value
            # -0.0 equals 0.0
            and (not isinstance(value, float | complex) or repr(held) == repr(value))
        )

    def is_current(self) -> bool:
        """Return whether `__main__` has the same names and objects as at the snapshot.

        The content of lists and other containers is not compared.
        """
        main = main_namespace()
        names = [name for name in list(main) if not name.startswith("__")]
        held = self._values | self._left_out
        return len(names) == len(held) and all(
            self._is_same(held.get(name, self), main.get(name)) for name in names
        )

    def holds(self, definition: Any) -> bool:
        """Return whether this function or class of `__main__` may be pickled by reference.

        The definition must still be bound to its own name.
        """
        path = name_of(definition).split(".")
        if "<locals>" in path or not self.has(path[0]):
            return False
        found = main_namespace().get(path[0])
        if not self.unchanged(path[0], found):
            return False
        for step in path[1:]:
            found = getattr(found, step, None)
        return found is definition

    def goes_by_reference(self, definition: Any) -> bool:
        """Return whether a process with the snapshot finds `definition` by its module and name."""
        module = getattr(definition, "__module__", None)
        if module == "__main__":
            return self.holds(definition)
        found: Any = sys.modules.get(module or "")
        for step in name_of(definition).split("."):
            found = getattr(found, step, None)
        return found is definition


def name_of(definition: Any) -> str:
    """Return the name within its module. Type variables and aliases have no `__qualname__`."""
    name: str = getattr(definition, "__qualname__", "") or getattr(definition, "__name__", "")
    return name


class _CommonSnapshot(MainSnapshot):
    """The content that several snapshots have in common."""

    may_shrink = True

    def __init__(self, snapshots: Sequence[MainSnapshot]) -> None:
        self._snapshots = snapshots

    def has(self, name: str) -> bool:
        return bool(self._snapshots) and all(each.has(name) for each in self._snapshots)

    def unchanged(self, name: str, value: object) -> bool:
        return bool(self._snapshots) and all(
            each.unchanged(name, value) for each in self._snapshots
        )


def common_snapshot() -> MainSnapshot:
    """Return the content shared with the parent process and with all started processes."""
    snapshots = [each() for each in shared_snapshots]
    return snapshots[0] if len(snapshots) == 1 else _CommonSnapshot(snapshots)


shared_snapshots: list[Callable[[], MainSnapshot]] = []
"""Functions that return the snapshots which this process shares with others."""


def main_namespace() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


class Weak(ref[Any]):
    """A weak reference of this package; a value of the user may be a weak reference itself."""

    __slots__ = ()


def hold(value: Any) -> Any:
    """Return a `Weak` of `value`, or `value` itself if it allows no weak reference."""
    try:
        return Weak(value)
    except TypeError:
        return value


FreeNames = dict[int, tuple[dict[str, Any], set[str]]]
"""By `id`, the namespaces of functions that came by value, each with the names that its functions
use and have not brought.
"""


class _Collected(threading.local):
    """`free_names` is filled while this thread unpickles, unless it is None."""

    free_names: FreeNames | None = None


_collected = _Collected()


@contextmanager
def collected_free_names() -> Iterator[FreeNames]:
    """Yield the free names of the functions that this thread unpickles in this block."""
    found: FreeNames = {}
    _collected.free_names = found
    try:
        yield found
    finally:
        _collected.free_names = None


def bind_free_names(function: FunctionType, captured: Iterable[str]) -> None:
    """Give a function that was just unpickled the names that it has not brought, as far as this
    process's `__main__` has them.

    Functions that came together share a namespace, and another one may bring such a name.
    """
    namespace = function.__globals__
    missing = set(global_names(function.__code__)) - namespace.keys()
    bind_names(namespace, missing)
    if _collected.free_names is not None:
        _, free = _collected.free_names.setdefault(id(namespace), (namespace, set()))
        free.difference_update(captured)
        free |= missing


def bind_names(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Give these names the values that they have in this process's `__main__`."""
    main = main_namespace()
    for name in names:
        if name in main:
            namespace[name] = main[name]


def global_names(code: CodeType) -> Iterator[str]:
    # Globals and attributes alike: the name of an attribute costs one look-up.
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from global_names(constant)
