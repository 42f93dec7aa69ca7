"""The arena of a pool: memory that the controller and the pool's drones share, for large data.

    writer                       the arena, one memfd                   reader
    Store.put ──one copy──> [ block ][ block ] .. [ block ]  ──mmap──> views, copy-on-write
       ^                     region 0: controller, 7: drone 7            │
       └─ reused <─ Segment freed <── number of the reference <── ObjectRef freed with last view

The arena is made before the zygote, so every drone inherits the descriptor, and no message carries
it. When a drone dies, the ranges of the drone's region that the controller uses remain, and
`RefTable.close` frees the rest. The memfd is sparse, and each writer has an address region of its
own, so that writers need no lock between them.

A process that may read a range has a `RangeRef` to it: a `Segment` in the writer, an `ObjectRef` in
the reader. A range reference ends with the last Python reference to it, in any thread and at any
point of that thread's code. So the finalizer only queues the return of the range and calls
`request_cleanup` or `on_release`. If the arena has ended or the lender is dead, the finalizer frees
the pages instead; the last finalizer of an ended arena closes the descriptor.

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
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from typing import Any

from .._compat import renew_in_child

REGION_BYTES = 1 << 41
"""Size in bytes of one region's addresses: 2 TiB. Only pages that were written take memory."""
MAX_REGIONS = 1 << 21
"""Number of regions: region 0 is the controller's, region N that of drone N.

Drones are numbered from 1. A drone whose number is not below this limit finds no room.
"""

_MAP_FIXED = 0x10
_PUNCH_HOLE, _KEEP_SIZE = 2, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Full(MemoryError):
    """The arena has no room for a value. The message reports how much there is."""


