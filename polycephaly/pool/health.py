"""The health monitor: observes the drones of a pool from outside, at intervals.

    status page: started, answered, beats ┐
    /proc: processor time, if these stand ─┴─> unchanged for `stalled_seconds`: reported;
                                               unchanged for `hang_timeout`: killed
    /proc: threads let run ──> none for `report_waiting` seconds: the wait is reported
    /proc: memory ──> near `max_memory`: replaced after its tasks; more than that: killed

The monitor tells three states apart: a drone with a heartbeat, a drone without one (unresponsive),
and a drone that has a heartbeat but waits. Only `hang_timeout` and `max_memory` end a drone. See
docs/decisions/0013-health-monitoring.md for the exact rules of heartbeats and waits.

If this process itself did not run for a while, all counting begins anew; otherwise the monitor
would blame the drones for its own pause.

The timer runs only while drones have tasks or are being started, but always with `max_memory`. All
methods are called while holding the reactor's lock.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING, Any

from ..runtime.procfs import state_of
from ..runtime.tuning import tuning
from .dispatcher_base import DispatcherBase
from .drone_handle import DroneHandle, Spawner, Times
from .interfaces import State
from .items import with_item
from .stack_requests import StackRequest
from .supervisor import Supervisor

if TYPE_CHECKING:
    from .waiting import Waiting

log = logging.getLogger(__name__)

MEMORY_CHECK_SECONDS = 0.2  # seconds between two checks
BUSY_FRACTION = 0.1
"""A thread computes if it runs for more than this fraction of the time in which it did not wait for
a processor. A thread that only waits for the interpreter wakes every few milliseconds, which takes
less than a hundredth."""
NEAR_LIMIT_FRACTION = 0.9  # of max_memory


LOOKS_PER_WAIT = 4
"""A drone is looked at for a wait after that part of the time that is left until it is reported."""
_UNKNOWN = object()  # the heartbeat of a drone that has just beaten


class _ActivityTracker:
    """The signs of life of one drone or zygote."""

    __slots__ = ("_beat", "_heartbeat", "_since", "_threads", "reported")

    def __init__(self, now: float) -> None:
        self._beat: object = None
        self._heartbeat: object = None
        self._threads: Times | None = {}  # times when last active; None: those of the next look
        self._since = now
        self.reported = False

    def restart_at(self, when: float) -> None:
        """Ignore the processor time that threads have used up to now."""
        self._since, self._threads = when, None

    def has_beaten(self, now: float, beat: object) -> bool:
        """Return whether `beat` has changed: then nothing else needs to be looked at."""
        if beat is None or beat == self._beat:
            return False
        self._beat = beat
        self.note_activity(now)
        return True

    def note_activity(self, now: float) -> None:
        """Note another sign than the heartbeat, which is compared from the next look on."""
        self._heartbeat, self._since, self._threads = _UNKNOWN, now, None

    def inactive_seconds(self, now: float, heartbeat: object, threads: Times) -> float:
        """Return the seconds since `heartbeat` has changed or one of `threads` has computed."""
        if self._threads is None:
            self._threads = threads
        if self._heartbeat is _UNKNOWN:
            self._heartbeat = heartbeat
        if heartbeat != self._heartbeat or any(
            self._computes(now, thread, *threads[thread]) for thread in threads
        ):
            self._heartbeat = heartbeat
            self._threads = threads
            self._since = now
        return now - self._since

    def _computes(self, now: float, thread: str, ran: float, waited: float) -> bool:
        ran_before, waited_before = (self._threads or {}).get(thread, (0.0, 0.0))
        free = max(0.0, now - self._since - (waited - waited_before))
        return ran - ran_before > BUSY_FRACTION * free


class _WaitTracker:
    """How long a drone with tasks has waited.

    The samples are counts that only grow. Two equal samples prove that nothing ran between them,
    whether or not this process looked meanwhile.
    """

    __slots__ = ("_children", "_main_seconds", "_own", "next_look", "request")

    def __init__(self, now: float) -> None:
        self.next_look = now
        self._main_seconds: float | None = None
        self._own = _ActivityTracker(now)
        self._children = _ActivityTracker(now)
        self.request: StackRequest | None = None  # for its frames

    def is_computing(self, now: float, main_seconds: float | None) -> bool:
        """Return whether the main thread has run since the last call, which is all that needs to be
        known of a drone for which no wait was noted.
        """
        before, self._main_seconds = self._main_seconds, main_seconds
        if self.request is not None or before is None or main_seconds in (None, before):
            return False
        self._own.note_activity(now)
        return True

    def seconds(
        self, now: float, activity: tuple[object, Times], children_activity: Callable[[], object]
    ) -> float:
        """Return the seconds since the drone was active, or one of the processes that the drone has
        started. `children_activity` is called only while the drone itself waits.
        """
        own = self._own.inactive_seconds(now, *activity)
        return own and min(own, self._children.inactive_seconds(now, children_activity(), {}))


class HealthMonitor:
    def __init__(self, dispatcher: DispatcherBase, supervisor: Supervisor) -> None:
        config = self._config = dispatcher.config
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._interval = tuning.health_check_seconds
        self._stall_seconds = tuning.stalled_seconds
        if config.max_memory is not None:
            self._interval = MEMORY_CHECK_SECONDS
        if config.hang_timeout is not None:
            self._interval = min(self._interval, config.hang_timeout / 4)
            self._stall_seconds = min(self._stall_seconds, config.hang_timeout)
        if config.report_waiting is not None:
            self._interval = min(self._interval, config.report_waiting / 4)
        self._wait_trackers: dict[DroneHandle, _WaitTracker] = {}
        self._mutual_wait_reported = False
        self._trackers: dict[DroneHandle | Spawner, _ActivityTracker] = {}
        self._is_scheduled = False
        self._checked_at = 0.0

    def schedule_check(self) -> None:
        """Set the timer, because there may be a drone to check."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._dispatcher.call_later(self._interval, self._check)

    def _check(self) -> None:
        self._is_scheduled = False
        if self._dispatcher.has_ended:
            return
        now = self._dispatcher.reactor.timers.now()
        # This process itself did not run. A drone that was unresponsive before stays so.
        if now - self._checked_at > 2 * self._interval + tuning.stalled_seconds / 4:
            for process, tracker in self._trackers.items():
                stalled = isinstance(process, DroneHandle) and process.unresponsive is not None
                tracker.restart_at(now - self._stall_seconds if stalled else now)
        self._checked_at = now
        monitored: set[DroneHandle | Spawner] = set()
        max_memory = self._config.max_memory
        for handle in [*self._dispatcher.handles]:
            if not handle.alive:
                continue
            if max_memory is not None and handle.pid is not None:
                self._check_memory(handle, max_memory)
            may_end = handle.is_killed or handle.unresponsive or handle.state is State.STOPPING
            if (may_end or handle.pid is None) and handle.spawner is not None:
                monitored.add(handle.spawner)  # the zygote starts the drone and reports its end
            if _should_be_active(handle):
                monitored.add(handle)
            elif handle.unresponsive is not None:
                # It may have answered while this process did not run.
                self._mark_responsive(handle)
        for gone in self._trackers.keys() - monitored:
            del self._trackers[gone]
        for handle in [handle for handle in self._wait_trackers if handle not in monitored]:
            self._end_wait(handle)
        for process in monitored:
            known = self._trackers.get(process)
            tracker = known or self._trackers.setdefault(process, _ActivityTracker(now))
            if isinstance(process, DroneHandle):
                self._check_drone(process, tracker, now)
            else:
                self._check_zygote(process, tracker, now)
        self._check_mutual_wait()
        if monitored or self._config.max_memory is not None:
            # No effect if the replacement of a drone has set the timer already.
            self.schedule_check()

    # -- heartbeats --------------------------------------------------------------------------------

    def _check_drone(self, handle: DroneHandle, tracker: _ActivityTracker, now: float) -> None:
        report_waiting, wait = self._config.report_waiting, self._wait_trackers.get(handle)
        looks_for_wait = report_waiting is not None and (wait is None or now >= wait.next_look)
        inactive = 0.0
        # The files of /proc take 12 us for each thread, and most drones have a beat, or compute in
        # their main threads.
        if looks_for_wait and wait is not None and wait.is_computing(now, handle.main_seconds()):
            wait.next_look = now + (report_waiting or 0.0) / LOOKS_PER_WAIT
            looks_for_wait = False
        if looks_for_wait or not (tracker.has_beaten(now, handle.beat()) or handle.ask_for_beat()):
            heartbeat, threads = handle.heartbeat()
            if looks_for_wait and report_waiting is not None:
                self._check_wait(handle, now, handle.activity(threads), report_waiting)
            inactive = tracker.inactive_seconds(now, heartbeat, threads)
            handle.ask_for_beat()  # last, so that no thread runs for that while they are looked at
        if inactive < self._stall_seconds:
            if handle.unresponsive is not None:
                self._mark_responsive(handle)
                log.info("drone %s (pid %s) responds again", handle.name, handle.pid)
            return
        handle.receive_all()  # a busy process may not have read yet what an idle drone has sent
        if not _should_be_active(handle):
            return
        if handle.unresponsive is None:
            reason = handle.stall_reason()
            handle.note_response(reason)
            text, task = "drone %s (pid %s) does not respond: %s%s", _running_task_text(handle)
            log.warning(text, handle.name, handle.pid, reason, task)
        hang_timeout = self._config.hang_timeout
        if hang_timeout is not None and inactive >= hang_timeout and not handle.is_killed:
            handle.abort(f"the drone did not respond for {inactive:.1f} s: {handle.unresponsive}")

    def _mark_responsive(self, handle: DroneHandle) -> None:
        """Note that the drone responds again. Tasks may have waited for that."""
        handle.note_response(None)

    def _check_zygote(self, spawner: Spawner, tracker: _ActivityTracker, now: float) -> None:
        """Check whether a signal has stopped the zygote. That is the only sign of trouble, because
        a zygote waits most of the time.

        A stopped zygote neither starts drones nor reports deaths, so it is continued after
        `tuning.stopped_zygote_seconds`. That loses nothing, whereas its end would end its
        drones.
        """
        stopped = state_of(spawner.pid) in ("T", "t")
        inactive = tracker.inactive_seconds(now, stopped, {})
        if not stopped:
            tracker.reported = False
        if not stopped or inactive < self._stall_seconds:
            return
        if not tracker.reported:
            tracker.reported = True
            text = "the zygote of %s (pid %s) does not respond: it is stopped"
            log.warning(text, self._config.name, spawner.pid)
        if self._config.hang_timeout is not None and inactive >= self._config.hang_timeout:
            spawner.signal_zygote(signal.SIGKILL)
        elif inactive >= tuning.stopped_zygote_seconds:
            spawner.signal_zygote(signal.SIGCONT)

    # -- waits -------------------------------------------------------------------------------------

    def _check_wait(
        self, handle: DroneHandle, now: float, activity: tuple[object, Times] | None, after: float
    ) -> None:
        if activity is None:
            return
        wait = self._wait_trackers.get(handle)
        if wait is None:
            wait = self._wait_trackers[handle] = _WaitTracker(now)
        seconds = wait.seconds(now, activity, handle.children_activity)
        wait.next_look = now + (after - seconds) / LOOKS_PER_WAIT
        if seconds < after:
            if wait.request is not None:
                self._end_wait(handle)
                self._wait_trackers[handle] = wait
                wait.request = None
        elif wait.request is None:  # by the next look the control thread has answered, if it can
            wait.request = StackRequest(self._dispatcher, handle)
            self._dispatcher.stack_requests.send(wait.request)
        # Not if the drone is runnable, and only has to wait for a processor.
        elif handle.reported_wait is None and handle.is_waiting():
            report = _describe_wait(handle, time() - seconds, wait.request)
            log.warning("drone %s (pid %s): %s", handle.name, handle.pid, report[1])
            handle.reported_wait = report
        # The control thread could not answer before.
        elif handle.reported_wait is not None and handle.reported_wait[1].file is None:
            since = handle.reported_wait[1].since
            handle.reported_wait = _describe_wait(handle, since, wait.request)

    def _check_mutual_wait(self) -> None:
        """Warn if all drones wait while tasks are queued, because the drones may be waiting for
        just these tasks, which then never run. Only the program knows whether they are, so no task
        is stopped.
        """
        handles = [handle for handle in self._dispatcher.handles if handle.alive]
        if not handles or any(handle.waiting is None for handle in handles):
            self._mutual_wait_reported = False
            return
        queued = [
            *self._dispatcher.assignment.queue,
            *(task for handle in handles for task in [*handle.dedicated, *handle.preferred]),
        ]
        queued = [task for task in queued if not task.promise.done()]
        if queued and not self._mutual_wait_reported:
            self._mutual_wait_reported = True
            log.warning(
                "all drones of %s (%d) wait, and tasks are queued until a drone is free (%d, the "
                "first is %s): if the drones wait for these tasks, as the stages of a pipeline "
                "wait for each other, this is a deadlock: use a Pool of at least %d drones",
                self._config.name,
                len(handles),
                len(queued),
                queued[0].definition.label,
                len(handles) + len(queued),
            )

    def _end_wait(self, handle: DroneHandle) -> None:
        """Note that the drone has run again, or has no more tasks."""
        del self._wait_trackers[handle]
        if handle.reported_wait is not None:
            log.info("drone %s (pid %s) no longer waits", handle.name, handle.pid)
            handle.reported_wait = None

    # -- memory ------------------------------------------------------------------------------------

    def _check_memory(self, handle: DroneHandle, limit: int) -> None:
        # The memory of a drone that is being killed shrinks, which says nothing about the next one.
        if handle.is_killed:
            return
        held = handle.memory(int(limit * NEAR_LIMIT_FRACTION))
        if held < limit * NEAR_LIMIT_FRACTION:
            if handle.state is State.READY:
                self._dispatcher.state.population.fits()
            return
        usage = f"the drone and the processes that it started held {held >> 20:,} MiB"
        if (
            handle.state is State.READY
            and not handle.in_flight
            and not handle.tasks_done
            and self._config.on_death != "end"
        ):
            self._supervisor.kill_too_large(
                handle,
                f"{usage} before its first task; the limit is max_memory={limit >> 20:,} MiB",
            )
        elif held > limit:
            handle.kill(f"{usage}, more than max_memory={limit >> 20:,} MiB")
        # A lone drone is not replaced, because its pool would end with it.
        elif handle.state is State.READY and self._config.on_death != "end":
            log.info("drone %s is replaced: it holds %s MiB", handle.name, f"{held >> 20:,}")
            self._supervisor.retire(handle)


def _should_be_active(handle: DroneHandle) -> bool:
    """Return True if the drone is starting or has tasks, so that it should show signs of life."""
    return handle.pid is not None and (bool(handle.in_flight) or handle.state < State.READY)


def _running_task_text(handle: DroneHandle) -> str:
    running = handle.in_flight.get(handle.last_started())
    if running is None:
        return ""
    task = with_item(running.definition.label, *running.items)
    return f"; its running task is {task}"


def _describe_wait(handle: DroneHandle, since: float, request: StackRequest) -> tuple[int, Waiting]:
    from .waiting import Waiting

    fields: dict[str, Any] = {"system_call": handle.system_call()}
    task = handle.running_task()
    if task is None:
        return 0, Waiting(since, **fields)
    fields |= {"task": task.definition.label, "item": task.item}
    answer = request.result() if request.done() else None
    match answer and answer.places.get(str(task.number)):
        case [str(file), int(line), str(function)]:
            fields |= {"file": file, "line": line, "function": function}
    return task.number, Waiting(since, **fields)
