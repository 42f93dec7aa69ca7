"""The sockets of one process to other processes, for its channels.

    proxy here ──dial──> <directory>/<pid>.c of the process where the channel was made
    <directory>/<own pid>.c <──accept── processes that have proxies of channels made here

Two processes share one connection, whichever of them has dialled. If both dial at once, there are
two, and each uses its own.

The scheduler's owner thread does all the work. It sleeps in this epoll in place of its lock
(`acquire`, `release`), and polls it between steps (`look`). So no message crosses a thread, and
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

LOOK_AFTER = 0.0002  # seconds between two polls of a busy owner thread
PATIENCE = 5.0  # seconds to wait for a place in a full backlog, and for goodbyes
FIND_OUT_EVERY = 0.005  # seconds between looks for how a connected process ended
# A number of looks and not a time, because a suspended machine takes no time from the process that
# is to report.
FIND_OUT_LOOKS = 60.0
# Part of a look that counts if the process is a zombie. Its parent, which records how it ended,
# then waits for a processor, or is gone.
UNREAPED = 0.01
CALL_AGAIN = 0.005  # seconds between attempts to connect to a full backlog
HEAR_MOST = 1000  # polls to receive everything; the peers may go on sending
ACCEPT_AGAIN = 0.1  # seconds to the next accept, if there was no descriptor for one

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_CREDENTIALS = struct.Struct("3i")
_post: ChannelTransport | None = None


def own_address() -> str | None:
    """Return the address of this process; None if it has no pool and belongs to none."""
    return addresses.address_here(addresses.own_home)


def the_post() -> ChannelTransport:
    """Return this process's transport, opened if need be. Any thread may call this.

    Raises `RuntimeError` if there are no processes to connect to.
    """
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
    """The transport of a process, which has at most one. Methods are for the owner thread only,
    unless they say otherwise."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channels: dict[int, Channel[Any]] = {}
        """Channels made here that others may know, by number; kept until they are closed."""
        self.reasons: dict[int, BaseException] = {}
        """Why channels that are gone were closed, for processes that ask later; the last `KEPT` of
        them."""
        # A random start, so that numbers of an earlier process at this address mean nothing here.
        self._numbers = count(secrets.randbits(40) << 20)
        self._number_of: dict[int, int] = {}
        self.aliases: dict[int, int] = {}
        """The numbers by which drones know inherited channels (inherited.py), and the proper
        ones."""
        self.selects = count(1)
        self.peers: dict[str, PeerConnection] = {}
        # How the last of the lost peers have ended.
        self.gone: dict[str, PeerEnding] = {}
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
        for old in (address, address[:-1] + "e"):  # of an earlier process with the same pid
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
            # Another process may wake a thread that waits here, so no deadlock is reported.
            scheduler.outside += 1

    def number_of(self, channel: Channel[Any]) -> int:
        """Return the number by which others know the channel. Any thread may call this."""
        with fork_guard.guard:
            number = self._number_of.get(id(channel))
            if number is None:
                number = self._number_of[id(channel)] = next(self._numbers)
                self.channels[number] = channel  # so that its `id` stays unique
            return number

    def forget_channel(self, number: int, reason: BaseException | None) -> None:
        """Forget a channel that is closed and empty. `reason` is set if its last end was lost with
        a process or a call."""
        if reason is not None:
            keep_last(self.reasons, number, reason)
        with fork_guard.guard:
            channel = self.channels.pop(number, None)
            self._number_of.pop(id(channel), None)

    # -- in place of the owner thread's lock -------------------------------------------------------

    def release(self) -> None:
        """Wake the owner thread. Any thread may call this."""
        os.eventfd_write(self._bell.fd, 1)

    def acquire(self, timeout: float = -1) -> bool:
        """Sleep until `release` is called, there is something to read, or `timeout` is over. Return
        True if `release` was called. Without a timeout, another thread is about to call
        `release`."""
        if timeout < 0:
            self._rung.poll()
        while self._dirty:  # once, unless finalizers send messages meanwhile
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
        """Send the queued messages, and handle those that have arrived."""
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
        """Handle all messages that have arrived by now. Message handlers must not call this."""
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
        """Send the messages of a step that is not over yet. Any thread may call this."""
        if self._dirty:
            self._flush(in_turn=False)

    # -- connections -------------------------------------------------------------------------------

    def dial(self, address: str, name: str) -> PeerConnection | None:
        """Return the connection to that process, or None if the process is gone.

        Also return a lost connection if its cause is not known yet, so that a new request gets the
        same error as those before.
        """
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
            # Killed just now, and how it ended is not recorded yet.
            return self.peers.get(address)
        peer = self._connected(end, address)
        if peer is not None:
            self.peers[address] = peer
        return peer

    def _call(self, end: socket.socket, address: str) -> None:
        """Connect. The kernel reports a full backlog at once, so this call waits for a place."""
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
            if error.errno in _EXHAUSTED:
                # The caller stays in the backlog, where each poll would find it again at once.
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
            # Just after a look or a write, more messages follow, or the owner thread looks soon.
            if time - max(self._looked, self._wrote) >= LOOK_AFTER:
                self._wrote = time
                self._flush(in_turn=False)

    def watch(self, peer: PeerConnection, writing: bool) -> None:
        self._epoll.modify(peer.end.fileno(), select.EPOLLIN | (select.EPOLLOUT if writing else 0))

    def disconnect(self, peer: PeerConnection) -> None:
        # Otherwise a write might go to another file that has got the same descriptor.
        with peer.writing:
            fd = peer.end.fileno()
            if self._by_fd.pop(fd, None) is not None:
                with suppress(OSError):
                    self._epoll.unregister(fd)
                parent_death.close(peer.end)

    def find_out(self, peer: PeerConnection, looks: float = FIND_OUT_LOOKS) -> None:
        """Find out how a process ended that was killed; its parent records that."""
        # Before the record is read, because the parent writes the record before it removes the
        # socket.
        is_there = os.path.exists(peer.who)
        ending = ending_of(peer.who, peer.name)
        if ending is None and is_there and looks > 0 and self._open:
            looks -= UNREAPED if state_of(peer.pid) == "Z" else 1
            scheduler.timers.set(
                scheduler.timers.now() + FIND_OUT_EVERY, partial(self.find_out, peer, looks)
            )
        else:
            peer.tell_loss(ending or PeerEnding("has ended", None))

    # -- closing -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the transport soon. Any thread may call this."""
        global _post
        with fork_guard.guard:
            if _post is self:
                _post = None
        scheduler.post(self._close)

    def say_goodbye(self) -> None:
        """Send the queued messages and BYE, because the process ends."""
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
    """Say goodbye at the end of the process, in any thread."""
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
    """Close the transport with this process's reactor. That of a drone stays open, because others
    reach it in the directory of its parent."""
    post = _post
    if post is not None and addresses.home_of_parent is None:
        post.close()


def _forget() -> None:
    """Drop the transport in a forked child. `parent_death` has closed its sockets."""
    global _post
    if _post is not None:
        of_parents.append(_post)
        _post = None


of_parents: list[ChannelTransport] = []
"""Transports of the processes that this one is a fork of."""
addresses.at_end.append(_close_post)
os.register_at_fork(after_in_child=_forget)
