"""Where images meet: a socket file in a directory that only its owner can enter.

    <temporary directory>/polycephaly-XXXXXXXX/       mode 0700
        lock      held (flock) by the owner
        hub       the ROUTER's ipc:// socket
        1234.c    the socket of process 1234, drone or owner, for its channels (green/far/)
        1234.e    a link to nothing, whose text is the exit code of drone 1234 that had such a socket
        1234/     the same again for the hub of drone 1234, which starts drones of its own

Who may open the socket is thereby decided by the file system; who speaks on it must bear an
identity that the hub has handed out (128 random bits, never in a file). A directory whose lock
nobody holds was left by images that were all killed at once; the next hub removes it."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from typing import cast

import zmq

from ..runtime.system_limits import ZMQ_THREADS, check_threads
from . import addresses

__all__ = ["BulkTransport", "connect", "has_news", "new_context", "news_fd"]

_PREFIX = "polycephaly-"
_SOCKET_PATH_MAX = 100  # a unix socket's path has 107 bytes
_OLD_ENOUGH = 60.0  # seconds: a directory younger than this may not have got its lock yet


class BulkTransport:
    """A private directory with the hub's bound socket in it.

    Its path is known from the start and it is made by `open`, so that a zygote can be there before,
    which removes it when its owner is killed at any moment afterwards."""

    def __init__(self) -> None:
        self.home = _choose_home()
        self._made = ExitStack()  # what there is to undo

    def open(self) -> zmq.Socket[bytes]:
        """Raises `OSError` (zmq.ZMQError among them) where it cannot be made; nothing is left
        then."""
        with ExitStack() as undo:
            os.mkdir(self.home, 0o700)
            undo.callback(shutil.rmtree, self.home, ignore_errors=True)
            lock = os.open(
                os.path.join(self.home, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            context = new_context()
            undo.callback(context.term)
            router = context.socket(zmq.ROUTER)
            undo.callback(router.close)
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.SNDHWM, 0)  # the hub bounds what is under way by credit
            router.setsockopt(zmq.RCVHWM, 0)
            router.bind(address(self.home))
            self._made = undo.pop_all()
        addresses.begin(self.home)
        return router

    def close(self) -> None:
        addresses.end(self.home)
        self._made.close()


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Raises `OSError` where there is no room for its threads, for which libzmq would abort this
    process."""
    check_threads(ZMQ_THREADS)
    return zmq.Context()


def address(home: str) -> str:
    return f"ipc://{home}/hub"


def connect(home: str, identity: bytes) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """The drone's end: a DEALER that bears the identity the hub gave it."""
    context = new_context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, identity)
    dealer.setsockopt(zmq.LINGER, 5000)  # results on their way are delivered before the drone ends
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.connect(address(home))
    return context, dealer


def has_news(end: zmq.Socket[bytes]) -> bool:
    return bool(cast(int, end.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def news_fd(end: zmq.Socket[bytes]) -> int:
    """A descriptor that becomes readable when something happens: edge-triggered, so look at
    `has_news` first."""
    return cast(int, end.getsockopt(zmq.FD))


def _choose_home() -> str:
    longest = _SOCKET_PATH_MAX - len("/hub")
    if addresses.home_of_parent is not None:
        inside = os.path.join(addresses.home_of_parent, str(os.getpid()))
        if len(inside) <= longest and os.path.isdir(addresses.home_of_parent):
            return inside
    place = tempfile.gettempdir()
    _sweep(place)
    name = _PREFIX + secrets.token_hex(8)
    home = os.path.join(place, name)
    return home if len(home) <= longest else os.path.join("/tmp", name)


def _sweep(place: str) -> None:
    """Removes what earlier images left that were killed all at once: old directories with no lock
    held."""
    with suppress(OSError):
        for entry in os.scandir(place):
            if entry.name.startswith(_PREFIX) and time.time() - entry.stat().st_mtime > _OLD_ENOUGH:
                _remove_if_abandoned(entry.path)


def _remove_if_abandoned(home: str) -> None:
    with suppress(OSError):
        # The temporary directory is everybody's: what lies there under our name may be a link, or
        # no file.
        harmless = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
        lock = os.open(os.path.join(home, "lock"), os.O_RDWR | harmless)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
        finally:
            os.close(lock)
