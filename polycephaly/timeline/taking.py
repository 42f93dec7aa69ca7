"""Takes a crew's timeline: what its record has, and what is under way at this moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import monotonic
from typing import TYPE_CHECKING

from .spans import RUNNING, SENT, Span, short_name
from .timeline import Timeline

if TYPE_CHECKING:
    from ..pool.dispatcher import Dispatcher

__all__ = ["take"]


def take(crew: Dispatcher, only: str | None = None) -> Timeline:
    """Of all its drones, or of one. From any thread, also when the crew has ended."""
    now = monotonic()
    record, plan = crew.record, crew.plan
    folded, entries = record.look()
    before = {
        entry.drone: entry.finished[-1] for entry in entries
    }  # up to when each had done something
    under_way = list(_under_way(crew, before, now))
    drones = {plan.drone_name(index): None for index in range(plan.size)}
    taken = Timeline(under_way, [*drones], waiting=len(crew.queue))
    taken.add_record(folded, entries, list(record.threads), record.threads_lost)
    return taken if only is None else taken.of_drone(only)


def _under_way(crew: Dispatcher, before: Mapping[str, float], now: float) -> Iterator[Span]:
    for link in list(crew.links):
        for work in list(link.flight.values()):
            sending = work.sending
            if sending is None:  # it is just being taken back
                continue
            name, calls = short_name(work.definition.label), work.count
            if link.runs(work.number):
                started = (
                    sending.at
                    if work.place
                    else min(now, max(sending.at, before.get(link.name, 0.0)))
                )
                yield Span(
                    name,
                    link.name,
                    started,
                    now,
                    work.queued,
                    sending.at,
                    status=RUNNING,
                    calls=calls,
                )
            else:
                yield Span(
                    name, link.name, None, None, work.queued, sending.at, status=SENT, calls=calls
                )
