"""The driver's handle of a drone in a Ray actor.

    send ── WORK, STOP ──> calls of the actor ── answers: reports ──┐
         ── CANCEL, RECALL ──> the switch ──> control thread        ├── in order ──> handlers.py
                                          reports <── the switch ───┘

Answers are handled while holding the reactor's lock, because Ray's thread only posts them. If a
call fails because the actor is gone, the drone's exit record on its node is read first, so that the
tasks that had begun are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pickle import dumps
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import ObjectLostError, RayTaskError

from ...errors import Lost, Malformed
from ...memory.references import Serialized
from ...pool.drone_handle import DroneHandle
from ...pool.handlers import handle_records, handle_unsent_results
from ...pool.interfaces import State
from ...pool.task import Task
from ...wire.messages import STOP, WORK, unpack_records
from ...wire.output import LineSplitter, OrderedItems, OutputItems, OutputMerger
from ...wire.placeholders import split_remote_objects
from .buffers import LazyBuffers, OutOfBandBuffers, RayRefTable
from .drone import Report, SpawnReply
from .exit_record import FinalState

if TYPE_CHECKING:
    from ...pool.dispatcher import Dispatcher

LAST_REPORTS_TIMEOUT_SECONDS = 5.0  # for reports that an ending drone has sent by the switch
_CHUNK_BYTES = 1 << 20


class ActorOwner(Protocol):
    """The interface of a `RayEngine` for its handles."""

    dispatcher: Dispatcher
    switch: Any

    def is_connected(self) -> bool: ...
    def when_done(
        self, ref: Any, act: Callable[[Any], object], failed: Callable[[Exception], object], /
    ) -> None: ...
    def store_attachment(self, attachment: Any, /) -> LazyBuffers | OutOfBandBuffers: ...
    def on_call_failed(self, handle: RayHandle, error: Exception, /) -> None: ...
    def on_ended(self, handle: RayHandle, /) -> None: ...
    def kill(self, handle: RayHandle, /) -> None: ...
    def forget(self, handle: RayHandle, /) -> None: ...


class RayHandle(DroneHandle):
    takes_behind_others = False  # tasks behind a call of an actor cannot be recalled
    dispatcher: Dispatcher
    ref_table: RayRefTable

    def __init__(self, engine: ActorOwner, number: int, name: str, actor: Any) -> None:
        super().__init__(engine.dispatcher, number, name)
        self.ref_table = RayRefTable()
        self.actor = actor
        self.requested_at = self.dispatcher.reactor.timers.now()
        self.spawn_reply: SpawnReply | None = None
        self.dying = False  # then no report is read: the exit record has their content
        self.unanswered_calls = 0  # of the actor
        self.final_report = -1  # the drone has ended when this report has been read
        self.out_read = self.err_read = 0  # bytes of its output that have arrived
        self._engine = engine
        self._handle_message = actor.handle_message.options(num_returns=2)
        self._reports: dict[int, tuple[Report, Sequence[Any]]] = {}  # that came before earlier ones
        self._last_read_report = 0  # reports that were read, in order
        self._memory = 0
        self._started = 0
        self._final_state = FinalState()
        self._output_streams = [_OutputStream(name, "stdout"), _OutputStream(name, "stderr")]
        self._merge = OutputMerger()

    # -- sending -----------------------------------------------------------------------------------

    def is_up(self) -> bool:
        return self.alive and not self.dying and ray.is_initialized()

    def can_take(self, dedicated: bool = False) -> bool:
        return not self.dying and super().can_take(dedicated)

    def note_dying(self) -> None:
        self.dying = True
        self.changed()

    def send(self, frames: list[bytes], tasks: Sequence[Task] = ()) -> None:
        try:
            self._send(frames, tasks)
        except Exception as error:
            # Failures are posted, because the caller still holds the reactor's lock and goes on
            # with other drones.
            if not self._engine.is_connected():
                self.dispatcher.post(self.dispatcher.break_if_lost)
            elif tasks:
                self.dispatcher.post(self._on_send_failed, frames, tasks, error)
            else:
                raise

    def _send(self, frames: list[bytes], tasks: Sequence[Task]) -> None:
        kind = frames[0][:1]
        outgoing = self.ref_table.take_outgoing() if kind == WORK else []
        if kind == STOP:
            end = self.actor.end.options(num_returns=2)
            self._await_answer(end.remote(self._last_read_report), is_last=True)
        # A message without tasks, for a busy drone, goes to the control thread.
        elif kind != WORK or (self.in_flight and not tasks and not outgoing):
            self._engine.switch.put_order.remote(self.number, frames)
        else:
            self._call(frames, tasks, outgoing)

    def _call(
        self, frames: list[bytes], tasks: Sequence[Task] = (), outgoing: Sequence[Any] = ()
    ) -> None:
        packed = dumps((self._last_read_report, frames), 5)
        self._await_answer(self._handle_message.remote(packed, *outgoing), frames, tasks)

    def probe(self) -> None:
        """Call the actor without tasks, so that the call fails if the drone is dead."""
        self._call([])

    def _await_answer(
        self,
        refs: Sequence[Any],
        frames: Sequence[bytes] = (),
        tasks: Sequence[Task] = (),
        is_last: bool = False,
    ) -> None:
        """Watch a call of the actor; `refs` are the references of its results.

        These are a packed report and the buffers beside it. `frames` and `tasks` are the message
        that the call carries.
        """
        answer, attachment = refs
        self.unanswered_calls += 1
        on_answer = partial(self._on_answer, attachment, is_last)
        self._engine.when_done(answer, on_answer, partial(self._on_not_answered, frames, tasks))

    def _kill(self) -> None:
        if not self.dying:
            self._engine.kill(self)

    # -- receiving, holding the reactor's lock -----------------------------------------------------

    def _on_answer(self, attachment: Any, is_last: bool, packed: bytes) -> None:
        self.unanswered_calls -= 1
        if is_last:
            self.final_report = Report.unpack(packed).number
            self.dispatcher.call_later(LAST_REPORTS_TIMEOUT_SECONDS, self._engine.on_ended, self)
        self.handle_report(packed, attachment)

    def _on_not_answered(
        self, frames: Sequence[bytes], tasks: Sequence[Task], error: Exception
    ) -> None:
        """Handle a failed call. If buffers beside its message were lost, take back its tasks."""
        self.unanswered_calls -= 1
        cause = error.cause if isinstance(error, RayTaskError) else error
        if not isinstance(cause, ObjectLostError):
            self._engine.on_call_failed(self, error)
        elif self.is_up():
            reason = str(cause).strip().splitlines()[0]
            lost = Lost(
                f"an argument of the task was on a node that was lost: {reason}", drone=self.name
            )
            self.dispatcher.recompute_inputs(self._take_back(frames, tasks), lost)
            self.dispatcher.after_answer(self)

    def handle_report(self, packed: bytes, attachment: Any) -> None:
        """Handle a report, and later ones that waited for it.

        `attachment` came beside the report: an ObjectRef, `OutOfBandBuffers`, or None.
        """
        self.last_contact_at = self.dispatcher.reactor.timers.now()
        report = Report.unpack(packed)
        if self.dying:
            return
        incoming: Sequence[Any] = ()
        if report.has_buffers:
            incoming = [self._engine.store_attachment(attachment)]
        self._reports[report.number] = report, incoming
        while self._last_read_report + 1 in self._reports:
            self._last_read_report += 1
            self._apply_report(*self._reports.pop(self._last_read_report))
        if self._last_read_report == self.final_report:
            self._engine.on_ended(self)

    def _apply_report(self, report: Report, incoming: Sequence[Any]) -> None:
        self._memory = report.memory or self._memory
        self._started = report.started
        self._feed_output(report.out, report.err)
        self.ref_table.incoming = incoming
        try:
            if report.records:
                handle_records(self.dispatcher, self, unpack_records(report.records))
        except Malformed as error:
            self.dispatcher.fail(error)
        self.ref_table.incoming = ()
        self.print_output()

    def _feed_output(self, out: bytes, err: bytes) -> None:
        self.out_read += len(out)
        self.err_read += len(err)
        for stream, printed in zip(self._output_streams, (out, err), strict=True):
            stream.unread += printed

    def take_output(self) -> OutputItems:
        return self._merge.read([stream for stream in self._output_streams if stream.open])

    # -- state of the drone ------------------------------------------------------------------------

    def last_started(self) -> int:
        """Return the number of the task begun last; by default, the first task in flight, because
        a drone runs tasks in the order of sending.
        """
        if self.state is State.DEAD:
            return self._final_state.started
        return (
            self._started
            if self._started in self.in_flight
            else next(iter(list(self.in_flight)), 0)
        )

    def heartbeat(self) -> tuple[object, dict[str, tuple[float, float]]]:
        return self._last_read_report, {}

    def stall_reason(self) -> str:
        return (
            "no report arrives: the process is stopped, its node cannot be reached, or C code "
            "holds its interpreter"
        )

    def memory(self, enough: int) -> int:
        return self._memory

    def _take_back(self, frames: Sequence[bytes], tasks: Sequence[Task]) -> list[Task]:
        """Take back the tasks of a message that did not arrive."""
        self.undo_batch(frames)
        pending = [task for task in tasks if self.in_flight.get(task.number) is task]
        for task in pending:
            self.remove_in_flight(task.number)
        return pending

    def _on_send_failed(
        self, frames: Sequence[bytes], tasks: Sequence[Task], error: Exception
    ) -> None:
        """Reject tasks of a message that Ray has refused. Called holding the reactor's lock.

        If any tasks have buffers beside the message, these are taken for the cause. Then only
        those tasks are rejected, and the others are queued again.
        """
        pending = self._take_back(frames, tasks)
        rejected = [
            task
            for task in pending
            if isinstance(split_remote_objects(task.payload)[0], Serialized)
        ] or pending
        self.dispatcher.reject_or_retry(rejected, error, may_retry=False)
        self.dispatcher.requeue(
            [task for task in pending if task not in rejected and not task.promise.done()]
        )
        self.dispatcher.after_answer(self)

    def set_final_state(self, final_state: FinalState | None) -> None:
        """Note the exit record of a dead drone.

        If None, for example because the node is gone too, all tasks in flight may have begun.
        """
        if final_state is None:
            last = next(reversed(list(self.in_flight)), 0)
            final_state = FinalState(started=last)
        self._final_state = final_state
        self._feed_output(final_state.out, final_state.err)

    def collect_last_results(self) -> None:
        handle_unsent_results(self.dispatcher, self, self._final_state.unread)

    def close(self) -> None:
        for stream in self._output_streams:
            stream.ended = True
        self.print_output()
        self.ref_table.close()
        self._engine.forget(self)


class _OutputStream(LineSplitter):
    """A stream of output that arrives in reports."""

    def __init__(self, drone: str, name: str) -> None:
        super().__init__(drone, name)
        self.unread = b""
        self.ended = False

    def read(self) -> OrderedItems:
        unread, self.unread = self.unread, b""
        entries: OrderedItems = []
        # In pieces, as through a pipe, so that a line without an end is shown in parts.
        while len(unread) > _CHUNK_BYTES:
            entries += self._parse(unread[:_CHUNK_BYTES])
            unread = unread[_CHUNK_BYTES:]
        self.open = not self.ended
        if unread or self.ended:
            entries += self._parse(unread)
        return entries
