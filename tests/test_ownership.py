"""A drone ends with whoever made it: thread, asyncio task, last reference; drones nest."""

import asyncio
import concurrent.futures
import gc
import os
import subprocess
import sys
import threading
import types
import weakref

import pytest
from engines import local_only, on_each_engine, poly, rounds
from faults import append, block_for_ever, exit_hard, lines, wait_for
from scripts import run_script

from polycephaly import green
from polycephaly.pool.dispatcher import Dispatcher
from polycephaly.pool.drone_handle import DroneHandle
from polycephaly.pool.task import Task
from polycephaly.runtime import fork_guard
from polycephaly.wire.functions import RemoteFunction

pytestmark = on_each_engine


def gone(pid):
    return lambda: not os.path.exists(f"/proc/{pid}")


def in_thread(fn):
    said = []
    thread = threading.Thread(target=lambda: said.append(fn()))
    thread.start()
    thread.join()
    return said[0]


@pytest.mark.guarantee("end-5")
@pytest.mark.parametrize("busy", [False, True])
def test_a_threads_drone_ends_with_the_thread(busy):
    kept = []

    def body():
        drone = poly.Drone()
        kept.append(drone)
        if busy:
            kept.append(drone.promise(block_for_ever))
        return drone.doit(os.getpid) if not busy else drone.pid

    wait_for(gone(in_thread(body)))
    wait_for(lambda: not kept[0].alive)
    with pytest.raises(RuntimeError):
        kept[0].doit(abs, 1)
    if busy:
        assert kept[1].exception(30) is not None


@pytest.mark.guarantee("end-5")
@pytest.mark.parametrize("owner", ["thread", "asyncio task", "green thread"])
def test_what_ended_with_its_owner_says_with_whom_and_names_the_cure(owner):
    def make():
        drone = poly.Drone()
        return drone, drone.promise(block_for_ever)

    async def main():
        return make()

    if owner == "thread":
        drone, promise = in_thread(make)
    else:
        drone, promise = asyncio.run(main()) if owner == "asyncio task" else green.run(main)
    said = (
        rf"its owner, {owner} '.+', has ended "
        r"\(use Drone\(detached=True\) or a Pool to outlive the owner\)"
    )
    with pytest.raises(poly.DroneDied, match=said):
        promise.result(60)
    with pytest.raises(RuntimeError, match=said):
        drone.promise(abs, 1)


@pytest.mark.guarantee("end-5")
def test_a_detached_drone_outlives_its_thread():
    drone = in_thread(lambda: poly.Drone(detached=True))
    assert drone.doit(abs, -1) == 1
    drone.release()


def test_a_drone_of_the_main_thread_outlives_other_threads():
    with poly.Drone() as drone:
        in_thread(lambda: drone.doit(abs, -1))
        assert drone.doit(abs, -2) == 2


@pytest.mark.guarantee("end-5")
@pytest.mark.parametrize("how", ["return", "exception", "cancel"])
def test_an_asyncio_tasks_drone_ends_with_the_task(how):
    async def owner(said):
        drone = poly.Drone()
        said.set_result(drone)
        if how == "exception":
            raise ZeroDivisionError
        if how == "cancel":
            await asyncio.sleep(1000)

    async def main():
        said = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(owner(said))
        drone = await said
        if how == "cancel":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(wait_for, gone(drone.pid))
        return drone

    drone = asyncio.run(main())
    wait_for(lambda: not drone.alive)  # the reactor hears of it a little later


@pytest.mark.guarantee("end-5")
def test_a_detached_drone_outlives_its_task():
    async def owner():
        return poly.Drone(detached=True)

    async def main():
        drone = await asyncio.create_task(owner())
        return drone, await drone.promise(abs, -3)

    drone, value = asyncio.run(main())
    assert value == 3 and drone.alive
    drone.release()


@pytest.mark.guarantee("end-5")
@local_only
def test_a_drone_made_by_a_line_that_awaits_at_the_asyncio_prompt_outlives_the_line():
    lines = """
import polycephaly as poly
d = poly.Drone(); await asyncio.sleep(0)
print("kept", d.doit("6 * 7"))
async def make(): return poly.Drone()

own = await asyncio.create_task(make(), name="mine")
own.doit("1")
"""
    env = {**os.environ, "PYTHON_BASIC_REPL": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "asyncio"], input=lines, env=env, capture_output=True, text=True
    )
    assert "kept 42\n" in run.stdout, run.stderr
    assert "its owner, asyncio task 'mine', has ended" in run.stderr


@pytest.mark.guarantee("end-6")
def test_a_drone_without_references_is_released():
    drone = poly.Drone()
    pid, known = drone.pid, weakref.ref(drone)
    del drone
    gc.collect()
    wait_for(
        lambda: known() is None
    )  # a thread that has it in hand may not have been let go on since
    wait_for(gone(pid))


@pytest.mark.guarantee("end-6")
def test_a_pool_without_references_finishes_its_work_and_ends():
    pool = poly.Pool(2)
    pids = [d.pid for d in pool.drones]
    work = [pool.promise(abs, -i) for i in range(100)]
    del pool
    gc.collect()
    assert [p.result(60) for p in work] == list(range(100))
    for pid in pids:
        wait_for(gone(pid))


