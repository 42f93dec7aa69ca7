"""Green threads: coroutines and plain functions that run concurrently, each the promise of its
value. They are started by `spawn` (spawning.py).

    spawn(async def) ──> GreenThread ──> scheduler.ready ──> steps on the owner ──> value or error
    spawn(plain def) ──> NativeThread ──> a native thread of the pool ────────────> value or error

Cancelling is a request: `Cancelled` is raised at the await where the thread is parked, or at its
next await. The promise is settled after the thread has ended, including its `finally` clauses.
Foreign code in a plain function cannot be interrupted. If the function waits for a channel, a green
thread or a drone's task, the wait is interrupted, and the promise it waits for is cancelled.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from _thread import get_ident
from asyncio import CancelledError as AsyncioCancelled
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from contextvars import copy_context
from functools import partial
from time import thread_time
from types import CoroutineType, GeneratorType, coroutine
from typing import Any, TypeVar, cast
from weakref import WeakSet

from ..promises import promise as promises
from ..promises.promise import CANCELLED, FINISHED, Promise, when_settled
from ..runtime import forked
from ..runtime.clock import monotonic
from ..runtime.coroutines import is_awaitable
from ..timeline.event_log import MIN_EVENT_SECONDS, event_log
from .history import history
from .native import call_unbroken
from .scheduler import (
    IN_CALL,
    NO_CALL,
    PARK,
    PARKED,
    InContext,
    Interrupted,
    scheduler,
    unsupported_await_error,
    unwrap,
)

T = TypeVar("T")

MAX_SINGLE_HOOKS = 64  # of a promise, where one that leaves is searched for
MAX_IDENTICAL_REPORTS = 20  # of errors that no code has looked at, with the same traceback
MAX_TRACEBACKS_KEPT = 100  # of such reports, to compare others with
SHORT_CALL_SECONDS = 0.0005  # a shorter call need not have been moved to another thread


class Cancelled(AsyncioCancelled):
    """Raised at an await of a cancelled green thread. Let this error pass: it ends the thread.

    Like its base class `asyncio.CancelledError`, this is not an `Exception`.
    """

    is_cancel = False
    """True if requested by `cancel()`, and not by a time limit or a group."""

    in_call = False
    """True if requested during a foreign call, which cannot be interrupted."""

    withdrawn = False
    """True if the error is no longer wanted. The error is dropped unless already raised."""


class GreenThread(Promise[T]):
    """A green thread, which is also the promise of its value.

    Made by `green.spawn`. Any thread may call the methods.
    """

    __slots__ = ("_group", "_unclaimed", "coro", "next_send")

    # For the other modules of the package, not for users. So these names, and some below, have no
    # docstring and are not in the reference.
    coro: Any  # the coroutine, perhaps in a `CoroutineWrapper`; None if there is none (any more)
    # What the scheduler sends into the coroutine at the next step; or PARKED, IN_CALL or YIELDED.
    next_send: Any
    # How many `cancel()` requests have reached the thread. A time limit that ends later must not
    # turn such a cancellation into a `TimeoutError`.
    cancel_count = 0
    given_name: str | None = None  # by `spawn`, or set when there is no coroutine left to ask
    spawned_at: float | None = None  # when the thread was spawned, if its life is logged
    log_number = 0  # in the event log

    _group: Any  # the `Group` that the thread is in, or None
    _unseen: UnseenErrorReport | None = None
    _owned: WeakSet[Any] | None = None

    def __init__(self, coro: Any, group: Any = None) -> None:
        self._unclaimed = None
        self.coro = coro
        self.next_send = None
        self._group = group

    @property
    def name(self) -> str:
        """The name given to `spawn`, or else the qualified name of the function."""
        return self.given_name or qualname(self.coro)

    # The green thread in whose group this one is, if any.
    @property
    def parent(self) -> GreenThread[Any] | None:
        return None if self._group is None else cast("GreenThread[Any] | None", self._group.owner)

    # -- the end of the thread, called by the owner ------------------------------------------------

    def finish(self, value: T) -> None:
        self._end(FINISHED, value, None)

    def fail(self, error: BaseException) -> None:
        # asyncio, and libraries that use it by anyio or sniffio, raise one of these if they find no
        # running loop.
        if isinstance(error, (RuntimeError, AttributeError)) and _is_asyncio_error(error):
            error = unsupported_await_error(error)
        if error.__traceback__ is not None:  # leave out the scheduler's own frame
            error.__traceback__ = error.__traceback__.tb_next
        if isinstance(error, AsyncioCancelled):
            self._end(CANCELLED, None, None)
        else:
            self._end(FINISHED, None, error)

    def _end(self, state: str, value: Any, error: BaseException | None) -> None:
        room: dict[str, Any] = {}
        del room  # as in `add_done_callback`
        self.__dict__  # noqa: B018
        scheduler.live.discard(self)
        group = self._group
        self.given_name = name = self.name
        if self.spawned_at is not None and monotonic() - self.spawned_at >= MIN_EVENT_SECONDS:
            event_log.add_life(self, self.spawned_at, error is not None)
        if error is not None and group is None and not self._hooks:
            self._unseen = UnseenErrorReport(name, error)
        self.coro = None
        for each in self._owned or ():
            each.kill()
        try:
            self._settle(state, value, error)
        finally:  # a callback may raise an error that is not an `Exception`
            if group is not None:
                group.on_child_end(self, error)

    # -- cancelling and interrupting ---------------------------------------------------------------

    _settled_from_outside = False
    _needs_callbacks = True  # perhaps: nobody knows what its coroutine will wait for

    def cancel(self, running: bool = True) -> bool:
        """Ask the green thread to end.

        `Cancelled` is raised at the await where the thread is parked, or at its next await. The
        promise is settled when the thread has ended: as cancelled, unless the thread caught
        `Cancelled` and returned a value. `running` has no effect. Any thread may call this.

        Returns
        -------
        bool
            True if the thread had not ended, or was cancelled before.
        """
        if self.done():
            return self._state == CANCELLED
        error = Cancelled()
        error.is_cancel = True
        self.interrupt(error)
        return True

    def _cancel_with_waiter(self) -> bool:
        # A group that is cancelled asks each member by itself. If the waiter is another member, a
        # second request would break off the clean-up of this one.
        return (self._group is not None and self._group.is_cancelling) or self.cancel()

    # Raises `error` once, at an await of this green thread. Any thread may call this.
    def interrupt(self, error: BaseException) -> None:
        if (
            get_ident() == scheduler.owner
            and self.next_send is not PARKED
            and self is not scheduler.current
        ):
            self._throw(error)  # at once, so that a thread that has not begun never begins
        else:
            scheduler.post(partial(self._throw, error))

    def _throw(self, error: BaseException) -> Any:
        """Raise `error` now if the thread is parked, else by way of `Interrupted`.

        For the owner only: in a posted callback, or for a thread that is not parked.
        """
        try:
            if self.coro is not None and self.next_send is not PARKED:
                if isinstance(error, Cancelled):
                    error.in_call = self.next_send is IN_CALL
                if type(self.coro) is Interrupted:
                    self.coro.errors.append(error)
                else:
                    Interrupted(self, error)
                return PARK
            if self.coro is not None and not getattr(error, "withdrawn", False):
                self.cancel_count += getattr(error, "is_cancel", False)
                return scheduler.run_step(self, self.coro.throw, error)
            return PARK
        finally:
            del self, error  # no cycle: frames of the coroutine lead back to this one

    # Raises the error of an interruption that came when the thread was in a foreign call or ready.
    # A further call begins with this: a thread that makes one call after the other never parks.
    def raise_if_interrupted(self) -> None:
        if type(self.coro) is Interrupted and (error := self.coro.pop_error()) is not None:
            try:
                raise error
            finally:
                del error, self  # no cycle through the error's traceback

    def running(self) -> bool:
        return not self.done()

    def own(self, killable: Any) -> None:
        """Call ``killable.kill()`` when this green thread ends, if `killable` still exists then."""
        if self._owned is None:
            self._owned = WeakSet()
        self._owned.add(killable)

    # Makes a foreign call of this green thread on another native thread.
    @coroutine
    def call_on_native_thread(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Generator[Any, Any, Any]:
        before = copy_context()
        context = before.copy()
        wake = Wake()
        outcome: list[Any] = []
        scheduler.native_calls += 1
        self.next_send = IN_CALL  # cannot be interrupted: the error is raised after the call
        try:
            self._submit_job(
                partial(
                    self._run_call,
                    partial(context.run, fn, *args, **kwargs),
                    fn,
                    args,
                    outcome,
                    wake,
                )
            )
        except RuntimeError:  # no native thread can be started
            scheduler.native_calls -= 1
            self.next_send = PARKED
            raise
        yield PARK
        for variable, value in context.items():
            if before.get(variable, wake) is not value:
                variable.set(value)
        try:
            if outcome[1] is not None:
                raise outcome[1]
            return outcome[0]
        finally:
            outcome.clear()  # no cycle through the error's traceback
            del self

    def _run_call(
        self,
        call: Callable[[], Any],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        outcome: list[Any],
        wake: Wake,
    ) -> None:
        """Make a foreign call on the calling native thread."""
        native_threads[get_ident()] = self
        generation = forked.generation
        began, used = monotonic(), thread_time()
        try:
            outcome[:] = call(), None
        except BaseException as error:
            outcome[:] = None, error
        forked.exit_if_forked(generation, outcome[1])
        event_log.add_call(self, fn, args, began, outcome[1] is not None, thread_time() - used)
        if monotonic() - began < SHORT_CALL_SECONDS:
            history.record_short(fn)
        del native_threads[get_ident()]
        scheduler.native_calls -= 1
        wake()
        del self, wake  # no cycle: the frames of an error of the call lead back to this one

    def _submit_job(self, job: Callable[[], None]) -> None:
        scheduler.workers.start(job)

    # -- result and error --------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> T:
        try:
            return super().result(timeout)
        finally:
            self._mark_error_seen()
            del self  # as in `Promise.result`: no cycle through the error's traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:  # also if the thread has ended only during the wait
            self._mark_error_seen()

    def _mark_error_seen(self) -> None:
        if self._unseen is not None:
            self._unseen.error = None
            self._unseen = None

    def _add_unless_settled(self, hook: Callable[[Promise[T]], object]) -> bool:
        # A collection while a `__dict__` is made can crash CPython 3.11 (promises/promise.py). One
        # made in `__init__` would cost 64 bytes for each waiting thread. One made in the place of a
        # dict just freed triggers no collection.
        room: dict[str, Any] = {}
        del room
        self.__dict__  # noqa: B018
        self._mark_error_seen()
        try:
            return super()._add_unless_settled(hook)
        finally:
            del hook  # no cycle through the traceback of an error of the hook

    def _wait(self, timeout: float | None, opens: bool = True) -> None:
        if not self.done():
            scheduler.step_aside()
            if scheduler.in_step():
                raise RuntimeError(
                    f"{self.name} was waited for inside a coroutine, where waiting would stop "
                    "every green thread, this one too; use `await promise`"
                )
        super()._wait(timeout, opens)

    def _before_wait(self, deadline: float | None) -> None:
        if deadline is None:
            self._on_wait_interval()

    def _on_wait_interval(self) -> None:
        # This thread may have been the last that could wake the others: check for a deadlock.
        if scheduler.bell:
            scheduler.ring()

    def __repr__(self) -> str:
        return super().__repr__().replace("<Promise", f"<GreenThread {self.name}", 1)


class NativeThread(GreenThread[T]):
    """A green thread that runs a plain function, as one foreign call on a native thread."""

    __slots__ = ("end_delivered", "end_requested", "native_ident")

    def __init__(self, fn: Callable[..., Any], group: Any) -> None:
        super().__init__(None, group)
        self.native_ident = 0  # of the native thread that runs the function; 0 if none does
        self.end_requested = self.end_delivered = False
        self.given_name = qualname(fn)

    def start_job(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        context = copy_context()
        call_unbroken(partial(self._start_job, partial(context.run, self._run, fn, args)))

    def _start_job(self, job: Callable[[], object]) -> None:
        scheduler.live.add(self)
        scheduler.native_calls += 1
        try:
            scheduler.workers.start(job)
        except RuntimeError:  # no native thread can be started
            scheduler.live.discard(self)
            scheduler.native_calls -= 1
            if self._group is not None:
                self._group.children.discard(self)
            raise

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.native_ident = ident = get_ident()
        native_threads[ident] = self
        began, used = monotonic(), thread_time()
        value: Any = None
        failure: BaseException | None = None
        state = FINISHED
        generation = forked.generation
        try:
            if self.end_requested:
                raise Cancelled
            value = fn(*args)
        except BaseException as error:
            if isinstance(error, (CancelledError, AsyncioCancelled)) and self.end_requested:
                state = CANCELLED
            else:
                failure = error
                if error.__traceback__ is not None:
                    error.__traceback__ = error.__traceback__.tb_next
        forked.exit_if_forked(generation, failure)
        event_log.add_call(self, fn, args, began, failure is not None, thread_time() - used)
        self.native_ident = 0
        del native_threads[ident]
        scheduler.native_calls -= 1
        if is_awaitable(value):  # for instance from a lambda around a coroutine function
            self.coro = InContext(as_coroutine(value, self.name), copy_context())
            if self.end_requested and not self.end_delivered:
                Interrupted(self, Cancelled())
            scheduler.ready.append(self)
            if scheduler.bell:
                scheduler.ring()
        elif self._group is not None:
            # Only the owner may touch a group.
            scheduler.post(partial(self._end_in_owner, state, value, failure))
        else:
            self._end(state, value, failure)
            # As in `_on_wait_interval`.
            if scheduler.bell and promises.waiting_threads:
                scheduler.ring()
        del self, value, failure  # no cycle: the frames of an error of `fn` lead back to this one

    def _end_in_owner(self, state: str, value: Any, failure: BaseException | None) -> None:
        try:
            self._end(state, value, failure)
        except BaseException as error:  # raised by a callback, for instance by `sys.exit`
            promises.callbacks.error("a callback of a green thread failed", exc_info=error)

    def cancel(self, running: bool = True) -> bool:
        """Ask the green thread to end. Return False if its function continues in foreign code."""
        if self.coro is not None:
            return super().cancel(running)
        if self.done():
            return self._state == CANCELLED
        self.end_requested, self.end_delivered = True, False
        if self.coro is not None:  # the function has just returned a coroutine, which now runs
            return super().cancel(running)
        ident = self.native_ident
        if not ident:
            return True
        # A native thread about to wait registers in `waiting_threads`, then looks if it was asked
        # to end. This method asks, then looks into `waiting_threads`. So one sees the other.
        # `native_threads` tells if another job has begun on that native thread since.
        waiting = promises.waiting_threads.get(ident)
        if (
            waiting is None
            or native_threads.get(ident) is not self
            or not waiting[0]._cancels_with_waiter
        ):
            return self.done() and self._state == CANCELLED
        return waiting[0]._cancel_with_waiter()


_NO_LOOP_ERRORS = ("NoEventLoopError", "AsyncLibraryNotFoundError")  # of anyio, of sniffio


def _is_asyncio_error(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if error.args == ("no running event loop",) or type(error).__name__ in _NO_LOOP_ERRORS:
        return True
    return trace is not None and trace.tb_frame.f_globals.get("__package__") == "asyncio"


def qualname(fn: Any) -> str:
    fn = unwrap(fn)
    return getattr(fn, "__qualname__", None) or repr(fn)


native_threads: dict[int, GreenThread[Any]] = {}
"""By native thread ident, the green thread whose foreign code runs there."""


def calling_thread() -> GreenThread[Any] | None:
    """Return the green thread whose code calls (a step, foreign call or plain function), or
    None.
    """
    ident = get_ident()
    driver = scheduler.drivers.get(ident)
    if driver is not None:
        thread = scheduler.current if driver.token == NO_CALL else driver.thread
        return cast("GreenThread[Any] | None", thread)
    return native_threads.get(ident)


def as_coroutine(awaitable: Any, name: str) -> Any:
    if isinstance(awaitable, (CoroutineType, GeneratorType)):
        return awaitable

    async def waits(awaitable: Any) -> Any:
        try:
            return await awaitable
        finally:
            del awaitable  # no cycle through the traceback of its error

    coro: Any = waits(awaitable)
    coro.__qualname__ = name
    return coro


GREEN_RUN_ADVICE = "`green.run` around it, or in asyncio `await green.spawn(...)`"


def outside_error(name: str, alternative: str = GREEN_RUN_ADVICE) -> RuntimeError:
    return RuntimeError(
        f"{name} is for green threads, and was used outside of one: use {alternative}"
    )


# -- waiting for events from outside the scheduler -------------------------------------------------


class Wake:
    """Wakes the green thread that made and awaits this object, once. Any thread may call."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread: GreenThread[Any] | None = scheduler.current

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield PARK
        finally:
            self.thread = None

    def __call__(self, *_: object) -> None:
        scheduler.post(self.now)

    def now(self) -> None:
        """Wake the thread at once. For the owner only."""
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.next_send = None
            scheduler.ready.append(thread)


