"""`par` and `map`: many green threads at once, from plain code and from green code alike.

    items ──next()──> width workers ──> results, in the order of the items

In plain code they wait, and give a list. In a coroutine, and in asyncio code, they give something
to await."""

from __future__ import annotations

import sys
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
)
from concurrent.futures import CancelledError
from operator import length_hint
from time import monotonic
from typing import Any, Generic, TypeVar, overload

from ..errors import ChannelClosed
from ..pool.progress import Progress, total_of
from ..promises.promise import Promise
from ..runtime.coroutines import is_awaitable, is_coroutine_function
from ..timeline.trail import SHORTEST, trail
from .call import call_long
from .channel import Channel
from .collected import Collected
from .group import Group
from .over import Spread, par_over
from .run import run
from .scheduler import scheduler
from .thread import GreenThread, spawn

__all__ = ["Mapped", "map", "par"]

T = TypeVar("T")
U = TypeVar("U")


class ListOrAwaitable(list[T], Awaitable[list[T]], AsyncIterable[T]):
    """For type checkers, which cannot tell where they are called: what `map` and `par` give. In
    plain code that is a list; in a coroutine it is to be awaited, which gives the list, or, if of
    `map`, iterated with ``async for``."""


AHEAD = 2  # results that may wait to be asked for, for each worker


@overload
def par(*fns: Callable[[], Awaitable[T]] | Coroutine[Any, Any, T]) -> ListOrAwaitable[T]: ...
@overload
def par(*fns: Callable[[], T]) -> ListOrAwaitable[T]: ...
@overload
def par(*fns: Any, over: Any = None) -> ListOrAwaitable[Any]: ...


def par(*fns: Any, over: Any = None) -> Any:
    """Runs all of `fns` as green threads, until the last has ended; a list of their values, in
    order. (ProcessJ's par.)

    They are coroutine functions, plain functions, or coroutines. The first error cancels the
    others; all are raised in an `ExceptionGroup`. In a coroutine, asyncio's too: ``await
    green.par(...)``; in plain code it waits by itself.

    With ``over=pool`` they are spread over the pool's drones, those next to each other in one drone
    where that is possible. Then they must be functions (`partial` for their arguments). Channels
    connect them as ever.

    >>> from polycephaly import green
    >>> async def one(): return 1
    >>> green.par(one, lambda: 2)
    [1, 2]
    """
    if over is not None:
        return _as_fits(lambda: par_over(fns, over))
    return _as_fits(lambda: _par(fns))


async def _par(fns: tuple[Any, ...]) -> list[Any]:
    async with Group() as group:
        threads = [group.spawn(fn) for fn in fns]
    return [thread.value for thread in threads]


@overload
def map(
    fn: Callable[[T], Awaitable[U]],
    items: Iterable[T],
    width: int = 13,
    *,
    progress: bool = False,
    over: Any = None,
) -> ListOrAwaitable[U]: ...
@overload
def map(
    fn: Callable[[T], U],
    items: Iterable[T],
    width: int = 13,
    *,
    progress: bool = False,
    over: Any = None,
) -> ListOrAwaitable[U]: ...


def map(
    fn: Callable[[T], Any],
    items: Iterable[T],
    width: int = 13,
    *,
    progress: bool = False,
    over: Any = None,
) -> Any:
    """``fn(item)`` for all items, by `width` green threads that drain them; the values in the order
    of the items.

    `fn` is a coroutine function, or a plain function, which is run on native threads. In plain code
    this waits, and gives a list. In a coroutine, ``await`` gives the list, and ``async for`` gives
    the values one by one as they are there, with at most some two for each thread waiting to be
    asked for. The first error cancels the rest and is raised. With `progress` a bar on stderr shows
    how many are done. Raises `ValueError` for a width below 1.

    With ``over=pool`` the green threads are in the drones of that pool, `width` in each; whichever
    is free takes the next item.

    >>> from polycephaly import green
    >>> green.map(lambda n: n * n, range(5), width=2)
    [0, 1, 4, 9, 16]
    """
    if isinstance(width, bool) or not isinstance(width, int):
        raise TypeError(f"the width is a number of green threads, not {width!r}")
    if width < 1:
        raise ValueError(f"nothing can be done by {width} green threads; 1 is the least")
    if not callable(fn):
        raise TypeError(f"map takes a function, not {fn!r}")
    shown = Progress(_name(fn), total_of([items])) if progress else None
    if over is not None:
        spread = Spread(fn, items, width, over, shown)
        return spread if _in_coroutine() else run(spread.collect)
    mapped = Mapped(fn, iter(items), min(width, max(1, length_hint(items, width))), shown)
    return mapped if _in_coroutine() else run(mapped.collect)


