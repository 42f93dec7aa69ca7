"""What is printed: one table. Each peer's figure has beside it how many times ours it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from .peers import OURS, PEERS
from .suite import SUITE, Figures, Row, Sizes

Run = dict[str, dict[str, Figures]]
"""The figures of one run, by measurement and peer; there is none where it failed or was left
out."""

COLUMNS = ("multiprocessing", "futures", "loky")
HEAD = ("(in brackets: times ours)", "ours", *(PEERS[peer].title for peer in COLUMNS), "others")


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
    return f"{number(statistics.median(figures))}, {number(min(figures))} to {number(max(figures))}"


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

    def beside(peer: str) -> str:
        """A peer's figure, and in brackets how many times ours."""
        theirs = figures_of(peer, row, taken)
        if row.alone or not known(theirs):
            return ""
        times = known([b / a for a, b in zip(ours, theirs, strict=True)])
        fewer = f", {PEERS[peer].most:,} of them" if PEERS[peer].most < asked else ""
        return f"{number(statistics.median(known(theirs)))} ({spread(times)}{fewer})"

    others = [(PEERS[peer].title, beside(peer)) for peer in peers if peer not in COLUMNS]
    yield (
        title,
        spread(known(ours)),
        *map(beside, COLUMNS),
        "; ".join(f"{name} {cell}" for name, cell in others if cell),
    )


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
