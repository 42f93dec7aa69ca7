"""Maps that can be resumed: calls that have finished are not made again, whatever has ended the run
before, and the results come as if they were new."""

import asyncio
import importlib.util
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import keyed_values
import pytest
from engines import local_only, on_each_engine, poly
from faults import append, kill_myself, lines, note, wait_for
from scripts import Script, output_of, run_script
from work import invert

import polycephaly
from polycephaly import green
from polycephaly.store.resume.calls import connect
from polycephaly.store.resume.encoding import encode

pytestmark = on_each_engine

ENGINES = pytest.mark.parametrize("how", [{}, pytest.param({"engine": "inline"}, marks=local_only)])


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run.db")


@pytest.fixture
def calls(tmp_path):
    """A file with a line for each call."""
    return str(tmp_path / "calls")


def made(calls):
    return sorted(map(int, lines(calls)))


def work(calls, i):
    append(calls, str(i))
    return {"i": i, "words": {"a", "b"}}


def expected(count):
    return [{"i": i, "words": {"a", "b"}} for i in range(count)]


def module_of(tmp_path, source, name="jobs_to_resume"):
    """A module with this source, in place of the one that was there before."""
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    # Kept bytecode would be taken for that of a file that has as many bytes, within a second.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield partial(module_of, tmp_path)
    sys.modules.pop("jobs_to_resume", None)


# -- finished calls --------------------------------------------------------------------------------


@pytest.mark.guarantee("pool-15")
@ENGINES
def test_finished_calls_are_not_made_again_and_results_come_as_if_they_were_new(path, calls, how):
    fn = partial(work, calls)
    with poly.Pool(2, **how) as pool:
        some = pool.map(fn, range(100), resume=path)
        assert [next(some) for _ in range(7)] == expected(7)
        some.close()
        finished = polycephaly.resumed(path).finished
        assert 7 <= finished <= 100
        assert list(pool.map(fn, range(100), resume=path)) == expected(100)
        again = pool.map(fn, iter(range(100)), resume=path, progress=False)
        assert list(again) == expected(100)
    # What was running at the end of the first run may have been made twice.
    assert set(made(calls)) == set(range(100)) and len(made(calls)) <= 100 + (100 - finished)
    before = made(calls)
    with poly.Pool(1, **how) as pool:
        assert list(pool.map(fn, range(100), resume=path)) == expected(100)
        assert list(pool.map(fn, range(102), resume=path)) == expected(102)
    assert made(calls) == sorted([*before, 100, 101])


@pytest.mark.guarantee("pool-15")
def test_each_kind_of_map_gives_stored_results(path, calls):
    def add(calls, i, j):
        append(calls, str(i))
        return [i + j]

    fn = partial(add, calls)
    results = [[2 * i] for i in range(50)]

    async def take(pool):
        return [each async for each in pool.map(fn, range(50), range(50), resume=path)]

    with poly.Pool(2) as pool:
        assert list(pool.map(fn, range(0, 50, 2), range(0, 50, 2), resume=path)) == results[::2]
        unordered = pool.map(fn, range(50), range(50), resume=path, ordered=False)
        assert sorted(unordered) == results
        errors = pool.map(fn, range(50), range(50), resume=path, return_exceptions=True)
        assert list(errors) == results
        assert asyncio.run(take(pool)) == results
        few = pool.map(fn, range(50), range(50), resume=path, buffersize=2, timeout=60)
        assert list(few) == results
        limited = pool.options(timeout=60, retries=poly.Retry(2))
        assert list(limited.map(fn, range(50), range(50), resume=path)) == results
        assert list(pool.map(fn, [], [], resume=path)) == []
        assert list(pool.map(fn, resume=path)) == []
    assert made(calls) == list(range(50))


async def double(calls, i):
    append(calls, str(i))
    await green.sleep(0)
    return 2 * i


@pytest.mark.guarantee("pool-15")
@pytest.mark.parametrize("width", [1, 3])
def test_coroutine_functions_too(path, calls, width):
    with poly.Pool(1, width=width) as pool:
        for _ in range(2):
            results = pool.map(partial(double, calls), range(20), resume=path)
            assert list(results) == [2 * i for i in range(20)]
    assert made(calls) == list(range(20))


