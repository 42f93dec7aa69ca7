"""What each drone does at this moment, told without a task being stopped."""

import linecache
import os
import queue
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from traceback import FrameSummary, StackSummary

import pytest
from engines import on_each_engine, poly
from faults import (
    append,
    block_for_ever,
    lines,
    sleep_holding_the_gil,
    wait_for,
    wait_holding_the_gil,
)
from in_time import FakeReactor, dispatcher_of, give

import polycephaly
from polycephaly import green
from polycephaly.drone import frames as drone_frames
from polycephaly.errors import Malformed
from polycephaly.pool.stack_requests import StackRequest
from polycephaly.pool.stacks import Stack
from polycephaly.pool.task_promise import facts_of
from polycephaly.runtime.procfs import state_of
from polycephaly.server.join import join
from polycephaly.wire.messages import FRAMES

QUICK = 0.3  # seconds: of a drone that will not answer


def line_of(mark):
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {mark}"))


def sleeps(started):
    append(started, "sleeps")
    time.sleep(1000)  # SLEEPS


def waits(started):
    lock = threading.Lock()
    lock.acquire()
    append(started, "waits")
    lock.acquire()  # WAITS


def goes_deep(started, depth):
    if depth:
        goes_deep(started, depth - 1)
    else:
        block_for_ever(started)


def has_a_thread(started):
    threading.Thread(target=sleeps, args=(started,), name="beside", daemon=True).start()
    threading.Thread(target=queue.Queue().get, daemon=True).start()  # runs no code of ours
    block_for_ever(started)


async def outer(started):
    await inner(started)  # OUTER


async def inner(started):
    append(started, "inner")
    await green.sleep(1000)  # INNER


def last(stack):
    frame = stack.frames[-1]
    return frame.filename, frame.lineno, frame.name, frame.line


def begun(started, count=1):
    wait_for(lambda: len(lines(started)) == count)


def has_got_to(stack, function):
    """`append` says that a drone has begun, and is before the line at which it stays."""
    ours = [each for each in stack.frames if each.name == function]
    return ours and "append(" not in ours[-1].line


def in_place(drone, function):
    """The stack of the drone, which may not have got there yet."""
    return wait_for(lambda: has_got_to(stack := drone.stack(), function) and stack)


# -- on each engine --------------------------------------------------------------------------------


@on_each_engine
def test_a_stack_is_that_of_the_task_and_nothing_else(started):
    with poly.Pool(2) as pool:
        task = pool.promise(sleeps, started)
        begun(started)
        busy, idle = wait_for(
            lambda: (
                (both := sorted(pool.stacks(timeout=30), key=lambda each: each.state))
                and has_got_to(both[0], "sleeps")
                and both
            )
        )
        task.cancel()
    assert (busy.state, busy.task, busy.number, busy.item) == (
        "busy",
        "sleeps",
        facts_of(task).number,
        None,
    )
    assert busy.seconds >= 0 and not busy.threads
    assert [each.name for each in busy.frames] == ["sleeps"]
    line = line_of("SLEEPS")
    assert last(busy) == (__file__, line, "sleeps", "time.sleep(1000)  # SLEEPS")
    assert (idle.state, idle.task, idle.seconds, [*idle.frames]) == ("idle", None, None, [])


@on_each_engine
def test_a_drone_that_has_ended_says_so():
    with poly.Drone() as drone:
        drone.kill()
        with pytest.raises(poly.DroneDied):
            drone.stack()
    with poly.Drone() as drone:
        pass
    with pytest.raises(RuntimeError, match=r"was released"):
        drone.stack()


@on_each_engine
def test_a_time_limit_that_is_none_is_refused():
    with poly.Pool(1) as pool:
        for wrong in (0, -1.0):
            with pytest.raises(ValueError, match="timeout must be a positive number"):
                pool.stacks(timeout=wrong)
        with pytest.raises(TypeError, match="timeout is a number"):
            pool.drones[0].stack(timeout="1")


# -- what is told ----------------------------------------------------------------------------------


def test_a_wait_for_a_lock_is_told(started):
    with poly.Drone() as drone:
        task = drone.promise(waits, started)
        begun(started)
        stack = in_place(drone, "waits")
        assert last(stack)[3] == "lock.acquire()  # WAITS"
        assert stack.pid == drone.pid and stack.drone == drone.name
        task.cancel()


