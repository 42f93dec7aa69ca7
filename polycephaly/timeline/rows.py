"""The rows of a timeline: one for each drone, and below it one for each of its green threads.

Spans that overlap (coroutines that a drone runs beside each other) are in different *lanes* of
their row.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

from .spans import Span

if TYPE_CHECKING:
    from .contents import Contents


class Row:
    """A row of the chart.

    `thread` is "" for the drone's own row. `spans` has the spans that have begun, in order of time,
    `sent` those that have not, and `lives` the lives of green threads. `busy` is the number of
    seconds in which at least one span ran.
    """

    def __init__(self, drone: str, thread: str, spans: list[Span]) -> None:
        self.drone = drone
        self.thread = thread
        self.lives = [span for span in spans if span.whole]
        self.sent = [span for span in spans if span.started is None]
        begun = (span for span in spans if span.started is not None and not span.whole)
        self.spans = sorted(begun, key=_started)
        first = (*self.lives[:1], *self.spans[:1])
        self.start = min(map(_started, first), default=inf)
        self.busy = covered((_started(span), span.finished or 0.0) for span in self.spans)

    @cached_property
    def lanes(self) -> list[list[Span]]:
        """The spans, each lane in order of time and without overlap."""
        lanes: list[list[Span]] = []
        free: list[tuple[float, int]] = []  # when each lane is free again
        for span in self.spans:
            if free and free[0][0] <= _started(span):
                _, lane = heapq.heappop(free)
            else:
                lane = len(lanes)
                lanes.append([])
            lanes[lane].append(span)
            heapq.heappush(free, (inf if span.finished is None else span.finished, lane))
        return lanes


def rows(timeline: Contents) -> list[Row]:
    """Return the rows in the order of the drones; green threads in the order of their start."""
    spans: dict[tuple[str, str], list[Span]] = {(drone, ""): [] for drone in timeline.drones}
    for span in timeline.spans:
        spans.setdefault((span.drone, span.thread), []).append(span)
    place = {drone: index for index, drone in enumerate(timeline.drones)}
    found = (Row(*key, each) for key, each in spans.items())
    return sorted(found, key=lambda row: (place[row.drone], row.thread != "", row.start))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of `intervals`, which must be sorted by start."""
    total, covered_until = 0.0, -inf
    for start, end in intervals:
        if end > covered_until:
            total += end - max(start, covered_until)
            covered_until = end
    return total


def _started(span: Span) -> float:
    return span.started or 0.0