@pytest.mark.guarantee("pool-15")
@ENGINES
def test_results_are_stored_whether_or_not_the_consumer_reads(path, calls, how):
    with poly.Pool(2, **how) as pool:
        results = pool.map(partial(work, calls), range(8), resume=path, buffersize=8)
        wait_for(lambda: polycephaly.resumed(path).finished == 8)
        assert list(results) == expected(8)


@pytest.mark.guarantee("pool-15")
def test_a_result_is_stored_as_it_was_when_the_call_ended(path):
    with poly.Pool(1) as pool:
        for _ in range(2):
            for each in pool.map(list, ["ab", "cd"] * 20, resume=path):
                assert len(each) == 2
                each.append(None)  # as a consumer may, before it is stored


@pytest.mark.guarantee("pool-15")
def test_an_item_is_as_it_was_when_it_was_taken(path):
    def reused():
        item = []
        for i in range(40):
            item.append(i)
            yield item

    with poly.Pool(1) as pool:
        assert list(pool.map(len, list(map(list, map(range, range(10)))), resume=path))
        assert list(pool.map(len, reused(), resume=path)) == list(range(1, 41))
        assert list(pool.map(len, reused(), resume=path)) == list(range(1, 41))


@pytest.mark.guarantee("pool-15")
def test_inputs_are_taken_as_by_any_map(path):
    taken = []

    def endless():
        i = 0
        while True:
            taken.append(i)
            yield i
            i += 1

    with poly.Pool(1) as pool:
        results = pool.map(abs, endless(), resume=path)
        assert [next(results) for _ in range(5)] == list(range(5))
        results.close()
        assert len(taken) < 10_000  # as many as any map has in flight
        failing = pool.map(abs, (1 // (2 - i) for i in range(4)), resume=path)
        with pytest.raises(ZeroDivisionError):
            list(failing)
        other = f"{path}.other"  # since of the endless input more than 300 may have been done
        results = pool.map(abs, range(300), resume=other)
    assert list(results) == list(range(300))  # the rest was sent when the block ended
    with closing(sqlite3.connect(other)) as db:
        assert db.execute("SELECT count(*) FROM calls").fetchone() == (300,)


def sometimes_long(calls, i):
    append(calls, str(i))
    if i % 400 == 399:
        time.sleep(0.03)
    return i


@pytest.mark.guarantee("pool-15")
def test_calls_that_a_drone_gave_back_and_those_behind_a_long_one_are_stored(path, calls):
    with poly.Pool(2) as pool:
        for _ in range(2):
            results = pool.map(partial(sometimes_long, calls), range(2000), resume=path)
            assert list(results) == list(range(2000))
    assert made(calls) == list(range(2000))


@pytest.mark.guarantee("pool-15")
def test_of_equal_items_the_nth_is_the_nth_call(path, calls):
    def number(calls, item):
        append(calls, "1")
        return len(lines(calls))

    fn = partial(number, calls)
    with poly.Pool(1) as pool:
        assert list(pool.map(fn, ["a", "a", "b", "a"], resume=path)) == [1, 2, 3, 4]
        assert list(pool.map(fn, ["b", "a", "a"], resume=path)) == [3, 1, 2]
        assert list(pool.map(fn, ["a"] * 5, resume=path)) == [1, 2, 4, 5, 6]


@pytest.mark.guarantee("pool-15")
def test_one_changed_item_is_one_call(path, calls):
    fn = partial(work, calls)
    items = list(range(50))
    with poly.Pool(2) as pool:
        list(pool.map(fn, items, resume=path))
        items[20] = 100
        del items[30], items[5]
        assert [each["i"] for each in pool.map(fn, items, resume=path)] == items
    assert made(calls) == [*range(50), 100]


@pytest.mark.guarantee("pool-15")
def test_with_a_seed_calls_draw_the_same_numbers_in_each_run(path):
    def draw(_):
        return polycephaly.rng().random()

    pytest.importorskip("numpy", reason="numpy is not installed")
    with poly.Pool(2) as pool:
        drawn = list(pool.map(draw, [0] * 30, seed=42))
        some = pool.map(draw, [0] * 10, seed=42, resume=path)
        assert list(some) == drawn[:10]
        assert list(pool.map(draw, [0] * 30, seed=42, resume=path)) == drawn
        others = list(pool.map(draw, [0] * 30, seed=43, resume=path))
        assert not set(others) & set(drawn)
        assert list(pool.options(seed=42).map(draw, [0] * 30, resume=path)) == drawn
        assert polycephaly.resumed(path).finished == 60
        turned = [list(pool.map(draw, range(5), seed=1, resume=path))]
        turned.append(list(pool.map(draw, range(4, -1, -1), seed=1, resume=path)))
        assert turned[0] == turned[1] == list(pool.map(draw, range(5), seed=1))


@pytest.mark.guarantee("pool-15")
def test_large_results_and_items(path):
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    items = [np.full(100_000, i, dtype=float) for i in range(6)]
    with poly.Pool(2) as pool:
        for _ in range(2):
            for i, each in enumerate(pool.map(np.square, items, resume=path)):
                assert each.shape == (100_000,) and (each == i * i).all()
                each += 1  # it may be written to
        texts = [(10**i) * "x" for i in range(7)] * 3
        for _ in range(2):
            assert list(pool.map(str.upper, texts, resume=path)) == [t.upper() for t in texts]
    assert polycephaly.resumed(path).finished == 27


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.guarantee("pool-15")
@ENGINES
def test_failures_are_stored_with_their_errors_and_tried_again(path, jobs, how):
    def invert_if(calls, flag, i):
        append(calls, str(i))
        if i % 10 == 3 and not os.path.exists(flag):
            raise ValueError(f"bad {i}")
        return i

    calls, flag = path + "-calls", path + "-flag"
    fn = partial(invert_if, calls, flag)
    with poly.Pool(2, **how) as pool:
        with pytest.raises(ValueError, match="bad 3"):
            list(pool.map(fn, range(40), resume=path))
        found = polycephaly.resumed(path)
        assert found.failures[0].item == 3
        assert found.failures[0].error == "ValueError: bad 3"
        assert found.failures[0].arguments.endswith("3")
        assert "invert_if" in found.failures[0].traceback
        assert found.failures[0].function.endswith("invert_if")
        results = list(pool.map(fn, range(40), resume=path, return_exceptions=True))
        assert [type(each) for each in results] == [
            ValueError if i % 10 == 3 else int for i in range(40)
        ]
        found = polycephaly.resumed(path)
        assert (found.finished, found.failed) == (36, 4)
        assert [each.item for each in found.failures] == [3, 13, 23, 33]
        assert str(found).startswith("36 calls finished, 4 failed\n")
        append(flag, "")
        assert list(pool.map(fn, range(40), resume=path)) == list(range(40))
        assert polycephaly.resumed(path) == (40, 0, [])
        before = len(made(calls))
        assert list(pool.map(fn, range(40), resume=path)) == list(range(40))
        assert len(made(calls)) == before


@pytest.mark.guarantee("pool-15")
@local_only
def test_a_call_that_kills_its_drone_is_a_failure(path):
    def die(i):
        return kill_myself() if i == 5 else i

    with poly.Pool(1, timeout=60) as pool:
        results = list(pool.map(die, range(10), resume=path, return_exceptions=True))
        assert isinstance(results[5], poly.DroneDied)
    (failure,) = polycephaly.resumed(path).failures
    assert failure.item == 5 and failure.error.startswith("polycephaly.errors.DroneDied: ")


def test_an_error_names_the_item_as_in_any_map(path):
    with poly.Pool(1) as pool:
        list(pool.map(invert, range(1, 20), resume=path))
        with pytest.raises(ZeroDivisionError) as caught:
            list(pool.map(invert, [*range(1, 20), 0], resume=path))
    assert "in map(invert, ...), item 19: 0" in caught.value.__notes__


def test_a_result_that_cannot_be_pickled_is_an_error_that_says_so(path):
    with poly.Pool(1) as pool, pytest.raises(TypeError) as caught:
        list(pool.map(lambda i: threading.Lock(), [0], resume=path, key=str))
    assert "while pickling the result, which is to be stored" in caught.value.__notes__


# -- keys ------------------------------------------------------------------------------------------


def test_a_key_shows_what_a_value_means_not_which_parts_are_one_object():
    a, b = [1, "x"], [1, "x"]
    assert encode((a, a)) == encode((a, b))
    shared = {"k": a}
    assert encode([shared, shared]) == encode([{"k": [1, "x"]}, {"k": [1, "x"]}])
    one, other = [1], [1]
    one.append(one)
    other.append(other)
    assert encode(one) == encode(other) != encode([1, [1]])
    assert encode({1, 2, 3}) == encode({3, 2, 1}) != encode(frozenset({1, 2, 3}))
    plain, turned = keyed_values.Plain(a=1, b=2), keyed_values.Plain(b=2, a=1)
    assert encode(plain) == encode(turned)
    assert encode(float("nan")) == encode(-float("nan"))


def test_types_and_the_order_of_a_dict_count():
    values = [1, 1.0, True, "1", b"1", bytearray(b"1"), 1 + 0j, None, (1,), [1], {1}, 0.0, -0.0]
    values += [{"a": 1, "b": 2}, {"b": 2, "a": 1}, ((1,), 2), (1, (2,)), ("ab", "c"), ("a", "bc")]
    values += keyed_values.values().values()
    encoded = Counter(map(encode, values))
    equal = {code for code, times in encoded.items() if times > 1}  # as those are among the others
    assert equal == {encode(None), encode(True), encode(1), encode(1.0)}


@pytest.mark.guarantee("pool-15")
@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_key_is_the_same_in_each_process_and_on_each_python(seed):
    script = str(Path(keyed_values.__file__))
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(script).parent.parent)}
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, env=env
    )
    known = Path(script).with_suffix(".txt").read_text().splitlines()
    if "numpy array" not in run.stdout:  # not installed
        known = [line for line in known if not line.startswith("numpy ")]
    assert run.stdout.splitlines() == known


