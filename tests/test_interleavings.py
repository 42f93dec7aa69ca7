"""Callers and turns that meet, each held at the very place where the other comes between."""

import os
import signal
import threading
import time
from collections import deque
from functools import partial
from pickle import dumps
from types import SimpleNamespace

import pytest
from faults import PackedSlowly, append, wait_for
from in_time import dispatcher_of

import polycephaly as poly
from polycephaly.drone import chunk_run as chunk_runs
from polycephaly.drone.chunk_run import MAX_ANSWER_BYTES, RUN_SECONDS, WRITE_SECONDS, ChunkRun
from polycephaly.drone.console import OutputTail
from polycephaly.drone.executor import DroneExecutor
from polycephaly.drone.outcomes import Outcomes
from polycephaly.drone.overlap import Overlap
from polycephaly.drone.sigterm import Sigterm
from polycephaly.drone.store import DroneStore
from polycephaly.pool.chunk import Chunk
from polycephaly.pool.handlers import handle_records
from polycephaly.runtime.tuning import tuning
from polycephaly.wire.map_chunks import (
    ITEMS,
    ROWS,
    Answers,
    answers_head,
    pack_answers,
    pack_calls,
    unpack_answers,
)
from polycephaly.wire.messages import (
    ANSWERS,
    CANCEL,
    EVENT_LOG,
    VALUE,
    pack_numbers,
    unpack_records,
    unpack_returned,
)


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


def told_to_cancel(number, begin):
    """A runner that hears CANCEL; its main thread begins that task just before it is noted, by
    `begin`."""

    class Missed(set):
        def __ior__(self, others):
            assert number not in self  # nothing is known to who begins it
            begin(runner)
            return super().__ior__(others)

    runner = SimpleNamespace(
        _todo=deque(), _calls=None, _chunk=None, _overlap=Overlap(bool), _current=0,
        _interrupt_target=0, _pending_interrupts=Missed(), _main_thread=threading.get_ident(),
    )  # fmt: skip
    runner._claim_interrupt = lambda number: DroneExecutor._claim_interrupt(runner, number)
    runner._interrupt_main_thread = partial(DroneExecutor._interrupt_main_thread, runner)
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


def chunk_run(rows, form, open_function=lambda fresh: abs, mark=None, *, fresh=False):
    payload = pack_calls(form, fresh, rows)
    marks = mark or (lambda begun, run_length: None)
    return ChunkRun(7, payload, open_function, None, marks, bool, Sigterm())


def end_of(run):
    """What the controller is told: how many calls are answered, whether the last of them has
    failed, and how many are given back."""
    told, sent = [], []

    class Runner(SimpleNamespace):
        _outcome_of = DroneExecutor._outcome_of

    runner = Runner(
        socket_lock=threading.Lock(), _chunk=run, _store=None, _send=sent.append,
        _outcomes=SimpleNamespace(
            pack_error=lambda error: b"error", add=lambda *outcome: told.append(outcome)
        ),
        keep_frames=lambda number, error: None,
    )  # fmt: skip
    DroneExecutor._add_last_answers(runner, run)
    returned = [unpack_returned(each) for each in sent]
    if not told:
        return 0, False, returned
    [(*_, answers, head)] = told
    first, count, failed, _ = unpack_answers(head + b".")
    unpacked = Answers(answers)
    assert first == 0 and len(unpacked.values) + failed == count
    assert (unpacked.error == b"error") is failed
    return count, failed, returned


@pytest.mark.parametrize("form, rows", [(ITEMS, [1, 2, 3, 4]), (ROWS, [(1,), (2,), (3,), (4,)])])
@pytest.mark.parametrize("given_back", [0, 1, 2])
@pytest.mark.parametrize("at", range(5))
def test_an_interrupt_between_two_calls_is_that_of_the_next_if_there_is_one(
    form, rows, given_back, at
):
    run = chunk_run(rows, form)
    left = 4 - given_back
    run.calls, run._count = _InterruptedBetween(rows[:left]), left  # by the control thread
    run.calls.left = at
    run.run()
    if at == 0 or at > left:  # all were done: it is nobody's
        assert end_of(run) == (left, False, [])
    else:  # those behind it are not needed
        assert end_of(run) == (left - at + 1, True, [])


@pytest.mark.parametrize("at", [1, 2, 4])
def test_what_a_chunk_has_left_after_a_sigterm_is_given_back(at, stopped_clock):
    """At once, although calls that take no time are marked many together."""
    sigterm = Sigterm()

    def end_at(n):
        if n == at:
            sigterm(signal.SIGTERM, None)
        return n

    payload = pack_calls(ITEMS, False, [1, 2, 3, 4], is_whole=True)
    nothing = lambda *mark: None  # noqa: E731
    run = ChunkRun(7, payload, lambda fresh: end_at, None, nothing, bool, sigterm)
    sigterm.stop = run.stop
    run.run()
    assert not run.may_go_on()
    assert end_of(run) == (at, False, [[(7, 4 - at)]] if at < 4 else [])


def test_a_chunk_that_is_run_as_a_whole_gives_nothing_back():
    for is_whole, given_back in ((True, 0), (False, 3)):
        payload = pack_calls(ITEMS, False, [1, 2, 3], is_whole=is_whole)
        run = ChunkRun(7, payload, lambda fresh: abs, None, lambda *mark: None, bool, Sigterm())
        assert run.give_back() == given_back


