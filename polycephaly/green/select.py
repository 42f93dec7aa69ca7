"""`select`, which waits for several operations and performs exactly one of them.

    guards ──can one be done at once?──> done: its index and value
          └─no──> register an Offer of each ──> the first accepted wins; the others are withdrawn

The scheduler's owner thread does all of this. So choosing one offer and withdrawing the others is a
single step: no second offer can be accepted in between, even if both sides of a channel are in a
`select`.

If other processes know the channel, that step may have to span several processes. The transaction
that brings the two sides together then first *holds* each `select` (distributed/transaction.py). A
held `select` cannot choose anything else until a commit or a release arrives. Its offers to
channels of this process are withdrawn meanwhile.

The names are those of occam and ProcessJ: a guarded alternative, with preconditions (`when`).
"""

from __future__ import annotations

from _thread import get_ident
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import partial
from types import EllipsisType, coroutine
from typing import Any, Generic, NamedTuple, TypeVar, overload

from ..promises.promise import Promise, WhenOpened, request_opening, unopened
from ..runtime.checks import brief, check_seconds
from .scheduler import PARK, scheduler
from .thread import GreenThread, add_hook, outside_error, remove_hook
from .waiting import NOTHING, ChannelQueues, Refused, Waiter

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
D = TypeVar("D")


class Chosen(NamedTuple, Generic[T]):
    """The result of `select`.

    Attributes
    ----------
    index : int
        Position of the chosen guard among the arguments.
    value : object
        The received item, the promise's value, or None.
    """

    index: int  # type: ignore[assignment]  # the tuple method `index` is of no use here
    value: T


class Offer(Waiter):
    """One guard of a waiting `select`, registered with a channel, a timer or a promise."""

    __slots__ = ("index", "registration", "select")

    def __init__(self, select: _Select, index: int, item: Any) -> None:
        super().__init__(select.thread, item)
        self.select = select
        self.index = index
        # The timer or hook of this offer. Kept here because a guard may be in several selects at a
        # time.
        self.registration: Any = None

    def serve(self, value: Any) -> None:
        self.select.commit(self, Chosen(self.index, value))

    def refuse(self, error: BaseException) -> None:
        self.select.commit(self, Refused(error))

    # -- for transactions with other processes, which first hold the select ------------------------

    def complete(self, value: Any) -> None:
        self.select.complete(Chosen(self.index, value))

    def fail(self, error: BaseException) -> None:
        self.select.complete(Refused(error))

    def release(self) -> None:
        self.select.release()

    def drop(self) -> None:
        pass

    @property
    def is_open(self) -> bool:
        """True if the offer can still be accepted."""
        return self.select.is_waiting and self.select.offers.get(self.index) is self


class Guard(Generic[T]):
    """An operation that `select` may wait for.

    Made by `Channel.sending`, `Channel.receiving`, `after`, `settled` and `skip`.
    """

    __slots__ = ("channel", "end", "item", "when")

    def __init__(self, when: object, channel: ChannelQueues, end: str, item: Any = None) -> None:
        self.when = when
        self.channel = channel
        self.end = end
        self.item = item

    def attempt(self, thread: Any) -> Any:
        """Perform the operation and return its value, or NOTHING if that is not possible at
        once.
        """
        try:
            if self.end == "send":
                return None if self.channel.attempt_send(thread, self.item) else NOTHING
            return self.channel.attempt_receive(thread)
        finally:
            del thread  # no cycle through the traceback of its error

    def register(self, offer: Offer) -> None:
        self.channel.enqueue(self.end, offer)

    def withdraw(self, offer: Offer) -> None:
        self.channel.withdraw_waiter(offer)


class _After(Guard[None]):
    __slots__ = ("seconds",)

    def __init__(self, seconds: float, when: object) -> None:
        self.when = when
        self.seconds = seconds

    def attempt(self, thread: Any) -> Any:
        return None if self.seconds <= 0 else NOTHING

    def register(self, offer: Offer) -> None:
        offer.registration = scheduler.timers.after(self.seconds, partial(offer.serve, None))

    def withdraw(self, offer: Offer) -> None:
        scheduler.timers.cancel(offer.registration)


