"""The ZeroMQ (bulk) transport: a ROUTER in the reactor's private directory, a DEALER in each drone.

A sender must bear an identity that the reactor handed out: 128 random bits, never stored in a file.
Either end is made when it is first needed, because most programs never need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import zmq

from ..runtime.system_limits import check_room_for_zeromq

_RECONNECT_MILLISECONDS = 5
"""Interval at which a DEALER tries again to connect, until the reactor has bound the ROUTER."""

# Plain numbers: an operation on the enumerations of pyzmq takes half as long as asking the socket.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class _End:
    socket: zmq.Socket[bytes]

    _resources: ExitStack

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next message, or None if no message is there."""
        return self.socket.recv_multipart(zmq.NOBLOCK) if has_input(self.socket) else None

    def close(self) -> None:
        self._resources.close()


class Router(_End):
    """The reactor's bound ROUTER."""

    def __init__(self, directory: str) -> None:
        """Raise `zmq.ZMQError` or `OSError` if this fails; then nothing is left behind."""
        with ExitStack() as undo:
            # No high-water marks: the reactor limits messages in flight by credit.
            self.socket = open_socket(undo, zmq.ROUTER, {zmq.LINGER: 0})
            self.socket.bind(f"ipc://{_path(directory)}")
            self._resources = undo.pop_all()


class Dealer(_End):
    """A drone's end, with the identity that the reactor gave the drone."""

    def __init__(self, directory: str, identity: bytes) -> None:
        self._resources = ExitStack()
        options = {
            zmq.IDENTITY: identity,
            # Milliseconds for which `close` waits until results in flight are delivered.
            zmq.LINGER: 5000,
            zmq.RECONNECT_IVL: _RECONNECT_MILLISECONDS,
        }
        self.socket = open_socket(self._resources, zmq.DEALER, options)
        self._path = _path(directory)
        self.socket.connect(f"ipc://{self._path}")

    def has_router(self) -> bool:
        """Return whether the ROUTER's socket file exists. Before, nothing can be delivered."""
        return os.path.exists(self._path)


def open_socket(undo: ExitStack, kind: int, options: Mapping[Any, Any]) -> zmq.Socket[bytes]:
    """Return a new socket without high-water marks, in a context of its own; `undo` closes both.

    Raises `OSError` if the system has no room for the threads and descriptors of a context: libzmq
    would abort the process.
    """
    check_room_for_zeromq()
    context = zmq.Context()
    undo.callback(context.term)
    end = context.socket(kind)
    undo.callback(end.close)
    for option, value in {zmq.SNDHWM: 0, zmq.RCVHWM: 0, **options}.items():
        end.setsockopt(option, value)
    return end


def _path(directory: str) -> str:
    return os.path.join(directory, "zmq")


def has_input(end: zmq.Socket[bytes]) -> bool:
    return bool(cast(int, end.getsockopt(_EVENTS)) & _POLLIN)


class SocketSource:
    """A socket as a source of an event loop.

    Its descriptor, which becomes readable when something happens, is edge-triggered.
    """

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[], object]) -> None:
        self.fileno = socket.fileno
        self.has_input = partial(has_input, socket)
        self.receive = receive
