"""Promises: a value that is not there yet.

A `Promise` is a `concurrent.futures.Future` that costs one object: no lock and no condition is made
until somebody waits in a way that needs one.

    settler (hub, canceller, user)                  waiter, callback, `await`
    --------------------------------                -------------------------------------
    S1  del self._open      (claims, once)          W1  append a hook to self._hooks
    S2  result, exception, then _state              W2  look at _state: settled? pop hooks myself
    S3  pop hooks one by one, call each

                                                    the standard library's wait(), as_completed()
                                                    --------------------------------
    between S1 and S2: look for a condition; if     C1  make self._made_condition
    there is one, give the claim back, and do       C2  claimed, and not settled? wait for that
    S1, S2 under it and tell self._waiters          C3  under it: look at _state, append to self._waiters

Why nothing is lost or doubled. `del self._open` is one atomic step, so of several settlers exactly
one goes on and the others learn that they lost. A hook is called by whoever pops it from the list,
and `list.pop` is atomic: it runs once. If W1 came before S3 looked, the settler pops the hook; if
it came after, then S2 came before W2, and the waiter finds the promise settled and pops the hook
itself. While many hooks are being called (`_calling`), a new one is called at once and not put
behind them: in a hook, that would be within all that are left.

A pop from the front moves all the rest: 100,000 calls that wait for one promise took seconds so.
Where there are many hooks, their list is turned round, once (`_turn`), and popped from its end from
then on, as `_first` says. Turning takes no hook out and puts none in, so still each is popped by
exactly one. `_first` is set and the list turned in one run of straight-line code, so Ctrl-C finds
both as they belong together; another thread that is popping from the front just then pops from the
wrong end, which is a matter of order only.

**Conditions.** If C1 came before the settler looked, settler and waiter exclude each other by the
condition. If C1 came after that look, it came after S1 too, so C2 sees the claim and waits until S2
is done; C3 then finds the promise settled. So no waiter is installed between a settler's look and
its S2, wherever threads are switched: tests/test_forced_switches.py forces a switch at every
bytecode of either side.

**RUNNING** is set under the condition only, which `set_running_or_notify_cancel` makes. So a
settler that finds no condition has come before it (C2), and `cancel` looks for RUNNING under the
condition.

S1 and S2 stand in one run of straight-line code without a call or a loop: CPython runs signal
handlers only at calls, loop ends and function entries, so Ctrl-C cannot fall between the claim and
the state. Therefore no subclass may make a property of `_result`, `_exception` or `_state`: the
store would be a call. A value that lies elsewhere is opened by `result`, which looks at `_lies`
after the state: work may have become a `LazyTask` during the wait.

CPython 3.11 collects garbage wherever it makes an object, also in the middle of making an
instance's `__dict__` out of what the instance holds inline. What the collection runs may be at the
same promise, or let another thread be, and make a `__dict__` of the same values, which are then
freed twice: the interpreter crashed of it, minutes later. So there a promise has its `__dict__`
from its birth (`DICT_AT_BIRTH`), when nobody else knows it.

This module knows nothing of drones. Whoever works on a promise makes it of a class of its own,
which says how it is withdrawn (`_withdraw`), whether it runs (`running`), and how a waiting thread
can help (`_help`): see pool/task.py."""

from __future__ import annotations

import logging
import sys
import threading
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, main_thread
from time import monotonic
from typing import Any, Generic, NoReturn, TypeVar, cast, overload

from ..runtime.tuning import tuning
from .trampoline import Trampoline

__all__ = ["Promise", "Signal", "Spans", "break_off", "callbacks", "misplaced", "outcome"]

T = TypeVar("T")
U = TypeVar("U")

PENDING = "PENDING"
RUNNING = "RUNNING"
CANCELLED = (
    "CANCELLED_AND_NOTIFIED"  # the standard library's waiters count only the notified state as done
)
FINISHED = "FINISHED"

DICT_AT_BIRTH = sys.version_info < (3, 12)

