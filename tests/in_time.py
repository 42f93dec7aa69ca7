"""A dispatcher whose time is moved by the test: decisions by the clock, without a process, a thread
or a sleep.

    test ── pass_, stand_still ──> FakeReactor ──> Dispatcher, Supervisor, ... ──> FakeHandle
      └──── a drone's acts: answers, is quiet, holds memory ───────────────────────────^

All above the protocol of pool/engine.py is the real thing. The reactor has no threads and no
sockets, and the drones of the engine do only as the test says. `FakeLoop` is for what has an event
loop of its own, as a server."""

import itertools
import signal
import threading
from collections import deque
from pickle import dumps
from unittest import mock

import pytest

import polycephaly.pool.dispatcher
from polycephaly.engines.local.launcher import Launcher
from polycephaly.memory.references import RefTable
from polycephaly.pool.chunk import Chunk
from polycephaly.pool.config import PoolConfig
from polycephaly.pool.drone_handle import DroneHandle as DroneHandle
from polycephaly.pool.engine import Engine
from polycephaly.pool.handlers import handle_message, handle_records
from polycephaly.pool.interfaces import State, TaskOptions
from polycephaly.pool.task import Task
from polycephaly.promises import opener_thread
from polycephaly.promises.event_loop import EventLoop
from polycephaly.runtime.hidden import Hidden
from polycephaly.runtime.timers import Timers
from polycephaly.wire.functions import FunctionRegistry
from polycephaly.wire.main_names import MainSnapshot
from polycephaly.wire.map_chunks import ITEMS, pack_calls
from polycephaly.wire.messages import (
    VALUE,
    message_type,
    pack_frames,
    pack_outcome,
    pack_value,
    unpack_numbers,
)
from polycephaly.wire.ring import decode

BEGINNING = 1000.0  # of the time: no 0, which could stand for something else
A_MOMENT = 1e-6  # times that are closer are the same
PID = 7000  # and more, of drones
WHY = "the process is stopped by a signal"


class FakeTime:
    """The time of `timers`. In a `turn` all happens that is due."""

    def __init__(self):
        self.now = BEGINNING
        self.timers = Timers()
        self.timers.now = lambda: self.now

    @property
    def passed(self):
        return self.now - BEGINNING

    def pass_(self, seconds):
        """Whatever is due meanwhile happens at its own time."""
        self.turn()
        end, heap = self.now + seconds, self.timers.heap
        while heap and heap[0][0] <= end:
            self.now = max(self.now, heap[0][0])
            self.turn()
        self.now = end

    def stand_still(self, seconds):
        """This process is not let run for so long: what is due by then happens afterwards."""
        self.turn()
        self.now += seconds
        self.turn()


class FakeLoop(FakeTime, EventLoop):
    """An event loop without its thread: its turns are taken when the test lets time pass. An error
    in one is the test's."""

    def __init__(self, name, after_turn=None, on_death=None):
        EventLoop.__init__(self, name, after_turn, on_death)
        FakeTime.__init__(self)

    def start(self):
        pass

    def turn(self):
        self._run_once()
        while self._inbox or self._turn_requested:
            self._run_once()

    def _call_guarded(self, callback):
        callback()


def let_the_opener_finish():
    done = threading.Event()
    opener_thread.opener_thread.add(done.set)
    assert done.wait(60)


