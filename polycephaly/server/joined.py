"""The server's side of `join`: clients' calls that drones of another process run.

    crew.queue ── lend, in a turn of the hub ──> worker.flight ── WORK ──> the worker's queue ──> its drones
        ^                                             │ RESULTS ──> the call's promise
        ├── come back <── RETURNED ───────────────────┤
        └── retries, or DroneDied <── it was lost ────┘

Who owns a call, and so why each runs once. It is in one place at any moment: in the crew's queue,
where no drone has got it (only turns of the hub take from it); in the flight of one worker; or in
that of one of our own drones. It leaves a worker's flight by its result, because the worker gives
it back, or by the worker's loss. A worker gives back what it has taken out of its own crew's queue
in the same way, so it has not begun and cannot begin there any more: it is queued here again. Of a
worker that is lost nobody knows what it had begun, so all that it had counts as begun: it is
rejected with `DroneDied`, or, where it has `retries`, run again.

How much a worker gets it says itself, by its window: one call for each drone where calls are long,
as many as fill the way there and back where they are short. What turns out to lie there behind long
calls, while somebody else is idle, is asked back.

A worker that leaves sets its window to 0. We answer BYE: nothing more comes. So when it has had
that, and has nothing left, nothing is on its way to it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..engines.remote.messages import (
    ASK,
    BYE,
    CANCEL,
    NEWS,
    OUTPUT,
    RECALL,
    RESULTS,
    RETURNED,
    RUNNING,
    TELL,
    WINDOW,
    Item,
    Result,
    pack_definition,
    pack_note,
    pack_numbers,
    pack_work,
    read_lines,
    read_note,
    read_numbers,
    read_results,
)
from ..errors import DroneDied
from ..pool.drone_handle import State
from ..pool.task import Task
from ..promises.promise import CANCELLED, FINISHED, Promise
from ..timeline.plain import unpack_timeline
from ..timeline.timeline import Timeline
from ..wire.functions import KnownFunctions
from ..wire.messages import FORGET, WITHDRAWN, Malformed
from .flow_control import Flow
from .session import ClientFunction
from .state import KNOWN

if TYPE_CHECKING:
    from .server import Server

__all__ = ["JoinedHost", "JoinedHosts"]

log = logging.getLogger("polycephaly")

_INDEX = 32
"""A drone of a worker has the worker's index above so many bits, and its number there below."""


class JoinedHost(Flow):
    def __init__(self, identity: bytes, key: str, index: int, who: dict[str, Any]) -> None:
        super().__init__(monotonic())
        self.identity = identity
        self.key = key
        self.told = monotonic()
        self.index = index
        self.name = f"{who.get('name')} on {who.get('host')}"
        self.window = 0
        self.leaves = False
        self.recalled = False
        self.in_flight: dict[int, Task] = {}
        self.defined = KnownFunctions()
        self.drones: list[dict[str, Any]] = []
        self.asked: dict[int, Callable[..., None]] = {}

    @property
    def room(self) -> int:
        return self.window - len(self.in_flight)


