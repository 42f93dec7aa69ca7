"""The scheduler: one queue of green threads that can go on, and one native thread at a time that
runs them.

    spawn, wake-ups, post() ──> ready (FIFO) ──owner: thread._coro.send(value)──> parked, ready again, or finished
             │                                     │
             └── ring the bell                     └── green.call: another native thread may become the owner

Whoever drives the queue is the *owner*. What green threads do between two awaits, they do on the
owner, one at a time, so channels, locks and timers need no locks: they are touched by the owner
only. Everybody else posts what is to be done (`post`), or spawns.

A green thread is parked when its coroutine has yielded `PARK` and its `_value` is `PARKED`. Before
it yields it has left word where it waits. Who wakes it puts the value that the await is to give
into `_value`, and the thread into `ready`: only the owner does, and the fast paths of channels (see
channel.py), and only when `_value` is `PARKED`.

The bell. `bell` holds at most one waker: the sleeping owner's, or, when nobody drives, one that
starts an owner; it is empty while the owner runs. Who has put something into `ready` and finds a
waker pops it (atomic, so one does) and calls it. An owner about to sleep hangs up its waker
*before* it looks at `ready` again: what came before is seen by that look, and who comes later finds
the waker. Where the look finds something, the owner takes its waker down, and if it is gone
already, waits for the call that is on its way. So no wake-up is lost or doubled. An owner that
gives up hangs up the waker that starts an owner, and looks at `ready` once more; if it finds
something, and that waker, it goes on; if it finds another's waker, that one has begun in the
meantime, and is woken.

Ownership. It passes on only inside a *region* (`green.call`): while foreign code runs, the owner's
`Driver.token` is the number of the call. The watchdog, or the foreign code itself when it is about
to wait, takes the ownership by putting `TAKEN` in its place; when the call is over and finds its
number, it puts `NO_CALL`. Each looks and puts in one run of straight-line code without a call, and
CPython gives the interpreter to another thread only at calls, loop ends and function entries: so
exactly one of them gets it. A call that does not find its number yields `LOST`, and touches nothing
of the scheduler's in between.

A forked child has no scheduler: `_forget` makes everything as it was before the first spawn. A step
that has forked cannot wait there, as every await raises, and the child ends with that step
(runtime/forked.py)."""

from __future__ import annotations

import logging
import os
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from time import monotonic, pthread_getcpuclockid
from types import CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any

from ..promises import promise
from ..runtime import fork_guard, forked
from ..runtime.deferred_sigint import DeferredSigint
from ..runtime.timers import Timers
from .native import LINGER, NativeThreadPool

if TYPE_CHECKING:
    from .distributed.transport import ChannelTransport
    from .thread import GreenThread

__all__ = [
    "AWAY",
    "LOST",
    "PARK",
    "PARKED",
    "YIELDED",
    "Driver",
    "InContext",
    "Interrupted",
    "StandIn",
    "bare",
    "foreign",
    "scheduler",
]

GRACE = 0.02  # seconds of silence before the owner asks whether everybody waits for ever
CEILING = 16384  # native threads; the kernel's usual limits are 2 to 6 times as many
STAND_STILL = 0.25  # seconds that a fork waits for the running step to end

NO_CALL = 0
TAKEN = -1

TURNS = range(32)  # steps between two looks at the clock

log = logging.getLogger("polycephaly.green")


class _Word:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"


PARK: Any = _Word("PARK")  # yielded: this thread has parked, or is in `ready` already
LOST: Any = _Word("LOST")  # yielded: this thread's native thread is not the owner any more
AWAY: Any = _Word("AWAY")  # the `_value` of a thread that is in a foreign call
YIELDED: Any = _Word("YIELDED")  # the `_value` of a thread that only let others go first
PARKED: Any = _Word("PARKED")  # the `_value` of a thread that is not in `ready`


class _Note:
    """Something for the owner to do, in its turn. It stands in `ready` like a thread, and is its
    own coroutine."""

    __slots__ = ("_do", "_value")

    def __init__(self, do: Callable[[], object]) -> None:
        self._do = do
        self._value = None

    @property
    def _coro(self) -> _Note:
        return self

    def send(self, _: Any) -> Any:
        scheduler.current = None
        told = self._do()
        return told if told is LOST else PARK

    def _finish(self, value: Any) -> None:
        pass

    def _fail(self, error: BaseException) -> None:
        log.error("a bug in polycephaly: %r", self._do, exc_info=error)


