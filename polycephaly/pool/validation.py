"""A check that all tasks of a pool are where their states say, and that its counts are right."""

from __future__ import annotations

import os

from .dispatcher_base import DispatcherBase
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
        handle.validate()
    if not dispatcher.has_ended:
        dispatcher.state.validate()
        dispatcher.assignment.validate()


def _places(dispatcher: DispatcherBase) -> dict[Task, list[str]]:
    """Return the names of the places where tasks are."""
    found: dict[Task, list[str]] = {}
    named = [("inbox", [*dispatcher.inbound]), ("delayed", [*dispatcher.state.delayed])]
    named += [("queue", [*queue]) for queue in dispatcher.assignment.queues()]
    named += [("drone", [*handle.in_flight.values()]) for handle in dispatcher.handles]
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
    # Any thread puts it into the inbox, and then takes it out of `awaiting_inputs`. So, in this
    # order, it is found in one of them: only this thread takes it out of the inbox.
    is_there = state is not WAITING or task in dispatcher.state.awaiting_inputs
    assert is_there or task in [*dispatcher.inbound], (
        f"{task.promise!r} waits for inputs and is neither in `awaiting_inputs` nor in the inbox"
    )
    is_parked = task in dispatcher.state.parked
    assert is_parked or state not in (PARKED, LEASED, DELAYED), f"{task.promise!r} is not parked"
    assert task.target is None or state is not SENT or task.handle is task.target
