"""The messages between a server and its clients and joined hosts.

wire/messages.py is the counterpart for a controller and its drones.

A message is a list of frames: its type, a head of items of one size, and the items' payloads end to
end, cut into pieces of at most `PIECE` bytes. Thus no frame is large, and libzmq refuses larger
ones: a peer without a key could otherwise fill the memory with one frame. A longer message to a
server is sent as several messages (PART), because libzmq keeps all frames of one message in memory
until the last has arrived. server/flow_control.py limits how much a peer may send.

The server checks shapes and sizes only. Payloads are unpickled in drones and in the client that
submitted the task. The server reads only plain data: numbers, labels and JSON.

In every version of the protocol, a HELLO has the same number of frames and its second frame has the
same layout, so that peers of different versions can be told why they are refused.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, NamedTuple

from ... import __version__
from ...wire.messages import Malformed

__all__ = [
    "AHEAD", "ASK", "ASKS", "BYE", "BYTES_AHEAD",
    "CANCEL", "GIVE_UP", "HELLO", "LARGEST", "LINE", "LIVES", "NEWS", "OUTPUT",
    "PART", "PIECE", "PING", "RECALL", "REFUSED",
    "RESULTS", "RETURNED", "RUNNING", "SEEN", "SHARE", "SHARES", "TELL", "WINDOW",
    "WORK",
    "Hello", "Item", "Result", "hello",
    "pack_definition", "pack_note", "pack_numbers", "pack_results", "pack_share", "pack_shares", "pack_work",
    "read_definition", "read_hello", "read_lines", "read_note", "read_numbers", "read_results", "read_share",
    "read_shares", "read_work",
]  # fmt: skip

PROTOCOL = 4  # protocol 3 pickled other names of modules and classes

# Between a client and its server:
#
#     client   message   server   contents
#       <──>   HELLO              protocol, Python version, properties; number of drones
#       <──    REFUSED            the reason
#        ──>   WORK               head, payloads: definitions, calls, definitions to forget
#       <──    RESULTS            head, payloads
#       <──    RUNNING            numbers of calls that are known to have begun; sent now and then
#       <──    OUTPUT             lines that the client's tasks have printed
#        ──>   SEEN               bytes of OUTPUT that were handled; allows as many more
#        ──>   SHARE              JSON, a pickle, its buffers: for shared memory; answered by TELL
#        ──>   GIVE_UP            numbers of shared values that no later call will name
#        ──>   CANCEL             numbers of calls, running ones included
#        ──>   RECALL             numbers of calls; cancels only those that have not begun
#        ──>   ASK                JSON: an admin request (status, stop, drones ...)
#       <──    TELL               JSON: the reply, with the number of the request
#       <──>   PING               a number that the client returns: proves that the client is there
#        ──>   LIVES              every `client_sign_seconds`, also while PINGs wait behind data
#        ──>   PART               frames that precede those of the next message
#        ──>   BYE                the client leaves; its remaining calls are cancelled
#
# The HELLO of a joined host (server/join.py) declares its role; the host receives tasks:
#
#      host    message   server   contents
#        ──>   WINDOW             how many calls the host would hold; 0: the host leaves
#       <──    WORK, CANCEL, ASK  as from a client; definitions carry the tag of their client
#       <──    RECALL             how many of the calls that have not begun to give back
#        ──>   RESULTS, RUNNING, TELL   as from a server
#        ──>   OUTPUT             with the tag of the client that each line belongs to
#        ──>   RETURNED           numbers of calls that have not begun and will not begin
#        ──>   NEWS               JSON: the state of the host's drones; also a sign of life
HELLO, REFUSED, WORK, RESULTS, CANCEL, RECALL, PING, BYE = (
    b"H",
    b"E",
    b"W",
    b"R",
    b"C",
    b"B",
    b"P",
    b"Q",
)
OUTPUT, SEEN, ASK, TELL = b"O", b"S", b"A", b"T"
WINDOW, RETURNED, NEWS = b"V", b"Y", b"N"
PART = b"M"
SHARE, GIVE_UP = b"D", b"U"
RUNNING = b"G"
LIVES = b"L"

SHARES = 0x20
"""A flag of an item's kind: its payload begins with the numbers of the shared values it takes."""

