"""Handlers of the messages that drones send.

    RESULTS ──hear──> tasks leave flight, with their answers ──settle──> promises
              (holding the reactor's lock)                     (after it is released)

While the reactor's lock is held, no code of users runs. Therefore answers that may run such code
are unpickled in `settle`. Small immutable values, which share a pickle, are unpickled at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..promises.promise import FINISHED, callbacks
from ..store.placeholders import travelling
from ..store.references import Received
from ..wire.exceptions import unpack_exception
from ..wire.messages import (
    ERROR,
    FRAMES,
    GIVEN,
    HELLO,
    LARGE_FROM,
    LOAN_OVER,
    NOT_PACKED,
    PACKED,
    PROTOCOL,
    RESULTS,
    RETURNED,
    SHARED,
    SPLIT,
    TRAIL,
    VALUE,
    VALUES,
    WITHDRAWN,
    Malformed,
    Outcome,
    head_type,
    numbers,
    unpack_frames,
    unpack_outcomes,
    unpack_together,
)
from ..wire.output import deliver
from ..wire.slices import RUNNING, Answers, unpack_split
from .task import Answer, AnswersTogether, KeptTask, Slice, Task

if TYPE_CHECKING:
    from ..wire.functions import RemoteFunction
    from .drone_handle import DroneHandle

__all__ = ["finish", "hear", "hear_kept", "print_lines", "settle"]

log = logging.getLogger(__name__)


def hear(handle: DroneHandle, frames: list[bytes]) -> None:
    """Handle one message of a drone. Raises `Malformed`."""
    dispatcher = handle.dispatcher
    kind = head_type(frames)
    if kind == RESULTS:
        outcomes = unpack_outcomes(frames)
        _hear_results(handle, outcomes)
        if len(frames) > 2 and any(
            len(each[4]) >= LARGE_FROM and each[1] & ~SHARED != ERROR for each in outcomes
        ):
            no_room = MemoryError(f"{handle.name} found no room for a result")
            dispatcher.reactor.deliver(partial(handle.ref_table.arena.warn, no_room))
    elif kind == HELLO:
        said = numbers(frames)
        if said[:1] != (PROTOCOL,):
            raise Malformed(f"{handle.name} speaks protocol {said[:1]}, not {PROTOCOL}")
        dispatcher.supervisor.hello(handle)
    elif kind == RETURNED:
        dispatcher.returned(handle, numbers(frames))
    elif kind == FRAMES:
        dispatcher.watch.hear_frames(handle, *unpack_frames(frames))
    else:
        raise Malformed(f"{handle.name} sent a message of type {kind!r}")


def hear_kept(handle: DroneHandle, kept: bytes) -> None:
    """Handle the results that a dead drone had ready and perhaps not sent."""
    if kept:
        try:
            outcomes = unpack_outcomes([RESULTS, kept])
            _hear_results(handle, [each for each in outcomes if each[0] in handle.in_flight])
        except Malformed as wrong:  # the drone may have written anywhere before it died
            log.warning("what %s left in its page was dropped: %s", handle.name, wrong)


def print_lines(handle: DroneHandle) -> None:
    heard, dispatcher = handle.printed(), handle.dispatcher
    if heard:
        dispatcher.reactor.deliver(
            partial(deliver, dispatcher.output, heard, dispatcher.output_listeners)
        )


def _hear_results(handle: DroneHandle, outcomes: list[Outcome]) -> None:
    print_lines(handle)  # so that the output of a task is out before its promise settles
    dispatcher = handle.dispatcher
    now = handle.last_heard = dispatcher.reactor.timers.now()
    settled: list[Task] = []
    timed: RemoteFunction | None = None
    seconds, calls = 0.0, 0
    parts: dict[int, int] = {}  # of slices, by number: how many calls were answered
    try:
        for number, status, started, finished, payload, output in outcomes:
            if status > WITHDRAWN:
                if status == VALUES:
                    _hear_values(handle, payload, now)
                    continue
                if status == LOAN_OVER:
                    handle.ref_table.came_back(number)
                    continue
                if status == TRAIL:
                    _hear_trail(handle, payload)
                    continue
                if status & ~SHARED == PACKED:
                    dispatcher.directory.packed(
                        handle,
                        number,
                        handle.ref_table.arrived(payload) if status & SHARED else payload,
                    )
                    continue
                if status == NOT_PACKED:
                    dispatcher.directory.not_packed(handle, number, payload)
                    continue
                if status == GIVEN:
                    dispatcher.directory.given(handle, handle.in_flight.get(number), payload)
                    continue
                task, status, payload, done = _hear_special(handle, number, status, payload)
            else:
                task = handle.answered(number)
                done = 1 if task is None else task.count
            if task is None:  # given up as lost before the answer came
                continue
            if status == WITHDRAWN:
                task.never_began()
                if not task.done():  # not cancelled by any thread, but no answer will come either
                    dispatcher.reactor.deliver(task.cancel)
                continue
            if task.place > handle.begun:
                handle.begun = task.place
            started, finished = started - handle.ahead, finished - handle.ahead
            task.answer = Answer(started, finished, now, travelling(task.payload), len(payload))
            task.status = status
            if task.retries and isinstance(payload, Received) and payload.is_far():
                task.recipe = task.payload
            if status == VALUE and isinstance(task, KeptTask):
                payload = dispatcher.directory.add(handle, task, payload)
            task.payload = payload
            if output:
                task.output = output
            settled.append(task)
            if done != 1:
                parts[task.number] = done
            if task.definition is not timed:
                if timed is not None:
                    timed.took(seconds, calls)
                timed, seconds, calls = task.definition, 0.0, 0
            seconds += finished - started
            calls += done
            handle.tasks_done += done
        if timed is not None:
            timed.took(seconds, calls)
        dispatcher.record.several(handle.name, settled, parts)
    finally:  # tasks that have left flight are settled even if the rest of the message fails
        dispatcher.reactor.deliver(partial(settle, settled))
    dispatcher.answered(handle)


def _hear_values(handle: DroneHandle, payload: Any, now: float) -> None:
    """Handle the outcomes of many tasks, whose values are small and immutable."""
    numbers, started, finished, values = unpack_together(payload, 4)
    try:
        seconds = sum(finished) - sum(started)
    except TypeError:
        raise Malformed("times that are none") from None
    if handle.ahead:
        started, finished = ([at - handle.ahead for at in times] for times in (started, finished))
    tasks = handle.answered_all(numbers)
    definitions = {task.definition for task in tasks if task is not None}
    alike = len(definitions) == 1
    handle.dispatcher.record.many(
        handle.name, tasks, started, finished, seconds, now, len(payload), alike
    )
    if alike:
        definitions.pop().took(seconds, len(tasks))
    else:
        for task, began, ended in zip(tasks, started, finished, strict=True):
            if task is not None:
                task.definition.took(ended - began, 1)
    handle.tasks_done += len(tasks)
    answer = AnswersTogether(numbers, started, finished, now)
    handle.dispatcher.reactor.deliver(partial(_settle_values, tasks, values, answer))


def _hear_trail(handle: DroneHandle, payload: Any) -> None:
    try:
        handle.dispatcher.record.hear_trail(handle.name, bytes(payload), handle.ahead)
    except ValueError as wrong:  # only a timeline lacks something; no caller waits for that
        log.warning("%s: %s", handle.name, wrong)


def _hear_special(
    handle: DroneHandle, number: int, status: int, payload: Any
) -> tuple[Task | None, int, Any, int]:
    """Handle the outcome of a slice, or one in shared memory.

    Returns the task, its status, its payload, and how many calls the answer covers."""
    shared, status = status & SHARED, status & ~SHARED
    done = rest = state = 0
    if status == SPLIT:
        done, rest, state, payload = unpack_split(payload)
    if shared:
        payload = handle.ref_table.arrived(payload)
    if status != SPLIT:
        task = handle.answered(number)
        return task, status, payload, 1 if task is None else task.count
    task = handle.in_flight.get(number)
    if task is None:
        return None, VALUE, payload, 0
    # A part that is cut again: this message has come twice.
    if state == RUNNING and isinstance(task, Slice) and task.continues:
        return None, VALUE, payload, 0
    begun = task.count - done - rest
    if not isinstance(task, Slice) or begun < 0 or begun > (state == RUNNING):
        raise Malformed(
            f"{handle.name} answered {done} and gave back {rest} of the {task.count} calls of work {number}"
        )
    handle.dispatcher.split(handle, task, done, rest, state)
    return task, VALUE, payload, done


# -- after the reactor's lock is released ----------------------------------------------------------


def settle(answered: Iterable[Task]) -> None:
    """Settle tasks by their answers, which are unpickled here."""
    for task in answered:
        try:
            value, error = _open(task)
        except BaseException as wrong:
            value, error = None, wrong.with_traceback(_beyond_ours(wrong.__traceback__))
            with suppress(BaseException):
                error.add_note(f"while unpickling the result of {task.definition.label}")
        finish(task, FINISHED, value, error)


def finish(task: Task, state: str, value: Any, error: BaseException | None) -> None:
    """Settle `task`. An exception in one of its callbacks is logged, so that the tasks after it are
    settled too."""
    try:
        task._settle(state, value, error)
    except BaseException:
        callbacks.exception("a callback of %r failed", task)


def _open(task: Task) -> tuple[Any, BaseException | None]:
    """Return the value and the error of the answer."""
    payload, task.payload = task.payload, b""
    try:
        if task.status == VALUE:
            value = task.open(payload) if payload else None  # an empty payload stands for None
            if isinstance(value, Answers):  # which are unpickled one by one, later
                value.given = task.given
            return value, None
        error = unpack_exception(bytes(payload))
        task.dispatcher.explain(error)
        return None, error
    finally:
        task.given = None  # held until the handles in the answer were unpickled


def _beyond_ours(at: TracebackType | None) -> TracebackType | None:
    """Skip the frames of this package in a traceback. They refer to the message, so a program that
    keeps the error would keep the message and its shared memory."""
    while (
        at is not None
        and at.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "polycephaly"
    ):
        at = at.tb_next
    return at


def _settle_values(tasks: list[Task | None], values: list[Any], answer: AnswersTogether) -> None:
    for task, value in zip(tasks, values, strict=True):
        if task is None:
            continue
        task.answer = answer
        try:
            try:  # the same as `Promise._settle`, without one call for each task
                del task._open
            except AttributeError:
                continue
            if task._made_condition is None:
                task._result = value
                task._state = FINISHED
                if task._hooks:
                    task._run_hooks()
            else:
                task._open = None
                task._settle(FINISHED, value, None)
        except BaseException:
            callbacks.exception("a callback of %r failed", task)
