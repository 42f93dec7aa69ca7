"""Cancelling: queued work is withdrawn, running work interrupted, or killed and its drone
replaced."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import CancelledError

import pytest
from engines import on_each_engine, poly
from faults import (
    append,
    block_for_ever,
    hold_until,
    lines,
    note,
    sleep_holding_the_gil,
    spin_for_ever,
    wait_for,
)

from polycephaly import green

pytestmark = on_each_engine


def sleep_long(started):
    append(started, str(os.getpid()))
    time.sleep(1000)


def wait_for_a_lock(started):
    lock = threading.Lock()
    lock.acquire()
    append(started, str(os.getpid()))
    lock.acquire()


def clean_up(started, cleaned):
    try:
        append(started, str(os.getpid()))
        time.sleep(1000)
    finally:
        append(cleaned, "cleaned")


def refuse_to_end(started):
    while True:
        try:
            append(started, str(os.getpid()))
            while True:
                time.sleep(0.01)
        except KeyboardInterrupt:
            pass


async def sleep_in_a_green_thread(started):
    append(started, str(os.getpid()))
    await green.sleep(1000)


@pytest.fixture
def paths(tmp_path):
    return [str(tmp_path / name) for name in ("one", "two", "three")]


@pytest.mark.guarantee("promise-3")
def test_queued_work_is_withdrawn_and_never_runs(paths):
    gate, started, ran = paths
    with poly.Pool(1) as pool:
        holder = pool.promise(hold_until, gate, started)
        wait_for(lambda: lines(started))
        queued = [pool.promise(note, ran, i) for i in range(100)]
        assert all(p.cancel() for p in queued[::2])
        append(gate, "open")
        assert holder.value == "held"
        assert [p.value for p in queued[1::2]] == list(range(1, 100, 2))
        for p in queued[::2]:
            assert p.cancelled() and p.done()
            with pytest.raises(CancelledError):
                p.result()
        assert sorted(map(int, lines(ran))) == list(range(1, 100, 2))


def test_short_work_sent_ahead_is_withdrawn_too(paths):
    gate, started, ran = paths
    with poly.Pool(1) as pool:
        for p in [pool.promise(note, ran, -1) for _ in range(100)]:
            p.value  # noqa: B018
        os.unlink(ran)
        holder = pool.promise(hold_until, gate, started)
        queued = [pool.promise(note, ran, i) for i in range(1000)]
        wait_for(lambda: lines(started))
        for p in queued:
            p.cancel()
        append(gate, "open")
        holder.value  # noqa: B018
        assert pool.doit(abs, -1) == 1
        assert not lines(ran)


@pytest.mark.guarantee("promise-3")
@pytest.mark.parametrize(
    "work", [sleep_long, spin_for_ever, wait_for_a_lock, block_for_ever, sleep_in_a_green_thread]
)
def test_running_work_is_interrupted_and_the_drone_lives(work, paths):
    with poly.Pool(1) as pool:
        pid = pool.doit(os.getpid)
        p = pool.promise(work, paths[0])
        wait_for(lambda: lines(paths[0]))
        assert p.cancel() and p.cancelled()
        assert pool.doit(os.getpid) == pid


def test_interrupted_work_cleans_up(paths):
    started, cleaned, _ = paths
    with poly.Pool(1) as pool:
        p = pool.promise(clean_up, started, cleaned)
        wait_for(lambda: lines(started))
        p.cancel()
        wait_for(lambda: lines(cleaned))


@pytest.mark.guarantee("promise-3")
@pytest.mark.parametrize("work", [sleep_holding_the_gil, refuse_to_end])
def test_what_cannot_be_interrupted_is_killed_and_its_drone_replaced(work, paths, short_grace):
    with poly.Pool(2, output="discard") as pool:
        neighbour = pool.promise(hold_until, paths[1], paths[2])
        p = pool.promise(work, paths[0])
        stuck = int(wait_for(lambda: lines(paths[0]))[0])
        wait_for(lambda: lines(paths[2]))
        queued = [pool.promise(os.getpid) for _ in range(5)]
        p.cancel()
        assert all(q.result(60) != stuck for q in queued)
        assert not os.path.exists(f"/proc/{stuck}")
        append(paths[1], "open")
        assert neighbour.value == "held"


@pytest.mark.guarantee("promise-3")
def test_cancelling_one_does_not_touch_its_neighbours(paths):
    started, ran, gate = paths
    with poly.Pool(3) as pool:
        holders = [pool.promise(hold_until, gate, ran) for _ in range(2)]
        p = pool.promise(sleep_long, started)
        wait_for(lambda: lines(started) and len(lines(ran)) == 2)
        p.cancel()
        append(gate, "open")
        assert [h.value for h in holders] == ["held", "held"]


def test_cancel_in_the_moment_of_finishing_never_hits_the_next_work():
    with poly.Pool(1) as pool:
        for i in range(300):
            p = pool.promise(abs, -i)
            following = pool.promise(abs, -i - 1)
            cancelled = p.cancel()
            assert following.result(60) == i + 1
            assert cancelled == p.cancelled()
            assert cancelled or p.value == i


def test_many_cancels_while_short_work_runs_leave_the_rest_right():
    with poly.Pool(2) as pool:
        for _ in range(5):
            work = [pool.promise(abs, -i) for i in range(1000)]
            for p in work[::3]:
                p.cancel()
            for i, p in enumerate(work):
                if p.cancelled():
                    assert i % 3 == 0
                else:
                    assert p.result(60) == i


def test_cancel_not_running_leaves_running_work_alone(paths):
    gate, started, _ = paths
    with poly.Pool(1) as pool:
        p = pool.promise(hold_until, gate, started)
        wait_for(lambda: lines(started))
        assert p.running()
        assert not p.cancel(running=False)
        append(gate, "open")
        assert p.value == "held"


def test_settled_work_cannot_be_cancelled():
    with poly.Pool(1) as pool:
        p = pool.promise(abs, -1)
        assert p.value == 1
        assert not p.cancel() and not p.cancelled() and p.value == 1


@pytest.mark.guarantee("promise-4")
def test_work_that_runs_longer_than_the_timeout_is_rejected_and_interrupted(paths):
    with poly.Pool(1, timeout=0.3) as pool:
        unlimited = pool.options(timeout=1e6)
        pid = unlimited.doit(os.getpid)
        p = pool.promise(sleep_long, paths[0])
        with pytest.raises(TimeoutError, match=r"sleep_long.*0\.3 s"):
            p.result(60)
        assert unlimited.doit(os.getpid) == pid


@pytest.mark.slow
def test_a_timeout_kills_what_cannot_be_interrupted(paths, short_grace):
    with poly.Drone(timeout=0.2) as drone:
        assert isinstance(
            drone.promise(sleep_holding_the_gil, paths[0]).exception(60), TimeoutError
        )
        wait_for(lambda: not drone.alive)


def test_interrupt_stops_what_runs_with_keyboard_interrupt(paths):
    with poly.Drone() as drone:
        p = drone.promise(sleep_long, paths[0])
        wait_for(lambda: lines(paths[0]))
        drone.interrupt()
        assert isinstance(p.exception(60), KeyboardInterrupt)
        assert drone.doit(abs, -1) == 1


def test_interrupting_an_idle_drone_does_nothing():
    with poly.Drone() as drone:
        for i in range(20):
            drone.interrupt()
            assert drone.doit(abs, -i) == i


def test_a_cancelled_asyncio_wait_cancels_the_work(paths):
    async def main(pool):
        async def wait():
            await pool.promise(sleep_long, paths[0])

        task = asyncio.create_task(wait())
        while not lines(paths[0]):
            await asyncio.sleep(0.003)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with poly.Pool(1) as pool:
        pid = pool.doit(os.getpid)
        asyncio.run(main(pool))
        assert pool.doit(os.getpid) == pid


@pytest.mark.guarantee("pool-1")
def test_an_exception_in_a_with_block_cancels_what_runs_and_what_waits(paths):
    with pytest.raises(ZeroDivisionError), poly.Pool(1) as pool:
        running = pool.promise(sleep_long, paths[0])
        queued = pool.promise(note, paths[1], 1)
        wait_for(lambda: lines(paths[0]))
        1 / 0  # noqa: B018
    assert running.cancelled() and queued.cancelled() and not lines(paths[1])


def test_ctrl_c_in_the_middle_of_a_cancel_leaves_no_drone_busy():
    with poly.Pool(1) as pool:
        p = pool.promise("while True: pass")
        while not p.running():
            time.sleep(0.01)
        p.add_done_callback(lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            p.cancel()
        assert p.cancel() and pool.promise(abs, -1).result(30) == 1