class Holder:
    def __init__(self, held):
        self.held = held


@pytest.mark.guarantee("pool-15")
@pytest.mark.parametrize(
    "item, what",
    [
        (threading.Lock(), "a lock, has no key by which a later run would find its result (cannot"),
        (Holder(threading.Lock()), "a Holder, has no key"),
        (lambda: 1, "a function, has no key"),
        (partial(max, lambda: 1), "a partial, has no key"),
        (Path, None),
    ],
    ids=["lock", "inside", "lambda", "lambda inside", "class"],
)
def test_an_item_without_a_key_is_an_error_that_names_it_and_the_cure(path, item, what):
    with poly.Pool(1) as pool:
        if what is None:
            assert list(pool.map(isinstance, [Path()], [item], resume=path)) == [True]
            return
        results = pool.map(callable, [1, 2, item, 3], resume=path)
        assert [next(results), next(results)] == [False, False]
        with pytest.raises(TypeError) as caught:
            next(results)
    message = str(caught.value)
    assert message.startswith("item 2 of map(callable, ...), a")
    assert what in message and "give key=, a function from an item to a string" in message


@pytest.mark.guarantee("pool-15")
def test_key_gives_a_key_to_what_has_none(path, calls):
    class Local:
        def __init__(self, n):
            self.n = n

        def __call__(self, n):
            append(calls, str(n))
            return self.n + n

    def by_number(item):
        return f"number {item.n}"

    def number(item):
        append(calls, str(item.n))
        return item.n

    with poly.Pool(1) as pool:
        for _ in range(2):
            items = [Local(i) for i in range(20)]
            assert list(pool.map(number, items, resume=path, key=by_number)) == list(range(20))
            double = pool.map(lambda n: note(calls, n) * 2, range(20, 30), resume=path, key=str)
            assert list(double) == list(range(40, 60, 2))
            local = pool.map(Local(1), range(30, 40), resume=path, key=str)
            assert list(local) == list(range(31, 41))
        assert made(calls) == list(range(40))
        with pytest.raises(TypeError, match="key= gives a string for each item, and gave 5 for 0"):
            list(pool.map(abs, [5], resume=path, key=abs))


