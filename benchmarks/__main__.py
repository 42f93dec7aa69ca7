"""What tasks, arrays and starting cost, beside the standard library's pools and whoever else is
installed.

    python -m benchmarks [--runs N] [--only NAME,...] [--peers NAME,...] [--quick] [--json FILE]
                         [--html [FILE]]

Each figure is taken in a fresh process, so that what one peer starts or loads disturbs no other,
and the peers take turns within each run, because machines are shared and noisy: read the ratios,
which are of the same run, and their spread. Where something was promised, the table says whether
its median holds. A mark that is missed is not an error."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from .memory import descendants
from .peers import FLOORS, OURS, PEERS
from .suite import FULL, QUICK, SUITE, WORKERS, Figures, Sizes
from .table import Run, table

ROOT = Path(__file__).parents[1]
PATIENCE = 300  # seconds for each figure
STANDARD = ("multiprocessing", "futures")


class Taker:
    """Takes figures in fresh processes, and remembers what could not be taken."""

    def __init__(self, scratch: str) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        places = dict.fromkeys(("TMPDIR", "RAY_TMPDIR", "IPYTHONDIR"), scratch)
        self.environment = {
            **os.environ,
            **places,
            "PYTHONPATH": path,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.notes: dict[str, None] = {}  # in their order, each once

    def take(self, name: str, peer: str, sizes: Sizes) -> Figures | None:
        command = [
            sys.executable,
            "-m",
            f"{__package__}.alone",
            name,
            peer,
            json.dumps(asdict(sizes)),
        ]
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=self.environment,
                start_new_session=True,
            )
            try:
                answer, _ = process.communicate(timeout=PATIENCE)
                why = f"exit code {process.returncode}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                answer, why = "", f"no answer after {PATIENCE} s"
            finally:
                # Of a Ctrl-C too: it does not come to another session, and some peers' workers have
                # their own.
                for pid in (
                    (process.pid, *descendants(process.pid)) if process.poll() is None else ()
                ):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
            said.seek(0)
            last = said.read().strip().rpartition("\n")[2]
        if why or not answer:
            self.notes[f"{name}, {PEERS[peer].title}: failed, {why}: {last}"] = None
            return None
        figures: dict[str, Any] = json.loads(answer)
        if "skipped" in figures:
            self.notes[f"{name}, {PEERS[peer].title}: skipped, {figures['skipped']}"] = None
            return None
        return figures


def one_run(taker: Taker, names: list[str], peers: list[str], sizes: Sizes, turn: int) -> Run:
    run: Run = {}
    for name in names:
        contenders = [OURS, *(peer for peer in SUITE[name].peers if peer in peers)]
        first = turn % len(contenders)  # in each run another begins
        run[name] = {}
        for peer in contenders[first:] + contenders[:first]:
            figures = taker.take(name, peer, sizes)
            if figures is not None:
                run[name][peer] = figures
    return run


def machine(peers: list[str]) -> dict[str, Any]:
    versions = {}
    for package in sorted(
        {OURS, "numpy", "pyzmq", "cloudpickle", *(PEERS[peer].module for peer in peers)}
    ):
        with contextlib.suppress(PackageNotFoundError):  # the standard library's have none
            versions[package] = version(package)
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "versions": versions,
    }


def chosen(given: str | None, known: list[str], what: str) -> list[str]:
    names = given.split(",") if given else known
    for name in names:
        if name not in known:
            raise click.UsageError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    return names


@click.command(help=__doc__.partition("\n")[0] if __doc__ else None)
@click.option(
    "--runs", type=click.IntRange(1), help="How often each is measured. [default: 5; quick: 1]"
)
@click.option("--only", metavar="NAME,...", help=f"These measurements: {', '.join(SUITE)}.")
@click.option(
    "--peers",
    "given",
    metavar="NAME,...",
    help=f"These peers: {', '.join(p for p in PEERS if p != OURS)}.",
)
@click.option(
    "--quick", is_flag=True, help="Tiny sizes, the standard library's pools: does it run at all?"
)
@click.option(
    "--seed", default=1, show_default=True, help="Of the mixed tasks' places in the first run."
)
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, writable=True),
    help="Write all figures to this file.",
)
@click.option(
    "--html",
    "page",
    is_flag=False,
    flag_value="benchmarks.html",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write a page with a picture of each row; only the pictures if the name ends with .svg. "
    "Needs matplotlib.  [without FILE: benchmarks.html]",
)
def main(
    runs: int | None,
    only: str | None,
    given: str | None,
    quick: bool,
    seed: int,
    file: str | None,
    page: Path | None,
) -> None:
    if page and find_spec("matplotlib") is None:  # before the figures are taken
        raise click.UsageError("--html needs matplotlib: pip install '.[bench]'")
    names = chosen(only, list(SUITE), "measurement")
    others = [peer for peer in PEERS if peer not in (OURS, *FLOORS)]
    wanted = chosen(given, others, "peer") if given or not quick else list(STANDARD)
    peers = [*(peer for peer in wanted if PEERS[peer].installed), *FLOORS]
    sizes = QUICK if quick else FULL
    about = machine(peers)
    took: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="b-", ignore_cleanup_errors=True) as scratch:
        taker = Taker(scratch)
        with click.progressbar(
            range(runs or (1 if quick else 5)), file=sys.stderr, label="runs"
        ) as turns:
            for turn in turns:
                took.append(one_run(taker, names, peers, replace(sizes, seed=seed + turn), turn))

    conditions = (
        f"{len(took)} runs, {WORKERS} workers, {about['cores']} cores, Linux {about['kernel']}, "
        f"CPython {about['python']}, seeds {seed} to {seed + len(took) - 1}"
        f"{', tiny sizes' if quick else ''}"
    )
    text = table(took, sizes)
    click.echo(f"{conditions}: median (min to max)\n\n{text}")
    if page:
        from .page import write  # an import of matplotlib

        write(page, took, sizes, conditions, text)
    missing = [PEERS[peer].title for peer in wanted if not PEERS[peer].installed]
    for note in [*taker.notes, *(f"{title}: not installed" for title in missing)]:
        click.echo(note)
    if file:
        everything = {
            "machine": about,
            "sizes": asdict(sizes),
            "seed": seed,
            "runs": took,
            "notes": list(taker.notes),
        }
        Path(file).write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
