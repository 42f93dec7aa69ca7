"""The arena: memory that a controller and all its drones share, for what is too large to go through
a socket.

    writer                       the arena, one memfd                        reader
    Store.put ──one copy──> [ block ][ block ]..  ..[ block ]  ──mmap──> views, copy-on-write
       ^                     region 0: controller    region 7: drone 7            │
       └── recycled <── Segment dies <── ... the number of the loan comes back <──┘ Loan dies with the last view

Made before the zygote, so that every drone has it by inheritance: no descriptor is ever passed, and
what one of them wrote stays when it dies. The kernel owns it: it has no name, cannot be left
behind, and is freed with the last process that has it. It is sparse: each writer has a region of
addresses to itself, so writers need no lock between them, and a drone gets a region that no other
has had.

Who may look at a range has a `Keep` on it: a `Segment` at the writer's, a `ObjectRef` at the
reader's. They end with Python's own references, in any thread and in the middle of anything, so
their ends only append to a deque.

Why nobody's data changes under him:
* a block is used again only when its Segment is gone, and whoever has lent it holds that until the
  reader's Loan came back, or the reader is dead;
* a Loan is held by the mapping, and the mapping by every view of it;
* a fork takes mappings along. So before each fork a reference to every mapped Keep is taken, until
  the child has ended: of our own forks the launcher knows when; of those of others a pipe tells,
  whose other end the child has.
* what is written into a mapping is the reader's alone: it is private (copy-on-write).
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
"""Addresses of one region: 2 TiB, of which only what is written takes memory."""
REGIONS = 1 << 21
"""A drone that comes after so many others has none, and finds no room."""

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
    """There is no room for it. The message says how much there is."""


class Arena:
    """The memory itself, and what this image may look at in it. Any thread may call it.

    `ceiling` bounds the bytes in use, all writers together; writers that come to it at the same
    time may pass it by what each of them writes."""

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
        """Called, in any thread and in the middle of anything, when there may be something to
        tidy."""
        self._warned = False
        key = id(self)
        _arenas[key] = weakref.ref(self, lambda _: _arenas.pop(key, None))

    def enter(self) -> None:
        """In a drone: it is now this image's, too. (It does not warn: the controller sees which way
        results come.)

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
        """Gives the memory of a range's pages back to the system. Not from a forked child: it is
        its parent's."""
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
        for keep in (
            forked := _forked_from(self)
        ):  # a child of somebody's may look at them for ever
            keep.lasting = True
        self.clear(0, REGIONS * SPAN)
        forked.clear()
        look_for_ended_forks()
        self._let_go(0)

    def _let_go(self, key: int = -1) -> None:
        """The last one closes it. The look and the taking are one run of straight-line code, in
        which CPython gives the interpreter to nobody; so whoever entered himself before it is seen,
        and who does after it finds nothing open."""
        self._keeps.pop(key, None)
        if self._open and os.getpid() != self._pid:
            return
        try:
            fd = self._open.pop() if self.ended and not self._keeps else None
        except IndexError:
            return
        if fd is not None:
            os.close(fd)


_arenas: dict[
    int, weakref.ref[Arena]
] = {}  # its values are listed in one step, while others make some


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
        """In any thread, at any point of its code; when the interpreter ends, the kernel sees to
        all of it.

        It leaves the keeps first, and looks then who else has come to an end; `Arena.end`, and
        `Ledger.close`, say that they have, and look at the keeps then. So one of the two gives the
        memory back."""
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


# -- looking at a range ----------------------------------------------------------------------------


class Mapping(mmap.mmap):
    """Memory of an arena in this image. Every view of it holds it, and it holds the Keep."""

    keep: Keep
    pristine = False  # nobody in this image writes into it


def view(keep: Keep) -> memoryview:
    """The range, to be read and written: what is written is this image's alone.

    It is copied where the system allows no more mappings. Raises `ValueError` for a range that is
    not there."""
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
    """A mapping that holds no descriptor, while each `mmap.mmap` of a file has one of its own.

    So that thousands of arrays can be held, an anonymous mapping is replaced by that of the file,
    in place."""
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
        if not done:  # the file ends before the padding does
            break
        rest, offset = rest[done:], offset + done
    return target


# -- forks -----------------------------------------------------------------------------------------

_starting: dict[int, tuple[list[Keep], tuple[int, int]]] = {}
"""By thread: what is mapped at the moment of its fork, and the pipe that will tell of the child's
end."""
_ours: dict[int, list[Keep]] = {}
"""By thread: it forks for us, and holds on to these until the child has ended."""
_forks: dict[int, list[Keep]] = {}
"""By the pipe's descriptor (-1: there was none to be had): what is held for a child that somebody
else has forked."""
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
    look_for_ended_forks()
    me = os.getpid()  # what this image has inherited is held by who lent it
    arenas = [
        arena for ref in list(_arenas.values()) if (arena := ref()) is not None and arena._pid == me
    ]
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
    """Of its own pipe this one keeps the writing end, to its end or until it becomes another
    program."""
    _, mine = _starting.pop(threading.get_ident(), ([], (-1, -1)))
    others = [fd for _, pipe in _starting.values() for fd in pipe]
    for fd in (mine[0], *others, *_forks):
        if fd >= 0:
            os.close(fd)
    _starting.clear()
    _ours.clear()
    _forks.clear()


def look_for_ended_forks() -> None:
    """At the end of a pipe, all who had its other end have closed it. One thread at a time: it
    closes what it reads."""
    if _forks and _looking.acquire(blocking=False):
        try:
            for fd, held in list(_forks.items()):
                if fd >= 0 and (not held or _at_end(fd)):
                    del _forks[fd]
                    os.close(fd)
        finally:
            _looking.release()


def forks_run() -> bool:
    """Is anything held for a child that may end?"""
    return len(_forks) > (-1 in _forks)


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


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
