"""The elements of a timeline: spans, and sums of spans that are not kept one by one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")

DONE, ERROR, CANCELLED, TIMEOUT, DIED = "done", "error", "cancelled", "timeout", "died"
RUNNING, SENT = "running", "sent"  # at the moment when the timeline was taken


class Span(NamedTuple):
    """A task, or a call of a green thread.

    Times are seconds of `time.monotonic`; None if the point was not reached.

    Attributes
    ----------
    name
        The function.
    drone
        The drone.
    thread
        The green thread in the drone; "" for a task of the drone itself.
    queued
        The time of the call, or of the arrival of its last input.
    sent, received
        The times when the controller sent the task and received the result.
    started, finished
        The times on the drone. A green thread's call has only these two.
    status
        "done", "error", "cancelled", "timeout" or "died"; at the moment of the timeline also
        "running" or "sent".
    calls
        More than 1 for a chunk of a `map`, or for short calls that share a span.
    bytes_sent, bytes_received
        The spans of calls that travelled together share their bytes evenly.
    cpu
        Seconds of processor time of the process meanwhile; None if not measured (short calls).
    whole
        True for the life of a green thread, in which its calls lie.
    number
        Number of the task in its process; 0: many tasks, or none.
    needed
        Numbers of the tasks whose values it took as promises.
    item
        The index of a call of a `map` among all of them, or of the first one of a chunk.
    """

    name: str
    drone: str
    started: float | None
    finished: float | None
    queued: float | None = None
    sent: float | None = None
    received: float | None = None
    status: str = DONE
    calls: int = 1
    bytes_sent: int = 0
    bytes_received: int = 0
    thread: str = ""
    cpu: float | None = None
    whole: bool = False
    note: str = ""
    number: int = 0
    needed: tuple[int, ...] = ()
    item: int | None = None

    @property
    def seconds(self) -> float:
        """The seconds that the span ran, or has been running; 0 if not begun."""
        return _between(self.started, self.finished)


@lru_cache(maxsize=1024)
def short_name(name: str) -> str:
    """Return the name of a function without the functions around it."""
    return name.rpartition("<locals>.")[2]


class Sums(NamedTuple):
    """The sums of many spans of one function on one drone: calls, seconds and bytes.

    Attributes
    ----------
    calls, failed
        Number of calls, and of those that failed.
    queued
        Seconds from the call to the sending.
    there
        Seconds from the sending to the start, behind other tasks of the drone, too.
    running
        Seconds from start to end.
    back
        Seconds from the end until the controller had the result.
    bytes_sent, bytes_received
        Bytes of arguments and results.
    """

    calls: int = 0
    failed: int = 0
    queued: float = 0.0
    there: float = 0.0
    running: float = 0.0
    back: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0

    def __add__(self, other: tuple[object, ...]) -> Sums:
        pairs = zip(self, other, strict=True)
        return Sums(*(one + two for one, two in pairs))  # type: ignore[operator, arg-type]


def sums_of(span: Span) -> Sums:
    return Sums(
        span.calls,
        span.calls if span.status in (ERROR, CANCELLED, TIMEOUT, DIED) else 0,
        _between(span.queued, span.sent) * span.calls,
        _between(span.sent, span.started) * span.calls,
        span.seconds,
        _between(span.finished, span.received) * span.calls,
        span.bytes_sent,
        span.bytes_received,
    )


def add_up(parts: Iterable[tuple[Key, Sums]]) -> dict[Key, Sums]:
    """Return the sum of the parts of each key, the keys in the order in which they come."""
    found: dict[Key, Sums] = {}
    for key, sums in parts:
        found[key] = sums + found.get(key, Sums())
    return found


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else max(0.0, end - start)
