"""Foreign calls: code that blocks a native thread, and must not block the other green threads.

    await call(fn)   known to be short, or not known: here, in place    ──window──> the watchdog has another native
                                                                                    thread drive; this one follows
                     known to be long: on another native thread, at once            when the call returns

The first way is GildaVM's: a call that returns within the window costs no thread switch at all.
When it was taken over meanwhile, the green thread comes back as `LOST`: it goes to the end of the
queue, and on from there.

What must be run on the green thread's own native thread (`bound=True`) goes to that one.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Generator
from types import coroutine
from typing import Any, ParamSpec, TypeVar

from ..timeline.trail import trail
from .history import history
from .scheduler import AWAY, LOST, NO_CALL, PARK, PARKED, YIELDED, scheduler
from .thread import GreenThread, outside
from .watchdog import watchdog

__all__ = ["call", "call_long"]

records = history.records

P = ParamSpec("P")
T = TypeVar("T")

TURN = 31  # a bit mask: after so many calls in place without a pause, the others have a turn


@coroutine
def call(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Generator[Any, Any, T]:
    """Runs ``fn(*args, **kwargs)``, which may block, without stopping the other green threads; its
    value or error.

    It is run in place. If it lasts longer than the window (1 ms, see `configure`) and others could
    go on, another native thread drives them meanwhile. What has been long before is run on another
    native thread from the start. So after a call the green thread may be on another native thread
    than before, unless it is ``bound``.

    A call cannot be broken off: a green thread that is cancelled meanwhile gets the call's result,
    and `Cancelled` at its next await.

    >>> import time
    >>> from polycephaly import green
    >>> async def nap(seconds):
    ...     await green.call(time.sleep, seconds)
    >>> async def main():
    ...     await green.par(*(nap(0.01) for _ in range(10)))  # all at once
    >>> green.run(main)
    """
    if get_ident() != scheduler.owner:
        raise outside("green.call", "asyncio.to_thread, or the plain function itself")
    thread = scheduler.current
    long = history.judge(fn) if records else False
    if long or thread.__class__ is not GreenThread:
        value: T = yield from thread._call_elsewhere(fn, args, kwargs)
        return value
    scheduler.calls = number = scheduler.calls + 1
    if not number & TURN and scheduler.ready:
        thread._value = YIELDED
        scheduler.ready.append(thread)
        yield PARK
    if watchdog.slow:
        watchdog.look_closely()
    driver: Any = scheduler.driver
    driver.fn = fn
    driver.thread = thread
    thread._value = AWAY  # it is neither to be woken nor interrupted before it has come back
    scheduler.owner = 0  # nothing of what the call runs is a step of a green thread
    driver.token = number
    try:
        value = fn(*args, **kwargs) if kwargs else fn(*args)  # type: ignore[call-arg]
    except BaseException:
        if driver.token == number:
            driver.token = NO_CALL
            scheduler.owner = driver.ident
            thread._value = PARKED
        else:
            driver.token = NO_CALL
            trail.called(thread, fn, args, driver.began, True)
            driver.returned = thread
            yield LOST
        raise
    if driver.token == number:
        driver.token = NO_CALL
        scheduler.owner = driver.ident
        thread._value = PARKED
    else:
        driver.token = NO_CALL
        trail.called(thread, fn, args, driver.began)
        driver.returned = thread
        yield LOST
        return value
    if long is None:
        history.was_short(fn)
    return value


@coroutine
def call_long(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Generator[Any, Any, T]:
    """`call` for what is known to take long: it goes to another native thread at once."""
    if get_ident() != scheduler.owner:
        raise outside("green.call_long", "asyncio.to_thread, or the plain function itself")
    value: T = yield from scheduler.current._call_elsewhere(fn, args, kwargs)
    return value
