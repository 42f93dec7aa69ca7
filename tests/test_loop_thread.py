"""The pool's work is done by a thread of its own: what happens to a caller happens to no pool."""

import _weakrefset
import asyncio
import concurrent.futures
import ctypes
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import InvalidStateError
from contextlib import suppress

import pytest
from faults import hold_until

import polycephaly as poly
from polycephaly.promises.promise import call_in_main_thread
from polycephaly.runtime.tuning import tuning

PACKAGE = os.path.dirname(str(poly.__file__)) + os.sep


class Broken(Exception):
    """What breaks a caller off."""


def check_results(pool, count):
    promises = [pool.promise(abs, -n) for n in range(count)]
    assert [each.result(30) for each in promises] == [*range(count)]


class Beside:
    """A thread that submits and waits all the time. Its results are its own."""

    def __init__(self, pool):
        self.rounds, self._pool, self._over, self._error = 0, pool, threading.Event(), None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            while not self._over.is_set():
                check_results(self._pool, 20)
                self.rounds += 1
        except BaseException as error:
            self._error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive() and self._error is None and self.rounds, self._error


def check_that_it_works_and_ends(pool):
    check_results(pool, 100)
    assert pool.doit(os.getpid) in [drone.pid for drone in pool.drones]
    began = time.monotonic()
    pool.shutdown()
    assert time.monotonic() - began < 30


def test_a_timeout_is_held_beside_a_callback_of_another_promise_that_waits_for_the_waiter(tmp_path):
    let_go = threading.Event()
    with poly.Pool(2) as pool:
        unsettled = pool.promise(hold_until, str(tmp_path / "gate"))
        pool.promise(time.sleep, 0.1).add_done_callback(lambda _: let_go.wait(20))
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            unsettled.result(0.5)
        assert time.monotonic() - began < 10
        let_go.set()
        (tmp_path / "gate").touch()
        assert unsettled.result(30) == "held"


def test_no_callback_runs_in_a_thread_that_waits():
    """A thread that waits may hold a lock, also one that it could take again."""
    lock, ran, entered = threading.RLock(), set(), []

    def callback(_):
        if threading.get_ident() in adding:
            return
        ran.add(threading.get_ident())
        if lock.acquire(blocking=False):
            entered.append(threading.current_thread())
            lock.release()

    def wait():
        waiters.add(threading.get_ident())
        for _ in range(100):
            promises = [pool.promise(abs, -1) for _ in range(5)]
            # A callback that is added to a promise that has settled runs in that call.
            adding.add(threading.get_ident())
            for each in promises:
                each.add_done_callback(callback)
            adding.discard(threading.get_ident())
            for each in promises:
                each.result(30)

    waiters, adding = set(), set()
    with poly.Pool(2) as pool:
        other = [pool.promise(time.sleep, 0.02 * i) for i in range(10)]
        adding.add(threading.get_ident())
        for each in other:
            each.add_done_callback(callback)
        adding.discard(threading.get_ident())
        with lock:
            assert pool.promise(time.sleep, 0.3).result(30) is None
            for each in other:
                each.result(30)
        assert ran and threading.get_ident() not in ran and not entered
        threads = [threading.Thread(target=wait) for _ in range(2)]
        for each in threads:
            each.start()
        with lock:
            while any(each.is_alive() for each in threads):
                pool.promise(abs, -1).result(30)
        assert len(waiters) == 2 and ran.isdisjoint({threading.get_ident(), *waiters})
        assert threading.main_thread() not in entered


def depth():
    frame, counted = sys._getframe(1), 0
    while frame is not None:
        frame, counted = frame.f_back, counted + 1
    return counted


@pytest.mark.parametrize("does", ["waits", "submits", "waits for a promise of its own"])
def test_near_the_recursion_limit_a_caller_harms_nobody(does):
    def act():
        task = pool.promise(abs, own if does == "waits for a promise of its own" else -7)
        return task.result(30) if does == "waits" else task

    def at_depth(frames):
        return at_depth(frames - 1) if frames else act()

    own, pool, returned, failed = poly.Promise(), poly.Pool(2), [], 0
    with Beside(pool):
        pool.doit(abs, -7)
        for margin in range(120):
            try:
                returned.append(at_depth(sys.getrecursionlimit() - depth() - margin))
            except RecursionError:
                failed += 1
    assert failed and returned
    if does == "waits":
        assert {*returned} == {7}
    elif does == "submits":
        assert {each.exception(30) and type(each.exception()) for each in returned} <= {
            None,
            RecursionError,  # of pickling the arguments
        }
    else:  # those that no caller has got are called off
        for each in returned:
            each.cancel()
    check_that_it_works_and_ends(pool)


