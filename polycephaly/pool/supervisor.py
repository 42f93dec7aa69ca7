"""The supervisor: starts, retires and replaces the drones of a pool.

    start_missing ──> Engine.start ──> STARTING ──HELLO──> PREPARING (preparation.py) ──> READY
                                                             max_tasks, refresh, release, resize │
                   name free    <── DEAD <──exited── STOPPING <──STOP, if all is answered── RETIRING

A drone that dies is removed. The tasks that the drone had not begun go back to the dispatcher, and
another drone takes its place, from the same snapshot. Failed starts are counted; after a few in a
row the pool breaks, and its error gives the reason. The engine (engine.py) starts processes and
reports their ends.

Methods are called while holding the reactor's lock, unless their docstrings say otherwise.
"""

from __future__ import annotations

import errno
import itertools
import logging
import signal
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from .._compat import remote_traceback_type
from ..errors import DroneDied, describe_exit
from ..promises.promise import Promise
from ..runtime.timers import Timer
from ..wire.messages import RECALL, STOP, pack_numbers
from .directory import ObjectDirectory
from .dispatcher_base import DispatcherBase, pool_error
from .drone_handle import DroneHandle
from .engine import Engine
from .interfaces import State
from .items import with_item
from .preparation import Preparation
from .stack_requests import fatal_frames, format_remote
from .task import Task

log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 5.0  # seconds for a drone's exit handlers
MAX_FAILED_STARTS = 3
MAX_KILLED_STARTS = 100  # in a row, if the drones were killed from outside this package
START_RETRY_SECONDS = 1.0  # seconds after a failed start of a pool that was complete
# Of a start: a limit was reached, perhaps only for a while.
PASSING_ERRORS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)


