"""CommsTime, the benchmark of CSP: four processes pass a number round a ring, and each time round
it is one higher.

python examples/commstime.py [ROUNDS]

prefix ──> delta ──> consume
  ^          │
  └─ successor         what is measured is a round: four items handed over
"""

import argparse
import time

from polycephaly import green

Numbers = green.Channel[int]


async def prefix(first: int, come: Numbers, go: Numbers) -> None:
    await go.send(first)
    while True:
        await go.send(await come.receive())


async def delta(come: Numbers, one: Numbers, other: Numbers) -> None:
    while True:
        number = await come.receive()
        await one.send(number)
        await other.send(number)


async def successor(come: Numbers, go: Numbers) -> None:
    while True:
        await go.send(await come.receive() + 1)


async def consume(come: Numbers, rounds: int) -> list[int]:
    return [await come.receive() for _ in range(rounds)]


async def main(rounds: int) -> None:
    a, b, c, d = (Numbers() for _ in range(4))
    async with green.Group() as ring:
        ring.spawn(prefix, 0, c, a)
        ring.spawn(delta, a, b, d)
        ring.spawn(successor, b, c)
        print("it counts:", await consume(d, 5))
        began = time.perf_counter()
        await consume(d, rounds)
        seconds = time.perf_counter() - began
        print(f"{rounds} rounds: {seconds / rounds * 1e6:.2f} us each")
        ring.cancel()  # the three would go on for ever


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("rounds", nargs="?", type=int, default=20_000)
    green.run(main, options.parse_args().rounds)
