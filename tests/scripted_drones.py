"""Random interleavings of a pool: callers, drones and time act in any order, without a process, a
thread or a sleep.

    choose ──> Interleaving.step ──┬─> a caller: submits, cancels, closes, lends
                                   ├─> a drone: reads, begins, ends, is interrupted, sends, dies
                                   ├─> the wire: messages arrive late, twice, or malformed
                                   └─> the reactor: a critical section, deliveries, time

The dispatcher and all above the protocol of pool/engine.py are the real thing, and so are the
messages. A `ScriptedDrone` is the other end of one handle; it does what drone/executor.py does, one
step at a time. `finish` lets everybody do their part, and then checks that no promise is left, and
that each call ran as often as it should have.

`choose(n)` gives a number below n: from a seed, or from Hypothesis, which then finds the shortest
sequence that fails.
"""

import gc
import sys
from collections import deque
from concurrent.futures import CancelledError
from functools import partial
from pickle import dumps, loads
from random import Random
from time import monotonic
from unittest import mock

from in_time import PID, FakeEngine, FakeHandle, FakeReactor, dispatcher_of, overlapped

from polycephaly.errors import DroneDied, Lost
from polycephaly.pool import leases
from polycephaly.pool.directory import KeptTask
from polycephaly.pool.handlers import handle_message, handle_unsent_results
from polycephaly.pool.interfaces import State, TaskOptions
from polycephaly.pool.retry import Retry
from polycephaly.pool.task import Chunk, Task
from polycephaly.pool.validation import validate
from polycephaly.promises.promise import Promise, fulfill
from polycephaly.wire import placeholders
from polycephaly.wire.exceptions import pack_exception
from polycephaly.wire.map_chunks import (
    ENDED,
    FAILED,
    ITEMS,
    RUNNING,
    pack_answers,
    pack_calls,
    split_head,
    unpack_calls,
)
from polycephaly.wire.messages import (
    CALL_CHUNK,
    CALL_KEYWORDS,
    CALLS,
    CANCEL,
    DEFINE_OVERLAPPING,
    DEFINES,
    DROP,
    ERROR,
    FETCH,
    FORGET,
    HELLO,
    KEEP,
    NOT_PACKED,
    PACKED,
    PROTOCOL,
    RECALL,
    RETURNED,
    SPLIT,
    STOP,
    STORE,
    VALUE,
    WITHDRAWN,
    WORK,
    Malformed,
    message_type,
    pack_numbers,
    pack_outcome,
    pack_outcomes,
    pack_values,
    unpack_numbers,
    unpack_work,
)

PREPARING = 0  # the key of an initializer, and of a push
SECONDS = {"brief": 1e-5, "lasting": 0.1, "overlapped": 0.01, "push": 1e-5}


def brief(key, *inputs):
    raise AssertionError("nothing is run here")


def lasting(key, *inputs):
    raise AssertionError("nothing is run here")


class Failed(Exception):
    """The error of a call that was told to fail."""


def value_of(key):
    return 10 * key


class FailedAttempt:
    """In place of a drone that has begun a call, after which the call may begin anew."""

    state = State.STOPPING

    def __init__(self, drone):
        self.drone = drone

    @property
    def is_gone(self):
        return self.drone.is_gone


class Running:
    """A task in a drone: its calls, named by their keys, and how far they are."""

    def __init__(self, number, name, keys, overlaps):
        self.number, self.name, self.keys, self.overlaps = number, name, keys, overlaps
        self.payload = self.kind = None  # of one call, opened when that begins
        self.is_chunk = self.keeps = False
        self.done = self.sent = 0
        self.was_cut = False


