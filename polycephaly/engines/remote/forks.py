"""TCP connections and forks: each forked child closes its copies of the TCP sockets at once.

A connection ends, for the other side, when the last process that holds a copy closes it. A zygote
or drone with a copy would keep the port of a closed server, and would hide from the server that a
client has left.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

Peer = tuple[str, int] | None

listening_ports: set[int] = set()
"""Ports on which this process listens."""
connected_peers: set[Peer] = set()
"""Hosts and ports to which this process is connected."""


def peer_of(fd: int) -> Peer:
    """Return the numeric address that a socket is connected to, or None if it is not connected."""
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        host, port = connection.getpeername()[:2]
        return host, port
    except OSError:
        return None
    finally:
        connection.detach()


def _close_in_child() -> None:
    if listening_ports or connected_peers:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode) and _is_ours(int(name)):
                    os.close(int(name))
    listening_ports.clear()
    connected_peers.clear()


def _is_ours(fd: int) -> bool:
    connection = socket.socket(fileno=fd)
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if connection.getsockname()[1] in listening_ports:
            return True
    finally:
        connection.detach()
    peer = peer_of(fd)
    return peer is not None and peer in connected_peers


os.register_at_fork(after_in_child=_close_in_child)
