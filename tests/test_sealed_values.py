"""A value is built when it is needed, by who needs it: so its own code delays nothing else."""

import asyncio
import concurrent.futures
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults import append, hold_until, lines, wait_for
from greens import awaited
from work import echo

import polycephaly as poly
from polycephaly import green
from polycephaly.promises import builder_threads
from polycephaly.promises.builder_threads import MAX_THREADS
from polycephaly.promises.promise import WhenOpened, request_opening
from polycephaly.runtime.fork_guard import OwnThread

HERE = os.getpid()
BUILT = []
"""The names of the values that were built in this process."""
GATES = {}
"""By name: what is called here when a value of that name is built."""


class Value:
    """Runs code where it arrives."""

    def __init__(self, name, content=None):
        self.name, self.content = name, content

    def __setstate__(self, state):
        self.__dict__ = state
        if os.getpid() == HERE:
            BUILT.append(self.name)
            GATES.get(self.name, id)(self)


class Failed(Exception):
    """An error of a task, which runs code where it arrives."""

    def __reduce__(self):
        return arrived, self.args


def arrived(name):
    if os.getpid() == HERE:
        GATES.get(name, id)(name)
    return Failed(name)


def fail(name):
    raise Failed(name)


def name_of(value):
    return value.name


def make_later(gate):
    hold_until(gate)
    return Value("held")


class Held:
    """A gate that holds the thread which builds the value."""

    def __init__(self):
        self.entered, self.let_go, self.threads = threading.Event(), threading.Event(), []

    def __call__(self, value):
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        assert self.let_go.wait(60)


@pytest.fixture(autouse=True)
def no_gates():
    yield
    for each in GATES.values():
        if isinstance(each, Held):
            each.let_go.set()
    GATES.clear()
    BUILT.clear()


@pytest.fixture
def held():
    held = GATES["held"] = Held()
    return held


def settled(promise):
    concurrent.futures.wait([promise], 60)
    assert promise.done()
    return promise


# -- who builds a value, and when ------------------------------------------------------------------


@pytest.mark.guarantee("promise-10")
def test_a_value_is_built_once_when_it_is_needed_by_the_thread_that_needs_it(pool):
    GATES["seen"] = lambda _: BUILT.append(threading.current_thread().name)
    promise = settled(pool.promise(Value, "seen"))
    assert not promise.cancelled() and not promise.running() and "fulfilled" in repr(promise)
    assert not BUILT
    assert promise.value is promise.result(0) is promise.value
    assert BUILT == ["seen", "MainThread"] and "Value" in repr(promise)
    assert promise.exception() is None


@pytest.mark.guarantee("promise-10")
def test_a_value_that_nobody_needs_is_never_built_and_keeps_nothing(pool):
    promise = settled(pool.promise(Value, "unread", bytes(2_000_000)))
    gc.collect()
    gc.disable()
    try:
        del promise
        arena = pool._dispatcher.supervisor.engine._arena
        wait_for(lambda: arena.used() == 0)
    finally:
        gc.enable()
    assert not BUILT


def hold_the_first():
    """Hold the first thread that builds a value "met", until the event that is returned is set."""

    def build(_):
        if len(BUILT) == 1:
            assert others_are_done.wait(60)

    others_are_done = threading.Event()
    GATES["met"] = build
    return others_are_done


def test_threads_that_read_a_value_at_the_same_time_get_one_object_and_wait_for_no_other(pool):
    others_are_done = hold_the_first()
    promise = settled(pool.promise(Value, "met"))
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(promise.result)
        wait_for(lambda: BUILT)
        others = [threads.submit(promise.result) for _ in range(3)]
        others = {each.result(60) for each in others}
        others_are_done.set()
        assert {first.result(60)} == others == {promise.value}


@pytest.mark.guarantee("promise-10")
def test_a_value_can_be_built_after_the_end_of_its_pool():
    numpy = pytest.importorskip("numpy")
    with poly.Pool(1) as pool:
        small, large = pool.promise(Value, "small"), pool.promise(numpy.arange, 500_000)
        settled(small), settled(large)
    assert not BUILT
    both = poly.gather(small, large)
    assert both.done()
    assert small.value.name == "small" and large.value[-1] == 499_999
    assert both.value[0] is small.value and both.value[1] is large.value


def test_what_takes_no_code_of_its_own_is_there_at_once(pool):
    for value in (7, None, "x" * 5000, [1, {"a": (2, None)}], {"b"}, b"c" * 5000):
        assert type(value).__name__ in repr(settled(pool.promise(echo, value)))


