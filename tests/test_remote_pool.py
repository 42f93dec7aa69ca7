"""A served pool is used as one's own: single drones, what it is doing, its end."""

import asyncio
import functools
import gc
import itertools
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from faults import append, block_for_ever, fail_at_seven, hold_until, lines, wait_for
from scripts import Script
from work import fail_with, loaded_functions

import polycephaly as poly
from polycephaly.engines.remote import connection
from polycephaly.pool.pool_state import MAX_UNSWEPT_TASKS
from polycephaly.runtime.tuning import tuning
from polycephaly.server.server import _process_name

SOON = 60.0


@pytest.fixture
def pool():
    with poly.Pool(2, name="lab") as pool:
        yield pool


@pytest.mark.parametrize(
    ("describe", "note"), [(True, "item 1: PosixPath('/b')"), (False, "item 1")]
)
def test_an_error_of_a_clients_map_names_its_item_if_the_pool_wants_that(describe, note, card):
    items = [Path("/a"), Path("/b")]
    with (
        poly.Pool(1, describe_items=describe) as pool,
        poly.serve(pool, file=card),
        poly.connect(card) as remote,
    ):
        _, error = remote.map(fail_with, items, return_exceptions=True)
        assert error.__notes__ == [f"in map(fail_with, ...), {note}"]


def test_the_items_of_a_clients_map_are_told(remote, tmp_path):
    gate = str(tmp_path / "gate")
    results = remote.map(hold_until, [gate] * 5)  # not known as short, so each is sent alone
    try:
        wait_for(lambda: {each["item"] for each in remote.status()["drones"]} == {0, 1})
        # A task that was sent to a drone counts as running: it may be about to begin.
        wait_for(lambda: all(stack.task for stack in remote.stacks()))
        for stack in remote.stacks():
            assert f"hold_until #{stack.number}, item {stack.item}, for" in str(stack)
    finally:
        append(gate, "open")
    assert list(results) == ["held"] * 5
    spans = [span for span in remote.timeline.spans if span.name == "hold_until"]
    assert {0, 1} <= {span.item for span in spans}
    assert remote.promise(abs, -1).value == 1  # no item of a map
    assert remote.status()["drones"][0]["item"] is None


def test_a_death_with_a_client_names_the_item(remote):
    (died,) = remote.map(os._exit, [3], return_exceptions=True)
    assert "while running _exit, item 0" in str(died)
    assert died.__notes__ == ["in map(_exit, ...), item 0: 3"]


class CountedState:
    """Travels by value, and counts how often. `items` is 11 MB, and may be changed."""

    picklings = 0

    def __init__(self):
        self.items = bytearray(11_000_000)

    def __getstate__(self):
        CountedState.picklings += 1
        return vars(self)


def test_what_a_clients_map_captures_is_pickled_once_and_each_call_has_its_own(remote):
    state = CountedState()

    def change(i):
        state.items[0] += 1
        return i, state.items[0]

    CountedState.picklings = 0
    with pytest.warns(RuntimeWarning, match="captures state") as warned:
        results = remote.map(change, range(20))
    state.items[0] = 100  # captured before
    assert list(results) == [(i, 1) for i in range(20)]
    assert CountedState.picklings <= 2  # once, and once to name it in the warning
    (one,) = (each for each in warned if each.category is RuntimeWarning)
    assert "pickled for each call, or once for all calls of a map" in str(one.message)
    assert remote.doit(change, 0) == (0, 101)


def test_a_client_is_not_advised_to_refresh_the_pool_for_a_global_name(remote, monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "table", bytes(11_000_000), raising=False)
    function = eval("lambda i: i + len(table)", vars(main))
    function.__module__ = "__main__"
    with pytest.warns(RuntimeWarning, match=r"Give the calls pool\.share\(table\)$"):
        assert remote.doit(function, 1) == 11_000_001


def nap(path):
    append(path, "x")
    time.sleep(1000)


# -- single drones ---------------------------------------------------------------------------------


