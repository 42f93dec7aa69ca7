"""The store: where an image writes what others shall look at; blocks of its region of the arena,
used again and again.

How fast: fresh pages cost more than the copy (100 MB on a 2-core machine: 47 ms by `write`, 81 by
memory mapped; used again 8 by memory mapped, 16 by `write`). So blocks are kept warm for a while,
and fresh ones are filled by `write`, which saves zeroing them. The GIL is let go between pieces of
a copy."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

from ..runtime.deferred_sigint import DeferredSigint
from ..runtime.tuning import tuning
from .arena import (
    REGIONS,
    SPAN,
    Arena,
    Full,
    Keep,
    Mapping,
    address_of,
    forks_run,
    look_for_ended_forks,
    map_range,
    view,
)
from .references import Place, Serialized

__all__ = ["Segment", "Store", "place_of", "pristine_view"]

Buffer = bytes | bytearray | memoryview

ALIGN = 64
LARGE_PICKLE = 32 * 1024
"""Bytes from which a pickle goes through shared memory: what is smaller fits into the lane."""
MAPPED_FROM = 1 << 20
"""Bytes of a block that its writer maps when it is used again; smaller ones are written, which is
as fast."""
PIECE = 4 << 20
"""Bytes copied between two chances for other threads."""

_MAP_POPULATE = 0x8000


class _Block:
    __slots__ = ("filled", "idle_since", "mapping", "offset", "room")

    def __init__(self, offset: int, room: int) -> None:
        self.offset = offset
        self.room = room
        self.filled = 0  # so many bytes from its start have memory
        self.mapping: mmap.mmap | None = None
        self.idle_since = 0.0


class Segment(Keep):
    """What somebody has written: a block, until nobody needs it any more."""

    __slots__ = ("_block", "_store")

    def __init__(self, store: Store, block: _Block, length: int) -> None:
        self._store = store
        self._block = block
        super().__init__(store.arena, block.offset, length)

    def _give_back(self) -> None:
        self._store._returned.append(self._block)
        self.arena.ring()


class Store:
    """One image's region: where it writes. Any thread may call it."""

    def __init__(self, arena: Arena, number: int) -> None:
        self.arena = arena
        self._pid = os.getpid()
        self._top = number * SPAN
        self._end = self._top + SPAN if number < REGIONS else self._top
        self._free: dict[int, deque[_Block]] = {}  # by size; the warm ones at the right
        self._warm = 0  # bytes that they have
        self._returned: deque[_Block] = deque()
        self._lock = threading.Lock()
        self._owner = 0  # the thread that has it

    def put(self, runs: Sequence[Sequence[Buffer]]) -> tuple[Segment, list[tuple[int, int]]]:
        """Copies each of `runs`, its pieces end to end: the segment, and each run's offset in it
        and length.

        Raises `Full` where that would be more than the ceiling, and `OSError` where the system
        refuses."""
        if os.getpid() != self._pid:  # somebody forked: what it would write into is its parent's
            raise Full("the pool belongs to another process")
        places: list[tuple[int, int]] = []
        size = 0
        for run in runs:
            length = sum(map(len, run))
            places.append((size, length))
            size += -(-length // ALIGN) * ALIGN
        if self._owner == threading.get_ident():
            raise Full("a finalizer came while memory was being taken")
        with self._lock, DeferredSigint():  # Ctrl-C between the lines would lose the block
            self._owner = threading.get_ident()
            try:
                block = self._take(size)
                segment = Segment(self, block, size)  # before the look: see Arena.end
            finally:
                self._owner = 0
        if self.arena.ended:
            raise Full("the pool has ended")
        if size > block.filled:
            self._check_room(size - block.filled)
        try:
            self._fill(block, runs, places, size)
        except BaseException:
            self._cool(block)  # nobody knows how much of it has memory
            del segment  # or the traceback would hold it
            raise
        return segment, places

    def parcel(self, pieces: Sequence[Any], buffers: Sequence[memoryview]) -> Serialized:
        """Puts a pickle, if it is large, and the buffers beside it there; those that lie in the
        arena stay where they are. Raises `Full`, or `OSError`, where there is no room."""
        inline = b"".join(pieces) if sum(map(len, pieces)) < LARGE_PICKLE else b""
        borrowed = [place_of(buffer, self.arena) for buffer in buffers]
        runs: list[Sequence[Any]] = [] if inline else [pieces]
        runs += [[buffer] for buffer, place in zip(buffers, borrowed, strict=True) if place is None]
        places: list[Place] = []
        if runs:
            segment, extents = self.put(runs)
            places = [(segment, start, length) for start, length in extents]
        written = sum(length for _, _, length in places)
        fresh = iter(places)
        ordered = [] if inline else [next(fresh)]
        ordered += [next(fresh) if place is None else place for place in borrowed]
        return Serialized(inline, ordered, written)

    def warn(self, error: Exception) -> None:
        """Something had to go another way."""
        self.arena.warn(error)

    def _take(self, size: int) -> _Block:
        room = _rounded(size)
        self._take_back()
        free = self._free.get(room)
        if free:
            block = free.pop()
            self._warm -= block.filled
            return block
        if self._top + room > self._end:
            raise Full("the addresses for shared memory are used up")
        block = _Block(self._top, room)
        self._top += room
        return block

    def _take_back(self) -> None:
        now = monotonic()
        while self._returned:
            block = self._returned.popleft()
            block.idle_since = now
            free = self._free.setdefault(block.room, deque())
            if self._warm + block.filled > self.arena.ceiling // 8:
                self._cool(block)
                free.appendleft(block)
            else:
                self._warm += block.filled
                free.append(block)

    def _check_room(self, more: int) -> None:
        arena = self.arena
        if arena.used() + more > arena.ceiling:
            self.tidy(0.0)
            used = arena.used()
            if used + more > arena.ceiling:
                raise Full(
                    f"{more:,} bytes more of shared memory would be too much: "
                    f"{used:,} of at most {arena.ceiling:,} are in use"
                )

    def _fill(
        self,
        block: _Block,
        runs: Sequence[Sequence[Buffer]],
        places: list[tuple[int, int]],
        size: int,
    ) -> None:
        target: memoryview | None = None
        if MAPPED_FROM <= size <= block.filled:
            if block.mapping is None or len(block.mapping) < size:
                block.mapping = map_range(
                    self.arena.fd, block.offset, block.filled, mmap.MAP_SHARED | _MAP_POPULATE
                )
            target = memoryview(block.mapping)
        for run, (at, _) in zip(runs, places, strict=True):
            for piece in run:
                if target is not None:
                    _copy(target, at, memoryview(piece))
                else:
                    _write(self.arena.fd, block.offset + at, memoryview(piece))
                at += len(piece)
        block.filled = max(block.filled, size)

    def tidy(self, idle: float | None = None) -> bool:
        """Gives back the memory of blocks that nobody has used for `idle` seconds
        (`tuning.warm_seconds` if None), and lets go of what was held for forked children that have
        ended. Is there more to come?"""
        look_for_ended_forks()
        if not self._lock.acquire(
            blocking=False
        ):  # who has it may run a finalizer that waits for who calls this
            return True
        try:
            self._owner = threading.get_ident()
            self._take_back()
            latest = monotonic() - (tuning.warm_seconds if idle is None else idle)
            for free in self._free.values():
                for block in free:
                    if block.filled and block.idle_since <= latest:
                        self._warm -= block.filled
                        self._cool(block)
            return self.is_untidy()
        finally:
            self._owner = 0
            self._lock.release()

    def is_untidy(self) -> bool:
        return self._warm > 0 or bool(self._returned) or forks_run()

    def _cool(self, block: _Block) -> None:
        block.mapping = None
        block.filled = 0
        self.arena.punch(block.offset, block.room)


def _rounded(size: int) -> int:
    """Whole pages, and few different sizes: a sixteenth more at most. What is not written takes no
    memory."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 5))
    return max(step, -(-size // step) * step)


def _write(fd: int, offset: int, piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        done += os.pwrite(fd, piece[done : done + (64 << 20)], offset + done)


def _copy(target: memoryview, at: int, piece: memoryview) -> None:
    for done in range(0, len(piece), PIECE):
        part = piece[done : done + PIECE]
        target[at + done : at + done + len(part)] = part


def pristine_view(segment: Keep) -> memoryview:
    """A view of what this image has written itself: nobody may write into it. What is pickled of it
    is not copied."""
    assert isinstance(segment, Segment)
    whole = view(segment)
    if isinstance(whole.obj, Mapping):
        whole.obj.pristine = True
    return whole


def place_of(buffer: memoryview, arena: Arena) -> tuple[Segment, int, int] | None:
    """Where in `arena` it lies, if it is part of a pristine view."""
    mapping: Any = buffer
    while isinstance(mapping, memoryview):
        mapping = mapping.obj
    if not isinstance(mapping, Mapping) or not mapping.pristine or mapping.keep.arena is not arena:
        return None
    if not mapping.keep.is_of_this_image():  # its writer does not know that it would be lent
        return None
    assert isinstance(mapping.keep, Segment)
    return mapping.keep, address_of(buffer) - address_of(mapping), buffer.nbytes