def test_of_a_deep_recursion_the_innermost_frames_are_told(started):
    with poly.Drone() as drone:
        task = drone.promise(goes_deep, started, 300)
        begun(started)
        stack = in_place(drone, "block_for_ever")
        assert len(stack.frames) == drone_frames.MAX_FRAMES
        assert [each.name for each in stack.frames][:2] == ["goes_deep"] * 2
        assert "Previous line repeated" in str(stack)
        task.cancel()


def test_other_threads_are_told_if_they_run_code_of_users(started):
    with poly.Drone() as drone:
        task = drone.promise(has_a_thread, started)
        begun(started, 2)
        stack = in_place(drone, "block_for_ever")
        ((name, frames),) = stack.threads
        assert name == "beside"
        assert [each.name for each in frames if each.filename == __file__] == ["sleeps"]
        task.cancel()


def test_the_lines_of_a_code_string_are_told():
    with poly.Drone() as drone:
        task = drone.promise("import time\ntime.sleep(1000)")
        stack = wait_for(lambda: (each := drone.stack()).frames and each)
        assert stack.task.startswith("code 'import time")
        wait_for(lambda: [each.line for each in drone.stack().frames] == ["time.sleep(1000)"])
        task.cancel()


def test_a_function_of_c_has_no_frames_and_none_of_the_process_before_the_fork():
    with poly.Drone(report_waiting=0.2) as drone:
        task = drone.promise(time.sleep, 1000)
        wait_for(task.running)
        stack = wait_for(lambda: (each := drone.stack(timeout=30)).task and each)
        assert (stack.task, [*stack.frames]) == ("sleep", [])
        assert "no Python frames" in str(stack)
        slept = wait_for(lambda: (each := drone.stack(timeout=30)).system_call and each)
        assert slept.system_call == "clock_nanosleep"
        assert ", in the system call clock_nanosleep\n" in str(slept)
        waiting = wait_for(lambda: drone.waiting)
        assert (waiting.task, waiting.where) == ("sleep", None)
        task.cancel()


def computes(started):
    append(started, "computes")
    while True:
        pass


def test_a_drone_that_computes_or_is_idle_waits_in_no_system_call(started):
    with poly.Drone() as drone:
        task = drone.promise(computes, started)
        begun(started)
        # Now and then it waits for its interpreter, which the control thread has just used.
        wait_for(lambda: in_place(drone, "computes").system_call is None)
        task.cancel()
        stack = wait_for(lambda: (each := drone.stack()).state == "idle" and each)
        assert stack.system_call is None


def test_the_item_of_a_map_is_told(started):
    with poly.Pool(1) as pool:
        results = pool.map(lambda n: n if n < 3 else sleeps(started), range(5))
        begun(started)
        stack = in_place(pool.drones[0], "sleeps")
        assert stack.item == 3 and stack.frames[-1].name == "sleeps"
        results.close()


def test_a_coroutine_is_told_by_its_awaits(started):
    with poly.Drone() as drone:
        task = drone.promise(outer, started)
        begun(started)
        stack = wait_for(lambda: len((each := drone.stack()).frames) == 2 and each)
        assert [(each.name, each.lineno) for each in stack.frames] == [
            ("outer", line_of("OUTER")),
            ("inner", line_of("INNER")),
        ]
        task.cancel()


def test_tasks_that_run_beside_others_are_told_each(started):
    with poly.Pool(1, width=3) as pool:
        tasks = [pool.promise(outer, started) for _ in range(3)]
        begun(started, 3)

        def found():
            (stack,) = pool.stacks(timeout=30)
            names = [[each.name for each in frames] for _, frames in stack.threads]
            return names == [["outer", "inner"]] * 3 and stack

        stack = wait_for(found)
        assert stack.state == "busy" and not stack.frames
        assert {name for name, _ in stack.threads} == {
            f"outer #{facts_of(task).number}" for task in tasks
        }
        for task in tasks:
            task.cancel()


def test_drones_of_drones_tell_their_own_frames_alone(started):
    def asks():
        with polycephaly.Drone() as inner_drone:
            task = inner_drone.promise(sleeps, started)
            begun(started)
            stack = in_place(inner_drone, "sleeps")
            task.cancel()
            return [each.name for each in stack.frames]

    assert polycephaly.doit(asks) == ["sleeps"]


