"""`Pool.status()`: the same facts in the same form for all pools, ready for `json.dumps`."""

import contextlib
import json
import os
import time

from engines import poly as any_poly
from faults import append, hold_until, lines, wait_for
from in_time import dispatcher_of, give, make_ready, task

import polycephaly as poly
from polycephaly import Promise
from polycephaly.pool import leases
from polycephaly.pool.handlers import handle_records
from polycephaly.pool.status import describe_pool, drone_state, running_label
from polycephaly.runtime import parent_death
from polycephaly.runtime.hidden import Hidden
from polycephaly.runtime.procfs import state_of
from polycephaly.wire.messages import ERROR


def counts(dispatcher):
    status = describe_pool(dispatcher)
    return tuple(status[name] for name in ("queued", "waiting", "in_flight", "running"))


# -- without processes -----------------------------------------------------------------------------


def test_an_initializer_that_fails_before_the_pid_is_known_fails_the_tasks_and_not_the_pool(
    reactor,
):
    """The zygote tells the pid, and the drone the error: either may be read first."""
    dispatcher = dispatcher_of(reactor, 1, ready=False, initializer=task, initargs=Hidden((1,)))
    (drone,) = dispatcher.handles
    drone.says_hello()
    (number,) = drone.in_flight
    failed = (number, ERROR, reactor.now, reactor.now, b"no pickle", b"")
    handle_records(dispatcher, drone, {0: failed})
    reactor.turn()
    assert drone.pid is None and dispatcher.begun.result(0) is None