@pytest.mark.guarantee("pool-15")
def test_a_function_without_a_name_is_refused_with_the_cure(path):
    class Local:
        def __call__(self, n):
            return n

    with poly.Pool(1) as pool:
        for fn, what in [
            (lambda n: n, "is a lambda"),
            (Local, "a local class"),
            (Local(), "a local"),
        ]:
            with pytest.raises(TypeError, match=what) as caught:
                pool.map(fn, [1], resume=path)
            assert "give key=, a function from an item to a string" in str(caught.value)
            assert not os.path.exists(path)
        assert list(pool.map(abs, [-1], resume=path)) == [1]


# -- a function that has changed -------------------------------------------------------------------

SOURCE = """
import functools
import os

def append(path, text):
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{text}\\n".encode())
    os.close(fd)

def called(n):
    return n

MORE = 1

def add(calls, n, more=MORE):
    append(calls, n)
    return called(n) + more

class Adder:
    def __init__(self, more):
        self.more = more

    def add(self, calls, n):
        append(calls, n)
        return n + self.more

    def __call__(self, calls, n):
        return self.add(calls, n)

def adder(more):
    def add(calls, n):
        append(calls, n)
        return n + more
    return add

def decorated(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)
    return wrapper

@decorated
def wrapped(calls, n):
    append(calls, n)
    return n + 1
"""
CHANGES = {
    "source": ("jobs.add", ("called(n) + more", "called(n) + more + 1"), None),
    "defaults": ("jobs.add", ("MORE = 1", "MORE = 2"), None),
    "closure": ("jobs.adder(1)", None, "jobs.adder(2)"),
    "partial": ("partial(jobs.add, more=1)", None, "partial(jobs.add, more=2)"),
    "instance": ("jobs.Adder(1)", None, "jobs.Adder(2)"),
    "method": ("jobs.Adder(1).add", None, "jobs.Adder(2).add"),
    "source of a method": ("jobs.Adder(1).add", ("n + self.more", "n + self.more + 1"), None),
    "decorated": ("jobs.wrapped", ("return n + 1", "return n + 2"), None),
}


