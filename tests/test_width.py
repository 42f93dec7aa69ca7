"""`Pool(n, width=k)`: a drone runs k coroutine functions at once, as green threads."""

import os
import random
import threading
import time
import warnings
from concurrent.futures import CancelledError

import pytest
from engines import local_only, on_each_engine, poly, rounds
from faults import append, hold_until, lines, wait_for

from polycephaly import green

pytestmark = on_each_engine


async def meet(folder, n):
    """Ends when `n` of these run at once, wherever."""
    open(os.path.join(folder, f"{os.getpid()}-{id(green.current())}"), "w").close()
    while len(os.listdir(folder)) < n:
        await green.sleep(0.002)
    return os.getpid()


async def count_those_beside_me(seconds, folder=None, n=0):
    """With a folder, once `n` of these have begun."""
    if folder is not None:
        await meet(folder, n)
    seen = 0
    for _ in range(10):
        seen = max(seen, sum("count_those" in each.name for each in green.threads()))
        await green.sleep(seconds / 10)
    return seen


async def sleep_long(path):
    append(path, str(os.getpid()))
    try:
        await green.sleep(1000)
    finally:
        append(path, "ended")


async def die(path):
    while not lines(path):
        await green.sleep(0.002)
    os._exit(3)


async def fail(number):
    await green.sleep(0.001)
    raise ValueError(number)


async def echo(value):
    await green.sleep(0.001)
    return value


def test_a_drone_overlaps_as_many_as_its_width(tmp_path):
    with poly.Pool(1, width=4) as pool:
        assert len({p.value for p in [pool.promise(meet, str(tmp_path), 4) for _ in range(4)]}) == 1


def test_a_lone_drone_has_a_width_too(tmp_path):
    with poly.Drone(width=4) as drone:
        assert (
            len({p.value for p in [drone.promise(meet, str(tmp_path), 4) for _ in range(4)]}) == 1
        )
    with poly.Drone() as drone:
        assert [
            p.value for p in [drone.promise(count_those_beside_me, 0.005) for _ in range(4)]
        ] == [1] * 4
    with pytest.raises(ValueError, match="width must be at least 1, not 0"):
        poly.Drone(width=0)


@pytest.mark.guarantee("green-20")
def test_never_more_than_its_width(tmp_path):
    with poly.Pool(1, width=3) as pool:
        assert (
            max(pool.map(count_those_beside_me, [0.02] * 12, [str(tmp_path)] * 12, [3] * 12)) == 3
        )


def test_all_drones_are_used(tmp_path):
    with poly.Pool(2, width=3) as pool:
        assert len({p.value for p in [pool.promise(meet, str(tmp_path), 6) for _ in range(6)]}) == 2


def test_without_a_width_they_are_run_one_by_one():
    with poly.Pool(1) as pool:
        assert max(pool.map(count_those_beside_me, [0.005] * 4)) == 1


@pytest.mark.guarantee("green-20")
def test_map_gives_values_in_order_and_errors_where_they_belong():
    with poly.Pool(2, width=5) as pool:
        assert list(pool.map(echo, range(50))) == list(range(50))
        for number in range(5):
            with pytest.raises(ValueError, match=str(number)):
                pool.doit(fail, number)


def test_plain_work_and_code_strings_go_along_in_the_same_pool():
    with poly.Pool(2, width=4) as pool:
        promises = [pool.promise(*[(echo, n), (abs, -n), (f"{n}",)][n % 3]) for n in range(60)]
        assert [p.value for p in promises] == list(range(60))


