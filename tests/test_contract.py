"""What holds on each engine and is in no file of its own: promises of drones together, arrays and
shared values, what pools and drones say of themselves, many threads at once."""

import asyncio
import operator
import os
import threading
from concurrent.futures import CancelledError
from functools import partial

import pytest
from engines import READ_ONLY, local_only, on_each_engine, poly, pool_of_file
from faults import block_for_ever, lines, wait_for

from polycephaly import green

np = pytest.importorskip("numpy", reason="numpy is not installed")

pytestmark = on_each_engine

LARGE = 500_000  # numbers


def total(array):
    return float(array.sum())


def fill(array, number):
    array[:] = number
    return total(array)


def make(number, size=LARGE):
    return np.full(size, float(number))


def parts(items):
    return total(items["array"]), items["name"]


pool = pool_of_file(2, name="pair", output="discard")


# -- promises of drones, together ------------------------------------------------------------------


def test_gather_gives_a_list_and_the_first_error_rejects_it(pool):
    assert poly.gather(*[pool.promise(abs, -i) for i in range(20)]).value == list(range(20))
    assert isinstance(
        poly.gather(pool.promise(abs, 1), pool.promise("1 / 0")).exception(), ZeroDivisionError
    )


def test_a_race_settles_as_the_first_and_the_other_is_left_alone(pool, tmp_path):
    started = str(tmp_path / "started")
    slow = pool.promise(block_for_ever, started)
    assert poly.race(slow, pool.promise(abs, -3)).value == 3
    wait_for(lambda: lines(started))
    assert not slow.done()
    assert slow.cancel()


def test_as_completed_gives_each_once(pool):
    promises = [pool.promise(abs, -i) for i in range(100)]
    assert sorted(p.value for p in poly.as_completed(promises)) == list(range(100))

    async def main():
        return sorted(
            [(await p) async for p in poly.as_completed([pool.promise(abs, -i) for i in range(50)])]
        )

    assert asyncio.run(main()) == list(range(50))


def test_then_goes_on_with_the_value(pool):
    assert pool.promise(abs, -4).then(lambda n: n + 1).value == 5
    assert pool.promise(abs, -4).then(lambda n: pool.promise(pow, n, 2)).value == 16


def test_promises_are_awaited_in_green_threads(pool):
    async def one(n):
        return await pool.promise(pow, n, 2)

    async def all_of_them():
        with pytest.raises(ZeroDivisionError):
            await pool.promise("1 / 0")
        return await green.par(*(one(n) for n in range(30)))

    assert green.run(all_of_them) == [n * n for n in range(30)]


def test_cancelling_a_gathering_cancels_all_of_it(pool, tmp_path):
    started = str(tmp_path / "started")
    promises = [pool.promise(block_for_ever, started) for _ in range(4)]
    wait_for(lambda: len(lines(started)) == 2)
    gathered = poly.gather(*promises)
    assert gathered.cancel()
    for promise in promises:
        with pytest.raises(CancelledError):
            promise.result(60)
    assert pool.doit(abs, -1) == 1


# -- arrays, there and back ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float64", "<U4", "M8[s]", "bool", "i2, (2,)f4"])
@pytest.mark.parametrize("size", [0, 1, 200_000])
def test_arrays_travel_both_ways(pool, kind, size):
    array = np.arange(size).astype("i4").astype(kind) if "," not in kind else np.ones(size, kind)
    there = pool.promise(lambda a: (a.dtype.str, a.shape, a), array)
    assert there.value[:2] == (array.dtype.str, array.shape)
    assert np.array_equal(there.value[2], array)


@pytest.mark.parametrize(
    "turned", [np.transpose, lambda a: a[::3, ::-1], np.asfortranarray, lambda a: a[5:6]]
)
def test_arrays_that_are_not_in_one_piece_arrive_equal(pool, turned):
    array = turned(np.arange(250_000.0).reshape(500, 500))
    assert np.array_equal(pool.doit(lambda a: a, array), array)


@local_only(READ_ONLY)
def test_arguments_and_results_can_be_written_into_and_nobody_else_sees_it(pool):
    array = make(1)
    assert [pool.doit(fill, array, n) for n in (2, 3)] == [2.0 * LARGE, 3.0 * LARGE]
    assert total(array) == LARGE
    one, other = pool.doit(make, 4), pool.doit(make, 4)
    one[:] = 5
    assert total(other) == 4.0 * LARGE and total(one) == 5.0 * LARGE


def test_an_array_is_captured_at_the_call(pool):
    array, promises = make(0), []
    for n in range(6):
        array[:] = n
        promises.append(pool.promise(total, array))
    array[:] = -1
    assert [p.value for p in promises] == [n * float(LARGE) for n in range(6)]


def test_an_array_goes_from_one_drone_to_another_as_a_promise(pool):
    one, other = pool.drones
    made = one.promise(make, 7)
    assert other.doit(total, made) == other.doit(total, array=made) == 7.0 * LARGE
    assert pool.doit(operator.add, made, made)[0] == 14
    assert total(made.value) == 7.0 * LARGE


def test_a_large_closure_and_large_items_of_a_map_arrive(pool):
    table = make(2)
    assert pool.doit(lambda: total(table)) == 2.0 * LARGE
    assert list(pool.map(total, [make(n, 50_000) for n in range(12)])) == [
        n * 50_000.0 for n in range(12)
    ]
    assert [each[0] for each in pool.map(make, range(12))] == list(range(12))


