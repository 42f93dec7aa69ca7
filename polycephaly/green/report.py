"""Reports on green threads: their states, their timeline, and the detection of deadlocks.

A deadlock is reported only if it is certain, so anything that could still wake a thread counts:
timers, foreign calls, promises that others settle, other native threads and signal handlers.
Excepted are tools that are known to have no effect on the program: the time limit of a test runner,
or an idle executor. A thread that a C library has started is invisible until it calls into Python.
To wait for such a thread, code awaits a `Promise`, which counts as from outside.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple

from .._compat import current_frames
from ..errors import Deadlock, is_own_frame
from ..promises import promise
from ..runtime import fork_guard
from ..timeline import Timeline
from ..timeline.event_log import event_log
from .parking import Parking
from .scheduler import IN_CALL, PARKED, Schedulable, scheduler, unwrap
from .thread import GreenThread, NativeThread
from .watchdog import watchdog

MAX_LISTED_THREADS = 20  # in a `Deadlock`

IDLE_MODULES = ("threading", "queue", "concurrent.futures.thread", "execnet")
TIME_LIMIT_MODULES = ("pytest_timeout",)


class ThreadInfo(NamedTuple):
    """The state of one green thread at the time of a call of `green.threads`.

    Attributes
    ----------
    name
        The name of the thread.
    state
        ``"running"``, ``"ready"``, ``"parked"``, ``"calling"`` (in a foreign call) or ``"native"``
        (a plain function).
    file
        The file of the thread's own code.
    line
        The line there.
    doing
        The name of the function or operation that runs or waits there.
    """

    name: str
    state: str
    file: str
    line: int
    doing: str

    def __str__(self) -> str:
        return f"{self.name}: {self.state} in {self.doing}, {self.file}:{self.line}"


def threads() -> list[ThreadInfo]:
    """Return the states of the live green threads of this process. Any thread may call this.

    Returns
    -------
    list of ThreadInfo
        In no particular order.

    Examples
    --------
    >>> from polycephaly import green
    >>> async def main():
    ...     return [each.name for each in green.threads()]
    >>> green.run(main)
    ['main']
    """
    frames = current_frames()
    return [_info(thread, frames) for thread in list(scheduler.live) if not thread.done()]


def info_of(thread: object, frames: Mapping[int, FrameType]) -> ThreadInfo | None:
    """Return the state of one green thread; None for any other object. Thread-safe.

    `frames` has the frame of each native thread, as from `sys._current_frames`.
    """
    return _info(thread, frames) if isinstance(thread, GreenThread) else None


def frames_of(thread: object, frames: Mapping[int, FrameType]) -> list[FrameType]:
    """Return the frames of one green thread, innermost first, of a running one only the outermost.

    [] for any other object. Thread-safe.
    """
    if not isinstance(thread, GreenThread):
        return []
    coro = unwrap(thread.coro)
    if isinstance(thread, NativeThread) and coro is None:
        return list(_stack(frames.get(thread.native_ident)))
    return [each for each in _chain(coro) if isinstance(each, FrameType)][::-1]


def timeline() -> Timeline:
    """Return a timeline of the green threads of this process. Any thread may call this.

    Returns
    -------
    Timeline
        The last 4,000 events: lives of green threads, foreign calls, items of `map`.

    Notes
    -----
    Events shorter than 50 µs are left out, and so are the lives of threads spawned beside 256
    others. In a drone, events already sent to the controller with results are missing: see
    `Drone.timeline`.

    Examples
    --------
    >>> import time
    >>> from polycephaly import green
    >>> green.map(time.sleep, [0.01, 0.02], width=2)
    [None, None]
    >>> {span.name for span in green.timeline().spans if span.note == "0.02"}
    {'sleep'}
    """
    process = "this process"
    events = [*event_log.events, *event_log.unfinished_lives(list(scheduler.live))]
    return Timeline([each._replace(drone=process) for each in events], [process])


def _info(thread: Schedulable, frames: Mapping[int, FrameType]) -> ThreadInfo:
    coro = unwrap(thread.coro)
    chain: list[FrameType | Parking] = list(_chain(coro))
    # The last of these is shown: that of the user's code or, in a coroutine, else the outermost.
    candidates = [each for each in chain if isinstance(each, FrameType)][:1]
    if isinstance(thread, NativeThread) and coro is None:
        chain += reversed(list(_stack(frames.get(thread.native_ident))))
        state = "native" if thread.native_ident else "ready"
    elif getattr(coro, "cr_running", False) or getattr(coro, "gi_running", False):
        state = "running" if thread is scheduler.current else "calling"
    elif thread.next_send is PARKED:
        state = "parked"
    else:
        state = "calling" if thread.next_send is IN_CALL else "ready"
    candidates += [each for each in chain if isinstance(each, FrameType) and not is_own_frame(each)]
    file, line = "?", 0
    if candidates:
        file, line = candidates[-1].f_code.co_filename, candidates[-1].f_lineno
    doing = chain[-1] if chain else thread
    operation = doing.f_code.co_qualname if isinstance(doing, FrameType) else doing.name
    return ThreadInfo(thread.name, state, file, line, operation)


def _chain(coro: Any) -> Iterator[FrameType | Parking]:
    """Yield the frames of a coroutine and of all that it awaits, outermost first.

    If the coroutine is parked in an operation without a frame, that operation comes last.
    """
    while coro is not None:
        if isinstance(coro, CoroutineType):
            frame, coro = coro.cr_frame, coro.cr_await
        elif isinstance(coro, GeneratorType):
            frame, coro = coro.gi_frame, coro.gi_yieldfrom
        elif isinstance(coro, AsyncGeneratorType):
            frame, coro = coro.ag_frame, coro.ag_await
        else:
            if isinstance(coro, Parking):
                yield coro
            return
        if frame is not None:
            yield frame


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# -- deadlock --------------------------------------------------------------------------------------


def _check_for_deadlock() -> None:
    """Raise `Deadlock` in threads that wait for ever.

    Called by an owner that has had nothing to do for a while.
    """
    waiting = dict(promise.waiting_threads)
    if (
        not waiting
        or scheduler.external_waits
        or scheduler.native_calls > len(waiting)
        or scheduler.timers.seconds_left() is not None
    ):
        return
    stuck = [
        p
        for p, end in waiting.values()
        if isinstance(p, GreenThread) and end is None and p.next_send is PARKED
    ]
    if not stuck or can_other_threads_act(waiting) or _can_signal_handler_act():
        return
    # Last: a native thread that was not seen to act may have ended its act since the owner looked.
    if scheduler.ready:
        return
    listed = "\n".join(
        f"  {_info(thread, {})}" for thread in islice(list(scheduler.live), MAX_LISTED_THREADS)
    )
    more = len(scheduler.live) - MAX_LISTED_THREADS
    text = f"all green threads wait, and nothing can wake any of them:\n{listed}"
    if more > 0:
        text += f"\n  and {more} more"
    for thread in stuck:
        thread.interrupt(Deadlock(text))


def can_other_threads_act(waiting: dict[int, tuple[Any, float | None]]) -> bool:
    known = fork_guard.own_thread_ids() | scheduler.workers.idle_idents()
    known |= {scheduler.owner, watchdog.ident}
    by_ident = {thread.ident: thread for thread in threading.enumerate()}
    for ident, frame in current_frames().items():
        if ident in known:
            continue
        waits_for, end = waiting.get(ident, (None, 0.0))
        if isinstance(waits_for, GreenThread) and end is None:
            continue
        thread = by_ident.get(ident)
        if isinstance(thread, threading.Timer):
            if not _is_time_limit(thread.function):
                return True
        elif not all(_is_idle(each) for each in _stack(frame)):
            return True
    return False


def _is_idle(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    if module == "concurrent.futures.thread" and frame.f_code.co_name == "run":
        return False  # in this function an executor runs a call
    return module.startswith(IDLE_MODULES)


def _is_time_limit(fn: Any) -> bool:
    return str(getattr(fn, "__module__", "")).startswith(TIME_LIMIT_MODULES)


def _can_signal_handler_act() -> bool:
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(
        callable(h) and h is not signal.default_int_handler and not _is_time_limit(h)
        for h in handlers
    )


scheduler.on_idle = _check_for_deadlock
