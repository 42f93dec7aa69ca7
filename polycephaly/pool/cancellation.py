"""Halts: work that is to stop, since it was cancelled or takes too long.

    promise.cancel() ──> in a queue: passed over        in flight: CANCEL ──> KeyboardInterrupt in the drone
    timeout= is over ──────────────────────────────────────────────┘              │ still there after `grace_seconds`
                                                                                  └──> the drone is killed, and replaced

One drone has one timer at most, for the first of its work that has a limit; that one sets the next.
One for an earlier limit takes its place. All in turns.

When this process did not run for a while (Ctrl-Z, a machine that stood still), its timers are due
before it has read what drones answered meanwhile: so that is read first, and what was answered in
time is not halted.

A drone that is killed takes along what it knows, so that time must not be over because the machine
stood still: it passes in LOOKS steps, of which a pause takes one, however long it is."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING

from ..promises.promise import FINISHED
from ..runtime.tuning import tuning
from ..wire.messages import CANCEL, pack_numbers
from .drone_handle import DroneHandle
from .task import Task

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["Cancellation"]

LOOKS = 10  # between an interrupt and a kill


class Cancellation:
    """A crew's."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def fail(self, error: Exception) -> None:
        """In the hub's turn: what a timer of this has called has raised."""
        self._dispatcher.fail(error)

    def sent(self, handle: DroneHandle, batch: list[Task], now: float) -> None:
        """`link` was sent these. Alone, to an idle drone, what has a limit or is not overlapped."""
        if not handle.overlapping:
            handle.deadlines.clear()
        for task in batch:
            if task.timeout is not None:
                handle.deadlines[task.number] = now + task.timeout
        self._set_timer(handle)

    def _set_timer(self, handle: DroneHandle) -> None:
        """Unless one is set that comes before."""
        first = min(handle.deadlines.values(), default=inf)
        if first < handle.timer_at:
            self.call_off(handle)
            handle.timer_at = first
            handle.timer = self._dispatcher.reactor.after(
                first - self._dispatcher.reactor.timers.now(), partial(self._look_at, handle)
            )

    def call_off(self, handle: DroneHandle) -> None:
        """No look at its limits is due any more: an earlier one takes its place, or it has
        ended."""
        if handle.timer is not None:
            self._dispatcher.reactor.timers.call_off(handle.timer)
            handle.timer, handle.timer_at = None, inf

    def _look_at(self, handle: DroneHandle) -> None:
        handle.timer, handle.timer_at = None, inf
        handle.catch_up()
        now = self._dispatcher.reactor.timers.now()
        for number, deadline in list(handle.deadlines.items()):
            task = handle.in_flight.get(number)
            if task is None or task.done():
                del handle.deadlines[number]
            elif deadline <= now:
                del handle.deadlines[number]
                self._timed_out(handle, task)
        self._set_timer(handle)

    def _timed_out(self, handle: DroneHandle, task: Task) -> None:
        error = TimeoutError(
            f"{task.definition.label} ran for more than {task.timeout} s on {handle.name}"
        )
        self._dispatcher.reactor.deliver(partial(task._settle, FINISHED, None, error))
        self.interrupt(handle, task)

    def interrupt(self, handle: DroneHandle, task: Task) -> None:
        """What is in flight there; and kills whom that does not reach."""
        handle.send(pack_numbers(CANCEL, (task.number,)))
        self._look_again(handle, task, LOOKS)

    def _look_again(self, handle: DroneHandle, task: Task, looks: int) -> None:
        self._dispatcher.reactor.after(
            tuning.grace_seconds / LOOKS, partial(self._kill_if_still, handle, task, looks - 1)
        )

    def _kill_if_still(self, handle: DroneHandle, task: Task, looks: int) -> None:
        handle.catch_up()
        if task.number not in handle.in_flight or not handle.alive:
            return
        if looks > 0:
            self._look_again(handle, task, looks)
        elif not handle.runs(task.number):
            pass  # behind other work in the same drone it is not what holds the drone up
        elif all(other.done() for other in handle.in_flight.values()) or not handle.overlapping:
            handle.kill()
        else:  # beside it others run, for which somebody waits, and which would die too: they finish first
            handle.hung.add(task.number)
            self._look_again(handle, task, LOOKS)