class Arena:
    """The shared memory itself, and the ranges in use by this process. Any thread may call it.

    `ceiling` limits the bytes that have memory (`used`), of all writers together. Writers that
    reach the limit at the same time may exceed it by the bytes that each of them writes.
    """

    def __init__(self, ceiling: int, fd: int | None = None) -> None:
        self.ceiling = ceiling
        self.fd = os.memfd_create("polycephaly-arena", os.MFD_CLOEXEC) if fd is None else fd
        self.ended = False
        self._open_fds = [self.fd]
        self.pid = os.getpid()
        self.range_refs: dict[int, tuple[int, int]] = {}
        self.mapped: dict[int, weakref.ref[Mapping]] = {}
        self.request_cleanup: Callable[[], object] = lambda: None
        """Called when a block was returned, or when ranges are kept for a forked child.

        The call may come in any thread, at any point of that thread's code. In the controller, the
        local engine then schedules `Store.free_idle_memory`.
        """
        self._warned = False
        _arenas[id(self)] = self

    def adopt(self) -> None:
        """Take the arena over in a drone, where it was inherited.

        The end of an inherited range reference frees nothing, because the range belongs to an
        ancestor. In a drone `request_cleanup` does nothing, and neither does `warn`, because the
        controller sees which way results come.
        """
        self.pid = os.getpid()
        self.request_cleanup = lambda: None
        self._warned = True
        self.range_refs.clear()

    def warn(self, error: Exception) -> None:
        """Warn, once, that large values take another path."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"no shared memory for a large value, which is sent through a socket: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def used(self) -> int:
        """Return the bytes of the arena that have memory, free blocks included (blocks.py)."""
        return os.fstat(self.fd).st_blocks * 512

    def punch_hole(self, offset: int, length: int) -> None:
        """Return a range's pages to the system.

        Does nothing in a forked child, because the pages are its parent's.
        """
        marker = object()
        # Prevents closing from here on: see `close_if_unused`.
        self.range_refs[id(marker)] = (0, 0)
        if self._open_fds and os.getpid() == self.pid:
            free_pages(self.fd, offset, _whole_pages(length))
        self.close_if_unused(id(marker))

    def clear(self, start: int, end: int) -> None:
        """Free the memory from `start` to `end`, except ranges there that this process uses.

        Called for the region of a dead drone, and for the whole arena at its end.
        """
        kept = sorted(each for each in list(self.range_refs.values()) if start <= each[0] < end)
        for offset, length in kept:
            if offset > start:
                self.punch_hole(start, offset - start)
            start = max(start, offset + _whole_pages(length))
        if start < end:
            self.punch_hole(start, end - start)

    def end(self) -> None:
        """End the arena, which no other process uses any more.

        Ranges in use here stay until they are released.
        """
        # Prevents a range reference that ends now from closing the arena in the meantime.
        self.range_refs[0] = (0, 0)
        self.ended = True
        self.request_cleanup = lambda: None  # values that stay must not keep the engine
        # A child that user code forked may read these ranges for ever: no process frees them.
        for range_ref in (forked := _pop_ranges_of(self)):
            range_ref.pid = 0
        self.clear(0, MAX_REGIONS * REGION_BYTES)
        forked.clear()
        release_ended_forks()
        self.close_if_unused(0)

    def close_if_unused(self, key: int = -1) -> None:
        """Remove a range reference; if the arena has ended and none is left, close the descriptor.

        The check and `pop` are straight-line code, in which CPython never switches threads. So a
        thread that entered its marker before is seen, and a thread that does so later finds no open
        descriptor.
        """
        self.range_refs.pop(key, None)
        if self._open_fds and os.getpid() != self.pid:
            return
        try:
            fd = self._open_fds.pop() if self.ended and not self.range_refs else None
        except IndexError:
            return
        if fd is not None:
            with suppress(OSError):  # other code has closed it
                os.close(fd)


# The arenas of this process, by `id`. `valuerefs` copies them to a list in one step, because other
# threads may be adding arenas.
_arenas: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()


class RangeRef:
    """A range that stays unchanged for as long as this object lives."""

    __slots__ = ("__weakref__", "arena", "length", "offset", "pid")

    def __init__(self, arena: Arena, offset: int, length: int) -> None:
        self.arena = arena
        self.offset = offset
        self.length = length
        self.pid = arena.pid  # of the process that frees the range
        arena.range_refs[id(self)] = (offset, length)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Free the range, in any thread and at any point of its code.

        At interpreter exit there is nothing to do: the kernel frees all of it. The entry is removed
        first, then `ended` is checked. `Arena.end` and `RefTable.close` work in the opposite order:
        they set their flag, then read the entries. So at least one of the two frees the memory.
        """
        if finalizing() or not hasattr(self, "pid"):  # an exception came before `__init__`
            return
        arena = self.arena
        arena.range_refs.pop(id(self), None)
        if self.belongs_to_this_process():
            if arena.ended:
                arena.punch_hole(self.offset, self.length)
            else:
                self._release()
        arena.close_if_unused()

    def belongs_to_this_process(self) -> bool:
        return self.pid == self.arena.pid

    def _release(self) -> None:
        """Return the range: a `Segment` to its `Store`, an `ObjectRef` to the lender."""
        raise NotImplementedError


def free_pages(fd: int, offset: int, length: int) -> None:
    """Free a range of whole pages of a file, if its file system has holes."""
    _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)


def _whole_pages(length: int) -> int:
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


# -- mapping a range -------------------------------------------------------------------------------


class Mapping(mmap.mmap):
    """Arena memory mapped in this process.

    Every view holds its mapping, which holds the range reference.
    """

    range_ref: RangeRef
    # True if this process wrote the data and never changes this mapping: then pickling a part of
    # the mapping makes no copy (`find_place` in blocks.py).
    pristine = False


def view(range_ref: RangeRef) -> memoryview:
    """Return a private, writable view of the range: writes stay in this process.

    The range is copied if the system allows no more mappings. Raises `ValueError` if the range is
    beyond the end of the arena.
    """
    arena, offset, length = range_ref.arena, range_ref.offset, range_ref.length
    if offset + length > _whole_pages(os.fstat(arena.fd).st_size):
        raise ValueError(f"a range of {length} bytes at {offset} is beyond the end of the arena")
    try:
        mapping = map_range(arena.fd, offset, length, mmap.MAP_PRIVATE)
    except OSError:
        return memoryview(_read(arena.fd, offset, length))
    mapping.range_ref = range_ref
    mapped, key = arena.mapped, id(mapping)

    def on_unmapped(_: object) -> None:
        mapped.pop(key, None)
        release_ended_forks()  # after the end of the pool, this is the only call of it

    mapped[key] = weakref.ref(mapping, on_unmapped)
    return memoryview(mapping)


