"""Death: what ran is rejected with all that is known, what was queued runs exactly once."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, CancelledError
from concurrent.futures.process import BrokenProcessPool

import pytest
from engines import LEFT, NO_STATUS, local_only, on_each_engine, poly, rounds, told
from faults import (
    append,
    block_for_ever,
    exit_hard,
    hold_until,
    kill_myself,
    lines,
    note,
    say_and_die,
    segfault,
    wait_for,
)  # fmt: skip
from scripts import run_script

from polycephaly.runtime.tuning import tuning
from polycephaly.wire import messages

pytestmark = on_each_engine


def die_the_first_time(path):
    append(path, "tried")
    if len(lines(path)) == 1:
        os._exit(1)
    return "lived"


@pytest.mark.guarantee("death-1")
@pytest.mark.parametrize(
    ("work", "args", "status", "told_as"),
    [
        (exit_hard, (7,), 7, "exit status 7"),
        (kill_myself, (), -signal.SIGKILL, "SIGKILL"),
        (segfault, (), -signal.SIGSEGV, "SIGSEGV"),
    ],
)
def test_a_death_rejects_what_was_running_and_the_pool_goes_on(pool, work, args, status, told_as):
    error = pool.promise(work, *args).exception()
    assert isinstance(error, poly.DroneDied) and isinstance(error, BrokenProcessPool)
    assert (
        work.__name__ in error.running and work.__name__ in str(error) and error.drone in str(error)
    )
    assert error.exitcode == told(status) and (told(status) is None or told_as in str(error))
    assert ("memory ran out" in str(error)) == (error.exitcode == -signal.SIGKILL)
    assert pool.doit(abs, -1) == 1


@pytest.mark.guarantee("death-1")
@local_only(NO_STATUS)
@pytest.mark.parametrize(
    ("number", "told_as"),
    [
        (signal.SIGHUP, "SIGHUP"),
        (signal.SIGABRT, "SIGABRT"),
        (signal.SIGRTMIN + 3, str(signal.SIGRTMIN + 3)),
    ],
)
def test_a_signal_is_told_by_its_name_or_its_number_if_it_has_none(pool, number, told_as):
    error = pool.promise(kill_myself, number).exception()
    assert error.exitcode == -number and told_as in str(error)


@pytest.mark.guarantee("death-1")
def test_a_segfault_shows_the_python_stack_that_faulthandler_left(pool):
    error = pool.promise(segfault).exception()
    assert "Fatal Python error: Segmentation fault" in error.stack
    assert "in segfault" in error.stack and "in segfault" in str(error)
    assert "executor.py" not in error.stack  # nor other frames from which the task was called


def says_and_crashes(threads):
    end = threading.Event()
    for _ in range(threads):
        threading.Thread(target=end.wait, daemon=True).start()
    print("the program's last line", file=sys.stderr, flush=True)
    os.write(2, b"and one without an end: ")
    segfault()


def test_the_programs_last_lines_are_kept_apart_from_the_stack(pool):
    error = pool.promise(says_and_crashes, 30).exception()
    said, _, _ = error.stderr.partition(
        "*** SIGSEGV"
    )  # where Ray's own report of the signal begins
    assert (
        said == "the program's last line\nand one without an end: "
        and "Fatal Python error" not in error.stderr
    )
    assert (
        error.stack.startswith("Fatal Python error: Segmentation fault\n")
        and "says_and_crashes" in error.stack
    )
    assert str(error).index("the program's last line") < str(error).index("Fatal Python error")


def outlives_a_crash():
    subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", "import os; os.abort()"], check=False
    )
    print("the program goes on", file=sys.stderr, flush=True)
    os._exit(3)


def test_what_a_program_says_after_the_crash_of_another_is_no_stack(pool):
    error = pool.promise(outlives_a_crash).exception()
    assert error.stderr == "the program goes on" and "Fatal Python error: Aborted" in error.stack


@local_only("Ray adds a report of its own")
def test_the_stack_of_a_crash_is_shown_once():
    done = run_script(
        """
        import os, signal, subprocess, sys, polycephaly as poly
        from faults import segfault, wait_for

        def outlives(goes_on):
            subprocess.run([sys.executable, "-X", "faulthandler", "-c", "import os; os.abort()"])
            if goes_on:
                print("goes on", file=sys.stderr)

        if __name__ == "__main__":
            with poly.Pool(1, name="p") as pool:
                print(pool.promise(segfault).exception(), file=sys.stderr)
                print("-- of another process", file=sys.stderr)
                pool.doit(outlives, False)
                print("-- which is not the last to say something", file=sys.stderr)
                pool.doit(outlives, True)
                print("-- of an idle drone", file=sys.stderr)
                pid = pool.drones[0].pid
                os.kill(pid, signal.SIGSEGV)
                wait_for(lambda: pool.drones and pool.drones[0].pid not in (None, pid))
                pool.doit("1")
    """
    )
    assert done.returncode == 0, done.stderr
    first, *others = done.stderr.split("\n-- ")
    assert first.count(" in segfault") == 1
    assert [each.count("most recent call first") > 0 for each in others] == [True] * 3, done.stderr


@local_only("Ray adds a report of its own")
def test_the_stack_of_a_crash_is_shown_though_the_task_runs_again(tmp_path):
    done = run_script(
        """
        import sys, polycephaly as poly
        from faults import append, lines, segfault

        def crash_once(path):
            append(path, "tried")
            return "lived" if len(lines(path)) > 1 else segfault()

        if __name__ == "__main__":
            with poly.Pool(1, retries=1) as pool:
                print(pool.doit(crash_once, sys.argv[1]))
    """,
        str(tmp_path / "tried"),
    )
    assert done.stdout == "lived\n" and done.stderr.count(" in crash_once") == 1, done.stderr


@pytest.mark.guarantee("death-1")
def test_the_last_lines_of_stderr_are_told(pool):
    error = pool.promise(say_and_die, "\n".join(f"line {i}" for i in range(100)), 3).exception()
    assert "line 99" in error.stderr and "line 99" in str(error)
    assert "line 0\n" not in error.stderr


def test_a_code_string_that_dies_is_named(pool):
    error = pool.promise("import os; os._exit(1)").exception()
    assert "os._exit(1)" in error.running


def test_sys_exit_is_an_error_of_the_work_and_no_death(pool):
    before = {d.pid for d in pool.drones}
    assert isinstance(pool.promise(sys.exit, 3).exception(), SystemExit)
    assert {d.pid for d in pool.drones} == before


@pytest.mark.guarantee("death-5")
def test_a_dead_drone_is_replaced_and_the_pool_goes_on(pool):
    before = {d.pid for d in pool.drones}
    names = {d.name for d in pool.drones}
    for _ in range(3):
        pool.promise(exit_hard, 1).exception()
    wait_for(lambda: len(pool.drones) == 2 and all(d.alive for d in pool.drones))
    assert [p.value for p in pool.everywhere(os.getpid)]
    assert {d.name for d in pool.drones} == names
    assert {d.pid for d in pool.drones} != before


def test_a_listed_drone_has_its_pid_even_while_it_is_being_replaced(pool):
    for _ in rounds(20):
        killer = pool.promise(exit_hard, 1)
        while not killer.done():
            assert all(isinstance(d.pid, int) for d in pool.drones)
        assert all(isinstance(d.pid, int) for d in pool.drones)


@pytest.mark.guarantee("death-2")
def test_work_queued_on_a_dead_drone_runs_exactly_once(tmp_path):
    path = str(tmp_path / "ran")
    with poly.Pool(2, output="discard") as pool:
        for p in [
            pool.promise(note, path, -1) for _ in range(200)
        ]:  # so that it is known to be short
            p.value  # noqa: B018
        for _ in rounds(5):
            os.unlink(path)
            work = [pool.promise(note, path, i) for i in range(300)]
            killer = pool.promise(exit_hard, 1)
            more = [pool.promise(note, path, i) for i in range(300, 600)]
            assert [p.value for p in work + more] == list(range(600))
            assert isinstance(killer.exception(), poly.DroneDied)
            assert sorted(map(int, lines(path))) == list(range(600))


@pytest.mark.guarantee("death-3")
def test_work_pinned_to_a_drone_that_dies_is_rejected_not_moved(tmp_path):
    path, gate = str(tmp_path / "ran"), str(tmp_path / "gate")
    with poly.Pool(2, output="discard") as pool:
        drone = pool.drones[0]
        running = drone.promise(hold_until, gate, path)
        wait_for(lambda: lines(path))
        queued = [drone.promise(note, path, i) for i in range(3)]
        drone.kill()
        for p in [running, *queued]:
            assert isinstance(p.exception(), poly.DroneDied)
            assert "because kill() was called" in str(p.exception())
        assert len(lines(path)) == 1
        with pytest.raises(RuntimeError, match="kill"):
            drone.promise(abs, 1)


@pytest.mark.slow
def test_everywhere_while_drones_die_gives_promises_and_never_raises(pool):
    for _ in rounds(30):
        for pid in [d.pid for d in pool.drones]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _ in range(20):
            for p in pool.everywhere(abs, -1):
                assert p.exception(60) is None or isinstance(p.exception(), poly.DroneDied)


@pytest.mark.parametrize("round_", range(3))
@pytest.mark.slow
def test_killed_in_random_places_work_is_rejected_or_done_once(round_, tmp_path):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    path = str(tmp_path / "ran")
    with poly.Pool(3, output="discard") as pool:
        first = [d.pid for d in pool.drones]
        work = [pool.promise(note, path, i) for i in range(1500)]
        for _ in rounds(6):
            time.sleep(
                dice.random() * 0.01
            )  # where in its life a drone is hit, not a synchronization
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(first), signal.SIGKILL)
            first = [d.pid for d in pool.drones] or first
        done, lost = set(), 0
        for i, p in enumerate(work):
            error = p.exception(60)
            if error is None:
                assert p.value == i
                done.add(i)
            else:
                assert isinstance(error, poly.DroneDied)
                lost += 1
        ran = sorted(map(int, lines(path)))
    assert len(ran) == len(set(ran)), "something ran twice"
    assert done <= set(ran)
    assert len(done) + lost == 1500


@pytest.mark.guarantee("death-6")
def test_lost_work_is_run_again_where_retries_say_so(tmp_path):
    path = str(tmp_path / "tries")
    with poly.Pool(1, retries=1, output="discard") as pool:
        assert pool.doit(die_the_first_time, path) == "lived"
        assert isinstance(pool.promise(exit_hard, 5).exception(), poly.DroneDied)


@pytest.mark.guarantee("death-5")
def test_a_pool_that_breaks_on_death_rejects_all_and_takes_no_more(tmp_path):
    gate = str(tmp_path / "gate")
    with poly.Pool(2, on_death="break", output="discard") as pool:
        work = [pool.promise(hold_until, gate) for _ in range(4)]
        os.kill(pool.drones[0].pid, signal.SIGKILL)
        for p in work:
            assert isinstance(p.exception(60), BrokenProcessPool)
        with pytest.raises(BrokenExecutor):
            pool.submit(abs, 1)


def test_a_lone_drone_that_died_says_so_at_the_next_call():
    drone = poly.Drone()
    assert drone.promise(exit_hard, 3).exception().exitcode == told(3)
    wait_for(lambda: not drone.alive)
    assert drone.exitcode == told(3)
    with pytest.raises(RuntimeError, match="exit status 3" if told(3) else "died"):
        drone.doit("1")
    assert "ended" in repr(drone)
    drone.release()


def test_a_killed_drone_has_its_exit_code():
    with poly.Drone() as drone:
        running = drone.promise(block_for_ever)
        drone.kill()
        assert not drone.alive and drone.exitcode == -signal.SIGKILL
        assert isinstance(running.exception(), poly.DroneDied)


def exit_hard_when(path, status):
    hold_until(path)
    exit_hard(status)


@pytest.mark.parametrize("killed", [True, False])
def test_a_lone_drone_that_dies_before_it_is_ready_tells_its_own_death(killed, tmp_path):
    asked = tmp_path / "asked"
    with poly.Drone(initializer=exit_hard_when, initargs=(str(asked), 3)) as drone:
        waiting = drone.promise(abs, 1)
        if killed:
            drone.kill()
        else:
            asked.touch()
        died = waiting.exception(60)
        assert type(died) is poly.DroneDied and died.exitcode == (
            -signal.SIGKILL if killed else told(3)
        )
        with pytest.raises(poly.DroneDied):
            drone.promise(abs, 1)


@local_only
def test_a_fresh_drone_for_one_promise_tells_its_death():
    assert poly.promise(exit_hard, 9).exception(60).exitcode == 9


@pytest.mark.guarantee("death-4")
def test_results_sent_before_the_death_arrive(tmp_path):
    with poly.Pool(1, output="discard") as pool:
        for _ in rounds(10):
            large = pool.promise(bytes, 3_000_000)
            killer = pool.promise(exit_hard, 1)
            assert len(large.value) == 3_000_000
            assert isinstance(killer.exception(), poly.DroneDied)


@pytest.mark.guarantee("death-4")
def test_work_that_had_finished_is_not_lost_with_a_neighbour_that_kills_its_drone(tmp_path):
    path = str(tmp_path / "ran")
    with poly.Pool(1, output="discard") as pool:
        for p in [
            pool.promise(note, path, -1) for _ in range(200)
        ]:  # known to be short: it travels in batches
            p.value  # noqa: B018
        for i in rounds(20):
            before = [pool.promise(note, path, i) for _ in range(5)]
            killer = pool.promise(exit_hard, 1)
            assert isinstance(killer.exception(), poly.DroneDied)
            assert [p.exception() for p in before] == [None] * 5


def test_a_drone_stopped_and_then_killed_is_told_like_any_other():
    with poly.Pool(2, output="discard") as pool:
        victim = pool.drones[0]
        os.kill(victim.pid, signal.SIGSTOP)
        p = victim.promise(abs, -1)
        os.kill(victim.pid, signal.SIGKILL)
        assert p.exception(60).exitcode == told(-signal.SIGKILL)
        assert pool.doit(abs, -1) == 1


@local_only(LEFT)
def test_death_while_a_child_process_of_the_drone_holds_its_pipes(tmp_path):
    with poly.Pool(1, output="discard") as pool:
        pids = str(tmp_path / "pids")
        p = pool.promise(start_and_die, pids)
        assert p.exception(60).exitcode == told(11)
        child = int(lines(pids)[0])
        wait_for(lambda: not os.path.exists(f"/proc/{child}"))


def start_and_die(pids):
    append(pids, str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
    os._exit(11)


def scribble_over_the_ring():
    from polycephaly.drone import executor

    (drone,) = executor._executors
    drone._ring._cells[0] += 500
    os._exit(1)


@local_only
def test_garbage_that_a_dead_drone_left_in_its_ring_harms_nobody():
    with poly.Pool(2, output="discard") as pool:
        assert isinstance(pool.promise(scribble_over_the_ring).exception(60), poly.DroneDied)
        assert [p.result(60) for p in [pool.promise(abs, -i) for i in range(100)]] == list(
            range(100)
        )


def have_no_memory_for_calls():
    def loads(payload):
        raise MemoryError

    messages.loads = loads
    return os.getpid()


@local_only
@pytest.mark.guarantee("death-2")
def test_calls_whose_message_a_drone_has_no_memory_to_unpack_run_in_another():
    with poly.Pool(1, output="discard") as pool:
        pid = pool.doit(have_no_memory_for_calls)
        # The drone is idle, so the first call goes alone, and many of the others go together.
        calls = [pool.promise(pow, i, 2) for i in range(200)]
        assert [call.result(60) for call in calls] == [i**2 for i in range(200)]
        assert pool.doit(os.getpid) != pid


@local_only
def test_a_call_that_closes_its_drones_socket_is_lost_and_no_other(monkeypatch):
    monkeypatch.setattr(tuning, "batch_seconds", 60.0)  # so that they go together

    def number(i):
        if i == 5:
            os.closerange(3, 4096)
        return i

    with poly.Pool(1, output="discard") as pool:
        list(pool.map(number, [0] * 1000))  # known as short
        calls = [pool.promise(number, i) for i in range(8)]
        error = calls.pop(5).exception(60)  # none if it had ended before its drone noticed that
        assert error is None or isinstance(error, poly.DroneDied)
        assert [each.result(60) for each in calls] == [0, 1, 2, 3, 4, 6, 7]


@local_only
@pytest.mark.slow
def test_waits_in_threads_while_pools_are_killed_always_end():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    wrong = []

    def wait_on(promise):
        try:
            promise.result(60)
        except (poly.DroneDied, CancelledError):
            pass
        except BaseException as error:
            wrong.append(error)

    for _ in range(40):
        pool = poly.Pool(1, output="discard")
        pool.doit(abs, 1)
        p = pool.promise("import time; time.sleep(100)")
        waiters = [threading.Thread(target=wait_on, args=(p,)) for _ in range(4)]
        for each in waiters[:2]:
            each.start()
        threading.Event().wait(dice.random() * 0.005)
        pool._dispatcher.kill()
        for each in waiters[2:]:
            each.start()
        for each in waiters:
            each.join(60)
            assert not each.is_alive()
        pool.shutdown()
    assert not wrong


def test_whatever_is_submitted_while_a_pool_breaks_is_settled():
    made = [[] for _ in range(8)]

    def submit(promises):
        with contextlib.suppress(Exception):
            while True:
                promises.append(pool.promise(list, [1, 2]))

    interval = sys.getswitchinterval()
    with poly.Pool(1, on_death="break", output="discard") as pool:
        pool.promise(time.sleep, 100)
        threads = [threading.Thread(target=submit, args=(each,)) for each in made]
        try:
            sys.setswitchinterval(1e-5)
            for thread in threads:
                thread.start()
            time.sleep(0.1)
            os.kill(pool.drones[0].pid, signal.SIGKILL)
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        for p in (p for promises in made for p in promises):
            with contextlib.suppress(CancelledError):
                assert isinstance(p.exception(30), poly.DroneDied | RuntimeError | None)


@local_only
def test_a_task_that_is_lost_at_the_programs_end_gives_that_as_the_reason():
    done = run_script("""
        import threading, time
        import polycephaly as poly
        pool = poly.Pool(1)
        task = pool.promise(time.sleep, 1000)
        while not task.running():
            time.sleep(0.01)
        threading.Thread(target=lambda: print(task.exception()), daemon=True).start()
    """)
    assert "because the program ends, while running sleep" in done.stdout, done.stderr
