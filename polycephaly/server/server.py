"""`serve` and `Server`: a pool for other processes, over TCP, for clients with an allowed key.

    strangers ──x                       ┌──> pool.promise(relayed, bytes) ──> drones
    clients ──CURVE──> ROUTER ── thread ┤
                          └── ZAP: is this public key allowed?
    clients <── RESULTS <── thread <── outcomes <── promises, as they settle
            <── OUTPUT <─────────────────┘      <── lines with the client's tag, as they come
            <── TELL <──── thread <── acts <── short-lived threads: slow admin requests

One thread owns the sockets and unpickles no payload (see drone/forwarded.py). A peer without the
secret half of an allowed key fails in libzmq's handshake: only its public key reaches Python, and
the peer receives only the greeting of every ZeroMQ socket.

Each client has a session (session.py) with its own functions and calls. If a client leaves, or is
silent for `tuning.client_silence_seconds`, its calls are cancelled and no other client's.

In one round the thread reads a bounded number of messages; libzmq gives each peer its share. A peer
that exceeds its limits (flow_control.py) or sends malformed messages is disconnected. See
docs/decisions/0010-flow-control-and-security-of-served-pools.md.
"""

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
LOOK_AT_CONNECTIONS = 0.2  # seconds between looks at connections, if there are any
A_TURN = 100  # messages that are read in one round
DEFINITIONS = 1024  # of one client: function definitions
LOOK_AT_WORKERS = 0.1  # seconds between looks at how calls are spread, if hosts have joined
HEARTBEAT_MS = 3000


class Client(ClientFlow):
    """A connected client."""

    desk: ClientSession

    def __init__(self, identity: bytes, key: str) -> None:
        super().__init__(monotonic())
        self.identity = identity
        self.key = key
        self.tag = secrets.token_hex(8)  # marks the lines that the client's tasks print
        self.unseen = 0  # bytes of such lines that the client has not handled yet
        self.left_out = 0  # lines that were left out
        self.asking = threading.Lock()  # held for a long request: one at a time


