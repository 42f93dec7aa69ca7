"""The server's side of `join`: clients' calls that drones of another process run.

    the pool's queue ── lease ──> host.in_flight ── WORK ──> the host's queue ──> its drones
        ^                                 │ RESULTS ──> the call's promise
        ├── requeue_unstarted <─ RETURNED ┤
        └── retries, or DroneDied <───────┘ the host was lost

A call is in one place at any moment: in the dispatcher's queue, before any drone has it (only
holders of the reactor's lock take from the queue); in flight at one joined host; or in flight at a
drone of this pool. A call leaves a host's in-flight table by its result or cancellation, because
the host gives it back, or by the host's loss. The host takes a returned call out of its own
dispatcher's queue in the same way, so the call cannot begin there any more and is queued here
again. If a host is lost, which calls had begun is unknown, so all count as begun: they are rejected
with `DroneDied`, or run again if they have `retries`. So without `retries` no call runs twice.

A host that leaves sets its window to 0. The server answers BYE and sends no further calls, except
calls for a single drone of the host. A host that has received BYE and has no calls left
disconnects. A call for a single drone that is on its way then is lost with the host.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engines.remote import messages
from ..engines.remote.messages import Item, Result
from ..errors import DroneDied, Malformed
from ..pool import leases
from ..pool.interfaces import State
from ..pool.items import with_item
from ..pool.status import IDENTITY_FIELDS
from ..pool.task import Task
from ..pool.task_state import LEASED
from ..promises.promise import Promise, fulfill, reject, when_settled
from ..runtime.clock import monotonic
from ..timeline.plain import unpack_timeline
from ..timeline.timeline import Timeline
from ..wire.functions import KnownFunctions
from ..wire.messages import WITHDRAWN
from ..wire.output import Line
from .flow_control import Peer
from .session import ClientFunction

if TYPE_CHECKING:
    from ..pool.dispatcher import Dispatcher

log = logging.getLogger("polycephaly")

_INDEX_SHIFT = 32
"""Bits of a drone's number at its host. The bits above hold the host's index."""

MAX_CALLS_PER_MESSAGE = 8192
"""The head of their message, with two more items for each, stays within `MAX_FRAME_BYTES`."""


class JoinedHost(Peer):
    """One joined host, as the server sees it."""

    def __init__(self, index: int, *peer: Any) -> None:
        super().__init__(*peer)
        self.status_at = monotonic()
        self.index = index
        self.window = 0
        self.may_recall = True
        self.in_flight: dict[int, Task] = {}
        self.sent_functions = KnownFunctions()
        self.drones: list[dict[str, Any]] = []
        self.pending_requests: dict[int, Callable[..., None]] = {}

    @property
    def credit(self) -> int:
        """Number of further calls that the host takes now; none if zero or less."""
        return self.window - len(self.in_flight)


class JoinedHosts:
    """The joined hosts of a server. Methods need the server's lock, unless stated otherwise.

    `post` has the server's loop call a function.
    """

    def __init__(
        self, dispatcher: Dispatcher, post: Callable[[Callable[[], object]], object]
    ) -> None:
        self._dispatcher = dispatcher
        self._post = post
        self._hosts: dict[bytes, JoinedHost] = {}
        self._indices = itertools.count(1)
        self._request_numbers = itertools.count(1)
        self._is_lending = self._is_closed = False
        self._lent: deque[tuple[JoinedHost, list[Task]]] = deque()  # not sent yet
        self.tasks_done = 0

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def __iter__(self) -> Iterator[JoinedHost]:
        return iter(list(self._hosts.values()))

    def get(self, identity: bytes) -> JoinedHost | None:
        return self._hosts.get(identity)

    def admit(
        self,
        identity: bytes,
        key: str,
        properties: dict[str, Any],
        send_now: Callable[[list[bytes]], bool],
    ) -> None:
        name = f"{properties.get('name')} on {properties.get('host')}"
        name = re.sub("[^ -~]", "?", name[:80])  # a host may send anything
        self._hosts[identity] = JoinedHost(next(self._indices), identity, key, name, send_now)
        log.info("%s has joined", name)

    # -- calls -------------------------------------------------------------------------------------

    def lend_queued(self) -> None:
        """Lend queued calls to hosts that have credit; tell hosts which definitions to forget."""
        for each in self:
            if each.sent_functions.unused:
                unused = each.sent_functions.pop_unused()
                each.send_now(messages.pack_work(messages.forget_items(unused)))
        credits = [(each, each.credit) for each in self if each.credit > 0 and each.drones]
        if credits and self._dispatcher.has_queued() and not self._is_lending:
            self._is_lending = True
            self._dispatcher.post(self._lend, credits)

    def _lend(self, credits: list[tuple[JoinedHost, int]]) -> None:
        """Take calls from the queue, holding the reactor's lock."""
        for host, credit in credits:
            tasks = leases.lease(self._dispatcher, credit, _is_relayed)
            if tasks:
                self._lent.append((host, tasks))
        self._post(self._send_lent)
        if self._is_closed:  # perhaps nothing that is posted to the server runs any more
            self._requeue_lent()

    def _send_lent(self) -> None:
        self._is_lending = False
        for host, tasks in self._take_lent():
            for start in range(0, len(tasks), MAX_CALLS_PER_MESSAGE):
                self._send_calls(host, tasks[start : start + MAX_CALLS_PER_MESSAGE])

    def _requeue_lent(self) -> None:
        """Queue tasks again that were not sent, holding the reactor's lock."""
        for _, tasks in self._take_lent():
            leases.requeue_unstarted(self._dispatcher, tasks)

    def _take_lent(self) -> Iterator[tuple[JoinedHost, list[Task]]]:
        with suppress(IndexError):
            while True:
                yield self._lent.popleft()

    def _send_calls(self, host: JoinedHost, tasks: list[Task], target: int = 0) -> None:
        """Send calls to a host; `target` is a drone's number at the host, or 0 for any drone."""
        if host.identity not in self._hosts or not (host.window or target):
            self._on_not_sent(tasks, target)
            return
        items: list[Item] = []
        sent: list[Task] = []
        for task in tasks:
            if task.promise.done():  # cancelled meanwhile
                continue
            try:
                kind, payload = task.captured_args()
            except Exception as error:  # the pool has ended and its memory was freed
                self._dispatcher.post(leases.on_lost, self._dispatcher, [task], error)
                continue
            function, known = task.client_function, host.sent_functions
            if function.number not in known:
                items += messages.definition_items(
                    known, function, label=function.label, tag=function.tag
                )
            items.append(
                Item(
                    task.number,
                    function.number,
                    kind,
                    payload,
                    target,
                    task.timeout,
                    task.retries,
                    map_index=task.first_item,
                )
            )
            sent.append(task)
        if not sent:
            return
        if not host.send_now(messages.pack_work(items)):
            self._on_not_sent(sent, target)
            return
        for task in sent:
            host.in_flight[task.number] = task
            when_settled(task.promise, partial(self._forward_cancel, host, task.number))

    def _on_not_sent(self, tasks: list[Task], target: int) -> None:
        if target:
            error = RuntimeError("the drone has ended: its host has left")
            self._dispatcher.post(leases.on_lost, self._dispatcher, tasks, error)
        else:
            self._dispatcher.post(leases.requeue_unstarted, self._dispatcher, tasks)

    def _forward_cancel(self, host: JoinedHost, number: int, promise: Promise[Any]) -> None:
        """Cancel the call at its host if it was cancelled. Any thread may call this."""
        if promise.cancelled():
            self._post(partial(self._cancel_at_host, host, number))

    def _cancel_at_host(self, host: JoinedHost, number: int) -> None:
        if host.in_flight.pop(number, None) is not None:
            host.send_now(messages.pack_numbers(messages.CANCEL, [number]))

    def recall_waiting(self) -> None:
        """Recall calls that wait at one host while drones elsewhere are idle.

        A host's window was sized for short calls; calls may turn out to wait behind long ones.
        """
        if self._dispatcher.has_queued():
            return
        idle = sum(
            handle.state is State.READY and not handle.in_flight
            for handle in list(self._dispatcher.handles)
        )
        for host in self:
            others = sum(
                max(0, len(each.drones) - len(each.in_flight)) for each in self if each is not host
            )
            waiting = len(host.in_flight) - len(host.drones)
            recalled = min(waiting, idle + others)
            if recalled > 0 and host.may_recall:
                host.may_recall = False
                host.send_now(messages.pack_numbers(messages.RECALL, [recalled]))

    # -- messages of a joined host -----------------------------------------------------------------

    def handle_message(self, host: JoinedHost, frames: list[bytes]) -> None:
        """Handle a message of a host. Raise `Malformed`."""
        kind = frames[0]
        if kind == messages.RESULTS:
            self._settle(host, list(messages.read_results(frames)))
        elif kind == messages.RETURNED:
            returned = [
                task
                for number in messages.read_numbers(frames)
                if (task := host.in_flight.pop(number, None)) is not None
            ]
            host.may_recall = bool(returned)  # else not before the next report
            self._dispatcher.post(leases.requeue_unstarted, self._dispatcher, returned)
        elif kind == messages.WINDOW:
            host.window = sum(messages.read_numbers(frames))  # one number
            if not host.window:
                host.send_now([messages.BYE])
        elif kind == messages.HOST_STATUS:
            host.drones = _check_drones(messages.read_json(frames).get("drones"))
            host.may_recall, host.status_at = True, monotonic()
        elif kind == messages.RUNNING:
            for number in messages.read_numbers(frames):
                if (task := host.in_flight.get(number)) is not None:
                    task.runs_elsewhere = True
        elif kind == messages.OUTPUT:
            for text, drone, stream, tag in messages.read_lines(frames, 4):
                listener = self._dispatcher.output_listeners.get(tag)
                if listener is not None:
                    listener(Line(text, drone, stream, tag))
        elif kind == messages.REPLY:
            fields = messages.read_json(frames)
            asked = fields.get("id")
            reply = host.pending_requests.pop(asked, None) if isinstance(asked, int) else None
            if reply is not None:
                reply(**{name: fields[name] for name in ("value", "error") if name in fields})
        elif kind == messages.BYE:
            self.remove(host, "the host has left")
        else:
            raise Malformed(f"a message of unknown type {kind[:8]!r}")

    def _settle(self, host: JoinedHost, results: list[Result]) -> None:
        settled = []
        for number, status, payload, tail in results:
            task = host.in_flight.pop(number, None)
            if task is None:
                continue
            task.promise.output = tail
            if status == WITHDRAWN:  # the host's pool was shut down
                task.promise.cancel()
            else:
                fulfill(task.promise, (status, payload))
                settled.append(task)
        self.tasks_done += len(settled)
        self._dispatcher.post(leases.on_settled, self._dispatcher, settled)

    def remove(self, host: JoinedHost, reason: str) -> None:
        """Remove a host that is lost or has left. Its calls run again or are rejected."""
        if self._hosts.pop(host.identity, None) is None:
            return
        tasks = list(host.in_flight.values())
        level = logging.WARNING if tasks else logging.INFO
        log.log(level, "%s: %s; %d calls were in flight there", host.name, reason, len(tasks))
        for task in tasks:
            label = task.client_function.label
            error = DroneDied(
                f"the joined host {host.name} was lost with {with_item(label, task.first_item)}, "
                f"which may have begun: {reason}",
                drone=host.name,
                running=label,
            )
            self._dispatcher.post(leases.on_lost, self._dispatcher, [task], error)
        for reply in host.pending_requests.values():
            reply(error=f"the drone has ended: the joined host {host.name} was lost")

    def close(self) -> None:
        # Tasks that `_lend` takes before it sees this are in `_lent` when `_requeue_lent` runs.
        self._is_closed = True
        self._dispatcher.post(self._requeue_lent)
        for host in self:
            host.send_now([messages.BYE])
            self.remove(host, "the server was closed")

    # -- single drones -----------------------------------------------------------------------------

    def drones(self) -> list[dict[str, Any]]:
        """Return the drones' states as their hosts last reported them. Any thread may call this.

        The number of a drone has the host's index in its upper bits. The time since the report is
        added to `seconds`.
        """
        now = monotonic()
        return [
            {
                **each,
                "number": host.index << _INDEX_SHIFT | each["number"],
                "seconds": _current_seconds(each, now - host.status_at),
            }
            for host in self
            for each in host.drones
        ]

    def is_joined_drone(self, number: int) -> bool:
        """Return True if `number` is the number of a joined host's drone."""
        return bool(number >> _INDEX_SHIFT)

    def _host_of(self, number: int) -> JoinedHost:
        for host in self:
            if host.index == number >> _INDEX_SHIFT:
                return host
        raise RuntimeError(f"the drone has ended: its host has left {self._dispatcher.config.name}")

    def submit_call(self, function: ClientFunction, item: Item) -> Task:
        """Submit a call for one drone of a host, and return its task.

        Raise `RuntimeError` if the host is gone, and the pool's refusal if the pool is closed.
        """
        host = self._host_of(item.target)
        dispatcher = self._dispatcher
        dispatcher.check_open()
        task = Task(dispatcher)
        task.definition = dispatcher.registry.define(function.forwarded)
        task.definition.label = function.label
        task.client_function, task.args = function, (item.kind, item.payload)
        task.state = LEASED
        task.first_item = item.map_index
        task.timeout = item.timeout or dispatcher.task_options.timeout
        dispatcher.unsettled[task] = None
        dispatcher.state.parked.add(task)
        self._send_calls(host, [task], item.target & (1 << _INDEX_SHIFT) - 1)
        return task

    def request(self, kind: str, number: int, reply: Callable[..., None]) -> None:
        """Send an admin request to a drone's host. Raise `RuntimeError` if the host is gone."""
        host, request_number = self._host_of(number), next(self._request_numbers)
        host.pending_requests[request_number] = reply
        request = {"id": request_number, "what": kind, "drone": number & (1 << _INDEX_SHIFT) - 1}
        host.send_now(messages.pack_json(messages.REQUEST, request))

    def timelines(self) -> list[Promise[Timeline]]:
        """Return, for each host, a promise of its drones' timeline, by this machine's clock."""
        promises: list[Promise[Timeline]] = []
        for host in self:
            promise: Promise[Timeline] = Promise()
            promises.append(promise)
            number = host.index << _INDEX_SHIFT
            self.request("timeline", number, partial(_settle_timeline, promise))
        return promises


def _settle_timeline(promise: Promise[Timeline], value: Any = None, error: str = "") -> None:
    """Settle `promise`, holding the server's lock. A host may send any value."""
    try:
        timeline = unpack_timeline(value["timeline"], value["now"] - monotonic())
    except (TypeError, ValueError, LookupError, AttributeError) as problem:
        reject(promise, RuntimeError(error or f"malformed timeline: {problem}"))
    else:
        fulfill(promise, timeline)


def _is_relayed(task: Task) -> bool:
    return task.client_function is not None and task.may_be_lent


def _check_drones(drones: Any) -> list[dict[str, Any]]:
    """Return `drones` if well-formed; else raise `Malformed`."""
    if not isinstance(drones, list) or not all(
        isinstance(each, dict)
        and each.keys() >= {*IDENTITY_FIELDS}
        and isinstance(each["number"], int)
        for each in drones
    ):
        raise Malformed("malformed drone entries")
    return drones


def _current_seconds(drone: dict[str, Any], seconds: float) -> float | None:
    known = drone.get("seconds")
    return known + seconds if isinstance(known, float) else None
