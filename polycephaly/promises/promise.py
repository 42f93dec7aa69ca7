"""A value that is not there yet: `Promise`.

A `Promise` is a `concurrent.futures.Future` that costs one object: no lock and no condition is made
until a thread waits in a way that needs one.

    settler (reactor, canceller, user)            waiter, callback, `await`
    S1  del self._unclaimed  (claims, once)       W1  append a hook to self._hooks
    S2  result, exception, then _state            W2  look at _state: if settled, take the hook out
    S3  reverse the hooks, pop each, call it          again, and call it (a waiter ends its wait)

    between S1 and S2: look for a condition.      the standard library's wait(), as_completed()
    If there is one, the state of S2 is one       C1  make self._made_condition
    of `_UNTOLD`, which the library does not      C2  if claimed but not settled: wait for S2
    know. Before S3: the thread that gets the     C3  holding it: look at _state, append to
    condition sets the final one, notifies            self._waiters

So nothing waits for a condition that a caller holds, and perhaps never gives back.

See docs/decisions/0005-lock-free-promises.md for why no wake-up is lost.

This module does not know drones. Classes derived from `Promise` (pool/task.py) define how it is
withdrawn (`_withdraw`), whether its task runs (`running`) and who may not wait (`_before_wait`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import nullcontext, suppress
from functools import partial
from threading import Condition, main_thread
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload
from weakref import ref

from ..errors import skip_own_frames
from ..runtime import fork_guard, forked
from ..runtime.checks import brief, check_seconds
from ..runtime.clock import monotonic
from ..runtime.safe_log import SafeLog
from ..runtime.signal_handlers import is_of_signal_handler
from ..runtime.tuning import tuning
from . import builder_threads, callbacks_thread
from .builder_threads import release
from .forgotten import ForgottenValue
from .opener_thread import is_settling_thread, settling_threads
from .sealed import Sealed, is_sealed
from .trampoline import Trampoline

if TYPE_CHECKING:
    from .spans import Spans

T = TypeVar("T")
U = TypeVar("U")

PENDING = "PENDING"
RUNNING = "RUNNING"
# The standard library's waiters count only these two states as done.
CANCELLED = "CANCELLED_AND_NOTIFIED"
FINISHED = "FINISHED"
_UNTOLD = {CANCELLED: "CANCELLED", FINISHED: "FINISHED_AND_NOT_NOTIFIED"}
"""Until the standard library's waiters are told of these, they must not see them."""
_DONE = frozenset({*_UNTOLD, *_UNTOLD.values()})
HAS_OUTCOME = frozenset({FINISHED, _UNTOLD[FINISHED]})
"""The states with a value or an error."""

# On CPython 3.11 a `__dict__` that is made later can be freed twice: see decision record 0005.
DICT_AT_CREATION = sys.version_info < (3, 12)

trampoline = Trampoline(max_depth=50)
"""Runs the settling and cancelling of promises that depend on others, to any depth."""

_MAX_SHOWN_STEPS = 10
"""Maximum number of promises of a cycle that an error message shows."""


# All loggers of the package are children of this one.
logging.getLogger("polycephaly").addHandler(logging.NullHandler())
callbacks = SafeLog(logging.getLogger("concurrent.futures"))
"""The standard library's futures log errors of callbacks here. So do promises, so that no error of
a user's callback is silent.
"""

green_hooks: (
    tuple[Callable[[], bool], Callable[[Promise[Any]], Generator[Any, Any, None]]] | None
) = None
"""Set while green threads are in use. The first callable returns whether the caller is a green
thread between two awaits. The second makes a green thread await a promise.
"""

main_thread_calls: deque[Callable[[], object]] = deque()
"""What `call_in_main_thread` has added, and the main thread has not called yet."""
_main_thread_wakers: list[Callable[[], object]] = []
"""Each wakes a wait of the main thread; a wait in a signal handler lies within another."""
if hasattr(os, "register_at_fork"):  # promises work also where no process can be forked
    os.register_at_fork(after_in_child=main_thread_calls.clear)
    os.register_at_fork(after_in_child=_main_thread_wakers.clear)


def call_in_main_thread(callback: Callable[[], object]) -> None:
    """Have the main thread call `callback` while it waits for a promise, because no other thread
    may: a cell's `input`. An interrupt there is one of the wait.
    """
    main_thread_calls.append(callback)
    for wake in tuple(_main_thread_wakers):
        wake()


waiting_threads: dict[int, tuple[Promise[Any], float | None]] = {}
"""For each native thread that waits: the promise, and the deadline (`time.monotonic`; None: no
limit).
"""

is_end_requested: Callable[[int, bool], bool] | None = None
"""Set while green threads are in use. Returns whether the native thread with this id was asked to
end, so that the promise it waits for must be cancelled. True as second argument marks the request
as delivered.
"""

holds_reactor_lock: Callable[[], bool] | None = None
"""Set while there is a reactor. Returns whether this thread holds the reactor's lock. The only user
code that runs under the lock is in finalizers.
"""


class _PicklingState(threading.local):
    context: Any = None
    """The `PicklingContext` (wire/placeholders.py) of the call that this thread is pickling."""
    for_other_process = False
    """True while this thread pickles a value kept by this drone for another process."""
    result_ends: list[Any] | None = None
    """In a drone: the channel ends in the result or error that this thread is pickling."""


def holds_own_lock() -> bool:
    """Return whether this thread holds a lock that the reactor needs. If user code runs here, it is
    in a finalizer.
    """
    return fork_guard.guard.is_held_here() or (
        holds_reactor_lock is not None and holds_reactor_lock()
    )


