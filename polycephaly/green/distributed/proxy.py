"""The proxy side: a channel in a process other than its owning process.

    await send(item) ──pickled──> RemoteOperation, parked ──OFFER──> owner ──DONE──> goes on
    await receive() ──> RemoteOperation, parked ──DEMAND──> owner ──GIVE──> unpickled, TAKE

A proxy is a `Channel` like any other, but without `claim` and a `default` of `select`. A thread
that waits here waits for another process, so this is no deadlock.

A proxy learns that its channel is closed from an answer, or from the end of the owning process;
both set `ended`. No operation relies on `ended`, because the owning process's own answer says more.
An unrequested REFUSED sets `_closed`.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Generator
from types import coroutine
from typing import Any, Literal
from weakref import WeakValueDictionary

from ...errors import ChannelClosed, ItemLost
from .. import channel as channels
from ..channel import Channel, Claim, _Buffered
from ..parking import Parking
from ..scheduler import PARK, scheduler
from ..select import Offer
from ..waiting import NOTHING, Refused, Waiter
from . import opcodes
from .connection import OBEYED, TOLD_OF_LOSS, PeerConnection, PeerEnding
from .credit import bring_home
from .packed import NOT_KNOWN, PackedItem, opened, packed, unpack_reason
from .transport import ChannelTransport, the_post

__all__ = ["ChannelProxy", "remote_end"]


class _Away:
    """The state of a proxy."""

    __slots__ = ("ended", "home", "name", "number", "reason")

    def __init__(self, home: str, number: int, name: str) -> None:
        self.ended = False  # closed by others, as far as is known
        self.reason: BaseException | None = None  # from an unrequested REFUSED
        self.home = home
        self.number = number
        self.name = name


class _Credit:
    """The places that the owning process has granted to this process."""

    __slots__ = ("places",)

    def __init__(self) -> None:
        self.places = 0


class RemoteOperation(Parking):
    """A send or receive requested from the owning process; the awaitable of its answer."""

    __slots__ = ("errors", "number", "payload", "peer", "remote", "was_sent")

    def __init__(self, remote: ChannelProxy, peer: PeerConnection, payload: bytes | None) -> None:
        super().__init__()
        self.remote = remote
        self.peer = peer
        self.payload = payload  # None for a receive
        self.errors: list[BaseException] = []

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"Channel.{'receive' if self.payload is None else 'send'}"

    def enter(self, thread: Any) -> bool:
        peer, self.number = self.peer, next(self.peer.numbers)
        peer.waiting[self.number] = self
        self.was_sent = not peer.lost
        kind = opcodes.DEMAND if self.payload is None else opcodes.OFFER
        peer.put(kind, self.remote._extra.number, self.number, _PLAIN + (self.payload or b""))
        return True

    def send(self, value: Any) -> Any:
        if value.__class__ is Refused:
            raise value.error
        return super().send(value)

    def throw(self, error: BaseException, *_: Any) -> Any:
        if self.number not in self.peer.waiting:  # already answered: the answer comes first
            self.thread._interrupt(error)  # type: ignore[union-attr]
            return PARK
        if self.payload is None:  # a GIVE under way will be answered with PASS
            self.leave()
            raise error
        self.errors.append(error)
        if len(self.errors) == 1:
            self.peer.put(opcodes.WITHDRAW, 0, self.number)
        return PARK

    def leave(self) -> None:
        if self.peer.waiting.pop(self.number, None) is not None:
            self.peer.put(opcodes.WITHDRAW, 0, self.number)

    def close(self) -> None:
        if self.thread is not None:
            self.leave()

    # -- answers of the owning process -------------------------------------------------------------

    def done(self, value: Any = None) -> None:
        self.wake(value)
        for error in self.errors:
            self.thread._interrupt(error)  # type: ignore[union-attr]

    def withdrawn(self) -> None:
        self.wake(Refused(self.errors[0]))
        for error in self.errors[1:]:
            self.thread._interrupt(error)  # type: ignore[union-attr]

    def refused(self, error: BaseException) -> None:
        if self.errors:
            self.withdrawn()
        else:
            self.wake(Refused(error))

    def lost(self, error: ChannelClosed) -> None:
        if self.payload is None or not self.was_sent:
            self.refused(error)
            return
        self.wake(Refused(_lost_item(error)))
        for each in self.errors:
            self.thread._interrupt(each)  # type: ignore[union-attr]


class ChannelProxy(Channel[Any]):
    __slots__ = ()
    _extra: _Away  # type: ignore[assignment]
    is_remote = True

    # -- operations of green threads ---------------------------------------------------------------

    @coroutine
    def send(self, item: Any) -> Generator[Any, Any, None]:
        if get_ident() != scheduler.owner:
            yield from self._from_outside(self._send_here, item)
        else:
            yield from self._send_here(item)

    @coroutine
    def receive(self) -> Generator[Any, Any, Any]:
        if get_ident() != scheduler.owner:
            return (yield from self._from_outside(self._receive_here))
        return (yield from self._receive_here())

    @coroutine
    def _send_here(self, item: Any) -> Generator[Any, Any, None]:
        peer = self._peer()
        content = packed(item)
        if not self._send_by_credit(peer, content):
            yield from RemoteOperation(self, peer, content)

    @coroutine
    def _receive_here(self) -> Generator[Any, Any, Any]:
        return opened((yield from RemoteOperation(self, self._peer(may_be_closed=True), None)))

    def _send_by_credit(self, peer: PeerConnection, content: bytes) -> bool:
        return False

    def _peer(self, may_be_closed: bool = False) -> PeerConnection:
        """Return the connection to the owning process. Raises `ChannelClosed`."""
        if self._closed and not may_be_closed:
            raise ChannelClosed(f"{self!r} was closed") from self._extra.reason
        away = self._extra
        try:
            post = the_post()
        except RuntimeError:  # this process has no pool any more
            raise _gone(
                self, PeerEnding("has ended, as all drones of this image have", None)
            ) from None
        peer = post.dial(away.home, away.name)
        if peer is None:
            raise _gone(self, post.gone.get(away.home, PeerEnding("has ended", None)))
        return peer

    # -- for select --------------------------------------------------------------------------------

    def _try_send(self, thread: Any, item: Any) -> bool:
        self._peer()
        return False

    def _try_receive(self, thread: Any) -> Any:
        self._peer(may_be_closed=True)
        return NOTHING

    def _enlist(self, end: str, waiter: Waiter) -> None:
        assert isinstance(waiter, Offer)
        select = waiter.select
        try:
            peer = self._peer(may_be_closed=end == "receive")
            if not select.number:
                select.number = next(the_post().selects)
            payload = opcodes.SELECT.pack(select.number) + (
                packed(waiter.item) if end == "send" else b""
            )
        except Exception as error:
            waiter.refuse(error)
            return
        number = next(peer.numbers)
        peer.waiting[number] = waiter
        waiter.at = peer, number, self
        peer.put(
            opcodes.OFFER if end == "send" else opcodes.DEMAND, self._extra.number, number, payload
        )

    def _strike(self, end: str, waiter: Waiter) -> bool:
        assert isinstance(waiter, Offer)
        if waiter.at is None:
            return False
        (peer, number, _), waiter.at = waiter.at, None
        if peer.waiting.pop(number, None) is not None:
            peer.put(opcodes.WITHDRAW, 0, number)
        return True

    # -- closing, and the rest ---------------------------------------------------------------------

    def claim(self, end: Literal["send", "receive"] | None = None) -> Claim[Any]:
        raise RuntimeError(f"an end of {self!r} can be claimed only in the image where it was made")

    def close(self) -> None:
        self._closed = True
        scheduler.post(self._close_here)

    def _close_here(self) -> None:
        try:
            self._peer(may_be_closed=True).put(opcodes.CLOSE, self._extra.number)
        except ChannelClosed:
            pass

    def _give_back_here(self, item: Any) -> None:
        try:
            self._peer(may_be_closed=True).put(opcodes.RETURN, self._extra.number, 0, packed(item))
        except ChannelClosed:  # no process can receive the item any more
            pass

    def __reduce__(self) -> Any:
        away = self._extra
        return remote_end, (away.home, away.number, self.capacity, away.name)

    @property
    def closed(self) -> bool:
        return self._closed or self._extra.ended

    def __repr__(self) -> str:
        kind = f"Channel of {self.capacity}" if self.capacity else "Channel"
        return f"<{kind}{' closed' if self.closed else ''} made in {self._extra.name}>"


class BufferedChannelProxy(ChannelProxy, _Buffered[Any]):
    __slots__ = ()

    def _send_by_credit(self, peer: PeerConnection, content: bytes) -> bool:
        credit = peer.credits.get(self._extra.number)
        if credit is None or not credit.places:
            return False
        credit.places -= 1
        peer.put(opcodes.ITEM, self._extra.number, 0, content)
        return True

    def _try_send(self, thread: Any, item: Any) -> bool:
        credit = self._peer().credits.get(self._extra.number)
        return (
            credit is not None
            and credit.places > 0
            and self._send_by_credit(self._peer(), packed(item))
        )


_PLAIN = opcodes.SELECT.pack(0)
ends: WeakValueDictionary[tuple[str, int], Channel[Any]] = WeakValueDictionary()
"""The proxies in this process, by address and number. However often a channel arrives, it is one
object in each process."""


def remote_end(home: str, number: int, capacity: int, name: str) -> Channel[Any]:
    """Return the object that a channel is unpickled as: the channel itself in its own process, else
    a proxy."""
    post = the_post()
    if home == post.address:
        own = post.channels.get(number)
        if own is not None:
            return own
        return _closed_here(post, number, capacity)
    end = ends.get((home, number))
    if end is None:
        end = ends.setdefault((home, number), become_remote(Channel(capacity), home, number, name))
    return end


def _closed_here(post: ChannelTransport, number: int, capacity: int) -> Channel[Any]:
    """Return a closed channel in place of one of this process that was closed, empty and forgotten.
    Its errors still have the reason."""
    closed: Channel[Any] = Channel(capacity)
    reason = post.reasons.get(number)
    if reason is not None:
        bring_home(closed, post, number)
        closed._extra.reason = reason  # type: ignore[union-attr]
    closed.close()
    return closed


def become_remote(channel: Channel[Any], home: str, number: int, name: str) -> Channel[Any]:
    """Turn `channel` into a proxy. No thread of this process waits in it."""
    channel.__class__ = BufferedChannelProxy if channel.capacity else ChannelProxy
    channel._extra = _Away(home, number, name)  # type: ignore[assignment]
    channel._plain = -channels.generation  # no fast path
    channel._receiver = channel._sender = channel._item = None
    return channel


def _lost_item(error: ChannelClosed) -> ItemLost:
    lost = ItemLost(f"{error}; perhaps it had the item that was being sent")
    lost.__cause__ = error
    return lost


def _gone(remote: ChannelProxy, ending: PeerEnding) -> ChannelClosed:
    error = ChannelClosed(
        f"{remote!r} is closed: {remote._extra.name}, where it lived, {ending.how}"
    )
    error.__cause__ = ending.death
    remote._extra.ended = True
    return error


def _was_closed(remote: Any, error: ChannelClosed) -> ChannelClosed:
    """Complete an error that the owning process has answered: name the channel, if that process has
    forgotten the name."""
    if str(error).endswith(NOT_KNOWN):
        error.args = (f"{remote!r} {NOT_KNOWN}",)
    remote._extra.ended = True
    return error


# -- messages of an owning process -----------------------------------------------------------------


def _hear_done(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    ask = peer.waiting.pop(op, None)
    if ask is not None:
        ask.done()


def _hear_withdrawn(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    ask = peer.waiting.pop(op, None)
    if ask is not None:
        ask.withdrawn()


def _hear_give(peer: PeerConnection, _: int, op: int, payload: bytes) -> None:
    waiter = peer.waiting.get(op)
    item = PackedItem(payload)
    if waiter is None:
        peer.put(opcodes.PASS, 0, op)
    elif isinstance(waiter, RemoteOperation):
        del peer.waiting[op]
        peer.put(opcodes.TAKE, 0, op)
        waiter.done(item)
    elif op in peer.held:  # the select was held for this item
        del peer.held[op]
        _take(peer, op, waiter, item)
    else:

        def take(held: bool) -> None:
            if held:
                _take(peer, op, waiter, item)
            else:
                peer.put(opcodes.PASS, 0, op)

        waiter.select.ask(take)


def _take(peer: PeerConnection, op: int, offer: Offer, item: PackedItem) -> None:
    peer.put(opcodes.TAKE, 0, op)
    _settle(peer, op, offer)
    try:
        value = opened(item)
    except Exception as error:
        offer.fail(error)
    else:
        offer.happen(value)


def _settle(peer: PeerConnection, op: int, offer: Offer) -> None:
    """Drop an offer without WITHDRAW, because the owning process knows that it is over."""
    peer.waiting.pop(op, None)
    offer.at = None


def _hear_hold(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    waiter = peer.waiting.get(op)
    if waiter is None:
        peer.put(opcodes.PASS, 0, op)
        return

    def answer(held: bool) -> None:
        if held:
            peer.held[op] = waiter
        peer.put(opcodes.HELD if held else opcodes.PASS, 0, op)

    waiter.select.ask(answer)


def _hear_commit(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    offer = peer.held.pop(op, None)
    if offer is not None:
        _settle(peer, op, offer)
        offer.happen(None)


def _hear_release(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    offer = peer.held.pop(op, None)
    if offer is not None:
        offer.release()


def _hear_refused(peer: PeerConnection, number: int, op: int, payload: bytes) -> None:
    error = unpack_reason(payload)
    if not op:
        end: Any = ends.get((peer.who, number))
        if end is not None:
            end._closed, end._extra.reason = True, error.__cause__
        credit = peer.credits.get(number)
        if credit is not None and not credit.places:  # else RECALL is about to come
            del peer.credits[number]
        return
    waiter, held = peer.waiting.pop(op, None), peer.held.pop(op, None)
    if isinstance(error, ChannelClosed) and waiter is not None:
        error = _was_closed(
            waiter.remote if isinstance(waiter, RemoteOperation) else waiter.at[2], error
        )
    if isinstance(waiter, RemoteOperation):
        waiter.refused(error)
    elif isinstance(waiter, Offer):
        waiter.at = None
        if held is not None:
            waiter.fail(error)
        else:
            waiter.refuse(error)


def _hear_credit(peer: PeerConnection, number: int, places: int, _: bytes) -> None:
    credit = peer.credits.get(number)
    if credit is None:
        credit = peer.credits[number] = _Credit()
    credit.places += places


def _hear_alias(peer: PeerConnection, number: int, proper: int, _: bytes) -> None:
    end = ends.pop((peer.who, number), None)
    if end is not None:
        end._extra.number = proper  # type: ignore[union-attr]
        ends.setdefault((peer.who, proper), end)


def _hear_recall(peer: PeerConnection, number: int, _: int, __: bytes) -> None:
    credit = peer.credits.pop(number, None)
    if credit is not None:
        peer.put(opcodes.BACK, number, credit.places)


def _lost(peer: PeerConnection) -> None:
    """Fail all operations on the channels of a process that is gone."""
    waiting, peer.waiting = peer.waiting, {}
    held, peer.held = peer.held, {}
    for op, waiter in waiting.items():
        if isinstance(waiter, RemoteOperation):
            waiter.lost(_gone(waiter.remote, peer.ending))
        elif isinstance(waiter, Offer):
            error = _gone(waiter.at[2], peer.ending)
            waiter.at = None
            if op not in held:
                waiter.refuse(error)
            elif waiter.select.guards[waiter.index].end == "send":
                # A receiver may have been given the item.
                waiter.fail(_lost_item(error))
            else:
                waiter.fail(error)
    for reference in ends.valuerefs():  # a copy: other threads may add proxies meanwhile
        end: Any = reference()
        if end is not None and end._extra.home == peer.who:
            end._extra.ended = True


OBEYED.update(
    {
        opcodes.DONE: _hear_done,
        opcodes.WITHDRAWN: _hear_withdrawn,
        opcodes.GIVE: _hear_give,
        opcodes.HOLD: _hear_hold,
        opcodes.COMMIT: _hear_commit,
        opcodes.RELEASE: _hear_release,
        opcodes.REFUSED: _hear_refused,
        opcodes.CREDIT: _hear_credit,
        opcodes.ALIAS: _hear_alias,
        opcodes.RECALL: _hear_recall,
    }
)
TOLD_OF_LOSS.append(_lost)
