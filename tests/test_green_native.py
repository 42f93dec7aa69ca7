"""Plain functions as green threads: each on a native thread, as many as are wanted, blocking only
themselves."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from functools import partial

import pytest
from faults import wait_for
from greens import double

import polycephaly as poly
from polycephaly import green
from polycephaly.green.scheduler import scheduler


def test_a_plain_function_runs_beside_the_coroutines_on_a_native_thread_of_its_own():
    opened = threading.Event()

    async def main():
        thread = green.spawn(lambda: opened.wait(30) and threading.get_ident())
        for _ in range(10):
            await green.sleep(0)
        assert not thread.done()
        opened.set()
        return await thread != threading.get_ident()

    assert green.run(main)


@pytest.mark.guarantee("green-6")
def test_hundreds_of_plain_functions_run_at_once():
    meet = threading.Barrier(200)
    assert sorted(green.par(*[lambda: meet.wait(30)] * 200)) == list(range(200))


def test_its_error_is_its_promises_with_a_traceback_of_the_users_code_only():
    def fails():
        raise KeyError("plain")

    error = green.spawn(fails).exception()
    assert isinstance(error, KeyError) and error.__traceback__.tb_frame.f_code.co_name == "fails"
    assert isinstance(green.spawn(fails, 1).exception(), TypeError)
    for kind in (SystemExit, KeyboardInterrupt, CancelledError):
        assert isinstance(green.spawn(_raises, kind).exception(), kind)


def _raises(kind):
    raise kind()


def test_plain_functions_hand_each_other_things_through_channels():
    def square(source, target):
        while (x := source.get()) is not None:
            target.put(x * x)
        target.put(None)

    source, target = green.Channel(), green.Channel(2)
    green.spawn(square, source, target)
    green.spawn(lambda: [source.put(i) for i in (*range(10), None)])
    assert [target.get() for _ in range(11)] == [i * i for i in range(10)] + [None]


@pytest.mark.guarantee("green-6")
def test_what_they_wait_for_stops_nobody_else():
    channel, promise, lock = green.Channel(), poly.Promise(), threading.Lock()
    lock.acquire()

    def locks():
        with lock:
            return "lock"

    waiting = [green.spawn(channel.get), green.spawn(lambda: promise.value), green.spawn(locks)]

    async def main():
        for _ in range(10):
            await green.sleep(0)
        assert not any(each.done() for each in waiting)
        await channel.send("channel")
        promise.set_result("promise")
        lock.release()
        return [await each for each in waiting]

    assert green.run(main) == ["channel", "promise", "lock"]


def test_a_plain_function_may_start_run_and_await_green_threads():
    def inside():
        return (
            green.run(double, 1),
            green.spawn(double, 2).value,
            green.map(double, [3]),
            green.par(lambda: 4),
        )

    assert green.spawn(inside).value == (2, 4, [6], [4])


def test_a_coroutine_that_a_plain_function_returns_is_run():
    thread = green.spawn(lambda: double(4), name="both")
    assert thread.value == 8 and thread.name == "both"

    async def fails():
        raise KeyError

    assert isinstance(green.spawn(lambda: fails()).exception(), KeyError)
    assert green.par(lambda: double(1), lambda: 2) == [2, 2]
    assert green.map(lambda x: double(x), [1, 2]) == [2, 4]


@pytest.mark.parametrize("wait", ["get", "put", "value", "run"])
def test_a_plain_function_that_waits_for_something_of_ours_is_cancelled_there(wait):
    channel, promise, ended = green.Channel(), poly.Promise(), []

    def waits():
        try:
            if wait == "get":
                channel.get()
            elif wait == "put":
                channel.put(1)
            elif wait == "value":
                _ = promise.value
            else:
                green.run(channel.receive)
        finally:
            ended.append(1)

    async def main():
        thread = green.spawn(waits)
        while not thread.cancel():
            await green.sleep(0.001)
        with pytest.raises(CancelledError):
            await thread
        assert thread.cancelled()

    green.spawn(main).result(30)
    assert (
        ended == [1] or wait == "value" or not ended
    )  # it may have been cancelled before it began


def test_a_plain_function_in_foreign_code_cannot_be_cancelled_and_says_so():
    entered, opened = threading.Event(), threading.Event()

    def blocks():
        entered.set()
        assert opened.wait(30)
        return "ended by itself"

    thread = green.spawn(blocks)
    assert entered.wait(30)
    assert thread.cancel() is False
    opened.set()
    assert thread.value == "ended by itself" and not thread.cancelled()


@pytest.mark.parametrize("wait", ["get", "put", "value", "spawned"])
def test_a_plain_function_that_is_cancelled_while_it_computes_is_cancelled_at_its_next_wait(wait):
    entered, opened = threading.Event(), threading.Event()
    channel, promise = green.Channel(), poly.Promise()

    def computes_then_waits():
        entered.set()
        assert opened.wait(30)
        if wait == "get":
            channel.get()
        elif wait == "put":
            channel.put(1)
        elif wait == "value":
            _ = promise.value
        else:
            _ = green.spawn(channel.receive).value

    keeps_it_alive = threading.Thread(target=threading.Event().wait, args=[5], daemon=True)
    thread = green.spawn(computes_then_waits)
    assert entered.wait(30)
    thread.cancel()
    opened.set()
    with pytest.raises(CancelledError):
        thread.result(30)
    assert thread.cancelled() and not keeps_it_alive.is_alive()


def test_a_group_with_a_plain_worker_ends_whenever_it_is_cancelled():
    async def main():
        for pause in (0, 0.001, 0.003):
            channel = green.Channel()

            def worker(channel=channel):
                while True:
                    channel.get()
                    time.sleep(0.002)

            async with green.Group() as group:
                for _ in range(3):
                    group.spawn(worker)
                for i in range(6):
                    await channel.send(i)
                await green.sleep(pause)
                group.cancel()
        return "on"

    assert green.spawn(main).result(30) == "on"


def test_a_cancel_that_comes_to_one_native_thread_does_not_reach_the_next_job_on_it():
    entered, opened = threading.Event(), threading.Event()

    def blocks():
        entered.set()
        assert opened.wait(30)

    thread = green.spawn(blocks)
    assert entered.wait(30)
    thread.cancel()
    opened.set()
    thread.result(30)
    for _ in range(20):
        channel = green.Channel()
        others = [green.spawn(channel.get) for _ in range(3)]
        for i in range(3):
            channel.put(i)
        assert sorted(each.result(30) for each in others) == [0, 1, 2]


def test_idle_native_threads_are_used_again():
    for _ in range(100):
        green.spawn(threading.get_ident).result(30)
    idents = [green.spawn(threading.get_ident).result(30) for _ in range(50)]
    assert len(set(idents)) < 50


def test_thread_locals_and_current_thread_work_in_plain_functions():
    local = threading.local()

    def work(i):
        local.value = i
        time.sleep(0.001)
        return local.value == i and threading.current_thread() in threading.enumerate()

    assert all(green.map(work, range(20), width=5))


def test_an_entry_of_current_thread_goes_with_its_native_thread():
    before = threading.active_count()
    green.par(*[lambda: threading.current_thread().name] * 10)
    wait_for(lambda: threading.active_count() <= before)


def test_timeouts_of_plain_get_and_put_lose_nothing():
    channel = green.Channel()
    with pytest.raises(TimeoutError):
        channel.get(timeout=0.01)
    with pytest.raises(TimeoutError):
        channel.put("nobody", timeout=0.01)
    getter = green.spawn(channel.get)
    channel.put("somebody")
    assert getter.value == "somebody"


def test_a_cancelled_plain_function_may_use_and_end_a_pool_in_its_clean_up():
    begun = threading.Event()

    def work():
        with poly.Pool(1) as pool:
            begun.set()
            pool.doit(time.sleep, 1000)

    thread = green.spawn(work)
    begun.wait()
    while not thread.cancel():  # False while it is between two waits
        time.sleep(0.001)
    with pytest.raises(CancelledError):
        thread.result(30)


def test_a_plain_function_that_polls_is_cancelled_at_whatever_moment():
    channel = green.Channel()

    def poll():
        while True:
            try:
                channel.get(timeout=0.001)
            except TimeoutError:
                continue

    for round_ in range(60):
        thread = green.spawn(poll)
        time.sleep(0.0001 * round_)
        thread.cancel()
        with pytest.raises(CancelledError):
            thread.result(30)


# -- tools that follow all threads -----------------------------------------------------------------


def followed(number):
    return number + 1


async def followed_in_steps(number):
    await green.sleep(0)
    return await green.call(followed, number)


async def followed_at_once():
    return await green.par(
        partial(followed_in_steps, 1), partial(followed, 1), partial(green.call_long, followed, 1)
    ), await green.spawn(followed_in_steps, 1, bound=True)


@pytest.mark.parametrize("install", [threading.settrace, threading.setprofile])
def test_what_threading_installs_in_all_threads_sees_green_threads_and_foreign_calls(install):
    seen = []

    def see(frame, event, arg):
        seen.append((frame.f_code, event, threading.get_ident()))
        return see

    assert green.run(followed_at_once) == ([2, 2, 2], 2)  # so that native threads live already
    wait_for(lambda: scheduler.bell)  # the owner sleeps
    install(see)
    try:
        assert green.run(followed_at_once) == ([2, 2, 2], 2)
        wait_for(lambda: scheduler.bell)
    finally:
        install(None)
    codes = [code for code, event, _ in seen if event == "call"]
    assert codes.count(followed.__code__) == 4
    assert codes.count(followed_in_steps.__code__) > 2  # at each step
    assert len({ident for code, _, ident in seen if code is followed.__code__}) > 1
    seen.clear()
    assert green.run(followed_at_once) == ([2, 2, 2], 2)
    assert not {followed.__code__, followed_in_steps.__code__}.intersection(c for c, *_ in seen)


def test_no_line_of_the_package_is_traced_where_a_switch_of_threads_could_do_harm():
    traced = []

    def see(frame, event, arg):
        traced.append(frame.f_code.co_filename)
        return see

    threading.settrace(see)
    try:
        green.run(followed_at_once)
    finally:
        threading.settrace(None)
    assert followed.__code__.co_filename in traced
    assert not [each for each in traced if each.startswith(os.path.dirname(poly.__file__))]


def test_coverage_counts_each_line_of_green_threads_foreign_calls_and_inline_tasks(tmp_path):
    pytest.importorskip("coverage")
    program = tmp_path / "program.py"
    program.write_text(COVERED)
    for command in (["run", str(program)], ["report", "-m", "--fail-under=100", str(program)]):
        ended = subprocess.run(
            [sys.executable, "-m", "coverage", *command],
            cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env={
                **os.environ,
                "COVERAGE_FILE": str(tmp_path / "counted"),
                "PYTHONPATH": os.path.dirname(os.path.dirname(poly.__file__)),
            },
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr


COVERED = """\
import polycephaly as poly
from polycephaly import green


def foreign(n):
    value = n
    return value


async def child(n):
    await green.sleep(0.001)
    value = await green.call(foreign, n)
    return value + await green.call_long(foreign, n)


def plain(n):
    value = n
    return value


async def bound(n):
    await green.sleep(0)
    value = await green.call(plain, n)
    return value


async def main():
    async with green.Group() as group:
        children = [group.spawn(child, n) for n in range(3)]
        group.spawn(plain, 3)
        group.spawn(bound, 3, bound=True)
    return [each.value for each in children]


def task(n):
    value = 2 * n
    return value


def callback(value):
    other = value
    return other


green.run(main)
green.map(plain, range(3))
with poly.Pool(2, engine="inline") as pool:
    pool.doit(task, 3)
    list(pool.map(task, range(3)))
    pool.promise(task, 4).then(callback).result()
"""
