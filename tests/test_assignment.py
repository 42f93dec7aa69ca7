"""Which drone gets which task (pool/assignment.py), in any order of events, without a process, a
thread, a clock or a promise.

    seed ──> Walk.step ──> submits, cancels, answers, recalls, deaths, starts, pauses, ...
                 └──> assign, validate, and `Walk.check`: a second, small model of what was sent

Each fault of `FAULTS` is planted by hand, and found."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from polycephaly.pool import assignment as assignments
from polycephaly.pool.assignment import Assignment
from polycephaly.pool.drone_record import DroneRecord
from polycephaly.pool.interfaces import State
from polycephaly.pool.queues import insert_in_order
from polycephaly.pool.resources import Resources
from polycephaly.pool.task_state import ENDING
from polycephaly.promises.promise import FINISHED, PENDING
from polycephaly.runtime.tuning import tuning
from polycephaly.wire.placeholders import PayloadWithRefs

EVENTS = 20
SIZES = (("db", 2), ("gpu", 1))


class Settled:
    """In place of a promise."""

    _state = PENDING

    def done(self):
        return self._state != PENDING


class FakeTask:
    """What assignment.py knows of a task."""

    args, payload, keeps, count, weight = (1,), b"", False, 1, assignments.Task.weight
    target = preferred_drone = sending = timeout = None
    preferred_since, position, resources, priority = 0.0, 0, (), 0

    def __init__(self, number, definition, **options):
        self.number = self.call_number = number
        self.definition, self.promise, self.state = definition, Settled(), ENDING
        vars(self).update(options)


def function(seconds=None, overlaps=False):
    return SimpleNamespace(seconds=seconds, overlaps=overlaps, captures=False)


class Walk:
    """One interleaving."""

    def __init__(self, seed):
        self.choose = random.Random(seed).randrange
        self.width, self.max_tasks = 1 + self.choose(3), [None, None, 3][self.choose(3)]
        self.assignment = Assignment(self.width, self.max_tasks, SIZES)
        self.assignment.runs_one_at_a_time = not self.choose(6)
        self.assignment.prepare = None  # no task takes kept values
        self.functions = [function(1e-4), function(tuning.batch_seconds), function()]
        self.functions += [function(1e-5, overlaps=True)] * (self.width > 1)
        self.numbers = iter(range(1, 10_000))
        self.now = 0.0
        self.queued = {}  # tasks that were submitted and are not with a drone, in that order
        self.sent = {}  # the drone of each other task
        self.was_returned, self.was_moved = set(), set()
        for _ in range(1 + self.choose(3)):
            self.start()

    def run(self):
        for _ in range(EVENTS):
            self.step()
        for _ in range(200):
            if not self.sent and not self.queued:
                return
            self.go_on()
            self.assign()
        raise AssertionError(f"{[task.number for task in self.queued]} never begin")

    def go_on(self):
        """Each drone does its part: everything ends."""
        for drone in [*self.assignment.drones]:
            drone.note_response(None)
            retires = drone.state is State.RETIRING and not drone.in_flight
            if drone.is_killed or drone.hung or (retires and not self.assignment.tasks_of(drone)):
                self.die(drone)
        if not self.taking():
            self.start()
        self.answer()

    def step(self):
        self.now += self.choose(3) / 100
        acts = [self.submit] * 5 + [self.answer] * 5 + [self.cancel, self.recall, self.die]
        acts += [self.start, self.pause, self.kill, self.retire, self.hang]
        acts[self.choose(len(acts))]()
        self.assign()

    # -- events ------------------------------------------------------------------------------------

    def start(self):
        number = next(self.numbers)
        drone = DroneRecord(self.assignment, number, f"pool.{number}")
        self.assignment.add(drone)
        drone.become(State.READY)

    def submit(self):
        for _ in range(1 + self.choose(3) ** 2):
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
            elif alive and not self.choose(6):
                options["preferred_drone"] = alive[self.choose(len(alive))]
            if not self.choose(8):
                options["timeout"] = 1.0
            definition = self.functions[self.choose(len(self.functions))]
            task = FakeTask(next(self.numbers), definition, **options)
            self.queue(task)

    def queue(self, task, first=False):
        self.queued[task] = None
        self.assignment.enter_queue(task)
        self.assignment.place(task, self.now, first=first)

    def cancel(self):
        waiting = [*self.queued]
        if waiting:
            task = waiting[self.choose(len(waiting))]
            task.promise._state = FINISHED
            self.assignment.leave_queue(task)
            del self.queued[task]

    def answer(self):
        busy = [drone for drone in self.assignment.drones if drone.in_flight]
        if busy:
            drone = busy[self.choose(len(busy))]
            numbers = [*drone.in_flight]
            at = self.choose(len(numbers)) if drone.overlapping else 0
            if not drone.overlapping and not self.choose(2):
                numbers = numbers[: 1 + self.choose(len(numbers))]
                tasks = drone.remove_many_in_flight(numbers)
            else:
                tasks = [drone.remove_in_flight(numbers[at])]
            for task in tasks:
                drone.tasks_done += 1
                del self.sent[task]
                if task.definition.seconds is None and not self.choose(3):
                    task.definition.seconds = 1e-4
            is_done = drone.state is State.READY and drone.tasks_left(self.max_tasks) <= 0
            if is_done and not drone.in_flight:
                self.retire(drone)

    def recall(self):
        """The loop takes the crowded drones, and one of them gives back what has not begun."""
        self.assignment.update()
        for drone in self.assignment.take_crowded():
            if self.choose(2):
                back = [drone.remove_in_flight(number) for number in [*drone.in_flight][1:]]
                self.requeue(back)
                self.assignment.note_recalled(drone)

    def requeue(self, tasks):
        for task in reversed(tasks):
            del self.sent[task]
            task.sending = None
            self.was_returned.add(task)
            self.queue(task, first=True)

    def die(self, drone=None):
        drones = self.assignment.drones
        if drones:
            drone = drone or drones[self.choose(len(drones))]
            drone.become(State.DEAD)
            begun, *others = [*drone.take_in_flight(), None]
            if begun is not None:
                del self.sent[begun]
            others = [task for task in others if task is not None]
            for task in [task for task in others if task.target is drone]:
                others.remove(task)
                del self.sent[task]
            self.requeue(others)
            own = self.assignment.take_dedicated(drone)
            assert {task for task in self.queued if task.target is drone} == {
                task for task in own if not task.promise.done()
            }
            for task in own:
                self.queued.pop(task, None)
            for task in self.assignment.take_preferring(drone):
                if not task.promise.done():
                    self.requeue_without_preference(task)
            self.assignment.remove(drone)

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
            drone.become(State.RETIRING)
            for task in self.assignment.take_preferring(drone):
                if not task.promise.done():
                    self.requeue_without_preference(task)

    def requeue_without_preference(self, task):
        task.preferred_drone = None
        self.was_moved.add(task)
        self.queue(task)

    def hang(self):
        """An overlapped task ignores its interrupt."""
        drone = self.one()
        if drone is not None and drone.overlapping:
            drone.hung.add(next(iter(drone.in_flight)))
            drone.changed()

    # -- what must hold ----------------------------------------------------------------------------

    def assign(self):
        self.assignment.update()
        for drone, runs in self.assignment.assign(self.now):
            self.check(drone, [task for run in runs for task in run])
        for drone in self.assignment.drones:
            drone.validate()
        self.assignment.validate()
        self.assignment.validate_idle()
        self.check_that_none_waits_in_vain()

    def check(self, drone, tasks):
        before = [*drone.in_flight.values()][: len(drone.in_flight) - len(tasks)]
        assert tasks and [*drone.in_flight.values()] == before + tasks
        for task in tasks:
            assert self.queued.pop(task, self) is None, (
                f"{task.number} was sent, and was not queued"
            )
            self.sent[task] = drone
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
        if task in self.was_returned or task in self.was_moved:
            return
        kind = task.target, task.resources, task.preferred_drone
        for other in self.queued:
            if (other.target, other.resources, other.preferred_drone) == kind:
                is_before = (-other.priority, other.number) < (-task.priority, task.number)
                if other in self.was_returned:
                    is_before = other.priority >= task.priority
                is_before = is_before and other not in self.was_moved
                assert not is_before, f"{task.number} overtakes {other.number}"

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
            Walk(seed).run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("start", range(0, 1200, 300))
def test_in_any_order_of_events_each_task_is_sent_once_to_one_that_may_run_it(start):
    walk(range(start, start + 300))


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


FAULTS = [
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
        walk(range(600))


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
