"""A client's connection to a served pool: the socket and the thread that owns it.

Tasks and promises use a `Connection` as their dispatcher and its reactor.

    callers ──append──> waiting ──┐            ┌── WORK ──> server
                                  ├── thread ──┤
    promises <──settle────────────┘            └── RESULTS, OUTPUT, REPLY <──

At most `MAX_UNANSWERED_CALLS` calls are unanswered at a time. All tasks that wait when the thread
gets to send go as one message; a function is sent once. Arguments are pickled when the call is
made. Functions and classes of this process's `__main__` travel by value, because the server process
has another `__main__`.

If the connection is lost, unanswered tasks are rejected with `ConnectionError`: whether they were
run is unknown.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pickle import dumps
from typing import Any

import zmq

from ...drone.forwarded import NO_SHARED_NAMES
from ...errors import copy_error
from ...pool.config import TaskOptions
from ...pool.handlers import settle, settle_task
from ...pool.task import Task
from ...promises.promise import CANCELLED, FINISHED, Promise, Signal, callbacks, settling_threads
from ...runtime import fork_guard
from ...runtime.timers import Timers
from ...runtime.tuning import tuning
from ...wire.functions import FunctionRegistry, KnownFunctions, RemoteFunction
from ...wire.messages import FORGET, WITHDRAWN, Malformed
from ...wire.output import Line
from .client_socket import ClientSocket
from .keys import Card
from .messages import (
    ALIVE,
    CANCEL,
    HELLO,
    LINE_OVERHEAD_BYTES,
    MAX_UNANSWERED_BYTES,
    MAX_UNANSWERED_CALLS,
    MAX_UNANSWERED_REQUESTS,
    OUTPUT,
    OUTPUT_ACK,
    RECALL,
    REFUSED,
    RELEASE,
    REPLY,
    REQUEST,
    RESULTS,
    RUNNING,
    WITH_SHARED,
    Item,
    pack_definition,
    pack_hello,
    pack_json,
    pack_numbers,
    pack_shared_numbers,
    pack_shared_value,
    pack_work,
    read_hello,
    read_json,
    read_lines,
    read_numbers,
    read_results,
)
from .shared import Lease, pickling_call
from .wakeup import Wakeup

__all__ = ["Connection"]

log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 256 * 1024  # after these, a message is full
POOL_DEFAULT = -1  # a task's `retries`: as the pool is configured

_NO_LEASES: list[Lease] = []
_ERRORS: dict[str, type[Exception]] = {"MemoryError": MemoryError}
"""Exception types of failed requests, by the reply's `kind`; all others are `RuntimeError`."""


