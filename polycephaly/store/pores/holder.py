"""A holder's side of a pore: one connection to its owner, made at the first use.

    connect ──hello──> owner       refused: the pore was closed, or its owner has ended
            <──greeting, descriptor──  memory: mapped, descriptor closed; a file: descriptor kept
    send    ──frame──> kernel's buffer; if there is no room: wait, or report that
    look    at the owner's end: open; or a farewell: closed; or at its end: the owner has ended

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

from ...errors import PoreClosed, another
from ...runtime import parent_death
from ...runtime.deferred_sigint import DeferredSigint
from ...runtime.procfs import birth_of
from ..arena import map_range
from .frames import FAREWELL, GREETING
from .inbox import NAME, may_be_trusted

__all__ = ["Content", "Holder", "Home", "image_name", "machine"]


@dataclass(frozen=True)
class Home:
    """The identity of a pore, which travels with it. The address is random and never used again."""

    pore: str
    address: str
    secret: bytes
    owner: int
    owner_name: str
    birth: str
    machine: str

    def closed(self, ended: bool, let_in: bool = True) -> PoreClosed:
        """Return the error to raise. `let_in`: whether this process was ever connected."""
        why = "has ended" if ended else "has closed it"
        if not ended and not let_in:
            why += (
                ", or kept no reference to it: it lives while its owner keeps it, in a global say"
            )
        return PoreClosed(
            f"the pore {self.pore!r} is closed: its owner, process {self.owner} ({self.owner_name}), {why}",
            pore=self.pore, owner=self.owner, ended=ended,
        )  # fmt: skip


def machine() -> str:
    """Return an identifier of this machine since its last boot."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read().strip()
    # Other errors propagate: if no descriptor is left, the machine cannot be identified.
    except (FileNotFoundError, PermissionError):
        return os.uname().nodename


def image_name() -> str:
    """Return the drone's name, or "MainProcess"."""
    process: Any = sys.modules.get("multiprocessing.process")
    return process.current_process().name if process is not None else "MainProcess"


Content = memoryview | parent_death.Descriptor
"""A pore's memory, mapped here, or its open file, as a descriptor of this process's own."""


