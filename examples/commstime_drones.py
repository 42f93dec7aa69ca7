"""CommsTime with its four processes in four drones: the code is that of commstime.py, the channels
now cross images.

    python examples/commstime_drones.py [ROUNDS]

    prefix ──> delta ──> consume
      ^          │
      └─ successor         what is measured is a round: four items handed over, each from one image
                           to another

A channel lives in the image that makes it, and whoever sends goes there directly. So each is made
by who receives."""

import argparse
import time

from commstime import Numbers, delta, prefix, successor

import polycephaly as poly
from polycephaly import green


async def consume(come: Numbers, rounds: int) -> tuple[list[int], float]:
    first = [await come.receive() for _ in range(5)]
    began = time.perf_counter()
    for _ in range(rounds):
        await come.receive()
    return first, time.perf_counter() - began


def main(rounds: int) -> None:
    with poly.Pool(4) as pool:
        at_prefix, at_delta, at_successor, at_consume = pool.drones
        a, b, c, d = (
            drone.doit(green.Channel) for drone in (at_delta, at_successor, at_prefix, at_consume)
        )
        at_prefix.promise(prefix, 0, c, a)
        at_delta.promise(delta, a, b, d)
        at_successor.promise(successor, b, c)
        first, seconds = at_consume.doit(consume, d, rounds)
        for drone in pool.drones[:3]:
            drone.interrupt()  # the three would go on for ever
    print("it counts:", first)
    print(f"{rounds} rounds: {seconds / rounds * 1e6:.0f} us each")


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("rounds", nargs="?", type=int, default=1000)
    main(options.parse_args().rounds)
