"""Messages that are nearly ours, by the million.

    python tests/fuzz.py --messages 1000000 --seed 7            all stages, so many messages in each
    python tests/fuzz.py --stage decoders --seed 7 --only 1234  one message again: shown, and
    decoded

    originals, made by the packers of polycephaly ──mutations──> message number 1234 of seed 7

    stage       who says it                                     what has to hold
    decoders    nobody: each decoder is given it                it returns, or raises `Malformed`
    reactor     a drone, records and pieces of such             the pool goes on, all promises are
                                                                settled
    drones      the reactor, both, to idle and busy drones      the drone goes on, and so does its
                                                                control thread

Each message follows from seed and number alone. A stage runs in a process of its own, so that
crashes and hangs are findings as others are: the message is printed in hex, and the exit status is
1. What is pickled may raise anything when it is opened, which is done where that is expected; it
must come to an end."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fcntl
import gc
import json
import logging
import marshal
import math
import mmap
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import termios
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from faults import hold_until, wait_for

import polycephaly as poly
from polycephaly.drone import executor as image_runner
from polycephaly.engines.local import drone as image_main
from polycephaly.memory.arena import REGION_BYTES, Arena
from polycephaly.memory.blocks import Store
from polycephaly.memory.references import Received, RefTable, Serialized, load, load_joined
from polycephaly.pool import task
from polycephaly.pool.drone_handle import DroneHandle
from polycephaly.pool.interfaces import State
from polycephaly.pool.profile import read_samples
from polycephaly.pool.stack_requests import read_report
from polycephaly.timeline import Span, event_log
from polycephaly.wire import functions
from polycephaly.wire.exceptions import pack_exception, unpack_exception
from polycephaly.wire.map_chunks import (
    ITEMS,
    ROWS,
    Answers,
    Packed,
    answers_head,
    pack_answers,
    pack_calls,
    unpack_answers,
    unpack_calls,
)
from polycephaly.wire.message_socket import MAX_PACKET_BYTES, MessageSocket
from polycephaly.wire.messages import (
    ANSWERS,
    CALL,
    CALL_CHUNK,
    CALL_FILLED,
    CALL_KEYWORDS,
    CALLS,
    CANCEL,
    DEFINE_CALLABLE,
    DEFINE_CODE,
    DEFINE_OVERLAPPING,
    ERROR,
    EVENT_LOG,
    FETCH,
    FORGET,
    FRAMES,
    HELLO,
    INTERRUPT,
    MIN_LARGE_BYTES,
    POSITION,
    PROCESSOR_TIME,
    PROFILE,
    PROTOCOL,
    RANGE_RELEASED,
    RECALL,
    RELEASE_RANGE,
    RETURNED,
    SHARED,
    STOP,
    TELL,
    VALUE,
    WITHDRAWN,
    Malformed,
    TaskBatch,
    check_outcome,
    message_type,
    pack_frames,
    pack_numbers,
    pack_returned,
    unpack_frames,
    unpack_numbers,
    unpack_returned,
    unpack_value_keys,
    unpack_work,
)  # fmt: skip
from polycephaly.wire.pickling import join_payloads
from polycephaly.wire.ring import FORMAT, next_key

SOON = 20.0  # seconds: what is not there by then hangs
MEMORY = (
    1 << 30
)  # bytes of addresses, beyond what there is: a mutated pickle may ask for any amount
UNLIKELY = 0x7000_0000  # numbers from here on are nobody's

Frames = list[bytes]


def trail_of_one() -> bytes:
    """What a drone tells of its green threads."""
    made = event_log.EventLog()
    event = Span("a function", "", 1.0, 2.0, thread="a thread #1", cpu=0.5, note="7")
    made.events.append(event)
    return made.pop_packed()


def read_trail(payload: Any) -> None:
    try:
        event_log.unpack_events(bytes(payload), "")
    except ValueError as wrong:
        raise Malformed(str(wrong)) from None


class Finding(AssertionError):
    """Something that must not be, and the messages that have brought it about."""

    def __init__(self, what: str, said: Sequence[Frames] = ()) -> None:
        super().__init__(what)
        self.said = [[frame.hex() for frame in frames] for frames in said]

    def __str__(self) -> str:
        shown = "".join(f"\n  message in hex: {' | '.join(frames)}" for frames in self.said[:20])
        return f"{self.args[0]}{shown}"


# -- originals -------------------------------------------------------------------------------------


@contextlib.contextmanager
def memory(region: int = 0) -> Iterator[tuple[Store, RefTable]]:
    """An arena of our own: where the writer of `region` writes, and its reader's account of
    that."""
    arena = Arena(64 << 20)
    try:
        yield Store(arena, region), RefTable(arena, region, lambda: None)
    finally:
        arena.end()


def work_messages(store: Store, ref_table: RefTable, first: int = UNLIKELY) -> list[Frames]:
    """As a reactor says them, of numbers from `first` on, and of definitions from there on too."""
    abs_, code, together, pow_ = range(first, first + 4)
    define = TaskBatch()
    for number, kind, payload in (
        (abs_, DEFINE_CALLABLE, pickle.dumps(abs, 5)),
        (pow_, DEFINE_OVERLAPPING, pickle.dumps(math.hypot, 5)),
        (code, DEFINE_CODE, b"abs(-1)"),
    ):
        define.add(number, kind, 0, payload)
    define.add(first, CALL, abs_, pickle.dumps((-1,), 5))
    calls = TaskBatch()
    calls.add(first + 1, CALL, abs_, pickle.dumps((-2,), 5))
    calls.add_calls(abs_, [first + i for i in range(9)], [(-i,) for i in range(9)])
    calls.add_calls(
        pow_,
        [first + i for i in range(3)],
        [(2.5, "a", None, True, b"bytes")[:2] for _ in range(3)],
    )
    single = TaskBatch()
    single.add(first + 2, CALL_KEYWORDS, abs_, pickle.dumps(((-1,), {"x": [1]}), 5))
    filled = join_payloads([], (pickle.dumps(((-1,), {}), 5), pickle.dumps([1, 2], 5)), store)
    single.add(first + 3, CALL_FILLED, pow_, filled if isinstance(filled, bytes) else b"")
    single.add(first + 4, CALL, code, b"")
    chunks = TaskBatch()
    chunks.add(first + 5, CALL_CHUNK, abs_, pack_calls(ITEMS, False, list(range(40))))
    chunks.add(first + 6, CALL_CHUNK, pow_, pack_calls(ROWS, True, [(1, 2), (3.5, 4)]))
    told = TaskBatch()
    told.add(together, FORGET, 0, b"")
    for number in (1, 2, 3, first):
        told.add(number, RELEASE_RANGE, 0, b"")
    large = TaskBatch()
    large.add(first + 7, CALL, abs_, bytes(MIN_LARGE_BYTES))
    large.add(first + 8, CALL, abs_, pickle.dumps((1,), 5))
    large.add(first + 9, CALL, abs_, bytes(MIN_LARGE_BYTES + 1))
    shared = TaskBatch()
    shared.add(first + 10, CALL | SHARED, abs_, shared_payload(store, ref_table))
    shared.add(first + 11, DEFINE_CALLABLE | SHARED, 0, shared_payload(store, ref_table))
    batches = [define, define, calls, calls, single, chunks, told, shared]
    return [*(each.frames() for each in batches), large.frames()]


def shared_payload(store: Store, ref_table: RefTable) -> bytes:
    segment, places = store.put([[pickle.dumps(("a", 1), 5)], [bytes(5000)]])
    return Serialized(b"", [(segment, *place) for place in places]).pack_header(ref_table)


def order_messages(first: int = UNLIKELY) -> list[Frames]:
    return [
        pack_numbers(CANCEL, (first, first + 1)),
        pack_numbers(INTERRUPT, (first, first + 1)),
        pack_numbers(RECALL),
        pack_numbers(FETCH, (first,)),
        pack_numbers(TELL),
        pack_numbers(FRAMES, (first,)),
        pack_numbers(PROFILE, (first, 100)),
        pack_numbers(PROFILE, (first, 0)),
        pack_numbers(STOP),
    ]


def report_of(number: int) -> dict[str, Any]:
    """Where a drone's work with that number is."""
    frames = [["file.py", 1, "function", "return 1"]]
    return {
        "current": number,
        "tasks": {number: frames},
        "threads": [["a thread", frames]],
        "places": {number: frames[0][:3]},
        "frames": [["function", "file.py", 1]],
        "stacks": [[[0], 1]],
    }


