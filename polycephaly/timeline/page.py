"""A timeline as a single page: `page.html`, `page.css` and `page.js`, with the spans as JSON.

Names come from users. They are in the JSON, where every ``<`` is escaped, and the script shows them
as text.

    columns  one entry for each span: row, lane, name, status, calls, bytes sent, bytes received,
             note (indices, numbers); queued, sent, started, finished, received, processor time
             (µs; null: unknown)
    arrows   pairs of spans: a node of a graph took a value from another node
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from .bottleneck import bottleneck_of
from .picture import Bar, colours
from .rows import rows
from .spans import CANCELLED, DIED, DONE, ERROR, RUNNING, SENT, TIMEOUT
from .svg import bars_of
from .text import facts, table

if TYPE_CHECKING:
    from .contents import Contents

__all__ = ["data_of", "fill", "page_of"]

MAX_ARROWS = 50_000  # a page could not show more

STATUSES = (DONE, RUNNING, ERROR, CANCELLED, TIMEOUT, DIED, SENT)


def page_of(timeline: Contents, title: str, bars: Sequence[Bar] = ()) -> bytes:
    here = files(__package__)
    parts = {
        "title": escape(title),
        "style": here.joinpath("page.css").read_text("utf-8"),
        "script": here.joinpath("page.js").read_text("utf-8"),
        "bars": bars_of(bars) if bars else "",
        "data": data_of(contents(timeline)),
    }
    return fill(here.joinpath("page.html").read_text("utf-8"), parts)


def data_of(contents: Any) -> str:
    """Return JSON that can stand in a ``script`` element."""
    text = json.dumps(contents, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def fill(page: str, parts: Mapping[str, str]) -> bytes:
    """Return the page with each ``{{ name }}`` replaced by that part."""
    before, *rest = page.split("{{")
    whole = [before]
    for piece in rest:  # in one pass, so inserted text is not searched
        name, _, after = piece.partition("}}")
        whole += parts[name.strip()], after
    return "".join(whole).encode("utf-8", "replace")


def contents(timeline: Contents) -> dict[str, Any]:
    start, duration = timeline.start, max(timeline.end - timeline.start, 1e-9)
    palette = colours(timeline)
    names = {name: index for index, name in enumerate(palette)}
    notes: dict[str, int] = {"": 0}
    all_rows = rows(timeline)
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "row", "lane", "name", "status", "calls", "there", "back", "note",
            "queued", "sent", "started", "finished", "received", "cpu",
        )
    }  # fmt: skip
    places: dict[int, int] = {}  # index of each span in the columns, by its number
    needs: list[tuple[int, Iterable[int]]] = []
    add = [column.append for column in columns.values()]

    def at(moment: float | None) -> int | None:
        return None if moment is None else round((moment - start) * 1e6)

    for number, row in enumerate(all_rows):
        for lane, spans in enumerate(row.lanes):
            for span in spans:
                if span.number:
                    places[span.number] = len(columns["row"])
                if span.needed:
                    needs.append((len(columns["row"]), dict.fromkeys(span.needed)))
                values = (
                    number, lane, names[span.name], STATUSES.index(span.status), span.calls,
                    span.bytes_sent, span.bytes_received, notes.setdefault(span.note, len(notes)),
                    at(span.queued), at(span.sent),
                    at(span.started), at(span.finished), at(span.received),
                    None if span.cpu is None else round(span.cpu * 1e6),
                )  # fmt: skip
                for append, value in zip(add, values, strict=True):
                    append(value)
    return {
        "facts": facts(timeline),
        "bottleneck": bottleneck_of(timeline),
        "length": round(duration * 1e6),
        "statuses": STATUSES,
        "names": [{"name": name, "colour": colour} for name, colour in palette.items()],
        "rows": [
            {
                "drone": row.drone,
                "thread": row.thread,
                "lanes": max(1, len(row.lanes)),
                "busy": round(row.busy / duration, 4),
                "lives": [[at(span.started), at(span.finished)] for span in row.lives],
                "waits": at(
                    min((span.sent for span in row.sent if span.sent is not None), default=None)
                ),
            }
            for row in all_rows
        ],
        "notes": [*notes],
        "spans": columns,
        "arrows": [
            (places[source], target)
            for target, needed in needs
            for source in needed
            if source in places
        ][:MAX_ARROWS],
        "table": table(timeline),
    }
