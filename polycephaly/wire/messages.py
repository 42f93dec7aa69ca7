"""The vocabulary between hub and drone: one table.

    frame        hub -> drone (DEALER)                    drone -> hub (ROUTER: first the sender's identity)
    0  HEAD      type byte, then for WORK and RESULTS     the same
                 one fixed-size entry per item; for
                 the others an array of numbers
    1  BODY      the items' payloads, end to end          the same
    2+ LARGE     one payload each, of the items           the same
                 whose entry says so

    type      direction  meaning
    HELLO     drone ->   I am up; numbers: (PROTOCOL, pid)
    WORK      -> drone   a batch: definitions to keep or to forget, and calls of them, in order
    RESULTS   drone ->   a batch of outcomes
    CANCEL    -> drone   numbers: withdraw these, or interrupt the one that runs (0: whichever runs)
    RECALL    -> drone   give back what you have not started
    RETURNED  drone ->   numbers: this I have not started and shall not start
    STOP      -> drone   finish what you have, then end

A batch carries one pickle per piece of work, opaque here: what is wrong with one harms no neighbour.
Frames are checked for shape and size before anything in them is used; `Malformed` says what was wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct, error, unpack
from struct import pack as struct_pack
from typing import Any, NamedTuple

__all__ = ["Item", "Malformed", "Outcome", "head_type", "numbers", "pack_kept", "pack_numbers", "pack_outcomes",
           "pack_work", "unpack_kept", "unpack_outcomes", "unpack_work"]  # fmt: skip

PROTOCOL = 1

HELLO, WORK, RESULTS, CANCEL, RECALL, RETURNED, STOP = b"H", b"W", b"R", b"C", b"B", b"Y", b"S"

# What a WORK item asks for.
DEFINE_CALLABLE, DEFINE_CODE, FORGET, CALL, CALL_KEYWORDS, CALL_FILLED = range(1, 7)
# How a RESULTS item ended.
VALUE, ERROR, WITHDRAWN = range(1, 4)

LARGE = 0x80
"""Set in an item's kind: its payload is a frame of its own, so that it is not copied into the body."""
LARGE_FROM = 64 * 1024

_ITEM = Struct("<QBIQ")  # number, kind, definition, payload bytes
_OUTCOME = Struct("<QBddII")  # number, status, started, finished, payload bytes (or large index), output bytes
_LARGE_SIZE = 0xFFFFFFFF


class Malformed(ValueError):
    """A message that is not one of ours. It is logged and dropped."""


class Item(NamedTuple):
    """One entry of a WORK batch. `number` is the work's, or the definition's for DEFINE and FORGET."""

    number: int
    kind: int
    definition: int
    payload: Any  # bytes-like


class Outcome(NamedTuple):
    """One entry of a RESULTS batch. Times are `time.monotonic` seconds, the same clock in every process."""

    number: int
    status: int
    started: float
    finished: float
    payload: Any  # bytes-like; empty with VALUE stands for None
    output: str


def head_type(frames: Sequence[Any]) -> bytes:
    """The type byte of a message, given its frames without the identity."""
    if not frames or not len(frames[0]):
        raise Malformed("a message without a head")
    return bytes(frames[0][:1])


def pack_numbers(kind: bytes, values: Sequence[int] = ()) -> list[bytes]:
    return [kind + struct_pack(f"<{len(values)}Q", *values)]


def numbers(frames: Sequence[Any]) -> tuple[int, ...]:
    if len(frames) != 1 or len(frames[0]) % 8 != 1:
        raise Malformed(f"{len(frames)} frames: not an array of numbers")
    body = frames[0][1:]
    return unpack(f"<{len(body) // 8}Q", body)


def pack_work(items: Iterable[tuple[int, int, int, bytes]]) -> list[bytes]:
    """Frames of a WORK batch of (number, kind, definition, payload)."""
    head, body, large = [WORK], [], []
    pack = _ITEM.pack
    for number, kind, definition, payload in items:
        size = len(payload)
        if size < LARGE_FROM:
            body.append(payload)
        else:
            kind |= LARGE
            large.append(payload)
        head.append(pack(number, kind, definition, size))
    return [b"".join(head), b"".join(body), *large]