NOBODYS = (UNLIKELY, UNLIKELY + 1)


_OUTCOME = struct.Struct("<QBdd")


def item_of(frames: Frames) -> tuple[Any, Any]:
    """The key and the record of what a drone writes: of a value (of frames that begin with V), an
    outcome (R), or a message. The key of the latter two says nothing."""
    if frames[0][:1] == b"V":
        return frames[0][1:], frames[1] if len(frames) == 2 else tuple(frames)
    if frames[0][:1] != b"R":
        return 0, (frames,)
    try:
        return 0, (*_OUTCOME.unpack(frames[0][1:]), *frames[1:])
    except struct.error:
        return 0, tuple(frames)


def packed_item(item: tuple[Any, Any]) -> bytes:
    key, record = item
    packed_key = marshal.dumps(key, FORMAT) if type(key) is bytes else next_key()
    return packed_key + marshal.dumps(record, FORMAT)


def checked(item: tuple[Any, Any]) -> Any:
    """An outcome, if that is one."""
    key, record = item
    if type(key) is bytes:
        return unpack_value_keys([key])
    check_outcome(record)
    return record


def result_messages(
    store: Store, ref_table: RefTable, known: Sequence[int] = NOBODYS
) -> list[Frames]:
    """As a drone says them, of the work that is `known`."""
    one, other = known[0], known[-1]
    now = time.monotonic()
    try:
        raise ValueError("wrong", [1, 2])
    except ValueError as error:
        failed = pack_exception(error, partial(pickle.dumps, protocol=5))
    value = pickle.dumps({"a": [1, 2.5, None]}, 5)
    answers = pack_answers([1, 2, Packed(value)], True, None, store)
    assert isinstance(answers, bytes)

    def outcome(number: int, status: int, payload: bytes, output: bytes = b"") -> Frames:
        return [b"R" + _OUTCOME.pack(number, status, now, now + 1e-4), payload, output]

    def value_of(number: int, text: bytes) -> Frames:
        return [b"V" + struct.pack("=Qdd", number, now, now + 1e-5), text]

    shared = shared_payload(store, ref_table)
    return [
        outcome(one, VALUE, b""),
        outcome(other, VALUE, value, b"printed\n"),
        outcome(one, ERROR, failed),
        outcome(other, WITHDRAWN, b""),
        outcome(one, RANGE_RELEASED, b""),
        value_of(one, b"text"),
        value_of(other, b""),
        value_of(UNLIKELY + 2, b""),
        outcome(one, ANSWERS, answers_head(0, 3, False) + answers),
        outcome(one, ANSWERS, answers_head(1, 2, False) + answers),
        outcome(other, ANSWERS, answers_head(0, 0, False) + answers),
        outcome(one, ANSWERS, answers_head(1, 1, True) + answers),
        outcome(0, EVENT_LOG, trail_of_one()),
        outcome(one, PROCESSOR_TIME, b""),
        outcome(one, VALUE | SHARED, shared),
        outcome(one, ANSWERS | SHARED, answers_head(0, 3, False) + shared),
        outcome(one, VALUE, bytes(MIN_LARGE_BYTES)),
        pack_returned([(number, 0) for number in known]),
        pack_returned([(number, 1) for number in known]),
        pack_numbers(RETURNED, range(UNLIKELY, UNLIKELY + 4)),
        pack_frames(UNLIKELY, report_of(one)),
        pack_frames(UNLIKELY, {"frames": [["f", "x.py", 1]], "stacks": [[[0], 1]]}, PROFILE),
        pack_numbers(HELLO, (PROTOCOL, os.getpid())),
    ]


