"""What becomes of the tasks of one pool: after each event, where each task is, and what is to be
done about it.

    arrived, returned, due ──> a queue ──assignment.py──> SENT ──> answered
    failed, lost ──> a queue again, at once or when it is `due`, or `Fail`
    a drone is stuck ──> `Recall` ──recalled──> a queue
    cancelled ──> `Interrupt`, or dropped       close, abandon, broke ──> `Cancel`, `Fail`, `Kill`

To be read in this order: task_state.py, with the states of a task and what changes them; this
file; limits.py, for tasks that run for too long, or were cancelled; assignment.py, for which drone
gets which of the queued tasks; drone_record.py, for what a drone takes, and what a dead one had
begun; population.py, for which drones there are.

Nothing here sends, waits, settles a promise or looks at a clock. A method is called for each event;
it changes the state and gives `do` the actions that follow, in order: the dispatcher and the
supervisor carry them out, and a test lists them. No action comes back here before the event is
over: a promise that is cancelled, for example, is `cancelled` later. Only the loop's thread calls
the methods. Any thread may read, and may change `awaiting_inputs`, `inbound` and `unsettled`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import copy_error
from ..runtime.timers import Timer, Timers
from ..runtime.tuning import tuning
from ..wire.placeholders import PayloadWithRefs
from .assignment import Assignment
from .chunk import MIN_CHUNK_SECONDS, Chunk
from .drone_record import DroneRecord, Fates
from .interfaces import State
from .limits import AskFrames, Interrupt, Kill, Limits, Look, LookAt, TimeOut
from .population import Population, PopulationAction, Recall
from .task import Task
from .task_state import DELAYED, ENDING, LEASED, QUEUED

if TYPE_CHECKING:
    from .config import PoolConfig

MAX_UNSWEPT_TASKS = 1000
"""Cancelled tasks that may stay in queues that are shorter than that."""


MIN_RECALL_SECONDS = 0.002
"""Seconds of work from which it is worth while to have it given back, and sent to another drone."""


class Fail(NamedTuple):
    """Reject a task: it was run, or its drone or the pool has ended before that."""

    task: Task
    error: BaseException


class Refuse(NamedTuple):
    """Reject a task that has found no queue, or whose kept values are lost. To make the error may
    run code of users.
    """

    task: Task
    make_error: Callable[[], BaseException]


class Cancel(NamedTuple):
    """Cancel a task."""

    task: Task


class Divide(NamedTuple):
    """Let these chunks take the place of the last calls of a chunk."""

    chunk: Chunk
    rests: list[Chunk]


class SettleChunk(NamedTuple):
    """Settle a chunk of which nothing is left: all its calls are answered, or in other chunks."""

    chunk: Chunk


class Restarted(NamedTuple):
    """A task has a new number. What is kept of the attempt with the old one is of no use."""

    task: Task
    number: int


class Broken(NamedTuple):
    """The pool is broken: refuse new tasks with `error`. All tasks are rejected, and all drones
    killed, by the actions that follow.
    """

    error: BaseException


class SettleLost(NamedTuple):
    """Reject the tasks that an earlier error has met on their way, after all others."""

    error: BaseException


class GiveUpStarts(NamedTuple):
    """Kill what is still being started."""


class SetTimer(NamedTuple):
    """Have `due` called at this time, in place of the one before."""

    when: float


Action = (
    (Fail | Refuse | Cancel | Divide | SettleChunk | Restarted | Broken | SettleLost)
    | (GiveUpStarts | SetTimer)
    | (Interrupt | AskFrames | TimeOut | Kill | Look | LookAt)  # see limits.py
    | PopulationAction
)


class PoolState:
    def __init__(
        self,
        config: PoolConfig,
        assignment: Assignment,
        inbound: deque[Task],
        unsettled: dict[Any, None],
        do: Callable[[Action], object],
    ) -> None:
        """`inbound` and `unsettled` are those of the dispatcher."""
        self.assignment = assignment
        self.inbound = inbound
        self.unsettled = unsettled
        self._unsettled_before = 0  # tasks, when `_has_unsettled` was called last
        self._do = do
        # Returns which drone has most of the kept values that a task takes, and the bytes of the
        # others. Set by the dispatcher.
        self.find_holder: Callable[[Iterable[Any]], tuple[Any, int]]
        # Tasks that wait for promises among their arguments.
        self.awaiting_inputs: set[Task] = set()
        # Tasks that wait for kept values or another attempt, or are leased to another process. They
        # may be in `awaiting_inputs` too, until `Dispatcher.on_inputs_ready` returns.
        self.parked: set[Task] = set()
        self.delayed: dict[Task, Timer] = {}  # those of `parked` that run again
        self._now = 0.0  # when `due` was called last
        self._timers = Timers()
        self._timers.now = lambda: self._now
        self.limits = Limits(do, self._call_at, self._timers.cancel)
        self.population = Population(
            config, assignment.drones, self, do, self._call_at, self._timers.cancel
        )
        self._cancelled_since_sweep = 0
        self.closing = False  # no more tasks come
        # At the end all tasks were cancelled, or all but those that were running.
        self.has_cancelled = False
        self.abandoned = False  # all drones are being killed
        self.broken: BaseException | None = None  # why no drone can run any task

    # -- tasks come, and come back -----------------------------------------------------------------

    def arrived(self, task: Task, now: float) -> None:
        """Queue `task`, which comes from the inbox, or was parked. `Assignment.enter_queue` has
        counted it.
        """
        # Read once: if the task is cancelled, another thread may clear the payload.
        payload = task.payload
        if type(payload) is PayloadWithRefs:
            task.preferred_drone, task.bytes_to_move = self.find_holder(
                payload.remote_objects.values()
            )
        if task.promise.done():
            self.assignment.leave_queue(task)
            self._freed(task, now)
        else:
            self._place(task, now)

    def resumed(self, task: Task, now: float) -> None:
        """Queue a task again that was parked or delayed, or one that was never in the inbox."""
        self.parked.discard(task)
        self.delayed.pop(task, None)
        self.assignment.enter_queue(task)
        self.arrived(task, now)

    def returned(self, tasks: list[Task], now: float) -> None:
        """Put tasks that were not begun back into their queues, in the same order, before other
        tasks of their priorities.
        """
        if self.abandoned:  # no drone will take them
            for task in tasks:
                self._do(Cancel(task))
            return
        for task in reversed(tasks):
            # Its time limit expired before it began.
            if task.overrun is not None and not task.promise.done():
                self.failed(task, task.overrun, now)
                continue
            task.sending = None
            if _is_settled(task):  # while it was with the drone
                task.payload = b""
                self._freed(task, now)
                continue
            self.insert(task, now, first=True)

    def insert(self, task: Task, now: float, *, first: bool = False) -> None:
        """Queue `task` behind the tasks of its priority; if `first`, before them. Reject or cancel
        it if its drone or the pool has ended.
        """
        self.assignment.enter_queue(task)
        self._place(task, now, first)

    def _place(self, task: Task, now: float, first: bool = False) -> None:
        """Put `task`, which `Assignment.enter_queue` has counted, into its queue."""
        if self.broken is not None:
            self.refused(task, partial(copy_error, self.broken))
        elif self.abandoned:
            self.assignment.leave_queue(task)
            self._do(Cancel(task))
        elif task.target is not None and task.target.state is State.DEAD:
            self.refused(task, task.target.closed_error)
        else:
            self.assignment.place(task, now, first=first)

    def refused(self, task: Task, make_error: Callable[[], BaseException]) -> None:
        """Drop a task that can never begin."""
        self.assignment.leave_queue(task)
        task.payload = b""
        self._do(Refuse(task, make_error))

    def _freed(self, task: Task, now: float) -> None:
        """Note that `task` has gone. If only one drone may run it, and retires, it may stop."""
        if task.target is not None:
            self.population.stop_if_retired(task.target, now)

    # -- another attempt ---------------------------------------------------------------------------

    def failed(self, task: Task, error: BaseException, now: float) -> None:
        """Run a task that has a `Retry` again after a delay, or reject the task with `error`."""
        target_died = task.target is not None and task.target.state is State.DEAD
        is_over = _is_settled(task) or self.abandoned or self.has_cancelled or target_died
        delay = None if is_over else task.next_delay(error)
        if delay is None:
            task.payload, task.recompute_payload = b"", None
            self.parked.discard(task)
            self._do(Fail(task, task.with_attempts(error)))
            self._freed(task, now)
        else:
            self._do(Restarted(task, task.number))
            task.start_over()
            task.state = DELAYED
            self.parked.add(task)
            self.delayed[task] = self._call_at(now + delay, self.resumed, task)

    def lost(self, tasks: list[Task], error: BaseException, now: float, *, may_retry: bool) -> None:
        """Queue the tasks again that may be retried; reject the others with copies of `error`.

        A task may be retried if `may_retry` is true, the task has `retries` left and no target
        drone, and the pool's tasks were not cancelled. One with a `Retry` is treated as one that
        has `failed` with the error.
        """
        again = []
        for task in tasks:
            if _is_settled(task):
                task.payload = b""
            elif may_retry and task.retry is not None:
                self.failed(task, copy_error(task.overrun or error), now)
            elif (
                may_retry
                and task.retries > 0
                and task.target is None
                and not (self.abandoned or self.has_cancelled)
            ):
                task.retries -= 1
                task.sending = task.lost_call = None
                again.append(task)
            else:
                task.payload = b""
                self._do(Fail(task, copy_error(error)))
        self.returned(again, now)

    def _end_delay(self, task: Task) -> None:
        timer = self.delayed.pop(task, None)
        if timer is not None:
            self._timers.cancel(timer)

    # -- time --------------------------------------------------------------------------------------

    def _call_at(self, when: float, method: Callable[..., None], *args: Any) -> Timer:
        """Call ``method(*args, now)`` at that time."""
        timer = self._timers.set(when, lambda: method(*args, self._now))
        if self._timers.heap[0][2] is timer:
            self._do(SetTimer(when))
        return timer

    def due(self, now: float) -> None:
        """Do what is to be done by now."""
        self._now = now
        self._timers.fire_due()
        if self._timers.heap:
            self._do(SetTimer(self._timers.heap[0][0]))

    # -- drones that are stuck ---------------------------------------------------------------------

    def turn_over(self, now: float) -> None:
        """Note that the queue is empty while a drone is idle: have what waits behind the running
        task of another one recalled, at once if that takes long, else unless that answers soon.
        """
        for drone in self.assignment.take_crowded():
            if drone.load_behind_one() > MIN_RECALL_SECONDS:
                self._do(Recall(drone))  # pending until the drone answers
            else:
                head = next(iter(drone.in_flight))
                seconds = 2 * tuning.batch_seconds
                self._call_at(now + seconds, self._recall_if_stuck, drone, head)

    def _recall_if_stuck(self, drone: DroneRecord, head: int, now: float) -> None:
        if (
            drone.state is State.READY
            and drone.has_calls_behind_one()
            and next(iter(drone.in_flight)) == head
            and not self.assignment.queue
        ):
            self._do(Recall(drone))
        else:
            self.assignment.note_recalled(drone)

    def recalled(self, drone: DroneRecord, returned: Iterable[tuple[int, int]], now: float) -> None:
        """Queue again what a drone has given back: tasks by their numbers, each with how many calls
        of a chunk it has not begun, from the end; 0 for a task of which it has begun nothing.
        """
        self.assignment.note_recalled(drone)
        tasks: list[Task] = []
        for number, calls in returned:
            task = drone.in_flight.get(number)
            if task is not None and calls:
                assert isinstance(task, Chunk)
                tasks += self._divided(task, drone.take_back(task, calls))
                if not task.calls_left:
                    drone.remove_in_flight(number)
                    self._do(SettleChunk(task))
            elif task is not None:
                drone.remove_in_flight(number)
                tasks.append(task)
        self.returned(tasks, now)

    def _divided(self, chunk: Chunk, rest: Chunk) -> list[Chunk]:
        """Divide the rest of `chunk` among the drones that are idle, and return what is to be
        queued of it.
        """
        pieces = min(rest.count, 1 + len(self.assignment.idle))
        seconds = rest.definition.seconds
        if seconds is not None:
            pieces = min(pieces, 1 + int(rest.count * seconds / MIN_CHUNK_SECONDS))
        rests = rest.divided(pieces)
        self._do(Divide(chunk, rests))
        if not (self.has_cancelled or chunk.promise.done()):
            return rests
        for each in rests:
            each.state = ENDING
            self._do(Cancel(each))
        return []

    # -- drones end --------------------------------------------------------------------------------

    def drone_died(
        self, drone: DroneRecord, fates: Fates, error: BaseException, now: float
    ) -> None:
        """Handle the death of a drone, which is `DEAD` by now: what it had begun is lost with
        `error`, unless it may run again. The rest runs elsewhere, except tasks for this drone only.
        A pool that is closing replaces its drones, too, while tasks are queued. `drone_ended` comes
        next.
        """
        not_begun = [task for task in fates.not_begun if task.target is None]
        if fates.rest is not None:
            assert isinstance(fates.running, Chunk)
            not_begun[:0] = self._divided(fates.running, fates.rest)
        own = [task for task in fates.not_begun if task.target is not None]
        own += self.assignment.take_dedicated(drone)
        for task in [task for task in self.delayed if task.target is drone]:
            self._end_delay(task)
            self.parked.discard(task)
            task.state = ENDING
            own.append(task)
        self.returned(not_begun, now)
        self.lost(fates.begun, error, now, may_retry=True)
        self.lost(own, error, now, may_retry=False)

    def drone_ended(self, drone: DroneRecord, error: BaseException, now: float) -> None:
        """Forget a drone. Tasks that only this drone may run are rejected with `error`."""
        drone.become(State.DEAD)
        self.lost(self.assignment.take_dedicated(drone), error, now, may_retry=False)
        self.drone_retires(drone, now)
        self.assignment.remove(drone)
        self.population.forget(drone)

    def drone_retires(self, drone: DroneRecord, now: float) -> None:
        """Queue the tasks elsewhere that prefer `drone`, which takes no more of them."""
        for task in self.assignment.take_preferring(drone):
            task.preferred_drone = None
            self.resumed(task, now)
        self.population.stop_if_retired(drone, now)

    # -- tasks are cancelled -----------------------------------------------------------------------

    def cancelled(self, task: Task, now: float) -> None:
        """Drop `task`, whose promise is cancelled, or have its drone stop it."""
        self.awaiting_inputs.discard(task)
        self.parked.discard(task)
        self._end_delay(task)
        drone = task.handle
        if drone is not None and task.number in drone.in_flight and drone.alive:
            self.limits.interrupt(drone, task, now)
            return
        self.assignment.leave_queue(task)
        task.payload = b""
        self._freed(task, now)
        self._cancelled_since_sweep += 1
        if self._cancelled_since_sweep > MAX_UNSWEPT_TASKS:
            self._sweep_queues()

    def _sweep_queues(self) -> None:
        """Remove the cancelled tasks, which would pile up while all drones are busy, if they may be
        a third of all.
        """
        queued = self.assignment.count_in_queues()
        if self._cancelled_since_sweep > MAX_UNSWEPT_TASKS + queued // 2:
            self._cancelled_since_sweep = 0
            self.assignment.drop_settled()

    def drone_released(self, drone: DroneRecord) -> None:
        """Cancel the tasks that only `drone` may run."""
        in_flight = reversed(drone.in_flight.values())
        for task in [*self.assignment.tasks_of(drone), *self._unqueued(), *in_flight]:
            if task.target is drone:
                self._do(Cancel(task))

    # -- what is left to do ------------------------------------------------------------------------

    def _unqueued(self) -> list[Task]:
        # In this order, because any thread may move a task from the first to the second.
        return [*self.awaiting_inputs, *self.inbound, *self.parked]

    def has_tasks_for(self, drone: DroneRecord) -> bool:
        """Return whether tasks wait for this drone, including those that wait for their own inputs.

        The latter are checked first: `Dispatcher.on_inputs_ready` queues such a task before it is
        removed from the waiting tasks, so no task is missed.
        """
        unqueued = [task for task in self._unqueued() if task.target is drone]
        queued = self.assignment.tasks_of(drone)
        return any(not task.promise.done() for task in [*unqueued, *queued])

    def needs_drones(self) -> bool:
        """Return whether a task runs, or has yet to run."""
        assignment = self.assignment
        assignment.update()
        if assignment.queued or self.inbound or assignment.busy:
            return True
        return any(task.state is not ENDING or task in self.parked for task in [*self.unsettled])

    def is_unfinished(self) -> bool:
        """Return whether a task is not settled, or still with a drone."""
        # If a thread had checked `refusal` before, the task that it adds is rejected at the end.
        if self.abandoned:
            return False
        self.assignment.update()
        return self._has_unsettled() or bool(self.assignment.busy)

    def _has_unsettled(self) -> bool:
        """Return whether a task is not settled. If their number is what it was, each is looked at:
        a thread that has cancelled some may have been interrupted in the middle of that.
        """
        count, self._unsettled_before = self._unsettled_before, len(self.unsettled)
        if self.unsettled and count == len(self.unsettled):
            for task in [*self.unsettled]:
                if task.promise.done():
                    self.unsettled.pop(task, None)
        return bool(self.unsettled)

    # -- the pool ends -----------------------------------------------------------------------------

    def close(self, running: set[int], *, cancel: bool, cancel_running: bool) -> None:
        """Expect no more tasks. If this is to `cancel`, cancel those that are not settled, but
        those with the numbers `running` only if `cancel_running`.
        """
        self.closing = True
        if cancel:
            self.has_cancelled = True
            sent = [task for each in self.assignment.drones for task in each.in_flight.values()]
            for task in self._unanswered(sent):
                self._do(Cancel(task))
            for drone in self.assignment.drones:
                # Backwards: if the running task was first, the drone would begin the next one.
                for task in reversed(drone.in_flight.values()):
                    if cancel_running or task.number not in running:
                        self._do(Cancel(task))

    def abandon(self, reason: str) -> None:
        """Kill all drones: their tasks are lost, with errors that give `reason`. Cancel the others,
        but those that only one drone may run are lost with it, if they are queued.
        """
        self.closing = self.abandoned = True
        with_drones: list[Task] = []
        for drone in self.assignment.drones:
            with_drones += [*drone.in_flight.values(), *drone.dedicated]
        for task in self._unanswered(with_drones):
            self._do(Cancel(task))
            if task.state is not QUEUED:  # else it stays in its queue until it is dropped there
                task.state = ENDING
        self.awaiting_inputs.clear()
        self.parked.clear()
        for task in [*self.delayed]:
            self._end_delay(task)
        for drone in self.assignment.drones:
            if drone.alive:
                drone.become(State.STOPPING)
                self._do(Kill(drone, reason))
        self._do(GiveUpStarts())

    def broke(self, error: BaseException, now: float) -> None:
        """Reject all tasks with `error`, and kill all drones, because none can run any."""
        if self.broken is not None:
            return
        self.broken = error
        self._do(Broken(error))
        tasks: list[Task] = []
        for drone in self.assignment.drones:
            # Answers that still arrive are ignored: these tasks no longer have their payloads.
            tasks += drone.take_in_flight()
        self.assignment.drop_all()
        tasks += self._unanswered(tasks)
        self.lost(tasks, error, now, may_retry=False)
        for task in tasks:
            self.assignment.leave_queue(task)
        self._do(SettleLost(error))
        self.abandon("")

    def _unanswered(self, others: Iterable[Task]) -> list[Task]:
        """Return the unsettled tasks that are not among `others`, and have no answer that is about
        to settle them. One that is parked has none: it failed, and waits for its next attempt.
        """
        but = {*others}
        return [
            task
            for task in [*self.unsettled]
            if task not in but and (task.answer is None or task in self.parked)
        ]

    # -- leases: see leases.py ---------------------------------------------------------------------

    def leased(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self.assignment.leave_queue(task, LEASED)
            self.parked.add(task)

    def lease_ended(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            task.state, task.runs_elsewhere = ENDING, False
            self.parked.discard(task)

    # -- a check, for tests and `POLYCEPHALY_VALIDATE=1` ------------------------------------------

    def validate(self) -> None:
        """Raise `AssertionError` if a task that waits here is not in the state for that, or a
        drone is there that should not be.
        """
        self.population.validate()
        for task, timer in self.delayed.items():
            if not task.promise.done():
                assert task.state is DELAYED, f"{task.number} is {task.state.name}, and delayed"
                assert task in self.parked, f"{task.number} is delayed, and not parked"
                is_due = any(each[2] is timer for each in self._timers.heap)
                assert is_due and not timer.is_over, f"{task.number} is delayed, and has no time"


def _is_settled(task: Task) -> bool:
    """Return whether `task` is settled, or about to be, because its time limit has struck."""
    return task.promise.done() or (task.timed_out and task.overrun is None)
