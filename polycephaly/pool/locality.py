"""Favours: work that should go where what it takes is kept.

    kept value in drone 0 <── work that takes it ── waits in link 0's `favoured`, though drone 1 is idle
                                                      └─ for as long as moving the value would take, or longer:
                                                         it is packed meanwhile, and drone 1 takes the work

So the holder is preferred, nothing waits twice as long as it had to, and work is in one queue at a
time: here, or, once nobody is preferred any more, in the crew's own.

Any thread adds work; only who has the hub's turn takes any. A link that retires or dies empties its
queue in a turn; who adds looks at the link's state after that, and has it emptied again, so nothing
stays with one who takes no more."""

from __future__ import annotations

from functools import partial
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from ..runtime.tuning import tuning
from ..store.placeholders import PayloadWithRefs
from .drone_handle import DroneHandle, State, drained
from .task import Task

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["Locality"]

MOVING = 2e-9
"""Seconds that a byte takes from drone to drone, about: it is pickled, copied once, and
unpickled."""
_LOOKED_AT = (
    256  # pieces of work that wait for one drone, when others look what they could take over
)


class Locality:
    """A crew's. Its truth: may some be waiting? (Never False while there are.)"""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._any = False
        self._looks_at = inf  # when it is looked whether others should have them

    def __bool__(self) -> bool:
        return self._any

    def __len__(self) -> int:
        return sum(len(handle.preferred) for handle in self._dispatcher.handles) if self._any else 0

    def add(self, task: Task, handle: DroneHandle) -> None:
        """It is to be run by `link`, unless another is idle for as long as it takes to bring there
        what it takes. From any thread."""
        dispatcher = self._dispatcher
        task.prefers = handle
        task.preferred = dispatcher.reactor.timers.now()
        handle.preferred.append(task)
        self._any = dispatcher.dedicated_waiting = True
        dispatcher.see_to(task)
        if (
            handle.state >= State.RETIRING
        ):  # its queue was emptied when it came to that, perhaps before this
            dispatcher.reactor.post(partial(self.release, handle))
        if dispatcher.over:
            dispatcher.reject_all(handle.preferred)

    # -- in turns ----------------------------------------------------------------------------------

    def put_back(self, task: Task, handle: DroneHandle) -> None:
        """To the head of the queue that it was taken from."""
        handle.preferred.appendleft(task)
        self._any = self._dispatcher.dedicated_waiting = True

    def look(self) -> None:
        """Whether there still are some."""
        self._any = False  # before the look: who adds some meanwhile says so after that
        if any(handle.preferred for handle in self._dispatcher.handles):
            self._any = True

    def share(self, now: float) -> None:
        """Idle drones take what has waited for a busy one as long as moving what it takes would
        take. What has to be moved is packed first, and meanwhile the busy one may come to it."""
        dispatcher = self._dispatcher
        idle = [handle for handle in dispatcher.handles if not handle.in_flight and handle.takes()]
        soonest = inf
        for busy in sorted(dispatcher.handles, key=lambda handle: -len(handle.preferred)):
            for task in list(islice(busy.preferred, _LOOKED_AT)) if idle else ():
                due = task.preferred + 2 * tuning.batch_seconds + task.burden * MOVING
                if task.done():
                    busy.preferred.remove(task)
                elif due > now:
                    soonest = min(soonest, due)
                    break
                elif idle and (
                    type(task.payload) is not PayloadWithRefs
                    or dispatcher.directory.can_move(task, idle[-1])
                ):
                    handle = idle.pop()
                    busy.preferred.remove(task)
                    handle.preferred.appendleft(task)
                    dispatcher.send(handle, handle.preferred, 1, now)
        if idle and soonest < self._looks_at:
            self._looks_at = soonest
            dispatcher.reactor.after(soonest - now, self._look_again)

    def _look_again(self) -> None:
        self._looks_at = inf  # the turn's end looks

    def release(self, handle: DroneHandle) -> None:
        """It takes no more, and ends if that was all that it waited for."""
        for task in drained(handle.preferred):
            task.prefers = None
            self._dispatcher.go_on(task)
        self._dispatcher.supervisor.stop_if_retired(handle)

    def drained(self) -> list[Task]:
        """All, and none waits here any more."""
        return [task for handle in self._dispatcher.handles for task in drained(handle.preferred)]
