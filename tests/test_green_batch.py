"""`green.call.batch`: the requests of many green threads cross into foreign code together, and
nothing is timed."""

from __future__ import annotations

import array
import collections
import gc
import pickle
import random
import threading
import time
import traceback
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest
from greens import awaited, outcome, run, turns

import polycephaly as poly
from polycephaly import green
from polycephaly.green.history import history
from polycephaly.green.scheduler import scheduler
from polycephaly.green.testing import all_waiting


@pytest.fixture(autouse=True)
def nothing_learned():
    history.records.clear()
    yield
    history.records.clear()


@green.call.batch
def doubled(numbers):
    return [2 * n for n in numbers]


class Ferry:
    """A batch whose crossings can be held up; it tells who was in each."""

    def __init__(self, **how):
        self.crossings = []
        self.entered, self.may_go = threading.Event(), threading.Event()
        self.batched = green.call.batch(self.cross, **how)

    def cross(self, requests):
        self.crossings.append(requests)
        self.entered.set()
        assert self.may_go.wait(30)
        return [("over", each) for each in requests]

    async def is_under_way(self):
        while not self.entered.is_set():
            await green.sleep(0)


# -- who crosses with whom -------------------------------------------------------------------------


@pytest.mark.guarantee("graph-4")
def test_all_who_are_ready_cross_together_and_each_has_its_own_result():
    async def main():
        before = doubled.crossings
        told = await green.par(*(doubled(n) for n in range(1000)))
        return told, doubled.crossings - before

    assert run(main) == ([2 * n for n in range(1000)], 1)


@pytest.mark.guarantee("graph-4")
def test_who_comes_while_a_crossing_runs_is_in_the_next_and_nobody_is_stopped():
    async def main():
        ferry = Ferry()
        early = [green.spawn(ferry.batched, n) for n in range(3)]
        await ferry.is_under_way()  # others run: the crossing was taken over
        late = [green.spawn(ferry.batched, n) for n in range(3, 10)]
        await turns()
        waiting = ferry.batched.waiting
        ferry.may_go.set()
        assert [await each for each in early + late] == [("over", n) for n in range(10)]
        return ferry.crossings, waiting

    assert run(main) == ([[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]], 7)


def test_no_more_than_the_limit_cross_at_once_in_the_order_of_asking():
    @green.call.batch(limit=4)
    def counted(requests):
        return [(len(requests), each) for each in requests]

    async def main():
        return await green.par(*(counted(n) for n in range(10)))

    assert run(main) == [(4, n) for n in range(8)] + [(2, 8), (2, 9)]


def test_a_crossing_that_gives_nothing_gives_each_none():
    kept = []
    batched = green.call.batch(kept.extend)

    async def main():
        return await green.par(batched(1), batched(2))

    assert run(main) == [None, None]
    assert kept == [1, 2]


def test_spawn_and_map_take_a_batch_for_the_coroutine_function_it_is_like():
    async def main():
        return await green.spawn(doubled, 4), await green.map(doubled, range(5), width=3)

    assert run(main) == (8, [0, 2, 4, 6, 8])


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.guarantee("graph-4")
def test_an_error_in_place_of_a_result_is_that_ones_alone():
    @green.call.batch
    def inverse(numbers):
        return [1 / n if n else ZeroDivisionError(f"of {n}") for n in numbers]

    async def main():
        return [await outcome(each) for each in [green.spawn(inverse, n) for n in (1, 0, 2)]]

    assert run(main) == [1, ZeroDivisionError, 0.5]


def test_what_the_function_raises_each_gets_a_copy_of_with_the_line_where_it_was_raised():
    @green.call.batch
    def fails(requests):
        raise KeyError(len(requests))

    async def main():
        threads = [green.spawn(fails, n) for n in range(3)]
        errors = []
        for each in threads:
            with pytest.raises(KeyError) as caught:
                await each
            errors.append(caught.value)
        return errors

    errors = run(main)
    assert [error.args for error in errors] == [(3,)] * 3 and len(set(map(id, errors))) == 3
    for error in errors:
        assert traceback.extract_tb(error.__traceback__)[-1].line == "raise KeyError(len(requests))"


