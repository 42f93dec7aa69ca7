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
* a fork takes mappings along. So before each fork a reference to every mapped Keep is taken, until the child has
  ended: of our own forks the launcher knows when; of those of others a pipe tells, whose other end the child has.
* what is written into a mapping is the reader's alone: it is private (copy-on-write).

How fast: fresh pages cost more than the copy (100 MB on a 2-core machine: 47 ms by `write`, 81 by memory
mapped; used again 8 by memory mapped, 16 by `write`). So blocks are kept warm for a while, and fresh ones are filled by
`write`, which saves zeroing them. The GIL is let go between pieces of a copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

from ..launch.shield import Shield

__all__ = [
    "SPAN",
    "Arena",
    "Full",
    "Keep",
    "Segment",
    "Store",
    "kept_through_fork",
    "place_of",
    "pristine_view",
    "view",
]

Buffer = bytes | bytearray | memoryview

SPAN = 1 << 41
"""Addresses of one region: 2 TiB, of which only what is written takes memory."""
REGIONS = 1 << 21
"""A drone that comes after so many others has none, and finds no room."""
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
        self._image = 0
        self._keeps: dict[int, tuple[int, int]] = {}
        self._mapped: dict[int, weakref.ref[_Mapping]] = {}
        self.ring: Callable[[], object] = lambda: None
        """Called, in any thread and in the middle of anything, when there may be something to tidy."""
        self._warned = False
        key = id(self)
        _arenas[key] = weakref.ref(self, lambda _: _arenas.pop(key, None))

    def enter(self) -> None:
        """In a drone: it is now this image's, too. (It does not warn: the controller sees which way results come.)

        What came along from the images that it descends from is theirs: its end here means nothing.
        """
        self._pid = os.getpid()
        self._image += 1
        self.ring = lambda: None
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
        """Gives the memory of a range's pages back to the system. Not from a forked child: it is its parent's."""
        marker = object()
        self._keeps[id(marker)] = (0, 0)  # from here on it is not closed: see `_let_go`
        if self._open and os.getpid() == self._pid:
            _libc.fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, offset, _whole_pages(length))
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

    def end(self) -> None:
        """Nobody else uses it any more. What this image still looks at stays until it does not."""
        self._keeps[0] = (0, 0)  # so that no Keep that ends now closes it meanwhile
        self.ended = True
        for keep in (forked := _forked_from(self)):  # a child of somebody's may look at them for ever
            keep.lasting = True
        self.clear(0, REGIONS * SPAN)
        forked.clear()
        _look_for_ended_forks()
        self._let_go(0)

    def _let_go(self, key: int = -1) -> None:
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


_arenas: dict[int, weakref.ref[Arena]] = {}  # its values are listed in one step, while others make some


class Keep:
    """A range that stays as it is for as long as this object lives."""

    __slots__ = ("__weakref__", "_image", "arena", "lasting", "length", "offset")

    def __init__(self, arena: Arena, offset: int, length: int) -> None:
        self.arena = arena
        self.offset = offset
        self.length = length
        self.lasting = False  # its end does not end the range
        self._image = arena._image
        arena._keeps[id(self)] = (offset, length)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """In any thread, at any point of its code; when the interpreter ends, the kernel sees to all of it.

        It leaves the keeps first, and looks then who else has come to an end; `Arena.end`, and `Ledger.close`, say that
        they have, and look at the keeps then. So one of the two gives the memory back.
        """
        if finalizing():
            return
        arena = self.arena
        arena._keeps.pop(id(self), None)
        if not self.lasting and self.is_of_this_image():
            if arena.ended:
                arena.punch(self.offset, self.length)
            else:
                self._give_back()
        arena._let_go()

    def is_of_this_image(self) -> bool:
        return self._image == self.arena._image

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
        """Copies each of `runs`, its pieces end to end: the segment, and each run's offset in it and length.

        Raises `Full` where that would be more than the ceiling, and `OSError` where the system refuses.
        """
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
        with self._lock, Shield():  # Ctrl-C between the lines would lose the block
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
        """Gives back the memory of blocks that nobody has used for so many seconds, and lets go of what was held for
        forked children that have ended. Is there more to come?"""
        _look_for_ended_forks()
        if not self._lock.acquire(blocking=False):  # who has it may run a finalizer that waits for who calls this
            return True
        try:
            self._owner = threading.get_ident()
            self._take_back()
            latest = monotonic() - idle
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
        return self._warm > 0 or bool(self._returned) or len(_forks) > (-1 in _forks)

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
    if not mapping.keep.is_of_this_image():  # its writer does not know that it would be lent
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
    mapping.keep = keep
    mapped, key = arena._mapped, id(mapping)
    mapped[key] = weakref.ref(mapping, lambda _: mapped.pop(key, None))
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
        if not done:  # the file ends before the padding does
            break
        rest, offset = rest[done:], offset + done
    return target


