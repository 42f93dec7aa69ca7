"""Nonsense from every side: nothing breaks or hangs. The short form of fuzz.py."""

import contextlib
import math
import mmap
import os
import pickle
import random
import signal
import socket
import tempfile
import threading
import time
from concurrent.futures import CancelledError
from functools import partial

import fuzz
import pytest
from faults import append, hold_until, lines, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polycephaly as poly
from polycephaly.pool.interfaces import State
from polycephaly.wire.functions import RemoteFunction
from polycephaly.wire.message_socket import MessageSocket
from polycephaly.wire.messages import (
    CALL,
    CALLS,
    DEFINE_CALLABLE,
    POSITION,
    RETURNED,
    STOP,
    VALUE,
    WITHDRAWN,
    WORK,
    Malformed,
    TaskBatch,
    pack_numbers,
    pack_value,
)  # fmt: skip
from polycephaly.wire.ring import decode

SOON = 60.0  # seconds
SEED = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(1 << 31)))


@pytest.fixture(autouse=True)
def the_seed_is_shown_with_what_fails():
    print(f"FUZZ_SEED={SEED}")


@pytest.fixture(scope="module")
def decoders_of_all():
    with fuzz.Decoders() as made:
        yield made


@pytest.fixture
def decoders(decoders_of_all):
    with fuzz.little_memory():
        yield decoders_of_all


# -- the generator


def test_a_message_follows_from_seed_and_number(decoders):
    originals = decoders.originals
    once = [fuzz.message(SEED, number, originals) for number in range(500)]
    assert once == [fuzz.message(SEED, number, originals) for number in range(500)]
    assert once != [fuzz.message(SEED + 1, number, originals) for number in range(500)]


def test_originals_are_well_formed(decoders):
    dice = random.Random(0)
    for each in decoders.originals:
        decoders.decode(each, dice)
    heads = {each[0][:1] for each in decoders.originals}
    assert heads == {bytes([each]) for each in b"HWRVCBYSFPGTI"}


# -- decoders


@pytest.mark.guarantee("wire-4")
def test_decoders_return_or_raise_malformed_whatever_was_mutated(decoders):
    before = dict(decoders.counts)
    fuzz_some = partial(fuzz.message, SEED, originals=decoders.originals)
    for number in range(15_000):
        decoders.decode(fuzz_some(number), random.Random(number))
    for what, count in decoders.counts.items():
        assert count > before[what] + 100, f"too few were {what}"


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5), st.integers(0, 2**32))
def test_decoders_return_or_raise_malformed_for_any_bytes(decoders, frames, number):
    decoders.decode(frames, random.Random(number))


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(st.data())
def test_decoders_return_or_raise_malformed_after_any_change_of_one_byte(decoders, data):
    frames = [bytearray(frame) for frame in data.draw(st.sampled_from(decoders.originals))]
    frame = data.draw(st.sampled_from([each for each in frames if each]))
    frame[data.draw(st.integers(0, min(len(frame), 300) - 1))] = data.draw(st.integers(0, 255))
    decoders.decode([bytes(each) for each in frames], random.Random(0))


def test_an_empty_packet_is_malformed_and_is_not_the_end_of_the_transport():
    mine, its = MessageSocket.pair()
    end = MessageSocket(its)
    with contextlib.closing(mine), contextlib.closing(end):
        mine.send(b"")
        with pytest.raises(Malformed):
            end.receive()
        assert end.receive() is None
        mine.send(fuzz.well_formed([b"H"]))
        assert end.receive() == [b"H"]
        mine.shutdown(socket.SHUT_RDWR)
        assert end.receive() == []


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0])
def test_a_time_that_is_none_is_not_believed(seconds):
    definition = RemoteFunction(1, DEFINE_CALLABLE, b"", "it")
    definition.record_duration(0.25, 1)
    definition.record_duration(seconds, 1)
    assert definition.seconds == 0.25


# -- live: drones that talk nonsense


def say(*items):
    drone = fuzz.this_drone()
    for each in items:
        drone._put(fuzz.packed_item(each))
    drone._tell()


def answer_myself(status, started=0.0, finished=0.0):
    """Status 0: as everybody does."""
    if status:
        say((0, (fuzz.this_drone()._current, status, started, finished, b"", b"")))


@pytest.mark.guarantee("wire-4")
def test_a_pool_goes_on_whatever_its_drones_say():
    counts = fuzz.fuzz_reactor(SEED, 0, 6000, lambda number: None)
    assert counts["dropped"] > 1000


