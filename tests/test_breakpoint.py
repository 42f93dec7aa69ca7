"""`breakpoint()` in a drone opens pdb in the controller's terminal, or in one that is attached."""

import glob
import os
import pathlib
import pdb
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from threading import get_ident
from types import SimpleNamespace

import pytest
from faults import wait_for
from terminal import Terminal

import polycephaly as poly
from polycephaly.drone import debugger as debugging
from polycephaly.drone.pdb_import import replace_set_trace
from polycephaly.engines.local import engine
from polycephaly.pool.task_promise import facts_of
from polycephaly.wire.debugging import (
    MAX_KEPT_FRAMES,
    MAX_TEXT_BYTES,
    release_frames,
    waiting_debuggers,
)


def write(folder, text):
    script = folder / "script.py"
    script.write_text(text)
    return str(script)


TWO = """
import polycephaly as poly, time

def work(n):
    inner = n + 1
    breakpoint()
    inner += 1
    return inner

with poly.Pool(2, name="lab") as pool:
    print("answers", pool.options(timeout=20).doit(abs, -3), [*map(str, pool.map(work, [40, 50]))])
"""


def test_each_drone_in_its_turn_has_the_controllers_terminal(tmp_path):
    with Terminal(tmp_path, write(tmp_path, TWO)) as terminal:
        values = []
        for _ in range(2):
            terminal.read_until("(Pdb) ")
            terminal.type("p 'inner', inner\n")
            terminal.read_until("('inner', ")
            value = int(terminal.read_until(")"))
            values.append(value)
            terminal.read_until("(Pdb) ")
            terminal.type("w\n")
            assert "polycephaly/" not in terminal.read_until("(Pdb) ")
            terminal.type("inner = 7\n")
            terminal.read_until("(Pdb) ")
            terminal.type("n\n" if value == 41 else "c\n")
            if value == 41:  # step to the end of the task, which ends the session
                while "--Return--" not in terminal.read_until("(Pdb) "):
                    terminal.type("n\n")
                terminal.type("n\n")
        assert sorted(values) == [41, 51]
        terminal.read_until("answers 3 ['8', '8']")
        assert terminal.process.wait(30) == 0


def end_session_with_9(terminal):
    terminal.read_until("(Pdb) ")
    terminal.type("x = 8\n")
    terminal.read_until("(Pdb) ")
    terminal.type("c\n")
    terminal.read_until("9")
    terminal.read_until(">>> ")


