"""Copies that share a pickle: dicts, lists, sets, small arrays and plain instances.

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
from itertools import chain, repeat
from pickle import dumps, loads
from typing import Any, NamedTuple, TypeVar

from .arrays import is_array_type, is_of_plain_items
from .main_names import MainSnapshot
from .pickling import are_classes_by_value
from .shareable import ITEM_BYTES, MAX_DEPTH, SMALL_TYPES, bytes_together, fits_together

CONTAINER_TYPES = frozenset((dict, list, set))
"""Types whose `copy` is shallow."""
MAX_ARRAY_BYTES = 32 * 1024
"""The largest size of an array that is copied. Copied ones take 0.32, 0.54 and 0.70 of the time for
0.8, 8 and 32 kB (medians of nine rounds in turns); larger ones were not measured.
"""
_ARRAY_BYTES = 64
MAX_MISSES, HIT = 4, 0.25
"""Up to how many values may be tried in vain one by one, and the part of one that a copy makes up
for.
"""

T = TypeVar("T")
Copied = tuple[T, int]
"""A copy, or copies, and about how many bytes these take in a pickle."""


class Instances(Sequence[dict[str, Any]]):
    """The attributes of instances of one class of `__main__`. The names of the attributes are
    pickled once. Arrives as a list of instances or, where the class has changed, as `Unmade`.
    """

    def __init__(self, kind: type | Named, states: list[dict[str, Any]]) -> None:
        self._kind, self.states = kind, states

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: Any) -> Any:
        return self.states[index]

    def __reduce__(self) -> tuple[Any, ...]:
        names = tuple(self.states[0])
        if {names}.issuperset(map(tuple, self.states)):
            rows = [tuple(each.values()) for each in self.states]
            return _received_rows, (self._kind, names, rows)
        return _received, (self._kind, self.states)

    def made(self) -> list[Any]:
        """Return the instances."""
        return _made(self._kind, self.states)


class Unmade:
    """Instances that a class wants to make itself, which may fail."""

    def __init__(self, kind: type | Named, states: Sequence[dict[str, Any]]) -> None:
        self._kind, self._states = kind, states

    def pickles(self) -> list[bytes]:
        """Return the pickles of the instances."""
        return [dumps(Returned(self._kind, each), 5) for each in self._states]

    def pickled_calls(self) -> list[bytes]:
        """Return the pickles of calls with these instances as their only arguments."""
        return [dumps((Returned(self._kind, each),), 5) for each in self._states]


def _new(kind: Any) -> Any:
    if type(kind) is Named:
        kind = kind.find()
    return kind.__new__(kind)


class Named(NamedTuple):
    """A class by its name. A process that has none of the name, any more, cannot `find` it."""

    pickled: bytes

    def find(self) -> Any:
        return loads(self.pickled)


class Returned(NamedTuple):
    """An instance as it was when a call returned it. Arrives as an instance."""

    kind: type | Named
    state: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (self.kind,), self.state


Group = tuple[Instances, list[int]]
"""Instances of one class, and their indices among the values of which they are a part."""


def returned_groups(values: Sequence[Any]) -> list[Group]:
    """Return those of `values` that are `Returned`, by class."""
    groups: dict[type | Named, Group] = {}
    for index, value in enumerate(values):
        if type(value) is Returned:
            kind, state = value
            if kind not in groups:
                groups[kind] = Instances(kind, []), []
            instances, indices = groups[kind]
            instances.states.append(state)
            indices.append(index)
    return [*groups.values()]


def _received(kind: type | Named, states: Iterable[Any]) -> list[Any] | Unmade:
    try:
        found = kind.find() if isinstance(kind, Named) else kind
    except Exception:  # it is raised again when an instance is opened
        found = None
    if not _is_made_by_default(found):
        return Unmade(kind, [*map(dict, states)])
    return _made(found, states)


def _made(kind: Any, states: Iterable[Any]) -> list[Any]:
    made, new = [], object.__new__
    for state in states:
        one: Any = new(kind)
        one.__dict__.update(state)
        made.append(one)
    return made


def _received_rows(
    kind: type | Named, names: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> list[Any] | Unmade:
    # As pickle does, because attributes are found sooner under interned names.
    names = [sys.intern(each) if type(each) is str else each for each in names]
    return _received(kind, map(zip, repeat(names), rows))


def size_of(parts: Collection[Any], depth: int = MAX_DEPTH) -> int:
    """Return about how many bytes `parts` take, or -1 if they may not share a pickle."""
    size = ITEM_BYTES * len(parts)
    for part in parts:
        kind = type(part)
        if kind in SMALL_TYPES:
            continue
        if kind is str or kind is bytes:
            size += len(part)
        elif kind is tuple or kind is frozenset:
            within = size_of(part, depth - 1) if depth > 1 else -1
            if within < 0:
                return -1
            size += within
        elif not fits_together(part):
            return -1
    return size


def size_of_container(value: Any) -> int:
    """Return what `size_of` does, of the parts of a value of `CONTAINER_TYPES`."""
    if type(value) is not dict:
        return size_of(value)
    size = 2 * ITEM_BYTES * len(value)
    for key, part in value.items():
        if type(key) is str:
            size += len(key)
        elif type(key) not in SMALL_TYPES:
            break
        kind = type(part)
        if kind in SMALL_TYPES:
            continue
        if kind is not str:
            break
        size += len(part)
    else:
        return size
    keys, values = size_of(value), size_of(value.values())
    return -1 if keys < 0 or values < 0 else keys + values


class Detacher:
    """Copies values one by one, unless that was in vain for several. Instances, as `Returned`, only
    for a process that shares `snapshot`. Not thread-safe.
    """

    def __init__(self, snapshot: MainSnapshot | None = None) -> None:
        self._snapshot = snapshot
        self._misses = 0.0
        self._plain: dict[type, Named] = {}  # the classes whose instances were copied

    def one(self, value: Any, max_bytes: int) -> Copied[Any] | None:
        """Return a copy that may share a pickle with others, of less than `max_bytes`; or None if
        there is none, or if there was none of several values before.
        """
        if self._misses >= MAX_MISSES:
            return None
        kind = type(value)
        if kind in CONTAINER_TYPES:
            if ITEM_BYTES * len(value) < max_bytes:
                copy = value.copy()
                size = size_of_container(copy)
                if 0 <= size < max_bytes:
                    self._misses -= HIT
                    return copy, size
        elif is_array_type(kind) and _is_small_array(value):
            return value.copy(), value.nbytes + _ARRAY_BYTES
        elif kind in self._plain or self._is_plain(kind):
            state = dict.copy(value.__dict__)  # a tenth of the time of `dict(..)`
            size = size_of_container(state)
            if 0 <= size < max_bytes:
                self._misses -= HIT
                return Returned(self._plain[kind], state), size
        self._misses += 1
        return None

    def _is_plain(self, kind: type) -> bool:
        if self._snapshot is None or not _is_plain(kind, self._snapshot):
            return False
        try:
            self._plain[kind] = Named(dumps(kind, 5))
        except Exception:  # another class has the name now
            return False
        return True


def copies_of(
    values: Sequence[Any], snapshot: MainSnapshot | None = None
) -> Copied[Sequence[Any]] | None:
    """Return copies of `values`, which are all of one type, or None if not all can be copied. The
    copies are a sequence that arrives as a list. Instances are copied only for a process that
    shares `snapshot`.
    """
    kinds = set(map(type, values))
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    copies: Sequence[Any]
    if kind in CONTAINER_TYPES:
        copies = [each.copy() for each in values]
        size = _bytes_of_dicts(copies) if kind is dict else _bytes_of_parts(copies)
    elif is_array_type(kind):
        if not all(map(_is_small_array, values)):
            return None
        copies = [each.copy() for each in values]
        return copies, sum([each.nbytes + _ARRAY_BYTES for each in copies])
    elif snapshot is not None and _is_plain(kind, snapshot):
        states = [dict.copy(each.__dict__) for each in values]
        size = _bytes_of_dicts(states)
        copies = Instances(kind, states)
    else:
        return None
    return None if size < 0 else (copies, size)


def copies_of_rows(rows: Sequence[tuple[Any, ...]]) -> Copied[Sequence[Any]] | None:
    """Return copies of `rows`. In each row one item can change, always in the same column."""
    columns: list[Sequence[Any]] = [*zip(*rows, strict=True)]
    total, copied = 0, False
    for index, column in enumerate(columns):
        size = bytes_together(column)
        if size < 0:
            # Of two, one may refer to the other, or be it.
            found = None if copied else copies_of(column)
            if found is None:
                return None
            columns[index], size = found
            copied = True
        total += size + ITEM_BYTES * len(rows)
    return [*zip(*columns, strict=True)], total


def _is_plain(kind: type, snapshot: MainSnapshot) -> bool:
    """Return whether an instance is pickled as the name of its class, which the other process has
    in `__main__`, and its `__dict__`, and no code of users notices a copy.
    """
    return (
        kind.__module__ == "__main__"
        and type(kind) is type
        and _is_made_by_default(kind)
        and all(getattr(kind, name) is default for name, default in _DEFAULTS.items())
        and not any(hasattr(kind, name) for name in _HOOKS)
        and not any("__class__" in vars(each) for each in kind.__mro__[:-1])
        and kind not in copyreg.dispatch_table
        and not are_classes_by_value()
        and snapshot.holds(kind)
    )


def least_bytes(values: Sequence[Any]) -> int:
    """Return how many bytes containers among `values` take at least, without looking into them."""
    return ITEM_BYTES * sum([len(each) for each in values if type(each) in CONTAINER_TYPES])


def _is_made_by_default(kind: Any) -> bool:
    """Return whether pickle makes an instance of this class without code of users."""
    return (
        isinstance(kind, type)
        and getattr(kind, "__new__", None) is object.__new__
        and not getattr(kind, "__abstractmethods__", ())
        and bool(kind.__dictoffset__)
        and not hasattr(kind, "__setstate__")
        and not any("__slots__" in vars(each) for each in kind.__mro__)
    )


_DEFAULTS = {
    name: getattr(object, name)
    for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__getattribute__")
}
_HOOKS = ("__getnewargs__", "__getnewargs_ex__", "__getattr__", "__del__")


def _is_small_array(value: Any) -> bool:
    """Return whether a copy of this array is pickled as the array is: with its order, and so that
    it can be written to.
    """
    return value.nbytes <= MAX_ARRAY_BYTES and value.flags.carray and is_of_plain_items(value)


def _bytes_of_dicts(dicts: Sequence[dict[Any, Any]]) -> int:
    # Apart, because all keys are strings in most cases.
    keys = _bytes_of_parts(dicts)
    values = -1 if keys < 0 else _bytes_of_parts(map(dict.values, dicts))
    return -1 if values < 0 else keys + values


def _bytes_of_parts(values: Iterable[Iterable[Any]]) -> int:
    parts = [*chain.from_iterable(values)]
    size = bytes_together(parts)
    return -1 if size < 0 else size + ITEM_BYTES * len(parts)
