"""Callables: by reference where the drone has them, by value else; captured when the call is
made."""

import contextlib
import dataclasses
import datetime
import enum
import functools
import gc
import operator
import os
import re
import signal
import sys
import threading
import typing
import weakref
from types import ModuleType

import pytest
from engines import NO_FORK, local_only, on_each_engine, poly, pool_of_file
from faults import wait_for
from scripts import output_of
from work import loaded_functions

from polycephaly import green
from polycephaly.memory.arena import Arena
from polycephaly.memory.blocks import Store
from polycephaly.wire.functions import FunctionRegistry
from polycephaly.wire.main_names import MainSnapshot

if typing.TYPE_CHECKING:
    from nowhere import Missing

pytestmark = on_each_engine

FACTOR = 2


def times_factor(n):
    return n * FACTOR


class Counter:
    def __init__(self, start=0):
        self.at = start

    def add(self, n):
        self.at += n
        return self.at

    def __call__(self, n):
        return self.at + n

    @classmethod
    def named(cls, n):
        return f"{cls.__name__} {n}"

    @staticmethod
    def plain(n):
        return n


async def sleep_and_return(n):
    await green.sleep(0)
    return n


pool = pool_of_file(2)


@pytest.mark.parametrize(
    ("work", "args", "value"),
    [
        (pow, (2, 8), 256),
        (times_factor, (4,), 8),
        (lambda n: n + 1, (1,), 2),
        (Counter(5).add, (2,), 7),
        (Counter(5), (3,), 8),
        (Counter.named, (1,), "Counter 1"),
        (Counter.plain, (1,), 1),
        (functools.partial(pow, 3), (2,), 9),
        (functools.partial(lambda a, b: a - b, b=1), (3,), 2),
        (operator.itemgetter(1), ("abc",), "b"),
        ("{}-{}".format, (1, 2), "1-2"),
        (int, ("7",), 7),
        (sleep_and_return, (9,), 9),
        (str.upper, ("x",), "X"),
    ],
    ids=lambda each: getattr(each, "__qualname__", None) or str(each)[:20],
)
def test_every_kind_of_callable_can_be_called(pool, work, args, value):
    assert pool.doit(work, *args) == value


def test_keywords_even_named_like_our_own_parameters_reach_the_callable(pool):
    assert pool.doit(dict, work=1, self=2, args=3, fn=4, timeout=5) == dict(  # noqa: C408
        work=1, self=2, args=3, fn=4, timeout=5
    )
    assert pool.submit(dict, work=1, fn=2).value == {"work": 1, "fn": 2}


def test_a_class_is_called_and_its_instance_comes_back(pool):
    assert pool.doit(Counter, 4).at == 4


def test_a_closure_carries_its_cells(pool):
    def make(n):
        def add(m):
            return n + m

        return add

    assert [pool.doit(make(n), 10) for n in range(5)] == [10, 11, 12, 13, 14]


def test_a_recursive_closure_works(pool):
    def factorial(n):
        return 1 if n == 0 else n * factorial(n - 1)

    assert pool.doit(factorial, 10) == 3628800


@pytest.mark.guarantee("work-12")
def test_arguments_are_captured_when_the_call_is_made(pool):
    argument = [1, 2]
    promises = []
    for i in range(50):
        promises.append(pool.promise(list, argument))
        argument.append(i)
    argument.clear()
    assert [p.value for p in promises] == [[1, 2, *range(i)] for i in range(50)]


@pytest.mark.guarantee("work-12")
def test_a_cell_changed_in_place_shows_as_at_the_call(pool):
    seen = []

    def look():
        return list(seen)

    promises = []
    for i in range(20):
        promises.append(pool.promise(look))
        seen.append(i)
    assert [p.value for p in promises] == [list(range(i)) for i in range(20)]


@pytest.mark.guarantee("work-12")
def test_a_cell_bound_anew_shows_as_at_the_call(pool):
    n = 0

    def look():
        return n

    promises = []
    for i in range(20):
        n = i
        promises.append(pool.promise(look))
    assert [p.value for p in promises] == list(range(20))


def test_an_instance_with_changing_state_shows_as_at_the_call(pool):
    counter, promises = Counter(0), []
    for i in range(20):
        counter.at = i
        promises.append(pool.promise(counter, 0))
        promises.append(pool.promise(counter.add, 1))
    assert [p.value for p in promises] == [v for i in range(20) for v in (i, i + 1)]


