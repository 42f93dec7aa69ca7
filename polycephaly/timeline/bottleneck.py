"""Find the bottleneck of a run, and describe it in one sentence.

    spans, sums ──> Figures: which drones were busy or waited ──> the first reason that holds

The questions are asked in the order of their certainty. If the drones were busy, the bottleneck is
the tasks, or that they wait. If one drone was busy, it is that drone. If none was, either the
drones had no tasks, or tasks did not reach them in time.
"""

from __future__ import annotations

from collections.abc import Iterable

from .contents import Contents
from .format import count, percent, printable, seconds, size
from .rows import covered, rows
from .spans import Span, Sums

BUSY_SHARE = 0.8  # share of the time; start and end of any run take the rest
SINGLE_CALL_SHARE = 0.6  # of the time, taken by one call: the run cannot get much shorter
MIN_TASKS_PER_DRONE = 4  # with fewer, uneven tasks leave drones idle at the end
MIN_CPU_SHARE = 0.3  # of the running time: a task that computes less is waiting for something
BULK_BYTES_PER_CALL = 64 * 1024  # from this size on, transport is the main cost


class Figures:
    """The figures of a run on which the sentence depends. Shares are of the whole time, 0 to 1."""

    def __init__(self, timeline: Contents) -> None:
        tasks = [span for span in timeline.spans if not span.thread]
        start, end = Contents(tasks).start, Contents(tasks).end
        busy = {row.drone: row.busy for row in rows(timeline) if not row.thread}
        sums = timeline.sums()
        self.seconds = max(end - start, 1e-9)
        self.cores = timeline.cores
        self.native_threads = timeline.native_threads
        self.drones = len(busy)
        self.tasks = len(tasks)
        # By drone, the share in which it was busy.
        self.busy = {drone: min(1.0, each / self.seconds) for drone, each in busy.items()}
        self.utilisation = sum(self.busy.values()) / max(1, self.drones)
        # The share of the longest single task, and that in which a task waited for a drone.
        self.longest = max((span.seconds for span in tasks), default=0.0) / self.seconds
        self.backlog = _backlog_share(tasks, end)

        # Of an average call. The running time is that of the calls where most of the time goes.
        calls = self.calls = sum(each.calls for each in sums.values())
        self.running = _typical_seconds(sums.values())
        self.transport = sum(each.there + each.back for each in sums.values()) / max(1, calls)
        moved = sum(each.bytes_sent + each.bytes_received for each in sums.values())
        self.bytes = moved / max(1, calls)

        # Of the busiest drone: the function that kept it busy longest, and the number of green
        # threads that called something.
        self.busiest = max(self.busy, key=lambda drone: self.busy[drone], default="")
        running = [(each.running, name) for (of, name), each in sums.items() if of == self.busiest]
        self.function = max(running, default=(0.0, ""))[1]
        spans = [span for span in timeline.spans if span.drone == self.busiest and not span.whole]
        self.threads = len({span.thread for span in spans if span.thread})

        # Processor time as a share of the running time; None: not known.
        self.computing = _computing_share(tasks)
        self.busiest_computing = _computing_share([span for span in spans if not span.thread])


def bottleneck_of(timeline: Contents) -> str:
    return sentence(Figures(timeline))


def sentence(f: Figures) -> str:
    """Return the bottleneck that these figures show."""
    if not f.calls:
        return "No tasks have run."
    used, function = percent(f.utilisation), printable(f.function)
    busiest = printable(f.busiest)
    if f.longest >= SINGLE_CALL_SHARE:
        return _describe_single_call(f, function)
    if f.utilisation >= BUSY_SHARE:
        return _describe_busy_drones(f, used, function)
    if f.tasks < MIN_TASKS_PER_DRONE * f.drones and f.drones > 1:
        return (
            f"{f.tasks} tasks are too few to keep {f.drones} drones busy ({used} of the time): "
            "smaller tasks would be shared more evenly."
        )
    if f.backlog < 0.5:
        pickling = ""
        if f.bytes >= BULK_BYTES_PER_CALL:
            pickling = (
                f", which pickled {size(f.bytes)} a call: send less data, or share the data once "
                "(pool.share)"
            )
        return (
            f"The queue was empty {percent(1 - f.backlog)} of the time, and the drones were busy "
            f"in {used}: they waited for the program to submit more tasks{pickling}."
        )
    if f.bytes >= BULK_BYTES_PER_CALL and f.transport > f.running / 2:
        return (
            f"Transport: a call moved {size(f.bytes)} in {seconds(f.transport)}, and ran for "
            f"{seconds(f.running)}: send less data, or share the data once (pool.share)."
        )
    if f.running < 0.001:
        return (
            f"The controller: calls of {seconds(f.running)} are too short for the controller to "
            f"keep the drones busy ({used} of the time): send many at once with pool.map, or make "
            "the calls larger."
        )
    share = percent(f.busy[f.busiest])
    return (
        f"The drones were busy {used} of the time; {busiest} most, {share}, mostly with {function}."
    )


