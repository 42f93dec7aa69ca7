"""Where images meet: a socket file in a directory that only its owner can enter.

    <temporary directory>/polycephaly-XXXXXXXX/       mode 0700
        lock      held (flock) by the owner and, being inherited, by every image forked from it
        hub       the ROUTER's ipc:// socket
        1234/     the same again for the hub of drone 1234, which starts drones of its own

Who may open the socket is thereby decided by the file system; who speaks on it must bear an identity that the
hub has handed out (128 random bits, never in a file). A directory whose lock nobody holds was left by images
that were all killed at once; the next hub removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress

import zmq

__all__ = ["Endpoint", "connect"]

_PREFIX = "polycephaly-"
_SOCKET_PATH_MAX = 100  # a unix socket's path has 107 bytes
_OLD_ENOUGH = 60.0  # seconds: a directory younger than this may not have got its lock yet

home_of_parent: str | None = None
"""In a drone: the directory of the hub that started it; its own hub's is made inside."""


class Endpoint:
    """A private directory with the hub's bound socket in it."""

    def __init__(self) -> None:
        self.home = _make_home()
        self._lock = os.open(os.path.join(self.home, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._context = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.SNDHWM, 0)  # the hub bounds what is under way by credit
        self.router.setsockopt(zmq.RCVHWM, 0)
        try:
            self.router.bind(address(self.home))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.router.close()
        self._context.term()
        shutil.rmtree(self.home, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)


def address(home: str) -> str:
    return f"ipc://{home}/hub"


def connect(home: str, identity: bytes) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """The drone's end: a DEALER that bears the identity the hub gave it."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, identity)
    dealer.setsockopt(zmq.LINGER, 5000)  # results on their way are delivered before the drone ends
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.connect(address(home))
    return context, dealer


def _make_home() -> str:
    if home_of_parent is not None:
        inside = os.path.join(home_of_parent, str(os.getpid()))
        if len(inside) <= _SOCKET_PATH_MAX - len("/hub"):
            os.mkdir(inside, 0o700)
            return inside
    _sweep(tempfile.gettempdir())
    home = tempfile.mkdtemp(prefix=_PREFIX)
    if len(home) > _SOCKET_PATH_MAX - len("/hub"):
        os.rmdir(home)
        home = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
    return home


def _sweep(place: str) -> None:
    """Removes what earlier images left that were killed all at once: old directories with no lock held."""
    with suppress(OSError):
        for entry in os.scandir(place):
            if entry.name.startswith(_PREFIX) and time.time() - entry.stat().st_mtime > _OLD_ENOUGH:
                _remove_if_abandoned(entry.path)


def _remove_if_abandoned(home: str) -> None:
    with suppress(OSError):
        lock = os.open(os.path.join(home, "lock"), os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
        finally:
            os.close(lock)