def test_defaults_changed_between_calls_show_as_at_the_call(pool):
    def with_default(a=[]):  # noqa: B006 - that is the point
        return list(a)

    promises = []
    for i in range(5):
        promises.append(pool.promise(with_default))
        with_default.__defaults__[0].append(i)
    assert [p.value for p in promises] == [list(range(i)) for i in range(5)]


def test_keyword_defaults_changed_in_place_show_as_at_the_call(pool):
    def work(*, x=2):
        return x

    results = [pool.promise(work)]
    work.__kwdefaults__["x"] = 5
    results.append(pool.promise(work))
    work.__kwdefaults__["y"] = 1
    assert [p.value for p in results] == [2, 5]


def test_attributes_set_later_on_a_captured_function_show_as_at_the_call(pool):
    def inner():
        pass

    def work():
        return getattr(inner, "limit", None)

    results = [pool.promise(work)]
    inner.limit = 5
    results.append(pool.promise(work))
    inner.limit = 6
    results.append(pool.promise(work))
    assert [p.value for p in results] == [None, 5, 6]


def test_a_functions_code_changed_between_calls_shows_as_at_the_call(pool):
    def first():
        return "first"

    def second():
        return "second"

    before = pool.promise(first)
    first.__code__ = second.__code__
    assert (before.value, pool.doit(first)) == ("first", "second")


def test_defaults_bound_anew_between_calls_show_as_at_the_call(pool):
    def with_default(a=1, *, b=2):
        return a, b

    first = pool.promise(with_default)
    with_default.__defaults__ = (3,)
    second = pool.promise(with_default)
    with_default.__kwdefaults__ = {"b": 4}
    assert (first.value, second.value, pool.doit(with_default)) == ((1, 2), (3, 2), (3, 4))


def test_attributes_of_a_by_value_function_come_along(pool):
    def work():
        return work.level

    work.level = 1
    first = pool.promise(work)
    work.level = 2
    assert (first.value, pool.doit(work)) == (1, 2)


def make_fibonacci():
    @functools.lru_cache(maxsize=99, typed=True)
    def fibonacci(n):
        "Of n."
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    fibonacci.told = "yes"
    return fibonacci


def test_a_cached_function_that_calls_itself_goes_by_value_and_arrives_with_an_empty_cache(pool):
    fibonacci = make_fibonacci()
    assert fibonacci(50) == 12586269025
    size, parameters, told, names, same = pool.doit(
        lambda: (
            fibonacci.cache_info().currsize,
            fibonacci.cache_parameters(),
            fibonacci.told,
            (fibonacci.__name__, fibonacci.__qualname__, fibonacci.__doc__, fibonacci.__module__),
            fibonacci.__wrapped__.__closure__[0].cell_contents is fibonacci,
        )
    )
    assert (size, parameters, told, same) == (0, {"maxsize": 99, "typed": True}, "yes", True)
    assert names == ("fibonacci", "make_fibonacci.<locals>.fibonacci", "Of n.", __name__)
    assert pool.doit(fibonacci, 80) == 23416728348467685
    assert pool.doit(lambda: fibonacci(50)) == 12586269025
    assert pool.doit(functools.cache(functools.partial(lambda a, b: a - b, 5)), 2) == 3


@functools.singledispatch
def of_this_module(value):
    return "?"


def test_a_dispatching_function_goes_by_value_with_its_implementations(pool):
    class Mine:
        pass

    @functools.singledispatch
    def show(value):
        return "?"

    @show.register
    def _(value: int):
        return f"int {value}"

    @show.register
    def _(value: list):
        return [show(each) for each in value]

    @show.register
    def _(value: Mine):
        return show(1)

    assert pool.doit(show, [1, ["x", 2], Mine(), None]) == ["int 1", ["?", "int 2"], "int 1", "?"]
    assert pool.doit(lambda: (show.__name__, show.dispatch(float)(1.0), len(show.registry))) == (
        "show",
        "?",
        4,
    )
    assert pool.doit(of_this_module, 1) == "?"


def test_a_local_class_with_what_functools_makes_of_methods_goes_by_value(pool):
    class Table:
        @functools.cached_property
        def size(self):
            return 5

        @functools.cache  # noqa: B019
        def row(self, n):
            return n * self.size

        @functools.singledispatchmethod
        def kind(self, value):
            return "?"

        @kind.register
        def _(self, value: int):
            return "int"

        first_row = functools.partialmethod(row, 1)

    table = Table()
    assert pool.doit(
        lambda: (table.size, table.row(3), table.kind(1), table.kind(""), table.first_row())
    ) == (
        5, 15, "int", "?", 5,
    )  # fmt: skip


