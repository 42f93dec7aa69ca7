"""The dispatcher: the task queue of one `Pool` or `Drone`, and the drones that serve the queue.

    submit (any thread) ──> inbox, queue ──assign──> handle.in_flight ──answer──> promise
                                   ^                   │ recalled, or the drone died before
                                   └───────────────────┘ it began

Callers append to the inbox (`inbound`), from which each turn of the loop puts tasks into the
queues. What becomes of a task after each event is decided in pool_state.py, which drone gets which
task in assignment.py, and which drones there are in population.py. What they decide is carried out
here: messages, timers, promises.

The supervisor (supervisor.py) has the engine start and end drones. The supervisor and the other
parts of the dispatcher share the state in dispatcher_base.py.

At any moment a task is in one place, which its state tells: see task_state.py, and
docs/decisions/0003-each-task-is-in-one-place.md for the consequences, and for the race between
`submit` and the end of the dispatcher.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any

from .._compat import caller_stacklevel, renew_in_child
from ..errors import Lost, copy_error
from ..memory.references import Serialized
from ..promises.combining import race
from ..promises.promise import Promise, Signal, fulfill, reject
from ..runtime.deferred_sigint import DeferredSigint
from ..runtime.hidden import Hidden
from ..runtime.prompt import running_cell
from ..runtime.signal_handlers import is_of_signal_handler
from ..wire.functions import RemoteFunction
from ..wire.messages import DEFINE_CODE, INTERRUPT, pack_numbers
from ..wire.placeholders import PayloadWithRefs
from .assignment import Send
from .backpressure import BackPressure
from .config import PoolConfig
from .directory import ObjectDirectory
from .dispatcher_base import DispatcherBase, pool_error
from .drone_handle import DroneHandle
from .engine import Engine
from .freshness import Freshness
from .health import HealthMonitor
from .hints import explain
from .interfaces import State, TaskOptions
from .locality import Locality
from .pool_state import Action, GiveUpStarts
from .population import Complete, EndPool, Evacuate, ReportDeath, Start, Stop, TryAgain, TurnAgain
from .reactor import PROGRAM_ENDS, acquire_reactor
from .stale import StaleWarning
from .stall_detection import StallDetector
from .supervisor import Supervisor
from .task import Task, fail
from .task_state import ENDING, QUEUED, WAITING
from .validation import VALIDATES, validate

log = logging.getLogger(__name__)

# Interval of the checks whether a malformed message has replaced an answer.
LOST_ANSWER_CHECK_SECONDS = 0.25
END_AFTER_BUG_SECONDS = 5.0


class Dispatcher(DispatcherBase):
    """The queue and the drones of one pool.

    The constructor calls `open_engine`, which takes the snapshot of this process, and raises its
    errors and those of pickling the initializer.
    """

    def __init__(self, config: PoolConfig, open_engine: Callable[[Dispatcher], Engine]) -> None:
        super().__init__(config)
        self.open_engine = open_engine
        self.task_options = config.task_options
        self._own_options = config.task_options if config.task_options != TaskOptions() else None
        # If true, `submit` has more to check at each call.
        self.needs_checks = self._own_options is not None or config.max_queued is not None
        self.freshness: Freshness | None = None
        if config.fresh:
            self.freshness = Freshness(
                config.name, self._is_idle, self._obstacle, self._take_snapshot
            )
            self.needs_checks = True
        self.stale_warning: StaleWarning | None = None  # in a notebook
        cell = running_cell()
        if cell is not None and not config.fresh and config.on_death != "end":
            self.stale_warning = StaleWarning(config.name, cell)
            self.needs_checks = True
        # Until the first plain function.
        self.checks_width = config.width > 1
        self.resource_sizes = self.assignment.resources.sizes
        # Those of the `Pool` that may not have been read in full, by `id`.
        self.maps: Mapping[int, weakref.ref[Any]] = {}
        # An entry for each task that is in the inbox, or about to come, and has a priority, drone,
        # resource or kept value. If there is none, all just go to the end of `queue`.
        self._special: deque[None] = deque()
        self.has_left_reactor = False
        self.finalizer: weakref.finalize[..., Any] | None = None  # of the `Pool` or `Drone`
        # The object that the `Pool` holds, if this was made in its place: see `_StartsAnew`.
        self.held: Dispatcher | None = None
        # Ends this with its owner. The owner refers to the callback only weakly.
        self.owner_callback: object = None
        self.directory: ObjectDirectory = ObjectDirectory(self)
        self.assignment.prepare = self.directory.prepare_to_send
        self.state.find_holder = self.directory.best_holder
        self.locality = Locality(self, self.directory)
        self.stall_detector = StallDetector(self)
        limit = config.max_queued
        self.backpressure = None if limit is None else BackPressure(self, limit)
        self.supervisor = Supervisor(self, self.directory)
        self.health_monitor = HealthMonitor(self, self.supervisor)
        self.schedule_health_check = self.health_monitor.schedule_check
        has_begun = False
        try:
            # Otherwise a Ctrl-C could leave a zygote that no object refers to.
            with DeferredSigint():
                self.reactor = acquire_reactor()
                try:
                    self.supervisor.use(open_engine(self))
                    if self.supervisor.engine.runs_here:
                        self.stale_warning = None
                        self.assignment.runs_one_at_a_time = True
                except BaseException:
                    self.reactor.release()
                    raise
                has_begun = True
                self.post(self._begin)
                self._check_loop()
        except BaseException:  # Ctrl-C, deferred until now, or an error of a signal's handler
            if has_begun:
                self.post(self._begin)  # the post above may not have happened
                self.kill()
            raise

    # -- any thread --------------------------------------------------------------------------------

    def submit(
        self,
        work: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: DroneHandle | None = None,
        task_options: TaskOptions | None = None,
        task: Task | None = None,
    ) -> Promise[Any]:
        """Queue a call of `work`, as `task` if that is given, and return its promise.

        Raises `RuntimeError` if the pool is closed, `BrokenProcessPool` if it is broken.
        """
        if self.needs_checks or self.refusal is not None:
            self.warn_if_stale(work)
            if self._begins_call(target, task):
                with self.calls():
                    return self.submit(work, args, kwargs, None, task_options, task)
            self._wait_for_room(target)
            self.check_open()
            task_options = task_options or self._own_options
        if target is not None and (target.state >= State.RETIRING or target.retire_when_ready):
            raise target.closed_error()
        if task is None:
            task = Task(self)
        if task_options is not None:
            task.set_options(task_options)
        try:
            definition = self.registry.define(work)
            if definition.takes_function:
                args = (work, *args)
            inputs = task.capture(definition, args, kwargs)
            if definition.captures:
                task.hold_captured()
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            reject(task.promise, error)
            return task.promise
        try:
            if self.checks_width and not definition.overlaps and target is None:
                self.check_width(definition)
            if target is not None:
                task.target = target
            if inputs:
                task.state = WAITING
                self.state.awaiting_inputs.add(task)
            self.unsettled[task] = None
            if inputs:
                task.wait_for(inputs)
                if self.has_ended:
                    self.reject_unsettled()
            else:
                self._enqueue(task)
        except BaseException:  # Ctrl-C, for example: the caller will not get the promise
            # Near the recursion limit, `cancel` may fail here too; this call is of C code alone.
            cancel = task.promise.cancel
            self.reactor.deliver(cancel)
            cancel()
            raise
        return task.promise

    def _check_loop(self) -> None:
        """Raise `BrokenProcessPool` if an error has ended the loop's thread before `_begin`."""
        if self.reactor.is_dying:
            self.reactor.thread.join()
            if not self.has_ended:
                self.has_ended = True
                self.supervisor.engine.end()
                raise BrokenProcessPool("the thread that serves the pools has ended at its start")

    def check_width(self, definition: RemoteFunction) -> None:
        """Warn, once, that `definition` does not overlap, unless it is of a code string."""
        if definition.kind != DEFINE_CODE:
            self.checks_width = False
            warnings.warn(
                f"a drone of {self.config.name} runs {definition.label} one call at a time, "
                f"because it is a plain function: width={self.width} is for coroutine functions "
                "(async def); more plain functions at once need more drones, or green.map within "
                "a task",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )

    def _wait_for_room(self, target: DroneHandle | None) -> None:
        if self.backpressure is not None:
            self.backpressure.wait(target)

    def start_here(self) -> None:
        """Start the drones, if this is a forked child and only the parent has started them."""

    def close_when_collected(self, holder: object) -> None:
        """Close when no reference to `holder` is left."""
        self.finalizer = weakref.finalize(holder, self.close)
        self.finalizer.atexit = False

    def wait_begun(self) -> None:
        """Wait until the drones have started. End if that, or the wait, fails."""
        try:
            self.begun.result()
        except BaseException:
            self.kill()
            self.wait_ended()
            raise

    def submit_task(self, task: Task) -> None:
        """Queue a task that was made elsewhere. Raises the same errors as `submit`."""
        self._wait_for_room(None)
        self.check_open()
        if self.checks_width and not task.definition.overlaps:
            self.check_width(task.definition)
        self.unsettled[task] = None
        self._enqueue(task)

    def backlog(self, target: DroneHandle | None) -> int:
        """Return how many tasks for `target` only, or, if None, for any drone, count for
        back-pressure.
        """
        if self._special:  # the loop was woken, so there should be few in the inbox
            waiting = sum(task.target is target for task in [*self.inbound])
        else:
            waiting = len(self.inbound) if target is None else 0
        if target is not None:
            return waiting + target.queued
        return waiting + self.assignment.queued + len(self.state.delayed)

    def has_queued(self) -> bool:
        """Return whether tasks that any drone may run are queued. Any thread may call this."""
        return bool(self.inbound or self.assignment.queue)

    def has_room(self) -> bool:
        return self.backpressure is None or self.backpressure.has_room(None)

    def _enqueue(self, task: Task) -> None:
        """Put `task` into the inbox."""
        takes_kept = type(task.payload) is PayloadWithRefs
        if task.target or task.priority or task.resources or takes_kept:
            # First, so that the loop does not take it for one that just goes to the end.
            self._special.append(None)
            task.is_special = True
            self.inbound.append(task)
            self.reactor.request_turn()  # it may be sent although no drone is idle
        else:
            self.inbound.append(task)
            if self.wants_tasks:  # else an answer makes room, and wakes the loop
                self.reactor.request_turn()
        if self.has_ended:
            self.reject_unsettled()

    def on_inputs_ready(self, task: Task) -> None:
        """Queue `task`, whose inputs are all there, unless the task is settled."""
        if not task.promise.done():
            self._enqueue(task)
        self.state.awaiting_inputs.discard(task)
        if self.state.closing or (task.target is not None and task.target.state is State.RETIRING):
            self.post(self.stop_if_retired, task.target)

    def close(self, *, cancel: bool = False, running: bool = False) -> None:
        """Accept no more tasks, and end when all accepted tasks are done.

        Takes no lock, so finalizers may call it.
        """
        if self.refusal is None:
            self.refusal = RuntimeError(
                f"cannot schedule new futures after shutdown of {self.config.name}"
            )
        self.post(self._close, cancel, running)

    def kill(self, reason: str = "") -> None:
        """End now, together with the running tasks, whose errors give `reason`. Takes no lock."""
        if self.refusal is None:
            self.refusal = RuntimeError(
                f"{self.config.name} was released{reason and ', because '}{reason}"
            )
        self.post(self.abandon, reason)

    def refresh(self) -> None:
        """Replace the drones by new ones from a new snapshot, for all tasks not yet sent."""
        self.check_open()
        replaced: Promise[None] = Promise()
        with DeferredSigint():
            snapshot = self.supervisor.engine.snapshot()
            self.post(self.supervisor.replace_all, snapshot, replaced)
        if self.stale_warning is not None:
            self.stale_warning.on_snapshot()
        race(replaced, self.over).result()
        if not replaced.done():  # the pool has ended in the meantime
            self.supervisor.engine.discard(snapshot)
            self.check_open()

    def warn_if_stale(self, work: Any) -> None:
        if self.stale_warning is not None:
            self.stale_warning.check(work, self.registry.snapshot)

    def _begins_call(self, target: DroneHandle | None, task: Task | None) -> bool:
        """Return whether a call begins here before which a snapshot may be due: a call of this
        process, and not one within `calls`.
        """
        if self.freshness is None or target is not None:
            return False
        return not (self.freshness.is_calling() or (task is not None and task.client_tag))

    def calls(self) -> AbstractContextManager[None]:
        if self.freshness is None:
            return nullcontext()
        self.check_open()
        return self.freshness

    def wait_complete(self) -> None:
        if self.freshness is not None and self.reactor.can_wait():
            complete: Signal[None] = Signal()
            self.post(self.supervisor.when_complete, complete)
            self._wait_for(complete)

    def _is_idle(self) -> bool:
        """Return whether no call is unsettled, no map unfinished, and this thread may wait for a
        snapshot. Any thread may call this, without the reactor's lock.
        """
        # Of many, one is enough. Another thread may change them meanwhile.
        with suppress(StopIteration, RuntimeError):
            if not next(iter(self.unsettled)).promise.done():
                return False
        streams = [each() for each in list(self.maps.values())]
        return (
            self.reactor.can_wait()
            and all(task.promise.done() for task in [*self.unsettled])
            and all(each is None or each.is_over for each in streams)
        )

    def _obstacle(self) -> str | None:
        """Return what a new snapshot would lose: a kept value, or the frames of a failed task."""
        value = self.directory.any_kept()
        if value is not None:
            return value
        for label, number in list(self.failed_tasks):
            address = self.frames_address(number)
            if address is not None and os.path.exists(address):
                return f"the frames of {label} #{number} (post_mortem=True)"
        return None

    def _take_snapshot(self) -> None:
        """Replace the drones as `refresh` does, but return as soon as the snapshot is in use."""
        adopted: Signal[None] = Signal()
        with DeferredSigint():
            snapshot = self.supervisor.engine.snapshot()
            self.post(self._adopt, snapshot, adopted)
        race(adopted, self.over).result()
        if not adopted.done():  # the pool has ended in the meantime
            self.supervisor.engine.discard(snapshot)
            self.check_open()

    def push(self, names: dict[str, Any]) -> None:
        """Bind `names` on all drones, before they take tasks that are submitted after this call."""
        self.check_open()
        if not names:
            return
        preparation = self.supervisor.preparation
        step = preparation.capture_push(names)
        self.post(preparation.add_push, step)
        if self.reactor.can_wait():  # else this is the thread that does it
            self._wait_for(step.loaded)
            self.registry.snapshot.add(names)

    def resize(
        self, size: int, first: int, environments: tuple[Hidden[dict[str, str]], ...]
    ) -> None:
        """Have `size` drones from now on. `environments` are those of the drones with the indices
        from `first` on.
        """
        self.check_open()
        resized: Signal[None] = Signal()
        self.post(self._resize, size, first, environments, resized)
        if self.reactor.can_wait():  # else this is the thread that does it
            self._wait_for(resized)

    def _wait_for(self, done: Promise[Any]) -> None:
        """Wait until `done` is settled. Raise if the pool has ended in the meantime."""
        race(done, self.over).result()
        if not done.done():
            self.check_open()

    def wait_ended(self) -> None:
        """Wait until the drones have ended, and the reactor if this was its last pool."""
        if self.reactor.belongs_to_parent:
            return
        self.ended.result()
        if self.reactor.has_ended:
            self.reactor.thread.join()

    def finish(self, *, cancel: bool = False) -> None:
        """Close, and wait for the end.

        A Ctrl-C meanwhile, or another exception of a signal handler, cancels all tasks, which takes
        at most `tuning.grace_seconds`. A second one kills the drones.
        """
        self.close(cancel=cancel, running=cancel)
        try:
            self.wait_ended()
        except Exception:  # this thread cannot wait
            raise
        except BaseException:
            if cancel:
                self.kill()
                self.wait_ended()
            else:
                self.finish(cancel=True)
            raise

    async def finish_async(self, *, cancel: bool = False) -> None:
        """Close, and await the end. A cancellation meanwhile cancels all tasks; a second one kills
        the drones.
        """
        self.close(cancel=cancel, running=cancel)
        try:
            if not self.reactor.belongs_to_parent:
                await self.ended
        except BaseException:
            if cancel:
                self.kill()
                await self.ended
            else:
                await self.finish_async(cancel=True)
            raise
        self.wait_ended()

    def frames_address(self, task: int) -> str | None:
        return self.supervisor.engine.frames_address(task)

    def pending(self) -> int:
        """Return how many tasks are not settled, or are cancelled and still with a drone."""
        sent = [task for each in list(self.handles) for task in list(each.in_flight.values())]
        return len(self.unsettled) + sum(task not in self.unsettled for task in sent)

    def note_waiting_thread(self) -> None:
        self.stall_detector.request_check()

    # -- holding the reactor's lock: sending -------------------------------------------------------

    def _begin(self) -> None:
        if self in self.reactor.tenants:
            return
        self.reactor.tenants.append(self)
        try:
            self.supervisor.engine.begin()
        except OSError as error:  # at a limit of the system
            self.give_up_starting(error)
        else:
            if self.reactor.is_ending:
                self.kill(PROGRAM_ENDS)
            else:
                self.supervisor.start_missing()

    def take_turn(self, now: float) -> None:
        assignment = self.assignment
        if self.inbound:
            self.queue_inbound()
        if assignment.changed:
            assignment.update()
        if assignment.queue or assignment.with_own or assignment.resources.queues:
            for each in assignment.assign(now):
                self.send(each, now)
        if VALIDATES:
            validate(self)
            assignment.validate_idle()
        if self.state.closing and not self.has_ended:
            if self.state.awaiting_inputs:
                self.stall_detector.schedule_check()
            self.state.population.end_if_done(now)
        if self.backpressure:
            self.backpressure.wake_waiters()
        if assignment.changed:
            assignment.update()
        idle = assignment.is_any_idle()
        wants_tasks = idle or (self.width > 1 and assignment.could_overlap())
        self.wants_tasks = wants_tasks
        # No task is left behind: a caller appends it, and then reads `wants_tasks`, which is set
        # here before the inbox is looked at. So one of the two sees the other.
        if wants_tasks and self.inbound:
            self.reactor.request_turn()
        if idle and not assignment.queue:
            if assignment.crowded:
                self.state.turn_over(self.reactor.timers.now())  # the turn may have taken long
            if assignment.preferring:
                self.locality.rebalance(now)

    def send(self, send: Send, now: float) -> None:
        handle, runs = send
        batch = runs[0] if len(runs) == 1 else [*chain.from_iterable(runs)]
        handle.send(handle.pack(runs), batch)
        self.schedule_health_check()
        if handle.overlapping or batch[0].timeout is not None:
            self.state.limits.sent(handle, batch, now)

    def requeue_returned(self, handle: DroneHandle, returned: list[tuple[int, int]]) -> None:
        self.state.recalled(handle, returned, self.reactor.timers.now())
        self.after_answer(handle)

    def queue_inbound(self) -> None:
        """Queue the tasks of the inbox in order. After the end, a thread that adds one rejects
        it.
        """
        inbound, state = self.inbound, self.state
        count = len(inbound)
        if not count:
            return
        if (state.abandoned or state.broken is not None) and not self.has_ended:
            refusal = state.broken or self.refusal
            assert refusal is not None
            for _ in range(count):
                state.refused(self._take_inbound(), partial(copy_error, refusal))
            return
        assignment = self.assignment
        queue = assignment.queue
        # `_special` is looked at after the count: see `_enqueue`.
        if not (self._special or self.has_ended or (queue and queue[-1].priority < 0)):
            # Before the queue: a caller that looks for room counts none too few.
            assignment.queued += count
            for _ in range(count):
                task = inbound.popleft()
                if task.state is ENDING:  # cancelled before it came
                    assignment.queued -= 1
                else:
                    task.state = QUEUED
                    queue.append(task)
            return
        now = self.reactor.timers.now()
        for _ in range(0 if self.has_ended else count):
            state.arrived(self._take_inbound(), now)

    def _take_inbound(self) -> Task:
        """Take a task from the inbox, and count it as queued, unless it was cancelled before."""
        task = self.inbound.popleft()
        if task.is_special:
            task.is_special = False
            self._special.popleft()
        if task.state is not ENDING:
            self.assignment.enter_queue(task)
        return task

    def after_answer(self, handle: DroneHandle) -> None:
        """Update `handle` after an answer to one of its tasks in flight."""
        if handle.preparations:
            self.supervisor.preparation.go_on(handle)
        # Else nothing follows, and each answer comes here.
        if handle.state is not State.READY or self.config.max_tasks is not None:
            self.state.population.answered(handle, self.reactor.timers.now())

    # -- holding the reactor's lock: tasks that take kept values -----------------------------------

    def recompute_inputs(self, tasks: list[Task], lost: Lost) -> None:
        """Handle the loss of a value that one of `tasks`, sent but not begun, depends on.

        Values stored on other nodes are computed again. If no task takes such a value, the lost
        bytes are buffers of the arguments themselves, and the tasks with such buffers fail.
        """
        recomputed = [task for task in tasks if task.unfilled is not None]
        rejected: list[Task] = []
        if not recomputed:
            rejected = [task for task in tasks if isinstance(task.payload, Serialized)] or tasks
        self.reject_or_retry(rejected, lost, may_retry=False)
        others = [task for task in tasks if task not in recomputed and task not in rejected]
        self.requeue([task for task in others if not task.promise.done()])
        for task in recomputed:
            if not task.promise.done():
                task.state = WAITING
                self.state.awaiting_inputs.add(task)
                try:
                    task.recompute_inputs(lost)
                except BaseException as error:
                    self.state.awaiting_inputs.discard(task)
                    self.reactor.deliver(partial(reject, task.promise, copy_error(error)))

    # -- holding the reactor's lock: stopping running tasks ----------------------------------------

    def withdraw(self, task: Task) -> None:
        """Stop `task`, whose promise was cancelled."""
        if not task.is_withdrawn:
            task.is_withdrawn = True
            self.tasks_cancelled += task.calls_left
        self.state.cancelled(task, self.reactor.timers.now())

    def interrupt(self, handle: DroneHandle) -> None:
        """Interrupt the task that `handle` runs."""
        if handle.alive and handle.in_flight:
            # By their numbers, because others may be sent before the drone hears of this.
            handle.send(pack_numbers(INTERRUPT, [*handle.in_flight]))

    # -- holding the reactor's lock: failures ------------------------------------------------------

    def watch_for_lost_answer(self, handle: DroneHandle) -> None:
        """Watch a drone that has sent a malformed message. If that was an answer, its task would
        never be settled.
        """
        if handle.alive:
            if not handle.suspect_position:
                self.call_later(LOST_ANSWER_CHECK_SECONDS, self._kill_if_answer_lost, handle, 0)
            handle.suspect_position = max(1, handle.sent_count)

    def _kill_if_answer_lost(self, handle: DroneHandle, suspect: int) -> None:
        """Kill the drone if the first task in flight, or else the request for a kept value, will
        never be answered.

        `suspect` is its number, if the drone seemed to have answered or skipped it at the last
        check. If so again, the answer never comes. On a busy machine the drone may only not have
        got there yet; then the drone is runnable.
        """
        unanswered = handle.in_flight or handle.packing
        head = next(iter(unanswered), 0)
        task = handle.in_flight.get(head)
        is_later = task is not None and task.position > handle.suspect_position
        if not head or is_later or not handle.alive:
            handle.suspect_position = 0
            return
        started = handle.last_started()
        if handle.in_flight:
            is_over = handle.last_answered() == head or (
                started != head and (started in handle.in_flight or handle.is_waiting())
            )
        else:
            is_over = handle.is_waiting()
        # Of overlapped tasks it is not known which were answered, so one that runs may be killed.
        if not (is_over or handle.overlapping):
            head = 0
        if head and head == suspect:
            handle.kill(f"the drone sent a malformed message and did not answer task {head}")
        else:
            self.call_later(LOST_ANSWER_CHECK_SECONDS, self._kill_if_answer_lost, handle, head)

    def fail(self, error: Exception) -> None:
        """Break the pool after a bug in polycephaly, so that no caller waits for ever."""
        if not self.break_if_lost():
            log.error("a bug in polycephaly breaks %s", self.config.name, exc_info=error)
            broken = pool_error("a bug in polycephaly", error)
            try:
                self.break_pool(broken)
            finally:
                # It may have met the report of a drone's end, for which the pool's end would wait.
                self.call_later(END_AFTER_BUG_SECONDS, self._end_if_left, broken)

    def _end_if_left(self, error: BaseException) -> None:
        if not self.has_ended:
            self._end_at_once(error)

    def end_at_once(self, error: BaseException) -> None:
        self._end_at_once(pool_error("the thread that serves the pools has ended", error))

    def _end_at_once(self, error: BaseException) -> None:
        with ExitStack() as steps:  # the last one first; each, though another fails
            steps.callback(self._end)
            for handle in self.handles:
                steps.callback(self._give_up, handle)
            steps.callback(self.supervisor.engine.end_at_once)
            if self.backpressure is not None:
                steps.callback(self.backpressure.wake_waiters)
            steps.callback(self.break_pool, error)

    def _give_up(self, handle: DroneHandle) -> None:
        if handle in self.handles:
            try:
                self.supervisor.on_died(handle, None)
            finally:
                self.supervisor.remove(handle)  # its last results do not come any more

    def break_if_lost(self) -> bool:
        """Break the pool if the engine has lost the cluster on which the drones run."""
        loss = self.supervisor.engine.loss()
        if loss is not None:
            self.break_pool(loss)
        return loss is not None

    def settle_lost(self, error: BaseException) -> None:
        for task in [*self.unsettled]:
            # In a broken pool none is left, but those that an error has met on their way.
            is_lost = task.state is ENDING or self.state.broken is not None
            if is_lost and task not in self.openings_left:
                fail(task, copy_error(self.state.broken or error))

    # -- holding the reactor's lock: size and end --------------------------------------------------

    def _resize(
        self,
        size: int,
        first: int,
        environments: tuple[Hidden[dict[str, str]], ...],
        resized: Signal[None],
    ) -> None:
        # Another call may have added some of them meanwhile.
        self.environments += environments[len(self.environments) - first :]
        self.supervisor.resize(size)
        self.settle_signal(resized)

    def _adopt(self, snapshot: Any, adopted: Signal[None]) -> None:
        if self.supervisor.replace_all(snapshot):
            self.settle_signal(adopted)

    def _close(self, cancel: bool, running: bool) -> None:
        begun = {n for each in self.handles for n in each.in_flight if each.is_running(n)}
        self.state.close(begun, cancel=cancel, cancel_running=running)

    def cancel_dedicated(self, handle: DroneHandle) -> None:
        """Cancel the tasks that only `handle` may run."""
        self.state.drone_released(handle)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start() | Stop() | Evacuate() | Complete() | GiveUpStarts():
                self.supervisor.carry_out(action)
            case TryAgain() | ReportDeath():
                self.supervisor.report(action)
            case TurnAgain():
                if any(task not in self.openings_left for task in [*self.unsettled]):
                    # Deliveries settle the last tasks, and after these no turn would be due.
                    self.reactor.deliver(self.reactor.request_turn)
            case EndPool():
                self._end()
            case _:
                super()._carry_out(action)

    def _was_used(self) -> bool:
        """Return whether a task was ever submitted, or a name pushed."""
        counts = (
            self.tasks_done,
            self.tasks_cancelled,
            self.record.failed,
            self.supervisor.preparation.has_pushes,
        )
        return bool(any(counts) or self.unsettled)

    def disable_in_child(self) -> None:
        starts_anew = (
            self.refusal is None and self.config.on_death != "end" and not self._was_used()
        )
        self.refusal = RuntimeError(
            f"{self.config.name} belongs to another process, of which this one is a fork: make a "
            "Pool or Drone in the process that uses it, after the fork (a web server that loads "
            "the program before it forks has a hook for that: post_fork of gunicorn, postfork of "
            "uWSGI, worker_process_init of Celery)"
        )
        if starts_anew:
            for handle in self.handles:
                handle.state, handle.death = State.DEAD, self.refusal
            self.handles, self.refusal, self.needs_checks = [], None, True
            (self.held or self).__class__ = _StartsAnew

    def abandon(self, reason: str = "") -> None:
        """Kill every drone now; their tasks are lost, with errors that give `reason`."""
        self.queue_inbound()  # those for one drone are lost with it
        self.state.abandon(reason)

    def _end(self) -> None:
        self.refusal = self.refusal or RuntimeError(f"{self.config.name} has ended")
        self.has_ended = True  # after `refusal`, which is the error for tasks added from here on
        with ExitStack() as steps:  # the last one first; each, though another fails
            steps.callback(self.reactor.deliver, self._finish)
            steps.callback(self.reactor.timers.cancel_of, self)
            steps.callback(self.reactor.tenants.remove, self)
            steps.callback(self.directory.close)
            steps.callback(self.supervisor.engine.end)
            steps.callback(self.registry.forget)

    def _finish(self) -> None:
        with ExitStack() as steps:  # as in `_end`
            steps.callback(self._leave_reactor)
            steps.callback(setattr, self, "waits_for_callbacks", True)
            steps.callback(fulfill, self.over)
            steps.callback(self._tell_not_begun)
            steps.callback(self.reject_unsettled)
            if self.finalizer is not None:
                steps.callback(self.finalizer.detach)

    def _tell_not_begun(self) -> None:
        if not self.begun.done():  # it was killed before a drone could be started
            assert self.refusal is not None  # set before the end
            reject(self.begun, copy_error(self.refusal))

    def end_if_called_back(self) -> None:
        self.reactor.post(lambda: self.reactor.deliver(self._leave_reactor))

    def _leave_reactor(self) -> None:
        """Settle `ended`, at the first call for which no callbacks are left. Called without the
        lock.
        """
        if self.has_left_reactor or (self.has_anything_left() and not self.reactor.is_dying):
            return
        self.has_left_reactor = True
        self.reactor.last_callbacks.append(partial(fulfill, self.ended))
        self.reactor.release()

    def explain(self, error: BaseException) -> None:
        """Add the cure to the error for a name, key or attribute that came after the snapshot."""
        left_out = self.supervisor.engine.left_out
        explain(error, self.registry.snapshot, left_out, self.config.on_death == "end")


class _StartsAnew(Dispatcher):
    """In a forked child: the dispatcher of a pool that the parent has made and never used, as a web
    server may that loads the program and then forks. `start_here` makes a new dispatcher here.
    """

    def check_open(self) -> None:
        self.start_here()
        Dispatcher.check_open(self)  # `self` may be of that class by now, so not `super`

    def start_here(self) -> None:
        with _restarting:
            if type(self) is _StartsAnew and self.refusal is None:
                # The parent may have resized it.
                env = tuple(self.environments)
                fresh = Dispatcher(self.config._replace(size=self.size, env=env), self.open_engine)
                fresh.finalizer, fresh.held = self.finalizer, self
                fresh.finishes_at_exit, fresh.maps = self.finishes_at_exit, self.maps
                # The pool, and those that `options` has made of it, hold this object, which shares
                # all state with `fresh` from here on. Threads that submit wait for `_restarting`.
                self.__dict__ = fresh.__dict__
                self.__class__ = Dispatcher  # type: ignore[assignment]
        if not self.reactor.belongs_to_parent:
            self.begun.result()


_restarting = threading.Lock()
renew_in_child(_restarting)  # the drones of the new dispatcher are forked while it is held
