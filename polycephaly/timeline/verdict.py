"""Find the bottleneck of a run, and describe it in one sentence.

    spans, sums ──> Figures: which drones were busy or waited ──> the first reason that holds

The questions are asked in the order of their certainty. If the drones were busy, the bottleneck is
the tasks, or that they wait. If one drone was busy, it is that drone. If none was, either the
drones had no tasks, or tasks did not reach them in time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from .rows import covered, rows
from .spans import Span, Sums
from .text import percent, printable, seconds, size

if TYPE_CHECKING:
    from .timeline import Timeline

__all__ = ["Figures", "verdict"]

BUSY = 0.8  # share of the time; start and end of any run take the rest
ALONE = 0.6  # share of the time that one call takes: the run cannot get much shorter than that
FEW = 4  # tasks for each drone: with fewer, uneven ones leave drones idle at the end
IDLE_CPU = 0.3  # share of the running time: a task that computes less is waiting for something
BULK = 64 * 1024  # bytes a call, from which on transport is the main cost


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures on which the sentence depends. Shares are of the whole time, from 0 to 1."""

    seconds: float
    drones: int
    calls: int
    pieces: int
    busy: dict[str, float]  # share, by drone
    functions: dict[str, str]  # by drone, the function that kept it busy longest
    longest: float  # share of the longest single task
    backlog: float  # share in which a task waited for a drone
    running: float  # seconds a call, where most of the time goes
    on_the_way: float
    bytes: float
    computing: float | None  # processor time as a share of the running time; None: not known
    busiest_computing: float | None  # the same of the busiest drone
    threads: int  # of the busiest drone: number of green threads that called something
    cores: int

    @property
    def utilisation(self) -> float:
        return sum(self.busy.values()) / max(1, self.drones)

    @property
    def busiest(self) -> str:
        return max(self.busy, key=lambda drone: self.busy[drone])


def figures(timeline: Timeline) -> Figures:
    task = [span for span in timeline.spans if not span.thread]
    start = min(
        (t for span in task for t in (span.queued, span.started) if t is not None), default=0.0
    )
    if timeline.folded:
        start = min(start, timeline.start)
    end = max(
        (t for span in task for t in (span.received, span.finished, span.sent) if t is not None),
        default=0.0,
    )
    whole = max(end - start, 1e-9)
    busy = {row.drone: row.busy for row in rows(timeline) if not row.thread}
    functions: dict[str, tuple[float, str]] = {}
    sums = timeline.sums()
    for (drone, function), of_function in sums.items():
        functions[drone] = max(functions.get(drone, (0.0, "")), (of_function.running, function))
    if timeline.folded:  # spans that are no longer kept were busy too
        for drone in busy:
            busy[drone] = sum(each.running for (of, _), each in sums.items() if of == drone)
    calls = sum(each.calls for each in sums.values())
    shares = {drone: min(1.0, each / whole) for drone, each in busy.items()}
    busiest = max(shares, key=lambda drone: shares[drone], default="")
    return Figures(
        whole,
        len(busy),
        calls,
        len(task) + timeline.folded,
        shares,
        {drone: function for drone, (_, function) in functions.items()},
        max((span.seconds for span in task), default=0.0) / whole,
        _backlog(task) / whole
        if not timeline.folded
        else _backlog(task) / max(1e-9, end - _first(task)),
        _typical(sums.values()),
        sum(each.there + each.back for each in sums.values()) / max(1, calls),
        sum(each.bytes_sent + each.bytes_received for each in sums.values()) / max(1, calls),
        _computing(task),
        _computing([span for span in task if span.drone == busiest]),
        len(
            {
                span.thread
                for span in timeline.spans
                if span.thread and span.drone == busiest and not span.whole
            }
        ),
        len(os.sched_getaffinity(0)),
    )


def verdict(timeline: Timeline) -> str:
    return sentence(figures(timeline))