def test_a_local_class_and_its_instances_travel_by_value(pool):
    class Local:
        def __init__(self, n):
            self.n = n

        def double(self):
            return self.n * 2

    assert pool.doit(Local(4).double) == 8
    assert pool.doit(lambda: Local(5).double()) == 10


def members_of(kind):
    return [
        (name, member.name, member.value, kind(member.value) is member, attributes_of(member))
        for name, member in kind.__members__.items()
    ]


def attributes_of(member):
    return sorted(item for item in vars(member).items() if item[0] != "__objclass__")


def enum_of_values():
    class Enum(enum.Enum):
        FIRST = (1, 2)
        SECOND = [3]  # noqa: RUF012
        ALIAS = (1, 2)  # noqa: PIE796

    return Enum


def enum_with_init():
    class Enum(enum.Enum):
        FIRST = (1, 2)
        SECOND = (3, 4)

        def __init__(self, mass, radius):
            self.mass, self.radius = mass, radius

    return Enum


def enum_with_new():
    class Enum(bytes, enum.Enum):
        FIRST = (0, "first")
        SECOND = (1, "second")

        def __new__(cls, value, label):
            made = bytes.__new__(cls, [value])
            made._value_, made.label = value, label
            return made

    return Enum


def enum_of_dataclasses():
    @dataclasses.dataclass
    class Planet:
        mass: int
        radius: int = 5

    class Enum(Planet, enum.Enum):
        FIRST = 1, 2
        SECOND = 3

    return Enum


def enum_of_dates():
    class Enum(datetime.date, enum.Enum):
        FIRST = 2020, 1, 1

    return Enum


def enum_of_flags():
    class Enum(enum.IntFlag, boundary=enum.STRICT):
        R, G = 1, 2
        BOTH = 3

    return Enum


@pytest.mark.parametrize(
    "make",
    [
        enum_of_values,
        enum_with_init,
        enum_with_new,
        enum_of_dataclasses,
        enum_of_dates,
        enum_of_flags,
    ],
)
def test_a_local_enum_arrives_with_the_members_that_it_has(make, pool):
    kind = make()

    assert pool.doit(lambda: repr(members_of(kind))) == repr(members_of(kind))
    back = pool.doit(lambda member: [*type(member).__members__.values()], next(iter(kind)))
    assert all(map(operator.is_, back, kind.__members__.values()))


def test_a_value_that_a_local_enum_gave_a_member_besides_finds_the_member(pool):
    class Unit(enum.Enum):
        METRE = ("m", "metre")

        def __new__(cls, value, *others):
            made = object.__new__(cls)
            made._value_ = value
            cls._value2member_map_.update(dict.fromkeys(others, made))
            return made

    assert pool.doit(lambda: Unit("metre")) is Unit.METRE


def test_a_local_class_keeps_its_slots_and_its_instances_come_home(pool):
    @dataclasses.dataclass(slots=True, weakref_slot=True)
    class Point:
        x: int
        y: int = 5

    class Private(Point):
        __slots__ = ("__z",)

        def __init__(self, z):
            super().__init__(z)
            self.__z = z

        def z(self):
            return self.__z

    class Pair(typing.NamedTuple):
        first: int

    assert pool.doit(lambda point: (point, hasattr(point, "__dict__")), Point(1)) == (
        Point(1),
        False,
    )
    there = pool.doit(lambda: Private(7))
    assert (type(there), there.z(), there.y) == (Private, 7, 5)
    assert pool.doit(lambda pair: pair, Pair(1)) == Pair(1)
    assert pool.doit(lambda: repr(Point)) == repr(Point)


class Plugin:
    known: typing.ClassVar = {}

    def __init_subclass__(cls):
        if cls.__name__ in Plugin.known:
            raise TypeError(f"there are two plugins {cls.__name__}")
        Plugin.known[cls.__name__] = cls


@pytest.fixture
def no_plugins():
    Plugin.known.clear()
    yield
    Plugin.known.clear()


def test_a_local_class_meets_a_registry_that_refuses_a_second_one_once(pool, no_plugins):
    class Csv(Plugin):
        pass

    for _ in range(2):
        assert type(pool.doit(lambda plugin: plugin, Csv())) is Csv
    assert pool.doit(lambda: Plugin.known["Csv"] is Csv)

    class Local:  # a registry that travels too, with the class in it
        known: typing.ClassVar = {}

        def __init_subclass__(cls):
            assert cls.__name__ not in Local.known
            Local.known[cls.__name__] = cls

    class Json(Local):
        pass

    assert type(pool.doit(lambda plugin: plugin, Json())) is Json


