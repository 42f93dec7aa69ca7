"""The controller's side of the bulk transport: one socket for all local drones of a process.

ZeroMQ is loaded, and the socket made, when a message first needs it: most programs never do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...runtime import fork_guard
from ...wire.private_directory import PrivateDirectory

if TYPE_CHECKING:
    from ...pool.reactor import Reactor
    from ...wire.endpoint import Router

log = logging.getLogger(__name__)

# Messages read in one turn: a stranger that sends without end must not keep the reactor's lock.
MAX_MESSAGES = 100


class BulkSocket:
    """After `open` it is used only while holding the reactor's lock."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._private_directory = PrivateDirectory()
        self.receivers: dict[bytes, Callable[[list[bytes]], None]] = {}
        """Called with a message, by the identity of the drone's socket."""
        self._router: Router | None = None
        self._is_open = False
        self.directory = self._private_directory.path
        self.check_user = self._private_directory.check_user

    def open(self) -> None:
        """Make the directory, if this object has not done so. Raises `OSError`.

        Called after the first zygote has started, which removes the directory if this process is
        killed.
        """
        with fork_guard.guard:
            if not self._is_open:
                self._private_directory.make()
                self._is_open = True

    def bind(self) -> Router:
        """Make the socket, unless it exists, and return it. Raises the errors of ZeroMQ, which are
        no `OSError`, and `OSError` at a limit of the system.
        """
        if self._router is None:
            # No fork of this package falls into this import, because a fork needs the reactor's
            # lock, which this thread holds.
            from ...wire.endpoint import Router, SocketSource

            self._router = Router(self.directory)
            try:
                self._reactor.add_source(SocketSource(self._router.socket, self.receive))
            except BaseException:
                self._router.close()
                self._router = None
                raise
        return self._router

    def send(self, identity: bytes, frames: list[bytes]) -> None:
        self.bind().socket.send_multipart([identity, *frames])

    def receive(self, max_messages: int = MAX_MESSAGES) -> None:
        """Handle messages that drones have sent, `max_messages` at most."""
        router = self._router
        while router is not None and max_messages > 0 and (message := router.receive()):
            max_messages -= 1
            identity, *frames = message
            receiver = self.receivers.get(identity)
            # A drone that is gone by now, or a stranger: its message is not parsed.
            if receiver is None:
                log.info("a message of an unknown sender was dropped")
            else:
                receiver(frames)

    def close(self) -> None:
        if self._router is not None:
            self._router.close()
        self._private_directory.remove()
