"""The state of a pool and its drones as plain data: `Pool.status`, and reports to other processes.

Nothing is locked: each figure is read in one step, so that a report delays no task. A task that
moves meanwhile may be counted twice.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..runtime.version import __version__
from .drone_handle import DroneHandle
from .interfaces import State
from .task_state import QUEUED

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

IDENTITY_FIELDS = ("number", "name", "pid", "host")
COLUMNS = ("drone", "pid", "state", "runs", "done")  # of a table in a notebook


def describe_pool(dispatcher: Dispatcher) -> dict[str, Any]:
    """Return the dict of `Pool.status`. Any thread may call this."""
    scarce = [*dispatcher.assignment.resources.queues.values()]  # tasks that wait for resources
    for_resources = sum(task.state is QUEUED for queue in scarce for task in [*queue])
    queued = dispatcher.assignment.queued + len(dispatcher.inbound) - for_resources
    state = dispatcher.state
    waiting = len(state.awaiting_inputs) + for_resources
    in_flight = running = 0
    for task in list(state.parked):
        if task.is_leased:
            in_flight += 1
            running += task.runs_elsewhere
        elif task not in state.awaiting_inputs:
            waiting += 1
    for handle in list(dispatcher.handles):
        queued += handle.queued
        in_flight += len(handle.in_flight)
        running += handle.overlapping or handle.last_started() in handle.in_flight
    free = dispatcher.assignment.resources.free()
    engine = dispatcher.supervisor.engine
    shared_memory, shared_memory_limit = engine.shared_memory()
    return {
        "name": dispatcher.config.name,
        "engine": engine.name,
        "state": _pool_state(dispatcher),
        "reason": None if dispatcher.refusal is None else str(dispatcher.refusal),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "version": __version__,
        "address": None,
        "clients": 0,
        "started": dispatcher.made_at,
        "size": dispatcher.size,
        "width": dispatcher.width,
        "queued": queued,
        "waiting": waiting,
        "in_flight": in_flight,
        "running": running,
        "tasks_done": dispatcher.tasks_done,
        "tasks_failed": dispatcher.record.failed,
        "tasks_cancelled": dispatcher.tasks_cancelled,
        "failures": list(dispatcher.record.failures),
        "resources": {
            name: {"size": size, "free": free[name]}
            for name, size in dispatcher.resource_sizes.items()
        },
        "shared_memory": shared_memory,
        "shared_memory_limit": shared_memory_limit,
        "native_threads": engine.native_threads(),
        "drones": describe_drones(dispatcher),
    }


def _pool_state(dispatcher: Dispatcher) -> str:
    if dispatcher.state.broken is not None:
        return "broken"
    if dispatcher.has_ended:
        return "ended"
    if dispatcher.reactor.belongs_to_parent:
        return "elsewhere"
    return "open" if dispatcher.refusal is None else "closing"


def describe_drones(dispatcher: Dispatcher) -> list[dict[str, Any]]:
    """Return one entry for each drone. This may take milliseconds for each gigabyte they hold."""
    handles = [handle for handle in list(dispatcher.handles) if handle.alive]
    return [describe_identity(handle) | _describe_activity(handle) for handle in handles]


def describe_identity(handle: DroneHandle) -> dict[str, Any]:
    host = socket.gethostname()
    return {"number": handle.number, "name": handle.name, "pid": handle.pid, "host": host}


def _describe_activity(handle: DroneHandle) -> dict[str, Any]:
    since = handle.last_contact_at or None
    running = handle.running_task()
    if running is not None and running.sending is not None:
        since = running.sending.at
    now, waiting = handle.dispatcher.reactor.timers.now(), handle.waiting
    return {
        "state": drone_state(handle),
        "running": running_label(handle),
        "item": None if running is None else running.item,
        "client": None if running is None else running.client_tag.partition(" ")[2] or None,
        "seconds": None if since is None else max(0.0, now - since),
        "waiting": None if waiting is None else waiting.as_dict() | {"seconds": waiting.seconds},
        "memory": held_memory(handle),
        "processor": handle.processor_seconds(),
        "tasks_done": handle.tasks_done,
    }


def drone_state(handle: DroneHandle) -> str:
    if handle.state is State.DEAD:
        return f"ended, exit code {handle.exitcode}"
    if handle.unresponsive is not None:
        return f"unresponsive: {handle.unresponsive}"
    if handle.state > State.READY:
        return "retiring"
    # A drone may run a task before its HELLO is read.
    if handle.state < State.READY and not (handle.in_flight and handle.last_started()):
        return "starting"
    return "busy" if handle.in_flight else "idle"


def running_label(handle: DroneHandle) -> str | None:
    """Return the name of the task that the drone runs, as in errors, or None."""
    running = handle.running_task() if handle.alive else None
    if running is None:
        return None
    others = handle.overlapping - 1
    label: str = running.definition.label
    return f"{label} and {others} more" if others > 0 else label


def held_memory(handle: DroneHandle) -> int | None:
    """Return the bytes that the drone and the processes it started hold for themselves, or None if
    they are not known.
    """
    return (handle.memory(0) or None) if handle.alive else None


def drone_table(title: str, handles: Iterable[DroneHandle]) -> str:
    """Return the HTML of a pool or drone in a notebook."""
    from ..promises.html import table  # not with each pool: it loads `html`

    rows = (
        (each.name, each.pid or "", drone_state(each), running_label(each) or "", each.tasks_done)
        for each in handles
    )
    return table(title, COLUMNS, rows)