def test_a_registry_that_refuses_a_local_class_names_the_class_and_the_cure(no_plugins):
    def plugin():
        class Csv(Plugin):
            pass

        return Csv()

    with poly.Pool(1) as pool:
        pool.doit(type, plugin())
        Plugin.known.clear()
        with pytest.raises(TypeError, match="two plugins Csv") as caught:
            pool.doit(type, plugin())
    assert any("making the class Csv anew" in note for note in caught.value.__notes__)


Text = typing.TypeVar("Text", str, bytes)


@pytest.mark.parametrize(
    "value",
    [
        typing.NewType("Id", int),
        typing.TypeVar("T", bound=int, covariant=True),
        typing.TypeVar("T", str, bytes),
        typing.ParamSpec("P"),
        typing.TypeVarTuple("Ts"),
    ],
    ids=repr,
)
def test_an_object_of_typing_that_no_module_has_is_the_same_one_at_home(value, pool):
    def describe(value):
        attributes = "name", "module", "supertype", "bound", "constraints", "covariant"
        return [repr(getattr(value, f"__{each}__", None)) for each in attributes]

    assert pool.doit(lambda: describe(value)) == describe(value)
    assert pool.doit(lambda first, second: (first is value, second), value, value) == (True, value)
    assert pool.doit(lambda: Text) is Text


@pytest.mark.skipif(sys.version_info < (3, 14), reason="the definitions raise NameError")
def test_an_annotation_that_only_type_checkers_have_does_not_keep_a_definition_back(pool):
    def function(a: Missing, b: list[Missing], c: int = 2):
        return c

    @dataclasses.dataclass(slots=True)
    class Data:
        x: int
        y: "Missing" = 3
        z: list[Missing] = dataclasses.field(default_factory=list)

        def method(self, a: Missing):
            return a

    class Named(typing.NamedTuple):
        x: int
        y: Missing

    def annotations(value):
        import annotationlib

        found = annotationlib.get_annotations(value, format=annotationlib.Format.FORWARDREF)
        return {
            name: re.sub(r"(ForwardRef\('\w+')[^)]*", r"\1", repr(value))
            for name, value in found.items()
        }

    for each in function, functools.wraps(function)(lambda: 0), Data, Named, Data.method:
        assert pool.doit(annotations, each) == annotations(each)
    assert pool.doit(lambda: (function(1, 2), Data(1).method(4), Data(1))) == (2, 4, Data(1))
    assert pool.doit(lambda: Named(1, 2)) == Named(1, 2)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="`type` statements are of 3.12")
def test_an_alias_that_no_module_has_is_the_same_one_at_home(pool):
    names = {"__name__": __name__}
    exec("type Json = dict[str, Json] | int\ntype Pairs[T] = list[tuple[T, T]]", names)
    json, pairs = names["Json"], names["Pairs"]
    assert pool.doit(lambda: repr(json.__value__)) == repr(json.__value__)
    assert pool.doit(lambda: json.__value__.__args__[0].__args__[1] is json)
    assert pool.doit(lambda: repr(pairs[int].__value__)) == repr(pairs[int].__value__)
    assert pool.doit(lambda *each: each, json, pairs) == (json, pairs)


@pytest.mark.skipif(sys.version_info < (3, 15), reason="`lazy import` is of 3.15")
def test_names_of_lazy_imports_after_the_snapshot_are_imported_at_the_call():
    assert output_of("""
        import sys
        import polycephaly as poly
        from polycephaly.wire.main_snapshot import take_snapshot

        lazy import no_such_module as absent

        with poly.Pool(1) as pool:
            exec("lazy import wave; lazy import xml.dom.minidom", globals())
            exec("lazy from colorsys import rgb_to_hls as to_hls", globals())
            print("wave" in sys.modules)
            print(pool.doit(lambda: (wave.__name__, xml.dom.minidom.__name__, to_hls(0, 0, 0))))
            exec("lazy import no_other_module as other", globals())
            try:
                pool.doit(lambda: other.name)
            except ModuleNotFoundError as error:
                print(error, error.__notes__[-1])
            print(sorted(take_snapshot().left_out))
    """).splitlines() == [
        "False",
        "('wave', 'xml.dom.minidom', (0.0, 0.0, 0.0))",
        "No module named 'no_other_module' while pickling the function itself, <lambda>, which "
        "captures other, a lazy_import",
        "['absent', 'other', 'pool']",
    ]


