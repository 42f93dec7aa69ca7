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
End = tuple[int, int, float | None]
"""Of an arrow: process, thread, moment."""


def json_of(timeline: Contents, title: str, bars: object = ()) -> bytes:
    other = {
        "title": title,
        "bottleneck": bottleneck_of(timeline),
        "spans not kept": timeline.folded,
    }
    document = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": list(events(timeline))}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )


def events(timeline: Contents) -> Iterator[Event]:
    start = timeline.start
    yield _metadata("process_name", 0, 0, name="controller")
    yield _metadata("thread_name", 0, 1, name="sends")
    yield _metadata("thread_name", 0, 2, name="receives")
    process = thread = 0
    drone: str | None = None
    tasks: list[tuple[Span, int, int]] = []
    for row in rows(timeline):
        if row.drone != drone:
            drone, process, thread = row.drone, process + 1, 0
            yield _metadata("process_name", process, 0, name=drone)
            yield _metadata("process_sort_index", process, 0, sort_index=process)
        for lane in _lanes(row):
            thread += 1
            yield _metadata("thread_name", process, thread, name=row.thread or "tasks")
            for span in lane:
                yield _slice(span, process, thread, start)
                if not row.thread:
                    tasks.append((span, process, thread))
    yield from _controller(tasks, start)
    if len(tasks) <= MAX_FLOW_SPANS:
        yield from _graph(tasks, start)


def _lanes(row: Row) -> list[list[Span]]:
    """Return the lanes of a row. The calls of a green thread are nested in its life."""
    if row.thread:
        nested = sorted(
            [*row.lives, *row.spans],
            key=lambda span: (span.started or 0.0, -(span.finished or 0.0)),
        )
        return [nested] if len(row.lanes) < 2 else [row.lives, *row.lanes]
    return row.lanes


def _slice(span: Span, process: int, thread: int, start: float) -> Event:
    assert span.started is not None
    args = {
        "status": span.status,
        "calls": span.calls,
        "bytes sent": span.bytes_sent or None,
        "bytes received": span.bytes_received or None,
        "queued": _microseconds(span.queued, start),
        "sent": _microseconds(span.sent, start),
        "received": _microseconds(span.received, start),
        "processor seconds": span.cpu,
        "argument": span.note or None,
        "item": span.item,
    }
    return {
        "ph": "X", "name": span.name, "cat": "green" if span.thread else "work",
        "pid": process, "tid": thread,
        "ts": _microseconds(span.started, start), "dur": round(span.seconds * 1e6, 3),
        "args": {name: value for name, value in args.items() if value is not None},
    }  # fmt: skip


def _controller(tasks: list[tuple[Span, int, int]], start: float) -> Iterator[Event]:
    sent, received = {span.sent for span, _, _ in tasks}, {span.received for span, _, _ in tasks}
    for thread, name, moments in ((1, "send", sent), (2, "receive", received)):
        for moment in sorted(each for each in moments if each is not None):
            yield {
                "ph": "X", "name": name, "cat": "transport", "pid": 0, "tid": thread,
                "ts": _microseconds(moment, start), "dur": INSTANT_MICROSECONDS,
            }  # fmt: skip
    if len(tasks) <= MAX_FLOW_SPANS:
        for number, (span, process, thread) in enumerate(tasks):
            if span.sent is not None:
                ends = (0, 1, span.sent), (process, thread, span.started)
                yield from _arrow(2 * number, "there", *ends, start, span.bytes_sent)
            if span.received is not None:
                ends = (process, thread, _last_moment(span)), (0, 2, span.received)
                yield from _arrow(2 * number + 1, "back", *ends, start, span.bytes_received)
    waiting = 0
    begun = [(span.started, -1) for span, _, _ in tasks]
    steps = begun + [(span.queued, 1) for span, _, _ in tasks]
    known = sorted((at, step) for at, step in steps if at is not None)
    for moment, group in groupby(known, key=itemgetter(0)):
        waiting += sum(step for _, step in group)
        yield {
            "ph": "C", "name": "waiting", "pid": 0, "tid": 0,
            "ts": _microseconds(moment, start), "args": {"pieces": waiting},
        }  # fmt: skip


def _graph(tasks: list[tuple[Span, int, int]], start: float) -> Iterator[Event]:
    by_number = {
        span.number: (span, process, thread) for span, process, thread in tasks if span.number
    }
    for span, process, thread in tasks:
        for number in dict.fromkeys(span.needed):
            if number in by_number:
                source, source_process, source_thread = by_number[number]
                begin = source_process, source_thread, _last_moment(source)
                end = process, thread, span.started
                yield from _arrow(f"{number} {span.number}", "input", begin, end, start)


def _last_moment(span: Span) -> float:
    """Return a moment inside the slice, because an arrow at its end would not belong to it."""
    assert span.started is not None and span.finished is not None
    return max(span.started, span.finished - INSTANT_MICROSECONDS / 1e6)


def _arrow(
    number: int | str, name: str, begin: End, end: End, start: float, size: int | None = None
) -> Iterator[Event]:
    """Yield both ends of an arrow: of a message of that size, or from one task to another."""
    arrow: Event = {"id": number, "name": name, "cat": "flow" if size is None else "transport"}
    if size is not None:
        arrow["args"] = {"bytes": size}
    for kind, (process, thread, moment) in (({"ph": "s"}, begin), ({"ph": "f", "bp": "e"}, end)):
        ts = _microseconds(moment, start)
        yield {**kind, **arrow, "pid": process, "tid": thread, "ts": ts}


def _metadata(kind: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _microseconds(moment: float | None, start: float) -> float | None:
    return None if moment is None else round((moment - start) * 1e6, 3)
