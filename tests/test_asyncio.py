"""Pools in asyncio: `async with`, `async for`, executors, and what a cancelled task leaves. Green
threads alike."""

import asyncio
import itertools
import os
import threading
import time

import pytest
from engines import local_only, on_each_engine, poly
from faults import append, block_for_ever, fail_at_seven, hold_until, lines, wait_for
from work import double

from polycephaly import green

pytestmark = on_each_engine


def doze(n, path):
    """Until the loop has gone round for a while since then."""
    append(path, str(n))
    hold_until(f"{path} {n}")
    return n


async def let_dozers_go(path, sleep):
    """Those who doze at `path`, one after another: only a loop that goes on does."""
    for n in range(8):
        while str(n) not in lines(path):
            await sleep(0.001)
        for _ in range(5):
            await sleep(0.001)
        append(f"{path} {n}", "go on")


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "dozes")


@pytest.fixture
def run_beside(path):
    """Runs a coroutine whose work dozes until the loop has gone on."""

    def run(coro):
        async def main():
            others = asyncio.create_task(let_dozers_go(path, asyncio.sleep))
            value = await coro
            await others
            return value

        return asyncio.run(main())

    return run


def test_async_with_finishes_what_was_submitted_and_the_loop_goes_on(run_beside, path):
    async def main():
        async with poly.Pool(1) as pool:
            promises = [pool.promise(doze, n, path) for n in range(8)]
        return [p.value for p in promises], all(p.done() for p in promises)

    values, done = run_beside(main())
    assert values == list(range(8)) and done


def test_an_exception_in_async_with_cancels_the_rest():
    async def main():
        async with poly.Pool(1) as pool:
            promises.extend([pool.promise(block_for_ever), pool.promise(double, 1)])
            raise LookupError("mine")

    promises = []
    with pytest.raises(LookupError, match="mine"):
        asyncio.run(main())
    assert all(p.cancelled() for p in promises)


def test_a_lone_drone_and_one_of_a_pool_in_async_with():
    async def main():
        async with poly.Drone() as drone:
            p = drone.promise(double, 4)
        async with poly.Pool(1) as pool, pool.drones[0] as one:
            q = one.promise(double, 5)
            assert one.alive
        assert not drone.alive and not one.alive
        return p.value, q.value

    assert asyncio.run(main()) == (8, 10)


def test_a_task_cancelled_while_its_pool_ends_cancels_the_work():
    async def main():
        async with poly.Pool(1) as pool:
            promises.append(pool.promise(block_for_ever))

    async def outer():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await main()

    promises = []
    asyncio.run(outer())
    assert promises[0].cancelled()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("progress", [True, False])
def test_async_for_over_map(run_beside, path, ordered, progress, capsys):
    async def main():
        async with poly.Pool(2) as pool:
            short = [
                x async for x in pool.map(double, range(5000), ordered=ordered, progress=progress)
            ]
            long = [
                x
                async for x in pool.map(
                    doze, range(8), [path] * 8, ordered=ordered, progress=progress
                )
            ]
            return short, long

    short, long = run_beside(main())
    assert sorted(short) == [2 * n for n in range(5000)] and sorted(long) == list(range(8))
    if ordered:
        assert short == sorted(short) and long == sorted(long)
    assert ("5000/5000" in capsys.readouterr().err) == progress


def test_async_for_raises_an_error_in_its_place_and_cancels_the_rest():
    async def main():
        seen = []
        async with poly.Pool(2) as pool:
            with pytest.raises(ValueError, match="7"):
                async for x in pool.map(fail_at_seven, itertools.count()):
                    seen.append(x)
            wait_for(lambda: ", 0 tasks" in repr(pool))
        return seen

    assert asyncio.run(main()) == list(range(7))


@pytest.mark.parametrize("ordered", [True, False])
def test_async_for_goes_on_where_an_earlier_one_was_left(ordered):
    """Short calls are answered together: a `break` must not lose those of them that were not
    taken."""

    async def main():
        taken = []
        async with poly.Pool(2) as pool:
            [_ async for _ in pool.map(double, range(2000))]  # their time is known from now on
            results = pool.map(double, range(2000), ordered=ordered)
            async for x in results:
                taken.append(x)
                if len(taken) == 3:
                    break
            assert len(taken) == 3
            taken += [x async for x in results]
        return taken

    taken = asyncio.run(main())
    assert sorted(taken) == [2 * n for n in range(2000)]
    assert not ordered or taken == sorted(taken)


