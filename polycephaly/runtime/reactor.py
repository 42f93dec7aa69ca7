"""The hub: the image's switchboard. It owns the sockets and all that is said on them.

    callers ──append──> crew.queue ┐            ┌──WORK──> lane, or ROUTER ──> drones
    callers ──post────> inbox ─────┤── a turn ──┤
    drones ──RESULTS──> lanes ─────┤            └──> deliveries ── after the turn ──> promises
                        ROUTER ────┤
    zygotes ──reports──> lifeline ─┤
    drones' output ────> pipes ────┘

All state of crews and links is changed in a *turn*, by whoever holds the turn's lock: the hub's
thread, a caller that finds a drone idle (it sends its work itself), or a caller that waits (it
reads the answers itself). So a round trip crosses no thread. A turn calls no code of users (but the
garbage collector may run a finalizer of theirs in it: that can submit, and an attempt to wait is
refused): values are unpickled, promises settled (and so callbacks called) and lines printed after
it, from `deliveries`, by one thread at a time and in order.

Waiting is driving. The lanes have an epoll of their own inside the hub's. A waiting thread takes it
out (the lanes are *lent*) and reads them itself until its promise is settled. All else (zygotes,
output, ZeroMQ, timers) goes on waking the hub's thread. A promise that is settled by another thread
nudges the driver. One thread drives at a time; the others wait for locks. Lanes stay lent after the
drive, since another is likely to follow, and the hub's thread would otherwise be woken by each
answer for nothing; so while they are lent it ticks, and takes them back at the first tick that saw
no drive.

Going to sleep without losing a wake-up:
    sleeper  H1 `hungry`, then offers the bell   H2 looks at inbox and queues   H3 sleeps in epoll
    caller   C1 appends                          C2 looks at `hungry`           C3 takes a turn, or rings the bell
If C1 comes before H2, the sleeper sees the entry. If it comes after, then H1 came before C2, so the caller sees
that the crew is hungry, and takes the turn itself; or, where another holds it, finds the bell (or another
caller has just taken it, and rings). Who ends a turn looks again (H2), so an entry made during it is not left.
Taking the bell and writing to the eventfd are straight-line code up to the call itself, where CPython runs no
signal handler, so Ctrl-C cannot come between them.

The hub starts with the first crew and ends with the last: an image without drones has no thread of
ours."""

from __future__ import annotations

import atexit
import logging
import os
import select
import sys
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import zmq

from ..pool.handlers import hear
from ..promises import promise as promises
from ..promises.promise import FINISHED, Promise, callbacks, settlers
from ..wire.endpoint import BulkTransport, has_news, news_fd
from ..wire.messages import Malformed
from . import fork_guard, parent_death
from .deferred_sigint import DeferredSigint, can_be_raised
from .timers import Timer, Timers
from .tuning import tuning

if TYPE_CHECKING:
    from ..engines.local.handle import LocalHandle
    from ..engines.local.launcher import Launcher
    from ..pool.dispatcher import Dispatcher

__all__ = ["Reactor", "lease_reactor"]

log = logging.getLogger(__name__)

BULK_MOST = 100  # messages read in one turn: a stranger may send without end, and is not to keep all others waiting
LONGEST = 3600.0  # seconds: of what is years away, the kernel could not be told
TOGETHER = 32  # pieces of work that a delivery makes ready: fewer wait for its end, to be sent as one message
TICK = 0.002  # seconds that an answer nobody waits for may lie in a lent lane

_reactor: Reactor | None = None


def lease_reactor() -> Reactor:
    """This image's hub, started if need be. It lives until `Hub.give_back` was called as often."""
    global _reactor
    with fork_guard.guard:
        if _reactor is None:
            _reactor = Reactor()
        _reactor.leases += 1
        return _reactor


def _forget_reactor() -> None:
    """In a forked child: the hub stayed behind with its threads; nothing of it may be used or
    tidied up here."""
    global _reactor
    if _reactor is not None:
        _reactor.stay_behind()
        _left_behind.append(_reactor)
        _reactor = None
    promises.in_turn = None
    settlers.clear()


