"""What tasks, arrays and starting cost, beside the standard library's pools and whoever else is
installed.

    python -m benchmarks [--runs N] [--only NAME,...] [--peers NAME,...] [--quick] [--json FILE]
                         [--html [FILE]]
    python -m benchmarks --against CHECKOUT|NAME [--runs N] [--only NAME,...] [--json FILE]

Each figure is taken in a fresh process, so that what one peer starts or loads disturbs no other,
and the peers take turns within each run, because machines are shared and noisy: read the ratios,
which are of the same run, and their spread. Above 1 the peer takes longer. A pool whose users
choose the size of chunks is measured with the best of three.

With `--against`, this checkout and another one (or a peer) take turns, and the table tells which
rows are slower, from fifteen pairs."""

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
from .pairs import CHECKOUT, comparable
from .pairs import table as pairs_table
from .peers import FLOORS, OURS, PEERS
from .suite import FULL, QUICK, SUITE, WORKERS, Figures, Sizes
from .table import Run, table

ROOT = Path(__file__).parents[1]
PATIENCE = 300  # seconds for each figure
STANDARD = ("multiprocessing", "futures")


class Taker:
    """Takes figures in fresh processes, and remembers what could not be taken."""

    def __init__(self, scratch: str, checkout: Path | None = None) -> None:
        self._roots = {CHECKOUT: ROOT if checkout is None else _with_ours(checkout, scratch)}
        places = dict.fromkeys(("TMPDIR", "RAY_TMPDIR", "IPYTHONDIR"), scratch)
        self.environment = {
            **os.environ,
            **places,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPYCACHEPREFIX": f"{scratch}/compiled",
        }
        # Starts are measured with compiled modules, as an installed package has them.
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for root in {ROOT, *self._roots.values()}:
            command = [sys.executable, "-m", "compileall", "-q", str(root / "polycephaly")]
            subprocess.run(command, env=self.environment, check=True)
        self.notes: dict[str, None] = {}  # in their order, each once

    def take(self, name: str, peer: str, sizes: Sizes) -> Figures | None:
        command = [
            sys.executable,
            "-m",
            f"{__package__}.alone",
            name,
            OURS if peer == CHECKOUT else peer,
            json.dumps(asdict(sizes)),
        ]
        root = str(self._roots.get(peer, ROOT))
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                cwd=root,  # which Python puts before PYTHONPATH
                env={**self.environment, "PYTHONPATH": path},
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
            self.notes[f"{name}, {_title(peer)}: failed, {why}: {last}"] = None
            return None
        figures: dict[str, Any] = json.loads(answer)
        if "skipped" in figures:
            self.notes[f"{name}, {_title(peer)}: skipped, {figures['skipped']}"] = None
            return None
        return figures


def _title(peer: str) -> str:
    return "the checkout" if peer == CHECKOUT else PEERS[peer].title


def _with_ours(checkout: Path, scratch: str) -> Path:
    """Return a directory with the package of the other checkout and these benchmarks."""
    root = Path(scratch, "checkout")
    root.mkdir()
    (root / "polycephaly").symlink_to(checkout.resolve() / "polycephaly")
    (root / "benchmarks").symlink_to(ROOT / "benchmarks")
    return root


def one_run(taker: Taker, names: list[str], peers: list[str], sizes: Sizes, turn: int) -> Run:
    run: Run = {}
    for name in names:
        known = (*SUITE[name].peers, CHECKOUT)
        contenders = [OURS, *(peer for peer in known if peer in peers)]
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
        {
            "polycephaly-drones",
            *("numpy", "pyzmq", "cloudpickle"),
            *(PEERS[peer].module for peer in peers if peer != CHECKOUT),
        }
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


def _other(against: str, peers: list[str]) -> tuple[Path | None, str]:
    """Return the checkout, if it is one, and the contender's name."""
    if against in peers:
        if not PEERS[against].installed:
            raise click.UsageError(f"{PEERS[against].title} is not installed")
        return None, against
    if not Path(against, "polycephaly", "__init__.py").is_file():
        raise click.UsageError(
            f"{against!r} is neither a checkout of this project nor one of {', '.join(peers)}"
        )
    return Path(against), CHECKOUT


@click.command(help=__doc__.partition("\n")[0] if __doc__ else None)
@click.option(
    "--runs",
    type=click.IntRange(1),
    help="How often each is measured. [default: 5; --against: 15; quick: 1]",
)
@click.option("--only", metavar="NAME,...", help=f"These measurements: {', '.join(SUITE)}.")
@click.option(
    "--peers",
    "given",
    metavar="NAME,...",
    help=f"These peers: {', '.join(p for p in PEERS if p != OURS)}.",
)
@click.option(
    "--against",
    metavar="CHECKOUT|NAME",
    help="Compare with another checkout of this project, or with one peer, in alternating pairs.",
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
    against: str | None,
    quick: bool,
    seed: int,
    file: str | None,
    page: Path | None,
) -> None:
    if page and find_spec("matplotlib") is None:  # before the figures are taken
        raise click.UsageError("--html needs matplotlib: pip install '.[bench]'")
    names = chosen(only, list(SUITE), "measurement")
    others = [peer for peer in PEERS if peer not in (OURS, *FLOORS)]
    checkout = other = None
    if against is not None:
        if given or page:
            raise click.UsageError("--against compares with one: without --peers and --html")
        checkout, other = _other(against, others)
        names = comparable(names, other)
        wanted, peers = [], [other]
    else:
        wanted = chosen(given, others, "peer") if given or not quick else list(STANDARD)
        peers = [*(peer for peer in wanted if PEERS[peer].installed), *FLOORS]
    sizes = QUICK if quick else FULL
    about = machine(peers)
    took: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="b-", ignore_cleanup_errors=True) as scratch:
        taker = Taker(scratch, checkout)
        runs = runs or (1 if quick else 15 if other else 5)
        with click.progressbar(range(runs), file=sys.stderr, label="runs") as turns:
            for turn in turns:
                took.append(one_run(taker, names, peers, replace(sizes, seed=seed + turn), turn))

    conditions = (
        f"{len(took)} {'pairs' if other else 'runs'}, {WORKERS} workers, {about['cores']} cores, "
        f"Linux {about['kernel']}, "
        f"CPython {about['python']}, seeds {seed} to {seed + len(took) - 1}"
        f"{', tiny sizes' if quick else ''}"
    )
    if other is None:
        text, figures = table(took, sizes), "median (min to max)"
    else:
        text = pairs_table(took, sizes, other, _title(other))
        figures = "median (95 % interval)"
    click.echo(f"{conditions}: {figures}\n\n{text}")
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
