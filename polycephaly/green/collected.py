"""What is iterated with ``async for``, or awaited for a list of all."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from .scheduler import scheduler
from .thread import spawn

__all__ = ["Collected"]


class Collected:
    def __await__(self) -> Generator[Any, Any, list[Any]]:
        if scheduler.in_step():
            return self.collect().__await__()
        return spawn(self.collect).__await__()

    async def collect(self) -> list[Any]:
        raise NotImplementedError
