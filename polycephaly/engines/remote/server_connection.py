"""A connection to a server, of a client or of a joined host.

If the connection is lost, `loss_reason` says why. It is not made again, because the fate of the
tasks that were sent is unknown. While it has not yet come about, `handshake_error` says why that
may be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...errors import Malformed
from ...promises.event_loop import EventLoop
from ...promises.promise import Promise, Signal, fulfill, reject
from ...wire.endpoint import SocketSource, has_input, open_socket
from ...wire.exceptions import describe_error
from .keys import Card, wants_ipv6
from .messages import BYE, CHUNK_BYTES, MAX_FRAME_BYTES, PART, PING, REFUSED

log = logging.getLogger(__name__)

MAX_MESSAGES_PER_TURN = 1000
HEARTBEAT_MS = 3000
HEARTBEAT_TIMEOUT_MS = 12000

_EVENTS = (
    zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)  # fmt: skip


class ServerConnection(EventLoop):
    """A connection to a server, with its event loop: a ZeroMQ DEALER socket that is encrypted with
    CURVE, and its monitor. Methods are called in that loop, holding its lock, unless they say
    otherwise.
    """

    loss_reason = ""
    handshake_error = ""
    hello_received = False  # the server's HELLO was received
    _end_reason = ""

    def __init__(self, card: Card, name: str) -> None:
        """Make the socket, which `connect` uses; `name` is the thread's."""
        self.address = card.address
        self.ended: Signal[None] = Signal()
        self._connected: Promise[None] = Promise()
        with ExitStack() as undo:
            options = {
                zmq.LINGER: 500, zmq.IPV6: wants_ipv6(card.address),
                zmq.CURVE_SERVERKEY: card.server.encode(),
                zmq.CURVE_PUBLICKEY: card.public.encode(),
                zmq.CURVE_SECRETKEY: card.secret.encode(), zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
                zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS, zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            }  # fmt: skip
            self._socket = open_socket(undo, zmq.DEALER, options)
            self._monitor = self._socket.get_monitor_socket(_EVENTS)
            undo.callback(self._monitor.close)
            undo.callback(self._socket.disable_monitor)
            try:
                self._socket.connect(card.address)
            except zmq.ZMQError as error:
                raise ValueError(
                    f"an address to connect to is tcp://HOST:PORT, not {card.address!r}"
                ) from error
            super().__init__(name, self.after_turn)
            self._resources = undo.pop_all()

    # -- any thread --------------------------------------------------------------------------------

    def connect(self, timeout: float, hello: list[bytes]) -> None:
        """Send `hello`, and return when `on_connected` was called. Raises `ConnectionError` if the
        server does not answer in time, or refuses.
        """
        self.post(self._begin, hello)
        try:
            self.start()
        except BaseException:  # no thread can be started
            self._close_socket()
            self.release_resources()
            raise
        try:
            self._connected.result(timeout)
        except BaseException as error:
            self.post(self.end)
            self.wait_ended()
            if isinstance(error, TimeoutError):
                reason = f": {self.handshake_error}" if self.handshake_error else ""
                raise ConnectionError(
                    f"no server answered at {self.address} within {timeout:g} s{reason}"
                ) from None
            raise

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Have the loop call `callback`. An error ends the connection.

        Takes no lock, so finalizers may call it.
        """
        if not self.has_ended:
            super().post(partial(callback, *args))

    def wait_ended(self) -> None:
        """Wait until the connection has ended, and its thread."""
        if not self.belongs_to_parent:
            # First: CPython 3.11 takes a thread for ended if a Ctrl-C comes while it is joined.
            self.ended.result()
            while self.thread.is_alive():
                self.thread.join(0.5)  # time-limited, so that Ctrl-C is handled

    def loss(self) -> ConnectionError:
        """Return the error of those that wait for the server in vain."""
        state = f"is lost: {self.loss_reason}" if self.loss_reason else "is closed"
        return ConnectionError(f"the connection to {self.address} {state}")

    # -- for subclasses ----------------------------------------------------------------------------

    def on_message(self, frames: list[bytes]) -> None:
        """Handle a message of the server. `Malformed` is the reason for which the connection is
        lost.
        """
        raise NotImplementedError

    def after_turn(self) -> None:
        """Act on the messages and calls of one turn of the loop."""

    def on_end(self) -> None:
        """Give up all that waits for the server. Called without the lock."""

    # -- in the loop -------------------------------------------------------------------------------

    def _begin(self, hello: list[bytes]) -> None:
        self.add_source(SocketSource(self._socket, self._receive))
        self.watch(self._monitor.fileno(), self._on_connection_event)
        self._on_connection_event()  # libzmq signals only to a reader that has once found none
        self.send(hello)

    def on_connected(self) -> None:
        self.hello_received = True
        self.deliver(partial(fulfill, self._connected))

    def _on_connection_event(self) -> None:
        self._check_connection()
        self._receive()

    def _check_connection(self) -> None:
        """Handle the events of the monitor, whose descriptor has become readable."""
        while has_input(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            kind = event["event"]
            if kind == zmq.EVENT_CONNECTED:
                if not self.hello_received:  # libzmq has connected again
                    self._end_reason = ""
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

    def _receive(self) -> None:
        if self.has_ended:
            return
        for frames in self._received_messages():
            try:
                if frames[0] == REFUSED:
                    self.lose(b" ".join(frames[1:]).decode("utf-8", "replace"))
                else:
                    self.on_message(frames)
            except Malformed as error:
                self.lose(str(error))
        if self.loss_reason:
            self.end()

    def _received_messages(self) -> Iterator[list[bytes]]:
        """Yield messages that have arrived, also those from before a loss of the connection."""
        left = MAX_MESSAGES_PER_TURN
        while not self.loss_reason and has_input(self._socket):
            left -= 1
            if left < 0:
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if frames[0] == PING:  # tells the server that all earlier messages were read
                self.send(frames)
            else:
                yield frames
        if self.hello_received:
            self.loss_reason = self.loss_reason or self._end_reason

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message without blocking.

        The high-water mark is unlimited, so libzmq refuses a message only after it has given the
        connection up, because the handshake failed.
        """
        if self.has_ended:
            return
        try:
            if sum(map(len, frames)) > CHUNK_BYTES:
                *parts, last = frames
                for part in parts:
                    self._socket.send_multipart([PART, part], zmq.NOBLOCK)
                frames = [last]
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._check_connection()  # the monitor may tell why
            self.loss_reason = self.loss_reason or "the handshake failed"

    def _call_guarded(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception as error:
            log.error(
                "a bug in polycephaly breaks the connection to %s", self.address, exc_info=error
            )
            self.lose(f"a bug in polycephaly: {error}")

    # -- in the loop: the end ----------------------------------------------------------------------

    def lose(self, reason: str) -> None:
        """End, because the connection is lost."""
        self.loss_reason = self.loss_reason or reason
        self.end()

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.timers.clear()
            self.unwatch(self._monitor.fileno())
            self._sources = []
            self.deliver(self._finish)

    def _end_by(self, error: BaseException) -> None:
        with self._lock:
            self.lose(f"the thread that serves it has ended: {describe_error(error)}")
        self._deliver(holds=False)
        self._run_jobs_outside_lock()
        self._end_loop()
        super()._end_by(error)

    def _finish(self) -> None:
        self.on_end()
        if not self._connected.done():
            reject(self._connected, self.loss())
        self.run_outside_lock(self._close_and_end)

    def is_done(self) -> bool:
        """Return whether nothing is left for which the end, which has begun, has to wait."""
        return True

    def _close_and_end(self) -> None:
        self._close_socket()
        self.end_if_done()

    def end_if_done(self) -> None:
        if self.is_done():
            self._end_loop()

    def _end_loop(self) -> None:
        if not self.ended.done():
            fulfill(self.ended)
            self.stop()

    def _close_socket(self) -> None:
        """Send BYE if the connection is up, and close the socket."""
        with suppress(zmq.ZMQError):
            self._socket.send_multipart([BYE], zmq.NOBLOCK)
        self._resources.close()