def test_at_a_prompt_that_waits_for_the_task(tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.type("import polycephaly as poly\n")
        terminal.type("with poly.Pool(1) as pool: pool.doit('x = 5; breakpoint(); x + 1')\n\n")
        end_session_with_9(terminal)


def test_at_a_prompt_that_waits_for_a_task_which_has_stopped_before(tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.type("import polycephaly as poly; pool = poly.Pool(1)\n")
        terminal.type("p = pool.promise('x = 5; breakpoint(); x + 1')\n")
        terminal.read_until("To debug it: polycephaly attach")
        terminal.type("1000 + 1\n")
        terminal.read_until("1001")
        terminal.type("p.value\n")
        end_session_with_9(terminal)
        terminal.type("pool.shutdown()\n")


ATTACH = ("-m", "polycephaly", "attach")


@pytest.mark.parametrize(
    "stop", ["import pdb; pdb.set_trace()", "from pdb import set_trace; set_trace()"]
)
def test_a_task_stops_in_pdb_as_at_a_breakpoint(stop):
    lines = []
    with poly.Pool(1, output=lines.append) as pool:
        promise = pool.promise(stop)
        wait_for(lambda: lines)
        assert "To debug it: polycephaly attach" in lines[0].text
        promise.cancel()


def test_without_a_terminal_one_is_attached():
    lines = []
    folder = tempfile.gettempdir()
    with poly.Pool(1, name="lab", output=lines.append) as pool:
        promise = pool.promise("x = 5; breakpoint(); x + 1")
        wait_for(lambda: lines)
        pid = pool.drones[0].pid
        assert lines[0].text.endswith(f"To debug it: polycephaly attach {pid}")
        run = subprocess.run(
            [sys.executable, *ATTACH, "lab"], stdin=subprocess.DEVNULL, capture_output=True
        )
        assert run.returncode == 1 and b"no terminal" in run.stderr
        with Terminal(folder, *ATTACH, "other") as other:
            other.read_until("0 drones match. Those that wait for a debugger:")
            other.read_until(f"lab.0 (pid {pid}): <")
            other.read_until("Give the name or the PID of one.")
        with Terminal(folder, *ATTACH, "lab") as terminal:
            terminal.read_until("(Pdb) ")
            terminal.type("x = 8\n")
            terminal.read_until("(Pdb) ")
            terminal.type("c\n")
            assert terminal.process.wait(30) == 0
        assert promise.value == 9


SAME_NAME = """
import polycephaly as poly

with poly.Pool(1, name="lab", output="discard") as pool:
    print(pool.drones[0].pid, flush=True)
    pool.doit("breakpoint()")
"""


def test_of_two_drones_with_one_name_the_pid_tells(tmp_path):
    script, folder = write(tmp_path, SAME_NAME), tempfile.gettempdir()
    with ExitStack() as ending:
        scripts = []
        for _ in range(2):
            scripts.append(
                subprocess.Popen(
                    [sys.executable, script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
                )
            )
            ending.enter_context(scripts[-1])
            ending.callback(scripts[-1].kill)
        pids = sorted(each.stdout.readline().decode().strip() for each in scripts)
        wait_for(lambda: len(close_all(waiting_debuggers())) == 2)
        with Terminal(folder, *ATTACH, "lab.0") as both:
            both.read_until("2 drones match")
            for pid in pids:
                both.read_until(f"lab.0 (pid {pid}): <")
        for names in ((pids[0],), ("lab", pids[1])):
            with Terminal(folder, *ATTACH, *names) as terminal:
                terminal.read_until("(Pdb) ")
                terminal.type("c\n")
                assert terminal.process.wait(30) == 0
        assert [each.wait(30) for each in scripts] == [0, 0]


def close_all(debuggers):
    found = list(debuggers)
    for each in found:
        each.connection.close()
    return found


def test_a_set_trace_of_a_loaded_pdb_is_replaced(monkeypatch):
    monkeypatch.setattr(pdb, "set_trace", pdb.set_trace)
    replace_set_trace(print)
    assert pdb.set_trace is print


class Lender:
    """Lends terminals, one after the other, to the debugger of this process."""

    def __init__(self, monkeypatch, terminals):
        self.page = SimpleNamespace(debugged=0)
        self._terminals = [*terminals]
        self.peers = []
        monkeypatch.setattr(debugging, "write_record", lambda *record: None)
        monkeypatch.setattr(debugging, "_listen", self._listen)

    def _listen(self, address):
        pathlib.Path(address).touch()
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def accept(self):
        its, peer = socket.socketpair()
        peer.send(self._terminals.pop(0).encode())
        self.peers.append(peer)
        return its, None

    def leave(self):
        for each in self.peers:
            each.close()


def sum_in_debugger(debugger, *, line=""):
    debugger.cmdqueue += [line] if line else []
    debugger.set_trace(sys._getframe())
    total = 0
    for number in range(3):
        total += number
    return total


@pytest.mark.parametrize("line", ["", "b sum_in_debugger"])
@pytest.mark.parametrize("gone", ["terminal", "lender"])
def test_a_task_goes_on_when_its_terminal_is_gone(gone, line, monkeypatch, tmp_path):
    (keys, its), trace = os.openpty(), sys.gettrace()
    lender = Lender(monkeypatch, [str(tmp_path / "none"), os.ttyname(its)])
    debugger = debugging.open_debugger(sys._getframe(), str(tmp_path), lender.page, None)
    assert lender.page.debugged and debugger.takes(get_ident())
    if gone == "terminal":
        os.close(keys)
    else:
        lender.leave()
    try:
        assert sum_in_debugger(debugger, line=line) == 3
        assert sys.gettrace() is None
    finally:
        sys.settrace(trace)
    assert not (lender.page.debugged or debugger.takes(get_ident()) or debugger.breaks)
    lender.leave()
    os.close(its)
    if gone == "lender":
        os.close(keys)


def test_a_session_leaves_the_handler_by_which_tasks_are_cancelled(monkeypatch, tmp_path):
    (keys, its), trace, before = os.openpty(), sys.gettrace(), signal.getsignal(signal.SIGINT)
    lender = Lender(monkeypatch, [os.ttyname(its)])
    debugger = debugging.open_debugger(sys._getframe(), str(tmp_path), lender.page, None)
    try:
        assert sum_in_debugger(debugger, line="continue") == 3
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)
        sys.settrace(trace)
    lender.leave()
    for fd in (keys, its):
        os.close(fd)


def test_the_next_breakpoint_waits_for_a_new_terminal():
    with poly.Pool(1, name="lab", output="discard") as pool:
        limited = pool.options(timeout=0.1)
        for answer in (1, 2):
            promise = pool.promise(f"breakpoint(); {answer}")
            wait_for(lambda: close_all(waiting_debuggers()))
            with Terminal(tempfile.gettempdir(), *ATTACH) as terminal:
                terminal.read_until("(Pdb) ")
                terminal.process.send_signal(signal.SIGKILL)
                assert promise.result(30) == answer
        assert isinstance(limited.promise(time.sleep, 60).exception(), TimeoutError)


def test_a_breakpoint_where_nobody_can_be_asked_ends_with_an_error_that_says_how(monkeypatch):
    monkeypatch.setattr(engine, "can_be_asked", lambda: False)
    with poly.Pool(1, name="lab", output="discard", report_waiting=0.1) as pool:
        pid = pool.drones[0].pid
        error = pool.promise("breakpoint(); 1").exception()
        assert isinstance(error, RuntimeError) and "0.1 s (report_waiting)" in str(error)
        assert f"`polycephaly attach {pid}`" in str(error) and "PYTHONBREAKPOINT=0" in str(error)
        assert pool.doit(os.getpid) == pid and list(waiting_debuggers()) == []


@pytest.mark.parametrize("asked", [False, True])
def test_a_limit_stands_still_at_a_breakpoint_only_if_somebody_can_be_asked(
    asked, monkeypatch, later
):
    monkeypatch.setattr(engine, "can_be_asked", lambda: asked)
    with poly.Pool(1, name="lab", output="discard", report_waiting=None) as pool:
        promise = pool.options(timeout=1000).promise("breakpoint(); 1")
        wait_for(lambda: close_all(waiting_debuggers()))
        later(pool, 1001)
        if not asked:
            assert isinstance(promise.exception(), TimeoutError)
        else:
            with Terminal(tempfile.gettempdir(), *ATTACH) as terminal:
                terminal.read_until("(Pdb) ")
                terminal.type("c\n")
                assert promise.result() == 1


def test_a_limit_stands_still_where_somebody_has_attached(monkeypatch, later):
    monkeypatch.setattr(engine, "can_be_asked", lambda: False)
    with poly.Pool(1, name="lab", output="discard") as pool:
        promise = pool.options(timeout=1000).promise("breakpoint(); 1")
        wait_for(lambda: close_all(waiting_debuggers()))
        with Terminal(tempfile.gettempdir(), *ATTACH) as terminal:
            terminal.read_until("(Pdb) ")
            later(pool, 1001)
            terminal.type("c\n")
            assert promise.result() == 1


@pytest.mark.parametrize("attached", [False, True])
def test_a_task_that_is_cancelled_leaves_the_debugger(attached):
    with poly.Pool(1, name="lab", output="discard") as pool:
        pid = pool.drones[0].pid
        promise = pool.promise("breakpoint()")
        connections = []
        wait_for(
            lambda: (
                connections.extend(each.connection for each in waiting_debuggers()) or connections
            )
        )
        keys, its = os.openpty()
        if attached:
            connections[0].sendall(os.ttyname(its).encode())
            said = b""
            while b"(Pdb) " not in said:
                said += os.read(keys, 1024)
        promise.cancel()
        assert pool.doit(os.getpid) == pid
        for fd in (keys, its):
            os.close(fd)
        for each in connections:
            each.close()
        assert list(waiting_debuggers()) == []


def test_what_pythonbreakpoint_says_is_kept(monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    with poly.Pool(1) as pool:
        assert pool.doit("breakpoint(); 3") == 3


REPEATED = """
import polycephaly as poly
from polycephaly import green

def work():
    for i in range(3):
        breakpoint()
        x = i * 10
    return x

async def wait():
    breakpoint()
    await green.sleep(0.01)
    return 42

with poly.Pool(1) as pool:
    print("waited", pool.doit(wait))
    print("worked", pool.doit(work), pool.doit(work))
"""


def test_a_session_goes_on_at_further_breakpoints_of_its_task(tmp_path):
    with Terminal(tmp_path, write(tmp_path, REPEATED)) as terminal:
        # It ends at the `await`. From CPython 3.13 on, it begins at the `breakpoint()` before that.
        # A line too many would be for the next session, or be lost.
        for _ in range(1 + (sys.version_info >= (3, 13))):
            terminal.read_until("(Pdb) ")
            terminal.type("n\n")
        terminal.read_until("waited 42")
        terminal.read_until("(Pdb) ")
        terminal.type("b 8\n")  # the session stays open for it
        for _ in range(2):
            terminal.read_until("(Pdb) ")
            terminal.type("c\n")
        terminal.read_until("(Pdb) ")
        terminal.type("p 'i', i\n")
        terminal.read_until("('i', ")
        assert terminal.read_until(")") in ("1", "2")
        terminal.read_until("(Pdb) ")
        terminal.type("import sys; sys.breakpointhook = print\n")
        terminal.read_until("(Pdb) ")
        terminal.type("cl 1\n")
        terminal.read_until("(Pdb) ")
        terminal.type("c\n")
        terminal.read_until("worked 20 20")


FAILED = """
import polycephaly as poly

def divide(a, b):
    rest = a - b
    return a / b

with poly.Pool(1, name="lab", post_mortem=True) as pool:
    first, second = pool.promise(divide, 7, 0), pool.promise(divide, 8, 0)
    print(type(first.exception()), type(second.exception()), pool.doit(divide, 6, 3))
    second.debug()
    first.debug()
    try:
        second.debug()
    except RuntimeError as error:
        print(error)
    third = pool.promise(divide, 9, 0)
    print(type(third.exception()))
    third.debug()
    print("end" + "ed")
"""


def test_frames_of_each_failed_task_are_kept_for_a_debugger(tmp_path):
    with Terminal(tmp_path, write(tmp_path, FAILED)) as terminal:
        for number in (8, 7, 9):
            terminal.read_until("(Pdb) ")
            terminal.type("p rest, b\n")
            terminal.read_until(f"({number}, 0)")
            terminal.read_until("(Pdb) ")
            terminal.type("w\n")
            assert "polycephaly/" not in terminal.read_until("(Pdb) ")
            terminal.type("q\n" if number == 8 else "c\n")
            if number == 7:
                terminal.read_until("they were debugged or released")
        terminal.read_until("ended")
        assert terminal.process.wait(30) == 0


KILLED = """
import polycephaly as poly

with poly.Pool(1, post_mortem=True) as pool:
    failed = pool.promise("1 / 0")
    failed.exception()
    pool.drones[0].kill()
    pool.doit("pass")  # in the next drone: the first is gone
    try:
        failed.debug()
    except RuntimeError as error:
        print(error)
"""


def test_of_frames_that_have_ended_with_their_drone_the_error_tells(tmp_path):
    with Terminal(tmp_path, write(tmp_path, KILLED)) as terminal:
        terminal.read_until("their drone has ended")
        assert terminal.process.wait(30) == 0


def inverse(n):
    if n % 10 == 0:
        raise ValueError(n)
    return 1 / n


def test_frames_are_gone_when_their_release_is_over(tmp_path):
    address = str(tmp_path / "frames.d")
    with debugging._listen(address) as listener, ExitStack() as session:
        released = threading.Thread(target=release_frames, args=[address])
        released.start()
        with pytest.raises(EOFError):
            debugging._accept(listener, "an error", session)
        os.unlink(address)  # as its keeper does
        released.join(0.2)
        assert released.is_alive()
        session.close()
        released.join(30)
        assert not released.is_alive()


def test_frames_of_a_map_are_kept_up_to_a_limit():
    with poly.Pool(1, name="lab", output="discard", post_mortem=True) as pool:
        outcomes = list(pool.map(inverse, range(1, 200), return_exceptions=True))
        assert sum(isinstance(each, ValueError) for each in outcomes) == 19
        kept = close_all(waiting_debuggers())
        assert {each.where for each in kept} == {
            f"ValueError({n})" for n in range(10, 10 * MAX_KEPT_FRAMES + 1, 10)
        }
        assert {each.drone for each in kept} == {"lab.0"}
        assert len({each.pid for each in kept} | {pool.drones[0].pid}) == MAX_KEPT_FRAMES + 1
        another = pool.promise(inverse, 0)
        with pytest.raises(RuntimeError, match=f"those of {MAX_KEPT_FRAMES} other tasks already"):
            another.debug()
        with Terminal(tempfile.gettempdir(), *ATTACH, str(kept[0].pid)) as terminal:
            terminal.read_until("(Pdb) ")
            terminal.type("q\n")
            assert terminal.process.wait(30) == 0
        again = pool.promise(inverse, 0)
        assert isinstance(again.exception(), ValueError)
        assert len(close_all(waiting_debuggers())) == MAX_KEPT_FRAMES
        again.release()
        with pytest.raises(RuntimeError, match="they were debugged or released"):
            again.debug()
        done = pool.promise(inverse, 1)
        with pytest.raises(RuntimeError, match="the task has not failed"):
            done.debug()
        left = pool.promise(inverse, 0)
        assert isinstance(left.exception(), ValueError)
    assert close_all(waiting_debuggers()) == []
    with pytest.raises(RuntimeError, match="the pool has ended, and frames with it"):
        left.debug()


def test_frames_of_a_drone_with_a_very_long_name_are_found():
    with poly.Pool(1, name=MAX_TEXT_BYTES * "x", output="discard", post_mortem=True) as pool:
        failed = pool.promise(inverse, 0)
        assert isinstance(failed.exception(), ValueError)
        (kept,) = close_all(waiting_debuggers())
        assert kept.drone.startswith("xxx") and kept.where == ""
        failed.release()
        assert close_all(waiting_debuggers()) == []


def test_of_a_task_that_was_interrupted_the_error_tells_that():
    with poly.Pool(1, post_mortem=True) as pool:
        late = pool.options(timeout=0.01).promise(time.sleep, 60)
        cancelled = pool.promise(time.sleep, 60)
        cancelled.cancel()
        for task, reason in (late, "ran into its time limit"), (cancelled, "was cancelled"):
            with pytest.raises(RuntimeError, match=f"no frames are kept .*: the task {reason}"):
                task.debug()
            task.release()  # nothing


def test_without_post_mortem_no_frames_are_kept():
    with poly.Pool(1) as pool:
        failed = pool.promise("1 / 0")
        with pytest.raises(RuntimeError, match="was made without post_mortem=True"):
            failed.debug()
        with pytest.raises(RuntimeError, match="only those of a task of a pool with post_mortem"):
            failed.then(print).debug()


def test_kept_frames_may_be_attached_released_or_left():
    with poly.Pool(2, name="lab", output="discard", post_mortem=True) as pool:
        failed = pool.promise("x = 5; 1 / 0")
        assert isinstance(failed.exception(), ZeroDivisionError)
        with Terminal(tempfile.gettempdir(), *ATTACH) as terminal:
            terminal.read_until("(Pdb) ")
            terminal.type("p x\n")
            terminal.read_until("5")
            terminal.type("q\n")
            assert terminal.process.wait(30) == 0
        assert list(waiting_debuggers()) == []
        with pytest.raises(ZeroDivisionError):
            list(pool.map(lambda n: 1 / n, [*range(1, 2000), 0]))
        (kept,) = waiting_debuggers()
        kept.connection.close()
        drone = pool.drones[0]
        pid = drone.pid
        again = [drone.promise("1 / 0") for _ in range(3)]
        for each in again:
            each.exception()
            each.release()
            each.release()
        assert drone.doit(os.getpid) == pid
        with pytest.raises(RuntimeError, match="no frames are kept"):
            again[0].debug()
        assert isinstance(drone.promise("1 / 0").exception(), ZeroDivisionError)  # left


@pytest.mark.parametrize("other", ["inline", "ray"])
def test_frames_are_kept_by_local_drones_only(other):
    with pytest.raises(ValueError, match=f"the engine is 'local', not '{other}'"):
        poly.Pool(1, post_mortem=True, engine=other)


def test_an_error_arrives_even_if_its_frames_cannot_be_kept():
    with poly.Pool(1, output="discard", post_mortem=True) as pool:
        first = pool.promise("1 // 0")
        assert isinstance(first.exception(), ZeroDivisionError)
        first.release()
        pool.doit("import os; os.waitpid(-1, 0)")  # of the process that has kept the frames
        second = pool.promise("1 // 0")
        assert isinstance(second.exception(), ZeroDivisionError)
        assert facts_of(second).frames_address() is not None
        second.release()


def test_frames_are_those_of_the_last_attempt():
    with poly.Pool(2, output="discard", post_mortem=True) as pool:
        retry = poly.Retry(2, on=ZeroDivisionError, delay=0.01)
        failed = pool.options(retries=retry).promise("1 // 0")
        assert isinstance(failed.exception(), ZeroDivisionError)
        assert facts_of(failed).frames_address() is not None
        assert len(glob.glob(f"{os.path.dirname(facts_of(failed).frames_address())}/task-*.d")) == 1
        failed.release()
