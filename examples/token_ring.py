"""A token goes round a ring of drones, each of which has the channel to the next.

python examples/token_ring.py [DRONES] [ROUNDS]

drone 0 ──> drone 1 ──> ... ──> drone n-1      one connection between neighbours,
  ^                                  │         and none that all share
  └──────────────────────────────────┘
"""

import argparse
import time

import polycephaly as poly
from polycephaly import green

Ring = green.Channel[int]


async def station(come: Ring, go: Ring, rounds: int) -> None:
    for _ in range(rounds):
        await go.send(await come.receive() + 1)


async def first_station(come: Ring, go: Ring, rounds: int) -> int:
    token = 0
    for _ in range(rounds):
        await go.send(token + 1)
        token = await come.receive()
    return token


def main(drones: int, rounds: int) -> None:
    with poly.Pool(drones) as pool:
        ring = [
            made.value for made in pool.everywhere(green.Channel)
        ]  # each drone makes the one that it receives from
        others = [
            drone.promise(station, ring[i], ring[(i + 1) % drones], rounds)
            for i, drone in enumerate(pool.drones)
            if i > 0
        ]
        began = time.perf_counter()
        token = pool.drones[0].doit(first_station, ring[0], ring[1], rounds)
        seconds = time.perf_counter() - began
        for other in others:
            other.result()
    print(f"{rounds} rounds in {drones} drones: the token was handed on {token} times")
    print(f"{seconds / token * 1e6:.0f} us each")


if __name__ == "__main__":
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "drones", nargs="?", type=int, default=8, help="from 2 on; 100 is no trouble"
    )
    options.add_argument("rounds", nargs="?", type=int, default=20)
    chosen = options.parse_args()
    main(chosen.drones, chosen.rounds)
