"""The TCP connections of a server as the kernel sees them, to find peers that complete no message.

libzmq keeps the frames of a multipart message until the last one arrives, and limits neither their
number nor their sum. The kernel reports how many bytes were read from each connection (TCP_INFO),
and libzmq reports by which descriptor each message arrived. The bytes read since a connection's
last message are the most that libzmq can hold of an unfinished one. A regular peer sends no message
of more than `LARGEST` bytes. So if the connections together exceed `HELD` plus that much for each,
an irregular peer is among them.

libzmq owns the descriptors and closes them in its own thread, so that a number may refer to another
file at any moment. Therefore a duplicate is shut down, and only while its peer address is that of
the connection that was meant: while that one is open, no other connection to the server's port can
have the same peer address.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress

from ..engines.remote.messages import LARGEST

__all__ = ["Accepted"]

HELD = 64 << 20  # bytes of unfinished messages of all connections together
# offset of tcpi_bytes_received (8 bytes, Linux 4.1 and later) in struct tcp_info
_BYTES_RECEIVED = 128


class _Tcp:
    def __init__(self, end: socket.socket, number: int) -> None:
        self.number = number
        self.condemned = False
        self.peer = end.getpeername()
        self.silent = 0  # looks since its last message
        self.taken = _taken(end)
        self.unfinished = 0


class Accepted:
    """The accepted connections, by descriptor. Used in the server's thread."""

    def __init__(self) -> None:
        self.count = 0
        self._tcps: dict[int, _Tcp] = {}
        self._heard: set[int] = set()

    def __len__(self) -> int:
        return len(self._tcps)

    def add(self, fd: int) -> None:
        self.count += 1
        with suppress(OSError), _duplicate(fd) as end:  # the connection may have ended already
            self._tcps[fd] = _Tcp(end, self.count)

    def condemn(self, fd: int, known: int) -> None:
        """Have the next look shut the connection by which a message arrived.

        `known` is the number of connections accepted when the message's peer was let in. If the
        descriptor is another connection's by now, that connection has a higher number: the peer's
        own connection was open until then.
        """
        tcp = self._tcps.get(fd)
        if tcp is not None and tcp.number <= known:
            tcp.condemned = True

    def discard(self, fd: int) -> None:
        self._tcps.pop(fd, None)

    def hear(self, fd: int) -> None:
        """Note that a message arrived by that descriptor."""
        self._heard.add(fd)

    def look(self, silence: float, every: float) -> list[str]:
        """Shut connections that send no messages; return a line with peer and reason for each.

        Call this every `every` seconds. Silence is counted in calls, so that a server that was
        stopped for a while does not shut all connections. Condemned connections are shut without a
        line.
        """
        shut = []
        for fd, tcp in list(self._tcps.items()):
            try:
                with _duplicate(fd) as end:
                    taken = _taken(end) if end.getpeername() == tcp.peer else None
            except OSError:
                taken = None
            if taken is None:  # libzmq reports its end, or has
                del self._tcps[fd]
                continue
            tcp.silent += 1
            if fd in self._heard:
                tcp.taken, tcp.silent = taken, 0
            tcp.unfinished = taken - tcp.taken
            if tcp.condemned:
                self._shut(fd, "")
            elif tcp.silent * every > silence:
                shut.append(self._shut(fd, f"it has sent no message for {silence:g} s"))
        self._heard.clear()
        left = sorted(self._tcps, key=lambda fd: self._tcps[fd].unfinished)
        held = sum(tcp.unfinished for tcp in self._tcps.values())
        while left and held > HELD + LARGEST * len(left):
            fd = left.pop()
            held -= self._tcps[fd].unfinished
            shut.append(
                self._shut(
                    fd, f"{self._tcps[fd].unfinished:,} bytes of its message came, and no end of it"
                )
            )
        return shut

    def _shut(self, fd: int, why: str) -> str:
        tcp = self._tcps.pop(fd)
        with suppress(OSError), _duplicate(fd) as end:
            if end.getpeername() == tcp.peer:
                end.shutdown(socket.SHUT_RDWR)
        return f"{tcp.peer[0]}: {why}"


def _duplicate(fd: int) -> socket.socket:
    """Return a socket on a duplicate of `fd`. Raise `OSError` if `fd` is closed or no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise


def _taken(end: socket.socket) -> int:
    """Return how many bytes were read from the socket. Raise `OSError`."""
    told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    (received,) = struct.unpack_from("Q", told, _BYTES_RECEIVED)
    (waiting,) = struct.unpack("i", fcntl.ioctl(end, termios.FIONREAD, bytes(4)))
    return int(received - waiting)
