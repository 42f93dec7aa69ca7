"""`join`: lend the drones of this process to a pool that another process serves.

    server ── WORK, within our window ──> client session ──> dispatcher.queue ──> our drones
           <── RESULTS ───────────────────────────────────── promises, as they settle
           <── RETURNED ── recalled, or when we leave ── leases.lend ──┘

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
from ..engines.remote.bell import Bell
from ..engines.remote.client_socket import ClientSocket
from ..engines.remote.keys import Card
from ..engines.remote.messages import (
    ASK,
    BYE,
    CANCEL,
    HELLO,
    NEWS,
    OUTPUT,
    RECALL,
    REFUSED,
    RETURNED,
    RUNNING,
    TELL,
    WINDOW,
    WORK,
    Item,
    hello,
    pack_note,
    pack_numbers,
    pack_results,
    read_hello,
    read_note,
    read_numbers,
    read_work,
)
from ..pool.config import check_timeout
from ..pool.task import Task
from ..promises.promise import FINISHED, Promise, Signal, settlers
from ..runtime import fork_guard
from ..timeline.plain import pack_timeline
from ..wire.messages import CALL, Malformed
from ..wire.output import Line
from .answers import OF_DRONES
from .session import ClientFunction, ClientSession, outcome, run
from .state import drones_of

if TYPE_CHECKING:
    from ..pool.pool import Pool

__all__ = ["Joined", "join"]

log = logging.getLogger("polycephaly")

NEWS_EVERY = 1.0  # seconds
AHEAD = 0.05
"""Seconds of tasks that wait here for each drone: the round trip, and a margin for other activity.
"""
MOST_AHEAD = 500  # calls that wait here for each drone


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
        self._welcome: Signal[None] = Signal()
        self._over: Signal[None] = Signal()
        self._desk = ClientSession(self._run, self._settled, None)
        self._outcomes: deque[tuple[int, Promise[Any]]] = deque()
        self._lines: deque[Line] = deque()
        self._tags: set[str] = set()
        self._acts: deque[Callable[[], object]] = deque()
        self._bell = Bell()
        self._leaving = self._at_once = self._dismissed = False
        self._giving_back = 0
        self._window = -1
        self._seconds: float | None = None  # duration of a call
        self._news_at = 0.0
        self._turn = fork_guard.GuardedLock()
        try:
            self._dealer = ClientSocket(card)
        except BaseException:
            self._bell.close()
            raise
        _joined.add(self)
        self._thread = threading.Thread(target=self._live, name="polycephaly-worker", daemon=True)
        fork_guard.add_turn(self._thread, self._turn)
        self._thread.start()
        try:
            self._welcome.result(timeout)
        except TimeoutError:
            self.leave(now=True)
            raise self._dealer.no_answer(timeout) from None
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
        self._at_once |= now
        self._bell.ring()
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
            self._over.result()
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
        return f"<Joined: {self._pool!r} works for {self.name} at {self.address}>"

    def _run(self, given: ClientFunction, item: Item, shared: object) -> Promise[Any]:
        if given.tag not in self._tags:
            self._tags.add(given.tag)
            self._dispatcher.output_listeners[given.tag] = self._printed
        return run(self._pool, given, item)

    def _printed(self, line: Line) -> None:
        self._lines.append(line)
        self._bell.ring()

    def _settled(self, number: int, promise: Promise[Any]) -> None:
        self._outcomes.append((number, promise))
        self._bell.ring()

    def _post(self, act: Callable[[], object]) -> None:
        self._acts.append(act)
        self._bell.ring()

    # -- the connection's thread -------------------------------------------------------------------

    def _live(self) -> None:
        settlers.add(get_ident())
        poller = zmq.Poller()
        for each in (self._dealer.socket, self._dealer.monitor, self._bell):
            poller.register(each, zmq.POLLIN)
        size = self._dispatcher.config.size
        self._dealer.send(
            hello(size, role="worker", name=self._dispatcher.config.name, host=socket.gethostname())
        )
        try:
            while not self._is_over():
                self._bell.asleep = True
                if not (
                    self._acts or self._outcomes or self._lines or self._leaves() or self._is_over()
                ):
                    poller.poll(int(NEWS_EVERY * 1000))
                self._bell.asleep = False
                with self._turn:
                    self._once()
        except Exception as error:
            log.exception("a bug in polycephaly breaks the connection to %s", self.address)
            self._dealer.lost = f"a bug in polycephaly: {error}"
        finally:
            self._end()

    def _once(self) -> None:
        self._bell.hush()
        self._leaving |= self._dispatcher.refusal is not None  # this pool was shut down
        for frames in self._dealer.received():
            try:
                self._hear(frames)
            except (Malformed, LookupError) as wrong:
                log.warning("a malformed message of the server was dropped: %s", wrong)
        while self._acts:
            self._acts.popleft()()
        if self._dealer.lost or not self._dealer.welcomed:
            return
        self._send_outcomes()
        if self._leaves():
            self._window = 0
            self._dealer.send(pack_numbers(WINDOW, [0]))
            self._give_back(1 << 30)
        self._tell_news()
        self._open_window()

    def _leaves(self) -> bool:
        """Whether this host is to leave, and has not announced so."""
        return self._leaving and self._window != 0 and self._dealer.welcomed

    def _is_over(self) -> bool:
        if self._dealer.lost or self._at_once or (self._leaving and not self._dealer.welcomed):
            return True
        left = (
            self._desk.tasks
            or self._outcomes
            or self._acts
            or (self._giving_back and not self._dispatcher.over)
        )
        return self._dismissed and not left

    def _end(self) -> None:
        lost = self._dealer.lost
        with self._turn:
            fork_guard.remove_turn(self._thread)
            _joined.discard(self)
            self._dealer.close()
            self._bell.close()
        self._desk.drop()
        for tag in self._tags:
            self._dispatcher.output_listeners.pop(tag, None)
        error = (
            ConnectionError(f"the connection to {self.address} is lost: {lost}") if lost else None
        )
        for promise in (self._welcome, self._over):
            if not promise.done():
                promise._settle(FINISHED, None, error)
        settlers.discard(get_ident())

    def _hear(self, frames: list[bytes]) -> None:
        kind = frames[0]
        if kind == WORK:
            self._take(list(read_work(frames)))
        elif kind == CANCEL:
            self._desk.cancel(read_numbers(frames), running=True)
        elif kind == RECALL:
            self._give_back(read_numbers(frames)[0])
        elif kind == ASK:
            self._answer(read_note(frames))
        elif kind == HELLO:
            why, _, who = read_hello(frames, "the server", "this worker")
            if why is not None:
                self._dealer.lost = why
                return
            self.name = str(who.get("name"))
            self._dealer.welcomed = True
            self._tell_news()
            self._open_window()
            self._welcome._settle(FINISHED, None, None)
        elif kind == REFUSED:
            self._dealer.lost = b" ".join(frames[1:]).decode("utf-8", "replace")
        elif kind == BYE:
            if not self._leaving:
                self._dealer.lost = "the server was closed"
            self._dismissed = True
        else:
            raise Malformed(f"a message of type {kind[:8]!r}")

    def _take(self, items: list[Item]) -> None:
        back = []
        for item in items:
            given_to_any = item.kind >= CALL and not item.target
            if self._leaving and given_to_any:
                back.append(item.number)
                continue
            self._desk.take(item)
            self._desk.begin()
            if (
                given_to_any
                and self._dispatcher.refusal is not None
                and not isinstance(self._desk.tasks[item.number], Task)
            ):
                # This pool was shut down just now and has not accepted the call.
                del self._desk.tasks[item.number]
                back.append(item.number)
                self._leaving = True
        if back:
            self._dealer.send(pack_numbers(RETURNED, back))

    # -- giving back -------------------------------------------------------------------------------

    def _give_back(self, most: int) -> None:
        self._giving_back += 1
        self._dispatcher.reactor.post(partial(self._find_some, most))

    def _find_some(self, most: int) -> None:
        """Take queued calls back, holding the reactor's lock.

        Only calls of this session: the pool may have tasks of its own, or of other servers and
        clients.
        """
        ours = set(map(id, list(self._desk.tasks.values())))
        tasks = self._dispatcher.leases.lend(most, lambda task: id(task) in ours)
        self._dispatcher.leases.settled(tasks)
        self._post(partial(self._return, tasks))

    def _return(self, tasks: list[Task]) -> None:
        self._giving_back -= 1
        mine = {id(task): number for number, task in self._desk.tasks.items()}
        numbers = [mine[id(task)] for task in tasks if id(task) in mine and not task.done()]
        for number in numbers:
            del self._desk.tasks[number]
        if not self._dealer.lost:
            self._dealer.send(pack_numbers(RETURNED, numbers))

    # -- reports -----------------------------------------------------------------------------------

    def _send_outcomes(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if lines:
            told = [(line.text, line.drone, line.stream, line.tag) for line in lines]
            self._dealer.send(pack_note(OUTPUT, {"lines": told}))
        results = []
        for _ in range(len(self._outcomes)):
            number, promise = self._outcomes.popleft()
            if self._desk.tasks.pop(number, None) is None:
                continue
            results.append(outcome(number, promise))
            self._follow(promise)
        if results:
            self._dealer.send(pack_results(results))

    def _follow(self, promise: Promise[Any]) -> None:
        """Update the estimated duration of a call from the recent durations of its function.

        Longer durations count at once, shorter ones gradually.
        """
        seconds = (
            promise.definition.seconds
            if isinstance(promise, Task) and hasattr(promise, "definition")
            else None
        )
        if seconds is not None:
            old = self._seconds
            self._seconds = seconds if old is None or seconds > old else old + (seconds - old) * 0.1

    def _open_window(self) -> None:
        """Announce how many calls to send here.

        One call for each drone if calls are long; if they are short, as many more as hide the round
        trip.
        """
        if self._leaving:
            return
        ahead = (
            0 if self._seconds is None else min(MOST_AHEAD, int(AHEAD / max(self._seconds, 1e-6)))
        )
        window = self._dispatcher.config.size * (1 + ahead)
        if not 0.8 <= self._window / window <= 1.25:
            self._window = window
            self._dealer.send(pack_numbers(WINDOW, [window]))

    def _tell_news(self) -> None:
        now = monotonic()
        if now - self._news_at >= NEWS_EVERY:
            self._news_at = now
            self._dealer.send(pack_note(NEWS, {"drones": drones_of(self._pool)}))
            if begun := self._desk.begun():
                self._dealer.send(pack_numbers(RUNNING, begun))

    def _answer(self, note: dict[str, Any]) -> None:
        def tell(**said: Any) -> None:
            self._post(lambda: self._dealer.send(pack_note(TELL, {"id": note["id"], **said})))

        if note["what"] == "timeline":  # a timeline may be long: pack it in another thread

            def say() -> None:
                tell(value={"now": monotonic(), "timeline": pack_timeline(self._pool.timeline)})

            fork_guard.OwnThread("polycephaly-aside", say).start()
            return
        try:
            OF_DRONES[note["what"]](self._pool, note["drone"], tell)
        except RuntimeError as error:
            tell(error=str(error))


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
    >>> with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.Pool(1) as mine, join(mine, card):
    ...     with poly.connect(card) as remote:
    ...         remote.doit(abs, -3)
    3
    """
    check_timeout(timeout)
    pool._dispatcher.check_open()
    return Joined(pool, pool_registry.card_of(where, server_key, keys), timeout)


_left_behind: list[Joined] = []


def _forget_joined() -> None:
    """In a forked child: give up all connections, because their threads do not exist here."""
    for joined in _joined:
        # The bell's lock may be held by a thread that does not exist in the child.
        joined._bell.asleep = False
    _left_behind.extend(_joined)
    _joined.clear()


os.register_at_fork(after_in_child=_forget_joined)
