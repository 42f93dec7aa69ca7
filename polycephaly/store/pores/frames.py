"""The data on a connection between a holder and the owner of a pore.

    holder -> owner    hello: secret, name of the holder      once, in one piece, before all else
    owner -> holder    greeting, and with it the memory's descriptor
    holder -> owner    frames: head (kind, size, offset); for TOLD, then a pickle of that size
    owner -> holder    farewell: the pore was closed, and its owner still runs

The connection is a stream, so one system call can read many frames that were sent one by one.
"""

from __future__ import annotations

from pickle import loads
from struct import Struct
from typing import Any, NamedTuple

from ...errors import Malformed, stop_as_error

HEAD = Struct("<BQQ")
TOLD, WROTE = 1, 2
MAX_MESSAGE_BYTES = 32_000
"""Limit in bytes of a message's pickle; larger data belong in the memory.

Up to 32 KiB, the kernel takes a frame as a whole or not at all. So a sender that is killed, or
finds no room, never leaves half a frame.
"""

GREETING, FAREWELL = b"\1", b"\2"

Frame = tuple[int, int, int, bytes]
"""Kind, size, offset, and the pickle if there is one."""


class Message(NamedTuple):
    """A message received by the owner of a pore.

    Attributes
    ----------
    sender : str
        The name of the process that sent it: the drone's, or "MainProcess".
    kind : str
        "told" for `Pore.tell`, "wrote" for `Pore.write`.
    value : Any
        The object passed to `tell`.
    offset, length : int
        The first byte, and the number of bytes, that `write` has written.
    """

    sender: str
    kind: str
    value: Any = None
    offset: int = 0
    length: int = 0


def split_frames(unsplit: bytes, chunk: bytes) -> tuple[list[Frame], bytes]:
    """Return the whole frames in the bytes read, and the start of another. Raises `Malformed`."""
    chunk = unsplit + chunk if unsplit else chunk
    frames: list[Frame] = []
    at, end, head = 0, len(chunk), HEAD.size
    unpack = HEAD.unpack_from
    while at + head <= end:
        kind, size, offset = unpack(chunk, at)
        stop = at + head
        if kind == TOLD:
            stop += size
            if size > MAX_MESSAGE_BYTES:
                raise Malformed(f"a message of {size} bytes")
            if stop > end:
                break
        elif kind != WROTE:
            raise Malformed(f"a frame of kind {kind}")
        frames.append((kind, size, offset, chunk[at + head : stop]))
        at = stop
    return frames, chunk[at:]


def message_of(sender: str, frame: Frame) -> Message:
    """Return the message in a frame. Raises the errors of unpickling its value."""
    kind, size, offset, pickled = frame
    if kind == TOLD:
        try:
            return Message(sender, "told", loads(pickled))
        except (StopIteration, StopAsyncIteration) as stop:
            raise stop_as_error(stop, f"unpickling a message of {sender}") from stop
    return Message(sender, "wrote", None, offset, size)
