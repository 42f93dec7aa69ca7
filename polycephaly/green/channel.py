"""Channels, through which green threads pass items to each other.

    await send(item) ──> rendezvous: a receiver takes the item ──> await receive()
                    └──> buffered: room for `capacity` items in between

Any number of threads may use either end; waiting threads are served in order of arrival. Plain code
uses `put` and `get`. Asyncio code awaits `send` and `receive`.

A green thread that waits alone, and for nothing else, stands in a slot: `_receiver`, or `_sender`
with `_item`. If the class of the waiter is exactly `GreenThread`, any thread may serve its slot on
the *fast path*, a few lines without a call (see `Channel.send`). Everything else (bound threads,
several waiters, `select`, buffers, claims, closing) is done without locks by the scheduler's owner
thread. Between two looks of that thread, another may empty a slot, but never fills one.

If an interrupted waiter is no longer in the queue, it has been served: it first gets its item, and
is interrupted at its next await. So no item is lost or doubled.

A pickled channel stays in its process; other processes get a proxy of it (distributed/). So does a
drone that inherited the channel with its snapshot: its *generation* is older than the drone.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import coroutine
from typing import Any, Generic, Literal, Self, TypeVar

from ..errors import ChannelClosed, DroneDied
from ..runtime.checks import check_count
from ..wire import addresses
from . import spawning
from .locks import Lock
from .run import forbid_in_step, in_asyncio, wait_in_proxy
from .scheduler import PARK, scheduler
from .select import Guard
from .thread import GreenThread, outside_error
from .waiting import NOTHING, ChannelQueues, Refused, Waiter

T = TypeVar("T")

ready = scheduler.ready
bell = scheduler.bell

generation = 1
"""Generation of channels made now. Each fork begins a new one, so an address in memory and a
generation identify a channel for ever."""
oldest_generation = 1
"""Generation of the first channels that belong to this process itself."""
lineage: list[tuple[int, str]] = []
"""In a drone: the processes that own the older channels. Each entry has the generation before which
the channels were made, and the address of the process."""
any_channel_made = False
"""True if this process, or one that it was forked from, has ever made a channel."""


class Channel(ChannelQueues, Generic[T]):
    """A queue that passes each item from a sender to exactly one receiver, in order of sending.

    With ``capacity=0``, sender and receiver meet: `send` returns when a receiver has the item.
    Otherwise up to `capacity` items wait in between. Pickled for another process, a channel stays
    where it was made and works there as well.

    Parameters
    ----------
    capacity : int
        Number of items that the channel can hold.

    Raises
    ------
    ValueError
        If `capacity` is negative.

    Examples
    --------
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

    __slots__ = ()

    _goes_with_calls = True
    """Read by picklers, because a channel is never replaced by the object of the same name in
    another process."""
    is_remote = False
    """True if the channel was made, and lives, in another process."""

    def __init__(self, capacity: int = 0) -> None:
        capacity = check_count("the capacity of a channel is", "item", capacity, 0)
        if capacity > sys.maxsize:
            raise ValueError(f"the capacity of a channel is at most {sys.maxsize}, not {capacity}")
        global any_channel_made
        any_channel_made = True
        self.buffer = deque(maxlen=capacity) if capacity else None
        self._receiver = None  # None, the only green thread waiting, or a WaitQueue
        self._sender = None
        self._item = None  # the item to send, if `_sender` is a single green thread
        self._closed = False
        self.generation = generation
        self.rare_state = None

    @property
    def capacity(self) -> int:
        """Number of items that the channel can hold."""
        size: int = 0 if self.buffer is None else self.buffer.maxlen
        return size

    # -- for green threads and asyncio code --------------------------------------------------------

    @coroutine
    def send(self, item: T) -> Generator[Any, Any, None]:
        """Send `item`, and wait until a receiver has it or the buffer has room for it.

        Parameters
        ----------
        item : object
            The item to send.

        Raises
        ------
        ChannelClosed
            If the channel is closed first. Then no receiver has got the item.
        ItemLost
            If another process died before it confirmed that it had the item.
        """
        receiver = self._receiver
        # Fast path, from here to the append. CPython switches native threads only at calls, loop
        # ends and function entries. There is none between the look at the slot and its clearing, so
        # the thread that runs these lines has the waiter to itself. To ask None for its class would
        # take longer than the look for None.
        if receiver is not None and receiver.__class__ is GreenThread:
            self._receiver = None
            receiver.next_send = item
            ready.append(receiver)
            if bell:
                scheduler.ring()
            return
        if get_ident() != scheduler.owner:
            yield from self._run_in_proxy_thread(Channel.send, item)
            return
        waiter: Any = None
        if receiver is None and self.generation >= oldest_generation:
            buffer = self.buffer
            if buffer is not None:
                if len(buffer) < buffer.maxlen:  # so no sender waits
                    buffer.append(item)
                    return
            elif self._sender is None:
                self._sender = waiter = scheduler.current
                self._item = item
        if waiter is None:
            self.convert_inherited()
            if self.attempt_send(scheduler.current, item):
                return
            waiter = Waiter(scheduler.current, item)
            self.enqueue("send", waiter)
        refused: Refused | None = None
        try:
            while True:
                try:
                    refused = yield PARK
                    break
                except BaseException as error:
                    if self.break_off(waiter, error):
                        raise
            if refused is not None:
                raise refused.error
        finally:
            del waiter, refused  # no cycle through the traceback of an error

    @coroutine
    def receive(self) -> Generator[Any, Any, T]:
        """Wait for the next item.

        Returns
        -------
        object
            The item.

        Raises
        ------
        ChannelClosed
            If the channel is closed and there is no item left.
        """
        sender = self._sender
        if sender is not None and sender.__class__ is GreenThread:  # the fast path, as in `send`
            item: T = self._item
            self._sender = self._item = None
            sender.next_send = None
            ready.append(sender)
            if bell:
                scheduler.ring()
            return item
        if get_ident() != scheduler.owner:
            item = yield from self._run_in_proxy_thread(Channel.receive)
            return item
        waiter: Any = None
        if sender is None and self.generation >= oldest_generation:
            if self.buffer:  # so no receiver waits
                item = self.buffer.popleft()
                return item
            if self._receiver is None:
                self._receiver = waiter = scheduler.current
        if waiter is None:
            self.convert_inherited()
            given = self.attempt_receive(scheduler.current)
            if given is not NOTHING:
                return given  # type: ignore[no-any-return]
            waiter = Waiter(scheduler.current)
            self.enqueue("receive", waiter)
        given = None
        try:
            while True:
                try:
                    given = yield PARK
                    break
                except BaseException as error:
                    if self.break_off(waiter, error):
                        raise
            if given.__class__ is Refused:
                raise given.error
            if self.generation < 0 and self.is_remote:  # as the generation of each proxy is
                given = self.open_item(given)
            return given  # type: ignore[no-any-return]
        finally:
            del waiter, given  # as in `send`

    def __aiter__(self) -> AsyncIterator[T]:
        """Iterate with ``async for`` until the channel is closed and empty.

        Raises
        ------
        ChannelClosed
            If a process died and the channel was closed for that reason, because more items may
            have been on their way.
        """
        return self

    @coroutine
    def __anext__(self) -> Generator[Any, Any, T]:
        try:
            return (yield from self.receive())
        except ChannelClosed as closed:
            if _closed_by_death(closed):
                raise
            raise StopAsyncIteration from None

    def __iter__(self) -> Iterator[T]:
        """Iterate in plain code, as ``async for`` does, by `get`."""
        while True:
            try:
                item = self.get()
            except ChannelClosed as closed:
                if _closed_by_death(closed):
                    raise
                return
            yield item

    def claim(self, end: Literal["send", "receive"] | None = None) -> Claim[T]:
        """Claim one end for several messages: ``async with channel.claim() as end:``.

        Inside the block, use ``end.send`` or ``end.receive``. Other threads that would use the same
        end wait meanwhile, as do those that waited there before.

        Parameters
        ----------
        end : {"send", "receive"}, optional
            The end to claim. By default, the end that is used first.

        Raises
        ------
        ValueError
            If `end` is anything else.
        RuntimeError
            If the channel lives in another process.

        Examples
        --------
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
        if self.convert_inherited():
            return self.claim(end)
        return Claim(self, end)

    def sender(self) -> Sender[T]:
        """Return a new sending end, for code here or in another process that only sends.

        The channel is closed when the last of its senders is closed, or has ended with its drone. A
        drone releases a sender with the call that brought it, unless the call has stored it.

        Returns
        -------
        Sender
            The end.

        Raises
        ------
        RuntimeError
            If the channel lives in another process.

        Examples
        --------
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
        self.convert_inherited()
        end: Sender[T] = import_distributed().new_end(self, "send")
        return end

    def receiver(self) -> Receiver[T]:
        """Return a new receiving end; the channel is closed when its last receiver is gone.

        Returns
        -------
        Receiver
            The end.

        Raises
        ------
        RuntimeError
            If the channel lives in another process.
        """
        self.convert_inherited()
        end: Receiver[T] = import_distributed().new_end(self, "receive")
        return end

    # -- for select --------------------------------------------------------------------------------

    def sending(self, item: T, *, when: bool | Callable[[], object] = True) -> Guard[None]:
        """Return a guard for `select` that sends `item` if chosen.

        Parameters
        ----------
        item : object
            The item to send.
        when : bool or callable
            Precondition: the guard is left out if false, or if the callable returns a false value.
        """
        self.convert_inherited()
        return Guard(when, self, "send", item)

    def receiving(self, *, when: bool | Callable[[], object] = True) -> Guard[T]:
        """Return a guard for `select` that receives an item if chosen.

        Parameters
        ----------
        when : bool or callable
            Precondition, as for `sending`.
        """
        self.convert_inherited()
        return Guard(when, self, "receive")

    # -- for plain code ----------------------------------------------------------------------------

    def put(self, item: T, timeout: float | None = None) -> None:
        """Send `item` from plain code, blocking only the calling native thread.

        Parameters
        ----------
        item : object
            The item to send.
        timeout : float, optional
            Seconds to wait at most.

        Raises
        ------
        ChannelClosed
            As `send`.
        TimeoutError
            If `timeout` is over. Then no receiver has got the item.
        TypeError, ValueError
            If `timeout` is no number of seconds, or NaN.
        RuntimeError
            In a coroutine, which must use ``await send`` instead.
        """
        forbid_in_step("Channel.put", "await channel.send(item)")
        args = self, item
        wait_in_proxy(Channel.send, args, "Channel.put", timeout, "no receiver took the item")

    def get(self, timeout: float | None = None) -> T:
        """Receive an item in plain code, blocking only the calling native thread.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.

        Returns
        -------
        object
            The item.

        Raises
        ------
        ChannelClosed
            As `receive`.
        TimeoutError
            If there was no item for `timeout` seconds.
        TypeError, ValueError
            If `timeout` is no number of seconds, or NaN.
        RuntimeError
            In a coroutine, which must use ``await receive`` instead.
        """
        forbid_in_step("Channel.get", "await channel.receive()")
        item: T = wait_in_proxy(
            Channel.receive, (self,), "Channel.get", timeout, "no item came", self._return_item
        )
        return item

    def close(self) -> None:
        """Close the channel: no more items can be sent. Any thread may call this, more than once.

        A `send`, waiting or later, raises `ChannelClosed`. A receiver gets the items in the buffer
        first, and then `ChannelClosed`; ``async for`` ends.
        """
        if self.convert_inherited():
            self.close()
            return
        self._closed = True
        self.generation = -abs(self.generation)
        if scheduler.in_step():
            self._close_here()
            return
        # Until the owner calls `_close_here`, other threads could still serve a waiter in a slot on
        # the fast path, after this call has returned. So the slots are emptied here, by the same
        # few lines. No owner fills them again, because the generation is negative.
        refused = Refused(self._closed_error())
        receiver = self._receiver
        if receiver.__class__ is GreenThread:
            self._receiver = None
            receiver.next_send = refused
            ready.append(receiver)
        sender = self._sender
        if sender.__class__ is GreenThread:
            self._sender = self._item = None
            sender.next_send = refused
            ready.append(sender)
        scheduler.post(self._close_here)

    @property
    def closed(self) -> bool:
        """True if the channel was closed.

        In a process other than the channel's own, only as far as an answer, or the end of the
        owning process, has shown.
        """
        return self._closed

    def __reduce__(self) -> Any:
        """Pickle the channel as an end of this very channel, for another process of this pool, or
        of another pool on this machine.
        """
        if self.convert_inherited() and self.is_remote:
            return self.__reduce__()  # with the class that the channel has now
        return import_distributed().reduce_channel(self)

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        kind = f"Channel of {self.capacity}" if self.capacity else "Channel"
        return f"<{kind}{state} at {id(self):#x}>"

    # -- other processes ---------------------------------------------------------------------------

    # Returns True if the channel came with a fork. It has then just become a proxy, or a channel of
    # this process.
    def convert_inherited(self) -> bool:
        if abs(self.generation) >= oldest_generation:
            return False
        import_distributed().convert_inherited(self)
        return True

    # -- outside of green threads ------------------------------------------------------------------

    @coroutine
    def _run_in_proxy_thread(self, op: Any, *args: Any) -> Generator[Any, Any, Any]:
        """Run `op` in a proxy green thread for asyncio code, and wait for its result."""
        if not in_asyncio():
            raise RuntimeError(
                "channels can be awaited only in green threads and asyncio: use put and get in "
                "plain code"
            )
        proxy = spawning.start(op, (self, *args), name=f"Channel.{op.__name__}")
        try:
            return (yield from proxy.__await__())
        except BaseException:
            # Most often, the wait was cancelled. If the proxy has failed, this does nothing.
            proxy.cancel()
            if not args:
                proxy.then(self._return_item)
            raise
        finally:
            del proxy  # no cycle through the traceback of its error

    def _return_item(self, item: Any) -> None:
        """Give back the item of a receiver that is gone. The next receiver gets it before all
        others.
        """
        scheduler.post(partial(self.return_item_here, item))


