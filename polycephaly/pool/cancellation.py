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

    def __init__(self, crew: Dispatcher) -> None:
        self._crew = crew

    def fail(self, error: Exception) -> None:
        """In the hub's turn: what a timer of this has called has raised."""
        self._crew.fail(error)

    def sent(self, link: DroneHandle, batch: list[Task], now: float) -> None:
        """`link` was sent these. Alone, to an idle drone, what has a limit or is not overlapped."""
        if not link.overlapping:
            link.deadlines.clear()
        for work in batch:
            if work.timeout is not None:
                link.deadlines[work.number] = now + work.timeout
        self._set_timer(link)

    def _set_timer(self, link: DroneHandle) -> None:
        """Unless one is set that comes before."""
        first = min(link.deadlines.values(), default=inf)
        if first < link.timer_at:
            self.call_off(link)
            link.timer_at = first
            link.timer = self._crew.hub.after(
                first - self._crew.hub.timers.now(), partial(self._look_at, link)
            )

    def call_off(self, link: DroneHandle) -> None:
        """No look at its limits is due any more: an earlier one takes its place, or it has
        ended."""
        if link.timer is not None:
            self._crew.hub.timers.call_off(link.timer)
            link.timer, link.timer_at = None, inf

    def _look_at(self, link: DroneHandle) -> None:
        link.timer, link.timer_at = None, inf
        link.catch_up()
        now = self._crew.hub.timers.now()
        for number, deadline in list(link.deadlines.items()):
            work = link.flight.get(number)
            if work is None or work.done():
                del link.deadlines[number]
            elif deadline <= now:
                del link.deadlines[number]
                self._timed_out(link, work)
        self._set_timer(link)

    def _timed_out(self, link: DroneHandle, work: Task) -> None:
        error = TimeoutError(
            f"{work.definition.label} ran for more than {work.timeout} s on {link.name}"
        )
        self._crew.hub.deliver(partial(work._settle, FINISHED, None, error))
        self.interrupt(link, work)

    def interrupt(self, link: DroneHandle, work: Task) -> None:
        """What is in flight there; and kills whom that does not reach."""
        link.send(pack_numbers(CANCEL, (work.number,)))
        self._look_again(link, work, LOOKS)

    def _look_again(self, link: DroneHandle, work: Task, looks: int) -> None:
        self._crew.hub.after(
            tuning.grace_seconds / LOOKS, partial(self._kill_if_still, link, work, looks - 1)
        )

    def _kill_if_still(self, link: DroneHandle, work: Task, looks: int) -> None:
        link.catch_up()
        if work.number not in link.flight or not link.alive:
            return
        if looks > 0:
            self._look_again(link, work, looks)
        elif not link.runs(work.number):
            pass  # behind other work in the same drone it is not what holds the drone up
        elif all(other.done() for other in link.flight.values()) or not link.overlapping:
            link.kill()
        else:  # beside it others run, for which somebody waits, and which would die too: they finish first
            link.hung.add(work.number)
            self._look_again(link, work, LOOKS)