class ScriptedDrone(FakeHandle):
    """The handle, and the drone at its other end."""

    world = None  # the interleaving, set by its engine

    def __init__(self, dispatcher, number, name, launcher):
        super().__init__(dispatcher, number, name, launcher)
        self.inbox = deque()  # messages for the drone that it has not read
        self.known = {}  # functions
        self.todo = deque()
        self.running = {}  # tasks by number: several, if they overlap
        self.interrupted = set()
        self.outcomes = []  # that were not sent yet
        self.kept = []  # the same, and others that may be lost with the drone
        self.started = self.sent = self.last_done = 0
        self.stops = self.is_gone = self.doomed = False
        self.store, self.claims = {}, {}  # values kept here, and the controller's claims to each
        self.requested = deque()  # values that the controller has asked for
        self.pushed = {}  # names that were pushed, as they are here

    # -- the handle's side -------------------------------------------------------------------------

    def send(self, frames, tasks=()):
        assert self.alive, "a message for a drone whose death was handled"
        self.inbox.append(list(frames))

    def _kill(self):
        self.doomed = True

    def receive_all(self):
        while self.unread:
            self.world.receive(self)

    def last_started(self):
        return self.started

    def last_answered(self):
        return self.sent

    def collect_last_results(self):
        self.receive_all()
        if self.kept:
            handle_unsent_results(self.dispatcher, self, b"".join(self.kept))

    # -- the drone's side --------------------------------------------------------------------------

    @property
    def can_act(self):
        return not self.is_gone and self.state is not State.DEAD

    def read(self):
        frames = self.inbox.popleft()
        kind = message_type(frames)
        if kind == WORK:
            for number, kind, definition, payload in unpack_work(frames):
                self._take(number, kind, definition, payload)
        elif kind == CANCEL:
            self._cancel(set(unpack_numbers(frames)))
        elif kind == RECALL:
            returned = [task.number for task in self.todo]
            self.todo.clear()
            self.put(pack_numbers(RETURNED, returned))
        elif kind == STOP:
            self.stops = True

    def _take(self, number, kind, definition, payload):
        if kind in DEFINES:
            self.known[number] = self.world.names[number], kind == DEFINE_OVERLAPPING
        elif kind == FORGET:
            self.known.pop(number, None)
        elif kind == STORE:
            self.claims[number] = self.claims.get(number, 0) + 1
            self.store[number] = loads(payload)
        elif kind == FETCH:
            self.requested.append(number)
        elif kind == DROP:
            self.claims[number] -= definition
            assert self.claims[number] >= 0
            if not self.claims[number]:
                del self.claims[number], self.store[number]
        elif kind == CALLS:
            for each, args in zip(*loads(payload), strict=True):
                self._enqueue(each, definition, [self.world.key_of(args)])
        elif kind == CALL_CHUNK:
            task = self._enqueue(number, definition, list(unpack_calls(payload)[2]))
            task.is_chunk = True
        else:
            task = self._enqueue(number, definition, [])
            task.keeps, task.payload, task.kind = bool(kind & KEEP), payload, kind & ~KEEP

    def _enqueue(self, number, definition, keys):
        assert definition in self.known, f"function {definition} was not sent to {self.name}"
        name, overlaps = self.known[definition]
        task = Running(number, name, keys, overlaps)
        self.todo.append(task)
        return task

    def _cancel(self, numbers):
        withdrawn = [task for task in self.todo if task.number in numbers]
        if withdrawn:
            for task in withdrawn:
                self.todo.remove(task)
            entries = [
                pack_outcome(task.number, WITHDRAWN, 0.0, 0.0, b"", b"") for task in withdrawn
            ]
            self.put(pack_outcomes(entries))
        self.interrupted |= numbers & (self.running.keys() | {0})

    def can_begin(self):
        return bool(self.todo) and (
            not self.running
            or (self.todo[0].overlaps and all(each.overlaps for each in self.running.values()))
        )

    def begin(self):
        task = self.todo.popleft()
        self.started = task.number
        self.running[task.number] = task
        if task.name == "push":
            task.keys = [PREPARING]
            assert not self.running.keys() - {task.number}
        elif task.payload is not None:
            task.keys = [self.world.key_of(self._open(task.payload, task.kind))]
        self.world.on_begun(self, task, task.keys[:1])

    def _open(self, payload, kind):
        with mock.patch.object(placeholders, "local_store", self):
            opened = loads(payload) if payload else ()
        return opened[0] if kind == CALL_KEYWORDS else opened

    def value(self, number):
        """As `resolve` in a pickle finds it."""
        return self.store[number]

    def pack_requested(self):
        number = self.requested.popleft()
        now = self.world.reactor.now
        if number in self.store and self.world.choose(8) != 7:
            entry = pack_outcome(number, PACKED, now, now, dumps(self.store[number]), b"")
        else:
            error = pack_exception(Failed("pickling"), dumps)
            entry = pack_outcome(number, NOT_PACKED, now, now, error, b"")
        self.put(pack_outcomes([entry]))

    def next_call(self, task):
        """One more call of a chunk is done, and the next begins."""
        task.done += 1
        self.world.on_begun(self, task, task.keys[task.done : task.done + 1])

    def cut(self, task):
        """As the control thread does, if the chunk takes long."""
        rest = len(task.keys) - task.done - 1
        task.was_cut = True
        del task.keys[task.done + 1 :]
        if rest or task.done:
            values = [value_of(key) for key in task.keys[: task.done]]
            payload = split_head(task.done, rest, RUNNING) + pack_answers(values, False, None, None)
            task.sent = task.done
            now = self.world.reactor.now
            self.put(pack_outcomes([pack_outcome(task.number, SPLIT, now, now, payload, b"")]))

    def end(self, task, error=None):
        """The running call ends, and with it the task."""
        del self.running[task.number]
        self.interrupted.discard(task.number)
        if task.name == "push" and error is None:
            self.pushed |= loads(task.payload)[1]
        if error is not None:
            self.world.on_attempt_failed(self, task.keys)
        now = self.world.reactor.now
        times = now, now + SECONDS[task.name]
        if task.is_chunk:
            done = task.keys[task.sent : task.done] if error else task.keys[task.sent :]
            rest = len(task.keys) - task.done - 1 if error else 0
            packed = pack_exception(error, dumps) if error else None
            payload = split_head(len(done) + bool(error), rest, FAILED if error else ENDED)
            payload += pack_answers([value_of(key) for key in done], False, packed, None)
            entry = pack_outcome(task.number, SPLIT, *times, payload, b"")
        elif error is not None:
            entry = pack_outcome(task.number, ERROR, *times, pack_exception(error, dumps), b"")
        elif task.keeps:
            self.store[task.number] = value_of(task.keys[0])
            self.claims[task.number] = self.claims.get(task.number, 0) + 1
            entry = pack_outcome(task.number, VALUE, *times, bytes(8) + b"int", b"")
        else:
            entry = pack_outcome(task.number, VALUE, *times, dumps(value_of(task.keys[0])), b"")
        form = self.world.choose(8)
        if form < 4 and error is None and not (task.is_chunk or task.keeps):
            value = value_of(task.keys[0])
            self.outcomes.append(pack_values([task.number], [times[0]], [times[1]], [value]))
        else:
            self.outcomes.append(entry)
        if form < 7 or task.is_chunk:
            self.kept.append(entry)
        if not task.overlaps or not self.running:
            self.last_done = task.number
        if form == 7 and not task.is_chunk:  # as if it were too large to be kept
            if self.world.choose(8) == 7:  # so it is sent in pieces, and not all of them are
                self.world.die(self, -9)
            else:
                self.flush()

    def flush(self):
        """All outcomes are sent."""
        entries, self.outcomes = self.outcomes, []
        self.put(pack_outcomes(entries))
        self.sent = self.last_done
        self.kept.clear()

    def put(self, frames):
        self.unread.append(frames)

    def hello(self):
        self.put(pack_numbers(HELLO, (PROTOCOL, self.pid)))