RECORDS_WRONG = {
    "nothing": (0, ()),
    "no record": (0, None),
    "a key that is too short": (bytes(23), None),
    "a key that is too long": (bytes(25), None),
    "a form that none has": (0, (1, 0.5, 0.5, None)),
    "no message": (0, ("x",)),
    "no frames": (0, ([],)),
    "too much": (0, (1, 2, 3, 4, 5, 6, 7)),
    "an outcome of a number that is none": (0, ("1", VALUE, 0.5, 0.5, b"", b"")),
    "an outcome of no kind": (0, (1, 77, 0.5, 0.5, b"", b"")),
    "an outcome without bytes": (0, (1, VALUE, 0.5, 0.5, None, b"")),
}


@pytest.mark.parametrize("item", RECORDS_WRONG.values(), ids=RECORDS_WRONG)
def test_a_garbled_record_of_one_drone_breaks_no_pool(item):
    with fuzz.Heard() as heard, poly.Pool(2, output=heard.line) as pool:
        work = [pool.promise(abs, -i) for i in range(50)]
        pool.promise(say, item).result(SOON)
        assert [p.result(SOON) for p in work] == list(range(50))
        fuzz.answers(pool, heard)
        assert heard.dropped == 1


@pytest.mark.parametrize("finished", [math.nan, math.inf, -math.inf, 1e308])
def test_impossible_times_of_one_call_harm_no_other(finished):
    with fuzz.Heard() as heard, poly.Pool(2, output=heard.line) as pool:
        for _ in range(3):
            pool.promise(answer_myself, VALUE, -finished, finished).result(SOON)
        again = [pool.promise(answer_myself, 0) for _ in range(100)]
        assert [p.result(SOON) for p in again] == [None] * 100
        assert list(pool.map(answer_myself, [0] * 100, timeout=SOON)) == [None] * 100
        fuzz.answers(pool, heard)


def test_an_empty_packet_makes_the_reactor_deaf_to_nobody():
    with fuzz.Heard() as heard, poly.Pool(1, output=heard.line) as pool:
        pid = pool.promise(os.getpid).result(SOON)
        pool.promise(send_empty_packet).result(SOON)
        fuzz.answers(pool, heard)
        assert pool.promise(os.getpid).result(SOON) == pid and heard.dropped == 1


def send_empty_packet():
    fuzz.this_drone()._socket._socket.send(b"")


def scribble(place):
    """On a drone: over its own ring, while it has something to tell."""
    drone = fuzz.this_drone()
    drone._put(pack_value(fuzz.UNLIKELY, 0.5, 0.5, None))
    if place == "the bytes":
        for at in range(0, len(drone._ring._bytes), 8):
            drone._ring._bytes[at] ^= 1
    else:
        drone._ring._cells[0] += 1 << 40 if place == "the checksum" else 1 << 20
    drone._tell()
    time.sleep(SOON)


@pytest.mark.parametrize("place", ["the bytes", "the checksum", "the end"])
def test_a_drone_that_has_written_over_its_ring_is_replaced(place):
    with fuzz.Heard() as heard, poly.Pool(2, output=heard.line) as pool:
        with pytest.raises(poly.DroneDied, match="written over the memory"):
            pool.promise(scribble, place).result(SOON)
        fuzz.answers(pool, heard)


def test_a_drone_whose_answer_was_no_message_is_not_waited_for_for_ever():
    with fuzz.Heard() as heard, poly.Pool(2, output=heard.line) as pool:
        promise = pool.promise(answer_with_nonsense)
        with pytest.raises(poly.DroneDied, match="a malformed message"):
            promise.result(SOON)
        fuzz.answers(pool, heard)


def answer_with_nonsense():
    say((fuzz.this_drone()._current, "nonsense"))
    say_no_more()


def test_a_call_that_is_withdrawn_though_nobody_asked_is_settled():
    with poly.Pool(1) as pool:
        promise = pool.promise(answer_myself, WITHDRAWN)
        with pytest.raises(CancelledError):
            promise.result(SOON)
        assert pool.promise(abs, -2).result(SOON) == 2


# -- live: a reactor that talks nonsense


@pytest.mark.guarantee("wire-4")
def test_drones_go_on_whatever_their_reactor_says():
    counts = fuzz.fuzz_drones(SEED, 0, 6000, lambda number: None)
    assert counts["dropped"] > 2000


NOT_FOR_DRONES = {
    "no head": [b""],
    "an unknown head": [b"?"],
    "a batch that is none": [WORK + b"x", b""],
    "numbers that are none": [b"C123"],
    "what only drones say": pack_numbers(RETURNED, (1,)),
}
CALLS_WRONG = {
    "garbage": b"garbage",
    "nothing": b"",
    "a length beyond all memory": pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + bytes(6) + b"\x40\0",
    "no lists": pickle.dumps(7),
    "too few": pickle.dumps(([1],)),
    "of unequal length": pickle.dumps(([1, 2], [()])),
    "numbers that are none": pickle.dumps((["1"], [()])),
    "numbers out of range": pickle.dumps(([1 << 64, -1], [(), ()])),
    "what fails to unpickle": b"\x80\x05cmath\nsqrt\n(J\xff\xff\xff\xfftR.",
}
KNOWN = fuzz.UNLIKELY