# -- mutations -------------------------------------------------------------------------------------

EXTREMES = [
    0, 1, 2, 7, 8, 9, 28, 29, 30, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF,
    2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, REGION_BYTES, REGION_BYTES - 1,
    *(
        int.from_bytes(struct.pack("<d", time), "little")
        for time in (math.nan, math.inf, -1.0, 1e300)
    ),
]  # fmt: skip


def _flip(frames: list[bytearray], frame: bytearray, dice: random.Random) -> None:
    for _ in range(dice.choice((1, 1, 2, 8))):
        if frame:
            frame[_place(frame, dice)] ^= 1 << dice.randrange(8)


def _set_to_extreme(frames: list[bytearray], frame: bytearray, dice: random.Random) -> None:
    at, width = _place(frame, dice), dice.choice((1, 2, 4, 8))
    frame[at : at + width] = (dice.choice(EXTREMES) % (1 << 8 * width)).to_bytes(width, "little")


def _truncate(frames: list[bytearray], frame: bytearray, dice: random.Random) -> None:
    del frame[_place(frame, dice) :]


def _insert(frames: list[bytearray], frame: bytearray, dice: random.Random) -> None:
    at = _place(frame, dice)
    frame[at:at] = dice.randbytes(dice.choice((1, 1, 2, 4, 8, 21, 40)))


def _overwrite(frames: list[bytearray], frame: bytearray, dice: random.Random) -> None:
    at = _place(frame, dice)
    new = dice.randbytes(dice.choice((1, 2, 4, 8, 21)))
    frame[at : at + len(new)] = new


def _cut_out(frames: list[bytearray], frame: bytearray, dice: random.Random) -> None:
    at = _place(frame, dice)
    del frame[at : at + dice.choice((1, 2, 4, 8, 21))]


def _repeat(frames: list[bytearray], frame: bytearray, dice: random.Random) -> None:
    at = _place(frame, dice)
    frame[at:at] = frame[at : at + dice.choice((1, 4, 8, 21, 33, 100))]


def _drop_frame(frames: list[bytearray], frame: bytearray, dice: random.Random) -> None:
    del frames[dice.randrange(len(frames))]


def _repeat_frame(frames: list[bytearray], frame: bytearray, dice: random.Random) -> None:
    frames.insert(dice.randrange(len(frames) + 1), bytearray(frame))


