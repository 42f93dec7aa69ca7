"""A connection with another image: what is said is collected, what is heard is handed on, and how
it ends is found out.

    put(kind, channel, number, payload) ──> out ──flush: one write──> socket ──hear──> OBEYED[kind](peer, ...)

Only the owner says and hears something; what was said is written by the owner, or by the watchdog,
where a step of the owner's goes on for long.

An image that ends says BYE. One that is killed says nothing; its parent leaves word how it ended
(wire/addresses.py), and who was connected with it waits a moment for that, so that all who are told
are told the cause."""

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
SMALL = 4096  # bytes of a payload that is copied into one buffer with its head
KEPT = 1000  # of what is remembered of channels, ends and images that are gone


_space = memoryview(
    bytearray(CHUNK)
)  # where the owner reads into: a new one each time would be a new mapping


class PeerConnection:
    """A connection with another image. Either may have remote ends of channels that live in the
    other."""

    def __init__(self, post: ChannelTransport, end: socket.socket, address: str, pid: int) -> None:
        self.post = post
        self.end = end
        self.who = address  # where the other image is reached; who has called us will say it
        self.name = f"process {pid}"
        self.pid = pid
        self.lost = False
        self.ending = PeerEnding("", None)
        self.queued = self.sent = 0  # bytes, all told
        self.writing = allocate_lock()
        self._out: deque[Any] = deque()
        self._in = bytearray()
        self._due = self._blocked = (
            False  # somebody will write: who is told by the post, or by the socket
        )
        # Of remote ends here, of channels there: all by the op's number, or the channel's.
        self.numbers = count(1)
        self.waiting: dict[int, Any] = {}  # what was asked, and is not answered yet
        self.held: dict[int, Any] = {}  # offers of a select, HELD
        self.credits: dict[int, Any] = {}  # the places in their buffers that are granted to us
        # Of remote ends there, of channels here.
        self.ops: dict[int, Any] = {}  # those that are not over
        self.asked: dict[
            int, Callable[[bool], object]
        ] = {}  # who wants to know whether an op was HELD
        self.given: dict[int, Any] = {}  # deals that await TAKE or PASS
        self.accounts: dict[int, Any] = {}  # the places in our buffers that are granted to them
        self.ends: WeakSet[Any] = WeakSet()  # channels of which they hold Senders or Receivers

    def put(self, kind: int, channel: int = 0, number: int = 0, payload: bytes = b"") -> int:
        """Says something; it is sent soon. Where in all that was said it begins."""
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
        """As much as the socket takes. From any thread, and in a step, where it is not said to be
        `in_turn`: then it is left to the owner's next turn if somebody is writing (who may be this
        very thread, further up: a finalizer says something in the middle of it), or the connection
        is broken."""
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
        """Nothing is left behind by two that write: who puts something looks at `_due` and
        `_blocked` after that, and here they are cleared before it is looked whether there is
        something."""
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
            except (
                BrokenPipeError,
                ConnectionResetError,
            ):  # it has ended: what it said before is to be heard first
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
        finally:  # what was heard is not heard again, though an item's own code should raise a SystemExit
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
        """The connection is no more; without `why` it is to be found out."""
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
    """Of those that `known` has, the last `KEPT`."""
    known[key] = value
    if len(known) > KEPT:
        del known[next(iter(known))]


class PeerEnding(NamedTuple):
    """How an image ended, in words that follow its name; and its death, where it died."""

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
"""What is done at each word; owner.py and proxy.py fill it."""
TOLD_OF_LOSS: list[Callable[[PeerConnection], object]] = []
