"""`engine="inline"`: the tasks of a pool run in this process, one after the other. What holds for
all engines is in the tests that are imported below."""

import gc
import os
import sys
import threading
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest
from engines import running
from faults import append, lines, wait_for
from test_promises_within import *  # noqa: F403 - run again, on this engine

import polycephaly as poly
from polycephaly import DroneDied, Kept
from polycephaly.runtime.tuning import tuning
from polycephaly.wire import placeholders

ran = []
pool_at_hand = []
gate = threading.Event()
begun = threading.Event()


@pytest.fixture(scope="module", params=["inline"])
def engine(request):
    with running(request.param):
        yield request.param


@pytest.fixture
def pool():
    ran.clear()
    with poly.Pool(2, engine="inline") as pool:
        pool_at_hand[:] = [pool]
        yield pool
    pool_at_hand.clear()


@pytest.fixture
def deaf_task():
    """The task heeds no interrupt until the test is over."""
    gate.clear()
    yield wait_at_the_gate
    gate.set()
    wait_for(lambda: not inline_threads())


def drones_of(pool):
    """A drone that was replaced has another number, by the same name."""
    return {handle.number for handle in pool._dispatcher.handles}


def inline_threads():
    return [thread for thread in threading.enumerate() if thread.name == "polycephaly-inline"]


def note(n):
    ran.append(n)
    return threading.get_ident()


async def note_both_ends(n):
    ran.append(("begins", n))
    await poly.green.sleep(0.001)
    ran.append(("ends", n))
    return n


def spin(started):
    append(started, "begun")
    while not gate.is_set():
        pass


def put_two(sender):
    sender.put(1)
    sender.put(2)


def call_own_pool():
    return pool_at_hand[0].doit(abs, -1)


class Waits:
    """A finalizer that waits for another pool: for the task's own object, and for the copy."""

    def __init__(self):
        self.me = self  # collected when the garbage collector runs

    def __del__(self):
        with suppress(RuntimeError, IndexError):  # where waiting is refused, or it is over
            ran.append(pool_at_hand[0].doit(abs, -3))


def wait_for_file(path):
    wait_for(lambda: os.path.exists(path))


def wait_at_the_gate(started):
    append(started, "begun")
    gate.wait()


def test_tasks_run_in_this_process_in_the_order_of_the_calls(pool):
    threads = {promise.value for promise in [pool.promise(note, n) for n in range(3000)]}
    assert ran == [*range(3000)] and len(threads) == 1
    assert [*pool.map(note, range(3000, 5000))] == [*threads] * 2000
    assert ran == [*range(5000)]
    assert {drone.doit(os.getpid) for drone in pool.drones} == {os.getpid()}


def test_one_drone_unless_told_otherwise_and_a_lone_one():
    with poly.Pool(engine="inline") as pool:
        assert len(pool.drones) == 1
    with poly.Drone(engine="inline") as drone:
        assert drone.doit("6 * 7") == 42


def test_arguments_are_those_of_the_call_and_results_are_copies(pool):
    mine = [1]
    promise = pool.promise(lambda theirs: (theirs.append(2), theirs)[1], mine)
    mine.append(3)
    assert promise.value == [1, 2] and mine == [1, 3]


def test_what_is_patched_here_is_patched_there(pool, monkeypatch):
    stops = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(threading.current_thread()))
    pool.doit(lambda: breakpoint())
    (thread,) = stops
    assert thread.name == "polycephaly-inline"


def test_an_error_has_the_frames_of_its_task(pool):
    with pytest.raises(ZeroDivisionError) as caught:
        pool.doit(lambda: 1 / 0)
    assert "test_inline.py" in str(caught.value.__cause__)


def test_a_cancelled_task_that_computes_is_left_with_its_drone(
    deaf_task, pool, tmp_path, monkeypatch
):
    monkeypatch.setattr(tuning, "grace_seconds", 0.1)
    started, before = str(tmp_path / "started"), drones_of(pool)
    spinning = pool.promise(spin, started)
    behind = pool.promise(note, 1)
    wait_for(lambda: lines(started))
    assert spinning.cancel()
    with pytest.raises(CancelledError):
        spinning.result(60)
    assert behind.result(60) and drones_of(pool) != before
    assert len(inline_threads()) == 2
    gate.set()
    wait_for(lambda: len(inline_threads()) == 1)


