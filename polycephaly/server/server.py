"""`serve` and `Server`: a pool for other processes, over TCP, for clients with an allowed key.

    strangers ──x                       ┌──> pool.promise(run_client_call, ..) ──> drones
    clients ──CURVE──> ROUTER ──── loop ┤
                          └── ZAP: is this public key allowed?
    clients <── RESULTS <── loop <── outcomes <── promises, as they settle
            <── OUTPUT <───────────────┘      <── lines with the client's tag, as they come
            <── REPLY <──── loop <── posted callbacks <── short-lived threads: slow admin requests

An event loop of its own serves the sockets, so that clients delay none of the pool's own tasks. It
unpickles no payload (see drone/forwarded.py). A peer without the secret half of an allowed key
fails in libzmq's handshake: only its public key reaches Python, and the peer receives only the
greeting of every ZeroMQ socket.

Each client has a session (session.py) with its own functions and calls. If a client leaves, or is
silent for `tuning.client_silence_seconds`, its calls are cancelled and no other client's.

In one turn the loop reads a bounded number of messages; libzmq gives each peer its share. A peer
that exceeds its limits (flow_control.py) or sends malformed messages is disconnected. See
docs/decisions/0010-flow-control-and-security-of-served-pools.md.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import time
from typing import Any, Self

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ..engines.remote import messages, pool_registry
from ..engines.remote.keys import (
    Card,
    check_address,
    check_key,
    is_every_host,
    new_key_pair,
    wants_ipv6,
)
from ..engines.remote.messages import Item, Result, pack_hello
from ..errors import Malformed
from ..pool.pool import Pool, dispatcher_of
from ..pool.task import Task
from ..promises.event_loop import EventLoop
from ..promises.promise import Promise
from ..runtime.procfs import start_time_of
from ..runtime.system_limits import shared_memory_ceiling
from ..runtime.tuning import tuning
from ..store.shared import Shared
from ..wire.endpoint import SocketSource, has_input, open_socket
from ..wire.messages import ERROR
from ..wire.output import Line, Listener
from .accepted import Accepted
from .admin import AdminService
from .fairness import FairOrder
from .flow_control import Client, Peer
from .joined import JoinedHosts
from .session import ClientFunction, ClientSession, make_result, submit_call

log = logging.getLogger(__name__)

ZAP_DOMAIN = b"polycephaly"
CONNECTION_CHECK_SECONDS = 0.2  # between checks of the connections, if there are any
MAX_MESSAGES_PER_TURN = 100
MAX_CLIENT_DEFINITIONS = 1024  # function definitions of one client
MAX_REQUEST_BYTES = 64 << 10  # parsed JSON takes many times as much memory
HOST_CHECK_SECONDS = 0.1  # between checks of how calls are spread, if hosts have joined
HEARTBEAT_MS = 3000


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
        name: str | None = None,
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._pool = pool
        self._dispatcher = dispatcher_of(pool)
        self._dispatcher.checks_width = False  # calls of clients never overlap in a drone
        check_address(address)
        self.key, secret = new_key_pair()
        self._allowed = set(map(check_key, allow))
        self._clients: dict[bytes, Client] = {}
        self._joined_hosts = JoinedHosts(self._dispatcher, self._post)
        self._fair_order = FairOrder(self._dispatcher)
        # `setup`: modules and the file that were loaded before the drones were forked, for joining
        # hosts.
        self._admin = AdminService(
            pool, self._joined_hosts, self._post, self.status, self._cancel_tasks,
            on_stop or self._refuse_to_stop, setup,
        )  # fmt: skip
        self._unreachable: set[bytes] = set()  # peers that cannot be sent to any more
        self._muted: set[bytes] = set()  # disconnected peers, whose messages are dropped
        self._outcomes: deque[tuple[Client, int, Promise[Any] | Line]] = deque()
        self._client_errors = 0  # errors of clients' calls, which the pool takes for values
        self._refused_connections = 0
        self._accepted = Accepted()
        self._max_held_bytes = shared_memory_ceiling() // 2
        # Disconnected peers by key: number, last reason.
        self._disconnected: dict[str, tuple[int, str]] = {}
        self._is_closed = self._is_ticking = False
        self._card_paths: list[Path] = []  # where `card` was registered: the directory may change
        self._has_lost_name = False
        self.started = time()
        with ExitStack() as undo:
            # RCVHWM must stay 0 and ROUTER_HANDOVER must stay unset. With either, libzmq 4.3.5
            # stops reading the connection and, if the connection ends while a heartbeat is due,
            # aborts the process ("Assertion failed: !_io_error").
            options = {
                zmq.LINGER: 1000, zmq.ROUTER_MANDATORY: 1, zmq.IPV6: wants_ipv6(address),
                zmq.ZAP_DOMAIN: ZAP_DOMAIN,
                zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: secret.encode(),
                zmq.HANDSHAKE_IVL: int(tuning.handshake_seconds * 1000),
                zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
                zmq.HEARTBEAT_TIMEOUT: int(tuning.client_silence_seconds * 1000),
                zmq.MAXMSGSIZE: messages.MAX_FRAME_BYTES,
            }  # fmt: skip
            self._router = open_socket(undo, zmq.ROUTER, options)
            self._zap = self._router.context.socket(zmq.REP)
            undo.callback(self._zap.close)
            undo.callback(self._router.close)  # first: without ZAP it would let in any key
            self._zap.bind("inproc://zeromq.zap.01")
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
            self._loop = EventLoop("polycephaly-server", self._after_turn, self._close)
            self._connections_checked_at = self._clients_checked_at = self._loop.timers.now()
            self._resources = undo.pop_all()
        try:
            self._loop.add_source(SocketSource(self._router, self._receive))
            for end, callback in (
                (self._zap, self._authenticate), (self._monitor, self._check_monitor)
            ):  # fmt: skip
                self._loop.watch(end.fileno(), callback)
                self._loop.post(callback)  # libzmq signals only to a reader that has found none
            if name is not None or file is not None:
                self._write_cards(name, file)
            self._loop.start()
        except BaseException:
            self._unregister()
            self._loop.release_resources()
            self._resources.close()
            raise

    @property
    def name(self) -> str:
        """The name by which the pool is found, or else the pool's own name."""
        return self.card.name if self.card is not None else self._dispatcher.config.name

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

        May be called more than once. In a forked child, this does nothing.
        """
        if self._loop.belongs_to_parent:
            return
        self._unregister()  # first, so that nobody finds a server that is about to close
        self._admin.wait_for_replies()
        self._loop.post(self._close)
        self._loop.thread.join()
        self._unregister()  # the loop may have found the file gone, and have written it again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        count = len(self._clients)
        return f"<Server of {self._pool!r} at {self.address}, {count} client{'s' * (count != 1)}>"

    # -- any thread --------------------------------------------------------------------------------

    def _add_outcome(self, client: Client, number: int, outcome: Promise[Any] | Line) -> None:
        self._outcomes.append((client, number, outcome))
        self._loop.request_turn()

    def _post(self, callback: Callable[[], object]) -> None:
        """Have the loop call `callback`, unless it has ended. Any thread may call this."""
        if not self._is_closed:  # the loop would keep the objects that `callback` refers to
            self._loop.post(callback)

    def _refuse_to_stop(self, now: bool) -> None:
        raise RuntimeError(f"the owner of {self.name} does not let clients stop the pool")

    def status(self) -> dict[str, Any]:
        """Return the dict of `RemotePool.status`. See `Pool.status`."""
        status = self._pool.status()
        of_clients = [len(each.session.waiting) for each in list(self._clients.values())]
        return status | {
            "name": self.name,
            "address": self.address,
            "clients": self.clients,
            "queued": status["queued"] + sum(of_clients),
            "tasks_done": status["tasks_done"] + self._joined_hosts.tasks_done,
            "tasks_failed": status["tasks_failed"] + self._client_errors,
            "drones": status["drones"] + self._joined_hosts.drones(),
        }

    # -- connection files --------------------------------------------------------------------------

    def _write_cards(self, name: str | None, file: str | os.PathLike[str] | None) -> None:
        keys, pid = new_key_pair(), os.getpid()
        self.allow(keys[0])
        birth, since = start_time_of(pid), self.started
        card = Card(self.address, self.key, *keys, name or "", pid, birth, since)
        if name is not None:
            self.card = card
            self._card_paths.append(pool_registry.register(card))
            self._loop.call_later(tuning.card_check_seconds, self._check_card)
        if file is not None:
            card.write(file)

    def _check_card(self) -> None:
        """Register the card again if its file is gone. Called in the loop, now and then.

        The runtime directory is removed at the user's last logout; other programs remove old files
        of the temporary directory, which takes its place.
        """
        self._loop.call_later(tuning.card_check_seconds, self._check_card)
        assert self.card is not None
        name = self.card.name
        try:
            path = pool_registry.register_again(self.card)
        except BlockingIOError:  # another process is writing there
            return
        except (OSError, ValueError) as error:
            if not self._has_lost_name:  # once, and not at each check
                self._has_lost_name = True
                text = "this pool is not found by its name %s: its connection file is gone, and %s"
                log.warning(text, name, error)
            return
        self._has_lost_name = False
        if path is not None:
            log.info("the connection file of %s was gone, and is written again: %s", name, path)
            if path not in self._card_paths:
                self._card_paths.append(path)

    def _unregister(self) -> None:
        for path in self._card_paths[:]:
            assert self.card is not None
            pool_registry.unregister(self.card, path)

    # -- in the loop: turns ------------------------------------------------------------------------

    def _start_ticking(self) -> None:
        """Check connections, clients and hosts now and then, as long as there are any."""
        if not self._is_ticking and (
            self._accepted
            or self._clients
            or self._joined_hosts
            or self._refused_connections
            or self._disconnected
        ):
            self._is_ticking = True
            seconds = HOST_CHECK_SECONDS if self._joined_hosts else CONNECTION_CHECK_SECONDS
            self._loop.call_later(min(seconds, tuning.client_check_seconds), self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        self._start_ticking()
        now = self._loop.timers.now()
        if now - self._connections_checked_at >= CONNECTION_CHECK_SECONDS:
            self._connections_checked_at = now
            self._check_connections()
        if now - self._clients_checked_at >= tuning.client_check_seconds:
            self._clients_checked_at = now
            self._check_silence(is_check_due=True)
            self._log_refusals()

    def _check_connections(self) -> None:
        if not has_input(self._router):
            self._muted.clear()
        for client in self._clients.values():
            if newly_running := client.session.newly_running():
                client.send(messages.pack_numbers(messages.RUNNING, newly_running))
        self._check_held_bytes()
        # Clients are disconnected earlier, with a reason.
        max_silence = 2 * tuning.client_silence_seconds
        for reason in self._accepted.check(max_silence, CONNECTION_CHECK_SECONDS):
            self._record_disconnected("none yet", reason)

    def _after_turn(self) -> None:
        if self._is_closed:
            return
        self._send_outcomes()
        self._fair_order.order_if_due()
        self._joined_hosts.lend_queued()
        self._joined_hosts.recall_waiting()

    def _close(self) -> None:
        if self._is_closed:
            return
        try:
            self._send_outcomes()
            self._log_refusals()
            for client in list(self._clients.values()):
                self._drop_client(client, "the server was closed")
            self._joined_hosts.close()
        except Exception:
            log.exception("a bug in polycephaly: the last turn of the server failed")
        self._is_closed = True
        self._resources.close()
        self._loop.stop()

    # -- in the loop: messages of peers ------------------------------------------------------------

    def _authenticate(self) -> None:
        """Answer libzmq's requests whether a key may connect (ZeroMQ's ZAP protocol, RFC 27)."""
        for _ in range(MAX_MESSAGES_PER_TURN):
            if not has_input(self._zap):
                return
            request = self._zap.recv_multipart(zmq.NOBLOCK)
            version, number, domain, _, _, mechanism = request[:6]
            has_key = mechanism == b"CURVE" and len(request) == 7
            key = z85.encode(request[6]).decode() if has_key else ""
            # Compare with each key in constant time, so that the duration reveals nothing about the
            # keys.
            matches = [each for each in list(self._allowed) if secrets.compare_digest(each, key)]
            self._check_monitor()
            # The key, and how many connections were accepted so far: the peer's is one of these.
            user = f"{key} {self._accepted.count}".encode()
            is_let_in = matches and domain == ZAP_DOMAIN
            status = (b"200", b"OK", user) if is_let_in else (b"400", b"", b"")
            if not matches:
                self._refused_connections += 1
                self._start_ticking()
            self._zap.send_multipart([version, number, *status, b""])
        self._loop.post(self._authenticate)  # there may be more

    def _receive(self) -> None:
        """Receive messages. A peer that has left, or was refused, is heard no more.

        A ROUTER closes no single peer, so its TCP connection is shut beneath libzmq (accepted.py),
        after there was time to send the reason.
        """
        for _ in range(MAX_MESSAGES_PER_TURN):
            if not has_input(self._router):
                break
            received: Any = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            identity, *frames = [each.bytes for each in received]
            if identity in self._muted:
                continue
            key, _, accepted_count = str(received[-1].get("User-Id")).partition(" ")
            fd = int(received[-1].get(zmq.SRCFD))
            self._accepted.record_message(fd)
            try:
                self._handle_message(identity, key, frames)
            except (Malformed, LookupError, OverflowError) as error:
                self._refuse(identity, key, str(error))
            if identity not in self._clients and self._joined_hosts.get(identity) is None:
                self._muted.add(identity)
                self._accepted.mark_for_shutdown(fd, int(accepted_count))

    def _drop_unreachable(self) -> None:
        """Drop the peers that have gone, after all their messages were read."""
        if self._is_closed:
            return
        if has_input(self._router):
            self._loop.call_later(0.0, self._drop_unreachable)
            return
        unreachable, self._unreachable = self._unreachable, set()
        for identity in unreachable:
            self._drop_peer(identity, "the connection has ended")

    def _refuse(self, identity: bytes, key: str, reason: str) -> None:
        """Drop a peer, and say why."""
        self._record_disconnected(key[:8], reason)
        reason = f"disconnected by the server: {reason}"
        self._send(identity, [messages.REFUSED, reason.encode()])
        self._drop_peer(identity, reason)

    def _record_disconnected(self, key: str, reason: str) -> None:
        count, _ = self._disconnected.get(key, (0, ""))
        self._disconnected[key] = count + 1, reason

    def _check_held_bytes(self) -> None:
        """Disconnect the peer that holds most, if all together exceed the ceiling.

        Its further messages are those of an unknown peer, and thus end its connection.
        """
        peers: list[Peer] = [*self._clients.values(), *self._joined_hosts]
        if sum(each.held_bytes for each in peers) > self._max_held_bytes:
            for client in self._clients.values():  # calls were answered since the last definition
                client.definition_bytes = client.session.function_bytes()
        if sum(each.held_bytes for each in peers) > self._max_held_bytes:
            largest = max(peers, key=lambda each: each.held_bytes)
            reason = (
                f"the server holds more than {self._max_held_bytes:,} bytes of its clients' data, "
                f"{largest.held_bytes:,} of them for this client"
            )
            self._refuse(largest.identity, largest.key, reason)

    def _handle_message(self, identity: bytes, key: str, frames: list[bytes]) -> None:
        client, joined_host = self._clients.get(identity), self._joined_hosts.get(identity)
        peer: Peer | None = client or joined_host
        if peer is not None:
            peer.silent_checks = 0
            message = peer.reassemble(frames)
            if message is None:
                return
            frames = message
        kind = frames[0]
        if kind == messages.HELLO:
            if peer is not None:
                raise Malformed("a second HELLO message")
            _, properties = messages.read_hello(frames, "the client", "the server")
            self._admit(identity, key, properties)
            self._start_ticking()
            return
        if kind == messages.PING and peer is not None:
            peer.on_ping_returned(frames)
            if client is not None:
                client.send_waiting()
                self._submit_waiting(client)
            return
        if joined_host is not None:
            self._joined_hosts.handle_message(joined_host, frames)
            return
        if client is None:  # it was dropped, or has sent no HELLO
            if kind != messages.BYE:
                raise Malformed("the server does not know this connection: connect again")
            return
        if kind == messages.WORK:
            self._handle_work(client, frames)
        elif kind == messages.CANCEL:
            numbers = messages.read_numbers(frames)
            client.count_cancelled(numbers)
            client.session.cancel(numbers, running=True)
        elif kind == messages.RECALL and not client.has_recalled:
            client.has_recalled = True
            client.session.cancel(messages.read_numbers(frames), running=False)
        elif kind == messages.SHARE:
            client.count_request()
            self._admin.store_shared_value(client, *messages.read_shared_value(frames))
        elif kind == messages.RELEASE:
            for number in messages.read_numbers(frames):
                del client.session.shared[number]
        elif kind == messages.REQUEST:
            client.count_request()
            if sum(map(len, frames)) > MAX_REQUEST_BYTES:
                raise Malformed(f"a request of more than {MAX_REQUEST_BYTES:,} bytes")
            self._admin.handle_request(client, messages.read_json(frames))
        elif kind == messages.OUTPUT_ACK:
            acknowledged = sum(messages.read_numbers(frames))
            if not 0 < acknowledged <= client.unacknowledged_bytes:
                raise Malformed("more output acknowledged than was sent")
            client.unacknowledged_bytes -= acknowledged
        elif kind == messages.ALIVE:
            client.count_alive(self._loop.timers.now())
        elif kind == messages.BYE:
            self._drop_client(client, "the client has left")
        else:
            raise Malformed(f"a message of unknown type {kind[:8]!r}")

    def _handle_work(self, client: Client, frames: list[bytes]) -> None:
        """Handle a client's calls and definitions. Raise `Malformed`."""
        has_definitions = False
        for item in messages.read_work(frames):
            if item.is_call:
                client.count_call(item.number, item.nbytes)
            else:
                has_definitions = True
            client.session.add_item(item)
        self._submit_waiting(client)
        self._fair_order.due |= sum(bool(each.session.calls) for each in self._clients.values()) > 1
        if has_definitions:
            if len(client.session.definitions) > MAX_CLIENT_DEFINITIONS:
                raise Malformed(f"more than {MAX_CLIENT_DEFINITIONS} function definitions")
            client.definition_bytes = client.session.function_bytes()

    def _submit_waiting(self, client: Client) -> None:
        limit = 0 if client.outbox else max(client.credit, self._dispatcher.size)
        client.session.submit_waiting(limit)

    def _admit(self, identity: bytes, key: str, properties: dict[str, Any]) -> None:
        size, send = self._dispatcher.size, partial(self._send, identity)
        if properties.get("role") == "worker":
            self._joined_hosts.admit(identity, key, properties, send)
            self._send(identity, pack_hello(size, name=self.name))
            return
        now = self._loop.timers.now()
        client = Client(identity, key, _process_name(properties), send, now)
        add_outcome = partial(self._add_outcome, client)
        client.session = ClientSession(self._submit_call, add_outcome, client.tag)
        wants_output = properties.get("output")
        on_output: Listener = partial(add_outcome, 0) if wants_output else lambda _: None
        self._dispatcher.output_listeners[client.tag] = on_output
        self._clients[identity] = client
        resources, describes = self._dispatcher.resource_sizes, self._dispatcher.describes_items
        hello = pack_hello(size, name=self.name, resources=resources, describe_items=describes)
        self._send(identity, hello)

    def _submit_call(
        self, function: ClientFunction, item: Item, shared: Sequence[Shared[Any]]
    ) -> Task:
        if not self._joined_hosts.is_joined_drone(item.target):
            return submit_call(self._dispatcher, function, item, shared)
        if shared:
            raise RuntimeError(
                f"the shared value is in the memory of {socket.gethostname()}, and this drone runs "
                "on a joined host: use a drone of that machine"
            )
        if "needs" in item.read_extra():
            raise ValueError(
                f"the pool's resources are those of {socket.gethostname()}, and this drone runs on "
                "a joined host: use a drone of that machine"
            )
        return self._joined_hosts.submit_call(function, item)

    # -- messages to clients -----------------------------------------------------------------------

    def _send_outcomes(self) -> None:
        results: dict[Client, list[Result]] = {}
        printed: dict[Client, list[Line]] = {}
        for _ in range(len(self._outcomes)):
            client, number, settled = self._outcomes.popleft()
            if isinstance(settled, Line):
                printed.setdefault(client, []).append(settled)
                continue
            call = client.session.calls.pop(number, None)
            if call is None:
                continue  # the session was dropped
            result = make_result(number, settled)
            if result[1] == ERROR and call.task is not None and settled.exception() is None:
                self._note_failure(call.task)
            results.setdefault(client, []).append(result)
        # A task's output arrives before its result.
        for client, lines in printed.items():
            client.send_lines(lines)
        for client, some in results.items():
            client.record_result_bytes(max(len(payload) for _, _, payload, _ in some))
            client.send(messages.pack_results(some), [number for number, *_ in some])
            self._submit_waiting(client)

    def _note_failure(self, task: Task) -> None:
        """Note a client's error, which to the pool is a value."""
        self._client_errors += 1
        description = "".join(task.promise.result()[2:])  # none from a joined host
        label, drone = task.client_function.label, task.promise.spans.drone
        self._dispatcher.record.add_failure(label, task.item, drone, description)

    def _send(self, identity: bytes, frames: list[bytes]) -> bool:
        if self._is_closed:
            return False
        try:
            self._router.send_multipart([identity, *frames])
        except zmq.ZMQError:
            if not self._unreachable:
                self._loop.call_later(0.0, self._drop_unreachable)
            self._unreachable.add(identity)
            return False
        return True

    def _check_monitor(self) -> None:
        has_peer_ended = False  # a stranger's end must cost the server nothing
        while has_input(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted.add(event["value"])
                self._start_ticking()
            else:
                has_peer_ended |= self._accepted.discard(event["value"])
        if has_peer_ended:
            self._check_silence(is_check_due=False)

    def _check_silence(self, is_check_due: bool) -> None:
        max_silence = tuning.client_silence_seconds
        for peer in [*self._clients.values(), *self._joined_hosts]:
            peer.silent_checks += is_check_due
            if peer.silent_checks * tuning.client_check_seconds > max_silence:
                reason = f"the server received no message for {max_silence:g} s"
                self._drop_peer(peer.identity, reason)
            else:
                peer.send_now(peer.probe())

    def _drop_peer(self, identity: bytes, reason: str) -> None:
        """Drop a client or a joined host."""
        if (client := self._clients.get(identity)) is not None:
            self._drop_client(client, reason)
        elif (joined_host := self._joined_hosts.get(identity)) is not None:
            self._joined_hosts.remove(joined_host, reason)

    def _log_refusals(self) -> None:
        if self._refused_connections:  # only now and then: strangers could otherwise fill the log
            text = "%s: %d connections without an allowed key were refused"
            log.warning(text, self.address, self._refused_connections)
            self._refused_connections = 0
        for key, (count, reason) in self._disconnected.items():
            text = "%s: %d peers (key: %s) were disconnected; the last reason: %s"
            log.warning(text, self.address, count, key, reason)
        self._disconnected.clear()

    def _cancel_tasks(self, of: Sequence[str], asking: Client) -> list[str]:
        """Cancel all calls of the clients of these names, or of all but `asking` if there are none.

        Return the names of the clients that had calls here. Raise `RuntimeError` if a name is
        unknown. Called while holding the server's lock.
        """
        clients = [*self._clients.values()]
        names = {each.name for each in clients}
        others = ", ".join(sorted({each.name for each in clients if each is not asking}))
        for name in of:
            if name not in names:
                raise RuntimeError(f"{self.name} has no client {name}, but {others or 'none'}")
        chosen = [each for each in clients if (each.name in of if of else each is not asking)]
        had_calls = {each.name for each in chosen if each.session.cancel_each()}
        for each in chosen:
            each.send([messages.CANCEL])  # the client has more calls, which wait for credit
        return sorted(had_calls)

    def _drop_client(self, client: Client, reason: str) -> None:
        if self._clients.pop(client.identity, None) is None:
            return
        client.has_left = True
        self._send(client.identity, [messages.REFUSED, reason.encode()])
        self._dispatcher.output_listeners.pop(client.tag, None)
        tasks = client.session.cancel_all()
        level = logging.INFO if tasks else logging.DEBUG
        text = "a client (%s) is no longer connected: %s (cancelled tasks: %d)"
        log.log(level, text, client.key[:8], reason, tasks)


def _process_name(properties: dict[str, Any]) -> str:
    """Return the pid of a client's process, followed by ``@`` and its host if that is not this one.

    A client may send anything; the name is at most 80 printable ASCII characters, without spaces.
    """
    pid, host = properties.get("pid"), properties.get("host")
    name = f"{pid}" if host == socket.gethostname() else f"{pid}@{host}"
    return re.sub("[^!-~]", "?", name[:80])


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
        `connect`, including a secret key. The file stays when the server is closed.
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
        If an address, name or key is malformed, or if `file` is given and the address is that of
        every host (``0.0.0.0``).
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
    if not isinstance(pool, Pool):
        raise TypeError(f"serve takes a pool of this process, not {pool!r}")
    dispatcher_of(pool).check_open()
    host = check_address(address).removeprefix("tcp://").rpartition(":")[0]
    if file is not None and is_every_host(host):
        raise ValueError(
            f"a connection file with the address {address!r} would be of no use to other hosts: "
            "give this host's name or number"
        )
    if name is not None:
        pool_registry.check_name_available(name)
    return Server(pool, address, allow, on_stop, _setup, name, file)
