"""Callbacks of the promises that a pool settles run in a thread of their own."""

import asyncio
import concurrent.futures
import ctypes
import gc
import threading
import time
from concurrent.futures import _base

import pytest
from faults import append, hold_until, wait_for
from greens import awaited

import polycephaly as poly
from polycephaly import green
from polycephaly.multiprocessing import Pool as StandardPool
from polycephaly.promises import lazy_thread
from polycephaly.promises.callbacks_thread import callbacks_thread


def names():
    return [each.name for each in threading.enumerate()]


@pytest.mark.guarantee("promise-9")
def test_a_callback_that_takes_long_delays_no_result_no_limit_and_no_other_pool(tmp_path):
    gate, let_go, entered = str(tmp_path / "gate"), threading.Event(), threading.Event()
    with poly.Pool(2) as pool:
        held = pool.promise(hold_until, gate)
        pool.promise(abs, -1).add_done_callback(lambda _: (entered.set(), let_go.wait(60)))
        assert entered.wait(30)
        assert [pool.doit(abs, -i) for i in range(20)] == [*range(20)]
        assert list(pool.map(abs, range(-20, 0))) == [*range(20, 0, -1)]
        with pytest.raises(TimeoutError):
            held.result(0.2)
        with pytest.raises(TimeoutError):
            pool.options(timeout=0.2).promise(time.sleep, 60).result(30)
        with poly.Pool(1) as other:
            assert other.doit(abs, -2) == 2
        assert not let_go.is_set()
        let_go.set()
        (tmp_path / "gate").touch()
        assert held.result(30) == "held"


@pytest.mark.guarantee("promise-9")
@pytest.mark.parametrize("served", [False, True])
def test_the_end_of_a_block_waits_for_the_callbacks_of_its_tasks_in_order(served, tmp_path):
    called = []

    def note(promise):
        time.sleep(0.01)
        called.append((promise.result(), threading.current_thread().name))

    with poly.Pool(1) as pool:
        if served:
            card = str(tmp_path / "card")
            with poly.serve(pool, "tcp://127.0.0.1:0", file=card), poly.connect(card) as client:
                promises = [client.promise(abs, -i) for i in range(20)]
                for each in promises:
                    each.add_done_callback(note)
        else:
            promises = [pool.promise(abs, -i) for i in range(20)]
            pool.promise(time.sleep, 0.1)
            for each in promises:
                each.add_done_callback(note)
    assert len(called) == 20
    in_thread = [value for value, thread in called if thread == "polycephaly-callbacks"]
    assert in_thread == sorted(in_thread)
    wait_for(lambda: "polycephaly-callbacks" not in names())


@pytest.mark.guarantee("promise-9")
def test_a_callback_may_use_a_pool_of_its_own_and_submit_to_the_other(tmp_path):
    got, over = [], threading.Event()

    def use_pools(_):
        with poly.Pool(1) as own:
            got.append(own.doit(abs, -2))
        got.append(pool.promise(abs, -3).result())
        over.set()

    with poly.Pool(1) as pool:
        pool.promise(hold_until, str(tmp_path / "gate")).add_done_callback(use_pools)
        (tmp_path / "gate").touch()
        assert over.wait(60)
    assert got == [2, 3]


def test_what_a_callback_raises_ends_nothing(tmp_path, caplog):
    called = []

    def leave(_):
        raise SystemExit("out")

    with poly.Pool(1) as pool:
        promise = pool.promise(hold_until, str(tmp_path / "gate"))
        for fn in (leave, called.append, leave, called.append):
            promise.add_done_callback(fn)
        (tmp_path / "gate").touch()
        assert promise.result(30) == "held"
    assert called == [promise] * 2
    assert caplog.text.count("exception calling callback") == 2


def test_a_callback_that_was_added_can_be_removed(tmp_path):
    called = []
    with poly.Pool(1) as pool:
        promise = pool.promise(hold_until, str(tmp_path / "gate"))
        first, second = called.append, lambda _: called.append("second")
        promise.add_done_callback(first)
        promise.add_done_callback(second)
        promise.remove_done_callback(first)
        (tmp_path / "gate").touch()
    assert called == ["second"]


def test_a_promise_that_the_user_settles_calls_its_callbacks_in_that_call():
    promise, called = poly.Promise(), []
    promise.add_done_callback(lambda _: called.append(threading.current_thread()))
    promise.set_result(1)
    promise.add_done_callback(lambda _: called.append(threading.current_thread()))
    assert called == [threading.current_thread()] * 2


