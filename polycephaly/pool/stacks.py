"""Stacks of drones, taken while their tasks run: `Stack`, and the requests for the frames.

    Drone.stack ── post ──> StackRequests.send ──FRAMES──> the drone's control thread
    Drone.stack <── settled by StackRequests.on_answer <── FRAMES: plain data ──┘

The waiting thread builds the `Stack`, because that reads source files. A drone that does not answer
in time is described as far as the controller knows its state.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from traceback import FrameSummary, StackSummary, format_exception_only
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from ..errors import Malformed
from ..promises.promise import fulfill
from .config import check_timeout
from .dispatcher_base import DispatcherBase
from .drone_handle import DroneHandle
from .items import with_item
from .reactor import DrivingSignal
from .task import Task

T = TypeVar("T")

_FATAL_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')

ANSWER_SECONDS = 2.0
"""By default, how long a drone may take to report its frames."""


class Stack(NamedTuple):
    """The activity of a drone at one moment: see `Drone.stack`.

    ``str()`` gives a text like a traceback.

    Attributes
    ----------
    drone : str
        The name of the drone.
    pid : int or None
        The process id. None if the drone has none yet.
    state : str
        "busy", "idle", "between two tasks", "starting", or why the drone did not answer.
    task : str or None
        The running task, named as in errors.
    number : int or None
        The number of the task, as in its time in a timeline.
    item : int or None
        The index in a `map`, if the task is one of its calls; None for a slice of several calls.
    seconds : float or None
        Seconds since the task was sent to the drone.
    frames : list
        The Python frames of the task, at most 200, as a ``traceback.StackSummary``: the innermost
        one comes last. Empty if the task is a function of C that was called directly.
    threads : tuple of pairs
        The name and the frames of each other thread that runs code from outside the standard
        library, and of each task that runs beside others (``width=``).
    system_call : str or None
        The system call in which the drone's main thread, which runs the task, waits. None if that
        thread computes, runs no task, or the kernel does not tell. Always None for drones of Ray.

    Examples
    --------
    >>> import polycephaly as poly
    >>> with poly.Drone(name="lab") as drone:
    ...     str(drone.stack()) == f"lab (pid {drone.pid}): idle"
    True
    """

    drone: str
    pid: int | None
    state: str
    task: str | None = None
    number: int | None = None
    item: int | None = None
    seconds: float | None = None
    frames: StackSummary = StackSummary()
    threads: tuple[tuple[str, StackSummary], ...] = ()
    system_call: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as plain data.

        Returns
        -------
        dict
            Each frame is a list of file, line, function and source line.
        """
        threads = [(name, _plain(frames)) for name, frames in self.threads]
        return {**self._asdict(), "frames": _plain(self.frames), "threads": threads}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Stack:
        """Return the stack of which `as_dict` gave these fields."""
        threads = tuple((name, _summary(frames)) for name, frames in fields["threads"])
        return cls(**{**fields, "frames": _summary(fields["frames"]), "threads": threads})

    def __str__(self) -> str:
        doing = []
        if self.task is not None:
            doing.append(with_item(f"{self.task} #{self.number}", self.item))
        if self.seconds is not None:
            doing.append(f"for {self.seconds:.1f} s")
        if self.system_call is not None:
            doing.append(f"in the system call {self.system_call}")
        state = "" if self.task is not None and self.state == "busy" else self.state
        what = ": ".join(filter(None, (", ".join(doing), state)))
        lines = [f"{self.drone} (pid {self.pid}): {what}\n"]
        if self.task is not None and self.state == "busy" and not self.frames:
            lines.append("  no Python frames: the task is a function of C\n")
        lines += self.frames.format()
        for name, frames in self.threads:
            lines += [f" beside it, {name}:\n", *frames.format()]
        return "".join(lines).rstrip("\n")


