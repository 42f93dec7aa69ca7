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
from ...wire.exceptions import unpack_exception
from .. import channel as channels
from ..channel import Channel, Claim, _Buffered
from ..parking import Parking
from ..scheduler import PARK, scheduler
from ..select import Offer
from ..waiting import NOTHING, Refused, Waiter
from . import opcodes
from .connection import HANDLERS, PeerConnection, PeerEnding
from .credit import make_owned
from .packed import CLOSED_OR_RELEASED, PackedItem, pack_item, unpack_item
from .transport import ChannelTransport, get_transport


class _ProxyState:
    """The state of a proxy."""

    __slots__ = ("ended", "name", "number", "owner_address", "reason")

    def __init__(self, owner_address: str, number: int, name: str) -> None:
        self.ended = False  # closed by others, as far as is known
        self.reason: BaseException | None = None  # from an unrequested REFUSED
        self.owner_address = owner_address
        self.number = number
        self.name = name


class RemoteOperation(Parking):
    """A send or receive requested from the owning process; the awaitable of its answer."""

    __slots__ = ("errors", "number", "payload", "peer", "proxy", "was_sent")

    def __init__(self, proxy: ChannelProxy, peer: PeerConnection, payload: bytes | None) -> None:
        super().__init__()
        self.proxy = proxy
        self.peer = peer
        self.payload = payload  # None for a receive
        self.errors: list[BaseException] = []

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"Channel.{'receive' if self.payload is None else 'send'}"

    def enter(self, thread: Any) -> bool:
        peer, self.number = self.peer, next(self.peer.numbers)
        peer.requests[self.number] = self
        self.was_sent = not peer.lost
        kind = opcodes.DEMAND if self.payload is None else opcodes.OFFER
        peer.put(kind, self.proxy._extra.number, self.number, _NO_SELECT + (self.payload or b""))
        return True

    def send(self, value: Any) -> Any:
        if value.__class__ is Refused:
            raise value.error
        return super().send(value)

    def throw(self, error: BaseException, *_: Any) -> Any:
        if self.number not in self.peer.requests:  # already answered: the answer comes first
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
        if self.peer.requests.pop(self.number, None) is not None:
            self.peer.put(opcodes.WITHDRAW, 0, self.number)

    # -- answers of the owning process -------------------------------------------------------------

    def on_done(self, value: Any = None) -> None:
        self.wake(value)
        for error in self.errors:
            self.thread._interrupt(error)  # type: ignore[union-attr]

    def on_withdrawn(self) -> None:
        self.wake(Refused(self.errors[0]))
        for error in self.errors[1:]:
            self.thread._interrupt(error)  # type: ignore[union-attr]

    def on_refused(self, error: BaseException) -> None:
        if self.errors:
            self.on_withdrawn()
        else:
            self.wake(Refused(error))

    def on_lost(self, error: ChannelClosed) -> None:
        if self.payload is None or not self.was_sent:
            self.on_refused(error)
            return
        self.wake(Refused(_item_lost_error(error)))
        for each in self.errors:
            self.thread._interrupt(each)  # type: ignore[union-attr]