_MANY = 256
"""Hooks: from more than these on, their list is turned round."""

_chain = Trampoline(deep=50)
"""Promises by `then`, each settled by the one before it."""

_STEPS_SHOWN = 10
"""Of a circle of promises, in a message."""

logging.getLogger("polycephaly").addHandler(
    logging.NullHandler()
)  # the library's own loggers are below it
callbacks = logging.getLogger("concurrent.futures")
"""What users' callbacks raise is told where the standard library's futures tell it, so that it is
never silent."""

green: tuple[Callable[[], bool], Callable[[Promise[Any]], Generator[Any, Any, None]]] | None = None
"""Where green threads are in use: whether the caller is one, between two awaits; how it awaits a
promise."""

waiting: dict[int, tuple[Promise[Any], float | None]] = {}
"""The native threads that wait: for what, and until when (`time.monotonic`; None: for ever)."""

asked_to_end: Callable[[int, bool], bool] | None = None
"""Where green threads are in use: whether what that native thread waits for is to be cancelled;
with True: it was."""

in_turn: Callable[[], bool] | None = None
"""Where there is a hub: whether this thread is in its turn. Code of users is only in a finalizer
there."""


class _Pickling(threading.local):
    stand_in: Callable[[Promise[Any]], tuple[Any, ...]] | None = None


pickling = _Pickling()
"""Where a thread pickles a call's arguments: what goes in place of a promise, as `__reduce__` gives
it."""

settlers: set[int] = set()
"""Threads that settle promises. One that waited for a promise would wait for itself, so it gets an
error."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The life of one piece of work. Times are ``time.monotonic`` seconds, None while not reached.

    ``queued`` (the call; or when the last promise among its arguments had its value), ``sent`` (by
    the hub), ``started`` and ``finished`` (on the drone), ``received`` (by the hub); ``bytes_sent``
    and ``bytes_received`` count the pickles, and ``bytes`` both; ``drone`` is the drone's name."""

    queued: float | None = None
    sent: float | None = None
    started: float | None = None
    finished: float | None = None
    received: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    drone: str | None = None

    @property
    def bytes(self) -> int:
        return self.bytes_sent + self.bytes_received


def misplaced(promise: Promise[Any]) -> TypeError:
    return TypeError(
        "a promise cannot be pickled, so not be in a set, a key, an object or what a function captures: give it as an "
        f"argument, or in lists, tuples and values of dicts that are ({promise!r})"
    )


