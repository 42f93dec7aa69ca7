"""Ends of channels: senders and receivers, counted so that a channel closes with the last of a
kind.

    channel.sender() ──> Sender        send, put, sending
    channel.receiver() ──> Receiver    receive, get, receiving, async for

Any number of threads in any process may use a `Channel`. If one of them ends, that closes nothing,
because others might still send. An end is known. It is gone when it is closed, or when the process
that holds it has ended. When the last of its kind is gone, the channel is closed; if a process
died, the waiters at the other side get the cause. An end that never left its process is gone only
when it is closed.

In a drone, an end is also gone when nothing there refers to it any more (LET_GO): with the call
that brought it, unless the call has stored it in a global, an attribute or a thread. An end in a
reference cycle is gone when the garbage collector finds the cycle. A pickled end was handed on:
only its next holder releases it. Outside of drones, dropping an end reports nothing.

The owning process counts the holders of each end, by token. See
docs/decisions/0007-channels-between-processes.md.
"""

from __future__ import annotations

import secrets
from _thread import LockType, allocate_lock, get_ident
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial
from struct import Struct
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

_FIRST = 0  # token of an end that has not arrived anywhere
_TOKENS = Struct("<QQ")
# Seconds, after the last holder of an end has died, for the next holder to report.
MOMENT = 0.1
# Seconds that a call waits until its drone has reported the ends that came with the call.
SAID_WITHIN = 1.0
# Timer steps in a moment. A suspended machine loses one step at most, however long that lasts.
LOOKS = 5


class _End(Generic[T]):
    """An end of a channel. Like a channel, an end that is sent to another process is the same end
    there."""

    _only_follows = True  # follows tasks, does not wait for them: see `_waiters` in pool/inputs.py

    def __init__(self, channel: Channel[T], number: int, token: int = _FIRST) -> None:
        self.channel = channel
        self._number = number
        self._token = token
        self._calls = 0  # calls on their way with this end
        self._closed = self._handed_on = False
        self._generation = channels.generation

    def __del__(self) -> None:
        """Release the end, in a drone. Runs in any thread, in the middle of anything. A fork of the
        drone does not release its copy."""
        if (
            self._token
            and not (self._closed or self._handed_on)
            and _lets_go()
            and self._generation >= channels.oldest
        ):
            scheduler.post(partial(_let_go, self.channel, self._number, self._token))

    def close(self) -> None:
        """Close the end. Any thread may call this, more than once.

        The channel is closed with its last end of this kind.
        """
        if not self._closed:
            self._closed = True
            self._settle()
            scheduler.post(partial(_end_closed, self.channel, self._number))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_channel(self) -> Channel[T]:
        if self._closed:
            raise ChannelClosed(f"{self!r} was closed")
        self._settle()
        return self.channel

    def _settle(self) -> None:
        """Register an end that came with a fork. From its first use on, this process holds the end
        as if sent here."""
        if self._generation < channels.oldest:
            self._generation = channels.generation
            self.channel._is_inherited()
            # Not the token of the snapshot's process, which keeps its own hold.
            self._token = _arrives(self.channel, self._number, _FIRST)

    def __reduce__(self) -> Any:
        self._open_channel()
        self._handed_on = True
        if placeholders.here.now is not None:
            placeholders.here.now.moves(self)
        return _arrived, (type(self), self.channel, self._number, self._token)

    def _goes_with(self, task: Task) -> None:
        """Follow a task that has the end among its arguments, or captured. Any thread may call
        this."""
        scheduler.post(self._sent)
        task._hook(self._call_settled)

    def _sent(self) -> None:
        self._calls += 1
        _count_calls(self.channel, self._number, 1)

    def _call_settled(self, task: Any) -> None:
        scheduler.post(partial(self._came_through, _why_astray(task)))
        sent = task.sending
        if sent is None or task.number not in sent.handle.in_flight:
            # No drone has the task, so none can still open the end later.
            task.followed = ()

    def _never_arrived(self, task: Task) -> None:
        """Handle a task that was settled before and, as is known now, has come to nothing."""
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
    """The sending end of a channel; see `Channel.sender`.

    Used in a ``with`` statement, the end is closed with the block.
    """

    def send(self, item: T) -> Awaitable[None]:
        """Send `item`, as `Channel.send` does."""
        return self._open_channel().send(item)

    def put(self, item: T, timeout: float | None = None) -> None:
        """Send `item` from plain code, as `Channel.put` does."""
        self._open_channel().put(item, timeout)

    def sending(self, item: T, *, when: bool | Callable[[], object] = True) -> Guard[None]:
        """Return a guard for `select`, as `Channel.sending` does."""
        return self._open_channel().sending(item, when=when)


