"""Callers and turns that meet, each held at the very place where the other comes between."""

import os
import signal
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
from faults import PackedSlowly, append, wait_for

import polycephaly as poly
from polycephaly.drone.chunk_run import MAX_MARKED_CALLS, ChunkRun
from polycephaly.drone.console import OutputTail
from polycephaly.drone.executor import DroneExecutor
from polycephaly.drone.overlap import Overlap
from polycephaly.drone.result_buffer import ResultBuffer
from polycephaly.drone.sigterm import Sigterm
from polycephaly.drone.store import DroneStore
from polycephaly.engines.local.drone import ControlThread
from polycephaly.pool import task as work
from polycephaly.pool.handlers import _handle_special_outcome
from polycephaly.pool.interfaces import TaskRunner
from polycephaly.runtime import fork_guard
from polycephaly.runtime.tuning import tuning
from polycephaly.wire.map_chunks import (
    ENDED,
    FAILED,
    ITEMS,
    ROWS,
    RUNNING,
    Answers,
    pack_answers,
    pack_calls,
    split_head,
    unpack_split,
)
from polycephaly.wire.messages import CANCEL, EVENT_LOG, SPLIT, VALUE, pack_numbers, unpack_outcomes


class Held:
    """An argument that is being pickled until it is let go."""

    def __init__(self):
        self.begun, self.let_go = threading.Event(), threading.Event()

    def __reduce__(self):
        self.begun.set()
        self.let_go.wait(30)
        return int, (3,)


def test_the_end_after_the_last_result_waits_for_no_timer(monkeypatch):
    monkeypatch.setattr("polycephaly.promises.event_loop.MAX_SLEEP_SECONDS", 1000.0)
    monkeypatch.setattr(tuning, "health_check_seconds", 1000.0)
    with poly.Pool(1) as pool:
        pool.submit(time.sleep, 0.2)
    drone = poly.Drone()
    drone.promise(time.sleep, 0.2)
    drone.release()


class SlowError(Exception):
    """Opening it takes until `go_on` is set, in the process that has set `opens`."""

    opens, go_on = threading.Event(), threading.Event()

    def __reduce__(self):
        return open_slowly, (os.getpid(), self.args[0])


def open_slowly(drone, text):
    if os.getpid() != drone:
        SlowError.opens.set()
        SlowError.go_on.wait(30)
    return SlowError(text)


def raise_slow_error():
    raise SlowError("mine")


def test_an_answer_that_is_being_opened_comes_though_the_pool_is_killed():
    pool = poly.Pool(1)
    failed = pool.submit(raise_slow_error)
    assert SlowError.opens.wait(30)
    pool._dispatcher.kill()
    wait_for(lambda: pool._dispatcher.has_ended)
    SlowError.go_on.set()
    assert isinstance(failed.exception(30), SlowError)
    pool.shutdown()


@pytest.mark.parametrize("inputs", [0, 1])
@pytest.mark.parametrize("how", ["kill", "break"])
def test_a_pool_ends_though_work_comes_when_all_others_was_called_off(how, inputs):
    pool, held, given = poly.Pool(1), Held(), []
    dispatcher = pool._dispatcher
    by_hand = [poly.Promise() for _ in range(inputs)]
    late = threading.Thread(target=lambda: given.append(pool.promise(pow, held, 2, *by_hand)))
    late.start()
    held.begun.wait(30)
    called_off = threading.Event()
    if how == "kill":
        dispatcher.kill()
    else:
        dispatcher.reactor.post(lambda: dispatcher.break_pool(RuntimeError("broken")))

    def let_go():  # in the same turn: its drone is not known to be dead
        called_off.set()
        held.let_go.set()
        late.join(30)

    dispatcher.reactor.post(let_go)
    called_off.wait(30)
    dispatcher.ended.result(30)
    late.join()
    assert isinstance(given[0].exception(30), RuntimeError)


def test_who_submits_while_it_is_looked_whether_all_are_stuck_breaks_nothing(monkeypatch):
    monkeypatch.setattr(tuning, "stall_report_seconds", 0.01)
    looked = threading.Event()

    class Elsewhere(poly.Promise):
        """Of something that is not settled by hand."""

        def _dependencies(self):
            if not looked.is_set():
                works.append(pool.promise(abs, self))
                looked.set()
            return ()

    with poly.Pool(1) as pool:
        pool.doit(abs, -1)
        elsewhere = Elsewhere()
        works = [pool.promise(abs, elsewhere) for _ in range(3)]
        waiter = threading.Thread(target=works[0].exception)
        waiter.start()
        assert looked.wait(30)
        pool.doit(abs, -1)
        elsewhere.set_result(-7)
        assert [work.result(30) for work in works] == [7, 7, 7, 7]
        waiter.join()


