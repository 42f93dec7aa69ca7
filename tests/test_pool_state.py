"""What becomes of the tasks of a pool, and which drone gets which (pool/pool_state.py,
pool/assignment.py), in any order of events, without a process, a thread, a clock or a promise.

    seed ──> Walk.step ──> submits, cancels, answers, errors, recalls, deaths, leases, closes, ...
                 ├──> actions, carried out some time later, as the loop's deliveries are
                 └──> assign, validate, and `Walk.check`: a second, small model

The model knows what was submitted, what has begun and how often, and what must settle: each task
settles once; nothing that had begun runs again without retries, or before its delay is over;
nothing that had not begun is lost, unless its drone or the pool has gone; everything ends.

Each fault of `FAULTS` is planted by hand, and found."""

import random
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polycephaly.pool import assignment as assignments
from polycephaly.pool import leases, pool_state
from polycephaly.pool.assignment import Assignment
from polycephaly.pool.drone_record import DroneRecord
from polycephaly.pool.interfaces import State
from polycephaly.pool.limits import Interrupt, Kill, Limits, Look, LookAt, TimeOut
from polycephaly.pool.pool_state import Cancel, Fail, PoolState, Recall, Refuse, Restarted, SetTimer
from polycephaly.pool.queues import insert_in_order
from polycephaly.pool.resources import Resources
from polycephaly.pool.task_state import ENDING, INBOUND, QUEUED
from polycephaly.promises.promise import FINISHED, PENDING
from polycephaly.runtime.tuning import tuning
from polycephaly.wire.placeholders import PayloadWithRefs

EVENTS = 20
SIZES = (("db", 2), ("gpu", 1))
DELAY = 0.5


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


def function(seconds=None, overlaps=False):
    return SimpleNamespace(seconds=seconds, overlaps=overlaps, captures=False, label="a call")


