"""One drone, as its crew sees it: what it was sent, how long that takes, how it is.

    Starting ──HELLO──> Preparing (initializer) ──> Ready ──> Retiring (no new work) ──> Stopping ──> dead
                                                                                any state ──exited──> dead

Only who is in the hub's turn changes a link; other threads may read `pid`, `state`, `exitcode`. How
messages get to the drone, and what is known of it from outside, is its engine's business: see
engine.py."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from math import inf
from pickle import dumps
from typing import TYPE_CHECKING, Any

from ..errors import another
from ..promises.promise import PENDING, Signal
from ..runtime.tuning import tuning
from ..store.placeholders import PayloadWithRefs
from ..store.references import Received, RefTable, Serialized
from ..wire.functions import KnownFunctions
from ..wire.messages import (
    BRING,
    CAME_BACK,
    DEFINES,
    DROP,
    FORGET,
    KEEP,
    SHARED,
    TaskBatch,
    unpack_work,
)
from ..wire.output import Heard, OutputRecord
from .task import Sending, Task
from .waiting import Waiting

if TYPE_CHECKING:
    from ..engines.local.launcher import Launcher
    from ..runtime.timers import Timer
    from ..store.directory import RemoteObject
    from ..wire.functions import RemoteFunction
    from .dispatcher import Dispatcher

__all__ = ["DroneHandle", "State", "Times", "drained"]

Times = dict[str, tuple[float, float]]
"""Of each thread: the seconds that it has run, and had to wait for a processor."""

SHORTEST = 2e-6  # seconds; what a task costs at least, so that the shortest ones are not sent without bound
TELL_AFTER = 0.02  # seconds
PACKET = 32 * 1024  # bytes after which a batch is full: it is to go by the lane
_TAIL_LINES = 20
_STACK_LINES = 200
_FATAL = "Fatal Python error: "
_OF_STACK = re.compile(r"$|  |Current thread|Thread 0x|Extension modules:|Python runtime state:")
"""How the lines begin that follow `_FATAL` in what the interpreter and `faulthandler` write."""


class State(IntEnum):
    STARTING, PREPARING, READY, RETIRING, STOPPING, DEAD = range(6)


class DroneHandle:
    """One drone, as the hub sees it."""

    ref_table: RefTable
    """What lies beside messages, there and back."""
    keeper: Launcher | None = None
    """The process that starts it and tells of its end, where that is one of ours."""

    def __init__(self, dispatcher: Dispatcher, number: int, name: str) -> None:
        self.dispatcher = dispatcher
        self.number = number
        self.name = name
        self.state = State.STARTING
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.death: BaseException | None = None  # how it died, if nobody asked it to
        self.born: Signal[None] = Signal()  # it has a pid, or will never have one
        self.ended: Signal[None] = Signal()
        self.in_flight: dict[
            int, Task
        ] = {}  # sent and unanswered, in the order in which it will run them
        self.dedicated: deque[Task] = deque()  # work that only this drone may run
        self.preferred: deque[Task] = deque()  # work that it should run, as it has what that takes
        self.packing: set[int] = set()  # kept values that it was asked for
        self._dropped: deque[tuple[int, int]] = deque()  # kept values that nobody has any more
        self.load = 0.0  # seconds of work in flight, as estimated
        self.unknown = 0  # how many in flight have no estimate
        self.overlapping = 0  # how many in flight are run beside each other; then all are
        self.bulk_unanswered = 0  # how many in flight were sent by bulk: a local drone's
        self.doubted = False  # it has sent what is no message, and is looked after
        self.hung: set[int] = (
            set()
        )  # what nobody waits for any more, and does not come back: it is to run dry
        self.places = 0  # how many of these it was sent, all told
        self.begun = (
            0  # of these, the place of the last that was answered: up to there all have begun
        )
        self.retires = False  # as soon as it is ready
        self.tasks_done = 0
        self.last_heard = 0.0
        self.recalled = False
        self.stderr: deque[str] = deque(maxlen=_TAIL_LINES)
        self.stack: list[str] = []
        self._in_stack = False  # the last line on stderr was of the stack
        self._ringing = False
        self._defined = KnownFunctions(self._ring)
        self.deadlines: dict[int, float] = {}  # of what has a time limit, by number
        self.timer: Timer | None = None  # has these looked at, at `timer_at`
        self.timer_at = inf
        self.unresponsive: str | None = None  # why nothing is heard of it, if that is so
        self.told_waiting: tuple[int, Waiting] | None = (
            None  # in what it has waited for long, with which work
        )
        self.ahead = 0.0  # seconds that its clock is ahead of ours
        self.kill_reason = ""  # why we have killed it
        self.fate = ""  # how it ended, where that is no exit status
        self.cause: BaseException | None = None  # with which the engine told so

    # -- what each engine's links do in their own way ----------------------------------------------

    def send(self, frames: list[bytes], tasks: Sequence[Task] = ()) -> None:
        """A message (wire/messages.py), and the works that it brings. Never waits."""
        raise NotImplementedError

    def is_up(self) -> bool:
        """Whether there is somebody to send anything to."""
        raise NotImplementedError

    def catch_up(self) -> None:
        """In a turn: hears what has reached this process and was not looked at yet, where that may
        be so."""

    def kill(self, kill_reason: str = "") -> None:
        """At once, with whatever it runs. Its death tells the `verdict`."""
        raise NotImplementedError

    def started(self) -> int:
        """The number of the work that it has begun last, as far as is known; from any thread. 0:
        none."""
        raise NotImplementedError

    def sent(self) -> int:
        """The number of the last work of which the answer was sent. 0: none."""
        raise NotImplementedError

    def heartbeat(self) -> tuple[object, Times]:
        """What changes while it lives; and of each thread the seconds that it has run, and had to
        wait for that."""
        raise NotImplementedError

    def waits(self) -> bool:
        """Does it, as far as is known, neither run nor could it run?"""
        return True

    def why_quiet(self) -> str:
        """Why it has no pulse."""
        raise NotImplementedError

    def worked(self, threads: Times) -> tuple[object, Times] | None:
        """What changes whenever it does something for its work, and those of its threads that may
        look up now and then without doing anything, given the threads that `pulse` told; None where
        that is not known."""
        return None

    def others_worked(self) -> object:
        """The same of the processes that it has started."""

    def system_call(self) -> str | None:
        """In which its main thread waits."""
        return None

    def memory(self, enough: int) -> int:
        """Bytes that it and what it has started hold for themselves; exact where it is more than
        `enough`."""
        raise NotImplementedError

    def printed(self) -> Heard:
        """Takes what has come of its output."""
        raise NotImplementedError

    def last_words(self) -> None:
        """It has died: hears what it had sent, and what it had done and perhaps not sent."""
        raise NotImplementedError

    def close(self) -> None:
        """It has died, and nothing more is heard of it."""
        raise NotImplementedError

    # -- how it is ---------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self.state is not State.DEAD

    @property
    def waiting(self) -> Waiting | None:
        """In what it waits, for so long that it is told; till it answers, though the watch may look
        only later."""
        number, waiting = self.told_waiting or (0, None)
        return (
            waiting
            if self.alive and (number in self.in_flight or self.state < State.READY)
            else None
        )

    def owes(self) -> bool:
        """Is there work that waits for it? Also that which itself waits for what it takes; which is
        pinned before it is no longer found there (`Crew.filled`), so that is looked at first."""
        return self.dispatcher.waits_for(self) or any(
            not task.done() for task in [*self.dedicated, *self.preferred]
        )

    def closed_error(self) -> BaseException:
        """Why it takes no more work."""
        if self.death is not None:
            return another(self.death)
        why = f", because {self.kill_reason}" if self.kill_reason else ""
        return RuntimeError(f"drone {self.name} was released (exit code {self.exitcode}){why}")

    def runs(self, number: int) -> bool:
        """Has that work been begun? From any thread; an engine tells what the drone tells."""
        if not self.alive:
            return False
        return self.started() == number or (self.overlapping > 0 and number in self.in_flight)

    # -- sending -----------------------------------------------------------------------------------

    def takes(self, dedicated: bool = False) -> bool:
        """May it be sent something now? If idle, anything; else known short work, up to half the
        budget; beside work that is overlapped, more of that. A retiring drone takes only its own
        (`pinned`) work."""
        if (
            not (self.state is State.READY or (dedicated and self.state is State.RETIRING))
            or self.unresponsive
        ):
            return False
        if self.overlapping:
            return self.overlapping < self.dispatcher.config.width and not self.hung
        return not self.in_flight or (not self.unknown and self.load < tuning.batch_seconds / 2)

    def tasks_left(self, most: int | None) -> int:
        """How many more pieces of work it may be sent before it has had its `most`; what only it
        may do it does anyhow."""
        return (
            1 << 30
            if most is None or self.state is State.RETIRING
            else most - self.tasks_done - len(self.in_flight)
        )

    def load_batch(
        self, queue: deque[Task], most: int, now: float
    ) -> tuple[list[Task], list[bytes]]:
        """Takes from the head of `queue` what goes with what it holds, at most `most` pieces: puts
        it in flight, and gives the message that brings it, with the definitions that it has not got
        yet.

        Work of unknown length goes alone; what is overlapped goes with its like only, up to the
        width. Work whose promise is settled (cancelled while it waited) is dropped."""
        batch: list[Task] = []
        message = TaskBatch()
        in_flight, load, budget = self.in_flight, self.load, tuning.batch_seconds
        definition: Any = None  # of the run of calls that travel together
        seconds: float | None = None
        overlaps = False
        numbers: list[int] = []
        calls: list[tuple[Any, ...]] = []
        size = 0
        while len(batch) < most and size < PACKET:
            try:
                task = queue.popleft()
            except IndexError:
                break
            if task._state != PENDING:
                continue
            if (
                task.args is None
                and type(task.payload) is PayloadWithRefs
                and not self.dispatcher.directory.fits(task, self)
            ):
                continue
            if task.definition is not definition:
                if numbers:
                    message.add_calls(definition.number, numbers, calls)
                    numbers, calls = [], []
                definition = task.definition
                seconds, overlaps = definition.seconds, definition.overlaps
            if overlaps or self.overlapping:
                alike = overlaps and self.overlapping == len(in_flight)
                if not alike or self.overlapping >= self.dispatcher.config.width:
                    queue.appendleft(task)
                    break
                self.overlapping += 1
                self.places += 1
                task.place = self.places
                takes = 0.0
            elif seconds is None:
                if in_flight:
                    queue.appendleft(task)
                    break
                self.unknown += 1
                takes = -1.0
                most = 1
            else:
                if task.timeout is not None:  # alone, so that the time that it is given is its own
                    if in_flight:
                        queue.appendleft(task)
                        break
                    most = 1
                takes = seconds * task.count
                if takes < SHORTEST:
                    takes = SHORTEST
                if load + takes > budget and in_flight:
                    queue.appendleft(task)
                    break
                load += takes
            if definition.number not in self._defined:
                self._define(definition, message)
            sending = task.sending = Sending(self, now, takes)
            number = task.number
            in_flight[number] = task
            batch.append(task)
            if task.args is not None and not overlaps and not task.keeps:
                numbers.append(number)
                calls.append(task.args)
                size += task.weight
                if queue and takes > 0 and task.weight == Task.weight:
                    room = min(
                        most - len(batch),
                        int((budget - load) / takes),
                        (PACKET - size) // task.weight,
                    )
                    more = _more_of(definition, queue, room)
                    for each in more:
                        each.sending = sending
                    run = [each.number for each in more]
                    in_flight.update(zip(run, more, strict=True))
                    numbers += run
                    calls += [each.args for each in more]  # type: ignore[misc]  # they have some
                    batch += more
                    load += takes * len(more)
                    size += task.weight * len(more)
            else:
                if numbers:
                    message.add_calls(definition.number, numbers, calls)
                    numbers, calls = [], []
                size += self._add(task, message)
        if numbers:
            message.add_calls(definition.number, numbers, calls)
        self.load = load
        self.last_heard = now
        if batch and (self.ref_table.returned or self._dropped or self._defined.unused):
            self._add_returned(message)
        return batch, message.frames()

    def _add(self, task: Task, message: TaskBatch) -> int:
        """Work that goes by itself. Its size in the message."""
        payload, kind = task.payload, task.kind
        if task.keeps:
            kind |= KEEP
        if type(payload) is PayloadWithRefs:
            self._bring(payload.remote_objects.values(), message)
            payload = payload.payload
        if task.args is not None:
            payload = dumps(task.args, 5) if task.args else b""
        elif isinstance(payload, Serialized):
            payload, kind = payload.waybill(self.ref_table), kind | SHARED
        message.add(task.number, kind, task.definition.number, payload)
        if task.definition.captures:  # or the drone would hold what it has captured
            self._defined.remove(task.definition.number)
            message.add(task.definition.number, FORGET, 0, b"")
        return len(payload)

    def _bring(self, remote_objects: Iterable[RemoteObject], message: TaskBatch) -> None:
        """Kept values that it has not got."""
        for each in remote_objects:
            if self not in each.holders:
                each.holders[self] = 1
                if isinstance(each.packed, Received):
                    message.add(
                        each.number, BRING | SHARED, 0, each.packed.parcel().waybill(self.ref_table)
                    )
                else:
                    assert each.packed is not None  # or it would not fit
                    message.add(each.number, BRING, 0, each.packed)

    def _ring(self) -> None:
        """In any thread, in the middle of anything: a result of its is not looked at any more, or
        need not be kept, or a definition is not used any more, and it is to be told. Soon: the next
        work will bring it along, and if there is none, a message of its own."""
        if not self._ringing and self.alive:
            self._ringing = True
            reactor = self.dispatcher.reactor
            reactor.post(lambda: reactor.after(TELL_AFTER, self._tell_returned))

    def _tell_returned(self) -> None:
        self._ringing = False
        if (self.ref_table.returned or self._dropped or self._defined.unused) and self.is_up():
            message = TaskBatch()
            self._add_returned(message)
            self.send(message.frames())

    def drop(self, number: int, claims: int) -> None:
        """In any thread, in the middle of anything: nobody has that kept value any more."""
        self._dropped.append((number, claims))
        self._ring()

    def _define(self, definition: RemoteFunction, message: TaskBatch) -> None:
        for oldest in self._defined.add(definition):
            message.add(oldest, FORGET, 0, b"")
        payload = definition.payload
        if isinstance(payload, Serialized):
            message.add(
                definition.number, definition.kind | SHARED, 0, payload.waybill(self.ref_table)
            )
        else:
            message.add(definition.number, definition.kind, 0, payload)

    def _add_returned(self, message: TaskBatch) -> None:
        for number in self.ref_table.take_returned():
            message.add(number, CAME_BACK, 0, b"")
        while self._dropped:
            number, claims = self._dropped.popleft()
            message.add(number, DROP, claims, b"")
        for number in self._defined.take_unused():
            message.add(number, FORGET, 0, b"")

    def unheard(self, frames: Sequence[bytes]) -> None:
        """In a turn: a message of work did not arrive. So the drone has neither the definitions in
        it nor what was brought, and what it is to forget and to drop is to be said once more."""
        for number, kind, claims, _ in unpack_work(frames):
            if kind & ~SHARED in DEFINES:
                self._defined.remove(number)
            elif kind & ~SHARED == BRING:
                self.dispatcher.directory.not_brought(self, number)
            elif kind == FORGET:
                self._defined.unused.append(number)
            elif kind == DROP:
                self.drop(number, claims)

    def hand_over(self, task: Task, part: Task) -> None:
        """`part`, all that is left of `work` here, takes its place and number. How long it takes is
        not known."""
        sending = task.sending
        assert sending is not None
        if sending.estimate >= 0:
            self.load -= sending.estimate
            self.unknown += 1
        part.number = task.number
        part.sending = Sending(self, sending.at, -1.0, sending.by_bulk)
        self.in_flight[part.number] = part

    def answered_all(self, numbers: list[int]) -> list[Task | None]:
        """The same for many."""
        if self.bulk_unanswered or self.overlapping:
            return [self.answered(number) for number in numbers]
        in_flight = self.in_flight
        tasks = [in_flight.pop(number, None) for number in numbers]
        known = unknown = 0.0
        for task in tasks:
            if task is not None:
                estimate = task.sending.estimate  # type: ignore[union-attr]  # it was in flight
                if estimate < 0:
                    unknown += 1
                else:
                    known += estimate
        self.load = self.load - known if in_flight else 0.0
        self.unknown -= int(unknown)
        return tasks

    def answered(self, number: int) -> Task | None:
        """Takes a work out of flight; None where it is not there."""
        task = self.in_flight.pop(number, None)
        if task is not None:
            sending = task.sending
            assert sending is not None
            if sending.by_bulk:
                self.bulk_unanswered -= 1
            if task.timeout is not None:
                self.deadlines.pop(number, None)
            if task.definition.overlaps:
                self.overlapping -= 1
                self.hung.discard(number)
            elif sending.estimate < 0:
                self.unknown -= 1
            else:
                self.load -= sending.estimate
            if not self.in_flight:
                self.load = 0.0
        return task

    # -- what it prints ----------------------------------------------------------------------------

    def remember(self, heard: Heard) -> None:
        """The end of what it wrote to stderr and logged, and apart from that the newest stack of a
        fatal error."""
        for each in heard:
            if isinstance(each, OutputRecord):
                self.stderr.append(each.text)
            elif each.stream == "stderr":
                before, fatal, error = each.text.partition(_FATAL)
                if fatal:
                    self.stack, self._in_stack = [fatal + error], True
                elif self._in_stack and _OF_STACK.match(before):
                    self.stack.append(before)
                    del self.stack[
                        1:-_STACK_LINES
                    ]  # the thread that has crashed may be the last of many
                    continue
                else:
                    self._in_stack = False
                if before or not fatal:
                    self.stderr.append(before)


def drained(queue: deque[Task]) -> list[Task]:
    """Takes all that is in `queue`, one by one: what others add meanwhile is taken, or stays."""
    tasks = []
    with suppress(IndexError):
        while True:
            tasks.append(queue.popleft())
    return tasks


def _more_of(definition: RemoteFunction, queue: deque[Task], most: int) -> list[Task]:
    """Takes from the head of `queue` what goes with calls of `definition` that travel together: at
    most so many."""
    more: list[Task] = []
    weight, take = Task.weight, queue.popleft
    with suppress(IndexError):
        for _ in range(most):
            task = take()
            if task._state != PENDING:
                continue
            if (
                task.definition is definition
                and task.args is not None
                and task.weight == weight
                and not task.timeout
            ):
                more.append(task)
            else:
                queue.appendleft(task)
                break
    return more