@pytest.mark.guarantee("pool-15")
@local_only
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_function_is_refused_with_the_cure(path, calls, jobs, change):
    before, edit, after = CHANGES[change]

    def run(expression, module, **options):
        fn = eval(expression, {"jobs": module, "partial": partial})
        with poly.Pool(engine="inline") as pool:
            return list(pool.map(fn, [calls] * 5, range(5), resume=path, **options))

    old = list(range(1, 6))
    assert run(before, jobs(SOURCE)) == old
    assert run(before, jobs(f"# moved\n{SOURCE}")) == old
    assert made(calls) == list(range(5))
    source = SOURCE.replace(*edit) if edit else SOURCE
    assert source != SOURCE or after
    new, now = jobs(source), after or before
    for _ in range(2):
        with pytest.raises(ValueError, match="has changed since its results in") as caught:
            run(now, new)
        assert "changed='again'" in str(caught.value) and "changed='keep'" in str(caught.value)
    assert run(now, new, changed="keep") == old
    assert run(now, new) == old
    assert made(calls) == list(range(5))
    assert run(before, jobs(SOURCE), changed="again") == old
    new = jobs(source)
    for _ in range(2):
        assert run(now, new, changed="again") == [each + 1 for each in old]
    assert made(calls) == sorted([*range(5)] * 3)


