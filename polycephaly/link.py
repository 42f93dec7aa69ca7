"""The hub's end of one drone: what it was sent, what it prints, how it is.

    Starting ──HELLO──> Preparing (initializer) ──> Ready ──> Retiring (no new work) ──> Stopping ──> dead
                                                                                any state ──exited──> dead

Only who is in the hub's turn changes a link; other threads may read `pid`, `state`, `exitcode`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from math import inf
from pickle import dumps
from typing import TYPE_CHECKING, Any

from .errors import another
from .launch import lifeline
from .launch.launcher import Launcher
from .output import Heard, Line, Merge, Record, Stream
from .promises import PENDING, Milestone
from .wire.lane import Lane
from .wire.loans import Ledger, Parcel
from .wire.messages import CAME_BACK, FORGET, OPEN, SHARED, WorkBatch, pack_numbers
from .work import Sending, Work

if TYPE_CHECKING:
    import zmq

    from .crew import Crew
    from .wire.definitions import Definition

__all__ = ["BUDGET", "Line", "Link", "State", "Stream"]

BUDGET = 0.005
"""Seconds of work that a drone may hold ahead: enough to hide the way there and back, little to wait behind."""
SHORTEST = 2e-6  # seconds; what a task costs at least, so that the shortest ones are not sent without bound
_DEFINITIONS_KEPT = 256
_DEFINITION_BYTES_KEPT = 8 << 20
PACKET = 32 * 1024  # bytes after which a batch is full: it is to go by the lane
TELL_AFTER = 0.02  # seconds
_TAIL_LINES = 20
_STACK_LINES = 200


class State(IntEnum):
    STARTING, PREPARING, READY, RETIRING, STOPPING, DEAD = range(6)


class Link:
    """One drone, as the hub sees it."""

    def __init__(self, crew: Crew, number: int, slot: int, name: str, launcher: Launcher) -> None:
        self.crew = crew
        self.number = number
        self.slot = slot
        self.name = name
        self.launcher = launcher
        self.identity = b"\x01" + os.urandom(16)
        self.state = State.STARTING
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.death: BaseException | None = None  # how it died, if nobody asked it to
        self.born: Milestone[None] = Milestone()  # it has a pid, or will never have one
        self.ended: Milestone[None] = Milestone()
        self.flight: dict[int, Work] = {}  # sent and unanswered, in the order in which it will run them
        self.pinned: deque[Work] = deque()  # work that only this drone may run
        self.load = 0.0  # seconds of work in flight, as estimated
        self.unknown = 0  # how many in flight have no estimate
        self.overlapping = 0  # how many in flight are run beside each other; then all are
        self.doubted = False  # it has sent what is no message, and is looked after
        self.hung = False  # something that nobody waits for any more does not come back: it is to run dry
        self.places = 0  # how many of these it was sent, all told
        self.begun = 0  # of these, the place of the last that was answered: up to there all have begun
        self.retires = False  # as soon as it is ready
        self.tasks_done = 0
        self.last_heard = 0.0
        self.recalled = False
        self.streams: list[Stream] = []
        self._merge = Merge()
        self.lane: Lane | None = None
        self.bulk_open = False
        self._bulk_waiting: list[list[bytes]] = []
        self._bulk_unanswered = 0
        self._asked = False
        self.stderr: deque[str] = deque(maxlen=_TAIL_LINES)
        self.stack: deque[str] = deque(maxlen=_STACK_LINES)
        self.ledger = Ledger(launcher.arena, number, self._ring)
        self._ringing = False
        self._defined: dict[int, int] = {}  # the definitions that it has: number -> bytes, oldest first
        self._defined_bytes = 0
        self.deadlines: dict[int, float] = {}  # of what has a time limit, by number
        self.timer_at = inf  # when these are looked at
        self.unresponsive: str | None = None  # why nothing is heard of it, if that is so
        self.verdict = ""  # why we have killed it

    @property
    def alive(self) -> bool:
        return self.state is not State.DEAD

    def kill(self, verdict: str = "") -> None:
        """SIGKILL. Its death tells the `verdict`."""
        self.verdict = verdict
        self.launcher.kill(self.number)

    def owes(self) -> bool:
        """Is there work that only it may do?"""
        return any(not work.done() for work in list(self.pinned))

    def farewell(self) -> BaseException:
        """Why it takes no more work."""
        if self.death is not None:
            return another(self.death)
        return RuntimeError(f"drone {self.name} was released (exit code {self.exitcode})")

    def runs(self, number: int) -> bool:
        """Has that work been begun? From any thread; the page says what the drone says."""
        if not self.alive:
            return False
        return self.launcher.page.started(self.slot) == number or (self.overlapping > 0 and number in self.flight)

    # -- sending ----------------------------------------------------------------------------------

    def takes(self, pinned: bool = False) -> bool:
        """May it be sent something now? If idle, anything; else known short work, up to half the budget; beside
        work that is overlapped, more of that. A retiring drone takes only its own (`pinned`) work."""
        if not (self.state is State.READY or (pinned and self.state is State.RETIRING)) or self.unresponsive:
            return False
        if self.overlapping:
            return self.overlapping < self.crew.plan.width and not self.hung
        return not self.flight or (not self.unknown and self.load < BUDGET / 2)

    def tasks_left(self, most: int | None) -> int:
        """How many more pieces of work it may be sent before it has had its `most`."""
        return 1 << 30 if most is None else most - self.tasks_done - len(self.flight)

    def load_batch(self, queue: deque[Work], most: int, now: float) -> tuple[list[Work], list[bytes]]:
        """Takes from the head of `queue` what goes with what it holds, at most `most` pieces: puts it in flight,
        and gives the message that brings it, with the definitions that it has not got yet.

        Work of unknown length goes alone; what is overlapped goes with its like only, up to the width. Work whose
        promise is settled (cancelled while it waited) is dropped.
        """
        batch: list[Work] = []
        message = WorkBatch()
        flight, load = self.flight, self.load
        definition: Any = None  # of the run of calls that travel together
        seconds: float | None = None
        overlaps = False
        numbers: list[int] = []
        calls: list[tuple[Any, ...]] = []
        size = 0
        while len(batch) < most and size < PACKET:
            try:
                work = queue.popleft()
            except IndexError:
                break
            if work._state != PENDING:
                continue
            if work.definition is not definition:
                if numbers:
                    message.add_calls(definition.number, numbers, calls)
                    numbers, calls = [], []
                definition = work.definition
                seconds, overlaps = definition.seconds, definition.overlaps
            if overlaps or self.overlapping:
                alike = overlaps and self.overlapping == len(flight)
                if not alike or self.overlapping >= self.crew.plan.width:
                    queue.appendleft(work)
                    break
                self.overlapping += 1
                self.places += 1
                work.place = self.places
                takes = 0.0
            elif seconds is None:
                if flight:
                    queue.appendleft(work)
                    break
                self.unknown += 1
                takes = -1.0
                most = 1
            else:
                if work.timeout is not None:  # alone, so that the time that it is given is its own
                    if flight:
                        queue.appendleft(work)
                        break
                    most = 1
                takes = seconds * work.count
                if takes < SHORTEST:
                    takes = SHORTEST
                if load + takes > BUDGET and flight:
                    queue.appendleft(work)
                    break
                load += takes
            if definition.number not in self._defined:
                self._define(definition, message)
            sending = work.sending = Sending(self, now, takes)
            number = work.number
            flight[number] = work
            batch.append(work)
            if work.args is not None and not overlaps:
                numbers.append(number)
                calls.append(work.args)
                size += work.weight
                if queue and takes > 0 and work.weight == Work.weight:
                    room = min(most - len(batch), int((BUDGET - load) / takes), (PACKET - size) // work.weight)
                    more = _more_of(definition, queue, room)
                    for each in more:
                        each.sending = sending
                    run = [each.number for each in more]
                    flight.update(zip(run, more, strict=True))
                    numbers += run
                    calls += [each.args for each in more]  # type: ignore[misc]  # they have some
                    batch += more
                    load += takes * len(more)
                    size += work.weight * len(more)
            else:
                if numbers:
                    message.add_calls(definition.number, numbers, calls)
                    numbers, calls = [], []
                size += self._add(work, message)
        if numbers:
            message.add_calls(definition.number, numbers, calls)
        self.load = load
        self.last_heard = now
        if batch and self.ledger.returned:
            self._add_returned(message)
        return batch, message.frames()

    def _add(self, work: Work, message: WorkBatch) -> int:
        """Work that goes by itself. Its size in the message."""
        payload, kind = work.payload, work.kind
        if work.args is not None:
            payload = dumps(work.args, 5) if work.args else b""
        elif isinstance(payload, Parcel):
            payload, kind = payload.waybill(self.ledger), kind | SHARED
        message.add(work.number, kind, work.definition.number, payload)
        return len(payload)

    def _define(self, definition: Definition, message: WorkBatch) -> None:
        defined, size = self._defined, len(definition.payload)
        while defined and (len(defined) >= _DEFINITIONS_KEPT or self._defined_bytes + size > _DEFINITION_BYTES_KEPT):
            oldest = next(iter(defined))
            self._defined_bytes -= defined.pop(oldest)
            message.add(oldest, FORGET, 0, b"")
        defined[definition.number] = size
        self._defined_bytes += size
        payload = definition.payload
        if isinstance(payload, Parcel):
            message.add(definition.number, definition.kind | SHARED, 0, payload.waybill(self.ledger))
        else:
            message.add(definition.number, definition.kind, 0, payload)

    # -- shared memory that it has lent to this image -------------------------------------------------

    def _ring(self) -> None:
        """In any thread: a result of its is not looked at any more, and it is to be told. Soon: the next work will
        bring it along, and if there is none, a message of its own."""
        if not self._ringing:
            self._ringing = True
            hub = self.crew.hub
            hub.post(lambda: hub.after(TELL_AFTER, self._tell_returned))

    def _tell_returned(self) -> None:
        self._ringing = False
        if self.ledger.returned and self.alive and self.lane is not None:
            message = WorkBatch()
            self._add_returned(message)
            self.crew.hub.send(self, message.frames())

    def _add_returned(self, message: WorkBatch) -> None:
        for number in self.ledger.take_returned():
            message.add(number, CAME_BACK, 0, b"")

    def send(self, frames: list[bytes], router: zmq.Socket[bytes], works: Sequence[Work] = ()) -> None:
        """By the lane if it can go there without passing anything sent by bulk; see wire/lane.py."""
        if not self._bulk_unanswered and not self._bulk_waiting and self.lane is not None and self.lane.send(frames):
            return
        for work in works:
            if work.sending is not None:
                work.sending.by_bulk = True
        self._bulk_unanswered += len(works)
        if self.bulk_open:
            router.send_multipart([self.identity, *frames])
        else:
            self._bulk_waiting.append(frames)

    def ask_to_open(self) -> bool:
        """Something waits for bulk: has the drone been asked to open it, as far as that is needed?"""
        if not self._bulk_waiting or self._asked or self.lane is None:
            return True
        self._asked = self.lane.send(pack_numbers(OPEN))
        return self._asked

    def open_bulk(self, router: zmq.Socket[bytes]) -> None:
        """The drone's DEALER has said hello: only now does the ROUTER know the way to it."""
        self.bulk_open = True
        for frames in self._bulk_waiting:
            router.send_multipart([self.identity, *frames])
        self._bulk_waiting.clear()

    def hand_over(self, work: Work, part: Work) -> None:
        """`part`, all that is left of `work` here, takes its place and number. How long it takes is not known."""
        sending = work.sending
        assert sending is not None
        if sending.estimate >= 0:
            self.load -= sending.estimate
            self.unknown += 1
        part.number = work.number
        part.sending = Sending(self, sending.at, -1.0, sending.by_bulk)
        self.flight[part.number] = part

    def answered_all(self, numbers: list[int]) -> list[Work | None]:
        """The same for many."""
        if self._bulk_unanswered or self.overlapping:
            return [self.answered(number) for number in numbers]
        flight = self.flight
        works = [flight.pop(number, None) for number in numbers]
        known = unknown = 0.0
        for work in works:
            if work is not None:
                estimate = work.sending.estimate  # type: ignore[union-attr]  # it was in flight
                if estimate < 0:
                    unknown += 1
                else:
                    known += estimate
        self.load = self.load - known if flight else 0.0
        self.unknown -= int(unknown)
        return works

    def answered(self, number: int) -> Work | None:
        """Takes a work out of flight; None where it is not there."""
        work = self.flight.pop(number, None)
        if work is not None:
            sending = work.sending
            assert sending is not None
            if sending.by_bulk:
                self._bulk_unanswered -= 1
            if work.timeout is not None:
                self.deadlines.pop(number, None)
            if work.definition.overlaps:
                self.overlapping -= 1
            elif sending.estimate < 0:
                self.unknown -= 1
            else:
                self.load -= sending.estimate
            if not self.flight:
                self.load = 0.0
        return work

    # -- what it prints ---------------------------------------------------------------------------

    def printed(self) -> Heard:
        """Takes what has come through its pipes, and remembers the end of what it wrote to stderr and logged."""
        heard = self._merge.read([stream for stream in self.streams if stream.open])
        for each in heard:
            if isinstance(each, Record):
                self.stderr.append(each.text)
            elif each.stream == "stderr":
                if self.stack or each.text.startswith("Fatal Python error"):
                    self.stack.append(each.text)
                self.stderr.append(each.text)
        return heard

    def close(self, unwatch: Callable[[int], None]) -> None:
        ends: list[Stream | Lane] = [*self.streams]
        if self.lane is not None:
            ends.append(self.lane)
        for end in ends:
            with suppress(ValueError, OSError):
                unwatch(end.fileno())
            lifeline.close(end)
        self.streams.clear()
        self.lane = None


def drained(queue: deque[Work]) -> list[Work]:
    """Takes all that is in `queue`, one by one: what others add meanwhile is taken, or stays."""
    works = []
    with suppress(IndexError):
        while True:
            works.append(queue.popleft())
    return works


def _more_of(definition: Definition, queue: deque[Work], most: int) -> list[Work]:
    """Takes from the head of `queue` what goes with calls of `definition` that travel together."""
    more: list[Work] = []
    with suppress(IndexError):
        while len(more) < most:
            work = queue.popleft()
            if work._state == PENDING:
                alike = work.definition is definition and work.args is not None and work.weight == Work.weight
                if not alike or work.timeout is not None:
                    queue.appendleft(work)
                    break
                more.append(work)
    return more
