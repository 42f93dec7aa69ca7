"""The messages between a server and its clients and joined hosts.

wire/messages.py is the counterpart for a controller and its drones.

A message is a list of frames: its type, a head of items of one size, and the items' payloads end to
end, cut into chunks of at most `CHUNK_BYTES` bytes. Thus no frame is large, and libzmq refuses
larger ones: a peer without a key could otherwise fill the memory with one frame. A longer message
to a server is sent as several messages (PART), because libzmq keeps all frames of one message in
memory until the last has arrived. server/flow_control.py limits how much a peer may send.

The server checks shapes and sizes only. Payloads are unpickled in drones and in the client that
submitted the task. The server reads only plain data: numbers, labels and JSON.

In every version of the protocol, a HELLO has the same number of frames and its second frame has the
same layout, so that peers of different versions can be told why they are refused.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Any, NamedTuple

from ...errors import Malformed
from ...wire.functions import KnownFunctions
from ...wire.messages import CALL, FORGET, FRESH

# Raised if pickles name other modules or functions, or messages are packed otherwise.
PROTOCOL = 11

# Between a client and its server:
#
#     client   message   server   contents
#       <──>   HELLO              protocol, Python version, properties; number of drones
#       <──    REFUSED            the reason
#        ──>   WORK               head, payloads: definitions, calls, definitions to forget
#       <──    RESULTS            head, payloads
#       <──    RUNNING            numbers of calls that are known to have begun; sent now and then
#       <──    OUTPUT             lines that the client's tasks have printed
#        ──>   OUTPUT_ACK         bytes of OUTPUT that were handled; allows as many more
#        ──>   SHARE              JSON, a pickle, its buffers: for shared memory; answered by REPLY
#        ──>   RELEASE            numbers of shared values that no later call will name
#       <──>   CANCEL             numbers of calls, running ones included; from the server: all
#        ──>   RECALL             numbers of calls; cancels only those that have not begun
#        ──>   REQUEST            JSON: an admin request (status, stop, drones ...)
#       <──    REPLY              JSON: the reply, with the number of the request
#       <──>   PING               a number that the client returns: proves that the client is there
#        ──>   ALIVE              every `client_sign_seconds`, also while PINGs wait behind data
#        ──>   PART               one frame, which precedes those of the next message
#        ──>   BYE                the client leaves; its remaining calls are cancelled
#
# The HELLO of a joined host (server/join.py) declares its role; the host receives tasks:
#
#      host    message   server   contents
#        ──>   WINDOW             how many calls the host would hold; 0: the host leaves
#       <──    WORK, CANCEL, REQUEST   as from a client; definitions carry the tag of their client
#       <──    RECALL             how many of the calls that have not begun to give back
#        ──>   RESULTS, RUNNING, REPLY   as from a server
#        ──>   OUTPUT             with the tag of the client that each line belongs to
#        ──>   RETURNED           numbers of calls that have not begun and will not begin
#        ──>   HOST_STATUS        JSON: the state of the host's drones; also a heartbeat
HELLO, REFUSED, WORK, RESULTS = b"H", b"E", b"W", b"R"
CANCEL, RECALL, PING, BYE = b"C", b"B", b"P", b"Q"
OUTPUT, OUTPUT_ACK, REQUEST, REPLY = b"O", b"S", b"A", b"T"
WINDOW, RETURNED, HOST_STATUS = b"V", b"Y", b"N"
PART = b"M"
SHARE, RELEASE = b"D", b"U"
RUNNING = b"G"
ALIVE = b"L"

CHUNK_BYTES = 1 << 20
MAX_FRAME_BYTES = 2 * CHUNK_BYTES
"""Maximal bytes of a frame. Heads are not cut, but never hold that many items."""

MAX_UNANSWERED_CALLS = 2048
"""Maximal number of sent, unanswered calls of one client."""

MAX_UNANSWERED_BYTES = 64 << 20
"""Bytes of sent, unanswered calls at which a client stops sending."""

MAX_EXTRA_BYTES = 64 << 10
"""Maximal bytes of the rare fields of one item."""

EXTRA_BYTE_COST = 32
"""How many bytes of a call one byte of its rare fields counts for: the server parses these."""

MAX_SHARED_VALUES = 4096
"""Maximal number of shared values in one call: their numbers fit into `MAX_EXTRA_BYTES`."""

MAX_UNANSWERED_REQUESTS = 16
"""Maximal number of sent, unanswered requests (REQUEST, SHARE) of one client."""

LINE_OVERHEAD_BYTES = 64
"""Bytes that a line of OUTPUT counts for, in addition to its text."""

_MAX_RETRIES = (1 << 31) - 1  # more are as good as these
_HELLO = Struct("<HBBI")
_ITEM = Struct("<QQBQdiiqIQ")
"""Number, definition, kind, target drone (0: any), time limit in seconds (nan: as the pool),
retries (-1: as the pool), priority, index in a `map` (-1: none), bytes of the rare fields, of these
and the payload.
"""
_RESULT = Struct("<QBHQ")
"""Number; status; bytes of the output tail; bytes of the payload and the tail after it."""
_NUMBER = Struct("<Q")


Result = tuple[int, int, bytes, str]
"""Number, status, payload, output tail."""
_MAX_TAIL_BYTES = 1 << 15


class Item(NamedTuple):
    number: int
    definition: int
    kind: int
    payload: bytes = b""
    target: int = 0
    timeout: float | None = None
    retries: int | None = None
    priority: int = 0
    map_index: int | None = None  # of a call in a `map`
    # Of a call: "needs" of resources, "shared" values by number. Of a definition: "label" for
    # reports, "tag" of its client.
    extra: bytes = b""  # as JSON

    @property
    def is_call(self) -> bool:
        return self.kind & ~FRESH >= CALL

    @property
    def nbytes(self) -> int:
        """The bytes for which a call counts towards `MAX_UNANSWERED_BYTES`."""
        return len(self.payload) + EXTRA_BYTE_COST * len(self.extra)

    def read_extra(self) -> dict[str, Any]:
        return read_json([b"", self.extra]) if self.extra else {}


def pack_hello(drones: int = 0, **properties: Any) -> list[bytes]:
    version = _HELLO.pack(PROTOCOL, *sys.version_info[:2], drones)
    return [HELLO, version, json.dumps(properties).encode()]


def read_hello(
    frames: Sequence[bytes], peer: str, this_side: str, only_requests: bool = False
) -> tuple[int, dict[str, Any]]:
    """Return the peer's number of drones and its properties. Raise `Malformed`, also if the two
    sides are incompatible. `peer` and `this_side` name them in messages. With `only_requests`, of
    this side or among the properties, no function is sent: each side may run any Python.
    """
    if len(frames) != 3 or len(frames[1]) != _HELLO.size:
        raise Malformed("a malformed HELLO message")
    protocol, major, minor, drones = _HELLO.unpack(frames[1])
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if protocol != PROTOCOL:
        older, newer = (peer, this_side) if protocol < PROTOCOL else (this_side, peer)
        raise Malformed(
            f"{peer} speaks protocol {protocol} and {this_side} protocol {PROTOCOL}: "
            f"the polycephaly of {older} is older than that of {newer}; "
            "use the same version for both"
        )
    properties = read_json(frames[1:])
    if f"{major}.{minor}" != python and not (only_requests or properties.get("only_requests")):
        raise Malformed(
            f"{peer} runs Python {major}.{minor} and {this_side} Python {python}: functions cannot "
            "be sent between them; use the same version for both"
        )
    return drones, properties


def pack_json(kind: bytes, fields: dict[str, Any]) -> list[bytes]:
    """Pack data that is no task, as JSON."""
    return [kind, *_to_chunks([json.dumps(fields).encode()])]


def read_json(frames: Sequence[bytes]) -> dict[str, Any]:
    try:
        fields = json.loads(b"".join(frames[1:]))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"invalid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Malformed("JSON that is not an object")
    return fields


def read_lines(frames: Sequence[bytes], parts: int) -> list[tuple[Any, ...]]:
    """Parse the lines of OUTPUT: text, drone, stream, and from a joined host the tag."""
    lines = read_json(frames).get("lines")
    if not isinstance(lines, list) or not all(
        isinstance(each, list) and len(each) == parts for each in lines
    ):
        raise Malformed("malformed output lines")
    if not all(isinstance(part, str) for each in lines for part in each):
        raise Malformed("output lines that are not text")
    return [tuple(each) for each in lines]


def pack_shared_value(number: int, buffers: Sequence[Any]) -> list[bytes]:
    """Pack a SHARE. `buffers` are bytes-like, a pickle and its buffers.

    `number` is that of the value, and of the request that the reply answers.
    """
    fields = {"id": number, "sizes": [len(buffer) for buffer in buffers]}
    chunks = (chunk for buffer in buffers for chunk in _split(buffer))
    return [SHARE, json.dumps(fields).encode(), *chunks]


def read_shared_value(frames: Sequence[bytes]) -> tuple[int, list[list[bytes]]]:
    """Return the number and the chunks of each buffer. Raise `Malformed`."""
    fields = read_json(frames[:2])
    number, sizes = fields.get("id"), fields.get("sizes")
    if not (isinstance(number, int) and isinstance(sizes, list) and sizes):
        raise Malformed("a shared value without a number or sizes")
    chunks = iter(frames[2:])
    buffers: list[list[bytes]] = []
    for size in sizes:
        buffer: list[bytes] = []
        while isinstance(size, int) and size > 0:
            buffer.append(chunk := next(chunks, b""))
            if not chunk:
                raise Malformed("an incomplete shared value")
            size -= len(chunk)
        if size != 0 or not buffer:
            raise Malformed("a shared value whose sizes differ from the declared ones")
        buffers.append(buffer)
    if next(chunks, None) is not None:
        raise Malformed("a shared value with more data than declared")
    return number, buffers


def pack_extra(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode() if fields else b""


def definition_items(known: KnownFunctions, function: Any, **extra: str) -> list[Item]:
    """Return the items that define `function` for a peer, and first forget the oldest functions of
    `known`, if there are too many. The payload of `function` is bytes.
    """
    forgotten = forget_items(known.add(function))
    definition = Item(function.number, 0, function.kind, function.payload, extra=pack_extra(extra))
    return [*forgotten, definition]


def forget_items(numbers: Iterable[int]) -> list[Item]:
    return [Item(number, 0, FORGET) for number in numbers]


def pack_work(items: Sequence[Item]) -> list[bytes]:
    head = b"".join(
        _ITEM.pack(
            number, definition, kind, target, math.nan if timeout is None else timeout,
            -1 if retries is None else min(retries, _MAX_RETRIES),
            priority, -1 if index is None else index, len(extra), len(extra) + len(payload),
        )
        for number, definition, kind, payload, target, timeout, retries, priority, index, extra
        in items
    )  # fmt: skip
    body = [part for item in items for part in (item.extra, item.payload)]
    return [WORK, head, *_to_chunks(body)]


def read_work(frames: Sequence[bytes]) -> Iterator[Item]:
    for head, payload in _read_items(_ITEM, frames):
        number, definition, kind, target, timeout, retries, priority, index, extra, size = head
        if extra > min(size, MAX_EXTRA_BYTES):
            raise Malformed(f"an item of {size} bytes with {extra} bytes of rare fields")
        yield Item(
            number,
            definition,
            kind,
            payload[extra:] if extra else payload,
            target,
            timeout if timeout > 0 else None,
            retries if retries >= 0 else None,
            priority,
            index if index >= 0 else None,
            bytes(payload[:extra]),
        )


def read_sizes(sizes: Any) -> dict[str, int]:
    """Check the sizes of a pool's resources, or what a call needs. Raise `Malformed`."""
    if not isinstance(sizes, dict) or not all(type(size) is int for size in sizes.values()):
        raise Malformed("resources without sizes")
    return sizes


