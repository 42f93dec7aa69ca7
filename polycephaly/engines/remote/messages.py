"""What a client and its server say to each other: one table, as wire/messages.py is for a hub and
its drones.

    client                                              server
    HELLO    protocol, Python's version, who  ─────>
             <──────  HELLO  the same, number of drones, who                     or  REFUSED  why
    WORK     head, a payload for each item  ─────>      definitions, calls, what can be forgotten
             <──────  RESULTS  head, a payload for each
             <──────  RUNNING  numbers                  now and then: of these calls it is known that they have begun
             <──────  OUTPUT  lines that its work has printed
    SEEN     bytes of OUTPUT dealt with  ─────>         more of it may come
    SHARE    JSON, a pickle and its buffers ─────>      to lie in shared memory; answered by TELL
    GIVE_UP  numbers  ─────>                            of these: no call will name them any more
    CANCEL   numbers  ─────>                            also what runs
    RECALL   numbers  ─────>                            only what has not begun
    ASK      JSON  ─────>                               what is not work: status, stop, drones ...
             <──────  TELL  JSON, with the number of what was asked
    PING     number  ─────>                             PING  <───── number: is it still there? It sends it back
    LIVES    ─────>                                     every `client_sign_seconds`, also while much is on its way to it
    PART     frames  ─────>                             which stand before those of its next message
    BYE      ─────>   its work that is left is cancelled

A *worker* (server/join.py) says hello as one, and takes work instead of giving it:

    worker                                              server
    WINDOW   number  ─────>                             so many calls it would hold; 0: it leaves
             <──────  WORK, CANCEL, ASK                 as a client's; definitions bear their client's tag
             <──────  RECALL  number                    give back so many, of what has not begun
    RESULTS, RUNNING, TELL  ─────>                      as a server's
    OUTPUT   ─────>                                     with the tag of whose it is
    RETURNED numbers  ─────>                            these have not begun and shall not
    NEWS     JSON  ─────>                               its drones; it lives

A message is frames: its type, a head of items of one size, and their payloads end to end, cut into
pieces of `PIECE` bytes at most. So no frame is large, and larger ones are refused by libzmq: a
stranger could fill the memory with one. What goes to a server and is longer goes as several
messages (PART), because libzmq keeps all frames of one in memory until the last has come. How much
a peer may send is told by server/flow_control.py. The server looks at shapes and sizes only:
payloads are opened in drones and in the client that gave the work. What it does read is plain data:
numbers, labels, and JSON.

Of a HELLO, the number of frames and the second one's layout are the same in each version of the
protocol: so that whoever speaks another is told so."""

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

PROTOCOL = 4  # since pickles name modules and classes, which have other names than in 3

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
"""Set in an item's kind: before its payload stand the numbers of the shared values that its call is
given."""

PIECE = 1 << 20
LARGEST = 2 * PIECE
"""Bytes of a frame. A head may be as large as this: so many items are not sent at once."""

AHEAD = 2048
"""Calls of one client that are sent and unanswered."""

BYTES_AHEAD = 64 << 20
"""Bytes of these: with so many unanswered, no more are sent."""

ASKS = 16
"""Questions (ASK, SHARE) of one client that are sent and unanswered."""

LINE = 64
"""Bytes that a line of OUTPUT counts for, beside its text."""

_HELLO = Struct("<HBBI")
_ITEM = Struct("<QQBQdiQ")
"""Number, definition, kind; the drone that is to do it (0: any); seconds that it may run (nan: as
the pool says), retries (-1: as the pool says); bytes."""
_RESULT = Struct("<QBHQ")
"""Number, status; bytes of the tail of what it printed, bytes of that and of the payload before
it."""
_NUMBER = Struct("<Q")
_COUNT = Struct("<H")
_LABELS = Struct("<HH")


Result = tuple[int, int, bytes, str]
"""Number, status, payload, the tail of what was printed."""
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
    """What the other end says of itself."""

    why: str | None  # we do not understand each other, if so
    drones: int
    who: dict[str, Any]


def hello(drones: int = 0, **who: Any) -> list[bytes]:
    version = _HELLO.pack(PROTOCOL, *sys.version_info[:2], drones)
    return [HELLO, version, json.dumps({"version": __version__, **who}).encode()]


def read_hello(frames: Sequence[bytes], it: str, we: str) -> Hello:
    """`it` and `we`: what the other end is called, and this one. Raises `Malformed`."""
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
    """JSON: what is not work."""
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
    """Of OUTPUT: text, drone, stream; a worker's with the tag, too."""
    lines = read_note(frames).get("lines")
    if not isinstance(lines, list) or not all(
        isinstance(each, list) and len(each) == parts for each in lines
    ):
        raise Malformed("lines that are none")
    if not all(isinstance(part, str) for each in lines for part in each):
        raise Malformed("lines that are no text")
    return [tuple(each) for each in lines]


def pack_share(number: int, asked: int, runs: Sequence[Any]) -> list[bytes]:
    """`runs`: bytes-like, a pickle and its buffers. `asked`: the number of what will be
    answered."""
    note = {"number": number, "id": asked, "sizes": [len(run) for run in runs]}
    return [SHARE, json.dumps(note).encode(), *(piece for run in runs for piece in _cut(run))]


def read_share(frames: Sequence[bytes]) -> tuple[int, int, list[list[bytes]]]:
    """Number, what to answer, the pieces of each run. Raises `Malformed`."""
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
    """Raises `Malformed`."""
    if len(packed) < _COUNT.size or len(packed) < (
        end := _COUNT.size + _COUNT.unpack_from(packed)[0] * _NUMBER.size
    ):
        raise Malformed("a call without the numbers of what it shares")
    return [number for (number,) in _NUMBER.iter_unpack(packed[_COUNT.size : end])], packed[end:]


def pack_definition(label: str, payload: bytes, tag: str = "") -> bytes:
    """The payload of an item that defines: with what it is called, for whoever is told of it, and
    whose it is."""
    name, whose = label.encode("utf-8", "replace")[:200], tag.encode()
    return _LABELS.pack(len(name), len(whose)) + name + whose + payload


def read_definition(packed: bytes) -> tuple[str, bytes, str]:
    """Label, payload, tag. Raises `Malformed`."""
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
