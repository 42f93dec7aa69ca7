"""`join`: lend the drones of this process to a pool that another process serves.

    server ── WORK, within our window ──> client session ──> dispatcher.queue ──> our drones
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
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import zmq

from ..engines.remote import pool_registry
from ..engines.remote.client_socket import ClientSocket
from ..engines.remote.keys import Card
from ..engines.remote.messages import (
    BYE,
    CANCEL,
    HELLO,
    HOST_STATUS,
    OUTPUT,
    RECALL,
    REFUSED,
    REPLY,
    REQUEST,
    RETURNED,
    RUNNING,
    WINDOW,
    WORK,
    Item,
    pack_hello,
    pack_json,
    pack_numbers,
    pack_results,
    read_hello,
    read_json,
    read_numbers,
    read_work,
)
from ..engines.remote.wakeup import Wakeup
from ..pool.config import check_timeout
from ..pool.task import Task
from ..promises.promise import FINISHED, Promise, Signal, settling_threads
from ..runtime import fork_guard
from ..timeline.plain import pack_timeline
from ..wire.messages import CALL, Malformed
from ..wire.output import Line
from .drone_requests import DRONE_REQUESTS
from .session import ClientFunction, ClientSession, make_result, submit_call
from .state import describe_drones

if TYPE_CHECKING:
    from ..pool.pool import Pool

__all__ = ["Joined", "join"]

log = logging.getLogger("polycephaly")

STATUS_INTERVAL_SECONDS = 1.0
PREFETCH_SECONDS = 0.05
"""Duration of the calls that wait here for each drone: the round trip, and a margin for other
activity.
"""
MAX_PREFETCHED_CALLS = 500  # that wait here for each drone


class Joined:
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
        self._dispatcher = pool._dispatcher
        self.address = card.address
        self.name = ""
        self._connected: Signal[None] = Signal()
        self._ended: Signal[None] = Signal()
        self._session = ClientSession(self._submit_call, self._on_settled, None)
        self._outcomes: deque[tuple[int, Promise[Any]]] = deque()
        self._lines: deque[Line] = deque()
        self._tags: set[str] = set()
        self._posted: deque[Callable[[], object]] = deque()
        self._wakeup = Wakeup()
        self._leaving = self._leave_now = self._bye_received = False
        self._returns_in_progress = 0
        self._window = -1
        self._call_seconds: float | None = None  # duration of a call
        self._last_status_at = 0.0
        self._lock = fork_guard.GuardedLock()
        try:
            self._dealer = ClientSocket(card)
        except BaseException:
            self._wakeup.close()
            raise
        _joined.add(self)
        self._thread = threading.Thread(target=self._run, name="polycephaly-join", daemon=True)
        fork_guard.add_thread_lock(self._thread, self._lock)
        self._thread.start()
        try:
            self._connected.result(timeout)
        except TimeoutError:
            self.leave(now=True)
            raise self._dealer.timeout_error(timeout) from None
        except BaseException:
            self.leave(now=True)
            raise

    # -- any thread --------------------------------------------------------------------------------

    def leave(self, now: bool = False) -> None:
        """Leave the server's pool and return when the connection is closed.

        Calls that no drone has begun are given back; the others are finished. May be called more
        than once.

        Parameters
        ----------
        now : bool
            If true, running calls are cancelled here and rejected at the server with `DroneDied`.
        """
        self._leaving = True
        self._leave_now |= now
        self._wakeup.wake()
        while self._thread.is_alive():
            self._thread.join(0.5)  # time-limited, so that Ctrl-C is handled

    def run(self) -> None:
        """Work until the server ends.

        After Ctrl-C, `leave` and raise `KeyboardInterrupt`; after a second Ctrl-C, leave at once.

        Raises
        ------
        ConnectionError
            If the server ends or the connection is lost.
        """
        try:
            self._ended.result()
        except KeyboardInterrupt:
            try:
                self.leave()
            except KeyboardInterrupt:
                self.leave(now=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.leave(now=kind is not None)

    def __repr__(self) -> str:
        return f"<Joined: {self._pool!r} lends its drones to {self.name} at {self.address}>"

    def _submit_call(self, function: ClientFunction, item: Item, shared: object) -> Promise[Any]:
        if function.tag not in self._tags:
            self._tags.add(function.tag)
            self._dispatcher.output_listeners[function.tag] = self._on_output
        return submit_call(self._pool, function, item)

    def _on_output(self, line: Line) -> None:
        self._lines.append(line)
        self._wakeup.wake()

    def _on_settled(self, number: int, promise: Promise[Any]) -> None:
        self._outcomes.append((number, promise))
        self._wakeup.wake()

    def _post(self, callback: Callable[[], object]) -> None:
        self._posted.append(callback)
        self._wakeup.wake()

    # -- the connection's thread -------------------------------------------------------------------

    def _run(self) -> None:
        settling_threads.add(get_ident())
        poller = zmq.Poller()
        for each in (self._dealer.socket, self._dealer.monitor, self._wakeup):
            poller.register(each, zmq.POLLIN)
        config = self._dispatcher.config
        self._dealer.send(
            pack_hello(config.size, role="worker", name=config.name, host=socket.gethostname())
        )
        try:
            while not self._is_finished():
                self._wakeup.asleep = True
                if not (
                    self._posted
                    or self._outcomes
                    or self._lines
                    or self._should_announce_leave()
                    or self._is_finished()
                ):
                    poller.poll(int(STATUS_INTERVAL_SECONDS * 1000))
                self._wakeup.asleep = False
                with self._lock:
                    self._run_round()
        except Exception as error:
            log.exception("a bug in polycephaly breaks the connection to %s", self.address)
            self._dealer.loss_reason = f"a bug in polycephaly: {error}"
        finally:
            self._finish()

    def _run_round(self) -> None:
        self._wakeup.reset()
        self._leaving |= self._dispatcher.refusal is not None  # this pool was shut down
        for frames in self._dealer.receive_messages():
            try:
                self._handle_message(frames)
            except (Malformed, LookupError) as error:
                log.warning("a malformed message of the server was dropped: %s", error)
        while self._posted:
            self._posted.popleft()()
        if self._dealer.loss_reason or not self._dealer.hello_received:
            return
        self._send_outcomes()
        if self._should_announce_leave():
            self._window = 0
            self._dealer.send(pack_numbers(WINDOW, [0]))
            self._return_unstarted(1 << 30)
        self._send_status()
        self._open_window()

    def _should_announce_leave(self) -> bool:
        """Whether this host is to leave, and has not announced so."""
        return self._leaving and self._window != 0 and self._dealer.hello_received

    def _is_finished(self) -> bool:
        if (
            self._dealer.loss_reason
            or self._leave_now
            or (self._leaving and not self._dealer.hello_received)
        ):
            return True
        unfinished = (
            self._session.tasks
            or self._outcomes
            or self._posted
            or (self._returns_in_progress and not self._dispatcher.has_ended)
        )
        return self._bye_received and not unfinished

    def _finish(self) -> None:
        reason = self._dealer.loss_reason
        with self._lock:
            fork_guard.remove_thread_lock(self._thread)
            _joined.discard(self)
            self._dealer.close()
            self._wakeup.close()
        self._session.cancel_all()
        for tag in self._tags:
            self._dispatcher.output_listeners.pop(tag, None)
        error = (
            ConnectionError(f"the connection to {self.address} is lost: {reason}")
            if reason
            else None
        )
        for promise in (self._connected, self._ended):
            if not promise.done():
                promise._settle(FINISHED, None, error)
        settling_threads.discard(get_ident())

    def _handle_message(self, frames: list[bytes]) -> None:
        kind = frames[0]
        if kind == WORK:
            self._handle_work(list(read_work(frames)))
        elif kind == CANCEL:
            self._session.cancel(read_numbers(frames), running=True)
        elif kind == RECALL:
            self._return_unstarted(read_numbers(frames)[0])
        elif kind == REQUEST:
            self._handle_request(read_json(frames))
        elif kind == HELLO:
            incompatibility, _, properties = read_hello(frames, "the server", "this host")
            if incompatibility is not None:
                self._dealer.loss_reason = incompatibility
                return
            self.name = str(properties.get("name"))
            self._dealer.hello_received = True
            self._send_status()
            self._open_window()
            self._connected._settle(FINISHED, None, None)
        elif kind == REFUSED:
            self._dealer.loss_reason = b" ".join(frames[1:]).decode("utf-8", "replace")
        elif kind == BYE:
            if not self._leaving:
                self._dealer.loss_reason = "the server was closed"
            self._bye_received = True
        else:
            raise Malformed(f"a message of unknown type {kind[:8]!r}")

    def _handle_work(self, items: list[Item]) -> None:
        returned = []
        for item in items:
            is_for_any_drone = item.kind >= CALL and not item.target
            if self._leaving and is_for_any_drone:
                returned.append(item.number)
                continue
            self._session.add_item(item)
            self._session.submit_waiting()
            if (
                is_for_any_drone
                and self._dispatcher.refusal is not None
                and not isinstance(self._session.tasks[item.number], Task)
            ):
                # This pool was shut down just now and has not accepted the call.
                del self._session.tasks[item.number]
                returned.append(item.number)
                self._leaving = True
        if returned:
            self._dealer.send(pack_numbers(RETURNED, returned))

    # -- giving back -------------------------------------------------------------------------------

    def _return_unstarted(self, max_calls: int) -> None:
        self._returns_in_progress += 1
        self._dispatcher.post(self._take_unstarted, max_calls)

    def _take_unstarted(self, max_calls: int) -> None:
        """Take queued calls back, holding the reactor's lock.

        Only calls of this session: the pool may have tasks of its own, or of other servers and
        clients.
        """
        own_task_ids = set(map(id, list(self._session.tasks.values())))
        tasks = self._dispatcher.leases.lease(max_calls, lambda task: id(task) in own_task_ids)
        self._dispatcher.leases.on_settled(tasks)
        self._post(partial(self._send_returned, tasks))

    def _send_returned(self, tasks: list[Task]) -> None:
        self._returns_in_progress -= 1
        numbers_by_id = {id(task): number for number, task in self._session.tasks.items()}
        numbers = [
            numbers_by_id[id(task)]
            for task in tasks
            if id(task) in numbers_by_id and not task.done()
        ]
        for number in numbers:
            del self._session.tasks[number]
        if not self._dealer.loss_reason:
            self._dealer.send(pack_numbers(RETURNED, numbers))

    # -- reports -----------------------------------------------------------------------------------

    def _send_outcomes(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if lines:
            packed = [(line.text, line.drone, line.stream, line.tag) for line in lines]
            self._dealer.send(pack_json(OUTPUT, {"lines": packed}))
        results = []
        for _ in range(len(self._outcomes)):
            number, promise = self._outcomes.popleft()
            if self._session.tasks.pop(number, None) is None:
                continue
            results.append(make_result(number, promise))
            self._update_call_seconds(promise)
        if results:
            self._dealer.send(pack_results(results))

    def _update_call_seconds(self, promise: Promise[Any]) -> None:
        """Update the estimated duration of a call from the recent durations of its function.

        Longer durations count at once, shorter ones gradually.
        """
        seconds = (
            promise.definition.seconds
            if isinstance(promise, Task) and hasattr(promise, "definition")
            else None
        )
        if seconds is not None:
            old = self._call_seconds
            if old is not None and seconds <= old:
                seconds = old + (seconds - old) * 0.1
            self._call_seconds = seconds

    def _open_window(self) -> None:
        """Announce how many calls to send here.

        One call for each drone if calls are long; if they are short, as many more as hide the round
        trip.
        """
        if self._leaving:
            return
        prefetched = 0
        if self._call_seconds is not None:
            prefetched = min(
                MAX_PREFETCHED_CALLS, int(PREFETCH_SECONDS / max(self._call_seconds, 1e-6))
            )
        window = self._dispatcher.config.size * (1 + prefetched)
        if not 0.8 <= self._window / window <= 1.25:
            self._window = window
            self._dealer.send(pack_numbers(WINDOW, [window]))

    def _send_status(self) -> None:
        now = monotonic()
        if now - self._last_status_at >= STATUS_INTERVAL_SECONDS:
            self._last_status_at = now
            self._dealer.send(pack_json(HOST_STATUS, {"drones": describe_drones(self._pool)}))
            if newly_running := self._session.newly_running():
                self._dealer.send(pack_numbers(RUNNING, newly_running))

    def _handle_request(self, request: dict[str, Any]) -> None:
        def reply(**fields: Any) -> None:
            self._post(lambda: self._dealer.send(pack_json(REPLY, {"id": request["id"], **fields})))

        if request["what"] == "timeline":  # a timeline may be long: pack it in another thread

            def send_timeline() -> None:
                reply(value={"now": monotonic(), "timeline": pack_timeline(self._pool.timeline)})

            fork_guard.OwnThread("polycephaly-request", send_timeline).start()
            return
        try:
            DRONE_REQUESTS[request["what"]](self._pool, request["drone"], reply)
        except RuntimeError as error:
            reply(error=str(error))


_joined: set[Joined] = set()


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
    check_timeout(timeout)
    pool._dispatcher.check_open()
    return Joined(pool, pool_registry.resolve_card(where, server_key, keys), timeout)


_inherited: list[Joined] = []


def _forget_joined() -> None:
    """In a forked child: give up all connections, because their threads do not exist here."""
    for joined in _joined:
        # The wake-up's lock may be held by a thread that does not exist in the child.
        joined._wakeup.asleep = False
    _inherited.extend(_joined)
    _joined.clear()


os.register_at_fork(after_in_child=_forget_joined)
