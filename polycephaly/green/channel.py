"""Channels: how green threads hand things to each other.

    await send(item) ──> rendezvous: a receiver takes it ──> await receive()
                    └──> buffered: room for `capacity` items in between

Any number of threads may hold either end. Where several wait, they are served in the order of their
coming.

How it is fast. Where exactly one green thread waits, and for nothing else, it stands in a slot
(`_receiver`, or `_sender` and `_item`), and is served in a few lines without a call: CPython
changes native threads only at calls, loop ends and function entries, so whoever runs these lines
has that waiter alone. This *fast path* may be run by anybody, asyncio code included. All else (more
than one waiter, `select`, buffers, claims, closing) is done by the scheduler's owner only, so
without locks. It may happen to the owner that a waiter in a slot is served behind its back, between
two looks; nobody else ever puts one there. So it takes a waiter from the slot in such lines too,
before it does more.

A waiter that is interrupted takes itself out. If it is not there any more it has been served, and
its item is on the way to it: it goes on waiting for it, and is interrupted at its next await. So
nothing is lost or doubled.

Outside of green threads: `put` and `get` block a plain thread, and asyncio code may await `send`
and `receive`.

Other images. A channel that is pickled, for a drone say, stays where it is, and arrives as a remote
end of itself (distributed/). One that a drone has from the snapshot it was forked from looks as if
it were its own; it is known by its *generation*, which is older than the drone, and becomes a
remote end when it is first used."""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from types import NoneType, TracebackType, coroutine
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from ..errors import ChannelClosed, DroneDied
from ..promises.promise import Promise
from ..runtime.deferred_sigint import DeferredSigint
from ..wire import addresses
from .scheduler import PARK, scheduler
from .select import Guard
from .thread import GreenThread, Wake, outside, pause, start
from .waiting import NOTHING, QueuedOperation, Refused, Waiter, WaitQueue

if TYPE_CHECKING:
    from .distributed import Receiver, Sender

__all__ = ["Channel"]

T = TypeVar("T")

ready = scheduler.ready
bell = scheduler.bell

generation = 1
"""That of the channels made now. It changes with each fork, so an address and a generation name a
channel for ever."""
oldest = 1
"""The first one of this image's own channels."""
lineage: list[tuple[int, str]] = []
"""In a drone: whose the older ones are. The generation before which they were made, and where that
image is reached."""
made = False
"""Has this image, or one that it was forked from, ever made one?"""


