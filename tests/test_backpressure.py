"""Back-pressure: a queue with a limit, a slow consumer, results that are larger than memory."""

import os
import signal
import threading
import time
from collections import deque

import pytest
from engines import local_only, on_each_engine, poly
from faults import append, hold_until, lines, wait_for
from in_time import dispatcher_of, give, submitted
from scripts import run_script

pytestmark = on_each_engine

MIB = 1 << 20


@pytest.fixture
def paths(tmp_path):
    return [str(tmp_path / name) for name in ("gate", "started", "three")]


def open_gate(path):
    append(path, "open")


@pytest.mark.guarantee("pool-11")
def test_a_call_that_is_one_too_many_waits_for_room(paths):
    gate, started, _ = paths
    with poly.Pool(1, max_queued=3) as pool:
        holding = pool.promise(hold_until, gate, started)
        wait_for(lambda: lines(started))
        queued = [pool.promise(abs, -i) for i in range(3)]
        late = []
        thread = threading.Thread(target=lambda: late.append(pool.promise(abs, -9)))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not late
        open_gate(gate)
        thread.join(60)
        assert [p.value for p in (holding, *queued, *late)] == ["held", 0, 1, 2, 9]


@local_only
@pytest.mark.parametrize("limit", [1, 2, 7])
def test_many_threads_never_have_more_waiting_than_may(limit):
    most = 0
    with poly.Pool(2, max_queued=limit) as pool:
        queue = pool._dispatcher.assignment.queue
        done = []

        def submit(n):
            nonlocal most
            for i in range(200):
                done.append((n, i, pool.promise(abs, -i)))
                most = max(most, len(queue))

        threads = [threading.Thread(target=submit, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert len(done) == 800 and all(p.value == i for _, i, p in done)
    assert most <= limit + len(threads) - 1  # each looks before it adds


def test_the_main_thread_alone_is_fast_with_a_limit_of_one():
    with poly.Pool(2, max_queued=1) as pool:
        assert [p.value for p in [pool.promise(abs, -i) for i in range(2000)]] == list(range(2000))


def test_cancelled_work_makes_room(paths):
    gate, started, _ = paths
    with poly.Pool(1, max_queued=2) as pool:
        pool.promise(hold_until, gate, started)
        wait_for(lambda: lines(started))
        queued = [pool.promise(abs, -i) for i in range(2)]
        threading.Timer(0.1, queued[0].cancel).start()
        late = pool.promise(abs, -5)
        wait_for(queued[0].cancelled)  # there may be room before it is told
        open_gate(gate)
        assert late.value == 5 and queued[1].value == 1


def test_what_waits_for_its_arguments_takes_no_room():
    with poly.Pool(1, max_queued=1) as pool:
        first = poly.Promise()
        waiting = [pool.promise(abs, first) for _ in range(10)]
        first.set_result(-3)
        assert [p.value for p in waiting] == [3] * 10


def test_a_drone_of_its_own_has_a_queue_of_its_own(paths):
    gate, started, _ = paths
    with poly.Pool(2, max_queued=2) as pool:
        one, other = pool.drones
        one.promise(hold_until, gate, started)
        wait_for(lambda: lines(started))
        mine = [one.promise(abs, -i) for i in range(2)]
        assert other.promise(abs, -1).value == 1
        late = []
        thread = threading.Thread(target=lambda: late.append(one.promise(abs, -9)))
        thread.start()
        thread.join(0.2)
        assert not late
        open_gate(gate)
        thread.join(60)
        assert [p.value for p in (*mine, *late)] == [0, 1, 9]


@pytest.mark.guarantee("pool-11")
def test_a_callback_does_not_wait_for_itself(paths):
    gate, started, _ = paths
    with poly.Pool(1, max_queued=1) as pool:
        got = []
        first = pool.promise(hold_until, gate, started)
        first.add_done_callback(lambda _: got.extend(pool.promise(abs, -i) for i in range(20)))
        wait_for(lambda: lines(started))
        open_gate(gate)
        wait_for(lambda: len(got) == 20)
        assert [p.value for p in got] == list(range(20))


@local_only
@pytest.mark.parametrize("how", ["shutdown", "break"])
def test_who_waits_for_room_is_told_when_no_more_work_is_taken(how, paths):
    gate, started, _ = paths
    pool = poly.Pool(1, max_queued=1, on_death="break")
    pool.promise(hold_until, gate, started)
    wait_for(lambda: lines(started))
    queued = pool.promise(abs, -1)
    errors = []

    def submit():
        try:
            pool.promise(abs, -2)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(pool._dispatcher.backpressure._waiting) == 3)
    if how == "break":
        os.kill(int(lines(started)[0]), signal.SIGKILL)
    else:
        pool.shutdown(wait=False)
    for thread in threads:
        thread.join(60)
    assert len(errors) == 3
    if how == "break":
        assert isinstance(queued.exception(), poly.DroneDied)
    else:
        open_gate(gate)
        assert queued.value == 1
    pool.shutdown()


@local_only
def test_ctrl_c_while_waiting_for_room_submits_nothing(paths):
    done = run_script("""
        import os, signal, sys, threading
        import polycephaly as poly
        from faults import hold_until, lines, wait_for
        gate, started = sys.argv[1:]
        def interrupt():
            wait_for(lambda: pool._dispatcher.backpressure)  # somebody waits
            os.kill(os.getpid(), signal.SIGINT)
        with poly.Pool(1, max_queued=1) as pool:
            first = pool.promise(hold_until, gate, started)
            wait_for(lambda: lines(started))
            second = pool.promise(abs, -1)
            try:
                threading.Thread(target=interrupt).start()
                pool.promise(abs, -2)
            except KeyboardInterrupt:
                print("interrupted", first.done())
            open(gate, "w").close()
            print(second.value, pool.promise(abs, -3).value)
    """, *paths[:2])  # fmt: skip
    assert done.stdout == "interrupted False\n1 3\n", done.stderr


@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.parametrize("ordered", [True, False])
def test_map_under_a_limit_gives_all(limit, ordered):
    with poly.Pool(2, max_queued=limit) as pool:
        got = list(pool.map(abs, range(0, -3000, -1), ordered=ordered))
        assert sorted(got) == list(range(3000))
        got = list(pool.map(len, [os.urandom(100_000)] * 20, ordered=ordered))
        assert got == [100_000] * 20


def large(i):
    return bytes([i % 256]) * (20 * MIB)


@pytest.mark.guarantee("pool-12")
@local_only
def test_a_slow_consumer_of_results_larger_than_memory_needs_little(tmp_path):
    """2 GB of results, of which no more than a third may ever be here."""
    done = run_script("""
        import os, resource, time
        import polycephaly as poly

        def large(i):
            return bytes([i % 256]) * (20 << 20)

        with poly.Pool(2) as pool:
            pool.doit(large, 1)
            most = 0
            for i, result in enumerate(pool.map(large, range(100))):
                assert len(result) == 20 << 20 and result[0] == i % 256
                if i < 10:
                    time.sleep(0.1)
                with open("/proc/self/statm") as statm:
                    mine = int(statm.read().split()[1]) * 4096
                most = max(most, mine + pool._dispatcher.supervisor.engine._arena.used())
            print(most >> 20)
    """)
    assert int(done.stdout) < 700, done.stderr


def test_inputs_of_a_fast_map_are_taken_only_as_far_as_needed():
    taken = 0

    def inputs():
        nonlocal taken
        while True:
            taken += 1
            yield taken

    with poly.Pool(2) as pool:
        results = pool.map(abs, inputs())
        assert next(results) == 1
        time.sleep(0.5)
        assert taken <= 3 * 8192
        results.close()


@pytest.mark.parametrize(
    ("wrong", "kind"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_a_limit_that_makes_no_sense_is_refused(wrong, kind):
    with pytest.raises(kind, match="max_queued"):
        poly.Pool(1, max_queued=wrong)


@local_only
def test_a_cancel_searches_no_queue_and_makes_room(reactor):
    """So that to cancel many takes no time for each pair of them."""

    class Queue(deque):
        def remove(self, task):
            raise AssertionError("a search")

    dispatcher = dispatcher_of(reactor, 1, max_queued=100)
    give(dispatcher, hold_until, "/nowhere")
    dispatcher.assignment.queue = Queue()
    tasks = [submitted(dispatcher, abs, -1) for _ in range(100)]
    reactor.turn()
    assert not dispatcher.has_room()
    for task in reversed(tasks):
        task.promise.cancel()
    reactor.turn()
    assert dispatcher.backlog(None) == 0


@local_only
def test_cancelled_work_is_not_queued(paths):
    gate, started, _ = paths
    with poly.Pool(1) as pool:
        holding = pool.promise(hold_until, gate, started)
        wait_for(lambda: lines(started))
        queued = [pool.promise(abs, -i) for i in range(5)]
        for each in queued[:3]:
            each.cancel()
        wait_for(lambda: pool.status()["queued"] == 2)
        open_gate(gate)
        assert [each.value for each in (holding, *queued[3:])] == ["held", 3, 4]
