"""What `green.call.batch` saves: python -m benchmarks.wrapped [--runs N]

The same requests of so many green threads, by one foreign call each and by one for all who wait, in
turn within each run: rows into sqlite, on disk (a transaction is a crossing) and in memory, and
small files read. "In place" is `green.call`, which costs no switch of threads; "away" is
`green.call_long`, on other native threads."""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from polycephaly import green

REQUESTS = 1000
Ask = Callable[[Any], Awaitable[Any]]


async def us_each(ask: Ask, requests: list[Any]) -> float:
    async def asks(request: Any) -> None:
        await ask(request)

    began = time.perf_counter()
    await green.par(*(asks(each) for each in requests))
    return (time.perf_counter() - began) / len(requests) * 1e6


async def inserts(target: str) -> dict[str, float]:
    rows = [(n,) for n in range(REQUESTS)]
    with closing(sqlite3.connect(target, check_same_thread=False)) as db:
        db.execute("create table if not exists rows (n integer)")

        def insert(row: tuple[int]) -> None:
            with db:
                db.execute("insert into rows values (?)", row)

        def insert_all(rows: list[tuple[int]]) -> None:
            with db:
                db.executemany("insert into rows values (?)", rows)

        lock = (
            green.Lock()
        )  # or one transaction would begin within another, whenever a call is taken over

        async def one(row: tuple[int]) -> None:
            async with lock:
                await green.call(insert, row)

        together = green.call.batch(insert_all)
        return {"in place": await us_each(one, rows), "together": await us_each(together, rows)}


async def reads(folder: Path) -> dict[str, float]:
    paths = [folder / str(n) for n in range(REQUESTS)]
    for path in paths:
        path.write_bytes(b"x" * 100)
    together: Ask = green.call.batch(lambda paths: [path.read_bytes() for path in paths])
    return {
        "in place": await us_each(lambda path: green.call(path.read_bytes), paths),
        "away": await us_each(lambda path: green.call_long(path.read_bytes), paths),
        "together": await us_each(together, paths),
    }


async def one_run(folder: Path) -> dict[str, dict[str, float]]:
    return {
        "rows into sqlite on disk": await inserts(str(folder / "rows.db")),
        "rows into sqlite in memory": await inserts(":memory:"),
        "files of 100 bytes read": await reads(folder),
    }


def spread(figures: list[float]) -> str:
    return f"{statistics.median(figures):7.2f} ({min(figures):.2f} to {max(figures):.2f})"


@click.command(help=__doc__.partition("\n")[0])
@click.option("--runs", default=5, show_default=True, type=click.IntRange(1))
def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        taken = [green.run(one_run, Path(folder)) for _ in range(runs)]
    click.echo(
        f"{runs} runs of {REQUESTS:,} green threads, us for each request: median (min to max)"
    )
    for what in taken[0]:
        click.echo(what)
        together = [run[what]["together"] for run in taken]
        for way in taken[0][what]:
            figures = [run[what][way] for run in taken]
            ratios = [a / b for a, b in zip(figures, together, strict=True)]
            beside = "" if way == "together" else f"{spread(ratios)} times together"
            click.echo(f"  {way:10s}{spread(figures):32s}{beside}".rstrip())


if __name__ == "__main__":
    main()
