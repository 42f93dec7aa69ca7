"""The session of one peer: its calls on their way through a pool, and their results, all as bytes.

    WORK ── add_item ──> definitions: label, ForwardedFunction(bytes)
                    └──> waiting calls ── submit_waiting ──> promises ── make_result ──> RESULTS

A server has a session for each client, and a host that has joined a server has one for the server.
Each has definitions and numbers of its own. Nothing of a peer is unpickled here: see
drone/forwarded.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..drone.forwarded import ForwardedFunction, pack_error, run_client_call
from ..engines.remote.messages import Item, Result, read_sizes
from ..errors import Malformed, copy_error
from ..pool.config import check_needs
from ..pool.drone_handle import DroneHandle
from ..pool.interfaces import State, TaskOptions
from ..pool.task import Task
from ..promises.promise import Promise, stored_error, when_settled
from ..store.shared import Shared
from ..wire.messages import (
    CALL,
    CALL_FILLED,
    CALL_KEYWORDS,
    DEFINE_CALLABLE,
    DEFINE_CODE,
    ERROR,
    FORGET,
    FRESH,
    WITHDRAWN,
)

if TYPE_CHECKING:
    from ..pool.dispatcher import Dispatcher


class ClientFunction:
    """A function that a peer has defined. `number` is unique in this process."""

    __slots__ = ("__weakref__", "forwarded", "kind", "label", "number", "payload", "tag")

    def __init__(self, kind: int, label: str, payload: bytes, tag: str) -> None:
        self.number = next(_numbers)
        self.kind = kind
        self.label = label
        self.payload = payload
        self.tag = tag
        self.forwarded = ForwardedFunction(run_client_call, tag, kind, payload)


_numbers = itertools.count(1)


class ClientCall(NamedTuple):
    """A call of a peer that was submitted."""

    promise: Promise[Any]
    task: Task | None  # None if the pool has refused the call, or it was cancelled before
    function: ClientFunction | None = None


class ClientSession:
    """The functions and calls of one peer.

    `on_settled` is called with the number and the promise of each call, in any thread. Output of
    the calls is marked with `tag`; if None, with the tag in the call's definition.
    """

    def __init__(
        self,
        submit_call: Callable[[ClientFunction, Item, Sequence[Shared[Any]]], Task],
        on_settled: Callable[[int, Promise[Any]], object],
        tag: str | None,
    ) -> None:
        self._submit_call = submit_call
        self._on_settled = on_settled
        self._tag = tag
        self.definitions: dict[int, ClientFunction] = {}
        self.waiting: dict[int, tuple[ClientFunction, Item, list[Shared[Any]]]] = {}
        self.calls: dict[int, ClientCall] = {}
        self._reported_running: set[int] = set()  # keys of `calls`, returned by `newly_running`
        self.shared: dict[int, Shared[Any]] = {}  # the peer's values in the pool's shared memory

    def add_item(self, item: Item) -> None:
        """Add a definition or a call. Raise `Malformed`."""
        if item.kind & ~FRESH in (DEFINE_CALLABLE, DEFINE_CODE):
            extra = item.read_extra()
            label = extra.get("label")
            tag = extra.get("tag", "") if self._tag is None else self._tag
            if not (isinstance(label, str) and isinstance(tag, str)):
                raise Malformed("a definition without a label")
            label = label[:200].encode("utf-8", "replace").decode()
            self.definitions[item.number] = ClientFunction(item.kind, label, item.payload, tag)
        elif item.kind == FORGET:
            self.definitions.pop(item.number, None)
        elif item.kind in (CALL, CALL_KEYWORDS, CALL_FILLED):
            numbers = item.read_extra().get("shared", [])
            if not isinstance(numbers, list) or not all(type(each) is int for each in numbers):
                raise Malformed("a call without the numbers of its shared values")
            function = self.definitions.get(item.definition)
            if function is None or item.number in self.calls or item.number in self.waiting:
                raise Malformed(
                    f"a call of the unknown definition {item.definition}, or with a number that is "
                    "in use"
                )
            self.waiting[item.number] = function, item, [self.shared[number] for number in numbers]
        else:
            raise Malformed(f"an item of unknown kind {item.kind}")

    def function_bytes(self) -> int:
        """Return the bytes of the functions that are defined, or in use by unanswered calls."""
        waiting = (function for function, *_ in self.waiting.values())
        submitted = (call.function for call in self.calls.values())
        functions = {*self.definitions.values(), *waiting, *submitted}
        return sum(len(each.payload) for each in functions if each is not None)

    def submit_waiting(self, limit: int = sys.maxsize) -> None:
        """Submit waiting calls in order, until the pool has `limit` calls of this session."""
        while self.waiting and len(self.calls) < limit:
            number = next(iter(self.waiting))
            function, item, shared = self.waiting.pop(number)
            try:
                task = self._submit_call(function, item, shared)
                call = ClientCall(task.promise, task, function)
            except Exception as error:  # the pool takes no more tasks
                call = ClientCall(Promise(), None)
                call.promise.set_exception(copy_error(error))
            self._add(number, call)

    def _add(self, number: int, call: ClientCall) -> None:
        self.calls[number] = call
        when_settled(call.promise, partial(self._on_settled, number))

    def newly_running(self) -> list[int]:
        """Return the running calls that no earlier call of this method has returned."""
        self._reported_running &= self.calls.keys()
        numbers = [
            number
            for number, call in self.calls.items()
            if number not in self._reported_running and call.promise.running()
        ]
        self._reported_running.update(numbers)
        return numbers

    def cancel(self, numbers: Iterable[int], running: bool) -> None:
        for number in numbers:
            if self.waiting.pop(number, None) is not None:
                self._add(number, ClientCall(Promise(), None))
            call = self.calls.get(number)
            if call is not None and (running or call.task is None or not call.task.is_leased):
                call.promise.cancel(running=running)

    def cancel_each(self) -> bool:
        """Cancel all calls and report their outcomes. Return False if there were none."""
        numbers = [*self.waiting, *reversed(self.calls)]  # in the order of `cancel_all`
        self.cancel(numbers, running=True)
        return bool(numbers)

    def cancel_all(self) -> int:
        """Cancel all calls without reporting their outcomes; return their number."""
        calls = list(self.calls.values())
        count = len(calls) + len(self.waiting)
        self.calls.clear()
        self.waiting.clear()
        self.shared.clear()
        self.definitions.clear()
        # Newest first: a waiting call would otherwise begin when a running one is cancelled.
        for call in reversed(calls):
            call.promise.cancel()
        return count


def submit_call(
    dispatcher: Dispatcher, function: ClientFunction, item: Item, shared: Sequence[Shared[Any]] = ()
) -> Task:
    """Submit a call to the pool.

    Raise the errors of `Pool.promise`, and `RuntimeError` if the call's target drone has ended.
    """
    handle = find_drone(dispatcher, item.target) if item.target else None
    task_options = None
    if item.timeout is not None or item.retries is not None or item.priority or item.extra:
        defaults = dispatcher.task_options
        task_options = TaskOptions(
            item.timeout or defaults.timeout,
            defaults.retries if item.retries is None else item.retries,
            item.priority,
            check_needs(read_sizes(item.read_extra().get("needs", {})), dispatcher.resource_sizes),
        )
    # Set the label before the call is recorded, and each time: a refresh makes new definitions.
    dispatcher.registry.define(function.forwarded, warns=False).label = function.label
    task = Task(dispatcher)
    task.first_item, task.client_tag = item.map_index, function.tag
    args = item.kind, item.payload, *shared
    dispatcher.submit(function.forwarded, args, {}, handle, task_options, task)
    if hasattr(task, "definition"):
        task.client_function, task.may_be_lent = function, not shared
    return task


def find_drone(dispatcher: Dispatcher, number: int) -> DroneHandle:
    """Return the drone of that number. Raise `RuntimeError` if it has ended."""
    for handle in list(dispatcher.handles):
        if handle.number == number and handle.state is not State.DEAD:
            return handle
    raise RuntimeError(
        f"the drone has ended: {dispatcher.config.name} has no drone of number {number}"
    )


def make_result(number: int, promise: Promise[Any]) -> Result:
    """Return the result of a settled promise, under the number that the peer knows."""
    error, tail = stored_error(promise), promise.output
    if promise.cancelled():
        return number, WITHDRAWN, b"", tail
    if error is None:
        status, payload, *_ = promise.result()
        return number, status, payload, tail
    return number, ERROR, pack_error(error), tail
