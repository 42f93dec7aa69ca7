"""Copies that share a pickle: dicts, lists, sets, small arrays and instances of plain classes.

A value that can change is copied when it is taken from an input, or returned, so that later changes
reach neither the call nor the result. A pickle of its own is such a copy, and takes two to four
times as long as one pickle for many. If the parts of a value cannot change, a shallow copy is
enough: the copies are objects of their own, also behind a pickle that they share.

    {"id": 7, "price": 1.5}   the parts may share a pickle: `bytes_together`
    [{"id": 7}]               they may not, so this value has a pickle of its own
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

from .main_names import MainSnapshot
from .shareable import SMALL_TYPES, bytes_together

CONTAINER_TYPES = frozenset((dict, list, set))
"""Types whose `copy` is shallow."""
MAX_ARRAY_BYTES = 16 * 1024
"""Size from which an array is pickled by itself, because the copy takes longer than that gains."""
_ITEM_BYTES = 8
_ARRAY_BYTES = 64
_NUMERIC_KINDS = frozenset("biufcmMSU")


T = TypeVar("T")
Copied = tuple[T, int]
"""A copy, or copies, and about how many bytes these take in a pickle."""


class Instance(dict[str, Any]):
    """A copy of the attributes of an instance of `kind`, in its place."""

    __slots__ = ("kind",)
    kind: type


class _Instances(Sequence[Instance]):
    """Instances of one class, of whose attributes the names are pickled once. Arrives as a list of
    the instances.
    """

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._instances = instances

    def __len__(self) -> int:
        return len(self._instances)

    def __getitem__(self, index: Any) -> Any:
        return self._instances[index]

    def __reduce__(self) -> tuple[Any, ...]:
        first = self._instances[0]
        names = tuple(first)
        if all(tuple(each) == names for each in self._instances):
            rows = [tuple(each.values()) for each in self._instances]
            return _with_attributes, (first.kind, names, rows)
        return list, (with_instances(self._instances),)


def _real(instance: Instance) -> Any:
    """Return a real instance, made as pickle makes it."""
    made: Any = object.__new__(instance.kind)
    made.__dict__.update(instance)
    return made


def _with_attributes(kind: type, names: Sequence[str], rows: list[tuple[Any, ...]]) -> list[Any]:
    # As pickle does, because attributes are found sooner under interned names.
    names = tuple(map(sys.intern, names))
    made = []
    for row in rows:
        one: Any = object.__new__(kind)
        one.__dict__.update(zip(names, row, strict=True))
        made.append(one)
    return made


def with_instances(values: Sequence[Any]) -> list[Any]:
    """Return `values` with a real instance in place of each `Instance`."""
    return [_real(each) if type(each) is Instance else each for each in values]


def to_pickle(values: Sequence[Any]) -> Sequence[Any]:
    """Return what to pickle so that `with_instances` of `values` arrives."""
    if isinstance(values, _Instances) or Instance not in set(map(type, values)):
        return values
    kinds = {each.kind if type(each) is Instance else None for each in values}
    return with_instances(values) if None in kinds or len(kinds) > 1 else _Instances(values)


def size_of(parts: Collection[Any]) -> int:
    """Return about how many bytes `parts` take, or -1 if they may not share a pickle."""
    size = _ITEM_BYTES * len(parts)
    for part in parts:
        kind = type(part)
        if kind is str or kind is bytes:
            size += len(part)
        elif kind not in SMALL_TYPES:
            size = bytes_together(tuple(parts))
            return size if size < 0 else size + _ITEM_BYTES * len(parts)
    return size


class Detacher:
    """Copies values for a process that shares `snapshot`. Not thread-safe."""

    def __init__(self, snapshot: MainSnapshot) -> None:
        self._snapshot = snapshot
        self.plain: type | None = None  # the class that was found to be plain last

    def one(self, value: Any) -> Copied[Any] | None:
        """Return a copy that may share a pickle with others, or None if there is none."""
        kind = type(value)
        if kind in CONTAINER_TYPES:
            copy = value.copy()
            size = size_of((*copy, *copy.values()) if kind is dict else copy)
            return None if size < 0 else (copy, size)
        if kind is self.plain or self._is_plain(kind):
            copy = Instance(value.__dict__)
            copy.kind = kind
            size = size_of((*copy, *copy.values()))
            return None if size < 0 else (copy, size)
        if _is_array_type(kind) and _is_small_array(value):
            return value.copy(), value.nbytes + _ARRAY_BYTES
        return None

    def all(self, values: Sequence[Any]) -> Copied[Sequence[Any]] | None:
        """Return copies of `values`, which are all of one type, or None if not all can be copied.
        The copies are a sequence that arrives as a list.
        """
        kinds = set(map(type, values))
        if len(kinds) != 1:
            return None
        (kind,) = kinds
        copies: Sequence[Any]
        if kind in CONTAINER_TYPES:
            copies = [each.copy() for each in values]
            parts = _parts_of_dicts(copies) if kind is dict else [*chain.from_iterable(copies)]
        elif _is_array_type(kind):
            if not all(map(_is_small_array, values)):
                return None
            copies = [each.copy() for each in values]
            return copies, sum([each.nbytes + _ARRAY_BYTES for each in copies])
        elif self._is_plain(kind):
            instances = [Instance(each.__dict__) for each in values]
            for each in instances:
                each.kind = kind
            parts = _parts_of_dicts(instances)
            copies = _Instances(instances)
        else:
            return None
        size = bytes_together(parts)
        return None if size < 0 else (copies, size + _ITEM_BYTES * len(parts))

    def rows(self, rows: Sequence[tuple[Any, ...]]) -> Copied[Sequence[Any]] | None:
        """Return copies of `rows`, of whose items one in each can change, in the same place."""
        columns: list[Sequence[Any]] = [*zip(*rows, strict=True)]
        total, copied = 0, False
        for index, column in enumerate(columns):
            size = bytes_together(column)
            if size < 0:
                # Of two, one may refer to the other, or be it.
                found = None if copied else self.all(column)
                if found is None or isinstance(found[0], _Instances):
                    return None
                columns[index], size = found
                copied = True
            total += size + _ITEM_BYTES * len(rows)
        return [*zip(*columns, strict=True)], total

    def _is_plain(self, kind: type) -> bool:
        """Return whether an instance is pickled as the name of its class, which the other process
        has in `__main__`, and its `__dict__`, and no code of users notices a copy.
        """
        if not (
            kind.__module__ == "__main__"
            and type(kind) is type
            and kind.__dictoffset__
            and all(getattr(kind, name) is default for name, default in _DEFAULTS.items())
            and not any(hasattr(kind, name) for name in _HOOKS)
            and not any("__slots__" in vars(each) for each in kind.__mro__)
            and kind not in copyreg.dispatch_table
            and not _registered_by_value()
            and self._snapshot.holds(kind)
        ):
            return False
        self.plain = kind
        return True


_DEFAULTS = {
    name: getattr(object, name)
    for name in ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__getattribute__")
}
_HOOKS = ("__setstate__", "__getnewargs__", "__getnewargs_ex__", "__getattr__", "__del__")


def _registered_by_value() -> bool:
    cloudpickle = sys.modules.get("cloudpickle")
    return cloudpickle is not None and bool(cloudpickle.list_registry_pickle_by_value())


def _is_array_type(kind: type) -> bool:
    return (
        kind.__module__ == "numpy"
        and getattr(sys.modules.get("numpy"), "ndarray", None) is kind
        and kind not in copyreg.dispatch_table
    )


def _is_small_array(value: Any) -> bool:
    """Return whether a copy of this array is pickled as the array is: with its order, and so that
    it can be written to.
    """
    dtype = value.dtype
    return (
        value.nbytes <= MAX_ARRAY_BYTES
        and value.flags.carray
        and dtype.kind in _NUMERIC_KINDS
        and dtype.metadata is None
    )


def _parts_of_dicts(dicts: Iterable[dict[Any, Any]]) -> list[Any]:
    return [*chain.from_iterable(dicts), *chain.from_iterable(map(dict.values, dicts))]