def test_a_killed_drone_leaves_no_traced_thread_waiting(deaf_task, pool, tmp_path):
    """As with an asynchronous exception that waits for the thread of the task: see inline.py."""
    started = str(tmp_path / "started")
    waiting = pool.promise(deaf_task, started)
    wait_for(lambda: lines(started))
    pool.drones[0].kill()
    with pytest.raises(DroneDied):
        waiting.result(60)
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: None)
    try:
        assert pool.doit(abs, -1) == 1
    finally:
        sys.settrace(before)


def test_a_time_limit_counts_from_the_beginning_of_its_task(deaf_task, pool, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "grace_seconds", 0.1)
    busy = pool.promise(wait_for_file, str(tmp_path / "go"))
    limited = pool.options(timeout=0.05).promise(abs, -1)
    with pytest.raises(TimeoutError):
        limited.result(0.3)
    assert not limited.done()
    append(str(tmp_path / "go"), "go")
    assert busy.result(60) is None
    # If the machine stood still just then, the limit is over.
    assert limited.exception(60) is None or isinstance(limited.exception(), TimeoutError)
    with pytest.raises(TimeoutError, match=r"spin ran for more than 0\.05 s"):
        pool.options(timeout=0.05).doit(spin, str(tmp_path / "started"))
    assert pool.doit(abs, -1) == 1


def test_a_task_that_heeds_no_interrupt_is_left_and_the_others_run(
    deaf_task, pool, tmp_path, monkeypatch
):
    monkeypatch.setattr(tuning, "grace_seconds", 0.1)
    started, before = str(tmp_path / "started"), drones_of(pool)
    sleeping = pool.promise(deaf_task, started)
    behind = [pool.promise(note, n) for n in range(20)]
    wait_for(lambda: lines(started))
    sleeping.cancel()
    assert len({promise.result(60) for promise in behind}) == 1
    assert ran == [*range(20)] and drones_of(pool) != before


def test_a_killed_drone_gives_back_what_it_had_not_begun(deaf_task, tmp_path):
    ran.clear()
    started = str(tmp_path / "started")
    with poly.Pool(1, engine="inline") as pool:
        for n in range(100):  # their length is known
            pool.doit(note, n)
        sleeping = pool.promise(deaf_task, started)
        wait_for(lambda: lines(started))
        behind = [pool.promise(note, n) for n in range(100, 200)]
        pool.drones[0].kill()
        with pytest.raises(DroneDied, match=r"a thread cannot be killed.*while running wait_at"):
            sleeping.result(60)
        assert len({promise.result(60) for promise in behind}) == 1
        assert ran == [*range(200)]


def test_of_many_tasks_exactly_the_cancelled_do_not_run(pool):
    interval, before = sys.getswitchinterval(), drones_of(pool)
    sys.setswitchinterval(1e-6)
    try:
        for begin in range(0, 4000, 20):
            some = [pool.promise(note, begin + n) for n in range(20)]
            for promise in some[::2]:
                promise.cancel()
            assert len({promise.result(60) for promise in some[1::2]}) == 1
    finally:
        sys.setswitchinterval(interval)
    assert pool.doit(abs, -1) == 1 and drones_of(pool) == before
    assert len(ran) == len({*ran}) and {*ran} >= {*range(1, 4000, 2)}


def test_no_task_runs_twice_however_often_its_drone_is_killed(pool):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    lost = 0
    try:
        for begin in range(0, 4000, 40):
            some = [pool.promise(note, begin + n) for n in range(40)]
            for drone in pool.drones:
                drone.kill()
            for promise in some:
                try:
                    promise.result(60)
                except DroneDied:
                    lost += 1
    finally:
        sys.setswitchinterval(interval)
    assert len(ran) == len({*ran}) and len(ran) >= 4000 - lost
    assert lost <= 3 * len(pool.drones) * 100


def test_coroutines_run_one_after_the_other():
    ran.clear()
    with poly.Pool(2, engine="inline", width=4) as pool:
        assert [*pool.map(note_both_ends, range(5))] == [*range(5)]
    assert ran == [(what, n) for n in range(5) for what in ("begins", "ends")]