@pytest.fixture
def stopped_clock(monkeypatch):
    """The time of a chunk's run, as a list that the test changes."""
    now = [0.0]
    monkeypatch.setattr(chunk_runs, "monotonic", lambda: now[0])
    return now


def test_a_chunk_that_slows_down_runs_what_is_left_one_by_one_at_first(stopped_clock):
    """The control thread slows it down in the middle of a call."""
    marked, sent, rows = [], [], [*range(300)]

    def slowed_at_100(n):
        if n == 100:
            stopped_clock[0] += 1.0
            run.slow_down()
            assert marked[-1] == (101, 1)
            sent.append(run.take_done())
        return n

    mark = lambda *mark: marked.append(mark)  # noqa: E731
    run = chunk_run(rows, ITEMS, lambda fresh: slowed_at_100, mark)
    run.run()
    assert marked[:3] == [(1, 1), (3, 2), (7, 4)] and marked[-1] == (0, 0)
    assert run.may_go_on()
    marked.clear()
    run.run()
    assert marked[:2] == [(102, 1), (104, 2)]
    assert marked[-1] == (0, 0) and not run.may_go_on()
    sent.append(run.take_done())
    assert [each.first for each in sent] == [0, 100]
    assert [*sent[0].values, *sent[1].values] == rows


@pytest.mark.parametrize("form", [ITEMS, ROWS])
@pytest.mark.parametrize("seconds", [0.0, 3e-5, 3e-4])
@pytest.mark.parametrize("count", [1, 3, 300])
def test_each_call_of_a_chunk_is_marked_before_it_begins(form, seconds, count, stopped_clock):
    marked, begun = [], []

    def called(n):
        stopped_clock[0] += seconds
        begun.append(n)
        end, length = marked[-1]
        assert end - length <= n < end  # it is one of those that may be running
        return length

    rows = [*range(count)] if form == ITEMS else [(n,) for n in range(count)]
    mark = lambda *mark: marked.append(mark)  # noqa: E731
    run = chunk_run(rows, form, lambda fresh: called, mark)
    run.run()
    assert begun == [*range(count)] and marked[-1] == (0, 0)
    longest = max(run.done)
    assert longest == 1 if seconds > RUN_SECONDS else longest * seconds <= 2 * RUN_SECONDS


def test_answers_are_written_after_half_a_millisecond_and_told_if_they_are_large(stopped_clock):
    written = []

    def write(must_tell):
        written.append((must_tell, len(run.take_done().values)))

    def slow_or_large(n):
        if n == 2:
            stopped_clock[0] += WRITE_SECONDS * 1.01
        return bytes(MAX_ANSWER_BYTES) if n == 5 else n

    payload, nothing = pack_calls(ITEMS, False, [*range(8)]), lambda *mark: None
    run = ChunkRun(7, payload, lambda fresh: slow_or_large, dumps, nothing, write, Sigterm())
    run.run()
    assert written == [(False, 3), (True, 3)]
    assert run.take_done().values == [6, 7] and not run.take_done().values


def test_the_time_of_a_long_call_goes_on_while_nothing_is_done(stopped_clock):
    """The control thread looks at it again and again."""
    parts = []

    def long(n):
        for _ in range(3):
            stopped_clock[0] += 1.0
            parts.append(run.take_done())
        return n

    run = chunk_run([1, 2], ITEMS, lambda fresh: long)
    run.run()
    parts.append(run.take_done())
    times = [(part.started, part.finished) for part in parts if part.values]
    assert times == [(0.0, 4.0), (4.0, 6.0)]


@pytest.mark.parametrize("form", [ITEMS, ROWS])
@pytest.mark.parametrize("opened", [0, 1])
def test_a_function_that_cannot_be_opened_fails_the_next_call(form, opened):
    def open_function(fresh, times=[]):  # noqa: B006
        times.append(1)
        if len(times) > opened:
            raise ImportError
        return abs

    rows = [-1, -2] if form == ITEMS else [(-1,), (-2,)]
    run = chunk_run(rows, form, open_function, fresh=True)
    run.run()
    assert run.done == [1][:opened] and end_of(run) == (opened + 1, True, [])


def test_answers_of_a_chunk_that_are_heard_twice_answer_nothing_again(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    chunk = Chunk(dispatcher, dispatcher.registry.define(abs), pack_calls(ITEMS, False, [1, 2]), 2)
    dispatcher.submit_task(chunk)
    reactor.turn()
    one = answers_head(0, 1, False) + pack_answers([1], False, None, None)
    for _ in range(2):
        outcome = (chunk.number, ANSWERS, 0.0, 0.0, one, b"")
        handle_records(dispatcher, handle, {0: outcome})
        reactor.turn()
        assert [part.answers.values for part in chunk.parts] == [[1]]
    assert chunk.calls_left == 1 and not chunk.promise.done()


def test_an_outcome_is_not_written_before_the_events_of_its_task():
    events = SimpleNamespace(
        events=[1], pop_packed=lambda: b"packed" if events.events.pop() else b""
    )
    written = []
    references = SimpleNamespace(returned=False)
    outcomes = Outcomes(
        lambda record, is_shared=False: written.append(record),
        None,
        None,
        references,
        OutputTail(),
        DroneStore("drone"),
        events,
    )
    outcomes.add_value(7, 0.0, 1.0, None)
    assert [each[1] for each in unpack_records(written).values()] == [EVENT_LOG, VALUE]
