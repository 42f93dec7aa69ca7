"""`spawn`: start a green thread of the kind that suits the function."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from time import sleep
from typing import Any, TypeVar, overload
from weakref import WeakSet

from ..runtime.checks import brief
from ..runtime.clock import monotonic
from ..runtime.coroutines import is_coroutine, is_coroutine_function
from ..timeline.event_log import MAX_LIVES_LOGGED
from .bound import BoundThread
from .scheduler import InContext, scheduler
from .thread import GreenThread, NativeThread, UnseenErrorReport, as_coroutine, qualname

T = TypeVar("T")

OwnGreenThread: type[GreenThread[Any]] = GreenThread
"""The class of the green threads of this process.

A forked child makes another one, so that threads of its parent in a channel's slot can be told
apart.
"""

MAX_CLOSE_SECONDS = 1.0  # at its end, a program waits so long for generators that are being closed
_closers: WeakSet[GreenThread[Any]] = WeakSet()
"""Green threads that close asynchronous generators which others have dropped."""


def _reset_after_fork() -> None:
    global OwnGreenThread
    _closers.clear()
    OwnGreenThread = type(
        "GreenThread",
        (GreenThread,),
        {"__slots__": (), "__module__": GreenThread.__module__, "__qualname__": "GreenThread"},
    )


@overload
def spawn(
    fn: Coroutine[Any, Any, T], /, *, name: str | None = None, bound: bool = False
) -> GreenThread[T]: ...
@overload
def spawn(
    fn: Callable[..., Awaitable[T]], /, *args: Any, name: str | None = None, bound: bool = False
) -> GreenThread[T]: ...
@overload
def spawn(
    fn: Callable[..., T], /, *args: Any, name: str | None = None, bound: bool = False
) -> GreenThread[T]: ...


def spawn(fn: Any, /, *args: Any, name: str | None = None, bound: bool = False) -> GreenThread[Any]:
    """Start a green thread that runs ``fn(*args)``, and return the promise of its value.

    Parameters
    ----------
    fn
        A coroutine function or coroutine object runs on the scheduler: atomically between two
        awaits, one at a time with all others. A plain function runs on a native thread of its own;
        if its value can be awaited, the green thread awaits it.
    *args
        Arguments for `fn`.
    name
        The name in reports; by default the qualified name of `fn`.
    bound
        Run all steps of the coroutine, and its foreign calls, on one native thread. For objects
        that belong to the thread that made them (`sqlite3`, GUIs).

    Returns
    -------
    GreenThread
        The promise of the value.

    Raises
    ------
    TypeError
        If `fn` cannot be called this way.

    Notes
    -----
    Any thread may call this. An error that no code looks at is printed, with `name`. Passing the
    promise on (`then`, `gather`) counts as looking.

    Examples
    --------
    >>> from polycephaly import green
    >>> async def double(x):
    ...     return 2 * x
    >>> green.spawn(double, 4).value, green.spawn(pow, 2, 8).value
    (8, 256)
    """
    return start(fn, args, None, name, bound)


def start(
    fn: Any,
    args: tuple[Any, ...],
    group: Any = None,
    name: str | None = None,
    bound: bool = False,
    on_made: Callable[[GreenThread[Any]], object] | None = None,
) -> GreenThread[Any]:
    """Start a green thread, of which `on_made` learns before the thread can begin."""
    coro: Any = None
    if is_coroutine(fn):
        if args:
            fn.close()
            raise TypeError(f"a coroutine object takes no arguments: {fn!r}, {args!r}")
        coro = as_coroutine(fn, qualname(fn))
    elif is_coroutine_function(fn):
        coro = as_coroutine(fn(*args), qualname(fn))
    elif not callable(fn):
        raise TypeError(f"a green thread runs a function or a coroutine, not {brief(fn)}")
    thread: GreenThread[Any]
    if coro is None:
        thread = NativeThread(fn, group)
    else:
        context = copy_context()
        if context:  # an empty context, the usual case, needs no wrapper
            coro = InContext(coro, context)
        thread = BoundThread(coro, group) if bound else OwnGreenThread(coro, group)
    if name:
        thread.given_name = name
    if len(scheduler.live) < MAX_LIVES_LOGGED:
        thread.spawned_at = monotonic()
    if group is not None:
        group.children.add(thread)  # before the thread can end
    if on_made is not None:
        on_made(thread)
    if isinstance(thread, NativeThread):
        thread.start_job(fn, args)
        return thread
    scheduler.live.add(thread)
    scheduler.ready.append(thread)
    if scheduler.bell:
        scheduler.ring()
    return thread


def _close_in_thread(generator: Any) -> None:
    """Close an asynchronous generator in a green thread of its own, as its `finally` may await.

    Python itself would run that in the middle of any step, and the scheduler would take its wait
    for one of the thread that is in that step.
    """
    name = f"close of {qualname(generator)}"

    async def close() -> None:
        try:
            await generator.aclose()
        except Exception as error:  # printed before the thread ends: `_wait_for_closers` waits
            UnseenErrorReport(name, error).print_if_unseen()

    if not sys.is_finalizing():
        _closers.add(spawn(close, name=name))


@atexit.register
def _wait_for_closers() -> None:
    deadline = monotonic() + MAX_CLOSE_SECONDS
    while not all(each.done() for each in list(_closers)) and monotonic() < deadline:
        sleep(0.001)


scheduler.on_generator_dropped = _close_in_thread
os.register_at_fork(after_in_child=_reset_after_fork)
