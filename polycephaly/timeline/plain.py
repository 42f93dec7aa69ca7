"""Timelines on their way to another process: as plain data, which JSON can hold."""

from __future__ import annotations

from typing import Any

from .record import Folded
from .spans import Span, Sums
from .timeline import Timeline

__all__ = ["pack_timeline", "unpack_timeline"]


def pack_timeline(timeline: Timeline) -> dict[str, Any]:
    return {
        "drones": timeline.drones,
        "spans": timeline.spans,
        "waiting": timeline.waiting,
        "threads_lost": timeline.threads_lost,
        "folded": [
            ([(*key, *sums) for key, sums in folded.sums.items()], folded.spans, folded.start, folded.end)
            for folded in timeline._folded
        ],
    }


def unpack_timeline(plain: dict[str, Any]) -> Timeline:
    spans = (Span(*span)._replace(needed=tuple(span[-1])) for span in plain["spans"])  # JSON has lists only
    timeline = Timeline(spans, plain["drones"], waiting=plain["waiting"])
    timeline.threads_lost = plain["threads_lost"]
    for sums, spans, start, end in plain["folded"]:
        by_key = {(drone, name): Sums(*numbers) for drone, name, *numbers in sums}
        timeline.add_record(Folded(by_key, spans, start, end), [])
    return timeline
