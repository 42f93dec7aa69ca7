"""The wire: what is well formed survives the way, what is not is dropped; a stranger gets nothing
run."""

import errno
import fcntl
import gc
import os
import pickle
import random
import socket
import stat
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from unittest import mock

import pytest
import zmq
from census import homes
from engines import local_only
from faults import Bomb, bind_zeromq, lines, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polycephaly as poly
from polycephaly.engines.local import drone as image_main
from polycephaly.engines.local.drone import LocalDrone
from polycephaly.engines.local.launcher import Launcher
from polycephaly.runtime.tuning import tuning
from polycephaly.wire import messages, private_directory
from polycephaly.wire.fast_transport import FastTransport
from polycephaly.wire.main_names import MainSnapshot
from polycephaly.wire.messages import (
    HELLO,
    MIN_LARGE_BYTES,
    PROTOCOL,
    RESULTS,
    VALUE,
    Malformed,
    TaskBatch,
    message_type,
    pack_frames,
    pack_numbers,
    pack_outcome,
    pack_outcomes,
    unpack_frames,
    unpack_numbers,
    unpack_outcomes,
    unpack_work,
)  # fmt: skip
from polycephaly.wire.pickling import capture
from polycephaly.wire.status_page import StatusPage, make_status_file, map_page

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
payloads = st.one_of(
    st.binary(max_size=100),
    st.sampled_from([MIN_LARGE_BYTES - 1, MIN_LARGE_BYTES, MIN_LARGE_BYTES + 1]).map(bytes),
)
items = st.lists(st.tuples(u64, st.integers(1, 6), u32, payloads), max_size=20)
times = st.floats(allow_nan=False)
outcomes = st.lists(
    st.tuples(u64, st.integers(1, 3), times, times, payloads, st.text(max_size=50).map(str.encode)),
    max_size=20,
)
frames = st.lists(st.binary(max_size=200), max_size=5)
at_any_pace = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@at_any_pace
@given(items)
def test_work_survives_the_way(batch):
    assert [(*i[:3], bytes(i[3])) for i in unpack_work(pack_work(batch))] == batch


@at_any_pace
@given(outcomes)
def test_outcomes_survive_the_way(batch):
    assert [
        (*o[:4], bytes(o[4]), o[5].encode())
        for o in unpack_outcomes(pack_outcomes([pack_outcome(*each) for each in batch]))
    ] == batch


@at_any_pace
@given(st.lists(u64))
def test_numbers_survive_the_way(values):
    assert list(unpack_numbers(pack_numbers(HELLO, values))) == values


def pack_work(batch):
    message = TaskBatch()
    for each in batch:
        message.add(*each)
    return message.frames()


def pack_results(batch):
    return pack_outcomes([pack_outcome(*each) for each in batch])


def decode_any(message):
    """As both receivers do: the head first, then by its type; here by every type."""
    for decode in (message_type, unpack_work, unpack_outcomes, unpack_numbers):
        try:
            decode(message)
        except Malformed:
            if decode is message_type:
                return


@pytest.mark.guarantee("wire-1")
@at_any_pace
@given(frames)
def test_garbage_raises_malformed_and_nothing_else(message):
    decode_any(message)


@settings(at_any_pace, max_examples=300)
@given(
    st.one_of(items.map(pack_work), outcomes.map(pack_results)), st.randoms(use_true_random=False)
)
@pytest.mark.slow
def test_mutated_and_truncated_messages_raise_malformed_and_nothing_else(message, dice):
    message = [bytearray(each) for each in message]
    for _ in range(dice.randint(1, 4)):
        if not message:
            break
        frame = dice.choice(message)
        what = dice.randrange(5)
        if what == 0 and frame:
            frame[dice.randrange(len(frame))] = dice.randrange(256)
        elif what == 1:
            del frame[dice.randrange(len(frame) + 1) :]
        elif what == 2:
            frame += bytes(dice.randrange(256) for _ in range(dice.randint(1, 40)))
        elif what == 3:
            message.remove(frame)
        else:
            message.insert(dice.randrange(len(message) + 1), bytearray(frame))
    decode_any([bytes(each) for each in message])


