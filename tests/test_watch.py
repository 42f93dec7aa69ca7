"""The watch: a drone without a sign of life is told apart from a busy one; who holds too much
memory is replaced."""

import contextlib
import ctypes
import functools
import inspect
import itertools
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import pytest
from faults import (
    append,
    hold_until,
    lines,
    sleep_holding_the_gil,
    spin_for_ever,
    wait_for,
    wait_holding_the_gil,
)
from scripts import run_script

import polycephaly as poly
from polycephaly.engines.local.launcher import Launcher
from polycephaly.pool import health
from polycephaly.pool.interfaces import State
from polycephaly.runtime.procfs import state_of
from polycephaly.runtime.tuning import tuning

MIB = 1 << 20


def sleep(seconds=1000.0):
    time.sleep(seconds)
    return "slept"


def spin_until(path):
    while not os.path.exists(path):
        pass
    return "spun"


def spin():
    while True:
        pass


def compute_holding_the_gil():
    return sum(range(10**15))  # one loop in C, which lets nobody in


def compute_in_another_thread():
    thread = threading.Thread(target=compute_holding_the_gil)
    thread.start()
    thread.join()


async def sleep_in_green():
    from polycephaly import green

    await green.sleep(1000)


def wait_in_a_program():
    subprocess.Popen(["cat"], stdin=subprocess.PIPE).wait()  # it ends with this process


def hold(mib, started=None, seconds=0.0):
    held = bytearray(os.urandom(1)) * (mib * MIB)
    if started:
        append(started, str(os.getpid()))
    time.sleep(seconds)
    return len(held)


kept = []


# What a drone holds beside what it keeps: pages of this image that it has written into, by counting
# references if by nothing else, which may be 15 MiB after some hundred tests. So there is room for
# that between 90 and 100 %.
ROOMY, NEARLY = 400 * MIB, 365


def keep(mib):
    kept.append(b"x" * (mib * MIB))
    return os.getpid()


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if "does not respond" in r.getMessage()]


# -- who is alive ----------------------------------------------------------------------------------


def pulses_of(drone, times):
    """Feels for a pulse as the watch does, `times` times; gives how often there was one. The first
    time there is."""
    patient = health._ActivityTracker(time.monotonic())
    felt = 0
    for look in range(times):
        time.sleep(0.2 if look else 0.0)
        drone._handle.ask_for_beat()
        felt += patient.inactive_seconds(time.monotonic(), *drone._handle.heartbeat()) == 0
    return felt


@pytest.mark.guarantee("death-8")
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    "work",
    [
        sleep,
        spin,
        wait_in_a_program,
        sleep_in_green,
        compute_holding_the_gil,
        compute_in_another_thread,
    ],
)
def test_one_that_sleeps_computes_or_waits_has_a_pulse(work, width):
    """Also C code that keeps the interpreter, as long as it computes."""
    with poly.Pool(1, width=width) as pool:
        (drone,) = pool.drones
        promised = pool.promise(work)
        wait_for(promised.running)
        wait_for(lambda: pulses_of(drone, 3) == 3)
        drone.kill()
        assert isinstance(promised.exception(), poly.DroneDied)


def test_one_that_holds_its_interpreter_and_does_nothing_has_none(started):
    os.mkfifo(started)
    with poly.Pool(1) as pool:
        (drone,) = pool.drones
        promised = pool.promise(wait_holding_the_gil, started)
        wait_for(promised.running)
        wait_for(lambda: pulses_of(drone, 5) == 1)
        open(started, "w").close()
        promised.result()


@pytest.mark.guarantee("death-8")
def test_a_stopped_drone_is_told_and_goes_on_when_it_is_let(quick, caplog, started):
    with poly.Pool(2) as pool:
        drone = pool.drones[0]
        promised = drone.promise(spin_until, started)
        wait_for(promised.running)
        os.kill(drone.pid, signal.SIGSTOP)
        wait_for(lambda: drone.unresponsive)
        assert "stopped by a signal" in drone.unresponsive and "unresponsive" in repr(drone)
        assert pool.drones[1].unresponsive is None
        assert pool.doit(abs, -1) == 1
        os.kill(drone.pid, signal.SIGCONT)
        wait_for(lambda: drone.unresponsive is None)
        append(started, "end")
        assert promised.value == "spun"
    told = warnings_of(caplog)[0]
    assert drone.name in told and "stopped by a signal" in told and "spin" in told


