"""`polycephaly bench`: the cost of a task on this machine, in this package's pool and in others.

    for each run: each contender in turn, in a fresh process ──> figures ──> ratios to ours, per run

Machines are shared and noisy: the ratios and their spread say more than the times.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from typing import TYPE_CHECKING

import click

from ..runtime.clock import monotonic
from ..timeline.format import count
from .reach import Command
from .tables import Column, as_json, show

if TYPE_CHECKING:
    from ..demos.comparison import Sizes

MAX_WORKERS = 4
MAX_RUNS = 5
MAX_DEFAULT_SECONDS = 15  # then no run is begun, unless a number of runs was requested
CONTENDER_TIMEOUT_SECONDS = 120

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


@click.command(cls=Command)
@click.option(
    "--runs",
    type=click.IntRange(1),
    help="Number of runs.  [default: as many as fit into 15 s, at most 5]",
)
@click.option(
    "-n",
    "--workers",
    type=click.IntRange(1),
    help=f"Workers of each pool.  [default: usable cores, at most {MAX_WORKERS}]",
)
@click.option("--quick", is_flag=True, help="Use tiny sizes, to check that the command runs.")
@click.option("--json", "in_json", is_flag=True, help="Print JSON, with the figures of each run.")
@click.pass_context
def bench(
    ctx: click.Context, runs: int | None, workers: int | None, quick: bool, in_json: bool
) -> None:
    """Compare Pool with alternative pools on this machine.

    The alternatives are the standard library's multiprocessing.Pool and ProcessPoolExecutor, and
    loky.

    The exit status is 1 if the measurement of one pool failed.

    Examples
    --------
    polycephaly bench                  less than half a minute
    polycephaly bench --runs 10 -n 8
    polycephaly bench --json

    Notes
    -----
    The tasks do nothing, so the figures show the cost that a pool adds to a task.
    Figures are medians of all runs, with minimum and maximum; ratios are taken within
    the same run. Slow pools get fewer tasks. loky is measured if it is installed. If
    numpy is installed, an array is sent to a worker, which reads one number per page.
    """
    from ..demos.comparison import CONTENDERS, QUICK, SIZES
    from ..runtime.system_limits import usable_processors

    cores = usable_processors()
    workers = workers or min(cores, MAX_WORKERS)
    names = [name for name, contender in CONTENDERS.items() if contender.installed]
    failed: dict[str, str] = {}
    completed: list[Run] = []
    started_at = monotonic()
    with click.progressbar(
        length=(runs or MAX_RUNS) * len(names), file=sys.stderr, label="measuring"
    ) as progress:
        for number in range(runs or MAX_RUNS):
            if runs is None and completed and monotonic() - started_at > MAX_DEFAULT_SECONDS:
                break
            run: Run = {}
            first = number % len(names)  # each run begins with another contender
            for name in names[first:] + names[:first]:
                try:
                    run[name] = _measure(name, workers, QUICK if quick else SIZES)
                except RuntimeError as error:
                    failed[name] = str(error)
                progress.update(1)
            completed.append(run)

    machine = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": cores,
        "workers": workers,
    }
    if in_json:
        as_json({"machine": machine, "runs": completed, "failed": failed})
    else:
        click.echo(
            f"{count(len(completed), 'run')}, {count(workers, 'worker')}, {cores} cores, "
            f"CPython {machine['python']}, Linux {machine['kernel']}\n"
        )
        show(COLUMNS, _rows(completed, names))
    for name, reason in failed.items():
        click.echo(f"{CONTENDERS[name].title} failed: {reason}", err=True)
    ctx.exit(1 if failed else 0)


def _measure(name: str, workers: int, sizes: Sizes) -> dict[str, float]:
    """Measure one contender. Raise `RuntimeError`, with the reason, if there are no figures."""
    import json
    import signal
    import subprocess
    import tempfile
    from contextlib import suppress

    from ..demos.comparison import command

    with (
        tempfile.TemporaryFile("w+", errors="replace") as stderr_file,
        subprocess.Popen(
            command(name, workers, sizes),
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=CONTENDER_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no figures after {CONTENDER_TIMEOUT_SECONDS} s") from None
        finally:  # after Ctrl-C too, because the process is in another session
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            stderr_file.seek(0)
            last_line = stderr_file.read().strip().rpartition("\n")[2]
            raise RuntimeError(last_line or f"exit status {process.returncode}")
    figures: dict[str, float] = json.loads(output)
    return figures


def _rows(completed: list[Run], names: list[str]) -> list[tuple[str, ...]]:
    from ..demos.comparison import CONTENDERS, OURS

    rows: list[tuple[str, ...]] = []
    for measurement, title in ROWS:
        for name in names:
            runs = [run for run in completed if measurement in run.get(name, {})]
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
        return _format(figures[0])
    lowest, highest = _format(min(figures)), _format(max(figures))
    return f"{_format(statistics.median(figures))} ({lowest} to {highest})"


def _format(figure: float) -> str:
    return (
        f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"
    )
