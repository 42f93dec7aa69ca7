"""The exit record of a drone on Ray: a folder on its node, with a status table and its output.

    task begun, unacknowledged results ──> page ─┐
    descriptors 1 and 2 ──> out, err ────────────┴── read on that node after a death ──> driver

The page has the task that had begun, and the results that did not reach the driver, as on one
machine (engines/local/status_table.py). A result stays there until the driver has acknowledged the
report that brought it.

Output that was read some megabytes ago is freed, so that a drone that prints for days fills no
disk. Freeing punches a hole in the file, because any process may append through descriptors 1 and 2
at any time. If a drone dies with more output than that on its way to the driver, the output in the
hole is lost.

The folder lies in Ray's session directory. A drone that ends removes its folder, and so does the
reader. If the driver was killed too, drones that start on that node remove the folder: but not the
first one that finds it, because the driver may be about to read it."""

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
# Seconds that a dead drone's folder waits for its driver, after another drone has found it.
UNREAD = 120.0
GONE_WITHIN = 1.0  # seconds for a killed process to end
MOST = 1 << 20  # bytes of each output stream that are read after a death
READ_KEPT = 4 << 20  # bytes of each output stream that are kept after reading; whole pages

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
    """The writer's side of the page. An outcome without room there is only noted as sent."""

    def __init__(self, folder: str) -> None:
        fd = os.open(os.path.join(folder, _PAGE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, ROOM)
        self._status_table = StatusTable(1, fd)
        super().__init__(self._status_table._bytes)
        self._entries: deque[bytes] = deque()
        self._dropped = 0  # number of acknowledged entries, which came before `_entries`
        # Report numbers, each with the number of entries that were kept before the report.
        self._reports: deque[tuple[int, int]] = deque()
        self._begun = 0

    def start(self, number: int) -> None:
        self._begun = number
        super().start(number)

    def keep(self, result: bytes) -> bool:
        if super().keep(result):
            self._entries.append(result)
            return True
        self.pass_over()
        return True  # nothing can be sent at once: the answer of the call brings the outcome

    def pass_over(self) -> None:
        """Note that the result of the task begun last will be sent and is not in the page."""
        self.mark_sent(self._begun)

    def sent(self, number: int, arrive: bool) -> None:
        """Do nothing: results are kept until they are acknowledged."""

    def entries(self) -> int:
        """Return the number of entries kept so far.

        A thread that makes a report calls this before taking the outcomes, which are noted first
        and then kept. So at least these entries go with the report, or went before, whatever the
        main thread keeps meanwhile.
        """
        return self._dropped + len(self._entries)

    def reported(self, report: int, entries: int) -> None:
        """Note a report and its number of entries. In either thread, holding `socket_turn`."""
        self._reports.append((report, entries))

    def acknowledged(self, report: int) -> None:
        """Drop the entries of all reports up to `report`: the driver has them.

        Called in the main thread, holding `socket_turn`.
        """
        gone = self._dropped
        while self._reports and self._reports[0][0] <= report:
            gone = self._reports.popleft()[1]
        if gone > self._dropped:
            while self._dropped < gone:
                self._entries.popleft()
                self._dropped += 1
            self.rewrite(list(self._entries))


class Printed:
    """The output of a drone on one descriptor, read back by the drone; for one thread at a time."""

    def __init__(self, folder: str, name: str) -> None:
        self._file = FileIO(os.path.join(folder, name), "r+")  # writable, to punch holes
        self._read = 0
        self._freed = 0

    def read(self, most: int) -> bytes:
        """Read at most `most` bytes; all if -1."""
        found = self._file.read(most)
        self._read += len(found)
        old = self._read - self._freed - READ_KEPT
        if old >= READ_KEPT:  # if the file system has no holes, the output stays on disk
            old -= old % READ_KEPT
            _libc.fallocate(self._file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, self._freed, old)
            self._freed += old
        return found

    def has_more(self) -> bool:
        return os.fstat(self._file.fileno()).st_size > self._read


def open_folder() -> str:
    """Make a folder for this process, and remove the abandoned folders of dead drones."""
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
    """Return True if the driver would have read `folder` by now; the first call only marks it."""
    found = os.path.join(folder, _FOUND)
    with suppress(OSError):  # another drone may just have removed the folder
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
    """Kill the drone that owns `folder`, on its node; return True if the drone was there.

    Ray's own kill would wait for a process whose interpreter is held by C code.
    """
    pid, _, born = os.path.basename(folder).partition(".")
    if birth_of(int(pid)) == born:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(int(pid), signal.SIGKILL)
            return True
    return False


def _see_off(folder: str) -> None:
    """Kill the owner of `folder`, and wait for its end.

    Ray may have lost only the connection to the drone. Tasks that it began after its page was read
    would run twice.
    """
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
    """Read and remove a drone's folder, on its node, and make sure that the drone is dead.

    Returns None if there is no page to read.
    """
    _see_off(folder)
    status_table = os.path.join(folder, _PAGE)
    try:
        running = StatusTable(1, os.open(status_table, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        # No page: the drone has ended by itself and removed its folder. Or another process has
        # removed the folder, and the tasks that had begun are unknown.
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
    with suppress(OSError), FileIO(os.path.join(folder, name)) as file:  # error: no more data
        os.lseek(file.fileno(), start, os.SEEK_DATA)
        return file.read(MOST)
    return b""
