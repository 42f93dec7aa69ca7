"""SIGTERM to a drone: it finishes the call that it runs, begins no other, and ends."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
from concurrent.futures.process import BrokenProcessPool

import pytest
from faults import append, hold_until, lines, wait_for
from scripts import Script, run_script

import polycephaly as poly
from polycephaly import green
from polycephaly.runtime.procfs import descendants


def get_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def note(path, i, at=None):
    """A call whose runs can be counted. During call number `at`, the drone gets SIGTERM."""
    append(path, f"{i}:{os.getpid()}")
    if i == at:
        get_sigterm()
    return i


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "ran")


def ran(path):
    """The calls in their order, with the process of each."""
    return [tuple(map(int, line.split(":"))) for line in lines(path)]


def check_moved(path, calls, first):
    """The `calls` have run once each: the first of them, and no other, in the drone `first`."""
    assert sorted(call for call, _ in ran(path)) == sorted(calls)
    assert [call for call, pid in ran(path) if pid == first] == [calls[0]]


@pytest.mark.guarantee("end-3")
@pytest.mark.parametrize("on_death", ["replace", "break"])
def test_calls_that_a_drone_has_not_begun_run_elsewhere_once(path, caplog, on_death):
    caplog.set_level("INFO", "polycephaly")
    with poly.Pool(1, on_death=on_death) as pool:
        first = pool.drones[0]
        pid = first.pid
        for _ in range(200):  # known to be short: they travel together
            pool.doit(abs, -1), pool.doit(note, os.devnull, 0)
        promises = [pool.promise(note, path, i, 0) for i in range(50)]
        assert [each.result() for each in promises] == list(range(50))
        check_moved(path, range(50), pid)
        wait_for(lambda: not first.alive)
        assert first.exitcode == -signal.SIGTERM
    (said,) = (text for text in caplog.messages if "SIGTERM" in text)
    assert said == f"drone {first.name} (pid {pid}) got SIGTERM and has ended"


@pytest.mark.guarantee("end-3")
@pytest.mark.parametrize("pickled", [False, True])
def test_the_rest_of_a_chunk_runs_elsewhere(path, pickled):
    def call(i):
        note(path, i if type(i) is int else i[0], 0)

    with poly.Pool(1) as pool:
        pid = pool.drones[0].pid
        items = [[i] for i in range(100)] if pickled else range(100)
        assert list(pool.map(call, items, chunksize=100)) == [None] * 100
        check_moved(path, range(100), pid)


def test_of_a_chunk_of_very_short_calls_what_is_left_after_the_cut_runs_elsewhere(tmp_path, path):
    go = str(tmp_path / "go")

    def call(i):
        if i == 0:
            note(path, i, 0)
            hold_until(go)

    with poly.Pool(1) as pool:
        pid = pool.drones[0].pid
        results = pool.map(call, range(1000), chunksize=1000)
        other = pool.promise(note, path, 1)  # sent ahead, or queued
        green.spawn(next, results)
        wait_for(lambda: ran(path))
        pool.resize(2)
        wait_for(lambda: (1, pid) not in ran(path) and len(ran(path)) == 2)
        open(go, "w").close()
        assert other.result() == 1


def test_an_idle_drone_ends_at_once_and_is_replaced():
    with poly.Pool(2) as pool:
        victim = pool.drones[0]
        os.kill(victim.pid, signal.SIGTERM)
        wait_for(lambda: not victim.alive)
        assert victim.exitcode == -signal.SIGTERM
        wait_for(lambda: len(pool.drones) == 2)
        assert pool.doit(abs, -1) == 1


@pytest.mark.guarantee("end-3")
def test_an_initializer_is_finished_and_no_call_begins(path):
    def initialize():
        note(path, len(ran(path)), 0)  # only the first drone gets the signal

    with poly.Pool(1, initializer=initialize) as pool:
        pid = pool.doit(os.getpid)
        assert [call for call, _ in ran(path)] == [0, 1] and ran(path)[1][1] == pid


@pytest.mark.slow
@pytest.mark.guarantee("end-3")
def test_an_initializer_that_always_gets_the_signal_breaks_the_pool():
    pool = poly.Pool(1, initializer=get_sigterm)
    with pool, pytest.raises(BrokenProcessPool, match="get SIGTERM before their first call"):
        pool.doit(abs, -1)


@pytest.mark.guarantee("end-3")
def test_overlapped_calls_are_finished_and_no_other_begins(path):
    async def call(i):
        note(path, i)
        while len(ran(path)) < 2:
            await green.sleep(0.002)
        if i == 0:
            get_sigterm()
        for _ in range(10):
            await green.sleep(0.002)
        return i

    with poly.Pool(1, width=2) as pool:
        pid = pool.drones[0].pid
        assert [*pool.map(call, range(6))] == [*range(6)]
        here = [call for call, each in ran(path) if each == pid]
        assert here == [0, 1] and sorted(call for call, _ in ran(path)) == [*range(6)]


def test_a_lone_drone_finishes_its_call_and_refuses_the_next_one():
    with poly.Drone() as drone:
        running, queued = drone.promise(get_sigterm), drone.promise(abs, -1)
        assert running.result() is None
        with pytest.raises(poly.DroneDied, match="got SIGTERM and has ended"):
            queued.result()
        with pytest.raises(poly.DroneDied, match="got SIGTERM and has ended"):
            drone.promise(abs, -1)
        assert drone.exitcode == -signal.SIGTERM


def test_a_large_result_of_the_last_call_arrives():
    def call():
        get_sigterm()
        return bytes(5_000_000), [str(i) for i in range(100_000)]

    with poly.Pool(1) as pool:
        for _ in range(3):
            zeros, texts = pool.doit(call)
            assert zeros == bytes(5_000_000) and texts[-1] == "99999"


def test_the_exit_handlers_of_the_drone_run(path):
    def call():
        import atexit

        atexit.register(append, path, "bye")
        get_sigterm()

    with poly.Pool(1) as pool:
        pool.doit(call)
        wait_for(lambda: lines(path) == ["bye"])


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_users_own_handler_is_called_and_the_drone_goes_on(start):
    done = run_script(f"""
        import os, signal, polycephaly as poly
        got = []
        def set_handler():
            signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
        def get():
            os.kill(os.getpid(), signal.SIGTERM)
            return os.getpid(), len(got)
        if __name__ == "__main__":
            with poly.Pool(1, initializer=set_handler, start={start!r}) as pool:
                pid = pool.drones[0].pid
                print([pool.doit(get) == (pid, i) for i in (1, 2)])
            with poly.Pool(1, start={start!r}) as pool:
                pool.doit(set_handler)
                print(pool.doit(get) == (pool.drones[0].pid, 1))
                pool.doit(signal.signal, signal.SIGTERM, signal.SIG_DFL)
                print(pool.promise(get).exception().exitcode)
    """)
    assert done.stdout == "[True, True]\nTrue\n-15\n", done.stderr


def dispositions(pid):
    """Whether the process ignores, catches or blocks SIGTERM."""
    with open(f"/proc/{pid}/status") as status:
        masks = dict(re.findall(r"Sig(Ign|Cgt|Blk):\s*(\w+)", status.read()))
    return {name for name, mask in masks.items() if int(mask, 16) >> (signal.SIGTERM - 1) & 1}


@pytest.mark.guarantee("end-3")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_zygote_ignores_it_and_what_a_task_starts_has_the_default_action(start):
    def program():
        with subprocess.Popen(["sleep", "1000"]) as child:
            found = dispositions(child.pid)
            child.terminate()
        return found, child.returncode

    def fork():
        context = multiprocessing.get_context("fork")
        child = context.Process(target=signal.pause)
        child.start()
        wait_for(lambda: dispositions(child.pid) == set())
        child.terminate()
        child.join()
        return child.exitcode

    def inner():
        get_sigterm()  # which is no business of the drones of this one
        with poly.Pool(1) as pool:
            return pool.doit("6 * 7")

    with poly.Pool(1, start=start) as pool:
        zygote = pool._dispatcher.supervisor.engine._launcher.pid
        assert dispositions(zygote) == {"Ign", "Blk"}
        assert pool.doit(program) == (set(), -signal.SIGTERM)
        assert pool.doit(fork) == -signal.SIGTERM
        assert pool.doit(inner) == 42
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.guarantee("end-3")
def test_a_child_that_a_task_forks_ends_by_a_signal_in_its_first_moment():
    done = run_script("""
        import os, signal
        early = []
        # Handlers run in this order, so this one runs before any of the package.
        os.register_at_fork(after_in_child=lambda: early and os.kill(os.getpid(), signal.SIGTERM))
        import polycephaly as poly

        def fork():
            early.append(True)
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            blocked = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), blocked

        with poly.Pool(1) as pool:
            print(pool.doit(fork), pool.doit(fork))
    """)
    assert done.stdout == "(-15, False) (-15, False)\n", done.stderr


def test_the_process_that_keeps_the_frames_of_an_error_stays_with_its_drone():
    with poly.Pool(1, output="discard", post_mortem=True) as pool:
        failed = pool.promise("1 / 0")
        assert failed.exception() is not None
        (keeper,) = descendants(pool.drones[0].pid)
        os.kill(keeper, signal.SIGTERM)
        wait_for(lambda: dispositions(keeper) == {"Cgt"})
        failed.release()


def test_it_stays_too_if_the_signal_comes_at_once():
    with poly.Pool(1, output="discard", post_mortem=True) as pool:
        pool.doit(
            "import os, signal\n"
            "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))"
        )
        failed = pool.promise("1 / 0")
        assert failed.exception() is not None
        (keeper,) = descendants(pool.drones[0].pid)
        wait_for(lambda: dispositions(keeper) == {"Cgt"}, 10)
        failed.release()


def terminate_all(pid):
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):  # one that a start has used, and is over
            os.kill(each, signal.SIGTERM)


@pytest.mark.guarantee("end-3")
def test_a_program_with_a_handler_of_its_own_gets_its_results_after_a_signal_to_all():
    with Script("""
        import os, signal, sys, threading, polycephaly as poly
        from faults import hold_until
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        with poly.Pool(2) as pool:
            go = os.path.join(os.path.dirname(sys.argv[0]), "go")
            running = [pool.promise(hold_until, go, go + "-begun") for _ in range(2)]
            queued = [pool.promise(pow, i, 2) for i in range(4)]
            while not all(each.running() for each in running):
                ended.wait(0.01)
            print("up", flush=True)
            ended.wait()
            open(go, "w").close()
            print([each.result() for each in running + queued])
    """) as script:
        script.read_until("up")
        terminate_all(script.process.pid)
        assert script.read_line() == str(["held", "held", 0, 1, 4, 9])
        assert script.wait() == 0 and not script.left()