class Channel(Generic[T]):
    """Hands items from those who send to those who receive, each to exactly one, in the order of
    sending.

    With ``capacity=0`` they meet: `send` returns when a receiver has the item. Else up to
    `capacity` items wait in between. Raises `ValueError` for a negative capacity.

    >>> from polycephaly import green
    >>> async def count(ch):
    ...     for i in range(3):
    ...         await ch.send(i)
    ...     ch.close()
    >>> async def main():
    ...     ch = green.Channel()
    ...     green.spawn(count, ch)
    ...     return [i async for i in ch]
    >>> green.run(main)
    [0, 1, 2]
    """

    __slots__ = ("__weakref__", "_closed", "_extra", "_item", "_plain", "_receiver", "_sender")

    capacity = 0
    is_one_in_all_images = True
    """For picklers: never taken for what another image has under the same name."""
    is_remote = False
    """It was made in another image, and lives there."""

    def __new__(cls, capacity: int = 0) -> Channel[T]:
        if isinstance(capacity, bool) or not isinstance(capacity, int):
            raise TypeError(f"the capacity of a channel is a number of items, not {capacity!r}")
        if capacity < 0:
            raise ValueError(
                f"a channel cannot hold {capacity} items; 0 (a rendezvous) is the least"
            )
        if capacity and cls is not Channel and not issubclass(cls, _Buffered):
            raise TypeError(
                f"{cls.__qualname__}: only Channel itself has room for items, not what is derived from it"
            )
        global made
        made = True
        return object.__new__(_Buffered if capacity and cls is Channel else cls)

    def __init__(self, capacity: int = 0) -> None:
        self._receiver: Any = None  # None, the one green thread that waits, or a Line of Waiters
        self._sender: Any = None
        self._item: Any = None  # with one green thread in `_sender`: what it sends
        self._closed = False
        self._plain = (
            generation  # its own; negative while it is closed, or has something in `_extra`
        )
        self._extra: _Extra | None = (
            None  # while an end is claimed, or an item was given back: no fast path
        )

    # -- for green threads, and asyncio code -------------------------------------------------------

    @coroutine
    def send(self, item: T) -> Generator[Any, Any, None]:
        """Gives `item` to a receiver; waits until one has it, or until there is room for it.

        Raises `ChannelClosed` when the channel is closed before: then nobody has got the item.
        """
        receiver = self._receiver
        if receiver.__class__ is GreenThread:  # from here to the append: the fast path
            self._receiver = None
            receiver._value = item
            ready.append(receiver)
            if bell:
                scheduler.ring()
            return
        if get_ident() != scheduler.owner:
            yield from self._from_outside(self._send_here, item)
            return
        if receiver is None and self._sender is None and self._plain >= oldest:
            self._sender = thread = scheduler.current
            self._item = item
            while True:
                try:
                    refused = yield PARK
                    break
                except BaseException as error:
                    if self._take_out("send", thread) or isinstance(error, GeneratorExit):
                        raise
                    thread._interrupt(error)
            if refused is not None:
                raise refused.error
        elif self._is_inherited():
            yield from self.send(item)
        else:
            thread = scheduler.current
            if not self._try_send(thread, item):
                yield from QueuedOperation(thread, self, "send", item)

    @coroutine
    def receive(self) -> Generator[Any, Any, T]:
        """The next item; waits for one. Raises `ChannelClosed` when there is none and the channel
        is closed."""
        sender = self._sender
        if sender.__class__ is GreenThread:  # from here to the append: the fast path
            item: T = self._item
            self._sender = self._item = None
            sender._value = None
            ready.append(sender)
            if bell:
                scheduler.ring()
            return item
        if get_ident() != scheduler.owner:
            item = yield from self._from_outside(self._receive_here)
            return item
        if sender is None and self._receiver is None and self._plain >= oldest:
            self._receiver = thread = scheduler.current
            while True:
                try:
                    given = yield PARK
                    break
                except BaseException as error:
                    if self._take_out("receive", thread) or isinstance(error, GeneratorExit):
                        raise
                    thread._interrupt(error)
            if given.__class__ is Refused:
                raise given.error
            return given  # type: ignore[no-any-return]
        if self._is_inherited():
            return (yield from self.receive())
        thread = scheduler.current
        given = self._try_receive(thread)
        if given is NOTHING:
            given = yield from QueuedOperation(thread, self, "receive")
        return given  # type: ignore[no-any-return]

    def __aiter__(self) -> AsyncIterator[T]:
        """``async for item in channel``: until it is closed, and empty. Raises `ChannelClosed`
        where that is so because an image has died: there may have been more to come."""
        return self

    @coroutine
    def __anext__(self) -> Generator[Any, Any, T]:
        try:
            return (yield from self.receive())
        except ChannelClosed as closed:
            if _by_death(closed):
                raise
            raise StopAsyncIteration from None

    def __iter__(self) -> Iterator[T]:
        """``for item in channel`` in plain code: as ``async for``, by `get`."""
        while True:
            try:
                item = self.get()
            except ChannelClosed as closed:
                if _by_death(closed):
                    raise
                return
            yield item

    def claim(self, end: Literal["send", "receive"] | None = None) -> Claim[T]:
        """``async with channel.claim() as end:`` holds one end for several messages: ``end.send``,
        or ``end.receive``.

        While it is held, others who would use the same end wait; who waited there before goes on
        waiting. Without an argument the end is claimed that is used first.

        >>> from polycephaly import green
        >>> async def pair(ch, name):
        ...     async with ch.claim() as end:
        ...         await end.send(name)
        ...         await end.send(name)
        >>> async def main():
        ...     ch = green.Channel()
        ...     green.spawn(pair, ch, "a"), green.spawn(pair, ch, "b")
        ...     return [await ch.receive() for _ in range(4)]
        >>> green.run(main)
        ['a', 'a', 'b', 'b']
        """
        if end not in ("send", "receive", None):
            raise ValueError(f"a channel has the ends 'send' and 'receive', not {end!r}")
        if self._is_inherited():
            return self.claim(end)
        return Claim(self, end)

    def sender(self) -> Sender[T]:
        """An end by which things are sent, for who does nothing else, here or in another image. It
        can be closed: when the last of the senders is, or the drone that had it has ended, the
        channel is closed. In a drone it is let go with the call that brought it, unless the call
        has stored it.

        >>> import polycephaly as poly
        >>> from polycephaly import green
        >>> async def count(end):
        ...     with end:
        ...         for i in range(3):
        ...             await end.send(i)
        >>> async def main(pool):
        ...     ch = green.Channel()
        ...     pool.promise(count, ch.sender())
        ...     return [i async for i in ch]
        >>> with poly.Pool(1) as pool:
        ...     green.run(main, pool)
        [0, 1, 2]
        """
        from .distributed import Sender, new_end

        self._is_inherited()
        return cast("Sender[T]", new_end(Sender, self))

    def receiver(self) -> Receiver[T]:
        """The same for who receives: when the last of the receivers is gone, the channel is
        closed."""
        from .distributed import Receiver, new_end

        self._is_inherited()
        return cast("Receiver[T]", new_end(Receiver, self))

    # -- for select --------------------------------------------------------------------------------

    def sending(self, item: T, *, when: bool | Callable[[], object] = True) -> Guard[None]:
        """A guard for `select`: `item` is sent if it is chosen. Only considered if `when` is
        true."""
        self._is_inherited()
        return Guard(when, self, "send", item)

    def receiving(self, *, when: bool | Callable[[], object] = True) -> Guard[T]:
        """A guard for `select`: an item is received if it is chosen. Only considered if `when` is
        true."""
        self._is_inherited()
        return Guard(when, self, "receive")

    # -- for plain code ----------------------------------------------------------------------------

    def put(self, item: T, timeout: float | None = None) -> None:
        """`send` for plain code: blocks the calling native thread, and only that.

        Raises `ChannelClosed`, `TimeoutError` after `timeout` seconds (then nobody has got the
        item), and `RuntimeError` inside a coroutine, which must use `await send` instead."""
        self._not_in_a_coroutine("put", "await channel.send(item)")
        proxy = None
        try:
            with (
                DeferredSigint()
            ):  # a Ctrl-C comes before it is started, or when it can be cancelled
                proxy = start(self._send_here, (item,), name="Channel.put")
            _outcome(proxy, timeout, "nobody took the item")
        except BaseException:
            if proxy is not None:
                proxy.cancel()
            raise

    def get(self, timeout: float | None = None) -> T:
        """`receive` for plain code: blocks the calling native thread, and only that.

        Raises `ChannelClosed`, `TimeoutError` when there was no item for `timeout` seconds, and
        `RuntimeError` inside a coroutine, which must use `await receive` instead."""
        self._not_in_a_coroutine("get", "await channel.receive()")
        proxy = None
        try:
            with DeferredSigint():  # as in `put`
                proxy = start(self._receive_here, (), name="Channel.get")
            return cast(T, _outcome(proxy, timeout, "there was no item"))
        except BaseException:
            if proxy is not None:
                proxy.cancel()
                proxy._hook(self._give_back)
            raise

    def close(self) -> None:
        """No more items will be sent. From anywhere; a second time it does nothing.

        Who waits to send, or sends later, gets `ChannelClosed`. Who receives gets what is in the
        buffer, and then `ChannelClosed`; ``async for`` ends."""
        if self._is_inherited():
            self.close()
            return
        self._closed = True
        self._plain = -abs(self._plain)
        if get_ident() == scheduler.owner and scheduler.in_step():
            self._close_here()
        else:
            scheduler.post(self._close_here)

    @property
    def closed(self) -> bool:
        """Whether it was closed. In another image than its own: as far as an answer, or that
        image's end, has told."""
        return self._closed

    def __reduce__(self) -> Any:
        """For another image of this pool, or of another pool on this machine, an end of this very
        channel."""
        from .distributed import export

        if self._is_inherited() and self.is_remote:
            return self.__reduce__()  # as what it has become
        return export(self)

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<{'Channel' if not self.capacity else f'Channel of {self.capacity}'}{state} at {id(self):#x}>"

    # -- the owner's -------------------------------------------------------------------------------

    @coroutine
    def _send_here(self, item: Any) -> Generator[Any, Any, None]:
        if self._is_inherited():
            yield from self._send_here(item)
            return
        thread = scheduler.current
        if not self._try_send(thread, item):
            yield from QueuedOperation(thread, self, "send", item)

    @coroutine
    def _receive_here(self) -> Generator[Any, Any, Any]:
        if self._is_inherited():
            return (yield from self._receive_here())
        thread = scheduler.current
        got = self._try_receive(thread)
        return (yield from QueuedOperation(thread, self, "receive")) if got is NOTHING else got

    def _try_send(self, thread: Any, item: Any) -> bool:
        """Sends if that is possible at once. Raises `ChannelClosed`."""
        self._check_open()
        if self._is_claimed("send", thread):
            return False
        receiver = self._next("receive")
        if receiver is None:
            return False
        receiver.serve(item)
        return True

    def _try_receive(self, thread: Any) -> Any:
        """An item that is to be had at once, or NOTHING. Raises `ChannelClosed`."""
        if self._is_claimed("receive", thread):
            if not self._has_items():
                self._check_open()
            return NOTHING
        if self._extra is not None and self._extra.given_back:
            item = self._extra.given_back.popleft()
            self._tidy()
            return item
        sender = self._next("send", thread)
        if sender is None:
            self._check_open()
            return NOTHING
        item = sender.item
        sender.serve(None)
        return item

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"{self!r} was closed")

    def _has_items(self) -> bool:
        """Whether there are some that nobody sends any more."""
        return self._extra is not None and bool(self._extra.given_back)

    def _next(self, end: str, other: Any = None) -> Waiter | None:
        """Whose turn it is at that end. It is out of the queue then, and must be served. It is not
        `other`, which may be at both ends, in a `select`, and must not meet itself."""
        waiter: Waiter
        if end == "send":
            first = self._sender
            if first is None:
                return None
            if first.__class__ is not WaitQueue:
                item = self._item  # no call since the look at `_sender`: it is ours alone
                self._sender = self._item = None
                return Waiter(first, item)
            waiter = first.popleft()
            if waiter.thread is other:
                first.appendleft(waiter)
                found = next((each for each in first if each.thread is not other), None)
                if found is None:
                    return None
                first.remove(waiter := found)
            waiter.line = None
            if not first:
                self._sender = None
            return waiter
        first = self._receiver
        if first is None:
            return None
        if first.__class__ is not WaitQueue:
            self._receiver = None
            return Waiter(first)
        waiter = first.popleft()
        waiter.line = None
        if not first:
            self._receiver = None
        return waiter

    def _enlist(self, end: str, waiter: Waiter) -> None:
        extra = self._extra
        claimed = extra is not None and self._is_claimed(end, waiter.thread)
        line = extra.put_aside[end] if extra is not None and claimed else self._queue(end)
        line.append(waiter)
        waiter.line = line

    def _queue(self, end: str) -> WaitQueue[Waiter]:
        """The queue at that end; the one in the slot is its first."""
        alone = self._next(end) if self._alone(end) else None
        queue: WaitQueue[Waiter] | None = self._sender if end == "send" else self._receiver
        if queue is None:
            queue = WaitQueue()
            if end == "send":
                self._sender = queue
            else:
                self._receiver = queue
        if alone is not None:
            queue.append(alone)
            alone.line = queue
        return queue

    def _alone(self, end: str) -> bool:
        return (self._sender if end == "send" else self._receiver).__class__ not in (
            WaitQueue,
            NoneType,
        )

    def _strike(self, end: str, waiter: Waiter) -> bool:
        """Takes a waiter out; False: it has been served."""
        if waiter.line is None:
            return False
        waiter.line.remove(waiter)
        waiter.line = waiter.item = None
        self._forget_empty(end)
        return True

    def _interrupt_served(self, waiter: Waiter, error: BaseException) -> None:
        """It was to be taken out for this, and is not there any more: it has its item first."""
        waiter.thread._interrupt(error)

    def _forget_empty(self, end: str) -> None:
        if end == "send":
            if self._sender is not None and not self._alone(end) and not self._sender:
                self._sender = None
        elif self._receiver is not None and not self._alone(end) and not self._receiver:
            self._receiver = None

    def _take_out(self, end: str, thread: GreenThread[Any]) -> bool:
        """The same for a thread that stood alone in the slot when it began to wait."""
        if end == "send":
            if self._sender is thread:
                self._sender = self._item = None
                return True
        elif self._receiver is thread:
            self._receiver = None
            return True
        for waiter in self._waiting(end):
            if waiter.thread is thread:
                return self._strike(end, waiter)
        return False

    def _waiting(self, end: str) -> list[Waiter]:
        queue = self._sender if end == "send" else self._receiver
        found = list(queue) if queue.__class__ is WaitQueue else []
        return found + (list(self._extra.put_aside[end]) if self._extra is not None else [])

    def _close_here(self) -> None:
        for end in ("send", "receive"):
            while (waiter := self._next(end)) is not None:
                self._refuse(waiter)
            if self._extra is not None and not (end == "receive" and self._has_items()):
                while self._extra.put_aside[end]:
                    waiter = self._extra.put_aside[end].popleft()
                    waiter.line = None
                    self._refuse(waiter)

    def _refuse(self, waiter: Waiter) -> None:
        waiter.refuse(ChannelClosed(f"{self!r} was closed"))

    def _match(self) -> None:
        """Both ends may have somebody waiting, after a claim has ended: brings them together."""
        queue = self._queue("receive")
        for receiver in list(queue):
            if receiver.line is queue:  # else it was in a `select` that has just sent something
                try:
                    got = self._try_receive(receiver.thread)
                except ChannelClosed as error:
                    self._strike("receive", receiver)
                    receiver.refuse(error)
                    continue
                if got is not NOTHING:
                    self._strike("receive", receiver)
                    receiver.serve(got)
                elif self._sender is None:
                    break
        self._forget_empty("receive")

    # -- claims, and items given back --------------------------------------------------------------

    def _make_extra(self) -> _Extra:
        if self._extra is None:
            self._extra = _Extra()
            self._plain = -abs(self._plain)
            for end in ("send", "receive"):  # nobody in the slots: no fast path
                if self._alone(end):
                    self._queue(end)
                    self._forget_empty(end)  # it may have been served just now
        return self._extra

    def _tidy(self) -> None:
        if self._extra is not None and self._extra.is_empty():
            self._extra = None
            self._plain = -abs(self._plain) if self._closed else abs(self._plain)

    def _is_claimed(self, end: str, thread: Any) -> bool:
        """By somebody else."""
        extra = self._extra
        return (
            extra is not None and extra.holder[end] is not None and extra.holder[end] is not thread
        )

    def _give_back(self, receiving: Promise[Any]) -> None:
        """Who was to have its item is gone. The next receiver has it, before all others."""
        if not receiving.cancelled() and receiving.exception() is None:
            scheduler.post(partial(self._give_back_here, receiving.result()))

    def _give_back_here(self, item: Any) -> None:
        self._make_extra().given_back.append(item)
        self._match()

    # -- other images ------------------------------------------------------------------------------

    def _is_inherited(self) -> bool:
        """Has it come with a fork? Then it has changed now into what it is here: a remote end, or
        one of our own."""
        if abs(self._plain) >= oldest:
            return False
        from .distributed.inherited import settle

        settle(self)
        return True

    # -- outside -----------------------------------------------------------------------------------

    @coroutine
    def _from_outside(self, op: Any, *args: Any) -> Generator[Any, Any, Any]:
        """In asyncio code: a green thread does it."""
        asyncio = sys.modules["asyncio"]
        if asyncio._get_running_loop() is None:
            raise RuntimeError(
                "channels are awaited in green threads and asyncio; plain code uses put and get"
            )
        proxy = start(op, args, name=f"Channel.{op.__name__.strip('_')}")
        try:
            return (yield from proxy.__await__())
        except (
            BaseException
        ):  # most often the waiting was cancelled; or the proxy has failed, then this does nothing
            proxy.cancel()
            if not args:
                proxy._hook(self._give_back)
            raise

    def _not_in_a_coroutine(self, what: str, instead: str) -> None:
        if scheduler.in_step():
            raise RuntimeError(
                f"Channel.{what} blocks, and inside a coroutine it would stop every green thread: use `{instead}`"
            )