# -- what waits does so no longer than it should ---------------------------------------------------


@pytest.mark.guarantee("promise-10")
@pytest.mark.parametrize("ask", ["result", "exception"])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_timeout_holds_beside_code_of_the_value(pool, held, ask, is_done):
    promise = pool.promise(Value, "held")
    if is_done:
        settled(promise)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            getattr(promise, ask)(0.2)
    assert len(held.threads) == 1 and held.threads[0].startswith("polycephaly-builder-")
    held.let_go.set()
    assert promise.result(60).name == "held" and promise.exception(0) is None
    assert BUILT == ["held"]


@pytest.mark.guarantee("promise-10")
def test_code_of_one_value_delays_no_other_value_no_limit_and_no_task(pool, held):
    promise = pool.promise(Value, "held")
    with pytest.raises(TimeoutError):
        promise.result(0.1)
    assert held.entered.wait(60)
    assert pool.promise(Value, "other").value.name == "other"
    assert poly.gather(*(pool.promise(Value, "more") for _ in range(5))).value[4].name == "more"
    assert list(pool.map(abs, range(-20, 0))) == [*range(20, 0, -1)]
    assert [each.name for each in pool.map(Value, ["x", "y"])] == ["x", "y"]
    assert pool.promise(Value, "late").result(60).name == "late"
    assert isinstance(pool.promise(fail, "x").exception(60), Failed)
    with poly.Pool(1) as other:
        assert other.promise(name_of, pool.promise(Value, "late")).value == "late"
        other.promise(fail, "x")


@pytest.mark.guarantee("promise-10")
def test_code_of_an_error_delays_what_the_opener_does_and_nothing_else(tmp_path):
    gate = GATES["held"] = Held()
    with poly.Pool(2) as pool:
        failed = pool.promise(fail, "held")
        assert gate.entered.wait(60)
        assert not failed.done()
        with pytest.raises(TimeoutError):
            failed.result(0.1)
        assert pool.promise(Value, "other").value.name == "other"
        assert list(pool.map(abs, range(-20, 0))) == [*range(20, 0, -1)]
        with pytest.raises(TimeoutError):
            pool.options(timeout=0.2).promise(hold_until, str(tmp_path / "never")).result(60)
        gate.let_go.set()
        assert isinstance(failed.exception(60), Failed)


def test_the_end_of_a_block_waits_for_errors_that_are_being_opened(held):
    def end():
        with poly.Pool(1) as pool:
            promises.append(pool.promise(fail, "held"))

    promises, thread = [], threading.Thread(target=end)
    thread.start()
    assert held.entered.wait(60)
    thread.join(0.3)
    assert thread.is_alive() and not promises[0].done()
    held.let_go.set()
    thread.join(60)
    assert not thread.is_alive() and isinstance(promises[0].exception(0), Failed)


def test_a_retry_is_decided_when_the_error_is_there(pool, tmp_path):
    marks = tmp_path / "marks"
    retry = poly.Retry(3, on=Failed, delay=0)
    assert pool.options(retries=retry).promise(fail_twice, str(marks)).value == "third"


def fail_twice(path):
    with open(path, "a") as file:
        file.write(".")
    if os.path.getsize(path) < 3:
        raise Failed("again")
    return "third"


@pytest.mark.guarantee("promise-10")
def test_asyncio_goes_on_while_a_value_is_built(pool, held):
    async def main():
        ways = [
            asyncio.ensure_future(awaited(pool.promise(Value, "held"))),
            asyncio.ensure_future(awaited(settled(pool.promise(Value, "held")))),
            asyncio.wrap_future(pool.promise(Value, "held")),
            asyncio.get_running_loop().run_in_executor(pool, Value, "held"),
        ]
        await asyncio.sleep(0.3)
        assert held.entered.is_set() and not any(each.done() for each in ways)
        held.let_go.set()
        return [each.name for each in await asyncio.gather(*ways)]

    assert asyncio.run(main()) == ["held"] * 4
    assert all(each.startswith("polycephaly-builder") for each in held.threads)


