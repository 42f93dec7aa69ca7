"""From plain code into green code: start a green thread, and wait for it."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar, overload

from ..runtime.coroutines import is_coroutine
from ..runtime.deferred_sigint import DeferredSigint
from .scheduler import scheduler
from .thread import start

__all__ = ["run"]

T = TypeVar("T")


@overload
def run(main: Coroutine[Any, Any, T], /) -> T: ...
@overload
def run(main: Callable[..., Awaitable[T]], /, *args: Any) -> T: ...
@overload
def run(main: Callable[..., T], /, *args: Any) -> T: ...


def run(main: Any, /, *args: Any) -> Any:
    """Runs ``main(*args)`` as a green thread, and waits for it: its value or error.

    The calling thread only waits, so signals and Ctrl-C arrive; Ctrl-C cancels the green thread,
    waits for its end, and raises `KeyboardInterrupt`. Other green threads go on when `main` has
    ended.

    Raises `Deadlock` when everybody waits and nothing can wake anybody, and `RuntimeError` inside a
    coroutine.

    >>> from polycephaly import green
    >>> async def main(name):
    ...     await green.sleep(0.01)
    ...     return f"hello {name}"
    >>> green.run(main, "world")
    'hello world'
    """
    if scheduler.in_step():
        if is_coroutine(main):
            main.close()
        raise RuntimeError(
            "green.run waits, and inside a coroutine it would stop every green thread: use `await`"
        )
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        raise RuntimeError(
            "green.run waits, and would stop the asyncio loop that runs here: `await green.spawn(...)`"
        )
    thread = None
    try:
        with DeferredSigint():  # a Ctrl-C comes before it is started, or when it can be cancelled
            thread = start(main, args)
        return thread.result()
    except KeyboardInterrupt:
        if thread is not None:
            thread.cancel()
            with suppress(Exception):
                thread.exception()  # waits; and what it says is not worth a report any more
        raise
    finally:
        del thread  # no cycle through the traceback of its error, which would keep the arguments
