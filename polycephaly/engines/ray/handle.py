"""The driver's handle of a drone in a Ray actor.

    send ── WORK, STOP ──> calls of the actor ── answers: reports ──┐
         ── CANCEL, RECALL ──> the switch ──> control thread        ├── in order ──> handlers.py
                                          reports <── the switch ───┘

Answers are handled while holding the reactor's lock, because Ray's thread only posts them. If a
call fails because the actor is gone, the drone's exit record on its node is read first, so that the
tasks that had begun are known."""

from __future__ import annotations

from collections.abc import Sequence
from pickle import dumps
from typing import TYPE_CHECKING, Any

import ray

from ...errors import Lost
from ...pool.drone_handle import DroneHandle, State
from ...pool.handlers import hear, hear_kept, print_lines
from ...pool.task import Task
from ...store.placeholders import untaken
from ...store.references import Serialized
from ...wire.messages import STOP, WORK, Malformed
from ...wire.output import Heard, Line, LineSplitter, OutputMerger, OutputRecord
from .buffers import RayRefTable
from .drone import Report, SpawnReply
from .exit_record import FinalState

if TYPE_CHECKING:
    from .engine import RayEngine

__all__ = ["RayHandle"]

_PIECE = 1 << 20  # bytes


class RayHandle(DroneHandle):
    def __init__(self, engine: RayEngine, number: int, name: str, actor: Any) -> None:
        super().__init__(engine.dispatcher, number, name)
        self.ref_table: Any = RayRefTable()
        self.actor = actor
        self.asked_for = self.dispatcher.reactor.timers.now()
        self.born_as: SpawnReply | None = None
        self.dying = False
        self.calls = 0  # calls of the actor that are unanswered
        self.deaf = False  # ignores reports, because the exit record has their content
        self.last_report = -1  # the drone has ended when this report has been read
        self.out_read = self.err_read = 0  # bytes of its output that have arrived
        self._engine = engine
        self._take = actor.take.options(num_returns=2)
        self._reports: dict[int, tuple[Report, Sequence[Any]]] = {}  # that came before earlier ones
        self._has = 0  # reports that were read, in order
        self._memory = 0
        self._started = 0
        self._remains = FinalState()
        self._feeds = [_Feed(name, "stdout"), _Feed(name, "stderr")]
        self._merge = OutputMerger()

    # -- sending -----------------------------------------------------------------------------------

    def is_up(self) -> bool:
        return self.alive and not self.dying and ray.is_initialized()

    def takes(self, dedicated: bool = False) -> bool:
        """One batch at a time, because tasks behind a call of an actor cannot be recalled."""
        if not self.is_up() or (self.in_flight and not self.overlapping):
            return False
        return super().takes(dedicated)

    def send(self, frames: list[bytes], tasks: Sequence[Task] = ()) -> None:
        try:
            self._send(frames, tasks)
        except Exception as error:
            self._engine.not_sent(self, frames, tasks, error)

    def _send(self, frames: list[bytes], tasks: Sequence[Task]) -> None:
        kind = frames[0][:1]
        if kind == WORK:
            loaded = self.ref_table.take()
            # A message without tasks, for a busy drone, goes to the control thread.
            if not tasks and not loaded and self.in_flight:
                self._engine.order(self, frames)
            else:
                answer, cargo = self._take.remote(dumps((self._has, frames), 5), *loaded)
                self._engine.await_answer(self, answer, cargo, frames, tasks)
        elif kind == STOP:
            self._engine.stop(self)
        else:
            self._engine.order(self, frames)

    def call_end(self) -> Any:
        return self.actor.end.options(num_returns=2).remote(self._has)

    def probe(self) -> None:
        """Call the actor without tasks, so that the call fails if the drone is dead."""
        answer, cargo = self._take.remote(dumps((self._has, []), 5))
        self._engine.await_answer(self, answer, cargo)

    def kill(self, kill_reason: str = "") -> None:
        self.kill_reason = self.kill_reason or kill_reason
        if not self.dying:
            self._engine.kill(self)

    # -- receiving, holding the reactor's lock -----------------------------------------------------

    def hear(self, report: Report, cargo: Any) -> None:
        """Handle a report, and later ones that waited for it.

        `cargo` came beside the report: an ObjectRef, `OutOfBandBuffers`, or None.
        """
        if self.deaf:
            return
        landed: Sequence[Any] = ()
        if report.laden:
            landed = [self._engine.land(cargo)]
        self._reports[report.number] = report, landed
        while self._has + 1 in self._reports:
            self._has += 1
            self._read(*self._reports.pop(self._has))
        if self._has == self.last_report:
            self._engine.ended(self)

    def _read(self, report: Report, landed: Sequence[Any]) -> None:
        self._memory = report.memory or self._memory
        self._started = report.started
        self._print(report.out, report.err)
        self.ref_table.landed = landed
        for frames in report.messages:
            try:
                hear(self, frames)
            except Malformed as wrong:
                self.dispatcher.fail(wrong)
        self.ref_table.landed = ()
        print_lines(self)

    def _print(self, out: bytes, err: bytes) -> None:
        self.out_read += len(out)
        self.err_read += len(err)
        for feed, printed in zip(self._feeds, (out, err), strict=True):
            feed.give(printed)

    def printed(self) -> Heard:
        heard = self._merge.read([feed for feed in self._feeds if feed.open])
        self.remember(heard)
        return heard

    # -- state of the drone ------------------------------------------------------------------------

    def started(self) -> int:
        """Return the number of the task begun last; by default, the first task in flight, because
        a drone runs tasks in the order of sending.
        """
        if self.state is State.DEAD:
            return self._remains.started
        return (
            self._started
            if self._started in self.in_flight
            else next(iter(list(self.in_flight)), 0)
        )

    def sent(self) -> int:
        return self._remains.sent

    def heartbeat(self) -> tuple[object, dict[str, tuple[float, float]]]:
        return self._has, {}

    def why_quiet(self) -> str:
        return "nothing is heard of it: it is stopped, its node cannot be reached, or C code holds its interpreter"

    def memory(self, enough: int) -> int:
        return self._memory

    def not_begun(self, frames: Sequence[bytes], tasks: Sequence[Task], lost: Lost) -> None:
        """Take back the tasks of a message that did not arrive, because its buffers are lost."""
        self.unheard(frames)
        here = [task for task in tasks if self.in_flight.get(task.number) is task]
        for task in here:
            self.answered(task.number)
        self.dispatcher.fill_again(here, lost)
        self.dispatcher.answered(self)

    def not_sent(self, frames: Sequence[bytes], tasks: Sequence[Task], error: Exception) -> None:
        """Reject tasks of a message that Ray has refused. Called holding the reactor's lock.

        If any tasks have buffers beside the message, these are taken for the cause. Then only
        those tasks are rejected, and the others are queued again.
        """
        self.unheard(frames)
        here = [task for task in tasks if self.in_flight.get(task.number) is task]
        for task in here:
            self.answered(task.number)
        losers = [task for task in here if isinstance(untaken(task.payload)[0], Serialized)] or here
        self.dispatcher.lose(losers, error, again=False)
        self.dispatcher.requeue([task for task in here if task not in losers and not task.done()])
        self.dispatcher.look_for_end = True
        self.dispatcher.answered(self)

    def leave(self, remains: FinalState | None) -> None:
        """Note the exit record of a dead drone.

        If None, for example because the node is gone too, all tasks in flight may have begun.
        """
        if remains is None:
            last = next(reversed(list(self.in_flight)), 0)
            remains = FinalState(started=last)
        self._remains = remains
        self._print(remains.out, remains.err)

    def last_words(self) -> None:
        hear_kept(self, self._remains.kept)

    def close(self) -> None:
        for feed in self._feeds:
            feed.end()
        print_lines(self)
        self.ref_table.close()
        self._engine.forget(self)


class _Feed(LineSplitter):
    """A stream of output that arrives in reports."""

    def __init__(self, drone: str, name: str) -> None:
        super().__init__(drone, name)
        self._given = b""
        self._ended = False

    def give(self, printed: bytes) -> None:
        self._given += printed

    def end(self) -> None:
        self._ended = True

    def read(self) -> list[Line | OutputRecord | int]:
        given, self._given = self._given, b""
        heard: list[Line | OutputRecord | int] = []
        # In pieces, as through a pipe, so that a line without an end is shown in parts.
        while len(given) > _PIECE:
            heard += self._sort(given[:_PIECE])
            given = given[_PIECE:]
        self.open = not self._ended
        if given or self._ended:
            heard += self._sort(given)
        return heard
