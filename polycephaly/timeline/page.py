"""A timeline as a single page: `page.html`, `page.css`, `chart.js` and `page.js`, with JSON.

Names come from users. They are in the JSON, where every ``<`` is escaped, and the script shows them
as text. The live page (integrations/dashboard) adds more parts to a chart.

    rows     drone and green thread ("": the drone itself)
    names, notes  what the numbers in the columns of these names mean
    spans    a column for each of: row, name, status, calls, bytes sent (`there`), bytes received
             (`back`), note; queued, sent, started, finished, received, processor time
             (µs; null: unknown)
    running  the same, of tasks that still run: the next part replaces them
    lives    of green threads: row, from, to;  waits  row, and since when tasks are on their way
    arrows   pairs of spans of this part: the second took the value of the first
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from .bottleneck import bottleneck_of
from .picture import PALETTE, Bar, colours
from .spans import CANCELLED, DIED, DONE, ERROR, RUNNING, SENT, TIMEOUT
from .svg import bars_of
from .text import facts, table

if TYPE_CHECKING:
    from .contents import Contents

MAX_ARROWS = 50_000  # a page could not show more

_FILE_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n"
)
"""Of a page that is saved as a file. A server sends its policy as a header."""

STATUSES = (DONE, RUNNING, ERROR, CANCELLED, TIMEOUT, DIED, SENT)
COLUMNS = (
    "row", "name", "status", "calls", "there", "back", "note",
    "queued", "sent", "started", "finished", "received", "cpu", "item",
)  # fmt: skip


def page_of(timeline: Contents, title: str, bars: Sequence[Bar] = ()) -> bytes:
    return make_page(
        read_text(__package__, "page.html"),
        title=title,
        style=read_text(__package__, "page.css"),
        script=read_text(__package__, "chart.js", "page.js"),
        bars=bars_of(bars) if bars else "",
        data=data_of(contents(timeline)),
    )


def make_page(
    body: str, *, title: str, style: str, policy: str = _FILE_POLICY, **parts: str
) -> bytes:
    """Return a whole page: the head that all pages have, and `body` with its parts filled in."""
    title = escape(title)
    head = {"title": title, "style": style, "policy": policy}
    return _fill(read_text(__package__, "head.html"), head) + _fill(body, {"title": title} | parts)


def read_text(package: str, *names: str) -> str:
    """Return the texts of these files of a package, one after the other."""
    return "".join(files(package).joinpath(name).read_text("utf-8") for name in names)


def data_of(contents: Any) -> str:
    """Return JSON that can stand in a ``script`` element."""
    text = json.dumps(contents, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _fill(page: str, parts: Mapping[str, str]) -> bytes:
    """Return the page with each ``{{ name }}`` replaced by that part."""
    # In one pass, so inserted text is not searched.
    whole = re.sub(r"\{\{ (\w+) \}\}", lambda name: parts[name[1]], page)
    return whole.encode("utf-8", "replace")


def contents(timeline: Contents) -> dict[str, Any]:
    return {
        "part": part_of(timeline, timeline.start, colours(timeline)),
        "statuses": STATUSES,
        "palette": PALETTE,
        "facts": facts(timeline),
        "bottleneck": bottleneck_of(timeline),
        "length": round(max(timeline.end - timeline.start, 1e-9) * 1e6),
        "table": table(timeline),
    }


def part_of(timeline: Contents, start: float, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return the part of a chart for `timeline`, with times since `start`.

    Functions get their colours in the order of `names`, then in that of their first spans.
    """
    # Green threads stand below their drones in the order of their starts.
    threads = [each for each in timeline.spans if each.thread]
    threads.sort(key=lambda span: span.started or 0.0)
    rows = {(drone, ""): index for index, drone in enumerate(timeline.drones)}
    for span in threads:
        rows.setdefault((span.drone, span.thread), len(rows))
    numbers = {name: index for index, name in enumerate(names)}
    notes: dict[str, int] = {}
    places: dict[int, int] = {}  # index of a task's span, by its number
    needs: list[tuple[int, int]] = []
    spans: list[tuple[Any, ...]] = []
    running: list[tuple[Any, ...]] = []
    waits: dict[int, int] = {}
    lives = []

    def at(moment: float | None) -> int | None:
        return None if moment is None else round((moment - start) * 1e6)

    for span in timeline.spans:
        row = rows[span.drone, span.thread]
        if span.whole:
            lives.append((row, at(span.started), at(span.finished)))
            continue
        if span.started is None:
            waits[row] = min(at(span.sent) or 0, waits.get(row, sys.maxsize))
            continue
        if span.number:  # running ones have none
            places[span.number] = len(spans)
        needs += [(number, len(spans)) for number in dict.fromkeys(span.needed)]
        name = numbers.setdefault(span.name, len(numbers))
        note = notes.setdefault(span.note, len(notes))
        times = map(at, (span.queued, span.sent, span.started, span.finished, span.received))
        cpu = None if span.cpu is None else round(span.cpu * 1e6)
        measured = STATUSES.index(span.status), span.calls, span.bytes_sent, span.bytes_received
        (running if span.status == RUNNING else spans).append(
            (row, name, *measured, note, *times, cpu, span.item)
        )
    return {
        "rows": [*rows],
        "names": [*numbers],
        "notes": [*notes],
        "spans": _columns(spans),
        "running": _columns(running),
        "lives": lives,
        "waits": [*waits.items()],
        "arrows": [
            (places[giver], taker) for giver, taker in needs[:MAX_ARROWS] if giver in places
        ],
    }


def _columns(spans: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Return spans as columns, which JSON holds in half of the bytes."""
    return {name: [span[index] for span in spans] for index, name in enumerate(COLUMNS)}