class Server:
    """A pool that is served to other processes; made by `serve`.

    The server is closed by `close`, at the end of its ``with`` block, or with the pool's process.
    Any thread may call its methods.

    Attributes
    ----------
    address : str
        Where the server listens.
    key : str
        The server's public key.
    """

    card: Card | None = None
    """The connection file that is registered under the pool's name, or None."""

    def __init__(
        self,
        pool: Pool,
        address: str,
        allow: Iterable[str],
        on_stop: Callable[[bool], object] | None = None,
        setup: dict[str, Any] | None = None,
    ) -> None:
        # Modules and the file that were loaded before the drones were forked, for joining hosts.
        self.setup = setup
        self._pool = pool
        check_address(address)
        self.key, secret = new_pair()
        self._allowed = set(map(check_key, allow))
        self._clients: dict[bytes, Client] = {}
        self._workers = JoinedHosts(self)
        self._turns = FairTurns(pool._dispatcher)
        self._questions = AdminService(self, on_stop)
        self._gone: set[bytes] = set()  # peers that cannot be sent to any more
        self._mute: set[bytes] = set()  # disconnected peers, whose messages are dropped
        self._outcomes: deque[tuple[Client, int, Promise[Any] | Line]] = deque()
        self._acts: deque[Callable[[], object]] = deque()
        self._tasks_done = 0
        self._turned_away = 0
        self._accepted = Accepted()
        self._ceiling = shared_memory_ceiling() // 2
        # Disconnected peers by key: number, last reason.
        self._put_out: dict[str, tuple[int, str]] = {}
        self._bell = Bell()
        self._closing = self._over = self._somebody_left = False
        self.started = time()
        # The thread works under this lock, so that a fork copies nothing half done. A forked child
        # closes its copies of the sockets at once (engines/remote/forks.py): a zygote would
        # otherwise keep the port, and clients would wait for the child.
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
            # RCVHWM must stay 0 and ROUTER_HANDOVER must stay unset. With either, libzmq 4.3.5
            # stops reading the connection and, if the connection ends while a heartbeat is due,
            # aborts the process ("Assertion failed: !_io_error").
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
        """The name by which the pool is found, or else the pool's own name."""
        return self.card.name if self.card is not None else self._pool._dispatcher.config.name

    @property
    def port(self) -> int:
        """The TCP port on which the server listens."""
        return int(self.address.rpartition(":")[2])

    def allow(self, key: str) -> None:
        """Let in clients that hold the secret half of this public key.

        Raises
        ------
        ValueError
            If `key` is malformed.
        """
        self._allowed.add(check_key(key))

    def forbid(self, key: str) -> None:
        """Let in no further clients with this key. Connected clients stay until they leave."""
        self._allowed.discard(check_key(key))

    @property
    def clients(self) -> int:
        """The number of connected clients."""
        return len(self._clients)

    def close(self) -> None:
        """Disconnect all clients and cancel their tasks. The pool goes on.

        May be called more than once.
        """
        if self.card is not None:
            pool_registry.leave(self.card)
        self._questions.finish()
        self._closing = True
        self._bell.ring()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
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
        """Call `act` in the server's next round. Any thread may call this."""
        self._acts.append(act)
        self._bell.ring()
        if self._over:  # no round follows: drop what `act` refers to
            self._acts.clear()

    def status(self) -> dict[str, Any]:
        """Return the dict of `RemotePool.status`.

        This may take milliseconds for each gigabyte that drones hold.
        """
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
        # This thread must not wait for room in the pool: clients are bounded by their credit and
        # not by `max_queued`.
        settlers.add(get_ident())
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
                        # Clients are disconnected earlier, with a reason.
                        patience = 2 * tuning.client_silence_seconds
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
        """Answer libzmq's requests whether a key may connect (ZeroMQ's ZAP protocol, RFC 27)."""
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
            # Compare with each key in constant time, so that the duration reveals nothing about the
            # keys.
            known = [each for each in list(self._allowed) if secrets.compare_digest(each, key)]
            self._see_connections()
            # The key, and how many connections were accepted so far: the peer's is one of these.
            user = f"{key} {self._accepted.count}".encode()
            status = (b"200", b"OK", user) if known and domain == DOMAIN else (b"400", b"", b"")
            if not known:
                self._turned_away += 1
            self._zap.send_multipart([version, number, *status, b""])

    def _hear_all(self, gone: set[bytes]) -> None:
        """Handle messages, also those of peers that have gone, before these are dropped."""
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
        self._gone |= gone  # to be dropped when all their messages were read

    def _put(self, identity: bytes, key: str, fd: int, known: int, why: str) -> None:
        """Disconnect a peer, with a reason, and drop its further messages.

        A ROUTER closes no single peer, so the TCP connection is shut beneath libzmq (accepted.py),
        after there was time to send the reason.
        """
        self._note_put_out(key[:8], why)
        self._send(identity, [REFUSED, f"put out: {why}".encode()])
        self._let_go(identity, f"put out: {why}")
        self._mute.add(identity)
        self._accepted.condemn(fd, known)

    def _note_put_out(self, key: str, why: str) -> None:
        times, _ = self._put_out.get(key, (0, ""))
        self._put_out[key] = times + 1, why

    def _check_ceiling(self) -> None:
        """Disconnect the peer that holds most, if all together exceed the ceiling.

        Its further messages are those of an unknown peer, and thus end its connection.
        """
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
        if client is None:  # it was dropped, or has sent no HELLO
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
        """Take a client's calls and definitions. Raise `Malformed`."""
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

    # -- messages to clients -----------------------------------------------------------------------

    def _send_outcomes(self) -> None:
        results: dict[Client, list[Result]] = {}
        printed: dict[Client, list[Line]] = {}
        for _ in range(len(self._outcomes)):
            client, number, settled = self._outcomes.popleft()
            if isinstance(settled, Line):
                printed.setdefault(client, []).append(settled)
                continue
            if client.desk.tasks.pop(number, None) is None:
                continue  # the session was dropped
            self._tasks_done += not settled.cancelled()
            results.setdefault(client, []).append(outcome(number, settled))
        # A task's output arrives before its result.
        for client, lines in printed.items():
            self._send_lines(client, lines)
        for client, some in results.items():
            client.gave(max(len(payload) for _, _, payload, _ in some))
            self._say(client, pack_results(some), [number for number, *_ in some])
            self._begin(client)

    def _send_lines(self, client: Client, lines: list[Line]) -> None:
        """Send lines; leave lines out for a client that does not read them, to bound the memory."""
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
        """Pass on lines that a joined host's drones have printed; needs the server's lock."""
        output_listeners = self._pool._dispatcher.output_listeners
        for text, drone, stream, tag in told:
            listener = output_listeners.get(tag)
            if listener is not None:
                listener(Line(text, drone, stream, tag))

    def _say(
        self, client: Client, frames: list[bytes], answers: Sequence[int] = (), questions: int = 0
    ) -> None:
        """Send a message as soon as the client has read enough of the earlier ones."""
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
                self._somebody_left = True  # perhaps only a peer that was never let in

    def _drop_the_gone(self, look: bool) -> None:
        silence = tuning.client_silence_seconds
        for peer in [*self._clients.values(), *self._workers]:
            peer.silent += look
            if peer.silent * tuning.client_check_seconds > silence:
                self._let_go(peer.identity, f"not heard of for {silence:g} s")
            else:
                self._send(peer.identity, peer.probe())

    def _let_go(self, identity: bytes, why: str) -> None:
        """Drop a client or a joined host."""
        if (client := self._clients.get(identity)) is not None:
            self._drop(client, why)
        elif (worker := self._workers.get(identity)) is not None:
            self._workers.drop(worker, why)

    def _tell_of_strangers(self) -> None:
        if self._turned_away:  # only now and then: strangers could otherwise fill the log
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
    """Ignore a line: the client does not want output."""


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
    """Let other processes use `pool` over TCP, encrypted and for known keys only.

    Parameters
    ----------
    pool : Pool
        A pool of this process.
    address : str
        ``tcp://HOST:PORT``; port 0 takes any free port.
    name : str, optional
        Register the pool under this name, so that this user's processes on this machine find it
        (``connect(name)``) while it is served. A connection file in the user's runtime directory is
        used.
    file : str or path, optional
        Write a connection file there, with mode 0600. It contains all that a client needs to
        `connect`, including a secret key.
    allow : iterable of str
        Public keys of further clients. They make their keys with `zmq.curve_keypair()`, and need
        ``server.address`` and ``server.key``.
    on_stop : callable, optional
        Called in a thread of its own if a client asks for the end of the pool (`RemotePool.stop`),
        with True if the pool is to end at once. If None, such requests are refused.

    Returns
    -------
    Server
        The running server.

    Raises
    ------
    ValueError
        If an address, name or key is malformed.
    OSError
        If the server cannot listen at `address`.
    FileExistsError
        If a pool of that name is being served already. The message contains its pid.

    Notes
    -----
    **A process with an allowed key can run code as this user**; see docs/security.md.

    Examples
    --------
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
    """In a forked child: give up all servers.

    The objects stay as they are, because libzmq's state belongs to threads that do not exist here.
    """
    for server in _serving:
        # The bell's lock may be held by a thread that does not exist in the child.
        server._bell.asleep = False
    _left_behind.extend(_serving)
    _serving.clear()


_left_behind: list[Server] = []
os.register_at_fork(after_in_child=_forget_servers)
