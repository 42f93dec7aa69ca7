"""The event loop of a controller process, which owns the sockets to all drones.

    callers ──append──> dispatcher.queue ┐           ┌──WORK──> fast transport, or ROUTER ──> drones
    callers ──post────> inbox ───────────┤──lock─────┤
    drones ──RESULTS──> fast transports ─┤           └──> deliveries ── after release ──> promises
                        ROUTER ──────────┤
    zygotes ──> parent-death pipes ──────┤
    drones' output ────> pipes ──────────┘

All state of dispatchers and drone handles is changed while holding the reactor's lock (`_lock`): by
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
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..promises import promise as promises
from ..promises.promise import FINISHED, Promise, callbacks, settling_threads
from ..runtime import fork_guard, parent_death
from ..runtime.deferred_sigint import DeferredSigint, is_safe_from_signals
from ..runtime.timers import Timer, Timers
from ..runtime.tuning import tuning

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["Reactor", "lease_reactor"]

log = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 3600.0  # the kernel does not accept a timeout of years
# Tasks that a delivery makes ready: if fewer, they wait for its end, to be sent as one message.
MIN_TASKS_SENT_EARLY = 32
# Seconds that a result that no thread waits for may stay unread on a lent fast transport.
TICK_SECONDS = 0.002

S = TypeVar("S", bound="Source")

_reactor: Reactor | None = None


class Source(Protocol):
    """Messages behind a descriptor that reports new ones only: so `has_input` is asked before each
    sleep.
    """

    def fileno(self) -> int: ...
    def has_input(self) -> bool: ...
    def receive(self) -> object:
        """Handle messages that have come, at most as many as may delay all others."""

    def close(self) -> None: ...


def lease_reactor() -> Reactor:
    """Return this process's reactor, started if need be.

    The reactor lives until `Reactor.end_lease` was called as often.
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
        _reactor.disable_in_child()
        _reactors_of_parent.append(_reactor)
        _reactor = None
    promises.holds_reactor_lock = None
    settling_threads.clear()


_reactors_of_parent: list[Any] = []
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
                if dispatcher.finishes_at_exit:
                    dispatcher.finish()
    finally:
        reactor.post(reactor.abandon_all)
        reactor.thread.join(timeout=5.0)


