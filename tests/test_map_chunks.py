"""`Pool.map` in chunks, and calls that travel together: nothing may show that they do."""

import array
import contextlib
import copyreg
import ctypes
import datetime
import functools
import gc
import itertools
import operator
import os
import pathlib
import random
import re
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
from faults import Counting, append, block_for_ever, hold_until, lines, note, wait_for
from in_time import FakeReactor, dispatcher_of
from scripts import Script, output_of
from work import double, echo

import polycephaly as poly
from polycephaly.pool import map as map_module
from polycephaly.pool.chunk import Chunk
from polycephaly.pool.dispatcher import Dispatcher
from polycephaly.pool.handlers import handle_message, handle_records
from polycephaly.pool.interfaces import TaskOptions
from polycephaly.pool.map import Ordered, Unordered
from polycephaly.pool.map_source import Source
from polycephaly.wire.map_chunks import ITEMS, answers_head, pack_answers, pack_calls
from polycephaly.wire.messages import ANSWERS, pack_returned
from polycephaly.wire.shareable import bytes_together

PATIENCE = 60.0
SOAKS = int(os.environ.get("POLYCEPHALY_SOAKS", "3"))


@pytest.fixture
def dice():
    seed = int(os.environ.get("POLYCEPHALY_SEED", "0")) or random.randrange(1 << 32)
    print("POLYCEPHALY_SEED", seed)
    return random.Random(seed)


@pytest.fixture
def paths(tmp_path):
    return [str(tmp_path / name) for name in ("ran", "gate", "held")]


def test_calls_are_not_held_back_for_a_whole_chunk_while_the_drones_are_idle():
    reactor = FakeReactor()
    dispatcher = dispatcher_of(reactor, 2)
    stream = Ordered(
        Source(dispatcher, TaskOptions(), operator.neg, [iter("abc")]), None, None, None
    )
    sent = []

    def send(max_calls, send_next=stream.source.send_next):
        """The first two calls end before the third is sent: only then their length is known."""
        task = send_next(max_calls)
        reactor.turn()
        sent.append(task)
        if len(sent) == 2:
            for each in sent:
                each.handle.answers(each)
        return task

    stream.source.send_next = send
    for _ in range(3):  # once, unless the machine stands still
        stream.send_ahead()
    assert [task.count for task in sent if task is not None] == [1, 1, 1]


@pytest.mark.parametrize(
    ("inputs", "sent_each_time"),
    [
        pytest.param([iter("abcdef")], [1, 2, 3], id="of unknown origin"),
        # All at once: the thread has lost its core for a moment.
        pytest.param(["abcdef", itertools.repeat(0)], [4, 6, 6], id="at hand"),
    ],
)
def test_a_result_that_is_there_is_given_before_a_slow_input_is_taken(
    inputs, sent_each_time, monkeypatch
):
    reactor = FakeReactor()
    dispatcher, clock = dispatcher_of(reactor, 1), itertools.count()
    monkeypatch.setattr(map_module, "monotonic", lambda: next(clock))  # each input takes a second
    stream = Ordered(Source(dispatcher, TaskOptions(), operator.add, inputs), None, None, None)
    sent = []

    def send(max_calls, send_next=stream.source.send_next):
        task = send_next(1)
        if task is not None:
            sent.append(task)
            reactor.turn()
            task.handle.answers(task)
        return task

    stream.source.send_next = send
    counts = []
    for _ in range(3):
        for _ in range(2):  # as in `async for`
            stream.send_ahead()
        counts.append(len(sent))
        stream.take_next()
    assert counts == sent_each_time


pickled = []


class Counted:
    def __getstate__(self):
        pickled.append(self)
        return {}


def test_a_function_that_captures_what_may_change_is_pickled_once_for_a_map(pool):
    pickled.clear()
    captured = Counted()
    large = bytes(100_000)  # goes as a task by itself
    items = [0, 1, large, 2, large, large, 3]
    assert list(pool.map(lambda n: (captured, time.sleep(0.002), n)[2], items)) == items
    assert len(pickled) == 1


@pytest.mark.guarantee("work-12")
@pytest.mark.parametrize("width", [1, 2])
def test_each_call_of_a_map_has_its_own_copy_of_what_may_change_as_at_the_call_of_map(width):
    basket = ["there before"]

    def put(item):
        basket.append(item)
        return len(basket)

    async def put_in_a_coroutine(item):
        return put(item)

    large = bytes(100_000)
    items = [0, 1, large, large, *range(2000)]
    with poly.Pool(1, width=width) as pool:
        results = pool.map(put if width == 1 else put_in_a_coroutine, items)
        basket.append("too late")
        assert list(results) == [2] * len(items)


@pytest.mark.guarantee("work-12")
def test_calls_of_a_map_share_a_function_also_after_one_that_was_sent_alone_is_answered():
    with poly.Pool(1) as pool:
        captured: list[int] = []

        def count(item):
            captured.append(0)
            return len(captured)

        # The first map shows how short the calls are. Then an item that is too large for a chunk
        # has just been sent, alone, when 65 calls are on their way.
        assert list(pool.map(count, range(100))) == [1] * 100
        items = (bytes(100_000) if i % 2 else i for i in range(200))
        results = pool.map(count, items, buffersize=65)
        assert pool.doit(abs, -1) == 1  # all before it are answered
        assert list(results) == [1] * 200


@pytest.mark.guarantee("work-18")
def test_a_function_that_captures_what_may_change_is_sent_once_to_each_drone_of_a_map(pool):
    content = bytearray(1_000_000)
    assert list(pool.map(lambda i: i + len(content), range(400))) == [
        1_000_000 + i for i in range(400)
    ]
    sent = Counter()  # by drone: the spans of one message share its bytes evenly
    for span in pool.timeline.spans:
        sent[span.drone] += span.bytes_sent
    assert sent and all(1_000_000 < each < 1_100_000 for each in sent.values()), sent


def test_a_map_that_a_refresh_overtakes_is_pickled_for_the_new_drones():
    content = [1]
    with poly.Pool(1) as pool:
        results = pool.map(lambda i: i + len(content), range(100_000))
        assert next(results) == 1
        pool.refresh()
        assert list(results) == [*range(2, 100_001)]


# -- what is called --------------------------------------------------------------------------------


@dataclass
class Point:
    x: object
    y: object = None


class Scaler:
    def __init__(self, k):
        self.k = k
        self.called = 0

    def times(self, n):
        return n * self.k

    def __call__(self, n):
        self.called += 1
        return self.called, n * self.k


def both(a, b):
    return [a, b]


def wrapped(n):
    return [n]


async def double_in_green(n):
    return n * 2


def show(x):
    return type(x).__name__, repr(x)


def held_at(path, gate, held, which, i):
    """Notes each call, and those of `which` wait for the gate."""
    append(path, str(i))
    if i in which:
        append(held, str(i))
        hold_until(gate)
    return i


def held_then_dead(path, gate, held, which, i):
    held_at(path, gate, held, which, i)
    if i in which and len([each for each in lines(path) if int(each) == i]) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return i


def list_of_held(path, gate, held, which, i):
    return [held_at(path, gate, held, which, i)]


def fail_at(path, where, what, i):
    append(path, str(i))
    if i == where:
        raise what
    return i


def die_once(path, where, i):
    append(path, str(i))
    if i == where and lines(path).count(str(i)) == 1:
        os._exit(7)
    return i


def die_slowly(path, where, i):
    append(path, str(i))
    if i == where:
        os._exit(7)
    time.sleep(0.002)
    return i


def make_known_as_short(pool, fn):
    """So that the next calls of `fn` go in chunks, however slow this machine is."""
    pool._dispatcher.registry.define(fn).record_duration(0.03, 1000)


def ran(path):
    return Counter(number for number in map(int, lines(path)) if number >= 0)


def let_all_end(pool):
    """When this is back, the drones run nothing that was cancelled before."""
    for each in pool.everywhere(abs, -1):
        assert each.result(PATIENCE) == 1


def assert_nothing_goes_on(pool, path):
    let_all_end(pool)
    before = len(lines(path))
    let_all_end(pool)
    for p in [pool.promise(abs, -i) for i in range(300)]:
        p.result(PATIENCE)
    assert len(lines(path)) == before


# -- equal to the builtin map ----------------------------------------------------------------------


def a_value(dice, depth=2):
    kinds = [
        lambda: dice.randrange(-5, 300),
        lambda: dice.randrange(-(1 << 90), 1 << 90),
        lambda: dice.choice([0.0, -0.0, 1.5, float("inf"), 1e300]),
        lambda: complex(dice.randrange(3), 1),
        lambda: "é" * dice.choice([0, 1, 5, 255, 256, 257]),
        lambda: "s" * dice.choice([3, 3, 3, 300, 20_000]),
        lambda: bytes(dice.choice([0, 1, 256, 5000])),
        lambda: None,
        lambda: dice.random() < 0.5,
        lambda: bytearray(b"abc"),
        lambda: Fraction(dice.randrange(9), 7),
        lambda: frozenset([dice.randrange(9)]),
        lambda: range(dice.randrange(9)),
        lambda: signal.SIGTERM,
        lambda: Point(dice.randrange(9)),
    ]
    if depth:
        several = [a_value(dice, depth - 1) for _ in range(dice.randrange(4))]
        kinds += [
            lambda: tuple(several),
            lambda: list(several),
            lambda: dict(enumerate(several)),
            lambda: Point(several, tuple(several)),
        ] * 2  # fmt: skip
    return dice.choice(kinds)()