class JoinedHosts:
    """Used in the server's turns, except where something else is said."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._dispatcher = server._pool._dispatcher
        self._workers: dict[bytes, JoinedHost] = {}
        self._indices = itertools.count(1)
        self._ask_numbers = itertools.count(1)
        self._leases = False

    def __bool__(self) -> bool:
        return bool(self._workers)

    def __iter__(self) -> Iterator[JoinedHost]:
        return iter(list(self._workers.values()))

    def get(self, identity: bytes) -> JoinedHost | None:
        return self._workers.get(identity)

    def admit(self, identity: bytes, key: str, who: dict[str, Any]) -> None:
        worker = self._workers[identity] = JoinedHost(identity, key, next(self._indices), who)
        log.info("%s has joined", worker.name)

    # -- calls -------------------------------------------------------------------------------------

    def share(self) -> None:
        """Has the hub lend what no drone has got to those who have room; those who have what is not
        used any more are told."""
        for each in self:
            if each.defined.unused:
                unused = [Item(number, 0, FORGET) for number in each.defined.take_unused()]
                self._server._send(each.identity, pack_work(unused))
        roomy = [(each, each.room) for each in self if each.room > 0 and each.drones]
        if roomy and self._dispatcher.queue and not self._leases:
            self._leases = True
            self._dispatcher.reactor.post(partial(self._lend, roomy))

    def _lend(self, roomy: list[tuple[JoinedHost, int]]) -> None:
        """In a turn of the hub."""
        for worker, room in roomy:
            tasks = self._dispatcher.leases.lend(room, _is_relayed)
            if tasks:
                self._server._post(partial(self._give, worker, tasks))
        self._server._post(self._has_lent)

    def _has_lent(self) -> None:
        self._leases = False

    def _give(self, worker: JoinedHost, tasks: list[Task], target: int = 0) -> None:
        if worker.identity not in self._workers or (worker.leaves and not target):
            self._not_given(tasks, target)
            return
        items: list[Item] = []
        given: list[Task] = []
        for task in tasks:
            if task.done():  # cancelled on its way
                continue
            try:
                kind, payload = task.captured()
            except Exception as error:  # the pool has ended, and its memory with it
                self._post(partial(self._dispatcher.leases.lost, [task], error))
                continue
            self._define(worker, task.relays, items)
            items.append(
                Item(
                    task.number,
                    task.relays.number,
                    kind,
                    payload,
                    target,
                    task.timeout,
                    task.retries,
                )
            )
            given.append(task)
        if not given:
            return
        if not self._server._send(worker.identity, pack_work(items)):
            self._not_given(given, target)
            return
        for task in given:
            worker.in_flight[task.number] = task
            task._hook(partial(self._look_if_cancelled, worker))

    def _not_given(self, tasks: list[Task], target: int) -> None:
        if target:
            error = RuntimeError("the drone has ended: its worker has left")
            self._post(partial(self._dispatcher.leases.lost, tasks, error))
        else:
            self._post(partial(self._dispatcher.leases.come_back, tasks))

    def _define(self, worker: JoinedHost, given: ClientFunction, items: list[Item]) -> None:
        if given.number not in worker.defined:
            items += [Item(oldest, 0, FORGET) for oldest in worker.defined.add(given)]
            items.append(
                Item(
                    given.number,
                    0,
                    given.kind,
                    pack_definition(given.label, given.payload, given.tag),
                )
            )

    def _look_if_cancelled(self, worker: JoinedHost, task: Promise[Any]) -> None:
        """In any thread."""
        if task._state == CANCELLED:
            assert isinstance(task, Task)
            self._server._post(partial(self._withdraw, worker, task.number))

    def _withdraw(self, worker: JoinedHost, number: int) -> None:
        if worker.in_flight.pop(number, None) is not None:
            self._server._send(worker.identity, pack_numbers(CANCEL, [number]))

    def take_back(self) -> None:
        """What waits at a worker while somebody else is idle is asked back."""
        if self._dispatcher.queue:
            return
        idle = sum(
            handle.state is State.READY and not handle.in_flight
            for handle in list(self._dispatcher.handles)
        )
        for worker in self:
            others = sum(
                max(0, len(each.drones) - len(each.in_flight))
                for each in self
                if each is not worker
            )
            waiting = len(worker.in_flight) - len(worker.drones)
            if waiting > 0 and idle + others > 0 and not worker.recalled:
                worker.recalled = True
                self._server._send(
                    worker.identity, pack_numbers(RECALL, [min(waiting, idle + others)])
                )

    # -- what a worker says ------------------------------------------------------------------------

    def hear(self, worker: JoinedHost, frames: list[bytes]) -> None:
        """Raises `Malformed`."""
        kind = frames[0]
        if kind == RESULTS:
            self._settle(worker, list(read_results(frames)))
        elif kind == RETURNED:
            worker.recalled = False
            back = [
                task
                for number in read_numbers(frames)
                if (task := worker.in_flight.pop(number, None)) is not None
            ]
            self._post(partial(self._dispatcher.leases.come_back, back))
        elif kind == WINDOW:
            worker.window = sum(read_numbers(frames))  # of one
            if not worker.window:
                worker.leaves = True
                self._server._send(worker.identity, [BYE])
        elif kind == NEWS:
            worker.drones = _checked(read_note(frames).get("drones"))
            worker.told = worker.heard
        elif kind == RUNNING:
            for number in read_numbers(frames):
                if (task := worker.in_flight.get(number)) is not None:
                    task.runs_elsewhere = True
        elif kind == OUTPUT:
            self._server.tell_lines(read_lines(frames, 4))
        elif kind == TELL:
            note = read_note(frames)
            tell = (
                worker.asked.pop(note.get("id", 0), None)
                if isinstance(note.get("id"), int)
                else None
            )
            if tell is not None:
                tell(**{name: note[name] for name in ("value", "error") if name in note})
        elif kind == BYE:
            self.drop(worker, "it has left")
        else:
            raise Malformed(f"a message of type {kind[:8]!r}")

    def _settle(self, worker: JoinedHost, results: list[Result]) -> None:
        settled = []
        for number, status, payload, tail in results:
            task = worker.in_flight.pop(number, None)
            if task is None:
                continue
            task.output = tail
            if status == WITHDRAWN:  # its pool was told to end
                task.cancel()
            else:
                task._settle(FINISHED, (status, payload), None)
                settled.append(task)
        self._post(partial(self._dispatcher.leases.settled, settled))

    def drop(self, worker: JoinedHost, why: str) -> None:
        if self._workers.pop(worker.identity, None) is None:
            return
        tasks = list(worker.in_flight.values())
        log.log(
            logging.WARNING if tasks else logging.INFO,
            "%s: %s; it had %d calls",
            worker.name,
            why,
            len(tasks),
        )
        for task in tasks:
            label = task.relays.label
            error = DroneDied(
                f"worker {worker.name} was lost with {label}, which it had perhaps begun: {why}",
                drone=worker.name,
                running=label,
            )
            self._post(partial(self._dispatcher.leases.lost, [task], error))
        for tell in worker.asked.values():
            tell(error=f"the drone has ended: worker {worker.name} was lost")

    def close(self) -> None:
        for worker in self:
            self._server._send(worker.identity, [BYE])
            self.drop(worker, "the server was closed")

    # -- single drones -----------------------------------------------------------------------------

    def drones(self) -> list[dict[str, Any]]:
        """In any thread: as their workers last told."""
        now = monotonic()
        return [
            {
                **each,
                "number": worker.index << _INDEX | each["number"],
                "seconds": _aged(each, now - worker.told),
            }
            for worker in self
            for each in worker.drones
        ]

    def has(self, number: int) -> bool:
        return bool(number >> _INDEX)

    def _worker_of(self, number: int) -> JoinedHost:
        for worker in self:
            if worker.index == number >> _INDEX:
                return worker
        raise RuntimeError(
            f"the drone has ended: its worker is not connected to {self._dispatcher.config.name} any more"
        )

    def run(self, given: ClientFunction, item: Item) -> Promise[Any]:
        """A call for one of its drones. Raises `RuntimeError` where its worker is gone."""
        worker = self._worker_of(item.target)
        dispatcher = self._dispatcher
        dispatcher.check_open()
        task = Task(dispatcher)
        task.definition = dispatcher.registry.define(given.call)
        task.definition.label = given.label
        task.relays, task.args, task.lent = given, (item.kind, item.payload), True
        task.timeout = item.timeout or dispatcher.task_options.timeout
        dispatcher.hold(task)
        self._give(worker, [task], item.target & (1 << _INDEX) - 1)
        return task

    def ask(self, what: str, number: int, tell: Callable[..., None]) -> None:
        """Raises `RuntimeError` where its worker is gone."""
        self._ask(self._worker_of(number), what, number, tell)

    def timelines(self) -> list[Promise[Timeline]]:
        """Of each worker, a promise of what its drones have done, in times of our clock."""
        told: list[Promise[Timeline]] = []
        for worker in self:
            promise: Promise[Timeline] = Promise()
            told.append(promise)
            self._ask(worker, "timeline", 0, partial(_take_timeline, promise))
        return told

    def _ask(self, worker: JoinedHost, what: str, number: int, tell: Callable[..., None]) -> None:
        asked = next(self._ask_numbers)
        worker.asked[asked] = tell
        note = {"id": asked, "what": what, "drone": number & (1 << _INDEX) - 1}
        self._server._send(worker.identity, pack_note(ASK, note))

    def _post(self, act: Callable[[], object]) -> None:
        self._dispatcher.reactor.post(act)


def _take_timeline(promise: Promise[Timeline], value: Any = None, error: str = "") -> None:
    """In the server's turn. What a worker says may be anything."""
    try:
        timeline = unpack_timeline(value["timeline"], value["now"] - monotonic())
    except (TypeError, ValueError, LookupError, AttributeError) as wrong:
        promise._settle(FINISHED, None, RuntimeError(error or f"no timeline: {wrong}"))
    else:
        promise._settle(FINISHED, timeline, None)


def _is_relayed(task: Task) -> bool:
    return task.relays is not None


def _checked(drones: Any) -> list[dict[str, Any]]:
    """Raises `Malformed`."""
    if not isinstance(drones, list) or not all(
        isinstance(each, dict) and each.keys() >= {*KNOWN} and isinstance(each["number"], int)
        for each in drones
    ):
        raise Malformed("drones that are none")
    return drones


def _aged(drone: dict[str, Any], seconds: float) -> float | None:
    known = drone.get("seconds")
    return known + seconds if isinstance(known, float) else None