def _closed_by_death(closed: ChannelClosed) -> bool:
    """Return True if a drone's death has closed the channel, which is then among the causes."""
    cause = closed.__cause__
    while cause is not None and not isinstance(cause, DroneDied):
        cause = cause.__cause__
    return cause is not None


class Claim(Generic[T]):
    """One end of a channel, held by one green thread; made by `Channel.claim`."""

    def __init__(self, channel: Channel[T], end: str | None) -> None:
        self._channel = channel
        self._requested_end = end
        self._held_end: str | None = None
        self._is_in_block = False

    async def __aenter__(self) -> Claim[T]:
        if self._requested_end is not None:
            await self._acquire_end(self._requested_end)
        self._is_in_block = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_in_block = False
        if self._held_end is not None:
            self._channel.end_claim(self._held_end)
            self._held_end = None

    async def send(self, item: T) -> None:
        """Send `item` as `Channel.send` does, holding the end."""
        self._check_in_block()
        await self._acquire_end("send")
        await self._channel.send(item)

    async def receive(self) -> T:
        """Receive an item as `Channel.receive` does, holding the end."""
        self._check_in_block()
        await self._acquire_end("receive")
        return await self._channel.receive()

    def _check_in_block(self) -> None:
        if not self._is_in_block:  # no code would end the claim
            raise RuntimeError("a claim can be used only inside its `async with` block")

    async def _acquire_end(self, end: str) -> None:
        if end == self._held_end:
            return
        claimed_end = self._held_end or self._requested_end
        if claimed_end not in (None, end):
            raise RuntimeError(f"this claim is for the end {claimed_end!r}, not for {end!r}")
        if get_ident() != scheduler.owner:
            raise outside_error("Channel.claim", "a separate channel")
        state = self._channel.make_rare_state()
        if state.holder.get(end) is scheduler.current:
            raise RuntimeError(f"this green thread holds the end {end!r} by another claim already")
        await state.locks.setdefault(end, Lock()).acquire()
        state.holder[end] = scheduler.current
        self._held_end = end


