"""The post: one image's sockets to other images, for its channels.

    remote end here ──dial──> <home>/<pid>.c of the image where the channel was made
    <home>/<own pid>.c <──accept── images that have ends of channels made here

Two images share one connection, whoever has dialled: what goes there and back wakes the other side
once. (Where both dial at once there are two, and each uses its own.)

All of it is done by the scheduler's owner: it sleeps in this epoll in place of its lock (`acquire`,
`release`), and looks into it between steps (`look`). So a message crosses no thread, and channels
need no locks here either. What is said is collected, and goes out when the owner looks or sleeps:
messages to one image in one write. A step that goes on for long keeps nothing back: what it says
goes at once, if nothing went just before, and else the watchdog sends it.

Who may connect: the socket is in a directory that only its owner can enter, and both sides ask the
kernel whose process the other is. Until it has said HELLO, nothing else of a connection is looked
at.

The post opens with the first channel that leaves this image or comes to it. It closes with the
image, or, in the main image, with its last pool: then no image is left to talk to. A forked child
closes what it has inherited, and has none."""

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
from _thread import allocate_lock
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import count
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from ...runtime import fork_guard, parent_death
from ...runtime.procfs import state_of
from ...wire import addresses
from ..scheduler import scheduler
from .connection import PeerConnection, PeerEnding, ending_of, keep_last
from .opcodes import BYE, HELLO

if TYPE_CHECKING:
    from ..channel import Channel

__all__ = ["ChannelTransport", "of_parents", "own_address", "the_post"]

log = logging.getLogger("polycephaly.green")

LOOK_AFTER = 0.0002  # seconds between looks of a busy owner
PATIENCE = 5.0  # seconds: for a home that has more callers than its backlog holds, and for goodbyes
FIND_OUT_EVERY = 0.005  # seconds between looks for how a drone ended that was connected
FIND_OUT_LOOKS = (
    60.0  # a number of them, for a machine that stands still takes no time from who is to tell that
)
UNREAPED = 0.01  # of a look, while it is a zombie: its parent, which leaves the word, waits for a processor, or is gone
CALL_AGAIN = 0.005  # seconds between calls of a home whose backlog is full
HEAR_MOST = 1000  # looks, when all is to be heard: others may go on to send
ACCEPT_AGAIN = 0.1  # seconds until callers are let in again, where there was no descriptor for one

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_CREDENTIALS = struct.Struct("3i")
_post: ChannelTransport | None = None


def own_address() -> str | None:
    """Where this image can be reached; None for an image that has no pool, and is of none."""
    return addresses.address_here(addresses.own_home)


def the_post() -> ChannelTransport:
    """This image's, opened if need be. From any thread. Raises `RuntimeError` where there is nobody
    to talk to."""
    global _post
    post = _post
    if post is not None:
        return post
    with fork_guard.guard:
        if _post is None:
            address = own_address()
            if address is None:
                raise RuntimeError(
                    "a channel can be sent to the local drones of a pool of this image, and it has none; it cannot "
                    "be saved, and drones of a pool reached by `connect`, or on Ray, have no way back to it"
                )
            _post = ChannelTransport(address)
            atexit.unregister(_say_goodbye)
            atexit.register(_say_goodbye)
        return _post


