"""The roster: which drones a crew has, from their start to their end.

    _begin ──> Launcher.start ──> STARTING ──HELLO──> PREPARING (initializer) ──> READY
                                                                                    │ max_tasks, refresh, release
    slot and name free again <── DEAD <──exited── STOPPING <──STOP, when all is answered── RETIRING

A drone that dies is taken off, what it had not begun goes back to the crew, and another takes its place: from
the same snapshot, since the zygote keeps that. Should the zygote itself be lost, a new snapshot is taken.
Starts that fail are counted; after a few in a row the crew breaks, with the reason.

All of this happens in turns of the hub.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from .errors import DroneDied
from .hearing import hear_kept, print_lines
from .image.child import goes_only_with_the_start, with_heirloom
from .image.main import hatch
from .launch import lifeline
from .launch.launcher import Launcher
from .launch.zygote import Nest, Order
from .limits import named, shared_memory_ceiling
from .link import Link, State, drained
from .output import Stream
from .promises import Promise
from .wire.arena import Arena
from .wire.definitions import Book
from .wire.lane import Lane
from .wire.messages import RECALL, STOP, pack_numbers
from .wire.store import IDLE, Store
from .work import Work

if TYPE_CHECKING:
    from .crew import Crew

__all__ = ["Roster", "because"]

log = logging.getLogger(__name__)

STOP_GRACE = 5.0  # seconds for a drone's exit handlers
IN_TRANSIT = 0.25  # seconds that results which a dead drone had sent may still take
START_TRIES = 3
KILLED_TRIES = 100  # in a row, by somebody else
SENT_MOST = 1000  # messages looked at when a drone has died, for its last ones; what is behind them is IN_TRANSIT
TRY_AGAIN = 1.0  # seconds, where a drone could not be started and others are there


class Roster:
    def __init__(self, crew: Crew) -> None:
        """Takes the snapshot, in the calling thread. Raises `OSError` where the machine's limits forbid it."""
        self._crew = crew
        self._plan = crew.plan
        self._hub = crew.hub
        self.links: list[Link] = []
        self._numbers = itertools.count(1)
        self.first: Link | None = None
        self._zygote_lost = False
        self._failed_starts = 0
        self.too_large_so_far = 0  # drones in a row
        self._renewals: list[Promise[None]] = []  # refreshes that wait for their drones
        self._free_slots = list(range(2 * self._plan.size - 1, -1, -1))
        self._launchers: list[Launcher] = []
        try:
            self._arena = Arena(shared_memory_ceiling())
        except OSError as error:
            raise named(error) from error
        try:
            self._tidying = False
            self._store = Store(self._arena, 0)
            self._arena.ring = self._tidy_later
            self._heirloom = self._plan.initargs if goes_only_with_the_start(self._plan.initargs) else None
            self._launcher = self.launch()
            try:
                self._hub.open_endpoint()
                self.book = self._new_book(self._launcher)
                self._initializer = self._capture_initializer()
            except BaseException:
                self._launcher.end()
                raise
        except BaseException:
            self._arena.end()
            raise

    def _new_book(self, launcher: Launcher) -> Book:
        return Book(launcher.snapshot, self._store, self._plan.width > 1)

    def _capture_initializer(self) -> Callable[[], Work] | None:
        """Pickles it once, as any call's arguments are: now. Raises what its pickling raises."""
        initializer, initargs = self._plan.initializer, self._plan.initargs
        if initializer is None:
            return None
        if self._heirloom is not None:
            initializer, initargs = with_heirloom, (initializer,)
        definition = self.book.define(initializer)
        first = Work(self._crew)
        first.capture(definition, initargs, {}, self.book)

        def once_more() -> Work:
            work = Work(self._crew)
            work.definition, work.args, work.kind, work.payload = definition, first.args, first.kind, first.payload
            return work

        return once_more

    def fail(self, error: Exception) -> None:
        self._crew.fail(error)

    def launch(self) -> Launcher:
        """Takes a snapshot of this image as it is now. In the thread that asked for it."""
        nest = Nest(hatch, self._hub.endpoint.home, 2 * self._plan.size, lifeline.new_family(), self._heirloom)
        try:
            return Launcher(self._plan.start, nest, self._arena)
        except OSError as error:
            raise named(error) from error

    # -- starting ---------------------------------------------------------------------------------

    def begin(self) -> None:
        self._adopt(self._launcher)
        self.fill_up()

    def _adopt(self, launcher: Launcher) -> None:
        self._launchers.append(launcher)
        self._hub.watch(launcher.fileno(), partial(self._read_reports, launcher))

    def fill_up(self) -> None:
        """Starts drones until there are as many as wanted; those on their way out do not count."""
        if self._zygote_lost or (self._plan.on_death == "end" and self._crew.begun.done()):
            return
        have = sum(each.state < State.RETIRING for each in self.links)
        for _ in range(self._crew.wanted() - have):
            if not self._free_slots or not self._start_one():
                return

    def _start_one(self) -> bool:
        slot = self._free_slots.pop()
        taken = {each.name for each in self.links if each.state < State.RETIRING}
        index = next(i for i in itertools.count() if self._plan.drone_name(i) not in taken)
        name = self._plan.drone_name(index)
        link = Link(self._crew, next(self._numbers), slot, name, self._launcher)
        ends: list[int] = []
        try:
            for stream in ("stdout", "stderr"):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ends.append(writer)
                link.streams.append(Stream(reader, name, stream))
            mine, its = Lane.pair()
            ends.append(its.detach())
            link.lane = lifeline.own(Lane(mine))
            order = Order(link.number, slot, link.identity.hex(), name, self._plan.env[index], self._plan.cwd)
            self._launcher.start(order, ends)
        except Exception as error:
            link.close(self._hub.unwatch)
            self._free_slots.append(slot)
            if isinstance(error, (BrokenPipeError, ConnectionResetError)):
                pass  # its zygote is gone: the end of its reports tells, and why
            elif self._crew.begun.done() and any(each.state is State.READY for each in self.links):
                log.warning("%s goes on with fewer drones for a while: %s", self._plan.name, named(error))
                self._hub.after(TRY_AGAIN, self.fill_up)
            else:
                self._crew.cannot_start(named(error))
            return False
        finally:
            for fd in ends:
                os.close(fd)
        for each in link.streams:
            self._hub.watch(each.fileno(), partial(self._read_stream, link, each))
        self.links.append(link)
        self._crew.watch.begin()
        self.first = self.first or link
        self._hub.add_link(link)
        return True

    def _read_stream(self, link: Link, stream: Stream) -> None:
        print_lines(link)
        if not stream.open:
            self._hub.unwatch(stream.fileno())
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
                    self.book = self._new_book(launcher)
                continue
            link = self._link(launcher, report.get("started") or report.get("exited") or report.get("failed"))
            if link is None:
                continue
            if "started" in report:
                link.pid = report["pid"]
                self._crew.tell(link.born)
                if all(each.pid for each in self.links):
                    self._crew.tell(self._crew.begun)
                    while self._renewals:
                        self._crew.tell(self._renewals.pop())
            elif "exited" in report:
                self._died(link, os.waitstatus_to_exitcode(report["status"]))
            else:
                self._remove(link)
                number = report["errno"]
                self._crew.cannot_start(named(OSError(number, os.strerror(number))))

    def _tidy_later(self) -> None:
        """From any thread: memory of this image's has come back. It stays warm for a while."""
        if not self._tidying:
            self._tidying = True
            self._hub.post(lambda: self._hub.after(IDLE, self._tidy))

    def _tidy(self) -> None:
        self._tidying = False
        if self._store.tidy():
            self._tidy_later()

    def _link(self, launcher: Launcher, number: int | None) -> Link | None:
        return next((each for each in self.links if each.number == number and each.launcher is launcher), None)

    def hello(self, link: Link) -> None:
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
        batch, frames = link.load_batch(deque([work]), 1, work.queued)
        self._hub.send(link, frames, batch)

    def _prepared(self, link: Link, promise: Promise[Any]) -> None:
        if link.state is not State.PREPARING:
            return
        if promise._exception is None:
            self._ready(link)
        else:
            self.stop(link)
            self._start_failed(because(f"the initializer of {self._plan.name} failed", promise._exception))

    def _ready(self, link: Link) -> None:
        link.state = State.READY
        link.tasks_done = 0  # its initializer does not count
        self._failed_starts = 0
        self._crew.pinned_waiting |= bool(link.pinned)
        self._crew.look_for_end = True
        if link.retires:
            self.retire(link)

    def too_large(self, link: Link, what: str) -> None:
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

    # -- retiring and stopping ----------------------------------------------------------------------

    def retire(self, link: Link) -> None:
        """No new work for it; it ends when it has done what is its own."""
        if link.state is State.READY:
            link.state = State.RETIRING
            if len(link.flight) > 1:
                self._hub.send(link, pack_numbers(RECALL))
            self.stop_if_retired(link)
        elif link.state < State.READY and link.owes():
            link.retires = True  # when it can do what is its own
        elif link.state < State.READY:
            link.state = State.STOPPING
            link.launcher.kill(link.number)
        self.fill_up()

    def stop_if_retired(self, link: Link) -> None:
        if link.state is State.RETIRING and not link.flight and not link.owes():
            self.stop(link)

    def stop(self, link: Link) -> None:
        link.state = State.STOPPING
        self._hub.send(link, pack_numbers(STOP))
        self._hub.after(STOP_GRACE, partial(self._kill_if_alive, link))

    def _kill_if_alive(self, link: Link) -> None:
        if link.alive:
            link.launcher.kill(link.number)

    def kill_all(self) -> None:
        for link in self.links:
            link.state = max(link.state, State.STOPPING)
            link.launcher.kill(link.number)

    def renew(self, launcher: Launcher, renewed: Promise[None]) -> None:
        """Replaces all drones by new ones from `launcher`'s snapshot; tells `renewed` when they are started."""
        if self._crew.wanted() == 0:  # it has been closed, or broken, in the meantime
            return
        old = list(self.links)
        self._launcher = launcher
        self._zygote_lost = False
        self._adopt(launcher)
        self.book = self._new_book(launcher)
        self._renewals.append(renewed)
        for link in old:
            self.retire(link)
        self.fill_up()

    def _relaunch(self) -> None:
        """The zygote was lost: another, of the image as it is now. In the hub's thread, outside its turn."""
        try:
            launcher = self.launch()
        except OSError as error:
            self._hub.post(partial(self._crew.cannot_start, named(error)))
        else:
            self._hub.post(partial(self._use_or_discard, launcher))

    def _use_or_discard(self, launcher: Launcher) -> None:
        self.renew(launcher, Promise())
        if launcher is not self._launcher:  # nobody wants drones any more
            launcher.end()

    # -- deaths -----------------------------------------------------------------------------------

    def _died(self, link: Link, exitcode: int) -> None:
        before = link.state
        link.exitcode = exitcode
        if before <= State.RETIRING:
            link.death = _death(link, None)  # for who looks at it from now on; what it ran is added below
        link.state = State.DEAD
        print_lines(link)
        self._hub.receive_by_lane(link, all_of_it=True)  # what had already reached this process counts
        self._hub.receive(SENT_MOST)
        page = link.launcher.page
        hear_kept(link, page.kept(link.slot))
        order = list(link.flight)
        sent = order.index(page.sent(link.slot)) + 1 if page.sent(link.slot) in link.flight else 0
        begun = order.index(page.started(link.slot)) + 1 if page.started(link.slot) in link.flight else sent
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
        self.fill_up()
        self._crew.look_for_end = True

    def _unexpected(self, link: Link, error: DroneDied, before: State) -> None:
        if self._plan.on_death == "break":
            self._crew.break_(error)
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

    def _give_up(self, link: Link, error: DroneDied) -> None:
        """Results that the dead drone had sent did not come: they never left it."""
        self._crew.lose(list(link.flight.values()), error, again=True)
        link.flight.clear()
        self._remove(link)
        self._crew.look_for_end = True

    def _remove(self, link: Link) -> None:
        self._hub.remove_link(link)
        print_lines(link)
        link.close(self._hub.unwatch)
        link.ledger.close()
        link.state = State.DEAD
        self._crew.lose(drained(link.pinned), link.farewell(), again=False)
        if link in self.links:
            self.links.remove(link)
            self._free_slots.append(link.slot)
        self._crew.tell(link.born)
        self._crew.tell(link.ended)
        if link.launcher is not self._launcher and not any(each.launcher is link.launcher for each in self.links):
            self._dismiss(link.launcher)  # that was the last drone of an old snapshot

    def _zygote_gone(self, launcher: Launcher) -> None:
        self._hub.unwatch(launcher.fileno())
        launcher.close()
        self._zygote_lost = launcher is self._launcher
        orphaned = [each for each in self.links if each.launcher is launcher]
        for link in orphaned:
            if link.pid is not None:  # the kernel has killed it with the zygote; not so what it had started
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(link.pid, signal.SIGKILL)
        if orphaned:
            lifeline.end_family(launcher.family, launcher.pid)
        if self._crew.begun.done():
            for link in orphaned:
                self._died(link, -signal.SIGKILL)  # the page tells what each was running, so before it is closed
        code = self._reap(launcher)
        if not self._crew.begun.done():
            self._crew.cannot_start(_start_trouble(self._plan.start, code))
            for link in orphaned:
                self._died(link, -signal.SIGKILL)
        elif self._zygote_lost and self._plan.on_death == "replace" and self._crew.wanted():
            log.warning("the zygote of %s was lost (exit code %s): taking a new snapshot", self._plan.name, code)
            self._hub.run_errand(self._relaunch)
        self._crew.look_for_end = True

    def _dismiss(self, launcher: Launcher) -> None:
        """Its zygote is not needed any more: lets it end, and reaps it then."""
        self._hub.unwatch(launcher.fileno())
        launcher.close()
        if launcher.pidfd is None:
            self._reap(launcher)
        elif launcher in self._launchers:
            self._hub.watch(launcher.pidfd, partial(self._reap, launcher))

    def _reap(self, launcher: Launcher) -> int | None:
        if launcher.pidfd is not None:
            self._hub.unwatch(launcher.pidfd)
        self._launchers.remove(launcher)
        return launcher.reap()

    def end(self) -> None:
        """No drone is left: ends the zygotes."""
        for launcher in self._launchers:
            self._hub.unwatch(launcher.fileno())
            if launcher.pidfd is not None:
                self._hub.unwatch(launcher.pidfd)
        self._hub.last_zygotes += self._launchers
        self._launchers.clear()
        self.book.forget()
        self._arena.end()


def _death(link: Link, work: Work | None) -> DroneDied:
    code = link.exitcode
    assert code is not None
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
    if link.verdict and code == -signal.SIGKILL:
        how += f", because {link.verdict},"
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def because(what: str, cause: BaseException) -> BrokenProcessPool:
    error = BrokenProcessPool(f"{what}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _start_trouble(start: str, code: int | None) -> BaseException:
    if start == "spawn":
        return RuntimeError(
            f"the spawned image ended (exit code {code}) before it was ready; its traceback is on stderr. "
            "A script that starts drones with start='spawn' must be importable: keep what it does under "
            "`if __name__ == '__main__':`"
        )
    return RuntimeError(f"the zygote ended (exit code {code}) before it was ready")
