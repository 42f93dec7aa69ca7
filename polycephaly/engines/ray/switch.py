"""The switch: an actor that passes messages between driver and drones whose main thread is busy.

    driver ── order ──> one queue for each drone ── orders ──> control thread of that drone
    driver <── reports ── one bounded queue <── reports ── control threads

An actor that runs a task takes no other call, and Ray offers no calls of a driver. So both sides
call the switch and wait there. Other messages go by calls of the drones' actors and the answers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

MAX_WAITING_REPORTS = 64
"""Reports that may wait for the driver. If there are more, `put_report` waits."""


class Switch:
    """The class of the switch's actor."""

    def __init__(self) -> None:
        self._orders: dict[int, asyncio.Queue[list[bytes]]] = defaultdict(asyncio.Queue)
        self._forgotten: set[int] = set()  # drone numbers, which are never reused
        self._reports: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(MAX_WAITING_REPORTS)

    async def put_order(self, drone: int, frames: list[bytes]) -> None:
        if drone not in self._forgotten:
            self._orders[drone].put_nowait(frames)

    async def get_orders(self, drone: int) -> list[list[bytes]]:
        """Wait for messages to `drone`, and return them.

        An empty list means that the drone is forgotten and must not ask again.
        """
        if drone in self._forgotten:
            return []
        queue = self._orders[drone]
        received = [await queue.get()]
        while not queue.empty():
            received.append(queue.get_nowait())
        return [frames for frames in received if frames]

    async def put_report(self, drone: int, report: Any) -> None:
        await self._reports.put((drone, report))

    async def get_reports(self) -> list[tuple[int, Any]]:
        """Wait for reports, and return them to the driver."""
        received = [await self._reports.get()]
        while not self._reports.empty():
            received.append(self._reports.get_nowait())
        return received

    async def forget(self, drone: int) -> None:
        """End the wait of a dead drone's `get_orders` call.

        Such a call would wait for ever, and an actor has room for a limited number of calls.
        """
        self._forgotten.add(drone)
        queue = self._orders.pop(drone, None)
        if queue is not None:
            queue.put_nowait([])