class ChannelTransport:
    """There is at most one in an image. Methods that are not said to be for everybody are for the
    owner."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channels: dict[int, Channel[Any]] = {}
        """Those made here that others may know, by number: kept until they are closed."""
        self.reasons: dict[int, BaseException] = {}
        """Why the last of those that are gone were closed, for who asks only then."""
        self._numbers = count(
            secrets.randbits(40) << 20
        )  # those of a former image in this place say nothing here
        self._number_of: dict[int, int] = {}
        self.aliases: dict[int, int] = {}
        """The numbers by which drones know channels that they have inherited (inherited.py), and
        the proper ones."""
        self.selects = count(1)
        self.peers: dict[str, PeerConnection] = {}
        self.gone: dict[
            str, PeerEnding
        ] = {}  # what became of those that were lost, of the last of them
        self._by_fd: dict[int, PeerConnection] = {}
        self._dirty: deque[PeerConnection] = deque()
        self._news: list[tuple[int, int]] = []
        self._looked = self._wrote = 0.0
        self._open = True
        self._listener = parent_death.own(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._bell = parent_death.own(
            parent_death.Descriptor(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        )
        self._epoll = parent_death.own(select.epoll())
        for old in (address, address[:-1] + "e"):  # of a process that had our number before
            with suppress(FileNotFoundError):
                os.unlink(old)
        try:
            self._listener.bind(address)
        except OSError as error:
            self._close_sockets()
            error.filename = address
            raise
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._epoll.register(self._bell.fd, select.EPOLLIN)
        self._rung = select.poll()
        self._rung.register(self._bell.fd, select.POLLIN)
        scheduler.post(self._begin)

    def _begin(self) -> None:
        if self._open:
            scheduler.mail = self
            scheduler.outside += (
                1  # another image may wake who waits here: there is no verdict of a deadlock
            )

    def number_of(self, channel: Channel[Any]) -> int:
        """By which others know it. From any thread."""
        with fork_guard.guard:
            number = self._number_of.get(id(channel))
            if number is None:
                number = self._number_of[id(channel)] = next(self._numbers)
                self.channels[number] = channel  # so its `id` stays its own
            return number

    def forget_channel(self, number: int, reason: BaseException | None) -> None:
        """It is closed, and empty: for that `reason`, where somebody has died."""
        if reason is not None:
            keep_last(self.reasons, number, reason)
        with fork_guard.guard:
            channel = self.channels.pop(number, None)
            self._number_of.pop(id(channel), None)

    # -- in place of the owner's lock --------------------------------------------------------------

    def release(self) -> None:
        """From any thread: wakes the owner."""
        os.eventfd_write(self._bell.fd, 1)

    def acquire(self, timeout: float = -1) -> bool:
        """Until it is woken, or there is something to read, or the time is over. Whether it was
        woken. Without a time, somebody is about to wake it."""
        if timeout < 0:
            self._rung.poll()
        while self._dirty:  # once, but for what finalizers say meanwhile
            self._flush()
        news = self._epoll.poll(timeout)
        for fd, _ in news:
            if fd == self._bell.fd:
                os.eventfd_read(fd)
                self._looked = 0.0
                return True
        self._news = news
        return False

    def look(self) -> None:
        """Sends what waits, and hears what has come."""
        news, self._news = self._news, []
        now = monotonic()
        if news:
            self._looked = now
        else:
            if now - self._looked < LOOK_AFTER:
                return
            self._looked = now
            if self._dirty:
                self._flush()
            news = self._epoll.poll(0)
        scheduler.current = None
        for fd, event in news:
            peer = self._by_fd.get(fd)
            if peer is not None:
                if event & select.EPOLLOUT:
                    peer.flush()
                if event & ~select.EPOLLOUT:
                    peer.hear()
            elif fd == self._listener.fileno():
                self._accept()

    def hear_all(self) -> None:
        """All that has come by now. Not while something is being heard."""
        for _ in range(HEAR_MOST):
            if not self._news:
                self._news = [each for each in self._epoll.poll(0) if each[0] != self._bell.fd]
            if not self._news:
                return
            self.look()

    def _flush(self, in_turn: bool = True) -> None:
        with suppress(IndexError):  # another thread was quicker
            for _ in range(len(self._dirty)):
                self._dirty.popleft().flush(in_turn)

    def send_late(self) -> None:
        """What a step has said that is not over yet. From any thread."""
        if self._dirty:
            self._flush(in_turn=False)

    # -- connections -------------------------------------------------------------------------------

    def dial(self, address: str, name: str) -> PeerConnection | None:
        """The connection to that image; None where it is gone. One that is lost, and of which it is
        to be found out yet how, too: who asks something there is told with the others."""
        peer = self.peers.get(address)
        if peer is not None or not self._open:
            return peer
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._call(end, address)
        except OSError as error:
            end.close()
            lost = self.peers[address] = PeerConnection(
                self, end, address, addresses.pid_of(address)
            )
            lost.name = name
            lost.lose("does not answer" if isinstance(error, BlockingIOError) else "")
            return self.peers.get(
                address
            )  # it has been killed just now, and there is no word of it yet
        peer = self._connected(end, address)
        if peer is not None:
            self.peers[address] = peer
        return peer

    def _call(self, end: socket.socket, address: str) -> None:
        """Connects. A backlog that is full is told at once, and waited for here."""
        end.setblocking(False)
        until = monotonic() + PATIENCE
        while True:
            try:
                end.connect(address)
                return
            except BlockingIOError:
                if monotonic() > until:
                    raise
            sleep(CALL_AGAIN)

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError as error:
            if (
                error.errno in _EXHAUSTED
            ):  # the caller stays there to be seen: looking at once again would not end
                log.warning("another image that calls for a channel has to wait: %s", error)
                self._epoll.modify(self._listener.fileno(), 0)
                scheduler.timers.set(scheduler.timers.now() + ACCEPT_AGAIN, self._accept_again)
            return
        with suppress(OSError):
            self._connected(end, "")

    def _accept_again(self) -> None:
        if self._open:
            self._epoll.modify(self._listener.fileno(), select.EPOLLIN)

    def _connected(self, end: socket.socket, address: str) -> PeerConnection | None:
        pid, uid, _ = _CREDENTIALS.unpack(
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.geteuid():
            log.warning(
                "process %d of user %d is not let into the channels of this image", pid, uid
            )
            end.close()
            return None
        end.setblocking(False)
        peer = PeerConnection(self, parent_death.own(end), address, pid)
        self._by_fd[end.fileno()] = peer
        self._epoll.register(end.fileno(), select.EPOLLIN)
        peer.put(
            HELLO, 0, 0, json.dumps({"address": self.address, "name": addresses.name_here}).encode()
        )
        return peer

    def wants_to_write(self, peer: PeerConnection, now: bool = True) -> None:
        self._dirty.append(peer)
        if now:
            time = monotonic()
            if (
                time - max(self._looked, self._wrote) >= LOOK_AFTER
            ):  # else more is to come, or we look soon
                self._wrote = time
                self._flush(in_turn=False)

    def watch(self, peer: PeerConnection, writing: bool) -> None:
        self._epoll.modify(peer.end.fileno(), select.EPOLLIN | (select.EPOLLOUT if writing else 0))

    def disconnect(self, peer: PeerConnection) -> None:
        with peer.writing:  # or what is written might go to whoever has that descriptor then
            fd = peer.end.fileno()
            if self._by_fd.pop(fd, None) is not None:
                with suppress(OSError):
                    self._epoll.unregister(fd)
                parent_death.close(peer.end)

    def find_out(self, peer: PeerConnection, looks: float = FIND_OUT_LOOKS) -> None:
        """It has died without a word; its parent leaves one."""
        is_there = os.path.exists(
            peer.who
        )  # looked at first: the word is left before the socket goes
        ending = ending_of(peer.who, peer.name)
        if ending is None and is_there and looks > 0 and self._open:
            looks -= UNREAPED if state_of(peer.pid) == "Z" else 1
            scheduler.timers.set(
                scheduler.timers.now() + FIND_OUT_EVERY, partial(self.find_out, peer, looks)
            )
        else:
            peer.tell_loss(ending or PeerEnding("has ended", None))

    # -- its end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """From any thread, soon."""
        global _post
        with fork_guard.guard:
            if _post is self:
                _post = None
        scheduler.post(self._close)

    def say_goodbye(self) -> None:
        """The image ends: what was said is sent, and that this was all."""
        for peer in list(self._by_fd.values()):
            peer.put(BYE)
            with suppress(OSError):
                peer.end.settimeout(PATIENCE)
                peer.flush()
        with suppress(OSError):
            os.unlink(self.address)

    def _close(self) -> None:
        if self._open:
            self._open = False
            if scheduler.mail is self:
                scheduler.mail = None
                scheduler.outside -= 1
            for peer in list(self._by_fd.values()):
                peer.lose("has ended")
            self._close_sockets()
            self.channels.clear()

    def _close_sockets(self) -> None:
        for each in (self._listener, self._bell, self._epoll):
            parent_death.close(each)
        with suppress(OSError):
            os.unlink(self.address)


def _say_goodbye() -> None:
    """At the image's end, in any thread."""
    post = _post
    if post is None:
        return
    said = allocate_lock()
    said.acquire()

    def say() -> None:
        try:
            post.say_goodbye()
        finally:
            said.release()

    scheduler.post(say)
    said.acquire(timeout=PATIENCE)


def _close_post() -> None:
    """The own hub has ended. A drone's goes on: others reach it in its parent's directory."""
    post = _post
    if post is not None and addresses.home_of_parent is None:
        post.close()


def _forget() -> None:
    """In a forked child. The sockets were closed as all that is `lifeline.own`."""
    global _post
    if _post is not None:
        of_parents.append(_post)
        _post = None


of_parents: list[ChannelTransport] = []
"""Of the images that this one is a fork of."""
addresses.at_end.append(_close_post)
os.register_at_fork(after_in_child=_forget)
