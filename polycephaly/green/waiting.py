"""Wait queues of channels and locks, the waiters in them, and how those at a channel meet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from ..errors import ChannelClosed
from .scheduler import scheduler
from .thread import GreenThread

T = TypeVar("T")

NOTHING: Any = object()
"""Returned in place of an item if there is none."""

_MAX_GONE_UNSWEPT = 32  # no sweep up to that many departures


class WaitQueue(Generic[T]):
    """A FIFO queue that a waiter in the middle can leave in constant time.

    A waiter that leaves is only noted in `_gone`. Its place is skipped at the head of the queue, or
    swept out when such places are the majority.
    """

    __slots__ = ("_gone", "_places")

    def __init__(self) -> None:
        self._places: deque[T] = deque()
        self._gone: dict[T, None] = {}  # an empty set would take 150 bytes more

    def __len__(self) -> int:
        return len(self._places) - len(self._gone)

    def __iter__(self) -> Iterator[T]:
        return (waiter for waiter in self._places if waiter not in self._gone)

    def append(self, waiter: T) -> None:
        """Add a waiter that has not been in the queue before."""
        self._places.append(waiter)

    def appendleft(self, waiter: T) -> None:
        """Put back a waiter that was in the queue: into its place, or else the first one."""
        if waiter in self._gone:
            del self._gone[waiter]
        else:
            self._places.appendleft(waiter)

    def popleft(self) -> T:
        while (waiter := self._places.popleft()) in self._gone:
            del self._gone[waiter]
        return waiter

    def remove(self, waiter: T) -> None:
        """Remove `waiter`, which must be in the queue."""
        places = self._places
        if places[0] is waiter:
            places.popleft()
        elif places[-1] is waiter:
            places.pop()
        else:
            self._gone[waiter] = None
        if len(self._gone) > _MAX_GONE_UNSWEPT and len(self._gone) * 2 > len(places):
            self._places = deque(self)
            self._gone.clear()


class Waiter:
    """A waiter in the queue at one end of a channel. An `Offer` (select.py) is a waiter whose
    `select` may have chosen another guard.
    """

    __slots__ = ("item", "location", "thread")

    is_remote = False
    """True if the waiter is in another process: `PendingOperation` (distributed/owner.py)."""
    select: Any = None
    """The `select` that the waiter is an offer of, or its number in another process, if any."""

    def __init__(self, thread: GreenThread[Any], item: Any = None) -> None:
        self.thread = thread
        self.item = item
        # The WaitQueue that the waiter stands in, the Transaction (distributed/transaction.py) that
        # has taken it out, or the Request (distributed/proxy.py) to another process.
        self.location: Any = None

    def serve(self, value: Any) -> None:
        """Wake the thread; its await returns `value`."""
        self.thread.next_send = value
        scheduler.ready.append(self.thread)

    def refuse(self, error: BaseException) -> None:
        """Wake the thread with `error`, because the channel was closed."""
        self.serve(Refused(error))

    complete, fail = serve, refuse  # at the end of a transaction: an `Offer` was held before


class Refused:
    """Given to a thread in place of a value: the error to raise."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class RareState:
    """State that most channels never need: claims, and items given back."""

    __slots__ = ("holder", "locks", "returned_items")

    def __init__(self) -> None:
        self.locks: dict[str, Any] = {}  # the `Lock` of each end that was ever claimed
        # The thread that holds the end; None also while the lock passes to the next.
        self.holder: dict[str, Any] = {}
        self.returned_items: deque[Any] = deque()

    def is_empty(self) -> bool:
        return not (self.returned_items or any(map(self.is_claimed, self.locks)))

    def is_claimed(self, end: str) -> bool:
        return end in self.locks and self.locks[end].locked()


