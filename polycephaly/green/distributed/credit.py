"""The buffer of a channel in its owning process, and the credit that other processes have with it.

    proxy ──ITEM──> a place that was granted    no answer: many items go in one write
          <──CREDIT── free places               <──RECALL── give back the unused places ─REFUND─>

A process that sends is granted some of the free places. If it stops sending, it gives them back
when others need them. A closed channel still takes the items that were sent into granted places
before the sender knew of the close. The channel is over when all places are back.

Receivers are given nothing in advance: if a process dies, its unused items could not be told from
the used ones.
"""

from __future__ import annotations

from typing import Any

from ..channel import _Buffered
from ..waiting import NOTHING
from . import opcodes
from .connection import PeerConnection, Transport
from .owner import CreditAccount, OwnedChannel, OwnedState
from .packed import PackedItem
from .transaction import Transaction, is_in_select


class OwnedBufferedChannel(OwnedChannel, _Buffered[Any]):
    __slots__ = ()

    def _next_item(self) -> Any:
        item = super()._next_item()
        if item is NOTHING and self._buffer:
            # No `_refill` here, because the select that it served might be the receiver's.
            item = self._buffer.popleft()
        return item

    def _store(self, item: Any) -> bool:
        if self._free() < 1:
            self._recall()
            return False
        self._buffer.append(item)
        return True

    def _free(self) -> int:
        extra = self._extra
        return self.capacity - len(self._buffer) - extra.reserved - extra.granted

    def _refill(self) -> None:
        while not self._closed and (sender := self._first("send", None)) is not None:
            if self._free() < 1:
                self._recall()
                return
            self._remove_waiter("send", sender)
            if is_in_select(sender):
                self._extra.reserved += 1
                Transaction(self, sender, None, sender.item).begin()
            else:
                self._buffer.append(sender.item)
                sender.serve(None)
                if sender.is_remote:
                    self._grant(sender.peer)  # type: ignore[attr-defined]
        for peer, account in self._extra.accounts.items():
            if not account.granted:
                self._grant(peer)

    def _grant(self, peer: PeerConnection) -> None:
        extra = self._extra
        account = extra.accounts.get(peer)
        if account is None:
            account = extra.accounts[peer] = peer.accounts[extra.number] = CreditAccount(self)
        share = self.capacity // (1 + len(extra.accounts))
        more = min(share - account.granted, self._free())
        if (
            more > 0
            and account.granted <= share // 2
            and more > share // 4
            and not (account.recalled or self._closed)
        ):
            account.granted += more
            peer.put(opcodes.CREDIT, extra.number, more)

    def _recall(self) -> None:
        for peer, account in self._extra.accounts.items():
            if account.granted and not account.recalled:
                account.recalled = True
                peer.put(opcodes.RECALL, self._extra.number)

    def _on_item(self, peer: PeerConnection, item: PackedItem) -> None:
        """Store an item that was sent into a granted place."""
        self._extra.accounts[peer].granted -= 1
        self._buffer.append(item)
        self._grant(peer)
        self._match()

    def _on_credit_returned(self, peer: PeerConnection, places: int) -> None:
        account = self._extra.accounts[peer]
        account.granted -= places
        account.recalled = False
        self._match()


def make_owned(channel: Any, transport: Transport, number: int) -> None:
    """Make a channel serve other processes too. Called by the owner thread."""
    if isinstance(channel._extra, OwnedState) and channel._extra.transport is transport:
        channel._extra.number = number  # a new one if the channel is sent away after its end
        channel._end_if_over()
        return
    old = channel._make_extra()
    extra = OwnedState(transport, number)
    extra.holder, extra.locks, extra.returned_items = old.holder, old.locks, old.returned_items
    channel._extra = extra
    channel.__class__ = OwnedBufferedChannel if isinstance(channel, _Buffered) else OwnedChannel
    channel._end_if_over()
