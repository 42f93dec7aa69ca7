"""A desk: one peer's calls on their way through a pool, as bytes, and the bytes that come of them.

    WORK ── take ──> definitions: label, ForwardedFunction(bytes)
                └──> calls that wait ── begin ──> a promise for each ── settled ──> outcome ──> RESULTS

Each client of a server has one, with definitions and numbers of its own. Nothing of a peer's is
unpickled here: see drone/forwarded.py."""

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
    """A definition of a peer's. `number` tells it from all others of this process."""

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
    """`settled` is called with the number and the promise of each call, in any thread. What the
    calls print is marked with `tag`; None: with what came with their definition."""

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
        self._told: set[int] = set()  # of these, those that `begun` has given
        self.shared: dict[int, Shared[Any]] = {}  # its values that lie in the pool's shared memory

    def take(self, item: Item) -> None:
        """Raises `Malformed`."""
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
        """Give waiting calls to the pool, in their order, until it has `room` calls of this
        desk."""
        while self.waiting and len(self.tasks) < room:
            number = next(iter(self.waiting))
            given, item, shared = self.waiting.pop(number)
            try:
                promise = self._run(given, item, shared)
            except Exception as error:  # it takes no more
                promise = Promise()
                promise.set_exception(another(error))
            self._add(number, promise)

    def _add(self, number: int, promise: Promise[Any]) -> None:
        self.tasks[number] = promise
        promise._hook(partial(self._settled, number))

    def begun(self) -> list[int]:
        """The calls that are running, and were not told of by this."""
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
        """Cancels all; nobody is told what comes of it. How many there were."""
        tasks = list(self.tasks.values())
        count = len(tasks) + len(self.waiting)
        self.tasks.clear()
        self.waiting.clear()
        self.shared.clear()
        self._definitions.clear()
        for promise in reversed(
            tasks
        ):  # those that wait first, or they would begin as what runs is broken off
            promise.cancel()
        return count


def run(
    pool: Pool, given: ClientFunction, item: Item, shared: Sequence[Shared[Any]] = ()
) -> Promise[Any]:
    """Raises what `Pool.promise` raises, and `RuntimeError` where the drone that was asked for has
    ended."""
    dispatcher = pool._dispatcher
    handle = find(pool, item.target) if item.target else None
    task_options = None
    if item.timeout is not None or item.retries is not None:
        own = dispatcher.task_options
        task_options = TaskOptions(
            item.timeout or own.timeout, own.retries if item.retries is None else item.retries
        )
    dispatcher.registry.define(
        given.call
    ).label = given.label  # before it is recorded; each time: a refresh makes new ones
    task = dispatcher.submit(
        given.call, (item.kind, item.payload, *shared), {}, handle, task_options
    )
    if hasattr(task, "definition"):
        task.party = given.tag
        task.relays = None if shared else given  # shared memory is for our own drones
    return task


def find(pool: Pool, number: int) -> DroneHandle:
    """The drone of that number. Raises `RuntimeError` where there is none."""
    for handle in list(pool._dispatcher.handles):
        if handle.number == number and handle.state is not State.DEAD:
            return handle
    raise RuntimeError(
        f"the drone has ended: {pool._dispatcher.config.name} has none of number {number} any more"
    )


def outcome(number: int, promise: Promise[Any]) -> Result:
    """Of what is settled, under the number that its peer knows."""
    error, tail = promise._exception, promise.output
    if promise._state == CANCELLED:
        return number, WITHDRAWN, b"", tail
    if error is None:
        status, payload = promise.result()
        return number, status, payload, tail
    return number, ERROR, pack_error(error), tail
