"""Bound green threads, which stay on one native thread: for objects that belong to the native
thread that made them.

    owner ──step──> own native thread ──PARK──> owner      the owner waits: one step at a time
                    own native thread <──green.call──      the owner continues with other threads

Each step costs two switches of native threads, about 50 us.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable
from contextvars import copy_context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ..runtime import forked
from .scheduler import Driver, InContext, StandIn, scheduler
from .thread import GreenThread

if TYPE_CHECKING:
    from .group import Group

__all__ = ["BoundThread"]


class BoundThread(GreenThread[Any]):
    """A green thread whose steps and foreign calls run on one native thread."""

    __slots__ = ("_own",)

    def __init__(self, coro: Any, group: Group | None = None) -> None:
        if not isinstance(coro, InContext):
            coro = InContext(coro, copy_context())
        self._own = _OwnThread(coro)
        super().__init__(self._own, group)

    def _send_away(self, job: Callable[[], None]) -> None:
        self._own.jobs.put(job)

    def _end(self, state: str, value: Any, error: BaseException | None) -> None:
        self._own.jobs.put(None)
        super()._end(state, value, error)


class _OwnThread(StandIn):
    """A wrapper of a coroutine that runs each step on a native thread of its own."""

    __slots__ = ("jobs",)

    def __init__(self, coro: Any) -> None:
        self.coro = coro
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        if not scheduler.workers.start_urgently(self._serve):
            raise RuntimeError(
                "a bound green thread needs a native thread of its own, and none can be started"
            )

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            del job

    def send(self, value: Any) -> Any:
        return self._step(self.coro.send, value)

    def throw(self, error: BaseException) -> Any:
        return self._step(self.coro.throw, error)

    def _step(self, step: Callable[[Any], Any], arg: Any) -> Any:
        over = allocate_lock()
        over.acquire()
        outcome: list[Any] = []
        owner, driver = scheduler.owner, scheduler.driver

        def job() -> None:
            mine = Driver()
            scheduler.drivers[mine.ident] = mine
            scheduler.owner, scheduler.driver = mine.ident, mine
            generation = forked.generation
            try:
                outcome[:] = step(arg), None
            except BaseException as error:
                outcome[:] = None, error
            forked.leave_if_forked(
                generation, None if isinstance(outcome[1], StopIteration) else outcome[1]
            )
            del scheduler.drivers[mine.ident]
            scheduler.owner, scheduler.driver = owner, driver
            over.release()

        self.jobs.put(job)
        over.acquire()
        try:
            if outcome[1] is not None:
                raise outcome[1]
            return outcome[0]
        finally:
            outcome.clear()  # no cycle through the error's traceback
