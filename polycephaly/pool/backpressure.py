"""Rooms: callers who wait until a queue has room for their work.

A caller leaves its promise in `_waiting` and looks again at the queue; whoever shortens a queue
does so in a turn, which ends with `tell`. So either the caller sees the shorter queue, or that turn
sees the caller. As many are told as there is room for, in their order; each looks again, since
others may have come first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sized
from functools import partial
from typing import TYPE_CHECKING

from ..promises.promise import FINISHED, Signal

if TYPE_CHECKING:
    from ..runtime.reactor import Reactor

__all__ = ["BackPressure"]


class BackPressure:
    """For queues that may hold at most `limit` pieces of work each. Any thread may call it."""

    def __init__(self, reactor: Reactor, limit: int) -> None:
        self._reactor = reactor
        self._limit = limit
        self._waiting: deque[_Room] = deque()

    def __bool__(self) -> bool:
        """Does anybody wait?"""
        return bool(self._waiting)

    def has(self, queue: Sized) -> bool:
        return len(queue) < self._limit

    def wait(self, queue: Sized, closed: Callable[[], bool]) -> None:
        """Until there is room in it, or it is `closed`. Not where this very thread would have to
        make the room."""
        while not (self.has(queue) or closed()) and self._reactor.can_be_waited_for():
            room = _Room(self._reactor, queue)
            self._waiting.append(room)
            try:
                if not (self.has(queue) or closed()):
                    room.result()
            finally:  # or it could be told in the place of one who waits
                room._settle(FINISHED, None, None)

    def tell(self, closed: bool) -> None:
        """In a turn. All are told, if there will be no more room."""
        told: dict[int, int] = {}
        for _ in range(len(self._waiting)):
            room = self._waiting.popleft()
            if room.done():  # its caller has gone
                continue
            key = id(room.queue)
            told[key] = told.get(key, 0) + 1
            if closed or len(room.queue) + told[key] <= self._limit:
                self._reactor.deliver(partial(room._settle, FINISHED, None, None))
            else:
                self._waiting.append(room)


class _Room(Signal[None]):
    """There may be room in `queue`."""

    def __init__(self, reactor: Reactor, queue: Sized) -> None:
        super().__init__()
        self.queue = queue
        self._reactor = reactor

    def _help(self, end: float | None) -> None:
        self._reactor.drive(self, end)
