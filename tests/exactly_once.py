"""Millions of calls, each of which runs once, or is reported.

    python tests/exactly_once.py --calls 10000000 --seed 7       taskset -c 0 python tests/...

Calls of two drones, by `submit` and by `map`, short ones with long ones among them, so that calls
are recalled; some are cancelled, and drones are killed. Each call counts itself in memory that all
share. In the end, a call with a value has run once; one that was cancelled or lost, at most once;
of a map with `retries`, no more calls have run again than a death may cost.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).parents[1])]

import polycephaly as poly

SUBMITTED, MAPPED = 20_000, 80_000  # calls of a round
MAX_AGAIN = 4000
"""Calls of a map that may run again after a death: what a drone runs in four milliseconds."""

ran: mmap.mmap


def count(number: int) -> int:
    ran[number] += 1
    return number


def count_slowly(number: int, seconds: float) -> int:
    ran[number] += 1
    if seconds:
        time.sleep(seconds)
    return number


class Killer:
    """Kills a drone of the pool now and then."""

    def __init__(self, pool: poly.Pool, dice: random.Random) -> None:
        self.pool, self.dice, self.deaths = pool, dice, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self.dice.uniform(0.01, 0.1)):
            pid = self.dice.choice(self.pool.drones).pid
            if pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                    self.deaths += 1
                except ProcessLookupError:
                    pass


def submit_round(pool: poly.Pool, first: int, dice: random.Random, counts: dict[str, int]) -> None:
    numbers = range(first, first + SUBMITTED)
    slow = {first + dice.randrange(SUBMITTED) for _ in range(5)}
    promises = [
        pool.submit(count_slowly, number, 0.01) if number in slow else pool.submit(count, number)
        for number in numbers
    ]
    for _ in range(50):
        dice.choice(promises).cancel(running=dice.random() < 0.5)
    for number, promise in zip(numbers, promises, strict=True):
        try:
            value = promise.result(60)
        except (CancelledError, poly.DroneDied) as error:
            assert ran[number] <= 1, (
                f"call {number} has run {ran[number]} times, and ends with {error}"
            )
            counts["cancelled" if isinstance(error, CancelledError) else "lost"] += 1
        else:
            assert value == number, f"call {number} has the value {value}"
            assert ran[number] == 1, f"call {number} has run {ran[number]} times"
            counts["done"] += 1


def map_round(pool: poly.Pool, first: int, dice: random.Random, counts: dict[str, int]) -> None:
    numbers = range(first, first + MAPPED)
    seconds = [0.0] * MAPPED
    for _ in range(5):
        seconds[dice.randrange(MAPPED)] = 0.02
    deaths = 0
    with Killer(pool, dice) as killer:
        values = [*pool.options(retries=50).map(count_slowly, numbers, seconds, timeout=120)]
        deaths = killer.deaths
    assert values == [*numbers]
    times = ran[first : first + MAPPED]
    assert times.count(0) == 0, "a call has a value, and has not run"
    again = sum(times) - MAPPED
    assert again <= deaths * MAX_AGAIN, f"{again} calls have run again after {deaths} deaths"
    counts["done"] += MAPPED
    counts["again"] += again
    counts["deaths"] += deaths


def run(calls: int, seed: int) -> dict[str, int]:
    """Make at least so many calls, and return what has become of them."""
    global ran
    dice = random.Random(seed)
    counts = dict.fromkeys(("done", "cancelled", "lost", "again", "deaths"), 0)
    ran = mmap.mmap(-1, calls + SUBMITTED + MAPPED)
    first = 0
    with poly.Pool(2, output="discard") as pool:
        while first < calls:
            if dice.random() < 0.5:
                with Killer(pool, dice) as killer:
                    submit_round(pool, first, dice, counts)
                counts["deaths"] += killer.deaths
            else:
                submit_round(pool, first, dice, counts)
            first += SUBMITTED
            map_round(pool, first, dice, counts)
            first += MAPPED
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    began = time.monotonic()
    counts = run(given.calls, given.seed)
    print(f"{given.calls:,} calls in {time.monotonic() - began:.0f} s: {counts}")


if __name__ == "__main__":
    main()
