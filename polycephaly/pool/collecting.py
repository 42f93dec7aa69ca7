"""Take a dispatcher's timeline: its trace buffer, and the tasks that are under way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..runtime.clock import monotonic
from ..runtime.system_limits import usable_processors
from ..timeline.spans import RUNNING, SENT, Span, short_name
from ..timeline.timeline import Timeline
from .record import Cursor

if TYPE_CHECKING:
    from .dispatcher import Dispatcher


def take_timeline(dispatcher: Dispatcher, only: str | None = None) -> Timeline:
    """Return the timeline of all drones, or of the drone `only`.

    Any thread may call it, also when the dispatcher has ended.
    """
    timeline, _ = take_news(dispatcher, (0, 0))
    return timeline if only is None else timeline.of_drone(only)


def take_news(dispatcher: Dispatcher, cursor: Cursor) -> tuple[Timeline, Cursor]:
    """Return what was recorded since `cursor`, the tasks that are under way, and the next cursor.

    Any thread may call it, also when the dispatcher has ended.
    """
    now, record = monotonic(), dispatcher.record
    # Before the tasks under way: a task that is answered in between would be shown twice.
    entries, threads, cursor = record.since(cursor)
    under_way = _under_way(dispatcher, now)
    timeline = Timeline(under_way, list(record.drones), waiting=dispatcher.assignment.queued)
    timeline.add_record(entries, threads)
    engine = dispatcher.supervisor.engine
    if engine.name in ("local", "inline"):
        timeline.cores = usable_processors()
    timeline.native_threads = engine.native_threads()
    timeline.spans_lost, timeline.threads_lost = record.spans_lost, record.threads_lost
    return timeline, cursor


def _under_way(dispatcher: Dispatcher, now: float) -> Iterator[Span]:
    """Yield a span for each task in flight. When a task began is not known: the end of the drone's
    last recorded task is taken, or the sending.
    """
    before = dispatcher.record.last_finished
    for handle in list(dispatcher.handles):
        for task in list(handle.in_flight.values()):
            sending = task.sending
            if sending is None:  # just being returned
                continue
            name, calls = short_name(task.definition.label), task.calls_left
            span = Span(name, handle.name, None, None, task.queued, sending.at, None, SENT, calls)
            if handle.is_running(task.number):
                started = sending.at
                if not task.definition.overlaps:
                    started = min(now, max(started, before.get(handle.name, 0.0)))
                item, _ = task.items
                span = span._replace(started=started, finished=now, status=RUNNING, item=item)
            yield span
