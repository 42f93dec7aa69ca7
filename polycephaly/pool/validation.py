"""A check that all tasks of a pool are where their states say, and that its counts are right."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

from .dispatcher_base import DispatcherBase
from .drone_handle import DroneHandle
from .task import Task
from .task_state import DELAYED, ENDING, INBOUND, LEASED, PARKED, QUEUED, SENT, WAITING

VALIDATES = os.environ.get("POLYCEPHALY_VALIDATE") == "1"
"""Whether `validate` is called after each turn of the loop."""


def validate(dispatcher: DispatcherBase) -> None:
    """Raise `AssertionError` if a task is not where its state says, or a count is wrong.

    Called by the loop's thread, between two changes. Tasks that any thread has settled meanwhile
    are left out: they are dropped where they are met.
    """
    places = _places(dispatcher)
    for task in [*dispatcher.unsettled]:
        if not task.promise.done():
            _check_place(dispatcher, task, places.get(task, []))
    for handle in dispatcher.handles:
        _check_handle(handle)
    if not dispatcher.has_ended:
        _check_counts(dispatcher)


def _places(dispatcher: DispatcherBase) -> dict[Task, list[str]]:
    """Return the names of the places where tasks are."""
    found: dict[Task, list[str]] = {}
    named = [("inbox", [*dispatcher.inbound]), ("queue", dispatcher.queue)]
    named += [("queue", queue) for queue in dispatcher.resources.queues.values()]
    for handle in dispatcher.handles:
        named += [("queue", handle.dedicated), ("queue", handle.preferred)]
        named.append(("drone", [*handle.in_flight.values()]))
    named.append(("delayed", [*dispatcher.delayed]))
    for name, tasks in named:
        for task in tasks:
            found.setdefault(task, []).append(name)
    return found


_PLACES = {
    INBOUND: (["inbox"], []),
    WAITING: ([], ["inbox"]),
    QUEUED: (["queue"],),
    PARKED: ([],),
    SENT: (["drone"],),
    LEASED: ([],),
    DELAYED: (["delayed"],),
    ENDING: ([],),
}


def _check_place(dispatcher: DispatcherBase, task: Task, places: list[str]) -> None:
    state = task.state
    assert places in _PLACES[state], f"{task.promise!r} is {state.name} and in {places}"
    assert state is not WAITING or task in dispatcher.awaiting_inputs or places, (
        f"{task.promise!r} waits for inputs and is not in `awaiting_inputs`"
    )
    is_parked = task in dispatcher.parked
    assert is_parked or state not in (PARKED, LEASED, DELAYED), f"{task.promise!r} is not parked"
    assert task.target is None or state is not SENT or task.handle is task.target


def _check_handle(handle: DroneHandle) -> None:
    sent = [*handle.in_flight.values()]
    overlapping = sum(task.definition.overlaps for task in sent)
    unknown = sum(
        task.sending is not None and task.sending.estimate < 0 and not task.definition.overlaps
        for task in sent
    )
    assert handle.overlapping == overlapping, f"{handle.name} overlaps {handle.overlapping} tasks"
    assert handle.unknown == unknown, f"{handle.name} has {handle.unknown} of unknown length"
    assert handle.load > -1e-6, f"{handle.name} has a load of {handle.load}"
    positions = [task.position for task in sent]
    assert positions == sorted(positions), f"{handle.name}: {positions}"
    assert sum(task.sending is not None and task.sending.by_bulk for task in sent) == (
        handle.bulk_unanswered
    )


def _check_counts(dispatcher: DispatcherBase) -> None:
    own = [each.dedicated for each in dispatcher.handles]
    shared = [dispatcher.queue, *(each.preferred for each in dispatcher.handles)]
    by_key = dispatcher.resources.queues.items()
    for handle in dispatcher.handles:
        queues = [handle.dedicated, *(queue for key, queue in by_key if key[1] is handle)]
        count = _count_queued(queues)
        assert count == handle.queued, f"{handle.name}: {count}, not {handle.queued}, are queued"
    shared += [queue for key, queue in by_key if key[1] is None]
    count = _count_queued(shared)
    assert count == dispatcher.queued, f"{count}, not {dispatcher.queued}, are queued"
    assert all(task.target is not None for queue in own for task in queue)
    held = Counter[str]()
    for handle in dispatcher.handles:
        for task in [*handle.in_flight.values()]:
            held.update(dict(task.resources))
    free = dispatcher.resources.free()
    assert all(free[name] + held[name] == size for name, size in dispatcher.resources.sizes.items())


def _count_queued(queues: Iterable[Iterable[Task]]) -> int:
    return sum(task.state is QUEUED for queue in queues for task in queue)
