"""The event loop of a controller process, in a thread of its own.

    callers ──append──> its inbox ───────┐           ┌──WORK──> socket pairs ──> drones
    callers ──post────> inbox ───────────┤──lock─────┤
    drones ──records──> rings, bells ────┤           └──> deliveries ── after release ──> promises
    zygotes ──> parent-death pipes ──────┤
    drones' output ────> pipes ──────────┘

All state of its tenants, the dispatchers with their drone handles, is changed by the reactor's
thread alone, which holds its lock (`_lock`) meanwhile, so that a fork waits for a safe point.
Callers append, wake the thread, and wait for promises: whatever happens to a caller happens to no
pool. No code of users runs under the lock, except that the garbage collector may run a finalizer of
theirs there: a finalizer can submit, and an attempt to wait is refused.

The reactor starts with the first tenant and ends with the last. See
docs/decisions/0004-a-loop-thread.md.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from ..promises import promise as promises
from ..promises.event_loop import EventLoop
from ..promises.opener_thread import is_settling_thread
from ..promises.promise import Signal
from ..runtime import fork_guard
from ..runtime.deferred_sigint import end_by_sigint
from ..runtime.timers import Timer
from ..wire.output import Line, Listener
from .interfaces import refuse_in_fork

log = logging.getLogger(__name__)

S = TypeVar("S")

_reactor: Reactor | None = None
_dying: Reactor | None = None  # the last one whose thread was ended by an error
_ending_thread: int | None = None  # the thread that ends the interpreter, once reactors have to end

PROGRAM_ENDS = "the program ends"


class Tenant:
    """The base class of dispatchers, as the reactor and the drone handles see them.
    Methods are called while holding the lock, unless they say otherwise.
    """

    reactor: Reactor
    directory: Any  # an `ObjectDirectory`
    assignment: Any  # an `Assignment`
    tasks_done: int
    has_ended: bool
    state: Any  # a `PoolState`
    output: Callable[[Line], object] | None
    output_listeners: dict[str, Listener]
    inbound: deque[Any]
    wants_tasks = False
    """Tasks in `inbound` can be sent: a thread that adds one requests a turn."""

    def take_turn(self, now: float) -> None:
        """Send what can be sent, and act on what has changed. Called at the end of each turn."""

    def settle_lost(self, error: BaseException) -> None:
        """Reject the tasks whose delivery was lost, which has raised `error`. Called without the
        lock, behind all deliveries before.
        """

    def fail(self, error: Exception) -> None:
        """Give up, because a method has raised `error`."""

    def end_at_once(self, error: BaseException) -> None:
        """Kill the drones, fail all tasks with `error`, and end, without waiting for anything."""

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Have the reactor's thread call `callback` under the lock. An error breaks the pool.

        Any thread may call this. It takes no lock, so finalizers may call it.
        """
        self.reactor.post(partial(self.run_guarded, callback, *args))

    def call_later(self, seconds: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Have `callback` called after `seconds`, under the lock, unless this tenant has ended by
        then. An error breaks the pool.
        """
        return self.call_at(self.reactor.timers.now() + seconds, callback, *args)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Do as `call_later`, at a time of the reactor's timers."""
        timer = self.reactor.call_at(when, partial(self.run_guarded, callback, *args))
        timer.owner = self
        return timer

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
    global _reactor, _dying, _ending_thread
    _reactor = _dying = _ending_thread = None
    promises.holds_reactor_lock = None


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
            if _dying is not None:  # it removes what its zygotes can remove no more
                _dying.thread.join(timeout=5.0)
    except KeyboardInterrupt:
        end_by_sigint()


class Reactor(EventLoop):
    def __init__(self) -> None:
        super().__init__("polycephaly-reactor", self._run_tenants)
        self.users = 0
        self.tenants: list[Tenant] = []
        self.is_ending = False  # with the interpreter
        self.is_dying = False  # because of an error
        self.last_callbacks: list[Callable[[], object]] = []
        """Called in order when their tenant has ended, or, if it was the last, the reactor too, so
        that nothing is left of either.
        """
        self._sources_made: dict[Any, Any] = {}
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

    def can_wait(self) -> bool:
        """Return True if promises go on being settled while this thread waits."""
        return not (self.has_ended or is_settling_thread() or self._lock.is_held_here())

    # -- holding the lock: used by tenants --------------------------------------------------------

    def kill_all(self) -> None:
        for tenant in list(self.tenants):
            tenant.kill(PROGRAM_ENDS)

    # -- the reactor's thread ----------------------------------------------------------------------

    def _run_tenants(self) -> None:
        for tenant in self.tenants[:]:
            try:
                tenant.take_turn(self.timers.now())  # the turn of one before may have taken long
            except Exception as error:
                tenant.fail(error)

    def _on_delivery_failed(self, error: BaseException) -> None:
        # By the inbox: a task that failed may be about to run again, which comes first.
        for tenant in self.tenants[:]:
            self.post(partial(self.deliver, partial(tenant.settle_lost, error)))

    def _end_if_over(self) -> bool:
        if self.users and not self.last_callbacks:
            return False
        self._wake_waiters()  # the end may take long
        ended = self.users == 0 and self._end()
        if ended or self.users:
            while self.last_callbacks:
                self.last_callbacks.pop(0)()
        return ended

    def _end(self) -> bool:
        """End the reactor, unless it has been acquired again."""
        with fork_guard.guard:
            if self.users or self._inbox or self._deliveries:
                return False
            self._forget()
            for source in self._sources_made.values():
                source.close()
            self.release_resources()
        return True

    def _forget(self) -> None:
        global _reactor
        if _reactor is self:
            _reactor = None

    def _end_by(self, error: BaseException) -> None:
        global _dying
        with fork_guard.guard:
            _dying = self
            self._forget()  # so that the next pool starts another
            self.is_ending = self.is_dying = True
        self._end_tenants(error)
        with fork_guard.guard:
            for source in self._sources_made.values():
                self._call_guarded(source.close)
            super()._end_by(error)
        # Of callers that have looked at `has_ended` before.
        self._end_tenants(error)
        while self.last_callbacks:
            self._call_guarded(self.last_callbacks.pop(0))

    def _end_tenants(self, error: BaseException) -> None:
        with self._lock:
            while self._inbox:
                self._call_guarded(self._inbox.popleft())
            for tenant in self.tenants[:]:
                self._call_guarded(partial(tenant.end_at_once, error))
            self.tenants.clear()
            self._inbox.clear()
        self._deliver(holds=False)

    def release(self) -> None:
        """Undo one `acquire_reactor`. Not while holding the lock: it takes the fork guard."""
        with fork_guard.guard:
            self.users -= 1
        self.wake()


class ReactorSignal(Signal[S]):
    """A signal that the reactor's thread settles, which a forked process does not have."""

    def __init__(self, reactor: Reactor) -> None:
        super().__init__()
        self._reactor = reactor

    def _before_wait(self, deadline: float | None) -> None:
        refuse_in_fork(self, self._reactor)
        if self._reactor.has_ended and not self.done():
            raise RuntimeError(
                f"{self!r} is never settled, because the thread that serves its pool has ended"
            )
