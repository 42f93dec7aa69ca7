"""The fast transport: small messages between reactor and drone over a Unix socket pair.

ZeroMQ carries the messages that the fast transport cannot: ZeroMQ messages may have any size, are
queued without bound and are sent by ZeroMQ's own threads, so that neither side ever blocks in a
send. Both transports carry the same messages (messages.py), and the receiver gets them in the order
in which they were sent:

* Fast, then bulk: a receiver that reads a bulk message first empties the fast transport. Messages
  sent earlier by the fast transport are in the kernel's buffer by then.
* Bulk, then fast: the reactor uses the fast transport only while no task sent by bulk is
  unanswered.

Results may overtake each other, except those of one slice: after one part of it went by bulk, the
following parts do so too.

See docs/decisions/0002-fast-transport.md.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct
from typing import Any

from ..errors import Malformed
from ..runtime.tuning import tuning

# Of a packet's frames; the kernel's default buffer holds four such packets.
MAX_PACKET_BYTES = 48 * 1024
_PACKET_HEADER = Struct("<IB")  # bytes of the head, and number of frames


class FastTransport:
    """One end of the fast transport. Only `send_soon` blocks."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self.fileno = end.fileno
        self._input = select.poll()
        self._input.register(end, select.POLLIN)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message; return False if it must go by bulk instead.

        That is so if the message is too large, has too many frames, or the socket is full.
        """
        if not fits(frames):
            return False
        packet = b"".join((_PACKET_HEADER.pack(len(frames[0]), len(frames)), *frames))
        try:
            return self._socket.send(packet) == len(packet)
        # The socket is full, or the other end is gone, which is reported elsewhere.
        except OSError:
            return False

    def send_soon(self, frames: Sequence[bytes]) -> bool:
        """Send as `send` does, but wait for room if the socket is full."""
        if not fits(frames):
            return False
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        poller.poll(tuning.room_wait_seconds * 1000)
        return self.send(frames)

    def has_input(self) -> bool:
        """Return whether `receive` has something to return, a message or the end. A `receive` that
        has nothing takes five times as long, because the socket raises an error.
        """
        return bool(self._input.poll(0))

    def receive(self) -> list[Any] | None:
        """Return the frames of the next message.

        Returns None if no message is there, and an empty list if the other end is closed. Raises
        `Malformed` if the packet is not a valid message.
        """
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES + _PACKET_HEADER.size)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            # Linux tells once that the other end was closed with messages unread. The messages that
            # it had sent come next.
            return self.receive()
        except OSError:
            return []
        if not packet:
            if self._is_open():
                raise Malformed("an empty packet")
            return []
        if len(packet) < _PACKET_HEADER.size:
            raise Malformed(f"a packet of {len(packet)} bytes")
        size, count = _PACKET_HEADER.unpack_from(packet)
        body = _PACKET_HEADER.size + size
        if body > len(packet) or count not in (1, 2) or (count == 1 and body < len(packet)):
            raise Malformed(
                f"a packet of {len(packet)} bytes whose header announces {count} frames, the first "
                f"of {size} bytes"
            )
        head = packet[_PACKET_HEADER.size : body]
        return [head] if count == 1 else [head, packet[body:]]

    def _is_open(self) -> bool:
        """Return whether the other end is still open.

        Needed because an empty packet looks like the end of the stream.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLRDHUP)
        return not poller.poll(0)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def fits(frames: Sequence[bytes]) -> bool:
    """Return whether the message can go by the fast transport, if there is room."""
    return len(frames) <= 2 and sum(map(len, frames)) <= MAX_PACKET_BYTES
