"""Back-pressure: lets callers wait until a queue has room for their task.

A caller appends a promise to `_waiting` and then checks the queue again. A queue is shortened only
while holding the reactor's lock, and that critical section ends with `wake_waiters`. So either the
caller sees the shorter queue, or `wake_waiters` sees the caller, and no wake-up is lost.
`wake_waiters` wakes as many callers as there is room for, in order. Each checks the queue again,
because others may have been faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sized
from functools import partial
from typing import TYPE_CHECKING

from ..promises.promise import Signal, fulfill

if TYPE_CHECKING:
    from .reactor import Reactor

__all__ = ["BackPressure"]


class BackPressure:
    """The limit for queues that may hold `limit` tasks each.

    Any thread may call the methods, except `wake_waiters`.
    """

    def __init__(self, reactor: Reactor, limit: int) -> None:
        self._reactor = reactor
        self._limit = limit
        self._waiting: deque[_Room] = deque()

    def __bool__(self) -> bool:
        """Return whether any caller waits."""
        return bool(self._waiting)

    def has_room(self, queue: Sized) -> bool:
        return len(queue) < self._limit

    def wait(self, queue: Sized, closed: Callable[[], bool]) -> None:
        """Wait until `queue` has room or `closed()` is true.

        Returns at once, although the queue is full, in a thread that settles promises or holds the
        reactor's lock: such a thread would wait for itself. A thread that waits may read results
        meanwhile (`_Room._help`).
        """
        while not (self.has_room(queue) or closed()) and self._reactor.can_wait():
            room = _Room(self._reactor, queue)
            self._waiting.append(room)
            try:
                if not (self.has_room(queue) or closed()):
                    room.result()
            finally:  # otherwise `wake_waiters` could wake this caller in place of one that waits
                fulfill(room)

    def wake_waiters(self, closed: bool) -> None:
        """Wake the callers for which there is room, or all callers if the pool is closed. Called
        while holding the reactor's lock.
        """
        counted: dict[int, int] = {}
        for _ in range(len(self._waiting)):
            room = self._waiting.popleft()
            if room.done():  # the caller no longer waits
                continue
            key = id(room.queue)
            counted[key] = counted.get(key, 0) + 1
            if closed or len(room.queue) + counted[key] <= self._limit:
                self._reactor.deliver(partial(fulfill, room))
            else:
                self._waiting.append(room)


class _Room(Signal[None]):
    """The wait of one caller.

    Settled when `queue` may have room, the pool is closed, or the caller stops waiting.
    """

    def __init__(self, reactor: Reactor, queue: Sized) -> None:
        super().__init__()
        self.queue = queue
        self._reactor = reactor

    def _help(self, deadline: float | None) -> None:
        self._reactor.drive(self, deadline)