class Supervisor:
    engine: Engine

    def __init__(self, dispatcher: DispatcherBase, directory: ObjectDirectory) -> None:
        self._dispatcher = dispatcher
        self._directory = directory
        self._config = dispatcher.config
        self.preparation = Preparation(dispatcher, self._mark_ready, self._on_not_prepared)
        self._numbers = itertools.count(1)
        # The drone of a `Drone`, until that has taken it.
        self.first: DroneHandle | None = None
        self._was_complete = False  # as many drones as wanted have started
        self._failed_starts = 0
        self._retry: Timer | None = None  # tries a failed start again
        self.too_large_in_a_row = 0  # drones in a row that were too large before their first task
        # Drones that got SIGTERM before their first call, since the pool had done so many tasks.
        self._terminated = self._tasks_done = 0
        # `refresh` calls whose drones are being started.
        self._pending_refreshes: list[Promise[None]] = []

    def use(self, engine: Engine) -> None:
        """Start the drones by `engine`. Called once, in the thread that asks for drones. Raises the
        errors of pickling the initializer, and `ValueError` if snapshots cannot be fresh.
        """
        self.engine = engine
        initializer, initargs = self._config.initializer, self._config.initargs.value
        try:
            if self._config.fresh and (reason := engine.why_no_forks()):
                raise ValueError(f"fresh=True takes snapshots by a fork of this process: {reason}")
            if initializer is None:
                return
            initializer, initargs = engine.initializer(initializer, initargs)
            self.preparation.set_initializer(initializer, initargs, self._config.name)
        except BaseException:
            engine.end()
            raise

    # -- starting ----------------------------------------------------------------------------------

    def start_missing(self) -> None:
        """Start drones until there are as many as wanted, not counting those that are retiring or
        stopping.
        """
        if not self.engine.can_start() or (
            self._config.on_death == "end" and self._dispatcher.begun.done()
        ):
            return
        size = len(self._dispatcher.current_drones())
        for _ in range(self._dispatcher.target_size() - size):
            if not self.engine.can_start() or not self._start_one():
                return

    def _start_one(self) -> bool:
        used = {each.name for each in self._dispatcher.current_drones()}
        index = next(i for i in itertools.count() if self._config.drone_name(i) not in used)
        handle = self.engine.start(next(self._numbers), self._config.drone_name(index), index)
        if handle is None:
            return False
        self._dispatcher.assignment.add(handle)
        self._dispatcher.record.drones[handle.name] = None
        self._dispatcher.schedule_health_check()
        if self._config.on_death == "end":
            self.first = self.first or handle
        return True

    def on_start_error(self, error: BaseException) -> None:
        """Handle a drone that could not be started. If other drones are ready, try again later; if
        none is, a few times. But a pool that was never complete is too large for a limit.
        """
        may_retry = any(each.state is State.READY for each in self._dispatcher.handles)
        if not may_retry and getattr(error, "errno", None) in PASSING_ERRORS:
            self._failed_starts += 1
            may_retry = self._failed_starts < MAX_FAILED_STARTS
        if may_retry and self._was_complete:
            text = "a drone of %s could not be started, and will be tried again: %s"
            log.warning(text, self._config.name, error)
            if self._retry is None or self._retry.is_over:
                self._retry = self._dispatcher.call_later(START_RETRY_SECONDS, self.start_missing)
        else:
            self._dispatcher.give_up_starting(error)

    def on_started(self, handle: DroneHandle, pid: int) -> None:
        handle.pid = pid
        # A drone that no zygote starts could not be observed before.
        self._dispatcher.schedule_health_check()
        self._dispatcher.settle_signal(handle.pid_known)
        # The first drone can work while the others are forked.
        self._dispatcher.settle_signal(self._dispatcher.begun)
        self._check_complete()

    def when_complete(self, complete: Promise[None]) -> None:
        """Settle `complete` when all drones have started."""
        self._pending_refreshes.append(complete)
        self._check_complete()

    def _check_complete(self) -> None:
        """Settle the `refresh` calls if all drones have started, but for those that failed to."""
        if self._waits_for_room():
            return
        if self._dispatcher.handles and all(each.pid for each in self._dispatcher.handles):
            self._was_complete = True
            while self._pending_refreshes:
                self._dispatcher.settle_signal(self._pending_refreshes.pop())

    def _waits_for_room(self) -> bool:
        """Return whether drones will be started as soon as others, which are ending, have ended."""
        return (
            len(self._dispatcher.current_drones()) < self._dispatcher.target_size()
            and not self.engine.can_start()
            and any(each.state is State.STOPPING for each in self._dispatcher.handles)
        )

    def on_not_started(self, handle: DroneHandle, error: BaseException) -> None:
        self.remove(handle)
        self.on_start_error(error)
        self._check_complete()

    def on_hello(self, handle: DroneHandle) -> None:
        """Handle the first message of a drone: prepare it."""
        if handle.state is State.STARTING:
            self._dispatcher.profile(handle)
            self.preparation.begin(handle)

    def _on_not_prepared(self, handle: DroneHandle, reason: BaseException) -> None:
        # Drones can start, even if the report of that is read later: the tasks get the error.
        self._dispatcher.settle_signal(self._dispatcher.begun)
        self._count_failed_start(reason)
        # Only after the count: if that breaks the pool, which kills the drone, a thread that
        # gives a lone drone a task is told the reason.
        if handle.state <= State.RETIRING:
            self.stop(handle)

    def _mark_ready(self, handle: DroneHandle) -> None:
        """Let a drone take tasks that is prepared, or prepared anew."""
        if handle.state < State.READY:
            handle.become(State.READY)
            self._failed_starts = 0
        if handle.retire_when_ready:
            self.retire(handle)
        self.stop_if_retired(handle)

    def kill_too_large(self, handle: DroneHandle, usage: str) -> None:
        """Kill a drone that is too large before its first task. After a few in a row the pool
        breaks, because the next drone would be as large.
        """
        handle.kill(usage)
        self.too_large_in_a_row += 1
        if self.too_large_in_a_row >= MAX_FAILED_STARTS:
            self._dispatcher.break_pool(
                BrokenProcessPool(f"no drone of {self._config.name} fits: {usage}")
            )

    def _count_failed_start(self, error: BaseException, tries: int = MAX_FAILED_STARTS) -> None:
        """Count a drone that did not become ready, and break the pool after a few in a row."""
        self._failed_starts += 1
        if self._failed_starts >= tries or self._config.on_death != "replace":
            self._dispatcher.break_pool(error)

    # -- retiring and stopping ---------------------------------------------------------------------

    def retire(self, handle: DroneHandle) -> None:
        """Send `handle` no new tasks, and stop it when its dedicated tasks are done."""
        if handle.state is State.READY:
            handle.become(State.RETIRING)
            if len(handle.in_flight) > 1:
                handle.send(pack_numbers(RECALL))
            self._directory.evacuate(handle)
            self._dispatcher.state.drone_retires(handle, self._now())
        elif handle.state < State.READY and handle.has_waiting_tasks():
            handle.retire_when_ready = True  # after it is ready, because it has dedicated tasks
        elif handle.state < State.READY:
            handle.become(State.STOPPING)
            handle.kill()
        self.start_missing()

    def resize(self, size: int) -> None:
        """Start drones, or retire some, so that `size` drones take tasks."""
        self._dispatcher.queue_inbound()  # so that the drones with the fewest tasks retire
        self._dispatcher.size = size
        self.engine.make_room(size)
        for handle in surplus(self._dispatcher.current_drones(), size):
            self.retire(handle)
        self.start_missing()

    def stop_if_retired(self, handle: DroneHandle | None) -> None:
        """Stop the drone, if any, if it retires and its last task has gone."""
        if (handle is not None and handle.state is State.RETIRING) and not (
            handle.in_flight or handle.packing or handle.has_waiting_tasks()
        ):
            self.stop(handle)

    def stop(self, handle: DroneHandle) -> None:
        handle.become(State.STOPPING)
        handle.send(pack_numbers(STOP))
        reason = f"its exit handlers ran for more than {STOP_GRACE_SECONDS:g} s"
        self._dispatcher.call_later(STOP_GRACE_SECONDS, handle.kill, reason)  # if it is alive then

    def kill_all(self, reason: str) -> None:
        for handle in self._dispatcher.handles:
            handle.become(max(handle.state, State.STOPPING))
            handle.kill(reason)
        self.engine.give_up_starts()

    def replace_all(self, snapshot: Any, replaced: Promise[None] | None = None) -> bool:
        """Replace all drones by new ones from `snapshot`; settle `replaced` when they are started.
        Return False if the pool was closed or broken in the meantime.
        """
        if self._dispatcher.target_size() == 0:
            return False
        old = list(self._dispatcher.handles)
        self.engine.adopt(snapshot)
        if replaced is not None:
            self._pending_refreshes.append(replaced)
        for handle in old:
            self.retire(handle)
        self.start_missing()
        return True

    def _now(self) -> float:
        return self._dispatcher.reactor.timers.now()

    # -- deaths ------------------------------------------------------------------------------------

    def on_died(self, handle: DroneHandle, exitcode: int | None) -> None:
        """Handle the death of a drone. `exitcode` is None if the engine cannot know it.

        Answered tasks are settled first. What becomes of the others is told in drone_record.py.
        """
        before = handle.state
        handle.exitcode = exitcode
        if before <= State.RETIRING:
            # For threads that read `death` from here on; the running task is added below.
            handle.death = _death(handle, None)
        handle.become(State.DEAD)
        self._dispatcher.state.limits.drone_died(handle)
        handle.print_output()
        handle.collect_last_results()
        begun = handle.last_answered(), handle.last_started()
        fates = handle.take_fates(begun, handle.status_page.call)
        running = fates.running
        error = _death(handle, running)
        if error.__cause__ is not handle.cause:
            # Before the rejections. Not while holding the lock: reading source files takes time.
            self._dispatcher.reactor.deliver(partial(_tell_frames, error, handle.task_frames))
        self._dispatcher.record.add_lost(handle.name, fates.begun)
        self._dispatcher.state.drone_died(handle, fates, error, self._now())
        self.remove(handle)
        if before <= State.RETIRING:
            handle.death = error
            self._on_unexpected_death(handle, error, before)
        self._directory.on_drone_died(handle)
        self._dispatcher.stack_requests.on_drone_died(handle)
        self.start_missing()
        self._check_complete()  # the drone may have been the last that had not started

    def _on_unexpected_death(self, handle: DroneHandle, error: DroneDied, before: State) -> None:
        on_death = self._config.on_death
        # After SIGTERM to all drones, the others finish their calls.
        if on_death == "break" and not _ended_in_order(error.exitcode, error.running):
            self._dispatcher.break_pool(error)
        elif before < State.READY and self._dispatcher.target_size() and on_death == "end":
            self._dispatcher.break_pool(error)  # no other drone takes its place
        elif error.exitcode == -signal.SIGTERM and on_death != "end" and not handle.tasks_done:
            log.info("%s", error)
            self._count_terminated(error)
        elif before < State.READY and self._dispatcher.target_size():
            # Killed by others: that says little about whether drones can start.
            by_others = handle.killed_on_request or not handle.is_killed
            killed = by_others and error.exitcode == -signal.SIGKILL
            reason = pool_error(f"drones of {self._config.name} die before they are ready", error)
            self._count_failed_start(reason, MAX_KILLED_STARTS if killed else MAX_FAILED_STARTS)
        elif on_death == "end":
            if self._dispatcher.refusal is None:
                self._dispatcher.refusal = error
            self._dispatcher.state.closing = True
        else:
            log.info("%s", error)

    def _count_terminated(self, error: DroneDied) -> None:
        """Count a drone that got SIGTERM before its first call, and break the pool after many with
        no call done meanwhile: an initializer that sends the signal would never let one begin.
        """
        if self._tasks_done != self._dispatcher.tasks_done:
            self._terminated, self._tasks_done = 0, self._dispatcher.tasks_done
        self._terminated += 1
        if self._terminated >= MAX_KILLED_STARTS:
            text = f"drones of {self._config.name} get SIGTERM before their first call"
            self._dispatcher.break_pool(pool_error(text, error))

    def remove(self, handle: DroneHandle) -> None:
        """Forget a drone that has ended."""
        handle.print_output()
        handle.close()
        handle.become(State.DEAD)
        self._dispatcher.state.drone_ended(handle, handle.closed_error(), self._now())
        self._dispatcher.settle_signal(handle.pid_known)
        self._dispatcher.settle_signal(handle.ended)
        self.engine.reclaim(handle)


