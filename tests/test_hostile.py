"""Key holders who mean harm: they are put out, the others are answered, and the server's memory
stays bounded."""

import resource
import socket
import threading
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import hostile
import pytest
import zmq
from faults import append, hold_until, lines, wait_for

import polycephaly as poly
from polycephaly.engines.remote import messages as frames
from polycephaly.engines.remote.keys import Card
from polycephaly.engines.remote.server_connection import ServerConnection
from polycephaly.errors import Malformed
from polycephaly.runtime.tuning import tuning
from polycephaly.server import admin
from polycephaly.server.accepted import Accepted
from polycephaly.server.fairness import FairOrder
from polycephaly.server.flow_control import Client
from polycephaly.server.server import Server
from polycephaly.server.session import ClientSession
from polycephaly.wire.messages import CALL, DEFINE_CODE, FORGET

# MB: the interpreter, 64 MB that may be unfinished, and what comes between two looks (0.2 s, and
# more on a busy machine). One attacker sends 4 GB.
MOST = 1000


@pytest.mark.slow
@pytest.mark.guarantee("remote-4")
@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("pings", 20_000),
        ("pings of 50 at once", 20_000),
        ("garbage", 4000),
        ("malformed", 4000),
        ("huge frames", 6),
        ("long messages", 4),
        ("questions", 2000),
        ("forged output", 2000),
    ],
)
def test_who_floods_is_put_out_and_the_others_are_answered(kind, messages):
    row, log = hostile.run([kind], messages, 5)
    assert not row["error"]
    assert row["answers"] > 0
    assert row["said"] >= messages
    assert row["out"] == row["connections"], log["log"]
    assert row["memory"] < MOST
    assert len(log["log"].splitlines()) < 100


@pytest.mark.slow
@pytest.mark.guarantee("remote-4")
def test_a_client_that_reads_nothing_is_put_out_by_what_it_is_owed():
    row, log = hostile.run(["never reads"], 3000, 5)
    assert not row["error"]
    assert row["out"] == row["connections"] and "unanswered calls" in log["log"]


# -- what bounds it, without processes -------------------------------------------------------------


def client_at(now):
    return Client(b"", "key", "1", bool, now)


def test_a_message_in_parts_is_one_and_counts_until_it_is_whole():
    flow = client_at(0.0)
    assert flow.reassemble([frames.PART, b"a"]) is None
    assert flow.reassemble([frames.PART, b"b" * 1000]) is None
    assert flow.held_bytes > 1000
    assert flow.reassemble([b"c"]) == [b"a", b"b" * 1000, b"c"]
    assert flow.held_bytes == 0
    assert flow.reassemble([b"d"]) == [b"d"]


@pytest.mark.guarantee("remote-4")
@pytest.mark.parametrize("said", [[], [b""], [b"a", b""], [b""] * 200_000])
def test_a_part_that_would_hold_more_than_it_counts_is_refused(said):
    flow = client_at(0.0)
    with pytest.raises(Malformed, match="part of a message"):
        flow.reassemble([frames.PART, *said])
    assert flow.reassemble([b"a"]) == [b"a"] and not flow.held_bytes


@pytest.mark.parametrize("size", [frames.CHUNK_BYTES, 3 * frames.CHUNK_BYTES])
def test_each_part_of_a_long_message_is_one_frame_and_not_empty(size):
    said = []
    end = object.__new__(ServerConnection)
    end._socket = Mock(send_multipart=lambda frames, _: said.append(frames))
    end.has_ended = False
    end.send(frames.pack_work([frames.Item(1, 1, CALL, bytes(size))]))
    *parts, last = said
    flow = client_at(0.0)
    assert all(flow.reassemble(part) is None for part in parts)
    (item,) = frames.read_work(flow.reassemble(last))
    assert len(item.payload) == size


def test_what_was_sent_before_a_ping_is_read_when_it_comes_back():
    flow = client_at(0.0)
    flow.count_sent([bytes(tuning.unread_bytes)])
    assert flow.unread_bytes > tuning.unread_bytes and not flow.is_probed
    ping = flow.probe()
    assert flow.is_probed
    flow.count_sent([b"more"])
    assert not flow.is_probed
    flow.on_ping_returned(ping)
    assert 0 < flow.unread_bytes < 1000
    for wrong in (ping, [frames.PING], [frames.PING, bytes(8)]):
        with pytest.raises(Malformed):
            flow.on_ping_returned(wrong)


