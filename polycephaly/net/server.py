"""`serve`: a pool for other processes, by TCP, for whoever has a key.

    strangers ──x                      ┌──> pool.promise(relayed, bytes) ──> drones
    clients ──CURVE──> ROUTER ── thread ┤
                          └── ZAP: is this public key one of ours?
    clients <── RESULTS <── thread <── outcomes <── promises, as they settle

One thread owns the sockets. It opens no payload: see image/relayed.py. What somebody sends who has not proved that he
has the secret of a key on the allow-list ends in libzmq's handshake: nothing of it comes here, and he gets nothing but
the greeting that every ZeroMQ socket sends (64 bytes: the protocol's version and "CURVE").

Each client has its own definitions and work. A client that leaves, or is not heard of for `SILENCE` seconds, has its
work cancelled; nobody else's is touched.

Forks. The thread works under a turn (safepoint.py), so nothing is half done in a child. What a child has inherited of
this server's sockets is closed there at once, or a zygote would keep the port, and clients would wait for it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from time import monotonic, time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from .. import __version__
from ..errors import another
from ..image.relayed import pack_error, relayed
from ..launch import safepoint
from ..procfs import birth_of
from ..promises import CANCELLED, Promise, settlers
from ..wire.endpoint import has_news
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
from . import places
from .bell import Bell
from .forks import listening
from .frames import (
    BYE,
    CANCEL,
    HELLO,
    LARGEST,
    PING,
    RECALL,
    REFUSED,
    WORK,
    hello,
    pack_results,
    read_hello,
    read_numbers,
    read_work,
)
from .keys import Card, check_address, check_key, new_pair, wants_ipv6

if TYPE_CHECKING:
    from ..pool import Pool

__all__ = ["Server", "serve"]

log = logging.getLogger("polycephaly")

DOMAIN = b"polycephaly"
SILENCE = 15.0  # seconds
LOOK = 1.0  # seconds between looks at who is silent
HANDSHAKE_MS = 5000
HEARTBEAT_MS = 3000


class _Client:
    def __init__(self, identity: bytes, key: str, now: float) -> None:
        self.identity = identity
        self.key = key
        self.heard = now
        self.definitions: dict[int, partial[Any]] = {}
        self.works: dict[int, Promise[Any]] = {}


class Server:
    """Serves `pool`; made by `serve`. Closed by `close`, at the end of its ``with`` block, or with the pool's process.

    ``address`` is where it listens, ``key`` its public key. Any thread may call it.
    """

    card: Card | None = None
    """Under which it is found by name, if it is."""

    def __init__(self, pool: Pool, address: str, allow: Iterable[str]) -> None:
        self._pool = pool
        check_address(address)
        self.key, secret = new_pair()
        self._allowed = set(map(check_key, allow))
        self._clients: dict[bytes, _Client] = {}
        self._outcomes: deque[tuple[_Client, int, Promise[Any]]] = deque()
        self._turned_away = 0
        self._bell = Bell()
        self._closing = False
        self.started = time()
        self._turn = safepoint.Turn()
        with ExitStack() as undo:
            undo.callback(self._bell.close)
            context = zmq.Context()
            undo.callback(context.term)
            self._zap = context.socket(zmq.REP)
            undo.callback(self._zap.close)
            self._zap.bind("inproc://zeromq.zap.01")
            self._router = context.socket(zmq.ROUTER)
            undo.callback(self._router.close)
            for option, value in (
                (zmq.LINGER, 1000), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.ROUTER_MANDATORY, 1),
                (zmq.IPV6, wants_ipv6(address)), (zmq.ZAP_DOMAIN, DOMAIN),
                (zmq.CURVE_SERVER, 1), (zmq.CURVE_SECRETKEY, secret.encode()),
                (zmq.HANDSHAKE_IVL, HANDSHAKE_MS), (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.MAXMSGSIZE, LARGEST),
            ):  # fmt: skip
                self._router.setsockopt(option, value)
            self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            undo.callback(self._monitor.close)
            undo.callback(self._router.disable_monitor)
            try:
                self._router.bind(f"{address[:-1]}*" if address.endswith(":0") else address)
            except zmq.ZMQError as error:
                raise OSError(error.errno, f"{address}: {error.strerror}") from None
            self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._made = undo.pop_all()
        _serving.add(self)
        listening.add(self.port)
        self._thread = threading.Thread(target=self._live, name="polycephaly-server", daemon=True)
        safepoint.add_turn(self._thread, self._turn)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def allow(self, key: str) -> None:
        """Lets in whoever has the secret half of this public key. Raises `ValueError` for what is no key."""
        self._allowed.add(check_key(key))

    def forbid(self, key: str) -> None:
        """Lets him in no more; who is in stays until he leaves."""
        self._allowed.discard(check_key(key))

    @property
    def clients(self) -> int:
        return len(self._clients)

    def close(self) -> None:
        """Lets nobody in any more and cancels clients' work. The pool goes on. Twice is no error."""
        if self.card is not None:
            places.leave(self.card)
        self._closing = True
        self._bell.ring()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server of {self._pool!r} at {self.address}, {len(self._clients)} clients>"

    # -- any thread -----------------------------------------------------------------------------------

    def _settled(self, client: _Client, number: int, promise: Promise[Any]) -> None:
        self._outcomes.append((client, number, promise))
        self._bell.ring()

    # -- the server's thread --------------------------------------------------------------------------

    def _live(self) -> None:
        settlers.add(get_ident())  # it must not wait for the pool: its clients' credit bounds it, not `max_queued`
        poller = zmq.Poller()
        for each in (self._router, self._zap, self._monitor, self._bell):
            poller.register(each, zmq.POLLIN)
        look = monotonic() + LOOK
        while not self._closing:
            self._bell.asleep = True
            if not self._outcomes and not self._closing:
                poller.poll(int(LOOK * 1000))
            self._bell.asleep = False
            with self._turn:
                self._bell.hush()
                try:
                    self._let_in()
                    self._hear_all()
                    self._send_outcomes()
                    late = monotonic() >= look
                    if self._somebody_left() or late:
                        self._drop_the_gone()
                    if late:
                        look = monotonic() + LOOK
                        self._tell_of_strangers()
                except Exception:
                    log.exception("a bug in polycephaly: a server's turn failed")
        with self._turn:
            for client in list(self._clients.values()):
                self._drop(client, "the server was closed")
            safepoint.remove_turn(self._thread)
            _serving.discard(self)
            listening.discard(self.port)
            self._made.close()
        settlers.discard(get_ident())

    def _let_in(self) -> None:
        """ZeroMQ's authentication protocol (RFC 27): libzmq asks whether this key may come in."""
        while has_news(self._zap):
            request = self._zap.recv_multipart(zmq.NOBLOCK)
            version, number, domain, _, _, mechanism = request[:6]
            key = z85.encode(request[6]).decode() if mechanism == b"CURVE" and len(request) == 7 else ""
            # Compared with each in constant time: how long it takes tells nothing of the keys.
            known = [each for each in list(self._allowed) if secrets.compare_digest(each, key)]
            status = (b"200", b"OK", key.encode()) if known and domain == DOMAIN else (b"400", b"", b"")
            if not known:
                self._turned_away += 1
            self._zap.send_multipart([version, number, *status, b""])

    def _hear_all(self) -> None:
        while has_news(self._router):
            identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            try:
                key = frames[0].get("User-Id") if frames else ""
                self._hear(identity.bytes, str(key), [each.bytes for each in frames])
            except (Malformed, KeyError, OverflowError) as wrong:
                log.warning("a malformed message of a client was dropped: %s", wrong)

    def _hear(self, identity: bytes, key: str, frames: list[bytes]) -> None:
        if not frames:
            raise Malformed("nothing in it")
        kind, client = frames[0], self._clients.get(identity)
        if kind == HELLO:
            why, _, _ = read_hello(frames)
            if why is not None:
                self._send(identity, [REFUSED, why.encode()])
                return
            if client is not None:
                self._drop(client, "you have begun anew")
            self._clients[identity] = _Client(identity, key, monotonic())
            crew = self._pool._crew
            self._send(identity, hello(crew.plan.size, crew.plan.name))
            return
        if client is None:  # it was let go, or has not said hello
            if kind != BYE:
                self._send(identity, [REFUSED, b"the server does not know it (any more): connect again"])
            return
        client.heard = monotonic()
        if kind == WORK:
            for number, definition, what, timeout, retries, payload in read_work(frames):
                self._take(client, number, definition, what, timeout, retries, payload)
        elif kind in (CANCEL, RECALL):
            for number in read_numbers(frames):
                promise = client.works.get(number)
                if promise is not None:
                    promise.cancel(running=kind == CANCEL)
        elif kind == BYE:
            self._drop(client, "you have left")
        elif kind != PING:
            raise Malformed(f"a message of type {kind[:8]!r}")

    def _take(
        self, client: _Client, number: int, definition: int, kind: int, timeout: float | None, retries: int | None,
        payload: bytes,
    ) -> None:  # fmt: skip
        if kind in (DEFINE_CALLABLE, DEFINE_CODE):
            client.definitions[number] = partial(relayed, kind, payload)
        elif kind == FORGET:
            client.definitions.pop(number, None)
        elif kind in (CALL, CALL_KEYWORDS, CALL_FILLED):
            work = client.definitions.get(definition)
            if work is None or number in client.works:
                raise Malformed(
                    f"a call of definition {definition}, which is not there, or with a number that is in use"
                )
            pool = self._pool
            if timeout is not None or retries is not None:
                pool = pool.options(timeout=timeout, retries=retries)
            try:
                promise: Promise[Any] = pool.promise(work, kind, payload)
            except Exception as error:  # it takes no more
                promise = Promise()
                promise.set_exception(another(error))
            client.works[number] = promise
            promise._hook(partial(self._settled, client, number))
        else:
            raise Malformed(f"an item of kind {kind}")

    def _send_outcomes(self) -> None:
        results: dict[bytes, list[tuple[int, int, bytes]]] = {}
        for _ in range(len(self._outcomes)):
            client, number, promise = self._outcomes.popleft()
            if client.works.pop(number, None) is None:
                continue  # nobody waits for it
            error = promise._exception
            if promise._state == CANCELLED:
                status, payload = WITHDRAWN, b""
            elif error is None:
                status, payload = promise._result
            else:
                status, payload = ERROR, pack_error(error)
            results.setdefault(client.identity, []).append((number, status, payload))
        for identity, some in results.items():
            self._send(identity, pack_results(some))

    def _send(self, identity: bytes, frames: list[bytes]) -> bool:
        try:
            self._router.send_multipart([identity, *frames])
        except zmq.ZMQError:  # it is gone
            client = self._clients.get(identity)
            if client is not None:
                self._drop(client, "your connection is gone")
            return False
        return True

    def _somebody_left(self) -> bool:
        """Perhaps only a stranger."""
        left = False
        while has_news(self._monitor):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            left = True
        return left

    def _drop_the_gone(self) -> None:
        now = monotonic()
        for client in list(self._clients.values()):
            if now - client.heard > SILENCE:
                self._drop(client, f"you were not heard of for {SILENCE:g} s")
            else:
                self._send(client.identity, [PING])

    def _tell_of_strangers(self) -> None:
        if self._turned_away:  # now and then, or they could fill the log
            log.warning("%s: %d times somebody without an allowed key was turned away", self.address, self._turned_away)
            self._turned_away = 0

    def _drop(self, client: _Client, why: str) -> None:
        if self._clients.pop(client.identity, None) is None:
            return
        works = list(client.works.values())
        log.info("a client (%s) is let go: %s; %d of its works are cancelled", client.key[:8], why, len(works))
        self._send(client.identity, [REFUSED, why.encode()])
        client.works.clear()
        for promise in works:
            promise.cancel()


