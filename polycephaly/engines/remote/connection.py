"""A client's connection to a served pool: the socket and the thread that owns it.

Tasks and promises use a `Connection` as their dispatcher and its reactor.

    callers ──append──> waiting ──┐            ┌── WORK, at most `AHEAD` calls unanswered ──> server
                                  ├── thread ──┤
    promises <──settle────────────┘            └── RESULTS, OUTPUT, TELL <──

All tasks that wait when the thread gets to send go as one message; a function is sent once.
Arguments are pickled when the call is made. Functions and classes of this process's `__main__`
travel by value, because the server process has another `__main__`.

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

from ...drone.forwarded import NOTHING
from ...errors import another
from ...pool.config import TaskOptions
from ...pool.handlers import finish, settle
from ...pool.task import Task
from ...promises.promise import CANCELLED, FINISHED, Promise, Signal, callbacks, settlers
from ...runtime import fork_guard
from ...runtime.timers import Timers
from ...runtime.tuning import tuning
from ...wire.functions import FunctionRegistry, KnownFunctions, RemoteFunction
from ...wire.messages import FORGET, WITHDRAWN, Malformed
from ...wire.output import Line
from .bell import Bell
from .client_socket import ClientSocket
from .keys import Card
from .messages import (
    AHEAD,
    ASK,
    ASKS,
    BYTES_AHEAD,
    CANCEL,
    GIVE_UP,
    HELLO,
    LINE,
    LIVES,
    OUTPUT,
    RECALL,
    REFUSED,
    RESULTS,
    RUNNING,
    SEEN,
    SHARES,
    TELL,
    Item,
    hello,
    pack_definition,
    pack_note,
    pack_numbers,
    pack_share,
    pack_shares,
    pack_work,
    read_hello,
    read_lines,
    read_note,
    read_numbers,
    read_results,
)
from .shared import Lease, here

__all__ = ["Connection"]

log = logging.getLogger(__name__)

PACKET = 256 * 1024  # bytes after which a message is full
AS_THE_POOL_SAYS = -1  # a task's `retries`: as the pool is configured

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
        self.task_options = TaskOptions(None, AS_THE_POOL_SAYS)
        self.name = ""  # the pool's name
        self.drones = 0
        self.refusal: BaseException | None = None  # why new tasks are refused, or None
        self.registry = FunctionRegistry(NOTHING, None)
        self.welcome: Promise[None] = Promise()
        self.ended: Signal[None] = Signal()
        self._queue: deque[Task] = deque()
        self._asked: dict[int, Promise[Any]] = {}
        self._questions: deque[list[Any]] = deque()  # requests that are not sent yet
        self._unanswered = 0  # requests that are sent and unanswered
        self._told: list[Callable[[], object]] = []
        self._timers = Timers()
        self._ask_numbers = itertools.count(1)
        self._acts: deque[Callable[[], object]] = deque()
        self._in_flight: dict[int, tuple[Task, int]] = {}  # unanswered tasks and their bytes
        self._bytes = 0
        self._waiting: set[Task] = set()
        self._defined = KnownFunctions()  # functions that the server has
        self._bell = Bell()
        self._stopping = self._lost = self._left_behind = False
        self._cancels = ""
        self._recalled = False
        self._signed = 0.0
        self._turn = fork_guard.GuardedLock()
        try:
            self._dealer = ClientSocket(card)
        except BaseException:
            self._bell.close()
            raise
        _connections.add(self)
        self._thread = threading.Thread(target=self._live, name="polycephaly-client", daemon=True)
        fork_guard.add_turn(self._thread, self._turn)
        self._thread.start()
        try:
            self.welcome.result(timeout)
        except TimeoutError:
            self.close(cancel="all")
            raise self._dealer.no_answer(timeout) from None
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
                f"{self.name} is served by another process, and keeps no results for its clients: give the work "
                "without keep=True, or use a Pool of this process"
            )
        task = task or Task(self)  # type: ignore[arg-type]  # has what a task needs of a dispatcher
        task.target = target  # a `RemoteHandle`
        task_options = task_options or self.task_options
        task.timeout, task.retries = task_options
        try:
            definition = self.registry.define(what)
            leases: list[Lease] = []
            here.connection, here.leases = self, leases
            try:
                inputs = task.capture(definition, args, kwargs, self.registry)
            finally:
                here.connection, here.leases = None, _NO_LEASES
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
            raise another(self.refusal)

    def ask(self, what: str, **more: Any) -> Promise[Any]:
        """Send an admin request and return a promise of its reply.

        The promise is rejected with `RuntimeError` if the server refuses.
        """
        self.check_open()
        number, promise = next(self._ask_numbers), Promise[Any]()
        self._asked[number] = promise
        note = {"id": number, "what": what, **more}
        self.post(lambda: self._question(pack_note(ASK, note)))
        if self._lost:
            self._reject_all()
        return promise

    def _question(self, frames: list[Any]) -> None:
        """In the connection's thread: send a request, at most `ASKS` at a time.

        The server disconnects a client that sends more.
        """
        self._questions.append(frames)
        self._send_questions()

    def _send_questions(self) -> None:
        while self._questions and self._unanswered < ASKS:
            self._unanswered += 1
            self._dealer.send(self._questions.popleft())

    def share(self, runs: Sequence[Any]) -> int:
        """Copy `runs` into the pool's shared memory; return the number of the value."""
        self.check_open()
        number, asked, promise = next(self._ask_numbers), next(self._ask_numbers), Promise[Any]()
        self._asked[asked] = promise
        self.post(lambda: self._question(pack_share(number, asked, runs)))
        if self._lost:
            self._reject_all()
        promise.result()
        return number

    def give_up(self, number: int) -> None:
        """Release a shared value. Take no lock, so that finalizers may call this."""
        if not self._lost:
            self.post(lambda: self._dealer.send(pack_numbers(GIVE_UP, [number])))

    def filled(self, task: Task) -> None:
        """Queue `task`: its inputs have arrived, or it is settled."""
        if not task.done():
            self._enqueue(task)
        self._waiting.discard(task)

    def _enqueue(self, task: Task) -> None:
        self._queue.append(task)
        self._bell.ring()
        if self._lost:
            self._reject_all()

    def somebody_waits(self, task: Task) -> None:
        """Do nothing: a connection has no stall detection."""

    def drive(self, promise: Promise[Any], end: float | None) -> None:
        """Raise if this process is a fork. A waiting thread has nothing to drive."""
        if self._left_behind:
            raise RuntimeError(
                f"{promise!r} belongs to another process, of which this one is a fork"
            )

    def post(self, act: Callable[[], object]) -> None:
        self._acts.append(act)
        self._bell.ring()

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """In the connection's thread: call `act` after so many seconds."""
        self._timers.set(self._timers.now() + seconds, act)

    def deliver(self, act: Callable[[], object]) -> None:
        """In the connection's thread: call `act` after the lock is released."""
        self._told.append(act)

    def withdraw(self, task: Task) -> None:
        """In the connection's thread: cancel `task` at the server."""
        self._waiting.discard(task)
        if task.number in self._in_flight:
            self._dealer.send(pack_numbers(CANCEL, [task.number]))
            self._answered(task.number)

    def explain(self, error: BaseException) -> None:
        """Do nothing: there is no snapshot of this process that could explain a missing name."""

    def close(self, *, cancel: str = "", wait: bool = True) -> None:
        """Disconnect, after all submitted tasks are done or cancelled.

        `cancel` is "all" or "not begun"; if empty, every task is finished first.
        """
        self.refusal = self.refusal or RuntimeError(
            f"cannot schedule new futures after shutdown of {self.name}"
        )
        self._cancels = cancel or self._cancels
        self._stopping = True
        self._bell.ring()
        if wait:
            while self._thread.is_alive():
                self._thread.join(0.5)  # time-limited, so that Ctrl-C is handled

    # -- the connection's thread -------------------------------------------------------------------

    def _live(self) -> None:
        settlers.add(get_ident())
        poller = zmq.Poller()
        for each in (self._dealer.socket, self._dealer.monitor, self._bell):
            poller.register(each, zmq.POLLIN)
        self._dealer.send(hello(output=self._output is not None))
        try:
            while not self._is_over():
                self._bell.asleep = True
                if not (self._acts or self._cancels or self._could_send() or self._is_over()):
                    left = self._timers.left()
                    longest = tuning.client_sign_seconds
                    poller.poll(math.ceil(min(longest if left is None else left, longest) * 1000))
                self._bell.asleep = False
                self._once()
        except Exception as error:
            log.exception("a bug in polycephaly breaks the connection to %s", self.address)
            self._lose(f"a bug in polycephaly: {error}")
        finally:
            self._end()

    def _once(self) -> None:
        """Do one round under the lock; then settle and cancel without it: both run user code."""
        answered: list[Task] = []
        with self._turn:
            self._bell.hush()
            self._hear_all(answered)
            while self._acts:
                self._acts.popleft()()
            self._timers.fire()
            self._send_what_waits()
            self._sign()
            told, self._told = self._told, []
        for tell in told:  # a task's output is delivered before its promise settles
            tell()
        for task in answered:
            if task.status == WITHDRAWN:
                finish(task, CANCELLED, None, None)
            else:
                settle([task])
        if self._cancels:
            cancels, self._cancels = self._cancels, ""
            self._cancel_all(running=cancels == "all")

    def _is_over(self) -> bool:
        left = (
            self._queue
            or self._in_flight
            or self._waiting
            or self._acts
            or self._cancels
            or self._asked
        )
        return self._lost or (self._stopping and not left)

    def _end(self) -> None:
        with self._turn:
            fork_guard.remove_turn(self._thread)
            _connections.discard(self)
            self._dealer.close()
            self._bell.close()
        self._lost = True
        self.refusal = self.refusal or ConnectionError(
            f"the connection to {self.address} is closed"
        )
        self._reject_all()
        if not self.welcome.done():
            self.welcome._settle(FINISHED, None, another(self.refusal))
        self.ended._settle(FINISHED, None, None)
        settlers.discard(get_ident())

    def _reject_all(self) -> None:
        """Reject all tasks and requests.

        Any thread may call this after the loss, also at the same time as others: whichever thread
        pops an entry rejects it.
        """
        refusal = self.refusal or ConnectionError(f"the connection to {self.address} is closed")
        for take in (
            self._queue.popleft,
            lambda: self._in_flight.popitem()[1][0],
            self._waiting.pop,
        ):
            with suppress(IndexError, KeyError):
                while True:
                    finish(take(), FINISHED, None, another(refusal))
        with suppress(KeyError):
            while True:
                self._asked.popitem()[1]._settle(FINISHED, None, another(refusal))

    def _lose(self, why: str) -> None:
        self._lost, self._dealer.lost = True, why
        if self.refusal is None or not isinstance(self.refusal, ConnectionError):
            self.refusal = ConnectionError(f"the connection to {self.address} is lost: {why}")

    def _hear_all(self, answered: list[Task]) -> None:
        for frames in self._dealer.received():
            try:
                if frames[0] == RESULTS:
                    for number, status, payload, tail in read_results(frames):
                        task = self._answered(number)
                        if task is not None:
                            task.status, task.payload, task.output = status, payload, tail
                            answered.append(task)
                elif frames[0] == HELLO:
                    why, self.drones, who = read_hello(frames, "the server", "this client")
                    if why is not None:
                        raise Malformed(why)
                    self.name = str(who.get("name"))
                    self._dealer.welcomed = True
                    self.welcome._settle(FINISHED, None, None)
                elif frames[0] == RUNNING:
                    for number in read_numbers(frames):
                        if (known := self._in_flight.get(number)) is not None:
                            known[0].runs_elsewhere = True
                elif frames[0] == OUTPUT:
                    self._told.append(
                        partial(self._print, [Line(*each) for each in read_lines(frames, 3)])
                    )
                elif frames[0] == TELL:
                    self._hear_answer(read_note(frames))
                elif frames[0] == REFUSED:
                    self._lose(b" ".join(frames[1:]).decode("utf-8", "replace"))
                else:
                    raise Malformed(f"a message of type {frames[0][:8]!r}")
            except Malformed as wrong:
                self._lose(str(wrong))
        if self._dealer.lost:
            self._lose(self._dealer.lost)

    def _print(self, lines: list[Line]) -> None:
        for line in lines:
            try:
                if self._output is not None:
                    self._output(line)
            except BaseException:
                log.exception("the output callable of %s failed", self.name)
        self.post(
            partial(
                self._dealer.send,
                pack_numbers(SEEN, [sum(len(line.text) + LINE for line in lines)]),
            )
        )

    def _hear_answer(self, note: dict[str, Any]) -> None:
        self._unanswered -= 1
        self._send_questions()
        promise = self._asked.pop(note.get("id", 0), None)
        if promise is not None:
            error = (
                _ERRORS.get(note.get("kind", ""), RuntimeError)(str(note["error"]))
                if "error" in note
                else None
            )
            self._told.append(partial(promise._settle, FINISHED, note.get("value"), error))

    def _answered(self, number: int) -> Task | None:
        task, size = self._in_flight.pop(number, (None, 0))
        self._bytes -= size
        return task

    def _could_send(self) -> bool:
        return bool(self._queue) and self._has_credit()

    def _has_credit(self) -> bool:
        return (
            self.welcome.done()
            and len(self._in_flight) < AHEAD
            and (not self._in_flight or self._bytes < BYTES_AHEAD)
        )

    def _send_what_waits(self) -> None:
        while not self._lost and (self._defined.unused or self._could_send()):
            items = [Item(number, 0, FORGET) for number in self._defined.take_unused()]
            leased: list[Any] = []  # keeps leases until the items are sent
            size = 0
            while size < PACKET and self._has_credit():
                try:
                    task = self._queue.popleft()
                except IndexError:
                    break
                if task.done():  # cancelled while queued
                    continue
                definition = task.definition
                if definition.number not in self._defined:
                    self._define(definition, items)
                    size += len(definition.payload)
                payload = task.payload
                if task.args is not None:
                    payload = dumps(task.args, 5) if task.args else b""
                task.payload = b""
                retries = None if task.retries == AS_THE_POOL_SAYS else task.retries
                target = 0 if task.target is None else task.target.number
                kind = task.kind
                if task.leases is not None:
                    kind, payload = (
                        kind | SHARES,
                        pack_shares([lease.number for lease in task.leases], payload),
                    )
                    leased.append(task.leases)
                    task.leases = None
                items.append(
                    Item(
                        task.number, definition.number, kind, payload, target, task.timeout, retries
                    )
                )
                self._in_flight[task.number] = task, len(payload)
                self._bytes += len(payload)
                size += len(payload) + 32
            if items:
                self._dealer.send(pack_work(items))

    def _define(self, definition: RemoteFunction, items: list[Item]) -> None:
        items += [Item(oldest, 0, FORGET) for oldest in self._defined.add(definition)]
        # The payload is bytes, because the registry has no store.
        payload = pack_definition(definition.label, definition.payload)  # type: ignore[arg-type]
        items.append(Item(definition.number, 0, definition.kind, payload))

    def _sign(self) -> None:
        """Send LIVES now and then: a PING of the server may be delayed behind data."""
        now = self._timers.now()
        if now - self._signed >= tuning.client_sign_seconds and self.welcome.done():
            self._signed = now
            self._dealer.send([LIVES])

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
        if not running and not self._lost and not self._recalled:
            self._recalled = True
            with self._turn:
                self._dealer.send(pack_numbers(RECALL, sent))


_connections: set[Connection] = set()
_left_behind: list[Connection] = []


def _forget_connections() -> None:
    """In a forked child: give up all connections, because their threads do not exist here."""
    for connection in _connections:
        connection._lost = connection._left_behind = True
        # The bell's lock may be held by a thread that does not exist in the child.
        connection._bell.asleep = False
        connection.refusal = RuntimeError(
            f"the connection to {connection.address} belongs to another process"
        )
    _left_behind.extend(_connections)
    _connections.clear()


os.register_at_fork(after_in_child=_forget_connections)