def values_of_one_kind(dice):
    like = dice.choice([int, float, str, bytes, bool, tuple, list, dict, Point, None])
    if like is None:
        return [None] * 400
    found, depth = (
        [],
        2 if like in (tuple, list, dict, Point) else 0,
    )  # not to make thousands of what is not asked for
    while len(found) < 400:
        value = a_value(dice, depth)
        if type(value) is like:
            found.append(value)
    return found


def a_source(dice, items):
    return dice.choice([
        lambda: items,
        lambda: tuple(items),
        lambda: iter(items),
        lambda: (each for each in items),
        lambda: Counting(items),
        lambda: itertools.islice(itertools.cycle(items), len(items)),
        lambda: range(
            dice.randrange(-50, 50), dice.randrange(-900, 900), dice.choice([-7, -1, 1, 3])
        ),
        lambda: range(5000)[dice.randrange(9) :: 5][::-1],
        lambda: "some letters" * 30,
        lambda: b"some bytes" * 30,
        lambda: dict.fromkeys(range(300)),
        list,
    ])()  # fmt: skip


@pytest.mark.guarantee("pool-7")
def test_map_is_the_builtin_map_for_whatever_items_and_sources(pool, dice):
    for _ in range(10):
        mixed = (
            [a_value(dice) for _ in range(400)] if dice.random() < 0.5 else values_of_one_kind(dice)
        )
        seed, count = dice.random(), dice.choice([1, 1, 1, 2, 3])

        def sources(seed=seed, count=count, mixed=mixed):
            again = random.Random(seed)
            return [a_source(again, mixed[again.randrange(200) :]) for _ in range(count)]

        fn = show if count == 1 else both if count == 2 else zip_three
        kwargs = {"buffersize": dice.choice([1, 7, 300])} if dice.random() < 0.3 else {}
        wanted = list(map(fn, *sources()))
        said = list(pool.map(fn, *sources(), **kwargs))
        assert repr(said) == repr(wanted)
        unordered = list(pool.map(fn, *sources(), ordered=False, **kwargs))
        assert Counter(map(repr, unordered)) == Counter(map(repr, wanted))


def zip_three(a, b, c):
    return (a, b), c


def functions(k):
    return [
        echo,
        lambda x: (k, x),
        lambda x, of=k: [of, x],
        functools.partial(both, k),
        functools.partial(both, [k]),
        repr,
        str,
        Scaler(k).times,
        Point,
        operator.neg,
        operator.attrgetter("real"),
        (7).__add__,
        double_in_green,
    ]


@pytest.mark.guarantee("pool-7")
def test_map_is_the_builtin_map_for_whatever_is_called(pool):
    for fn in functions(3):
        for items in (range(700), [*range(300), True, 2.5]):
            wanted = [n * 2 for n in items] if fn is double_in_green else list(map(fn, items))
            assert repr(list(pool.map(fn, items))) == repr(wanted)


def test_a_function_of_main_and_what_it_names_is_called():
    said = output_of(
        """
        import polycephaly as poly
        table = {n: n * n for n in range(1000)}
        class Thing:
            def __init__(self, n): self.n = n
            def __eq__(self, other): return type(other) is Thing and other.n == self.n
        def look_up(n): return table[n]
        def make(n): return Thing(n)
        with poly.Pool(2) as pool:
            for _ in range(3):
                print(list(pool.map(look_up, range(1000))) == list(map(look_up, range(1000))))
                print(list(pool.map(make, range(1000))) == list(map(make, range(1000))))
                print(
                    list(pool.map(lambda t: table[t.n], map(Thing, range(1000))))
                    == list(table.values())
                )
        """
    )
    assert said.split() == ["True"] * 9


def test_a_stateful_callable_is_as_it_was_when_map_was_called(pool):
    scaler = Scaler(3)
    assert list(pool.map(scaler, range(2000))) == [(1, 3 * n) for n in range(2000)]
    assert scaler.called == 0
    results = pool.map(scaler, range(6), buffersize=1)
    said = []
    for k, result in zip(itertools.count(4), results):
        said.append(result)
        scaler.k = k
    assert said == [(1, 3 * n) for n in range(6)]


def test_what_a_call_does_to_its_argument_is_seen_by_nobody_else(pool):
    def spoil(box):
        box.append("spoilt")
        return box

    box = [1]
    items = [box] * 800 + [[2]] * 5
    assert list(pool.map(spoil, items)) == [[1, "spoilt"]] * 800 + [[2, "spoilt"]] * 5
    assert box == [1]
    pairs = list(pool.map(lambda a, b: (a is b, b.append(1), a)[::2], [box] * 500, [box] * 500))
    assert pairs == [(True, [1, 1])] * 500 and box == [1]
    nested = list(pool.map(lambda pair: (pair[0].append(0), pair[1])[1], [(box, box)] * 500))
    assert nested == [[1, 0]] * 500


last_ones: list[int] = []


def keep_the_last_ones(n):
    last_ones.append(n)
    del last_ones[:-3]
    return last_ones


@pytest.mark.guarantee("pool-7")
def test_two_results_never_share_an_object(pool):
    results = list(pool.map(wrapped, range(900)))
    assert len({id(each) for each in results}) == 900
    boxes = list(pool.map(echo, [[0]] * 900))
    boxes[0].append(1)
    assert boxes[1:] == [[0]] * 899


def test_a_result_is_as_it_was_when_it_was_returned():
    with poly.Pool(1) as pool:
        make_known_as_short(pool, keep_the_last_ones)
        said = list(pool.map(keep_the_last_ones, range(900)))
        # Where a chunk is cut, others come between.
        assert [each[-1] for each in said] == [*range(900)]
        made = [pool.promise(keep_the_last_ones, n) for n in range(900)]
        assert [p.result(PATIENCE)[-1] for p in made] == [*range(900)]


