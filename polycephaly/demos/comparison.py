"""Compare pools: this package's, two of the standard library, and loky if installed.

    python -m polycephaly.demos.comparison NAME WORKERS SIZES ──> figures, as JSON

One contender is measured in a process of its own, undisturbed by processes and modules of others:
its module is imported when it is started, never before. `polycephaly bench` shows these few
figures. `benchmarks/` measures more figures and contenders with the same functions.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from operator import methodcaller
from typing import Any

OURS = "polycephaly"
WARM_UP_TASKS = 100
RUNS = 3  # of these, the median counts: the first of a fresh process is slower
NUMBERS_PER_PAGE = 4096 // 8


def _itself(anything: Any) -> Any:
    return anything


@dataclass(frozen=True)
class Executors:
    """The interface of a running pool that is measured.

    Where possible, these are bound methods of the pool itself.
    """

    submit: Callable[..., Any]
    result: Callable[[Any], Any]
    map: Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]] | None = None
    # The pool's own way to wait for many results.
    gather: Callable[[list[Any]], list[Any]] | None = None
    # Applied to a large argument before it is submitted.
    prepare: Callable[[Any], Any] = _itself

    def results(self, pending: list[Any]) -> list[Any]:
        return [*map(self.result, pending)] if self.gather is None else self.gather(pending)


def _standard_interface(pool: Any) -> Executors:
    return Executors(
        pool.submit, methodcaller("result"), lambda fn, items: list(pool.map(fn, items))
    )


@contextmanager
def polycephaly_pool(workers: int) -> Iterator[Executors]:
    import polycephaly as poly

    with poly.Pool(workers) as pool:
        yield _standard_interface(pool)


@contextmanager
def multiprocessing_pool(workers: int) -> Iterator[Executors]:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield Executors(lambda fn, *args: pool.apply_async(fn, args), methodcaller("get"), pool.map)


@contextmanager
def process_pool_executor(workers: int) -> Iterator[Executors]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield _standard_interface(pool)


@contextmanager
def loky(workers: int) -> Iterator[Executors]:
    with import_module("loky").ProcessPoolExecutor(workers) as pool:
        yield _standard_interface(pool)


@dataclass(frozen=True)
class Contender:
    title: str
    module: str
    start: Callable[[int], AbstractContextManager[Executors]]
    max_tasks: int = 1_000_000  # slow contenders get fewer

    @property
    def installed(self) -> bool:
        return find_spec(self.module.partition(".")[0]) is not None


CONTENDERS = {
    OURS: Contender("polycephaly.Pool", "polycephaly.pool.pool", polycephaly_pool),
    "multiprocessing": Contender(
        "multiprocessing.Pool", "multiprocessing.pool", multiprocessing_pool
    ),
    "futures": Contender(
        "ProcessPoolExecutor", "concurrent.futures.process", process_pool_executor, max_tasks=2_000
    ),
    "loky": Contender("loky", "loky", loky, max_tasks=2_000),
}


# -- measurements ------------------------------------------------------------------------------


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
    """Return microseconds an item of `map`, without a given chunk size."""
    assert workers.map is not None
    run = workers.map
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


# -- the figures of one contender --------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    tasks: int = 5_000
    trips: int = 300
    items: int = 50_000
    array: int = 100_000_000  # bytes
    arrays: int = 2


SIZES = Sizes()
QUICK = Sizes(tasks=50, trips=20, items=100, array=1_000_000, arrays=1)


def figures(name: str, workers: int, sizes: Sizes) -> dict[str, float]:
    max_tasks = CONTENDERS[name].max_tasks
    with CONTENDERS[name].start(workers) as pool:
        found = {
            "gather": gather_us(pool, noop, min(sizes.tasks, max_tasks)),
            "trip": round_trip_us(pool, sizes.trips),
            "map": map_us(pool, min(sizes.items, max_tasks)),
        }
        if find_spec("numpy") is not None:
            numpy = import_module("numpy")
            took = [
                transfer_ms(pool, numpy.full(sizes.array // 8, number, float))
                for number in range(sizes.arrays + 1)
            ]
            found["array"] = statistics.median(took[1:])  # the first one is slower
    return found


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # output of a contender is not part of the figures
    name, workers, sizes = sys.argv[1:]
    os.write(answer, json.dumps(figures(name, int(workers), Sizes(**json.loads(sizes)))).encode())


def command(name: str, workers: int, sizes: Sizes) -> list[str]:
    """Return the command that measures one contender."""
    module = "polycephaly.demos.comparison"
    return [sys.executable, "-m", module, name, str(workers), json.dumps(asdict(sizes))]


if __name__ == "__main__":
    # Workers find functions by the name of their module, which would be __main__ here.
    import_module("polycephaly.demos.comparison").main()