@pytest.mark.slow
def test_one_that_does_not_respond_is_given_no_more_work(quick):
    with poly.Pool(2) as pool:
        for _ in range(50):
            pool.doit(abs, 1)  # known to be short, so it would be sent ahead
        stopped, other = pool.drones
        os.kill(stopped.pid, signal.SIGSTOP)
        held = [stopped.promise(abs, 0), pool.promise(abs, -1)]
        wait_for(lambda: stopped.unresponsive)
        done = [pool.promise(abs, -i) for i in range(200)]
        assert [p.result(30) for p in done] == list(range(200))
        assert other.alive
        os.kill(stopped.pid, signal.SIGCONT)
        assert [p.value for p in held] == [0, 1]


@pytest.mark.guarantee("death-8")
def test_one_that_holds_its_interpreter_and_does_nothing_is_told(quick, started):
    with poly.Pool(1) as pool:
        (drone,) = pool.drones
        os.mkfifo(started)
        promised = pool.promise(wait_holding_the_gil, started)
        wait_for(lambda: "holds its interpreter" in (drone.unresponsive or ""))
        open(started, "w").close()
        promised.result()


def hold_the_gil_that_many_want(started):
    for _ in range(20):
        threading.Thread(target=spin_for_ever, args=(os.devnull,), daemon=True).start()
    sleep_holding_the_gil(started, 1000)


@pytest.mark.slow
def test_threads_that_wait_for_the_interpreter_are_no_sign_of_life(quick, started):
    with poly.Pool(1, hang_timeout=3) as pool:
        hung = pool.promise(hold_the_gil_that_many_want, started)
        with pytest.raises(poly.DroneDied, match="holds its interpreter"):
            hung.result(30)


@pytest.mark.parametrize(
    "ran, waited, computes",
    [
        (0.02, 0.97, True),
        (0.02, 0.5, False),
        (0.5, 0.0, True),
        (0.008, 0.0, False),
        (0.0, 1.0, False),
    ],
)
def test_what_other_processes_take_of_a_busy_machine_is_not_held_against_a_thread(
    ran, waited, computes
):
    patient = health._ActivityTracker(10.0)
    assert patient.inactive_seconds(10.0, "beat", {"7": (1.0, 2.0)}) == 0
    inactive = patient.inactive_seconds(11.0, "beat", {"7": (1.0 + ran, 2.0 + waited)})
    assert (inactive == 0) == computes


@pytest.mark.guarantee("death-8")
def test_what_does_not_respond_is_killed_after_hang_timeout_and_the_pool_goes_on(quick, started):
    with poly.Pool(1, hang_timeout=1) as pool:  # which counts anew when the machine stood still
        hung = pool.promise(sleep_holding_the_gil, started, 1000)
        behind = [pool.promise(abs, -i) for i in range(5)]
        with pytest.raises(
            poly.DroneDied,
            match=r"not respond for [\d.]+ s: the process holds.*while running sleep_holding",
        ) as caught:
            hung.result()
        assert "in sleep_holding_the_gil" in caught.value.stack not in str(caught.value)
        begin, *frames, end = str(caught.value.__cause__).strip('\n"').splitlines()
        assert begin == "Traceback (most recent call last):"
        assert "faults.py" in frames[0] and frames[0].endswith(", in sleep_holding_the_gil")
        assert len(frames) == 2 and end.endswith(str(caught.value))
        assert [p.value for p in behind] == list(range(5))
        stopped = pool.promise(spin_for_ever, started)
        wait_for(lambda: len(lines(started)) == 2)
        os.kill(int(lines(started)[1]), signal.SIGSTOP)
        with pytest.raises(poly.DroneDied, match="stopped by a signal"):
            stopped.result()
        assert pool.doit(abs, -7) == 7


def test_with_retries_the_work_of_a_hung_drone_is_run_again(quick, tmp_path):
    def hang_once(path):
        append(path, "once")
        if len(lines(path)) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return len(lines(path))

    with poly.Pool(
        1, hang_timeout=0.5, retries=9
    ) as pool:  # on a busy machine another one may not respond as well
        assert pool.doit(hang_once, str(tmp_path / "n")) >= 2


@pytest.mark.guarantee("death-13")
def test_an_initializer_that_hangs_is_an_error_and_no_endless_loop(quick):
    def hang():
        os.kill(os.getpid(), signal.SIGSTOP)

    with poly.Pool(1, hang_timeout=0.5, initializer=hang) as pool:
        promised = pool.promise(abs, 1)
        with pytest.raises(BrokenProcessPool, match="die before they are ready"):
            promised.result(30)


