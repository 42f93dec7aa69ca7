"""The drone handle: the record that the dispatcher keeps of one drone.

    STARTING ──HELLO──> PREPARING (initializer) ──> READY ──> RETIRING (no new tasks) ──> STOPPING
                                                          any state ──exited──> DEAD

A handle holds the tasks that were sent, an estimate of their time, and the state of the drone. Only
threads that hold the reactor's lock change a handle, but any thread may read `pid`, `state`,
`exitcode` and `in_flight`. Each engine has a subclass, which sends messages to the drone and
observes its process: see engine.py.
"""

from __future__ import annotations

import itertools
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, takewhile
from math import inf
from pickle import dumps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..errors import copy_error
from ..memory.references import Received, RefTable, Serialized
from ..promises.promise import PENDING, Signal
from ..runtime.tuning import tuning
from ..wire.functions import KnownFunctions
from ..wire.messages import (
    DEFINES,
    DROP,
    FORGET,
    FRESH,
    KEEP,
    RELEASE_RANGE,
    SHARED,
    STORE,
    TaskBatch,
    pack_numbers,
    unpack_work,
)
from ..wire.output import Line, OutputItems, OutputRecord, deliver, deliver_tagged
from ..wire.placeholders import PayloadWithRefs, sent_bytes, split_remote_objects
from ..wire.status_page import NO_PAGE
from .interfaces import State
from .reactor import ReactorSignal, Tenant
from .task import Sending, Task
from .task_state import ENDING, QUEUED, SENT

if TYPE_CHECKING:
    from ..runtime.timers import Timer
    from ..wire.functions import RemoteFunction
    from .waiting import Waiting

T = TypeVar("T")
Times = dict[str, tuple[float, float]]
"""Of each thread: the seconds that it has run, and the seconds that it waited for a processor."""

# Seconds that a task counts at least, so that the number of short tasks in flight has a bound.
MIN_TASK_SECONDS = 2e-6
RELEASE_REPORT_DELAY_SECONDS = 0.02
# A batch of this size is full, so that the fast transport can carry it.
MAX_BATCH_BYTES = 32 * 1024
_MAX_STDERR_LINES = 20
_MAX_STACK_LINES = 200
_frame_requests = itertools.count(1)
_FATAL_ERROR = "Fatal Python error: "
# Rarely needed patterns are compiled when first used, which takes as long as a small import.
_STACK_LINE = r"$|  |Current thread|Thread 0x|Extension modules:|Python runtime state:"
"""The beginnings of the lines that the interpreter and `faulthandler` write after
`_FATAL_ERROR`."""
_FRAME = "  File "
_CALLING_FRAME = (
    r'  File ".*/polycephaly/(drone/(functions|executor|slices|forwarded)|engines/\w+/drone)\.py"'
)
"""A frame that calls the task. It and those after it, down to the main module, are not shown."""


class Spawner(Protocol):
    """A process that starts drones and reports their ends: a zygote."""

    pid: int

    def signal_zygote(self, number: int, /) -> None: ...


