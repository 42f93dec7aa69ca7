"""The arena: memory that a controller and all its drones share, for what is too large to go through a socket.

    writer                       the arena, one memfd                        reader
    Store.put ──one copy──> [ block ][ block ]..  ..[ block ]  ──mmap──> views, copy-on-write
       ^                     region 0: controller    region 7: drone 7            │
       └── recycled <── Segment dies <── ... the number of the loan comes back <──┘ Loan dies with the last view

Made before the zygote, so that every drone has it by inheritance: no descriptor is ever passed, and what one of
them wrote stays when it dies. The kernel owns it: it has no name, cannot be left behind, and is freed with the
last process that has it. It is sparse: each writer has a region of addresses to itself, so writers need no lock
between them, and a drone gets a region that no other has had.

Who may look at a range has a `Keep` on it: a `Segment` at the writer's, a `Loan` at the reader's. They end with
Python's own references, in any thread and in the middle of anything, so their ends only append to a deque.

Why nobody's data changes under him:
* a block is used again only when its Segment is gone, and whoever has lent it holds that until the reader's
  Loan came back, or the reader is dead;
* a Loan is held by the mapping, and the mapping by every view of it;
* a fork takes mappings along. So before each fork a reference to every mapped Keep is taken: our own forks
  give theirs back when the zygote has ended, those of others never do (their child may look for ever).
* what is written into a mapping is the reader's alone: it is private (copy-on-write).

How fast: fresh pages cost more than the copy (100 MB on a 2-core machine: 47 ms by `write`, 81 by memory
mapped; used again 8 by memory mapped, 16 by `write`). So blocks are kept warm for a while, and fresh ones are filled by
`write`, which saves zeroing them. The GIL is let go between pieces of a copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

__all__ = ["Arena", "Full", "Keep", "Segment", "Store", "kept_through_fork", "place_of", "pristine_view", "view"]

Buffer = bytes | bytearray | memoryview

SPAN = 1 << 42
"""Addresses of one region: 4 TiB, of which only what is written takes memory."""
REGIONS = 1 << 20
ALIGN = 64
MAPPED_FROM = 1 << 20
"""Bytes of a block that its writer maps when it is used again; smaller ones are written, which is as fast."""
PIECE = 4 << 20
"""Bytes copied between two chances for other threads."""
IDLE = 1.0
"""Seconds that a block stays warm without use."""

_MAP_FIXED, _MAP_POPULATE = 0x10, 0x8000
_PUNCH_HOLE, _KEEP_SIZE = 2, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Full(MemoryError):
    """There is no room for it. The message says how much there is."""


class Arena:
    """The memory itself, and what this image may look at in it. Any thread may call it.

    `ceiling` bounds the bytes in use, all writers together; writers that come to it at the same time may pass it
    by what each of them writes.
    """

    def __init__(self, ceiling: int, fd: int | None = None) -> None:
        self.ceiling = ceiling
        self.fd = os.memfd_create("polycephaly-arena", os.MFD_CLOEXEC) if fd is None else fd
        self.ended = False
        self._open = [self.fd]
        self._pid = os.getpid()
        self._keeps: dict[int, tuple[int, int]] = {}
        self._mapped: dict[int, weakref.ref[Keep]] = {}
        self._lasting: set[Keep] = set()
        self._warned = False
        _arenas.add(self)

    def enter(self) -> None:
        """In a drone: it is now this image's, too. (It does not warn: the controller sees which way results come.)"""
        self._pid = os.getpid()
        self._warned = True
        self._keeps.clear()

    def warn(self, error: Exception) -> None:
        """Once: that large values go another way."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"no shared memory for a large value, which goes through a socket: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def used(self) -> int:
        """Bytes of memory that all writers together have in it."""
        return os.fstat(self.fd).st_blocks * 512

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def punch(self, offset: int, length: int) -> None:
        """Gives the memory of a range back to the system. Not from a forked child: it is its parent's."""
        marker = object()
        self._keeps[id(marker)] = (0, 0)  # from here on it is not closed: see `_let_go`
        if self._open and os.getpid() == self._pid:
            _libc.fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)
        self._let_go(id(marker))

    def clear(self, start: int, end: int) -> None:
        """Gives back all of it that this image does not look at."""
        kept = sorted(each for each in list(self._keeps.values()) if start <= each[0] < end)
        for offset, length in kept:
            if offset > start:
                self.punch(start, offset - start)
            start = max(start, offset + _whole_pages(length))
        if start < end:
            self.punch(start, end - start)

    def clear_region(self, number: int) -> None:
        self.clear(number * SPAN, (number + 1) * SPAN)

    def end(self) -> None:
        """Nobody else uses it any more. What this image still looks at stays until it does not."""
        self._keeps[0] = (0, 0)  # so that no Keep that ends now closes it meanwhile
        self.ended = True
        for keep in list(self._lasting):
            keep.lasting = True
        self._lasting.clear()
        self.clear(0, REGIONS * SPAN)
        self._let_go(0)

    def _let_go(self, key: int) -> None:
        """The last one closes it. The look and the taking are one run of straight-line code, in which CPython gives
        the interpreter to nobody; so whoever entered himself before it is seen, and who does after it finds
        nothing open."""
        self._keeps.pop(key, None)
        if self._open and os.getpid() != self._pid:
            return
        try:
            fd = self._open.pop() if self.ended and not self._keeps else None
        except IndexError:
            return
        if fd is not None:
            os.close(fd)


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


