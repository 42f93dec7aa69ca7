"""A client's connection to a served pool.

Tasks and promises use a `Connection` as their dispatcher and its reactor.

    callers ──append──> queue ──┐          ┌── WORK ──> server
                                ├── loop ──┤
    promises <──settle──────────┘          └── RESULTS, OUTPUT, REPLY <──

At most `MAX_UNANSWERED_CALLS` calls are unanswered at a time. All tasks that are queued when the
connection gets to send go as one message; a function is sent once. Arguments are pickled when the
call is made. Functions and classes of this process's `__main__` travel by value, because the server
process has another `__main__`.

If the connection is lost, unanswered tasks are rejected with `ConnectionError`: whether they were
run is unknown.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pickle import dumps
from typing import Any
from weakref import WeakSet

from ...drone.forwarded import NO_SHARED_NAMES
from ...errors import DroneDied, Malformed, copy_error
from ...pool.handlers import settle
from ...pool.interfaces import End, TaskOptions, TaskRunner
from ...pool.pool_state import MAX_UNSWEPT_TASKS
from ...pool.queues import drain, drop_settled
from ...pool.reactor import finish_submitted
from ...pool.task import Task
from ...promises.promise import (
    FINISHED,
    Promise,
    reject,
    settle_promise,
    stored_error,
    when_settled,
)
from ...runtime.signal_handlers import is_of_signal_handler
from ...runtime.timers import Timer
from ...runtime.tuning import tuning
from ...wire.functions import FunctionRegistry, KnownFunctions
from ...wire.messages import ERROR, WITHDRAWN
from ...wire.output import Line
from . import messages
from .keys import Card
from .messages import Item, pack_hello
from .server_connection import ServerConnection
from .shared import SharedRef, pickling_call

log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 256 * 1024  # after these, a message is full
POOL_DEFAULT = -1  # a task's `retries`: as the pool is configured


class Connection(ServerConnection, TaskRunner):
    """A connection to a served pool.

    Raise `ConnectionError` if the server does not answer in time, or refuses this client.
    """

    stores_results = False
    sends_chunks = False
    calls_ahead = messages.MAX_UNANSWERED_CALLS

    def __init__(
        self,
        card: Card,
        timeout: float,
        output: Callable[[Line], object] | None,
        only_requests: bool = False,
    ) -> None:
        self._output = output
        self.reactor = self
        self.finishes_at_exit = False
        self.queue: deque[Task] = deque()
        self.task_options = TaskOptions(None, POOL_DEFAULT)
        self.name = ""  # the pool's name
        self.resource_sizes: dict[str, int] = {}
        self.size, self.width = 0, 1
        self.refusal: BaseException | None = None  # why new tasks are refused, or None
        self.registry = FunctionRegistry(NO_SHARED_NAMES, None)
        self._pending_requests: dict[int, Promise[Any]] = {}
        self._unsent_requests: deque[list[Any]] = deque()
        self._unanswered_requests = 0  # requests that are sent and unanswered
        self._request_numbers = itertools.count(1)
        self._in_flight: dict[int, tuple[Task, int]] = {}  # unanswered tasks and their bytes
        self._in_flight_bytes = 0
        self._waiting: set[Task] = set()  # tasks that wait for promises, or to be sent again
        self._delayed: dict[Task, Timer] = {}  # those of `_waiting` that are sent after a delay
        self._sent_functions = KnownFunctions()  # functions that the server has
        self._recall_sent = False
        self._cancelled_since_sweep = 0
        super().__init__(card, "polycephaly-client")
        self.ended = End(self)
        wants_output, host = output is not None, socket.gethostname()
        self._only_requests = only_requests
        properties: dict[str, Any] = {"output": wants_output, "pid": os.getpid(), "host": host}
        if only_requests:
            properties["only_requests"] = True
        self.connect(timeout, pack_hello(**properties))
        _connections.add(self)
        # Again, to be called before the end of the reactor, which may serve this very pool.
        atexit.unregister(_end_with_interpreter)
        atexit.register(_end_with_interpreter)

    # -- the dispatcher's interface, in any thread -------------------------------------------------

    def submit(
        self,
        what: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any = None,
        task_options: TaskOptions | None = None,
        task: Task | None = None,
    ) -> Promise[Any]:
        self.check_open()
        if task is not None and task.keeps:
            raise TypeError(
                f"{self.name} is served by another process and keeps no results for its clients: "
                "submit the task without keep=True, or use a Pool of this process"
            )
        task = task or Task(self)
        task.target = target  # a `RemoteHandle`
        task_options = task_options or self.task_options
        task.set_options(task_options)
        try:
            definition = self.registry.define(what)
            if definition.takes_function:
                args = (what, *args)
            with self.pickling(task):
                inputs = task.capture(definition, args, kwargs)
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            reject(task.promise, error)
            return task.promise
        if inputs:
            self._waiting.add(task)
            task.wait_for(inputs)
            if self.has_ended:
                self._reject_all()
        else:
            self._enqueue(task)
        return task.promise

    @contextmanager
    def pickling(self, task: Any) -> Iterator[None]:
        """Note the shared values among the arguments that are pickled, after those noted before."""
        shared_refs: list[SharedRef] = task.shared_refs or []
        # Not None if this call is made while another one is pickled: by a `__reduce__` of an
        # argument, or by a finalizer.
        outer = pickling_call.connection, pickling_call.shared_refs
        pickling_call.connection, pickling_call.shared_refs = self, shared_refs
        try:
            yield
        finally:
            pickling_call.connection, pickling_call.shared_refs = outer
        if len(shared_refs) > messages.MAX_SHARED_VALUES:
            raise ValueError(
                f"a call takes at most {messages.MAX_SHARED_VALUES:,} shared values, not "
                f"{len(shared_refs):,}: share one list of these values"
            )
        if shared_refs:
            task.shared_refs, task.item_payload = shared_refs, b""

    def request(self, kind: str, **fields: Any) -> Promise[Any]:
        """Send an admin request and return a promise of its reply.

        The promise is rejected with `RuntimeError` if the server refuses.
        """
        number = next(self._request_numbers)
        message = {"id": number, "what": kind, **fields}
        return self._request(number, messages.pack_json(messages.REQUEST, message))

    def share(self, buffers: Sequence[Any]) -> int:
        """Copy `buffers` into the pool's shared memory; return the number of the value."""
        number = next(self._request_numbers)
        promise = self._request(number, messages.pack_shared_value(number, buffers))
        try:
            promise.result()
        except BaseException:  # Ctrl-C: the caller gets no handle that would release the value
            when_settled(promise, partial(self._release_unused, number))
            raise
        return number

    def _release_unused(self, number: int, promise: Promise[Any]) -> None:
        if not promise.cancelled() and stored_error(promise) is None:
            self.post(self.send, messages.pack_numbers(messages.RELEASE, [number]))

    def _request(self, number: int, frames: list[bytes]) -> Promise[Any]:
        self.check_open()
        promise = self._pending_requests[number] = Promise[Any]()
        self.post(self._send_requests, [frames])
        if self.has_ended:
            self._reject_all()
        return promise

    def _send_requests(self, more: Sequence[list[bytes]] = ()) -> None:
        """Send requests, at most `MAX_UNANSWERED_REQUESTS` at a time.

        The server disconnects a client that sends more.
        """
        self._unsent_requests += more
        while (
            self._unsent_requests and self._unanswered_requests < messages.MAX_UNANSWERED_REQUESTS
        ):
            self._unanswered_requests += 1
            self.send(self._unsent_requests.popleft())

    def on_inputs_ready(self, task: Task) -> None:
        """Queue `task`: its inputs have arrived, or it is settled."""
        if not task.promise.done():
            self._enqueue(task)
        self._waiting.discard(task)

    def submit_task(self, task: Task) -> None:
        self.check_open()
        self._enqueue(task)

    def _enqueue(self, task: Task) -> None:
        self.queue.append(task)
        self.request_turn()
        if self.has_ended:
            self._reject_all()

    def close(self, *, cancel: str = "", wait: bool = True) -> None:
        """Disconnect, after all submitted tasks are done or cancelled.

        `cancel` is "all" or "not begun"; if empty, every task is finished first. Without `wait`
        this takes no lock, so finalizers may call it.
        """
        self.refusal = self.refusal or RuntimeError(
            f"cannot schedule new futures after shutdown of {self.name}"
        )
        self.post(self._close, cancel)
        if wait:
            self.wait_ended()

    def finish(self, *, cancel: bool = False) -> None:
        """Disconnect, after all submitted tasks are done. A Ctrl-C meanwhile cancels them."""
        try:
            self.close(cancel="all" if cancel else "")
        except Exception:  # this thread cannot wait
            raise
        except BaseException:
            self.close(cancel="all")
            raise

    async def finish_async(self, *, cancel: bool = False) -> None:
        self.close(cancel="all" if cancel else "", wait=False)
        try:
            await self.ended
        except BaseException:
            self.close(cancel="all", wait=False)
            await self.ended
            raise

    def disable_in_child(self) -> None:
        super().disable_in_child()
        self.refusal = RuntimeError(
            f"the connection to {self.address} belongs to another process, of which this one is a "
            "fork: connect again in the process that uses it, after the fork"
        )

    # -- in the loop -------------------------------------------------------------------------------

    def on_failed(self, task: Task, error: BaseException) -> None:
        """Send a task that has a `Retry` again after a delay, or reject the task with `error`."""
        target_died = task.target is not None and isinstance(error, DroneDied)
        # An error of the task itself has the remote traceback as its cause.
        is_refused = type(error) is RuntimeError and error.__cause__ is None
        is_over = task.promise.done() or target_died or is_refused or self._recall_sent
        delay = None if is_over else task.next_delay(error)
        if delay is None:
            task.recompute_payload = task.shared_refs = None
            self._waiting.discard(task)
            self.deliver(partial(reject, task.promise, task.with_attempts(error)))
        else:
            task.start_over()
            self._delayed[task] = self.call_later(delay, partial(self._send_again, task))

    def _send_again(self, task: Task) -> None:
        self._delayed.pop(task, None)
        self.on_inputs_ready(task)

    def withdraw(self, task: Task) -> None:
        """Cancel `task` at the server."""
        self._waiting.discard(task)
        if self._remove_in_flight(task.number) is not None:
            self.send(messages.pack_numbers(messages.CANCEL, [task.number]))
        timer = self._delayed.pop(task, None)
        if timer is not None:
            self.timers.cancel(timer)
        task.payload, task.recompute_payload, task.shared_refs = b"", None, None
        self._cancelled_since_sweep += 1
        may_pile_up = self._cancelled_since_sweep > MAX_UNSWEPT_TASKS + len(self.queue) // 2
        if may_pile_up and not self.has_ended:  # then other threads take tasks, too
            self._cancelled_since_sweep = 0
            drop_settled(self.queue)

    def _close(self, cancel: str) -> None:
        if cancel:
            self._cancel_tasks(also_sent=cancel == "all")
        # Of the tasks that were sent, only the server knows which have begun. One RECALL is enough,
        # because no task is sent after the first.
        if cancel == "not begun" and not self._recall_sent:
            self._recall_sent = True
            self.send(messages.pack_numbers(messages.RECALL, list(self._in_flight)))

    def _cancel_tasks(self, *, also_sent: bool) -> None:
        tasks = [*drain(self.queue), *self._waiting]
        if also_sent:
            tasks += [task for task, _ in reversed(self._in_flight.values())]
        for task in tasks:
            self.deliver(task.promise.cancel)

    def after_turn(self) -> None:
        self._send_queued()
        unfinished = (
            self.queue
            or self._in_flight
            or self._waiting
            or self._pending_requests
            or self.openings_left
        )
        if self.refusal is not None and not unfinished:  # it was closed
            self.end()

    def on_end(self) -> None:
        if not isinstance(self.refusal, ConnectionError):
            loss = self.loss()
            self.refusal = loss if self.loss_reason else self.refusal or loss
        self._reject_all()

    def is_done(self) -> bool:
        self.waits_for_callbacks = True
        return not self.has_anything_left()

    def end_if_called_back(self) -> None:
        self.run_outside_lock(self.end_if_done)

    def _reject_all(self) -> None:
        """Reject all tasks and requests, after the end.

        Any thread may call this, also at the same time as others: whichever thread pops an entry
        rejects it.
        """
        refusal = self.refusal or self.loss()
        for pop in (self.queue.popleft, lambda: self._in_flight.popitem()[1][0], self._waiting.pop):
            with suppress(IndexError, KeyError):
                while True:
                    settle_promise(pop().promise, None, copy_error(refusal))
        with suppress(KeyError):
            while True:
                reject(self._pending_requests.popitem()[1], copy_error(refusal))

    # -- messages of the server --------------------------------------------------------------------

    def on_message(self, frames: list[bytes]) -> None:
        kind = frames[0]
        if kind == messages.RESULTS:
            for number, status, payload, tail in messages.read_results(frames):
                task = self._remove_in_flight(number)
                if task is not None:
                    if task.retry is not None:
                        if status == ERROR:
                            task.recompute_payload = task.payload
                            self._waiting.add(task)  # until `on_failed`
                        else:
                            task.shared_refs = None
                    task.status, task.payload, task.promise.output = status, payload, tail
                    self.deliver(
                        task.promise.cancel if status == WITHDRAWN else partial(settle, [task])
                    )
        elif kind == messages.HELLO:
            self.size, properties = messages.read_hello(
                frames, "the server", "this client", self._only_requests
            )
            self.name = str(properties.get("name"))
            self.resource_sizes = messages.read_sizes(properties.get("resources"))
            self.describes_items = properties.get("describe_items") is True
            self.on_connected()
            self._send_alive()
        elif kind == messages.RUNNING:
            for number in messages.read_numbers(frames):
                if (entry := self._in_flight.get(number)) is not None:
                    entry[0].runs_elsewhere = True
        elif kind == messages.OUTPUT:
            lines = [Line(*each) for each in messages.read_lines(frames, 3)]
            size = sum(len(line.text) + messages.LINE_OVERHEAD_BYTES for line in lines)
            self.deliver_output(partial(self._deliver_output, lines, size), size)
        elif kind == messages.REPLY:
            self._on_reply(messages.read_json(frames))
        elif kind == messages.CANCEL:
            self._cancel_tasks(also_sent=True)
        else:
            raise Malformed(f"a message of unknown type {kind[:8]!r}")

    def _deliver_output(self, lines: list[Line], size: int) -> None:
        """Pass lines to the user's callable, in the output thread."""
        for line in lines:
            try:
                if self._output is not None:
                    self._output(line)
            except BaseException:
                log.exception("the output callable of %s failed", self.name)
        self.post(self._acknowledge_output, size)

    def _acknowledge_output(self, size: int) -> None:
        """Tell the server that lines of `size` bytes were handled: for a client that seems not to
        read, it omits lines.
        """
        self.send(messages.pack_numbers(messages.OUTPUT_ACK, [size]))

    def _on_reply(self, reply: dict[str, Any]) -> None:
        self._unanswered_requests -= 1
        self._send_requests()
        promise = self._pending_requests.pop(reply.get("id", 0), None)
        if promise is not None:
            kind = MemoryError if reply.get("kind") == "MemoryError" else RuntimeError
            error = kind(str(reply["error"])) if "error" in reply else None
            self.deliver(partial(promise._settle, FINISHED, reply.get("value"), error))

    def _remove_in_flight(self, number: int) -> Task | None:
        task, size = self._in_flight.pop(number, (None, 0))
        self._in_flight_bytes -= size
        return task

    def _has_credit(self) -> bool:
        return (
            self.hello_received
            and not self.has_ended
            and len(self._in_flight) < messages.MAX_UNANSWERED_CALLS
            and (not self._in_flight or self._in_flight_bytes < messages.MAX_UNANSWERED_BYTES)
        )

    def _send_queued(self) -> None:
        while self.queue and self._has_credit():
            items = messages.forget_items(self._sent_functions.pop_unused())
            held_refs: list[Any] = []  # keeps the values until the items are sent
            size = 0
            while size < MAX_BATCH_BYTES and self._has_credit():
                try:
                    task = self.queue.popleft()
                except IndexError:
                    break
                if task.promise.done():  # cancelled while queued
                    continue
                definition = task.definition
                known = self._sent_functions
                if definition.number not in known:
                    items += messages.definition_items(
                        known, definition, label=definition.label[:200]
                    )
                    size += len(definition.payload)
                payload = task.payload
                if task.args is not None:
                    payload = dumps(task.args, 5) if task.args else b""
                retries = None if task.retries == POOL_DEFAULT else task.retries
                if task.retry is None:
                    task.payload = b""
                else:  # deaths are repeated from here, too
                    retries = 0
                target = 0 if task.target is None else task.target.number
                extra: dict[str, Any] = {"needs": dict(task.resources)} if task.resources else {}
                if task.shared_refs is not None:
                    extra["shared"] = [ref.number for ref in task.shared_refs]
                    held_refs.append(task.shared_refs)
                    if task.retry is None:
                        task.shared_refs = None
                item = Item(
                    task.number,
                    definition.number,
                    task.kind,
                    payload,
                    target,
                    task.timeout,
                    retries,
                    task.priority,
                    task.first_item,
                    messages.pack_extra(extra),
                )
                items.append(item)
                self._in_flight[task.number] = task, item.nbytes
                self._in_flight_bytes += item.nbytes
                size += item.nbytes + 32
            if items:
                self.send(messages.pack_work(items))

    def _send_alive(self) -> None:
        """Send ALIVE now and then: a PING of the server may be delayed behind data."""
        if not self.has_ended:
            self.send([messages.ALIVE])
            if self._sent_functions.unused:
                self.send(
                    messages.pack_work(messages.forget_items(self._sent_functions.pop_unused()))
                )
            self.call_later(tuning.client_sign_seconds, self._send_alive)


_connections: WeakSet[Connection] = WeakSet()  # a connection's thread refers to it until its end


def _end_with_interpreter() -> None:
    finish_submitted(list(_connections))
