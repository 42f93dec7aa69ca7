"""Object references: shared memory lent to another process, and the header that describes it.

    sender: Serialized(inline, places) ─header─> receiver: Received(inline, places) ──load──> value
            holds Segments                                 holds ObjectRefs, as do the buffers
            RefTable.lent[17] = segment <───── 17 ──────── the last ObjectRef was freed

A `Serialized` is a pickle and its out-of-band buffers (PEP 574). A small pickle goes through the
socket, behind the header; a large one is in the segment too, as the first place. Each sending lends
under a new number, and the sender holds the segment until that number comes back.

    header   counts of refs and places     ref: number, offset, length     place: ref, start, length

See docs/decisions/0006-object-references.md.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count, islice
from pickle import loads
from struct import Struct
from typing import Any

from ..errors import Malformed
from .arena import MAX_REGIONS, REGION_BYTES, Arena, Mapping, RangeRef, reset_view, view

_COUNTS = Struct("<II")
_REF = Struct("<QQQ")
_PLACE = Struct("<IQQ")

Place = tuple[RangeRef, int, int]
"""A range written by this process, or lent to it, and a place in the range: start and length."""


class ObjectRef(RangeRef):
    """A range that another process has lent to this one."""

    __slots__ = ("_ref_table", "number")

    def __init__(self, ref_table: RefTable, number: int, offset: int, length: int) -> None:
        self.number = number
        self._ref_table = ref_table
        super().__init__(ref_table.arena, offset, length)

    def _release(self) -> None:
        ref_table = self._ref_table
        if not ref_table.closed:
            ref_table.returned.append(self.number)
            ref_table.on_release()
        if ref_table.closed:  # closed in the meantime
            self.arena.punch_hole(self.offset, self.length)


class RefTable:
    """The table of references between this process and one other.

    `peer_region` is the region of the other process; None if its references may be to any region.
    `on_release` is called, in any thread, after a number was added to `returned`.
    """

    def __init__(
        self, arena: Arena, peer_region: int | None, on_release: Callable[[], object]
    ) -> None:
        self.arena = arena
        first, end = (0, MAX_REGIONS) if peer_region is None else (peer_region, peer_region + 1)
        self.region = first * REGION_BYTES, end * REGION_BYTES
        self.on_release = on_release
        self.lent: dict[int, RangeRef] = {}
        self.returned: deque[int] = deque()
        """Numbers of references that this process no longer needs, to be sent to the other one."""
        self.closed = False
        self._numbers = count(1)

    def lend(self, segment: RangeRef) -> int:
        number = next(self._numbers)
        self.lent[number] = segment
        return number

    def receive(self, header: Any) -> Received:
        """Return the content of a message. Raises `Malformed`."""
        return Received(header, self)

    def release(self, number: int) -> None:
        """Give up a lent range that the other process no longer needs."""
        self.lent.pop(number, None)

    def take_returned(self) -> list[int]:
        return [self.returned.popleft() for _ in range(len(self.returned))]

    def close(self) -> None:
        """Free all memory lent to the other process, which is dead.

        Of its own region, the ranges that this process uses stay.
        """
        self.closed = True
        # A value that was not unpickled yet keeps this table, and must not keep the pool.
        self.on_release = lambda: None
        self.lent.clear()
        self.arena.clear(*self.region)


class Serialized:
    """A payload to send: a pickle and its out-of-band buffers.

    If `inline` is empty, the pickle is in the first place.
    """

    __slots__ = ("inline", "places", "written")

    def __init__(self, inline: bytes, places: Sequence[Place], written: int = 0) -> None:
        self.inline = inline
        self.places = places
        # Bytes of the places copied for this payload; the others existed before.
        self.written = written

    @property
    def bytes_sent(self) -> int:
        return len(self.inline) + self.written

    def __len__(self) -> int:
        return len(self.inline) + sum(length for _, _, length in self.places)

    def pack_header(self, ref_table: RefTable) -> bytes:
        """Return the message that carries this payload once: the header, and a small pickle."""
        indices: dict[int, int] = {}
        refs: list[bytes] = []
        places: list[bytes] = []
        for segment, start, length in self.places:
            index = indices.get(id(segment))
            if index is None:
                index = indices[id(segment)] = len(refs)
                refs.append(_REF.pack(ref_table.lend(segment), segment.offset, segment.length))
            places.append(_PLACE.pack(index, start, length))
        return b"".join((_COUNTS.pack(len(refs), len(places)), *refs, *places, self.inline))


class Received:
    """A payload that was received."""

    __slots__ = ("_arena", "_inline", "_mappings", "_places", "_refs")

    def __init__(self, header: Any, ref_table: RefTable) -> None:
        """Check the header without opening any range. Raises `Malformed`."""
        self._inline, refs, self._places = unpack_header(header)
        for _, offset, length in refs:
            start, stop = ref_table.region
            if offset % mmap.PAGESIZE or not length or offset < start or offset + length > stop:
                raise Malformed(f"an invalid reference to {length} bytes at {offset}")
        for index, start, length in self._places:
            if index >= len(refs) or start + length > refs[index][2]:
                raise Malformed(
                    f"an invalid place of {length} bytes at {start} in reference {index}"
                )
        if not self._inline and not self._places:
            raise Malformed("a header without a pickle")
        self._refs = [ObjectRef(ref_table, *each) for each in refs]
        self._arena = ref_table.arena
        # Of each range, those that `content_again` has made, and makes use of again.
        self._mappings: list[list[Mapping]] = [[] for _ in refs]

    def __len__(self) -> int:
        return len(self._inline) + sum(place[2] for place in self._places)

    @property
    def pickle_bytes(self) -> int:
        return len(self._inline) or self._places[0][2]

    def to_serialized(self) -> Serialized:
        """Return the payload to be lent on as it is: no range is opened."""
        places = [(self._refs[index], start, length) for index, start, length in self._places]
        return Serialized(self._inline, places)

    def is_slow_to_open(self) -> bool:
        """Return whether opening the payload would take time."""
        return False

    def is_readable_in(self, store: Any) -> bool:
        """Return whether any process that can read data of this store can read this payload too."""
        return getattr(store, "arena", None) is self._arena

    def content(self) -> tuple[bytes, list[memoryview]]:
        """Return the pickle (empty if it is in the first place), and the places."""
        return self._content([view(each) for each in self._refs])

    def content_again(self) -> tuple[bytes, list[memoryview]]:
        """Return the content as it was sent, as `content` does. For a payload that is opened many
        times: a mapping takes ten times as long to make as to reset.
        """
        return self._content(list(map(self._view_again, self._refs, self._mappings)))

    def _view_again(self, range_ref: ObjectRef, mappings: list[Mapping]) -> memoryview:
        for mapping in mappings:
            fresh = reset_view(mapping)
            if fresh is not None:
                return fresh
        fresh = view(range_ref)
        # While one is opened, the value of the last opening may still be there.
        if isinstance(fresh.obj, Mapping):
            mappings[:] = [fresh.obj, *mappings[:1]]
        return fresh

    def _content(self, ranges: list[memoryview]) -> tuple[bytes, list[memoryview]]:
        return self._inline, [
            ranges[index][start : start + length] for index, start, length in self._places
        ]


def unpack_header(
    header: Any,
) -> tuple[bytes, list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return the pickle (empty if it is in the first place), the references and the places.

    Raises `Malformed`.
    """
    header = memoryview(header)
    if len(header) < _COUNTS.size:
        raise Malformed(f"a header of {len(header)} bytes")
    ref_count, place_count = _COUNTS.unpack_from(header)
    at = _COUNTS.size + ref_count * _REF.size
    end = at + place_count * _PLACE.size
    if len(header) < end:
        raise Malformed(
            f"a header of {len(header)} bytes for {ref_count} references and {place_count} places"
        )
    refs = list(_REF.iter_unpack(header[_COUNTS.size : at]))
    return bytes(header[end:]), refs, list(_PLACE.iter_unpack(header[at:end]))


def load(payload: Any) -> Any:
    """Return the value of a payload: bytes, or `Received`."""
    if not isinstance(payload, Received):
        return loads(payload)
    return load_with_buffers(*payload.content())


def load_again(payload: Any) -> Any:
    """Return the value as `load` does, for a payload that is opened many times."""
    again = getattr(payload, "content_again", None)
    return load(payload) if again is None else load_with_buffers(*again())


def load_with_buffers(inline: bytes, views: list[Any]) -> Any:
    """Return the value of a pickle and its buffers.

    If `inline` is empty, the first buffer is the pickle.
    """
    if inline:
        return loads(inline, buffers=views)
    return loads(views[0], buffers=views[1:])


def load_joined(payload: Any) -> tuple[Any, list[tuple[bytes, list[Any]]]]:
    """Return the head and the parts of a payload made by `join_payloads`.

    Pass each part to `load_with_buffers`.
    """
    inline, views = payload.content() if isinstance(payload, Received) else (payload, [])
    head, inlines = loads(inline or views[0])
    rest = iter(views if inline else views[1:])
    return head, [(part, list(islice(rest, places))) for part, places in inlines]
