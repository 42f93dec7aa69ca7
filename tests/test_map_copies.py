"""A `map` of values that can change: dicts, lists, sets, arrays and instances share a pickle, as
copies of their own (wire/detached.py). Nobody must notice."""

from __future__ import annotations

import copyreg
import itertools
import tracemalloc

import numpy
import pytest
from scripts import output_of
from work import echo

import polycephaly as poly

pytestmark = pytest.mark.guarantee("pool-7")

MANY = 700


@pytest.fixture
def pool():
    with poly.Pool(2, output="discard") as pool:
        list(pool.map(echo, range(500)))  # so that calls are known to be short
        yield pool


def _grown(value):
    """Change the argument, and return it with what it was before."""
    before = len(value)
    if isinstance(value, dict):
        value["more"] = before
    elif isinstance(value, list):
        value.append(before)
    else:
        value.add("more")
    return before, len(value)


as_input = pytest.mark.parametrize("as_input", [list, iter])


@as_input
@pytest.mark.parametrize("item", [{"a": 1, "b": "two"}, [1, "two"], {1, "two"}])
def test_each_call_has_an_object_of_its_own_though_all_items_are_one(pool, as_input, item):
    assert list(pool.map(_grown, as_input([item] * MANY))) == [(2, 3)] * MANY
    assert len(item) == 2
    got = list(pool.map(echo, as_input([item] * MANY)))
    assert got == [item] * MANY
    assert len(set(map(id, got))) == MANY


def test_an_item_is_sent_as_it_was_when_it_was_taken(pool):
    def reused():
        record, cells = {}, []
        for i in range(MANY):
            record["i"] = i
            cells[:] = [i, i]
            yield record if i % 2 else cells

    got = list(pool.map(echo, reused()))
    assert got == [{"i": i} if i % 2 else [i, i] for i in range(MANY)]


def _counted(kind):
    _last[kind]["n" if kind == "dict" else 0] += 1
    return _last[kind]


_last = {"dict": {"n": 0}, "list": [0]}


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_a_result_is_sent_as_it_was_when_it_was_returned(kind):
    with poly.Pool(1, output="discard") as pool:
        got = list(pool.map(_counted, [kind] * MANY))
    seen = [each["n"] if kind == "dict" else each[0] for each in got]
    assert seen == list(range(1, MANY + 1))
    assert len(set(map(id, got))) == MANY


def test_two_arguments_that_are_one_object_stay_one(pool):
    items = [{"i": i} for i in range(MANY)]

    def both(first, second):
        first["seen"] = True
        return first is second, "seen" in second

    assert set(pool.map(both, items, items)) == {(True, True)}
    assert set(pool.map(both, items, [dict(each) for each in items])) == {(False, False)}


@as_input
def test_an_argument_beside_others_is_a_copy_too(pool, as_input):
    items = [{"i": i} for i in range(MANY)]

    def sums(record, number, text):
        record["i"] += number + len(text)
        return record

    got = list(pool.map(sums, as_input(items), as_input(range(MANY)), as_input(["abc"] * MANY)))
    assert got == [{"i": 2 * i + 3} for i in range(MANY)]
    assert items == [{"i": i} for i in range(MANY)]


@as_input
def test_parts_that_can_change_are_no_part_of_a_copy(pool, as_input):
    inner = [1]
    items = [{"i": i} for i in range(MANY)]
    for at in (0, 5, 300, MANY - 1):
        items[at] = {"i": at, "inner": inner}

    for _ in range(2):  # not known to be short, and known
        got = list(pool.map(_touch, as_input(items)))
        assert [each["i"] for each in got] == list(range(MANY))
        assert [each["inner"] for each in got if "inner" in each] == [[1, 2]] * 4
        assert inner == [1]


def _touch(record):
    if "inner" in record:
        record["inner"].append(2)
    return record


@as_input
def test_sizes_of_all_kinds_go_in_one_map(pool, as_input):
    lengths = [*range(300), 50_000, 300_000, 2_000_000, *range(300), 70_000]
    items = [{"i": i, "text": "x" * length} for i, length in enumerate(lengths)]
    got = pool.map(lambda record: {**record, "n": len(record["text"])}, as_input(items))
    assert [each["n"] for each in got] == lengths


def test_a_copy_has_the_same_keys_and_order_and_types(pool):
    class Text(str):
        pass

    odd = [
        {1: "int", "b": 2.0, (3, "c"): None, frozenset((4,)): b"bytes"}, {True: 1, 2.5: False},
        {}, [], set(), {"z": 1, "a": 2}, [1, True, 1.0, None], {(1, (2, 3))}, {"": ""},
        [float("inf"), -0.0], {Text("key"): 1}, [Text("x")], {"k": Text("y")}, bytearray(b"ab"),
    ]  # fmt: skip
    got = list(pool.map(echo, odd * 60))
    for one, other in zip(got, odd * 60, strict=True):
        assert repr(one) == repr(other)
        assert type(one) is type(other)
        assert list(map(type, one)) == list(map(type, other))


