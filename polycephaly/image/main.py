"""A drone's life: it takes work in batches, runs it in its main thread, and sends back what came of it.

    hub ──WORK──> sockets ─> todo ──main thread: run──> outcomes ──RESULTS──> hub
                    └──> the ear (a thread): hears while the main thread is busy
                            RECALL: gives back what is in todo      CANCEL: withdraws, or interrupts

The main thread reads the sockets (the lane, and ZeroMQ's) itself while it is idle or between tasks, so short
work crosses no thread. Only when one task has run for a *window* does the ear begin to listen. Whoever touches
the sockets holds `socket_turn`. `todo` is a deque: main takes from its left, the ear from its right or the
middle, and each of these steps is atomic, so a task is either run or given back, never both.

Interrupts. The ear names its target and signals the main thread; the handler raises only while `_current` is
that target, and clears it, so it raises once. `_current` is set inside the `try` that reports errors: an
interrupt that comes as the task ends is reported as the task's error, and one that comes later is ignored.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, process_time
from typing import Any

import zmq

from ..launch.page import RunningPage
from ..launch.zygote import Nest, Order
from ..timeline.trail import trail
from ..wire import endpoint
from ..wire.arena import Arena
from ..wire.capture import MainSnapshot
from ..wire.lane import Lane
from ..wire.loans import Arrived, Ledger, Parcel
from ..wire.messages import (
    CALL_SLICE,
    CALLS,
    CAME_BACK,
    CANCEL,
    DEFINE_CALLABLE,
    DEFINE_CODE,
    DEFINE_OVERLAPPING,
    ERROR,
    FORGET,
    HELLO,
    OPEN,
    PROTOCOL,
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
    pack_numbers,
    pack_outcome,
    pack_outcomes,
    unpack_together,
    unpack_work,
)  # fmt: skip
from ..wire.slices import ENDED, FAILED, RUNNING, SHORT, SMALL, pack_answers, split_head
from ..wire.store import IDLE, Store
from .child import become_child
from .console import open_console, tag, tagged
from .definitions import Definition, define
from .ear import BEAT, Ear
from .logs import send_logs_home
from .notebook import leave_the_kernel
from .outcomes import Outcomes
from .overlap import Overlap
from .slices import Slice
from .tasks import Calls, Task

__all__ = ["hatch"]

log = logging.getLogger(__name__)

BRIEF = 0.001  # seconds: a task of which it is not worth while to measure the processor time
FLUSH_AFTER = 0.001  # seconds that an outcome may wait for others to go along
FLUSH_SLICE_AFTER = 0.0002  # seconds; so that many results are not all unpickled at once


def hatch(
    order: Order, nest: Nest, lane: socket.socket, page: RunningPage, arena: Arena, snapshot: MainSnapshot
) -> None:
    """The drone's main function: serves until told to stop."""
    endpoint.home_of_parent = nest.home
    become_child(order.name, nest.heirloom)
    drone = Drone(order, nest, lane, page, arena, snapshot)
    try:
        drone.serve()
    finally:
        drone.close()


