"""The scheduler of green threads: one FIFO queue, and one native thread at a time that runs it.

    spawn, wake-ups, post() ──> ready (FIFO) ──owner: coro.send(value)──> parked, ready or finished
             │                                     │
             └── ring the bell                     └── green.call: ownership may move to another
                                                       native thread

The native thread that runs the queue is the *owner*. Between two awaits, green threads run on the
owner, one at a time. Channels, locks and timers therefore need no locks: only the owner touches
them. Any other thread posts a callback (`post`) or spawns a green thread.

A green thread is parked if its coroutine has yielded `PARK` and its `next_send` is `PARKED`. Before
the yield, the thread registers where it waits. A wake-up removes the registration, stores the value
of the await in `next_send` and appends the thread to `ready`. So no thread is woken twice. Only the
owner and the fast paths of channels (channel.py) wake threads. A thread whose foreign call has lost
the ownership is not parked: the native thread of the call appends it (`_drive`).

See docs/decisions/0009-one-owner-runs-green-threads.md for the bell, the hand-over of ownership,
and why no wake-up is lost.
"""

from __future__ import annotations

import os
import sys
from _thread import LockType, allocate_lock, get_ident
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from inspect import CORO_CREATED, GEN_CREATED, getcoroutinestate, getgeneratorstate
from operator import call
from time import pthread_getcpuclockid
from types import CoroutineType
from typing import Any, Protocol

from ..promises import promise
from ..runtime import fork_guard, forked
from ..runtime.clock import monotonic
from ..runtime.deferred_sigint import DeferredSigint, is_safe_from_signals
from ..runtime.timers import Timers
from .native import (
    IDLE_WORKER_SECONDS,
    NO_THREAD,
    NativeThreadPool,
    call_unbroken,
    log,
    tracing_hooks,
)

DEADLOCK_GRACE_SECONDS = 0.02  # without a runnable thread, before the owner checks for a deadlock
MAX_NATIVE_THREADS = 16384  # the usual limits of the kernel are 2 to 6 times as many
MAX_FORK_PAUSE_SECONDS = 0.25  # a fork waits so long for the running step to end
WAIT_STEPS = 50  # of a limited wait for the owner; a suspended machine loses one at most

NO_CALL = 0
TAKEN = -1

STEPS_PER_CLOCK_CHECK = range(32)  # steps between two looks at the clock


PARK: Any = object()  # yielded: this green thread has parked, or is in `ready` already
LOST: Any = object()  # yielded: the native thread of this step is no longer the owner
IN_CALL: Any = object()  # the `next_send` of a thread that is in a foreign call
YIELDED: Any = object()  # the `next_send` of a thread that only let others go first
PARKED: Any = object()  # the `next_send` of a thread that is not in `ready`


class Schedulable(Protocol):
    """The interface of a `GreenThread` (thread.py) for the scheduler and for reports."""

    coro: Any
    next_send: Any
    cancel_count: int

    @property
    def name(self) -> str: ...
    def done(self) -> bool: ...
    def finish(self, value: Any) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def interrupt(self, error: BaseException) -> None: ...