ARRAYS = {
    "integers": numpy.arange(6).reshape(2, 3), "floats": numpy.linspace(0, 1, 50),
    "columns": numpy.asfortranarray(numpy.arange(6).reshape(2, 3)), "none": numpy.zeros((0, 3)),
    "view": numpy.arange(20)[::3], "scalar": numpy.array(5.0),
    "big-endian": numpy.arange(3, dtype=">i4"),
    "texts": numpy.array(["a", "bcd"]), "times": numpy.array(["2024-01-02"], "M8[D]"),
    "records": numpy.zeros(2, "i4,f8"), "objects": numpy.array([[1], None], object),
    "matrix": numpy.asmatrix(numpy.eye(2)), "masked": numpy.ma.masked_equal([1, 2], 2),
    "large": numpy.arange(40_000), "booleans": numpy.array([True, False]),
}  # fmt: skip
ARRAYS["read-only"] = numpy.arange(4)
ARRAYS["read-only"].flags.writeable = False


def _shape_of(array):
    flags = array.flags
    return (
        type(array).__name__, array.dtype.str, array.shape, flags.writeable, flags.c_contiguous,
        flags.f_contiguous, repr(array.tolist()),
    )  # fmt: skip


@as_input
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_arrive_as_single_calls_would_give_them(pool, as_input, name):
    array = ARRAYS[name]
    count = 40 if name == "large" else 300
    expected = _shape_of(pool.promise(echo, array).value)
    got = list(pool.map(echo, as_input([array] * count)))
    assert set(map(_shape_of, got)) == {expected}
    assert set(pool.map(_shape_of, as_input([array] * count))) == {expected}


def test_an_array_is_the_callees_own(pool):
    def overwrite(array):
        array += 1
        return array

    array = numpy.zeros(100)
    got = list(pool.map(overwrite, [array] * 500))
    assert {float(each.sum()) for each in got} == {100.0}
    assert array.sum() == 0
    got[0] += 1
    assert got[1].sum() == 100.0
    assert not any(map(numpy.shares_memory, got, got[1:]))


def test_an_object_in_an_array_is_the_callees_own(pool):
    def grown(array):
        array[0].append(2)
        return array

    array = numpy.array([[1], None], object)
    for _ in range(2):  # not known to be short, and known
        got = list(pool.map(grown, [array] * 300))
        assert {len(each[0]) for each in got} == {2}
    assert len({id(each[0]) for each in got}) == 300


def test_where_a_reducer_is_registered_for_arrays_one_that_fails_does_so_alone(pool, monkeypatch):
    def reduce(array):
        if array[0] == 7:
            raise ValueError("this array stays here")
        return len, ([7],)

    monkeypatch.setitem(copyreg.dispatch_table, numpy.ndarray, reduce)
    arrays = [numpy.zeros(3)] * 300
    assert list(pool.map(echo, arrays)) == [1] * 300
    results = pool.map(echo, [*arrays, numpy.full(3, 7), *arrays])
    assert [next(results) for _ in arrays] == [1] * 300
    with pytest.raises(ValueError, match="stays here"):
        next(results)


OF_MAIN = """
import copyreg
import polycephaly as poly

class Point:
    def __init__(self, x, name):
        self.x, self.name = x, name
    def side(self):
        return "old"

class Child(Point):
    pass

class Empty:
    pass

class Later:
    def __init__(self, x):
        self.x = x

class Slots:
    __slots__ = ("x",)
    def __init__(self, x):
        self.x = x

class Reduces:
    def __init__(self, x):
        self.x = x
    def __reduce__(self):
        return Reduces, (self.x + 1,)

class HasState:
    def __init__(self, x):
        self.x = x
    def __getstate__(self):
        return {"x": self.x + 1}

class SetsState:
    def __init__(self, x):
        self.x = x
    def __setstate__(self, state):
        self.x = state["x"] + 1

class Makes:
    def __new__(cls, x=-1):
        made = super().__new__(cls)
        made.made = x
        return made
    def __init__(self, x=-1):
        self.x = x
    def __getnewargs__(self):
        return (self.x + 1,)

class Ends:
    ended = 0
    def __init__(self, x):
        self.x = x
    def __del__(self):
        Ends.ended += 1

class Registered:
    def __init__(self, x):
        self.x = x

copyreg.pickle(Registered, lambda each: (Registered, (each.x + 1,)))

class Both(Slots):
    def __init__(self, x):
        self.x, self.made = x, x

class Meta(type):
    def __getattr__(cls, name):
        raise (ValueError if name == "__setstate__" else AttributeError)(name)

class HasMeta(metaclass=Meta):
    def __init__(self, x):
        self.x = x

def same(value):
    return value

def count_ended():
    return Ends.ended

def grown(value):
    value.more = 1
    return len(vars(value))

def rebinding(i):
    # The name goes away after some results were made under it.
    global Later
    made = Later(i)
    if i % 50 == 49:
        class Later:
            def __init__(self, x):
                self.x = -x
        Later.__qualname__ = "Later"
    return made
"""