class _Settled(Guard[T]):
    __slots__ = ("promise",)

    def __init__(self, promise: Promise[T], when: object) -> None:
        self.when = when
        self.promise = promise

    def attempt(self, thread: Any) -> Any:
        try:
            if not self.promise.done():
                return NOTHING
            sealed = unopened(self.promise)
            if sealed is not None:  # so that it can be chosen later
                request_opening(sealed)
                return NOTHING
            return self.promise.result()
        finally:
            del self, thread  # no cycle through the traceback of the promise's error

    def register(self, offer: Offer) -> None:
        offer.registration = WhenOpened(lambda _: scheduler.post(partial(self._serve, offer)))
        scheduler.external_waits += self.promise._settled_from_outside
        add_hook(self.promise, offer.registration)

    def _serve(self, offer: Offer) -> None:
        if not offer.select.is_waiting:
            return
        try:
            value = self.promise.result()
        except BaseException as error:
            offer.refuse(error)
        else:
            offer.serve(value)
        finally:
            del self, offer  # as in `attempt`

    def withdraw(self, offer: Offer) -> None:
        scheduler.external_waits -= self.promise._settled_from_outside
        remove_hook(self.promise, offer.registration)


class _Skip(_After):
    """As after no time, but not beside channels of other processes."""

    __slots__ = ()


def after(seconds: float, *, when: bool | Callable[[], object] = True) -> Guard[None]:
    """Return a guard for `select` that is chosen after some time.

    Parameters
    ----------
    seconds : float
        The time to wait.
    when : bool or callable
        Precondition, as for `Channel.sending`.

    Raises
    ------
    TypeError
        If `seconds` is not a number.
    ValueError
        If `seconds` is negative or NaN.
    """
    return _After(check_seconds("the time of an after", seconds, 0), when)


def settled(promise: Promise[T], *, when: bool | Callable[[], object] = True) -> Guard[T]:
    """Return a guard for `select` that is chosen when `promise` has settled.

    The guard's value is the promise's value; `select` raises the promise's error. The promise is
    not cancelled if another guard is chosen. Without `when`, `select` also takes the promise
    itself.

    Parameters
    ----------
    promise : Promise
        The promise to wait for.
    when : bool or callable
        Precondition, as for `Channel.sending`.
    """
    return _Settled(promise, when)


def skip(*, when: bool | Callable[[], object] = True) -> Guard[None]:
    """Return a guard for `select` that can always be chosen.

    As the last guard, with ``priority=True``, this is the "else". Beside channels that live in
    another process, `select` raises `ValueError`, as for a default.

    Parameters
    ----------
    when : bool or callable
        Precondition, as for `Channel.sending`.
    """
    return _Skip(0, when)