def test_stacks_print_as_text():
    with polycephaly.Pool(2, name="lab") as pool:
        stacks = pool.stacks(timeout=30)
        one, two = (f"{drone.name} (pid {drone.pid}): idle" for drone in pool.drones)
    assert str(stacks) == f"{one}\n\n{two}" and isinstance(stacks, list)


def test_a_drone_of_this_process_is_told_without_the_threads_of_the_program(started, tmp_path):
    released, gate = threading.Event(), str(tmp_path / "gate")
    bystander = threading.Thread(target=lambda: released.wait())
    bystander.start()
    try:
        with polycephaly.Pool(1, engine="inline") as pool:
            assert [each.state for each in pool.stacks()] == ["idle"]
            task = pool.promise(holds, started, gate)
            begun(started)
            (stack,) = pool.stacks()
            assert (stack.state, stack.threads) == ("busy", ())
            assert stack.frames[0].name == "holds"
            open(gate, "w").close()
            task.result()
    finally:
        released.set()
        bystander.join()


# -- drones that do not answer ---------------------------------------------------------------------


def test_c_code_that_holds_the_interpreter_is_told_by_what_is_known_from_outside(started):
    with poly.Pool(2) as pool:
        holds, sleeper = pool.promise(sleep_holding_the_gil, started), pool.promise(sleeps, started)
        begun(started, 2)
        silent = wait_for(
            lambda: (
                (each := min(pool.stacks(timeout=QUICK), key=lambda each: each.task or "z"))
                and each.state.startswith("no answer")
                and each
            )
        )
        assert silent.state.startswith(f"no answer within {QUICK} s: the process holds its ")
        assert f"py-spy dump --native --pid {silent.pid}" in silent.state
        assert (silent.task, silent.number) == ("sleep_holding_the_gil", facts_of(holds).number)
        assert "sleep_holding_the_gil" in str(silent) and "no answer within" in str(silent)
        other, held = sorted(pool.drones, key=lambda each: each.pid == silent.pid)
        assert [each.name for each in in_place(other, "sleeps").frames] == ["sleeps"]
        held.kill()
        sleeper.cancel()


def test_of_a_drone_that_cannot_answer_the_system_call_is_told(started):
    os.mkfifo(started)
    with poly.Pool(1) as pool:
        task = pool.promise(wait_holding_the_gil, started)
        stack = wait_for(
            lambda: (each := pool.stacks(timeout=QUICK)[0]).system_call == "openat" and each
        )
        assert ", in the system call openat: no answer within" in str(stack)
        open(started, "w").close()
        task.result()


def test_a_process_that_is_stopped_is_told(started):
    with poly.Drone() as drone:
        task = drone.promise(sleeps, started)
        begun(started)
        os.kill(drone.pid, signal.SIGSTOP)
        wait_for(lambda: state_of(drone.pid) == "T")
        try:
            assert "stopped by a signal" in drone.stack(timeout=QUICK).state
        finally:
            os.kill(drone.pid, signal.SIGCONT)
        assert in_place(drone, "sleeps").state == "busy"
        task.cancel()


def test_a_drone_that_dies_meanwhile_is_left_out(started):
    with poly.Pool(2) as pool:
        pool.promise(sleep_holding_the_gil, started)
        begun(started)
        (pid,) = map(int, lines(started))
        with ThreadPoolExecutor(1) as thread:
            stacks = thread.submit(pool.stacks, 30)
            wait_for(lambda: pool._dispatcher.stack_requests._pending)
            os.kill(pid, signal.SIGKILL)
            assert pid not in [each.pid for each in stacks.result()]


def test_a_finalizer_that_holds_the_thread_of_the_pool_is_told():
    entered, gate = threading.Event(), threading.Event()
    with poly.Pool(1) as pool:
        pool._dispatcher.reactor.post(lambda: (entered.set(), gate.wait()))
        entered.wait()
        try:
            (stack,) = pool.stacks(timeout=QUICK)
            assert "held by a finalizer" in stack.state
        finally:
            gate.set()


def test_a_notebook_shows_stacks_as_text_that_is_no_markup():
    with poly.Pool(1, name="<b>") as pool:
        stacks = pool.stacks()
    assert stacks._repr_html_().startswith("<pre>&lt;b&gt;.0 (pid ")
    assert stacks[0]._repr_html_() == stacks._repr_html_()


