"""Cancellation and time limits: stops tasks that are cancelled or run for too long.

    promise.cancel() ──> in a queue: skipped
                     └─> in flight: CANCEL ──> KeyboardInterrupt in the drone
    timeout= is over ─────────────────┘          │ still running after `grace_seconds`
                                                 └──> the drone is killed and replaced

A drone has at most one timer, for the earliest deadline of its tasks, or for the request for frames
before that; the timer sets the next one.
An earlier deadline replaces the timer. All methods are called while holding the reactor's lock.

If this process did not run for a while (Ctrl-Z, a suspended machine), its timers are due before it
has read the answers that came meanwhile. Therefore the answers are read first, and a task that was
answered in time is not stopped.

While a drone is debugged, its deadlines are postponed by a whole time limit.

Shortly before a deadline the drone is asked for its frames. If they have come by then, they are the
cause of the `TimeoutError`.

A drone that is killed loses its state, so the grace period must not pass just because the machine
stood still: it consists of GRACE_STEPS steps, and a pause counts as one step, however long.
"""

from __future__ import annotations

from functools import partial
from math import inf

from .._compat import remote_traceback_type
from ..runtime.tuning import tuning
from ..wire.messages import CANCEL, pack_numbers
from .dispatcher_base import DispatcherBase
from .drone_handle import DroneHandle
from .stack_requests import StackRequest, format_remote, frames_of
from .task import Task, fail

GRACE_STEPS = 10  # steps between an interrupt and a kill
STACK_SECONDS = 0.05  # between the request for a task's frames and the task's deadline


class Cancellation:
    """The cancellation and the time limits of one pool's tasks."""

    def __init__(self, dispatcher: DispatcherBase) -> None:
        self._dispatcher = dispatcher

    def set_deadlines(self, handle: DroneHandle, batch: list[Task], now: float) -> None:
        """Set the deadlines of tasks that were just sent to `handle`."""
        # A task that has a limit and does not overlap is sent alone, to an idle drone, so all older
        # deadlines are over.
        if not handle.overlapping:
            handle.deadlines.clear()
        for task in batch:
            if task.timeout is not None:
                handle.deadlines[task.number] = now + task.timeout, None
        self._set_timer(handle)

    def _set_timer(self, handle: DroneHandle) -> None:
        """Set the timer for the earliest deadline, or for the request for frames before it, unless
        an earlier timer is set.
        """
        times = [at - STACK_SECONDS * (asked is None) for at, asked in handle.deadlines.values()]
        first = min(times, default=inf)
        if first < handle.timer_at:
            handle.cancel_timer()
            handle.timer_at = first
            seconds = first - self._dispatcher.reactor.timers.now()
            handle.timer = self._dispatcher.call_later(seconds, self._check_deadlines, handle)

    def _check_deadlines(self, handle: DroneHandle) -> None:
        handle.timer, handle.timer_at = None, inf
        now = self._dispatcher.reactor.timers.now()
        if any(deadline <= now for deadline, _ in handle.deadlines.values()):
            handle.receive_all()
        for number, (deadline, request) in list(handle.deadlines.items()):
            task = handle.in_flight.get(number)
            if task is None or task.promise.done():
                del handle.deadlines[number]
            elif deadline > now:
                if deadline - STACK_SECONDS <= now and request is None:
                    request = StackRequest(self._dispatcher, handle)
                    handle.deadlines[number] = deadline, request
                    self._dispatcher.stack_requests.send(request)
            elif handle.status_page.debugged:
                assert task.timeout is not None
                handle.deadlines[number] = now + task.timeout, None
            else:
                del handle.deadlines[number]
                self._reject_timed_out(handle, task, request)
        self._set_timer(handle)

    def _reject_timed_out(
        self, handle: DroneHandle, task: Task, request: StackRequest | None
    ) -> None:
        error = TimeoutError(
            f"{task.definition.label} ran for more than {task.timeout:g} s on {handle.name}"
        )
        task.timed_out = True
        if task.next_delay(error) is None:
            last = task.with_attempts(error)
            self._dispatcher.reactor.deliver(partial(_reject_with_frames, task, last, request))
        else:  # when the drone has stopped it, so that it does not run twice at the same time
            task.overrun = error
        self.interrupt(handle, task)

    def interrupt(self, handle: DroneHandle, task: Task) -> None:
        """Interrupt a task in flight, and kill the drone if the interrupt has no effect."""
        handle.send(pack_numbers(CANCEL, (task.number,)))
        self._schedule_check(handle, task.number, GRACE_STEPS)

    def _schedule_check(self, handle: DroneHandle, number: int, steps_left: int) -> None:
        seconds = tuning.grace_seconds / GRACE_STEPS
        self._dispatcher.call_later(seconds, self._kill_if_running, handle, number, steps_left - 1)

    def _kill_if_running(self, handle: DroneHandle, number: int, steps_left: int) -> None:
        handle.receive_all()
        if number not in handle.in_flight or not handle.alive:
            return
        if steps_left > 0:
            self._schedule_check(handle, number, steps_left)
        elif not handle.is_running(number):
            pass  # queued behind another task in the drone, so this one does not hold up the drone
        elif not handle.overlapping or all(
            other.promise.done() or other.overrun for other in handle.in_flight.values()
        ):
            label = handle.in_flight[number].label
            handle.kill(f"{label} was told to stop, and went on for {tuning.grace_seconds:g} s")
        elif handle.status_page.holder == number:  # the other tasks cannot go on either
            label = handle.in_flight[number].definition.label
            handle.kill(f"{label} was told to stop, does not await, and lets no other task run")
        else:  # other live tasks run beside it and would die too, so they finish first
            handle.hung.add(number)
            handle.changed()
            self._schedule_check(handle, number, GRACE_STEPS)


def _reject_with_frames(task: Task, error: BaseException, request: StackRequest | None) -> None:
    """Reject `task`, after the lock is released: reading source files takes time."""
    frames = None if request is None else frames_of(request, task.number)
    if frames:
        error.__cause__ = remote_traceback_type()(format_remote(frames, error))
    fail(task, error)