class FakeReactor(FakeTime):
    """Its turns are taken when the test lets time pass, or gives work. An error in one is the
    test's."""

    belongs_to_parent = is_ending = is_dying = False

    def __init__(self):
        super().__init__()
        self.tenants = []
        self.last_callbacks = []
        self._set_now = (BEGINNING, 0)  # timers at one time
        self._inbox = deque()
        self._deliveries = []

    def turn(self):
        self.critical_section()
        while self.deliver_all() or self._inbox:
            self.critical_section()

    def critical_section(self):
        while self._inbox:
            self._inbox.popleft()()
        self.timers.fire_due()
        for dispatcher in self.tenants[:]:
            dispatcher.take_turn(self.now)

    def deliver_all(self):
        acts, self._deliveries = self._deliveries, []
        for act in acts:
            act()
        if acts:
            let_the_opener_finish()
        return bool(acts)

    # -- what crews use ----------------------------------------------------------------------------

    def call_later(self, seconds, act):
        return self.call_at(self.now + seconds, act)

    def call_at(self, when, act):
        at, count = self._set_now
        count = count + 1 if at == self.now else 1
        self._set_now = self.now, count
        assert count < 1000, f"it would never end: {act}"
        return self.timers.set(when, act)

    def post(self, act):
        self._inbox.append(act)

    def request_turn(self):
        """Turns are taken until nothing is left to deliver."""

    def deliver(self, act):
        self._deliveries.append(act)

    def deliver_output(self, write, size):
        self._deliveries.append(write)

    def leaves_output(self):
        return False

    def wake(self):
        pass

    def release(self):
        pass


class FakeHandle(DroneHandle):
    """A drone that begins at once what heads its flight, and shows that it lives, unless the test
    says otherwise."""

    def __init__(self, dispatcher, number, name, launcher):
        super().__init__(dispatcher, number, name)
        self.spawner = launcher
        self.ref_table = RefTable(None, None, lambda: None)  # nothing is lent
        self.sent_to_it = []  # the messages that bring no work: type and numbers
        self.looks, self.felt, self.kills = (
            [],
            [],
            [],
        )  # when it was caught up with, felt for a pulse, and killed
        self.unread = deque()  # what it has sent, and this process has not read yet
        self.quiet, self.threads, self.up = False, {}, True
        self.did, self.others, self.asleep, self.call = None, None, True, None
        self.held = 0
        self._begun = 0
        self._beats = itertools.count()
        self._beat = next(self._beats)

    # -- for tests ---------------------------------------------------------------------------------

    def starts(self):
        """It has a pid. It is ready when it `says_hello`."""
        self.dispatcher.supervisor.on_started(self, PID + self.number)
        self.dispatcher.reactor.turn()

    def says_hello(self):
        self.dispatcher.supervisor.on_hello(self)
        self.dispatcher.reactor.turn()

    def answer(self, task, value=None, together=False):
        """The record, with its key; `together` as of those that share a pickle."""
        now = self.dispatcher.reactor.now
        if together:
            return decode(pack_value(task.number, now, now, value))
        return decode(pack_outcome(task.number, VALUE, now, now, dumps(value)))

    def answers(self, task, value=None, together=False):
        """And this process reads it at once."""
        handle_records(self.dispatcher, self, self.answer(task, value, together))
        self.dispatcher.reactor.turn()

    def tells_frames(self, request, places):
        report = {"current": 0, "tasks": {}, "threads": [], "places": places}
        handle_message(self.dispatcher, self, pack_frames(request, report))
        self.dispatcher.reactor.turn()

    def dies(self, exitcode=-9):
        self.dispatcher.supervisor.on_died(self, exitcode)
        self.dispatcher.reactor.turn()

    def got(self, kind):
        """The numbers in all messages of that kind."""
        return [number for each, those in self.sent_to_it if each == kind for number in those]

    # -- what an engine says of one ----------------------------------------------------------------

    def send(self, frames, tasks=()):
        if tasks:
            self.last_started()
        else:
            self.sent_to_it.append((message_type(frames), unpack_numbers(frames)))

    def receive_all(self):
        self.looks.append(self.dispatcher.reactor.passed)
        while self.unread:
            handle_records(self.dispatcher, self, self.unread.popleft())

    def _kill(self):
        self.kills.append(self.dispatcher.reactor.passed)

    def is_up(self):
        return self.alive and self.up

    def last_started(self):
        self._begun = next(iter(self.in_flight), self._begun)
        return self._begun

    def last_answered(self):
        return 0

    def heartbeat(self):
        self.felt.append(self.dispatcher.reactor.passed)
        if not self.quiet:
            self._beat = next(self._beats)
        return self._beat, dict(self.threads)

    def is_waiting(self):
        return self.asleep

    def stall_reason(self):
        return WHY

    def activity(self, threads):
        return None if self.did is None else (self.did, threads)

    def children_activity(self):
        return self.others

    def system_call(self):
        return self.call

    def memory(self, enough):
        return self.held

    def take_output(self):
        return []

    def collect_last_results(self):
        self.receive_all()

    def close(self):
        pass


