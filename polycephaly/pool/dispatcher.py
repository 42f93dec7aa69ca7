"""A crew: the drones behind one queue, which is what a `Pool` or a `Drone` holds.

    submit (any thread) ──> queue ──dispatch──> link.flight ──RESULTS──> promise
                              ^                     │ recalled, or its drone died before it began
                              └─────────────────────┘

Who may run what: work with a `target` waits in that link's `pinned`, all else in `queue`. A drone
gets as much as `tuning.batch_seconds` of known short work at once; one piece at a time where the
time is long or not known yet. Where one drone turns out busy with work behind it while another is
idle, what it has not begun is recalled.

Which drones there are, and how they start and end, is the roster's business (supervisor.py).

Each piece is at any moment in one place: in a queue, or in one link's flight. It leaves the flight
by its result, by RETURNED, or by its drone's death, and the running page tells which work a dead
drone had begun. So what had not begun is queued again and runs exactly once, and what had is lost
(or run again: `retries`).

`submit` races with the crew's end: it looks at `refusal`, appends, and looks at `over`; the hub
sets `over` and then empties the queue. Whoever pops an entry rejects it, so none is left and none
is rejected twice."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import Lost, another
from ..promises.combining import race
from ..promises.promise import CANCELLED, FINISHED, PENDING, Promise, Signal
from ..runtime.deferred_sigint import DeferredSigint
from ..runtime.reactor import Reactor, lease_hub
from ..runtime.tuning import tuning
from ..store.directory import ObjectDirectory
from ..store.placeholders import PayloadWithRefs
from ..store.references import Serialized
from ..timeline.record import TraceBuffer
from ..wire.functions import FunctionRegistry
from ..wire.messages import CANCEL, FETCH, RECALL, TaskBatch, pack_numbers
from ..wire.output import Listener
from ..wire.pickling import main_namespace
from ..wire.slices import FAILED, RUNNING, SMALL
from .backpressure import BackPressure
from .cancellation import Cancellation
from .config import PoolConfig, TaskOptions
from .drone_handle import DroneHandle, State, drained
from .health import HealthMonitor
from .leases import Leases
from .locality import Locality
from .stall_detection import StallDetector
from .supervisor import Supervisor, because
from .task import Slice, Task

__all__ = ["Dispatcher"]

log = logging.getLogger(__name__)

DOUBT = 0.25  # seconds that an answer may take to come, though one before it was none
_BATCH = 2048
CATCH_UP = (
    1024 - 1
)  # a mask: every so many calls, who submits many of them sees to the drones in between


class Dispatcher:
    """Made in the thread that asks for it, of whose process it takes the snapshot. Raises as
    `Supervisor` does."""

    def __init__(self, plan: PoolConfig) -> None:
        self.plan = plan
        self.output = plan.output
        self.audiences: dict[
            str, Listener
        ] = {}  # by the tag of what they want to hear, instead of `output`
        self.terms = plan.terms
        self._own_terms = plan.terms if plan.terms != (None, 0) else None
        self.queue: deque[Task] = deque()
        self._backlog = _Backlog(self)
        self.hungry = False  # a drone is idle: whoever adds work sees to it
        self.pinned_waiting = False
        self.over = False
        self.closing = False
        self.look_for_end = False
        self.has_promised_to_finish = False  # what it has, before the interpreter ends
        self.finalizer: weakref.finalize[..., Any] | None = None  # of whoever holds it
        self.bond: object = None  # by which it ends with its owner, who has it only weakly
        self.begun: Signal[None] = Signal()
        self.ended: Signal[None] = Signal()
        self.vault = ObjectDirectory(self)
        self.favours = Locality(self)
        self.halts = Cancellation(self)
        self.lending = Leases(self)
        self.stuck = StallDetector(self)
        self.rooms: BackPressure | None = None  # where queues have a limit
        self.careful = (
            self._own_terms is not None or plan.max_queued is not None
        )  # each call has more to look at
        self.record = TraceBuffer()
        self.waiting: set[Task] = (
            set()
        )  # for promises among their arguments; any thread adds, and takes out
        self.held: set[Task] = (
            set()
        )  # for what they take, or lent to another process; in turns only
        self._refusal: BaseException | None = None
        self._broken: BaseException | None = None
        self._abandoned = False
        self.watch = HealthMonitor(self)
        plan.machine.check(plan.size)
        try:
            with DeferredSigint():  # or a Ctrl-C could leave a zygote that nobody knows of
                self.hub: Reactor = lease_hub()
                try:
                    if plan.max_queued is not None:
                        self.rooms = BackPressure(self.hub, plan.max_queued)
                    self.roster = Supervisor(self)
                except BaseException:
                    self.hub.give_back()
                    raise
                self.hub.post(self._begin)
        except KeyboardInterrupt:  # kept back until now
            if hasattr(self, "roster"):
                self.kill()
            raise

    @property
    def refusal(self) -> BaseException | None:
        """Why no more work is taken."""
        return self._refusal

    @refusal.setter
    def refusal(self, why: BaseException) -> None:
        self._refusal = why
        self.careful = True

    @property
    def links(self) -> list[DroneHandle]:
        return self.roster.links

    @property
    def book(self) -> FunctionRegistry:
        return self.roster.book

    # -- any thread --------------------------------------------------------------------------------

    def submit(
        self,
        what: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: DroneHandle | None = None,
        terms: TaskOptions | None = None,
        work: Task | None = None,
    ) -> Task:
        """Takes one piece of work: `work`, if it is given. Raises `RuntimeError` (or
        `BrokenProcessPool`) when closed (broken)."""
        if self.careful:
            self._wait_for_room(target)
            self.check_open()
            terms = terms or self._own_terms
        if target is not None and (target.state >= State.RETIRING or target.retires):
            raise target.farewell()
        if work is None:
            work = Task(self)
        if terms is not None:
            work.timeout, work.retries = terms
        inputs: Sequence[Promise[Any]] = ()
        try:
            book = self.roster.book
            definition = book.define(what)
            for arg in args:
                if type(arg) not in SMALL:
                    inputs = work.capture(definition, args, kwargs, book)
                    break
            else:
                if kwargs:
                    inputs = work.capture(definition, args, kwargs, book)
                else:  # what `capture` would find out, without the call
                    work.definition, work.args = definition, args
            if definition.captures:
                work.take_captured()
        except Exception as error:
            work._settle(FINISHED, None, error)
            return work
        try:
            if (
                target is None and work.args is not None and not inputs
            ):  # `_enqueue`, without the call
                self.queue.append(work)
                if self.hungry:
                    self.hub.serve(self)
                elif not work.number & CATCH_UP:
                    self.hub.catch_up()
                if self.over:
                    self.reject_all(self.queue)
            else:
                if target is not None:
                    work.target = target
                if inputs:
                    self.waiting.add(work)
                    work.wait_for(inputs)
                    if self.over:
                        self._reject_waiting()
                else:
                    self._enqueue(work)
        except BaseException:  # Ctrl-C: nobody will have its promise
            work.cancel()
            raise
        return work

    def _wait_for_room(self, target: DroneHandle | None) -> None:
        if self.rooms is not None:
            self.rooms.wait(
                self._backlog if target is None else target.pinned, lambda: self.refusal is not None
            )

    def close_without(self, holder: object) -> None:
        """Is closed when nobody has `holder` any more."""
        self.finalizer = weakref.finalize(holder, self.close)
        self.finalizer.atexit = False

    def start(self, work: Task) -> None:
        """Takes work that was made elsewhere. Raises as `submit` does."""
        self._wait_for_room(None)
        self.check_open()
        self._enqueue(work)

    def has_room(self) -> bool:
        return self.rooms is None or self.rooms.has(self._backlog)

    def check_open(self) -> None:
        if self.refusal is not None:
            raise another(self.refusal)

    def _enqueue(self, work: Task) -> None:
        target = work.target
        if target is not None:
            self._pin(work, target)
            return
        payload = work.payload  # one look: a turn may take it away, where it is cancelled
        if type(payload) is PayloadWithRefs:
            work.prefers, work.burden = self.vault.home(payload.deposits.values())
        if work.prefers is not None and work.prefers.state < State.RETIRING:
            self.favours.add(work, work.prefers)
            return
        self.queue.append(work)
        self.see_to(work)
        if self.over:
            self.reject_all(self.queue)

    def see_to(self, work: Task) -> None:
        """It was put into a queue."""
        if self.hungry:
            self.hub.serve(self)
        elif not work.number & CATCH_UP:
            self.hub.catch_up()

    def _pin(self, work: Task, target: DroneHandle) -> None:
        target.pinned.append(work)
        self.pinned_waiting = True
        self.hub.wake()
        if target.state is State.DEAD:  # its queue was emptied when it died, perhaps before this
            self.reject_all(target.pinned, target.farewell())

    def filled(self, work: Task) -> None:
        """All for which it waited is there; or it is settled."""
        if work._state == PENDING:
            self._enqueue(work)
        self.waiting.discard(work)
        if self.closing:
            self.hub.post(self._ask_for_end)
        if work.target is not None and work.target.state is State.RETIRING:
            self.hub.post(partial(self.roster.stop_if_retired, work.target))

    def close(self, *, cancel: bool = False, running: bool = False) -> None:
        """No more work; ends when what there is has been done. Takes no lock, so finalizers may
        call it."""
        if self.refusal is None:
            self.refusal = RuntimeError(
                f"cannot schedule new futures after shutdown of {self.plan.name}"
            )
        self.hub.post(partial(self._close, cancel, running))

    def kill(self, why: str = "") -> None:
        """Ends it now, with whatever it runs; errors tell `why`. Takes no lock."""
        if self.refusal is None:
            self.refusal = RuntimeError(f"{self.plan.name} was released{why and ', because '}{why}")
        self.hub.post(partial(self.abandon, why))

    def refresh(self) -> None:
        """New drones from a new snapshot, for all work that is not yet sent."""
        self.check_open()
        renewed: Promise[None] = Promise()
        with DeferredSigint():
            snapshot = self.roster.engine.snapshot()
            self.hub.post(partial(self.roster.renew, snapshot, renewed))
        race(renewed, self.ended).result()
        if not renewed.done():  # it was closed in the meantime
            self.roster.engine.discard(snapshot)
            raise another(self.refusal or RuntimeError(f"{self.plan.name} has ended"))

    def wait_ended(self) -> None:
        """Until nothing of it is left; of the hub neither, if it was the last."""
        if self.hub.left_behind:
            return
        self.ended.result()
        if self.hub.gone:
            self.hub.thread.join()

    def finish(self, *, cancel: bool = False) -> None:
        """Closes it and waits for its end. A Ctrl-C meanwhile, or whatever else a signal's handler
        raises, cancels all that it has, which takes `tuning.grace_seconds` at most; a second one
        kills all."""
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
        """`finish`, awaited. Whoever is cancelled meanwhile cancels all that it has; a second time,
        kills all."""
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
        of_links = sum(
            len(each.flight) + len(each.pinned) + len(each.favoured) for each in self.links
        )
        return len(self.queue) + len(self.waiting) + len(self.held) + of_links

    def somebody_waits(self, work: Task) -> None:
        """For that one, which itself waits for promises."""
        self.stuck.look_soon()

    # -- in turns: sending -------------------------------------------------------------------------

    def _begin(self) -> None:
        self.hub.crews.append(self)
        self.roster.begin()

    def dispatch(self, now: float) -> None:
        if self.pinned_waiting:
            self.pinned_waiting = False
            for link in self.links:
                if link.pinned and link.takes(pinned=True):
                    self.send(link, link.pinned, len(link.pinned), now)
                if link.favoured and link.takes():
                    self.send(link, link.favoured, len(link.favoured), now)
            if self.favours:
                self.favours.look()
        queue = self.queue
        if len(queue) == 1:
            for link in self.links:
                if not link.flight and link.takes():
                    self.send(link, queue, 1, now)
                    return
        while queue:
            roomy = [link for link in self.links if link.takes()]
            if not roomy:
                return
            roomy.sort(key=_load)
            share = -(-len(queue) // len(roomy))
            if not sum(self.send(link, queue, share, now) for link in roomy):
                return

    def send(self, link: DroneHandle, queue: deque[Task], share: int, now: float) -> int:
        """Sends `link` what fits, at most `share` pieces, from the head of `queue`."""
        most = min(share, _BATCH, link.tasks_left(self.plan.max_tasks))
        batch, frames = link.load_batch(queue, most, now)
        if batch:
            link.send(frames, batch)
            self.watch.begin()
            if link.overlapping or batch[0].timeout is not None:
                self.halts.sent(link, batch, now)
        return len(batch)

    def after_turn(self) -> None:
        """Says whether more work could be sent at once, and sees to work that waits behind a busy
        drone."""
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
            if self.favours:
                self.favours.share(self.hub.timers.now())
            for link in self.links:
                if (
                    len(link.flight) - link.overlapping > 1
                    and not link.recalled
                    and link.state is State.READY
                ):
                    link.recalled = True
                    self.hub.after(
                        2 * tuning.batch_seconds,
                        partial(self._recall_if_stuck, link, link.last_heard),
                    )

    def _could_overlap(self) -> bool:
        """Is there a drone that could take one more beside what it overlaps? Not before what heads
        the queue."""
        with suppress(IndexError):
            if not self.queue[0].definition.overlaps:
                return False
        most = self.plan.max_tasks
        return any(
            link.overlapping and link.takes() and link.tasks_left(most) > 0 for link in self.links
        )

    def _recall_if_stuck(self, link: DroneHandle, last_heard: float) -> None:
        link.recalled = False
        if (
            link.state is State.READY
            and len(link.flight) > 1
            and link.last_heard == last_heard
            and not self.queue
        ):
            link.recalled = True  # until it answers
            link.send(pack_numbers(RECALL))

    def returned(self, link: DroneHandle, given_back: tuple[int, ...]) -> None:
        link.recalled = False
        works = [work for number in given_back if (work := link.answered(number)) is not None]
        self.requeue(works)
        self.answered(link)

    def split(self, link: DroneHandle, work: Slice, done: int, rest: int, state: int) -> None:
        """A drone has answered the first calls of a slice, and gives the last ones back, if there
        are any."""
        if state != RUNNING and (not rest or state == FAILED):
            link.answered(work.number)
            return
        current, later = work.split(done, rest)
        followers = []
        if state == RUNNING:
            link.hand_over(work, current)
            if (
                current.count
            ):  # else its last call had just ended: nobody waits for what the drone says of it yet
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

    def requeue(self, works: list[Task]) -> None:
        """To the head of their queues, in their order."""
        if self._abandoned:  # nobody will come for them
            for work in works:
                self.hub.deliver(work.cancel)
            return
        for work in reversed(works):
            work.sending = None
            if work.done():  # who settled it may not have seen that
                work.never_began()
            if work.target is not None:
                work.target.pinned.appendleft(work)
                self.pinned_waiting = True
            elif work.prefers is not None and work.prefers.state < State.RETIRING:
                self.favours.put_back(work, work.prefers)
            else:
                self.queue.appendleft(work)

    def answered(self, link: DroneHandle) -> None:
        """Something of its flight was answered."""
        if link.pinned or self.favours:
            self.pinned_waiting = True
        if (
            link.state is State.READY
            and link.tasks_left(self.plan.max_tasks) <= 0
            and len(link.flight) <= 1
        ):
            self.roster.retire(
                link
            )  # not with more in flight: it would give back what it may still do
        self.roster.stop_if_retired(link)
        self.look_for_end = True

    # -- in turns: work that takes kept values -----------------------------------------------------

    def hold(self, work: Task) -> None:
        """It waits for what it takes, till `go_on`, when that has changed; or is lent. (Whoever has
        just put it into a queue, in `filled`, may not have taken it from `waiting` yet.)"""
        self.held.add(work)

    def waits_for(self, link: DroneHandle) -> bool:
        """Is there work only for that drone, which itself waits for promises, or for what it
        takes?"""
        return any(work.target is link and not work.done() for work in self._not_queued())

    def _not_queued(self) -> list[Task]:
        return [*self.waiting, *self.held]

    def go_on(self, work: Task) -> None:
        self.held.discard(work)
        if work.done():
            self._nothing_waits(work.target)
        elif self._abandoned:
            self.hub.deliver(work.cancel)
        elif work.target is not None and work.target.state is State.DEAD:
            self.reject(work, work.target.farewell)
        else:
            self._enqueue(work)

    def reject(self, work: Task, why: Callable[[], BaseException]) -> None:
        work.payload = b""
        self.hub.deliver(lambda: work._settle(FINISHED, None, why()))
        self.hub.post(partial(self._nothing_waits, work.target))

    def _nothing_waits(self, target: DroneHandle | None) -> None:
        """For that drone, or for any."""
        self.look_for_end = True
        if target is not None:
            self.roster.stop_if_retired(target)

    def fill_again(self, works: list[Task], lost: Lost) -> None:
        """They were sent, and not begun, since what one of them takes is lost: a value that lay
        elsewhere, or else what lay beside the arguments themselves."""
        far = [work for work in works if work.unfilled is not None]
        losers = (
            [] if far else [work for work in works if isinstance(work.payload, Serialized)] or works
        )
        self.lose(losers, lost, again=False)
        self.requeue(
            [work for work in works if work not in far and work not in losers and not work.done()]
        )
        for work in far:
            if not work.done():
                self.waiting.add(work)
                try:
                    work.fill_again(lost)
                except BaseException as error:
                    self.waiting.discard(work)
                    self.hub.deliver(partial(work._settle, FINISHED, None, another(error)))
        self.look_for_end = True

    def fetch_from(self, link: DroneHandle, number: int) -> None:
        """Has `link` pack a value that it keeps."""
        message = TaskBatch()
        message.add(number, FETCH, 0, b"")
        link.send(message.frames())

    # -- in turns: stopping what runs --------------------------------------------------------------

    def withdraw(self, work: Task) -> None:
        """Its promise was cancelled. In a queue it is passed over; in flight its drone is told."""
        self.waiting.discard(work)
        self.held.discard(work)
        link, target = work.link, work.target
        if link is not None and work.number in link.flight and link.alive:
            self.halts.interrupt(link, work)
        else:
            work.payload = b""
            self._nothing_waits(target)
            if self.rooms is not None:  # it takes no room
                favoured = [each.favoured for each in self.links]
                for queue in [self.queue, *favoured] if target is None else [target.pinned]:
                    with suppress(ValueError):
                        queue.remove(work)

    def interrupt(self, link: DroneHandle) -> None:
        """Interrupts whatever `link` runs."""
        if link.alive:
            link.send(pack_numbers(CANCEL, (0,)))

    # -- in turns: what goes wrong -----------------------------------------------------------------

    def lose(self, works: list[Task], error: BaseException, *, again: bool) -> None:
        for work in works:
            if work.done():
                work.never_began()
                continue
            if again and work.retries > 0 and work.target is None and not self._abandoned:
                work.retries -= 1
                work.sending = None
                self.queue.appendleft(work)
            else:
                work.payload = b""
                self.hub.deliver(partial(work._settle, FINISHED, None, another(error)))

    def doubt(self, link: DroneHandle) -> None:
        """It has sent what is no message. If that was an answer, what it answered would be waited
        for for ever."""
        if not link.doubted and link.alive:
            link.doubted = True
            self.hub.after(DOUBT, partial(self._kill_if_it_owes, link, 0))

    def _kill_if_it_owes(self, link: DroneHandle, suspect: int) -> None:
        """`suspect`: what it has answered already, or passed over, as it seemed at the last look,
        and was to answer next. If it still is, it never will. On a busy machine it may only not
        have come to that yet: then it could run."""
        if not link.flight or not link.alive:
            link.doubted = False
            return
        head = next(iter(link.flight))
        started = link.started()
        is_over = link.sent() == head or (
            started != head and (started in link.flight or link.waits())
        )
        if link.overlapping or not is_over:
            head = 0
        if head and head == suspect:
            link.kill("it has sent what is no message, and owes an answer")
        else:
            self.hub.after(DOUBT, partial(self._kill_if_it_owes, link, head))

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
        self.lose(self.favours.drained(), error, again=False)
        self.lose(drained(self.queue), error, again=False)
        self.abandon()

    def cannot_start(self, error: BaseException) -> None:
        """Before it has begun, the error is its constructor's, and goes there as it is."""
        self.break_(because("no drone can be started", error) if self.begun.done() else error)

    # -- in turns: ending --------------------------------------------------------------------------

    def wanted(self) -> int:
        """How many drones it should have."""
        return 0 if self._abandoned or (self.closing and not self._unfinished()) else self.plan.size

    def _close(self, cancel: bool, running: bool) -> None:
        self.closing = self.pinned_waiting = True  # a Ctrl-C may have left pinned work unannounced
        if cancel:
            for work in [*self.queue, *self._not_queued()]:
                self.hub.deliver(work.cancel)
            for link in self.links:
                for work in [*link.pinned, *link.favoured]:
                    self.hub.deliver(work.cancel)
                for work in reversed(
                    link.flight.values()
                ):  # the first may run: it would begin the next one
                    if running or not link.runs(work.number):
                        self.hub.deliver(work.cancel)
        self.look_for_end = True

    def cancel_own(self, link: DroneHandle) -> None:
        """What only that drone may do."""
        for work in [*link.pinned, *self._not_queued(), *reversed(link.flight.values())]:
            if work.target is link:
                self.hub.deliver(work.cancel)

    def _unfinished(self) -> bool:
        if (
            self._abandoned
        ):  # what is added by who had looked at `refusal` before is rejected when it is over
            return False
        if self.waiting or self.held:  # first: what waits no more is in a queue by then
            return True
        with suppress(IndexError):
            while self.queue[0].done():  # cancelled while it waited
                self.queue.popleft()
            return True
        return any(link.flight or link.owes() for link in self.links)

    def _ask_for_end(self) -> None:
        self.look_for_end = True

    def _end_if_done(self) -> None:
        """Once a turn, however many things in it may have been the last."""
        self.look_for_end = False
        if not self.closing or self._unfinished():
            if self.closing and self.waiting:
                self.stuck.look_later()
            return
        for link in list(self.links):
            if link.state is State.READY:
                self.roster.stop(link)
            elif link.state < State.READY:
                self.roster.retire(link)
            else:  # what it waited for may have been cancelled
                self.roster.stop_if_retired(link)
        if not self.links and not self.over:
            self._end()

    def abandon(self, why: str = "") -> None:
        """Kills every drone now; their work is lost. Their deaths tell `why`."""
        self.closing = self._abandoned = True
        for work in [*self.queue, *self._not_queued()]:
            self.hub.deliver(work.cancel)
        self.waiting.clear()
        self.held.clear()
        self.roster.kill_all(why)
        self.look_for_end = True

    def _end(self) -> None:
        self.over = True
        self.refusal = self.refusal or RuntimeError(f"{self.plan.name} has ended")
        self.roster.end()
        self.vault.close()
        self.hub.crews.remove(self)
        self.hub.deliver(self._finish)

    def _finish(self) -> None:
        if self.finalizer is not None:
            self.finalizer.detach()
        self.reject_all(self.queue)
        self._reject_waiting()
        self.hub.ending.append(self.ended)
        self.hub.give_back()

    def reject_all(self, queue: deque[Task], error: BaseException | None = None) -> None:
        """Not in a turn: callbacks are called. Whoever pops a piece of work rejects it."""
        error = error or self.refusal
        with suppress(IndexError):
            while True:
                queue.popleft()._settle(FINISHED, None, error and another(error))

    def _reject_waiting(self) -> None:
        """As `reject_all`: those that were added when it had been abandoned."""
        for work in [*self.waiting]:
            work._settle(FINISHED, None, self.refusal and another(self.refusal))
            work.let_go()
            self.waiting.discard(work)

    def tell(self, promise: Promise[None]) -> None:
        if not promise.done():
            self.hub.deliver(partial(promise._settle, FINISHED, None, None))

    def explain(self, error: BaseException) -> None:
        """Adds the cure to a `NameError` of a name that this image got after the snapshot."""
        if isinstance(error, UnboundLocalError) or not isinstance(error, NameError):
            return
        name = error.name
        if name and name in main_namespace() and not self.book.snapshot.has(name):
            left_out = self.roster.engine.left_out(name)
            if left_out:
                error.args = (
                    f"{error.args[0] if error.args else name}: the drones have it not, as {left_out}",
                )
                return
            lone = self.plan.on_death == "end"
            cure = (
                "start a new Drone (in a pool: pool.refresh())"
                if lone
                else "pool.refresh() takes a new one"
            )
            error.args = (
                f"{error.args[0] if error.args else name}: the main image defined it after the snapshot "
                f"from which this drone was started; {cure}, or push it",
            )


class _Backlog:
    """Work that any drone may run."""

    def __init__(self, crew: Dispatcher) -> None:
        self._crew = crew

    def __len__(self) -> int:
        crew = self._crew
        return len(crew.queue) + len(crew.favours)


def _load(link: DroneHandle) -> float:
    return link.load if link.flight else -1.0
