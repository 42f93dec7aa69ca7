"""`Pool`: several drones behind one queue; a `concurrent.futures.Executor` too."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from ..store.shared import Shared
from ..timeline import Timeline
from ..timeline.taking import take
from ..wire.output import Line
from .base import ExecutorBase
from .config import (
    PoolConfig,
    TaskOptions,
    check_at_least,
    check_cwd,
    check_env,
    check_hang_timeout,
    check_initializer,
    check_memory,
    check_output,
    check_report_waiting,
    check_start,
    check_timeout,
)
from .current import entered, left
from .dispatcher import Dispatcher
from .drone import Drone
from .drone_handle import State
from .engine import machine
from .map_source import Source

__all__ = ["Pool"]

T = TypeVar("T")

_names = itertools.count(1)


class Pool(ExecutorBase):
    """``drones`` headless copies of this image behind one queue (by default as many as usable
    cores).

    All are of one snapshot of the image, taken now; `refresh` takes a new one. See `Drone` for
    `start`, `env` (here also a callable from a drone's index to its mapping), `cwd`, `initializer`
    and `timeout`. Further:

    ``width``
        how many coroutine functions a drone runs at once, as green threads; everything else is done one by one
    ``output``
        "forward" (drones' lines go to this process's streams, prefixed), "discard", or a callable that is given each
        line (a `str` with attributes ``text``, ``drone``, ``stream`` and ``tag``). What drones log is no output: it
        goes to this process's loggers, each record with its ``drone``
    ``retries``
        how often work is run again whose drone died while running it
    ``max_tasks``
        a drone is replaced after so many pieces of work
    ``max_memory``
        bytes that a drone and what it started may hold for themselves. A drone that comes near is replaced between
        two pieces of work; one that holds more is killed
    ``max_queued``
        how many pieces of work may wait for a drone: a call that gives one more waits for room. (Threads that find
        room at the same moment may each give one.)
    ``hang_timeout``
        a drone that shows no sign of life for so many seconds, although it should work, is killed; one that computes
        or sleeps is alive. See `Drone.unresponsive`
    ``report_waiting``
        seconds of one wait without processor time after which a drone with work is reported: a wait and a hang look
        alike, so it is not killed. None: never. See `Drone.waiting`
    ``on_death``
        "replace" the drone, or "break" the pool, as the standard library's executor does
    ``engine``
        "local", or "ray": drones are Ray actors, with copies of what `__main__` holds, on any node of the cluster at
        ``address`` (Ray's own meaning: "auto", "HOST:PORT", or None). Then ``num_cpus``, ``num_gpus``, ``resources``,
        ``memory``, ``runtime_env``, ``scheduling_strategy`` and the like are given to Ray with each drone

    A ``with`` block ends by finishing what was submitted; an exception in it cancels the rest. An
    ``async with`` block, in asyncio or in green threads, does so too and holds up nobody else while
    it waits. A pool to which no reference is left finishes its work and ends. All methods may be
    called from any thread.

    Raises `ValueError` for numbers and names that make no sense and for resources that the cluster
    has not, `OSError` where the machine's limits do not allow so many drones (those already started
    are ended then) or no cluster is reached, and `ImportError` for an engine that is not installed.

    >>> import polycephaly as poly
    >>> with poly.Pool(2) as pool:
    ...     list(pool.map(abs, [-1, -2, -3]))
    [1, 2, 3]
    """

    def __init__(
        self,
        drones: int | None = None,
        *,
        width: int = 1,
        name: str | None = None,
        start: str | None = None,
        env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        output: str | Callable[[Line], object] = "forward",
        retries: int = 0,
        timeout: float | None = None,
        hang_timeout: float | None = None,
        report_waiting: float | None = 60.0,
        max_tasks: int | None = None,
        max_memory: int | None = None,
        max_queued: int | None = None,
        on_death: str = "replace",
        engine: str = "local",
        **options: Any,
    ) -> None:
        where = machine(engine, options)
        size = check_at_least("drones", where.usual() if drones is None else drones, 1)
        name = name or f"pool-{next(_names)}"
        if on_death not in ("replace", "break"):
            raise ValueError(f"on_death is 'replace' or 'break', not {on_death!r}")
        config = PoolConfig(
            size=size,
            name=name,
            drone_name=lambda index: f"{name}.{index}",
            start=check_start(start),
            env=check_env(env, size),
            cwd=check_cwd(cwd),
            initializer=check_initializer(initializer),
            initargs=tuple(initargs),
            output=check_output(output),
            width=check_at_least("width", width, 1),
            task_options=TaskOptions(check_timeout(timeout), check_at_least("retries", retries, 0)),
            max_tasks=None if max_tasks is None else check_at_least("max_tasks", max_tasks, 1),
            max_memory=check_memory(max_memory),
            max_queued=None if max_queued is None else check_at_least("max_queued", max_queued, 1),
            hang_timeout=check_hang_timeout(hang_timeout),
            report_waiting=check_report_waiting(report_waiting),
            machine=where,
            on_death=on_death,
        )
        self._dispatcher = Dispatcher(config)
        self._dispatcher.close_without(self)
        try:
            self._dispatcher.begun.result()
        except BaseException:
            self._dispatcher.kill()
            self._dispatcher.wait_ended()
            raise

    # -- work --------------------------------------------------------------------------------------

    def _source(self, fn: Callable[..., Any], iterables: tuple[Iterable[Any], ...]) -> Source:
        return Source(
            self._dispatcher, self._task_options or self._dispatcher.task_options, fn, iterables
        )

    def share(self, obj: T) -> Shared[T]:
        """Puts `obj` into shared memory, once: the handle stands for it in any number of calls; see
        `Shared`.

        Raises what the pickling of `obj` raises, and `MemoryError` where it would be more than the
        pool may share: half of the machine's memory, results and arguments on their way included.

        >>> import polycephaly as poly
        >>> with poly.Pool(2) as pool:
        ...     table = pool.share({"a": 1})
        ...     pool.doit(lambda t: t["a"], table)
        1
        """
        self._dispatcher.check_open()
        shared: Shared[T] = self._dispatcher.supervisor.engine.share(obj)
        return shared

    # -- the pool itself ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """As given, or ``pool-N``; its drones are called after it."""
        return self._dispatcher.config.name

    @property
    def drones(self) -> list[Drone]:
        """Its drones at this moment; work given to one of them is run by that one."""
        now = [handle for handle in list(self._dispatcher.handles) if handle.state < State.RETIRING]
        return [Drone._of(self._dispatcher, handle, self._task_options) for handle in now]

    @property
    def timeline(self) -> Timeline:
        """What its drones have done so far, and when; also after its end. See `Timeline`."""
        return take(self._dispatcher)

    def _drones(self) -> list[Drone]:
        return self.drones

    def refresh(self) -> None:
        """Takes a new snapshot of this image and replaces the drones by new ones forked from it.

        Work that runs is finished by the old drones; what waits is done by the new ones. What the
        old ones had in their namespaces beyond the snapshot is gone."""
        self._dispatcher.refresh()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more work, finishes what there is, and ends; waits for that unless told not to.

        With `cancel_futures`, work that no drone has begun is cancelled. Doing so twice is no
        error."""
        self._dispatcher.close(cancel=cancel_futures)
        if wait:
            self._dispatcher.finish()

    def __enter__(self) -> Self:
        entered(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        left(self)
        self._dispatcher.finish(cancel=kind is not None)

    async def __aenter__(self) -> Self:
        entered(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        left(self)
        await self._dispatcher.finish_async(cancel=kind is not None)

    def __repr__(self) -> str:
        dispatcher = self._dispatcher
        if dispatcher.over:
            return f"<Pool {dispatcher.config.name}, ended>"
        busy = sum(bool(handle.in_flight) for handle in dispatcher.handles)
        drones, pending = len(dispatcher.handles), dispatcher.pending()
        return f"<Pool {dispatcher.config.name}: {drones} drones, {busy} busy, {pending} pieces of work>"

    def _repr_html_(self) -> str:
        from ..integrations.html import pool_table

        return pool_table(self)
