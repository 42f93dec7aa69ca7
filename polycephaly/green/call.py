"""Foreign calls: blocking code that must not block the other green threads.

    await call(fn)   not known to be long: in place ──window──> the watchdog lets another native
                                                                thread run the green threads
                     known to be long: on another native thread, at once

Calling in place is the way of GildaVM: a call that returns within the window costs no thread switch
at all. If the ownership was taken meanwhile, the call yields `LOST`, and its green thread continues
from the end of the queue.

The calls of a bound green thread (`bound=True`) run on that thread's own native thread.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Generator
from types import coroutine
from typing import Any, ParamSpec, TypeVar

from ..timeline.event_log import event_log
from .history import history
from .scheduler import IN_CALL, LOST, NO_CALL, PARK, PARKED, YIELDED, Interrupted, scheduler
from .thread import GreenThread, outside_error
from .watchdog import watchdog

records = history.records

P = ParamSpec("P")
T = TypeVar("T")

# A bit mask: after so many calls in place, the other green threads run first.
CALLS_PER_TURN_MASK = 31


@coroutine
def call(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Generator[Any, Any, T]:
    """Run ``fn(*args, **kwargs)``, which may block, without stopping the other green threads.

    Parameters
    ----------
    fn
        A plain function.
    *args, **kwargs
        Arguments for `fn`.

    Returns
    -------
    object
        The value of `fn`. An error of `fn` is raised here.

    Raises
    ------
    RuntimeError
        If the caller is not a green thread, or no native thread can be started.

    Notes
    -----
    `fn` runs in place. If the call takes longer than the window (1 ms, see `configure`) and other
    green threads could run, another native thread runs them meanwhile. A function whose calls have
    been long runs on another native thread from the start. So the green thread may be on another
    native thread after the call, unless it is ``bound``.

    A call cannot be interrupted. A green thread that is cancelled during a call gets the result of
    the call, and `Cancelled` at its next await: a further call does not begin.

    Examples
    --------
    >>> import time
    >>> from polycephaly import green
    >>> async def nap(seconds):
    ...     await green.call(time.sleep, seconds)
    >>> async def main():
    ...     await green.par(*(nap(0.01) for _ in range(10)))  # all at once
    >>> green.run(main)
    """
    if get_ident() != scheduler.owner:
        raise outside_error("green.call", "asyncio.to_thread, or the plain function itself")
    thread = scheduler.current
    try:
        if thread.coro.__class__ is Interrupted:
            thread.raise_if_interrupted()
        long = history.predict_long(fn) if records else False
        if long or thread.__class__ is not GreenThread:
            value: T = yield from thread.call_on_native_thread(fn, args, kwargs)
            return value
        scheduler.calls = number = scheduler.calls + 1
        if not number & CALLS_PER_TURN_MASK and scheduler.ready:
            thread.next_send = YIELDED
            scheduler.ready.append(thread)
            yield PARK
        if watchdog.slow:
            watchdog.watch_closely()
        driver: Any = scheduler.driver
        driver.fn = fn
        driver.thread = thread
        # No other thread may wake or interrupt this one before the call returns.
        thread.next_send = IN_CALL
        scheduler.owner = 0  # no code that the call runs is a step of a green thread
        driver.token = number
        value = LOST  # until there is a value
        try:
            value = fn(*args, **kwargs) if kwargs else fn(*args)  # type: ignore[call-arg]
        finally:
            if driver.token == number:
                driver.token = NO_CALL
                scheduler.owner = driver.ident
                thread.next_send = PARKED
            else:
                driver.token = NO_CALL
                event_log.add_call(thread, fn, args, driver.began, value is LOST)
                long = False  # not to be recorded as short
                yield LOST
        if long is None:
            history.record_short(fn)
        return value
    finally:
        del thread  # no cycle through the traceback of its error


@coroutine
def call_long(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Generator[Any, Any, T]:
    """Run ``fn(*args, **kwargs)``, known to take long, on another native thread at once.

    Parameters, value and errors are those of `call`.
    """
    if get_ident() != scheduler.owner:
        raise outside_error("green.call_long", "asyncio.to_thread, or the plain function itself")
    scheduler.current.raise_if_interrupted()
    value: T = yield from scheduler.current.call_on_native_thread(fn, args, kwargs)
    return value