@pytest.mark.guarantee("pool-7")
def test_an_item_is_as_it_was_when_it_was_taken(pool):
    def growing():
        box = []
        for n in range(1500):
            box.append(n)
            yield box

    assert list(pool.map(len, growing())) == list(range(1, 1501))
    items = [[n] for n in range(400)]
    results = pool.map(echo, Counting(items))
    first = next(results)
    for each in items:
        each.append("later")
    rest = list(results)
    taken = sum(len(each) == 1 for each in [first, *rest])
    assert [first, *rest] == [[n] for n in range(taken)] + [[n, "later"] for n in range(taken, 400)]
    items = [[n] for n in range(10)]
    said = []
    for each in pool.map(echo, items, buffersize=1):
        said.append(each)
        items[9].append(len(said))
    assert said[9] == [9, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_inputs_are_taken_one_after_another_in_the_callers_thread_and_not_far_ahead(pool):
    threads = set()
    make_known_as_short(pool, echo)

    def source():
        for n in itertools.count():
            threads.add(threading.get_ident())
            yield n

    counting = Counting(source())
    results = pool.map(echo, counting)
    for n in range(3000):
        assert next(results) == n
        assert counting.taken <= n + 1 + 8192
    assert threads == {threading.get_ident()}
    results.close()
    assert counting.taken < 3000 + 8192


def test_buffersize_bounds_chunks_too(pool):
    make_known_as_short(pool, echo)
    for size in (1, 2, 40, 500):
        counting = Counting(itertools.count())
        results = pool.map(echo, counting, buffersize=size)
        for n in range(max(100, 2 * size)):
            assert next(results) == n
            assert counting.taken <= n + 1 + size
        results.close()


@pytest.mark.parametrize("ordered", [True, False])
def test_an_error_of_the_input_comes_after_the_results_of_what_came_before_it(pool, ordered):
    make_known_as_short(pool, double)

    def broken(items):
        yield from items
        raise KeyError("input")

    for items in (range(1700), [[n] for n in range(300)], []):
        results = pool.map(double, broken(items), ordered=ordered)
        said = []
        with pytest.raises(KeyError, match="input"):
            for each in results:
                said.append(each)
        assert sorted(said) == [n * 2 for n in items]
        assert list(results) == []


@pytest.mark.parametrize("source", [lambda d: d, iter], ids=["dict", "iterator"])
def test_a_plain_input_that_breaks_does_so_in_its_place_too(pool, paths, source):
    known = functools.partial(note, paths[0])
    make_known_as_short(pool, known)
    items = dict.fromkeys(range(50_000))
    results = pool.map(known, source(items))
    said = [next(results)]
    let_all_end(pool)
    items["one more"] = None
    with pytest.raises(RuntimeError, match="changed size"):
        for each in results:
            said.append(each)
    assert said == sorted(ran(paths[0])) and len(said) > 1


def test_ranges_of_any_length_are_taken(pool):
    for items in (range(10**20), range(-(10**20), 10**25, 10**18), range(10**30, 0, -1)):
        results = pool.map(double, items)
        assert list(itertools.islice(results, 2000)) == [
            n * 2 for n in itertools.islice(items, 2000)
        ]
        results.close()


def test_a_length_hint_that_fails_harms_nobody(pool):
    class Shy(Counting):
        def __length_hint__(self):
            raise ValueError("nobody knows")

    assert list(pool.map(double, Shy(range(2000)))) == [n * 2 for n in range(2000)]


def test_length_hints_are_not_believed(pool):
    class Liar(Counting):
        hint = 0

        def __length_hint__(self):
            return self.hint

    for hint in (0, 1, 10**9):
        liar = Liar(range(2000))
        liar.hint = hint
        assert list(pool.map(double, liar)) == [n * 2 for n in range(2000)]


def test_maps_of_several_threads_and_promises_beside_them_are_all_right(pool):
    wrong = []

    def mapping(k):
        fn = (double, wrapped, functools.partial(both, k), lambda n: n + k)[k % 4]
        for ordered in (True, False):
            said = list(pool.map(fn, range(1000), ordered=ordered))
            if (said if ordered else sorted(said)) != list(map(fn, range(1000))):
                wrong.append((k, ordered))

    def promising(k):
        said = [p.result(PATIENCE) for p in [pool.promise(pow, n, k) for n in range(500)]]
        if said != [n**k for n in range(500)]:
            wrong.append(k)

    threads = [threading.Thread(target=mapping, args=[k]) for k in range(4)]
    threads += [threading.Thread(target=promising, args=[k]) for k in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE)
        assert not each.is_alive()
    assert not wrong


def test_a_drone_may_map_with_drones_of_its_own(pool):
    def inner(k):
        with poly.Pool(1) as own:
            return list(own.map(double, range(k)))

    assert list(pool.map(inner, [300, 301, 302])) == [
        list(map(double, range(k))) for k in (300, 301, 302)
    ]


def test_a_refresh_in_the_middle_loses_nothing(pool, paths):
    results = pool.map(functools.partial(note, paths[0]), range(6000))
    said = [next(results) for _ in range(500)]
    pool.refresh()
    assert said + list(results) == list(range(6000))
    assert set(ran(paths[0]).values()) == {1} and len(ran(paths[0])) == 6000


# -- errors in their place -------------------------------------------------------------------------


class NotToBeSent(Exception):
    def __init__(self):
        super().__init__("with a lock")
        self.lock = threading.Lock()


def explode_elsewhere(pid, home):
    if (os.getpid() == pid) == home:
        raise LookupError("not here")
    return 0


class Explosive:
    """Cannot be unpickled at home, or anywhere else."""

    def __init__(self, home):
        self.home = home

    def __reduce__(self):
        return explode_elsewhere, (int(os.environ["TEST_HOME"]), self.home)


@pytest.fixture
def home_is_known(monkeypatch):
    monkeypatch.setenv("TEST_HOME", str(os.getpid()))


@pytest.mark.parametrize(
    "error", [ValueError(5), SystemExit(3), KeyboardInterrupt(), GeneratorExit()]
)
@pytest.mark.parametrize("ordered", [True, False])
def test_an_error_is_raised_where_it_belongs_and_ends_the_map(pool, paths, error, ordered):
    pids = {d.pid for d in pool.drones}
    fn = functools.partial(fail_at, paths[0], 700, error)
    make_known_as_short(pool, fn)
    results = pool.map(fn, range(20_000), ordered=ordered)
    said = []
    with pytest.raises(type(error)) as raised:
        for each in results:
            said.append(each)
    assert raised.value.args == error.args
    assert "in fail_at" in str(raised.value.__cause__)
    if ordered:
        assert said == list(range(700))
    else:
        assert len(set(said)) == len(said) and 700 not in said
    assert next(results, "none") == "none"
    assert set(ran(paths[0]).values()) == {1}
    assert_nothing_goes_on(pool, paths[0])
    assert len(ran(paths[0])) < 20_000
    assert {d.pid for d in pool.drones} == pids


def test_a_call_that_raises_stop_iteration_does_not_end_the_map_in_silence(pool, paths):
    fn = functools.partial(fail_at, paths[0], 700, StopIteration(4))
    make_known_as_short(pool, fn)
    results = pool.map(fn, range(2000))
    assert [next(results) for _ in range(700)] == list(range(700))
    with pytest.raises(RuntimeError) as raised:  # as the standard library's executors have it
        next(results)
    assert isinstance(raised.value.__cause__, StopIteration) and raised.value.__cause__.args == (4,)


def not_to_be_sent(n):
    return threading.Lock() if n == 700 else n


def raise_what_cannot_be_sent(n):
    if n == 700:
        raise NotToBeSent
    return n


def raise_with_arrays(n):
    if n == 700:
        error = ArithmeticError("arrays")
        error.array = numpy.arange(100_000)
        raise error
    return n


def give_what_cannot_be_opened(n):
    return [n] if n != 700 else Explosive(home=True)


def give_what_cannot_be_opened_and_block(path, n):
    for _ in range(6):
        append(path, str(n))
    if n > 200:
        block_for_ever()
    return [n] if n != 50 else Explosive(home=True)


@pytest.mark.parametrize("fn, kind, said", [
    (not_to_be_sent, TypeError, "lock"),
    (raise_what_cannot_be_sent, poly.RemoteError, "NotToBeSent: with a lock"),
    (raise_with_arrays, ArithmeticError, "arrays"),
    (give_what_cannot_be_opened, LookupError, "not here"),
])  # fmt: skip
def test_what_cannot_come_home_is_an_error_in_its_place(pool, home_is_known, fn, kind, said):
    with poly.Pool(2) as pool:
        make_known_as_short(pool, fn)
        results = pool.map(fn, range(2000))
        before = [next(results) for _ in range(700)]
        assert before == (
            list(range(700)) if fn is not give_what_cannot_be_opened else [[n] for n in range(700)]
        )
        with pytest.raises(kind, match=said) as raised:
            next(results)
        if fn is raise_with_arrays:
            assert (raised.value.array == numpy.arange(100_000)).all()
        if fn is not_to_be_sent:
            assert "while pickling the result, a lock" in str(raised.value.__notes__)
        if fn in (raise_what_cannot_be_sent, raise_with_arrays):
            assert f"in {fn.__name__}" in str(raised.value.__cause__)
        assert list(results) == []
        assert list(pool.map(fn, range(300))) == before[:300]


def test_a_result_that_does_not_unpickle_at_home_cancels_the_rest_at_once(home_is_known, paths):
    with poly.Pool(2) as pool:
        fn = functools.partial(give_what_cannot_be_opened_and_block, paths[0])
        make_known_as_short(pool, fn)
        results = pool.map(fn, range(5000), buffersize=400, timeout=PATIENCE)
        assert [next(results) for _ in range(50)] == [[n] for n in range(50)]
        with pytest.raises(LookupError):
            next(results)
        assert [p.result(PATIENCE) for p in pool.everywhere(abs, -1)] == [
            1,
            1,
        ]  # though `results` is still there
        results.close()


class Locked:
    def __init__(self):
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    "bad", [Locked(), Explosive(home=False)], ids=["unpicklable", "not to be opened"]
)
def test_an_item_that_cannot_be_sent_is_an_error_in_its_place(pool, home_is_known, bad):
    with poly.Pool(2) as pool:
        make_known_as_short(pool, echo)
        for around in ([0] * 300, [[0]] * 300):
            results = pool.map(echo, [*around, bad, *around])
            assert [next(results) for _ in around] == around
            with pytest.raises((TypeError, LookupError)) as raised:
                next(results)
            assert "pickling the arguments of echo" in str(raised.value.__notes__)
            assert list(results) == []
        assert list(pool.map(type, [1, [1]])) == [int, list]


# -- chunks are cut --------------------------------------------------------------------------------


@pytest.mark.guarantee("pool-8")
@pytest.mark.parametrize("fn", [held_at, list_of_held])
@pytest.mark.parametrize("where", [0, 1, 777, 1999])
def test_one_call_that_takes_long_keeps_no_other_waiting(pool, paths, fn, where):
    known = functools.partial(fn, *paths, {where})
    make_known_as_short(pool, known)
    results = pool.map(known, range(2000), ordered=False, timeout=PATIENCE)
    said = [next(results) for _ in range(1999)]
    wanted = [n for n in range(2000) if n != where]
    assert sorted(said) == (wanted if fn is held_at else [[n] for n in wanted])
    append(paths[1], "open")
    assert list(results) == ([where] if fn is held_at else [[where]])
    assert ran(paths[0]) == Counter(range(2000))


@pytest.mark.guarantee("pool-9")
def test_what_is_done_of_a_chunk_is_given_while_its_next_call_runs(pool, paths):
    known = functools.partial(
        held_at, *paths, {400}
    )  # the other drone runs what a chunk before may give back
    make_known_as_short(pool, known)
    results = pool.map(known, range(2000), timeout=PATIENCE)
    assert [next(results) for _ in range(400)] == list(range(400))
    append(paths[1], "open")
    assert list(results) == list(range(400, 2000))
    assert ran(paths[0]) == Counter(range(2000))


def test_those_after_a_long_call_are_run_before_it_ends_and_given_in_order(pool, paths):
    known = functools.partial(held_at, *paths, {100})
    make_known_as_short(pool, known)
    source = Counting(range(5000))
    results = pool.map(known, source, timeout=PATIENCE)
    assert [next(results) for _ in range(100)] == list(range(100))
    wait_for(lambda: len(ran(paths[0])) == source.taken > 110)
    append(paths[1], "open")
    assert list(results) == list(range(100, 5000))
    assert ran(paths[0]) == Counter(range(5000))


