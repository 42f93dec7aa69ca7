"""Seeing what green threads do: a list of them, and the verdict that all of them wait for ever.

A deadlock is only called so when it is certain. Everybody who could still do something is asked for: timers, foreign calls,
promises that others settle, other native threads, signal handlers. Threads of the tools around a program (a test
runner's time limit, an idle executor) do not count, unless they hold something of ours.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType, MethodType
from typing import Any, NamedTuple

from .. import promises
from ..errors import Deadlock
from ..launch import safepoint
from .scheduler import PARKED, bare, scheduler
from .thread import GreenThread, NativeThread
from .watchdog import watchdog

__all__ = ["ThreadInfo", "threads"]

SHOWN = 20  # green threads that a Deadlock lists

OWN = __name__.rpartition(".")[0]
IDLE_MACHINERY = ("threading", "queue", "concurrent.futures.thread", "execnet", "_weakrefset", "weakref")


class ThreadInfo(NamedTuple):
    """A green thread as it was when asked for.

    ``state`` is ``"running"``, ``"ready"``, ``"parked"``, ``"calling"`` (in a foreign call) or ``"native"`` (a plain
    function). ``file`` and ``line`` are where its own code is; ``doing`` names what it does there.
    """

    name: str
    state: str
    file: str
    line: int
    doing: str

    def __str__(self) -> str:
        return f"{self.name}: {self.state} in {self.doing}, {self.file}:{self.line}"


def threads() -> list[ThreadInfo]:
    """Every live green thread of this image, the longest first only by chance. From anywhere.

    >>> from polycephaly import green
    >>> async def main():
    ...     return [each.name for each in green.threads()]
    >>> green.run(main)
    ['main']
    """
    frames = sys._current_frames()
    return [_info(thread, frames) for thread in list(scheduler.live) if not thread.done()]


def _info(thread: GreenThread[Any], frames: dict[int, FrameType]) -> ThreadInfo:
    coro = bare(thread._coro)
    if isinstance(thread, NativeThread) and coro is None:
        ident = thread.in_foreign_code
        stack = list(_stack(frames.get(ident)))
        theirs = next((frame for frame in stack if not _is_ours(frame)), None)
        return _describe(thread, "native" if ident else "ready", theirs, stack[0] if stack else None)
    running = getattr(coro, "cr_running", False) or getattr(coro, "gi_running", False)
    if running:
        state = "running" if thread is scheduler.current else "calling"
    else:
        state = "parked" if thread._value is PARKED else "ready"
    chain = list(_chain(coro))
    theirs = next((frame for frame in reversed(chain) if not _is_ours(frame)), None)
    return _describe(thread, state, theirs or (chain[0] if chain else None), chain[-1] if chain else None)


def _describe(thread: GreenThread[Any], state: str, where: FrameType | None, doing: FrameType | None) -> ThreadInfo:
    file, line = (where.f_code.co_filename, where.f_lineno) if where is not None else ("?", 0)
    return ThreadInfo(thread.name, state, file, line, doing.f_code.co_qualname if doing is not None else thread.name)


def _chain(coro: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and what it awaits, outermost first."""
    while coro is not None:
        if isinstance(coro, CoroutineType):
            frame, coro = coro.cr_frame, coro.cr_await
        elif isinstance(coro, GeneratorType):
            frame, coro = coro.gi_frame, coro.gi_yieldfrom
        elif isinstance(coro, AsyncGeneratorType):
            frame, coro = coro.ag_frame, coro.ag_await
        else:
            return
        if frame is not None:
            yield frame


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name == OWN or name.startswith((f"{OWN}.", "polycephaly.promises"))


# -- deadlock ----------------------------------------------------------------------------------------


def _look_for_deadlock() -> None:
    """By an owner that has had nothing to do for a while."""
    waiting = dict(promises.waiting)
    if not waiting or scheduler.outside or scheduler.away > len(waiting) or scheduler.timers.left() is not None:
        return
    stuck = [p for p, end in waiting.values() if isinstance(p, GreenThread) and end is None and p._value is PARKED]
    if not stuck or _somebody_else_could_act(waiting) or _a_signal_could_act():
        return
    listed = "\n".join(f"  {_info(thread, {})}" for thread in islice(list(scheduler.live), SHOWN))
    more = len(scheduler.live) - SHOWN
    text = f"all green threads wait, and nothing can wake any of them:\n{listed}"
    if more > 0:
        text += f"\n  and {more} more"
    for thread in stuck:
        thread._interrupt(Deadlock(text))


def _somebody_else_could_act(waiting: dict[int, tuple[Any, float | None]]) -> bool:
    known = safepoint.own_idents() | scheduler.workers.idle() | {scheduler.owner, watchdog.ident}
    by_ident = {thread.ident: thread for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident in known:
            continue
        waits_for, end = waiting.get(ident, (None, 0.0))
        if isinstance(waits_for, GreenThread) and end is None:
            continue
        thread = by_ident.get(ident)
        if isinstance(thread, threading.Timer):
            if _holds_ours(thread.function, *thread.args, *thread.kwargs.values()):
                return True
        elif not all(f.f_globals.get("__name__", "").startswith(IDLE_MACHINERY) for f in _stack(frame)):
            return True
    return False


def _a_signal_could_act() -> bool:
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(callable(h) and h is not signal.default_int_handler and _holds_ours(h) for h in handlers)


def _holds_ours(*things: Any) -> bool:
    """Whether one of them is of ours, or has something of ours at hand: bound, enclosed, or by a global name."""
    for thing in things:
        if type(thing).__module__.startswith("polycephaly"):
            return True
        if isinstance(thing, MethodType):
            if _holds_ours(thing.__self__, thing.__func__) or _holds_ours(*getattr(thing.__self__, "__dict__", {}).values()):
                return True
        elif isinstance(thing, functools.partial):
            if _holds_ours(thing.func, *thing.args, *thing.keywords.values()):
                return True
        elif isinstance(thing, FunctionType):
            if thing.__module__.startswith("polycephaly"):
                return True
            cells = [cell.cell_contents for cell in thing.__closure__ or () if cell.cell_contents is not thing]
            named = [thing.__globals__[name] for name in thing.__code__.co_names if name in thing.__globals__]
            near = [each for each in cells + named if not isinstance(each, FunctionType)]
            if _holds_ours(*near):
                return True
            if any(getattr(each, "__name__", "").startswith("polycephaly") for each in near):
                return True
    return False


scheduler.when_silent = _look_for_deadlock
