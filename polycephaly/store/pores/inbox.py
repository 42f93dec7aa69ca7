"""The owner's side of one pore: the connected holders, and the messages not received yet.

    I/O thread: holder readable ──a chunk of the stream──> split ──> frames ──receiver──> Message
                └── too many bytes waiting: stop reading; the senders' buffers fill, and they wait

Only the pore I/O thread adds to `frames`. A receiver takes a frame in one atomic step, and then
unpickles it. Each frame has the number of bytes that were read before its chunk. So the oldest
frame tells how many bytes have not been received, and receivers count nothing.

No wake-up is lost. A receiver adds its signal to `waiters` and then checks once more; the I/O
thread adds frames and then takes the signals out. The same holds for room: a receiver takes a
frame, then checks whether the I/O thread has paused; the I/O thread notes that it pauses, then
checks for room once more.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from _thread import get_ident
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from secrets import compare_digest
from typing import Any

from ...errors import Malformed
from ...promises.event_loop import EventLoop
from ...promises.promise import Signal, fulfill
from ...runtime import parent_death
from ...runtime.deferred_sigint import DeferredSigint
from ...runtime.timers import Timer
from .frames import FAREWELL, GREETING, Frame, split_frames

log = logging.getLogger("polycephaly.store.pores")

MAX_UNRECEIVED_BYTES = 256 * 1024
"""Bytes of unreceived messages at which the senders have to wait, in addition to the kernel's
buffer for each of them.
"""
READ_BYTES = 64 * 1024
"""Limit in bytes of one read."""
MAX_NAME_BYTES = 200
"""Limit in bytes of a holder's name."""
RETRY_SECONDS = 0.1
"""Time between attempts to accept or watch holders for which the system had no resources."""


