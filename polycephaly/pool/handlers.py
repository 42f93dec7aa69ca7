"""Handlers of the messages that drones send.

    RESULTS ──handle_message──> tasks leave flight, with their answers ──settle──> promises
              (holding the reactor's lock)                     (after it is released)

While the reactor's lock is held, no code of users runs. Therefore answers that may run such code
are unpickled in `settle`. Small immutable values, which share a pickle, are unpickled at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Malformed, skip_own_frames
from ..memory.references import Received
from ..promises import opener_thread
from ..promises.promise import FINISHED, callbacks, fulfill, settle_promise
from ..wire.exceptions import unpack_exception
from ..wire.map_chunks import Answers, unpack_answers
from ..wire.messages import (
    ANSWERS,
    ERROR,
    EVENT_LOG,
    FRAMES,
    HELLO,
    KEPT_VALUES,
    MIN_LARGE_BYTES,
    NOT_PACKED,
    PACKED,
    PROCESSOR_TIME,
    PROFILE,
    PROTOCOL,
    RANGE_RELEASED,
    RESULTS,
    RETURNED,
    SHARED,
    VALUE,
    VALUES,
    WITHDRAWN,
    Outcome,
    message_type,
    unpack_frames,
    unpack_lists,
    unpack_numbers,
    unpack_outcomes,
    unpack_returned,
)
from ..wire.placeholders import sent_bytes
from .chunk import Chunk, Part
from .directory import KeptTask
from .dispatcher import Dispatcher
from .drone_handle import DroneHandle
from .task import Answer, StoredValue, Task

if TYPE_CHECKING:
    from ..wire.functions import RemoteFunction
    from .interfaces import TaskRunner

log = logging.getLogger(__name__)


def handle_message(dispatcher: Dispatcher, handle: DroneHandle, frames: list[bytes]) -> None:
    """Handle one message of a drone. Raises `Malformed`."""
    kind = message_type(frames)
    if kind == RESULTS:
        outcomes = unpack_outcomes(frames)
        _handle_results(dispatcher, handle, outcomes)
        if len(frames) > 2 and any(
            len(each[4]) >= MIN_LARGE_BYTES and each[1] != ERROR and not each[1] & SHARED
            for each in outcomes
        ):
            dispatcher.reactor.deliver(handle.warn_of_no_room)
    elif kind == HELLO:
        protocol, *pids = unpack_numbers(frames) or (0,)
        if protocol != PROTOCOL or len(pids) != 1:
            raise Malformed(f"drone {handle.name} speaks protocol {protocol}, not {PROTOCOL}")
        handle.pid = handle.pid or pids[0]  # the zygote's report may be read later
        dispatcher.supervisor.on_hello(handle)
    elif kind == RETURNED:
        dispatcher.requeue_returned(handle, _check_returned(handle, unpack_returned(frames)))
    elif kind in (FRAMES, PROFILE):
        dispatcher.stack_requests.on_answer(*unpack_frames(frames))
    else:
        raise Malformed(f"drone {handle.name} sent a message of unknown type {kind!r}")


def handle_unsent_results(dispatcher: Dispatcher, handle: DroneHandle, kept: bytes) -> None:
    """Handle the results that a dead drone had ready and perhaps not sent."""
    if kept:
        try:
            outcomes = unpack_outcomes([RESULTS, kept])
            unanswered = [each for each in outcomes if each[0] in handle.in_flight]
            _handle_results(dispatcher, handle, unanswered)
        except Malformed as error:  # the drone may have written anywhere before it died
            log.warning("unsent results of drone %s were dropped: %s", handle.name, error)


def _handle_results(dispatcher: Dispatcher, handle: DroneHandle, outcomes: list[Outcome]) -> None:
    # So that the output of a task is out before its promise settles.
    handle.print_output(may_wait=True)
    now = handle.last_contact_at = dispatcher.reactor.timers.now()
    settled: list[Task] = []
    timed: RemoteFunction | None = None
    seconds, calls = 0.0, 0
    answered = 0  # calls
    parts: list[_ReceivedPart] = []
    offset = handle.clock_offset
    try:
        for number, status, started, finished, payload, output in outcomes:
            if status > WITHDRAWN:
                if status == VALUES:
                    _handle_values(dispatcher, handle, payload, now)
                    continue
                if _handle_entry(dispatcher, handle, number, status, finished, payload):
                    continue
                if status & ~SHARED == ANSWERS:
                    part = _receive_part(handle, number, status, started, finished, payload, now)
                    if part is not None:
                        parts.append(part)
                        answered += part.calls
                    continue
                status, payload = status & ~SHARED, handle.ref_table.receive(payload)
            task = handle.remove_in_flight(number)
            if task is None:  # given up as lost before the answer came
                continue
            if status == WITHDRAWN:
                _handle_withdrawn(dispatcher, task)
                continue
            if task.position > handle.highest_answered:
                handle.highest_answered = task.position
            if offset:
                started, finished = started - offset, finished - offset
            sent = task.definition_bytes
            if task.args is None:
                sent += sent_bytes(task.payload)
            task.answer = Answer(started, finished, now, sent, len(payload))
            task.status = status
            if task.retries and isinstance(payload, Received) and payload.is_slow_to_open():
                task.recompute_payload = task.payload
            if status == ERROR and task.retry is not None:
                task.recompute_payload = task.payload
                dispatcher.state.parked.add(task)  # counts as not done until `on_failed`
            if task.keeps and status == VALUE and isinstance(task, KeptTask):
                payload = dispatcher.directory.add(handle, task, payload)
            task.payload = payload
            if output:
                task.promise.output = output
            settled.append(task)
            if task.definition is not timed:
                if timed is not None:
                    timed.record_duration(seconds, calls)
                timed, seconds, calls = task.definition, 0.0, 0
            seconds += finished - started
            calls += task.count
            answered += task.count
        if timed is not None:
            timed.record_duration(seconds, calls)
        dispatcher.record.add_answers(handle.name, settled)
        _record_parts(dispatcher, handle, parts)
    finally:  # tasks that have left flight are settled even if the rest of the message fails
        if answered:
            handle.count_done(answered)
        if parts:
            dispatcher.reactor.deliver(partial(_give, parts))
        if settled:
            dispatcher.reactor.deliver(partial(settle, settled))
        dispatcher.after_answer(handle)


def _handle_withdrawn(dispatcher: Dispatcher, task: Task) -> None:
    # Its time limit expired before it began.
    if task.overrun is not None and not task.promise.done():
        dispatcher.on_failed(task, task.overrun)
        return
    task.payload = b""
    # Not cancelled by any thread, but no answer will come either.
    if not task.promise.done():
        dispatcher.reactor.deliver(task.promise.cancel)


def _handle_values(dispatcher: Dispatcher, handle: DroneHandle, payload: Any, now: float) -> None:
    """Handle the outcomes of many tasks, whose values are small and immutable."""
    numbers, started, finished, values = unpack_lists(payload, 4)
    try:
        seconds = sum(finished) - sum(started)
    except TypeError:
        raise Malformed("start and end times that are not numbers") from None
    if handle.clock_offset:
        started, finished = (
            [at - handle.clock_offset for at in times] for times in (started, finished)
        )
    tasks = handle.remove_many_in_flight(numbers)
    answered = [task for task in tasks if task is not None]  # others were given up as lost
    functions = {task.definition for task in answered}
    if len(functions) == 1 and len(answered) == len(tasks):
        dispatcher.record.add_batch(
            handle.name, answered, started, finished, seconds, now, len(payload)
        )
        functions.pop().record_duration(seconds, len(tasks))
    else:
        size = len(payload) // len(tasks)
        for task, began, ended in zip(tasks, started, finished, strict=True):
            if task is not None:
                task.definition.record_duration(ended - began, 1)
                sent = task.weight + task.definition_bytes
                task.answer, task.status = Answer(began, ended, now, sent, size), VALUE
        answered.sort(key=lambda task: task.definition.number)
        dispatcher.record.add_answers(handle.name, answered)
    last = tasks[-1]
    if last is not None and last.position > handle.highest_answered:
        handle.highest_answered = last.position
    handle.count_done(len(tasks))
    outcomes = zip(tasks, values, started, finished, strict=True)
    forget = dispatcher.unsettled.pop
    dispatcher.reactor.deliver(partial(_settle_values, outcomes, now, forget))


def _handle_entry(
    dispatcher: Dispatcher,
    handle: DroneHandle,
    number: int,
    status: int,
    finished: float,
    payload: Any,
) -> bool:
    """Handle an entry that is no outcome of a task. Return False if it is one."""
    if status == PROCESSOR_TIME:
        dispatcher.record.note_processor_time(number, finished)
    elif status == RANGE_RELEASED:
        handle.ref_table.release(number)
    elif status == EVENT_LOG:
        _handle_event_log(dispatcher, handle, payload)
    elif status & ~SHARED == PACKED or status == NOT_PACKED:
        packed = handle.ref_table.receive(payload) if status & SHARED else payload
        dispatcher.directory.on_packed(handle, number, packed, status == NOT_PACKED)
    elif status == KEPT_VALUES:
        task = handle.in_flight.get(number)
        dispatcher.directory.on_kept_values(handle, task, payload)
    else:
        return False
    return True


def _handle_event_log(dispatcher: Dispatcher, handle: DroneHandle, payload: Any) -> None:
    try:
        dispatcher.record.add_events(
            handle.name, bytes(payload), handle.clock_offset, dispatcher.describes_items
        )
    except ValueError as error:  # only a timeline lacks something; no caller waits for that
        log.warning("drone %s: %s", handle.name, error)


class _ReceivedPart(NamedTuple):
    """The answers of some calls of a chunk, as the drone has packed them."""

    chunk: Chunk
    item: int
    calls: int
    known: int
    """How many answers of the payload have come before."""
    payload: Any
    times: Answer
    remote_objects: Any
    is_last: bool


def _receive_part(
    handle: DroneHandle,
    number: int,
    status: int,
    started: float,
    finished: float,
    payload: Any,
    received: float,
) -> _ReceivedPart | None:
    """Note that calls of a chunk are answered. Return None if that is known."""
    first, count, failed, payload = unpack_answers(payload)
    if status & SHARED:
        payload = handle.ref_table.receive(payload)
    chunk = handle.in_flight.get(number)
    if chunk is None:  # given up as lost
        return None
    if not isinstance(chunk, Chunk) or first > chunk.answered or first + count > chunk.count:
        raise Malformed(
            f"drone {handle.name} answered the calls {first} to {first + count} of the "
            f"{chunk.count} calls of task {number}"
        )
    # The rest of what has come before may have come with it: from the page of a dead drone.
    known = chunk.answered - first
    count -= known
    if count <= 0:
        return None
    sent = 0 if first else chunk.definition_bytes + sent_bytes(chunk.payload)
    offset = handle.clock_offset
    times = Answer(started - offset, finished - offset, received, sent, len(payload))
    chunk.definition.record_duration(finished - started, count)
    is_last = handle.note_answers(chunk, count, failed)
    item = chunk.first_item + first + known
    # The objects stay with the chunk, too: their report may have come with an earlier part.
    objects = chunk.answer_objects
    return _ReceivedPart(chunk, item, count, known, payload, times, objects, is_last)


def _record_parts(
    dispatcher: Dispatcher, handle: DroneHandle, parts: Iterable[_ReceivedPart]
) -> None:
    """Record the parts of chunks, those of several calls that follow each other as one."""
    joined: list[_ReceivedPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.chunk is part.chunk and min(last.calls, part.calls) > 1:
            times = Answer(
                last.times.started,
                part.times.finished,
                part.times.received,
                last.times.bytes_sent + part.times.bytes_sent,
                last.times.bytes_received + part.times.bytes_received,
            )
            joined[-1] = last._replace(calls=last.calls + part.calls, times=times)
        else:
            joined.append(part)
    for part in joined:
        dispatcher.record.add_answer(
            handle.name, part.chunk, part.times, part.calls, item=part.item
        )


def _check_returned(handle: DroneHandle, returned: list[tuple[int, int]]) -> list[tuple[int, int]]:
    for number, calls in returned:
        task = handle.in_flight.get(number)
        if calls and task and not (isinstance(task, Chunk) and calls <= task.calls_left):
            raise Malformed(
                f"drone {handle.name} returned {calls} of the {task.calls_left} calls of task "
                f"{number}"
            )
    return returned


# -- after the reactor's lock is released ----------------------------------------------------------


def settle(answered: Iterable[Task]) -> None:
    """Settle tasks by their answers. A value is sealed if building it runs code of users. The
    opener builds errors, and values with ends of channels or handles of kept values, which have
    arrived only when they are unpickled.
    """
    for task in answered:
        try:
            if task.status == VALUE and task.is_opened_at_once(task.payload):
                _open_and_settle(task)
            elif task.status == VALUE and task.answer_objects is None:
                payload, task.payload, task.item_payload = task.payload, b"", b""
                settle_promise(task.promise, StoredValue(task, payload), None)
            else:
                owner = task.dispatcher
                owner.openings_left[task] = None
                opener_thread.opener_thread.add(partial(_settle_in_opener, task, owner))
        except BaseException as error:  # no memory: those behind it are settled, too
            task.dispatcher.openings_left.pop(task, None)
            settle_promise(task.promise, None, error)


def _give(parts: Iterable[_ReceivedPart]) -> None:
    """Give answers to the consumers of their maps. Each of them opens the values that run code of
    users.
    """
    for chunk, item, _, known, payload, times, remote_objects, is_last in parts:
        failure: BaseException | None = None
        try:
            answers = Answers(payload)
            answers.remote_objects = remote_objects
            if known:
                answers.drop(known)
            chunk.give(Part(item, answers, times))
        except BaseException as error:
            failure = error.with_traceback(skip_own_frames(error.__traceback__))
            with suppress(BaseException):
                failure.add_note(f"while unpickling results of {chunk.definition.label}")
        if is_last or failure is not None:
            settle_promise(chunk.promise, None, failure)
        if failure is not None and not is_last:  # the drone is to run no more of it
            chunk.dispatcher.post(chunk.dispatcher.withdraw, chunk)


def _settle_in_opener(task: Task, owner: TaskRunner) -> None:
    try:
        _open_and_settle(task)
    except BaseException as error:  # no memory
        settle_promise(task.promise, None, error)
    finally:
        owner.on_opened(task)
        # An error that has a traceback when it arrives keeps the frames of these functions, which
        # must not keep the pool.
        del task, owner


def _open_and_settle(task: Task) -> None:
    value: Any = None
    error: BaseException | None = None
    try:
        payload, task.payload = task.payload, b""
        if task.status != VALUE:
            error = unpack_exception(bytes(payload))
            task.dispatcher.explain(error)
        elif payload:  # an empty one stands for None
            value = task.unpack(payload)
        elif task.item_payload:
            task.item_payload = b""
    except BaseException as raised:
        value, error = None, raised.with_traceback(skip_own_frames(raised.__traceback__))
        with suppress(BaseException):
            error.add_note(f"while unpickling the result of {task.definition.label}")
    task.answer_objects = None  # held until the handles in the answer were unpickled
    if error is not None and task.retry is not None and task.status == ERROR:
        task.dispatcher.post(task.dispatcher.on_failed, task, task.overrun or error)
    else:
        try:
            if error is not None:
                task.note_failure(error)
        finally:  # also if there is no memory for that
            settle_promise(task.promise, value, error)
    del task  # as above


def _settle_values(
    outcomes: Iterable[tuple[Task | None, Any, float, float]],
    received: float,
    forget: Callable[[Task, None], None],
) -> None:
    for task, value, started, finished in outcomes:
        if task is None:
            continue
        sending, promise = task.sending, task.promise
        assert sending is not None
        try:
            # As `Task.facts` gives them, without a call for each task.
            promise._facts = (
                task.number, task.definition.label, task.queued, sending.at, sending.drone, started,
                finished, received, task.args, task.definition_bytes, 0, task.first_number,
                task.input_numbers,
            )  # fmt: skip
            try:  # the same as `Promise._settle`: its call takes 11 % of submit and gather
                del promise._unclaimed
            except AttributeError:
                continue
            if promise._made_condition is None:
                promise._result = value
                promise._state = FINISHED
                try:
                    if promise._hooks:
                        promise._hooks.reverse()
                        promise._call_hooks()
                finally:
                    promise._task = None
                    forget(task, None)
            else:
                promise._unclaimed = None
                fulfill(promise, value)
        except BaseException as error:
            if promise.done():
                callbacks.exception("a callback of %r failed", promise)
            else:  # no memory: those behind it are settled, too
                settle_promise(promise, None, error)