class Promise(Future[T], Generic[T]):
    """A value to come. Settled once, by a value or an error; every method may be called from any
    thread.

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
    _calling = False  # its hooks, of which there were several
    _gone = 0  # hooks of works that wait no more, about: see pool/inputs.py
    _first = 0  # of `_hooks`, the index of the next to be called: 0, or -1 where they have been turned round
    _made_condition: Condition | None = None
    output: str = ""
    """The tail of what the work printed, once settled (at most 4 KiB)."""

    def __init__(self) -> None:
        # Future.__init__ is left out on purpose: it makes a lock and a condition.
        self._open = None
        if DICT_AT_BIRTH:
            self.__dict__  # noqa: B018 - looking makes it

    # -- asking ------------------------------------------------------------------------------------

    @property
    def value(self) -> T:
        """Waits, then gives the value or raises the error: `result` without a timeout."""
        return self.result()

    def result(self, timeout: float | None = None) -> T:
        """The value, waiting for at most `timeout` seconds.

        Raises what the work raised, `TimeoutError`, or `concurrent.futures.CancelledError`.
        """
        if self._state != FINISHED:
            self._wait(timeout)
        error = self._exception
        if error is None:
            value: T = self._bring_here() if self._lies else self._result
            return value
        try:
            raise error
        finally:
            del error, self  # the traceback must not keep this frame, and so the promise, alive

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, or None where there was a value. Waits like `result`."""
        if self._state != FINISHED:
            self._wait(timeout)
        return self._exception

    def done(self) -> bool:
        """Whether it is settled: by a value, an error, or having been cancelled. Never waits."""
        return self._state == FINISHED or self._state == CANCELLED

    def cancelled(self) -> bool:
        """Whether it was cancelled, as far as is known here."""
        return self._state == CANCELLED

    def running(self) -> bool:
        """Whether the work is being run right now, as far as is known here."""
        return self._state == RUNNING

    @property
    def spans(self) -> Spans:
        """When it was queued, sent, started, finished and received; bytes; drone."""
        return Spans()

    # -- acting ------------------------------------------------------------------------------------

    def cancel(self, running: bool = True) -> bool:
        """Withdraws work that is queued; interrupts work that runs, unless ``running=False``.

        An interrupted drone that does not come back within its grace period is killed and replaced.
        Returns whether the promise is now cancelled: False where it had settled before.
        """
        if not self.done() and not (running and self._can_be_interrupted) and self.running():
            return False
        try:
            self._settle(CANCELLED, None, None, not (running and self._can_be_interrupted))
        finally:  # also where Ctrl-C came between, in a callback: or, by another call, after that
            if self._state == CANCELLED:
                self._withdraw()
        return self._state == CANCELLED

    # -- what those who work on promises say of theirs ---------------------------------------------

    _can_be_interrupted = False
    _cancels_with_waiter = True
    """Whether a green thread or asyncio task that is cancelled while it waits for it cancels it."""

    _may_be_anywhere = False
    """Whether it may also be found in objects among the arguments of a call: it is of a handle, not
    a user's."""

    from_outside = True
    """Whether something else than green threads of this image may settle it."""

    def _withdraw(self) -> None:
        """It was cancelled: its work is to be withdrawn or interrupted. Must not block. Twice is no
        error."""

    def _help(self, end: float | None) -> None:
        """The caller waits: it may do what settles promises, until this one is or
        `time.monotonic()` is `end`."""

    _stands_for: tuple[Future[Any], ...] = ()
    """Of which it tells, while it is not settled."""

    def _waits_for(self) -> Iterable[Future[Any]]:
        """What is to be settled before it can be, as far as is known."""
        return self._stands_for

    _lies = False
    """Whether its value lies somewhere, and is opened only when somebody asks for it here."""

    def _bring_here(self) -> Any:
        """Opens such a value, once, and gives it. Raises what opening it raises."""
        raise NotImplementedError

    def _is_far(self) -> bool:
        """Whether its value lies on another machine, perhaps, with which it may be lost."""
        return False

    def _part(self, registry: Any) -> Any:
        """Such a value as a part of arguments (a `Serialized`), if it can go there as it is."""
        return None

    def _break_off(self) -> None:
        """Ctrl-C has ended the wait for it: whoever presses that wants what it waits for to
        stop."""
        break_off(self._stands_for)

    def _look_up(self) -> None:
        """The caller still waits, and looks up now and then."""

    @overload
    def then(self, fn: Callable[[T], Promise[U]]) -> Promise[U]: ...
    @overload
    def then(self, fn: Callable[[T], U]) -> Promise[U]: ...

    def then(self, fn: Callable[[T], Any]) -> Promise[Any]:
        """A promise of ``fn(value)``; an error passes by `fn`. A promise that `fn` returns is
        followed.

        `fn` is called in the thread that settles this promise, so it must not wait. Where `fn` is
        another promise's ``set_result`` for which this one waits, or gives a promise that waits for
        the one given here, nobody would ever settle them: that raises `Deadlock`, or is what the
        promise is rejected with.

        >>> from polycephaly import Promise
        >>> price = Promise()
        >>> text = price.then(lambda value: value / 2).then(str)
        >>> price.set_result(101)
        >>> text.value
        '50.5'
        """
        if not callable(fn):
            raise TypeError(f"then() takes a callable, which is given the value, not {fn!r}")
        after: Promise[Any] = Promise()
        after._stands_for = (self,)
        receiver = getattr(fn, "__self__", None)  # of a promise's `set_result`
        if isinstance(receiver, Promise) and not self.done():
            _check_no_cycle(self, receiver)
            receiver._stands_for = (self,)

        def follow(inner: Promise[Any]) -> None:
            after._stands_for = ()
            _chain.go(
                after._settle,
                inner._state,
                *((None, None) if inner._state == CANCELLED else outcome(inner)),
            )

        def go_on(done: Promise[Any]) -> None:
            after._stands_for = ()
            if isinstance(receiver, Promise):
                receiver._stands_for = ()
            if done._state == CANCELLED:
                _chain.go(after._settle, CANCELLED, None, None)
                return
            if done._exception is not None:
                _chain.go(after._settle, FINISHED, None, done._exception)
                return
            try:
                value = fn(done.result())
            except BaseException as error:
                _chain.go(after._settle, FINISHED, None, error)
                return
            if isinstance(value, Promise):
                try:
                    _check_no_cycle(value, after)
                except RuntimeError as error:
                    _chain.go(after._settle, FINISHED, None, error)
                    return
                after._stands_for = (value,)
                value._hook(follow)
            else:
                _chain.go(after._settle, FINISHED, value, None)

        self._hook(go_on)
        return after

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Calls ``fn(promise)`` when settled, at once if it is: in the thread that settles it."""
        self._hook(cast(Callable[[Promise[Any]], object], fn))

    def set_result(self, result: T) -> None:
        """Settles by a value. Raises `InvalidStateError` where it is settled already."""
        if not self._settle(FINISHED, result, None):
            raise InvalidStateError(f"{self._state}: {self!r}")

    def set_exception(self, exception: BaseException | None) -> None:
        """Settles by an error. Raises `InvalidStateError` where it is settled already."""
        if not self._settle(FINISHED, None, exception):
            raise InvalidStateError(f"{self._state}: {self!r}")

    def set_running_or_notify_cancel(self) -> bool:
        """For executors, as in the standard library: False where the promise was cancelled."""
        with (
            self._condition
        ):  # whoever settles or cancels it from now on does so under it: see the head of this file
            if self._state == CANCELLED:
                return False
            if self._state != PENDING:
                raise InvalidStateError(f"Future in unexpected state: {self._state}")
            self._state = RUNNING
            return True

    def __await__(self) -> Generator[Any, None, T]:
        in_green = green is not None and green[0]()
        if not self.done():
            if in_green:
                assert green is not None
                yield from green[1](self)
            else:
                yield from self._await_in_asyncio()
        if self._state == CANCELLED and not in_green:
            _raise_asyncio_cancelled()  # to a green thread that is not cancelled itself it is an error like others
        return self.result()

    # -- settling and waiting ----------------------------------------------------------------------

    def _settle(
        self, state: str, result: Any, exception: BaseException | None, unless_running: bool = False
    ) -> bool:
        """Settles unless somebody else did; tells which. See the head of this file."""
        try:
            del self._open
        except AttributeError:
            return False
        if self._made_condition is not None:
            self._open = None  # also if Ctrl-C ends the next call, it is as if nobody had tried
            return self._settle_watched(
                self._made_condition, state, result, exception, unless_running
            )
        self._result = result
        self._exception = exception
        self._state = state
        if self._hooks:
            self._run_hooks()
        return True

    def _settle_watched(
        self,
        condition: Condition,
        state: str,
        result: Any,
        exception: BaseException | None,
        unless_running: bool,
    ) -> bool:
        """The same where the standard library's `wait` or `as_completed` may be at it: they look at
        `_state` and install their waiter under the condition, so it is set, and they are told,
        under the condition too."""
        with condition:
            if unless_running and self._state == RUNNING:
                return False
            try:
                del self._open
            except AttributeError:
                return False
            self._result = result
            self._exception = exception
            self._state = state
            for waiter in self._waiters:
                if state == CANCELLED:
                    waiter.add_cancelled(self)
                elif exception is not None:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            condition.notify_all()
        if self._hooks:
            self._run_hooks()
        return True

    def _hook(self, hook: Callable[[Promise[Any]], object]) -> None:
        if self._calling:
            try:
                hook(self)
            except Exception:
                callbacks.exception("exception calling callback for %r", self)
            return
        hooks = self._hooks
        if hooks is None:
            hooks = []
            if self._hooks is None:  # straight-line code up to here: no other thread comes between
                self._hooks = hooks
            else:
                hooks = self._hooks
        hooks.append(hook)
        if self.done():
            self._run_hooks(self._first)

    def _unhook(self, hook: Callable[[Promise[Any]], object]) -> None:
        """By identity: comparing would run code of users. The look and the removal are
        straight-line code. Where others pop from the front meanwhile, ours may be passed over; then
        it is about to be called."""
        hooks = self._hooks
        index = 0
        while hooks is not None:
            try:
                if hooks[index] is hook:
                    del hooks[index]
                    return
            except IndexError:  # it has been called, or is being called
                return
            index += 1

    def _turn(self, hooks: list[Callable[[Promise[Any]], object]]) -> int:
        if not self._first:  # straight-line code from here on
            self._first = -1
            hooks.reverse()
        return -1

    def _run_hooks(self, first: int = 0) -> None:
        hooks = self._hooks
        if not hooks:
            return
        try:
            hook = hooks.pop(first)
        except IndexError:  # another thread popped the last one
            return
        if hooks:
            try:
                self._run_many(hook, hooks, first)
            finally:  # round a call, since the end of a loop, where Ctrl-C may come, is in no `try` on CPython 3.13
                self._calling = False
            return
        try:
            hook(self)
        except Exception:
            callbacks.exception("exception calling callback for %r", self)

    def _run_many(
        self,
        hook: Callable[[Promise[Any]], object],
        hooks: list[Callable[[Promise[Any]], object]],
        first: int,
    ) -> None:
        self._calling = True
        if len(hooks) > _MANY:
            first = self._turn(hooks)
        worst: BaseException | None = None
        while True:
            try:
                hook(self)
            except Exception:
                callbacks.exception("exception calling callback for %r", self)
            except (
                BaseException
            ) as error:  # SystemExit, Ctrl-C: for whoever settles it, when all have been told
                worst = error
            try:
                hook = hooks.pop(first)
            except IndexError:
                break
        if worst is not None:
            try:
                raise worst
            finally:
                worst = None

    def _wait(self, timeout: float | None) -> None:
        if not self.done():
            if in_turn is not None and in_turn():
                raise RuntimeError(
                    f"a finalizer waited for {self!r} while its thread does what would settle that: "
                    "call `promise`, `close` or `shutdown(wait=False)` in finalizers, and wait elsewhere"
                )
            if get_ident() in settlers:
                raise RuntimeError(
                    f"a callback waited for {self!r} in the thread that settles promises, which would then "
                    "wait for itself; use .then(), or wait in a thread of your own"
                )
            end = None if timeout is None else monotonic() + timeout
            me = get_ident()
            before = waiting.get(me)  # in a callback, while it waits for something else
            try:
                waiting[me] = self, end
                if (
                    self._cancels_with_waiter
                    and asked_to_end is not None
                    and asked_to_end(me, False)
                ):
                    self.cancel()
                self._help(end)
                if not self.done():
                    self._wait_for_settler(timeout, end)
            except KeyboardInterrupt:
                self._break_off()
                raise
            finally:
                if before is None:
                    waiting.pop(me, None)
                else:
                    waiting[me] = before
        if self._state == CANCELLED:
            error = CancelledError()
            error.told = asked_to_end is not None and asked_to_end(get_ident(), True)  # type: ignore[attr-defined]
            raise error

    def _wait_for_settler(self, timeout: float | None, end: float | None) -> None:
        here = allocate_lock()
        here.acquire()

        def wake(_: Promise[Any]) -> None:
            here.release()

        self._hook(wake)
        in_main = get_ident() == main_thread().ident
        longest = tuning.signal_check_seconds if in_main else tuning.settled_check_seconds
        while not self.done():
            left = longest if end is None else min(end - monotonic(), longest)
            if here.acquire(timeout=max(0.0, left)):
                break
            self._look_up()
            if end is not None and monotonic() >= end:
                self._unhook(wake)
                if not self.done():
                    raise TimeoutError(f"{self!r} was not settled within {timeout} s")

    def _await_in_asyncio(self) -> Generator[Any, None, None]:
        import asyncio

        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not turn.done():
                turn.set_result(None)

        def settled(_: Promise[Any]) -> None:
            with suppress(
                RuntimeError
            ):  # the loop was closed in the meantime: nobody is there to be told
                loop.call_soon_threadsafe(wake)

        self._hook(settled)
        try:
            yield from turn
        except asyncio.CancelledError:
            if self._cancels_with_waiter:
                self.cancel()
            raise

    # -- what the standard library's wait() and as_completed() look at -----------------------------

    @property
    def _condition(self) -> Condition:  # type: ignore[override]
        condition = self._made_condition
        if condition is None:
            self.__dict__.setdefault("_waiters", [])
            condition = self.__dict__.setdefault("_made_condition", Condition())
        if (
            not hasattr(self, "_open") and not self.done()
        ):  # the settler may not have seen the condition
            self._wait_for_settler(None, None)
        return condition

    def __reduce__(self) -> tuple[Any, ...]:
        if pickling.stand_in is None:
            raise misplaced(self)
        return pickling.stand_in(self)

    def _named(self) -> str:
        """How it is called in messages."""
        return repr(self)

    def __repr__(self) -> str:
        if self._state == CANCELLED:
            state = "cancelled"
        elif self._state != FINISHED:
            state = "running" if self.running() else "pending"
        elif self._exception is not None:
            state = f"rejected: {type(self._exception).__name__}"
        else:
            state = f"fulfilled: {type(self._result).__name__}"
        return f"<Promise {state} at {id(self):#x}>"

    def _repr_html_(self) -> str:
        from ..integrations.html import promise_table

        return promise_table(self)


class Signal(Promise[T]):
    """One of the library's own, for which many may wait, and which none of them cancels."""

    _cancels_with_waiter = False


