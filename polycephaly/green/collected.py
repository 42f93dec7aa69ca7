"""The parts that `map` and `par` with and without a pool share (mapping.py, over.py)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NoReturn

from ..runtime.coroutines import is_awaitable, is_coroutine_function
from ..runtime.progress import Progress
from .call import call_long
from .group import Group
from .scheduler import scheduler
from .spawning import spawn
from .thread import qualname


class Collected:
    """The base class of `map`'s results where the caller cannot block: awaited for a list of all
    values, or iterated with ``async for``; once.
    """

    def __init__(
        self, fn: Callable[[Any], Any], items: Iterable[Any], width: int, progress: Progress | None
    ) -> None:
        self._fn = fn
        self._items = items
        self._width = width
        self._progress = progress
        self._has_begun = False

    def _begin(self) -> None:
        """Raise `RuntimeError` for a second consumer, which would get only a part of the values."""
        if self._has_begun:
            raise RuntimeError(f"{self!r} was read before: call green.map again, or await its list")
        self._has_begun = True

    def _place_of(self, index: int) -> str:
        return f"green.map({qualname(self._fn)}, ...), item {index}"

    def __await__(self) -> Generator[Any, Any, list[Any]]:
        if scheduler.in_step():
            return self.collect().__await__()
        return spawn(self.collect).__await__()

    async def collect(self) -> list[Any]:
        raise NotImplementedError

    def __iter__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} is not a list: green.map was called in a coroutine, or below asyncio, such "
            "as in a notebook's cell. Use `await green.map(...)`, or `async for`; for a plain "
            "function that calls green.map, use `await green.spawn(fn, ...)`"
        )

    def __repr__(self) -> str:
        return f"<green.map of {qualname(self._fn)}, to be awaited>"


async def run_all(fns: Sequence[Any]) -> list[Any]:
    async with Group() as group:
        threads = [group.spawn(fn) for fn in fns]
    return [thread.value for thread in threads]


async def run_workers(work: Callable[[], Any], width: int, name: str | None = None) -> None:
    """Run `work` in `width` green threads. The first error ends the others and is raised."""
    try:
        async with Group() as group:
            for _ in range(width):
                group.spawn(work, name=name)
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return
    try:
        raise first  # not in the `except`, where the error would get another context or cause
    finally:
        del first  # in a cycle with the error's traceback


def awaiting(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `fn` if it is a coroutine function, else one that makes foreign calls of `fn`."""

    async def call(item: Any) -> Any:
        value = await call_long(fn, item)
        return await value if is_awaitable(value) else value

    return fn if is_coroutine_function(fn) else call
