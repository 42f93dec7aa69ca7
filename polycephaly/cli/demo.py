"""`polycephaly demo`: demonstrations, each with a checked result."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .reach import Command, Seconds

if TYPE_CHECKING:
    from .. import Timeline

DEFAULT_LATENCY = 0.15
MAX_LATENCY = 10

DEFAULT_DRONES = "1,2,3,5,8,13,20"
DEFAULT_THREADS = "1,2,3,5,8,13,20,26"
# Each drone, and each run of III, downloads the funds file (4 MB) from another site's server.
LIVE_DRONES = "8"
RAY_DRONES = "2,5"  # starting one takes seconds
LIVE_THREADS = "13"

DEFAULTS = {"drones": (DEFAULT_DRONES, LIVE_DRONES), "threads": (DEFAULT_THREADS, LIVE_THREADS)}


def _counts(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    if value is None:
        value = DEFAULTS[str(param.name)][ctx.params["live"]]
        if param.name == "drones" and ctx.params["engine"] == "ray":
            value = RAY_DRONES
    numbers = [part.strip() for part in value.split(",")]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise click.BadParameter(f"{value!r} is not a list of positive numbers such as 1,2,8")
    return tuple(map(int, numbers))


_counts_option = partial(click.option, callback=_counts, metavar="N,N,...")
_file_option = partial(
    click.option, type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE"
)


@click.group()
def demo() -> None:
    """Run a demo."""


@demo.command(cls=Command)
@click.option(
    "--data", type=click.Path(path_type=Path), metavar="DIR", help="Serve the files in DIR."
)
@click.option(
    "--live",
    is_flag=True,
    is_eager=True,
    help="Load from nasdaqtrader.com instead of the loopback.",
)
@click.option(
    "--latency",
    type=Seconds(0, MAX_LATENCY),
    metavar="SECONDS",
    help=f"Wait of the loopback server before each answer.  [default: {DEFAULT_LATENCY}]",
)
@_counts_option(
    "--drones",
    help="Numbers of drones for experiment II.  "
    f"[default: {DEFAULT_DRONES}; with --live: {LIVE_DRONES}]",
)
@_counts_option(
    "--threads",
    help="Numbers of green threads for experiment III.  "
    f"[default: {DEFAULT_THREADS}; with --live: {LIVE_THREADS}]",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    is_eager=True,
    help="Engine of the drones. With ray, tasks that ran on a lost node run again.  "
    "[default: local]",
)
@click.option(
    "--address",
    metavar="ADDRESS",
    help="With --engine ray: address of the cluster.  [default: start a cluster here]",
)
@_file_option("--json", "json_file", help="Write the result to FILE as JSON.")
@_file_option(
    "--plot",
    "plot_file",
    help="Draw the times as bars and the combined run as a Gantt chart: FILE.html or .svg.",
)
@click.pass_context
def securities(
    ctx: click.Context,
    data: Path | None,
    live: bool,
    latency: float | None,
    drones: tuple[int, ...],
    threads: tuple[int, ...],
    engine: str,
    address: str | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Load five lists of securities, with one process and with many, and compare the times.

    A second part parses the pages and computes indicators of these securities, in the same ways.

    NYSE, AMEX, NASDAQ and ETFs come from the exchange's symbol-directory files, mutual funds page
    by page, all over HTTP. By default a server on the loopback serves generated files and waits
    before each answer, as a distant server would.

    The exit status is 0 if all experiments had the same results, and 1 if they did not or if a
    source failed.

    Examples
    --------
    polycephaly demo securities                     generated data, less than a minute
    polycephaly demo securities --drones 1,8,20     II with only these numbers of drones
    polycephaly demo securities --threads 13        III with only this number of green threads
    polycephaly demo securities --data ./symdir     real symbol-directory files, plain or .gz
    polycephaly demo securities --plot run.html     with a page of bars and a Gantt chart
    polycephaly demo securities --live --drones 8   the exchange's own site
    polycephaly demo securities --engine ray        with drones that are Ray actors
    """
    if live and (data is not None or latency is not None):
        raise click.UsageError(
            "--live loads from the real site, so --data and --latency cannot be given with it."
        )
    if address is not None and engine != "ray":
        raise click.UsageError("--address names a Ray cluster: give --engine ray with it.")
    for file, option in ((json_file, "--json"), (plot_file, "--plot")):
        if file is not None and not file.parent.is_dir():
            raise click.BadParameter(f"no such directory: {file.parent}", param_hint=option)
    if plot_file is not None:
        _check_plot(plot_file)
    if find_spec("httpx") is None:
        raise click.ClickException("the demo needs httpx: pip install 'httpx>=0.25'")

    from ..demos.securities import experiments, report
    from ..demos.securities.parse import SourceError
    from ..demos.securities.server import loopback
    from ..demos.securities.site import LiveSite
    from ..runtime.system_limits import usable_processors
    from ..timeline import files

    seconds = DEFAULT_LATENCY if latency is None else latency
    pool_options = {} if engine == "local" else {"engine": engine, "address": address, "retries": 3}
    host = _connect_to_ray(address) if engine == "ray" else "127.0.0.1"
    timelines: list[Timeline] = []

    def show(
        running: Iterable[experiments.ExperimentOutcome],
    ) -> list[experiments.ExperimentOutcome]:
        """Print a row for each outcome."""
        outcomes: list[experiments.ExperimentOutcome] = []
        click.echo(f"\n{report.HEADER}")
        for outcome in running:
            outcomes.append(outcome)
            click.echo(report.row(outcome, baseline=outcomes[0]))
        return outcomes

    try:
        with nullcontext(LiveSite()) if live else loopback(data, seconds, host) as site:
            wait = "" if live else f", {seconds:g} s before each answer"
            click.echo(f"Five lists of securities from {site.url}{wait}\n\n{report.LEGEND}")
            planned = experiments.plan(drones, threads, timelines, pool_options)
            outcomes = show(experiments.run(site, planned))
            pages = site.load_pages()
    except SourceError as error:
        raise click.ClickException(str(error)) from error
    click.echo(report.summary(outcomes))
    click.echo(report.computing_legend(outcomes[0]))
    ways = experiments.computing(pages, max(2, usable_processors()), pool_options)
    computations = experiments.run_in_turns(site, ways, experiments.COMPUTING_TURNS)
    show(computations)
    click.echo(f"\n{textwrap.fill(report.conclusion(outcomes, computations), report.WIDTH)}")
    if json_file is not None:
        result = json.dumps(report.as_json(outcomes, computations), indent=2)
        json_file.write_text(f"{result}\n", encoding="utf-8")
    if plot_file is not None:
        click.echo(f"\nThe combined run:\n{timelines[0]}")
        bars = report.bars(outcomes, computations)
        files.write(timelines[0], plot_file, "Five lists of securities", bars)
    same = report.equal(computations)
    if not same:
        click.echo("THE INDICATORS DIFFER")
    if not (same and report.equal(outcomes)):
        ctx.exit(1)


def _connect_to_ray(address: str | None) -> str:
    """Connect to Ray before times are measured; return this machine's address for the drones."""
    from ..pool.machine import find_machine

    find_machine("ray", {"address": address})
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def _check_plot(path: Path) -> None:
    from ..timeline import files

    try:
        files.check(path)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--plot") from error
