"""A dealer: this end's socket to a server, with what ZeroMQ tells of the connection. A client has
one, and a worker.

It belongs to one thread. Why the connection is lost, if it is, stands in `lost`; what might be
wrong with one that has not come about yet, in `trouble`. A connection that is lost stays so: nobody
knows what was done of what was sent."""

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
    lost = ""
    trouble = ""
    _ended = ""

    def __init__(self, card: Card) -> None:
        self._address = card.address
        self.welcomed = False  # the server has said hello
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
        """Never waits: there is room, or else libzmq has given the connection up, after a handshake
        that failed."""
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
        """The messages that have come; also what had come before the connection was lost."""
        self._look()
        while not self.lost and has_news(self.socket):
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            if frames[0] == PING:  # so the server knows that all before it was read
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
        """For whoever has waited so many seconds for the server's hello."""
        why = f": {self.trouble}" if self.trouble else ""
        return ConnectionError(f"nobody answered at {self._address} within {timeout:g} s{why}")

    def close(self) -> None:
        """Says good-bye, if anybody is there to hear it."""
        with suppress(zmq.ZMQError):
            self.socket.send_multipart([BYE], zmq.NOBLOCK)
        if self._peer is not None:
            reached.discard(self._peer)
        self._made.close()
