"""Callbacks of the promises that a pool settles run in a thread of their own."""

import threading
import time

import pytest
from faults import hold_until, wait_for

import polycephaly as poly


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
