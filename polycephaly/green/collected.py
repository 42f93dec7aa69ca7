"""The base class of `map`'s results where the caller cannot block: awaited for a list of all
values, or iterated with ``async for``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NoReturn

from .scheduler import scheduler
from .thread import spawn

__all__ = ["Collected"]


class Collected:
    _fn: Callable[..., Any]

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
        return f"<green.map of {getattr(self._fn, '__qualname__', self._fn)}, to be awaited>"