@pytest.mark.skipif(sys.version_info < (3, 15), reason="`sentinel` is of 3.15")
def test_a_sentinel_that_no_module_has_is_one_object_in_each_process(pool):
    missing = sentinel("missing", repr="<none>")  # noqa: F821
    assert pool.doit(lambda value: (value is missing, repr(value)), missing) == (True, "<none>")
    assert pool.doit(lambda: missing) is missing


@pytest.fixture
def book():
    arena = Arena(1 << 30)
    yield FunctionRegistry(MainSnapshot(), Store(arena, 0))
    arena.end()


@local_only
def test_an_error_names_the_captured_value_that_cannot_be_pickled():
    book = FunctionRegistry(MainSnapshot(()), None)
    lock, number = threading.Lock(), 1

    def of_closure():
        return number, lock

    class WithLock:
        def __init__(self):
            self.lock = lock

        def work(self):
            return number

    of_global = eval("lambda: (len, number, held)", {"number": 1, "held": lock})
    for function, captured in [
        (of_closure, "lock, a lock"),
        (lambda: of_closure(), "of_closure, a function"),
        (WithLock().work, f"self, a {WithLock.__qualname__}"),
        (of_global, "held, a lock"),
    ]:
        with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object") as caught:
            book.define(function)
        assert caught.value.__notes__[-1].endswith(
            f"{function.__name__}, which captures {captured}"
        )


@local_only
def test_a_function_is_pickled_once_however_often_it_is_called(book):
    n = 3

    def work(i):
        return i + n

    numbers = {book.define(work).number for _ in range(10_000)}
    assert len(numbers) == 1
    n = 4
    assert book.define(work).number not in numbers
    assert len({book.define(times_factor).number for _ in range(10_000)}) == 1
    assert len({book.define("1 + 1").number for _ in range(10_000)}) == 1


@pytest.mark.guarantee("work-12")
@local_only
def test_a_function_that_could_have_changed_in_place_is_pickled_again(book):
    cell = [1]

    def work():
        return cell

    assert len({book.define(work).number for _ in range(3)}) == 3


@pytest.mark.guarantee("work-18")
def test_a_large_closure_called_often_travels_once_per_drone():
    blob = os.urandom(3_000_000)

    def work(i):
        return i + len(blob)

    with poly.Pool(2) as pool:
        promises = [pool.promise(work, i) for i in range(2000)]
        assert [p.value for p in promises] == [i + 3_000_000 for i in range(2000)]
        sent = [p.spans.bytes_sent for p in promises if p.spans.bytes_sent > 1000]
        # Counted with the call that took it along.
        assert 1 <= len(sent) <= 2
        assert all(3_000_000 < each < 3_001_000 for each in sent)


@pytest.fixture
def table():
    """In a global name, bound after the snapshot."""
    main = sys.modules["__main__"]
    yield lambda value: setattr(main, "table", value)
    del main.table


def use_of_table():
    """Made after the snapshot, too: defined in `__main__`, as by a cell of a notebook."""
    function = eval("lambda i: i + len(table)", vars(sys.modules["__main__"]))
    function.__module__ = "__main__"
    return function


@local_only
@pytest.mark.parametrize("make", [bytes, bytearray])
def test_a_function_that_takes_along_ten_megabytes_is_warned_of_once(make, table):
    with poly.Pool(1) as pool:
        table(make(11_000_000))
        work = use_of_table()
        with pytest.warns(RuntimeWarning) as warned:
            assert pool.doit(work, 1) == 11_000_001
            assert list(pool.map(work, [1, 2])) == [11_000_001, 11_000_002]
            assert pool.doit(use_of_table(), 3) == 11_000_003
        [one] = warned
        assert one.filename == __file__
        assert str(one.message).startswith(
            f"<lambda> captures table, a {make.__name__} of 11 MB, which the drones do not have: "
        )
        assert str(one.message).endswith(
            "Give the calls pool.share(table), or call pool.refresh(), so that the drones have "
            "that name"
        )


@local_only
def test_a_captured_value_of_ten_megabytes_is_found_in_inner_functions_and_partials():
    content = bytearray(11_000_000)

    def inner(i, small):
        return i + len(content) + len(small)

    work = functools.partial(lambda small, i: inner(i, small), b"")
    with poly.Pool(1) as pool:
        with pytest.warns(RuntimeWarning, match="captures content, a bytearray of 11 MB") as warned:
            assert pool.doit(work, 1) == 11_000_001
        assert str(warned[0].message).endswith("Give the calls pool.share(content)")


