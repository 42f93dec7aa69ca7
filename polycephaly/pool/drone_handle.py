"""The drone handle: the record of one drone (drone_record.py), and the way to the drone.

A handle packs and sends what the pool has chosen for the drone, has its output printed, and
observes its process. Only the loop's thread changes a handle. Each engine has a subclass: see
engine.py.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from pickle import dumps
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import copy_error
from ..memory.references import Received, RefTable, Serialized
from ..promises.promise import Signal
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
from ..wire.output import Line, OutputItems, OutputRecord, deliver, deliver_tagged, forward
from ..wire.placeholders import PayloadWithRefs, sent_bytes
from ..wire.status_page import NO_PAGE
from .drone_record import DroneRecord
from .interfaces import State
from .reactor import ReactorSignal, Tenant
from .task import Task

if TYPE_CHECKING:
    from ..wire.functions import RemoteFunction
    from .waiting import Waiting

Times = dict[str, tuple[float, float]]
"""Of each thread: the seconds that it has run, and the seconds that it waited for a processor."""

RELEASE_REPORT_DELAY_SECONDS = 0.02
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
    r'  File ".*/polycephaly/'
    r'(drone/(functions|executor|chunk_run|forwarded)|engines/\w+/drone)\.py"'
)
"""A frame that calls the task. It and those after it, down to the main module, are not shown."""


class Spawner(Protocol):
    """A process that starts drones and reports their ends: a zygote."""

    pid: int

    def signal_zygote(self, number: int, /) -> None: ...


class DroneHandle(DroneRecord):
    """The state of one drone, as known in the controller process."""

    ref_table: RefTable
    """References to bytes that travel outside the messages, in both directions."""
    spawner: Spawner | None = None
    """The process that starts the drone and reports its end; None if no process does."""
    status_page = NO_PAGE

    def __init__(self, dispatcher: Tenant, number: int, name: str) -> None:
        super().__init__(dispatcher.assignment, number, name)
        self.dispatcher = dispatcher
        self.exitcode: int | None = None
        self.death: BaseException | None = None  # how it died, if its end was not requested
        # Settled when it has a pid, or will never have one.
        self.pid_known: Signal[None] = ReactorSignal(dispatcher.reactor)
        self.ended: Signal[None] = ReactorSignal(dispatcher.reactor)
        # Kept values without references, of which the drone has to be informed: numbers, claims.
        self._dropped: deque[tuple[int, int]] = deque()
        self.stderr: deque[str] = deque(maxlen=_MAX_STDERR_LINES)
        self.stack: list[str] = []
        self.task_frames: list[str] = []  # the lines of `stack` for the task, innermost first
        self._crash: list[Line] = []  # lines of `stack`, until it is known who shows them
        self._in_stack = False  # the last line on stderr belonged to the stack
        self._below_task = False  # and was a frame that the task was called from
        self._release_report_scheduled = False
        self._defined = KnownFunctions(self._schedule_release_report)
        # The task that has waited for long enough to be reported, and where it waits.
        self.reported_wait: tuple[int, Waiting] | None = None
        self.clock_offset = 0.0  # seconds by which its clock is ahead of the controller's
        self.exit_reason = ""  # how it ended, if there is no exit status
        self.cause: BaseException | None = None  # the engine's error that reported its end

    # -- implemented by each engine ----------------------------------------------------------------

    def send(self, frames: list[bytes], tasks: Sequence[Task] = ()) -> None:
        """Send a message (wire/messages.py), which carries `tasks`. Never blocks."""
        raise NotImplementedError

    def ask_for_beat(self) -> bool:
        """Ask the drone for a heartbeat. Return False if it beats without that, or has not answered
        the last time.
        """
        return False

    def is_up(self) -> bool:
        """Return whether the drone can receive messages."""
        return self.alive

    def receive_all(self) -> None:
        """Handle the messages that have arrived in this process but were not read yet. Called while
        holding the reactor's lock.
        """

    def kill(self, reason: str = "", on_request: bool = False) -> None:
        """Kill the drone, unless it is dead, at once, with its running tasks. Their errors give the
        first `reason`. If that is a user's request, it says nothing about the next drones.

        From here on it is sent no tasks.
        """
        if self.alive:
            self.note_kill(reason, on_request)
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
        """Return the number of the last task whose answer was sent, as far as known, or 0."""
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

    def main_seconds(self) -> float | None:
        """Return for how many seconds the main thread has run. None if that is no sign of activity,
        or not known.
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
    def waiting(self) -> Waiting | None:
        """Where the drone waits, if the wait was long enough to be reported. None as soon as the
        drone has answered, even if the health monitor notes that only later.
        """
        number, waiting = self.reported_wait or (0, None)
        goes_on = self.alive and (number in self.in_flight or self.state < State.READY)
        return waiting if goes_on else None

    def closed_error(self) -> BaseException:
        """Return the error for tasks that are given to the drone after its end."""
        if self.death is not None:
            return copy_error(self.death)
        broken = self.dispatcher.state.broken
        if broken is not None:
            return copy_error(broken)
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

    def pack(self, runs: list[list[Task]]) -> list[bytes]:
        """Return the message that carries the tasks, with the functions that the drone does not
        have yet.
        """
        message = TaskBatch()
        for run in runs:
            task = run[0]
            definition = task.definition
            if definition.number not in self._defined:
                task.definition_bytes = self._define(definition, message)
            if task.shares_pickle():
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
        definition, payload, kind = task.definition, task.payload, task.kind
        if task.keeps:
            kind |= KEEP
        if type(payload) is PayloadWithRefs:
            self._add_kept_values(payload.remote_objects.values(), message)
            payload = payload.payload
        if task.args is not None:
            payload = dumps(task.args, 5) if task.args else b""
        elif isinstance(payload, Serialized):
            payload, kind = payload.pack_header(self.ref_table), kind | SHARED
        message.add(task.number, kind, definition.number, payload)
        if definition.captures:  # otherwise the drone would keep the captured values
            self._defined.remove(definition.number)
            message.add(definition.number, FORGET, 0, b"")

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

    # -- output ------------------------------------------------------------------------------------

    def print_output(self, may_wait: bool = False) -> None:
        """Have the output that has arrived printed; if it `may_wait`, perhaps later."""
        dispatcher = self.dispatcher
        if may_wait and dispatcher.reactor.leaves_output():
            return
        output = self.take_output()
        if may_wait and self._crash:  # it answers, so the stack is of a process that it started
            self.tell_crash()
        if not output:
            return
        crash = self.keep_stderr_lines(output)
        if not self._in_stack:
            self.tell_crash()
        if crash and dispatcher.output is forward and not dispatcher.output_listeners:
            self._crash += crash
            told = set(map(id, crash))
            output = [each for each in output if id(each) not in told]
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

    def tell_crash(self) -> None:
        """Have the stack of a fatal error printed that no error of a task shows."""
        crash, self._crash = self._crash, []
        if crash:
            size = sum(map(len, crash))
            output = self.dispatcher.output
            self.dispatcher.reactor.deliver_output(partial(deliver, output, [*crash]), size)

    def forget_crash(self) -> None:
        """Drop the stack of a fatal error, because the error of a task shows it."""
        self._crash = []

    def keep_stderr_lines(self, output: OutputItems) -> list[Line]:
        """Keep the last lines that the drone wrote to stderr or logged and, apart from those, the
        stack of the latest fatal error. Return the lines of such a stack below its first.
        """
        crash = []
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
                    crash.append(each)
                    continue
                else:
                    self._in_stack = False
                    crash = []  # it goes on, so the stack is of a process that it started
                if before or not fatal:
                    self.stderr.append(before)
        return crash
