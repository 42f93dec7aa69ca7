"""Back-pressure: lets callers wait until a queue has room for their task.

A caller appends a promise to `_waiting` and then checks the queue again. A queue is shortened only
while holding the reactor's lock, and that critical section ends with `wake_waiters`. So either the
caller sees the shorter queue, or `wake_waiters` sees the caller, and no wake-up is lost.
`wake_waiters` wakes as many callers as there is room for, in order. Each checks the queue again,
because others may have been faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from ..promises.promise import fulfill
from .reactor import DrivingSignal, Reactor

Backlog = Callable[[], int]
"""A bound method that counts the tasks which wait in a queue."""


class BackPressure:
    """The limit for queues that may hold `limit` tasks each.

    Any thread may call the methods, except `wake_waiters`.
    """

    def __init__(self, reactor: Reactor, limit: int) -> None:
        self._reactor = reactor
        self._limit = limit
        # Settled when the queue may have room, the pool is closed, or the caller stops waiting.
        self._waiting: deque[tuple[Backlog, DrivingSignal[None]]] = deque()

    def __bool__(self) -> bool:
        """Return whether any caller waits."""
        return bool(self._waiting)

    def has_room(self, backlog: Backlog) -> bool:
        return backlog() < self._limit

    def wait(self, backlog: Backlog, closed: Callable[[], bool]) -> None:
        """Wait until the queue has room or `closed()` is true.

        Returns at once, although the queue is full, in a thread that settles promises or holds the
        reactor's lock: such a thread would wait for itself. A thread that waits may read results
        meanwhile.
        """
        while not (self.has_room(backlog) or closed()) and self._reactor.can_wait():
            room: DrivingSignal[None] = DrivingSignal(self._reactor)
            self._waiting.append((backlog, room))
            try:
                if not (self.has_room(backlog) or closed()):
                    room.result()
            finally:  # otherwise `wake_waiters` could wake this caller in place of one that waits
                fulfill(room)

    def wake_waiters(self, closed: bool) -> None:
        """Wake the callers for which there is room, or all callers if the pool is closed. Called
        while holding the reactor's lock.
        """
        counted: dict[Backlog, int] = {}
        for _ in range(len(self._waiting)):
            backlog, room = self._waiting.popleft()
            if room.done():  # the caller no longer waits
                continue
            counted[backlog] = counted.get(backlog, 0) + 1
            if closed or backlog() + counted[backlog] <= self._limit:
                self._reactor.deliver(partial(fulfill, room))
            else:
                self._waiting.append((backlog, room))
