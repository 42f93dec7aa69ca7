"""Wait queues of channels and locks, and the waiters in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .scheduler import PARK, scheduler
from .thread import GreenThread

if TYPE_CHECKING:
    from .channel import Channel

__all__ = ["NOTHING", "QueuedOperation", "Refused", "WaitQueue", "Waiter"]

T = TypeVar("T")

NOTHING: Any = object()
"""Returned in place of an item if there is none."""

_MAX_GONE_UNSWEPT = 32  # no sweep up to that many departures


class WaitQueue(Generic[T]):
    """A FIFO queue that a waiter in the middle can leave in constant time.

    A waiter that leaves is only counted in `_gone`. Its place is skipped at the head of the queue,
    or swept out when such places are the majority. A waiter that comes again stands behind its
    former place, so the first of its places are those that count as gone.
    """

    __slots__ = ("_gone", "_gone_count", "_places")

    def __init__(self) -> None:
        self._places: deque[T] = deque()
        self._gone: dict[T, int] = {}
        self._gone_count = 0

    def __len__(self) -> int:
        return len(self._places) - self._gone_count

    def __iter__(self) -> Iterator[T]:
        gone = dict(self._gone)
        for waiter in self._places:
            if gone.get(waiter):
                gone[waiter] -= 1
            else:
                yield waiter

    def append(self, waiter: T) -> None:
        self._places.append(waiter)

    def appendleft(self, waiter: T) -> None:
        """Put back a waiter that has just been the first."""
        self._places.appendleft(waiter)

    def popleft(self) -> T:
        while True:
            waiter = self._places.popleft()
            if not self._gone_count or not self._discard_gone(waiter):
                return waiter

    def _discard_gone(self, waiter: T) -> bool:
        times = self._gone.pop(waiter, 0)
        if times > 1:
            self._gone[waiter] = times - 1
        self._gone_count -= times > 0
        return times > 0

    def remove(self, waiter: T) -> None:
        """Remove `waiter`, which must be in the queue."""
        places = self._places
        if places[0] is waiter:
            places.popleft()
        elif places[-1] is waiter:
            places.pop()
        else:
            self._gone[waiter] = self._gone.get(waiter, 0) + 1
            self._gone_count += 1
        if self._gone_count > _MAX_GONE_UNSWEPT and self._gone_count * 2 > len(places):
            self._places = deque(self)
            self._gone.clear()
            self._gone_count = 0


class Waiter:
    """A waiter in the queue at one end of a channel. An `Offer` (select.py) is a waiter whose
    `select` may have chosen another guard.
    """

    __slots__ = ("item", "location", "thread")

    is_remote = False
    """True if the waiter is in another process: `PendingOperation` (distributed/owner.py)."""

    def __init__(self, thread: GreenThread[Any], item: Any = None) -> None:
        self.thread = thread
        self.item = item
        # The WaitQueue that the waiter stands in, or the Transaction (distributed/transaction.py)
        # that has taken it out.
        self.location: Any = None

    def serve(self, value: Any) -> None:
        """Wake the thread; its await returns `value`."""
        self.thread._value = value
        scheduler.ready.append(self.thread)

    def refuse(self, error: BaseException) -> None:
        """Wake the thread with `error`, because the channel was closed."""
        self.thread._value = Refused(error)
        scheduler.ready.append(self.thread)


class QueuedOperation(Waiter):
    """A green thread's place in a channel's queue, and its awaitable. Like `Parking`, it has no
    frame.
    """

    __slots__ = ("channel", "end", "parked")

    def __init__(
        self, thread: GreenThread[Any], channel: Channel[Any], end: str, item: Any = None
    ) -> None:
        super().__init__(thread, item)
        self.channel = channel
        self.end = end
        self.parked = False

    @property
    def name(self) -> str:
        return f"Channel.{self.end}"

    def __await__(self) -> Generator[Any, Any, Any]:
        return self  # type: ignore[return-value]  # it has a generator's methods

    def __iter__(self) -> QueuedOperation:
        return self

    def __next__(self) -> Any:
        if self.parked:
            raise StopIteration
        self.parked = True
        self.channel._enqueue(self.end, self)
        return PARK

    def send(self, value: Any) -> Any:
        if value.__class__ is Refused:
            raise value.error
        raise StopIteration(value)

    def throw(self, error: BaseException, *_: Any) -> Any:
        if self.channel._withdraw_waiter(self.end, self):
            raise error
        self.channel._interrupt_served(self, error)
        return PARK

    def close(self) -> None:
        self.channel._withdraw_waiter(self.end, self)


class Refused:
    """Given to a thread in place of a value: the error to raise."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error
