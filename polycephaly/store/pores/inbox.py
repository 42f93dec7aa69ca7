"""The owner's side of one pore: the connected holders, and the messages not received yet.

    I/O thread: member readable ──a piece of the stream──> pieces ──split──> frames ──> Message
                └── ROOM bytes waiting: stop reading; the senders' buffers fill, and they wait

`pieces` has one writer, the pore I/O thread. Receivers split pieces while holding a lock under
which no user code runs: unpickling happens outside. Each of the two counters has one writer: `came`
the I/O thread, `taken` the thread that holds the lock.

No wake-up is lost. A receiver adds its signal to `waiting` and then checks once more; the I/O
thread adds a piece and then takes the signals out. The same holds for room: a receiver counts, then
checks whether the I/O thread has stopped; the I/O thread notes that it stops, then checks the count
once more.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import compare_digest
from typing import TYPE_CHECKING, Any

from ...promises.promise import FINISHED, Signal
from ...runtime import parent_death
from ...runtime.deferred_sigint import DeferredSigint
from ...wire.messages import Malformed
from .frames import FAREWELL, GREETING, Frame, split

if TYPE_CHECKING:
    from .io_thread import PoreIOThread

__all__ = ["ROOM", "ConnectedHolder", "Inbox", "may_be_trusted"]

log = logging.getLogger("polycephaly.store.pores")

ROOM = 256 * 1024
"""Bytes of unreceived messages at which the senders have to wait, in addition to the kernel's
buffer for each of them.
"""
PIECE = 64 * 1024
"""Limit in bytes of one read."""
NAME = 200
"""Limit in bytes of a holder's name."""


def may_be_trusted(end: socket.socket) -> bool:
    """Return whether the process at the other end runs as our own user, or as root."""
    uid = int.from_bytes(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8], "little")
    return uid in (0, os.geteuid())


class ConnectedHolder:
    """A connected holder, seen from the owner. Only the I/O thread uses it, except for `rest`."""

    def __init__(self, inbox: Inbox, end: socket.socket) -> None:
        self.inbox = inbox
        self.end = parent_death.own(end)
        self.name: str | None = None  # None until the holder has sent its hello
        self.rest = b""  # unsplit bytes of the last piece; guarded by the inbox's lock

    def let_in(self) -> bool:
        """Read the hello and send the greeting; return False if the secret is wrong."""
        hello = self.end.recv(len(self.inbox.secret) + NAME)
        secret, name = hello[: len(self.inbox.secret)], hello[len(self.inbox.secret) :]
        if not compare_digest(secret, self.inbox.secret):
            return False
        self.name = name.decode("utf-8", "replace")
        socket.send_fds(self.end, [GREETING], [self.inbox.content.fd])
        return True

    def read(self) -> bool:
        """Read one piece; return False if the stream has ended."""
        try:
            piece = self.end.recv(PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if piece:
            self.inbox.came += len(piece)
            self.inbox.pieces.append((self, piece))
        return bool(piece)

    def leave(self) -> None:
        parent_death.close(self.end)


class Inbox:
    """The inbox of one pore, made and closed by its owner."""

    def __init__(
        self,
        io_thread: PoreIOThread,
        secret: bytes,
        content: parent_death.Descriptor,
        listener: socket.socket,
    ) -> None:
        self.pid = os.getpid()
        self.secret = secret
        self.content = parent_death.own(content)  # the descriptor of the memory or the file
        self.listener = parent_death.own(listener)
        self.members: dict[int, ConnectedHolder] = {}  # by descriptor; used by the I/O thread only
        self.pieces: deque[tuple[ConnectedHolder, bytes]] = deque()
        # Bytes read by the I/O thread, and bytes split by receivers.
        self.came = self.taken = 0
        self.stopped = False  # the I/O thread reads no more until there is room
        self._end: Signal[None] = Signal()
        self.waiting: deque[Signal[None]] = deque()
        self._frames: deque[tuple[str, Frame]] = deque()
        self._splitting = threading.Lock()
        self._open = [None]
        self._io_thread = io_thread

    # -- any thread of the owner -------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return not self._open

    @property
    def ended(self) -> bool:
        """True if the I/O thread has closed the pore: no more messages will come."""
        return self._end.done()

    def close(self) -> None:
        """Request the closing. Safe in a finalizer."""
        with DeferredSigint():  # a Ctrl-C between the two lines would leave the pore open for ever
            try:
                self._open.pop()
            except IndexError:
                return
            self._io_thread.ask("close", self)

    def wait_until_ended(self) -> None:
        """Wait, after `close`, until the I/O thread has closed the pore."""
        if not self._io_thread.is_this_thread():
            self._end.result()

    def take(self) -> tuple[str, Frame] | None:
        """Return the oldest frame and its sender's name, or None if there is no frame."""
        while True:
            try:
                return self._frames.popleft()
            except IndexError:
                if not self._split_more():
                    return None

    def has_some(self) -> bool:
        return bool(self._frames or self.pieces)

    def is_over(self) -> bool:
        """Return whether no message is left and none will come.

        A piece that another receiver is splitting counts as left.
        """
        if not self.ended:
            return False
        with self._splitting, DeferredSigint():
            return not self.has_some()

    def _split_more(self) -> bool:
        with self._splitting, DeferredSigint():  # a Ctrl-C between the lines would lose the piece
            if self._frames:  # another receiver was faster
                return True
            try:
                member, piece = self.pieces.popleft()
            except IndexError:
                return False
            try:
                frames, member.rest = split(member.rest, piece)
            except Malformed as wrong:
                log.warning("what %s told a pore was dropped: %s", member.name, wrong)
                frames, member.rest = [], b""
            name: Any = member.name
            self._frames.extend((name, frame) for frame in frames)
            self.taken += len(piece)
        if self.stopped and self.came - self.taken < ROOM:
            self._io_thread.ask("go on", self)
        return True

    @contextmanager
    def news(self) -> Iterator[Signal[None]]:
        """Yield a signal that is set when there may be a message, or never will be another one."""
        news: Signal[None] = Signal()
        self.waiting.append(news)
        try:
            if self.has_some() or self.ended:
                news._settle(FINISHED, None, None)
            yield news
        finally:
            with suppress(ValueError):
                self.waiting.remove(news)

    # -- the pore I/O thread -----------------------------------------------------------------------

    def tell_waiting(self) -> None:
        waiting = self.waiting
        while waiting:
            try:
                waiting.popleft()._settle(FINISHED, None, None)
            except IndexError:
                return

    def end(self) -> None:
        """Read the messages sent until now, and close the connections."""
        parent_death.close(self.listener)
        for member in self.members.values():
            try:
                member.end.shutdown(socket.SHUT_RD)
                if member.name is not None:
                    while member.read():
                        pass
                member.end.send(FAREWELL)
            except OSError:  # the holder is gone
                pass
            member.leave()
        self.members.clear()
        parent_death.close(self.content)
        self._end._settle(FINISHED, None, None)
        self.tell_waiting()
