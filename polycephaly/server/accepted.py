"""The TCP connections of a server, as the kernel sees them: who has sent much that makes no
message.

libzmq keeps the frames of a multipart message until the last one has come, and bounds neither their
number nor their sum. The kernel tells how many bytes were taken from each connection (TCP_INFO),
and libzmq tells of each message by which descriptor it came. What was taken since a connection's
last message is what libzmq may be holding of it. A peer of ours sends no message of more than
`LARGEST` bytes, so a sum over `HELD` and that for each connection is not theirs.

Descriptors are libzmq's, which closes them in its own thread, so that a number may stand for
another file at any moment. What is shut down is therefore a duplicate, and only while its two
addresses are those of the connection that was meant: these can be no other's while that one is
open."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from contextlib import suppress

from ..engines.remote.messages import LARGEST

__all__ = ["Accepted"]

HELD = 64 << 20  # bytes of unfinished messages, all connections together
_BYTES_RECEIVED = (
    128  # offset of tcpi_bytes_received (8 bytes, Linux 4.1 and later) in struct tcp_info
)


class _Tcp:
    def __init__(self, end: socket.socket, number: int) -> None:
        self.number = number
        self.condemned = False
        self.peer = end.getpeername()
        self.silent = 0  # looks
        self.taken = _taken(end)
        self.unfinished = 0


class Accepted:
    def __init__(self) -> None:
        self.count = 0
        self._tcps: dict[int, _Tcp] = {}
        self._heard: set[int] = set()

    def __len__(self) -> int:
        return len(self._tcps)

    def add(self, fd: int) -> None:
        self.count += 1
        with suppress(OSError), _duplicate(fd) as end:  # it may have ended already
            self._tcps[fd] = _Tcp(end, self.count)

    def condemn(self, fd: int, known: int) -> None:
        """Have the next look shut the connection by which a message came, of a peer that was let in
        when `known` connections had been accepted. If its descriptor is another connection's by
        now, that one was accepted later: after the peer had been let in, because its own was open
        until then."""
        tcp = self._tcps.get(fd)
        if tcp is not None and tcp.number <= known:
            tcp.condemned = True

    def discard(self, fd: int) -> None:
        self._tcps.pop(fd, None)

    def hear(self, fd: int) -> None:
        """A message has come by that descriptor."""
        self._heard.add(fd)

    def look(self, silence: float, every: float) -> list[str]:
        """Shut connections that send no messages; return of each who it was, and why. To be called
        `every` so many seconds; `silence` is counted in these, or a server that stood still would
        shut all."""
        shut = []
        for fd, tcp in list(self._tcps.items()):
            try:
                with _duplicate(fd) as end:
                    taken = _taken(end) if end.getpeername() == tcp.peer else None
            except OSError:
                taken = None
            if taken is None:  # its end will be told, or has been
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
    """Raises `OSError` if it is closed, or no socket any more."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise


def _taken(end: socket.socket) -> int:
    """Bytes that were read from it. Raises `OSError`."""
    told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    (received,) = struct.unpack_from("Q", told, _BYTES_RECEIVED)
    (waiting,) = struct.unpack("i", fcntl.ioctl(end, termios.FIONREAD, bytes(4)))
    return int(received - waiting)
