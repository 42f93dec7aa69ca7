"""A thread of its own writes the output of drones: what waits for it, and what does not."""

import math
import os
import subprocess
import sys
import threading
import time

import pytest
from faults import wait_for
from scripts import output_of

import polycephaly as poly
from polycephaly.promises import lazy_thread, output_thread
from polycephaly.promises.output_thread import Output, OutputGate

pytestmark = pytest.mark.guarantee("output-5")

QUICK = 0.3  # seconds


class Writer:
    """An `output` that waits at the first line until it is told to go on."""

    def __init__(self):
        self.lines, self.entered, self.gate = [], threading.Event(), threading.Event()

    def __call__(self, line):
        self.entered.set()
        self.gate.wait(60)
        self.lines.append(line.text)


@pytest.fixture
def writer():
    writer = Writer()
    yield writer
    writer.gate.set()


def test_a_promise_waits_for_the_lines_of_its_task_while_they_are_written(writer, monkeypatch):
    monkeypatch.setattr(output_thread, "BLOCKED_SECONDS", 1000.0)
    with poly.Pool(1, output=writer) as pool:
        promise = pool.promise(print, "first")
        writer.entered.wait(30)
        with pytest.raises(TimeoutError):
            promise.result(QUICK)
        writer.gate.set()
        assert promise.result(30) is None and writer.lines == ["first"]
        for i in range(100):
            pool.doit(print, i)
            assert writer.lines[-1] == str(i)


def test_a_write_that_is_blocked_delays_output_only(writer, monkeypatch):
    monkeypatch.setattr(output_thread, "BLOCKED_SECONDS", 0.01)
    with poly.Pool(2, output=writer) as pool, poly.Pool(1) as other:
        assert pool.promise(print, "held").result(30) is None
        assert list(pool.map(abs, range(-100, 0))) == list(range(100, 0, -1))
        assert other.doit(abs, -3) == 3
        assert not writer.lines
        pool.doit(print, "also held")
        writer.gate.set()
        wait_for(lambda: writer.lines == ["held", "also held"])
        monkeypatch.setattr(output_thread, "BLOCKED_SECONDS", 1000.0)
        pool.doit(print, "in order again")
        assert writer.lines[-1] == "in order again"


def test_output_may_wait_for_a_task_of_its_own_pool(monkeypatch):
    """What comes before that task's promise, such as that of the task that printed, settles too."""
    monkeypatch.setattr(output_thread, "BLOCKED_SECONDS", 1000.0)
    got = []
    with poly.Pool(1, output=lambda line: got.append(pool.doit(len, line.text))) as pool:
        for text in "one", "three":
            pool.doit(print, text)
        wait_for(lambda: got == [3, 5])


def test_the_end_of_a_pool_comes_after_its_output(writer):
    pool = poly.Pool(1, output=writer)
    pool.promise(print, "last words")
    writer.entered.wait(30)
    threading.Timer(QUICK, writer.gate.set).start()
    pool.shutdown()
    assert writer.lines == ["last words"]


def test_drones_that_print_without_end_wait_when_much_is_unwritten(writer, monkeypatch):
    monkeypatch.setattr(output_thread, "BLOCKED_SECONDS", 0.01)
    monkeypatch.setattr(output_thread, "MAX_UNWRITTEN_BYTES", 100_000)

    def shout(count):
        for i in range(count):
            print(f"{i:099d}")
        return count

    with poly.Pool(1, output=writer) as pool:
        promise = pool.promise(shout, 20_000)
        writer.entered.wait(30)
        loop, delivered = pool._dispatcher.reactor, threading.Event()
        gate = loop._gate
        wait_for(lambda: loop._is_output_paused)
        loop.post(lambda: loop.deliver(delivered.set))  # after what was read before the pause
        assert delivered.wait(30)
        before = gate._given_bytes
        time.sleep(QUICK)
        assert gate._given_bytes == before < 2_000_000 and not promise.done()
        writer.gate.set()
        assert promise.result(60) == 20_000
        wait_for(lambda: len(writer.lines) == 20_000)
    assert [int(each) for each in writer.lines] == list(range(20_000))


