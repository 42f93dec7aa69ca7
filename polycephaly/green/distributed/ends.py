"""Ends: half of a channel, to be held by one, and to be counted.

    channel.sender() ──> Sender     send, put, sending      all of them gone: the channel is closed
    channel.receiver() ─> Receiver  receive, get, receiving, async for

Any number of threads in any image may use a `Channel`; that one of them has ended closes nothing,
since nobody can know who else would have sent. An end is known. It is gone when it was closed, or
when whoever has it has ended; when the last end of its kind is gone, the channel is closed, and who
waits at the other side is told: with the cause, where an image has died. An end that has never left
its image is gone only when it was closed.

In a drone an end is gone, too, when nothing there refers to it any more (LET_GO): with the call
that brought it, unless the call has stored it, in a global, an attribute, a thread. Counting
references tells; an end in a cycle of references is gone when the collector finds that. One that
was pickled there was handed on: only its next holder lets it go. Where no drone is, forgetting an
end says nothing.

    home ──a call's argument──> B: OPENED 7, was 0 ──an item──> C: OPENED 9, was 7      C has it, B no more
         └─ the call comes to nothing, as B is killed before: ASTRAY 0

The count is kept where the channel lives. Each time an end arrives somewhere, it has a new *token*;
who holds it says OPENED with that and the one that it had before, so the home knows who has handed
it on and need not be counted any more. What C says may come before what B says: tokens that were
handed on are remembered, and B's is not counted then. An image to which it comes more than once is
counted once, by the last token. Two images that have the same end hold it both. Where nobody is
left who has it, the home waits for a moment, and hears what has come by then, before it counts the
end as gone: it may have been handed on just before. An end that went with a call is followed until
the call is settled: if its drone died, or it was never sent, and nobody has said OPENED with that
token, the end is gone (ASTRAY) - but only when no other call with it is on its way. Of a call that
is settled here while a drone has it, as it was cancelled or its time is over, that drone, or its
death, tells later whether it had begun (`Work.never_began`)."""

from __future__ import annotations

import secrets
from _thread import LockType, allocate_lock, get_ident
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial
from struct import Struct
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from ...errors import ChannelClosed, DroneDied
from ...store import placeholders
from .. import channel as channels
from ..scheduler import scheduler
from . import opcodes
from .connection import OBEYED, TOLD_OF_LOSS, PeerConnection, keep_last
from .handlers import channel_of

if TYPE_CHECKING:
    from ...pool.task import Task
    from ..channel import Channel
    from ..select import Guard

__all__ = ["Receiver", "Sender", "new_end"]

T = TypeVar("T")

_FIRST = 0  # the token of an end that has not arrived anywhere
_TOKENS = Struct("<QQ")
MOMENT = 0.1  # seconds for who was handed an end to say that it has it, when the last who had it has died
SAID_WITHIN = (
    1.0  # seconds that a call waits for its drone to say that it has the ends that came with it
)
LOOKS = 5  # in which a moment passes: a machine that stands still, however long, is a fifth of a moment at most


