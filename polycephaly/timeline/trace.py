"""A timeline as a trace in Chrome's trace event format, for Perfetto and chrome://tracing.

    process 0      the controller: a slice for each message sent and received; waiting tasks
    process 1, 2   the drones: a thread for each lane of tasks, and one for each green thread
    flows          from sending to start and from end to receiving, with bytes; and from the end of
                   a graph's node to the start of a node that needed it

Times are microseconds from the beginning of the timeline. Slices of one thread never overlap, as
the format requires.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from .bottleneck import bottleneck_of
from .rows import Row, rows
from .spans import Span

if TYPE_CHECKING:
    from .contents import Contents

MAX_FLOW_SPANS = 20_000  # spans with an arrow each way; a file with more is too large for viewers
# Length of a slice of the controller, of which only the moment is known.
INSTANT_MICROSECONDS = 1.0

Event = dict[str, Any]
Place = tuple[int, int]
"""A process and a thread."""
End = tuple[Place, float | None]
"""Of an arrow: its place and moment."""
COUNTER, SENDS, RECEIVES = (0, 0), (0, 1), (0, 2)  # the places of the controller


def json_of(timeline: Contents, title: str, bars: object = ()) -> bytes:
    other = {
        "title": title,
        "bottleneck": bottleneck_of(timeline),
        "spans not kept": timeline.spans_lost,
    }
    events = list(_Trace(timeline.start).events(timeline))
    document = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )


class _Trace:
    def __init__(self, start: float) -> None:
        self._start = start
        self._tasks: list[tuple[Span, Place]] = []

    def events(self, timeline: Contents) -> Iterator[Event]:
        yield _event("M", "process_name", COUNTER, args={"name": "controller"})
        yield _event("M", "thread_name", SENDS, args={"name": "sends"})
        yield _event("M", "thread_name", RECEIVES, args={"name": "receives"})
        process = thread = 0
        drone: str | None = None
        for row in rows(timeline):
            if row.drone != drone:
                drone, process, thread = row.drone, process + 1, 0
                yield _event("M", "process_name", (process, 0), args={"name": drone})
                yield _event("M", "process_sort_index", (process, 0), args={"sort_index": process})
            for lane in _lanes(row):
                thread += 1
                place = process, thread
                yield _event("M", "thread_name", place, args={"name": row.thread or "tasks"})
                yield from (self._slice(span, place) for span in lane)
                self._tasks += [(span, place) for span in lane if not row.thread]
        yield from self._controller()
        if len(self._tasks) <= MAX_FLOW_SPANS:
            yield from self._arrows()

    def _microseconds(self, moment: float | None) -> float | None:
        return None if moment is None else round((moment - self._start) * 1e6, 3)

    def _slice(self, span: Span, place: Place) -> Event:
        args = {
            "status": span.status,
            "calls": span.calls,
            "bytes sent": span.bytes_sent or None,
            "bytes received": span.bytes_received or None,
            "queued": self._microseconds(span.queued),
            "sent": self._microseconds(span.sent),
            "received": self._microseconds(span.received),
            "processor seconds": span.cpu,
            "argument": span.note or None,
            "item": span.item,
        }
        known = {name: value for name, value in args.items() if value is not None}
        kind, length = "green" if span.thread else "work", round(span.seconds * 1e6, 3)
        begin = self._microseconds(span.started)
        return _event("X", span.name, place, cat=kind, ts=begin, dur=length, args=known)

    def _controller(self) -> Iterator[Event]:
        spans = [span for span, _ in self._tasks]
        sent, received = {span.sent for span in spans}, {span.received for span in spans}
        for place, name, moments in ((SENDS, "send", sent), (RECEIVES, "receive", received)):
            for ts in map(self._microseconds, sorted(each for each in moments if each is not None)):
                yield _event("X", name, place, cat="transport", ts=ts, dur=INSTANT_MICROSECONDS)
        waiting = 0
        steps = [(span.started, -1) for span in spans] + [(span.queued, 1) for span in spans]
        known = sorted((at, step) for at, step in steps if at is not None)
        for moment, group in groupby(known, key=itemgetter(0)):
            waiting += sum(step for _, step in group)
            ts = self._microseconds(moment)
            yield _event("C", "waiting", COUNTER, ts=ts, args={"pieces": waiting})

    def _arrows(self) -> Iterator[Event]:
        """Yield the arrows of messages, and from each task to those that needed its value."""
        by_number = {span.number: (span, place) for span, place in self._tasks if span.number}
        for index, (span, place) in enumerate(self._tasks):
            begin, end = (place, span.started), (place, _last_moment(span))
            if span.sent is not None:
                to = {"cat": "transport", "args": {"bytes": span.bytes_sent}}
                yield from self._arrow("there", 2 * index, (SENDS, span.sent), begin, **to)
            if span.received is not None:
                back = {"cat": "transport", "args": {"bytes": span.bytes_received}}
                yield from self._arrow(
                    "back", 2 * index + 1, end, (RECEIVES, span.received), **back
                )
            for number in dict.fromkeys(span.needed):
                if number in by_number:
                    giver, its_place = by_number[number]
                    source, key = (its_place, _last_moment(giver)), f"{number} {span.number}"
                    yield from self._arrow("input", key, source, begin, cat="flow")

    def _arrow(
        self, name: str, key: int | str, begin: End, end: End, **fields: Any
    ) -> Iterator[Event]:
        for phase, (place, moment) in (("s", begin), ("f", end)):
            ends = {"bp": "e"} if phase == "f" else {}
            yield _event(
                phase, name, place, id=key, ts=self._microseconds(moment), **ends, **fields
            )


def _event(phase: str, name: str, place: Place, **fields: Any) -> Event:
    process, thread = place
    return {"ph": phase, "name": name, "pid": process, "tid": thread, **fields}


def _lanes(row: Row) -> list[list[Span]]:
    """Return the lanes of a row. The calls of a green thread are nested in its life."""
    if not row.thread:
        return row.lanes
    if len(row.lanes) > 1:
        return [row.lives, *row.lanes]
    nested = [*row.lives, *row.spans]
    return [sorted(nested, key=lambda span: (span.started or 0.0, -(span.finished or 0.0)))]


def _last_moment(span: Span) -> float:
    """Return a moment inside the slice, because an arrow at its end would not belong to it."""
    assert span.started is not None and span.finished is not None
    return max(span.started, span.finished - INSTANT_MICROSECONDS / 1e6)
