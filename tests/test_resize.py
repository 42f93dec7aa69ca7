"""`Pool.resize`: more or fewer drones of a pool that runs."""

import errno
import itertools
import os
import threading
import time
from concurrent.futures.process import BrokenProcessPool

import pytest
from engines import poly as any_poly
from faults import append, hold_until, lines, wait_for
from in_time import PID, FakeReactor, dispatcher_of, give, make_ready, submitted, task

import polycephaly as poly
from polycephaly import DroneDied, Promise
from polycephaly.pool.handlers import handle_message
from polycephaly.pool.interfaces import State, TaskOptions
from polycephaly.pool.map_source import Source
from polycephaly.pool.population import surplus
from polycephaly.wire.messages import HELLO, PROTOCOL, RECALL, STOP, Malformed, pack_numbers


def resize(dispatcher, size):
    dispatcher.supervisor.resize(size)
    dispatcher.reactor.turn()


# -- decisions, without processes ------------------------------------------------------------------


class Loaded:
    def __init__(self, number, load=0.0, unknown=0, dedicated=0):
        self.number, self.load, self.unknown, self.overlapping = number, load, unknown, 0
        self.dedicated, self.preferred = range(dedicated), ()


def test_idle_drones_are_superfluous_first_then_the_least_loaded():
    own, idle, brief, long, young = (
        Loaded(1, dedicated=1), Loaded(2), Loaded(3, load=1e-3), Loaded(4, unknown=1), Loaded(5),
    )  # fmt: skip
    handles = [own, idle, brief, long, young]
    order = [young, idle, brief, long, own]
    for size in range(1, 6):
        assert surplus(handles, size) == order[: 5 - size]
    assert surplus(handles, 9) == []


