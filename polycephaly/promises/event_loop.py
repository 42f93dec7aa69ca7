"""An event loop in a thread of its own: callbacks, timers and descriptors, under one lock.

    any thread ──post──> inbox ──┐
    descriptors, sources ────────┼── callbacks, holding the lock ──> deliveries, after its release
    timers ──────────────────────┘

No code of users runs while the lock is held, and no callback there blocks. Values are unpickled,
promises settled and lines printed after the release, from `deliver`, in order. Only the loop's
thread takes the lock, and a fork, which waits for a safe point of that thread.

No wake-up is lost. The loop's thread sets `_asleep`, then looks for something to do, and polls
without waiting if it has found something, or if `_asleep` was reset meanwhile; a caller hands
something over, then reads `_asleep`, then resets it and wakes the thread. So one of the two sees
the other. Nor is a request for a turn lost that finds another one noted: the loop's thread forgets
that before it looks for work. Deliveries are made between the look and the poll: a thread that they
wake needs the interpreter, which this one holds until it polls. A caller that is interrupted in the
middle of this, by an exception, delays what it has handed over, and what other callers hand over
meanwhile, by `MAX_SLEEP_SECONDS` at most.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from select import EPOLLOUT
from typing import Any, Protocol

from ..runtime import fork_guard, forked, parent_death
from ..runtime.clock import monotonic
from ..runtime.safe_log import SafeLog
from ..runtime.system_limits import watch
from ..runtime.timers import Timer, Timers
from . import builder_threads, callbacks_thread, opener_thread, output_thread
from .builder_threads import release
from .opener_thread import settling_threads
from .output_thread import Output, OutputGate
from .promise import callbacks, waiters_to_wake

log = SafeLog(logging.getLogger(__name__))

MAX_SLEEP_SECONDS = 1.0


class Source(Protocol):
    """Messages behind a descriptor that reports new ones only: so `has_input` is asked before each
    sleep.
    """

    def fileno(self) -> int: ...
    def has_input(self) -> bool: ...
    def receive(self) -> object:
        """Handle messages that have come, at most as many as may delay all others."""


def _refuse_green_sockets() -> None:
    """Raise `RuntimeError` in a process with gevent's sockets, threads or `select`: one of its
    threads would wait for another that cannot run meanwhile.
    """
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None:
        replaced = [*filter(monkey.is_module_patched, ("socket", "select", "threading"))]
        if replaced:
            raise RuntimeError(
                f"gevent's monkey patches have replaced {', '.join(replaced)}, without which no "
                "pool can wait for its drones: use it in a process that is not patched"
            )


class _Bell:
    """An eventfd that wakes a loop. It is closed when no thread is left that may ring it: otherwise
    a caller that was about to ring could write into another file that has got the number.
    """

    _fd = -1  # if there is no descriptor left

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        # Else this process was forked when a caller was about to ring, or other code has closed it.
        if self._fd >= 0:
            try:
                os.eventfd_write(self._fd, 1)
            except OSError:
                pass

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):  # other code has closed it
                os.close(fd)

    __del__ = close


def _ring_nothing() -> None:
    """Do nothing: the loop has ended."""


class EventLoop:
    """The loop, whose thread runs from `start` on, until it is told to `stop`."""

    def __init__(
        self,
        name: str,
        after_turn: Callable[[], object] | None = None,
        on_death: Callable[[], object] | None = None,
    ) -> None:
        _refuse_green_sockets()
        self.has_ended = self.belongs_to_parent = False
        self._after_turn = after_turn  # called at the end of each turn, holding the lock
        self._on_death = on_death  # called, holding the lock, if an error ends the thread
        self.thread = fork_guard.OwnThread(name, self._run)
        self.timers = Timers()
        """Set while holding the lock. Its `now` is the time of limits, grace periods and checks."""
        self._lock = fork_guard.GuardedLock()
        self._inbox: deque[Callable[[], object]] = deque()
        self._sources: list[Source] = []
        self._watched: dict[int, Callable[[], object]] = {}
        self._waiting_for_room: dict[int, Callable[[], object]] = {}
        self._jobs_outside_lock: deque[Callable[[], object]] = deque()
        self._deliveries: deque[Callable[[], object] | Output] = deque()
        self.deliver: Callable[[Callable[[], object] | Output], None] = self._deliveries.append
        """Called while holding the lock: have the callback called after its release. The order is
        that of the calls. The callback may run code of users. If any other thread calls it, without
        `wake`, the callback is called within `MAX_SLEEP_SECONDS`.
        """
        self._gate = OutputGate(self.wake)
        self._output_files: set[int] = set()
        self._is_output_paused = False  # these are not watched meanwhile
        self._has_output = False  # the gate was given some that may not be written yet
        self._to_wake: list[Any] = []  # see `waiters_to_wake`
        self._stopping = self._asleep = self._turn_requested = False
        with ExitStack() as undo:
            self._epoll = parent_death.close_in_child(select.epoll())
            self._poll: Callable[[float], list[tuple[int, int]]] = self._epoll.poll
            undo.callback(parent_death.close, self._epoll)
            bell = parent_death.close_in_child(_Bell())
            undo.callback(parent_death.CLOSED_IN_CHILD.discard, bell)
            # Each ring is an event of its own (EPOLLET), so nothing has to be read.
            try:
                watch(self._epoll, bell.fileno(), select.EPOLLIN | select.EPOLLET)
            except BaseException:
                bell.close()
                raise
            self._ring: Callable[[], object] = bell.ring
            undo.callback(setattr, self, "_ring", _ring_nothing)
            self._files = undo.pop_all()

    def start(self) -> None:
        _loops.add(self)
        fork_guard.add_thread_lock(self.thread, self._lock)
        self.thread.start()

    # -- from any thread ---------------------------------------------------------------------------

    def disable_in_child(self) -> None:
        """In a forked child: give up. The thread does not exist here."""
        self.has_ended = self.belongs_to_parent = True
        self._asleep = False

    def stop(self) -> None:
        """Drop timers, sources and watched descriptors, and end when the inbox is empty.

        Called by the loop's thread.
        """
        self.timers.clear()
        self._sources = []
        self._watched.clear()
        self._waiting_for_room.clear()
        self._stopping = True
        self.wake()

    def add_source(self, source: Source) -> None:
        """Receive from `source` until the loop is stopped."""
        with self._lock:
            watch(self._epoll, source.fileno(), select.EPOLLIN | select.EPOLLET)
            self._sources = [*self._sources, source]
        self.wake()  # for messages that have arrived before

    def post(self, callback: Callable[[], object]) -> None:
        """Have the loop's thread call `callback` under the lock.

        Takes no lock, so finalizers may call it.
        """
        self._inbox.append(callback)
        self.wake()

    def request_turn(self) -> None:
        """Have `after_turn` called soon, once for all requests until then. Takes no lock."""
        if not self._turn_requested:
            self._turn_requested = True
            self.wake()

    def wake(self) -> None:
        """Have the loop's thread look for something to do."""
        if self._asleep:
            self._asleep = False  # so that one ring serves all that comes until it has woken up
            self._ring()

    # -- holding the lock --------------------------------------------------------------------------

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Have `callback` called while `fd` is readable. Raises `OSError` if the system refuses."""
        watch(self._epoll, fd, select.EPOLLIN)
        self._watched[fd] = callback

    def watch_output(self, fd: int, callback: Callable[[], object]) -> None:
        """Do as `watch`, but not while there is too much unwritten output."""
        self.watch(fd, callback)
        self._output_files.add(fd)
        if self._is_output_paused:
            self._epoll.unregister(fd)

    def wait_for_room(self, fd: int, callback: Callable[[], object]) -> None:
        """Have `callback` called once, when `fd`, which is watched, can be written to."""
        if fd in self._watched:
            self._waiting_for_room[fd] = callback
            self._epoll.modify(fd, select.EPOLLIN | EPOLLOUT)

    def _tell_of_room(self, fd: int) -> None:
        callback = self._waiting_for_room.pop(fd, None)
        if callback is not None:
            self._epoll.modify(fd, select.EPOLLIN)
            self._call_guarded(callback)

    def unwatch(self, fd: int) -> None:
        self._output_files.discard(fd)
        self._waiting_for_room.pop(fd, None)
        if self._watched.pop(fd, None) is not None:
            with suppress(OSError):  # it may be paused, too
                self._epoll.unregister(fd)

    def deliver_output(self, write: Callable[[], object], size: int) -> None:
        """Have the output thread call `write`, in the order of the deliveries, and not be overtaken
        by later ones: see output_thread.py. It writes about `size` bytes.
        """
        self.deliver(Output(write, size))

    def leaves_output(self) -> bool:
        """Return whether output should be left where it is, even if that of a task comes after its
        result then: too much is unwritten, and a write is blocked.
        """
        return self._has_output and self._gate.is_full() and not self._gate.holds(monotonic())

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        return self.call_at(self.timers.now() + seconds, callback)

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = self.timers.set(when, partial(self._call_guarded, callback))
        self.wake()  # a sleeping thread does not know of this timer
        return timer

    def run_outside_lock(self, callback: Callable[[], object]) -> None:
        """Have the loop's thread call `callback` without the lock, because it forks or blocks. Any
        thread may call this.
        """
        self._jobs_outside_lock.append(callback)
        self.wake()

    # -- the loop's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        me = get_ident()
        settling_threads.add(me)  # it must not wait for promises, nor for room in a pool
        waiters_to_wake[me] = self._to_wake
        try:
            events: list[tuple[int, int]] = []
            while True:
                with self._lock:
                    self._run_once(events)
                    self._asleep = True
                    if self._inbox or self._turn_requested:
                        self._asleep = False
                if self._deliveries:
                    self._deliver()
                if self._jobs_outside_lock:
                    self._wake_waiters()
                    self._run_jobs_outside_lock()
                if self._end_if_over():
                    return
                events = self._sleep()
        except BaseException as error:  # no memory, say, or other code has closed a descriptor
            log.critical("the thread %s ends, because of an error", self.thread.name, exc_info=True)
            self._end_by(error)
        finally:
            settling_threads.discard(me)
            waiters_to_wake.pop(me, None)
            self._wake_waiters()

    def _end_by(self, error: BaseException) -> None:
        """End at once, because the thread has met `error`, and fail all that waits for the loop."""
        if self._on_death is not None:
            with self._lock:
                self._call_guarded(self._on_death)
            self._deliver(holds=False)
        self.release_resources()

    def _run_once(self, events: Iterable[tuple[int, int]] = ()) -> None:
        for fd, mask in events:
            if mask & EPOLLOUT:
                self._tell_of_room(fd)
                if mask == EPOLLOUT:
                    continue
            callback = self._watched.get(fd)
            if callback is not None:
                self._call_guarded(callback)
        self._turn_requested = False  # before `after_turn` looks for work
        if self._has_output:
            self._regulate_output()
        inbox = self._inbox
        while inbox:
            self._call_guarded(inbox.popleft())
        for source in self._sources:
            self._call_guarded(source.receive)
        timers = self.timers
        if timers.due_at <= timers.now():
            timers.fire_due()
        if self._after_turn is not None:
            self._call_guarded(self._after_turn)

    def _regulate_output(self) -> None:
        """Read no output while too much is unwritten."""
        if self._is_output_paused != self._gate.is_full():
            self._is_output_paused = not self._is_output_paused
            for fd in self._output_files:
                with suppress(OSError):  # other code has closed it, or there is no memory
                    if self._is_output_paused:
                        self._epoll.unregister(fd)
                    else:
                        watch(self._epoll, fd, select.EPOLLIN)
        self._has_output = self._is_output_paused or not self._gate.is_idle

    def _end_if_over(self) -> bool:
        """End, if the time has come, and return whether it has. Called without the lock."""
        if not self._stopping or self._inbox or self._deliveries or self._jobs_outside_lock:
            return False
        self.release_resources()
        return True

    def release_resources(self) -> None:
        """Release all resources. Called by the thread at its end, or if it is not started."""
        with fork_guard.guard:
            self.has_ended = True
            _loops.discard(self)
            fork_guard.remove_thread_lock(self.thread)
            self._files.close()
            # A traceback that was made while an error was unpickled refers to this loop, and must
            # not keep what ended pools have set.
            self.timers.clear()
        callbacks_thread.callbacks_thread.end_when_idle()
        opener_thread.opener_thread.end_when_idle()
        builder_threads.builder_threads.end_when_idle()
        output_thread.output_thread.end_when_idle()

    def _call_guarded(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except MemoryError:  # the callback is lost, and a caller may wait for its effect
            raise
        except Exception:
            log.exception("a bug in polycephaly: %r failed", callback)

    def _deliver(self, holds: bool = True) -> None:
        """Make the deliveries, up to one that has to wait for output before it if this `holds`.
        Called without the lock.
        """
        deliveries = self._deliveries
        while deliveries:
            callback = deliveries[0]
            if isinstance(callback, Output):
                deliveries.popleft()
                self._has_output = True
                self._gate.give(callback)
                continue
            if holds and self._has_output and self._gate.holds(monotonic()):
                return
            deliveries.popleft()
            generation = forked.generation
            try:
                callback()
            except BaseException as error:  # SystemExit too: this thread serves all
                forked.exit_if_forked(generation, error)
                callbacks.exception("a callback failed")
                self._on_delivery_failed(error)
            forked.exit_if_forked(generation)
            if deliveries:  # the next one may take long
                self._wake_waiters()

    def _on_delivery_failed(self, error: BaseException) -> None:
        """Act on the loss of a delivery that has raised `error`. Called without the lock."""

    def _run_jobs_outside_lock(self) -> None:
        while self._jobs_outside_lock:
            self._call_guarded(self._jobs_outside_lock.popleft())

    def _sleep(self) -> list[tuple[int, int]]:
        """Wait for something to do, if there is nothing, and return the events of descriptors."""
        if self._has_output:
            self._gate.is_waited_for = bool(self._deliveries) or self._is_output_paused
        # Descriptors are polled in any case: a source that sends without end must not starve
        # them.
        seconds = 0.0
        if self._asleep and not (self._sources and self._has_input()):
            timers = self.timers
            seconds = max(0.0, min(timers.due_at - timers.now(), MAX_SLEEP_SECONDS))
            if self._deliveries:
                seconds = min(seconds, self._gate.seconds_held(monotonic()))
        if self._to_wake:
            self._wake_waiters()
        events = self._poll(seconds)
        self._asleep = False
        return events

    def _has_input(self) -> bool:
        return any(source.has_input() for source in self._sources)

    def _wake_waiters(self) -> None:
        to_wake = self._to_wake
        while to_wake:
            release(to_wake.pop())


_loops: set[EventLoop] = set()
"""Those that run. A forked child disables its parent's, and keeps them for ever: libzmq's state,
for example, belongs to threads that do not exist there.
"""


def _disable_loops() -> None:
    for loop in _loops:
        if not loop.belongs_to_parent:
            loop.disable_in_child()


os.register_at_fork(after_in_child=_disable_loops)