class Reactor:
    def __init__(self) -> None:
        self.leases = 0
        self.has_ended = False
        self.belongs_to_parent = False
        self.dispatchers: list[Dispatcher] = []
        self.end_promises: list[Promise[None]] = []
        """Promises that are settled when their dispatcher has ended.

        If no dispatcher is left, they are settled after the reactor has ended too, so that nothing
        is left of either.
        """
        self.last_callbacks: list[Callable[[], object]] = []
        """Called when their dispatcher has ended, or, if it was the last, the reactor too."""
        self.thread = threading.Thread(target=self._run, name="polycephaly-reactor", daemon=True)
        self._sources: list[Source] = []
        self._sources_made: dict[Any, Any] = {}
        self._lock = fork_guard.GuardedLock()
        self._inbox: deque[Callable[[], object]] = deque()
        self._jobs_outside_lock: list[Callable[[], object]] = []
        self._deliveries: list[Callable[[], object]] = []
        self._watched: dict[int, Callable[[], object]] = {}
        self.timers = Timers()
        """Set while holding the lock. Its `now` is the time of limits, grace periods and checks."""
        self._delivering = False
        self._deliverer: int | None = None  # the thread that runs deliveries, if any
        self._driver_lock = threading.Lock()
        self._driver_id = 0  # the thread that holds `_driver_lock`
        self._lent_to_driver = False
        self._drive_count = self._drive_count_at_tick = 0
        self._next_tick = 0.0
        self._asleep = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = parent_death.close_in_child(select.epoll())
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._fast_epoll = parent_death.close_in_child(select.epoll())
        self._fast_callbacks: dict[int, Callable[[], object]] = {}
        self._nudge_lock = threading.RLock()
        self._nudge_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fast_epoll.register(self._nudge_fd, select.EPOLLIN)
        self.watch(self._fast_epoll.fileno(), lambda: self._read_fast(self._fast_epoll.poll(0)))
        promises.holds_reactor_lock = self._lock.is_held_here
        atexit.unregister(_end_with_interpreter)
        atexit.register(_end_with_interpreter)
        fork_guard.add_thread_lock(self.thread, self._lock)
        self.thread.start()

    def disable_in_child(self) -> None:
        """In a forked child: have all that crossed the fork refuse its use.

        The threads that it would wait for do not exist here.
        """
        self.has_ended = self.belongs_to_parent = True
        self._asleep = False
        for dispatcher in self.dispatchers:
            dispatcher.refusal = RuntimeError(
                f"{dispatcher.config.name} belongs to another process, of which this one is a fork"
            )

    # -- from any thread ---------------------------------------------------------------------------

    def source(self, kind: Callable[[Reactor], S]) -> S:
        """Return this reactor's source of that kind, made at the first call."""
        with fork_guard.guard:
            source = self._sources_made.get(kind)
            if source is None:
                source = self._sources_made[kind] = kind(self)
            return source

    def add_source(self, source: Source) -> None:
        """Receive from `source` until the reactor ends."""
        with self._lock:
            self._epoll.register(source.fileno(), select.EPOLLIN | select.EPOLLET)
            self._sources.append(source)

    def post(self, callback: Callable[[], object]) -> None:
        """Have the reactor's thread call `callback` under the lock.

        Takes no lock, so finalizers may call it.
        """
        self._inbox.append(callback)
        self.wake()

    def wake(self) -> None:
        if self._asleep:
            try:
                del self._wakeup_token
            except AttributeError:  # another thread wakes the reactor
                return
            os.eventfd_write(self._wake_fd, 1)

    def send_tasks(self, dispatcher: Dispatcher) -> None:
        """Send the tasks of `dispatcher` from this thread, if no other thread holds the lock.

        Called when a dispatcher with an idle drone has got a task.
        """
        if get_ident() == self._deliverer and len(dispatcher.queue) < MIN_TASKS_SENT_EARLY:
            return  # the queues are checked after the delivery
        if self._lock.is_held_here() or not is_safe_from_signals():
            self.wake()
            return
        with DeferredSigint():
            while dispatcher.wants_tasks and (dispatcher.queue or dispatcher.dedicated_waiting):
                if not self._lock.acquire(blocking=False):
                    self.wake()
                    return
                try:
                    dispatcher.dispatch(self.timers.now())
                    dispatcher.after_critical_section()
                finally:
                    self._lock.release()
                if self._deliveries:
                    self.wake()

    def catch_up(self) -> None:
        """Send tasks and receive results in the thread of a caller that submits much.

        Such a caller leaves the interpreter to no other thread. The reactor's thread settles the
        results, because this thread does not wait for them.
        """
        if is_safe_from_signals() and not self._lock.is_held_here():
            with DeferredSigint():
                # The thread that holds the lock may be waiting for the interpreter, which this
                # thread has.
                if self._lock.acquire(timeout=TICK_SECONDS):
                    try:
                        self._read_fast(self._fast_epoll.poll(0))
                        self._run_dispatchers(self.timers.now())
                    finally:
                        self._lock.release()
                if self._deliveries or self._can_send():
                    self.wake()

    def drive(self, promise: Promise[Any], deadline: float | None) -> None:
        """Read the fast transports until `promise` is settled or the time is `deadline`.

        Returns at once if another thread does so, or this one cannot. The caller then waits for a
        lock.
        """
        if self.belongs_to_parent:
            raise RuntimeError(
                f"{promise!r} belongs to another process, of which this one is a fork"
            )
        if (
            self.has_ended
            or get_ident() in settling_threads
            or self._lock.is_held_here()
            or not is_safe_from_signals()
        ):
            return
        with DeferredSigint(self._nudge) as deferred_sigint:
            # A finalizer in a drive of this thread: no other thread would drive.
            nested = self._driver_id == get_ident()
            if not nested and not self._driver_lock.acquire(blocking=False):
                return
            self._driver_id = get_ident()
            hook = self._nudge_driver
            try:
                self._drive_count += 1
                if not self._lent_to_driver and not self.has_ended:
                    self._lent_to_driver = True
                    self._epoll.unregister(self._fast_epoll.fileno())
                    self.wake()  # so that its thread ticks
                promise._hook(hook)
                self._drive(promise, deadline, deferred_sigint)
            finally:
                promise._unhook(hook)
                if not nested:
                    self._driver_id = 0
                    self._driver_lock.release()

    def can_wait(self) -> bool:
        """Return True if promises go on being settled while this thread waits."""
        return not (self.has_ended or get_ident() in settling_threads or self._lock.is_held_here())

    def _reclaim_fast_epoll(self) -> None:
        """Take back the fast transports, if they were not used since the last tick.

        Called by the reactor's thread at a tick.
        """
        now = self.timers.now()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_SECONDS
        if self._driver_lock.acquire(blocking=False):
            if self._drive_count == self._drive_count_at_tick:
                self._lent_to_driver = False
                self._epoll.register(self._fast_epoll.fileno(), select.EPOLLIN)
            self._drive_count_at_tick = self._drive_count
            self._driver_lock.release()

    def _drive(
        self, promise: Promise[Any], deadline: float | None, deferred_sigint: DeferredSigint
    ) -> None:
        events: list[tuple[int, int]] = []
        while not (promise.done() or deferred_sigint.tripped or self.has_ended):
            must_wait = not any(
                dispatcher.wants_tasks and dispatcher.queue for dispatcher in self.dispatchers
            )
            # A finalizer may just have driven, and have received the result.
            if must_wait and not promise.done():
                remaining = None if deadline is None else deadline - monotonic()
                if remaining is not None and remaining <= 0:
                    return
                interval = tuning.signal_check_seconds
                events = self._fast_epoll.poll(
                    interval if remaining is None else min(remaining, interval)
                )
            with self._lock:
                self._read_fast(events)
                self._run_dispatchers(self.timers.now())
                batch = self._take_deliveries()
            if batch is not None:
                self._deliver(batch)

    def _nudge(self) -> None:
        if not self.has_ended:
            os.eventfd_write(self._nudge_fd, 1)

    def _nudge_driver(self, promise: Promise[Any]) -> None:
        """Wake the driving thread, from the thread that settles its promise.

        `_end` closes the descriptor under the same lock. A Ctrl-C may nudge without the lock, but
        only while a thread drives, and then the reactor does not end.
        """
        if get_ident() not in settling_threads or get_ident() == self.thread.ident:
            with self._nudge_lock:
                self._nudge()

    # -- holding the lock: used by dispatchers -----------------------------------------------------

    def watch_fast(self, fd: int, callback: Callable[[], object]) -> None:
        """As `watch`, also by threads that wait for a promise: see `drive`."""
        self._fast_callbacks[fd] = callback
        self._fast_epoll.register(fd, select.EPOLLIN)

    def unwatch_fast(self, fd: int) -> None:
        if self._fast_callbacks.pop(fd, None) is not None:
            self._fast_epoll.unregister(fd)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        self._watched[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(fd)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        timer = self.timers.set(self.timers.now() + seconds, partial(self._call_guarded, callback))
        self.wake()  # a sleeping thread does not know of this timer
        return timer

    def deliver(self, callback: Callable[[], object]) -> None:
        """Have `callback` called after the lock is released.

        The order is that of the calls. `callback` may run code of users.
        """
        self._deliveries.append(callback)

    def run_outside_lock(self, callback: Callable[[], object]) -> None:
        """Have the reactor's thread call `callback` without the lock: for code that forks."""
        self._jobs_outside_lock.append(callback)
        self.wake()

    def abandon_all(self) -> None:
        for dispatcher in list(self.dispatchers):
            dispatcher.abandon()

    # -- the reactor's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                self._run_once()
                batch = self._take_deliveries()
            if batch is not None:
                self._deliver(batch)
                batch = None  # nothing of it is kept during the sleep
            self._run_jobs_outside_lock()
            ended = self.leases == 0 and self._end()
            if ended or self.leases:
                while self.last_callbacks:
                    self.last_callbacks.pop()()
                promises_to_settle, self.end_promises = self.end_promises, []
                for promise in promises_to_settle:
                    promise._settle(FINISHED, None, None)
            if ended:
                return
            self._sleep()

    def _run_once(self) -> None:
        inbox = self._inbox
        while inbox:
            self._call_guarded(inbox.popleft())
        for source in self._sources:
            self._call_guarded(source.receive)
        self.timers.fire_due()
        self._run_dispatchers(self.timers.now())

    def _run_dispatchers(self, now: float) -> None:
        for dispatcher in self.dispatchers[:]:
            try:
                if dispatcher.queue or dispatcher.dedicated_waiting:
                    dispatcher.dispatch(now)
                dispatcher.after_critical_section()
            except Exception as error:
                dispatcher.fail(error)

    def _read_fast(self, events: list[tuple[int, int]]) -> None:
        for fd, _ in events:
            callback = self._fast_callbacks.get(fd)
            if callback is not None:
                callback()
            elif fd == self._nudge_fd:
                with suppress(BlockingIOError):
                    os.eventfd_read(fd)

    def _call_guarded(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception:
            log.exception("a bug in polycephaly: %r failed", callback)

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
        settling_threads.add(me)
        while batch is not None:
            self._deliverer = me
            for callback in batch:
                try:
                    callback()
                except BaseException:  # SystemExit too: this thread serves all
                    callbacks.exception("a callback failed")
            del callback
            with self._lock:
                self._delivering, self._deliverer = False, None
                if self._can_send():
                    self._run_dispatchers(self.timers.now())
                batch = self._take_deliveries()
        settling_threads.discard(me)

    def _run_jobs_outside_lock(self) -> None:
        jobs, self._jobs_outside_lock = self._jobs_outside_lock, []
        for job in jobs:
            self._call_guarded(job)

    def _sleep(self) -> None:
        self._wakeup_token = True
        self._asleep = True
        with self._lock:  # one thread at a time may use the socket and the timers
            must_wait, remaining = not self._has_anything_to_do(), self.timers.seconds_left()
        if must_wait:
            timeout = MAX_WAIT_SECONDS if remaining is None else min(remaining, MAX_WAIT_SECONDS)
            events = self._epoll.poll(
                min(timeout, TICK_SECONDS) if self._lent_to_driver or not self.leases else timeout
            )
            if self._lent_to_driver:
                self._reclaim_fast_epoll()
        else:
            # Descriptors are polled even so: a drone that sends by bulk without end must not starve
            # them.
            events = self._epoll.poll(0)
        self._asleep = False
        try:
            del self._wakeup_token
        except AttributeError:
            # If `_wakeup_token` is gone, a caller has taken it: the eventfd has been written or is
            # about to be. Its write is awaited, so that it does not come later.
            poller = select.poll()  # not select(): no descriptors from 1024 on
            poller.register(self._wake_fd, select.POLLIN)
            poller.poll()
            os.eventfd_read(self._wake_fd)
        if events:
            with self._lock:
                for fd, _ in events:
                    callback = self._watched.get(fd)
                    if callback is not None:
                        self._call_guarded(callback)

    def _has_anything_to_do(self) -> bool:
        return bool(
            self._inbox
            or (self._deliveries and not self._delivering)
            or self._jobs_outside_lock
            or (self.end_promises and self.leases)
            or any(source.has_input() for source in self._sources)
            or self._can_send()
        )

    def _can_send(self) -> bool:
        return any(
            (dispatcher.wants_tasks and dispatcher.queue) or dispatcher.dedicated_waiting
            for dispatcher in self.dispatchers
        )

    def _end(self) -> bool:
        """End the reactor, unless it has been leased again.

        While a thread drives, the reactor does not end. Its thread tries again soon after.
        """
        global _reactor
        with fork_guard.guard, ExitStack() as last:
            if self.leases or self._inbox or not self._driver_lock.acquire(blocking=False):
                return False
            last.callback(self._driver_lock.release)
            if _reactor is self:
                _reactor = None
            with self._nudge_lock:
                self.has_ended = True
            fork_guard.remove_thread_lock(self.thread)
            for source in self._sources_made.values():
                source.close()
            parent_death.close(self._epoll)
            parent_death.close(self._fast_epoll)
            os.close(self._wake_fd)
            os.close(self._nudge_fd)
        return True

    def end_lease(self) -> None:
        """Undo one `lease_reactor`. Not while holding the lock, because it takes the fork guard."""
        with fork_guard.guard:
            self.leases -= 1
        self.wake()
