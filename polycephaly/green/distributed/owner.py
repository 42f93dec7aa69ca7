"""The owner side: the process that made a channel runs every rendezvous in it, also for others.

    green threads of this process ──> queues of the channel <── PendingOperation: a send or
                                            │                   receive of another process
                                            └──> Transaction: one sender, one receiver

A channel that has been sent away is changed in place: it becomes an `OwnedChannel`, which has no
fast path. Its queues hold threads and `PendingOperation`s alike. Channels that never leave their
process are not touched.

    proxy ──ITEM──> a place in the buffer that was granted    no answer: many items in one write
          <──CREDIT── free places           <──RECALL── give back the unused places ──REFUND──>

A process that sends is granted some of the free places. If it stops sending, it gives them back
when others need them. A closed channel still takes the items that were sent into granted places
before the sender knew of the close. The channel is over when all places are back. Receivers are
given nothing in advance: if a process dies, its unused items could not be told from the used ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import ChannelClosed
from ..channel import Channel
from ..waiting import NOTHING, RareState, Waiter
from . import opcodes
from .packed import PackedItem, pack_reason, unpack_item
from .transaction import Transaction
from .transport import ChannelTransport, PeerConnection


class PendingOperation(Waiter):
    """A send or receive of another process, which waits for the answer of this one."""

    __slots__ = ("channel", "number", "on_answer", "peer", "select", "withdrawn")

    is_remote = True

    def __init__(
        self, channel: Any, peer: PeerConnection, number: int, select: int, item: Any = None
    ) -> None:
        self.channel = channel
        self.peer = peer
        self.number = number
        self.select = select or None  # the number of its `select`
        # All operations of a select have equal threads, because a select must not meet itself.
        super().__init__((peer.address, select) if select else self, item)  # type: ignore[arg-type]
        self.withdrawn = False
        # Called with True for HELD or TAKE, with False for PASS or the end of the process.
        self.on_answer: Callable[[bool], object] | None = None
        peer.operations[number] = self

    @property
    def is_binding(self) -> bool:
        """True for a plain send, which its process cannot take back on its own."""
        return self.select is None and self.item is not None

    def answer(self, accepted: bool) -> None:
        """Handle the answer to HOLD or GIVE, or a message that means the same."""
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            on_answer(accepted)

    def request_hold(self, on_answer: Callable[[bool], object]) -> None:
        self.on_answer = on_answer
        self.peer.put(opcodes.HOLD, 0, self.number)

    def deliver(self, on_answer: Callable[[bool], object], content: bytes) -> int:
        self.on_answer = on_answer
        operations = self.peer.operations
        operations[self.number] = operations.pop(self.number)  # at the end: in the order of giving
        return self.peer.put(opcodes.GIVE, 0, self.number, content)

    def serve(self, value: Any) -> None:
        """Report that the item has been received, or is in the buffer."""
        self._answer(opcodes.DONE if self.select is None else opcodes.COMMIT)

    def refuse(self, error: BaseException) -> None:
        self._answer(opcodes.REFUSED, pack_reason(error))

    complete, fail = serve, refuse

    def release(self) -> None:
        self.peer.put(opcodes.RELEASE, 0, self.number)

    def drop(self) -> None:
        self.peer.operations.pop(self.number, None)

    def _answer(self, kind: int, payload: bytes = b"") -> None:
        self.drop()
        self.peer.put(kind, 0, self.number, payload)


class CreditAccount:
    """The places of one buffer that are granted to one process."""

    __slots__ = ("channel", "granted", "recalled")

    def __init__(self, channel: OwnedChannel) -> None:
        self.channel = channel
        self.granted = 0
        self.recalled = False


class OwnedState(RareState):
    """The state of a channel that other processes know."""

    __slots__ = (
        "accounts", "is_closing", "is_matching", "number", "open_transactions", "reason",
        "reserved", "transport", "undecided",
    )  # fmt: skip

    def __init__(self, transport: ChannelTransport, number: int) -> None:
        super().__init__()
        self.transport = transport
        self.number = number
        self.open_transactions = 0
        # Transactions that gave an item of the buffer, or one that was given back, to a select,
        # which may decline the item. A receiver must not get a later item before that.
        self.undecided = 0
        self.reserved = 0  # places of the buffer that transactions have reserved
        self.accounts: dict[PeerConnection, CreditAccount] = {}
        self.is_matching = self.is_closing = False
        # Why the channel was closed, if its last end was lost with a process or a call.
        self.reason: BaseException | None = None

    def is_empty(self) -> bool:
        return False

    @property
    def granted(self) -> int:
        return sum(account.granted for account in self.accounts.values()) if self.accounts else 0


class OwnedChannel(Channel[Any]):
    """A channel that other processes know. The methods defined here are for the owner thread."""

    __slots__ = ()
    rare_state: OwnedState

    # -- threads of this process: operations that are possible at once -----------------------------

    def attempt_send(self, thread: Any, item: Any) -> bool:
        receiver: Waiter | None = None
        try:
            self._check_open()
            if self._is_claimed("send", thread):
                self._recall()
                return False
            receiver = self._first("receive", thread)
            if receiver is None:
                return self._store(item)
            if receiver.is_remote or self.rare_state.undecided:
                # A receiver in another process must confirm first; no receiver may overtake an
                # undecided item.
                if self._store(item):
                    self.match()
                    return True
                return False
            self._remove_waiter(receiver)
            try:
                receiver.serve(unpack_item(item))
            except BaseException as error:  # the receiver has the item, but cannot unpickle it
                receiver.refuse(error)
            return True
        finally:
            del thread, receiver  # as in `ChannelQueues.attempt_send`

    def attempt_receive(self, thread: Any) -> Any:
        try:
            if self._is_claimed("receive", thread):
                if not self._can_get_items():
                    self._check_open()
                return NOTHING
            if self.rare_state.undecided:
                return NOTHING
            item = self._next_item()
            if item is NOTHING:
                sender = self._first("send", thread)
                if sender is None:
                    if not self._can_get_items():
                        self._check_open()
                    return NOTHING
                if sender.is_remote and sender.select is not None:
                    return NOTHING
                self._remove_waiter(sender)
                item = sender.item
                sender.serve(None)
            else:
                self._refill()
                self.end_if_over()
            return unpack_item(item)
        finally:
            del thread

    def _is_claimed(self, end: str, thread: Any) -> bool:
        """Return True if another thread holds that end, or other processes may still send: the
        holder waits until the places that are granted to them have come back.
        """
        return super()._is_claimed(end, thread) or (
            end == "send" and self.rare_state.granted > 0 and self.rare_state.is_claimed(end)
        )

    # -- items that no waiting thread sends --------------------------------------------------------

    def _store(self, item: Any) -> bool:
        if super()._store(item):
            return True
        self._recall()
        return False

    def _free(self) -> int:
        return super()._free() - self.rare_state.reserved - self.rare_state.granted

    def _refill(self, other: Any = None) -> None:
        while not self._closed and (sender := self._first("send", None)) is not None:
            if self._free() < 1:
                self._recall()
                return
            self._remove_waiter(sender)
            if sender.select is not None:
                self.rare_state.reserved += 1
                Transaction(self, sender, None, sender.item).begin()
            else:
                self.buffer.append(sender.item)
                sender.serve(None)
                if sender.is_remote:
                    self._grant(sender.peer)  # type: ignore[attr-defined]
        for peer, account in self.rare_state.accounts.items():
            if not account.granted:
                self._grant(peer)

    def _can_get_items(self) -> bool:
        """Return True if a receiver might still get an item, even if the channel is closed."""
        state = self.rare_state
        return self._has_items() or bool(state.open_transactions or state.granted)

    # -- matching senders and receivers ------------------------------------------------------------

    def enqueue(self, end: str, waiter: Waiter) -> None:
        super().enqueue(end, waiter)
        self.match()

    def match(self) -> None:
        """Begin a transaction for each sender and receiver in the queues that can meet."""
        state = self.rare_state
        if state.is_matching:
            return
        state.is_matching = True
        try:
            while not state.undecided and self._match_one():
                pass
            self._refill()
        finally:
            state.is_matching = False
        self.end_if_over()

    def _match_one(self) -> bool:
        for receiver in self._receiver or ():  # each change of the queue ends the loop
            if self._is_claimed("receive", receiver.thread):
                continue
            item = self._next_item()
            if item is not NOTHING:
                self._remove_waiter(receiver)
                Transaction(self, None, receiver, item).begin()
                return True
            sender = self._first("send", receiver.thread)
            if sender is not None:
                self._remove_waiter(receiver)
                self._remove_waiter(sender)
                Transaction(self, sender, receiver, sender.item).begin()
                return True
            if self._first("send", None) is None:
                return False
        return False

    def put_back_waiter(self, end: str, waiter: Any) -> None:
        """Put a waiter back at the head of its queue, after its transaction came to nothing."""
        if waiter.is_remote:
            if waiter.peer.lost:
                return
            if waiter.withdrawn:
                waiter.drop()
                if end == "send" and waiter.select is None:
                    waiter.peer.put(opcodes.WITHDRAWN, 0, waiter.number)
                return
        elif waiter.select is not None and not waiter.is_open:
            return
        if self._closed and end == "send":
            waiter.refuse(self._closed_error())
            return
        queue = self._queue(end)
        queue.appendleft(waiter)
        waiter.location = queue

    def withdraw_waiter(self, waiter: Waiter) -> bool:
        if isinstance(waiter.location, Transaction):
            return False
        return super().withdraw_waiter(waiter)

    def interrupt_waiter(self, waiter: Waiter, error: BaseException) -> bool:
        if isinstance(waiter.location, Transaction):
            waiter.location.errors.append(error)
            return False
        return super().interrupt_waiter(waiter, error)

    # -- other processes ---------------------------------------------------------------------------

    def on_offer(self, op: PendingOperation) -> None:
        try:
            if op.select is None and self.attempt_send(op.thread, op.item):
                op.serve(None)
                self._grant(op.peer)
                return
            self._check_open()
        except ChannelClosed as error:
            op.refuse(error)
            return
        self.enqueue("send", op)

    def on_demand(self, op: PendingOperation) -> None:
        if self._closed and not self._can_get_items():
            op.refuse(self._closed_error())
        else:
            self.enqueue("receive", op)

    def on_withdraw(self, op: PendingOperation) -> None:
        is_binding = op.is_binding
        if isinstance(op.location, Transaction):
            op.withdrawn = True
            if not is_binding:
                op.answer(False)  # crosses GIVE or HOLD, and is as good as PASS
        elif self.withdraw_waiter(op):
            op.drop()
            if is_binding:
                op.peer.put(opcodes.WITHDRAWN, 0, op.number)

    def _grant(self, peer: PeerConnection) -> None:
        """Grant free places of the buffer to a process that sends."""
        if not self.capacity:
            return
        state = self.rare_state
        account = state.accounts.get(peer)
        if account is None:
            account = state.accounts[peer] = peer.accounts[state.number] = CreditAccount(self)
        share = self.capacity // (1 + len(state.accounts))
        more = min(share - account.granted, self._free())
        if (
            more > 0
            and account.granted <= share // 2
            and more > share // 4
            and not (account.recalled or self._closed or state.is_claimed("send"))
        ):
            account.granted += more
            peer.put(opcodes.CREDIT, state.number, more)

    def _recall(self) -> None:
        for peer, account in self.rare_state.accounts.items():
            if account.granted and not account.recalled:
                account.recalled = True
                peer.put(opcodes.RECALL, self.rare_state.number)

    def on_item(self, peer: PeerConnection, item: PackedItem) -> None:
        """Store an item that was sent into a granted place."""
        account = self.rare_state.accounts[peer]
        if account.granted < 1:  # a full buffer would drop its oldest item
            raise ValueError("an item came for which no place was granted")
        account.granted -= 1
        self.buffer.append(item)
        self._grant(peer)
        self.match()

    def on_credit_returned(self, peer: PeerConnection, places: int) -> None:
        account = self.rare_state.accounts[peer]
        account.granted -= places
        account.recalled = False
        self.match()

    # -- closing -----------------------------------------------------------------------------------

    def _closed_error(self) -> ChannelClosed:
        error = super()._closed_error()
        error.__cause__ = self.rare_state.reason
        return error

    def _close_here(self) -> None:
        state = self.rare_state
        if state.is_closing:
            return
        state.is_closing = True
        self._refuse_all("send")
        payload = pack_reason(self._closed_error())
        for peer, account in state.accounts.items():
            peer.put(opcodes.REFUSED, state.number, 0, payload)
            if account.granted:
                peer.put(opcodes.RECALL, state.number)
        self.end_if_over()

    def end_if_over(self) -> None:
        """Refuse the waiting receivers and forget the channel, if no item can come any more."""
        if self._closed and not self._can_get_items():
            self._refuse_all("receive")
            state = self.rare_state
            for peer in state.accounts:
                peer.accounts.pop(state.number, None)
            state.transport.forget_channel(state.number, state.reason)


def make_owned(channel: Any, transport: ChannelTransport, number: int) -> None:
    """Make a channel serve other processes too. Called by the owner thread."""
    if isinstance(channel.rare_state, OwnedState) and channel.rare_state.transport is transport:
        channel.rare_state.number = number  # a new one if the channel is sent away after its end
        channel.end_if_over()
        return
    old = channel.make_rare_state()
    state = OwnedState(transport, number)
    state.holder, state.locks, state.returned_items = old.holder, old.locks, old.returned_items
    channel.rare_state = state
    channel.__class__ = OwnedChannel
    channel.end_if_over()