# -- forks ----------------------------------------------------------------------------------------------

_starting: dict[int, tuple[list[Keep], tuple[int, int]]] = {}
"""By thread: what is mapped at the moment of its fork, and the pipe that will tell of the child's end."""
_ours: dict[int, list[Keep]] = {}
"""By thread: it forks for us, and holds on to these until the child has ended."""
_forks: dict[int, list[Keep]] = {}
"""By the pipe's descriptor (-1: there was none to be had): what is held for a child that somebody else has forked."""
_looking = threading.Lock()


@contextmanager
def kept_through_fork(keeps: list[Keep]) -> Iterator[None]:
    """A fork in this block puts into `keeps` what has to be held until its child has ended."""
    me = threading.get_ident()
    _ours[me] = keeps
    try:
        yield
    finally:
        _ours.pop(me, None)


def _before_fork() -> None:
    _look_for_ended_forks()
    me = os.getpid()  # what this image has inherited is held by who lent it
    arenas = [arena for ref in list(_arenas.values()) if (arena := ref()) is not None and arena._pid == me]
    mapped = [ref() for arena in arenas for ref in list(arena._mapped.values())]
    held = [each.keep for each in mapped if each is not None and each.keep.is_of_this_image()]
    pipe = -1, -1
    if held and threading.get_ident() not in _ours:
        with suppress(OSError):  # no descriptors left: then it is held for ever
            pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    _starting[threading.get_ident()] = held, pipe


def _after_fork_in_parent() -> None:
    me = threading.get_ident()
    held, (reader, writer) = _starting.pop(me, ([], (-1, -1)))
    if me in _ours:
        _ours[me] += held
    elif held:
        if writer >= 0:
            os.close(writer)
        _forks.setdefault(reader, []).extend(held)
        for keep in held:
            keep.arena.ring()


def _after_fork_in_child() -> None:
    """Of its own pipe this one keeps the writing end, to its end or until it becomes another program."""
    _, mine = _starting.pop(threading.get_ident(), ([], (-1, -1)))
    others = [fd for _, pipe in _starting.values() for fd in pipe]
    for fd in (mine[0], *others, *_forks):
        if fd >= 0:
            os.close(fd)
    _starting.clear()
    _ours.clear()
    _forks.clear()


def _look_for_ended_forks() -> None:
    """At the end of a pipe, all who had its other end have closed it. One thread at a time: it closes what it reads."""
    if _forks and _looking.acquire(blocking=False):
        try:
            for fd, held in list(_forks.items()):
                if fd >= 0 and (not held or _at_end(fd)):
                    del _forks[fd]
                    os.close(fd)
        finally:
            _looking.release()


def _at_end(pipe: int) -> bool:
    try:
        return not os.read(pipe, 1)
    except BlockingIOError:
        return False


def _forked_from(arena: Arena) -> list[Keep]:
    """What is held of it for children: takes that out."""
    taken = []
    for held in list(_forks.values()):
        taken += [keep for keep in held if keep.arena is arena]
        held[:] = [keep for keep in held if keep.arena is not arena]
    return taken


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
