"""The owner's side of one pore: who is connected, and what came and was not received yet.

    porter: member readable ──a piece of the stream──> pieces ──split──> frames ──> receive: Message
               └── held ≥ ROOM: stops reading, so the senders' buffers fill, and they wait: that is the credit

`pieces` has one writer, the porter. Receivers split pieces under a lock, which runs no code of
users; what unpickling runs, it runs outside of that. Each of the two counters has one writer:
`came` the porter, `taken` whoever has the lock.

Nothing is waited for in vain: a receiver leaves its milestone in `waiting` and then looks once
more; the porter puts a piece down and then takes the milestones out. And for room: a receiver
counts, then looks whether the porter has stopped; the porter notes that it stops, then looks at the
count once more."""

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
"""Bytes that wait to be received before the senders have to wait; beside what the kernel holds for
each of them."""
PIECE = 64 * 1024
"""Bytes read at once."""
NAME = 200
"""Bytes of a holder's name."""


def may_be_trusted(end: socket.socket) -> bool:
    """Is the other end of it of our own user, or root's?"""
    uid = int.from_bytes(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8], "little")
    return uid in (0, os.geteuid())


class ConnectedHolder:
    """A holder, seen from the owner. The porter's, but for `rest`."""

    def __init__(self, inbox: Inbox, end: socket.socket) -> None:
        self.inbox = inbox
        self.end = parent_death.own(end)
        self.name: str | None = None  # until it has said who it is
        self.rest = b""  # of the last piece that was split

    def let_in(self) -> bool:
        """It has said something for the first time."""
        hello = self.end.recv(len(self.inbox.secret) + NAME)
        secret, name = hello[: len(self.inbox.secret)], hello[len(self.inbox.secret) :]
        if not compare_digest(secret, self.inbox.secret):
            return False
        self.name = name.decode("utf-8", "replace")
        socket.send_fds(self.end, [GREETING], [self.inbox.content.fd])
        return True

    def read(self) -> bool:
        """Takes what it has told; False where there is no more and never will be."""
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
    """Made and closed by the owner; what the porter alone touches is said to be his."""

    def __init__(
        self,
        io_thread: PoreIOThread,
        secret: bytes,
        content: parent_death.Descriptor,
        listener: socket.socket,
    ) -> None:
        self.pid = os.getpid()
        self.secret = secret
        self.content = parent_death.own(content)  # of the memory, or of the file
        self.listener = parent_death.own(listener)
        self.members: dict[int, ConnectedHolder] = {}  # the porter's
        self.pieces: deque[tuple[ConnectedHolder, bytes]] = deque()
        self.came = self.taken = 0  # bytes
        self.stopped = False  # the porter reads no more, until there is room
        self._end: Signal[None] = Signal()
        self.waiting: deque[Signal[None]] = deque()
        self._frames: deque[tuple[str, Frame]] = deque()
        self._splitting = threading.Lock()
        self._open = [None]
        self._io_thread = io_thread

    # -- any thread of the owner's -----------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return not self._open

    @property
    def ended(self) -> bool:
        """The porter has closed it: nothing more will come."""
        return self._end.done()

    def close(self) -> None:
        """Also in a finalizer."""
        with DeferredSigint():  # a Ctrl-C between the two would leave it open for ever
            try:
                self._open.pop()
            except IndexError:
                return
            self._io_thread.ask("close", self)

    def wait_until_ended(self) -> None:
        """It was closed: until the porter has done it."""
        if not self._io_thread.is_this_thread():
            self._end.result()

    def take(self) -> tuple[str, Frame] | None:
        """What came first, and from whom; None if there is nothing."""
        while True:
            try:
                return self._frames.popleft()
            except IndexError:
                if not self._split_more():
                    return None

    def has_some(self) -> bool:
        return bool(self._frames or self.pieces)

    def is_over(self) -> bool:
        """Nothing is there, and nothing will come; also not of a piece that another receiver is
        splitting."""
        if not self.ended:
            return False
        with self._splitting, DeferredSigint():
            return not self.has_some()

    def _split_more(self) -> bool:
        with self._splitting, DeferredSigint():  # a Ctrl-C between the lines would lose the piece
            if self._frames:  # another receiver was quicker
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
        """Settled when there may be something to take, or never will be."""
        news: Signal[None] = Signal()
        self.waiting.append(news)
        try:
            if self.has_some() or self.ended:
                news._settle(FINISHED, None, None)
            yield news
        finally:
            with suppress(ValueError):
                self.waiting.remove(news)

    # -- the porter --------------------------------------------------------------------------------

    def tell_waiting(self) -> None:
        waiting = self.waiting
        while waiting:
            try:
                waiting.popleft()._settle(FINISHED, None, None)
            except IndexError:
                return

    def end(self) -> None:
        """Takes what was told until now, and nothing more."""
        parent_death.close(self.listener)
        for member in self.members.values():
            try:
                member.end.shutdown(socket.SHUT_RD)
                if member.name is not None:
                    while member.read():
                        pass
                member.end.send(FAREWELL)
            except OSError:  # it is gone
                pass
            member.leave()
        self.members.clear()
        parent_death.close(self.content)
        self._end._settle(FINISHED, None, None)
        self.tell_waiting()
