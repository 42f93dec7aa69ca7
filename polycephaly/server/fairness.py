"""Fairness between the clients of a served pool: their queued calls take turns.

    the pool's queue   a1 a2 a3 a4 ... b1 c1      ── order ──>      a1 b1 c1 a2 a3 a4 ...

A client with one call waits for at most one queued call of each other client. The order of one
client's calls stays. Tasks that the pool's owner submitted count as those of one more client.
"""

from __future__ import annotations

from itertools import zip_longest
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..pool.dispatcher import Dispatcher
    from ..pool.task import Task

__all__ = ["FairTurns"]

REST = 20
"""Pause after an ordering, as a multiple of its duration: the reactor has other things to do."""


class FairTurns:
    """Reorders the dispatcher's queue."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._asked = False
        self._not_before = 0.0
        self.due = False  # a client has submitted calls that may overtake those of others

    def look(self) -> None:
        """Post an ordering if one is due. Called holding the server's lock."""
        if self.due and not self._asked and monotonic() >= self._not_before:
            self.due, self._asked = False, True
            self._dispatcher.reactor.post(self._order)

    def _order(self) -> None:
        """Reorder the queue, holding the reactor's lock.

        Until the dispatcher is over, other threads only append to the queue and take nothing.
        """
        begun, dispatcher = monotonic(), self._dispatcher
        if not dispatcher.over:
            queue = dispatcher.queue
            parties: dict[str, list[Task]] = {}
            for task in [*queue]:
                parties.setdefault(task.party, []).append(task)
            if len(parties) > 1:
                places = (
                    task
                    for each in zip_longest(*parties.values())
                    for task in each
                    if task is not None
                )
                for place, task in enumerate(places):
                    if queue[place] is not task:
                        queue[place] = task
        now = monotonic()
        self._not_before = now + REST * (now - begun)
        self._asked = False