def test_instances_arrive_as_single_calls_would_give_them():
    done = output_of(
        OF_MAIN
        + """
def told(value):
    state = {n: getattr(value, n) for n in ("x", "made", "name") if hasattr(value, n)}
    return type(value).__name__, sorted(state.items())

if __name__ == "__main__":
    with poly.Pool(2) as pool:
        list(pool.map(same, range(500)))
        kinds = [lambda: Point(1, "a"), lambda: Child(2, "b"), Empty, lambda: Slots(3),
                 lambda: Reduces(4), lambda: HasState(5), lambda: SetsState(6), lambda: Makes(7),
                 lambda: Registered(9), lambda: HasMeta(10), lambda: Both(11)]
        for make in kinds:
            one = make()
            single = told(pool.promise(same, one).value)
            for items in ([one] * 300, iter([one] * 300)):
                got = list(pool.map(same, items))
                assert set(map(repr, map(told, got))) == {repr(single)}, (single, told(got[0]))
                assert len(set(map(id, got))) == 300
            assert {repr(each) for each in pool.map(told, [one] * 300)} == {
                repr(pool.promise(told, one).value)}
            assert len({type(each) for each in got}) == 1 and type(got[0]) is type(one)
        mixed = [make() for make in kinds] * 40
        assert [type(each) for each in pool.map(same, mixed)] == list(map(type, mixed))
        point = Point(1, "a")
        assert list(pool.map(grown, [point] * 300)) == [3] * 300
        assert vars(point) == {"x": 1, "name": "a"}
        unlike = [Point(i, "a") for i in range(300)]
        for i, each in enumerate(unlike):
            if i % 7 == 0:
                each.extra = [i]
            if i % 5 == 0:
                del each.name
        got = list(pool.map(same, unlike))
        assert [vars(each) for each in got] == [vars(each) for each in unlike]
        before = Ends.ended
        ends = [Ends(i) for i in range(300)]
        got = list(pool.map(same, ends))
        assert [each.x for each in got] == list(range(300)) and Ends.ended == before
    with poly.Pool(1) as pool:
        list(pool.map(same, ends))
        before = pool.promise(count_ended).value
        list(pool.map(same, ends))
        assert pool.promise(count_ended).value - before == 300
        print("right")
"""
    )
    assert done == "right\n"


def test_a_class_that_is_replaced_under_its_name_takes_its_instances_along():
    done = output_of(
        OF_MAIN
        + """
def replacing():
    global Point
    for i in range(600):
        yield Point(i, "a")
        if i == 299:
            old = Point
            class Point(old):
                def side(self):
                    return "new"
            Point.__qualname__ = "Point"

def hiding(first):
    global Point
    for i in range(first, first + 600):
        if i % 30 < 20:
            yield Real(i, "a")
        else:
            Point = None  # while the instances before are in the making
            yield i
        Point = Real

def told(point):
    return point.x, point.side()

def number(value):
    return value if isinstance(value, int) else value.x

if __name__ == "__main__":
    with poly.Pool(1) as pool:
        list(pool.map(same, range(500)))
        got = list(pool.map(rebinding, range(200)))
        print(sorted(abs(each.x) for each in got) == list(range(200)), got[10].x, got[60].x)
        Real = Point
        for first in range(0, 9000, 601):
            assert list(pool.map(number, hiding(first))) == list(range(first, first + 600))
        list(pool.map(told, [Point(0, "a")] * 300))
        got = list(pool.map(told, replacing()))
        print(got == [(i, "old" if i < 300 else "new") for i in range(600)])
"""
    )
    assert done.splitlines() == ["True 10 -60", "True"]


