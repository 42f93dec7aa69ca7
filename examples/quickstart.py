"""A script: one task on a fresh drone, then many on a pool.

python examples/quickstart.py
"""

import math

import polycephaly as poly


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def main() -> None:
    # A drone is forked from this image as it is now: `math` and `is_prime` are there.
    print("2**31 - 1 is prime:", poly.promise("is_prime(2**31 - 1)").value)

    with poly.Pool() as pool:  # as many drones as there are usable cores
        numbers = range(10_000)
        primes = [n for n, yes in zip(numbers, pool.map(is_prime, numbers), strict=True) if yes]
        print(f"{len(primes)} primes below {len(numbers)}, the last is {primes[-1]}")


if __name__ == "__main__":  # needed for start="spawn" only, and a good habit
    main()
