"""A timeline as a picture: boxes and words with positions, from which an SVG is made.

    Timeline ──rows──> ┌ title, bottleneck ─────────┐ ──> svg.py
    bars ────────────> │ bars, if there are any     │
                       │ a row for each drone ...   │
                       └ legend ────────────────────┘

Units are pixels from the upper left corner. A colour is "ink", "soft", "line", "paper" or "alarm",
which light and dark pages define differently, or the colour of a function as #rrggbb.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import floor, log10
from typing import TYPE_CHECKING, NamedTuple

from .bottleneck import bottleneck_of
from .format import percent, seconds, shorten, size
from .rows import Row, rows
from .spans import DONE, RUNNING, Span, Sums, add_up
from .text import facts

if TYPE_CHECKING:
    from .contents import Contents

PALETTE = (
    "#4477aa", "#ee7733", "#228833", "#aa3377", "#ccbb44",
    "#33bbee", "#cc3311", "#009988", "#8866cc", "#997744",
)  # fmt: skip
OTHERS_COLOUR = "#99a0a8"
MAX_LEGEND_ENTRIES = 10

WIDTH = 1200.0
MARGIN = 24.0
DRONE_ROW_HEIGHT, THREAD_ROW_HEIGHT = 24.0, 14.0  # heights of rows
CHARACTER_WIDTH = 6.6  # approximate width of a character in the small size
WAITING_OPACITY = 0.45  # opacity of waiting time
UNMEASURED_OPACITY = 0.75  # opacity if the processor time is not known


XOf = Callable[[float | None], float]
"""From a moment to its position."""


class Bar(NamedTuple):
    """A bar of a bar chart; `value` is in seconds."""

    label: str
    value: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    colour: str
    opacity: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True)
class TextLabel:
    """Text. `anchor` says if `x` is the "start", "middle" or "end"; `y` is the base line."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "start"
    colour: str = "ink"
    bold: bool = False


@dataclass(slots=True)
class Drawing:
    width: float = WIDTH
    height: float = MARGIN
    parts: list[Box | TextLabel] = field(default_factory=list)

    def add(self, *parts: Box | TextLabel) -> None:
        self.parts += parts


def colours(timeline: Contents) -> dict[str, str]:
    """Return a colour for each function, in the order in which they came, as a live page has it."""
    names = dict.fromkeys(
        span.name for span in timeline.spans if not span.whole and span.started is not None
    )
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}


def draw(timeline: Contents, title: str, bars: Sequence[Bar] = ()) -> Drawing:
    drawing = Drawing()
    drawing.height += 18
    drawing.add(TextLabel(MARGIN, drawing.height, title, 20, bold=True))
    drawing.height += 14
    if bars:
        draw_bars(drawing, bars)
        drawing.height += 16
    drawing.height += 8
    drawing.add(TextLabel(MARGIN, drawing.height, ", ".join(facts(timeline)), 12, colour="soft"))
    for line in textwrap.wrap(bottleneck_of(timeline), 150):
        drawing.height += 18
        drawing.add(TextLabel(MARGIN, drawing.height, line, 13))
    drawing.height += 14
    _draw_rows(drawing, timeline)
    drawing.height += MARGIN
    return drawing


# -- bars ------------------------------------------------------------------------------------------


def draw_bars(drawing: Drawing, bars: Sequence[Bar]) -> None:
    left = MARGIN + CHARACTER_WIDTH * max(len(bar.label) for bar in bars) + 16
    largest = max(bar.value for bar in bars) or 1.0
    available = (
        drawing.width - left - MARGIN - CHARACTER_WIDTH * (12 + max(len(bar.note) for bar in bars))
    )
    for bar in bars:
        y, length = drawing.height, max(1.0, available * bar.value / largest)
        time = seconds(bar.value)
        drawing.add(
            TextLabel(left - 8, y + 14, bar.label, 12, "end"),
            Box(left, y + 3, length, 15, PALETTE[0], title=f"{bar.label}: {time}"),
            TextLabel(left + length + 6, y + 14, f"{time}  {bar.note}".rstrip(), 12, colour="soft"),
        )
        drawing.height += 21


# -- rows ------------------------------------------------------------------------------------------


def _draw_rows(drawing: Drawing, timeline: Contents) -> None:
    all_rows, start = rows(timeline), timeline.start
    duration = max(timeline.end - start, 1e-9)
    longest = max(
        (len(row.thread) + 2 if row.thread else len(row.drone) for row in all_rows), default=0
    )
    left = MARGIN + min(240.0, CHARACTER_WIDTH * longest + 14)
    right = drawing.width - MARGIN - 44
    palette = colours(timeline)

    def x_of(moment: float | None) -> float:
        return left + (0.0 if moment is None else (moment - start) / duration * (right - left))

    top = drawing.height + 18
    height = sum(_height(row) for row in all_rows)
    for tick in ticks(duration, 8):
        x = x_of(start + tick)
        drawing.add(TextLabel(x, top - 6, seconds(tick) if tick else "0", 11, "middle", "soft"))
        drawing.add(Box(x, top, 1, height, "line"))
    drawing.height = top
    for row in all_rows:
        y, row_height = drawing.height, _height(row)
        name = shorten(row.thread or row.drone, int((left - MARGIN - 12) / CHARACTER_WIDTH))
        if row.thread:
            drawing.add(TextLabel(left - 10, y + row_height - 4, name, 10, "end", "soft"))
        else:
            line, share = y + row_height / 2 + 4, percent(row.busy / duration)
            drawing.add(
                Box(MARGIN, y, right - MARGIN + 44, 1, "line"),
                TextLabel(left - 10, line, name, 12, "end", bold=True),
                TextLabel(drawing.width - MARGIN, line, share, 11, "end", "soft"),
            )
        drawing.add(*_boxes(row, y, row_height, x_of, palette))
        drawing.height += row_height
    drawing.height += 10
    _draw_legend(drawing, timeline, palette)


