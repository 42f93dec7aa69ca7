"""Forks: ours beside our own threads and the user's, the user's own beside ours."""

import cProfile
import fcntl
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from types import ModuleType

import cloudpickle
import pytest
from faults import wait_for
from scripts import output_of, run_script

import polycephaly as poly
from polycephaly import _compat
from polycephaly.promises import promise
from polycephaly.promises.opener_thread import settling_threads
from polycephaly.runtime import fork_guard
from polycephaly.runtime.tuning import tuning

STRICT = (
    "-W",
    "always::DeprecationWarning",
)  # not "error": CPython 3.12 to 3.14 drop what this warning raises


@pytest.mark.guarantee("wire-3")
def test_no_warning_of_forks_because_of_our_own_threads():
    assert output_of("""
        import polycephaly as poly
        with poly.Pool(2) as busy:
            work = [busy.promise(abs, -i) for i in range(2000)]
            for _ in range(5):
                with poly.Pool(1) as other, poly.Drone() as drone:
                    other.doit(abs, -1); drone.doit("1")
                poly.doit("2")
                busy.refresh()
            print([p.value for p in work] == list(range(2000)))
    """, python_args=STRICT) == "True\n"  # fmt: skip


def test_no_warning_in_nested_drones_either():
    done = run_script("""
        import polycephaly as poly
        def nested():
            with poly.Pool(2) as pool, poly.Drone() as drone:
                return pool.doit(abs, -1) + drone.doit(abs, -2)
        with poly.Pool(1) as pool:
            print(pool.doit(nested))
    """, python_args=STRICT)  # fmt: skip
    assert (done.stdout, done.stderr) == ("3\n", "")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python does not warn")
def test_the_warning_still_speaks_where_the_user_has_threads_of_his_own():
    done = run_script(
        """
        import threading, polycephaly as poly
        end = threading.Event()
        threading.Thread(target=end.wait).start()
        try:
            with poly.Pool(1) as pool:
                print(pool.doit(abs, -1))
        finally:
            end.set()
    """,
        python_args=("-W", "always::DeprecationWarning"),
    )
    assert done.stdout == "1\n" and "multi-threaded" in done.stderr


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python does not warn")
def test_a_pool_beside_a_thread_of_the_user_is_made_also_where_warnings_are_errors():
    """An error after the fork would lose the zygote. The warning goes to the log."""
    done = run_script(
        """
        import logging, threading, polycephaly as poly
        logging.basicConfig(format="%(name)s %(message).32s")
        end = threading.Event()
        threading.Thread(target=end.wait).start()
        try:
            with poly.Pool(1) as pool:
                print(pool.doit(abs, -1))
        finally:
            end.set()
    """,
        python_args=("-W", "error"),
    )
    assert done.stdout == "1\n"
    assert "polycephaly.runtime.fork_guard This process" in done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_of_the_user_does_not_keep_drones_alive_nor_break_the_pool():
    pool = poly.Pool(2)
    pids = [d.pid for d in pool.drones]
    work = [pool.promise(abs, -i) for i in range(1000)]
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(w)
            os.read(r, 1)
        finally:
            os._exit(0)
    os.close(r)
    assert [p.value for p in work] == list(range(1000))
    pool.shutdown()
    for pid in pids:
        wait_for(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))
    os.close(w)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_of_the_user_can_have_a_pool_of_its_own():
    with poly.Pool(1) as pool:
        assert pool.doit(abs, -1) == 1
        r, w = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with poly.Pool(2) as own:
                    os.write(w, str(sum(own.map(abs, range(-10, 0)))).encode())
            finally:
                os._exit(0)
        os.close(w)
        assert os.read(r, 100) == b"55"
        os.close(r)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.doit(abs, -2) == 2


def in_child(queue):
    with poly.Drone() as drone:
        queue.send(drone.doit(abs, -7))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_multiprocessing_child_can_have_drones_and_harms_none(method):
    context = multiprocessing.get_context(method)
    with poly.Pool(1) as pool:
        assert pool.doit(abs, -1) == 1
        mine, its = context.Pipe()
        child = context.Process(target=in_child, args=[its])
        child.start()
        assert mine.poll(60) and mine.recv() == 7
        child.join()
        assert child.exitcode == 0
        child.close()
        mine.close()
        its.close()
        assert pool.doit(abs, -2) == 2