def outcome(settled: Future[T]) -> tuple[T | None, BaseException | None]:
    """Its value, its error. A value that lies elsewhere is opened, which may fail."""
    error = settled.exception()
    if error is None:
        try:
            return settled.result(), None
        except Exception as unopened:
            error = unopened
    return None, error


def _raise_asyncio_cancelled() -> NoReturn:
    asyncio = sys.modules["asyncio"]
    raise asyncio.CancelledError()


def _check_no_cycle(waiting: Promise[Any], goal: Promise[Any]) -> None:
    """`goal` is to wait for `waiting`. Raises `Deadlock` where that one waits for it, by whatever
    steps."""
    came_from: dict[Future[Any], Future[Any] | None] = {waiting: None}
    todo: list[Future[Any]] = [waiting]
    while todo:
        step: Future[Any] | None = todo.pop()
        if step is goal:
            path = []
            while isinstance(step, Promise):
                path.append(step._named())
                step = came_from[step]
            path = [*path[::-1], path[-1]]
            if len(path) > _STEPS_SHOWN:
                path[_STEPS_SHOWN // 2 : -_STEPS_SHOWN // 2] = [
                    f"({len(path) - _STEPS_SHOWN} more)"
                ]
            from ..errors import Deadlock

            raise Deadlock(f"promises would wait for each other in a circle: {' -> '.join(path)}")
        if isinstance(step, Promise) and not step.done():
            for each in step._waits_for():
                if each not in came_from:
                    came_from[each] = step
                    todo.append(each)


def break_off(promises: Iterable[Future[Any]]) -> None:
    """The last first: a drone whose call ends by this would begin the next one."""
    for each in reversed(list(promises)):
        if isinstance(each, Promise):
            each._break_off()