def test_a_callback_may_ask_for_stacks():
    with poly.Pool(1) as pool:
        stacks = queue.Queue()
        pool.promise("1").add_done_callback(lambda _: stacks.put(pool.stacks()))
        assert [stack.drone for stack in stacks.get(timeout=30)] == [pool.drones[0].name]


# -- nothing is disturbed --------------------------------------------------------------------------


def test_no_task_is_lost_or_delayed_for_ever_while_many_ask():
    done = threading.Event()
    with poly.Pool(2) as pool, ThreadPoolExecutor(3) as threads:

        def ask():
            count = 0
            while not done.is_set():
                for stack in pool.stacks(timeout=30):
                    assert stack.state in ("busy", "idle", "between two tasks")
                    count += 1
            return count

        asking = [threads.submit(ask) for _ in range(3)]
        try:
            for _ in range(20):
                assert list(pool.map(abs, range(-500, 0))) == [*range(500, 0, -1)]
                values = [pool.promise(pow, n, 2) for n in range(300)]
                assert [each.value for each in values] == [n * n for n in range(300)]
        finally:
            done.set()
        assert all(each.result() for each in asking)
        assert not pool._dispatcher.stack_requests._pending


def test_an_ending_pool_tells_for_what_it_waits(started, tmp_path):
    gate = tmp_path / "gate"
    with poly.Pool(1) as pool:
        pool.promise(holds, started, str(gate))
        begun(started)
        pool.shutdown(wait=False)
        stack = wait_for(lambda: (each := pool.stacks()[0]).frames and each)
        assert stack.task == "holds"
        gate.touch()
    assert pool.stacks() == []


def holds(started, gate):
    append(started, "holds")
    while not os.path.exists(gate):
        time.sleep(0.002)


# -- pools of other processes ----------------------------------------------------------------------


def test_a_served_pool_tells_the_stacks_of_its_own_and_of_joined_drones(started, tmp_path):
    card = str(tmp_path / "card.json")
    with (
        polycephaly.Pool(1, name="lab") as pool,
        polycephaly.serve(pool, file=card) as server,
        polycephaly.Pool(1, name="far") as far,
        join(far, card),
        polycephaly.connect(card) as remote,
    ):
        wait_for(lambda: len(server.status()["drones"]) == 2)
        tasks = [remote.promise(sleeps, started) for _ in range(2)]
        begun(started, 2)

        def both():
            stacks = remote.stacks()
            waits = all("SLEEPS" in str(each) and each.system_call for each in stacks)
            return waits and stacks

        stacks = wait_for(both)
        assert [each.drone for each in stacks] == ["lab.0", "far.0"]
        for stack in stacks:
            assert (stack.state, stack.task) == ("busy", "sleeps")
            assert stack.system_call == "clock_nanosleep"
            assert [each.name for each in stack.frames] == ["sleeps"]
            assert last(stack)[3] == "time.sleep(1000)  # SLEEPS"
        drone = remote.drones[0]
        assert in_place(drone, "sleeps").pid == pool.drones[0].pid
        drone.kill()
        with pytest.raises(RuntimeError, match="the drone has ended"):
            drone.stack()
        for task in tasks:
            task.cancel()


# -- the text, and the data ------------------------------------------------------------------------

FRAME = FrameSummary("file.py", 3, "work", line="return 1 / 0")


def test_a_stack_prints_as_a_traceback_does():
    stack = Stack(
        "lab.0", 17, "busy", "work", 5, 2, 1.26,
        StackSummary.from_list([FRAME]), (("beside", StackSummary.from_list([FRAME])),),
    )  # fmt: skip
    assert str(stack).splitlines() == [
        "lab.0 (pid 17): work #5, item 2, for 1.3 s",
        '  File "file.py", line 3, in work',
        "    return 1 / 0",
        " beside it, beside:",
        '  File "file.py", line 3, in work',
        "    return 1 / 0",
    ]


@pytest.mark.parametrize(
    ("stack", "text"),
    [
        (Stack("lab.0", 17, "idle"), "lab.0 (pid 17): idle"),
        (Stack("lab.0", None, "starting"), "lab.0 (pid None): starting"),
        (Stack("lab", 17, "lost", "f", 3, None, 2.0), "lab (pid 17): f #3, for 2.0 s: lost"),
    ],
)
def test_a_stack_without_frames_is_a_line(stack, text):
    assert str(stack) == text