def at_entries(raise_if_due):
    """Where functions of the package begin."""

    def trace(frame, event, _):
        if frame.f_code.co_filename.startswith(PACKAGE):
            raise_if_due(frame)

    return sys.settrace, trace


def after_calls(raise_if_due):
    """Where calls by functions of the package have returned: of functions in C, too. From CPython
    3.14 on, the `__enter__` of a lock is one."""

    def profile(frame, event, _):
        if event in ("return", "c_return"):
            caller = frame if event == "c_return" else frame.f_back
            if caller is not None and caller.f_code.co_filename.startswith(PACKAGE):
                raise_if_due(frame)

    return sys.setprofile, profile


def settled_elsewhere(pool):
    """A task that waits for a promise, which another thread settles."""

    def settle():
        with suppress(InvalidStateError):
            given.set_result("seven")

    given, settler = poly.Promise(), threading.Thread(target=settle)
    try:
        task = pool.promise(len, given)
        settler.start()
        return task.result(30)
    finally:
        settle()  # if this was broken off before


CALLS = {
    "a number": lambda pool: pool.promise(abs, -7).result(30),
    "bytes": lambda pool: pool.promise(len, b"x" * 100_000).result(30),
    "a promise": settled_elsewhere,
    "an object": lambda pool: pool.promise(random.Random, 1).result(30).__class__,
    "an error": lambda pool: type(pool.promise(int, "x").exception(30)),
    "then": lambda pool: pool.promise(abs, -7).then(str).result(30),
    "cancel": lambda pool: pool.promise(time.sleep, 0.01).cancel() in (True, False),
    "keep": lambda pool: pool.promise(tuple, "ab", keep=True).result(30).value,
    "gather": lambda pool: (*poly.gather(*(pool.promise(abs, -n) for n in range(9))).result(30),),
    "as_completed": lambda pool: len([*poly.as_completed([pool.promise(abs, 1) for _ in "123"])]),
    "wait": lambda pool: len(concurrent.futures.wait([pool.promise(abs, 1) for _ in "123"]).done),
    "map": lambda pool: sum(pool.map(abs, range(300))),
    "everywhere": lambda pool: (*(each.result(30) for each in pool.everywhere(abs, -7)),),
    "push": lambda pool: pool.push({"pushed": 1}),
    "status": lambda pool: pool.status()["name"] in repr(pool),
}


@pytest.mark.filterwarnings("ignore:the results of map:RuntimeWarning")
@pytest.mark.parametrize("places", [at_entries, after_calls], ids=lambda it: it.__name__)
@pytest.mark.parametrize("does", CALLS)
def test_an_exception_anywhere_within_a_caller_harms_nobody(does, places):
    """At places where CPython raises asynchronous exceptions. But where a block of the package ends
    (`__exit__`), an exception still leaves this thread's state as it was in the block; and Python
    itself only prints those of finalizers and of callbacks of weak references."""
    seen = at = 0

    def raise_if_due(frame):
        nonlocal seen
        while frame is not None:
            code = frame.f_code
            # `gc_callback` is of hypothesis, and called by the garbage collector.
            if code.co_name in ("__exit__", "__del__", "_mark_unused", "<genexpr>", "gc_callback"):
                return
            if code.co_filename in (weakref.__file__, _weakrefset.__file__):
                return
            if code.co_qualname.endswith("map.<locals>.<lambda>"):
                return
            frame = frame.f_back
        seen += 1
        if seen == at:
            raise Broken

    def call_often():
        nonlocal seen, at
        install, hook = places(raise_if_due)
        while seen >= at:
            seen, at = 0, at + 1
            install(hook)
            try:
                values.add(CALLS[does](pool))
            except Broken:
                pass
            finally:
                install(None)

    pool = poly.Pool(2)
    values, right = set(), CALLS[does](pool)
    with Beside(pool):
        # Not in the main thread, where SIGINT may be deferred.
        caller = threading.Thread(target=call_often)
        caller.start()
        caller.join(90)
        assert not caller.is_alive()
    # That an exception of a handler is not one of pickling the arguments, nobody can tell.
    assert at > 15 and values - {Broken} == {right}
    check_that_it_works_and_ends(pool)


