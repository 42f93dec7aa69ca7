"""Replace, in a forked process, the connections of the controller process by others.

The other side of a connection sees its end when the last process that has the socket closes the
socket, and a port is free when its last listener is gone. So the zygote, and with it each drone,
replaces these descriptors:

    stream and SEQPACKET sockets, except unix  ->  one whose other end is closed
      ones of which neither end has a name
    datagram sockets of a network              ->  a new one, connected to the same peer, if any
    pipes to the standard streams of programs  ->  one whose other end is closed
      that the controller has started
    epoll descriptors (shared by a fork)       ->  a new one

The descriptor numbers stay in use, so code in a drone that closes its object, or a finalizer,
closes no file of another owner. A library that uses its connection finds that the other side has
closed it. All other descriptors stay: files, unix datagram sockets, and those made to cross a fork
(unnamed socket pairs and pipes, such as this package's own and those of `multiprocessing`). The
descriptors 0 to 2, and those in a pool's inherited arguments (drone/child.py), always stay.
"""

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

from .procfs import children_of

_NETWORK_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_STREAM_TYPES = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)


class InheritanceSearch(Pickler):
    """A pickler that writes nothing and records what must be inherited by a fork.

    `found` holds the descriptors of the open files, sockets and connections in the pickled object.
    `must_inherit` is true if the object contains a lock, queue or similar of `multiprocessing`
    whose pickling fails because the object has to be inherited.
    """

    def __init__(self) -> None:
        super().__init__(self, 5, buffer_callback=lambda _: False)
        self.found: set[int] = set()
        self.must_inherit = False
        connection: Any = sys.modules.get("multiprocessing.connection")
        self._kinds: tuple[Any, ...] = socket.socket, io.IOBase
        if connection is not None:
            self._kinds += (connection.Connection,)

    def write(self, data: object) -> None:
        pass

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, self._kinds):
            with suppress(OSError, ValueError):  # closed, or without a file
                self.found.add(obj.fileno())
                return int, ()
        if any(base.__module__.startswith("multiprocessing.") for base in type(obj).__mro__):
            try:
                return obj.__reduce_ex__(5)
            except RuntimeError:  # the rest of the object is still searched
                self.must_inherit = True
                return int, ()
        return NotImplemented


def search_inherited(objects: Iterable[object]) -> InheritanceSearch:
    """Find the descriptors, and any locks or queues, in `objects` that only a fork can inherit."""
    search = InheritanceSearch()
    for each in objects:
        search.clear_memo()
        with suppress(Exception):  # the code that needs the pickle reports the error
            search.dump(each)
    return search


def replace_connections(owner: int, inherited: Iterable[object]) -> None:
    """Replace the connections of the process `owner`, of which this process is a fork.

    Called once, by a zygote that is not bare, before the first drone. The process must be
    single-threaded. Descriptors found in `inherited` stay open.
    """
    kept = {0, 1, 2} | search_inherited(inherited).found
    program_pipes = _pipes_of_programs(owner)
    ended, closed = socket.socketpair()
    with ended:
        closed.close()
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd not in kept and fd != ended.fileno():
                with suppress(OSError):  # the descriptor of the listing itself
                    _replace(fd, ended, program_pipes)


def _replace(fd: int, ended: socket.socket, program_pipes: set[tuple[str, int]]) -> None:
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind == stat.S_IFSOCK:
        # Not `socket.socket`: its Python part takes four times as long.
        end = socket.SocketType(fileno=fd)
        try:
            if end.type == socket.SOCK_DGRAM and end.family in _NETWORK_FAMILIES:
                with socket.socket(end.family, end.type, end.proto) as fresh:
                    with suppress(OSError):  # not connected
                        fresh.connect(end.getpeername())
                    os.dup2(fresh.fileno(), fd, inheritable=False)
            elif end.type in _STREAM_TYPES and (end.family != socket.AF_UNIX or _has_name(end)):
                os.dup2(ended.fileno(), fd, inheritable=False)
        finally:
            end.detach()
    elif kind == stat.S_IFIFO and program_pipes:
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        if (os.readlink(f"/proc/self/fd/{fd}"), mode) in program_pipes:
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
    except OSError:  # not connected
        return False


def _pipes_of_programs(owner: int) -> set[tuple[str, int]]:
    """Return the standard streams of children of `owner`, pipes or not, as /proc names them.

    Each stream comes with the access mode of a pipe's other end: `O_WRONLY` for a child's standard
    input, `O_RDONLY` for a child's two outputs.
    """
    found: set[tuple[str, int]] = set()
    for child in children_of(owner):
        for fd, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
            with suppress(OSError):
                found.add((os.readlink(f"/proc/{child}/fd/{fd}"), mode))
    return found
