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
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pickle import dumps, loads
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any

import zmq

from ..launch import safepoint
from ..launch.page import RunningPage
from ..launch.zygote import Nest, Order
from ..wire import endpoint
from ..wire.arena import IDLE, Arena, Store
from ..wire.capture import BULKY, LARGE_BUFFER, MainSnapshot, capture, pack
from ..wire.exceptions import pack_exception
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
    LARGE,
    LARGE_FROM,
    LOAN_OVER,
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
    pack_values,
    unpack_work,
)  # fmt: skip
from ..wire.slices import SHORT, SMALL, pack_answers, split_head
from .console import open_console
from .definitions import Definition, define
from .overlap import Overlap
from .slices import Slice

__all__ = ["hatch"]

FLUSH_AFTER = 0.001  # seconds that an outcome may wait for others to go along
FLUSH_SLICE_AFTER = 0.0002  # seconds; so that many results are not all unpickled at once
WINDOW = 0.005  # seconds that a task runs before the ear begins to listen
LOOK_AGAIN = 0.1  # seconds between its looks at whether the same task still runs, when nothing is heard


def hatch(
    order: Order, nest: Nest, lane: socket.socket, page: RunningPage, arena: Arena, snapshot: MainSnapshot
) -> None:
    """The drone's main function: serves until told to stop."""
    endpoint.home_of_parent = nest.home
    drone = _Drone(order, nest, lane, page, arena, snapshot)
    try:
        drone.serve()
    finally:
        drone.close()


class _Task:
    __slots__ = ("definition", "kind", "number", "payload")

    def __init__(self, number: int, kind: int, definition: Definition, payload: Any) -> None:
        self.number = number
        self.kind = kind
        self.definition = definition
        self.payload = payload


class _Calls:
    """Several tasks of one definition, which came together. The main thread takes them from the left, the ear what it
    gives back from the right or the middle."""

    __slots__ = ("definition", "queue")

    def __init__(self, definition: Definition, numbers: list[int], calls: list[tuple[Any, ...]]) -> None:
        self.definition = definition
        self.queue: deque[tuple[int, tuple[Any, ...]]] = deque(zip(numbers, calls, strict=True))