def _describe_busy_drones(f: Figures, used: str, function: str) -> str:
    """Describe a run in which all drones were busy: what the calls do is the limit."""
    subject = f"{printable(f.busiest)} was" if f.drones == 1 else f"All {f.drones} drones were"
    busy = f"{subject} busy {used} of the time, mostly with {function}"
    if f.computing is not None and f.computing < MIN_CPU_SHARE:
        return (
            f"{busy}, but computed in {percent(f.computing)} of that: the calls wait most of the "
            "time; green threads (green.map) or more drones would overlap the waiting."
        )
    libraries = _describe_native_threads(f)
    if f.cores is not None and f.drones < f.cores:
        return f"{busy}: more drones would help, as their machine has {f.cores} cores{libraries}."
    if f.computing is None:
        return f"{busy}: the calls themselves take the time{libraries}."
    busy = f"{busy}, and computed in {percent(f.computing)} of that"
    if f.cores is None:
        return f"{busy}: the calls themselves take the time{libraries}."
    limit = "the one core is" if f.cores == 1 else f"the {f.cores} cores are"
    return f"{busy}: {limit} the limit{libraries}."


def _describe_native_threads(f: Figures) -> str:
    """Return how many cores one call may use by native libraries; empty if that is not limited."""
    if not f.native_threads:
        return ""
    return f" (native libraries: {count(f.native_threads, 'thread')} a drone)"


def _describe_single_call(f: Figures, function: str) -> str:
    """Describe a run in which one call takes most of the time.

    The run cannot get shorter than that call.
    """
    busiest = printable(f.busiest)
    name = f"The busiest drone, {busiest}," if f.drones > 1 else busiest
    was = f"{name} was busy {percent(f.busy[f.busiest])} of the time with {function}"
    if f.busiest_computing is None or f.busiest_computing >= MIN_CPU_SHARE:
        libraries = _describe_native_threads(f)
        return f"{was}: more drones will not help; split the call{libraries}."
    waits = (
        f"{was}, and computed in {percent(f.busiest_computing)} of that: more drones will not "
        "help; split the call, or"
    )
    if f.threads:
        return f"{waits} let more than its {f.threads} green threads wait at once."
    return f"{waits} overlap its waiting by green threads (green.map)."


def _backlog_share(tasks: list[Span], end: float) -> float:
    """Return the share of the time until `end` in which a task was queued and not begun."""
    waits = sorted(
        (span.queued, end if span.started is None else span.started)
        for span in tasks
        if span.queued is not None
    )
    return covered(waits) / max(end - waits[0][0], 1e-9) if waits else 0.0


def _typical_seconds(sums: Iterable[Sums]) -> float:
    """Return the seconds a call, weighted by the share of time that such calls take."""
    each = [(one.running, one.running / max(1, one.calls)) for one in sums]
    total = sum(running for running, _ in each)
    return sum(running * mean for running, mean in each) / max(1e-9, total)


def _computing_share(tasks: list[Span]) -> float | None:
    """Return the share of computing; None unless most of the running time was measured."""
    measured = [span for span in tasks if span.cpu is not None]
    running = sum(span.seconds for span in tasks)
    of_measured = sum(span.seconds for span in measured)
    if not of_measured or of_measured < running / 2:
        return None
    return sum(span.cpu or 0.0 for span in measured) / of_measured
