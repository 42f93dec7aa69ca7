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
from ..runtime.reactor import Reactor, lease_reactor
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

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.output = config.output
        self.output_listeners: dict[
            str, Listener
        ] = {}  # by the tag of what they want to hear, instead of `output`
        self.task_options = config.task_options
        self._own_terms = config.task_options if config.task_options != (None, 0) else None
        self.queue: deque[Task] = deque()
        self._backlog = _Backlog(self)
        self.hungry = False  # a drone is idle: whoever adds work sees to it
        self.dedicated_waiting = False
        self.over = False
        self.closing = False
        self.look_for_end = False
        self.has_promised_to_finish = False  # what it has, before the interpreter ends
        self.finalizer: weakref.finalize[..., Any] | None = None  # of whoever holds it
        self.bond: object = None  # by which it ends with its owner, who has it only weakly
        self.begun: Signal[None] = Signal()
        self.ended: Signal[None] = Signal()
        self.directory = ObjectDirectory(self)
        self.locality = Locality(self)
        self.cancellation = Cancellation(self)
        self.leases = Leases(self)
        self.stall_detector = StallDetector(self)
        self.backpressure: BackPressure | None = None  # where queues have a limit
        self.careful = (
            self._own_terms is not None or config.max_queued is not None
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
        config.machine.check(config.size)
        try:
            with DeferredSigint():  # or a Ctrl-C could leave a zygote that nobody knows of
                self.reactor: Reactor = lease_reactor()
                try:
                    if config.max_queued is not None:
                        self.backpressure = BackPressure(self.reactor, config.max_queued)
                    self.supervisor = Supervisor(self)
                except BaseException:
                    self.reactor.give_back()
                    raise
                self.reactor.post(self._begin)
        except KeyboardInterrupt:  # kept back until now
            if hasattr(self, "supervisor"):
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
    def handles(self) -> list[DroneHandle]:
        return self.supervisor.handles

    @property
    def registry(self) -> FunctionRegistry:
        return self.supervisor.registry

    # -- any thread --------------------------------------------------------------------------------

    def submit(
        self,
        what: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: DroneHandle | None = None,
        task_options: TaskOptions | None = None,
        task: Task | None = None,
    ) -> Task:
        """Takes one piece of work: `work`, if it is given. Raises `RuntimeError` (or
        `BrokenProcessPool`) when closed (broken)."""
        if self.careful:
            self._wait_for_room(target)
            self.check_open()
            task_options = task_options or self._own_terms
        if target is not None and (target.state >= State.RETIRING or target.retires):
            raise target.closed_error()
        if task is None:
            task = Task(self)
        if task_options is not None:
            task.timeout, task.retries = task_options
        inputs: Sequence[Promise[Any]] = ()
        try:
            registry = self.supervisor.registry
            definition = registry.define(what)
            for arg in args:
                if type(arg) not in SMALL:
                    inputs = task.capture(definition, args, kwargs, registry)
                    break
            else:
                if kwargs:
                    inputs = task.capture(definition, args, kwargs, registry)
                else:  # what `capture` would find out, without the call
                    task.definition, task.args = definition, args
            if definition.captures:
                task.take_captured()
        except Exception as error:
            task._settle(FINISHED, None, error)
            return task
        try:
            if (
                target is None and task.args is not None and not inputs
            ):  # `_enqueue`, without the call
                self.queue.append(task)
                if self.hungry:
                    self.reactor.serve(self)
                elif not task.number & CATCH_UP:
                    self.reactor.catch_up()
                if self.over:
                    self.reject_all(self.queue)
            else:
                if target is not None:
                    task.target = target
                if inputs:
                    self.waiting.add(task)
                    task.wait_for(inputs)
                    if self.over:
                        self._reject_waiting()
                else:
                    self._enqueue(task)
        except BaseException:  # Ctrl-C: nobody will have its promise
            task.cancel()
            raise
        return task

    def _wait_for_room(self, target: DroneHandle | None) -> None:
        if self.backpressure is not None:
            self.backpressure.wait(
                self._backlog if target is None else target.dedicated,
                lambda: self.refusal is not None,
            )

    def close_without(self, holder: object) -> None:
        """Is closed when nobody has `holder` any more."""
        self.finalizer = weakref.finalize(holder, self.close)
        self.finalizer.atexit = False

    def start(self, task: Task) -> None:
        """Takes work that was made elsewhere. Raises as `submit` does."""
        self._wait_for_room(None)
        self.check_open()
        self._enqueue(task)

    def has_room(self) -> bool:
        return self.backpressure is None or self.backpressure.has(self._backlog)

    def check_open(self) -> None:
        if self.refusal is not None:
            raise another(self.refusal)

    def _enqueue(self, task: Task) -> None:
        target = task.target
        if target is not None:
            self._pin(task, target)
            return
        payload = task.payload  # one look: a turn may take it away, where it is cancelled
        if type(payload) is PayloadWithRefs:
            task.prefers, task.burden = self.directory.home(payload.remote_objects.values())
        if task.prefers is not None and task.prefers.state < State.RETIRING:
            self.locality.add(task, task.prefers)
            return
        self.queue.append(task)
        self.see_to(task)
        if self.over:
            self.reject_all(self.queue)

    def see_to(self, task: Task) -> None:
        """It was put into a queue."""
        if self.hungry:
            self.reactor.serve(self)
        elif not task.number & CATCH_UP:
            self.reactor.catch_up()

    def _pin(self, task: Task, target: DroneHandle) -> None:
        target.dedicated.append(task)
        self.dedicated_waiting = True
        self.reactor.wake()
        if target.state is State.DEAD:  # its queue was emptied when it died, perhaps before this
            self.reject_all(target.dedicated, target.closed_error())

    def filled(self, task: Task) -> None:
        """All for which it waited is there; or it is settled."""
        if task._state == PENDING:
            self._enqueue(task)
        self.waiting.discard(task)
        if self.closing:
            self.reactor.post(self._ask_for_end)
        if task.target is not None and task.target.state is State.RETIRING:
            self.reactor.post(partial(self.supervisor.stop_if_retired, task.target))

    def close(self, *, cancel: bool = False, running: bool = False) -> None:
        """No more work; ends when what there is has been done. Takes no lock, so finalizers may
        call it."""
        if self.refusal is None:
            self.refusal = RuntimeError(
                f"cannot schedule new futures after shutdown of {self.config.name}"
            )
        self.reactor.post(partial(self._close, cancel, running))

    def kill(self, why: str = "") -> None:
        """Ends it now, with whatever it runs; errors tell `why`. Takes no lock."""
        if self.refusal is None:
            self.refusal = RuntimeError(
                f"{self.config.name} was released{why and ', because '}{why}"
            )
        self.reactor.post(partial(self.abandon, why))

    def refresh(self) -> None:
        """New drones from a new snapshot, for all work that is not yet sent."""
        self.check_open()
        renewed: Promise[None] = Promise()
        with DeferredSigint():
            snapshot = self.supervisor.engine.snapshot()
            self.reactor.post(partial(self.supervisor.renew, snapshot, renewed))
        race(renewed, self.ended).result()
        if not renewed.done():  # it was closed in the meantime
            self.supervisor.engine.discard(snapshot)
            raise another(self.refusal or RuntimeError(f"{self.config.name} has ended"))

    def wait_ended(self) -> None:
        """Until nothing of it is left; of the hub neither, if it was the last."""
        if self.reactor.left_behind:
            return
        self.ended.result()
        if self.reactor.gone:
            self.reactor.thread.join()

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
            if not self.reactor.left_behind:
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
            len(each.in_flight) + len(each.dedicated) + len(each.preferred) for each in self.handles
        )
        return len(self.queue) + len(self.waiting) + len(self.held) + of_links

    def somebody_waits(self, task: Task) -> None:
        """For that one, which itself waits for promises."""
        self.stall_detector.look_soon()

    # -- in turns: sending -------------------------------------------------------------------------

    def _begin(self) -> None:
        self.reactor.dispatchers.append(self)
        self.supervisor.begin()

    def dispatch(self, now: float) -> None:
        if self.dedicated_waiting:
            self.dedicated_waiting = False
            for handle in self.handles:
                if handle.dedicated and handle.takes(dedicated=True):
                    self.send(handle, handle.dedicated, len(handle.dedicated), now)
                if handle.preferred and handle.takes():
                    self.send(handle, handle.preferred, len(handle.preferred), now)
            if self.locality:
                self.locality.look()
        queue = self.queue
        if len(queue) == 1:
            for handle in self.handles:
                if not handle.in_flight and handle.takes():
                    self.send(handle, queue, 1, now)
                    return
        while queue:
            roomy = [handle for handle in self.handles if handle.takes()]
            if not roomy:
                return
            roomy.sort(key=_load)
            share = -(-len(queue) // len(roomy))
            if not sum(self.send(handle, queue, share, now) for handle in roomy):
                return

    def send(self, handle: DroneHandle, queue: deque[Task], share: int, now: float) -> int:
        """Sends `link` what fits, at most `share` pieces, from the head of `queue`."""
        most = min(share, _BATCH, handle.tasks_left(self.config.max_tasks))
        batch, frames = handle.load_batch(queue, most, now)
        if batch:
            handle.send(frames, batch)
            self.watch.begin()
            if handle.overlapping or batch[0].timeout is not None:
                self.cancellation.sent(handle, batch, now)
        return len(batch)

    def after_turn(self) -> None:
        """Says whether more work could be sent at once, and sees to work that waits behind a busy
        drone."""
        if self.look_for_end:
            self._end_if_done()
        if self.backpressure:
            self.backpressure.tell(self.refusal is not None)
        idle = False
        for handle in self.handles:
            if handle.state is State.READY and not handle.in_flight and not handle.unresponsive:
                idle = True
                break
        self.hungry = idle or (self.config.width > 1 and self._could_overlap())
        if idle and not self.queue:
            if self.locality:
                self.locality.share(self.reactor.timers.now())
            for handle in self.handles:
                if (
                    len(handle.in_flight) - handle.overlapping > 1
                    and not handle.recalled
                    and handle.state is State.READY
                ):
                    handle.recalled = True
                    self.reactor.after(
                        2 * tuning.batch_seconds,
                        partial(self._recall_if_stuck, handle, handle.last_heard),
                    )

    def _could_overlap(self) -> bool:
        """Is there a drone that could take one more beside what it overlaps? Not before what heads
        the queue."""
        with suppress(IndexError):
            if not self.queue[0].definition.overlaps:
                return False
        most = self.config.max_tasks
        return any(
            handle.overlapping and handle.takes() and handle.tasks_left(most) > 0
            for handle in self.handles
        )

    def _recall_if_stuck(self, handle: DroneHandle, last_heard: float) -> None:
        handle.recalled = False
        if (
            handle.state is State.READY
            and len(handle.in_flight) > 1
            and handle.last_heard == last_heard
            and not self.queue
        ):
            handle.recalled = True  # until it answers
            handle.send(pack_numbers(RECALL))

    def returned(self, handle: DroneHandle, given_back: tuple[int, ...]) -> None:
        handle.recalled = False
        tasks = [task for number in given_back if (task := handle.answered(number)) is not None]
        self.requeue(tasks)
        self.answered(handle)

    def split(self, handle: DroneHandle, task: Slice, done: int, rest: int, state: int) -> None:
        """A drone has answered the first calls of a slice, and gives the last ones back, if there
        are any."""
        if state != RUNNING and (not rest or state == FAILED):
            handle.answered(task.number)
            return
        current, later = task.split(done, rest)
        followers = []
        if state == RUNNING:
            handle.hand_over(task, current)
            if (
                current.count
            ):  # else its last call had just ended: nobody waits for what the drone says of it yet
                followers.append(current)
        else:
            handle.answered(task.number)
        if rest:
            if task.done():  # cancelled: it does not begin
                later._settle(CANCELLED, None, None)
            else:
                self.requeue([later])
            followers.append(later)
        task.followers = followers
        if task.done():  # cancelled: who did it may have looked at `followers` before
            for each in followers:
                self.reactor.deliver(each.cancel)

    def requeue(self, tasks: list[Task]) -> None:
        """To the head of their queues, in their order."""
        if self._abandoned:  # nobody will come for them
            for task in tasks:
                self.reactor.deliver(task.cancel)
            return
        for task in reversed(tasks):
            task.sending = None
            if task.done():  # who settled it may not have seen that
                task.never_began()
            if task.target is not None:
                task.target.dedicated.appendleft(task)
                self.dedicated_waiting = True
            elif task.prefers is not None and task.prefers.state < State.RETIRING:
                self.locality.put_back(task, task.prefers)
            else:
                self.queue.appendleft(task)

    def answered(self, handle: DroneHandle) -> None:
        """Something of its flight was answered."""
        if handle.dedicated or self.locality:
            self.dedicated_waiting = True
        if (
            handle.state is State.READY
            and handle.tasks_left(self.config.max_tasks) <= 0
            and len(handle.in_flight) <= 1
        ):
            self.supervisor.retire(
                handle
            )  # not with more in flight: it would give back what it may still do
        self.supervisor.stop_if_retired(handle)
        self.look_for_end = True

    # -- in turns: work that takes kept values -----------------------------------------------------

    def hold(self, task: Task) -> None:
        """It waits for what it takes, till `go_on`, when that has changed; or is lent. (Whoever has
        just put it into a queue, in `filled`, may not have taken it from `waiting` yet.)"""
        self.held.add(task)

    def waits_for(self, handle: DroneHandle) -> bool:
        """Is there work only for that drone, which itself waits for promises, or for what it
        takes?"""
        return any(task.target is handle and not task.done() for task in self._not_queued())

    def _not_queued(self) -> list[Task]:
        return [*self.waiting, *self.held]

    def go_on(self, task: Task) -> None:
        self.held.discard(task)
        if task.done():
            self._nothing_waits(task.target)
        elif self._abandoned:
            self.reactor.deliver(task.cancel)
        elif task.target is not None and task.target.state is State.DEAD:
            self.reject(task, task.target.closed_error)
        else:
            self._enqueue(task)

    def reject(self, task: Task, why: Callable[[], BaseException]) -> None:
        task.payload = b""
        self.reactor.deliver(lambda: task._settle(FINISHED, None, why()))
        self.reactor.post(partial(self._nothing_waits, task.target))

    def _nothing_waits(self, target: DroneHandle | None) -> None:
        """For that drone, or for any."""
        self.look_for_end = True
        if target is not None:
            self.supervisor.stop_if_retired(target)

    def fill_again(self, tasks: list[Task], lost: Lost) -> None:
        """They were sent, and not begun, since what one of them takes is lost: a value that lay
        elsewhere, or else what lay beside the arguments themselves."""
        far = [task for task in tasks if task.unfilled is not None]
        losers = (
            [] if far else [task for task in tasks if isinstance(task.payload, Serialized)] or tasks
        )
        self.lose(losers, lost, again=False)
        self.requeue(
            [task for task in tasks if task not in far and task not in losers and not task.done()]
        )
        for task in far:
            if not task.done():
                self.waiting.add(task)
                try:
                    task.fill_again(lost)
                except BaseException as error:
                    self.waiting.discard(task)
                    self.reactor.deliver(partial(task._settle, FINISHED, None, another(error)))
        self.look_for_end = True

    def fetch_from(self, handle: DroneHandle, number: int) -> None:
        """Has `link` pack a value that it keeps."""
        message = TaskBatch()
        message.add(number, FETCH, 0, b"")
        handle.send(message.frames())

    # -- in turns: stopping what runs --------------------------------------------------------------

    def withdraw(self, task: Task) -> None:
        """Its promise was cancelled. In a queue it is passed over; in flight its drone is told."""
        self.waiting.discard(task)
        self.held.discard(task)
        handle, target = task.handle, task.target
        if handle is not None and task.number in handle.in_flight and handle.alive:
            self.cancellation.interrupt(handle, task)
        else:
            task.payload = b""
            self._nothing_waits(target)
            if self.backpressure is not None:  # it takes no room
                preferred = [each.preferred for each in self.handles]
                for queue in [self.queue, *preferred] if target is None else [target.dedicated]:
                    with suppress(ValueError):
                        queue.remove(task)

    def interrupt(self, handle: DroneHandle) -> None:
        """Interrupts whatever `link` runs."""
        if handle.alive:
            handle.send(pack_numbers(CANCEL, (0,)))

    # -- in turns: what goes wrong -----------------------------------------------------------------

    def lose(self, tasks: list[Task], error: BaseException, *, again: bool) -> None:
        for task in tasks:
            if task.done():
                task.never_began()
                continue
            if again and task.retries > 0 and task.target is None and not self._abandoned:
                task.retries -= 1
                task.sending = None
                self.queue.appendleft(task)
            else:
                task.payload = b""
                self.reactor.deliver(partial(task._settle, FINISHED, None, another(error)))

    def doubt(self, handle: DroneHandle) -> None:
        """It has sent what is no message. If that was an answer, what it answered would be waited
        for for ever."""
        if not handle.doubted and handle.alive:
            handle.doubted = True
            self.reactor.after(DOUBT, partial(self._kill_if_it_owes, handle, 0))

    def _kill_if_it_owes(self, handle: DroneHandle, suspect: int) -> None:
        """`suspect`: what it has answered already, or passed over, as it seemed at the last look,
        and was to answer next. If it still is, it never will. On a busy machine it may only not
        have come to that yet: then it could run."""
        if not handle.in_flight or not handle.alive:
            handle.doubted = False
            return
        head = next(iter(handle.in_flight))
        started = handle.started()
        is_over = handle.sent() == head or (
            started != head and (started in handle.in_flight or handle.waits())
        )
        if handle.overlapping or not is_over:
            head = 0
        if head and head == suspect:
            handle.kill("it has sent what is no message, and owes an answer")
        else:
            self.reactor.after(DOUBT, partial(self._kill_if_it_owes, handle, head))

    def fail(self, error: Exception) -> None:
        """A bug in our own code: better all its work is rejected than anybody waits for ever."""
        log.error("a bug in polycephaly breaks %s", self.config.name, exc_info=error)
        self.break_(because("a bug in polycephaly", error))

    def break_(self, error: BaseException) -> None:
        """Nothing more can be run: rejects all, refuses more, ends the drones."""
        if self._broken is not None:
            return
        self._broken = error
        self.refusal = error
        if not self.begun.done():
            self.reactor.deliver(partial(self.begun._settle, FINISHED, None, another(error)))
        for handle in self.handles:
            self.lose(list(handle.in_flight.values()), error, again=False)
            self.lose(drained(handle.dedicated), error, again=False)
        self.lose(self.locality.drained(), error, again=False)
        self.lose(drained(self.queue), error, again=False)
        self.abandon()

    def cannot_start(self, error: BaseException) -> None:
        """Before it has begun, the error is its constructor's, and goes there as it is."""
        self.break_(because("no drone can be started", error) if self.begun.done() else error)

    # -- in turns: ending --------------------------------------------------------------------------

    def wanted(self) -> int:
        """How many drones it should have."""
        return (
            0 if self._abandoned or (self.closing and not self._unfinished()) else self.config.size
        )

    def _close(self, cancel: bool, running: bool) -> None:
        self.closing = self.dedicated_waiting = (
            True  # a Ctrl-C may have left pinned work unannounced
        )
        if cancel:
            for task in [*self.queue, *self._not_queued()]:
                self.reactor.deliver(task.cancel)
            for handle in self.handles:
                for task in [*handle.dedicated, *handle.preferred]:
                    self.reactor.deliver(task.cancel)
                for task in reversed(
                    handle.in_flight.values()
                ):  # the first may run: it would begin the next one
                    if running or not handle.runs(task.number):
                        self.reactor.deliver(task.cancel)
        self.look_for_end = True

    def cancel_own(self, handle: DroneHandle) -> None:
        """What only that drone may do."""
        for task in [*handle.dedicated, *self._not_queued(), *reversed(handle.in_flight.values())]:
            if task.target is handle:
                self.reactor.deliver(task.cancel)

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
        return any(handle.in_flight or handle.owes() for handle in self.handles)

    def _ask_for_end(self) -> None:
        self.look_for_end = True

    def _end_if_done(self) -> None:
        """Once a turn, however many things in it may have been the last."""
        self.look_for_end = False
        if not self.closing or self._unfinished():
            if self.closing and self.waiting:
                self.stall_detector.look_later()
            return
        for handle in list(self.handles):
            if handle.state is State.READY:
                self.supervisor.stop(handle)
            elif handle.state < State.READY:
                self.supervisor.retire(handle)
            else:  # what it waited for may have been cancelled
                self.supervisor.stop_if_retired(handle)
        if not self.handles and not self.over:
            self._end()

    def abandon(self, why: str = "") -> None:
        """Kills every drone now; their work is lost. Their deaths tell `why`."""
        self.closing = self._abandoned = True
        for task in [*self.queue, *self._not_queued()]:
            self.reactor.deliver(task.cancel)
        self.waiting.clear()
        self.held.clear()
        self.supervisor.kill_all(why)
        self.look_for_end = True

    def _end(self) -> None:
        self.over = True
        self.refusal = self.refusal or RuntimeError(f"{self.config.name} has ended")
        self.supervisor.end()
        self.directory.close()
        self.reactor.dispatchers.remove(self)
        self.reactor.deliver(self._finish)

    def _finish(self) -> None:
        if self.finalizer is not None:
            self.finalizer.detach()
        self.reject_all(self.queue)
        self._reject_waiting()
        self.reactor.ending.append(self.ended)
        self.reactor.give_back()

    def reject_all(self, queue: deque[Task], error: BaseException | None = None) -> None:
        """Not in a turn: callbacks are called. Whoever pops a piece of work rejects it."""
        error = error or self.refusal
        with suppress(IndexError):
            while True:
                queue.popleft()._settle(FINISHED, None, error and another(error))

    def _reject_waiting(self) -> None:
        """As `reject_all`: those that were added when it had been abandoned."""
        for task in [*self.waiting]:
            task._settle(FINISHED, None, self.refusal and another(self.refusal))
            task.let_go()
            self.waiting.discard(task)

    def tell(self, promise: Promise[None]) -> None:
        if not promise.done():
            self.reactor.deliver(partial(promise._settle, FINISHED, None, None))

    def explain(self, error: BaseException) -> None:
        """Adds the cure to a `NameError` of a name that this image got after the snapshot."""
        if isinstance(error, UnboundLocalError) or not isinstance(error, NameError):
            return
        name = error.name
        if name and name in main_namespace() and not self.registry.snapshot.has(name):
            left_out = self.supervisor.engine.left_out(name)
            if left_out:
                error.args = (
                    f"{error.args[0] if error.args else name}: the drones have it not, as {left_out}",
                )
                return
            lone = self.config.on_death == "end"
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

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def __len__(self) -> int:
        dispatcher = self._dispatcher
        return len(dispatcher.queue) + len(dispatcher.locality)


def _load(handle: DroneHandle) -> float:
    return handle.load if handle.in_flight else -1.0
