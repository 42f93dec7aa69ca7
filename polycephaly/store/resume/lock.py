"""One run at a time uses a file of results.

The lock is a record lock (`fcntl`) of a second file, ``run.db-lock``, which has the process id of
its holder and is removed at the end. The kernel releases such a lock when its process ends in any
way, and drones do not inherit it. It works on network file systems, as SQLite's own locks do. It is
not one of the file itself: whoever closes that anywhere in this process would release the lock.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

_SUFFIX = "-lock"


class InUse(Exception):
    """Another process has the lock."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class FileLock:
    """The lock of the file at `path`.

    Raises `InUse`, with its holder, if another process has it.
    """

    def __init__(self, path: str) -> None:
        self._path = path + _SUFFIX
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                try:
                    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if not isinstance(error, (BlockingIOError, PermissionError)):
                        raise
                    raise InUse(os.pread(fd, 200, 0).decode("utf-8", "replace")) from None
                if self._is_current(fd):
                    break
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its holder has removed it meanwhile
        self._fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove the file, and release its lock."""
        with suppress(OSError):
            os.unlink(self._path)
        os.close(self._fd)
