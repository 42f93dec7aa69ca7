"""Requests for the frames of drones, while their tasks run.

    Drone.stack ── post ──> StackRequests.send ──FRAMES──> the drone's control thread
    Drone.stack <── settled by StackRequests.on_answer <── FRAMES: plain data ──┘

The waiting thread builds the `Stack`, because that reads source files. A drone that does not answer
in time is described as far as the controller knows its state. stacks.py is loaded when a `Stack` is
built, because dataclasses take milliseconds to import.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from functools import partial
from traceback import StackSummary, format_exception_only
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from ..errors import Malformed
from ..promises.promise import fulfill
from ..runtime.checks import check_positive_seconds
from ..runtime.clock import monotonic
from ..wire.messages import FRAMES
from .drone_handle import DroneHandle
from .reactor import ReactorSignal, Tenant
from .task import Task

if TYPE_CHECKING:
    from .stacks import Stack

T = TypeVar("T")

_FATAL_FRAME = r'  File "(.*)", line (\d+) in (.*)'

ANSWER_SECONDS = 2.0
"""By default, how long a drone may take to report its frames."""


def _read(entries: Sequence[Sequence[Any]]) -> StackSummary:
    """Return frames that a drone has reported, innermost first, with their source lines."""
    for file in {entry[0] for entry in entries}:
        linecache.checkcache(file)
    return StackSummary.from_list(
        [
            (file, line, name, source or linecache.getline(file, line))
            for file, line, name, source in reversed(entries)
        ]
    )


# -- asking the drones -----------------------------------------------------------------------------


class _Answer(NamedTuple):
    """The frames of one drone, and the tasks that it had then, by number."""

    current: int
    frames: dict[int, Sequence[Any]]  # of each running task
    threads: Sequence[tuple[str, Sequence[Any]]]
    places: dict[str, Any]  # of each running task: see drone/frames.py
    tasks: dict[int, Task]
    state: str  # if no task runs


class DroneRequest(ReactorSignal[T | None]):
    """A request to one drone. The value is None if the drone cannot be asked."""

    question: tuple[bytes, *tuple[int, ...]] = (FRAMES,)
    """The arguments of `DroneHandle.request_frames`."""

    def __init__(self, dispatcher: Tenant, handle: DroneHandle) -> None:
        super().__init__(dispatcher.reactor)
        self.handle = handle
        self.was_sent = False

    def read(self, answer: dict[str, Any]) -> T:
        """Return the value that an answer means. Raises `Malformed`."""
        raise NotImplementedError


class StackRequest(DroneRequest[_Answer]):
    def read(self, answer: dict[str, Any]) -> _Answer:
        in_flight = self.handle.in_flight
        current, frames, threads, places = read_report(answer)
        tasks = {each: in_flight[each] for each in frames if each in in_flight}
        state = "between two tasks" if in_flight else "idle"
        return _Answer(current, frames, threads, places, tasks, state)


class StackRequests:
    """The unanswered requests of one dispatcher. All methods but `take` need the reactor's lock."""

    def __init__(self, dispatcher: Tenant) -> None:
        self._dispatcher = dispatcher
        # Those that no thread waits for any more vanish.
        self._pending: WeakValueDictionary[int, DroneRequest[Any]] = WeakValueDictionary()

    def send(self, request: DroneRequest[Any]) -> None:
        if request.handle.is_up():
            self._pending[request.handle.request_frames(*request.question)] = request
            request.was_sent = True
        else:
            self._dispatcher.reactor.deliver(partial(fulfill, request))

    def on_drone_died(self, handle: DroneHandle) -> None:
        for request in list(self._pending.values()):
            if request.handle is handle:
                self._dispatcher.reactor.deliver(partial(fulfill, request))

    def on_answer(self, number: int, answer: dict[str, Any]) -> None:
        """Settle the request of that number, if there is one. Raises `Malformed`."""
        request = self._pending.get(number)
        if request is not None:
            value = request.read(answer)  # if malformed, the drone's death settles it
            self._pending.pop(number, None)
            self._dispatcher.reactor.deliver(partial(fulfill, request, value))

    def take(self, handles: list[DroneHandle], timeout: float) -> list[Stack | None]:
        """Ask all these drones at once, and return their stacks; None for a drone that has ended.

        Waits, for `timeout` seconds at most.
        """
        timeout = check_positive_seconds("timeout", timeout)
        pending = [StackRequest(self._dispatcher, handle) for handle in handles]
        for request in pending:
            if self._dispatcher.has_ended:
                fulfill(request)
            else:
                self._dispatcher.post(self.send, request)
        deadline = monotonic() + timeout
        return [_take(request, timeout, deadline) for request in pending]