class ScriptedEngine(FakeEngine):
    def __init__(self, world):
        super().__init__()
        self._world = world

    def start(self, number, name, index):
        drone = ScriptedDrone(self._dispatcher, number, name, None)
        drone.world = self._world
        self._world.drones.append(drone)
        return drone

    def initializer(self, initializer, initargs):
        return initializer, initargs

    def snapshot(self):
        return None

    def adopt(self, snapshot):
        pass

    def discard(self, snapshot):
        pass

    def left_out(self, name):
        return None


class SteppedReactor(FakeReactor):
    """A critical section and its deliveries are two steps, between which others may act."""

    turn = FakeReactor.critical_section
    settle = FakeReactor.turn


class Interleaving:
    """One pool with its callers and drones. Make it, take some `step`s, and `finish`."""

    def __init__(self, choose):
        self.choose = choose
        self.reactor = SteppedReactor()
        self.drones = []
        self.names = {}  # of functions, by their numbers
        self.submitted = {}  # of plain calls, by key
        self.chunks = []  # and the keys of each
        self.calls = {}  # what was asked for, by key
        self.begun = {}  # drones, by key
        self.failed, self.stopped, self.cancelled = set(), set(), set()
        self.pushes = []  # names, each with its step
        self.leased = []
        self.fetched = []  # promises of kept values in packed form, with their keys
        self.cancels_all = self.is_closed = False
        self.keys = 0
        self.history = []
        config = {
            "width": 1 + choose(2),
            "max_tasks": (None, None, 1, 3)[choose(4)],
            "hang_timeout": (None, 5.0)[choose(2)],
            "initializer": (None, brief)[choose(4) == 3],
            "on_death": ("replace", "replace", "replace", "break", "end")[choose(5)],
            "resources": ((), (), (("db", 2),))[choose(3)],
        }
        self.is_lone = config["on_death"] == "end"  # a `Drone`, whose tasks are all for it alone
        if self.is_lone:
            config["max_tasks"] = None
        size = 1 if self.is_lone else 1 + choose(3)
        self.dispatcher = dispatcher_of(
            self.reactor, size, ready=False, engine=ScriptedEngine(self), **config
        )
        self.config = config
        if config["initializer"] is not None:
            self.names[self.dispatcher.registry.define(brief).number] = "brief"

    # -- callers -----------------------------------------------------------------------------------

    def new_key(self):
        self.keys += 1
        return self.keys

    def submit(self):
        choose = self.choose
        function = (brief, lasting, overlapped)[choose(3)]
        retries, retry = 0 if self.is_lone else choose(3), None
        if choose(3) == 2:
            retries, kinds = choose(3), (Failed, (Failed, TimeoutError), TimeoutError)[choose(3)]
            retry = Retry(retries, on=kinds, delay=(0, 0.5)[choose(2)], jitter=False)
        priority, needs = 0, ()
        if self.config["resources"]:
            priority, needs = choose(3) - 1, ((), (), (("db", 1),), (("db", 2),))[choose(4)]
        options = TaskOptions((None, None, 0.5)[choose(3)], retry or retries, priority, needs)
        target = self.dispatcher.supervisor.first if self.is_lone else None
        if target is None and choose(6) == 5 and self.dispatcher.handles:
            target = self.dispatcher.handles[choose(len(self.dispatcher.handles))]
        inputs = []
        keeps = choose(4) == 3
        if self.submitted and choose(4) == 3:
            inputs = [1 + choose(self.keys) for _ in range(1 + choose(2))]
            inputs = [key for key in inputs if key in self.submitted]
        key = self.new_key()
        self.calls[key] = {
            "retries": retries,
            "retry": retry,
            "target": target,
            "inputs": inputs,
            "timeout": options.timeout,
            "pushes": [*self.pushes],
        }
        promises = [self.submitted[each].promise for each in inputs]
        self.note("submits", key, function.__name__, options, target or "", inputs)
        try:
            task = (KeptTask if keeps else Task)(self.dispatcher)
            self.dispatcher.submit(function, (key, *promises), {}, target, options, task)
        except (RuntimeError, DroneDied):  # BrokenProcessPool among them: it takes no more
            assert (
                self.dispatcher.refusal is not None
                or target.state >= State.RETIRING
                or target.retire_when_ready
            )
            return
        self.names[task.definition.number] = function.__name__
        self.submitted[key] = task

    def submit_chunk(self):
        keys = [self.new_key() for _ in range(2 + self.choose(4))]
        retries = self.choose(2)
        self.note("submits chunk", keys, "retries", retries)
        for key in keys:
            self.calls[key] = {
                "retries": retries,
                "retry": None,
                "target": None,
                "inputs": [],
                "timeout": None,
                "pushes": [*self.pushes],
            }
        definition = self.dispatcher.registry.define(brief)
        self.names[definition.number] = "brief"
        task = Chunk(self.dispatcher, definition, pack_calls(ITEMS, False, keys), len(keys))
        task.set_options(TaskOptions(None, retries, self.choose(3) - 1))
        try:
            self.dispatcher.submit_task(task)
        except RuntimeError:
            assert self.dispatcher.refusal is not None
            return
        self.chunks.append((task, keys))

    def cancel(self):
        if self.submitted:
            key = list(self.submitted)[self.choose(len(self.submitted))]
            self.note("cancels", key)
            if self.submitted[key].promise.cancel(running=bool(self.choose(2))):
                self.cancelled.add(key)

    def cancel_chunk(self):
        if self.chunks:
            task, keys = self.chunks[self.choose(len(self.chunks))]
            self.note("cancels chunk", keys)
            self.cancelled.update(keys)
            parts = [task]
            for part in parts:
                part.promise.cancel()
                parts += part.followers

    def close(self):
        how = self.choose(6)
        self.note("closes", ("", "", "", "cancelling queued", "cancelling", "killing")[how])
        self.is_closed = True
        if how < 3:
            self.dispatcher.close()
        elif how < 5:
            self.cancels_all = True
            self.dispatcher.close(cancel=True, running=how == 4)
        else:
            self.cancels_all = True
            self.dispatcher.kill("the test said so")

    def retire(self):
        if self.dispatcher.handles:
            handle = self.dispatcher.handles[self.choose(len(self.dispatcher.handles))]
            self.note("retires", handle)
            self.dispatcher.supervisor.retire(handle)

    def refresh(self):
        if self.dispatcher.refusal is None:
            self.note("refreshes")
            self.dispatcher.supervisor.replace_all(None, Promise())

    def resize(self):
        if self.dispatcher.refusal is None:
            size = 1 + self.choose(4)
            self.note("resizes to", size)
            self.dispatcher.supervisor.resize(size)

    def push(self):
        if self.dispatcher.refusal is None and not self.is_lone:
            value = len(self.pushes) + 1
            names = ({"a": value}, {"b": value}, {"a": value, "b": value})[self.choose(3)]
            self.note("pushes", names)
            preparation = self.dispatcher.supervisor.preparation
            step = preparation.capture_push(names)
            self.names[step.task.definition.number] = "push"
            self.pushes.append((names, step))
            self.reactor.post(lambda: preparation.add_push(step))
            self.reactor.turn()  # which the caller waits for

    def interrupt(self):
        if self.dispatcher.handles:
            handle = self.dispatcher.handles[self.choose(len(self.dispatcher.handles))]
            self.note("interrupts", handle)
            self.dispatcher.interrupt(handle)

    def give_up(self):
        """A caller drops its promise, and with it the handle of a kept value."""
        if self.submitted:
            key = list(self.submitted)[self.choose(len(self.submitted))]
            if self.submitted[key].promise.done():
                self.note("gives up", key)
                self.check_outcome(key, self.submitted.pop(key))

    def fetch(self):
        """What `Kept.value` does before it waits."""
        kept = [
            key
            for key, task in self.submitted.items()
            if isinstance(task, KeptTask) and task.promise.done() and not failed(task)
        ]
        if kept:
            key = kept[self.choose(len(kept))]
            self.note("fetches", key)
            fetched = Promise()
            self.fetched.append((key, fetched))
            owner = self.submitted[key].promise.result()._get_content()
            self.reactor.post(lambda: self.dispatcher.directory.fetch(owner, fetched))

    def lease(self):
        """Another process takes tasks, or gives some back, in one of the ways that it can."""
        if not self.leased:
            keys = {id(task): key for key, task in self.submitted.items() if type(task) is Task}
            self.note("leases")
            many = 1 + self.choose(3)
            leased = leases.lease(self.dispatcher, many, lambda task: id(task) in keys)
            self.leased = [(task, keys[id(task)]) for task in leased]
            return
        tasks, keys = [task for task, _ in self.leased], [key for _, key in self.leased]
        self.leased = []
        how = self.choose(3)
        self.note("lease", ("comes back", "is done", "is lost")[how])
        if how == 0:
            leases.requeue_unstarted(self.dispatcher, tasks)
            return
        self.on_begun(None, None, keys)
        if how == 1:
            for task, key in zip(tasks, keys, strict=True):
                self.reactor.deliver(partial(fulfill, task.promise, value_of(key)))
            leases.on_settled(self.dispatcher, tasks)
        else:
            leases.on_lost(self.dispatcher, tasks, DroneDied("the other process was lost"))

    # -- drones ------------------------------------------------------------------------------------

    def key_of(self, args):
        if not args:
            return PREPARING
        key, *inputs = args
        assert inputs == [value_of(each) for each in self.calls[key]["inputs"]]
        return key

    def on_begun(self, drone, task, keys):
        for key in keys:
            if key == PREPARING:
                continue
            before = self.begun.setdefault(key, [])
            assert len(before) <= self.calls[key]["retries"], f"call {key} runs too often"
            pushed = [names for names, step in self.calls[key]["pushes"] if not step.is_withdrawn]
            for name in ("a", "b") if drone is not None else ():
                value = max((names[name] for names in pushed if name in names), default=0)
                assert drone.pushed.get(name, 0) >= value, f"call {key} overtakes a push"
            assert all(
                each is None or each.is_gone or each.state >= State.STOPPING for each in before
            ), f"call {key} runs twice"
            before.append(drone)

    def has_failed(self, task):
        """Whether an attempt has: then the next ones fail more often, so that some call uses up
        all.
        """
        begun = self.begun.get(task.keys[task.done], ())
        return any(isinstance(each, FailedAttempt) for each in begun)

    def on_attempt_failed(self, drone, keys):
        for key in keys:
            if key != PREPARING and self.calls[key]["retry"] is not None:
                self.begun[key] = [
                    FailedAttempt(each) if each is drone else each for each in self.begun[key]
                ]

    def acts_of(self, drone):
        """The acts that this drone can do now; the likely ones several times."""
        acts = [("dies", self.die, drone, -9)] if self.choose(4) == 3 else []
        if drone.pid is None:
            return [*acts, *[("starts", self.start, drone)] * 9]
        acts += [("is quiet or not", self.change_quiet, drone)] * (1 + 3 * drone.quiet)
        if drone.quiet:
            return acts
        if drone.inbox:
            acts += [("reads", drone.read)] * 3
        if drone.can_begin():
            acts += [("begins", drone.begin)] * 3
        for task in drone.running.values():
            acts += [("ends", self.end, drone, task)] * 3
            if task.is_chunk and task.done < len(task.keys) - 1:
                acts.append(("calls", drone.next_call, task))
                if not task.was_cut:
                    acts.append(("cuts", drone.cut, task))
        if drone.requested:
            acts += [("packs", drone.pack_requested)] * 3
        if drone.outcomes:
            acts += [("sends", drone.flush)] * 3
        return acts

    def change_quiet(self, drone):
        drone.quiet = not drone.quiet

    def end(self, drone, task):
        error = None
        if task.number in drone.interrupted or 0 in drone.interrupted:
            drone.interrupted.discard(0)
            if self.choose(3):
                error = KeyboardInterrupt("interrupted by the controller")
                self.stopped.update(task.keys)
        elif self.choose(2 if self.has_failed(task) else 5) == 1:
            error = Failed(task.keys[task.done])
            self.failed.update(task.keys)
        else:
            while task.is_chunk and task.done < len(task.keys) - 1:
                drone.next_call(task)
        drone.end(task, error)

    def start(self, drone):
        self.dispatcher.supervisor.on_started(drone, PID + drone.number)
        drone.hello()

    def die(self, drone, exitcode):
        drone.is_gone = True
        self.reactor.post(lambda: self.dispatcher.supervisor.on_died(drone, exitcode))

    def receive(self, drone):
        """The controller reads the next message of a drone."""
        frames = drone.unread.popleft()
        if drone not in self.dispatcher.handles:
            return
        trick = self.choose(40)
        self.note(
            "message of", drone, message_type(frames), {39: "malformed", 38: "twice"}.get(trick, "")
        )
        if trick == 39 and message_type(frames) != HELLO:
            frames = [frames[0], b"?", *frames[2:]]
        if trick == 38:
            drone.unread.appendleft(frames)
        try:
            handle_message(drone.dispatcher, drone, frames)
        except Malformed:
            self.dispatcher.watch_for_lost_answer(drone)

    # -- steps -------------------------------------------------------------------------------------

    def step(self):
        choose = self.choose
        what = choose(16)
        if what < 3:
            self.submit()
        elif what < 8:
            drones = [each for each in self.drones if not each.is_gone]
            if drones:
                drone = drones[choose(len(drones))]
                acts = self.acts_of(drone)
                if acts:
                    name, act, *args = acts[choose(len(acts))]
                    self.note(drone, name)
                    act(*args)
        elif what < 11:
            drones = [each for each in self.drones if each.unread]
            if drones:
                self.receive(drones[choose(len(drones))])
        elif what < 13:
            self.note("a critical section")
            self.reactor.turn()
        elif what == 13:
            self.note("deliveries")
            self.reactor.deliver_all()
        elif what == 14:
            seconds = (0.002, 0.02, 0.3, 2.5)[choose(4)]
            self.note("time", seconds)
            self.reactor.pass_(seconds)
        else:
            rare = (
                self.cancel, self.interrupt, self.close, self.refresh, self.retire, self.lease,
                self.submit_chunk, self.submit_chunk, self.cancel_chunk, self.give_up, self.fetch,
                self.give_up, self.fetch, self.resize, self.resize, self.push, self.push,
            )  # fmt: skip
            rare[choose(3 if self.is_lone else len(rare))]()
        self.check()

    def note(self, *words):
        self.history.append(" ".join(map(_name, words)))

    def check(self):
        """The dispatcher's sums agree with what is in flight, and no drone is too many."""
        assert len(self.dispatcher.current_drones()) <= self.dispatcher.size
        for handle in self.dispatcher.handles:
            if not handle.alive:  # only its late answers are awaited
                continue
            in_flight = handle.in_flight.values()
            overlapping = sum(task.definition.overlaps for task in in_flight)
            assert handle.overlapping == overlapping
            assert overlapping in (0, len(in_flight))
            assert overlapping <= self.config["width"]
            known = [task for task in in_flight if not task.definition.overlaps]
            assert handle.unknown == sum(task.sending.estimate < 0 for task in known)
            assert abs(handle.load - sum(max(task.sending.estimate, 0) for task in known)) < 1e-9
            assert all(task.handle is handle for task in in_flight)

        held = [
            amount
            for handle in self.dispatcher.handles
            for task in handle.in_flight.values()
            for _, amount in task.resources
        ]
        for name, size in self.config["resources"]:
            assert self.dispatcher.assignment.resources.free()[name] == size - sum(held) >= 0
        priorities = [task.priority for task in self.dispatcher.assignment.queue]
        assert priorities == sorted(priorities, reverse=True)
        validate(self.dispatcher)

    # -- the end -----------------------------------------------------------------------------------

    def finish(self):
        """Everybody does their part; then no promise is left, and the pool ends when closed."""
        if self.leased:
            leases.requeue_unstarted(self.dispatcher, [task for task, _ in self.leased])
            self.leased = []
        self.cooperate(
            lambda: (
                all(task.promise.done() for task in self.all_tasks())
                and all(fetched.done() for _, fetched in self.fetched)
                and not any(handle.in_flight for handle in self.dispatcher.handles)
                and (
                    self.is_lone
                    or self.dispatcher.refusal is not None
                    or len(self.dispatcher.current_drones()) == self.dispatcher.size
                )
            )
        )
        for handle in self.dispatcher.handles:
            if handle.state is State.READY:
                assert not (handle.in_flight or handle.unknown or handle.overlapping)
                assert handle.load == 0.0
                assert all(
                    task.promise.done() for task in handle.dedicated
                )  # if it is unresponsive
        for key, fetched in self.fetched:
            if fetched.cancelled() or fetched.exception() is not None:
                assert isinstance(fetched.exception(), Lost | Failed)
            else:
                assert loads(fetched.result()) == value_of(key)
        self.fetched.clear()
        self.give_up_all()
        self.cooperate(self.nothing_is_kept)
        self.dispatcher.close()
        self.cooperate(lambda: self.dispatcher.has_ended)
        assert not self.dispatcher.handles
        assert self.dispatcher.pending() == 0
        for task, keys in self.chunks:
            self.check_chunk(task, keys)

    def give_up_all(self):
        while self.submitted:
            self.check_outcome(*self.submitted.popitem())

    def nothing_is_kept(self):
        kept = [each for each in self.drones if each.store and not each.is_gone]
        if kept:
            gc.collect()
        return not kept

    def all_tasks(self):
        tasks = list(self.submitted.values()) + [task for task, _ in self.chunks]
        for task in tasks:
            tasks += task.followers if isinstance(task, Chunk) else ()
        return tasks

    def cooperate(self, is_over):
        self.settle()
        for _ in range(300):
            if is_over():
                return
            for drone in self.drones[:]:
                self.act(drone)
            self.settle()
            self.reactor.pass_(0.3)
            self.settle()
        left = [task.number for task in self.all_tasks() if not task.promise.done()]
        handles = [
            f"{each.name} {each.state.name} {each.unresponsive or ''} "
            f"in flight {list(each.in_flight)}, there {list(each.running)} {len(each.todo)}"
            for each in self.dispatcher.handles
        ]
        raise AssertionError(f"tasks {left} are left, and {handles}")

    def act(self, drone):
        if drone.is_gone:
            return
        drone.quiet = False
        if drone.doomed:
            self.die(drone, -9)
            return
        if drone.pid is None:
            self.start(drone)
        while not drone.is_gone and (drone.inbox or drone.todo or drone.running):
            if drone.can_begin():
                drone.begin()
            elif drone.inbox:
                drone.read()
            else:
                task = next(iter(drone.running.values()))
                interrupted = bool(drone.interrupted & {0, task.number})
                drone.interrupted.discard(0)
                error = None
                if interrupted:
                    error = KeyboardInterrupt()
                    self.stopped.update(task.keys)
                elif self.has_failed(task) and self.choose(2):
                    error = Failed(task.keys[task.done])
                    self.failed.update(task.keys)
                else:
                    while task.is_chunk and task.done < len(task.keys) - 1:
                        drone.next_call(task)
                drone.end(task, error)
        if drone.is_gone:
            return
        while drone.requested:
            drone.pack_requested()
        if drone.outcomes:
            drone.flush()
        if drone.stops:
            self.die(drone, 0)

    def settle(self):
        self.reactor.settle()
        for drone in self.drones:
            while drone.unread:
                frames = drone.unread.popleft()
                if drone in self.dispatcher.handles:
                    try:
                        handle_message(drone.dispatcher, drone, frames)
                    except Malformed:
                        self.dispatcher.watch_for_lost_answer(drone)
                self.check()
                self.reactor.settle()

    def check_outcome(self, key, task):
        call, begun = self.calls[key], self.begun.get(key, [])
        if task.promise.cancelled():
            assert key in self.cancelled or self.cancels_all or call["inputs"]
            return
        error = task.promise.exception()
        if error is None:
            assert isinstance(task, KeptTask) or task.promise.result() == value_of(key)
            assert begun
        elif isinstance(error, Lost):
            assert call["inputs"]
        elif isinstance(error, Failed):
            assert key in self.failed or call["inputs"]  # the pickling of a kept one, say
            if key in self.failed and not call["inputs"]:
                self.check_attempts(call, error)
        elif isinstance(error, KeyboardInterrupt):
            assert key in self.stopped or call["inputs"]
        elif isinstance(error, TimeoutError):
            assert call["timeout"] or call["inputs"]
        elif isinstance(error, DroneDied):
            assert (
                any(each is None or each.is_gone for each in begun)
                or (call["target"] is not None and call["target"].is_gone)
                or call["inputs"]
                or self.config["on_death"] != "replace"
                or any("malformed" in each for each in self.history)  # it may have been its answer
            ), f"call {key}: {error}, but had not begun"
        else:
            assert isinstance(error, RuntimeError | CancelledError), error
            released = call["target"] is not None and call["target"].is_gone  # before it was queued
            assert self.dispatcher.refusal is not None or call["inputs"] or released

    def check_attempts(self, call, error):
        """A failed call was repeated as often as its `Retry` says."""
        retry, is_over = call["retry"], self.cancels_all or self.dispatcher.state.broken is not None
        if retry is None or is_over or (call["target"] is not None and call["target"].is_gone):
            return
        assert (
            not retry.covers(error)
            or retry.times == 0
            or (f"failed {retry.times + 1} times; this is the last error" in error.__notes__)
        )

    def check_chunk(self, task, keys):
        if task.promise.cancelled() or task.promise.exception() is not None:
            if task.promise.cancelled():
                assert self.cancels_all or self.cancelled.issuperset(keys)
            return
        answers = task.promise.result()
        values = list(answers)
        assert values == [value_of(key) for key in keys[: len(values)]]
        done = len(values)
        if answers.error is not None:
            assert self.failed.union(self.stopped).issuperset(keys[done : done + 1])
            return
        for follower in task.followers:
            self.check_chunk(follower, keys[done : done + follower.count])
            done += follower.count
        assert done == len(keys), f"of the chunk {keys} only {done} were answered"


def failed(task):
    return task.promise.cancelled() or task.promise.exception() is not None


def _name(word):
    return word.name if isinstance(word, ScriptedDrone) else str(word)


def interleave(choose, steps):
    world = Interleaving(choose)
    try:
        for _ in range(steps):
            world.step()
        world.note("the end")
        world.finish()
    except BaseException as error:
        error.add_note("\n".join([str(world.config), *world.history]))
        raise


def main():
    """Try interleavings by their seeds: ``python tests/scripted_drones.py FIRST COUNT [STEPS]``."""
    first, count, steps = map(int, [*sys.argv[1:], 60][:3])
    began = monotonic()
    gc.freeze()  # what was imported need not be looked at again
    for seed in range(first, first + count):
        try:
            interleave(Random(seed).randrange, steps)
        except BaseException:
            print(f"seed {seed}")
            raise
    print(f"{count} interleavings of {steps} steps in {monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