@pytest.mark.guarantee("death-10")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_stopped_zygote_is_told_and_with_hang_timeout_replaced(start, quick, caplog):
    with poly.Pool(1, hang_timeout=1, start=start, retries=9) as pool:
        pool.doit(abs, 1)
        zygote = pool._dispatcher.supervisor.engine._launcher.pid
        os.kill(zygote, signal.SIGSTOP)
        victim = pool.options(retries=0).promise(os.kill, pool.drones[0].pid, signal.SIGKILL)
        assert isinstance(victim.exception(), poly.DroneDied)
        assert pool.promise(abs, -3).result(30) == 3
    assert any("zygote" in each for each in warnings_of(caplog))


@pytest.mark.guarantee("death-10")
@pytest.mark.parametrize("alone", [True, False])
def test_an_older_zygote_that_dies_costs_its_own_drones_only(tmp_path, alone):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(1) as pool:
        engine = pool._dispatcher.supervisor.engine
        busy = pool.promise(hold_until, gate, started)
        wait_for(lambda: lines(started))
        older = engine._launcher
        pool.refresh()
        with pool._dispatcher.reactor._lock:
            for each in (older,) if alone else (engine._launcher, older):
                os.kill(each.pid, signal.SIGKILL)
                wait_for(lambda each=each: state_of(each.pid) == "Z")
        assert isinstance(busy.exception(), poly.DroneDied)
        assert pool.promise(abs, -3).result(30) == 3


def test_a_stopped_zygote_that_reads_no_orders_is_let_go_on(monkeypatch):
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher, told = Launcher.__new__(Launcher), []
    launcher._control = mine
    monkeypatch.setattr(Launcher, "signal_zygote", lambda *_: told.append(its.recv(4096)))
    with mine, its:
        while not told:
            launcher.kill(7)
    assert json.loads(told[0]) == {"kill": 7, "signal": signal.SIGKILL}


@pytest.mark.guarantee("death-10")
def test_a_zygote_that_is_stopped_is_let_go_on_and_the_death_of_a_drone_is_told(
    quick, caplog, monkeypatch, tmp_path
):
    monkeypatch.setattr(tuning, "stopped_zygote_seconds", 1.0)
    gate = tmp_path / "gate"
    with poly.Pool(2) as pool:
        other = pool.drones[0].promise(hold_until, str(gate))
        os.kill(pool._dispatcher.supervisor.engine._launcher.pid, signal.SIGSTOP)
        error = pool.drones[1].promise(os._exit, 7).exception(60)
        assert isinstance(error, poly.DroneDied) and error.exitcode == 7
        gate.touch()
        assert other.result(60) == "held"  # it has lost nothing
        assert pool.promise(abs, -3).result(60) == 3
    assert any("zygote" in each for each in warnings_of(caplog))


def test_a_pool_ends_though_its_zygote_is_stopped(monkeypatch):
    pool = poly.Pool(1)
    launcher = pool._dispatcher.supervisor.engine._launcher
    ends = launcher.close

    def stops_and_ends():
        os.kill(launcher.pid, signal.SIGSTOP)
        wait_for(lambda: state_of(launcher.pid) == "T")
        ends()

    monkeypatch.setattr(launcher, "close", stops_and_ends)
    pool.shutdown()
    wait_for(lambda: not os.path.exists(f"/proc/{launcher.pid}"))


@pytest.mark.parametrize("wrong", [0, -1, 0.1, float("nan")])
def test_a_hang_timeout_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="hang_timeout"):
        poly.Pool(1, hang_timeout=wrong)
    with pytest.raises(ValueError, match="hang_timeout"):
        poly.Drone(hang_timeout=wrong)


# -- who waits -------------------------------------------------------------------------------------


@pytest.mark.guarantee("death-11")
def test_a_wait_is_counted_since_the_last_moment_in_which_anything_ran():
    """A decision about samples and times: of the drone, and of what it has started."""
    asked = []

    def others(ran):
        return lambda: asked.append(ran) or ran

    wait = health._WaitTracker(0.0)
    assert wait.seconds(0.0, ("started 1", {}), others(0.0)) == 0.0
    assert wait.seconds(30.0, ("started 1", {}), others(0.0)) == 0.0 and asked == [
        0.0
    ]  # first seen now
    assert wait.seconds(60.0, ("started 1", {}), others(0.0)) == 30.0
    assert wait.seconds(61.0, ("started 2", {}), others(0.0)) == 0.0
    assert len(asked) == 2  # not while it works itself
    assert wait.seconds(100.0, ("started 2", {}), others(0.0)) == 39.0
    assert (
        wait.seconds(101.0, ("started 2", {}), others(0.1)) == 0.0
    )  # a program of its did something
    assert (
        wait.seconds(1e6, ("started 2", {}), others(0.1)) == 1e6 - 101.0
    )  # also where nobody looked for long