def unpack_work(frames: Sequence[Any]) -> list[Item]:
    entries, body = _batch(frames, _ITEM)
    items: list[Item] = []
    at, large = 0, iter(frames[2:])
    for number, kind, definition, size in entries:
        if kind & LARGE:
            payload = next(large, None)
            if payload is None or len(payload) != size:
                raise Malformed(f"item {number}: its large payload is missing or not {size} bytes")
        else:
            payload = body[at : at + size]
            at += size
        if not DEFINE_CALLABLE <= kind & ~LARGE <= CALL_FILLED:
            raise Malformed(f"item {number}: unknown kind {kind & ~LARGE}")
        items.append(Item(number, kind & ~LARGE, definition, payload))
    _all_used(at, body, large)
    return items


def pack_outcomes(outcomes: Iterable[tuple[int, int, float, float, bytes, bytes]]) -> list[bytes]:
    """Frames of a RESULTS batch of (number, status, started, finished, payload, output)."""
    head, body, large = [RESULTS], [], []
    pack = _OUTCOME.pack
    for number, status, started, finished, payload, output in outcomes:
        size = len(payload)
        if size < LARGE_FROM:
            body.append(payload)
        else:
            status |= LARGE
            large.append(payload)
            size = _LARGE_SIZE
        if output:
            body.append(output)
        head.append(pack(number, status, started, finished, size, len(output)))
    return [b"".join(head), b"".join(body), *large]


def unpack_outcomes(frames: Sequence[Any]) -> list[Outcome]:
    entries, body = _batch(frames, _OUTCOME)
    outcomes: list[Outcome] = []
    at, large = 0, iter(frames[2:])
    for number, status, started, finished, size, printed in entries:
        if status & LARGE:
            payload = next(large, None)
            if payload is None or size != _LARGE_SIZE:
                raise Malformed(f"outcome {number}: its large payload is missing")
        else:
            payload = body[at : at + size]
            at += size
        if not VALUE <= status & ~LARGE <= WITHDRAWN:
            raise Malformed(f"outcome {number}: unknown status {status & ~LARGE}")
        output = ""
        if printed:
            output = bytes(body[at : at + printed]).decode("utf-8", "replace")
            at += printed
        outcomes.append(Outcome(number, status & ~LARGE, started, finished, payload, output))
    _all_used(at, body, large)
    return outcomes


def pack_kept(outcome: tuple[int, int, float, float, bytes, bytes]) -> bytes:
    """One outcome as it is kept in the running page until it is sent; see launch/page.py."""
    number, status, started, finished, payload, output = outcome
    return b"".join((_OUTCOME.pack(number, status, started, finished, len(payload), len(output)), payload, output))


def unpack_kept(kept: bytes) -> list[Outcome]:
    outcomes: list[Outcome] = []
    at = 0
    while at + _OUTCOME.size <= len(kept):
        number, status, started, finished, size, printed = _OUTCOME.unpack_from(kept, at)
        at += _OUTCOME.size
        payload, output = kept[at : at + size], kept[at + size : at + size + printed]
        at += size + printed
        outcomes.append(Outcome(number, status, started, finished, payload, output.decode("utf-8", "replace")))
    if at != len(kept):
        raise Malformed(f"{len(kept)} bytes kept, of which {at} make sense")
    return outcomes


def _batch(frames: Sequence[Any], entry: Struct) -> tuple[list[tuple[Any, ...]], memoryview]:
    if len(frames) < 2:
        raise Malformed(f"a batch of {len(frames)} frames")
    try:
        return list(entry.iter_unpack(frames[0][1:])), memoryview(frames[1])
    except error as wrong:
        raise Malformed(f"a batch with a head of {len(frames[0])} bytes") from wrong


def _all_used(at: int, body: memoryview, large: Any) -> None:
    # A slice past the end is short, never an error: so the sum of sizes must be held against the body.
    if at != len(body) or next(large, None) is not None:
        raise Malformed(f"payloads of {at} bytes in a body of {len(body)}, or large frames too many")
