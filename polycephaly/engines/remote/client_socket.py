"""The socket of a client, or of a joined host, to a server, with the state of its connection.

A `ClientSocket` belongs to one thread. If the connection is lost, `lost` says why, and the socket
stays unusable, because the fate of the tasks that were sent is unknown. While a connection has not
yet come about, `trouble` says why that may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...wire.endpoint import has_news, new_context
from .forks import Peer, peer_of, reached
from .keys import Card, wants_ipv6
from .messages import BYE, LARGEST, PART, PIECE, PING

__all__ = ["ClientSocket"]

HEARTBEAT_MS = 3000
HEARTBEAT_TIMEOUT_MS = 12000

_EVENTS = (
    zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)  # fmt: skip


class ClientSocket:
    """A ZeroMQ DEALER socket that is encrypted with CURVE, and the monitor of its connection."""

    lost = ""
    trouble = ""
    _ended = ""

    def __init__(self, card: Card) -> None:
        self._address = card.address
        self.welcomed = False  # the server's HELLO was received
        self._peer: Peer | None = None
        with ExitStack() as undo:
            context = new_context()
            undo.callback(context.term)
            self.socket = context.socket(zmq.DEALER)
            undo.callback(self.socket.close)
            for option, value in (
                (zmq.LINGER, 500), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.IPV6, wants_ipv6(card.address)),
                (zmq.CURVE_SERVERKEY, card.server.encode()), (zmq.CURVE_PUBLICKEY, card.public.encode()),
                (zmq.CURVE_SECRETKEY, card.secret.encode()), (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
                (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS), (zmq.MAXMSGSIZE, LARGEST),
            ):  # fmt: skip
                self.socket.setsockopt(option, value)
            self.monitor = self.socket.get_monitor_socket(_EVENTS)
            undo.callback(self.monitor.close)
            undo.callback(self.socket.disable_monitor)
            self.socket.connect(card.address)
            self._made = undo.pop_all()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message without blocking.

        The high-water mark is unlimited, so libzmq refuses a message only after it has given the
        connection up, because the handshake failed.
        """
        try:
            if sum(map(len, frames)) > PIECE:
                *parts, last = frames
                for part in parts:
                    self.socket.send_multipart([PART, part], zmq.NOBLOCK)
                frames = [last]
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._ended = self._ended or "it was given up"

    def received(self) -> Iterator[list[bytes]]:
        """Yield the messages that have arrived, also those from before a loss of the connection."""
        self._look()
        while not self.lost and has_news(self.socket):
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            if frames[0] == PING:  # tells the server that all earlier messages were read
                self.send(frames)
            else:
                yield frames
        self.lost = self.lost or self._ended

    def _look(self) -> None:
        while has_news(self.monitor):
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            kind = event["event"]
            if kind == zmq.EVENT_CONNECTED:
                self._peer = peer_of(event["value"])
                reached.add(self._peer)
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.lost = "it does not know our key (was it taken off the allow-list?)"
            elif kind in (
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            ):
                self.trouble = (
                    "somebody is there who has not the server's key, or is no server of ours"
                )
                if not self.welcomed:
                    self.lost = self.trouble
            elif kind == zmq.EVENT_DISCONNECTED and self.welcomed:
                self._ended = "the server has ended, or cannot be reached"

    def no_answer(self, timeout: float) -> ConnectionError:
        """Return the error for a caller that waited `timeout` seconds for the server's HELLO."""
        why = f": {self.trouble}" if self.trouble else ""
        return ConnectionError(f"nobody answered at {self._address} within {timeout:g} s{why}")

    def close(self) -> None:
        """Send BYE if the connection is up, and close the socket."""
        with suppress(zmq.ZMQError):
            self.socket.send_multipart([BYE], zmq.NOBLOCK)
        if self._peer is not None:
            reached.discard(self._peer)
        self._made.close()