def test_a_child_forked_by_the_user_that_outlives_the_controller_keeps_nothing_alive():
    done = run_script("""
        import os, time, warnings, polycephaly as poly
        warnings.simplefilter("ignore")
        pool = poly.Pool(2)
        pids = [d.pid for d in pool.drones]
        controller = os.getpid()
        r, w = os.pipe()
        if os.fork() == 0:
            os.close(w)
            os.read(r, 1)  # until the controller is gone
            end = time.monotonic() + 20
            while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < end:
                time.sleep(0.01)
            left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
            print(left or "gone", flush=True)
            os._exit(0)
        os.kill(controller, 9)
    """)
    assert done.stdout == "gone\n", done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_pools_made_at_once_in_many_threads():
    values, failures = [], []

    def body(k):
        try:
            for _ in range(3):
                with poly.Pool(2) as pool:
                    values.append(pool.doit(pow, k, 2))
                with poly.Drone() as drone:
                    values.append(drone.doit(pow, k, 2))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=[k]) for k in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(40)
    assert not failures, failures
    assert sorted(values) == sorted([k * k for k in range(8)] * 6)


def test_text_waiting_in_the_controllers_streams_is_written_once():
    done = run_script("""
        import sys, polycephaly as poly
        sys.stdout = open(1, "w", buffering=65536, closefd=False)
        sys.stdout.write("waiting in the buffer\\n")
        with poly.Pool(3) as pool:
            pool.doit(abs, -1)
        sys.stdout.flush()
    """)
    assert done.stdout == "waiting in the buffer\n"


@pytest.mark.guarantee("work-8")
def test_exit_handlers_of_the_main_image_run_once_and_only_there():
    done = run_script("""
        import atexit, os, polycephaly as poly
        atexit.register(lambda: print("bye", os.getpid() == main, flush=True))
        main = os.getpid()
        with poly.Pool(2) as pool, poly.Drone() as drone:
            pool.doit(abs, -1); drone.doit("1")
    """)
    assert done.stdout == "bye True\n", done.stderr


@pytest.mark.guarantee("work-8")
def test_signal_handlers_of_the_main_image_are_not_the_drones():
    done = run_script("""
        import os, signal, polycephaly as poly
        for number in signal.SIGTERM, signal.SIGUSR1:
            signal.signal(number, lambda *_: print("caught", flush=True))
        with poly.Pool(1, output="discard") as pool:
            p = pool.promise(
                "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); signal.pause()"
            )
            print(p.exception().exitcode)
            pool.doit("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
            print(pool.doit("6 * 7"))
    """)
    assert done.stdout == "-10\n42\n", done.stderr


@pytest.mark.guarantee("wire-3")
def test_a_lock_held_by_another_thread_at_the_fork_is_the_users_affair_but_ours_are_free():
    """Logging, imports and our own locks work in drones forked while other threads hammer them."""
    done = run_script("""
        import logging, threading, warnings, polycephaly as poly
        warnings.simplefilter("ignore")
        end = threading.Event()
        def hammer():
            while not end.is_set():
                p = poly.Promise(); p.set_result(1); logging.getLogger("x").info("y")
        threads = [threading.Thread(target=hammer) for _ in range(2)]
        for t in threads: t.start()
        for _ in range(10):
            with poly.Pool(1) as pool:
                pool.promise("import logging, decimal; logging.getLogger('z').info('u')").result(60)
        end.set()
        print("done")
    """)
    assert done.stdout == "done\n", done.stderr


def own_class():
    """A value, and an error, of classes that only this call has: they travel by value."""

    class Own(Exception):
        pass

    return Own("of its own"), Own


def raises_own():
    raise own_class()[0]


@pytest.mark.guarantee("wire-3")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_drone_sends_classes_though_another_thread_was_numbering_one_at_the_fork():
    def hold():
        with cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
            held.set()
            let_go.wait(60)

    poly.doit(own_class)  # this process knows classes by value from here on
    held, let_go = threading.Event(), threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    with poly.Pool(1, start="fork") as pool:
        let_go.set()
        holder.join()
        value, kind = pool.promise(own_class).result(60)
        assert type(value) is kind