_left_behind: list[Any] = []
os.register_at_fork(after_in_child=_forget_reactor)


def _end_with_interpreter() -> None:
    """As a ``with`` block ends: what was given to `submit` is finished, as the standard library
    does; after an error that ended the program it is not."""
    reactor = _reactor
    if reactor is None:
        return
    try:
        if (
            hasattr(sys, "ps1") or getattr(sys, "last_type", None) is None
        ):  # at a prompt, errors do not end it
            for dispatcher in list(reactor.dispatchers):
                if dispatcher.has_promised_to_finish:
                    dispatcher.finish()
    finally:
        reactor.post(reactor.abandon_all)
        reactor.thread.join(timeout=5.0)


class Reactor:
    def __init__(self) -> None:
        self.endpoint = BulkTransport()
        self.leases = 0
        self.gone = False
        self.left_behind = False
        self.dispatchers: list[Dispatcher] = []
        self.ending: list[Promise[None]] = []
        """Told when the hub has ended too, if they were the last: then nothing of theirs is
        left."""
        self.last_zygotes: list[Launcher] = []
        """Of crews that have ended. If this process is killed they remove its directory, so those
        of the last crew end when that is gone."""
        self.thread = threading.Thread(target=self._live, name="polycephaly-hub", daemon=True)
        self._router: zmq.Socket[bytes] | None = None
        self._turn = fork_guard.GuardedLock()
        self._inbox: deque[Callable[[], object]] = deque()
        self._errands: list[Callable[[], object]] = []
        self._deliveries: list[Callable[[], object]] = []
        self._handles: dict[bytes, LocalHandle] = {}
        self._watched: dict[int, Callable[[], object]] = {}
        self.timers = Timers()
        """Set in turns. Its `now` is the time of limits, grace and looks."""
        self._delivering = False
        self._deliverer: int | None = None  # the thread that does, if any
        self._driver = threading.Lock()
        self._driving = 0  # the thread that has it
        self._lent = False
        self._drives = self._drives_seen = 0
        self._next_tick = 0.0
        self._asleep = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = parent_death.own(select.epoll())
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._lanes = parent_death.own(select.epoll())
        self._lane_links: dict[int, LocalHandle] = {}
        self._nudging = threading.RLock()
        self._nudge_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lanes.register(self._nudge_fd, select.EPOLLIN)
        self.watch(self._lanes.fileno(), lambda: self._read_lanes(self._lanes.poll(0)))
        promises.in_turn = self._turn.is_mine
        atexit.unregister(_end_with_interpreter)
        atexit.register(_end_with_interpreter)
        fork_guard.add_turn(self.thread, self._turn)
        self.thread.start()

    def stay_behind(self) -> None:
        """In a forked child: what crossed the fork says so when used; the threads it would wait for
        are not here."""
        self.gone = self.left_behind = True
        self._asleep = False
        for dispatcher in self.dispatchers:
            dispatcher.refusal = RuntimeError(
                f"{dispatcher.config.name} belongs to another process, of which this one is a fork"
            )

    # -- from any thread ---------------------------------------------------------------------------

    def open_endpoint(self) -> None:
        """Makes the directory and the socket, once the first zygote is there to see to their
        end."""
        with fork_guard.guard, self._turn:
            if self._router is None:
                self._router = self.endpoint.open()
                # Its descriptor tells of news only: so before each sleep `has_news` is asked.
                self._epoll.register(news_fd(self._router), select.EPOLLIN | select.EPOLLET)

    def post(self, act: Callable[[], object]) -> None:
        """Has `act` called in the hub's next turn. Takes no lock, so finalizers may call it."""
        self._inbox.append(act)
        self.wake()

    def wake(self) -> None:
        if self._asleep:
            try:
                del self._bell
            except AttributeError:  # somebody else rings it
                return
            os.eventfd_write(self._wake_fd, 1)

    def serve(self, dispatcher: Dispatcher) -> None:
        """A crew with an idle drone has got work: sends it from here, if nobody else is at it."""
        if get_ident() == self._deliverer and len(dispatcher.queue) < TOGETHER:
            return  # it looks at the queues when it has delivered
        if self._turn.is_mine() or not can_be_raised():
            self.wake()
            return
        with DeferredSigint():
            while dispatcher.hungry and (dispatcher.queue or dispatcher.dedicated_waiting):
                if not self._turn.acquire(blocking=False):
                    self.wake()
                    return
                try:
                    dispatcher.dispatch(self.timers.now())
                    dispatcher.after_turn()
                finally:
                    self._turn.release()
                if self._deliveries:
                    self.wake()

    def catch_up(self) -> None:
        """A caller submits much, and leaves no other thread the interpreter: sends and hears in
        between. What was heard is settled by the hub's thread, since here it is not waited for."""
        if can_be_raised() and not self._turn.is_mine():
            with DeferredSigint():
                if self._turn.acquire(
                    timeout=TICK
                ):  # who has it may be waiting for the interpreter, which we have
                    try:
                        self._read_lanes(self._lanes.poll(0))
                        self._serve_dispatchers(self.timers.now())
                    finally:
                        self._turn.release()
                if self._deliveries or self._could_send():
                    self.wake()

    def drive(self, promise: Promise[Any], end: float | None) -> None:
        """Reads the lanes until `promise` is settled or the time is `end`. Returns at once where
        another thread does so, or this one cannot: then its caller waits for a lock."""
        if self.left_behind:
            raise RuntimeError(
                f"{promise!r} belongs to another process, of which this one is a fork"
            )
        if self.gone or get_ident() in settlers or self._turn.is_mine() or not can_be_raised():
            return
        with DeferredSigint(self._nudge) as deferred_sigint:
            again = (
                self._driving == get_ident()
            )  # a finalizer in a drive of this thread: nobody else would drive
            if not again and not self._driver.acquire(blocking=False):
                return
            self._driving = get_ident()
            hook = self._nudge_driver
            try:
                self._drives += 1
                if not self._lent and not self.gone:
                    self._lent = True
                    self._epoll.unregister(self._lanes.fileno())
                    self.wake()  # so that it ticks
                promise._hook(hook)
                self._drive(promise, end, deferred_sigint)
            finally:
                promise._unhook(hook)
                if not again:
                    self._driving = 0
                    self._driver.release()

    def can_be_waited_for(self) -> bool:
        """Would what settles promises go on while this thread waits?"""
        return not (self.gone or get_ident() in settlers or self._turn.is_mine())

    def _take_back_lanes(self) -> None:
        """In the hub's thread: at a tick, if they were not used since the last one."""
        now = self.timers.now()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK
        if self._driver.acquire(blocking=False):
            if self._drives == self._drives_seen:
                self._lent = False
                self._epoll.register(self._lanes.fileno(), select.EPOLLIN)
            self._drives_seen = self._drives
            self._driver.release()

    def _drive(
        self, promise: Promise[Any], end: float | None, deferred_sigint: DeferredSigint
    ) -> None:
        news: list[tuple[int, int]] = []
        while not (promise.done() or deferred_sigint.tripped or self.gone):
            waits = not any(
                dispatcher.hungry and dispatcher.queue for dispatcher in self.dispatchers
            )
            if (
                waits and not promise.done()
            ):  # a finalizer may just have driven, and heard the answer
                left = None if end is None else end - monotonic()
                if left is not None and left <= 0:
                    return
                longest = tuning.signal_check_seconds
                news = self._lanes.poll(longest if left is None else min(left, longest))
            with self._turn:
                self._read_lanes(news)
                self._serve_dispatchers(self.timers.now())
                batch = self._take_deliveries()
            if batch is not None:
                self._deliver(batch)

    def _nudge(self) -> None:
        if not self.gone:
            os.eventfd_write(self._nudge_fd, 1)

    def _nudge_driver(self, promise: Promise[Any]) -> None:
        """In the thread that settles it. `_end` closes the descriptor under the same lock; while
        somebody drives, whom a Ctrl-C may nudge without it, there is no end."""
        if get_ident() not in settlers or get_ident() == self.thread.ident:
            with self._nudging:
                self._nudge()

    # -- in a turn: what crews use -----------------------------------------------------------------

    def add_link(self, handle: LocalHandle) -> None:
        self._handles[handle.identity] = handle
        if handle.fast_transport is not None:
            self._lane_links[handle.fast_transport.fileno()] = handle
            self._lanes.register(handle.fast_transport.fileno(), select.EPOLLIN)

    def remove_link(self, handle: LocalHandle) -> None:
        self._handles.pop(handle.identity, None)
        self._unwatch_lane(handle)

    def _unwatch_lane(self, handle: LocalHandle) -> None:
        if (
            handle.fast_transport is not None
            and self._lane_links.pop(handle.fast_transport.fileno(), None) is not None
        ):
            self._lanes.unregister(handle.fast_transport.fileno())

    def watch(self, fd: int, act: Callable[[], object]) -> None:
        self._watched[fd] = act
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(fd)

    def after(self, seconds: float, act: Callable[[], object]) -> Timer:
        timer = self.timers.set(self.timers.now() + seconds, partial(self._guarded, act))
        self.wake()  # if it sleeps, it does not know of this one
        return timer

    @property
    def router(self) -> zmq.Socket[bytes]:
        assert self._router is not None  # the local engine opens the endpoint before it has a link
        return self._router

    def deliver(self, act: Callable[[], object]) -> None:
        """After the turn: `act` may run code of users. In the order of the calls."""
        self._deliveries.append(act)

    def run_errand(self, act: Callable[[], object]) -> None:
        """Outside any turn, in the hub's thread: for what forks."""
        self._errands.append(act)
        self.wake()

    def receive_by_lane(self, handle: LocalHandle, *, all_of_it: bool = False) -> None:
        """Reads one message (the lane's descriptor tells if there are more), or all that there
        are."""
        while handle.fast_transport is not None:
            try:
                frames = handle.fast_transport.receive()
                if frames is None:
                    return
                if not frames:  # its other end is closed; the zygote will tell how the drone ended
                    self._unwatch_lane(handle)
                    return
                hear(handle, frames)
            except Malformed as wrong:
                log.warning("a message of %s was dropped: %s", handle.name, wrong)
                handle.dispatcher.doubt(handle)
            except Exception as error:
                handle.dispatcher.fail(error)
            if not all_of_it:
                return

    def receive(self, most: int) -> None:
        """Reads what drones have sent by bulk; at most so many messages."""
        router = self._router
        while router is not None and most > 0 and has_news(router):
            most -= 1
            identity, *frames = router.recv_multipart(zmq.NOBLOCK)
            handle = self._handles.get(identity)
            if (
                handle is None
            ):  # a drone that is gone by now, or a stranger: nothing of it is looked at
                log.info("a message of nobody's drone was dropped")
                continue
            if not handle.bulk_open:
                handle.open_bulk(router)
            try:
                hear(handle, frames)
            except Malformed as wrong:
                log.warning("a message of %s was dropped: %s", handle.name, wrong)
                handle.dispatcher.doubt(handle)
            except Exception as error:
                handle.dispatcher.fail(error)

    def abandon_all(self) -> None:
        for dispatcher in list(self.dispatchers):
            dispatcher.abandon()

    # -- the hub's thread: its life ----------------------------------------------------------------

    def _live(self) -> None:
        while True:
            with self._turn:
                self._turn_once()
                batch = self._take_deliveries()
            if batch is not None:
                self._deliver(batch)
                batch = None  # nothing of it is kept while this sleeps
            self._run_errands()
            gone = self.leases == 0 and self._end()
            if gone or self.leases:
                while self.last_zygotes:
                    self.last_zygotes.pop().end()
                ended, self.ending = self.ending, []
                for promise in ended:
                    promise._settle(FINISHED, None, None)
            if gone:
                return
            self._sleep()

    def _turn_once(self) -> None:
        inbox = self._inbox
        while inbox:
            self._guarded(inbox.popleft())
        self._guarded(partial(self.receive, BULK_MOST))
        self.timers.fire()
        self._serve_dispatchers(self.timers.now())

    def _serve_dispatchers(self, now: float) -> None:
        for dispatcher in self.dispatchers[:]:
            try:
                if dispatcher.queue or dispatcher.dedicated_waiting:
                    dispatcher.dispatch(now)
                dispatcher.after_turn()
            except Exception as error:
                dispatcher.fail(error)

    def _read_lanes(self, news: list[tuple[int, int]]) -> None:
        for fd, _ in news:
            handle = self._lane_links.get(fd)
            if handle is not None:
                self.receive_by_lane(handle)
            elif fd == self._nudge_fd:
                with suppress(BlockingIOError):
                    os.eventfd_read(fd)

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            owner: Any = getattr(getattr(act, "func", act), "__self__", None)
            if hasattr(owner, "fail"):  # a crew, or its roster
                owner.fail(error)
            else:
                log.exception("a bug in polycephaly: %r failed", act)

    def _take_deliveries(self) -> list[Callable[[], object]] | None:
        """In a turn: what is to be delivered, unless another thread is at it; that one will see to
        it."""
        if self._delivering or not self._deliveries:
            return None
        self._delivering = True
        batch, self._deliveries = self._deliveries, []
        return batch

    def _deliver(self, batch: list[Callable[[], object]] | None) -> None:
        me = get_ident()
        settlers.add(me)
        while batch is not None:
            self._deliverer = me
            for act in batch:
                try:
                    act()
                except BaseException:  # SystemExit from a callback too: this serves everybody
                    callbacks.exception("a callback failed")
            del act
            with self._turn:
                self._delivering, self._deliverer = False, None
                if self._could_send():
                    self._serve_dispatchers(self.timers.now())
                batch = self._take_deliveries()
        settlers.discard(me)

    def _run_errands(self) -> None:
        errands, self._errands = self._errands, []
        for act in errands:
            self._guarded(act)

    def _sleep(self) -> None:
        self._bell = True
        self._asleep = True
        with self._turn:  # the socket has one user at a time, and so have timers
            waits, left = not self._anything_to_do(), self.timers.left()
        if waits:
            timeout = LONGEST if left is None else min(left, LONGEST)
            news = self._epoll.poll(
                min(timeout, TICK) if self._lent or not self.leases else timeout
            )
            if self._lent:
                self._take_back_lanes()
        else:
            news = self._epoll.poll(
                0
            )  # or who sends by bulk without end would keep it from all others
        self._asleep = False
        try:
            del self._bell
        except (
            AttributeError
        ):  # somebody has taken it: he rings now, if he has not yet, and not later
            ring = select.poll()  # not select(), which takes no descriptor from 1024 on
            ring.register(self._wake_fd, select.POLLIN)
            ring.poll()
            os.eventfd_read(self._wake_fd)
        if news:
            with self._turn:
                for fd, _ in news:
                    act = self._watched.get(fd)
                    if act is not None:
                        self._guarded(act)

    def _anything_to_do(self) -> bool:
        return bool(
            self._inbox
            or (self._deliveries and not self._delivering)
            or self._errands
            or (self.ending and self.leases)
            or (self._router is not None and has_news(self._router))
            or self._could_send()
        )

    def _could_send(self) -> bool:
        return any(
            (dispatcher.hungry and dispatcher.queue) or dispatcher.dedicated_waiting
            for dispatcher in self.dispatchers
        )

    def _end(self) -> bool:
        """Ends the hub, unless somebody has leased it again; not while anybody drives, but soon
        after."""
        global _reactor
        with fork_guard.guard, ExitStack() as last:
            if self.leases or self._inbox or not self._driver.acquire(blocking=False):
                return False
            last.callback(self._driver.release)
            if _reactor is self:
                _reactor = None
            with self._nudging:
                self.gone = True
            fork_guard.remove_turn(self.thread)
            self.endpoint.close()
            parent_death.close(self._epoll)
            parent_death.close(self._lanes)
            os.close(self._wake_fd)
            os.close(self._nudge_fd)
        return True

    def give_back(self) -> None:
        """Undoes one `lease_hub`. Not in a turn: it takes the guard."""
        with fork_guard.guard:
            self.leases -= 1
        self.wake()
