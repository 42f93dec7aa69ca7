"""A connection to another process: collects messages, dispatches them, and finds out how it ends.

    put(kind, channel, number, payload) ──> out ──flush: one write──> socket
    socket ──receive──> HANDLERS[kind](peer, ...)

Only the scheduler's owner thread queues and receives messages. A finalizer that interrupts this
thread, even in the middle of a write, may queue messages too. Queued messages are written by the
owner thread or, if one of its steps takes long, by the watchdog.

A process that ends sends BYE. A killed process sends nothing, but its parent records how it ended
(wire/addresses.py). Its peers wait a moment for that record, so that all waiters get the cause.
"""

from __future__ import annotations

import json
import logging
import socket
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

from ...errors import DroneDied, describe_exit
from ...wire import addresses
from ..channel import Channel
from .opcodes import BYE, HEADER, HELLO, NAMES

K = TypeVar("K")
V = TypeVar("V")

log = logging.getLogger("polycephaly.green")

READ_CHUNK_BYTES = 256 * 1024  # bytes read at a time
MAX_BUFFERS_PER_WRITE = 512  # buffers in one write
MAX_COPIED_BYTES = 4096  # bytes; smaller payloads are copied into one buffer with their header
MAX_KEPT_ENTRIES = 1000  # entries remembered about channels, ends and processes that are gone


# The owner thread's read buffer. A new one for each read would be a new memory mapping.
_read_buffer = memoryview(bytearray(READ_CHUNK_BYTES))


class Transport(Protocol):
    """The interface of a `ChannelTransport` for connections and for channels of this process."""

    channels: dict[int, Channel[Any]]
    close_reasons: dict[int, BaseException]
    aliases: dict[int, int]
    peers: dict[str, PeerConnection]
    endings: dict[str, PeerEnding]

    def number_of(self, channel: Channel[Any]) -> int: ...
    def forget_channel(self, number: int, reason: BaseException | None) -> None: ...
    def schedule_write(self, peer: PeerConnection, now: bool = True) -> None: ...
    def watch_writable(self, peer: PeerConnection, writing: bool) -> None: ...
    def disconnect(self, peer: PeerConnection) -> None: ...
    def find_ending(self, peer: PeerConnection) -> None: ...


class PeerConnection:
    """A connection to another process. Either may have proxies of channels of the other."""

    def __init__(self, transport: Transport, sock: socket.socket, address: str, pid: int) -> None:
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
