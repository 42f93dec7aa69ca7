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
from .connection import OBEYED, TOLD_OF_LOSS, PeerConnection
from .credit import bring_home
from .inherited import is_inherited, number_of_inherited
from .owner import Known, PendingOperation
from .packed import NOT_KNOWN, PackedItem
from .transaction import Transaction

__all__ = ["channel_of"]

log = logging.getLogger("polycephaly.green")


def channel_of(peer: PeerConnection, number: int) -> Any:
    if is_inherited(number):
        proper = number_of_inherited(peer.post, number)
        peer.put(opcodes.ALIAS, number, proper)
        number = proper
    channel = peer.post.channels.get(number)
    if channel is not None and not isinstance(channel._extra, Known):
        # The callback that does this is still in the scheduler's queue.
        bring_home(channel, peer.post, number)
    return channel


def _hear_op(hear: str, peer: PeerConnection, number: int, op: int, payload: bytes) -> None:
    channel = channel_of(peer, number)
    (select,) = opcodes.SELECT.unpack_from(payload)
    item = PackedItem(payload[opcodes.SELECT.size :]) if hear == "_offered" else None
    waiter = PendingOperation(channel, peer, op, select, item)
    if channel is None:
        error = ChannelClosed(f"the channel {NOT_KNOWN}")
        proper = number_of_inherited(peer.post, number) if is_inherited(number) else number
        error.__cause__ = peer.post.reasons.get(proper)
        waiter.refuse(error)
    else:
        getattr(channel, hear)(waiter)


def _hear_item(peer: PeerConnection, number: int, _: int, payload: bytes) -> None:
    channel_of(peer, number)._has_come(peer, PackedItem(payload))


def _hear_withdraw(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    waiter = peer.ops.get(op)
    if waiter is not None:
        waiter.channel._withdraw(waiter)


def _hear_take(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    deal = peer.given.pop(op, None)
    if deal is not None:
        deal.receiver.drop()
        deal.receiver.line = None
        deal.taken()


def _hear_pass(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    waiter = peer.ops.get(op)
    if waiter is not None:
        waiter.passes()


def _hear_return(peer: PeerConnection, number: int, _: int, payload: bytes) -> None:
    channel = channel_of(peer, number)
    if channel is not None:
        channel._give_back_here(PackedItem(payload))
    else:
        log.warning("an item that %s gave back to a channel is lost: the channel is closed", peer)


def _hear_held(peer: PeerConnection, _: int, op: int, __: bytes) -> None:
    answer = peer.asked.pop(op, None)
    if answer is not None:
        answer(True)


def _hear_back(peer: PeerConnection, number: int, places: int, _: bytes) -> None:
    channel = channel_of(peer, number)
    if channel is not None:
        channel._came_back(peer, places)


def _hear_close(peer: PeerConnection, number: int, _: int, __: bytes) -> None:
    channel = channel_of(peer, number)
    if channel is not None:
        channel.close()


def _lost(peer: PeerConnection) -> None:
    """Drop the offers and demands of a process that is gone, and settle its transactions and
    places."""
    ops, peer.ops = peer.ops, {}
    for op in ops.values():
        if op.line is not None and not isinstance(op.line, Transaction):
            op.channel._strike("send" if op.item is not None else "receive", op)
    given, peer.given = peer.given, {}
    for deal in reversed(given.values()):  # so that returned items keep the order of sending
        deal.lost(deal.receiver)
    asked, peer.asked = peer.asked, {}
    for answer in asked.values():
        answer(False)
    accounts, peer.accounts = peer.accounts, {}
    for account in accounts.values():
        # Not by number: the transport may have closed, and then knows none.
        account.channel._extra.accounts.pop(peer, None)
        scheduler.post(account.channel._match)


OBEYED.update(
    {
        opcodes.OFFER: partial(_hear_op, "_offered"),
        opcodes.DEMAND: partial(_hear_op, "_demanded"),
        opcodes.ITEM: _hear_item,
        opcodes.WITHDRAW: _hear_withdraw,
        opcodes.TAKE: _hear_take,
        opcodes.PASS: _hear_pass,
        opcodes.RETURN: _hear_return,
        opcodes.HELD: _hear_held,
        opcodes.BACK: _hear_back,
        opcodes.CLOSE: _hear_close,
    }
)
TOLD_OF_LOSS.append(_lost)
