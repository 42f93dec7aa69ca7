"""A timeline in a terminal: a chart by drone, a table of times by function, and the bottleneck."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

from .bottleneck import bottleneck_of
from .format import count, percent, seconds, shorten, size
from .rows import Row, rows
from .spans import Sums, add_up

if TYPE_CHECKING:
    from .contents import Contents

BLOCKS = " ▁▂▃▄▅▆▇█"
WAITING_MARK = "·"
MAX_SHOWN_THREADS = 26  # of one drone
MAX_SHOWN_FUNCTIONS = 12
MAX_NAME_COLUMNS = 28
MIN_COLUMNS = 60


def text(timeline: Contents, width: int | None = None) -> str:
    if not timeline:
        return "Timeline: nothing has run yet."
    width = max(MIN_COLUMNS, width or shutil.get_terminal_size((100, 24)).columns)
    head = f"Timeline: {', '.join(facts(timeline))}"
    chart, reason = _chart(timeline, width), textwrap.wrap(bottleneck_of(timeline), width)
    return "\n".join([head, "", *chart, "", *_table(timeline, width), "", *reason])


def facts(timeline: Contents) -> list[str]:
    """Return the length and the counts, and what the picture leaves out."""
    calls = sum(each.calls for each in timeline.sums().values())
    parts = [
        seconds(timeline.end - timeline.start),
        count(len(timeline.drones), "drone"),
        count(calls, "call"),
    ]
    if timeline.waiting:
        parts.append(f"{timeline.waiting:,} more in the queue")
    if timeline.spans_lost:
        parts.append(f"{count(timeline.spans_lost, 'earlier span')} not kept")
    if timeline.threads_lost:
        parts.append(f"{count(timeline.threads_lost, 'call')} of green threads not kept")
    return parts


# -- the chart -------------------------------------------------------------------------------------


def _chart(timeline: Contents, width: int) -> list[str]:
    all_rows, start = rows(timeline), timeline.start
    duration = max(timeline.end - start, 1e-9)
    name = min(MAX_NAME_COLUMNS, max(len(_row_title(row)) for row in all_rows))
    cells = width - name - 8
    step = duration / cells
    lines = [f"{'':{name}} {_scale(duration, cells)}"]
    for drone, group in groupby(all_rows, key=lambda row: row.drone):
        own = list(group)
        shown, hidden = own[: MAX_SHOWN_THREADS + 1], own[MAX_SHOWN_THREADS + 1 :]
        lines += [
            f"{shorten(_row_title(row), name):{name}} {_bar(row, start, step, cells)} "
            f"{percent(row.busy / duration):>5}"
            for row in shown
        ]
        if hidden:
            lines.append(
                f"{'':{name}} ... and {count(len(hidden), 'more green thread')} of {drone}"
            )
    key = (
        f"{BLOCKS[8]} running (its height: how much of the time)   "
        f"{WAITING_MARK} on its way, or parked"
    )
    return [*lines, shorten(" " * max(0, min(name + 1, width - len(key))) + key, width)]


def _bar(row: Row, start: float, step: float, cells: int) -> str:
    running, waiting = [0.0] * cells, [0.0] * cells

    def at(moment: float | None) -> float:
        return 0.0 if moment is None else (moment - start) / step

    for span in row.spans:
        _fill(running, at(span.started), at(span.finished))
        if span.sent is not None:
            _fill(waiting, at(span.sent), at(span.received or span.finished))
    for span in row.sent:
        _fill(waiting, at(span.sent), cells)
    for span in row.lives:
        _fill(waiting, at(span.started), at(span.finished))
    return "".join(_cell(*each) for each in zip(running, waiting, strict=True))


def _fill(cells: list[float], begin: float, end: float) -> None:
    """Add to each cell the share of it that lies between `begin` and `end`."""
    for index in range(max(0, int(begin)), min(len(cells), int(end) + 1)):
        cells[index] += min(end, index + 1) - max(begin, index)


def _cell(running: float, waiting: float) -> str:
    if running > 0.02:
        return BLOCKS[min(8, max(1, round(running * 8)))]
    return WAITING_MARK if running or waiting > 0.02 else " "


def _scale(duration: float, cells: int) -> str:
    marks = [0, cells // 2, cells]
    labels = ["0", seconds(duration / 2), seconds(duration)]
    line = labels[0].ljust(marks[1] - len(labels[1]) // 2) + labels[1]
    return line + labels[2].rjust(cells - len(line))


def _row_title(row: Row) -> str:
    return f"  {row.thread}" if row.thread else row.drone


# -- the table -------------------------------------------------------------------------------------


def table(timeline: Contents) -> list[Sequence[str]]:
    """Return the times by function, below a header line."""
    head = ("function", "calls", "running", "a call", "queued", "there", "back", "sent", "received")
    by_function = _by_function(timeline.sums())
    total = sum((sums for _, sums in by_function), Sums())
    lines = [_table_line(name, sums) for name, sums in by_function[:MAX_SHOWN_FUNCTIONS]]
    if len(by_function) > MAX_SHOWN_FUNCTIONS:
        rest = sum((sums for _, sums in by_function[MAX_SHOWN_FUNCTIONS:]), Sums())
        lines.append(_table_line(f"{len(by_function) - MAX_SHOWN_FUNCTIONS} more", rest))
    if len(by_function) > 1:
        lines.append(_table_line("together", total))
    for name, sums in _by_function(timeline.sums(threads=True))[:MAX_SHOWN_FUNCTIONS]:
        lines.append(_table_line(f"green: {name}", sums)[:4])  # nothing is sent
    return [head, *lines]


def _table(timeline: Contents, width: int) -> list[str]:
    lines = table(timeline)
    name, *widths = (2 + max(map(len, column)) for column in zip_longest(*lines, fillvalue=""))
    while width - sum(widths) < MIN_COLUMNS / 3:  # a narrow terminal has the first columns only
        widths.pop()
    name = min(name - 2, width - sum(widths))
    return [
        f"{shorten(first, name):{name}}"
        + "".join(f"{each:>{columns}}" for each, columns in zip(cells, widths, strict=False))
        for first, *cells in lines
    ]


def _by_function(sums: dict[tuple[str, str], Sums]) -> list[tuple[str, Sums]]:
    """Add up all drones. The function that ran longest comes first."""
    found = add_up((function, each) for (_, function), each in sums.items())
    return sorted(found.items(), key=lambda item: -item[1].running)


def _table_line(name: str, sums: Sums) -> Sequence[str]:
    calls = max(1, sums.calls)
    failed = f" ({sums.failed:,} failed)" if sums.failed else ""
    means = (each / calls for each in (sums.running, sums.queued, sums.there, sums.back))
    times = map(seconds, (sums.running, *means))
    sizes = map(size, (sums.bytes_sent, sums.bytes_received))
    return (f"{name}{failed}", f"{sums.calls:,}", *times, *sizes)
