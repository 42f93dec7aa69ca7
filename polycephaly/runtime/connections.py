"""Connections of the main image, which stay behind when it is forked.

A connection ends, for its other side, when the last process that has its socket closes it, and a
port is free when the last listener has gone. So the zygote, and with it each drone, keeps none of
these:

    stream sockets of a network; named unix ones (listening, or connected)  ──> one whose other end is closed
    datagram sockets of a network                                           ──> a new one of the same kind
    pipes to the standard streams of programs that were started             ──> one whose other end is closed
    epoll descriptors, which all processes would share                      ──> a new one

The numbers stay taken, so code in a drone that closes its object, or a finalizer, closes nothing of
anybody else's; and a library that uses its connection is told that the other side has closed it.
What was made to cross a fork does: unnamed pairs of sockets and pipes, as `multiprocessing` makes
them; and what is among the initargs of a pool."""

from __future__ import annotations

import fcntl
import io
import os
import select
import socket
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from pickle import Pickler
from typing import Any

__all__ = ["Search", "leave_connections"]

_NETWORK = (socket.AF_INET, socket.AF_INET6)
_STREAMS = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)


class Search(Pickler):
    """Pickles to nowhere, and notes the descriptors (`found`) of open files, sockets and
    connections that it meets, and whether it has met a lock, queue or the like of
    `multiprocessing`, which says that it has to be inherited."""

    def __init__(self) -> None:
        super().__init__(self, 5, buffer_callback=lambda _: False)
        self.found: set[int] = set()
        self.inherits = False
        connection: Any = sys.modules.get("multiprocessing.connection")
        self._kinds = (
            socket.socket,
            io.IOBase,
            *([connection.Connection] if connection is not None else ()),
        )

    def write(self, piece: object) -> None:
        pass

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, self._kinds):
            with suppress(OSError, ValueError):  # closed, or of no file
                self.found.add(obj.fileno())
                return int, ()
        if any(base.__module__.startswith("multiprocessing.") for base in type(obj).__mro__):
            try:
                return obj.__reduce_ex__(5)
            except RuntimeError:  # what else is beside it is still looked at
                self.inherits = True
                return int, ()
        return NotImplemented


def leave_connections(owner: int, given: Iterable[object]) -> None:
    """In a fork of the process `owner`, single-threaded. What is among `given` stays."""
    stays = {0, 1, 2}
    for each in given:
        search = Search()
        with suppress(Exception):  # whoever needs it pickled will say so
            search.dump(each)
        stays |= search.found
    programs = _streams_of_programs(owner)
    ended, closed = socket.socketpair()
    with ended:
        closed.close()
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in stays and fd != ended.fileno():
                with suppress(OSError):  # the listing's own
                    _leave(fd, ended, programs)


def _leave(fd: int, ended: socket.socket, programs: set[tuple[str, int]]) -> None:
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind == stat.S_IFSOCK:
        end = socket.SocketType(
            fileno=fd
        )  # without the Python part of `socket.socket`, which takes four times as long
        try:
            if end.type == socket.SOCK_DGRAM and end.family in _NETWORK:
                with socket.socket(end.family, end.type, end.proto) as fresh:
                    with suppress(OSError):  # it is not connected
                        fresh.connect(end.getpeername())
                    os.dup2(fresh.fileno(), fd, inheritable=False)
            elif end.type in _STREAMS and (end.family != socket.AF_UNIX or _has_name(end)):
                os.dup2(ended.fileno(), fd, inheritable=False)
        finally:
            end.detach()
    elif kind == stat.S_IFIFO and programs:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        if (os.readlink(f"/proc/self/fd/{fd}"), mode) in programs:
            ends = os.pipe()
            os.dup2(ends[mode != os.O_RDONLY], fd, inheritable=False)
            for each in ends:
                os.close(each)
    elif not kind and os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventpoll]":
        with select.epoll() as epoll:
            os.dup2(epoll.fileno(), fd, inheritable=False)


def _has_name(end: socket.SocketType) -> bool:
    if end.getsockname():
        return True
    try:
        return bool(end.getpeername())
    except OSError:  # it is not connected
        return False


def _streams_of_programs(owner: int) -> set[tuple[str, int]]:
    """Pipes, and in which way the owner of the other end uses them: as the standard streams of its
    children."""
    found: set[tuple[str, int]] = set()
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{owner}/task"):
            with suppress(OSError), open(f"/proc/{owner}/task/{thread}/children") as listed:
                for child in listed.read().split():
                    for fd, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
                        with suppress(OSError):
                            found.add((os.readlink(f"/proc/{child}/fd/{fd}"), mode))
    return found
