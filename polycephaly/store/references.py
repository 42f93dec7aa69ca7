"""Object references: shared memory lent to another process, and the header that describes it.

    sender: Serialized(inline, places) ─header─> receiver: Received(inline, places) ──load──> value
            holds Segments                                 holds ObjectRefs, as do the buffers
            RefTable.lent[17] = segment <───── 17 ──────── the last ObjectRef has died

A `Serialized` is a pickle and its out-of-band buffers (PEP 574). A small pickle goes through the
socket, behind the header; a large one is in the segment too, as the first place. Each sending lends
under a new number, and the sender holds the segment until that number comes back.

    header   counts of refs and places     ref: number, offset, length     place: ref, start, length

See docs/decisions/0006-object-references.md.
"""

from __future__ import annotations

import itertools
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from pickle import loads
from struct import Struct
from typing import Any

from ..wire.messages import Malformed
from .arena import REGIONS, SPAN, Arena, Keep, view

__all__ = [
    "ObjectRef",
    "Place",
    "Received",
    "RefTable",
    "Serialized",
    "load",
    "load_beside",
    "load_joined",
    "read_waybill",
]

_COUNTS = Struct("<HI")
_LOAN = Struct("<QQQ")
_PLACE = Struct("<HQQ")

Place = tuple[Keep, int, int]
"""A range written by this process, or lent to it, and a place in the range: start and length."""


class ObjectRef(Keep):
    """A range that another process has lent to this one."""

    __slots__ = ("_ref_table", "number")

    def __init__(self, ref_table: RefTable, number: int, offset: int, length: int) -> None:
        self.number = number
        self._ref_table = ref_table
        super().__init__(ref_table.arena, offset, length)

    def _give_back(self) -> None:
        ref_table = self._ref_table
        if not ref_table.closed:
            ref_table.returned.append(self.number)
            ref_table.ring()
        if ref_table.closed:  # closed in the meantime
            self.arena.punch(self.offset, self.length)


class RefTable:
    """The table of references between this process and one other.

    `theirs` is the region of the other process; None if its references may be to any region. `ring`
    is called, in any thread, after a number was added to `returned`.
    """

    def __init__(self, arena: Arena, theirs: int | None, ring: Callable[[], object]) -> None:
        self.arena = arena
        self.region = (
            (0, REGIONS * SPAN) if theirs is None else (theirs * SPAN, (theirs + 1) * SPAN)
        )
        self.ring = ring
        self.lent: dict[int, Keep] = {}
        self.returned: deque[int] = deque()
        """Numbers of references that this process no longer needs, to be sent to the other one."""
        self.closed = False
        self._numbers = itertools.count(1)

    def lend(self, segment: Keep) -> int:
        number = next(self._numbers)
        self.lent[number] = segment
        return number

    def arrived(self, waybill: Any) -> Received:
        """Return the content of a message. Raises `Malformed`."""
        return Received(waybill, self)

    def came_back(self, number: int) -> None:
        self.lent.pop(number, None)

    def take_returned(self) -> list[int]:
        taken = []
        while self.returned:
            taken.append(self.returned.popleft())
        return taken

    def close(self) -> None:
        """Free all memory lent to the other process, which is dead.

        Of its own region, the ranges that this process uses stay.
        """
        self.closed = True
        self.lent.clear()
        self.arena.clear(*self.region)


class Serialized:
    """A payload to send: a pickle and its out-of-band buffers.

    If `inline` is empty, the pickle is in the first place.
    """

    __slots__ = ("inline", "places", "travels")

    def __init__(self, inline: bytes, places: Sequence[Place], written: int = 0) -> None:
        """Set `travels`, the bytes sent. `written` is the size of the places copied for this.

        The other places existed before and are only referred to.
        """
        self.inline = inline
        self.places = places
        self.travels = len(inline) + written

    def __len__(self) -> int:
        return len(self.inline) + sum(length for _, _, length in self.places)

    def waybill(self, ref_table: RefTable) -> bytes:
        """Return the message that carries this payload once."""
        numbers: dict[int, int] = {}
        loans: list[bytes] = []
        places: list[bytes] = []
        for segment, start, length in self.places:
            which = numbers.get(id(segment))
            if which is None:
                which = numbers[id(segment)] = len(loans)
                loans.append(_LOAN.pack(ref_table.lend(segment), segment.offset, segment.length))
            places.append(_PLACE.pack(which, start, length))
        return b"".join((_COUNTS.pack(len(loans), len(places)), *loans, *places, self.inline))


