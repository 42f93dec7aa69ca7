"""The event loop of a controller process, which owns the sockets to all drones.

    callers ──append──> dispatcher.queue ┐           ┌──WORK──> fast transport, or ROUTER ──> drones
    callers ──post────> inbox ───────────┤──lock─────┤
    drones ──RESULTS──> fast transports ─┤           └──> deliveries ── after release ──> promises
                        ROUTER ──────────┤
    zygotes ──> parent-death pipes ──────┤
    drones' output ────> pipes ──────────┘

All state of dispatchers and drone handles is changed while holding the reactor's lock (`_turn`): by
the reactor's thread, by a caller that finds a drone idle (and sends its task itself), or by a
caller that waits (and reads the results itself). So a round trip crosses no thread. No code of
users runs under the lock, except that the garbage collector may run a finalizer of theirs there: a
finalizer can submit, and an attempt to wait is refused. Values are unpickled, promises settled,
callbacks called and lines printed after the release, from `deliveries`, by one thread at a time and
in order.

The reactor starts with the first dispatcher and ends with the last. Why waiting threads read the
results, and why no wake-up is lost: see docs/decisions/0004-waiting-is-driving.md.
"""

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

# Messages read while holding the lock once: a stranger that sends without end must not delay all
# others.
BULK_MOST = 100
LONGEST = 3600.0  # seconds: the kernel does not accept a timeout of years
# Tasks that a delivery makes ready: if fewer, they wait for its end, to be sent as one message.
TOGETHER = 32
# Seconds that a result that no thread waits for may stay unread on a lent fast transport.
TICK = 0.002

_reactor: Reactor | None = None


def lease_reactor() -> Reactor:
    """Return this process's reactor, started if need be.

    The reactor lives until `Reactor.give_back` was called as often.
    """
    global _reactor
    with fork_guard.guard:
        if _reactor is None:
            _reactor = Reactor()
        _reactor.leases += 1
        return _reactor