pickling_state = _PicklingState()

settling_owners: dict[int, Any] = {}
"""By `get_ident()`: the dispatcher or connection whose task is being settled in that thread. Its
end comes after the callbacks that this leads to.
"""
waiters_to_wake: dict[int, list[Any]] = {}
"""By `get_ident()` of the threads of loops: locks that the thread releases before it sleeps. The
threads that wait for these need the interpreter, too, which the loop's thread holds until then.
"""
wait_hooks: dict[int, Callable[[], object]] = {}
"""By `get_ident()` of some threads: what each calls when it begins to wait for a promise."""
if hasattr(os, "register_at_fork"):
    # A thread that a forked child starts may have the id of one of the parent's.
    for _of_threads in (waiting_threads, settling_owners, waiters_to_wake, wait_hooks):
        os.register_at_fork(after_in_child=_of_threads.clear)


class Handle:
    """Base of the objects that arrive as their values in calls: promises, kept and shared values.

    A copy is the same handle.
    """

    __slots__ = ()

    _goes_with_calls = True
    """Read by picklers, because a copy in a forked process cannot stand for the handle."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class NeedsPlaceholder(TypeError):
    """A call contains a handle that can be pickled only with a placeholder among its arguments."""


def misplaced_error(message: str) -> TypeError:
    """Return the error for a handle that is pickled where no arguments can carry it."""
    context = pickling_state.context
    in_call = context is not None and context.snapshot is not None
    return NeedsPlaceholder(message) if in_call else TypeError(message)


class Promise(Future[T], Handle, ForgottenValue, Generic[T]):
    """A value that will exist later.

    A promise is settled once, by a value, by an error or by being cancelled. All methods may be
    called from any thread.

    Examples
    --------
    >>> from polycephaly import Promise
    >>> p = Promise()
    >>> p.set_result(41)
    >>> p.then(lambda v: v + 1).value
    42
    """

    _state: str = PENDING
    _result: Any = None
    _exception: BaseException | None = None
    _hooks: list[Callable[[Promise[Any]], object]] | None = None
    # Approximate number of hooks of tasks that no longer wait: see pool/inputs.py.
    _stale_hooks = 0
    _made_condition: _PromiseCondition | None = None
    output: str = ""
    """The end of the task's output, after the promise is settled (at most 4 KiB)."""

    def __init__(self) -> None:
        # Future.__init__ is not called on purpose, because it makes a lock and a condition.
        self._unclaimed = None
        if DICT_AT_CREATION:
            self.__dict__  # noqa: B018 - reading creates the dict

    # -- state -------------------------------------------------------------------------------------

    @property
    def value(self) -> T:
        """The value that `result` returns without a timeout. Waits, and may raise the error."""
        try:
            return self.result()
        except BaseException:
            __tracebackhide__ = True  # IPython, Jupyter and pytest leave such frames out
            raise
        finally:
            del self  # see `result`

    def result(self, timeout: float | None = None) -> T:
        """Return the value, or raise the task's error.

        Parameters
        ----------
        timeout
            Maximum number of seconds to wait. None: no limit.

        Raises
        ------
        TimeoutError
            If the promise is not settled in time, or its value not unpickled.
        concurrent.futures.CancelledError
            If the promise was cancelled.
        TypeError, ValueError
            If the promise is not settled, and `timeout` is no number of seconds, or NaN.
        RuntimeError
            If this thread would wait for itself: in a callback of a promise or in a finalizer.

        Notes
        -----
        A value that is not small, or that names a class, is unpickled when it is first needed: here
        without a timeout, and otherwise in a thread for that, so that the timeout holds. An error
        of that is raised here. With a timeout of 0 or less, the value of a promise that is done is
        unpickled here.
        """
        began = 0.0 if timeout is None else monotonic()
        if self._state != FINISHED:
            self._wait(timeout)
        error = self._exception
        if error is None:
            value: T = self._result
            return self._open(value, timeout, began) if is_sealed(value) else value
        __tracebackhide__ = True
        try:
            raise error
        finally:
            # The error's traceback has this frame. With references to the error or the promise,
            # the frame would form a cycle, and the locals of all callers would stay alive.
            del error, self

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, or None if there is a value. Wait and raise as `result` does.

        A value that was not unpickled yet is, because that may fail. Not so one on another machine.
        """
        began = 0.0 if timeout is None else monotonic()
        if self._state != FINISHED:
            self._wait(timeout)
        value = self._result
        if self._exception is not None or not is_sealed(value) or value.is_slow():
            return self._exception
        self._await_opening(value, timeout, began)
        if value.error is not None and not value.is_open:
            return value.error
        try:
            self._open(value, None, 0.0)
        except (Exception, SystemExit) as error:
            if is_of_signal_handler(error):
                raise
            return error
        return None

    def _open(self, sealed: Sealed, timeout: float | None, began: float) -> Any:
        """Return the value, as `result` does that was called at `began`."""
        self._await_opening(sealed, timeout, began)
        value = sealed.open()
        request = sealed.request
        if request is not None:  # the thread that was asked may still be at it
            fulfill(request[1])
        if not sealed.stays_sealed:
            self._result = value
        return value

    def _await_opening(self, sealed: Sealed, timeout: float | None, began: float) -> None:
        """Wait until another thread has opened the value, if there is a `timeout` to hold."""
        if timeout is None or not sealed.is_unopened:
            return
        limit = check_seconds("timeout", timeout)
        if limit > 0 and not _must_build_itself():
            opened = request_opening(sealed)
            try:
                opened.result(max(0.0, began + limit - monotonic()))
            except TimeoutError:
                if opened.done() or monotonic() < began + limit:
                    raise  # by a signal handler
                raise TimeoutError(
                    f"the value of {self!r} was not unpickled within {timeout} s"
                ) from None

    def done(self) -> bool:
        """Return whether the promise has a value, has an error or was cancelled. Never waits."""
        return self._state in _DONE

    def cancelled(self) -> bool:
        """Return whether the promise was cancelled, as far as this process knows."""
        return self._state == CANCELLED or self._state == _UNTOLD[CANCELLED]

    def running(self) -> bool:
        """Return whether the task runs now, as far as this process knows."""
        return self._state == RUNNING

    @property
    def spans(self) -> Spans:
        """The times and sizes of the task, and the drone's name. See `Spans`."""
        from .spans import Spans

        return Spans()

    # -- cancelling --------------------------------------------------------------------------------

    def cancel(self, running: bool = True) -> bool:
        """Cancel the promise and withdraw its task if that is queued.

        If the task runs, it is interrupted. A drone that does not react to the interrupt within its
        grace period is killed and replaced.

        Parameters
        ----------
        running
            If False, a task that runs is left alone and the promise is not cancelled.

        Returns
        -------
        bool
            Whether the promise is cancelled now. False if it had already settled.
        """
        if not self.done() and not (running and self._can_be_interrupted) and self.running():
            return False
        try:
            self._settle(CANCELLED, None, None, not (running and self._can_be_interrupted))
        finally:
            # Also if Ctrl-C arrives in a callback. If Ctrl-C arrives later still, the next call of
            # `cancel` withdraws the task.
            if self.cancelled():
                self._withdraw()
        return self.cancelled()

    # -- defined by subclasses ---------------------------------------------------------------------

    _can_be_interrupted = False
    _cancels_with_waiter = True
    """Whether a green thread or asyncio task that is cancelled while waiting for the promise
    cancels the promise too.
    """

    def _cancel_with_waiter(self) -> bool:
        """Cancel the promise, if need be, because a waiter was cancelled. Return as `cancel`."""
        return self._cancels_with_waiter and self.cancel()

    _settled_from_outside = True
    """Whether anything but green threads of this process may settle the promise."""

    def _withdraw(self) -> None:
        """Withdraw or interrupt the task of the cancelled promise.

        Must not block. May be called twice.
        """

    def _before_wait(self, deadline: float | None) -> None:
        """Do what is due before this thread waits, until `deadline` (`time.monotonic`; None: no
        limit) at most. Raise an error if it must not wait.
        """

    _awaited: tuple[Future[Any], ...] = ()
    """The futures that this promise waits for while it is not settled."""

    def _dependencies(self) -> Iterable[Future[Any]]:
        """Return the futures that must settle before this promise can, as far as is known."""
        return self._awaited

    def _get_snapshot(self) -> tuple[bool, bool, Any, BaseException | None]:
        """Return what asyncio looks at, from CPython 3.14 on."""
        settled: tuple[Any, BaseException | None] = (None, None)
        if self.done() and not self.cancelled():
            settled = outcome(self)
        return self.done(), self.cancelled(), *settled

    def _cancel_on_interrupt(self) -> None:
        """Cancel the tasks behind the promise, because Ctrl-C interrupted the wait for it."""
        if self._can_be_interrupted:
            self.cancel()
        else:
            cancel_on_interrupt(self._awaited)

    _needs_callbacks = False
    """Whether callbacks may have to be called before the promise can settle."""

    def _check_in_callback(self) -> None:
        """Raise `RuntimeError` if the promise waits for callbacks. Called in their thread."""
        step = find_callback_awaited((self,))
        if step is not None:
            raise RuntimeError(_CALLBACK_WAITS % step)

    def _on_wait_interval(self) -> None:
        """Do what is due now and then while the caller waits."""

    @overload
    def then(self, fn: Callable[[T], Promise[U]]) -> Promise[U]: ...
    @overload
    def then(self, fn: Callable[[T], U]) -> Promise[U]: ...

    def then(self, fn: Callable[[T], Any]) -> Promise[Any]:
        """Return a promise of ``fn(value)``.

        An error skips `fn`. If `fn` returns a promise, the returned promise follows that one.

        Parameters
        ----------
        fn
            Is called with the value, as a callback: see `add_done_callback`.

        Returns
        -------
        Promise
            Has the value of `fn`, the error of `fn` or the error of this promise.

        Raises
        ------
        TypeError
            If `fn` is not callable.
        Deadlock
            If `fn` is the ``set_result`` of a promise that this one waits for. If `fn` returns a
            promise that waits for the promise returned here, the latter is rejected with
            `Deadlock`. In both cases no thread would ever settle either promise.

        Examples
        --------
        >>> from polycephaly import Promise
        >>> price = Promise()
        >>> text = price.then(lambda value: value / 2).then(str)
        >>> price.set_result(101)
        >>> text.value
        '50.5'
        """
        if not callable(fn):
            raise TypeError(f"then() takes a callable, which is given the value, not {brief(fn)}")
        after: Promise[Any] = Promise()
        set_by_callback(after, self)
        receiver = None  # the promise, if `fn` is its `set_result`
        if getattr(fn, "__name__", "") == "set_result":
            receiver = getattr(fn, "__self__", None)
        if isinstance(receiver, Promise) and not self.done():
            deadlock = _cycle_error(self, receiver)
            if deadlock is not None:
                raise deadlock
            if receiver._awaited:  # that of `gather`, say, which is settled otherwise, too
                receiver = None
            else:
                set_by_callback(receiver, self)
        try:
            # Errors are not logged as of a callback: those of `fn` are for the promise, and others
            # are asynchronous exceptions in this thread.
            self._when_settled(_Callback(partial(_apply_and_follow, fn, after, receiver)))
            return after
        finally:
            del after  # see `_apply_and_follow`

    def add_done_callback(self, fn: Callable[[Promise[T]], object]) -> None:
        """Call ``fn(promise)`` when the promise is settled; at once if it is settled already.

        If a pool settles the promise, `fn` is called in the thread for callbacks, where it delays
        other callbacks only. If a call of yours settles or cancels the promise, `fn` is called in
        that call. An `Exception` of `fn` is logged.
        """
        # What `asyncio.wrap_future` and `run_in_executor` add wakes a loop, which reads the value.
        is_of_asyncio = type(fn) is FunctionType and fn.__module__ == "asyncio.futures"
        hook = WhenOpened(fn) if is_of_asyncio else _Callback(fn)
        try:
            if not self._add_unless_settled(hook):
                self._call_hook(hook)
        finally:
            del fn, hook  # see `_apply_and_follow`

    def _when_settled(self, hook: Callable[[Promise[T]], object]) -> None:
        """See the function `when_settled`."""
        try:
            if not self._add_unless_settled(hook):
                hook(self)
        finally:
            del hook  # see `_apply_and_follow`

    def _add_unless_settled(self, hook: Callable[[Promise[T]], object]) -> bool:
        """Add a hook, and return True, unless the promise is settled, so that the caller has to
        call it.
        """
        if self.done():
            return False
        self._add_hook(hook)
        if self.done():
            try:
                self._hooks.remove(hook)  # type: ignore[union-attr]  # it has been made
            except ValueError:  # the settler calls it
                return True
            return False
        return True

    def _add_hook(self, hook: Callable[[Promise[T]], object]) -> None:
        """Add a callback that is not called here, even if the promise is settled."""
        hooks = self._hooks
        if hooks is None:
            hooks = self.__dict__.setdefault("_hooks", [])  # atomic: the first list stays
        hooks.append(hook)

    def remove_done_callback(self, fn: Callable[[Promise[T]], object]) -> None:
        """Remove `fn` once, if it was added and the promise is not settled yet.

        Pass the very object that was added: callbacks are compared by identity, because any other
        comparison would run code of users.
        """
        # If the list is reversed meanwhile, the scan may pass over `fn`; then `fn` is about to be
        # called.
        hooks = self._hooks
        for hook in hooks or ():
            if hook is fn or (type(hook) in (_Callback, WhenOpened) and hook.fn is fn):  # type: ignore[attr-defined]
                with suppress(ValueError):  # it has been called, or is being called
                    # Atomic: it compares hooks, which are objects of the package, by identity.
                    hooks.remove(hook)  # type: ignore[union-attr]
                return

    def set_result(self, result: T) -> None:
        """Settle the promise with a value.

        Raises
        ------
        InvalidStateError
            If the promise has settled already.
        """
        if not self._settle(FINISHED, result, None):
            raise InvalidStateError(f"{self._state}: {self!r}")

    def set_exception(self, exception: BaseException | None) -> None:
        """Settle the promise with an error.

        Raises
        ------
        InvalidStateError
            If the promise has settled already.
        """
        if not self._settle(FINISHED, None, exception):
            raise InvalidStateError(f"{self._state}: {self!r}")

    def set_running_or_notify_cancel(self) -> bool:
        """Mark the promise as running, as executors of the standard library do.

        Returns
        -------
        bool
            False if the promise was cancelled.

        Raises
        ------
        InvalidStateError
            If the promise is running or has settled otherwise.
        """
        # From now on every thread that settles or cancels the promise looks at the condition: see
        # the module's docstring.
        with self._condition:
            if self.cancelled():
                return False
            if self._state != PENDING:
                raise InvalidStateError(f"Future in unexpected state: {self._state}")
            self._state = RUNNING
            return True

    def __await__(self) -> Generator[Any, None, T]:
        in_green = green_hooks is not None and green_hooks[0]()
        if not self.done():
            if callbacks_thread.callbacks_thread.is_here():
                self._check_in_callback()
            if in_green:
                assert green_hooks is not None
                yield from green_hooks[1](self)
            else:
                yield from self._await_in_asyncio()
        sealed = unopened(self)
        if sealed is not None and (in_green or _is_in_asyncio()):
            yield from request_opening(sealed).__await__()
        if self.cancelled() and not in_green:
            # In a green thread that is not itself cancelled, the cancellation is an error like any
            # other.
            import asyncio

            raise asyncio.CancelledError()
        try:
            return self.result()
        except BaseException:
            __tracebackhide__ = True
            raise
        finally:
            del self  # see `result`

    def debug(self) -> None:
        """Debug the frames of the failed task by pdb, in the terminal of this process.

        Returns when the session has ended; then the frames are released. See
        ``Pool(post_mortem=True)``.

        Raises
        ------
        RuntimeError
            If no frames are kept, with the reason, or this process is not in the foreground of a
            terminal.
        """
        raise RuntimeError(
            f"no frames are kept for {self!r}: only those of a task of a pool with post_mortem=True"
        )

    def release(self) -> None:
        """Release the frames that are kept for `debug`, if there are any."""

    # -- settling and waiting ----------------------------------------------------------------------

    def _settle(
        self, state: str, result: Any, exception: BaseException | None, unless_running: bool = False
    ) -> bool:
        """Settle the promise and return True, or return False if it was claimed before.

        See the module's docstring for the steps.
        """
        try:
            del self._unclaimed
        except AttributeError:
            return False
        condition = self._made_condition
        if condition is None:
            self._result = result
            self._exception = exception
            self._state = state
        else:
            # First, so that a Ctrl-C in the next call leaves no claim behind.
            self._unclaimed = None
            if not self._settle_untold(condition, state, result, exception, unless_running):
                return False
        try:
            if condition is not None:
                condition.tell()
        finally:
            hooks = self._hooks
            if hooks:
                try:
                    hooks.reverse()
                    self._call_hooks()
                finally:
                    if hooks:  # an exception came between two of them, or before the first
                        self._call_hooks()
        return True

    def _settle_untold(
        self,
        condition: _PromiseCondition,
        state: str,
        result: Any,
        exception: BaseException | None,
        unless_running: bool,
    ) -> bool:
        """Settle the promise, of which the condition has to tell the waiters then.

        The standard library's `wait` and `as_completed` look at `_state` and install their waiters
        under the condition. So the state that they know is set, and the waiters are notified, under
        the condition too. A caller may hold it for long, or for ever if it was interrupted in
        these, so nothing waits for that.
        """
        waits = unless_running and not (
            is_settling_thread() or callbacks_thread.callbacks_thread.is_here()
        )
        with condition if waits else nullcontext():  # under which RUNNING is set
            if unless_running and self._state == RUNNING:
                return False
            try:
                del self._unclaimed
            except AttributeError:
                return False
            self._result = result
            self._exception = exception
            self._state = _UNTOLD[state]
            condition.untold_state = state
            return True

    def _tell_waiters(self, state: str, untold: list[Any]) -> None:
        """Tell waiters of the standard library that the promise is settled, and take each out of
        the list before. Called while holding the condition.
        """
        self._state = state
        while untold:
            waiter = untold.pop()
            if state == CANCELLED:
                waiter.add_cancelled(self)
            elif self._exception is not None:
                waiter.add_exception(self)
            else:
                waiter.add_result(self)

    def _call_hooks(self) -> None:
        """Call the hooks, the last one first. One that raises holds up no other."""
        hooks = self._hooks
        worst: BaseException | None = None
        while hooks:
            try:
                hook = hooks.pop()
            except IndexError:  # another thread has taken its own out again
                break
            try:
                hook(self)
            except Exception:
                callbacks.exception("exception calling callback for %r", self)
            # SystemExit and Ctrl-C are raised in this thread after all hooks were called.
            except BaseException as error:
                worst = error
            finally:
                del hook  # see `_apply_and_follow`
        if worst is not None:
            try:
                raise worst
            finally:
                worst = None

    def _call_hook(self, hook: Callable[[Promise[Any]], object]) -> None:
        """Call a callback that was added late. An error is logged, as of any other."""
        try:
            hook(self)
        except Exception:
            callbacks.exception("exception calling callback for %r", self)
        finally:
            del hook  # see `_apply_and_follow`

    def _wait(self, timeout: float | None, opens: bool = True) -> None:
        """Wait until the promise is settled. If this `opens`, that is for the value, so with a
        timeout another thread is asked to open it as soon as it is there.
        """
        if self._state not in _DONE:
            if holds_own_lock():
                raise RuntimeError(
                    f"a finalizer waited for {self!r} in a thread that holds the reactor's lock, "
                    "so that the promise could not be settled: call `promise`, `close` or "
                    "`shutdown(wait=False)` in finalizers, and wait elsewhere"
                )
            me = get_ident()
            if me in settling_threads:
                raise RuntimeError(
                    f"code that rebuilds a result, for example, waited for {self!r} in the thread "
                    "that settles promises, which would then wait for itself: use another thread"
                )
            if callbacks_thread.callbacks_thread.is_here():
                self._check_in_callback()
            if green_hooks is not None:
                check_can_wait((self,))
            deadline = None if timeout is None else monotonic() + check_seconds("timeout", timeout)
            outer = waiting_threads.get(me)  # set if a callback waits for another promise
            try:
                waiting_threads[me] = self, deadline
                if me in wait_hooks:
                    wait_hooks[me]()
                if is_end_requested is not None and is_end_requested(me, False):
                    self._cancel_with_waiter()
                self._before_wait(deadline)
                if self._state not in _DONE:
                    self._wait_for_settler(timeout, deadline, opens)
            except KeyboardInterrupt:
                self._cancel_on_interrupt()
                raise
            finally:
                if outer is None:
                    waiting_threads.pop(me, None)
                else:
                    waiting_threads[me] = outer
        if self._state not in HAS_OUTCOME:
            error = CancelledError()
            error.waiter_cancelled = (  # type: ignore[attr-defined]
                is_end_requested is not None and is_end_requested(get_ident(), True)
            )
            try:
                raise error
            finally:
                del error, self  # see `result`

    def _wait_for_settler(
        self, timeout: float | None, deadline: float | None, opens: bool = False
    ) -> None:
        woken = allocate_lock()
        woken.acquire()

        def wake(_: Promise[Any] | None = None) -> None:
            later = waiters_to_wake.get(get_ident())
            if later is not None:
                later.append(woken)
            else:
                release(woken)

        in_main = get_ident() == main_thread().ident
        interval = tuning.signal_check_seconds if in_main else tuning.settled_check_seconds
        try:
            if in_main:
                _main_thread_wakers.append(wake)
            # If the promise is settled meanwhile, other callbacks are not this thread's to call:
            # it would be late, or the caller hold a lock that they need.
            self._add_hook(wake if timeout is None or not opens else WhenOpened(wake))
            while self._state not in _DONE:
                if in_main and main_thread_calls:
                    try:
                        call = main_thread_calls.popleft()
                    except IndexError:  # a wait in a signal handler was first
                        continue
                    call()
                    continue
                seconds = interval
                if deadline is not None:
                    seconds = max(0.0, min(deadline - monotonic(), interval))
                if not woken.acquire(timeout=seconds):
                    self._on_wait_interval()
                    if callbacks_thread.callbacks_thread.is_here():
                        self._check_in_callback()  # it may wait for something else by now
                    if deadline is not None and monotonic() >= deadline and not self.done():
                        raise TimeoutError(f"{self!r} was not settled within {timeout} s")
        finally:
            try:
                if wake in _main_thread_wakers:
                    _main_thread_wakers.remove(wake)
            finally:
                if self._state not in _DONE:
                    self.remove_done_callback(wake)

    def _await_in_asyncio(self) -> Generator[Any, None, None]:
        import asyncio

        loop = asyncio.get_running_loop()
        wakeup: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not wakeup.done():
                wakeup.set_result(None)

        def on_settled(_: Promise[Any]) -> None:
            # RuntimeError: the loop was closed in the meantime, so no task is left to wake.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        self._when_settled(WhenOpened(on_settled))  # so that the loop is woken once
        try:
            yield from wakeup
        except asyncio.CancelledError:
            self.remove_done_callback(on_settled)
            self._cancel_with_waiter()
            raise

    # -- what the standard library's wait() and as_completed() look at -----------------------------

    @property
    def _condition(self) -> Condition:  # type: ignore[override]
        condition = self._made_condition
        if condition is None:
            self.__dict__.setdefault("_waiters", [])
            condition = self.__dict__.setdefault("_made_condition", _PromiseCondition(self))
        # Claimed, but the settler may not have seen the condition.
        if not hasattr(self, "_unclaimed") and not self.done():
            self._wait_for_settler(None, None)
        return condition

    def __reduce__(self) -> tuple[Any, ...]:
        context = pickling_state.context
        if context is None or context.inputs is None:
            raise misplaced_error(
                "a promise can be pickled only for a call, as or inside the function or its "
                f"arguments: return or send its value instead ({self!r})"
            )
        placeholder: tuple[Any, ...] = context.add_input(self)
        return placeholder

    def _description(self) -> str:
        """Return the name of this promise for messages."""
        return repr(self)

    def _label(self) -> str | None:
        """Return the name of the task's function, if there is a task."""

    def __repr__(self) -> str:
        if self.cancelled():
            state = "cancelled"
        elif not self.done():
            state = "running" if self.running() else "pending"
        elif self._exception is not None:
            state = f"rejected: {type(self._exception).__name__}"
        else:
            value = self._result
            state = "fulfilled"
            if not is_sealed(value) or value.is_open:
                state += f": {type(value.open() if is_sealed(value) else value).__name__}"
        return f"<Promise {state} at {id(self):#x}>"

    def _repr_html_(self) -> str:
        from .html import promise_table

        return promise_table(self)


