"""What a client and its server say to each other: one table, as wire/messages.py is for a hub and its drones.

    client                                              server
    HELLO    protocol, Python's version  ──────>
             <──────  HELLO  the same, number of drones, name of the pool        or  REFUSED  why
    WORK     head, a payload for each item  ─────>      definitions, calls, what can be forgotten
             <──────  RESULTS  head, a payload for each
    CANCEL   numbers  ─────>                            also what runs
    RECALL   numbers  ─────>                            only what has not begun
    PING     ─────>   now and then: it lives            PING  <───── is it still there?
    BYE      ─────>   its work that is left is cancelled

A message is frames: its type, a head of items of one size, and their payloads end to end, cut into pieces of `PIECE`
bytes at most. So no frame is large, and larger ones are refused by libzmq: a stranger could fill the memory with one.
The server looks at shapes and sizes only: payloads are opened in drones and in the client that gave the work.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any

from ..wire.messages import Malformed

__all__ = [
    "BYE", "CANCEL", "HELLO", "LARGEST", "PING", "RECALL", "REFUSED", "RESULTS", "WORK", "hello", "pack_numbers",
    "pack_results", "pack_work", "read_hello", "read_numbers", "read_results", "read_work",
]  # fmt: skip

PROTOCOL = 1

HELLO, REFUSED, WORK, RESULTS, CANCEL, RECALL, PING, BYE = b"H", b"E", b"W", b"R", b"C", b"B", b"P", b"Q"

PIECE = 1 << 20
LARGEST = 2 * PIECE
"""Bytes of a frame. A head may be as large as this: so many items are not sent at once."""

_HELLO = Struct("<HBBI")
_ITEM = Struct("<QQBdiQ")
"""Number, definition, kind; seconds that it may run (nan: as the pool says), retries (-1: as the pool says); bytes."""
_RESULT = Struct("<QBQ")
"""Number, status, bytes."""
_NUMBER = Struct("<Q")

Item = tuple[int, int, int, float | None, int | None, bytes]


def hello(drones: int = 0, name: str = "") -> list[bytes]:
    return [HELLO, _HELLO.pack(PROTOCOL, *sys.version_info[:2], drones), name.encode()]


def read_hello(frames: Sequence[bytes]) -> tuple[str | None, int, str]:
    """Why we do not understand each other, if so; drones; name. Raises `Malformed`."""
    if len(frames) != 3 or len(frames[1]) != _HELLO.size:
        raise Malformed("a hello of another shape")
    protocol, major, minor, drones = _HELLO.unpack(frames[1])
    why = None
    if protocol != PROTOCOL:
        why = f"it speaks protocol {protocol}, and this end protocol {PROTOCOL}: use the same version of polycephaly"
    elif (major, minor) != sys.version_info[:2]:
        why = (
            f"it runs Python {major}.{minor}, and this end {sys.version_info[0]}.{sys.version_info[1]}: "
            "functions cannot travel between them"
        )
    return why, drones, frames[2].decode("utf-8", "replace")


def pack_work(items: Sequence[Item]) -> list[bytes]:
    head = b"".join(
        _ITEM.pack(*what, math.nan if timeout is None else timeout, -1 if retries is None else retries, len(payload))
        for *what, timeout, retries, payload in items
    )
    return [WORK, head, *_pieces([item[5] for item in items])]


def read_work(frames: Sequence[bytes]) -> Iterator[Item]:
    for (number, definition, kind, timeout, retries, _), payload in _items(_ITEM, frames):
        yield number, definition, kind, timeout if timeout > 0 else None, retries if retries >= 0 else None, payload


def pack_results(results: Sequence[tuple[int, int, bytes]]) -> list[bytes]:
    head = b"".join(_RESULT.pack(number, status, len(payload)) for number, status, payload in results)
    return [RESULTS, head, *_pieces([payload for _, _, payload in results])]


def read_results(frames: Sequence[bytes]) -> Iterator[tuple[int, int, bytes]]:
    for (number, status, _), payload in _items(_RESULT, frames):
        yield number, status, payload


def _pieces(payloads: list[bytes]) -> list[bytes]:
    body = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    if len(body) <= PIECE:
        return [body]
    return [body[start : start + PIECE] for start in range(0, len(body), PIECE)]


def _items(layout: Struct, frames: Sequence[bytes]) -> Iterator[tuple[tuple[Any, ...], bytes]]:
    if len(frames) < 3 or not frames[1] or len(frames[1]) % layout.size:
        raise Malformed("a head that is none")
    heads = list(layout.iter_unpack(frames[1]))
    body = frames[2] if len(frames) == 3 else b"".join(frames[2:])
    if sum(head[-1] for head in heads) != len(body):
        raise Malformed("payloads of another size than the head tells")
    at = 0
    for head in heads:
        yield head, body[at : at + head[-1]]
        at += head[-1]


def pack_numbers(kind: bytes, numbers: Sequence[int]) -> list[bytes]:
    return [kind, b"".join(map(_NUMBER.pack, numbers))]


def read_numbers(frames: Sequence[bytes]) -> list[int]:
    if len(frames) != 2 or len(frames[1]) % _NUMBER.size:
        raise Malformed("numbers of another size")
    return [number for (number,) in _NUMBER.iter_unpack(frames[1])]
