"""The HTML of pools and drones in a notebook; see promises/html.py."""

from __future__ import annotations

from collections.abc import Iterable

from ..promises.html import table
from .drone_handle import DroneHandle
from .status import drone_state, running_label

COLUMNS = ("drone", "pid", "state", "runs", "done")


def drone_table(title: str, handles: Iterable[DroneHandle]) -> str:
    return table(title, COLUMNS, map(_row, handles))


def _row(handle: DroneHandle) -> tuple[object, ...]:
    state, running = drone_state(handle), running_label(handle)
    return handle.name, handle.pid or "", state, running or "", handle.tasks_done
