"""`map` over an input without an end: lazy at both ends, in order, nothing to tune.

python examples/endless_map.py
"""

import itertools
from collections.abc import Iterator

import polycephaly as poly


def steps_to_one(n: int) -> int:
    """Collatz: how many steps n takes to reach 1."""
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def counted(numbers: Iterator[int], taken: list[int]) -> Iterator[int]:
    for n in numbers:
        taken[0] = n
        yield n


def main() -> None:
    taken = [0]
    with poly.Pool(2) as pool:
        lengths = pool.map(steps_to_one, counted(itertools.count(1), taken))
        for n, steps in enumerate(lengths, start=1):
            if steps > 150:
                print(f"{n} is the first to take more than 150 steps: {steps}")
                break
        lengths.close()  # cancels what is under way ahead of us
    # Inputs are taken only so far ahead as keeps the drones busy: the rest of infinity was never
    # asked for.
    print("inputs taken ahead are bounded:", taken[0] < n + 10_000)


if __name__ == "__main__":
    main()
