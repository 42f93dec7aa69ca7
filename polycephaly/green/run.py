"""`run`: start a green thread from plain code, and wait for its end. So do `put`, `get`, `with`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar, overload

from ..runtime.checks import check_seconds
from ..runtime.coroutines import is_coroutine
from ..runtime.deferred_sigint import DeferredSigint
from .scheduler import scheduler
from .spawning import start

T = TypeVar("T")


@overload
def run(main: Coroutine[Any, Any, T], /) -> T: ...
@overload
def run(main: Callable[..., Awaitable[T]], /, *args: Any) -> T: ...
@overload
def run(main: Callable[..., T], /, *args: Any) -> T: ...


def run(main: Any, /, *args: Any) -> Any:
    """Run ``main(*args)`` as a green thread, and wait for its end.

    Parameters
    ----------
    main
        A coroutine function, coroutine object or plain function, as for `spawn`.
    *args
        Arguments for `main`.

    Returns
    -------
    object
        The value of `main`. An error of `main` is raised here.

    Raises
    ------
    Deadlock
        If all green threads wait and nothing can wake any of them.
    RuntimeError
        If called inside a coroutine.
    KeyboardInterrupt
        On Ctrl-C, after the green thread has been cancelled and has ended.

    Notes
    -----
    The calling thread only waits, so signal handlers and Ctrl-C work. Other green threads continue
    after `main` has ended.

    Examples
    --------
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
            "green.run waits, and would stop every green thread inside a coroutine: use `await`"
        )
    if in_asyncio():
        raise RuntimeError(
            "green.run waits, and would stop the asyncio loop that runs here: use "
            "`await green.spawn(...)`"
        )
    thread = None
    try:
        # Ctrl-C arrives before the thread is started, or when it can be cancelled.
        with DeferredSigint():
            thread = start(main, args)
        return thread.result()
    except KeyboardInterrupt:
        if thread is not None:
            thread.cancel()
            with suppress(Exception):
                thread.exception()  # waits, and marks the error as seen, so none is printed
        raise
    finally:
        del thread  # no cycle through the traceback of its error, which would keep the arguments


# -- for operations that plain code may wait for ---------------------------------------------------


def wait_in_proxy(
    op: Callable[..., Any],
    args: tuple[Any, ...],
    name: str,
    timeout: float | None = None,
    failure: str = "",
    undo: Callable[[Any], object] | None = None,
) -> Any:
    """Run `op` in a proxy green thread for plain code, and wait for its result.

    If the timeout is over but the proxy has its item all the same, return that. If the wait is
    broken off, the proxy is cancelled. If it has a value all the same, `undo` gets that.
    """
    if timeout is not None:
        check_seconds("timeout", timeout)  # before the proxy takes part
    proxy = None
    try:
        with DeferredSigint():
            # Ctrl-C comes before the start, or when the proxy can be cancelled.
            proxy = start(op, args, name=name)
        try:
            return proxy.result(timeout)
        except TimeoutError:
            if not failure:  # no time limit: raised by a signal handler
                raise
            proxy.cancel()
        try:
            return proxy.result()
        except CancelledError as error:
            # This thread has itself been cancelled meanwhile, as the error reports.
            if error.waiter_cancelled:  # type: ignore[attr-defined]
                raise
            raise TimeoutError(f"{failure} within {timeout} s") from None
    except BaseException:
        if proxy is not None:
            proxy.cancel()
            if undo is not None:
                proxy.then(undo)
        raise
    finally:
        del proxy  # as in `run`


def forbid_in_step(operation: str, alternative: str) -> None:
    if scheduler.in_step():
        raise RuntimeError(
            f"{operation} blocks, and would stop every green thread inside a coroutine: "
            f"use `{alternative}`"
        )


def in_asyncio() -> bool:
    """Return True if an asyncio loop runs in the calling native thread."""
    return asyncio._get_running_loop() is not None
