"""Messages from the controller to a drone, and a bell back, over a Unix socket pair.

    whole   <bytes of the head, 1 or 2>   one or two frames that fit in a packet
    begin   <8, BEGIN> bytes in all       a longer message: its frames come in pieces
    more    <bytes, MORE> piece

All that one end sends arrives at the other in that order, or, after the end of its process, up to
where it came. What was cut off there is no message.

Nothing blocks: `send` keeps what the socket does not take, and `send_rest` goes on when there is
room. An error of `send` that is no lack of room or memory is final: what was not sent never is.

See docs/decisions/0002-one-ring-home.md.
"""

from __future__ import annotations

import errno
import select
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from struct import Struct
from time import sleep

from ..errors import Malformed

MAX_PACKET_BYTES = 48 * 1024  # of a packet's frames; fewer where the socket's buffer is small
BUFFER_BYTES = 1 << 20  # that are asked for; the system's limit may be less (`net.core.wmem_max`)
MEMORY_RETRY_SECONDS = 0.002  # after the kernel had no memory for a packet
_HEADER = Struct("<IB")  # bytes of the head, of the total or of the piece; kind
_HEADER_BYTES = _HEADER.size
_TOTAL = Struct("<Q")
_COUNT = Struct("<I")
_BELL = b"!"
_BEGIN, _MORE = 3, 4  # kinds; 1 and 2 are whole messages of so many frames
_BUFFER = socket.SOL_SOCKET, socket.SO_SNDBUF
# The kernel has no memory for a packet, whatever the descriptor tells.
_NO_MEMORY = (errno.ENOBUFS, errno.ENOMEM)


