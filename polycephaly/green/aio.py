"""Running asyncio code from green threads, on the one asyncio loop of the process.

green thread ──await aio(coro)──> a task on the loop ──value or error──> green thread
                cancelled ──────> the task is cancelled, and the green thread waits for its end

The loop runs on a native thread of its own, and is made at the first use. `aio(fn)` is a function
whose calls do that, for pools and green threads.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
from _thread import get_ident
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from functools import wraps
from types import coroutine
from typing import Any, ParamSpec, TypeVar, overload

from ..runtime.checks import brief
from ..runtime.coroutines import is_coroutine_function
from ..runtime.fork_guard import OwnThread
from .parking import parks
from .scheduler import PARK, scheduler
from .thread import Wake, outside_error

P = ParamSpec("P")
T = TypeVar("T")


class _Loop:
    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: OwnThread | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the loop, made if necessary. For the scheduler's owner only."""
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            self._thread = OwnThread("polycephaly-asyncio", lambda: self._run(loop))
            self._thread.start()
        return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        with asyncio.Runner(loop_factory=lambda: loop):  # ends the loop as `asyncio.run` does
            # A task that raises one of these has it as its error, and asyncio raises it here, too.
            # Not `while True`: in the turn of `loop.stop`, that would forget the stop.
            while self._loop is loop:
                with suppress(SystemExit, KeyboardInterrupt):
                    loop.run_forever()

    def close(self) -> None:
        """Stop the loop and cancel its tasks. The next `aio` makes a new loop."""
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def reset_after_fork(self) -> None:
        self._loop = self._thread = None


_loop = _Loop()
close_loop = _loop.close
atexit.register(close_loop)
os.register_at_fork(after_in_child=_loop.reset_after_fork)


@overload
def aio(
    awaitable: Callable[P, Coroutine[Any, Any, T]], /
) -> Callable[P, Coroutine[Any, Any, T]]: ...
@overload
def aio(awaitable: Awaitable[T], /) -> Coroutine[Any, Any, T]: ...


@parks
def aio(awaitable: Any, /) -> Any:
    """Await an asyncio awaitable, or run an asyncio coroutine function, on the asyncio loop of this
    process.

    Parameters
    ----------
    awaitable
        For instance a coroutine of ``httpx.AsyncClient``; or a coroutine function of asyncio code,
        also as a decorator.

    Returns
    -------
    object
        To be awaited: the value of the awaitable. An error of the awaitable is raised there. For a
        coroutine function, one with the same parameters that green threads and pools can run. Each
        of its calls runs on the asyncio loop of the process, in a pool that of the drone.

    Raises
    ------
    TypeError
        If `awaitable` is neither.
    RuntimeError
        From the await, if the caller is not a green thread.

    Notes
    -----
    The awaitable runs on another native thread, beside the green threads. If the calling green
    thread is cancelled, it cancels the awaitable and waits for its end.

    Examples
    --------
    >>> import asyncio
    >>> from polycephaly import green
    >>> async def main():
    ...     return await green.aio(asyncio.sleep(0.01, "slept"))
    >>> green.run(main)
    'slept'
    >>> @green.aio
    ... async def sleep_and_double(n):
    ...     await asyncio.sleep(0.01)
    ...     return 2 * n
    >>> green.map(sleep_and_double, range(3))
    [0, 2, 4]
    """
    if inspect.isawaitable(awaitable):
        return _await_on_loop(awaitable)
    fn = awaitable
    if not is_coroutine_function(fn):
        raise TypeError(
            "green.aio takes an asyncio awaitable, such as a coroutine, or a coroutine function, "
            f"not {brief(fn)}"
        )

    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await _await_on_loop(fn(*args, **kwargs))

    return call


@coroutine
def _await_on_loop(awaitable: Awaitable[T]) -> Generator[Any, Any, T]:
    if get_ident() != scheduler.owner:
        if isinstance(awaitable, Coroutine):
            awaitable.close()
        raise outside_error("green.aio", "a plain `await`")
    loop, wake = _loop.get(), Wake()
    tasks: list[asyncio.Task[T]] = []

    async def run() -> T:
        return await awaitable

    def start_task() -> None:
        task = loop.create_task(awaitable if asyncio.iscoroutine(awaitable) else run())
        tasks.append(task)
        task.add_done_callback(wake)

    def cancel_task() -> None:
        for task in tasks:  # none any more if it has ended meanwhile
            task.cancel()

    loop.call_soon_threadsafe(start_task)
    scheduler.external_waits += 1
    interruptions: list[BaseException] = []
    try:
        while not (tasks and tasks[0].done()):
            try:
                yield PARK
            except GeneratorExit:
                raise
            except BaseException as error:
                interruptions.append(error)
                loop.call_soon_threadsafe(cancel_task)
    finally:
        wake.thread = None
        scheduler.external_waits -= 1
    task = tasks.pop()
    first = interruptions.pop(0) if interruptions and task.cancelled() else None
    # All other interruptions are raised at later awaits, after this one has its value or error.
    while interruptions:
        scheduler.current.interrupt(interruptions.pop(0))
    try:
        if first is not None:
            raise first
        return task.result()
    finally:
        del task, first  # no cycle through the error's traceback