class Walk:
    """One interleaving. `choose(n)` gives a number below n."""

    def __init__(self, choose):
        self.choose = choose
        self.width, self.max_tasks = 1 + self.choose(3), [None, None, 3][self.choose(3)]
        self.assignment = Assignment(self.width, self.max_tasks, SIZES)
        self.assignment.runs_one_at_a_time = not self.choose(6)
        self.assignment.prepare = None  # no task takes kept values
        self.new, self.actions = [], []  # those that are not noted yet, and not carried out
        self.state = PoolState(self.assignment, self.new.append)
        self.functions = [function(1e-4), function(tuning.batch_seconds), function()]
        self.functions += [function(1e-5, overlaps=True)] * (self.width > 1)
        self.numbers = iter(range(1, 10_000))
        self.now = 0.0
        self.timer = None
        self.unsettled = {}  # in the order of their calls
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
        self.places = {}  # of tasks that were returned: with which others, and where among them
        self.was_returned, self.was_moved = set(), set()
        for _ in range(1 + self.choose(3)):
            self.start()

    def run(self):
        for _ in range(EVENTS):
            self.step()
        for _ in range(1000):  # one that ignores its interrupt takes ten
            if not self.unsettled and not self.sent and not self.actions:
                return
            self.go_on()
            self.assign()
            self.carry_out(len(self.actions))
        waiting = {task.number: task.state.name for task in self.unsettled}
        raise AssertionError(f"{waiting} never end")

    def go_on(self):
        """Each drone does its part: everything ends."""
        self.note_actions()
        self.now += DELAY
        self.look_at_timer()
        while self.leased:
            self.end_lease()
        while self.recalled:
            self.recall()
        for drone in [*self.assignment.drones]:
            drone.note_response(None)
            retires = drone.state is State.RETIRING and not drone.in_flight
            if drone.is_killed or (retires and not self.assignment.tasks_of(drone)):
                self.die(drone)
        self.debugged.clear()
        if not (self.taking() or self.state.abandoned):
            self.start()
        self.answer()

    def step(self):
        self.now += self.choose(3) / 100
        self.look_at_timer()
        acts = [self.submit] * 10 + [self.answer] * 10 + [self.cancel, self.recall, self.die] * 2
        acts += [self.start, self.pause, self.kill, self.retire, self.die] * 2
        acts += [self.debug, self.lease, self.end_lease, self.end]
        acts += [self.hang] * 2 + [self.wait] * 4
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
                    assert drone not in self.recalled
                    self.recalled.append(drone)
                case Interrupt(drone, task):
                    assert task in self.sent and self.sent[task] is drone
                    self.interrupted.setdefault(task, self.now)
                case TimeOut(drone, task):
                    assert drone not in self.debugged
                    assert self.now >= task.sending.at + task.timeout and task.timed_out
                    self.timed_out.add(task)
                    self.actions.append(action)
                case Kill(drone):
                    self.check_kill(drone)
                    drone.note_kill("")
                case Look() | LookAt():
                    self.looks.append(action)
                case Fail() | Refuse() | Cancel():
                    self.actions.append(action)

    def carry_out(self, count):
        self.note_actions()
        for action in self.actions[:count]:
            task = action.task
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

    def cancel_one(self, task):
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
        self.attempts[task] += 1
        assert self.attempts[task] <= task.most_attempts, f"{task.number} runs again"

    # -- events ------------------------------------------------------------------------------------

    def start(self):
        if not self.state.abandoned:
            number = next(self.numbers)
            drone = DroneRecord(self.assignment, number, f"pool.{number}")
            drone.closed_error = lambda: LookupError(drone.name)
            self.assignment.add(drone)
            drone.become(State.READY)

    def submit(self):
        for _ in range(0 if self.state.closing else 1 + self.choose(3) ** 2):
            options = {}
            if not self.choose(4):
                options["priority"] = self.choose(3)
            if not self.choose(6):
                options["resources"] = (("db", 1 + self.choose(2)),)
            elif not self.choose(8):
                options["resources"] = (("db", 1), ("gpu", 1))
            alive = self.taking()
            if alive and not self.choose(5):
                options["target"] = alive[self.choose(len(alive))]
            elif self.dead and not self.choose(10):
                options["target"] = self.dead  # it has died since the call
            elif alive and not self.choose(6):
                options["preferred_drone"] = alive[self.choose(len(alive))]
            if not self.choose(4):
                options["timeout"] = 1.0
            if not self.choose(3):
                options["retries"] = 1 + self.choose(2)
                options["retry"] = [None, True][self.choose(2)]
            definition = self.functions[self.choose(len(self.functions))]
            task = FakeTask(next(self.numbers), definition, **options)
            self.unsettled[task] = None
            self.assignment.enter_queue(task)
            self.state.arrived(task, self.now)
            self.note_queued()

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
            at = self.choose(len(numbers)) if drone.overlapping else 0
            if not drone.overlapping and not self.choose(2):
                numbers = numbers[: 1 + self.choose(len(numbers))]
                tasks = drone.remove_many_in_flight(numbers)
            else:
                tasks = [drone.remove_in_flight(numbers[at])]
            for task in tasks:
                self.answer_one(drone, task)
            is_done = drone.state is State.READY and drone.tasks_left(self.max_tasks) <= 0
            if is_done and not drone.in_flight:
                self.retire(drone)

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
            for task in back:
                del self.sent[task]
            self.note_returned(back)
            self.state.recalled(drone, [(number, 0) for number in numbers], self.now)
            self.note_queued()

    def die(self, drone=None):
        drones = self.assignment.drones
        if drones:
            # Often by what its interrupt leads to.
            stopped = [self.sent[task] for task in self.sent if task in self.interrupted]
            if stopped and self.choose(2):
                drone = drone or stopped[self.choose(len(stopped))]
            drone = drone or drones[self.choose(len(drones))]
            in_flight = [*drone.in_flight.values()]
            drone.become(State.DEAD)
            self.state.limits.drone_died(drone)
            # It has begun all up to that one. Most had begun one, or none; some had answers ready.
            count = min(len(in_flight), [1, 1, 1, 0, 2, 9][self.choose(6)])
            answered = sum(task.position <= drone.highest_answered for task in in_flight)
            count = max(count, answered)  # of overlapped tasks, a later one may have ended first
            begun = in_flight[:count]
            for task in begun:
                self.begins(task)
            for task in in_flight:
                del self.sent[task]
                self.interrupted.pop(task, None)
            fates = drone.take_fates([begun[-1].number] if begun else [])
            assert fates.begun == begun and fates.not_begun == in_flight[count:]
            self.note_returned(fates.not_begun)
            self.was_returned.update(begun)
            self.places = {task: self.places[task] for task in self.places if task not in begun}
            self.dead = drone
            self.move(*drone.preferred)
            self.state.drone_died(drone, fates, BrokenPipeError(drone.name), self.now)
            self.state.drone_ended(drone, LookupError(drone.name), self.now)
            self.note_queued()
            self.check_that_none_runs_again(begun)

    def lease(self):
        taken = leases.lease(self.as_dispatcher(), 2, lambda task: task.target is None)
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
        self.now += DELAY * (1 + self.choose(4)) / 4
        self.look_at_timer()

    def end(self):
        """The pool closes, and may cancel what has not begun; or it breaks, or is killed."""
        how = self.choose(8)
        if how < 4:
            running = {next(iter(each.in_flight), 0) for each in self.assignment.drones}
            both = how == 1
            self.state.close([*self.unsettled], running, cancel=how < 2, cancel_running=both)
            self.is_cancelled = self.is_cancelled or how < 2
        elif how == 4:
            self.is_cancelled = True
            self.state.abandon([*self.unsettled])
        elif how == 5 and not (self.state.abandoned or self.actions or self.new):
            # Of what had begun, it is not known how far it was.
            for task in self.sent:
                self.begins(task)
            self.sent.clear()
            self.is_cancelled = True
            self.state.broke(OSError("no drone can be started"), [*self.unsettled], self.now)
            failed = {action.task for action in self.new if isinstance(action, Fail)}
            assert failed == {*self.unsettled}
            self.state.abandon([*self.unsettled])
        if self.state.abandoned:
            for drone in [*self.assignment.drones]:
                drone.note_kill("")
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
        if (drone := self.one()) is not None:
            drone.note_kill("")

    def retire(self, drone=None):
        drone = drone or self.one()
        if drone is not None:
            self.move(*drone.preferred)
            drone.become(State.RETIRING)
            self.state.drone_retires(drone, self.now)
            self.note_queued()

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
        self.state.validate()
        self.check_that_none_waits_in_vain()
        self.check_that_none_is_stuck()

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

    def check_kill(self, drone):
        stopped = [task for task in drone.in_flight.values() if task in self.interrupted]
        began = min(self.interrupted[task] for task in stopped)
        assert self.now - began > 0.999 * tuning.grace_seconds, f"{drone.name} is killed too early"

    def check_error(self, action, task):
        """A task that is rejected had begun, or nothing is left that could begin it."""
        if isinstance(action, TimeOut):
            return
        has_gone = self.state.broken is not None or self.state.abandoned
        has_gone = has_gone or (task.target is not None and task.target.state is State.DEAD)
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
            assert sum(estimates) <= tuning.batch_seconds * 1.001
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
            if drone.state is State.READY and others and drone not in {*self.recalled, *told}:
                key = drone, next(iter(drone.in_flight))
                times, since = self.stuck.get(key, (0, self.now))
                if self.now - since >= 2 * tuning.batch_seconds:
                    times, since = times + 1, self.now
                stuck[key] = times, since
                # The first look may have found another task running, or others queued.
                assert times < 3, f"{drone.name} is stuck"
        self.stuck = stuck

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


def walk(seeds):
    for seed in seeds:
        try:
            Walk(random.Random(seed).randrange).run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


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
@given(st.data())
@settings(max_examples=2000, deadline=None, suppress_health_check=[*HealthCheck])
def test_in_many_orders_that_are_made_shorter_where_one_fails(data):
    Walk(drawn(data)).run()


@pytest.mark.slow
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
    def broke(self, error, unsettled, now):
        for drone in self.assignment.drones:
            drone.take_in_flight()
        self.broken = error

    plant(PoolState, "broke", broke)


def an_abandoned_pool_leaves_its_queue(plant):
    def abandon(self, unsettled):
        self.closing = self.abandoned = True

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


FAULTS = [
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


def test_a_cancelled_task_that_would_run_again_in_a_day_is_not_kept():
    state = PoolState(assignment_of(1), lambda action: None)
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
    state = PoolState(assignment_of(1), actions.append)
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
