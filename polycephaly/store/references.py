"""What is lent across one link, and the waybill by which it travels.

    sender: Parcel(inline, places) ──waybill──> socket ──> receiver: Arrived(inline, places) ──load──> value
               holds Segments                                  holds Loans: so do the value's buffers
               Ledger.lent[17] = segment   <──────17────────  the last of them died

A controller lends on what a drone has lent to it: then it is a Loan that is held until the number
comes back.

A `Serialized` is a pickle and the buffers that go beside it (PEP 574). A small pickle goes through
the socket, with the waybill; a large one lies in the segment too, as its first place.

Each sending is a loan with a number of its own. The Segment is held until that number comes back,
whatever becomes of the message: the receiver makes a Loan of each number that it reads, and a Loan
that is dropped unopened comes back like any other.

    waybill    loans, places: counts       loan: number, offset, length      place: which loan, start, length
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
"""What was written, here or by who lent it to this image; and a place in it: start and length."""


class ObjectRef(Keep):
    """A range that the other end of a link has lent to this image."""

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
        if ref_table.closed:  # by now, perhaps
            self.arena.punch(self.offset, self.length)


class RefTable:
    """One end's account of a link. `theirs` is the region of the other end; None: what it lends may
    be of anybody's. `ring` is called, in any thread, when there is something in `returned`."""

    def __init__(self, arena: Arena, theirs: int | None, ring: Callable[[], object]) -> None:
        self.arena = arena
        self.region = (
            (0, REGIONS * SPAN) if theirs is None else (theirs * SPAN, (theirs + 1) * SPAN)
        )
        self.ring = ring
        self.lent: dict[int, Keep] = {}
        self.returned: deque[int] = deque()
        """Numbers of loans to this end that are over, and of which the other end has to be told."""
        self.closed = False
        self._numbers = itertools.count(1)

    def lend(self, segment: Keep) -> int:
        number = next(self._numbers)
        self.lent[number] = segment
        return number

    def arrived(self, waybill: Any) -> Received:
        """What a message brings. Raises `Malformed`."""
        return Received(waybill, self)

    def came_back(self, number: int) -> None:
        self.lent.pop(number, None)

    def take_returned(self) -> list[int]:
        taken = []
        while self.returned:
            taken.append(self.returned.popleft())
        return taken

    def close(self) -> None:
        """The other end is dead: what it was lent is free, and of its own region only that stays
        which this image looks at."""
        self.closed = True
        self.lent.clear()
        self.arena.clear(*self.region)


class Serialized:
    """What is to be sent: a pickle and its buffers. Where `inline` is empty, the pickle is in the
    first place."""

    __slots__ = ("inline", "places", "travels")

    def __init__(self, inline: bytes, places: Sequence[Place], written: int = 0) -> None:
        """`written`: bytes of the places that were copied for it. The others were there, and are
        only referred to."""
        self.inline = inline
        self.places = places
        self.travels = len(inline) + written

    def __len__(self) -> int:
        return len(self.inline) + sum(length for _, _, length in self.places)

    def waybill(self, ref_table: RefTable) -> bytes:
        """The message that brings it, once."""
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
    """What has been received."""

    __slots__ = ("_arena", "_inline", "_loans", "_places")

    def __init__(self, waybill: Any, ref_table: RefTable) -> None:
        """Raises `Malformed`. Opens nothing."""
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
        """To be lent on, as it is: nothing of it is opened."""
        return Serialized(
            self._inline,
            [(self._loans[which], start, length) for which, start, length in self._places],
        )

    def is_far(self) -> bool:
        """Whether to look at it would cost time."""
        return False

    def lies_in(self, store: Any) -> bool:
        """Whether who is given what this store writes can be given this too."""
        return getattr(store, "arena", None) is self._arena

    def content(self) -> tuple[bytes, list[memoryview]]:
        """The pickle, or nothing where it is in the first place; and the places."""
        ranges = [view(loan) for loan in self._loans]
        return self._inline, [
            ranges[which][start : start + length] for which, start, length in self._places
        ]


def read_waybill(
    waybill: Any,
) -> tuple[bytes, list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """The pickle, or nothing where it is in the first place; loans; places. Raises `Malformed`."""
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
    """The value of a payload as it came: bytes, or `Received`."""
    if not isinstance(payload, Received):
        return loads(payload)
    return load_beside(*payload.content())


def load_beside(inline: bytes, views: list[Any]) -> Any:
    """The value of a pickle and its buffers. Where `inline` is empty, the first of them is the
    pickle."""
    if inline:
        return loads(inline, buffers=views)
    return loads(views[0], buffers=views[1:])


def load_joined(payload: Any) -> tuple[Any, list[tuple[bytes, list[Any]]]]:
    """The head, and the parts, of what `join` made: each to be given to `load_beside`."""
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
