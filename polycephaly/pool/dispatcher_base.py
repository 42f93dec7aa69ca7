"""The base class of the dispatcher: the state that its parts share.

    PoolState <──events── DispatcherBase <── Locality, ObjectDirectory, StallDetector,
        └────actions──────────> ^            HealthMonitor, leases.py: each has one other part of
                                │            the decisions; Supervisor, which starts the drones
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

from .._compat import remote_traceback_type
from ..errors import copy_error
from ..promises.promise import Promise, Signal, fulfill, reject, settle_promise
from ..runtime.timers import Timer
from ..wire.exceptions import describe_error, message_of
from ..wire.messages import CANCEL, PROFILE, RECALL, pack_numbers
from ..wire.output import Listener
from .assignment import Assignment, Send
from .config import PoolConfig
from .drone_handle import DroneHandle
from .interfaces import End, TaskRunner
from .limits import AskFrames, Interrupt, Kill, Look, LookAt, TimeOut
from .pool_state import (
    Action,
    Broken,
    Cancel,
    Divide,
    Fail,
    PoolState,
    Refuse,
    Restarted,
    SetTimer,
    SettleChunk,
    SettleLost,
)
from .population import Close, Recall
from .reactor import Reactor, Tenant
from .record import TraceBuffer
from .stack_requests import StackRequest, StackRequests, format_remote, frames_of
from .task import Task, fail
from .task_promise import address_of_frames, release_kept_frames

MAX_FAILED_TASKS = 1000


class DispatcherBase(TaskRunner, Tenant):
    """The state of a dispatcher, and the operations that need no part of it.

    Changed only while holding the reactor's lock, except `unsettled`, `inbound`, `refusal`,
    `output_listeners` and the state's `awaiting_inputs`, which any thread may change by one atomic
    step.
    """

    reactor: Reactor
    assignment: Assignment

    # Methods of `Dispatcher`.
    send: Callable[[Send, float], None]
    queue_inbound: Callable[[], None]
    backlog: Callable[[DroneHandle | None], int]
    schedule_health_check: Callable[[], None]

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.size = config.size  # that of `state.population`, for other threads
        self.environments = [*config.env]  # of drones, by index
        self.width = config.width
        self.describes_items = config.describe_items
        self.sends_chunks = config.max_tasks is None
        self.output = config.output
        # Receivers of tagged output in place of `output`, by tag.
        self.output_listeners: dict[str, Listener] = {}
        # The inbox, to which callers append: the loop puts the tasks into the queues.
        self.inbound: deque[Task] = deque()
        self.assignment = Assignment(config.width, config.max_tasks, config.resources)
        self.ended = End(self)
        self.state = PoolState(
            config, self.assignment, self.inbound, self.unsettled, self._carry_out
        )
        self._timer: Timer | None = None  # of `state`
        self._looks: list[Look | LookAt] = []
        self.handles: list[DroneHandle] = self.assignment.drones
        self.wants_tasks = False
        self.has_ended = False
        self.profile_lock = threading.Lock()  # held during a profile: one at a time
        self.profile_hertz = 0  # 0: no profile is being taken
        self.profiled: list[DroneHandle] = []  # the drones that were told to sample
        self.begun: Signal[None] = Signal()
        self.over: Signal[None] = Signal()
        """Settles when nothing is left but callbacks of tasks, for which `ended` waits."""
        self.record = TraceBuffer()
        self.stack_requests = StackRequests(self)
        self.made_at = time()
        self.tasks_done = self.tasks_cancelled = 0  # calls
        # With post_mortem=True: the last tasks that raised errors, whose frames may be kept.
        self.failed_tasks: deque[tuple[str, int]] = deque(maxlen=MAX_FAILED_TASKS)
        self.refusal: BaseException | None = None  # the error for new tasks

    # -- any thread --------------------------------------------------------------------------------

    def current_drones(self) -> list[DroneHandle]:
        """Return the drones that are to stay, without those that retire or will retire as soon as
        they are ready.
        """
        current: list[DroneHandle] = self.state.population.current()
        return current

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

    # Events, with their time.

    def resume(self, task: Task) -> None:
        self.state.resumed(task, self.reactor.timers.now())

    def requeue(self, tasks: list[Task]) -> None:
        self.state.returned(tasks, self.reactor.timers.now())

    def on_failed(self, task: Task, error: BaseException) -> None:
        self.state.failed(task, error, self.reactor.timers.now())

    def reject_or_retry(self, tasks: list[Task], error: BaseException, *, may_retry: bool) -> None:
        self.state.lost(tasks, error, self.reactor.timers.now(), may_retry=may_retry)

    def stop_if_retired(self, handle: DroneHandle | None) -> None:
        if handle is not None:
            self.state.population.stop_if_retired(handle, self.reactor.timers.now())

    def break_pool(self, error: BaseException) -> None:
        """Reject all tasks, refuse new ones and end the drones, because none can run any more."""
        self.state.broke(error, self.reactor.timers.now())

    def give_up_starting(self, error: BaseException) -> None:
        """Break the pool because drones cannot start."""
        self.break_pool(self.start_error(error))

    def start_error(self, error: BaseException) -> BaseException:
        """Return the error of a pool whose drones cannot start. If the pool has not begun, its
        constructor raises `error` as it is.
        """
        has_begun = self.begun.done()
        return pool_error("not all drones can be started", error) if has_begun else error

    def _on_due(self) -> None:
        self.state.due(self.reactor.timers.now())
        looks, self._looks = self._looks, []
        for look in looks:
            if isinstance(look, Look):
                self._look(look.drone)
            else:
                self._look_at(*look)

    def _carry_out(self, action: Action) -> None:
        """Do what an event leads to. Promises are settled after the lock is released."""
        deliver = self.reactor.deliver
        match action:
            case Fail(task, error):
                deliver(partial(_fail, task, error))
            case Refuse(task, make_error):
                deliver(lambda: reject(task.promise, make_error()))
                # Later: this may be in the middle of choosing tasks for that drone.
                self.post(self.stop_if_retired, task.target)
            case Cancel(task):
                deliver(task.promise.cancel)
            case Interrupt(drone, task):
                drone.send(pack_numbers(CANCEL, (task.number,)))
            case Recall(drone):
                drone.send(pack_numbers(RECALL))
            case Divide(chunk, rests):
                for each in rests:
                    self.unsettled[each] = None
                chunk.rests = [*rests, *chunk.rests]
                # Who cancels a chunk cancels it first, and then looks at `rests`.
                if chunk.promise.done():
                    for each in rests:
                        deliver(each.promise.cancel)
            case SettleChunk(chunk):
                chunk.payload = b""
                deliver(partial(settle_promise, chunk.promise, None, None))
            case Kill(drone, reason):
                drone.kill(reason)
            case AskFrames(drone, number):
                request = StackRequest(self, drone)
                drone.deadlines[number] = drone.deadlines[number][0], request
                self.stack_requests.send(request)
            case TimeOut(_, task, error, request):
                deliver(partial(_reject_with_frames, task, error, request))
            case Look() | LookAt():
                self._looks.append(action)  # for `_on_due`: the answers are events, too
            case Restarted(number=number):
                address = address_of_frames(self, number)
                if address is not None:
                    deliver(partial(release_kept_frames, address))
            case SetTimer(when):
                if self._timer is not None:
                    self.reactor.timers.cancel(self._timer)
                self._timer = self.call_at(when, self._on_due)
            case Broken(error):
                self.refusal = error
                if not self.begun.done():
                    deliver(partial(reject, self.begun, copy_error(error)))
            case SettleLost(error):
                deliver(partial(self.settle_lost, error))
            case Close(error):
                self.refusal = self.refusal or error

    def _look(self, drone: DroneHandle) -> None:
        now = self.reactor.timers.now()
        drone.receive_all()
        self.state.limits.looked(drone, drone.status_page.stands_still, now)

    def _look_at(self, drone: DroneHandle, number: int, steps_left: int) -> None:
        drone.receive_all()
        is_running, is_holder = drone.is_running(number), drone.status_page.holder == number
        now = self.reactor.timers.now()
        self.state.limits.looked_at(drone, number, steps_left, is_running, is_holder, now)

    def profile(self, handle: DroneHandle) -> None:
        """Have a drone that is up sample its tasks, if a profile is being taken."""
        if self.profile_hertz:
            self.profiled.append(handle)
            handle.request_frames(PROFILE, self.profile_hertz)

    def settle_signal(self, promise: Promise[None]) -> None:
        if not promise.done():
            self.reactor.deliver(partial(fulfill, promise))


def _reject_with_frames(task: Task, error: BaseException, request: StackRequest | None) -> None:
    """Reject `task`, after the lock is released: reading source files takes time."""
    frames = None if request is None else frames_of(request, task.number)
    if frames:
        error.__cause__ = remote_traceback_type()(format_remote(frames, error))
    fail(task, error)


def _fail(task: Task, error: BaseException) -> None:
    fail(task, error)
    task.release_inputs()


def pool_error(event: str, cause: BaseException) -> BrokenProcessPool:
    reason = filter(None, (event, type(cause).__name__, message_of(cause)))
    error = BrokenProcessPool(": ".join(reason))
    error.__cause__ = cause
    return error
