"""The status table: shared memory in which each drone displays the task that it runs.

The controller and all its drones map the table. A drone writes the number of each task that it
starts (an 8-byte store, about 40 ns). So the controller knows without a message which tasks a dead
drone had begun. Each drone has one slot:

    started   number of the task begun last
    answered  number of the last task whose result went to the socket
    kept      bytes of results that are done and might be lost with the drone: they wait to be sent
              with others, or were lately given to ZeroMQ, whose own thread writes them
    beat      heartbeat: a counter that changes while a task runs
    control   the kernel's number of the control thread, whose running is no sign of progress
    steps     while the main thread waits for promises, or tasks overlap: one more than the number
              of times that green threads have gone on; else 0
    debugged  1 while the drone is at a `breakpoint()`; else 0

A slot has one writer, its drone, so no lock is needed: an aligned 8-byte store is not torn, and
the count of kept bytes is written after the bytes. See
docs/decisions/0012-status-table-for-exactly-once.md.
"""

from __future__ import annotations

import mmap
import os

SLOT_BYTES = 16 * 1024  # bytes of a slot, most of them for kept results
_STARTED, _ANSWERED, _KEPT, _BEAT, _CONTROL_THREAD, _STEPS, _DEBUGGED, _CELLS = range(8)
HEADER_BYTES = _CELLS * 8


class StatusTable:
    """`slots` slots in memory that is shared by descriptor.

    The memory has no name, so no file can be left behind.
    """

    def __init__(self, slots: int, fd: int | None = None) -> None:
        size = slots * SLOT_BYTES
        self.slots = slots
        self.fd = os.memfd_create("polycephaly-running", os.MFD_CLOEXEC) if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, size)
            self._bytes = memoryview(mmap.mmap(self.fd, size))
        except OSError:
            os.close(self.fd)
            raise

    def grow(self, slots: int) -> None:
        """Have at least `slots` slots. Raises `OSError`."""
        if slots > self.slots:
            os.ftruncate(self.fd, slots * SLOT_BYTES)
            self.map_all()

    def map_all(self) -> None:
        """Map all slots, also those that another process has added. Writers of this process keep
        the mapping that they have.
        """
        self._bytes = memoryview(mmap.mmap(self.fd, 0))
        self.slots = len(self._bytes) // SLOT_BYTES

    def writer(self, slot: int) -> Slot:
        """Return the writer's side of a slot."""
        return Slot(self._bytes[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])

    def clear(self, slot: int) -> None:
        self._bytes[slot * SLOT_BYTES : slot * SLOT_BYTES + HEADER_BYTES] = bytes(HEADER_BYTES)

    def started(self, slot: int) -> int:
        return self._read(slot, _STARTED)

    def answered(self, slot: int) -> int:
        return self._read(slot, _ANSWERED)

    def beat(self, slot: int) -> int:
        return self._read(slot, _BEAT)

    def control_thread(self, slot: int) -> int:
        return self._read(slot, _CONTROL_THREAD)

    def steps(self, slot: int) -> int:
        return self._read(slot, _STEPS)

    def is_debugged(self, slot: int) -> bool:
        return self._read(slot, _DEBUGGED) != 0

    def kept(self, slot: int) -> bytes:
        """Return the results that were done and are not yet known to be sent."""
        at = slot * SLOT_BYTES + HEADER_BYTES
        size = self._read(slot, _KEPT)
        return bytes(self._bytes[at : at + size]) if size else b""

    def _read(self, slot: int, cell: int) -> int:
        try:
            at = slot * SLOT_BYTES
            return self._bytes[at : at + HEADER_BYTES].cast("Q")[cell]
        except ValueError:  # closed, perhaps by another thread: no drone runs any more
            return 0

    def close(self) -> None:
        self._bytes.release()  # and so, in the end, the mapping
        os.close(self.fd)


class Slot:
    """The writer's side of a slot: one drone's display."""

    def __init__(self, memory: memoryview) -> None:
        self._cells = memory[:HEADER_BYTES].cast("Q")
        self._buffer = memory[HEADER_BYTES:]
        self._kept = 0
        self.is_full = False  # the last result had no room beside the kept ones

    def mark_started(self, number: int) -> None:
        self._cells[_STARTED] = number

    def beat(self) -> None:
        """Count a heartbeat. Any thread of the drone may call this.

        If two threads count at once, one count may get lost. The counter changes all the same.
        """
        self._cells[_BEAT] += 1

    def set_control_thread(self, thread: int) -> None:
        self._cells[_CONTROL_THREAD] = thread

    def set_steps(self, count: int) -> None:
        self._cells[_STEPS] = count

    def set_debugged(self, debugged: bool) -> None:
        self._cells[_DEBUGGED] = debugged

    def keep(self, result: bytes) -> bool:
        """Keep a result until `mark_all_answered`; return False if the slot has no room for it."""
        end = self._kept + len(result)
        if end > len(self._buffer):
            self.is_full = len(result) <= len(self._buffer)
            return False
        self._buffer[self._kept : end] = result
        self._kept = self._cells[_KEPT] = end
        return True

    def mark_answered(self, number: int) -> None:
        """Note that the result of task `number` will be sent and is not kept."""
        self._cells[_ANSWERED] = number

    def replace_kept(self, results: list[bytes]) -> None:
        """Keep these results, and no others."""
        self._kept = self._cells[_KEPT] = 0
        for each in results:
            Slot.keep(self, each)

    def mark_all_answered(self, number: int, delivered: bool) -> None:
        """Note that all results up to that of task `number` have gone to the socket.

        With `delivered`, they reach the controller even if this drone dies. If the slot is full,
        the kept results are forgotten in any case, to make room for the next ones.
        """
        self._cells[_ANSWERED] = number
        if delivered or self.is_full:
            self._kept = self._cells[_KEPT] = 0
            self.is_full = False
