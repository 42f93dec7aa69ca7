"""A crew: the drones behind one queue, which is what a `Pool` or a `Drone` holds.

    submit (any thread) ──> queue ──dispatch──> link.flight ──RESULTS──> promise
                              ^                     │ recalled, or its drone died before it began
                              └─────────────────────┘

Who may run what: work with a `target` waits in that link's `pinned`, all else in `queue`. A drone gets as much
as `BUDGET` seconds of known short work at once; one piece at a time where the time is long or not known yet.
Where one drone turns out busy with work behind it while another is idle, what it has not begun is recalled.

Each piece is at any moment in one place: in a queue, or in one link's flight. It leaves the flight by its
result, by RETURNED, or by its drone's death, and the running page tells which work a dead drone had begun.
So what had not begun is queued again and runs exactly once, and what had is lost (or run again: `retries`).

`submit` races with the crew's end: it looks at `refusal`, appends, and looks at `over`; the hub sets `over`
and then empties the queue. Whoever pops an entry rejects it, so none is left and none is rejected twice.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from .errors import DroneDied
from .hub import Hub, lease_hub
from .image.main import hatch
from .launch import lifeline
from .launch.launcher import Launcher
from .launch.zygote import Nest, Order
from .link import BUDGET, Line, Link, State, Stream
from .promises import FINISHED, Promise
from .wire.capture import main_namespace
from .wire.definitions import Book
from .wire.lane import Lane
from .wire.messages import CANCEL, RECALL, STOP, pack_numbers
from .work import Work

__all__ = ["Crew", "Plan"]

log = logging.getLogger("polycephaly")

GRACE = 1.0  # seconds between an interrupt and a kill
STOP_GRACE = 5.0  # seconds for a drone's exit handlers
IN_TRANSIT = 0.25  # seconds that results which a dead drone had sent may still take
START_TRIES = 3
_BATCH = 2048
_links = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for, checked."""

    size: int
    name: str
    drone_name: Callable[[int], str]
    start: str
    env: Callable[[int], dict[str, str]]
    cwd: str | None
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]
    output: Callable[[Line], object] | None
    retries: int
    timeout: float | None
    max_tasks: int | None
    on_death: str  # "replace", "break" (the standard library's rule) or "end" (a lone drone)


