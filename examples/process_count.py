"""How many processes fit? The program by which JVMCSP's authors ran 480,900,001 of them on one
core.

    python examples/process_count.py [N]        doubles the number of pairs up to N

For each i: a process, with two channels, that runs foo and bar; each of these runs two more, which
exchange a number with the other's two. So there are 7 for each i, and `main`. The queue is first
in, first out: before the first of the innermost ones runs, all of them are there."""

import argparse
import os
import time

from polycephaly import green

Numbers = green.Channel[int]


def resident() -> int:
    """Bytes of memory that this image has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


BEFORE = resident()


class Census:
    """Taken by the first of the innermost processes: `bytes` of memory more than when the program
    began."""

    def __init__(self) -> None:
        self.exchanged = 0
        self.bytes = 0

    def take(self) -> None:
        self.bytes = self.bytes or resident() - BEFORE


async def foo(come: Numbers, go: Numbers, census: Census) -> None:
    await green.par(read(come, 20, census), write(go, 10))


async def bar(come: Numbers, go: Numbers, census: Census) -> None:
    await green.par(read(come, 10, census), write(go, 20))


async def read(come: Numbers, expected: int, census: Census) -> None:
    census.take()
    assert await come.receive() == expected
    census.exchanged += 1


async def write(go: Numbers, number: int) -> None:
    await go.send(number)


async def pair(census: Census) -> None:
    c1, c2 = Numbers(), Numbers()
    await green.par(foo(c1, c2, census), bar(c2, c1, census))


async def main(n: int) -> None:
    census = Census()
    began = time.perf_counter()
    await green.par(*(pair(census) for _ in range(n)))
    seconds = time.perf_counter() - began
    assert census.exchanged == 2 * n
    live = 7 * n + 1
    print(f"{live} processes: {census.bytes / live:.0f} bytes each, {seconds:.2f} s")


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("n", nargs="?", type=int, default=2000)
    chosen = options.parse_args()
    n = min(chosen.n, 500)
    while n <= chosen.n:
        green.run(main, n)
        n *= 2
