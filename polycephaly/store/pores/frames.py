"""What goes through a connection between a holder and the owner of a pore.

    holder -> owner    hello: secret, name of the holder      once, in one piece, before all else
    owner -> holder    greeting, and with it the memory's descriptor
    holder -> owner    frames: head (kind, size, offset), and for TOLD a pickle of that size
    owner -> holder    farewell: the pore was closed, and did not end with its owner

It is a stream, so what was told by one system call each is read by one for many.
"""

from __future__ import annotations

from pickle import loads
from struct import Struct
from typing import Any, NamedTuple

from ...wire.messages import Malformed

__all__ = [
    "FAREWELL",
    "GREETING",
    "HEAD",
    "MOST",
    "TOLD",
    "WROTE",
    "Frame",
    "Message",
    "message_of",
    "split",
]

HEAD = Struct("<BIQ")
TOLD, WROTE = 1, 2
MOST = 32_000
"""Bytes of a message's pickle. What is larger belongs into the memory. And up to 32 KiB the kernel
takes a frame as a whole or not at all, so that a sender who is killed, or finds no room, leaves no
half of one."""

GREETING, FAREWELL = b"\1", b"\2"

Frame = tuple[int, int, int, bytes]
"""Kind, size, offset, and the pickle, where there is one."""


class Message(NamedTuple):
    """What the owner of a pore receives.

    `sender` is the name of the image that sent it: the drone's, or "MainProcess". `kind` is "told",
    with the `value` that was told, or "wrote": then `length` bytes from `offset` on have been
    written."""

    sender: str
    kind: str
    value: Any = None
    offset: int = 0
    length: int = 0


def split(rest: bytes, piece: bytes) -> tuple[list[Frame], bytes]:
    """The whole frames of what has come, and the beginning of another. Raises `Malformed`."""
    piece = rest + piece if rest else piece
    frames: list[Frame] = []
    at, end, head = 0, len(piece), HEAD.size
    unpack = HEAD.unpack_from
    while at + head <= end:
        kind, size, offset = unpack(piece, at)
        stop = at + head
        if kind == TOLD:
            stop += size
            if size > MOST:
                raise Malformed(f"a message of {size} bytes")
            if stop > end:
                break
        elif kind != WROTE:
            raise Malformed(f"a frame of kind {kind}")
        frames.append((kind, size, offset, piece[at + head : stop]))
        at = stop
    return frames, piece[at:]


def message_of(sender: str, frame: Frame) -> Message:
    """Raises whatever the value's own unpickling raises."""
    kind, size, offset, pickled = frame
    if kind == TOLD:
        return Message(sender, "told", loads(pickled))
    return Message(sender, "wrote", None, offset, size)