@pytest.mark.guarantee("promise-10")
@pytest.mark.parametrize("way", ["await", "select"])
@pytest.mark.parametrize("is_done", [False, True])
def test_green_threads_go_on_while_a_value_is_built(pool, held, way, is_done):
    steps = []

    async def step():
        while not held.let_go.is_set():
            steps.append(1)
            if len(steps) > 20 and held.entered.is_set():
                held.let_go.set()
            await green.sleep(0.005)

    async def main():
        stepping = green.spawn(step)
        one = pool.promise(Value, "held")
        while is_done and not one.done():
            await green.sleep(0.005)
        value = await one if way == "await" else (await green.select(one)).value
        await stepping
        return value.name

    assert green.run(main) == "held"
    assert len(held.threads) == 1 and held.threads[0].startswith("polycephaly-builder-")


def test_a_cancelled_wait_for_a_value_leaves_it_to_others(pool, held):
    async def main():
        waiting = asyncio.ensure_future(awaited(promise))
        while not held.entered.is_set():
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        held.let_go.set()
        return await promise

    promise = pool.promise(Value, "held")
    assert asyncio.run(main()).name == "held" and BUILT == ["held"]


def test_who_asks_while_another_thread_is_asking_has_nothing_built_twice(pool, held, monkeypatch):
    def add_and_stop(call):
        is_added = add(call)
        if threading.current_thread() is asker:
            assert has_asked.wait(60)
        return is_added

    promise = settled(pool.promise(Value, "held"))
    add, has_asked = builder_threads.builder_threads.add, threading.Event()
    monkeypatch.setattr(builder_threads.builder_threads, "add", add_and_stop)
    asker = threading.Thread(target=promise.result, args=(60,))
    asker.start()
    assert held.entered.wait(60)
    opened = request_opening(promise._result)
    held.let_go.set()
    opened.result(60)
    has_asked.set()
    asker.join()
    assert promise.result().name == "held" and BUILT == ["held"]


def test_callbacks_build_what_they_need_in_their_own_thread(pool, held, tmp_path):
    seen = []
    promise = pool.promise(make_later, str(tmp_path / "gate"))
    promise.add_done_callback(lambda done: seen.append(done.result().name))
    after = promise.then(name_of)
    (tmp_path / "gate").touch()
    assert held.entered.wait(60) and not after.done()
    assert pool.doit(abs, -1) == 1
    held.let_go.set()
    assert after.result(60) == "held" and seen == ["held"]
    assert held.threads == ["polycephaly-callbacks"]


READERS = {
    "value": lambda pool, promise: promise.value,
    "timeout": lambda pool, promise: promise.result(60),
    "gather": lambda pool, promise: poly.gather(promise).value[0],
    "gather in time": lambda pool, promise: poly.gather(promise).result(60)[0],
    "asyncio": lambda pool, promise: asyncio.run(awaited(promise)),
    "green": lambda pool, promise: green.run(awaited, promise),
    "then": lambda pool, promise: promise.then(echo).value,
}


@pytest.mark.guarantee("promise-10")
@pytest.mark.parametrize("how", READERS)
def test_code_of_a_value_may_wait_for_tasks_however_the_value_is_read(pool, how):
    def wait_for_tasks(value):
        value.content = pool.promise(abs, -1).value, pool.promise(fail, "other").exception(60)

    GATES["waits"] = wait_for_tasks
    promise = settled(pool.promise(Value, "waits"))
    one, error = READERS[how](pool, promise).content
    assert one == 1 and isinstance(error, Failed)
    assert promise.value is promise.result(60)


@pytest.mark.guarantee("promise-10")
def test_no_thread_waits_for_one_whose_value_waits_for_it(pool, tmp_path):
    """Code of a value waits for an error, another pool's call and a callback, while the threads for
    these are asked for the same value."""

    def wait_for_all(value):
        with lock:
            count.append(1)
        if len(count) == 1:
            entered.set()
            assert asked.wait(60)
            value.content = [
                pool.promise(fail, "other").exception(60),
                other.promise(abs, pool.promise(abs, -3)).result(60),
                pool.promise(abs, -4).then(abs).result(60),
            ]

    lock, count, entered, asked = threading.Lock(), [], threading.Event(), threading.Event()
    GATES["held"] = wait_for_all
    promise = pool.promise(make_later, str(tmp_path / "gate"))
    called = poly.Promise()
    with poly.Pool(1) as other, ThreadPoolExecutor(4) as threads:
        taken = other.promise(name_of, promise)
        (tmp_path / "gate").touch()
        settled(promise)
        built = threads.submit(lambda: promise.value)
        assert entered.wait(60)
        threads.submit(promise.add_done_callback, lambda done: called.set_result(done.result()))
        both = threads.submit(poly.gather(promise, pool.promise(abs, -2)).result, 60)
        assert both.result(60)[0] is called.result(60) and taken.result(60) == "held"
        asked.set()
        assert built.result(60) is promise.value


