"""The event log of green threads: their lives and calls, for timelines.

    ends of green threads ──────────┐
    foreign calls, items of map ────┴──> events ──in a controller──> green.timeline()
                                           └──in a drone──> sent with next results ──> TraceBuffer

Logging must cost nothing if threads are many or quick: events shorter than `MIN_EVENT_SECONDS` are
left out, and so are the lives of threads that were spawned beside `MAX_LIVES_LOGGED` others. Of
arguments, only short strings and numbers are kept.

The log is sent as JSON, which is plain data whatever its sender. Names are sent once, times as
whole microseconds.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..runtime.clock import monotonic
from .spans import DONE, ERROR, RUNNING, Span, short_name

MAX_KEPT_EVENTS = 4000
MAX_LIVES_LOGGED = 256
MIN_EVENT_SECONDS = 50e-6
MAX_NOTE_CHARACTERS = 40
MAX_EVENTS_SENT = 750
"""Events that are sent at once: with these, a message mostly fits in a packet."""


class EventLog:
    """The log of a process. Any thread may add events; one thread at a time may take them."""

    def __init__(self) -> None:
        self.events: deque[Span] = deque(maxlen=MAX_KEPT_EVENTS)
        self.lost = 0  # events that were too many, about: two threads may count at once
        self._numbers = itertools.count(1)

    # -- green threads add -------------------------------------------------------------------------

    def add_life(self, thread: Any, since: float, failed: bool) -> None:
        """Log the end of a green thread that was spawned at `since`."""
        status = ERROR if failed else DONE
        self._add(self.span(thread, _thread_name(thread), since, status, whole=True))

    def add_call(
        self,
        thread: Any,
        fn: Any,
        args: tuple[Any, ...],
        started: float,
        failed: bool = False,
        cpu: float | None = None,
    ) -> None:
        """Log that a green thread has called `fn`, from `started` until now."""
        if monotonic() - started >= MIN_EVENT_SECONDS:
            note = _format_argument(args[0]) if len(args) == 1 else ""
            status = ERROR if failed else DONE
            self._add(self.span(thread, _function_name(fn), started, status, cpu=cpu, note=note))

    def span(self, thread: Any, name: str, started: float, status: str, **details: Any) -> Span:
        """Return the span of an event that ends now. The drone is added when the log is read."""
        label = f"{_thread_name(thread)} #{self.number_of(thread)}"
        return Span(name, "", started, monotonic(), status=status, thread=label, **details)

    def unfinished_lives(self, threads: Iterable[Any]) -> list[Span]:
        """Return the lives of green threads that have not ended."""
        return [
            self.span(each, _thread_name(each), each.spawned_at, RUNNING, whole=True)
            for each in threads
            if each.spawned_at is not None
        ]

    def number_of(self, thread: Any) -> int:
        """Return the number that distinguishes a green thread from others of the same name."""
        if not thread.log_number:
            thread.log_number = next(self._numbers)
        number: int = thread.log_number
        return number

    def _add(self, event: Span) -> None:
        if len(self.events) >= MAX_KEPT_EVENTS:
            self.lost += 1
        self.events.append(event)

    # -- a drone takes and sends -------------------------------------------------------------------

    def pop_packed(self) -> bytes:
        """Return a part of the log to be sent to the controller; empty if there is none."""
        if not self.events:
            return b""
        events = [self.events.popleft() for _ in range(min(MAX_EVENTS_SENT, len(self.events)))]
        lost, self.lost = self.lost, 0
        names: dict[str, int] = {}
        rows = [
            (
                names.setdefault(each.thread, len(names)),
                names.setdefault(each.name, len(names)),
                round((each.started or 0.0) * 1e6),
                round(each.seconds * 1e6),
                -1 if each.cpu is None else round(each.cpu * 1e6),
                each.whole + 2 * (each.status == ERROR),
                each.note,
            )
            for each in events
        ]
        content = {"names": [*names], "events": rows, "lost": lost}
        return json.dumps(content, separators=(",", ":")).encode()


def unpack_events(data: bytes, drone: str, clock_offset: float = 0.0) -> tuple[list[Span], int]:
    """Read the data that `pop_packed` returned in `drone`, whose clock is `clock_offset` seconds
    ahead.

    Returns the events, and the number of lost events. Raises `ValueError`.
    """
    try:
        content = json.loads(data)
        names = [str(name) for name in content["names"]]
        shift = int(clock_offset * 1e6)
        events = [
            Span(
                names[name], drone, _seconds(started - shift), _seconds(started - shift + took),
                status=ERROR if flags & 2 else DONE, thread=names[thread],
                cpu=_seconds(cpu) if cpu >= 0 else None, whole=bool(flags & 1),
                note=str(note)[:MAX_NOTE_CHARACTERS],
            )
            for thread, name, started, took, cpu, flags, note in content["events"]
        ]  # fmt: skip
        return events, int(content["lost"])
    except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(
            f"malformed event log of green threads: {type(error).__name__}: {error}"
        ) from error


def _seconds(microseconds: Any) -> float:
    """Convert a time in the past, or a duration."""
    seconds = int(microseconds) / 1e6
    if not 0.0 <= seconds <= monotonic() + 1.0:
        raise ValueError(f"a time of {seconds} s is out of range")
    return seconds


# Users choose names. Reading them must never fail, because a caller waits for the result.


def _thread_name(thread: Any) -> str:
    name = thread.name
    return short_name(name) if type(name) is str else type(name).__qualname__


def _function_name(fn: Any) -> str:
    while type(fn) is partial:
        fn = fn.func
    try:
        name = fn.__qualname__
    except Exception:
        name = None
    return short_name(name) if type(name) is str else type(fn).__qualname__


def _format_argument(arg: Any) -> str:
    if type(arg) is int:
        # Python refuses to convert integers of thousands of digits.
        return str(arg)[:MAX_NOTE_CHARACTERS] if arg.bit_length() <= 256 else ""
    if type(arg) is float or (type(arg) is str and len(arg) <= MAX_NOTE_CHARACTERS):
        return repr(arg)[:MAX_NOTE_CHARACTERS]
    return ""


event_log = EventLog()
os.register_at_fork(after_in_child=event_log.__init__)  # type: ignore[misc]
