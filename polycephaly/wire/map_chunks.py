"""Encoding of `map`'s chunks: many calls of one function in one task, and their answers.

    calls    range | pickle of (form, fresh, whole,    The range selects the rows to call: the rest
             rows)                                     of a chunk is the same bytes, another range.
                                                       A large pickle is in shared memory.
    answers  first, count, failed | pickle of          `count` calls from that with the index
             (values, indices, error, pickles,         `first` on are done, a failed one included.
             groups), then, if `pickles` is None,      `indices` are those of the values that are
             the values pickled separately             pickled one by one. The groups are instances,
                                                       each with the indices of its own.

The grouping must not show. Values that cannot change, and whose pickling cannot fail, are pickled
together (shareable.py), and so are copies of those that can change, but whose parts cannot
(detached.py). All others are pickled one by one. Arguments are copied or pickled as they are taken
from their iterator, results as they are returned. Otherwise two calls would share an object, or see
changes that a later call made to it, or fail together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pickle import dumps, loads
from struct import Struct
from typing import Any, NamedTuple

from ..errors import Malformed
from ..memory.blocks import Store, pristine_view
from ..memory.references import Received, Serialized, load_joined, load_with_buffers
from .detached import Group, Returned, Unmade, returned_groups
from .pickling import join_payloads, store_pickle

Calls = bytes | Serialized
"""The packed calls of a chunk. In shared memory, the range alone is `inline`."""

ITEMS, ROWS, PICKLED = range(3)
"""Forms of rows: a single argument, a tuple of arguments, or the pickle of such a tuple."""

MIN_SEPARATE_LENGTH = 256
"""Length from which a str or bytes, as argument or result of one call, is pickled by itself."""

_RANGE = Struct("<II")
_ANSWERS = Struct("<II?")


def pack_calls(
    form: int,
    fresh: bool,
    rows: Sequence[Any],
    store: Store | None = None,
    *,
    is_whole: bool = False,
) -> Calls:
    """Pack a chunk, in shared memory if it is large and there is a store with room. If `fresh`,
    each call gets a function object of its own. If `is_whole`, the drone that has begun the chunk
    gives none of its calls back. Raises `PicklingError` if the class of an instance cannot be
    pickled by its name any more.
    """
    head = _RANGE.pack(0, len(rows))
    pickled = dumps((form, fresh, is_whole, rows), 5)
    stored = store_pickle(pickled, store)
    if isinstance(stored, Serialized):
        return Serialized(head, stored.places, stored.written)
    return head + stored


def calls_between(calls: Calls, start: int, stop: int) -> Calls:
    """Return packed calls `start` to `stop` of `calls`, counted within its range."""
    if isinstance(calls, Serialized):
        return Serialized(_part_of(calls.inline, start, stop), calls.places)
    return _part_of(calls, start, stop)


def _part_of(calls: bytes, start: int, stop: int) -> bytes:
    first, _ = _RANGE.unpack_from(calls)
    return _RANGE.pack(first + start, first + stop) + calls[_RANGE.size :]


def unpack_calls(calls: Any) -> tuple[int, bool, bool, Sequence[Any]]:
    """Return the form, `fresh`, `is_whole` and the rows of packed calls, as sent or as received."""
    if isinstance(calls, Serialized):
        ((segment, at, length),) = calls.places
        head, pickled = calls.inline, pristine_view(segment)[at : at + length]
    elif isinstance(calls, Received):
        head, (pickled,) = calls.content()
    else:
        head, pickled = calls, memoryview(calls)[_RANGE.size :]
    first, last = _RANGE.unpack_from(head)
    form, fresh, is_whole, rows = loads(pickled)
    if type(rows) is Unmade:
        form, rows = PICKLED, rows.pickled_calls()
    return form, fresh, is_whole, rows[first:last]


class Packed(NamedTuple):
    """A value that was pickled by itself."""

    payload: bytes | Serialized


def args_of_call(calls: Calls, index: int) -> Sequence[Any]:
    """Return the arguments of one of the packed calls. Raises the errors of unpickling."""
    form, _, _, rows = unpack_calls(calls)
    row = loads(rows[index]) if form == PICKLED else rows[index]
    return (row,) if form == ITEMS else row


def pack_answers(
    done: list[Any], packed: bool, error: bytes | None, store: Store
) -> bytes | Serialized:
    """Pack the answers of a chunk.

    `done` holds values, some of them `Packed` or `Returned` if `packed` is true. `error` is the
    error of the call after them, if one failed.
    """
    values, indices = done, list[int]()
    groups: list[Group] = []
    if packed:
        indices = [index for index, value in enumerate(done) if type(value) is Packed]
        groups = returned_groups(done)
        values = [None if type(value) in _SEPARATE else value for value in done]
    parts = [done[index].payload for index in indices]
    if {bytes}.issuperset(map(type, parts)):  # nothing in shared memory: this is opened faster
        return join_payloads((values, indices, error, parts, groups), (), store)
    return join_payloads((values, indices, error, None, groups), parts, store)


_SEPARATE = frozenset((Packed, Returned))


class Answers:
    """The answers of a chunk, as far as its calls were done."""

    _are_pickles = False  # each value was pickled by itself, and `values` are the pickles

    def __init__(self, payload: Any) -> None:
        (self.values, indices, self.error, pickles, groups), parts = load_joined(payload)
        self.opening: int | None = None  # the index of the value that is being unpickled
        # Keeps remote objects alive while handles of them are in the values.
        self.remote_objects: Any = None
        self._parts: dict[int, Any] = {}
        self._are_pickles = bool(pickles) and len(pickles) == len(self.values)
        if self._are_pickles:
            self.values = pickles
        else:
            self._parts = dict(zip(indices, pickles or parts, strict=True))
        for instances, indices in groups:
            if type(instances) is Unmade:
                self._parts.update(zip(indices, instances.pickles(), strict=True))
            elif len(instances) == len(self.values):
                self.values = instances
            else:
                for index, value in zip(indices, instances, strict=True):
                    self.values[index] = value

    @classmethod
    def of(cls, values: list[Any]) -> Answers:
        """Return the answers that are these values."""
        answers = cls.__new__(cls)
        answers.values, answers._parts = values, {}
        answers.error = answers.opening = answers.remote_objects = None
        return answers

    def drop(self, count: int) -> None:
        """Drop the first `count` answers, which have come before."""
        self.values = self.values[count:]
        self._parts = {at - count: each for at, each in self._parts.items() if at >= count}

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


def answers_head(first: int, count: int, failed: bool) -> bytes:
    return _ANSWERS.pack(first, count, failed)


def unpack_answers(payload: Any) -> tuple[int, int, bool, Any]:
    """Return the index of the first call that is answered, how many are, whether the last of them
    has failed, after which the others are not needed, and the packed answers.
    """
    if len(payload) <= _ANSWERS.size:
        raise Malformed(f"the answers of a chunk, of {len(payload)} bytes")
    first, count, failed = _ANSWERS.unpack_from(payload)
    return first, count, failed, payload[_ANSWERS.size :]
