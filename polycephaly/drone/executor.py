"""Receive tasks in batches, run them in the main thread of a drone, and send the outcomes.

    WORK ── _hear ──> _todo ──main thread: _run──> _outcomes ── _flush ──> RESULTS
      RECALL: returns the tasks in _todo      CANCEL: withdraws, or interrupts

The drone of each engine is a `DroneExecutor` that receives and sends in its own way, and has a
thread, the *control thread*, that does so while the main thread is busy. A thread that receives or
sends holds `socket_turn`. `_todo` is a deque: the main thread takes from its left, the control
thread from its right or the middle. Each of these steps is atomic, so a task is either run or
returned, never both.

An interrupt hits only the task that was named, and once. See
docs/decisions/0015-two-threads-of-a-drone.md.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, process_time
from typing import Any

from ..engines.local.status_table import Slot
from ..promises import promise
from ..store.placeholders import here
from ..store.references import RefTable, Serialized
from ..timeline.trail import trail
from ..wire.messages import (
    BRING,
    CALL_SLICE,
    CALLS,
    CAME_BACK,
    CANCEL,
    DEFINES,
    DROP,
    ERROR,
    FETCH,
    FORGET,
    FRAMES,
    NOT_PACKED,
    PACKED,
    RECALL,
    RETURNED,
    SHARED,
    SPLIT,
    STOP,
    VALUE,
    WITHDRAWN,
    WORK,
    Malformed,
    head_type,
    numbers,
    pack_frames,
    pack_numbers,
    pack_outcome,
    pack_outcomes,
    unpack_together,
    unpack_work,
)  # fmt: skip
from ..wire.pickling import MainSnapshot
from ..wire.slices import ENDED, FAILED, RUNNING, SHORT, SMALL, pack_answers, split_head
from .child import leave_exit_handlers
from .console import OutputTail, stay_behind, tag, tagged
from .frames import frames_now
from .functions import LoadedFunction, define
from .inbox import Calls, ReceivedTask
from .overlap import Overlap
from .result_buffer import ResultBuffer
from .slices import SliceRun
from .store import DroneStore

__all__ = ["DroneExecutor", "dropped"]

log = logging.getLogger(__name__)

BRIEF = 0.001  # seconds: for a shorter task, measuring the processor time is not worth while
BULK_ARRIVES = 0.25  # seconds that ZeroMQ's thread may take to write a message
FLUSH_AFTER = 0.001  # seconds that an outcome may wait for others to be sent with
FLUSH_SLICE_AFTER = 0.0002  # seconds; short, so that fewer results are unpickled at once


class DroneExecutor:
    def __init__(
        self,
        name: str,
        row: Slot,
        snapshot: MainSnapshot,
        store: Any,
        ref_table: RefTable,
        tail: OutputTail,
    ) -> None:
        """Create the executor in the main thread, whose handler for SIGINT is replaced."""
        self._row = row
        self._definitions: dict[int, LoadedFunction] = {}
        self._todo: deque[ReceivedTask | Calls] = deque()
        self._calls: Calls | None = None  # being run
        self._overlap: Overlap | None = None
        self._slice: SliceRun | None = None
        self._split_by_bulk = False
        self._last_done = 0
        self._flushed = 0.0
        self._by_bulk = -BULK_ARRIVES  # time when results last went by bulk
        self._stopping = False
        self._current = self._target = 0
        self._missed: set[int] = set()
        self._main_thread = threading.get_ident()
        self.socket_turn = threading.Lock()
        self._store = store
        self._ref_table = ref_table
        self._shelf = DroneStore(name)
        self._keeping: set[int] = set()  # overlapped tasks whose values are to stay in this drone
        self._outcomes = ResultBuffer(row, snapshot, store, ref_table, tail, self._shelf)
        signal.signal(signal.SIGINT, self._on_sigint)
        _runners[:] = [self]  # a drone from which this one was forked has nothing left to do

    # -- implemented by the drone of each engine ---------------------------------------------------

    def _send(self, frames: list[bytes]) -> bool:
        """Send a message, holding `socket_turn`. Return True if no later one can overtake."""
        raise NotImplementedError

    def _send_by_bulk(self, frames: list[bytes]) -> None:
        """Send a message as `_send` does, behind all bulk messages before."""
        raise NotImplementedError

    def _listen(self, wait: bool) -> None:
        """In the main thread: handle the messages that have come; if `wait`, first wait for one."""
        raise NotImplementedError

    def _ring(self) -> None:
        """Wake the main thread, if it waits, to send or check something. Any thread may call it."""

    def _overlaps(self, overlap: Overlap) -> None:
        """Called once, before the first task that runs beside others."""
        raise NotImplementedError

    # -- a child that a task has forked ------------------------------------------------------------

    def stay_behind(self) -> None:
        """Make this object do nothing. Its connections were closed by `parent_death`.

        The queues are emptied, so that a slice ends with the call that has forked, and no call is
        begun in the child too.
        """
        self._todo.clear()
        if self._calls is not None:
            self._calls.queue.clear()
        if self._slice is not None:
            self._slice.calls.clear()

    # -- the main thread ---------------------------------------------------------------------------

    def _take_next(self) -> bool:
        """Run the next task; return False if the control thread has just returned it."""
        try:
            task = self._todo.popleft()
        except IndexError:
            return False
        if tagged() and not task.definition.relays():  # a client's tag stays on between its calls
            tag("")
        self._run(task)
        return True  # the task's objects are freed before the thread waits for more

    def _run(self, task: ReceivedTask | Calls) -> None:
        if isinstance(task, Calls):
            self._calls = task
            try:
                self._do_calls(task)
            finally:
                self._calls = None
        elif task.definition.overlaps:
            self._begin(task)
        else:
            self._do(task)

    def _do_calls(self, calls: Calls) -> None:
        """Run many tasks as `_do` does; values that are small and immutable are sent together."""
        take, call, start = calls.queue.popleft, calls.definition.call_with, self._row.start
        outcomes = self._outcomes
        note_value = outcomes.note_value
        finished = monotonic()
        while True:
            try:
                number, args = take()
            except IndexError:
                return
            start(number)
            started = finished
            try:
                try:
                    self._current = number
                    if number in self._missed:
                        raise KeyboardInterrupt("interrupted by the controller")
                    value = call(args)
                    kind = type(value)
                    together = kind in SMALL or (
                        (kind is str or kind is bytes) and len(value) < SHORT
                    )
                    if not together:
                        payload = outcomes.pack(value)
                        value = None
                finally:
                    self._current = 0
            except BaseException as error:
                self._current = 0
                finished = monotonic()
                outcomes.note(number, ERROR, started, finished, outcomes.pack_error(error))
                kept = outcomes.keep()
            else:
                finished = monotonic()
                if together:
                    kept = note_value(number, started, finished, value)
                else:
                    outcomes.note(number, VALUE, started, finished, payload)
                    kept = outcomes.keep()
            self._last_done = number
            if not kept or finished - self._flushed > FLUSH_AFTER:
                self._flush()
                self._listen(wait=False)
                finished = monotonic()

    def _do(self, task: ReceivedTask) -> None:
        outcomes = self._outcomes
        number = task.number
        self._row.start(number)
        status = VALUE
        payload: bytes | Serialized = b""
        definition = task.definition
        used = 0.0 if definition.brief else process_time()
        started = monotonic()
        try:
            try:
                self._current = number
                if number in self._missed:
                    raise KeyboardInterrupt("interrupted by the controller")
                if task.kind == CALL_SLICE:
                    self._slice = SliceRun(
                        number, task.payload, task.definition.function, outcomes.pack
                    )
                    self._slice.run()
                else:
                    value = task.definition.call(task.kind, task.payload)
                    if task.keeps:
                        payload = self._shelf.keep(number, value)
                    elif value is not None:
                        payload = outcomes.pack(value)
                    del value
            finally:
                self._current = 0
        except BaseException as error:
            self._current = 0
            status, payload = ERROR, outcomes.pack_error(error)
            if task.keeps:  # interrupted while the value was stored
                self._shelf.drop(number)
        finished = monotonic()
        brief = finished - started < BRIEF
        if not brief and not definition.brief:
            trail.costs.append((number, round((process_time() - used) * 1e6)))
        definition.brief = brief
        head = b""
        if self._slice is not None:
            status, head, payload = self._end_slice(self._slice)
        outcomes.note(number, status, started, finished, payload, head)
        self._last_done = number
        late = finished - self._flushed > (
            FLUSH_AFTER if task.kind != CALL_SLICE else FLUSH_SLICE_AFTER
        )
        # The last part of a slice must not outlive this drone if the part before may not.
        kept = not self._split_by_bulk and outcomes.keep()
        if not kept or (late and self._todo):
            self._flush()
            self._listen(wait=False)

    def _end_slice(self, run: SliceRun) -> tuple[int, bytes, bytes | Serialized]:
        """Return status, head and payload for the unsent part of a slice.

        The control thread may have sent another part.
        """
        error = None
        if run.error is not None:
            with self.socket_turn:
                run.blame()
            if run.error is not None:
                error = self._outcomes.pack_error(run.error)
        with self.socket_turn:
            self._slice = None
            answers = pack_answers(run.done[run.sent :], run.packed, error, self._store)
            rest = run.cut()
        done = len(run.done) - run.sent + (error is not None)
        return SPLIT, split_head(done, rest, ENDED if error is None else FAILED), answers

    def _send_what_waits(self) -> None:
        """Send the outcomes of the tasks before the long one.

        Called by the control thread, holding `socket_turn`.
        """
        self._send_outcomes()

    def _send_outcomes(self) -> bool:
        """Send the collected outcomes. Return True if they went by the fast transport.

        If a part of a slice went by bulk, these go by bulk too, because the last part, which must
        not overtake it, may be among them.
        """
        frames = self._outcomes.take()
        if not frames:
            return False
        if self._split_by_bulk:
            self._send_by_bulk(frames)
        elif self._send(frames):
            return True
        self._by_bulk = monotonic()
        return False

    def _cut_slice(self) -> None:
        """Cut a slice that takes too long. See slices.py.

        Called by the control thread, holding `socket_turn`.
        """
        run = self._slice
        if run is None or run.was_cut:
            return
        rest = run.cut()
        run.was_cut = True
        run.sent = len(run.done)
        if rest or run.sent:
            answers = pack_answers(run.done[: run.sent], run.packed, None, self._store)
            head = split_head(run.sent, rest, RUNNING)
            # Before the answers, which may contain these handles.
            given = self._outcomes.given(run.number)
            entry, large = self._outcomes.entry(
                run.number, SPLIT, run.started, monotonic(), answers, head
            )
            self._split_by_bulk = not self._send(pack_outcomes([*given, entry], large))

    def _begin(self, task: ReceivedTask) -> None:
        """Start a task that runs beside others."""
        overlap = self._overlap
        if overlap is None:
            overlap = self._overlap = Overlap()
            self._overlaps(overlap)
        self._row.start(task.number)
        started = monotonic()
        try:
            if task.number in self._missed:
                raise KeyboardInterrupt("interrupted by the controller")
            if task.keeps:
                self._keeping.add(task.number)
            overlap.begin(task.number, task.definition.begin(task.kind, task.payload))
            if self._is_missed(task.number):  # since the look before
                overlap.interrupt({task.number})
        except BaseException as error:
            self._keeping.discard(task.number)
            self._note_overlapped(
                task.number, ERROR, started, monotonic(), self._outcomes.pack_error(error)
            )

    def _take_ended(self, overlap: Overlap) -> None:
        for number, thread, started, finished in overlap.take_ended():
            status = VALUE
            payload: bytes | Serialized = b""
            try:
                value = thread.result()
                if number in self._keeping:
                    payload = self._shelf.keep(number, value)
                elif value is not None:
                    payload = self._outcomes.pack(value)
            except BaseException as error:
                status, payload = ERROR, self._outcomes.pack_error(error)
            finally:
                del thread  # no cycle through the error's traceback, which would keep the arguments
            self._keeping.discard(number)
            self._note_overlapped(number, status, started, finished, payload)
            if not overlap.running:
                self._last_done = number

    def _note_overlapped(
        self, number: int, status: int, started: float, finished: float, payload: bytes | Serialized
    ) -> None:
        self._outcomes.note(number, status, started, finished, payload)
        if not self._outcomes.keep():
            self._flush()

    def _flush(self) -> None:
        with self.socket_turn:
            by_lane = self._send_outcomes()
            self._flushed = monotonic()
            self._split_by_bulk = False
            # With overlapped tasks, `_last_done` is the last task before them.
            self._row.sent(
                self._last_done, by_lane and self._flushed - self._by_bulk >= BULK_ARRIVES
            )

    def pack_wanted(self) -> None:
        """Send the kept values that other processes have requested.

        Called by the main thread between tasks, or by the control thread.
        """
        outcomes, wanted = self._outcomes, self._shelf.wanted
        while wanted:
            try:
                number = wanted.popleft()
            except IndexError:  # the other thread has just taken it
                return
            status = PACKED
            payload: bytes | Serialized
            try:
                here.asked_for = True
                payload = outcomes.pack(self._shelf.value(number))
            except BaseException as error:
                status, payload = NOT_PACKED, outcomes.pack_error(error)
            finally:
                here.asked_for = False
            entry, large = outcomes.entry(number, status, 0.0, 0.0, payload)
            with self.socket_turn:
                self._send(pack_outcomes([entry], large))
            # A bulk send may have consumed the report of new messages, for which the main thread
            # waits.
            self._ring()

    # -- either thread, holding `socket_turn` ------------------------------------------------------

    def _hear(self, frames: list[bytes]) -> None:
        try:
            self._HEARD[head_type(frames)](self, frames)
        except (Malformed, KeyError) as wrong:
            dropped(wrong)

    def _hear_work(self, frames: list[bytes]) -> None:
        definitions, todo = self._definitions, self._todo
        for number, kind, definition, payload in unpack_work(frames):
            if kind & SHARED:
                kind &= ~SHARED
                payload = self._ref_table.arrived(payload)
            if kind in DEFINES:
                definitions[number] = define(kind, payload)
            elif kind == FORGET:
                definitions.pop(number, None)
            elif kind == CALLS and definition in definitions:
                todo.append(Calls(definitions[definition], *_calls(payload)))
            elif kind == CAME_BACK:
                self._ref_table.came_back(number)
            elif kind == BRING:
                self._shelf.bring(number, payload)
            elif kind == FETCH:
                self._shelf.wanted.append(number)
            elif kind == DROP:
                self._shelf.drop(number, definition)
            elif definition in definitions:
                todo.append(ReceivedTask(number, kind, definitions[definition], payload))
            else:
                self._not_defined(definition, _calls(payload)[0] if kind == CALLS else [number])

    def _not_defined(self, definition: int, unknown: list[int]) -> None:
        """Report an error for calls of a function that is not known here."""
        bug = RuntimeError(f"a bug in polycephaly: definition {definition} is not known here")
        error = self._outcomes.pack_error(bug)
        self._send(
            pack_outcomes([pack_outcome(each, ERROR, 0.0, 0.0, error, b"") for each in unknown])
        )

    def _hear_recall(self, frames: list[bytes]) -> None:
        returned: list[int] = []
        with suppress(IndexError):
            while True:
                task = self._todo.pop()
                if isinstance(task, Calls):
                    returned += task.take_from_end()
                else:
                    returned.append(task.number)
        if self._calls is not None:
            returned += self._calls.take_from_end()
        self._send(pack_numbers(RETURNED, returned[::-1]))

    def _hear_cancel(self, frames: list[bytes]) -> None:
        targets = set(numbers(frames))
        withdrawn = []
        tasks = list(self._todo)
        if self._calls is not None:
            tasks.append(self._calls)
        for task in tasks:
            if isinstance(task, Calls):
                withdrawn += task.withdraw(targets)
            elif task.number in targets:
                with suppress(ValueError):  # the main thread has just begun it
                    self._todo.remove(task)
                    withdrawn.append(task.number)
        targets -= set(withdrawn)
        if withdrawn:
            self._send(
                pack_outcomes(
                    [pack_outcome(each, WITHDRAWN, 0.0, 0.0, b"", b"") for each in withdrawn]
                )
            )
        self._missed |= targets - {0}
        current, overlap = self._current, self._overlap
        if overlap is not None:
            begun = {each for each in targets if each in overlap.running and self._is_missed(each)}
            overlap.interrupt(begun | (targets & {0}))
        if current and (current in targets or 0 in targets):
            self._missed.discard(current)
            self._target = current
            signal.pthread_kill(self._main_thread, signal.SIGINT)

    def _is_missed(self, number: int) -> bool:
        """Return True to exactly one of the callers that ask; that one interrupts the task."""
        try:
            self._missed.remove(number)
        except KeyError:
            return False
        return True

    def _hear_frames(self, frames: list[bytes]) -> None:
        asked = numbers(frames)
        if len(asked) != 1:
            raise Malformed(f"a request for frames with {len(asked)} numbers")
        overlapped = {} if self._overlap is None else dict(self._overlap.running)
        self._send(pack_frames(asked[0], frames_now(self._main_thread, self._current, overlapped)))

    def _hear_stop(self, frames: list[bytes]) -> None:
        self._stopping = True

    _HEARD: dict[bytes, Callable[[Any, list[bytes]], None]] = {  # noqa: RUF012 - a table, never changed
        WORK: _hear_work,
        RECALL: _hear_recall,
        CANCEL: _hear_cancel,
        FRAMES: _hear_frames,
        STOP: _hear_stop,
    }

    def _on_sigint(self, signum: int, frame: Any) -> None:
        if self._target and self._target == self._current:
            self._target = 0
            raise KeyboardInterrupt("interrupted by the controller")

    @property
    def current(self) -> int:
        """The number of the running task; 0: none; negative: between tasks that came together."""
        return self._current or (-1 if self._calls is not None else 0)

    def beat(self) -> None:
        self._row.beat()
        beside = self._overlap is not None and bool(self._overlap.running)
        if beside or self._main_thread in promise.waiting:
            green = sys.modules.get("polycephaly.green.scheduler")
            self._row.steps(1 if green is None else 1 + green.scheduler.bouts)
        else:
            self._row.steps(0)

    def has_ear(self, thread: int) -> None:
        self._row.ear(thread)


_runners: list[DroneExecutor] = []


def _stay_behind() -> None:
    """In a forked child: disable the executor.

    Exit handlers registered before belong to the drone. Signals are the child's own.
    """
    for runner in _runners:
        runner.stay_behind()
        stay_behind()
        leave_exit_handlers()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _runners.clear()


os.register_at_fork(after_in_child=_stay_behind)


def _calls(payload: Any) -> tuple[list[int], list[tuple[Any, ...]]]:
    numbers, calls = unpack_together(payload, 2)
    if set(map(type, calls)) != {tuple} or min(numbers) < 0 or max(numbers) >= 1 << 64:
        raise Malformed("calls that are none")
    return numbers, calls


def dropped(wrong: Exception) -> None:
    log.warning("a malformed message was dropped: %s", wrong)
