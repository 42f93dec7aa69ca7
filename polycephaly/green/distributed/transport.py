"""The connections of one process to other processes, for its channels.

    proxy here ──dial──> <directory>/<pid>.c of the process where the channel was made
    <directory>/<own pid>.c <──accept── processes that have proxies of channels made here

Two processes share one connection, whichever of them has dialled. If both dial at once, there are
two, and each uses its own.

The scheduler's owner thread does all the work. It sleeps in this epoll in place of its lock
(`acquire`, `release`), and polls it between steps (`poll`). So no message crosses a thread, and
channels need no locks. Messages are collected, and sent when the owner thread polls or sleeps, in
one write per process. If a step takes long, its messages go out at once if none went just before;
else the watchdog sends them.

The socket is in a directory that only its owner can enter, and both sides ask the kernel for the
user of the other. Before HELLO, no other message is accepted.

The transport opens with the first channel that leaves or enters this process. It closes with the
process or, in the main process, with its last pool. A forked child closes the inherited sockets.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from time import sleep
from typing import Any, NamedTuple, TypeVar

from ...errors import DroneDied, describe_exit
from ...runtime import fork_guard, parent_death
from ...runtime.clock import monotonic
from ...runtime.procfs import state_of
from ...runtime.system_limits import watch
from ...wire import addresses
from ..channel import Channel
from ..scheduler import scheduler
from .opcodes import BYE, HEADER, HELLO, NAMES

K = TypeVar("K")
V = TypeVar("V")

log = logging.getLogger("polycephaly.green")

READ_CHUNK_BYTES = 256 * 1024  # bytes read at a time
MAX_BUFFERS_PER_WRITE = 512  # buffers in one write
MAX_COPIED_BYTES = 4096  # bytes; smaller payloads are copied into one buffer with their header
MAX_KEPT_ENTRIES = 1000  # entries remembered about channels, ends and processes that are gone
POLL_INTERVAL_SECONDS = 0.0002  # between two polls of a busy owner thread
PEER_TIMEOUT_SECONDS = 5.0  # for a place in a full backlog, and to send BYE
ENDING_CHECK_INTERVAL_SECONDS = 0.005  # between checks for how a connected process ended
# A number of checks and not a time, because a suspended machine takes no time from the process
# that is to report.
MAX_ENDING_CHECKS = 60.0
# Part of a check that counts, by the state of the process. A zombie's parent, which is about to
# record how it ended, waits for a processor, or is gone. So may a process that is still ending.
CHECK_WEIGHTS = {"Z": 0.01, "": 1.0}
ENDING_CHECK_WEIGHT = 0.1  # in all other states
CONNECT_RETRY_SECONDS = 0.005  # between attempts to connect to a full backlog
MAX_RECEIVE_POLLS = 1000  # polls to receive everything; the peers may go on sending
ACCEPT_RETRY_SECONDS = 0.1  # until the next accept, if there was no descriptor for one

_RESOURCE_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_CREDENTIALS = struct.Struct("3i")

# The owner thread's read buffer. A new one for each read would be a new memory mapping.
_read_buffer = memoryview(bytearray(READ_CHUNK_BYTES))


class PeerConnection:
    """A connection to another process. Either may have proxies of channels of the other.

        put(kind, channel, number, payload) ──> out ──flush: one write──> socket
        socket ──receive──> HANDLERS[kind](peer, ...)

    Only the scheduler's owner thread queues and receives messages. A finalizer that interrupts this
    thread, even in the middle of a write, may queue messages too. Queued messages are written by
    the owner thread or, if one of its steps takes long, by the watchdog.

    A process that ends sends BYE. A killed process sends nothing, but its parent records how it
    ended (wire/addresses.py). Its peers wait a moment for that record, so that all waiters get the
    cause.
    """

    def __init__(
        self, transport: ChannelTransport, sock: socket.socket, address: str, pid: int
    ) -> None:
        self.transport = transport
        self.sock = sock
        self.address = address  # the other process's; if that has dialled, from its HELLO
        self.name = f"process {pid}"
        self.pid = pid
        self.lost = False
        self.ending = PeerEnding("", None)
        self.queued = self.sent = 0  # bytes since the beginning
        self.write_lock = allocate_lock()
        self._out: deque[Any] = deque()
        self._in = bytearray()
        # A write is pending: on the transport's next flush, or until the socket is writable.
        self._write_scheduled = self._blocked = False
        # For proxies here of channels there; by number of the operation, or of the channel.
        self.numbers = count(1)
        self.requests: dict[int, Any] = {}  # requests not answered yet
        self.credits: dict[int, Any] = {}  # places in their buffers, granted to this process
        # For proxies there of channels here.
        self.operations: dict[int, Any] = {}  # operations that are not over
        self.accounts: dict[int, Any] = {}  # places in the buffers here, granted to them

    def put(self, kind: int, channel: int = 0, number: int = 0, payload: bytes = b"") -> int:
        """Queue a message, which is sent soon. Return its position in the stream of all bytes
        queued.
        """
        if self.lost:
            return self.queued
        position = self.queued
        header = HEADER.pack(kind, channel, number, len(payload))
        if len(payload) < MAX_COPIED_BYTES:
            self._out.append(header + payload)
        else:
            self._out += header, payload
        self.queued += HEADER.size + len(payload)
        if not self._write_scheduled and not self._blocked:
            self._write_scheduled = True
            self.transport.schedule_write(self)
        return position

    def flush(self, by_owner: bool = True) -> None:
        """Write as much as the socket takes.

        Without `by_owner`, any thread may call this, even during a step. The owner thread's next
        turn then takes over if the connection is broken, or a write is in progress. That write may
        be one of the owner thread itself, further up the stack, if a finalizer has interrupted it.
        """
        self._write_scheduled = False
        broken = True
        if self.write_lock.acquire(by_owner):
            try:
                broken = not self.lost and not self._write()
            finally:
                self.write_lock.release()
        if broken and by_owner:
            self.disconnect()
        elif broken:
            self._write_scheduled = True
            self.transport.schedule_write(self, now=False)

    def _write(self) -> bool:
        """Write the queued messages. Return False if the connection is broken.

        Nothing is left behind if two threads write. `put` queues a message before it looks at
        `_write_scheduled` and `_blocked`. Here, both are cleared before the look at the queue.
        """
        out = self._out
        while True:
            try:
                while out:
                    buffers = [out[index] for index in range(min(len(out), MAX_BUFFERS_PER_WRITE))]
                    written = (
                        self.sock.sendmsg(buffers)
                        if len(buffers) > 1
                        else self.sock.send(buffers[0])
                    )
                    self.sent += written
                    while written:
                        buffer = out.popleft()
                        if written < len(buffer):
                            out.appendleft(memoryview(buffer)[written:])
                            break
                        written -= len(buffer)
            except BlockingIOError:
                pass
            except (BrokenPipeError, ConnectionResetError):
                # The peer has ended. Its earlier messages must be received first.
                out.clear()
            except OSError:
                return False
            blocked = bool(out)
            if blocked is not self._blocked:
                self._blocked = blocked
                self.transport.watch_writable(self, blocked)
            if blocked or not out:
                return True

    def receive(self) -> None:
        try:
            received = self.sock.recv_into(_read_buffer)
        except BlockingIOError:
            return
        except OSError:
            received = 0
        if not received:
            self.disconnect()
            return
        buffer = self._in
        buffer += _read_buffer[:received]
        at, size = 0, len(buffer)
        try:
            while at + HEADER.size <= size and not self.lost:
                kind, channel, number, length = HEADER.unpack_from(buffer, at)
                if kind not in NAMES or (kind != HELLO and not self.address):
                    log.warning(
                        "%s sent a malformed channel message; the connection to it was closed",
                        self.name,
                    )
                    self.disconnect("was disconnected because of a malformed message")
                    return
                start, end = at + HEADER.size, at + HEADER.size + length
                if end > size:
                    break
                at = end
                self._dispatch(kind, channel, number, bytes(buffer[start:end]))
        finally:
            # No message is handled twice, even if an item's own code raises SystemExit.
            del buffer[:at]

    def _dispatch(self, kind: int, channel: int, number: int, payload: bytes) -> None:
        try:
            if kind == HELLO:
                hello = json.loads(payload)
                self.address, self.name = str(hello["address"]), str(hello["name"])
                self.transport.peers.setdefault(self.address, self)
            elif kind == BYE:
                self.disconnect("has ended")
            else:
                HANDLERS[kind](self, channel, number, payload)
        except Exception:
            log.exception(
                "a bug in polycephaly: the handler of a channel message of %s failed: %s",
                self.name,
                NAMES[kind],
            )

    def disconnect(self, reason: str = "") -> None:
        """Drop the connection. If `reason` is empty, find out how the process ended."""
        if self.lost:
            return
        self.lost = True
        self.transport.disconnect(self)
        if reason:
            self.report_loss(PeerEnding(reason, None))
        else:
            self.transport.find_ending(self)

    def report_loss(self, ending: PeerEnding) -> None:
        self.ending = ending
        if self.transport.peers.get(self.address) is self:
            del self.transport.peers[self.address]
        keep_last(self.transport.endings, self.address, ending)
        for callback in LOSS_CALLBACKS:
            try:
                callback(self)
            except Exception:
                log.exception(
                    "a bug in polycephaly: handling the lost connection to %s failed", self.name
                )

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


def keep_last(known: dict[K, V], key: K, value: V) -> None:
    """Store `value`, and keep only the last `MAX_KEPT_ENTRIES` entries."""
    known[key] = value
    if len(known) > MAX_KEPT_ENTRIES:
        del known[next(iter(known))]


class PeerEnding(NamedTuple):
    """How a process ended, in words that follow its name, and its death, if it died."""

    description: str
    death: DroneDied | None


def ending_of(address: str, name: str) -> PeerEnding | None:
    code = addresses.recorded_exit_code(address)
    if code is None:
        return None
    ended = describe_exit(code)
    text = f"drone {name} (pid {addresses.pid_of(address)}) {ended}"
    return PeerEnding(ended, DroneDied(text, drone=name, exitcode=code))


HANDLERS: dict[int, Callable[[PeerConnection, int, int, bytes], object]] = {}
"""The handler of each kind of message; filled by handlers.py, ends.py and proxy.py."""
LOSS_CALLBACKS: list[Callable[[PeerConnection], object]] = []
"""Called in order for each connection that is lost, when its ending is known; see __init__.py."""


_transport: ChannelTransport | None = None


def get_transport() -> ChannelTransport:
    """Return this process's transport, opened if need be. Any thread may call this.

    Raises `RuntimeError` if there are no processes to connect to.
    """
    global _transport
    transport = _transport
    if transport is not None:
        return transport
    with fork_guard.guard:
        if _transport is None:
            address = addresses.own_address(addresses.own_directory)
            if address is None:  # this process has no pool, and belongs to none
                raise RuntimeError(
                    "a channel can be sent only to the local drones of a pool of this process, "
                    "which has none; a channel cannot be saved, and drones of a pool reached by "
                    "`connect`, or on Ray, cannot reach it"
                )
            _transport = ChannelTransport(address)
            atexit.unregister(_send_bye_at_exit)
            atexit.register(_send_bye_at_exit)
        return _transport


class ChannelTransport:
    """The transport of a process, which has at most one. Methods are for the owner thread only,
    unless they say otherwise.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.channels: dict[int, Channel[Any]] = {}
        """Channels made here that others may know, by number; kept until they are closed."""
        self.close_reasons: dict[int, BaseException] = {}
        """Why channels that are gone were closed, for processes that ask later; the last
        `MAX_KEPT_ENTRIES` of them."""
        # A random start, so that numbers of an earlier process at this address mean nothing here.
        self._numbers = count(secrets.randbits(40) << 20)
        self._numbers_by_id: dict[int, int] = {}
        # Not `fork_guard.guard`: the fork that holds that would wait for the step that waits here.
        self._numbers_lock = threading.RLock()
        self.aliases: dict[int, int] = {}
        """The numbers by which drones know inherited channels (inherited.py), and the proper
        ones."""
        self.selects = count(1)
        self.peers: dict[str, PeerConnection] = {}
        # How the last of the lost peers have ended.
        self.endings: dict[str, PeerEnding] = {}
        self._by_fd: dict[int, PeerConnection] = {}
        self._dirty: deque[PeerConnection] = deque()
        self._ready_events: list[tuple[int, int]] = []
        self._last_poll_at = self._last_write_at = 0.0
        self._open = True
        self._listener = parent_death.close_in_child(
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        )
        self._wakeup = parent_death.close_in_child(
            parent_death.Descriptor(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        )
        self._epoll = parent_death.close_in_child(select.epoll())
        for old in (address, address[:-1] + "e"):  # of an earlier process with the same pid
            with suppress(FileNotFoundError):
                os.unlink(old)
        with ExitStack() as undo:
            undo.callback(self._close_sockets)
            try:
                self._listener.bind(address)
            except OSError as error:
                error.filename = address
                raise
            self._listener.listen(1024)
            self._listener.setblocking(False)
            watch(self._epoll, self._listener.fileno(), select.EPOLLIN)
            watch(self._epoll, self._wakeup.fd, select.EPOLLIN)
            undo.pop_all()
        self._wakeup_poll = select.poll()
        self._wakeup_poll.register(self._wakeup.fd, select.POLLIN)
        scheduler.post(self._begin)

    def _begin(self) -> None:
        if self._open:
            scheduler.transport = self
            # Another process may wake a thread that waits here, so no deadlock is reported.
            scheduler.external_waits += 1

    def number_of(self, channel: Channel[Any]) -> int:
        """Return the number by which others know the channel. Any thread may call this."""
        with self._numbers_lock:
            number = self._numbers_by_id.get(id(channel))
            if number is None:
                number = self._numbers_by_id[id(channel)] = next(self._numbers)
                self.channels[number] = channel  # so that its `id` stays unique
            return number

    def forget_channel(self, number: int, reason: BaseException | None) -> None:
        """Forget a channel that is closed and empty. `reason` is set if its last end was lost with
        a process or a call.
        """
        if reason is not None:
            keep_last(self.close_reasons, number, reason)
        with self._numbers_lock:
            channel = self.channels.pop(number, None)
            self._numbers_by_id.pop(id(channel), None)

    # -- in place of the owner thread's lock -------------------------------------------------------

    def release(self) -> None:
        """Wake the owner thread. Any thread may call this."""
        os.eventfd_write(self._wakeup.fd, 1)

    def acquire(self, timeout: float = -1) -> bool:
        """Sleep until `release` is called, there is something to read, or `timeout` is over. Return
        True if `release` was called. Without a timeout, another thread is about to call
        `release`.
        """
        if timeout < 0:
            self._wakeup_poll.poll()
        while self._dirty:  # once, unless finalizers queue messages meanwhile
            self.flush()
        events = self._epoll.poll(timeout)
        for fd, _ in events:
            if fd == self._wakeup.fd:
                os.eventfd_read(fd)
                self._last_poll_at = 0.0
                return True
        self._ready_events = events
        return False

    def poll(self) -> None:
        """Send the queued messages, and handle those that have arrived."""
        events, self._ready_events = self._ready_events, []
        now = monotonic()
        if events:
            self._last_poll_at = now
        else:
            if now - self._last_poll_at < POLL_INTERVAL_SECONDS:
                return
            self._last_poll_at = now
            if self._dirty:
                self.flush()
            events = self._epoll.poll(0)
        scheduler.current = None
        for fd, event in events:
            peer = self._by_fd.get(fd)
            if peer is not None:
                if event & select.EPOLLOUT:
                    peer.flush()
                if event & ~select.EPOLLOUT:
                    peer.receive()
            elif fd == self._listener.fileno():
                self._accept()

    def receive_all(self) -> None:
        """Handle all messages that have arrived by now. Message handlers must not call this."""
        for _ in range(MAX_RECEIVE_POLLS):
            if not self._ready_events:
                self._ready_events = [
                    each for each in self._epoll.poll(0) if each[0] != self._wakeup.fd
                ]
            if not self._ready_events:
                return
            self.poll()

    def flush(self, by_owner: bool = True) -> None:
        """Send the queued messages. Without `by_owner`, any thread may call this, also during a
        step.
        """
        with suppress(IndexError):  # another thread was quicker
            for _ in range(len(self._dirty)):
                self._dirty.popleft().flush(by_owner)

    # -- connections -------------------------------------------------------------------------------

    def dial(self, address: str, name: str) -> PeerConnection | None:
        """Return the connection to that process, or None if the process is gone.

        Also return a lost connection if its cause is not known yet, so that a new request gets the
        same error as those before.
        """
        peer = self.peers.get(address)
        if peer is not None or not self._open:
            return peer
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connect(sock, address)
        except OSError as error:
            sock.close()
            lost = self.peers[address] = PeerConnection(
                self, sock, address, addresses.pid_of(address)
            )
            lost.name = name
            lost.disconnect("does not answer" if isinstance(error, BlockingIOError) else "")
            # Killed just now, and how it ended is not recorded yet.
            return self.peers.get(address)
        peer = self._add_connection(sock, address)
        if peer is not None:
            self.peers[address] = peer
        return peer

    def _connect(self, sock: socket.socket, address: str) -> None:
        """Connect. The kernel reports a full backlog at once, so this call waits for a place."""
        sock.setblocking(False)
        deadline = monotonic() + PEER_TIMEOUT_SECONDS
        while True:
            try:
                sock.connect(address)
                return
            except BlockingIOError:
                if monotonic() > deadline:
                    raise
            sleep(CONNECT_RETRY_SECONDS)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _RESOURCE_ERRNOS:
                # The caller stays in the backlog, where each poll would find it again at once.
                log.warning(
                    "the connection of another process that uses a channel is delayed: %s", error
                )
                self._epoll.modify(self._listener.fileno(), 0)
                scheduler.timers.after(ACCEPT_RETRY_SECONDS, self._resume_accept)
            return
        with suppress(OSError):
            self._add_connection(sock, "")

    def _resume_accept(self) -> None:
        if self._open:
            self._epoll.modify(self._listener.fileno(), select.EPOLLIN)

    def _add_connection(self, sock: socket.socket, address: str) -> PeerConnection | None:
        pid, uid, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.geteuid():
            log.warning(
                "process %d of user %d was refused access to the channels of this process", pid, uid
            )
            sock.close()
            return None
        sock.setblocking(False)
        peer = PeerConnection(self, parent_death.close_in_child(sock), address, pid)
        self._by_fd[sock.fileno()] = peer
        watch(self._epoll, sock.fileno(), select.EPOLLIN)
        peer.put(
            HELLO, 0, 0, json.dumps({"address": self.address, "name": addresses.own_name}).encode()
        )
        return peer

    def schedule_write(self, peer: PeerConnection, now: bool = True) -> None:
        self._dirty.append(peer)
        if now:
            time = monotonic()
            # Just after a poll or a write, more messages follow, or the owner thread polls soon.
            if time - max(self._last_poll_at, self._last_write_at) >= POLL_INTERVAL_SECONDS:
                self._last_write_at = time
                self.flush(by_owner=False)

    def watch_writable(self, peer: PeerConnection, writing: bool) -> None:
        self._epoll.modify(peer.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if writing else 0))

    def disconnect(self, peer: PeerConnection) -> None:
        # Otherwise a write might go to another file that has got the same descriptor.
        with peer.write_lock:
            fd = peer.sock.fileno()
            if self._by_fd.pop(fd, None) is not None:
                with suppress(OSError):
                    self._epoll.unregister(fd)
                parent_death.close(peer.sock)

    def find_ending(self, peer: PeerConnection, checks: float = MAX_ENDING_CHECKS) -> None:
        """Find out how a process ended that was killed; its parent records that."""
        # Before the record is read, because the parent writes the record before it removes the
        # socket.
        socket_exists = os.path.exists(peer.address)
        ending = ending_of(peer.address, peer.name)
        if ending is None and socket_exists and checks > 0 and self._open:
            checks -= CHECK_WEIGHTS.get(state_of(peer.pid), ENDING_CHECK_WEIGHT)
            scheduler.timers.after(
                ENDING_CHECK_INTERVAL_SECONDS, partial(self.find_ending, peer, checks)
            )
        else:
            peer.report_loss(ending or PeerEnding("has ended", None))

    # -- closing -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the transport soon. Any thread may call this."""
        global _transport
        with fork_guard.guard:
            if _transport is self:
                _transport = None
        scheduler.post(self._close)

    def send_bye(self) -> None:
        """Send the queued messages and BYE, because the process ends."""
        for peer in list(self._by_fd.values()):
            peer.put(BYE)
            with suppress(OSError):
                peer.sock.settimeout(PEER_TIMEOUT_SECONDS)
                peer.flush()
        with suppress(OSError):
            os.unlink(self.address)

    def _close(self) -> None:
        if self._open:
            self._open = False
            if scheduler.transport is self:
                scheduler.transport = None
                scheduler.external_waits -= 1
            for peer in list(self._by_fd.values()):
                peer.disconnect("has ended")
            self._close_sockets()
            self.channels.clear()

    def _close_sockets(self) -> None:
        for each in (self._listener, self._wakeup, self._epoll):
            parent_death.close(each)
        with suppress(OSError):
            os.unlink(self.address)


def _send_bye_at_exit() -> None:
    """Send BYE at the end of the process, in any thread."""
    transport = _transport  # read once: another thread may be closing it
    if transport is not None:
        scheduler.run_in_owner(transport.send_bye, PEER_TIMEOUT_SECONDS)


def _close_at_end() -> None:
    """Close the transport with this process's reactor. That of a drone stays open, because others
    reach it in the directory of its parent.
    """
    transport = _transport
    if transport is not None and addresses.parent_directory is None:
        transport.close()


def _drop_in_child() -> None:
    """Drop the transport in a forked child. `parent_death` has closed its sockets."""
    global _transport
    if _transport is not None:
        inherited_transports.append(_transport)
        _transport = None


inherited_transports: list[ChannelTransport] = []
"""Transports of the processes that this one is a fork of."""
addresses.end_callbacks.append(_close_at_end)
os.register_at_fork(after_in_child=_drop_in_child)
