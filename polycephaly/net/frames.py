"""What a client and its server say to each other: one table, as wire/messages.py is for a hub and its drones.

    client                                              server
    HELLO    protocol, Python's version  ──────>
             <──────  HELLO  the same, number of drones, name of the pool        or  REFUSED  why
    WORK     head, a payload for each item  ─────>      definitions, calls, what can be forgotten
             <──────  RESULTS  head, a payload for each
    CANCEL   numbers  ─────>
    PING     ─────>   now and then: it lives            PING  <───── is it still there?
    BYE      ─────>   its work that is left is cancelled

A message is frames: its type, a head of items of one size, a payload for each item. The server looks at shapes and
sizes only: payloads are opened in drones and in the client that gave the work.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from struct import Struct

from ..wire.messages import Malformed

__all__ = [
    "BYE", "CANCEL", "HELLO", "PING", "REFUSED", "RESULTS", "WORK", "hello", "pack_numbers", "pack_results",
    "pack_work", "read_hello", "read_numbers", "read_results", "read_work",
]  # fmt: skip

PROTOCOL = 1

HELLO, REFUSED, WORK, RESULTS, CANCEL, PING, BYE = b"H", b"E", b"W", b"R", b"C", b"P", b"Q"

_HELLO = Struct("<HBBI")
_ITEM = Struct("<QQBdi")
"""Number, definition, kind; seconds that it may run (nan: as the pool says), retries (-1: as the pool says)."""
_RESULT = Struct("<QB")
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
        _ITEM.pack(*item[:3], math.nan if item[3] is None else item[3], -1 if item[4] is None else item[4])
        for item in items
    )
    return [WORK, head, *(item[5] for item in items)]


def read_work(frames: Sequence[bytes]) -> Iterator[Item]:
    for (number, definition, kind, timeout, retries), payload in _items(_ITEM, frames):
        yield number, definition, kind, timeout if timeout > 0 else None, retries if retries >= 0 else None, payload


def pack_results(results: Sequence[tuple[int, int, bytes]]) -> list[bytes]:
    return [RESULTS, b"".join(_RESULT.pack(number, status) for number, status, _ in results), *(r[2] for r in results)]


def read_results(frames: Sequence[bytes]) -> Iterator[tuple[int, int, bytes]]:
    for (number, status), payload in _items(_RESULT, frames):
        yield number, status, payload


def _items(layout: Struct, frames: Sequence[bytes]) -> Iterator[tuple[tuple[int, ...], bytes]]:
    if len(frames) < 2 or len(frames[1]) != layout.size * (len(frames) - 2):
        raise Malformed("as many payloads as the head tells are not there")
    return zip(layout.iter_unpack(frames[1]), frames[2:], strict=True)


def pack_numbers(kind: bytes, numbers: Sequence[int]) -> list[bytes]:
    return [kind, b"".join(map(_NUMBER.pack, numbers))]


def read_numbers(frames: Sequence[bytes]) -> list[int]:
    if len(frames) != 2 or len(frames[1]) % _NUMBER.size:
        raise Malformed("numbers of another size")
    return [number for (number,) in _NUMBER.iter_unpack(frames[1])]