def test_values_that_need_each_other_are_told_so_in_whatever_threads(pool):
    def read(other):
        def build(_):
            time.sleep(0.1)  # so that the other is being built, too, as a rule
            promises[other].value  # noqa: B018

        return build

    GATES.update(a=read("b"), b=read("a"))
    promises = {name: settled(pool.promise(Value, name)) for name in "ab"}
    with ThreadPoolExecutor(2) as threads:
        reading = [threads.submit(promises[name].result) for name in "ab"]
        for each in reading:
            assert isinstance(each.exception(60), RuntimeError)


def test_who_waits_for_a_thread_that_builds_a_value_is_told_of_one_that_was_faster(pool):
    others_are_done = hold_the_first()
    promise = settled(pool.promise(Value, "met"))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(promise.result, 60)
        wait_for(lambda: BUILT)
        assert promise.value is waiting.result(60)
        others_are_done.set()


def test_many_short_waits_for_a_value_ask_for_it_once(pool, held):
    promise = settled(pool.promise(Value, "held"))
    for _ in range(100):
        with pytest.raises(TimeoutError):
            promise.result(0.001)
    assert len(held.threads) == 1


@pytest.mark.guarantee("promise-10")
def test_values_that_wait_for_values_need_no_more_threads_than_there_are(pool):
    def read_another(value):
        value.content = pool.promise(Value, "inner").result(60).name

    GATES["outer"] = read_another

    async def main():
        return await asyncio.gather(*[awaited(each) for each in promises])

    promises = [pool.promise(Value, "outer") for _ in range(2 * MAX_THREADS)]
    assert [each.content for each in asyncio.run(main())] == ["inner"] * 2 * MAX_THREADS


def test_a_value_waits_for_no_slow_one_while_a_thread_is_free(pool, held):
    slow = pool.promise(Value, "held")
    with pytest.raises(TimeoutError):
        slow.result(0.1)
    promises = [settled(pool.promise(Value, f"{n}")) for n in range(5 * MAX_THREADS)]
    with ThreadPoolExecutor(4 * MAX_THREADS) as threads:
        assert len({each.name for each in threads.map(lambda it: it.result(60), promises)}) == 5 * (
            MAX_THREADS
        )


def test_without_another_thread_who_waits_builds_the_value(pool, monkeypatch):
    def refuse_to_start(self):
        raise RuntimeError("can't start new thread")

    promise = settled(pool.promise(Value, "seen"))
    GATES["seen"] = lambda _: BUILT.append(threading.current_thread().name)
    monkeypatch.setattr(OwnThread, "start", refuse_to_start)
    monkeypatch.setattr(builder_threads, "builder_threads", builder_threads.BuilderThreads())
    assert promise.result(60).name == "seen"
    assert BUILT == ["seen", "MainThread"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_by_code_of_a_value_calls_no_hooks(pool, tmp_path):
    def fork(_):
        children.append(os.fork())

    GATES["forks"], children, seen = fork, [], str(tmp_path / "seen")
    promise = settled(pool.promise(Value, "forks"))
    WhenOpened(lambda _: append(seen, str(os.getpid())))(promise)
    assert promise.result(60).name == "forks"
    assert os.waitpid(children[0], 0)[1] == 0
    wait_for(lambda: lines(seen))
    assert lines(seen) == [str(HERE)]


@pytest.mark.parametrize("ordered", [True, False])
def test_the_time_of_a_map_includes_that_of_building(pool, held, ordered):
    with pytest.raises(TimeoutError, match=r"results of map\(Value, \.\.\.\) did not come"):
        list(pool.map(Value, ["held"], timeout=0.5, ordered=ordered))


def test_a_select_with_a_default_chooses_a_value_when_it_is_built(pool, held):
    async def main():
        promise = pool.promise(Value, "held")
        while not held.entered.is_set():
            assert await green.select(promise, default=None) is None
            await green.sleep(0.01)
        held.let_go.set()
        while (chosen := await green.select(promise, default=None)) is None:
            await green.sleep(0.01)
        return chosen.value.name

    assert green.run(main) == "held"


def test_a_signal_handlers_timeout_is_not_taken_for_that_of_the_wait(pool, held):
    def handler(*_):
        raise TimeoutError("by the handler")

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGUSR1])
    promise = settled(pool.promise(Value, "held"))
    timer.start()
    try:
        with pytest.raises(TimeoutError, match="by the handler"):
            promise.result(60)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_done_promise_can_be_awaited_without_a_running_loop(pool):
    promise = settled(pool.promise(Value, "by hand"))
    with pytest.raises(StopIteration) as stop:
        awaited(promise).send(None)
    assert stop.value.value.name == "by hand"