def test_a_batch_with_one_item_too_few_or_too_many_is_malformed():
    head, body = pack_work([(1, 4, 2, b"abc"), (2, 4, 2, b"de")])
    for wrong in (
        [head, body[:-1]],
        [head, body + b"x"],
        [head[:-1], body],
        [head],
        [head, body, b"extra"],
        [],
    ):
        with pytest.raises(Malformed):
            unpack_work(wrong)


def test_every_message_type_has_a_byte_of_its_own():
    kinds = [
        messages.HELLO,
        messages.WORK,
        messages.RESULTS,
        messages.CANCEL,
        messages.RECALL,
        messages.RETURNED,
        messages.STOP,
    ]
    assert len(set(kinds)) == len(kinds)


def test_the_fast_transport_gives_back_what_was_sent_or_refuses_it():
    one, other = map(FastTransport, FastTransport.pair())
    for message in ([b"H" * 9], [b"W", b""], [b"W" * 30, b"x" * 40_000]):
        assert one.send(message)
        assert [bytes(f) for f in other.receive()] == message
    assert other.receive() is None
    assert not one.send([b"W", b"x" * 200_000]) and not one.send([b"W", b"", b"large"])
    sent = 0
    while one.send([b"W", b"x" * 10_000]):
        sent += 1
    assert sent and all(other.receive() for _ in range(sent)) and other.receive() is None
    one.close()
    assert other.receive() == []
    other.close()


def fill(transport):
    sent = 0
    while transport.send([b"W"]):
        sent += 1
    return sent


def test_a_message_may_wait_for_room_in_the_fast_transport(monkeypatch):
    monkeypatch.setattr(tuning, "room_wait_seconds", 60.0)
    one, other = map(FastTransport, FastTransport.pair())
    assert not one.send_soon([b"W", b"x" * 200_000])  # there will never be room for that
    fill(one)
    sender = threading.Thread(target=lambda: sent.append(one.send_soon([b"last"])))
    sent, received = [], []
    sender.start()
    while received[-1:] != [[b"last"]]:
        received.append(other.receive())
    sender.join()
    assert sent == [True]


def test_results_that_the_page_no_longer_keeps_wait_for_room_before_they_go_to_zeromq(monkeypatch):
    monkeypatch.setattr(tuning, "room_wait_seconds", 60.0)
    mine, its = map(FastTransport, FastTransport.pair())
    drone, by_bulk = LocalDrone.__new__(LocalDrone), []
    drone._fast_transport, drone._send_by_bulk = its, by_bulk.append
    fd = make_status_file()
    drone._status_page = page = StatusPage(map_page(fd))
    os.close(fd)
    fill(its)
    assert not drone._send([b"kept, too"]) and by_bulk == [[b"kept, too"]]
    while page.keep(b"x" * 1000):
        pass
    reader = threading.Thread(target=lambda: [*iter(mine.receive, [b"last"])])
    reader.start()
    assert drone._send([b"last"]) and len(by_bulk) == 1
    reader.join()


def test_what_an_end_has_sent_is_received_though_it_closed_with_messages_unread():
    mine, its = map(FastTransport, FastTransport.pair())
    for each in (b"one", b"two"):
        assert its.send([each])
    assert mine.send([b"unread"])
    its.close()
    assert [mine.receive() for _ in range(3)] == [[b"one"], [b"two"], []]
    mine.close()


def test_reports_are_received_from_a_zygote_that_ended_with_orders_unread():
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = Launcher.__new__(Launcher)
    launcher._control = mine
    its.send(b'{"pid": 1}')
    mine.send(b"an order")
    its.close()
    assert launcher.reports() == [{"pid": 1}]
    assert launcher.reports() is None
    mine.close()