def _new_frame(frames: list[bytearray], frame: bytearray, dice: random.Random) -> None:
    frames.insert(dice.randrange(len(frames) + 1), bytearray(dice.randbytes(dice.randrange(60))))


def _reorder(frames: list[bytearray], frame: bytearray, dice: random.Random) -> None:
    dice.shuffle(frames)


def _place(frame: bytearray, dice: random.Random) -> int:
    """Rather near the beginning, where what the rest depends on is."""
    return (
        dice.randrange(min(len(frame), 48 if dice.random() < 0.5 else 4096) + 1) - 1 if frame else 0
    )


MUTATIONS = [
    _flip, _flip, _set_to_extreme, _set_to_extreme, _truncate, _insert, _overwrite, _cut_out,
    _repeat, _drop_frame, _repeat_frame, _new_frame, _reorder,
]  # fmt: skip


def mutated(frames: Sequence[bytes], dice: random.Random) -> Frames:
    """Some changes to it. One frame at least is left, which may be empty."""
    changed = [bytearray(frame) for frame in frames]
    for _ in range(dice.choice((1, 1, 1, 2, 3, 5))):
        if not changed:
            break
        dice.choice(MUTATIONS)(changed, dice.choice(changed), dice)
    return [bytes(frame) for frame in changed] or [b""]


def message(seed: int, number: int, originals: Sequence[Frames]) -> Frames:
    """Message `number` of `seed`."""
    dice = random.Random(seed << 32 | number)
    how = dice.randrange(32)
    if how == 0:
        return [dice.randbytes(dice.randrange(80)) for _ in range(dice.randint(1, 4))]
    frames = dice.choice(originals)
    if how == 1:  # the head of one with the body of another
        return mutated([*frames[:1], *dice.choice(originals)[1:]], dice)
    if how == 2 and len(frames) > 1:  # its own head, of a body that is its own but for one change
        return [frames[0], *mutated(frames[1:], dice)]
    return list(frames) if how == 3 else mutated(frames, dice)


def well_formed(frames: Sequence[bytes]) -> bytes:
    """As `Lane.send` makes it, of up to two frames."""
    return struct.pack("<IB", len(frames[0]), min(len(frames), 2)) + b"".join(frames[:2])


def packet(frames: Sequence[bytes], dice: random.Random) -> bytes:
    """Packets through a socket pair, well formed or not."""
    whole = well_formed(frames)
    if dice.random() < 0.2:
        (whole,) = mutated([whole], dice)[:1]
    return whole[: MAX_PACKET_BYTES + 1000]


# -- stage: decoders -------------------------------------------------------------------------------


class Decoders:
    """Everything that takes bytes from the other side, given one message after another."""

    def __init__(self) -> None:
        self.counts = {"accepted": 0, "malformed": 0, "opened": 0, "not opened": 0}
        self._stack = contextlib.ExitStack()
        store, self._ref_table = self._stack.enter_context(memory())
        self.originals = [
            *work_messages(store, self._ref_table),
            *order_messages(),
            *result_messages(store, self._ref_table),
        ]
        self._ref_table.lent.clear()
        self._mine, its = MessageSocket.pair()
        self._socket = MessageSocket(its)
        self._stack.callback(self._mine.close)
        self._stack.callback(self._socket.close)

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def decode(self, frames: Frames, dice: random.Random) -> None:
        """Raises `Finding`."""
        self._mine.send(sent := packet(frames, dice))
        heard = self._strictly(self._socket.receive, given=[sent])
        if heard is not None and not heard:
            raise Finding("the socket says that its other end was closed", [[sent]])
        for each in (frames, heard) if heard else (frames,):
            if self._strictly(message_type, each) is not None:
                self._strictly(unpack_numbers, each)
                self._strictly(unpack_returned, each)
                self._report(self._strictly(unpack_frames, each))
                self._work(self._strictly(unpack_work, each) or [])
        item = item_of(frames)
        if self._strictly(checked, item, given=frames) is item[1]:
            self._result(*item[1])
        for frame in frames[:2]:
            self._strictly(unpack_answers, frame)
            self._strictly(Received, frame, self._ref_table)
            self._strictly(Received, frame[22:], self._ref_table)
        self._ref_table.returned.clear()

    def _work(self, items: list[Any]) -> None:
        for _, kind, _, payload in items:
            if kind & SHARED:
                payload = self._strictly(Received, payload, self._ref_table)
            kind &= ~SHARED
            if kind == CALLS:
                self._strictly(image_runner._unpack_calls, payload)
            elif kind == CALL_CHUNK:
                self._opened(unpack_calls, payload)
            elif kind == CALL_FILLED:
                self._opened(load_joined, payload)
            elif kind in (CALL, CALL_KEYWORDS, DEFINE_CALLABLE, DEFINE_OVERLAPPING):
                self._opened(load, payload)

    def _report(self, reply: tuple[int, dict[str, Any]] | None) -> None:
        if reply is not None:
            for read in (read_report, read_samples):
                self._strictly(read, reply[1], given=[repr(reply[1]).encode()])

    def _result(
        self, number: int, status: int, began: float, ended: float, payload: Any, output: bytes
    ) -> None:
        shared, status = status & SHARED, status & ~SHARED
        if status == ANSWERS:
            parts = self._strictly(unpack_answers, payload)
            if parts is None:
                return
            payload = parts[3]
        if shared:
            payload = self._strictly(Received, payload, self._ref_table)
        if status == ERROR:
            self._opened(lambda it: unpack_exception(bytes(it)), payload)
        elif status == ANSWERS:
            self._opened(lambda it: list(Answers(it)), payload)
        elif status == VALUE:
            self._opened(load, payload)
        elif status == EVENT_LOG and not shared:
            self._strictly(read_trail, payload)

    def _strictly(self, decode: Callable[..., Any], *args: Any, given: Any = None) -> Any:
        try:
            value = decode(*args)
        except Malformed:
            self.counts["malformed"] += 1
            return None
        except BaseException as error:
            said = given or (args[0] if isinstance(args[0], list) else [bytes(args[0])])
            raise Finding(f"{decode.__qualname__} raised {error!r}", [said]) from error
        self.counts["accepted"] += 1
        return value

    def _opened(self, open_it: Callable[[Any], Any], payload: Any) -> None:
        """What is pickled may raise what it likes: it is opened where that is expected. It must
        come to an end."""
        try:
            open_it(payload)
        except Exception:
            self.counts["not opened"] += 1
        else:
            self.counts["opened"] += 1


