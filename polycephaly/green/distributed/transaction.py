"""A transaction passes one item from one sender to one receiver, exactly once, between processes.

At least one of the two is in another process, or in a `select`. The channel's owning process runs
the transaction. Meanwhile both are out of their queues.

    sender ──out of its queue──> Transaction <──out of its queue── receiver
    1  hold each of the two that is in a `select`, the smaller select
       number first                                                         HOLD ──> HELD | PASS
    2  give the item to the receiver, which confirms if it is in another
       process                                                              GIVE ──> TAKE | PASS
    3  report to the sender that it has happened                            DONE, COMMIT
    ✗  PASS at any step: nothing has happened. Each that was held is released. Both go back to
       the heads of their queues, except the one that has passed, and a held `select` of this
       process, which queues again.

See docs/decisions/0007-channels-between-processes.md for why selects cannot wait in a circle, the
outcome of each death, messages that cross, and the order of items.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from ...errors import ItemLost
from .packed import PackedItem, pack_item, unpack_item
from .transport import get_transport

log = logging.getLogger("polycephaly.green")


class Transaction:
    """The transfer of one item.

    `sender` is None for an item of the buffer, or one that was given back; `receiver` is None for a
    place in the buffer. Each is a waiter: a green thread of this process, an `Offer` of one of its
    selects, or a `PendingOperation` of another process.
    """

    __slots__ = (
        "_to_hold", "channel", "errors", "held", "item", "item_offset", "receiver", "sender",
    )  # fmt: skip

    def __init__(self, channel: Any, sender: Any, receiver: Any, item: Any) -> None:
        self.channel = channel
        self.sender = sender
        self.receiver = receiver
        self.item = item
        self.held: list[Any] = []
        self.item_offset = 0  # where the item begins in the bytes sent to the receiver's process
        self.errors: list[BaseException] = []
        """Errors raised meanwhile in a thread of this process that takes part. Its await raises
        them when the outcome is decided."""
        self._to_hold: list[Any] = []

    def begin(self) -> None:
        self.channel.rare_state.open_transactions += 1
        self.channel.rare_state.undecided += self._is_undecided()
        selects = [each for each in self._sides() if each.select is not None]
        self._to_hold = sorted(selects, key=select_number)
        if self._to_hold and self._to_hold[-1] is self.receiver and self.receiver.is_remote:
            self._to_hold.pop()
        for each in self._sides():
            each.location = self
        self._continue()

    def _sides(self) -> list[Any]:
        return [each for each in (self.sender, self.receiver) if each is not None]

    def _continue(self) -> None:
        for each in self._sides():
            if each.is_remote and (each.peer.lost or (each.withdrawn and not each.is_binding)):
                self.abort(each)
                return
        if self._to_hold:
            one = self._to_hold.pop(0)
            request_hold = one.request_hold if one.is_remote else one.select.request_hold
            request_hold(partial(self._on_hold_answer, one))
        else:
            self._hand_over()

    def _on_hold_answer(self, one: Any, held: bool) -> None:
        if held:
            self.held.append(one)
            self._continue()
        else:
            self.abort(declined_by=one)

    def _hand_over(self) -> None:
        receiver = self.receiver
        if receiver is not None and receiver.is_remote:
            try:
                packed = pack_item(self.item)
            except BaseException as error:
                error.add_note(
                    "while pickling an item of a channel, for a receiver in another process"
                )
                self._refuse_item(error)
                return
            on_answer = partial(self._on_take_answer, packed)
            self.item_offset = receiver.deliver(on_answer, packed.content)
            return
        if receiver is None:
            self.channel.buffer.append(self.item)
        else:
            self._detach(receiver)
            try:
                value = unpack_item(self.item)
            except BaseException as error:
                receiver.fail(error)
            else:
                receiver.complete(value)
        self.commit()

    def _on_take_answer(self, packed: PackedItem, taken: bool) -> None:
        """Handle the receiver's answer, or the death of its process while the item was in transit,
        or already there.
        """
        receiver = self.receiver
        if taken:
            packed.hand_on_ends()
            receiver.drop()
            receiver.location = None
            self.commit()
            return
        if not receiver.peer.lost or receiver.peer.sent <= self.item_offset:
            self.abort(receiver)
            return
        text = (
            f"{receiver.peer} {receiver.peer.ending.description} before the process confirmed "
            "the item that it was sent"
        )
        if self.sender is None:
            log.warning("%s from the buffer of %r: the item may be lost", text, self.channel)
            self._finish()
        else:
            error = ItemLost(text)
            error.__cause__ = receiver.peer.ending.death
            self._refuse_item(error)

    def commit(self) -> None:
        """Complete the transaction: the receiver has the item."""
        sender = self.sender
        if sender is not None:
            self._detach(sender)
            sender.complete(None)
        self._finish()

    def abort(self, declined_by: Any = None) -> None:
        """End the transaction without effect. `declined_by` has passed, or its process is dead."""
        for end, each in (("receive", self.receiver), ("send", self.sender)):
            if each is None:
                continue
            self._detach(each)
            if each is declined_by:
                each.drop()
            else:
                self._requeue(end, each)
        if self.sender is None:
            self.channel.rare_state.returned_items.appendleft(self.item)  # before all others
        self._finish()

    def _requeue(self, end: str, one: Any) -> None:
        """Put a waiter back into its queue, and release it if it is held."""
        held = one in self.held
        if held:
            one.release()
        if one.is_remote or not held:  # a held offer of this process was left anew by its release
            self.channel.put_back_waiter(end, one)

    def _refuse_item(self, error: BaseException) -> None:
        """Report `error` to the sender or, if the item has none any more, to the receiver."""
        sender, receiver = self.sender, self.receiver
        if sender is not None:
            self._detach(sender)
            sender.fail(error)
        if receiver is not None:
            self._detach(receiver)
            if sender is None:
                receiver.refuse(error)
            else:
                self._requeue("receive", receiver)
        self._finish()

    def _detach(self, one: Any) -> None:
        one.location = None
        if not one.is_remote and one.select is None:
            for error in self.errors:
                one.thread.interrupt(error)

    def _is_undecided(self) -> bool:
        return self.sender is None and self.receiver.select is not None

    def _finish(self) -> None:
        self.channel.rare_state.open_transactions -= 1
        self.channel.rare_state.undecided -= self._is_undecided()
        if self.receiver is None:
            self.channel.rare_state.reserved -= 1
        self.channel.match()


def select_number(waiter: Any) -> tuple[str, int]:
    """Return the number of the waiter's select. These numbers have one order in all processes."""
    if waiter.is_remote:
        return waiter.peer.address, waiter.select
    select = waiter.select
    if not select.number:
        select.number = next(get_transport().selects)
    return get_transport().address, select.number
