"""One program, two executors: the standard library's and ours. What a program sees of them is the
same."""

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
from concurrent import futures
from concurrent.futures import CancelledError, Future, InvalidStateError, ProcessPoolExecutor

import pytest
import stand_in
from faults import append, failing_source, hold_until, lines, wait_for
from scripts import run_script

import polycephaly as poly

FORK = multiprocessing.get_context("fork")
COUNT = FORK.Value("i")  # made once: multiprocessing keeps the memory of these


def error_of(call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return type(error)


def fail():
    raise LookupError("the work's own", 7)  # with this comment


def recurse(depth):
    return recurse(depth + 1)


def put(queue, item):
    queue.put(item)


def set_up(lock, queue, value):
    global inherited
    inherited = lock, queue, value


def use_what_was_inherited(i):
    lock, queue, value = inherited
    with lock:
        value.value += i
    queue.put(i)


def put_in_what_was_inherited():
    inherited[1].put("from a drone")
    return multiprocessing.current_process().name, multiprocessing.active_children()


# -- programs: each is given a maker of executors and a directory, and gives what it saw -----------


def work_after_shutdown(make, _):
    executor = make(1)
    assert executor.submit(abs, -1).result() == 1
    executor.shutdown()
    executor.shutdown(wait=False, cancel_futures=True)
    try:
        executor.submit(abs, -1)
    except RuntimeError as error:
        said = str(error).startswith("cannot schedule new futures after shutdown")
    return said, error_of(executor.map, abs, [1])


def work_from_a_callback(make, _):
    seen = Future()
    with make(1) as executor:
        first = executor.submit(abs, -1)
        first.add_done_callback(
            lambda f: executor.submit(pow, f.result() + 1, 3).add_done_callback(seen.set_result)
        )
        return seen.result(60).result()


def map_and_its_options(make, folder):
    gate = f"{folder}/gate"
    with make(2) as executor:
        seen = (
            list(executor.map(pow, range(5), range(3))),
            list(executor.map(pow, range(20), range(20), chunksize=7)),
            list(executor.map(abs, [])),
            list(executor.map(abs)),
            error_of(executor.map, abs, [1], chunksize=0),
            error_of(lambda: list(executor.map(divmod, [1, 1], [1, 0]))),
            error_of(lambda: list(executor.map(abs, failing_source()))),
            error_of(lambda: list(executor.map(hold_until, [gate], timeout=0.01))),
        )
        append(gate, "open")
        return seen


def map_is_an_iterator_that_can_be_closed(make, _):
    with make(2) as executor:
        results = executor.map(abs, range(-20, 0))
        first = next(results)
        results.close()
        return first, iter(results) is results, list(results)


def errors(make, _):
    with make(1) as executor:
        error = executor.submit(fail).exception()
        cause = error.__cause__
        return (
            type(error), error.args, type(cause).__name__, "# with this comment" in str(cause),
            cause.__cause__, error_of(executor.submit(recurse, 0).result),
            error_of(executor.submit(abs, "x").result), executor.submit(abs, -1).result(),
        )  # fmt: skip


def what_submit_takes(make, _):
    with make(1) as executor:
        return (
            executor.submit(dict, self=1, fn=2, args=3).result(),
            error_of(executor.submit), error_of(executor.submit, fn=abs),
            error_of(pickle.dumps, executor), error_of(pickle.dumps, executor.submit(abs, 1)),
        )  # fmt: skip


def work_that_cannot_be_pickled(make, _):
    with make(1) as executor:
        error = executor.submit(abs, threading.Lock()).exception()
        return type(error), executor.submit(abs, -1).result()


def cancelling(make, folder):
    gate, started = f"{folder}/gate", f"{folder}/started"
    with make(1) as executor:
        first = executor.submit(hold_until, gate, started)
        wait_for(lambda: lines(started))
        wait_for(first.running)
        behind = [executor.submit(abs, -i) for i in range(20)]
        last = behind[-1]
        seen = [last.cancel(), last.cancel(), last.cancelled(), last.done(), last.running()]
        seen += (
            [error_of(last.result), error_of(last.exception)]
            if error_of(last.result) is CancelledError
            else []
        )
        append(gate, "open")
        return [*seen, first.result(), first.cancel(), [each.result() for each in behind[:-1]]]


def shutdown_that_cancels(make, folder):
    gate, started = f"{folder}/gate", f"{folder}/started"
    executor = make(1)
    first = executor.submit(hold_until, gate, started)
    wait_for(lambda: lines(started))
    rest = [executor.submit(abs, -i) for i in range(20)]
    executor.shutdown(wait=False, cancel_futures=True)
    append(gate, "open")
    wait_for(rest[-1].cancelled)  # the library never tells of those it has cancelled
    executor.shutdown()
    return first.result(60), rest[-1].cancelled(), error_of(executor.submit, abs, 1)


def a_block_in_a_block(make, _):
    with make(1) as executor:
        with executor as same:
            future = executor.submit(abs, -1)
        return same is executor, future.result(), error_of(executor.submit, abs, -1)


def a_killed_process_breaks_it(make, folder):
    started = f"{folder}/started"
    with make(2) as executor:
        running = executor.submit(hold_until, "/nowhere", started)
        waiting = [executor.submit(hold_until, "/nowhere", started) for _ in range(5)]
        wait_for(lambda: lines(started))
        os.kill(next(iter(executor._processes)), signal.SIGKILL)
        broken = futures.process.BrokenProcessPool
        seen = [isinstance(each.exception(60), broken) for each in [running, *waiting]]
        return seen, error_of(executor.submit, abs, -1) is not None, _refuses(executor, broken)


def _refuses(executor, error):
    try:
        executor.submit(abs, -1)
    except error:
        return True


def waiting_for_a_mixture(make, folder):
    gate = f"{folder}/gate"
    with make(2) as executor, futures.ThreadPoolExecutor(1) as threads:
        mine, other = Future(), threads.submit(abs, -3)
        good, bad = executor.submit(abs, -1), executor.submit(divmod, 1, 0)
        held = executor.submit(hold_until, gate)
        done, _ = futures.wait([other, good, bad], 10)
        seen = [len(done)]
        done, not_done = futures.wait([held, bad, mine], 10, futures.FIRST_EXCEPTION)
        seen += [bad in done, not_done == {held, mine}]
        done, not_done = futures.wait([held, good, mine], 10, futures.FIRST_COMPLETED)
        seen += [done == {good}, not_done == {held, mine}]
        append(gate, "open")
        mine.set_result("mine")
        seen.append(
            sorted(
                str(each.result())
                for each in futures.as_completed([mine, held, other, good, good], 10)
            )
        )
        return seen


def asyncio_runs_things_in_it(make, _):
    async def main(executor):
        loop = asyncio.get_running_loop()
        values = await asyncio.gather(*(loop.run_in_executor(executor, abs, -i) for i in range(9)))
        error = await asyncio.gather(
            loop.run_in_executor(executor, divmod, 1, 0), return_exceptions=True
        )
        wrapped = await asyncio.wrap_future(executor.submit(abs, -5))
        return values, type(error[0]), wrapped

    with make(2) as executor:
        return asyncio.run(main(executor))


def queue_in_use():
    queue = FORK.Queue()
    queue.put("in use")
    wait_for(lambda: not queue.empty())  # a thread of the queue writes, perhaps after others
    return queue


def what_only_a_start_hands_over(make, _):
    """Locks, queues and values of multiprocessing: to an initializer, and to nobody else. The queue
    is in use."""
    queue, lock, value = queue_in_use(), FORK.Lock(), COUNT
    value.value = 0
    try:
        with make(2, initializer=set_up, initargs=(lock, queue, value)) as executor:
            list(executor.map(use_what_was_inherited, range(10)))
            seen = [error_of(executor.submit(put, queue, 1).result)]
        return [
            *seen,
            value.value,
            queue.get(timeout=60),
            sorted(queue.get(timeout=60) for _ in range(10)),
        ]
    finally:
        queue.close()
        queue.join_thread()


def a_failing_initializer_breaks_it(make, _):
    broken = futures.process.BrokenProcessPool
    with make(1, initializer=divmod, initargs=(1, 0)) as executor:
        try:
            return isinstance(executor.submit(abs, -1).exception(60), broken)
        except broken:  # it was known by then
            return True


def progress_bars(make, _):
    concurrent = pytest.importorskip("tqdm.contrib.concurrent")
    concurrent.tqdm_auto.monitor_interval = 0  # or it keeps a thread
    with open(os.devnull, "w") as nowhere:
        return concurrent._executor_map(
            make, abs, range(-9, 0), max_workers=2, chunksize=2, file=nowhere
        )


PROGRAMS = [
    work_after_shutdown, work_from_a_callback, map_and_its_options,
    map_is_an_iterator_that_can_be_closed, errors, what_submit_takes, work_that_cannot_be_pickled,
    cancelling, shutdown_that_cancels, a_block_in_a_block, a_killed_process_breaks_it,
    waiting_for_a_mixture, asyncio_runs_things_in_it, what_only_a_start_hands_over,
    a_failing_initializer_breaks_it, progress_bars,
]  # fmt: skip


def the_librarys(max_workers=None, **options):
    return ProcessPoolExecutor(max_workers, FORK, **options)


@pytest.mark.guarantee("pool-3", "pool-4")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # the library forks beside its own threads
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_sees_the_same(program, tmp_path):
    seen = {}
    for name, make in (("library", the_librarys), ("ours", stand_in.ProcessPoolExecutor)):
        (tmp_path / name).mkdir()
        seen[name] = program(make, tmp_path / name)
    assert seen["ours"] == seen["library"]


# -- the interpreter's end -------------------------------------------------------------------------

MAKERS = {
    "library": "from concurrent.futures import ProcessPoolExecutor",
    "ours": "from stand_in import ProcessPoolExecutor",
}

AT_THE_END = {
    "nobody waits": "pool.submit(late, 'one'); pool.submit(late, 'two')",
    "shut down without waiting": "pool.submit(late, 'one'); pool.shutdown(wait=False)",
    "the pool is forgotten": "pool.submit(late, 'one'); del pool",
    "sys.exit": "pool.submit(late, 'one'); sys.exit(3)",
    "an exit handler submits": "atexit.register(refused)",
    "a daemon thread waits": (
        "threading.Thread(target=pool.submit(late, 'one').result, daemon=True).start()"
    ),
}


@pytest.mark.guarantee("end-1", "pool-2")
@pytest.mark.parametrize("program", AT_THE_END.values(), ids=AT_THE_END)
def test_what_was_submitted_is_finished_when_the_interpreter_ends(program):
    seen = {}
    for name, maker in MAKERS.items():
        before = program if program.startswith("atexit") else ""
        done = run_script(f"""
            import atexit, multiprocessing, sys, threading, time
            {maker}
            def late(word):
                time.sleep(0.1)
                print(word, flush=True)
            def refused():
                try:
                    pool.submit(late, "never")
                except RuntimeError as error:
                    print(str(error)[:27])
            {before}
            pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
            pool.submit(abs, 1).result()
            {"" if before else program}
        """, python_args=("-W", "ignore"))  # fmt: skip
        seen[name] = done.returncode, done.stdout, done.stderr
    assert seen["ours"] == seen["library"] and seen["ours"][1]


@pytest.mark.guarantee("end-1", "pool-2")
@pytest.mark.parametrize("forget", ["", "del pool"])
def test_what_was_submitted_to_a_served_pool_is_finished_when_the_interpreter_ends(
    tmp_path, forget
):
    card, path = str(tmp_path / "card"), str(tmp_path / "lines")
    with poly.Pool(1) as pool, poly.serve(pool, file=card):
        done = run_script(f"""
            import time
            import polycephaly as poly
            from faults import append
            def late(word):
                time.sleep(0.1)
                append({path!r}, word)
            pool = poly.connect({card!r})
            pool.submit(late, "one")
            pool.submit(late, "two")
            {forget}
        """)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert lines(path) == ["one", "two"]


@pytest.mark.guarantee("pool-2")
def test_an_error_that_ends_the_program_ends_what_was_submitted_too():
    """Here a pool is not as the library's executor, which finishes its work, but as a ``with``
    block."""
    done = run_script("""
        import polycephaly as poly
        from faults import hold_until
        pool = poly.Pool(1)
        pool.submit(hold_until, "/nowhere")
        1 / 0
    """)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


@pytest.mark.guarantee("pool-2")
def test_work_that_was_promised_ends_with_the_program():
    done = run_script("""
        import polycephaly as poly
        from faults import hold_until
        pool = poly.Pool(1)
        pool.promise(hold_until, "/nowhere")
    """)
    assert done.returncode == 0 and not done.stderr


# -- what the library's executor does not have, or not yet -----------------------------------------


def test_running_work_is_cancelled_unless_told_not_to(tmp_path):
    with poly.Pool(1) as pool:
        future = pool.submit(hold_until, "/nowhere", str(tmp_path / "started"))
        wait_for(lambda: lines(tmp_path / "started"))
        wait_for(future.running)
        assert future.cancel(running=False) is False
        assert future.cancel() is True


def test_buffersize_is_how_many_calls_are_ahead_of_the_results():
    """As in Python 3.14."""
    taken = []

    def source():
        for i in range(20):
            taken.append(i)
            yield i

    with poly.Pool(2) as pool:
        results = pool.map(abs, source(), buffersize=3)
        assert len(taken) == 3
        for i in range(20):
            assert next(results) == i
            assert len(taken) <= i + 4
        assert error_of(pool.map, abs, [1], buffersize=0) is ValueError
        assert error_of(pool.map, abs, [1], buffersize=1.5) is TypeError


def test_a_promise_can_be_run_by_an_executor_of_ones_own():
    promise = poly.Promise()
    assert promise.set_running_or_notify_cancel() and promise.running() and not promise.cancel()
    promise.set_result(1)
    with pytest.raises(InvalidStateError):
        promise.set_result(2)
    assert promise.value == 1
    cancelled = poly.Promise()
    cancelled.cancel()
    assert cancelled.set_running_or_notify_cancel() is False


@pytest.mark.guarantee("pool-4")
def test_a_drone_has_its_name_in_multiprocessing_and_sends_what_is_in_its_queues():
    queue = queue_in_use()
    with poly.Drone(name="scout", initializer=set_up, initargs=(None, queue, None)) as drone:
        assert drone.doit(put_in_what_was_inherited) == ("scout", [])
    assert [queue.get(timeout=60) for _ in range(2)] == ["in use", "from a drone"]
    queue.close()
    queue.join_thread()
