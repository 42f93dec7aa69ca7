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
from typing import TYPE_CHECKING, Any

from ..errors import Malformed, skip_own_frames
from ..memory.references import Received
from ..promises import opener_thread
from ..promises.promise import FINISHED, callbacks, fulfill, settle_promise
from ..wire.exceptions import unpack_exception
from ..wire.map_chunks import RUNNING, unpack_split
from ..wire.messages import (
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
    SPLIT,
    VALUE,
    VALUES,
    WITHDRAWN,
    Outcome,
    message_type,
    unpack_frames,
    unpack_lists,
    unpack_numbers,
    unpack_outcomes,
)
from ..wire.placeholders import sent_bytes
from .directory import KeptTask
from .dispatcher import Dispatcher
from .drone_handle import DroneHandle
from .task import Answer, Chunk, StoredValue, Task

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
        dispatcher.requeue_returned(handle, unpack_numbers(frames))
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
    parts: dict[int, int] = {}  # of chunks, by number: how many calls were answered
    offset = handle.clock_offset
    try:
        for number, status, started, finished, payload, output in outcomes:
            if status > WITHDRAWN:
                if status == VALUES:
                    _handle_values(dispatcher, handle, payload, now)
                    continue
                if _handle_entry(dispatcher, handle, number, status, finished, payload):
                    continue
                task, status, payload, done = _handle_special_outcome(
                    dispatcher, handle, number, status, payload
                )
            else:
                task = handle.remove_in_flight(number)
                done = 1 if task is None else task.count
            if task is None:  # given up as lost before the answer came
                continue
            if status == WITHDRAWN:
                # Its time limit expired before it began.
                if task.overrun is not None and not task.promise.done():
                    dispatcher.on_failed(task, task.overrun)
                    continue
                task.payload = b""
                # Not cancelled by any thread, but no answer will come either.
                if not task.promise.done():
                    dispatcher.reactor.deliver(task.promise.cancel)
                continue
            # The rest of a chunk that was cut while running is still in flight.
            if task.position > handle.highest_answered and number not in handle.in_flight:
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
            if done != 1:
                parts[task.number] = done
            if task.definition is not timed:
                if timed is not None:
                    timed.record_duration(seconds, calls)
                timed, seconds, calls = task.definition, 0.0, 0
            seconds += finished - started
            calls += done
            answered += done
        if timed is not None:
            timed.record_duration(seconds, calls)
        dispatcher.record.add_answers(handle.name, settled, parts)
    finally:  # tasks that have left flight are settled even if the rest of the message fails
        if answered:
            handle.count_done(answered)
        if settled:
            dispatcher.reactor.deliver(partial(settle, settled))
        dispatcher.after_answer(handle)


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
        dispatcher.record.add_answers(handle.name, answered, {})
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


def _handle_special_outcome(
    dispatcher: Dispatcher, handle: DroneHandle, number: int, status: int, payload: Any
) -> tuple[Task | None, int, Any, int]:
    """Handle the outcome of a chunk, or one in shared memory.

    Returns the task, its status, its payload, and how many calls the answer covers.
    """
    shared, status = status & SHARED, status & ~SHARED
    done = rest = state = 0
    if status == SPLIT:
        done, rest, state, payload = unpack_split(payload)
    if shared:
        payload = handle.ref_table.receive(payload)
    if status != SPLIT:
        task = handle.remove_in_flight(number)
        return task, status, payload, 1 if task is None else task.count
    task = handle.in_flight.get(number)
    if task is None:
        return None, VALUE, payload, 0
    # A part that is cut again: this message has come twice.
    if state == RUNNING and isinstance(task, Chunk) and task.continues:
        return None, VALUE, payload, 0
    begun = task.count - done - rest
    if not isinstance(task, Chunk) or begun < 0 or begun > (state == RUNNING):
        raise Malformed(
            f"drone {handle.name} answered {done} and returned {rest} of the {task.count} calls of "
            f"task {number}"
        )
    dispatcher.split(handle, task, done, rest, state)
    return task, VALUE, payload, done


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