def test_work_that_waits_for_promises_and_then_for_what_it_takes_is_called_off_with_all(tmp_path):
    gate = str(tmp_path / "gate")
    with poly.Pool(2) as pool:
        kept = pool.promise(lambda: PackedSlowly(gate), keep=True).value
        (holder,) = [each for each in pool.drones if each.name == kept.drone]
        holder.release(wait=False)
        retires = threading.Event()
        pool._dispatcher.reactor.post(retires.set)
        assert retires.wait(
            30
        )  # or what comes now could be sent there, where it waits for the packing
        pool.doit(abs, -1)
        wait_for(lambda: pool._dispatcher.wants_tasks)
        by_hand = poly.Promise()
        work = pool.promise(lambda *both: both, kept, by_hand)
        by_hand.set_result([1])
        wait_for(lambda: work not in pool._dispatcher.assignment.queue)
        pool.shutdown(wait=False, cancel_futures=True)
        try:
            wait_for(work.cancelled)
        finally:
            append(gate, "open")


class _BeginsAsTheControlThreadParks:
    """A drone of which the main thread takes up a task just after its control thread has looked,
    and found none."""

    def __init__(self):
        self.busy, self.looks = False, 0
        self.socket_lock = threading.Lock()
        self.epoll = os.eventfd(0)
        self.there, self.heard = threading.Event(), threading.Event()
        self.control_thread = ControlThread(self)
        self.there.set()

    @property
    def current(self):
        self.there.wait(30)
        if self.heard.is_set():
            raise SystemExit  # of the control thread
        self.looks += 1
        if self.looks == 1:
            self.busy = True
            self.control_thread.wake()
        return 7 if self.looks > 2 else 0  # it is set a little later

    def beat(self):
        pass

    def receive_if_free(self):
        self.heard.set()
        os.eventfd_write(self.epoll, 1)

    def send_requested_values(self):
        pass


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # by which its thread ends
def test_a_task_that_begins_as_the_control_thread_parks_is_listened_for():
    drone = _BeginsAsTheControlThreadParks()
    control_thread = next(
        each for each in fork_guard._thread_locks if each.name == "polycephaly-control"
    )
    try:
        assert drone.heard.wait(30)
        control_thread.join(30)
        assert not control_thread.is_alive()
    finally:
        fork_guard.remove_thread_lock(control_thread)
        os.close(drone.epoll)


def told_to_cancel(number, begin):
    """A runner that hears CANCEL; its main thread begins that task just before it is noted, by
    `begin`."""

    class Missed(set):
        def __ior__(self, others):
            assert number not in self  # nothing is known to who begins it
            begin(runner)
            return super().__ior__(others)

    runner = SimpleNamespace(
        _todo=deque(), _calls=None, _overlap=Overlap(bool), _current=0, _interrupt_target=0,
        _pending_interrupts=Missed(), _main_thread=threading.get_ident(),
    )  # fmt: skip
    runner._claim_interrupt = lambda number: DroneExecutor._claim_interrupt(runner, number)
    DroneExecutor._on_cancel(runner, pack_numbers(CANCEL, (number,)))
    return runner


def test_a_task_that_begins_as_it_is_cancelled_is_interrupted(monkeypatch):
    told = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: told.append(number))
    runner = told_to_cancel(7, lambda runner: setattr(runner, "_current", 7))
    assert (told, runner._interrupt_target) == ([signal.SIGINT], 7)
    assert runner._pending_interrupts == set()


def test_a_coroutine_that_begins_as_it_is_cancelled_is_interrupted_once():
    told = []
    thread = SimpleNamespace(interrupt=told.append)
    runner = told_to_cancel(7, lambda runner: runner._overlap.running.update({7: thread}))
    assert len(told) == 1 and not DroneExecutor._claim_interrupt(runner, 7)


class _InterruptedBetween(deque):
    """Calls; an interrupt comes as the one is about to be taken after which so many are left."""

    left = 0

    def popleft(self):
        if len(self) == self.left:
            self.left = -1
            raise KeyboardInterrupt
        return super().popleft()


