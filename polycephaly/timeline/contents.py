"""The content of a `Timeline`, from which its texts and pictures are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Self

from .spans import Span, Sums, add_up, sums_of

if TYPE_CHECKING:
    from .entries import Entry

Key = tuple[str, str]


class Contents:
    """The spans, drones and sums of a `Timeline`."""

    def __init__(
        self, spans: Iterable[Span] = (), drones: Iterable[str] = (), *, waiting: int = 0
    ) -> None:
        self._others = list(spans)
        self._spans: list[Span] | None = None
        self._drones = dict.fromkeys(drones)
        self._entries: list[Entry] = []
        self._sums: dict[Key, Sums] | None = None
        self.waiting = waiting
        """Number of tasks that were in the queue, and sent to no drone yet."""
        self.cores: int | None = None
        """Number of cores of the machine that all drones were on; None if that is not known."""
        self.native_threads: int | None = None
        """How many threads the native libraries of a drone may use; 0 if they are left alone, None
        if that is not known.
        """
        self.spans_lost = 0
        """Number of earlier spans of tasks, of all drones of the pool, that are no longer kept."""
        self.threads_lost = 0
        """Number of calls of green threads that were too many to be kept."""

    def add_record(self, entries: Sequence[Entry], threads: Iterable[Span]) -> None:
        """Add the content of a trace buffer, before the first use of the timeline."""
        self._entries += entries
        self._others += threads

    # -- content -----------------------------------------------------------------------------------

    @property
    def spans(self) -> list[Span]:
        """All spans, tasks in the order of their answers, then those of green threads."""
        if self._spans is None:
            of_entries = (span for entry in self._entries for span in entry.spans())
            self._spans = [*of_entries, *self._others]
        return self._spans

    @property
    def drones(self) -> list[str]:
        """The names of all drones of the timeline, idle ones too."""
        return [*dict.fromkeys([*self._drones, *(span.drone for span in self.spans)])]

    @property
    def start(self) -> float:
        """The time (`time.monotonic`) of the first call; 0 if there is none."""
        firsts = (t for span in self.spans for t in (span.queued, span.started) if t is not None)
        return min(firsts, default=0.0)

    @property
    def end(self) -> float:
        """The time (`time.monotonic`) of the last event; 0 if there is none."""
        moments = ((span.received, span.finished, span.sent) for span in self.spans)
        return max((t for each in moments for t in each if t is not None), default=0.0)

    def sums(self, threads: bool = False) -> dict[Key, Sums]:
        """Return the totals by drone and function.

        Parameters
        ----------
        threads
            If true, return the totals of calls of green threads instead.

        Returns
        -------
        dict
            `Sums` by (drone, function).
        """
        if threads:
            return _sums(span for span in self.spans if span.thread and not span.whole)
        if self._sums is None:
            of_entries = (((each.drone, each.name), each.sums()) for each in self._entries)
            others = _sums(span for span in self._others if not span.thread)
            self._sums = add_up(chain(others.items(), of_entries))
        return self._sums

    def of_drone(self, name: str) -> Self:
        """Return the timeline of one drone alone."""
        alone = type(self)((span for span in self._others if span.drone == name), [name])
        alone._entries = [entry for entry in self._entries if entry.drone == name]
        alone.spans_lost, alone.cores = self.spans_lost, self.cores
        alone.native_threads = self.native_threads
        return alone

    def __add__(self, other: Self) -> Self:
        if not isinstance(other, Contents):
            return NotImplemented
        mine, its = self.drones, other.drones
        names: dict[str, str] = {}
        for name in its:
            number, new = 2, name
            while new in mine or new in names.values():
                new, number = f"{name} ({number})", number + 1
            names[name] = new
        both = type(self)(
            [*self._others, *(span._replace(drone=names[span.drone]) for span in other._others)],
            [*mine, *names.values()],
            waiting=self.waiting + other.waiting,
        )
        both._entries = [
            *self._entries,
            *(entry._replace(drone=names[entry.drone]) for entry in other._entries),
        ]
        if not (mine and its):  # else they may be of two machines
            both.cores = self.cores if mine else other.cores
        if self.native_threads == other.native_threads or not (mine and its):
            both.native_threads = (self if mine else other).native_threads
        both.spans_lost = self.spans_lost + other.spans_lost
        both.threads_lost = self.threads_lost + other.threads_lost
        return both

    def __bool__(self) -> bool:
        return bool(self.spans)


def _sums(spans: Iterable[Span]) -> dict[Key, Sums]:
    return add_up(((span.drone, span.name), sums_of(span)) for span in spans)
