"""The rows of a timeline: one for each drone, and below it one for each of its green threads.

Spans that overlap (coroutines that a drone runs beside each other) are in different *lanes* of
their row.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from .spans import Span

if TYPE_CHECKING:
    from .contents import Contents


@dataclass(slots=True)
class Row:
    """A row of the chart.

    `thread` is "" for the drone's own row. `lanes` has the spans that have begun, each lane in
    order of time and without overlap. `sent` has the spans that have not begun, and `lives` the
    lives of green threads.
    """

    drone: str
    thread: str = ""
    lanes: list[list[Span]] = field(default_factory=list)
    sent: list[Span] = field(default_factory=list)
    lives: list[Span] = field(default_factory=list)
    busy: float = 0.0
    """Seconds in which at least one span ran."""

    @property
    def spans(self) -> list[Span]:
        return [span for lane in self.lanes for span in lane]


def rows(timeline: Contents) -> list[Row]:
    """Return the rows in the order of the drones; green threads in the order of their start."""
    found: dict[tuple[str, str], Row] = {(drone, ""): Row(drone) for drone in timeline.drones}
    begun: dict[tuple[str, str], list[Span]] = {}
    for span in timeline.spans:
        key = span.drone, span.thread
        row = found.get(key)
        if row is None:
            row = found[key] = Row(*key)
        if span.whole:
            row.lives.append(span)
        elif span.started is None:
            row.sent.append(span)
        else:
            begun.setdefault(key, []).append(span)
    for key, spans in begun.items():
        spans.sort(key=_started)
        found[key].lanes = _lanes(spans)
        found[key].busy = covered((span.started or 0.0, span.finished or 0.0) for span in spans)
    place = {drone: index for index, drone in enumerate(timeline.drones)}
    return sorted(found.values(), key=lambda row: (place[row.drone], row.thread != "", _first(row)))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of `intervals`, which must be sorted by start."""
    total, covered_until = 0.0, -inf
    for start, end in intervals:
        if end > covered_until:
            total += end - max(start, covered_until)
            covered_until = end
    return total


def _lanes(spans: list[Span]) -> list[list[Span]]:
    lanes: list[list[Span]] = []
    free: list[tuple[float, int]] = []  # when each lane is free again
    for span in spans:
        if free and free[0][0] <= _started(span):
            _, lane = heapq.heappop(free)
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(span)
        heapq.heappush(free, (inf if span.finished is None else span.finished, lane))
    return lanes


def _started(span: Span) -> float:
    return span.started or 0.0


def _first(row: Row) -> float:
    return min(
        (_started(span) for lane in (row.lives, *row.lanes) for span in lane[:1]), default=inf
    )