@local_only
def test_a_shared_value_of_ten_megabytes_is_captured_without_a_warning(recwarn):
    with poly.Pool(1) as pool, pool.share(bytearray(11_000_000)) as content:
        assert pool.doit(lambda: len(content)) == 11_000_000
    # CPython's own, of a fork beside the thread of pytest-timeout.
    assert [w for w in recwarn.list if w.category is not DeprecationWarning] == []


def test_many_different_functions_do_not_disturb_each_other(pool):
    promises = [pool.promise(lambda a=i: a) for i in range(1000)]
    assert [p.value for p in promises] == list(range(1000))


def test_an_async_callable_runs_its_awaits(pool):
    async def several(n):
        return sum(await green.par(*(sleep_and_return(i) for i in range(n))))

    assert pool.doit(several, 5) == 10


@pytest.mark.guarantee("work-11")
def test_a_script_uses_functions_classes_and_data_of_its_main_by_reference():
    assert output_of("""
        import sys
        import polycephaly as poly

        table = {i: i * i for i in range(1000)}
        class Point:
            def __init__(self, x): self.x = x
            def __eq__(self, other): return type(other) is Point and other.x == self.x
        def look(i): return table[i]
        def moved(p): return Point(p.x + 1)

        with poly.Pool(2, engine=sys.argv[1]) as pool:
            print(pool.doit(look, 5), pool.doit(lambda i: table[i] + look(i), 6))
            p = pool.promise(moved, Point(1))
            print(p.value == Point(2), type(p.value) is Point, p.spans.bytes_sent < 200)
            print(pool.promise(lambda i: table[i], 3).value)
            print(isinstance(pool.doit("Point(9)"), Point))
    """, poly.engine) == "25 72\nTrue True True\n9\nTrue\n"  # fmt: skip


@pytest.mark.guarantee("work-11")
def test_what_a_script_defines_after_the_pool_goes_by_value():
    assert output_of("""
        import sys
        import polycephaly as poly
        old = "old"
        def shape(): return "first"
        with poly.Pool(1, engine=sys.argv[1]) as pool:
            def late(n): return helper(n) + 1
            def helper(n): return n * 10
            print(pool.doit(late, 2))
            def shape(): return "second"
            print(pool.doit(shape))
            class Late:
                n = 3
            print(pool.doit(lambda: Late.n), type(pool.doit(Late)).__name__)
            factor = 7
            print(pool.doit(lambda: factor))
            factor = 8
            print(pool.doit(lambda: factor))
            old = "new"
            print(pool.doit(lambda: old))
            def helper(n): return n * 100
            print(pool.doit(late, 2))
    """, poly.engine) == "21\nsecond\n3 Late\n7\n8\nnew\n201\n"  # fmt: skip


def test_a_cached_function_of_a_script_goes_by_reference_until_it_is_made_anew():
    assert (
        output_of("""
        import functools
        import polycephaly as poly

        @functools.cache
        def square(n):
            return n * n

        square(3)
        with poly.Pool(1) as pool:
            print(pool.doit(lambda: square.cache_info().currsize))
            print(pool.doit(square, 3))

            @functools.cache
            def square(n):
                return -n * n

            @functools.cache
            def factorial(n):
                return n * factorial(n - 1) if n else 1

            print(
                pool.doit(square, 3), pool.doit(factorial, 5), list(pool.map(factorial, range(4)))
            )
    """)
        == "1\n9\n-9 120 [1, 1, 2, 6]\n"
    )


@pytest.mark.guarantee("work-11")
def test_globals_of_main_changed_in_place_after_the_snapshot():
    """By reference: the drone's own copy, as of the snapshot. Pushed: what was pushed."""
    assert output_of("""
        import sys
        import polycephaly as poly
        counts = {"n": 1}
        def look(): return counts["n"]
        with poly.Pool(1, engine=sys.argv[1]) as pool:
            counts["n"] = 2
            print(pool.doit(look))
            pool.drones[0].push({"counts": {"n": 5}})
            print(pool.doit(look), pool.doit(lambda: counts["n"]))
            print(pool.doit("counts['n'] += 1; counts['n']"), pool.doit(lambda: counts["n"]))
    """, poly.engine) == "1\n5 5\n6 6\n"  # fmt: skip