class Crew:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.output = plan.output
        self.queue: deque[Work] = deque()
        self.links: list[Link] = []
        self.hungry = False
        self.pinned_waiting = False
        self.refusal: BaseException | None = None  # why no more work is taken
        self.over = False
        self.begun: Promise[None] = Promise()
        self._renewed: Promise[None] = Promise()
        self.ended: Promise[None] = Promise()
        self._waiting: set[Work] = set()  # for promises among their arguments
        self._closing = False
        self._broken: BaseException | None = None
        self._look_for_end = False
        self._zygote_lost = False
        self._failed_starts = 0
        self._free_slots = list(range(2 * plan.size - 1, -1, -1))
        self._launchers: list[Launcher] = []
        _check_descriptors(plan.size)
        self.hub: Hub = lease_hub()
        try:
            self._launcher = self._launch()
            try:
                self.hub.open_endpoint()
            except BaseException:
                self._launcher.close()
                self._launcher.reap()
                raise
        except BaseException:
            self.hub.give_back()
            raise
        self.book = Book(self._launcher.snapshot)
        self.hub.post(self._begin)

    def _launch(self) -> Launcher:
        """Takes a snapshot of this image as it is now. In the thread that asked for it."""
        nest = Nest(hatch, self.hub.endpoint.home, 2 * self.plan.size)
        return Launcher(self.plan.start, nest)

    # -- any thread -------------------------------------------------------------------------------

    def submit(
        self, what: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Link | None = None
    ) -> Promise[Any]:
        """Takes one piece of work. Raises `RuntimeError` (or `BrokenProcessPool`) when closed (broken)."""
        if self.refusal is not None:
            raise self.refusal
        if target is not None and target.state >= State.RETIRING:
            raise RuntimeError(f"drone {target.name} was released, or has ended (exit code {target.exitcode})")
        work = Work(self, self.plan.retries)
        if target is not None:
            work.target = target
        try:
            book = self.book
            inputs = work.capture(book.define(what), args, kwargs, book.snapshot)
        except Exception as error:
            work._settle(FINISHED, None, error)
            return work
        if inputs:
            self._waiting.add(work)
            work.when_filled(inputs, self._filled)
        else:
            self._enqueue(work)
        return work

    def _enqueue(self, work: Work) -> None:
        if work.target is None:
            self.queue.append(work)
            if self.hungry:
                self.hub.serve(self)
        else:
            work.target.pinned.append(work)
            self.pinned_waiting = True
            self.hub.wake()
        if self.over:
            self._reject_leftovers()

    def _filled(self, work: Work) -> None:
        if not work.done():
            self._enqueue(work)
        self._waiting.discard(work)
        if self._closing:
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
        if self.refusal is not None:
            raise self.refusal
        launcher = self._launch()
        renewed: Promise[None] = Promise()
        self.hub.post(partial(self._renew, launcher, renewed))
        renewed.result()

    def wait_ended(self) -> None:
        """Until nothing of it is left; of the hub neither, if it was the last."""
        self.ended.result()
        if self.hub.gone:
            self.hub.thread.join()

    def pending(self) -> int:
        return len(self.queue) + len(self._waiting) + sum(len(each.flight) + len(each.pinned) for each in self.links)

    # -- the hub's thread: starting ---------------------------------------------------------------

    def _begin(self) -> None:
        self.hub.crews.append(self)
        self._adopt(self._launcher)
        self._fill_up()

    def _adopt(self, launcher: Launcher) -> None:
        self._launchers.append(launcher)
        self.hub.watch(launcher.fileno(), partial(self._read_reports, launcher))

    def _wanted(self) -> int:
        if self._broken or (self._closing and not self._unfinished()):
            return 0
        return self.plan.size

    def _fill_up(self) -> None:
        """Starts drones until there are as many as wanted; those on their way out do not count."""
        if self._zygote_lost or (self.plan.on_death == "end" and self.begun.done()):
            return
        have = sum(each.state < State.RETIRING for each in self.links)
        for _ in range(self._wanted() - have):
            if not self._free_slots or not self._start_one():
                return

    def _start_one(self) -> bool:
        slot = self._free_slots.pop()
        taken = {each.name for each in self.links if each.state < State.RETIRING}
        index = next(i for i in itertools.count() if self.plan.drone_name(i) not in taken)
        name = self.plan.drone_name(index)
        link = Link(self, next(_links), slot, name, self._launcher)
        ends: list[int] = []
        try:
            env = {str(k): str(v) for k, v in self.plan.env(index).items()}
            for stream in ("stdout", "stderr"):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ends.append(writer)
                link.streams.append(Stream(reader, name, stream))
            mine, its = Lane.pair()
            ends.append(its.detach())
            link.lane = lifeline.own(Lane(mine))
            order = Order(link.number, slot, link.identity.hex(), name, env, self.plan.cwd)
            self._launcher.start(order, ends)
        except Exception as error:
            link.close(self.hub.unwatch)
            self._free_slots.append(slot)
            self._cannot_start(_named(error))
            return False
        finally:
            for fd in ends:
                os.close(fd)
        for each in link.streams:
            self.hub.watch(each.fileno(), partial(self._read_stream, link, each))
        self.links.append(link)
        if not hasattr(self, "first"):
            self.first = link
        self.hub.add_link(link)
        return True

    def _read_stream(self, link: Link, stream: Stream) -> None:
        self.hub.print_lines(link)
        if not stream.open:
            self.hub.unwatch(stream.fileno())
            stream.close()
            if stream in link.streams:
                link.streams.remove(stream)

    def _read_reports(self, launcher: Launcher) -> None:
        reports = launcher.reports()
        if reports is None:
            self._zygote_gone(launcher)
            return
        for report in reports:
            if "ready" in report:
                if launcher is self._launcher:
                    self.book = Book(launcher.snapshot)
                continue
            link = self._link(launcher, report.get("started") or report.get("exited") or report.get("failed"))
            if link is None:
                continue
            if "started" in report:
                link.pid = report["pid"]
                self._tell(link.born)
                if all(each.pid for each in self.links):
                    self._tell(self.begun)
                    self._tell(self._renewed)
            elif "exited" in report:
                self._died(link, os.waitstatus_to_exitcode(report["status"]))
            else:
                self._remove(link)
                number = report["errno"]
                self._cannot_start(_named(OSError(number, os.strerror(number))))

    def _link(self, launcher: Launcher, number: int | None) -> Link | None:
        return next((each for each in self.links if each.number == number and each.launcher is launcher), None)

    def hello(self, link: Link) -> None:
        """The drone is up: it gets its initializer first, if there is one."""
        if link.state is not State.STARTING:
            return
        if self.plan.initializer is None:
            self._ready(link)
            return
        link.state = State.PREPARING
        work = Work(self, 0)
        work.target = link
        try:
            work.capture(self.book.define(self.plan.initializer), self.plan.initargs, {}, self.book.snapshot)
        except Exception as error:
            self._break(_because("the initializer cannot be sent", error))
            return
        work._hook(lambda promise: self.hub.post(partial(self._prepared, link, promise)))
        batch, frames = link.load_batch(deque([work]), 1, work.queued)
        self.hub.send(link, frames, batch)

    def _prepared(self, link: Link, promise: Promise[Any]) -> None:
        if link.state is not State.PREPARING:
            return
        if promise._exception is None:
            self._ready(link)
        else:
            self._stop(link)
            self._start_failed(_because(f"the initializer of {self.plan.name} failed", promise._exception))

    def _ready(self, link: Link) -> None:
        link.state = State.READY
        self._failed_starts = 0
        self.pinned_waiting = self.pinned_waiting or bool(link.pinned)
        self._look_for_end = True

    def _cannot_start(self, error: BaseException) -> None:
        if not self.begun.done():
            self.refusal = error
            self.hub.deliver(partial(self.begun._settle, FINISHED, None, error))
            self.abandon()
        else:
            self._break(_because("no drone can be started", error))

    # -- the hub's thread: sending ----------------------------------------------------------------

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
        if self.plan.timeout is not None:
            most = 0 if link.flight else 1  # so that the time it is given is its own
        batch, frames = link.load_batch(queue, most, now)
        if batch:
            self.hub.send(link, frames, batch)
            if self.plan.timeout is not None:
                self.hub.after(self.plan.timeout, partial(self._timed_out, link, batch[0]))
        return len(batch)

    def after_turn(self) -> None:
        """Says whether more work could be sent at once, and sees to work that waits behind a busy drone."""
        if self._look_for_end:
            self._end_if_done()
        idle = False
        for link in self.links:
            if link.state is State.READY and not link.flight:
                idle = True
                break
        self.hungry = idle
        if idle and not self.queue:
            for link in self.links:
                if len(link.flight) > 1 and not link.recalled and link.state is State.READY:
                    link.recalled = True
                    self.hub.after(2 * BUDGET, partial(self._recall_if_stuck, link, link.last_heard))

    def _recall_if_stuck(self, link: Link, last_heard: float) -> None:
        link.recalled = False
        if link.state is State.READY and len(link.flight) > 1 and link.last_heard == last_heard and not self.queue:
            link.recalled = True  # until it answers
            self.hub.send(link, pack_numbers(RECALL))

    def returned(self, link: Link, given_back: tuple[int, ...]) -> None:
        link.recalled = False
        works = [work for number in given_back if (work := link.answered(number)) is not None]
        self._requeue(works)
        self.answered(link)

    def _requeue(self, works: list[Work]) -> None:
        """To the head of their queues, in their order."""
        for work in reversed(works):
            work.link = None
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
            link.state = State.RETIRING
            self._fill_up()
        self._stop_if_retired(link)
        self._look_for_end = True

    def retire(self, link: Link) -> None:
        """No new work for it; it ends when it has done what is its own."""
        if link.state is State.READY:
            link.state = State.RETIRING
            if len(link.flight) > 1:
                self.hub.send(link, pack_numbers(RECALL))
            self._stop_if_retired(link)
        elif link.state < State.READY:
            link.state = State.STOPPING
            link.launcher.kill(link.number)
        self._fill_up()

    def _stop_if_retired(self, link: Link) -> None:
        if link.state is State.RETIRING and not link.flight and not link.pinned:
            self._stop(link)

    def _renew(self, launcher: Launcher, renewed: Promise[None]) -> None:
        old = list(self.links)
        self._launcher = launcher
        self._zygote_lost = False
        self._adopt(launcher)
        self.book = Book(launcher.snapshot)
        self._renewed = renewed
        for link in old:
            self.retire(link)
        self._fill_up()

    def _relaunch(self) -> None:
        """The zygote was lost: another, of the image as it is now. In the hub's thread, outside its turn."""
        try:
            launcher = self._launch()
        except OSError as error:
            self.hub.post(partial(self._cannot_start, _named(error)))
        else:
            self.hub.post(partial(self._renew, launcher, Promise()))

    # -- the hub's thread: stopping what runs -------------------------------------------------------

    def withdraw(self, work: Work) -> None:
        """Its promise was cancelled. In a queue it is passed over; in flight its drone is told."""
        self._waiting.discard(work)
        link = work.link
        if link is not None and work.number in link.flight and link.alive:
            self._interrupt(link, work)
        elif self._closing:
            self._look_for_end = True

    def _interrupt(self, link: Link, work: Work) -> None:
        self.hub.send(link, pack_numbers(CANCEL, (work.number,)))
        self.hub.after(GRACE, partial(self._kill_if_still, link, work))

    def interrupt(self, link: Link) -> None:
        """Interrupts whatever `link` runs."""
        if link.alive:
            self.hub.send(link, pack_numbers(CANCEL, (0,)))

    def _kill_if_alive(self, link: Link) -> None:
        if link.alive:
            link.launcher.kill(link.number)

    def _kill_if_still(self, link: Link, work: Work) -> None:
        # Behind other work in the same drone it is not what holds the drone up.
        if work.number in link.flight and link.alive and link.runs(work.number):
            link.launcher.kill(link.number)

    def _timed_out(self, link: Link, work: Work) -> None:
        if work.link is link and work.number in link.flight:
            error = TimeoutError(f"{work.definition.label} ran for more than {self.plan.timeout} s on {link.name}")
            self.hub.deliver(partial(work._settle, FINISHED, None, error))
            self._interrupt(link, work)

    # -- the hub's thread: deaths -----------------------------------------------------------------

    def _died(self, link: Link, exitcode: int) -> None:
        before = link.state
        link.state, link.exitcode = State.DEAD, exitcode
        self.hub.print_lines(link)
        self.hub.receive_by_lane(link, all_of_it=True)  # what had already reached this process counts
        self.hub.receive()
        page = link.launcher.page
        self.hub.hear_kept(link, page.kept(link.slot))
        order = list(link.flight)
        sent = order.index(page.sent(link.slot)) + 1 if page.sent(link.slot) in link.flight else 0
        begun = order.index(page.started(link.slot)) + 1 if page.started(link.slot) in link.flight else sent
        not_begun = [link.flight.pop(number) for number in order[max(sent, begun) :]]
        pinned = [*(w for w in not_begun if w.target), *link.pinned]
        link.pinned.clear()
        error = self._death(link, link.flight[order[begun - 1]] if begun > sent else None)
        self._requeue([w for w in not_begun if w.target is None])
        self._lose([link.flight.pop(number) for number in order[sent:begun]], error, again=True)
        self._lose(pinned, error, again=False)
        if link.flight:
            self.hub.after(IN_TRANSIT, partial(self._give_up, link, error))
        else:
            self._remove(link)
        if before <= State.RETIRING:
            self._unexpected(error, before)
        self._fill_up()
        self._look_for_end = True

    def _unexpected(self, error: DroneDied, before: State) -> None:
        if self.plan.on_death == "break":
            self._break(error)
        elif before < State.READY and not self._closing:
            self._start_failed(_because(f"drones of {self.plan.name} die before they are ready", error))
        elif self.plan.on_death == "end":
            if self.refusal is None:
                self.refusal = error
            self._closing = True
        else:
            log.info("%s", error)

    def _start_failed(self, error: BaseException) -> None:
        """A drone did not become ready. It is tried a few times over, not for ever."""
        self._failed_starts += 1
        if self._failed_starts >= START_TRIES or self.plan.on_death != "replace":
            self._break(error)

    def _give_up(self, link: Link, error: DroneDied) -> None:
        """Results that the dead drone had sent did not come: they never left it."""
        self._lose(list(link.flight.values()), error, again=True)
        link.flight.clear()
        self._remove(link)
        self._look_for_end = True

    def _lose(self, works: list[Work], error: BaseException, *, again: bool) -> None:
        for work in works:
            if work.done():
                continue
            if again and work.retries > 0 and work.target is None:
                work.retries -= 1
                work.link = None
                self.queue.appendleft(work)
            else:
                self.hub.deliver(partial(work._settle, FINISHED, None, error))

    def _death(self, link: Link, work: Work | None) -> DroneDied:
        code = link.exitcode
        assert code is not None
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
        message = f"drone {link.name} (pid {link.pid}) {how}"
        running = work.definition.label if work is not None else None
        if running:
            message += f" while running {running}"
        stderr, stack = "\n".join(link.stderr), "\n".join(link.stack)
        if stack:
            message += f"\n{stack}"
        elif stderr:
            message += f"\nits last lines on stderr:\n{stderr}"
        return DroneDied(message, drone=link.name, exitcode=code, running=running, stderr=stderr, stack=stack)

    def fail(self, error: Exception) -> None:
        """A bug in our own code: better all its work is rejected than anybody waits for ever."""
        log.error("a bug in polycephaly breaks %s", self.plan.name, exc_info=error)
        self._break(_because("a bug in polycephaly", error))

    def _break(self, error: BaseException) -> None:
        """Nothing more can be run: rejects all, refuses more, ends the drones."""
        if self._broken is not None:
            return
        self._broken = error
        self.refusal = error
        if not self.begun.done():
            self.hub.deliver(partial(self.begun._settle, FINISHED, None, error))
        for link in self.links:
            self._lose(list(link.flight.values()), error, again=False)
            self._lose(list(link.pinned), error, again=False)
            link.pinned.clear()
        self._reject_leftovers()
        self.abandon()

    def _remove(self, link: Link) -> None:
        self.hub.remove_link(link)
        self.hub.print_lines(link)
        link.close(self.hub.unwatch)
        link.state = State.DEAD
        if link in self.links:
            self.links.remove(link)
            self._free_slots.append(link.slot)
        self._tell(link.born)
        self._tell(link.ended)
        if link.launcher is not self._launcher and not any(each.launcher is link.launcher for each in self.links):
            link.launcher.close()  # the last drone of an old snapshot

    def _zygote_gone(self, launcher: Launcher) -> None:
        self.hub.unwatch(launcher.fileno())
        launcher.close()
        self._zygote_lost = launcher is self._launcher
        orphaned = [each for each in self.links if each.launcher is launcher]
        for link in orphaned:
            if link.pid is not None:  # the kernel has killed it with the zygote; not so what it had started
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(link.pid, signal.SIGKILL)
        if self.begun.done():
            for link in orphaned:
                self._died(link, -signal.SIGKILL)  # the page tells what each was running, so before it is closed
        code = launcher.reap()
        self._launchers.remove(launcher)
        if not self.begun.done():
            self._cannot_start(_start_trouble(self.plan.start, code))
            for link in orphaned:
                self._died(link, -signal.SIGKILL)
        elif self._zygote_lost and self.plan.on_death == "replace" and self._wanted():
            log.warning("the zygote of %s was lost (exit code %s): taking a new snapshot", self.plan.name, code)
            self.hub.run_errand(self._relaunch)
        self._look_for_end = True

    # -- the hub's thread: ending -----------------------------------------------------------------

    def _close(self, cancel: bool, running: bool) -> None:
        self._closing = True
        if cancel:
            for work in [*self.queue, *self._waiting, *(w for link in self.links for w in link.pinned)]:
                self.hub.deliver(work.cancel)
            for link in self.links:
                for work in link.flight.values():
                    if running or not link.runs(work.number):
                        self.hub.deliver(work.cancel)
        self._look_for_end = True

    def _unfinished(self) -> bool:
        return bool(
            any(not work.done() for work in self.queue)
            or self._waiting
            or any(link.flight or link.pinned for link in self.links)
        )

    def _ask_for_end(self) -> None:
        self._look_for_end = True

    def _end_if_done(self) -> None:
        """Once a turn, however many things in it may have been the last."""
        self._look_for_end = False
        if not self._closing or self._unfinished():
            return
        for link in list(self.links):
            if link.state is State.READY:
                self._stop(link)
            elif link.state < State.READY:
                link.state = State.STOPPING
                link.launcher.kill(link.number)
        if not self.links and not self.over:
            self._end()

    def _stop(self, link: Link) -> None:
        link.state = State.STOPPING
        self.hub.send(link, pack_numbers(STOP))
        self.hub.after(STOP_GRACE, partial(self._kill_if_alive, link))

    def abandon(self) -> None:
        """Kills every drone now; their work is lost."""
        self._closing = True
        for work in [*self.queue, *self._waiting]:
            self.hub.deliver(work.cancel)
        self._waiting.clear()
        for link in self.links:
            link.state = max(link.state, State.STOPPING)
            link.launcher.kill(link.number)
        self._look_for_end = True

    def _end(self) -> None:
        self.over = True
        self.refusal = self.refusal or RuntimeError(f"{self.plan.name} has ended")
        self._reject_leftovers()
        for launcher in self._launchers:
            self.hub.unwatch(launcher.fileno())
            launcher.close()
        for launcher in self._launchers:
            launcher.reap()  # nothing is left to it but to end
        self._launchers.clear()
        self.hub.crews.remove(self)
        self.hub.deliver(self._finish)

    def _finish(self) -> None:
        self.hub.ending.append(self.ended)
        self.hub.give_back()

    def _reject_leftovers(self) -> None:
        with suppress(IndexError):
            while True:
                self.queue.popleft()._settle(FINISHED, None, self.refusal)

    def _tell(self, promise: Promise[None]) -> None:
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _because(what: str, cause: BaseException) -> BrokenProcessPool:
    error = BrokenProcessPool(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _check_descriptors(drones: int) -> None:
    """Three a drone (two pipes, one connection) and some for the rest, or libzmq would abort in mid-start."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = 0
    needed = used + 3 * drones + 32
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise OSError(
            errno.EMFILE,
            f"{drones} drones need about {needed} file descriptors; the file descriptor limit is {limit} "
            "(RLIMIT_NOFILE; see ulimit -n)",
        )


def _named(error: Exception) -> BaseException:
    """An error of the system with the name of the limit that was reached."""
    if not isinstance(error, OSError):
        return error
    limits = {
        errno.EAGAIN: ("process limit", "RLIMIT_NPROC; see ulimit -u"),
        errno.EMFILE: ("file descriptor limit", "RLIMIT_NOFILE; see ulimit -n"),
        errno.ENFILE: ("the system's file descriptor limit", "fs.file-max"),
        errno.ENOMEM: ("memory limit", "RLIMIT_AS, or the machine's memory"),
    }
    if error.errno not in limits:
        return error
    what, where = limits[error.errno]
    return OSError(error.errno, f"a drone could not be started: {what} reached ({where}): {error.strerror}")


def _start_trouble(start: str, code: int | None) -> BaseException:
    if start == "spawn":
        return RuntimeError(
            f"the spawned image ended (exit code {code}) before it was ready; its traceback is on stderr. "
            "A script that starts drones with start='spawn' must be importable: keep what it does under "
            "`if __name__ == '__main__':`"
        )
    return RuntimeError(f"the zygote ended (exit code {code}) before it was ready")
