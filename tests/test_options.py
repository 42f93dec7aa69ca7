"""Options: single pieces of work on other terms than their pool's."""

import gc
import os
import signal
import sys
import time
import weakref

import pytest
from engines import local_only, on_each_engine, poly
from faults import append, hold_until, lines, wait_for
from work import slow

from polycephaly import green
from polycephaly.pool.interfaces import TaskOptions
from polycephaly.pool.task_promise import facts_of

pytestmark = on_each_engine


def die_once(path):
    append(path, "once")
    if len(lines(path)) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
    return len(lines(path))


@pytest.mark.guarantee("promise-4")
def test_a_time_limit_of_one_promise_does_not_touch_its_neighbours():
    with poly.Pool(2) as pool:
        drones = {drone.pid for drone in pool.drones}
        limited = [pool.options(timeout=0.3).promise(slow, 100) for _ in range(3)]
        others = [pool.promise(slow, 0.01) for _ in range(50)]
        for each in limited:
            with pytest.raises(TimeoutError, match=r"slow ran for more than 0.3 s on pool-"):
                each.result(60)
        assert [p.value for p in others] == [0.01] * 50
        assert {drone.pid for drone in pool.drones} == drones


def test_the_error_of_a_time_limit_has_the_lines_at_which_it_struck():
    def deep():
        time.sleep(1000)

    def outer():
        deep()

    with poly.Pool(1) as pool:  # whose drone may answer too late, on a busy machine
        limited = pool.options(timeout=0.5)
        texts = (str(limited.promise(outer).exception().__cause__) for _ in range(100))
        text = next(text for text in texts if "time.sleep(1000)" in text)
    assert text.index(".outer\n") < text.index(".deep\n") < text.index("time.sleep(1000)")


def test_a_pools_own_time_limit_can_be_made_longer_and_shorter():
    with poly.Pool(1, timeout=0.5) as pool:
        assert pool.options(timeout=20).doit(slow, 0.8) == 0.8
        with pytest.raises(TimeoutError, match=r"0\.1 s"):
            pool.options(timeout=0.1).doit(slow, 100)
        with pytest.raises(TimeoutError, match=r"0\.5 s"):
            pool.doit(slow, 100)


@local_only
def test_what_ended_in_time_while_its_controller_was_stopped_is_not_too_late(tmp_path, later):
    """As by Ctrl-Z, and `fg` much later: then nobody reads."""
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(2) as pool:
        drones = {drone.pid for drone in pool.drones}
        limited, reactor = pool.options(timeout=1000), pool._dispatcher.reactor
        work = [limited.promise(hold_until, gate, started) for _ in "12"]
        wait_for(lambda: len(lines(started)) == 2)
        with reactor._lock:
            append(gate, "open")
            handles = pool._dispatcher.handles
            wait_for(
                lambda: (
                    {each.last_answered() for each in handles} == {facts_of(p).number for p in work}
                )
            )
            later(pool, 1000)
            reactor.timers.fire_due()  # before anything is read
        assert [each.exception() for each in work] == [None, None]
        assert {drone.pid for drone in pool.drones} == drones


def test_a_drone_has_options_too():
    with poly.Drone() as drone:
        drone.doit("x = 5")
        with pytest.raises(TimeoutError):
            drone.options(timeout=0.2).doit("import time; time.sleep(100)")
        assert drone.doit("x") == 5
        assert drone.options(timeout=3) == drone
    with poly.Pool(1) as pool:
        with pytest.raises(TimeoutError):
            pool.drones[0].options(timeout=0.2).doit(slow, 100)
        with pytest.raises(TimeoutError):
            pool.options(timeout=0.2).drones[0].doit(slow, 100)


@pytest.mark.guarantee("death-6")
def test_retries_of_one_promise(tmp_path):
    with poly.Pool(1) as pool:
        assert pool.options(retries=1).doit(die_once, str(tmp_path / "a")) == 2
        with pytest.raises(poly.DroneDied):
            pool.doit(die_once, str(tmp_path / "b"))
    with poly.Pool(1, retries=3) as pool, pytest.raises(poly.DroneDied):
        pool.options(retries=0).doit(die_once, str(tmp_path / "c"))


