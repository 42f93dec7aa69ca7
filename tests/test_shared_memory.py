"""Large values: they arrive as they were sent, nobody sees what others write, and their memory
comes back."""

import array
import contextlib
import dataclasses
import datetime
import decimal
import errno
import functools
import gc
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from faults import append, hold_until, kill_myself, lines, wait_for
from scripts import Script, output_of, run_script
from work import arguments, echo

import polycephaly as poly
from polycephaly.memory import arena as arena_module
from polycephaly.memory import blocks as store_module
from polycephaly.pool.interfaces import State

MARK = 64 * 1024  # from here on a buffer goes through shared memory


CHARACTERS = "w" if sys.version_info >= (3, 13) else "u"


# -- what is sent, and when it is the same ---------------------------------------------------------


class Frame:
    """A user's own class with a buffer that goes beside its pickle."""

    def __init__(self, content, name="frame"):
        self.content = bytearray(content)
        self.name = name

    @classmethod
    def rebuilt(cls, content, name):
        made = cls.__new__(cls)
        made.content, made.name = content, name
        return made

    def __reduce_ex__(self, protocol):
        if protocol >= 5:
            return self.rebuilt, (pickle.PickleBuffer(self.content), self.name)
        return self.rebuilt, (bytearray(self.content), self.name)

    def __eq__(self, other):
        return (
            type(other) is Frame
            and other.name == self.name
            and bytes(other.content) == bytes(self.content)
        )

    __hash__ = None


class MyBytes(bytes):
    pass


class MyBytearray(bytearray):
    pass


class MyArray(np.ndarray):
    def __reduce__(self):
        rebuild, args, state = super().__reduce__()
        return rebuild, args, (state, self.unit)

    def __setstate__(self, state):
        state, self.unit = state
        super().__setstate__(state)


@dataclasses.dataclass
class Experiment:
    name: str
    values: np.ndarray
    raw: bytes


def my_array(size):
    made = numbers(size).view(MyArray)
    made.unit = "m/s"
    return made