class Received:
    """A payload that was received."""

    __slots__ = ("_arena", "_inline", "_loans", "_places")

    def __init__(self, waybill: Any, ref_table: RefTable) -> None:
        """Check the header without opening any range. Raises `Malformed`."""
        self._inline, listed, self._places = read_waybill(waybill)
        for _, offset, length in listed:
            start, stop = ref_table.region
            if offset % mmap.PAGESIZE or not length or offset < start or offset + length > stop:
                raise Malformed(f"a loan of {length} bytes at {offset}")
        for which, start, length in self._places:
            if which >= len(listed) or start + length > listed[which][2]:
                raise Malformed(f"a place of {length} bytes at {start} in loan {which}")
        if not self._inline and not self._places:
            raise Malformed("a waybill without a pickle")
        self._loans = [ObjectRef(ref_table, *each) for each in listed]
        self._arena = ref_table.arena

    def __len__(self) -> int:
        return len(self._inline) + sum(place[2] for place in self._places)

    @property
    def pickle_bytes(self) -> int:
        return len(self._inline) or self._places[0][2]

    def parcel(self) -> Serialized:
        """Return the payload to be lent on as it is: no range is opened."""
        return Serialized(
            self._inline,
            [(self._loans[which], start, length) for which, start, length in self._places],
        )

    def is_far(self) -> bool:
        """Return whether opening the payload would take time."""
        return False

    def lies_in(self, store: Any) -> bool:
        """Return whether any process that can read data of this store can read this payload too."""
        return getattr(store, "arena", None) is self._arena

    def content(self) -> tuple[bytes, list[memoryview]]:
        """Return the pickle (empty if it is in the first place), and the places."""
        ranges = [view(loan) for loan in self._loans]
        return self._inline, [
            ranges[which][start : start + length] for which, start, length in self._places
        ]


def read_waybill(
    waybill: Any,
) -> tuple[bytes, list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return the pickle (empty if it is in the first place), the references and the places.

    Raises `Malformed`.
    """
    waybill = memoryview(waybill)
    if len(waybill) < _COUNTS.size:
        raise Malformed(f"a waybill of {len(waybill)} bytes")
    loans, places = _COUNTS.unpack_from(waybill)
    at = _COUNTS.size + loans * _LOAN.size
    end = at + places * _PLACE.size
    if len(waybill) < end:
        raise Malformed(f"a waybill of {len(waybill)} bytes for {loans} loans and {places} places")
    listed = list(_LOAN.iter_unpack(waybill[_COUNTS.size : at]))
    return bytes(waybill[end:]), listed, list(_PLACE.iter_unpack(waybill[at:end]))


def load(payload: Any) -> Any:
    """Return the value of a payload: bytes, or `Received`."""
    if not isinstance(payload, Received):
        return loads(payload)
    return load_beside(*payload.content())


def load_beside(inline: bytes, views: list[Any]) -> Any:
    """Return the value of a pickle and its buffers.

    If `inline` is empty, the first buffer is the pickle.
    """
    if inline:
        return loads(inline, buffers=views)
    return loads(views[0], buffers=views[1:])


def load_joined(payload: Any) -> tuple[Any, list[tuple[bytes, list[Any]]]]:
    """Return the head and the parts of a payload made by `join`; pass each to `load_beside`."""
    if isinstance(payload, Received):
        inline, views = payload.content()
    else:
        inline, views = payload, []
    at = 0 if inline else 1
    head, inlines = loads(inline or views[0])
    parts = []
    for part, count in inlines:
        parts.append((part, views[at : at + count]))
        at += count
    return head, parts