def test_after_an_error_the_next_crossing_is_as_good_as_ever():
    @green.call.batch
    def picky(requests):
        return [1 // each for each in requests]

    async def main():
        return await outcome(green.spawn(picky, 0)), await picky(1)

    assert run(main) == (ZeroDivisionError, 1)


class Table:
    """As those of pandas: so many rows, and it iterates over its columns."""

    columns = ("a", "b")

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __iter__(self):
        return iter(self.columns)


class Changing:
    """It has another number of items than it says."""

    def __len__(self):
        return 2

    def __iter__(self):
        return iter("abc")


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (
            lambda requests: requests[1:],
            "returned 1 results for 2 requests: return a list of 2 results, or None",
        ),
        (lambda requests: (each for each in requests), "returned a generator for 2 requests"),
        (lambda requests: 5, "returned an int for 2 requests"),
        (lambda requests: {n: n for n in requests}, "returned a dict for 2 requests"),
        (lambda requests: {"one", "two"}, "returned a set for 2 requests"),
        (lambda requests: "ab", "returned a str for 2 requests"),
        (lambda requests: b"ab", "returned a bytes for 2 requests"),
        (lambda requests: Table(2), "returned a Table for 2 requests"),
        (lambda requests: Changing(), "returned 3 results for 2 requests"),
    ],
)
def test_another_number_of_results_is_an_error_of_all_and_says_so(fn, said):
    batched = green.call.batch(fn)

    async def main():
        for each in [green.spawn(batched, n) for n in range(2)]:
            with pytest.raises(RuntimeError, match=said):
                await each

    run(main)


@pytest.mark.parametrize("made", [tuple, array.array, collections.deque, np.array])
def test_what_has_its_results_in_order_is_taken_for_a_list(made):
    batched = green.call.batch(
        lambda numbers: made("i", numbers) if made is array.array else made(numbers)
    )

    async def main():
        return await green.par(*(batched(n) for n in range(3)))

    assert run(main) == [0, 1, 2]


class CannotBeTwice(Exception):
    def __reduce__(self):
        raise KeyboardInterrupt


def test_whatever_ends_who_crosses_nobody_waits_for_ever():
    @green.call.batch
    def fails(requests):
        if requests[0]:
            raise CannotBeTwice
        return requests

    async def main():
        threads = [green.spawn(fails, n) for n in (1, 2)]
        for each in threads:
            with pytest.raises(
                RuntimeError, match="failed before this request was served"
            ) as caught:
                await each
            assert isinstance(caught.value.__cause__, KeyboardInterrupt)
        return await fails(0)

    assert run(main) == 0


async def coroutine_function(requests):
    return requests


@pytest.mark.parametrize(
    ("fn", "how", "error", "said"),
    [
        (5, {}, TypeError, "a plain function of a list of requests, not 5"),
        (
            coroutine_function,
            {},
            TypeError,
            "a plain function of a list of requests, not <function coroutine_function",
        ),
        (len, {"limit": 0}, ValueError, "at least 1 request, not 0"),
        (len, {"limit": True}, TypeError, "limit= takes a number of requests, not True"),
        (len, {"limit": "10"}, TypeError, "limit= takes a number of requests, not '10'"),
    ],
)
def test_what_cannot_be_batched_is_told_at_once(fn, how, error, said):
    with pytest.raises(error, match=said):
        green.call.batch(fn, **how)


def test_a_batch_is_for_green_threads():
    with pytest.raises(RuntimeError, match=r"green\.call\.batch is for green threads"):
        doubled(1).__await__().send(None)


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.guarantee("graph-4")
def test_who_is_cancelled_before_the_crossing_is_not_in_it():
    async def main():
        ferry = Ferry()
        first = green.spawn(ferry.batched, "first")
        await ferry.is_under_way()
        others = [green.spawn(ferry.batched, n) for n in range(4)]
        await turns()
        others[1].cancel()
        others[2].cancel()
        await turns()
        waiting = ferry.batched.waiting
        ferry.may_go.set()
        told = [await outcome(each) for each in (first, *others)]
        return ferry.crossings, waiting, told

    over = [("over", "first"), ("over", 0), CancelledError, CancelledError, ("over", 3)]
    assert run(main) == ([["first"], [0, 3]], 2, over)


def test_where_all_are_cancelled_there_is_no_crossing():
    async def main():
        ferry = Ferry()
        first = green.spawn(ferry.batched, "first")
        await ferry.is_under_way()
        second = green.spawn(ferry.batched, "second")
        await turns()
        second.cancel()
        ferry.may_go.set()
        assert await first == ("over", "first")
        await turns(10)
        return ferry.crossings

    assert run(main) == [["first"]]


def test_who_is_cancelled_during_the_crossing_goes_at_once_and_the_others_are_served():
    async def main():
        ferry = Ferry()
        threads = [green.spawn(ferry.batched, n) for n in range(3)]
        await ferry.is_under_way()
        threads[1].cancel()
        assert await outcome(threads[1]) is CancelledError  # the ferry is still out
        ferry.may_go.set()
        return await threads[0], await threads[2]

    assert run(main) == (("over", 0), ("over", 2))


