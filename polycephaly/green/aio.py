"""asyncio code for green threads: the image has one asyncio loop, on a native thread of its own,
made when first used.

green thread ──await aio(coro)──> a task on the loop ──value or error──> green thread
                cancelled ──────> the task is cancelled, and its end is waited for
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
from _thread import get_ident
from collections.abc import Awaitable, Generator
from types import coroutine
from typing import Any, TypeVar

from ..runtime.fork_guard import OwnThread
from .scheduler import PARK, scheduler
from .thread import Wake, outside

__all__ = ["aio", "close_loop"]

T = TypeVar("T")


class _Loop:
    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: OwnThread | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        """By the scheduler's owner."""
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            self._thread = OwnThread("polycephaly-asyncio", lambda: self._run(loop))
            self._thread.start()
        return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    def close(self) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def forget(self) -> None:
        self._loop = self._thread = None


_loop = _Loop()
atexit.register(_loop.close)
os.register_at_fork(after_in_child=_loop.forget)


def close_loop() -> None:
    """Ends the image's asyncio loop, and what runs on it; the next `aio` makes a new one."""
    _loop.close()


@coroutine
def aio(awaitable: Awaitable[T], /) -> Generator[Any, Any, T]:
    """Awaits something of asyncio's (a coroutine, say of ``httpx.AsyncClient``) on the image's
    asyncio loop.

    It runs beside the green threads, on another native thread. A green thread that is cancelled
    meanwhile cancels it, and waits for its end. Raises `TypeError` for what cannot be awaited.

    >>> import asyncio
    >>> from polycephaly import green
    >>> async def main():
    ...     return await green.aio(asyncio.sleep(0.01, "slept"))
    >>> green.run(main)
    'slept'
    """
    if not inspect.isawaitable(awaitable):
        raise TypeError(
            f"green.aio takes something that asyncio can await, such as a coroutine, not {awaitable!r}"
        )
    if get_ident() != scheduler.owner:
        raise outside("green.aio", "await itself")
    loop, wake = _loop.get(), Wake()
    tasks: list[asyncio.Task[T]] = []

    async def run() -> T:
        return await awaitable

    def begin() -> None:
        task = loop.create_task(awaitable if asyncio.iscoroutine(awaitable) else run())
        tasks.append(task)
        task.add_done_callback(wake)

    loop.call_soon_threadsafe(begin)
    scheduler.outside += 1
    interruptions: list[BaseException] = []
    try:
        while not (tasks and tasks[0].done()):
            try:
                yield PARK
            except GeneratorExit:
                raise
            except BaseException as error:
                interruptions.append(error)
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
    finally:
        wake.thread = None
        scheduler.outside -= 1
    task = tasks[0]
    first = interruptions.pop(0) if interruptions and task.cancelled() else None
    for late in interruptions:  # it had ended before: its value first
        scheduler.current._interrupt(late)
    if first is not None:
        raise first
    return task.result()
