"""The state of a pool as plain data, for reports to other processes."""

from __future__ import annotations

import socket
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..pool.drone_handle import DroneHandle
from ..pool.interfaces import State

if TYPE_CHECKING:
    from ..pool.dispatcher import Dispatcher

__all__ = ["IDENTITY_FIELDS", "count_queued", "describe_drones", "describe_identity"]

IDENTITY_FIELDS = ("number", "name", "pid", "host")


def describe_drones(dispatcher: Dispatcher) -> list[dict[str, Any]]:
    """Return one entry for each drone.

    `memory` is the bytes that the drone and the processes it started hold for themselves; reading
    the figure may take milliseconds for each gigabyte.
    """
    handles = [handle for handle in list(dispatcher.handles) if handle.state is not State.DEAD]
    return [describe_identity(handle) | _describe_activity(handle) for handle in handles]


def describe_identity(handle: DroneHandle) -> dict[str, Any]:
    return {
        "number": handle.number,
        "name": handle.name,
        "pid": handle.pid,
        "host": socket.gethostname(),
    }


def count_queued(dispatcher: Dispatcher) -> int:
    """Return the number of tasks that no drone has been sent."""
    return len(dispatcher.queue) + sum(len(handle.dedicated) for handle in list(dispatcher.handles))


def _describe_activity(handle: DroneHandle) -> dict[str, Any]:
    now = monotonic()
    label, since = None, handle.last_contact_at or None
    running = handle.running_task()
    if running is not None:
        label = running.definition.label
        if handle.overlapping > 1:
            label += f" and {handle.overlapping - 1} more"
        since = running.sending.at if running.sending is not None else since
    if handle.unresponsive is not None:
        state = f"unresponsive: {handle.unresponsive}"
    # A drone may run a task before its HELLO is read.
    elif handle.state < State.READY and (running is None or not handle.last_started()):
        state = "starting"
    elif handle.state > State.READY:
        state = "retiring"
    else:
        state = "idle" if running is None else "busy"
    return {
        "state": state,
        "running": label,
        "seconds": None if since is None else max(0.0, now - since),
        "waiting": None
        if handle.waiting is None
        else handle.waiting.as_dict() | {"seconds": handle.waiting.seconds},
        "memory": handle.memory(0),
        "tasks_done": handle.tasks_done,
    }
