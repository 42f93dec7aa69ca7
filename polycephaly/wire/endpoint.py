"""The ZeroMQ (bulk) transport: a socket file in a directory that only its owner can enter.

    <temporary directory>/polycephaly-XXXXXXXX/   mode 0700
        lock      locked (flock) by the owner
        zmq       the ipc:// socket of the reactor's ROUTER
        1234.c    socket for the channels (green/distributed/) of process 1234, a drone or the owner
        1234.e    dangling link: its target is the exit code of drone 1234, which had such a socket
        1234/     the same layout for the reactor of drone 1234, which starts drones of its own

File permissions decide which processes may open the socket. A sender on the socket must bear an
identity that the reactor handed out: 128 random bits, never stored in a file.

A directory whose lock is free was left by processes that were all killed at once. The next reactor
removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import cast

import zmq

from ..runtime.system_limits import ZMQ_THREADS, check_threads
from . import addresses

_PREFIX = "polycephaly-"
_MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit for the path of a Unix socket is 107
_MIN_ABANDONED_SECONDS = 60.0  # the owner of a younger directory may not have locked it yet


class BulkTransport:
    """A private directory and the reactor's bound ROUTER socket in it.

    The path is chosen in `__init__` and the directory is made by `open`. So a zygote can be started
    in between; it removes the directory if the owner is killed at any later moment.
    """

    def __init__(self) -> None:
        self.directory = _choose_directory()
        self._resources = ExitStack()  # closes whatever `open` has made

    def open(self) -> zmq.Socket[bytes]:
        """Make the directory and return the bound ROUTER.

        Raises `OSError` (`zmq.ZMQError` is one) if this fails; then nothing is left behind.
        """
        with ExitStack() as undo:
            os.mkdir(self.directory, 0o700)
            undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
            lock = os.open(
                os.path.join(self.directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            undo.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            context = new_context()
            undo.callback(context.term)
            router = context.socket(zmq.ROUTER)
            undo.callback(router.close)
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.SNDHWM, 0)  # the reactor limits messages in flight by credit
            router.setsockopt(zmq.RCVHWM, 0)
            router.bind(address(self.directory))
            self._resources = undo.pop_all()
        addresses.on_directory_made(self.directory)
        return router

    def close(self) -> None:
        addresses.on_directory_removed(self.directory)
        self._resources.close()


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a new ZeroMQ context.

    Raises `OSError` if the system has no room for the context's threads: libzmq would abort the
    process.
    """
    check_threads(ZMQ_THREADS)
    return zmq.Context()


def address(directory: str) -> str:
    return f"ipc://{directory}/zmq"


def connect(
    directory: str, identity: bytes
) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    """Connect a drone's DEALER, with the identity that the reactor gave the drone."""
    context = new_context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, identity)
    # Milliseconds: results in flight are delivered before the drone ends.
    dealer.setsockopt(zmq.LINGER, 5000)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.connect(address(directory))
    return context, dealer


def has_input(end: zmq.Socket[bytes]) -> bool:
    return bool(cast(int, end.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def input_fd(end: zmq.Socket[bytes]) -> int:
    """Return a descriptor that becomes readable when something happens.

    The descriptor is edge-triggered: call `has_input` before waiting on it.
    """
    return cast(int, end.getsockopt(zmq.FD))


class SocketSource:
    """A socket as a source of an event loop."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[], object]) -> None:
        self._socket = socket
        self.receive = receive

    def fileno(self) -> int:
        return input_fd(self._socket)

    def has_input(self) -> bool:
        return has_input(self._socket)


def _choose_directory() -> str:
    max_length = _MAX_SOCKET_PATH_BYTES - len("/zmq")
    if addresses.parent_directory is not None:
        inside = os.path.join(addresses.parent_directory, str(os.getpid()))
        if len(inside) <= max_length and os.path.isdir(addresses.parent_directory):
            return inside
    parent = tempfile.gettempdir()
    _remove_abandoned(parent)
    name = _PREFIX + os.urandom(8).hex()
    directory = os.path.join(parent, name)
    return directory if len(directory) <= max_length else os.path.join("/tmp", name)


def _remove_abandoned(parent: str) -> None:
    """Remove old directories whose lock is free, left by processes that were all killed at once."""
    with suppress(OSError):
        for entry in os.scandir(parent):
            if entry.name.startswith(_PREFIX):
                _remove_if_abandoned(entry.path)


def _remove_if_abandoned(directory: str) -> None:
    with suppress(OSError):
        if time.time() - os.lstat(directory).st_mtime < _MIN_ABANDONED_SECONDS:
            return
        # Any user may write to the temporary directory: an entry with our prefix may be a link, or
        # not be a regular file.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
        lock = os.open(os.path.join(directory, "lock"), flags)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