def test_as_many_long_calls_as_drones_but_one(paths):
    which = {5, 6, 700}
    known = functools.partial(held_at, *paths, which)
    with poly.Pool(4) as pool:
        make_known_as_short(pool, known)
        results = pool.map(known, range(1500), ordered=False, timeout=PATIENCE)
        assert sorted(next(results) for _ in range(1497)) == [
            n for n in range(1500) if n not in which
        ]
        append(paths[1], "open")
        assert set(results) == which
        assert ran(paths[0]) == Counter(range(1500))


def slow_now_and_then(path, i):
    append(path, str(i))
    if i % 40 == 13:
        time.sleep(0.012)
    return [i, bytes(abs(i))] if i % 3 else i


@pytest.mark.parametrize("drones", [1, 2])
@pytest.mark.slow
def test_many_cuts_in_a_row(paths, drones):
    known = functools.partial(slow_now_and_then, paths[0])
    with poly.Pool(drones) as pool:
        for _ in range(3):
            make_known_as_short(pool, known)
            wanted = [[i, bytes(i)] if i % 3 else i for i in range(1000)]
            assert list(pool.map(known, range(1000))) == wanted
            assert ran(paths[0]) == Counter(range(1000))
            os.unlink(paths[0])


def holding_the_interpreter(path, i):
    append(path, str(i))
    if i % 300 == 150:
        ctypes.PyDLL(None).usleep(40_000)
    return i


def test_calls_that_hold_the_interpreter_are_run_once_too(pool, paths):
    known = functools.partial(holding_the_interpreter, paths[0])
    make_known_as_short(pool, known)
    assert list(pool.map(known, range(1500))) == list(range(1500))
    assert sorted(pool.map(known, range(1500, 3000), ordered=False)) == list(range(1500, 3000))
    assert ran(paths[0]) == Counter(range(3000))


def held_at_last(gate, i):
    return hold_until(gate) if i == 9 else i


@pytest.mark.guarantee("pool-8")
def test_a_call_that_takes_long_does_not_keep_back_what_was_done_before_it(paths):
    known = functools.partial(held_at_last, paths[1])
    with poly.Pool(1) as pool:
        for p in [pool.promise(known, -1) for _ in range(1000)]:
            p.result(PATIENCE)
        made = [pool.promise(known, i) for i in range(10)]
        try:
            assert [p.result(PATIENCE) for p in made[:9]] == list(range(9))
        finally:
            append(paths[1], "open")
        assert made[9].result(PATIENCE) == "held"


# -- as the caller says ----------------------------------------------------------------------------


def pid_of(*args):
    return os.getpid()


@pytest.mark.guarantee("pool-16")
@pytest.mark.parametrize(
    "items",
    [
        range(43), list("x" * 43), [{"n": n} for n in range(43)], [numpy.zeros(50_000)] * 43,
        [bytes(100_000)] * 43, ["x" * n for n in range(43)],
    ],
    ids=["range", "texts", "dicts", "arrays", "bytes", "more and more"],
)  # fmt: skip
@pytest.mark.parametrize("form", [list, iter])
def test_as_many_consecutive_calls_as_chunksize_says_are_run_by_one_drone(pool, items, form):
    items = items if form is list else iter(items)
    pids = list(pool.map(pid_of, items, chunksize=10))
    assert [len(set(pids[at : at + 10])) for at in range(0, 43, 10)] == [1] * 5
    pids = list(pool.map(pid_of, range(43), range(43), chunksize=10))
    assert [len(set(pids[at : at + 10])) for at in range(0, 43, 10)] == [1] * 5


@pytest.mark.guarantee("pool-16")
def test_a_chunk_of_a_given_size_that_has_begun_is_not_divided(pool, paths):
    known = functools.partial(held_at, *paths, {42})
    results = pool.map(known, range(100), chunksize=10, ordered=False, timeout=PATIENCE)
    said = [next(results) for _ in range(92)]
    assert sorted(said) == [n for n in range(100) if n < 42 or n >= 50]
    time.sleep(0.1)  # the other drone has nothing to do
    assert sorted(ran(paths[0])) == [n for n in range(100) if n <= 42 or n >= 50]
    append(paths[1], "open")
    assert list(results) == [*range(42, 50)]
    assert ran(paths[0]) == Counter(range(100))


def test_a_chunk_of_a_given_size_is_sent_in_full_whatever_the_buffersize(pool):
    source = Counting(range(1000))
    results = pool.map(pid_of, source, chunksize=50, buffersize=2)
    assert source.taken == 100
    assert len(list(results)) == 1000