@local_only
def test_what_it_calls_is_not_looked_at_and_functions_are_told_apart(path, calls, jobs):
    with poly.Pool(engine="inline") as pool:
        first = pool.map(jobs(SOURCE).add, [calls] * 3, range(3), resume=path)
        assert list(first) == [1, 2, 3]
        changed = SOURCE.replace("return n\n\nMORE", "return n + 10\n\nMORE")
        assert changed != SOURCE
        again = pool.map(jobs(changed).add, [calls] * 3, range(3), resume=path)
        assert list(again) == [1, 2, 3]
        other = pool.map(jobs(SOURCE).wrapped, [calls] * 3, range(3), resume=path)
        assert list(other) == [1, 2, 3]
        assert made(calls) == [0, 0, 1, 1, 2, 2]
        # "again" makes those of one function again.
        changed = SOURCE.replace("return n + 1", "return n + 5")
        third = pool.map(jobs(changed).wrapped, [calls] * 3, range(3), resume=path, changed="again")
        assert list(third) == [5, 6, 7]
        assert list(pool.map(jobs(SOURCE).add, [calls] * 3, range(3), resume=path)) == [1, 2, 3]
    assert made(calls) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


# -- the file --------------------------------------------------------------------------------------


@pytest.mark.guarantee("pool-15")
def test_one_map_at_a_time_uses_a_file(path):
    with poly.Pool(1) as pool:
        results = pool.map(abs, range(5), resume=path)
        with pytest.raises(RuntimeError, match=f"in use by another map of this .*{os.getpid()}"):
            pool.map(abs, range(5), resume=path)
        link = f"{path}-link"
        os.symlink(path, link)
        with pytest.raises(RuntimeError, match="in use"):
            pool.map(abs, range(5), resume=link)
        assert polycephaly.resumed(path).failed == 0  # which may be asked meanwhile
        assert list(results) == list(range(5))
        results = pool.map(abs, range(5), resume=path)
        with pytest.warns(RuntimeWarning, match="were never read"):
            del results
        assert list(pool.map(abs, range(5), resume=path)) == list(range(5))
        with pytest.raises(ZeroDivisionError):
            list(pool.map(invert, [0], resume=path))
        assert list(pool.map(abs, range(5), resume=path)) == list(range(5))
    assert sorted(os.listdir(os.path.dirname(path))) == ["run.db", "run.db-link"]


IN_USE = """
import os, sys, time
import polycephaly as poly

with poly.Pool(1) as pool:
    results = pool.map(abs, range(100), resume=sys.argv[1], buffersize=1)
    print(next(results), flush=True)
    try:
        list(pool.map(abs, [1], resume=sys.argv[1]))
    except RuntimeError:
        print("refused", flush=True)
    time.sleep(1000)
"""


@pytest.mark.guarantee("pool-15")
@local_only
def test_a_second_process_is_refused_with_the_pid_of_the_first_until_that_ends_anyhow(path):
    with Script(IN_USE, path) as script:
        script.read_until("refused")
        with poly.Pool(1) as pool:
            with pytest.raises(RuntimeError, match=f"in use by process {script.process.pid} on "):
                pool.map(abs, range(5), resume=path)
            script.process.kill()
            script.wait()
            assert list(pool.map(abs, range(5), resume=path)) == list(range(5))
        assert not script.left()


@local_only
def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path):
    text, other, empty = (str(tmp_path / name) for name in ("text", "other.db", "empty"))
    append(text, "no database " * 100)
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE things (id INTEGER)")
    open(empty, "w").close()
    with poly.Pool(1) as pool:
        for path, what in [(text, "is no file of results"), (other, "file of another program")]:
            before = Path(path).read_bytes()
            for use in (polycephaly.resumed, lambda path: pool.map(abs, [1], resume=path)):
                with pytest.raises(ValueError, match=what):
                    use(path)
            assert Path(path).read_bytes() == before
        with pytest.raises(FileNotFoundError):
            polycephaly.resumed(str(tmp_path / "none"))
        with pytest.raises(ValueError, match="is empty"):
            polycephaly.resumed(empty)
        with pytest.raises(OSError, match="No such file"):
            pool.map(abs, [1], resume=str(tmp_path / "no folder" / "run.db"))
        assert list(pool.map(abs, [-1], resume=empty)) == [1]
        assert list(pool.map(abs, [-1], resume=tmp_path / "path.db")) == [1]
    with closing(sqlite3.connect(empty)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="by another version"):
        polycephaly.resumed(empty)