class End(Generic[T]):
    """An end of a channel, without the methods that count it (distributed/ends.py)."""

    def __init__(self, channel: Channel[T]) -> None:
        self.channel = channel

    def close(self) -> None:
        """Close the end. Any thread may call this, more than once.

        The channel is closed with its last end of this kind.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_channel(self) -> Channel[T]:
        raise NotImplementedError


class Sender(End[T]):
    """The sending end of a channel; see `Channel.sender`.

    Used in a ``with`` statement, the end is closed with the block.
    """

    def send(self, item: T) -> Awaitable[None]:
        """Send `item`, as `Channel.send` does."""
        return self._open_channel().send(item)

    def put(self, item: T, timeout: float | None = None) -> None:
        """Send `item` from plain code, as `Channel.put` does."""
        self._open_channel().put(item, timeout)

    def sending(self, item: T, *, when: bool | Callable[[], object] = True) -> Guard[None]:
        """Return a guard for `select`, as `Channel.sending` does."""
        return self._open_channel().sending(item, when=when)


class Receiver(End[T]):
    """The receiving end of a channel; see `Channel.receiver`.

    ``async for`` and ``for`` work as with the channel.
    """

    def receive(self) -> Awaitable[T]:
        """Receive an item, as `Channel.receive` does."""
        return self._open_channel().receive()

    def get(self, timeout: float | None = None) -> T:
        """Receive an item in plain code, as `Channel.get` does."""
        return self._open_channel().get(timeout)

    def receiving(self, *, when: bool | Callable[[], object] = True) -> Guard[T]:
        """Return a guard for `select`, as `Channel.receiving` does."""
        return self._open_channel().receiving(when=when)

    # Both iterators refer to the end, which is therefore not released before the loop ends.

    def __aiter__(self) -> AsyncIterator[T]:
        self._open_channel()
        return self

    def __anext__(self) -> Awaitable[T]:
        return self.channel.__anext__()

    def __iter__(self) -> Iterator[T]:
        yield from self._open_channel()


def import_distributed() -> Any:
    """Import green/distributed/, which imports this module, and which a program with local channels
    only never needs.
    """
    return import_module(".distributed", __package__)


def _open_transport() -> None:
    """Open the transport after a snapshot, whose drones may use the channels they inherit."""
    if any_channel_made:
        distributed = import_distributed()
        # Without a socket, drones that use such a channel get the error that its process is gone.
        with suppress(OSError):
            distributed.get_transport()


def _begin_generation() -> None:
    global generation
    generation += 1


def _reset_after_fork() -> None:
    global GreenThread, generation, oldest_generation
    GreenThread = spawning.OwnGreenThread  # type: ignore[misc]
    generation += 1
    oldest_generation = generation


addresses.start_callbacks.append(_open_transport)
os.register_at_fork(
    before=_begin_generation, after_in_parent=_begin_generation, after_in_child=_reset_after_fork
)