def reset_view(mapping: Mapping) -> memoryview | None:
    """Return another view of a private mapping, with the data of the arena again; None if some
    view of it is still there, or the system refuses.
    """
    try:
        mapping.resize(-1)
    except ValueError:
        pass  # no such size: this is asked only after it was found that there is no view
    except BufferError:
        return None
    try:
        mapping.madvise(mmap.MADV_DONTNEED)
    except OSError:  # the memory is locked, for example
        return None
    return memoryview(mapping)


def make_memory(name: str, size: int) -> int:
    """Return a descriptor of new memory, sealed to this size. No file can be left behind."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


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

_forking: dict[int, tuple[list[RangeRef], tuple[int, int]]] = {}
"""By thread: the ranges mapped at the moment of its fork, and the pipe that will report the child's
end.
"""
_own_forks: dict[int, list[RangeRef]] = {}
"""By thread: for our own forks, the list to fill with the ranges kept until the child has ended."""
_forked_children: dict[int, list[RangeRef]] = {}
"""By the pipe's descriptor (-1: no pipe could be made): the ranges kept for a child that user code
forked.
"""
_forks_lock = threading.Lock()
renew_in_child(_forks_lock)


@contextmanager
def hold_ranges_through_fork(held: list[RangeRef]) -> Iterator[None]:
    """Collect in `held` the ranges to hold until the child forked in this block has ended."""
    me = threading.get_ident()
    _own_forks[me] = held
    try:
        yield
    finally:
        _own_forks.pop(me, None)


def _before_fork() -> None:
    release_ended_forks()
    me = os.getpid()  # inherited ranges are kept by the process that lent them
    arenas = [
        arena for ref in _arenas.valuerefs() if (arena := ref()) is not None and arena.pid == me
    ]
    mapped = [ref() for arena in arenas for ref in list(arena.mapped.values())]
    range_refs = [each.range_ref for each in mapped if each is not None]
    held = [each for each in range_refs if each.belongs_to_this_process()]
    pipe = -1, -1
    if held and threading.get_ident() not in _own_forks:
        with suppress(OSError):  # no descriptors left: the ranges are kept for ever
            pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    _forking[threading.get_ident()] = held, pipe


def _after_fork_in_parent() -> None:
    me = threading.get_ident()
    held, (reader, writer) = _forking.pop(me, ([], (-1, -1)))
    if me in _own_forks:
        _own_forks[me] += held
    elif held:
        if writer >= 0:
            os.close(writer)
        _forked_children.setdefault(reader, []).extend(held)
        for range_ref in held:
            range_ref.arena.request_cleanup()


def _after_fork_in_child() -> None:
    """Close the inherited pipe ends, except this child's writing end.

    The child keeps that end until it exits or executes another program.
    """
    _, mine = _forking.pop(threading.get_ident(), ([], (-1, -1)))
    others = [fd for _, pipe in _forking.values() for fd in pipe]
    for fd in (mine[0], *others, *_forked_children):
        if fd >= 0:
            os.close(fd)
    _forking.clear()
    _own_forks.clear()
    _forked_children.clear()


def release_ended_forks() -> None:
    """Release the ranges kept for children that have ended.

    A pipe is at its end when no process has the other end open any more. One thread at a time does
    this, because it closes the descriptors that it reads.
    """
    if _forked_children and _forks_lock.acquire(blocking=False):
        try:
            for fd, held in list(_forked_children.items()):
                if fd >= 0 and (not held or _is_at_end(fd)):
                    del _forked_children[fd]
                    os.close(fd)
        finally:
            _forks_lock.release()


def has_running_forks() -> bool:
    """Return whether ranges are kept for a child whose end can be detected."""
    return len(_forked_children) > (-1 in _forked_children)


def _is_at_end(pipe: int) -> bool:
    try:
        return not os.read(pipe, 1)
    except BlockingIOError:
        return False


def _pop_ranges_of(arena: Arena) -> list[RangeRef]:
    """Remove and return the ranges of `arena` that are kept for children."""
    taken = []
    for held in list(_forked_children.values()):
        taken += [range_ref for range_ref in held if range_ref.arena is arena]
        held[:] = [range_ref for range_ref in held if range_ref.arena is not arena]
    return taken


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
