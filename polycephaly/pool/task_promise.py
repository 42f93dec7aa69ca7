"""`TaskPromise`: the promise of a task's value.

    Task.promise ──> TaskPromise ── until it is settled ──> Task
                          └──────── from then on ─────────> Facts: number, name, times, sizes

The task is the pool's record of a call, the promise is the user's. A promise that is kept for long
keeps neither the task nor its pool, nor anything of the other tasks of its message.
"""

from __future__ import annotations

import os
from _thread import get_ident
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pickle import dumps
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import ref

from ..promises.forgotten import shown_as_promise
from ..promises.opener_thread import settling_threads
from ..promises.promise import (
    DICT_AT_CREATION,
    HAS_OUTCOME,
    PENDING,
    Promise,
    settling_owners,
    stored_error,
    stored_value,
    wait_settled,
)
from ..promises.sealed import is_sealed
from ..wire.debugging import MAX_KEPT_FRAMES, debug_frames, release_frames
from .interfaces import TaskRunner, refuse_in_fork

if TYPE_CHECKING:
    from ..promises.spans import Spans

T = TypeVar("T")


class PendingTask(Protocol):
    """What a promise asks its task for."""

    @property
    def dispatcher(self) -> TaskRunner: ...
    @property
    def inputs(self) -> Sequence[Any]: ...
    def is_running(self) -> bool: ...
    def facts(self) -> tuple[Any, ...]: ...
    def release_inputs(self) -> None: ...


class Facts(NamedTuple):
    """What a promise tells of its task. The times are as in `Spans`."""

    number: int  # of the last attempt
    label: str
    queued: float
    sent: float | None
    drone: str | None
    started: float | None = None
    finished: float | None = None
    received: float | None = None
    args: tuple[Any, ...] | None = None
    """Arguments that were pickled together with those of other tasks; they are small and immutable.
    The bytes that they take alone are counted when `spans` is read."""
    bytes_sent: int = 0  # without those
    bytes_received: int = 0
    first_number: int = 0
    input_numbers: tuple[int, ...] = ()
    timed_out: bool = False
    runner: ref[TaskRunner] | None = None  # None if no frames can be kept: there is a value

    @property
    def call_number(self) -> int:
        """The number of the call, the same for all attempts."""
        return self.first_number or self.number

    def frames_address(self) -> str | None:
        """Return where the frames of the last attempt are kept, or None."""
        runner = None if self.runner is None else self.runner()
        return None if runner is None else address_of_frames(runner, self.number)


