"""The TCP connections of a server as the kernel sees them, to find peers that complete no message.

libzmq keeps the frames of a multipart message until the last one arrives, and limits neither their
number nor their sum. The kernel reports how many bytes were read from each connection (TCP_INFO),
and libzmq reports by which descriptor each message arrived. The bytes read since a connection's
last message are the most that libzmq can hold of an unfinished one. A regular peer sends no message
of more than `MAX_FRAME_BYTES` bytes. So if the connections together exceed `MAX_UNFINISHED_BYTES`
plus that much for each, an irregular peer is among them.

libzmq owns the descriptors and closes them in its own thread, so that a number may refer to another
file at any moment. Therefore a duplicate is shut down (`borrow` is for looking only), and only
while its peer address is that of the connection that was meant: while that one is open, no other
connection to the server's port can have the same peer address.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..engines.remote.messages import MAX_FRAME_BYTES

MAX_UNFINISHED_BYTES = 64 << 20  # of all connections together
# offset of tcpi_bytes_received (8 bytes, Linux 4.1 and later) in struct tcp_info
_BYTES_RECEIVED = 128


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


class _Tcp:
    def __init__(self, connection: socket.socket, number: int) -> None:
        self.number = number
        self.checks_to_shutdown = 0  # 0: not marked
        self.peer = connection.getpeername()
        self.silent_checks = 0  # checks since its last message
        self.read_until_message = _bytes_read(connection)  # at the last message
        self.unfinished_bytes = 0


class Accepted:
    """The accepted connections, by descriptor. Used in the server's thread."""

    def __init__(self) -> None:
        self.count = 0
        self._tcps: dict[int, _Tcp] = {}
        self._active_fds: set[int] = set()
        self._let_in_fds: set[int] = set()  # by which messages have arrived

    def __len__(self) -> int:
        return len(self._tcps)

    def add(self, fd: int) -> None:
        self.count += 1
        self._let_in_fds.discard(fd)  # noted late, for an earlier connection
        # The connection may have ended already.
        with suppress(OSError), borrow(fd) as connection:
            self._tcps[fd] = _Tcp(connection, self.count)

    def mark_for_shutdown(self, fd: int, max_number: int) -> None:
        """Have the check after the next one shut the connection by which a message arrived.

        The next check may follow at once. After it, libzmq's thread has time to send the reason.

        `max_number` is the number of connections accepted when the message's peer was let in. If
        the descriptor is another connection's by now, that connection has a higher number: the
        peer's own connection was open until then.
        """
        tcp = self._tcps.get(fd)
        if tcp is not None and tcp.number <= max_number and not tcp.checks_to_shutdown:
            tcp.checks_to_shutdown = 2

    def discard(self, fd: int) -> bool:
        """Forget a connection that has ended. Return False if its peer was never let in."""
        self._tcps.pop(fd, None)
        was_let_in = fd in self._let_in_fds
        self._let_in_fds.discard(fd)
        return was_let_in

    def record_message(self, fd: int) -> None:
        """Note that a message arrived by that descriptor."""
        self._active_fds.add(fd)
        self._let_in_fds.add(fd)

    def check(self, max_silence: float, interval: float) -> list[str]:
        """Shut connections that send no messages; return a line with peer and reason for each.

        Call this every `interval` seconds. Silence is counted in calls, so that a server that was
        stopped for a while does not shut all connections. Connections that are marked for shutdown
        are shut without a line.
        """
        shut = []
        for fd, tcp in list(self._tcps.items()):
            try:
                with borrow(fd) as connection:
                    is_same = connection.getpeername() == tcp.peer
                    bytes_read = _bytes_read(connection) if is_same else None
            except OSError:
                bytes_read = None
            if bytes_read is None:  # libzmq reports its end, or has
                del self._tcps[fd]
                continue
            tcp.silent_checks += 1
            if fd in self._active_fds:
                tcp.read_until_message, tcp.silent_checks = bytes_read, 0
            tcp.unfinished_bytes = bytes_read - tcp.read_until_message
            if tcp.checks_to_shutdown:
                tcp.checks_to_shutdown -= 1
                if not tcp.checks_to_shutdown:
                    self._shut(fd)
            elif tcp.silent_checks * interval > max_silence and self._shut(fd):
                shut.append(f"{tcp.peer[0]}: no message for {max_silence:g} s")
        self._active_fds.clear()
        remaining = sorted(self._tcps, key=lambda fd: self._tcps[fd].unfinished_bytes)
        total = sum(tcp.unfinished_bytes for tcp in self._tcps.values())
        while remaining and total > MAX_UNFINISHED_BYTES + MAX_FRAME_BYTES * len(remaining):
            fd = remaining.pop()
            tcp = self._tcps[fd]
            total -= tcp.unfinished_bytes
            if self._shut(fd):
                size = f"{tcp.unfinished_bytes:,} bytes"
                shut.append(f"{tcp.peer[0]}: {size} of an unfinished message")
        return shut

    def _shut(self, fd: int) -> bool:
        """Shut a connection. Return False if there is no descriptor for that now."""
        tcp = self._tcps[fd]
        try:
            with _duplicate(fd) as connection:
                if connection.getpeername() == tcp.peer:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                tcp.checks_to_shutdown = 1  # the next check tries again
                return False
        del self._tcps[fd]
        return True


def _duplicate(fd: int) -> socket.socket:
    """Return a socket on a duplicate of `fd`. Raise `OSError` if `fd` is closed or no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise


def _bytes_read(connection: socket.socket) -> int:
    """Return how many bytes were read from the socket. Raise `OSError`."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    (received,) = struct.unpack_from("Q", info, _BYTES_RECEIVED)
    (waiting,) = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
    return int(received - waiting)