def _forget_reactor() -> None:
    """In a forked child: abandon the reactor, which stayed in the parent with its threads.

    No part of it may be used or cleaned up here.
    """
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
    """Finish submitted tasks as the end of a ``with`` block does, and then end the reactor.

    The standard library does so, too. After an error that ended the program, tasks are not
    finished.
    """
    reactor = _reactor
    if reactor is None:
        return
    try:
        # At an interactive prompt, an error does not end the program.
        if hasattr(sys, "ps1") or getattr(sys, "last_type", None) is None:
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
        """Promises that are settled when their dispatcher has ended.

        If no dispatcher is left, they are settled after the reactor has ended too, so that nothing
        is left of either.
        """
        self.last_zygotes: list[Launcher] = []
        """Zygotes of dispatchers that have ended.

        If this process is killed, they remove its directory. So those of the last dispatcher end
        when that directory is gone.
        """
        self.thread = threading.Thread(target=self._live, name="polycephaly-hub", daemon=True)
        self._router: zmq.Socket[bytes] | None = None
        self._turn = fork_guard.GuardedLock()
        self._inbox: deque[Callable[[], object]] = deque()
        self._errands: list[Callable[[], object]] = []
        self._deliveries: list[Callable[[], object]] = []
        self._handles: dict[bytes, LocalHandle] = {}
        self._watched: dict[int, Callable[[], object]] = {}
        self.timers = Timers()
        """Set while holding the lock. Its `now` is the time of limits, grace periods and checks."""
        self._delivering = False
        self._deliverer: int | None = None  # the thread that runs deliveries, if any
        self._driver = threading.Lock()
        self._driving = 0  # the thread that holds `_driver`
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
        """In a forked child: have all that crossed the fork refuse its use.

        The threads that it would wait for do not exist here.
        """
        self.gone = self.left_behind = True
        self._asleep = False
        for dispatcher in self.dispatchers:
            dispatcher.refusal = RuntimeError(
                f"{dispatcher.config.name} belongs to another process, of which this one is a fork"
            )

    # -- from any thread ---------------------------------------------------------------------------

    def open_endpoint(self) -> None:
        """Make the directory and the socket.

        Called once the first zygote exists, because that ensures that both are removed.
        """
        with fork_guard.guard, self._turn:
            if self._router is None:
                self._router = self.endpoint.open()
                # The descriptor reports new messages only: `has_news` is asked before each sleep.
                self._epoll.register(news_fd(self._router), select.EPOLLIN | select.EPOLLET)

    def post(self, act: Callable[[], object]) -> None:
        """Have the reactor's thread call `act` under the lock.

        Takes no lock, so finalizers may call it.
        """
        self._inbox.append(act)
        self.wake()

    def wake(self) -> None:
        if self._asleep:
            try:
                del self._bell
            except AttributeError:  # another thread rings it
                return
            os.eventfd_write(self._wake_fd, 1)

    def serve(self, dispatcher: Dispatcher) -> None:
        """Send the tasks of `dispatcher` from this thread, if no other thread holds the lock.

        Called when a dispatcher with an idle drone has got a task.
        """
        if get_ident() == self._deliverer and len(dispatcher.queue) < TOGETHER:
            return  # the queues are checked after the delivery
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
        """Send tasks and receive results in the thread of a caller that submits much.

        Such a caller leaves the interpreter to no other thread. The reactor's thread settles the
        results, because this thread does not wait for them.
        """
        if can_be_raised() and not self._turn.is_mine():
            with DeferredSigint():
                # The thread that holds the lock may be waiting for the interpreter, which this
                # thread has.
                if self._turn.acquire(timeout=TICK):
                    try:
                        self._read_lanes(self._lanes.poll(0))
                        self._serve_dispatchers(self.timers.now())
                    finally:
                        self._turn.release()
                if self._deliveries or self._could_send():
                    self.wake()

    def drive(self, promise: Promise[Any], end: float | None) -> None:
        """Read the fast transports until `promise` is settled or the time is `end`.

        Returns at once if another thread does so, or this one cannot. The caller then waits for a
        lock.
        """
        if self.left_behind:
            raise RuntimeError(
                f"{promise!r} belongs to another process, of which this one is a fork"
            )
        if self.gone or get_ident() in settlers or self._turn.is_mine() or not can_be_raised():
            return
        with DeferredSigint(self._nudge) as deferred_sigint:
            # A finalizer in a drive of this thread: no other thread would drive.
            again = self._driving == get_ident()
            if not again and not self._driver.acquire(blocking=False):
                return
            self._driving = get_ident()
            hook = self._nudge_driver
            try:
                self._drives += 1
                if not self._lent and not self.gone:
                    self._lent = True
                    self._epoll.unregister(self._lanes.fileno())
                    self.wake()  # so that its thread ticks
                promise._hook(hook)
                self._drive(promise, end, deferred_sigint)
            finally:
                promise._unhook(hook)
                if not again:
                    self._driving = 0
                    self._driver.release()

    def can_be_waited_for(self) -> bool:
        """Return True if promises go on being settled while this thread waits."""
        return not (self.gone or get_ident() in settlers or self._turn.is_mine())

    def _take_back_lanes(self) -> None:
        """Take back the fast transports, if they were not used since the last tick.

        Called by the reactor's thread at a tick.
        """
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
            # A finalizer may just have driven, and have received the result.
            if waits and not promise.done():
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
        """Wake the driving thread, from the thread that settles its promise.

        `_end` closes the descriptor under the same lock. A Ctrl-C may nudge without the lock, but
        only while a thread drives, and then the reactor does not end.
        """
        if get_ident() not in settlers or get_ident() == self.thread.ident:
            with self._nudging:
                self._nudge()

    # -- holding the lock: used by dispatchers -----------------------------------------------------

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
        self.wake()  # a sleeping thread does not know of this timer
        return timer

    @property
    def router(self) -> zmq.Socket[bytes]:
        # The local engine opens the endpoint before it has a drone handle.
        assert self._router is not None
        return self._router

    def deliver(self, act: Callable[[], object]) -> None:
        """Have `act` called after the lock is released.

        The order is that of the calls. `act` may run code of users.
        """
        self._deliveries.append(act)

    def run_errand(self, act: Callable[[], object]) -> None:
        """Have the reactor's thread call `act` without the lock: for code that forks."""
        self._errands.append(act)
        self.wake()

    def receive_by_lane(self, handle: LocalHandle, *, all_of_it: bool = False) -> None:
        """Read one message, or all that there are.

        One is enough if the transport's descriptor will report the next.
        """
        while handle.fast_transport is not None:
            try:
                frames = handle.fast_transport.receive()
                if frames is None:
                    return
                # The other end is closed; the zygote will report how the drone ended.
                if not frames:
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
        """Read messages that drones have sent by the bulk transport, `most` at most."""
        router = self._router
        while router is not None and most > 0 and has_news(router):
            most -= 1
            identity, *frames = router.recv_multipart(zmq.NOBLOCK)
            handle = self._handles.get(identity)
            # A drone that is gone by now, or a stranger: its message is not parsed.
            if handle is None:
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

    # -- the reactor's thread ----------------------------------------------------------------------

    def _live(self) -> None:
        while True:
            with self._turn:
                self._turn_once()
                batch = self._take_deliveries()
            if batch is not None:
                self._deliver(batch)
                batch = None  # nothing of it is kept during the sleep
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
            if hasattr(owner, "fail"):  # a dispatcher, or its supervisor
                owner.fail(error)
            else:
                log.exception("a bug in polycephaly: %r failed", act)

    def _take_deliveries(self) -> list[Callable[[], object]] | None:
        """Return the callbacks to deliver, or None if there are none or another thread delivers.

        That thread will deliver these, too. Called while holding the lock.
        """
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
                except BaseException:  # SystemExit too: this thread serves all
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
        with self._turn:  # one thread at a time may use the socket and the timers
            waits, left = not self._anything_to_do(), self.timers.left()
        if waits:
            timeout = LONGEST if left is None else min(left, LONGEST)
            news = self._epoll.poll(
                min(timeout, TICK) if self._lent or not self.leases else timeout
            )
            if self._lent:
                self._take_back_lanes()
        else:
            # Descriptors are polled even so: a drone that sends by bulk without end must not starve
            # them.
            news = self._epoll.poll(0)
        self._asleep = False
        try:
            del self._bell
        except AttributeError:
            # If `_bell` is gone, a caller has taken it: the eventfd has been written or is about to
            # be. Its write is awaited, so that it does not come later.
            ring = select.poll()  # not select(): no descriptors from 1024 on
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
        """End the reactor, unless it has been leased again.

        While a thread drives, the reactor does not end. Its thread tries again soon after.
        """
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
        """Undo one `lease_reactor`. Not while holding the lock, because it takes the fork guard."""
        with fork_guard.guard:
            self.leases -= 1
        self.wake()