@pytest.mark.guarantee("remote-10")
def test_each_drone_has_a_namespace_of_its_own(remote, pool):
    one, two = remote.drones
    assert [each.name for each in remote.drones] == [each.name for each in pool.drones]
    assert (one.pid, two.pid) == tuple(each.pid for each in pool.drones)
    assert one.host == socket.gethostname()
    one["x"] = 41
    two.push({"x": 1, "y": 2})
    assert one["x"] == 41 and two.pull("y", "x") == (2, 1)
    assert one.doit("x + 1") == 42
    with pytest.raises(KeyError):
        one["y"]
    assert [p.value for p in remote.everywhere("x")] == [41, 1]
    assert {p.value for p in remote.everywhere(os.getpid)} == {one.pid, two.pid}
    hurried = one.options(timeout=1000)
    assert hurried.alive and hurried["x"] == 41 and hurried == one
    assert one == remote.drones[0] != two and len({one, two, *remote.drones}) == 2


def test_work_for_one_drone_waits_for_that_one(remote, tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    one, two = remote.drones
    busy = one.promise(hold_until, gate, started)
    wait_for(lambda: lines(started))
    behind = [one.promise(os.getpid) for _ in range(5)]
    assert two.promise(os.getpid).result(SOON) == two.pid
    assert not any(p.done() for p in behind)
    append(gate, "open")
    assert busy.result(SOON) == "held"
    assert {p.result(SOON) for p in behind} == {one.pid}


@pytest.mark.guarantee("remote-10")
def test_a_drone_is_interrupted_and_killed(remote, pool, tmp_path):
    one, two = remote.drones
    started = str(tmp_path / "started")
    promise = one.promise(nap, started)
    wait_for(lambda: len(lines(started)) == 1)
    one.interrupt()
    assert isinstance(promise.exception(SOON), KeyboardInterrupt)
    assert one.alive and one.unresponsive is None
    promise = one.promise(nap, started)
    wait_for(lambda: len(lines(started)) == 2)
    one.kill()
    with pytest.raises(
        poly.DroneDied, match=r"because a client called kill\(\), while running nap"
    ):
        promise.result(SOON)
    assert not one.alive and two.alive
    for use in (lambda: one.doit("1"), one.kill, one.interrupt, lambda: one.unresponsive):
        with pytest.raises(RuntimeError, match="the drone has ended: lab has no drone"):
            use()
    wait_for(lambda: len(pool.drones) == 2)
    assert sorted(remote.map(abs, range(5), ordered=False)) == list(range(5))


@pytest.mark.guarantee("remote-10")
def test_refresh_takes_a_new_snapshot_of_the_servers_image(remote):
    before = {drone.pid for drone in remote.drones}
    remote.refresh()
    assert not before & {drone.pid for drone in remote.drones}
    assert remote.doit(abs, -1) == 1


@pytest.mark.guarantee("remote-10")
def test_results_come_in_order_or_as_they_come(remote, tmp_path):
    gate = str(tmp_path / "gate")

    def wait(i, gate=gate):
        return hold_until(gate) and i if i == 0 else i

    results = remote.map(wait, range(20), ordered=False)
    assert sorted(next(results) for _ in range(19)) == list(range(1, 20))
    append(gate, "open")
    assert list(results) == [0]
    assert list(remote.map(abs, range(20))) == list(range(20))
    with pytest.raises(TimeoutError):
        list(remote.map(time.sleep, [1000], ordered=False, timeout=0.1))


# -- what it is doing ------------------------------------------------------------------------------


def test_status_tells_what_runs(remote, pool, tmp_path):
    started = str(tmp_path / "started")
    assert remote.doit(abs, -1) == 1
    running = [remote.promise(nap, started), remote.promise("import time; time.sleep(1000)")]
    wait_for(
        lambda: sum(task.is_running() for task in _works(pool)) == 2
    )  # only then have both drones begun
    behind = remote.promise(abs, -1)
    wait_for(lambda: remote.status()["queued"] == 1)
    status = remote.status()
    assert (
        status["name"] == "lab"
        and status["pid"] == os.getpid()
        and status["host"] == socket.gethostname()
    )
    assert status["version"] == poly.__version__ and status["clients"] == 1 and status["width"] == 1
    assert status["tasks_done"] == 1 and sum(each["tasks_done"] for each in status["drones"]) == 1
    assert time.time() - 1000 < status["started"] <= time.time()
    assert [each["state"] for each in status["drones"]] == ["busy", "busy"]
    assert {each["running"] for each in status["drones"]} == {
        "nap",
        "code 'import time; time.sleep(1000)'",
    }
    assert all(each["memory"] > 100_000 and each["seconds"] >= 0 for each in status["drones"])
    assert [each["pid"] for each in status["drones"]] == [drone.pid for drone in pool.drones]
    for promise in running:
        promise.cancel()
    assert behind.result(SOON) == 1
    wait_for(lambda: {each["state"] for each in remote.status()["drones"]} == {"idle"})


def _works(pool):
    return [task for handle in pool._dispatcher.handles for task in list(handle.in_flight.values())]


def test_a_drone_that_does_not_respond_is_told(quick, remote, tmp_path):
    started = str(tmp_path / "started")
    promise = remote.promise(nap, started)
    wait_for(lambda: lines(started))
    busy = next(each for each in remote.status()["drones"] if each["running"])
    os.kill(busy["pid"], signal.SIGSTOP)
    wait_for(lambda: "unresponsive: the process is stopped by a signal" in str(remote.status()))
    os.kill(busy["pid"], signal.SIGCONT)
    promise.cancel()


@pytest.mark.guarantee("death-11")
def test_in_what_a_drone_waits_is_told(card):
    with (
        poly.Pool(1, report_waiting=0.3) as pool,
        poly.serve(pool, file=card),
        poly.connect(card) as remote,
    ):
        (drone,) = remote.drones
        promise = remote.promise(time.sleep, 1000)

        def found():  # all of the same wait, which ends when the machine has stood still
            waiting, (told,) = drone.waiting, remote.status()["drones"]
            is_one = waiting and waiting == pool.drones[0].waiting and told["waiting"]
            return is_one and (waiting, told)

        waiting, told = wait_for(found)
        assert (waiting.task, waiting.system_call) == ("sleep", "clock_nanosleep")
        assert (
            told["waiting"]["task"] == "sleep"
            and told["waiting"]["seconds"] >= 0.3
            and told["state"] == "busy"
        )
        promise.cancel()
        wait_for(lambda: drone.waiting is None and remote.status()["drones"][0]["waiting"] is None)


# -- its end ---------------------------------------------------------------------------------------


def test_who_may_stop_it_asks_its_owner(pool, card):
    asked = []
    done = threading.Event()

    def on_stop(now):
        asked.append(now)
        done.set()

    with poly.serve(pool, file=card, on_stop=on_stop), poly.connect(card) as remote:
        remote.stop()
        assert done.wait(SOON)
        remote.stop(now=True)
        assert asked == [False, True]
        assert remote.doit(abs, -1) == 1  # it is the owner who ends it


def test_an_owner_who_lets_nobody_stop_it_says_so(remote):
    with pytest.raises(RuntimeError, match="the owner of lab does not let clients stop the pool"):
        remote.stop()


def test_an_owner_whose_answer_fails_is_told(pool, card):
    def on_stop(now):
        raise OSError("not today")

    with poly.serve(pool, file=card, on_stop=on_stop), poly.connect(card) as remote:
        with pytest.raises(RuntimeError, match="OSError: not today"):
            remote.stop()
        with pytest.raises(RuntimeError, match="does not know the request 'nonsense'"):
            remote._dispatcher.request("nonsense").result(SOON)


def test_an_error_of_the_pool_itself_arrives_as_it_was_raised(remote, pool, monkeypatch):
    def refuse():
        raise RuntimeError("not now")

    monkeypatch.setattr(pool, "refresh", refuse)
    with pytest.raises(RuntimeError, match=r"^not now$"):
        remote.refresh()


def test_a_server_ends_while_the_thread_of_an_answer_is_about_to_start(pool, card):
    server = poly.serve(pool, file=card)
    server._admin._reply_threads.append(threading.Thread())
    server.close()


def test_what_was_asked_is_rejected_when_the_server_ends(pool, card):
    gate = threading.Event()
    server = poly.serve(pool, file=card, on_stop=lambda now: gate.wait())
    remote = poly.connect(card)
    asked = remote._dispatcher.request("stop")
    server.close()
    with pytest.raises(ConnectionError):
        asked.result(SOON)
    gate.set()
    remote.shutdown()
    with pytest.raises((ConnectionError, RuntimeError)):
        remote.status()


CLIENT = """
    import sys
    import polycephaly as poly
    from faults import block_for_ever
    remote = poly.connect(sys.argv[1])
    drones = remote.drones
    promises = [drone.promise(block_for_ever, sys.argv[2]) for drone in drones for _ in range(3)]
    print("up", flush=True)
    promises[0].result()
"""


@pytest.mark.guarantee("remote-3")
def test_a_client_killed_in_mid_work_loses_its_own_only(pool, card, tmp_path):
    """Also what waited for single drones; the others' work, on the same drones, is done."""
    started = str(tmp_path / "started")
    with (
        poly.serve(pool, file=card) as server,
        poly.connect(card) as other,
        Script(CLIENT, card, started) as script,
    ):
        script.read_until("up")
        wait_for(lambda: len(lines(started)) == 2)
        behind = [drone.promise(os.getpid) for drone in other.drones]
        script.signal(signal.SIGKILL)
        script.wait()
        pids = [p.result(SOON) for p in behind]
        assert pids == [drone.pid for drone in other.drones]
        wait_for(lambda: server.clients == 1 and not pool._dispatcher.pending())
        assert len(lines(started)) == 2  # what had not begun did not begin


def test_block_for_ever_is_cancelled_by_an_exception_in_the_block(pool, card, tmp_path):
    started = str(tmp_path / "started")
    with poly.serve(pool, file=card):
        with pytest.raises(ZeroDivisionError), poly.connect(card) as remote:
            promises = remote.everywhere(block_for_ever, started)
            wait_for(lambda: len(lines(started)) == 2)
            raise ZeroDivisionError
        assert all(p.cancelled() for p in promises)
        wait_for(lambda: not pool._dispatcher.pending())


def test_cancelled_tasks_do_not_pile_up_while_the_server_takes_no_more(remote, monkeypatch):
    client = remote._dispatcher
    monkeypatch.setattr(client, "_has_credit", lambda: False)
    waiting = [remote.promise(abs, -key) for key in range(2)]
    cancelled = [remote.promise(len, bytes(1000)) for _ in range(3 * MAX_UNSWEPT_TASKS)]
    tasks = [promise._task for promise in cancelled]
    for promise in cancelled:
        promise.cancel()
    wait_for(lambda: not any(task.payload for task in tasks))
    assert len(client.queue) < 1.5 * MAX_UNSWEPT_TASKS
    monkeypatch.undo()
    assert [promise.result(SOON) for promise in (*waiting, remote.promise(abs, -2))] == [0, 1, 2]


def test_ctrl_c_at_the_end_of_the_block_cancels_the_tasks(pool, card, tmp_path):
    started, main = str(tmp_path / "started"), threading.get_ident()
    with poly.serve(pool, file=card):
        with pytest.raises(KeyboardInterrupt), poly.connect(card) as remote:
            promise = remote.promise(block_for_ever, started)
            wait_for(lambda: lines(started))
            threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        assert promise.cancelled() and remote._dispatcher.has_ended
        wait_for(lambda: not pool._dispatcher.pending())


def test_a_callback_that_would_wait_for_its_own_thread_is_told(pool, card):
    errors = []

    def callback(promise):
        with pytest.raises(RuntimeError) as error:
            remote.shutdown()
        errors.append(str(error.value))

    with poly.serve(pool, file=card), poly.connect(card) as remote:
        promise = remote.promise(abs, -1)
        promise.add_done_callback(callback)
        wait_for(lambda: errors)
    assert promise.value == 1 and "a callback waited" in errors[0]


def test_another_client_cancels_all_tasks_also_those_that_wait_at_their_client(
    remote, card, tmp_path, monkeypatch
):
    monkeypatch.setattr(connection.messages, "MAX_UNANSWERED_CALLS", 3)
    started = str(tmp_path / "started")
    promises = remote.everywhere(block_for_ever, started)
    wait_for(lambda: len(lines(started)) == 2)
    promises += [remote.promise(os.getpid) for _ in range(5)]
    with poly.connect(card) as other:
        own = other.promise(os.getpid)
        me = str(os.getpid())
        assert [each["client"] for each in other.status()["drones"]] == [me, me]
        with pytest.raises(RuntimeError, match=f"lab has no client 1, but {me}"):
            other.cancel_tasks("1")
        assert other.cancel_tasks() == [me]
        for each in promises:
            with pytest.raises(CancelledError):
                each.result(SOON)
        assert own.result(SOON)
    assert remote.promise(os.getpid).result(SOON)  # still connected


def test_a_call_that_waits_for_its_input_ends_with_the_connection(pool, card, monkeypatch):
    with poly.serve(pool, file=card):
        remote = poly.connect(card)
    wait_for(lambda: remote._dispatcher.has_ended)
    # As if that had come between this look and the rest.
    monkeypatch.setattr(remote._dispatcher, "check_open", lambda: None)
    waits = remote.promise(abs, poly.Promise())
    assert isinstance(waits.exception(SOON), ConnectionError)
    remote.shutdown()


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"pid": 7, "host": socket.gethostname()}, "7"),
        ({"pid": 7, "host": "beta"}, "7@beta"),
        ({}, "None@None"),
        ({"pid": "\x1b]0;é\x07", "host": ["a b"] * 1000}, "?]0;??@['a?b',"),
    ],
)
def test_the_name_of_a_client_is_short_and_printable(properties, name):
    found = _process_name(properties)
    assert found.startswith(name) and len(found) <= 80 and found.isascii() and " " not in found