@local_only(NO_FORK)
def test_a_global_of_the_snapshot_is_found_by_whatever_by_value_function_names_it():
    assert (
        output_of("""
        import functools
        import polycephaly as poly
        table = [10, 20, 30]
        def apply(f, x): return f(x)
        def keep(f):
            @functools.wraps(f)
            def wrapper(*args): return f(*args)
            return wrapper
        with poly.Pool(1) as pool:
            late = keep(lambda i: table[i])
            class Late:
                def get(self, i): return table[i]
            print(pool.doit(lambda i: table[i], 0))
            print(pool.doit(apply, lambda i: table[i], 0))
            print(pool.doit(functools.partial(lambda i: table[i], 0)))
            print(pool.doit(late, 0), pool.doit(Late().get, 0))
            print(pool.doit(lambda: (lambda i: table[i]))(0))
            print(pool.doit(lambda fs: fs[0](1), [lambda i: table[i]]))
            shows = lambda: table[0]
            print(pool.doit(shows))
            pool.everywhere("table = [77]")[0].value
            print(pool.doit(shows))
    """)
        == "10\n10\n10\n10 10\n10\n20\n10\n77\n"
    )


@local_only(NO_FORK)
def test_a_name_of_another_module_that_main_has_too_shows_as_at_each_call(tmp_path):
    (tmp_path / "lib.py").write_text("config = {'a': 1}\ndef make(): return lambda: config['a']\n")
    assert (
        output_of(
            """
        import sys
        sys.path.insert(0, sys.argv[1])
        import lib
        from lib import config
        import polycephaly as poly
        with poly.Pool(1) as pool:
            f = lib.make()
            print(pool.doit(f))
            config["a"] = 2
            print(pool.doit(f))
    """,
            str(tmp_path),
        )
        == "1\n2\n"
    )


@local_only
def test_a_large_closure_is_forgotten_with_its_pool():
    table = os.urandom(300_000)
    gc.collect()
    gc.disable()
    before = _arenas()
    try:
        with poly.Pool(1) as pool:
            assert pool.doit(lambda i: table[i], 5) == table[5]
        wait_for(lambda: _arenas() == before)
    finally:
        gc.enable()


def _arenas():
    return sum("polycephaly-arena" in target for target in _links())


def _links():
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{fd}")


def test_a_class_of_this_image_stays_as_it_is_when_an_instance_comes_home():
    told = output_of("""
        import polycephaly as poly
        with poly.Pool(2) as pool:
            pool.doit("1")
            count = 0
            class Late:
                def tell(self):
                    global count
                    count += 1
                    return word()
            def word():
                return "old"
            late = Late()
            print(
                pool.doit(lambda it: (it.tell(), it)[0], late),
                type(pool.doit(lambda it: it, late)) is Late, count,
            )
            word = lambda: "new"
            print(late.tell(), count, pool.doit(lambda it: it.tell(), late))
            Late.more = lambda self: "more"
            print({each.result() for each in pool.everywhere(lambda it: it.more(), late)})
    """)
    assert told == "old True 0\nnew 1 new\n{'more'}\n"


def _captures(data):
    return lambda: len(data)


def _partial(data):
    return functools.partial(len, data)


def _recursive(data):
    def down(n=0):
        return len(data) if n else down(n + 1)

    return down


def _mutual(data):
    def one(n=2):
        return two(n - 1) if n else len(data)

    def two(n):
        return one(n)

    return functools.partial(one, 2)


def _with_a_namespace(data):
    namespace = {"data": data}
    exec("def g(): return len(data)\ndef f(g=g): return g()", namespace)
    return namespace["f"]


def _changing(data):
    return lambda data=[data]: len(data[0])


MAKERS = [_captures, _partial, _recursive, _mutual, _with_a_namespace, _changing]


@pytest.mark.parametrize("make", MAKERS)
def test_nothing_is_kept_of_a_function_that_nobody_has_any_more(make, pool):
    function = make(b"x" * 1000)
    assert [pool.promise(function).value for _ in range(3)] == [1000] * 3
    last = weakref.ref(function)
    del function
    gc.collect()
    pool.doit(abs, 1)  # what the pool's own threads had to do with it is over
    gc.collect()
    assert last() is None
    assert last not in [entry.function for entry in pool._dispatcher.registry._entries.values()]


@local_only
def test_a_drone_forgets_a_function_that_nobody_has_any_more():
    with poly.Pool(1) as pool:
        functions = [make(b"x" * 1000) for make in MAKERS]
        assert [pool.promise(function).value for function in functions] == [1000] * len(functions)
        assert pool.doit(loaded_functions) >= len(
            MAKERS
        )  # itself too, and the one that changes not any more
        del functions
        wait_for(lambda: pool.doit(loaded_functions) <= 1)  # itself
        assert not pool._dispatcher.handles[0]._defined.unused


