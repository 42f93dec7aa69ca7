"""A holder's side of a pore: one connection to its owner, made with the first use.

    connect ──hello──> owner          nobody there: it was closed, or its owner has ended
            <──greeting, descriptor── of memory: it is mapped, and the descriptor closed; of a file: it is kept
    send    ──frame──> kernel's buffer; no room: waits, or says so
    look    the owner's end: open; or a farewell: closed; or at its end: the owner ended

The kernel takes a frame as a whole or not at all, unless its buffers were made very small. What
breaks off a send (Ctrl-C, an interrupt) drops the connection, as nobody knows then what has gone;
the next use makes a new one.

The kernel closes the owner's ends when it ends, unless somebody has a copy of them whom it forked
behind Python's back. So who waits also looks at a pidfd of the owner's."""

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
    """Where a pore is: what travels with it. The address is random, so it means this pore for
    ever."""

    pore: str
    address: str
    secret: bytes
    owner: int
    owner_name: str
    birth: str
    machine: str

    def closed(self, ended: bool, let_in: bool = True) -> PoreClosed:
        """`let_in`: whether this image has ever reached it."""
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
    """What tells this machine, since it was booted, from others."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read().strip()
    except (
        FileNotFoundError,
        PermissionError,
    ):  # and not where no descriptor is left: then nobody can tell
        return os.uname().nodename


def image_name() -> str:
    """The drone's name, or "MainProcess"."""
    process: Any = sys.modules.get("multiprocessing.process")
    return process.current_process().name if process is not None else "MainProcess"


Content = memoryview | parent_death.Descriptor
"""What a pore is: memory, mapped here, or an open file, as a descriptor of this image's own."""


class Holder:
    """Any thread may use it. It belongs to the process that made it: in a forked child there is
    another."""

    def __init__(self, home: Home, size: int, memory: memoryview | None, was_let_in: bool) -> None:
        """`size`: of memory in bytes; 0: it is a file. `memory`: mapped by who forked this image,
        if it `was_let_in`; a file is not inherited."""
        self.pid = os.getpid()
        self._home = home
        self._size = size
        self._content: Content | None = memory
        self._was_let_in = was_let_in
        self._end: socket.socket | None = None
        self._owner: parent_death.Descriptor | None = None  # its pidfd
        self._gone: PoreClosed | None = None
        self._connecting = threading.Lock()
        self._turn = threading.Lock()  # of who sends

    def content(self, look: bool) -> Content:
        """The pore's pages or file. The first use waits for the owner's porter. Raises
        `PoreClosed`; others if they `look`."""
        connected = False
        while (end := self._end) is None or (content := self._content) is None:
            self._connect()  # once more only if another thread has closed it meanwhile
            connected = True
        if look and not connected:
            self._look(end)
        return content

    def send(self, frame: bytes, wait: bool) -> bool:
        """False: there was no room, and nothing of it was sent. Raises `PoreClosed`."""
        if wait:
            with self._turn:
                return self._send(frame, wait)
        if self._end is None:
            self._connect()
        with DeferredSigint():  # a Ctrl-C between the two lines would leave the lock taken
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
            raise self._is_gone(ended=False) from None  # it reads no more, and is about to say so
        except BaseException:  # nobody knows how much of it has gone
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
        """Raises `PoreClosed` if it is."""
        try:
            word = end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            if end.fileno() < 0:  # another thread has just dropped it
                return
            word = b""
        raise self._is_gone(ended=word != FAREWELL)

    def _connect(self) -> socket.socket:
        with self._connecting:
            if self._end is not None:  # another thread was quicker
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
                if self._end is not end:  # else a Ctrl-C came when all was done
                    end.close()
                raise
            return end

    def _let_in(self, end: socket.socket) -> None:
        greeting, fds = parent_death.receive_fds(end, 1, 1)
        if greeting != GREETING:  # it is being closed
            raise ConnectionResetError
        if not fds:  # it came with one, which had no place here
            raise OSError(
                errno.EMFILE, f"no file descriptor is left for the pore {self._home.pore!r}"
            )
        came = parent_death.own(parent_death.Descriptor(fds[0]))
        try:
            if self._content is None:
                if self._size:
                    self._content = memoryview(map_range(came.fd, 0, self._size, MAP_SHARED))
                elif self._home.owner != self.pid:  # the owner, who tells himself something, has it
                    self._content = came
        finally:
            if self._content is not came:
                parent_death.close(came)
        self._was_let_in = True
        if (pidfd := parent_death.open_pidfd(self._home.owner)) is not None:
            self._owner = parent_death.own(parent_death.Descriptor(pidfd))
        self._end = parent_death.own(end)

    def _is_gone(self, ended: bool, let_in: bool = True) -> BaseException:
        if self._gone is None:  # or another thread has seen it first
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
        """Also in a finalizer. While another thread sends or connects, it does nothing. A file is
        closed with the connection, and comes with the next; memory stays mapped."""
        with (
            DeferredSigint(),
            ExitStack() as held,
        ):  # a Ctrl-C would leave a lock taken, or half of it open
            for lock in (self._turn, self._connecting):
                if not lock.acquire(blocking=False):
                    return
                held.callback(lock.release)
            self._drop()
            content = self._content
            if isinstance(content, parent_death.Descriptor):
                self._content = None
                parent_death.close(content)