def test_values_are_kept_in_their_pool_only(pool):
    first, second = pool.doit(lambda: [Kept("a"), Kept("b")])
    with poly.Pool(1, engine="inline") as other:
        assert other.promise(str.upper, "c", keep=True).value.value == "C"
        assert pool.doit(lambda a, b: a + b, first, second) == "ab"
        with pytest.raises(TypeError, match="kept"):
            other.doit(len, first)
    wait_for(lambda: not placeholders.inline_stores)  # the last turn ends after its answer
    with pytest.raises(RuntimeError, match="no drone"):
        Kept(1)


def test_a_coroutine_and_a_thread_of_a_task_keep_values_too(pool):
    async def in_coroutine():
        return Kept("a")

    def in_thread():
        made = []
        thread = threading.Thread(target=lambda: made.append(Kept("b")))
        thread.start()
        thread.join()
        return made[0]

    assert pool.doit(in_coroutine).value + pool.doit(in_thread).value == "ab"


def test_a_pool_of_forks_within_a_task(pool):
    def inner():
        with poly.Pool(1) as forked:
            kept = forked.promise(list, "ab", keep=True).value
            return forked.doit(len, kept), forked.doit(lambda: Kept("abc")).value

    assert pool.doit(inner) == (2, "abc")


def test_a_task_that_calls_its_own_pool_is_told_so(pool):
    with pytest.raises(RuntimeError, match="its own pool"):
        pool.doit(call_own_pool)


def test_an_end_of_a_channel_is_gone_with_its_call(pool):
    with poly.Pool(1):  # whose drones give this process an address for channels
        channel = poly.green.Channel(2)
        with channel.receiver() as receiver:
            pool.doit(put_two, channel.sender())
            assert list(receiver) == [1, 2]


def test_a_finalizer_that_waits_in_the_thread_of_the_tasks_does_not_stop_the_reactor(pool):
    ran.clear()
    with poly.Pool(1) as other:
        pool_at_hand[:] = [other]
        work = [pool.promise(Waits) for _ in range(200)]
        assert all(promise.result(30) for promise in work)
        del work
        gc.collect()
        assert 3 in ran


@pytest.mark.parametrize("option", [{"cwd": "/"}, {"env": {"A": "1"}}, {"start": "spawn"}])
def test_what_needs_a_process_is_refused(option):
    with pytest.raises(ValueError, match="runs tasks in this process"):
        poly.Pool(engine="inline", **option)


def test_options_of_other_engines_are_refused():
    with pytest.raises(TypeError, match=r"inline engine has no such option.*ray"):
        poly.Pool(engine="inline", num_cpus=1)


def test_nothing_is_left_of_it():
    with poly.Pool(2, engine="inline") as pool:
        pool.doit(abs, -1)
        with poly.Pool(1) as forked:
            assert forked.doit(os.getpid) != pool.doit(os.getpid)
    wait_for(lambda: not inline_threads())


def test_a_drone_that_is_killed_as_its_task_ends_leaves_no_thread():
    with poly.Pool(2, engine="inline") as pool:
        pool.doit(abs, -1)
        handle = pool._dispatcher.handles[0]
        handle.drone._current = 1  # as `kill` has read it, a moment before the end of the task
        pool.drones[0].kill()
        wait_for(lambda: drones_of(pool) == {2, 3})
        wait_for(lambda: len(inline_threads()) == 1)
        assert pool.doit(abs, -2) == 2
    wait_for(lambda: not inline_threads())


def keep_in_a_thread_later():
    begun.set()
    assert gate.wait(30)
    made = []
    thread = threading.Thread(target=lambda: made.append(Kept("a")))
    thread.start()
    thread.join()
    return made[0]


def test_a_thread_of_a_task_keeps_a_value_though_a_task_of_another_pool_has_ended(pool):
    gate.clear()
    begun.clear()
    kept = pool.promise(keep_in_a_thread_later)
    assert begun.wait(30)
    with poly.Pool(1, engine="inline") as other:
        assert other.doit(int) == 0
        wait_for(lambda: len(placeholders.inline_stores) < 2)  # its turn ends after its answer
    gate.set()
    assert kept.result(30).value == "a"