def _height(row: Row) -> float:
    if row.thread:
        return THREAD_ROW_HEIGHT
    return DRONE_ROW_HEIGHT if len(row.lanes) < 3 else min(96.0, 10.0 * len(row.lanes))


def _boxes(
    row: Row, y: float, row_height: float, x_of: XOf, palette: dict[str, str]
) -> Iterable[Box]:
    """Yield the boxes of a row. A span narrower than a pixel is merged with its neighbour."""
    available = row_height - 5 if not row.thread else row_height - 4
    for span in row.lives:
        x, end = x_of(span.started), x_of(span.finished)
        yield Box(x, y + row_height / 2 - 0.5, end - x, 1, "soft", 0.7)
    for lane, spans in enumerate(row.lanes):
        lane_height = available / len(row.lanes)
        at = y + 2.5 + lane * lane_height
        drawn = 0.0
        for span in spans:
            x, end = x_of(span.started), x_of(span.finished)
            if end < drawn + 0.3:
                continue
            if span.sent is not None and x - x_of(span.sent) > 1.5:
                before = max(drawn, x_of(span.sent))
                yield Box(before, at + lane_height / 2 - 1, max(0.0, x - before), 2, "soft", 0.6)
            x = max(x, drawn)
            yield from _bar(span, x, at, max(0.8, end - x), lane_height - 1, palette)
            drawn = max(end, x + 0.8)


def _bar(
    span: Span, x: float, y: float, width: float, row_height: float, palette: dict[str, str]
) -> Iterable[Box]:
    """Yield the boxes of a span: solid for the share of processor time, if known; pale above."""
    colour = palette.get(span.name, OTHERS_COLOUR)
    title = describe_span(span)
    yield Box(x, y, width, row_height, "paper")  # hides the lines below
    if span.cpu is None:
        yield Box(x, y, width, row_height, colour, UNMEASURED_OPACITY, title=title)
    else:
        solid = row_height * min(1.0, span.cpu / max(span.seconds, 1e-9))
        yield Box(x, y, width, row_height, colour, WAITING_OPACITY, title=title)
        yield Box(x, y + row_height - solid, width, solid, colour)
    if span.status not in (DONE, RUNNING):
        yield Box(x, y, width, 2, "alarm")


def describe_span(span: Span) -> str:
    """Return a line that describes a span."""
    call = f"{span.name}({span.note})" if span.note else span.name
    parts = [f"{call}: {seconds(span.seconds)}, {span.status}"]
    if span.calls > 1:
        parts.append(f"{span.calls:,} calls")
    if span.cpu is not None:
        parts.append(f"{seconds(span.cpu)} of processor time")
    if span.bytes_sent or span.bytes_received:
        parts.append(f"{size(span.bytes_sent)} there, {size(span.bytes_received)} back")
    return ", ".join(parts)


def _draw_legend(drawing: Drawing, timeline: Contents, palette: dict[str, str]) -> None:
    x, y = MARGIN, drawing.height + 16
    running = add_up(
        (name, sums)
        for threads in (False, True)
        for (_, name), sums in timeline.sums(threads=threads).items()
    )
    longest = sorted(palette, key=lambda name: -running.get(name, Sums()).running)
    longest = longest[:MAX_LEGEND_ENTRIES]
    shown = [(name, palette[name]) for name in longest]
    rest = len(palette) - len(shown)
    for name, colour in [*shown, *([(f"{rest} more", OTHERS_COLOUR)] if rest > 0 else [])]:
        name = shorten(name, 40)
        width = CHARACTER_WIDTH * len(name) + 34
        if x + width > drawing.width - MARGIN:
            x, y = MARGIN, y + 20
        drawing.add(Box(x, y - 10, 12, 12, colour), TextLabel(x + 18, y, name, 12))
        x += width
    y += 20
    key = (
        "Pale: waiting; solid: computing; between: not measured. A red edge: failed. "
        "A thin line: on its way, or parked."
    )
    drawing.add(TextLabel(MARGIN, y, key, 11, colour="soft"))
    drawing.height = y


def ticks(duration: float, max_count: int) -> list[float]:
    """Return round numbers from 0 to `duration`, about `max_count` of them."""
    rough = duration / max_count
    power = 10.0 ** floor(log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough * 0.999)
    return [index * step for index in range(int(duration / step + 1e-9) + 1)]
