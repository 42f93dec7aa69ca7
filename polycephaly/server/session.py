"""The session of one peer: its calls on their way through a pool, and their results, all as bytes.

    WORK ── take ──> definitions: label, ForwardedFunction(bytes)
                └──> waiting calls ── begin ──> promises ── settled ──> outcome ──> RESULTS

Each client of a server has a session, with definitions and numbers of its own. Nothing of a peer is
unpickled here: see drone/forwarded.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..drone.forwarded import ForwardedFunction, pack_error, relayed
from ..engines.remote.messages import SHARES, Item, Result, read_definition, read_shares
from ..errors import another
from ..pool.config import TaskOptions
from ..pool.drone_handle import DroneHandle, State
from ..promises.promise import CANCELLED, Promise
from ..store.shared import Shared
from ..wire.messages import (
    CALL,
    CALL_FILLED,
    CALL_KEYWORDS,
    DEFINE_CALLABLE,
    DEFINE_CODE,
    ERROR,
    FORGET,
    WITHDRAWN,
    Malformed,
)

if TYPE_CHECKING:
    from ..pool.pool import Pool

__all__ = ["ClientFunction", "ClientSession", "find", "outcome", "run"]


class ClientFunction:
    """A function that a peer has defined. `number` is unique in this process."""

    __slots__ = ("__weakref__", "call", "kind", "label", "number", "payload", "tag")

    def __init__(self, kind: int, label: str, payload: bytes, tag: str) -> None:
        self.number = next(_numbers)
        self.kind = kind
        self.label = label
        self.payload = payload
        self.tag = tag
        self.call = ForwardedFunction(relayed, tag, kind, payload)


_numbers = itertools.count(1)


class ClientSession:
    """The functions and calls of one peer.

    `settled` is called with the number and the promise of each call, in any thread. Output of the
    calls is marked with `tag`; if None, with the tag in the call's definition.
    """

    def __init__(
        self,
        run: Callable[[ClientFunction, Item, Sequence[Shared[Any]]], Promise[Any]],
        settled: Callable[[int, Promise[Any]], object],
        tag: str | None,
    ) -> None:
        self._run = run
        self._settled = settled
        self._tag = tag
        self._definitions: dict[int, ClientFunction] = {}
        self.waiting: dict[int, tuple[ClientFunction, Item, list[Shared[Any]]]] = {}
        self.tasks: dict[int, Promise[Any]] = {}
        self._told: set[int] = set()  # those of `tasks` that `begun` has returned
        self.shared: dict[int, Shared[Any]] = {}  # the peer's values in the pool's shared memory

    def take(self, item: Item) -> None:
        """Take a definition or a call. Raise `Malformed`."""
        if item.kind in (DEFINE_CALLABLE, DEFINE_CODE):
            label, payload, tag = read_definition(item.payload)
            self._definitions[item.number] = ClientFunction(
                item.kind, label, payload, tag if self._tag is None else self._tag
            )
        elif item.kind == FORGET:
            self._definitions.pop(item.number, None)
        elif item.kind & ~SHARES in (CALL, CALL_KEYWORDS, CALL_FILLED):
            numbers: list[int] = []
            if item.kind & SHARES:
                numbers, payload = read_shares(item.payload)
                item = item._replace(kind=item.kind & ~SHARES, payload=payload)
            given = self._definitions.get(item.definition)
            if given is None or item.number in self.tasks or item.number in self.waiting:
                raise Malformed(
                    f"a call of definition {item.definition}, which is not there, or with a number that is in use"
                )
            self.waiting[item.number] = given, item, [self.shared[number] for number in numbers]
        else:
            raise Malformed(f"an item of kind {item.kind}")

    def begin(self, room: int = sys.maxsize) -> None:
        """Submit waiting calls in order, until the pool has `room` calls of this session."""
        while self.waiting and len(self.tasks) < room:
            number = next(iter(self.waiting))
            given, item, shared = self.waiting.pop(number)
            try:
                promise = self._run(given, item, shared)
            except Exception as error:  # the pool takes no more tasks
                promise = Promise()
                promise.set_exception(another(error))
            self._add(number, promise)

    def _add(self, number: int, promise: Promise[Any]) -> None:
        self.tasks[number] = promise
        promise._hook(partial(self._settled, number))

    def begun(self) -> list[int]:
        """Return the running calls that no earlier call of this method has returned."""
        self._told &= self.tasks.keys()
        begun = [
            number
            for number, task in self.tasks.items()
            if number not in self._told and task.running()
        ]
        self._told.update(begun)
        return begun

    def cancel(self, numbers: Iterable[int], running: bool) -> None:
        for number in numbers:
            if self.waiting.pop(number, None) is not None:
                self._add(number, Promise())
            promise = self.tasks.get(number)
            if promise is not None and (running or not getattr(promise, "lent", False)):
                promise.cancel(running=running)

    def drop(self) -> int:
        """Cancel all calls without reporting their outcomes; return their number."""
        tasks = list(self.tasks.values())
        count = len(tasks) + len(self.waiting)
        self.tasks.clear()
        self.waiting.clear()
        self.shared.clear()
        self._definitions.clear()
        # Newest first: a waiting call would otherwise begin when a running one is cancelled.
        for promise in reversed(tasks):
            promise.cancel()
        return count


def run(
    pool: Pool, given: ClientFunction, item: Item, shared: Sequence[Shared[Any]] = ()
) -> Promise[Any]:
    """Submit a call to the pool.

    Raise the errors of `Pool.promise`, and `RuntimeError` if the call's target drone has ended.
    """
    dispatcher = pool._dispatcher
    handle = find(pool, item.target) if item.target else None
    task_options = None
    if item.timeout is not None or item.retries is not None:
        own = dispatcher.task_options
        task_options = TaskOptions(
            item.timeout or own.timeout, own.retries if item.retries is None else item.retries
        )
    # Set the label before the call is recorded, and each time: a refresh makes new definitions.
    dispatcher.registry.define(given.call).label = given.label
    task = dispatcher.submit(
        given.call, (item.kind, item.payload, *shared), {}, handle, task_options
    )
    if hasattr(task, "definition"):
        task.party = given.tag
        task.relays = None if shared else given  # shared values are for local drones
    return task


def find(pool: Pool, number: int) -> DroneHandle:
    """Return the drone of that number. Raise `RuntimeError` if it has ended."""
    for handle in list(pool._dispatcher.handles):
        if handle.number == number and handle.state is not State.DEAD:
            return handle
    raise RuntimeError(
        f"the drone has ended: {pool._dispatcher.config.name} has none of number {number} any more"
    )


def outcome(number: int, promise: Promise[Any]) -> Result:
    """Return the result of a settled promise, under the number that the peer knows."""
    error, tail = promise._exception, promise.output
    if promise._state == CANCELLED:
        return number, WITHDRAWN, b"", tail
    if error is None:
        status, payload = promise.result()
        return number, status, payload, tail
    return number, ERROR, pack_error(error), tail
