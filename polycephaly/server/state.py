"""What a pool is doing, as plain data: for whoever asks from another process."""

from __future__ import annotations

import socket
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..pool.drone_handle import DroneHandle, State

if TYPE_CHECKING:
    from ..pool.pool import Pool

__all__ = ["KNOWN", "drones_of", "known_of", "queued_in"]

KNOWN = ("number", "name", "pid", "host")


def drones_of(pool: Pool) -> list[dict[str, Any]]:
    """One entry for each drone. `memory` is what it and what it has started hold for themselves, in
    bytes; asking for that may take milliseconds for each gigabyte."""
    links = [link for link in list(pool._crew.links) if link.state is not State.DEAD]
    return [known_of(link) | _doing(link) for link in links]


def known_of(link: DroneHandle) -> dict[str, Any]:
    return {"number": link.number, "name": link.name, "pid": link.pid, "host": socket.gethostname()}


def queued_in(pool: Pool) -> int:
    """Work that no drone has got."""
    crew = pool._crew
    return len(crew.queue) + sum(len(link.pinned) for link in list(crew.links))


def _doing(link: DroneHandle) -> dict[str, Any]:
    now = monotonic()
    works = list(link.flight.values())
    label, since = None, link.last_heard or None
    started = link.started() if works else 0
    if works:
        running = next((work for work in works if work.number == started), works[0])
        label = running.definition.label
        if link.overlapping > 1:
            label += f" and {link.overlapping - 1} more"
        since = running.sending.at if running.sending is not None else since
    if link.unresponsive is not None:
        state = f"unresponsive: {link.unresponsive}"
    elif link.state < State.READY and not started:  # it may be at work before its greeting is read
        state = "starting"
    elif link.state > State.READY:
        state = "retiring"
    else:
        state = "busy" if works else "idle"
    return {
        "state": state,
        "running": label,
        "seconds": None if since is None else max(0.0, now - since),
        "waiting": None
        if link.waiting is None
        else link.waiting.as_dict() | {"seconds": link.waiting.seconds},
        "memory": link.memory(0),
        "tasks_done": link.tasks_done,
    }
