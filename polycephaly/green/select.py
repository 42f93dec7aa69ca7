"""`select`: waits for several things, and exactly one of them happens.

    guards ──can one be done at once?──> done: its index and value
          └─no──> an Offer of each is left where somebody may take it up ──> the first that is, wins; the rest go

All of this is done by the scheduler's owner, so choosing, and taking the other offers back, is one
step: no second offer can be taken up in between, also where both sides of a channel are in a
`select`.

Where the channel is known to other images, that one step may have to span several. Then who would
bring the two sides together first has each `select` *held* (distributed/transaction.py): it cannot
choose anything else until it is told that it has happened, or that it has not. Its offers to this
image's own channels are taken back meanwhile.

The names are occam's and ProcessJ's: a guarded alternative, with preconditions (`when`).
"""

from __future__ import annotations

from _thread import get_ident
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from types import EllipsisType, coroutine
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

from ..promises.promise import Promise
from .scheduler import PARK, scheduler
from .thread import GreenThread, outside
from .waiting import NOTHING, Refused, Waiter

if TYPE_CHECKING:
    from .channel import Channel

__all__ = ["Chosen", "Guard", "after", "select", "settled", "skip"]

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
D = TypeVar("D")


class Chosen(NamedTuple, Generic[T]):
    """What `select` gives: the place of the guard among the arguments, and its value.

    The value is the item received, the promise's value, or None.
    """

    index: int  # type: ignore[assignment]  # a tuple's method `index` is of no use here
    value: T


class Offer(Waiter):
    """One guard of a `select` that waits, left with a channel, a timer or a promise."""

    __slots__ = ("at", "index", "select")

    def __init__(self, select: _Select, index: int, item: Any) -> None:
        super().__init__(select.thread, item)
        self.select = select
        self.index = index
        self.at: Any = None  # the timer or the hook by which it was left: a guard may be in several selects at a time

    def serve(self, value: Any) -> None:
        self.select.commit(self, Chosen(self.index, value))

    def refuse(self, error: BaseException) -> None:
        self.select.commit(self, Refused(error))

    # -- for deals with other images, which have it held first (distributed/transaction.py) --------

    def happen(self, value: Any) -> None:
        self.select.happen(Chosen(self.index, value))

    def fail(self, error: BaseException) -> None:
        self.select.happen(Refused(error))

    def release(self) -> None:
        self.select.release()

    def drop(self) -> None:
        pass

    @property
    def stands(self) -> bool:
        """May it still be taken up?"""
        return self.select.waits and self.select.offers.get(self.index) is self


class Guard(Generic[T]):
    """One of the things `select` may wait for: made by `sending`, `receiving`, `after`, `settled`
    and `skip`."""

    __slots__ = ("channel", "end", "item", "when")

    def __init__(self, when: object, channel: Channel[Any], end: str, item: Any = None) -> None:
        self.when = when
        self.channel = channel
        self.end = end
        self.item = item

    def attempt(self, thread: Any) -> Any:
        """Does it, if that is possible at once; its value, or NOTHING."""
        if self.end == "send":
            return None if self.channel._try_send(thread, self.item) else NOTHING
        return self.channel._try_receive(thread)

    def leave(self, offer: Offer) -> None:
        self.channel._enlist(self.end, offer)

    def strike(self, offer: Offer) -> None:
        self.channel._strike(self.end, offer)

    def is_here(self) -> bool:
        """Is its offer left with a channel of this image?"""
        return not self.channel.is_remote


class _Alarm:
    """That of an `after`. Called off it lies in the heap for a while, and holds nothing there."""

    __slots__ = ("off", "offer")

    def __init__(self, offer: Offer) -> None:
        self.offer: Offer | None = offer
        self.off = False

    def go_off(self) -> None:
        if self.offer is not None:
            self.offer.serve(None)


class _After(Guard[None]):
    __slots__ = ("seconds",)

    def __init__(self, seconds: float, when: object) -> None:
        self.when = when
        self.seconds = seconds

    def attempt(self, thread: Any) -> Any:
        return None if self.seconds <= 0 else NOTHING

    def is_here(self) -> bool:
        return False

    def leave(self, offer: Offer) -> None:
        offer.at = _Alarm(offer)
        scheduler.timers.add(scheduler.timers.now() + self.seconds, offer.at)

    def strike(self, offer: Offer) -> None:
        scheduler.timers.call_off(offer.at)
        offer.at.offer = None


