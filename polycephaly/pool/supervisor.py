"""The supervisor: starts and ends the drones of a pool, as population.py decides.

    Population ──> `Start`, `Stop`, `Evacuate` ──> Engine, DroneHandle, ObjectDirectory
        ^                                                │
        └── started, start_failed, prepared, died, ... <─┘ HELLO, a pid, an exit, an error

When a drone has died, its last results are handled first. The tasks that it had not begun go back
to their queues, and another drone takes its place, from the same snapshot. The engine (engine.py)
starts processes and reports their ends; preparation.py runs what comes before the tasks. The texts
of errors are made here, and what waits for drones to start is settled here.

Methods are called while holding the reactor's lock, unless their docstrings say otherwise.
"""

from __future__ import annotations

import logging
import signal
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

from .._compat import remote_traceback_type
from ..errors import DroneDied, describe_exit
from ..promises.promise import Promise
from ..wire.messages import STOP, pack_numbers
from .directory import ObjectDirectory
from .dispatcher_base import DispatcherBase, pool_error
from .drone_handle import DroneHandle
from .engine import Engine
from .interfaces import State
from .items import with_item
from .pool_state import GiveUpStarts
from .population import (
    Complete,
    Death,
    Evacuate,
    ReportDeath,
    Start,
    Stop,
    TryAgain,
    ended_in_order,
)
from .preparation import Preparation
from .stack_requests import fatal_frames, format_remote
from .task import Task

log = logging.getLogger(__name__)