def test_a_control_thread_that_fails_lets_no_other_thread_tell_what_was_sent():
    drone = LocalDrone.__new__(LocalDrone)
    drone.socket_lock, drone._waiting = threading.Lock(), False
    drone._woken = False
    drone._send_outcomes = mock.Mock(side_effect=OSError("no descriptor is left"))
    with pytest.raises(OSError, match="no descriptor"):
        drone.receive_if_free()
    assert drone.socket_lock.locked()  # until the process has ended, which is next


def test_a_control_thread_sees_that_calls_which_came_together_go_on():
    # It mostly gets to run where the main thread sends: between two calls.
    drone = LocalDrone.__new__(LocalDrone)
    drone._current, drone._calls = 0, object()
    seen = []
    for drone._last_done in (0, 1, 2):
        seen.append(drone.current)
    assert len(set(seen)) == 3 and max(seen) < 0


# -- with a pool


@pytest.mark.guarantee("wire-2")
def test_the_directory_of_the_socket_is_for_its_owner_alone():
    with poly.Pool(1):
        (home,) = homes()
        assert stat.S_IMODE(os.stat(home).st_mode) == 0o700 and os.stat(home).st_uid == os.geteuid()
    assert not os.path.exists(home)


@pytest.mark.guarantee("wire-2")
def test_a_stranger_on_the_socket_gets_nothing_run_and_disturbs_nobody(tmp_path):
    path = str(tmp_path / "exploded")
    bomb = pickle.dumps(Bomb(path))
    dice = random.Random(4)
    with poly.Pool(2) as pool:
        assert pool.doit(abs, -1) == 1
        bind_zeromq()
        (home,) = homes()
        pending = [pool.promise(pow, 2, i) for i in range(500)]
        context = zmq.Context()
        for identity in (None, b"\x01" + bytes(16), b"drone"):
            stranger = context.socket(zmq.DEALER)
            stranger.linger = 1000
            if identity:
                stranger.setsockopt(zmq.IDENTITY, identity)
            stranger.connect(f"ipc://{home}/zmq")
            stranger.send_multipart(pack_numbers(HELLO, (PROTOCOL, os.getpid())))
            for number in range(2000):
                stranger.send_multipart(
                    pack_outcomes([pack_outcome(number, VALUE, 0.0, 0.0, bomb, b"")])
                )
            for _ in range(200):
                stranger.send_multipart(
                    [dice.randbytes(dice.randrange(60)) for _ in range(dice.randrange(1, 5))]
                )
            assert pool.doit(abs, -2) == 2
            assert not stranger.poll(50), "the stranger was answered"
            stranger.close()
        context.term()
        assert [p.value for p in pending] == [2**i for i in range(500)]
        assert [p.value for p in pool.everywhere(abs, -3)] == [3, 3]
    assert not lines(path)


def send_by_bulk(path, fill_first):
    """On a drone, when the file `path` is there: a message that the fast transport cannot take,
    because it is too large, or because the socket is full.
    """
    wait_for(lambda: os.path.exists(path))
    drone = next(each for each in gc.get_objects() if isinstance(each, image_main.LocalDrone))
    with drone.socket_lock:
        if fill_first:
            fill(drone._fast_transport)
        drone._send([b"?"] if fill_first else [b"?" * 100_000])
    return "sent"


@local_only
@pytest.mark.parametrize("fill_first", [False, True])
def test_zeromq_is_used_once_a_drones_message_needs_it(tmp_path, fill_first):
    path = tmp_path / "go"
    with poly.Pool(1, output="discard") as pool:
        assert pool.doit(len, bytes(1_000_000)) == 1_000_000
        assert list(pool.map(abs, range(-9, 0))) == [*range(9, 0, -1)]
        bulk, (handle,) = pool._dispatcher.supervisor.engine._bulk, pool._dispatcher.handles
        sent = pool.promise(send_by_bulk, str(path), fill_first)
        wait_for(lambda: handle.in_flight)
        with pool._dispatcher.reactor._lock:  # so that the controller reads nothing meanwhile
            path.touch()
            wait_for(lambda: handle.status_page.bulk)
            assert bulk._router is None
        assert sent.result(30) == "sent"
        wait_for(lambda: handle.bulk_open)


