"""Nothing outlives its owner: however the controller ends, all it started is gone within 2 s."""

import itertools
import os
import random
import select
import signal
import subprocess
import sys

import pytest
from endings import (
    FINISHING,
    OF_SPAWN,
    STATUS,
    moments,
    run_ending,
    run_moment,
    seconds_from_start_to_stop,
)
from faults import block_for_ever, lines, wait_for
from scripts import Script, run_script

import polycephaly as poly
from polycephaly.engines.local import launcher
from polycephaly.engines.local.launcher import Launcher
from polycephaly.runtime import parent_death
from polycephaly.wire import addresses, main_names

# With a few loads here, with each in the long program: `python tests/endings.py`.
ROTATED = dict(zip(STATUS, itertools.cycle(("nested", "programs", "gil", "memory")), strict=False))
FORKED = [
    *((end, load) for end in STATUS for load in ("idle", "busy", ROTATED[end], "all")),
    *((end, "outstanding") for end in (*FINISHING, "exception", "SIGINT", "os._exit", "SIGKILL")),
]
SPAWNED = [
    *((ending, "all") for ending in OF_SPAWN),
    ("SIGKILL", "idle"),
    ("SIGKILL", "gil"),
    ("return", "gil"),
]


def case(ending, load):
    """Where both are killed at once, nobody is left to see to programs and the directory: see
    docs/guarantees.md."""
    both = ending == "zygote and controller"
    marks = [pytest.mark.xfail(strict=False)] if both else []
    if load == "busy" and ending in (
        "return",
        "exception",
        "os._exit",
        "segfault",
        "SIGKILL",
        "SIGINT",
    ):
        marks.append(pytest.mark.guarantee("end-1"))
    elif load == "busy" and ending in ("SIGTERM to all", "hang-up"):
        marks.append(pytest.mark.guarantee("end-3"))
    return pytest.param(ending, load, marks=marks)


def check_ending(ending, load, start):
    ended = run_ending(ending, load, start)
    assert not ended.wrong, "\n".join([*ended.wrong, ended.said])


@pytest.mark.parametrize("ending, load", [case(*each) for each in FORKED])
def test_nothing_is_left_after_the_controller_ends(ending, load):
    check_ending(ending, load, "fork")


@pytest.mark.parametrize("ending, load", [case(*each) for each in SPAWNED])
def test_nothing_is_left_after_a_controller_of_spawned_drones_ends(ending, load):
    check_ending(ending, load, "spawn")


@pytest.mark.guarantee("end-3")
def test_ctrl_c_to_the_whole_foreground_group_ends_the_controller_by_keyboard_interrupt():
    with Script("""
        import polycephaly as poly, time
        with poly.Pool(2) as pool:
            pool.doit(abs, 1)
            p = pool.promise("import time; time.sleep(100)")
            print("up", flush=True)
            p.value
    """) as script:
        script.read_until("up")
        os.killpg(script.process.pid, signal.SIGINT)
        assert script.wait() == -signal.SIGINT
        assert not script.left()
        assert "KeyboardInterrupt" in script.process.stderr.read()


def test_ctrl_c_in_a_doit_cancels_its_work(tmp_path):
    started = tmp_path / "started"
    with Script("""
        import sys
        import polycephaly as poly
        from faults import block_for_ever
        with poly.Pool(1) as pool:
            try:
                pool.doit(block_for_ever, sys.argv[1])
            except KeyboardInterrupt:
                print("free", pool.doit(abs, -1), flush=True)
    """, str(started)) as script:  # fmt: skip
        wait_for(lambda: lines(started))
        script.signal(signal.SIGINT)
        assert script.read_line() == "free 1"
        assert script.wait() == 0
        assert not script.left()


