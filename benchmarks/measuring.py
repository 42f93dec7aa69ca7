"""How a running pool is measured: what it looks like to the benchmarks, and what is timed.

Workers find the functions here by the name of their module."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WARM_UP_TASKS = 100
TRIAL = 2_000  # items
RUNS = 3  # of these, the median counts: the first of a fresh process is slower
NUMBERS_PER_PAGE = 4096 // 8


Map = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


def _itself(anything: Any) -> Any:
    return anything


@dataclass(frozen=True)
class Executors:
    """The interface of a running pool that is measured.

    Where possible, these are bound methods of the pool itself.
    """

    submit: Callable[..., Any]
    result: Callable[[Any], Any]
    # The ways to map: one, or the sizes of chunks between which a user of the pool would choose.
    maps: tuple[Map, ...] = ()
    # The pool's own way to wait for many results.
    gather: Callable[[list[Any]], list[Any]] | None = None
    # Applied to a large argument before it is submitted.
    prepare: Callable[[Any], Any] = _itself

    def results(self, pending: list[Any]) -> list[Any]:
        return [*map(self.result, pending)] if self.gather is None else self.gather(pending)

    def map_for(self, fn: Callable[[Any], Any], items: Sequence[Any]) -> Map:
        """Return the way to map that is best for such items, by a trial of each."""
        self.maps[0](fn, items[:WARM_UP_TASKS])  # workers start with their first tasks
        if len(self.maps) == 1:
            return self.maps[0]
        some = items[:TRIAL]

        def seconds(run: Map) -> float:
            began = time.perf_counter()
            run(fn, some)
            return time.perf_counter() - began

        return min(self.maps, key=seconds)


def noop(x: int) -> int:
    return x


def sum_of_pages(array: Any) -> float:
    """Add up one number of each page.

    The whole array must be present, and hardly any time goes into computing.
    """
    return float(array[::NUMBERS_PER_PAGE].sum())


def gather_us(workers: Executors, fn: Callable[[int], int], tasks: int) -> float:
    """Return microseconds a task, if many are submitted at once."""
    submit = workers.submit
    return _median_us(lambda count: workers.results([submit(fn, i) for i in range(count)]), tasks)


def round_trip_us(workers: Executors, trips: int) -> float:
    """Return the median of microseconds a task, if one is submitted at a time."""
    submit, result = workers.submit, workers.result
    for i in range(WARM_UP_TASKS):
        assert result(submit(noop, i)) == i
    took = []
    for i in range(trips):
        began = time.perf_counter()
        result(submit(noop, i))
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def map_us(workers: Executors, items: int) -> float:
    """Return microseconds an item of `map`."""
    run = workers.map_for(noop, range(items))
    return _median_us(lambda count: run(noop, range(count)), items)


def _median_us(run: Callable[[int], list[Any]], count: int) -> float:
    """Return microseconds for one of `count` calls that are made at once, after a warm-up."""
    run(WARM_UP_TASKS)
    took = []
    for _ in range(RUNS):
        began = time.perf_counter()
        got = run(count)
        took.append(time.perf_counter() - began)
        assert got == list(range(count))
    return statistics.median(took) / count * 1e6


def transfer_ms(workers: Executors, array: Any) -> float:
    """Return milliseconds from a large array to a number that proves that a worker has it."""
    began = time.perf_counter()
    total = workers.result(workers.submit(sum_of_pages, workers.prepare(array)))
    took = time.perf_counter() - began
    assert total == sum_of_pages(array)
    return took * 1e3
