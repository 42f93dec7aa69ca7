"""Handlers of the messages about channels of this process.

Each message calls a method of the channel, of a pending operation or of a transaction.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from ...errors import ChannelClosed
from ..scheduler import scheduler
from . import opcodes
from .inherited import is_inherited, number_of_inherited
from .owner import OwnedState, PendingOperation, make_owned
from .packed import CLOSED_OR_RELEASED, PackedItem
from .transport import HANDLERS, PeerConnection

log = logging.getLogger("polycephaly.green")


def channel_of(peer: PeerConnection, number: int) -> Any:
    if is_inherited(number):
        own_number = number_of_inherited(peer.transport, number)
        peer.put(opcodes.ALIAS, number, own_number)
        number = own_number
    channel = peer.transport.channels.get(number)
    if channel is not None and not isinstance(channel.rare_state, OwnedState):
        # The callback that does this is still in the scheduler's queue.
        make_owned(channel, peer.transport, number)
    return channel


def _on_operation(method: str, peer: PeerConnection, number: int, op: int, payload: bytes) -> None:
    channel = channel_of(peer, number)
    (select,) = opcodes.SELECT.unpack_from(payload)
    item = PackedItem(payload[opcodes.SELECT.size :]) if method == "on_offer" else None
    waiter = PendingOperation(channel, peer, op, select, item)
    if channel is None:
        error = ChannelClosed(f"the channel {CLOSED_OR_RELEASED}")
        own_number = peer.transport.aliases.get(number, number)
        error.__cause__ = peer.transport.close_reasons.get(own_number)
        waiter.refuse(error)
    else:
        getattr(channel, method)(waiter)


def _on_item(peer: PeerConnection, number: int, _: int, payload: bytes) -> None:
    channel_of(peer, number).on_item(peer, PackedItem(payload))


def _on_withdraw(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    waiter = peer.operations.get(op)
    if waiter is not None:
        waiter.channel.on_withdraw(waiter)


def _on_answer(accepted: bool, peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    waiter = peer.operations.get(op)
    if waiter is not None:
        waiter.answer(accepted)


def _on_return(peer: PeerConnection, number: int, _: int, payload: bytes) -> None:
    channel = channel_of(peer, number)
    if channel is not None:
        channel.return_item_here(PackedItem(payload))
    else:
        log.warning(
            "an item that %s returned to a channel is lost, because the channel is closed", peer
        )


def _on_credit_returned(peer: PeerConnection, number: int, places: int, _: bytes) -> None:
    channel = channel_of(peer, number)
    if channel is not None:
        channel.on_credit_returned(peer, places)


def _on_close(peer: PeerConnection, number: int, _: int, __: bytes) -> None:
    channel = channel_of(peer, number)
    if channel is not None:
        channel.close()


def on_loss(peer: PeerConnection) -> None:
    """Drop the offers and demands of a process that is gone, and settle its transactions and
    places.
    """
    operations, peer.operations = peer.operations, {}
    for op in operations.values():
        op.channel.withdraw_waiter(op)
    channels = {op.channel for op in operations.values()}
    # No receiver gets a returned item before all items are back. They come back in reverse, and are
    # then in the order of sending.
    for channel in channels:
        channel.rare_state.is_matching = True
    try:
        for op in reversed(operations.values()):
            op.answer(False)
    finally:
        for channel in channels:
            channel.rare_state.is_matching = False
    for channel in channels:
        channel.match()
    accounts, peer.accounts = peer.accounts, {}
    for account in accounts.values():
        # Not by number: the transport may have closed, and then knows none.
        account.channel.rare_state.accounts.pop(peer, None)
        scheduler.post(account.channel.match)


HANDLERS |= {
    opcodes.OFFER: partial(_on_operation, "on_offer"),
    opcodes.DEMAND: partial(_on_operation, "on_demand"),
    opcodes.ITEM: _on_item,
    opcodes.WITHDRAW: _on_withdraw,
    opcodes.TAKE: partial(_on_answer, True),
    opcodes.PASS: partial(_on_answer, False),
    opcodes.RETURN: _on_return,
    opcodes.HELD: partial(_on_answer, True),
    opcodes.REFUND: _on_credit_returned,
    opcodes.CLOSE: _on_close,
}
