"""The server's side of `join`: clients' calls that drones of another process run.

    dispatcher.queue ── lend ──> host.in_flight ── WORK ──> the host's queue ──> its drones
        ^                             │ RESULTS ──> the call's promise
        ├── come_back <── RETURNED ───┤
        └── retries, or DroneDied <───┘ the host was lost

Each call runs once, because it is in one place at any moment: in the dispatcher's queue, before any
drone has it (only holders of the reactor's lock take from the queue); in flight at one joined host;
or in flight at a drone of this pool. A call leaves a host's in-flight table by its result, because
the host gives it back, or by the host's loss. The host takes a returned call out of its own
dispatcher's queue in the same way, so the call cannot begin there any more and is queued here
again. If a host is lost, which calls had begun is unknown, so all count as begun: they are rejected
with `DroneDied`, or run again if they have `retries`.

A host that leaves sets its window to 0. The server answers BYE and sends no further calls, so a
host that has received BYE and has no calls left can disconnect.
"""

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
"""Bits of a drone's number at its host. The bits above hold the host's index."""


class JoinedHost(Flow):
    """One joined host, as the server sees it."""

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
    """The joined hosts of a server. Methods need the server's lock, unless stated otherwise."""

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
        """Lend queued calls to hosts that have room, and tell hosts which definitions to forget."""
        for each in self:
            if each.defined.unused:
                unused = [Item(number, 0, FORGET) for number in each.defined.take_unused()]
                self._server._send(each.identity, pack_work(unused))
        roomy = [(each, each.room) for each in self if each.room > 0 and each.drones]
        if roomy and self._dispatcher.queue and not self._leases:
            self._leases = True
            self._dispatcher.reactor.post(partial(self._lend, roomy))

    def _lend(self, roomy: list[tuple[JoinedHost, int]]) -> None:
        """Take calls from the queue, holding the reactor's lock."""
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
            if task.done():  # cancelled meanwhile
                continue
            try:
                kind, payload = task.captured()
            except Exception as error:  # the pool has ended and its memory was freed
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
        """Cancel the call at its host if the task was cancelled. Any thread may call this."""
        if task._state == CANCELLED:
            assert isinstance(task, Task)
            self._server._post(partial(self._withdraw, worker, task.number))

    def _withdraw(self, worker: JoinedHost, number: int) -> None:
        if worker.in_flight.pop(number, None) is not None:
            self._server._send(worker.identity, pack_numbers(CANCEL, [number]))

    def take_back(self) -> None:
        """Recall calls that wait at one host while drones elsewhere are idle.

        A host's window was sized for short calls; calls may turn out to wait behind long ones.
        """
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

    # -- messages of a joined host -----------------------------------------------------------------

    def hear(self, worker: JoinedHost, frames: list[bytes]) -> None:
        """Handle a message of a host. Raise `Malformed`."""
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
            worker.window = sum(read_numbers(frames))  # one number
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
            if status == WITHDRAWN:  # the host's pool was shut down
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
        """Return the drones' states as their hosts last reported them. Any thread may call this."""
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
        """Run a call on one drone of a host. Raise `RuntimeError` if the host is gone."""
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
        """Send an admin request to a drone's host. Raise `RuntimeError` if the host is gone."""
        self._ask(self._worker_of(number), what, number, tell)

    def timelines(self) -> list[Promise[Timeline]]:
        """Return, for each host, a promise of its drones' timeline, by this machine's clock."""
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
    """Settle `promise`, holding the server's lock. A host may send any value."""
    try:
        timeline = unpack_timeline(value["timeline"], value["now"] - monotonic())
    except (TypeError, ValueError, LookupError, AttributeError) as wrong:
        promise._settle(FINISHED, None, RuntimeError(error or f"no timeline: {wrong}"))
    else:
        promise._settle(FINISHED, timeline, None)


def _is_relayed(task: Task) -> bool:
    return task.relays is not None


def _checked(drones: Any) -> list[dict[str, Any]]:
    """Return `drones` if well-formed; else raise `Malformed`."""
    if not isinstance(drones, list) or not all(
        isinstance(each, dict) and each.keys() >= {*KNOWN} and isinstance(each["number"], int)
        for each in drones
    ):
        raise Malformed("drones that are none")
    return drones


def _aged(drone: dict[str, Any], seconds: float) -> float | None:
    known = drone.get("seconds")
    return known + seconds if isinstance(known, float) else None