class FakeZygote(Launcher):
    """It starts nothing. `state` is what the kernel tells of it."""

    def __init__(self):
        self.pid, self.state = 6000, "S"
        self.told = []  # to go on, or to end; and when
        self.reactor = None

    def signal_zygote(self, number):
        did = {signal.SIGKILL: "killed", signal.SIGCONT: "continued"}[number]
        self.told.append((did, self.reactor.passed))


class FakeEngine(Engine):
    """And the engine: it starts drones, of which nothing is heard."""

    name = "fake"

    def __init__(self, launcher=None):
        self._keeper = launcher

    def open(self, dispatcher):
        self._dispatcher = dispatcher
        dispatcher.registry = FunctionRegistry(
            MainSnapshot(()), None, dispatcher.config.width > 1, dispatcher.directory
        )
        return self

    def begin(self):
        pass

    def can_start(self):
        return True

    def loss(self):
        return None

    def start(self, number, name, index):
        return FakeHandle(self._dispatcher, number, name, self._keeper)

    def reclaim(self, handle):
        pass

    def end(self):
        pass


USUAL = {
    "name": "pool",
    "drone_name": "pool.{}".format,
    "start": None,
    "env": (),
    "cwd": None,
    "initializer": None,
    "initargs": Hidden(()),
    "output": None,
    "width": 1,
    "task_options": TaskOptions(None, 0),
    "max_tasks": None,
    "max_memory": None,
    "max_queued": None,
    "hang_timeout": None,
    "report_waiting": None,
    "on_death": "replace",
}


def dispatcher_of(reactor, size, *, ready=True, launcher=None, engine=None, **config):
    """A pool whose drones are `ready`, or have not even a pid."""
    if launcher is not None:
        launcher.reactor = reactor
    with mock.patch.object(polycephaly.pool.dispatcher, "acquire_reactor", lambda: reactor):
        dispatcher = polycephaly.pool.dispatcher.Dispatcher(
            PoolConfig(size=size, **(USUAL | config)), (engine or FakeEngine(launcher)).open
        )
    dispatcher.fail = _raise  # a test sees the error, not a pool that is broken
    reactor.turn()
    if ready:
        make_ready(dispatcher)
    return dispatcher


def _raise(error):
    raise error


def task(*inputs):
    """Work for drones that run nothing, as `overlapped`."""
    raise AssertionError("nothing is run here")


async def overlapped(*inputs):
    raise AssertionError("nothing is run here")


def brief(*args):
    raise AssertionError("nothing is run here")


def lasting(*args):
    raise AssertionError("nothing is run here")


def about(*times):
    return pytest.approx([*times], abs=A_MOMENT)


def make_ready(dispatcher):
    for handle in dispatcher.handles:
        if handle.state is State.STARTING:
            handle.starts()
            handle.says_hello()


def submitted(dispatcher, what, *args, target=None, task_options=None):
    """The task of a call."""
    task = Task(dispatcher)
    dispatcher.submit(what, args, {}, target, task_options, task)
    return task


def give_chunk(dispatcher, what, items, first_item=10, retries=0):
    """A chunk of a map, sent if a drone takes it."""
    calls = pack_calls(ITEMS, False, items)
    chunk = Chunk(dispatcher, dispatcher.registry.define(what), calls, len(items))
    chunk.first_item, chunk.retries = first_item, retries
    dispatcher.submit_task(chunk)
    dispatcher.reactor.turn()
    return chunk


def give(dispatcher, what, *args, timeout=None, retries=0, target=None):
    """The task of a call, sent if a drone takes it."""
    options = TaskOptions(timeout, retries)
    task = submitted(dispatcher, what, *args, target=target, task_options=options)
    dispatcher.reactor.turn()
    return task
