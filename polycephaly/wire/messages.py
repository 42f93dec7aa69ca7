"""Messages between reactor and drone, and their binary format.

frame        WORK                              others
0  HEAD      type byte, an entry per item      type, numbers
1  BODY      the items' payloads, end to end
2+ LARGE     one payload each, of the items whose entry has the LARGE bit

A drone writes records (ring.py):
    key                          record
    number, started, finished    the value of a call, if it is small and immutable
    any int                      (number, first, started, finished, values): of calls of a chunk
    any int                      (number, status, started, finished, payload, output): an outcome
    any int                      (frames,): a message

The first key, of 24 bytes, spares such a value a tuple: to make thousands of them would start the
garbage collector.

Times are seconds of `time.monotonic`, the same clock in every process. The status of an outcome may
have the bit SHARED; its payload is empty for None.

type      direction  meaning
HELLO     drone ->   the drone is up; numbers: (PROTOCOL, pid)
WORK      -> drone   a batch: definitions to keep or forget, and calls of them, in order
CANCEL    -> drone   numbers: withdraw these, or interrupt the one of them that runs
INTERRUPT -> drone   numbers: interrupt the one of them that runs
RECALL    -> drone   give back the tasks that have not started
FETCH     -> drone   numbers: pack these kept values, and send them (PACKED, or NOT_PACKED)
TELL      -> drone   write what is done of the running chunk, ring the bell, and beat
RETURNED  drone ->   two numbers for each task that will not start here: its own, and how many calls
                     of a chunk, from its end, will not (0: nothing of the task was started)
FRAMES    both ways  numbers (request,); reply: the request, JSON: where threads and tasks are
PROFILE   both ways  numbers (request, hertz): sample so often; 0: end, and reply as for FRAMES
STOP      -> drone   finish the tasks received, then end
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from pickle import dumps, loads
from struct import Struct, error, unpack, unpack_from
from struct import pack as struct_pack
from typing import Any

from ..errors import Malformed
from ..runtime.signal_handlers import is_of_signal_handler
from .ring import FORMAT, Record, Records, decode, next_key

# A batch carries one pickle per task, opaque here, so a broken pickle affects only its own task.
# The shape of frames and records is checked before their content is used; `Malformed` names the
# error.
PROTOCOL = 4

HELLO, WORK, CANCEL, RECALL = b"H", b"W", b"C", b"B"
RETURNED, FRAMES, PROFILE, STOP = b"Y", b"F", b"P", b"S"
FETCH, TELL, INTERRUPT = b"G", b"T", b"I"
URGENT = frozenset((CANCEL, INTERRUPT, RECALL, FRAMES, PROFILE, FETCH, TELL))
"""Those that do not wait until the task that runs is done."""

# Kinds of WORK items.
DEFINE_CALLABLE, DEFINE_CODE, DEFINE_OVERLAPPING, FORGET = range(1, 5)
DEFINES = (DEFINE_CALLABLE, DEFINE_CODE, DEFINE_OVERLAPPING)
CALL, CALL_KEYWORDS, CALL_FILLED, CALL_CHUNK, CALLS = range(5, 10)
RELEASE_RANGE, STORE, DROP = range(10, 13)
# Statuses of outcomes.
VALUE, ERROR, WITHDRAWN, ANSWERS = range(1, 5)
RANGE_RELEASED, EVENT_LOG, PACKED, NOT_PACKED, KEPT_VALUES, PROCESSOR_TIME = range(5, 11)
# CALLS stands for many tasks at once, whose arguments are small and immutable: a pickle of
# (numbers, arguments). EVENT_LOG belongs to no task: it is the event log of green threads, as JSON
# (timeline/event_log.py). STORE and DROP concern a kept value (drone/store.py), as does the message
# FETCH, which PACKED and NOT_PACKED answer: their number is that of the task whose value is kept,
# or the number that the drone gave to the value. KEPT_VALUES comes before the result of a task in
# which are handles of values made by the drone, which it lists, or ends of channels: such a result
# must be unpickled on arrival. PROCESSOR_TIME comes before the result of a task, too: its end time
# is the seconds of processor time that the task took.
# RELEASE_RANGE and RANGE_RELEASED belong to no task: their number is that of an object reference
# (memory/references.py) that its receiver no longer needs.

LARGE = 0x80
"""Bit of an item's kind: its payload is a frame of its own, which avoids a copy into the body."""
MIN_LARGE_BYTES = 64 * 1024
SHARED = 0x40
"""Bit of an item's kind: its payload is the header (memory/references.py) of shared memory."""
KEEP = 0x20
"""Bit of a call's kind: the drone keeps the value, and the answer only describes this value."""
FRESH = KEEP
"""The same bit of a definition's kind: each call gets a function object of its own."""

_KINDS = frozenset(range(DEFINE_CALLABLE, DROP + 1))
_STATUSES = frozenset(range(VALUE, PROCESSOR_TIME + 1))
_WITHOUT_KIND_BITS = ~(SHARED | KEEP)
_WITHOUT_SHARED = ~SHARED

