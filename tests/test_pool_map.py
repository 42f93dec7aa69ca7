"""`Pool.map`: ordered, lazy at both ends, errors in their place, nothing to tune."""

import asyncio
import contextlib
import ctypes
import gc
import itertools
import operator
import os
import threading
import time
import warnings
import weakref
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from engines import local_only, on_each_engine, poly, pool_of_file
from faults import (
    Counting,
    Unreadable,
    append,
    block_for_ever,
    failing_source,
    hold_until,
    lines,
    wait_for,
)
from work import double, fail_with

import polycephaly.pool.map
from polycephaly.pool.items import describe
from polycephaly.pool.map_source import MAX_CALLS_AHEAD
from polycephaly.pool.task import MAX_ITEM_BYTES, Task
from polycephaly.promises.promise import waiting_threads
from polycephaly.wire.functions import RemoteFunction
from polycephaly.wire.messages import DEFINE_CALLABLE

pytestmark = on_each_engine


pool = pool_of_file(2)


def slow_at_start(n):
    time.sleep(0.05 if n < 2 else 0)
    return n


def fail_at_five(n):
    if n == 5:
        raise ValueError(n)
    return n


def hold_zero(n, gate):
    return hold_until(gate) if n == 0 else n


@pytest.mark.guarantee("pool-6")
def test_results_come_in_the_order_of_the_inputs(pool):
    assert list(pool.map(slow_at_start, range(20))) == list(range(20))
    assert list(pool.map(double, range(5000))) == [n * 2 for n in range(5000)]


def test_several_iterables_go_in_step_and_the_shortest_ends_it(pool):
    assert list(pool.map(pow, [2, 3, 4], itertools.count(1))) == [2, 9, 64]
    assert list(pool.map(lambda a, b, c: a + b + c, "ab", "cd", "ef")) == ["ace", "bdf"]


def test_nothing_in_gives_nothing_out(pool):
    assert list(pool.map(double, [])) == [] and list(pool.map(double)) == []


def test_an_asynchronous_input_is_refused_with_the_cure(pool):
    async def count():
        yield 1

    for inputs in ([count()], [[1], count()]):
        with pytest.raises(TypeError, match="which is asynchronous: collect its items before"):
            pool.map(pow, *inputs)


def taken(pool, error, *args, **options):
    results = pool.map(*args, **options)
    with contextlib.suppress(error):
        list(results)
    return results


async def awaited(results):
    return [each async for each in results]


def closed(pool, first):
    results = pool.map(double, range(5000))
    for _ in range(first):
        next(results)
    results.close()
    return results


def awaited_all(pool):
    results = pool.map(double, range(5000))
    asyncio.run(awaited(results))
    return results