def test_code_that_needs_its_own_value_is_told_so(pool):
    GATES["own"] = lambda _: promise.value
    promise = settled(pool.promise(Value, "own"))
    with pytest.raises(RuntimeError, match="that very result"):
        promise.value  # noqa: B018


# -- errors ----------------------------------------------------------------------------------------


class Broken(Exception):
    """What breaks a thread off."""


def refuse(_):
    raise ValueError("not here")


@pytest.mark.guarantee("error-4")
def test_an_error_of_building_is_the_promises_in_every_way_of_asking(pool):
    GATES["bad"] = refuse
    promise = settled(pool.promise(Value, "bad"))
    for timeout in (None, None, 60, 60, None):
        with pytest.raises(ValueError, match="not here") as raised:
            promise.result(timeout)
        assert any("unpickling the result of Value" in note for note in raised.value.__notes__)
        assert "refuse" in [each.name for each in raised.traceback]
        assert raised.value.__context__ is None
        assert isinstance(promise.exception(timeout), ValueError)
    others = [pool.promise(Value, "bad") for _ in range(5)]
    with pytest.raises(ValueError):
        poly.gather(others[0], pool.promise(abs, 1)).value  # noqa: B018
    kinds = poly.gather(others[1], pool.promise(Value, "good"), return_exceptions=True).value
    assert list(map(type, kinds)) == [ValueError, Value]
    assert isinstance(others[2].then(name_of).exception(60), ValueError)
    assert isinstance(poly.race(others[3]).exception(60), ValueError)

    async def main():
        return await others[4]

    with pytest.raises(ValueError):
        asyncio.run(main())
    with pytest.raises(ValueError) as raised:
        list(pool.map(Value, ["bad"]))
    assert any("item 0" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("return_exceptions", [False, True])
def test_a_map_builds_a_value_that_cannot_be_built_once(pool, return_exceptions):
    GATES["bad"] = refuse
    results = pool.map(Value, ["bad"], return_exceptions=return_exceptions)
    if return_exceptions:
        assert list(map(type, results)) == [ValueError]
    else:
        with pytest.raises(ValueError):
            list(results)
    assert BUILT == ["bad"]


@pytest.mark.guarantee("error-4")
def test_an_input_that_cannot_be_built_rejects_the_call(pool):
    GATES["bad"] = refuse
    with poly.Pool(1) as other:  # to which it cannot be forwarded
        error = other.promise(name_of, pool.promise(Value, "bad")).exception(60)
        assert isinstance(error, ValueError)
        assert any("failed input: Value" in note for note in error.__notes__)
        assert other.doit(abs, -1) == 1


def test_what_comes_from_elsewhere_leaves_the_value_sealed(pool):
    def interrupt(value):
        if len(BUILT) == 1:
            raise kind("once")

    for kind in (KeyboardInterrupt, MemoryError, RecursionError, Broken):
        BUILT.clear()
        GATES["once"] = interrupt
        promise = settled(pool.promise(Value, "once"))
        with pytest.raises(kind):
            promise.value  # noqa: B018
        assert promise.value.name == "once" and promise.exception() is None
        assert len(BUILT) == 2


@pytest.mark.guarantee("error-4")
@pytest.mark.parametrize("kind", [RecursionError, MemoryError, SystemExit])
def test_an_error_of_whatever_kind_is_told_to_all_who_ask(pool, kind):
    def build(_):
        raise kind("of its own")

    async def in_executor():
        return await asyncio.get_running_loop().run_in_executor(pool, Value, "bad")

    GATES["bad"] = build
    with pytest.raises(kind):
        asyncio.run(in_executor())
    assert isinstance(pool.promise(Value, "bad").exception(), kind)
    assert isinstance(pool.promise(Value, "bad").exception(60), kind)
    bad, good = pool.promise(Value, "bad"), pool.promise(Value, "good")
    first, second = poly.gather(bad, good, return_exceptions=True).value
    assert isinstance(first, kind) and second.name == "good"
    if kind is not SystemExit:
        results = list(pool.map(Value, ["good", "bad", "good"], return_exceptions=True))
        assert list(map(type, results)) == [Value, kind, Value]


def test_a_signal_handler_that_raises_leaves_the_value_sealed(pool):
    def handler(*_):
        raise Broken

    def ring(_):
        if len(BUILT) == 1:
            signal.raise_signal(signal.SIGUSR1)

    GATES["rung"] = ring
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        promise = settled(pool.promise(Value, "rung"))
        with pytest.raises(Broken):
            promise.value  # noqa: B018
        assert promise.value.name == "rung"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_asynchronous_exception_leaves_the_value_sealed(pool):
    def broken_off():
        try:
            promise.value  # noqa: B018
        except Broken:
            ended.append("broken")

    def spin(_):
        if len(BUILT) == 1:
            entered.set()
            while True:
                time.sleep(0.01)

    entered, ended = threading.Event(), []
    GATES["spins"] = spin
    promise = settled(pool.promise(Value, "spins"))
    thread = threading.Thread(target=broken_off)
    thread.start()
    assert entered.wait(60)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(Broken)
    )
    thread.join(60)
    assert ended == ["broken"]
    assert promise.value.name == "spins"


