"""Pools side by side: ours, the standard library's two, and loky where it is installed; each with
the same face.

    python -m polycephaly.demos.comparison NAME WORKERS SIZES ──> its figures, as JSON

One contender, measured in a process of its own, so that what another has started or loaded does not
disturb it: its module is imported when it is started, and never before. `polycephaly bench` shows
these few figures; `benchmarks/` measures more, and more contenders, with the same functions."""

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

__all__ = [
    "CONTENDERS",
    "OURS",
    "QUICK",
    "SIZES",
    "WARM",
    "Contender",
    "Executors",
    "Sizes",
    "gather_us",
    "loky",
    "map_us",
    "multiprocessing_pool",
    "noop",
    "polycephaly_pool",
    "process_pool_executor",
    "sum_of_pages",
    "there_ms",
    "trip_us",
]  # fmt: skip

OURS = "polycephaly"
WARM = 100
TIMES = 3  # of which the median counts: in the first burst of a fresh process everybody is cold
PAGE = 4096 // 8  # numbers


def _itself(anything: Any) -> Any:
    return anything


@dataclass(frozen=True)
class Executors:
    """What there is to measure of a pool that is up. Where it can be, these are the pool's own
    bound methods."""

    submit: Callable[..., Any]
    result: Callable[[Any], Any]
    map: Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]] | None = None
    gather: Callable[[list[Any]], list[Any]] | None = None  # its own way to wait for many
    give: Callable[[Any], Any] = (
        _itself  # what is done with a large argument before it is submitted
    )

    def results(self, pending: list[Any]) -> list[Any]:
        return (
            [self.result(each) for each in pending] if self.gather is None else self.gather(pending)
        )


@contextmanager
def polycephaly_pool(workers: int) -> Iterator[Executors]:
    import polycephaly as poly

    with poly.Pool(workers) as pool:
        yield Executors(
            pool.submit, methodcaller("result"), lambda fn, items: list(pool.map(fn, items))
        )


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
        yield Executors(
            pool.submit, methodcaller("result"), lambda fn, items: list(pool.map(fn, items))
        )


@contextmanager
def loky(workers: int) -> Iterator[Executors]:
    with import_module("loky").ProcessPoolExecutor(workers) as pool:
        yield Executors(
            pool.submit, methodcaller("result"), lambda fn, items: list(pool.map(fn, items))
        )


@dataclass(frozen=True)
class Contender:
    title: str
    module: str
    start: Callable[[int], AbstractContextManager[Executors]]
    most: int = 1_000_000  # the slow are given fewer tasks

    @property
    def installed(self) -> bool:
        return find_spec(self.module.partition(".")[0]) is not None


CONTENDERS = {
    OURS: Contender("polycephaly.Pool", "polycephaly.pool.pool", polycephaly_pool),
    "multiprocessing": Contender(
        "multiprocessing.Pool", "multiprocessing.pool", multiprocessing_pool
    ),
    "futures": Contender(
        "ProcessPoolExecutor", "concurrent.futures.process", process_pool_executor, most=2_000
    ),
    "loky": Contender("loky", "loky", loky, most=2_000),
}


# -- what is measured ------------------------------------------------------------------------------


def noop(x: int) -> int:
    return x


def sum_of_pages(array: Any) -> float:
    """Of one number of each page: all of it has to be there, and hardly any time goes into
    computing."""
    return float(array[::PAGE].sum())


def gather_us(workers: Executors, fn: Callable[[int], int], tasks: int) -> float:
    """Many at once: of each."""
    submit = workers.submit

    def once() -> float:
        began = time.perf_counter()
        got = workers.results([submit(fn, i) for i in range(tasks)])
        seconds = time.perf_counter() - began
        assert got == list(range(tasks))
        return seconds / tasks * 1e6

    workers.results([submit(fn, i) for i in range(WARM)])
    return statistics.median(once() for _ in range(TIMES))


def trip_us(workers: Executors, trips: int) -> float:
    """One at a time: the median."""
    submit, result = workers.submit, workers.result
    for i in range(WARM):
        assert result(submit(noop, i)) == i
    took = []
    for i in range(trips):
        began = time.perf_counter()
        result(submit(noop, i))
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def map_us(workers: Executors, items: int) -> float:
    """Of an item; nobody is told how to cut."""
    assert workers.map is not None
    run = workers.map
    run(noop, range(WARM))

    def once() -> float:
        began = time.perf_counter()
        got = run(noop, range(items))
        seconds = time.perf_counter() - began
        assert got == list(range(items))
        return seconds / items * 1e6

    return statistics.median(once() for _ in range(TIMES))


def there_ms(workers: Executors, array: Any) -> float:
    """From a large array to a number that tells that a worker has all of it."""
    began = time.perf_counter()
    total = workers.result(workers.submit(sum_of_pages, workers.give(array)))
    took = time.perf_counter() - began
    assert total == sum_of_pages(array)
    return took * 1e3


# -- one contender's figures -----------------------------------------------------------------------


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
    most = CONTENDERS[name].most
    with CONTENDERS[name].start(workers) as pool:
        found = {
            "gather": gather_us(pool, noop, min(sizes.tasks, most)),
            "trip": trip_us(pool, sizes.trips),
            "map": map_us(pool, min(sizes.items, most)),
        }
        if find_spec("numpy") is not None:
            numpy = import_module("numpy")
            took = [
                there_ms(pool, numpy.full(sizes.array // 8, number, float))
                for number in range(sizes.arrays + 1)
            ]
            found["array"] = statistics.median(took[1:])  # the first finds everybody cold
    return found


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # what a contender prints is no figure
    name, workers, sizes = sys.argv[1:]
    os.write(answer, json.dumps(figures(name, int(workers), Sizes(**json.loads(sizes)))).encode())


def command(name: str, workers: int, sizes: Sizes) -> list[str]:
    """What has one contender measured."""
    return [
        sys.executable,
        "-m",
        "polycephaly.demos.comparison",
        name,
        str(workers),
        json.dumps(asdict(sizes)),
    ]


if __name__ == "__main__":
    # Workers find what they are given by the name of its module, which here would be __main__.
    import_module("polycephaly.demos.comparison").main()