class _Select:
    __slots__ = ("guards", "hold", "is_waiting", "number", "offers", "thread")

    def __init__(self, guards: Sequence[tuple[int, Guard[Any]]], thread: GreenThread[Any]) -> None:
        self.thread = thread
        self.guards = dict(guards)
        self.offers: dict[int, Offer] = {}
        self.is_waiting = True
        self.hold: Hold | None = None
        self.number = 0  # identifies this select in all processes; assigned when needed

    def register_offers(self) -> None:
        for index, guard in list(self.guards.items()):
            if index not in self.offers:
                self.offers[index] = offer = Offer(self, index, getattr(guard, "item", None))
                try:
                    guard.register(offer)
                except BaseException:  # of a time that is no real number, say
                    self.offers.pop(index, None)
                    raise
                if not self.is_waiting or self.hold is not None:
                    # An operation of another process was waiting for this offer.
                    return

    def commit(self, offer: Offer, outcome: Any) -> None:
        if self.is_waiting:  # a timer or promise may come after the choice
            if self.hold is not None:
                self.hold.late_outcomes.append((offer, outcome))
                return
            self.end()
            self.thread.next_send = outcome
            scheduler.ready.append(self.thread)

    def end(self) -> None:
        if self.is_waiting:
            self.is_waiting = False
            hold, self.hold = self.hold, None
            for index, offer in self.offers.items():
                self.guards[index].withdraw(offer)
                offer.registration = None
            # Leave no cycles to the garbage collector, and no items in a queue.
            self.offers.clear()
            self.guards.clear()
            while hold is not None and hold.next_requests:
                hold.next_requests.popleft()(False)

    # -- for transactions that bring together two sides in different processes ---------------------

    def request_hold(self, answer: Callable[[bool], object]) -> None:
        """Hold this `select` and then call ``answer(True)``. Call ``answer(False)`` if a guard has
        been chosen or the wait was broken off.
        """
        if not self.is_waiting:
            answer(False)
        elif self.hold is not None:
            self.hold.next_requests.append(answer)
        else:
            self.hold = Hold(deque())
            for index in list(self.offers):
                guard = self.guards[index]
                if type(guard) is Guard and not guard.channel.is_remote:
                    guard.withdraw(self.offers.pop(index))
            answer(True)

    def complete(self, outcome: Any) -> None:
        """End the held `select` with `outcome`, which it was held for."""
        hold = self.hold
        assert hold is not None
        self.end()
        self.thread.next_send = outcome
        scheduler.ready.append(self.thread)
        for error in hold.errors:
            self.thread.interrupt(error)

    def release(self) -> None:
        """Release the held `select`: the operation that it was held for has not happened."""
        hold = self.hold
        if hold is None:
            return
        if not (hold.late_outcomes or hold.next_requests):
            self._retry_local_channels(hold)
        self.hold = None
        if hold.late_outcomes:
            self.commit(*hold.late_outcomes[0])
        for error in hold.errors:
            self.thread.interrupt(error)
        if hold.next_requests and self.is_waiting:
            self.hold = Hold(hold.next_requests)
            self.hold.next_requests.popleft()(True)
        elif self.is_waiting:
            self.register_offers()
        while hold.next_requests and not self.is_waiting:
            hold.next_requests.popleft()(False)

    def _retry_local_channels(self, hold: Hold) -> None:
        """Try the channels of this process, which found no offers meanwhile. The `select` is still
        held, so that nothing else can be chosen in between.
        """
        for index, guard in list(self.guards.items()):
            if index in self.offers:
                continue
            try:
                value = guard.attempt(self.thread)
            except BaseException as error:
                outcome: Any = Refused(error)
            else:
                if value is NOTHING:
                    continue
                outcome = Chosen(index, value)
            hold.late_outcomes.insert(0, (Offer(self, index, None), outcome))
            return


class Hold:
    """The state of a held `select`."""

    __slots__ = ("errors", "late_outcomes", "next_requests")

    def __init__(self, next_requests: deque[Callable[[bool], object]]) -> None:
        self.next_requests = next_requests
        """Callbacks of the transactions that want to hold the `select` next."""
        self.late_outcomes: list[tuple[Offer, Any]] = []
        """Outcomes that came meanwhile: of timers, of promises and, at the release, of this
        process's own channels."""
        self.errors: list[BaseException] = []
        """Errors raised in the thread meanwhile."""


@overload
def select(
    first: Guard[T1] | Promise[T1], second: Guard[T2] | Promise[T2], /, *, priority: bool = False
) -> Awaitable[Chosen[T1 | T2]]: ...
@overload
def select(
    first: Guard[T1] | Promise[T1],
    second: Guard[T2] | Promise[T2],
    third: Guard[T3] | Promise[T3],
    /,
    *,
    priority: bool = False,
) -> Awaitable[Chosen[T1 | T2 | T3]]: ...
@overload
def select(*guards: Guard[T] | Promise[T], priority: bool = False) -> Awaitable[Chosen[T]]: ...
@overload
def select(
    *guards: Guard[T] | Promise[T], priority: bool = False, default: D
) -> Awaitable[Chosen[T] | D]: ...