ENDINGS = {
    "exhausted": lambda pool: taken(pool, (), double, range(5000)),
    "exhausted, one by one": lambda pool: taken(pool, (), double, range(9), buffersize=3),
    "exhausted, unordered": lambda pool: taken(pool, (), double, range(5000), ordered=False),
    "exhausted, awaited": awaited_all,
    "closed": lambda pool: closed(pool, 1),
    "closed unread": lambda pool: closed(pool, 0),
    "failed": lambda pool: taken(pool, ValueError, fail_at_five, range(5000)),
    "failed input": lambda pool: taken(pool, LookupError, double, failing_source()),
    "late": lambda pool: taken(pool, TimeoutError, block_for_ever, range(2), timeout=0.1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_results_that_have_come_to_their_end_let_the_pool_go(ending):
    pool = poly.Pool(1)
    there, ended = weakref.ref(pool), pool._dispatcher.ended
    results = ENDINGS[ending](pool)
    del pool
    try:
        wait_for(lambda: there() is None)
    except AssertionError:
        pytest.fail(f"the pool is kept by {gc.get_referrers(there())}")
    ended.result(30)  # its drone too
    assert list(results) == []


@pytest.mark.guarantee("pool-6")
def test_endless_inputs_are_taken_lazily(pool):
    source = Counting(itertools.count())
    results = pool.map(double, source)
    assert list(itertools.islice(results, 1000)) == [n * 2 for n in range(1000)]
    assert source.taken < 1000 + 10_000
    results.close()


def test_the_first_calls_go_out_before_the_first_next(pool, tmp_path):
    path = str(tmp_path / "ran")
    results = pool.map(append, itertools.repeat(path, 3), "abc")
    wait_for(lambda: sorted(lines(path)) == ["a", "b", "c"])
    assert list(results) == [None] * 3


@pytest.mark.guarantee("pool-6")
@pytest.mark.parametrize("ordered", [True, False])
def test_results_do_not_wait_for_inputs_that_come_slowly(pool, ordered):
    taken = []

    def stream():  # as long as a test may take
        for n in range(6000):
            time.sleep(0.005)
            taken.append(n)
            yield n

    list(pool.map(operator.neg, range(10)))  # its calls are known as short
    results = pool.map(operator.neg, stream(), ordered=ordered)
    assert [next(results) for _ in range(3)] and len(taken) < 6000
    results.close()


@pytest.mark.guarantee("pool-6")
def test_a_slow_consumer_bounds_what_is_taken_and_held():
    source = Counting(itertools.count())
    with poly.Pool(2) as pool:
        results = pool.map(double, source)
        assert next(results) == 0
        before = source.taken
        for p in [pool.promise(abs, -1) for _ in range(500)]:
            p.value  # noqa: B018 - the drones have had all the time they want
        assert source.taken == before <= 1 + MAX_CALLS_AHEAD
        results.close()


def test_buffersize_bounds_what_is_under_way(pool):
    source = Counting(range(1000))
    results = pool.map(double, source, buffersize=3)
    for i in range(100):
        assert next(results) == 2 * i
        assert source.taken <= i + 1 + 3
    results.close()


def test_an_error_is_raised_in_its_place(pool):
    results = pool.map(fail_at_five, range(10))
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="5"):
        next(results)
    with pytest.raises(StopIteration):
        next(results)


def test_an_error_of_the_input_is_raised_at_the_consumer(pool):
    def broken():
        yield from range(100)
        raise KeyError("input")

    with pytest.raises(KeyError, match="input"):
        list(pool.map(double, broken()))
    assert pool.doit(abs, -1) == 1


def test_unordered_results_come_as_they_are_ready(pool, tmp_path):
    gate = str(tmp_path / "gate")
    results = pool.map(hold_zero, range(10), itertools.repeat(gate), ordered=False)
    first = [next(results) for _ in range(9)]
    assert sorted(first) == list(range(1, 10))
    append(gate, "open")
    assert list(results) == ["held"]


def test_unordered_gives_every_result_once(pool):
    assert sorted(pool.map(double, range(3000), ordered=False)) == [n * 2 for n in range(3000)]


def test_a_timeout_counts_from_the_call(pool, tmp_path):
    started = str(tmp_path / "started")
    results = pool.map(block_for_ever, [started], timeout=0.2)
    with pytest.raises(TimeoutError, match=r"map\(block_for_ever, ...\) did not come within 0.2 s"):
        next(results)
    assert pool.doit(abs, -1) == 1
    assert list(pool.map(abs, [-1], timeout=30)) == [1]


def test_closing_the_iterator_cancels_what_is_under_way(tmp_path):
    started = str(tmp_path / "started")
    with poly.Pool(2) as pool:
        results = pool.map(block_for_ever, [started] * 8)
        wait_for(lambda: len(lines(started)) == 2)
        results.close()
        assert pool.doit(abs, -1) == 1
        assert len(lines(started)) == 2


def test_closing_the_iterator_begins_nothing_however_long_it_takes(tmp_path, monkeypatch):
    started = str(tmp_path / "started")

    def cancel_and_dawdle(promise, running=True):
        cancelled = cancel(promise, running)
        time.sleep(0.1)  # the drones may go on meanwhile
        return cancelled

    cancel = poly.Promise.cancel
    with poly.Pool(2) as pool:
        results = pool.map(block_for_ever, [started] * 8)
        wait_for(lambda: len(lines(started)) == 2)
        monkeypatch.setattr(poly.Promise, "cancel", cancel_and_dawdle)
        results.close()
        assert pool.doit(abs, -1) == 1
        assert len(lines(started)) == 2


@pytest.mark.filterwarnings("ignore:the results of map")
@pytest.mark.parametrize("ordered", [True, False])
def test_an_iterator_that_is_dropped_cancels_what_is_under_way(ordered, tmp_path):
    started = str(tmp_path / "started")
    with poly.Pool(1) as pool:
        results = pool.map(block_for_ever, [started] * 8, ordered=ordered)
        wait_for(lambda: lines(started))
        del results
        assert pool.promise(abs, -1).result(30) == 1
        assert len(lines(started)) == 1


def test_a_death_is_raised_in_its_place_and_the_rest_can_go_on():
    def die_at_three(n):
        if n == 3:
            os._exit(1)
        return n

    with poly.Pool(2) as pool:
        results = pool.map(die_at_three, range(6), buffersize=1)
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(poly.DroneDied):
            next(results)
        assert list(pool.map(double, range(3))) == [0, 2, 4]


def test_map_can_be_nested_and_run_from_several_threads(pool):
    said = []

    def body(k):
        said.append(sum(pool.map(double, range(k))))

    threads = [threading.Thread(target=body, args=[1000 + k]) for k in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(said) == sorted(k * (k - 1) for k in range(1000, 1004))
    chained = pool.map(double, pool.map(double, range(200)))
    assert list(chained) == [n * 4 for n in range(200)]


def test_chunksize_is_accepted_and_makes_no_difference(pool):
    assert list(pool.map(double, range(10), chunksize=3)) == [n * 2 for n in range(10)]


def test_nonsense_is_refused_at_the_call(pool):
    for bad in ({"chunksize": 0}, {"buffersize": 0}, {"chunksize": -1}):
        with pytest.raises(ValueError, match="at least 1"):
            pool.map(double, [1], **bad)
    with pytest.raises(TypeError):
        pool.map(5, [1])
    with pytest.raises(TypeError):
        pool.map(double, 5)


@pytest.mark.guarantee("pool-10")
def test_a_short_task_overtakes_long_ones(tmp_path):
    """One long piece of work never holds short ones behind it while another drone is free."""
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(2) as pool:
        list(pool.map(double, range(2000)))
        long = pool.promise(hold_until, gate, started)
        assert [p.result(30) for p in [pool.promise(double, i) for i in range(2000)]] == [
            2 * i for i in range(2000)
        ]
        assert not long.done()
        append(gate, "open")


@pytest.mark.guarantee("pool-10")
def test_short_work_stuck_behind_work_that_turned_out_long_moves_to_an_idle_drone(tmp_path):
    gate = str(tmp_path / "gate")
    with poly.Pool(2) as pool:
        for p in [pool.promise(hold_zero, 1, gate) for _ in range(500)]:  # known as short by now
            p.value  # noqa: B018
        work = [pool.promise(hold_zero, i % 1000, gate) for i in range(1000)]
        assert [p.result(30) for p in work[1:]] == list(range(1, 1000))
        append(gate, "open")
        assert work[0].value == "held"


def test_results_that_are_dropped_unread_are_warned_of_as_their_calls_were_not_made(pool):
    with pytest.warns(RuntimeWarning, match=r"results of map\(sleep, \.\.\.\) were never read"):
        pool.map(time.sleep, [0.01] * 1000)
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.map(time.sleep, [0.01] * 1000).close()
        broken_off = pool.map(abs, range(1000))
        assert next(broken_off) == 0
        del broken_off
        assert list(pool.map(abs, [])) == []
        gc.collect()


def test_results_that_are_taken_after_the_pool_has_ended_are_there(engine):
    with poly.Pool(2) as pool:
        results = pool.map(double, range(10_000))
        sums = pool.map(lambda a, b: a + b, itertools.count(), {1: 2, 3: 4})
    assert list(results) == [2 * n for n in range(10_000)]
    assert list(sums) == [1, 4]
    pool = poly.Pool(1)
    results = pool.map(double, [1, 2, 3] * 100, ordered=False, return_exceptions=True)
    pool.shutdown()
    assert sum(results) == 1200


def test_results_are_in_order_if_a_thread_begins_to_read_while_the_pool_ends():
    class Numbers:
        def __len__(self):
            return 3000

        def __iter__(self):
            for n in range(3000):
                if n == 1000:  # in the thread that leaves the block
                    reader.start()
                time.sleep(0)  # lets the other thread run
                yield n

    with poly.Pool(2) as pool:
        got = []
        reader = threading.Thread(target=lambda: got.extend(results))
        results = pool.map(double, Numbers())
        assert reader.ident is None
    reader.join()
    assert got == [2 * n for n in range(3000)]


@pytest.mark.parametrize("ordered", [True, False])
def test_the_rest_of_a_map_is_there_after_the_pools_end(engine, ordered):
    with poly.Pool(2) as pool:
        unread = pool.map(double, (n for n in range(1000)), ordered=ordered)
        partly = pool.map(double, range(30_000))
        stream = pool.map(double, Counting(itertools.count()))
        assert [next(partly) for _ in range(3)] == [0, 2, 4] and next(stream) == 0
    got = list(unread)
    assert (got if ordered else sorted(got)) == [2 * n for n in range(1000)]
    assert list(partly) == [2 * n for n in range(3, 30_000)]
    check_is_given_up(stream, "its input has no length, and results were read before")


def test_an_inputs_error_that_the_pools_end_meets_is_raised_in_its_place():
    with poly.Pool(1) as pool:
        results = pool.map(double, (1 // (500 - n) for n in range(1000)))
    with pytest.raises(ZeroDivisionError):
        got = []
        got.extend(results)
    assert len(got) == 500


class Failing:
    """Raises an error in the place of one number, and goes on."""

    def __init__(self, place, error):
        self.numbers, self.place, self.error = iter(range(1000)), place, error

    def __iter__(self):
        return self

    def __next__(self):
        if self.error is not None and self.numbers.__length_hint__() == 1000 - self.place:
            error, self.error = self.error, None
            raise error
        return next(self.numbers)


def test_an_input_that_would_go_on_after_its_error_ends_there_at_the_pools_end():
    with poly.Pool(1) as pool:
        results = pool.map(double, Failing(500, LookupError))
    got = []
    with pytest.raises(LookupError):
        got.extend(results)
    assert got == [2 * n for n in range(500)]


def test_ctrl_c_while_the_pools_end_takes_the_rest_loses_no_item():
    with poly.Pool(1) as pool:
        results = pool.map(double, Failing(500, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pool.shutdown()
        assert list(results) == [2 * n for n in range(1000)]


def check_is_given_up(results, reason):
    with pytest.raises(RuntimeError) as told:
        list(results)
    assert str(told.value) == (
        f"the rest of map({results._stream.source.label}, ...) was not sent when the pool ended, "
        f"because {reason}: take all results before the pool ends, with list(...)"
    )
    assert "cannot schedule new futures after shutdown" in str(told.value.__cause__)


class OfLength:
    def __init__(self, numbers, length):
        self.numbers, self.length = numbers, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.numbers)


@pytest.mark.parametrize("ordered", [True, False])
def test_an_input_that_has_a_length_is_sent_whole_at_the_pools_end(monkeypatch, ordered):
    monkeypatch.setattr(polycephaly.pool.map, "MAX_CALLS_AT_END", 10)
    monkeypatch.setattr(polycephaly.pool.map, "MAX_SECONDS_AT_END", 0)
    inputs = [[*range(30_000)]], [range(30_000)], [OfLength(range(30_000), 30_000)]
    with poly.Pool(2) as pool:
        results = [pool.map(operator.pos, *each, ordered=ordered) for each in inputs]
        results.append(pool.map(max, [0] * 30_000, itertools.count(), ordered=ordered))
        first = next(results[0])
        assert first == 0 or not ordered
    assert first + sum(results.pop(0)) == sum(range(30_000))
    assert [sorted(each) for each in results] == [[*range(30_000)]] * 3


def test_a_length_is_not_believed_at_the_pools_end(monkeypatch):
    monkeypatch.setattr(polycephaly.pool.map, "MAX_CALLS_AT_END", 10_000)
    with poly.Pool(1) as pool:
        results = pool.map(operator.pos, OfLength(itertools.count(), 12_000))
        failing = pool.map(operator.pos, OfLength([1, 2, 3], "no length"))
    check_is_given_up(results, "it has more than 12,000 calls")
    assert list(failing) == [1, 2, 3]


def test_a_buffer_is_filled_at_the_call_though_the_input_is_slow():
    def numbers():
        for i in range(20):
            time.sleep(0.1)
            taken.append(i)
            yield i

    taken = []
    with poly.Pool(2) as pool:
        results = pool.map(abs, numbers(), buffersize=3)
        assert len(taken) == 3
        assert next(results) == 0 and len(taken) <= 4
        results.close()


def test_a_pool_ends_with_few_calls_of_an_unread_map_that_has_a_buffersize():
    numbers = Counting(range(1000))
    with poly.Pool(1) as pool:
        results = pool.map(double, numbers, buffersize=4)
        assert numbers.taken <= 5
    assert numbers.taken <= 6
    check_is_given_up(results, "buffersize=4 limits the calls in flight")


@pytest.mark.parametrize(
    "take, inputs", [(0, itertools.count), (0, lambda: range(10**30)), (1, lambda: range(10**30))]
)
def test_results_of_endless_inputs_are_not_there_after_the_pools_end(take, inputs):
    with poly.Pool(1) as pool:
        results = pool.map(abs, inputs())
        assert list(itertools.islice(results, take)) == list(range(take))
    check_is_given_up(results, "it has more than 100,000 calls")


def test_an_endless_slow_input_does_not_keep_a_pool_from_ending(monkeypatch):
    monkeypatch.setattr(polycephaly.pool.map, "MAX_SECONDS_AT_END", 0)
    numbers = Counting(itertools.count())
    with poly.Pool(1) as pool:
        results = pool.map(double, numbers)
        of_length = pool.map(double, [1, 2] * 100)
        before = numbers.taken
    assert numbers.taken == before + 1
    check_is_given_up(results, "its input did not end within 0 s")
    assert list(of_length) == [2, 4] * 100


class Ending:
    """An iterator that must not be asked again after its end: it would block."""

    def __init__(self):
        self.numbers, self.asked = [3, 2, 1], 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.numbers:
            return self.numbers.pop()
        self.asked += 1
        raise StopIteration


def test_a_pools_end_asks_no_input_that_has_ended():
    numbers = Ending()
    with poly.Pool(1) as pool:
        results = pool.map(double, numbers)
        assert numbers.asked == 1
    assert numbers.asked == 1 and list(results) == [2, 4, 6]


@local_only
def test_a_fork_that_ends_its_copy_of_a_pool_leaves_the_inputs_alone():
    numbers = Counting(iter(range(1000)))
    with poly.Pool(1) as pool:
        results = pool.map(double, numbers)
        before = numbers.taken
        child = os.fork()
        if not child:
            try:
                pool.shutdown()
            finally:
                os._exit(numbers.taken == before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert len(list(results)) == 1000


def test_a_map_that_is_closed_while_the_pools_end_takes_its_rest_sends_no_more():
    def inputs():
        for n in range(1000):
            if n == 500:
                results.close()
            yield n

    with poly.Pool(1) as pool:
        results = pool.map(double, inputs())
    assert pool.status()["tasks_done"] < 500


def test_a_pools_end_does_not_wait_until_a_map_has_room(tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    with poly.Pool(1, max_queued=1) as pool:
        results = pool.map(hold_until, (str(gate) for _ in range(100)))
        dispatcher = pool._dispatcher
        while dispatcher.has_room():
            pool.promise(hold_until, str(gate))
        waits = Mock(side_effect=lambda target: dispatcher.backlog(target) and 1 / 0)
        monkeypatch.setattr(dispatcher.backpressure, "wait", waits)
        pool.shutdown(wait=False)
        gate.touch()
    check_is_given_up(results, "max_queued limits the waiting tasks")


def test_the_bar_counts_while_another_thread_sends_the_rest(capsys):
    with poly.Pool(1) as pool:
        results = pool.map(double, (n for n in range(100)), progress=True)
        first = results._stream._tasks[0]
        # In the place of the other thread.
        first.done = lambda: (results._stream.send_rest(), type(first).done(first))[1]
        results._stream.show(last=True)
        del first.done
        assert list(results) == [2 * n for n in range(100)]


def test_an_error_of_the_block_sends_no_more_calls():
    with pytest.raises(KeyError), poly.Pool(1) as pool:
        results = pool.map(time.sleep, [0.001] * 10_000)
        raise KeyError
    with pytest.raises((RuntimeError, CancelledError)):
        list(results)


def fail_at_3(n, *more):
    if n == 3:
        raise KeyError(n)
    return n


def give_up_at_3(n):
    if n == 3:
        os._exit(5)
    return n


@pytest.mark.parametrize("ordered", [True, False])
def test_errors_may_stand_in_the_places_of_results(pool, ordered):
    list(pool.map(abs, range(1000)))  # short calls, which go in chunks
    results = list(pool.map(fail_at_3, [0, 1, 3, 2, 3], ordered=ordered, return_exceptions=True))
    if ordered:
        assert [type(each) for each in results] == [int, int, KeyError, int, KeyError]
        assert results[2].__notes__[-1] == "in map(fail_at_3, ...), item 2: 3"
    assert sorted(each for each in results if isinstance(each, int)) == [0, 1, 2]


def test_a_death_may_stand_in_its_place_and_the_rest_goes_on():
    with poly.Pool(2, output="discard") as pool:
        results = list(pool.map(give_up_at_3, range(100), return_exceptions=True))
        assert isinstance(results[3], poly.DroneDied)
        del results[3]
        assert results == [n for n in range(100) if n != 3]


def test_errors_of_inputs_and_time_limits_are_raised_all_the_same(pool, tmp_path):
    results = pool.map(fail_at_3, (1 // (2 - n) for n in range(5)), return_exceptions=True)
    with pytest.raises(ZeroDivisionError):
        list(results)
    late = pool.map(hold_until, [str(tmp_path / "gate")], timeout=0.05, return_exceptions=True)
    with pytest.raises(TimeoutError):
        list(late)


def test_awaited_errors_may_stand_in_their_places(pool):
    async def take():
        return [n async for n in pool.map(fail_at_3, [3, 4], return_exceptions=True)]

    error, value = asyncio.run(take())
    assert isinstance(error, KeyError) and value == 4


def stop(error):
    raise error


class Stops:
    """Raises the error when it is unpickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return stop, (self.error,)


def stop_at_five(error, n):
    return stop(error) if n == 5 else n


def unpickle_to_stop_at_five(error, n):
    return Stops(error) if n == 5 else [n]


class StopsAtFive:
    def __init__(self, error):
        self.items, self.error = iter(range(1, 6)), error

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.items, None) or stop(self.error)


def generate_and_stop(error):
    yield from range(5)
    raise error


def in_calls(pool, error):
    return pool.map(partial(stop_at_five, error), range(9))


def in_chunks(pool, error):
    list(pool.map(stop_at_five, itertools.repeat(error, 1000), range(-1000, 0)))  # known as short
    return pool.map(stop_at_five, itertools.repeat(error), range(9))


STOPS = {
    "call": in_calls,
    "unordered": lambda pool, error: pool.map(
        partial(stop_at_five, error), range(9), ordered=False
    ),
    "call of a chunk": in_chunks,
    "result": lambda pool, error: pool.map(partial(unpickle_to_stop_at_five, error), range(9)),
}
INPUT_STOPS = {
    "iterator": lambda pool, error: pool.map(double, StopsAtFive(error)),
    "generator": lambda pool, error: pool.map(double, generate_and_stop(error)),
}


@pytest.mark.parametrize("run", [asyncio.run, poly.green.run])
@pytest.mark.parametrize("start", {**STOPS, **INPUT_STOPS}.values(), ids={**STOPS, **INPUT_STOPS})
def test_a_stop_async_iteration_of_users_is_an_error_in_async_for(pool, run, start):
    async def read():
        async for _ in start(pool, StopAsyncIteration("mine")):
            pass

    with pytest.raises(RuntimeError, match=r"map.* raised StopAsyncIteration") as raised:
        run(read())
    assert raised.value.__cause__.args == ("mine",)
    assert "), item 5" in raised.value.__notes__[-1]


@pytest.mark.parametrize("start", STOPS.values(), ids=STOPS)
def test_a_stop_iteration_of_users_is_an_error_that_names_its_item(pool, start):
    with pytest.raises(RuntimeError, match="raised StopIteration") as raised:
        list(start(pool, StopIteration("mine")))
    assert raised.value.__cause__.args == ("mine",)
    assert "), item 5" in raised.value.__notes__[-1]


class Unprintable:
    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize("short", [False, True])
def test_an_error_names_its_item(pool, short):
    if short:
        list(pool.map(fail_at_3, [0] * 5000))
        list(pool.map(fail_at_3, [0] * 5000, itertools.repeat("")))
    cases = [
        ([*range(10, 700), 3], (), ", item 690: 3"),
        ([1] * 400 + [3], (["x" * 500] * 401,), ", item 400: 3, 'xxx"),
    ]
    for items, more, note in cases:
        with pytest.raises(KeyError) as raised:
            list(pool.map(fail_at_3, items, *more))
        (said,) = raised.value.__notes__[-1:]
        assert said.startswith(f"in map(fail_at_3, ...){note}") and len(said) < 200


@dataclass
class Data:
    n: int


def die_with(item):
    os._exit(5)


ITEMS = [
    ((1, 2), "(1, 2)"),
    (Data(3), "Data(n=3)"),
    (Path("/tmp/a"), "PosixPath('/tmp/a')"),
    ({"x": [0]}, "{'x': [0]}"),
    (range(3), "range(0, 3)"),
    ("x" * 1000, "'" + "x" * 37),
]


def notes_of(error):
    return error.__notes__[-1].partition("), ")[2]


def test_items_of_all_kinds_are_described_however_they_travel():
    with poly.Pool(2) as pool:
        for item, text in ITEMS:
            (alone,) = pool.map(fail_with, [item], return_exceptions=True)
            with pytest.raises(KeyError) as raised:
                list(pool.map(fail_with, iter([item])))
            for error in (alone, raised.value):
                assert notes_of(error).startswith(f"item 0: {text}") and len(notes_of(error)) < 100
            list(pool.map(fail_at_3, [0] * 2000, itertools.repeat(item)))
            with pytest.raises(KeyError) as raised:
                list(pool.map(fail_at_3, [*range(10, 70), 3], [item] * 61))
            assert notes_of(raised.value).startswith(f"item 60: 3, {text}")


def test_the_item_of_a_death_and_of_a_time_limit_is_described(pool):
    with poly.Pool(1, output="discard") as mortal:
        (died,) = mortal.map(die_with, [Path("/tmp/a")], return_exceptions=True)
        assert isinstance(died, poly.DroneDied) and notes_of(died) == "item 0: PosixPath('/tmp/a')"
    limited = pool.options(timeout=0.01)
    (late,) = limited.map(lambda _: block_for_ever(), [Path("/tmp/a")], return_exceptions=True)
    assert isinstance(late, TimeoutError) and notes_of(late) == "item 0: PosixPath('/tmp/a')"


@local_only
def test_of_an_item_that_is_large_or_contains_a_promise_only_the_index_is_told(pool):
    for item in (b"x" * MAX_ITEM_BYTES, [pool.promise(list)]):
        (error,) = pool.map(fail_with, [item], return_exceptions=True)
        assert notes_of(error) == "item 0"


def test_the_arguments_of_calls_that_have_not_failed_are_let_go(pool):
    list(pool.map(double, [0] * 5000))
    for items in ([[1]] * 1000, ["x"] * 1000, [[1]]):
        results = pool.map(double, items)
        for task in results._stream._tasks:
            task.promise.exception()
            assert task.item_payload == b""
        assert len(list(results)) == len(items)


def test_an_item_that_does_not_unpickle_is_told_by_its_index(pool):
    (error,) = pool.map(fail_with, [Unreadable()], return_exceptions=True)
    assert isinstance(error, ValueError) and notes_of(error) == "item 0: <unprintable>"


@local_only
def test_items_are_described_without_harm():
    task = Task(Mock(describes_items=True))
    task.definition = RemoteFunction(1, DEFINE_CALLABLE, b"", "f")
    task.args = 1, Unprintable()
    assert describe(task, 0).startswith("1, <Unprintable ")
    task.args = (10**100_000,)
    assert len(describe(task, 0)) < 100  # an error, in some Pythons


class Secret:
    def __repr__(self):
        raise SystemExit("my repr is never to be called")


def test_a_pool_may_leave_out_the_items():
    with poly.Pool(1, describe_items=False) as pool:
        for items in ([3], [0] * 5000 + [3]):
            with pytest.raises(KeyError) as raised:
                list(pool.map(fail_at_3, items, [Secret()] * len(items)))
            item = len(items) - 1
            assert raised.value.__notes__[-1] == f"in map(fail_at_3, ...), item {item}"


@local_only
def test_an_input_may_end_its_own_pool():
    def inputs():
        for i in range(20_000):
            if i == 5000:
                pool.shutdown(wait=False)
            yield i

    with poly.Pool(1) as pool:
        results = pool.map(abs, inputs())
        got = []
        with pytest.raises(RuntimeError):
            got.extend(results)
        assert got == list(range(len(got)))


@local_only
@pytest.mark.parametrize("ordered", [True, False])
def test_an_error_keeps_no_results_alive(ordered):
    with poly.Pool(2) as pool:
        results = pool.map(lambda i: 1 // i, range(200), ordered=ordered)
        with pytest.raises(ZeroDivisionError):
            list(results)
        assert not results._stream._tasks and not getattr(results._stream, "_arrived", ())


@local_only
@pytest.mark.filterwarnings("ignore:no shared memory for a large value")
def test_an_answer_in_two_parts_arrives_in_order_by_either_transport(monkeypatch):
    # Large answers go through the socket in pieces if shared memory is full.
    monkeypatch.setattr("polycephaly.engines.local.engine.shared_memory_ceiling", lambda: 4096)
    hold_interpreter = ctypes.PyDLL(None).usleep

    def value(i):
        if i == 30_000:
            time.sleep(0.03)
            return bytes(200_000)
        return i

    with poly.Pool(1, output="discard") as pool:
        list(pool.map(value, range(20_000)))
        for _ in range(5):
            results = pool.map(value, range(29_900, 30_200))
            hold_interpreter(120_000)
            assert len(list(results)) == 300


@local_only
def test_two_threads_that_read_at_once_get_an_error_both(pool, tmp_path):
    """The results would be missing in one of them, which would take that for the end."""
    gate = str(tmp_path / "gate")
    results = pool.map(hold_until, [gate])
    errors = []

    def read():
        with pytest.raises(RuntimeError, match=r"the results of map.* two consumers") as error:
            next(results)
        errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: reader.ident in waiting_threads)
    read()
    append(gate, "open")
    reader.join(60)
    read()  # a third one, too, and all later ones
    read()
    assert len(errors) == 4


@pytest.mark.parametrize(
    "run, start", [(asyncio.run, asyncio.ensure_future), (poly.green.run, poly.green.spawn)]
)
@pytest.mark.parametrize("ordered", [True, False])
def test_two_tasks_that_await_at_once_get_an_error_both(pool, tmp_path, run, start, ordered):
    gate = str(tmp_path / "gate")

    async def read():
        results = pool.map(hold_until, [gate], ordered=ordered)

        async def read_one():
            with pytest.raises(RuntimeError, match="have two consumers"):
                await anext(results)

        first, second = start(read_one()), start(read_one())
        await second
        append(gate, "open")
        await first

    run(read())


@pytest.mark.parametrize("first", ["next", "anext"])
def test_next_beside_async_for_gets_an_error(pool, first):
    async def read():
        results = pool.map(double, range(1000))
        if first == "next":
            assert next(results) == 0
        else:
            assert await anext(results) == 0
        for _ in range(2):
            with pytest.raises(RuntimeError, match="have two consumers"):
                if first == "next":
                    await anext(results)
                else:
                    next(results)

    asyncio.run(read())


@pytest.mark.parametrize("ends_by", ["close", "an error of a call"])
def test_the_input_is_dropped_with_the_results(pool, ends_by):
    ended = []

    def items():
        try:
            yield from itertools.count()
        finally:
            ended.append(True)

    results = pool.map(lambda n: 1 // (3 - n), items())
    assert next(results) == 0
    if ends_by == "close":
        results.close()
    else:
        with pytest.raises(ZeroDivisionError):
            list(results)
    assert ended == [True]
