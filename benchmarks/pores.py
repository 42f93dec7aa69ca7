"""What a pore saves: python -m benchmarks.pores [--runs N]

N writers in as many drones make 1,000 writes of S bytes each into one block of memory, and its
owner, this image, is told of every one (LING's benchmark of its pores).

    pore     the writer writes into the pore's memory, which tells the owner; the owner receives N x
    1,000 messages tasks    each write is a task: `pool.submit` with the bytes as its result, which
    the owner writes where they belong call     each writer is one task, which gives all its bytes
    at its end: the owner hears of nothing before that

The pool is the same for all, its drones have started, and they take turns within each run: read the
ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click

import polycephaly as poly

WRITES = 1000


def write_all(pore: poly.Pore, place: int, size: int) -> None:
    data = bytes([place + 1]) * size
    for _ in range(WRITES):
        pore.write(place * size, data)


def one_write(place: int, size: int) -> tuple[int, bytes]:
    return place, bytes([place + 1]) * size


def all_writes(place: int, size: int) -> list[tuple[int, bytes]]:
    return [one_write(place, size) for _ in range(WRITES)]


def by_pore(pool: poly.Pool, writers: int, size: int) -> memoryview:
    with poly.Pore(writers * size) as pore:
        done = [pool.submit(write_all, pore, place, size) for place in range(writers)]
        for _ in range(writers * WRITES):
            pore.get()
        for each in done:
            each.result()
        return pore.memory


def by_tasks(pool: poly.Pool, writers: int, size: int) -> memoryview:
    memory = memoryview(bytearray(writers * size))
    tasks = [pool.submit(one_write, place, size) for place in range(writers) for _ in range(WRITES)]
    for each in poly.as_completed(tasks):
        place, data = each.result()
        memory[place * size : (place + 1) * size] = data
    return memory


def by_call(pool: poly.Pool, writers: int, size: int) -> memoryview:
    memory = memoryview(bytearray(writers * size))
    for each in poly.as_completed(
        [pool.submit(all_writes, place, size) for place in range(writers)]
    ):
        for place, data in each.result():
            memory[place * size : (place + 1) * size] = data
    return memory


WAYS: dict[str, Callable[[poly.Pool, int, int], memoryview]] = {
    "pore": by_pore,
    "tasks": by_tasks,
    "call": by_call,
}


def us_each(way: str, pool: poly.Pool, writers: int, size: int) -> float:
    began = time.perf_counter()
    memory = WAYS[way](pool, writers, size)
    took = time.perf_counter() - began
    assert memory == b"".join(bytes([place + 1]) * size for place in range(writers))
    return took / (writers * WRITES) * 1e6


def spread(figures: list[float]) -> str:
    return f"{statistics.median(figures):.2f} ({min(figures):.2f} to {max(figures):.2f})"


@click.command(help=__doc__.partition("\n")[0])
@click.option("--runs", default=5, show_default=True, type=click.IntRange(1))
def main(runs: int) -> None:
    click.echo(f"{runs} runs, us for each write: median (min to max)")
    click.echo(f"{'N':>3s} {'S':>4s}  " + "".join(f"{way:28s}" for way in WAYS) + "tasks / pore")
    for writers in (1, 5, 10, 25):
        with poly.Pool(writers) as pool:
            for each in pool.everywhere("import numpy"):
                each.result()
            for size in (1, 100):
                for way in WAYS:
                    us_each(way, pool, writers, size)
                taken = [
                    {way: us_each(way, pool, writers, size) for way in WAYS} for _ in range(runs)
                ]
                columns = "".join(f"{spread([run[way] for run in taken]):28s}" for way in WAYS)
                ratios = spread([run["tasks"] / run["pore"] for run in taken])
                click.echo(f"{writers:3d} {size:4d}  {columns}{ratios}")


if __name__ == "__main__":
    main()
