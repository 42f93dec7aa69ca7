"""The dispatcher: the task queue of one `Pool` or `Drone`, and the drones that serve the queue.

    submit (any thread) ──> queue ──dispatch──> handle.in_flight ──RESULTS──> promise
                              ^                     │ recalled, or the drone died before it began
                              └─────────────────────┘

A task with a `target` waits in that drone's `dedicated` queue. All other tasks wait in `queue`. A
drone receives up to `tuning.batch_seconds` of known short tasks at once, but only one task at a
time if the task is long or its length is not known yet. If a drone turns out to be busy with tasks
behind the running one while another drone is idle, the tasks that have not begun are recalled.

The supervisor (supervisor.py) decides which drones exist, and starts and ends them.

At any moment a task is in one place: in a queue, or in flight at one drone. See
docs/decisions/0003-each-task-is-in-one-place.md for the consequences, and for the race between
`submit` and the end of the dispatcher."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import Lost, another
from ..promises.combining import race
from ..promises.promise import CANCELLED, FINISHED, PENDING, Promise, Signal
from ..runtime.deferred_sigint import DeferredSigint
from ..runtime.reactor import Reactor, lease_reactor
from ..runtime.tuning import tuning
from ..store.directory import ObjectDirectory
from ..store.placeholders import PayloadWithRefs
from ..store.references import Serialized
from ..timeline.record import TraceBuffer
from ..wire.functions import FunctionRegistry
from ..wire.messages import CANCEL, FETCH, RECALL, TaskBatch, pack_numbers
from ..wire.output import Listener
from ..wire.pickling import main_namespace
from ..wire.slices import FAILED, RUNNING, SMALL
from .backpressure import BackPressure
from .cancellation import Cancellation
from .config import PoolConfig, TaskOptions
from .drone_handle import DroneHandle, State, drained
from .health import HealthMonitor
from .leases import Leases
from .locality import Locality
from .stall_detection import StallDetector
from .supervisor import Supervisor, because
from .task import Slice, Task

__all__ = ["Dispatcher"]

log = logging.getLogger(__name__)

# Seconds between two looks at whether a malformed message has replaced an answer.
DOUBT = 0.25
_BATCH = 2048
# A mask: once in so many calls, a thread that submits many tasks serves the drones.
CATCH_UP = 1024 - 1


class Dispatcher:
    """The queue and the drones of one pool. The constructor takes the snapshot of this process, in
    the calling thread, and raises the errors of `Supervisor`."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.output = config.output
        # Receivers of tagged output in place of `output`, by tag.
        self.output_listeners: dict[str, Listener] = {}
        self.task_options = config.task_options
        self._own_terms = config.task_options if config.task_options != (None, 0) else None
        self.queue: deque[Task] = deque()
        self._backlog = _Backlog(self)
        self.hungry = False  # a drone is idle: a thread that adds a task calls `see_to`
        self.dedicated_waiting = False
        self.over = False
        self.closing = False
        self.look_for_end = False
        self.has_promised_to_finish = False  # to run all its tasks before the interpreter ends
        self.finalizer: weakref.finalize[..., Any] | None = None  # of the `Pool` or `Drone`
        self.bond: object = None  # ends this with its owner, which refers to the bond only weakly
        self.begun: Signal[None] = Signal()
        self.ended: Signal[None] = Signal()
        self.directory = ObjectDirectory(self)
        self.locality = Locality(self)
        self.cancellation = Cancellation(self)
        self.leases = Leases(self)
        self.stall_detector = StallDetector(self)
        self.backpressure: BackPressure | None = None  # None if queues have no limit
        # If true, `submit` has more to check at each call.
        self.careful = self._own_terms is not None or config.max_queued is not None
        self.record = TraceBuffer()
        # Tasks that wait for promises among their arguments. Any thread adds and removes them.
        self.waiting: set[Task] = set()
        # Tasks that wait for kept values, or that another process has leased. Changed only while
        # holding the reactor's lock.
        self.held: set[Task] = set()
        self._refusal: BaseException | None = None
        self._broken: BaseException | None = None
        self._abandoned = False
        self.watch = HealthMonitor(self)
        config.machine.check(config.size)
        try:
            # Otherwise a Ctrl-C could leave a zygote that no object refers to.
            with DeferredSigint():
                self.reactor: Reactor = lease_reactor()
                try:
                    if config.max_queued is not None:
                        self.backpressure = BackPressure(self.reactor, config.max_queued)
                    self.supervisor = Supervisor(self)
                except BaseException:
                    self.reactor.give_back()
                    raise
                self.reactor.post(self._begin)
        except KeyboardInterrupt:  # deferred until now
            if hasattr(self, "supervisor"):
                self.kill()
            raise

    @property
    def refusal(self) -> BaseException | None:
        """The error for new tasks, or None while tasks are accepted."""
        return self._refusal

    @refusal.setter
    def refusal(self, why: BaseException) -> None:
        self._refusal = why
        self.careful = True

    @property
    def handles(self) -> list[DroneHandle]:
        return self.supervisor.handles

    @property
    def registry(self) -> FunctionRegistry:
        return self.supervisor.registry

    # -- any thread --------------------------------------------------------------------------------

    def submit(
        self,
        what: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: DroneHandle | None = None,
        task_options: TaskOptions | None = None,
        task: Task | None = None,
    ) -> Task:
        """Queue a call of `what` and return its task, which is `task` if given.

        Raises `RuntimeError` if the pool is closed, `BrokenProcessPool` if it is broken."""
        if self.careful:
            self._wait_for_room(target)
            self.check_open()
            task_options = task_options or self._own_terms
        if target is not None and (target.state >= State.RETIRING or target.retires):
            raise target.closed_error()
        if task is None:
            task = Task(self)
        if task_options is not None:
            task.timeout, task.retries = task_options
        inputs: Sequence[Promise[Any]] = ()
        try:
            registry = self.supervisor.registry
            definition = registry.define(what)
            for arg in args:
                if type(arg) not in SMALL:
                    inputs = task.capture(definition, args, kwargs, registry)
                    break
            else:
                if kwargs:
                    inputs = task.capture(definition, args, kwargs, registry)
                else:  # the same as `capture`, without the call
                    task.definition, task.args = definition, args
            if definition.captures:
                task.take_captured()
        except Exception as error:
            task._settle(FINISHED, None, error)
            return task
        try:
            # The same as `_enqueue`, without the call.
            if target is None and task.args is not None and not inputs:
                self.queue.append(task)
                if self.hungry:
                    self.reactor.serve(self)
                elif not task.number & CATCH_UP:
                    self.reactor.catch_up()
                if self.over:
                    self.reject_all(self.queue)
            else:
                if target is not None:
                    task.target = target
                if inputs:
                    self.waiting.add(task)
                    task.wait_for(inputs)
                    if self.over:
                        self._reject_waiting()
                else:
                    self._enqueue(task)
        except BaseException:  # Ctrl-C: the caller will not get the promise
            task.cancel()
            raise
        return task

    def _wait_for_room(self, target: DroneHandle | None) -> None:
        if self.backpressure is not None:
            self.backpressure.wait(
                self._backlog if target is None else target.dedicated,
                lambda: self.refusal is not None,
            )

    def close_without(self, holder: object) -> None:
        """Close when no reference to `holder` is left."""
        self.finalizer = weakref.finalize(holder, self.close)
        self.finalizer.atexit = False

    def start(self, task: Task) -> None:
        """Queue a task that was made elsewhere. Raises the same errors as `submit`."""
        self._wait_for_room(None)
        self.check_open()
        self._enqueue(task)

    def has_room(self) -> bool:
        return self.backpressure is None or self.backpressure.has(self._backlog)

    def check_open(self) -> None:
        if self.refusal is not None:
            raise another(self.refusal)

    def _enqueue(self, task: Task) -> None:
        target = task.target
        if target is not None:
            self._pin(task, target)
            return
        # Read once: if the task is cancelled, another thread may clear the payload.
        payload = task.payload
        if type(payload) is PayloadWithRefs:
            task.prefers, task.burden = self.directory.home(payload.remote_objects.values())
        if task.prefers is not None and task.prefers.state < State.RETIRING:
            self.locality.add(task, task.prefers)
            return
        self.queue.append(task)
        self.see_to(task)
        if self.over:
            self.reject_all(self.queue)

    def see_to(self, task: Task) -> None:
        """Wake an idle drone for the queued `task`."""
        if self.hungry:
            self.reactor.serve(self)
        elif not task.number & CATCH_UP:
            self.reactor.catch_up()

    def _pin(self, task: Task, target: DroneHandle) -> None:
        target.dedicated.append(task)
        self.dedicated_waiting = True
        self.reactor.wake()
        # The queue was emptied when the drone died, perhaps before the append above.
        if target.state is State.DEAD:
            self.reject_all(target.dedicated, target.closed_error())

    def filled(self, task: Task) -> None:
        """Queue `task`, whose inputs are all there, unless the task is settled."""
        if task._state == PENDING:
            self._enqueue(task)
        self.waiting.discard(task)
        if self.closing:
            self.reactor.post(self._ask_for_end)
        if task.target is not None and task.target.state is State.RETIRING:
            self.reactor.post(partial(self.supervisor.stop_if_retired, task.target))

    def close(self, *, cancel: bool = False, running: bool = False) -> None:
        """Accept no more tasks, and end when all accepted tasks are done.

        Takes no lock, so finalizers may call it."""
        if self.refusal is None:
            self.refusal = RuntimeError(
                f"cannot schedule new futures after shutdown of {self.config.name}"
            )
        self.reactor.post(partial(self._close, cancel, running))

    def kill(self, why: str = "") -> None:
        """End now, together with the running tasks, whose errors name `why`. Takes no lock."""
        if self.refusal is None:
            self.refusal = RuntimeError(
                f"{self.config.name} was released{why and ', because '}{why}"
            )
        self.reactor.post(partial(self.abandon, why))

    def refresh(self) -> None:
        """Replace the drones by new ones from a new snapshot, for all tasks not yet sent."""
        self.check_open()
        renewed: Promise[None] = Promise()
        with DeferredSigint():
            snapshot = self.supervisor.engine.snapshot()
            self.reactor.post(partial(self.supervisor.renew, snapshot, renewed))
        race(renewed, self.ended).result()
        if not renewed.done():  # the pool was closed in the meantime
            self.supervisor.engine.discard(snapshot)
            raise another(self.refusal or RuntimeError(f"{self.config.name} has ended"))

    def wait_ended(self) -> None:
        """Wait until the drones have ended, and the reactor if this was its last pool."""
        if self.reactor.left_behind:
            return
        self.ended.result()
        if self.reactor.gone:
            self.reactor.thread.join()

    def finish(self, *, cancel: bool = False) -> None:
        """Close, and wait for the end.

        A Ctrl-C meanwhile, or another exception of a signal handler, cancels all tasks, which takes
        at most `tuning.grace_seconds`. A second one kills the drones."""
        self.close(cancel=cancel, running=cancel)
        try:
            self.wait_ended()
        except Exception:  # this thread cannot wait: it runs a callback, for example
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
        the drones."""
        self.close(cancel=cancel, running=cancel)
        try:
            if not self.reactor.left_behind:
                await self.ended
        except BaseException:
            if cancel:
                self.kill()
                await self.ended
            else:
                await self.finish_async(cancel=True)
            raise
        self.wait_ended()

    def pending(self) -> int:
        of_links = sum(
            len(each.in_flight) + len(each.dedicated) + len(each.preferred) for each in self.handles
        )
        return len(self.queue) + len(self.waiting) + len(self.held) + of_links

    def somebody_waits(self, task: Task) -> None:
        """Note that a thread waits for `task`, which itself waits for promises."""
        self.stall_detector.look_soon()

    # -- holding the reactor's lock: sending -------------------------------------------------------

    def _begin(self) -> None:
        self.reactor.dispatchers.append(self)
        self.supervisor.begin()

    def dispatch(self, now: float) -> None:
        if self.dedicated_waiting:
            self.dedicated_waiting = False
            for handle in self.handles:
                if handle.dedicated and handle.takes(dedicated=True):
                    self.send(handle, handle.dedicated, len(handle.dedicated), now)
                if handle.preferred and handle.takes():
                    self.send(handle, handle.preferred, len(handle.preferred), now)
            if self.locality:
                self.locality.look()
        queue = self.queue
        if len(queue) == 1:
            for handle in self.handles:
                if not handle.in_flight and handle.takes():
                    self.send(handle, queue, 1, now)
                    return
        while queue:
            roomy = [handle for handle in self.handles if handle.takes()]
            if not roomy:
                return
            roomy.sort(key=_load)
            share = -(-len(queue) // len(roomy))
            if not sum(self.send(handle, queue, share, now) for handle in roomy):
                return

    def send(self, handle: DroneHandle, queue: deque[Task], share: int, now: float) -> int:
        """Send at most `share` tasks from the head of `queue`, and return how many."""
        most = min(share, _BATCH, handle.tasks_left(self.config.max_tasks))
        batch, frames = handle.load_batch(queue, most, now)
        if batch:
            handle.send(frames, batch)
            self.watch.begin()
            if handle.overlapping or batch[0].timeout is not None:
                self.cancellation.sent(handle, batch, now)
        return len(batch)

    def after_turn(self) -> None:
        """Note whether more tasks could be sent at once, and move tasks that wait behind a busy
        drone. Called at the end of each critical section."""
        if self.look_for_end:
            self._end_if_done()
        if self.backpressure:
            self.backpressure.tell(self.refusal is not None)
        idle = False
        for handle in self.handles:
            if handle.state is State.READY and not handle.in_flight and not handle.unresponsive:
                idle = True
                break
        self.hungry = idle or (self.config.width > 1 and self._could_overlap())
        if idle and not self.queue:
            if self.locality:
                self.locality.share(self.reactor.timers.now())
            for handle in self.handles:
                if (
                    len(handle.in_flight) - handle.overlapping > 1
                    and not handle.recalled
                    and handle.state is State.READY
                ):
                    handle.recalled = True
                    self.reactor.after(
                        2 * tuning.batch_seconds,
                        partial(self._recall_if_stuck, handle, handle.last_heard),
                    )

    def _could_overlap(self) -> bool:
        """Return whether a drone could take one more task beside those that it overlaps. False if
        the head of the queue does not overlap, because no task overtakes that one."""
        with suppress(IndexError):
            if not self.queue[0].definition.overlaps:
                return False
        most = self.config.max_tasks
        return any(
            handle.overlapping and handle.takes() and handle.tasks_left(most) > 0
            for handle in self.handles
        )

    def _recall_if_stuck(self, handle: DroneHandle, last_heard: float) -> None:
        handle.recalled = False
        if (
            handle.state is State.READY
            and len(handle.in_flight) > 1
            and handle.last_heard == last_heard
            and not self.queue
        ):
            handle.recalled = True  # until the drone answers
            handle.send(pack_numbers(RECALL))

    def returned(self, handle: DroneHandle, given_back: tuple[int, ...]) -> None:
        handle.recalled = False
        tasks = [task for number in given_back if (task := handle.answered(number)) is not None]
        self.requeue(tasks)
        self.answered(handle)

    def split(self, handle: DroneHandle, task: Slice, done: int, rest: int, state: int) -> None:
        """Handle a drone's answer for the first `done` calls of a slice. The drone has not begun
        the last `rest` calls, and gives them back."""
        if state != RUNNING and (not rest or state == FAILED):
            handle.answered(task.number)
            return
        current, later = task.split(done, rest)
        followers = []
        if state == RUNNING:
            handle.hand_over(task, current)
            # Otherwise the last call had just ended: no thread waits for the report of that.
            if current.count:
                followers.append(current)
        else:
            handle.answered(task.number)
        if rest:
            if task.done():  # cancelled: the rest does not begin
                later._settle(CANCELLED, None, None)
            else:
                self.requeue([later])
            followers.append(later)
        task.followers = followers
        # If cancelled, the canceller may have read `followers` before the line above.
        if task.done():
            for each in followers:
                self.reactor.deliver(each.cancel)

    def requeue(self, tasks: list[Task]) -> None:
        """Put `tasks` back at the heads of their queues, in the same order."""
        if self._abandoned:  # no drone will take them
            for task in tasks:
                self.reactor.deliver(task.cancel)
            return
        for task in reversed(tasks):
            task.sending = None
            if task.done():  # by a thread that may have taken the task for begun
                task.never_began()
            if task.target is not None:
                task.target.dedicated.appendleft(task)
                self.dedicated_waiting = True
            elif task.prefers is not None and task.prefers.state < State.RETIRING:
                self.locality.put_back(task, task.prefers)
            else:
                self.queue.appendleft(task)

    def answered(self, handle: DroneHandle) -> None:
        """Update `handle` after an answer to one of its tasks in flight."""
        if handle.dedicated or self.locality:
            self.dedicated_waiting = True
        if (
            handle.state is State.READY
            and handle.tasks_left(self.config.max_tasks) <= 0
            and len(handle.in_flight) <= 1
        ):
            # Not with more in flight: retiring would recall tasks that the drone may still run.
            self.supervisor.retire(handle)
        self.supervisor.stop_if_retired(handle)
        self.look_for_end = True

    # -- holding the reactor's lock: tasks that take kept values -----------------------------------

    def hold(self, task: Task) -> None:
        """Park `task` until `go_on(task)`, because a kept value is not available yet, or another
        process has leased the task. (The task may be in `waiting` too, until `filled` returns.)"""
        self.held.add(task)

    def waits_for(self, handle: DroneHandle) -> bool:
        """Return whether a task that only `handle` may run waits for promises or kept values."""
        return any(task.target is handle and not task.done() for task in self._not_queued())

    def _not_queued(self) -> list[Task]:
        return [*self.waiting, *self.held]

    def go_on(self, task: Task) -> None:
        self.held.discard(task)
        if task.done():
            self._nothing_waits(task.target)
        elif self._abandoned:
            self.reactor.deliver(task.cancel)
        elif task.target is not None and task.target.state is State.DEAD:
            self.reject(task, task.target.closed_error)
        else:
            self._enqueue(task)

    def reject(self, task: Task, why: Callable[[], BaseException]) -> None:
        task.payload = b""
        self.reactor.deliver(lambda: task._settle(FINISHED, None, why()))
        self.reactor.post(partial(self._nothing_waits, task.target))

    def _nothing_waits(self, target: DroneHandle | None) -> None:
        """End `target`, or the dispatcher, if the last task has gone."""
        self.look_for_end = True
        if target is not None:
            self.supervisor.stop_if_retired(target)

    def fill_again(self, tasks: list[Task], lost: Lost) -> None:
        """Handle the loss of a value that one of `tasks`, sent but not begun, depends on.

        Values stored on other nodes are computed again. If no task takes such a value, the lost
        bytes are buffers of the arguments themselves, and the tasks with such buffers fail."""
        far = [task for task in tasks if task.unfilled is not None]
        losers = (
            [] if far else [task for task in tasks if isinstance(task.payload, Serialized)] or tasks
        )
        self.lose(losers, lost, again=False)
        self.requeue(
            [task for task in tasks if task not in far and task not in losers and not task.done()]
        )
        for task in far:
            if not task.done():
                self.waiting.add(task)
                try:
                    task.fill_again(lost)
                except BaseException as error:
                    self.waiting.discard(task)
                    self.reactor.deliver(partial(task._settle, FINISHED, None, another(error)))
        self.look_for_end = True

    def fetch_from(self, handle: DroneHandle, number: int) -> None:
        """Request that `handle` pickles a value that it keeps."""
        message = TaskBatch()
        message.add(number, FETCH, 0, b"")
        handle.send(message.frames())

    # -- holding the reactor's lock: stopping running tasks ----------------------------------------

    def withdraw(self, task: Task) -> None:
        """Stop `task`, whose promise was cancelled. A queued task is skipped; for a task in flight,
        the drone receives CANCEL."""
        self.waiting.discard(task)
        self.held.discard(task)
        handle, target = task.handle, task.target
        if handle is not None and task.number in handle.in_flight and handle.alive:
            self.cancellation.interrupt(handle, task)
        else:
            task.payload = b""
            self._nothing_waits(target)
            if self.backpressure is not None:  # a cancelled task must not take up room
                preferred = [each.preferred for each in self.handles]
                for queue in [self.queue, *preferred] if target is None else [target.dedicated]:
                    with suppress(ValueError):
                        queue.remove(task)

    def interrupt(self, handle: DroneHandle) -> None:
        """Interrupt the task that `handle` runs."""
        if handle.alive:
            handle.send(pack_numbers(CANCEL, (0,)))

    # -- holding the reactor's lock: failures ------------------------------------------------------

    def lose(self, tasks: list[Task], error: BaseException, *, again: bool) -> None:
        retried = []
        for task in tasks:
            if task.done():
                task.never_began()
            elif again and task.retries > 0 and task.target is None and not self._abandoned:
                task.retries -= 1
                task.sending = None
                retried.append(task)
            else:
                task.payload = b""
                self.reactor.deliver(partial(task._settle, FINISHED, None, another(error)))
        self.queue.extendleft(reversed(retried))

    def doubt(self, handle: DroneHandle) -> None:
        """Watch a drone that has sent a malformed message. If that was an answer, its task would
        never be settled."""
        if not handle.doubted and handle.alive:
            handle.doubted = True
            self.reactor.after(DOUBT, partial(self._kill_if_it_owes, handle, 0))

    def _kill_if_it_owes(self, handle: DroneHandle, suspect: int) -> None:
        """Kill the drone if the first task in flight will never be answered.

        `suspect` is the first task in flight, if the drone seemed to have answered or skipped that
        task at the last look. If so again, the answer never comes. On a busy machine the drone may
        only not have got to the task yet; then the drone is runnable."""
        if not handle.in_flight or not handle.alive:
            handle.doubted = False
            return
        head = next(iter(handle.in_flight))
        started = handle.started()
        is_over = handle.sent() == head or (
            started != head and (started in handle.in_flight or handle.waits())
        )
        if handle.overlapping or not is_over:
            head = 0
        if head and head == suspect:
            handle.kill("it has sent what is no message, and owes an answer")
        else:
            self.reactor.after(DOUBT, partial(self._kill_if_it_owes, handle, head))

    def fail(self, error: Exception) -> None:
        """Break the pool after a bug in polycephaly, so that no caller waits for ever."""
        log.error("a bug in polycephaly breaks %s", self.config.name, exc_info=error)
        self.break_(because("a bug in polycephaly", error))

    def break_(self, error: BaseException) -> None:
        """Reject all tasks, refuse new ones and end the drones, because none can run any more."""
        if self._broken is not None:
            return
        self._broken = error
        self.refusal = error
        if not self.begun.done():
            self.reactor.deliver(partial(self.begun._settle, FINISHED, None, another(error)))
        for handle in self.handles:
            self.lose(list(handle.in_flight.values()), error, again=False)
            self.lose(drained(handle.dedicated), error, again=False)
        self.lose(self.locality.drained(), error, again=False)
        self.lose(drained(self.queue), error, again=False)
        self.abandon()

    def cannot_start(self, error: BaseException) -> None:
        """Break the pool because no drone can start. If the pool has not begun, its constructor
        raises `error` as it is."""
        self.break_(because("no drone can be started", error) if self.begun.done() else error)

    # -- holding the reactor's lock: ending --------------------------------------------------------

    def wanted(self) -> int:
        """Return how many drones there should be."""
        return (
            0 if self._abandoned or (self.closing and not self._unfinished()) else self.config.size
        )

    def _close(self, cancel: bool, running: bool) -> None:
        # A Ctrl-C in `_pin` may have left a dedicated task without this flag.
        self.closing = self.dedicated_waiting = True
        if cancel:
            for task in [*self.queue, *self._not_queued()]:
                self.reactor.deliver(task.cancel)
            for handle in self.handles:
                for task in [*handle.dedicated, *handle.preferred]:
                    self.reactor.deliver(task.cancel)
                # Backwards: if the running task was first, the drone would begin the next one.
                for task in reversed(handle.in_flight.values()):
                    if running or not handle.runs(task.number):
                        self.reactor.deliver(task.cancel)
        self.look_for_end = True

    def cancel_own(self, handle: DroneHandle) -> None:
        """Cancel the tasks that only `handle` may run."""
        for task in [*handle.dedicated, *self._not_queued(), *reversed(handle.in_flight.values())]:
            if task.target is handle:
                self.reactor.deliver(task.cancel)

    def _unfinished(self) -> bool:
        # If a thread had checked `refusal` before, the task that it adds is rejected at the end.
        if self._abandoned:
            return False
        # Checked first, because a task that has left these sets is in a queue by then.
        if self.waiting or self.held:
            return True
        with suppress(IndexError):
            while self.queue[0].done():  # cancelled while it was queued
                self.queue.popleft()
            return True
        return any(handle.in_flight or handle.owes() for handle in self.handles)

    def _ask_for_end(self) -> None:
        self.look_for_end = True

    def _end_if_done(self) -> None:
        """End the drones, and then this dispatcher, if all tasks are done. Called once in a
        critical section, however many events in that could have been the last."""
        self.look_for_end = False
        if not self.closing or self._unfinished():
            if self.closing and self.waiting:
                self.stall_detector.look_later()
            return
        for handle in list(self.handles):
            if handle.state is State.READY:
                self.supervisor.stop(handle)
            elif handle.state < State.READY:
                self.supervisor.retire(handle)
            else:  # the task that the drone waited for may have been cancelled
                self.supervisor.stop_if_retired(handle)
        if not self.handles and not self.over:
            self._end()

    def abandon(self, why: str = "") -> None:
        """Kill every drone now; their tasks are lost, with errors that name `why`."""
        self.closing = self._abandoned = True
        for task in [*self.queue, *self._not_queued()]:
            self.reactor.deliver(task.cancel)
        self.waiting.clear()
        self.held.clear()
        self.supervisor.kill_all(why)
        self.look_for_end = True

    def _end(self) -> None:
        self.over = True
        self.refusal = self.refusal or RuntimeError(f"{self.config.name} has ended")
        self.supervisor.end()
        self.directory.close()
        self.reactor.dispatchers.remove(self)
        self.reactor.deliver(self._finish)

    def _finish(self) -> None:
        if self.finalizer is not None:
            self.finalizer.detach()
        self.reject_all(self.queue)
        self._reject_waiting()
        self.reactor.ending.append(self.ended)
        self.reactor.give_back()

    def reject_all(self, queue: deque[Task], error: BaseException | None = None) -> None:
        """Reject all tasks in `queue`, each by the thread that pops it. Not called while holding
        the reactor's lock, because callbacks run."""
        error = error or self.refusal
        with suppress(IndexError):
            while True:
                queue.popleft()._settle(FINISHED, None, error and another(error))

    def _reject_waiting(self) -> None:
        """Reject the tasks that were added to `waiting` after `abandon` had cleared it."""
        for task in [*self.waiting]:
            task._settle(FINISHED, None, self.refusal and another(self.refusal))
            task.let_go()
            self.waiting.discard(task)

    def tell(self, promise: Promise[None]) -> None:
        if not promise.done():
            self.reactor.deliver(partial(promise._settle, FINISHED, None, None))

    def explain(self, error: BaseException) -> None:
        """Add the remedy to a `NameError` for a name that was defined after the snapshot."""
        if isinstance(error, UnboundLocalError) or not isinstance(error, NameError):
            return
        name = error.name
        if name and name in main_namespace() and not self.registry.snapshot.has(name):
            left_out = self.supervisor.engine.left_out(name)
            if left_out:
                error.args = (
                    f"{error.args[0] if error.args else name}: the drones have it not, as {left_out}",
                )
                return
            lone = self.config.on_death == "end"
            cure = (
                "start a new Drone (in a pool: pool.refresh())"
                if lone
                else "pool.refresh() takes a new one"
            )
            error.args = (
                f"{error.args[0] if error.args else name}: the main image defined it after the snapshot "
                f"from which this drone was started; {cure}, or push it",
            )


class _Backlog:
    """The tasks that any drone may run."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def __len__(self) -> int:
        dispatcher = self._dispatcher
        return len(dispatcher.queue) + len(dispatcher.locality)


def _load(handle: DroneHandle) -> float:
    """The sort key for drones that take tasks: idle drones come first."""
    return handle.load if handle.in_flight else -1.0
