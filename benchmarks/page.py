"""A picture of each row: a point for the median, a line from the minimum to the maximum."""

from __future__ import annotations

import html
import io
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import click
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .peers import OURS, PEERS
from .suite import SUITE, Sizes
from .table import Run, figures_of, known, number

OURS_COLOUR, PEER_COLOUR = "#1f6feb", "#57606a"
INCHES_WIDE, INCHES_PER_CONTENDER, INCHES_AROUND = 8.0, 0.27, 0.5
POINTS_BESIDE = 7  # between the end of a line and its label

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; color: #1f2328 }
figure { margin: 2rem 0; padding: 1rem; border: 1px solid #d0d7de; border-radius: 6px }
svg { width: 100%; height: auto }
"""


@dataclass(frozen=True)
class Picture:
    """The figures of one row of the table, by contender."""

    title: str
    figures: dict[str, list[float]]

    @property
    def contenders(self) -> list[str]:
        """The contenders, the one with the smallest median first."""
        return sorted(self.figures, key=lambda each: statistics.median(self.figures[each]))


def pictures(runs: list[Run], sizes: Sizes) -> Iterator[list[Picture]]:
    """Yield, for each measurement, the pictures of the rows that have figures of ours and of
    others.
    """
    for name, measurement in SUITE.items():
        drawn, measured = [], [run[name] for run in runs if name in run]
        for row in measurement.rows:
            figures = {
                each: taken
                for each in (OURS, *measurement.peers)
                if (taken := known(figures_of(each, row, measured)))
            }
            is_drawable = all(figure > 0 for taken in figures.values() for figure in taken)
            if OURS in figures and len(figures) > 1 and is_drawable and not row.alone:
                drawn.append(Picture(row.heading(sizes), figures))
        if drawn:
            yield drawn


def draw(drawn: list[Picture]) -> str:
    """Return the pictures, one below the other, as SVG."""
    heights = [INCHES_PER_CONTENDER * len(each.figures) + INCHES_AROUND for each in drawn]
    if not drawn:
        raise click.ClickException("there is no row with figures of ours and of others to draw")
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}):
        figure = Figure((INCHES_WIDE, sum(heights)), layout="constrained")
        rows = figure.subplots(len(drawn), squeeze=False, height_ratios=heights)
        for axes, picture in zip(rows[:, 0], drawn, strict=True):
            _draw_row(axes, picture)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _draw_row(axes: Axes, picture: Picture) -> None:
    ours = statistics.median(picture.figures[OURS])
    for place, contender in enumerate(picture.contenders):
        taken = picture.figures[contender]
        median = statistics.median(taken)
        colour = OURS_COLOUR if contender == OURS else PEER_COLOUR
        axes.hlines(place, min(taken), max(taken), colors=colour, linewidth=3, alpha=0.5)
        axes.plot(median, place, "o", color=colour)
        times = "" if contender == OURS else f"  ({number(median / ours)} times ours)"
        axes.annotate(
            number(median) + times, (max(taken), place), xytext=(POINTS_BESIDE, 0),
            textcoords="offset points", va="center", color=colour,
        )  # fmt: skip
    axes.set_title(picture.title, loc="left", fontweight="bold")
    axes.set_xscale("log")
    least, most = min(map(min, picture.figures.values())), max(map(max, picture.figures.values()))
    axes.set_xlim(least / 1.5, most * (most / least) ** 0.4 * 1.5)  # with room for the labels
    axes.set_ylim(len(picture.figures) - 0.5, -0.5)
    axes.set_yticks(range(len(picture.figures)), [PEERS[each].title for each in picture.contenders])
    axes.tick_params(left=False)
    axes.xaxis.set_visible(False)  # each point has its figure beside it
    axes.spines[:].set_visible(False)


def write(file: Path, runs: list[Run], sizes: Sizes, about: str, text: str) -> None:
    """Write a page with a picture of each row, and the table; or only the pictures, if the file's
    name ends with ``.svg``.
    """
    if file.suffix == ".svg":
        file.write_text(draw(list(chain.from_iterable(pictures(runs, sizes)))))
        return
    drawn = [draw(each) for each in pictures(runs, sizes)]
    figures = "\n".join(f"<figure>{svg[svg.index('<svg') :]}</figure>" for svg in drawn)
    file.write_text(
        "<!doctype html>\n"
        f'<html lang="en"><meta charset="utf-8"><title>Benchmarks</title><style>{STYLE}</style>\n'
        "<h1>Polycephaly and its peers</h1>\n"
        f"<p>{html.escape(about)}. A point is the median, a line reaches from the minimum to the "
        "maximum. The scales are logarithmic, and further to the left is better.</p>\n"
        f"{figures}\n<details><summary>All figures</summary><pre>{html.escape(text)}</pre>"
        "</details></html>\n"
    )