def test_calls_questions_and_cancels_are_as_many_as_were_allowed():
    flow = client_at(0.0)
    for number in range(frames.MAX_UNANSWERED_CALLS):
        flow.count_call(number, 10)
    with pytest.raises(Malformed, match="unanswered calls"):
        flow.count_call(frames.MAX_UNANSWERED_CALLS, 10)
    flow.count_answered([0])
    flow.count_cancelled([1])
    # One more may pass the limit of bytes.
    flow.count_call(frames.MAX_UNANSWERED_CALLS, frames.MAX_UNANSWERED_BYTES)
    with pytest.raises(Malformed, match="bytes of unanswered calls"):
        flow.count_call(frames.MAX_UNANSWERED_CALLS + 1, 0)
    flow.count_answered(list(flow.unanswered_calls))
    assert not flow.unanswered_calls
    flow.count_call(1, 0)
    flow.count_cancelled(list(range(frames.MAX_UNANSWERED_CALLS + 1)))
    with pytest.raises(Malformed, match="cancelled"):
        flow.count_cancelled([1])
    for _ in range(frames.MAX_UNANSWERED_REQUESTS):
        flow.count_request()
    with pytest.raises(Malformed, match="unanswered requests"):
        flow.count_request()


def test_the_pool_has_no_more_calls_of_a_client_than_give_as_much_as_may_lie_unread():
    flow = client_at(0.0)
    assert flow.credit == 256
    flow.record_result_bytes(100)
    assert flow.credit == frames.MAX_UNANSWERED_CALLS
    flow.record_result_bytes(tuning.unread_bytes // 4)
    assert flow.credit == 3
    flow.record_result_bytes(2 * tuning.unread_bytes)
    assert flow.credit == 0  # the server begins as many as it has drones


def test_calls_begin_in_their_order_as_far_as_there_is_room():
    begun, settled = [], []
    session = ClientSession(
        lambda _, item, __: begun.append(item.number) or SimpleNamespace(promise=poly.Promise()),
        lambda *of: settled.append(of),
        "",
    )
    session.add_item(frames.Item(7, 0, DEFINE_CODE, b"1", extra=b'{"label": "x"}'))
    for number in range(5):
        session.add_item(frames.Item(number, 7, CALL))
    session.submit_waiting(2)
    session.submit_waiting(2)
    assert begun == [0, 1] and [*session.waiting] == [2, 3, 4]
    with pytest.raises(Malformed):
        session.add_item(frames.Item(3, 7, CALL))
    session.cancel([0, 3], running=True)
    assert [(number, promise.cancelled()) for number, promise in settled] == [(0, True), (3, True)]
    del session.calls[0], session.calls[3]  # their client was told
    session.add_item(frames.Item(7, 0, FORGET))
    session.submit_waiting()
    assert begun == [0, 1, 2, 4]
    session.add_item(frames.Item(8, 0, DEFINE_CODE, b"1", extra=b'{"label": "x"}'))
    session.add_item(frames.Item(9, 8, CALL))
    assert session.cancel_all() == 4 and not session.waiting and not session.calls


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (DEFINE_CODE, {}),
        (DEFINE_CODE, {"label": 1}),
        (CALL, {"shared": {}}),
        (CALL, {"shared": [1.0]}),
        (CALL, {"shared": [True]}),
    ],
)
def test_rare_fields_of_a_wrong_type_are_refused(kind, extra):
    session = ClientSession(lambda *of: poly.Promise(), lambda *of: None, "")
    session.add_item(frames.Item(1, 0, DEFINE_CODE, b"1", extra=b'{"label": "x"}'))
    sent = frames.Item(2, 1, kind, b"x", extra=frames.pack_extra(extra))
    (item,) = frames.read_work(frames.pack_work([sent]))
    assert item.read_extra() == extra and item.payload == b"x" and item.nbytes == sent.nbytes
    with pytest.raises(Malformed):
        session.add_item(item)


@pytest.mark.parametrize("index", [None, 0, 1 << 40])
def test_the_index_of_an_item_travels(index):
    (item,) = frames.read_work(frames.pack_work([frames.Item(2, 1, CALL, b"x", map_index=index)]))
    assert item.map_index == index


@pytest.mark.parametrize(("retries", "arrive"), [(None, None), (0, 0), (1 << 31, (1 << 31) - 1)])
def test_retries_travel_and_more_than_a_message_can_tell_are_as_many_as_it_can(retries, arrive):
    (item,) = frames.read_work(frames.pack_work([frames.Item(2, 1, CALL, b"x", retries=retries)]))
    assert item.retries == arrive


