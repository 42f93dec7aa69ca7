"""The wire: what is well formed survives the way, what is not is dropped."""

import contextlib
import errno
import fcntl
import gc
import marshal
import os
import pickle
import random
import socket
import stat
import struct
import threading
from collections import deque
from unittest import mock

import pytest
from census import homes
from faults import wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripts import output_of

import polycephaly as poly
from polycephaly.engines.local import drone as image_main
from polycephaly.engines.local.drone import LocalDrone
from polycephaly.engines.local.launcher import Launcher
from polycephaly.wire import messages, private_directory
from polycephaly.wire.main_names import MainSnapshot
from polycephaly.wire.message_socket import MessageSocket
from polycephaly.wire.messages import (
    HELLO,
    MIN_LARGE_BYTES,
    POSITION,
    TELL,
    Malformed,
    TaskBatch,
    check_outcome,
    form_of,
    message_type,
    pack_frames,
    pack_numbers,
    pack_outcome,
    pack_value,
    unpack_frames,
    unpack_numbers,
    unpack_records,
    unpack_value_key,
    unpack_value_keys,
    unpack_work,
)  # fmt: skip
from polycephaly.wire.pickling import capture
from polycephaly.wire.ring import FORMAT, HEADER_BYTES, RingReader, RingWriter, next_key

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
payloads = st.one_of(
    st.binary(max_size=100),
    st.sampled_from([MIN_LARGE_BYTES - 1, MIN_LARGE_BYTES, MIN_LARGE_BYTES + 1]).map(bytes),
)
items = st.lists(st.tuples(u64, st.integers(1, 6), u32, payloads), max_size=20)
times = st.floats(allow_nan=False)
moments = st.floats(0, 1e9)
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
    records = [*unpack_records([pack_outcome(*each) for each in batch]).values()]
    for each in records:
        check_outcome(each)
    assert records == batch


@at_any_pace
@given(st.dictionaries(st.tuples(u64, moments, moments), st.none() | st.text(), min_size=1))
def test_small_values_survive_the_way(batch):
    records = unpack_records([pack_value(*key, value) for key, value in batch.items()])
    assert [*map(unpack_value_key, records)] == [*batch] and [*records.values()] == [
        *batch.values()
    ]
    numbers, started, finished, seconds = unpack_value_keys(records)
    assert [*zip(numbers, started, finished, strict=True)] == [*batch]
    assert seconds == sum(finished) - sum(started)


@at_any_pace
@given(st.lists(u64))
def test_numbers_survive_the_way(values):
    assert list(unpack_numbers(pack_numbers(HELLO, values))) == values


def pack_work(batch):
    message = TaskBatch()
    for each in batch:
        message.add(*each)
    return message.frames()


def decode_any(message):
    """As both receivers do: the head first, then by its type; here by every type."""
    for decode in (message_type, unpack_work, unpack_numbers):
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
@given(items.map(pack_work), st.randoms(use_true_random=False))
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
        messages.CANCEL,
        messages.RECALL,
        messages.RETURNED,
        messages.STOP,
    ]
    assert len(set(kinds)) == len(kinds)


@contextlib.contextmanager
def socket_pair():
    mine, its = map(MessageSocket, MessageSocket.pair())
    with contextlib.closing(mine), contextlib.closing(its):
        yield mine, its


def received(end):
    """All whole messages that have come."""
    return [*iter(end.receive, None)]


def test_messages_of_every_size_come_whole_and_in_their_order():
    sizes = [1, 40_000, 48 * 1024, 48 * 1024 + 1, 200_000, 1_000_000]
    messages = [[b"H" * 9], [b"W", b""], [b"W", b"", b"large"], [b""] * 9]
    messages += [[b"W" * 30, bytes(size)] for size in sizes]
    with socket_pair() as (one, other):
        found = []
        for message in messages:
            is_sent = one.send(message)
            while not is_sent:
                found += received(other)
                is_sent = one.send_rest()
        found += received(other)
        assert found == messages
        one.close()
        assert other.receive() == []


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_messages_come_whole_however_reads_and_writes_alternate(data):
    sizes = st.lists(
        st.sampled_from([0, 1, 100, 48 * 1024, 60_000, 300_000]), min_size=1, max_size=3
    )
    messages = [[bytes([i]) * size for size in data.draw(sizes)] for i in range(5)]
    with socket_pair() as (one, other):
        found, left = [], deque(messages)
        while left or not one.send_rest() or len(found) < len(messages):
            if left and data.draw(st.booleans()):
                one.send(left.popleft())
            else:
                found += received(other)
        assert found == messages


def test_a_socket_with_a_small_buffer_takes_smaller_pieces():
    ends = MessageSocket.pair()
    for each in ends:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    one, other = map(MessageSocket, ends)
    with contextlib.closing(one), contextlib.closing(other):
        found, is_sent = [], one.send([b"W", bytes(100_000)])
        while not is_sent:
            found += received(other)
            is_sent = one.send_rest(2)
        assert found + received(other) == [[b"W", bytes(100_000)]]