PIECE = 1 << 20
LARGEST = 2 * PIECE
"""Maximal bytes of a frame. Heads are not cut, but never hold that many items."""

AHEAD = 2048
"""Maximal number of sent, unanswered calls of one client."""

BYTES_AHEAD = 64 << 20
"""Bytes of sent, unanswered calls at which a client stops sending."""

ASKS = 16
"""Maximal number of sent, unanswered requests (ASK, SHARE) of one client."""

LINE = 64
"""Bytes that a line of OUTPUT counts for, in addition to its text."""

_HELLO = Struct("<HBBI")
_ITEM = Struct("<QQBQdiQ")
"""Number, definition, kind, target drone (0: any), time limit in seconds (nan: as the pool),
retries (-1: as the pool), bytes of the payload.
"""
_RESULT = Struct("<QBHQ")
"""Number; status; bytes of the output tail; bytes of the payload and the tail after it."""
_NUMBER = Struct("<Q")
_COUNT = Struct("<H")
_LABELS = Struct("<HH")


Result = tuple[int, int, bytes, str]
"""Number, status, payload, output tail."""
_TAIL_MOST = 1 << 15  # bytes


class Item(NamedTuple):
    number: int
    definition: int
    kind: int
    payload: bytes = b""
    target: int = 0
    timeout: float | None = None
    retries: int | None = None


class Hello(NamedTuple):
    """The peer's properties, from its HELLO."""

    why: str | None  # why the peers are incompatible, or None
    drones: int
    who: dict[str, Any]


def hello(drones: int = 0, **who: Any) -> list[bytes]:
    version = _HELLO.pack(PROTOCOL, *sys.version_info[:2], drones)
    return [HELLO, version, json.dumps({"version": __version__, **who}).encode()]


def read_hello(frames: Sequence[bytes], it: str, we: str) -> Hello:
    """Parse a HELLO. `it` and `we` name the peer and this side in messages. Raise `Malformed`."""
    if len(frames) != 3 or len(frames[1]) != _HELLO.size:
        raise Malformed("a hello of another shape")
    protocol, major, minor, drones = _HELLO.unpack(frames[1])
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    who = {} if protocol != PROTOCOL else read_note(frames[1:])
    why = None
    if protocol != PROTOCOL:
        older, newer = (it, we) if protocol < PROTOCOL else (we, it)
        why = (
            f"{it} speaks protocol {protocol} and {we} protocol {PROTOCOL}: the polycephaly of {older} is older than "
            f"that of {newer}; use the same version for both"
        )
    elif f"{major}.{minor}" != python:
        why = f"{it} runs Python {major}.{minor} and {we} {python}: functions cannot travel between them"
    return Hello(why, drones, who)


def pack_note(kind: bytes, note: dict[str, Any]) -> list[bytes]:
    """Pack data that is no task, as JSON."""
    return [kind, *_pieces([json.dumps(note).encode()])]


def read_note(frames: Sequence[bytes]) -> dict[str, Any]:
    try:
        note = json.loads(b"".join(frames[1:]))
    except (ValueError, RecursionError) as wrong:
        raise Malformed(f"a note that is no JSON: {wrong}") from None
    if not isinstance(note, dict):
        raise Malformed("a note that is no object")
    return note


def read_lines(frames: Sequence[bytes], parts: int) -> list[tuple[Any, ...]]:
    """Parse the lines of OUTPUT: text, drone, stream, and from a joined host the tag."""
    lines = read_note(frames).get("lines")
    if not isinstance(lines, list) or not all(
        isinstance(each, list) and len(each) == parts for each in lines
    ):
        raise Malformed("lines that are none")
    if not all(isinstance(part, str) for each in lines for part in each):
        raise Malformed("lines that are no text")
    return [tuple(each) for each in lines]


def pack_share(number: int, asked: int, runs: Sequence[Any]) -> list[bytes]:
    """Pack a SHARE: `runs` are bytes-like, a pickle and its buffers; `asked` numbers the reply."""
    note = {"number": number, "id": asked, "sizes": [len(run) for run in runs]}
    return [SHARE, json.dumps(note).encode(), *(piece for run in runs for piece in _cut(run))]


