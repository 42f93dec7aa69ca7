"""The event loop of a controller process, which callers help to run.

    callers ──append──> dispatcher.queue ┐           ┌──WORK──> fast transport, or ROUTER ──> drones
    callers ──post────> inbox ───────────┤──lock─────┤
    drones ──RESULTS──> fast transports ─┤           └──> deliveries ── after release ──> promises
                        ROUTER ──────────┤
    zygotes ──> parent-death pipes ──────┤
    drones' output ────> pipes ──────────┘

All state of its tenants, the dispatchers with their drone handles, is changed while holding the
reactor's lock (`_lock`): by the reactor's thread, by a caller that finds a drone idle (and sends
its task itself), or by a caller that waits (and reads the results itself). So a round trip crosses
no thread. No code of users runs under the lock, except that the garbage collector may run a
finalizer of theirs there: a finalizer can submit, and an attempt to wait is refused.

The reactor starts with the first tenant and ends with the last. Why waiting threads read the
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
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from ..errors import is_own_frame
from ..promises import promise as promises
from ..promises.event_loop import EventLoop
from ..promises.promise import Promise, Signal, main_thread_calls, settling_threads
from ..runtime import fork_guard, parent_death
from ..runtime.clock import monotonic
from ..runtime.deferred_sigint import DeferredSigint, end_by_sigint, is_safe_from_signals
from ..runtime.system_limits import watch
from ..runtime.timers import Timer
from ..runtime.tuning import tuning
from ..wire.output import Line, Listener

log = logging.getLogger(__name__)

# Tasks that a delivery makes ready: if fewer, they wait for its end, to be sent as one message.
MIN_TASKS_SENT_EARLY = 32
# Seconds that a result that no thread waits for may stay unread on a lent fast transport.
TICK_SECONDS = 0.002

S = TypeVar("S")

_reactor: Reactor | None = None
_ending_thread: int | None = None  # the thread that ends the interpreter, once reactors have to end

PROGRAM_ENDS = "the program ends"


class Tenant:
    """The base class of dispatchers, as the reactor and the drone handles see them.
    Methods are called while holding the lock, unless they say otherwise.
    """

    reactor: Reactor
    directory: Any  # an `ObjectDirectory`
    resources: Any  # `Resources`
    width: int
    tasks_done: int
    has_ended: bool
    broken: BaseException | None
    output: Callable[[Line], object] | None
    output_listeners: dict[str, Listener]
    unqueued_tasks: Callable[[], list[Any]]
    queue: deque[Any]
    wants_tasks = False
    """Tasks in `queue` can be sent: a thread that adds one calls `Reactor.send_tasks`."""
    needs_dispatch = False
    """`dispatch` may have something to send that is not in `queue`."""

    def dispatch(self, now: float) -> None:
        """Send tasks. Called if there are any."""

    def after_critical_section(self) -> None:
        """Act on the changes of a critical section, at its end."""

    def fail(self, error: Exception) -> None:
        """Give up, because a method has raised `error`."""

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Have the reactor's thread call `callback` under the lock. An error breaks the pool.

        Any thread may call this. It takes no lock, so finalizers may call it.
        """
        self.reactor.post(partial(self.run_guarded, callback, *args))

    def call_later(self, seconds: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Have `callback` called after `seconds`, under the lock. An error breaks the pool."""
        return self.reactor.call_later(seconds, partial(self.run_guarded, callback, *args))

    def run_guarded(self, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback`. An error breaks the pool."""
        try:
            callback(*args)
        except Exception as error:
            self.fail(error)

    def kill(self, reason: str = "") -> None:
        """End now, with errors that give `reason`."""

    def finish(self) -> None:
        """Finish all tasks, and end. Called without the lock."""

    def disable_in_child(self) -> None:
        """In a forked child: refuse all use. Called without the lock."""


def acquire_reactor() -> Reactor:
    """Return this process's reactor, started if need be.

    The reactor lives until `Reactor.release` was called as often. Raises `RuntimeError` in a
    finalizer that interrupts code with the reactor's lock: a thread that holds `guard` may need it.
    At the end of the interpreter, so do threads that outlive the main thread, because the end
    waits for the reactor.
    """
    global _reactor
    if promises.holds_own_lock():
        raise RuntimeError(
            "a finalizer that runs while a pool is at work cannot start drones: do so elsewhere"
        )
    with fork_guard.guard:
        if _ending_thread not in (None, get_ident()):
            raise RuntimeError(
                f"{PROGRAM_ENDS} and starts no more drones: have the main thread join the threads "
                "that do"
            )
        fork_guard.fill_standard_descriptors()
        if _reactor is None:
            _reactor = Reactor()
        _reactor.users += 1
        return _reactor


def _forget_reactor() -> None:
    """In a forked child: abandon the reactor, which stayed in the parent with its threads."""
    global _reactor, _ending_thread
    _reactor = _ending_thread = None
    promises.holds_reactor_lock = None
    settling_threads.clear()


os.register_at_fork(after_in_child=_forget_reactor)


def finish_submitted(runners: Iterable[Any]) -> None:
    """Finish submitted tasks as the end of a ``with`` block does, before the interpreter ends.

    The standard library does so, too. After an error that ended the program, tasks are not
    finished. A Ctrl-C, which cancels them, ends the process as it does elsewhere.
    """
    # At an interactive prompt, an error does not end the program.
    if hasattr(sys, "ps1") or getattr(sys, "last_type", None) is None:
        try:
            for each in runners:
                if each.finishes_at_exit:
                    each.finish()
        except KeyboardInterrupt:
            end_by_sigint()


def _end_with_interpreter() -> None:
    """Finish submitted tasks, and then end the reactor."""
    global _ending_thread
    try:
        try:
            if _reactor is not None:
                finish_submitted(list(_reactor.tenants))
        finally:
            _ending_thread = get_ident()
            reactor = _reactor
            if reactor is not None:
                # First, so that a tenant that another thread has made, and not added, is killed.
                reactor.is_ending = True
                reactor.post(reactor.kill_all)
                reactor.thread.join(timeout=5.0)
    except KeyboardInterrupt:
        end_by_sigint()


def _is_in_callback(frame: FrameType | None) -> bool:
    """Return whether `frame` is of a callback of users, which may block for ever."""
    module = ""
    while frame is not None and not is_own_frame(frame):
        module = str(frame.f_globals.get("__name__"))
        frame = frame.f_back
    # Logging: of the error of an earlier callback, by one of the callers.
    return (
        frame is not None
        and module not in ("", "logging")
        and frame.f_code in Promise._callback_callers
    )


class Reactor(EventLoop):
    def __init__(self) -> None:
        super().__init__("polycephaly-reactor", self._run_tenants)
        self.users = 0
        self.tenants: list[Tenant] = []
        self.is_ending = False  # with the interpreter
        self.last_callbacks: list[Callable[[], object]] = []
        """Called in order when their tenant has ended, or, if it was the last, the reactor too, so
        that nothing is left of either.
        """
        self._sources_made: dict[Any, Any] = {}
        self._driver_lock = threading.Lock()
        self._driver_id = 0  # the thread that holds `_driver_lock`
        self._lent_to_driver = False
        self._driven_since_tick = False
        self._next_tick = 0.0
        self._fast_callbacks: dict[int, Callable[[], object]] = {}
        self._nudge_lock = threading.RLock()
        with ExitStack() as undo:
            undo.callback(self._files.close)
            self._fast_epoll = parent_death.close_in_child(select.epoll())
            undo.callback(parent_death.close, self._fast_epoll)
            self._nudge_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._nudge_fd)
            watch(self._fast_epoll, self._nudge_fd, select.EPOLLIN)
            self.watch(self._fast_epoll.fileno(), lambda: self._read_fast(self._fast_epoll.poll(0)))
            undo.pop_all()
        promises.holds_reactor_lock = self._lock.is_held_here
        atexit.unregister(_end_with_interpreter)
        atexit.register(_end_with_interpreter)
        self.start()

    def disable_in_child(self) -> None:
        """In a forked child: have all that crossed the fork refuse its use.

        The threads that it would wait for do not exist here.
        """
        super().disable_in_child()
        for tenant in self.tenants:
            tenant.disable_in_child()

    # -- from any thread ---------------------------------------------------------------------------

    def source(self, kind: Callable[[Reactor], S]) -> S:
        """Return this reactor's source of that kind, made at the first call."""
        with fork_guard.guard:
            source = self._sources_made.get(kind)
            if source is None:
                source = self._sources_made[kind] = kind(self)
            return source

    def send_tasks(self, tenant: Tenant) -> None:
        """Send the tasks of `tenant` from this thread, if no other thread holds the lock.

        Called when a tenant that wants tasks has got one.
        """
        if get_ident() == self._deliverer and len(tenant.queue) < MIN_TASKS_SENT_EARLY:
            return  # the queues are checked after the delivery
        if self._lock.is_held_here() or not is_safe_from_signals():
            self.wake()
            return
        with DeferredSigint():
            while tenant.wants_tasks and (tenant.queue or tenant.needs_dispatch):
                if not self._lock.acquire(blocking=False):
                    self.wake()
                    return
                try:
                    tenant.dispatch(self.timers.now())
                    tenant.after_critical_section()
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
                        if not self.has_ended:
                            self._read_fast(self._fast_epoll.poll(0))
                            self._run_tenants()
                    finally:
                        self._lock.release()
                if self._deliveries or self._can_send():
                    self.wake()

    def drive(self, promise: Promise[Any], deadline: float | None) -> None:
        """Read the fast transports until `promise` is settled or the time is `deadline`.

        Returns at once if another thread does so, or this one cannot. The caller then waits for a
        lock. Called by `Promise._wait`, which refuses threads that settle promises or hold the
        lock.
        """
        if self.belongs_to_parent:
            raise RuntimeError(
                f"{promise!r} belongs to another process, of which this one is a fork"
            )
        if not is_safe_from_signals():
            return
        deferred_sigint = DeferredSigint()
        deferred_sigint.on_trip, deferred_sigint.may_raise = self._nudge, _is_in_callback
        with deferred_sigint:
            # A finalizer in a drive of this thread: no other thread would drive.
            nested = self._driver_id == get_ident()
            if not nested and not self._driver_lock.acquire(blocking=False):
                return
            self._driver_id = get_ident()
            hook = self._nudge_driver
            try:
                self._driven_since_tick = True
                if not self._lent_to_driver and not self.has_ended:
                    self._lent_to_driver = True
                    self._epoll.modify(self._fast_epoll.fileno(), 0)
                    self.wake()  # so that its thread ticks
                promise.add_done_callback(hook)
                self._drive(promise, deadline, deferred_sigint)
            finally:
                promise.remove_done_callback(hook)
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
            if not self._driven_since_tick:
                self._lent_to_driver = False
                # It stayed registered: at a limit, another registration could fail.
                self._epoll.modify(self._fast_epoll.fileno(), select.EPOLLIN)
            self._driven_since_tick = False
            self._driver_lock.release()

    def _drive(
        self, promise: Promise[Any], deadline: float | None, deferred_sigint: DeferredSigint
    ) -> None:
        events: list[tuple[int, int]] = []
        while not (promise.done() or deferred_sigint.tripped or self.has_ended):
            if main_thread_calls and get_ident() == threading.main_thread().ident:
                return  # the caller makes these calls, and the reactor's thread takes over
            # A finalizer may just have driven, and have received the result.
            if not (self._can_send() or promise.done()):
                remaining = None if deadline is None else deadline - monotonic()
                if remaining is not None and remaining <= 0:
                    return
                interval = tuning.signal_check_seconds
                events = self._fast_epoll.poll(
                    interval if remaining is None else min(remaining, interval)
                )
            with self._lock:
                self._read_fast(events)
                self._run_tenants()
            if self._deliveries:
                self._deliver()

    def _nudge(self) -> None:
        if not self.has_ended:
            os.eventfd_write(self._nudge_fd, 1)

    def _nudge_driver(self, promise: Promise[Any]) -> None:
        """Wake the driving thread, from the thread that settles its promise.

        `_end` closes the descriptor under the same lock. A Ctrl-C may nudge without the lock, but
        only while a thread drives, and then the reactor does not end.
        """
        if get_ident() != self._driver_id:
            with self._nudge_lock:
                self._nudge()

    # -- holding the lock: used by tenants --------------------------------------------------------

    def watch_fast(self, fd: int, callback: Callable[[], object]) -> None:
        """As `watch`, also by threads that wait for a promise: see `drive`."""
        watch(self._fast_epoll, fd, select.EPOLLIN)
        self._fast_callbacks[fd] = callback

    def unwatch_fast(self, fd: int) -> None:
        if self._fast_callbacks.pop(fd, None) is not None:
            self._fast_epoll.unregister(fd)

    def kill_all(self) -> None:
        for tenant in list(self.tenants):
            tenant.kill(PROGRAM_ENDS)

    # -- the reactor's thread ----------------------------------------------------------------------

    def _run_tenants(self) -> None:
        for tenant in self.tenants[:]:
            try:
                if tenant.queue or tenant.needs_dispatch:
                    tenant.dispatch(self.timers.now())
                tenant.after_critical_section()
            except Exception as error:
                tenant.fail(error)

    def _read_fast(self, events: list[tuple[int, int]]) -> None:
        for fd, _ in events:
            callback = self._fast_callbacks.get(fd)
            if callback is not None:
                callback()
            elif fd == self._nudge_fd:
                with suppress(BlockingIOError):
                    os.eventfd_read(fd)

    def _after_deliveries(self) -> None:
        if self._can_send():
            self._run_tenants()

    def _poll(self, timeout: float) -> list[tuple[int, int]]:
        events = super()._poll(
            min(timeout, TICK_SECONDS) if self._lent_to_driver or not self.users else timeout
        )
        if self._lent_to_driver:
            self._reclaim_fast_epoll()
        return events

    def _has_anything_to_do(self) -> bool:
        has_callbacks = bool(self.last_callbacks and self.users)
        return has_callbacks or self._can_send() or super()._has_anything_to_do()

    def _can_send(self) -> bool:
        # A plain loop, because this is on the path of every round trip.
        for tenant in self.tenants:
            if (tenant.wants_tasks and tenant.queue) or tenant.needs_dispatch:
                return True
        return False

    def _end_if_over(self) -> bool:
        ended = self.users == 0 and self._end()
        if ended or self.users:
            while self.last_callbacks:
                self.last_callbacks.pop(0)()
        return ended

    def _end(self) -> bool:
        """End the reactor, unless it has been acquired again.

        While a thread drives, the reactor does not end. Its thread tries again soon after.
        """
        global _reactor
        with fork_guard.guard, ExitStack() as last:
            if self.users or self._inbox or not self._driver_lock.acquire(blocking=False):
                return False
            last.callback(self._driver_lock.release)
            if _reactor is self:
                _reactor = None
            for source in self._sources_made.values():
                source.close()
            with self._nudge_lock:
                self.release_resources()
            parent_death.close(self._fast_epoll)
            os.close(self._nudge_fd)
        return True

    def release(self) -> None:
        """Undo one `acquire_reactor`. Not while holding the lock: it takes the fork guard."""
        with fork_guard.guard:
            self.users -= 1
        self.wake()


class DrivingSignal(Signal[S]):
    """A signal that the reactor's work settles: a thread that waits for it helps with that."""

    def __init__(self, reactor: Reactor) -> None:
        super().__init__()
        self._reactor = reactor

    def _help(self, deadline: float | None) -> None:
        self._reactor.drive(self, deadline)
