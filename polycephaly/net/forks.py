"""TCP connections and forks: what a child has inherited of them is closed there at once.

A connection ends, for the other side, when the last process that has it closes it. A zygote or a drone that had it too
would keep a closed server's port, and hide from it that a client has left.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

__all__ = ["listening", "reached"]

listening: set[int] = set()
"""Ports on which this image listens."""
reached: set[tuple[str, int]] = set()
"""Hosts and ports to which it is connected."""


def _close_in_child() -> None:
    if listening or reached:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode) and _is_ours(int(name)):
                    os.close(int(name))
    listening.clear()
    reached.clear()


def _is_ours(fd: int) -> bool:
    connection = socket.socket(fileno=fd)
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if connection.getsockname()[1] in listening:
            return True
        with suppress(OSError):  # it is not connected
            host, port = connection.getpeername()[:2]
            return (host.removeprefix("::ffff:"), port) in reached
        return False
    finally:
        connection.detach()


os.register_at_fork(after_in_child=_close_in_child)
