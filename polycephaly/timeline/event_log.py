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
from time import monotonic
from typing import Any, NamedTuple

from .spans import DONE, ERROR, RUNNING, Span, short_name

MAX_KEPT_EVENTS = 4000
MAX_LIVES_LOGGED = 256
MIN_EVENT_SECONDS = 50e-6
MAX_NOTE_CHARACTERS = 40
MAX_EVENTS_SENT = 1000
"""Events that are sent at once: with these, a message still fits the fast transport."""


class LoggedEvent(NamedTuple):
    """A call, or the life, of a green thread.

    `cpu` is in seconds of processor time, negative if not known. `life` is true if the event covers
    the thread from its spawn to its end.
    """

    thread: int
    owner: str
    name: str
    started: float
    finished: float
    cpu: float = -1.0
    life: bool = False
    failed: bool = False
    note: str = ""


class EventLog:
    """The log of a process. Any thread may add events; one thread at a time may take them."""

    def __init__(self) -> None:
        self.events: deque[LoggedEvent] = deque(maxlen=MAX_KEPT_EVENTS)
        self.lost = 0  # events that were too many, about: two threads may count at once
        # Of a drone's tasks: number, microseconds of processor time.
        self.cpu_times: deque[tuple[int, int]] = deque()
        self._numbers = itertools.count(1)

    # -- green threads add -------------------------------------------------------------------------

    def add_life(self, thread: Any, since: float, failed: bool) -> None:
        """Log the end of a green thread that was spawned at `since`."""
        name = _thread_name(thread)
        self._add(
            LoggedEvent(self.number_of(thread), name, name, since, monotonic(), -1.0, True, failed)
        )

    def add_call(
        self,
        thread: Any,
        fn: Any,
        args: tuple[Any, ...],
        started: float,
        failed: bool = False,
        cpu: float = -1.0,
    ) -> None:
        """Log that a green thread has called `fn`, from `started` until now."""
        now = monotonic()
        if now - started < MIN_EVENT_SECONDS:
            return
        note = _format_argument(args[0]) if len(args) == 1 else ""
        self._add(
            LoggedEvent(
                self.number_of(thread),
                _thread_name(thread),
                _function_name(fn),
                started,
                now,
                cpu,
                False,
                failed,
                note,
            )
        )

    def number_of(self, thread: Any) -> int:
        """Return the number that distinguishes a green thread from others of the same name."""
        if not thread._number:
            thread._number = next(self._numbers)
        number: int = thread._number
        return number

    def _add(self, event: LoggedEvent) -> None:
        if len(self.events) >= MAX_KEPT_EVENTS:
            self.lost += 1
        self.events.append(event)

    # -- a drone takes and sends -------------------------------------------------------------------

    def pop_packed(self) -> bytes:
        """Return a part of the log to be sent to the controller; empty if there is none."""
        if not self.events and not self.cpu_times:
            return b""
        cpu_times = [self.cpu_times.popleft() for _ in range(len(self.cpu_times))]
        events = [self.events.popleft() for _ in range(min(MAX_EVENTS_SENT, len(self.events)))]
        lost, self.lost = self.lost, 0
        names: dict[str, int] = {}
        rows = [
            (
                each.thread,
                names.setdefault(each.owner, len(names)),
                names.setdefault(each.name, len(names)),
                round(each.started * 1e6),
                round((each.finished - each.started) * 1e6),
                round(each.cpu * 1e6) if each.cpu >= 0 else -1,
                each.life + 2 * each.failed,
                each.note,
            )
            for each in events
        ]
        content = {"names": [*names], "events": rows, "work": cpu_times, "lost": lost}
        return json.dumps(content, separators=(",", ":")).encode()

    def clear(self) -> None:
        """In a forked child: clear the log."""
        self.__init__()  # type: ignore[misc]


def unpack_events(
    data: bytes, clock_offset: float = 0.0
) -> tuple[list[LoggedEvent], dict[int, float], int]:
    """Read the data that `pop_packed` returned, from a clock `clock_offset` seconds ahead.

    Returns the events, the processor time by task, and the number of lost events. Raises
    `ValueError`.
    """
    try:
        content = json.loads(data)
        names = [str(name) for name in content["names"]]
        shift = int(clock_offset * 1e6)
        events = [
            LoggedEvent(
                int(thread), names[owner], names[name],
                _seconds(started - shift), _seconds(started - shift + took),
                _seconds(cpu) if cpu >= 0 else -1.0, bool(flags & 1), bool(flags & 2),
                str(note)[:MAX_NOTE_CHARACTERS],
            )
            for thread, owner, name, started, took, cpu, flags, note in content["events"]
        ]  # fmt: skip
        return (
            events,
            {int(number): _seconds(cpu) for number, cpu in content["work"]},
            int(content["lost"]),
        )
    except (
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise ValueError(
            f"malformed event log of green threads: {type(error).__name__}: {error}"
        ) from error


def _seconds(microseconds: Any) -> float:
    """Convert a time in the past, or a duration."""
    seconds = int(microseconds) / 1e6
    if not 0.0 <= seconds <= monotonic() + 1.0:
        raise ValueError(f"a time of {seconds} s is out of range")
    return seconds


def spans_of(events: Iterable[LoggedEvent], drone: str) -> list[Span]:
    """Return events as spans of a drone.

    A number distinguishes threads of one name; the first to begin has 1.
    """
    return [
        Span(
            each.name,
            drone,
            each.started,
            each.finished,
            status=ERROR if each.failed else DONE,
            thread=f"{each.owner} #{each.thread}",
            cpu=each.cpu if each.cpu >= 0 else None,
            whole=each.life,
            note=each.note,
        )
        for each in events
    ]


def unfinished_lives(event_log: EventLog, threads: Iterable[Any], drone: str) -> list[Span]:
    """Return the lives of green threads that have not ended."""
    now = monotonic()
    lives = [
        LoggedEvent(event_log.number_of(thread), name, name, thread._spawned_at, now, life=True)
        for thread, name in [(thread, _thread_name(thread)) for thread in threads]
        if thread._spawned_at is not None
    ]
    return [span._replace(status=RUNNING) for span in spans_of(lives, drone)]


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
    return (
        repr(arg)[:MAX_NOTE_CHARACTERS]
        if type(arg) is float or (type(arg) is str and len(arg) <= MAX_NOTE_CHARACTERS)
        else ""
    )


event_log = EventLog()
os.register_at_fork(after_in_child=event_log.clear)
