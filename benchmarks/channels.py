"""What it costs to hand something over: in one image, from drone to drone, and beside
`multiprocessing`.

    python -m benchmarks.channels [--runs N] [--items N]

    there and back   a number goes to the other side, which sends it back, by two channels (pipes,
    queues): half of that one way          many numbers, one after the other; the time until the
    last one is there

All are taken in each run, in turn: read the ratios, the machine is shared. Microseconds for one
item handed over."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import click

import polycephaly as poly
from polycephaly import green

Numbers = green.Channel[int]


async def echo(come: Numbers, back: Numbers, n: int) -> None:
    for _ in range(n):
        await back.send(await come.receive())


async def ask(come: Numbers, back: Numbers, n: int) -> float:
    began = 0.0
    for i in range(n + WARM):
        if i == WARM:
            began = time.perf_counter()
        await come.send(i)
        assert await back.receive() == i
    return (time.perf_counter() - began) / n / 2 * 1e6


async def send(ch: Numbers, n: int) -> None:
    for i in range(n):
        await ch.send(i)


async def take(ch: Numbers, n: int) -> float:
    for _ in range(WARM):
        await ch.receive()
    began = time.perf_counter()
    for _ in range(n):
        await ch.receive()
    return (time.perf_counter() - began) / n * 1e6


WARM = 20


def in_one_image(n: int, capacity: int, both_ways: bool) -> float:
    async def main() -> float:
        a, b = Numbers(capacity), Numbers(capacity)
        if both_ways:
            green.spawn(echo, a, b, n + WARM)
            return await ask(a, b, n)
        green.spawn(send, a, n + WARM)
        return await take(a, n)

    return green.run(main)


def in_two_drones(n: int, capacity: int, both_ways: bool, home: str) -> float:
    """`home`: in whose image the channels are: the sender's, the receiver's, or the main image."""
    with poly.Pool(2) as pool:
        one, other = pool.drones
        of_receiver: dict[str, Any] = {
            "receiver": (other, one),
            "sender": (one, other),
            "main": (None, None),
        }
        a, b = (
            Numbers(capacity) if at is None else at.doit(green.Channel, capacity)
            for at in of_receiver[home]
        )
        if both_ways:
            other.promise(echo, a, b, n + WARM)
            return one.doit(ask, a, b, n)
        one.promise(send, a, n + WARM)
        return other.doit(take, a, n)


def in_two_processes(n: int, both_ways: bool, kind: str) -> float:
    context = multiprocessing.get_context("fork")
    if kind == "Pipe":
        ours, theirs = context.Pipe()
        put, get, there_get, there_put = ours.send, ours.recv, theirs.recv, theirs.send
    elif kind == "Queue":
        go, back = context.Queue(), context.Queue()
        put, get, there_get, there_put = go.put, back.get, go.get, back.put
    else:
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        put, get = lambda _: one.send(b"12345678"), lambda: one.recv(64)
        there_get, there_put = lambda: two.recv(64), lambda _: two.send(b"12345678")

    def child() -> None:
        for i in range(n + WARM):
            if both_ways:
                there_put(there_get())
            else:
                there_put(i)

    process = context.Process(target=child)
    process.start()
    began = 0.0
    for i in range(n + WARM):
        if i == WARM:
            began = time.perf_counter()
        if both_ways:
            put(i)
        get()
    took = (time.perf_counter() - began) / n * 1e6
    process.join()
    return took / 2 if both_ways else took


def contenders(n: int) -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {}
    for both, way in ((True, "there and back"), (False, "one way")):
        found[f"{way}: rendezvous, one image"] = lambda both=both: in_one_image(20 * n, 0, both)
        for home in ("receiver", "sender", "main"):
            found[f"{way}: rendezvous, drone to drone, home: {home}"] = (
                lambda both=both, home=home: in_two_drones(n, 0, both, home)
            )
        if both:
            found[f"{way}: socket pair, blocking, bare bytes"] = lambda: in_two_processes(
                n, True, "socketpair"
            )
        else:
            found[f"{way}: buffer of 256, one image"] = lambda: in_one_image(20 * n, 256, False)
            for home in ("receiver", "sender", "main"):
                found[f"{way}: buffer of 256, drone to drone, home: {home}"] = lambda home=home: (
                    in_two_drones(5 * n, 256, False, home)
                )
        for kind in ("Pipe", "Queue"):
            found[f"{way}: multiprocessing.{kind}"] = lambda both=both, kind=kind: in_two_processes(
                5 * n, both, kind
            )
    return found


@click.command(help=__doc__.partition("\n")[0] if __doc__ else None)
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--items", type=click.IntRange(1), default=1000, show_default=True, help="In the slowest cases."
)
def main(runs: int, items: int) -> None:
    took: dict[str, list[float]] = {name: [] for name in contenders(items)}
    for _ in range(runs):
        for name, measure in contenders(items).items():
            took[name].append(measure())
    print(f"{'microseconds an item, median (min to max)':62}")
    for name, figures in took.items():
        print(
            f"{name:62}{statistics.median(figures):8.1f}"
            f"  ({min(figures):.1f} to {max(figures):.1f})"
        )


if __name__ == "__main__":
    main()
