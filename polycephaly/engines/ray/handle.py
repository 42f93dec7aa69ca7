"""The driver's end of a drone in a Ray actor.

    send ── WORK, STOP ──> calls of the actor ── answers: reports ──┐
         ── CANCEL, RECALL ──> the switch ──> its ear               ├── in their order ──> hearing
                                          reports <── the switch ───┘

Calls are answered in the hub's turns: Ray tells in a thread of its own, which posts. A call that
fails because the actor is gone brings the drone's end: what it left on its node is read first, so
that it is known what had begun."""

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
        self.calls = 0  # that it has not answered
        self.deaf = False  # what it still says is found in what it left
        self.last_report = -1  # when that has been read it has ended
        self.out_read = self.err_read = 0  # bytes of its output that came
        self._engine = engine
        self._take = actor.take.options(num_returns=2)
        self._reports: dict[int, tuple[Report, Sequence[Any]]] = {}  # that came before others
        self._has = 0  # reports, in their order
        self._memory = 0
        self._started = 0
        self._remains = FinalState()
        self._feeds = [_Feed(name, "stdout"), _Feed(name, "stderr")]
        self._merge = OutputMerger()

    # -- sending -----------------------------------------------------------------------------------

    def is_up(self) -> bool:
        return self.alive and not self.dying and ray.is_initialized()

    def takes(self, dedicated: bool = False) -> bool:
        """One batch at a time: what waits behind a call of an actor cannot be had back."""
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
            if (
                not tasks and not loaded and self.in_flight
            ):  # a question, while it is busy: its ear hears that
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
        """Has its death noticed, if it is dead."""
        answer, cargo = self._take.remote(dumps((self._has, []), 5))
        self._engine.await_answer(self, answer, cargo)

    def kill(self, kill_reason: str = "") -> None:
        self.kill_reason = self.kill_reason or kill_reason
        if not self.dying:
            self._engine.kill(self)

    # -- hearing, in turns -------------------------------------------------------------------------

    def hear(self, report: Report, cargo: Any) -> None:
        """And what goes beside it: an ObjectRef, a `OutOfBandBuffers`, or nothing."""
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

    # -- what is known of it -----------------------------------------------------------------------

    def started(self) -> int:
        """It runs what it was sent, in that order."""
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
        """A message did not arrive, since what goes beside it is lost."""
        self.unheard(frames)
        here = [task for task in tasks if self.in_flight.get(task.number) is task]
        for task in here:
            self.answered(task.number)
        self.dispatcher.fill_again(here, lost)
        self.dispatcher.answered(self)

    def not_sent(self, frames: Sequence[bytes], tasks: Sequence[Task], error: Exception) -> None:
        """In a turn: Ray has not taken a message. It did not like what lies beside it, if anything
        does."""
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
        """What was found of it; None where its node is gone too: then all that it had may have
        begun."""
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
    """Output that comes in reports."""

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
        while (
            len(given) > _PIECE
        ):  # as it would come through a pipe: a line without an end is told in pieces
            heard += self._sort(given[:_PIECE])
            given = given[_PIECE:]
        self.open = not self._ended
        if given or self._ended:
            heard += self._sort(given)
        return heard
