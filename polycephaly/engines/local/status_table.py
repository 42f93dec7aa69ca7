"""The running page: what each drone is running is displayed, not sent.

After CEFOS's display-request-and-data area: one page of memory that the controller and all its
drones map. A drone writes the number of the work that it starts (an 8-byte store, about 40 ns), and
no message is needed for the controller to know, when the drone has died, exactly what it took
along.

    slot   started: the work begun last      sent: the last work whose result went to the socket
           ≤ sent       its result is in the socket's hands and may still arrive
           ≤ started    it had begun and no result was sent: it is lost, unless its result was
           beyond       never begun: it can run elsewhere without running twice
           kept         bytes of results that are done, and might be lost with the drone: they wait to be sent along
                        with others, or were lately given to ZeroMQ, whose own thread writes them. While there is room
           beat         counts while a task runs: a sign of life
           ear          the thread that counts there, by the kernel's number: that it runs says nothing of the work
           steps        while the main thread waits for promises, and looks up now and then: one more than how often
                        green threads have gone on; else 0

Work that a drone overlaps ends in any order. Then `sent` stays at what came before it, and the
controller counts as begun, besides what is started, all that was sent before something it has had
an answer to.

So results that wait for company outlive their drone: a death takes along what was running, and
nothing else (but results larger than the page, in ZeroMQ's hands). One slot has one writer (its
drone), so no lock is needed; an aligned 8-byte store is not torn, and the count of kept bytes is
written after them."""

from __future__ import annotations

import mmap
import os

__all__ = ["StatusTable"]

ROOM = 16 * 1024  # bytes of a slot, of which most are for kept results
_STARTED, _SENT, _KEPT, _BEAT, _EAR, _STEPS, _CELLS = range(7)
_HEAD = _CELLS * 8


class StatusTable:
    """`slots` slots in memory shared by descriptor; it has no name, so it cannot be left behind."""

    def __init__(self, slots: int, fd: int | None = None) -> None:
        size = slots * ROOM
        self.slots = slots
        self.fd = os.memfd_create("polycephaly-running", os.MFD_CLOEXEC) if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, size)
            self._map = mmap.mmap(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise
        self._bytes = memoryview(self._map)

    def row(self, slot: int) -> Slot:
        """The writer's side of a slot."""
        return Slot(self._bytes[slot * ROOM : (slot + 1) * ROOM])

    def clear(self, slot: int) -> None:
        self._bytes[slot * ROOM : slot * ROOM + _HEAD] = bytes(_HEAD)

    def started(self, slot: int) -> int:
        return self._read(slot, _STARTED)

    def sent(self, slot: int) -> int:
        return self._read(slot, _SENT)

    def beat(self, slot: int) -> int:
        return self._read(slot, _BEAT)

    def ear(self, slot: int) -> int:
        return self._read(slot, _EAR)

    def steps(self, slot: int) -> int:
        return self._read(slot, _STEPS)

    def kept(self, slot: int) -> bytes:
        """The results that were done and not yet known to be sent."""
        at = slot * ROOM + _HEAD
        size = self._read(slot, _KEPT)
        return bytes(self._bytes[at : at + size]) if size else b""

    def _read(self, slot: int, cell: int) -> int:
        try:
            return self._bytes[slot * ROOM : slot * ROOM + _HEAD].cast("Q")[cell]
        except ValueError:  # closed, by another thread perhaps: nothing runs any more
            return 0

    def close(self) -> None:
        self._bytes.release()
        self._map.close()
        os.close(self.fd)


class Slot:
    """What one drone displays."""

    def __init__(self, room: memoryview) -> None:
        self._cells = room[:_HEAD].cast("Q")
        self._room = room[_HEAD:]
        self._kept = 0
        self._is_full = False

    def start(self, number: int) -> None:
        self._cells[_STARTED] = number

    def beat(self) -> None:
        """In any thread of the drone: what two of them count at once may count as one, which
        changes it too."""
        self._cells[_BEAT] += 1

    def ear(self, thread: int) -> None:
        self._cells[_EAR] = thread

    def steps(self, count: int) -> None:
        self._cells[_STEPS] = count

    def keep(self, result: bytes) -> bool:
        """Keeps a result until `sent`; False where there is no room for it."""
        end = self._kept + len(result)
        if end > len(self._room):
            self._is_full = len(result) <= len(self._room)
            return False
        self._room[self._kept : end] = result
        self._kept = self._cells[_KEPT] = end
        return True

    def mark_sent(self, number: int) -> None:
        """That one's result will be sent, and is not kept."""
        self._cells[_SENT] = number

    def rewrite(self, results: list[bytes]) -> None:
        """Keeps these, and no others."""
        self._kept = self._cells[_KEPT] = 0
        for each in results:
            Slot.keep(self, each)

    def sent(self, number: int, arrive: bool) -> None:
        """All results up to this work's have gone to the socket; whether they arrive though this
        drone should die. Of a page that is full they are forgotten all the same: there is to be
        room for the next ones."""
        self._cells[_SENT] = number
        if arrive or self._is_full:
            self._kept = self._cells[_KEPT] = 0
            self._is_full = False
