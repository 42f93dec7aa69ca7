"""What a timeline is made of: spans, and sums of those that are not kept one by one."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "CANCELLED",
    "DIED",
    "DONE",
    "ERROR",
    "RUNNING",
    "SENT",
    "TIMEOUT",
    "Span",
    "Sums",
    "short_name",
    "sums_of",
]

DONE, ERROR, CANCELLED, TIMEOUT, DIED = "done", "error", "cancelled", "timeout", "died"
RUNNING, SENT = "running", "sent"  # at the moment when the timeline was taken


class Span(NamedTuple):
    """One piece of work, or what a green thread did. Times are `time.monotonic` seconds, None where
    not reached.

    ``name`` is the function; ``drone`` the drone; ``thread`` the green thread in it, "" for the
    drone's own work. A drone's work is ``queued`` (the call, or when what that waited for was
    there), ``sent`` (by the controller), ``started`` and ``finished`` (on the drone) and
    ``received`` (by the controller); a green thread's call is started and finished. ``status`` is
    "done", "error", "cancelled", "timeout", "died", or, for what is still under way, "running" or
    "sent". ``calls`` is more than 1 for a slice of a `map`. ``cpu`` is the processor time in
    seconds that its process took meanwhile, None where it was not measured: what is short.
    ``whole`` marks a green thread's life, in which its calls lie. ``number`` tells a piece of work
    from all others of its process (0: many, or none), ``needed`` has the numbers of those whose
    values it took as promises."""

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

    @property
    def seconds(self) -> float:
        """How long it ran, or has been running; 0 for what has not begun."""
        return (
            0.0
            if self.started is None or self.finished is None
            else max(0.0, self.finished - self.started)
        )


def short_name(name: str) -> str:
    """Of a function within a function, its own name."""
    return name.rpartition("<locals>.")[2]


class Sums(NamedTuple):
    """Of many spans of one function on one drone: how many calls, and their times (seconds) and
    bytes added up.

    ``queued`` is from the call to the sending, ``there`` to the start (behind other work of that
    drone, too), ``running`` to the end, ``back`` until the controller had it."""

    calls: int = 0
    failed: int = 0
    queued: float = 0.0
    there: float = 0.0
    running: float = 0.0
    back: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0

    def __add__(self, other: tuple[object, ...]) -> Sums:
        return Sums(*(mine + its for mine, its in zip(self, other, strict=True)))  # type: ignore[operator, arg-type]


def sums_of(span: Span) -> Sums:
    queued, sent, started, finished, received = (
        span.queued,
        span.sent,
        span.started,
        span.finished,
        span.received,
    )
    return Sums(
        span.calls,
        span.calls if span.status in (ERROR, CANCELLED, TIMEOUT, DIED) else 0,
        _between(queued, sent) * span.calls,
        _between(sent, started) * span.calls,
        span.seconds,
        _between(finished, received) * span.calls,
        span.bytes_sent,
        span.bytes_received,
    )


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else max(0.0, end - start)