@pytest.mark.guarantee("end-4")
@pytest.mark.parametrize(
    "how", ["pool.drones[0].kill()", "pool.shutdown()", "del pool", "drone = None"]
)
def test_what_a_drone_started_ends_with_the_drone(how, tmp_path):
    up = tmp_path / "up"
    with Script(f"""
        import os, subprocess, sys
        import polycephaly as poly
        from faults import append, wait_for
        def program():
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            other = subprocess.Popen(["sleep", "1000"])
            append(sys.argv[1], str(child.pid)); append(sys.argv[1], str(other.pid))
        pool, drone = poly.Pool(1), poly.Drone()
        pool.doit(program) if "pool" in {how!r} else drone.doit(program)
        {how}
        print("over", flush=True)
        sys.stdin.read()
        import time; time.sleep(1000)
    """, str(up)) as script:  # fmt: skip
        script.read_until("over")
        programs = [int(each) for each in lines(up)]
        assert len(programs) == 2
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in programs))


@pytest.mark.guarantee("end-2")
def test_a_killed_zygote_takes_its_drones_along_and_the_pool_goes_on(tmp_path):
    done = run_script(
        """
        import os, signal, sys
        import polycephaly as poly
        from faults import block_for_ever, lines, wait_for
        with poly.Pool(2) as pool:
            before = {pool.doit(os.getppid)}
            lost = pool.promise(block_for_ever, sys.argv[1])
            # Not begun, it would move, and block for ever elsewhere.
            wait_for(lambda: lines(sys.argv[1]))
            old = [d.pid for d in pool.drones]
            pool.doit(abs, 1)
            os.kill(before.pop(), signal.SIGKILL)
            print(type(lost.exception()).__name__, pool.doit(abs, -2))
            wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in old))
    """,
        str(tmp_path / "started"),
    )
    assert done.stdout == "DroneDied 2\n", done.stderr


@pytest.mark.guarantee("end-2")
def test_a_killed_zygote_is_noticed_though_a_child_of_the_user_has_its_end_of_the_socket(
    monkeypatch, tmp_path
):
    children = []

    def fork():  # as another thread may while the zygote is made
        child = os.fork()
        if child == 0:
            try:
                signal.pause()
            finally:
                os._exit(0)
        children.append(child)

    monkeypatch.setattr(launcher, "check_after_fork", fork)
    try:
        with poly.Pool(1) as pool:
            monkeypatch.undo()
            zygote = pool.doit(os.getppid)
            lost = pool.promise(block_for_ever, tmp_path / "started")
            wait_for(lambda: lines(tmp_path / "started"))
            os.kill(zygote, signal.SIGKILL)
            assert isinstance(lost.exception(30), poly.DroneDied)
            assert pool.promise(abs, -1).result(30) == 1
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_the_end_of_a_zygote_whose_reports_were_not_read_leaves_the_others_their_directory(
    monkeypatch,
):
    close = Launcher.close

    def close_with_unread_reports(launcher):
        assert select.select([launcher], [], [], 30)[0]
        close(launcher)

    with poly.Pool(1) as pool:
        pool.doit(abs, -1)
        directory = pool._dispatcher.supervisor.engine._directory.path
        monkeypatch.setattr(Launcher, "close", close_with_unread_reports)
        with pytest.raises(TypeError, match="initargs"):  # its zygote has ended by then
            poly.Pool(1, initializer=print, initargs=(poly.Promise(),))
        monkeypatch.undo()
        assert os.path.isdir(directory)


def test_a_zygote_ends_if_no_socket_for_channels_can_be_opened_after_its_snapshot(monkeypatch):
    def fail():
        raise RuntimeError("can't start new thread")

    with poly.Pool(1) as pool:
        pool.doit(abs, -1)
        before, snapshots = parent_death.children(), [*main_names.shared_snapshots]
        monkeypatch.setattr(addresses, "start_callbacks", [fail])
        for take_snapshot in (lambda: poly.Pool(1), pool.refresh):
            with pytest.raises(RuntimeError, match="new thread"):
                take_snapshot()
            assert parent_death.children() == before
            assert main_names.shared_snapshots == snapshots


