"""Locality: sends tasks to the drones that keep the values which the tasks take.

    kept value in drone 0 <── a task takes it ── waits in the `preferred` queue of drone 0,
                                                 even if drone 1 is idle
                                                   └─ for as long as moving the value would take,
                                                      or longer: the value is pickled meanwhile,
                                                      and drone 1 takes the task

So the drone with the value is preferred, and no task waits twice as long as necessary. A task is in
one queue at a time: here, or in the dispatcher's queue once no drone is preferred any more.

When a drone retires or dies, its queue is emptied. All is done while holding the reactor's lock.
"""

from __future__ import annotations

from itertools import islice
from math import inf

from ..runtime.tuning import tuning
from ..wire.placeholders import PayloadWithRefs
from .directory import ObjectDirectory
from .dispatcher_base import DispatcherBase

MOVE_SECONDS_PER_BYTE = 2e-9
"""Approximate seconds to move a byte between drones: pickling, one copy, unpickling."""
# Tasks that are checked in the queue of one drone, when other drones may take tasks over.
_MAX_CHECKED_TASKS = 256


class Locality:
    """The tasks of one pool that prefer a drone."""

    def __init__(self, dispatcher: DispatcherBase, directory: ObjectDirectory) -> None:
        self._dispatcher = dispatcher
        self._directory = directory
        self._next_rebalance_at = inf  # when `rebalance` will be tried again

    def rebalance(self, now: float) -> None:
        """Let idle drones take tasks that have waited for a busy one as long as moving their kept
        values would take. Values to be moved are pickled first; meanwhile the busy drone may get to
        the task.
        """
        dispatcher = self._dispatcher
        assignment = dispatcher.assignment
        idle, soonest = [*assignment.idle], inf
        for busy in sorted(
            assignment.preferring, key=lambda drone: (-len(drone.preferred), drone.number)
        ):
            for task in list(islice(busy.preferred, _MAX_CHECKED_TASKS)) if idle else ():
                patience = 2 * tuning.batch_seconds + task.bytes_to_move * MOVE_SECONDS_PER_BYTE
                due = task.preferred_since + patience
                if task.promise.done():
                    assignment.drop_preferring(task, busy)
                    assignment.leave_queue(task)
                elif due > now:
                    soonest = min(soonest, due)
                    break
                elif idle and (
                    type(task.payload) is not PayloadWithRefs
                    or self._directory.can_move(task, idle[-1])
                ):
                    handle = idle.pop()
                    assignment.move_preferring(task, busy, handle)
                    send = assignment.choose(handle, handle.preferred, 1, now)
                    if send is not None:
                        dispatcher.send(send, now)
        if idle and soonest < self._next_rebalance_at:
            self._next_rebalance_at = soonest
            dispatcher.call_later(soonest - now, self._rebalance_again)

    def _rebalance_again(self) -> None:
        self._next_rebalance_at = inf  # `take_turn` calls `rebalance`
