"""The content of a trace buffer: entries of answers that came together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .spans import DONE, Span, Sums


class Entry(NamedTuple):
    """Answers that came together.

    `queued` and `sent` hold the first and the last time; those between are interpolated.
    """

    drone: str
    name: str
    status: str
    calls: int  # of each span
    queued: tuple[float, float]
    sent: tuple[float, float]
    started: Sequence[float]
    finished: Sequence[float]
    running: float  # seconds, of all spans
    received: float
    bytes_sent: int
    bytes_received: int
    cpu: float | None = None
    tasks: Sequence[tuple[int, tuple[int, ...], int | None]] = ()
    """For each span, the number of its task, the numbers of the tasks whose values it needed, and
    the index of its first item, if it is of a `map`.

    Empty if several tasks share one span.
    """

    def spans(self) -> Iterator[Span]:
        count = len(self.started)
        one_by_one = zip(
            _interpolate(*self.queued, count),
            _interpolate(*self.sent, count),
            self.started,
            self.finished,
            strict=True,
        )
        tasks = iter(self.tasks)
        for queued, sent, started, finished in one_by_one:
            # All tasks sent while the lock was held once have one time, which may be before they
            # were queued.
            sent = min(self.received, max(queued, sent))
            # Times reported by the drone are limited by times known here.
            started = min(self.received, max(sent, started))
            finished = min(self.received, max(started, finished))
            number, needed, item = next(tasks, (0, (), None))
            yield Span(
                self.name, self.drone, started, finished, queued, sent, self.received, self.status,
                self.calls, self.bytes_sent // count, self.bytes_received // count,
                cpu=self.cpu, number=number, needed=needed, item=item,
            )  # fmt: skip

    def sums(self) -> Sums:
        count = len(self.started) * self.calls
        possible = self.received - self.sent[0]
        running = self.running if 0.0 <= self.running <= possible * len(self.started) else 0.0
        mean = running / max(1, count)
        if len(self.started) > 1:
            began = sum(self.started) / len(self.started)
        else:
            began = (self.started[0] + self.finished[0] - mean) / 2  # one after another
        queued, sent = sum(self.queued) / 2, sum(self.sent) / 2
        return Sums(
            count,
            0 if self.status == DONE else count,
            max(0.0, sent - queued) * count,
            max(0.0, began - sent) * count,
            running,
            max(0.0, self.received - began - mean) * count,
            self.bytes_sent,
            self.bytes_received,
        )


def _interpolate(first: float, last: float, count: int) -> list[float]:
    if first == last or count == 1:
        return [first] * count
    step = (last - first) / (count - 1)
    return [first + step * index for index in range(count)]