class Stacks(list[Stack]):
    """The stacks of several drones. ``str()`` gives all their texts."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))


def _plain(frames: StackSummary) -> list[list[Any]]:
    return [[each.filename, each.lineno, each.name, each.line] for each in frames]


def _summary(frames: Sequence[Sequence[Any]]) -> StackSummary:
    return StackSummary.from_list(
        [FrameSummary(file, line, name, line=source) for file, line, name, source in frames]
    )


def _read(entries: Sequence[Sequence[Any]]) -> StackSummary:
    """Return frames that a drone has reported, innermost first, with their source lines."""
    for file in {entry[0] for entry in entries}:
        linecache.checkcache(file)
    return _summary(
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
    tasks: dict[int, Task]
    state: str  # if no task runs


class DroneRequest(DrivingSignal[T | None]):
    """A request to one drone. The value is None if the drone cannot be asked."""

    def __init__(self, dispatcher: DispatcherBase, handle: DroneHandle) -> None:
        super().__init__(dispatcher.reactor)
        self.handle = handle
        self.was_sent = False

    def ask(self) -> int:
        """Send the request. Return its number."""
        raise NotImplementedError

    def read(self, answer: dict[str, Any]) -> T:
        """Return the value that an answer means. Raises `Malformed`."""
        raise NotImplementedError


class StackRequest(DroneRequest[_Answer]):
    def ask(self) -> int:
        return self.handle.request_frames()

    def read(self, answer: dict[str, Any]) -> _Answer:
        in_flight = self.handle.in_flight
        current, frames, threads = read_report(answer)
        tasks = {each: in_flight[each] for each in frames if each in in_flight}
        return _Answer(
            current, frames, threads, tasks, "between two tasks" if in_flight else "idle"
        )


class StackRequests:
    """The unanswered requests of one dispatcher. All methods but `take` need the reactor's lock."""

    def __init__(self, dispatcher: DispatcherBase) -> None:
        self._dispatcher = dispatcher
        # Those that no thread waits for any more vanish.
        self._pending: WeakValueDictionary[int, DroneRequest[Any]] = WeakValueDictionary()

    def send(self, request: DroneRequest[Any]) -> None:
        if request.handle.is_up():
            self._pending[request.ask()] = request
            request.was_sent = True
        else:
            self._dispatcher.reactor.deliver(partial(fulfill, request))

    def on_drone_died(self, handle: DroneHandle) -> None:
        for request in list(self._pending.values()):
            if request.handle is handle:
                self._dispatcher.reactor.deliver(partial(fulfill, request))

    def on_answer(self, number: int, answer: dict[str, Any]) -> None:
        """Settle the request of that number, if there is one. Raises `Malformed`."""
        request = self._pending.pop(number, None)
        if request is not None:
            self._dispatcher.reactor.deliver(partial(fulfill, request, request.read(answer)))

    def take(self, handles: list[DroneHandle], timeout: float) -> list[Stack | None]:
        """Ask all these drones at once, and return their stacks; None for a drone that has ended.

        Waits, for `timeout` seconds at most.
        """
        check_timeout(timeout)
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
    found = [found for line in lines if (found := _FATAL_FRAME.match(line))]
    return _read([(each[1], int(each[2]), each[3], "") for each in found])


def format_remote(frames: StackSummary, error: BaseException) -> str:
    """Return the text of a remote traceback: `frames`, and the first line of `error`."""
    last, _, _ = format_exception_only(error)[0].partition("\n")
    lines = ["Traceback (most recent call last):\n", *frames.format(), last]
    return f'\n"""\n{"".join(lines)}\n"""'


def read_report(
    report: dict[str, Any],
) -> tuple[int, dict[int, Sequence[Any]], list[tuple[str, Sequence[Any]]]]:
    """Return the running task, the frames of each task, and those of each other thread, from a
    drone's report. Raises `Malformed`.
    """
    try:
        frames = {int(number): _check(entries) for number, entries in report["tasks"].items()}
        threads = [(str(name), _check(entries)) for name, entries in report["threads"]]
        return int(report["current"]), frames, threads
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
        return _stack(handle, answer)
    return Stack(handle.name, handle.pid, "starting") if handle.alive else None


def _stack(handle: DroneHandle, answer: _Answer) -> Stack:
    tasks, current = answer.tasks, answer.current
    beside = [
        (f"{tasks[number].definition.label} #{number}", frames)
        for number, frames in answer.frames.items()
        if number != current and number in tasks
    ]
    return Stack(
        handle.name,
        handle.pid,
        "busy" if answer.frames else answer.state,
        **_describe(handle, tasks.get(current)),
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
            f"not asked within {timeout:g} s: the thread of the pool is busy, perhaps with a "
            "callback of a promise that does not return"
        )
    return Stack(
        handle.name,
        handle.pid,
        state,
        **_describe(handle, handle.running_task()),
        system_call=handle.system_call(),
    )


def _describe(handle: DroneHandle, task: Task | None) -> dict[str, Any]:
    if task is None:
        return {}
    sending, now = task.sending, handle.dispatcher.reactor.timers.now()
    return {
        "task": task.definition.label,
        "number": task.number,
        "item": task.item,
        "seconds": None if sending is None else max(0.0, now - sending.at),
    }
