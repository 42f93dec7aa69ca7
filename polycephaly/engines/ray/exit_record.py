"""What a drone leaves when it dies: a folder on its node, with its running page and its output.

    begun, results not yet acknowledged ──> page ─┐
    descriptors 1 and 2 ──> out, err ─────────────┴── read on that node when it is dead ──> the driver

Ray tells that an actor has died; the page tells what it had begun, and brings results that did not
reach the driver, as on one machine (engines/local/status_table.py). A result stays there until the
driver says that it has the report it went with. Of the output what was read some megabytes ago is
freed, so a drone that prints for days fills no disk: a hole in the file, as descriptors 1 and 2
append to it at any time, in any process. If a drone dies that had more on its way to the driver
than that, what is in the hole is not told.

The folder lies in Ray's own of this session. A drone that ends removes it, and so does who has read
it. What is left when the driver itself was killed is removed by drones that start on that node: not
by the first one that finds it, as its driver may be about to read it."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import tempfile
import time
from collections import deque
from contextlib import suppress
from io import FileIO
from typing import Any, NamedTuple

from ...runtime.procfs import birth_of
from ..local.status_table import ROOM, Slot, StatusTable

__all__ = ["ExitRecord", "FinalState", "Printed", "kill_owner", "open_folder", "read_remains"]

_PAGE, OUT, ERR, _FOUND = "page", "out", "err", "found"
UNREAD = 120.0  # seconds that a dead drone's folder waits for its driver, since somebody else has found it
GONE_WITHIN = 1.0  # seconds for a process that was killed
MOST = 1 << 20  # bytes of output that are read when it is dead, of each stream
READ_KEPT = (
    4 << 20
)  # bytes of output, of each stream, that are kept when they were read; whole pages

_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_libc = ctypes.CDLL(None)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class FinalState(NamedTuple):
    started: int = 0
    sent: int = 0
    kept: bytes = b""
    out: bytes = b""
    err: bytes = b""


class ExitRecord(Slot):
    """The writer's side of the page. Of an outcome that it has no room for, it is kept that it was
    sent."""

    def __init__(self, folder: str) -> None:
        fd = os.open(os.path.join(folder, _PAGE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, ROOM)
        self._status_table = StatusTable(1, fd)
        super().__init__(self._status_table._bytes)
        self._entries: deque[bytes] = deque()
        self._dropped = 0  # entries that were before these
        self._reports: deque[tuple[int, int]] = (
            deque()
        )  # each with how many entries had been kept before it was made
        self._begun = 0

    def start(self, number: int) -> None:
        self._begun = number
        super().start(number)

    def keep(self, result: bytes) -> bool:
        if super().keep(result):
            self._entries.append(result)
            return True
        self.pass_over()
        return True  # to send it at once is not possible: it goes when the call is answered

    def pass_over(self) -> None:
        """Of what was begun last the result will be sent, and is not here."""
        self.mark_sent(self._begun)

    def sent(self, number: int, arrive: bool) -> None:
        """Not before it is acknowledged."""

    def entries(self) -> int:
        """How many were kept so far. Who makes a report asks before it takes the outcomes: they are
        noted first and then kept, so these, at least, go with it or went before, whatever the main
        thread keeps meanwhile."""
        return self._dropped + len(self._entries)

    def reported(self, report: int, entries: int) -> None:
        """Either thread, holding the socket's turn, as for what follows."""
        self._reports.append((report, entries))

    def acknowledged(self, report: int) -> None:
        """The driver has all reports up to that one. In the main thread."""
        gone = self._dropped
        while self._reports and self._reports[0][0] <= report:
            gone = self._reports.popleft()[1]
        if gone > self._dropped:
            while self._dropped < gone:
                self._entries.popleft()
                self._dropped += 1
            self.rewrite(list(self._entries))


class Printed:
    """What a drone prints on one descriptor, as it reads it itself. By one thread at a time."""

    def __init__(self, folder: str, name: str) -> None:
        self._file = FileIO(os.path.join(folder, name), "r+")  # to be written into: by holes
        self._read = 0
        self._freed = 0

    def read(self, most: int) -> bytes:
        """At most so many bytes; -1: all that there are."""
        found = self._file.read(most)
        self._read += len(found)
        old = self._read - self._freed - READ_KEPT
        if old >= READ_KEPT:  # where the file system has no holes, they stay
            old -= old % READ_KEPT
            _libc.fallocate(self._file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, self._freed, old)
            self._freed += old
        return found

    def has_more(self) -> bool:
        return os.fstat(self._file.fileno()).st_size > self._read


def open_folder() -> str:
    """A new one, of this process."""
    above = os.path.join(_session(), "polycephaly")
    os.makedirs(above, mode=0o700, exist_ok=True)
    for name in os.listdir(above):
        pid, _, born = name.partition(".")
        if pid.isdigit() and birth_of(int(pid)) != born and _is_given_up(os.path.join(above, name)):
            shutil.rmtree(os.path.join(above, name), ignore_errors=True)
    folder = os.path.join(above, f"{os.getpid()}.{birth_of(os.getpid())}")
    os.mkdir(folder, 0o700)
    return folder


def _is_given_up(folder: str) -> bool:
    """Of a dead drone: its driver would have read it by now."""
    found = os.path.join(folder, _FOUND)
    with suppress(OSError):  # or another one has just removed it
        try:
            os.close(os.open(found, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return time.time() - os.stat(found).st_mtime > UNREAD
    return False


def _session() -> str:
    import ray

    node: Any = getattr(ray._private.worker, "_global_node", None)
    return node.get_session_dir_path() if node is not None else tempfile.gettempdir()


def kill_owner(folder: str) -> bool:
    """On its node: SIGKILL for the drone whose folder that is. Ray's own kill waits for a process
    that holds its interpreter. Whether it was there."""
    pid, _, born = os.path.basename(folder).partition(".")
    if birth_of(int(pid)) == born:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(int(pid), signal.SIGKILL)
            return True
    return False


def _see_off(folder: str) -> None:
    """Ray may have lost only the connection to it: what it began after its page was read would be
    run twice."""
    with suppress(OSError):
        process = os.pidfd_open(int(os.path.basename(folder).partition(".")[0]))
        try:
            if kill_owner(folder):
                gone = select.poll()
                gone.register(process, select.POLLIN)
                gone.poll(GONE_WITHIN * 1000)
        finally:
            os.close(process)


def read_remains(folder: str, out_from: int, err_from: int) -> FinalState | None:
    """On the drone's node; it is dead then, and the folder is gone. None where there is nothing to
    be read."""
    _see_off(folder)
    status_table = os.path.join(folder, _PAGE)
    try:
        running = StatusTable(1, os.open(status_table, os.O_RDWR | os.O_CLOEXEC))
    except OSError:  # it has ended by itself, and tidied up; or somebody else has, and nobody can tell what had begun
        return None
    try:
        started, sent, kept = running.started(0), running.sent(0), running.kept(0)
        return FinalState(
            started, sent, kept, _rest(folder, OUT, out_from), _rest(folder, ERR, err_from)
        )
    finally:
        running.close()
        shutil.rmtree(folder, ignore_errors=True)


def _rest(folder: str, name: str, start: int) -> bytes:
    with suppress(OSError), FileIO(os.path.join(folder, name)) as file:  # or there is no more
        os.lseek(file.fileno(), start, os.SEEK_DATA)
        return file.read(MOST)
    return b""