def test_a_thread_that_looks_up_is_none_that_computes():
    wait = health._WaitTracker(0.0)
    steps = "steps 7"
    for second in range(1, 61):
        waited = wait.seconds(second, (steps, {"main": (second * 0.01, 0.0)}), dict)
    assert (
        waited == 58
    )  # the first look sees a new step, the second for the first time what the drone has started
    assert wait.seconds(61.0, (steps, {"main": (0.6 + 30.0, 0.0)}), dict) == 0.0
    assert wait.seconds(62.0, ("steps 8", {"main": (0.6 + 30.0, 0.0)}), dict) == 0.0


def wait_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # here


def wait_for_a_pipe():
    reader, _ = os.pipe()
    os.read(reader, 1)  # here


def wait_for_a_semaphore():
    libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.sem_init(semaphore, 0, 0)
    libc.sem_wait(semaphore)  # here


def wait_for_a_queue():
    queue.Queue().get()  # here


def wait_for_a_timer():
    time.sleep(1000)  # here


async def wait_in_a_coroutine():
    from polycephaly import green

    await green.sleep(1000)  # here


def located(drone):
    """Return where `drone` waits, once its control thread has said that: on a slow machine the wait
    may be told before."""
    waiting = drone.waiting
    return waiting if waiting is not None and waiting.line else None


def waits_of(caplog):
    return [r.getMessage() for r in caplog.records if "has waited for" in r.getMessage()]


def line_here(work):
    code, first = inspect.getsourcelines(work)
    return next(first + index for index, line in enumerate(code) if "# here" in line)


@pytest.mark.guarantee("death-11")
@pytest.mark.parametrize(
    ("work", "call"),
    [
        (wait_for_a_lock, "futex"),
        (wait_for_a_pipe, "read"),
        (wait_for_a_semaphore, "futex"),
        (wait_for_a_queue, "futex"),
        (wait_for_a_timer, "clock_nanosleep"),
    ],
)
def test_a_wait_is_told_with_its_task_its_line_and_its_system_call(work, call, caplog):
    with poly.Pool(1, report_waiting=0.3) as pool:
        (drone,) = pool.drones
        assert drone.waiting is None
        began = time.time()
        promised = pool.promise(work)
        waiting = wait_for(lambda: located(drone))
        assert (waiting.task, waiting.item, waiting.system_call) == (work.__name__, None, call)
        assert (waiting.file, waiting.line, waiting.function) == (
            __file__,
            line_here(work),
            work.__name__,
        )
        assert began - 1 < waiting.since < time.time() and waiting.seconds >= 0.3
        assert f"{work.__name__} has waited for " in str(
            waiting
        ) and f":{line_here(work)} in " in str(waiting)
        assert drone.unresponsive is None and not promised.done()
        drone.kill()
        assert isinstance(promised.exception(), poly.DroneDied)
        assert drone.waiting is None
    told = waits_of(caplog)[-1]  # the only one, unless the machine stood still
    assert drone.name in told and work.__name__ in told and f"in the system call {call}" in told


@pytest.mark.parametrize("width", [1, 2])
def test_the_wait_of_a_coroutine_is_told_with_the_line_of_its_await(width):
    with poly.Pool(1, width=width, report_waiting=0.3) as pool:
        (drone,) = pool.drones
        promised = pool.promise(wait_in_a_coroutine)
        waiting = wait_for(lambda: located(drone))
        assert (waiting.task, waiting.file, waiting.line) == (
            "wait_in_a_coroutine", __file__, line_here(wait_in_a_coroutine),
        )  # fmt: skip
        drone.kill()
        assert isinstance(promised.exception(), poly.DroneDied)


def test_of_one_that_keeps_its_interpreter_the_system_call_is_told(started):
    os.mkfifo(started)
    with poly.Pool(1, report_waiting=0.3) as pool:
        (drone,) = pool.drones
        promised = pool.promise(wait_holding_the_gil, started)
        waiting = wait_for(lambda: drone.waiting)
        assert (waiting.task, waiting.where, waiting.system_call) == (
            "wait_holding_the_gil",
            None,
            "openat",
        )
        open(started, "w").close()
        promised.result()