def test_without_another_thread_the_loop_writes_itself(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    lines, writers = [], set()

    def output(line):
        lines.append(line.text)
        writers.add(threading.current_thread().name)

    wait_for(lambda: output_thread.output_thread._thread is None)
    with poly.Pool(1, output=output) as pool:
        monkeypatch.setattr(lazy_thread.OwnThread, "start", fail)
        for i in range(10):
            pool.doit(print, i)
        monkeypatch.undo()
    assert lines == [str(i) for i in range(10)] and writers == {"polycephaly-reactor"}


SLEEPING_READER = """
import sys
import polycephaly as poly

def talk(i):
    for j in range(300):
        print(i, j, "x" * 100)

with poly.Pool(2) as pool:
    pool.promise(talk, 0).result(60)
    assert list(pool.map(abs, range(-1000, 0))) == list(range(1000, 0, -1))
    list(pool.map(talk, range(1, 11)))
    print("all results are here", file=sys.stderr, flush=True)
"""


def test_a_reader_that_sleeps_gets_every_line_and_delays_no_result():
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPING_READER], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stderr.readline() == b"all results are here\n"
        lines = process.stdout.read().decode().splitlines()
        assert process.stderr.read() == b"" and process.wait(60) == 0
    got = sorted(tuple(map(int, line.split()[1:3])) for line in lines)
    assert got == [(i, j) for i in range(11) for j in range(300)]


def test_a_reader_that_goes_away_harms_nothing():
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPING_READER], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    with process:
        os.read(reader, 100)
        os.close(reader)
        assert process.stderr.readline() == b"all results are here\n"


def test_a_process_that_output_forks_writes_no_line_twice():
    done = output_of(
        """
        import os
        import polycephaly as poly

        def forking(line):
            if os.fork():
                os.wait()
                print(line.text, flush=True)

        if __name__ == "__main__":
            with poly.Pool(1, output=forking) as pool:
                pool.doit('for i in range(5): print(i)')
        """,
        python_args=("-W", "ignore:This process:DeprecationWarning"),  # is multi-threaded
    )
    assert done.split() == [*"01234"]


def test_a_gate_holds_while_something_is_written_unless_that_is_blocked(monkeypatch):
    woken, queue = [], []
    thread = output_thread.OutputThread()
    monkeypatch.setattr(output_thread, "output_thread", thread)
    monkeypatch.setattr(thread, "add", queue.append)
    gate = OutputGate(lambda: woken.append(1))
    assert gate.is_idle and not gate.holds(0.0)
    thread.began_at = 100.0
    gate.give(Output(lambda: None, 10))
    gate.give(Output(lambda: None, output_thread.MAX_UNWRITTEN_BYTES))
    assert gate.is_full() and gate.holds(100.0) and gate.holds(100.9)
    gate.is_waited_for = True
    queue.pop(0)()
    assert woken == [1] and not gate.is_full() and gate.holds(100.9)
    assert not gate.holds(101.0)
    thread.began_at = 101.0
    assert not gate.holds(101.0)  # until all is written
    queue.pop(0)()
    assert woken == [1, 1] and gate.is_idle and not gate.holds(101.0)
    gate.give(Output(lambda: None, 10))
    assert gate.holds(101.0)


def test_a_gate_holds_again_once_all_is_written_though_nobody_looked_meanwhile(monkeypatch):
    queue = []
    thread = output_thread.OutputThread()
    monkeypatch.setattr(output_thread, "output_thread", thread)
    monkeypatch.setattr(thread, "add", queue.append)
    gate = OutputGate(lambda: None)
    thread.began_at = 100.0
    gate.give(Output(lambda: None, 10))
    assert not gate.holds(200.0)
    queue.pop(0)()
    thread.began_at = 200.0
    gate.give(Output(lambda: None, 10))
    assert gate.holds(200.0)


def test_a_write_that_ended_long_ago_counts_as_no_blocked_one(writer, monkeypatch):
    writer.gate.set()
    with poly.Pool(1, output=writer) as pool:
        pool.doit(print, 0)
        thread = output_thread.output_thread
        wait_for(lambda: thread.began_at == math.inf)
        monkeypatch.setattr(thread, "add", lambda write: None)  # it takes up nothing more
        gate = OutputGate(lambda: None)
        gate.give(Output(lambda: None, 10))
        assert gate.holds(time.monotonic() + 1000)
        monkeypatch.undo()
