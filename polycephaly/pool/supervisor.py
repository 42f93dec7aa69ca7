"""The roster: which drones a crew has, from their start to their end.

    _begin ──> Launcher.start ──> STARTING ──HELLO──> PREPARING (initializer) ──> READY
                                                                                    │ max_tasks, refresh, release
    slot and name free again <── DEAD <──exited── STOPPING <──STOP, when all is answered── RETIRING

A drone that dies is taken off, what it had not begun goes back to the crew, and another takes its
place, from the same snapshot. Starts that fail are counted; after a few in a row the crew breaks,
with the reason. How drones are started, and who tells that they have ended, is the engine's
business (engine.py).

All of this happens in turns of the hub.
"""

from __future__ import annotations

import itertools
import logging
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import DroneDied
from ..promises.promise import Promise
from ..wire.functions import FunctionRegistry
from ..wire.messages import RECALL, STOP, pack_numbers
from .drone_handle import DroneHandle, State, drained
from .handlers import print_lines
from .task import Task

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["Supervisor", "because"]

log = logging.getLogger(__name__)

STOP_GRACE = 5.0  # seconds for a drone's exit handlers
IN_TRANSIT = 0.25  # seconds that results which a dead drone had sent may still take
START_TRIES = 3
KILLED_TRIES = 100  # in a row, by somebody else
TRY_AGAIN = 1.0  # seconds, where a drone could not be started and others are there