POSITION = Struct("<Q")
"""Behind an urgent message to a local drone: how many others were sent before that it is about."""
_ITEM = Struct("<QBQQ")  # number, kind, definition, payload bytes
_VALUE_KEY = Struct("=Qdd")  # number, times of start and end
_pack_value_key = Struct("=5sQdd").pack
_VALUE_KEY_BYTES = _VALUE_KEY.size
_VALUE_KEY_HEAD = b"s" + struct_pack("<I", _VALUE_KEY_BYTES)  # of bytes, in the format of marshal
_OUTCOME_TYPES = (int, int, float, float, bytes, bytes)
_CHUNK_VALUES_TYPES = (int, int, float, float, list)


# Entries are plain tuples: creating a named tuple takes longer than pickling its content.
Item = tuple[int, int, int, Any]
"""One entry of a WORK batch: number (the task's, or the definition's for DEFINE and FORGET), kind
(with SHARED), definition, payload (bytes-like).
"""


def message_type(frames: Sequence[Any]) -> bytes:
    """Return the type byte of a message, given its frames without the identity."""
    if not frames or not frames[0]:
        raise Malformed("a message without a head")
    return bytes(frames[0][:1])


def pack_numbers(kind: bytes, values: Sequence[int] = ()) -> list[bytes]:
    return [kind + struct_pack(f"<{len(values)}Q", *values)]


def unpack_numbers(frames: Sequence[Any]) -> tuple[int, ...]:
    if len(frames) != 1 or len(frames[0]) % 8 != 1:
        raise Malformed(f"{len(frames)} frames: not an array of numbers")
    body = frames[0][1:]
    return unpack(f"<{len(body) // 8}Q", body)


def pack_returned(returned: Iterable[tuple[int, int]]) -> list[bytes]:
    return pack_numbers(RETURNED, [*chain.from_iterable(returned)])


