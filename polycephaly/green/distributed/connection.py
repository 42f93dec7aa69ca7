"""A connection to another process: collects messages, dispatches them, and finds out how it ends.

    put(kind, channel, number, payload) ──> out ──flush: one write──> socket
    socket ──hear──> OBEYED[kind](peer, ...)

Only the scheduler's owner thread queues and receives messages. Queued messages are written by the
owner thread or, if one of its steps takes long, by the watchdog.

A process that ends sends BYE. A killed process sends nothing, but its parent records how it ended
(wire/addresses.py). Its peers wait a moment for that record, so that all waiters get the cause.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakSet

from ...errors import DroneDied
from ...wire import addresses
from .opcodes import BYE, HEAD, HELLO, NAMES

if TYPE_CHECKING:
    from .transport import ChannelTransport

__all__ = ["OBEYED", "TOLD_OF_LOSS", "PeerConnection", "PeerEnding", "ending_of", "keep_last"]

K = TypeVar("K")
V = TypeVar("V")

log = logging.getLogger("polycephaly.green")

CHUNK = 256 * 1024  # bytes read at a time
PIECES = 512  # buffers in one write
SMALL = 4096  # bytes; smaller payloads are copied into one buffer with their header
KEPT = 1000  # entries remembered about channels, ends and processes that are gone


# The owner thread's read buffer. A new one for each read would be a new memory mapping.
_space = memoryview(bytearray(CHUNK))


class PeerConnection:
    """A connection to another process. Either may have proxies of channels of the other."""

    def __init__(self, post: ChannelTransport, end: socket.socket, address: str, pid: int) -> None:
        self.post = post
        self.end = end
        self.who = address  # the other process's; if that has dialled, from its HELLO
        self.name = f"process {pid}"
        self.pid = pid
        self.lost = False
        self.ending = PeerEnding("", None)
        self.queued = self.sent = 0  # bytes since the beginning
        self.writing = allocate_lock()
        self._out: deque[Any] = deque()
        self._in = bytearray()
        # A write is pending: on the transport's next flush, or until the socket is writable.
        self._due = self._blocked = False
        # For proxies here of channels there; by number of the operation, or of the channel.
        self.numbers = count(1)
        self.waiting: dict[int, Any] = {}  # requests not answered yet
        self.held: dict[int, Any] = {}  # offers of a select that is HELD
        self.credits: dict[int, Any] = {}  # places in their buffers, granted to this process
        # For proxies there of channels here.
        self.ops: dict[int, Any] = {}  # operations that are not over
        # callbacks for HELD or PASS
        self.asked: dict[int, Callable[[bool], object]] = {}
        self.given: dict[int, Any] = {}  # transactions that await TAKE or PASS
        self.accounts: dict[int, Any] = {}  # places in the buffers here, granted to them
        self.ends: WeakSet[Any] = WeakSet()  # channels of which they hold Senders or Receivers

    def put(self, kind: int, channel: int = 0, number: int = 0, payload: bytes = b"") -> int:
        """Queue a message, which is sent soon. Return its position in the stream of all bytes
        queued."""
        if self.lost:
            return self.queued
        began = self.queued
        head = HEAD.pack(kind, channel, number, len(payload))
        if len(payload) < SMALL:
            self._out.append(head + payload)
        else:
            self._out += head, payload
        self.queued += HEAD.size + len(payload)
        if not self._due and not self._blocked:
            self._due = True
            self.post.wants_to_write(self)
        return began

    def flush(self, in_turn: bool = True) -> None:
        """Write as much as the socket takes.

        Without `in_turn`, any thread may call this, even during a step. The owner thread's next
        turn then takes over if the connection is broken, or a write is in progress. That write may
        be one of the same thread, further up the stack, if a finalizer sends a message in the
        middle of it.
        """
        self._due = False
        broken = True
        if self.writing.acquire(in_turn):
            try:
                broken = not self.lost and not self._write()
            finally:
                self.writing.release()
        if broken and in_turn:
            self.lose()
        elif broken:
            self._due = True
            self.post.wants_to_write(self, now=False)

    def _write(self) -> bool:
        """Write the queued messages. Return False if the connection is broken.

        Nothing is left behind if two threads write. `put` queues a message before it looks at
        `_due` and `_blocked`. Here, both are cleared before the look at the queue.
        """
        out = self._out
        while True:
            try:
                while out:
                    pieces = [out[index] for index in range(min(len(out), PIECES))]
                    done = self.end.sendmsg(pieces) if len(pieces) > 1 else self.end.send(pieces[0])
                    self.sent += done
                    while done:
                        piece = out.popleft()
                        if done < len(piece):
                            out.appendleft(memoryview(piece)[done:])
                            break
                        done -= len(piece)
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
                self.post.watch(self, blocked)
            if blocked or not out:
                return True

    def hear(self) -> None:
        try:
            came = self.end.recv_into(_space)
        except BlockingIOError:
            return
        except OSError:
            came = 0
        if not came:
            self.lose()
            return
        buffer = self._in
        buffer += _space[:came]
        at, size = 0, len(buffer)
        try:
            while at + HEAD.size <= size and not self.lost:
                kind, channel, number, length = HEAD.unpack_from(buffer, at)
                if not HELLO <= kind <= len(NAMES) or (kind != HELLO and not self.who):
                    log.warning(
                        "%s said something that is no message about channels: it is not listened to",
                        self.name,
                    )
                    self.lose("was cut off")
                    return
                start, end = at + HEAD.size, at + HEAD.size + length
                if end > size:
                    break
                at = end
                self._obey(kind, channel, number, bytes(buffer[start:end]))
        finally:
            # No message is handled twice, even if an item's own code raises SystemExit.
            del buffer[:at]

    def _obey(self, kind: int, channel: int, number: int, payload: bytes) -> None:
        try:
            if kind == HELLO:
                told = json.loads(payload)
                self.who, self.name = str(told["address"]), str(told["name"])
                self.post.peers.setdefault(self.who, self)
            elif kind == BYE:
                self.lose("has ended")
            else:
                OBEYED[kind](self, channel, number, payload)
        except Exception:
            log.exception(
                "a bug in polycephaly: a message about channels, of %s: %s",
                self.name,
                NAMES[kind - 1],
            )

    def lose(self, why: str = "") -> None:
        """Drop the connection. If `why` is empty, find out how the process ended."""
        if self.lost:
            return
        self.lost = True
        self.post.disconnect(self)
        if why:
            self.tell_loss(PeerEnding(why, None))
        else:
            self.post.find_out(self)

    def tell_loss(self, ending: PeerEnding) -> None:
        self.ending = ending
        if self.post.peers.get(self.who) is self:
            del self.post.peers[self.who]
        keep_last(self.post.gone, self.who, ending)
        for tell in TOLD_OF_LOSS:
            try:
                tell(self)
            except Exception:
                log.exception("a bug in polycephaly: %s has ended", self.name)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


def keep_last(known: dict[K, V], key: K, value: V) -> None:
    """Store `value`, and keep only the last `KEPT` entries."""
    known[key] = value
    if len(known) > KEPT:
        del known[next(iter(known))]


class PeerEnding(NamedTuple):
    """How a process ended, in words that follow its name, and its death, if it died."""

    how: str
    death: DroneDied | None


def ending_of(address: str, name: str) -> PeerEnding | None:
    code = addresses.how_it_ended(address)
    if code is None:
        return None
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
    pid = addresses.pid_of(address)
    return PeerEnding(how, DroneDied(f"drone {name} (pid {pid}) {how}", drone=name, exitcode=code))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


OBEYED: dict[int, Callable[[PeerConnection, int, int, bytes], object]] = {}
"""The handler of each kind of message; filled by handlers.py, ends.py and proxy.py."""
TOLD_OF_LOSS: list[Callable[[PeerConnection], object]] = []
"""Called for each connection that is lost, when its ending is known."""
