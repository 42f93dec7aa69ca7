"""The switch: an actor through which drones and the driver talk while a drone's main thread is
busy.

    driver ── order ──> one queue for each drone ── orders ──> its ear
    driver <── news ── one queue, with room for a few <── tell ── ears

An actor that runs work hears nothing, and Ray lets nobody call a driver: so both ask here, and
wait. What is neither order nor report of a running task goes by calls and answers of the drones
themselves."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

__all__ = ["Switch"]

ROOM = 64
"""Reports that wait for the driver, before those who bring more are made to wait."""
MOST = 256
"""Calls that may wait here at a time: an actor's limit, for each drone two and some."""


class Switch:
    """Runs in an actor of its own."""

    def __init__(self) -> None:
        self._orders: dict[int, asyncio.Queue[list[bytes]]] = defaultdict(asyncio.Queue)
        self._forgotten: set[int] = set()  # each number is one drone's for ever
        self._news: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(ROOM)

    async def order(self, drone: int, frames: list[bytes]) -> None:
        if drone not in self._forgotten:
            self._orders[drone].put_nowait(frames)

    async def orders(self, drone: int) -> list[list[bytes]]:
        """What there is for that drone; waits for something. Nothing: it is forgotten, and asks no
        more."""
        if drone in self._forgotten:
            return []
        queue = self._orders[drone]
        taken = [await queue.get()]
        while not queue.empty():
            taken.append(queue.get_nowait())
        return [frames for frames in taken if frames]

    async def tell(self, drone: int, report: Any) -> None:
        await self._news.put((drone, report))

    async def news(self) -> list[tuple[int, Any]]:
        """For the driver; waits for something."""
        taken = [await self._news.get()]
        while not self._news.empty():
            taken.append(self._news.get_nowait())
        return taken

    async def forget(self, drone: int) -> None:
        """Who waits for its orders would wait for ever, and an actor has room for so many calls
        only."""
        self._forgotten.add(drone)
        queue = self._orders.pop(drone, None)
        if queue is not None:
            queue.put_nowait([])