def test_async_for_is_broken_off():
    """By `break`, and by the cancelling of its task: what is under way is cancelled."""

    async def consume(results, seen):
        async for x in results:
            seen.append(x)

    async def main():
        async with poly.Pool(1) as pool:
            async for x in pool.map(double, itertools.count()):
                if x >= 10:
                    break
            wait_for(lambda: ", 0 tasks" in repr(pool))
            gate = pool.map(block_for_ever)
            task = asyncio.create_task(consume(pool.map(lambda _: time.sleep(60), range(5)), []))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.close()
            return await pool.promise(double, 21)

    assert asyncio.run(main()) == 42


def test_async_for_keeps_the_time_limit():
    async def main():
        async with poly.Pool(1) as pool:
            with pytest.raises(TimeoutError):
                async for _ in pool.map(block_for_ever, ["x"] * 3, timeout=0.2):
                    pass
            return await pool.promise(double, 1)

    def block_for_ever(_):
        threading.Event().wait()

    assert asyncio.run(main()) == 2


def test_many_consumers_share_a_pool():
    async def main():
        async with poly.Pool(2) as pool:

            async def consume(k):
                return [x async for x in pool.map(lambda n: n + k, range(200))]

            return await asyncio.gather(*(consume(1000 * k) for k in range(5)))

    assert asyncio.run(main()) == [[n + 1000 * k for n in range(200)] for k in range(5)]


def test_run_in_executor():
    async def main():
        loop = asyncio.get_running_loop()
        async with poly.Pool(2) as pool:
            pids = await asyncio.gather(*(loop.run_in_executor(pool, os.getpid) for _ in range(20)))
            with pytest.raises(ZeroDivisionError):
                await loop.run_in_executor(pool, divmod, 1, 0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await loop.run_in_executor(pool, time.sleep, 60)
            assert await loop.run_in_executor(pool, double, 3) == 6
        return pids

    assert os.getpid() not in asyncio.run(main())


def test_the_same_in_green_threads(path):
    async def main():
        async with green.Group() as group:
            group.spawn(let_dozers_go, path, green.sleep)
            async with poly.Pool(2) as pool:
                values = [x async for x in pool.map(doze, range(7), [path] * 7)]
                late = pool.promise(doze, 7, path)
            assert late.done()
        return values

    assert green.run(main) == list(range(7))


@local_only
@pytest.mark.parametrize(
    "kind", [{"ordered": False}, {"buffersize": 1}, {"ordered": False, "buffersize": 1}]
)
def test_async_for_waits_for_no_result_in_the_loop(kind):
    """Each call ends only when the loop has gone on since the result before it."""

    async def main(pool, pipe):
        seen = []
        async for x in pool.map(read_one, [pipe[0]] * 6, timeout=60, **kind):
            seen.append(x)
            asyncio.get_running_loop().call_later(0.02, os.write, pipe[1], b"x")
        return seen

    pipe = os.pipe()
    try:
        os.write(pipe[1], b"x")
        with poly.Pool(2) as pool:
            assert asyncio.run(main(pool, pipe)) == [b"x"] * 6
    finally:
        for fd in pipe:
            os.close(fd)


def read_one(fd):
    return os.read(fd, 1)


@pytest.mark.parametrize("in_asyncio", [False, True])
def test_an_error_in_the_block_of_a_pools_drone_ends_that_drone_only(in_asyncio):
    def plain(pool, given):
        with pool.drones[0] as one:
            given += [one.promise(time.sleep, 60), one.promise(time.sleep, 60)]
            raise KeyError("mine")

    async def awaited(pool, given):
        async with pool.drones[0] as one:
            given += [one.promise(time.sleep, 60), one.promise(time.sleep, 60)]
            raise KeyError("mine")

    given = []
    with poly.Pool(2) as pool:
        with pytest.raises(KeyError, match="mine"):
            asyncio.run(awaited(pool, given)) if in_asyncio else plain(pool, given)
        assert all(promise.cancelled() for promise in given)
        assert pool.doit(double, 21) == 42


@local_only
def test_a_map_that_is_over_leaves_no_timer_for_its_timeout():
    async def main():
        with poly.Pool(1) as pool:
            for _ in range(20):
                assert [x async for x in pool.map(double, [1, 2], timeout=3600)] == [2, 4]
            wait_for(lambda: not pool._dispatcher.reactor.timers.heap)

    asyncio.run(main())