class _Crowd:
    """The hooks of many green threads at one promise, any of which leaves in constant time.

    For the owner only, except the call by the promise.
    """

    __slots__ = ("hooks",)

    def __init__(self) -> None:
        self.hooks: dict[Callable[[Promise[Any]], object], None] = {}

    def __call__(self, promise: Promise[Any]) -> None:
        # Posted: a hook that is added in the step that runs now is called, too.
        scheduler.post(lambda: self._call_all(promise))

    def _call_all(self, promise: Promise[Any]) -> None:
        hooks, self.hooks = self.hooks, {}
        for hook in hooks:
            hook(promise)


def add_hook(promise: Promise[Any], hook: Callable[[Promise[Any]], object]) -> None:
    """Have `hook` called when `promise` is settled. For the owner only."""
    crowd: _Crowd | None = getattr(promise, "_crowd", None)
    if crowd is None:
        if len(promise._hooks or ()) < MAX_SINGLE_HOOKS:
            when_settled(promise, hook)
            return
        crowd = vars(promise)["_crowd"] = _Crowd()
        when_settled(promise, crowd)
    crowd.hooks[hook] = None


def remove_hook(promise: Promise[Any], hook: Callable[[Promise[Any]], object]) -> None:
    """Remove a hook added by `add_hook`, if it was not called yet. For the owner only."""
    crowd: _Crowd | None = getattr(promise, "_crowd", None)
    if crowd is None or hook not in crowd.hooks:
        promise.remove_done_callback(hook)
        return
    del crowd.hooks[hook]
    if not crowd.hooks:  # a thread that no code waits for reports its error
        del vars(promise)["_crowd"]
        promise.remove_done_callback(crowd)