def test_errors_and_what_cannot_be_sent_come_in_their_places_in_chunks_of_a_given_size(pool):
    items = [3, 2, threading.Lock(), 1, 0, 1]
    results = pool.map(operator.neg, items, chunksize=6)
    assert [next(results), next(results)] == [-3, -2]
    with pytest.raises(TypeError, match="pickle") as raised:
        next(results)
    assert any("item 2" in note for note in raised.value.__notes__)
    results = pool.map(lambda n: 6 // n, [3, 2, 0, 1], chunksize=3)
    assert [next(results), next(results)] == [2, 3]
    with pytest.raises(ZeroDivisionError) as raised:
        next(results)
    assert raised.value.__notes__[-1].endswith("item 2: 0")
    outcomes = pool.map(lambda n: 6 // n, [3, 0, 1], chunksize=3, return_exceptions=True)
    assert [type(each) for each in outcomes] == [int, ZeroDivisionError, int]


def test_calls_of_a_chunk_of_a_given_size_have_each_their_own_time_limit():
    with poly.Pool(1, timeout=PATIENCE) as pool:
        assert list(pool.map(abs, range(20), chunksize=10)) == [*range(20)]


@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_a_chunksize_that_is_none_is_refused(pool, size):
    with pytest.raises((TypeError, ValueError), match="chunksize"):
        pool.map(abs, [1], chunksize=size)


# -- deaths ----------------------------------------------------------------------------------------


def test_the_death_of_one_of_the_longer_calls_is_raised_at_that_call(pool, paths):
    known = functools.partial(die_slowly, paths[0], 60)
    assert list(pool.map(known, range(20))) == list(range(20))
    results = pool.map(known, range(20, 400))
    assert [next(results) for _ in range(40)] == list(range(20, 60))
    with pytest.raises(poly.DroneDied) as raised:
        next(results)
    assert raised.value.exitcode == 7
    assert list(results) == []
    assert set(ran(paths[0]).values()) == {1}
    assert list(pool.map(double, range(500))) == list(map(double, range(500)))


def test_a_death_among_short_calls_is_raised_at_the_first_that_had_no_answer(pool, paths):
    known = functools.partial(die_once, paths[0], 700)
    for _ in range(4):
        make_known_as_short(pool, known)
        results = pool.map(known, range(3000))
        said = []
        with pytest.raises(poly.DroneDied) as raised:
            for each in results:
                said.append(each)
        assert raised.value.exitcode == 7
        assert said == list(range(len(said))) and len(said) <= 700
        (noted,) = raised.value.__notes__
        # Of a chunk of many calls, a few are marked together.
        several = re.fullmatch(r"in map\(die_once, ...\), one of the items (\d+) to (\d+)", noted)
        if several:
            first, last = map(int, several.groups())
            assert first <= 700 <= last
        else:
            assert noted == "in map(die_once, ...), item 700: 700"
            assert str(raised.value).endswith("while running die_once, item 700")
        assert set(ran(paths[0]).values()) == {1}
        assert_nothing_goes_on(pool, paths[0])
        os.unlink(paths[0])
    append(paths[0], "700")  # so that it has died once
    assert list(pool.map(known, range(3000))) == list(range(3000))


def test_with_retries_only_the_chunk_of_the_dead_is_run_again(paths):
    known = functools.partial(die_once, paths[0], 700)
    with poly.Pool(2, retries=1, output="discard") as pool:
        for ordered in (True, False):
            make_known_as_short(pool, known)
            assert sorted(pool.map(known, range(3000), ordered=ordered)) == list(range(3000))
            counts = ran(paths[0])
            again = sorted(n for n, count in counts.items() if count > 1)
            assert set(counts) == set(range(3000)) and max(counts.values()) == 2
            assert again[-1] == 700 and again == list(
                range(again[0], 701)
            )  # what had begun of one chunk, no more
            os.unlink(paths[0])


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("chunksize", [None, 300])
def test_after_the_error_of_a_death_no_call_of_the_chunk_begins(paths, ordered, chunksize):
    known = functools.partial(die_slowly, paths[0], 20)
    with poly.Pool(2, output="discard") as pool:
        if chunksize is None:
            make_known_as_short(pool, known)
        results = pool.map(known, range(300), chunksize=chunksize, ordered=ordered)
        with pytest.raises(poly.DroneDied):
            list(results)
        del results
        assert_nothing_goes_on(pool, paths[0])
        assert max(ran(paths[0])) < 299


def test_a_chunk_that_is_divided_as_it_is_sent_is_given_in_full_if_unordered():
    """Before the consumer has the chunk that it has just sent."""
    reactor = FakeReactor()
    dispatcher = dispatcher_of(reactor, 2)
    source = Source(dispatcher, TaskOptions(), operator.neg, [range(40)], chunksize=40)
    source.chunksize = None
    source._definition.seconds = 1e-4
    send_next, stream = source.send_next, Unordered(source, None, None, None)
    answer = functools.partial(answer_chunk, dispatcher)

    def send(max_calls):
        chunk = send_next(40)
        if chunk is not None:
            reactor.turn()
            handle_message(dispatcher, chunk.handle, pack_returned([(chunk.number, 30)]))
            for _ in range(9):
                reactor.turn()
                for handle in dispatcher.handles:
                    for task in [*handle.in_flight.values()]:
                        answer(handle, task)
            reactor.turn()
        return chunk

    source.send_next = send
    stream.send_ahead()
    given = []
    while (taken := stream.take_next())[0]:
        given += taken[1].answers.values
    assert sorted(given) == [*range(40)]


def answer_chunk(dispatcher, handle, chunk):
    """All its calls, each with its item."""
    values = [chunk.first_item + n for n in range(chunk.answered, chunk.count)]
    answers = answers_head(chunk.answered, len(values), False)
    answers += pack_answers(values, False, None, None)
    outcome = (chunk.number, ANSWERS, 0.0, 0.001, answers, b"")
    handle_records(dispatcher, handle, {0: outcome})


def test_a_wait_for_results_goes_on_where_a_chunk_ends_and_the_next_is_not_done(monkeypatch):
    reactor = FakeReactor()
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    monkeypatch.setattr(dispatcher, "note_waiting_thread", lambda: None)
    source = Source(dispatcher, TaskOptions(), operator.neg, [range(20)], chunksize=10)
    results = map_module.start_map(Ordered(source, None, None, None))
    reactor.turn()
    answer_chunk(dispatcher, handle, next(iter(handle.in_flight.values())))
    reactor.turn()
    assert results.wait(0.0) and list(results.take_batch()) == [*range(10)]
    assert not results.wait(0.01)
    results.close()


@pytest.mark.parametrize("retries", [0, 1])
def test_a_call_that_dies_after_its_chunk_was_cut_takes_nothing_along(paths, retries):
    known = functools.partial(held_then_dead, *paths, {700})
    with poly.Pool(2, retries=retries, output="discard") as pool:
        make_known_as_short(pool, known)
        results = pool.map(known, range(2000), ordered=False, timeout=PATIENCE)
        said = [next(results) for _ in range(1999)]
        assert sorted(said) == [n for n in range(2000) if n != 700]
        append(paths[1], "open")
        if retries:
            assert list(results) == [700]
        else:
            with pytest.raises(poly.DroneDied, match="while running held_then_dead, item 700"):
                next(results)
        assert ran(paths[0]) == Counter(range(2000)) + Counter({700: retries})
        assert list(pool.map(double, range(500))) == list(map(double, range(500)))


def dead_at_once_then_after_a_cut(path, gate, held, which, i):
    append(path, str(i))
    if i in which:
        if lines(path).count(str(i)) > 1:
            append(held, str(i))
            hold_until(gate)
        os._exit(7)
    return i


def test_a_try_that_was_used_up_is_not_given_back_by_a_cut(paths):
    known = functools.partial(dead_at_once_then_after_a_cut, *paths, {700})
    with poly.Pool(2, retries=1, output="discard") as pool:
        make_known_as_short(pool, known)
        results = pool.map(known, range(2000), ordered=False, timeout=PATIENCE)
        assert sorted(next(results) for _ in range(1999)) == [n for n in range(2000) if n != 700]
        assert len(lines(paths[2])) == 1
        append(paths[1], "open")
        with pytest.raises(poly.DroneDied):
            next(results)
        assert ran(paths[0])[700] == 2 and max(ran(paths[0]).values()) == 2


def test_a_call_that_always_kills_is_tried_so_often_and_then_told(paths):
    known = functools.partial(die_slowly, paths[0], 30)
    with poly.Pool(2, retries=2, output="discard") as pool:
        results = pool.map(known, range(60))
        assert [next(results) for _ in range(30)] == list(range(30))
        with pytest.raises(poly.DroneDied):
            next(results)
        assert ran(paths[0])[30] == 3
        assert max(count for n, count in ran(paths[0]).items() if n != 30) == 1


# -- exactly once, in whatever weather -------------------------------------------------------------


def weather(path, i, seconds, size):
    append(path, str(i))
    if seconds:
        time.sleep(seconds)
    return (i, seconds) if size == 0 else [i, seconds, bytes(size)]


def forecast(i, seconds, size):
    return (i, seconds) if size == 0 else [i, seconds, bytes(size)]


def rows_of(dice, count):
    long = dice.choice([0.0, 0.01, 0.05])
    rows = []
    for i in range(count):
        seconds = 0.0
        if dice.random() < long:
            seconds = dice.choice([0.0001, 0.005, 0.05])
        rows.append(
            (
                i,
                seconds,
                dice.choice([0, 0, 0, 0, 3, 300, 20_000, 100_000][: dice.choice([4, 5, 8])]),
            )
        )
    return rows


@pytest.mark.parametrize("round_", range(SOAKS))
@pytest.mark.slow
def test_in_any_weather_each_item_is_run_once_and_given_once(round_, dice, tmp_path):
    with poly.Pool(dice.randrange(1, 5)) as pool:
        for each in range(4):
            path = str(tmp_path / f"ran-{each}")
            rows = rows_of(dice, dice.choice([50, 400, 1200]))
            kwargs = {"buffersize": dice.choice([1, 3, 100])} if dice.random() < 0.25 else {}
            ordered = dice.random() < 0.6
            results = pool.map(
                functools.partial(weather, path),
                *zip(*rows, strict=True),
                ordered=ordered,
                **kwargs,
            )
            wanted = [forecast(*row) for row in rows]
            fate = dice.choice(["end", "end", "close", "drop"])
            stop = len(rows) if fate == "end" else dice.randrange(len(rows))
            said = list(itertools.islice(results, stop))
            if fate == "end":
                assert next(results, None) is None
            elif fate == "close":
                results.close()
            del results
            if ordered:
                assert said == wanted[:stop]
            else:
                said.sort(key=lambda value: value[0])
                assert len(said) == stop and len({value[0] for value in said}) == stop
                assert all(value == wanted[value[0]] for value in said)
            if fate != "end":
                assert_nothing_goes_on(pool, path)
            counts = ran(path)
            assert set(counts.values()) <= {1}
            assert {value[0] for value in said} <= set(counts)
            assert fate != "end" or len(counts) == len(rows)


def kill_now_and_then(pool, dice, over):
    while not over.wait(dice.random() * 0.05):
        with contextlib.suppress(ProcessLookupError, poly.DroneDied, CancelledError):
            os.kill(pool.promise(os.getpid).result(PATIENCE), signal.SIGKILL)  # one that is ready


@pytest.mark.parametrize("round_", range(SOAKS))
@pytest.mark.parametrize("retries", [0, 1000])
@pytest.mark.slow
def test_though_drones_are_killed_nothing_is_lost_or_given_twice(round_, retries, dice, tmp_path):
    with poly.Pool(dice.randrange(1, 4), retries=retries, output="discard") as pool:
        over = threading.Event()
        killer = threading.Thread(
            target=kill_now_and_then, args=(pool, random.Random(dice.random()), over)
        )
        killer.start()
        try:
            for each in range(4):
                path = str(tmp_path / f"ran-{each}")
                rows = rows_of(dice, 400)
                ordered = dice.random() < 0.6
                fn = functools.partial(weather, path)
                wanted = [forecast(*row) for row in rows]
                said, error = [], None
                results = pool.map(fn, *zip(*rows, strict=True), ordered=ordered)
                try:
                    for value in results:
                        said.append(value)
                except poly.DroneDied as died:
                    error = died
                assert error is None or not retries
                assert next(results, None) is None
                given = [value[0] for value in said]
                if ordered:
                    assert said == wanted[: len(said)]
                assert len(set(given)) == len(given)
                assert all(value == wanted[value[0]] for value in said)
                counts = ran(path)
                assert error is not None or len(said) == len(rows)
                assert set(given) <= set(counts)
                assert retries or set(counts.values()) <= {1}
        finally:
            over.set()
            killer.join()
        assert pool.promise(abs, -1).result(PATIENCE) == 1


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [note, weather])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("how", ["close", "drop", "throw"])
def test_who_ends_the_iterator_ends_the_work(pool, paths, fn, ordered, how):
    known = functools.partial(fn, paths[0])
    more = [itertools.repeat(0), itertools.repeat(3)] if fn is weather else []
    assert len(list(pool.map(known, range(-3000, 0), *more))) == 3000
    results = pool.map(known, itertools.count(), *more, ordered=ordered)
    assert len([next(results) for _ in range(1000)]) == 1000
    if how == "close":
        results.close()
        results.close()
        assert list(itertools.islice(results, 9)) == []
    elif how == "drop":
        del results
        gc.collect()
    else:
        with pytest.raises(ZeroDivisionError):
            for each in results:
                each / 0 if fn is note else 1 / 0
        del results
        gc.collect()
    assert_nothing_goes_on(pool, paths[0])
    counts = ran(paths[0])
    assert set(counts.values()) == {1} and len(counts) <= 1001 + 8192 + 2048
    assert list(pool.map(double, range(1000))) == list(map(double, range(1000)))


def test_a_chunk_that_was_cut_is_cancelled_with_all_that_follows_it(pool, paths):
    known = functools.partial(
        held_at, *paths, {300}
    )  # the other drone runs what a chunk before may give back
    make_known_as_short(pool, known)
    pids = {d.pid for d in pool.drones}
    results = pool.map(known, range(3000), timeout=PATIENCE)
    assert [next(results) for _ in range(300)] == list(range(300))
    wait_for(lambda: lines(paths[2]))
    results.close()
    assert_nothing_goes_on(pool, paths[0])
    assert {d.pid for d in pool.drones} == pids
    assert set(ran(paths[0]).values()) == {1}


def test_a_chunk_that_was_cut_again_and_again_is_cancelled_with_all_that_follows_it():
    """While no result is taken, each rest may be cut in turn, and the rests stay a chain."""
    reactor, cuts = FakeReactor(), sys.getrecursionlimit()
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    calls = pack_calls(ITEMS, False, range(cuts + 1))
    first = Chunk(dispatcher, dispatcher.registry.define(operator.neg), calls, cuts + 1)
    dispatcher.submit_task(first)
    for rest in range(cuts, 0, -1):
        reactor.turn()
        [last] = handle.in_flight.values()
        handle_message(dispatcher, handle, pack_returned([(last.number, rest)]))
        answers = answers_head(0, 1, False) + pack_answers([0], False, None, None)
        outcome = (last.number, ANSWERS, 0.0, 0.0, answers, b"")
        handle_records(dispatcher, handle, {0: outcome})
    reactor.turn()
    [last] = handle.in_flight.values()
    map_module._cancel([first])
    assert last.promise.cancelled()


@pytest.mark.slow
def test_closing_in_the_moment_of_a_cut_leaves_nothing_running(paths, dice):
    known = functools.partial(slow_now_and_then, paths[0])
    with poly.Pool(2) as pool:
        for _ in range(25):
            make_known_as_short(pool, known)
            results = pool.map(known, itertools.count())
            for _ in range(dice.randrange(1, 120)):
                next(results)
            results.close()
            let_all_end(pool)
            counts = ran(paths[0])
            assert set(counts.values()) == {1}
            os.unlink(paths[0])
            let_all_end(pool)
            assert not lines(paths[0])


@pytest.mark.parametrize("ordered", [True, False])
def test_a_time_limit_comes_after_what_was_done(pool, paths, ordered, monkeypatch):
    known = functools.partial(held_at, *paths, {300})
    make_known_as_short(pool, known)
    results = pool.map(known, range(400), timeout=1000, ordered=ordered)
    wanted = [n for n in range(300 if ordered else 400) if n != 300]
    said = [next(results) for _ in wanted]
    assert (said if ordered else sorted(said)) == wanted
    monkeypatch.setattr(map_module, "monotonic", lambda: time.monotonic() + 1000)
    with pytest.raises(TimeoutError):
        next(results)
    assert list(results) == []
    assert_nothing_goes_on(pool, paths[0])
    assert set(ran(paths[0]).values()) == {1}


def test_with_a_pools_time_limit_each_call_has_its_own(paths, later):
    known = functools.partial(held_at, *paths, {300})
    with poly.Pool(1, timeout=1000, output="discard") as pool:
        make_known_as_short(pool, known)
        results = pool.map(known, range(400))
        for n in range(300):
            assert next(results) == n
            if n % 100 == 0:
                later(pool, 600)  # the next call may run meanwhile
        wait_for(lambda: lines(paths[2]))
        later(pool, 1000)
        with pytest.raises(TimeoutError, match="more than 1000 s"):
            next(results)
        assert set(ran(paths[0]).values()) == {1}


@pytest.mark.guarantee("work-7")
def test_with_max_tasks_each_drone_makes_so_many_calls():
    with poly.Pool(2, max_tasks=25) as pool:
        done = Counter(pool.map(lambda n: os.getpid(), range(300)))
        assert max(done.values()) <= 25 and sum(done.values()) == 300


def test_a_pool_whose_block_fails_cancels_its_maps(paths):
    known = functools.partial(held_at, *paths, {300})
    with pytest.raises(ZeroDivisionError), poly.Pool(2) as pool:
        make_known_as_short(pool, known)
        results = pool.map(known, range(3000), timeout=PATIENCE)
        assert [next(results) for _ in range(300)] == list(range(300))
        wait_for(lambda: lines(paths[2]))
        1 / 0  # noqa: B018
    with pytest.raises((CancelledError, RuntimeError)):
        list(results)
    assert set(ran(paths[0]).values()) == {1}


def test_a_pool_that_is_shut_down_gives_what_was_under_way(paths):
    make_known = functools.partial(note, paths[0])
    pool = poly.Pool(2)
    make_known_as_short(pool, make_known)
    source = Counting(range(300_000))  # may be endless, to the pool
    results = pool.map(make_known, source)
    said = [next(results)]
    taken = source.taken
    pool.shutdown()
    assert len(ran(paths[0])) == taken
    with pytest.raises(RuntimeError):
        for each in results:
            said.append(each)
    assert said == list(range(taken))


def test_a_map_keeps_its_pool():
    assert list(poly.Pool(2).map(double, range(20_000))) == list(map(double, range(20_000)))


def test_an_interrupt_of_the_consumer_ends_the_work_and_leaves_the_pool():
    text = """
        import itertools, sys, time
        from faults import append, lines
        import polycephaly as poly

        def work(path, i):
            append(path, str(i))
            if i > 2000 or i % 50 == 49:
                time.sleep(0.02)
            return [i]

        # In the `try` itself, CPython 3.13 leaves the jump after an `if` out of it.
        def consume(results):
            for r in results:
                if r == [1000]:
                    print("ready", flush=True)

        path = sys.argv[1]
        with poly.Pool(2) as pool:
            list(pool.map(work, itertools.repeat(path, 1000), itertools.repeat(0)))
            results = pool.map(work, itertools.repeat(path), itertools.count(1))
            try:
                consume(results)
            except KeyboardInterrupt:
                results.close()
                assert list(results) == []
                print("interrupted", flush=True)
            for p in pool.everywhere(abs, -1):
                p.result(30)
            before = len(lines(path))
            for p in pool.everywhere(abs, -1):
                p.result(30)
            assert [
                p.result(30) for p in [pool.promise(abs, -i) for i in range(300)]
            ] == list(range(300))
            print(
                len(lines(path)) == before, list(pool.map(abs, range(500))) == list(range(500)),
                flush=True,
            )
    """
    for _ in range(2):
        with Script(text.replace("sys.argv[1]", "__file__ + '.ran'")) as script:
            script.read_until("ready")
            script.signal(signal.SIGINT)
            script.read_until("interrupted")
            assert script.read_line() == "True True"
            assert script.wait() == 0
            assert not script.left()


@pytest.mark.parametrize(
    "item", [abs, lambda i: (i, bytes(20_000)), lambda i: i % 9 or bytes(20_000)]
)
def test_a_call_that_was_sent_as_the_interrupt_came_is_cancelled_with_the_others(
    pool, item, monkeypatch
):
    """Between its sending and its entry among those that are under way."""
    sent = []

    def interrupted(send):
        def body(dispatcher, *args):
            made = send(dispatcher, *args) or args[-1].promise
            sent.append(made)
            if len(sent) == 10:
                raise KeyboardInterrupt
            return made

        return body

    list(pool.map(type, range(5000)))  # known as short
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        for name in ("submit_task", "submit"):
            patched.setattr(Dispatcher, name, interrupted(getattr(Dispatcher, name)))
        list(pool.map(type, map(item, range(10**6)) if item is not abs else range(10**6)))
    assert len(sent) == 10 and all(work.done() for work in sent)


# -- large results, and consumers that take their time ---------------------------------------------


def an_array(n):
    return numpy.full(100_000 if n % 5 else 12_500 * (n % 7), n)  # 0 to 800 kB


def arrays_and_more(n):
    return {
        "n": n,
        "array": numpy.full(20_000, n),
        "raw": array.array("d", [n]) * 10_000,
        "text": str(n) * 30_000,
    }


@pytest.mark.parametrize("ordered", [True, False])
def test_large_results_are_ones_own_and_stay(pool, ordered):
    kept = list(pool.map(an_array, range(150), ordered=ordered))
    kept.sort(key=lambda each: int(each[0]) if len(each) else -1)
    for n, each in enumerate(sorted(range(150), key=lambda n: n if len(an_array(n)) else -1)):
        wanted = an_array(each)
        if len(wanted):
            assert (kept[n] == wanted).all() and kept[n].shape == wanted.shape
            kept[n] += 1
    assert all((each == each[0]).all() for each in kept if len(each))
    for n, each in enumerate(pool.map(arrays_and_more, range(60))):
        assert each["n"] == n and each["text"] == str(n) * 30_000
        assert (each["array"] == n).all() and set(each["raw"]) == {n}


def test_large_and_small_results_and_items_of_one_map_are_in_order(pool):
    def either(value):
        return numpy.arange(20_000) + len(value) if len(value) % 3 == 0 else value

    items = [b"x" * (n if n % 10 else 70_000 + n) for n in range(600)]
    for item, said in zip(items, pool.map(either, items), strict=True):
        wanted = either(item)
        assert (said == wanted).all() if isinstance(wanted, numpy.ndarray) else said == wanted


@pytest.mark.parametrize("ordered", [True, False])
def test_who_does_not_consume_keeps_large_results_from_being_made(pool, paths, ordered):
    def megabyte(n):
        append(paths[0], str(n))
        return numpy.zeros(1 << 20, dtype="uint8")

    source = Counting(itertools.count())
    results = pool.map(megabyte, source, ordered=ordered)
    for _ in range(60):
        assert next(results).nbytes == 1 << 20
    taken = source.taken
    assert taken < 60 + 64 + 64
    wait_for(lambda: len(lines(paths[0])) == taken)
    for p in [pool.promise(abs, -1) for _ in range(500)]:
        p.result(PATIENCE)
    assert source.taken == taken == len(lines(paths[0]))
    results.close()


# -- calls that travel together --------------------------------------------------------------------


def boom(n):
    raise ValueError(n)


@pytest.mark.slow
def test_thousands_of_mixed_calls_each_get_their_own_answer(pool, dice):
    kinds = [
        lambda i: ((abs, -i), i),
        lambda i: ((pow, i, 2), i * i),
        lambda i: ((double, f"s{i}"), f"s{i}s{i}"),
        lambda i: ((wrapped, i), [i]),
        lambda i: ((echo, [i, [i]]), [i, [i]]),
        lambda i: ((both, i, {"k": i}), [i, {"k": i}]),
        lambda i: ((lambda n: n + 1, i), i + 1),
        lambda i: ((functools.partial(both, i), None), [i, None]),
        lambda i: ((echo, b"b" * (i % 600)), b"b" * (i % 600)),
        lambda i: ((boom, i), ValueError),
        lambda i: ((int, "ff", 16), 255),
        lambda i: ((f"{i} + 1",), i + 1) if i % 50 == 0 else ((str, i), str(i)),
    ]
    drones = pool.drones
    made = []
    for i in range(5000):
        call, wanted = dice.choice(kinds)(i)
        where = dice.choice([pool, pool, pool, *drones])
        made.append((where.promise(*call), wanted, i))
    for p, wanted, i in made:
        error = p.exception(PATIENCE)
        if wanted is ValueError:
            assert (
                type(error) is ValueError
                and error.args == (i,)
                and "in boom" in str(error.__cause__)
            )
        else:
            assert error is None and p.value == wanted and type(p.value) is type(wanted)
    for p, _, i in made:
        spans = p.spans
        assert spans.queued <= spans.sent <= spans.started <= spans.finished <= spans.received, (
            i,
            spans,
        )
        assert spans.drone in {d.name for d in drones} and spans.bytes_sent >= 0


def now(boxed=False):
    return [time.monotonic()] if boxed else time.monotonic()


def test_the_spans_of_each_call_are_its_own(pool):
    made = [pool.promise(now) if i % 9 else pool.promise(now, i % 2 == 0) for i in range(3000)]
    for p in made:
        p.result(PATIENCE)
    for p in made:
        value = p.value[0] if isinstance(p.value, list) else p.value
        assert p.spans.started <= value <= p.spans.finished


def test_one_drone_runs_calls_of_all_kinds_in_their_order(paths, dice):
    def write(i, *_):
        append(paths[0], str(i))

    more = [(), (1,), ("text",), ([1],), ({},), ("x" * 300,), ("x" * 200_000,), (b"x" * 40_000,)]
    with poly.Drone() as drone:
        made = []
        for i in range(1000):
            fn = write if dice.random() < 0.7 else lambda i, *_: append(paths[0], str(i))
            made.append(drone.promise(fn, i, *dice.choices(more, [50, 50, 50, 20, 20, 5, 1, 1])[0]))
        for p in made:
            p.result(PATIENCE)
        assert lines(paths[0]) == [str(i) for i in range(1000)]


def test_calls_that_are_cancelled_in_the_queue_never_run_and_the_others_do(paths, dice):
    with poly.Pool(1) as pool:
        known = functools.partial(note, paths[0])
        make_known_as_short(pool, known)
        for p in [pool.promise(known, -1) for _ in range(500)]:
            p.result(PATIENCE)
        holder = pool.promise(hold_until, paths[1], paths[2])
        wait_for(lambda: lines(paths[2]))
        made = [pool.promise(known, i) for i in range(3000)]
        gone = set(dice.sample(range(3000), 1000))
        assert all(made[i].cancel() for i in gone)
        append(paths[1], "open")
        assert holder.value == "held"
        assert [p.result(PATIENCE) for i, p in enumerate(made) if i not in gone] == sorted(
            set(range(3000)) - gone
        )
        assert all(made[i].cancelled() for i in gone)
        assert ran(paths[0]) == Counter(set(range(3000)) - gone)


def test_calls_wait_for_promises_among_their_arguments(pool):
    late = poly.Promise()
    made = []
    for i in range(1000):
        made.append(pool.promise(both, i, late) if i % 3 == 0 else pool.promise(both, i, made[-1]))
    assert pool.promise(abs, -1).result(PATIENCE) == 1
    late.set_result("late")
    for i, p in enumerate(made):
        wanted = "late"
        for k in range(i - i % 3, i + 1):
            wanted = [k, wanted]
        assert p.result(PATIENCE) == wanted


def test_submitting_threads_get_each_its_own_and_callbacks_are_called_once(pool):
    wrong = []
    called = Counter()
    lock = threading.Lock()

    def count(p):
        with lock:
            called[id(p)] += 1

    kept = []

    def submit(k):
        made = []
        for i in range(1500):
            p = pool.promise(operator.add, k, i) if i % 7 else pool.promise(both, k, [i])
            p.add_done_callback(count)
            made.append(p)
        kept.extend(made)
        for i, p in enumerate(made):
            if p.result(PATIENCE) != (k + i if i % 7 else [k, [i]]):
                wrong.append((k, i))

    threads = [threading.Thread(target=submit, args=[10_000 * k]) for k in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(2 * PATIENCE)
        assert not each.is_alive()
    wait_for(lambda: len(called) == 6000)
    assert not wrong and set(called.values()) == {1} and len(kept) == 6000


def test_a_function_that_is_defined_anew_between_calls_is_the_new_one(pool):
    made = []
    for i in range(900):

        def f(n, i=i // 3):
            return n, i

        made.append(pool.promise(f, i))
    assert [p.result(PATIENCE) for p in made] == [(i, i // 3) for i in range(900)]
    k = 0

    def g(n):
        return n, k

    made = []
    for k in range(400):
        made.append(pool.promise(g, -k))
    assert [p.result(PATIENCE) for p in made] == [(-i, i) for i in range(400)]


def test_a_call_that_is_refused_harms_none_before_or_after_it(pool):
    made = []
    for i in range(2000):
        if i % 100 == 50:
            with pytest.raises(TypeError):
                pool.promise(i)
            bad = pool.promise(echo, threading.Lock())
            assert isinstance(bad.exception(PATIENCE), TypeError)
            assert isinstance(pool.promise(threading.Lock().acquire).exception(PATIENCE), TypeError)
        made.append(pool.promise(double, i))
    assert [p.result(PATIENCE) for p in made] == [2 * i for i in range(2000)]


def test_calls_and_maps_of_the_same_function_take_turns(pool, paths):
    known = functools.partial(note, paths[0])
    results = pool.map(known, range(3000))
    made = []
    for i in range(3000):
        made.append(pool.promise(known, 10_000 + i))
        assert next(results) == i
    assert [p.result(PATIENCE) for p in made] == list(range(10_000, 13_000))
    assert next(results, None) is None
    assert ran(paths[0]) == Counter([*range(3000), *range(10_000, 13_000)])


def test_what_died_with_calls_that_travel_together_is_that_call_alone(paths):
    with poly.Pool(1, output="discard") as pool:
        known = functools.partial(die_once, paths[0], 777)
        for p in [pool.promise(known, -1) for _ in range(300)]:
            p.result(PATIENCE)
        made = [pool.promise(known, i) for i in range(2000)]
        lost = [i for i, p in enumerate(made) if p.exception(PATIENCE) is not None]
        assert lost == [777] and isinstance(made[777].exception(), poly.DroneDied)
        assert [p.value for i, p in enumerate(made) if i != 777] == [
            i for i in range(2000) if i != 777
        ]
        assert ran(paths[0]) == Counter(range(2000))


def test_small_tuples_with_texts_come_home_as_they_are_whatever_their_size(pool):
    def both(n):
        return n, "x" * (n * 100), b"y" * n

    for _ in range(2):  # not known to be short, and known
        assert list(pool.map(both, range(300))) == [both(n) for n in range(300)]
    large = [(n, bytes(200_000)) for n in range(20)]
    assert list(pool.map(lambda n: (n, bytes(200_000)), range(20))) == large


class Zone(datetime.tzinfo):
    """A user's, which cannot be pickled."""

    def utcoffset(self, moment):
        return datetime.timedelta(0)

    def __reduce__(self):
        raise ValueError("this zone stays here")


class Text(str):
    def __reduce__(self):
        raise ValueError("this text stays here")


UTC = datetime.UTC
MOMENT = datetime.datetime(2024, 5, 1, 12, 30, fold=1)
OF_THE_LIBRARIES = [
    datetime.date(2024, 5, 1), MOMENT, MOMENT.replace(tzinfo=UTC), datetime.time(3, 4),
    datetime.time(3, 4, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "two")),
    datetime.timedelta(3, 4, 5), UTC, Decimal("1.10"), Decimal("NaN"), Fraction(2, 3),
    uuid.UUID(int=5), pathlib.Path("a/b"), pathlib.PurePosixPath("/a"),
    pathlib.PureWindowsPath("c:/a"), numpy.float32(0.1), numpy.int8(3), numpy.bool_(True),
    numpy.datetime64("2024-05-01"), numpy.complex128(2j),
]  # fmt: skip


@pytest.mark.guarantee("pool-7")
def test_values_that_cannot_change_share_a_pickle_and_arrive_as_they_are(pool):
    values = [*OF_THE_LIBRARIES, 1, "a", b"b", None, 2.5]
    nested = [*values, *itertools.pairwise(values), frozenset(values), ((values[0], ()), 7)]
    assert all(bytes_together([each]) >= 0 for each in nested)
    items = nested * 20
    for ordered in (items, iter(items)):
        got = list(pool.map(echo, ordered))
        assert list(map(_described, got)) == list(map(_described, items))
        assert list(map(type, got)) == list(map(type, items))
    assert {type(each) for each in pool.map(echo, [numpy.float64(1)] * 500)} == {numpy.float64}


def _described(value):
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


@pytest.mark.guarantee("pool-7")
def test_what_has_an_object_of_users_in_it_shares_no_pickle():
    zone = datetime.timezone(datetime.timedelta(0), Text("a"))
    alone = [
        MOMENT.replace(tzinfo=Zone()), datetime.time(3, tzinfo=Zone()), zone,
        MOMENT.replace(tzinfo=zone), type("date", (datetime.date,), {})(2024, 5, 1),
        type("Decimal", (Decimal,), {"__module__": "decimal"})(1), numpy.str_("a"),
        numpy.zeros(1, "i4,i4")[0], numpy.zeros(1), [], {}, (1, [2]), frozenset((1, MyInt(2))),
        ((((((1,),),),),),),
    ]  # fmt: skip
    assert [each for each in alone if bytes_together([1, each]) >= 0] == []


class MyInt(int):
    pass


@pytest.mark.guarantee("pool-7")
def test_among_values_that_share_a_pickle_a_bad_one_fails_alone(pool):
    good = [MOMENT, Decimal(1)] * 200
    list(pool.map(echo, good))
    for bad in (MOMENT.replace(tzinfo=Zone()), [Text("a")], {"a": Text("a")}):
        results = pool.map(echo, [*good, bad, *good], return_exceptions=True)
        failed = [at for at, each in enumerate(results) if isinstance(each, ValueError)]
        assert failed == [len(good)]
        results = pool.map(echo, iter([*good, bad]))
        assert [next(results) for _ in good] == good
        with pytest.raises(ValueError, match="stays here"):
            next(results)


@pytest.mark.guarantee("pool-7")
def test_a_reducer_that_is_registered_for_a_type_is_asked_for_each_value(pool, monkeypatch):
    def reduce(value):
        if value == 7:
            raise ValueError("this number stays here")
        return str, (f"it is {value}",)

    monkeypatch.setitem(copyreg.dispatch_table, Decimal, reduce)
    results = pool.map(echo, [Decimal(1)] * 300 + [Decimal(7), 2])
    assert [next(results) for _ in range(300)] == ["it is 1"] * 300
    with pytest.raises(ValueError, match="stays here"):
        next(results)


@pytest.mark.guarantee("pool-7")
@pytest.mark.parametrize("as_input", [list, iter])
def test_containers_have_what_is_in_them_and_share_nothing(pool, as_input):
    shared = [1]
    items = [{"id": i, "value": i * 0.5, "own": [i]} for i in range(1200, 1700)]  # 0x93 in many
    items[300:300] = [{"shared": shared}, {"shared": shared}, {"of": Fraction(1, 2)}, {"a": {3}}]
    got = list(pool.map(echo, as_input(items)))
    assert got == items
    assert got[300]["shared"] is not got[301]["shared"]
    parts = list(pool.map(_touch, as_input([shared] * 500)))
    assert parts == [[1, 2]] * 500 and shared == [1]


def _touch(value):
    value.append(2)
    return value


def test_large_rows_travel_many_together_and_are_divided_when_one_takes_long(pool):
    items = [numpy.full(1000, i) for i in range(600)] + [f"{i:05d}" * 3000 for i in range(200)]
    list(pool.map(_first, items))
    counts = Counter()
    real = Source._chunk

    def chunk_of(source, form, rows, *size):
        counts[type(pack_calls(form, False, rows, source._store)).__name__] += 1
        return real(source, form, rows, *size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "_chunk", chunk_of)
        assert list(pool.map(_first, items)) == [*range(600), *"0" * 200]
        assert list(pool.map(_first, iter(items))) == [*range(600), *"0" * 200]
        assert counts["Serialized"]
    slow = [("", "x" * (14_000 + i)) for i in range(150)]
    list(pool.map(_nap, slow))
    for i in (20, 60):
        slow[i] = "nap", slow[i][1]
    assert list(pool.map(_nap, slow)) == [*range(14_000, 14_150)]
    with pytest.raises(ZeroDivisionError) as caught:
        list(pool.map(_nap, [*slow, ("fail", "y" * 14_000), *slow]))
    assert any("item 150" in note for note in caught.value.__notes__)


def _first(value):
    return int(value[0]) if isinstance(value, numpy.ndarray) else value[0]


def _nap(row):
    what, text = row
    if what == "nap":
        time.sleep(0.05)
    return 1 / 0 if what == "fail" else len(text)


kept_arrays = []


def _spoil(array, how, i):
    seen = int(array[0]), int(array[50_000]), int(array[-1])
    if how(i):
        kept_arrays.append((i, array))
    array[:] = i
    return seen, [(int(each[0]), at) for at, each in kept_arrays if each[0] != at]


def _every_third(i):
    return i % 3 == 0


@pytest.mark.guarantee("work-12")
def test_each_call_of_a_map_has_a_large_captured_array_as_it_was(pool):
    """Its mapping is used again, unless an earlier call has kept it."""
    fn = functools.partial(_spoil, numpy.arange(100_000), _every_third)
    clean = (0, 50_000, 99_999), []
    assert list(pool.map(fn, range(1, 300))) == [clean] * 299


def test_objects_of_main_go_by_name_if_the_drones_have_their_class_and_else_by_value():
    done = output_of(
        """
        import polycephaly as poly

        class Point:
            def __init__(self, x):
                self.x = x

        def same(value):
            return value

        def where(value):
            return type(value) is Point, value.x

        if __name__ == "__main__":
            with poly.Pool(2) as pool:
                old = Point
                points = [Point(i) for i in range(600)]
                got = list(pool.map(same, points))
                print({type(each) is Point for each in got}, sum(each.x for each in got))
                print({each[0] for each in pool.map(where, points)})

                class Later(Point):
                    pass

                rows = [{"p": Point(i)} for i in range(600)]
                rows[::50] = [{"p": Later(i), "of": Point} for i in range(0, 600, 50)]
                got = list(pool.map(same, rows))
                print({type(each["p"]) is Later for each in got[::50]}, got[0]["of"] is Point)
                print(type(got[1]["p"]) is Point, sum(each["p"].x for each in got))

                class Point:
                    def __init__(self, x):
                        self.x = -x

                points = [Point(i) if i % 2 else old(i) for i in range(600)]
                got = list(pool.map(where, points))
                print(got[:4])
                print(type(list(pool.map(same, points))[1]) is Point)
        """
    )
    assert done.splitlines() == [
        "{True} 179700",
        "{True}",
        "{True} True",
        "True 179700",
        "[(False, 0), (False, -1), (False, 2), (False, -3)]",
        "True",
    ]


def test_one_slow_report_does_not_make_the_next_chunks_small():
    """The drone had lost its core for a moment."""
    source = Source(dispatcher_of(FakeReactor(), 2), TaskOptions(), echo, [itertools.count()])
    source._definition.seconds = 1e-5
    usual = source.best_size()
    source._estimate(0.5, 10)
    assert source.best_size() >= usual // 2
    for _ in range(20):
        source._estimate(0.5, 10)
    assert source.best_size() == 1
    source._estimate(32e-5, 32)
    assert source.best_size() == usual


def test_the_last_calls_are_divided_among_the_drones_unless_that_costs_more_than_they_do():
    source = Source(dispatcher_of(FakeReactor(), 4), TaskOptions(), echo, [list(range(100))])
    source._definition.seconds = 1e-4
    assert source.best_size() == 25  # a quarter: less than four milliseconds
    source._definition.seconds = 1e-3
    assert source.best_size() == 13  # an eighth, so that half of them is left to even things out
    source._definition.seconds = 1e-4
    source._rows, source._sized_rows = iter(()), iter(range(16))
    assert source.best_size() == 4
    source._definition.seconds = 1e-6
    assert source.best_size() >= 16


def test_long_strings_among_short_ones_end_a_chunk_by_their_size(pool):
    lengths = [10] * 3000 + [400_000, 10, 300, 400_000] * 20
    known = functools.partial(str.__mul__, "x")
    assert [*map(len, pool.map(known, lengths))] == lengths
    assert [*map(len, pool.map("x".__mul__, lengths))] == lengths
