"""The HTML of pools, drones and promises in a notebook: small tables, with all user text escaped.

Called in any thread without the reactor's lock. The state may change while it is read, so a table
need not be consistent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from ..pool.drone_handle import DroneHandle, State

if TYPE_CHECKING:
    from ..pool.drone import Drone
    from ..pool.pool import Pool
    from ..promises.promise import Promise, Spans

__all__ = ["drone_table", "pool_table", "promise_table"]

_BAR_PIXELS = 320
_PHASES = (  # for each phase: the time in `Spans` at which the phase begins, its colour, its name
    ("queued", "#c9ced6", "waited"),
    ("sent", "#8fa3bf", "on its way"),
    ("started", "#2f6fb2", "ran"),
    ("finished", "#8fa3bf", "on its way back"),
    ("received", "", ""),
)


def pool_table(pool: Pool) -> str:
    handles = [] if pool._dispatcher.has_ended else list(pool._dispatcher.handles)
    return _table(repr(pool), ("drone", "pid", "state", "runs", "done"), map(_row, handles))


def drone_table(drone: Drone) -> str:
    return _table(repr(drone), ("drone", "pid", "state", "runs", "done"), [_row(drone._handle)])


def promise_table(promise: Promise[Any]) -> str:
    spans = promise.spans
    definition = getattr(promise, "definition", None)
    rows: list[tuple[object, ...]] = [("task", definition.label)] if definition is not None else []
    if spans.drone is not None:
        rows.append(("drone", spans.drone))
    return _table(repr(promise), (), rows, _bar(spans, promise))


def _row(handle: DroneHandle) -> tuple[object, ...]:
    return handle.name, handle.pid or "", _state(handle), _runs(handle), handle.tasks_done


def _state(handle: DroneHandle) -> str:
    if handle.state is State.DEAD:
        return f"ended, exit code {handle.exitcode}"
    if handle.unresponsive:
        return f"unresponsive: {handle.unresponsive}"
    if handle.state is not State.READY:
        return handle.state.name.lower()
    return "busy" if handle.in_flight else "idle"


def _runs(handle: DroneHandle) -> str:
    """Return the label of the task that the drone runs, or how many tasks overlap, or ""."""
    if not handle.in_flight or not handle.alive:
        return ""
    if handle.overlapping:
        return f"{handle.overlapping} at once"
    task = handle.in_flight.get(handle.last_started())
    return "" if task is None else task.definition.label


def _bar(spans: Spans, promise: Promise[Any]) -> str:
    """Return the times of the task as a bar: waiting, on the way, running, on the way back.

    If the task is not done, the bar ends now, in the present phase. While the task runs, the time
    since the sending counts as running, because the start is not known yet. The bar is HTML.
    """
    times = [getattr(spans, name) for name, _, _ in _PHASES]
    if times[0] is None:
        return ""
    if promise.running():
        times[2] = times[1]  # because the drone sends the time of the start only with the result
    if not promise.done():
        times[next((at for at, each in enumerate(times) if each is None), -1)] = time.monotonic()
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


def _table(
    title: str, columns: tuple[str, ...], rows: Iterable[tuple[object, ...]], below: str = ""
) -> str:
    """Return a table under a title. Title and cells are escaped; `columns` and `below` are not."""
    head = f"<tr>{''.join(f'<th>{each}</th>' for each in columns)}</tr>" if columns else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(each))}</td>" for each in row) + "</tr>" for row in rows
    )
    return f"<div><code>{escape(title)}</code><table>{head}{body}</table>{below}</div>"