def test_without_room_for_a_thread_callbacks_are_called_all_the_same(tmp_path, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    called = []
    with poly.Pool(1) as pool:
        wait_for(lambda: "polycephaly-callbacks" not in names())
        promise = pool.promise(hold_until, str(tmp_path / "gate"))
        promise.add_done_callback(called.append)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            (tmp_path / "gate").touch()
            assert promise.result(30) == "held"
            wait_for(lambda: called)
    assert called == [promise]


def called_back(path, use):
    """Return what `use` gives, or the error that it raises, in a callback of a task of a pool, and
    end the pool while the callback runs."""
    got, entered = poly.Promise(), threading.Event()

    def callback(_):
        entered.set()
        try:
            got.set_result(use(pool))
        except BaseException as error:
            got.set_result(error)

    with poly.Pool(1) as pool:
        pool.promise(hold_until, str(path)).add_done_callback(callback)
        path.touch()
        assert entered.wait(30)
    return got.result(60)


def refused(outcome):
    return isinstance(outcome, RuntimeError) and "thread that calls callbacks" in str(outcome)


@pytest.mark.guarantee("promise-6")
@pytest.mark.parametrize("use", ["refresh", "push", "resize"])
def test_what_waits_for_a_pool_that_ends_meanwhile_returns(use, tmp_path):
    def change(pool):
        time.sleep(0.2)  # the block ends now
        return getattr(pool, use)(*{"refresh": (), "push": ({"a": 1},), "resize": (2,)}[use])

    outcome = called_back(tmp_path / "gate", change)
    assert outcome is None or isinstance(outcome, RuntimeError), outcome


@pytest.mark.guarantee("promise-9")
def test_the_end_of_a_block_waits_for_callbacks_of_promises_that_follow_from_its_tasks():
    called = []

    def slow(value):
        time.sleep(0.3)
        called.append(value)

    with poly.Pool(2) as pool:
        followed = pool.promise(abs, -1).then(lambda _: pool.promise(time.sleep, 0.2))
        followed.then(lambda _: slow("followed"))
        gathered = poly.gather(pool.promise(time.sleep, 0.1), pool.promise(abs, -1))
        gathered.add_done_callback(lambda _: slow("gathered"))
        time.sleep(0.15)
    assert sorted(called) == ["followed", "gathered"]


WAITS = {
    "set_result": lambda pool, later: settled_by(later),
    "as_completed": lambda pool, later: list(poly.as_completed([later.then(str)])),
    "green.run": lambda pool, later: green.run(awaited(later.then(str))),
    "asyncio.run": lambda pool, later: asyncio.run(awaited(later.then(str))),
    "end": lambda pool, later: asyncio.run(ended(later)),
}


def settled_by(later):
    promise = poly.Promise()
    later.then(promise.set_result)
    return promise.result()


async def ended(later):
    async with poly.Pool(1) as own:
        promise = own.promise(abs, -1)
        await promise
        own.promise(time.sleep, 0.2).add_done_callback(print)
        await asyncio.sleep(0.4)


@pytest.mark.guarantee("promise-6")
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_for_another_callback_is_refused(wait, tmp_path):
    got, over = [], threading.Event()

    def callback(_):
        try:
            got.append(WAITS[wait](pool, pool.promise(hold_until, str(tmp_path / "other"))))
        except BaseException as error:
            got.append(error)
        (tmp_path / "other").touch()
        over.set()

    with poly.Pool(1) as pool:
        pool.promise(hold_until, str(tmp_path / "gate")).add_done_callback(callback)
        (tmp_path / "gate").touch()
        assert over.wait(60)
    assert refused(got[0]), got


@pytest.mark.guarantee("promise-6")
def test_a_result_of_apply_async_whose_callback_is_due_is_not_waited_for(tmp_path):
    got, over = [], threading.Event()

    def callback(_):
        try:
            got.append(pool.apply_async(time.sleep, (0.2,), callback=print).get())
        except BaseException as error:
            got.append(error)
        over.set()

    with StandardPool(1) as pool:
        pool.apply_async(hold_until, (str(tmp_path / "gate"),), callback=callback)
        (tmp_path / "gate").touch()
        assert over.wait(60)
    assert refused(got[0]), got


def test_asyncio_is_woken_though_a_callback_takes_long(tmp_path):
    let_go, entered = threading.Event(), threading.Event()

    async def main():
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(pool, abs, -3) == 3
        assert await asyncio.wrap_future(pool.promise(abs, -4)) == 4

    with poly.Pool(2) as pool:
        pool.promise(time.sleep, 0.1).add_done_callback(lambda _: (entered.set(), let_go.wait(60)))
        assert entered.wait(30)
        asyncio.run(asyncio.wait_for(main(), 30))
        done, _ = concurrent.futures.wait([pool.promise(abs, -1)], timeout=30)
        assert len(done) == 1 and not let_go.is_set()
        let_go.set()


def test_a_finalizer_that_settles_a_promise_while_the_thread_is_made_stops_nothing(monkeypatch):
    class Owner:
        def __init__(self, promise):
            self.itself, self.promise = self, promise

        def __del__(self):
            self.promise.set_result("collected")

    class Collecting(lazy_thread.OwnThread):
        def __init__(self, *args):
            gc.collect()
            super().__init__(*args)

    wait_for(lambda: not callbacks_thread._thread)
    monkeypatch.setattr(lazy_thread, "OwnThread", Collecting)
    called = []
    with poly.Pool(1) as pool:
        collected = poly.Promise()
        collected.add_done_callback(called.append)
        gc.disable()
        try:
            Owner(collected)
            promise = pool.promise(time.sleep, 0.1)
            promise.add_done_callback(called.append)
            wait_for(lambda: len(called) == 2)
        finally:
            gc.enable()
        assert pool.doit(abs, -1) == 1
    assert set(called) == {collected, promise}


@pytest.mark.parametrize("error", [RuntimeError("no thread"), MemoryError()])
def test_a_thread_that_cannot_be_started_is_done_without(error, monkeypatch):
    def fail(self):
        raise error

    wait_for(lambda: not callbacks_thread._thread)
    called = []
    with poly.Pool(1) as pool:
        pool.doit(abs, -1)
        monkeypatch.setattr(lazy_thread.OwnThread, "start", fail)
        promise = pool.promise(time.sleep, 0.1)
        promise.add_done_callback(called.append)
        wait_for(lambda: called)
        monkeypatch.undo()


def test_an_asynchronous_exception_between_two_callbacks_ends_nothing():
    called = []
    with poly.Pool(1) as pool:
        pool.promise(time.sleep, 0.1).add_done_callback(called.append)
        wait_for(lambda: called)
        ident = ctypes.c_ulong(callbacks_thread._thread.ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        wait_for(lambda: not callbacks_thread._thread or callbacks_thread._thread.is_alive())
        pool.promise(time.sleep, 0.1).add_done_callback(called.append)
        wait_for(lambda: len(called) == 2)


def test_a_drone_that_a_callback_makes_lives_on(tmp_path):
    made = poly.Promise()
    with poly.Pool(1) as pool:
        pool.promise(time.sleep, 0.1).add_done_callback(lambda _: made.set_result(poly.Drone()))
        drone = made.result(30)
        callbacks_thread.end_when_idle()
        wait_for(lambda: not callbacks_thread._thread)
        with drone:
            assert drone.doit(abs, -5) == 5


def test_nothing_is_left_when_the_last_pool_has_ended(monkeypatch):
    monkeypatch.setattr(lazy_thread, "IDLE_SECONDS", 1000.0)
    wait_for(lambda: not callbacks_thread._thread)
    called = []
    with poly.Pool(1) as pool:
        pool.promise(time.sleep, 0.1).add_done_callback(called.append)
    assert called
    wait_for(lambda: "polycephaly-callbacks" not in names())


def test_a_callback_cancels_no_promise_that_runs():
    running, told = poly.Promise(), poly.Promise()
    assert running.set_running_or_notify_cancel()
    with poly.Pool(1) as pool:
        pool.promise(abs, -1).add_done_callback(lambda _: told.set_result(running.cancel()))
        assert told.result(30) is False and running.running()


def test_a_condition_that_a_thread_keeps_holds_up_no_promise(tmp_path):
    """As `concurrent.futures.wait` keeps those of its futures when it is interrupted."""
    with poly.Pool(2) as pool:
        held = [pool.promise(hold_until, str(tmp_path / "gate")) for _ in range(2)]
        called = [each.then(str) for each in held]
        with held[0]._condition:
            cancelled = pool.promise(abs, -1)
            with cancelled._condition:
                (tmp_path / "gate").touch()
                assert [each.result(30) for each in (*held, *called)] == ["held"] * 4
                assert cancelled.result(30) == 1 and pool.doit(abs, -2) == 2


def test_who_looks_at_a_promise_while_the_loop_settles_it_is_told_once(tmp_path):
    """`wait` holds the conditions, looks at the states, and then installs waiters, which count."""
    with poly.Pool(2) as pool:
        first = pool.promise(hold_until, str(tmp_path / "first"))
        second = pool.promise(hold_until, str(tmp_path / "second"))
        with first._condition, second._condition:
            looked = [each._state for each in (first, second)]
            (tmp_path / "first").touch()
            assert first.result(30) == "held"
            waiter = _base._AllCompletedWaiter(
                sum(each not in ("FINISHED", "CANCELLED_AND_NOTIFIED") for each in looked), False
            )
            for each in (first, second):
                assert each._state not in ("FINISHED", "CANCELLED_AND_NOTIFIED")
                each._waiters.append(waiter)
        assert first._state == "FINISHED" and waiter.num_pending_calls == 1
        (tmp_path / "second").touch()
        assert waiter.event.wait(30) and waiter.num_pending_calls == 0
        assert concurrent.futures.wait([first, second], 30).done == {first, second}
        assert [*concurrent.futures.as_completed([first, second], 30)]


def test_a_call_whose_input_fails_while_its_condition_is_held_is_not_run(tmp_path):
    log = tmp_path / "log"
    with poly.Pool(2) as pool:
        failing = pool.promise(fail_at, str(tmp_path / "gate"))
        waiting = [pool.promise(append, str(log), failing) for _ in range(20)]
        for each in waiting:
            each._condition.acquire()
        (tmp_path / "gate").touch()
        assert all(isinstance(each.exception(30), KeyError) for each in waiting)
        for each in waiting:
            each._condition.release()
        assert pool.doit(abs, -1) == 1
    assert not log.exists()


def fail_at(gate):
    hold_until(gate)
    raise KeyError(gate)
