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


def hear(link: DroneHandle, frames: list[bytes]) -> None:
    """One message of a drone. Raises `Malformed`."""
    crew = link.crew
    kind = head_type(frames)
    if kind == RESULTS:
        outcomes = unpack_outcomes(frames)
        _hear_results(link, outcomes)
        if len(frames) > 2 and any(
            len(each[4]) >= LARGE_FROM and each[1] & ~SHARED != ERROR for each in outcomes
        ):
            no_room = MemoryError(f"{link.name} found no room for a result")
            crew.hub.deliver(partial(link.ledger.arena.warn, no_room))
    elif kind == HELLO:
        said = numbers(frames)
        if said[:1] != (PROTOCOL,):
            raise Malformed(f"{link.name} speaks protocol {said[:1]}, not {PROTOCOL}")
        crew.roster.hello(link)
    elif kind == RETURNED:
        crew.returned(link, numbers(frames))
    elif kind == FRAMES:
        crew.watch.hear_frames(link, *unpack_frames(frames))
    else:
        raise Malformed(f"{link.name} sent a message of type {kind!r}")


def hear_kept(link: DroneHandle, kept: bytes) -> None:
    """What a drone that died had done and perhaps not yet sent."""
    if kept:
        try:
            outcomes = unpack_outcomes([RESULTS, kept])
            _hear_results(link, [each for each in outcomes if each[0] in link.flight])
        except Malformed as wrong:  # it may have written anywhere before it died
            log.warning("what %s left in its page was dropped: %s", link.name, wrong)


def print_lines(link: DroneHandle) -> None:
    heard, crew = link.printed(), link.crew
    if heard:
        crew.hub.deliver(partial(deliver, crew.output, heard, crew.audiences))


def _hear_results(link: DroneHandle, outcomes: list[Outcome]) -> None:
    print_lines(link)  # what the work printed is out before its promise settles
    crew = link.crew
    now = link.last_heard = crew.hub.timers.now()
    settled: list[Task] = []
    timed: RemoteFunction | None = None
    seconds, calls = 0.0, 0
    parts: dict[int, int] = {}  # of slices: how many calls were answered
    try:
        for number, status, started, finished, payload, output in outcomes:
            if status > WITHDRAWN:
                if status == VALUES:
                    _hear_values(link, payload, now)
                    continue
                if status == LOAN_OVER:
                    link.ledger.came_back(number)
                    continue
                if status == TRAIL:
                    _hear_trail(link, payload)
                    continue
                if status & ~SHARED == PACKED:
                    crew.vault.packed(
                        link, number, link.ledger.arrived(payload) if status & SHARED else payload
                    )
                    continue
                if status == NOT_PACKED:
                    crew.vault.not_packed(link, number, payload)
                    continue
                if status == GIVEN:
                    crew.vault.given(link, link.flight.get(number), payload)
                    continue
                work, status, payload, done = _hear_special(link, number, status, payload)
            else:
                work = link.answered(number)
                done = 1 if work is None else work.count
            if work is None:  # lost, and answered all the same
                continue
            if status == WITHDRAWN:
                work.never_began()
                if not work.done():  # nobody has asked for that: nor will anybody hear more of it
                    crew.hub.deliver(work.cancel)
                continue
            if work.place > link.begun:
                link.begun = work.place
            started, finished = started - link.ahead, finished - link.ahead
            work.answer = Answer(started, finished, now, travelling(work.payload), len(payload))
            work.status = status
            if work.retries and isinstance(payload, Received) and payload.is_far():
                work.recipe = work.payload
            if status == VALUE and isinstance(work, KeptTask):
                payload = crew.vault.add(link, work, payload)
            work.payload = payload
            if output:
                work.output = output
            settled.append(work)
            if done != 1:
                parts[work.number] = done
            if work.definition is not timed:
                if timed is not None:
                    timed.took(seconds, calls)
                timed, seconds, calls = work.definition, 0.0, 0
            seconds += finished - started
            calls += done
            link.tasks_done += done
        if timed is not None:
            timed.took(seconds, calls)
        crew.record.several(link.name, settled, parts)
    finally:  # what has left the flight is settled, whatever becomes of the rest
        crew.hub.deliver(partial(settle, settled))
    crew.answered(link)