def test_a_time_limit_around_a_request_ends_the_wait(clock):
    async def asks(ferry):
        async with green.timeout(1):
            await ferry.batched("late")

    async def main():
        ferry = Ferry()
        first = green.spawn(ferry.batched, 0)
        await ferry.is_under_way()
        late = green.spawn(asks, ferry)
        await all_waiting()
        clock.advance(1)  # by itself, the time stands still while a plain function runs
        assert await outcome(late) is TimeoutError
        ferry.may_go.set()
        await first
        return ferry.crossings

    assert run(main) == [[0]]


def test_cancelled_at_random_every_request_is_answered_or_withdrawn_and_none_crosses_twice():
    seed = random.randrange(10**9)
    print("seed", seed)
    dice = random.Random(seed)
    green.configure(window=0.0001)
    crossed = []

    @green.call.batch(limit=dice.choice([None, 1, 7]))
    def slowly(requests):
        crossed.extend(requests)
        if dice.random() < 0.5:
            time.sleep(dice.random() * 0.001)
        return [ValueError(each) if each % 10 == 9 else -each for each in requests]

    async def asks(n):
        await green.sleep(dice.random() * 0.01)
        return await slowly(n)

    async def main():
        threads = [green.spawn(asks, n, bound=n % 50 == 0) for n in range(600)]
        for _ in range(200):
            dice.choice(threads).cancel()
            await green.sleep(dice.choice([0, 0, 0.0005]))
        return [await outcome(each) for each in threads]

    try:
        told = run(main)
    finally:
        green.configure(window=0.001)
    assert sorted(set(crossed)) == sorted(crossed)
    for n, value in enumerate(told):
        assert value is CancelledError or (
            n in crossed and value == (ValueError if n % 10 == 9 else -n)
        )


# -- the crosser -----------------------------------------------------------------------------------


def test_who_crosses_may_be_cancelled_before_its_first_step():
    async def main():
        async with green.call.batch(lambda all: all) as batched:
            asks = green.spawn(batched, 1)
            while not (
                crossers := [each for each in scheduler.live if each.name.startswith("batch of")]
            ):
                await green.sleep(0)
            crossers[0].cancel()
            return await asks

    assert run(main) == 1


def test_closing_serves_all_who_wait_and_then_refuses():
    async def main():
        ferry = Ferry()
        first = green.spawn(ferry.batched, 1)
        await ferry.is_under_way()
        second = green.spawn(ferry.batched, 2)
        await turns()
        closed = ferry.batched.close()
        with pytest.raises(RuntimeError, match=r"batch of Ferry\.cross was closed before"):
            await ferry.batched(3)
        ferry.may_go.set()
        await closed
        assert first.done() and second.done()
        assert ferry.batched.close().done() and "closed" in repr(ferry.batched)
        return ferry.crossings

    assert run(main) == [[1], [2]]


def test_who_is_cancelled_while_it_closes_leaves_the_others_alone():
    async def main():
        ferry = Ferry()
        first = green.spawn(ferry.batched, 1)
        await ferry.is_under_way()
        waits = green.spawn(awaited, ferry.batched.close())
        await turns()
        waits.cancel()
        assert await outcome(waits) is CancelledError
        ferry.may_go.set()
        return await first

    assert run(main) == ("over", 1)


def test_plain_code_closes_it_too():
    batched = green.call.batch(list)
    assert green.run(batched, 1) == 1
    batched.close().result(30)
    with pytest.raises(RuntimeError, match="was closed before"):
        green.run(batched, 2)


# -- other images ----------------------------------------------------------------------------------


ferries: list[Ferry] = []


def test_a_forked_image_has_a_batch_of_its_own_whatever_was_under_way():
    ferries.append(ferry := Ferry())
    first = green.spawn(ferry.batched, "first")
    assert ferry.entered.wait(30)
    second = green.spawn(ferry.batched, "second")
    green.run(turns)
    with poly.Drone() as drone:
        assert drone.doit(cross_there) == [("over", "there"), [["first"], ["there"]]]
        assert drone.doit(ask_in_drone, doubled) == 14
    ferries.clear()
    ferry.may_go.set()
    assert (first.value, second.value) == (("over", "first"), ("over", "second"))
    assert ferry.crossings == [["first"], ["second"]]


def cross_there():
    (ferry,) = ferries
    ferry.may_go.set()
    return [green.run(ferry.batched, "there"), ferry.crossings]


def ask_in_drone(batched):
    return green.run(batched, 7)


def test_it_is_pickled_by_its_name_or_as_a_new_batch_of_the_same_function():
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    other = pickle.loads(pickle.dumps(green.call.batch(list, limit=3)))
    assert run(other, 1) == 1 and "list" in repr(other)


def test_nobody_who_has_been_served_is_kept():
    class Request:
        pass

    request = Request()
    gone = weakref.ref(request)

    @green.call.batch
    def fails(requests):
        raise ValueError

    async def main(request):
        return await outcome(green.spawn(fails, request))

    assert run(main, request) is ValueError
    del request
    gc.collect()
    assert gone() is None
