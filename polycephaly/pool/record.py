"""A dispatcher's trace buffer: one entry for each batch of answers.

    handlers ──add──> entries, of `tuning.trace_spans` spans at most ──oldest──> `spans_lost`
                         │
              any thread ┴── since(cursor)

Recording must cost next to nothing, because hundreds of answers come in one batch. So calls that
are too short to be seen in a picture share one span, and neither tasks nor results are kept.

No lock is needed: a reader copies a whole deque, which is one step.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from operator import attrgetter
from time import time
from typing import Any, TypeVar

from ..runtime.clock import monotonic
from ..runtime.tuning import tuning
from ..timeline.entries import Entry
from ..timeline.event_log import unpack_events
from ..timeline.spans import CANCELLED, DIED, DONE, ERROR, TIMEOUT, Span, short_name
from ..wire.messages import ERROR as FAILED
from ..wire.messages import VALUE
from .task import Answer, Task

_definition, _status, _answer = map(attrgetter, ("definition", "status", "answer"))

MIN_OWN_SPAN_SECONDS = 100e-6  # shorter calls share one span
MAX_KEPT_THREAD_SPANS = 10_000
MAX_KEPT_CPU_TIMES = 1000
MAX_KEPT_FAILURES = 20


Cursor = tuple[int, int]
"""The numbers of the last entry and of the last span of a green thread that a reader of a
`TraceBuffer` has got.
"""

T = TypeVar("T")


class TraceBuffer:
    """The recorded entries of a dispatcher.

    Entries are added while holding the reactor's lock; any thread may read.
    """

    def __init__(self) -> None:
        self.entries: deque[tuple[int, Entry]] = deque()  # numbered from 1 on
        self._entry_numbers = itertools.count(1)
        self._size = 0  # spans in `entries`
        self.spans_lost = 0  # that were in earlier entries
        self.threads: deque[tuple[int, Span]] = deque(maxlen=MAX_KEPT_THREAD_SPANS)
        self._thread_numbers = itertools.count(1)
        self.threads_lost = 0
        self.last_finished: dict[str, float] = {}  # the end of each drone's latest recorded task
        self.drones: dict[str, None] = {}  # the names of all drones so far
        self.failed = 0  # calls that ended with an error, or with their drone
        # The last tasks that failed, for `Pool.status`.
        self.failures: deque[dict[str, Any]] = deque(maxlen=MAX_KEPT_FAILURES)
        # Seconds of processor time of tasks that are about to be answered, by number.
        self._cpu: dict[int, float] = {}

    # -- holding the reactor's lock ----------------------------------------------------------------

    def add_batch(
        self,
        drone: str,
        tasks: Sequence[Task],
        started: Sequence[float],
        finished: Sequence[float],
        running: float,
        received: float,
        size: int,
    ) -> None:
        """Record calls of one function that were answered together, with values of `size` bytes.

        Short ones share one span.
        """
        count = len(tasks)
        first = tasks[0]
        calls, cpu = 1, None
        links: Sequence[tuple[int, tuple[int, ...], int | None]] = ()
        if count == 1:
            cpu = self._cpu.pop(first.number, None) if self._cpu else None
            links = ((first.call_number, first.input_numbers, first.first_item),)
        elif running < MIN_OWN_SPAN_SECONDS * count:
            started, finished, calls = started[:1], finished[-1:], count
        else:
            links = [(task.call_number, task.input_numbers, task.first_item) for task in tasks]
        bytes_sent = first.weight * count + first.definition_bytes
        entry = Entry(
            drone, short_name(first.definition.label), DONE, calls, *_times(first, tasks[-1]),
            started, finished, running, received, bytes_sent, size, cpu, links,
        )  # fmt: skip
        self._add(entry)

    def add_answers(self, drone: str, tasks: list[Task]) -> None:
        """Record tasks that were answered one by one, in one message.

        Short calls of one function in a row share one span.
        """
        if len(tasks) == 1:
            [task] = tasks
            self.add_answer(drone, task, _answer(task), task.count)
            return
        for _, group in itertools.groupby(tasks, _definition):
            run = list(group)
            if len(run) > 1 and set(map(_status, run)) == {VALUE}:
                answers = list(map(_answer, run))
                started, finished, _, bytes_sent, bytes_received = map(
                    sum, zip(*answers, strict=True)
                )
                if finished - started < MIN_OWN_SPAN_SECONDS * len(run):
                    entry = Entry(
                        drone, short_name(run[0].definition.label), DONE, len(run),
                        *_times(run[0], run[-1]), (answers[0].started,), (answers[-1].finished,),
                        finished - started, answers[-1].received, bytes_sent, bytes_received,
                    )  # fmt: skip
                    self._add(entry)
                    continue
            for task in run:
                self.add_answer(drone, task, _answer(task), task.count)

    def add_answer(
        self,
        drone: str,
        task: Task,
        answer: Answer,
        calls: int,
        status: str = "",
        item: int | None = None,
    ) -> None:
        """Record the answer of a task, or of so many `calls` of a chunk, from that of `item` on."""
        sent: float = task.sending.at  # type: ignore[union-attr]  # it was in flight
        started, finished, received, bytes_sent, bytes_received = answer
        if sent > started:
            started = sent
        status = status or (DONE if task.status != FAILED else _failure_status(task))
        cpu = self._cpu.pop(task.number, None) if self._cpu else None
        queued, running = task.queued, finished - started
        entry = Entry(
            drone, short_name(task.definition.label), status, calls, (queued, queued), (sent, sent),
            (started,), (finished,), running if running > 0 else 0.0, received, bytes_sent,
            bytes_received, cpu,
            ((task.first_number or task.number, task.input_numbers,
                task.first_item if item is None else item),),
        )  # fmt: skip
        self._add(entry)

    def add_lost(self, drone: str, tasks: Iterable[Task]) -> None:
        """Record the tasks that a drone was running when it died.

        Their start is not known. The end of the drone's last recorded task is the earliest
        possible, and is used.
        """
        now = monotonic()
        before = min(now, self.last_finished.get(drone, 0.0))
        for task in tasks:
            status = _failure_status(task) if task.promise.done() or task.timed_out else DIED
            started = 0.0 if task.definition.overlaps else before
            self.add_answer(drone, task, Answer(started, now, now), task.count, status)

    def _add(self, entry: Entry) -> None:
        self.entries.append((next(self._entry_numbers), entry))
        self.last_finished[entry.drone] = entry.finished[-1]
        spans = len(entry.started)
        self._size += spans
        if entry.status not in (DONE, CANCELLED):
            self.failed += entry.calls * spans
        while self._size > tuning.trace_spans:
            _, oldest = self.entries.popleft()
            lost = len(oldest.started)
            self._size -= lost
            self.spans_lost += lost

    def add_events(
        self, drone: str, data: bytes, clock_offset: float, with_notes: bool = True
    ) -> None:
        """Record the events of a drone's green threads.

        The drone's clock is `clock_offset` seconds ahead. Without `with_notes`, nothing is kept of
        items and arguments. Raises `ValueError` if `data` is malformed.
        """
        events, lost = unpack_events(data, drone, clock_offset)
        if not with_notes:
            events = [each._replace(note="") for each in events]
        self.threads_lost += lost + max(0, len(self.threads) + len(events) - MAX_KEPT_THREAD_SPANS)
        self.threads.extend(zip(self._thread_numbers, events, strict=False))

    def note_processor_time(self, number: int, seconds: float) -> None:
        """Note the processor time of a task that is about to be answered."""
        if len(self._cpu) > MAX_KEPT_CPU_TIMES:  # of tasks that were never answered
            self._cpu.clear()
        if 0.0 <= seconds < inf:
            self._cpu[number] = seconds

    # -- any thread --------------------------------------------------------------------------------

    def add_failure(self, task: str, item: int | None, drone: str | None, error: str) -> None:
        self.failures.append(
            {"at": time(), "task": task, "item": item, "drone": drone, "error": error}
        )

    def since(self, cursor: Cursor) -> tuple[list[Entry], list[Span], Cursor]:
        """Return the entries, and the spans of green threads, added since `cursor`, and the cursor
        for the next call. Those that are not kept any more are left out.
        """
        entries, last_entry = _after(cursor[0], list(self.entries))
        threads, last_thread = _after(cursor[1], list(self.threads))
        return entries, threads, (last_entry, last_thread)


def _times(first: Any, last: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return when the first and the last of some tasks were queued, and when they were sent."""
    return (first.queued, last.queued), (first.sending.at, last.sending.at)


def _after(last: int, numbered: list[tuple[int, T]]) -> tuple[list[T], int]:
    """Return those with a number above `last`, and the largest number."""
    news = [each for number, each in numbered if number > last]
    return news, numbered[-1][0] if numbered else last


def _failure_status(task: Task) -> str:
    if not (task.promise.done() or task.timed_out):
        return ERROR
    return CANCELLED if task.promise.cancelled() else TIMEOUT
