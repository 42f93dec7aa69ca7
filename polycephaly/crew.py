"""A crew: the drones behind one queue, which is what a `Pool` or a `Drone` holds.

    submit (any thread) ──> queue ──dispatch──> link.flight ──RESULTS──> promise
                              ^                     │ recalled, or its drone died before it began
                              └─────────────────────┘

Who may run what: work with a `target` waits in that link's `pinned`, all else in `queue`. A drone gets as much
as `BUDGET` seconds of known short work at once; one piece at a time where the time is long or not known yet.
Where one drone turns out busy with work behind it while another is idle, what it has not begun is recalled.

Which drones there are, and how they start and end, is the roster's business (roster.py).

Each piece is at any moment in one place: in a queue, or in one link's flight. It leaves the flight by its
result, by RETURNED, or by its drone's death, and the running page tells which work a dead drone had begun.
So what had not begun is queued again and runs exactly once, and what had is lost (or run again: `retries`).

`submit` races with the crew's end: it looks at `refusal`, appends, and looks at `over`; the hub sets `over`
and then empties the queue. Whoever pops an entry rejects it, so none is left and none is rejected twice.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from .errors import another
from .hub import Hub, lease_hub
from .launch.shield import Shield
from .limits import check_descriptors
from .link import BUDGET, Link, State, drained
from .output import Listener
from .plan import Plan, Terms
from .promises import CANCELLED, FINISHED, Milestone, Promise, race
from .rooms import Rooms
from .roster import Roster, because
from .timeline.record import Record
from .watch import Watch
from .wire.capture import main_namespace
from .wire.definitions import Book
from .wire.messages import CANCEL, RECALL, pack_numbers
from .wire.slices import FAILED, RUNNING, SMALL
from .work import Slice, Work

__all__ = ["Crew"]

log = logging.getLogger(__name__)

DOUBT = 0.25  # seconds that an answer may take to come, though one before it was none
GRACE = 1.0  # seconds between an interrupt and a kill
_BATCH = 2048
_PASSED_MOST = 1000  # pieces of work that cannot be lent, before it is given up to look for such behind them
CATCH_UP = 1024 - 1  # a mask: every so many calls, who submits many of them sees to the drones in between


class Crew:
    """Made in the thread that asks for it, of whose image it takes the snapshot; see `Roster` for what it raises."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.output = plan.output
        self.audiences: dict[str, Listener] = {}  # by the tag of what they want to hear, instead of `output`
        self.terms = plan.terms
        self._own_terms = plan.terms if plan.terms != (None, 0) else None
        self.queue: deque[Work] = deque()
        self.hungry = False  # a drone is idle: whoever adds work sees to it
        self.pinned_waiting = False
        self.refusal: BaseException | None = None  # why no more work is taken
        self.over = False
        self.closing = False
        self.look_for_end = False
        self.has_promised_to_finish = False  # what it has, before the interpreter ends
        self.finalizer: weakref.finalize[..., Any] | None = None  # of whoever holds it
        self.begun: Milestone[None] = Milestone()
        self.ended: Milestone[None] = Milestone()
        self.rooms: Rooms | None = None  # where queues have a limit
        self.record = Record()
        self._waiting: set[Work] = set()  # for promises among their arguments
        self._broken: BaseException | None = None
        self._abandoned = False
        self.watch = Watch(self)
        check_descriptors(plan.size)
        try:
            with Shield():  # or a Ctrl-C could leave a zygote that nobody knows of
                self.hub: Hub = lease_hub()
                try:
                    if plan.max_queued is not None:
                        self.rooms = Rooms(self.hub, plan.max_queued)
                    self.roster = Roster(self)
                except BaseException:
                    self.hub.give_back()
                    raise
                self.hub.post(self._begin)
        except KeyboardInterrupt:  # kept back until now
            if hasattr(self, "roster"):
                self.kill()
            raise

    @property
    def links(self) -> list[Link]:
        return self.roster.links

    @property
    def book(self) -> Book:
        return self.roster.book

    # -- any thread -------------------------------------------------------------------------------

    def submit(
        self,
        what: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Link | None = None,
        terms: Terms | None = None,
    ) -> Work:
        """Takes one piece of work. Raises `RuntimeError` (or `BrokenProcessPool`) when closed (broken)."""
        if self.rooms is not None:
            self._wait_for_room(target)
        if self.refusal is not None:
            self.check_open()
        if target is not None and (target.state >= State.RETIRING or target.retires):
            raise target.farewell()
        work = Work(self)
        terms = terms or self._own_terms
        if terms is not None:
            work.timeout, work.retries = terms
        if target is not None:
            work.target = target
        try:
            book = self.roster.book
            definition = book.define(what)
            inputs: Sequence[Promise[Any]] = ()
            for arg in args:
                if type(arg) not in SMALL:
                    inputs = work.capture(definition, args, kwargs, book)
                    break
            else:
                if kwargs:
                    inputs = work.capture(definition, args, kwargs, book)
                else:  # what `capture` would find out, without the call
                    work.definition, work.args = definition, args
        except Exception as error:
            work._settle(FINISHED, None, error)
            return work
        try:
            if inputs:
                self._waiting.add(work)
                work.when_filled(inputs, self._filled)
            elif target is not None:
                self._pin(work, target)
            else:  # `_enqueue`, without the call
                self.queue.append(work)
                if self.hungry:
                    self.hub.serve(self)
                elif not work.number & CATCH_UP:
                    self.hub.catch_up()
                if self.over:
                    self._reject_all(self.queue, self.refusal)
        except BaseException:  # Ctrl-C: nobody will have its promise
            work.cancel()
            raise
        return work

    def _wait_for_room(self, target: Link | None) -> None:
        if self.rooms is not None:
            self.rooms.wait(self.queue if target is None else target.pinned, lambda: self.refusal is not None)

    def close_without(self, holder: object) -> None:
        """Is closed when nobody has `holder` any more."""
        self.finalizer = weakref.finalize(holder, self.close)
        self.finalizer.atexit = False

    def start(self, work: Work) -> None:
        """Takes work that was made elsewhere. Raises as `submit` does."""
        self._wait_for_room(None)
        self.check_open()
        self._enqueue(work)

    def has_room(self) -> bool:
        return self.rooms is None or self.rooms.has(self.queue)

    def check_open(self) -> None:
        if self.refusal is not None:
            raise another(self.refusal)

    def _enqueue(self, work: Work) -> None:
        target = work.target
        if target is not None:
            self._pin(work, target)
            return
        self.queue.append(work)
        if self.hungry:
            self.hub.serve(self)
        elif not work.number & CATCH_UP:
            self.hub.catch_up()
        if self.over:
            self._reject_all(self.queue, self.refusal)

    def _pin(self, work: Work, target: Link) -> None:
        target.pinned.append(work)
        self.pinned_waiting = True
        self.hub.wake()
        if target.state is State.DEAD:  # its queue was emptied when it died, perhaps before this
            self._reject_all(target.pinned, target.farewell())

    def _filled(self, work: Work) -> None:
        if not work.done():
            self._enqueue(work)
        self._waiting.discard(work)
        if self.closing:
            self.hub.post(self._ask_for_end)

    def close(self, *, cancel: bool = False, running: bool = False) -> None:
        """No more work; ends when what there is has been done. Takes no lock, so finalizers may call it."""
        if self.refusal is None:
            self.refusal = RuntimeError(f"cannot schedule new futures after shutdown of {self.plan.name}")
        self.hub.post(partial(self._close, cancel, running))

    def kill(self) -> None:
        """Ends it now, with whatever it runs. Takes no lock."""
        if self.refusal is None:
            self.refusal = RuntimeError(f"{self.plan.name} was released")
        self.hub.post(self.abandon)

    def refresh(self) -> None:
        """New drones from a new snapshot, for all work that is not yet sent."""
        self.check_open()
        renewed: Promise[None] = Promise()
        with Shield():
            launcher = self.roster.launch()
            self.hub.post(partial(self.roster.renew, launcher, renewed))
        race(renewed, self.ended).result()
        if not renewed.done():  # it was closed in the meantime
            launcher.end()
            raise another(self.refusal or RuntimeError(f"{self.plan.name} has ended"))

    def wait_ended(self) -> None:
        """Until nothing of it is left; of the hub neither, if it was the last."""
        if self.hub.left_behind:
            return
        self.ended.result()
        if self.hub.gone:
            self.hub.thread.join()

    def finish(self, *, cancel: bool = False) -> None:
        """Closes it and waits for its end. A Ctrl-C meanwhile cancels all that it has, which takes `GRACE` at most; a
        second one kills all. (Or whatever else a signal's handler raises.)"""
        self.close(cancel=cancel, running=cancel)
        try:
            self.wait_ended()
        except Exception:  # it cannot be waited for here: in a callback, say
            raise
        except BaseException:
            if cancel:
                self.kill()
                self.wait_ended()
            else:
                self.finish(cancel=True)
            raise

    async def finish_async(self, *, cancel: bool = False) -> None:
        """`finish`, awaited. Whoever is cancelled meanwhile cancels all that it has; a second time, kills all."""
        self.close(cancel=cancel, running=cancel)
        try:
            if not self.hub.left_behind:
                await self.ended
        except BaseException:
            if cancel:
                self.kill()
                await self.ended
            else:
                await self.finish_async(cancel=True)
            raise
        self.wait_ended()

    def pending(self) -> int:
        return len(self.queue) + len(self._waiting) + sum(len(each.flight) + len(each.pinned) for each in self.links)

    # -- in turns: sending --------------------------------------------------------------------------

    def _begin(self) -> None:
        self.hub.crews.append(self)
        self.roster.begin()

    def dispatch(self, now: float) -> None:
        if self.pinned_waiting:
            self.pinned_waiting = False
            for link in self.links:
                if link.pinned and link.takes(pinned=True):
                    self._send(link, link.pinned, len(link.pinned), now)
        queue = self.queue
        if len(queue) == 1:
            for link in self.links:
                if not link.flight and link.takes():
                    self._send(link, queue, 1, now)
                    return
        while queue:
            roomy = [link for link in self.links if link.takes()]
            if not roomy:
                return
            roomy.sort(key=_load)
            share = -(-len(queue) // len(roomy))
            if not sum(self._send(link, queue, share, now) for link in roomy):
                return

    def _send(self, link: Link, queue: deque[Work], share: int, now: float) -> int:
        """Sends `link` what fits, at most `share` pieces, from the head of `queue`."""
        most = min(share, _BATCH, link.tasks_left(self.plan.max_tasks))
        batch, frames = link.load_batch(queue, most, now)
        if batch:
            self.hub.send(link, frames, batch)
            self.watch.begin()
            if link.overlapping or batch[0].timeout is not None:
                if not link.overlapping:  # it has gone alone, to an idle drone
                    link.deadlines.clear()
                for work in batch:
                    if work.timeout is not None:
                        link.deadlines[work.number] = now + work.timeout
                self._set_timer(link)
        return len(batch)

    def _set_timer(self, link: Link) -> None:
        """For the first of what has a time limit, unless one is set that comes before; that one sets the next."""
        first = min(link.deadlines.values(), default=inf)
        if first < link.timer_at:
            link.timer_at = first
            self.hub.after(first - monotonic(), partial(self._look_at_times, link, first))

    def _look_at_times(self, link: Link, at: float) -> None:
        if link.timer_at == at:
            link.timer_at = inf
        now = monotonic()
        for number, deadline in list(link.deadlines.items()):
            work = link.flight.get(number)
            if work is None or work.done():
                del link.deadlines[number]
            elif deadline <= now:
                del link.deadlines[number]
                self._timed_out(link, work)
        self._set_timer(link)

    def after_turn(self) -> None:
        """Says whether more work could be sent at once, and sees to work that waits behind a busy drone."""
        if self.look_for_end:
            self._end_if_done()
        if self.rooms:
            self.rooms.tell(self.refusal is not None)
        idle = False
        for link in self.links:
            if link.state is State.READY and not link.flight and not link.unresponsive:
                idle = True
                break
        self.hungry = idle or (self.plan.width > 1 and self._could_overlap())
        if idle and not self.queue:
            for link in self.links:
                if len(link.flight) - link.overlapping > 1 and not link.recalled and link.state is State.READY:
                    link.recalled = True
                    self.hub.after(2 * BUDGET, partial(self._recall_if_stuck, link, link.last_heard))

    def _could_overlap(self) -> bool:
        """Is there a drone that could take one more beside what it overlaps? Not before what heads the queue."""
        with suppress(IndexError):
            if not self.queue[0].definition.overlaps:
                return False
        most = self.plan.max_tasks
        return any(link.overlapping and link.takes() and link.tasks_left(most) > 0 for link in self.links)

    def _recall_if_stuck(self, link: Link, last_heard: float) -> None:
        link.recalled = False
        if link.state is State.READY and len(link.flight) > 1 and link.last_heard == last_heard and not self.queue:
            link.recalled = True  # until it answers
            self.hub.send(link, pack_numbers(RECALL))

    def returned(self, link: Link, given_back: tuple[int, ...]) -> None:
        link.recalled = False
        works = [work for number in given_back if (work := link.answered(number)) is not None]
        self.requeue(works)
        self.answered(link)

    def split(self, link: Link, work: Slice, done: int, rest: int, state: int) -> None:
        """A drone has answered the first calls of a slice, and gives the last ones back, if there are any."""
        if state != RUNNING and (not rest or state == FAILED):
            link.answered(work.number)
            return
        current, later = work.split(done, rest)
        followers = []
        if state == RUNNING:
            link.hand_over(work, current)
            if current.count:  # else its last call had just ended: nobody waits for what the drone says of it yet
                followers.append(current)
        else:
            link.answered(work.number)
        if rest:
            if work.done():  # cancelled: it does not begin
                later._settle(CANCELLED, None, None)
            else:
                self.requeue([later])
            followers.append(later)
        work.followers = followers
        if work.done():  # cancelled: who did it may have looked at `followers` before
            for each in followers:
                self.hub.deliver(each.cancel)

    def requeue(self, works: list[Work]) -> None:
        """To the head of their queues, in their order."""
        if self._abandoned:  # nobody will come for them
            for work in works:
                self.hub.deliver(work.cancel)
            return
        for work in reversed(works):
            work.sending = None
            if work.target is None:
                self.queue.appendleft(work)
            else:
                work.target.pinned.appendleft(work)
                self.pinned_waiting = True

    def answered(self, link: Link) -> None:
        """Something of its flight was answered."""
        if link.pinned:
            self.pinned_waiting = True
        if link.state is State.READY and link.tasks_left(self.plan.max_tasks) <= 0:
            self.roster.retire(link)
        self.roster.stop_if_retired(link)
        self.look_for_end = True

    # -- in turns: what another process runs (net/workers.py) -----------------------------------------

    def lend(self, most: int, which: Callable[[Work], bool]) -> list[Work]:
        """Takes from the queue at most so many, of those that `which` is true of: no drone has got them. They count as
        waiting, until they come back or are settled."""
        taken: list[Work] = []
        passed: list[Work] = []
        with suppress(IndexError):
            while len(taken) < most and len(passed) < _PASSED_MOST:
                work = self.queue.popleft()
                if not work.done():
                    (taken if which(work) else passed).append(work)
        self.queue.extendleft(reversed(passed))
        for work in taken:
            work.lent = True
        self._waiting.update(taken)
        return taken

    def come_back(self, works: list[Work]) -> None:
        """They were lent, and not begun."""
        for work in works:
            work.lent = False
        self._waiting.difference_update(works)
        if self.over:
            self.lose(works, self.refusal or RuntimeError(f"{self.plan.name} has ended"), again=False)
        else:
            self.requeue([work for work in works if not work.done()])
        self.look_for_end = True

    def lost(self, works: list[Work], error: BaseException) -> None:
        """They were lent, and perhaps begun: nobody knows what became of them."""
        for work in works:
            work.lent = False
        self._waiting.difference_update(works)
        self.lose(works, error, again=not self.over)
        self.look_for_end = True

    def settled_elsewhere(self, works: list[Work]) -> None:
        self._waiting.difference_update(works)
        self.look_for_end |= self.closing

    # -- in turns: stopping what runs -----------------------------------------------------------------

    def withdraw(self, work: Work) -> None:
        """Its promise was cancelled. In a queue it is passed over; in flight its drone is told."""
        self._waiting.discard(work)
        link = work.link
        if link is not None and work.number in link.flight and link.alive:
            self._interrupt(link, work)
        else:
            work.payload = b""
            self.look_for_end |= self.closing
            if self.rooms is not None:  # it takes no room
                with suppress(ValueError):
                    (self.queue if work.target is None else work.target.pinned).remove(work)

    def _interrupt(self, link: Link, work: Work) -> None:
        self.hub.send(link, pack_numbers(CANCEL, (work.number,)))
        self.hub.after(GRACE, partial(self._kill_if_still, link, work))

    def interrupt(self, link: Link) -> None:
        """Interrupts whatever `link` runs."""
        if link.alive:
            self.hub.send(link, pack_numbers(CANCEL, (0,)))

    def _kill_if_still(self, link: Link, work: Work) -> None:
        # Behind other work in the same drone it is not what holds the drone up.
        if work.number in link.flight and link.alive and link.runs(work.number):
            if all(other.done() for other in link.flight.values()) or not link.overlapping:
                link.launcher.kill(link.number)
            else:  # beside it others run, for which somebody waits, and which would die too: they finish first
                link.hung = True
                self.hub.after(GRACE, partial(self._kill_if_still, link, work))

    def _timed_out(self, link: Link, work: Work) -> None:
        error = TimeoutError(f"{work.definition.label} ran for more than {work.timeout} s on {link.name}")
        self.hub.deliver(partial(work._settle, FINISHED, None, error))
        self._interrupt(link, work)

    # -- in turns: what goes wrong ----------------------------------------------------------------------

    def lose(self, works: list[Work], error: BaseException, *, again: bool) -> None:
        for work in works:
            if work.done():
                work.payload = b""
                continue
            if again and work.retries > 0 and work.target is None and not self._abandoned:
                work.retries -= 1
                work.sending = None
                self.queue.appendleft(work)
            else:
                work.payload = b""
                self.hub.deliver(partial(work._settle, FINISHED, None, another(error)))

    def doubt(self, link: Link) -> None:
        """It has sent what is no message. If that was an answer, what it answered would be waited for for ever."""
        if not link.doubted and link.alive:
            link.doubted = True
            self.hub.after(DOUBT, partial(self._kill_if_it_owes, link, next(iter(link.flight), None)))

    def _kill_if_it_owes(self, link: Link, head: int | None) -> None:
        """`head` was the next that it had to answer, and still is, though it does not run that: so it never will."""
        link.doubted = False
        if not link.flight or not link.alive:
            return
        page, now = link.launcher.page, next(iter(link.flight))
        if now == head and (page.sent(link.slot) == head or page.started(link.slot) != head) and not link.overlapping:
            link.kill("it has sent what is no message, and owes an answer")
        else:
            self.doubt(link)

    def fail(self, error: Exception) -> None:
        """A bug in our own code: better all its work is rejected than anybody waits for ever."""
        log.error("a bug in polycephaly breaks %s", self.plan.name, exc_info=error)
        self.break_(because("a bug in polycephaly", error))

    def break_(self, error: BaseException) -> None:
        """Nothing more can be run: rejects all, refuses more, ends the drones."""
        if self._broken is not None:
            return
        self._broken = error
        self.refusal = error
        if not self.begun.done():
            self.hub.deliver(partial(self.begun._settle, FINISHED, None, another(error)))
        for link in self.links:
            self.lose(list(link.flight.values()), error, again=False)
            self.lose(drained(link.pinned), error, again=False)
        self.lose(drained(self.queue), error, again=False)
        self.abandon()

    def cannot_start(self, error: BaseException) -> None:
        """Before it has begun, the error is its constructor's, and goes there as it is."""
        self.break_(because("no drone can be started", error) if self.begun.done() else error)

    # -- in turns: ending ---------------------------------------------------------------------------------

    def wanted(self) -> int:
        """How many drones it should have."""
        return 0 if self._abandoned or (self.closing and not self._unfinished()) else self.plan.size

    def _close(self, cancel: bool, running: bool) -> None:
        self.closing = self.pinned_waiting = True  # a Ctrl-C may have left pinned work unannounced
        if cancel:
            for work in [*self.queue, *self._waiting, *(work for link in self.links for work in list(link.pinned))]:
                self.hub.deliver(work.cancel)
            for link in self.links:
                for work in link.flight.values():
                    if running or not link.runs(work.number):
                        self.hub.deliver(work.cancel)
        self.look_for_end = True

    def cancel_own(self, link: Link) -> None:
        """What only that drone may do."""
        for work in [*link.pinned, *self._waiting, *link.flight.values()]:
            if work.target is link:
                self.hub.deliver(work.cancel)

    def _unfinished(self) -> bool:
        with suppress(IndexError):
            while self.queue[0].done():  # cancelled while it waited
                self.queue.popleft()
            return True
        return bool(self._waiting or any(link.flight or link.owes() for link in self.links))

    def _ask_for_end(self) -> None:
        self.look_for_end = True

    def _end_if_done(self) -> None:
        """Once a turn, however many things in it may have been the last."""
        self.look_for_end = False
        if not self.closing or self._unfinished():
            return
        for link in list(self.links):
            if link.state is State.READY:
                self.roster.stop(link)
            elif link.state < State.READY:
                self.roster.retire(link)
        if not self.links and not self.over:
            self._end()

    def abandon(self) -> None:
        """Kills every drone now; their work is lost."""
        self.closing = self._abandoned = True
        for work in [*self.queue, *self._waiting]:
            self.hub.deliver(work.cancel)
        self._waiting.clear()
        self.roster.kill_all()
        self.look_for_end = True

    def _end(self) -> None:
        self.over = True
        self.refusal = self.refusal or RuntimeError(f"{self.plan.name} has ended")
        self.roster.end()
        self.hub.crews.remove(self)
        self.hub.deliver(self._finish)

    def _finish(self) -> None:
        if self.finalizer is not None:
            self.finalizer.detach()
        self._reject_all(self.queue, self.refusal)
        self.hub.ending.append(self.ended)
        self.hub.give_back()

    def _reject_all(self, queue: deque[Work], error: BaseException | None) -> None:
        """Not in a turn: callbacks are called. Whoever pops a piece of work rejects it."""
        with suppress(IndexError):
            while True:
                queue.popleft()._settle(FINISHED, None, error and another(error))

    def tell(self, promise: Promise[None]) -> None:
        if not promise.done():
            self.hub.deliver(partial(promise._settle, FINISHED, None, None))

    def explain(self, error: BaseException) -> None:
        """Adds the cure to a `NameError` of a name that this image got after the snapshot."""
        if isinstance(error, UnboundLocalError) or not isinstance(error, NameError):
            return
        name = error.name
        if name and name in main_namespace() and not self.book.snapshot.has(name):
            cure = "start a new Drone" if self.plan.on_death == "end" else "pool.refresh() takes a new one"
            error.args = (
                f"{error.args[0] if error.args else name}: the main image defined it after the snapshot "
                f"from which this drone was started; {cure}, or push it",
            )


def _load(link: Link) -> float:
    return link.load if link.flight else -1.0