def test_a_superfluous_drone_gives_back_what_it_has_not_begun_and_ends_after_the_rest(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    dispatcher.registry.define(task).record_duration(1e-5, 1)  # short: sent ahead
    tasks = [submitted(dispatcher, task) for _ in range(4)]
    reactor.turn()
    stays, leaves = dispatcher.handles
    first, second = leaves.in_flight.values()
    resize(dispatcher, 1)
    assert dispatcher.current_drones() == [stays]
    assert leaves.state is State.RETIRING and (RECALL, ()) in leaves.sent_to_it
    dispatcher.requeue_returned(leaves, [(second.number, 0)])
    reactor.turn()
    assert second.handle is stays and len(stays.in_flight) == 3
    assert (STOP, ()) not in leaves.sent_to_it
    leaves.answers(first)
    assert leaves.state is State.STOPPING and (STOP, ()) in leaves.sent_to_it
    leaves.dies()
    assert dispatcher.handles == [stays]
    for each in list(stays.in_flight.values()):
        stays.answers(each)
    assert all(each.promise.done() for each in tasks)


def test_more_drones_get_the_lowest_free_names(reactor):
    dispatcher = dispatcher_of(reactor, 3)
    give(dispatcher, task, target=dispatcher.handles[2])
    resize(dispatcher, 1)
    assert [each.name for each in dispatcher.current_drones()] == ["pool.2"]
    resize(dispatcher, 4)
    names = [each.name for each in dispatcher.current_drones()]
    assert names == ["pool.2", "pool.0", "pool.1", "pool.3"]
    assert list(dispatcher.record.drones) == ["pool.0", "pool.1", "pool.2", "pool.3"]


def test_a_starting_drone_with_tasks_of_its_own_does_not_count_once_it_is_superfluous(reactor):
    dispatcher = dispatcher_of(reactor, 2, ready=False)
    old = dispatcher.handles[:]
    own = [submitted(dispatcher, task, target=each) for each in old]
    resize(dispatcher, 1)
    (stays,) = dispatcher.current_drones()
    resize(dispatcher, 2)
    (new,) = (each for each in dispatcher.current_drones() if each is not stays)
    assert new not in old and len(dispatcher.handles) == 3
    make_ready(dispatcher)
    for handle, each in zip(old, own, strict=True):
        handle.answers(each)
    assert [each.state is State.STOPPING for each in old] == [each is not stays for each in old]


def test_a_drone_that_never_started_does_not_keep_a_refresh_waiting(reactor):
    dispatcher, replaced = dispatcher_of(reactor, 2), Promise()
    for handle in dispatcher.handles:
        give(dispatcher, task, target=handle)
    dispatcher.supervisor.engine.adopt = lambda snapshot: None
    dispatcher.supervisor.replace_all(None, replaced)
    first, second = dispatcher.current_drones()
    first.starts()
    resize(dispatcher, 1)
    assert second.kills and not replaced.done()
    second.dies()
    assert replaced.done()


def test_the_window_of_a_map_follows_the_size(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    source = Source(dispatcher, dispatcher.task_options, task, [itertools.count()])
    assert (source.calls_ahead(), source.tasks_ahead()) == (4, 4)
    resize(dispatcher, 3)
    assert (source.calls_ahead(), source.tasks_ahead()) == (12, 12)


def test_a_pool_that_is_closed_does_not_grow(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    give(dispatcher, task)
    dispatcher.close()
    reactor.turn()
    with pytest.raises(RuntimeError, match="after shutdown"):
        dispatcher.resize(2, 0, ())


# -- with drones -----------------------------------------------------------------------------------


def settled(pool, size):
    return lambda: (
        len(pool._dispatcher.handles)
        == size
        == sum(handle.state is State.READY for handle in pool._dispatcher.handles)
    )


def test_a_pool_grows_and_shrinks(any_engine):
    with any_poly.Pool(1, name="lab") as pool:
        pool.resize(4)
        assert pool.status()["size"] == len(pool.drones) == 4
        assert "4 drones" in repr(pool)
        assert [each.value for each in pool.everywhere(abs, -1)] == [1, 1, 1, 1]
        assert sorted(pool.map(abs, range(-50, 0))) == list(range(1, 51))
        pool.resize(2)
        assert pool.status()["size"] == len(pool.drones) == 2
        wait_for(settled(pool, 2))
        assert [each.name for each in pool.drones] == ["lab.0", "lab.1"]
        assert repr(pool) == "<Pool lab: 2 drones, 0 busy, 0 tasks>"
        assert pool.doit(abs, -2) == 2
        assert pool.timeline.drones == ["lab.0", "lab.1", "lab.2", "lab.3"]
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown of lab"):
        pool.resize(1)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None, "2"])
def test_a_wrong_number_is_refused_by_its_value(wrong):
    with poly.Pool(1) as pool:
        with pytest.raises((ValueError, TypeError), match=f"drones .*not {wrong!r}"):
            pool.resize(wrong)
        assert len(pool.drones) == 1


def test_running_tasks_are_finished_by_superfluous_drones(tmp_path):
    started, gate = str(tmp_path / "started"), str(tmp_path / "gate")
    with poly.Pool(3) as pool:
        blocked = [pool.promise(hold_until, gate, started) for _ in range(3)]
        wait_for(lambda: len(lines(started)) == 3)
        queued = [pool.promise(os.getpid) for _ in range(20)]
        pool.resize(1)
        (stays,) = pool.drones
        assert "1 drone, 1 busy, 2 retiring, 23 tasks" in repr(pool)
        states = [each["state"] for each in pool.status()["drones"]]
        assert sorted(states) == ["busy", "retiring", "retiring"]
        append(gate, "")
        poly.gather(*blocked).result()
        assert {each.value for each in queued} == {stays.pid}
        wait_for(settled(pool, 1))


def variables(index):
    return {"INDEX": str(index), "CALLS": str(next(calls))}


calls = itertools.count()


def test_the_environment_of_each_new_index_is_asked_for_once():
    with poly.Pool(2, env=variables) as pool:
        first = next(calls)
        pool.resize(3)
        pool.resize(1)
        wait_for(settled(pool, 1))
        pool.resize(4)
        told = [each.value for each in pool.everywhere("import os; os.environ['INDEX']")]
        assert sorted(told) == ["0", "1", "2", "3"]
        assert next(calls) == first + 3  # for 2 and 3
    with poly.Pool(1, env={"INDEX": "same"}) as pool:
        pool.resize(2)
        told = [each.value for each in pool.everywhere("import os; os.environ['INDEX']")]
        assert told == ["same", "same"]


def refuse(index):
    if index:
        raise LookupError(index)
    return {}


def test_an_error_of_env_changes_nothing():
    with poly.Pool(1, env=refuse) as pool:
        with pytest.raises(LookupError):
            pool.resize(2)
        assert len(pool.drones) == pool.status()["size"] == 1


def test_new_drones_are_of_the_pools_snapshot_also_after_many_and_after_a_refresh():
    with poly.Pool(1) as pool:
        pool.resize(9)
        assert len({each.value for each in pool.everywhere(os.getpid)}) == 9
        pool.refresh()
        pool.resize(20)
        assert len({each.value for each in pool.everywhere(os.getpid)}) == 20


def test_drones_are_added_to_a_pool_of_fresh_interpreters():
    with poly.Pool(1, start="spawn") as pool:
        pool.resize(3)
        assert len({each.value for each in pool.everywhere(os.getpid)}) == 3


def test_a_map_uses_drones_that_come_while_it_runs(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(1) as pool:
        results = pool.map(hold_until, [gate] * 3, [started] * 3)
        wait_for(lambda: lines(started))
        pool.resize(3)
        wait_for(lambda: len(lines(started)) == 3)
        append(gate, "")
        assert len(list(results)) == 3


def test_a_map_loses_and_repeats_nothing_while_the_size_changes(tmp_path):
    with poly.Pool(2) as pool:
        results = pool.map(lambda n: (n, time.sleep(0.0005)), range(2000))
        sizes = itertools.cycle([5, 1, 3, 2, 6, 1])
        done = []
        for count, (number, _) in enumerate(results):
            done.append(number)
            if count % 50 == 0:
                pool.resize(next(sizes))
        assert done == list(range(2000))


async def overlapped(gate, started):
    from polycephaly import green

    append(started, "x")
    while not os.path.exists(gate):
        await green.sleep(0.01)
    return os.getpid()


def test_overlapped_tasks_end_in_their_drones(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(2, width=3) as pool:
        promises = [pool.promise(overlapped, gate, started) for _ in range(6)]
        wait_for(lambda: len(lines(started)) == 6)
        pids = {drone.pid for drone in pool.drones}
        pool.resize(1)
        append(gate, "")
        assert {each.value for each in promises} == pids
        wait_for(settled(pool, 1))


def test_a_kept_value_survives_its_superfluous_drone():
    with poly.Pool(2) as pool:
        drones = pool.drones
        kept = [drone.promise(list, "abc", keep=True).value for drone in drones]
        pool.resize(1)
        wait_for(settled(pool, 1))
        assert [pool.doit(len, each) for each in kept] == [3, 3]


def test_it_may_be_called_by_threads_and_callbacks():
    with poly.Pool(2) as pool:
        threads = [
            threading.Thread(target=lambda size=size: [pool.resize(size) for _ in range(10)])
            for size in (1, 3, 4)
        ]
        for thread in threads:
            thread.start()
        assert list(pool.map(abs, range(200))) == list(range(200))
        for thread in threads:
            thread.join()
        assert pool.status()["size"] in (1, 3, 4)
        pool.promise(abs, -1).add_done_callback(lambda promise: pool.resize(2))
        wait_for(settled(pool, 2))


def test_clients_change_the_number_of_drones_of_a_served_pool(tmp_path):
    card = str(tmp_path / "pool.json")
    with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
        remote.resize(3)
        assert len(remote.drones) == len(pool.drones) == remote.status()["size"] == 3
        assert "3 drones" in repr(remote)
        remote.resize(1)
        assert remote.doit(abs, -1) == 1
        with pytest.raises(ValueError, match="drones must be at least 1, not 0"):
            remote.resize(0)


def test_shrinking_and_growing_with_busy_drones_finds_room_each_time(tmp_path):
    go = str(tmp_path / "go")
    with poly.Pool(2, output="discard") as pool:
        held = [pool.promise(hold_until, go)]
        for _ in range(5):
            held.append(pool.promise(hold_until, go))
            wait_for(lambda: all(each.running() for each in held))
            pool.resize(1)  # one of the two drones, which are busy, retires
            pool.resize(2)
        wait_for(lambda: len(pool.drones) == 2 and all(each.pid for each in pool.drones))
        assert pool.doit(abs, -1) == 1
        (tmp_path / "go").touch()


def test_refreshing_a_busy_pool_makes_no_drones_without_end(tmp_path):
    go = str(tmp_path / "go")
    with poly.Pool(1, output="discard") as pool:
        handles = pool._dispatcher.handles
        held = [pool.promise(hold_until, go)]
        wait_for(held[0].running)
        pool.refresh()
        held.append(pool.promise(hold_until, go))
        wait_for(held[1].running)
        refreshing = threading.Thread(target=pool.refresh)
        refreshing.start()  # waits until one of the two has ended
        wait_for(lambda: [each.state for each in handles] == [State.RETIRING] * 2)
        (tmp_path / "go").touch()
        refreshing.join()
        assert pool.doit(abs, -1) == 1


def test_a_drone_that_the_zygote_could_not_fork_is_tried_again():
    reactor = FakeReactor()
    pool = dispatcher_of(reactor, 1)
    pool.supervisor.resize(2)
    failed = pool.handles[-1]
    pool.supervisor.on_not_started(failed, OSError(errno.EAGAIN, "no more processes"))
    reactor.turn()
    assert not pool.state.broken and len(pool.handles) == 1
    reactor.pass_(1.0)
    assert len(pool.handles) == 2


def test_a_drone_that_the_engine_could_not_start_is_tried_again(reactor):
    pool = dispatcher_of(reactor, 1)
    engine, tries = pool.supervisor.engine, []

    def fail(number, name, index):
        tries.append(name)
        pool.post(pool.supervisor.on_start_error, OSError(errno.EMFILE, "too many files"))

    start, engine.start = engine.start, fail
    resize(pool, 3)
    assert tries == ["pool.1"] and len(pool.handles) == 1 and not pool.state.broken
    engine.start = start
    reactor.pass_(1.0)
    assert [each.name for each in pool.handles] == ["pool.0", "pool.1", "pool.2"]


def test_a_limit_breaks_a_pool_without_a_drone_only_after_three_tries():
    reactor = FakeReactor()
    pool = dispatcher_of(reactor, 1)
    given = give(pool, task)
    pool.handles[0].dies()
    assert isinstance(given.promise.exception(), DroneDied)
    waits = give(pool, task)
    for _ in range(2):
        pool.supervisor.on_not_started(pool.handles[-1], OSError(errno.EMFILE, "too many files"))
        assert not pool.handles
        reactor.pass_(1.0)
    make_ready(pool)
    pool.handles[0].answers(waits, 5)
    assert waits.promise.result() == 5
    waits = give(pool, task)
    pool.handles[0].dies()
    waits = give(pool, task)
    for _ in range(3):
        pool.supervisor.on_not_started(pool.handles[-1], OSError(errno.EMFILE, "too many files"))
        reactor.pass_(1.0)
    with pytest.raises(BrokenProcessPool, match="too many files"):
        waits.promise.result()


@pytest.mark.parametrize("retries", [0, 3])
def test_a_task_that_was_lost_after_the_others_were_cancelled_is_not_run_again(retries):
    reactor = FakeReactor()
    pool = dispatcher_of(reactor, 1)
    lost = give(pool, abs, -1, retries=retries)
    pool.state.has_cancelled = True
    pool.handles[0].dies()
    assert isinstance(lost.promise.exception(), poly.DroneDied)


def test_cancelled_tasks_do_not_pile_up_while_the_drone_is_busy():
    reactor = FakeReactor()
    pool = dispatcher_of(reactor, 1)
    running = give(pool, abs, -1)
    for _ in range(30):
        promises = [pool.submit(abs, (-1,), {}) for _ in range(1000)]
        for promise in promises:
            promise.cancel()
        reactor.turn()
    kept = give(pool, abs, -2)
    assert (
        len(pool.assignment.queue) < 2500
        and pool.assignment.queue[-1] is kept
        and not running.promise.done()
    )


def test_a_drone_reserved_for_resources_does_not_keep_the_pool_busy():
    async def wait():
        pass

    reactor = FakeReactor()
    pool = dispatcher_of(reactor, 1, width=4, resources=(("r", 1),))
    give(pool, wait)
    pool.submit(abs, (-1,), {}, task_options=TaskOptions(None, 0, 0, (("r", 1),)))
    give(pool, wait)
    assert pool.assignment.queue and not pool.wants_tasks


def test_a_pool_has_begun_when_its_first_drone_has_started(reactor):
    dispatcher = dispatcher_of(reactor, 3, ready=False)
    assert not dispatcher.begun.done()
    dispatcher.handles[0].starts()
    assert dispatcher.begun.done()
    dispatcher.handles[0].says_hello()
    given = give(dispatcher, task)
    dispatcher.handles[0].answers(given, 5)
    assert given.promise.result() == 5


def test_a_pool_too_large_for_a_limit_breaks_with_the_limits_name(reactor):
    dispatcher = dispatcher_of(reactor, 3, ready=False)
    first, second, _ = dispatcher.handles
    first.starts()
    first.says_hello()
    given = give(dispatcher, task)
    dispatcher.supervisor.on_not_started(second, OSError(errno.EAGAIN, "no more processes"))
    reactor.turn()
    with pytest.raises(BrokenProcessPool, match=r"not all drones .* no more processes"):
        given.promise.result()
    with pytest.raises(BrokenProcessPool, match="no more processes"):
        dispatcher.submit(task, (), {})


def test_drones_that_cannot_be_forked_are_tried_again_once_a_second():
    reactor = FakeReactor()
    pool = dispatcher_of(reactor, 1)
    pool.supervisor.resize(8)
    replaced = Promise()
    pool.supervisor._pending_refreshes.append(replaced)
    tries = 0
    for _ in range(50):
        for handle in [each for each in pool.handles if each.state is State.STARTING]:
            tries += 1
            pool.supervisor.on_not_started(handle, OSError(errno.EAGAIN, "no more processes"))
            reactor.pass_(0.1)
    assert tries <= 7 * 8 and replaced.done()  # five seconds have passed


def test_the_pid_of_a_drone_is_known_once_it_takes_tasks(reactor):
    """The zygote's report of it may be read after the drone's first message."""
    dispatcher = dispatcher_of(reactor, 1, ready=False)
    (handle,) = dispatcher.handles
    for wrong in ((), (PROTOCOL,), (PROTOCOL, 1, 2), (PROTOCOL + 1, 1)):
        with pytest.raises(Malformed, match="speaks protocol"):
            handle_message(dispatcher, handle, pack_numbers(HELLO, wrong))
    handle_message(dispatcher, handle, pack_numbers(HELLO, (PROTOCOL, PID)))
    assert handle.state is State.READY and handle.pid == PID
    assert not dispatcher.begun.done()
    handle.starts()
    assert dispatcher.begun.done() and handle.pid == PID + handle.number  # the zygote is believed
