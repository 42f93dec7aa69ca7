"""The socket of a client, or of a joined host, to a server, with the state of its connection.

A `ClientSocket` is used by one thread at a time. If the connection is lost, `loss_reason` says why,
and the socket stays unusable, because the fate of the tasks that were sent is unknown. While a
connection has not yet come about, `handshake_error` says why that may be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...wire.endpoint import has_input, new_context
from .forks import Endpoints, connections, endpoints_of
from .keys import Card, wants_ipv6
from .messages import BYE, CHUNK_BYTES, MAX_FRAME_BYTES, PART, PING

HEARTBEAT_MS = 3000
HEARTBEAT_TIMEOUT_MS = 12000

_EVENTS = (
    zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)  # fmt: skip


class ClientSocket:
    """A ZeroMQ DEALER socket that is encrypted with CURVE, and the monitor of its connection."""

    loss_reason = ""
    handshake_error = ""
    _end_reason = ""

    def __init__(self, card: Card) -> None:
        self._address = card.address
        self.hello_received = False  # the server's HELLO was received
        self._endpoints: Endpoints | None = None
        with ExitStack() as undo:
            context = new_context()
            undo.callback(context.term)
            self.socket = context.socket(zmq.DEALER)
            undo.callback(self.socket.close)
            for option, value in (
                (zmq.LINGER, 500), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0),
                (zmq.IPV6, wants_ipv6(card.address)),
                (zmq.CURVE_SERVERKEY, card.server.encode()),
                (zmq.CURVE_PUBLICKEY, card.public.encode()),
                (zmq.CURVE_SECRETKEY, card.secret.encode()), (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
                (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS), (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            ):  # fmt: skip
                self.socket.setsockopt(option, value)
            self.monitor = self.socket.get_monitor_socket(_EVENTS)
            undo.callback(self.monitor.close)
            undo.callback(self.socket.disable_monitor)
            self.socket.connect(card.address)
            self._resources = undo.pop_all()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message without blocking.

        The high-water mark is unlimited, so libzmq refuses a message only after it has given the
        connection up, because the handshake failed.
        """
        try:
            if sum(map(len, frames)) > CHUNK_BYTES:
                *parts, last = frames
                for part in parts:
                    self.socket.send_multipart([PART, part], zmq.NOBLOCK)
                frames = [last]
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.loss_reason = self.loss_reason or "the handshake failed"

    def receive_messages(self, max_messages: int) -> Iterator[list[bytes]]:
        """Yield messages that have arrived, also those from before a loss of the connection."""
        while not self.loss_reason and has_input(self.socket):
            max_messages -= 1
            if max_messages < 0:
                return
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            if frames[0] == PING:  # tells the server that all earlier messages were read
                self.send(frames)
            else:
                yield frames
        if self.hello_received:
            self.loss_reason = self.loss_reason or self._end_reason

    def check_connection(self) -> None:
        """Note what the monitor tells. Called when its descriptor becomes readable."""
        while has_input(self.monitor):
            event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            kind = event["event"]
            if kind == zmq.EVENT_CONNECTED:
                if not self.hello_received:  # libzmq has connected again
                    self._end_reason = ""
                connections.discard(self._endpoints)
                self._endpoints = endpoints_of(event["value"])
                connections.add(self._endpoints)
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.loss_reason = (
                    "the server does not allow the key of this process; "
                    "add the key to the server's allow-list"
                )
            elif kind in (
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            ):
                self.handshake_error = (
                    "the process at that address does not hold the expected server key, or is not "
                    "a polycephaly server; use the server's current connection file"
                )
                if not self.hello_received:
                    self.loss_reason = self.handshake_error
            elif kind == zmq.EVENT_DISCONNECTED:
                self._end_reason = "the server has ended or cannot be reached"

    def timeout_error(self, timeout: float) -> ConnectionError:
        """Return the error for a caller that waited `timeout` seconds for the server's HELLO."""
        reason = f": {self.handshake_error}" if self.handshake_error else ""
        return ConnectionError(
            f"no server answered at {self._address} within {timeout:g} s{reason}"
        )

    def close(self) -> None:
        """Send BYE if the connection is up, and close the socket."""
        with suppress(zmq.ZMQError):
            self.socket.send_multipart([BYE], zmq.NOBLOCK)
        self._resources.close()
        connections.discard(self._endpoints)