def test_no_part_of_the_file_needs_memory_that_processes_share(path):
    with closing(connect(path, create=True)) as db:
        db.execute("PRAGMA journal_mode = WAL")  # as somebody may have set it
    with poly.Pool(1) as pool:
        results = pool.map(abs, range(4), resume=path)
        wait_for(lambda: polycephaly.resumed(path).finished == 4)
        assert not os.path.exists(f"{path}-wal") and not os.path.exists(f"{path}-shm")
        assert list(results) == list(range(4))


@local_only
def test_if_results_can_no_longer_be_stored_the_map_fails(path, caplog):
    with poly.Pool(1) as pool:
        results = pool.map(abs, iter(range(10**9)), resume=path)
        assert next(results) == 0
        with closing(sqlite3.connect(path)) as db:
            db.execute("DROP TABLE calls")
        with pytest.raises(sqlite3.OperationalError, match="no such table") as caught:
            for _ in results:
                pass
    assert any("while storing results in" in each for each in caught.value.__notes__)
    assert "results are no longer stored" in caplog.text


@pytest.mark.guarantee("pool-15")
def test_results_with_code_of_another_python_are_made_again_with_one_warning(path, calls):
    class Local:
        def __init__(self, i):
            self.i = i

    def make(calls, i):
        append(calls, str(i))
        return Local(i) if i % 2 else i

    fn = partial(make, calls)
    with poly.Pool(1) as pool:
        for _ in range(2):
            results = pool.map(fn, range(20), resume=path)
            assert [getattr(each, "i", each) for each in results] == list(range(20))
        assert made(calls) == list(range(20))
        with closing(sqlite3.connect(path)) as db:
            (codes,) = db.execute("SELECT count(*) FROM calls WHERE python NOT NULL").fetchone()
            assert codes == 10
            db.execute("UPDATE calls SET python = '2.7' WHERE python NOT NULL")
            db.commit()
        with pytest.warns(RuntimeWarning, match=r"carry code by value, of Python 2\.7") as caught:
            results = pool.map(fn, range(20), resume=path)
            assert [getattr(each, "i", each) for each in results] == list(range(20))
        assert len(caught) == 1 and caught[0].filename == __file__
        assert made(calls) == sorted([*range(20), *range(1, 20, 2)])


# -- what does not go together ---------------------------------------------------------------------


def test_what_makes_no_sense_is_refused_at_the_call(path):
    with poly.Pool(1) as pool:
        with pytest.raises(ValueError, match="keep=True leaves results in drones"):
            pool.map(abs, [1], resume=path, keep=True)
        with pytest.raises(TypeError, match=r"pool.promise\(fn, item, keep=True\)"):
            pool.map(abs, [1], keep=True)
        with pytest.raises(ValueError, match="are for a map with resume="):
            pool.map(abs, [1], key=str)
        with pytest.raises(ValueError, match="changed is 'refuse', 'again' or 'keep', not 'no'"):
            pool.map(abs, [1], resume=path, changed="no")
        with pytest.raises(TypeError, match="key is a function"):
            pool.map(abs, [1], resume=path, key="id")
        with pytest.raises(TypeError, match="resume is the path of a file"):
            pool.map(abs, [1], resume=True)
    assert not os.path.exists(path)


@local_only
def test_a_served_pool_says_that_it_cannot_yet(path, tmp_path):
    card = str(tmp_path / "card.json")
    refused = pytest.raises(ValueError, match="of a served pool cannot be resumed yet")
    with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as client, refused:
        client.map(abs, [1], resume=path)


# -- runs that are killed --------------------------------------------------------------------------

