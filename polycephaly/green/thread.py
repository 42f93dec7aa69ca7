"""Green threads: a coroutine, or a plain function, that runs beside the others, and is the promise
of its value.

    spawn(async def) ──> GreenThread ──> scheduler.ready ──> steps on the owner ──> value or error
    spawn(plain def) ──> NativeThread ──> a native thread of the cache ───────────> value or error

Cancelling asks: `Cancelled` is raised at the await where the thread is parked, or at its next one,
and the promise is settled when the thread has ended, its `finally` clauses included. A plain
function cannot be broken off in the middle of foreign code; where it waits for a channel, a green
thread or a drone's work, it is, and cancels that."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from _thread import get_ident
from asyncio import CancelledError as AsyncioCancelled
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import CancelledError
from contextvars import copy_context
from time import monotonic, thread_time
from types import CoroutineType, FrameType, GeneratorType, coroutine
from typing import TYPE_CHECKING, Any, TypeVar, overload
from weakref import WeakSet

from ..promises import promise as promises
from ..promises.promise import CANCELLED, FINISHED, Promise
from ..runtime import forked
from ..runtime.coroutines import is_awaitable, is_coroutine, is_coroutine_function
from ..runtime.deferred_sigint import DeferredSigint
from ..timeline.trail import LIVES, SHORTEST, trail
from .history import history
from .scheduler import AWAY, NO_CALL, PARK, PARKED, InContext, Interrupted, bare, foreign, scheduler

if TYPE_CHECKING:
    from .group import Group

__all__ = [
    "Cancelled",
    "GreenThread",
    "NativeThread",
    "Wake",
    "here",
    "outside",
    "pause",
    "spawn",
    "start",
]

T = TypeVar("T")

SHORT = 0.0005  # seconds: a call that was sent away for nothing


class Cancelled(AsyncioCancelled):
    """Raised at the await of a green thread that is cancelled. Let it pass: it ends the thread.

    Like `asyncio.CancelledError`, of which it is one, it is not an `Exception`.
    """

    is_cancel = False
    """It is that of `cancel()`, and not of a time limit or a group."""

    in_call = False
    """It came while the thread was in a foreign call, which cannot be broken off."""

    called_off = False
    """Whoever asked for it does not want it any more: it is dropped, if it has not been raised
    yet."""


class GreenThread(Promise[T]):
    """A green thread is the promise of its value. `name` tells it from others in reports."""

    __slots__ = ("_coro", "_group", "_open", "_value")

    _group: Group | None
    _name: str | None = None
    _qualname: str | None = None  # once there is no coroutine to ask
    _unseen: Unseen | None = None
    _owned: WeakSet[Any] | None = None
    _since: float | None = None  # when it was spawned, if that is told
    _number = 0  # in the trail
    _cancels = 0
    """How often a `cancel()` has reached it: a time limit on top of that must not make a
    `TimeoutError` of it."""

    def __init__(self, coro: Any, group: Group | None = None) -> None:
        self._open = None
        self._coro = coro
        self._value: Any = None
        self._group = group

    @property
    def name(self) -> str:
        """As given to `spawn`, or else the function's qualified name."""
        return self._name or self._qualname or _qualname(self._coro)

    # -- its end: the owner calls these ------------------------------------------------------------

    def _finish(self, value: T) -> None:
        self._end(FINISHED, value, None)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, (RuntimeError, AttributeError)) and _is_of_asyncio(
            error
        ):  # it has looked for its loop
            error = foreign(error)
        if error.__traceback__ is not None:  # the scheduler's own frame tells nobody anything
            error.__traceback__ = error.__traceback__.tb_next
        if isinstance(error, AsyncioCancelled):
            self._end(CANCELLED, None, None)
        else:
            self._end(FINISHED, None, error)

    def _end(self, state: str, value: Any, error: BaseException | None) -> None:
        room: dict[str, Any] = {}
        del room  # as in `_hook`
        self.__dict__  # noqa: B018
        scheduler.live.discard(self)
        group = self._group
        self._qualname = self.name
        if self._since is not None and monotonic() - self._since >= SHORTEST:
            trail.ended(self, self._since, error is not None)
        if error is not None and group is None and not self._hooks:
            self._unseen = Unseen(self._qualname, error)
        self._coro = None
        for each in self._owned or ():
            each.kill()
        try:
            self._settle(state, value, error)
        finally:  # a callback may raise what is no `Exception`
            if group is not None:
                group._ended(self, error)

    # -- acting on it ------------------------------------------------------------------------------

    _can_be_interrupted = True
    from_outside = False

    def cancel(self, running: bool = True) -> bool:
        """Asks it to end: `Cancelled` is raised at the await where it is, or at its next one. From
        any thread.

        Returns whether it was still going. The promise is settled when it has ended: as cancelled,
        unless it caught `Cancelled` and returned something all the same."""
        if self.done():
            return self._state == CANCELLED
        error = Cancelled()
        error.is_cancel = True
        self._interrupt(error)
        return True

    def _interrupt(self, error: BaseException) -> None:
        """Has `error` raised at an await of it, once. From any thread."""
        if (
            get_ident() == scheduler.owner
            and self._value is not PARKED
            and self is not scheduler.current
        ):
            self._throw(error)  # it has not begun yet, say: then it never will
        else:
            scheduler.post(lambda: self._throw(error))

    def _throw(self, error: BaseException) -> Any:
        """The owner, in a note: now, where it is parked. See `Interrupted` for where it is not."""
        if self._coro is not None and self._value is not PARKED:
            if isinstance(error, Cancelled):
                error.in_call = self._value is AWAY
            if type(self._coro) is Interrupted:
                self._coro.errors.append(error)
            else:
                Interrupted(self, error)
            return PARK
        if self._coro is not None and not getattr(error, "called_off", False):
            self._cancels += getattr(error, "is_cancel", False)
            return scheduler.run_step(self, self._coro.throw, error)
        return PARK

    def running(self) -> bool:
        return not self.done()

    def own(self, killable: Any) -> None:
        """Something that ends with this green thread: its `kill` is called then, if it is still
        there."""
        if self._owned is None:
            self._owned = WeakSet()
        self._owned.add(killable)

    @coroutine
    def _call_elsewhere(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Generator[Any, Any, Any]:
        """Its foreign call, on another native thread."""
        before = copy_context()
        context = before.copy()
        wake = Wake()
        outcome: list[Any] = []

        def job() -> None:
            natives[get_ident()] = self
            generation = forked.generation
            began, used = monotonic(), thread_time()
            try:
                outcome[:] = context.run(fn, *args, **kwargs), None
            except BaseException as error:
                outcome[:] = None, error
            forked.leave_if_forked(generation, outcome[1])
            trail.called(self, fn, args, began, outcome[1] is not None, thread_time() - used)
            if monotonic() - began < SHORT:
                history.was_short(fn)
            del natives[get_ident()]
            scheduler.away -= 1
            wake()

        scheduler.away += 1
        self._value = AWAY  # a foreign call cannot be broken off: interrupted is the await after it
        try:
            self._send_away(job)
        except RuntimeError:  # no native thread is to be had
            scheduler.away -= 1
            self._value = PARKED
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

    def _send_away(self, job: Callable[[], None]) -> None:
        scheduler.workers.start(job)

    # -- being looked at ---------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            self._may_wait()
        try:
            return super().result(timeout)
        finally:
            self._look()
            del self  # as in `Promise.result`: no cycle through the error's traceback

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._may_wait()
        try:
            return super().exception(timeout)
        finally:  # it may have ended only now
            self._look()

    def _look(self) -> None:
        if self._unseen is not None:
            self._unseen.seen()
            self._unseen = None

    def _hook(self, hook: Callable[[Promise[Any]], object]) -> None:
        # See promises/promise.py. At birth, a `__dict__` would be 64 bytes for each that waits;
        # made in the place of one that has just been freed, it comes without a collection.
        room: dict[str, Any] = {}
        del room
        self.__dict__  # noqa: B018
        self._look()
        super()._hook(hook)

    def _may_wait(self) -> None:
        scheduler.step_aside()
        if scheduler.in_step():
            raise RuntimeError(
                f"{self.name} was waited for inside a coroutine, where waiting would stop every green thread, "
                "this one too; use `await promise`"
            )

    def _help(self, end: float | None) -> None:
        if end is None:
            self._look_up()

    def _look_up(self) -> None:
        # Who waits here, or has just ended, may have been the last who could wake the others: the
        # scheduler is to look.
        if scheduler.bell:
            scheduler.ring()

    def __repr__(self) -> str:
        return super().__repr__().replace("<Promise", f"<GreenThread {self.name}", 1)


Own: type[GreenThread[Any]] = GreenThread
"""The class of this image's. A forked child has another one: its parent's, in a channel's slot, are
known by that."""


def _another_image() -> None:
    global Own
    natives.clear()
    Own = type(
        "GreenThread",
        (GreenThread,),
        {"__slots__": (), "__module__": __name__, "__qualname__": "GreenThread"},
    )


class NativeThread(GreenThread[T]):
    """A plain function as a green thread: one foreign call on a native thread."""

    __slots__ = ("_asked_to_end", "_ident", "_told")

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], group: Group | None = None
    ) -> None:
        super().__init__(None, group)
        self._ident = 0  # of the native thread that runs it
        self._asked_to_end = self._told = False
        self._qualname = _qualname(fn)

    def begin(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        context = copy_context()
        with DeferredSigint():
            scheduler.live.add(self)
            scheduler.away += 1
            try:
                scheduler.workers.start(lambda: context.run(self._run, fn, args))
            except RuntimeError:  # no native thread is to be had
                scheduler.live.discard(self)
                scheduler.away -= 1
                raise

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._ident = ident = get_ident()
        natives[ident] = self
        began, used = monotonic(), thread_time()
        value: Any = None
        told: BaseException | None = None
        state = FINISHED
        generation = forked.generation
        try:
            if self._asked_to_end:
                raise Cancelled
            value = fn(*args)
        except BaseException as error:
            if isinstance(error, (CancelledError, AsyncioCancelled)) and self._asked_to_end:
                state = CANCELLED
            else:
                told = error
                if error.__traceback__ is not None:
                    error.__traceback__ = error.__traceback__.tb_next
        forked.leave_if_forked(generation, told)
        trail.called(self, fn, args, began, told is not None, thread_time() - used)
        self._ident = 0
        del natives[ident]
        scheduler.away -= 1
        if is_awaitable(value):  # of a lambda around a coroutine function, say
            self._coro = InContext(as_coroutine(value, self.name), copy_context())
            if self._asked_to_end and not self._told:
                Interrupted(self, Cancelled())
            scheduler.ready.append(self)
            if scheduler.bell:
                scheduler.ring()
        elif self._group is not None:
            scheduler.post(lambda: self._end(state, value, told))  # groups are the owner's
        else:
            self._end(state, value, told)
            if (
                scheduler.bell and promises.waiting
            ):  # it may have been the last who could wake the others
                scheduler.ring()

    def cancel(self, running: bool = True) -> bool:
        """As for any green thread; a plain function that is in foreign code goes on: False."""
        if self._coro is not None:
            return super().cancel(running)
        if self.done():
            return self._state == CANCELLED
        self._asked_to_end, self._told = True, False
        if self._coro is not None:  # it has just become one that is run by the scheduler
            return super().cancel(running)
        ident = self._ident
        if not ident:
            return True
        # Who begins to wait says so (`waiting`), then looks whether it was asked to end; this asks,
        # then looks whether it waits: one sees the other. Another job may have begun on that native
        # thread since: `natives` tells.
        waits = promises.waiting.get(ident)
        if waits is None or natives.get(ident) is not self or not waits[0]._cancels_with_waiter:
            return self.done() and self._state == CANCELLED
        return waits[0].cancel()

    @property
    def in_foreign_code(self) -> int:
        """The native thread it runs on, 0 where it runs on none."""
        return self._ident


@overload
def spawn(
    fn: Coroutine[Any, Any, T], /, *, name: str | None = None, bound: bool = False
) -> GreenThread[T]: ...
@overload
def spawn(
    fn: Callable[..., Awaitable[T]], /, *args: Any, name: str | None = None, bound: bool = False
) -> GreenThread[T]: ...
@overload
def spawn(
    fn: Callable[..., T], /, *args: Any, name: str | None = None, bound: bool = False
) -> GreenThread[T]: ...


def spawn(fn: Any, /, *args: Any, name: str | None = None, bound: bool = False) -> GreenThread[Any]:
    """Starts a green thread that runs ``fn(*args)`` beside this one; a promise of its value. From
    anywhere.

    A coroutine function is run by the scheduler: atomically between two awaits, one at a time with
    all others. A plain function is run on a native thread of its own meanwhile; if what it gives
    can be awaited, it is. With ``bound=True`` all steps of a coroutine function, and the foreign
    calls it makes, are run on one native thread, for objects that belong to the thread that made
    them (`sqlite3`, GUIs). A coroutine object is taken as well.

    Raises `TypeError` where `fn` cannot be called so. An error nobody looks at is printed, with
    `name`; who passes the promise on (`then`, `gather`) has looked.

    >>> from polycephaly import green
    >>> async def double(x):
    ...     return 2 * x
    >>> green.spawn(double, 4).value, green.spawn(pow, 2, 8).value
    (8, 256)
    """
    return start(fn, args, None, name, bound)


def start(
    fn: Any,
    args: tuple[Any, ...],
    group: Group | None = None,
    name: str | None = None,
    bound: bool = False,
) -> GreenThread[Any]:
    thread: GreenThread[Any]
    if is_coroutine(fn):
        if args:
            raise TypeError(f"a coroutine takes no arguments any more: {fn!r}, {args!r}")
        coro = as_coroutine(fn, _qualname(fn))
    elif is_coroutine_function(fn):
        coro = as_coroutine(fn(*args), _qualname(fn))
    elif callable(fn):
        native: NativeThread[Any] = NativeThread(fn, args, group)
        if name:
            native._name = name
        if group is not None:
            group.children.add(native)
        if len(scheduler.live) < LIVES:
            native._since = monotonic()
        try:
            native.begin(fn, args)
        except RuntimeError:
            if group is not None:
                group.children.discard(native)
            raise
        return native
    else:
        raise TypeError(f"a green thread runs a function or a coroutine, not {fn!r}")
    context = copy_context()
    if context:  # most often it is empty, and then nothing is copied
        coro = InContext(coro, context)
    if bound:
        from .bound import BoundThread  # it is one of these itself

        thread = BoundThread(coro, group)
    else:
        thread = Own(coro, group)
    if name:
        thread._name = name
    if len(scheduler.live) < LIVES:
        thread._since = monotonic()
    scheduler.live.add(thread)
    if group is not None:
        group.children.add(thread)  # before it can end
    scheduler.ready.append(thread)
    if scheduler.bell:
        scheduler.ring()
    return thread


def _is_of_asyncio(error: BaseException) -> bool:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if error.args == ("no running event loop",):
        return True
    return at is not None and at.tb_frame.f_globals.get("__package__") == "asyncio"


def _qualname(it: Any) -> str:
    it = bare(it)
    return getattr(it, "__qualname__", None) or repr(it)


natives: dict[int, GreenThread[Any]] = {}
"""The native threads on which foreign code of green threads runs, and whose it is."""


def here() -> GreenThread[Any] | None:
    """The green thread whose code this is: between two awaits, in a foreign call, or a plain
    function."""
    ident = get_ident()
    driver = scheduler.drivers.get(ident)
    if driver is not None:
        owner: GreenThread[Any] | None = (
            scheduler.current if driver.token == NO_CALL else driver.thread
        )
        return owner
    return natives.get(ident)


def as_coroutine(awaitable: Any, name: str) -> Any:
    if isinstance(awaitable, (CoroutineType, GeneratorType)):
        return awaitable

    async def waits() -> Any:
        return await awaitable

    coro: Any = waits()
    coro.__qualname__ = name
    return coro


AROUND = "`green.run` around it, or in asyncio `await green.spawn(...)`"


def outside(what: str, instead: str = AROUND) -> RuntimeError:
    return RuntimeError(f"{what} is for green threads, and was used outside of one: use {instead}")


# -- waiting for what is not of the scheduler's making ---------------------------------------------


class Wake:
    """Wakes the green thread that made it, once, if it still waits there. To be called from
    anywhere."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread: GreenThread[Any] | None = scheduler.current

    def __call__(self, *_: object) -> None:
        scheduler.post(self.now)

    def now(self) -> None:
        """The same, by the owner."""
        thread, self.thread = self.thread, None
        if thread is not None:
            thread._value = None
            scheduler.ready.append(thread)


@coroutine
def pause(wake: Wake) -> Generator[Any, Any, Any]:
    """Parks until `wake` is called."""
    try:
        yield PARK
    finally:
        wake.thread = None


@coroutine
def _await_promise(promise: Promise[Any]) -> Generator[Any, Any, None]:
    wake = Wake()
    outside = promise.from_outside
    scheduler.outside += outside
    promise._hook(wake)
    try:
        yield PARK
    except GeneratorExit:
        raise
    except BaseException:
        promise._unhook(wake)
        if promise._cancels_with_waiter:  # as asyncio does
            promise.cancel()
        raise
    finally:
        wake.thread = None
        scheduler.outside -= outside


os.register_at_fork(after_in_child=_another_image)


def _asked_to_end(ident: int, told: bool) -> bool:
    """Until it was told, by the end of a wait: its clean-up may wait for something."""
    thread = natives.get(ident)
    if not isinstance(thread, NativeThread) or not thread._asked_to_end or thread._told:
        return False
    thread._told = told
    return True


promises.asked_to_end = _asked_to_end
promises.green = (scheduler.in_step, _await_promise)


# -- errors nobody looked at -----------------------------------------------------------------------


class Unseen:
    """An error that nobody has looked at. If it goes, or the program ends, before anybody did, it
    is printed."""

    __slots__ = ("__weakref__", "error", "name")

    def __init__(self, name: str, error: BaseException) -> None:
        self.name = name
        self.error: BaseException | None = error
        _unseen.add(self)

    def seen(self) -> None:
        self.error = None

    def tell(self) -> None:
        error, self.error = self.error, None
        if error is None or sys.stderr is None:
            return
        frames = list(traceback.walk_tb(error.__traceback__))
        theirs = [each for each in frames if not _is_ours(each[0])] or frames
        line = f"{theirs[-1][0].f_code.co_filename}:{theirs[-1][1]}" if theirs else "no line"
        alike = f"{type(error).__module__}.{type(error).__qualname__} at {line}"
        if alike not in _told and len(_told) >= ALIKE_KNOWN:
            _told.clear()
        count = _told[alike] = _told.get(alike, 0) + 1
        if count <= TOLD_IN_FULL:
            lines = traceback.format_exception(error)
            sys.stderr.write(
                f"Nobody looked at the error of green thread {self.name!r}:\n{''.join(lines)}"
            )
        elif count == 10 ** (len(str(count)) - 1):  # 10, 100, ...
            _tell_count(alike, count)

    __del__ = tell


TOLD_IN_FULL = 3
"""Of errors of one type from one line; of the others only their number is told, at 10, 100, ... and at the end."""
ALIKE_KNOWN = 1000
"""Types and lines; then all are counted anew."""

_unseen: WeakSet[Unseen] = WeakSet()
_told: dict[str, int] = {}
os.register_at_fork(after_in_child=_told.clear)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(f"{__package__}.")


def _tell_count(alike: str, count: int) -> None:
    sys.stderr.write(
        f"Nobody looked at the errors of {count:,} green threads so far, all {alike}\n"
    )


@atexit.register
def _tell_all() -> None:
    for each in list(_unseen):
        each.tell()
    for alike, count in list(
        _told.items()
    ):  # writing may collect garbage, which reports errors too
        if count > TOLD_IN_FULL and sys.stderr is not None:
            _tell_count(alike, count)