@pytest.mark.guarantee("remote-4")
def test_rare_fields_without_end_are_refused():
    """The server parses them in its loop, where all clients wait."""
    largest, larger = (
        frames.pack_work([frames.Item(1, 0, DEFINE_CODE, extra=b" " * size)])
        for size in (64 << 10, (64 << 10) + 1)
    )
    assert len(list(frames.read_work(largest))) == 1
    with pytest.raises(Malformed, match="rare fields"):
        list(frames.read_work(larger))


@pytest.mark.guarantee("remote-4")
def test_rare_fields_of_many_calls_are_refused_before_they_take_a_second_to_parse():
    flow, parsed = client_at(0.0), 0
    item = frames.Item(1, 1, CALL, extra=b" " * (64 << 10))
    with pytest.raises(Malformed, match="bytes of unanswered calls"):
        for number in range(frames.MAX_UNANSWERED_CALLS):
            flow.count_call(number, item.nbytes)
            parsed += len(item.extra)
    assert parsed <= 2 << 20


@pytest.mark.guarantee("remote-4")
def test_signs_of_life_come_no_faster_than_the_time():
    client = client_at(100.0)
    client.count_alive(100.0)
    later = (
        100.0 + 10 * tuning.client_sign_seconds
    )  # the server stood still: all of these are heard at once
    while_it_slept = int(tuning.client_silence_seconds / tuning.client_sign_seconds)
    for _ in range(20 + while_it_slept):
        client.count_alive(later)
    with pytest.raises(Malformed, match="heartbeats"):
        client.count_alive(later)


def test_a_regular_client_stays_though_the_clock_of_the_server_stood_still():
    """As while its machine sleeps."""
    client = client_at(100.0)
    for _ in range(int(tuning.client_silence_seconds / tuning.client_sign_seconds)):
        client.count_alive(100.0)


@contextmanager
def accepted_connection():
    """An `Accepted` that has one connection, and the connection's two ends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    with near, far:
        accepted = Accepted()
        accepted.add(far.fileno())
        yield accepted, near, far


def test_who_was_not_listened_to_is_not_shut():
    with accepted_connection() as (accepted, _, far):
        assert [accepted.check(1.0, 0.5) for _ in range(2)] == [[], []]
        accepted.record_message(far.fileno())
        assert [len(accepted.check(1.0, 0.5)) for _ in range(4)] == [0, 0, 0, 1]


def test_a_connection_accepted_later_is_not_taken_for_one_that_had_its_descriptor():
    with accepted_connection() as (accepted, near, far):
        # A message of one that had that descriptor's number before.
        accepted.mark_for_shutdown(far.fileno(), max_number=0)
        for _ in range(2):
            accepted.check(60, 1)
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        accepted.mark_for_shutdown(far.fileno(), max_number=1)
        accepted.check(60, 1)  # perhaps at once, before libzmq's thread has sent the reason
        near.sendall(b"y")
        assert far.recv(1) == b"y"
        accepted.mark_for_shutdown(far.fileno(), max_number=1)  # for a further message
        accepted.check(60, 1)
        assert near.recv(1) == b""


@pytest.mark.slow
def test_a_client_may_ask_more_at_once_than_the_server_takes(tmp_path):
    card = str(tmp_path / "card")
    with poly.Pool(1) as pool, poly.serve(pool, file=card) as server, poly.connect(card) as remote:
        count = 20 * frames.MAX_UNANSWERED_REQUESTS
        asked = [remote._dispatcher.request("status") for _ in range(count)]
        assert {each.result(60)["name"] for each in asked} == {server.name}


def test_a_long_message_goes_in_parts_and_arrives_whole(tmp_path):
    card = str(tmp_path / "card")
    with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
        assert remote.doit(len, bytes(20 * frames.CHUNK_BYTES + 7)) == 20 * frames.CHUNK_BYTES + 7
        with remote.share(bytes(5 * frames.CHUNK_BYTES)) as shared:
            assert remote.doit(len, shared) == 5 * frames.CHUNK_BYTES


@contextmanager
def raw_connection(card):
    """A DEALER with an allowed key, which says what it is told to, and the monitor of its end."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as end:
        end.linger, end.reconnect_ivl = 0, -1
        end.curve_serverkey, end.curve_publickey, end.curve_secretkey = (
            key.encode() for key in (card.server, card.public, card.secret)
        )
        monitor = end.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        end.connect(card.address)
        yield end, monitor
        end.disable_monitor()
        monitor.close()