def test_a_stack_is_the_same_after_a_journey_as_data():
    frames = StackSummary.from_list([FRAME])
    stack = Stack("lab.0", 17, "busy", "work", 5, None, 1.0, frames, (("beside", frames),))
    again = Stack.from_dict(stack.as_dict())
    assert again.as_dict() == stack.as_dict() and str(again) == str(stack)


# -- decisions, without a process ------------------------------------------------------------------

REPORT = {"current": 0, "tasks": {}, "threads": [], "places": {}}


@pytest.fixture
def handle():
    return dispatcher_of(FakeReactor(), 1, ready=False).handles[0]


def asked(handle):
    request = StackRequest(handle.dispatcher, handle)
    handle.dispatcher.stack_requests.send(request)
    return request


def report(handle, number, **fields):
    handle.dispatcher.stack_requests.on_answer(number, {**REPORT, **fields})
    handle.dispatcher.reactor.turn()


def test_each_request_gets_its_own_answer(handle):
    handle.starts()
    first, second = asked(handle), asked(handle)
    one, other = handle.got(FRAMES)
    report(handle, other)
    assert second.done() and not first.done()
    report(handle, one + other)  # nobody's
    assert not first.done()
    report(handle, one)
    assert first.result().state == "idle"


def test_a_drone_that_cannot_be_asked_is_not(handle):
    handle.up = False
    request = asked(handle)
    handle.dispatcher.reactor.turn()
    assert request.result() is None and not request.was_sent and not handle.got(FRAMES)


def test_a_request_to_a_drone_that_dies_is_settled(handle):
    handle.starts()
    request = asked(handle)
    handle.dies()
    assert request.result() is None


def test_a_request_that_nobody_waits_for_is_forgotten(handle):
    handle.starts()
    request = asked(handle)
    assert len(handle.dispatcher.stack_requests._pending) == 1
    del request
    assert not handle.dispatcher.stack_requests._pending


def test_a_task_is_named_though_it_is_answered_before_anyone_looks(handle):
    handle.starts()
    handle.says_hello()
    task = give(handle.dispatcher, time.sleep, 1)
    request = asked(handle)
    (number,) = handle.got(FRAMES)
    entry = [__file__, 1, "sleep", "text"]
    report(handle, number, current=task.number, tasks={str(task.number): [entry]})
    handle.answers(task)
    answer = request.result()
    assert answer.tasks == {task.number: task} and answer.frames == {task.number: [entry]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"current": None},
        {"tasks": []},
        {"tasks": {"x": []}},
        {"tasks": {"7": [["file.py", "3", "f", ""]]}},
        {"tasks": {"7": [["file.py", 3, "f"]]}},
        {"tasks": {"7": 7}},
        {"threads": None},
        {"threads": [["name"]]},
        {"places": None},
        {"places": []},
        {"places": "file.py"},
    ],
)
def test_a_report_that_is_none_is_malformed(wrong, handle):
    handle.starts()
    request = asked(handle)
    with pytest.raises(Malformed, match="a report without the frames"):
        report(handle, handle.got(FRAMES)[0], **wrong)
    assert not request.done()


def runner(task):
    return task()


def reported():
    return drone_frames.frames_now(threading.get_ident(), runner.__code__, 7, {}, False)


def test_frames_outside_the_task_are_left_out():
    report = runner(lambda: reported())
    assert (report["current"], report["threads"]) == (7, [])
    assert [name.rpartition(".")[2] for _, _, name, _ in report["tasks"][7]] == [
        "frames_now", "reported", "<lambda>",
    ]  # fmt: skip
    assert report["places"][7][2] == "reported"


def test_no_source_file_is_read_in_the_drone():
    linecache.clearcache()
    assert {entry[3] for entry in runner(reported)["tasks"][7]} == {""}
    assert __file__ not in linecache.cache
    linecache.getline(__file__, 1)
    assert "frames_now(" in runner(reported)["tasks"][7][-1][3]


def test_a_drone_that_has_ended_is_not_waited_for():
    drone = poly.Drone()
    drone.release()
    with pytest.raises(RuntimeError, match="was released"):
        drone.stack(timeout=3600)
