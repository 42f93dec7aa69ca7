"""Bound green threads, which stay on one native thread: for objects that belong to the native
thread that made them.

    owner ──step──> own native thread ──PARK──> owner      the owner waits: one step at a time
                    own native thread <──green.call──      the owner continues with other threads

Each step costs two switches of native threads, about 50 us.
"""

from __future__ import annotations

import sys
from _thread import LockType, allocate_lock
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..runtime import forked
from .native import tracing_hooks
from .scheduler import CoroutineWrapper, Driver, InContext, scheduler
from .thread import GreenThread


class BoundThread(GreenThread[Any]):
    """A green thread whose steps and foreign calls run on one native thread."""

    __slots__ = ("_own",)

    def __init__(self, coro: Any, group: Any = None) -> None:
        if not isinstance(coro, InContext):
            coro = InContext(coro, copy_context())
        self._own = _OwnThread(coro)
        super().__init__(self._own, group)

    def _submit_job(self, job: Callable[[], None]) -> None:
        self._own.jobs.put(job)

    def _end(self, state: str, value: Any, error: BaseException | None) -> None:
        self._own.jobs.put(None)
        super()._end(state, value, error)


class _OwnThread(CoroutineWrapper):
    """A wrapper of a coroutine that runs each step on a native thread of its own."""

    __slots__ = ("jobs",)

    def __init__(self, coro: Any) -> None:
        self.coro = coro
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        if not scheduler.workers.start_urgently(self._serve):
            raise RuntimeError(
                "a bound green thread needs its own native thread, and none can be started"
            )

    def _serve(self) -> None:
        sys.set_asyncgen_hooks(finalizer=scheduler.on_generator_dropped)
        while (job := self.jobs.get()) is not None:
            tracing_hooks.follow()
            job()
            del job
        sys.set_asyncgen_hooks(finalizer=None)

    def send(self, value: Any) -> Any:
        return self._step(self.coro.send, value)

    def throw(self, error: BaseException) -> Any:
        try:
            return self._step(self.coro.throw, error)
        finally:
            del error  # no cycle through its traceback

    def _step(self, step: Callable[[Any], Any], arg: Any) -> Any:
        finished = allocate_lock()
        finished.acquire()
        outcome: list[Any] = []
        self.jobs.put(partial(_run_step, step, arg, outcome, finished))
        finished.acquire()
        try:
            if outcome[1] is not None:
                raise outcome[1]
            return outcome[0]
        finally:
            outcome.clear()  # no cycle through the traceback of the error, or of one in `arg`
            del step, arg


def _run_step(step: Callable[[Any], Any], arg: Any, outcome: list[Any], finished: LockType) -> None:
    owner, driver = scheduler.owner, scheduler.driver
    own_driver = Driver()
    scheduler.drivers[own_driver.ident] = own_driver
    scheduler.owner, scheduler.driver = own_driver.ident, own_driver
    generation = forked.generation
    try:
        outcome[:] = step(arg), None
    except BaseException as error:
        outcome[:] = None, error
    forked.exit_if_forked(generation, None if isinstance(outcome[1], StopIteration) else outcome[1])
    del scheduler.drivers[own_driver.ident]
    scheduler.owner, scheduler.driver = owner, driver
    finished.release()
    del step, arg  # no cycle: the frames of the coroutine lead back to this one