def wait_at_three(path, index):
    if index == 3:
        open(path).close()
    return index


@pytest.mark.guarantee("death-11")
@pytest.mark.parametrize("first", [0, 200])
def test_of_a_map_the_item_is_told(first, started, caplog):
    """Also of one in the middle of a chunk, which the short calls before it have made long."""
    os.mkfifo(started)
    call = functools.partial(wait_at_three, started)
    with poly.Pool(1, report_waiting=0.3) as pool:
        (drone,) = pool.drones
        found = []
        reading = threading.Thread(
            target=lambda: found.extend(pool.map(call, [-1] * first + list(range(5))))
        )
        reading.start()
        waiting = wait_for(lambda: drone.waiting)
        assert waiting.item == first + 3 and f", item {first + 3} has waited" in waits_of(caplog)[0]
        open(started, "w").close()
        reading.join()
        assert found[first:] == [0, 1, 2, 3, 4]


def wait_twice(one, other):
    open(one).close()
    open(other).close()


@pytest.mark.guarantee("death-11")
def test_each_wait_is_logged_once_and_over_when_it_goes_on(caplog, tmp_path):
    caplog.set_level(logging.INFO, "polycephaly.pool.health")
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    os.mkfifo(one)
    os.mkfifo(other)
    with poly.Pool(1, report_waiting=0.2) as pool:
        (drone,) = pool.drones
        promised = pool.promise(wait_twice, one, other)
        first = wait_for(lambda: located(drone))
        open(one, "w").close()
        second = wait_for(lambda: (found := located(drone)) and found.line != first.line and found)
        assert second.line == first.line + 1 and second.since > first.since
        # A machine that stood still has woken the drone, and may end a wait before its time.
        told = [r.getMessage() for r in caplog.records if " wait" in r.getMessage()]
        assert len(told) >= 3 and all("no longer waits" in each for each in told[1::2])
        assert waits_of(caplog) == told[::2]
        open(other, "w").close()
        promised.result()
        wait_for(lambda: drone.waiting is None)


@pytest.mark.guarantee("death-11")
def test_a_drone_whose_thread_or_program_computes_does_not_wait():
    """It is looked at for as long as one beside it, which does wait."""
    with poly.Pool(3, report_waiting=0.5) as pool:
        thread, program, waits = pool.drones
        script = "while True: pass"
        works = [
            thread.promise(compute_in_another_thread),
            program.promise(subprocess.run, [sys.executable, "-c", script]),
        ]
        wait_for(lambda: all(p.running() for p in works))
        works.append(waits.promise(wait_for_a_timer))
        wait_for(lambda: waits.waiting)
        assert thread.waiting is None
        for each in (thread, program, waits):
            each.kill()
        assert all(isinstance(p.exception(), poly.DroneDied) for p in works)


@pytest.mark.parametrize(
    ("wrong", "error"), [(0, ValueError), (-1, ValueError), ("3", TypeError), (True, TypeError)]
)
def test_a_report_waiting_that_makes_no_sense_is_refused(wrong, error):
    for kind in (poly.Pool, poly.Drone):
        with pytest.raises(error, match="report_waiting"):
            kind(report_waiting=wrong)


def stage(numbers, out):
    for number in numbers:
        out.put(number + 1)


@pytest.mark.guarantee("channel-5")
def test_a_pipeline_with_more_stages_than_drones_is_told_as_a_deadlock(caplog):
    """And runs to its end when what is queued has drones: its stages let their ends go."""
    from polycephaly import green

    with poly.Pool(2, report_waiting=0.3) as pool:
        channels = [green.Channel() for _ in range(6)]
        stages = [
            pool.promise(stage, before.receiver(), after.sender())
            for before, after in itertools.pairwise(channels)
        ]
        feeding = threading.Thread(target=feed, args=(channels[0].sender(),))
        feeding.start()
        wait_for(
            lambda: any("this is a deadlock" in record.getMessage() for record in caplog.records)
        )
        told = next(
            each.getMessage()
            for each in reversed(caplog.records)
            if "this is a deadlock" in each.getMessage()
        )
        assert f"all drones of {pool.name} (2) wait" in told and "(3, the first is stage)" in told
        assert "use a Pool of at least 5 drones" in told
        found = wait_for(lambda: all(both := [*map(located, pool.drones)]) and both)
        assert {(each.task, each.file) for each in found} == {("stage", __file__)}
        for each in stages:
            each.cancel()
        channels[0].close()
        feeding.join()