class MessageSocket:
    """One end of the pair. One thread at a time sends, and one receives."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self.fileno = end.fileno
        self._input = select.poll()
        self._input.register(end, select.POLLIN)
        self._max_bytes = min(MAX_PACKET_BYTES, end.getsockopt(*_BUFFER) // 2)
        self._packet: bytes | None = None  # the next one, if it could not be sent at once
        self._unsent: deque[Iterator[bytes]] = deque()  # the packets behind it
        self.lacks_memory = False  # the kernel does, for `_packet`
        self._begun: bytearray | None = None  # a message of which not all pieces have come
        self._total = 0
        self.held: list[bytes] | None = None
        """A message that came in the middle of that one: the descriptor tells nothing of it."""

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in ends:
            each.setsockopt(*_BUFFER, BUFFER_BYTES)
        return ends

    # -- sending -----------------------------------------------------------------------------------

    def send(self, frames: Sequence[bytes], most: int = sys.maxsize) -> bool:
        """Send a message, behind those that are not sent yet, in at most so many packets. Return
        False if not all of it was: call `send_rest` when there is room. Raises `OSError`, after
        which the end is of no use.
        """
        count = len(frames)
        if count <= 2 and sum(map(len, frames)) <= self._max_bytes:
            packet = b"".join((_HEADER.pack(len(frames[0]), count), *frames))
            if self._packet is None and not self._unsent:
                if self._send_packet(packet):
                    return True
                self._packet = packet
                return False
            self._unsent.append(iter([packet]))
        else:
            self._unsent.append(_pieces(frames, self._max_bytes))
        return self.send_rest(most)

    def send_rest(self, most: int = sys.maxsize) -> bool:
        """Send what is not sent yet, as far as there is room, in at most so many packets. Return
        whether that was all. Raises `OSError` as `send`.
        """
        for _ in range(most):
            if self._packet is None:
                self._packet = self._next_packet()
                if self._packet is None:
                    return True
            if not self._send_packet(self._packet):
                return False
            self._packet = None
        return False

    def _next_packet(self) -> bytes | None:
        while self._unsent:
            packet = next(self._unsent[0], None)
            if packet is not None:
                return packet
            self._unsent.popleft()
        return None

    def _send_packet(self, packet: bytes) -> bool:
        try:
            sent = self._socket.send(packet)
        except BlockingIOError:
            self.lacks_memory = False
            return False
        except OSError as error:
            if error.errno not in _NO_MEMORY:
                self._packet = None
                self._unsent.clear()
                raise
            self.lacks_memory = True
            return False
        self.lacks_memory = sent != len(packet)  # a packet is sent as a whole, or not at all
        return not self.lacks_memory

    # -- the bell, in the other direction ----------------------------------------------------------

    def ring(self) -> None:
        """Have the other end look at the ring (ring.py). Waits while the kernel has no memory.
        Raises `OSError`.
        """
        while True:
            try:
                self._socket.send(_BELL)
                return
            except BlockingIOError:  # there is no room: it has rung often enough
                return
            except OSError as error:
                if error.errno not in _NO_MEMORY:
                    raise
                sleep(MEMORY_RETRY_SECONDS)

    def hear_bell(self) -> bool:
        """Take one ring of the bell; return False if the other end is closed. Raises `Malformed` if
        that was none.
        """
        try:
            packet = self._socket.recv(len(_BELL) + 1)
        except (BlockingIOError, ConnectionResetError):
            return True  # Linux tells once of messages that the other end has not read
        except OSError as error:
            return error.errno in _NO_MEMORY
        if packet == _BELL:
            return True
        if not packet and not self.is_open():
            return False
        raise Malformed(f"a packet that begins with {packet!r} in place of the bell")

    # -- receiving ---------------------------------------------------------------------------------

    def has_input(self) -> bool:
        """Return whether `receive` has something to do, for a message or the end. A `receive` that
        has nothing takes five times as long, because the socket raises an error.
        """
        return self.held is not None or bool(self._input.poll(0))

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message.

        Returns None if no message is there, or not all of it, and an empty list if the other end is
        closed. Raises `Malformed` if a packet is not valid there.
        """
        if self.held is not None:
            held, self.held = self.held, None
            return held
        while True:
            try:
                packet = self._socket.recv(MAX_PACKET_BYTES + _HEADER_BYTES)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # Linux tells once that the other end was closed with messages unread. The messages
                # that it had sent come next.
                continue
            except OSError as error:
                if error.errno in _NO_MEMORY:
                    return None
                return []
            if not packet:
                if self.is_open():
                    raise Malformed("an empty packet")
                return []
            frames = self._take(packet)
            if frames is not None:
                return frames

    def _take(self, packet: bytes) -> list[bytes] | None:
        """Return the frames of the message that is complete with `packet`, if one is."""
        length = len(packet)
        if length < _HEADER_BYTES:
            raise Malformed(f"a packet of {length} bytes")
        size, kind = _HEADER.unpack_from(packet)
        body = _HEADER_BYTES + size
        if kind == 2 and body <= length:
            return self._take_whole([packet[_HEADER_BYTES:body], packet[body:]])
        head = packet[_HEADER_BYTES:]
        if body != length or not 1 <= kind <= _MORE:
            raise Malformed(
                f"a packet of {length} bytes whose header announces kind {kind} and {size} bytes"
            )
        if kind == 1:
            return self._take_whole([head])
        if kind == _BEGIN:
            was_begun, self._begun = self._begun is not None, None
            if size != _TOTAL.size:
                raise Malformed(f"{size} bytes in place of the length of a message")
            self._begun, self._total = bytearray(), _TOTAL.unpack(head)[0]
            if was_begun:
                raise Malformed("a message begins in the middle of another")
            return None
        if self._begun is None:
            raise Malformed("a piece of no message")
        self._begun += head
        if len(self._begun) < self._total:
            return None
        whole, self._begun = self._begun, None
        return _frames(whole, self._total)

    def _take_whole(self, frames: list[bytes]) -> list[bytes]:
        """Return the frames of a message that has come in one packet."""
        if self._begun is None:
            return frames
        self._begun, self.held = None, frames
        raise Malformed("a message in the middle of another, of which pieces are missing")

    def is_open(self) -> bool:
        """Return whether the other end is still open.

        Needed because an empty packet looks like the end of the stream.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLRDHUP)
        return not poller.poll(0)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()


def _pieces(frames: Sequence[bytes], size: int) -> Iterator[bytes]:
    """Yield the packets of a longer message."""
    sizes = [_COUNT.pack(len(frames)), *(_TOTAL.pack(len(each)) for each in frames)]
    whole = memoryview(b"".join([*sizes, *frames]))
    yield _HEADER.pack(_TOTAL.size, _BEGIN) + _TOTAL.pack(len(whole))
    for start in range(0, len(whole), size):
        piece = whole[start : start + size]
        yield b"".join((_HEADER.pack(len(piece), _MORE), piece))


def _frames(whole: bytearray, total: int) -> list[bytes]:
    """Return the frames of a message that came in pieces."""
    if len(whole) != total or total < _COUNT.size:
        raise Malformed(f"a message of {len(whole)} bytes that should have {total}")
    [count] = _COUNT.unpack_from(whole)
    at = _COUNT.size + count * _TOTAL.size
    if at > total:
        raise Malformed(f"a message of {total} bytes that announces {count} frames")
    view = memoryview(whole)
    sizes = [size for (size,) in _TOTAL.iter_unpack(view[_COUNT.size : at])]
    if not sizes or sum(sizes) != total - at:
        raise Malformed(f"a message of {total} bytes whose frames have {sum(sizes)}")
    frames = []
    for size in sizes:
        frames.append(bytes(view[at : at + size]))
        at += size
    return frames
