"""A deal: one item, one sender, one receiver, of which at least one is in another image, or in a
`select`.

The channel's home brings them together. What it holds in its hand meanwhile is nobody else's:

    sender ──out of its line──> Deal <──out of its line── receiver
    1  each of the two that is in a `select` is held, the one with the smaller number first      HOLD ──> HELD | PASS
    2  the receiver is given the item; if it is in another image, it says that it has it         GIVE ──> TAKE | PASS
    3  the sender is told that it has happened                                                   DONE, COMMIT
    ✗  PASS at any step: nothing has happened. Who was held is released; both, but for who has passed, stand
       first in their lines again.

Who waits for whom. A plain sender or receiver never says no and never lets wait: it is asked for
nothing, or answers GIVE at once. A `select` that is held cannot answer others: they wait until it
is told COMMIT (its item) or RELEASE. So a deal that holds one and waits for another makes the first
wait for the second. As the numbers of selects are of one order in all images, and a deal takes the
smaller first, those who wait for each other have growing numbers: there is no circle, and the last
one answers. A receiver in a `select` that would be held last need not be: GIVE asks and tells at
once.

Exactly once, or told. The possible ends, by who dies when:

    the receiver's image before GIVE was written   it has not seen the item: the deal is off, the next receiver has it
    ... after that, before its TAKE was read       perhaps it has seen it: `send` raises `ItemLost`. Where the item was
                                                   in the buffer, no send waits any more: it is told in the log
    ... after its TAKE                             it has received the item
    the sender's image before TAKE was read        a receiver that was given the item has it; else nobody
    the home                                       a `send` that waits raises `ItemLost`, also in a `select` if that is
                                                   held; all else `ChannelClosed`; its buffer is lost with it

What is said on one connection arrives in the order of saying, so all that can cross is the end of a
wait and its answer:

    a plain send is broken off     WITHDRAW, and it waits for what the home says: DONE (it has happened: the error comes
                                   at the next await), or WITHDRAWN. A deal that has it in the hand goes on; only where
                                   that comes to nothing it is WITHDRAWN, and not put back
    a receive is broken off,       WITHDRAW, and no waiting. If the home has said GIVE or HOLD meanwhile, WITHDRAW is as
    or a select has chosen         good as the PASS that will come: the deal is off, and the PASS is of nothing known

Order. An item of the buffer that was given to a `select` may come back; so nobody is given a later
one before that is decided. (An item that a receive which was broken off, or an image that died, has
not taken comes back without that.)"""

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
    """`sender` is None for an item of the buffer, `receiver` for a place in it. Each is a waiter: a
    green thread of this image, an `Offer` of a select of its, or an `PendingOperation` of another
    image."""

    __slots__ = ("_to_hold", "channel", "given", "held", "item", "receiver", "sender", "told")

    def __init__(self, channel: Any, sender: Any, receiver: Any, item: Any) -> None:
        self.channel = channel
        self.sender = sender
        self.receiver = receiver
        self.item = item
        self.held: list[Any] = []
        self.given = 0  # where in all that is said to the receiver's image the item begins
        self.told: list[BaseException] = []
        """Raised in a thread of this image that is in the hand: it comes when that is decided."""
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
        """The receiver has the item."""
        sender = self.sender
        if sender is not None:
            self._end_of(sender)
            if chooses(sender):
                sender.happen(None)
            else:
                sender.serve(None)
        self._over()

    def off(self, gone: Any = None) -> None:
        """It comes to nothing. `gone` has passed, or is dead."""
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
        """The receiver's image has died with the item under way, or in its hands."""
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
        """It is in its line again."""
        held = one in self.held
        if held:
            one.release()
        if one.is_far or not held:  # an offer of this image's is left anew with its release
            self.channel._put_back(end, one)

    def _refuse_item(self, error: BaseException) -> None:
        """It is the sender's fault, or nobody's: he is told."""
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
    """Is it in a `select`?"""
    return isinstance(waiter, Offer) or (waiter.is_far and waiter.select is not None)


def number_of(waiter: Any) -> tuple[str, int]:
    """That of its select: of one order in all images."""
    from .transport import the_post

    if waiter.is_far:
        return waiter.peer.who, waiter.select.number
    select = waiter.select
    if not select.number:
        select.number = next(the_post().selects)
    return the_post().address, select.number
