"""What becomes of the tasks of a pool, which drone gets which, and which drones there are
(pool/pool_state.py, pool/assignment.py, pool/population.py), in any order of events, without a
process, a thread, a clock or a promise.

    seed ──> Walk.step ──> submits, cancels, answers, errors, recalls, deaths, leases, closes,
                 │         starts, failed starts, resizes, refreshes, ...
                 ├──> actions, carried out some time later, as the loop's deliveries are
                 └──> assign, validate, and `Walk.check`: a second, small model

The model knows what was submitted, what has begun and how often, and what must settle: each task
settles once; nothing that had begun runs again without retries, or before its delay is over;
nothing that had not begun is lost, unless its drone or the pool has gone; everything ends. There
are as many drones as wanted, unless one could not be started a moment ago, or there is no room; one
that retires stops when its last task has gone; a pool breaks for its reasons only; one that is
closed ends when nothing is left, and starts no drone after that.

Each fault of `FAULTS` is planted by hand, and found."""

import errno
import random
import weakref
from collections import Counter, deque
from itertools import chain
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polycephaly.errors import DroneDied
from polycephaly.pool import assignment as assignments
from polycephaly.pool import leases, pool_state, population
from polycephaly.pool.assignment import Assignment
from polycephaly.pool.chunk import Chunk
from polycephaly.pool.drone_record import DroneRecord
from polycephaly.pool.interfaces import State
from polycephaly.pool.limits import Interrupt, Kill, Limits, Look, LookAt, TimeOut
from polycephaly.pool.pool_state import (
    Broken,
    Cancel,
    Divide,
    Fail,
    PoolState,
    Refuse,
    Restarted,
    SetTimer,
    SettleChunk,
)
from polycephaly.pool.population import (
    START_RETRY_SECONDS,
    STOP_GRACE_SECONDS,
    Close,
    Complete,
    Death,
    EndPool,
    Evacuate,
    Population,
    Recall,
    ReportDeath,
    Start,
    Stop,
    TryAgain,
    TurnAgain,
)
from polycephaly.pool.queues import insert_in_order
from polycephaly.pool.resources import Resources
from polycephaly.pool.task_state import DELAYED, ENDING, INBOUND, QUEUED, WAITING
from polycephaly.promises.promise import FINISHED, PENDING
from polycephaly.runtime.tuning import tuning
from polycephaly.wire.map_chunks import ITEMS, pack_calls
from polycephaly.wire.placeholders import PayloadWithRefs

EVENTS = 20
SIZES = (("db", 2), ("gpu", 1))
DELAY = 0.5
FEW, SOME = 2, 3  # in place of MAX_FAILED_STARTS and MAX_KILLED_STARTS


@pytest.fixture(autouse=True)
def few_tries(monkeypatch):
    monkeypatch.setattr(population, "MAX_FAILED_STARTS", FEW)
    monkeypatch.setattr(population, "MAX_KILLED_STARTS", SOME)


class Settled:
    """In place of a promise."""

    _state = PENDING

    def done(self):
        return self._state != PENDING


class FakeTask:
    """What pool_state.py and assignment.py know of a task."""

    args, payload, keeps, count, weight = (1,), b"", False, 1, assignments.Task.weight
    target = preferred_drone = sending = timeout = retry = overrun = answer = lost_call = None
    preferred_since, position, resources, priority, retries = 0.0, 0, (), 0, 0
    recompute_payload, runs_elsewhere, timed_out, label = None, False, False, "a call"
    is_divisible, calls_left = False, 1
    shares_pickle = assignments.Task.shares_pickle

    def __init__(self, number, definition, **options):
        self.number = self.call_number = number
        self.definition, self.promise, self.state = definition, Settled(), INBOUND
        vars(self).update(options)
        self.most_attempts = 1 + self.retries

    @property
    def handle(self):
        return None if self.sending is None else self.sending.handle()

    def next_delay(self, error):
        return DELAY if self.retry and self.retries > 0 else None

    def with_attempts(self, error):
        return error

    def start_over(self):
        self.number += 10_000
        self.retries -= 1
        self.sending = self.overrun = self.answer = None
        self.timed_out = False


def as_chunk(chunk, number, most_attempts, family):
    """A chunk, of which the walk settles the promise. Its rests are of the same family."""
    chunk.promise, chunk.number, chunk.family = Settled(), number, family
    chunk.most_attempts = most_attempts
    return chunk


def function(seconds=None, overlaps=False):
    return SimpleNamespace(seconds=seconds, overlaps=overlaps, captures=False, label="a call")


def config_of(size, on_death="replace", max_tasks=None):
    name = "pool.{}".format
    return SimpleNamespace(size=size, on_death=on_death, max_tasks=max_tasks, drone_name=name)


