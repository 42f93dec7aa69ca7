"""The base class of the dispatcher: the state that its parts share.

    DispatcherBase <── Cancellation, Locality, ObjectDirectory, StallDetector, Supervisor,
          ^            HealthMonitor, leases.py: each has one part of the decisions
          └─────────── Dispatcher, which makes them and joins them

The parts stand in modules of their own and do not know `Dispatcher`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from time import time

from ..errors import copy_error
from ..promises.promise import Promise, Signal, fulfill, reject
from ..runtime.timers import Timer
from ..wire.exceptions import describe_error, message_of
from ..wire.messages import PROFILE
from ..wire.output import Listener
from .assignment import Assignment, Send
from .config import PoolConfig
from .drone_handle import DroneHandle
from .interfaces import End, State, TaskRunner
from .reactor import Reactor, Tenant
from .record import TraceBuffer
from .stack_requests import StackRequests
from .task import Task, fail
from .task_state import DELAYED, ENDING

MAX_FAILED_TASKS = 1000


class DispatcherBase(TaskRunner, Tenant):
    """The state of a dispatcher, and the operations that need no part of it.

    Changed only while holding the reactor's lock, except `unsettled`, `inbound`, `awaiting_inputs`,
    `refusal`, `output_listeners` and `needs_dispatch`, which any thread may change by one atomic
    step.
    """

    reactor: Reactor
    assignment: Assignment

    # Methods of `Dispatcher`.
    send: Callable[[Send, float], None]
    requeue: Callable[[list[Task]], None]
    insert: Callable[..., None]
    queue_inbound: Callable[[], None]
    backlog: Callable[[DroneHandle | None], int]
    resume: Callable[[Task], None]
    stop_if_retired: Callable[[DroneHandle | None], None]
    schedule_health_check: Callable[[], None]
    target_size: Callable[[], int]
    break_pool: Callable[[BaseException], None]
    give_up_starting: Callable[[BaseException], None]

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.size = config.size  # how many drones there should be while the pool is open
        self.environments = [*config.env]  # of drones, by index
        self.width = config.width
        self.describes_items = config.describe_items
        self.sends_slices = config.max_tasks is None
        self.output = config.output
        # Receivers of tagged output in place of `output`, by tag.
        self.output_listeners: dict[str, Listener] = {}
        # The inbox, to which callers append: the loop puts the tasks into the queues.
        self.inbound: deque[Task] = deque()
        self.assignment = Assignment(config.width, config.max_tasks, config.resources)
        # Tasks that wait for promises among their arguments.
        self.awaiting_inputs: set[Task] = set()
        # Tasks that wait for kept values or another attempt, or are leased to another process. They
        # may be in `awaiting_inputs` too, until `on_inputs_ready` returns.
        self.parked: set[Task] = set()
        self.delayed: dict[Task, Timer] = {}  # those of `parked` that run again after a delay
        self.handles: list[DroneHandle] = self.assignment.drones
        # The first: a drone is idle, so a thread that adds a task wakes the reactor.
        self.wants_tasks = self.needs_dispatch = False
        self.has_ended = False
        self.closing = False
        self.has_cancelled = False  # tasks that no drone has begun were cancelled at the end
        self.abandoned = False  # all drones are being killed
        self.profile_lock = threading.Lock()  # held during a profile: one at a time
        self.profile_hertz = 0  # 0: no profile is being taken
        self.profiled: list[DroneHandle] = []  # the drones that were told to sample
        self.begun: Signal[None] = Signal()
        self.over: Signal[None] = Signal()
        """Settles when nothing is left but callbacks of tasks, for which `ended` waits."""
        self.ended = End(self)
        self.record = TraceBuffer()
        self.stack_requests = StackRequests(self)
        self.made_at = time()
        self.tasks_done = self.tasks_cancelled = 0  # calls
        # With post_mortem=True: the last tasks that raised errors, whose frames may be kept.
        self.failed_tasks: deque[tuple[str, int]] = deque(maxlen=MAX_FAILED_TASKS)
        self.refusal: BaseException | None = None  # the error for new tasks
        self.broken: BaseException | None = None  # why no drone can run any task

    # -- any thread --------------------------------------------------------------------------------

    def current_drones(self) -> list[DroneHandle]:
        """Return the drones that are to stay, without those that retire or will retire as soon as
        they are ready.
        """
        return [
            handle
            for handle in list(self.handles)
            if handle.state < State.RETIRING and not handle.retire_when_ready
        ]

    def reject_unsettled(self) -> None:
        """Reject all tasks, after the end. Not called while holding the reactor's lock, because
        callbacks run.
        """
        assert self.refusal is not None  # set before the end
        for task in [*self.unsettled]:
            if task not in self.openings_left:  # else the opener has its answer
                reject(task.promise, copy_error(self.refusal))
                task.release_inputs()
                self.unsettled.pop(task, None)

    def note_failure(
        self,
        task: str,
        item: int | None,
        drone: str | None,
        error: BaseException,
        number: int | None = None,
    ) -> None:
        self.record.add_failure(task, item, drone, describe_error(error))
        if number is not None and self.config.post_mortem:
            self.failed_tasks.append((task, number))

    # -- holding the reactor's lock ----------------------------------------------------------------

    def unqueued_tasks(self) -> list[Task]:
        # In this order, because any thread may move a task from the first to the second.
        return [*self.awaiting_inputs, *self.inbound, *self.parked]

    def reject_later(self, task: Task, make_error: Callable[[], BaseException]) -> None:
        """Reject `task` after the lock is released, where `make_error` may run code of users."""
        self.assignment.leave_queue(task)
        task.payload = b""
        self.reactor.deliver(lambda: reject(task.promise, make_error()))
        self.post(self.stop_if_retired, task.target)

    def release_preferred(self, handle: DroneHandle) -> None:
        """Requeue the tasks that prefer `handle`, which takes no more. The drone ends if these were
        all that it had.
        """
        for task in self.assignment.take_preferring(handle):
            task.preferred_drone = None
            self.resume(task)
        self.stop_if_retired(handle)

    def reject_or_retry(self, tasks: list[Task], error: BaseException, *, may_retry: bool) -> None:
        """Queue the tasks again that may be retried; reject the others with copies of `error`.

        A task may be retried if `may_retry` is true, the task has `retries` left and no target
        drone, and the pool's tasks were not cancelled. A task with a `Retry` is queued after a
        delay.
        """
        retried = []
        for task in tasks:
            if task.promise.done():
                task.payload = b""
            elif may_retry and task.retry is not None:
                self.on_failed(task, copy_error(task.overrun or error))
            elif (
                may_retry
                and task.retries > 0
                and task.target is None
                and not (self.abandoned or self.has_cancelled)
            ):
                task.retries -= 1
                task.sending = task.lost_call = None
                retried.append(task)
            else:
                task.payload = b""
                self.reactor.deliver(partial(fail, task, copy_error(error)))
        self.requeue(retried)

    def on_failed(self, task: Task, error: BaseException) -> None:
        """Run a task that has a `Retry` again after a delay, or reject the task with `error`."""
        target_died = task.target is not None and task.target.state is State.DEAD
        is_over = task.promise.done() or self.abandoned or self.has_cancelled or target_died
        delay = None if is_over else task.next_delay(error)
        if delay is None:
            task.payload, task.recompute_payload = b"", None
            self.parked.discard(task)
            self.reactor.deliver(partial(fail, task, task.with_attempts(error)))
            self.stop_if_retired(task.target)
        else:
            task.start_over()
            task.state = DELAYED
            self.parked.add(task)
            self.delayed[task] = self.call_later(delay, self.resume, task)

    def _cancel_delay(self, task: Task) -> None:
        timer = self.delayed.pop(task, None)
        if timer is not None:
            self.reactor.timers.cancel(timer)

    def take_delayed(self, handle: DroneHandle) -> list[Task]:
        """Take the tasks that wait for another attempt on `handle`, which has died."""
        taken = [task for task in self.delayed if task.target is handle]
        for task in taken:
            self._cancel_delay(task)
            task.state = ENDING
        self.parked.difference_update(taken)
        return taken

    def profile(self, handle: DroneHandle) -> None:
        """Have a drone that is up sample its tasks, if a profile is being taken."""
        if self.profile_hertz:
            self.profiled.append(handle)
            handle.request_frames(PROFILE, self.profile_hertz)

    def settle_signal(self, promise: Promise[None]) -> None:
        if not promise.done():
            self.reactor.deliver(partial(fulfill, promise))


def pool_error(event: str, cause: BaseException) -> BrokenProcessPool:
    reason = filter(None, (event, type(cause).__name__, message_of(cause)))
    error = BrokenProcessPool(": ".join(reason))
    error.__cause__ = cause
    return error
