"""The status page: shared memory in which a drone displays the task that it runs.

The controller and the drone map the page. The drone writes the number of each task that it starts
(an 8-byte store, about 40 ns). So the controller knows without a message which tasks a dead drone
had begun:

    started   number of the task begun last
    answered  number of the last task whose answer the controller was told of
    beats     heartbeat: how often the control thread was asked for something
    full      while the drone waits for room in its ring: how often it has looked for that; else 0
    control   the kernel's number of the control thread, whose running is no sign of progress
    steps     while the main thread waits for promises, or tasks overlap: one more than the number
              of times that green threads have gone on; else 0
    debugged  1 while the drone is at a `breakpoint()`; else 0
    call      of a chunk: how many of its calls have begun, at most, and from bit 32 on, how many of
              these may be running; 0 if no chunk runs
    holder    number of the overlapped task that lets no other run, because it does not await

Only the drone writes, so no lock is needed: an aligned 8-byte store is not torn. Behind the page is
the ring (ring.py) with the answers of the drone. See
docs/decisions/0012-status-page-for-exactly-once.md.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

from ..memory.arena import make_memory, map_range
from .ring import HEADER_BYTES as RING_HEADER_BYTES
from .ring import RING_BYTES

PAGE_BYTES = 4096
_STARTED, _ANSWERED, _BEATS, _FULL, _CONTROL, _STEPS, _DEBUGGED, _CALL, _HOLDER = range(9)
HEADER_BYTES = 9 * 8
_MEMORY_BYTES = PAGE_BYTES + RING_HEADER_BYTES + RING_BYTES


def make_memory_of_drone() -> int:
    """Return a descriptor of memory for a page and a ring."""
    return make_memory("polycephaly-drone", _MEMORY_BYTES)


def map_memory(fd: int, size: int = _MEMORY_BYTES) -> tuple[StatusPage, memoryview]:
    """Map the page, and the memory of the ring, in the file `fd`, which need not stay open. Raises
    `OSError`.
    """
    if os.fstat(fd).st_size < size:  # reading beyond the end would kill this process
        raise OSError(errno.ENODATA, "the memory of a drone that is too short")
    memory = memoryview(map_range(fd, 0, size, mmap.MAP_SHARED))
    return StatusPage(memory[:PAGE_BYTES]), memory[PAGE_BYTES:]


def _cell(index: int) -> Any:
    def get(page: StatusPage) -> int:
        return page.cells[index]

    def put(page: StatusPage, number: int) -> None:
        page.cells[index] = number

    return property(get, put)


class StatusPage:
    started: int = _cell(_STARTED)
    answered: int = _cell(_ANSWERED)
    beats: int = _cell(_BEATS)
    control: int = _cell(_CONTROL)
    steps: int = _cell(_STEPS)
    debugged: int = _cell(_DEBUGGED)
    call: int = _cell(_CALL)
    holder: int = _cell(_HOLDER)
    full: int = _cell(_FULL)

    def __init__(self, memory: memoryview) -> None:
        self.cells = memory[:HEADER_BYTES].cast("Q")

    @property
    def stands_still(self) -> bool:
        """Whether the time limits of its task do not go on: it is debugged, or waits for room."""
        return self.debugged != 0 or self.full != 0

    def signs_of_life(self) -> bytes:
        """Return what changes while the drone lives: `started`, `answered`, `beats` and `full`."""
        return self.cells[: _FULL + 1].tobytes()

    # -- for the drone -----------------------------------------------------------------------------

    def mark_started(self, number: int) -> None:
        self.cells[_STARTED] = number

    def mark_calls(self, begun: int, run_length: int) -> None:
        self.cells[_CALL] = begun | run_length << 32


def unpack_calls_begun(call: int) -> tuple[int, int]:
    """Return how many calls of a chunk have begun, and how many of these may be running."""
    return call & 0xFFFF_FFFF, call >> 32


NO_PAGE = StatusPage(memoryview(bytes(PAGE_BYTES)))
"""That of a drone that is not there yet, or no more."""
