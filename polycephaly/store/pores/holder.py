"""A holder's side of a pore: one connection to its owner, made at the first use.

    connect ──hello──> owner       refused: the pore was closed, or its owner has ended
            <──greeting, descriptor──  memory: mapped, descriptor closed; a file: descriptor kept
    send    ──frame──> kernel's buffer; if there is no room: wait, or report that
    check   the connection: open; or a farewell: closed; or at its end: the owner has ended

The kernel takes a frame as a whole or not at all, unless its buffers were made very small. An
exception during a send (Ctrl-C, an interrupt) drops the connection, because the number of bytes
sent is unknown then; the next use makes a new connection.

The kernel closes the owner's ends when the owner ends, unless a child that was forked behind
Python's back has copies of them. So a waiting holder also polls a pidfd of the owner.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from mmap import MAP_SHARED
from typing import Any

from ...errors import PoreClosed, copy_error
from ...memory.arena import map_range
from ...runtime import parent_death
from ...runtime.deferred_sigint import DeferredSigint
from ...runtime.procfs import boot_id, start_time_of
from .frames import FAREWELL, GREETING
from .inbox import MAX_NAME_BYTES, is_trusted_peer


@dataclass(frozen=True)
class PoreIdentity:
    """The identity of a pore, which travels with it. The address is random and never used again."""

    pore: str
    address: str
    secret: bytes
    owner: int
    owner_name: str
    owner_start_time: str  # begins with the boot ID of the owner's machine

    def closed_error(self, ended: bool, was_connected: bool = True) -> PoreClosed:
        """Return the error to raise. `was_connected`: whether this process was ever connected."""
        reason = "has ended" if ended else "has closed it"
        if not ended and not was_connected:
            reason += (
                ", or kept no reference to the pore: the owner must keep one, for example in a "
                "global variable"
            )
        return PoreClosed(
            f"the pore {self.pore!r} is closed: its owner, process {self.owner} "
            f"({self.owner_name}), {reason}",
            pore=self.pore,
            owner=self.owner,
            ended=ended,
        )


def process_name() -> str:
    """Return the drone's name, or "MainProcess"."""
    process: Any = sys.modules.get("multiprocessing.process")
    return process.current_process().name if process is not None else "MainProcess"


Content = memoryview | parent_death.Descriptor
"""A pore's memory, mapped here, or its open file, as a descriptor of this process's own."""


