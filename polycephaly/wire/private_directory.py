"""The directory that holds a reactor's sockets: only processes of its user can enter it.

    <temporary directory>/polycephaly-XXXXXXXXXXXXXXXX/   mode 0700; locked, too (shared)
        lock      locked (flock) by the owner
        1234.c    socket for the channels (green/distributed/) of process 1234, a drone or the owner
        1234.e    dangling link: its target is the exit code of drone 1234, which had such a socket
        1234/     the same layout for the reactor of drone 1234, which starts drones of its own

File permissions decide which processes may open the sockets.

systemd-tmpfiles, which removes old files, spares a directory that anybody has locked.

A directory whose lock is free was left by processes that were all killed at once, or could not be
removed (something was mounted there, say). A later reactor of the same user removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress

from ..runtime import fork_guard, parent_death
from ..runtime.system_limits import lock_file
from . import addresses

_PREFIX = "polycephaly-"
_NAME = re.compile(f"{_PREFIX}[0-9a-f]{{16}}")
# The kernel's limit for the path of a Unix socket is 107. The rest is for the names of channels.
_MAX_PATH_BYTES = 96
_MIN_ABANDONED_SECONDS = 60.0  # the owner of a younger directory may not have locked it yet


class PrivateDirectory:
    """The path is chosen in `__init__`, and the directory is made by `open`, after a zygote was
    started, which removes the directory if its owner is killed.
    """

    def __init__(self, owner: object = None) -> None:
        """Choose the path. `owner`: the reactor, of which this is a source."""
        self._is_open = False
        self.path = _choose_directory()
        self._user = os.geteuid()
        self._resources = ExitStack()  # undoes whatever `_make` has done

    def open(self) -> None:
        """Make the directory, if this object has not done so. Raises `OSError` if this fails; then
        nothing is left behind.
        """
        with fork_guard.guard:
            if not self._is_open:
                self._make()
                self._is_open = True

    def _make(self) -> None:
        with ExitStack() as undo:
            os.mkdir(self.path, 0o700)
            undo.callback(_remove_own, self.path)
            path = os.path.join(self.path, "lock")
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, lock)
            cure = "set TMPDIR to a directory of another one"
            lock_file(lock, path, fcntl.LOCK_EX | fcntl.LOCK_NB, cure)
            directory = parent_death.close_in_child(
                parent_death.Descriptor(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
            )
            undo.callback(parent_death.close, directory)
            with suppress(OSError):  # without it, the directory is spared for as long as it is new
                fcntl.flock(directory.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._resources = undo.pop_all()
        addresses.on_directory_made(self.path)

    def check_user(self) -> None:
        """Raise `RuntimeError` if this process has become a user who cannot enter the directory."""
        if (user := os.geteuid()) not in (self._user, 0):
            raise RuntimeError(
                f"this process has become user {user} since user {self._user} opened a pool, and "
                "new drones could not enter the directory of its sockets: open pools after "
                "os.setuid, or shut down first those that were opened before"
            )

    def close(self) -> None:
        """Remove the directory."""
        addresses.on_directory_removed(self.path)
        with suppress(OSError):  # other code has closed a descriptor
            self._resources.close()


def _choose_directory() -> str:
    max_length = _MAX_PATH_BYTES
    if addresses.parent_directory is not None:
        inside = os.path.join(addresses.parent_directory, str(os.getpid()))
        if len(os.fsencode(inside)) <= max_length and os.path.isdir(addresses.parent_directory):
            return inside
    name = _PREFIX + os.urandom(8).hex()
    parent = tempfile.gettempdir()
    if len(os.fsencode(os.path.join(parent, name))) > max_length:
        parent = "/tmp"
    _remove_abandoned(parent)
    return os.path.join(parent, name)


def _remove_own(directory: str) -> None:
    """Remove a directory that no other user can enter, with one descriptor: `shutil.rmtree` takes
    more, and this process may be at its limit.
    """
    found: list[os.DirEntry[str]] = []
    with suppress(OSError), os.scandir(directory) as entries:
        found += entries
    for entry in found:
        with suppress(OSError):  # its process may be removing it
            if entry.is_dir(follow_symlinks=False):
                _remove_own(entry.path)
            else:
                os.unlink(entry.path)
    with suppress(OSError):
        os.rmdir(directory)


def _remove_abandoned(parent: str) -> None:
    """Remove old directories whose lock is free: see the module's docstring."""
    with suppress(OSError):
        for entry in os.scandir(parent):
            if _NAME.fullmatch(entry.name):
                _remove_if_abandoned(entry.path)


def _remove_if_abandoned(directory: str) -> None:
    with suppress(OSError):
        stat = os.lstat(directory)
        is_young = time.time() - stat.st_mtime < _MIN_ABANDONED_SECONDS
        if is_young or stat.st_uid != os.geteuid():
            return
        # Another user may have put this here meanwhile: its `lock` may be a link, a FIFO, a device.
        flags = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
        try:
            lock = os.open(os.path.join(directory, "lock"), flags | os.O_RDWR)
        except FileNotFoundError:  # a removal went no further, or a cleaner took it from its owner
            lock = os.open(directory, flags | os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