def calls(payload):
    batch = TaskBatch()
    batch.add(KNOWN, DEFINE_CALLABLE, 0, pickle.dumps(abs))
    batch.add(0, CALLS, KNOWN, payload)
    return batch.frames()


MESSAGES = {
    **NOT_FOR_DRONES,
    **{f"calls: {what}": calls(payload) for what, payload in CALLS_WRONG.items()},
}
PACKETS = {
    "an empty packet": b"",
    "a packet too short": b"xx",
    "a packet that says more than it has": b"\xff\xff\x00\x00\x01abc",
    "a message without its position": fuzz.well_formed([b"C", b"1234567"]),
}
FOR_DRONES = {  # through the work socket, and through the control socket
    **{
        what: (fuzz.well_formed(frames), fuzz.well_formed([frames[0], POSITION.pack(0)]))
        for what, frames in MESSAGES.items()
    },
    **{what: (packet, packet) for what, packet in PACKETS.items()},
}


def control_thread_of_this_drone():
    return [
        thread.is_alive()
        for thread in threading.enumerate()
        if thread.name == "polycephaly-control"
    ]


@pytest.mark.parametrize(("packet", "urgent"), FOR_DRONES.values(), ids=FOR_DRONES)
def test_a_drone_drops_what_is_malformed_and_logs_that_and_so_does_its_control_thread(
    packet, urgent, tmp_path
):
    go = tmp_path / "go"
    with fuzz.Heard() as heard, poly.Pool(1, output=heard.line) as pool:
        pid = pool.promise(os.getpid).result(SOON)
        (handle,) = pool._dispatcher.handles
        fuzz.send_all(handle.work.socket._socket, packet)
        assert heard.wait_for(lambda: heard.refused == 1)
        held = pool.promise(hold_until, str(go), str(tmp_path / "started"))
        wait_for(lambda: lines(tmp_path / "started"))
        fuzz.send_all(handle.control.socket._socket, urgent)
        assert heard.wait_for(lambda: heard.refused == 2), heard.lines
        go.touch()
        assert held.result(SOON) == "held"
        assert pool.promise(control_thread_of_this_drone).result(SOON) == [True]
        assert pool.promise(os.getpid).result(SOON) == pid
        fuzz.answers(pool, heard)


def test_malformed_messages_are_dropped_by_a_drone_too():
    with (
        fuzz.Heard() as heard,
        poly.Pool(1, output=heard.line) as pool,
        contextlib.ExitStack() as folders,
    ):
        pid = pool.promise(os.getpid).result(SOON)
        to_drones = fuzz.ToDrones(pool, heard, folders.enter_context(tempfile.TemporaryDirectory()))
        wrong = [*NOT_FOR_DRONES.values(), *map(calls, CALLS_WRONG.values())]
        for busy in (False, True):
            assert to_drones.say("messages", wrong, busy=busy)
        assert heard.wait_for(lambda: heard.refused == 2 * len(wrong))
        assert pool.promise(os.getpid).result(SOON) == pid
        fuzz.answers(pool, heard)


def test_a_call_of_what_a_drone_does_not_know_is_answered_to_nobodys_harm():
    batch = TaskBatch()
    batch.add(KNOWN, CALL, KNOWN + 1, b"")
    batch.add_calls(KNOWN + 1, [KNOWN, KNOWN + 1], [(1,), (2,)])
    with fuzz.Heard() as heard, poly.Pool(1, output=heard.line) as pool:
        pid = pool.promise(os.getpid).result(SOON)
        (handle,) = pool._dispatcher.handles
        fuzz.send_all(handle.work.socket._socket, fuzz.well_formed(batch.frames()))
        fuzz.answers(pool, heard)
        assert pool.promise(os.getpid).result(SOON) == pid and heard.dropped == 0


def test_a_drone_that_stops_though_nobody_asked_is_replaced():
    with fuzz.Heard() as heard, poly.Pool(1, output=heard.line) as pool:
        pid = pool.promise(os.getpid).result(SOON)
        (handle,) = pool._dispatcher.handles
        fuzz.send_all(handle.work.socket._socket, fuzz.well_formed(pack_numbers(STOP)))
        wait_for(lambda: handle.state is State.DEAD)
        fuzz.answers(pool, heard)
        assert pool.promise(os.getpid).result(SOON) != pid


# -- a bad line: messages dropped, duplicated, truncated, reordered


def speak_badly(kind):
    """On a drone: as if its ring were no memory."""
    drone = fuzz.this_drone()
    put = drone._put
    noise = fuzz.Noise(kind, lambda items: [put(fuzz.packed_item(each)) for each in items], _count)
    drone._outcomes._put = lambda record, is_shared=False: noise([*decode(record).items()])


