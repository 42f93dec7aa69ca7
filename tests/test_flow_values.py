"""Large results of nodes lie where their drones wrote them; other nodes have them from there, and
we when we ask."""

import asyncio
import contextlib
import gc
import os
import random
import signal
import threading

import numpy as np
import pytest
from faults import append, kill_myself, lines, wait_for

import polycephaly as poly

SIZE = 100_000


class Traced:
    """Tells a file which process unpickles it."""

    def __init__(self, path, numbers):
        self.path, self.numbers = path, numbers

    def __reduce__(self):
        return arrived, (self.path, self.numbers)


def arrived(path, numbers):
    append(path, str(os.getpid()))
    return Traced(path, numbers)


@poly.flow
def make(path, value):
    return Traced(path, np.full(SIZE, value))


@poly.flow
def plus(one, other):
    return Traced(one.path, one.numbers + other.numbers)


@poly.flow
def total(traced):
    return float(sum(each.numbers[-1] for each in traced))


@poly.flow
def numbers(value):
    return np.full(SIZE, value)


meeting = threading.Barrier(2)


class Met:
    """Is unpickled here by two threads at the same time."""

    def __init__(self):
        self.numbers = np.full(SIZE, 1)

    def __setstate__(self, state):
        self.__dict__ = state
        if os.getpid() == HERE:
            meeting.wait(30)