def test_instances_are_sent_as_they_were_when_they_were_returned():
    done = output_of(
        OF_MAIN
        + """
last = Point(0, [])

def counted(_):
    last.x += 1
    return last

def named(_):
    last.name.append(len(last.name))
    return last

def mixed(i):
    last.x, last.name = i, "b"
    return [last, i, Child(i, "c"), [last], "text", Later(i)][i % 6]

def told(value):
    if isinstance(value, list):
        return list(map(told, value))
    return (type(value).__name__, dict(vars(value))) if hasattr(value, "__dict__") else value

class Other(Point):
    pass

def either(i):
    return [Point(i, "a"), Other(i, "b"), i, [i], Point(i, [i])][i % 5]

def hooked(i):
    if i == 10:
        Point.__getstate__ = lambda self: {"x": -self.x, "name": "hooked"}
    return Point(i, "a")

if __name__ == "__main__":
    with poly.Pool(1) as pool:
        list(pool.map(same, range(500)))
        got = list(pool.map(counted, range(700)))
        print([each.x for each in got] == list(range(1, 701)), len(set(map(id, got))))
        got = list(pool.map(named, range(40)))
        print([len(each.name) for each in got] == list(range(1, 41)))
        got = list(map(told, pool.map(mixed, range(1200))))
        print(got == [told(mixed(i)) for i in range(1200)])
        got = list(map(told, pool.map(either, range(2000))))
        print(got == [told(either(i)) for i in range(2000)])
        Real, Point = Point, Point(1, "a")  # an instance has the name now
        results, got = pool.map(either, range(0, 500, 5)), []
        try:
            got += results
        except Exception as error:
            print(type(error).__name__, "item 0" in str(error.__notes__))
        Point = Real
        list(pool.map(hooked, range(2000)))
        print({each.name for each in pool.map(hooked, range(20, 1000))})
"""
    )
    assert done.splitlines() == ["True 700", "True", "True", "True", "TypeError True", "{'hooked'}"]


def test_the_rest_of_a_chunk_that_is_cut_has_the_same_copies(pool):
    import time

    def slow(record):
        if record["i"] in (3, 40):
            time.sleep(0.05)
        record["i"] += 1
        return record

    items = [{"i": i} for i in range(MANY)]
    list(pool.map(lambda record: record["i"], items))
    assert list(pool.map(slow, items)) == [{"i": i + 1} for i in range(MANY)]
    failing = itertools.chain(items, [{"i": None}], items)
    results = pool.map(slow, failing)
    assert [next(results) for _ in range(MANY)] == [{"i": i + 1} for i in range(MANY)]
    with pytest.raises(TypeError):
        next(results)


def test_large_rows_are_not_copied_to_be_told_so(pool):
    items = [list(range(20_000)) for _ in range(400)]
    list(pool.map(len, items[:2] * 2))
    list(pool.map(len, [[1]] * 500))  # so that calls are known to be short
    tracemalloc.start()
    try:
        assert list(pool.map(len, items)) == [20_000] * 400
        assert list(pool.map(len, iter(items))) == [20_000] * 400
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40e6  # copies of all of them would take 64 MB


def test_attributes_under_odd_names_and_a_class_that_differs_in_the_receiver():
    done = output_of(
        OF_MAIN
        + """
def made(i):
    return Later(i) if i == 150 else i

def redefine():
    global Point
    class Point:
        def __setstate__(self, state):
            if state["x"] == 150:
                raise ValueError("no 150")
            self.__dict__.update(state, doubled=2 * state["x"])
    Point.__qualname__ = "Point"

def told(point):
    return point.x, getattr(point, "doubled", None)

if __name__ == "__main__":
    with poly.Pool(2) as pool:
        odd = Point(1, "a")
        vars(odd)[7] = 1
        good = [Point(i, "b") for i in range(500)]
        list(pool.map(same, good))
        got = list(pool.map(same, [*good, odd, *good, odd]))
        assert [vars(each) for each in got] == [vars(each) for each in [*good, odd, *good, odd]]
        got = list(pool.map(vars, iter([*good, odd])))
        assert got == list(map(vars, [*good, odd]))

        list(pool.map(made, range(300)))
        for change in "raises", "is gone":
            if change == "raises":
                class Later:
                    def __setstate__(self, state):
                        raise ValueError("not here")
                Later.__qualname__ = "Later"
            else:
                del Later
            results, count = pool.map(made, range(300)), 0
            try:
                for each in results:
                    count += 1
            except (ValueError, AttributeError) as error:
                print(change, count, type(error).__name__)

    with poly.Pool(1) as pool:
        points = [Point(i, "b") for i in range(300)]
        list(pool.map(told, points))
        pool.promise(redefine).value
        results, got = pool.map(told, points), []
        try:
            for each in results:
                got.append(each)
        except ValueError as error:
            print(error, got == [(i, 2 * i) for i in range(150)])
"""
    )
    assert done.splitlines() == [
        "raises 150 ValueError",
        "is gone 150 AttributeError",
        "no 150 True",
    ]