def surplus(handles: Sequence[DroneHandle], size: int) -> list[DroneHandle]:
    """Return the drones to retire so that `size` are left: idle ones first, then those that will
    soonest have done the tasks that they have; of equal ones those that were started last.
    """

    def cost(handle: DroneHandle) -> tuple[int, int, float, int]:
        own = len(handle.dedicated) + len(handle.preferred)
        unknown = handle.unknown + handle.overlapping
        return own, unknown, handle.load, -handle.number

    return sorted(handles, key=cost)[: max(0, len(handles) - size)]


def _ended_in_order(code: int | None, running: object) -> bool:
    """Return whether a drone has ended because of SIGTERM, after its call."""
    return code == -signal.SIGTERM and running is None


def _death(handle: DroneHandle, task: Task | None) -> DroneDied:
    """Return the error that reports a drone's death; `task` was running, or is None."""
    code = handle.exitcode
    end = f"died ({handle.exit_reason})" if code is None else describe_exit(code)
    if _ended_in_order(code, task):
        end = "got SIGTERM and has ended"
    reason = ""
    if handle.kill_reason and code in (None, -signal.SIGKILL, -signal.SIGABRT):
        reason = f", because {handle.kill_reason}"
    message = f"drone {handle.name} (pid {handle.pid}) {end}{reason}"
    running = task.definition.label if task is not None else None
    if task is not None and running:
        name = with_item(running, *task.items)
        message += f"{reason and ','} while running {name}"
    if code == -signal.SIGKILL and not reason:
        message += " (by another process, or by the kernel because memory ran out)"
    stderr, stack = "\n".join(handle.stderr), "\n".join(handle.stack)
    if stderr:
        message += f"\nlast lines of the drone on stderr:\n{stderr}"
    # The drone was told to write where it was, and its task's frames can be told from the others.
    has_frames = bool(reason and code == -signal.SIGABRT and handle.task_frames)
    if stack and not has_frames:
        message += f"\n{stack}"
    died = DroneDied(
        message, drone=handle.name, exitcode=code, running=running, stderr=stderr, stack=stack
    )
    died.__cause__ = remote_traceback_type()("") if has_frames else handle.cause
    return died


def _tell_frames(error: DroneDied, lines: list[str]) -> None:
    """Give the cause of `error`, which copies of `error` share, its text."""
    cause: Any = error.__cause__
    cause.tb = format_remote(fatal_frames(lines), error)