class DroneHandle:
    """The state of one drone, as known in the controller process."""

    ref_table: RefTable
    """References to bytes that travel outside the messages, in both directions."""
    spawner: Spawner | None = None
    """The process that starts the drone and reports its end; None if no process does."""
    status_page = NO_PAGE

    def __init__(self, dispatcher: Tenant, number: int, name: str) -> None:
        self.dispatcher = dispatcher
        self.number = number
        self.name = name
        self.reference = weakref.ref(self)
        self.state = State.STARTING
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.death: BaseException | None = None  # how it died, if its end was not requested
        # Settled when it has a pid, or will never have one.
        self.pid_known: Signal[None] = ReactorSignal(dispatcher.reactor)
        self.ended: Signal[None] = ReactorSignal(dispatcher.reactor)
        # Tasks that were sent and not answered, in the order in which the drone runs them.
        self.in_flight: dict[int, Task] = {}
        self.dedicated: deque[Task] = deque()  # tasks that only this drone may run
        self.queued = 0  # those of them that are `QUEUED`, there or for a resource
        self.preferred: deque[Task] = deque()  # tasks whose kept values this drone has
        # What it runs before it takes tasks, and whether it runs the first of that: preparation.py.
        self.preparations: deque[Any] = deque()
        self.is_preparing = False
        self.packing: set[int] = set()  # kept values that it was asked to pickle
        # Kept values without references, of which the drone has to be informed: numbers, claims.
        self._dropped: deque[tuple[int, int]] = deque()
        self.load = 0.0  # estimated seconds of the tasks in flight
        self.unknown = 0  # tasks in flight without an estimate
        self.overlapping = 0  # tasks in flight that overlap; if any do, all do
        self.bulk_unanswered = 0  # tasks in flight that were sent by ZeroMQ (local drones only)
        # After a malformed message: tasks up to this `position` may have been answered in that. See
        # `Dispatcher.watch_for_lost_answer`.
        self.suspect_position = 0
        # Cancelled or timed-out overlapped tasks that ignored their interrupt. While any remain, no
        # new tasks are sent, so that the drone can be killed without losing live ones.
        self.hung: set[int] = set()
        self.sent_count = 0  # tasks that were sent in all
        # The highest `position` of an answered task. All tasks up to it have begun.
        self.highest_answered = 0
        self.retire_when_ready = False  # to be retired as soon as it is ready
        self.tasks_done = 0
        self.last_contact_at = 0.0  # when tasks were last sent, or results last received
        self.recall_pending = False
        self.stderr: deque[str] = deque(maxlen=_MAX_STDERR_LINES)
        self.stack: list[str] = []
        self.task_frames: list[str] = []  # the lines of `stack` for the task, innermost first
        self._in_stack = False  # the last line on stderr belonged to the stack
        self._below_task = False  # and was a frame that the task was called from
        self._release_report_scheduled = False
        self._defined = KnownFunctions(self._schedule_release_report)
        # Of the tasks with a time limit, by number: the deadline, and the request for their frames.
        self.deadlines: dict[int, tuple[float, Any]] = {}
        self.timer: Timer | None = None  # checks the deadlines at `timer_at`
        self.timer_at = inf
        self.unresponsive: str | None = None  # why there is no heartbeat; None while there is one
        # The task that has waited for long enough to be reported, and where it waits.
        self.reported_wait: tuple[int, Waiting] | None = None
        self.clock_offset = 0.0  # seconds by which its clock is ahead of the controller's
        self.is_killed = False  # by the controller: its end is near
        self.killed_on_request = False
        self.kill_reason = ""  # why, if there is more to say than the pool's end
        self.exit_reason = ""  # how it ended, if there is no exit status
        self.cause: BaseException | None = None  # the engine's error that reported its end

    # -- implemented by each engine ----------------------------------------------------------------

    def send(self, frames: list[bytes], tasks: Sequence[Task] = ()) -> None:
        """Send a message (wire/messages.py), which carries `tasks`. Never blocks."""
        raise NotImplementedError

    def is_up(self) -> bool:
        """Return whether the drone can receive messages."""
        return self.alive

    def catch_up(self) -> None:
        """Handle the messages that have arrived in this process but were not read yet. Called while
        holding the reactor's lock.
        """

    def kill(self, reason: str = "", on_request: bool = False) -> None:
        """Kill the drone, unless it is dead, at once, with its running tasks. Their errors give the
        first `reason`. If that is a user's request, it says nothing about the next drones.

        From here on it is sent no tasks.
        """
        if self.alive:
            self.is_killed = True
            self.kill_reason = self.kill_reason or reason
            self.killed_on_request = self.killed_on_request or on_request
            self._kill()

    def _kill(self) -> None:
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        """Kill the drone, which writes where its threads are before it ends, if the engine can."""
        self.kill(reason)

    def last_started(self) -> int:
        """Return the number of the task begun last, as far as known, or 0. Any thread may call
        it.
        """
        return self.status_page.started

    def last_answered(self) -> int:
        """Return the number of the last task whose answer was sent and may still arrive, or 0."""
        return self.status_page.answered

    def beat(self) -> object:
        """Return a value that changes while the drone lives, if that is known at no cost. None if
        not; then `heartbeat` tells.
        """
        return None

    def heartbeat(self) -> tuple[object, Times]:
        """Return a value that changes while the drone lives, and the processor times of its
        threads.
        """
        raise NotImplementedError

    def is_waiting(self) -> bool:
        """Return whether the drone, as far as known, neither runs nor is runnable."""
        return True

    def stall_reason(self) -> str:
        """Return why there is no heartbeat."""
        return "no heartbeat arrives"

    def activity(self, threads: Times) -> tuple[object, Times] | None:
        """Return a value that changes whenever the drone does something for its tasks, and the
        times of those threads that may wake now and then without doing anything. `threads` comes
        from `heartbeat`. None if this is not known.
        """
        return None

    def children_activity(self) -> object:
        """Return the same kind of value for the processes that the drone has started."""

    def system_call(self) -> str | None:
        """Return the system call in which the main thread of the drone waits, if known."""
        return None

    def memory(self, enough: int) -> int:
        """Return the bytes that the drone and the processes started by it hold for themselves. The
        number is exact if it exceeds `enough`. 0 if the drone has no memory of its own.
        """
        return 0

    def processor_seconds(self) -> float | None:
        """Return the processor time of the drone so far, or None if it is not known here."""
        return None

    def take_output(self) -> OutputItems:
        """Take the output that has arrived."""
        return []

    def warn_of_no_room(self) -> None:
        """Warn that a large result came by the message, because shared memory had no room."""

    def collect_last_results(self) -> None:
        """Handle the results that the dead drone had sent, or had ready and perhaps not sent."""

    def close(self) -> None:
        """Release all resources of the dead drone; no message of it is handled any more."""

    # -- state -------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self.state is not State.DEAD

    @property
    def waiting(self) -> Waiting | None:
        """Where the drone waits, if the wait was long enough to be reported. None as soon as the
        drone has answered, even if the health monitor notes that only later.
        """
        number, waiting = self.reported_wait or (0, None)
        goes_on = self.alive and (number in self.in_flight or self.state < State.READY)
        return waiting if goes_on else None

    def has_waiting_tasks(self) -> bool:
        """Return whether tasks wait for this drone, including those that wait for their own inputs.

        The latter are checked first: `Dispatcher.on_inputs_ready` queues such a task before it is
        removed from the waiting tasks, so no task is missed.
        """
        unqueued = [task for task in self.dispatcher.unqueued_tasks() if task.target is self]
        return any(
            not task.promise.done() for task in [*unqueued, *self.dedicated, *self.preferred]
        )

    def closed_error(self) -> BaseException:
        """Return the error for tasks that are given to the drone after its end."""
        if self.death is not None:
            return copy_error(self.death)
        if self.dispatcher.broken is not None:
            return copy_error(self.dispatcher.broken)
        reason = f", because {self.kill_reason}" if self.kill_reason else ""
        return RuntimeError(f"drone {self.name} was released (exit code {self.exitcode}){reason}")

    def is_running(self, number: int) -> bool:
        """Return whether the task has begun. Any thread may call this. The engine knows only as
        much as the drone has reported.
        """
        if not self.alive:
            return False
        return self.last_started() == number or (self.overlapping > 0 and number in self.in_flight)

    def running_task(self) -> Task | None:
        """Return the task that runs, as far as known: the one that has begun last, else the first
        in flight. None if the drone has no task. Any thread may call this.
        """
        tasks = list(self.in_flight.values())
        started = self.last_started() if tasks else 0
        return next((each for each in tasks if each.number == started), tasks[0] if tasks else None)

    def cancel_timer(self) -> None:
        """Cancel the timer of the deadlines, because an earlier one takes its place, or the drone
        has ended.
        """
        if self.timer is not None:
            self.dispatcher.reactor.timers.cancel(self.timer)
            self.timer, self.timer_at = None, inf

    def count_done(self, calls: int) -> None:
        """Count answered calls. Preparations do not count."""
        if self.state >= State.READY and not self.is_preparing:
            self.tasks_done += calls
            self.dispatcher.tasks_done += calls

    # -- sending -----------------------------------------------------------------------------------

    def request_frames(self, kind: bytes, *values: int) -> int:
        """Ask the drone, if it is up, for its frames (FRAMES: drone/frames.py), or for samples of
        them (PROFILE). Return the number of the request.
        """
        number = next(_frame_requests)
        if self.is_up():
            self.send(pack_numbers(kind, (number, *values)))
        return number

    def can_take(self, dedicated: bool = False) -> bool:
        """Return whether the drone may be sent a task now.

        An idle drone takes any task. A busy drone takes known short tasks until half of the budget
        is used, and overlapped tasks beside others of that kind. A retiring drone takes only
        dedicated tasks, one that is being prepared none.
        """
        if (
            not (self.state is State.READY or (dedicated and self.state is State.RETIRING))
            or self.preparations
            or self.unresponsive
            or self.is_killed  # it may respond again before it is dead
        ):
            return False
        if self.overlapping:
            return self.overlapping < self.dispatcher.width and not self.hung
        return not self.in_flight or (not self.unknown and self.load < tuning.batch_seconds / 2)

    def tasks_left(self, max_tasks: int | None) -> int:
        """Return how many more tasks the drone may be sent until it has had `max_tasks`. There is
        no limit for the dedicated tasks of a retiring drone.
        """
        if max_tasks is None or self.state is State.RETIRING:
            return 1 << 30
        return max_tasks - self.tasks_done - len(self.in_flight) + self.is_preparing

    def load_batch(
        self, queue: deque[Task], limit: int, now: float
    ) -> tuple[list[Task], list[bytes]]:
        """Move tasks that fit the current load from the head of `queue` into flight, at most
        `limit`. Return them and the message that carries them.
        """
        runs = self._choose_tasks(queue, limit, now)
        return [*chain.from_iterable(runs)], self._pack_tasks(runs)

    def _choose_tasks(self, queue: deque[Task], limit: int, now: float) -> list[list[Task]]:
        """Decide which tasks the drone gets, and note them as sent. Return them in order: each run
        of calls whose arguments are pickled together, and each other task alone.

        A task of unknown length goes alone. Overlapped tasks go only with their like, up to the
        width. Tasks that are settled already (cancelled while queued) are dropped.
        """
        runs: list[list[Task]] = []
        load = self.load
        definition: Any = None
        is_open = False  # the last run may go on
        size = count = 0
        left = 0  # tasks that were counted as queued
        owner: Any = None  # has counted them: their only drone, or the dispatcher
        while queue and count < limit and size < MAX_BATCH_BYTES:
            task = queue.popleft()
            owner = task.target or self.dispatcher
            if task.promise._state != PENDING:
                left += task.state is QUEUED
                task.state = ENDING
                continue
            if (
                task.args is None
                and type(task.payload) is PayloadWithRefs
                and not self.dispatcher.directory.prepare_to_send(task, self)
            ):
                continue
            if task.definition is not definition:
                definition, is_open = task.definition, False
            estimate = self._estimate(task, load)
            if estimate is None:
                queue.appendleft(task)
                break
            if definition.overlaps:
                self.overlapping += 1
            elif estimate < 0:
                self.unknown += 1
                limit = 1
            else:
                load += estimate
                if task.timeout is not None:
                    limit = 1
            left += task.state is QUEUED
            sending = task.sending = Sending(self.reference, self.name, now, estimate)
            task.state = SENT
            self.sent_count = task.position = self.sent_count + 1
            self.in_flight[task.number] = task
            count += 1
            shares = _shares_pickle(task)
            if is_open and shares:
                runs[-1].append(task)
            else:
                runs.append([task])
            is_open = shares
            size += task.weight if is_open else _message_bytes(task)
            if is_open and queue and estimate > 0 and task.weight == Task.weight:
                room = min(
                    limit - count,
                    int((tuning.batch_seconds - load) / estimate),
                    (MAX_BATCH_BYTES - size) // task.weight,
                )
                more, settled = _take_similar(definition, queue, room, sending, self.sent_count)
                self.sent_count += len(more)
                numbers = [each.number for each in more]
                self.in_flight.update(zip(numbers, more, strict=True))
                runs[-1] += more
                left += len(more) + settled
                load += estimate * len(more)
                count += len(more)
                size += task.weight * len(more)
        if left:
            owner.queued -= left
        self.load, self.last_contact_at = load, now
        return runs

    def _estimate(self, task: Task, load: float) -> float | None:
        """Return the seconds by which `task` adds to the `load`, negative if they are not known.
        None if the drone does not take it now.
        """
        definition, in_flight = task.definition, self.in_flight
        if definition.overlaps or self.overlapping:
            alike = definition.overlaps and self.overlapping == len(in_flight)
            return 0.0 if alike and self.overlapping < self.dispatcher.width else None
        seconds = definition.seconds
        # One with a time limit goes alone, so that no other task uses up its time.
        if in_flight and (seconds is None or task.timeout is not None):
            return None
        if seconds is None:
            return -1.0
        estimate = max(seconds * task.count, MIN_TASK_SECONDS)
        return None if in_flight and load + estimate > tuning.batch_seconds else estimate

    def _pack_tasks(self, runs: list[list[Task]]) -> list[bytes]:
        """Return the message that carries the tasks, with the functions that the drone does not
        have yet.
        """
        message = TaskBatch()
        for run in runs:
            task = run[0]
            definition = task.definition
            if definition.number not in self._defined:
                task.definition_bytes = self._define(definition, message)
            if _shares_pickle(task):
                numbers = [each.number for each in run]
                calls: list[Any] = [each.args for each in run]
                message.add_calls(definition.number, numbers, calls)
            else:
                self._add(task, message)
        if runs and (self.ref_table.returned or self._dropped or self._defined.unused):
            self._add_released(message)
        return message.frames()

    def _add(self, task: Task, message: TaskBatch) -> None:
        """Add a task as an item of its own."""
        payload, kind = task.payload, task.kind
        if task.keeps:
            kind |= KEEP
        if type(payload) is PayloadWithRefs:
            self._add_kept_values(payload.remote_objects.values(), message)
            payload = payload.payload
        if task.args is not None:
            payload = dumps(task.args, 5) if task.args else b""
        elif isinstance(payload, Serialized):
            payload, kind = payload.pack_header(self.ref_table), kind | SHARED
        message.add(task.number, kind, task.definition.number, payload)
        if task.definition.captures:  # otherwise the drone would keep the captured values
            self._defined.remove(task.definition.number)
            message.add(task.definition.number, FORGET, 0, b"")

    def _add_kept_values(self, remote_objects: Iterable[Any], message: TaskBatch) -> None:
        """Add the kept values that the drone does not have."""
        for each in remote_objects:
            if self not in each.holders:
                each.holders[self] = 1
                if isinstance(each.packed, Received):
                    header = each.packed.to_serialized().pack_header(self.ref_table)
                    message.add(each.number, STORE | SHARED, 0, header)
                else:
                    assert each.packed is not None  # otherwise `prepare_to_send` was false
                    message.add(each.number, STORE, 0, each.packed)

    def _schedule_release_report(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        """Schedule a report to the drone that a result, a kept value or a function is not used any
        more. The next batch carries the report, or else a message of its own after
        `RELEASE_REPORT_DELAY_SECONDS`. Called in any thread, at any moment, also by finalizers.
        """
        if is_finalizing():  # the globals of modules may be gone
            return
        if not self._release_report_scheduled and self.alive:
            self._release_report_scheduled = True
            dispatcher = self.dispatcher
            dispatcher.post(
                dispatcher.call_later, RELEASE_REPORT_DELAY_SECONDS, self._report_released
            )

    def _report_released(self) -> None:
        self._release_report_scheduled = False
        if (self.ref_table.returned or self._dropped or self._defined.unused) and self.is_up():
            message = TaskBatch()
            self._add_released(message)
            self.send(message.frames())

    def drop(self, number: int, claims: int) -> None:
        """Note that a kept value has no references left. Called like `_schedule_release_report`."""
        self._dropped.append((number, claims))
        self._schedule_release_report()

    def _define(self, definition: RemoteFunction, message: TaskBatch) -> int:
        """Add the definition of a function, and return its size in bytes."""
        for oldest in self._defined.add(definition):
            message.add(oldest, FORGET, 0, b"")
        payload, kind = definition.payload, definition.kind
        if isinstance(payload, Serialized):
            payload, kind = payload.pack_header(self.ref_table), kind | SHARED
        message.add(definition.number, kind, 0, payload)
        return sent_bytes(definition.payload)

    def _add_released(self, message: TaskBatch) -> None:
        for number in self.ref_table.take_returned():
            message.add(number, RELEASE_RANGE, 0, b"")
        while self._dropped:
            number, claims = self._dropped.popleft()
            message.add(number, DROP, claims, b"")
        for number in self._defined.pop_unused():
            message.add(number, FORGET, 0, b"")

    def undo_batch(self, frames: Sequence[bytes]) -> None:
        """Undo a batch that did not arrive: the drone has neither its functions nor its kept
        values, and FORGET and DROP must be sent again. Called while holding the reactor's lock.
        """
        for number, kind, claims, _ in unpack_work(frames):
            if kind & ~(SHARED | FRESH) in DEFINES:
                self._defined.remove(number)
            elif kind & ~SHARED == STORE:
                self.dispatcher.directory.on_store_lost(self, number)
            elif kind == FORGET:
                self._defined.unused.append(number)
            elif kind == DROP:
                self.drop(number, claims)

    def replace_in_flight(self, task: Task, part: Task) -> None:
        """Let `part`, the rest of the slice `task` on this drone, take its place and number. The
        time that `part` takes is not known.
        """
        sending = task.sending
        assert sending is not None
        if sending.estimate >= 0:
            self.load -= sending.estimate
            self.unknown += 1
        part.number, part.position = task.number, task.position
        part.state, task.state = SENT, ENDING
        part.sending = Sending(self.reference, self.name, sending.at, -1.0, sending.by_bulk)
        self.in_flight[part.number] = part

    def remove_many_in_flight(self, numbers: list[int]) -> list[Task | None]:
        """Remove many tasks from flight, as `remove_in_flight` does."""
        if self.bulk_unanswered or self.overlapping or self.dispatcher.resources.sizes:
            return [self.remove_in_flight(number) for number in numbers]
        in_flight = self.in_flight
        tasks = [in_flight.pop(number, None) for number in numbers]
        known = unknown = 0.0
        for task in tasks:
            if task is not None:
                task.state = ENDING
                estimate = task.sending.estimate  # type: ignore[union-attr]  # set, since in flight
                if estimate < 0:
                    unknown += 1
                else:
                    known += estimate
        self.load = self.load - known if in_flight else 0.0
        self.unknown -= int(unknown)
        return tasks

    def take_in_flight(self) -> list[Task]:
        """Remove all tasks from flight and return them."""
        return [*filter(None, self.remove_many_in_flight(list(self.in_flight)))]

    def remove_in_flight(self, number: int) -> Task | None:
        """Remove a task from flight and return it, or None if it is not in flight."""
        task = self.in_flight.pop(number, None)
        if task is not None:
            task.state = ENDING
            sending = task.sending
            assert sending is not None
            if sending.by_bulk:
                self.bulk_unanswered -= 1
            if task.timeout is not None:
                self.deadlines.pop(number, None)
            if task.definition.overlaps:
                self.overlapping -= 1
                self.hung.discard(number)
            elif sending.estimate < 0:
                self.unknown -= 1
            else:
                self.load -= sending.estimate
            if not self.in_flight:
                self.load = 0.0
            if task.resources:
                self.dispatcher.resources.release(task)
        return task

    # -- output ------------------------------------------------------------------------------------

    def print_output(self, may_wait: bool = False) -> None:
        """Have the output that has arrived printed; if it `may_wait`, perhaps later."""
        dispatcher = self.dispatcher
        if may_wait and dispatcher.reactor.leaves_output():
            return
        output = self.take_output()
        if not output:
            return
        self.keep_stderr_lines(output)
        listeners = dispatcher.output_listeners
        if listeners:
            tags = {*listeners}
            tagged = [each for each in output if isinstance(each, Line) and each.tag in tags]
            if tagged:
                dispatcher.reactor.deliver(partial(deliver_tagged, tagged, listeners))
                output = [each for each in output if getattr(each, "tag", None) not in tags]
        if output:
            size = sum(len(each) for each in output if isinstance(each, Line))
            dispatcher.reactor.deliver_output(partial(deliver, dispatcher.output, output), size)

    def keep_stderr_lines(self, output: OutputItems) -> None:
        """Keep the last lines that the drone wrote to stderr or logged and, apart from those, the
        stack of the latest fatal error.
        """
        for each in output:
            if isinstance(each, OutputRecord):
                self.stderr.append(each.text)
            elif isinstance(each, Line) and each.stream == "stderr":
                before, fatal, error = each.text.partition(_FATAL_ERROR)
                if fatal:
                    self.stack, self._in_stack = [fatal + error], True
                    self.task_frames = []
                elif self._in_stack and re.match(_STACK_LINE, before):
                    calls_task = re.match(_CALLING_FRAME, before) is not None
                    if calls_task and not self._below_task:
                        above = takewhile(lambda line: line.startswith(_FRAME), self.stack[::-1])
                        self.task_frames = list(above)[::-1]
                    self._below_task = before.startswith(_FRAME) and (
                        self._below_task or calls_task
                    )
                    if not self._below_task:
                        self.stack.append(before)
                        # The crashed thread may be the last of many, so the last lines stay.
                        del self.stack[1:-_MAX_STACK_LINES]
                    continue
                else:
                    self._in_stack = False
                if before or not fatal:
                    self.stderr.append(before)


def drain(queue: deque[T]) -> list[T]:
    """Take all items from `queue`, one by one. An item that another thread adds meanwhile is taken,
    or stays.
    """
    items = []
    with suppress(IndexError):
        while True:
            items.append(queue.popleft())
    return items


def drop_settled(queue: deque[Task]) -> list[Task]:
    """Remove the settled tasks from `queue`, to which other threads only append meanwhile, and
    return them.
    """
    tasks = [queue.popleft() for _ in range(len(queue))]
    settled = [task for task in tasks if task.promise.done()]
    queue.extendleft(task for task in reversed(tasks) if not task.promise.done())
    return settled


def _shares_pickle(task: Task) -> bool:
    """Return whether the arguments of `task` are pickled together with those of the calls of the
    same function behind it.
    """
    definition = task.definition
    return not (task.args is None or task.keeps or definition.overlaps or definition.captures)


def _message_bytes(task: Task) -> int:
    """Return about how many bytes of a message a task takes that is an item of its own."""
    payload, _ = split_remote_objects(task.payload)
    return task.weight + (len(payload) if isinstance(payload, bytes) else 0)


def _take_similar(
    definition: RemoteFunction, queue: deque[Task], limit: int, sending: Sending, position: int
) -> tuple[list[Task], int]:
    """Take at most `limit` calls of `definition` that can be pickled together from the head of
    `queue`, and note them as sent, with the positions after `position`. Return them, and how many
    others were taken that counted as queued, but were settled.
    """
    more: list[Task] = []
    settled = 0
    weight, popleft = Task.weight, queue.popleft
    with suppress(IndexError):
        for _ in range(limit):
            task = popleft()
            if task.promise._state != PENDING:
                settled += task.state is QUEUED
                task.state = ENDING
                continue
            if (
                task.definition is definition
                and task.args is not None
                and task.weight == weight
                and not task.timeout
            ):
                more.append(task)
                task.state, task.sending = SENT, sending
                position += 1
                task.position = position
            else:
                queue.appendleft(task)
                break
    return more, settled
