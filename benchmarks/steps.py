"""Where the time of a task goes: python -m benchmarks.steps [--runs N]

A burst of no-ops is submitted and gathered again and again, and a map of no-ops is run; the steps
are measured in processor time of the thread that takes them, in bulk, so that the clock costs
little. Two cores give a bound: the controller's steps and the drones' overlap, and whichever is
longer is what the burst takes."""

from __future__ import annotations

import gc
import math
import os
import resource
import statistics
import time
from _thread import get_ident
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import click

import polycephaly as poly
from polycephaly.engines.local import handle as local_handle
from polycephaly.engines.local.handle import LocalHandle
from polycephaly.pool import dispatcher as dispatchers
from polycephaly.pool import drone_handle, handlers

TASKS = 20_000
CALLS = 100_000
DRONES = 2


def noop(x: int) -> int:
    return x


class Clock:
    """Adds up the processor time of some functions, each without that of the others which it
    calls."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._open: dict[int, list[float]] = defaultdict(list)

    def watch(self, owner: Any, name: str, step: str) -> None:
        setattr(owner, name, partial(self._timed, getattr(owner, name), step))

    def watch_method(self, owner: type, name: str, step: str) -> None:
        function = getattr(owner, name)
        setattr(owner, name, lambda itself, *args: self._timed(function, step, itself, *args))

    def _timed(self, function: Callable[..., Any], step: str, *args: Any) -> Any:
        thread_time = time.thread_time
        inner = self._open[get_ident()]
        inner.append(0.0)
        began = thread_time()
        try:
            return function(*args)
        finally:
            whole = thread_time() - began
            self.spent[step] += whole - inner.pop()
            if inner:
                inner[-1] += whole


def processor_seconds() -> float:
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def drones_seconds(pool: poly.Pool) -> float:
    return math.fsum(p.value for p in pool.everywhere(processor_seconds))


def burst(pool: poly.Pool) -> float:
    began = time.perf_counter()
    promises = [pool.promise(noop, i) for i in range(TASKS)]
    got = [p.result() for p in promises]
    seconds = time.perf_counter() - began
    assert got == list(range(TASKS))
    return seconds


def per_task(pool: poly.Pool, clock: Clock) -> dict[str, float]:
    drones, mine = drones_seconds(pool), processor_seconds()
    clock.spent.clear()
    steps = {"the burst": burst(pool)}
    mine = processor_seconds() - mine
    steps |= {
        "the controller": mine,
        "  submitting, waiting": mine - sum(clock.spent.values()),
        **clock.spent,
    }
    steps["a drone"] = (drones_seconds(pool) - drones) / DRONES
    return {name: seconds / TASKS * 1e6 for name, seconds in steps.items()}


def of_map(pool: poly.Pool) -> dict[str, float]:
    drones, mine, began = drones_seconds(pool), processor_seconds(), time.perf_counter()
    assert sum(pool.map(noop, range(CALLS))) == CALLS * (CALLS - 1) // 2
    wall, mine = time.perf_counter() - began, processor_seconds() - mine
    drones = (drones_seconds(pool) - drones) / DRONES
    steps = {"the map": wall, "its controller": mine, "a drone of its": drones}
    return {name: seconds / CALLS * 1e6 for name, seconds in steps.items()}


@click.command()
@click.option("--runs", default=11, show_default=True, help="How often each is measured.")
def main(runs: int) -> None:
    """Prints microseconds a task: median, least and most of the runs."""
    clock = Clock()
    clock.watch_method(dispatchers.Dispatcher, "take_turn", "  choosing a drone")
    clock.watch_method(drone_handle.DroneHandle, "pack", "  packing")
    clock.watch_method(LocalHandle, "send", "  sending")
    clock.watch(local_handle, "handle_records", "  unpacking")
    clock.watch(handlers, "_settle_values", "  settling")
    found: dict[str, list[float]] = defaultdict(list)
    with poly.Pool(DRONES) as pool:
        for _ in range(3):
            burst(pool)
        for collecting in (True, False):
            for _ in range(runs):
                gc.collect()
                if not collecting:
                    gc.disable()
                for name, us in per_task(pool, clock).items():
                    if collecting:
                        found[name].append(us)
                    elif name in ("the burst", "the controller"):
                        found[f"{name}, without the garbage collector"].append(us)
                gc.enable()
        for _ in range(runs):
            for name, us in of_map(pool).items():
                found[name].append(us)
    click.echo(
        f"{os.cpu_count()} cores, {DRONES} drones; microseconds a task; "
        f"median (least to most) of {runs} runs"
    )
    for name, each in found.items():
        click.echo(f"{name:50} {statistics.median(each):6.2f} ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
