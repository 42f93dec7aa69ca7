"""`connect`: a pool in another process, used like one's own.

    callers ──append──> waiting ──┐            ┌── WORK, at most `AHEAD` calls unanswered ──> server
                                  ├── thread ──┤
    promises <──settle────────────┘            └── RESULTS <──

One thread owns the socket. What waits when it gets to send goes as one message; a function is sent once. Arguments are
pickled when the call is made, and functions and classes of this image's `__main__` travel by value: the server's image
is another one.

When the connection is lost, what was not answered is rejected with `ConnectionError`: nobody knows whether it was done.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pickle import dumps
from queue import Empty, SimpleQueue
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import zmq

from ..doer import Workforce
from ..errors import another
from ..hearing import finish, settle
from ..image.relayed import NOTHING
from ..launch import safepoint
from ..output import Line
from ..plan import Terms, check_at_least, check_output, check_timeout, check_work
from ..promises import CANCELLED, FINISHED, Promise, callbacks, settlers
from ..wire.capture import pack_beside
from ..wire.definitions import Book, Definition, label
from ..wire.messages import FORGET, WITHDRAWN, Malformed
from ..work import Work
from . import places
from .bell import Bell
from .dealer import Dealer
from .drone import Berth, RemoteDrone
from .frames import (
    ASK,
    CANCEL,
    GIVE_UP,
    HELLO,
    LINE,
    OUTPUT,
    PING,
    RECALL,
    REFUSED,
    RESULTS,
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
    read_results,
)
from .keys import Card
from .shared import Lease, RemoteShared, here

__all__ = ["RemotePool", "connect"]

log = logging.getLogger(__name__)

T = TypeVar("T")

AHEAD = 2048  # calls that are sent and unanswered
BYTES_AHEAD = 64 << 20
PACKET = 256 * 1024  # bytes after which a message is full
PING_EVERY = 2.0  # seconds
AS_THE_POOL_SAYS = -1  # retries
_DEFINITIONS_KEPT = 256


_NO_LEASES: list[Lease] = []
_ERRORS: dict[str, type[Exception]] = {"MemoryError": MemoryError}
"""Of what was asked: all others are `RuntimeError`."""


class _Connection:
    """The socket and its thread. To work and promises it is what a crew and its hub are."""

    def __init__(self, card: Card, timeout: float, output: Callable[[Line], object] | None) -> None:
        self._output = output
        self.address = card.address
        self.hub = self
        self.terms = Terms(None, AS_THE_POOL_SAYS)
        self.name = ""  # of the pool
        self.drones = 0
        self.refusal: BaseException | None = None  # why no more work is taken
        self.book = Book(NOTHING, None)
        self.welcome: Promise[None] = Promise()
        self._queue: deque[Work] = deque()
        self._asked: dict[int, Promise[Any]] = {}
        self._told: list[Callable[[], object]] = []
        self._ask_numbers = itertools.count(1)
        self._acts: deque[Callable[[], object]] = deque()
        self._flight: dict[int, tuple[Work, int]] = {}  # what is unanswered, and its bytes
        self._bytes = 0
        self._waiting: set[Work] = set()
        self._defined: dict[int, None] = {}
        self._bell = Bell()
        self._stopping = self._lost = self._left_behind = False
        self._cancels = ""
        self._pinged = 0.0
        self._turn = safepoint.Turn()
        try:
            self._dealer = Dealer(card)
        except BaseException:
            self._bell.close()
            raise
        _connections.add(self)
        self._thread = threading.Thread(target=self._live, name="polycephaly-client", daemon=True)
        safepoint.add_turn(self._thread, self._turn)
        self._thread.start()
        try:
            self.welcome.result(timeout)
        except TimeoutError:
            self.close(cancel="all")
            why = f": {self._dealer.trouble}" if self._dealer.trouble else ""
            raise ConnectionError(f"nobody answered at {self.address} within {timeout:g} s{why}") from None
        except BaseException:
            self.close(cancel="all")
            raise

    # -- what work and promises use, in any thread ------------------------------------------------------

    def submit(
        self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any = None, terms: Terms | None = None
    ) -> Work:
        self.check_open()
        work = Work(self)  # type: ignore[arg-type]  # what it needs of a crew is here
        work.target = target  # a `Berth`
        terms = terms or self.terms
        work.timeout, work.retries = terms
        try:
            definition = self.book.define(what)
            leases: list[Lease] = []
            here.connection, here.leases = self, leases
            try:
                inputs = work.capture(definition, args, kwargs, self.book)
            finally:
                here.connection, here.leases = None, _NO_LEASES
            if leases:
                work.leases = leases
        except Exception as error:
            work._settle(FINISHED, None, error)
            return work
        if inputs:
            self._waiting.add(work)
            work.when_filled(inputs, self._filled)
        else:
            self._enqueue(work)
        return work

    def check_open(self) -> None:
        if self.refusal is not None:
            raise another(self.refusal)

    def ask(self, what: str, **more: Any) -> Promise[Any]:
        """A promise of what the server says; `RuntimeError` where it refuses."""
        self.check_open()
        number, promise = next(self._ask_numbers), Promise[Any]()
        self._asked[number] = promise
        note = {"id": number, "what": what, **more}
        self.post(lambda: self._dealer.send(pack_note(ASK, note)))
        if self._lost:
            self._reject_all()
        return promise

    def share(self, runs: Sequence[Any]) -> int:
        """Has the server hold it: its number."""
        self.check_open()
        number, asked, promise = next(self._ask_numbers), next(self._ask_numbers), Promise[Any]()
        self._asked[asked] = promise
        self.post(lambda: self._dealer.send(pack_share(number, asked, runs)))
        if self._lost:
            self._reject_all()
        promise.result()
        return number

    def give_up(self, number: int) -> None:
        """Takes no lock, so finalizers may call it."""
        if not self._lost:
            self.post(lambda: self._dealer.send(pack_numbers(GIVE_UP, [number])))

    def _filled(self, work: Work) -> None:
        if not work.done():
            self._enqueue(work)
        self._waiting.discard(work)

    def _enqueue(self, work: Work) -> None:
        self._queue.append(work)
        self._bell.ring()
        if self._lost:
            self._reject_all()

    def drive(self, promise: Promise[Any], end: float | None) -> None:
        """Nothing that a waiting thread could do."""
        if self._left_behind:
            raise RuntimeError(f"{promise!r} belongs to another process, of which this one is a fork")

    def post(self, act: Callable[[], object]) -> None:
        self._acts.append(act)
        self._bell.ring()

    def withdraw(self, work: Work) -> None:
        """In the thread: it was cancelled."""
        self._waiting.discard(work)
        if work.number in self._flight:
            self._dealer.send(pack_numbers(CANCEL, [work.number]))
            self._answered(work.number)

    def explain(self, error: BaseException) -> None:
        """There is nothing to add."""

    def close(self, *, cancel: str = "", wait: bool = True) -> None:
        """What was submitted is finished first; or cancelled: "all" of it, or what is "not begun"."""
        self.refusal = self.refusal or RuntimeError(f"cannot schedule new futures after shutdown of {self.name}")
        self._cancels = cancel or self._cancels
        self._stopping = True
        self._bell.ring()
        if wait:
            while self._thread.is_alive():
                self._thread.join(0.5)  # now and then, so that Ctrl-C is heard

    # -- the thread -----------------------------------------------------------------------------------

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
                    poller.poll(int(PING_EVERY * 1000))
                self._bell.asleep = False
                self._once()
        except Exception as error:
            log.exception("a bug in polycephaly breaks the connection to %s", self.address)
            self._lose(f"a bug in polycephaly: {error}")
        finally:
            self._end()

    def _once(self) -> None:
        """A turn, and after it what may run code of users: settling and cancelling."""
        answered: list[Work] = []
        with self._turn:
            self._bell.hush()
            self._hear_all(answered)
            while self._acts:
                self._acts.popleft()()
            self._send_what_waits()
            self._ping()
            told, self._told = self._told, []
        for tell in told:  # what work has printed is out before its promise settles
            tell()
        for work in answered:
            if work.status == WITHDRAWN:
                finish(work, CANCELLED, None, None)
            else:
                settle([work])
        if self._cancels:
            cancels, self._cancels = self._cancels, ""
            self._cancel_all(running=cancels == "all")

    def _is_over(self) -> bool:
        left = self._queue or self._flight or self._waiting or self._acts or self._cancels or self._asked
        return self._lost or (self._stopping and not left)

    def _end(self) -> None:
        with self._turn:
            safepoint.remove_turn(self._thread)
            _connections.discard(self)
            self._dealer.close()
            self._bell.close()
        self._lost = True
        self.refusal = self.refusal or ConnectionError(f"the connection to {self.address} is closed")
        self._reject_all()
        if not self.welcome.done():
            self.welcome._settle(FINISHED, None, another(self.refusal))
        settlers.discard(get_ident())

    def _reject_all(self) -> None:
        """Whoever pops a piece of work rejects it."""
        refusal = self.refusal or ConnectionError(f"the connection to {self.address} is closed")
        for take in (self._queue.popleft, lambda: self._flight.popitem()[1][0], self._waiting.pop):
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

    def _hear_all(self, answered: list[Work]) -> None:
        for frames in self._dealer.received():
            try:
                if frames[0] == RESULTS:
                    for number, status, payload in read_results(frames):
                        work = self._answered(number)
                        if work is not None:
                            work.status, work.payload = status, payload
                            answered.append(work)
                elif frames[0] == HELLO:
                    why, self.drones, who = read_hello(frames, "the server", "this client")
                    if why is not None:
                        raise Malformed(why)
                    self.name = str(who.get("name"))
                    self._dealer.welcomed = True
                    self.welcome._settle(FINISHED, None, None)
                elif frames[0] == OUTPUT:
                    self._told.append(partial(self._print, [Line(*each) for each in read_lines(frames, 3)]))
                elif frames[0] == TELL:
                    self._hear_answer(read_note(frames))
                elif frames[0] == REFUSED:
                    self._lose(b" ".join(frames[1:]).decode("utf-8", "replace"))
                elif frames[0] != PING:
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
        self.post(partial(self._dealer.send, pack_numbers(SEEN, [sum(len(line.text) + LINE for line in lines)])))

    def _hear_answer(self, note: dict[str, Any]) -> None:
        promise = self._asked.pop(note.get("id", 0), None)
        if promise is not None:
            error = _ERRORS.get(note.get("kind", ""), RuntimeError)(str(note["error"])) if "error" in note else None
            self._told.append(partial(promise._settle, FINISHED, note.get("value"), error))

    def _answered(self, number: int) -> Work | None:
        work, size = self._flight.pop(number, (None, 0))
        self._bytes -= size
        return work

    def _could_send(self) -> bool:
        return bool(self._queue) and self._has_credit()

    def _has_credit(self) -> bool:
        return self.welcome.done() and len(self._flight) < AHEAD and (not self._flight or self._bytes < BYTES_AHEAD)

    def _send_what_waits(self) -> None:
        while not self._lost and self._could_send():
            items: list[Item] = []
            leased: list[Any] = []  # until they are sent
            size = 0
            while size < PACKET and self._has_credit():
                try:
                    work = self._queue.popleft()
                except IndexError:
                    break
                if work.done():  # cancelled while it waited
                    continue
                definition = work.definition
                if definition.number not in self._defined:
                    self._define(definition, items)
                    size += len(definition.payload)
                payload = work.payload
                if work.args is not None:
                    payload = dumps(work.args, 5) if work.args else b""
                work.payload = b""
                retries = None if work.retries == AS_THE_POOL_SAYS else work.retries
                target = 0 if work.target is None else work.target.number
                kind = work.kind
                if work.leases is not None:
                    kind, payload = kind | SHARES, pack_shares([lease.number for lease in work.leases], payload)
                    leased.append(work.leases)
                    work.leases = None
                items.append(Item(work.number, definition.number, kind, payload, target, work.timeout, retries))
                self._flight[work.number] = work, len(payload)
                self._bytes += len(payload)
                size += len(payload) + 32
            if items:
                self._dealer.send(pack_work(items))

    def _define(self, definition: Definition, items: list[Item]) -> None:
        if len(self._defined) >= _DEFINITIONS_KEPT:
            oldest = next(iter(self._defined))
            del self._defined[oldest]
            items.append(Item(oldest, 0, FORGET))
        self._defined[definition.number] = None
        payload = pack_definition(definition.label, definition.payload)  # type: ignore[arg-type]  # without a store
        items.append(Item(definition.number, 0, definition.kind, payload))

    def _ping(self) -> None:
        now = monotonic()
        if now - self._pinged >= PING_EVERY and self.welcome.done():
            self._pinged = now
            self._dealer.send([PING])

    def _cancel_all(self, running: bool) -> None:
        """All, or what the server has not begun: of what it has it knows that."""
        sent = list(self._flight)
        for work in [*self._queue, *self._waiting, *(work for work, _ in self._flight.values() if running)]:
            try:
                work.cancel()
            except BaseException:
                callbacks.exception("a callback of %r failed", work)
        if not running and not self._lost:
            with self._turn:
                self._dealer.send(pack_numbers(RECALL, sent))


class RemotePool(Workforce):
    """A served pool, from another process; made by `connect`. Any thread may use it.

    Work is given, cancelled and answered as with a `Pool` of one's own; code strings and functions run in drones of the
    server's image. What is `__main__` here travels by value. When the connection is lost, what was not answered is
    rejected with `ConnectionError`. It is closed when nobody has it any more.
    """

    def __init__(self, connection: _Connection) -> None:
        self._crew = connection  # type: ignore[assignment]  # it does what a crew does
        self._connection = connection
        weakref.finalize(self, connection.close, wait=False).atexit = False

    @overload
    def map(
        self,
        fn: Callable[..., Coroutine[Any, Any, T]],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
        ordered: bool = True,
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
        ordered: bool = True,
    ) -> Iterator[T]: ...

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
        ordered: bool = True,
    ) -> Iterator[Any]:
        """The results of ``fn(*items)``, in their order, or with ``ordered=False`` as they come. Inputs are taken
        `buffersize` calls ahead (by default 2,048). For the rest see `Pool.map`."""
        if chunksize is not None:
            check_at_least("chunksize", chunksize, 1)
        ahead = AHEAD if buffersize is None else check_at_least("buffersize", buffersize, 1)
        check_work(fn, iterables or ((),), {})
        self._connection.check_open()
        calls = zip(*iterables, strict=False)
        end = None if timeout is None else monotonic() + timeout
        under_way: dict[Promise[Any], None] = {}
        settled: SimpleQueue[Promise[Any]] = SimpleQueue()

        def send(most: int) -> None:
            for args in islice(calls, most):
                promise = self.submit(fn, *args)
                under_way[promise] = None
                if not ordered:
                    promise._hook(settled.put)

        def next_done() -> Promise[Any]:
            left = None if end is None else end - monotonic()
            if ordered:
                promise = next(iter(under_way))
                promise.exception(left)
                return promise
            try:
                return settled.get(timeout=None if left is None else max(0.0, left))
            except Empty:
                raise TimeoutError(f"no result of {label(fn)} came within {timeout} s") from None

        def results() -> Iterator[Any]:
            try:
                while under_way:
                    promise = next_done()
                    del under_way[promise]
                    yield promise.result()
                    send(1)
            finally:
                for each in under_way:
                    each.cancel()

        send(ahead)
        return results()

    def share(self, obj: T) -> RemoteShared[T]:
        """Gives `obj` to the pool once, into shared memory: the handle stands for it in any number of this client's
        calls; see `RemoteShared`. They are run by the drones of the server's host, also where others have joined.

        Raises what the pickling of `obj` raises, and `MemoryError` where it would be more than the pool may share.
        """
        pickled, buffers = pack_beside(obj, NOTHING)
        runs = [pickled, *buffers]
        return RemoteShared(self, self._connection.share(runs), sum(map(len, runs)))

    # -- the pool itself --------------------------------------------------------------------------

    @property
    def drones(self) -> list[RemoteDrone]:
        """Its drones at this moment; work given to one of them is run by that one."""
        return [RemoteDrone(self, Berth(**each)) for each in self._connection.ask("drones").result()]

    def _drones(self) -> list[RemoteDrone]:
        return self.drones

    def refresh(self) -> None:
        """Has the pool take a new snapshot of its image; for everybody who uses it. See `Pool.refresh`."""
        self._connection.ask("refresh").result()

    def status(self) -> dict[str, Any]:
        """What the pool is doing, as plain data that JSON can hold:

        ``name``, ``pid``, ``host``, ``version`` (of polycephaly), ``address``, ``started`` (seconds since 1970),
        ``width``, ``clients``, ``queued`` (pieces of work that no drone has got), ``tasks_done`` (of clients, since it
        is served) and ``drones``: of each its ``number``, ``name``, ``pid`` and ``host``, its ``state`` ("starting",
        "idle", "busy", "retiring" or "unresponsive: why"), what it is ``running`` (a label or None), for how many
        ``seconds`` it has been so (or None), the ``memory`` that it and what it has started hold for themselves, in
        bytes, and ``tasks_done``.
        """
        found: dict[str, Any] = self._connection.ask("status").result()
        return found

    def stop(self, now: bool = False) -> None:
        """Asks the pool's owner to end it: when what runs is finished, or `now`. Returns when he was asked.

        Raises `RuntimeError` where he lets nobody do that (see `serve`)."""
        self._connection.ask("stop", now=now).result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leaves, when what was submitted is done; the pool itself goes on. With `cancel_futures`, what no drone has
        begun is cancelled. Twice is no error."""
        self._connection.close(cancel="not begun" if cancel_futures else "", wait=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close(cancel="all" if kind is not None else "")

    def __repr__(self) -> str:
        connection = self._connection
        if connection.refusal is not None:
            return f"<RemotePool at {connection.address}, closed>"
        return f"<RemotePool {connection.name} at {connection.address}: {connection.drones} drones>"


def connect(
    where: str | os.PathLike[str],
    *,
    server_key: str | None = None,
    keys: tuple[str, str] | None = None,
    timeout: float = 5.0,
    output: str | Callable[[Line], object] = "forward",
) -> RemotePool:
    """A pool that another process serves. `where` is the name under which one of your own does on this machine; or a
    connection file (a path, or a string with a ``/`` in it); or its address (``tcp://HOST:PORT``) with its public key
    and one's own public and secret key (`zmq.curve_keypair`), of which it must allow the public one. `output` says what
    becomes of the lines that this client's work prints, as for a `Pool`; nobody else gets them.

    Raises `ConnectionError` where no pool of that name runs, nobody answers within `timeout` seconds or the keys do not
    fit, `PermissionError` for a file that others may read, `ValueError` for what is no name, file, address or key.

    >>> import polycephaly as poly, os, tempfile
    >>> card = os.path.join(tempfile.mkdtemp(), "pool.json")
    >>> with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
    ...     list(remote.map(abs, [-1, -2]))
    [1, 2]
    """
    check_timeout(timeout)
    return RemotePool(_Connection(places.card_of(where, server_key, keys), timeout, check_output(output)))


_connections: set[_Connection] = set()
_left_behind: list[_Connection] = []


def _forget_connections() -> None:
    """In a forked child: they stayed behind with their threads."""
    for connection in _connections:
        connection._lost = connection._left_behind = True
        connection._bell.asleep = False  # its lock may be held by a thread that is not here
        connection.refusal = RuntimeError(f"the connection to {connection.address} belongs to another process")
    _left_behind.extend(_connections)
    _connections.clear()


os.register_at_fork(after_in_child=_forget_connections)