class Driver:
    """A native thread that drives, or is in a foreign call that it began when it drove."""

    __slots__ = ("began", "clock", "fn", "ident", "lock", "returned", "thread", "token")

    def __init__(self) -> None:
        self.ident = get_ident()
        self.clock = pthread_getcpuclockid(
            self.ident
        )  # asked for here: of an ended thread it would be a crash
        self.token = NO_CALL  # or the number of the foreign call it is in, or TAKEN
        self.began = 0.0  # when the foreign call that was taken over was first seen
        self.fn: Any = None  # what it calls, and whose call it is
        self.thread: GreenThread[Any] | None = None
        self.returned: GreenThread[Any] | None = None  # with LOST: whose step that was
        self.lock = allocate_lock()
        self.lock.acquire()

    def take(self) -> bool:
        """Takes the ownership from the foreign call it is in; False where it has no ownership to
        give."""
        if self.token > NO_CALL:
            self.token = TAKEN  # no call since the look
            return True
        return False


class Scheduler:
    """There is one, `scheduler`. Methods that are not said to be for everybody are for the
    owner."""

    def __init__(self) -> None:
        self.ready: deque[GreenThread[Any] | _Note] = deque()
        self.timers = Timers()
        self.workers = NativeThreadPool(CEILING)
        self.bell: list[Callable[[], object]] = [self._begin]
        self.live: set[GreenThread[Any]] = set()
        self.current: Any = None  # the thread whose step runs
        self.owner = (
            0  # the ident of the native thread that runs steps; 0: none, or it is in a foreign call
        )
        self.driver: Driver | None = None
        self.drivers: dict[int, Driver] = {}
        self.calls = 0  # foreign calls made, all told: the numbers for regions
        self.bouts = 0  # how often the owner has gone to sleep after it had run something
        self.away = 0  # plain functions and foreign calls that run on other native threads
        self.outside = 0  # green threads that wait for something from outside
        self.mail: ChannelTransport | None = (
            None  # once channels go to other images: the owner sleeps there, and looks into it
        )
        self.when_busy: Callable[[], object] = (
            _nothing  # called by an owner that begins, or has slept
        )
        self.when_silent: Callable[[], object] = (
            _nothing  # called by an owner that has had nothing to do for GRACE
        )
        self._luck = 1

    # -- for everybody -----------------------------------------------------------------------------

    def post(self, do: Callable[[], object]) -> None:
        """Has the owner do something soon. It must not raise, and must not wait."""
        self.ready.append(_Note(do))
        if self.bell:
            self.ring()

    def ring(self) -> None:
        """There is something in `ready`: whoever sleeps on it wakes up."""
        with DeferredSigint():  # a Ctrl-C between the two would leave nobody to wake
            try:
                waker = self.bell.pop()
            except IndexError:
                return
            waker()

    def in_step(self) -> bool:
        """Whether the caller is code of a green thread between two awaits."""
        driver = self.drivers.get(get_ident())
        return driver is not None and driver.token == NO_CALL

    def step_aside(self) -> None:
        """To be called by plain code that is about to wait: in a foreign call, somebody else drives
        meanwhile."""
        driver = self.drivers.get(get_ident())
        if driver is not None and driver.take():
            driver.began = monotonic()
            self.hand_over()

    # -- ownership ---------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """The ownership was taken from a region: another native thread drives from now on."""
        self.owner, self.driver = 0, None
        self.away += 1
        if not self.workers.start_urgently(self._drive):
            self.bell.append(self._begin)  # the call that comes back next will drive
            if not self.away:  # it has come back
                self.ring()

    def _begin(self) -> None:
        if not self.workers.start_urgently(self._drive):
            self.bell.append(self._begin)
            raise RuntimeError(
                "green threads cannot run: this process may not start another native thread"
            )

    def _drive(self) -> None:
        """A worker's job: drives until there is nothing to do, or the ownership is lost."""
        driver = Driver()
        self.drivers[driver.ident] = driver
        while True:
            self.owner, self.driver = driver.ident, driver
            self.when_busy()
            base = Context()
            try:
                told = base.run(self._loop, driver, base)
            except (
                BaseException
            ) as error:  # of a callback that was to be called at a thread's end, as sys.exit raises
                promise.callbacks.error("a callback of a green thread failed", exc_info=error)
                continue
            if told is None:
                break
            if told is not LOST:
                _give_context(told, base)
                continue
            thread, driver.returned = driver.returned, None
            driver.fn = driver.thread = None
            assert thread is not None
            if base:
                _give_context(thread, base)
            self.away -= 1
            thread._value = None
            self.ready.append(thread)
            try:
                waker = self.bell.pop()
            except IndexError:
                break
            if waker != self._begin:
                waker()
                break
        del self.drivers[driver.ident]

    def _loop(self, driver: Driver, base: Context) -> Any:
        """Runs green threads. None: given up. LOST: taken away. A thread: it has set a context
        variable.

        `base` is the context this runs in, and it is empty. Threads that never set a variable share
        it."""
        take, heap, parked, park = self.ready.popleft, self.timers.heap, PARKED, PARK
        generation = forked.generation
        thread: Any = None
        while True:
            if heap:
                self.timers.fire()
            if self.mail is not None:
                self.mail.look()
            for _ in TURNS:
                try:
                    thread = take()
                except IndexError:
                    break
                self.current = thread
                value = thread._value
                thread._value = parked
                try:
                    told = thread._coro.send(value)
                except StopIteration as stop:
                    forked.leave_if_forked(generation)
                    thread._finish(stop.value)
                except BaseException as error:
                    forked.leave_if_forked(generation, error)
                    thread._fail(error)
                else:
                    if told is not park and self._strange(thread, told) is LOST:
                        return LOST
                if base:
                    return thread if self.current is None else self.current
            else:
                continue
            if (
                thread is not None or self.current is not None
            ):  # the latter: what mail has let go on, out of turn
                self.bouts += 1
            self.current = thread = value = None  # keep nothing while asleep
            if not self._sleep(driver):
                return None

    def _strange(self, thread: Any, told: Any) -> Any:
        """A step ended by something else than PARK."""
        while told is not PARK and told is not LOST:
            try:
                told = thread._coro.throw(foreign(told))
            except StopIteration as stop:
                thread._finish(stop.value)
                return PARK
            except BaseException as error:
                thread._fail(error)
                return PARK
        return told

    def run_step(self, thread: Any, step: Callable[[Any], Any], arg: Any) -> Any:
        """One step of a parked thread, out of turn; PARK or LOST."""
        self.current = thread
        generation = forked.generation
        try:
            told = step(arg)
        except StopIteration as stop:
            forked.leave_if_forked(generation)
            thread._finish(stop.value)
            return PARK
        except BaseException as error:
            forked.leave_if_forked(generation, error)
            thread._fail(error)
            return PARK
        return self._strange(thread, told)

    def _sleep(self, driver: Driver) -> bool:
        """Until there is something to do. False: there was nothing for LINGER seconds, and it was
        given up."""
        bell, ready = self.bell, self.ready
        mail = self.mail
        lock: Any = (
            driver.lock if mail is None else mail
        )  # with mail, what other images send wakes as the bell does
        driver.fn = driver.thread = None  # of the last foreign call
        asked = False
        while True:
            bell.append(lock.release)
            left = self.timers.left()
            patience = GRACE if not asked else LINGER if mail is None else 1e6
            if (
                ready
                or left == 0.0
                or not lock.acquire(timeout=patience if left is None else min(left, 1e6))
            ):
                try:
                    bell.pop()
                except IndexError:
                    lock.acquire()
                if mail is not None:
                    mail.look()  # only now: a fork takes an owner whose waker is in the bell for asleep
                if ready or left is not None:
                    break
                if not asked:
                    asked = True
                    self.when_silent()
                    continue
                if mail is not None:
                    continue
                self.owner, self.driver = 0, None
                bell.append(self._begin)
                if not ready:
                    return False
                try:
                    waker = bell.pop()
                except IndexError:  # somebody begins another owner right now
                    return False
                if waker != self._begin:  # another owner has begun, and sleeps already
                    waker()
                    return False
                self.owner, self.driver = driver.ident, driver
            break
        self.when_busy()
        return True

    # -- odds and ends -----------------------------------------------------------------------------

    def draw(self, n: int) -> int:
        """A number below `n`: the same ones in each run, and fair."""
        self._luck = (self._luck * 1103515245 + 12345) & 0x7FFFFFFF
        return (self._luck >> 16) % n

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        """For a fork: no green thread is between two awaits, unless one is for longer than
        STAND_STILL."""
        driver = self.drivers.get(get_ident())
        if self.bell or (driver is not None and driver.token != TAKEN):  # asleep; or: it is us
            yield
            return
        reached, over = allocate_lock(), allocate_lock()
        reached.acquire()
        over.acquire()

        def stand() -> None:
            reached.release()
            over.acquire()

        self.post(stand)
        reached.acquire(timeout=STAND_STILL)
        try:
            yield
        finally:
            over.release()

    def _forget(self) -> None:
        """In a forked child. The parent's green threads are its own: here they are only kept from
        being destroyed, which would run their `finally` clauses."""
        _of_parents.append((self.live, list(self.ready), list(self.timers.heap)))
        self.ready.clear()
        self.timers.forget()
        self.workers.forget()
        self.bell[:] = [self._begin]
        self.live = set()
        self.current, self.owner, self.driver = None, 0, None
        self.drivers.clear()
        promise.waiting.clear()
        self.mail = None
        self.away = self.outside = 0


