"""Handlers of the records that drones write (wire/messages.py).

    records ──handle_records──> tasks leave flight, with their answers ──settle──> promises
              (holding the reactor's lock)                     (after it is released)

While the reactor's lock is held, no code of users runs. Therefore answers that may run such code
are unpickled in `settle`. Small immutable values, which share a pickle, are unpickled at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, groupby, repeat
from operator import attrgetter
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
    RETURNED,
    SHARED,
    VALUE,
    WITHDRAWN,
    check_chunk_values,
    check_outcome,
    form_of,
    message_type,
    task_number,
    unpack_frames,
    unpack_numbers,
    unpack_returned,
    unpack_value_key,
    unpack_value_keys,
)
from ..wire.placeholders import sent_bytes
from ..wire.ring import Record, Records
from .chunk import Chunk, Part
from .directory import KeptTask
from .dispatcher import Dispatcher
from .drone_handle import DroneHandle
from .task import Answer, StoredValue, Task

if TYPE_CHECKING:
    from ..wire.functions import RemoteFunction
    from .interfaces import TaskRunner

log = logging.getLogger(__name__)

VALUE_BYTES = 40
"""About how many bytes of a ring a small value takes that came with other records."""
_definition = attrgetter("definition")


def handle_records(
    dispatcher: Dispatcher, handle: DroneHandle, records: Records, size: int = 0
) -> None:
    """Handle what a drone has written: records, of `size` bytes in all, if that is known. Raises
    `Malformed` after all others if one is not valid.
    """
    # So that the output of a task is out before its promise settles.
    handle.print_output(may_wait=True)
    if {bytes}.issuperset(map(type, records)):  # all are values, as most often
        if len(records) == 1:
            [(key, value)] = records.items()
            _handle_value(dispatcher, handle, *unpack_value_key(key), value, size)
        elif records:
            _handle_values(dispatcher, handle, records, records.values(), size)
        return
    malformed: Malformed | None = None
    # In order: a chunk is answered before the rest of its calls is returned, and the processor time
    # of a call comes before its value.
    for form, group in groupby(records.items(), form_of):
        keys, some = zip(*group, strict=True)
        try:
            if form == 6:
                _handle_outcomes(dispatcher, handle, some)
            elif form == 5:
                _handle_chunk_values(dispatcher, handle, some)
            elif form == 0:
                _handle_values(dispatcher, handle, keys, some, VALUE_BYTES * len(some))
            else:
                for each in some:
                    handle_message(dispatcher, handle, _frames_of(each))
        except Malformed as error:
            malformed = error
    if malformed is not None:
        raise malformed


def _frames_of(record: Any) -> list[bytes]:
    if type(record) is tuple and len(record) == 1:
        [frames] = record
        if type(frames) is list and {bytes} == {*map(type, frames)}:
            return frames
    raise Malformed(f"a record that is no message: {type(record).__name__}")


def handle_message(dispatcher: Dispatcher, handle: DroneHandle, frames: list[bytes]) -> None:
    """Handle one message of a drone. Raises `Malformed`."""
    kind = message_type(frames)
    if kind == HELLO:
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


def handle_unsent_results(dispatcher: Dispatcher, handle: DroneHandle, records: Records) -> None:
    """Handle the answers that a dead drone had ready and perhaps not sent."""
    in_flight = handle.in_flight
    try:
        unanswered = dict(item for item in records.items() if task_number(item) in in_flight)
        if unanswered:
            handle_records(dispatcher, handle, unanswered)
    except Malformed as error:  # the drone may have written anywhere before it died
        log.warning("unsent results of drone %s were dropped: %s", handle.name, error)


def _handle_outcomes(
    dispatcher: Dispatcher, handle: DroneHandle, outcomes: Iterable[Record]
) -> None:
    now = handle.last_contact_at = dispatcher.reactor.timers.now()
    settled: list[Task] = []
    timed: RemoteFunction | None = None
    seconds, calls = 0.0, 0
    answered = 0  # calls
    parts: list[_ReceivedPart] = []
    offset = handle.clock_offset
    malformed: Malformed | None = None
    try:
        for outcome in outcomes:
            payload: Any
            try:
                check_outcome(outcome)
                number, status, started, finished, payload, output = outcome
                if len(payload) >= MIN_LARGE_BYTES and status != ERROR and not status & SHARED:
                    dispatcher.reactor.deliver(handle.warn_of_no_room)
                if status > WITHDRAWN:
                    if status & ~SHARED == ANSWERS:
                        parts += _receive_part(handle, outcome, now)
                        continue
                    if _handle_entry(dispatcher, handle, number, status, finished, payload):
                        continue
                    status, payload = status & ~SHARED, handle.ref_table.receive(payload)
            except Malformed as error:
                malformed = error
                continue
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
                task.promise.output = output.decode("utf-8", "replace")
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
    finally:  # tasks that have left flight are settled even if something fails
        _hand_over(dispatcher, handle, parts)
        if answered:
            handle.count_done(answered)
        if settled:
            dispatcher.reactor.deliver(partial(settle, settled))
        dispatcher.after_answer(handle)
    if malformed is not None:
        raise malformed


def _handle_withdrawn(dispatcher: Dispatcher, task: Task) -> None:
    # Its time limit expired before it began.
    if task.overrun is not None and not task.promise.done():
        dispatcher.on_failed(task, task.overrun)
        return
    task.payload = b""
    # Not cancelled by any thread, but no answer will come either.
    if not task.promise.done():
        dispatcher.reactor.deliver(task.promise.cancel)


def _handle_chunk_values(
    dispatcher: Dispatcher, handle: DroneHandle, records: Sequence[Record]
) -> None:
    """Handle small values of calls of chunks, those that follow each other as one part."""
    for each in records:
        check_chunk_values(each)
    now = handle.last_contact_at = dispatcher.reactor.timers.now()
    parts: list[_ReceivedPart] = []
    try:
        for runs in _consecutive(records):
            number, first, started, _, _ = runs[0]
            values = [*chain.from_iterable([each[4] for each in runs])]
            times = started, runs[-1][3], now, VALUE_BYTES * len(values)
            parts += _note_part(
                handle, number, first, len(values), False, Answers.of(values), times
            )
        _record_parts(dispatcher, handle, parts)
    finally:
        _hand_over(dispatcher, handle, parts)
        dispatcher.after_answer(handle)


def _consecutive(records: Iterable[Record]) -> Iterable[list[Record]]:
    """Return lists of those whose calls follow each other in a chunk."""
    joined: list[list[Record]] = []
    for each in records:
        last = joined[-1][-1] if joined else None
        if last is not None and last[0] == each[0] and last[1] + len(last[4]) == each[1]:
            joined[-1].append(each)
        else:
            joined.append([each])
    return joined


def _handle_value(
    dispatcher: Dispatcher,
    handle: DroneHandle,
    number: int,
    started: float,
    finished: float,
    value: Any,
    size: int,
) -> None:
    """Do as `_handle_values` does, in fewer steps, for the value of one call: a thread may wait for
    it.
    """
    task = handle.remove_in_flight(number)
    if task is None:  # given up as lost
        return
    now = handle.last_contact_at = dispatcher.reactor.timers.now()
    offset = handle.clock_offset
    started, finished = started - offset, finished - offset
    if task.position > handle.highest_answered:
        handle.highest_answered = task.position
    times = Answer(started, finished, now, task.weight + task.definition_bytes, size)
    dispatcher.record.add_answer(handle.name, task, times, 1)
    task.definition.record_duration(finished - started, 1)
    handle.count_done(1)
    outcomes = ((task, value, started, finished),)
    forget = dispatcher.unsettled.pop
    dispatcher.reactor.deliver(partial(_settle_values, outcomes, now, forget))
    dispatcher.after_answer(handle)


def _handle_values(
    dispatcher: Dispatcher,
    handle: DroneHandle,
    keys: Collection[bytes],
    values: Iterable[Any],
    size: int,
) -> None:
    """Handle values that are small and immutable, of `size` bytes in all."""
    numbers, started, finished, seconds = unpack_value_keys(keys)
    now = handle.last_contact_at = dispatcher.reactor.timers.now()
    if handle.clock_offset:
        started, finished = (
            [at - handle.clock_offset for at in times] for times in (started, finished)
        )
    tasks = handle.remove_many_in_flight(numbers)
    answered: list[Task] = [*filter(None, tasks)]  # others were given up as lost
    functions = set(map(_definition, answered))
    if len(functions) == 1 and len(answered) == len(tasks):
        dispatcher.record.add_batch(handle.name, answered, started, finished, seconds, now, size)
        functions.pop().record_duration(seconds, len(tasks))
    else:
        each_size = size // len(tasks)
        for task, began, ended in zip(tasks, started, finished, strict=True):
            if task is not None:
                task.definition.record_duration(ended - began, 1)
                sent = task.weight + task.definition_bytes
                task.answer, task.status = Answer(began, ended, now, sent, each_size), VALUE
        answered.sort(key=lambda task: task.definition.number)
        dispatcher.record.add_answers(handle.name, answered)
    last = tasks[-1]
    if last is not None and last.position > handle.highest_answered:
        handle.highest_answered = last.position
    handle.count_done(len(tasks))
    # One by one, so that each task is freed when its promise is settled: to keep all until then
    # would start the garbage collector.
    tasks.reverse()
    drained = map(list.pop, repeat(tasks, len(tasks)))
    outcomes = zip(drained, values, started, finished, strict=True)
    forget = dispatcher.unsettled.pop
    dispatcher.reactor.deliver(partial(_settle_values, outcomes, now, forget))
    dispatcher.after_answer(handle)


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
    """The answers of some calls of a chunk."""

    chunk: Chunk
    item: int
    calls: int
    known: int
    """How many of the answers have come before."""
    answers: Any
    """`Answers`, or their payload."""
    times: Answer
    remote_objects: Any
    is_last: bool


def _receive_part(handle: DroneHandle, outcome: Record, received: float) -> Sequence[_ReceivedPart]:
    """Note that calls of a chunk are answered, and return the answers: none if they are known."""
    number, status, started, finished, payload, _ = outcome
    first, count, failed, payload = unpack_answers(payload)
    if status & SHARED:
        payload = handle.ref_table.receive(payload)
    times = started, finished, received, len(payload)
    return _note_part(handle, number, first, count, failed, payload, times)


def _note_part(
    handle: DroneHandle,
    number: int,
    first: int,
    count: int,
    failed: bool,
    answers: Any,
    times: tuple[float, float, float, int],
) -> Sequence[_ReceivedPart]:
    """Do as `_receive_part` does. `times` are those of start, end and receipt, and the bytes."""
    chunk = handle.in_flight.get(number)
    if chunk is None:  # given up as lost
        return ()
    if not isinstance(chunk, Chunk) or first > chunk.answered or first + count > chunk.count:
        raise Malformed(
            f"drone {handle.name} answered the calls {first} to {first + count} of the "
            f"{chunk.count} calls of task {number}"
        )
    # The rest of what has come before may have come with it: from the ring of a dead drone on Ray.
    known = chunk.answered - first
    count -= known
    if count <= 0:
        return ()
    started, finished, received, size = times
    sent = 0 if first else chunk.definition_bytes + sent_bytes(chunk.payload)
    offset = handle.clock_offset
    spans = Answer(started - offset, finished - offset, received, sent, size)
    chunk.definition.record_duration(finished - started, count)
    is_last = handle.note_answers(chunk, count, failed)
    item = chunk.first_item + first + known
    # The objects stay with the chunk, too: their report may have come with an earlier part.
    objects = chunk.answer_objects
    return [_ReceivedPart(chunk, item, count, known, answers, spans, objects, is_last)]


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


def _hand_over(dispatcher: Dispatcher, handle: DroneHandle, parts: Sequence[_ReceivedPart]) -> None:
    """Count the calls of parts of chunks, and have the parts given after the lock is released."""
    if parts:
        handle.count_done(sum(part.calls for part in parts))
        dispatcher.reactor.deliver(partial(_give, parts))


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
    for chunk, item, _, known, answers, times, remote_objects, is_last in parts:
        failure: BaseException | None = None
        try:
            answers = answers if isinstance(answers, Answers) else Answers(answers)
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
                hooks = promise._hooks
                try:
                    if hooks:
                        hooks.reverse()
                        promise._call_hooks()
                finally:
                    if hooks:  # an exception came between two of them, or before the first
                        promise._call_hooks()
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