def test_large_text_and_bytes_arrive(pool):
    for value in (
        "größe" * 100_000,
        os.urandom(3_000_000),
        bytearray(2_000_000),
        [1, "x" * 1_000_000, b"y" * 500_000],
    ):
        assert pool.doit(lambda it: it, value) == value


# -- shared values ---------------------------------------------------------------------------------


def test_a_shared_value_arrives_as_the_value_in_any_number_of_calls(pool):
    with pool.share({"array": make(3), "name": "three"}) as shared:
        assert list(pool.map(parts, [shared] * 20)) == [(3.0 * LARGE, "three")] * 20
        assert pool.doit(parts, items=shared) == (3.0 * LARGE, "three")


def test_a_shared_value_is_as_it_was_when_it_was_shared(pool):
    array = make(3)
    with pool.share(array) as shared:
        array[:] = 4
        assert [p.value for p in pool.everywhere(total, shared)] == [3.0 * LARGE] * 2
        assert total(shared.value) == 3.0 * LARGE


class Sums:
    def __init__(self, array):
        self.array = array

    def total(self, *more):
        return total(self.array) + sum(more)


def places(handle):
    """A function and arguments for each place where a handle of an array may stand."""
    return {
        "argument": (total, handle),
        "container": (lambda items: total(items[0]["k"]), [{"k": handle}]),
        "object": (Sums.total, Sums(handle)),
        "partial": (partial(total, handle),),
        "default": (lambda array=handle: total(array),),
        "closure": (lambda: total(handle),),
        "bound method": (Sums(handle).total,),
    }


@pytest.mark.parametrize("place", places(None))
@pytest.mark.parametrize("kind", ["shared", "kept", "promise", "settled promise"])
def test_a_handle_is_its_value_wherever_it_stands(pool, kind, place):
    if kind == "shared":
        handle = pool.share(make(3))
    else:
        handle = pool.promise(make, 3, keep=kind == "kept")
        if kind == "kept":
            handle = handle.value
        elif kind == "settled promise":
            handle.result()
    fn, *args = places(handle)[place]
    assert pool.doit(fn, *args) == 3.0 * LARGE
    if not args:
        assert list(pool.map(lambda n, fn=fn: n * fn(), range(3))) == [
            0.0,
            3.0 * LARGE,
            6.0 * LARGE,
        ]


@pytest.mark.parametrize("place", places(None))
def test_a_call_fails_as_the_promise_in_it_wherever_that_stands(pool, place):
    failed = pool.promise("1 / 0")
    fn, *args = places(failed)[place]
    with pytest.raises(ZeroDivisionError):
        pool.doit(fn, *args)


def test_a_released_value_is_an_error_that_says_so(pool):
    shared = pool.share(make(1))
    assert pool.doit(total, shared) == LARGE
    shared.release()
    shared.release()
    with pytest.raises(ValueError, match="released"):
        _ = shared.value
    with pytest.raises(ValueError, match="released"):
        pool.doit(total, shared)
    assert "released" in repr(shared)


def test_what_cannot_be_pickled_cannot_be_shared(pool):
    with pytest.raises(TypeError, match="lock"):
        pool.share([make(1), threading.Lock()])


# -- what they say of themselves -------------------------------------------------------------------


def test_a_pool_lists_drones_that_can_be_used_by_themselves(pool):
    one, other = pool.drones
    assert (one.name, other.name) == ("pair.0", "pair.1") and one.pid != other.pid
    assert one.alive and one.exitcode is None and str(one.pid) in repr(one)
    assert one.doit(os.getpid) == one.pid
    one["mine"] = 5
    assert one["mine"] == 5
    with pytest.raises(KeyError, match="mine"):
        other["mine"]
    assert "pair" in repr(pool) and "2 drones" in repr(pool)


def test_the_timeline_counts_every_call_by_drone_and_marks_errors():
    with poly.Pool(2, output="discard") as pool:
        for p in [pool.promise(make, i, 10) for i in range(200)]:
            p.result()
        list(pool.map(total, [np.ones(3)] * 100))
        failed = pool.promise("1 / 0")
        assert failed.exception() is not None
        timeline = pool.timeline
        names = {drone.name for drone in pool.drones}
    assert timeline.drones and set(timeline.drones) <= names
    sums = {}
    for (_, name), each in timeline.sums().items():
        sums[name] = sums.get(name, 0) + each.calls
    assert (sums["make"], sums["total"]) == (200, 100)
    assert [span.status for span in timeline.spans if span.status != "done"] == ["error"]
    for span in timeline.spans:
        assert span.queued <= span.sent <= span.started <= span.finished <= span.received, span


# -- many at once ----------------------------------------------------------------------------------


def test_ten_thousand_calls_from_eight_threads_are_each_answered_with_their_own(pool):
    wrong = []

    def submit(k):
        promises = [pool.submit(operator.add, k * 10_000, i) for i in range(1250)]
        wrong.extend(i for i, p in enumerate(promises) if p.result(60) != k * 10_000 + i)

    threads = [threading.Thread(target=submit, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_that_submit_map_and_cancel_at_once_disturb_nobody(pool):
    wrong = []

    def check(work):
        try:
            work()
        except BaseException as error:
            wrong.append(error)

    def maps():
        assert list(pool.map(abs, range(-500, 0))) == list(range(500, 0, -1))

    def cancels():
        for i in range(100):
            p = pool.promise(abs, -i)
            assert p.cancel() == p.cancelled()
            assert p.cancelled() or p.value == i

    def fails():
        for _ in range(50):
            assert isinstance(pool.promise("1 / 0").exception(), ZeroDivisionError)

    threads = [threading.Thread(target=check, args=(each,)) for each in (maps, cancels, fails) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