class ChannelProxy(Channel[Any]):
    __slots__ = ()
    _extra: _ProxyState  # type: ignore[assignment]
    is_remote = True

    # -- operations of green threads ---------------------------------------------------------------

    @coroutine
    def send(self, item: Any) -> Generator[Any, Any, None]:
        if get_ident() != scheduler.owner:
            yield from self._run_in_proxy_thread(self._send_here, item)
        else:
            yield from self._send_here(item)

    @coroutine
    def receive(self) -> Generator[Any, Any, Any]:
        if get_ident() != scheduler.owner:
            return (yield from self._run_in_proxy_thread(self._receive_here))
        return (yield from self._receive_here())

    @coroutine
    def _send_here(self, item: Any) -> Generator[Any, Any, None]:
        peer = self._peer()
        content = pack_item(item)
        if not self._send_by_credit(peer, content):
            yield from RemoteOperation(self, peer, content)

    @coroutine
    def _receive_here(self) -> Generator[Any, Any, Any]:
        return unpack_item((yield from RemoteOperation(self, self._peer(may_be_closed=True), None)))

    def _send_by_credit(self, peer: PeerConnection, content: bytes) -> bool:
        return False

    def _peer(self, may_be_closed: bool = False) -> PeerConnection:
        """Return the connection to the owning process. Raises `ChannelClosed`."""
        if self._closed and not may_be_closed:
            raise ChannelClosed(f"{self!r} was closed") from self._extra.reason
        state = self._extra
        try:
            transport = get_transport()
        except RuntimeError:  # this process has no pool any more
            raise _owner_gone_error(
                self, PeerEnding("has ended, as have all drones of this process", None)
            ) from None
        peer = transport.dial(state.owner_address, state.name)
        if peer is None:
            raise _owner_gone_error(
                self, transport.endings.get(state.owner_address, PeerEnding("has ended", None))
            )
        return peer

    # -- for select --------------------------------------------------------------------------------

    def _try_send(self, thread: Any, item: Any) -> bool:
        self._peer()
        return False

    def _try_receive(self, thread: Any) -> Any:
        self._peer(may_be_closed=True)
        return NOTHING

    def _enqueue(self, end: str, waiter: Waiter) -> None:
        assert isinstance(waiter, Offer)
        select = waiter.select
        try:
            peer = self._peer(may_be_closed=end == "receive")
            if not select.number:
                select.number = next(get_transport().selects)
            payload = opcodes.SELECT.pack(select.number) + (
                pack_item(waiter.item) if end == "send" else b""
            )
        except Exception as error:
            waiter.refuse(error)
            return
        number = next(peer.numbers)
        peer.requests[number] = waiter
        waiter.registration = peer, number, self
        peer.put(
            opcodes.OFFER if end == "send" else opcodes.DEMAND, self._extra.number, number, payload
        )

    def _withdraw_waiter(self, end: str, waiter: Waiter) -> bool:
        assert isinstance(waiter, Offer)
        if waiter.registration is None:
            return False
        (peer, number, _), waiter.registration = waiter.registration, None
        if peer.requests.pop(number, None) is not None:
            peer.put(opcodes.WITHDRAW, 0, number)
        return True

    # -- closing, and the rest ---------------------------------------------------------------------

    def claim(self, end: Literal["send", "receive"] | None = None) -> Claim[Any]:
        raise RuntimeError(
            f"an end of {self!r} can be claimed only in the process that made the channel"
        )

    def close(self) -> None:
        self._closed = True
        scheduler.post(self._close_here)

    def _close_here(self) -> None:
        try:
            self._peer(may_be_closed=True).put(opcodes.CLOSE, self._extra.number)
        except ChannelClosed:
            pass

    def _return_item_here(self, item: Any) -> None:
        try:
            self._peer(may_be_closed=True).put(
                opcodes.RETURN, self._extra.number, 0, pack_item(item)
            )
        except ChannelClosed:  # no process can receive the item any more
            pass

    def __reduce__(self) -> Any:
        state = self._extra
        return unpickle_channel, (state.owner_address, state.number, self.capacity, state.name)

    @property
    def closed(self) -> bool:
        return self._closed or self._extra.ended

    def __repr__(self) -> str:
        kind = f"Channel of {self.capacity}" if self.capacity else "Channel"
        return f"<{kind}{' closed' if self.closed else ''} made in {self._extra.name}>"


class BufferedChannelProxy(ChannelProxy, _Buffered[Any]):
    __slots__ = ()

    def _send_by_credit(self, peer: PeerConnection, content: bytes) -> bool:
        places = peer.credits.get(self._extra.number)
        if not places:
            return False
        peer.credits[self._extra.number] = places - 1
        peer.put(opcodes.ITEM, self._extra.number, 0, content)
        return True

    def _try_send(self, thread: Any, item: Any) -> bool:
        peer = self._peer()
        return bool(peer.credits.get(self._extra.number)) and self._send_by_credit(
            peer, pack_item(item)
        )


