"""The watch: looks at a crew's drones from outside, now and then.

    running page: started, sent, beat ──┐
    /proc: processor time ──────────────┴──> pulse, the same for `stalled_seconds`: reported; for `hang_timeout`: killed
    /proc: which of its threads, and of what it has started, were let run ─ none for `report_waiting` ──> waiting: told
    /proc: memory of it and its descendants ─────────> near max_memory: replaced after its work;  more: killed

A drone with work shows that it lives without a message: while a task runs its ear writes a *beat*
into the page ten times a second, for which it needs the interpreter for an instant. So code that
sleeps, waits or computes in Python has a pulse. C code that keeps the interpreter has one as long
as it computes: in the main thread, at all, or else in a thread for a tenth of the time that other
processes leave it. What has none is stopped by a signal, waits for a disk or for memory that was
swapped out, or holds the interpreter and does nothing; the kernel tells which. Short pauses are
normal, so it is told after `tuning.stalled_seconds`, and only `hang_timeout` makes it a death.

A drone that has a pulse may wait, for a timer or for a lock that will never be released: these look
alike, so nothing is done about it. But where the kernel has let no thread of it run for
`report_waiting` seconds, except those that only show that it lives (`Link.worked`), the watch tells
in what it waits. Its ear is asked for the frames, and has answered by the next look unless C code
keeps the interpreter; the kernel tells the system call.

Where this process itself did not run for a while, counting begins anew: it would blame others for
its own sleep.

The watch looks while drones have work or are being started (and, with `max_memory`, always); else
no timer runs. All of it happens in turns of the hub."""

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
"""Of the time in which a thread had not to wait for a processor. One that waits for the interpreter
looks up every few milliseconds, which is less than a hundredth."""
NEAR = 0.9  # of max_memory


class _Patient:
    """Whose pulse is felt."""

    __slots__ = ("_anew", "_heartbeat", "_since", "_threads", "told")

    def __init__(self, now: float) -> None:
        self._heartbeat: object = None
        self._threads: Times = {}
        self._since = now
        self._anew = False
        self.told = False

    def count_from(self, when: float) -> None:
        """What threads have computed up to now counts for nothing."""
        self._since = when
        self._anew = True

    def quiet_for(self, now: float, heartbeat: object, threads: Times) -> float:
        """Seconds since `pulse` has changed, or one of `threads`, of which it is told how long they
        ran and had to wait for a processor, has computed."""
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
    """How long a drone with work has waited. The samples are counts that only grow: two that are
    equal prove that nothing ran between them, whether or not this process looked meanwhile."""

    __slots__ = ("_others", "_own", "asked", "places")

    def __init__(self, now: float) -> None:
        self._own = _Patient(now)
        self._others = _Patient(now)
        self.asked = 0  # the request for its frames
        self.places: dict[str, Any] = {}  # the answer: where its tasks are

    def seconds(
        self, now: float, worked: tuple[object, Times], others: Callable[[], object]
    ) -> float:
        """Since the drone itself has `worked`, or the `others` that it has started have: these are
        only asked about while it waits itself."""
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
        """There is something to look at."""
        if not self._looks:
            self._looks = True
            self._dispatcher.reactor.after(self._every, self._look)

    def _look(self) -> None:
        self._looks = False
        if self._dispatcher.over:
            return
        now = self._dispatcher.reactor.timers.now()
        if (
            now - self._looked > 2 * self._every + tuning.stalled_seconds / 4
        ):  # we did not run ourselves
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
                awaited.add(handle.keeper)  # it is the zygote that starts it, and tells of its end
            if handle.pid is not None and (handle.in_flight or handle.state < State.READY):
                awaited.add(handle)
        for gone in self._patients.keys() - awaited:
            del self._patients[gone]
        for handle in [handle for handle in self._waits if handle not in awaited]:
            self._goes_on(handle)
        for handle in (
            self._dispatcher.handles
        ):  # of which some may have answered while we did not run ourselves
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
            self.begin()  # unless a drone that was replaced in this look has done so

    def fail(self, error: Exception) -> None:
        self._dispatcher.fail(error)

    # -- signs of life -----------------------------------------------------------------------------

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
        """What only it may do may have waited for that."""
        handle.unresponsive = None
        self._dispatcher.dedicated_waiting = True

    def _feel_zygote(self, launcher: Launcher, patient: _Patient, now: float) -> None:
        """It waits most of the time, so only that it is stopped tells anything. Then no death is
        told and no drone started, so it is let go on after `tuning.stopped_zygote_seconds`: that
        loses nothing, where its end would end its drones."""
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
        elif not wait.asked:  # the next look is after the answer, if its ear can give one
            wait.asked = next(_requests)
            if handle.is_up():
                handle.send(pack_numbers(FRAMES, (wait.asked,)))
        elif (
            handle.told_waiting is None and handle.waits()
        ):  # not one that is ready, and has to wait for a processor
            told = self._described(handle, time() - seconds, wait.places)
            log.warning("drone %s (pid %s): %s", handle.name, handle.pid, told[1])
            handle.told_waiting = told

    def _look_for_stall(self) -> None:
        """Where all drones wait, what is queued may be what they wait for: then it never runs. Only
        the program knows whether it is, so nothing is broken off."""
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
        """The answer to a request that may be over. Raises `Malformed`."""
        places = answer.get("places")
        if not isinstance(places, dict):
            raise Malformed(f"{handle.name} did not tell where its tasks are")
        wait = self._waits.get(handle)
        if wait is not None and wait.asked == request:
            wait.places = places
            if handle.told_waiting is not None:  # its ear could not answer before
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
        """It was let run again, or owes nothing any more."""
        del self._waits[handle]
        if handle.told_waiting is not None:
            log.info("drone %s (pid %s) waits no more", handle.name, handle.pid)
            handle.told_waiting = None

    # -- memory ------------------------------------------------------------------------------------

    def _look_at_memory(self, handle: DroneHandle, most: int) -> None:
        if (
            handle.kill_reason
        ):  # a drone that is being killed has less and less, which says nothing of the next one
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
        elif (
            handle.state is State.READY and self._dispatcher.config.on_death != "end"
        ):  # which would end with it
            log.info("drone %s is replaced: it holds %s MiB", handle.name, f"{held >> 20:,}")
            self._dispatcher.supervisor.retire(handle)


def _while(handle: DroneHandle) -> str:
    running = handle.in_flight.get(handle.started())
    return f"; it was running {running.definition.label}" if running is not None else ""
