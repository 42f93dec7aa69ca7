"""`polycephaly.multiprocessing.Pool`, by CPython's own tests of `multiprocessing.Pool` where the
interpreter has them, and by programs that are written for it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import unittest
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial, wraps

import pytest
from scripts import output_of

import polycephaly as poly
from polycephaly.multiprocessing import Pool


@pytest.fixture(scope="module")
def pool():
    with Pool(2) as pool:
        yield pool


def square(number):
    return number * number


def fail_at(wrong, number):
    if number == wrong:
        raise KeyError(number)
    return number


def test_apply_and_map_give_what_the_standard_librarys_pool_gives(pool):
    with multiprocessing.get_context("fork").Pool(2) as other:
        for each in (pool, other):
            assert each.apply(pow, (2,), {"exp": 3}) == 8
            assert each.apply_async(pow, [2, 3]).get() == 8
            assert each.map(square, iter(range(5))) == [0, 1, 4, 9, 16]
            assert each.starmap(pow, [[2, 3], (3, 2)], chunksize=2) == [8, 9]
            assert each.map_async(square, [3]).get(60) == [9]
            assert each.starmap_async(pow, [(2, 3)]).get(60) == [8]
            assert list(each.imap(square, [1, 2], chunksize=2)) == [1, 4]
            assert sorted(each.imap_unordered(square, [1, 2])) == [1, 4]


def test_lambdas_and_closures_may_be_called(pool):
    assert pool.map(lambda number: number + 1, [1, 2]) == [2, 3]


def test_a_keyword_keep_is_the_functions_own(pool):
    def give(keep):
        return keep

    assert pool.apply_async(give, kwds={"keep": True}).get() is True
    assert pool.apply(give, kwds={"keep": True}) is True


def test_what_is_no_callable_is_refused(pool):
    with pytest.raises(TypeError, match="not 'f'"):
        pool.map("f", [1])


def test_all_calls_of_a_map_are_made_although_one_fails(pool, tmp_path):
    def touch(number):
        (tmp_path / str(number)).touch()
        return fail_at(0, number)

    with pytest.raises(KeyError) as caught:
        pool.map(touch, range(50))
    assert caught.value.args == (0,)
    assert len(os.listdir(tmp_path)) == 50


def test_an_error_of_a_map_has_the_remote_traceback_and_counts_as_a_failure(pool):
    error = pool.map_async(partial(fail_at, 2), range(4))
    error.wait()
    assert error.ready() and not error.successful()
    with pytest.raises(KeyError) as caught:
        error.get()
    assert "in fail_at" in caught.value.__cause__.tb and "attempt" not in caught.value.__cause__.tb


def test_an_error_of_a_class_that_is_newer_than_the_pool_is_of_that_class(pool):
    class Late(Exception):
        def __init__(self, code, text):
            super().__init__(text)
            self.code = code

    def fail(number):
        raise Late(number, "too late")

    for call in (pool.apply, lambda fail, args: pool.map(fail, args)):
        with pytest.raises(Late, match="too late") as caught:
            call(fail, [7])
        assert caught.value.code == 7


def test_imap_goes_on_after_an_error(pool):
    results = pool.imap(partial(fail_at, 1), range(3))
    assert next(results) == 0
    with pytest.raises(KeyError):
        next(results)
    assert next(results) == 2
    with pytest.raises(StopIteration):
        next(results)


def test_an_exception_that_is_a_result_is_not_raised(pool):
    (error,) = pool.map(ValueError, ["x"])
    assert isinstance(error, ValueError)
    assert isinstance(next(pool.imap(ValueError, ["x"])), ValueError)


def test_imap_takes_an_endless_input_as_far_as_it_needs(pool):
    taken = itertools.count()
    results = pool.imap(square, taken)
    assert [next(results) for _ in range(3)] == [0, 1, 4]


def test_next_with_a_time_limit_loses_no_result(pool, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def wait_at_gate(path):
        with open(path) as file:
            return file.read()

    results = pool.imap(wait_at_gate, [str(gate)])
    with pytest.raises(multiprocessing.TimeoutError):
        results.next(timeout=0.01)
    gate.write_text("open")
    assert results.next(timeout=60) == "open"


def test_several_threads_may_take_the_results_of_one_imap(pool):
    is_inside, may_go_on = threading.Event(), threading.Event()

    def numbers():
        for number in range(20_000):
            if threading.current_thread() is not threading.main_thread():
                is_inside.set()
                assert may_go_on.wait(60)
            yield number

    results = pool.imap(square, numbers())
    with ThreadPoolExecutor(1) as other:
        taken = other.submit(list, results)
        assert is_inside.wait(60)
        with pytest.raises(multiprocessing.TimeoutError):
            results.next(timeout=0)
        may_go_on.set()
        assert taken.result() == [square(number) for number in range(20_000)]


def test_get_with_a_time_limit_raises_multiprocessings_error(pool, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    result = pool.apply_async(gate.read_text)
    with pytest.raises(multiprocessing.TimeoutError):
        result.get(timeout=0.01)
    with pytest.raises(ValueError, match="not ready"):
        result.successful()
    gate.write_text("open")
    assert result.get(60) == "open" and result.successful()


def test_callbacks_have_run_when_the_result_is_ready(pool):
    seen = []
    pool.apply_async(square, (3,), callback=seen.append).wait()
    pool.map_async(square, [3], callback=seen.append).wait()
    pool.apply_async(fail_at, (1, 1), error_callback=seen.append).wait()
    pool.map_async(partial(fail_at, 1), [1], error_callback=seen.append).wait()
    assert seen[:2] == [9, [9]] and [type(each) for each in seen[2:]] == [KeyError, KeyError]


def test_a_callback_that_raises_loses_no_result(pool):
    def raise_it(_):
        raise ValueError

    assert pool.apply_async(square, (3,), callback=raise_it).get(60) == 9


def test_after_close_no_call_is_accepted_and_join_waits_for_those_before():
    pool = Pool(1)
    with pytest.raises(ValueError, match="still running"):
        pool.join()
    results = pool.imap(square, (number for number in range(20_000)))
    later = pool.map_async(square, range(5))
    pool.close()
    for call in (pool.apply, pool.apply_async, pool.map, pool.imap):
        with pytest.raises(ValueError, match="not running"):
            call(square, [1])
    assert sum(results) == sum(number * number for number in range(20_000))
    pool.join()
    assert later.get() == [0, 1, 4, 9, 16]


def test_close_and_join_wait_for_a_map_that_is_still_sending_its_calls():
    is_sending, has_closed = threading.Event(), threading.Event()

    class Slow:
        def __reduce__(self):
            is_sending.set()
            assert has_closed.wait(60)
            return int, (1000,)

    pool = Pool(2)
    result = pool.map_async(square, [*range(1000), Slow(), *range(1000)])
    assert is_sending.wait(60)
    pool.close()
    has_closed.set()
    pool.join()
    assert result.ready() and result.get() == [*map(square, range(1001)), *map(square, range(1000))]


def test_calls_of_an_imap_whose_results_nobody_takes_are_made_before_join_returns(tmp_path):
    pool = Pool(2)
    pool.imap_unordered(os.mkdir, [tmp_path / str(number) for number in range(300)])
    pool.close()
    pool.join()
    assert len(os.listdir(tmp_path)) == 300


def test_leaving_the_block_terminates(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Pool(1) as pool:
        result = pool.apply_async(gate.read_text)
        rest = pool.map_async(square, range(5))
    for each in (result, rest):
        with pytest.raises((CancelledError, poly.DroneDied)):
            each.get(60)
    with pytest.raises(CancelledError, match="take the result within the block"):
        rest.get(60)
    with pytest.raises(ValueError, match="not running"), pool:
        pass
    pool.join()


def test_a_cancellation_by_the_called_function_gets_no_other_reason(pool):
    def cancel():
        raise CancelledError()

    with pytest.raises(CancelledError, match=r"^$"):
        pool.apply_async(cancel).get(60)


def test_names_that_programs_import_with_the_pool_are_the_standard_librarys():
    for name in ("TimeoutError", "cpu_count", "current_process", "freeze_support"):
        assert getattr(poly.multiprocessing, name) is getattr(multiprocessing, name)


def test_a_worker_that_dies_is_an_error_and_not_a_wait_for_ever():
    with Pool(2) as pool:
        with pytest.raises(poly.DroneDied):
            pool.map(lambda number: os.kill(os.getpid(), signal.SIGKILL), [1])
        with pytest.raises(poly.DroneDied):
            pool.apply_async(os._exit, (1,)).get(60)
        assert pool.map(square, [3]) == [9]


def test_the_arguments_of_the_standard_library_and_ours():
    with Pool(2, os.putenv, ("P", "1"), 5, name="lab") as pool:
        assert pool._processes == 2
        assert pool.apply(os.getenv, ("HOME",)) == os.environ.get("HOME")
        assert repr(pool) == "<polycephaly.multiprocessing.Pool state=RUN pool_size=2>"
        with pytest.raises(NotImplementedError):
            pickle.dumps(pool)
    for wrong in ({"processes": 0}, {"maxtasksperchild": 0}, {"maxtasksperchild": "12"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} .*, not "):
            Pool(**wrong)
    with pytest.raises(TypeError):
        Pool(1, 5)


def test_a_pool_that_is_dropped_while_it_runs_is_warned_of():
    pool = Pool(1)
    with pytest.warns(ResourceWarning, match="unclosed running"):
        del pool


def test_what_workers_print_appears_as_it_is():
    code = """
        from polycephaly.multiprocessing import Pool

        if __name__ == "__main__":
            with Pool(1) as pool:
                pool.map(print, ["as it is"])
    """
    assert output_of(code) == "as it is\n"


def test_the_hints_of_a_pool_name_this_one():
    with poly.Pool(1, engine="inline") as pool, pytest.raises(AttributeError) as caught:
        pool.imap  # noqa: B018
    assert "polycephaly.multiprocessing" in str(caught.value)


# -- CPython's own ---------------------------------------------------------------------------------

DIFFERENT = {
    "test_imap_handle_iterable_exception": (
        "results before an error of the input come, also those of its chunk"
    ),
    "test_make_pool": "looks at a private list of processes",
    "test_traceback": "the cause is a `_RemoteTraceback` of concurrent.futures",
    "test_unpickleable_result": "the error of pickling itself is raised, not `MaybeEncodingError`",
    "test_pool_worker_lifetime": "looks at a private list of processes",
}
LEFT_OUT = {
    "test_async": "asserts how long a task takes",
    "test_async_timeout": "asserts how long a wait takes",
}

try:
    import test._test_multiprocessing as theirs
except ImportError:
    theirs = None


class Ours:
    TYPE = "processes"
    Pool = staticmethod(Pool)


def differs(test, why):
    @pytest.mark.xfail(strict=True, reason=why)
    @wraps(test)
    def run(self):
        test(self)

    return run


def case(tests):
    changed = dict.fromkeys(LEFT_OUT)
    changed |= {
        name: differs(getattr(tests, name), why)
        for name, why in DIFFERENT.items()
        if hasattr(tests, name)
    }
    return type(
        tests.__name__.strip("_"), (Ours, tests, unittest.TestCase), {**changed, "__test__": True}
    )


if theirs is not None:
    TestPool = pytest.mark.guarantee("pool-3")(case(theirs._TestPool))
    TestPoolWorkerErrors = case(theirs._TestPoolWorkerErrors)
    TestPoolWorkerLifetime = case(theirs._TestPoolWorkerLifetime)


@pytest.fixture(autouse=True)
def ours_in_its_place(request, monkeypatch):
    """Also where these tests name the library's pool."""
    if theirs is not None and request.cls is not None:
        monkeypatch.setattr(multiprocessing, "Pool", Pool)
