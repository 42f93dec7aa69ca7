"""`run`: start a green thread from plain code, and wait for its end. So do `put`, `get`, `with`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from math import inf
from time import monotonic
from typing import Any, TypeVar, overload

from ..runtime.checks import check_seconds
from ..runtime.coroutines import is_coroutine
from .scheduler import is_unstarted, scheduler
from .spawning import start
from .thread import GreenThread, NativeThread

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
    BaseException
        The error of a signal handler, such as `KeyboardInterrupt` on Ctrl-C, after the green thread
        has been cancelled and has ended. A further signal ends that wait.

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
        if is_coroutine(main):
            main.close()
        raise RuntimeError(
            "green.run waits, and would stop the asyncio loop that runs here: use "
            "`await green.spawn(...)`"
        )
    # In a list, which `start` fills before the thread can begin: a signal handler may raise there.
    started: list[GreenThread[Any]] = []
    try:
        start(main, args, on_made=started.append)
        return started[0].result()
    except BaseException:
        if started and not started[0].done():  # raised by a signal handler
            _cancel_and_wait(started[0])
        raise
    finally:
        started.clear()  # no cycle through the traceback of the thread's error


def _cancel_and_wait(thread: GreenThread[Any]) -> None:
    _cancel(thread)
    if isinstance(thread, NativeThread) and thread.coro is None and not thread.native_ident:
        return  # its function has not begun, and never will
    with suppress(CancelledError):
        thread.exception()  # waits, and marks the error as seen, so none is printed


def _cancel(thread: GreenThread[Any]) -> None:
    """Cancel a thread whose start a signal handler may have broken off."""

    def make_ready() -> None:
        # The handler may have raised just before `start` did this.
        if thread.coro is not None and is_unstarted(thread.coro) and thread not in scheduler.ready:
            scheduler.live.add(thread)
            scheduler.ready.append(thread)

    scheduler.post(make_ready)
    thread.cancel()


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
    started: list[GreenThread[Any]] = []  # as in `run`
    proxy: GreenThread[Any] | None = None
    try:
        proxy = start(op, args, name=name, on_made=started.append)
        end = inf if timeout is None else monotonic() + timeout
        try:
            return proxy.result(timeout)
        except TimeoutError:
            if monotonic() < end:  # not this limit: of a signal handler, or of the item's own code
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
        for proxy in started:
            if undo is not None:
                proxy.then(undo)
            if not proxy.done():
                _cancel(proxy)
        raise
    finally:
        del started, proxy  # as in `run`


def forbid_in_step(operation: str, alternative: str) -> None:
    if scheduler.in_step():
        raise RuntimeError(
            f"{operation} blocks, and would stop every green thread inside a coroutine: "
            f"use `{alternative}`"
        )


def in_asyncio() -> bool:
    """Return True if an asyncio loop runs in the calling native thread."""
    return asyncio._get_running_loop() is not None