def frames_of(request: StackRequest, number: int) -> StackSummary | None:
    """Return the frames of the task of that number, or None if the drone has not told them."""
    answer = request.result() if request.done() else None
    frames = None if answer is None else answer.frames.get(number)
    return None if frames is None else _read(frames)


def fatal_frames(lines: Sequence[str]) -> StackSummary:
    """Return the frames in `DroneHandle.task_frames`."""
    found = [found for line in lines if (found := re.match(_FATAL_FRAME, line))]
    return _read([(each[1], int(each[2]), each[3], "") for each in found])


def format_remote(frames: StackSummary, error: BaseException) -> str:
    """Return the text of a remote traceback: `frames`, and the first line of `error`."""
    last, _, _ = format_exception_only(error)[0].partition("\n")
    lines = ["Traceback (most recent call last):\n", *frames.format(), last]
    return f'\n"""\n{"".join(lines)}\n"""'


def read_report(
    report: dict[str, Any],
) -> tuple[int, dict[int, Sequence[Any]], list[tuple[str, Sequence[Any]]], dict[str, Any]]:
    """Return the running task, the frames of each task, those of each other thread, and the place
    of each task, from a drone's report. Raises `Malformed`.
    """
    try:
        frames = {int(number): _check(entries) for number, entries in report["tasks"].items()}
        threads = [(str(name), _check(entries)) for name, entries in report["threads"]]
        return int(report["current"]), frames, threads, {**report["places"]}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise Malformed(f"a report without the frames of tasks and threads: {error!r}") from error


def _check(entries: Any) -> Sequence[Any]:
    for file, line, function, source in entries:
        if [*map(type, (file, line, function, source))] != [str, int, str, str]:
            raise TypeError(f"not a frame: {(file, line, function, source)}")
    return list(entries)


# -- the threads that wait -------------------------------------------------------------------------


def _take(request: StackRequest, timeout: float, deadline: float) -> Stack | None:
    handle = request.handle
    try:
        answer = request.result(max(0.0, deadline - monotonic()))
    except TimeoutError:
        return _unanswered(request, timeout) if handle.alive else None
    if answer is not None:
        return _answered(handle, answer)
    return _stack(handle, "starting", None) if handle.alive else None


def _answered(handle: DroneHandle, answer: _Answer) -> Stack:
    tasks, current = answer.tasks, answer.current
    beside = [
        (f"{tasks[number].definition.label} #{number}", frames)
        for number, frames in answer.frames.items()
        if number != current and number in tasks
    ]
    return _stack(
        handle,
        "busy" if answer.frames else answer.state,
        tasks.get(current),
        frames=_read(answer.frames.get(current, ())),
        threads=tuple((name, _read(frames)) for name, frames in [*beside, *answer.threads]),
        system_call=handle.system_call() if current in tasks else None,
    )


def _unanswered(request: StackRequest, timeout: float) -> Stack:
    """Describe a drone that has not answered, as far as the controller knows its state."""
    handle = request.handle
    if request.was_sent:
        state = (
            f"no answer within {timeout:g} s: {handle.unresponsive or handle.stall_reason()}; its "
            f"C frames are shown by py-spy dump --native --pid {handle.pid}"
        )
    else:
        state = (
            f"not asked within {timeout:g} s: the thread of the pool is not let run, or is held by "
            "a finalizer (`__del__`) that does not return"
        )
    return _stack(handle, state, handle.running_task(), system_call=handle.system_call())


def _stack(handle: DroneHandle, state: str, task: Task | None, **fields: Any) -> Stack:
    from .stacks import Stack

    if task is not None:
        sending, now = task.sending, handle.dispatcher.reactor.timers.now()
        fields["seconds"] = None if sending is None else max(0.0, now - sending.at)
        fields.update(task=task.definition.label, number=task.number, item=task.item)
    return Stack(handle.name, handle.pid, state, **fields)