def _hear_values(link: DroneHandle, payload: Any, now: float) -> None:
    """The outcomes of many works, with small and immutable values."""
    numbers, started, finished, values = unpack_together(payload, 4)
    try:
        seconds = sum(finished) - sum(started)
    except TypeError:
        raise Malformed("times that are none") from None
    if link.ahead:
        started, finished = ([at - link.ahead for at in times] for times in (started, finished))
    works = link.answered_all(numbers)
    definitions = {work.definition for work in works if work is not None}
    alike = len(definitions) == 1
    link.crew.record.many(link.name, works, started, finished, seconds, now, len(payload), alike)
    if alike:
        definitions.pop().took(seconds, len(works))
    else:
        for work, began, ended in zip(works, started, finished, strict=True):
            if work is not None:
                work.definition.took(ended - began, 1)
    link.tasks_done += len(works)
    answer = AnswersTogether(numbers, started, finished, now)
    link.crew.hub.deliver(partial(_settle_values, works, values, answer))


def _hear_trail(link: DroneHandle, payload: Any) -> None:
    try:
        link.crew.record.hear_trail(link.name, bytes(payload), link.ahead)
    except ValueError as wrong:  # a picture lacks something: nobody waits for that
        log.warning("%s: %s", link.name, wrong)


def _hear_special(
    link: DroneHandle, number: int, status: int, payload: Any
) -> tuple[Task | None, int, Any, int]:
    """An outcome of a slice, or in shared memory: the work, its status and payload, how many calls
    took that."""
    shared, status = status & SHARED, status & ~SHARED
    done = rest = state = 0
    if status == SPLIT:
        done, rest, state, payload = unpack_split(payload)
    if shared:
        payload = link.ledger.arrived(payload)
    if status != SPLIT:
        work = link.answered(number)
        return work, status, payload, 1 if work is None else work.count
    work = link.flight.get(number)
    if work is None:
        return None, VALUE, payload, 0
    if state == RUNNING and isinstance(work, Slice) and work.continues:  # a message that came twice
        return None, VALUE, payload, 0
    begun = work.count - done - rest
    if not isinstance(work, Slice) or begun < 0 or begun > (state == RUNNING):
        raise Malformed(
            f"{link.name} answered {done} and gave back {rest} of the {work.count} calls of work {number}"
        )
    link.crew.split(link, work, done, rest, state)
    return work, VALUE, payload, done


# -- after the turn --------------------------------------------------------------------------------


def settle(answered: Iterable[Task]) -> None:
    """By what came back for each, which is opened here."""
    for work in answered:
        try:
            value, error = _open(work)
        except BaseException as wrong:
            value, error = None, wrong.with_traceback(_beyond_ours(wrong.__traceback__))
            with suppress(BaseException):
                error.add_note(f"while unpickling the result of {work.definition.label}")
        finish(work, FINISHED, value, error)


def finish(work: Task, state: str, value: Any, error: BaseException | None) -> None:
    """Settles it; what a callback of it raises is logged, since others wait to be settled too."""
    try:
        work._settle(state, value, error)
    except BaseException:
        callbacks.exception("a callback of %r failed", work)


def _open(work: Task) -> tuple[Any, BaseException | None]:
    """Value and error of its answer."""
    payload, work.payload = work.payload, b""
    try:
        if work.status == VALUE:
            value = work.open(payload) if payload else None  # no bytes at all stand for None
            if isinstance(value, Answers):  # which are opened one by one
                value.given = work.given
            return value, None
        error = unpack_exception(bytes(payload))
        work.crew.explain(error)
        return None, error
    finally:
        work.given = None  # held until its handles were unpickled


def _beyond_ours(at: TracebackType | None) -> TracebackType | None:
    """Without our frames, which hold the message: whoever keeps the error would keep it, and its
    shared memory."""
    while (
        at is not None
        and at.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "polycephaly"
    ):
        at = at.tb_next
    return at


def _settle_values(works: list[Task | None], values: list[Any], answer: AnswersTogether) -> None:
    for work, value in zip(works, values, strict=True):
        if work is None:
            continue
        work.answer = answer
        try:
            try:  # what `Promise._settle` does, without a call for each
                del work._open
            except AttributeError:
                continue
            if work._made_condition is None:
                work._result = value
                work._state = FINISHED
                if work._hooks:
                    work._run_hooks()
            else:
                work._open = None
                work._settle(FINISHED, value, None)
        except BaseException:
            callbacks.exception("a callback of %r failed", work)