_NO_SELECT = opcodes.SELECT.pack(0)
proxies: WeakValueDictionary[tuple[str, int], Channel[Any]] = WeakValueDictionary()
"""The proxies in this process, by address and number. However often a channel arrives, it is one
object in each process."""


def unpickle_channel(owner_address: str, number: int, capacity: int, name: str) -> Channel[Any]:
    """Return the object that a channel is unpickled as: the channel itself in its own process, else
    a proxy.
    """
    transport = get_transport()
    if owner_address == transport.address:
        own = transport.channels.get(number)
        if own is not None:
            return own
        return _closed_channel(transport, number, capacity)
    proxy = proxies.get((owner_address, number))
    if proxy is None:
        proxy = proxies.setdefault(
            (owner_address, number), make_proxy(Channel(capacity), owner_address, number, name)
        )
    return proxy


def _closed_channel(transport: ChannelTransport, number: int, capacity: int) -> Channel[Any]:
    """Return a closed channel in place of one of this process that was closed, empty and forgotten.
    Its errors still have the reason.
    """
    closed: Channel[Any] = Channel(capacity)
    reason = transport.close_reasons.get(number)
    if reason is not None:
        make_owned(closed, transport, number)
        closed._extra.reason = reason  # type: ignore[union-attr]
    closed.close()
    return closed


def make_proxy(channel: Channel[Any], owner_address: str, number: int, name: str) -> Channel[Any]:
    """Turn `channel` into a proxy. No thread of this process waits in it."""
    channel.__class__ = BufferedChannelProxy if channel.capacity else ChannelProxy
    channel._extra = _ProxyState(owner_address, number, name)  # type: ignore[assignment]
    channel._generation = -channels.generation  # no fast path
    channel._receiver = channel._sender = channel._item = None
    return channel


def _item_lost_error(error: ChannelClosed) -> ItemLost:
    lost = ItemLost(f"{error}; the item that was being sent may be lost, or may have arrived")
    lost.__cause__ = error
    return lost


def _owner_gone_error(proxy: ChannelProxy, ending: PeerEnding) -> ChannelClosed:
    error = ChannelClosed(
        f"{proxy!r} is closed: its owning process, {proxy._extra.name}, {ending.description}"
    )
    error.__cause__ = ending.death
    proxy._extra.ended = True
    return error


def _complete_error(proxy: Any, error: ChannelClosed) -> ChannelClosed:
    """Complete an error that the owning process has answered: name the channel, if that process has
    forgotten the name.
    """
    if str(error).endswith(CLOSED_OR_RELEASED):
        error.args = (f"{proxy!r} {CLOSED_OR_RELEASED}",)
    proxy._extra.ended = True
    return error


# -- messages of an owning process -----------------------------------------------------------------


