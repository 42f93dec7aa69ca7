"""A connection to a server, of a client or of a joined host."""

from __future__ import annotations

import logging
import os
from _thread import get_ident
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...errors import Malformed
from ...pool.event_loop import EventLoop
from ...promises.promise import Promise, Signal, fulfill, reject, settling_threads
from ...runtime.timers import Timer
from ...wire.endpoint import SocketSource
from .client_socket import ClientSocket
from .keys import Card
from .messages import REFUSED

log = logging.getLogger(__name__)

MAX_MESSAGES_PER_TURN = 1000


class ServerConnection:
    """A connection to a server, with an event loop of its own. Methods are called in that loop,
    holding its lock, unless they say otherwise.
    """

    def __init__(self, card: Card, name: str) -> None:
        """Make the socket, which `connect` uses; `name` is the thread's."""
        self.address = card.address
        self.ended: Signal[None] = Signal()
        self.has_ended = False
        self._connected: Promise[None] = Promise()
        self._socket = ClientSocket(card)
        try:
            self._loop = EventLoop(name, partial(self._run_guarded, self.after_turn))
        except BaseException:
            self._socket.close()
            raise

    # -- any thread --------------------------------------------------------------------------------

    def connect(self, timeout: float, hello: list[bytes]) -> None:
        """Send `hello`, and return when `on_connected` was called. Raises `ConnectionError` if the
        server does not answer in time, or refuses.
        """
        _connections.add(self)
        self.post(self._begin, hello)
        try:
            self._loop.start()
        except BaseException:  # no thread can be started
            _connections.discard(self)
            self._socket.close()
            self._loop.close()
            raise
        try:
            self._connected.result(timeout)
        except BaseException as error:
            self.post(self.end)
            self.wait_ended()
            if isinstance(error, TimeoutError):
                raise self._socket.timeout_error(timeout) from None
            raise

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Have the loop call `callback`. An error ends the connection.

        Takes no lock, so finalizers may call it.
        """
        if not self.has_ended:
            self._loop.post(partial(self._run_guarded, callback, *args))

    def wait_ended(self) -> None:
        """Wait until the connection has ended, and its thread."""
        if not self._loop.belongs_to_parent:
            while self._loop.thread.is_alive():
                self._loop.thread.join(0.5)  # time-limited, so that Ctrl-C is handled

    def loss(self) -> ConnectionError:
        """Return the error of those that wait for the server in vain."""
        reason = self._socket.loss_reason
        state = f"is lost: {reason}" if reason else "is closed"
        return ConnectionError(f"the connection to {self.address} {state}")

    def disable_in_child(self) -> None:
        """In a forked child: refuse all use."""
        self.has_ended = True
        self._loop.disable_in_child()

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
        # This thread must not wait for room in a pool, nor for promises that it settles.
        settling_threads.add(get_ident())
        self._source = SocketSource(self._socket.socket, self._receive)
        self._loop.add_source(self._source)
        on_event = partial(self._run_guarded, self._on_connection_event)
        self._loop.watch(self._socket.monitor.fileno(), on_event)
        on_event()  # libzmq signals an event only to a reader that has once looked and found none
        self._socket.send(hello)

    def on_connected(self) -> None:
        self._socket.hello_received = True
        self.deliver(partial(fulfill, self._connected))

    def _on_connection_event(self) -> None:
        self._socket.check_connection()
        self._receive()

    def _receive(self) -> None:
        if not self.has_ended:
            self._run_guarded(self._handle_messages)

    def _handle_messages(self) -> None:
        for frames in self._socket.receive_messages(MAX_MESSAGES_PER_TURN):
            try:
                if frames[0] == REFUSED:
                    self.lose(b" ".join(frames[1:]).decode("utf-8", "replace"))
                else:
                    self.on_message(frames)
            except Malformed as error:
                self.lose(str(error))
        if self._socket.loss_reason:
            self.end()

    def send(self, frames: Sequence[bytes]) -> None:
        if not self.has_ended:
            self._socket.send(frames)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        return self._loop.call_later(seconds, partial(self._run_guarded, callback))

    def deliver(self, callback: Callable[[], object]) -> None:
        """Have `callback` called without the lock."""
        self._loop.deliver(callback)

    def _run_guarded(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            callback(*args)
        except Exception as error:
            log.error(
                "a bug in polycephaly breaks the connection to %s", self.address, exc_info=error
            )
            self.lose(f"a bug in polycephaly: {error}")

    # -- in the loop: the end ----------------------------------------------------------------------

    def lose(self, reason: str) -> None:
        """End, because the connection is lost."""
        self._socket.loss_reason = self._socket.loss_reason or reason
        self.end()

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._loop.timers.clear()
            self._loop.remove_source(self._source)
            self._loop.unwatch(self._socket.monitor.fileno())
            self.deliver(self._finish)

    def _finish(self) -> None:
        self.on_end()
        if not self._connected.done():
            reject(self._connected, self.loss())
        self._loop.run_outside_lock(self._disconnect)

    def _disconnect(self) -> None:
        self._socket.close()
        _connections.discard(self)
        settling_threads.discard(get_ident())
        fulfill(self.ended)
        self._loop.stop()


_connections: set[ServerConnection] = set()


def _disable_connections() -> None:
    """In a forked child: they stay in the set, and so as they are."""
    for connection in _connections:
        connection.disable_in_child()


os.register_at_fork(after_in_child=_disable_connections)