class Supervisor:
    engine: Engine

    def __init__(self, dispatcher: DispatcherBase, directory: ObjectDirectory) -> None:
        self._dispatcher = dispatcher
        self._directory = directory
        self._config = dispatcher.config
        self._population = dispatcher.state.population
        self._population.can_start = self._can_start
        self.preparation = Preparation(dispatcher, self._mark_ready, self._on_not_prepared)
        # The drone of a `Drone`, until that has taken it.
        self.first: DroneHandle | None = None
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

    def _can_start(self) -> bool:
        return self.engine.can_start()

    def _now(self) -> float:
        return self._dispatcher.reactor.timers.now()

    # -- what is decided ---------------------------------------------------------------------------

    def carry_out(self, action: Start | Stop | Evacuate | Complete | GiveUpStarts) -> None:
        match action:
            case Start(number, name, place):
                self._start(number, name, place)
            case Stop(drone):
                drone.send(pack_numbers(STOP))
            case Evacuate(drone):
                self._directory.evacuate(drone)
            case Complete():
                while self._pending_refreshes:
                    self._dispatcher.settle_signal(self._pending_refreshes.pop())
            case GiveUpStarts():
                self.engine.give_up_starts()

    def report(self, action: TryAgain | ReportDeath) -> None:
        match action:
            case TryAgain(error):
                text = "a drone of %s could not be started, and will be tried again: %s"
                log.warning(text, self._config.name, error)
            case ReportDeath(error):
                log.info("%s", error)

    def _start(self, number: int, name: str, place: int) -> None:
        handle = self.engine.start(number, name, place)
        if handle is not None:
            self._dispatcher.assignment.add(handle)
            self._dispatcher.record.drones[handle.name] = None
            self._dispatcher.schedule_health_check()
            if self._config.on_death == "end":
                self.first = self.first or handle

    # -- starting ----------------------------------------------------------------------------------

    def start_missing(self) -> None:
        self._population.start_missing()

    def on_start_error(self, error: BaseException) -> None:
        """Handle a drone that could not be started."""
        broken = self._dispatcher.start_error(error)
        self._population.start_failed(error, broken, self._now())

    def on_started(self, handle: DroneHandle, pid: int) -> None:
        handle.pid = pid
        # A drone that no zygote starts could not be observed before.
        self._dispatcher.schedule_health_check()
        self._dispatcher.settle_signal(handle.pid_known)
        # The first drone can work while the others are forked.
        self._dispatcher.settle_signal(self._dispatcher.begun)
        self._population.started()

    def when_complete(self, complete: Promise[None]) -> None:
        """Settle `complete` when all drones have started."""
        self._pending_refreshes.append(complete)
        self._population.check_complete()

    def on_not_started(self, handle: DroneHandle, error: BaseException) -> None:
        self.remove(handle)
        self.on_start_error(error)
        self._population.check_complete()

    def on_hello(self, handle: DroneHandle) -> None:
        """Handle the first message of a drone: prepare it."""
        if handle.state is State.STARTING:
            self._dispatcher.profile(handle)
            self.preparation.begin(handle)

    def _on_not_prepared(self, handle: DroneHandle, reason: BaseException) -> None:
        # Drones can start, even if the report of that is read later: the tasks get the error.
        self._dispatcher.settle_signal(self._dispatcher.begun)
        self._population.not_prepared(handle, reason, self._now())

    def _mark_ready(self, handle: DroneHandle) -> None:
        self._population.prepared(handle, self._now())

    def kill_too_large(self, handle: DroneHandle, usage: str) -> None:
        """Kill a drone that is too large before its first task."""
        error = BrokenProcessPool(f"no drone of {self._config.name} fits: {usage}")
        self._population.too_large(handle, usage, error, self._now())

    # -- retiring ----------------------------------------------------------------------------------

    def retire(self, handle: DroneHandle) -> None:
        """Send `handle` no new tasks, and stop it when its dedicated tasks are done."""
        self._population.retire(handle, self._now())

    def resize(self, size: int) -> None:
        """Start drones, or retire some, so that `size` drones take tasks."""
        self._dispatcher.queue_inbound()  # so that the drones with the fewest tasks retire
        self._dispatcher.size = size
        self.engine.make_room(size)
        self._population.resize(size, self._now())

    def replace_all(self, snapshot: Any, replaced: Promise[None] | None = None) -> bool:
        """Replace all drones by new ones from `snapshot`; settle `replaced` when they are started.
        Return False if the pool was closed or broken in the meantime.
        """
        if self._population.wanted() == 0:
            return False
        self.engine.adopt(snapshot)
        if replaced is not None:
            self._pending_refreshes.append(replaced)
        self._population.replace(self._now())
        return True

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
        retries = [task.retries for task in fates.begun]
        self._dispatcher.state.drone_died(handle, fates, error, self._now())
        if any(task.retries == left for task, left in zip(fates.begun, retries, strict=True)):
            handle.forget_crash()  # a task is rejected, with an error that has it
        else:
            handle.tell_crash()
        self.remove(handle)
        if before <= State.RETIRING:
            handle.death = error
            self._population.died(handle, self._as_death(error, before), self._now())
        self._directory.on_drone_died(handle)
        self._dispatcher.stack_requests.on_drone_died(handle)
        self._population.ended()

    def _as_death(self, error: DroneDied, before: State) -> Death:
        name = self._config.name
        unready = pool_error(f"drones of {name} die before they are ready", error)
        terminated = pool_error(f"drones of {name} get SIGTERM before their first call", error)
        return Death(before, error, unready, terminated, self._dispatcher.tasks_done)

    def remove(self, handle: DroneHandle) -> None:
        """Forget a drone that has ended."""
        handle.print_output()
        handle.close()
        self._dispatcher.state.drone_ended(handle, handle.closed_error(), self._now())
        self._dispatcher.settle_signal(handle.pid_known)
        self._dispatcher.settle_signal(handle.ended)
        self.engine.reclaim(handle)


def _death(handle: DroneHandle, task: Task | None) -> DroneDied:
    """Return the error that reports a drone's death; `task` was running, or is None."""
    code = handle.exitcode
    end = f"died ({handle.exit_reason})" if code is None else describe_exit(code)
    if ended_in_order(code, task):
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