KILLED = """
import json, os, sys, time
import polycephaly as poly
from faults import append

path, calls, count, stop = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

class Word(str):
    pass

def work(item):
    append(calls, str(item[0]))
    return {"i": item[0], "word": Word(item[0]), "set": item[1]}

def items():
    return [(i, {"a", "b", str(i)}) for i in range(count)]

if __name__ == "__main__":
    with poly.Pool(2) as pool:
        results = []
        for each in pool.map(work, items(), resume=path):
            results.append([each["i"], each["word"], sorted(each["set"])])
            if len(results) == stop:
                print("stop", flush=True)
                time.sleep(1000)  # and reads no more
    assert results == [[i, str(i), sorted({"a", "b", str(i)})] for i in range(count)]
    print(len(results))
"""


def killed_and_resumed(path, calls, count, stops):
    """Kill a run after each of so many results; return how many calls were made again of those
    whose results had been stored, and of the others."""
    again = others = 0
    for stop in stops:
        with Script(KILLED, path, calls, str(count), str(stop)) as script:
            script.read_until("stop")
            # What was stored before the signal; more may be meanwhile.
            wait_for(lambda: polycephaly.resumed(path).finished >= stop)  # noqa: B023
            stored = polycephaly.resumed(path).finished
            script.process.kill()
            script.wait()
            assert not script.left()
        with closing(connect(path, create=True)) as db:
            kept = {item for (item,) in db.execute("SELECT item FROM calls")}
        assert len(kept) >= stored
        before = Counter(lines(calls))
        env = {"PYTHONHASHSEED": str(stop)}
        if stop == stops[-1]:
            done = run_script(KILLED, path, calls, str(count), "0", env=env)
            assert (done.stdout, done.stderr) == (f"{count}\n", "")
            after = Counter(lines(calls))
            again = sum(after[str(i)] - before[str(i)] for i in kept)
            others = sum(after.values()) - count
    return again, others


@pytest.mark.guarantee("pool-15")
@local_only
def test_a_map_that_is_killed_goes_on_where_it_was_in_another_process(path, calls):
    again, _ = killed_and_resumed(path, calls, 600, [100, 350])
    assert again == 0
    assert polycephaly.resumed(path) == (600, 0, [])
    before = len(lines(calls))
    done = run_script(KILLED, path, calls, "600", "0", env={"PYTHONHASHSEED": "7"})
    assert (done.returncode, len(lines(calls))) == (0, before), done.stderr


@pytest.mark.slow
@pytest.mark.guarantee("pool-15")
@local_only
def test_ten_thousand_calls_killed_at_three_moments(path, calls):
    again, others = killed_and_resumed(path, calls, 10_000, [500, 4_000, 8_000])
    assert again == 0
    print(f"{others} calls made again")


CTRL_C = """
import os, signal, sys, threading, time
import polycephaly as poly
from faults import append

path, calls = sys.argv[1:]

def work(i):
    append(calls, str(i))
    if i == 10:
        time.sleep(1000)
    return i

with poly.Pool(2) as pool:
    try:
        for each in pool.map(work, range(1000), resume=path):
            if each == 9:
                os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print(poly.resumed(path).finished)
"""


@pytest.mark.guarantee("pool-15")
@local_only
def test_after_ctrl_c_what_has_finished_is_stored(path, calls):
    done = run_script(CTRL_C, path, calls)
    finished = int(done.stdout)
    assert finished >= 10
    assert finished == polycephaly.resumed(path).finished


UNREAD = """
import sys
import polycephaly as poly

def work(i):
    return i

pool = poly.Pool(2)
results = pool.map(work, range(4), resume=sys.argv[1])
pool.shutdown()
"""


@local_only
def test_a_program_that_ends_without_reading_has_stored_what_had_finished(path):
    assert output_of(UNREAD, path) == ""
    assert polycephaly.resumed(path).finished == 4
    assert os.listdir(os.path.dirname(path)) == ["run.db"]


@local_only
def test_drones_that_start_in_the_middle_do_no_harm(path):
    with poly.Pool(2) as pool:
        results = pool.map(abs, iter(range(3000)), resume=path)
        for i, each in enumerate(results):
            assert i == each
            if i % 500 == 100:
                pool.refresh()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert polycephaly.resumed(path).finished == 3000
