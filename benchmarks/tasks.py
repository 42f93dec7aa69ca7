"""What a task costs: many at once, one at a time, mapped, and mapped where some take a thousand
times longer."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .measuring import gather_us, map_us, noop, round_trip_us
from .peers import PEERS
from .processor_time import processor_time
from .suite import WORKERS, Figures, Sizes

SHORT = 1e-4  # seconds


def gather(peer: str, sizes: Sizes) -> Figures:
    with PEERS[peer].start(WORKERS) as workers, processor_time() as spent:
        us = gather_us(workers, noop, min(sizes.tasks, PEERS[peer].most))
    return {"us": us, **spent}


SCRIPT = """\
import sys

from benchmarks.measuring import gather_us
from benchmarks.peers import PEERS
from benchmarks.suite import WORKERS


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
    with PEERS[peer].start(WORKERS) as workers, processor_time() as spent:
        us = round_trip_us(workers, min(sizes.trips, PEERS[peer].most))
    return {"us": us, **spent}


def map_noops(peer: str, sizes: Sizes) -> Figures:
    with PEERS[peer].start(WORKERS) as workers, processor_time() as spent:
        us = map_us(workers, min(sizes.items, PEERS[peer].most))
    return {"us": us, **spent}


def take(wanted: float) -> float:
    """Takes so many seconds, and says how many it really took.

    The short ones compute: a worker that has them is busy, and shares its core with nobody
    willingly. The long ones sleep: if they computed, then on a machine with as many cores as
    workers the controller's work would lengthen them, their own times would grow by it, and the
    perfect schedule with them."""
    began = time.perf_counter()
    if wanted > SHORT:
        time.sleep(wanted)
    while (took := time.perf_counter() - began) < wanted:
        pass
    return took


def mixed(peer: str, sizes: Sizes) -> Figures:
    """Wall time over that of a perfect schedule: the tasks' own times, shared out evenly, with no
    cost beside them."""
    tasks = [SHORT] * sizes.mixed
    for place in random.Random(sizes.seed).sample(range(sizes.mixed), sizes.mixed // 100):
        tasks[place] = sizes.long
    with PEERS[peer].start(WORKERS) as workers:
        run = workers.map_for(take, tasks)
        with processor_time() as spent:
            began = time.perf_counter()
            took = run(take, tasks)
            wall = time.perf_counter() - began
    perfect = sum(took) / WORKERS
    return {
        "over": wall / perfect,
        "stretch": sum(took) / sum(tasks),
        "wall_s": wall,
        "perfect_s": perfect,
        **spent,
    }
