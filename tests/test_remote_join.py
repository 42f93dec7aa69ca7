"""Drones of another process work for a served pool; each call runs once, or its client is told that
it may not have."""

import itertools
import os
import signal
import socket
from collections import Counter, deque
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import zmq
from faults import append, block_for_ever, hold_until, lines, note, wait_for
from scripts import Script

import polycephaly as poly
from polycephaly.engines.remote import messages
from polycephaly.pool.interfaces import State
from polycephaly.runtime.fork_guard import OwnThread
from polycephaly.runtime.tuning import tuning
from polycephaly.server.join import LEAVE_LINGER_MS, Joined, join
from polycephaly.server.joined import JoinedHosts
from polycephaly.server.session import ClientCall, ClientFunction
from polycephaly.wire.messages import CALL, DEFINE_CODE, VALUE
from polycephaly.wire.output import Line

SOON = 60.0


@pytest.fixture
def server(card):
    with poly.Pool(1, name="lab") as pool, poly.serve(pool, file=card) as server:
        yield server


@pytest.fixture
def far(server):
    with poly.Pool(1, name="far") as far:
        yield far


@pytest.fixture
def joined(far, card, server):
    with join(far, card) as joined:
        wait_for(lambda: len(server.status()["drones"]) == 2)
        yield joined


def note_and_hold(path, i, gate):
    """A call whose runs can be counted; it ends when `gate` is there."""
    append(path, str(i))
    hold_until(gate)
    return i


def warm_up(remote):
    """Many short calls: after these, each who runs some wants many."""
    assert sum(remote.map(abs, range(2000))) == sum(range(2000))


# -- work ------------------------------------------------------------------------------------------


