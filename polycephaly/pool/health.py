"""The health monitor: observes the drones of a pool from outside, at intervals.

    status table: started, sent, heartbeat ┐
    /proc: processor time ─────────────────┴─> unchanged for `stalled_seconds`: reported;
                                               unchanged for `hang_timeout`: killed
    /proc: threads let run ──> none for `report_waiting` seconds: the wait is reported
    /proc: memory ──> near `max_memory`: replaced after its tasks; more than that: killed

The monitor tells three states apart: a drone with a heartbeat, a drone without one (unresponsive),
and a drone that has a heartbeat but waits. Only `hang_timeout` and `max_memory` end a drone. See
docs/decisions/0013-health-monitoring.md for the exact rules of heartbeats and waits.

If this process itself did not run for a while, all counting begins anew; otherwise the monitor
would blame the drones for its own pause.

The timer runs only while drones have tasks or are being started, but always with `max_memory`. All
methods are called while holding the reactor's lock."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from time import time
from typing import TYPE_CHECKING, Any

from ..engines.local.launcher import Launcher
from ..runtime.procfs import state_of
from ..runtime.tuning import tuning
from ..wire.messages import FRAMES, Malformed, pack_numbers
from .drone_handle import DroneHandle, State, Times
from .waiting import Waiting

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["HealthMonitor"]

log = logging.getLogger(__name__)

LOOK_AT_MEMORY = 0.2  # seconds between two looks
BUSY = 0.1
"""A thread computes if it runs for more than this fraction of the time in which it did not wait for
a processor. A thread that only waits for the interpreter wakes every few milliseconds, which takes
less than a hundredth."""
NEAR = 0.9  # of max_memory


class _Patient:
    """The signs of life of one drone or zygote."""

    __slots__ = ("_anew", "_heartbeat", "_since", "_threads", "told")

    def __init__(self, now: float) -> None:
        self._heartbeat: object = None
        self._threads: Times = {}
        self._since = now
        self._anew = False
        self.told = False

    def count_from(self, when: float) -> None:
        """Ignore the processor time that threads have used up to now."""
        self._since = when
        self._anew = True

    def quiet_for(self, now: float, heartbeat: object, threads: Times) -> float:
        """Return the seconds since `heartbeat` has changed or one of `threads` has computed."""
        if self._anew:
            self._anew, self._threads = False, threads
        if heartbeat != self._heartbeat or any(
            self._computes(now, thread, *threads[thread]) for thread in threads
        ):
            self._heartbeat = heartbeat
            self._threads = threads
            self._since = now
        return now - self._since

    def _computes(self, now: float, thread: str, ran: float, waited: float) -> bool:
        ran_before, waited_before = self._threads.get(thread, (0.0, 0.0))
        return ran - ran_before > BUSY * max(0.0, now - self._since - (waited - waited_before))


class _WaitingDrone:
    """How long a drone with tasks has waited.

    The samples are counts that only grow. Two equal samples prove that nothing ran between them,
    whether or not this process looked meanwhile."""

    __slots__ = ("_others", "_own", "asked", "places")

    def __init__(self, now: float) -> None:
        self._own = _Patient(now)
        self._others = _Patient(now)
        self.asked = 0  # the number of the request for its frames, or 0
        self.places: dict[str, Any] = {}  # the answer: the frame of each task

    def seconds(
        self, now: float, worked: tuple[object, Times], others: Callable[[], object]
    ) -> float:
        """Return the seconds since the drone has `worked`, or one of the processes that the drone
        has started. `others` is called only while the drone itself waits."""
        own = self._own.quiet_for(now, *worked)
        return own and min(own, self._others.quiet_for(now, others(), {}))


_requests = itertools.count(1)


class HealthMonitor:
    def __init__(self, dispatcher: Dispatcher) -> None:
        config = dispatcher.config
        self._dispatcher = dispatcher
        self._hang = config.hang_timeout
        self._memory = config.max_memory
        self._every = tuning.health_check_seconds if self._memory is None else LOOK_AT_MEMORY
        if self._hang is not None:
            self._every = min(self._every, self._hang / 4)
        self._quiet = (
            tuning.stalled_seconds
            if self._hang is None
            else min(tuning.stalled_seconds, self._hang)
        )
        self._report_waiting = config.report_waiting
        if self._report_waiting is not None:
            self._every = min(self._every, self._report_waiting / 4)
        self._waits: dict[DroneHandle, _WaitingDrone] = {}
        self._stalled = False
        self._patients: dict[DroneHandle | Launcher, _Patient] = {}
        self._looks = False
        self._looked = 0.0

    def begin(self) -> None:
        """Set the timer, because there may be a drone to look at."""
        if not self._looks:
            self._looks = True
            self._dispatcher.reactor.after(self._every, self._look)

    def _look(self) -> None:
        self._looks = False
        if self._dispatcher.over:
            return
        now = self._dispatcher.reactor.timers.now()
        # This process itself did not run. A drone that was unresponsive before stays so.
        if now - self._looked > 2 * self._every + tuning.stalled_seconds / 4:
            for one, patient in self._patients.items():
                quiet = isinstance(one, DroneHandle) and one.unresponsive is not None
                patient.count_from(now - self._quiet if quiet else now)
        self._looked = now
        awaited: set[DroneHandle | Launcher] = set()
        for handle in [each for each in self._dispatcher.handles if each.alive]:
            if self._memory is not None and handle.pid is not None:
                self._look_at_memory(handle, self._memory)
            waits = (
                handle.pid is None
                or handle.kill_reason
                or handle.state is State.STOPPING
                or handle.unresponsive
            )
            if handle.keeper is not None and waits:
                awaited.add(handle.keeper)  # the zygote starts the drone and reports its end
            if handle.pid is not None and (handle.in_flight or handle.state < State.READY):
                awaited.add(handle)
        for gone in self._patients.keys() - awaited:
            del self._patients[gone]
        for handle in [handle for handle in self._waits if handle not in awaited]:
            self._goes_on(handle)
        # Some drones may have answered while this process did not run.
        for handle in self._dispatcher.handles:
            if handle.unresponsive is not None and handle not in awaited:
                self._responds(handle)
        for one in awaited:
            patient = self._patients.setdefault(one, _Patient(now))
            if isinstance(one, DroneHandle):
                self._feel(one, patient, now)
            else:
                self._feel_zygote(one, patient, now)
        self._look_for_stall()
        if awaited or self._memory is not None:
            self.begin()  # has no effect if the replacement of a drone has set the timer already

    def fail(self, error: Exception) -> None:
        self._dispatcher.fail(error)

    # -- heartbeats --------------------------------------------------------------------------------

    def _feel(self, handle: DroneHandle, patient: _Patient, now: float) -> None:
        heartbeat, threads = handle.heartbeat()
        if self._report_waiting is not None:
            self._look_for_wait(handle, now, handle.worked(threads), self._report_waiting)
        quiet = patient.quiet_for(now, heartbeat, threads)
        if quiet < self._quiet:
            if handle.unresponsive is not None:
                self._responds(handle)
                log.info("drone %s (pid %s) responds again", handle.name, handle.pid)
            return
        if handle.unresponsive is None:
            why = handle.unresponsive = handle.why_quiet()
            log.warning(
                "drone %s (pid %s) does not respond: %s%s",
                handle.name,
                handle.pid,
                why,
                _while(handle),
            )
        if self._hang is not None and quiet >= self._hang and not handle.kill_reason:
            handle.kill(f"it did not respond for {quiet:.1f} s: {handle.unresponsive}")

    def _responds(self, handle: DroneHandle) -> None:
        """Note that the drone responds again. Its dedicated tasks may have waited for that."""
        handle.unresponsive = None
        self._dispatcher.dedicated_waiting = True

    def _feel_zygote(self, launcher: Launcher, patient: _Patient, now: float) -> None:
        """Check whether a signal has stopped the zygote. That is the only sign of trouble, because
        a zygote waits most of the time.

        A stopped zygote neither starts drones nor reports deaths, so it is continued after
        `tuning.stopped_zygote_seconds`. That loses nothing, whereas its end would end its
        drones."""
        stopped = state_of(launcher.pid) in ("T", "t")
        quiet = patient.quiet_for(now, stopped, {})
        if not stopped:
            patient.told = False
        if not stopped or quiet < self._quiet:
            return
        if not patient.told:
            patient.told = True
            log.warning(
                "the zygote of %s (pid %s) does not respond: it is stopped",
                self._dispatcher.config.name,
                launcher.pid,
            )
        if self._hang is not None and quiet >= self._hang:
            launcher.kill_zygote()
        elif quiet >= tuning.stopped_zygote_seconds:
            launcher.continue_zygote()

    # -- waits -------------------------------------------------------------------------------------

    def _look_for_wait(
        self, handle: DroneHandle, now: float, worked: tuple[object, Times] | None, after: float
    ) -> None:
        if worked is None:
            return
        wait = self._waits.get(handle)
        if wait is None:
            wait = self._waits[handle] = _WaitingDrone(now)
        seconds = wait.seconds(now, worked, handle.others_worked)
        if seconds < after:
            if wait.asked:
                self._goes_on(handle)
                self._waits[handle] = wait
                wait.asked, wait.places = 0, {}
        elif not wait.asked:  # by the next look the control thread has answered, if it can
            wait.asked = next(_requests)
            if handle.is_up():
                handle.send(pack_numbers(FRAMES, (wait.asked,)))
        # Not if the drone is runnable, and only has to wait for a processor.
        elif handle.told_waiting is None and handle.waits():
            told = self._described(handle, time() - seconds, wait.places)
            log.warning("drone %s (pid %s): %s", handle.name, handle.pid, told[1])
            handle.told_waiting = told

    def _look_for_stall(self) -> None:
        """Warn if all drones wait while tasks are queued, because the drones may be waiting for
        just these tasks, which then never run. Only the program knows whether they are, so no task
        is stopped."""
        handles = [handle for handle in self._dispatcher.handles if handle.alive]
        if not handles or any(handle.waiting is None for handle in handles):
            self._stalled = False
            return
        queued = [
            *self._dispatcher.queue,
            *(task for handle in handles for task in [*handle.dedicated, *handle.preferred]),
        ]
        queued = [task for task in queued if not task.done()]
        if queued and not self._stalled:
            self._stalled = True
            log.warning(
                "all drones of %s wait (%d), and calls are queued that only a free one can run (%d, first of all %s): "
                "if these are what the drones wait for, as the stages of a pipeline do for each other, that is a "
                "deadlock, and takes a Pool of %d drones",
                self._dispatcher.config.name, len(handles), len(queued), queued[0].definition.label,
                len(handles) + len(queued),
            )  # fmt: skip

    def hear_frames(self, handle: DroneHandle, request: int, answer: dict[str, Any]) -> None:
        """Handle the answer to a request for frames, which may be outdated. Raises `Malformed`."""
        places = answer.get("places")
        if not isinstance(places, dict):
            raise Malformed(f"{handle.name} did not tell where its tasks are")
        wait = self._waits.get(handle)
        if wait is not None and wait.asked == request:
            wait.places = places
            if handle.told_waiting is not None:  # the control thread could not answer before
                handle.told_waiting = self._described(handle, handle.told_waiting[1].since, places)

    def _described(
        self, handle: DroneHandle, since: float, places: dict[str, Any]
    ) -> tuple[int, Waiting]:
        tasks = list(handle.in_flight.values())
        started = handle.started()
        task = next((each for each in tasks if each.number == started), tasks[0] if tasks else None)
        waiting = Waiting(since, system_call=handle.system_call())
        if task is None:
            return 0, waiting
        waiting = replace(
            waiting, task=task.definition.label, item=task.item if task.count == 1 else None
        )
        match places.get(str(task.number)):
            case [str(file), int(line), str(function)]:
                waiting = replace(waiting, file=file, line=line, function=function)
        return task.number, waiting

    def _goes_on(self, handle: DroneHandle) -> None:
        """Note that the drone has run again, or has no more tasks."""
        del self._waits[handle]
        if handle.told_waiting is not None:
            log.info("drone %s (pid %s) waits no more", handle.name, handle.pid)
            handle.told_waiting = None

    # -- memory ------------------------------------------------------------------------------------

    def _look_at_memory(self, handle: DroneHandle, most: int) -> None:
        # The memory of a drone that is being killed shrinks, which says nothing about the next one.
        if handle.kill_reason:
            return
        held = handle.memory(int(most * NEAR))
        if held < most * NEAR:
            if handle.state is State.READY:
                self._dispatcher.supervisor.too_large_so_far = 0
            return
        what = f"it and what it had started held {held >> 20:,} MiB"
        if (
            handle.state is State.READY
            and not handle.in_flight
            and not handle.tasks_done
            and self._dispatcher.config.on_death != "end"
        ):
            self._dispatcher.supervisor.too_large(
                handle, f"{what} before it had done anything, of max_memory={most:,} bytes"
            )
        elif held > most:
            handle.kill(f"{what}, more than max_memory={most:,} bytes")
        # A lone drone is not replaced, because its pool would end with it.
        elif handle.state is State.READY and self._dispatcher.config.on_death != "end":
            log.info("drone %s is replaced: it holds %s MiB", handle.name, f"{held >> 20:,}")
            self._dispatcher.supervisor.retire(handle)


def _while(handle: DroneHandle) -> str:
    running = handle.in_flight.get(handle.started())
    return f"; it was running {running.definition.label}" if running is not None else ""