def read_share(frames: Sequence[bytes]) -> tuple[int, int, list[list[bytes]]]:
    """Return the number, the number of the reply, and the pieces of each run. Raise `Malformed`."""
    note = read_note(frames[:2])
    number, asked, sizes = note.get("number"), note.get("id"), note.get("sizes")
    if not (
        isinstance(number, int) and isinstance(asked, int) and isinstance(sizes, list) and sizes
    ):
        raise Malformed("a shared value without a number")
    pieces = iter(frames[2:])
    runs: list[list[bytes]] = []
    for size in sizes:
        run: list[bytes] = []
        while isinstance(size, int) and size > 0:
            run.append(piece := next(pieces, b""))
            if not piece:
                raise Malformed("a shared value that is not all there")
            size -= len(piece)
        if size != 0 or not run:
            raise Malformed("a shared value of other sizes than it tells")
        runs.append(run)
    if next(pieces, None) is not None:
        raise Malformed("more of a shared value than it tells")
    return number, asked, runs


def pack_shares(numbers: Sequence[int], payload: bytes) -> bytes:
    return b"".join((_COUNT.pack(len(numbers)), *map(_NUMBER.pack, numbers), payload))


def read_shares(packed: bytes) -> tuple[list[int], bytes]:
    """Split the numbers of shared values from a payload. Raise `Malformed`."""
    if len(packed) < _COUNT.size or len(packed) < (
        end := _COUNT.size + _COUNT.unpack_from(packed)[0] * _NUMBER.size
    ):
        raise Malformed("a call without the numbers of what it shares")
    return [number for (number,) in _NUMBER.iter_unpack(packed[_COUNT.size : end])], packed[end:]


def pack_definition(label: str, payload: bytes, tag: str = "") -> bytes:
    """Pack a definition: the function's label, for reports; the tag of its client; its bytes."""
    name, whose = label.encode("utf-8", "replace")[:200], tag.encode()
    return _LABELS.pack(len(name), len(whose)) + name + whose + payload


def read_definition(packed: bytes) -> tuple[str, bytes, str]:
    """Return label, payload and tag. Raise `Malformed`."""
    if len(packed) < _LABELS.size:
        raise Malformed("a definition without a label")
    middle, end = (_LABELS.size + size for size in _LABELS.unpack_from(packed))
    end += middle - _LABELS.size
    if len(packed) < end:
        raise Malformed("a definition with half a label")
    label, tag = packed[_LABELS.size : middle], packed[middle:end]
    return label.decode("utf-8", "replace"), packed[end:], tag.decode("ascii", "replace")


def pack_work(items: Sequence[Item]) -> list[bytes]:
    head = b"".join(
        _ITEM.pack(
            number, definition, kind, target, math.nan if timeout is None else timeout,
            -1 if retries is None else retries, len(payload),
        )
        for number, definition, kind, payload, target, timeout, retries in items
    )  # fmt: skip
    return [WORK, head, *_pieces([item.payload for item in items])]


def read_work(frames: Sequence[bytes]) -> Iterator[Item]:
    for (number, definition, kind, target, timeout, retries, _), payload in _items(_ITEM, frames):
        task_options = timeout if timeout > 0 else None, retries if retries >= 0 else None
        yield Item(number, definition, kind, payload, target, *task_options)


def pack_results(results: Sequence[Result]) -> list[bytes]:
    tails = [tail.encode()[-_TAIL_MOST:] for _, _, _, tail in results]
    head = b"".join(
        _RESULT.pack(number, status, len(tail), len(payload) + len(tail))
        for (number, status, payload, _), tail in zip(results, tails, strict=True)
    )
    parts = [
        part for result, tail in zip(results, tails, strict=True) for part in (result[2], tail)
    ]
    return [RESULTS, head, *_pieces(parts)]


def read_results(frames: Sequence[bytes]) -> Iterator[Result]:
    for (number, status, tail, size), both in _items(_RESULT, frames):
        if tail > size:
            raise Malformed("a tail that is longer than all of it")
        end = size - tail
        yield (
            number,
            status,
            both[:end] if tail else both,
            both[end:].decode("utf-8", "replace") if tail else "",
        )


def _pieces(payloads: list[bytes]) -> list[bytes]:
    body = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    return [body] if len(body) <= PIECE else _cut(body)


def _cut(body: Any) -> list[Any]:
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
