"""The HTML of promises in a notebook: small tables, with all user text escaped.

Called in any thread without a lock. The state may change while it is read, so a table need not be
consistent.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from ..runtime.clock import monotonic

_BAR_PIXELS = 320
_PHASES = (  # for each phase: the time in `Spans` at which the phase begins, its colour, its name
    ("queued", "#c9ced6", "waited"),
    ("sent", "#8fa3bf", "on its way"),
    ("started", "#2f6fb2", "ran"),
    ("finished", "#8fa3bf", "on its way back"),
    ("received", "", ""),
)


def promise_table(promise: Any) -> str:
    """Return the table of a promise, with the times of its task."""
    spans = promise.spans
    facts = (("task", promise._label()), ("drone", spans.drone))
    rows = [each for each in facts if each[1] is not None]
    times = [getattr(spans, name) for name, _, _ in _PHASES]
    return table(repr(promise), (), rows, _bar(times, promise.running(), promise.done()))


def _bar(times: list[float | None], running: bool, done: bool) -> str:
    """Return the times of the task as a bar: waiting, on the way, running, on the way back.

    If the task is not done, the bar ends now, in the present phase. While the task runs, the time
    since the sending counts as running, because the start is not known yet. The bar is HTML.
    """
    if times[0] is None:
        return ""
    if running:
        times[2] = times[1]  # because the drone sends the time of the start only with the result
    if not done:
        times[next((at for at, each in enumerate(times) if each is None), -1)] = monotonic()
    reached = [each for each in times if each is not None]
    whole = max(reached[-1] - reached[0], 1e-9)
    parts, labels = [], []
    for (_, colour, label), began, ended in zip(_PHASES, times, times[1:], strict=False):
        if began is None or ended is None:
            break
        if began == ended:
            continue
        width = round(_BAR_PIXELS * (ended - began) / whole)
        parts.append(f'<div style="width:{width}px;background:{colour}"></div>')
        labels.append(f"{label} {_seconds(ended - began)}")
    return (
        f'<div style="display:flex;height:10px">{"".join(parts)}</div>'
        f"<small>{', '.join(labels)}</small>"
    )


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def table(
    title: str, columns: tuple[str, ...], rows: Iterable[tuple[object, ...]], below: str = ""
) -> str:
    """Return a table under a title. Title and cells are escaped; `columns` and `below` are not."""
    head = f"<tr>{''.join(f'<th>{each}</th>' for each in columns)}</tr>" if columns else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(each))}</td>" for each in row) + "</tr>" for row in rows
    )
    return f"<div><code>{escape(title)}</code><table>{head}{body}</table>{below}</div>"