class Holder:
    """The holder of one process; a forked child uses another one. Any thread may call it."""

    def __init__(
        self, identity: PoreIdentity, size: int, memory: memoryview | None, was_connected: bool
    ) -> None:
        """Prepare the connection, which the first use makes.

        `size` is the size of the memory in bytes; 0 if the pore is a file. `memory` is the mapping
        inherited from the parent process if that process `was_connected`; a file is not inherited.
        """
        self._identity = identity
        self._size = size
        self._content: Content | None = memory
        self._was_connected = was_connected
        self._socket: socket.socket | None = None
        self._owner: parent_death.Descriptor | None = None  # the owner's pidfd
        self._closed_error: PoreClosed | None = None
        self._connect_lock = threading.Lock()
        self._send_lock = threading.Lock()  # held while sending

    def content(self, check: bool) -> Content:
        """Return the pore's pages or file; the first use waits for the owner's I/O thread.

        Raises `PoreClosed`; after the first use only if `check` is true.
        """
        connected = False
        while (connection := self._socket) is None or (content := self._content) is None:
            # Runs again only if another thread has closed the connection in the meantime.
            self._connect()
            connected = True
        if check and not connected:
            self._check_open(connection)
        return content

    def send(self, frame: bytes, wait: bool) -> bool:
        """Send a frame; return False if there was no room and nothing was sent.

        Without `wait`, another thread that is sending counts as no room. Raises `PoreClosed`.
        """
        if wait:
            with self._send_lock:
                return self._send(frame, wait)
        if self._socket is None:
            self._connect()
        with DeferredSigint():  # a Ctrl-C between the two lines would leave the lock locked
            if not self._send_lock.acquire(blocking=False):
                return False
            try:
                return self._send(frame, wait)
            finally:
                self._send_lock.release()

    def _send(self, frame: bytes, wait: bool) -> bool:
        connection = self._socket or self._connect()
        sent = 0
        try:
            while sent < len(frame):
                try:
                    sent += connection.send(
                        frame[sent:] if sent else frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                    )
                except BlockingIOError:
                    if not (sent or wait):
                        return False
                    self._wait_for_room(connection)
            return True
        except OSError:
            self._check_open(connection)
            # The owner reads no more, and is about to send a farewell.
            raise self._set_closed(ended=False) from None
        except BaseException:  # the number of bytes sent is unknown
            self._disconnect()
            raise

    def _wait_for_room(self, connection: socket.socket) -> None:
        poll = select.poll()
        poll.register(connection, select.POLLOUT | select.POLLIN)
        owner = self._owner
        if owner is not None:
            poll.register(owner.fd, select.POLLIN)
        events = poll.poll()
        self._check_open(connection)
        if owner is not None and (owner.fd, select.POLLIN) in events:
            raise self._set_closed(ended=True)

    def _check_open(self, connection: socket.socket) -> None:
        """Raise `PoreClosed` if the pore is closed."""
        try:
            peeked = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            if connection.fileno() < 0:  # another thread has just dropped the connection
                return
            peeked = b""
        raise self._set_closed(ended=peeked != FAREWELL)

    def _connect(self) -> socket.socket:
        with self._connect_lock:
            if self._socket is not None:  # another thread was faster
                return self._socket
            identity = self._identity
            if self._closed_error is not None:
                raise copy_error(self._closed_error)
            # Empty if no descriptor is left, which the connection will show.
            if not identity.owner_start_time.startswith(boot_id()):
                raise RuntimeError(
                    f"the pore {identity.pore!r} is on another machine, in {identity.owner_name}"
                )
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect("\0" + identity.address)
                if not is_trusted_peer(connection):
                    raise ConnectionRefusedError
                connection.sendall(
                    identity.secret + process_name().encode()[:MAX_NAME_BYTES], socket.MSG_NOSIGNAL
                )
                greeting = select.poll()
                greeting.register(connection, select.POLLIN)
                greeting.poll()
                with DeferredSigint():  # a Ctrl-C would lose the descriptor
                    self._receive_content(connection)
            except ConnectionError:
                connection.close()
                ended = start_time_of(identity.owner) != identity.owner_start_time
                raise self._set_closed(ended, self._was_connected) from None
            except BaseException:
                # Otherwise a Ctrl-C came after the connection was complete.
                if self._socket is not connection:
                    connection.close()
                raise
            return connection

    def _receive_content(self, connection: socket.socket) -> None:
        greeting, fds = parent_death.receive_fds(connection, 1, 1)
        if greeting != GREETING:  # the pore is being closed
            raise ConnectionResetError
        if not fds:  # the descriptor was sent, but this process has no number left for it
            raise OSError(
                errno.EMFILE, f"no file descriptor is left for the pore {self._identity.pore!r}"
            )
        received = parent_death.close_in_child(parent_death.Descriptor(fds[0]))
        try:
            if self._content is None:
                if self._size:
                    self._content = memoryview(map_range(received.fd, 0, self._size, MAP_SHARED))
                # An owner that uses `tell` itself has the file already.
                elif self._identity.owner != os.getpid():
                    self._content = received
        finally:
            if self._content is not received:
                parent_death.close(received)
        self._was_connected = True
        if (pidfd := parent_death.open_pidfd(self._identity.owner)) is not None:
            self._owner = parent_death.close_in_child(parent_death.Descriptor(pidfd))
        self._socket = parent_death.close_in_child(connection)

    def _set_closed(self, ended: bool, was_connected: bool = True) -> BaseException:
        if self._closed_error is None:  # otherwise another thread has noticed it first
            self._closed_error = self._identity.closed_error(ended, was_connected)
        self._disconnect()
        return copy_error(self._closed_error)

    def _disconnect(self) -> None:
        connection, self._socket = self._socket, None
        owner, self._owner = self._owner, None
        if connection is not None:
            parent_death.close(connection)
        if owner is not None:
            parent_death.close(owner)

    def close(self) -> None:
        """Close the connection and a file; memory stays mapped. Safe in a finalizer.

        Does nothing while another thread sends or connects. A file is received again with the next
        connection.
        """
        # A Ctrl-C would leave a lock locked, or the connection half closed.
        with DeferredSigint(), ExitStack() as held:
            for lock in (self._send_lock, self._connect_lock):
                if not lock.acquire(blocking=False):
                    return
                held.callback(lock.release)
            self._disconnect()
            content = self._content
            if isinstance(content, parent_death.Descriptor):
                self._content = None
                parent_death.close(content)
