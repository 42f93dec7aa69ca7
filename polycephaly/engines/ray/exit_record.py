"""The exit record of a drone on Ray: a folder on its node, with a status page and its output.

    task begun, unacknowledged answers ──> page, ring ─┐
    descriptors 1 and 2 ──> out, err ──────────────────┴── read there after a death ──> driver

The page has the task that had begun, as on one machine (wire/status_page.py), and the ring behind
it (wire/ring.py) the answers that did not reach the driver. An answer stays there until the driver
has acknowledged the report that brought it; one for which there is no room goes by the report
alone.

Output that was read some megabytes ago is freed, so that a drone that prints for days fills no
disk. Freeing punches a hole in the file, because any process may append through descriptors 1 and 2
at any time. If a drone dies with more output than that on its way to the driver, the output in the
hole is lost.

The folder lies in Ray's session directory. A drone that ends removes its folder, and so does the
reader. If the driver was killed too, drones that start on that node remove the folder: but not the
first one that finds it, because the driver may be about to read it.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections import deque
from contextlib import suppress
from io import FileIO
from typing import NamedTuple

from ..._compat import ray_session_dir
from ...errors import Malformed
from ...memory.arena import free_pages
from ...runtime.parent_death import wait_for_end
from ...runtime.procfs import start_time_of
from ...wire.ring import HEADER_BYTES, Records, RingReader, RingWriter
from ...wire.status_page import PAGE_BYTES, map_memory

_MEMORY_BYTES = PAGE_BYTES + HEADER_BYTES + 16 * 1024
_STATUS_FILE, OUT, ERR, _FOUND_FILE = "page", "out", "err", "found"
# How long a dead drone's folder waits for its driver, after another drone has found it.
UNREAD_FOLDER_SECONDS = 120.0
EXIT_TIMEOUT_SECONDS = 1.0  # for a killed process to end
MAX_FINAL_OUTPUT_BYTES = 1 << 20  # of each output stream that are read after a death
KEPT_OUTPUT_BYTES = 4 << 20  # of each output stream that are kept after reading; whole pages


class FinalState(NamedTuple):
    started: int = 0
    unread: Records = {}  # noqa: RUF012 - not changed
    """What the drone had written, and the driver had not acknowledged."""
    out: bytes = b""
    err: bytes = b""


class ExitRecord:
    """The writer's side: a status page, and behind it a ring, which is read after a death only."""

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, _STATUS_FILE)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, _MEMORY_BYTES)
        self.page, ring = map_memory(fd, _MEMORY_BYTES)
        os.close(fd)
        self._ring = RingWriter(ring)
        # Report numbers, each with the end of the ring at its time.
        self._reports: deque[tuple[int, int]] = deque()

    def keep(self, record: bytes) -> None:
        """Have a record outlive this drone, if there is room."""
        self._ring.write(record)

    def add_report(self, report: int) -> None:
        """Note that all that is in the ring now goes with a report, or went before."""
        self._reports.append((report, self._ring.end()))

    def acknowledge(self, report: int) -> None:
        """Drop what went with the reports up to `report`: the driver has it.

        Called in the main thread, holding `socket_lock`.
        """
        while self._reports and self._reports[0][0] <= report:
            self._ring.forget(self._reports.popleft()[1])


class OutputFile:
    """The output of a drone on one descriptor, read back by the drone; for one thread at a time."""

    def __init__(self, folder: str, name: str) -> None:
        self._file = FileIO(os.path.join(folder, name), "r+")  # writable, to punch holes
        self._read_bytes = 0
        self._freed_bytes = 0

    def read(self, limit: int) -> bytes:
        """Read at most `limit` bytes; all if -1."""
        data = self._file.read(limit)
        self._read_bytes += len(data)
        stale = self._read_bytes - self._freed_bytes - KEPT_OUTPUT_BYTES
        if stale >= KEPT_OUTPUT_BYTES:  # if the file system has no holes, the output stays on disk
            stale -= stale % KEPT_OUTPUT_BYTES
            free_pages(self._file.fileno(), self._freed_bytes, stale)
            self._freed_bytes += stale
        return data

    def has_more(self) -> bool:
        return os.fstat(self._file.fileno()).st_size > self._read_bytes


def open_folder() -> str:
    """Make a folder for this process, and remove the abandoned folders of dead drones."""
    parent_dir = os.path.join(_session_dir(), "polycephaly")
    os.makedirs(parent_dir, mode=0o700, exist_ok=True)
    for name in os.listdir(parent_dir):
        pid, _, start_time = name.partition(".")
        other = os.path.join(parent_dir, name)
        if pid.isdigit() and start_time_of(int(pid)) != start_time and _is_abandoned(other):
            shutil.rmtree(other, ignore_errors=True)
    folder = os.path.join(parent_dir, f"{os.getpid()}.{start_time_of(os.getpid())}")
    os.mkdir(folder, 0o700)
    return folder


def _is_abandoned(folder: str) -> bool:
    """Return True if the driver would have read `folder` by now; the first call only marks it."""
    mark = os.path.join(folder, _FOUND_FILE)
    with suppress(OSError):  # another drone may just have removed the folder
        try:
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return time.time() - os.stat(mark).st_mtime > UNREAD_FOLDER_SECONDS
    return False


def _session_dir() -> str:
    return ray_session_dir() or tempfile.gettempdir()


def kill_owner(folder: str) -> bool:
    """Kill the drone that owns `folder`, on its node; return True if the drone was there.

    Ray's own kill would wait for a process whose interpreter is held by C code.
    """
    pid, _, start_time = os.path.basename(folder).partition(".")
    if start_time_of(int(pid)) == start_time:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(int(pid), signal.SIGKILL)
            return True
    return False


def _ensure_owner_dead(folder: str) -> None:
    """Kill the owner of `folder`, and wait for its end.

    Ray may have lost only the connection to the drone. Tasks that it began after its page was read
    would run twice.
    """
    with suppress(OSError):
        process = os.pidfd_open(int(os.path.basename(folder).partition(".")[0]))
        try:
            if kill_owner(folder):
                wait_for_end(process, EXIT_TIMEOUT_SECONDS)
        finally:
            os.close(process)


def read_exit_record(folder: str, out_from: int, err_from: int) -> FinalState | None:
    """Read and remove a drone's folder, on its node, and make sure that the drone is dead.

    Returns None if there is no page to read.
    """
    _ensure_owner_dead(folder)
    path = os.path.join(folder, _STATUS_FILE)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            page, ring = map_memory(fd, _MEMORY_BYTES)
        finally:
            os.close(fd)
    except OSError:
        # No page: the drone has ended by itself and removed its folder. Or another process has
        # removed the folder, and the tasks that had begun are unknown.
        return None
    try:
        return FinalState(
            page.started,
            _unread(ring),
            _read_final_output(folder, OUT, out_from),
            _read_final_output(folder, ERR, err_from),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unread(ring: memoryview) -> Records:
    try:
        return RingReader(ring).read() or {}
    except Malformed:  # the drone may have written anywhere before it died
        return {}


def _read_final_output(folder: str, name: str, start: int) -> bytes:
    with suppress(OSError), FileIO(os.path.join(folder, name)) as file:  # error: no more data
        os.lseek(file.fileno(), start, os.SEEK_DATA)
        return file.read(MAX_FINAL_OUTPUT_BYTES)
    return b""
