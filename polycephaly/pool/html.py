"""The HTML of pools and drones in a notebook; see promises/html.py."""

from __future__ import annotations

from collections.abc import Iterable

from ..promises.html import table
from .drone_handle import DroneHandle
from .interfaces import State

__all__ = ["drone_table"]


def drone_table(title: str, handles: Iterable[DroneHandle]) -> str:
    return table(title, ("drone", "pid", "state", "runs", "done"), map(_row, handles))


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
