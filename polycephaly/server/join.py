"""`join`: lend the drones of this process to a pool that another process serves.

    server ── WORK, within our window ──> client session ──> the pool's queue ──> our drones
           <── RESULTS ───────────────────────────────────── promises, as they settle
           <── RETURNED ── recalled, or when we leave ── leases.lease ─┘

The header of joined.py says who owns a call at each moment. A call is given back by removing it
from the dispatcher's queue, holding the reactor's lock, so no drone has been sent it. All other
calls are finished and answered; then the host sends BYE.

This process knows the server by its key and runs all code that the server sends: see
docs/security.md. As in the server, nothing from a client is unpickled in this process.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from math import inf
from typing import Any, Self

import zmq

from ..engines.remote import messages, pool_registry
from ..engines.remote.keys import Card
from ..engines.remote.messages import Item, pack_hello
from ..engines.remote.server_connection import ServerConnection
from ..errors import Malformed
from ..pool import leases
from ..pool.pool import Pool, dispatcher_of
from ..pool.status import describe_drones
from ..pool.task import Task
from ..promises.promise import Promise
from ..runtime.checks import check_positive_seconds
from ..timeline.plain import pack_timeline
from ..wire.messages import FORGET
from ..wire.output import Line
from .drone_requests import DRONE_REQUESTS, reply_thread
from .session import ClientFunction, ClientSession, make_result, submit_call

log = logging.getLogger("polycephaly")

STATUS_INTERVAL_SECONDS = 1.0
PREFETCH_SECONDS = 0.05
"""Duration of the calls that wait here for each drone: the round trip, and a margin for other
activity.
"""
MAX_PREFETCHED_CALLS = 500  # that wait here for each drone
LEAVE_LINGER_MS = 30_000
"""Time that libzmq has to send the last results, after `leave`."""


class Joined(ServerConnection):
    """A pool whose drones work for a pool that another process serves; made by `join`.

    An exception in the ``with`` block leaves at once; otherwise the block ends with `leave`. Any
    thread may use this object.

    Attributes
    ----------
    address : str
        The server's address.
    name : str
        The name of the server's pool.
    """

    def __init__(self, pool: Pool, card: Card, timeout: float) -> None:
        self._pool = pool
        self._dispatcher = dispatcher_of(pool)
        self._dispatcher.checks_width = False  # as in `Server`
        self.name = ""
        self._session = ClientSession(self._submit_call, self._on_settled, None)
        self._outcomes: deque[tuple[int, Promise[Any]]] = deque()
        self._lines: deque[Line] = deque()
        self._tags: set[str] = set()
        self._leaving = self._leave_now = self._bye_received = False
        self._returns_in_progress = 0
        self._window = -1
        self._call_seconds = inf  # duration of a call; inf: unknown
        size, name = self._dispatcher.size, self._dispatcher.config.name
        host = socket.gethostname()
        super().__init__(card, "polycephaly-join")
        self.connect(timeout, pack_hello(size, role="worker", name=name, host=host))

    # -- any thread --------------------------------------------------------------------------------

    def leave(self, now: bool = False) -> None:
        """Leave the server's pool and return when the connection is closed.

        Calls that no drone has begun are given back; the others are finished, and their results
        sent: a server that does not read them is waited for, at most half a minute. May be called
        more than once.

        Parameters
        ----------
        now : bool
            If true, running calls are cancelled here and rejected at the server with `DroneDied`.
        """
        self._leaving = True
        self._leave_now |= now
        self.request_turn()
        self.wait_ended()

    def run(self) -> None:
        """Work until the server ends.

        After Ctrl-C, `leave` and raise `KeyboardInterrupt`; after a second Ctrl-C, leave at once.

        Raises
        ------
        ConnectionError
            If the server ends or the connection is lost.
        """
        try:
            self.ended.result()
        except KeyboardInterrupt:
            try:
                self.leave()
            except KeyboardInterrupt:
                self.leave(now=True)
            raise
        if self.loss_reason:
            raise self.loss()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.leave(now=kind is not None)

    def __repr__(self) -> str:
        return f"<Joined: {self._pool!r} lends its drones to {self.name} at {self.address}>"

    def _submit_call(self, function: ClientFunction, item: Item, shared: object) -> Task:
        if function.tag not in self._tags:
            self._tags.add(function.tag)
            self._dispatcher.output_listeners[function.tag] = self._on_output
        return submit_call(self._dispatcher, function, item)

    def _on_output(self, line: Line) -> None:
        self._lines.append(line)
        self.request_turn()

    def _on_settled(self, number: int, promise: Promise[Any]) -> None:
        self._outcomes.append((number, promise))
        self.request_turn()

    # -- in the loop -------------------------------------------------------------------------------

    def after_turn(self) -> None:
        if self.has_ended:
            return
        self._leaving |= self._dispatcher.refusal is not None  # this pool was shut down
        if self.hello_received:
            self._send_outcomes()
            if self._leaving and self._window != 0:
                self._window = 0
                self.send(messages.pack_numbers(messages.WINDOW, [0]))
                self._return_unstarted(1 << 30)
            self._open_window()
        if self._is_finished():
            self.end()

    def _is_finished(self) -> bool:
        if self._leave_now or (self._leaving and not self.hello_received):
            return True
        unfinished = (
            self._session.calls
            or self._outcomes
            or (self._returns_in_progress and not self._dispatcher.has_ended)
        )
        return self._bye_received and not unfinished

    def _close_socket(self) -> None:
        if self.hello_received and not (self._leave_now or self.loss_reason):
            self._socket.setsockopt(zmq.LINGER, LEAVE_LINGER_MS)
        super()._close_socket()

    def on_end(self) -> None:
        self._session.cancel_all()
        for tag in self._tags:
            self._dispatcher.output_listeners.pop(tag, None)

    def on_message(self, frames: list[bytes]) -> None:
        try:
            self._handle_message(frames)
        except (Malformed, LookupError) as error:
            log.warning("a malformed message of the server was dropped: %s", error)

    def _handle_message(self, frames: list[bytes]) -> None:
        kind = frames[0]
        if kind == messages.WORK:
            self._handle_work(list(messages.read_work(frames)))
        elif kind == messages.CANCEL:
            self._session.cancel(messages.read_numbers(frames), running=True)
        elif kind == messages.RECALL:
            self._return_unstarted(messages.read_numbers(frames)[0])
        elif kind == messages.REQUEST:
            self._handle_request(messages.read_json(frames))
        elif kind == messages.HELLO:
            try:
                _, properties = messages.read_hello(frames, "the server", "this host")
            except Malformed as error:
                self.lose(str(error))
                return
            self.name = str(properties.get("name"))
            self.on_connected()
            self._report_status()
        elif kind == messages.BYE:
            if not self._leaving:
                self.lose("the server was closed")
            self._bye_received = True
        else:
            raise Malformed(f"a message of unknown type {kind[:8]!r}")

    def _handle_work(self, items: list[Item]) -> None:
        returned = []
        for item in items:
            is_for_any_drone = item.is_call and not item.target
            if self._leaving and is_for_any_drone:
                returned.append(item.number)
                continue
            self._session.add_item(item)
            self._session.submit_waiting()
            if (
                is_for_any_drone
                and self._dispatcher.refusal is not None
                and self._session.calls[item.number].task is None
            ):
                # This pool was shut down just now and has not accepted the call.
                del self._session.calls[item.number]
                returned.append(item.number)
                self._leaving = True
        if returned:
            self.send(messages.pack_numbers(messages.RETURNED, returned))
        if any(item.kind == FORGET for item in items):
            self._drop_unused_tags()

    def _drop_unused_tags(self) -> None:
        """Forget the clients none of whose functions is known here any more."""
        used = {each.tag for each in self._session.definitions.values()}
        used |= {each.function.tag for each in self._session.calls.values() if each.function}
        for tag in self._tags - used:
            self._tags.discard(tag)
            self._dispatcher.output_listeners.pop(tag, None)

    # -- giving back -------------------------------------------------------------------------------

    def _return_unstarted(self, max_calls: int) -> None:
        self._returns_in_progress += 1
        self._dispatcher.post(self._take_unstarted, max_calls)

    def _take_unstarted(self, max_calls: int) -> None:
        """Take queued calls back, holding the reactor's lock.

        Only calls of this session: the pool may have tasks of its own, or of other servers and
        clients.
        """
        own_tasks = {each.task for each in list(self._session.calls.values())}
        tasks = leases.lease(self._dispatcher, max_calls, own_tasks.__contains__)
        leases.on_settled(self._dispatcher, tasks)
        self.post(self._send_returned, tasks)

    def _send_returned(self, tasks: list[Task]) -> None:
        self._returns_in_progress -= 1
        calls = {call.task: number for number, call in self._session.calls.items()}
        numbers = [calls[task] for task in tasks if task in calls and not task.promise.done()]
        for number in numbers:
            del self._session.calls[number]
        self.send(messages.pack_numbers(messages.RETURNED, numbers))

    # -- reports -----------------------------------------------------------------------------------

    def _send_outcomes(self) -> None:
        settled = [self._outcomes.popleft() for _ in range(len(self._outcomes))]
        # Taken after the outcomes, so that the output of a call is sent before its result.
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if lines:
            packed = [(line.text, line.drone, line.stream, line.tag) for line in lines]
            self.send(messages.pack_json(messages.OUTPUT, {"lines": packed}))
        results = []
        for number, promise in settled:
            call = self._session.calls.pop(number, None)
            if call is None:
                continue
            results.append(make_result(number, promise))
            if call.task is not None:
                self._update_call_seconds(call.task)
        if results:
            self.send(messages.pack_results(results))

    def _update_call_seconds(self, task: Task) -> None:
        """Update the estimated duration of a call from the recent durations of its function.

        Longer durations count at once, shorter ones gradually.
        """
        definition = getattr(task, "definition", None)  # None: it could not be pickled
        if definition is not None and definition.seconds is not None:
            old, new = self._call_seconds, definition.seconds
            self._call_seconds = old + (new - old) * 0.1 if new <= old < inf else new

    def _open_window(self) -> None:
        """Announce how many calls to send here.

        One call for each drone if calls are long; if they are short, as many more as hide the round
        trip.
        """
        if self._leaving:
            return
        prefetched = int(PREFETCH_SECONDS / max(self._call_seconds, 1e-6))
        window = self._dispatcher.size * (1 + min(MAX_PREFETCHED_CALLS, prefetched))
        if not 0.8 <= self._window / window <= 1.25:
            self._window = window
            self.send(messages.pack_numbers(messages.WINDOW, [window]))

    def _report_status(self) -> None:
        if not self.has_ended:
            status = {"drones": describe_drones(self._dispatcher)}
            self.send(messages.pack_json(messages.HOST_STATUS, status))
            if newly_running := self._session.newly_running():
                self.send(messages.pack_numbers(messages.RUNNING, newly_running))
            self.call_later(STATUS_INTERVAL_SECONDS, self._report_status)

    def _handle_request(self, request: dict[str, Any]) -> None:
        def reply(**fields: Any) -> None:
            self.post(
                self.send, messages.pack_json(messages.REPLY, {"id": request["id"], **fields})
            )

        def take_timeline() -> dict[str, Any]:
            now = self.timers.now()
            return {"now": now, "timeline": pack_timeline(self._pool.timeline)}

        try:
            if request["what"] == "timeline":  # may be long: pack it in another thread
                reply_thread(reply, take_timeline).start()
            else:
                DRONE_REQUESTS[request["what"]](self._dispatcher, request["drone"], reply)
        except RuntimeError as error:  # the drone has ended, or no thread can be started
            reply(error=str(error))


def join(
    pool: Pool,
    where: str | os.PathLike[str],
    *,
    server_key: str | None = None,
    keys: tuple[str, str] | None = None,
    timeout: float = 5.0,
) -> Joined:
    """Lend the drones of `pool` to a pool that another process serves.

    The server sends clients' calls to whichever drones are free; clients need not know. Functions
    arrive by value, or by modules that both hosts have. Objects that exist only in the memory of
    the server process are not available here.

    Parameters
    ----------
    pool : Pool
        A pool of this process.
    where, server_key, keys, timeout
        As for `connect`. For a server on another host, copy the connection file from there; that
        server must listen at an address that can be reached.

    Returns
    -------
    Joined
        The connection; `Joined.leave` ends it.

    Raises
    ------
    ConnectionError, PermissionError, ValueError
        As `connect` does.

    Examples
    --------
    >>> import polycephaly as poly, os, tempfile
    >>> from polycephaly.server.join import join
    >>> card = os.path.join(tempfile.mkdtemp(), "pool.json")
    >>> with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.Pool(1) as mine:
    ...     with join(mine, card), poly.connect(card) as remote:
    ...         remote.doit(abs, -3)
    3
    """
    timeout = check_positive_seconds("timeout", timeout)
    dispatcher_of(pool).check_open()
    return Joined(pool, pool_registry.resolve_card(where, server_key, keys), timeout)