OTHER_VERSION = [
    frames.HELLO,
    frames.pack_hello()[1][:1] + b"\xff" + frames.pack_hello()[1][2:],
    b"{}",
]
LARGE_REQUEST = frames.pack_json(frames.REQUEST, {"id": 1, "what": "status", "x": [{}] * 20_000})


@pytest.mark.guarantee("remote-4")
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([frames.pack_work([frames.Item(1, 1, CALL)])], b"does not know this connection"),
        ([OTHER_VERSION], b"speaks protocol"),
        ([frames.pack_hello(), LARGE_REQUEST], b"a request of more than"),
    ],
    ids=["a call before a hello", "a hello of another version", "a large request"],
)
def test_what_no_client_says_ends_the_connection(tmp_path, said, reason):
    card = str(tmp_path / "card")
    with poly.Pool(1) as pool, poly.serve(pool, file=card) as server:
        with raw_connection(Card.read(card)) as (end, monitor):
            for message in said:
                end.send_multipart(message)
            while (answer := end.recv_multipart())[0] != frames.REFUSED:
                pass
            assert reason in answer[1]
            assert monitor.poll(60_000)
        wait_for(lambda: not len(server._accepted))


@pytest.mark.parametrize("role", [{}, {"role": "worker", "name": "a\nb" * 100, "host": "x"}])
def test_a_peer_that_has_left_is_heard_no_more(tmp_path, role):
    card = str(tmp_path / "card")
    with poly.Pool(1) as pool, poly.serve(pool, file=card) as server:
        with raw_connection(Card.read(card)) as (end, monitor):
            for _ in range(3):
                end.send_multipart(frames.pack_hello(1, **role))
                end.send_multipart([frames.BYE])
            assert end.recv_multipart()[0] == frames.HELLO
            assert monitor.poll(60_000)
            kinds = [end.recv_multipart()[0] for _ in iter(lambda: end.poll(0), 0)]
            assert frames.HELLO not in kinds
        assert not server._clients and not server._joined_hosts


def test_functions_in_use_count_as_long_as_their_calls_wait():
    session = ClientSession(Mock(), Mock(), "tag")
    for number in range(3):
        session.add_item(frames.Item(1, 0, DEFINE_CODE, bytes(1000), extra=b'{"label": "x"}'))
        session.add_item(frames.Item(10 + number, 1, CALL))
    session.add_item(frames.Item(1, 0, FORGET))
    assert session.function_bytes() == 3000
    session.submit_waiting(0)
    session.cancel_all()
    assert session.function_bytes() == 0


def test_a_connection_is_supervised_when_descriptors_run_out():
    with accepted_connection() as (accepted, near, far):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            assert accepted.check(10, 1) == []
            accepted.mark_for_shutdown(far.fileno(), 1)
            accepted.check(10, 1)
            accepted.check(10, 1)  # cannot be shut now
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(accepted) == 1
        accepted.check(10, 1)
        assert len(accepted) == 0 and near.recv(1) == b""


@pytest.mark.guarantee("remote-4")
def test_who_holds_most_of_what_all_may_hold_is_put_out(tmp_path):
    card, gate = str(tmp_path / "card"), str(tmp_path / "gate")
    with (
        poly.Pool(1) as pool,
        poly.serve(pool, file=card) as server,
        poly.connect(card) as large,
        poly.connect(card) as good,
    ):
        server._max_held_bytes = 10 * frames.CHUNK_BYTES
        held = large.promise(hold_until, gate)
        wait_for(held.running)
        calls = [large.promise(len, bytes(4 * frames.CHUNK_BYTES)) for _ in range(2)]
        wait_for(
            lambda: (
                max(client.unanswered_bytes for client in server._clients.values())
                > 8 * frames.CHUNK_BYTES
            )
        )
        mine = good.promise(len, bytes(3 * frames.CHUNK_BYTES))
        with pytest.raises(
            ConnectionError, match="holds more than 10,485,760 bytes of its clients"
        ):
            calls[0].result(60)
        append(gate, "open")
        assert mine.result(60) == 3 * frames.CHUNK_BYTES
        assert server.clients == 1


def test_answers_that_wait_for_a_client_to_read_count(tmp_path, monkeypatch):
    card = str(tmp_path / "card")
    with poly.Pool(1) as pool, poly.serve(pool, file=card) as server, poly.connect(card) as remote:
        (client,) = server._clients.values()
        monkeypatch.setattr(tuning, "unread_bytes", -1)
        promise = remote.promise(bytes, 1000)
        wait_for(lambda: client.held_bytes > 1000)
        monkeypatch.undo()
        assert promise.result(60) == bytes(1000)
        assert client.held_bytes < 1000 and client.outbox_bytes == 0


