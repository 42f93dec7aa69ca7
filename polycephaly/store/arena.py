"""The arena: memory shared by a controller and its drones, for data too large for a socket.

    writer                       the arena, one memfd                   reader
    Store.put ──one copy──> [ block ][ block ] .. [ block ]  ──mmap──> views, copy-on-write
       ^                     region 0: controller, 7: drone 7            │
       └─ reused <─ Segment dies <── number of the reference <── ObjectRef dies with the last view

The arena is made before the zygote, so every drone inherits it: no descriptor is ever passed, and
data written by a drone remain when the drone dies. The memfd is sparse, and each writer has an
address region of its own, so that writers need no lock between them.

A process that may read a range has a `Keep` on it: a `Segment` in the writer, an `ObjectRef` in the
reader. Keeps die with Python's own references, in any thread and at any point of its code, so their
finalizers only append to a deque.

See docs/decisions/0006-object-references.md for the reasons why no reader's data change.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = [
    "REGIONS",
    "SPAN",
    "Arena",
    "Full",
    "Keep",
    "Mapping",
    "address_of",
    "forks_run",
    "kept_through_fork",
    "look_for_ended_forks",
    "map_range",
    "view",
]

SPAN = 1 << 41
"""Size in bytes of one region's addresses: 2 TiB. Only pages that were written take memory."""
REGIONS = 1 << 21
"""Number of regions. A drone started after that many others has no region, and finds no room."""

_MAP_FIXED = 0x10
_PUNCH_HOLE, _KEEP_SIZE = 2, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Full(MemoryError):
    """The arena has no room for a value. The message reports how much there is."""