class Receiver(_End[T]):
    """The receiving end of a channel; see `Channel.receiver`.

    ``async for`` and ``for`` work as with the channel.
    """

    def receive(self) -> Awaitable[T]:
        """Receive an item, as `Channel.receive` does."""
        return self._open_channel().receive()

    def get(self, timeout: float | None = None) -> T:
        """Receive an item in plain code, as `Channel.get` does."""
        return self._open_channel().get(timeout)

    def receiving(self, *, when: bool | Callable[[], object] = True) -> Guard[T]:
        """Return a guard for `select`, as `Channel.receiving` does."""
        return self._open_channel().receiving(when=when)

    def __aiter__(self) -> AsyncIterator[T]:
        return _Items(self, self._open_channel())

    def __iter__(self) -> Iterator[T]:
        return _items(self, self._open_channel())


class _Items(Generic[T]):
    """Iterator of ``async for``. It refers to the end, which is therefore not released before."""

    def __init__(self, end: Receiver[T], channel: Channel[T]) -> None:
        self._end = end
        self._channel = channel

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[T]:
        return self._channel.__anext__()


def _items(end: Receiver[T], channel: Channel[T]) -> Iterator[T]:
    """Iterator of ``for``, which refers to the end for the same reason."""
    yield from channel


def _why_astray(task: Any) -> BaseException | None:
    """Return why ends sent with `task` cannot have arrived, or are gone again; None if they may be
    there."""
    error: BaseException | None = task._exception
    if isinstance(error, DroneDied) or (error is not None and task.sending is None):
        return error
    return _was_cancelled(task) if task.cancelled() and task.sending is None else None


def _was_cancelled(task: Any) -> CancelledError:
    return CancelledError(f"{task.label} was cancelled")


class _Count:
    """The ends of one channel, in its owning process.

    `holders` maps each end to its holders, by token; None stands for this process, if the end has
    come back. `passed` maps each end to the last tokens that were handed on, in order. `calls`
    counts the calls from here that are on their way with an end. While there are any, the death of
    a last holder has no effect yet, and `forsaken` keeps its cause.
    """

    def __init__(self) -> None:
        self.made = 0
        self.open: dict[Literal["send", "receive"], set[int]] = {"send": set(), "receive": set()}
        self.holders: dict[int, dict[int, PeerConnection | None]] = {}
        self.passed: dict[int, dict[int, None]] = {}
        self.calls: dict[int, int] = {}
        self.forsaken: dict[int, tuple[str, BaseException | None]] = {}


_counts: WeakKeyDictionary[Channel[Any], _Count] = WeakKeyDictionary()


def new_end(kind: type[_End[T]], channel: Channel[T]) -> Any:
    """Return a new end. Any thread may call this, because no other code can know the end before it
    is counted."""
    if channel.is_remote:
        raise RuntimeError(
            f"ends are made where the channel lives, and {channel!r} is only known here"
        )
    count = _counts.get(channel)
    if count is None:
        count = _counts.setdefault(channel, _Count())
    # No call up to the next line, so no other thread runs in between.
    count.made += 1
    number = count.made
    count.open["send" if kind is Sender else "receive"].add(number)
    return kind(channel, number)


_here: WeakValueDictionary[tuple[int, int], _End[Any]] = WeakValueDictionary()
"""The ends that have arrived in this drone, by number and `id` of the channel, which they keep
alive. Each end is one object, however often it arrives, so it is released with the last
reference."""


some_arrived = False
"""True if ends have arrived since the drone last collected reference cycles, which would keep
them."""


def _lets_go() -> bool:
    """Return True in a drone."""
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
    end._token = token  # the owning process counts this process by the last token
    return end


def _arrives(channel: Channel[Any], number: int, before: int) -> int:
    """Report that an end has arrived, and return its new token.

    In a drone, wait until the report is sent. Otherwise the drone might die after its call was
    answered, and the owning process would never know that the drone had the end. The owner thread
    reports soon, because it cannot wait for itself. The main process need not wait: no process
    outlives it that would wait for the end.
    """
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
    """Release an end, in the owning process.

    If the token holds nothing any more, the end was handed on, or has arrived at the same process
    again.
    """
    count = _counts.get(channel)
    holders = None if count is None else count.holders.get(number)
    if count is None or not holders or token not in holders:
        return
    _holds_less(count, channel, holders.pop(token))
    if not holders:  # no process died: the channel closes as if by hand
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
        keep_last(passed, before, None)  # keeps more than can be in transit at once
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
    """Drop the holder of an end whose call came to nothing, unless the end was handed on."""
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
    """Count an end as gone whose last holder was gone a moment ago, unless another holder has
    reported."""
    if scheduler.mail is not None:
        scheduler.mail.hear_all()
    count = _counts.get(channel)
    if count is None or not _is_open(count, number) or count.holders.get(number):
        return
    # One of the calls may run again (`retries`), for example, which may take its time.
    if number in count.calls:
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
        # Posted, because `_astray` receives messages, which a handler must not do.
        scheduler.post(partial(_astray, its, number, token, why, None))


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
