"""A run of a map that can be resumed, from the call of `map` to the end of its results.

    find ──> the file <── a thread, twice a second at least <── put: what has ended

The thread stores what has ended whether or not anybody reads the results. It is the only one, so
that calls of a few microseconds share a transaction, whose end waits for the disk.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

from ..._compat import caller_stacklevel, renew_in_child
from ...promises.promise import holds_own_lock
from ...runtime.fork_guard import OwnThread, add_thread_lock, remove_thread_lock
from ...runtime.safe_log import SafeLog
from .calls import CallFile, Changed, Ended, Found
from .identity import Identity
from .lock import FileLock, InUse

log = SafeLog(logging.getLogger(__name__))

COMMIT_SECONDS = 0.15
"""How long what has ended waits for more, before it is stored."""
MAX_WAITING_BYTES = 64 << 20
"""Bytes of results that wait to be stored, above which no more calls are sent."""

Making = Callable[[], Iterable[Ended]]
"""Gives calls that have ended. Is called in the thread that stores them."""

_runs: dict[str, Run] = {}
"""The runs of this process, by the paths of their files."""
_runs_lock = threading.Lock()
renew_in_child(_runs_lock)
os.register_at_fork(after_in_child=_runs.clear)


class Run:
    """A use of the file at `path` by one map of a function.

    Raises `RuntimeError` if another one uses it, `ValueError` if the function has changed and
    `changed` is "refuse", or if it is another kind of file, and `OSError` if it cannot be opened.
    """

    def __init__(self, path: str, identity: Identity, changed: str) -> None:
        self.path = os.path.realpath(path)
        self.error: Exception | None = None  # why nothing is stored any more
        self._pid = os.getpid()
        self._waiting: SimpleQueue[Making] = SimpleQueue()
        self._waiting_bytes = 0
        self._bytes_lock = threading.Lock()
        self._ends = threading.Event()
        self._has_room = threading.Event()
        self._claim()
        try:
            self._lock = self._take_lock(path)
            try:
                self._open(path, identity, changed)
            except BaseException:
                self._lock.release()
                raise
        except BaseException:
            self._unclaim()
            raise
        atexit.register(self.close)
        self._thread.start()

    def _claim(self) -> None:
        while True:
            with _runs_lock:
                other = _runs.setdefault(self.path, self)
            if other is self:
                return
            if not other.is_ending:
                raise RuntimeError(
                    f"{self.path!r} is in use by another map of this process ({self._pid}): take "
                    "all its results, or close them, before the next one begins"
                )
            other.close()

    def _unclaim(self) -> None:
        with _runs_lock:
            _runs.pop(self.path, None)

    def _take_lock(self, path: str) -> FileLock:
        try:
            return FileLock(self.path)
        except InUse as error:
            raise RuntimeError(
                f"{path!r} is in use by {error.holder or 'another process'}: one run at a time "
                "uses a file. Wait for its end, or take another file"
            ) from None

    def _open(self, path: str, identity: Identity, changed: str) -> None:
        self._file = CallFile(self.path)
        try:
            # How many results of earlier runs were not found yet.
            self._unfound = self._file.use(identity, changed)
        except BaseException as error:
            self._file.close()
            if isinstance(error, Changed):
                raise ValueError(
                    f"{error.name} has changed since its results in {path!r} were made (source, "
                    "defaults, closure or partial arguments): changed='again' drops them and makes "
                    "all calls again, changed='keep' keeps them"
                ) from None
            raise
        self._thread = OwnThread(f"polycephaly-resume-{os.path.basename(path)}", self._write_all)

    @property
    def is_ending(self) -> bool:
        """Whether `close` was called."""
        return self._ends.is_set()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a copy in a fork of the process whose run it is."""
        return os.getpid() != self._pid

    def find(self, keys: Sequence[bytes]) -> Sequence[Found | None]:
        """Return, for each of the keys, the result of that call if it was stored in an earlier run,
        or None.
        """
        if not self._unfound or not keys:
            return [None] * len(keys)
        found = self._file.find(keys)
        self._unfound -= sum(each is not None for each in found)
        return found

    def read(self, found: Found) -> bytes:
        """Return the pickle of a result that was found."""
        return self._file.read(found.id) if found.result is None else found.result

    def put(self, making: Making, size: int) -> None:
        """Have calls stored, whose results take `size` bytes. Any thread may call this."""
        with self._bytes_lock:
            self._waiting_bytes += size
        self._waiting.put(making)

    def wait_for_room(self) -> None:
        """Wait while too many bytes wait to be stored. Raise the error that ended the storing."""
        while self._waiting_bytes > MAX_WAITING_BYTES and self._thread.is_alive():
            self._has_room.clear()
            self._has_room.wait(COMMIT_SECONDS)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Store the rest, and release the file. A second call is no error."""
        if self.is_elsewhere:
            return
        atexit.unregister(self.close)
        self._ends.set()
        # A finalizer may run in any thread: then the file is released a moment later.
        if self._thread is not threading.current_thread() and not holds_own_lock():
            self._thread.join()

    def _write_all(self) -> None:
        add_thread_lock(self._thread, self._file.lock)
        try:
            while self._write_some():
                pass
        finally:
            remove_thread_lock(self._thread)
            self._file.close()
            self._lock.release()
            self._unclaim()

    def _write_some(self) -> bool:
        """Store what has ended, with what ends within a moment; return False after the last."""
        ends = self._ends.wait(COMMIT_SECONDS)
        makings: list[Making] = []
        with self._bytes_lock:
            size = self._waiting_bytes
        try:
            while True:
                makings.append(self._waiting.get_nowait())
        except Empty:
            pass
        try:
            if makings and self.error is None:
                self._store(makings)
        except Exception as error:  # a full disk, say
            self.error = error
            error.add_note(f"while storing results in {self.path!r}")
            log.error("results are no longer stored in %s: %s", self.path, error)
        with self._bytes_lock:
            self._waiting_bytes -= size
        self._has_room.set()
        return not ends

    def _store(self, makings: Iterable[Making]) -> None:
        ended = (each for making in makings for each in making())
        for each, error in self._file.add(list(ended)):
            log.warning(
                "the result of item %d is not stored in %s, so the call is made again in a later "
                "run: %s", each.item, self.path, error,
            )  # fmt: skip


def warn_of_code(function: str, path: str, version: str) -> None:
    """Tell that results are made again because the code that they carry is of another Python."""
    warnings.warn(
        f"results of {function} in {path!r} carry code by value, of Python {version}, which this "
        "Python cannot run: these calls are made again. Results whose classes and functions are "
        "those of a module, or of the program itself, go by name",
        RuntimeWarning,
        stacklevel=caller_stacklevel(),
    )