class _End(Generic[T]):
    """What both have. It goes to other images as a channel does: there it is the same end."""

    _only_follows = True  # calls, and does not wait for them: see `_waiters` in pool/inputs.py

    def __init__(self, channel: Channel[T], number: int, token: int = _FIRST) -> None:
        self.channel = channel
        self._number = number
        self._token = token
        self._calls = 0  # with which it is on its way
        self._closed = self._handed_on = False
        self._generation = channels.generation

    def __del__(self) -> None:
        """In any thread, in the middle of anything. Not in a fork of the drone, whose copy it is
        not to let go."""
        if (
            self._token
            and not (self._closed or self._handed_on)
            and _lets_go()
            and self._generation >= channels.oldest
        ):
            scheduler.post(partial(_let_go, self.channel, self._number, self._token))

    def close(self) -> None:
        """It is gone. From anywhere; a second time it does nothing."""
        if not self._closed:
            self._closed = True
            self._settle()
            scheduler.post(partial(_end_closed, self.channel, self._number))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _open_channel(self) -> Channel[T]:
        if self._closed:
            raise ChannelClosed(f"{self!r} was closed")
        self._settle()
        return self.channel

    def _settle(self) -> None:
        """One that came with a fork is held here from its first use on, as if it had been sent."""
        if self._generation < channels.oldest:
            self._generation = channels.generation
            self.channel._is_inherited()
            self._token = _arrives(
                self.channel, self._number, _FIRST
            )  # the snapshot's is still the snapshot's

    def __reduce__(self) -> Any:
        self._open_channel()
        self._handed_on = True
        if placeholders.here.now is not None:
            placeholders.here.now.moves(self)
        return _arrived, (type(self), self.channel, self._number, self._token)

    def _goes_with(self, task: Task) -> None:
        """A call has it among its arguments, or captured. From any thread."""
        scheduler.post(self._sent)
        task._hook(self._call_settled)

    def _sent(self) -> None:
        self._calls += 1
        _count_calls(self.channel, self._number, 1)

    def _call_settled(self, task: Any) -> None:
        scheduler.post(partial(self._came_through, _why_astray(task)))
        sent = task.sending
        if (
            sent is None or task.number not in sent.handle.in_flight
        ):  # else its drone has it, and may not have opened it yet
            task.followed = ()

    def _never_arrived(self, task: Task) -> None:
        """A call that was settled before has come to nothing all the same."""
        scheduler.post(partial(self._may_be_astray, task._exception or _was_cancelled(task)))

    def _came_through(self, error: BaseException | None) -> None:
        self._calls -= 1
        _count_calls(self.channel, self._number, -1)
        if error is not None:
            self._may_be_astray(error)

    def _may_be_astray(self, error: BaseException) -> None:
        _in_a_moment(partial(self._is_astray, error))

    def _is_astray(self, error: BaseException) -> None:
        if not self._calls and not self._closed:
            why = (str(error) or type(error).__name__).splitlines()[0]
            if self.channel.is_remote:
                _say(
                    self.channel,
                    opcodes.ASTRAY,
                    self._number,
                    _TOKENS.pack(self._token, 0) + why.encode(),
                )
            else:
                _astray(self.channel, self._number, self._token, why, error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{' closed' if self._closed else ''} of {self.channel!r}>"


class Sender(_End[T]):
    """An end by which things are sent: see `Channel.sender`. With ``with`` it is closed at the end
    of the block."""

    def send(self, item: T) -> Awaitable[None]:
        """As `Channel.send`."""
        return self._open_channel().send(item)

    def put(self, item: T, timeout: float | None = None) -> None:
        """As `Channel.put`."""
        self._open_channel().put(item, timeout)

    def sending(self, item: T, *, when: bool | Callable[[], object] = True) -> Guard[None]:
        """As `Channel.sending`."""
        return self._open_channel().sending(item, when=when)


class Receiver(_End[T]):
    """An end by which things are received: see `Channel.receiver`. ``async for`` and ``for`` work
    as with the channel."""

    def receive(self) -> Awaitable[T]:
        """As `Channel.receive`."""
        return self._open_channel().receive()

    def get(self, timeout: float | None = None) -> T:
        """As `Channel.get`."""
        return self._open_channel().get(timeout)

    def receiving(self, *, when: bool | Callable[[], object] = True) -> Guard[T]:
        """As `Channel.receiving`."""
        return self._open_channel().receiving(when=when)

    def __aiter__(self) -> AsyncIterator[T]:
        return _Items(self, self._open_channel())

    def __iter__(self) -> Iterator[T]:
        return _items(self, self._open_channel())


class _Items(Generic[T]):
    """Of ``async for``: it refers to the end, which is not let go before."""

    def __init__(self, end: Receiver[T], channel: Channel[T]) -> None:
        self._end = end
        self._channel = channel

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[T]:
        return self._channel.__anext__()


def _items(end: Receiver[T], channel: Channel[T]) -> Iterator[T]:
    """Of ``for``, in the same way."""
    yield from channel


def _why_astray(task: Any) -> BaseException | None:
    """Why what went with it cannot have arrived, or is gone again; None where it may be there."""
    error: BaseException | None = task._exception
    if isinstance(error, DroneDied) or (error is not None and task.sending is None):
        return error
    return _was_cancelled(task) if task.cancelled() and task.sending is None else None


def _was_cancelled(task: Any) -> CancelledError:
    return CancelledError(f"{task.label} was cancelled")


class _Count:
    """The ends of one channel, where it lives. `holders` has for each end who has it, by token;
    None is this image, to which it has come back. `passed` has the last tokens of those who handed
    it on, in their order. `calls` counts those with which it is on its way from here; while there
    is one, who has died had it in vain: `forsaken` keeps how."""

    def __init__(self) -> None:
        self.made = 0
        self.open: dict[Literal["send", "receive"], set[int]] = {"send": set(), "receive": set()}
        self.holders: dict[int, dict[int, PeerConnection | None]] = {}
        self.passed: dict[int, dict[int, None]] = {}
        self.calls: dict[int, int] = {}
        self.forsaken: dict[int, tuple[str, BaseException | None]] = {}


_counts: WeakKeyDictionary[Channel[Any], _Count] = WeakKeyDictionary()


def new_end(kind: type[_End[T]], channel: Channel[T]) -> Any:
    """One more. The owner counts it, or any thread does before anybody else can know it."""
    if channel.is_remote:
        raise RuntimeError(
            f"ends are made where the channel lives, and {channel!r} is only known here"
        )
    count = _counts.get(channel)
    if count is None:
        count = _counts.setdefault(channel, _Count())
    count.made += 1  # no call since the look: no other thread ran in between
    number = count.made
    count.open["send" if kind is Sender else "receive"].add(number)
    return kind(channel, number)


_here: WeakValueDictionary[tuple[int, int], _End[Any]] = WeakValueDictionary()
"""The ends that have arrived in this drone, by the identity of the channel, which they hold, and
number: each is one object, so that it is let go with the last reference, however often it came."""


some_arrived = False
"""Since a drone has last looked for cycles of references, in which an end would stay."""


def _lets_go() -> bool:
    """Is this a drone?"""
    return placeholders.shelf is not None


def _arrived(kind: type[_End[T]], channel: Channel[T], number: int, before: int) -> _End[T]:
    global some_arrived
    token = _arrives(channel, number, before)
    if not _lets_go():
        return kind(channel, number, token)
    some_arrived = True
    end = _here.get((id(channel), number))
    if end is None or end._closed or end._handed_on or end._generation < channels.oldest:
        end = _here[id(channel), number] = kind(channel, number, token)
    end._token = token  # the home counts this image by the last one
    return end


def _arrives(channel: Channel[Any], number: int, before: int) -> int:
    """Its new token. In a drone it comes back when that is said: or the drone might die after its
    call was answered, and nobody would ever know that it had the end. The owner itself says it
    soon; it cannot wait for itself, and in the main image nobody outlives who would wait."""
    token = secrets.randbits(63) | 1
    if not channel.is_remote:
        scheduler.post(partial(_held_by, channel, number, None, token, before))
        return token
    said = allocate_lock()
    said.acquire()
    scheduler.post(
        partial(_say_at_once, channel, opcodes.OPENED, number, _TOKENS.pack(token, before), said)
    )
    if placeholders.shelf is not None and get_ident() != scheduler.owner:
        said.acquire(timeout=SAID_WITHIN)
    return token


def _say_at_once(
    channel: Channel[Any], word: int, number: int, payload: bytes, said: LockType
) -> None:
    try:
        _say(channel, word, number, payload)
        if scheduler.mail is not None:
            scheduler.mail.send_late()
    finally:
        said.release()


def _say(channel: Any, word: int, number: int, payload: bytes = b"") -> None:
    try:
        channel._peer(may_be_closed=True).put(word, channel._extra.number, number, payload)
    except ChannelClosed:
        pass


def _end_closed(channel: Channel[Any], number: int) -> None:
    if channel.is_remote:
        _say(channel, opcodes.ENDED, number)
    else:
        _gone(channel, number)


def _let_go(channel: Channel[Any], number: int, token: int) -> None:
    if channel.is_remote:
        _say(channel, opcodes.LET_GO, number, _TOKENS.pack(token, _FIRST))
    else:
        _is_let_go(channel, number, token)


def _is_let_go(channel: Channel[Any], number: int, token: int) -> None:
    """Where it lives. A token that holds nothing any more was handed on, or the end has come there
    once more."""
    count = _counts.get(channel)
    holders = None if count is None else count.holders.get(number)
    if count is None or not holders or token not in holders:
        return
    _holds_less(count, channel, holders.pop(token))
    if not holders:  # and nobody has died, so the channel is closed as if it had been by hand
        _in_a_moment(partial(_forsaken, channel, number, "", None))


def _gone(channel: Any, number: int, how: str = "", cause: BaseException | None = None) -> None:
    count = _counts.get(channel)
    if count is None:
        return
    count.passed.pop(number, None)
    count.forsaken.pop(number, None)
    for holder in count.holders.pop(number, {}).values():
        _holds_less(count, channel, holder)
    for end, others in count.open.items():
        if number in others:
            others.discard(number)
            if not others and not channel.closed:
                if how:
                    reason = ChannelClosed(f"the last end that could {end} was {how}")
                    reason.__cause__ = cause
                    channel._extra.reason = reason
                channel.close()


def _is_open(count: _Count, number: int) -> bool:
    return any(number in others for others in count.open.values())


def _held_by(
    channel: Any, number: int, holder: PeerConnection | None, token: int, before: int
) -> None:
    count = _counts.get(channel)
    if count is not None and _is_open(count, number):
        passed, holders = count.passed.setdefault(number, {}), count.holders.setdefault(number, {})
        keep_last(passed, before, None)  # more than can be on their way at once
        if token not in passed:
            for before_that in [each for each, who in holders.items() if who is holder]:
                del holders[before_that]
            holders[token] = holder
            if holder is not None:
                holder.ends.add(channel)
        _holds_less(count, channel, holders.pop(before, None))


def _holds_less(count: _Count, channel: Any, holder: PeerConnection | None) -> None:
    if holder is not None and not any(
        holder in others.values() for others in count.holders.values()
    ):
        holder.ends.discard(channel)


def _astray(channel: Any, number: int, token: int, why: str, cause: BaseException | None) -> None:
    """A call with it has come to nothing: who would have had it, and has not handed it on, has it
    no more."""
    if scheduler.mail is not None:
        scheduler.mail.hear_all()
    count = _counts.get(channel)
    if count is None or not _is_open(count, number) or token in count.passed.get(number, ()):
        return
    holders = count.holders.get(number, {})
    holders.pop(token, None)
    if not holders:
        _gone(channel, number, f"with a call that came to nothing: {why}", cause)


def _in_a_moment(act: Callable[[], object], looks: int = LOOKS) -> None:
    then = partial(_in_a_moment, act, looks - 1) if looks > 1 else act
    scheduler.timers.set(scheduler.timers.now() + MOMENT / LOOKS, then)


def _forsaken(channel: Any, number: int, how: str, cause: BaseException | None) -> None:
    """Who had it was gone a moment ago. Who has it now has said so by now."""
    if scheduler.mail is not None:
        scheduler.mail.hear_all()
    count = _counts.get(channel)
    if count is None or not _is_open(count, number) or count.holders.get(number):
        return
    if number in count.calls:  # with one that runs again (`retries`), say: that may take its time
        count.forsaken[number] = how, cause
    else:
        _gone(channel, number, how, cause)


def _count_calls(channel: Any, number: int, change: int) -> None:
    count = None if channel.is_remote else _counts.get(channel)
    if count is None:
        return
    left = count.calls.pop(number, 0) + change
    if left:
        count.calls[number] = left
    elif number in count.forsaken:
        how, cause = count.forsaken.pop(number)
        _in_a_moment(partial(_forsaken, channel, number, how, cause))


def _hear_opened(peer: PeerConnection, channel: int, number: int, payload: bytes) -> None:
    its = channel_of(peer, channel)
    if its is not None:
        _held_by(its, number, peer, *_TOKENS.unpack(payload))


def _hear_ended(peer: PeerConnection, channel: int, number: int, _: bytes) -> None:
    its = channel_of(peer, channel)
    if its is not None:
        _gone(its, number)


def _hear_let_go(peer: PeerConnection, channel: int, number: int, payload: bytes) -> None:
    its = channel_of(peer, channel)
    if its is not None:
        _is_let_go(its, number, _TOKENS.unpack(payload)[0])


def _hear_astray(peer: PeerConnection, channel: int, number: int, payload: bytes) -> None:
    its = channel_of(peer, channel)
    if its is not None:
        token, _ = _TOKENS.unpack_from(payload)
        why = payload[_TOKENS.size :].decode()
        scheduler.post(
            partial(_astray, its, number, token, why, None)
        )  # not here: it hears what else has come


def _lost(peer: PeerConnection) -> None:
    for channel in list(peer.ends):
        count = _counts[channel]
        for number, holders in list(count.holders.items()):
            theirs = [token for token, holder in holders.items() if holder is peer]
            for token in theirs:
                del holders[token]
            if theirs and not holders:
                how = f"in {peer}, which {peer.ending.how}"
                _in_a_moment(partial(_forsaken, channel, number, how, peer.ending.death))


OBEYED[opcodes.OPENED] = _hear_opened
OBEYED[opcodes.ENDED] = _hear_ended
OBEYED[opcodes.LET_GO] = _hear_let_go
OBEYED[opcodes.ASTRAY] = _hear_astray
TOLD_OF_LOSS.append(_lost)