class Supervisor:
    def __init__(self, crew: Dispatcher) -> None:
        """Takes the snapshot, in the calling thread. Raises `OSError` where the machine's limits
        forbid it."""
        self._crew = crew
        self._plan = crew.plan
        self._hub = crew.hub
        self.links: list[DroneHandle] = []
        self._numbers = itertools.count(1)
        self.first: DroneHandle | None = None
        self._failed_starts = 0
        self.too_large_so_far = 0  # drones in a row
        self._renewals: list[Promise[None]] = []  # refreshes that wait for their drones
        self.book: FunctionRegistry
        self.engine = self._plan.machine.open(self)
        try:
            self._initializer = self._capture_initializer()
        except BaseException:
            self.engine.end()
            raise

    @property
    def crew(self) -> Dispatcher:
        return self._crew

    def _capture_initializer(self) -> Callable[[], Task] | None:
        """Pickles it once, as any call's arguments are: now. Raises what its pickling raises."""
        initializer, initargs = self._plan.initializer, self._plan.initargs
        if initializer is None:
            return None
        initializer, initargs = self.engine.initializer(initializer, initargs)
        definition = self.book.define(initializer)
        first = Task(self._crew)
        if first.capture(definition, initargs, {}, self.book):
            raise TypeError(
                f"a promise is among the initargs of {definition.label}: give its value"
            )

        def once_more() -> Task:
            work = Task(self._crew)
            work.definition, work.args, work.kind, work.payload = (
                definition,
                first.args,
                first.kind,
                first.payload,
            )
            return work

        return once_more

    def fail(self, error: Exception) -> None:
        self._crew.fail(error)

    # -- starting ----------------------------------------------------------------------------------

    def begin(self) -> None:
        self.engine.begin()
        self.fill_up()

    def fill_up(self) -> None:
        """Starts drones until there are as many as wanted; those on their way out do not count."""
        if not self.engine.can_start() or (
            self._plan.on_death == "end" and self._crew.begun.done()
        ):
            return
        have = sum(each.state < State.RETIRING for each in self.links)
        for _ in range(self._crew.wanted() - have):
            if not self.engine.can_start() or not self._start_one():
                return

    def _start_one(self) -> bool:
        taken = {each.name for each in self.links if each.state < State.RETIRING}
        index = next(i for i in itertools.count() if self._plan.drone_name(i) not in taken)
        link = self.engine.start(next(self._numbers), self._plan.drone_name(index), index)
        if link is None:
            return False
        self.links.append(link)
        self._crew.watch.begin()
        self.first = self.first or link
        return True

    def cannot_start(self, error: BaseException) -> None:
        """A drone could not even be started. Where others are there, it is tried again."""
        if self._crew.begun.done() and any(each.state is State.READY for each in self.links):
            log.warning("%s goes on with fewer drones for a while: %s", self._plan.name, error)
            self._hub.after(TRY_AGAIN, self.fill_up)
        else:
            self._crew.cannot_start(error)

    def started(self, link: DroneHandle, pid: int) -> None:
        link.pid = pid
        self._crew.watch.begin()  # where no zygote starts it, there was nothing to look at yet
        self._crew.tell(link.born)
        if all(each.pid for each in self.links):
            self._crew.tell(self._crew.begun)
            while self._renewals:
                self._crew.tell(self._renewals.pop())

    def not_started(self, link: DroneHandle, error: BaseException) -> None:
        self._remove(link)
        self._crew.cannot_start(error)

    def hello(self, link: DroneHandle) -> None:
        """The drone is up: it gets its initializer first, if there is one."""
        if link.state is not State.STARTING:
            return
        if self._initializer is None:
            self._ready(link)
            return
        link.state = State.PREPARING
        work = self._initializer()
        work.target = link
        work._hook(lambda promise: self._hub.post(partial(self._prepared, link, promise)))
        batch, frames = link.load_batch(deque([work]), 1, self._hub.timers.now())
        link.send(frames, batch)

    def _prepared(self, link: DroneHandle, promise: Promise[Any]) -> None:
        if link.state is not State.PREPARING:
            return
        if promise._exception is None:
            self._ready(link)
        else:
            self.stop(link)
            self._start_failed(
                because(f"the initializer of {self._plan.name} failed", promise._exception)
            )

    def _ready(self, link: DroneHandle) -> None:
        link.state = State.READY
        link.tasks_done = 0  # its initializer does not count
        self._failed_starts = 0
        if (
            link.pinned or self._crew.favours
        ):  # and no `|=`, between whose two halves others may say it
            self._crew.pinned_waiting = True
        self._crew.look_for_end = True
        if link.retires:
            self.retire(link)

    def too_large(self, link: DroneHandle, what: str) -> None:
        """It holds more than it may before it has done anything: so would the next."""
        link.kill(what)
        self.too_large_so_far += 1
        if self.too_large_so_far >= START_TRIES:
            self._crew.break_(BrokenProcessPool(f"no drone of {self._plan.name} fits: {what}"))

    def _start_failed(self, error: BaseException, tries: int = START_TRIES) -> None:
        """A drone did not become ready. It is tried a few times over, not for ever."""
        self._failed_starts += 1
        if self._failed_starts >= tries or self._plan.on_death != "replace":
            self._crew.break_(error)

    # -- retiring and stopping ---------------------------------------------------------------------

    def retire(self, link: DroneHandle) -> None:
        """No new work for it; it ends when it has done what is its own."""
        if link.state is State.READY:
            link.state = State.RETIRING
            if len(link.flight) > 1:
                link.send(pack_numbers(RECALL))
            self._crew.vault.evacuate(link)
            self._crew.favours.release(link)
        elif link.state < State.READY and link.owes():
            link.retires = True  # when it can do what is its own
        elif link.state < State.READY:
            link.state = State.STOPPING
            link.kill()
        self.fill_up()

    def stop_if_retired(self, link: DroneHandle) -> None:
        if link.state is State.RETIRING and not (link.flight or link.packing or link.owes()):
            self.stop(link)

    def stop(self, link: DroneHandle) -> None:
        link.state = State.STOPPING
        link.send(pack_numbers(STOP))
        self._hub.after(STOP_GRACE, partial(self._kill_if_alive, link))

    def _kill_if_alive(self, link: DroneHandle) -> None:
        if link.alive:
            link.kill()

    def kill_all(self, why: str) -> None:
        for link in self.links:
            link.state = max(link.state, State.STOPPING)
            link.kill(why)

    def renew(self, snapshot: Any, renewed: Promise[None]) -> None:
        """Replaces all drones by new ones from that snapshot; tells `renewed` when they are
        started."""
        if self._crew.wanted() == 0:  # it has been closed, or broken, in the meantime
            return
        old = list(self.links)
        self.engine.adopt(snapshot)
        self._renewals.append(renewed)
        for link in old:
            self.retire(link)
        self.fill_up()

    # -- deaths ------------------------------------------------------------------------------------

    def died(self, link: DroneHandle, exitcode: int | None) -> None:
        """None where the engine cannot know."""
        before = link.state
        link.exitcode = exitcode
        if before <= State.RETIRING:
            link.death = _death(
                link, None
            )  # for who looks at it from now on; what it ran is added below
        link.state = State.DEAD
        print_lines(link)
        link.last_words()
        order = list(link.flight)
        sent = order.index(link.sent()) + 1 if link.sent() in link.flight else 0
        begun = order.index(link.started()) + 1 if link.started() in link.flight else sent
        # Overlapped work is answered in any order, but begun in the order of sending.
        begun = max(begun, sum(0 < link.flight[number].place <= link.begun for number in order))
        not_begun = [link.flight.pop(number) for number in order[max(sent, begun) :]]
        pinned = [*(w for w in not_begun if w.target), *drained(link.pinned)]
        error = _death(link, link.flight[order[begun - 1]] if begun > sent else None)
        self._crew.requeue([w for w in not_begun if w.target is None])
        lost = [link.flight.pop(number) for number in order[sent:begun]]
        self._crew.record.lost(link.name, lost)
        self._crew.lose(lost, error, again=True)
        self._crew.lose(pinned, error, again=False)
        if link.flight:
            self._hub.after(IN_TRANSIT, partial(self._give_up, link, error))
        else:
            self._remove(link)
        if before <= State.RETIRING:
            link.death = error
            self._unexpected(link, error, before)
        self._crew.vault.died(link)
        self._crew.favours.release(link)
        self.fill_up()
        self._crew.look_for_end = True

    def _unexpected(self, link: DroneHandle, error: DroneDied, before: State) -> None:
        if self._plan.on_death == "break":
            self._crew.break_(error)
        elif before < State.READY and self._crew.wanted() and self._plan.on_death == "end":
            self._crew.break_(error)  # none is tried in its place
        elif before < State.READY and self._crew.wanted():
            # Killed by somebody else: that says little of whether drones can start.
            killed = error.exitcode == -signal.SIGKILL and not link.verdict
            why = because(f"drones of {self._plan.name} die before they are ready", error)
            self._start_failed(why, KILLED_TRIES if killed else START_TRIES)
        elif self._plan.on_death == "end":
            if self._crew.refusal is None:
                self._crew.refusal = error
            self._crew.closing = True
        else:
            log.info("%s", error)

    def _give_up(self, link: DroneHandle, error: DroneDied) -> None:
        """Results that the dead drone had sent did not come: they never left it."""
        self._crew.lose(list(link.flight.values()), error, again=True)
        link.flight.clear()
        self._remove(link)
        self._crew.look_for_end = True

    def _remove(self, link: DroneHandle) -> None:
        print_lines(link)
        link.close()
        link.state = State.DEAD
        self._crew.halts.call_off(link)
        self._crew.lose(drained(link.pinned), link.farewell(), again=False)
        self._crew.favours.release(link)
        if link in self.links:
            self.links.remove(link)
        self._crew.tell(link.born)
        self._crew.tell(link.ended)
        self.engine.released(link)

    def end(self) -> None:
        """No drone is left."""
        self.book.forget()
        self.engine.end()


def _death(link: DroneHandle, work: Task | None) -> DroneDied:
    code = link.exitcode
    if code is None:
        how = f"died ({link.fate})"
    else:
        how = (
            f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
        )
    why = f", because {link.verdict}" if link.verdict and code in (None, -signal.SIGKILL) else ""
    message = f"drone {link.name} (pid {link.pid}) {how}{why}"
    running = work.definition.label if work is not None else None
    if running:
        message += f"{why and ','} while running {running}"
    stderr, stack = "\n".join(link.stderr), "\n".join(link.stack)
    if stderr:
        message += f"\nits last lines on stderr:\n{stderr}"
    if stack:
        message += f"\n{stack}"
    died = DroneDied(
        message, drone=link.name, exitcode=code, running=running, stderr=stderr, stack=stack
    )
    died.__cause__ = link.cause
    return died


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def because(what: str, cause: BaseException) -> BrokenProcessPool:
    error = BrokenProcessPool(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