def test_a_message_waits_for_room_and_no_later_one_overtakes_it():
    with socket_pair() as (one, other):
        sent = fill(one)
        assert not one.send([b"small"]) and not one.send_rest()
        assert len(received(other)) == sent
        assert one.send_rest()
        assert received(other) == [[b"full"], [b"small"]]


def fill(end):
    """Have `end` send until there is no room, with one message that is not sent. Return the number
    of the others."""
    sent = 0
    while end.send([b"full"]):
        sent += 1
    return sent


# -- the ring


@pytest.fixture
def ring():
    memory = memoryview(bytearray(HEADER_BYTES + 4096))
    return RingWriter(memory), RingReader(memory)


def packed(*record):
    return next_key() + marshal.dumps(record, FORMAT)


def read(reader):
    found = reader.read()
    return found and [*found.values()]


records = st.tuples(st.integers(), st.floats(allow_nan=False), st.binary(max_size=5000), st.text())


@at_any_pace
@given(st.lists(st.tuples(records, st.booleans()), max_size=40))
def test_records_survive_the_ring_in_order(batch):
    memory = memoryview(bytearray(HEADER_BYTES + 4096))
    writer, reader = RingWriter(memory), RingReader(memory)
    found = []
    for record, reads in batch:
        writer.write_any(packed(*record), lambda waits, found=found: found.extend([*read(reader)]))
        if reads:
            found += [*read(reader)]
    assert [*found, *read(reader)] == [record for record, _ in batch]
    assert read(reader) == {}


def test_a_drone_waits_for_room_and_is_called_meanwhile(ring):
    writer, reader = ring
    written = 0
    while writer.write(packed(written)):
        written += 1
    waits = []

    def wait(number):
        waits.append(number)
        if number == 3:
            assert read(reader) == [(each,) for each in range(written)]

    writer.write_any(packed("last"), wait)
    assert waits == [0, 1, 2, 3] and read(reader) == [("last",)]


def test_what_is_written_before_its_end_is_stored_is_not_seen(ring):
    writer, reader = ring
    writer.write(packed(1))
    before = writer.end()
    writer.write(packed(2))
    after, writer._cells[0] = writer.end(), before
    assert read(reader) == [(1,)] and read(reader) == {}
    writer._cells[0] = after
    assert read(reader) == [(2,)]


def test_an_end_that_is_seen_before_the_bytes_is_none_yet(ring):
    writer, reader = ring
    writer.write(packed(1))
    writer._bytes[9] ^= 1
    assert read(reader) is None and read(reader) is None
    writer._bytes[9] ^= 1
    assert read(reader) == [(1,)]


def test_an_end_beyond_the_ring_is_none(ring):
    writer, reader = ring
    writer._cells[0] = 5000
    assert read(reader) is None


def test_another_reader_goes_on_where_the_first_has_read_up_to(ring):
    """The memory of a dead drone on Ray, whose reports were acknowledged up to there."""
    writer, _ = ring
    writer.write(packed(1))
    writer.forget(writer.end())
    writer.write(packed(2))
    memory = memoryview(writer._cells.obj)
    assert read(RingReader(memory)) == [(2,)]


@pytest.mark.parametrize(
    "pieces",
    [[1], ["text"], [5, (1,)], [5, b"12345"], [3, b"1", 7], [b"123"], [0, b""], [-1, b"1"]],
)
def test_what_is_no_record_is_an_empty_one_and_the_next_one_is_read(ring, pieces):
    writer, reader = ring
    for each in pieces:
        writer.write(next_key() + marshal.dumps(each, FORMAT))
    found = [*read(reader)]
    writer.write(packed("next"))
    found += read(reader)
    assert found[-1] == ("next",) and len(found) > 1
    for each in found[:-1]:
        assert each == (1,) or form_of((0, each)) == -1


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM])
def test_a_message_for_which_the_kernel_has_no_memory_is_sent_later(number):
    with socket_pair() as (one, other):
        one._socket, real = mock.Mock(), one._socket
        one._socket.send.side_effect = OSError(number, "no memory")
        assert not one.send([b"a"]) and one.lacks_memory
        one._socket.send.side_effect, one._socket.send.return_value = None, 0
        assert not one.send_rest() and one.lacks_memory
        one._socket = real
        assert one.send_rest() and not one.lacks_memory and received(other) == [[b"a"]]


def test_a_bell_is_rung_until_the_kernel_has_memory_for_it_or_no_room():
    with socket_pair() as (one, other):
        real = one._socket
        one._socket = mock.Mock()
        one._socket.send.side_effect = [
            OSError(errno.ENOBUFS, "none"),
            OSError(errno.ENOMEM, "none"),
            1,
        ]
        one.ring()
        assert one._socket.send.call_count == 3
        one._socket.send.side_effect = OSError(errno.ENOTSOCK, "a file of the task")
        with pytest.raises(OSError, match="a file"):
            one.ring()
        one._socket = real
        for _ in range(3):
            one.ring()
        assert [other.hear_bell() for _ in range(4)] == [True] * 4  # the last of none
        for _ in range(10_000):
            one.ring()
        one._socket.close()
        while other.hear_bell():
            pass
        assert not other.hear_bell()