class _Settled(Guard[T]):
    __slots__ = ("promise",)

    def __init__(self, promise: Promise[T], when: object) -> None:
        self.when = when
        self.promise = promise

    def attempt(self, thread: Any) -> Any:
        return self.promise.result() if self.promise.done() else NOTHING

    def is_here(self) -> bool:
        return False

    def leave(self, offer: Offer) -> None:
        offer.at = lambda _: scheduler.post(lambda: self._serve(offer))
        scheduler.outside += self.promise.from_outside
        self.promise._hook(offer.at)

    def _serve(self, offer: Offer) -> None:
        if not offer.select.waits:
            return
        try:
            value = self.promise.result()
        except BaseException as error:
            offer.refuse(error)
        else:
            offer.serve(value)

    def strike(self, offer: Offer) -> None:
        scheduler.outside -= self.promise.from_outside
        self.promise._unhook(offer.at)


class _Skip(Guard[None]):
    __slots__ = ()

    def __init__(self, when: object) -> None:
        self.when = when

    def attempt(self, thread: Any) -> Any:
        return None


def after(seconds: float, *, when: bool | Callable[[], object] = True) -> Guard[None]:
    """A guard for `select`: chosen after so many seconds."""
    if not seconds >= 0:
        raise ValueError(f"a timeout is a number of seconds from 0 on, not {seconds!r}")
    return _After(seconds, when)


def settled(promise: Promise[T], *, when: bool | Callable[[], object] = True) -> Guard[T]:
    """A guard for `select`: chosen when `promise` has settled. A bare promise does as well, without
    `when`.

    The value is the promise's; its error is raised from `select`. The promise is not cancelled if
    another is chosen."""
    return _Settled(promise, when)


def skip(*, when: bool | Callable[[], object] = True) -> Guard[None]:
    """A guard for `select` that can always be chosen: with ``priority=True`` the last one, for
    "else".

    Not beside channels that live in another image: that is a `ValueError`, as a default is.
    """
    return _Skip(when)


class _Select:
    __slots__ = ("guards", "hold", "number", "offers", "thread", "waits")

    def __init__(self, guards: Sequence[tuple[int, Guard[Any]]], thread: GreenThread[Any]) -> None:
        self.thread = thread
        self.guards = dict(guards)
        self.offers: dict[int, Offer] = {}
        self.waits = True
        self.hold: Hold | None = None
        self.number = 0  # by which all images can tell it from others; given when it is needed

    def leave(self) -> None:
        for index, guard in list(self.guards.items()):
            if index not in self.offers:
                self.offers[index] = offer = Offer(self, index, getattr(guard, "item", None))
                guard.leave(offer)
                if (
                    not self.waits or self.hold is not None
                ):  # another image had been waiting for that
                    return

    def commit(self, offer: Offer, outcome: Any) -> None:
        if self.waits:  # timers and promises may come after another was chosen
            if self.hold is not None:
                self.hold.overdue.append((offer, outcome))
                return
            self.end()
            self.thread._value = outcome
            scheduler.ready.append(self.thread)

    def end(self) -> None:
        if self.waits:
            self.waits = False
            hold, self.hold = self.hold, None
            for index, offer in self.offers.items():
                self.guards[index].strike(offer)
                offer.at = None
            self.offers.clear()  # no cycles are left to the garbage collector, and no items in a line
            self.guards.clear()
            while hold is not None and hold.others:
                hold.others.popleft()(False)

    # -- for who would bring together two sides in different images --------------------------------

    def ask(self, answer: Callable[[bool], object]) -> None:
        """Has it held: `answer` is called with True once it is, or with False if it has chosen, or
        was broken off."""
        if not self.waits:
            answer(False)
        elif self.hold is not None:
            self.hold.others.append(answer)
        else:
            self.hold = Hold()
            for index in [index for index in self.offers if self.guards[index].is_here()]:
                self.guards[index].strike(self.offers.pop(index))
            answer(True)

    def happen(self, outcome: Any) -> None:
        """It was held for this."""
        hold = self.hold
        assert hold is not None
        self.end_held(hold)
        self.thread._value = outcome
        scheduler.ready.append(self.thread)
        for error in hold.errors:
            self.thread._interrupt(error)

    def end_held(self, hold: Hold) -> None:
        self.hold = None
        self.end()
        while hold.others:
            hold.others.popleft()(False)

    def release(self) -> None:
        """It was held, and that for which it was has not happened."""
        hold = self.hold
        if hold is None:
            return
        if not (hold.overdue or hold.others):
            self._look_again(hold)
        self.hold = None
        if hold.overdue:
            self.commit(*hold.overdue[0])
        for error in hold.errors:
            self.thread._interrupt(error)
        if hold.others and self.waits:
            self.hold = Hold(hold.others)
            self.hold.others.popleft()(True)
        elif self.waits:
            self.leave()
        while hold.others and not self.waits:
            hold.others.popleft()(False)

    def _look_again(self, hold: Hold) -> None:
        """What came to this image's own channels meanwhile has not found its offers there. Still
        held, so that nobody else can choose for it in between."""
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
            hold.overdue.insert(0, (Offer(self, index, None), outcome))
            return