class _PromiseCondition(Condition):
    """The condition of a promise. If the promise was settled while a thread held the condition, the
    next thread that takes it or gives it back tells the waiters.
    """

    _lock: Any
    _is_owned: Callable[[], bool]

    def __init__(self, promise: Promise[Any]) -> None:
        super().__init__()
        for name in ("acquire", "release", "_release_save"):
            vars(self).pop(name, None)  # those of the lock
        self.untold_state: str | None = None
        """The state of the promise of which the waiters have not been told yet."""
        self._untold: list[Any] | None = None  # those that were not, once some were
        self._promise = ref(promise)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_first = not self._is_owned()
        if not self._lock.acquire(blocking, timeout):
            return False
        if is_first and self.untold_state is not None:
            self._tell()
        return True

    def release(self) -> None:
        self._lock.release()
        if self.untold_state is not None:
            self.tell()

    def _release_save(self) -> Any:  # of `wait`
        saved = self._lock._release_save()
        if self.untold_state is not None:
            self.tell()
        return saved

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def tell(self) -> None:
        """Tell the waiters, unless a thread holds the condition, which will when it gives it back.

        `untold_state` is set before a look at the lock, and looked at after each release: so one of
        the two threads sees the other.
        """
        while (
            self.untold_state is not None
            and not self._is_owned()
            and self._lock.acquire(blocking=False)
        ):
            try:
                self._tell()
            finally:
                self._lock.release()

    def _tell(self) -> None:
        promise, state = self._promise(), self.untold_state
        if promise is not None and state is not None:
            if self._untold is None:
                self._untold = promise._waiters[::-1]
            promise._tell_waiters(state, self._untold)
            self.notify_all()
        self.untold_state = None


