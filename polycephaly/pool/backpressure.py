"""Back-pressure: lets callers wait until a queue has room for their task.

A caller appends a promise to `_waiting` and then checks the queue again. A queue is shortened only
while holding the reactor's lock, and that critical section ends with `wake_waiters`. So either the
caller sees the shorter queue, or `wake_waiters` sees the caller, and no wake-up is lost.
`wake_waiters` wakes as many callers as there is room for, in order. Each checks the queue again,
because others may have been faster.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial

from ..promises.promise import Signal, fulfill
from .dispatcher_base import DispatcherBase
from .drone_handle import DroneHandle


class BackPressure:
    """The limit for queues that may hold `limit` tasks each: one for the tasks of each `target`,
    the only drone that may run them, or None.

    Any thread may call the methods, except `wake_waiters`.
    """

    def __init__(self, dispatcher: DispatcherBase, limit: int) -> None:
        self._dispatcher = dispatcher
        self._limit = limit
        # Settled when the queue may have room, the pool is closed, or the caller stops waiting.
        self._waiting: deque[tuple[DroneHandle | None, Signal[None]]] = deque()

    def __bool__(self) -> bool:
        """Return whether any caller waits."""
        return bool(self._waiting)

    def has_room(self, target: DroneHandle | None) -> bool:
        return self._dispatcher.backlog(target) < self._limit

    def wait(self, target: DroneHandle | None) -> None:
        """Wait until the queue has room or the pool is closed.

        Returns at once, although the queue is full, in a thread that settles promises or holds the
        reactor's lock: such a thread would wait for itself.
        """
        dispatcher, reactor = self._dispatcher, self._dispatcher.reactor
        while not self.has_room(target) and dispatcher.refusal is None and reactor.can_wait():
            room: Signal[None] = Signal()
            self._waiting.append((target, room))
            try:
                if not self.has_room(target) and dispatcher.refusal is None:
                    room.result()
            finally:  # otherwise `wake_waiters` could wake this caller in place of one that waits
                fulfill(room)

    def wake_waiters(self) -> None:
        """Wake the callers for which there is room, or all callers if the pool is closed. Called
        while holding the reactor's lock.
        """
        dispatcher, counted = self._dispatcher, Counter[DroneHandle | None]()
        for _ in range(len(self._waiting)):
            target, room = self._waiting.popleft()
            if room.done():  # the caller no longer waits
                continue
            counted[target] += 1
            has_room = dispatcher.backlog(target) + counted[target] <= self._limit
            if has_room or dispatcher.refusal is not None:
                dispatcher.reactor.deliver(partial(fulfill, room))
            else:
                self._waiting.append((target, room))
