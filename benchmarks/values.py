"""What an item of a `map` costs, there and back, if it is no integer: what people map."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .measuring import RUNS, Executors
from .peers import PEERS
from .suite import Figures, Sizes, Skipped

START = datetime(2020, 1, 1)
FLOATS, LONG_TEXT, CAPTURED = 100, 2_000, 131_072

SCRIPT = """\
import json
import sys

from benchmarks.peers import PEERS
from benchmarks.suite import WORKERS
from benchmarks.values import measured


class Point:
    def __init__(self, x, y, name):
        self.x, self.y, self.name = x, y, name


if __name__ == "__main__":
    peer, count = sys.argv[1:]
    with PEERS[peer].start(WORKERS) as workers:
        print(json.dumps(dict(measured(workers, Point, int(count)))))
"""


def values(peer: str, sizes: Sizes) -> Figures:
    """The script is a user's, and its class is of `__main__`."""
    if find_spec("numpy") is None:
        raise Skipped("no numpy")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        command = [sys.executable, str(script), peer, str(min(sizes.tasks, PEERS[peer].most))]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: Figures = json.loads(done.stdout)
    return figures


def measured(
    workers: Executors, point: Callable[[int, float, str], Any], count: int
) -> Iterator[tuple[str, float]]:
    """Yield the name of each kind of item, and the median of its microseconds an item."""
    import numpy

    numbers = range(count)
    kinds: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "dicts": (same, [{"id": i, "name": f"n{i}", "value": i * 0.5} for i in numbers]),
        "tuples": (same, [(i, f"n{i}", i * 0.5) for i in numbers]),
        "objects": (same, [point(i, i * 0.5, f"n{i}") for i in numbers]),
        "dates": (same, [START + timedelta(minutes=i) for i in numbers]),
        "decimals": (same, [Decimal(i) / 7 for i in numbers]),
        "arrays": (same, [numpy.full(FLOATS, i / 7) for i in numbers]),
        "strings": (same, [f"some text {i}" for i in range(count * 5 // 2)]),
        "long_strings": (same, [f"{i:07d}" * LONG_TEXT for i in range(count // 5)]),
        "partial": (partial(second, numpy.zeros(CAPTURED)), list(range(count // 10))),
    }
    for name, (function, items) in kinds.items():
        run = workers.map_for(function, items)
        run(function, items)
        took = []
        for _ in range(RUNS):
            began = time.perf_counter()
            got = run(function, items)
            took.append(time.perf_counter() - began)
            assert len(got) == len(items)
        yield name, sorted(took)[RUNS // 2] / len(items) * 1e6


def same(value: Any) -> Any:
    return value


def second(_: Any, value: Any) -> Any:
    return value
