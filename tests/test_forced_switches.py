"""Settling meets whatever else may be done to a promise, at every bytecode of either: nothing is
lost or doubled."""

import concurrent.futures
import threading
from concurrent.futures import CancelledError, InvalidStateError, _base
from pickle import dumps
from types import SimpleNamespace
from typing import ClassVar

import pytest
import switches
from faults import wait_for
from switches import every_meeting, telling_locks

import polycephaly as poly
from polycephaly import Promise
from polycephaly.green import group as groups
from polycephaly.green import native
from polycephaly.memory.references import Received
from polycephaly.pool import handlers, inputs, task_promise
from polycephaly.pool import task as work
from polycephaly.pool.interfaces import TaskRunner
from polycephaly.promises import event_loop, sealed
from polycephaly.promises import promise as promises
from polycephaly.promises.opener_thread import settling_threads
from polycephaly.promises.promise import FINISHED
from polycephaly.store.pores import io_thread as pore_io
from polycephaly.wire.functions import FunctionRegistry
from polycephaly.wire.main_names import MainSnapshot
from polycephaly.wire.messages import VALUE

pytestmark = pytest.mark.usefixtures("telling_locks")
__all__ = ["telling_locks"]


class InSharedMemory(Received):
    """What came back of a node, to be opened when somebody asks for it."""

    __slots__ = ()

    def __init__(self):
        pass

    def __len__(self):
        return 1

    def content(self):
        return dumps(7), []


def promise():
    made = Promise()
    return made, lambda: made._settle(FINISHED, 7, None)


def many():
    """As the reactor settles the short answers of one message."""
    task = alone()
    task.sending, outcome = work.Sending(None, "drone", 0.0, 0.0), (task, 7, 0.0, 1.0)
    return task.promise, lambda: handlers._settle_values([outcome], 2.0, {}.pop)


def node():
    """Of a graph: its value stays sealed."""
    task = alone()
    task.is_node, task.status, task.payload = True, VALUE, InSharedMemory()
    return task.promise, lambda: handlers.settle([task])


def alone():
    """Of a pool that is not there: another thread settles it."""
    task = work.Task(RUNNER)
    task.definition = RUNNER.registry.define(abs)
    return task


class Runner(TaskRunner):
    registry = FunctionRegistry(MainSnapshot(()), None)
    reactor = SimpleNamespace(belongs_to_parent=False)
    withdraw = None
    unsettled: ClassVar[dict] = {}

    def post(self, callback, *args):
        pass

    def on_inputs_ready(self, task):
        pass


RUNNER = Runner()


def by_wait(made):
    return {each.result() for each in concurrent.futures.wait([made]).done}.pop()


def by_wait_with_another(made):
    """`wait` counts what is settled before, and is told of the rest: each once."""
    other = Promise()
    other.set_result(None)
    done, open_ = concurrent.futures.wait([made, other])
    assert not open_
    return (done - {other}).pop().result()


def by_as_completed(made):
    (one,) = concurrent.futures.as_completed([made])
    return one.result()


def by_result(made):
    return made.result()


WAITS = [by_wait, by_wait_with_another, by_as_completed, by_result]


@pytest.mark.parametrize("first", ["the settling", "the waiting"])
@pytest.mark.parametrize("waiting", WAITS, ids=lambda it: it.__name__)
@pytest.mark.parametrize("make", [promise, many, node], ids=lambda it: it.__name__)
def test_who_waits_while_it_is_settled_is_told(make, waiting, first):
    def pair():
        made, settle = make()
        both = settle, lambda: waiting(made)
        return both if first == "the settling" else both[::-1]

    for *values, place in every_meeting(pair, promises, handlers, work, task_promise, _base):
        assert values[first == "the settling"] == 7, place


@pytest.mark.parametrize("first", ["the settling", "the adding"])
@pytest.mark.parametrize("make", [promise, many, node], ids=lambda it: it.__name__)
def test_a_callback_that_is_added_while_it_is_settled_is_called_once(make, first):
    calls = []

    def pair():
        made, settle = make()
        called = []
        calls.append(called)

        def add():
            made.add_done_callback(lambda done: called.append(done.result()))

        return (settle, add) if first == "the settling" else (add, settle)

    for *_, place in every_meeting(pair, promises, handlers, work, task_promise):
        assert calls[-1] == [7], place


def test_a_value_that_is_read_while_another_thread_is_to_open_it_is_there_for_both():
    def pair():
        made[0], settle = node()
        settle()
        told[0] = threading.Event()
        return lambda: promises.WhenOpened(lambda _: told[0].set())(made[0]), made[0].result

    made, told = [None], [None]
    for _, value, place in every_meeting(pair, promises, sealed):
        assert value == 7 and told[0].wait(switches.PATIENCE), place


