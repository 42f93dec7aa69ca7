"""Ends: half of a channel, to be held by one, and to be counted.

    channel.sender() ──> Sender     send, put, sending      all of them gone: the channel is closed
    channel.receiver() ─> Receiver  receive, get, receiving, async for

Any number of threads in any image may use a `Channel`; that one of them has ended closes nothing, since nobody can know
who else would have sent. An end is known. It is gone when it was closed, or when the last image that it was sent to has
ended; when the last end of its kind is gone, the channel is closed, and who waits at the other side is told: with the
cause, where an image has died. An end that has never left its image is gone only when it was closed.

The count is kept where the channel lives. Other images say OPENED when they come to hold an end, and ENDED when it
is closed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar
from weakref import WeakKeyDictionary

from ...errors import ChannelClosed
from .. import channel as channels
from ..scheduler import scheduler
from . import words
from .heard import channel_of
from .peer import OBEYED, TOLD_OF_LOSS, Peer

if TYPE_CHECKING:
    from ..channel import Channel
    from ..select import Guard

__all__ = ["Receiver", "Sender", "new_end"]

T = TypeVar("T")


class _End(Generic[T]):
    """What both have. It goes to other images as a channel does: there it is the same end."""

    def __init__(self, channel: Channel[T], number: int) -> None:
        self.channel = channel
        self._number = number
        self._closed = False
        self._generation = channels.generation

    def close(self) -> None:
        """It is gone. From anywhere; a second time it does nothing."""
        if not self._closed:
            self._closed = True
            self._settle()
            scheduler.post(partial(_end_closed, self.channel, self._number))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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
            _arrives(self.channel, self._number)

    def __reduce__(self) -> Any:
        self._open_channel()
        return _arrived, (type(self), self.channel, self._number)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{' closed' if self._closed else ''} of {self.channel!r}>"


class Sender(_End[T]):
    """An end by which things are sent: see `Channel.sender`. With ``with`` it is closed at the end of the block."""

    def send(self, item: T) -> Awaitable[None]:
        """As `Channel.send`."""
        return self._open_channel().send(item)

    def put(self, item: T, timeout: float | None = None) -> None:
        """As `Channel.put`."""
        self._open_channel().put(item, timeout)

    def sending(self, item: T, *, when: bool = True) -> Guard[None]:
        """As `Channel.sending`."""
        return self._open_channel().sending(item, when=when)


class Receiver(_End[T]):
    """An end by which things are received: see `Channel.receiver`. ``async for`` and ``for`` work as with
    the channel."""

    def receive(self) -> Awaitable[T]:
        """As `Channel.receive`."""
        return self._open_channel().receive()

    def get(self, timeout: float | None = None) -> T:
        """As `Channel.get`."""
        return self._open_channel().get(timeout)

    def receiving(self, *, when: bool = True) -> Guard[T]:
        """As `Channel.receiving`."""
        return self._open_channel().receiving(when=when)

    def __aiter__(self) -> AsyncIterator[T]:
        return self._open_channel().__aiter__()

    def __iter__(self) -> Iterator[T]:
        return self._open_channel().__iter__()


class _Count:
    """The ends of one channel, where it lives. `holders` are the images that have one which has left; None is this
    one, to which it has come back."""

    def __init__(self) -> None:
        self.made = 0
        self.open: dict[Literal["send", "receive"], set[int]] = {"send": set(), "receive": set()}
        self.holders: dict[int, set[Peer | None]] = {}


_counts: WeakKeyDictionary[Channel[Any], _Count] = WeakKeyDictionary()


def new_end(kind: type[_End[T]], channel: Channel[T]) -> Any:
    """One more. The owner counts it, or any thread does before anybody else can know it."""
    if channel.is_remote:
        raise RuntimeError(f"ends are made where the channel lives, and {channel!r} is only known here")
    count = _counts.get(channel)
    if count is None:
        count = _counts.setdefault(channel, _Count())
    count.made += 1  # no call since the look: no other thread ran in between
    number = count.made
    count.open["send" if kind is Sender else "receive"].add(number)
    return kind(channel, number)


def _arrived(kind: type[_End[T]], channel: Channel[T], number: int) -> _End[T]:
    _arrives(channel, number)
    return kind(channel, number)


def _arrives(channel: Channel[Any], number: int) -> None:
    if channel.is_remote:
        scheduler.post(partial(_say, channel, words.OPENED, number))
    else:
        scheduler.post(partial(_held_by, channel, number, None))


def _say(channel: Any, word: int, number: int) -> None:
    try:
        channel._peer(may_be_closed=True).put(word, channel._extra.number, number)
    except ChannelClosed:
        pass


def _end_closed(channel: Channel[Any], number: int) -> None:
    if channel.is_remote:
        _say(channel, words.ENDED, number)
    else:
        _gone(channel, number, None)


def _gone(channel: Any, number: int, last: Peer | None) -> None:
    count = _counts.get(channel)
    if count is None:
        return
    count.holders.pop(number, None)
    for end, others in count.open.items():
        if number in others:
            others.discard(number)
            if not others and not channel.closed:
                if last is not None:
                    reason = ChannelClosed(f"the last end that could {end} was in {last}, which {last.ending.how}")
                    reason.__cause__ = last.ending.death
                    channel._extra.reason = reason
                channel.close()


def _held_by(channel: Any, number: int, holder: Peer | None) -> None:
    count = _counts.get(channel)
    if count is not None:
        count.holders.setdefault(number, set()).add(holder)


def _hear_opened(peer: Peer, channel: int, number: int, _: bytes) -> None:
    its = channel_of(peer, channel)
    if its is not None:
        _held_by(its, number, peer)
        peer.ends[its._extra.number, number] = None


def _hear_ended(peer: Peer, channel: int, number: int, _: bytes) -> None:
    its = channel_of(peer, channel)
    peer.ends.pop((peer.post.aliases.get(channel, channel), number), None)
    if its is not None:
        _gone(its, number, None)


def _lost(peer: Peer) -> None:
    for channel, number in peer.ends:
        its = peer.post.channels.get(channel)
        count = _counts.get(its) if its is not None else None
        if count is not None and number in count.holders:
            count.holders[number].discard(peer)
            if not count.holders[number]:
                _gone(its, number, peer)


OBEYED[words.OPENED] = _hear_opened
OBEYED[words.ENDED] = _hear_ended
TOLD_OF_LOSS.append(_lost)
