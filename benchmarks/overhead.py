"""What a task costs: submit + gather, and a round trip, beside the standard library's pools (and loky, if installed).

    python benchmarks/overhead.py [--runs N] [--tasks N] [--json FILE]

All in one run on the same work (a no-op, two processes), the contenders in turn within each run, because
machines are shared and noisy: read the ratios, not the microseconds. Then what starting costs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import polycephaly as poly

WORKERS = 2


def noop(x: int) -> int:
    return x


@contextmanager
def polycephaly_pool() -> Iterator[tuple[Callable[..., Any], Callable[[Any], Any]]]:
    with poly.Pool(WORKERS) as pool:
        yield pool.submit, lambda p: p.result()


@contextmanager
def multiprocessing_pool() -> Iterator[tuple[Callable[..., Any], Callable[[Any], Any]]]:
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        yield (lambda fn, *args: pool.apply_async(fn, args)), lambda r: r.get()


@contextmanager
def executor() -> Iterator[tuple[Callable[..., Any], Callable[[Any], Any]]]:
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("fork")) as pool:
        yield pool.submit, lambda f: f.result()


@contextmanager
def loky_executor() -> Iterator[tuple[Callable[..., Any], Callable[[Any], Any]]]:
    from loky import ProcessPoolExecutor as LokyExecutor

    with LokyExecutor(WORKERS) as pool:
        yield pool.submit, lambda f: f.result()


CONTENDERS = {
    "polycephaly.Pool": polycephaly_pool,
    "multiprocessing.Pool": multiprocessing_pool,
    "ProcessPoolExecutor": executor,
}
if find_spec("loky"):
    CONTENDERS["loky"] = loky_executor


def measure(name: str, tasks: int) -> dict[str, float]:
    """Microseconds per task, per round trip, and milliseconds from nothing to the first answer."""
    began = time.perf_counter()
    with CONTENDERS[name]() as (submit, result):
        assert result(submit(noop, 7)) == 7
        first = time.perf_counter() - began
        result(submit(noop, 7))
        began = time.perf_counter()
        pending = [submit(noop, i) for i in range(tasks)]
        assert [result(p) for p in pending] == list(range(tasks))
        per_task = (time.perf_counter() - began) / tasks
        trips = []
        for i in range(1000):
            began = time.perf_counter()
            result(submit(noop, i))
            trips.append(time.perf_counter() - began)
    return {"task_us": per_task * 1e6, "trip_us": statistics.median(trips) * 1e6, "first_ms": first * 1e3}


def many_drones(drones: int) -> float:
    """Seconds until so many drones are up and each has answered."""
    began = time.perf_counter()
    with poly.Pool(drones) as pool:
        pids = {p.value for p in pool.everywhere("__import__('os').getpid()")}
        seconds = time.perf_counter() - began
        assert len(pids) == drones
    return seconds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--tasks", type=int, default=20_000)
    options.add_argument("--json", metavar="FILE")
    chosen = options.parse_args()
    measure("polycephaly.Pool", 100)  # imports are not what is measured
    runs = [{name: measure(name, chosen.tasks) for name in CONTENDERS} for _ in range(chosen.runs)]
    hundred = [many_drones(100) for _ in range(chosen.runs)]

    print(f"{chosen.runs} runs, {chosen.tasks} tasks, {WORKERS} workers: median (min to max)\n")
    units = {"task_us": "submit + gather, us/task", "trip_us": "round trip, us", "first_ms": "first answer, ms"}
    for unit, title in units.items():
        print(title)
        for name in CONTENDERS:
            figures = [run[name][unit] for run in runs]
            ratios = [run[name][unit] / run["polycephaly.Pool"][unit] for run in runs]
            print(
                f"  {name:22s}{statistics.median(figures):10.2f}  ({min(figures):.2f} to {max(figures):.2f})"
                f"    {statistics.median(ratios):6.2f} times ours  ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        print()
    print(f"100 drones up and answering: {statistics.median(hundred):.2f} s ({min(hundred):.2f} to {max(hundred):.2f})")
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump({"runs": runs, "hundred_drones_s": hundred}, file, indent=1)


if __name__ == "__main__":
    main()