def test_clients_calls_run_on_drones_of_both(remote, joined, far, server, tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    both = [remote.promise(hold_until, gate, started) for _ in range(2)]
    wait_for(lambda: len(lines(started)) == 2)  # at the same time, with one drone each
    assert set(lines(started)) == {
        str(drone.pid) for pool in (far, server._pool) for drone in pool.drones
    }
    append(gate, "open")
    assert [p.result(SOON) for p in both] == ["held", "held"]
    assert sorted(remote.map(abs, range(3000), ordered=False)) == list(range(3000))
    large = os.urandom(300_000)
    assert [p.result(SOON) for p in [remote.promise(len, large) for _ in range(20)]] == [
        300_000
    ] * 20


def test_the_items_of_a_clients_map_are_told_of_both(remote, joined, tmp_path):
    gate = str(tmp_path / "gate")
    results = remote.map(hold_until, [gate, gate], return_exceptions=True)
    wait_for(lambda: {each["item"] for each in remote.status()["drones"]} == {0, 1})
    assert {stack.item for stack in remote.stacks()} == {0, 1}
    (there,) = [each["item"] for each in remote.status()["drones"] if each["name"] == "far.0"]
    joined.leave(now=True)
    append(gate, "open")
    outcomes = list(results)
    assert f"was lost with hold_until, item {there}, which may" in str(outcomes.pop(there))
    assert outcomes == ["held"]


def test_errors_and_deaths_on_the_far_side_come_home(remote, joined, far):
    drone = remote.drones[-1]
    assert (drone.pid, drone.host) == (far.drones[0].pid, socket.gethostname())
    assert isinstance(drone.promise(divmod, 1, 0).exception(SOON), ZeroDivisionError)
    with pytest.raises(
        poly.DroneDied, match=r"far\.0 .* ended with exit status 3 while running _exit"
    ):
        drone.promise(os._exit, 3).result(SOON)
    assert not drone.alive
    with pytest.raises(TimeoutError, match=r"more than 0\.2 s on far"):
        wait_for(lambda: len(remote.drones) == 2 and remote.drones[-1] != drone)
        remote.options(timeout=0.2).drones[-1].promise(hold_until, "/nowhere").result(SOON)


def test_single_drones_are_used_from_afar(remote, joined, far, tmp_path):
    here, there = remote.drones
    there["x"] = 41
    here["x"] = 1
    assert [p.value for p in remote.everywhere("x + 1")] == [2, 42]
    assert far.doit("x") == 41
    promise = there.promise(block_for_ever, str(tmp_path / "started"))
    wait_for(lambda: lines(tmp_path / "started"))

    def last_drone():
        status = remote.status()["drones"][-1]
        return status["running"] == "block_for_ever" and status

    assert wait_for(last_drone)["client"] == str(os.getpid())
    assert far.status()["drones"][0]["client"] == str(os.getpid())
    assert promise.cancel()
    promise = there.promise(block_for_ever, str(tmp_path / "started"))
    wait_for(lambda: len(lines(tmp_path / "started")) == 2)
    there.interrupt()
    assert isinstance(promise.exception(SOON), KeyboardInterrupt)
    promise = there.promise(block_for_ever, str(tmp_path / "started"))
    wait_for(lambda: len(lines(tmp_path / "started")) == 3)
    there.kill()
    assert isinstance(promise.exception(SOON), poly.DroneDied)
    assert not there.alive and here.alive


def test_what_waits_behind_a_long_call_is_asked_back_by_who_is_idle(remote, joined, far, tmp_path):
    gate = str(tmp_path / "gate")
    there = far.drones[0].pid
    wait_for(lambda: warm_up(remote) or joined._window > 50)

    def stay(started, gate=gate, there=there):
        return hold_until(gate, started) and there if os.getpid() == there else os.getpid()

    def one_is_held():
        started = str(tmp_path / f"started-{next(rounds)}")
        promises[:] = [remote.promise(stay, started) for _ in range(40)]
        wait_for(lambda: sum(p.done() for p in promises) == (39 if lines(started) else 40))
        return lines(started)  # the other drone may have done all of them

    rounds, promises = itertools.count(), []
    wait_for(one_is_held)
    append(gate, "open")
    assert Counter(p.result(SOON) for p in promises)[there] == 1


def test_cancelled_calls_are_withdrawn_from_afar(remote, joined, far, server, tmp_path):
    started, ran = str(tmp_path / "started"), str(tmp_path / "ran")
    both = [remote.promise(block_for_ever, started) for _ in range(2)]
    wait_for(lambda: len(lines(started)) == 2)
    behind = [remote.promise(note, ran, i) for i in range(10)]
    assert all(p.cancel() for p in (*behind[::2], *both))
    assert [p.result(SOON) for p in behind[1::2]] == [1, 3, 5, 7, 9]
    assert sorted(lines(ran)) == ["1", "3", "5", "7", "9"]
    wait_for(lambda: not far._dispatcher.pending() and not server._pool._dispatcher.pending())


# -- leaving ---------------------------------------------------------------------------------------


@pytest.mark.guarantee("remote-11")
def test_who_leaves_gives_back_what_has_not_begun(remote, joined, far, server, tmp_path):
    gate, ran = str(tmp_path / "gate"), str(tmp_path / "ran")
    warm_up(remote)
    promises = [remote.promise(note_and_hold, ran, i, gate) for i in range(60)]
    wait_for(lambda: len(lines(ran)) == 2)
    wait_for(lambda: far._dispatcher.assignment.queue or len(joined._session.calls) == 1)
    leaving = poly.green.spawn(joined.leave)
    wait_for(lambda: len(joined._session.calls) == 1)  # what it runs
    append(gate, "open")
    assert [p.result(SOON) for p in promises] == list(range(60))
    leaving.result(SOON)
    assert sorted(map(int, lines(ran))) == list(range(60))
    assert [each["name"] for each in server.status()["drones"]] == ["lab.0"]
    assert remote.doit(abs, -1) == 1


def test_who_leaves_keeps_the_calls_of_its_own_clients(far, card, server, tmp_path):
    gate, runs, own = (str(tmp_path / name) for name in ("gate", "runs", "own.json"))
    with poly.serve(far, file=own), poly.connect(own) as remote:
        with join(far, card):
            promises = [remote.promise(note_and_hold, runs, i, gate) for i in range(6)]
            wait_for(lambda: lines(runs) and remote.status()["queued"] > 0)
        append(gate, "")
        assert [promise.result(SOON) for promise in promises] == list(range(6))
        assert Counter(lines(runs)) == Counter(map(str, range(6)))


def test_who_leaves_at_once_has_what_it_runs_rejected(remote, joined, tmp_path):
    started = str(tmp_path / "started")
    promises = [remote.promise(block_for_ever, started) for _ in range(2)]
    wait_for(lambda: len(lines(started)) == 2)
    joined.leave(now=True)
    wait_for(lambda: any(p.done() for p in promises))
    died = next(p for p in promises if p.done())
    with pytest.raises(
        poly.DroneDied, match=r"host far on .* was lost with block_for_ever, .*: the host has left"
    ):
        died.result()
    for each in promises:
        each.cancel()


def test_a_pool_that_ends_leaves(remote, joined, far, tmp_path):
    warm_up(remote)
    far.shutdown()
    assert [p.result(SOON) for p in [remote.promise(abs, -i) for i in range(100)]] == list(
        range(100)
    )


@pytest.mark.slow
def test_calls_that_come_while_a_pool_ends_are_given_back(remote, server, card):
    for turn in range(8):
        with poly.Pool(1, name="far") as far, join(far, card):
            warm_up(remote)
            promises = [remote.promise(abs, -i) for i in range(3000)]
            promises[200 * turn].result(SOON)
            far.shutdown()
            assert [promise.result(SOON) for promise in promises] == list(range(3000))


def test_the_servers_end_is_told(far, card, tmp_path):
    with poly.Pool(1) as pool:
        server = poly.serve(pool, file=card)
        joined = join(far, card)
        server.close()
        with pytest.raises(ConnectionError, match="is lost: the server was closed"):
            joined.run()
        joined.leave()
    assert far.doit(abs, -1) == 1
    with pytest.raises(ConnectionError, match=r"no server answered at .* within 0\.3 s"):
        join(far, card, timeout=0.3)


WORKER = """
    import signal, sys
    import polycephaly as poly
    from polycephaly.server.join import join
    def interrupt(*_):
        raise KeyboardInterrupt
    if __name__ == "__main__":
        signal.signal(signal.SIGTERM, interrupt)
        with poly.Pool(2, name="far") as far, join(far, sys.argv[1]) as joined:
            print("up", flush=True)
            try:
                joined.run()
            except KeyboardInterrupt:
                print("left", flush=True)
"""


@pytest.mark.guarantee("remote-11")
@pytest.mark.parametrize("retries", [0, 1])
def test_of_a_killed_workers_calls_each_has_run_once_or_is_reported(
    retries, remote, server, card, tmp_path
):
    gate, ran = str(tmp_path / "gate"), str(tmp_path / "ran")
    with Script(WORKER, card) as script:
        script.read_until("up")
        wait_for(lambda: len(server.status()["drones"]) == 3)
        warm_up(remote)
        given = remote.options(retries=retries)
        promises = [given.promise(note_and_hold, ran, i, gate) for i in range(100)]
        wait_for(lambda: len(lines(ran)) == 3)
        script.signal(signal.SIGKILL)
        script.wait()
        append(gate, "open")
        outcomes = [p.exception(SOON) for p in promises]
        assert not script.left()
    times = Counter(map(int, lines(ran)))
    for i, error in enumerate(outcomes):
        if error is None:
            assert 1 <= times[i] <= 1 + retries, (i, times)
        else:
            assert not retries and times[i] <= 1
            assert isinstance(error, poly.DroneDied) and "was lost with note_and_hold" in str(error)
    assert retries or any(outcomes)
    assert remote.doit(abs, -1) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_is_told_to_end_gives_back_and_finishes(
    number, remote, server, card, tmp_path
):
    gate, ran = str(tmp_path / "gate"), str(tmp_path / "ran")
    with Script(WORKER, card) as script:
        script.read_until("up")
        wait_for(lambda: len(server.status()["drones"]) == 3)
        warm_up(remote)
        promises = [remote.promise(note_and_hold, ran, i, gate) for i in range(50)]
        wait_for(lambda: len(lines(ran)) == 3)
        script.signal(number)
        wait_for(lambda: not any(worker.window for worker in server._joined_hosts))
        append(gate, "open")
        assert [p.result(SOON) for p in promises] == list(range(50))
        script.read_until("left")
        assert script.wait() == 0 and not script.left()
    assert sorted(map(int, lines(ran))) == list(range(50))


def test_a_worker_that_is_silent_is_given_up(remote, server, card, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "client_check_seconds", 0.2)
    started = str(tmp_path / "started")
    with Script(WORKER, card) as script:
        script.read_until("up")
        wait_for(lambda: len(server.status()["drones"]) == 3)
        promises = [remote.promise(block_for_ever, started) for _ in range(3)]
        wait_for(lambda: len(lines(started)) == 3)
        script.signal(signal.SIGSTOP)
        monkeypatch.setattr(tuning, "client_silence_seconds", 3.0)
        wait_for(lambda: sum(p.done() for p in promises) == 2)
        errors = [str(p.exception()) for p in promises if p.done()]
        assert sum("received no message for 3 s" in each for each in errors) == 2
        assert len(remote.drones) == 1
        script.signal(signal.SIGCONT)
        assert script.wait() != 0  # its `run` raises
        for promise in promises:
            promise.cancel()


def test_a_call_says_that_it_runs_wherever_it_does(remote, joined, tmp_path):
    gate = str(tmp_path / "gate")
    held = [remote.promise(hold_until, gate) for _ in range(2)]
    behind = remote.promise(abs, -1)
    wait_for(lambda: all(promise.running() for promise in held))
    assert not behind.running()
    append(gate, "open")
    assert behind.result(SOON) == 1
    for promise in held:
        promise.result(SOON)
        assert not promise.running()


def test_a_clients_timeline_has_the_joined_drones(remote, joined):
    for drone in remote.drones:
        assert drone.doit(abs, -1) == 1
    # Who does not tell in time is left out: on a machine that others use too, that may be any host.
    wait_for(
        lambda: (
            {span.drone for span in remote.timeline.spans if span.name == "abs"}
            == {"lab.0", "far.0"}
        )
    )
    timeline = remote.timeline
    assert all(
        span.queued <= span.started <= span.finished <= span.received for span in timeline.spans
    )


class Hosts(JoinedHosts):
    """Without a server: `said` is what it would send, `posted` what its loop would do."""

    def __init__(self, **dispatcher):
        self.said, self.posted = [], []
        usual = {
            "has_queued": lambda: False,
            "handles": [],
            "post": lambda act, *args: self.posted.append(act),
        }
        super().__init__(SimpleNamespace(**usual | dispatcher), self.posted.append)

    def admit_one(self, **properties):
        self.admit(b"x", "key", properties, lambda frames: self.said.append(frames[0]))
        (host,) = self
        return host


def test_a_host_that_gave_nothing_back_is_asked_again_after_its_next_report():
    idle = SimpleNamespace(state=State.READY, in_flight={})
    hosts = Hosts(handles=[idle])
    host = hosts.admit_one()
    host.drones = [{}]
    host.in_flight = {1: Mock(), 2: Mock()}
    report = messages.pack_json(messages.HOST_STATUS, {"drones": []})
    for answer, asked in [
        (None, 1),
        (messages.pack_numbers(messages.RETURNED, []), 1),
        (report, 2),
        (messages.pack_numbers(messages.RETURNED, [1]), 2),  # one is left for its one drone
    ]:
        if answer is not None:
            hosts.handle_message(host, answer)
            host.drones = [{}]
        hosts.recall_waiting()
        hosts.recall_waiting()
        assert hosts.said.count(messages.RECALL) == asked, answer


def test_however_many_calls_are_lent_at_once_no_frame_is_larger_than_a_host_takes():
    hosts, sent = Hosts(), []
    host = hosts.admit_one()
    host.window, host.send_now = 1, lambda frames: sent.append(frames) or True
    tasks = [
        SimpleNamespace(
            number=number,
            client_function=ClientFunction(DEFINE_CODE, "f", b"1", "tag"),
            captured_args=lambda: (CALL, b""),
            timeout=None,
            retries=0,
            first_item=None,
            promise=poly.Promise(),
        )
        for number in range(17_000)
    ]
    hosts._lent.append((host, tasks))
    hosts._send_lent()
    assert max(len(frame) for frames in sent for frame in frames) <= messages.MAX_FRAME_BYTES
    items = [item for frames in sent for item in messages.read_work(frames)]
    assert [item.number for item in items if item.kind == CALL] == list(range(17_000))
    assert list(host.in_flight) == list(range(17_000))


@pytest.mark.parametrize("closed_first", [True, False])
def test_calls_lent_while_the_server_closes_go_back(closed_first, monkeypatch):
    leases = Mock()
    monkeypatch.setattr("polycephaly.server.joined.leases", leases)
    leases.lease.return_value = ["a call"]
    hosts = Hosts()
    acts = [hosts.close, lambda: hosts._lend([(Mock(), 1)])]
    for act in acts if closed_first else acts[::-1]:
        act()
    for act in hosts.posted:
        if act != hosts._send_lent:  # the server's loop has ended
            act()
    leases.requeue_unstarted.assert_called_once_with(hosts._dispatcher, ["a call"])


def test_what_a_call_prints_is_sent_before_its_result_if_both_come_at_once():
    class Lines(deque):
        def __len__(self):
            count = super().__len__()
            if coming:  # just after the host has looked
                self.append(coming.pop())
                host._outcomes.append((7, promise))
            return count

    sent, coming, promise = [], [Line("printed", "d", "stdout")], poly.Promise()
    promise.set_result((VALUE, b""))
    host = object.__new__(Joined)
    host._session, host._outcomes, host._lines = (
        SimpleNamespace(calls={7: ClientCall(promise, None)}),
        deque(),
        Lines(),
    )
    host.send = lambda frames: sent.append(frames[0])
    host._send_outcomes()
    host._send_outcomes()
    assert sent == [messages.OUTPUT, messages.RESULTS]


@pytest.mark.guarantee("remote-11")
@pytest.mark.parametrize(
    ("state", "waits"),
    [({}, True), ({"_leave_now": True}, False), ({"loss_reason": "a reason"}, False)],
    ids=["regularly", "at once", "lost"],
)
def test_who_leaves_regularly_waits_until_its_results_are_sent(state, waits):
    """The bytes are libzmq's then, which drops the rest when its time is over."""
    done = []
    host = object.__new__(Joined)
    host.hello_received, host._leave_now = True, False
    host._socket = Mock(setsockopt=lambda *option: done.append(option))
    host._resources = SimpleNamespace(close=lambda: done.append("closed"))
    vars(host).update(state)
    host._close_socket()
    long_linger = [(zmq.LINGER, LEAVE_LINGER_MS)] if waits else []
    assert done == [*long_linger, "closed"] and LEAVE_LINGER_MS >= 10_000


@pytest.mark.parametrize("what", ["timeline", "stack"])
def test_a_host_that_can_start_no_thread_answers_that(what, monkeypatch):
    monkeypatch.setattr(OwnThread, "start", Mock(side_effect=RuntimeError("no new thread")))
    answers, drone = [], SimpleNamespace(number=1, state=State.READY)
    host = object.__new__(Joined)
    host._dispatcher = SimpleNamespace(handles=[drone])
    host.post = lambda send, frames: answers.append(messages.read_json(frames))
    host._handle_request({"id": 7, "what": what, "drone": 1})
    assert answers == [{"id": 7, "error": "no new thread"}]


def test_the_name_of_a_host_is_short_and_printable():
    host = Hosts().admit_one(name="a\n" * 100, host="h")
    assert len(host.name) <= 80 and host.name.isprintable()