def _by_death(closed: ChannelClosed) -> bool:
    """Whether a drone's death has closed it, which is among the causes then."""
    cause = closed.__cause__
    while cause is not None and not isinstance(cause, DroneDied):
        cause = cause.__cause__
    return cause is not None


def _outcome(proxy: GreenThread[Any], timeout: float | None, what: str) -> Any:
    """What a plain thread waited for. If its time is over, the proxy may have its item all the
    same: then that."""
    try:
        return proxy.result(timeout)
    except TimeoutError:
        proxy.cancel()
    try:
        return proxy.result()
    except CancelledError as error:
        if error.told:  # type: ignore[attr-defined]  # this thread has been cancelled meanwhile, and this tells it
            raise
        raise TimeoutError(f"{what} within {timeout} s") from None


class _Buffered(Channel[T]):
    """With room for some items between the ends."""

    __slots__ = ("_buffer", "capacity")

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()
        self.capacity = capacity
        self._buffer: deque[T] = deque()

    @coroutine
    def send(self, item: T) -> Generator[Any, Any, None]:
        receiver = self._receiver
        if (
            receiver.__class__ is GreenThread
        ):  # the fast path, as in Channel: who waits has found the buffer empty
            self._receiver = None
            receiver._value = item
            ready.append(receiver)
            if bell:
                scheduler.ring()
        elif get_ident() != scheduler.owner:
            yield from self._from_outside(self._send_here, item)
        elif receiver is None and len(self._buffer) < self.capacity and self._plain >= oldest:
            self._buffer.append(item)
        else:
            yield from self._send_here(item)

    @coroutine
    def receive(self) -> Generator[Any, Any, T]:
        if get_ident() != scheduler.owner:
            return (yield from self._from_outside(self._receive_here))  # type: ignore[no-any-return]
        if self._buffer and self._sender is None and self._plain >= oldest:
            return self._buffer.popleft()
        return (yield from super().receive())

    def _try_send(self, thread: Any, item: Any) -> bool:
        if super()._try_send(thread, item):
            return True
        if self._is_claimed("send", thread) or len(self._buffer) >= self.capacity:
            return False
        self._buffer.append(item)
        return True

    def _try_receive(self, thread: Any) -> Any:
        if self._is_claimed("receive", thread):
            return super()._try_receive(thread)
        if (self._extra is not None and self._extra.given_back) or not self._buffer:
            return super()._try_receive(thread)
        item = self._buffer.popleft()
        sender = self._next("send", thread)
        if sender is not None:
            self._buffer.append(sender.item)
            sender.serve(None)
        return item

    def _has_items(self) -> bool:
        return bool(self._buffer) or super()._has_items()

    def _match(self) -> None:
        super()._match()
        while (
            not self._closed
            and len(self._buffer) < self.capacity
            and (sender := self._next("send")) is not None
        ):
            self._buffer.append(sender.item)
            sender.serve(None)