def is_trusted_peer(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as our own user, or as root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid = int.from_bytes(credentials[4:8], "little")
    return uid in (0, os.geteuid())


class ConnectedHolder:
    """A connected holder, seen from the owner. Only the I/O thread uses it."""

    def __init__(self, inbox: Inbox, connection: socket.socket) -> None:
        self.inbox = inbox
        self.connection = parent_death.close_in_child(connection)
        self.name: str | None = None  # None until the holder has sent its hello
        self._unsplit = b""  # the start of a frame, at the end of the last chunk

    def handle_hello(self) -> bool:
        """Read the hello and send the greeting; return False if the secret is wrong."""
        hello = self.connection.recv(len(self.inbox.secret) + MAX_NAME_BYTES)
        secret, name = hello[: len(self.inbox.secret)], hello[len(self.inbox.secret) :]
        if not compare_digest(secret, self.inbox.secret):
            return False
        self.name = name.decode("utf-8", "replace")
        socket.send_fds(self.connection, [GREETING], [self.inbox.content.fd])
        return True

    def read(self) -> bool:
        """Read one chunk; return False if the stream has ended. Raises `OSError` if it broke."""
        try:
            chunk = self.connection.recv(READ_BYTES)
        except BlockingIOError:
            return True
        inbox, name = self.inbox, self.name
        try:
            frames, self._unsplit = split_frames(self._unsplit, chunk)
        except Malformed as error:
            log.warning("messages of %s to a pore were dropped: %s", name, error)
            frames, self._unsplit = [], b""
        before = inbox.bytes_read
        inbox.bytes_read += len(chunk)
        inbox.frames.extend((name, frame, before) for frame in frames)
        return bool(chunk)


class Inbox:
    """The inbox of one pore, made and closed by its owner."""

    loop: EventLoop
    """That of the pore I/O thread."""

    def __init__(
        self, secret: bytes, content: parent_death.Descriptor, listener: socket.socket
    ) -> None:
        self._pid = os.getpid()
        self.secret = secret
        self.content = content  # the descriptor of the memory or the file
        self.listener = listener
        self.holders: dict[int, ConnectedHolder] = {}  # by descriptor; used by the I/O thread only
        # Sender's name, frame, and `bytes_read` before its chunk.
        self.frames: deque[tuple[Any, Frame, int]] = deque()
        self.bytes_read = 0
        self.is_paused = False  # the I/O thread reads no more until there is room
        self._retry: Timer | None = None
        self._ended_signal: Signal[None] = Signal()
        self.waiters: deque[Signal[None]] = deque()
        self._open_token = [None]

    # -- any thread of the owner -------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return not self._open_token

    @property
    def ended(self) -> bool:
        """True if the I/O thread has closed the pore: no more messages will come."""
        return self._ended_signal.done()

    def close(self) -> None:
        """Request the closing. Safe in a finalizer, even in a child that was forked just now."""
        if os.getpid() != self._pid:
            return
        with DeferredSigint():  # a Ctrl-C between the two lines would leave the pore open for ever
            try:
                self._open_token.pop()
            except IndexError:
                return
            self.loop.post(self.shut_down)

    def wait_until_ended(self) -> None:
        """Wait, after `close`, until the I/O thread has closed the pore."""
        # Not `current_thread`, which would enter a thread that `threading` has not started, for
        # ever. At the end of the interpreter, the I/O thread runs no more.
        if not (self.loop.thread.ident == get_ident() or sys.is_finalizing()):
            self._ended_signal.result()

    def take_frame(self) -> tuple[str, Frame] | None:
        """Return the oldest frame and its sender's name, or None if there is no frame."""
        try:
            name, frame, _ = self.frames.popleft()
        except IndexError:
            return None
        if self.is_paused and not self._is_full():
            self.loop.post(self._resume)
        return name, frame

    def _is_full(self) -> bool:
        try:
            return self.bytes_read - self.frames[0][2] >= MAX_UNRECEIVED_BYTES
        except IndexError:
            return False

    @contextmanager
    def message_signal(self) -> Iterator[Signal[None]]:
        """Yield a signal that is set when there may be a message, or never will be another one."""
        signal: Signal[None] = Signal()
        self.waiters.append(signal)
        try:
            if self.frames or self.ended:
                fulfill(signal)
            yield signal
        finally:
            with suppress(ValueError):
                self.waiters.remove(signal)

    # -- the pore I/O thread -----------------------------------------------------------------------

    def watch_all(self) -> None:
        """Watch the listener, and the holders unless they have to wait for room."""
        if self.ended:
            return
        try:
            self.loop.watch(self.listener.fileno(), self._accept_holder)
            for fd, holder in self.holders.items():
                if holder.name is None or not self.is_paused:
                    self.loop.watch(fd, partial(self._read_holder, holder))
        except OSError:
            self._retry_later()

    def _retry_later(self) -> None:
        if self._retry is None or self._retry.is_over:
            self._retry = self.loop.call_later(RETRY_SECONDS, self.watch_all)

    def _resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self.watch_all()

    def _accept_holder(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:  # the client has disconnected again
            return
        except OSError:  # no descriptors are left: the client waits, the others are served
            self.loop.unwatch(self.listener.fileno())
            self._retry_later()
            return
        connection.setblocking(False)
        if is_trusted_peer(connection):
            self.holders[connection.fileno()] = ConnectedHolder(self, connection)
            self.watch_all()
        else:
            connection.close()

    def _read_holder(self, holder: ConnectedHolder) -> None:
        fd = holder.connection.fileno()
        try:
            stays = holder.handle_hello() if holder.name is None else holder.read()
        except OSError:
            stays = False
        if not stays:
            self.loop.unwatch(fd)
            del self.holders[fd]
            parent_death.close(holder.connection)
        if self.waiters and self.frames:
            self._wake_waiters()
        if self._is_full():
            self._pause_reading()

    def _pause_reading(self) -> None:
        for fd, holder in self.holders.items():
            if holder.name is not None:  # a holder that has just connected is still let in
                self.loop.unwatch(fd)
        self.is_paused = True
        if not self._is_full():
            self._resume()

    def _wake_waiters(self) -> None:
        with suppress(IndexError):
            while True:
                fulfill(self.waiters.popleft())

    def shut_down(self) -> None:
        """Read the messages sent until now, and close the connections."""
        for fd in (self.listener.fileno(), *self.holders):
            self.loop.unwatch(fd)
        parent_death.close(self.listener)
        for holder in self.holders.values():
            try:
                holder.connection.shutdown(socket.SHUT_RD)
                if holder.name is not None:
                    while holder.read():
                        pass
                holder.connection.send(FAREWELL, socket.MSG_NOSIGNAL)
            except OSError:  # the holder is gone
                pass
            parent_death.close(holder.connection)
        self.holders.clear()
        parent_death.close(self.content)
        fulfill(self._ended_signal)
        self._wake_waiters()