class Hold:
    """A `select` is held."""

    __slots__ = ("errors", "others", "overdue")

    def __init__(self, others: deque[Callable[[bool], object]] | None = None) -> None:
        self.others: deque[Callable[[bool], object]] = deque() if others is None else others
        """Who would hold it next."""
        self.overdue: list[tuple[Offer, Any]] = []
        """What has come meanwhile: timers, promises, and at its end what this image's own channels
        have."""
        self.errors: list[BaseException] = []
        """Raised in its thread meanwhile."""


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
    """Waits until one of the guards can happen; exactly one does. Gives `Chosen`: its index, and
    its value.

    Guards: ``channel.receiving()``, ``channel.sending(item)``, ``after(seconds)``, a promise,
    ``skip()``. Those whose ``when`` is false, or a function that now gives something false, are
    left out. Where several can happen at once, one is chosen fairly, or, with ``priority=True``,
    the first. With a `default`, nothing is waited for: where no guard can happen at once, it is
    what `select` gives. (In asyncio: ``await green.spawn(green.select(...))``.)

    Raises `ValueError` without guards, or where all preconditions are false and there is no default
    (nothing could ever happen); `ChannelClosed` where the chosen guard is of a closed channel; the
    error of a rejected promise.

    >>> from polycephaly import green
    >>> async def main():
    ...     numbers, words = green.Channel(1), green.Channel(1)
    ...     await words.send("hello")
    ...     return await green.select(numbers.receiving(), words.receiving(), green.after(5))
    >>> green.run(main)
    Chosen(index=1, value='hello')
    """
    if get_ident() != scheduler.owner:
        raise outside("green.select")
    if not guards:
        raise ValueError("select without guards would wait for ever")
    open_ = []
    for index, guard in enumerate(guards):
        if isinstance(guard, Promise):
            guard = _Settled(guard, True)
        elif not isinstance(guard, Guard):
            raise TypeError(
                f"select takes guards, such as channel.receiving(), and promises, not {guard!r}"
            )
        when = guard.when
        if when is True or (when() if callable(when) else when):
            open_.append((index, guard))
    if not open_:
        if isinstance(default, EllipsisType):
            raise ValueError(
                "every guard's precondition is false: nothing could ever happen; give a default"
            )
        return default
    thread = scheduler.current
    left = len(open_)
    while left:
        place = 0 if priority or left == 1 else scheduler.draw(left)
        chosen = open_.pop(place)
        value = chosen[1].attempt(thread)
        if value is not NOTHING:
            if chosen[1].__class__ is _Skip:
                _check_all_are_here(open_)
            return Chosen(chosen[0], value)
        open_.append(chosen)  # behind those that were not tried yet
        left -= 1
    if not isinstance(default, EllipsisType):
        _check_all_are_here(open_)
        return default
    waits = _Select(open_, thread)
    waits.leave()
    while True:
        try:
            outcome = yield PARK
            break
        except BaseException as error:
            if waits.hold is not None and not isinstance(error, GeneratorExit):
                waits.hold.errors.append(error)
                continue
            if waits.waits or isinstance(error, GeneratorExit):
                waits.end()
                raise
            thread._interrupt(error)
    if outcome.__class__ is Refused:
        raise outcome.error
    return outcome


def _check_all_are_here(guards: Sequence[tuple[int, Guard[Any]]]) -> None:
    """What waits for nothing is chosen: those of other images never would be."""
    if any(
        getattr(guard, "channel", None) is not None and guard.channel.is_remote
        for _, guard in guards
    ):
        raise ValueError(
            "whether a channel that lives in another image can be served at once is not known here: "
            "instead of a default, or `green.skip()`, use `green.after(seconds)`"
        )
