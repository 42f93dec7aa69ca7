"""ZeroMQ sockets of served pools: a pool and its clients and hosts are different programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import zmq

from ..runtime.system_limits import check_room_for_zeromq

# Plain numbers: an operation on the enumerations of pyzmq takes half as long as asking the socket.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


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
