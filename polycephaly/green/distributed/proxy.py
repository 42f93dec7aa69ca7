"""The proxy side: a channel in a process other than its owning process.

    await send(item) ──pickled──> Request, parked ──OFFER──> owner ──DONE──> goes on
    await receive() ──> Request, parked ──DEMAND──> owner ──GIVE──> TAKE, unpickled

A proxy is a `Channel` like any other, but without `claim` and a `default` of `select`. A thread
that waits here waits for another process, so this is no deadlock.

A proxy learns that its channel is closed from an answer, or from the end of the owning process;
both set `ended`. No operation relies on `ended`, because the owning process's own answer says more.
An unrequested REFUSED sets `_closed`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal
from weakref import WeakValueDictionary

from ...errors import ChannelClosed, ItemLost
from ...wire.exceptions import unpack_exception
from .. import channel as channels
from ..channel import Channel, Claim
from ..scheduler import scheduler
from ..waiting import NOTHING, Waiter
from . import opcodes
from .owner import make_owned
from .packed import CLOSED_OR_RELEASED, PackedItem, pack_item, unpack_item
from .transaction import select_number
from .transport import HANDLERS, ChannelTransport, PeerConnection, PeerEnding, get_transport


class _ProxyState:
    """The state of a proxy."""

    __slots__ = ("ended", "name", "number", "owner_address", "reason")

    def __init__(self, owner_address: str, number: int, name: str) -> None:
        self.ended = False  # closed by others, as far as is known
        self.reason: BaseException | None = None  # from an unrequested REFUSED
        self.owner_address = owner_address
        self.number = number
        self.name = name


class Request:
    """A send or receive requested from the owning process: the `location` of its waiter, which is a
    green thread or an offer of a `select`.
    """

    __slots__ = ("end", "errors", "is_held", "number", "peer", "proxy", "waiter", "was_sent")

    def __init__(
        self, proxy: ChannelProxy, peer: PeerConnection, end: str, waiter: Any, payload: bytes
    ) -> None:
        self.proxy = proxy
        self.peer = peer
        self.end = end
        self.waiter = waiter
        self.errors: list[BaseException] = []  # interruptions of a send, which waits for its answer
        self.is_held = False  # an offer of a `select` that is HELD
        self.was_sent = not peer.lost
        self.number = next(peer.numbers)
        peer.requests[self.number] = self
        waiter.location = self
        kind = opcodes.OFFER if end == "send" else opcodes.DEMAND
        peer.put(kind, proxy.rare_state.number, self.number, payload)

    def finish(self, finish: Callable[[Any], object], value: Any) -> None:
        self.peer.requests.pop(self.number, None)
        self.waiter.location = None
        finish(value)
        for error in self.errors:
            self.waiter.thread.interrupt(error)

    def fail(self, error: BaseException, may_have_happened: bool = False) -> None:
        if self.errors and not may_have_happened:
            error = self.errors.pop(0)
        self.finish(self.waiter.fail if self.is_held else self.waiter.refuse, error)

    def take(self, item: PackedItem) -> None:
        self.peer.put(opcodes.TAKE, 0, self.number)
        try:
            value = item if self.waiter.select is None else unpack_item(item)
        except BaseException as error:
            self.finish(self.waiter.fail, error)
        else:
            self.finish(self.waiter.complete, value)
        finally:
            del self  # no cycle through the error's traceback


class ChannelProxy(Channel[Any]):
    __slots__ = ()
    rare_state: _ProxyState  # type: ignore[assignment]
    is_remote = True

    def _peer(self, may_be_closed: bool = False) -> PeerConnection:
        """Return the connection to the owning process. Raises `ChannelClosed`."""
        if self._closed and not may_be_closed:
            raise ChannelClosed(f"{self!r} was closed") from self.rare_state.reason
        state = self.rare_state
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

    def attempt_send(self, thread: Any, item: Any) -> bool:
        del thread  # as in `ChannelQueues.attempt_send`
        peer, number = self._peer(), self.rare_state.number
        if not peer.credits.get(number):
            return False
        packed = pack_item(item)
        if not peer.credits.get(number):  # the item's own code has let others send
            return False
        peer.credits[number] -= 1
        peer.put(opcodes.ITEM, number, 0, packed.content)
        packed.hand_on_ends()
        return True

    def attempt_receive(self, thread: Any) -> Any:
        del thread
        self._peer(may_be_closed=True)
        return NOTHING

    open_item = staticmethod(unpack_item)

    def enqueue(self, end: str, waiter: Waiter) -> None:
        try:
            peer = self._peer(may_be_closed=end == "receive")
            payload = opcodes.SELECT.pack(0 if waiter.select is None else select_number(waiter)[1])
            if end == "send":
                packed = pack_item(waiter.item)
                payload += packed.content
                waiter.item = PackedItem(b"", packed.ends)  # the message alone has the content
        except BaseException as error:
            waiter.refuse(error)
            del waiter  # no cycle through the error's traceback
            return
        Request(self, peer, end, waiter, payload)

    def withdraw_waiter(self, waiter: Waiter) -> bool:
        request, waiter.location = waiter.location, None
        if request is None:
            return False
        if request.peer.requests.pop(request.number, None) is not None:
            request.peer.put(opcodes.WITHDRAW, 0, request.number)
        return True

    def interrupt_waiter(self, waiter: Waiter, error: BaseException) -> bool:
        request = waiter.location
        # A GIVE under way to a receiver will be answered with PASS.
        if request is None or request.end == "receive":
            return super().interrupt_waiter(waiter, error)
        request.errors.append(error)
        if len(request.errors) == 1:
            request.peer.put(opcodes.WITHDRAW, 0, request.number)
        return False

    # -- closing, and the rest ---------------------------------------------------------------------

    def claim(self, end: Literal["send", "receive"] | None = None) -> Claim[Any]:
        raise RuntimeError(
            f"an end of {self!r} can be claimed only in the process that made the channel"
        )

    def close(self) -> None:
        self._closed = True
        scheduler.post(lambda: self.tell(opcodes.CLOSE))

    def tell(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
        """Send a message about the channel, unless its owning process is gone."""
        with suppress(ChannelClosed):
            self._peer(may_be_closed=True).put(kind, self.rare_state.number, number, payload)

    def return_item_here(self, item: Any) -> None:
        packed = pack_item(item)
        self.tell(opcodes.RETURN, 0, packed.content)
        packed.hand_on_ends()

    def __reduce__(self) -> Any:
        state = self.rare_state
        return unpickle_channel, (state.owner_address, state.number, self.capacity, state.name)

    @property
    def closed(self) -> bool:
        return self._closed or self.rare_state.ended

    def __repr__(self) -> str:
        kind = f"Channel of {self.capacity}" if self.capacity else "Channel"
        return f"<{kind}{' closed' if self.closed else ''} made in {self.rare_state.name}>"


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
        closed.rare_state.reason = reason  # type: ignore[union-attr]
    closed.close()
    return closed


def make_proxy(channel: Channel[Any], owner_address: str, number: int, name: str) -> Channel[Any]:
    """Turn `channel` into a proxy. No thread of this process waits in it."""
    state = _ProxyState(owner_address, number, name)
    channel.become(ChannelProxy, state, -channels.generation)  # negative: no fast path
    return channel


def _owner_gone_error(proxy: ChannelProxy, ending: PeerEnding) -> ChannelClosed:
    error = ChannelClosed(
        f"{proxy!r} is closed: its owning process, {proxy.rare_state.name}, {ending.description}"
    )
    error.__cause__ = ending.death
    proxy.rare_state.ended = True
    return error


# -- messages of an owning process -----------------------------------------------------------------


def _on_done(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    request = peer.requests.get(op)
    if request is not None:
        request.waiter.item.hand_on_ends()
        request.finish(request.waiter.complete, None)


def _on_withdrawn(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    request = peer.requests.get(op)
    if request is not None:
        request.fail(request.errors[0])


def _on_give(peer: PeerConnection, _: int, op: int, payload: bytes) -> None:
    request, item = peer.requests.get(op), PackedItem(payload)
    if request is not None and (request.is_held or request.waiter.select is None):
        request.take(item)
    else:
        _hold(peer, op, lambda request: request.take(item))


def _on_hold(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    def on_held(request: Request) -> None:
        request.is_held = True
        peer.put(opcodes.HELD, 0, op)

    _hold(peer, op, on_held)


def _hold(peer: PeerConnection, op: int, on_held: Callable[[Request], object]) -> None:
    """Call `on_held` when the `select` of an offer is held; answer PASS if it is over."""
    request = peer.requests.get(op)
    if request is None:
        peer.put(opcodes.PASS, 0, op)
    else:
        request.waiter.select.request_hold(
            lambda held: on_held(request) if held else peer.put(opcodes.PASS, 0, op)
        )


def _on_release(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    request = peer.requests.get(op)
    if request is not None and request.is_held:
        request.is_held = False
        request.waiter.release()


def _on_refused(peer: PeerConnection, number: int, op: int, payload: bytes) -> None:
    error = unpack_exception(payload)
    if not op:
        proxy: Any = proxies.get((peer.address, number))
        if proxy is not None:
            proxy._closed, proxy.rare_state.reason = True, error.__cause__
        if peer.credits.get(number) == 0:  # else RECALL is about to come
            del peer.credits[number]
        return
    request = peer.requests.get(op)
    if request is not None:
        if isinstance(error, ChannelClosed):
            if str(error).endswith(CLOSED_OR_RELEASED):  # the owning process has forgotten the name
                error.args = (f"{request.proxy!r} {CLOSED_OR_RELEASED}",)
            request.proxy.rare_state.ended = True
        request.fail(error)


def _on_credit(peer: PeerConnection, number: int, places: int, _: bytes) -> None:
    peer.credits[number] = peer.credits.get(number, 0) + places


def _on_alias(peer: PeerConnection, number: int, own_number: int, _: bytes) -> None:
    proxy = proxies.pop((peer.address, number), None)
    if proxy is not None:
        proxy.rare_state.number = own_number  # type: ignore[union-attr]
        proxies.setdefault((peer.address, own_number), proxy)


def _on_recall(peer: PeerConnection, number: int, _: int, __: bytes) -> None:
    places = peer.credits.pop(number, None)
    if places is not None:
        peer.put(opcodes.REFUND, number, places)


def on_loss(peer: PeerConnection) -> None:
    """Fail all operations on the channels of a process that is gone."""
    for number in list(peer.requests):
        request = peer.requests.pop(number, None)
        if request is None:  # an offer of a `select` that has just ended
            continue
        error: Exception = _owner_gone_error(request.proxy, peer.ending)
        # A receiver may have been given the item.
        is_lost = request.end == "send" and (
            request.was_sent if request.waiter.select is None else request.is_held
        )
        if is_lost:
            closed = error
            text = "the item that was being sent may be lost, or may have arrived"
            error = ItemLost(f"{closed}; {text}")
            error.__cause__ = closed
        request.fail(error, is_lost)
    for reference in proxies.valuerefs():  # a copy: other threads may add proxies meanwhile
        proxy: Any = reference()
        if proxy is not None and proxy.rare_state.owner_address == peer.address:
            proxy.rare_state.ended = True


HANDLERS |= {
    opcodes.DONE: _on_done,
    opcodes.WITHDRAWN: _on_withdrawn,
    opcodes.GIVE: _on_give,
    opcodes.HOLD: _on_hold,
    opcodes.COMMIT: _on_done,
    opcodes.RELEASE: _on_release,
    opcodes.REFUSED: _on_refused,
    opcodes.CREDIT: _on_credit,
    opcodes.ALIAS: _on_alias,
    opcodes.RECALL: _on_recall,
}
