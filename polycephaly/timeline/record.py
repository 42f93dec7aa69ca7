"""A crew's record of what was done: an entry for each batch of answers, in the hub's turns.

    hearing ──add──> chapter ──full──> chapters, at most `CHAPTERS` ──the oldest──> sums
                                         │
              any thread ──spans()───────┘

It has to cost next to nothing, as thousands of answers come in one batch: their times are kept as two arrays, and taken
apart when somebody looks. Neither works nor results are kept. What falls out at the end is added up by drone
and function, so that tables stay true however much was done.

Who looks sees one attribute, `_state`, which is replaced as a whole; a chapter is only appended to: so no lock.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from ..wire.messages import CALL_SLICE
from .spans import CANCELLED, DIED, DONE, ERROR, TIMEOUT, Span, Sums, sums_of

if TYPE_CHECKING:
    from ..work import Work
from .trail import read, spans_of

__all__ = ["KEPT", "Entry", "Folded", "Record"]

KEPT = 100_000
"""Spans, about: what is kept of a crew for its picture. Some 5 MB at most."""
CHAPTERS = 20
_CHAPTER = KEPT // CHAPTERS
_ALONE = 3  # spans, as which an entry counts beside those it has: what it takes by itself
THREADS_KEPT = 20_000


class Folded(NamedTuple):
    """What is not kept one by one, of how many spans, from when to when."""

    sums: Mapping[tuple[str, str], Sums] = {}
    spans: int = 0
    start: float = 0.0
    end: float = 0.0


class Entry(NamedTuple):
    """Answers that came together. What was queued and sent first and last stands for what lies between."""

    drone: str
    names: str | list[str]
    status: str
    calls: int  # of each
    queued: tuple[float, float]
    sent: tuple[float, float]
    started: Sequence[float]
    finished: Sequence[float]
    received: float
    bytes_sent: int
    bytes_received: int
    cpu: float | None = None

    def spans(self) -> Iterator[Span]:
        count = len(self.started)
        one_by_one = zip(
            _steps(*self.queued, count), _steps(*self.sent, count), self.started, self.finished, strict=True
        )
        for index, (queued, sent, started, finished) in enumerate(one_by_one):
            yield Span(
                self.names if isinstance(self.names, str) else self.names[index],
                self.drone,
                started,
                finished,
                queued,
                min(sent, started),
                self.received,
                self.status,
                self.calls,
                self.bytes_sent // count,
                self.bytes_received // count,
                cpu=self.cpu,
            )

    def sums(self) -> Sums:
        """Of all of it; times are per piece of work, but `running`, which is theirs together."""
        count = len(self.started)
        began, ended = sum(self.started), sum(self.finished)
        sent = sum(self.sent) / 2 * count
        return Sums(
            count * self.calls,
            0 if self.status == DONE else count * self.calls,
            max(0.0, sent - sum(self.queued) / 2 * count) * self.calls,
            max(0.0, began - sent) * self.calls,
            ended - began,
            max(0.0, self.received * count - ended) * self.calls,
            self.bytes_sent,
            self.bytes_received,
        )


class Record:
    """Added to in the hub's turns; any thread may look."""

    def __init__(self) -> None:
        self._chapter: list[Entry] = []
        self._size = 0
        self._state: tuple[Folded, tuple[list[Entry], ...]] = Folded(), (self._chapter,)
        self._until: dict[str, float] = {}  # up to when slices of a drone have been noted
        self.threads: deque[Span] = deque(maxlen=THREADS_KEPT)
        self.threads_lost = 0
        self._cpu: dict[int, float] = {}  # seconds of processor time of works that are answered next, by number

    # -- in turns -----------------------------------------------------------------------------------

    def many(
        self,
        drone: str,
        works: Sequence[Work | None],
        started: list[float],
        finished: list[float],
        received: float,
        size: int,
        alike: bool,
    ) -> None:
        """Works that were answered together, with values of `size` bytes; `alike`: all are calls of one definition."""
        if not all(works):  # some were lost, and answered all the same
            known = [each for each in zip(works, started, finished, strict=True) if each[0] is not None]
            if not known:
                return
            works, started, finished = map(list, zip(*known, strict=True))
        first: Any = works[0]
        last: Any = works[-1]
        names: str | list[str] = first.definition.label
        if not alike:
            names = [work.definition.label for work in works]  # type: ignore[union-attr]
        queued, sent = (first.queued, last.queued), (first.sending.at, last.sending.at)
        there = first.weight * len(works)
        times = array("d", started), array("d", finished)
        self._add(Entry(drone, names, DONE, 1, queued, sent, *times, received, there, size))

    def one(
        self,
        drone: str,
        work: Work,
        failed: bool,
        started: float,
        finished: float,
        received: float,
        size: int,
        calls: int,
    ) -> None:
        """A work that was answered by itself, with `size` bytes, by so many calls."""
        if work.kind == CALL_SLICE:  # when it was cut, it tells the same start in each part
            started = max(started, self._until.get(drone, 0.0))
            self._until[drone] = finished
        status = _how_it_failed(work) if failed else DONE
        there = len(work.payload) if work.args is None else work.weight
        self._add_one(drone, work, status, calls, (started, finished, received), there, size)

    def lost(self, drone: str, works: Iterable[Work]) -> None:
        """What a drone was running as it died. Since when nobody knows: since what it had done before, at most."""
        before, now = self.last_finished(drone), monotonic()
        for work in works:
            status = _how_it_failed(work) if work.done() else DIED
            started = 0.0 if work.place else before
            self._add_one(drone, work, status, work.count, (started, now, now), 0, 0)

    def _add_one(
        self, drone: str, work: Work, status: str, calls: int, times: tuple[float, float, float], there: int, back: int
    ) -> None:
        sent: float = work.sending.at  # type: ignore[union-attr]  # it was in flight
        queued, (started, finished, received) = work.queued, times
        started = max(started, sent)
        self._add(
            Entry(
                drone,
                work.definition.label,
                status,
                calls,
                (queued, queued),
                (sent, sent),
                (started,),
                (finished,),
                received,
                there,
                back,
                self._cpu.pop(work.number, None),
            )
        )

    def _add(self, entry: Entry) -> None:
        self._chapter.append(entry)
        self._size += len(entry.started) + _ALONE
        if self._size >= _CHAPTER:
            self._turn_over()

    def _turn_over(self) -> None:
        folded, chapters = self._state
        if len(chapters) >= CHAPTERS:
            folded, chapters = _fold(folded, chapters[0]), chapters[1:]
        self._chapter, self._size = [], 0
        self._state = folded, (*chapters, self._chapter)

    def hear_trail(self, drone: str, sent: bytes) -> None:
        """What green threads of a drone did, and what its next answers cost. Raises `ValueError` where it is none."""
        events, self._cpu, lost = read(sent)
        self.threads_lost += lost + max(0, len(self.threads) + len(events) - THREADS_KEPT)
        self.threads.extend(spans_of(events, drone))

    # -- any thread ---------------------------------------------------------------------------------

    def look(self) -> tuple[Folded, list[Entry]]:
        """What there is at this moment."""
        folded, chapters = self._state
        return folded, [entry for chapter in chapters for entry in chapter[:]]

    def last_finished(self, drone: str) -> float:
        """When its last work that is known here had ended; 0.0 where there is none."""
        return max((entry.finished[-1] for entry in self._entries_of(drone)), default=0.0)

    def _entries_of(self, drone: str) -> Iterator[Entry]:
        return (entry for entry in self.look()[1] if entry.drone == drone)


def _fold(folded: Folded, chapter: list[Entry]) -> Folded:
    sums = dict(folded.sums)
    spans = folded.spans
    start, end = folded.start or chapter[0].queued[0], folded.end
    for entry in chapter:
        spans += len(entry.started)
        start, end = min(start, entry.queued[0]), max(end, entry.finished[-1])
        if isinstance(entry.names, str):
            key = entry.drone, entry.names
            sums[key] = entry.sums() + sums.get(key, Sums())
        else:
            for span in entry.spans():
                key = span.drone, span.name
                sums[key] = sums_of(span) + sums.get(key, Sums())
    return Folded(sums, spans, start, end)


def _how_it_failed(work: Work) -> str:
    if not work.done():
        return ERROR
    return CANCELLED if work.cancelled() else TIMEOUT


def _steps(first: float, last: float, count: int) -> Iterable[float]:
    if first == last or count == 1:
        return [first] * count
    step = (last - first) / (count - 1)
    return [first + step * index for index in range(count)]
