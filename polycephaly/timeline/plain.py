"""Convert timelines to plain data that JSON can hold, to send them to another process."""

from __future__ import annotations

from typing import Any

from .spans import Span
from .timeline import Timeline


def pack_timeline(timeline: Timeline) -> dict[str, Any]:
    return {
        "drones": timeline.drones,
        "spans": timeline.spans,
        "waiting": timeline.waiting,
        "cores": timeline.cores,
        "native_threads": timeline.native_threads,
        "spans_lost": timeline.spans_lost,
        "threads_lost": timeline.threads_lost,
    }


def unpack_timeline(plain: dict[str, Any], clock_offset: float = 0.0) -> Timeline:
    """Return the timeline for plain data whose clock is `clock_offset` seconds ahead of this
    process's.
    """
    spans = (_to_own_clock(Span(*span), clock_offset) for span in plain["spans"])
    timeline = Timeline(spans, plain["drones"], waiting=plain["waiting"])
    timeline.cores = _int_or_none(plain.get("cores"))
    timeline.native_threads = _int_or_none(plain.get("native_threads"))
    timeline.spans_lost, timeline.threads_lost = plain["spans_lost"], plain["threads_lost"]
    return timeline


def _int_or_none(number: object) -> int | None:
    """Return a number that older peers do not send."""
    return number if isinstance(number, int) else None


def _to_own_clock(span: Span, clock_offset: float) -> Span:
    shifted: dict[str, Any] = {
        name: at - clock_offset
        for name in ("started", "finished", "queued", "sent", "received")
        if (at := getattr(span, name)) is not None
    }
    return span._replace(**shifted, needed=tuple(span.needed))
