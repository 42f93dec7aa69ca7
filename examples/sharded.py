"""The program of process_count.py over the drones of a pool: with two of them, twice the processes
of one image.

    python examples/sharded.py [N] [DRONES]        N pairs of seven processes in each image

What changes is ``over=pool``. The processes of a pair meet inside their drone; each drone also has
one that tells its census through a channel which lives here."""

import argparse
import os
import time

import polycephaly as poly
from polycephaly import green

Numbers = green.Channel[int]


def resident() -> int:
    """Bytes of memory that this image has for itself."""
    with open("/proc/self/smaps_rollup") as kinds:
        return sum(int(line.split()[1]) * 1024 for line in kinds if line.startswith("Private_"))


class Census:
    """One of each image: how many have exchanged their numbers, and the memory when all were
    there."""

    def __init__(self) -> None:
        self.before = resident()
        self.bytes = 0
        self.exchanged = 0

    def take(self) -> None:
        self.bytes = self.bytes or resident() - self.before


async def foo(come: Numbers, go: Numbers) -> None:
    await green.par(read(come, 20), write(go, 10))


async def bar(come: Numbers, go: Numbers) -> None:
    await green.par(read(come, 10), write(go, 20))


async def read(come: Numbers, expected: int) -> None:
    census.take()
    assert await come.receive() == expected
    census.exchanged += 1


async def write(go: Numbers, number: int) -> None:
    await go.send(number)


async def pair() -> None:
    c1, c2 = Numbers(), Numbers()
    await green.par(foo(c1, c2), bar(c2, c1))


def begin() -> None:
    global census
    census = Census()


async def tell(reports: green.Channel[tuple[int, int, int]]) -> None:
    await reports.send((os.getpid(), census.exchanged, census.bytes))


async def collect(
    reports: green.Channel[tuple[int, int, int]], drones: int
) -> list[tuple[int, int, int]]:
    return [await reports.receive() for _ in range(drones)]


def main(n: int, drones: int) -> None:
    begin()
    began = time.perf_counter()
    green.par(*[pair] * n)
    one = time.perf_counter() - began
    live = 7 * n
    print(f"one image: {live} processes, {census.bytes / live:.0f} bytes each, {one:.2f} s")

    with poly.Pool(drones, initializer=begin) as pool:
        pool.everywhere("None")[-1].result()  # all of them are there
        reports: green.Channel[tuple[int, int, int]] = green.Channel()
        collected = green.spawn(collect, reports, drones)
        began = time.perf_counter()
        green.par(*[pair] * (n * drones), over=pool)
        seconds = time.perf_counter() - began
        for drone in pool.drones:
            drone.doit(tell, reports)
        told = collected.value
    assert len({pid for pid, _, _ in told}) == drones
    assert all(exchanged == 2 * n for _, exchanged, _ in told)
    each = sum(size for _, _, size in told) / (live * drones)
    print(f"{drones} drones: {live * drones} processes, {each:.0f} bytes each, {seconds:.2f} s")


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("n", nargs="?", type=int, default=1000)
    options.add_argument("drones", nargs="?", type=int, default=2)
    chosen = options.parse_args()
    main(chosen.n, chosen.drones)
