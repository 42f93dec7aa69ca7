"""Limits: tasks that are cancelled, or run for too long, are stopped.

    a task in flight is cancelled, or its time limit is over
        └──> `Interrupt` ──KeyboardInterrupt in the drone──> answered
                  └── still running after `grace_seconds` ──> `Kill`, and the drone is replaced

A drone has at most one timer, for the earliest deadline of its tasks, or for the request for frames
before that; the timer sets the next one. An earlier deadline replaces the timer.

If this process did not run for a while (Ctrl-Z, a suspended machine), its timers are due before it
has read the answers that came meanwhile. Therefore the answers are read first (`Look`, `LookAt`),
and a task that was answered in time is not stopped.

While a drone is debugged, or waits for room for an answer, its deadlines are postponed by a whole
time limit.

Shortly before a deadline the drone is asked for its frames. If they have come by then, they are the
cause of the `TimeoutError`.

A drone that is killed loses its state, so the grace period must not pass just because the machine
stood still: it consists of GRACE_STEPS steps, and a pause counts as one step, however long.

As in pool_state.py, whose `PoolState` has an object of `Limits`, nothing here sends, waits or looks
at a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from ..runtime.tuning import tuning
from .drone_record import DroneRecord
from .task import Task

GRACE_STEPS = 10  # steps between an interrupt and a kill
STACK_SECONDS = 0.05  # between the request for a task's frames and the task's deadline


class Interrupt(NamedTuple):
    """Have a drone stop a task."""

    drone: Any  # a `DroneHandle`
    task: Task


class AskFrames(NamedTuple):
    """Ask a drone where its tasks are, for the error of this one. The request takes the second
    place in `drone.deadlines[number]`.
    """

    drone: Any
    number: int


class TimeOut(NamedTuple):
    """Reject a task whose time limit is over."""

    drone: Any
    task: Task
    error: BaseException
    request: Any  # for its frames, or None


class Kill(NamedTuple):
    drone: Any
    reason: str


class Look(NamedTuple):
    """A deadline is over: read the answers of a drone, and call `looked`."""

    drone: Any


class LookAt(NamedTuple):
    """A step of a task's grace period is over: read the drone's answers, and call `looked_at`."""

    drone: Any
    number: int
    steps_left: int


class Limits:
    def __init__(
        self,
        do: Callable[[Any], object],
        call_at: Callable[..., Any],
        cancel_call: Callable[[Any], None],
    ) -> None:
        self._do = do
        self._call_at = call_at  # of `PoolState`: returns a timer for `cancel_call`
        self._cancel_call = cancel_call

    # -- time limits -------------------------------------------------------------------------------

    def sent(self, drone: DroneRecord, batch: list[Task], now: float) -> None:
        """Set the deadlines of tasks that were just sent to `drone`."""
        # A task that has a limit and does not overlap is sent alone, to an idle drone, so all older
        # deadlines are over.
        if not drone.overlapping:
            drone.deadlines.clear()
        for task in batch:
            if task.timeout is not None:
                drone.deadlines[task.number] = now + task.timeout, None
        self._set_timer(drone)

    def _set_timer(self, drone: DroneRecord) -> None:
        """Set the timer for the earliest deadline, or for the request for frames before it, unless
        an earlier timer is set.
        """
        times = [at - STACK_SECONDS * (asked is None) for at, asked in drone.deadlines.values()]
        first = min(times, default=inf)
        if first < drone.timer_at:
            self._cancel_timer(drone)
            drone.timer, drone.timer_at = self._call_at(first, self._on_timer, drone), first

    def drone_died(self, drone: DroneRecord) -> None:
        """Forget the timer of a drone. A task that was answered in time may still wait for that
        answer to arrive.
        """
        self._cancel_timer(drone)

    def _cancel_timer(self, drone: DroneRecord) -> None:
        if drone.timer is not None:
            self._cancel_call(drone.timer)
            drone.timer, drone.timer_at = None, inf

    def _on_timer(self, drone: DroneRecord, now: float) -> None:
        drone.timer, drone.timer_at = None, inf
        if any(deadline <= now for deadline, _ in drone.deadlines.values()):
            self._do(Look(drone))
        else:
            self.looked(drone, False, now)

    def looked(self, drone: DroneRecord, stands_still: bool, now: float) -> None:
        """Stop the tasks whose deadlines are over, and ask for the frames of those whose deadlines
        are near. `now` is from before the answers were read.
        """
        for number, (deadline, asked) in list(drone.deadlines.items()):
            task = drone.in_flight.get(number)
            if task is None or task.promise.done():
                del drone.deadlines[number]
            elif deadline > now:
                if deadline - STACK_SECONDS <= now and asked is None:
                    drone.deadlines[number] = deadline, True
                    self._do(AskFrames(drone, number))
            elif stands_still:
                assert task.timeout is not None
                drone.deadlines[number] = now + task.timeout, None
            else:
                del drone.deadlines[number]
                self._time_out(drone, task, asked, now)
        self._set_timer(drone)

    def _time_out(self, drone: DroneRecord, task: Task, request: Any, now: float) -> None:
        error = TimeoutError(
            f"{task.definition.label} ran for more than {task.timeout:g} s on {drone.name}"
        )
        task.timed_out = True
        if task.next_delay(error) is None:
            self._do(TimeOut(drone, task, task.with_attempts(error), request))
        else:  # when the drone has stopped it, so that it does not run twice at the same time
            task.overrun = error
        self.interrupt(drone, task, now)

    # -- interrupts --------------------------------------------------------------------------------

    def interrupt(self, drone: DroneRecord, task: Task, now: float) -> None:
        """Interrupt a task in flight, and kill the drone if the interrupt has no effect."""
        self._do(Interrupt(drone, task))
        self._begin_step(drone, task.number, GRACE_STEPS, now)

    def _begin_step(self, drone: DroneRecord, number: int, steps_left: int, now: float) -> None:
        when = now + tuning.grace_seconds / GRACE_STEPS
        self._call_at(when, self._end_step, drone, number, steps_left - 1)

    def _end_step(self, drone: DroneRecord, number: int, steps_left: int, now: float) -> None:
        self._do(LookAt(drone, number, steps_left))

    def looked_at(
        self,
        drone: DroneRecord,
        number: int,
        steps_left: int,
        is_running: bool,
        is_holder: bool,
        now: float,
    ) -> None:
        """Kill the drone if the task of this number still runs after its last step. `is_holder`:
        the task lets no other run.
        """
        task = drone.in_flight.get(number)
        if task is None or not drone.alive:
            return
        if steps_left > 0:
            self._begin_step(drone, number, steps_left, now)
        elif not is_running:
            pass  # queued behind another task in the drone, so this one does not hold up the drone
        elif not drone.overlapping or all(
            other.promise.done() or other.timed_out for other in drone.in_flight.values()
        ):
            seconds = tuning.grace_seconds
            self._do(Kill(drone, f"{task.label} was told to stop, and went on for {seconds:g} s"))
        elif is_holder:  # the other tasks cannot go on either
            label = task.definition.label
            reason = f"{label} was told to stop, does not await, and lets no other task run"
            self._do(Kill(drone, reason))
        else:  # other live tasks run beside it and would die too, so they finish first
            drone.hung.add(number)
            drone.changed()
            self._begin_step(drone, number, GRACE_STEPS, now)
