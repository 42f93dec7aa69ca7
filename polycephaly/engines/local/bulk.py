"""The controller's side of the bulk transport: one socket for all local drones of a process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import zmq

from ...runtime import fork_guard
from ...wire.endpoint import BulkTransport, has_input, input_fd

if TYPE_CHECKING:
    from ...pool.reactor import Reactor

log = logging.getLogger(__name__)

# Messages read while holding the reactor's lock once: a stranger that sends without end must not
# delay all others.
MAX_MESSAGES = 100


class BulkReceiver(Protocol):
    """The handle of a drone, which receives the messages of one sender."""

    identity: bytes
    bulk_open: bool

    def open_bulk(self) -> None: ...
    def receive_bulk(self, frames: list[bytes]) -> None: ...


class BulkSocket:
    """A `pool.event_loop.Source`. After `open` it is used only while holding the reactor's lock."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._transport = BulkTransport()
        self._handles: dict[bytes, BulkReceiver] = {}
        self._router: zmq.Socket[bytes] | None = None
        self.directory = self._transport.directory

    def open(self) -> None:
        """Make the directory and the socket, unless they exist.

        Called once the first zygote exists, because that ensures that both are removed.
        """
        with fork_guard.guard:
            if self._router is None:
                self._router = self._transport.open()
                self._reactor.add_source(self)

    @property
    def router(self) -> zmq.Socket[bytes]:
        assert self._router is not None  # opened before there is a handle
        return self._router

    def fileno(self) -> int:
        return input_fd(self.router)

    def has_input(self) -> bool:
        return has_input(self.router)

    def add_handle(self, handle: BulkReceiver) -> None:
        self._handles[handle.identity] = handle

    def remove_handle(self, handle: BulkReceiver) -> None:
        self._handles.pop(handle.identity, None)

    def receive(self, max_messages: int = MAX_MESSAGES) -> None:
        """Handle messages that drones have sent, `max_messages` at most."""
        while max_messages > 0 and has_input(self.router):
            max_messages -= 1
            identity, *frames = self.router.recv_multipart(zmq.NOBLOCK)
            handle = self._handles.get(identity)
            # A drone that is gone by now, or a stranger: its message is not parsed.
            if handle is None:
                log.info("a message of an unknown sender was dropped")
                continue
            if not handle.bulk_open:
                handle.open_bulk()
            handle.receive_bulk(frames)

    def close(self) -> None:
        self._transport.close()