def numbers(size, dtype=np.float64, seed=1):
    dtype = np.dtype(dtype)
    many = -(-size // dtype.itemsize)
    return (
        np.frombuffer(random.Random(seed).randbytes(many * dtype.itemsize), np.uint8)
        .view(dtype)
        .copy()
    )


def square(size, order="C"):
    side = max(2, int((size / 8) ** 0.5) + 1)
    return np.array(np.arange(side * side, dtype=np.float64).reshape(side, side), order=order)


def read_only(made):
    made.flags.writeable = False
    return made


def mapped(size):
    with open(np._core._multiarray_umath.__file__, "rb") as file:
        return np.memmap(file, dtype=np.uint8, mode="r", shape=(size,), offset=4096)


def structured(size):
    dtype = np.dtype([("id", "<i4"), ("name", "U5"), ("at", "M8[s]"), ("w", "f8", (2,))])
    made = np.zeros(size // dtype.itemsize + 1, dtype)
    made["id"] = np.arange(len(made))
    made["name"] = "äöü"
    made["at"] = np.datetime64("2026-01-01") + made["id"]
    made["w"] = 1.5
    return made


def objects(size):
    made = np.empty(size // 8 + 1, object)
    made[:] = [{"i": i} if i % 3 else None for i in range(len(made))]
    made[0] = made[1] if len(made) > 1 else "one"
    return made


def masked(size):
    values = np.ma.masked_array(np.arange(size // 8 + 1, dtype=float), fill_value=-1.0)
    values[::3] = np.ma.masked
    return values


def nested(size):
    a, raw = numbers(size), numbers(size, np.uint8).tobytes()
    return {
        "list": [a, raw, [a.reshape(-1)[::-1]]],
        "tuple": (a[::2], bytearray(raw)),
        "data": Experiment("one", a.reshape(1, -1), raw),
        3: {4: a[: len(a) // 2].copy()},
    }


ARRAYS = {
    "float64": numbers,
    "bool": lambda n: numbers(n, np.uint8) > 100,
    "complex": lambda n: np.arange(n // 16 + 1) * (1 + 2j),
    "float16": lambda n: np.arange(n // 2 + 1, dtype=np.float16),
    "datetime": lambda n: np.datetime64("1999-01-01", "ns") + np.arange(n // 8 + 1),
    "timedelta": lambda n: np.arange(n // 8 + 1).astype("m8[D]"),
    "unicode": lambda n: np.array([f"ü{i}" for i in range(n // 28 + 1)], "U7"),
    "fixed bytes": lambda n: np.array([b"%06d" % i for i in range(n // 7 + 1)], "S7"),
    "void": lambda n: numbers(n, "V3"),
    "big-endian": lambda n: np.arange(n // 4 + 1, dtype=">i4"),
    "big-endian float": lambda n: np.arange(n // 8 + 1, dtype=">f8"),
    "structured": structured,
    "record": lambda n: structured(n).view(np.recarray),
    "object": objects,
    "masked": masked,
    "subclass": my_array,
    "memory-mapped": mapped,
    "memory-mapped, every third": lambda n: mapped(3 * n)[::3],
    "fortran": lambda n: square(n, "F"),
    "transposed": lambda n: square(n).T,
    "three axes, turned": lambda n: (
        np.arange(4 * 5 * (n // 160 + 1)).reshape(4, 5, -1).transpose(2, 0, 1)
    ),
    "every third": lambda n: numbers(3 * n)[::3],
    "backwards": lambda n: numbers(n)[::-1],
    "negative strides": lambda n: square(n)[::-1, ::-1],
    "columns": lambda n: square(4 * n)[:, 1::2],
    "broadcast": lambda n: np.broadcast_to(np.arange(16.0), (n // 128 + 1, 16)),
    "read-only": lambda n: read_only(numbers(n)),
    "read-only fortran": lambda n: read_only(square(n, "F")),
    "zero length": lambda n: np.zeros(0),
    "zero length, big other axis": lambda n: np.zeros((0, n)),
    "zero length, fortran": lambda n: np.zeros((n, 0, 3), order="F"),
    "zero length slice": lambda n: numbers(n)[3:3],
    "no axes": lambda n: np.array(3.5),
    "scalar": lambda n: np.float32(1.25),
    "scalar of a structure": lambda n: structured(n)[0],
    "wide scalar": lambda n: np.array(["x" * (n // 4 + 1)])[0],
    "odd offset": lambda n: numbers(n + 3, np.uint8)[3:],
    "nested": nested,
}

OTHERS = {
    "bytes": lambda n: numbers(n, np.uint8).tobytes(),
    "bytes subclass": lambda n: MyBytes(numbers(n, np.uint8).tobytes()),
    "bytearray": lambda n: bytearray(numbers(n, np.uint8)),
    "bytearray subclass": lambda n: MyBytearray(numbers(n, np.uint8)),
    "str": lambda n: "äß€𝄞" * (n // 12 + 1),
    "str that says __main__": lambda n: "__main__" + "x" * n,
    "large int": lambda n: int.from_bytes(numbers(n, np.uint8).tobytes(), "little") << 3,
    "list of numbers": lambda n: list(range(n // 4)),
    "memoryview": lambda n: memoryview(bytearray(numbers(n, np.uint8))),
    "memoryview of bytes": lambda n: memoryview(numbers(n, np.uint8).tobytes()),
    "read-only memoryview": lambda n: memoryview(bytearray(numbers(n, np.uint8))).toreadonly(),
    "cast memoryview": lambda n: memoryview(bytearray(numbers(n, np.int32).tobytes())).cast("i"),
    "two axes": lambda n: memoryview(bytearray(numbers(16 * (n // 16 + 1)))).cast(
        "d", (2, n // 16 + 1)
    ),
    "memoryview of fortran": lambda n: memoryview(square(n, "F")),
    "memoryview backwards": lambda n: memoryview(bytearray(numbers(n, np.uint8)))[::-1],
    "memoryview in steps": lambda n: memoryview(numbers(3 * n))[::3],
    "part of a memoryview": lambda n: memoryview(numbers(n + 10, np.uint8))[5:-5],
    "empty memoryview": lambda n: memoryview(b""),
    "array.array": lambda n: array.array("d", range(n // 8 + 1)),
    "array.array of characters": lambda n: array.array(CHARACTERS, "xyß" * (n // 12 + 1)),
    "array.array, empty": lambda n: array.array("i"),
    "own class": lambda n: Frame(numbers(n, np.uint8)),
    "own classes": lambda n: [Frame(numbers(n, np.uint8, seed), str(seed)) for seed in range(3)],
    "BytesIO": lambda n: io.BytesIO(numbers(n, np.uint8).tobytes()),
    "plain things": lambda n: [
        decimal.Decimal("1.5"),
        datetime.date(2026, 1, 1),
        {1, 2},
        range(n),
        None,
    ],
}

CASES = ARRAYS | OTHERS


def differs(got, sent):
    """What is different, or nothing."""
    if type(got) is not type(sent):
        return f"{type(got)} for {type(sent)}"
    if isinstance(sent, np.ndarray):
        return array_differs(got, sent)
    if isinstance(sent, memoryview):
        for what in ("format", "shape"):
            if getattr(got, what) != getattr(sent, what):
                return f"{what} {getattr(got, what)} for {getattr(sent, what)}"
        return "" if got.tobytes() == sent.tobytes() else "other content"
    if isinstance(sent, Experiment):
        return differs(vars(got), vars(sent))
    if isinstance(sent, (list, tuple)):
        if len(got) != len(sent):
            return f"length {len(got)} for {len(sent)}"
        return next(filter(None, map(differs, got, sent)), "")
    if isinstance(sent, dict):
        return differs(list(got), list(sent)) or differs(list(got.values()), list(sent.values()))
    if isinstance(sent, io.BytesIO):
        got, sent = got.getvalue(), sent.getvalue()
    return "" if got == sent else "other content"


def array_differs(got, sent):
    if (got.dtype, got.shape) != (sent.dtype, sent.shape):
        return f"{got.dtype}, {got.shape} for {sent.dtype}, {sent.shape}"
    if isinstance(sent, np.ma.MaskedArray):
        if got.fill_value != sent.fill_value:
            return "another fill value"
        return differs(np.array(got.mask), np.array(sent.mask)) or differs(
            np.array(got.data), np.array(sent.data)
        )
    if isinstance(sent, MyArray) and got.unit != sent.unit:
        return "another unit"
    if sent.dtype.hasobject:
        return "" if got.tolist() == sent.tolist() else "other content"
    return "" if got.tobytes() == sent.tobytes() else "other content"


def flags(it):
    return it.flags.c_contiguous, it.flags.f_contiguous, it.flags.writeable, it.flags.aligned


def make(name, size):
    return CASES[name](size)


def check(name, size, got):
    return differs(got, CASES[name](size)), flags(got) if isinstance(got, np.ndarray) else None


def full(value, size=200_000):
    return np.full(size // 8, float(value))


def is_full(it, value):
    return bool((np.asarray(it) == value).all())


# -- pools -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def pool_with_ceiling(ceiling, drones=1, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polycephaly.engines.local.engine.shared_memory_ceiling", lambda: ceiling)
        pool = poly.Pool(drones, **options)
    with pool:
        yield pool


@pytest.fixture(scope="module", params=["shared memory", "sockets"])
def way(request):
    """A pool with room in shared memory, and one with none at all."""
    if request.param == "shared memory":
        with poly.Pool(1) as pool:
            pool.doit(
                echo, 1 << 3_000_000
            )  # a large int goes through the socket: it is open before any census
            yield pool
            assert not arena_of(pool)._warned
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with pool_with_ceiling(0) as pool:
                pool.doit(echo, bytes(10 * MARK))  # opens the socket before any census
                yield pool
                assert arena_of(pool).used() == 0


def arena_of(pool):
    return pool._dispatcher.supervisor.engine._arena


def used(pool):
    return arena_of(pool).used()


def nothing_is_used(pool):
    gc.collect()
    wait_for(lambda: used(pool) == 0)


# -- equal to what was sent ------------------------------------------------------------------------


@pytest.mark.guarantee("work-13")
@pytest.mark.parametrize("size", [400, 300_000], ids=["small", "large"])
@pytest.mark.parametrize("name", CASES)
def test_it_arrives_equal_to_what_was_sent(way, name, size):
    sent = make(name, size)
    different, its_flags = way.doit(check, name, size, sent)
    assert not different
    got = way.doit(make, name, size)
    assert not differs(got, sent)
    assert not differs(way.doit(echo, sent), sent)
    assert not differs(way.doit(echo, [{"it": (sent,)}])[0]["it"][0], sent)
    if isinstance(sent, np.ndarray):
        assert its_flags == flags(got) == flags(pickle.loads(pickle.dumps(sent, 5)))


AROUND = [
    size + d for size in (32 << 10, 48 << 10, MARK, 256 << 10, 1 << 20, 4 << 20) for d in (-1, 0, 1)
]


@pytest.mark.parametrize("kind", [bytes, bytearray, np.array], ids=["bytes", "bytearray", "array"])
def test_sizes_around_every_mark(way, kind):
    content = random.Random(7).randbytes((4 << 20) + 1)
    pages = [4095, 4096, 4097, 17 * 4096 - 1, 17 * 4096, 17 * 4096 + 1]
    for size in AROUND + pages:
        part = content[-size:]
        sent = np.frombuffer(part, np.uint8).copy() if kind is np.array else kind(part)
        got = way.doit(echo, sent)
        assert not differs(got, sent), size
        if kind is not bytes:
            got[0] ^= 255
            got[-1] ^= 255
            assert bytes(sent) == part


@pytest.mark.slow
def test_some_hundred_megabytes():
    sent = np.arange(25_000_000, dtype=np.float64)
    with poly.Pool(1) as pool:
        assert pool.doit(
            lambda it: (it.size, it[0], it[-1], bool((np.diff(it) == 1).all())), sent
        ) == (
            25_000_000, 0.0, 24_999_999.0, True
        )  # fmt: skip
        got = pool.doit(lambda: np.arange(25_000_000, dtype=np.float64))
        assert np.array_equal(got, sent)


def test_a_data_frame(way):
    pandas = pytest.importorskip("pandas")
    for rows in (5, 50_000):
        sent = pandas.DataFrame(
            {
                "n": np.arange(rows),
                "x": np.linspace(0, 1, rows),
                "s": [f"s{i}" for i in range(rows)],
                "c": pandas.Categorical(["ab"[i % 2] for i in range(rows)]),
                "t": pandas.date_range("2026-01-01", periods=rows, freq="s", tz="Europe/Berlin"),
            },
            index=pandas.Index([f"i{i}" for i in range(rows)], name="key"),
        )
        pandas.testing.assert_frame_equal(way.doit(echo, sent), sent)
        pandas.testing.assert_series_equal(way.doit(echo, sent["x"][::2]), sent["x"][::2])
        changed = way.doit(lambda it: it.assign(x=it["x"] + 1), sent)
        pandas.testing.assert_frame_equal(changed, sent.assign(x=sent["x"] + 1))


def test_an_arrow_table(way):
    pyarrow = pytest.importorskip("pyarrow")
    sent = pyarrow.table({"n": list(range(50_000)), "s": [f"s{i}" for i in range(50_000)]})
    assert way.doit(echo, sent).equals(sent)


def test_what_is_not_contiguous_in_a_memoryview_can_be_written_into_as_well(way):
    for size in (100, 300_000):
        content = bytearray(size)
        for sent in (memoryview(content)[::-1], memoryview(square(size, "F"))):
            got = way.doit(echo, sent)
            assert got.tobytes() == sent.tobytes() and not got.readonly


def test_a_memoryview_of_nothing_keeps_its_shape(way):
    for shape in ((0, 3), (2, 0), (0,)):
        sent = memoryview(np.zeros(shape))
        got = way.doit(echo, sent)
        assert got.shape == shape and got == sent


def test_a_read_only_memoryview_stays_read_only(way):
    for size in (100, 300_000):
        for sent in (memoryview(bytes(size)), memoryview(bytearray(size)).toreadonly()):
            assert way.doit(echo, sent).readonly
        assert not way.doit(echo, memoryview(bytearray(size))).readonly


def test_a_memoryview_that_cannot_be_rebuilt_is_an_error_that_says_so(way):
    with pytest.raises(TypeError, match="cast it to bytes"):
        way.doit(echo, memoryview(np.ones(MARK, ">i4")))
    assert way.doit(echo, 1) == 1


def test_one_array_twice_in_an_argument_is_one_array(way):
    for size in (400, 300_000):
        a = full(1, size)
        same = way.doit(
            lambda x, y, z: (x[0] is x[1], x[0] is z["k"], y is x[0]), [a, a], a, z={"k": a}
        )
        assert same == (True, True, True)
        got = way.doit(lambda: [it := full(2, 300_000), it, {"it": it}])
        assert got[0] is got[1] is got[2]["it"]
        raw = bytearray(size)
        x, y = way.doit(echo, (raw, raw))
        assert x is y


def test_two_views_of_one_array_arrive_equal(way):
    a = np.arange(100_000)
    left, right = way.doit(echo, (a[:60_000], a[40_000:]))
    assert np.array_equal(left, a[:60_000]) and np.array_equal(right, a[40_000:])
    left[:] = -1
    assert right[0] == 40_000


def captured(a):
    return lambda factor: a * factor


def test_captured_by_a_function_as_a_default_in_a_partial_and_by_keyword(way):
    for size in (400, 300_000):
        a = numbers(size, np.int32)
        assert not differs(way.doit(captured(a), 3), a * 3)
        assert not differs(way.doit(lambda it=a: it), a)
        assert not differs(way.doit(functools.partial(echo, a)), a)
        assert not differs(
            way.doit(functools.partial(arguments, a, k=a), 1, z=a[::2]),
            ((a, 1), {"k": a, "z": a[::2]}),
        )
        assert not differs(way.doit(Experiment("e", a, b"").values.tolist), a.tolist())


def test_a_function_that_captured_an_array_is_as_it_was_at_each_call(way):
    a = full(1)
    function = captured(a)
    assert is_full(way.doit(function, 1), 1)
    a[:] = 2
    assert is_full(way.doit(function, 1), 2)


def test_by_way_of_promises_that_are_arguments(way):
    a = numbers(300_000, np.int32)
    first = way.promise(echo, a)
    assert not differs(way.doit(arguments, first, 1, k=first), ((a, 1), {"k": a}))
    assert not differs(
        way.doit(arguments, first, way.promise(make, "nested", 300_000))[0][1],
        make("nested", 300_000),
    )


def test_items_and_results_of_map(way):
    sent = [full(i, 70_000 + 8 * i) if i % 3 else float(i) for i in range(60)]
    got = list(way.map(echo, sent))
    assert not differs(got, sent)
    assert sorted(float(np.max(it)) for it in way.map(echo, sent, ordered=False)) == list(range(60))
    pairs = list(way.map(lambda a, b: (b, a, b), sent, reversed(sent)))
    for got, x, y in zip(pairs, sent, reversed(sent), strict=True):
        assert not differs(got, (y, x, y))


def add_up_to(a, value):
    a += value
    return a


def test_calls_of_one_map_share_no_array(way):
    a = full(1, 100_000)
    for got in list(way.map(add_up_to, [a] * 50, [1] * 50)):
        assert is_full(got, 2)
    way.doit(drop_kept)
    got = list(way.map(add_to_what_is_there, range(50)))
    assert all(is_full(each, each[0]) for each in got)
    assert sorted(each[0] for each in got) == list(range(1, 51))  # they may be run in another order
    way.doit(drop_kept)


def add_to_what_is_there(_):
    it = KEPT.setdefault("map", full(0, 100_000))
    it += 1
    return it


def test_values_of_code_strings_and_names_of_a_drone():
    a = numbers(300_000, np.int32)
    with poly.Drone() as drone:
        assert np.array_equal(drone.doit("import numpy; numpy.arange(100_000)"), np.arange(100_000))
        drone["a"] = a
        assert not differs(drone["a"], a)
        drone.push({"b": a[::2], "c": a.tobytes()})
        assert not differs(drone.pull("a", "b", "c"), (a, a[::2], a.tobytes()))
        drone.doit("a[:] = 0")
        assert not drone["a"].any() and a.any()


def fail_with(a):
    raise ValueError("no", a, {"a": a})


def test_errors_that_carry_arrays_and_no_false_alarm():
    a = numbers(300_000, np.int32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with poly.Pool(1) as pool:
            error = pool.promise(fail_with, a).exception()
            assert type(error) is ValueError
            assert not differs(error.args, ("no", a, {"a": a}))
            assert is_full(pool.doit(full, 3), 3)
    assert not [each for each in said if each.category is RuntimeWarning]


def fail_with_every_second(a):
    raise ValueError("no", a[::2], a)


def test_errors_that_carry_arrays_that_are_not_contiguous(way):
    for size in (400, 300_000):
        a = numbers(size, np.int32)
        error = way.promise(fail_with_every_second, a).exception()
        assert type(error) is ValueError
        assert not differs(error.args, ("no", a[::2], a))


def test_what_is_printed_meanwhile_arrives():
    printed = []
    with poly.Pool(1, output=printed.append) as pool:
        for i in range(20):
            pool.doit(lambda a, i: (print(f"line {i}"), a * 2)[1], full(i), i)
    assert [line.text for line in printed] == [f"line {i}" for i in range(20)]


def test_an_int_beside_what_came_after_the_snapshot():
    assert output_of("""
        import polycephaly as poly
        with poly.Pool(1) as pool:
            class Later:
                x = 3
            for bits in (300, 200_000, 3_000_000):
                it, number = pool.doit(lambda a: (a[0].x, a[1]), (Later(), 1 << bits))
                print(it, number == 1 << bits)
            raw = bytes(300_000)
            print(pool.doit(lambda a: (a[0].x, len(a[1])), (Later(), raw)))
    """) == "3 True\n3 True\n3 True\n(3, 300000)\n"  # fmt: skip


def test_a_spawned_image_shares_as_well():
    assert output_of("""
        import numpy as np, polycephaly as poly
        def twice(a):
            a *= 2
            return a
        if __name__ == "__main__":
            a = np.ones(100_000)
            with poly.Pool(1, start="spawn") as pool:
                pool.doit(abs, -1)
                shared = pool.share(a)
                print(
                    pool.doit(twice, a).sum(), pool.doit(twice, shared).sum(),
                    a.sum(), shared.value.sum(),
                )
                print(pool._dispatcher.supervisor.engine._arena.used() > 0)
    """) == "200000.0 200000.0 100000.0 100000.0\nTrue\n"  # fmt: skip


# -- what is written -------------------------------------------------------------------------------

KEPT = {}


def keep(name, a):
    KEPT[name] = a
    return float(a[0])


def keep_and_fill(name, a, value):
    KEPT[name] = a
    before = float(a.sum() / len(a))
    a[:] = value
    return before


def kept(name):
    return KEPT[name]


def kept_is_full(name, value):
    return is_full(KEPT[name], value)


def drop_kept():
    KEPT.clear()
    gc.collect()


@contextlib.contextmanager
def two_drones(**options):
    with poly.Pool(2, **options) as pool:
        yield (pool, *pool.drones)


@pytest.mark.guarantee("work-13")
def test_what_a_drone_writes_into_an_argument_is_its_alone():
    a = full(1)
    with two_drones() as (_pool, one, two):
        assert one.doit(keep_and_fill, "a", a, 9) == 1
        assert is_full(a, 1)
        assert two.doit(keep_and_fill, "a", a, 8) == 1
        assert one.doit(kept_is_full, "a", 9) and two.doit(kept_is_full, "a", 8) and is_full(a, 1)


def test_what_a_drone_writes_into_what_a_function_captured_is_that_calls_alone():
    a = full(1)

    def fill(value):
        return keep_and_fill("a", a, value)

    with two_drones() as (_pool, one, two):
        assert one.doit(fill, 9) == 1
        assert two.doit(fill, 8) == 1
        assert one.doit(fill, 7) == 1
        assert two.doit(kept_is_full, "a", 8) and is_full(a, 1)


def test_what_is_written_after_the_call_is_not_in_it(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    a, raw = full(1), bytearray(b"1" * 300_000)
    with poly.Pool(1) as pool:
        blocking = pool.promise(hold_until, gate, started)
        waiting = [pool.promise(echo, it) for it in (a, raw, [a], {"k": (a, raw)})]
        wait_for(lambda: lines(started))
        a[:] = 2
        raw[:] = b"2" * 300_000
        append(gate, "open")
        one, two, three, four = (each.result(60) for each in waiting)
        assert is_full(one, 1) and is_full(three[0], 1) and is_full(four["k"][0], 1)
        assert two == four["k"][1] == b"1" * 300_000
        assert blocking.value == "held"


@pytest.mark.guarantee("work-14")
def test_what_a_drone_has_stays_while_the_same_memory_is_used_again_and_again():
    a = full(1)
    with poly.Pool(1) as pool:
        assert pool.doit(keep, "a", a) == 1
        a[:] = 2
        pool.doit(keep, "b", a[: len(a) // 2])
        for i in range(60):
            pool.doit(len, full(100 + i))
            pool.doit(full, 200 + i)
        assert pool.doit(kept_is_full, "a", 1) and pool.doit(kept_is_full, "b", 2)


@pytest.mark.guarantee("work-13")
@pytest.mark.parametrize("size", [200_000, 3_000_000])
def test_results_stay_as_they_are_and_can_be_written_into(size):
    with poly.Pool(1) as pool:
        held = {}
        for i in range(80):
            got = pool.doit(full, i, size)
            assert is_full(got, i)
            if i % 7 == 0:
                held[i] = got
                if i % 2:
                    got[:] = held[i][0] + 0.5
            elif i % 7 == 3:
                held.pop(i - 3 if i % 3 else i - 10, None)
        for i, got in held.items():
            assert is_full(got, i + 0.5 if i % 2 else i)


def test_what_a_drone_keeps_and_sends_twice():
    with poly.Pool(1) as pool:
        pool.doit(keep, "a", full(1))
        one = pool.doit(kept, "a")
        one[:] = 5
        two = pool.doit(kept, "a")
        pool.doit(add_up_to_kept, 10)
        three = pool.doit(kept, "a")
        assert is_full(one, 5) and is_full(two, 1) and is_full(three, 11)


def add_up_to_kept(value):
    KEPT["a"] += value


def test_there_and_back_and_there_again():
    a = np.zeros(30_000)
    with poly.Pool(2) as pool:
        for i in range(30):
            previous, a = a, pool.doit(add_up_to, a, 1)
            assert is_full(a, i + 1) and is_full(previous, i)


# -- given back ------------------------------------------------------------------------------------


def test_memory_is_given_back_when_nobody_looks_any_more(impatient):
    a = full(1, 1_000_000)
    with poly.Pool(2) as pool:
        got = pool.doit(echo, a)
        assert used(pool) >= a.nbytes
        assert is_full(got, 1)
        del got
        nothing_is_used(pool)
        for i in range(20):  # and all of it works once more
            assert is_full(pool.doit(echo, full(i, 1_000_000)), i)
        nothing_is_used(pool)


def test_memory_is_given_back_by_a_drone_that_has_small_tasks_all_the_time(impatient):
    with poly.Pool(1, output="discard") as pool:
        assert len(pool.doit(np.ones, 100_000)) == 100_000
        wait_for(lambda: pool.doit(abs, -1) and used(pool) == 0)


def test_a_drone_that_keeps_an_argument_keeps_its_memory_and_no_more(impatient):
    a = full(1, 1_000_000)
    with poly.Pool(1) as pool:
        pool.doit(keep, "a", a)
        pool.doit(keep, "part", full(2, 1_000_000)[:9000].copy())
        for _ in range(5):
            pool.doit(echo, full(3, 1_000_000))
        wait_for(lambda: used(pool) <= a.nbytes + 80_000)
        assert used(pool) >= a.nbytes
        assert pool.doit(kept_is_full, "a", 1) and pool.doit(kept_is_full, "part", 2)
        pool.doit(drop_kept)
        nothing_is_used(pool)


VIEWS = {
    "slice": lambda a: a[1000:2000],
    "slice of a slice": lambda a: a[1000:][::7][:50],
    "reshaped": lambda a: a.reshape(5, -1).T,
    "memoryview": memoryview,
    "part of a memoryview": lambda a: memoryview(a)[10:20],
    "field": lambda a: a.view([("x", "f8")])["x"],
    "iterator": lambda a: iter(a),
    "flat": lambda a: a.flat,
    "row": lambda a: a.reshape(-1, 5)[1],
    "cast twice": lambda a: memoryview(a).cast("B").cast("d"),
    "frombuffer": lambda a: np.frombuffer(a, dtype=float),
    "pickle buffer": pickle.PickleBuffer,
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.slow
def test_any_view_of_a_view_keeps_it(kind):
    with poly.Pool(1) as pool:
        views = [VIEWS[kind](pool.doit(full, i)) for i in range(10)]
        gc.collect()
        for i in range(30):
            pool.doit(full, 100 + i)
        for i, view in enumerate(views):
            assert is_full(list(view) if kind == "iterator" else view, i)
        del view, views
        gc.collect()
        wait_for(lambda: not any(handle.ref_table.returned for handle in pool._dispatcher.handles))
        assert not live_keeps(pool)


def live_keeps(pool):
    """What this image has or looks at in the pool's arena."""
    return [key for key in arena_of(pool).range_refs if key]


def test_of_many_arrays_in_one_value_one_keeps_all_and_the_last_lets_go(impatient):
    with poly.Pool(1) as pool:
        first, *rest = pool.doit(lambda: [np.full(50_000, float(i)) for i in range(5)])
        del rest
        gc.collect()
        for i in range(20):
            pool.doit(full, i, 2_000_000)
        assert is_full(first, 0)
        del first
        nothing_is_used(pool)


@pytest.mark.guarantee("work-15")
def test_results_that_nobody_takes_are_given_back(impatient):
    with poly.Pool(2) as pool:
        promises = [pool.promise(full, i) for i in range(50)]
        assert is_full(promises[7].value, 7)
        promises.clear()
        rows = pool.map(full, range(30))
        assert is_full(next(rows), 0)
        rows.close()
        del rows
        nothing_is_used(pool)


def test_arguments_of_work_that_is_never_done_are_given_back(impatient, tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(1) as pool:
        running = pool.promise(hold_until, gate, started)
        wait_for(lambda: lines(started))
        waiting = [pool.promise(echo, full(i)) for i in range(10)]
        assert used(pool) >= 10 * 200_000
        assert all(each.cancel() for each in waiting)
        waiting.clear()
        append(gate, "open")
        assert running.value == "held"
        assert pool.doit(len, full(1)) == 25_000
        nothing_is_used(pool)


def test_what_cannot_be_pickled_leaves_nothing(impatient, pool):
    for _ in range(5):
        with pytest.raises(TypeError):
            pool.doit(echo, [full(1), threading.Lock()])
        with pytest.raises(TypeError):
            pool.doit(lambda: [full(1), threading.Lock()])
    nothing_is_used(pool)


@pytest.mark.guarantee("work-14")
def test_an_array_outlives_the_pool():
    with poly.Pool(1) as pool:
        a, b = pool.doit(full, 1), pool.doit(full, 2)
        pool.doit(full, 3, 5_000_000)
        arena = arena_of(pool)
    assert arena.used() <= 2 * 204_800
    assert is_full(a, 1) and is_full(b, 2)
    a[:] = 5
    part = a[5:10]
    del a
    with poly.Pool(1) as other:
        assert not differs(other.doit(echo, part), np.full(5, 5.0)) and is_full(
            other.doit(echo, b), 2
        )
    gc.collect()
    assert arena._open_fds
    del b
    gc.collect()
    assert is_full(part, 5) and arena._open_fds and arena.used() <= 204_800
    del part
    gc.collect()
    assert not arena._open_fds


def test_an_array_outlives_a_pool_that_is_broken_off():
    with pytest.raises(ZeroDivisionError), poly.Pool(1) as pool:
        a = pool.doit(full, 1)
        pool.promise(echo, full(2))
        raise ZeroDivisionError
    assert is_full(a, 1)


def gone_with(pid):
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


@pytest.mark.guarantee("work-14")
def test_an_array_outlives_the_drone_that_made_it_and_its_successor(impatient, pool):
    results = []
    for i in range(4):
        drone = pool.drones[0]
        results.append(drone.doit(full, i))
        pid = drone.pid
        if i % 2:
            os.kill(pid, signal.SIGKILL)
        else:
            drone.kill()
        wait_for(lambda drone=drone: not drone.alive and len(pool.drones) == 2)
    for _ in range(20):
        pool.doit(full, 100)
    for i, got in enumerate(results):
        assert is_full(got, i)
    wait_for(lambda: used(pool) <= 4 * 204_800)
    assert used(pool) >= 4 * 200_000
    del got
    while results:
        results.pop()
        wait_for(lambda: used(pool) <= len(results) * 204_800)
        for i, got in enumerate(results):
            assert is_full(got, i)
        got = None
    nothing_is_used(pool)


def test_an_array_outlives_refresh(impatient):
    with poly.Pool(1) as pool:
        a = pool.doit(full, 1)
        shared = pool.share(full(2))
        for i in range(3):
            pool.refresh()
            for _ in range(10):
                pool.doit(full, 100 + i)
            assert (
                is_full(a, 1) and pool.doit(is_full, shared, 2) and is_full(pool.doit(echo, a), 1)
            )


def test_arguments_of_a_drone_that_dies_are_free_and_those_of_others_not(impatient, pool):
    one, two = pool.drones
    two.doit(keep, "a", full(1))
    one.doit(keep, "a", full(2))
    error = one.promise(lambda a: kill_myself(), full(3)).exception()
    assert isinstance(error, poly.DroneDied)
    wait_for(lambda: 0 < used(pool) <= 204_800)
    for i in range(20):
        pool.drones[0].doit(len, full(100 + i))
    assert two.doit(kept_is_full, "a", 1)
    two.doit(drop_kept)
    nothing_is_used(pool)


def test_work_that_is_tried_again_has_its_arguments_still(tmp_path):
    path = str(tmp_path / "tried")

    def twice_dead(a):
        append(path, "tried")
        if len(lines(path)) < 3:
            kill_myself()
        return a + 1

    with poly.Pool(1, retries=2, output="discard") as pool:
        assert is_full(pool.doit(twice_dead, full(1)), 2)


@pytest.mark.guarantee("work-15")
def test_nothing_is_left_of_it_after_a_controller_that_was_killed():
    with Script("""
        import os, numpy as np, polycephaly as poly
        pool = poly.Pool(2)
        a = pool.doit(lambda: np.ones(1_000_000))
        shared = pool.share(np.ones(1_000_000))
        pool.doit(len, shared)
        fd = pool._dispatcher.supervisor.engine._arena.fd
        print(os.fstat(fd).st_ino, os.fstat(fd).st_dev, os.fstat(fd).st_blocks > 0, flush=True)
        pool.promise("import time; time.sleep(60)")
        input() if False else __import__("signal").pause()
    """) as script:
        inode, _, filled = script.read_line().split()
        assert filled == "True" and who_has(inode)
        script.signal(signal.SIGKILL)
        script.wait()
        assert not script.left()
        wait_for(lambda: not who_has(inode))


def who_has(inode):
    """Processes that have that arena open, or mapped."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = f"/proc/{pid}/fd/{fd}"
                    if (
                        "polycephaly-arena" in os.readlink(target)
                        and str(os.stat(target).st_ino) == inode
                    ):
                        found.add(int(pid))
            with open(f"/proc/{pid}/maps") as maps:
                if any("polycephaly-arena" in line and line.split()[4] == inode for line in maps):
                    found.add(int(pid))
    return found


def test_programs_that_are_started_do_not_inherit_it():
    look = [sys.executable, "-c", "import os; print([os.readlink(f'/proc/self/fd/{n}') "
            "for n in (3, 4, 5, 6, 7, 8, 9) + tuple(range(10, 60)) "
            "if os.path.exists(f'/proc/self/fd/{n}')])".replace(
                "(3, 4, 5, 6, 7, 8, 9) + tuple(range(10, 60))", "range(3, 60)")]  # fmt: skip
    with poly.Pool(1) as pool:
        pool.doit(len, full(1))
        for said in (subprocess.check_output(look), pool.doit(subprocess.check_output, look)):
            assert b"polycephaly-arena" not in said


# -- share -----------------------------------------------------------------------------------------


def first_of(a):
    return type(a).__name__, float(a[0])


@pytest.mark.guarantee("work-17")
def test_a_shared_value_arrives_as_the_value_wherever_the_handle_stands(pool):
    a = full(3)
    shared = pool.share(a)
    assert not differs(pool.doit(echo, shared), a)
    assert not differs(pool.doit(arguments, shared, 1, k=shared), ((a, 1), {"k": a}))
    assert pool.doit(lambda items: first_of(items[0]), [shared]) == ("ndarray", 3.0)
    assert pool.doit(lambda items: first_of(items["k"]), {"k": shared}) == ("ndarray", 3.0)
    assert pool.doit(lambda: first_of(shared)) == ("ndarray", 3.0)
    assert not differs(list(pool.map(arguments, [shared, a], [1, 2])), [((a, 1), {}), ((a, 2), {})])
    assert not differs(pool.doit(echo, [shared])[0], a)
    first = pool.promise(echo, 5)
    assert not differs(pool.doit(arguments, shared, first), ((a, 5), {}))


@pytest.mark.parametrize("name", [
    "float64", "nested", "structured", "object", "fortran", "bytes", "own classes",
    "str", "memoryview", "masked", "zero length", "plain things",
])  # fmt: skip
def test_anything_can_be_shared(pool, name):
    for size in (400, 300_000):
        sent = make(name, size)
        with pool.share(sent) as shared:
            assert not pool.doit(check, name, size, shared)[0]
            assert not differs(shared.value, sent)
            assert not differs(pool.doit(lambda items: items[0], [shared]), sent)
            assert shared.nbytes > 0 and f"{shared.nbytes:,}" in repr(shared)


def test_after_a_refresh_a_shared_value_is_still_not_copied():
    with poly.Pool(2) as pool:
        shared = pool.share(full(1, 1_000_000))
        pool.refresh()
        before = used(pool)
        calls = [pool.promise(lambda: is_full(shared, 1)) for _ in range(5)]
        calls += [pool.promise(is_full, shared, 1) for _ in range(5)]
        assert all(each.result(60) for each in calls) and used(pool) < before + 100_000


def test_handles_that_main_had_at_the_snapshot_are_their_values_too():
    assert output_of("""
        import polycephaly as poly
        with poly.Pool(1) as other:
            promise, shared = other.promise(abs, -3), other.share(bytearray(100_000))
        class Row:
            pass
        if __name__ == "__main__":
            with poly.Pool(1) as pool:
                print(pool.doit(lambda: promise + 1), pool.doit(lambda: len(shared)))
                rows = pool.share([Row(), bytes(100_000)])
                pool.refresh()
                print(type(pool.doit(lambda: rows)[0]).__name__)
    """) == "4 100000\nRow\n"  # fmt: skip


@pytest.mark.guarantee("work-17")
def test_a_shared_value_is_copied_once_for_all_drones_and_calls():
    with poly.Pool(4) as pool:
        shared = pool.share(full(3, 8_000_000))
        before = used(pool)
        assert 8_000_000 <= shared.nbytes <= before <= 8_100_000
        for drone in pool.drones:
            assert drone.doit(keep, "it", shared) == 3
            assert drone.doit(keep, "handle", [shared][0]) == 3
            assert drone.doit(lambda items: keep("inside", items[0]), [shared]) == 3
        assert all(pool.map(is_full, [shared] * 40, [3] * 40))
        assert used(pool) <= before + 100_000


def test_what_is_written_into_a_shared_value_nobody_else_sees():
    with two_drones() as (pool, one, two):
        original = full(1)
        shared = pool.share(original)
        original[:] = 2
        assert one.doit(keep_and_fill, "a", shared, 9) == 1
        assert two.doit(keep_and_fill, "a", shared, 8) == 1
        assert is_full(shared.value, 1)
        mine = shared.value
        mine[:] = 7
        assert one.doit(keep_and_fill, "b", shared, 6) == 1
        assert (
            one.doit(kept_is_full, "a", 9)
            and two.doit(kept_is_full, "a", 8)
            and one.doit(kept_is_full, "b", 6)
        )
        assert pool.doit(lambda items: float(items[0].max()), [shared]) == 1
        captured = [pool.doit(lambda: (float(shared.max()), shared.fill(5))) for _ in range(4)]
        assert captured == [(1, None)] * 4


@pytest.mark.guarantee("work-17")
def test_released_it_is_an_error_that_says_so_and_the_memory_comes_back(impatient):
    with poly.Pool(2) as pool:
        shared = pool.share(full(1, 1_000_000))
        assert pool.doit(is_full, shared, 1)
        assert used(pool) >= 1_000_000
        shared.release()
        shared.release()
        nothing_is_used(pool)
        for use in (
            lambda: shared.value,
            lambda: shared.nbytes,
            lambda: pool.doit(len, shared),
            lambda: pool.doit(len, [shared]),
            lambda: pool.doit(lambda: shared),
            lambda: pickle.dumps(shared),
            lambda: list(pool.map(len, [shared])),
        ):
            with pytest.raises(ValueError, match="released"):
                use()
        assert "released" in repr(shared)
        assert pool.doit(abs, -1) == 1


@pytest.mark.guarantee("work-17")
def test_the_end_of_its_block_and_the_last_reference_release_it_too(impatient):
    with poly.Pool(1) as pool:
        with pool.share(full(1)) as shared:
            assert pool.doit(is_full, shared, 1)
        nothing_is_used(pool)
        with pytest.raises(ZeroDivisionError), pool.share(full(1)) as shared:
            raise ZeroDivisionError
        with pytest.raises(ValueError, match="released"):
            _ = shared.value
        other = pool.share(full(2))
        assert pool.doit(is_full, other, 2)
        del other
        nothing_is_used(pool)


def test_released_without_any_call_it_is_given_back_as_well(impatient):
    with poly.Pool(1) as pool:
        with pool.share(full(1, 1_000_000)):
            assert used(pool) >= 1_000_000
        nothing_is_used(pool)


def test_who_looks_at_a_released_value_still_has_it(impatient):
    with two_drones() as (pool, one, two):
        shared = pool.share(full(1))
        one.doit(keep, "a", shared)
        mine, handle = shared.value, pickle.loads(pickle.dumps(shared))
        shared.release()
        for i in range(20):
            with pool.share(full(100 + i)) as other:
                assert two.doit(is_full, other, 100 + i)
            two.doit(len, full(200 + i))
        assert one.doit(kept_is_full, "a", 1) and is_full(mine, 1) and is_full(handle.value, 1)
        one.doit(drop_kept)
        del mine, handle
        nothing_is_used(pool)


def test_work_that_was_submitted_before_the_release_has_it(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(1) as pool:
        blocking = pool.promise(hold_until, gate, started)
        with pool.share(full(1)) as shared:
            waiting = [pool.promise(is_full, shared, 1) for _ in range(5)]
        wait_for(lambda: lines(started))
        others = [pool.share(full(2)) for _ in range(5)]
        append(gate, "open")
        assert all(each.result(60) for each in waiting) and blocking.value == "held"
        assert all(is_full(each.value, 2) for each in others)


def test_in_another_pool_it_arrives_as_well_also_after_its_own_has_ended():
    with poly.Pool(1) as other:
        with poly.Pool(1) as pool:
            shared = pool.share(full(4))
            assert other.doit(is_full, shared, 4)
            assert other.doit(lambda items: first_of(items[0]), [shared]) == ("ndarray", 4.0)
            assert other.doit(lambda: first_of(shared)) == ("ndarray", 4.0)
            arena = arena_of(pool)
        assert other.doit(is_full, shared, 4) and is_full(shared.value, 4)
        with pytest.raises(RuntimeError):
            pool.share(full(5))
        shared.release()
        gc.collect()
        assert not arena._open_fds


def test_a_handle_can_be_pickled_as_anything():
    with poly.Pool(1) as pool:
        shared = pool.share({"a": full(4)})
        for protocol in range(2, 6):
            try:
                copy = pickle.loads(pickle.dumps(shared, protocol))
            except pickle.PicklingError:
                assert protocol < 5
                continue
            assert is_full(copy.value["a"], 4)
        buffers = []
        apart = pickle.loads(
            pickle.dumps(shared, 5, buffer_callback=buffers.append), buffers=buffers
        )
        assert buffers and is_full(apart.value["a"], 4) and apart.nbytes == shared.nbytes
    assert is_full(copy.value["a"], 4)


def test_a_drone_sends_a_shared_value_back_and_on():
    with two_drones() as (pool, one, two):
        shared = pool.share(full(4))
        back = one.doit(lambda items: items[0], [shared])
        pid = one.pid
        one.kill()
        gone_with(pid)
        assert is_full(back, 4) and two.doit(is_full, back, 4)
        del back
        gc.collect()
        assert is_full(shared.value, 4) and two.doit(is_full, shared, 4)


@pytest.mark.guarantee("work-16")
def test_more_than_the_ceiling_is_a_memory_error_and_less_is_not(impatient):
    with pool_with_ceiling(2_000_000) as pool:
        with pytest.raises(MemoryError, match="2,000,000"):
            pool.share(full(1, 2_100_000))
        one = pool.share(full(1, 1_500_000))
        with pytest.raises(MemoryError):
            pool.share(full(2, 1_000_000))
        assert pool.doit(is_full, one, 1)
        small = pool.share([1, 2, 3])
        assert pool.doit(sum, small) == 6
        one.release()
        gc.collect()
        two = wait_for(lambda: shared_or_none(pool, full(2, 1_500_000)))
        assert pool.doit(is_full, two, 2)


def shared_or_none(pool, value):
    try:
        return pool.share(value)
    except MemoryError:
        return None


# -- no room ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def said():
    """The warnings about shared memory, as they come, from any thread."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield lambda: [str(each.message) for each in record if each.category is RuntimeWarning]


@pytest.mark.guarantee("work-16")
@pytest.mark.parametrize("ceiling", [0, 300_000])
def test_without_room_all_of_it_arrives_through_sockets_with_one_warning(ceiling):
    sent = {
        name: make(name, 400_000)
        for name in ("float64", "structured", "bytes", "nested", "own class", "str")
    }
    with said() as warned, pool_with_ceiling(ceiling, 2) as pool:
        for each in sent.values():
            assert not differs(pool.doit(echo, each), each)
        promises = [pool.promise(echo, each) for _ in range(10) for each in sent.values()]
        for promise, each in zip(promises, [*sent.values()] * 10, strict=True):
            assert not differs(promise.result(60), each)
        assert not differs(list(pool.map(echo, [*sent.values()] * 5)), [*sent.values()] * 5)
        assert used(pool) <= ceiling
        with pytest.raises(MemoryError):
            pool.share(sent["float64"])
        assert len(warned()) == 1, warned()
    assert len(warned()) == 1, warned()


def test_one_warning_also_for_results_alone():
    with said() as warned, pool_with_ceiling(0) as pool:
        for i in range(5):
            assert is_full(pool.doit(full, i), i)
        wait_for(warned)
    assert len(warned()) == 1 and "result" in warned()[0]


def test_there_is_no_warning_while_there_is_room():
    with said() as warned, poly.Pool(2) as pool:
        for name in CASES:
            pool.doit(echo, make(name, 300_000))
        shared = pool.share(full(1))
        pool.doit(echo, shared)
    assert not warned()


def test_when_there_is_room_again_it_is_used_again(impatient):
    with said() as warned, pool_with_ceiling(1_000_000) as pool:
        held = [pool.doit(full, i, 300_000) for i in range(6)]
        assert all(is_full(each, i) for i, each in enumerate(held))
        assert used(pool) <= 1_000_000 and len(live_keeps(pool)) < 6
        wait_for(warned)
        del held
        nothing_is_used(pool)
        got = pool.doit(full, 7, 300_000)
        assert is_full(got, 7) and used(pool) >= 300_000


def no_space(*_):
    raise OSError(errno.ENOSPC, "no space")


@pytest.mark.parametrize("where", ["controller", "drone", "both"])
@pytest.mark.parametrize("after", [0, 2])
def test_where_the_system_refuses_memory_nothing_is_lost(where, after, monkeypatch):
    write, calls = store_module._write, []

    def refusing(*args):
        calls.append(1)
        return write(*args) if len(calls) <= after else no_space()

    if where != "controller":
        monkeypatch.setattr(store_module, "_write", refusing)
    with said() as warned, poly.Pool(1) as pool:
        monkeypatch.setattr(store_module, "_write", write if where == "drone" else refusing)
        pool.doit(abs, -1)
        for i in range(6):
            sent = [full(i), bytes(100_000), full(i)]
            assert not differs(pool.doit(echo, sent), sent)
            assert is_full(pool.doit(full, i), i)
        if where != "drone":
            with pytest.raises(MemoryError, match="no space"):
                pool.share(full(1))
        monkeypatch.setattr(store_module, "_write", write)
        wait_for(warned)
        with pool.share(full(1)) as shared:
            assert pool.doit(is_full, shared, 1)
        assert is_full(pool.doit(echo, full(1)), 1)
    assert len(warned()) == 1


@pytest.mark.parametrize("where", ["controller", "drone"])
def test_where_the_system_refuses_mappings_it_is_copied(where, monkeypatch, impatient):
    real, read, empty = arena_module.map_range, os.preadv, []

    def read_something(*args):
        done = read(*args)
        if not done:
            empty.append(args)
        assert len(empty) < 100, "nothing there, for ever"
        return done

    def refuse_mappings(how):
        monkeypatch.setattr(arena_module, "map_range", how)
        monkeypatch.setattr(store_module, "map_range", how)

    monkeypatch.setattr(os, "preadv", read_something)
    if where == "drone":
        refuse_mappings(no_space)
    with poly.Pool(1) as pool:
        refuse_mappings(real if where == "drone" else no_space)
        for i in range(5):
            sent = [full(i), numbers(100_000, np.int8)]
            got = pool.doit(echo, sent)
            assert not differs(got, sent)
            got[0][:] = 5
            shared = pool.share(sent)
            assert not differs(pool.doit(echo, shared), sent) and not differs(shared.value, sent)
        del got, shared
        nothing_is_used(pool)


def test_a_limit_of_the_kernels_own_for_the_size_of_files():
    done = run_script("""
        import resource, numpy as np, polycephaly as poly
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
        with poly.Pool(2) as pool:
            sent = [np.arange(100_000), np.arange(10_000), bytes(1_000_000)]
            for _ in range(5):
                a, b, c = pool.doit(lambda it: it, sent)
                assert (a == sent[0]).all() and (b == sent[1]).all() and c == sent[2]
            try:
                pool.share(np.arange(100_000))
            except MemoryError as error:
                print("refused")
    """)
    assert done.stdout == "refused\n", done.stderr
    assert done.stderr.count("RuntimeWarning") == 1


def test_a_long_list_of_places_in_shared_memory_is_no_large_value():
    """Each array adds 16 bytes: together they are longer than the least that goes there."""
    with warnings.catch_warnings(record=True) as warned, poly.Pool(1) as pool:
        got = pool.doit(lambda: [np.zeros(8192) for _ in range(4200)])
        assert len(got) == 4200 and pool.status()["shared_memory"]
        del got
    assert not warned


# -- many ------------------------------------------------------------------------------------------


def descriptors_of(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def keep_all(items):
    KEPT["all"] = items
    return sum(float(a[0]) for a in items)


@pytest.mark.slow
def test_thousands_of_arrays_at_once_hold_no_descriptors():
    with poly.Pool(1) as pool:
        assert is_full(pool.doit(full, 1), 1)
        pid = pool.drones[0].pid
        before, its = descriptors_of("self"), descriptors_of(pid)
        held = [pool.doit(full, i, MARK) for i in range(1200)]
        held += pool.map(full, range(1200, 2000), [MARK] * 800)
        assert all(is_full(each, i) for i, each in enumerate(held))
        for i in range(500):
            pool.doit(keep, i, held[i])
        assert pool.doit(lambda: sum(kept_is_full(i, i) for i in range(500))) == 500
        assert descriptors_of("self") <= before + 5 and descriptors_of(pid) <= its + 5
        del held


@pytest.mark.slow
def test_thousands_of_arrays_in_one_argument_and_one_result():
    sent = [
        np.full(MARK // 8, float(i)) for i in range(3000)
    ]  # a header that is too large for a packet
    with poly.Pool(1) as pool:
        before = descriptors_of("self")
        assert pool.doit(keep_all, sent) == 2999 * 1500
        got = pool.doit(kept, "all")
        assert all(is_full(each, i) for i, each in enumerate(got))
        assert descriptors_of("self") <= before + 5
        del got


@pytest.mark.slow
def test_thousands_one_after_another_take_no_more_memory_than_a_few():
    most = 0
    with poly.Pool(2) as pool:
        for i in range(1500):
            got = pool.doit(echo, np.full(32_000, i, np.int64))
            assert got[0] == got[-1] == i
            most = max(most, used(pool))
        assert most < 12 << 20
        assert pool._dispatcher.registry.store._top < 12 << 20
        for i, got in enumerate(pool.map(full, range(500), [256_000] * 500)):
            assert is_full(got, i)
            most = max(most, used(pool))
    assert most < 200 << 20


@pytest.mark.slow
def test_many_threads_at_once():
    failures = []

    def work(pool, seed):
        rng = random.Random(seed)
        try:
            for i in range(25):
                sent = numbers(
                    rng.choice((100, 70_000, 300_000, 1_500_000)), np.int64, seed * 1000 + i
                )
                got = pool.promise(echo, sent)
                other = pool.promise(full, seed)
                if differs(got.result(60), sent) or not is_full(other.result(60), seed):
                    failures.append((seed, i))
        except BaseException as error:
            failures.append(error)

    with poly.Pool(2) as pool:
        threads = [threading.Thread(target=work, args=(pool, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_threads_that_share_and_release_at_once(impatient):
    failures = []

    def work(pool, seed):
        try:
            for i in range(15):
                value = seed * 100 + i
                with pool.share(full(value)) as shared:
                    if not pool.doit(is_full, shared, value) or not is_full(shared.value, value):
                        failures.append(value)
        except BaseException as error:
            failures.append(error)

    with poly.Pool(2) as pool:
        threads = [threading.Thread(target=work, args=(pool, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        nothing_is_used(pool)


def nested_sum(a):
    with poly.Pool(1) as inner:
        shared = inner.share(a)
        return inner.doit(add_up_to, a, 1), inner.doit(np.sum, shared), inner.doit(full, 6)


def test_drones_of_drones():
    a = full(2)
    with poly.Pool(1) as pool:
        got, total, other = pool.doit(nested_sum, a)
        assert is_full(got, 3) and total == a.sum() and is_full(other, 6) and is_full(a, 2)
        assert is_full(pool.doit(nested_sum, got)[0], 4)


# -- forks -----------------------------------------------------------------------------------------

HELD = {}


@pytest.fixture
def held():
    yield HELD
    HELD.clear()


def held_is_full(name, value):
    return is_full(HELD[name], value)


def drop_held():
    HELD.clear()
    gc.collect()


def fill_held(name, value):
    HELD[name][:] = value


@contextlib.contextmanager
def forked(child):
    """A child that runs `child(wait)`, where `wait()` waits for the end of the block; it has to be
    true."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(w)
            if child(lambda: os.read(r, 1)):
                gc.collect()
                status = 0
        finally:
            os._exit(status)
    os.close(r)
    try:
        yield
    finally:
        os.close(w)
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.guarantee("work-14")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_of_the_user_keeps_what_it_saw_whatever_the_parent_does():
    with poly.Pool(1) as pool:
        mine = {i: pool.doit(full, i) for i in range(6)}
        shared = pool.share(full(7))
        mine[7] = shared.value

        def child(wait):
            wait()
            return all(is_full(it, i) for i, it in mine.items())

        with forked(child):
            mine[5][:] = 50
            for i in range(4):
                del mine[i]
            del mine[7]
            shared.release()
            gc.collect()
            for i in range(30):
                pool.doit(full, 100 + i)
                with pool.share(full(100 + i)):
                    pass
            pool.drones[0].kill()
            wait_for(lambda: pool.doit(abs, -1) == 1)
        assert is_full(mine[4], 4) and is_full(mine[5], 50)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_that_writes_and_drops_and_ends_takes_nothing_from_its_parent():
    with poly.Pool(1) as pool:
        mine = [pool.doit(full, i) for i in range(6)]
        lost = pool.doit(full, 9)
        pool.drones[0].kill()
        shared = pool.share(full(7))

        def child(wait):
            nonlocal lost, shared
            mine[0][:] = 100
            there = is_full(mine[0], 100) and all(
                is_full(each, i) for i, each in enumerate(mine) if i
            )
            mine.clear()
            shared.release()
            lost = shared = None
            gc.collect()
            return there

        with forked(child):
            pass
        assert all(is_full(each, i) for i, each in enumerate(mine))
        assert is_full(lost, 9) and is_full(shared.value, 7) and pool.doit(is_full, shared, 7)
        assert is_full(pool.doit(echo, mine[3]), 3)


def test_a_signal_handler_may_put_a_value_while_another_is_put(monkeypatch):
    with poly.Pool(1) as pool:
        found = []
        before = signal.signal(
            signal.SIGINT, lambda *_: found.append(pool.promise(len, bytes(200_000)))
        )
        take = store_module.Store._take_block

        def interrupted(store, size):
            monkeypatch.setattr(store_module.Store, "_take_block", take)
            signal.raise_signal(signal.SIGINT)
            return take(store, size)

        monkeypatch.setattr(store_module.Store, "_take_block", interrupted)
        try:
            assert pool.doit(len, bytes(300_000)) == 300_000
        finally:
            signal.signal(signal.SIGINT, before)
        assert [each.result(30) for each in found] == [200_000]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_while_another_thread_looks_for_ended_forks_can_do_so_itself():
    with arena_module._forks_lock:
        child = os.fork()
        if child == 0:
            os._exit(not arena_module._forks_lock.acquire(blocking=False))
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_outlives_the_pool():
    r, w = os.pipe()
    with poly.Pool(1) as pool:
        mine = [pool.doit(full, 1)]

        def child(wait):
            wait()
            os.write(w, b"1" if is_full(mine[0], 1) else b"0")
            return True

        with forked(child):
            mine.clear()
            pool.doit(full, 2)
            pool.shutdown()
            gc.collect()
    os.close(w)
    assert os.read(r, 1) == b"1"
    os.close(r)


def test_drones_have_the_arrays_of_the_image_they_were_forked_from(held, impatient):
    with poly.Pool(1) as pool:
        held["a"] = pool.doit(full, 1)
        held["b"] = pool.doit(full, 2)
        mine = held["b"]
        pool.refresh()
        held["a"] = None
        mine[:] = 3
        gc.collect()
        for i in range(20):
            pool.doit(full, 100 + i)
            pool.doit(len, full(200 + i))
        assert pool.doit(held_is_full, "a", 1) and pool.doit(held_is_full, "b", 2)
        pool.doit(fill_held, "b", 4)
        assert is_full(mine, 3) and pool.doit(held_is_full, "b", 4)
        assert is_full(pool.doit(held_of, "a"), 1)


def held_of(name):
    return HELD[name]


def test_memory_that_an_image_held_is_given_back_after_its_drones(held, impatient):
    with poly.Pool(1) as pool:
        held["a"] = pool.doit(full, 1)
        pool.refresh()
        held.clear()
        pool.refresh()
        nothing_is_used(pool)


@pytest.mark.parametrize("how", ["killed", "refreshed", "alive"])
def test_a_drone_that_drops_an_array_of_its_image_takes_it_from_nobody(held, how):
    with poly.Pool(1, output="discard") as pool:
        mine = held["a"] = pool.doit(full, 1)
        if how == "killed":
            pool.drones[0].kill()
        elif how == "refreshed":
            pool.refresh()
        pool.refresh()
        pool.promise(drop_held).result(60)
        for i in range(5):
            pool.doit(full, 100 + i)
        assert is_full(mine, 1)


def test_a_drone_of_another_pool_that_drops_an_array_of_its_image_takes_it_from_nobody(held):
    with poly.Pool(1) as pool:
        mine = held["a"] = pool.doit(full, 1)
        with poly.Pool(1) as other:
            assert other.doit(held_is_full, "a", 1)
            other.promise(drop_held).result(60)
        with poly.Drone() as lone:
            lone.doit(fill_held, "a", 3)
            assert lone.doit(held_is_full, "a", 3)
        assert is_full(mine, 1) and is_full(pool.doit(echo, mine), 1)


@pytest.mark.parametrize("end", ["kill", "refresh", "release"])
def test_a_handle_of_its_image_that_a_drone_sends_back_stays_whole(held, end, impatient):
    with poly.Pool(1, output="discard") as pool:
        shared = held["t"] = pool.share(full(5))
        pool.refresh()
        back = pool.doit(held_of, "t")
        assert is_full(back.value, 5)
        if end == "kill":
            pool.drones[0].kill()
        elif end == "refresh":
            pool.refresh()
        else:
            shared.release()
            for i in range(10):
                pool.doit(len, full(100 + i))
            assert is_full(back.value, 5)
            return
        del back
        gc.collect()
        for i in range(10):
            pool.doit(len, full(100 + i))
        assert is_full(shared.value, 5) and pool.doit(is_full, shared, 5)


# -- a soak ----------------------------------------------------------------------------------------

SOAKS = int(os.environ.get("POLYCEPHALY_SOAKS", "1"))
SOAK_SECONDS = 3.0


def what_is_used(pool):
    """For the message: pages with memory by region, what this image looks at, and what it has
    lent."""
    arena, at, regions = arena_of(pool), 0, {}
    with contextlib.suppress(OSError):
        while True:
            start = os.lseek(arena.fd, at, os.SEEK_DATA)
            at = os.lseek(arena.fd, start, os.SEEK_HOLE)
            regions.setdefault(start // arena_module.REGION_BYTES, []).append(
                (start % arena_module.REGION_BYTES, at - start)
            )
    lent = [
        (handle.number, handle.state, len(handle.ref_table.lent))
        for handle in pool._dispatcher.handles
    ]
    return {"used": arena.used(), "regions": regions, "keeps": arena.range_refs, "lent": lent}


@pytest.mark.parametrize("turn", range(SOAKS))
@pytest.mark.slow
def test_while_drones_are_killed_all_that_arrives_is_what_was_sent(turn, impatient):
    seed = int(os.environ.get("POLYCEPHALY_SEED", random.SystemRandom().randrange(1 << 32)))
    print("seed", seed)
    rng = random.Random(seed)
    arrived = 0
    with poly.Pool(2, output="discard", retries=1) as pool:
        shared = pool.share(full(77, 300_000))
        end = time.monotonic() + SOAK_SECONDS
        under_way, held = [], []
        value = 0
        while time.monotonic() < end or arrived <= 20:
            value += 1
            size = rng.choice((1000, 70_000, 200_000, 800_000, 2_000_000))
            a = full(value, size)
            kind = rng.randrange(5)
            if kind == 0:
                under_way.append((pool.promise(echo, a), value, size))
            elif kind == 1:
                under_way.append((pool.promise(full, value, size), value, size))
            elif kind == 2:
                under_way.append(
                    (pool.promise(lambda it, k: it["a"][0] + k, {"a": (a,)}, 0), value, size)
                )
            elif kind == 3:
                under_way.append((pool.promise(add_up_to, shared, value - 77), value, 300_000))
            else:
                under_way.append((pool.promise(keep, value % 3, a), value, 0))
            a[:] = -1
            if rng.random() < 0.06:
                ready = [drone for drone in pool.drones if drone._handle.state is State.READY]
                with contextlib.suppress(IndexError, ProcessLookupError, RuntimeError):
                    os.kill(rng.choice(ready).pid, signal.SIGKILL)
            while len(under_way) > rng.randrange(20):
                promise, wanted, size = under_way.pop(rng.randrange(len(under_way)))
                try:
                    got = promise.result(60)
                except poly.DroneDied:
                    continue
                assert is_full(got, wanted), (seed, wanted)
                assert not size or np.size(got) == size // 8
                arrived += 1
                held.append((got, wanted))
                if len(held) > 30:
                    got, wanted = held.pop(rng.randrange(len(held)))
                    assert is_full(got, wanted), (seed, wanted)
                    if isinstance(got, np.ndarray):
                        got[:] = -2
        for got, wanted in held:
            assert is_full(got, wanted), (seed, wanted)
        for promise, wanted, _ in under_way:
            if promise.exception(60) is None:
                assert is_full(promise.value, wanted), (seed, wanted)
            else:
                assert isinstance(promise.exception(), poly.DroneDied)
        assert is_full(shared.value, 77), seed
        held.clear()
        under_way.clear()
        del got, promise, shared
        for drone in pool.drones:
            with contextlib.suppress(poly.DroneDied, RuntimeError):
                drone.doit(drop_kept)
        try:
            nothing_is_used(pool)
        except AssertionError:
            raise AssertionError((seed, what_is_used(pool))) from None