def test_options_hold_for_each_call_of_a_map(tmp_path, later):
    with poly.Pool(1) as pool:
        begun = [str(tmp_path / each) for each in "abc"]
        until = [each + "-may-end" for each in begun]
        results = pool.options(timeout=1000).map(hold_until, until, begun)
        for each in "ab":  # 600 s for each, 1,200 for both
            wait_for(lambda each=each: lines(str(tmp_path / each)))
            later(pool, 600)
            append(str(tmp_path / each) + "-may-end", "now")
            assert next(results) == "held"
        wait_for(lambda: lines(begun[2]))
        later(pool, 1000)
        with pytest.raises(TimeoutError, match="more than 1000 s"):
            next(results)
        assert list(pool.options(retries=1).map(die_once, [str(tmp_path / "d")])) == [2]


def test_options_are_added_up_and_everything_else_is_the_pools():
    with poly.Pool(2, name="mine") as pool:
        both = pool.options(timeout=3).options(retries=2)
        assert both._task_options == TaskOptions(3, 2) and pool._task_options is None
        assert [d.pid for d in both.drones] == [d.pid for d in pool.drones]
        assert repr(both) == repr(pool)
        assert sorted(p.value for p in both.everywhere(os.getpid)) == sorted(
            d.pid for d in pool.drones
        )
        assert both.submit(pow, 2, 5).result() == 32


def test_a_pool_lives_as_long_as_its_options():
    limited = poly.Pool(1).options(timeout=5)
    gc.collect()
    assert limited.doit(abs, -1) == 1
    gone = weakref.ref(limited._original)
    del limited
    gc.collect()
    wait_for(lambda: gone() is None)


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": -1}, {"retries": -1}])
def test_options_that_make_no_sense_are_refused(wrong):
    with poly.Pool(1) as pool, pytest.raises(ValueError, match="|".join(wrong)):
        pool.options(**wrong)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("timeout", [3e6, 1e12, float("inf")])
def test_a_time_limit_of_years_is_one(timeout, width):
    with poly.Pool(1, width=width) as pool:
        limited = pool.options(timeout=timeout)
        assert limited.doit(slow, 0.01) == 0.01
        assert [p.value for p in [limited.promise(later, i) for i in range(10)]] == list(range(10))
        time.sleep(0.1)
        assert pool.doit(slow, 0.01) == 0.01


async def later(x):
    return x


def test_the_result_of_work_with_a_time_limit_is_not_kept():
    class Thing:
        pass

    with poly.Pool(1) as pool:
        promise = pool.options(timeout=60).promise(Thing)
        gone = weakref.ref(promise.value)
        del promise
        wait_for(lambda: gone() is None)


@pytest.fixture
def stopped_clock(monkeypatch):
    """Stops the clock of this program as freezegun does: in each module that has it."""
    real = time.monotonic

    def stopped():
        return 0.0

    monkeypatch.setattr(time, "monotonic", stopped)
    for name, module in list(sys.modules.items()):
        if name.startswith("polycephaly"):
            for attribute, value in list(vars(module).items()):
                if value is real:
                    monkeypatch.setattr(module, attribute, stopped)


@pytest.mark.guarantee("promise-4")
@local_only
def test_a_time_limit_is_reached_while_a_test_has_stopped_the_clock(stopped_clock):
    with poly.Pool(1, timeout=0.3) as pool:
        promise = pool.promise(slow, 100)
        with pytest.raises(TimeoutError, match=r"not settled within 0.1 s"):
            promise.result(0.1)
        with pytest.raises(TimeoutError, match=r"slow ran for more than 0.3 s"):
            promise.result()


async def nap():
    await green.sleep(0.01)


@local_only
def test_a_sleep_ends_in_a_drone_that_began_while_a_test_had_stopped_the_clock(stopped_clock):
    with poly.Pool(1) as pool:
        pool.doit(nap)