# -- clients take turns ----------------------------------------------------------------------------


@pytest.mark.guarantee("remote-4")
def test_a_call_waits_for_one_of_another_client_not_for_all(tmp_path):
    card, gate, told = str(tmp_path / "card"), str(tmp_path / "gate"), str(tmp_path / "told")
    with (
        poly.Pool(1) as pool,
        poly.serve(pool, file=card) as server,
        poly.connect(card) as one,
        poly.connect(card) as many,
    ):
        held = many.promise(hold_until, gate)
        wait_for(held.running)
        others = [many.promise(append, told, "many") for _ in range(500)]
        wait_for(lambda: len(pool._dispatcher.assignment.queue) > 200)
        mine = [one.promise(append, told, "one") for _ in range(2)]
        clients = server._clients.values()
        tag = wait_for(
            lambda: next((client.tag for client in clients if len(client.session.calls) == 2), "")
        )
        queued = wait_for(
            lambda: (
                (
                    found := [each.client_tag for each in [*pool._dispatcher.assignment.queue]][:4]
                ).count(tag)
                == 2
                and found
            )
        )
        assert queued[0] == queued[2] != queued[1] == queued[3]
        append(gate, "open")
        for promise in [*others, *mine]:
            promise.result(60)
        assert lines(told).count("many") == 500 and lines(told)[100:].count("one") == 0


def test_what_is_ordered_stays_in_order_and_whole(tmp_path):
    dispatcher = Mock(
        has_ended=False,
        assignment=Mock(
            queue=deque(
                Mock(client_tag=tag, number=n, priority=0)
                for n, tag in enumerate("aaaabab" + "c" * 100)
            ),
            resources=Mock(queues={}),
        ),
    )
    dispatcher.post.side_effect = lambda act: (
        dispatcher.assignment.queue.append(Mock(client_tag="late", number=-1, priority=0)),
        act(),
    )
    works, turns = [*dispatcher.assignment.queue], FairOrder(dispatcher)
    turns.order_if_due()  # nothing is due
    assert [*dispatcher.assignment.queue] == works
    turns.due = True
    turns.order_if_due()
    assert "".join(work.client_tag for work in dispatcher.assignment.queue).startswith(
        "abclateabcacacac"
    )
    assert {id(work) for work in works} < {
        id(work) for work in dispatcher.assignment.queue
    } and len(dispatcher.assignment.queue) == len(works) + 1
    for party in "abc":
        numbers = [work.number for work in dispatcher.assignment.queue if work.client_tag == party]
        assert numbers == sorted(numbers)
    turns.due = turns._is_posted = True  # the reactor has not come to it yet
    turns.order_if_due()
    assert turns.due


# -- questions -------------------------------------------------------------------------------------


def test_many_questions_of_one_client_delay_it_alone(tmp_path, monkeypatch):
    """Of one client, no more than one is being answered, or waits for those of others."""
    going, gate, real = [], threading.Event(), Server.status

    def status(self):
        going.append(1)
        assert gate.wait(60)
        return real(self)

    monkeypatch.setattr(Server, "status", status)
    card = str(tmp_path / "card")
    with (
        poly.Pool(1) as pool,
        poly.serve(pool, file=card) as server,
        poly.connect(card) as many,
        poly.connect(card) as one,
    ):
        asked = [many._dispatcher.request("status") for _ in range(10)]
        wait_for(lambda: going)
        mine = one._dispatcher.request("status")
        wait_for(lambda: len(server._admin._reply_threads) == 11)
        clients = server._clients
        wait_for(lambda: all(each.long_request_lock.locked() for each in clients.values()))
        assert len(going) == 1
        gate.set()
        assert {each.result(60)["name"] for each in [*asked, mine]} == {server.name}


def test_a_long_answer_is_packed_outside_of_the_servers_turn(tmp_path, monkeypatch):
    card, threads = str(tmp_path / "card"), []
    real = admin.pack_json

    def pack_json(kind, note):
        threads.append(threading.current_thread().name)
        return real(kind, note)

    monkeypatch.setattr(admin, "pack_json", pack_json)
    with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
        assert remote.timeline.spans == []
        remote.status()
    assert threads == ["polycephaly-request"] * 2
