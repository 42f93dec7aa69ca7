"""The running page: what each drone is running is displayed, not sent.

After CEFOS's display-request-and-data area: one page of memory that the controller and all its drones map.
A drone writes the number of the work that it starts (an 8-byte store, about 40 ns), and no message is needed
for the controller to know, when the drone has died, exactly what it took along.

    slot   started: the work begun last      sent: the last work whose result went to the socket
           ≤ sent       its result is in the socket's hands and may still arrive
           ≤ started    it had begun and no result was sent: it is lost
           beyond       never begun: it can run elsewhere without running twice

One slot has one writer (its drone), so no lock is needed; an aligned 8-byte store is not torn.
"""

from __future__ import annotations

import mmap
import os

__all__ = ["RunningPage"]

_CELLS = 2


class RunningPage:
    """`slots` pairs of counters in memory shared by descriptor; it has no name, so it cannot be left behind."""

    def __init__(self, slots: int, fd: int | None = None) -> None:
        size = slots * _CELLS * 8
        self.slots = slots
        self.fd = os.memfd_create("polycephaly-running", os.MFD_CLOEXEC) if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise
        self._cells = memoryview(self._map).cast("Q")

    def clear(self, slot: int) -> None:
        self._cells[slot * _CELLS] = self._cells[slot * _CELLS + 1] = 0

    def started(self, slot: int) -> int:
        return self._read(slot * _CELLS)

    def sent(self, slot: int) -> int:
        return self._read(slot * _CELLS + 1)

    def _read(self, cell: int) -> int:
        try:
            return self._cells[cell]
        except ValueError:  # closed, by another thread perhaps: nothing runs any more
            return 0

    def row(self, slot: int) -> memoryview:
        """The writer's view: ``row[0]`` started, ``row[1]`` sent."""
        return self._cells[slot * _CELLS : (slot + 1) * _CELLS]

    def close(self) -> None:
        self._cells.release()
        self._map.close()
        os.close(self.fd)
