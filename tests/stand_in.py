"""`Pool` under the name and with the arguments of the standard library's `ProcessPoolExecutor`, for
its own tests.

It also has those of the private attributes which these tests look at that stand for something a
pool has."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import BaseContext
from typing import Any

import polycephaly as poly
from polycephaly.pool.drone import Drone
from polycephaly.wire.output import Line


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
            output=as_it_is,
            on_death="break",
        )

    @property
    def _processes(self) -> dict[int, Process]:
        return {drone.pid: Process(drone) for drone in self.drones}

    @property
    def _executor_manager_thread(self) -> threading.Thread:
        return self._dispatcher.reactor.thread

    @property
    def _broken(self) -> bool:
        return self._dispatcher.state.broken is not None


class Process:
    def __init__(self, drone: Drone) -> None:
        self._drone = drone

    def terminate(self) -> None:
        os.kill(self._drone.pid, signal.SIGKILL)  # after SIGTERM, a drone finishes its call

    kill = terminate

    def is_alive(self) -> bool:
        return not self._drone._handle.ended.done()

    def join(self, timeout: float | None = None) -> None:
        with suppress(TimeoutError):
            self._drone._handle.ended.result(timeout)


def as_it_is(line: Line) -> None:
    print(line.text, file=getattr(sys, line.stream), flush=True)