class Holder:
    """The holder of one process; a forked child uses another one. Any thread may call it."""

    def __init__(self, home: Home, size: int, memory: memoryview | None, was_let_in: bool) -> None:
        """Prepare the connection, which the first use makes.

        `size` is the size of the memory in bytes; 0 if the pore is a file. `memory` is the mapping
        inherited from the parent process if that process `was_let_in`; a file is not inherited.
        """
        self.pid = os.getpid()
        self._home = home
        self._size = size
        self._content: Content | None = memory
        self._was_let_in = was_let_in
        self._end: socket.socket | None = None
        self._owner: parent_death.Descriptor | None = None  # the owner's pidfd
        self._gone: PoreClosed | None = None
        self._connecting = threading.Lock()
        self._turn = threading.Lock()  # held while sending

    def content(self, look: bool) -> Content:
        """Return the pore's pages or file; the first use waits for the owner's I/O thread.

        Raises `PoreClosed`; after the first use only if `look` is true.
        """
        connected = False
        while (end := self._end) is None or (content := self._content) is None:
            # Runs again only if another thread has closed the connection in the meantime.
            self._connect()
            connected = True
        if look and not connected:
            self._look(end)
        return content

    def send(self, frame: bytes, wait: bool) -> bool:
        """Send a frame; return False if there was no room and nothing was sent.

        Without `wait`, another thread that is sending counts as no room. Raises `PoreClosed`.
        """
        if wait:
            with self._turn:
                return self._send(frame, wait)
        if self._end is None:
            self._connect()
        with DeferredSigint():  # a Ctrl-C between the two lines would leave the lock locked
            if not self._turn.acquire(blocking=False):
                return False
            try:
                return self._send(frame, wait)
            finally:
                self._turn.release()

    def _send(self, frame: bytes, wait: bool) -> bool:
        end = self._end or self._connect()
        sent = 0
        try:
            while sent < len(frame):
                try:
                    sent += end.send(frame[sent:] if sent else frame, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    if not (sent or wait):
                        return False
                    self._wait_for_room(end)
            return True
        except OSError:
            self._look(end)
            # The owner reads no more, and is about to send a farewell.
            raise self._is_gone(ended=False) from None
        except BaseException:  # the number of bytes sent is unknown
            self._drop()
            raise

    def _wait_for_room(self, end: socket.socket) -> None:
        poll = select.poll()
        poll.register(end, select.POLLOUT | select.POLLIN)
        owner = self._owner
        if owner is not None:
            poll.register(owner.fd, select.POLLIN)
        news = poll.poll()
        self._look(end)
        if owner is not None and (owner.fd, select.POLLIN) in news:
            raise self._is_gone(ended=True)

    def _look(self, end: socket.socket) -> None:
        """Raise `PoreClosed` if the pore is closed."""
        try:
            word = end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            if end.fileno() < 0:  # another thread has just dropped the connection
                return
            word = b""
        raise self._is_gone(ended=word != FAREWELL)

    def _connect(self) -> socket.socket:
        with self._connecting:
            if self._end is not None:  # another thread was faster
                return self._end
            home = self._home
            if self._gone is not None:
                raise another(self._gone)
            if home.machine != machine():
                raise RuntimeError(
                    f"the pore {home.pore!r} is on another machine, in {home.owner_name}"
                )
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                end.connect("\0" + home.address)
                if not may_be_trusted(end):
                    raise ConnectionRefusedError
                end.sendall(home.secret + image_name().encode()[:NAME])
                greeting = select.poll()
                greeting.register(end, select.POLLIN)
                greeting.poll()
                with DeferredSigint():  # a Ctrl-C would lose the descriptor
                    self._let_in(end)
            except ConnectionError:
                end.close()
                raise self._is_gone(birth_of(home.owner) != home.birth, self._was_let_in) from None
            except BaseException:
                # Otherwise a Ctrl-C came after the connection was complete.
                if self._end is not end:
                    end.close()
                raise
            return end

    def _let_in(self, end: socket.socket) -> None:
        greeting, fds = parent_death.receive_fds(end, 1, 1)
        if greeting != GREETING:  # the pore is being closed
            raise ConnectionResetError
        if not fds:  # the descriptor was sent, but this process has no number left for it
            raise OSError(
                errno.EMFILE, f"no file descriptor is left for the pore {self._home.pore!r}"
            )
        came = parent_death.own(parent_death.Descriptor(fds[0]))
        try:
            if self._content is None:
                if self._size:
                    self._content = memoryview(map_range(came.fd, 0, self._size, MAP_SHARED))
                # An owner that uses `tell` itself has the file already.
                elif self._home.owner != self.pid:
                    self._content = came
        finally:
            if self._content is not came:
                parent_death.close(came)
        self._was_let_in = True
        if (pidfd := parent_death.open_pidfd(self._home.owner)) is not None:
            self._owner = parent_death.own(parent_death.Descriptor(pidfd))
        self._end = parent_death.own(end)

    def _is_gone(self, ended: bool, let_in: bool = True) -> BaseException:
        if self._gone is None:  # otherwise another thread has noticed it first
            self._gone = self._home.closed(ended, let_in)
        self._drop()
        return another(self._gone)

    def _drop(self) -> None:
        end, self._end = self._end, None
        owner, self._owner = self._owner, None
        if end is not None:
            parent_death.close(end)
        if owner is not None:
            parent_death.close(owner)

    def close(self) -> None:
        """Close the connection and a file; memory stays mapped. Safe in a finalizer.

        Does nothing while another thread sends or connects. A file is received again with the next
        connection.
        """
        # A Ctrl-C would leave a lock locked, or the connection half closed.
        with DeferredSigint(), ExitStack() as held:
            for lock in (self._turn, self._connecting):
                if not lock.acquire(blocking=False):
                    return
                held.callback(lock.release)
            self._drop()
            content = self._content
            if isinstance(content, parent_death.Descriptor):
                self._content = None
                parent_death.close(content)