def fuzz_decoders(
    seed: int, first: int, last: int, progress: Callable[[int], object]
) -> dict[str, int]:
    with Decoders() as decoders:
        for number in range(first, last):
            progress(number)
            dice = random.Random(~(seed << 32 | number))
            decoders.decode(message(seed, number, decoders.originals), dice)
        return decoders.counts


# -- what a pool says meanwhile --------------------------------------------------------------------


class Heard(logging.Handler):
    """What polycephaly logs, and what drones print. As a context manager: instead of showing it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.strangers = self.dropped = 0
        self.refused = 0  # by drones
        self.bugs: list[Finding] = []
        self.lines: list[str] = []
        self.marks: set[str] = set()
        self._news = threading.Condition()

    def __enter__(self) -> Heard:
        self._log = logging.getLogger("polycephaly")
        self._was = self._log.level, self._log.propagate
        self._log.setLevel(logging.INFO)
        self._log.propagate = False
        self._log.addHandler(self)
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # of results that found no room, as messages say
        return self

    def __exit__(self, *error: Any) -> None:
        self._warnings.__exit__(*error)
        self._log.removeHandler(self)
        self._log.setLevel(self._was[0])
        self._log.propagate = self._was[1]

    def emit(self, record: logging.LogRecord) -> None:
        with self._news:
            if record.levelno >= logging.ERROR:
                error = record.exc_info[1] if record.exc_info else None
                self.bugs.append(Finding(f"{record.getMessage()}: {error!r}", _frames_in(error)))
            elif "unknown sender" in record.msg:
                self.strangers += 1
            elif record.getMessage().startswith(
                "a malformed message was dropped"
            ):  # a drone says so
                self.refused += 1
            elif "was dropped" in record.msg:
                self.dropped += 1
            self._news.notify_all()

    def line(self, line: Any) -> None:
        with self._news:
            if line.text.startswith("mark "):
                self.marks.add(line.text)
            else:
                self.lines = [*self.lines[-40:], str(line)]
            self._news.notify_all()

    def wait_for(self, condition: Callable[[], object]) -> bool:
        with self._news:
            return bool(self._news.wait_for(condition, SOON))

    def check(self) -> None:
        if self.bugs:
            raise self.bugs[0]


def _frames_in(error: BaseException | None) -> list[Frames]:
    """The message that was being heard."""
    found = []
    trace = error.__traceback__ if error is not None else None
    while trace is not None:
        names = ("handle_records", "_handle_message")
        if trace.tb_frame.f_code.co_name in names:
            told = trace.tb_frame.f_locals
            records = [[repr(each).encode()] for each in told.get("records", ())]
            found = records or [[bytes(each) for each in told.get("frames", ())]]
        trace = trace.tb_next
    return found


def answers(pool: poly.Pool, heard: Heard) -> None:
    """Every drone of the pool does work of every kind; raises `Finding`. One that has talked
    nonsense may be killed for that meanwhile, and is replaced."""
    dispatcher = pool._dispatcher
    deaths = 0
    while True:
        try:
            wait_for(
                lambda: (
                    sum(handle.state is State.READY for handle in list(dispatcher.handles))
                    == dispatcher.config.size
                ),
                SOON,
            )
            assert {p.result(SOON) for p in pool.everywhere(abs, -3)} == {3}
            assert [p.result(SOON) for p in [pool.promise(abs, -i) for i in range(30)]] == list(
                range(30)
            )
            assert pool.promise(lambda: "fresh").result(SOON) == "fresh"
            assert pool.promise(len, bytes(200_000)).result(SOON) == 200_000
            assert list(pool.map(abs, range(-50, 0), timeout=SOON)) == list(range(50, 0, -1))
            break
        except BaseException as error:
            heard.check()
            deaths += isinstance(error, poly.DroneDied)
            if not 0 < deaths <= dispatcher.config.size:
                where = traceback.format_exc(limit=-3)
                lines = "\n".join(heard.lines)
                raise Finding(f"the pool does not answer any more: {where}\n{lines}") from error
    heard.check()


def skip_low_numbers() -> None:
    """So that what is mutated to a small number, and is well formed, is not about anybody's work or
    definition."""
    while next(task._numbers) < 300:
        pass
    while next(functions._numbers) < 300:
        pass


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """For this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# -- stage: reactor --------------------------------------------------------------------------------