def test_who_asked_for_the_end_is_told_that_though_it_comes_at_once(pool, card, monkeypatch):
    monkeypatch.setattr(tuning, "reply_seconds", 30.0)
    closer = threading.Thread(target=lambda: server.close())

    def on_stop(now):  # no reply is sent before this returns, and the server waits for the reply
        closer.start()
        closer.join(0.2)

    with poly.serve(pool, file=card, on_stop=on_stop) as server, poly.connect(card) as remote:
        remote.stop()
    closer.join()


# -- streams of calls, asyncio, and what it has done -----------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
def test_map_in_a_coroutine(remote, ordered, tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")

    def held(n):
        return hold_until(gate, started) and n

    async def main():
        async def tick():  # the loop goes on while it waits for the first one
            while not lines(started):
                await asyncio.sleep(0.001)
            append(gate, "open")

        ticker = asyncio.create_task(tick())
        values = [n async for n in remote.map(held, range(10), ordered=ordered)]
        with pytest.raises(TimeoutError):
            async for _ in remote.map(time.sleep, [60], timeout=0.1):
                pass
        with pytest.raises(ValueError, match="7"):
            [n async for n in remote.map(fail_at_seven, itertools.count())]
        await ticker
        return values

    values = asyncio.run(main())
    assert sorted(values) == list(range(10))
    if ordered:
        assert values == list(range(10))
    assert remote.doit(abs, -1) == 1


def test_map_shows_its_progress(remote, capsys):
    assert list(remote.map(abs, range(-50, 0), progress=True)) == list(range(50, 0, -1))
    assert "50/50" in capsys.readouterr().err


def test_an_error_of_the_input_comes_in_its_place(remote):
    def rows():
        yield from (1, 2)
        raise LookupError("no third")

    results = remote.map(abs, rows())
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(LookupError, match="no third"):
        next(results)


def test_results_can_be_taken_after_the_connections_end(pool, card):
    with poly.serve(pool, file=card), poly.connect(card) as remote:
        results = remote.map(abs, [-n for n in range(5000)])
        assert next(results) == 0
    assert list(results) == list(range(1, 5000))


def test_a_connection_that_has_ended_sleeps_while_its_callbacks_are_called(pool, card, monkeypatch):
    begun, go_on, turns = threading.Event(), threading.Event(), []

    def callback(_):
        begun.set()
        go_on.wait(SOON)

    with poly.serve(pool, file=card):
        remote = poly.connect(card)
        remote.promise(block_for_ever).add_done_callback(callback)
        assert remote.promise(abs, -1).value == 1
    assert begun.wait(SOON)
    loop = remote._dispatcher
    run_once = loop._run_once
    monkeypatch.setattr(loop, "_run_once", lambda events: (turns.append(1), run_once(events)))
    time.sleep(0.3)  # it took some thousand turns in that time
    go_on.set()
    remote.shutdown()
    assert len(turns) < 30


def test_async_with_leaves_when_the_work_is_done(pool, card):
    async def main():
        async with poly.connect(card) as remote:
            late = remote.promise(time.sleep, 0.1)
        with pytest.raises(RuntimeError):
            remote.promise(abs, 1)
        try:
            async with poly.connect(card) as remote:
                lost = remote.promise(block_for_ever)
                raise LookupError("mine")
        except LookupError:
            pass
        return late.done(), lost.cancelled()

    with poly.serve(pool, file=card):
        assert asyncio.run(main()) == (True, True)


def test_its_timeline_is_that_of_the_pool(remote, pool, tmp_path):
    list(remote.map(fail_at_seven, range(5)))
    wait_for(lambda: len(remote.timeline.spans) == len(pool.timeline.spans))
    timeline = remote.timeline
    assert timeline.drones == pool.timeline.drones
    assert (
        sum(sums.calls for (_, name), sums in timeline.sums().items() if name == "fail_at_seven")
        == 5
    )
    assert "fail_at_seven" in str(timeline)
    timeline.save(tmp_path / "run.json")


# -- what it keeps of clients that have left -------------------------------------------------------


def test_the_functions_of_a_client_that_has_left_are_forgotten(pool, card):
    with poly.serve(pool, file=card):
        for _ in range(3):
            with poly.connect(card) as remote:
                functions = [functools.partial(len, b"x" * n) for n in range(20)]
                assert [remote.promise(each).value for each in functions] == [*range(20)]
                del functions
        wait_for(
            lambda: (
                gc.collect() is not None
                and not pool._dispatcher.registry._entries.keys() - {id(loaded_functions), id(abs)}
            )
        )
        wait_for(lambda: max(p.value for p in pool.everywhere(loaded_functions)) <= 2)


def test_a_server_forgets_a_function_that_its_client_has_no_more(pool, card, monkeypatch):
    monkeypatch.setattr(tuning, "client_sign_seconds", 0.05)
    functions = [functools.partial(len, b"x" * n) for n in range(20)]
    with poly.serve(pool, file=card), poly.connect(card) as remote:
        assert [remote.promise(each).value for each in functions] == [*range(20)]
        assert len(pool._dispatcher.registry._entries) >= 20
        del functions
        wait_for(lambda: len(pool._dispatcher.registry._entries) < 2)


def test_what_on_stop_returns_is_not_sent(pool, card):
    with poly.serve(pool, file=card, on_stop=lambda now: object()), poly.connect(card) as remote:
        remote.stop()