@pytest.mark.guarantee("end-6")
def test_a_pool_in_a_reference_cycle_is_released():
    class Node:
        pass

    node = Node()
    node.pool, node.self = poly.Pool(1), node
    pid = node.pool.drones[0].pid
    del node
    gc.collect()
    wait_for(gone(pid))


def test_a_settled_promise_does_not_keep_the_pool_alive():
    pool = poly.Pool(1)
    pid, p = pool.drones[0].pid, pool.promise(abs, -1)
    assert p.value == 1
    del pool
    gc.collect()
    wait_for(gone(pid))
    assert p.value == 1


class Thing:
    pass


def take(thing):
    pass


def wait_until_nothing_refers_to(reference):
    """A thread that has the object in hand may not have been let go on since."""

    def is_gone():
        gc.collect()
        return reference() is None

    wait_for(is_gone)


def cancelled(promise):
    assert promise.cancel()
    return promise


def cancelled_while_queued(pool):
    running = pool.promise(block_for_ever)
    queued = cancelled(pool.promise(abs, -1))
    cancelled(running)
    return queued


class WithFrames(Exception):
    """Has, after unpickling, a traceback of its own, as under tblib, which dask installs. Its
    frames refer to those of the thread that unpickled it."""

    def __reduce__(self):
        return raised_with_frames, ()


def raised_with_frames():
    try:
        raise WithFrames
    except WithFrames as error:
        return error


def raise_with_frames():
    raise WithFrames


SETTLED = {
    "a small value": lambda pool: pool.promise(abs, -1),
    "a large value": lambda pool: pool.promise(bytearray, 1 << 20),
    "a lambda": lambda pool: pool.promise(lambda: bytes(10)),
    "an error": lambda pool: pool.promise(int, "x"),
    "an error with frames": lambda pool: pool.promise(raise_with_frames),
    "a value of one drone": lambda pool: pool.drones[0].promise(abs, -1),
    "an error of one drone": lambda pool: pool.drones[0].promise(int, "x"),
    "a death": lambda pool: pool.promise(exit_hard, 3),
    "a failed input": lambda pool: pool.drones[0].promise(abs, pool.promise(int, "x")),
    "cancelled while queued": cancelled_while_queued,
    "cancelled while running": lambda pool: cancelled(pool.promise(block_for_ever)),
}


@pytest.mark.parametrize("how", SETTLED)
def test_a_settled_promise_keeps_nothing_of_its_pool(how):
    thing = Thing()
    known = weakref.ref(thing)
    with poly.Pool(1, initializer=take, initargs=(thing,), output="discard") as pool:
        del thing
        promise = SETTLED[how](pool)
        concurrent.futures.wait([promise])
    assert known() is not None  # the pool keeps it, for drones to come
    del pool
    wait_until_nothing_refers_to(known)
    assert promise.done() and promise.cancel() == promise.cancelled()


@local_only
def test_a_snapshot_keeps_no_value_after_the_pool():
    main, thing = sys.modules["__main__"], Thing()
    known = weakref.ref(thing)
    main.results = [thing]
    del thing
    with poly.Pool(1) as pool:
        del main.results
        assert known() is not None  # only so can a function be told from one that is rebound
    wait_until_nothing_refers_to(known)
    assert pool.drones == []


@local_only
def test_a_snapshot_keeps_no_value_after_its_last_drone():
    main, thing = sys.modules["__main__"], Thing()
    known = weakref.ref(thing)
    main.results = [thing]
    del thing
    with poly.Pool(1) as pool:
        drone = pool.drones[0]
        del main.results
        pool.refresh()
        wait_until_nothing_refers_to(known)
        assert not drone.alive


@local_only
@pytest.mark.guarantee("promise-6")
def test_a_finalizer_that_runs_while_the_package_holds_its_guard_is_refused_to_wait():
    """The end of a pool needs the guard, in another thread."""
    pool, said = poly.Pool(1), []

    class Owner:
        def __del__(self):
            for act in (pool.shutdown, poly.Pool):
                try:
                    act()
                except RuntimeError as error:
                    said.append(str(error))

    with fork_guard.guard:
        Owner()
    waited, started = said
    assert waited.startswith("a finalizer waited for ")
    assert started.startswith("a finalizer that runs while a pool is at work cannot start drones")
    pool.shutdown()


@local_only
def test_a_pool_does_not_keep_its_first_drone():
    with poly.Pool(1, output="discard") as pool:
        first = pool.drones[0]
        handle = weakref.ref(first._handle)
        first.promise(exit_hard, 3).exception()
        del first
        wait_until_nothing_refers_to(handle)


@local_only
def test_a_settled_promise_keeps_no_shared_memory_for_its_function():
    with poly.Pool(1) as pool:
        content = bytearray(1 << 20)
        promise = pool.promise(lambda: len(content))
        assert promise.value == 1 << 20
        wait_for(lambda: pool._dispatcher.supervisor.engine.shared_memory()[0] == 0)


