"""What drones say, and what it means for their works.

    RESULTS ──hear, in a turn──> works leave the flight, and know their answers ──settle, after it──> promises

In a turn no code of users is run. So what may run some, when it is unpickled, is unpickled as it is
settled: all but values that are small and immutable, which come together."""

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
    """One message of a drone. Raises `Malformed`."""
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
    """What a drone that died had done and perhaps not yet sent."""
    if kept:
        try:
            outcomes = unpack_outcomes([RESULTS, kept])
            _hear_results(handle, [each for each in outcomes if each[0] in handle.in_flight])
        except Malformed as wrong:  # it may have written anywhere before it died
            log.warning("what %s left in its page was dropped: %s", handle.name, wrong)


def print_lines(handle: DroneHandle) -> None:
    heard, dispatcher = handle.printed(), handle.dispatcher
    if heard:
        dispatcher.reactor.deliver(
            partial(deliver, dispatcher.output, heard, dispatcher.output_listeners)
        )


def _hear_results(handle: DroneHandle, outcomes: list[Outcome]) -> None:
    print_lines(handle)  # what the work printed is out before its promise settles
    dispatcher = handle.dispatcher
    now = handle.last_heard = dispatcher.reactor.timers.now()
    settled: list[Task] = []
    timed: RemoteFunction | None = None
    seconds, calls = 0.0, 0
    parts: dict[int, int] = {}  # of slices: how many calls were answered
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
            if task is None:  # lost, and answered all the same
                continue
            if status == WITHDRAWN:
                task.never_began()
                if not task.done():  # nobody has asked for that: nor will anybody hear more of it
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
    finally:  # what has left the flight is settled, whatever becomes of the rest
        dispatcher.reactor.deliver(partial(settle, settled))
    dispatcher.answered(handle)


def _hear_values(handle: DroneHandle, payload: Any, now: float) -> None:
    """The outcomes of many works, with small and immutable values."""
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
    except ValueError as wrong:  # a picture lacks something: nobody waits for that
        log.warning("%s: %s", handle.name, wrong)


def _hear_special(
    handle: DroneHandle, number: int, status: int, payload: Any
) -> tuple[Task | None, int, Any, int]:
    """An outcome of a slice, or in shared memory: the work, its status and payload, how many calls
    took that."""
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
    if state == RUNNING and isinstance(task, Slice) and task.continues:  # a message that came twice
        return None, VALUE, payload, 0
    begun = task.count - done - rest
    if not isinstance(task, Slice) or begun < 0 or begun > (state == RUNNING):
        raise Malformed(
            f"{handle.name} answered {done} and gave back {rest} of the {task.count} calls of work {number}"
        )
    handle.dispatcher.split(handle, task, done, rest, state)
    return task, VALUE, payload, done


# -- after the turn --------------------------------------------------------------------------------


def settle(answered: Iterable[Task]) -> None:
    """By what came back for each, which is opened here."""
    for task in answered:
        try:
            value, error = _open(task)
        except BaseException as wrong:
            value, error = None, wrong.with_traceback(_beyond_ours(wrong.__traceback__))
            with suppress(BaseException):
                error.add_note(f"while unpickling the result of {task.definition.label}")
        finish(task, FINISHED, value, error)


def finish(task: Task, state: str, value: Any, error: BaseException | None) -> None:
    """Settles it; what a callback of it raises is logged, since others wait to be settled too."""
    try:
        task._settle(state, value, error)
    except BaseException:
        callbacks.exception("a callback of %r failed", task)


def _open(task: Task) -> tuple[Any, BaseException | None]:
    """Value and error of its answer."""
    payload, task.payload = task.payload, b""
    try:
        if task.status == VALUE:
            value = task.open(payload) if payload else None  # no bytes at all stand for None
            if isinstance(value, Answers):  # which are opened one by one
                value.given = task.given
            return value, None
        error = unpack_exception(bytes(payload))
        task.dispatcher.explain(error)
        return None, error
    finally:
        task.given = None  # held until its handles were unpickled


def _beyond_ours(at: TracebackType | None) -> TracebackType | None:
    """Without our frames, which hold the message: whoever keeps the error would keep it, and its
    shared memory."""
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
            try:  # what `Promise._settle` does, without a call for each
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