def _nothing() -> None:
    pass


_of_parents: list[Any] = []


class StandIn:
    """Stands in a thread's `_coro` for the coroutine proper (`coro`), and does something more at
    each step."""

    __slots__ = ("coro",)
    coro: Any

    def send(self, value: Any) -> Any:
        return self.coro.send(value)

    def throw(self, error: BaseException) -> Any:
        return self.coro.throw(error)


class InContext(StandIn):
    """For a thread that has a context of its own."""

    __slots__ = ("context",)

    def __init__(self, coro: Any, context: Context) -> None:
        self.coro = coro
        self.context = context

    def send(self, value: Any) -> Any:
        return self.context.run(self.coro.send, value)

    def throw(self, error: BaseException) -> Any:
        return self.context.run(self.coro.throw, error)


class Interrupted(StandIn):
    """For a thread that could not be interrupted at once, as it was not parked, until it has been.

    A thread that is ready may hold what it was given, an item from a channel say. It gets that
    first, and the error at its next await, so that nothing is lost."""

    __slots__ = ("errors", "thread")

    def __init__(self, thread: GreenThread[Any], error: BaseException) -> None:
        self.thread = thread
        self.coro = thread._coro
        self.errors = [error]
        thread._coro = self

    def send(self, value: Any) -> Any:
        self.errors = [error for error in self.errors if not getattr(error, "called_off", False)]
        if not self.errors:
            self.thread._coro = self.coro
            return self.coro.send(value)
        if value is not YIELDED and not not_begun(self.coro):
            told = self.coro.send(value)
            if told is not PARK or self.thread._value is not PARKED:
                return told  # it is away, or ready again: the next time
            value = PARKED
        thread = self.thread
        thread._coro = self.coro
        wanted = [error for error in self.errors if not getattr(error, "called_off", False)]
        for error in wanted[1:]:
            thread._interrupt(error)
        if wanted:
            thread._cancels += getattr(wanted[0], "is_cancel", False)
            return self.coro.throw(wanted[0])
        return PARK if value is PARKED else self.coro.send(value)