def _as_fits(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """In plain code, runs the coroutine; in a coroutine, gives it; in asyncio code, one that has it
    run."""
    if scheduler.in_step():
        return make()
    return _spawned(make) if _in_asyncio() else run(make())


async def _spawned(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return await spawn(make())


def _in_coroutine() -> bool:
    return scheduler.in_step() or _in_asyncio()


def _in_asyncio() -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


class Mapped(Collected, Generic[T]):
    """What `map` gives in a coroutine: to be awaited, or iterated with ``async for``; once."""

    def __init__(
        self, fn: Callable[[T], Any], items: Iterator[T], width: int, progress: Progress | None
    ) -> None:
        self._fn = fn
        self._items = items
        self._width = width
        self._progress = progress

    async def collect(self) -> list[Any]:
        places: list[list[Any]] = []
        scheduler.current._since = None  # it is none of the user's threads

        async def task() -> None:
            apply, awaits = applier(self._fn, self._progress)
            thread = scheduler.current
            trail.number_of(thread)  # in the order of their beginning
            for item in self._items:
                place: list[Any] = []
                places.append(place)
                began = monotonic()
                try:
                    place.append(await apply(item))
                finally:
                    if awaits and monotonic() - began >= SHORTEST:
                        trail.called(thread, self._fn, (item,), began, not place)

        try:
            async with Group() as group:
                for _ in range(self._width):
                    group.spawn(task, name=f"map {_name(self._fn)}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if self._progress is not None:
                self._progress.close()
        if not all(places):
            raise CancelledError(f"a call of {_name(self._fn)} was cancelled")
        return [place[0] for place in places]

    def __aiter__(self) -> AsyncIterator[Any]:
        return _Values(_Drain(self._fn, self._items, self._width, self._progress))


class _Place(Promise[Any]):
    from_outside = False


class _Drain(Generic[T]):
    """The workers behind an ``async for``: each takes an item, and leaves a place for its value in
    the channel."""

    def __init__(
        self, fn: Callable[[T], Any], items: Iterator[T], width: int, progress: Progress | None
    ) -> None:
        self._items = items
        self._fn = fn
        self._progress = progress
        self.places: Channel[_Place] = Channel(width * AHEAD)
        self._busy = width
        name = f"map {getattr(fn, '__qualname__', fn)}"
        self.workers: list[GreenThread[Any]] = [spawn(self._task, name=name) for _ in range(width)]

    async def _task(self) -> None:
        apply, awaits = applier(self._fn, self._progress)
        thread = scheduler.current
        trail.number_of(thread)
        try:
            for item in self._items:
                place = _Place()
                await self.places.send(
                    place
                )  # in the step that took the item: so places are in the items' order
                began = monotonic()
                try:
                    place.set_result(await apply(item))
                    if awaits and monotonic() - began >= SHORTEST:
                        trail.called(thread, self._fn, (item,), began)
                except BaseException as error:
                    place.set_exception(error)
                    if not isinstance(error, Exception):
                        raise
        except BaseException as error:  # of the items themselves
            if isinstance(error, Exception):
                place = _Place()
                place.set_exception(error)
                await self.places.send(place)
            else:
                raise
        finally:
            self._busy -= 1
            if not self._busy:
                self.places.close()
                if self._progress is not None:
                    self._progress.close()

    def stop(self) -> None:
        for worker in self.workers:
            worker.cancel()


class _Values(AsyncIterator[Any]):
    """The reader's end. When it is dropped, or an error was raised, the workers end."""

    def __init__(self, drain: _Drain[Any]) -> None:
        self._drain = drain

    async def __anext__(self) -> Any:
        try:
            place = await self._drain.places.receive()
        except ChannelClosed:
            raise StopAsyncIteration from None
        try:
            return await place
        except BaseException:
            self._drain.stop()
            raise

    def __del__(self) -> None:
        self._drain.stop()


def applier(
    fn: Callable[[Any], Any], progress: Progress | None
) -> tuple[Callable[[Any], Any], bool]:
    """How it is applied, and whether it is a coroutine function: foreign calls are on the trail
    already."""

    async def call(item: Any) -> Any:
        value = await call_long(fn, item)
        return await value if is_awaitable(value) else value

    awaits = is_coroutine_function(fn)
    apply = fn if awaits else call
    if progress is None:
        return apply, awaits

    async def counted(item: Any) -> Any:
        try:
            return await apply(item)
        finally:
            progress.step()

    return counted, awaits


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