@shown_as_promise
class TaskPromise(Promise[T]):
    """The promise of a task's value. Made by the task."""

    _can_be_interrupted = True
    # A plain tuple, because to make a named one takes 0.4 us, nine times as long.
    _facts: tuple[Any, ...] = ()

    def __init__(self, task: PendingTask) -> None:
        self._unclaimed = None  # as in `Promise.__init__`
        if DICT_AT_CREATION:
            self.__dict__  # noqa: B018
        # None once the promise is settled, and `_facts` are set.
        self._task: PendingTask | None = task

    def running(self) -> bool:
        task = self._task
        return self._state == PENDING and task is not None and task.is_running()

    @property
    def spans(self) -> Spans:
        from ..promises.spans import Spans

        facts = facts_of(self)
        times = facts.queued, facts.sent, facts.started, facts.finished, facts.received
        if facts.started is None:
            return Spans(*times, drone=facts.drone)
        bytes_sent, bytes_received = facts.bytes_sent, facts.bytes_received
        if facts.args is not None:
            bytes_sent += len(dumps(facts.args, 5))
            value = stored_value(self)
            if not bytes_received and not is_sealed(value):
                bytes_received = len(dumps(value, 5))
        return Spans(*times, bytes_sent, bytes_received, facts.drone)

    def debug(self) -> None:
        address = facts_of(self).frames_address() if self._has_error() else None
        if address is not None:
            # Their keeper may have been killed with its drone.
            with suppress(ConnectionRefusedError, ConnectionResetError):
                debug_frames(address)
                return
        raise RuntimeError(f"no frames are kept for {self!r}: {self._why_no_frames()}")

    def release(self) -> None:
        if self._has_error():
            release_kept_frames(facts_of(self).frames_address())

    def _has_error(self) -> bool:
        """Wait for the end of the task, and return whether it has an error."""
        try:
            wait_settled(self, None)
        except CancelledError:
            if not self.cancelled():  # but the thread that waits
                raise
            return False
        return stored_error(self) is not None

    def _why_no_frames(self) -> str:
        if self.cancelled():
            return "the task was cancelled"
        if self.exception() is None:
            return "the task has not failed"
        facts = facts_of(self)
        if facts.timed_out:
            return "the task ran into its time limit; the cause of the error, if any, has the stack"
        runner = None if facts.runner is None else facts.runner()
        if runner is not None and runner.frames_address(facts.number) is None:
            return "its pool was made without post_mortem=True"
        if runner is None or runner.refusal is not None:
            return "the pool has ended, and frames with it: debug within the block of the pool"
        return (
            "they were debugged or released, or their drone has ended, or had kept those of "
            f"{MAX_KEPT_FRAMES} other tasks already: debug or release these (`polycephaly attach` "
            "lists them), and run the task again"
        )

    def _settle(
        self, state: str, result: Any, exception: BaseException | None, unless_running: bool = False
    ) -> bool:
        is_ours = True  # also if a hook raises
        try:
            is_ours = super()._settle(state, result, exception, unless_running)
            return is_ours
        finally:
            if is_ours and self._state in HAS_OUTCOME:  # else `_withdraw` comes
                self._leave_task()

    def _leave_task(self) -> None:
        task = self._task
        if task is not None:
            self._facts = self._facts or task.facts()
            self._task = None
            task.dispatcher.unsettled.pop(task, None)

    def _withdraw(self) -> None:
        task = self._task
        if task is not None:
            task.release_inputs()
            task.dispatcher.post(task.dispatcher.withdraw, task)
            self._leave_task()

    def _call_hooks(self) -> None:
        me, task = get_ident(), self._task
        if task is None or me not in settling_threads:
            super()._call_hooks()
            return
        outer, settling_owners[me] = settling_owners.get(me), task.dispatcher
        try:
            super()._call_hooks()
        finally:
            if outer is None:
                settling_owners.pop(me, None)
            else:
                settling_owners[me] = outer

    def _dependencies(self) -> Sequence[Promise[Any]]:
        task = self._task
        inputs = () if task is None else task.inputs
        return [each for each in inputs if isinstance(each, Promise) and not each.done()]

    def _before_wait(self, deadline: float | None) -> None:
        task = self._task
        if task is not None:
            refuse_in_fork(self, task.dispatcher.reactor)
            if task.inputs and deadline is None:
                task.dispatcher.note_waiting_thread()

    def _description(self) -> str:
        facts = facts_of(self)
        return f"{facts.label} #{facts.call_number}"

    def _label(self) -> str:
        return facts_of(self).label


def facts_of(promise: TaskPromise[Any]) -> Facts:
    """Return what is known of the promise's task. Any thread may call this."""
    task = promise._task
    facts = promise._facts  # looked at after the task: if that has gone, they are there
    return Facts(*(facts if facts or task is None else task.facts()))


def address_of_frames(runner: TaskRunner, number: int) -> str | None:
    """Return where the frames of the failed task are kept, or None."""
    address = runner.frames_address(number)
    return address if address is not None and os.path.exists(address) else None


def release_kept_frames(address: str | None) -> None:
    """Release the frames that are kept at `address`, if there are any."""
    if address is not None:
        with suppress(OSError):  # released meanwhile, or with the pool
            release_frames(address)
