"""The same programs of joblib with its own backend, loky, and with ours.

    python -m benchmarks.with_joblib [--runs N]

The two take turns; the table has medians, and how many times ours loky took. *Cold* is a first
call: loky starts its processes, which stay for five minutes; a pool is forked, and stays for its
`parallel_config`. *Warm* is a later one. joblib looks for results every 10 ms, which no backend can
change: what is shorter is that."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any

import click
import joblib
import numpy
from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor

import polycephaly as poly

from .suite import WORKERS
from .work import grid_search


def nothing(x: int) -> int:
    return x


def compute(seconds: float) -> None:
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def element(array: Any, index: int) -> float:
    return float(array[index])


@cache
def held(form: str) -> Any:
    """160 MB of numbers, as a data frame, a sparse matrix or a list of arrays."""
    columns = numpy.random.default_rng(0).random((2_000_000, 10))
    if form == "list":
        return [columns[:, number].copy() for number in range(10)]
    if form == "frame":
        import pandas

        return pandas.DataFrame(columns)
    from scipy.sparse import csr_array

    return csr_array(columns)


def entry(data: Any, index: int) -> float:
    if isinstance(data, list):
        return float(data[0][index])
    return float(data.iat[index, 0] if hasattr(data, "iat") else data[index, 0])


def filled(value: int) -> Any:
    return numpy.full(1_000_000, float(value))


TABLE = numpy.random.default_rng(0).random(50_000_000 // 8)


def every(calls: Any) -> None:
    for _ in Parallel(n_jobs=WORKERS, return_as="generator")(calls):
        pass


def search() -> None:
    model, x, y = grid_search()
    model.fit(x, y)


PROGRAMS: dict[str, Callable[[], None]] = {
    "10 calls of nothing": lambda: every(delayed(nothing)(i) for i in range(10)),
    "20,000 calls of nothing": lambda: every(delayed(nothing)(i) for i in range(20_000)),
    "500 calls of 1 ms": lambda: every(delayed(compute)(0.001) for _ in range(500)),
    "20 calls with the same 50 MB": lambda: every(delayed(element)(TABLE, i) for i in range(20)),
    **{
        f"40 calls with one {form} of 160 MB": (
            lambda form=form: every(delayed(entry)(held(form), i) for i in range(40))
        )
        for form in ("frame", "sparse matrix", "list")
    },
    "8 calls with 50 MB each": lambda: every(delayed(element)(TABLE + i, i) for i in range(8)),
    "20 calls that return 8 MB": lambda: every(delayed(filled)(i) for i in range(20)),
    "GridSearchCV, 60 fits of 3 ms": search,
}


def seconds(program: Callable[[], None], backend: str, warm: bool) -> float:
    if not warm:
        get_reusable_executor().shutdown()
    with joblib.parallel_config(backend):
        if warm:
            program()
        began = perf_counter()
        program()
        return perf_counter() - began


@click.command(help=__doc__)
@click.option("--runs", default=5, show_default=True, help="how often each is timed")
def main(runs: int) -> None:
    poly.joblib.register()
    print(f"{'':44}{'':6}{'loky':>10}{'ours':>10}   loky takes")
    for name, program in PROGRAMS.items():
        for warm in (False, True):
            taken: dict[str, list[float]] = {"loky": [], "polycephaly": []}
            for _ in range(runs):
                for backend, times in taken.items():
                    times.append(seconds(program, backend, warm))
            its, ours = (statistics.median(times) for times in taken.values())
            how = "warm" if warm else "cold"
            print(
                f"{name:44}{how:6}{its * 1e3:7.0f} ms{ours * 1e3:7.0f} ms   "
                f"{its / ours:.2f} times ours",
                flush=True,
            )


if __name__ == "__main__":
    main()