class _Callback:
    """A callback of a user, as a hook of a promise."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[Any], object]) -> None:
        self.fn = fn

    def __call__(self, promise: Promise[Any]) -> None:
        if not is_settling_thread():
            fn = self.fn
            del self
            try:
                fn(promise)
            finally:
                del fn, promise  # see `_apply_and_follow`
            return
        # Of the task whose end settles this promise, if that is another one.
        owner = settling_owners.get(get_ident())
        if owner is not None:
            owner.on_callback()
        callbacks_thread.callbacks_thread.add(partial(_call_back, self.fn, promise, owner))


class WhenOpened:
    """A hook of a promise that is called, after the value was opened, in the thread that did so."""

    __slots__ = ("fn",)

    def __init__(self, fn: Callable[[Any], object]) -> None:
        self.fn = fn

    def __call__(self, promise: Future[Any]) -> None:
        sealed = unopened(promise)
        if sealed is not None:
            when_settled(request_opening(sealed), lambda _: self.fn(promise))
        else:
            self.fn(promise)


def unopened(settled: Future[Any]) -> Sealed | None:
    """Return the sealed value of `settled`, if that has to be built by the thread that reads it."""
    value = stored_value(settled) if isinstance(settled, Promise) else None
    return value if is_sealed(value) and value.is_unopened else None


def request_opening(sealed: Sealed) -> Promise[None]:
    """Have a thread for that open a value. Return a promise that settles when it has tried to, or
    if there is none.
    """
    request = sealed.request
    if request is not None and request[0] == forked.generation:
        pending: Promise[None] = request[1]
        return pending
    opened: Promise[None] = Signal()
    if builder_threads.builder_threads.add(partial(_open_for_others, sealed, opened)):
        # After that, so that an exception in this thread leaves no request that nobody answers.
        sealed.request = forked.generation, opened
        if sealed.is_open:  # since then, by a thread that may not have seen the request
            fulfill(opened)
    else:
        fulfill(opened)
    return opened


def _open_for_others(sealed: Sealed, opened: Promise[None]) -> None:
    generation, error = forked.generation, None
    try:
        # The thread that asked may not have come to it yet, and another would ask anew, so that the
        # value was built twice.
        if sealed.request is None or sealed.request[0] != generation:
            sealed.request = generation, opened
        try:
            sealed.open()
        except BaseException as raised:
            error = raised.with_traceback(skip_own_frames(raised.__traceback__))
        forked.exit_if_forked(generation, error)
        if error is not None and not sealed.is_open:
            sealed.error = error
        fulfill(opened)
        sealed.request = None
    finally:
        del sealed, opened, error  # the error's traceback has this frame


def _must_build_itself() -> bool:
    """Return whether this thread must not wait for one that builds values: it is one of these, or
    settles promises.
    """
    return is_settling_thread() or holds_own_lock() or builder_threads.builder_threads.is_here()


def _is_in_asyncio() -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


def _call_back(fn: Callable[[Any], object], promise: Promise[Any], owner: Any) -> None:
    generation = forked.generation
    try:
        fn(promise)
    except BaseException as error:  # SystemExit too: this thread serves all
        forked.exit_if_forked(generation, error)
        callbacks.exception("exception calling callback for %r", promise)
    finally:
        del fn, promise  # see `_apply_and_follow`
    forked.exit_if_forked(generation)
    if owner is not None:
        owner.on_called_back()


class Signal(Promise[T]):
    """A promise of the package itself. Many may wait for this promise, and no waiter cancels it."""

    _cancels_with_waiter = False


def fulfill(promise: Promise[Any], value: object = None) -> bool:
    """Settle `promise` with `value`. Return False if the promise was settled before."""
    return promise._settle(FINISHED, value, None)


def settle_promise(promise: Promise[Any], value: Any, error: BaseException | None) -> None:
    """Settle `promise`, unless it is settled. An exception in one of its callbacks is logged, so
    that those after it are settled too. If there is no memory, it is rejected for that.
    """
    try:
        promise._settle(FINISHED, value, error)
    except BaseException as raised:
        if promise.done():
            callbacks.exception("a callback of %r failed", promise)
        else:
            promise._settle(FINISHED, None, raised)


def reject(promise: Promise[Any], error: BaseException) -> bool:
    """Settle `promise` with `error`. Return False if the promise was settled before."""
    return promise._settle(FINISHED, None, error)


def when_settled(future: Future[Any], hook: Callable[[Any], object]) -> None:
    """Have `hook` called when `future` is settled; at once if it is settled already. That of a
    `Promise` is called in the thread that settles it: it neither blocks nor runs code of users.
    """
    try:
        if isinstance(future, Promise):
            future._when_settled(hook)
        else:
            future.add_done_callback(hook)
    finally:
        del hook  # no cycle through the traceback of an error of the hook


def set_by_callback(promise: Promise[Any], *awaited: Promise[Any]) -> None:
    """Say that a callback of `awaited` settles `promise`. Without any, it is running."""
    promise._awaited, promise._needs_callbacks = awaited, bool(awaited)


def name_of(promise: Promise[Any]) -> str:
    """Return the name of `promise` for messages."""
    return promise._description()


def stored_error(settled: Promise[Any]) -> BaseException | None:
    """Return the error that `settled` was rejected with.

    Unlike `Promise.exception`, this neither waits nor opens a value.
    """
    return settled._exception


def stored_value(settled: Future[Any]) -> Any:
    """Return the value that `settled` has been fulfilled with, which may be sealed."""
    return settled._result


def stored_outcome(settled: Future[Any]) -> tuple[Any, BaseException | None]:
    """Return the value, which may be sealed, and the error of `settled`, to settle another promise
    with.
    """
    if isinstance(settled, Promise):
        return stored_value(settled), stored_error(settled)
    return outcome(settled)


def wait_settled(promise: Promise[Any], timeout: float | None) -> None:
    """Wait until `promise` is settled, without opening its value. Raise as `Promise.result` if it
    is not in time, or was cancelled.
    """
    if not promise.done() or promise.cancelled():
        promise._wait(timeout, opens=False)


def outcome(settled: Future[T]) -> tuple[T | None, BaseException | None]:
    """Return the value and the error of `settled`.

    Opens a value, which may fail.
    """
    if settled.cancelled():
        return None, None
    error = settled.exception()
    if error is not None:
        return None, error
    try:
        return settled.result(), None
    except Exception as unopened:
        return None, unopened
    finally:
        del settled  # see `Promise.result`


def _apply_and_follow(
    fn: Callable[[Any], Any], after: Promise[Any], receiver: object, done: Promise[Any]
) -> None:
    """Settle `after`, the promise that ``done.then(fn)`` has returned."""
    set_by_callback(after)
    if isinstance(receiver, Promise):
        set_by_callback(receiver)
    value: Any = None
    try:
        if done.cancelled() or done._exception is not None:
            _follow(after, done)
            return
        try:
            value = fn(done.result())
        except BaseException as error:
            trampoline.run(after._settle, FINISHED, None, error)
            return
        if not isinstance(value, Promise):
            trampoline.run(after._settle, FINISHED, value, None)
        elif (deadlock := _cycle_error(value, after)) is not None:
            trampoline.run(after._settle, FINISHED, None, deadlock)
        else:
            after._awaited = (value,)
            when_settled(value, partial(_follow, after))
    finally:
        # The traceback of an error of `fn` leads to this frame, and to those that have called it.
        # With references to `after`, which has the error, they would form a cycle.
        del after, value


def _follow(after: Promise[Any], inner: Promise[Any]) -> None:
    after._awaited = ()
    try:
        state = CANCELLED if inner.cancelled() else FINISHED
        trampoline.run(after._settle, state, *stored_outcome(inner))
    finally:
        del after  # as above


def _cycle_error(start: Promise[Any], goal: Promise[Any]) -> Exception | None:
    """Return a `Deadlock` if `start` waits for `goal`, by any number of steps; else None.

    `goal` is about to wait for `start`.
    """
    came_from: dict[Future[Any], Future[Any] | None] = {start: None}
    todo: list[Future[Any]] = [start]
    while todo:
        step: Future[Any] | None = todo.pop()
        if step is goal:
            path = []
            while isinstance(step, Promise):
                path.append(name_of(step))
                step = came_from[step]
            path = [*path[::-1], path[-1]]
            if len(path) > _MAX_SHOWN_STEPS:
                path[_MAX_SHOWN_STEPS // 2 : -_MAX_SHOWN_STEPS // 2] = [
                    f"({len(path) - _MAX_SHOWN_STEPS} more)"
                ]
            from ..errors import Deadlock

            return Deadlock(f"promises would wait for each other in a circle: {' -> '.join(path)}")
        if isinstance(step, Promise) and not step.done():
            for each in step._dependencies():
                if each not in came_from:
                    came_from[each] = step
                    todo.append(each)
    return None


def check_can_wait(promises: Iterable[Future[Any]]) -> None:
    """Raise `RuntimeError` if the caller is a green thread between two awaits, and `promises` wait
    for another green thread, which could not run meanwhile.
    """
    if green_hooks is None or not green_hooks[0]():
        return
    for step in pending_upstream(promises, set()):
        if not step._settled_from_outside:
            raise RuntimeError(
                f"a promise of {step!r} was waited for inside a coroutine, where waiting would "
                "stop every green thread, that one too; use `await` or `async for`"
            )


_CALLBACK_WAITS = (
    "a callback waited for %r in the thread that calls callbacks, which would then wait for "
    "itself: use .then(), or wait in another thread"
)


def find_callback_awaited(promises: Iterable[Future[Any]]) -> Promise[Any] | None:
    """Return the first of these promises, and of those that they wait for, that may need a callback
    to settle.
    """
    return next((each for each in pending_upstream(promises, set()) if each._needs_callbacks), None)


def check_any_in_callback(promises: Iterable[Future[Any]]) -> None:
    """Raise `RuntimeError` if all of `promises` wait for callbacks, and the caller is in their
    thread.
    """
    if callbacks_thread.callbacks_thread.is_here():
        steps = [find_callback_awaited((each,)) for each in promises]
        if steps and None not in steps:
            raise RuntimeError(_CALLBACK_WAITS % steps[0])


def pending_upstream(
    promises: Iterable[Future[Any]], seen: set[Promise[Any]]
) -> Iterator[Promise[Any]]:
    """Yield those of `promises`, and of the promises that they wait for, that are not settled and
    not `seen` before. Each is added to `seen`.
    """
    todo = list(promises)
    while todo:
        step = todo.pop()
        if isinstance(step, Promise) and step not in seen and not step.done():
            seen.add(step)
            yield step
            todo += step._dependencies()


def cancel_on_interrupt(promises: Iterable[Future[Any]]) -> None:
    """Cancel the tasks behind `promises`, the last one first.

    A drone whose task ends by this would otherwise start the next one.
    """
    for each in reversed(list(promises)):
        if isinstance(each, Promise):
            trampoline.run(each._cancel_on_interrupt)