@pytest.mark.parametrize("use", [_recursive, _with_a_namespace])
@pytest.mark.slow
def test_what_a_function_captures_is_told_from_what_has_the_same_address_later(use):
    book = FunctionRegistry(MainSnapshot(()), None)
    for n in range(100):  # the second function, or value, may lie where the first one lay
        function = use(b"x" * n)
        first = book.define(function)
        assert book.define(function) is first
        if use is _with_a_namespace:
            function.__globals__["data"] = b"y" * n
            function.__defaults__ = (lambda n=n: n,)
        else:
            cell = function.__closure__[function.__code__.co_freevars.index("data")]
            cell.cell_contents = b"y" * 1000
            assert book.define(function) is not first
            cell.cell_contents = lambda n=n: n
        assert book.define(function) is not first


@local_only
def test_a_captured_object_that_changes_in_place_is_pickled_at_each_call():
    class Length(float):
        pass

    book, module, length = FunctionRegistry(MainSnapshot(()), None), ModuleType("made"), Length(2)
    for captured in (module, length, functools.partial(int, length)):
        function = lambda captured=captured: captured  # noqa: E731
        assert book.define(function) is not book.define(function)
    for captured in (os, 2.0, functools.partial(int, 2.0)):
        function = lambda captured=captured: captured  # noqa: E731
        assert book.define(function) is book.define(function)


def test_a_weak_reference_in_main_is_a_value_like_others(monkeypatch):
    class Thing:
        pass

    thing = Thing()
    monkeypatch.setattr(sys.modules["__main__"], "weakly", weakref.ref(thing), raising=False)
    snapshot = MainSnapshot()
    assert snapshot.is_current()
    assert snapshot.unchanged("weakly", sys.modules["__main__"].weakly)


class Alarm(Exception):
    pass


def on_alarm(signum, frame):
    raise Alarm


def on_alarm_with_any_arguments(*args):
    raise Alarm


def on_last_alarm(signum, frame):
    signal.signal(signum, signal.SIG_DFL)
    on_alarm(signum, frame)


class Interrupted:
    """A signal comes while it is pickled for the first time."""

    def __init__(self):
        self.is_first = True

    def __reduce__(self):
        if self.is_first:
            self.is_first = False
            signal.raise_signal(signal.SIGUSR1)
        return int, ()


def inputs_of_which_one_is_interrupted():
    yield 0
    signal.raise_signal(signal.SIGUSR1)


def capture_interrupted():
    interrupted = Interrupted()
    return lambda: interrupted


@pytest.fixture(params=[on_alarm, on_alarm_with_any_arguments, on_last_alarm])
def alarm(request):
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.submit(abs, Interrupted()),
        lambda pool: pool.submit(abs, number=Interrupted()),
        lambda pool: pool.submit(capture_interrupted()),
        lambda pool: pool.promise(abs, [Interrupted(), bytes(1 << 20)]),
        lambda pool: next(pool.map(abs, [Interrupted()])),
        lambda pool: list(pool.map(abs, inputs_of_which_one_is_interrupted())),
    ],
)
def test_an_error_of_a_signal_handler_is_raised_at_the_call_and_is_not_the_calls_own(
    pool, alarm, call
):
    with pytest.raises(Alarm) as raised:
        call(pool)
    # CPython's pickler adds notes of its own, from 3.14 on.
    assert "while pickling" not in str(getattr(raised.value, "__notes__", ""))
    assert pool.submit(abs, -1).result() == 1


def test_an_interrupt_while_a_call_of_a_map_is_defined_leaves_the_pool(pool):
    class InterruptedTheSecondTime:  # the first time is when `map` is called
        times = 0

        def __reduce__(self):
            self.times += 1
            if self.times == 2:
                raise KeyboardInterrupt
            return int, ()

    kept, captured = pool.promise(list, keep=True).result(), InterruptedTheSecondTime()
    with pytest.raises(KeyboardInterrupt):
        list(pool.map(lambda item: (kept, captured, item), [0]))
    assert pool.submit(abs, -1).result() == 1


def test_an_error_of_the_same_kind_that_an_argument_raises_is_the_calls_own(pool, alarm):
    class Wrong:
        def __reduce__(self):
            raise Alarm

    assert isinstance(pool.submit(abs, Wrong()).exception(), Alarm)
