"""The store of one process: blocks of its arena region, written for other processes and reused.

Fresh pages cost more than the copy. 100 MB on a two-core machine take 47 ms with `write` and 81 ms
through a memory mapping; in a reused block, 16 ms with `write` and 8 ms through a mapping. So
blocks are kept warm for a while, and fresh blocks are filled by `write`, which avoids zeroing them.
The GIL is released between the pieces of a copy.
"""

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
"""Minimum size in bytes of a pickle in shared memory; smaller ones fit into the fast transport."""
MAPPED_FROM = 1 << 20
"""Minimum size in bytes of a reused block that its writer maps; below, `write` is as fast."""
PIECE = 4 << 20
"""Bytes copied between two chances for other threads."""

_MAP_POPULATE = 0x8000


class _Block:
    __slots__ = ("filled", "idle_since", "mapping", "offset", "room")

    def __init__(self, offset: int, room: int) -> None:
        self.offset = offset
        self.room = room
        self.filled = 0  # number of bytes from its start that have memory
        self.mapping: mmap.mmap | None = None
        self.idle_since = 0.0


class Segment(Keep):
    """A block that was written, for as long as any process needs it."""

    __slots__ = ("_block", "_store")

    def __init__(self, store: Store, block: _Block, length: int) -> None:
        self._store = store
        self._block = block
        super().__init__(store.arena, block.offset, length)

    def _give_back(self) -> None:
        self._store._returned.append(self._block)
        self.arena.ring()


class Store:
    """The region that one process writes to. Any thread may call it."""

    def __init__(self, arena: Arena, number: int) -> None:
        self.arena = arena
        self._pid = os.getpid()
        self._top = number * SPAN
        self._end = self._top + SPAN if number < REGIONS else self._top
        self._free: dict[int, deque[_Block]] = {}  # by size; warm blocks on the right
        self._warm = 0  # bytes of memory in the free blocks
        self._returned: deque[_Block] = deque()
        self._lock = threading.Lock()
        self._owner = 0  # the thread that holds the lock

    def put(self, runs: Sequence[Sequence[Buffer]]) -> tuple[Segment, list[tuple[int, int]]]:
        """Copy `runs`, each run's pieces end to end; return the segment, and the runs' places.

        Raises `Full` if the ceiling would be exceeded, and `OSError` if the system refuses.
        """
        if os.getpid() != self._pid:  # a forked child: this region is its parent's
            raise Full("the pool belongs to another process")
        places: list[tuple[int, int]] = []
        size = 0
        for run in runs:
            length = sum(map(len, run))
            places.append((size, length))
            size += -(-length // ALIGN) * ALIGN
        if self._owner == threading.get_ident():
            raise Full("a finalizer came while memory was being taken")
        with self._lock, DeferredSigint():  # a Ctrl-C between the lines would lose the block
            self._owner = threading.get_ident()
            try:
                block = self._take(size)
                segment = Segment(self, block, size)  # before `ended` is checked: see Arena.end
            finally:
                self._owner = 0
        if self.arena.ended:
            raise Full("the pool has ended")
        if size > block.filled:
            self._check_room(size - block.filled)
        try:
            self._fill(block, runs, places, size)
        except BaseException:
            self._cool(block)  # how much of the block has memory is unknown
            del segment  # otherwise the traceback would hold it
            raise
        return segment, places

    def parcel(self, pieces: Sequence[Any], buffers: Sequence[memoryview]) -> Serialized:
        """Put a large pickle, and the buffers beside it, into shared memory.

        Buffers that are in the arena already stay there. Raises `Full` or `OSError` if there is no
        room.
        """
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
        """Warn that a value had to take another path."""
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
        """Free the memory of unused blocks; return whether there will be more to do.

        Blocks unused for `idle` seconds (`tuning.warm_seconds` if None) lose their memory. Ranges
        kept for forked children that have ended are released.
        """
        look_for_ended_forks()
        # The lock's holder may be running a finalizer that waits for this thread: do not wait.
        if not self._lock.acquire(blocking=False):
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
    """Return `size` rounded up to whole pages, in few distinct sizes, at most a sixteenth larger.

    Pages that are never written take no memory.
    """
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
    """Return a view of data that this process wrote and never changes.

    Pickling parts of the view makes no copy.
    """
    assert isinstance(segment, Segment)
    whole = view(segment)
    if isinstance(whole.obj, Mapping):
        whole.obj.pristine = True
    return whole


def place_of(buffer: memoryview, arena: Arena) -> tuple[Segment, int, int] | None:
    """Return the place of `buffer` in `arena`, or None if it is not part of a pristine view."""
    mapping: Any = buffer
    while isinstance(mapping, memoryview):
        mapping = mapping.obj
    if not isinstance(mapping, Mapping) or not mapping.pristine or mapping.keep.arena is not arena:
        return None
    if not mapping.keep.is_of_this_image():  # its writer would not know that the range is lent
        return None
    assert isinstance(mapping.keep, Segment)
    return mapping.keep, address_of(buffer) - address_of(mapping), buffer.nbytes
