"""A promise anywhere in a call is waited for, and arrives as its value."""

import concurrent.futures
import copy
import operator
import threading

import pytest
from work import arguments

import polycephaly as poly
from polycephaly import Promise


@pytest.fixture(scope="module")
def pool():
    with poly.Pool(2) as pool:
        yield pool


@pytest.mark.guarantee("graph-1")
def test_promises_at_any_depth_arrive_as_values(pool):
    a, b, c = pool.promise(pow, 2, 3), pool.promise(str.upper, "b"), Promise()
    p = pool.promise(arguments, [a, (b, {"c": [c, 1], "a": a})], 7, c, key={"deep": ([[[c]]],)})
    c.set_result(None)
    assert p.value == (
        ([8, ("B", {"c": [None, 1], "a": 8})], 7, None),
        {"key": {"deep": ([[[None]]],)}},
    )


class Unhashable(poly.Promise):
    def __eq__(self, other):
        return self is other


def test_a_promise_of_a_class_without_a_hash_may_be_inside(pool):
    promise = Unhashable()
    promise.set_result(20)
    assert pool.doit(sum, [promise, 1, promise]) == 41


def test_what_is_far_too_deep_is_refused_at_once(pool):
    deep = []
    for _ in range(50_000):
        deep = [deep]
    error = pool.promise(len, deep).exception()  # to look through all of it would take minutes
    assert "argument 0, a list" in error.__notes__[0]
    while deep:  # or its end recurses as deep
        deep = deep.pop()


def test_deeper_than_python_would_like(pool):
    nested = inner = Promise()
    for _ in range(60):
        nested = [nested]
    inner.set_result("found")
    (found,), _ = pool.promise(arguments, nested).value
    for _ in range(60):
        (found,) = found
    assert found == "found"


def test_what_is_one_object_in_the_arguments_is_one_there(pool):
    p = pool.promise("[]")
    row = [p]
    same = pool.promise(lambda a, b, c: (a is b, a[0] is c, b[0] is c), row, row, p)
    assert same.value == (True, True, True)


def test_a_list_that_contains_itself_is_no_trap(pool):
    ring = [pool.promise(abs, -1)]
    ring.append(ring)
    assert pool.promise(lambda ring: (ring[0], ring[1] is ring), ring).value == (1, True)


def test_a_list_is_captured_at_the_call_with_promises_in_it_too(pool):
    late, other = Promise(), Promise()
    row = [late, "then"]
    p = pool.promise(list, row)
    row[0], row[1] = other, "now"
    late.set_result(1)
    assert p.value == [1, "then"]


def test_functions_that_travel_by_value_may_be_in_it_too(pool):
    p = pool.promise(lambda fs: [f(2) for f in fs], [lambda x, y=3: x * y, Promise()][:1])
    assert p.value == [6]
    three = pool.promise(abs, -3)
    assert pool.promise(lambda pair: pair[0](pair[1]), (lambda x: x + 1, three)).value == 4


def test_submit_map_and_everywhere_take_them_too(pool):
    one, two = pool.promise(abs, -1), pool.promise(abs, -2)
    assert pool.submit(sum, [one, two]).result() == 3
    assert list(pool.map(sum, [[one, two], [1, 2], (two, two)])) == [3, 3, 4]
    assert list(pool.map(operator.add, [[one], [3]], [[two], [4]])) == [[1, 2], [3, 4]]
    assert [p.value for p in pool.everywhere(dict, {"one": one})] == [{"one": 1}] * 2


def test_drones_and_served_pools_take_them_too(pool, tmp_path):
    late = Promise()
    with poly.Drone() as drone:
        there = drone.promise(sum, [late, pool.promise(abs, -1)])
        with (
            poly.serve(pool, file=tmp_path / "card.json"),
            poly.connect(tmp_path / "card.json") as remote,
        ):
            mine = remote.promise(arguments, [late, {"x": remote.promise(abs, -5)}], late)
            late.set_result(10)
            assert mine.value == (([10, {"x": 5}], 10), {})
        assert there.value == 11


def test_large_values_go_through_shared_memory_as_ever(pool):
    big = pool.promise(bytes, 1 << 20)
    assert pool.promise(lambda parts: sum(map(len, parts)), [big, b"x" * (1 << 18), big]).value == (
        2 << 20
    ) + (1 << 18)


class Holder:
    def __init__(self, promise):
        self.promise = promise


class Row(list):
    pass


