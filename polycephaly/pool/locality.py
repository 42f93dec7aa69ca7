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

    def __init__(self, crew: Dispatcher) -> None:
        self._crew = crew
        self._any = False
        self._looks_at = inf  # when it is looked whether others should have them

    def __bool__(self) -> bool:
        return self._any

    def __len__(self) -> int:
        return sum(len(link.favoured) for link in self._crew.links) if self._any else 0

    def add(self, work: Task, link: DroneHandle) -> None:
        """It is to be run by `link`, unless another is idle for as long as it takes to bring there
        what it takes. From any thread."""
        crew = self._crew
        work.prefers = link
        work.favoured = crew.hub.timers.now()
        link.favoured.append(work)
        self._any = crew.pinned_waiting = True
        crew.see_to(work)
        if (
            link.state >= State.RETIRING
        ):  # its queue was emptied when it came to that, perhaps before this
            crew.hub.post(partial(self.release, link))
        if crew.over:
            crew.reject_all(link.favoured)

    # -- in turns ----------------------------------------------------------------------------------

    def put_back(self, work: Task, link: DroneHandle) -> None:
        """To the head of the queue that it was taken from."""
        link.favoured.appendleft(work)
        self._any = self._crew.pinned_waiting = True

    def look(self) -> None:
        """Whether there still are some."""
        self._any = False  # before the look: who adds some meanwhile says so after that
        if any(link.favoured for link in self._crew.links):
            self._any = True

    def share(self, now: float) -> None:
        """Idle drones take what has waited for a busy one as long as moving what it takes would
        take. What has to be moved is packed first, and meanwhile the busy one may come to it."""
        crew = self._crew
        idle = [link for link in crew.links if not link.flight and link.takes()]
        soonest = inf
        for busy in sorted(crew.links, key=lambda link: -len(link.favoured)):
            for work in list(islice(busy.favoured, _LOOKED_AT)) if idle else ():
                due = work.favoured + 2 * tuning.batch_seconds + work.burden * MOVING
                if work.done():
                    busy.favoured.remove(work)
                elif due > now:
                    soonest = min(soonest, due)
                    break
                elif idle and (
                    type(work.payload) is not PayloadWithRefs or crew.vault.can_move(work, idle[-1])
                ):
                    link = idle.pop()
                    busy.favoured.remove(work)
                    link.favoured.appendleft(work)
                    crew.send(link, link.favoured, 1, now)
        if idle and soonest < self._looks_at:
            self._looks_at = soonest
            crew.hub.after(soonest - now, self._look_again)

    def _look_again(self) -> None:
        self._looks_at = inf  # the turn's end looks

    def release(self, link: DroneHandle) -> None:
        """It takes no more, and ends if that was all that it waited for."""
        for work in drained(link.favoured):
            work.prefers = None
            self._crew.go_on(work)
        self._crew.roster.stop_if_retired(link)

    def drained(self) -> list[Task]:
        """All, and none waits here any more."""
        return [work for link in self._crew.links for work in drained(link.favoured)]
