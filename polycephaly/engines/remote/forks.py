"""TCP connections and forks: each forked child closes its copies of the TCP sockets at once.

A connection ends, for the other side, when the last process that holds a copy closes it. A zygote
or drone with a copy would keep the port of a closed server, and would hide from the server that a
client has left.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

Endpoints = tuple[tuple[str, int], tuple[str, int]]

listening_ports: set[int] = set()
"""Ports on which this process listens."""
connections: set[Endpoints | None] = set()
"""The connections of this process to servers."""


@contextmanager
def borrow(fd: int) -> Iterator[socket.socket]:
    """Yield a socket on `fd` itself, which takes no descriptor and leaves `fd` open. Raises
    `OSError` if `fd` is closed or no socket.
    """
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def endpoints_of(fd: int) -> Endpoints | None:
    """Return the numeric addresses of both ends of a TCP connection, or None if it has ended."""
    with suppress(OSError), borrow(fd) as connection:
        return connection.getsockname()[:2], connection.getpeername()[:2]
    return None


def _close_in_child() -> None:
    if listening_ports or connections:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode) and _is_ours(int(name)):
                    os.close(int(name))
    listening_ports.clear()
    connections.clear()


def _is_ours(fd: int) -> bool:
    with borrow(fd) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if connection.getsockname()[1] in listening_ports:
            return True
    endpoints = endpoints_of(fd)
    return endpoints is not None and endpoints in connections


os.register_at_fork(after_in_child=_close_in_child)