def _move(line: WaitQueue[Waiter], other: WaitQueue[Waiter]) -> None:
    while line:
        waiter = line.popleft()
        other.append(waiter)
        waiter.line = other


class _Extra:
    """What most channels never have: claims, and items that were given back."""

    __slots__ = ("given_back", "holder", "next_holders", "put_aside")

    def __init__(self) -> None:
        self.holder: dict[str, Any] = {"send": None, "receive": None}
        self.next_holders: dict[str, deque[tuple[Wake, Any]]] = {
            "send": deque(),
            "receive": deque(),
        }
        self.put_aside: dict[str, WaitQueue[Waiter]] = {
            "send": WaitQueue(),
            "receive": WaitQueue(),
        }  # not the holder's
        self.given_back: deque[Any] = deque()

    def is_empty(self) -> bool:
        return not (
            self.given_back
            or any(self.holder.values())
            or any(self.next_holders.values())
            or any(self.put_aside.values())
        )


class Claim(Generic[T]):
    """One end of a channel, held by one green thread: see `Channel.claim`."""

    def __init__(self, channel: Channel[T], end: str | None) -> None:
        self._channel = channel
        self._wanted = end
        self._held: list[str] = []

    async def __aenter__(self) -> Claim[T]:
        if self._wanted is not None:
            await self._take(self._wanted)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for end in self._held:
            self._release(end)
        self._held.clear()

    async def send(self, item: T) -> None:
        """`Channel.send`, by who holds the end."""
        await self._take("send")
        await self._channel.send(item)

    async def receive(self) -> T:
        """`Channel.receive`, by who holds the end."""
        await self._take("receive")
        return await self._channel.receive()

    async def _take(self, end: str) -> None:
        if end in self._held:
            return
        claimed = self._held[0] if self._held else self._wanted
        if claimed not in (None, end):
            raise RuntimeError(f"this claim is for the end {claimed!r}, not for {end!r}")
        if get_ident() != scheduler.owner:
            raise outside("Channel.claim", "a channel of your own")
        extra, me = self._channel._make_extra(), scheduler.current
        if extra.holder[end] is me:
            raise RuntimeError(f"this green thread holds the end {end!r} already, by another claim")
        if extra.holder[end] is not None:
            waits = Wake(), me
            extra.next_holders[end].append(waits)
            try:
                await pause(waits[0])
            except BaseException:
                if waits in extra.next_holders[end]:
                    extra.next_holders[end].remove(waits)
                else:  # it was its turn
                    self._release(end)
                raise
        else:
            extra.holder[end] = me
            _move(self._channel._queue(end), extra.put_aside[end])
            self._channel._forget_empty(end)
        self._held.append(end)

    def _release(self, end: str) -> None:
        channel, extra = self._channel, self._channel._extra
        assert extra is not None
        if extra.next_holders[end]:
            wake, extra.holder[end] = extra.next_holders[end].popleft()
            wake.now()
            return
        extra.holder[end] = None
        _move(extra.put_aside[end], channel._queue(end))
        channel._forget_empty(end)
        channel._match()
        channel._tidy()


def _can_be_known() -> None:
    """A snapshot has been taken: who was forked from it may use the channels that it has with
    it."""
    if made:
        from .distributed.transport import the_post

        with suppress(OSError):  # no socket: who wants to use them is told that nobody is there
            the_post()


def _fork_begins() -> None:
    global generation
    generation += 1


def _another_image() -> None:
    global GreenThread, generation, oldest
    from .thread import Own

    GreenThread = Own  # type: ignore[misc]
    generation += 1
    oldest = generation


addresses.at_start.append(_can_be_known)
os.register_at_fork(
    before=_fork_begins, after_in_parent=_fork_begins, after_in_child=_another_image
)