@pytest.mark.parametrize(
    "submit",
    [
        lambda pool: pool.doit(abs, -1),
        lambda pool: pool.promise(abs, -1).result(),
        lambda pool: pool.options(retries=1).submit(abs, -1).result(),
        lambda pool: [*pool.map(abs, [1])],
        lambda pool: [*pool.map(abs, range(3000))],
    ],
)
def test_a_pool_with_a_width_warns_once_that_a_plain_function_is_run_one_by_one(submit):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        with poly.Pool(1, width=4, name="wide") as pool:
            pool.everywhere(abs, -1)
            pool.drones[0].doit(abs, -1)
            pool.doit("1 + 1")
            pool.doit(echo, 1)
            assert not caught
            submit(pool)
            submit(pool)
    (warning,) = caught
    assert str(warning.message).startswith("a drone of wide runs abs one call at a time")
    assert (warning.category, warning.filename) == (RuntimeWarning, __file__)


def test_a_pool_whose_warning_is_an_error_goes_on():
    with poly.Pool(1, width=4) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="one call at a time"):
            pool.promise(abs, -1)
        assert pool.doit(abs, -1) == 1
    with poly.Pool(1, width=4) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="one call at a time"):
            pool.map(abs, [-1])
        assert list(pool.map(abs, [-1])) == [1]


def test_large_results_come_home():
    with poly.Pool(1, width=3) as pool:
        assert [len(p.value) for p in [pool.promise(echo, bytes(3_000_000)) for _ in range(4)]] == [
            3_000_000
        ] * 4


def test_what_does_not_pickle_rejects_only_itself():
    with poly.Pool(1, width=3) as pool:
        lock = pool.promise(echo, 1).then(lambda _: 2)

        async def unpicklable():
            return threading.Lock()

        with pytest.raises(TypeError, match="pickle"):
            pool.doit(unpicklable)
        assert lock.value == 2


def test_one_is_cancelled_and_the_others_go_on(tmp_path):
    path = str(tmp_path / "long")
    with poly.Pool(1, width=3) as pool:
        pid = pool.doit(os.getpid)
        long = pool.promise(sleep_long, path)
        wait_for(lambda: lines(path))
        assert long.running()
        beside = [pool.promise(echo, n) for n in range(5)]
        assert long.cancel()
        wait_for(lambda: lines(path)[-1] == "ended")
        assert [p.value for p in beside] == list(range(5))
        assert pool.doit(os.getpid) == pid


