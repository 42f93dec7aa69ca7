"""`Pool` under the name and with the arguments of the standard library's `ProcessPoolExecutor`, for its own tests.

It also has the few private attributes that those tests reach into, where they stand for something that a pool has:
which processes there are, how many there may be, whether it is broken.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

import polycephaly as poly
from polycephaly.drone import Drone


class ProcessPoolExecutor(poly.Pool):
    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: BaseContext | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
    ) -> None:
        super().__init__(
            max_workers,
            start=mp_context.get_start_method() if mp_context else None,
            initializer=initializer,
            initargs=initargs,
            max_tasks=max_tasks_per_child,
            on_death="break",
        )
        self._max_workers = self._crew.plan.size

    @property
    def _processes(self) -> dict[int, Process]:
        return {drone.pid: Process(drone) for drone in self.drones}

    @property
    def _broken(self) -> bool:
        return self._crew._broken is not None


class Process:
    def __init__(self, drone: Drone) -> None:
        self.drone = drone

    def terminate(self) -> None:
        os.kill(self.drone.pid, signal.SIGTERM)

    def join(self) -> None:
        self.drone._link.ended.result()