def test_callbacks_that_are_added_at_the_same_time_are_both_called_once():
    called = []

    def pair():
        called.clear()
        made[0] = Promise()
        return tuple(
            lambda name=name: made[0].add_done_callback(lambda _: called.append(name))
            for name in "ab"
        )

    made = [None]
    for *_, place in every_meeting(pair, promises):
        made[0].set_result(7)
        assert sorted(called) == ["a", "b"], place


@pytest.mark.parametrize("first", ["the removing", "the settling"])
def test_no_callback_is_lost_while_another_one_is_removed(first):
    called = []

    def pair():
        called.clear()
        made = Promise()
        made.add_done_callback(lambda _: called.append("before"))
        made.add_done_callback(removed)
        made.add_done_callback(lambda _: called.append("after"))
        both = lambda: made.remove_done_callback(removed), lambda: made.set_result(7)
        return both if first == "the removing" else both[::-1]

    def removed(_):
        called.append("removed")

    for *_, place in every_meeting(pair, promises):
        assert called in (["before", "after"], ["before", "removed", "after"]), place


@pytest.mark.parametrize("first", ["the removing", "the settling"])
def test_no_callback_is_lost_while_those_of_settled_tasks_are_removed(first, monkeypatch):
    called = []

    def pair():
        called.clear()
        made = Promise()
        for name in range(4):
            over = work.Task(RUNNER)
            made._when_settled(over._on_input_settled)
            promises.fulfill(over.promise)
            made.add_done_callback(lambda _, name=name: called.append(name))
        both = lambda: [*inputs.waiters(made)], lambda: made.set_result(7)
        return both if first == "the removing" else both[::-1]

    for *_, place in every_meeting(pair, promises, inputs):
        assert called == [0, 1, 2, 3], place


@pytest.mark.parametrize("first", ["the settling", "the cancelling"])
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("make", [promise, many, node], ids=lambda it: it.__name__)
def test_cancelling_and_settling_agree_on_who_was_first(make, watched, first):
    made = None

    def pair():
        nonlocal made
        made, settle = make()
        if watched:
            made._condition  # noqa: B018 - as `wait` asks for it
        return (settle, made.cancel) if first == "the settling" else (made.cancel, settle)

    for *values, place in every_meeting(pair, promises, handlers, work, task_promise):
        cancelled = values[first == "the settling"]
        assert made.done() and made.cancelled() is cancelled, place
        if cancelled:
            with pytest.raises(CancelledError):
                made.result()
        else:
            assert made.result() == 7, place


@pytest.mark.parametrize("first", ["the cancelling", "the running"])
@pytest.mark.parametrize("watched", [False, True])
def test_cancelling_and_running_never_both_succeed(watched, first):
    def pair():
        made = Promise()
        if watched:
            made._condition  # noqa: B018
        both = made.cancel, made.set_running_or_notify_cancel
        return both if first == "the cancelling" else both[::-1]

    for *values, place in every_meeting(pair, promises):
        assert sorted(values) == [False, True], place


@pytest.mark.parametrize("first", ["the settling", "the running"])
def test_what_is_settled_is_never_said_to_run(first):
    made = None

    def pair():
        nonlocal made
        made = Promise()

        def run():
            try:
                return made.set_running_or_notify_cancel()
            except InvalidStateError:
                return None

        def settle():
            made.set_result(7)

        return (settle, run) if first == "the settling" else (run, settle)

    for *_, place in every_meeting(pair, promises):
        assert made.done() and not made.running() and made.result() == 7, place


def subclasses(kind):
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_no_promise_makes_a_call_of_the_stores_that_settle_it():
    """A property is a call, where another thread, or Ctrl-C, may come between the claim and the
    state."""
    for kind in subclasses(Promise):
        for name in ("_result", "_exception", "_state", "_hooks"):
            assert not hasattr(type(getattr(kind, name)), "__set__"), (kind, name)


class Owner:
    """The green thread that is in the block of a group."""

    def __init__(self):
        self.interruptions = []

    def interrupt(self, error):
        self.interruptions.append(error)


def test_what_cancels_a_group_as_its_block_ends_hits_nothing_after_the_block():
    owner = Owner()

    def pair():
        owner.__init__()
        group = groups.Group()
        group.owner = owner
        leaving = group.__aexit__(None, None, None)

        def leave():
            with pytest.raises(StopIteration):  # it has nobody to wait for
                leaving.send(None)

        return group.cancel, leave

    for *_, place in every_meeting(pair, groups):
        assert all(each.withdrawn for each in owner.interruptions), place


def test_the_switch_interval_is_that_for_the_number_of_threads(monkeypatch):
    interval = SimpleNamespace(value=0.005)
    fake = SimpleNamespace(
        getswitchinterval=lambda: interval.value,
        setswitchinterval=lambda value: setattr(interval, "value", value),
    )
    monkeypatch.setattr(native, "sys", fake)

    def a_worker_ends_and_others_begin():
        interval.value = 0.005
        pool = pools[:] = [native.NativeThreadPool(16384)]
        monkeypatch.setattr(native, "_Worker", lambda *_: None)
        for _ in range(native.MANY_THREADS):
            pool[0].start_urgently(abs)
        return pool[0].remove_worker, lambda: pool[0].start_urgently(abs)

    pools = []
    for _, _, place in every_meeting(a_worker_ends_and_others_begin, native):
        (pool,) = pools  # its count is 512, or 511: where one was lost as CPython loses none
        many = pool.count == native.MANY_THREADS
        assert interval.value == pytest.approx(512 * 20e-6 if many else 0.005), place
        for _ in range(pool.count):
            pool.remove_worker()
        assert interval.value == 0.005, place


