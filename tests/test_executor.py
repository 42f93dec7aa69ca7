"""A pool is a `concurrent.futures.Executor`: what works with the standard library's works with
it."""

import asyncio
import concurrent.futures
import contextlib
import copyreg
import os
import threading
import time
from concurrent.futures import CancelledError, Executor

import pytest
from engines import local_only, on_each_engine, poly, rounds
from faults import append, hold_until, lines, wait_for

from polycephaly.runtime.system_limits import usable_processors

pytestmark = on_each_engine


@pytest.mark.guarantee("pool-1")
def test_it_is_one():
    with poly.Pool(1) as pool:
        assert isinstance(pool, Executor)
        future = pool.submit(pow, 2, 8)
        assert isinstance(future, concurrent.futures.Future) and future.result() == 256


@pytest.mark.guarantee("promise-2")
def test_wait_and_as_completed_work_on_its_futures():
    with poly.Pool(2) as pool:
        futures = [pool.submit(abs, -i) for i in range(100)]
        done, not_done = concurrent.futures.wait(futures, timeout=60)
        assert len(done) == 100 and not not_done
        futures = {pool.submit(abs, -i): i for i in range(100)}
        assert {futures[f] for f in concurrent.futures.as_completed(futures, timeout=60)} == set(
            range(100)
        )


def test_promises_are_awaited_in_asyncio():
    async def main(pool):
        values = await asyncio.gather(*(pool.promise(abs, -i) for i in range(200)))
        with pytest.raises(ZeroDivisionError):
            await pool.promise("1 / 0")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.promise(time.sleep, 100), 0.05)
        return values

    with poly.Pool(2) as pool:
        assert asyncio.run(main(pool)) == list(range(200))


@pytest.mark.guarantee("pool-1")
def test_a_with_block_finishes_what_was_submitted():
    with poly.Pool(2) as pool:
        work = [pool.submit(time.sleep, 0.01) for _ in range(20)]
    assert all(p.done() and p.exception() is None for p in work)


def test_after_shutdown_work_is_refused():
    pool = poly.Pool(1)
    p = pool.submit(abs, -1)
    pool.shutdown()
    assert p.done() and p.value == 1
    for call in (pool.submit, pool.promise, pool.doit):
        with pytest.raises(RuntimeError, match="after shutdown"):
            call(abs, 1)
    with pytest.raises(RuntimeError):
        pool.map(abs, [1])
    with pytest.raises(RuntimeError):
        pool.refresh()
    with pytest.raises(RuntimeError):
        pool.everywhere("1")
    pool.shutdown()
    assert "ended" in repr(pool)


