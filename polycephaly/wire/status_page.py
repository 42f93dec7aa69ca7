"""The status page: shared memory in which a drone displays the task that it runs.

The controller and the drone map the page. The drone writes the number of each task that it starts
(an 8-byte store, about 40 ns). So the controller knows without a message which tasks a dead drone
had begun:

    started   number of the task begun last
    answered  number of the last task whose result went to the socket
    kept      bytes of results that are done and wait to be sent with others
    beats     heartbeat: a counter that changes while a task runs (of two threads that count at
              once, one count may get lost)
    control   the kernel's number of the control thread, whose running is no sign of progress
    steps     while the main thread waits for promises, or tasks overlap: one more than the number
              of times that green threads have gone on; else 0
    debugged  1 while the drone is at a `breakpoint()`; else 0
    call      of a chunk: how many of its calls have begun, at most, and from bit 32 on, how many of
              these may be running; 0 if no chunk runs
    holder    number of the overlapped task that lets no other run, because it does not await

Only the drone writes, so no lock is needed: an aligned 8-byte store is not torn, and the count of
kept bytes is written after the bytes. See docs/decisions/0012-status-page-for-exactly-once.md.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

from ..memory.arena import make_memory, map_range

PAGE_BYTES = 16 * 1024  # most of them for kept results
_STARTED, _ANSWERED, _KEPT, _BEATS, _CONTROL, _STEPS, _DEBUGGED, _CALL, _HOLDER = range(9)
HEADER_BYTES = 9 * 8


def make_status_file() -> int:
    return make_memory("polycephaly-status", PAGE_BYTES)


def map_page(fd: int) -> memoryview:
    """Map the page in the file `fd`, which need not stay open. Raises `OSError`."""
    if os.fstat(fd).st_size < PAGE_BYTES:  # reading beyond the end would kill this process
        raise OSError(errno.ENODATA, "a status page that is too short")
    return memoryview(map_range(fd, 0, PAGE_BYTES, mmap.MAP_SHARED))


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

    def __init__(self, memory: memoryview) -> None:
        self.cells = memory[:HEADER_BYTES].cast("Q")
        self._buffer = memory[HEADER_BYTES:]
        self._kept = 0

    def kept(self) -> bytes:
        """Return the results that were done and are not yet known to be sent."""
        return bytes(self._buffer[: self.cells[_KEPT]])

    def signs_of_life(self) -> bytes:
        """Return what changes while the drone lives: `started`, `answered`, `kept` and `beats`."""
        return self.cells[: _BEATS + 1].tobytes()

    # -- for the drone -----------------------------------------------------------------------------

    def mark_started(self, number: int) -> None:
        self.cells[_STARTED] = number

    def mark_calls(self, begun: int, run_length: int) -> None:
        self.cells[_CALL] = begun | run_length << 32

    def keep(self, result: bytes) -> bool:
        """Keep a result until `mark_all_answered`; return False if there is no room for it."""
        end = self._kept + len(result)
        if end > len(self._buffer):
            return False
        self._buffer[self._kept : end] = result
        self._kept = self.cells[_KEPT] = end
        return True

    def replace_kept(self, results: list[bytes]) -> None:
        """Keep these results, and no others."""
        self._kept = self.cells[_KEPT] = 0
        for each in results:
            StatusPage.keep(self, each)

    def mark_all_answered(self, number: int) -> None:
        """Note that all results up to that of task `number` have gone to the socket: they reach the
        controller even if this drone dies.
        """
        self.cells[_ANSWERED] = number
        self._kept = self.cells[_KEPT] = 0


def unpack_calls_begun(call: int) -> tuple[int, int]:
    """Return how many calls of a chunk have begun, and how many of these may be running."""
    return call & 0xFFFF_FFFF, call >> 32


NO_PAGE = StatusPage(memoryview(bytes(PAGE_BYTES)))
"""That of a drone that is not there yet, or no more."""