class Connection:
    """A connection to a served pool.

    Raise `ConnectionError` if the server does not answer in time, or refuses this client.
    """

    def __init__(self, card: Card, timeout: float, output: Callable[[Line], object] | None) -> None:
        self._output = output
        self.address = card.address
        self.reactor = self
        self.finishes_at_exit = False
        self.task_options = TaskOptions(None, POOL_DEFAULT)
        self.name = ""  # the pool's name
        self.drones = 0
        self.refusal: BaseException | None = None  # why new tasks are refused, or None
        self.registry = FunctionRegistry(NO_SHARED_NAMES, None)
        self.connected: Promise[None] = Promise()
        self.ended: Signal[None] = Signal()
        self._queue: deque[Task] = deque()
        self._pending_requests: dict[int, Promise[Any]] = {}
        self._unsent_requests: deque[list[Any]] = deque()  # requests that are not sent yet
        self._unanswered_requests = 0  # requests that are sent and unanswered
        self._callbacks: list[Callable[[], object]] = []
        self._timers = Timers()
        self._request_numbers = itertools.count(1)
        self._posted: deque[Callable[[], object]] = deque()
        self._in_flight: dict[int, tuple[Task, int]] = {}  # unanswered tasks and their bytes
        self._in_flight_bytes = 0
        self._waiting: set[Task] = set()
        self._sent_functions = KnownFunctions()  # functions that the server has
        self._wakeup = Wakeup()
        self._stopping = self._lost = self._is_inherited = False
        self._cancel_mode = ""
        self._recall_sent = False
        self._last_alive_at = 0.0
        self._lock = fork_guard.GuardedLock()
        try:
            self._dealer = ClientSocket(card)
        except BaseException:
            self._wakeup.close()
            raise
        _connections.add(self)
        self._thread = threading.Thread(target=self._run, name="polycephaly-client", daemon=True)
        fork_guard.add_thread_lock(self._thread, self._lock)
        self._thread.start()
        try:
            self.connected.result(timeout)
        except TimeoutError:
            self.close(cancel="all")
            raise self._dealer.timeout_error(timeout) from None
        except BaseException:
            self.close(cancel="all")
            raise

    # -- the dispatcher's interface, in any thread -------------------------------------------------

    def submit(
        self,
        what: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any = None,
        task_options: TaskOptions | None = None,
        task: Task | None = None,
    ) -> Task:
        self.check_open()
        if task is not None and task.keeps:
            raise TypeError(
                f"{self.name} is served by another process and keeps no results for its clients: "
                "submit the task without keep=True, or use a Pool of this process"
            )
        task = task or Task(self)
        task.target = target  # a `RemoteHandle`
        task_options = task_options or self.task_options
        task.timeout, task.retries = task_options
        try:
            definition = self.registry.define(what)
            if definition.takes_function:
                args = (what, *args)
            leases: list[Lease] = []
            pickling_call.connection, pickling_call.leases = self, leases
            try:
                inputs = task.capture(definition, args, kwargs, self.registry)
            finally:
                pickling_call.connection, pickling_call.leases = None, _NO_LEASES
            if leases:
                task.leases = leases
        except Exception as error:
            task._settle(FINISHED, None, error)
            return task
        if inputs:
            self._waiting.add(task)
            task.wait_for(inputs)
        else:
            self._enqueue(task)
        return task

    def check_open(self) -> None:
        if self.refusal is not None:
            raise copy_error(self.refusal)

    def request(self, kind: str, **fields: Any) -> Promise[Any]:
        """Send an admin request and return a promise of its reply.

        The promise is rejected with `RuntimeError` if the server refuses.
        """
        self.check_open()
        number, promise = next(self._request_numbers), Promise[Any]()
        self._pending_requests[number] = promise
        message = {"id": number, "what": kind, **fields}
        self.post(lambda: self._queue_request(pack_json(REQUEST, message)))
        if self._lost:
            self._reject_all()
        return promise

    def _queue_request(self, frames: list[Any]) -> None:
        """In the connection's thread: send a request, at most `MAX_UNANSWERED_REQUESTS` at a time.

        The server disconnects a client that sends more.
        """
        self._unsent_requests.append(frames)
        self._send_requests()

    def _send_requests(self) -> None:
        while self._unsent_requests and self._unanswered_requests < MAX_UNANSWERED_REQUESTS:
            self._unanswered_requests += 1
            self._dealer.send(self._unsent_requests.popleft())

    def share(self, buffers: Sequence[Any]) -> int:
        """Copy `buffers` into the pool's shared memory; return the number of the value."""
        self.check_open()
        number, request_number = next(self._request_numbers), next(self._request_numbers)
        promise = Promise[Any]()
        self._pending_requests[request_number] = promise
        self.post(lambda: self._queue_request(pack_shared_value(number, request_number, buffers)))
        if self._lost:
            self._reject_all()
        promise.result()
        return number

    def release_shared(self, number: int) -> None:
        """Release a shared value. Take no lock, so that finalizers may call this."""
        if not self._lost:
            self.post(lambda: self._dealer.send(pack_numbers(RELEASE, [number])))

    def on_inputs_ready(self, task: Task) -> None:
        """Queue `task`: its inputs have arrived, or it is settled."""
        if not task.done():
            self._enqueue(task)
        self._waiting.discard(task)

    def submit_task(self, task: Task) -> None:
        self.check_open()
        self._enqueue(task)

    def _enqueue(self, task: Task) -> None:
        self._queue.append(task)
        self._wakeup.wake()
        if self._lost:
            self._reject_all()

    def note_waiting_thread(self, task: Task) -> None:
        """Do nothing: a connection has no stall detection."""

    def drive(self, promise: Promise[Any], end: float | None) -> None:
        """Raise if this process is a fork. A waiting thread has nothing to drive."""
        if self._is_inherited:
            raise RuntimeError(
                f"{promise!r} belongs to another process, of which this one is a fork"
            )

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        self._posted.append(partial(callback, *args) if args else callback)
        self._wakeup.wake()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> None:
        """In the connection's thread: call `callback` after so many seconds."""
        self._timers.set(self._timers.now() + seconds, callback)

    def deliver(self, callback: Callable[[], object]) -> None:
        """In the connection's thread: call `callback` after the lock is released."""
        self._callbacks.append(callback)

    def withdraw(self, task: Task) -> None:
        """In the connection's thread: cancel `task` at the server."""
        self._waiting.discard(task)
        if task.number in self._in_flight:
            self._dealer.send(pack_numbers(CANCEL, [task.number]))
            self._remove_in_flight(task.number)

    def explain(self, error: BaseException) -> None:
        """Do nothing: there is no snapshot of this process that could explain a missing name."""

    def close(self, *, cancel: str = "", wait: bool = True) -> None:
        """Disconnect, after all submitted tasks are done or cancelled.

        `cancel` is "all" or "not begun"; if empty, every task is finished first.
        """
        self.refusal = self.refusal or RuntimeError(
            f"cannot schedule new futures after shutdown of {self.name}"
        )
        self._cancel_mode = cancel or self._cancel_mode
        self._stopping = True
        self._wakeup.wake()
        if wait:
            while self._thread.is_alive():
                self._thread.join(0.5)  # time-limited, so that Ctrl-C is handled

    # -- the connection's thread -------------------------------------------------------------------

    def _run(self) -> None:
        settling_threads.add(get_ident())
        poller = zmq.Poller()
        for each in (self._dealer.socket, self._dealer.monitor, self._wakeup):
            poller.register(each, zmq.POLLIN)
        self._dealer.send(pack_hello(output=self._output is not None))
        try:
            while not self._is_finished():
                self._wakeup.asleep = True
                if not (
                    self._posted or self._cancel_mode or self._can_send() or self._is_finished()
                ):
                    left = self._timers.seconds_left()
                    longest = tuning.client_sign_seconds
                    poller.poll(math.ceil(min(longest if left is None else left, longest) * 1000))
                self._wakeup.asleep = False
                self._run_round()
        except Exception as error:
            log.exception("a bug in polycephaly breaks the connection to %s", self.address)
            self._mark_lost(f"a bug in polycephaly: {error}")
        finally:
            self._finish()

    def _run_round(self) -> None:
        """Do one round under the lock; then settle and cancel without it: both run user code."""
        settled: list[Task] = []
        with self._lock:
            self._wakeup.reset()
            self._receive(settled)
            while self._posted:
                self._posted.popleft()()
            self._timers.fire_due()
            self._send_queued()
            self._send_alive()
            callbacks_due, self._callbacks = self._callbacks, []
        for callback in callbacks_due:  # a task's output is delivered before its promise settles
            callback()
        for task in settled:
            if task.status == WITHDRAWN:
                settle_task(task, CANCELLED, None, None)
            else:
                settle([task])
        if self._cancel_mode:
            cancel_mode, self._cancel_mode = self._cancel_mode, ""
            self._cancel_all(running=cancel_mode == "all")

    def _is_finished(self) -> bool:
        unfinished = (
            self._queue
            or self._in_flight
            or self._waiting
            or self._posted
            or self._cancel_mode
            or self._pending_requests
        )
        return self._lost or (self._stopping and not unfinished)

    def _finish(self) -> None:
        with self._lock:
            fork_guard.remove_thread_lock(self._thread)
            _connections.discard(self)
            self._dealer.close()
            self._wakeup.close()
        self._lost = True
        self.refusal = self.refusal or ConnectionError(
            f"the connection to {self.address} is closed"
        )
        self._reject_all()
        if not self.connected.done():
            self.connected._settle(FINISHED, None, copy_error(self.refusal))
        self.ended._settle(FINISHED, None, None)
        settling_threads.discard(get_ident())

    def _reject_all(self) -> None:
        """Reject all tasks and requests.

        Any thread may call this after the loss, also at the same time as others: whichever thread
        pops an entry rejects it.
        """
        refusal = self.refusal or ConnectionError(f"the connection to {self.address} is closed")
        for pop in (
            self._queue.popleft,
            lambda: self._in_flight.popitem()[1][0],
            self._waiting.pop,
        ):
            with suppress(IndexError, KeyError):
                while True:
                    settle_task(pop(), FINISHED, None, copy_error(refusal))
        with suppress(KeyError):
            while True:
                self._pending_requests.popitem()[1]._settle(FINISHED, None, copy_error(refusal))

    def _mark_lost(self, reason: str) -> None:
        self._lost, self._dealer.loss_reason = True, reason
        if self.refusal is None or not isinstance(self.refusal, ConnectionError):
            self.refusal = ConnectionError(f"the connection to {self.address} is lost: {reason}")

    def _receive(self, settled: list[Task]) -> None:
        for frames in self._dealer.receive_messages():
            try:
                if frames[0] == RESULTS:
                    for number, status, payload, tail in read_results(frames):
                        task = self._remove_in_flight(number)
                        if task is not None:
                            task.status, task.payload, task.output = status, payload, tail
                            settled.append(task)
                elif frames[0] == HELLO:
                    incompatibility, self.drones, properties = read_hello(
                        frames, "the server", "this client"
                    )
                    if incompatibility is not None:
                        raise Malformed(incompatibility)
                    self.name = str(properties.get("name"))
                    self._dealer.hello_received = True
                    self.connected._settle(FINISHED, None, None)
                elif frames[0] == RUNNING:
                    for number in read_numbers(frames):
                        if (entry := self._in_flight.get(number)) is not None:
                            entry[0].runs_elsewhere = True
                elif frames[0] == OUTPUT:
                    lines = [Line(*each) for each in read_lines(frames, 3)]
                    self._callbacks.append(partial(self._deliver_output, lines))
                elif frames[0] == REPLY:
                    self._on_reply(read_json(frames))
                elif frames[0] == REFUSED:
                    self._mark_lost(b" ".join(frames[1:]).decode("utf-8", "replace"))
                else:
                    raise Malformed(f"a message of unknown type {frames[0][:8]!r}")
            except Malformed as error:
                self._mark_lost(str(error))
        if self._dealer.loss_reason:
            self._mark_lost(self._dealer.loss_reason)

    def _deliver_output(self, lines: list[Line]) -> None:
        for line in lines:
            try:
                if self._output is not None:
                    self._output(line)
            except BaseException:
                log.exception("the output callable of %s failed", self.name)
        handled = sum(len(line.text) + LINE_OVERHEAD_BYTES for line in lines)
        self.post(partial(self._dealer.send, pack_numbers(OUTPUT_ACK, [handled])))

    def _on_reply(self, reply: dict[str, Any]) -> None:
        self._unanswered_requests -= 1
        self._send_requests()
        promise = self._pending_requests.pop(reply.get("id", 0), None)
        if promise is not None:
            error = (
                _ERRORS.get(reply.get("kind", ""), RuntimeError)(str(reply["error"]))
                if "error" in reply
                else None
            )
            self._callbacks.append(partial(promise._settle, FINISHED, reply.get("value"), error))

    def _remove_in_flight(self, number: int) -> Task | None:
        task, size = self._in_flight.pop(number, (None, 0))
        self._in_flight_bytes -= size
        return task

    def _can_send(self) -> bool:
        return bool(self._queue) and self._has_credit()

    def _has_credit(self) -> bool:
        return (
            self.connected.done()
            and len(self._in_flight) < MAX_UNANSWERED_CALLS
            and (not self._in_flight or self._in_flight_bytes < MAX_UNANSWERED_BYTES)
        )

    def _send_queued(self) -> None:
        while not self._lost and (self._sent_functions.unused or self._can_send()):
            items = [Item(number, 0, FORGET) for number in self._sent_functions.pop_unused()]
            held_leases: list[Any] = []  # keeps leases until the items are sent
            size = 0
            while size < MAX_BATCH_BYTES and self._has_credit():
                try:
                    task = self._queue.popleft()
                except IndexError:
                    break
                if task.done():  # cancelled while queued
                    continue
                definition = task.definition
                if definition.number not in self._sent_functions:
                    self._add_definition(definition, items)
                    size += len(definition.payload)
                payload = task.payload
                if task.args is not None:
                    payload = dumps(task.args, 5) if task.args else b""
                task.payload = b""
                retries = None if task.retries == POOL_DEFAULT else task.retries
                target = 0 if task.target is None else task.target.number
                kind = task.kind
                if task.leases is not None:
                    kind, payload = (
                        kind | WITH_SHARED,
                        pack_shared_numbers([lease.number for lease in task.leases], payload),
                    )
                    held_leases.append(task.leases)
                    task.leases = None
                items.append(
                    Item(
                        task.number, definition.number, kind, payload, target, task.timeout, retries
                    )
                )
                self._in_flight[task.number] = task, len(payload)
                self._in_flight_bytes += len(payload)
                size += len(payload) + 32
            if items:
                self._dealer.send(pack_work(items))

    def _add_definition(self, definition: RemoteFunction, items: list[Item]) -> None:
        items += [Item(oldest, 0, FORGET) for oldest in self._sent_functions.add(definition)]
        # The payload is bytes, because the registry has no store.
        payload = pack_definition(definition.label, definition.payload)  # type: ignore[arg-type]
        items.append(Item(definition.number, 0, definition.kind, payload))

    def _send_alive(self) -> None:
        """Send ALIVE now and then: a PING of the server may be delayed behind data."""
        now = self._timers.now()
        if now - self._last_alive_at >= tuning.client_sign_seconds and self.connected.done():
            self._last_alive_at = now
            self._dealer.send([ALIVE])

    def _cancel_all(self, running: bool) -> None:
        """Cancel all tasks, or with `running` false those not begun.

        Of the tasks that were sent, only the server knows which have begun.
        """
        sent = list(self._in_flight)
        for task in [
            *self._queue,
            *self._waiting,
            *(task for task, _ in reversed(self._in_flight.values()) if running),
        ]:
            try:
                task.cancel()
            except BaseException:
                callbacks.exception("a callback of %r failed", task)
        # One RECALL is enough, because no task is sent after the first.
        if not running and not self._lost and not self._recall_sent:
            self._recall_sent = True
            with self._lock:
                self._dealer.send(pack_numbers(RECALL, sent))


_connections: set[Connection] = set()
_inherited: list[Connection] = []  # of the parent process, in a forked child


def _forget_connections() -> None:
    """In a forked child: give up all connections, because their threads do not exist here."""
    for connection in _connections:
        connection._lost = connection._is_inherited = True
        # The wake-up's lock may be held by a thread that does not exist in the child.
        connection._wakeup.asleep = False
        connection.refusal = RuntimeError(
            f"the connection to {connection.address} belongs to another process"
        )
    _inherited.extend(_connections)
    _connections.clear()


os.register_at_fork(after_in_child=_forget_connections)
