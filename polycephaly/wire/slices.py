"""Encoding of `map`'s slices: many calls of one function in one task, many answers in one outcome.

    calls    range | pickle of (form, fresh, rows)     The range selects the rows to call: the rest
                                                       of a slice is the same bytes, another range.
                                                       A large pickle is in shared memory.
    answers  pickle of (values, indices, error,        `indices` are those of the values that are
             pickles), then, if `pickles` is None,     pickled one by one.
             the values pickled separately
    split    done, rest, state | answers               `done` calls are done, a failed one included;
                                                       `rest` calls will not be begun here.

The grouping must not show. Values that cannot change, and whose pickling cannot fail, are pickled
together. All others are pickled one by one: arguments as they are taken from their iterator,
results as they are returned. Otherwise two calls would share an object, or see changes that a later
call made to it, or fail together.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pickle import dumps, loads
from struct import Struct
from typing import Any, NamedTuple

from ..errors import Malformed
from ..memory.blocks import Store, pristine_view
from ..memory.references import Received, Serialized, load_joined, load_with_buffers
from .main_names import ATOMIC_TYPES
from .pickling import join_payloads, store_pickle

Calls = bytes | Serialized
"""The packed calls of a slice. In shared memory, the range alone is `inline`."""

ITEMS, ROWS, PICKLED = range(3)
"""Forms of rows: a single argument, a tuple of arguments, or the pickle of such a tuple."""

BATCHED_TYPES = frozenset(ATOMIC_TYPES)
"""Types of values that are pickled together, with any others. See also `bytes_together`."""
SMALL_TYPES = BATCHED_TYPES - {str, bytes}
"""The types in `BATCHED_TYPES` whose size need not be checked."""
MIN_SEPARATE_LENGTH = 256
"""Length from which a str or bytes, as argument or result of one call, is pickled by itself."""

_CONTAINERS = frozenset((tuple, frozenset))
_MAX_DEPTH = 4
_ITEM_BYTES = 8
"""Bytes that an item of a tuple counts."""

_RANGE = Struct("<II")
_SPLIT = Struct("<IIB")

ENDED, RUNNING, FAILED = range(3)
"""States of a slice in its drone: ended; running a call, or just past the last one; ended with an
error, after which the remaining calls are not needed.
"""


def bytes_together(values: Sequence[Any]) -> int:
    """Return about how many bytes `values` take beside their number, if they may share a pickle,
    with each other and with others; else -1.
    """
    kinds = set(map(type, values))
    size = depth = 0
    while not kinds.isdisjoint(_CONTAINERS):
        before, depth = len(values), depth + 1
        values = [
            *chain.from_iterable(
                [each if type(each) in _CONTAINERS else (each,) for each in values]
            )
        ]
        size += _ITEM_BYTES * max(0, len(values) - before)
        kinds = set(map(type, values))
        if depth == _MAX_DEPTH:
            return -1
    if kinds <= SMALL_TYPES:
        return size
    for kind in kinds - SMALL_TYPES:
        of_kind = [each for each in values if type(each) is kind] if len(kinds) > 1 else values
        if kind is str or kind is bytes:
            size += sum(map(len, of_kind))
        elif (is_fit := _check_of(kind)) is None or not all(map(is_fit, of_kind)):
            return -1
    return size


def fits_together(value: Any) -> bool:
    """Return whether `value` is of a small, immutable type of the standard library or NumPy, and
    may share a pickle. For tuples and `BATCHED_TYPES`, see `bytes_together`.
    """
    is_fit = _check_of(type(value))
    return is_fit is not None and is_fit(value)


def _check_of(kind: type) -> Callable[[Any], bool] | None:
    """Return a function that tells whether a value of this type may share a pickle; None if none
    may.
    """
    if kind in copyreg.dispatch_table:  # then it is pickled by code of users
        return None
    known = _checks.get(kind)
    if known is None:
        module, name = kind.__module__, kind.__name__
        if module == "numpy":
            known = _is_any if _is_number_of_numpy(kind) else _is_none
        elif module in _MODULES:
            known = _CHECKS.get(name)
        if known is None or getattr(sys.modules.get(module), name, None) is not kind:
            return None
        _checks[kind] = known
    return None if known is _is_none else known


def _is_number_of_numpy(kind: type) -> bool:
    numpy = sys.modules["numpy"]
    return issubclass(kind, (numpy.number, numpy.bool_, numpy.datetime64))


def _is_any(_: Any) -> bool:
    return True


def _is_none(_: Any) -> bool:
    return False


def _is_plain_zone(zone: Any) -> bool:
    """Return whether this is a `timezone` with a name that is no subclass of str."""
    return type(zone.tzname(None)) is str


def _has_plain_zone(value: Any) -> bool:
    zone = value.tzinfo
    return zone is None or (_check_of(type(zone)) is _is_plain_zone and _is_plain_zone(zone))


def _is_plain_uuid(value: Any) -> bool:
    return type(value.int) is int


def _is_plain_path(value: Any) -> bool:
    return {str}.issuperset(map(type, value.__reduce__()[1]))


_checks: dict[type, Callable[[Any], bool]] = {}
"""The types that were met, of those whose values may share a pickle."""
_MODULES = frozenset(("datetime", "decimal", "fractions", "pathlib", "pathlib._local", "uuid"))
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "date": _is_any, "timedelta": _is_any, "Decimal": _is_any, "Fraction": _is_any,
    "datetime": _has_plain_zone, "time": _has_plain_zone, "timezone": _is_plain_zone,
    "UUID": _is_plain_uuid, "PosixPath": _is_plain_path, "PurePosixPath": _is_plain_path,
    "PureWindowsPath": _is_plain_path,
}  # fmt: skip
"""By the name of a type: may a value share a pickle? One that holds an object of users may not."""


def pack_calls(form: int, fresh: bool, rows: Sequence[Any], store: Store | None = None) -> Calls:
    """Pack a slice, in shared memory if it is large and there is a store with room. If `fresh`,
    each call gets a function object of its own.
    """
    head, pickled = _RANGE.pack(0, len(rows)), dumps((form, fresh, rows), 5)
    stored = store_pickle(pickled, store)
    if isinstance(stored, Serialized):
        return Serialized(head, stored.places, stored.written)
    return head + stored


def slice_calls(calls: Calls, start: int, stop: int) -> Calls:
    """Return packed calls `start` to `stop` of `calls`, counted within its range."""
    if isinstance(calls, Serialized):
        return Serialized(_part_of(calls.inline, start, stop), calls.places)
    return _part_of(calls, start, stop)


def _part_of(calls: bytes, start: int, stop: int) -> bytes:
    first, _ = _RANGE.unpack_from(calls)
    return _RANGE.pack(first + start, first + stop) + calls[_RANGE.size :]


def unpack_calls(calls: Any) -> tuple[int, bool, Sequence[Any]]:
    """Return the form, `fresh` and the rows of packed calls, as sent or as received."""
    if isinstance(calls, Serialized):
        ((segment, at, length),) = calls.places
        head, pickled = calls.inline, pristine_view(segment)[at : at + length]
    elif isinstance(calls, Received):
        head, (pickled,) = calls.content()
    else:
        head, pickled = calls, memoryview(calls)[_RANGE.size :]
    first, last = _RANGE.unpack_from(head)
    form, fresh, rows = loads(pickled)
    return form, fresh, rows[first:last]


class Packed(NamedTuple):
    """A value that was pickled by itself."""

    payload: bytes | Serialized


def args_of_call(calls: Calls, index: int) -> Sequence[Any]:
    """Return the arguments of one of the packed calls. Raises the errors of unpickling."""
    form, _, rows = unpack_calls(calls)
    row = loads(rows[index]) if form == PICKLED else rows[index]
    return (row,) if form == ITEMS else row


def pack_answers(
    done: list[Any], packed: bool, error: bytes | None, store: Store
) -> bytes | Serialized:
    """Pack the answers of a slice.

    `done` holds values, some of them `Packed` if `packed` is true. `error` is the error of the call
    after them, if one failed.
    """
    indices = [index for index, value in enumerate(done) if type(value) is Packed] if packed else []
    values = [None if type(value) is Packed else value for value in done] if packed else done
    parts = [done[index].payload for index in indices]
    if {bytes}.issuperset(map(type, parts)):  # nothing in shared memory: this is opened faster
        return join_payloads((values, indices, error, parts), (), store)
    return join_payloads((values, indices, error, None), parts, store)


class Answers:
    """The answers of a slice, as far as its calls were done."""

    _are_pickles = False  # each value was pickled by itself, and `values` are the pickles

    def __init__(self, payload: Any) -> None:
        (self.values, indices, self.error, pickles), parts = load_joined(payload)
        self.opening: int | None = None  # the index of the value that is being unpickled
        # Keeps remote objects alive while handles of them are in the values.
        self.remote_objects: Any = None
        self._parts: dict[int, Any] = {}
        self._are_pickles = bool(pickles) and len(pickles) == len(self.values)
        if self._are_pickles:
            self.values = pickles
        else:
            self._parts = dict(zip(indices, pickles or parts, strict=True))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def plain(self) -> bool:
        """True if `values` holds all answers."""
        return not self._parts and not self._are_pickles

    def __iter__(self) -> Iterator[Any]:
        """Yield each answer once; separately pickled values are unpickled as they are yielded.

        If unpickling raises, the iteration ends with that error.
        """
        return self._open_all() if self._are_pickles else self._open_some()

    def _open_some(self) -> Iterator[Any]:
        take = self._parts.pop
        for index, value in enumerate(self.values):
            part = take(index, None)
            if part is not None:
                try:
                    value = loads(part) if type(part) is bytes else load_with_buffers(*part)
                except BaseException:
                    self.opening = index
                    raise
                yield value
                del value
            else:
                yield value

    def _open_all(self) -> Iterator[Any]:
        for index, pickled in enumerate(self.values):
            try:
                value = loads(pickled)
            except BaseException:
                self.opening = index
                raise
            yield value
            del value
        self._are_pickles = False  # who has taken all values may put them in their places


def split_head(done: int, rest: int, state: int) -> bytes:
    return _SPLIT.pack(done, rest, state)


def unpack_split(payload: Any) -> tuple[int, int, int, Any]:
    """Return done, rest and state, and the packed answers."""
    if len(payload) <= _SPLIT.size:
        raise Malformed(f"a split of {len(payload)} bytes")
    done, rest, state = _SPLIT.unpack_from(payload)
    return done, rest, state, payload[_SPLIT.size :]