def end_of(run):
    """What the controller is told: how many calls are done, and were not begun, the state, and
    whether there is an error."""
    outcomes = SimpleNamespace(pack_error=lambda error: b"error")
    runner = SimpleNamespace(
        socket_lock=threading.Lock(), _chunk=run, _store=None, _outcomes=outcomes,
        keep_frames=lambda number, error: None,
    )  # fmt: skip
    _, head, answers = DroneExecutor._end_chunk(runner, run)
    done, rest, state, _ = unpack_split(head + b".")
    unpacked = Answers(answers)
    assert unpacked.values == run.done
    return done, rest, state, unpacked.error == b"error"


@pytest.mark.parametrize("form, rows", [(ITEMS, [1, 2, 3, 4]), (ROWS, [(1,), (2,), (3,), (4,)])])
@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("at", range(5))
def test_an_interrupt_between_two_calls_is_that_of_the_next_if_there_is_one(form, rows, cut, at):
    run = ChunkRun(7, pack_calls(form, False, rows), lambda fresh: abs, None, [].append, Sigterm())
    left = 4 - cut
    run.calls, run._cut_calls = _InterruptedBetween(rows[:left]), cut  # by the control thread
    run.calls.left = at
    run.run()
    if at == 0 or at > left:  # all were done: it is nobody's
        assert end_of(run) == (left, 0, ENDED, False)
    else:
        assert end_of(run) == (left - at + 1, at - 1, FAILED, True)


@pytest.mark.parametrize("form", [ITEMS, ROWS])
@pytest.mark.parametrize("count", [3, MAX_MARKED_CALLS, MAX_MARKED_CALLS + 1])
def test_each_call_of_a_chunk_is_marked_before_it_begins_if_that_costs_little(form, count):
    marked = [0]
    rows = [*range(count)] if form == ITEMS else [(n,) for n in range(count)]
    calls = pack_calls(form, False, rows)
    run = ChunkRun(7, calls, lambda fresh: lambda n: marked[-1] - n, None, marked.append, Sigterm())
    run.run()
    marks = count <= MAX_MARKED_CALLS
    assert marked == [0, *(range(1, count + 1) if marks else ()), 0]
    assert run.done == ([1] * count if marks else [-n for n in range(count)])


@pytest.mark.parametrize("form", [ITEMS, ROWS])
@pytest.mark.parametrize("opened", [0, 1])
def test_a_function_that_cannot_be_opened_fails_the_next_call(form, opened):
    def open_function(fresh, times=[]):  # noqa: B006
        times.append(1)
        if len(times) > opened:
            raise ImportError
        return abs

    rows = [-1, -2] if form == ITEMS else [(-1,), (-2,)]
    run = ChunkRun(7, pack_calls(form, True, rows), open_function, None, [].append, Sigterm())
    run.run()
    assert run.done == [1][:opened] and end_of(run) == (opened + 1, 1 - opened, FAILED, True)


def test_the_cut_of_a_chunk_that_is_heard_twice_answers_nothing_again():
    """Of two calls the first is done and the second runs: what is left has as many calls as the
    message answers."""
    whole = work.Chunk(TaskRunner(), None, pack_calls(ITEMS, False, [1, 2]), 2)
    running, later = whole.split(1, 0)
    assert (running.count, later.count) == (1, 0)
    assert running.queued == whole.queued  # in the timeline the drone may have ended it by now
    cut = split_head(1, 0, RUNNING) + pack_answers([1], False, None, None)
    for there, heard in ((whole, whole), (running, None)):
        dispatcher = SimpleNamespace(split=lambda *told: None)
        assert (
            _handle_special_outcome(
                dispatcher, SimpleNamespace(in_flight={7: there}), 7, SPLIT, cut
            )[0]
            is heard
        )


def test_an_outcome_is_not_sent_before_the_events_of_its_task():
    """The main thread notes both while the control thread packs the events of before."""

    class Events:
        def __init__(self):
            self.left = [b"first"]

        def pop_packed(self):
            packed = b"".join(self.left)
            self.left.clear()
            if packed == b"first":
                self.left.append(b"last")
                buffer.add(7, VALUE, 0.0, 1.0, b"")
            return packed

    page = SimpleNamespace(keep=lambda entry: True)
    references = SimpleNamespace(returned=False)
    buffer = ResultBuffer(page, None, None, references, OutputTail(), DroneStore("drone"), Events())
    first, second = (unpack_outcomes(buffer.take_message()) for _ in range(2))
    assert [(each[1], each[4]) for each in first] == [(EVENT_LOG, b"first")]
    assert [(each[1], each[4]) for each in second] == [(EVENT_LOG, b"last"), (VALUE, b"")]