def sentence(f: Figures) -> str:
    """Return the bottleneck that these figures show."""
    if not f.calls:
        return "No work has been done."
    used, function = percent(f.utilisation), printable(f.functions.get(f.busiest, ""))
    busiest = printable(f.busiest)
    if f.longest >= ALONE:
        return _of_one_call(f, function)
    if f.utilisation >= BUSY:
        who = f"{busiest} was" if f.drones == 1 else f"All {f.drones} drones were"
        busy = f"{who} busy {used} of the time, mostly with {function}"
        if f.computing is not None and f.computing < IDLE_CPU:
            return (
                f"{busy}, but computed in {percent(f.computing)} of that: it waits; green threads (green.map) or more "
                "drones would overlap the waiting."
            )
        if f.drones < f.cores:
            return f"{busy}: more drones would help, as this machine has {f.cores} cores."
        if f.computing is None:
            return f"{busy}: the work itself is what takes the time."
        limit = "the one core is" if f.cores == 1 else f"the {f.cores} cores are"
        return f"{busy}, and computed in {percent(f.computing)} of that: {limit} the limit."
    if f.pieces < FEW * f.drones and f.drones > 1:
        return (
            f"{f.pieces} pieces of work are too few to keep {f.drones} drones busy ({used} of the time): "
            "smaller ones would share more evenly."
        )
    if f.backlog < 0.5:
        return (
            f"The queue was empty {percent(1 - f.backlog)} of the time, and the drones were busy in {used}: "
            "they waited for the program to give them more work."
        )
    if f.bytes >= BULK and f.on_the_way > f.running / 2:
        return (
            f"Transport: a call had {size(f.bytes)} to carry, and was on its way for {seconds(f.on_the_way)}, to run "
            f"for {seconds(f.running)}: send less, or share it once (pool.share)."
        )
    if f.running < 0.001:
        return (
            f"The controller: calls of {seconds(f.running)} are too short for it to keep the drones busy "
            f"({used} of the time); pool.map sends many at once, larger ones cost it less."
        )
    share = percent(f.busy[f.busiest])
    return (
        f"The drones were busy {used} of the time; {busiest} most, {share}, mostly with {function}."
    )


def _of_one_call(f: Figures, function: str) -> str:
    """Describe a run in which one call takes most of the time.

    The run cannot get shorter than that call.
    """
    busiest = printable(f.busiest)
    name = f"The longest drone, {busiest}," if f.drones > 1 else busiest
    was = f"{name} was busy {percent(f.busy[f.busiest])} of the time with {function}"
    if f.busiest_computing is None or f.busiest_computing >= IDLE_CPU:
        return f"{was}: more drones will not help; split that."
    waits = f"{was}, and computed in {percent(f.busiest_computing)} of that: more drones will not help; split that, or"
    if f.threads:
        return f"{waits} let more than its {f.threads} green threads wait at once."
    return f"{waits} overlap its waiting by green threads (green.map)."


def _backlog(task: list[Span]) -> float:
    """Return the seconds in which a task was queued and not begun."""
    waits = sorted(
        (span.queued, inf if span.started is None else span.started)
        for span in task
        if span.queued is not None
    )
    end = max((span.finished for span in task if span.finished is not None), default=0.0)
    return covered((start, min(begun, max(start, end))) for start, begun in waits)


def _typical(sums: Iterable[Sums]) -> float:
    """Return the seconds a call, weighted by the share of time that such calls take."""
    each = [
        (of_function.running, of_function.running / max(1, of_function.calls))
        for of_function in sums
    ]
    return sum(running * mean for running, mean in each) / max(
        1e-9, sum(running for running, _ in each)
    )


def _first(task: list[Span]) -> float:
    return min((span.queued for span in task if span.queued is not None), default=0.0)


def _computing(task: list[Span]) -> float | None:
    """Return the share of computing; None unless most of the running time was measured."""
    measured, running = (
        [span for span in task if span.cpu is not None],
        sum(span.seconds for span in task),
    )
    of_measured = sum(span.seconds for span in measured)
    if not of_measured or of_measured < running / 2:
        return None
    return sum(span.cpu or 0.0 for span in measured) / of_measured