class Keep:
    """A range that stays as it is for as long as this object lives."""

    __slots__ = ("__weakref__", "arena", "lasting", "length", "offset")

    def __init__(self, arena: Arena, offset: int, length: int) -> None:
        self.arena = arena
        self.offset = offset
        self.length = length
        self.lasting = False  # a child that somebody forked may look at it for ever
        arena._keeps[id(self)] = (offset, length)

    def __del__(self) -> None:
        """In any thread, at any point of its code.

        `Arena.end` may come at any point of this too. Before the look at `ended`: the range is punched here. After
        it, and before the last line: `end` sees the range among the keeps and leaves it; it goes when the arena
        is closed.
        """
        arena = self.arena
        arena._mapped.pop(id(self), None)
        if not self.lasting:
            if arena.ended:
                arena.punch(self.offset, _whole_pages(self.length))
            else:
                self._give_back()
        arena._let_go(id(self))

    def _give_back(self) -> None:
        raise NotImplementedError


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


class Store:
    """One image's region: where it writes. Any thread may call it."""

    def __init__(self, arena: Arena, number: int) -> None:
        self.arena = arena
        self._number = number
        self._top = (number % REGIONS) * SPAN
        self._end = self._top + SPAN
        self._free: dict[int, deque[_Block]] = {}  # by size; the warm ones at the right
        self._warm = 0  # bytes that they have
        self._returned: deque[_Block] = deque()
        self._lock = threading.Lock()

    def put(self, runs: Sequence[Sequence[Buffer]]) -> tuple[Segment, list[tuple[int, int]]]:
        """Copies each of `runs`, its pieces end to end: the segment, and each run's offset in it and length.

        Raises `Full` where that would be more than the ceiling, and `OSError` where the system refuses.
        """
        places: list[tuple[int, int]] = []
        size = 0
        for run in runs:
            length = sum(map(len, run))
            places.append((size, length))
            size += -(-length // ALIGN) * ALIGN
        with self._lock:
            block = self._take(size)
        segment = Segment(self, block, size)  # before the look: see Arena.end
        if self.arena.ended:
            raise Full("the pool has ended")
        if size > block.filled:
            self._check_room(size - block.filled)
        try:
            self._fill(block, runs, places, size)
        except BaseException:
            self._cool(block)  # nobody knows how much of it has memory
            raise
        return segment, places

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

    def _fill(self, block: _Block, runs: Sequence[Sequence[Buffer]], places: list[tuple[int, int]], size: int) -> None:
        target: memoryview | None = None
        if MAPPED_FROM <= size <= block.filled:
            if block.mapping is None or len(block.mapping) < size:
                block.mapping = _map(self.arena.fd, block.offset, block.filled, mmap.MAP_SHARED | _MAP_POPULATE)
            target = memoryview(block.mapping)
        for run, (at, _) in zip(runs, places, strict=True):
            for piece in run:
                if target is not None:
                    _copy(target, at, memoryview(piece))
                else:
                    _write(self.arena.fd, block.offset + at, memoryview(piece))
                at += len(piece)
        block.filled = max(block.filled, size)

    def tidy(self, idle: float = IDLE) -> bool:
        """Gives back the memory of blocks that nobody has used for so many seconds. Are there others?"""
        latest = monotonic() - idle
        with self._lock:
            self._take_back()
            for free in self._free.values():
                for block in free:
                    if block.filled and block.idle_since <= latest:
                        self._warm -= block.filled
                        self._cool(block)
            return self._warm > 0

    def has_warm(self) -> bool:
        return self._warm > 0 or bool(self._returned)

    def _cool(self, block: _Block) -> None:
        block.mapping = None
        block.filled = 0
        self.arena.punch(block.offset, block.room)


def _rounded(size: int) -> int:
    """Whole pages, and few different sizes: a sixteenth more at most. What is not written takes no memory."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 5))
    return max(step, -(-size // step) * step)


def _whole_pages(length: int) -> int:
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


def _write(fd: int, offset: int, piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        done += os.pwrite(fd, piece[done : done + (64 << 20)], offset + done)


def _copy(target: memoryview, at: int, piece: memoryview) -> None:
    for done in range(0, len(piece), PIECE):
        part = piece[done : done + PIECE]
        target[at + done : at + done + len(part)] = part


# -- looking at a range -------------------------------------------------------------------------------


class _Mapping(mmap.mmap):
    """Memory of an arena in this image. Every view of it holds it, and it holds the Keep."""

    keep: Keep
    pristine = False  # nobody in this image writes into it


def pristine_view(segment: Segment) -> memoryview:
    """A view of what this image has written itself: nobody may write into it. What is pickled of it is not copied."""
    whole = view(segment)
    if isinstance(whole.obj, _Mapping):
        whole.obj.pristine = True
    return whole


def place_of(buffer: memoryview, arena: Arena) -> tuple[Segment, int, int] | None:
    """Where in `arena` it lies, if it is part of a pristine view."""
    mapping: Any = buffer
    while isinstance(mapping, memoryview):
        mapping = mapping.obj
    if not isinstance(mapping, _Mapping) or not mapping.pristine or mapping.keep.arena is not arena:
        return None
    assert isinstance(mapping.keep, Segment)
    return mapping.keep, _address(buffer) - _address(mapping), buffer.nbytes


def view(keep: Keep) -> memoryview:
    """The range, to be read and written: what is written is this image's alone.

    It is copied where the system allows no more mappings. Raises `ValueError` for a range that is not there.
    """
    arena = keep.arena
    if keep.offset + keep.length > _whole_pages(arena.size()):
        raise ValueError(f"a range of {keep.length} bytes at {keep.offset}, beyond the end of the arena")
    try:
        mapping = _map(arena.fd, keep.offset, keep.length, mmap.MAP_PRIVATE)
    except OSError:
        return memoryview(_read(arena.fd, keep.offset, keep.length))
    arena._mapped[id(keep)] = weakref.ref(keep)
    mapping.keep = keep
    return memoryview(mapping)


def _map(fd: int, offset: int, length: int, flags: int) -> _Mapping:
    """A mapping that holds no descriptor, while each `mmap.mmap` of a file has one of its own.

    So that thousands of arrays can be held, an anonymous mapping is replaced by that of the file, in place.
    """
    mapping = _Mapping(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = _address(mapping)
    read_write = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, length, read_write, flags | _MAP_FIXED, fd, offset) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapping


def _address(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _read(fd: int, offset: int, length: int) -> bytearray:
    target = bytearray(length)
    rest = memoryview(target)
    while rest:
        done = os.preadv(fd, [rest[: 64 << 20]], offset)
        rest, offset = rest[done:], offset + done
    return target


# -- forks ----------------------------------------------------------------------------------------------

_at_forks: dict[int, list[Keep]] = {}  # by thread: what is mapped at the moment of its fork
_ours: dict[int, list[Keep]] = {}  # by thread: it forks for us, and holds on to these until the child has ended


@contextmanager
def kept_through_fork(keeps: list[Keep]) -> Iterator[None]:
    """A fork in this block puts into `keeps` what has to be held until its child has ended."""
    me = threading.get_ident()
    _ours[me] = keeps
    try:
        yield
    finally:
        del _ours[me]


def _before_fork() -> None:
    mapped = [ref() for arena in list(_arenas) for ref in list(arena._mapped.values())]
    _at_forks[threading.get_ident()] = [keep for keep in mapped if keep is not None]


def _after_fork_in_parent() -> None:
    me = threading.get_ident()
    held = _at_forks.pop(me, [])
    if me in _ours:
        _ours[me] += held
    else:
        for keep in held:
            keep.arena._lasting.add(keep)


def _after_fork_in_child() -> None:
    _at_forks.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