def pack_results(results: Sequence[Result]) -> list[bytes]:
    heads: list[bytes] = []
    body: list[bytes] = []
    for number, status, payload, text in results:
        tail = text.encode()[-_MAX_TAIL_BYTES:]
        heads.append(_RESULT.pack(number, status, len(tail), len(payload) + len(tail)))
        body += payload, tail
    return [RESULTS, b"".join(heads), *_to_chunks(body)]


def read_results(frames: Sequence[bytes]) -> Iterator[Result]:
    for (number, status, tail, size), payload_and_tail in _read_items(_RESULT, frames):
        if tail > size:
            raise Malformed("an output tail that is longer than its result")
        end = size - tail
        yield (
            number,
            status,
            payload_and_tail[:end] if tail else payload_and_tail,
            payload_and_tail[end:].decode("utf-8", "replace") if tail else "",
        )


def _to_chunks(payloads: list[bytes]) -> list[bytes]:
    body = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    return [body] if len(body) <= CHUNK_BYTES else _split(body)


def _split(body: Any) -> list[Any]:
    return [body[start : start + CHUNK_BYTES] for start in range(0, len(body), CHUNK_BYTES)]


def _read_items(layout: Struct, frames: Sequence[bytes]) -> Iterator[tuple[tuple[Any, ...], bytes]]:
    if len(frames) < 3 or not frames[1] or len(frames[1]) % layout.size:
        raise Malformed("a malformed message head")
    heads = list(layout.iter_unpack(frames[1]))
    body = frames[2] if len(frames) == 3 else b"".join(frames[2:])
    if sum(head[-1] for head in heads) != len(body):
        raise Malformed("payloads whose size differs from the message head")
    offset = 0
    for head in heads:
        yield head, body[offset : offset + head[-1]]
        offset += head[-1]


def pack_numbers(kind: bytes, numbers: Sequence[int]) -> list[bytes]:
    return [kind, b"".join(map(_NUMBER.pack, numbers))]


def read_numbers(frames: Sequence[bytes]) -> list[int]:
    if len(frames) != 2 or len(frames[1]) % _NUMBER.size:
        raise Malformed("a malformed list of numbers")
    return [number for (number,) in _NUMBER.iter_unpack(frames[1])]