@pytest.mark.guarantee("wire-3")
def test_forks_beside_a_thread_that_opens_many_values_leave_their_drones_whole():
    with poly.Pool(1) as busy:
        for _ in range(8):
            failing = [busy.promise(raises_own) for _ in range(100)]
            failing[0].exception(60)  # the opener is at it
            with poly.Pool(1, start="fork") as pool:
                value, kind = pool.promise(own_class).result(60)
                assert type(value) is kind
                assert type(pool.promise(raises_own).exception(60)).__name__ == "Own"
            assert {type(each.exception(60)).__name__ for each in failing} == {"Own"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_has_nothing_of_the_parents_threads_by_their_ids():
    """A thread that it starts may have one of these."""

    def write(_):
        writing.set()
        let_go.wait(60)

    tables = (promise.waiting_threads, promise.wait_hooks, promise.settling_owners)
    writing, let_go, never = threading.Event(), threading.Event(), poly.Promise()
    waiter = threading.Thread(target=lambda: never.exception(60))
    waiter.start()
    with poly.Pool(1, output=write) as pool:
        pool.promise(print, "a line")
        assert writing.wait(60)
        wait_for(lambda: waiter.ident in promise.waiting_threads)
        assert promise.wait_hooks and settling_threads
        child = os.fork()
        if child == 0:
            os._exit(any(tables) or bool(settling_threads))
        _, status = os.waitpid(child, 0)
        let_go.set()
    never.set_result(None)
    waiter.join()
    assert status == 0


@pytest.mark.slow
def test_many_pools_one_after_the_other_leave_nothing_behind():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(15):
        with poly.Pool(2) as pool:
            pool.doit(abs, -1)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.slow
def test_a_hundred_drones_answer():
    with poly.Pool(100) as pool:
        assert len({p.value for p in pool.everywhere(os.getpid)}) == 100


def test_a_pool_or_a_promise_that_crossed_a_fork_says_so(tmp_path):
    assert (
        output_of(
            """
        import os, sys
        import polycephaly as poly
        from faults import hold_until
        with poly.Pool(1) as pool:
            p = pool.promise(hold_until, sys.argv[1])
            cured = []
            def use():
                told = []
                for call in (lambda: pool.doit("1"), lambda: p.result(60)):
                    try:
                        call()
                    except RuntimeError as error:
                        told.append("belongs to another process" in str(error))
                        cured.append("after the fork" in str(error))
                return told
            print(poly.doit(use))
            child = os.fork()
            if child == 0:
                print(use(), cured, flush=True)
                os._exit(0)
            os.waitpid(child, 0)  # not os.wait(): the zygote of `poly.doit` ends about now
            open(sys.argv[1], "w").close()
            print(p.value)
    """,
            str(tmp_path / "gate"),
            python_args=("-W", "ignore::DeprecationWarning"),  # it forks by itself
        )
        == "[True, True]\n[True, True] [True, False]\nheld\n"
    )


def test_a_drone_that_crossed_a_fork_is_not_waited_for():
    assert (
        output_of(
            """
        import asyncio, os
        import polycephaly as poly
        async def leave(drone):
            async with drone:
                pass
        with poly.Pool(2) as pool, poly.Drone() as lone:
            pool.doit("1")
            first, second = pool.drones
            child = os.fork()
            if child == 0:
                for drone in (first, lone):
                    drone.release()  # as the end of a block, it does nothing here
                    asyncio.run(leave(drone))
                    for ask in drone.kill, drone.stack:
                        try:
                            ask()
                        except RuntimeError as error:
                            print("belongs to another process" in str(error), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            print(first.doit(abs, -1), lone.doit(abs, -1))
    """,
            python_args=("-W", "ignore::DeprecationWarning"),  # it forks by itself
        )
        == "True\nTrue\nTrue\nTrue\n1 1\n"
    )


def test_a_pool_that_was_not_used_before_a_fork_starts_anew_in_each_child():
    """As under `gunicorn --preload`: the program is loaded, and then each worker is forked."""
    assert (
        output_of(
            """
        import os, threading
        import polycephaly as poly
        pool = poly.Pool(2, name="web")
        limited = pool.options(timeout=60)
        drone = poly.Drone()
        foreigners = pool.drones
        parents = {drone.pid for drone in foreigners}

        def worker():
            print(repr(pool), flush=True)
            values = []
            threads = [
                threading.Thread(target=lambda: values.append(each.doit(abs, -1)))
                for each in (pool, limited) * 4
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert values == [1] * 8 and list(pool.map(abs, range(-3, 0))) == [3, 2, 1]
            assert limited.share([1]).value == [1]
            ours = {drone.pid for drone in pool.drones}
            assert len(ours) == 2 and not ours & parents
            for foreign in (drone, *foreigners):
                try:
                    foreign.doit("1")
                except RuntimeError as error:
                    assert "belongs to another process" in str(error)
                else:
                    print("a drone of the parent took a task")
            assert pool.doit(lambda: pool.doit(abs, -7)) == 7  # in its drone, it starts anew again
            with pool:
                assert pool.doit(os.getppid) != os.getpid()
            print("served", flush=True)

        for _ in range(2):
            child = os.fork()
            if child == 0:
                worker()
                os._exit(0)
            os.waitpid(child, 0)
        print(pool.doit(abs, -5), parents == {drone.pid for drone in pool.drones})
        child = os.fork()
        if child == 0:
            pool.shutdown()  # used by now, by another process: nothing to do here
            os._exit(0)
        print(os.waitpid(child, 0)[1])
    """,
            python_args=("-W", "ignore::DeprecationWarning"),  # it forks by itself
        )
        == "<Pool web: 0 drones, 0 busy, 0 tasks>\nserved\n" * 2 + "5 True\n0\n"
    )


def test_a_pool_that_starts_anew_in_a_child_has_the_size_that_it_was_given_last():
    assert (
        output_of(
            """
        import os
        import polycephaly as poly
        pool = poly.Pool(1, env=lambda index: {"INDEX": str(index)})
        pool.resize(3)
        child = os.fork()
        if child == 0:
            indices = [each.value for each in pool.everywhere("import os; os.environ['INDEX']")]
            print(pool.status()["size"], sorted(indices), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    """,
            python_args=("-W", "ignore::DeprecationWarning"),  # it forks by itself
        )
        == "3 ['0', '1', '2']\n"
    )


def test_the_end_of_a_child_finishes_what_it_submitted_first():
    """That submission has started the pool anew there."""
    assert (
        output_of(
            """
        import os, sys, time
        import polycephaly as poly
        def late():
            time.sleep(0.1)
            print("late", flush=True)
        pool = poly.Pool(1, name="web", output=lambda line: print(line.text, flush=True))
        child = os.fork()
        if child == 0:
            pool.submit(late)
            sys.exit()
        os.waitpid(child, 0)
    """,
            python_args=("-W", "ignore::DeprecationWarning"),  # it forks by itself
        )
        == "late\n"
    )


def test_a_pool_that_was_not_used_before_a_fork_can_be_looked_into_in_a_child():
    assert (
        output_of(
            """
        import os, sys
        import polycephaly as poly
        pool = poly.Pool(2, name="web")

        def tell_state():
            status = pool.status()
            print(status["state"], status["reason"], len(status["drones"]))

        def drones():
            tell_state()
            print(pool.drones[1].doit("1"))
            tell_state()

        def stacks():
            print([each.drone for each in pool.stacks()])

        def profile():
            with pool.profile() as profile:
                poly.gather(*pool.everywhere("1")).value
            print(sorted(profile.samples))

        def shutdown():
            pool.shutdown()
            print(pool.drones)
            try:
                pool.submit(abs, 1)
            except RuntimeError as error:
                print(error)

        def again():
            print(pool.drones[0].name, flush=True)
            in_child(drones)

        def used():
            print(pool.status()["state"])

        def in_child(look):
            child = os.fork()
            if child == 0:
                try:
                    look()
                    sys.stdout.flush()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)

        for look in (drones, stacks, profile, shutdown, again):
            in_child(look)
        pool.doit("1")
        in_child(used)
        tell_state()
    """,
            python_args=("-W", "ignore::DeprecationWarning"),  # it forks by itself
        )
        == "elsewhere None 0\n1\nopen None 2\n"
        "['web.0', 'web.1']\n"
        "['controller', 'web.0', 'web.1']\n"
        "[]\ncannot schedule new futures after shutdown of web\n"
        "web.0\nelsewhere None 0\n1\nopen None 2\n"
        "elsewhere\n"
        "open None 2\n"
    )


def test_a_child_that_leaves_the_block_of_an_unused_pool_starts_no_drones():
    with poly.Pool(1) as pool:
        child = os.fork()
        if child == 0:
            pool.__exit__(None, None, None)
            os._exit(len(os.listdir(f"/proc/{os.getpid()}/task")) - 1)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.doit(abs, -1) == 1


def test_a_drone_that_starts_drones_gives_no_warning_either():
    done = run_script(
        """
        import polycephaly as poly
        def inner():
            import polycephaly as poly
            return poly.doit("1")
        if __name__ == "__main__":
            with poly.Pool(1) as pool:
                print(pool.doit(inner))
    """,
        python_args=STRICT,
    )
    assert done.stdout == "1\n" and not done.stderr


def test_a_pool_is_made_while_another_thread_imports_green_threads():
    assert output_of("""
        import threading
        import polycephaly as poly
        with poly.Pool(1) as pool:
            pool.doit(int)
        importing = threading.Thread(target=lambda: poly.green.spawn)
        importing.start()
        async def seven():
            return 7
        with poly.Pool(1) as pool:
            print(pool.doit(seven))
        importing.join()
    """).split() == ["7"]


@pytest.fixture
def importing(tmp_path, monkeypatch):
    """A thread is in the middle of an import of `half_imported`, which ends when told so."""
    (tmp_path / "half_imported.py").write_text(
        "import gate_of_the_import as gate\n"
        "first = 1\n"
        "gate.begun.set()\n"
        "gate.may_end.wait()\n"
        "last = 42\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    gate = ModuleType("gate_of_the_import")
    gate.begun, gate.may_end = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, gate.__name__, gate)
    thread = threading.Thread(target=importlib.import_module, args=("half_imported",))
    thread.start()
    gate.begun.wait()
    try:
        yield gate
    finally:
        gate.may_end.set()
        thread.join()
        del sys.modules["half_imported"]


def test_a_fork_waits_for_the_import_of_another_thread(importing, monkeypatch):
    checked = []

    def look_and_let_it_end(names=_compat.imports_elsewhere):
        checked.append(names())
        importing.may_end.set()
        return checked[-1]

    monkeypatch.setattr(tuning, "import_wait_seconds", 60.0)
    monkeypatch.setattr(fork_guard, "imports_elsewhere", look_and_let_it_end)
    with poly.Pool(1) as pool:
        assert pool.doit("__import__('half_imported').last") == 42
    assert checked[0] == ["half_imported"] and checked[-1] == []


def test_what_another_thread_imports_for_long_is_imported_anew_in_a_drone(
    importing, monkeypatch, caplog
):
    def last():
        import gate_of_the_import as gate

        gate.may_end.set()
        import half_imported

        return half_imported.last

    monkeypatch.setattr(tuning, "import_wait_seconds", 0.0)
    monkeypatch.setattr(fork_guard, "_long_imports", set())
    for _ in range(2):
        with poly.Pool(1) as pool:
            assert pool.doit(last) == 42
    assert not importing.may_end.is_set() and not hasattr(sys.modules["half_imported"], "last")
    (told,) = caplog.messages
    assert "half_imported" in told and "after the import" in told


def test_a_lost_zygote_is_replaced_without_a_wait_for_imports(importing, monkeypatch):
    """The wait would be that of the thread that serves all pools."""
    waits = []

    def wait(seconds):
        waits.append(seconds)
        importing.may_end.set()

    monkeypatch.setattr(tuning, "import_wait_seconds", 0.0)
    monkeypatch.setattr(fork_guard, "_long_imports", set())
    with poly.Pool(1) as pool:
        drone = pool.drones[0]
        zygote = pool.doit(os.getppid)
        monkeypatch.setattr(tuning, "import_wait_seconds", 60.0)
        monkeypatch.setattr(fork_guard, "_long_imports", set())
        monkeypatch.setattr(fork_guard, "sleep", wait)
        os.kill(zygote, signal.SIGKILL)
        wait_for(lambda: not drone.alive)
        assert pool.doit(os.getppid) != zygote and waits == []


def test_a_module_that_makes_a_pool_while_it_is_imported_is_the_drones_too(tmp_path, monkeypatch):
    (tmp_path / "makes_a_pool.py").write_text(
        "import threading\n"
        "runs = []\n"
        "def imported_in_a_thread():\n"
        "    import makes_a_pool\n"
        "    runs.append(makes_a_pool.first)\n"
        "def in_a_drone():\n"
        "    thread = threading.Thread(target=imported_in_a_thread)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "    return runs\n"
        "first = 1\n"
        "with threading.Pool(1) as pool:\n"
        "    answer = pool.doit(in_a_drone)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(threading, "Pool", poly.Pool, raising=False)
    try:
        assert importlib.import_module("makes_a_pool").answer == [1]
    finally:
        del sys.modules["makes_a_pool"]


def test_a_child_that_a_callback_has_forked_ends():
    assert output_of("""
        import os, time
        import polycephaly as poly
        children = []
        with poly.Pool(1) as pool:
            promise = pool.promise("__import__('time').sleep(0.1)")
            promise.add_done_callback(lambda _: children.append(os.fork()))
            while not children:  # in the thread that settles promises
                time.sleep(0.01)
            print(os.waitpid(children[0], 0)[1])
    """, python_args=("-W", "ignore::DeprecationWarning")).split() == ["0"]  # fmt: skip


def test_a_finalizer_under_the_lock_cannot_start_drones():
    errors = []

    def start():
        try:
            poly.promise("1")
        except RuntimeError as error:
            errors.append(error)

    with poly.Pool(1) as pool:
        pool._dispatcher.post(start)
        wait_for(lambda: errors)
    assert "cannot start drones" in str(errors[0])


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-", ">&- 2>&-"])
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_standard_descriptors_may_be_closed(tmp_path, closed, start):
    script, answer = tmp_path / "script.py", tmp_path / "answer"
    script.write_text(f"""
import os, sys, polycephaly as poly
if __name__ == "__main__":
    with poly.Pool(2, start={start!r}) as pool:
        found = pool.promise(os.path.basename, "a/b").value, pool.doit(len, bytes(1 << 20))
    open(sys.argv[1], "w").write(str(found))
""")
    command = f'exec "$0" "$1" "$2" {closed}'
    subprocess.run(["sh", "-c", command, sys.executable, script, answer], timeout=60, check=False)
    assert answer.read_text() == "('b', 1048576)"


def test_a_profiler_of_the_program_is_not_the_drones():
    def profiled():
        import cProfile

        with cProfile.Profile() as own:
            sorted([2, 1])
        return len(own.getstats()) > 0, sys.getprofile(), threading.getprofile()

    with cProfile.Profile(), poly.Pool(1) as pool:
        assert pool.doit(profiled) == (True, None, None)
    threading.setprofile(do_nothing)
    sys.setprofile(do_nothing)
    try:
        with poly.Pool(1) as pool:
            assert pool.doit(profiled) == (True, None, None)
        assert sys.getprofile() is threading.getprofile() is do_nothing
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="CPython 3.12 and later have it")
def test_a_monitoring_profiler_of_the_program_calls_nothing_in_drones():
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.PROFILER_ID, "of the test")
    try:
        start = monitoring.events.PY_START
        monitoring.register_callback(monitoring.PROFILER_ID, start, started.append_code)
        monitoring.set_events(monitoring.PROFILER_ID, start)
        with poly.Pool(1) as pool:
            assert pool.doit(calls_that_are_seen) == (0, None)
        assert calls_that_are_seen() == (1, "of the test")
    finally:
        monitoring.set_events(monitoring.PROFILER_ID, 0)
        monitoring.free_tool_id(monitoring.PROFILER_ID)


def calls_that_are_seen():
    before = len(started)
    do_nothing()
    return len(started) - before, sys.monitoring.get_tool(sys.monitoring.PROFILER_ID)


class Started(list):
    def append_code(self, code, _):
        if code is do_nothing.__code__:
            self.append(code)


started = Started()


def do_nothing(*_):
    pass


def test_handlers_of_any_signal_stay_in_the_controller():
    def look():
        return [s for s in signal.valid_signals() if callable(signal.getsignal(s))]

    signals = [signal.SIGWINCH, signal.SIGURG, signal.SIGPROF, signal.SIGRTMIN]
    before = {each: signal.signal(each, lambda *_: None) for each in signals}
    try:
        with poly.Pool(1) as pool:
            assert pool.doit(look) == [signal.SIGINT, signal.SIGTERM]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_the_directory_of_an_open_pool_is_locked_as_systemd_tmpfiles_respects_it():
    with poly.Pool(1) as pool:
        directory = pool._dispatcher.supervisor.engine._directory.path
        fd = os.open(directory, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)