@pytest.mark.guarantee("graph-1")
@pytest.mark.parametrize("is_settled", [False, True])
def test_inside_other_objects_they_are_their_values_too(pool, is_settled):
    p, other = Promise(), Promise()
    if is_settled:
        p.set_result(1)
    calls = [
        pool.promise(arguments, {p}),
        pool.promise(arguments, {p: 2}),
        pool.promise(arguments, Row([p]), other),
        pool.promise(lambda holder: holder.promise, Holder(p)),
        pool.promise(lambda: p),
        pool.promise(lambda a, b=p: a + b, other),
    ]
    if not is_settled:
        p.set_result(1)
    other.set_result(5)
    assert [each.result(30) for each in calls] == [
        (({1},), {}), (({1: 2},), {}), (([1], 5), {}), 1, 1, 6,
    ]  # fmt: skip


class Copied(Holder):
    def __getstate__(self):
        return copy.deepcopy(self.__dict__)


def test_an_object_that_copies_its_state_when_it_is_pickled_keeps_its_promise(pool):
    call = pool.promise(lambda holder: holder.promise, Copied(pool.promise(abs, -3)))
    assert call.result(30) == 3


def test_a_promise_that_a_mapped_function_captures_after_the_call_of_map_is_too_late(pool):
    x = 1

    def plus_x(n):
        return n + x

    assert list(pool.map(plus_x, range(3000))) == [*range(1, 3001)]  # now it is known as short
    results = pool.map(plus_x, range(3000))
    assert next(results) == 1
    x = pool.promise(abs, -10_000)
    assert list(results) == [*range(2, 3001)]


def test_a_promise_in_a_result_is_refused(pool):
    error = pool.promise(lambda: Promise()).exception(30)
    assert isinstance(error, TypeError) and "return or send its value instead" in str(error)


def test_initargs_take_values_only():
    with pytest.raises(TypeError, match="initargs"):
        poly.Pool(1, initializer=print, initargs=(Promise(),))
    p = Promise()
    with pytest.raises(TypeError, match="initializer"):
        poly.Pool(1, initializer=lambda: p)


def test_a_future_of_the_library_is_refused_with_what_to_give_and_that_works(pool):
    future = concurrent.futures.Future()
    for args in ((future,), (Promise(), future), ([1, future],), ([Promise()], (future,))):
        error = pool.promise(arguments, *args).exception(30)
        assert isinstance(error, TypeError) and "polycephaly.race(future)" in str(error.__notes__)
    p = pool.promise(abs, poly.race(future))
    future.set_result(-3)
    assert p.result(30) == 3


def test_another_argument_that_does_not_pickle_is_the_one_that_is_named(pool):
    error = pool.promise(arguments, [Promise()], [threading.Lock()]).exception(30)
    assert isinstance(error, TypeError) and any(
        note.endswith("argument 1, a list") for note in error.__notes__
    )


def test_a_value_that_is_a_promise_itself_is_refused_and_breaks_nothing(pool):
    inner, outer = Promise(), Promise()
    waits = [pool.promise(arguments, outer), pool.promise(arguments, [outer])]
    outer.set_result([inner])
    assert all(isinstance(p.exception(30), TypeError) for p in waits)
    assert pool.doit(abs, -1) == 1


# -- a path that falls -----------------------------------------------------------------------------


def test_a_long_path_is_rejected_with_the_error_and_one_note_that_names_the_first(pool):
    first = Promise()
    p = bad = pool.promise(lambda x: 1 // x, first)
    for _ in range(3000):
        p = pool.promise(abs, [p] and p)
    first.set_result(0)
    error = p.exception(30)
    assert isinstance(error, ZeroDivisionError) and error.args == bad.exception().args
    notes = [note for note in error.__notes__ if note.startswith("failed input: ")]
    assert len(notes) == 1 and "<lambda> #" in notes[0]


def test_a_wide_and_deep_graph_falls_as_one(pool):
    first = Promise()
    layer = [pool.promise(abs, first) for _ in range(30)]
    for _ in range(40):
        layer = [pool.promise(max, a, b) for a, b in zip(layer, layer[1:] + layer[:1], strict=True)]
    first.set_exception(KeyError("seed"))
    assert {type(p.exception(30)) for p in layer} == {KeyError}


def test_a_cancelled_input_is_named(pool):
    late = pool.promise(abs, Promise())
    p = pool.promise(abs, late)
    assert late.cancel()
    assert "abs #" in str(p.exception(30)) and "was cancelled" in str(p.exception())