def test_a_want_of_stack_leaves_the_value_sealed(pool):
    def look(depth):
        return look(depth - 1) if depth else promise.value

    def dive(_):
        def deeper(depth):
            return deeper(depth - 1) if depth else None

        deeper(200)

    GATES["deep"] = dive
    promise = settled(pool.promise(Value, "deep"))
    with pytest.raises(RecursionError):
        look(sys.getrecursionlimit() - len(traceback.extract_stack()) - 100)
    assert promise.value.name == "deep"


# -- values as arguments ---------------------------------------------------------------------------


@pytest.mark.guarantee("promise-10")
@pytest.mark.parametrize("size", [10, 2_000_000])
def test_a_value_that_other_tasks_of_the_pool_take_is_not_built_here(pool, size):
    promise = pool.promise(Value, "passed", bytes(size))
    assert pool.promise(name_of, promise).value == "passed"
    assert pool.promise(lambda pair: pair[0].name, [promise, 1]).value == "passed"
    assert not BUILT
    promise.value.name = "changed"
    assert pool.promise(name_of, promise).value == "changed"
    assert BUILT == ["passed"]


def test_another_pool_gets_it_as_this_process_pickles_it(pool):
    promise = pool.promise(Value, "passed", bytes(2_000_000))
    with poly.Pool(1) as other:
        assert other.promise(name_of, promise).value == "passed"
    assert BUILT == ["passed"]


def test_a_value_of_another_pool_is_built_for_a_task_and_delays_no_results(pool, held, tmp_path):
    promise = pool.promise(make_later, str(tmp_path / "gate"))
    with poly.Pool(1) as other:
        taken = other.promise(name_of, promise)
        (tmp_path / "gate").touch()
        assert held.entered.wait(60)
        assert other.doit(abs, -1) == pool.doit(abs, -1) == 1
        assert not taken.done()
        held.let_go.set()
        assert taken.result(60) == "held"
    assert len(held.threads) == 1 and held.threads[0].startswith("polycephaly-builder-")


# -- what must arrive at once ----------------------------------------------------------------------


def make_sender(sender):
    return [sender, Value("beside")]


def test_an_end_in_a_result_arrives_also_if_nobody_reads_the_result(tmp_path):
    channel = green.Channel(10)
    with poly.Pool(1) as pool:
        promise = settled(pool.promise(make_sender, channel.sender()))
    assert BUILT == ["beside"]
    sender, _ = promise.value
    sender.put(1)  # the drone had it, and has ended
    assert channel.get() == 1
    sender.close()


def make_kept(_):
    return [poly.Kept([1, 2, 3]), Value("beside")]


def test_a_handle_in_a_result_arrives_also_if_nobody_reads_the_result():
    with poly.Pool(1) as pool:
        promise = settled(pool.promise(make_kept, 0))
        assert BUILT == ["beside"]
        gc.collect()
        assert promise.value[0].value == [1, 2, 3]


# -- forks -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_builds_a_value_that_a_thread_of_the_parent_was_building(pool, held):
    promise = settled(pool.promise(Value, "held"))
    thread = threading.Thread(target=lambda: promise.value)
    thread.start()
    assert held.entered.wait(60)
    child = multiprocessing.get_context("fork").Process(target=read_in_child, args=(promise,))
    child.start()
    child.join(60)
    held.let_go.set()
    thread.join(60)
    assert child.exitcode == 0


def read_in_child(promise):
    GATES.clear()
    assert promise.value.name == "held"
    assert promise.result(10) is promise.value