class _Drone:
    def __init__(
        self, order: Order, nest: Nest, lane: socket.socket, page: RunningPage, arena: Arena, snapshot: MainSnapshot
    ) -> None:
        self._tail = open_console()
        faulthandler.enable(file=2)
        self._snapshot = snapshot
        self._row = page.row(order.slot)
        self._definitions: dict[int, Definition] = {}
        self._todo: deque[_Task | _Calls] = deque()
        self._calls: _Calls | None = None  # being run
        self._values = _Values()
        self._outcomes: list[bytes] = []
        self._large: list[bytes] = []
        self._overlap: Overlap | None = None
        self._slice: Slice | None = None
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
        self._ledger = Ledger(arena, self._ring)
        self._hello = pack_numbers(HELLO, (PROTOCOL, os.getpid()))
        self._send(self._hello)
        self._ear = _Ear(self)

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
            self._run(task)
            del task  # what it held is not kept while waiting for more

    def _may_end(self) -> bool:
        return self._stopping and not self._todo and not (self._overlap is not None and self._overlap.running)

    def _run(self, task: _Task | _Calls) -> None:
        if isinstance(task, _Calls):
            self._calls = task
            try:
                self._do_calls(task)
            finally:
                self._calls = None
        elif task.definition.overlaps:
            self._begin(task)
        else:
            self._do(task)

    def _do_calls(self, calls: _Calls) -> None:
        """What `_do` does, for many; values that are small and immutable are sent together."""
        take, call, start, keep = calls.queue.popleft, calls.definition.call_with, self._row.start, self._row.keep
        note, tail = self._values.note, self._tail
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
                    payload: bytes | Parcel = b""
                    if not together:
                        payload = self._capture_result(value)
                        value = None
                finally:
                    self._current = 0
            except BaseException as error:
                self._current = 0
                together, value, payload = False, None, self._pack(error)
                finished = monotonic()
                large = self._note_outcome(number, ERROR, started, finished, payload)
                kept = keep(self._outcomes[-1])
            else:
                finished = monotonic()
                if together and not tail.pieces:
                    large = False
                    note(number, started, finished, value)
                    pickled = b"" if value is None else dumps(value, 5)
                    kept = keep(pack_outcome(number, VALUE, started, finished, pickled, b""))
                else:
                    if together and value is not None:
                        payload = dumps(value, 5)
                    large = self._note_outcome(number, VALUE, started, finished, payload)
                    kept = keep(self._outcomes[-1])
            self._last_done = number
            if large or not kept or finished - self._flushed > FLUSH_AFTER:
                self._flush()
                self._listen(wait=False)
                finished = monotonic()

    def _do(self, task: _Task) -> None:
        number = task.number
        self._row.start(number)
        status = VALUE
        payload: bytes | Parcel = b""
        started = monotonic()
        try:
            try:
                self._current = number
                if number in self._missed:
                    raise KeyboardInterrupt("interrupted by the controller")
                if task.kind == CALL_SLICE:
                    self._slice = Slice(number, task.payload, task.definition.function, self._capture_result)
                    self._slice.run()
                else:
                    value = task.definition.call(task.kind, task.payload)
                    if value is not None:
                        payload = self._capture_result(value)
                        del value
            finally:
                self._current = 0
        except BaseException as error:
            self._current = 0
            status, payload = ERROR, self._pack(error)
        finished = monotonic()
        head = b""
        if self._slice is not None:
            status, head, payload = self._end_slice(self._slice)
        large = self._note_outcome(number, status, started, finished, payload, head)
        self._last_done = number
        late = finished - self._flushed > (FLUSH_AFTER if task.kind != CALL_SLICE else FLUSH_SLICE_AFTER)
        if self._todo and (large or late or not self._row.keep(self._outcomes[-1])):
            self._flush()
            self._listen(wait=False)

    def _note_outcome(
        self, number: int, status: int, started: float, finished: float, payload: bytes | Parcel, head: bytes = b""
    ) -> bool:
        """To be sent with the next flush. Whether it is a large one, for the socket."""
        entry, large = self._outcome(number, status, started, finished, payload, head)
        self._outcomes.append(entry)
        self._large += large
        return bool(large)

    def _outcome(
        self, number: int, status: int, started: float, finished: float, payload: bytes | Parcel, head: bytes = b""
    ) -> tuple[bytes, list[bytes]]:
        """Its entry in a RESULTS message, and what goes beside that."""
        if isinstance(payload, Parcel):
            status, payload = status | SHARED, payload.waybill(self._ledger)
        if head:
            payload = head + payload
        large = [payload] if len(payload) >= LARGE_FROM else []
        if large:
            status, payload = status | LARGE, b""
        return pack_outcome(number, status, started, finished, payload, self._tail.take()), large

    def _end_slice(self, run: Slice) -> tuple[int, bytes, bytes | Parcel]:
        """What came of it, as far as the ear has not sent it."""
        error = None if run.error is None else self._pack(run.error)
        with self.socket_turn:
            self._slice = None
            answers = pack_answers(run.done[run.sent :], run.packed, error, self._store)
            rest = run.cut() if error is None else 0
        if rest:
            return SPLIT, split_head(len(run.done), rest, running=False), answers
        return VALUE, b"", answers

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
            head = split_head(run.sent, rest, running=True)
            entry, large = self._outcome(run.number, SPLIT, run.started, monotonic(), answers, head)
            self._send(pack_outcomes([entry], large))

    def _begin(self, task: _Task) -> None:
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
            self._note_outcome(task.number, ERROR, started, monotonic(), self._pack(error))
            self._keep_last()

    def _take_ended(self, overlap: Overlap) -> None:
        for number, thread, started, finished in overlap.take_ended():
            status = VALUE
            payload: bytes | Parcel = b""
            try:
                value = thread.result()
                if value is not None:
                    payload = self._capture_result(value)
            except BaseException as error:
                status, payload = ERROR, self._pack(error)
            self._note_outcome(number, status, started, finished, payload)
            self._keep_last()
            if not overlap.running:
                self._last_done = number

    def _keep_last(self) -> None:
        """The outcome noted last outlives this drone, or is sent."""
        if self._large or not self._row.keep(self._outcomes[-1]):
            self._flush()

    def _capture_result(self, value: object) -> bytes | Parcel:
        try:
            bulky = type(value) in BULKY and len(value) >= LARGE_BUFFER  # type: ignore[arg-type]
            return pack(value, self._snapshot, self._store, bulky)
        except BaseException as error:
            error.add_note(f"while pickling the result, a {type(value).__qualname__}")
            raise

    def _capture(self, value: object) -> bytes:
        return capture(value, self._snapshot)

    def _pack(self, error: BaseException) -> bytes:
        try:
            return pack_exception(error, self._capture)
        except BaseException as worse:  # its own code broke off its packing: tell at least what it was
            told = RuntimeError(f"a {type(error).__qualname__} could not be sent: {type(worse).__qualname__}")
            return pack_exception(told, lambda value: dumps(value, 5))

    def _flush(self) -> None:
        if self._ledger.returned:
            self._note_returned()
        if self._values.numbers:
            self._outcomes.append(self._values.take())
        if self._outcomes:
            with self.socket_turn:
                self._send(pack_outcomes(self._outcomes, self._large))
            self._row.sent(self._last_done)  # with overlapped tasks: of those before them
            self._outcomes.clear()
            self._large.clear()
        self._flushed = monotonic()

    def _note_returned(self) -> None:
        """Loans that are over go along with the outcomes."""
        for number in self._ledger.take_returned():
            self._outcomes.append(pack_outcome(number, LOAN_OVER, 0.0, 0.0, b"", b""))

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
                self._waiting = True
            if not self._ledger.returned:  # looked at after `_waiting` was set: see `_ring`
                self._sleep()
        with self.socket_turn:
            self._waiting = False
            self.hear_all()

    def _sleep(self) -> None:
        """Until there is news. Warm memory is given back when nothing comes for a while."""
        news: list[tuple[int, int]] = []
        while not news and self._store.has_warm():
            news = self._news.poll(IDLE)
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
        while (frames := self._lane.receive()) is not None:
            if not frames:  # the hub has let go of us
                os._exit(0)
            self._hear(frames)

    def _send(self, frames: list[bytes]) -> None:
        if not self._lane.send(frames):
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
            os.write(2, f"a malformed message was dropped: {wrong}\n".encode())

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
                todo.append(_Calls(definitions[definition], *loads(payload)))
            elif kind == CAME_BACK:
                self._ledger.came_back(number)
            elif definition in definitions:
                todo.append(_Task(number, kind, definitions[definition], payload))
            else:
                error = self._pack(RuntimeError(f"a bug in polycephaly: definition {definition} is not known here"))
                unknown = loads(payload)[0] if kind == CALLS else [number]
                self._send(pack_outcomes([pack_outcome(each, ERROR, 0.0, 0.0, error, b"") for each in unknown]))

    def _hear_recall(self, frames: list[bytes]) -> None:
        returned: list[int] = []
        with suppress(IndexError):
            while True:
                task = self._todo.pop()
                if isinstance(task, _Calls):
                    _take_from_end(task, returned)
                else:
                    returned.append(task.number)
        if self._calls is not None:
            _take_from_end(self._calls, returned)
        self._send(pack_numbers(RETURNED, returned[::-1]))

    def _hear_cancel(self, frames: list[bytes]) -> None:
        targets = set(numbers(frames))
        withdrawn = []
        tasks = list(self._todo)
        if self._calls is not None:
            tasks.append(self._calls)
        for task in tasks:
            with suppress(ValueError):  # the main thread has just begun it
                if isinstance(task, _Calls):
                    for call in [each for each in list(task.queue) if each[0] in targets]:
                        task.queue.remove(call)
                        withdrawn.append(call[0])
                elif task.number in targets:
                    self._todo.remove(task)
                    withdrawn.append(task.number)
        targets -= set(withdrawn)
        if withdrawn:
            self._send(pack_outcomes([pack_outcome(each, WITHDRAWN, 0.0, 0.0, b"", b"") for each in withdrawn]))
        current = self._current
        self._missed = targets - {0, current}  # one of these may be just between `todo` and `_current`
        if self._overlap is not None:
            self._overlap.interrupt(targets)
        if current and (current in targets or 0 in targets):
            self._target = current
            signal.pthread_kill(self._main_thread, signal.SIGINT)

    def _hear_open(self, frames: list[bytes]) -> None:
        self.open_bulk()

    def _hear_stop(self, frames: list[bytes]) -> None:
        self._stopping = True

    _HEARD: dict[bytes, Callable[[_Drone, list[bytes]], None]] = {  # noqa: RUF012 - a table, never changed
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
                    self._cut_slice()
                    self.hear_all()
            finally:
                self.socket_turn.release()

    @property
    def news_fd(self) -> int:
        return self._news.fileno()


def _take_from_end(calls: _Calls, taken: list[int]) -> None:
    with suppress(IndexError):
        while True:
            taken.append(calls.queue.pop()[0])


class _Values:
    """Outcomes of tasks that are sent together."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._started: list[float] = []
        self._finished: list[float] = []
        self._values: list[Any] = []

    def note(self, number: int, started: float, finished: float, value: Any) -> None:
        self.numbers.append(number)
        self._started.append(started)
        self._finished.append(finished)
        self._values.append(value)

    def take(self) -> bytes:
        entry = pack_values(self.numbers, self._started, self._finished, self._values)
        for column in (self.numbers, self._started, self._finished, self._values):
            column.clear()
        return entry


class _Ear:
    """Listens while the main thread is busy with one task for longer than the window.

    It ticks while there is work and is parked when there is none, so an idle drone has no thread that wakes.
    Parking: it says so, then looks again, then waits for a token. The main thread looks at `_parked` at each
    task and sends a token. A task that begins between the two looks of the ear is seen by the second; one
    token too many costs one tick.
    """

    def __init__(self, drone: _Drone) -> None:
        self._drone = drone
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._parked = False
        thread = threading.Thread(target=self._live, name="polycephaly-ear", daemon=True)
        safepoint.add_turn(thread, drone.socket_turn)  # a drone may fork drones of its own
        thread.start()

    def wake(self) -> None:
        if self._parked:
            self._parked = False
            self._tokens.put(None)

    def _live(self) -> None:
        readable = select.poll()
        readable.register(self._drone.news_fd, select.POLLIN)
        seen = 0
        while True:
            current = self._drone.current
            if current == 0:
                self._parked = True
                if self._drone.current == 0:
                    self._tokens.get()
                self._parked = False
            elif current == seen:
                # The descriptor tells of news only; what came before the ear began must be looked for.
                with suppress(zmq.ZMQError):
                    self._drone.hear_if_free()
                    readable.poll(LOOK_AGAIN * 1000)
                continue
            seen = current
            sleep(WINDOW)
