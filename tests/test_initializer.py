"""An initializer runs in each drone before any work, in replacements too."""

import os
import threading
from concurrent.futures.process import BrokenProcessPool

import pytest
from engines import local_only, on_each_engine, poly, told
from faults import append, exit_hard, lines, wait_for
from work import fail

pytestmark = on_each_engine


def set_up(path, value):
    global was_set_up
    append(path, str(os.getpid()))
    was_set_up = value


def look(_):
    return was_set_up


def test_it_runs_once_in_each_drone_before_any_work(tmp_path):
    path = str(tmp_path / "ran")
    with poly.Pool(3, initializer=set_up, initargs=(path, 7)) as pool:
        assert list(pool.map(look, range(100))) == [7] * 100
        assert [p.value for p in pool.everywhere(look, 0)] == [7] * 3
        assert sorted(map(int, lines(path))) == sorted(d.pid for d in pool.drones)


def test_it_runs_in_a_replacement_too(tmp_path):
    path = str(tmp_path / "ran")
    with poly.Pool(1, initializer=set_up, initargs=(path, 7), output="discard") as pool:
        assert pool.promise(exit_hard, 1).exception() is not None
        assert pool.doit(look, 0) == 7
        assert len(set(lines(path))) == 2


def test_a_lone_drone_has_one_too(tmp_path):
    with poly.Drone(initializer=set_up, initargs=(str(tmp_path / "ran"), 3)) as drone:
        assert drone.doit(look, 0) == 3


def test_it_may_be_a_closure():
    n = 5

    def bind():
        import sys

        sys.bound_here = n

    with poly.Pool(1, initializer=bind) as pool:
        assert pool.doit("import sys; sys.bound_here") == 5


def error_of(**how):
    """What a user gets from a pool whose initializer cannot succeed: at its making, a call, or a
    wait."""
    try:
        pool = poly.Pool(2, output="discard", **how)
    except BrokenProcessPool as broken:
        return broken
    with pool:
        try:
            error = pool.submit(abs, -1).exception(30)
        except BrokenProcessPool as broken:
            error = broken
        assert isinstance(error, BrokenProcessPool)
        with pytest.raises(BrokenProcessPool):
            wait_for(lambda: pool.submit(abs, -1) and False)
        return error


@pytest.mark.guarantee("death-13", "work-20")
def test_one_that_fails_breaks_the_pool_and_says_why():
    error = error_of(initializer=fail, initargs=("no database",))
    assert "initializer" in str(error) and "no database" in str(error)
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.guarantee("death-13")
def test_one_that_kills_its_drone_breaks_the_pool():
    assert ("exit status 3" if told(3) else "exit_hard") in str(
        error_of(initializer=exit_hard, initargs=(3,))
    )


def test_one_that_cannot_be_pickled_says_so():
    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        poly.Pool(1, initializer=lambda: lock)


def test_a_lone_drone_whose_initializer_fails_says_why():
    with (
        pytest.raises(BrokenProcessPool, match="no disk"),
        poly.Drone(initializer=fail, initargs=("no disk",)) as drone,
    ):
        drone.doit(abs, -1)


def test_drones_that_die_in_it_end_a_pool_that_is_being_closed_too():
    pool = poly.Pool(1, initializer=os._exit, initargs=(3,))
    work = pool.promise(abs, -1)
    pool.shutdown()
    assert isinstance(work.exception(30), BrokenProcessPool)


def test_it_is_none_of_the_tasks_after_which_a_drone_is_replaced(tmp_path):
    with poly.Pool(
        1, max_tasks=2, initializer=append, initargs=(str(tmp_path / "began"), "x")
    ) as pool:
        pids = [pool.promise(os.getpid).result(30) for _ in range(6)]
    assert [pids.count(each) for each in dict.fromkeys(pids)] == [2, 2, 2]


@local_only
def test_the_text_of_an_error_may_fail():
    class Odd(Exception):
        def __str__(self):
            raise ZeroDivisionError

    def fail_oddly():
        raise Odd

    with (
        pytest.raises(BrokenProcessPool, match="Odd"),
        poly.Pool(1, initializer=fail_oddly, output="discard") as pool,
    ):
        pool.doit(int)