def test_the_time_since_a_task_was_sent_is_told_by_the_clock_of_the_pool(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    give(dispatcher, task)
    reactor.pass_(70)
    (drone,) = describe_pool(dispatcher)["drones"]
    assert drone["seconds"] == 70 and drone["state"] == "busy"


def test_each_task_counts_where_it_is(reactor):
    dispatcher, value = dispatcher_of(reactor, 2), Promise()
    assert counts(dispatcher) == (0, 0, 0, 0)
    first, second = (give(dispatcher, task) for _ in range(2))
    assert counts(dispatcher) == (0, 0, 2, 2)
    queued = give(dispatcher, task)
    give(dispatcher, task, target=dispatcher.handles[0])
    give(dispatcher, task, value)
    assert counts(dispatcher) == (2, 1, 2, 2)
    queued.promise.cancel()
    value.set_result(1)
    reactor.turn()
    first.handle.answers(first)
    second.handle.answers(second, together=True)
    status = describe_pool(dispatcher)
    assert status["tasks_done"] == 2 and status["tasks_cancelled"] == 1
    assert counts(dispatcher) == (0, 0, 2, 1)  # both at one drone, which has to run one of them
    json.dumps(status)


def test_a_leased_task_is_in_flight_elsewhere(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    give(dispatcher, task)
    give(dispatcher, task)
    (leased,) = leases.lease(dispatcher, 1, lambda task: True)
    assert counts(dispatcher) == (0, 0, 2, 1)
    leased.runs_elsewhere = True
    assert counts(dispatcher) == (0, 0, 2, 2)


def test_errors_time_limits_and_deaths_are_failures_and_cancelled_tasks_are_not(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    (drone,) = dispatcher.handles

    def fail(number):
        outcome = (number, ERROR, reactor.now, reactor.now, b"no pickle", b"")
        drone.unread.append({0: outcome})
        drone.receive_all()
        reactor.turn()

    fail(give(dispatcher, task).number)
    late = give(dispatcher, task, timeout=1.0)
    reactor.pass_(1.0)
    fail(late.number)
    cancelled = give(dispatcher, task)
    cancelled.promise.cancel()
    cancelled.promise.cancel()
    fail(cancelled.number)
    give(dispatcher, task)
    drone.dies()
    status = describe_pool(dispatcher)
    assert (status["tasks_failed"], status["tasks_cancelled"]) == (3, 1)


def test_an_initializer_is_no_task(reactor):
    dispatcher = dispatcher_of(reactor, 1, initializer=task, ready=False)
    (drone,) = dispatcher.handles
    drone.starts()
    drone.says_hello()
    (initializing,) = drone.in_flight.values()
    drone.answers(initializing)
    assert drone_state(drone) == "idle"
    assert describe_pool(dispatcher)["tasks_done"] == drone.tasks_done == 0


def test_a_drone_says_what_it_does(reactor):
    dispatcher = dispatcher_of(reactor, 1, width=3, ready=False)
    (drone,) = dispatcher.handles
    assert (drone_state(drone), running_label(drone)) == ("starting", None)
    make_ready(dispatcher)
    assert (drone_state(drone), running_label(drone)) == ("idle", None)
    give(dispatcher, task)
    assert (drone_state(drone), running_label(drone)) == ("busy", "task")
    drone.unresponsive = "it is stopped"
    assert drone_state(drone) == "unresponsive: it is stopped"
    drone.unresponsive = None
    dispatcher.supervisor.retire(drone)
    assert (drone_state(drone), running_label(drone)) == ("retiring", "task")
    drone.dies()
    assert (drone_state(drone), running_label(drone)) == ("ended, exit code -9", None)


def test_the_state_of_a_pool_says_why_it_takes_no_tasks(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    assert (describe_pool(dispatcher)["state"], describe_pool(dispatcher)["reason"]) == (
        "open",
        None,
    )
    give(dispatcher, task)
    dispatcher.close()
    reactor.turn()
    assert describe_pool(dispatcher)["state"] == "closing"
    assert "after shutdown of pool" in describe_pool(dispatcher)["reason"]
    dispatcher.handles[0].dies()
    reactor.turn()
    assert describe_pool(dispatcher)["state"] == "ended"
    broken = dispatcher_of(reactor, 1, on_death="break")
    broken.handles[0].dies()
    assert describe_pool(broken)["state"] == "broken"
    assert "was killed by SIGKILL" in describe_pool(broken)["reason"]


# -- with drones -----------------------------------------------------------------------------------


def test_all_engines_give_the_same_keys(any_engine, tmp_path):
    started, gate = str(tmp_path / "started"), str(tmp_path / "gate")
    with any_poly.Pool(2, name="lab") as pool:
        assert [each.value for each in pool.everywhere(abs, -1)] == [1, 1]
        promise = pool.promise(hold_until, gate, started)
        wait_for(lambda: lines(started))
        status = json.loads(json.dumps(pool.status()))
        (busy,) = (each for each in pool.drones if each.running is not None)
        assert busy.running == "hold_until"
        append(gate, "")
        promise.result()
    assert status.keys() == KEYS and all(each.keys() == DRONE_KEYS for each in status["drones"])
    assert (status["name"], status["engine"], status["state"]) == ("lab", any_engine, "open")
    assert (status["queued"], status["in_flight"], status["running"]) == (0, 1, 1)
    assert status["tasks_done"] == sum(each["tasks_done"] for each in status["drones"]) == 2
    assert (status["size"], status["width"]) == (2, 1)
    assert time.time() - 1000 < status["started"] <= time.time()
    assert sorted(each["state"] for each in status["drones"]) == ["busy", "idle"]
    assert {each["running"] for each in status["drones"]} == {"hold_until", None}
    assert (status["shared_memory"] is None) == (any_engine != "local")
    assert pool.status()["state"] == "ended" and pool.status()["drones"] == []


KEYS = {
    "name", "engine", "state", "reason", "pid", "host", "version", "address", "clients", "started",
    "size", "width", "queued", "waiting", "in_flight", "running", "tasks_done", "tasks_failed",
    "failures", "tasks_cancelled", "resources", "shared_memory", "shared_memory_limit", "drones",
    "native_threads",
}  # fmt: skip
DRONE_KEYS = {
    "number", "name", "pid", "host", "state", "running", "seconds", "waiting", "item",
    "client", "memory", "processor", "tasks_done",
}  # fmt: skip


def test_a_served_pool_gives_the_same_keys_and_counts_its_clients_errors(tmp_path):
    card = str(tmp_path / "pool.json")
    with poly.Pool(2) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
        assert isinstance(remote.promise("1 / 0").exception(), ZeroDivisionError)
        status = json.loads(json.dumps(remote.status()))
        assert status.keys() == KEYS and status["address"].startswith("tcp://")
        assert (status["tasks_done"], status["tasks_failed"], status["clients"]) == (1, 1, 1)
        assert pool.status().keys() == KEYS


def test_a_failure_of_a_clients_map_has_its_item(tmp_path):
    card = str(tmp_path / "pool.json")
    with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
        list(remote.map(fail_at, [1, 2], [0, 2], return_exceptions=True))
        (failure,) = pool.status()["failures"]
        assert (failure["task"], failure["item"]) == ("fail_at", 1)


def test_local_and_remote_drones_have_the_same_facts(tmp_path):
    card, started, gate = (str(tmp_path / name) for name in ("pool.json", "started", "gate"))
    with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
        (local,), (far,) = pool.drones, remote.drones
        assert local.running is far.running is None
        promise = pool.promise(hold_until, gate, started)
        wait_for(lambda: lines(started))
        assert local.running == far.running == "hold_until"
        assert all(100_000 < each < 1 << 30 for each in (local.memory, far.memory))
        append(gate, "")
        promise.result()
        local.kill()
        assert local.running is local.memory is far.running is far.memory is None


def fail_at(n, bad):
    if n == bad:
        raise KeyError(n, "with\nlines")
    return n


class ExitsAtHome(Exception):
    """Its text ends this process, but no drone."""

    here = os.getpid()

    def __str__(self):
        if os.getpid() == self.here:
            raise SystemExit
        return "away"


def raise_exits_at_home():
    raise ExitsAtHome


def test_a_failure_whose_text_raises_is_listed_and_settles_its_task():
    with poly.Pool(1) as pool:
        error = pool.promise(raise_exits_at_home).exception(60)
        (failure,) = pool.status()["failures"]
    assert isinstance(error, ExitsAtHome)
    assert failure["error"] == "ExitsAtHome: <__str__ raised SystemExit>"


def test_the_last_failures_are_listed():
    with poly.Pool(1, name="lab", output="discard") as pool:
        for failing in (
            lambda: pool.doit(fail_at, 0, 0),
            lambda: pool.doit(os._exit, 3),
            lambda: pool.options(timeout=0.05).doit(time.sleep, 60),
            lambda: pool.options(retries=poly.Retry(1, delay=0)).doit(fail_at, 1, 1),
            lambda: list(pool.map(fail_at, range(5000), [-1] * 2500 + [2500])),
            lambda: list(pool.map(fail_at, [1, 2], [0, 2], return_exceptions=True)),
        ):
            with contextlib.suppress(Exception):
                failing()
        held = pool.promise(time.sleep, 60)
        wait_for(held.running)
        held.cancel()  # no failure
        pool.doit(abs, -1)
        failures = pool.status()["failures"]
        assert all(abs(each.pop("at") - time.time()) < 3600 for each in failures)
        assert failures[4].pop("drone") in (None, "lab.0")  # None if it was in a chunk
        dead = failures.pop(1)
        assert dead["task"] == "_exit" and dead["error"].startswith("DroneDied: drone lab.0 (pid ")
        assert [tuple(each.values()) for each in failures] == [
            ("fail_at", None, "lab.0", "KeyError: (0, 'with\\nlines')"),
            ("sleep", None, "lab.0", "TimeoutError: sleep ran for more than 0.05 s on lab.0"),
            ("fail_at", None, "lab.0", "KeyError: (1, 'with\\nlines')"),
            ("fail_at", 2500, "KeyError: (2500, 'with\\nlines')"),
            ("fail_at", 1, "lab.0", "KeyError: (2, 'with\\nlines')"),
        ]


def test_a_failure_whose_message_has_no_utf_8_can_be_shown():
    """A file's name that is not UTF-8 has lone surrogates, which no page can be sent with."""
    with poly.Pool(1) as pool:
        assert isinstance(pool.promise("raise OSError('caf\\udce9')").exception(), OSError)
        (failure,) = pool.status()["failures"]
    assert failure["error"] == r"OSError: caf\udce9"


def test_shared_memory_in_use_is_counted():
    with poly.Pool(1) as pool:
        before = pool.status()["shared_memory"]
        shared = pool.share(bytes(8 << 20))
        assert pool.status()["shared_memory"] >= before + (8 << 20)
        assert pool.status()["shared_memory_limit"] > 8 << 20
        del shared
    assert pool.status()["shared_memory"] == 0


def told_of(pid, file):
    with open(f"/proc/{pid}/{file}") as told:
        return told.read()


def test_ps_and_top_show_who_is_who():
    def name_of(pid):
        return told_of(pid, "comm").strip()

    with poly.Pool(1, name="lab") as pool:
        assert name_of(pool.doit(os.getpid)) == "lab.0"
        zygote = pool.doit(os.getppid)
        wait_for(lambda: name_of(zygote) == "zygote lab")  # which has the drone's name for the fork
    with poly.Drone(name="a-name-that-is-too-long") as drone:
        assert name_of(drone.doit(os.getpid)) == "a-name-that-is-too-long"[:15]


def test_a_name_that_the_kernel_cuts_within_a_character_disturbs_nobody():
    with poly.Drone(name="é" * 10) as drone:
        assert state_of(drone.doit(os.getpid)) in ("R", "S")
        # A search of all processes, as by the zygote if the kernel has no CONFIG_PROC_CHILDREN.
        assert drone.doit(os.getppid) in parent_death._children_by_search()
