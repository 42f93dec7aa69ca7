"""`serve`: a pool for other processes, by TCP, for whoever has a key.

    strangers ──x                      ┌──> pool.promise(relayed, bytes) ──> drones
    clients ──CURVE──> ROUTER ── thread ┤
                          └── ZAP: is this public key one of ours?
    clients <── RESULTS <── thread <── outcomes <── promises, as they settle
            <── OUTPUT <─────────────────┘     <── lines with the client's tag, as they come
            <── TELL <──── thread <── acts <── short-lived threads: what may take long (status, refresh, on_stop)

One thread owns the sockets. It opens no payload: see drone/forwarded.py. What somebody sends who
has not proved that he has the secret of a key on the allow-list ends in libzmq's handshake: nothing
of it comes here, and he gets nothing but the greeting that every ZeroMQ socket sends (64 bytes: the
protocol's version and "CURVE").

Each client has a desk (session.py) with its own definitions and work. A client that leaves, or is
not heard of for `tuning.client_silence_seconds`, has its work cancelled; nobody else's is touched.

A turn reads a bounded number of messages, of which libzmq gives each peer its share. A peer may
send and leave unread only so much (flow_control.py). A peer that goes beyond, or sends malformed
messages, is put out: a ROUTER closes no single peer, so its TCP connection is shut beneath libzmq
(accepted.py). A high-water mark (RCVHWM) must not be set, nor may a peer's identity be handed over:
libzmq 4.3.5 then stops reading the connection and, if the connection ends while a heartbeat is due,
aborts the process ("Assertion failed: !_io_error").

Forks. The thread works under a turn (runtime/fork_guard.py), so nothing is half done in a child.
What a child has inherited of this server's sockets is closed there at once, or a zygote would keep
the port, and clients would wait for it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic, time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from .. import __version__
from ..engines.remote import pool_registry
from ..engines.remote.bell import Bell
from ..engines.remote.forks import listening
from ..engines.remote.keys import Card, check_address, check_key, new_pair, wants_ipv6
from ..engines.remote.messages import (
    ASK,
    BYE,
    CANCEL,
    GIVE_UP,
    HELLO,
    LARGEST,
    LINE,
    LIVES,
    OUTPUT,
    PING,
    RECALL,
    REFUSED,
    RUNNING,
    SEEN,
    SHARE,
    SHARES,
    WORK,
    Item,
    Result,
    hello,
    pack_note,
    pack_numbers,
    pack_results,
    read_hello,
    read_note,
    read_numbers,
    read_share,
    read_work,
)
from ..promises.promise import Promise, settlers
from ..runtime import fork_guard
from ..runtime.procfs import birth_of
from ..runtime.system_limits import shared_memory_ceiling
from ..runtime.tuning import tuning
from ..store.shared import Shared
from ..wire.endpoint import has_news, new_context
from ..wire.messages import CALL, Malformed
from ..wire.output import Line
from .accepted import Accepted
from .admin import AdminService
from .fairness import FairTurns
from .flow_control import ClientFlow, Flow
from .joined import JoinedHost, JoinedHosts
from .session import ClientFunction, ClientSession, outcome, run
from .state import drones_of, queued_in

if TYPE_CHECKING:
    from ..pool.pool import Pool

__all__ = ["Server", "serve"]

log = logging.getLogger(__name__)

DOMAIN = b"polycephaly"
LOOK_AT_CONNECTIONS = 0.2  # seconds between looks at what they have sent, where there are any
A_TURN = 100  # messages that are read in one
DEFINITIONS = 1024  # of one client
LOOK_AT_WORKERS = 0.1  # seconds between looks at how calls are spread, where somebody has joined
HEARTBEAT_MS = 3000


class Client(ClientFlow):
    desk: ClientSession

    def __init__(self, identity: bytes, key: str) -> None:
        super().__init__(monotonic())
        self.identity = identity
        self.key = key
        self.tag = secrets.token_hex(8)  # of what its work prints
        self.unseen = 0  # bytes of that which it has not dealt with yet
        self.left_out = 0  # lines
        self.asking = threading.Lock()  # one at a time of what takes the processor for long


class Server:
    """Serves `pool`; made by `serve`. Closed by `close`, at the end of its ``with`` block, or with
    the pool's process.

    ``address`` is where it listens, ``key`` its public key. Any thread may call it.
    """

    card: Card | None = None
    """Under which it is found by name, if it is."""

    def __init__(
        self,
        pool: Pool,
        address: str,
        allow: Iterable[str],
        on_stop: Callable[[bool], object] | None = None,
        setup: dict[str, Any] | None = None,
    ) -> None:
        self.setup = (
            setup  # what its drones had loaded before they were forked: for those that are to join
        )
        self._pool = pool
        check_address(address)
        self.key, secret = new_pair()
        self._allowed = set(map(check_key, allow))
        self._clients: dict[bytes, Client] = {}
        self._workers = JoinedHosts(self)
        self._turns = FairTurns(pool._dispatcher)
        self._questions = AdminService(self, on_stop)
        self._gone: set[bytes] = set()  # who cannot be sent anything any more
        self._mute: set[bytes] = set()  # who was put out, and may not be heard
        self._outcomes: deque[tuple[Client, int, Promise[Any] | Line]] = deque()
        self._acts: deque[Callable[[], object]] = deque()
        self._tasks_done = 0
        self._turned_away = 0
        self._accepted = Accepted()
        self._ceiling = shared_memory_ceiling() // 2
        self._put_out: dict[str, tuple[int, str]] = {}  # by key: how many, and why the last one
        self._bell = Bell()
        self._closing = self._over = self._somebody_left = False
        self.started = time()
        self._turn = fork_guard.GuardedLock()
        with ExitStack() as undo:
            undo.callback(self._bell.close)
            context = new_context()
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
                (zmq.HANDSHAKE_IVL, int(tuning.handshake_seconds * 1000)),
                (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.MAXMSGSIZE, LARGEST),
            ):  # fmt: skip
                self._router.setsockopt(option, value)
            self._monitor = self._router.get_monitor_socket(
                zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
            )
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
        fork_guard.add_turn(self._thread, self._turn)
        self._thread.start()

    @property
    def name(self) -> str:
        """Under which it is found, if it is; else its pool's."""
        return self.card.name if self.card is not None else self._pool._dispatcher.config.name

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def allow(self, key: str) -> None:
        """Lets in whoever has the secret half of this public key. Raises `ValueError` for what is
        no key."""
        self._allowed.add(check_key(key))

    def forbid(self, key: str) -> None:
        """Lets him in no more; who is in stays until he leaves."""
        self._allowed.discard(check_key(key))

    @property
    def clients(self) -> int:
        return len(self._clients)

    def close(self) -> None:
        """Lets nobody in any more and cancels clients' work. The pool goes on. Twice is no
        error."""
        if self.card is not None:
            pool_registry.leave(self.card)
        self._questions.finish()
        self._closing = True
        self._bell.ring()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server of {self._pool!r} at {self.address}, {len(self._clients)} clients>"

    # -- any thread --------------------------------------------------------------------------------

    def _settled(self, client: Client, number: int, promise: Promise[Any]) -> None:
        self._outcomes.append((client, number, promise))
        self._bell.ring()

    def _printed(self, client: Client, line: Line) -> None:
        self._outcomes.append((client, 0, line))
        self._bell.ring()

    def _post(self, act: Callable[[], object]) -> None:
        """Has it called in the server's next turn."""
        self._acts.append(act)
        self._bell.ring()
        if self._over:  # nobody will: what it holds is not kept
            self._acts.clear()

    def status(self) -> dict[str, Any]:
        """What `RemotePool.status` tells. It may take milliseconds for each gigabyte that drones
        hold."""
        dispatcher = self._pool._dispatcher
        return {
            "name": self.name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "version": __version__,
            "address": self.address,
            "started": self.started,
            "width": dispatcher.config.width,
            "clients": self.clients,
            "queued": queued_in(self._pool)
            + sum(len(each.desk.waiting) for each in list(self._clients.values())),
            "tasks_done": self._tasks_done,
            "drones": drones_of(self._pool) + self._workers.drones(),
        }

    # -- the server's thread -----------------------------------------------------------------------

    def _live(self) -> None:
        settlers.add(
            get_ident()
        )  # it must not wait for the pool: its clients' credit bounds it, not `max_queued`
        poller = zmq.Poller()
        for each in (self._router, self._zap, self._monitor, self._bell):
            poller.register(each, zmq.POLLIN)
        look = look_at_connections = monotonic() + tuning.client_check_seconds
        while not self._closing:
            self._bell.asleep = True
            if not (self._outcomes or self._acts or self._gone or self._closing):
                often = LOOK_AT_CONNECTIONS if self._accepted else tuning.client_check_seconds
                if self._workers:
                    often = LOOK_AT_WORKERS
                poller.poll(int(often * 1000))
            self._bell.asleep = False
            with self._turn:
                self._bell.hush()
                try:
                    self._let_in()
                    gone, self._gone = self._gone, set()
                    self._hear_all(gone)
                    while self._acts:
                        self._acts.popleft()()
                    self._send_outcomes()
                    self._turns.look()
                    self._workers.share()
                    late = monotonic() >= look
                    self._see_connections()
                    if self._somebody_left or late:
                        self._somebody_left = False
                        self._drop_the_gone(late)
                    self._workers.take_back()
                    if monotonic() >= look_at_connections:
                        look_at_connections = monotonic() + LOOK_AT_CONNECTIONS
                        if not has_news(self._router):
                            self._mute.clear()
                        for client in self._clients.values():
                            if begun := client.desk.begun():
                                self._say(client, pack_numbers(RUNNING, begun))
                        self._check_ceiling()
                        patience = 2 * tuning.client_silence_seconds  # clients are told before
                        for why in self._accepted.look(patience, LOOK_AT_CONNECTIONS):
                            self._note_put_out("of no key yet", why)
                    if late:
                        look = monotonic() + tuning.client_check_seconds
                        self._tell_of_strangers()
                except Exception:
                    log.exception("a bug in polycephaly: a server's turn failed")
        with self._turn:
            try:
                while self._acts:
                    self._acts.popleft()()
                self._send_outcomes()
                self._tell_of_strangers()
            except Exception:
                log.exception("a bug in polycephaly: a server's last turn failed")
            for client in list(self._clients.values()):
                self._drop(client, "the server was closed")
            self._workers.close()
            self._over = True
            self._acts.clear()
            fork_guard.remove_turn(self._thread)
            _serving.discard(self)
            listening.discard(self.port)
            self._made.close()
        settlers.discard(get_ident())

    def _let_in(self) -> None:
        """ZeroMQ's authentication protocol (RFC 27): libzmq asks whether this key may come in."""
        for _ in range(A_TURN):
            if not has_news(self._zap):
                return
            request = self._zap.recv_multipart(zmq.NOBLOCK)
            version, number, domain, _, _, mechanism = request[:6]
            key = (
                z85.encode(request[6]).decode()
                if mechanism == b"CURVE" and len(request) == 7
                else ""
            )
            # Compared with each in constant time: how long it takes tells nothing of the keys.
            known = [each for each in list(self._allowed) if secrets.compare_digest(each, key)]
            self._see_connections()
            user = (
                f"{key} {self._accepted.count}".encode()
            )  # whose, and not of a connection accepted later than these
            status = (b"200", b"OK", user) if known and domain == DOMAIN else (b"400", b"", b"")
            if not known:
                self._turned_away += 1
            self._zap.send_multipart([version, number, *status, b""])

    def _hear_all(self, gone: set[bytes]) -> None:
        """Also what those have said who are gone, before they are let go."""
        for _ in range(A_TURN):
            if not has_news(self._router):
                for identity in gone:
                    self._let_go(identity, "the connection is gone")
                return
            received: Any = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            identity, *frames = [each.bytes for each in received]
            if identity in self._mute:
                continue
            key, _, known = str(received[-1].get("User-Id")).partition(" ")
            fd = int(received[-1].get(zmq.SRCFD))
            self._accepted.hear(fd)
            try:
                self._hear(identity, key, frames)
            except (Malformed, LookupError, OverflowError) as wrong:
                self._put(identity, key, fd, int(known), str(wrong))
        self._gone |= gone  # when all that they have said was heard

    def _put(self, identity: bytes, key: str, fd: int, known: int, why: str) -> None:
        """Out: its connection is shut when it has had time to get our last word, and it is heard no
        more."""
        self._note_put_out(key[:8], why)
        self._send(identity, [REFUSED, f"put out: {why}".encode()])
        self._let_go(identity, f"put out: {why}")
        self._mute.add(identity)
        self._accepted.condemn(fd, known)

    def _note_put_out(self, key: str, why: str) -> None:
        times, _ = self._put_out.get(key, (0, ""))
        self._put_out[key] = times + 1, why

    def _check_ceiling(self) -> None:
        """Who has most is put out: what it still sends is of nobody's, and so ends its
        connection."""
        peers: list[Client | JoinedHost] = [*self._clients.values(), *self._workers]
        if sum(each.held for each in peers) > self._ceiling:
            most = max(peers, key=lambda each: each.held)
            why = f"the server holds more than {self._ceiling:,} bytes of its clients, {most.held:,} of them yours"
            self._note_put_out(most.key[:8], why)
            self._let_go(most.identity, f"put out: {why}")

    def _hear(self, identity: bytes, key: str, frames: list[bytes]) -> None:
        client, worker = self._clients.get(identity), self._workers.get(identity)
        peer: Flow | None = client or worker
        if peer is not None:
            peer.heard, peer.silent = monotonic(), 0
            whole = peer.whole(frames)
            if whole is None:
                return
            frames = whole
        kind = frames[0]
        if kind == HELLO:
            if peer is not None:
                raise Malformed("a second hello")
            why, _, who = read_hello(frames, "the client", "the server")
            if why is not None:
                log.warning("a client (%s) was refused: %s", key[:8], why)
                self._send(identity, [REFUSED, why.encode()])
                return
            self._admit(identity, key, who)
            return
        if kind == PING and peer is not None:
            peer.came_back(frames)
            if client is not None:
                self._send_on(client)
                self._begin(client)
            return
        if worker is not None:
            self._workers.hear(worker, frames)
            return
        if client is None:  # it was let go, or has not said hello
            if kind != BYE:
                raise Malformed("the server does not know it (any more): connect again")
            return
        if kind == WORK:
            self._take(client, frames)
        elif kind == CANCEL:
            numbers = read_numbers(frames)
            client.cancels(numbers)
            client.desk.cancel(numbers, running=True)
        elif kind == RECALL and not client.recalled:
            client.recalled = True
            client.desk.cancel(read_numbers(frames), running=False)
        elif kind == SHARE:
            client.asks()
            self._questions.hold(client, *read_share(frames))
        elif kind == GIVE_UP:
            for number in read_numbers(frames):
                del client.desk.shared[number]
        elif kind == ASK:
            client.asks()
            self._questions.ask(client, read_note(frames))
        elif kind == SEEN:
            seen = sum(read_numbers(frames))
            if not 0 < seen <= client.unseen:
                raise Malformed("more output dealt with than there was")
            client.unseen -= seen
        elif kind == LIVES:
            client.lives(monotonic())
        elif kind == BYE:
            self._drop(client, "you have left")
        else:
            raise Malformed(f"a message of type {kind[:8]!r}")

    def _take(self, client: Client, frames: list[bytes]) -> None:
        """Raises `Malformed`."""
        defined = False
        for item in read_work(frames):
            if item.kind & ~SHARES >= CALL:
                client.call(item.number, len(item.payload))
            else:
                defined = True
            client.desk.take(item)
        self._begin(client)
        self._turns.due |= sum(bool(each.desk.tasks) for each in self._clients.values()) > 1
        if defined:
            definitions = client.desk._definitions.values()
            if len(definitions) > DEFINITIONS:
                raise Malformed(f"more than {DEFINITIONS} definitions")
            client.defined = sum(len(each.payload) for each in definitions)

    def _begin(self, client: Client) -> None:
        client.desk.begin(
            max(client.room, self._pool._dispatcher.config.size) if not client.outbox else 0
        )

    def _admit(self, identity: bytes, key: str, who: dict[str, Any]) -> None:
        size = self._pool._dispatcher.config.size
        if who.get("role") == "worker":
            self._workers.admit(identity, key, who)
            self._send(identity, hello(size, name=self.name))
            return
        client = Client(identity, key)
        client.desk = ClientSession(self._run, partial(self._settled, client), client.tag)
        printed = partial(self._printed, client)
        self._pool._dispatcher.output_listeners[client.tag] = (
            printed if who.get("output") else _discard
        )
        self._clients[identity] = client
        self._send(identity, hello(size, name=self.name))

    def _run(
        self, given: ClientFunction, item: Item, shared: Sequence[Shared[Any]]
    ) -> Promise[Any]:
        if not self._workers.has(item.target):
            return run(self._pool, given, item, shared)
        if shared:
            raise RuntimeError(
                f"a shared value lies in the memory of {socket.gethostname()}, and this drone is joined"
            )
        return self._workers.run(given, item)

    # -- what goes back ----------------------------------------------------------------------------

    def _send_outcomes(self) -> None:
        results: dict[Client, list[Result]] = {}
        printed: dict[Client, list[Line]] = {}
        for _ in range(len(self._outcomes)):
            client, number, settled = self._outcomes.popleft()
            if isinstance(settled, Line):
                printed.setdefault(client, []).append(settled)
                continue
            if client.desk.tasks.pop(number, None) is None:
                continue  # nobody waits for it
            self._tasks_done += not settled.cancelled()
            results.setdefault(client, []).append(outcome(number, settled))
        for (
            client,
            lines,
        ) in printed.items():  # what work has printed is there before what came of it
            self._send_lines(client, lines)
        for client, some in results.items():
            client.gave(max(len(payload) for _, _, payload, _ in some))
            self._say(client, pack_results(some), [number for number, *_ in some])
            self._begin(client)

    def _send_lines(self, client: Client, lines: list[Line]) -> None:
        """Not to one who does not read them, or they would fill the memory."""
        told: list[tuple[str, str, str]] = []
        for line in lines:
            if client.unseen > tuning.unseen_bytes:
                client.left_out += 1
                continue
            if client.left_out:
                gap = f"[{client.left_out} lines were left out here]"
                told.append((gap, line.drone, line.stream))
                client.unseen += len(gap) + LINE
                client.left_out = 0
            told.append((line.text, line.drone, line.stream))
            client.unseen += len(line.text) + LINE
        if told and client.identity in self._clients:
            self._say(client, pack_note(OUTPUT, {"lines": told}))

    def tell_lines(self, told: list[tuple[str, str, str, str]]) -> None:
        """In the server's turn: what a worker's drones have printed."""
        output_listeners = self._pool._dispatcher.output_listeners
        for text, drone, stream, tag in told:
            listener = output_listeners.get(tag)
            if listener is not None:
                listener(Line(text, drone, stream, tag))

    def _say(
        self, client: Client, frames: list[bytes], answers: Sequence[int] = (), questions: int = 0
    ) -> None:
        """As soon as it has read enough of what was said before."""
        client.outbox.append((frames, answers, questions))
        client.outbox_bytes += sum(map(len, frames))
        self._send_on(client)

    def _send_on(self, client: Client) -> None:
        while client.outbox and client.unread <= tuning.unread_bytes:
            frames, answers, questions = client.outbox.popleft()
            client.outbox_bytes -= sum(map(len, frames))
            client.answered(answers, questions)
            client.sends(frames)
            self._send(client.identity, frames)
        if client.outbox and not client.is_probed:
            self._send(client.identity, client.probe())

    def _send(self, identity: bytes, frames: list[bytes]) -> bool:
        try:
            self._router.send_multipart([identity, *frames])
        except zmq.ZMQError:
            self._gone.add(identity)
            return False
        return True

    def _see_connections(self) -> None:
        while has_news(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted.add(event["value"])
            else:
                self._accepted.discard(event["value"])
                self._somebody_left = True  # perhaps only a stranger

    def _drop_the_gone(self, look: bool) -> None:
        silence = tuning.client_silence_seconds
        for peer in [*self._clients.values(), *self._workers]:
            peer.silent += look
            if peer.silent * tuning.client_check_seconds > silence:
                self._let_go(peer.identity, f"not heard of for {silence:g} s")
            else:
                self._send(peer.identity, peer.probe())

    def _let_go(self, identity: bytes, why: str) -> None:
        """Whoever that is."""
        if (client := self._clients.get(identity)) is not None:
            self._drop(client, why)
        elif (worker := self._workers.get(identity)) is not None:
            self._workers.drop(worker, why)

    def _tell_of_strangers(self) -> None:
        if self._turned_away:  # now and then, or they could fill the log
            log.warning(
                "%s: %d times somebody without an allowed key was turned away",
                self.address,
                self._turned_away,
            )
            self._turned_away = 0
        for key, (times, why) in self._put_out.items():
            log.warning(
                "%s: %d peers (%s) were put out, the last one for: %s",
                self.address,
                times,
                key,
                why,
            )
        self._put_out.clear()

    def _drop(self, client: Client, why: str) -> None:
        if self._clients.pop(client.identity, None) is None:
            return
        self._send(client.identity, [REFUSED, why.encode()])
        self._pool._dispatcher.output_listeners.pop(client.tag, None)
        tasks = client.desk.drop()
        level = logging.INFO if tasks else logging.DEBUG
        log.log(
            level,
            "a client (%s) is let go: %s; %d of its works are cancelled",
            client.key[:8],
            why,
            tasks,
        )


def _discard(line: Line) -> None:
    """Of a client that does not want it."""


_serving: set[Server] = set()


def serve(
    pool: Pool,
    address: str = "tcp://127.0.0.1:0",
    *,
    name: str | None = None,
    file: str | os.PathLike[str] | None = None,
    allow: Iterable[str] = (),
    on_stop: Callable[[bool], object] | None = None,
    _setup: dict[str, Any] | None = None,
) -> Server:
    """Lets other processes use `pool`, by TCP, encrypted and for known keys only.

    `address` is ``tcp://HOST:PORT``; port 0 takes any that is free. By `name`, other processes of
    yours on this machine find it (``connect(name)``) for as long as it is served: a file in your
    runtime directory tells them. `file` gets what a client of your own needs to `connect`, a secret
    key included, with mode 0600. `allow` are public keys of other clients, who made theirs with
    `zmq.curve_keypair()` and need ``server.address`` and ``server.key``. **Whoever has a key runs
    code as you**; see docs/security.md. `on_stop` is called, in a thread of its own, when a client
    asks for the pool's end (`RemotePool.stop`); with True if that is to be at once. Without it they
    are refused.

    Raises `ValueError` for an address, name or key that is none, `OSError` where it cannot listen
    there, and `FileExistsError` (with the other's pid) where a pool of that name is being served
    already.

    >>> import polycephaly as poly, os, tempfile
    >>> card = os.path.join(tempfile.mkdtemp(), "pool.json")
    >>> with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
    ...     remote.doit(lambda x: x + 1, 41)
    42
    """
    from ..pool.pool import Pool

    if not isinstance(pool, Pool):
        raise TypeError(f"serve takes a pool of this process, not {pool!r}")
    pool._dispatcher.check_open()
    if name is not None:
        pool_registry.check_free(name)
    server = Server(pool, address, allow, on_stop, _setup)
    try:
        if name is not None or file is not None:
            public, secret = new_pair()
            server.allow(public)
            pid = os.getpid()
            card = Card(
                server.address,
                server.key,
                public,
                secret,
                name or "",
                pid,
                birth_of(pid),
                server.started,
                __version__,
            )
            if name is not None:
                pool_registry.claim(card)
                server.card = card
            if file is not None:
                card.write(file)
    except BaseException:
        server.close()
        raise
    return server


def _forget_servers() -> None:
    """In a forked child. Their objects stay, untouched: libzmq's part of them belongs to threads
    that are not here."""
    for server in _serving:
        server._bell.asleep = False  # its lock may be held by a thread that is not here
    _left_behind.extend(_serving)
    _serving.clear()


_left_behind: list[Server] = []
os.register_at_fork(after_in_child=_forget_servers)
