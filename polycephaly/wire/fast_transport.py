"""The express lane: small messages between hub and drone over a socket pair of their own.

A ZeroMQ message crosses two I/O threads on its way. On the 2-core machine of docs/performance.md an
echo through ROUTER and DEALER took 80 us, through a unix SEQPACKET pair 8, and
`multiprocessing.Pool`'s whole round trip 95. So what is small goes by the lane, and ZeroMQ carries
what the lane cannot: messages of any size, queued without bound and sent by threads of its own, so
that neither side ever blocks in a send.

Both carry the same messages (messages.py), and the receiver sees them in the order in which they
were sent:
* lane, then bulk: who reads a bulk message first reads the lane empty. What was sent by the lane
  before it is in the kernel's buffer by then.
* bulk, then lane: the hub sends by the lane only while no work that went by bulk is unanswered.
Results may pass each other, but for those of one slice: once a part of it went by bulk, so do the following ones.

The pair is made for one drone and handed to it by the zygote, so its other end needs no proof of
who it is."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct
from typing import Any

from .messages import Malformed

__all__ = ["FastTransport"]

LARGEST = 48 * 1024  # bytes of a packet; the kernel's default buffer holds four
_SIZES = Struct("<IB")  # bytes of the head, and number of frames


class FastTransport:
    """One end of it. `send` and `receive` never block."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self.fileno = end.fileno

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, frames: Sequence[bytes]) -> bool:
        """False where it must go by bulk: too large, too many frames, or the lane is full."""
        if len(frames) > 2 or sum(map(len, frames)) > LARGEST:
            return False
        packet = b"".join((_SIZES.pack(len(frames[0]), len(frames)), *frames))
        try:
            return self._end.send(packet) == len(packet)
        except OSError:  # full; or the other side is gone, which is told by others
            return False

    def receive(self) -> list[Any] | None:
        """The next message's frames; None where there is none now; an empty list once the other end
        is closed. Raises `Malformed` for a packet that is none of ours."""
        try:
            packet = self._end.recv(LARGEST + _SIZES.size)
        except BlockingIOError:
            return None
        except OSError:
            return []
        if not packet:
            if self._is_open():
                raise Malformed("an empty packet")
            return []
        if len(packet) < _SIZES.size:
            raise Malformed(f"a packet of {len(packet)} bytes")
        size, count = _SIZES.unpack_from(packet)
        body = _SIZES.size + size
        if body > len(packet) or count not in (1, 2) or (count == 1 and body < len(packet)):
            raise Malformed(
                f"a packet of {len(packet)} bytes that says {count} frames, the first of {size}"
            )
        head = packet[_SIZES.size : body]
        return [head] if count == 1 else [head, packet[body:]]

    def _is_open(self) -> bool:
        """Has the other end not been closed yet? An empty packet looks as its end does."""
        look = select.poll()
        look.register(self._end, select.POLLRDHUP)
        return not look.poll(0)

    def close(self) -> None:
        with suppress(OSError):
            self._end.close()