@local_only
def test_a_fresh_drone_for_one_promise_ends_with_its_work():
    p = poly.promise(os.getpid)
    wait_for(gone(p.result(60)))


@local_only
def test_a_promise_nobody_keeps_still_runs(tmp_path):
    path = str(tmp_path / "ran")
    poly.promise(append, path, "ran")
    gc.collect()
    wait_for(lambda: lines(path) == ["ran"])


def start_nested():
    global nested
    nested = poly.Pool(2)
    return [os.getpid(), *(p.value for p in nested.everywhere(os.getpid))]


def start_deeper(levels):
    global nested
    nested = poly.Drone()
    return [
        os.getpid(),
        *(nested.doit(start_deeper, levels - 1) if levels else [nested.doit(os.getpid)]),
    ]


@pytest.mark.guarantee("end-7")
@pytest.mark.parametrize("how", ["release", "kill", "die", "collect"])
def test_nested_drones_end_with_their_drone(how):
    drone = poly.Drone()
    pids = drone.doit(start_nested)
    assert len(set(pids)) == 3
    if how == "release":
        drone.release()
    elif how == "kill":
        drone.kill()
    elif how == "die":
        drone.promise(exit_hard, 1).exception()
    else:
        del drone
        gc.collect()
    for pid in pids:
        wait_for(gone(pid))


@pytest.mark.guarantee("end-7")
def test_drones_nest_several_levels_deep():
    with poly.Drone() as drone:
        pids = drone.doit(start_deeper, 3)
        assert len(set(pids)) == 5
    for pid in pids:
        wait_for(gone(pid))


@pytest.mark.guarantee("end-7")
def test_a_nested_pool_computes():
    def inner(n):
        with poly.Pool(2) as pool:
            return sum(pool.map(abs, range(-n, 0)))

    with poly.Pool(2) as pool:
        assert [p.value for p in [pool.promise(inner, n) for n in (10, 20, 30)]] == [55, 210, 465]


def test_releasing_twice_is_no_error():
    drone = poly.Drone()
    drone.doit(abs, -1)
    drone.release()
    drone.release()
    assert not drone.alive and drone.exitcode == 0


def test_a_pools_drone_that_is_released_is_replaced():
    with poly.Pool(2) as pool:
        first = pool.drones[0]
        first.release()
        assert not first.alive
        wait_for(lambda: len(pool.drones) == 2)
        assert len({p.value for p in pool.everywhere(os.getpid)}) == 2


def test_a_pools_drone_that_is_released_while_it_starts_does_its_own_first():
    for _ in rounds(10):
        with poly.Pool(1) as pool:
            with pool.drones[0] as drone:
                promise = drone.promise(os.getpid)
            assert promise.value == drone.pid
            with pytest.raises(RuntimeError, match="released"):
                drone.promise(os.getpid)


@local_only
def test_a_pool_dropped_inside_its_own_callback_ends():
    done = run_script("""
        import polycephaly as poly, threading
        pool, over = poly.Pool(1), threading.Event()
        def drop(_):
            global pool
            del pool
            over.set()
        pool.promise(abs, -1).add_done_callback(drop)
        assert over.wait(60)
        print("over")
    """)
    assert done.stdout == "over\n", done.stderr


@pytest.mark.parametrize("on_death", ["replace", "break"])
def test_an_error_that_was_met_keeps_no_pool_alive(on_death):
    """Its traceback holds the frame that holds the pool; so nothing of ours may hold the error."""

    def meet():
        pool = poly.Pool(1, on_death=on_death, output="discard")
        try:
            pool.doit(os._exit, 3)
        except poly.DroneDied:
            return weakref.ref(pool)

    pool = meet()
    # The thread that settled the promise, and has the error for that, may not have been given the
    # interpreter since.
    wait_for(lambda: gc.collect() is not None and pool() is None)


@local_only
@pytest.mark.parametrize("was_posted", [False, True])
def test_an_alarm_that_interrupts_the_making_of_a_pool_leaves_no_process(monkeypatch, was_posted):
    def post_and_be_interrupted(dispatcher, callback, *args):
        made.append(dispatcher)
        monkeypatch.undo()
        if was_posted:
            dispatcher.post(callback, *args)
        raise TimeoutError("of the handler of an alarm")

    made = []
    monkeypatch.setattr(Dispatcher, "post", post_and_be_interrupted)
    with pytest.raises(TimeoutError, match="alarm"):
        poly.Pool(1)
    assert made.pop().ended.result(30) is None


@pytest.mark.parametrize("value", [int, dict], ids=["answered together", "answered alone"])
def test_a_settled_promise_keeps_no_other_task_of_its_message(value):
    with poly.Pool(1) as pool:
        promises = [pool.promise(value) for _ in range(500)]
        poly.gather(*promises).result()
    promise = promises[250]
    del promises
    found, todo = {id(promise)}, [promise]
    while todo:
        for each in gc.get_referents(todo.pop()):
            if not isinstance(each, (type, types.FunctionType)) and id(each) not in found:
                found.add(id(each))
                todo.append(each)
                assert not isinstance(each, (Task, Dispatcher, DroneHandle, RemoteFunction))
    assert len(found) < 30