class Drone:
    def __init__(
        self, order: Order, nest: Nest, lane: socket.socket, page: RunningPage, arena: Arena, snapshot: MainSnapshot
    ) -> None:
        tail = open_console()
        send_logs_home()
        leave_the_kernel()
        faulthandler.enable(file=2)
        self._row = page.row(order.slot)
        self._definitions: dict[int, Definition] = {}
        self._todo: deque[Task | Calls] = deque()
        self._calls: Calls | None = None  # being run
        self._overlap: Overlap | None = None
        self._slice: Slice | None = None
        self._split_by_bulk = False
        self._last_done = 0
        self._flushed = 0.0
        self._stopping = False
        self._current = self._target = 0
        self._missed: set[int] = set()
        self._main_thread = threading.get_ident()
        signal.signal(signal.SIGINT, self._on_sigint)
        self._home, self._identity = nest.home, bytes.fromhex(order.identity)
        self._lane = Lane(lane)
        self._bulk: zmq.Socket[bytes] | None = None
        self._bulk_may_hide = self._waiting = False
        self.socket_turn = threading.Lock()
        self._news = select.epoll()
        self._news.register(self._lane.fileno(), select.EPOLLIN)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._news.register(self._bell, select.EPOLLIN)
        self._store = Store(arena, order.number)
        self._ledger = Ledger(arena, 0, self._ring)
        self._outcomes = Outcomes(self._row, snapshot, self._store, self._ledger, tail)
        self._hello = pack_numbers(HELLO, (PROTOCOL, os.getpid()))
        self._send(self._hello)
        self._ear = Ear(self)

    # -- the main thread --------------------------------------------------------------------------

    def serve(self) -> None:
        todo = self._todo
        while True:
            overlap = self._overlap
            if overlap is not None:
                self._take_ended(overlap)
            if not todo:
                self._flush()
                if self._may_end():
                    return
                self._listen(wait=not todo)
                continue
            self._ear.wake()
            try:
                task = todo.popleft()
            except IndexError:  # the ear has just given it back
                continue
            if tagged() and not task.definition.relays():  # a client's tag stays on between its calls
                tag("")
            self._run(task)
            del task  # what it held is not kept while waiting for more

    def _may_end(self) -> bool:
        return self._stopping and not self._todo and not (self._overlap is not None and self._overlap.running)

    def _run(self, task: Task | Calls) -> None:
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
        """What `_do` does, for many; values that are small and immutable are sent together."""
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
                    together = kind in SMALL or ((kind is str or kind is bytes) and len(value) < SHORT)
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

    def _do(self, task: Task) -> None:
        outcomes = self._outcomes
        number = task.number
        self._row.start(number)
        status = VALUE
        payload: bytes | Parcel = b""
        definition = task.definition
        used = 0.0 if definition.brief else process_time()
        started = monotonic()
        try:
            try:
                self._current = number
                if number in self._missed:
                    raise KeyboardInterrupt("interrupted by the controller")
                if task.kind == CALL_SLICE:
                    self._slice = Slice(number, task.payload, task.definition.function, outcomes.pack)
                    self._slice.run()
                else:
                    value = task.definition.call(task.kind, task.payload)
                    if value is not None:
                        payload = outcomes.pack(value)
                        del value
            finally:
                self._current = 0
        except BaseException as error:
            self._current = 0
            status, payload = ERROR, outcomes.pack_error(error)
        finished = monotonic()
        brief = finished - started < BRIEF
        if not brief and not definition.brief:
            trail.work.append((number, round((process_time() - used) * 1e6)))
        definition.brief = brief
        head = b""
        if self._slice is not None:
            status, head, payload = self._end_slice(self._slice)
        outcomes.note(number, status, started, finished, payload, head)
        self._last_done = number
        late = finished - self._flushed > (FLUSH_AFTER if task.kind != CALL_SLICE else FLUSH_SLICE_AFTER)
        if not outcomes.keep() or (late and self._todo):
            self._flush()
            self._listen(wait=False)

    def _end_slice(self, run: Slice) -> tuple[int, bytes, bytes | Parcel]:
        """What came of it, as far as the ear has not sent it: status, head and payload."""
        error = None if run.error is None else self._outcomes.pack_error(run.error)
        with self.socket_turn:
            self._slice = None
            answers = pack_answers(run.done[run.sent :], run.packed, error, self._store)
            rest = run.cut()
        done = len(run.done) - run.sent + (error is not None)
        return SPLIT, split_head(done, rest, ENDED if error is None else FAILED), answers

    def _send_what_waits(self) -> None:
        """In the ear, holding the socket's turn: what was done before the task that takes so long."""
        self._send_outcomes()

    def _send_outcomes(self) -> None:
        """By bulk, if a part of a slice went there, which the last part must not pass: it may be among these."""
        frames = self._outcomes.take()
        if frames and self._split_by_bulk:
            self._send_by_bulk(frames)
        elif frames:
            self._send(frames)

    def _cut_slice(self) -> None:
        """In the ear, holding the socket's turn: a slice takes longer than it should. See slices.py."""
        run = self._slice
        if run is None or run.was_cut:
            return
        rest = run.cut()
        run.was_cut = True
        run.sent = len(run.done)
        if rest or run.sent:
            answers = pack_answers(run.done[: run.sent], run.packed, None, self._store)
            head = split_head(run.sent, rest, RUNNING)
            entry, large = self._outcomes.entry(run.number, SPLIT, run.started, monotonic(), answers, head)
            self._split_by_bulk = not self._send(pack_outcomes([entry], large))

    def _begin(self, task: Task) -> None:
        """A task that is run beside others."""
        overlap = self._overlap
        if overlap is None:
            overlap = self._overlap = Overlap()
            self._news.register(overlap.bell, select.EPOLLIN)
        self._row.start(task.number)
        started = monotonic()
        try:
            if task.number in self._missed:
                raise KeyboardInterrupt("interrupted by the controller")
            overlap.begin(task.number, task.definition.begin(task.kind, task.payload))
        except BaseException as error:
            self._note_overlapped(task.number, ERROR, started, monotonic(), self._outcomes.pack_error(error))

    def _take_ended(self, overlap: Overlap) -> None:
        for number, thread, started, finished in overlap.take_ended():
            status = VALUE
            payload: bytes | Parcel = b""
            try:
                value = thread.result()
                if value is not None:
                    payload = self._outcomes.pack(value)
            except BaseException as error:
                status, payload = ERROR, self._outcomes.pack_error(error)
            self._note_overlapped(number, status, started, finished, payload)
            if not overlap.running:
                self._last_done = number

    def _note_overlapped(
        self, number: int, status: int, started: float, finished: float, payload: bytes | Parcel
    ) -> None:
        self._outcomes.note(number, status, started, finished, payload)
        if not self._outcomes.keep():
            self._flush()

    def _flush(self) -> None:
        with self.socket_turn:
            self._send_outcomes()
            self._split_by_bulk = False
            self._row.sent(self._last_done)  # with overlapped tasks: of those before them
        self._flushed = monotonic()

    def _ring(self) -> None:
        """In any thread: a loan is over. While the main thread waits it has to be woken; else it looks before that."""
        if self._waiting:
            os.eventfd_write(self._bell, 1)

    def _listen(self, wait: bool) -> None:
        """Hears what has come; with `wait`, after waiting for something.

        What the ear heard before `_waiting` was set is seen here, under the same lock; after that it hears
        nothing, so nothing can come to `todo` behind the back of a main thread that waits.
        """
        if wait:
            with self.socket_turn:
                if self._todo or self._may_end():
                    return
                if self._bulk_may_hide:
                    self.hear_all()
                    return
                self._missed.clear()  # nothing is between
                self._waiting = True
            if not self._ledger.returned:  # looked at after `_waiting` was set: see `_ring`
                self._sleep()
        with self.socket_turn:
            self._waiting = False
            self.hear_all()

    def _sleep(self) -> None:
        """Until there is news. Warm memory is given back when nothing comes for a while. What is overlapped runs on
        meanwhile, and the drone shows that it lives."""
        news: list[tuple[int, int]] = []
        overlap = self._overlap
        while not news and ((beside := overlap is not None and bool(overlap.running)) or self._store.is_untidy()):
            news = self._news.poll(BEAT if beside else IDLE)
            self._row.beat()
            if not news:
                self._store.tidy()
        for fd, _ in news or self._news.poll():
            if fd == self._bell:
                os.eventfd_read(fd)

    def close(self) -> None:
        """Runs the exit handlers registered here, and delivers what is in the socket."""
        with suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        with self.socket_turn:
            self._waiting = True  # the ear leaves them alone from now on
            if self._bulk is not None:
                self._bulk.close()
                self._context.term()

    # -- either thread, holding the socket's turn ---------------------------------------------------

    def hear_all(self) -> None:
        """Hears all that has come. The lane first, also before each bulk message: see wire/lane.py."""
        self._hear_lane()
        bulk = self._bulk
        self._bulk_may_hide = False
        while bulk is not None and endpoint.has_news(bulk):
            frames = bulk.recv_multipart(zmq.NOBLOCK)
            self._hear_lane()
            self._hear(frames)

    def _hear_lane(self) -> None:
        while True:
            try:
                frames = self._lane.receive()
            except Malformed as wrong:
                _dropped(wrong)
                continue
            if frames is None:
                return
            if not frames:  # the hub has let go of us
                os._exit(0)
            self._hear(frames)

    def _send(self, frames: list[bytes]) -> bool:
        """Whether it went by the lane."""
        if self._lane.send(frames):
            return True
        self._send_by_bulk(frames)
        return False

    def _send_by_bulk(self, frames: list[bytes]) -> None:
        self.open_bulk().send_multipart(frames)
        # Its descriptor tells of news only, and this call may have taken note of some: look before waiting.
        self._bulk_may_hide = True

    def open_bulk(self) -> zmq.Socket[bytes]:
        if self._bulk is None:
            self._context, self._bulk = endpoint.connect(self._home, self._identity)
            self._bulk.send_multipart(self._hello)
            self._bulk_may_hide = True
            self._news.register(endpoint.news_fd(self._bulk), select.EPOLLIN)
        return self._bulk

    def _hear(self, frames: list[bytes]) -> None:
        try:
            self._HEARD[head_type(frames)](self, frames)
        except (Malformed, KeyError) as wrong:
            _dropped(wrong)

    def _hear_work(self, frames: list[bytes]) -> None:
        definitions, todo = self._definitions, self._todo
        for number, kind, definition, payload in unpack_work(frames):
            if kind & SHARED:
                kind &= ~SHARED
                payload = Arrived(payload, self._ledger)
            if kind in (DEFINE_CALLABLE, DEFINE_CODE, DEFINE_OVERLAPPING):
                definitions[number] = define(kind, payload)
            elif kind == FORGET:
                definitions.pop(number, None)
            elif kind == CALLS and definition in definitions:
                todo.append(Calls(definitions[definition], *_calls(payload)))
            elif kind == CAME_BACK:
                self._ledger.came_back(number)
            elif definition in definitions:
                todo.append(Task(number, kind, definitions[definition], payload))
            else:
                bug = RuntimeError(f"a bug in polycephaly: definition {definition} is not known here")
                error = self._outcomes.pack_error(bug)
                unknown = _calls(payload)[0] if kind == CALLS else [number]
                self._send(pack_outcomes([pack_outcome(each, ERROR, 0.0, 0.0, error, b"") for each in unknown]))

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
            self._send(pack_outcomes([pack_outcome(each, WITHDRAWN, 0.0, 0.0, b"", b"") for each in withdrawn]))
        current = self._current
        self._missed |= targets - {0, current}  # one of these may be just between `todo` and `_current`
        if self._overlap is not None:
            self._overlap.interrupt(targets)
        if current and (current in targets or 0 in targets):
            self._target = current
            signal.pthread_kill(self._main_thread, signal.SIGINT)

    def _hear_open(self, frames: list[bytes]) -> None:
        self.open_bulk()

    def _hear_stop(self, frames: list[bytes]) -> None:
        self._stopping = True

    _HEARD: dict[bytes, Callable[[Drone, list[bytes]], None]] = {  # noqa: RUF012 - a table, never changed
        WORK: _hear_work,
        RECALL: _hear_recall,
        CANCEL: _hear_cancel,
        OPEN: _hear_open,
        STOP: _hear_stop,
    }

    def _on_sigint(self, signum: int, frame: Any) -> None:
        if self._target and self._target == self._current:
            self._target = 0
            raise KeyboardInterrupt("interrupted by the controller")

    # -- what the ear looks at ----------------------------------------------------------------------

    @property
    def current(self) -> int:
        """What is run; 0: nothing; negative: it is between two tasks that came together."""
        return self._current or (-1 if self._calls is not None else 0)

    def hear_if_free(self) -> None:
        if self.socket_turn.acquire(blocking=False):
            try:
                if not self._waiting:
                    self._send_what_waits()
                    self._cut_slice()
                    self.hear_all()
            finally:
                self.socket_turn.release()

    def beat(self) -> None:
        self._row.beat()

    @property
    def news_fd(self) -> int:
        return self._news.fileno()


def _calls(payload: Any) -> tuple[list[int], list[tuple[Any, ...]]]:
    numbers, calls = unpack_together(payload, 2)
    if set(map(type, calls)) != {tuple} or min(numbers) < 0 or max(numbers) >= 1 << 64:
        raise Malformed("calls that are none")
    return numbers, calls


def _dropped(wrong: Exception) -> None:
    log.warning("a malformed message was dropped: %s", wrong)
