"""What is printed: one table, with a ratio wherever there is somebody to compare with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from .peers import OURS, PEERS
from .suite import SUITE, Figures, Row, Sizes

Run = dict[str, dict[str, Figures]]
"""The figures of one run, by measurement and peer; there is none where it failed or was left
out."""

HEAD = ("measurement", "ours", "peer", "peer's figure", "times ours")


def number(figure: float) -> str:
    return (
        f"{figure:,.0f}"
        if abs(figure) >= 100
        else f"{figure:.1f}"
        if abs(figure) >= 10
        else f"{figure:.2f}"
    )


def spread(figures: list[float]) -> str:
    if not figures:
        return "failed"
    if len(figures) == 1:
        return number(figures[0])
    return (
        f"{number(statistics.median(figures))} ({number(min(figures))} to {number(max(figures))})"
    )


def lines(runs: list[Run], sizes: Sizes) -> Iterator[tuple[str, ...]]:
    for name, measurement in SUITE.items():
        taken = [run[name] for run in runs if name in run]
        if not any(OURS in each for each in taken):
            continue
        asked = getattr(sizes, measurement.counts) if measurement.counts else 0
        for row in measurement.rows:
            yield from _of_row(row, row.heading(sizes), taken, measurement.peers, asked)


def _of_row(
    row: Row, title: str, taken: list[dict[str, Figures]], peers: tuple[str, ...], asked: int
) -> Iterator[tuple[str, ...]]:
    ours = figures_of(OURS, row, taken)
    beside = [] if row.alone else [peer for peer in peers if known(figures_of(peer, row, taken))]
    first = (title, spread(known(ours)))
    if not beside:
        yield (*first, "", "", "")
    for peer in beside:
        theirs = figures_of(peer, row, taken)
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        fewer = f", {PEERS[peer].most:,} of them" if PEERS[peer].most < asked else ""
        yield (*first, PEERS[peer].title + fewer, spread(known(theirs)), spread(known(ratios)))
        first = ("", "")


def figures_of(peer: str, row: Row, taken: list[dict[str, Figures]]) -> list[float]:
    """Return a contender's figure of each run, nan where there is none."""
    return [each.get(peer, {}).get(row.figure, math.nan) for each in taken]


def known(figures: list[float]) -> list[float]:
    return [figure for figure in figures if not math.isnan(figure)]


def table(runs: list[Run], sizes: Sizes) -> str:
    return in_columns([HEAD, *lines(runs, sizes)])


def in_columns(rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown, whose first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    )