@pytest.mark.guarantee("end-1")
def test_a_script_that_ends_at_once_after_starting_leaves_nothing():
    for how in (
        "",
        "os._exit(0)",
        "os.kill(os.getpid(), 9)",
        "del pool",
        "pool.shutdown(wait=False)",
    ):
        done = run_script(f"import os, polycephaly as poly\npool = poly.Pool(3)\n{how}\n")
        assert done.returncode in (0, -9) and not done.stderr


@pytest.mark.guarantee("end-1")
def test_threads_that_outlive_the_main_thread_open_no_pools_for_which_the_end_would_wait():
    done = run_script("""
        import atexit, threading
        import polycephaly as poly
        def open_pools():
            while True:
                is_late = is_over
                try:
                    with poly.Pool(1) as pool:
                        pool.doit(abs, -1)
                except BaseException as error:
                    if "starts no more drones" in str(error):
                        outcomes.append("refused")
                        return
                else:
                    opened.set()
                    if is_late:
                        outcomes.append("opened")
                        return
        def look():  # called after the package's own handler, which was registered later
            global is_over
            is_over = True
            for each in threads:
                each.join()
            names = [each.name for each in threading.enumerate()]
            print(*outcomes, "polycephaly-reactor" in names)
        is_over, outcomes, opened = False, [], threading.Event()
        atexit.register(look)
        threads = [threading.Thread(target=open_pools, daemon=True) for _ in range(3)]
        for each in threads:
            each.start()
        opened.wait()
    """)
    assert done.stdout == "refused refused refused False\n", done.stderr


def test_a_controller_killed_while_it_starts_drones_leaves_nothing():
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.05):
        with Script("""
            import polycephaly as poly
            poly.Pool
            print("now", flush=True)
            pools = [poly.Pool(4) for _ in range(50)]
        """) as script:
            script.read_until("now")
            try:
                script.process.wait(delay)
            except Exception:
                pass
            script.signal(signal.SIGKILL)
            script.wait()
            assert not script.left()


def test_a_controller_killed_while_it_stops_drones_leaves_nothing():
    for milliseconds in range(0, 24, 2):
        with Script("""
            import polycephaly as poly
            pool = poly.Pool(2)
            pool.doit(abs, -1)
            print("now", flush=True)
            pool.shutdown()
        """) as script:
            script.read_until("now")
            try:
                script.process.wait(milliseconds / 1000)
            except subprocess.TimeoutExpired:
                script.signal(signal.SIGKILL)
            script.wait()
            assert not script.left(), milliseconds


def test_a_killed_controller_with_a_thousand_open_files_leaves_nothing():
    with Script("""
        import os, resource
        import polycephaly as poly
        resource.setrlimit(resource.RLIMIT_NOFILE, (1200, 1200))
        files = [os.dup(0) for _ in range(1024)]
        with poly.Pool(1) as pool:
            pool.doit(abs, -1)
            print("up", flush=True)
            poly.Promise().result()
    """) as script:
        script.read_until("up")
        script.signal(signal.SIGKILL)
        script.wait()
        assert not script.left()


@pytest.mark.slow
def test_nothing_is_left_of_what_is_ended_at_random_moments_from_start_to_stop():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    seconds = {start: seconds_from_start_to_stop(start, runs=1) for start in ("fork", "spawn")}
    for moment in moments(12, seed):
        ended = run_moment(moment, seconds[moment.start])
        assert not ended.wrong, f"{moment}: {ended.wrong}"


@pytest.mark.slow
def test_the_long_program_tells_its_seed_how_many_it_ran_and_the_slowest_clean_up():
    program = os.path.join(os.path.dirname(__file__), "endings.py")
    chosen = ["--moments", "2", "--seed", "5", "--endings", "SIGKILL", "--loads", "idle"]
    done = subprocess.run(
        [sys.executable, program, *chosen], capture_output=True, text=True, timeout=50
    )
    assert "seed 5\nmatrix: 2 runs" in done.stdout and "moments: 2 runs" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "slowest clean-up" in done.stdout and "2 SIGKILL" in done.stdout
    assert done.returncode == ("FINDING" in done.stdout)