def test_what_is_given_to_a_loop_while_it_runs_others_is_run_once():
    def pair():
        made.append(event_loop.EventLoop("meeting"))
        loop = made[-1]
        return lambda: loop.run_outside_lock(lambda: ran.append(1)), loop._run_jobs_outside_lock

    made, ran = [], []
    for *_, place in every_meeting(pair, event_loop):
        made[-1]._run_jobs_outside_lock()
        assert ran == [1], place
        ran.clear()
        made.pop().release_resources()
    made.pop().release_resources()


class SleepingLoop(event_loop.EventLoop):
    """It tells when it is about to wait, as the locks do."""

    def __init__(self, name):
        super().__init__(name)
        poll = self._poll

        def tell_and_poll(timeout):
            switches.about_to_wait()
            return poll(timeout)

        self._poll = tell_and_poll


def falls_asleep(loop):
    def turn():
        with loop._lock:
            loop._asleep = True
            if loop._inbox or loop._turn_requested:
                loop._asleep = False
        loop._sleep()

    return turn


@pytest.mark.parametrize("first", ["the loop", "the caller"])
def test_what_is_posted_while_a_loop_falls_asleep_wakes_it(first, monkeypatch):
    def pair():
        loop = SleepingLoop("meeting")
        made.append(loop)
        both = falls_asleep(loop), lambda: loop.post(abs)
        return both if first == "the loop" else both[::-1]

    monkeypatch.setattr(event_loop, "MAX_SLEEP_SECONDS", 10 * switches.PATIENCE)
    made = []
    for _ in every_meeting(pair, event_loop):  # the loop returns, else it fails
        made.pop().release_resources()
    made.pop().release_resources()


def test_of_two_callers_that_wake_a_loop_one_does():
    def pair():
        loop = event_loop.EventLoop("meeting")
        loop._asleep = True
        made.append(loop)
        return (lambda: loop.post(abs)), lambda: loop.post(abs)

    made = []
    for *_, place in every_meeting(pair, event_loop):
        loop = made.pop()
        assert loop._poll(0) and len(loop._inbox) == 2, place
        loop.release_resources()
    made.pop().release_resources()


def test_a_pore_that_is_made_while_the_thread_of_others_ends_is_served(monkeypatch):
    def pair():
        monkeypatch.setattr(pore_io, "_lock", threading.RLock())
        ending[:] = [pore_io.PoreIOThread()]
        monkeypatch.setattr(pore_io, "io_thread", ending[0])
        return ending[0]._end_if_over, lambda: pores.append(poly.Pore(1))

    def is_served(place):
        pore = pores.pop()
        thread = pore._inbox.loop
        assert pore_io.io_thread is thread, place
        if thread is ending[0]:  # it goes on
            thread.start()
        pore.tell(1)
        assert pore.get(30).value == 1, place
        pore.close()
        thread.thread.join(30)
        assert pore_io.io_thread is None, place

    ending, pores = [], []
    for make in (pair, lambda: pair()[::-1]):
        for *_, place in every_meeting(make, pore_io):
            is_served(place)
        is_served("the end")


class Tells:
    """It tells if it is pickled by a thread that fills a call."""

    fills = threading.local()
    told = []  # noqa: RUF012

    def __reduce__(self):
        if getattr(self.fills, "here", False):
            self.told.append(True)
        return Tells, ()


@pytest.mark.parametrize("first", ["the filling", "the reading"])
@pytest.mark.parametrize("deep", [False, True])
def test_a_value_that_is_opened_while_it_goes_into_a_call_is_not_pickled_by_the_loop(deep, first):
    def fill():
        me = threading.get_ident()
        Tells.fills.here = True
        settling_threads.add(me)
        try:
            waiting[0]._fill_inputs()
        finally:
            settling_threads.discard(me)
            Tells.fills.here = False

    def pair():
        source = alone()
        source.status, source.payload = VALUE, dumps(Tells())
        handlers.settle([source])
        waiting[0] = task = alone()
        args = ([source.promise],) if deep else (source.promise,)
        task.inputs = [*task.capture(task.definition, args, {})] if deep else args
        task.args = None if deep else args
        both = fill, source.promise.result
        return both if first == "the filling" else both[::-1]

    waiting = [None]
    Tells.told.clear()
    for *_, place in every_meeting(pair, work, promises, sealed):
        wait_for(lambda: not waiting[0].inputs)
        assert not Tells.told, place