class Arena:
    """The shared memory itself, and the ranges in use by this process. Any thread may call it.

    `ceiling` limits the bytes in use by all writers together. Writers that reach the limit at the
    same time may exceed it by the bytes that each of them writes.
    """

    def __init__(self, ceiling: int, fd: int | None = None) -> None:
        self.ceiling = ceiling
        self.fd = os.memfd_create("polycephaly-arena", os.MFD_CLOEXEC) if fd is None else fd
        self.ended = False
        self._open = [self.fd]
        self._pid = os.getpid()
        self._image = 0
        self._keeps: dict[int, tuple[int, int]] = {}
        self._mapped: dict[int, weakref.ref[Mapping]] = {}
        self.ring: Callable[[], object] = lambda: None
        """Called when cleaning up may be useful, in any thread and at any point of its code."""
        self._warned = False
        key = id(self)
        _arenas[key] = weakref.ref(self, lambda _: _arenas.pop(key, None))

    def enter(self) -> None:
        """Take the arena over in a drone, where it was inherited.

        Keeps inherited from the drone's ancestors belong to these: their end here frees nothing. A
        drone does not warn, because the controller sees which way results come.
        """
        self._pid = os.getpid()
        self._image += 1
        self.ring = lambda: None
        self._warned = True
        self._keeps.clear()

    def warn(self, error: Exception) -> None:
        """Warn, once, that large values take another path."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"no shared memory for a large value, which goes through a socket: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def used(self) -> int:
        """Return the bytes of memory in use, by all writers together."""
        return os.fstat(self.fd).st_blocks * 512

    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def punch(self, offset: int, length: int) -> None:
        """Return a range's pages to the system.

        Does nothing in a forked child, because the pages are its parent's.
        """
        marker = object()
        self._keeps[id(marker)] = (0, 0)  # prevents closing from here on: see `_let_go`
        if self._open and os.getpid() == self._pid:
            _libc.fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, offset, _whole_pages(length))
        self._let_go(id(marker))

    def clear(self, start: int, end: int) -> None:
        """Free all memory from `start` to `end` that this process does not use."""
        kept = sorted(each for each in list(self._keeps.values()) if start <= each[0] < end)
        for offset, length in kept:
            if offset > start:
                self.punch(start, offset - start)
            start = max(start, offset + _whole_pages(length))
        if start < end:
            self.punch(start, end - start)

    def end(self) -> None:
        """End the arena, which no other process uses any more.

        Ranges in use here stay until they are released.
        """
        # Prevents a Keep that ends now from closing the arena in the meantime.
        self._keeps[0] = (0, 0)
        self.ended = True
        # A child that user code forked may read these ranges for ever.
        for keep in (forked := _forked_from(self)):
            keep.lasting = True
        self.clear(0, REGIONS * SPAN)
        forked.clear()
        look_for_ended_forks()
        self._let_go(0)

    def _let_go(self, key: int = -1) -> None:
        """Remove `key` from the keeps; close the descriptor if the arena has ended without keeps.

        The check and `pop` are straight-line code, in which CPython never switches threads. So a
        thread that entered its marker before is seen, and a thread that does so later finds no open
        descriptor.
        """
        self._keeps.pop(key, None)
        if self._open and os.getpid() != self._pid:
            return
        try:
            fd = self._open.pop() if self.ended and not self._keeps else None
        except IndexError:
            return
        if fd is not None:
            os.close(fd)


# The values are listed in one step, because other threads may be adding arenas.
_arenas: dict[int, weakref.ref[Arena]] = {}


class Keep:
    """A range that stays unchanged for as long as this object lives."""

    __slots__ = ("__weakref__", "_image", "arena", "lasting", "length", "offset")

    def __init__(self, arena: Arena, offset: int, length: int) -> None:
        self.arena = arena
        self.offset = offset
        self.length = length
        self.lasting = False  # True if the end of this object does not free the range
        self._image = arena._image
        arena._keeps[id(self)] = (offset, length)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Free the range, in any thread and at any point of its code.

        At interpreter exit there is nothing to do: the kernel frees all of it. The keep is removed
        first, then `ended` is checked. `Arena.end` and `RefTable.close` work in the opposite order:
        they set their flag, then look at the keeps. So at least one of the two frees the memory.
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


def _whole_pages(length: int) -> int:
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


# -- mapping a range -------------------------------------------------------------------------------


class Mapping(mmap.mmap):
    """Arena memory mapped in this process. Every view holds its mapping, which holds the Keep."""

    keep: Keep
    pristine = False  # True if this process never writes to it


def view(keep: Keep) -> memoryview:
    """Return a private, writable view of the range: writes stay in this process.

    The range is copied if the system allows no more mappings. Raises `ValueError` if the range is
    beyond the end of the arena.
    """
    arena = keep.arena
    if keep.offset + keep.length > _whole_pages(arena.size()):
        raise ValueError(
            f"a range of {keep.length} bytes at {keep.offset}, beyond the end of the arena"
        )
    try:
        mapping = map_range(arena.fd, keep.offset, keep.length, mmap.MAP_PRIVATE)
    except OSError:
        return memoryview(_read(arena.fd, keep.offset, keep.length))
    mapping.keep = keep
    mapped, key = arena._mapped, id(mapping)
    mapped[key] = weakref.ref(mapping, lambda _: mapped.pop(key, None))
    return memoryview(mapping)


def map_range(fd: int, offset: int, length: int, flags: int) -> Mapping:
    """Map a range without holding a descriptor: each `mmap.mmap` of a file would duplicate one.

    An anonymous mapping is replaced, in place, by that of the file. So thousands of arrays can be
    held.
    """
    mapping = Mapping(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = address_of(mapping)
    read_write = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, length, read_write, flags | _MAP_FIXED, fd, offset) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapping


def address_of(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _read(fd: int, offset: int, length: int) -> bytearray:
    target = bytearray(length)
    rest = memoryview(target)
    while rest:
        done = os.preadv(fd, [rest[: 64 << 20]], offset)
        if not done:  # The file ends before the padding does.
            break
        rest, offset = rest[done:], offset + done
    return target


# -- forks -----------------------------------------------------------------------------------------

_starting: dict[int, tuple[list[Keep], tuple[int, int]]] = {}
"""By thread: the ranges mapped at the moment of its fork, and the pipe that will report the child's
end.
"""
_ours: dict[int, list[Keep]] = {}
"""By thread: for our own forks, the list to fill with the ranges kept until the child has ended."""
_forks: dict[int, list[Keep]] = {}
"""By the pipe's descriptor (-1: no pipe could be made): the ranges kept for a child that user code
forked.
"""
_looking = threading.Lock()


@contextmanager
def kept_through_fork(keeps: list[Keep]) -> Iterator[None]:
    """Collect in `keeps` the ranges to hold until the child forked in this block has ended."""
    me = threading.get_ident()
    _ours[me] = keeps
    try:
        yield
    finally:
        _ours.pop(me, None)


def _before_fork() -> None:
    look_for_ended_forks()
    me = os.getpid()  # inherited ranges are kept by the process that lent them
    arenas = [
        arena for ref in list(_arenas.values()) if (arena := ref()) is not None and arena._pid == me
    ]
    mapped = [ref() for arena in arenas for ref in list(arena._mapped.values())]
    held = [each.keep for each in mapped if each is not None and each.keep.is_of_this_image()]
    pipe = -1, -1
    if held and threading.get_ident() not in _ours:
        with suppress(OSError):  # no descriptors left: the ranges are kept for ever
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
    """Close the inherited pipe ends, except this child's writing end.

    The child keeps that end until it exits or executes another program.
    """
    _, mine = _starting.pop(threading.get_ident(), ([], (-1, -1)))
    others = [fd for _, pipe in _starting.values() for fd in pipe]
    for fd in (mine[0], *others, *_forks):
        if fd >= 0:
            os.close(fd)
    _starting.clear()
    _ours.clear()
    _forks.clear()


def look_for_ended_forks() -> None:
    """Release the ranges kept for children that have ended.

    A pipe is at its end when no process has the other end open any more. One thread at a time does
    this, because it closes the descriptors that it reads.
    """
    if _forks and _looking.acquire(blocking=False):
        try:
            for fd, held in list(_forks.items()):
                if fd >= 0 and (not held or _at_end(fd)):
                    del _forks[fd]
                    os.close(fd)
        finally:
            _looking.release()


def forks_run() -> bool:
    """Return whether ranges are kept for a child whose end can be detected."""
    return len(_forks) > (-1 in _forks)


def _at_end(pipe: int) -> bool:
    try:
        return not os.read(pipe, 1)
    except BlockingIOError:
        return False


def _forked_from(arena: Arena) -> list[Keep]:
    """Remove and return the ranges of `arena` that are kept for children."""
    taken = []
    for held in list(_forks.values()):
        taken += [keep for keep in held if keep.arena is arena]
        held[:] = [keep for keep in held if keep.arena is not arena]
    return taken


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
