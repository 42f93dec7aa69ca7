"""What a task costs: many at once, one at a time, mapped, and mapped where some take a thousand times longer."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .peers import PEERS, Workers
from .suite import WORKERS, Figures, Sizes

SHORT = 1e-4  # seconds
WARM = 100
TIMES = 3  # of which the median counts: in the first burst of a fresh process everybody is cold


def noop(x: int) -> int:
    return x


def median_of(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(TIMES))


def gather_us(workers: Workers, fn: Callable[[int], int], tasks: int) -> float:
    submit = workers.submit

    def once() -> float:
        began = time.perf_counter()
        got = workers.results([submit(fn, i) for i in range(tasks)])
        seconds = time.perf_counter() - began
        assert got == list(range(tasks))
        return seconds / tasks * 1e6

    workers.results([submit(fn, i) for i in range(WARM)])
    return median_of(once)


def gather(peer: str, sizes: Sizes) -> Figures:
    with PEERS[peer].start(WORKERS) as workers:
        return {"us": gather_us(workers, noop, min(sizes.tasks, PEERS[peer].most))}


SCRIPT = """\
import sys

from benchmarks.peers import PEERS
from benchmarks.suite import WORKERS
from benchmarks.tasks import gather_us


def noop(x):
    return x


if __name__ == "__main__":
    peer, tasks, kind = sys.argv[1:]
    with PEERS[peer].start(WORKERS) as workers:
        print(gather_us(workers, noop if kind == "function" else lambda x: x, int(tasks)))
"""


def _of_main(peer: str, sizes: Sizes, kind: str) -> Figures:
    """The script is a user's: a file that is `__main__`."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        command = [sys.executable, str(script), peer, str(min(sizes.tasks, PEERS[peer].most)), kind]
        return {"us": float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)}


def main_function(peer: str, sizes: Sizes) -> Figures:
    return _of_main(peer, sizes, "function")


def main_lambda(peer: str, sizes: Sizes) -> Figures:
    return _of_main(peer, sizes, "lambda")


def trip(peer: str, sizes: Sizes) -> Figures:
    """Of one at a time, the median."""
    with PEERS[peer].start(WORKERS) as workers:
        submit, result = workers.submit, workers.result
        for i in range(WARM):
            assert result(submit(noop, i)) == i
        took = []
        for i in range(min(sizes.trips, PEERS[peer].most)):
            began = time.perf_counter()
            result(submit(noop, i))
            took.append(time.perf_counter() - began)
    return {"us": statistics.median(took) * 1e6}


def map_noops(peer: str, sizes: Sizes) -> Figures:
    """Nobody is told how to cut."""
    with PEERS[peer].start(WORKERS) as workers:
        assert workers.map is not None
        run = workers.map
        run(noop, range(WARM))
        items = range(min(sizes.items, PEERS[peer].most))

        def once() -> float:
            began = time.perf_counter()
            got = run(noop, items)
            seconds = time.perf_counter() - began
            assert got == list(items)
            return seconds / len(items) * 1e6

        return {"us": median_of(once)}


def take(wanted: float) -> float:
    """Takes so many seconds, and says how many it really took.

    The short ones compute: a worker that has them is busy, and shares its core with nobody willingly. The long ones
    sleep: if they computed, then on a machine with as many cores as workers the controller's work would lengthen
    them, their own times would grow by it, and the perfect schedule with them.
    """
    began = time.perf_counter()
    if wanted > SHORT:
        time.sleep(wanted)
    while (took := time.perf_counter() - began) < wanted:
        pass
    return took


def mixed(peer: str, sizes: Sizes) -> Figures:
    """Wall time over that of a perfect schedule: the tasks' own times, shared out evenly, with no cost beside them."""
    tasks = [SHORT] * sizes.mixed
    for place in random.Random(sizes.seed).sample(range(sizes.mixed), sizes.mixed // 100):
        tasks[place] = sizes.long
    with PEERS[peer].start(WORKERS) as workers:
        assert workers.map is not None
        workers.map(noop, range(WARM))
        began = time.perf_counter()
        took = workers.map(take, tasks)
        wall = time.perf_counter() - began
    perfect = sum(took) / WORKERS
    return {"over": wall / perfect, "stretch": sum(took) / sum(tasks), "wall_s": wall, "perfect_s": perfect}
