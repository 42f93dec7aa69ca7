"""What is large stays where it was computed; only questions and answers travel.

python examples/kept_results.py
"""

import itertools
import random
import time
from collections import defaultdict

import polycephaly as poly

WORDS = 200_000
QUESTIONS = 40


def index(seed: int) -> dict[str, list[int]]:
    """Where each word of a text is: some megabytes of small objects, which take longer to pickle
    than to ask."""
    chance = random.Random(seed)
    places = defaultdict(list)
    for place in range(WORDS):
        places[f"w{chance.randrange(WORDS // 10)}"].append(place)
    return dict(places)


def count(places: dict[str, list[int]], word: str) -> int:
    return len(places.get(word, ()))


def ask(pool: poly.Pool, keep: bool) -> tuple[list[int], float]:
    """The same program, with the index kept in its drone, or unpickled for each question: the
    answers, and the seconds."""
    began = time.perf_counter()
    places = pool.promise(index, 7, keep=True) if keep else pool.promise(index, 7)
    answers = [pool.promise(count, places, f"w{n}") for n in range(QUESTIONS)]
    return [each.value for each in answers], time.perf_counter() - began


def spread(seed: int, buckets: int) -> list[poly.Kept[list[int]]]:
    """Numbers, in `buckets` by their size; each stays here by itself until it is wanted."""
    chance = random.Random(seed)
    parts: list[list[int]] = [[] for _ in range(buckets)]
    for _ in range(10_000):
        number = chance.randrange(1_000_000)
        parts[number * buckets // 1_000_000].append(number)
    return [poly.Kept(part) for part in parts]


def merged(*parts: list[int]) -> list[int]:
    return sorted(number for part in parts for number in part)


def main() -> None:
    with poly.Pool(2) as pool:
        (plain, slow), (kept, fast) = ask(pool, keep=False), ask(pool, keep=True)
        print(f"{QUESTIONS} questions, the same answers: {plain == kept}")
        print(f"kept, it is not unpickled: {slow / fast:.1f} times as fast")

        # A sort by parts: what one drone spread out and another is to merge goes from drone to
        # drone.
        rows = [pool.promise(spread, seed, 4) for seed in range(4)]
        columns = zip(*[row.value for row in rows], strict=True)
        runs = [pool.promise(merged, *column, keep=True).value for column in columns]
        print("sorted, and still in the drones:", [pool.doit(len, run) for run in runs])
        ends = [(pool.doit(min, run), pool.doit(max, run)) for run in runs]
        print("in order:", all(low[1] <= high[0] for low, high in itertools.pairwise(ends)))


if __name__ == "__main__":
    main()