def send_by_bulk_and_stay(path):
    send_by_bulk(path, False)
    time.sleep(60)  # its value does not come before the pool has broken


@local_only
def test_a_pool_whose_directory_was_removed_says_so_when_it_needs_zeromq(tmp_path):
    path = tmp_path / "go"
    with poly.Pool(1, output="discard") as pool:
        sent = pool.promise(send_by_bulk_and_stay, str(path))
        (home,) = homes()
        os.rename(home, f"{tmp_path}/away")
        path.touch()
        error = sent.exception(30)
        os.rename(f"{tmp_path}/away", home)
    assert isinstance(error, BrokenProcessPool) and "messages need ZeroMQ" in str(error)


def test_results_count_as_delivered_some_time_after_the_router_was_bound(monkeypatch):
    monkeypatch.setattr(tuning, "bulk_delivery_seconds", 5.0)
    monkeypatch.setattr(image_main, "monotonic", lambda: drone._last_flush)
    drone = LocalDrone.__new__(LocalDrone)
    drone._bulk, drone._has_router = mock.Mock(**{"has_router.return_value": False}), False

    def is_delivered(now, sent):
        drone._last_flush = now
        return drone._is_bulk_delivered(sent)

    assert not is_delivered(110.0, sent=100.0)  # it is still in the drone
    drone._bulk.has_router.return_value = True
    assert not is_delivered(111.0, sent=100.0) and drone._last_bulk_send == 111.0
    assert not is_delivered(115.0, sent=111.0) and is_delivered(116.0, sent=111.0)


def say_nonsense(by):
    """On a drone: through its own sockets, messages that are none."""
    drone = next(each for each in gc.get_objects() if isinstance(each, image_main.LocalDrone))
    bulk = drone.open_bulk()
    dice = random.Random(7)
    with drone.socket_lock:
        for _ in range(200):
            if by == "bulk":
                bulk.socket.send_multipart(
                    [dice.randbytes(dice.randrange(50)) for _ in range(dice.randrange(1, 4))]
                )
            elif by == "fast":
                try:
                    drone._fast_transport._socket.send(dice.randbytes(dice.randrange(1, 50)))
                except BlockingIOError:
                    break
            else:
                bulk.socket.send_multipart(
                    [
                        RESULTS + dice.randbytes(29 * dice.randrange(4)),
                        dice.randbytes(dice.randrange(9)),
                    ]
                )
    return by


@pytest.mark.guarantee("wire-1")
@pytest.mark.parametrize("by", ["bulk", "fast", "results"])
def test_malformed_messages_of_a_drone_are_dropped_and_the_pool_works_on(by, caplog):
    caplog.set_level("INFO", logger="polycephaly")
    with poly.Pool(2, output="discard") as pool:
        work = [pool.promise(abs, -i) for i in range(500)]
        assert pool.promise(say_nonsense, by).result(30) == by
        assert [p.result(30) for p in work] == list(range(500))
        assert [p.result(30) for p in pool.everywhere(abs, -5)] == [5, 5]
        assert list(pool.map(abs, range(-100, 0))) == list(range(100, 0, -1))
        wait_for(lambda: "dropped" in caplog.text)  # by bulk they may come after the results
    assert "a bug in polycephaly" not in caplog.text


def test_payloads_of_every_size_travel_whole():
    sizes = [
        0,
        1,
        40_000,
        48 * 1024 - 1,
        48 * 1024,
        64 * 1024 - 1,
        64 * 1024,
        64 * 1024 + 1,
        200_000,
        5_000_000,
    ]
    with poly.Pool(2) as pool:
        for data in (os.urandom(size) for size in sizes):
            assert pool.doit(bytes, data) == data
        mixed = [os.urandom(random.choice(sizes[:-1])) for _ in range(200)]
        assert [p.value for p in [pool.promise(bytes, each) for each in mixed]] == mixed