def _on_done(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    operation = peer.requests.pop(op, None)
    if operation is not None:
        operation.on_done()


def _on_withdrawn(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    operation = peer.requests.pop(op, None)
    if operation is not None:
        operation.on_withdrawn()


def _on_give(peer: PeerConnection, _: int, op: int, payload: bytes) -> None:
    waiter = peer.requests.get(op)
    item = PackedItem(payload)
    if waiter is None:
        peer.put(opcodes.PASS, 0, op)
    elif isinstance(waiter, RemoteOperation):
        del peer.requests[op]
        peer.put(opcodes.TAKE, 0, op)
        waiter.on_done(item)
    elif op in peer.held_offers:  # the select was held for this item
        del peer.held_offers[op]
        _take_item(peer, op, waiter, item)
    else:

        def on_hold_answer(held: bool) -> None:
            if held:
                _take_item(peer, op, waiter, item)
            else:
                peer.put(opcodes.PASS, 0, op)

        waiter.select.request_hold(on_hold_answer)


def _take_item(peer: PeerConnection, op: int, offer: Offer, item: PackedItem) -> None:
    peer.put(opcodes.TAKE, 0, op)
    _drop_offer(peer, op, offer)
    try:
        value = unpack_item(item)
    except Exception as error:
        offer.fail(error)
    else:
        offer.complete(value)


def _drop_offer(peer: PeerConnection, op: int, offer: Offer) -> None:
    """Drop an offer without WITHDRAW, because the owning process knows that it is over."""
    peer.requests.pop(op, None)
    offer.registration = None


def _on_hold(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    waiter = peer.requests.get(op)
    if waiter is None:
        peer.put(opcodes.PASS, 0, op)
        return

    def on_hold_answer(held: bool) -> None:
        if held:
            peer.held_offers[op] = waiter
        peer.put(opcodes.HELD if held else opcodes.PASS, 0, op)

    waiter.select.request_hold(on_hold_answer)


def _on_commit(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    offer = peer.held_offers.pop(op, None)
    if offer is not None:
        _drop_offer(peer, op, offer)
        offer.complete(None)


def _on_release(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    offer = peer.held_offers.pop(op, None)
    if offer is not None:
        offer.release()


def _on_refused(peer: PeerConnection, number: int, op: int, payload: bytes) -> None:
    error = unpack_exception(payload)
    if not op:
        proxy: Any = proxies.get((peer.address, number))
        if proxy is not None:
            proxy._closed, proxy._extra.reason = True, error.__cause__
        if peer.credits.get(number) == 0:  # else RECALL is about to come
            del peer.credits[number]
        return
    waiter, held = peer.requests.pop(op, None), peer.held_offers.pop(op, None)
    if isinstance(error, ChannelClosed) and waiter is not None:
        error = _complete_error(
            waiter.proxy if isinstance(waiter, RemoteOperation) else waiter.registration[2], error
        )
    if isinstance(waiter, RemoteOperation):
        waiter.on_refused(error)
    elif isinstance(waiter, Offer):
        waiter.registration = None
        if held is not None:
            waiter.fail(error)
        else:
            waiter.refuse(error)


def _on_credit(peer: PeerConnection, number: int, places: int, _: bytes) -> None:
    peer.credits[number] = peer.credits.get(number, 0) + places


def _on_alias(peer: PeerConnection, number: int, own_number: int, _: bytes) -> None:
    proxy = proxies.pop((peer.address, number), None)
    if proxy is not None:
        proxy._extra.number = own_number  # type: ignore[union-attr]
        proxies.setdefault((peer.address, own_number), proxy)


def _on_recall(peer: PeerConnection, number: int, _: int, __: bytes) -> None:
    places = peer.credits.pop(number, None)
    if places is not None:
        peer.put(opcodes.REFUND, number, places)


def on_loss(peer: PeerConnection) -> None:
    """Fail all operations on the channels of a process that is gone."""
    waiting, peer.requests = peer.requests, {}
    held, peer.held_offers = peer.held_offers, {}
    for op, waiter in waiting.items():
        if isinstance(waiter, RemoteOperation):
            waiter.on_lost(_owner_gone_error(waiter.proxy, peer.ending))
        elif isinstance(waiter, Offer):
            error = _owner_gone_error(waiter.registration[2], peer.ending)
            waiter.registration = None
            if op not in held:
                waiter.refuse(error)
            elif waiter.select.guards[waiter.index].end == "send":
                # A receiver may have been given the item.
                waiter.fail(_item_lost_error(error))
            else:
                waiter.fail(error)
    for reference in proxies.valuerefs():  # a copy: other threads may add proxies meanwhile
        proxy: Any = reference()
        if proxy is not None and proxy._extra.owner_address == peer.address:
            proxy._extra.ended = True


HANDLERS.update(
    {
        opcodes.DONE: _on_done,
        opcodes.WITHDRAWN: _on_withdrawn,
        opcodes.GIVE: _on_give,
        opcodes.HOLD: _on_hold,
        opcodes.COMMIT: _on_commit,
        opcodes.RELEASE: _on_release,
        opcodes.REFUSED: _on_refused,
        opcodes.CREDIT: _on_credit,
        opcodes.ALIAS: _on_alias,
        opcodes.RECALL: _on_recall,
    }
)
