"""What green threads cost, beside Go (where it is installed), asyncio, gevent and trio (the `bench`
extra).

    python benchmarks/green.py [--runs N] [--quick] [--large] [--json FILE]

CommsTime, bytes for each of a million that wait, short foreign calls, and blocking calls that
overlap. Each figure is taken in a fresh process, the contenders in turn within each run, because
machines are shared and noisy: read the ratios, which are of the same run, and their spread. Where
something was promised, the table says whether it holds."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click

HERE = Path(__file__).parent
OURS = "polycephaly"
PATIENCE = 300  # seconds for each measurement

Run = dict[str, dict[str, float] | None]
"""The figures of each contender that was measured, None where it failed."""


@dataclass(frozen=True)
class Row:
    title: str
    contender: str
    n: int
    most: float | None = None  # the mark: of the figure, or of the ratio
    figure: str | None = None  # the section's, if not told

    @property
    def key(self) -> str:
        return f"{self.contender} {self.n}"


@dataclass(frozen=True)
class Section:
    title: str
    figure: str
    rows: tuple[Row, ...]
    beside: str | None = None  # the contender that the others are compared with
    marks_ratio: bool = False  # the marks are of the ratios


def sections(quick: bool, large: bool, has_go: bool) -> list[Section]:
    def times(n: int) -> int:
        return n // 10 if quick else n

    def others(kind: str, **rows: tuple[str, int]) -> tuple[Row, ...]:
        """Those that are installed."""
        return tuple(
            Row(title, f"{kind} {module}", n)
            for module, (title, n) in rows.items()
            if (has_go if module == "go" else find_spec(module.split()[0]))
        )

    million, fewer = times(1_000_000), times(100_000)
    found = [
        Section(
            "CommsTime, us an iteration" + (" (at most 3 times Go's)" if has_go else ""),
            "us",
            (
                Row(OURS, "commstime polycephaly", times(300_000), most=3.0 if has_go else None),
                *others("commstime", go=("Go", times(1_000_000))),
                Row("a bare loop, no more", "commstime floor", times(300_000)),
                Row("asyncio.Queue(1)", "commstime asyncio queue", times(30_000)),
                Row("asyncio, by hand", "commstime asyncio rendezvous", times(30_000)),
                *others(
                    "commstime", gevent=("gevent", times(30_000)), trio=("trio", times(20_000))
                ),
            ),
            beside="commstime go" if has_go else "commstime polycephaly",
            marks_ratio=True,
        )
    ]
    parked = (
        Row(f"{million:,} at an Event", "parked event", million, most=450),
        Row(f"{million:,} at one Channel", "parked channel", million, most=450),
        Row(f"{million:,} in sleep", "parked sleep", million, most=450),
        Row(f"{million:,}, a Channel each", "parked channels", million),
        Row(f"{fewer:,} asyncio tasks", "parked asyncio", fewer),
        *others(
            "parked",
            go=(f"{fewer:,} goroutines", fewer),
            gevent=(f"{fewer:,} greenlets (gevent)", fewer),
            trio=(f"{fewer:,} trio tasks", fewer),
        ),
    )
    found += [
        Section("Bytes for each that waits (at most 450)", "bytes", parked, beside="parked event"),
        Section(
            "... and then all answer, us each",
            "answer_us",
            tuple(_woken(parked)),
            beside="parked event",
        ),
    ]
    if large:
        n = times(10_000_000)
        found.append(
            Section(
                f"{n:,} at an Event, then all answer (gc.disable)",
                "bytes",
                (
                    Row("bytes each", "parked large", n, most=450),
                    Row("seconds until all wait", "parked large", n, figure="park_s"),
                    Row("seconds until all answered", "parked large", n, figure="answer_s"),
                ),
            )
        )
    calls, fewer = times(100_000), times(5_000)
    found.append(
        Section(
            f"{calls:,} short foreign calls (getpid by ctypes), us each "
            "(at most 3 times the bare loop)",
            "us",
            (
                Row("the bare loop", "calls bare", calls),
                Row("green.call", "calls polycephaly", calls, most=3.0),
                Row("green.call, 10 others ready", "calls polycephaly in company", calls),
                Row(f"asyncio.to_thread ({fewer:,})", "calls asyncio", fewer),
            ),
            beside="calls bare",
            marks_ratio=True,
        )
    )
    most = {2: 1.03, 100: 1.1, 10_000: 2.5}
    found.append(
        Section(
            "Sleeps of one second that overlap, seconds (at most 1.03, 1.1 and 2.5)",
            "s",
            (
                *(Row(f"{n:,} by green.call", "sleeps call", n, most[n]) for n in most),
                *(Row(f"{n:,} by green.spawn", "sleeps spawn", n, most[n]) for n in most),
                *(Row(f"{n:,} by asyncio.to_thread", "sleeps asyncio", n) for n in (2, 100)),
            ),
        )
    )
    return found


def _woken(rows: tuple[Row, ...]) -> list[Row]:
    return [Row(row.title, row.contender, row.n) for row in rows if row.contender != "parked sleep"]


def measure(row: Row, go: Path | None) -> dict[str, float] | None:
    kind, _, name = row.contender.partition(" ")
    if name == "go":
        command = [str(go), kind, str(row.n)]
    else:
        command = [sys.executable, str(HERE / "green_contenders.py"), row.contender, str(row.n)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        click.echo(f"{row.key} failed: no answer after {PATIENCE} s", err=True)
        return None
    if run.returncode:
        last = run.stderr.strip().rpartition("\n")[2]
        click.echo(f"{row.key} failed, exit code {run.returncode}: {last}", err=True)
        return None
    figures: dict[str, float] = json.loads(run.stdout)
    return figures


def one_run(found: list[Section], go: Path | None) -> Run:
    run: Run = {}
    for section in found:
        for row in section.rows:
            if row.key not in run:
                run[row.key] = measure(row, go)
    return run


def spread(figures: list[float], form: str) -> str:
    if not figures:
        return "failed"
    if len(figures) == 1:
        return format(figures[0], form)
    low, high = min(figures), max(figures)
    return f"{statistics.median(figures):{form}} ({low:{form}} to {high:{form}})"


def show(section: Section, runs: list[Run]) -> None:
    def figures(row: Row) -> list[float]:
        """One for each run; nan where it failed."""
        return [(run[row.key] or {}).get(row.figure or section.figure, math.nan) for run in runs]

    click.echo(section.title)
    reference = next((row for row in section.rows if row.contender == section.beside), None)
    for row in section.rows:
        got = figures(row)
        line = f"  {row.title:32s}{spread(known(got), '.0f' if max(got) >= 100 else '.2f'):28s}"
        marked = got
        if reference is not None:
            marked_against = figures(reference)
            ratios = [a / b for a, b in zip(got, marked_against, strict=True)]
            of = "ours" if reference.title == OURS else reference.title
            line += "" if row is reference else f"{spread(known(ratios), '.2f')} times {of}"
            if section.marks_ratio:
                marked = ratios
        if row.most is not None:
            held = bool(known(marked)) and statistics.median(known(marked)) <= row.most
            line += f"  [at most {row.most:g}: {'ok' if held else 'missed'}]"
        click.echo(line.rstrip())
    click.echo()


def known(figures: list[float]) -> list[float]:
    return [figure for figure in figures if not math.isnan(figure)]


@click.command(help=__doc__.partition("\n")[0])
@click.option(
    "--runs",
    default=5,
    show_default=True,
    type=click.IntRange(1),
    help="How often each is measured.",
)
@click.option("--quick", is_flag=True, help="A tenth of the work, except for the sleeps.")
@click.option("--large", is_flag=True, help="Ten million green threads as well (some 8 GB).")
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, writable=True),
    help="Write all figures to this file.",
)
def main(runs: int, quick: bool, large: bool, file: str | None) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        go = None
        if shutil.which("go"):
            go = Path(scratch) / "green"
            subprocess.run(["go", "build", "-o", str(go), str(HERE / "green.go")], check=True)
        found = sections(quick, large, has_go=go is not None)
        with click.progressbar(range(runs), file=sys.stderr, label="runs") as counted:
            took = [one_run(found, go) for _ in counted]

    python = ".".join(map(str, sys.version_info[:3]))
    click.echo(f"{runs} runs, {os.cpu_count()} cores, CPython {python}: median (min to max)\n")
    for section in found:
        show(section, took)
    if file:
        Path(file).write_text(
            json.dumps({"python": python, "cores": os.cpu_count(), "runs": took}, indent=1)
        )


if __name__ == "__main__":
    main()