def feed(out):
    from polycephaly.green import ChannelClosed

    with contextlib.suppress(ChannelClosed), out:
        for number in range(10):
            out.put(number)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.guarantee("death-12")
def test_who_holds_too_much_is_killed_and_the_rest_is_done(started):
    with poly.Pool(2, max_memory=150 * MIB) as pool:
        large = pool.promise(hold, 300, started, 1000)
        others = [pool.promise(sleep, 0.01) for _ in range(100)]
        with pytest.raises(
            poly.DroneDied, match=r"held \d+ MiB, more than max_memory=150 MiB.*running hold"
        ):
            large.result(30)
        assert [p.value for p in others] == ["slept"] * 100
        assert pool.doit(hold, 10) == 10 * MIB


@pytest.mark.guarantee("death-12")
def test_what_a_drone_has_started_counts(started):
    with poly.Pool(1, max_memory=150 * MIB) as pool:
        script = "import time; held = b'x' * (300 << 20); time.sleep(1000)"
        with pytest.raises(poly.DroneDied, match="max_memory"):
            pool.promise(subprocess.run, [sys.executable, "-c", script]).result(30)
        assert pool.doit(abs, -1) == 1


@pytest.mark.guarantee("death-12")
def test_one_that_comes_near_is_replaced_between_two_pieces_of_work_and_nothing_is_lost():
    with poly.Pool(1, max_memory=ROOMY) as pool:
        first = pool.doit(keep, NEARLY)
        wait_for(lambda: pool.doit(os.getpid) != first)
        second = pool.doit(keep, NEARLY - 30)
        for _ in range(3):  # together it comes near, and no further
            promises = [pool.promise(keep, 3) for _ in range(4)]
            assert all(p.value for p in promises)
        wait_for(lambda: pool.doit(os.getpid) != second)


@pytest.mark.guarantee("death-12")
def test_the_main_images_own_memory_does_not_count():
    done = run_script("""
        import os
        import polycephaly as poly
        table = os.urandom(1 << 20) * 400
        with poly.Pool(1, max_memory=100 << 20) as pool:
            p = pool.promise("import time; time.sleep(1); len(table)")
            print(p.value, pool.drones[0].pid == pool.doit(os.getpid))
    """)
    assert done.stdout == f"{400 << 20} True\n", done.stderr


@pytest.mark.slow
def test_a_limit_that_only_idle_drones_pass_is_no_endless_loop():
    """Between 90 and 100 %, and without any work: each would be replaced by one that is as
    large."""
    pool = poly.Pool(1, max_memory=ROOMY, initializer=keep, initargs=(NEARLY,))
    with pool, pytest.raises(BrokenProcessPool, match="max_memory"):
        wait_for(lambda: pool._dispatcher.refusal, 50)
        pool.doit(abs, 1)


def test_a_drone_that_is_being_killed_does_not_count_as_one_within_the_limit():
    """Its memory goes bit by bit, and a look may come in between: the drones before it were too
    large all the same."""
    fits = []
    population = SimpleNamespace(fits=lambda: fits.append(True))
    dispatcher = SimpleNamespace(
        config=SimpleNamespace(hang_timeout=None, max_memory=100, report_waiting=None),
        state=SimpleNamespace(population=population),
    )
    dying = SimpleNamespace(is_killed=True, memory=lambda enough: 0, state=State.READY)
    health.HealthMonitor(dispatcher, SimpleNamespace())._check_memory(dying, 100)
    assert not fits


@pytest.mark.guarantee("death-13")
def test_a_limit_that_no_drone_keeps_is_one_clear_error():
    def large():
        kept.append(b"x" * (50 * MIB))

    def until_it_breaks(pool):
        while True:
            pool.promise(sleep, 0.1).result(30)

    pool = poly.Pool(1, max_memory=20 * MIB, initializer=large)
    with pool, pytest.raises(BrokenProcessPool, match="max_memory"):
        until_it_breaks(pool)


@pytest.mark.parametrize(
    ("wrong", "kind"), [(0, ValueError), (1000, ValueError), (-5, ValueError), (1.5e9, TypeError)]
)
def test_a_memory_limit_that_makes_no_sense_is_refused(wrong, kind):
    with pytest.raises(kind, match="max_memory"):
        poly.Pool(1, max_memory=wrong)