def bare(coro: Any) -> Any:
    """The coroutine itself, without what stands for it."""
    while isinstance(coro, StandIn):
        coro = coro.coro
    return coro


def not_begun(coro: Any) -> bool:
    coro = bare(coro)
    if isinstance(coro, CoroutineType):
        return not (coro.cr_suspended or coro.cr_running) and coro.cr_frame is not None
    return (
        isinstance(coro, GeneratorType)
        and not (coro.gi_suspended or coro.gi_running)
        and coro.gi_frame is not None
    )


def _give_context(thread: Any, base: Context) -> None:
    if isinstance(thread, _Note) or thread._coro is None:
        return
    # The very object, not a copy: a token of `ContextVar.set` is good for no other.
    if type(thread._coro) is Interrupted:
        thread._coro.coro = InContext(thread._coro.coro, base)
    else:
        thread._coro = InContext(thread._coro, base)


def foreign(told: Any) -> TypeError:
    """The error of who awaited something that is not of ours; `told` is what it yielded, or
    raised."""
    if isinstance(told, BaseException) or hasattr(told, "_asyncio_future_blocking"):
        what = "something of asyncio's"
    elif told is None:
        what = "a bare yield, as that of asyncio.sleep(0)"
    else:
        what = f"what yields {told!r}"
    error = TypeError(
        f"green code awaited {what}, for which a green thread cannot wait; "
        "`await green.aio(coro)` runs asyncio code on the image's asyncio loop"
    )
    if isinstance(told, BaseException):
        error.__cause__ = told
    return error


scheduler = Scheduler()
fork_guard.add_pause(scheduler._standing_still)
os.register_at_fork(after_in_child=scheduler._forget)
