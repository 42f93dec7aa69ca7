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
from typing import TYPE_CHECKING, Any

from ...errors import ItemLost
from ..select import Offer
from .packed import opened, packed

if TYPE_CHECKING:
    from .owner import PendingOperation

__all__ = ["Transaction", "number_of"]

log = logging.getLogger("polycephaly.green")


class Transaction:
    """The transfer of one item.

    `sender` is None for an item of the buffer, `receiver` for a place in the buffer. Each is a
    waiter: a green thread of this process, an `Offer` of one of its selects, or a
    `PendingOperation` of another process.
    """

    __slots__ = ("_to_hold", "channel", "given", "held", "item", "receiver", "sender", "told")

    def __init__(self, channel: Any, sender: Any, receiver: Any, item: Any) -> None:
        self.channel = channel
        self.sender = sender
        self.receiver = receiver
        self.item = item
        self.held: list[Any] = []
        self.given = 0  # where the item begins in the bytes sent to the receiver's process
        self.told: list[BaseException] = []
        """Errors raised meanwhile in a thread of this process that takes part. Its await raises
        them when the outcome is decided."""
        self._to_hold: list[Any] = []

    def begin(self) -> None:
        self.channel._extra.deals += 1
        self.channel._extra.undecided += self._is_undecided()
        choosers = [
            each for each in (self.sender, self.receiver) if each is not None and chooses(each)
        ]
        choosers.sort(key=number_of)
        if choosers and choosers[-1] is self.receiver and self.receiver.is_far:
            choosers.pop()
        self._to_hold = choosers
        for each in (self.sender, self.receiver):
            if each is not None:
                each.line = self
        self._next()

    def _next(self) -> None:
        for each in (self.sender, self.receiver):
            if (
                each is not None
                and each.is_far
                and (each.peer.lost or (each.withdrawn and not each.can_be_relied_on))
            ):
                self.off(each)
                return
        if self._to_hold:
            one = self._to_hold.pop(0)
            ask = one.ask if one.is_far else one.select.ask
            ask(partial(self._answered, one))
        else:
            self._hand_over()

    def _answered(self, one: Any, held: bool) -> None:
        if held:
            self.held.append(one)
            self._next()
        else:
            self.off(gone=one)

    def _hand_over(self) -> None:
        receiver = self.receiver
        if receiver is not None and receiver.is_far:
            try:
                content = packed(self.item)
            except Exception as error:
                error.add_note(
                    "while pickling an item of a channel, for a receiver in another image"
                )
                self._refuse_item(error)
                return
            self.given = receiver.give(self, content)
            return
        if receiver is None:
            self.channel._put_in_buffer(self.item)
        else:
            self._end_of(receiver)
            try:
                value = opened(self.item)
            except Exception as error:
                receiver.refuse(error) if not chooses(receiver) else receiver.fail(error)
            else:
                receiver.serve(value) if not chooses(receiver) else receiver.happen(value)
        self.taken()

    def taken(self) -> None:
        """Complete the transaction: the receiver has the item."""
        sender = self.sender
        if sender is not None:
            self._end_of(sender)
            if chooses(sender):
                sender.happen(None)
            else:
                sender.serve(None)
        self._over()

    def off(self, gone: Any = None) -> None:
        """End the transaction without effect. `gone` has passed, or its process is dead."""
        for end, each in (("receive", self.receiver), ("send", self.sender)):
            if each is None:
                continue
            self._end_of(each)
            if each is gone:
                each.drop()
            else:
                self._let_go(end, each)
        if self.sender is None:
            self.channel._put_back_item(self.item)
        self._over()

    def lost(self, receiver: PendingOperation) -> None:
        """Handle the death of the receiver's process while the item was in transit, or already
        there."""
        if receiver.peer.sent <= self.given:
            self.off(receiver)
            return
        text = f"{receiver.peer} {receiver.peer.ending.how} before it said that it had the item that was given to it"
        if self.sender is None:
            log.warning("%s, from the buffer of %r: perhaps it is lost", text, self.channel)
            self._over()
        else:
            error = ItemLost(text)
            error.__cause__ = receiver.peer.ending.death
            self._refuse_item(error)

    def _let_go(self, end: str, one: Any) -> None:
        """Put a waiter back into its queue, and release it if it is held."""
        held = one in self.held
        if held:
            one.release()
        if one.is_far or not held:  # a held offer of this process was left anew by its release
            self.channel._put_back(end, one)

    def _refuse_item(self, error: BaseException) -> None:
        """Report `error` to the sender or, for an item of the buffer, to the receiver."""
        sender, receiver = self.sender, self.receiver
        if sender is not None:
            self._end_of(sender)
            if chooses(sender):
                sender.fail(error)
            else:
                sender.refuse(error)
        if receiver is not None:
            self._end_of(receiver)
            if sender is None:
                receiver.refuse(error)
            else:
                self._let_go("receive", receiver)
        self._over()

    def _end_of(self, one: Any) -> None:
        one.line = None
        if not one.is_far and not chooses(one):
            for error in self.told:
                one.thread._interrupt(error)

    def _is_undecided(self) -> bool:
        return self.sender is None and chooses(self.receiver)

    def _over(self) -> None:
        self.channel._extra.deals -= 1
        self.channel._extra.undecided -= self._is_undecided()
        if self.receiver is None:
            self.channel._extra.promised -= 1
        self.channel._match()


def chooses(waiter: Any) -> bool:
    """Return True if the waiter is in a `select`."""
    return isinstance(waiter, Offer) or (waiter.is_far and waiter.select is not None)


def number_of(waiter: Any) -> tuple[str, int]:
    """Return the number of the waiter's select. These numbers have one order in all processes."""
    from .transport import the_post

    if waiter.is_far:
        return waiter.peer.who, waiter.select.number
    select = waiter.select
    if not select.number:
        select.number = next(the_post().selects)
    return the_post().address, select.number