def test_interrupting_the_drone_interrupts_all_that_it_overlaps(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    with poly.Pool(1, width=2) as pool:
        promises = [pool.promise(sleep_long, path) for path in paths]
        wait_for(lambda: all(map(lines, paths)))
        pool.drones[0].interrupt()
        for promise in promises:
            with pytest.raises(KeyboardInterrupt):
                promise.result()


@pytest.mark.guarantee("green-20")
def test_a_time_limit_is_each_ones_own(tmp_path):
    path = str(tmp_path / "long")
    with poly.Pool(1, width=3, timeout=0.3) as pool:
        pid = pool.options(timeout=60).doit(os.getpid)
        long = pool.promise(sleep_long, path)
        with pytest.raises(TimeoutError, match=r"0\.3 s"):
            long.result()
        assert pool.options(timeout=60).doit(echo, 1) == 1
        assert pool.options(timeout=60).doit(os.getpid) == pid


@pytest.mark.guarantee("green-20")
def test_a_death_takes_along_what_was_running_and_nothing_else(tmp_path):
    started, go = str(tmp_path / "started"), str(tmp_path / "go")
    with poly.Pool(1, width=3) as pool:
        done = [pool.doit(echo, n) for n in range(3)]
        long, dying = pool.promise(sleep_long, started), pool.promise(die, go)
        wait_for(lambda: lines(started))
        quick = pool.promise(echo, "quick")
        assert quick.value == "quick"  # it began last, and has ended before the others
        waiting = [pool.promise(echo, n) for n in range(6)]
        append(go, "now")
        for lost in (long, dying):
            with pytest.raises(poly.DroneDied):
                lost.result()
        for n, promise in enumerate(waiting):
            try:
                assert promise.value == n
            except poly.DroneDied:
                pass  # it was beside those that died
        assert done == [0, 1, 2]
        assert pool.doit(echo, "after") == "after"


@pytest.mark.slow
def test_what_had_begun_is_never_run_twice(tmp_path):
    """The drone dies while some have ended, some run, and more wait."""
    seed = 20091
    for round_ in rounds(15):
        chance = random.Random(seed + round_)
        book, go = str(tmp_path / f"book{round_}"), str(tmp_path / f"go{round_}")
        delays = [chance.choice([0.0, 0.001, 0.01]) for _ in range(20)]

        async def once(n, delays=delays, book=book):
            append(book, str(n))
            await green.sleep(delays[n])
            return n

        with poly.Pool(1, width=4) as pool:
            promises = [pool.promise(once, n) for n in range(10)]
            dying = pool.promise(die, go)
            promises += [pool.promise(once, n) for n in range(10, 20)]
            time.sleep(chance.choice([0.0, 0.003, 0.02]))
            append(go, "now")
            with pytest.raises(poly.DroneDied):
                dying.result()
            for n, promise in enumerate(promises):
                try:
                    assert promise.value == n
                except poly.DroneDied:
                    pass
        begun = lines(book)
        assert len(begun) == len(set(begun)), f"seed {seed + round_}: begun twice: {begun}"


def test_leaving_the_block_finishes_what_overlaps():
    with poly.Pool(2, width=8) as pool:
        promises = [pool.promise(echo, n) for n in range(40)]
    assert [p.value for p in promises] == list(range(40))


def test_a_foreign_call_in_one_does_not_stop_the_others(tmp_path):
    path = str(tmp_path / "go")

    async def block():
        await green.call(hold_until, path)
        return "held"

    async def release():
        append(path, "go")

    with poly.Pool(1, width=2) as pool:
        held, released = pool.promise(block), pool.promise(release)
        assert (released.value, held.value) == (None, "held")


@pytest.mark.parametrize(
    "width, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_a_width_that_makes_no_sense_is_refused(width, error):
    with pytest.raises(error, match="width"):
        poly.Pool(1, width=width)


@pytest.mark.guarantee("end-5")
@local_only
def test_a_drone_made_by_a_green_thread_ends_with_it():
    async def owner():
        return poly.Drone()

    async def caller():
        return await green.call(poly.Drone)

    for make in (owner, caller, poly.Drone):
        drone = green.run(make)
        wait_for(lambda drone=drone: not drone.alive)


@pytest.mark.guarantee("end-5")
@local_only
def test_a_detached_drone_outlives_its_green_thread():
    async def owner():
        return poly.Drone(detached=True)

    with green.run(owner) as drone:
        assert drone.doit("1 + 1") == 2


@pytest.mark.guarantee("green-19")
def test_work_awaited_in_a_cancelled_green_thread_is_cancelled(tmp_path):
    path = str(tmp_path / "long")
    with poly.Pool(1, width=2) as pool:

        async def wait():
            await pool.promise(sleep_long, path)

        thread = green.spawn(wait)
        wait_for(lambda: lines(path))
        thread.cancel()
        wait_for(lambda: lines(path)[-1] == "ended")
        with pytest.raises(CancelledError):
            thread.result()
        assert thread.cancelled()


def test_what_cannot_be_begun_does_not_have_the_others_run_twice(tmp_path):
    book, go = str(tmp_path / "book"), str(tmp_path / "go")

    async def wait(name):
        append(book, name)
        await green.sleep(1000)

    with poly.Pool(1, width=4) as pool:
        waiting = [pool.promise(wait, name) for name in "ab"]
        wait_for(lambda: len(lines(book)) == 2)
        with pytest.raises(TypeError):
            pool.doit(wait)
        with pytest.raises(poly.DroneDied):
            append(go, "now")
            pool.doit(die, go)
        for promise in waiting:
            with pytest.raises(poly.DroneDied):
                promise.result()
        assert pool.doit(echo, 1) == 1
    assert lines(book) == ["a", "b"]


def test_a_drone_whose_foreign_calls_all_hang_is_replaced(short_grace):
    async def hang():
        await green.call(time.sleep, 60)

    with poly.Pool(1, width=2, timeout=0.3) as pool:
        for promise in [pool.promise(hang) for _ in range(2)]:
            with pytest.raises(TimeoutError):
                promise.result()
        assert pool.options(timeout=60).doit(echo, "after") == "after"


def test_a_drone_with_something_that_hangs_finishes_the_rest_and_is_replaced(short_grace, tmp_path):
    async def hang(path):
        append(path, "hangs")
        await green.call(time.sleep, 60)

    async def stay(path, begun):
        append(begun, "begun")
        while not os.path.exists(path):
            await green.sleep(0.01)
        return os.getpid()

    hangs, begun, end = (str(tmp_path / name) for name in ("hangs", "begun", "end"))
    with poly.Pool(1, width=2) as pool:
        staying = pool.promise(stay, end, begun)
        wait_for(lambda: lines(begun))
        hung = pool.promise(hang, hangs)
        wait_for(lambda: lines(hangs))
        later = [pool.promise(stay, end, begun) for _ in range(3)]
        assert hung.cancel()
        wait_for(lambda: any(handle.hung for handle in pool._dispatcher.handles))
        append(end, "end")
        (first,), others = {staying.value}, {p.value for p in later}
        assert len(others) == 1 and first not in others


@local_only
@pytest.mark.parametrize("in_group", [False, True])
def test_one_that_lets_no_other_run_is_killed_when_its_time_is_over(
    short_grace, in_group, tmp_path, later
):
    async def spin(begun):
        append(begun, "begun")
        while True:
            pass

    async def spin_in_group(begun):
        async with green.Group() as group:
            group.spawn(spin, begun)

    begun = str(tmp_path / "begun")
    with poly.Pool(1, width=3) as pool:
        beside = pool.promise(green.sleep, 1000)
        fn = spin_in_group if in_group else spin
        spinning = pool.options(timeout=1000).promise(fn, begun)
        wait_for(lambda: lines(begun))
        later(pool, 1000)
        with pytest.raises(TimeoutError):
            spinning.result(60)
        with pytest.raises(poly.DroneDied, match="was told to stop, does not await"):
            beside.result(60)
        assert pool.promise(echo, 1).result(60) == 1


@local_only
def test_a_drone_overlaps_again_when_what_hung_has_come_back(short_grace, tmp_path):
    async def cling(gate, begun):
        await green.call(hold_until, gate, begun)

    async def stay(path):
        while not os.path.exists(path):
            await green.sleep(0.01)

    gate, begun, end = (str(tmp_path / name) for name in ("gate", "begun", "end"))
    with poly.Pool(1, width=2, timeout=60) as pool:
        (handle,) = pool._dispatcher.handles
        clinging, other = pool.promise(cling, gate, begun), pool.promise(stay, end)
        wait_for(lambda: lines(begun))
        assert clinging.cancel()
        wait_for(lambda: handle.hung)
        append(gate, "open")
        wait_for(lambda: len(handle.in_flight) == 1)
        (tmp_path / "met").mkdir()
        met = [pool.promise(meet, str(tmp_path / "met"), 2) for _ in range(2)]
        append(end, "end")
        other.result(30)
        assert met[0].result(30) == met[1].result(30) and pool._dispatcher.handles == [handle]


def test_work_that_comes_later_is_begun_beside_what_runs(tmp_path):
    with poly.Pool(1, width=3, max_tasks=50) as pool:
        for round_ in rounds(40):
            folder = tmp_path / str(round_)
            folder.mkdir()
            first = pool.promise(meet, str(folder), 2)
            wait_for(lambda folder=folder: os.listdir(folder))
            second = pool.promise(meet, str(folder), 2)
            wait_for(second.done)  # nobody waits for it
            assert first.result(30) == second.result(30)
