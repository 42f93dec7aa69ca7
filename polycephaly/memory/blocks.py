"""The store of one process: blocks of its arena region, written for other processes and reused.

Fresh pages cost more than the copy. 100 MB on a two-core machine take 47 ms with `write` and 81 ms
through a memory mapping; in a reused block, 16 ms with `write` and 8 ms through a mapping. So
blocks are kept warm for a while, and fresh blocks are filled by `write`, which avoids zeroing them.
The GIL is released between the pieces of a copy.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..runtime.clock import monotonic
from ..runtime.deferred_sigint import DeferredSigint
from ..runtime.fork_guard import GuardedLock
from ..runtime.tuning import tuning
from .arena import (
    MAX_REGIONS,
    REGION_BYTES,
    Arena,
    Full,
    Mapping,
    RangeRef,
    address_of,
    has_running_forks,
    map_range,
    release_ended_forks,
    view,
)
from .references import Place, Serialized

Buffer = bytes | bytearray | memoryview

ALIGNMENT_BYTES = 64
MIN_SHARED_PICKLE_BYTES = 32 * 1024
"""Minimum size in bytes of a pickle in shared memory; smaller ones fit into a packet."""
MIN_MAPPED_BYTES = 1 << 20
"""Minimum size in bytes of a reused block that its writer maps; below, `write` is as fast."""
COPY_CHUNK_BYTES = 4 << 20
"""Bytes copied between two chances for other threads."""


class _Block:
    __slots__ = ("capacity", "idle_since", "mapping", "offset", "resident_bytes")

    def __init__(self, offset: int, capacity: int) -> None:
        self.offset = offset
        self.capacity = capacity
        self.resident_bytes = 0  # bytes from its start that have memory
        self.mapping: mmap.mmap | None = None
        self.idle_since = 0.0


class Segment(RangeRef):
    """A block that was written, for as long as any process needs it."""

    __slots__ = ("_block", "_store")

    def __init__(self, store: Store, block: _Block, length: int) -> None:
        self._store = store
        self._block = block
        super().__init__(store.arena, block.offset, length)

    def _release(self) -> None:
        self._store.returned.append(self._block)
        self.arena.request_cleanup()


class Store:
    """The region that one process writes to. Any thread may call it."""

    def __init__(self, arena: Arena, number: int) -> None:
        self.arena = arena
        self._top = number * REGION_BYTES
        self._end = self._top + REGION_BYTES if number < MAX_REGIONS else self._top
        self._free: dict[int, deque[_Block]] = {}  # by size; warm blocks on the right
        self._warm_bytes = 0  # bytes of memory in the free blocks
        self.returned: deque[_Block] = deque()
        self._lock = GuardedLock()

    def put(self, runs: Sequence[Sequence[Buffer]]) -> tuple[Segment, list[tuple[int, int]]]:
        """Copy `runs`, each run's pieces end to end; return the segment, and the runs' places.

        Raises `Full` if the ceiling would be exceeded, and `OSError` if the system refuses.
        """
        if os.getpid() != self.arena.pid:  # a forked child: this region is its parent's
            raise Full("the pool belongs to another process")
        places: list[tuple[int, int]] = []
        size = 0
        for run in runs:
            length = sum(map(len, run))
            places.append((size, length))
            size += -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._lock.is_held_here():
            raise Full("a finalizer asked for memory while this thread was allocating some")
        # A Ctrl-C between the lines would lose the block; its handler runs without the lock.
        with DeferredSigint(), self._lock:
            block = self._take_block(size)
            segment = Segment(self, block, size)  # before `ended` is checked: see Arena.end
        if self.arena.ended:
            raise Full("the pool has ended")
        if size > block.resident_bytes:
            self._check_room(size - block.resident_bytes)
        try:
            self._fill(block, runs, places, size)
        except BaseException:
            self._free_pages(block)  # how much of the block has memory is unknown
            del segment  # otherwise the traceback would hold it
            raise
        return segment, places

    def put_pickle(self, pieces: Sequence[Any], buffers: Sequence[memoryview]) -> Serialized:
        """Put a large pickle, and the buffers beside it, into shared memory.

        Buffers that are in the arena already stay there. Raises `Full` or `OSError` if there is no
        room.
        """
        inline = b"".join(pieces) if sum(map(len, pieces)) < MIN_SHARED_PICKLE_BYTES else b""
        borrowed = [find_place(buffer, self.arena) for buffer in buffers]
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

    def _take_block(self, size: int) -> _Block:
        capacity = _rounded(size)
        self._reclaim_blocks()
        free = self._free.get(capacity)
        if free:
            block = free.pop()
            self._warm_bytes -= block.resident_bytes
            return block
        if self._top + capacity > self._end:
            raise Full("the addresses for shared memory are used up")
        block = _Block(self._top, capacity)
        self._top += capacity
        return block

    def _reclaim_blocks(self) -> None:
        now = monotonic()
        while self.returned:
            block = self.returned.popleft()
            block.idle_since = now
            free = self._free.setdefault(block.capacity, deque())
            if self._warm_bytes + block.resident_bytes > self.arena.ceiling // 8:
                self._free_pages(block)
                free.appendleft(block)
            else:
                self._warm_bytes += block.resident_bytes
                free.append(block)

    def _check_room(self, more: int) -> None:
        arena = self.arena
        if arena.used() + more > arena.ceiling:
            self.free_idle_memory(0.0)
            used = arena.used()
            if used + more > arena.ceiling:
                raise Full(
                    f"shared memory is full: {used:,} of at most {arena.ceiling:,} bytes are in "
                    f"use, and {more:,} more are needed"
                )

    def _fill(
        self,
        block: _Block,
        runs: Sequence[Sequence[Buffer]],
        places: list[tuple[int, int]],
        size: int,
    ) -> None:
        target: memoryview | None = None
        if MIN_MAPPED_BYTES <= size <= block.resident_bytes:
            if block.mapping is None or len(block.mapping) < size:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                block.mapping = map_range(self.arena.fd, block.offset, block.resident_bytes, flags)
            target = memoryview(block.mapping)
        for run, (at, _) in zip(runs, places, strict=True):
            for piece in run:
                if target is not None:
                    _copy(target, at, memoryview(piece))
                else:
                    _write(self.arena.fd, block.offset + at, memoryview(piece))
                at += len(piece)
        block.resident_bytes = max(block.resident_bytes, size)

    def free_idle_memory(self, idle: float | None = None) -> bool:
        """Free the memory of unused blocks; return whether there will be more to do.

        Blocks unused for `idle` seconds (`tuning.warm_seconds` if None) lose their memory. Ranges
        kept for forked children that have ended are released.
        """
        release_ended_forks()
        # The lock's holder may be running a finalizer that waits for this thread: do not wait.
        if self._lock.is_held_here() or not self._lock.acquire(blocking=False):
            return True
        try:
            self._reclaim_blocks()
            latest = monotonic() - (tuning.warm_seconds if idle is None else idle)
            for free in self._free.values():
                for block in free:
                    if block.resident_bytes and block.idle_since <= latest:
                        self._warm_bytes -= block.resident_bytes
                        self._free_pages(block)
            return self.has_idle_memory()
        finally:
            self._lock.release()

    def has_idle_memory(self) -> bool:
        return self._warm_bytes > 0 or bool(self.returned) or has_running_forks()

    def _free_pages(self, block: _Block) -> None:
        block.mapping = None
        block.resident_bytes = 0
        self.arena.punch_hole(block.offset, block.capacity)


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
    for done in range(0, len(piece), COPY_CHUNK_BYTES):
        part = piece[done : done + COPY_CHUNK_BYTES]
        target[at + done : at + done + len(part)] = part


def pristine_view(segment: RangeRef) -> memoryview:
    """Return a view of data that this process wrote and never changes.

    Pickling parts of the view makes no copy.
    """
    assert isinstance(segment, Segment)
    whole = view(segment)
    if isinstance(whole.obj, Mapping):
        whole.obj.pristine = True
    return whole


def find_place(buffer: memoryview, arena: Arena) -> tuple[Segment, int, int] | None:
    """Return the place of `buffer` in `arena`, or None if it is not part of a pristine view."""
    mapping: Any = buffer
    while isinstance(mapping, memoryview):
        mapping = mapping.obj
    if not isinstance(mapping, Mapping) or not mapping.pristine:
        return None
    segment = mapping.range_ref
    # In the second case, the segment's writer would not know that the range is lent.
    if segment.arena is not arena or not segment.belongs_to_this_process():
        return None
    assert isinstance(segment, Segment)
    return segment, address_of(buffer) - address_of(mapping), buffer.nbytes
