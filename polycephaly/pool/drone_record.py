"""What a pool knows of one drone: its state, its tasks, and how much more it takes.

    STARTING ──HELLO──> PREPARING (initializer) ──> READY ──> RETIRING (no new tasks) ──> STOPPING
                                                          any state ──exited──> DEAD

Nothing here sends, waits or looks at a clock. A handle (drone_handle.py) is a record with a way to
the drone; assignment.py chooses the tasks. Only the loop's thread changes a record, but any thread
may read `state`, `in_flight`, `unresponsive` and the counts.

Each change of what the drone takes ends with `changed`, so that the pool looks again at this drone,
and at no other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

from ..runtime.tuning import tuning
from ..wire.status_page import unpack_calls_begun
from .chunk import Chunk
from .interfaces import State
from .task import Task
from .task_state import ENDING


class Observer(Protocol):
    """What the records of a pool report to: an `Assignment`."""

    width: int
    has_resources: bool
    note_change: Callable[[DroneRecord], object]
    release_resources: Callable[[Task], None]


class Fates(NamedTuple):
    """The tasks of a drone that has died, in the order in which they were sent."""

    begun: list[Task]
    """They run again if their `retries` allow that, and are rejected otherwise."""
    not_begun: list[Task]
    """They are queued again, except those for this drone only, which are rejected."""
    running: Task | None
    """The last of those that have begun, as far as the drone has displayed that."""
    rest: Chunk | None
    """The calls of `running`, if that is a chunk, that were not begun, as far as that is known.
    They are not among the tasks that were not begun."""


class DroneRecord:
    takes_behind_others = True
    """Whether the drone may get tasks behind those that it has: they can be recalled."""

    def __init__(self, observer: Observer, number: int, name: str) -> None:
        self._observer = observer
        self.number = number  # in the order in which the drones were started
        self.name = name
        self.pid: int | None = None  # known once it has started
        self.reference = weakref.ref(self)
        self.state = State.STARTING
        # Tasks that were sent and not answered, in the order in which the drone runs them.
        self.in_flight: dict[int, Task] = {}
        self.dedicated: deque[Task] = deque()  # tasks that only this drone may run
        self.queued = 0  # those of them that are `QUEUED`, there or for a resource
        self.preferred: deque[Task] = deque()  # tasks whose kept values this drone has
        self.packing: set[int] = set()  # kept values that it was asked to pickle
        # What it runs before it takes tasks, and whether it runs the first of that: preparation.py.
        self.preparations: deque[Any] = deque()
        self.is_preparing = False
        self.load = 0.0  # estimated seconds of the tasks in flight
        self.unknown = 0  # tasks in flight without an estimate
        self.overlapping = 0  # tasks in flight that overlap; if any do, all do
        # Cancelled or timed-out overlapped tasks that ignored their interrupt. While any remain, no
        # new tasks are sent, so that the drone can be killed without losing live ones.
        self.hung: set[int] = set()
        self.sent_count = 0  # tasks that were sent in all
        # The highest `position` of an answered task. All tasks up to it have begun.
        self.highest_answered = 0
        # After a malformed message: tasks up to this `position` may have been answered in that. See
        # `Dispatcher.watch_for_lost_answer`.
        self.suspect_position = 0
        self.retire_when_ready = False  # to be retired as soon as it is ready
        self.tasks_done = 0
        self.last_contact_at = 0.0  # when tasks were last sent, or results last received
        self.recall_pending = False
        self.listed_in: list[DroneRecord] | None = None  # of the observer's lists
        # Of the tasks with a time limit, by number: the deadline, and the request for their frames,
        # as soon as there is one.
        self.deadlines: dict[int, tuple[float, Any]] = {}
        self.timer: Any = None  # for the first of these, at `timer_at`: see limits.py
        self.timer_at = inf
        self.unresponsive: str | None = None  # why there is no heartbeat; None while there is one
        self.is_killed = False  # by the controller: its end is near
        self.killed_on_request = False
        self.kill_reason = ""  # why, if there is more to say than the pool's end

    @property
    def alive(self) -> bool:
        return self.state is not State.DEAD

    def changed(self) -> None:
        """Have the pool look at what this drone takes. Called after each change of that."""
        self._observer.note_change(self)

    def become(self, state: State) -> None:
        self.state = state
        self.changed()

    def note_kill(self, reason: str, on_request: bool = False) -> None:
        """Note that the drone is about to be killed. From here on it gets no tasks."""
        self.is_killed = True
        self.kill_reason = self.kill_reason or reason
        self.killed_on_request = self.killed_on_request or on_request
        self.changed()

    def note_response(self, stall_reason: str | None) -> None:
        """Note that the drone does not respond, and why, or that it does (None)."""
        self.unresponsive = stall_reason
        self.changed()

    # -- what it takes -----------------------------------------------------------------------------

    def can_take(self, dedicated: bool = False) -> bool:
        """Return whether the drone may be sent a task now.

        An idle drone takes any task. A busy drone takes known short tasks until half of the budget
        is used, a chunk behind another one, and overlapped tasks beside others of that kind. A
        retiring drone takes only dedicated tasks, one that is being prepared none.
        """
        if (
            not (self.state is State.READY or (dedicated and self.state is State.RETIRING))
            or self.preparations
            or self.unresponsive
            or self.is_killed  # it may respond again before it is dead
        ):
            return False
        if self.overlapping:
            return self.overlapping < self._observer.width and not self.hung
        if not self.in_flight:
            return True
        return (
            self.takes_behind_others
            and not self.unknown
            and (self.load < tuning.batch_seconds / 2 or self.takes_chunk_behind())
        )

    def takes_chunk_behind(self) -> bool:
        """Return whether the drone runs a chunk, and has nothing else: then it takes another one of
        known length, so that it need not wait for that.
        """
        return len(self.in_flight) == 1 and next(iter(self.in_flight.values())).is_divisible

    def load_behind_one(self) -> float:
        """Return the estimated seconds of the tasks behind the one that runs."""
        head = next(iter(self.in_flight.values()))
        assert head.sending is not None
        return self.load - max(0.0, head.sending.estimate)

    def has_calls_behind_one(self) -> bool:
        """Return whether calls wait behind the one that runs that another drone could run."""
        tasks = self.in_flight.values()
        if len(tasks) == 1:
            [task] = tasks
            return task.is_divisible and task.calls_left > 1
        if len(tasks) - self.overlapping <= 1:
            return False
        last = next(reversed(tasks))
        return last.target is None or any(task.target is None for task in [*tasks][1:])

    def is_crowded(self) -> bool:
        """Return whether calls wait behind the one that runs, and may be recalled."""
        return self.has_calls_behind_one() and not self.recall_pending and self.state is State.READY

    def tasks_left(self, max_tasks: int | None) -> int:
        """Return how many more tasks the drone may be sent until it has had `max_tasks`. There is
        no limit for the dedicated tasks of a retiring drone.
        """
        if max_tasks is None or self.state is State.RETIRING:
            return 1 << 30
        return max_tasks - self.tasks_done - len(self.in_flight) + self.is_preparing

    # -- tasks leave flight ------------------------------------------------------------------------

    def note_answers(self, chunk: Chunk, calls: int, failed: bool) -> bool:
        """Note that so many more calls of `chunk` are answered. Return whether nothing is left of
        it: all are, or the last one has `failed`.
        """
        chunk.answered += calls
        is_over = failed or not chunk.calls_left
        if is_over:
            self.remove_in_flight(chunk.number)
            self.highest_answered = max(self.highest_answered, chunk.position)
            chunk.payload = b""
        self.changed()
        return is_over

    def take_back(self, chunk: Chunk, calls: int) -> Chunk:
        """Return the last `calls` calls of `chunk`, which this drone will not begin."""
        sending = chunk.sending
        assert sending is not None
        if sending.estimate > 0:
            left = sending.estimate * (chunk.count - calls) / chunk.count  # never below 0
            self.load -= sending.estimate - left
            sending.estimate = left
        self.changed()
        return chunk.take_rest(calls)

    def remove_many_in_flight(self, numbers: Sequence[int]) -> list[Task | None]:
        """Remove many tasks from flight, as `remove_in_flight` does, but for their deadlines, which
        are dropped when their time comes.
        """
        if self.overlapping or self._observer.has_resources:
            return [self.remove_in_flight(number) for number in numbers]
        in_flight = self.in_flight
        tasks = [in_flight.pop(number, None) for number in numbers]
        known = unknown = 0.0
        for task in tasks:
            if task is not None:
                task.state = ENDING
                estimate = task.sending.estimate  # type: ignore[union-attr]  # set, since in flight
                if estimate < 0:
                    unknown += 1
                else:
                    known += estimate
        self.load = self.load - known if in_flight else 0.0
        self.unknown -= int(unknown)
        self.changed()
        return tasks

    def take_fates(self, begun: Iterable[int], call: int = 0) -> Fates:
        """Take all tasks out of flight, because this drone has died. `begun` are numbers of tasks
        that it is known to have begun: so it has begun all that were sent before these. If the last
        one is a chunk, `call` is what the status page tells of its calls; 0 if that is not known.
        """
        in_flight = self.in_flight
        known = [in_flight[number].position for number in begun if number in in_flight]
        last_begun = max(self.highest_answered, *known, 0)
        running: Task | None = None
        begun_tasks: list[Task] = []
        others: list[Task] = []
        for task in self.take_in_flight():
            if task.position <= last_begun:
                running = task
            # A malformed message may have been the answer of any task sent before.
            has_begun = task.position <= max(last_begun, self.suspect_position)
            (begun_tasks if has_begun else others).append(task)
        rest: Chunk | None = None
        calls_begun, run_length = unpack_calls_begun(call)
        if isinstance(running, Chunk) and running.answered < calls_begun:
            calls_begun = min(calls_begun, running.count)  # it may have found that none was left
            if run_length == 1:
                running.lost_call = calls_begun - running.answered - 1
            if calls_begun < running.count:
                rest = running.take_rest(running.count - calls_begun)
        for task in [*begun_tasks, *others]:
            if isinstance(task, Chunk):
                task.drop_answered()
        return Fates(begun_tasks, others, running, rest)

    def take_in_flight(self) -> list[Task]:
        """Remove all tasks from flight and return them."""
        return [*filter(None, self.remove_many_in_flight(list(self.in_flight)))]

    def remove_in_flight(self, number: int) -> Task | None:
        """Remove a task from flight and return it, or None if it is not in flight."""
        task = self.in_flight.pop(number, None)
        if task is not None:
            task.state = ENDING
            sending = task.sending
            assert sending is not None
            if task.timeout is not None:
                self.deadlines.pop(number, None)
            if task.definition.overlaps:
                self.overlapping -= 1
                self.hung.discard(number)
            elif sending.estimate < 0:
                self.unknown -= 1
            else:
                self.load -= sending.estimate
            if not self.in_flight:
                self.load = 0.0
            if task.resources:
                self._observer.release_resources(task)
            self.changed()
        return task

    def validate(self) -> None:
        """Raise `AssertionError` if a count is wrong: see `Assignment.validate`."""
        sent = [*self.in_flight.values()]
        overlapping = sum(task.definition.overlaps for task in sent)
        unknown = sum(
            task.sending is not None and task.sending.estimate < 0 and not task.definition.overlaps
            for task in sent
        )
        assert self.overlapping == overlapping, f"{self.name} overlaps {self.overlapping} tasks"
        assert self.unknown == unknown, f"{self.name} has {self.unknown} of unknown length"
        assert self.load > -1e-6, f"{self.name} has a load of {self.load}"
        positions = [task.position for task in sent]
        assert positions == sorted(positions), f"{self.name}: {positions}"