def this_drone() -> image_main.LocalDrone:
    return next(each for each in gc.get_objects() if isinstance(each, image_main.LocalDrone))


_said: set[int] = set()


def say(seed: int, by: str, first: int, last: int) -> int:
    """On a drone: messages of drones that are nearly well formed, about the very work that it runs.
    The second time about none: the reactor has believed that it was given back, and would for
    ever."""
    drone = this_drone()
    known = (drone._current,) if first not in _said else (UNLIKELY,)
    _said.add(first)
    with memory(drone._store._top // REGION_BYTES) as (store, ref_table):
        originals = result_messages(store, ref_table, known)
        originals += work_messages(store, ref_table)[:2]
        for number in range(first, last):
            packed = packed_item(item_of(message(seed, number, originals)))
            if by == "records":
                drone._put(packed)
            else:
                put_pieces(drone, packed, random.Random(~(seed << 32 | number)))
            drone._tell()
            wait_for(lambda: is_read(drone), SOON)  # so that each of them is dropped by itself
    return last - first


def is_read(drone: image_main.LocalDrone) -> bool:
    end, consumed = drone._ring._cells[0], drone._ring._cells[8]
    return bool(end == consumed)


def put_pieces(drone: image_main.LocalDrone, whole: bytes, dice: random.Random) -> None:
    """As of a record that is too long for the ring, but for one of these."""
    at = dice.randrange(len(whole) + 1)
    pieces: list[Any] = [len(whole), whole[:at], whole[at:]]
    match dice.randrange(5):
        case 0:
            pieces[0] = dice.choice(EXTREMES)
        case 1:
            del pieces[dice.randrange(3)]
        case 2:
            pieces.insert(dice.randrange(4), dice.choice([None, "text", [1], 1.5, {}, len(whole)]))
    with drone._ring_lock:
        for each in pieces:
            drone._ring.write_any(packed_item((0, each)), drone._wait_for_room)
        drone._is_told = False


def say_one(seed: int, number: int) -> int:
    return say(seed, "pieces", number, number + 1)


def send_all(end: socket.socket, what: bytes) -> None:
    """Waits for room. Raises `OSError` if the other end is gone, `TimeoutError` if nobody reads
    there."""
    while True:
        try:
            end.send(what)
            return
        except BlockingIOError:
            if not select.select([], [end], [], SOON)[1]:
                raise TimeoutError("nobody reads the socket") from None


def fuzz_reactor(
    seed: int, first: int, last: int, progress: Callable[[int], object], batch: int = 500
) -> dict[str, int]:
    skip_low_numbers()
    with little_memory(), Heard() as heard, poly.Pool(2, output=heard.line) as pool:
        answers(pool, heard)
        for start in range(first, last, batch):
            progress(start)
            by = "pieces" if start // batch % 4 == 3 else "records"
            works = [pool.promise(abs, -1) for _ in range(20)]
            spoken = pool.promise(say, seed, by, start, min(start + batch, last))
            works += [pool.promise(abs, -1) for _ in range(20)]
            for each in [*works, spoken]:
                _settled(each, heard, start)
            if start // batch % 8 == 5:
                with contextlib.suppress(Exception):  # what it was answered with was made up
                    list(
                        pool.map(
                            partial(say_one, seed), range(start, start + batch // 4), timeout=SOON
                        )
                    )
            heard.check()
            if start // batch % 16 == 0:
                answers(pool, heard)
        answers(pool, heard)
        return {"dropped": heard.dropped}


def _settled(promise: Any, heard: Heard, start: int) -> None:
    """With whatever was made up for it."""
    try:
        promise.exception(SOON)
    except TimeoutError as error:
        heard.check()
        raise Finding(
            f"{promise!r} is not settled, after the messages from number {start} on"
        ) from error
    except BaseException:  # it was cancelled
        pass


# -- stage: drones ---------------------------------------------------------------------------------

MARKS = 0x2A5C_3900  # many bits away from UNLIKELY: with one changed, a CANCEL was about a mark


class ToDrones:
    """Sends messages to drones of a pool that are nearly those of a reactor."""

    def __init__(self, pool: poly.Pool, heard: Heard, folder: str) -> None:
        self._pool = pool
        self._heard = heard
        self._folder = folder
        self._marks = 0

    def ready_drone(self) -> DroneHandle:
        """A drone that is up."""
        handles = self._pool._dispatcher.handles
        wait_for(lambda: any(each.state is State.READY for each in handles), SOON)
        return next(each for each in handles if each.state is State.READY)

    def say(self, by: str, said: Sequence[Any], *, busy: bool) -> bool:
        """Messages, or packets, to one drone: whether it lives and
        has heard all of it. The control thread of a busy one hears packets."""
        handle = self.ready_drone()
        self._marks += 1
        mark = f"mark {self._marks}"
        go = os.path.join(self._folder, mark)
        held = (
            self._pool._dispatcher.submit(hold_until, (go, go + " started"), {}, handle)
            if busy
            else None
        )
        if held is not None:
            wait_for(lambda: os.path.exists(go + " started") or not handle.alive, SOON)
        try:
            self._send(handle, by, said, busy)
            self._have_obeyed(handle)
            self._send(handle, by, [self._marking(by, mark)], False)
        except (OSError, AttributeError) as error:  # its socket is closed, by it or by the reactor
            if isinstance(error, TimeoutError) or not _comes_true(lambda: not handle.alive):
                lines = "\n".join(self._heard.lines)
                raise Finding(f"a drone that lives does not hear: {error!r}\n{lines}") from error
        Path(go).touch()
        if not self._heard.wait_for(lambda: mark in self._heard.marks or not handle.alive):
            raise Finding("a drone that lives has not heard all\n" + "\n".join(self._heard.lines))
        if held is not None:
            _settled(held, self._heard, self._marks)
        return mark in self._heard.marks

    def _send(self, handle: DroneHandle, by: str, said: Sequence[Any], busy: bool) -> None:
        reactor = self._pool._dispatcher.reactor
        for each in said:
            if by == "packets":
                send_all((handle.control if busy else handle.work).socket._socket, each)
            else:
                reactor.post(partial(handle.send, list(each)))

    def _have_obeyed(self, handle: DroneHandle) -> None:
        """Wait until the control thread has done what it was told: a RECALL would give back what
        comes next."""
        sent = threading.Event()
        self._pool._dispatcher.reactor.post(sent.set)
        sent.wait(SOON)
        end = handle.control.socket._socket
        send_all(end, well_formed([*pack_numbers(TELL), POSITION.pack(0)]))
        wait_for(lambda: not handle.alive or not unread_bytes(end))

    def _marking(self, by: str, mark: str) -> Any:
        """Work that tells, when it is run, that what came before it was heard."""
        batch = TaskBatch()
        number = MARKS + self._marks
        batch.add(number, DEFINE_CODE, 0, f"print({mark!r}, flush=True)".encode())
        batch.add(number, CALL, number, b"")
        batch.add(number, FORGET, 0, b"")
        return well_formed(batch.frames()) if by == "packets" else batch.frames()


def unread_bytes(end: socket.socket) -> int:
    """Of what was sent through a socket pair."""
    if end.fileno() < 0:
        return 0
    return struct.unpack("i", fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4)))[0]


