"""What a node of a graph costs beside a plain task: python -m benchmarks.flow [--runs N] [--nodes
N]

Two graphs, each beside as many plain tasks of the same function with the same kind of arguments,
taken in turns:

    no-ops     a sheet, each row 2,500 nodes wide; each node waits for two of the row before tiles
    a blocked matrix product: C[i, j] += A[i, k] @ B[k, j], a chain for each tile of C; numpy, 16 x
    16

A ratio is taken within each run. What the drones do is the same for both, so the rest is what a
graph costs."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click
import numpy as np

import polycephaly as poly

DRONES = 2
WIDTH = 2500
SIDE = 16


def noop(x: int, y: int) -> int:
    return x


def add(c: Any, a: Any, b: Any) -> Any:
    return c + a @ b


node, add_node = poly.flow(noop), poly.flow(add)


def seconds(make: Callable[[], Sequence[poly.Promise[Any]]], wanted: Any) -> float:
    gc.collect()
    began = time.perf_counter()
    values = [promise.result() for promise in make()]
    taken = time.perf_counter() - began
    assert np.array_equal(values[-1], wanted)
    return taken


def plain(pool: poly.Pool, nodes: int) -> list[poly.Promise[Any]]:
    return [pool.promise(noop, i, i) for i in range(nodes)]


def without_inputs(nodes: int) -> list[poly.Promise[Any]]:
    return [node(i, i) for i in range(nodes)]


def sheet(nodes: int) -> list[poly.Promise[Any]]:
    row = [node(i, i) for i in range(WIDTH)]
    for _ in range(nodes // WIDTH - 1):
        row = [node(row[i], row[i - 1]) for i in range(WIDTH)]
    return row


def product(add: Callable[..., Any], tiles: int, chained: bool) -> list[poly.Promise[Any]]:
    one, zero = np.ones((SIDE, SIDE)), np.zeros((SIDE, SIDE))
    c: Any = [zero] * tiles**2
    made = []
    for _ in range(tiles):
        new = [add(each, one, one) for each in c]
        made = new if chained else made + new
        c = new if chained else c
    return made


def show(name: str, per: list[float], beside: list[float] | None = None) -> None:
    text = f"{name:44} {statistics.median(per):7.2f} ({min(per):.2f} to {max(per):.2f})"
    if beside is not None:
        ratios = [one / other for one, other in zip(per, beside, strict=True)]
        text += f"   {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"
    click.echo(text)


@click.command()
@click.option("--runs", default=5, show_default=True, help="How often each is measured.")
@click.option(
    "--nodes", default=100_000, show_default=True, help="How many there are of each, about."
)
def main(runs: int, nodes: int) -> None:
    """Prints microseconds a node: median, least and most of the runs, and the ratio to the plain
    task."""
    nodes = max(1, nodes // WIDTH) * WIDTH
    tiles = round(nodes ** (1 / 3))
    found: dict[str, list[float]] = {}

    def note(
        name: str, count: int, make: Callable[[], Sequence[poly.Promise[Any]]], wanted: Any
    ) -> None:
        found.setdefault(name, []).append(seconds(make, wanted) / count * 1e6)

    one = np.full((SIDE, SIDE), float(SIDE))
    with poly.Pool(DRONES) as pool:
        seconds(lambda: plain(pool, nodes), nodes - 1)
        for _ in range(runs):
            note("plain no-ops", nodes, lambda: plain(pool, nodes), nodes - 1)
            note("nodes whose inputs are there", nodes, lambda: without_inputs(nodes), nodes - 1)
            note("nodes that wait for two others", nodes, lambda: sheet(nodes), WIDTH - 1)
            note(
                "plain products of tiles",
                tiles**3,
                lambda: product(partial(pool.promise, add), tiles, False),
                one,
            )
            note(
                "nodes of a blocked matrix product",
                tiles**3,
                lambda: product(add_node, tiles, True),
                tiles * one,
            )
    click.echo(
        f"{os.cpu_count()} cores, {DRONES} drones, {nodes:,} nodes and {tiles**3:,}; "
        "microseconds a node"
    )
    show("plain no-ops", found["plain no-ops"])
    for name in ("nodes whose inputs are there", "nodes that wait for two others"):
        show(name, found[name], found["plain no-ops"])
    show("plain products of tiles", found["plain products of tiles"])
    show(
        "nodes of a blocked matrix product",
        found["nodes of a blocked matrix product"],
        found["plain products of tiles"],
    )


if __name__ == "__main__":
    main()
