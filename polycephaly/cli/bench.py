"""`polycephaly bench`: the cost of a task on this machine, in this package's pool and in others.

    for each run: each contender in turn, in a fresh process ──> figures ──> ratios to ours, per run

Machines are shared and noisy: the ratios and their spread say more than the times.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from time import monotonic
from typing import TYPE_CHECKING

import click

from .tables import Column, as_json, show

if TYPE_CHECKING:
    from ..demos.comparison import Sizes

MOST_WORKERS = 4
MOST_RUNS = 5
ENOUGH = 15  # seconds after which no run is begun, unless runs were requested
PATIENCE = 120  # seconds for one contender's figures

ROWS = (
    ("gather", "submit and gather, µs"),
    ("trip", "round trip, µs"),
    ("map", "map, µs an item"),
    ("array", "100 MB array, ms"),
)
COLUMNS = (
    Column("MEASUREMENT"),
    Column("POOL"),
    Column("COST", right=True),
    Column("TIMES OURS", right=True),
)

Run = dict[str, dict[str, float]]
"""Figures of one run, by contender and measurement."""


@click.command(
    epilog="""\b
Examples:
  polycephaly bench                  less than half a minute
  polycephaly bench --runs 10 -n 8
  polycephaly bench --json

\b
The tasks do nothing: what is measured is what a pool adds to work. Medians of all runs, with the smallest and the
largest; ratios are of the same run. Slow pools get fewer tasks. loky is measured where it is installed, and where numpy
is, an array that is sent to a worker, which reads a number of each page.
"""
)
@click.option(
    "--runs",
    type=click.IntRange(1),
    help="How often each is measured.  [default: what 15 s allow, at most 5]",
)
@click.option(
    "-n",
    "--workers",
    type=click.IntRange(1),
    help=f"[default: usable cores, at most {MOST_WORKERS}]",
)
@click.option("--quick", is_flag=True, help="Tiny sizes: does it run at all?")
@click.option(
    "--json", "in_json", is_flag=True, help="For programs: JSON, with the figures of each run."
)
@click.pass_context
def bench(
    ctx: click.Context, runs: int | None, workers: int | None, quick: bool, in_json: bool
) -> None:
    """Compare Pool with the alternatives, here.

    They are the standard library's multiprocessing.Pool and ProcessPoolExecutor, and loky.

    The exit status is 1 when one of them failed.
    """
    from ..demos.comparison import CONTENDERS, QUICK, SIZES

    cores = len(os.sched_getaffinity(0))
    workers = workers or min(cores, MOST_WORKERS)
    names = [name for name, contender in CONTENDERS.items() if contender.installed]
    failed: dict[str, str] = {}
    taken: list[Run] = []
    began = monotonic()
    with click.progressbar(
        length=(runs or MOST_RUNS) * len(names), file=sys.stderr, label="measuring"
    ) as progress:
        for turn in range(runs or MOST_RUNS):
            if runs is None and taken and monotonic() - began > ENOUGH:
                break
            run: Run = {}
            first = turn % len(names)  # each run begins with another contender
            for name in names[first:] + names[:first]:
                try:
                    run[name] = _figures(name, workers, QUICK if quick else SIZES)
                except RuntimeError as error:
                    failed[name] = str(error)
                progress.update(1)
            taken.append(run)

    about = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": cores,
        "workers": workers,
    }
    if in_json:
        as_json({"machine": about, "runs": taken, "failed": failed})
    else:
        much = f"{len(taken)} run{'s' * (len(taken) != 1)}, {workers} worker{'s' * (workers != 1)}"
        click.echo(f"{much}, {cores} cores, CPython {about['python']}, Linux {about['kernel']}\n")
        show(COLUMNS, _rows(taken, names))
    for name, why in failed.items():
        click.echo(f"{CONTENDERS[name].title} failed: {why}", err=True)
    ctx.exit(1 if failed else 0)


def _figures(name: str, workers: int, sizes: Sizes) -> dict[str, float]:
    """Measure one contender. Raise `RuntimeError`, with the reason, if there are no figures."""
    import json
    import signal
    import subprocess
    import tempfile
    from contextlib import suppress

    from ..demos.comparison import command

    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(
            command(name, workers, sizes),
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            answer, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no figures after {PATIENCE} s") from None
        finally:  # after Ctrl-C too, because the process is in another session
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            said.seek(0)
            raise RuntimeError(
                said.read().strip().rpartition("\n")[2] or f"exit status {process.returncode}"
            )
    found: dict[str, float] = json.loads(answer)
    return found


def _rows(taken: list[Run], names: list[str]) -> list[tuple[str, ...]]:
    from ..demos.comparison import CONTENDERS, OURS

    rows: list[tuple[str, ...]] = []
    for measurement, title in ROWS:
        for name in names:
            runs = [run for run in taken if measurement in run.get(name, {})]
            ours = [run for run in runs if measurement in run.get(OURS, {})]
            if runs:
                cost = _spread([run[name][measurement] for run in runs])
                times = _spread([run[name][measurement] / run[OURS][measurement] for run in ours])
                rows.append((title, CONTENDERS[name].title, cost, "" if name == OURS else times))
                title = ""
    return rows


def _spread(figures: list[float]) -> str:
    if not figures:
        return "?"
    if len(figures) == 1:
        return _number(figures[0])
    return f"{_number(statistics.median(figures))} ({_number(min(figures))} to {_number(max(figures))})"


def _number(figure: float) -> str:
    return (
        f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"
    )