def test_threads_that_open_a_value_at_the_same_time_get_the_same_object():
    with poly.Pool(1):
        promise = poly.flow(Met)()
        found = []
        threads = [threading.Thread(target=lambda: found.append(promise.value)) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert found[0] is found[1] is promise.value


HERE = os.getpid()


class Foreign:
    """Cannot be unpickled by the process that imported this first."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __reduce__(self):
        return arrived_elsewhere, (self.numbers,)


def arrived_elsewhere(numbers):
    if os.getpid() == HERE:
        raise ValueError("not here")
    return Foreign(numbers)


@poly.flow
def foreign():
    return Foreign(np.zeros(SIZE))


def nothing_is_used(pool):
    gc.collect()
    return pool._dispatcher.supervisor.engine._arena.used() == 0


def test_what_goes_from_node_to_node_is_opened_by_drones_alone(tmp_path):
    path = str(tmp_path / "opened")
    with poly.Pool(2):
        one, two = make(path, 1), make(path, 2)
        three = plus(one, two)
        assert total([three, one, three]).value == 7
        opened = lines(path)
        assert len(opened) == 4 and str(os.getpid()) not in opened
        assert three.value.numbers[0] == 3 and three.value is three.value
        assert lines(path)[4:] == [str(os.getpid())]
        assert total([three, three]).value == 6 and lines(path).count(str(os.getpid())) == 1


def test_such_a_value_is_there_in_every_way_in_which_it_can_be_asked_for():
    async def awaited(promise):
        return (await promise)[0]

    with poly.Pool(1):
        one = numbers(1)
        last = one.then(lambda it: it[-1])
        both = poly.gather(one, numbers(2))
        assert last.value == 1 and [it[0] for it in both.value] == [1, 2]
        assert asyncio.run(awaited(numbers(3))) == 3
        assert [p.result()[0] for p in poly.as_completed([one])] == [1]
        assert one.exception() is None and "ndarray" in repr(one)
        one.value[0] = 5  # its own copy
        assert poly.flow(lambda it: float(it[0]))(one).value == 1 and one.value[0] == 5
    assert one.value[1] == 1


def test_it_goes_to_other_pools_and_to_plain_work_too():
    with poly.Pool(1) as pool:
        one = numbers(1)
        assert pool.promise(lambda it, k: float(it[-1]) + k, one, k=1).value == 2
        with poly.Pool(1) as other:
            assert other.promise(len, one).value == SIZE
            assert poly.flow(len)(one).value == SIZE


def test_it_outlives_the_drone_that_made_it(tmp_path):
    with poly.Pool(1, output="discard") as pool:
        one = numbers(7)
        assert one.exception(30) is None
        pool.promise(kill_myself).exception(30)
        assert poly.flow(lambda it: float(it[-1]))(one).value == 7
    assert one.value[0] == 7


def test_its_memory_goes_back(impatient, tmp_path):
    path = str(tmp_path / "opened")
    with poly.Pool(2) as pool:
        made = [make(path, i) for i in range(6)]
        for _ in range(3):
            made = [plus(a, b) for a, b in zip(made, made[1:] + made[:1], strict=True)]
        assert total(made).value == 8 * sum(range(6))
        assert not nothing_is_used(pool)
        del made
        wait_for(lambda: nothing_is_used(pool))


@poly.flow(keep=True)
def kept(value):
    return [value, os.getpid()]


@poly.flow
def where(*kept):
    return [pid for _, pid in kept], os.getpid()


@poly.flow
def with_handle(value):
    return np.full(SIZE, value), poly.Kept([value])


@poly.flow
def lengths(pair):
    return len(pair[0]), len(pair[1])


def test_a_large_result_with_handles_in_it_is_good_for_other_nodes():
    with poly.Pool(2):
        pair = with_handle(3)
        assert [each.value for each in [lengths(pair) for _ in range(4)]] == [(SIZE, 1)] * 4
        assert pair.value[1].value == [3]


def test_what_is_kept_stays_in_its_drone_and_nodes_that_take_it_run_there():
    with poly.Pool(2):
        for _ in range(5):
            one = kept(1)
            assert where(one).value == ([one.value.value[1]], one.value.value[1])
        assert isinstance(one.value, poly.Kept)
        many = [kept(kept(i)) for i in range(4)]
        assert len(where(*many).value[0]) == 4
        (three, _), _ = many[3].value.value
        assert three == 3 and len(poly.Graph(*many).nodes) == 8
    assert kept(1) == [1, os.getpid()]
    with pytest.raises(TypeError, match="keep"):
        poly.flow(keep=1)


@poly.flow(retries=100)
def length(*values):
    return sum(value if isinstance(value, int) else len(value) for value in values)


def test_a_graph_whose_drones_are_killed_at_random_comes_out_right_if_its_nodes_may_run_again():
    seed = random.randrange(1 << 32)
    print("seed", seed)  # shown where it fails
    dice = random.Random(seed)
    with poly.Pool(2, output="discard") as pool:
        layer, expected = [length(i) for i in range(20)], list(range(20))
        for round_ in range(25):
            pairs = [(dice.randrange(20), dice.randrange(20), dice.randrange(3)) for _ in range(20)]
            large = [poly.flow(retries=100)(bytes)(SIZE + many) for _, _, many in pairs]
            layer = [
                length(layer[a], layer[b], it) for (a, b, _), it in zip(pairs, large, strict=True)
            ]
            expected = [expected[a] + expected[b] + SIZE + many for a, b, many in pairs]
            if round_ % 6 == 5:
                with contextlib.suppress(ProcessLookupError, RuntimeError):  # it has just died
                    os.kill(dice.choice(pool.drones).pid, signal.SIGKILL)
        assert [p.value for p in layer] == expected


def test_a_value_that_cannot_be_opened_here_is_an_error_for_whoever_asks():
    async def wait_for_one():
        return await asyncio.wrap_future(foreign())

    with poly.Pool(2) as pool:
        made = foreign()
        assert poly.flow(lambda each: len(each.numbers))(made).value == SIZE  # elsewhere it can be
        assert "fulfilled" in repr(made)
        error = made.exception()
        assert repr(error) == "ValueError('not here')"
        asked = [made, foreign().then(len), poly.race(foreign()), poly.gather(foreign())]
        asked.append(pool.promise(abs, -1).then(lambda _: made))
        for each in asked:
            with pytest.raises(ValueError, match="not here"):
                each.result(60)
        with pytest.raises(ValueError, match="not here"):
            asyncio.run(asyncio.wait_for(wait_for_one(), 10))
