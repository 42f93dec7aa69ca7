"""Fairness between the clients of a served pool: their queued calls take turns.

    the pool's queue   a1 a2 a3 a4 ... b1 c1      ── order ──>      a1 b1 c1 a2 a3 a4 ...

A client with one call waits for at most one queued call of each other client with the same
priority. The order of one client's calls stays. Tasks that the pool's owner submitted count as
those of one more client.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING

from ..runtime.clock import monotonic

if TYPE_CHECKING:
    from ..pool.dispatcher import Dispatcher
    from ..pool.task import Task

PAUSE_FACTOR = 20
"""Pause after an ordering, as a multiple of its duration: the reactor has other things to do."""


class FairOrder:
    """Reorders the dispatcher's queues."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._is_posted = False
        self._not_before = 0.0
        self.due = False  # a client has submitted calls that may overtake those of others

    def order_if_due(self) -> None:
        """Post an ordering if one is due. Called holding the server's lock."""
        if self.due and not self._is_posted and monotonic() >= self._not_before:
            self.due, self._is_posted = False, True
            self._dispatcher.post(self._order)

    def _order(self) -> None:
        """Reorder the queues, which only the reactor's thread changes."""
        started_at, dispatcher = monotonic(), self._dispatcher
        if not dispatcher.has_ended:
            dispatcher.queue_inbound()
            for queue in (
                dispatcher.assignment.queue,
                *dispatcher.assignment.resources.queues.values(),
            ):
                _take_turns(queue)
        now = monotonic()
        self._not_before = now + PAUSE_FACTOR * (now - started_at)
        self._is_posted = False


def _take_turns(queue: deque[Task]) -> None:
    tasks_by_client: dict[str, deque[Task]] = {}
    for task in [*queue]:
        tasks_by_client.setdefault(task.client_tag, deque()).append(task)
    if len(tasks_by_client) > 1:
        turns, ordered = deque(tasks_by_client.values()), []
        while turns:
            tasks = turns.popleft()
            ordered.append(tasks.popleft())
            if tasks:
                turns.append(tasks)
        ordered.sort(key=attrgetter("priority"), reverse=True)  # stable
        queue.clear()
        queue.extend(ordered)