def _comes_true(condition: Callable[[], object]) -> bool:
    with contextlib.suppress(AssertionError):
        return bool(wait_for(condition, SOON))
    return False


def fuzz_drones(
    seed: int, first: int, last: int, progress: Callable[[int], object], batch: int = 800
) -> dict[str, int]:
    skip_low_numbers()
    with (
        tempfile.TemporaryDirectory() as folder,
        memory() as (store, ref_table),
        little_memory(),
        Heard() as heard,
        poly.Pool(2, output=heard.line) as pool,
    ):
        originals = [
            *work_messages(store, ref_table),
            *order_messages(),
            *result_messages(store, ref_table)[:2],
        ]
        originals.remove(pack_numbers(STOP))
        to_drones = ToDrones(pool, heard, folder)
        answers(pool, heard)
        for start in range(first, last, batch):
            progress(start)
            by = "messages" if start // batch % 3 == 2 else "packets"
            busy = start // batch % 2 == 1
            said: list[Any] = []
            for number in range(start, min(start + batch, last)):
                frames = message(seed, number, originals)
                if by == "messages":
                    said.append(frames if frames[0][:1] != STOP else [b"?"])
                else:
                    dice = random.Random(~(seed << 32 | number))
                    if busy and dice.random() < 0.9:
                        frames = [frames[0], POSITION.pack(0 if number % 400 else UNLIKELY)]
                    sent = packet(frames, dice)
                    said.append(sent if sent[5:6] != STOP else b"?")
            if not to_drones.say(by, said, busy=busy):
                died = "\n".join(heard.lines)
                guilty = [each for each in said if not to_drones.say(by, [each], busy=busy)]
                shown = [[each] if isinstance(each, bytes) else each for each in guilty]
                raise Finding(f"a drone has died of messages by {by}, {busy=}\n{died}", shown)
            heard.check()
            if start // batch % 16 == 0:
                answers(pool, heard)
        answers(pool, heard)
        return {"dropped": heard.refused}