class MessageTransport(Protocol):
    """The interface of a `ChannelTransport` (distributed/transport.py) for the scheduler."""

    def acquire(self, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def poll(self) -> None: ...
    def receive_all(self) -> None: ...
    def flush(self, by_owner: bool = True) -> None: ...


class _PostedCallback:
    """A callback for the owner. Stands in `ready` like a thread, and is its own coroutine."""

    __slots__ = ("_callback", "next_send")

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback
        self.next_send = None

    @property
    def coro(self) -> _PostedCallback:
        return self

    def send(self, _: Any) -> Any:
        scheduler.current = None
        callback = self._callback
        try:
            yielded = callback()
        finally:
            del self, callback  # which may hold an error: no cycle through its traceback
        return yielded if yielded is LOST else PARK

    def finish(self, value: Any) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        log.error("a bug in polycephaly: %r", self._callback, exc_info=error)


class Driver:
    """A native thread that runs green threads, or is in a foreign call that began while it did."""

    __slots__ = ("began", "clock", "fn", "ident", "lock", "thread", "token")

    def __init__(self) -> None:
        self.ident = get_ident()
        # Asked for by the thread itself: asking for the clock of an ended thread crashes.
        self.clock = pthread_getcpuclockid(self.ident)
        self.token = NO_CALL  # or the number of the foreign call in progress, or TAKEN
        # When the foreign call that lost the ownership was first seen by the watchdog, or itself
        # gave up the ownership (`step_aside`).
        self.began = 0.0
        self.fn: Any = None  # the function of the foreign call, and the green thread that calls
        self.thread: Schedulable | None = None
        self.lock = allocate_lock()
        self.lock.acquire()

    def take_ownership(self) -> bool:
        """Take the ownership from the foreign call in progress. Return False if there is none to
        take.
        """
        if self.token > NO_CALL:
            # Atomic: CPython switches threads only at calls, loop ends and function entries, and
            # none of these is between the look and this store. The same holds at the end of the
            # call (call.py), so exactly one side gets the ownership.
            self.token = TAKEN
            return True
        return False


class Scheduler:
    """The scheduler of one process; the only instance is `scheduler`.

    Any thread may call the methods of the first section. Of the others, `hand_over` is for the
    thread that has just taken the ownership, `_start_owner` for the one that rings the bell, and
    `paused_for_fork` for the one that forks. The rest are for the owner.
    """

    def __init__(self) -> None:
        self.ready: deque[Schedulable | _PostedCallback] = deque()
        self.timers = Timers()
        self.workers = NativeThreadPool(MAX_NATIVE_THREADS)
        self.bell: list[Callable[[], object]] = [self._start_owner]
        self.live: set[Schedulable] = set()
        self.current: Any = None  # the green thread whose step runs
        # The ident of the native thread that runs steps; 0 if none, or in a foreign call.
        self.owner = 0
        self.driver: Driver | None = None
        self.drivers: dict[int, Driver] = {}
        self.calls = 0  # foreign calls begun in place so far; each takes the count for its token
        self.busy_periods = 0  # how often the owner has gone to sleep after running something
        self.native_calls = 0  # plain functions and foreign calls that run on other native threads
        self.external_waits = 0  # green threads that wait for something from outside the scheduler
        # Set once channels go to other processes: the owner sleeps in its epoll and polls it.
        self.transport: MessageTransport | None = None
        # Called by an owner that begins, or has slept.
        self.on_busy: Callable[[], object] = lambda: None
        # Called by an owner that has had nothing to do for DEADLOCK_GRACE_SECONDS.
        self.on_idle: Callable[[], object] = lambda: None
        # Called, in any thread, with an asynchronous generator that a step has left unfinished.
        self.on_generator_dropped: Callable[[Any], None] = lambda generator: None
        self._random_state = 1

    # -- for any thread ----------------------------------------------------------------------------

    def post(self, callback: Callable[[], object]) -> None:
        """Have the owner call `callback` soon. `callback` must neither raise nor wait."""
        self.ready.append(_PostedCallback(callback))
        if self.bell:
            self.ring()

    def call_or_post(self, callback: Callable[[], object]) -> None:
        """Call `callback` at once if the caller is code of a green thread between two awaits."""
        if self.in_step():
            callback()
        else:
            self.post(callback)

    def run_in_owner(self, callback: Callable[[], object], timeout: float | None = None) -> None:
        """Have the owner call `callback`, and wait for its end, `timeout` seconds at most."""
        if self.in_step():
            callback()
            return
        ended = allocate_lock()
        ended.acquire()

        def call() -> None:
            try:
                callback()
            finally:
                ended.release()

        self.post(call)
        if timeout is None:
            ended.acquire()
        else:
            any(ended.acquire(timeout=timeout / WAIT_STEPS) for _ in range(WAIT_STEPS))

    def ring(self) -> None:
        """Wake the sleeping owner, or start one, because `ready` has a new entry."""
        # Between the pop and the call, an error of a signal handler, as of Ctrl-C, would leave an
        # owner that no thread can wake.
        if is_safe_from_signals():
            with DeferredSigint():
                self._call_waker()
            return
        for waker in tuple(self.bell):  # one at most
            if waker == self._start_owner:
                call_unbroken(self._call_waker)
                return
            try:
                # Both in one call, in which no handler runs.
                calls: Any = (partial(self.bell.remove, waker), waker)
                deque(map(call, calls), maxlen=0)
            except ValueError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise  # by a signal handler
                # Else another thread has popped the waker.

    def _call_waker(self) -> None:
        try:
            waker = self.bell.pop()  # atomic, so only one caller gets the waker
        except IndexError:
            return
        waker()

    def in_step(self) -> bool:
        """Return True if the caller is code of a green thread between two awaits."""
        # `owner` is the caller's ident only while it has the ownership: the ident is stored when a
        # thread takes that or gets it back, and 0 before a foreign call, from which another thread
        # may take the ownership.
        return get_ident() == self.owner

    def step_aside(self) -> None:
        """Give up the ownership if the caller is in a foreign call.

        Plain code calls this before waiting, so that another native thread runs the others.
        """
        driver = self.drivers.get(get_ident())
        if driver is not None and driver.take_ownership():
            driver.began = monotonic()
            self.hand_over()

    # -- ownership ---------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Start another owner, because the ownership was taken from a foreign call."""
        self.owner, self.driver = 0, None
        self.native_calls += 1
        if not self.workers.start_urgently(self._drive):
            self.bell.append(self._start_owner)  # the next call that returns becomes the owner
            if not self.native_calls:  # the call has returned in the meantime
                self.ring()

    def _start_owner(self) -> None:
        if not self.workers.start_urgently(self._drive):
            self.bell.append(self._start_owner)
            raise RuntimeError(NO_THREAD)

    def _replace_missing_owner(self) -> bool:
        """Take the place of the owner if there is none: True if the caller is now to be it."""
        try:
            waker = self.bell.pop()
        except IndexError:  # the owner is awake, or another thread is starting one right now
            return False
        if waker == self._start_owner:
            return True
        waker()  # the owner sleeps
        return False

    def _drive(self) -> None:
        """Run green threads until there is nothing to do or the ownership is lost. The job of a
        worker.
        """
        driver = Driver()
        self.drivers[driver.ident] = driver
        sys.set_asyncgen_hooks(finalizer=self.on_generator_dropped)
        while True:
            self.owner, self.driver = driver.ident, driver
            self.on_busy()
            base = Context()
            try:
                yielded = base.run(self._loop, driver, base)
            # Raised by a callback at the end of a green thread, for instance by `sys.exit`.
            except BaseException as error:
                promise.callbacks.error("a callback of a green thread failed", exc_info=error)
                continue
            if yielded is None:
                break
            if yielded is not LOST:
                _assign_context(yielded, base)
                yielded = None  # keep nothing alive while the next ones run
                continue
            thread, driver.fn, driver.thread = driver.thread, None, None
            assert thread is not None
            if base:
                _assign_context(thread, base)
            # A foreign call that lost the ownership has returned. Its green thread joins the queue.
            # This native thread becomes the owner again only if there is none.
            self.native_calls -= 1
            thread.next_send = None
            self.ready.append(thread)
            thread = None
            if not self._replace_missing_owner():
                break
        sys.set_asyncgen_hooks(finalizer=None)
        del self.drivers[driver.ident]

    def _loop(self, driver: Driver, base: Context) -> Any:
        """Run green threads. Return why the loop ended.

        None: there was nothing left to do. `LOST`: the ownership was taken. A green thread: that
        thread has set a context variable. The loop runs in `base`, an empty context, which all
        threads that never set a variable share.
        """
        pop_ready, heap, parked, park = self.ready.popleft, self.timers.heap, PARKED, PARK
        generation = forked.generation
        thread: Any = None
        while True:
            if heap:
                self.timers.fire_due()
            if self.transport is not None:
                self.transport.poll()
            for _ in STEPS_PER_CLOCK_CHECK:
                try:
                    thread = pop_ready()
                except IndexError:
                    break
                self.current = thread
                value = thread.next_send
                thread.next_send = parked
                try:
                    yielded = thread.coro.send(value)
                except StopIteration as stop:
                    forked.exit_if_forked(generation)
                    thread.finish(stop.value)
                except BaseException as error:
                    forked.exit_if_forked(generation, error)
                    thread.fail(error)
                else:
                    if yielded is not park and (
                        yielded is LOST
                        or self.run_step(
                            thread, thread.coro.throw, unsupported_await_error(yielded)
                        )
                        is LOST
                    ):
                        return LOST
                if base:
                    return thread if self.current is None else self.current
            else:
                continue
            # `current` is set without `thread` if a message has let a thread run out of turn.
            if thread is not None or self.current is not None:
                self.busy_periods += 1
            self.current = thread = value = None  # keep nothing alive while asleep
            if not self._sleep(driver):
                return None

    def run_step(self, thread: Any, step: Callable[[Any], Any], arg: Any) -> Any:
        """Run one step of a parked thread out of turn. Return PARK or LOST."""
        self.current = thread
        generation = forked.generation
        try:
            while True:
                try:
                    yielded = step(arg)
                except StopIteration as stop:
                    forked.exit_if_forked(generation)
                    thread.finish(stop.value)
                    return PARK
                except BaseException as error:
                    forked.exit_if_forked(generation, error)
                    thread.fail(error)
                    return PARK
                if yielded is PARK or yielded is LOST:
                    return yielded
                step, arg = thread.coro.throw, unsupported_await_error(yielded)
        finally:
            del thread, step, arg  # no cycle through the traceback of an error in `arg`

    def _sleep(self, driver: Driver) -> bool:
        """Sleep until there is something to do.

        Return False if there was nothing for DEADLOCK_GRACE_SECONDS and then IDLE_WORKER_SECONDS,
        so that the ownership was given up. With a channel transport the ownership is never given
        up.
        """
        bell, ready = self.bell, self.ready
        transport = self.transport
        # With a transport, messages of other processes wake the owner just as the bell does.
        lock: Any = driver.lock if transport is None else transport
        driver.fn = driver.thread = None  # left by the last foreign call
        checked = False  # for a deadlock
        while True:
            # The waker goes into the bell before the look at `ready`: the look sees all that came
            # before, and any thread that comes later finds the waker.
            bell.append(lock.release)
            woken = False
            try:
                left = self.timers.seconds_left()
                idle_timeout = IDLE_WORKER_SECONDS if transport is None else 1e6
                timeout = idle_timeout if checked else DEADLOCK_GRACE_SECONDS
                if not ready and left != 0.0:
                    woken = lock.acquire(timeout=timeout if left is None else min(left, 1e6))
            finally:
                # After an error, too: the next sleep adds the waker again, and it is called once.
                if not woken:
                    try:
                        bell.pop()
                    except IndexError:  # another thread has popped it, and is about to call it
                        lock.acquire()
            if not woken:
                if transport is not None:
                    # Not before the pop: a fork takes an owner with a waker in the bell for asleep.
                    transport.poll()
                if ready or left is not None:
                    break
                if not checked:
                    checked = True
                    self.on_idle()
                    continue
                if transport is not None:
                    continue
                self.owner, self.driver = 0, None
                bell.append(self._start_owner)
                if not ready:
                    return False
                if not self._replace_missing_owner():
                    return False
                self.owner, self.driver = driver.ident, driver
            break
        tracing_hooks.follow()
        self.on_busy()
        return True

    # -- random numbers, and forks -----------------------------------------------------------------

    def random_below(self, n: int) -> int:
        """Return a fair pseudo-random number below `n`; the sequence is the same in each run."""
        self._random_state = (self._random_state * 1103515245 + 12345) & 0x7FFFFFFF
        return (self._random_state >> 16) % n

    @contextmanager
    def paused_for_fork(self) -> Iterator[None]:
        """Have no step run during a fork, except the one that forks.

        If the running step, or the end of a native thread, takes longer than
        MAX_FORK_PAUSE_SECONDS, the fork goes ahead regardless.
        """
        generation = forked.generation
        driver = self.drivers.get(get_ident())
        stopped, forked_now = allocate_lock(), allocate_lock()  # locked while a step may (not) run
        forked_now.acquire()
        wakers: list[Callable[[], object]] = []  # one at most
        resume: Callable[[], object] | None = None
        try:
            if self.in_step():
                pass  # no other step begins before this one ends
            elif driver is not None and driver.take_ownership():
                # The caller is in a foreign call, and no other thread can take the ownership from
                # that. No signal handler runs here.
                self.driver = None  # else the watchdog takes a long fork for a long step
                driver.began = monotonic()
                resume = self.hand_over
            else:
                try:
                    wakers.extend(map(call, (self.bell.pop,)))  # in one call: see `ring`
                except IndexError:  # an owner is awake, or is being woken or started
                    stopped.acquire()
                    self.post(partial(_stand_still, stopped, forked_now))
            stopped.acquire(timeout=MAX_FORK_PAUSE_SECONDS)
            self.workers.wait_for_ending(MAX_FORK_PAUSE_SECONDS)
            yield
        finally:
            # In the child, too, this generator is closed.
            if forked.generation == generation:
                self.bell += wakers  # no call, so no signal handler runs before it
                forked_now.release()
                if wakers and (self.ready or wakers != [self._start_owner]):
                    resume = self.ring
                if resume is not None:
                    resume()

    # A fork pops the waker (F1), puts it back (F2), and then looks at `ready` (F3). In between, the
    # owner stays asleep, and no other thread starts one:
    #
    #     another thread appends to `ready` (A1), then looks at the bell (A2). If A2 comes before
    #         F2, it finds no waker, but F3 finds its entry
    #     the owner's time is over: it looks for its waker in the bell. If that comes before F2, the
    #         owner waits for the call of the waker. So a sleeping owner's waker is always called

    def reset_after_fork(self) -> None:
        """Reset everything in a forked child to the state before the first spawn.

        A step that has forked cannot wait in the child, because every await raises there. The child
        ends with that step (runtime/forked.py).
        """
        # Keep the parent's green threads alive: destroying them would run their `finally` clauses.
        _parent_states.append((self.live, list(self.ready), list(self.timers.heap)))
        self.ready.clear()
        self.timers.clear()
        self.workers.reset_after_fork()
        self.bell[:] = [self._start_owner]
        self.live = set()
        self.current, self.owner, self.driver = None, 0, None
        self.drivers.clear()
        self.transport = None
        self.native_calls = self.external_waits = 0


_parent_states: list[Any] = []


def _stand_still(stopped: LockType, forked_now: LockType) -> None:
    """Let a fork begin, and wait for its end."""
    stopped.release()
    forked_now.acquire()


class CoroutineWrapper:
    """A wrapper in a thread's `coro` that adds something to each step of the coroutine `coro`."""

    __slots__ = ("coro",)
    coro: Any

    def throw(self, error: BaseException) -> Any:
        try:
            return self.coro.throw(error)
        finally:
            del error  # no cycle through its traceback


class InContext(CoroutineWrapper):
    """Runs each step of a green thread in the thread's own context."""

    __slots__ = ("context",)

    def __init__(self, coro: Any, context: Context) -> None:
        self.coro = coro
        self.context = context

    def send(self, value: Any) -> Any:
        try:
            return self.context.run(self.coro.send, value)
        finally:
            del value  # which may hold an error: no cycle through its traceback

    def throw(self, error: BaseException) -> Any:
        try:
            return self.context.run(self.coro.throw, error)
        finally:
            del error


class Interrupted(CoroutineWrapper):
    """Raises pending errors in a thread that was not parked when it was interrupted.

    A thread that is ready may already have been given a value, such as an item from a channel. The
    thread gets that value first and the error at its next await, so that nothing is lost.
    """

    __slots__ = ("errors", "thread")

    def __init__(self, thread: Schedulable, error: BaseException) -> None:
        self.thread = thread
        self.coro = thread.coro
        self.errors = [error]
        thread.coro = self

    def send(self, value: Any) -> Any:
        error: BaseException | None = None
        try:
            if value is not YIELDED and not is_unstarted(self.coro):
                yielded = self.coro.send(value)
                if yielded is not PARK or self.thread.next_send is not PARKED:
                    return yielded  # the thread is in a call, or ready again: at the next step
                value = PARKED
            error = self._leave()
            if error is not None:
                return self.coro.throw(error)
            return PARK if value is PARKED else self.coro.send(value)
        finally:
            del self, value, error  # no cycle through the traceback of an error

    def _leave(self) -> BaseException | None:
        """Put the coroutine back into its place, and return the error to be raised now."""
        thread = self.thread
        thread.coro = self.coro
        error = self.pop_error()
        for another in self.errors:
            thread.interrupt(another)
        return error

    def pop_error(self) -> BaseException | None:
        """Take the first error that is still wanted, to be raised."""
        while self.errors:
            error = self.errors.pop(0)
            if not getattr(error, "withdrawn", False):
                self.thread.cancel_count += getattr(error, "is_cancel", False)
                return error
        return None


def unwrap(coro: Any) -> Any:
    """Return the coroutine itself, without its wrappers."""
    while isinstance(coro, CoroutineWrapper):
        coro = coro.coro
    return coro


def is_unstarted(coro: Any) -> bool:
    coro = unwrap(coro)
    if isinstance(coro, CoroutineType):
        return getcoroutinestate(coro) == CORO_CREATED
    return getgeneratorstate(coro) == GEN_CREATED


def _assign_context(thread: Any, base: Context) -> None:
    if isinstance(thread, _PostedCallback) or thread.coro is None:
        return
    # The context itself and not a copy: a token of `ContextVar.set` is valid for that object only.
    if type(thread.coro) is Interrupted:
        thread.coro.coro = InContext(thread.coro.coro, base)
    else:
        thread.coro = InContext(thread.coro, base)


def unsupported_await_error(yielded: Any) -> TypeError:
    """Return the error for an await that green threads do not support.

    `yielded` is the value that the awaited object yielded, or the error that it raised.
    """
    if isinstance(yielded, BaseException) or hasattr(yielded, "_asyncio_future_blocking"):
        awaited = "an asyncio object"
    elif yielded is None:
        awaited = "a bare yield, such as asyncio.sleep(0)"
    else:
        awaited = f"an object that yields {yielded!r}"
    error = TypeError(
        f"green code awaited {awaited}, for which a green thread cannot wait; "
        "`await green.aio(coro)` runs asyncio code on the asyncio loop of the process, and "
        "`green.aio(fn)` makes a whole coroutine function of asyncio code one for green threads "
        "and pools"
    )
    if isinstance(yielded, BaseException):
        error.__cause__ = yielded
    return error


scheduler = Scheduler()
fork_guard.pauses.append(scheduler.paused_for_fork)
os.register_at_fork(after_in_child=scheduler.reset_after_fork)
