"""Clients take turns: whoever has one call waits for one of each other, however many these have
given.

    the pool's queue   a1 a2 a3 a4 ... b1 c1      ── order ──>      a1 b1 c1 a2 a3 a4 ...

Within a client the order stays. What the pool's owner has given himself is taken as one client's.
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
"""Times as long as the last ordering took nothing is ordered again: the hub has other things to
do."""


class FairTurns:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._asked = False
        self._not_before = 0.0
        self.due = False  # a client has given calls that others' may stand before

    def look(self) -> None:
        """In the server's turn."""
        if self.due and not self._asked and monotonic() >= self._not_before:
            self.due, self._asked = False, True
            self._dispatcher.reactor.post(self._order)

    def _order(self) -> None:
        """In a turn of the hub: others only add to the queue's end, and take nothing, until the
        crew is over."""
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