def test_asynchronous_exceptions_in_callers_harm_nobody():
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    over, met = threading.Event(), []

    def call():
        while not over.is_set():
            try:
                while not over.is_set():
                    assert pool.promise(abs, -7).result(30) == 7
            except Broken:
                met.append(Broken)

    def call_on():
        while not over.is_set():
            try:
                call()
            except Broken:  # where `call` was about to go on
                pass

    chance, pool = random.Random(1), poly.Pool(2)
    with Beside(pool):
        callers = [threading.Thread(target=call_on) for _ in range(2)]
        for each in callers:
            each.start()
        for _ in range(300):
            time.sleep(chance.random() * 0.003)
            ident = ctypes.c_ulong(chance.choice(callers).ident)
            assert raise_in(ident, ctypes.py_object(Broken)) == 1
        over.set()
        for each in callers:
            each.join(60)
        assert not any(each.is_alive() for each in callers) and len(met) > 20
    check_that_it_works_and_ends(pool)


def test_a_signal_handler_that_raises_in_a_caller_harms_nobody():
    def handler(_, frame):
        if frame.f_code.co_filename.startswith(PACKAGE):
            raise Broken

    def send_signals():
        chance = random.Random(2)
        for _ in range(300):
            time.sleep(chance.random() * 0.003)
            signal.pthread_kill(main, signal.SIGWINCH)

    main, met, pool = threading.get_ident(), 0, poly.Pool(2)
    before = signal.signal(signal.SIGWINCH, handler)
    try:
        with Beside(pool):
            sender = threading.Thread(target=send_signals)
            sender.start()
            while sender.is_alive():
                try:
                    assert pool.promise(abs, -7).result(30) == 7
                except Broken:
                    met += 1
            sender.join()
    finally:
        signal.signal(signal.SIGWINCH, before)
    assert met > 20
    check_that_it_works_and_ends(pool)


def switches(threads):
    """How often these threads have gone to sleep so far."""
    total = 0
    for each in threads:
        with open(f"/proc/self/task/{each.native_id}/status") as status:
            total += sum(int(line.split()[1]) for line in status if line.startswith("voluntary"))
    return total


@pytest.mark.parametrize("waits_in", ["the main thread", "another thread"])
def test_a_wait_for_a_task_that_sleeps_costs_few_context_switches(waits_in, tmp_path):
    seconds, gate = 4, str(tmp_path / "gate")
    with poly.Pool(2) as pool:
        pool.doit(abs, -1)
        held = pool.promise(hold_until, gate)
        waiter = threading.main_thread()
        if waits_in == "another thread":
            waiter = threading.Thread(target=held.result)
            waiter.start()
        threads = [waiter, *(t for t in threading.enumerate() if t.name == "polycephaly-reactor")]
        assert len(threads) == 2
        time.sleep(0.2)
        before = switches(threads)
        if waits_in == "another thread":
            time.sleep(seconds)
        else:
            with pytest.raises(TimeoutError):
                held.result(seconds)
        # 2.6 a second when nothing else runs; hundreds when waiting threads looked for results.
        assert switches(threads) - before <= 10 * seconds
        (tmp_path / "gate").touch()
        held.result(30)
        if waits_in == "another thread":
            waiter.join()


def test_a_call_for_the_main_thread_wakes_it(monkeypatch):
    """It does not look up for it now and then."""
    monkeypatch.setattr(tuning, "signal_check_seconds", 100.0)
    promise = poly.Promise()

    def give_call():
        time.sleep(0.3)
        call_in_main_thread(lambda: promise.set_result(threading.current_thread()))

    thread = threading.Thread(target=give_call)
    thread.start()
    assert promise.result(30) is threading.main_thread()
    thread.join()


@pytest.mark.parametrize("broken", ["raises", "is closed"])
def test_an_asyncio_loop_that_cannot_be_woken_harms_nobody(broken, tmp_path):
    class Broken(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args, **kwargs):
            raise ValueError("not today")

    async def wait():
        await asyncio.wait({asyncio.ensure_future(settled(held))}, timeout=0.1)

    async def settled(promise):
        return await promise

    with poly.Pool(1) as pool:
        held = pool.promise(hold_until, str(tmp_path / "gate"))
        loop = asyncio.SelectorEventLoop() if broken == "is closed" else Broken()
        loop.run_until_complete(wait())
        if broken == "is closed":
            loop.close()
        (tmp_path / "gate").touch()
        assert held.result(30) == "held"
        check_results(pool, 20)
        for task in [] if broken == "is closed" else asyncio.all_tasks(loop):
            task.cancel()
        if broken == "raises":
            loop.close()
    # asyncio logs tasks that never end when they are collected: not in a test that counts threads.
    del loop
    gc.collect()
