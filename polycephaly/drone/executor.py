"""Receive tasks in batches, run them in the main thread of a drone, and write the outcomes.

    WORK ── _on_work ──> _todo ──main thread: _run_next──> _outcomes ── _put, _tell ──> controller
      RECALL: returns the tasks in _todo      CANCEL: withdraws, or interrupts

The drone of each engine is a `DroneExecutor` that receives and writes in its own way, and has a
thread, the *control thread*, for what must not wait until the running task is done. A thread that
receives work, or takes answers of a chunk, holds `socket_lock`. `_todo` is a deque: the main thread
takes from its left, the control thread from its right or the middle. Each of these steps is atomic,
so a task is either run or returned, never both.

An interrupt hits only the task that was named, and once. See
docs/decisions/0015-two-threads-of-a-drone.md.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import process_time
from typing import Any

from .. import _compat
from ..errors import Malformed
from ..memory.references import RefTable, Serialized
from ..promises import promise
from ..promises.promise import pickling_state
from ..runtime.clock import monotonic
from ..runtime.random_numbers import displaced, give_back
from ..runtime.sampler import MAX_HERTZ, SWITCH_SECONDS, StackSampler
from ..runtime.tuning import tuning
from ..timeline.event_log import EventLog, event_log
from ..wire import attempts, placeholders
from ..wire.main_names import MainSnapshot
from ..wire.map_chunks import MIN_SEPARATE_LENGTH, answers_head, pack_answers
from ..wire.messages import (
    ANSWERS,
    CALL,
    CALL_CHUNK,
    CALL_FILLED,
    CALL_KEYWORDS,
    CALLS,
    CANCEL,
    DEFINES,
    DROP,
    ERROR,
    FETCH,
    FORGET,
    FRAMES,
    FRESH,
    INTERRUPT,
    KEEP,
    NOT_PACKED,
    PACKED,
    PROFILE,
    RECALL,
    RELEASE_RANGE,
    SHARED,
    STOP,
    STORE,
    VALUE,
    WITHDRAWN,
    WORK,
    message_type,
    pack_frames,
    pack_message,
    pack_returned,
    unpack_lists,
    unpack_numbers,
    unpack_work,
)  # fmt: skip
from ..wire.shareable import SMALL_TYPES
from ..wire.status_page import StatusPage
from .chunk_run import FLUSH_SECONDS, ChunkRun, Part
from .console import OutputTail, current_tag, disable_record_order, open_console, set_tag
from .frames import OWN_FILES, frames_now, sampled_threads
from .functions import LoadedFunction, define
from .inbox import Calls, ReceivedTask
from .logs import install_log_forwarding
from .outcomes import Outcomes
from .overlap import Overlap
from .sigterm import Sigterm
from .store import DroneStore

log = logging.getLogger(__name__)

_CALLS = {CALL, CALL_KEYWORDS, CALL_FILLED, CALL_CHUNK, CALLS}
BRIEF_TASK_SECONDS = 0.001
"""For a shorter task, measuring the processor time is not worth while."""
CHUNK_FLUSH_SECONDS = 0.0002
"""`tuning.flush_seconds` behind a chunk: short, so that fewer results are opened at once."""


class DroneExecutor:
    _owns_process = True
    """True if this process is a drone, with an output tag and threads of its own."""
    _cpu_time = staticmethod(process_time)
    _sigterm = Sigterm()  # never received

    def __init__(
        self,
        name: str,
        status_page: StatusPage,
        snapshot: MainSnapshot,
        store: Any,
        ref_table: RefTable,
        events: EventLog = event_log,
    ) -> None:
        """Create the executor in the main thread, whose handler for SIGINT is replaced."""
        self._status_page = status_page
        self._definitions: dict[int, LoadedFunction] = {}
        self._todo: deque[ReceivedTask | Calls] = deque()
        self._calls: Calls | None = None  # being run
        self._overlap = Overlap(self._wake_main_thread)
        self._chunk: ChunkRun | None = None
        self._last_done = 0
        self._last_flush = 0.0
        self._stopping = False
        self._current = self._interrupt_target = 0
        self._pending_interrupts: set[int] = set()
        self._sampler: StackSampler | None = None
        self._main_thread = threading.get_ident()
        self.socket_lock = threading.Lock()
        self._store = store
        self._ref_table = ref_table
        self._drone_store = DroneStore(name)
        self._snapshot = snapshot
        tail = self._take_over_process(snapshot)
        self._outcomes = Outcomes(
            self._put, snapshot, store, ref_table, tail, self._drone_store, events
        )

    def _take_over_process(self, snapshot: MainSnapshot) -> OutputTail:
        """Make this process a drone, which has this executor and no other."""
        attempts.shared_snapshot = snapshot
        tail = open_console()
        install_log_forwarding()
        faulthandler.enable(file=2)
        placeholders.local_store = self._drone_store
        placeholders.drone_thread.__dict__.clear()  # a task of an inline drone has forked this one
        signal.signal(signal.SIGINT, self._on_sigint)
        _executors[:] = [self]  # a drone from which this one was forked has nothing left to do
        return tail

    # -- implemented by the drone of each engine ---------------------------------------------------

    def _put(self, record: bytes, is_shared: bool = False) -> None:
        """Write a record for the controller, which it need not read before `_tell`. If possible,
        the record outlives this drone from now on; not if it `is_shared`, and the engine keeps what
        it refers to in this process. Any thread may call this.
        """
        raise NotImplementedError

    def _tell(self) -> None:
        """Have the controller read what was written. Any thread may call this."""

    def _receive(self, wait: bool) -> None:
        """In the main thread: handle the messages that have come; if `wait`, first wait for one."""
        raise NotImplementedError

    def _wake_main_thread(self) -> None:
        """Wake the main thread, if it waits, to send or check something. Any thread may call it."""

    def _send(self, frames: list[bytes]) -> None:
        self._put(pack_message(frames))
        self._tell()

    # -- a child that a task has forked ------------------------------------------------------------

    def disable(self) -> None:
        """Make this object do nothing. In a child, its connections were closed by `parent_death`.

        The queues are emptied, so that a chunk ends with the call that has forked, and no call is
        begun in the child too.
        """
        self._todo.clear()
        if self._calls is not None:
            self._calls.queue.clear()
        if self._chunk is not None:
            self._chunk.calls.clear()

    # -- the main thread ---------------------------------------------------------------------------

    def _run_next(self) -> bool:
        """Run the next task; return False if the control thread has just returned it."""
        try:
            task = self._todo.popleft()
        except IndexError:
            return False
        # A client's tag stays on between its calls.
        if self._owns_process and current_tag() and not task.definition.sets_tag():
            set_tag("")
        if displaced and not task.definition.is_seeded():
            give_back()
        if isinstance(task, Calls):
            self._calls = task
            try:
                self._run_calls(task)
            finally:
                self._calls = None
        elif task.kind == CALL_CHUNK:
            self._run_chunk(task)
        elif task.definition.overlaps:
            self._start_overlapped(task)
        else:
            self._run_task(task)
        return True  # the task's objects are freed before the thread waits for more

    def _run_calls(self, calls: Calls) -> None:
        """Run tasks as `_run_task` does, whose arguments came together."""
        take, definition = calls.queue.popleft, calls.definition
        call = definition.call_with
        measures = len(calls.queue) == 1 and not definition.brief
        cpu_start = self._cpu_time() if measures else 0.0
        mark_started = self._status_page.mark_started
        outcomes, sigterm = self._outcomes, self._sigterm
        add_value = outcomes.add_value
        finished = monotonic()
        while not sigterm.received:
            try:
                number, args = take()
            except IndexError:
                return
            mark_started(number)
            started = finished
            try:
                try:
                    self._current = number
                    if number in self._pending_interrupts:
                        raise KeyboardInterrupt("interrupted by the controller")
                    value = call(args)
                    kind = type(value)
                    together = kind in SMALL_TYPES or (
                        (kind is str or kind is bytes) and len(value) < MIN_SEPARATE_LENGTH
                    )
                    if not together:
                        payload = outcomes.pack(value)
                        value = None
                finally:
                    self._current = 0
            except BaseException as error:
                self._current = 0
                finished = monotonic()
                self.keep_frames(number, error)
                status, together, payload = ERROR, False, outcomes.pack_error(error)
            else:
                finished = monotonic()
                status = VALUE
            if measures:
                definition.brief = finished - started < BRIEF_TASK_SECONDS
                if not definition.brief:
                    outcomes.add_processor_time(number, self._cpu_time() - cpu_start)
            if together:
                add_value(number, started, finished, value)
            else:
                outcomes.add(number, status, started, finished, payload)
            self._last_done = number
            if finished - self._last_flush > tuning.flush_seconds and (calls.queue or self._todo):
                self._flush()
                self._receive(wait=False)
                finished = monotonic()

    def _run_task(self, task: ReceivedTask) -> None:
        outcomes, page = self._outcomes, self._status_page
        number, definition = task.number, task.definition
        page.mark_started(number)
        status = VALUE
        payload: bytes | Serialized = b""
        cpu_start = 0.0 if definition.brief else self._cpu_time()
        started = monotonic()
        try:
            try:
                self._current = number
                self._raise_if_interrupted(number)
                value = definition.call(task.kind, task.payload)
                if task.keeps:
                    payload = self._drone_store.keep(number, value)
                elif value is not None:
                    payload = outcomes.pack(value)
                del value
            finally:
                self._current = 0
        except BaseException as error:
            self._current = 0
            self.keep_frames(number, error)
            status, payload = ERROR, outcomes.pack_error(error)
            if task.keeps:  # interrupted while the value was stored
                self._drone_store.drop(number)
        finished = monotonic()
        brief = finished - started < BRIEF_TASK_SECONDS
        if not brief and not definition.brief:
            outcomes.add_processor_time(number, self._cpu_time() - cpu_start)
        definition.brief = brief
        outcomes.add(number, status, started, finished, payload)
        self._end_task(number, finished - self._last_flush > tuning.flush_seconds)

    def _end_task(self, number: int, flush_due: bool) -> None:
        self._last_done = number
        if flush_due and self._todo:
            self._flush()
            self._receive(wait=False)

    def keep_frames(self, number: int, error: BaseException) -> None:
        """Keep the frames of a failed task, if the pool wants that."""

    def _run_chunk(self, task: ReceivedTask) -> None:
        outcomes, definition, number = self._outcomes, task.definition, task.number
        self._status_page.mark_calls(0, 0)  # an interrupt may have left those of another chunk
        self._status_page.mark_started(number)
        cpu_start = 0.0 if definition.brief else self._cpu_time()
        started = monotonic()
        try:
            try:
                self._current = number
                self._raise_if_interrupted(number)
                run = self._chunk = ChunkRun(
                    number,
                    task.payload,
                    definition.function,
                    outcomes.pack,
                    self._status_page.mark_calls,
                    self._write_answers,
                    self._sigterm,
                    self._snapshot,
                )
                self._sigterm.stop = run.stop
                while True:
                    run.run()
                    self._current = 0  # no interrupt hits what holds the lock
                    with self.socket_lock:
                        if not run.may_go_on():
                            break
                    self._current = number
                    self._raise_if_interrupted(number)
            finally:
                self._current = 0
                self._sigterm.stop = None
        except BaseException as error:
            self._current = 0
            if self._chunk is None:  # its calls could not be unpickled
                self.keep_frames(number, error)
                packed = outcomes.pack_error(error)
                outcomes.add(number, ERROR, started, monotonic(), packed)
                self._end_task(number, flush_due=True)
                return
            self._chunk.error = self._chunk.error or error  # an interrupt behind the last call
        finished = monotonic()
        brief = finished - started < BRIEF_TASK_SECONDS
        # Of a chunk that is answered in parts, it would not be the time of any part.
        if not (brief or definition.brief or self._chunk.answered):
            outcomes.add_processor_time(number, self._cpu_time() - cpu_start)
        definition.brief = brief
        self._add_last_answers(self._chunk)
        self._end_task(number, finished - self._last_flush > CHUNK_FLUSH_SECONDS)

    def _add_last_answers(self, run: ChunkRun) -> None:
        """Write the answers of a chunk that were not written yet, and give back what is not run
        after a SIGTERM.
        """
        error = None
        if run.error is not None:
            with self.socket_lock:
                run.attribute_error()
            if run.error is not None:
                self.keep_frames(run.number, run.error)
                error = self._outcomes.pack_error(run.error)
        with self.socket_lock:
            self._chunk = None
            part = run.take_done()
            rest = run.give_back(even_if_whole=True)
            if rest and error is None:
                self._send(pack_returned([(run.number, rest)]))
        if part.values or error is not None:  # else the last ones were written, or none was run
            self._outcomes.add(*self._outcome_of(run, part, error))

    def _outcome_of(
        self, run: ChunkRun, part: Part, error: bytes | None = None
    ) -> tuple[int, int, float, float, bytes | Serialized, bytes]:
        """Return some answers of a chunk, and the error behind them, as `Outcomes.add` takes it."""
        failed = error is not None
        head = answers_head(part.first, len(part.values) + failed, failed)
        answers = pack_answers(part.values, part.packed, error, self._store)
        return run.number, ANSWERS, part.started, part.finished, answers, head

    def _write_answers(self, must_tell: bool) -> None:
        """Write what is done of the chunk that runs; if it is time, or must be, have that read, and
        handle what has come meanwhile. Called by the main thread between two calls, and interrupted
        only after that.
        """
        run = self._chunk
        assert run is not None
        self._current = 0
        if must_tell or monotonic() - self._last_flush > FLUSH_SECONDS:
            self._flush()
            self._receive(wait=False)
        elif not run.is_bulky():
            with self.socket_lock:
                self._put_done(run)
        self._current = run.number
        self._raise_if_interrupted(run.number)

    def _raise_if_interrupted(self, number: int) -> None:
        # The second: its signal came between two calls of the chunk with that number.
        if number in self._pending_interrupts or number == self._interrupt_target:
            self._interrupt_target = 0
            raise KeyboardInterrupt("interrupted by the controller")

    def _tell_of_done(self) -> None:
        """Have the controller read what is done while a task takes long. Called by the control
        thread, holding `socket_lock`.
        """
        run = self._chunk
        if run is not None:
            run.slow_down()
            self._put_done(run)
        self._outcomes.put_reports()
        self._tell()

    def _put_done(self, run: ChunkRun) -> None:
        """Write what is done of a chunk that goes on. Called by either thread, holding
        `socket_lock`.
        """
        part = run.take_done()
        if part.is_small():
            self._outcomes.put_chunk_values(
                run.number, part.first, part.started, part.finished, part.values
            )
        elif part.values:
            # Before the answers, which may contain these handles.
            self._outcomes.put_kept_values(run.number)
            self._outcomes.put(*self._outcome_of(run, part))

    def _start_overlapped(self, task: ReceivedTask) -> None:
        """Start a task that runs beside others."""
        overlap = self._overlap
        self._status_page.mark_started(task.number)
        started = monotonic()
        try:
            self._raise_if_interrupted(task.number)
            coro = task.definition.begin(task.kind, task.payload)
            overlap.begin(task.number, coro, task.keeps)
            if self._claim_interrupt(task.number):  # since the check before
                overlap.interrupt({task.number})
        except BaseException as error:
            self._add_overlapped_outcome(
                task.number, ERROR, started, monotonic(), self._outcomes.pack_error(error)
            )

    def _collect_ended(self) -> None:
        for number, thread, keeps, started, finished in self._overlap.take_ended():
            status = VALUE
            payload: bytes | Serialized = b""
            try:
                value = thread.result()
                if keeps:
                    payload = self._drone_store.keep(number, value)
                elif value is not None:
                    payload = self._outcomes.pack(value)
            except BaseException as error:
                status, payload = ERROR, self._outcomes.pack_error(error)
            finally:
                del thread  # no cycle through the error's traceback, which would keep the arguments
            self._add_overlapped_outcome(number, status, started, finished, payload)
            if not self._overlap.running:
                self._last_done = number

    def _add_overlapped_outcome(
        self, number: int, status: int, started: float, finished: float, payload: bytes | Serialized
    ) -> None:
        # A line that was begun may be that of another task.
        self._outcomes.add(number, status, started, finished, payload, ends_lines=False)

    def _flush(self) -> None:
        if self._chunk is not None:
            with self.socket_lock:
                self._put_done(self._chunk)
        self._outcomes.put_reports()
        self._tell()
        self._last_flush = monotonic()
        # With overlapped tasks, `_last_done` is the last task before them.
        self._status_page.answered = self._last_done

    def send_requested_values(self) -> None:
        """Send the kept values that other processes have requested.

        Called by the main thread between tasks, or by the control thread.
        """
        outcomes, requested = self._outcomes, self._drone_store.requested
        while requested:
            try:
                number = requested.popleft()
            except IndexError:  # the other thread has just taken it
                return
            try:
                pickling_state.for_other_process = True
                status, payload = PACKED, outcomes.pack(self._drone_store.value(number))
            except BaseException as error:
                status, payload = NOT_PACKED, outcomes.pack_error(error)
            finally:
                pickling_state.for_other_process = False
            outcomes.put(number, status, 0.0, 0.0, payload)
            self._tell()

    # -- either thread, holding `socket_lock` ------------------------------------------------------

    def _handle_message(self, frames: list[bytes]) -> None:
        try:
            self.HANDLERS[message_type(frames)](self, frames)
        except (Malformed, KeyError) as error:
            # The calls of this message would never be answered. So the drone ends, and others run
            # those that have not begun.
            if isinstance(error.__cause__, MemoryError):
                raise error.__cause__ from None
            log_malformed(error)

    def _on_work(self, frames: list[bytes]) -> None:
        definitions, todo = self._definitions, self._todo
        for number, kind, definition, payload in unpack_work(frames):
            if kind & SHARED:
                kind &= ~SHARED
                payload = self._ref_table.receive(payload)
            # First, because the other kinds are rarer.
            if kind & ~KEEP in _CALLS and definition in definitions:
                function = definitions[definition]
                if kind == CALLS:
                    todo.append(Calls(function, *_unpack_calls(payload)))
                else:
                    todo.append(ReceivedTask(number, kind, function, payload))
            elif kind & ~FRESH in DEFINES:
                definitions[number] = define(kind, payload)
            elif kind == FORGET:
                definitions.pop(number, None)
            elif kind == RELEASE_RANGE:
                self._ref_table.release(number)
            elif kind == STORE:
                self._drone_store.add_packed(number, payload)
            elif kind == DROP:
                self._drone_store.drop(number, definition)
            else:
                unknown = _unpack_calls(payload)[0] if kind == CALLS else [number]
                self._on_undefined(definition, unknown)

    def _on_undefined(self, definition: int, unknown: list[int]) -> None:
        """Report an error for calls of a function that was not defined here."""
        text = f"a bug in polycephaly: function {definition} was not defined in this drone"
        error = self._outcomes.pack_error(RuntimeError(text))
        for each in unknown:
            self._outcomes.put(each, ERROR, 0.0, 0.0, error)
        self._tell()

    def _on_recall(self, frames: list[bytes]) -> None:
        returned: list[int] = []
        with suppress(IndexError):
            while True:
                task = self._todo.pop()
                if isinstance(task, Calls):
                    returned += task.take_from_end()
                else:
                    returned.append(task.number)
        calls = self._calls  # read once: the main thread may set it to None
        if calls is not None:
            returned += calls.take_from_end()
        pairs = [(number, 0) for number in returned[::-1]]
        run = self._chunk
        rest = 0 if run is None else run.give_back()
        if run is not None and rest:
            pairs.insert(0, (run.number, rest))
        self._send(pack_returned(pairs))

    def _on_cancel(self, frames: list[bytes]) -> None:
        targets = set(unpack_numbers(frames))
        withdrawn = []
        tasks = list(self._todo)
        calls = self._calls
        if calls is not None:
            tasks.append(calls)
        for task in tasks:
            if isinstance(task, Calls):
                withdrawn += task.withdraw(targets)
            elif task.number in targets:
                with suppress(ValueError):  # the main thread has just begun it
                    self._todo.remove(task)
                    withdrawn.append(task.number)
        targets -= set(withdrawn)
        for each in withdrawn:
            self._outcomes.put(each, WITHDRAWN, 0.0, 0.0, b"")
        if withdrawn:
            self._tell()
        self._pending_interrupts |= targets
        current, overlap = self._current, self._overlap
        begun = {
            each for each in targets if each in overlap.running and self._claim_interrupt(each)
        }
        overlap.interrupt(begun)
        run = self._chunk
        if run is not None and run.number in targets:
            rest = run.give_back(even_if_whole=True)
            if rest:
                self._send(pack_returned([(run.number, rest)]))
        if current in targets:
            self._pending_interrupts.discard(current)
            self._interrupt_main_thread(current)

    def _on_interrupt(self, frames: list[bytes]) -> None:
        targets = set(unpack_numbers(frames))
        self._overlap.interrupt(targets)
        current, run = self._current, self._chunk
        if current in targets:
            self._interrupt_main_thread(current)
        elif run is not None and not current and run.number in targets:  # between two of its calls
            self._pending_interrupts.add(run.number)

    def _interrupt_main_thread(self, current: int) -> None:
        self._interrupt_target = current
        signal.pthread_kill(self._main_thread, signal.SIGINT)

    def _claim_interrupt(self, number: int) -> bool:
        """Return True to exactly one of the callers that ask; that one interrupts the task."""
        try:
            self._pending_interrupts.remove(number)
        except KeyError:
            return False
        return True

    def _on_fetch(self, frames: list[bytes]) -> None:
        self._drone_store.requested += unpack_numbers(frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        requests = unpack_numbers(frames)
        if len(requests) != 1:
            raise Malformed(f"a request for frames with {len(requests)} numbers")
        overlapped = dict(self._overlap.running)
        main, runner = self._main_thread, DroneExecutor._run_next.__code__
        report = frames_now(main, runner, self._current, overlapped, self._owns_process)
        self._send(pack_frames(requests[0], report))

    def _on_profile(self, frames: list[bytes]) -> None:
        """Begin to sample the stacks of tasks, or end, and send the samples."""
        match unpack_numbers(frames):
            case request, hertz if hertz <= MAX_HERTZ:
                sampler, self._sampler = self._sampler, None
            case numbers:
                raise Malformed(f"a request for a profile with the numbers {numbers}")
        if sampler is not None:
            sampler.stop()
        if hertz:
            with suppress(RuntimeError):  # no thread can be started; tasks go on
                self._sampler = StackSampler(hertz, self._sampled_threads, SWITCH_SECONDS)
        else:
            report = {} if sampler is None else sampler.report(OWN_FILES)
            self._send(pack_frames(request, report, PROFILE))

    def _sampled_threads(self) -> list[tuple[int, str]]:
        return sampled_threads(self._main_thread if self._current else 0, __file__)

    def _on_stop(self, frames: list[bytes]) -> None:
        self._stopping = True

    HANDLERS: dict[bytes, Callable[[Any, list[bytes]], None]] = {  # noqa: RUF012 - not changed
        WORK: _on_work,
        RECALL: _on_recall,
        CANCEL: _on_cancel,
        FETCH: _on_fetch,
        FRAMES: _on_frames,
        INTERRUPT: _on_interrupt,
        PROFILE: _on_profile,
        STOP: _on_stop,
    }

    def _on_sigint(self, signum: int, frame: Any) -> None:
        if self._interrupt_target and self._interrupt_target == self._current:
            self._interrupt_target = 0
            raise KeyboardInterrupt("interrupted by the controller")

    @property
    def current(self) -> int:
        """The number of the running task; 0: none; negative: between tasks that came together.
        Another value after each call; of a chunk, after each run of calls.
        """
        if self._current:
            return self._current + (self._status_page.call << 64)
        return -1 - self._last_done if self._calls is not None else 0

    def beat(self) -> None:
        self._status_page.beats += 1
        has_overlapped = bool(self._overlap.running)
        self._status_page.holder = self._overlap.holder() if has_overlapped else 0
        if has_overlapped or self._main_thread in promise.waiting_threads:
            # None if another thread is importing the module.
            green = getattr(sys.modules.get("polycephaly.green.scheduler"), "scheduler", None)
            self._status_page.steps = 1 if green is None else 1 + green.busy_periods
        else:
            self._status_page.steps = 0


_executors: list[DroneExecutor] = []


def _disable_in_child() -> None:
    """In a forked child: disable the executor.

    Exit handlers registered before belong to the drone. Signals are the child's own.
    """
    for executor in _executors:
        executor.disable()
        disable_record_order()
        _compat.clear_exit_handlers()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _executors.clear()


os.register_at_fork(after_in_child=_disable_in_child)


def _unpack_calls(payload: Any) -> tuple[list[int], list[tuple[Any, ...]]]:
    numbers, calls = unpack_lists(payload)
    if set(map(type, calls)) != {tuple} or min(numbers) < 0 or max(numbers) >= 1 << 64:
        raise Malformed("a malformed list of calls")
    return numbers, calls


def log_malformed(error: Exception) -> None:
    log.warning("a malformed message was dropped: %s", error)