@pytest.mark.parametrize(
    "frames",
    [[b"F"], [b"F1234567"], [b"F12345678"], [b"F12345678{"], [b"F12345678[]"],
     [b"F12345678{}", b""], [b"F12345678\xff"], [b"F12345678" + b"[" * 100_000]],
)  # fmt: skip
def test_an_answer_about_frames_that_is_none_is_refused(frames):
    with pytest.raises(Malformed, match="malformed reply to FRAMES"):
        unpack_frames(frames)


def test_an_answer_about_frames_comes_as_it_was():
    answer = {"threads": [], "places": {"7": ["file", 3, "function"]}}
    assert unpack_frames(pack_frames(2**64 - 1, answer)) == (2**64 - 1, answer)


def test_a_definition_may_have_any_number_of_64_bits():
    batch = messages.TaskBatch()
    batch.add(1, messages.CALL, 1 << 40, b"x")
    (item,) = messages.unpack_work(batch.frames())
    assert item[2] == 1 << 40


def abandoned(place, number):
    directory = place / f"polycephaly-{number:016x}"
    directory.mkdir()
    return directory


def test_one_entry_that_cannot_be_looked_at_keeps_no_other(tmp_path):
    for number in (0, 2):
        (abandoned(tmp_path, number) / "lock").write_bytes(b"")
        os.utime(tmp_path / f"polycephaly-{number:016x}", (0, 0))
    link = tmp_path / f"polycephaly-{1:016x}"
    link.symlink_to("nowhere")
    private_directory._remove_abandoned(str(tmp_path))
    assert list(tmp_path.iterdir()) == [link]


def test_a_directory_whose_removal_failed_is_removed_by_a_later_pool():
    before = homes()
    pool = poly.Pool(1)
    (left,) = homes() - before
    with mock.patch("os.rmdir", side_effect=OSError(errno.EBUSY, "Device or resource busy")):
        pool.shutdown()
        wait_for(lambda: not os.listdir(left))
    os.utime(left, (0, 0))
    with poly.Pool(1):
        assert not os.path.exists(left)


def test_only_directories_that_a_pool_has_made_and_left_are_removed(tmp_path):
    old, young, used, left = (abandoned(tmp_path, number) for number in range(4))
    named = tmp_path / "polycephaly-results"
    named.mkdir()
    for each in (old, used, left, named):
        os.utime(each, (0, 0))
    lock = os.open(used, os.O_RDONLY)  # its owner has it; a cleaner of old files took `lock`
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with mock.patch("os.geteuid", return_value=os.geteuid() + 1):
            private_directory._remove_abandoned(str(tmp_path))
        assert set(tmp_path.iterdir()) == {old, young, used, left, named}
        private_directory._remove_abandoned(str(tmp_path))
    finally:
        os.close(lock)
    assert set(tmp_path.iterdir()) == {young, used, named}


@pytest.mark.parametrize("code", "?bBhHiIlLqQefdgFDG")
def test_an_array_is_pickled_as_numpy_does(code):
    numpy = pytest.importorskip("numpy")
    snapshot = MainSnapshot(())
    for dtype in numpy.dtype(code), numpy.dtype(code).newbyteorder():
        whole = numpy.arange(24).astype(dtype)
        square = whole.reshape(4, 6)
        parts = [square, square.T, whole[::2], whole[:0], whole[3], whole.reshape(2, 3, 4)]
        for array in map(numpy.array, [whole, *parts]):
            for writeable in True, False:
                array.flags.writeable = writeable
                got = pickle.loads(capture(array, snapshot))
                own = pickle.loads(pickle.dumps(array, 5))
                assert type(got) is numpy.ndarray and numpy.array_equal(got, array)
                for each in "dtype", "shape", "strides", "flags":
                    assert str(getattr(got, each)) == str(getattr(own, each)), each