class ChannelQueues:
    """The part of `Channel` (channel.py) for the owner thread, which `select` uses too: the waiters
    at both ends, the operations that are possible at once, closing, claims and items given back.
    """

    __slots__ = (
        "__weakref__", "_closed", "_item", "_receiver", "_sender", "buffer", "generation",
        "rare_state",
    )  # fmt: skip

    is_remote: bool
    buffer: Any  # a deque, or None: without capacity
    # The channel's generation. Negative while the channel is closed or has a `rare_state`, because
    # there is no fast path then.
    generation: int
    # Present while an end is claimed or an item was given back. Always there in a proxy, and in a
    # channel that other processes know.
    rare_state: RareState | None
    open_item: Callable[[Any], Any]  # of proxies: unpickle a received item
    _closed: bool
    _item: Any
    _receiver: Any
    _sender: Any

    def attempt_send(self, thread: Any, item: Any) -> bool:
        """Send `item` if that is possible at once. Raises `ChannelClosed`."""
        try:
            self._check_open()
            if self._is_claimed("send", thread):
                return False
            receiver = self._pop_waiter("receive")
            if receiver is None:
                return self._store(item)
            receiver.serve(item)
            return True
        finally:
            del thread  # no cycle through the traceback of its error

    def attempt_receive(self, thread: Any) -> Any:
        """Return an item if there is one at once, else NOTHING. Raises `ChannelClosed`."""
        try:
            if self._is_claimed("receive", thread):
                if not self._has_items():
                    self._check_open()
                return NOTHING
            item = self._next_item()
            if item is not NOTHING:
                self._refill(thread)
                return item
            sender = self._pop_waiter("send", thread)
            if sender is None:
                self._check_open()
                return NOTHING
            item = sender.item
            sender.serve(None)
            return item
        finally:
            del thread  # as in `attempt_send`

    def _next_item(self) -> Any:
        """Remove and return an item that was given back, or is in the buffer; NOTHING if there is
        none.
        """
        if self.rare_state is not None and self.rare_state.returned_items:
            item = self.rare_state.returned_items.popleft()
            self._drop_empty_rare_state()
            return item
        return self.buffer.popleft() if self.buffer else NOTHING

    def _free(self) -> int:
        """Return the number of items that the buffer has room for."""
        return 0 if self.buffer is None else self.buffer.maxlen - len(self.buffer)

    def _store(self, item: Any) -> bool:
        """Put `item` into the buffer. Return False if there is no room."""
        if self._free() < 1:
            return False
        self.buffer.append(item)
        return True

    def _refill(self, other: Any = None) -> None:
        """Fill the free places of the buffer with the items of waiting senders."""
        while (
            self._free() > 0
            and not self._closed
            and (sender := self._pop_waiter("send", other)) is not None
        ):
            self.buffer.append(sender.item)
            sender.serve(None)

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> ChannelClosed:
        return ChannelClosed(f"{self!r} was closed")

    def _has_items(self) -> bool:
        """Return True if there are items left that no waiting thread sends."""
        return bool(self.buffer or (self.rare_state is not None and self.rare_state.returned_items))

    def _pop_waiter(self, end: str, other: Any = None) -> Waiter | None:
        """Remove and return the next waiter at that end, which the caller must serve.

        Skip those that a claim puts aside, which takes time for each, and a waiter of the thread
        `other`: a `select` may wait at both ends, and must not meet itself.
        """
        first = self._sender if end == "send" else self._receiver
        if first is None:
            return None
        if first.__class__ is not WaitQueue:
            # No call since the look at the slot, so no other thread can have the waiter.
            if end == "receive":
                self._receiver = None
                return Waiter(first)
            item = self._item
            self._sender = self._item = None
            return Waiter(first, item)
        waiter: Waiter = first.popleft()
        if waiter.thread is other or self._is_claimed(end, waiter.thread):
            first.appendleft(waiter)
            found = self._first(end, other)
            if found is not None:
                self._remove_waiter(found)
            return found
        waiter.location = None
        if not first:
            self._drop_empty_queues()
        return waiter

    def _first(self, end: str, other: Any) -> Waiter | None:
        """Return the first waiter in that queue that no claim puts aside, and that is not of the
        thread `other`.
        """
        queue = self._sender if end == "send" else self._receiver
        for waiter in queue or ():
            if waiter.thread != other and not self._is_claimed(end, waiter.thread):
                return waiter  # type: ignore[no-any-return]
        return None

    def _remove_waiter(self, waiter: Waiter) -> None:
        waiter.location.remove(waiter)
        waiter.location = None
        self._drop_empty_queues()

    def enqueue(self, end: str, waiter: Waiter) -> None:
        waiter.location = queue = self._queue(end)
        queue.append(waiter)

    def _queue(self, end: str) -> WaitQueue[Waiter]:
        """Return the queue at that end, made with the waiter in the slot as its first."""
        queue: WaitQueue[Waiter] = self._sender if end == "send" else self._receiver
        if queue.__class__ is WaitQueue:
            return queue
        single = self._pop_waiter(end)  # None if another thread has just served it
        queue = WaitQueue()
        if end == "send":
            self._sender = queue
        else:
            self._receiver = queue
        if single is not None:
            queue.append(single)
            single.location = queue
        return queue

    def withdraw_waiter(self, waiter: Waiter) -> bool:
        """Withdraw `waiter` from its queue. Return False if it has been served."""
        if waiter.location is None:
            return False
        self._remove_waiter(waiter)
        waiter.item = None
        return True

    def interrupt_waiter(self, waiter: Waiter, error: BaseException) -> bool:
        """Withdraw `waiter` and return True. If it has been served, interrupt it and return False:
        it first gets its item.
        """
        if self.withdraw_waiter(waiter):
            return True
        waiter.thread.interrupt(error)
        return False

    def _drop_empty_queues(self) -> None:
        if not self._sender:  # a green thread alone in the slot is true
            self._sender = None
        if not self._receiver:
            self._receiver = None

    def break_off(self, waiter: Waiter | GreenThread[Any], error: BaseException) -> bool:
        """End a wait whose await has raised `error`. Return True if the error is to be raised now,
        not after the value that the waiter has already been given.

        `waiter` is the thread itself if it stood alone in the slot when it began to wait.
        """
        if isinstance(waiter, Waiter):
            if not isinstance(error, GeneratorExit):
                return self.interrupt_waiter(waiter, error)
            self.withdraw_waiter(waiter)
            return True
        if self._withdraw_thread(waiter) or isinstance(error, GeneratorExit):
            return True
        waiter.interrupt(error)
        return False

    def _withdraw_thread(self, thread: GreenThread[Any]) -> bool:
        if self._sender is thread:
            self._sender = self._item = None
            return True
        if self._receiver is thread:
            self._receiver = None
            return True
        for waiter in (*self._waiting("send"), *self._waiting("receive")):
            if waiter.thread is thread:
                return self.withdraw_waiter(waiter)
        return False

    def _waiting(self, end: str) -> list[Waiter]:
        queue = self._sender if end == "send" else self._receiver
        return list(queue) if queue.__class__ is WaitQueue else []

    def _close_here(self) -> None:
        self.generation = -abs(self.generation)  # `_drop_empty_rare_state` may have been at work
        for end in ("send", "receive"):
            self._queue(end)
            # Receivers that a claim puts aside get the items that are left.
            if end == "send" or not self._has_items():
                self._refuse_all(end)
        self._drop_empty_queues()

    def _refuse_all(self, end: str) -> None:
        for waiter in self._waiting(end):
            # A finalizer may have closed the channel meanwhile, and refused this waiter.
            if self.withdraw_waiter(waiter):
                waiter.refuse(self._closed_error())

    def match(self) -> None:
        """Bring waiters together, as after a claim has ended, when both ends may have some."""
        queue = self._queue("receive")
        for receiver in list(queue):
            if receiver.location is queue:  # else it was in a `select` that has just sent an item
                try:
                    got = self.attempt_receive(receiver.thread)
                except ChannelClosed as error:
                    self.withdraw_waiter(receiver)
                    receiver.refuse(error)
                    continue
                if got is not NOTHING:
                    self.withdraw_waiter(receiver)
                    receiver.serve(got)
                elif not self._has_items() and self._first("send", None) is None:
                    break
        self._drop_empty_queues()
        self._refill()

    # -- claims, and items given back --------------------------------------------------------------

    def make_rare_state(self) -> RareState:
        if self.rare_state is None:
            self.rare_state = RareState()
            self.generation = -abs(self.generation)
            for end in ("send", "receive"):  # empty the slots: no fast path
                self._queue(end)
            self._drop_empty_queues()  # a waiter may have been served just now
        return self.rare_state

    def _drop_empty_rare_state(self) -> None:
        if self.rare_state is not None and self.rare_state.is_empty():
            self.rare_state = None
            self.generation = -abs(self.generation) if self._closed else abs(self.generation)

    def end_claim(self, end: str) -> None:
        state = self.rare_state
        assert state is not None
        state.holder[end] = None
        state.locks[end].release()
        if not state.is_claimed(end):
            self.match()
            self._drop_empty_rare_state()

    def _is_claimed(self, end: str, thread: Any) -> bool:
        """Return True if another thread holds that end."""
        state = self.rare_state
        return state is not None and state.is_claimed(end) and state.holder.get(end) is not thread

    def return_item_here(self, item: Any) -> None:
        self.make_rare_state().returned_items.append(item)
        self.match()

    # -- other processes (distributed/) ------------------------------------------------------------

    def become(self, kind: Any, rare_state: Any, generation: int) -> None:
        """Change into a channel of the class `kind`, in which no thread of this process waits."""
        # No call from here on, so no other thread sees half a proxy.
        self.rare_state = rare_state
        self._receiver = self._sender = self._item = None
        self.generation = generation
        self.__class__ = kind
