"""Two contenders in alternating pairs: this checkout beside another one, or beside a peer.

A machine's speed drifts while figures are taken, so only figures that were taken one after the
other are compared: each pair gives one ratio. Of these the table shows the median, and the
interval in which the true median lies with a probability of 95 % at least (of the sign test: no
distribution is assumed). A row is slower, or faster, only if the whole interval says so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from .peers import OURS
from .suite import SUITE, Figures, Sizes
from .table import Run, in_columns, number

CONFIDENCE = 0.95
SLOWER = 1.05
"""A row counts as slower if its whole interval lies above this ratio, and as as fast if it lies
below; otherwise the pairs leave it open."""
PROCESSOR = ("controller_s", "workers_s")
CHECKOUT = "checkout"
"""The name of another checkout among the figures, beside those of peers."""


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval of the median, or None if the values are too few: at least six."""
    ordered = sorted(values)
    n = len(ordered)
    outside, rank = 2.0 * 0.5**n, 0  # how probable it is that the median lies beyond the ranks
    while outside <= 1 - CONFIDENCE:
        rank += 1
        outside += 2.0 * math.comb(n, rank) * 0.5**n
    return (ordered[rank - 1], ordered[n - rank]) if rank else None


def verdict(ratios: Sequence[float]) -> str:
    """Return what the ratios of one row show."""
    found = interval(ratios)
    if found is None:
        return "too few pairs"
    low, high = found
    if low > SLOWER:
        return "slower"
    if high < 1:
        return "faster"
    return "as fast" if high <= SLOWER else "open"


def ratios(row: str, other: str, taken: list[dict[str, Figures]]) -> list[float]:
    """Return ours / theirs of each pair, without pairs of which one could not be taken."""
    both = ((each.get(OURS, {}).get(row), each.get(other, {}).get(row)) for each in taken)
    return [ours / theirs for ours, theirs in both if ours and theirs]


def _ratio(values: list[float]) -> str:
    if not values:
        return ""
    found = interval(values)
    return f"{median(values):.2f}" + (f" ({found[0]:.2f} to {found[1]:.2f})" if found else "")


def _rows(runs: list[Run], sizes: Sizes, other: str, title: str) -> Iterator[tuple[str, ...]]:
    yield ("measurement", "ours", title, "ours / it", "processor time: controller", "workers", "")
    for name, measurement in SUITE.items():
        taken = [run[name] for run in runs if name in run]
        if not taken:
            continue
        processor = [_ratio(ratios(figure, other, taken)) for figure in PROCESSOR]
        for row in measurement.rows:
            figures = [
                [each[who][row.figure] for each in taken if row.figure in each.get(who, {})]
                for who in (OURS, other)
            ]
            found = ratios(row.figure, other, taken)
            yield (
                row.heading(sizes),
                *(number(median(each)) if each else "failed" for each in figures),
                _ratio(found),
                *processor,
                verdict(found),
            )
            processor = ["", ""]  # of all rows of a measurement together


def table(runs: list[Run], sizes: Sizes, other: str, title: str) -> str:
    """Return a table with a line for each row. Less than 1: ours takes less."""
    return in_columns(list(_rows(runs, sizes, other, title)))


def comparable(names: list[str], other: str) -> list[str]:
    """Return the measurements that there are of the other one: all of a checkout's."""
    return [name for name in names if other == CHECKOUT or other in SUITE[name].peers]