class Walk:
    """One interleaving. `choose(n)` gives a number below n."""

    def __init__(self, choose):
        self.choose = choose
        self.width, self.max_tasks = 1 + self.choose(3), [None, None, 3][self.choose(3)]
        self.size, self.on_death = 1 + self.choose(3), "replace"
        if not self.choose(6):
            self.on_death = "break"
        elif not self.choose(8):  # a lone drone
            self.size, self.max_tasks, self.on_death = 1, None, "end"
        self.assignment = Assignment(self.width, self.max_tasks, SIZES)
        self.assignment.runs_one_at_a_time = not self.choose(6)
        self.assignment.prepare = None  # no task takes kept values
        self.new, self.actions = [], []  # those that are not noted yet, and not carried out
        self.unsettled = {}  # in the order of their calls
        config = config_of(self.size, self.on_death, self.max_tasks)
        self.state = PoolState(config, self.assignment, deque(), self.unsettled, self.do)
        self.population = self.state.population
        self.population.can_start = self.can_start
        self.functions = [function(1e-4), function(tuning.batch_seconds), function()]
        self.functions += [function(1e-5, overlaps=True)] * (self.width > 1)
        self.numbers = iter(range(1, 10_000))
        self.now = 0.0
        self.timer = None
        self.queued = {}  # those that were submitted and are not with a drone, in that order
        self.sent = {}  # the drone of each other task
        self.leased = []  # those that another process has
        self.attempts = Counter()  # how often a task has begun, with what another process has run
        self.earliest = {}  # when a task may begin that has failed
        self.interrupted = {}  # since when
        self.timed_out = set()  # for good
        self.looks, self.debugged, self.was_debugged = [], set(), set()
        self.recalled = []  # drones that are to give back what they have not begun
        # How often and since when a drone was found with tasks that an idle one could run.
        self.stuck = {}
        self.dead = None  # a drone
        self.is_cancelled = False  # nothing runs again
        # Of calls of chunks, by family and item: how often each has begun, which are answered, and
        # which were lost or cancelled. Of families, how many calls they have.
        self.call_attempts, self.answers, self.lost_calls = Counter(), Counter(), set()
        self.cancelled_calls, self.families = set(), {}
        self.places = {}  # of tasks that were returned: with which others, and where among them
        self.was_returned, self.was_moved = set(), set()
        self.room = 2 * self.size  # drones that may be there at a time
        self.reports = []  # of drones that could not be started
        self.excused_until = 0.0  # as many drones as wanted need not be there
        self.is_calm = False  # nothing fails any more
        # Of some pools, drones take long to start, or many cannot; and most die in one way.
        self.is_troubled = not self.choose(3)
        self.patience, self.luck = 1, 12
        if self.is_troubled:
            self.patience, self.luck = 2 + self.choose(3), [12, 3][self.choose(2)]
        self.usual_status = [-9, -11, -15][self.choose(3)]
        self.was_complete = self.is_refreshing = self.has_begun = False
        self.bad_starts = self.too_large_in_a_row = 0
        self.terminated = self.calls_done = self.calls_before = 0
        self.was_ready, self.unprepared, self.stopped = set(), set(), {}
        self.is_broken = self.has_ended = False
        self.told = set()  # kinds of actions, since this was cleared
        self.population.start_missing()
        if self.choose(4):
            self.is_calm = True
            self.bring_up_all()
            self.is_calm = False

    def run(self):
        for _ in range(EVENTS):
            self.step()
        self.is_calm = True
        for _ in range(1000):  # one that ignores its interrupt takes ten
            if not (self.unsettled or self.sent or self.actions or self.state.closing):
                self.state.close(set(), cancel=False, cancel_running=False)
            if self.has_ended and not self.unsettled:
                self.outlive()
                self.check_calls()
                return
            self.go_on()
            self.assign()
            self.carry_out(len(self.actions))
        waiting = {task.number: task.state.name for task in self.unsettled}
        drones = {drone.name: drone.state.name for drone in self.assignment.drones}
        raise AssertionError(f"{waiting} and {drones} never end")

    def outlive(self):
        """What comes after the end changes nothing. A thread may have seen the pool open before."""
        self.state.inbound.append(FakeTask(next(self.numbers), self.functions[0]))
        self.population.ended()
        self.population.resize(self.size + 1, self.now)
        self.now += 2 * STOP_GRACE_SECONDS
        self.state.due(self.now)
        self.note_actions()

    def go_on(self):
        """Each drone does its part: everything ends."""
        self.note_actions()
        self.now += DELAY if self.unsettled else STOP_GRACE_SECONDS
        self.take_reports()
        self.look_at_timer()
        while self.leased:
            self.end_lease()
        while self.state.awaiting_inputs:
            self.find_inputs()
        while self.recalled:
            self.recall()
        for drone in [*self.assignment.drones]:
            drone.note_response(None)
            ignores_stop = drone.number % 3 == 0
            if drone.is_killed or (drone.state is State.STOPPING and not ignores_stop):
                self.die(drone)
        self.debugged.clear()
        self.bring_up_all()
        for drone in [*self.assignment.drones]:
            self.pack(drone)
        self.answer()

    def step(self):
        self.now += self.choose(3) / 100
        self.take_reports()
        self.look_at_timer()
        for drone in [*self.assignment.drones]:
            if drone.state < State.READY and not self.choose(self.patience):
                self.bring_up(drone)
        acts = [self.submit] * 10 + [self.submit_chunk] * 4 + [self.answer] * 12
        acts += [self.cancel, self.recall] * 2
        acts += [self.pause, self.kill, self.retire] * 2 + [self.die] * 4
        acts += [self.debug, self.lease, self.end_lease, self.end, self.find_inputs]
        acts += [self.hang] * 2 + [self.wait] * 4
        if self.is_troubled:
            acts += [self.resize, self.refresh, self.compute_again, self.exceed_memory] * 2
            acts += [self.pack, self.keep_memory]
        for _ in range(1 if self.choose(4) else 2):  # in one turn
            acts[self.choose(len(acts))]()
        self.assign()
        self.carry_out(self.choose(1 + len(self.actions)))

    # -- what the dispatcher does ------------------------------------------------------------------

    def look_at_timer(self):
        if self.timer is not None and self.timer <= self.now:
            self.timer = None
            self.state.due(self.now)
            self.note_actions()
            self.look()
            self.note_queued()
        self.check_limits()

    def note_actions(self):
        """At once, what a timer or a handle does; the rest, with promises, comes later."""
        new, self.new[:] = [*self.new], []
        for action in new:
            match action:
                case SetTimer(when):
                    assert when >= self.now
                    self.timer = when
                case Restarted(task, number):
                    assert number == task.number - 10_000
                    self.earliest[task] = self.now + DELAY
                    self.move(task)
                case Recall(drone):
                    # One that retires is told although it may have been told already.
                    assert drone not in self.recalled or drone.state is not State.READY
                    self.recalled.append(drone)
                case Interrupt(drone, task):
                    assert task in self.sent and self.sent[task] is drone
                    self.interrupted.setdefault(task, self.now)
                case TimeOut(drone, task):
                    assert drone not in self.debugged
                    assert self.now >= task.sending.at + task.timeout and task.timed_out
                    self.timed_out.add(task)
                    self.actions.append(action)
                case Kill(drone, reason):
                    self.check_kill(drone, reason)
                    if drone.alive:
                        drone.note_kill(reason)
                case Stop(drone):
                    assert drone.state >= State.STOPPING and drone not in self.stopped
                    own = self.waiting_for(drone)
                    assert drone in self.unprepared or not (own or drone.in_flight or drone.packing)
                    self.stopped[drone] = self.now
                case Complete():
                    assert all(drone.pid for drone in self.assignment.drones)
                    assert not self.waits_for_room()
                    self.was_complete, self.is_refreshing = True, False
                case Close():
                    assert self.on_death == "end" and self.state.closing
                    self.told.add(Close)
                case TryAgain() | ReportDeath() | TurnAgain():
                    self.told.add(type(action))
                case Broken():
                    self.note_broken(new)
                case EndPool():
                    assert self.state.closing and not (self.assignment.drones or self.has_ended)
                    assert self.state.abandoned or not (self.unsettled or self.sent)
                    self.has_ended = True
                case Look() | LookAt():
                    self.looks.append(action)
                case Fail() | Refuse() | Cancel():
                    self.actions.append(action)

    def note_broken(self, new):
        """All tasks are rejected. Of what had begun, it is not known how far it was."""
        for task in self.sent:
            self.begins(task)
        self.sent.clear()
        self.interrupted.clear()
        self.is_cancelled = True
        named = {action.task for action in [*self.actions, *new] if hasattr(action, "task")}
        assert named.issuperset(self.unsettled), "a task is forgotten"

    def do(self, action):
        """Carry out at once what an event needs at once; note the rest."""
        match action:
            case Start(number, name, index):
                self.start(number, name, index)
            case Evacuate(drone):
                self.move(*drone.preferred)
                if not self.choose(4):
                    drone.packing.add(7)
            case Divide(chunk, rests):
                for rest in rests:
                    as_chunk(rest, next(self.numbers), chunk.most_attempts, chunk.family)
                    self.unsettled[rest] = None
                self.was_returned.update(rests)
                chunk.rests = [*rests, *chunk.rests]
            case SettleChunk(chunk):
                self.end_chunk(chunk)
            case _:
                self.new.append(action)

    def end_chunk(self, chunk):
        """Nothing is left of it."""
        self.sent.pop(chunk, None)
        self.interrupted.pop(chunk, None)
        if not chunk.promise.done():
            self.settle(chunk)

    def carry_out(self, count):
        self.note_actions()
        for action in self.actions[:count]:
            task = action.task
            if isinstance(action, Refuse) and task.target is not None:
                self.population.stop_if_retired(task.target, self.now)
            if not task.promise.done():
                if isinstance(action, Cancel):
                    self.cancel_one(task)
                else:
                    self.check_error(action, task)
                    self.settle(task)
        del self.actions[:count]
        self.note_actions()

    def move(self, *tasks):
        """The tasks lose their places: no order is expected of them."""
        self.was_moved.update(tasks)

    def note_returned(self, tasks):
        for task in tasks:
            if task.overrun is not None:  # its time limit has struck: that is an attempt, too
                self.begins(task)
        batch = object()
        self.was_returned.update(tasks)
        self.places.update({task: (batch, at) for at, task in enumerate(tasks)})

    def settle(self, task):
        assert not task.promise.done() and task in self.unsettled
        task.promise._state = FINISHED
        del self.unsettled[task]
        self.queued.pop(task, None)
        if isinstance(task, Chunk):
            self.lost_calls.update(calls_of(task))

    def cancel_one(self, task):
        if isinstance(task, Chunk):
            self.cancelled_calls.update(calls_of(task))
        self.settle(task)
        self.state.cancelled(task, self.now)
        self.note_actions()
        assert task not in self.sent or task in self.interrupted

    def note_queued(self):
        """Tasks have come into queues, or left them, by an event."""
        for task in self.unsettled:
            if task.state is QUEUED:
                self.queued.setdefault(task)
            else:
                self.queued.pop(task, None)

    def begins(self, task):
        """A drone or another process begins a task, for the first time or once more."""
        if isinstance(task, Chunk):
            self.calls_begin(task, task.calls_left)
            return
        self.attempts[task] += 1
        assert self.attempts[task] <= task.most_attempts, f"{task.number} runs again"

    def calls_begin(self, chunk, count):
        """The next calls of a chunk begin, for the first time or once more."""
        for call in calls_of(chunk)[:count]:
            self.call_attempts[call] += 1
            assert self.call_attempts[call] <= chunk.most_attempts, f"{call} runs again"

    # -- events ------------------------------------------------------------------------------------

    def can_start(self):
        return sum(drone.alive for drone in self.assignment.drones) < self.room

    def start(self, number, name, index):
        """The engine starts a drone, or cannot."""
        current = self.population.current()
        assert not (self.has_ended or self.state.abandoned) and self.can_start()
        assert len(current) < self.size
        assert not self.state.closing or self.unsettled or self.sent, f"{name} is of no use"
        assert self.on_death != "end" or not self.has_begun, f"{name} is another lone one"
        assert name not in {each.name for each in current} and name == f"pool.{index}"
        if not (self.is_calm or self.choose(self.luck)):
            self.reports.append(self.start_error())
            return
        drone = DroneRecord(self.assignment, number, name)
        drone.closed_error = lambda: LookupError(drone.name)
        self.assignment.add(drone)

    def start_error(self):
        return OSError([errno.EAGAIN, errno.EPERM][self.choose(3) // 2], "it cannot be started")

    def take_reports(self):
        while self.reports:
            self.fail_to_start(self.reports.pop(0))

    def fail_to_start(self, error):
        may_retry = any(drone.state is State.READY for drone in self.assignment.drones)
        if not may_retry and error.errno == errno.EAGAIN:
            self.bad_starts += 1
            may_retry = self.bad_starts < FEW
        self.excused_until = self.now + START_RETRY_SECONDS
        may_retry = may_retry and self.was_complete
        self.told.clear()
        self.population.start_failed(error, BrokenPipeError("no drone"), self.now)
        self.breaks_if(not may_retry)
        assert (TryAgain in self.told) == may_retry

    def waits_for_room(self):
        is_lacking = len(self.population.current()) < self.population.wanted()
        stopping = [each for each in self.assignment.drones if each.state is State.STOPPING]
        return is_lacking and bool(stopping) and not self.can_start()

    def check_complete(self):
        """After events that may complete a refresh."""
        self.note_actions()
        drones = self.assignment.drones
        if drones and all(drone.pid for drone in drones) and not self.waits_for_room():
            assert not self.is_refreshing, "a refresh waits for ever"

    def breaks_if(self, is_reason):
        """By the event that was just over."""
        self.is_broken = self.is_broken or is_reason
        self.note_actions()
        self.note_queued()
        assert (self.state.broken is not None) == self.is_broken

    def bring_up_all(self):
        for drone in [*self.assignment.drones]:
            if drone.state < State.READY:
                self.bring_up(drone)

    def bring_up(self, drone):
        """A drone starts, greets and is prepared; or it does not come that far, or fails."""
        how = 9 if self.is_calm else self.choose(self.luck + 3)
        if how == 4:
            if not self.choose(3):
                drone.note_kill("", on_request=not self.choose(2))
            self.die(drone)
            return
        if drone.pid is None:
            if how == 0:
                self.state.drone_ended(drone, LookupError(drone.name), self.now)
                self.fail_to_start(self.start_error())
                self.population.check_complete()
                self.check_complete()
                return
            drone.pid, self.has_begun = drone.number, True
            self.population.started()
            self.check_complete()
            if how == 1:
                return
        if drone.state is State.STARTING:
            drone.become(State.PREPARING)
        if how == 2:
            return
        self.has_begun = True
        if how == 3:
            self.unprepared.add(drone)
            self.bad_starts += 1
            self.population.not_prepared(drone, BrokenPipeError("initializer"), self.now)
            self.breaks_if(self.bad_starts >= FEW or self.on_death != "replace")
            assert drone.state is State.STOPPING
        else:
            self.bad_starts = 0
            self.was_ready.add(drone)
            self.population.prepared(drone, self.now)
            self.note_actions()
            self.note_queued()
            assert (drone.state is State.READY) != drone.retire_when_ready

    def submit(self):
        for _ in range(0 if self.state.closing else 1 + self.choose(3) ** 2):
            options = {}
            if not self.choose(4):
                options["priority"] = self.choose(3)
            if not self.choose(6):
                options["resources"] = (("db", 1 + self.choose(2)),)
            elif not self.choose(8):
                options["resources"] = (("db", 1), ("gpu", 1))
            alive, current = self.taking(), self.population.current()
            if self.on_death == "end":
                options["target"] = (current or [self.dead])[0]
            elif current and not self.choose(5):
                options["target"] = current[self.choose(len(current))]
            elif self.dead and not self.choose(10):
                options["target"] = self.dead  # it has died since the call
            elif alive and not self.choose(6):
                options["preferred_drone"] = alive[self.choose(len(alive))]
            if not self.choose(4):
                options["timeout"] = [0.3, 1.0][self.choose(2)]
            if not self.choose(3):
                options["retries"] = 1 + self.choose(2)
                options["retry"] = [None, True][self.choose(2)]
            definition = self.functions[self.choose(len(self.functions))]
            task = FakeTask(next(self.numbers), definition, **options)
            self.unsettled[task] = None
            if self.choose(12):
                self.arrive(task)
            else:
                task.state = WAITING
                self.state.awaiting_inputs.add(task)
                self.move(task)

    def submit_chunk(self):
        if self.state.closing or self.max_tasks is not None or self.on_death == "end":
            return
        count, number, retries = 2 + self.choose(8), next(self.numbers), self.choose(3) // 2
        calls, is_whole = pack_calls(ITEMS, False, [*range(count)]), not self.choose(3)
        chunk = Chunk(None, self.functions[2 * self.choose(2)], calls, count, is_whole=is_whole)
        as_chunk(chunk, number, 1 + retries, number)
        chunk.retries, self.families[number] = retries, count
        self.unsettled[chunk] = None
        self.arrive(chunk)

    def arrive(self, task):
        self.assignment.enter_queue(task)
        self.state.arrived(task, self.now)
        self.note_queued()

    def compute_again(self):
        """A kept value is computed again, perhaps although the pool is closing."""
        if not (self.state.abandoned or self.has_ended or self.on_death == "end"):
            task = FakeTask(next(self.numbers), self.functions[0])
            self.unsettled[task] = None
            self.state.resumed(task, self.now)
            self.move(task)
            self.note_queued()

    def find_inputs(self):
        """The promises are settled for which a task waits."""
        task = min(self.state.awaiting_inputs, key=lambda task: task.number, default=None)
        if task is not None:
            self.arrive(task)
            self.state.awaiting_inputs.discard(task)
            if task.target is not None:
                self.population.stop_if_retired(task.target, self.now)

    def cancel(self):
        if self.unsettled:
            waiting = [*self.unsettled]
            self.cancel_one(waiting[self.choose(len(waiting))])
            self.note_queued()

    def answer(self):
        busy = [drone for drone in self.assignment.drones if drone.in_flight]
        if busy:
            drone = busy[self.choose(len(busy))]
            numbers = self.ready(drone)
            if not numbers:
                return
            chunks = [n for n in numbers if isinstance(drone.in_flight[n], Chunk)]
            if chunks[:1] == numbers[:1]:
                self.answer_calls(drone, drone.in_flight[numbers[0]])
                return
            if chunks:
                numbers = numbers[: numbers.index(chunks[0])]
            at = self.choose(len(numbers)) if drone.overlapping else 0
            if not drone.overlapping and not self.choose(2):
                numbers = numbers[: 1 + self.choose(len(numbers))]
                tasks = drone.remove_many_in_flight(numbers)
            else:
                tasks = [drone.remove_in_flight(numbers[at])]
            for task in tasks:
                self.answer_one(drone, task)
            self.answered(drone)

    def answer_calls(self, drone, chunk):
        """Some calls of a chunk are answered; the last may have failed, or was interrupted."""
        count, failed = 1 + self.choose(chunk.calls_left), not self.choose(6)
        failed = failed or chunk in self.interrupted
        self.calls_begin(chunk, count)
        calls = calls_of(chunk)[:count]
        if not chunk.promise.done():
            self.answers.update(calls)
        if chunk.definition.seconds is None and not self.choose(3):
            chunk.definition.seconds = 1e-4
        drone.tasks_done += count
        self.calls_done += count
        left = chunk.calls_left - count
        is_over = drone.note_answers(chunk, count, failed)
        assert is_over == (failed or not left)
        if is_over:
            if failed:  # those behind it are not needed
                self.cancelled_calls.update(calls_of(chunk))
            self.end_chunk(chunk)
        self.answered(drone)

    def answered(self, drone):
        was_ready, is_last = drone.state is State.READY, len(drone.in_flight) <= 1
        is_last = is_last and drone.tasks_left(self.max_tasks) <= 0
        self.population.answered(drone, self.now)
        self.note_actions()
        self.note_queued()
        assert not was_ready or (drone.state is State.READY) != is_last

    def ready(self, drone):
        """The numbers of the tasks that can end: not those that ignore an interrupt, nor what waits
        behind one.
        """
        numbers = []
        for number, task in drone.in_flight.items():
            if not (task in self.interrupted and task.number % 3 == 0):
                numbers.append(number)
            elif not drone.overlapping:
                break
        return numbers

    def answer_one(self, drone, task):
        drone.tasks_done += 1
        self.calls_done += 1
        drone.last_contact_at = self.now
        drone.highest_answered = max(drone.highest_answered, task.position)
        del self.sent[task]
        self.interrupted.pop(task, None)
        if task.definition.seconds is None and not self.choose(3):
            task.definition.seconds = 1e-4
        self.begins(task)
        if task.overrun is not None:
            self.state.failed(task, task.overrun, self.now)
        elif task.retry and self.choose(2):
            self.state.failed(task, ValueError("it failed"), self.now)
            self.check_that_none_runs_again([task])
        elif not task.promise.done():
            task.answer = True
            self.settle(task)
        self.note_queued()

    def recall(self):
        """A drone that was told to gives back what it has not begun."""
        drone = self.recalled.pop() if self.recalled else None
        if drone is not None and drone.alive:
            numbers = [*drone.in_flight][1:]
            back = [drone.in_flight[number] for number in numbers]
            returned = [(number, 0) for number in numbers]
            head = next(iter(drone.in_flight.values()), None)
            if isinstance(head, Chunk) and head.is_divisible:
                calls = head.calls_left - (self.choose(8) > 0)  # but for the one that runs, if any
                returned[:0] = [(head.number, calls)] if calls else []
            for task in back:
                del self.sent[task]
            self.note_returned(back)
            self.state.recalled(drone, returned, self.now)
            self.answered(drone)

    def die(self, drone=None):
        drones = self.assignment.drones
        if drones:
            # Often by what its interrupt leads to.
            stopped = [self.sent[task] for task in self.sent if task in self.interrupted]
            if stopped and self.choose(2):
                drone = drone or stopped[self.choose(len(stopped))]
            drone = drone or drones[self.choose(len(drones))]
            in_flight = [*drone.in_flight.values()]
            before = drone.state
            drone.become(State.DEAD)
            self.state.limits.drone_died(drone)
            # It has begun all up to that one. Most had begun one, or none; some had answers ready.
            count = min(len(in_flight), [1, 1, 1, 0, 2, 9][self.choose(6)])
            answered = sum(task.position <= drone.highest_answered for task in in_flight)
            count = max(count, answered)  # of overlapped tasks, a later one may have ended first
            begun = in_flight[:count]
            last, call = begun[-1] if begun else None, 0
            if isinstance(last, Chunk) and self.choose(4):
                calls = 1 + self.choose(last.calls_left)
                call = (last.answered + calls) | 1 << 32
                self.calls_begin(last, calls)
            for task in begun:
                if not (task is last and call):
                    self.begins(task)
            for task in in_flight:
                del self.sent[task]
                self.interrupted.pop(task, None)
            fates = drone.take_fates([begun[-1].number] if begun else [], call)
            assert fates.begun == begun and fates.not_begun == in_flight[count:]
            self.note_returned(fates.not_begun)
            self.was_returned.update(begun)
            self.places = {task: self.places[task] for task in self.places if task not in begun}
            self.dead = drone
            self.move(*drone.preferred)
            status = [self.usual_status, -9, -11, -15][max(0, self.choose(6) - 2)]
            status = -9 if drone.is_killed else status
            running = None if fates.running is None else "a call"
            error = DroneDied(drone.name, exitcode=status, running=running)
            self.state.drone_died(drone, fates, error, self.now)
            self.state.drone_ended(drone, LookupError(drone.name), self.now)
            self.note_queued()
            self.check_that_none_runs_again(begun)
            drone.packing.clear()
            if before <= State.RETIRING:
                self.die_unasked(drone, before, error)
            self.population.ended()
            self.check_complete()

    def die_unasked(self, drone, before, error):
        status, is_lone = error.exitcode, self.on_death == "end"
        is_start = before < State.READY and self.population.wanted() > 0
        in_order = status == -15 and error.running is None
        if (self.on_death == "break" and not in_order) or (is_start and is_lone):
            breaks = True
        elif status == -15 and not is_lone and not drone.tasks_done:
            if self.calls_done != self.calls_before:
                self.terminated, self.calls_before = 0, self.calls_done
            self.terminated += 1
            breaks = self.terminated >= SOME
        elif is_start:
            self.bad_starts += 1
            by_others = status == -9 and (drone.killed_on_request or not drone.is_killed)
            limit = SOME if by_others else FEW
            breaks = self.bad_starts >= limit or self.on_death != "replace"
        else:
            breaks = False
        errors = error, BrokenPipeError("unready"), BrokenPipeError("terminated")
        is_terminated = status == -15 and not is_lone and not drone.tasks_done
        self.told.clear()
        self.population.died(drone, Death(before, *errors, self.calls_done), self.now)
        self.breaks_if(breaks)
        assert breaks or (Close in self.told) == is_lone
        if not (breaks or is_start or is_lone) or (is_terminated and self.on_death == "replace"):
            assert ReportDeath in self.told

    def lease(self):
        def may_lease(task):
            return task.target is None and not isinstance(task, Chunk)

        taken = leases.lease(self.as_dispatcher(), 2, may_lease)
        for task in taken:
            assert self.queued.pop(task, self) is None
        self.leased += taken

    def end_lease(self):
        if self.leased:
            task, end = self.leased.pop(), self.choose(3)
            if end == 0:
                leases.requeue_unstarted(self.as_dispatcher(), [task])
                self.move(task)
            else:
                self.begins(task)
                if end == 1:
                    leases.on_lost(self.as_dispatcher(), [task], BrokenPipeError("the host"))
                    self.move(task)
                else:
                    leases.on_settled(self.as_dispatcher(), [task])
                    if not task.promise.done():
                        self.unsettled.setdefault(task)
                        self.settle(task)
            self.note_queued()

    def as_dispatcher(self):
        return SimpleNamespace(
            state=self.state,
            assignment=self.assignment,
            unsettled=dict(self.unsettled),
            has_ended=False,
            queue_inbound=lambda: None,
            requeue=lambda tasks: self.state.returned(tasks, self.now),
            reject_or_retry=lambda tasks, error, may_retry: self.state.lost(
                tasks, error, self.now, may_retry=may_retry
            ),
        )

    def wait(self):
        self.note_actions()
        self.now += DELAY * (1 + self.choose(8)) / 4
        self.stuck.clear()  # no turn was taken meanwhile, and what is due comes late
        self.look_at_timer()

    def end(self):
        """The pool closes, and may cancel what has not begun; or it breaks, or is killed."""
        how = self.choose(8)
        if how < 4:
            running = {next(iter(each.in_flight), 0) for each in self.assignment.drones}
            both = how == 1
            self.state.close(running, cancel=how < 2, cancel_running=both)
            self.is_cancelled = self.is_cancelled or how < 2
        elif how == 4:
            self.is_cancelled = True
            self.state.abandon("")
        elif how == 5:
            self.state.broke(OSError("the cluster is gone"), self.now)
            self.breaks_if(True)
        self.note_actions()
        self.note_queued()

    def taking(self):
        return [drone for drone in self.assignment.drones if drone.state is State.READY]

    def one(self):
        taking = self.taking()
        return taking[self.choose(len(taking))] if taking else None

    def pause(self):
        if (drone := self.one()) is not None:
            drone.note_response(None if drone.unresponsive else "it is stopped")

    def kill(self):
        drones = self.assignment.drones
        if drones:
            drones[self.choose(len(drones))].note_kill("", on_request=not self.choose(2))

    def retire(self):
        drones = self.assignment.drones
        if drones and self.on_death != "end":
            drone = drones[self.choose(len(drones))]
            has_own, was_ready = self.waiting_for(drone), drone in self.was_ready
            self.population.retire(drone, self.now)
            self.note_actions()
            self.note_queued()
            stays = has_own and not was_ready and drone not in self.unprepared
            assert drone.state > State.READY or (stays and drone.retire_when_ready)

    def resize(self):
        if not self.state.closing and self.on_death != "end":
            self.size = 1 + self.choose(4)
            alive = sum(drone.alive for drone in self.assignment.drones)
            self.room = max(2 * self.size, alive + self.size)
            self.population.resize(self.size, self.now)
            self.note_actions()
            self.note_queued()

    def refresh(self):
        if self.population.wanted() and self.on_death != "end":
            self.is_refreshing, before = True, [*self.assignment.drones]
            self.population.replace(self.now)
            assert not {*before}.intersection(self.population.current())
            self.note_actions()
            self.note_queued()

    def pack(self, drone=None):
        """A drone has packed the values that it was asked for."""
        drone = drone or next((each for each in self.assignment.drones if each.packing), None)
        if drone is not None and drone.packing:
            drone.packing.clear()
            self.answered(drone)

    def exceed_memory(self):
        """Most drones that have had no task yet are too large."""
        for drone in [] if self.on_death == "end" else self.taking():
            if not self.choose(4):
                self.keep_memory()
            elif not (drone.in_flight or drone.tasks_done or drone.is_killed):
                self.too_large_in_a_row += 1
                self.population.too_large(drone, "too large", BrokenPipeError("memory"), self.now)
                self.breaks_if(self.too_large_in_a_row >= FEW)
                assert drone.is_killed

    def keep_memory(self):
        self.too_large_in_a_row = 0
        self.population.fits()

    def hang(self):
        """An overlapped task has ignored its interrupt for all its grace."""
        drone = self.one()
        if drone is not None and drone.overlapping:
            drone.hung.add(next(iter(drone.in_flight)))
            drone.changed()

    def debug(self):
        """A drone is debugged from here on, or not any more: its limits stand still meanwhile."""
        if (drone := self.one()) is not None:
            self.debugged ^= {drone}

    def look(self):
        """The answers of drones were read whose time has come."""
        while self.looks:
            action = self.looks.pop(0)
            drone = action.drone
            if isinstance(action, Look):
                self.state.limits.looked(drone, drone in self.debugged, self.now)
            else:
                first = next(iter(drone.in_flight), 0)
                is_running = action.number == first or drone.overlapping > 0
                is_holder = not self.choose(9)
                self.state.limits.looked_at(
                    drone, action.number, action.steps_left, is_running, is_holder, self.now
                )
            self.note_actions()

    # -- what must hold ----------------------------------------------------------------------------

    def assign(self):
        self.assignment.update()
        for drone, runs in self.assignment.assign(self.now):
            batch = [task for run in runs for task in run]
            self.check(drone, batch)
            if drone.overlapping or batch[0].timeout is not None:
                self.state.limits.sent(drone, batch, self.now)
        for drone in self.assignment.drones:
            drone.validate()
        self.assignment.validate()
        self.assignment.validate_idle()
        if self.assignment.is_any_idle() and not self.assignment.queue:
            self.state.turn_over(self.now)
        self.note_actions()
        self.state.validate()
        self.check_that_none_waits_in_vain()
        self.check_that_none_is_stuck()
        if self.state.closing and not self.has_ended:
            self.end_if_done()
        self.check_population()

    def end_if_done(self):
        self.told.clear()
        self.population.end_if_done(self.now)
        self.note_actions()
        self.state.validate()
        if self.state.abandoned:
            return
        drones = self.assignment.drones
        if not (self.unsettled or self.sent):
            assert all(drone.state >= State.STOPPING or drone.packing for drone in drones)
        elif not self.state.needs_drones():
            assert TurnAgain in self.told
        elif self.can_start() and not (self.reports or self.now < self.excused_until):
            assert drones or self.on_death == "end", "no drone is there for what is left"

    def waiting_for(self, drone):
        """The tasks that this drone has yet to get."""
        waits = (QUEUED, DELAYED, WAITING)
        return [task for task in self.unsettled if task.target is drone and task.state in waits]

    def check_population(self):
        state, drones, current = self.state, self.assignment.drones, self.population.current()
        assert (state.broken is not None) == self.is_broken, "it breaks, and has no reason to"
        is_excused = self.reports or self.now < self.excused_until or not self.can_start()
        # One on which the initializer failed is replaced when it has ended.
        is_excused = is_excused or self.unprepared.intersection(drones)
        if not (state.closing or is_excused):
            assert len(current) == self.size, f"{len(current)} drones, not {self.size}"
            # One that stops tells, when it ends, that there is no need to wait for its room.
            if all(drone.pid and drone.state is not State.STOPPING for drone in drones):
                assert not self.is_refreshing, "a refresh waits for ever"
        for drone in drones:
            assert drone.is_killed or not state.abandoned, f"{drone.name} lives on"
            if drone.state is State.RETIRING:
                last = drone.in_flight or drone.packing or self.waiting_for(drone)
                assert last, f"{drone.name} retires for ever"
                others = [task for task in [*drone.in_flight.values()][1:] if task.target is None]
                assert not others or drone in self.recalled, (
                    f"{drone.name} keeps what others can do"
                )
            if drone.state is State.READY and not drone.in_flight:
                assert drone.tasks_left(self.max_tasks) > 0, f"{drone.name} has had all its tasks"
            if drone.state is State.STOPPING and not drone.is_killed:
                over = self.now - self.stopped[drone] - STOP_GRACE_SECONDS
                assert over < 0, f"{drone.name} stops for ever"

    def check_that_none_runs_again(self, tasks):
        for task in tasks:
            is_over = self.is_cancelled or task.promise.done() or task in self.timed_out
            assert not is_over or task.state is ENDING, f"{task.number} is to run again"

    def check_limits(self):
        self.was_debugged |= self.debugged
        for task, drone in self.sent.items():
            if task.timeout and not (task.promise.done() or task in self.interrupted):
                over = self.now - task.sending.at - task.timeout
                assert over < 0 or drone in self.was_debugged, f"{task.number} runs for too long"

    def check_kill(self, drone, reason):
        if "exit handlers" in reason:
            assert self.now - self.stopped[drone] > 0.999 * STOP_GRACE_SECONDS
            return
        if reason in ("", "too large"):
            is_idle = not drone.in_flight and (reason or drone not in self.was_ready)
            is_idle = is_idle and (reason or not self.waiting_for(drone))
            assert is_idle or self.state.abandoned, f"{drone.name} is killed"
            return
        stopped = [task for task in drone.in_flight.values() if task in self.interrupted]
        began = min(self.interrupted[task] for task in stopped)
        assert self.now - began > 0.999 * tuning.grace_seconds, f"{drone.name} is killed too early"

    def check_error(self, action, task):
        """A task that is rejected had begun, or nothing is left that could begin it."""
        if isinstance(action, TimeOut):
            return
        has_gone = self.state.broken is not None or self.state.abandoned
        has_gone = has_gone or (task.target is not None and task.target.state is State.DEAD)
        if isinstance(task, Chunk):
            for call in calls_of(task):
                attempts = self.call_attempts[call]
                assert has_gone or self.state.has_cancelled or attempts == task.most_attempts, (
                    f"{call} is lost after {attempts} attempts"
                )
            return
        assert self.attempts[task] or has_gone, f"{task.number} is lost"
        spent = self.attempts[task] >= task.most_attempts
        ends = has_gone or self.state.has_cancelled
        own = task.target is not None and not task.retry
        assert spent or ends or own, f"{task.number} does not run again"

    def check(self, drone, tasks):
        before = [*drone.in_flight.values()][: len(drone.in_flight) - len(tasks)]
        assert tasks and [*drone.in_flight.values()] == before + tasks
        for task in tasks:
            assert self.queued.pop(task, self) is None, (
                f"{task.number} was sent, and was not queued"
            )
            self.sent[task] = drone
            assert task not in self.timed_out
            assert self.now >= self.earliest.get(task, 0.0), f"{task.number} runs too early"
            assert task.target in (None, drone)
            self.check_order(task)
        assert not (drone.unresponsive or drone.is_killed)
        assert drone.state is State.READY or all(task.target is drone for task in tasks)
        assert drone.state <= State.RETIRING
        others = before + tasks
        if any(task.definition.overlaps for task in others):
            assert all(task.definition.overlaps for task in others)
            assert len(others) <= self.width and not drone.hung
        elif len(others) > 1:
            estimates = [task.sending.estimate for task in others]
            assert min(estimates) > 0
            assert not any(task.timeout for task in (tasks if before else tasks[1:]))
            is_behind_chunk = len(others) == 2 and all(task.is_divisible for task in others)
            assert sum(estimates) <= tuning.batch_seconds * 1.001 or is_behind_chunk
        if self.max_tasks is not None and drone.state is State.READY:
            assert drone.tasks_done + len(drone.in_flight) <= self.max_tasks
        held = Counter()
        for task in self.sent:
            held.update(dict(task.resources))
        assert all(held[name] <= size for name, size in SIZES), held
        if self.assignment.runs_one_at_a_time:
            assert set(self.sent.values()) == {drone}

    def check_order(self, task):
        """Of tasks of one kind, those go first that a drone has returned, then the first call."""
        if task in self.was_moved:
            return
        kind = task.target, task.resources, task.preferred_drone
        if task in self.was_returned:
            batch, at = self.places.get(task, (None, 0))
            for other in self.queued:
                other_batch, place = self.places.get(other, (self, 0))
                alike = (other.target, other.resources, other.preferred_drone) == kind
                if other_batch is batch and alike and other.priority == task.priority:
                    assert at < place or other in self.was_moved, (
                        f"{task.number} overtakes {other.number}, which was returned with it"
                    )
            return
        for other in self.queued:
            if (other.target, other.resources, other.preferred_drone) == kind:
                is_before = (-other.priority, other.number) < (-task.priority, task.number)
                if other in self.was_returned:
                    is_before = other.priority >= task.priority
                is_before = is_before and other not in self.was_moved
                assert not is_before, f"{task.number} overtakes {other.number}"

    def check_that_none_is_stuck(self):
        """Behind a task that runs, while another drone is idle."""
        is_free = self.assignment.is_any_idle() and not self.assignment.queue
        told = {each.drone for each in self.new if isinstance(each, Recall)}
        stuck = {}
        for drone in self.assignment.drones if is_free else ():
            behind = [] if drone.overlapping else [*drone.in_flight.values()][1:]
            others = any(drone not in (task.target, task.preferred_drone) for task in behind)
            if not (behind or drone.overlapping):
                others = any(
                    task.is_divisible and task.calls_left > 1 for task in drone.in_flight.values()
                )
            if drone.state is State.READY and others and drone not in {*self.recalled, *told}:
                key = drone, next(iter(drone.in_flight))
                times, since = self.stuck.get(key, (0, self.now))
                if self.now - since >= 2 * tuning.batch_seconds:
                    times, since = times + 1, self.now
                stuck[key] = times, since
                # The first look may have found another task running, or others queued.
                assert times < 3, f"{drone.name} is stuck"
        self.stuck = stuck

    def check_calls(self):
        """Each call of a chunk is answered once, or is lost or cancelled, at the end."""
        for family, count in self.families.items():
            for call in ((family, item) for item in range(count)):
                is_answered = self.answers[call] > 0
                gone = call in self.lost_calls or call in self.cancelled_calls
                assert self.answers[call] <= 1, f"{call} is answered twice"
                assert is_answered != gone, f"{call} is {'both' if gone else 'neither'}"

    def check_that_none_waits_in_vain(self):
        assignment = self.assignment
        if assignment.runs_one_at_a_time and self.sent:
            return
        idle = [
            drone
            for drone in assignment.drones
            if not drone.in_flight and drone.can_take() and drone.tasks_left(self.max_tasks) > 0
        ]
        for task in self.queued:
            if task.resources:
                continue
            if task.target is None and idle:
                waits = task.preferred_drone is not None and task in task.preferred_drone.preferred
                waits = waits or idle == [assignment.resources.reserved]
                assert waits, f"{task.number} waits, and {idle[0].name} is idle"
            drone = task.target
            if drone is not None and not drone.in_flight and drone.can_take(dedicated=True):
                assert drone.tasks_left(self.max_tasks) <= 0, f"{task.number} waits for its drone"


def calls_of(chunk):
    """Those that were not answered, by family and item."""
    first = chunk.first_item + chunk.answered
    return [(chunk.family, first + n) for n in range(chunk.calls_left)]


def walk(seeds):
    for seed in seeds:
        try:
            Walk(random.Random(seed).randrange).run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.guarantee("work-22")
@pytest.mark.parametrize("start", range(0, 1200, 300))
def test_in_any_order_of_events_each_task_is_sent_once_to_one_that_may_run_it(start):
    walk(range(start, start + 300))


def drawn(data):
    return lambda count: data.draw(st.integers(0, count - 1))


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[*HealthCheck])
def test_in_orders_that_are_made_shorter_where_one_fails(data):
    Walk(drawn(data)).run()


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a machine with other work, too
@given(st.data())
@settings(max_examples=2000, deadline=None, suppress_health_check=[*HealthCheck])
def test_in_many_orders_that_are_made_shorter_where_one_fails(data):
    Walk(drawn(data)).run()


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a machine with other work, too
def test_in_very_many_orders_of_events_each_task_is_sent_once():
    walk(range(10_000, 30_000))


# -- faults that are planted -----------------------------------------------------------------------

can_take, place, take_next = DroneRecord.can_take, Assignment.place, Resources.take_next


def changes_are_not_told(plant):
    plant(DroneRecord, "changed", lambda self: None)


def resources_are_never_free_again(plant):
    plant(Resources, "release", lambda self, task: None)


def resources_are_free_twice(plant):
    def release(self, task):
        for name, amount in task.resources:
            self._free[name] += 2 * amount

    plant(Resources, "release", release)


def resources_are_not_counted(plant):
    def take(self, *args):
        self._free = dict(SIZES)
        return take_next(self, *args)

    plant(Resources, "take_next", take)


def without(plant, name, nothing):
    """Have `can_take` see `nothing` as the value of an attribute."""

    def takes(self, dedicated=False):
        before = getattr(self, name)
        setattr(self, name, nothing)
        try:
            return can_take(self, dedicated)
        finally:
            setattr(self, name, before)

    plant(DroneRecord, "can_take", takes)


def one_that_is_being_killed_takes_tasks(plant):
    without(plant, "is_killed", False)


def one_that_does_not_respond_takes_tasks(plant):
    without(plant, "unresponsive", None)


def one_with_a_hung_task_takes_tasks(plant):
    without(plant, "hung", set())


def one_that_retires_takes_any_task(plant):
    plant(DroneRecord, "can_take", lambda self, dedicated=False: can_take(self, True))


def one_that_retires_takes_no_task(plant):
    plant(DroneRecord, "can_take", lambda self, dedicated=False: can_take(self))


def the_load_is_not_counted(plant):
    right = Assignment._estimate
    plant(Assignment, "_estimate", lambda self, drone, task, load: right(self, drone, task, 0.0))


def one_more_overlaps(plant):
    plant(Assignment, "width", property(lambda self: self._width + 1, _set_width), raising=False)


def _set_width(self, width):
    self._width = width


def a_task_of_unknown_length_goes_behind_others(plant):
    def estimate(self, drone, task, load):
        return 1e-4 if task.definition.seconds is None else known(self, drone, task, load)

    known = Assignment._estimate
    plant(Assignment, "_estimate", estimate)


def one_with_a_time_limit_goes_behind_others(plant):
    def estimate(self, drone, task, load):
        limit, task.timeout = task.timeout, None
        try:
            return right(self, drone, task, load)
        finally:
            task.timeout = limit

    right = Assignment._estimate
    plant(Assignment, "_estimate", estimate)


def max_tasks_is_exceeded(plant):
    plant(DroneRecord, "tasks_left", lambda self, max_tasks: 1 << 30)


def any_drone_gets_the_task_of_one(plant):
    def put(self, task, now, *, first=False):
        target, task.target = task.target, None
        place(self, task, now, first=first)
        task.target = target

    plant(Assignment, "place", put)


def priorities_do_not_count(plant):
    plant(assignments, "insert_in_order", lambda queue, task, first: queue.append(task))


def what_was_returned_goes_last(plant):
    plant(assignments, "insert_in_order", lambda queue, task, first: insert_in_order(queue, task))


def a_cancelled_task_is_sent(plant):
    class Anything:
        def __ne__(self, other):
            return False

    plant(assignments, "PENDING", Anything())


def a_cancelled_task_counts_as_queued(plant):
    def leave(self, task, state=ENDING):
        task.state = state

    plant(Assignment, "leave_queue", leave)


def tasks_of_a_dead_drone_are_forgotten(plant):
    def take(self, drone):
        for task in drone.dedicated:
            self.leave_queue(task)
        drone.dedicated.clear()
        return []

    plant(Assignment, "take_dedicated", take)


def a_task_stays_with_the_drone_that_it_prefers(plant):
    plant(Assignment, "take_preferring", lambda self, drone: [])


def two_run_at_a_time(plant):
    plant(Assignment, "_is_blocked", lambda self: False)


def an_idle_drone_is_overlooked(plant):
    def takers(self, count):
        self.update()
        return sorted(self.partly_busy, key=assignments._load)

    plant(Assignment, "_takers", takers)


def what_is_recalled_may_be_recalled_again(plant):
    def take(self):
        crowded = [*self.crowded]
        self.crowded.clear()
        return crowded

    plant(Assignment, "take_crowded", take)


def what_had_begun_runs_again(plant):
    def lose(self, tasks, error, now, *, may_retry):
        self.returned([task for task in tasks if not task.promise.done()], now)

    plant(PoolState, "lost", lose)


def what_had_not_begun_is_lost(plant):
    def die(self, drone, fates, error, now):
        self.lost(fates.not_begun, error, now, may_retry=False)
        died(self, drone, fates._replace(not_begun=[]), error, now)

    died = PoolState.drone_died
    plant(PoolState, "drone_died", die)


def retries_are_not_counted(plant):
    def lose(self, tasks, error, now, *, may_retry):
        before = {task: task.retries for task in tasks}
        lost(self, tasks, error, now, may_retry=may_retry)
        for task, retries in before.items():
            task.retries = retries

    lost = PoolState.lost
    plant(PoolState, "lost", lose)


def no_task_is_retried(plant):
    def lose(self, tasks, error, now, *, may_retry):
        lost(self, tasks, error, now, may_retry=False)

    lost = PoolState.lost
    plant(PoolState, "lost", lose)


def delayed_tasks_are_forgotten(plant):
    plant(PoolState, "due", lambda self, now: None)


def only_the_first_delay_has_a_timer(plant):
    def due(self, now):
        do, self._do = self._do, lambda action: type(action) is SetTimer or do(action)
        right(self, now)
        self._do = do

    right = PoolState.due
    plant(PoolState, "due", due)


def delays_are_too_short(plant):
    def call(self, when, method, *args):
        early = DELAY / 2 if method == self.resumed else 0.0
        return right(self, when - early, method, *args)

    right = PoolState._call_at
    plant(PoolState, "_call_at", call)


def a_task_waits_for_a_drone_that_is_dead(plant):
    def put(self, task, now, first=False):
        self.assignment.place(task, now, first=first)

    plant(PoolState, "_place", put)


def what_was_returned_is_turned_round(plant):
    def back(self, tasks, now):
        right(self, tasks[::-1], now)

    right = PoolState.returned
    plant(PoolState, "returned", back)


def a_running_task_is_not_interrupted(plant):
    def cancel(self, task, now):
        if task.handle is None or task.number not in task.handle.in_flight:
            right(self, task, now)

    right = PoolState.cancelled
    plant(PoolState, "cancelled", cancel)


def a_pool_that_is_cancelled_tries_again(plant):
    never = property(lambda self: False, lambda self, value: None)
    plant(PoolState, "has_cancelled", never, raising=False)


def a_broken_pool_forgets_what_was_sent(plant):
    def broke(self, error, now):
        sent = {*chain(*(drone.take_in_flight() for drone in self.assignment.drones))}
        kept = {task: self.unsettled.pop(task) for task in [*self.unsettled] if task in sent}
        right(self, error, now)
        self.unsettled.update(kept)

    right = PoolState.broke
    plant(PoolState, "broke", broke)


def an_abandoned_pool_leaves_its_queue(plant):
    def abandon(self, reason):
        unsettled, self.unsettled = self.unsettled, {}
        right(self, reason)
        self.unsettled = unsettled

    right = PoolState.abandon
    plant(PoolState, "abandon", abandon)


def a_lease_that_ends_is_forgotten(plant):
    def forget(dispatcher, tasks):
        dispatcher.state.lease_ended(tasks)

    plant(leases, "requeue_unstarted", forget)


def one_that_is_stuck_is_not_recalled(plant):
    def turn_over(self, now):
        for drone in self.assignment.take_crowded():
            self.assignment.note_recalled(drone)

    plant(PoolState, "turn_over", turn_over)


def what_a_drone_gives_back_is_forgotten(plant):
    def recalled(self, drone, numbers, now):
        self.assignment.note_recalled(drone)
        for number, _ in numbers:
            drone.remove_in_flight(number)

    plant(PoolState, "recalled", recalled)


def a_time_limit_is_forgotten(plant):
    plant(Limits, "sent", lambda self, drone, batch, now: None)


def a_time_limit_strikes_too_early(plant):
    def sent(self, drone, batch, now):
        right(self, drone, batch, now - 0.5)

    right = Limits.sent
    plant(Limits, "sent", sent)


def one_that_ignores_its_interrupt_is_never_killed(plant):
    plant(Limits, "looked_at", lambda self, *args: None)


def the_grace_period_is_too_short(plant):
    def begin(self, drone, number, steps_left, now):
        right(self, drone, number, min(steps_left, 2), now)

    right = Limits._begin_step
    plant(Limits, "_begin_step", begin)


def a_debugged_one_is_stopped(plant):
    right = Limits.looked
    plant(Limits, "looked", lambda self, drone, _, now: right(self, drone, False, now))


def one_that_is_out_of_time_runs_again(plant):
    plant(pool_state, "_is_settled", lambda task: task.promise.done())


# Of the population.


def a_drone_that_died_is_not_replaced(plant):
    plant(Population, "ended", Population.check_complete)


def there_is_one_drone_too_many(plant):
    right = Population.wanted
    plant(Population, "wanted", lambda self: right(self) and right(self) + 1)


def a_failed_start_is_not_tried_again(plant):
    plant(Population, "_try_again", lambda self, now: None)


def a_failed_start_is_tried_again_for_ever(plant):
    def failed(self, error, broken, now):
        self._failed_starts = 0
        right(self, error, broken, now)

    right = Population.start_failed
    plant(Population, "start_failed", failed)


def a_pool_that_is_too_large_is_not_broken(plant):
    complete = property(lambda self: True, lambda self, value: None)
    plant(Population, "_was_complete", complete, raising=False)


def failed_starts_are_not_counted(plant):
    plant(Population, "_count_failed_start", lambda self, error, tries, now: None)


def failed_starts_are_not_in_a_row(plant):
    def prepared(self, drone, now):
        count = self._failed_starts
        right(self, drone, now)
        self._failed_starts = count

    right = Population.prepared
    plant(Population, "prepared", prepared)


def sigterm_counts_as_a_failed_start(plant):
    def count(self, death, now):
        self._count_failed_start(death.terminated, 2, now)

    plant(Population, "_count_terminated", count)


def too_large_ones_are_not_in_a_row(plant):
    plant(Population, "fits", lambda self: None)


def a_lone_drone_is_replaced(plant):
    never = property(lambda self: False, lambda self, value: None)
    plant(Population, "_has_begun", never, raising=False)


def a_name_is_given_twice(plant):
    right = Population._start_one

    def start(self):
        current, self.current = self.current, list
        try:
            return right(self)
        finally:
            self.current = current

    plant(Population, "_start_one", start)


def it_is_complete_too_early(plant):
    def check(self):
        self._was_complete = True
        self._do(Complete())

    plant(Population, "check_complete", check)


def a_refresh_is_never_complete(plant):
    def check(self):
        do, self._do = self._do, lambda action: None
        right(self)
        self._do = do

    right = Population.check_complete
    plant(Population, "check_complete", check)


def one_that_retires_never_stops(plant):
    plant(Population, "stop_if_retired", lambda self, drone, now: None)


def one_that_retires_forgets_its_tasks(plant):
    plant(PoolState, "has_tasks_for", lambda self, drone: False)


def one_that_retires_forgets_what_it_packs(plant):
    def stop(self, drone, now):
        packing, drone.packing = drone.packing, set()
        right(self, drone, now)
        drone.packing = packing

    right = Population.stop_if_retired
    plant(Population, "stop_if_retired", stop)


def one_that_starts_does_not_retire(plant):
    def prepared(self, drone, now):
        drone.retire_when_ready = False
        right(self, drone, now)

    right = Population.prepared
    plant(Population, "prepared", prepared)


def one_that_ignores_its_stop_is_never_killed(plant):
    plant(Population, "_end_grace", lambda self, drone, now: None)


def exit_handlers_have_no_time(plant):
    plant(population, "STOP_GRACE_SECONDS", STOP_GRACE_SECONDS / 2)


def one_that_has_ended_is_killed(plant):
    plant(Population, "forget", lambda self, drone: None)


def max_tasks_retires_none(plant):
    plant(Population, "answered", Population.stop_if_retired)


def max_tasks_retires_too_early(plant):
    def answered(self, drone, now):
        if drone.state is State.READY and drone.tasks_done:
            self.retire(drone, now)
        right(self, drone, now)

    right = Population.answered
    plant(Population, "answered", answered)


def a_smaller_pool_keeps_its_drones(plant):
    plant(population, "surplus", lambda drones, size: [])


def a_refresh_forgets_the_first(plant):
    def replace(self, now):
        for drone in self._drones[1:]:
            self.retire(drone, now)

    plant(Population, "replace", replace)


def a_closed_pool_keeps_its_idle_drones(plant):
    def end(self, now):
        if not self._drones:
            right(self, now)

    right = Population.end_if_done
    plant(Population, "end_if_done", end)


def a_closed_pool_does_not_wait_for_its_tasks(plant):
    plant(PoolState, "is_unfinished", lambda self: False)


def a_closed_pool_starts_no_drone_for_its_tasks(plant):
    plant(PoolState, "needs_drones", lambda self: False)


def an_ended_pool_starts_drones(plant):
    right = Population.wanted

    def wanted(self):
        return self.size if self.has_ended else right(self)

    plant(Population, "wanted", wanted)


def an_abandoned_pool_starts_drones(plant):
    def wanted(self):
        abandoned, self._tasks.abandoned = self._tasks.abandoned, False
        try:
            return right(self)
        finally:
            self._tasks.abandoned = abandoned

    right = Population.wanted
    plant(Population, "wanted", wanted)


def an_abandoned_pool_keeps_its_drones(plant):
    def abandon(self, reason):
        do, self._do = self._do, lambda action: type(action) is Kill or do(action)
        right(self, reason)
        self._do = do

    right = PoolState.abandon
    plant(PoolState, "abandon", abandon)


def a_call_that_is_given_back_is_forgotten(plant):
    def take(self, calls):
        rest = right(self, calls)
        rest.count -= rest.count > 1
        return rest

    right = Chunk.take_rest
    plant(Chunk, "take_rest", take)


def a_call_that_runs_is_given_away(plant):
    def take(self, calls):
        rest = self._part(self.count - calls - 1, self.count)
        self.count -= calls
        return rest

    plant(Chunk, "take_rest", take)


def a_chunk_never_ends(plant):
    plant(DroneRecord, "note_answers", lambda self, chunk, calls, failed: False)


def answered_calls_run_again(plant):
    plant(Chunk, "drop_answered", lambda self: setattr(self, "answered", 0))


def all_calls_of_a_dead_drones_chunk_are_lost(plant):
    right = DroneRecord.take_fates
    plant(DroneRecord, "take_fates", lambda self, begun, call: right(self, begun))


def no_call_of_a_dead_drones_chunk_is_lost(plant):
    def take(self, begun, call):
        return right(self, begun, call and (call & 0xFFFF_FFFF) - 1 | 1 << 32)

    right = DroneRecord.take_fates
    plant(DroneRecord, "take_fates", take)


def a_chunk_alone_is_not_recalled(plant):
    def has_calls(self):
        return len(self.in_flight) > 1 and right(self)

    right = DroneRecord.has_calls_behind_one
    plant(DroneRecord, "has_calls_behind_one", has_calls)


def the_rest_of_a_cancelled_chunk_runs(plant):
    def divided(self, chunk, rest):
        rests = rest.divided(1)
        self._do(Divide(chunk, rests))
        return rests

    plant(PoolState, "_divided", divided)


def a_chunk_of_which_nothing_is_left_is_not_settled(plant):
    def recalled(self, drone, returned, now):
        do = self._do
        self._do = lambda action: type(action) is SettleChunk or do(action)
        right(self, drone, returned, now)
        self._do = do

    right = PoolState.recalled
    plant(PoolState, "recalled", recalled)


FAULTS = [
    a_call_that_is_given_back_is_forgotten,
    a_call_that_runs_is_given_away,
    a_chunk_never_ends,
    answered_calls_run_again,
    all_calls_of_a_dead_drones_chunk_are_lost,
    no_call_of_a_dead_drones_chunk_is_lost,
    a_chunk_alone_is_not_recalled,
    the_rest_of_a_cancelled_chunk_runs,
    a_chunk_of_which_nothing_is_left_is_not_settled,
    a_drone_that_died_is_not_replaced,
    there_is_one_drone_too_many,
    a_failed_start_is_not_tried_again,
    a_failed_start_is_tried_again_for_ever,
    a_pool_that_is_too_large_is_not_broken,
    failed_starts_are_not_counted,
    failed_starts_are_not_in_a_row,
    sigterm_counts_as_a_failed_start,
    too_large_ones_are_not_in_a_row,
    a_lone_drone_is_replaced,
    a_name_is_given_twice,
    it_is_complete_too_early,
    a_refresh_is_never_complete,
    one_that_retires_never_stops,
    one_that_retires_forgets_its_tasks,
    one_that_retires_forgets_what_it_packs,
    one_that_starts_does_not_retire,
    one_that_ignores_its_stop_is_never_killed,
    exit_handlers_have_no_time,
    one_that_has_ended_is_killed,
    max_tasks_retires_none,
    max_tasks_retires_too_early,
    a_smaller_pool_keeps_its_drones,
    a_refresh_forgets_the_first,
    a_closed_pool_keeps_its_idle_drones,
    a_closed_pool_does_not_wait_for_its_tasks,
    a_closed_pool_starts_no_drone_for_its_tasks,
    an_ended_pool_starts_drones,
    an_abandoned_pool_starts_drones,
    an_abandoned_pool_keeps_its_drones,
    one_that_is_out_of_time_runs_again,
    a_time_limit_is_forgotten,
    a_time_limit_strikes_too_early,
    one_that_ignores_its_interrupt_is_never_killed,
    the_grace_period_is_too_short,
    a_debugged_one_is_stopped,
    one_that_is_stuck_is_not_recalled,
    what_a_drone_gives_back_is_forgotten,
    what_had_begun_runs_again,
    what_had_not_begun_is_lost,
    retries_are_not_counted,
    no_task_is_retried,
    delayed_tasks_are_forgotten,
    only_the_first_delay_has_a_timer,
    delays_are_too_short,
    a_task_waits_for_a_drone_that_is_dead,
    what_was_returned_is_turned_round,
    a_running_task_is_not_interrupted,
    a_pool_that_is_cancelled_tries_again,
    a_broken_pool_forgets_what_was_sent,
    an_abandoned_pool_leaves_its_queue,
    a_lease_that_ends_is_forgotten,
    changes_are_not_told,
    resources_are_never_free_again,
    resources_are_free_twice,
    resources_are_not_counted,
    one_that_is_being_killed_takes_tasks,
    one_that_does_not_respond_takes_tasks,
    one_with_a_hung_task_takes_tasks,
    one_that_retires_takes_any_task,
    one_that_retires_takes_no_task,
    the_load_is_not_counted,
    one_more_overlaps,
    a_task_of_unknown_length_goes_behind_others,
    one_with_a_time_limit_goes_behind_others,
    max_tasks_is_exceeded,
    any_drone_gets_the_task_of_one,
    priorities_do_not_count,
    what_was_returned_goes_last,
    a_cancelled_task_is_sent,
    a_cancelled_task_counts_as_queued,
    tasks_of_a_dead_drone_are_forgotten,
    a_task_stays_with_the_drone_that_it_prefers,
    two_run_at_a_time,
    an_idle_drone_is_overlooked,
    what_is_recalled_may_be_recalled_again,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(monkeypatch, fault):
    fault(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        walk(range(6000))


# -- found in other ways ---------------------------------------------------------------------------


def assignment_of(size, resources=()):
    assignment = Assignment(1, None, resources)
    for number in range(size):
        drone = DroneRecord(assignment, number, str(number))
        assignment.add(drone)
        drone.become(State.READY)
    return assignment


def queued(assignment, task):
    assignment.enter_queue(task)
    assignment.place(task, 0.0)
    return task


def sent_to(assignment):
    assignment.update()
    return [
        (drone, *[task for run in runs for task in run]) for drone, runs in assignment.assign(0)
    ]


def test_a_task_that_gets_another_drone_as_it_is_sent_goes_there_at_once():
    assignment = assignment_of(2)
    _, second = assignment.drones

    def prepare(task, drone):
        if drone is second:
            return True
        task.preferred_drone = second
        assignment.leave_queue(task)
        queued(assignment, task)
        return False

    assignment.prepare = prepare
    task = FakeTask(1, function(), args=None, payload=PayloadWithRefs(b"", {}))
    queued(assignment, task)
    assert sent_to(assignment) == [(second, task)]
    assignment.validate_idle()


def test_a_drone_that_is_reserved_and_gets_a_task_of_its_own_is_reserved_no_more():
    assignment = assignment_of(2, SIZES)
    first, second = assignment.drones
    brief, lasting = function(1e-4), function()
    busy = [queued(assignment, FakeTask(number, brief)) for number in range(2)]
    assert sent_to(assignment) == [(first, busy[0]), (second, busy[1])]
    scarce = queued(assignment, FakeTask(2, lasting, resources=(("db", 1),), priority=1))
    assert sent_to(assignment) == [] and assignment.resources.reserved is first
    own = queued(assignment, FakeTask(3, lasting, target=first))
    first.remove_in_flight(0)
    assert sent_to(assignment) == [(first, own)] and assignment.resources.reserved is second
    second.remove_in_flight(1)
    assert sent_to(assignment) == [(second, scarce)]


def state_of(size, do):
    return PoolState(config_of(size), assignment_of(size), deque(), {}, do)


def test_a_cancelled_task_that_would_run_again_in_a_day_is_not_kept():
    state = state_of(1, lambda action: None)
    task = FakeTask(1, function(), retries=1, retry=True)
    state.failed(task, ValueError("once"), 0.0)
    assert task in state.delayed
    task.promise._state = FINISHED
    state.cancelled(task, 1.0)
    gone = weakref.ref(task)
    del task
    assert gone() is None


def test_a_task_that_is_refused_in_the_middle_of_a_choice_stops_no_drone_there():
    actions = []
    state = state_of(1, actions.append)
    (drone,) = state.assignment.drones
    state.refused(FakeTask(1, function(), target=drone), lambda: LookupError())
    assert [type(action) for action in actions] == [Refuse]


# -- the cost of a step ----------------------------------------------------------------------------


def test_a_task_and_its_answer_take_a_look_at_one_drone_however_many_there_are(monkeypatch):
    looks = []

    def take(self, dedicated=False):
        looks.append(self.number)
        return can_take(self, dedicated)

    assignment = assignment_of(500)
    assignment.update()
    assert len(assignment.idle) == 500
    monkeypatch.setattr(DroneRecord, "can_take", take)
    for number in range(3):
        queued(assignment, FakeTask(number, function()))
        [(drone, _)] = assignment.assign(0.0)
        assignment.update()
        assert drone is assignment.drones[0] and drone not in assignment.idle
        drone.remove_in_flight(number)
        assignment.update()
        assert drone is assignment.idle[0]
    assert set(looks) == {0} and len(looks) <= 6