@coroutine
def select(
    *guards: Guard[Any] | Promise[Any], priority: bool = False, default: Any = ...
) -> Generator[Any, Any, Any]:
    """Wait until one of the guards can happen; exactly one does.

    If several guards can happen at once, the choice is fair.
    In asyncio code, use ``await green.spawn(green.select(...))``.

    Parameters
    ----------
    *guards : Guard or Promise
        ``channel.receiving()``, ``channel.sending(item)``, ``after(seconds)``, ``skip()``, a
        promise. A guard is left out if its `when` is false, or is a function that now returns a
        false value.
    priority : bool
        If true, choose the first of the guards that can happen at once.
    default : object, optional
        Returned without waiting if no guard can happen at once.

    Returns
    -------
    Chosen
        The index and the value of the chosen guard, or `default`.

    Raises
    ------
    ValueError
        If no guards are given, or all preconditions are false and there is no default, because
        nothing could ever happen. Also for a default beside channels that live in another process.
    RuntimeError
        Outside of green threads.
    ChannelClosed
        If the chosen guard's channel is closed.
    Exception
        The error of a promise that was rejected.

    Examples
    --------
    >>> from polycephaly import green
    >>> async def main():
    ...     numbers, words = green.Channel(1), green.Channel(1)
    ...     await words.send("hello")
    ...     return await green.select(numbers.receiving(), words.receiving(), green.after(5))
    >>> green.run(main)
    Chosen(index=1, value='hello')
    """
    if get_ident() != scheduler.owner:
        raise outside_error("green.select")
    if not guards:
        raise ValueError("select without guards would wait for ever")
    candidates = _enabled(guards)
    del guards  # here and below: no cycle through the traceback of a promise's error
    if not candidates:
        if isinstance(default, EllipsisType):
            raise ValueError(
                "every guard's precondition is false: nothing could ever happen; give a default"
            )
        return default
    thread = scheduler.current
    waiting: Any = None  # a `_Select`, if none is possible at once
    outcome: Any = None
    try:
        outcome = _perform_one(candidates, thread, priority)
        if outcome is not None:
            return outcome
        if not isinstance(default, EllipsisType):
            _check_all_local(candidates)
            return default
        waiting = _Select(candidates, thread)
        candidates.clear()
        try:
            waiting.register_offers()
        except BaseException:
            waiting.end()
            raise
        while True:
            try:
                outcome = yield PARK
                break
            except BaseException as error:
                if waiting.hold is not None and not isinstance(error, GeneratorExit):
                    waiting.hold.errors.append(error)
                    continue
                if waiting.is_waiting or isinstance(error, GeneratorExit):
                    waiting.end()
                    raise
                thread.interrupt(error)
        if outcome.__class__ is Refused:
            raise outcome.error
        return outcome
    finally:
        del candidates, thread, waiting, outcome


def _enabled(guards: Sequence[Guard[Any] | Promise[Any]]) -> list[tuple[int, Guard[Any]]]:
    """Return the guards whose preconditions are true, with their positions."""
    enabled = []
    for index, guard in enumerate(guards):
        if isinstance(guard, Promise):
            guard = _Settled(guard, True)
        elif not isinstance(guard, Guard):
            raise TypeError(
                "select takes guards, such as channel.receiving(), and promises, not "
                + brief(guard)
            )
        when = guard.when
        if when is True or (when() if callable(when) else when):
            enabled.append((index, guard))
    return enabled


def _perform_one(
    candidates: list[tuple[int, Guard[Any]]], thread: GreenThread[Any], priority: bool
) -> Chosen[Any] | None:
    """Perform the first operation that is possible at once, in a fair order; None if none is."""
    chosen: Any = None
    untried = len(candidates)
    try:
        while untried:
            position = 0 if priority or untried == 1 else scheduler.random_below(untried)
            chosen = candidates.pop(position)
            value = chosen[1].attempt(thread)
            if value is not NOTHING:
                if chosen[1].__class__ is _Skip:
                    _check_all_local(candidates)
                return Chosen(chosen[0], value)
            candidates.append(chosen)  # behind the guards that were not tried yet
            untried -= 1
        return None
    finally:
        del candidates, chosen, thread


def _check_all_local(guards: Sequence[tuple[int, Guard[Any]]]) -> None:
    """Raise `ValueError` if a guard's channel lives in another process. Beside a choice that never
    waits, such a guard would never be chosen.
    """
    if any(type(guard) is Guard and guard.channel.is_remote for _, guard in guards):
        raise ValueError(
            "select cannot know whether a channel that lives in another process is ready at once: "
            "use `green.after(seconds)` instead of a default or `green.skip()`"
        )
