"""Mistakes of newcomers, and names of other libraries: the error says what to write."""

import asyncio
import math
import warnings

import numpy
import pytest

import polycephaly as poly
from polycephaly import green

VALUE = "a promise is a value to come: take its .value, or await it"
ALL = "which gives all of them by list(results)"


@pytest.fixture(scope="module")
def pool():
    with poly.Pool(1) as pool:
        yield pool


def one(a):
    return a


def two(a, b):
    return a + b


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p + 1,
        lambda p: 1 + p,
        lambda p: numpy.ones(2) * p,
        lambda p: p**2,
        lambda p: p @ p,
        lambda p: -p,
        lambda p: abs(p),
        lambda p: p > 3,
        lambda p: p <= 3,
        lambda p: max(p, p),
        lambda p: sum([p, p]),
        lambda p: int(p),
        lambda p: float(p),
        lambda p: math.sqrt(p),
        lambda p: len(p),
        lambda p: p[0],
        lambda p: list(p),
        lambda p: "a" in p,
        lambda p: f"{p:.2f}",
    ],
)
def test_a_promise_taken_for_its_value_says_so(pool, use):
    for promise in (pool.promise(one, 5), poly.gather(), green.spawn(one, 5), poly.Promise()):
        with pytest.raises(TypeError) as caught:
            use(promise)
        assert str(caught.value).endswith(VALUE)
        assert "Task" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "cure"),
    [("upper", VALUE), ("get", "use .value, or .result(timeout)"), ("ready", "use .done()")],
)
def test_an_attribute_of_its_value_or_of_another_library_says_what_to_use(pool, name, cure):
    promise = pool.promise(one, 5)
    with pytest.raises(AttributeError) as caught:
        getattr(promise, name)
    assert str(caught.value) == f"'Promise' object has no attribute {name!r}: {cure}"
    assert caught.value.name == name and caught.value.obj is promise


def has_no_such_attribute():
    return (3).nothing


@pytest.mark.parametrize(
    "promise",
    [
        lambda pool: pool.promise(has_no_such_attribute),
        lambda pool: poly.gather(pool.promise(has_no_such_attribute)),
        lambda pool: pool.promise(one, 3).then(lambda n: n.nothing),
        lambda pool: green.spawn(has_no_such_attribute),
    ],
)
def test_an_attribute_error_of_a_task_is_its_own(pool, promise):
    with pytest.raises(AttributeError, match="'int' object has no attribute 'nothing'"):
        promise(pool).value  # noqa: B018


class Lazy:
    def __radd__(self, other):
        return "asked"

    __gt__ = __radd__


def test_an_operand_that_knows_what_to_do_with_a_promise_is_asked(pool):
    promise = pool.promise(one, 5)
    assert promise + Lazy() == "asked" and (promise < Lazy()) == "asked"


def deep(a):
    return one(a, timeout=3)


def deep_rows(pair):
    return two(pair)


def test_an_error_within_a_function_has_no_note_about_its_call(pool):
    for call in (lambda: pool.doit(deep, 1), lambda: list(pool.map(deep_rows, [(1, 2)]))):
        with pytest.raises(TypeError) as caught:
            call()
        notes = getattr(caught.value, "__notes__", [])
        assert not any("options(" in note or "zip" in note for note in notes)


def test_a_promise_stays_what_it_was(pool):
    promise = pool.promise(one, 0)
    assert promise and promise == promise and promise in [promise] and {promise: 1}[promise] == 1
    assert f"{promise}".startswith("<Promise ") and type(promise).__name__ == "Promise"
    assert not hasattr(promise, "__array__") and not callable(promise)
    assert numpy.array([promise, promise]).shape == (2,)
    assert not hasattr(promise, "_repr_png_")


@pytest.mark.parametrize(
    ("use", "text"), [(lambda r: r.value, ALL), (lambda r: r.get(), ALL), (lambda r: r[0], ALL)]
)
def test_the_results_of_a_map_taken_for_a_promise_or_a_list(pool, use, text):
    with pytest.raises((AttributeError, TypeError)) as caught:
        use(pool.map(one, [1]))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda pool: poly.map, "a pool has it, pool.map(...)"),
        (lambda pool: poly.Channel, "use polycephaly.green.Channel"),
        (lambda pool: poly.wait, "use concurrent.futures.wait(promises)"),
        (lambda pool: poly.Pool(workers=2), "instead of workers, use `drones`: Pool(4)"),
        (lambda pool: poly.Pool(1, max_memory="2 cows"), "'2 cows' is not a size such as 500M"),
        (lambda pool: poly.Pool(1, max_memory=2.5), "a number of bytes, or a text such as '500M'"),
        (lambda pool: poly.gather([pool.promise(one, 1)]), "use gather(*promises)"),
        (lambda pool: pool.map(two, [1], b=5), "given by functools.partial(f, ...)"),
        (lambda pool: pool.options(time_limit=3), "instead of time_limit, use `timeout`"),
        (lambda pool: pool.options(cores=3), "it has timeout, retries, priority, resources, seed"),
        (lambda pool: pool.promise(one(1)), "give the function and its arguments, promise(f, x)"),
        (lambda pool: pool.map(one, [1], retries=3), "use pool.options(retries=...)"),
        (lambda pool: pool.map(two, [1], n=5), "given by functools.partial(f, ...)"),
        (lambda pool: pool.drones[0].map(one, [1]), "a drone has promise(f, *args)"),
        (lambda pool: pool.drones[0].prices, "are got by drone['prices']"),
    ],
)
def test_a_wrong_call_names_the_right_one(pool, call, text):
    with pytest.raises((AttributeError, TypeError, ValueError)) as caught:
        call(pool)
    assert text in str(caught.value)
    assert not any(name in str(caught.value) for name in ("TaskTarget", "ExecutorBase"))


@pytest.mark.parametrize(
    ("call", "note"),
    [
        (lambda pool: list(pool.map(two, [(1, 2)])), "map(two, *zip(*rows))"),
        (lambda pool: pool.doit(one, 5, timeout=3), "given by pool.options(timeout=...)"),
    ],
)
def test_an_error_of_a_task_that_is_the_callers_has_a_note(pool, call, note):
    with pytest.raises(TypeError) as caught:
        call(pool)
    assert note in caught.value.__notes__[-1]


def test_an_argument_missing_for_another_reason_has_no_such_note(pool):
    with pytest.raises(TypeError) as caught:
        list(pool.map(two, [1]))
    assert len(caught.value.__notes__) == 1


def test_a_doit_that_blocks_a_loop_of_asyncio_says_so_once():
    async def main(pool):
        return [pool.doit(one, n) for n in range(2)]

    with poly.Pool(1, engine="inline") as pool, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        poly.pool.base._blocked_loop_was_told = False
        assert asyncio.run(main(pool)) == [0, 1]
    assert ["use `await pool.promise(...)`" in str(each.message) for each in told] == [True]
    assert told[0].filename == __file__


def test_none_lifts_a_time_limit_and_a_size_may_be_a_text():
    with poly.Pool(1, timeout=0.2, max_memory="1.5G") as pool:
        assert pool.options(timeout=None).doit("import time; time.sleep(0.5); 'slept'") == "slept"
        assert pool._dispatcher.config.max_memory == 3 << 29


def test_only_public_names_are_listed():
    assert set(dir(poly)) == {*poly.__all__, "__version__", "joblib"}
    assert set(dir(green)) == {*green.__all__, "testing"}