_serving: set[Server] = set()


def serve(
    pool: Pool,
    address: str = "tcp://127.0.0.1:0",
    *,
    name: str | None = None,
    file: str | os.PathLike[str] | None = None,
    allow: Iterable[str] = (),
) -> Server:
    """Lets other processes use `pool`, by TCP, encrypted and for known keys only.

    `address` is ``tcp://HOST:PORT``; port 0 takes any that is free. By `name`, other processes of yours on this machine
    find it (``connect(name)``) for as long as it is served: a file in your runtime directory tells them. `file` gets
    what a client of your own needs to `connect`, a secret key included, with mode 0600. `allow` are public keys of
    other clients, who made theirs with `zmq.curve_keypair()` and need ``server.address`` and ``server.key``. **Whoever
    has a key runs code as you**; see docs/security.md.

    Raises `ValueError` for an address, name or key that is none, `OSError` where it cannot listen there, and
    `FileExistsError` (with the other's pid) where a pool of that name is being served already.

    >>> import polycephaly as poly, os, tempfile
    >>> card = os.path.join(tempfile.mkdtemp(), "pool.json")
    >>> with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
    ...     remote.doit(lambda x: x + 1, 41)
    42
    """
    pool._crew.check_open()
    if name is not None:
        places.check_free(name)
    server = Server(pool, address, allow)
    try:
        if name is not None or file is not None:
            public, secret = new_pair()
            server.allow(public)
            pid = os.getpid()
            card = Card(
                server.address, server.key, public, secret, name or "", pid, birth_of(pid), server.started, __version__
            )
            if name is not None:
                places.claim(card)
                server.card = card
            if file is not None:
                card.write(file)
    except BaseException:
        server.close()
        raise
    return server


def _forget_servers() -> None:
    """In a forked child. Their objects stay, untouched: libzmq's part of them belongs to threads that are not here."""
    for server in _serving:
        server._bell.asleep = False  # its lock may be held by a thread that is not here
    _left_behind.extend(_serving)
    _serving.clear()


_left_behind: list[Server] = []
os.register_at_fork(after_in_child=_forget_servers)