def unpack_returned(frames: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the numbers of tasks, each with how many of its calls were returned."""
    numbers = unpack_numbers(frames)
    if len(numbers) % 2:
        raise Malformed(f"{len(numbers)} numbers: a task, or how many calls of it, is missing")
    return [*zip(numbers[::2], numbers[1::2], strict=True)]


def pack_frames(request: int, answer: dict[str, Any], kind: bytes = FRAMES) -> list[bytes]:
    return [kind + struct_pack("<Q", request) + json.dumps(answer).encode()]


def unpack_frames(frames: Sequence[Any]) -> tuple[int, dict[str, Any]]:
    """Return the number of the request and the reply to it."""
    try:
        (request,) = unpack_from("<Q", frames[0], 1)
        answer = json.loads(bytes(frames[0][9:]))
    except (error, ValueError, RecursionError) as cause:
        raise Malformed(f"a malformed reply to FRAMES: {cause}") from cause
    if len(frames) != 1 or not isinstance(answer, dict):
        raise Malformed("a malformed reply to FRAMES")
    return request, answer


class TaskBatch:
    """Builder of a WORK message.

    Only bytes are stored: thousands of tuples would trigger the garbage collector.
    """

    __slots__ = ("_body", "_head", "_large")

    def __init__(self) -> None:
        self._head = [WORK]
        self._body: list[bytes] = []
        self._large: list[bytes] = []

    def add(self, number: int, kind: int, definition: int, payload: bytes) -> None:
        size = len(payload)
        if size < MIN_LARGE_BYTES:
            self._body.append(payload)
        else:
            kind |= LARGE
            self._large.append(payload)
        self._head.append(_ITEM.pack(number, kind, definition, size))

    def add_calls(self, definition: int, numbers: list[int], calls: list[tuple[Any, ...]]) -> None:
        """Add calls that travel together."""
        self.add(0, CALLS, definition, dumps((numbers, calls), 5))

    def frames(self) -> list[bytes]:
        return [b"".join(self._head), b"".join(self._body), *self._large]


def unpack_work(frames: Sequence[Any]) -> list[Item]:
    if len(frames) < 2:
        raise Malformed(f"a batch of {len(frames)} frames")
    try:
        entries = _ITEM.iter_unpack(frames[0][1:])
    except error as cause:
        raise Malformed(f"a batch with a head of {len(frames[0])} bytes") from cause
    body, large = frames[1], iter(frames[2:])
    items: list[Item] = []
    at = 0
    for number, kind, definition, size in entries:
        if kind & LARGE:
            kind &= ~LARGE
            payload = next(large, None)
            if payload is None or len(payload) != size:
                raise Malformed(f"item {number}: large payload missing, or not {size} bytes")
        else:
            payload = body[at : at + size]
            at += size
        if kind & _WITHOUT_KIND_BITS not in _KINDS:
            raise Malformed(f"item {number}: unknown kind {kind}")
        items.append((number, kind, definition, payload))
    if at != len(body) or next(large, None) is not None:
        raise Malformed(
            f"payloads of {at} bytes in a body of {len(body)} bytes, or too many large frames"
        )
    return items


def pack_outcome(
    number: int, status: int, started: float, finished: float, payload: bytes, output: bytes = b""
) -> bytes:
    record = number, status, started, finished, payload, output
    return next_key() + marshal.dumps(record, FORMAT)


def pack_value(number: int, started: float, finished: float, value: Any) -> bytes:
    """Return the record of a value of `BATCHED_TYPES` (shareable.py)."""
    key = _pack_value_key(_VALUE_KEY_HEAD, number, started, finished)
    return key + marshal.dumps(value, FORMAT)


def unpack_value_key(key: bytes) -> tuple[int, float, float]:
    """Return number, start and end of the call with that key. Raises `Malformed`."""
    if len(key) != _VALUE_KEY_BYTES:
        raise Malformed(f"the key of a value that has {len(key)} bytes")
    number, started, finished = _VALUE_KEY.unpack(key)
    return number, started, finished


def unpack_value_keys(keys: Collection[bytes]) -> tuple[list[int], list[float], list[float], float]:
    """Return numbers, start times and end times of the calls with these keys, and the seconds of
    all. Raises `Malformed`.
    """
    if {*map(len, keys)} != {_VALUE_KEY_BYTES}:
        raise Malformed(f"keys of values that have {max(map(len, keys))} bytes, or fewer")
    words = memoryview(b"".join(keys))
    times: Any = words.cast("d")  # typeshed knows integers only
    started, finished = times[1::3].tolist(), times[2::3].tolist()
    seconds = sum(finished) - sum(started)
    return words.cast("Q")[::3].tolist(), started, finished, seconds


def pack_chunk_values(
    number: int, first: int, started: float, finished: float, values: list[Any]
) -> bytes:
    """Return the record of values of calls of a chunk, from the call `first` on. They are of
    `BATCHED_TYPES` (shareable.py).
    """
    return next_key() + marshal.dumps((number, first, started, finished, values), FORMAT)


def check_chunk_values(record: Record) -> None:
    """Raise `Malformed` unless `record` has that form."""
    if tuple(map(type, record)) != _CHUNK_VALUES_TYPES or not record[4]:
        kinds = ", ".join(type(each).__name__ for each in record)
        raise Malformed(f"values of a chunk that consist of ({kinds})")


def pack_message(frames: list[bytes]) -> bytes:
    return next_key() + marshal.dumps((frames,), FORMAT)


def unpack_records(packed: Iterable[bytes]) -> Records:
    """Return records that were packed one by one, in no ring. Raises `Malformed`."""
    return decode(b"".join(packed))


def task_number(item: tuple[Any, Any]) -> int:
    """Return the number of the task that a record answers, given with its key; -1 of a message.
    Raises `Malformed`.
    """
    key, record = item
    form = form_of(item)
    if form == 0:
        return unpack_value_key(key)[0]
    return record[0] if form > 1 and type(record[0]) is int else -1


def form_of(item: tuple[Any, Any]) -> int:
    """Return how long a record is, given with its key, which tells its form: 0 of a value, -1 of
    what has none.
    """
    key, record = item
    if type(key) is bytes:
        return 0
    return len(record) if type(record) is tuple and record else -1


def check_outcome(record: Record) -> None:
    """Raise `Malformed` unless `record` has the form of an outcome."""
    if tuple(map(type, record)) != _OUTCOME_TYPES:
        kinds = ", ".join(type(each).__name__ for each in record)
        raise Malformed(f"an outcome that consists of ({kinds})")
    if record[1] & _WITHOUT_SHARED not in _STATUSES:
        raise Malformed(f"outcome {record[0]}: unknown status {record[1]}")


def unpack_lists(payload: Any) -> tuple[list[Any], ...]:
    """Return the lists of a CALLS payload: two, of equal length.

    The first list holds integers. Raises `Malformed` if the payload has another shape; from a
    `MemoryError` if there is no memory for a payload that is as it should be.
    """
    try:
        lists = loads(payload)
    except Exception as cause:
        if is_of_signal_handler(cause):
            raise
        is_forged = isinstance(cause, MemoryError) and _claims_too_much(payload)
        error = Malformed(f"a batch pickle: {type(cause).__name__}: {cause}")
        raise error from (None if is_forged else cause)
    if type(lists) is not tuple or len(lists) != 2 or set(map(type, lists)) != {list}:
        raise Malformed("a batch pickle that is not two lists")
    if len(set(map(len, lists))) != 1 or set(map(type, lists[0])) != {int}:
        raise Malformed("a batch pickle whose lists differ in length, or whose numbers are not int")
    return lists


def _claims_too_much(payload: Any) -> bool:
    """Return whether a pickle has a length or an index that exceeds the pickle itself, so that no
    memory would be enough for it.
    """
    from pickletools import genops  # here, because this is rare

    try:
        return any(
            opcode.name == "LONG_BINPUT" and (index or 0) > len(payload)
            for opcode, index, _ in genops(bytes(payload))
        )
    except ValueError:  # cut off: a length exceeds the rest
        return True