@coroutine
def _await_promise(promise: Promise[Any]) -> Generator[Any, Any, None]:
    wake = Wake()
    is_external = promise._settled_from_outside
    scheduler.external_waits += is_external
    if promise._hooks:
        add_hook(promise, wake)
    else:  # the usual case
        promise._when_settled(wake)
    try:
        yield PARK
    except GeneratorExit:
        raise
    except BaseException:
        remove_hook(promise, wake)
        promise._cancel_with_waiter()  # as asyncio does
        raise
    finally:
        wake.thread = None
        scheduler.external_waits -= is_external


os.register_at_fork(after_in_child=native_threads.clear)


def _is_end_requested(ident: int, deliver: bool) -> bool:
    """Return True if the plain function on native thread `ident` was asked to end and does not
    know yet.

    With `deliver`, the function learns so now, from a wait that ends. Its clean-up may then wait.
    """
    thread = native_threads.get(ident)
    if not isinstance(thread, NativeThread) or not thread.end_requested or thread.end_delivered:
        return False
    thread.end_delivered = deliver
    return True


promises.is_end_requested = _is_end_requested
promises.green_hooks = (scheduler.in_step, _await_promise)


# -- errors that no code has looked at -------------------------------------------------------------


class UnseenErrorReport:
    """An error that no code has looked at.

    If still unseen, the error is printed when this object is destroyed or the program ends. Of more
    than `MAX_IDENTICAL_REPORTS` with the same traceback, the number is printed at the end.
    """

    __slots__ = ("__weakref__", "error", "name")

    def __init__(self, name: str, error: BaseException) -> None:
        self.name = name
        self.error: BaseException | None = error
        _unseen.add(self)

    def print_if_unseen(self) -> None:
        error, self.error = self.error, None
        if error is None or sys.stderr is None:
            return
        text = "".join(traceback.format_exception(error))
        # No lock: a finalizer may interrupt any code. Each of these calls is atomic.
        names = _reported.setdefault(text, [])
        names.append(self.name)
        if len(names) > MAX_IDENTICAL_REPORTS:
            return
        sys.stderr.write(f"No code looked at the error of green thread {self.name!r}:\n{text}")
        if len(_reported) > MAX_TRACEBACKS_KEPT:
            for text, names in list(_reported.items()):
                if len(names) <= MAX_IDENTICAL_REPORTS:
                    _reported.pop(text, None)

    __del__ = print_if_unseen


_unseen: WeakSet[UnseenErrorReport] = WeakSet()
_reported: dict[str, list[str]] = {}
"""By the text of a traceback, the names of the green threads that ended by such an error."""


@atexit.register
def _print_all() -> None:
    for each in list(_unseen):
        each.print_if_unseen()
    for text, names in list(_reported.items()):
        more = len(names) - MAX_IDENTICAL_REPORTS
        if more > 0 and sys.stderr is not None:
            sys.stderr.write(
                f"No code looked at the errors of {more} more green threads, the last one "
                f"{names[-1]!r}, with a traceback as above:\n{text.splitlines()[-1]}\n"
            )


os.register_at_fork(after_in_child=_reported.clear)
