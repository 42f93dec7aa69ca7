"""Nothing outlives its owner: however the controller ends, all it started is gone within 2 s."""

import os
import signal

import pytest
from faults import lines, wait_for
from scripts import Script, run_script

CONTROLLER = """
    import ctypes, os, signal, subprocess, sys
    import polycephaly as poly
    from faults import append, block_for_ever, hold_until, lines, spin_for_ever, wait_for

    start, load, ending, up = sys.argv[1:]

    def nest():
        global inner
        inner = poly.Pool(2)
        inner.promise(block_for_ever, up)
        inner.promise(deeper)

    def deeper():
        global deepest
        deepest = poly.Drone()
        deepest.promise("import subprocess; child = subprocess.Popen(['sleep', '1000'])").value
        deepest.doit(spin_for_ever, up)

    def programs():
        children.append(subprocess.Popen(["sleep", "1000"]))
        children.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))
        children.append(subprocess.Popen("sleep 1000 & exec setsid sleep 1000", shell=True))
        append(up, "programs")

    children = []

    LOADS = {
        "idle": [],
        "busy": [(block_for_ever, up), (spin_for_ever, up)],
        "nested": [(nest,)],
        "programs": [(programs,)],
        "all": [(spin_for_ever, up), (nest,), (programs,)],
    }
    SIGNS = {"idle": 0, "busy": 2, "nested": 2, "programs": 1, "all": 4}

    def end():
        if ending == "exception":
            raise ZeroDivisionError("the script's own")
        elif ending == "sys.exit":
            sys.exit(3)
        elif ending == "os._exit":
            os._exit(4)
        elif ending == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif ending == "segfault":
            ctypes.string_at(0)
        elif ending in ("SIGTERM", "SIGINT"):
            pool.promise(block_for_ever).value

    if __name__ == "__main__":
        pool = poly.Pool(max(2, len(LOADS[load])) + (ending == "with"), start=start)
        pool.doit(abs, 1)
        going = [pool.promise(*work) for work in LOADS[load]]
        wait_for(lambda: len(lines(up)) >= SIGNS[load])
        print("up", flush=True)
        if ending == "with":
            with pool:
                1 / 0
        end()
"""

STATUS = {
    "return": 0, "exception": 1, "sys.exit": 3, "os._exit": 4, "with": 1,
    "SIGKILL": -signal.SIGKILL, "segfault": -signal.SIGSEGV,
    "SIGTERM": -signal.SIGTERM, "SIGINT": -signal.SIGINT,
}  # fmt: skip


def check_ending(ending: str, load: str, start: str, up: str) -> None:
    with Script(CONTROLLER, start, load, ending, up) as script:
        script.read_until("up")
        if ending in ("SIGINT", "SIGTERM"):
            script.signal(getattr(signal, ending))
        status = script.wait(4)
        left = script.left()
        assert not left, left
        assert status == STATUS[ending], script.process.stderr.read()


@pytest.mark.parametrize("load", ["idle", "busy", "all"])
@pytest.mark.parametrize("ending", STATUS)
def test_nothing_is_left_after_the_controller_ends(ending, load, tmp_path):
    check_ending(ending, load, "fork", str(tmp_path / "up"))


@pytest.mark.parametrize("ending", ["return", "SIGKILL", "SIGINT"])
def test_nothing_is_left_after_a_controller_of_spawned_drones_ends(ending, tmp_path):
    check_ending(ending, "all", "spawn", str(tmp_path / "up"))


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
        assert script.wait(10) == -signal.SIGINT
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


@pytest.mark.parametrize("how", ["pool.drones[0].kill()", "pool.shutdown()", "del pool", "drone = None"])
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
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in programs), 2.0)


def test_a_killed_zygote_takes_its_drones_along_and_the_pool_goes_on(tmp_path):
    done = run_script(
        """
        import os, signal, sys
        import polycephaly as poly
        from faults import block_for_ever, lines, wait_for
        with poly.Pool(2) as pool:
            before = {pool.doit(os.getppid)}
            lost = pool.promise(block_for_ever, sys.argv[1])
            wait_for(lambda: lines(sys.argv[1]))  # not begun, it would move, and block for ever elsewhere
            old = [d.pid for d in pool.drones]
            pool.doit(abs, 1)
            os.kill(before.pop(), signal.SIGKILL)
            print(type(lost.exception()).__name__, pool.doit(abs, -2))
            wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in old))
    """,
        str(tmp_path / "started"),
    )
    assert done.stdout == "DroneDied 2\n", done.stderr


def test_a_script_that_ends_at_once_after_starting_leaves_nothing():
    for how in ("", "os._exit(0)", "os.kill(os.getpid(), 9)", "del pool", "pool.shutdown(wait=False)"):
        done = run_script(f"import os, polycephaly as poly\npool = poly.Pool(3)\n{how}\n")
        assert done.returncode in (0, -9) and not done.stderr


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
