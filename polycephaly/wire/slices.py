"""Encoding of `map`'s slices: many calls of one function in one task, many answers in one outcome.

    calls    range | pickle of (form, fresh, rows)     The range selects the rows to call: the rest
                                                       of a slice is the same bytes, another range.
    answers  pickle of (values, indices, error),       `indices` are those of the values that are
             then the values pickled separately        pickled one by one.
    split    done, rest, state | answers               `done` calls are done, a failed one included;
                                                       `rest` calls will not be begun here.

The grouping must not show. Values that cannot change are pickled together. All others are pickled
one by one: arguments as they are taken from their iterator, results as they are returned. Otherwise
two calls would share an object, or see changes that a later call made to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pickle import dumps, loads
from struct import Struct
from typing import Any, NamedTuple

from ..errors import Malformed
from ..memory.blocks import Store
from ..memory.references import Serialized, load_joined, load_with_buffers
from .main_names import ATOMIC_TYPES
from .pickling import join_payloads

ITEMS, ROWS, PICKLED = range(3)
"""Forms of rows: a single argument, a tuple of arguments, or the pickle of such a tuple."""

BATCHED_TYPES = frozenset(ATOMIC_TYPES)
"""Types of values that are pickled together."""
SMALL_TYPES = BATCHED_TYPES - {str, bytes}
"""The types in `BATCHED_TYPES` whose size need not be checked."""
MIN_SEPARATE_LENGTH = 256
"""Length from which a str or bytes, as argument or result of one call, is pickled by itself."""

_RANGE = Struct("<II")
_SPLIT = Struct("<IIB")

ENDED, RUNNING, FAILED = range(3)
"""States of a slice in its drone: ended; running a call, or just past the last one; ended with an
error, after which the remaining calls are not needed.
"""


def pack_calls(form: int, fresh: bool, rows: Sequence[Any]) -> bytes:
    """Pack a slice. If `fresh`, each call gets a function object of its own."""
    return _RANGE.pack(0, len(rows)) + dumps((form, fresh, rows), 5)


def slice_calls(calls: bytes, start: int, stop: int) -> bytes:
    """Return packed calls `start` to `stop` of `calls`, counted within its range."""
    first, _ = _RANGE.unpack_from(calls)
    return _RANGE.pack(first + start, first + stop) + calls[_RANGE.size :]


def unpack_calls(calls: Any) -> tuple[int, bool, Sequence[Any]]:
    first, last = _RANGE.unpack_from(calls)
    form, fresh, rows = loads(memoryview(calls)[_RANGE.size :])
    return form, fresh, rows[first:last]


class Packed(NamedTuple):
    """A value that was pickled by itself."""

    payload: bytes | Serialized


def args_of_call(calls: bytes, index: int) -> Sequence[Any]:
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
    return join_payloads((values, indices, error), parts, store)


class Answers:
    """The answers of a slice, as far as its calls were done."""

    def __init__(self, payload: Any) -> None:
        (self.values, indices, self.error), parts = load_joined(payload)
        self.opening: int | None = None  # the index of the value that is being unpickled
        # Keeps remote objects alive while handles of them are in the values.
        self.remote_objects: Any = None
        self._parts = dict(zip(indices, parts, strict=True))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def plain(self) -> bool:
        """True if `values` holds all answers."""
        return not self._parts

    def __iter__(self) -> Iterator[Any]:
        """Yield each answer once; separately pickled values are unpickled as they are yielded.

        If unpickling raises, the iteration ends with that error.
        """
        for index, value in enumerate(self.values):
            part = self._parts.pop(index, None)
            if part is None:
                yield value
            else:
                yield self._open(index, part)

    def _open(self, index: int, part: Any) -> Any:
        self.opening = index
        value = load_with_buffers(*part)
        self.opening = None
        return value


def split_head(done: int, rest: int, state: int) -> bytes:
    return _SPLIT.pack(done, rest, state)


def unpack_split(payload: Any) -> tuple[int, int, int, Any]:
    """Return done, rest and state, and the packed answers."""
    if len(payload) <= _SPLIT.size:
        raise Malformed(f"a split of {len(payload)} bytes")
    done, rest, state = _SPLIT.unpack_from(payload)
    return done, rest, state, payload[_SPLIT.size :]