_count = memoryview(b"")


@contextlib.contextmanager
def bad_line(pool_size, kind, side):
    """A pool, and the count of messages to which something has happened."""
    global _count
    with (
        mmap.mmap(-1, mmap.PAGESIZE) as page,
        memoryview(page).cast("Q") as _count,
    ):  # drones inherit it
        with fuzz.Heard() as heard, poly.Pool(pool_size, output=heard.line) as pool:
            fuzz.answers(pool, heard)
            assert [
                p.result(SOON) for p in [pool.promise(bytes, b"x" * 5000) for _ in range(20)]
            ] == [b"x" * 5000] * 20
            if side == "of drones":
                for each in pool.everywhere(speak_badly, kind):
                    each.result(SOON)
            else:
                for handle in pool._dispatcher.handles:
                    handle.work.socket.send = fuzz.Noise(kind, handle.work.socket.send, _count)
            yield pool, heard, _count
        _count = memoryview(b"")


def kill_all_drones(pool):
    handles = list(pool._dispatcher.handles)
    for handle in handles:
        os.kill(handle.pid, signal.SIGKILL)
    wait_for(lambda: all(handle.state is State.DEAD for handle in handles))


@pytest.mark.guarantee("wire-4")
@pytest.mark.parametrize("side", ["of the reactor", "of drones"])
@pytest.mark.parametrize("kind", fuzz.Noise.KINDS)
def test_no_promise_is_left_open_by_messages_that_were(kind, side):
    payloads = [bytes([i]) * 9000 for i in range(100)]
    with bad_line(2, kind, side) as (pool, heard, count):
        promises = [pool.promise(bytes, payload) for payload in payloads]
        wait_for(lambda: count[0] >= 2)
        if kind != "duplicated" and (kind, side) != ("truncated", "of drones"):
            # What is lost without a trace is not missed before its drone dies.
            kill_all_drones(pool)
        kept = 0
        for promise, payload in zip(promises, payloads, strict=True):
            error = promise.exception(SOON)
            if error is None:
                assert promise.value == payload
                kept += 1
            else:
                unknown = "was not defined in this drone" in str(error)
                lost = isinstance(error, poly.DroneDied) or unknown
                assert lost and kind != "duplicated", error
        assert kept
        fuzz.answers(pool, heard)


@pytest.mark.guarantee("wire-4")
def test_answers_that_come_twice_count_once(tmp_path):
    path = str(tmp_path / "run")
    with bad_line(2, "duplicated", "of drones") as (pool, heard, count):
        work = [pool.promise(append, path, str(i)) for i in range(50)]
        assert [p.result(SOON) for p in work] == [None] * 50
        assert sorted(map(int, lines(path))) == list(range(50))
        naps = [0.02 if i % 40 == 3 else 0 for i in range(400)]  # so that chunks are cut
        assert list(pool.map(nap, range(400), naps, timeout=SOON)) == list(range(400))
        assert count[0] > 5
        fuzz.answers(pool, heard)


def nap(number, seconds):
    time.sleep(seconds)
    return number


def test_a_call_whose_answer_was_dropped_can_be_cancelled_and_times_out():
    with fuzz.Heard() as heard, poly.Pool(1, output=heard.line) as pool:
        lost = pool.promise(say_no_more)
        with pytest.raises(TimeoutError):
            lost.result(0.05)
        assert lost.cancel()
        kill_all_drones(pool)
        fuzz.answers(pool, heard)


def say_no_more():
    """On a drone: from here on nothing that it says is written."""
    fuzz.this_drone()._ring.write = lambda record: True


def test_what_a_dying_drone_left_in_its_ring_may_be_anything():
    with fuzz.Heard() as heard, poly.Pool(2, output=heard.line) as pool:
        for number in range(20):
            promise = pool.promise(leave, SEED, number)
            neighbours = [pool.promise(abs, -i) for i in range(5)]
            with contextlib.suppress(Exception):  # it may be an answer
                promise.result(SOON)
            assert promise.done()
            assert [p.result(SOON) for p in neighbours] == list(range(5))
        fuzz.answers(pool, heard)


def leave(seed, number):
    """Writes into the ring what is no record, and an end that may be anywhere, and dies."""
    drone = fuzz.this_drone()
    dice = random.Random(seed << 32 | number)
    with fuzz.memory() as (store, ref_table):
        known = (drone._current,)
        (_, *bodies) = fuzz.message(
            seed, number, fuzz.result_messages(store, ref_table, known)[:12]
        )
    drone._ring.write((bodies or [b""])[0][:8000])
    if dice.random() < 0.3:
        drone._ring._cells[0] = dice.choice(fuzz.EXTREMES)
    os.kill(os.getpid(), signal.SIGKILL)