def packet(kind, head, size=None):
    return struct.pack("<IB", len(head) if size is None else size, kind) + head


BEGIN, MORE = 3, 4


@pytest.mark.parametrize(
    "packets",
    [
        [b"123"],
        [packet(5, b"kind")],
        [packet(1, b"too short", size=100)],
        [packet(1, b"too long", size=3)],
        [packet(MORE, b"a piece of no message")],
        [packet(BEGIN, b"1234")],
        [packet(BEGIN, struct.pack("<Q", 3)), packet(MORE, b"123")],
        [packet(BEGIN, struct.pack("<Q", 4)), packet(MORE, b"12345")],
        [packet(BEGIN, struct.pack("<Q", 4)), packet(MORE, struct.pack("<I", 0))],
        [packet(BEGIN, struct.pack("<Q", 4)), packet(MORE, struct.pack("<I", 9))],
        [packet(BEGIN, struct.pack("<Q", 12)), packet(MORE, struct.pack("<IQ", 1, 9))],
        [packet(BEGIN, struct.pack("<Q", 1 << 40)), packet(1, b"")],
    ],
)
def test_malformed_packets_are_refused_and_the_next_message_comes(packets):
    with socket_pair() as (one, other):
        for each in packets:
            one._socket.send(each)
        with pytest.raises(Malformed):
            other.receive()
        received(other)
        one.send([b"next"])
        assert received(other) == [[b"next"]]


def test_a_message_in_the_middle_of_another_is_no_part_of_that():
    with socket_pair() as (one, other):
        one._socket.send(packet(BEGIN, struct.pack("<Q", 1 << 40)))
        assert other.receive() is None
        one.send([b"whole"])
        with pytest.raises(Malformed, match="pieces are missing"):
            other.receive()
        assert other.held == [b"whole"] and other.has_input()
        assert other.receive() == [b"whole"] and not other.has_input()
        one._socket.send(packet(BEGIN, struct.pack("<Q", 1 << 40)))
        one.send([bytes(30_000), bytes(30_000)])
        with pytest.raises(Malformed, match="begins in the middle"):
            other.receive()
        assert received(other) == [[bytes(30_000), bytes(30_000)]]


def test_what_an_end_has_sent_is_received_though_it_closed_with_messages_unread():
    mine, its = map(MessageSocket, MessageSocket.pair())
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
    drone.socket_lock, drone._received, drone._put_off = threading.Lock(), 0, ()
    drone.receive_all = lambda: None
    drone._tell_of_done = mock.Mock(side_effect=OSError("no descriptor is left"))
    with pytest.raises(OSError, match="no descriptor"):
        drone.obey([*pack_numbers(TELL), POSITION.pack(0)])
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
def test_the_sockets_of_drones_have_no_name_that_another_process_could_use():
    with poly.Pool(2, output="discard") as pool:
        pool.doit(fill_both_ways, [str(i) * 20 for i in range(100_000)])
        (home,) = homes()
        sockets = [each for each in os.listdir(home) if _is_socket(f"{home}/{each}")]
        assert [each for each in sockets if not each.endswith(".c")] == []  # but those of channels


def _is_socket(path):
    return stat.S_ISSOCK(os.lstat(path).st_mode)


def fill_both_ways(value):
    return value


def test_a_local_pool_needs_no_zeromq_however_large_its_messages_are():
    code = """
        import sys
        import polycephaly as poly

        def loaded(value):
            return "zmq" in sys.modules, value

        with poly.Pool(2) as pool:
            texts = [str(i) for i in range(200_000)]
            values = [pool.promise(loaded, texts) for _ in range(4)]
            print(all(each.value == (False, texts) for each in values), "zmq" in sys.modules)
    """
    assert output_of(code) == "True False\n"


def say_nonsense(by):
    """On a drone: through its own socket, messages that are none."""
    drone = next(each for each in gc.get_objects() if isinstance(each, image_main.LocalDrone))
    dice = random.Random(7)
    with drone.socket_lock:
        for _ in range(200):
            if by == "packets":
                try:
                    drone._socket._socket.send(dice.randbytes(dice.randrange(1, 50)))
                except BlockingIOError:
                    break
            else:
                large = bytes(600_000 if by == "large results" else 0)
                drone._put(
                    next_key()
                    + marshal.dumps((7, dice.randbytes(dice.randrange(9)), large), FORMAT)
                )
                drone._tell()
    return by


@pytest.mark.guarantee("wire-1")
@pytest.mark.parametrize("by", ["packets", "results", "large results"])
def test_malformed_messages_of_a_drone_are_dropped_and_the_pool_works_on(by, caplog):
    caplog.set_level("INFO", logger="polycephaly")
    with poly.Pool(2, output="discard") as pool:
        work = [pool.promise(abs, -i) for i in range(500)]
        assert pool.promise(say_nonsense, by).result(30) == by
        assert [p.result(30) for p in work] == list(range(500))
        assert [p.result(30) for p in pool.everywhere(abs, -5)] == [5, 5]
        assert list(pool.map(abs, range(-100, 0))) == list(range(100, 0, -1))
        assert "dropped" in caplog.text
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