def test_shutdown_without_wait_returns_and_the_work_is_done(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    pool = poly.Pool(1)
    work = [pool.submit(hold_until, gate, started) for _ in range(3)]
    wait_for(lambda: lines(started))
    pool.shutdown(wait=False)
    assert not work[0].done()
    append(gate, "open")
    assert [p.result(60) for p in work] == ["held"] * 3
    pool.shutdown()


def test_shutdown_with_cancel_futures_cancels_what_no_drone_has_begun(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    pool = poly.Pool(1)
    work = [pool.submit(hold_until, gate, started) for _ in range(5)]
    wait_for(lambda: lines(started))
    pool.shutdown(wait=False, cancel_futures=True)
    for p in work[1:]:
        with pytest.raises(CancelledError):
            p.result(60)
    append(gate, "open")
    assert work[0].result(60) == "held"
    pool.shutdown()
    assert len(lines(started)) == 1


def hold_until_told(started):
    append(started, "begun")
    time.sleep(1000)


def refuse_to_end(started):
    append(started, "begun")
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(1000)


@pytest.mark.parametrize("fn", [hold_until_told, refuse_to_end])
def test_terminate_workers_cancels_all_tasks_and_kills_what_goes_on(tmp_path, short_grace, fn):
    started = str(tmp_path / "started")
    pool = poly.Pool(1)
    work = [pool.submit(fn, started) for _ in range(5)]
    results = pool.map(abs, range(5))
    wait_for(lambda: lines(started))
    pool.terminate_workers()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(abs, -1)
    pool.shutdown()
    assert all(each.cancelled() for each in work) and len(lines(started)) == 1
    with pytest.raises(CancelledError):
        next(results)
    pool.terminate_workers()  # no error


def test_kill_workers_kills_at_once_and_cancels_what_no_drone_has_begun(tmp_path):
    started = str(tmp_path / "started")
    pool = poly.Pool(1)
    work = [pool.submit(refuse_to_end, started) for _ in range(5)]
    wait_for(lambda: lines(started))
    pool.kill_workers()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(abs, -1)
    pool.shutdown()
    with pytest.raises(poly.DroneDied, match=r"kill_workers\(\) was called"):
        work[0].result()
    assert all(each.cancelled() for each in work[1:]) and len(lines(started)) == 1
    pool.kill_workers()  # no error


def test_submit_from_many_threads_at_once():
    with poly.Pool(2) as pool:
        said = []

        def body(k):
            said.extend([p.value for p in [pool.submit(abs, -k * 1000 - i) for i in range(500)]])

        threads = [threading.Thread(target=body, args=[k]) for k in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sorted(said) == sorted(k * 1000 + i for k in range(6) for i in range(500))


def test_submitting_while_another_thread_shuts_down_settles_or_refuses_every_call():
    for _ in rounds(10):
        pool = poly.Pool(1)
        work, refused = [], []

        def body(pool=pool, work=work, refused=refused):
            for i in range(2000):
                try:
                    work.append((i, pool.submit(abs, -i)))
                except RuntimeError:
                    refused.append(i)

        thread = threading.Thread(target=body)
        thread.start()
        wait_for(lambda work=work: len(work) > 20)
        pool.shutdown()
        thread.join()
        for i, p in work:
            error = p.exception(60)
            assert p.value == i if error is None else isinstance(error, RuntimeError)


def test_all_drones_are_used(tmp_path):
    met = str(tmp_path / "met")

    def meet(_):
        append(met, str(os.getpid()))
        wait_for(lambda: len(set(lines(met))) == 4, 40)
        return os.getpid()

    with poly.Pool(4) as pool:
        assert len(set(pool.map(meet, range(40)))) == 4


@local_only
def test_as_many_drones_as_usable_cores_by_default():
    with poly.Pool() as pool:
        assert len(pool.drones) == usable_processors()


def test_work_may_submit_to_a_pool_from_a_callback():
    with poly.Pool(1) as pool:
        over = poly.Promise()
        pool.promise(abs, -1).add_done_callback(
            lambda p: pool.promise(abs, -5).add_done_callback(over.set_result)
        )
        assert over.result(60).value == 5
        assert pool.promise(abs, -2).then(lambda v: pool.promise(pow, v, 3)).result(60) == 8


def test_spans_tell_the_life_of_work_in_order():
    with poly.Pool(1) as pool:
        p = pool.promise(bytes, 1000)
        p.result()
        s = p.spans
        assert s.queued <= s.sent <= s.started <= s.finished <= s.received
        assert s.bytes_received >= 1000 and s.bytes_sent > 0 and s.drone == pool.drones[0].name
        assert s.bytes == s.bytes_sent + s.bytes_received


def test_names_and_reprs_tell_what_it_is():
    with poly.Pool(2, name="loaders") as pool, poly.Drone(name="scout") as drone:
        assert "loaders" in repr(pool) and [d.name for d in pool.drones] == [
            "loaders.0",
            "loaders.1",
        ]
        assert pool.name == "loaders"
        assert (
            drone.name == "scout"
            and str(drone.pid) in repr(drone)
            and drone.alive
            and drone.exitcode is None
        )


def test_a_drone_does_what_it_was_given_by_name_though_that_is_more_than_max_tasks(tmp_path):
    with poly.Pool(1, max_tasks=2) as pool:
        drone = pool.drones[0]
        drone.promise(hold_until, tmp_path / "given")  # it takes no more once it has done two
        given = [drone.promise(os.getpid) for _ in range(7)]
        (tmp_path / "given").touch()
        assert [each.result(30) for each in given] == [drone.pid] * 7
        assert pool.doit(os.getpid) != drone.pid


@pytest.mark.guarantee("work-7")
def test_a_drone_is_replaced_after_max_tasks():
    with poly.Pool(1, max_tasks=3) as pool:
        pids = [p.value for p in [pool.promise(os.getpid) for _ in range(10)]]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 3, 1]


@pytest.mark.guarantee("work-6")
def test_env_and_cwd_reach_the_drones(tmp_path):
    with poly.Pool(2, env=lambda i: {"GPU": str(i)}, cwd=tmp_path) as pool:
        assert sorted(p.value for p in pool.everywhere("import os; os.environ['GPU']")) == [
            "0",
            "1",
        ]
        assert pool.doit(os.getcwd) == str(tmp_path)
        assert "GPU" not in os.environ
        pool.drones[1].kill()
        wait_for(lambda: len(pool.drones) == 2 and all(d.alive for d in pool.drones))
        values = sorted(p.value for p in pool.everywhere("import os; os.environ['GPU']"))
        assert values == ["0", "1"]
    with poly.Drone(env={"A": "b"}, cwd=str(tmp_path)) as drone:
        assert drone.doit("import os; os.environ['A'], os.getcwd()") == ("b", str(tmp_path))


@pytest.mark.guarantee("work-6")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_time_zone_in_env_is_that_of_the_drones(start):
    clock = "import time\ntime.localtime(0).tm_hour, time.tzname"
    here = time.tzname
    with poly.Pool(
        2, start=start, env=lambda index: {"TZ": f"XX{'YZ'[index]}-{index + 3}"}
    ) as pool:
        found = sorted(each.value for each in pool.everywhere(clock))
    assert found == [(3, ("XXY", "XXY")), (4, ("XXZ", "XXZ"))]
    assert time.tzname == here


def test_a_shutdown_in_a_callback_is_an_error_there_and_the_work_is_done(tmp_path):
    gate = str(tmp_path / "gate")
    pool = poly.Pool(2)
    errors = []

    def shut(_):
        try:
            pool.shutdown()
        except RuntimeError as error:
            errors.append(error)

    work = [pool.promise(hold_until, gate) for _ in range(10)]
    pool.promise(abs, 1).add_done_callback(shut)
    append(gate, "open")
    assert [p.exception(60) for p in work] == [None] * 10
    pool.shutdown()
    assert len(errors) == 1


# -- dask ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")  # because dask registers them when it is imported
def own_reducers():
    """Takes back what a library registers with pickle for the whole process: dask has tracebacks
    pickled, and their frames keep those of the thread that unpickles them."""
    before = dict(copyreg.dispatch_table)
    yield
    copyreg.dispatch_table.clear()
    copyreg.dispatch_table.update(before)


@pytest.mark.parametrize("how", ["scheduler", "pool"])
@pytest.mark.usefixtures("own_reducers")
def test_a_graph_of_dask_runs_on_the_drones(how):
    dask = pytest.importorskip("dask", reason="dask is not installed")
    pids = [dask.delayed(os.getpid)() for _ in range(8)]
    with poly.Pool(2) as pool:
        settings = (
            {"scheduler": pool} if how == "scheduler" else {"scheduler": "processes", "pool": pool}
        )
        with dask.config.set(settings):
            assert set(dask.compute(*pids)) <= {drone.pid for drone in pool.drones}
            failing = dask.delayed(int)("no number")
            with pytest.raises(ValueError, match="no number"):
                failing.compute()