# -- faults of the line ----------------------------------------------------------------------------


class Noise:
    """In the place of a socket's `send`, or of what writes an outcome: something happens to every
    third message. `count` is of these, in shared memory."""

    KINDS = ("dropped", "duplicated", "truncated", "reordered")

    def __init__(
        self, kind: str, send: Callable[[Sequence[bytes]], bool], count: memoryview
    ) -> None:
        self._kind = kind
        self._send = send
        self._count = count
        self._messages = 0
        self._kept_back: Sequence[bytes] | None = None

    def __call__(self, frames: Sequence[bytes], most: int = sys.maxsize) -> bool:
        self._messages += 1
        if self._messages % 3:
            went = bool(self._send(frames))
            if self._kept_back is not None and went:
                self._send(self._kept_back)
                self._kept_back = None
            return went
        if self._kind == "duplicated":
            self._send(frames)
        elif self._kind == "truncated" and type(frames[0]) is tuple:  # a record and its key
            key, record = frames[0]
            frames = [(key[:-1], record) if type(key) is bytes else (key, record[:-1])]
        elif self._kind == "truncated":
            *first, last = frames
            frames = [
                *first,
                last[: max(0, len(last) - 1) // 2],
            ]  # not the first of two equal halves: that is whole
        elif self._kind == "reordered":
            self._kept_back = frames
        went = self._kind in ("dropped", "reordered") or bool(self._send(frames))
        self._count[0] += went
        return went


# -- the program -----------------------------------------------------------------------------------

Stage = Callable[[int, int, int, Callable[[int], object]], dict[str, int]]
STAGES: dict[str, Stage] = {
    "decoders": fuzz_decoders,
    "reactor": fuzz_reactor,
    "drones": fuzz_drones,
}
PIECE = 100_000


def run_apart(stage: Stage, seed: int, first: int, last: int) -> dict[str, Any]:
    """In a process of its own, which may crash or hang: its counts, or what was found."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    cell = memoryview(page).cast("Q")

    def progress(number: int) -> None:
        cell[0] = number

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        found: dict[str, Any]
        try:
            faulthandler.enable()
            with little_memory():
                found = stage(seed, first, last, progress)
        except BaseException as error:
            found = {"finding": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    seen, since = -1, time.monotonic()
    while not select.select([reader], [], [], 0.5)[0]:
        if cell[0] != seen:
            seen, since = cell[0], time.monotonic()
        elif time.monotonic() - since > 3 * SOON:
            os.kill(pid, signal.SIGABRT)
    told = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
    os.close(reader)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not told:
        return {
            "finding": f"it hung, or crashed: exit code {code}, at message {cell[0]} or soon after"
        }
    result: dict[str, Any] = json.loads(told)
    return result


def show(seed: int, number: int) -> None:
    with Decoders() as decoders:
        frames = message(seed, number, decoders.originals)
        print(*(frame.hex() for frame in frames), sep=" | ")
        decoders.decode(frames, random.Random(~(seed << 32 | number)))
        print(decoders.counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="in each stage")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--first", type=int, default=0, help="number of the first message")
    parser.add_argument("--stage", choices=STAGES, action="append")
    parser.add_argument("--only", type=int, help="shows and decodes this message")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    if given.only is not None:
        show(given.seed, given.only)
        return 0
    status = 0
    for name in given.stage or STAGES:
        began, counts = time.monotonic(), {}
        last = given.first + given.messages
        for start in range(given.first, last, PIECE):
            stop = min(start + PIECE, last)
            found = run_apart(STAGES[name], given.seed, start, stop)
            if "finding" in found:
                print(
                    f"{name}: FOUND, with --seed {given.seed}, messages {start} to {stop}: "
                    f"{found['finding']}"
                )
                status = 1
                break
            counts = {key: counts.get(key, 0) + count for key, count in found.items()}
        else:
            seconds = time.monotonic() - began
            rate = given.messages / seconds
            print(
                f"{name}: {given.messages:,} messages in {seconds:.1f} s, {rate:,.0f}/s: {counts}",
                flush=True,
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
