"""How `map` travels: many calls of one function in one piece of work, and many answers in one
outcome.

    calls    range | pickle of (form, fresh, rows)      the range says which of the rows are to be called, so that what
                                                        is left of a slice is the same bytes with another range
    answers  pickle of (values, which, error), and the values that are pickled one by one: for each index in `which`
    split    done, rest, state | answers                so many calls are done, the error's among them, and so many were
                                                        not begun and will not be; and what is the drone at now?

Nothing in a slice may show that it is one. Values that cannot change are pickled together. All
others are pickled one by one, arguments as they are taken from their iterator and results as they
are returned: else two calls would share an object, or see what a later one made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pickle import dumps, loads
from struct import Struct
from typing import Any, NamedTuple

from ..store.blocks import Store
from ..store.references import Serialized, load_beside, load_joined
from .messages import Malformed
from .pickling import ATOMS, join

__all__ = [
    "ENDED", "FAILED", "ITEMS", "PICKLED", "ROWS", "RUNNING", "SHORT", "SMALL", "TOGETHER", "Answers", "Packed",
    "pack_answers", "pack_calls", "part_of", "split_head", "unpack_calls", "unpack_split",
]  # fmt: skip

ITEMS, ROWS, PICKLED = range(3)
"""Forms of rows: an only argument, a tuple of arguments, or the pickle of such a tuple."""

TOGETHER = frozenset(ATOMS)
"""Types of values that are pickled together."""
SMALL = TOGETHER - {str, bytes}
"""Of these, at which size nothing has to be looked."""
SHORT = 256
"""Length of a str or bytes from which one call's goes by itself."""

_RANGE = Struct("<II")
_SPLIT = Struct("<IIB")

ENDED, RUNNING, FAILED = range(3)
"""States of a slice at its drone: it has ended; it runs a call, or has just ended; it has ended
with an error, after which nobody wants the rest."""


def pack_calls(form: int, fresh: bool, rows: Sequence[Any]) -> bytes:
    """`fresh`: each call is to have a function object of its own."""
    return _RANGE.pack(0, len(rows)) + dumps((form, fresh, rows), 5)


def part_of(calls: bytes, start: int, stop: int) -> bytes:
    """Of packed calls, those from `start` to `stop`, counted within what its range says."""
    first, _ = _RANGE.unpack_from(calls)
    return _RANGE.pack(first + start, first + stop) + calls[_RANGE.size :]


def unpack_calls(calls: Any) -> tuple[int, bool, Sequence[Any]]:
    first, last = _RANGE.unpack_from(calls)
    form, fresh, rows = loads(memoryview(calls)[_RANGE.size :])
    return form, fresh, rows[first:last]


class Packed(NamedTuple):
    """A value that was pickled by itself."""

    payload: bytes | Serialized


def pack_answers(
    done: list[Any], packed: bool, error: bytes | None, store: Store
) -> bytes | Serialized:
    """`done`: values, and if `packed` some that are `Packed`; and the error of the call after them,
    if there is one."""
    which = [index for index, value in enumerate(done) if type(value) is Packed] if packed else []
    values = [None if type(value) is Packed else value for value in done] if packed else done
    return join((values, which, error), [done[index].payload for index in which], store)


class Answers:
    """What came of a slice: as much of it as was done."""

    def __init__(self, payload: Any) -> None:
        (self.values, which, self.error), parts = load_joined(payload)
        self.failed = False
        self.given: Any = None  # held for the handles among them
        self._parts = dict(zip(which, parts, strict=True))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def plain(self) -> bool:
        """`values` are all."""
        return not self._parts

    def __iter__(self) -> Iterator[Any]:
        """Each once: what was pickled by itself is unpickled as it is given. Raises what that
        raises, and ends then."""
        for index, value in enumerate(self.values):
            part = self._parts.pop(index, None)
            if part is None:
                yield value
            else:
                self.failed = True
                yield load_beside(*part)
                self.failed = False


def split_head(done: int, rest: int, state: int) -> bytes:
    return _SPLIT.pack(done, rest, state)


def unpack_split(payload: Any) -> tuple[int, int, int, Any]:
    """The head, and the answers, packed."""
    if len(payload) <= _SPLIT.size:
        raise Malformed(f"a split of {len(payload)} bytes")
    done, rest, state = _SPLIT.unpack_from(payload)
    return done, rest, state, payload[_SPLIT.size :]
