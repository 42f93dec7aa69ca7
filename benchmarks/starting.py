"""What starting costs: the first answer, many drones, a large image, and the import."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from .measuring import noop
from .memory import available, pss, pss_of_all
from .peers import PEERS
from .suite import WORKERS, Figures, Sizes

_SCRIPTS = {
    name: f"""if True:
    {setup}
    def f(x): return x
    with {pool}({WORKERS}) as pool:
        print(pool.{call}, flush=True)
"""
    # Peers fork, as in every other row: it is not the default since CPython 3.14, and a function
    # of a program given by `-c` cannot be imported elsewhere.
    for name, setup, pool, call in (
        ("polycephaly", "import polycephaly", "polycephaly.Pool", "promise(f, 7).value"),
        (
            "multiprocessing",
            "import multiprocessing; multiprocessing.set_start_method('fork')",
            "multiprocessing.Pool",
            "apply(f, [7])",
        ),
        (
            "futures",
            "import concurrent.futures, multiprocessing; multiprocessing.set_start_method('fork')",
            "concurrent.futures.ProcessPoolExecutor",
            "submit(f, 7).result()",
        ),
    )
}


def _first_answer(peer: str, settle: float = 0.0) -> tuple[float, int]:
    """Milliseconds until it came, and the memory of all processes `settle` seconds later: other
    workers may still be being forked.
    """
    began = time.perf_counter()
    with PEERS[peer].start(WORKERS) as workers:
        assert workers.result(workers.submit(noop, 7)) == 7
        took = time.perf_counter() - began
        time.sleep(settle)
        return took * 1e3, pss_of_all()


def first(peer: str, sizes: Sizes) -> Figures:
    """With the imports done, some of which come with the first pool."""
    _first_answer(peer)
    return {"ms": _first_answer(peer)[0]}


def script(peer: str, sizes: Sizes) -> Figures:
    """Milliseconds from the start of an interpreter to the first answer, in a script of five lines,
    imports included.
    """
    code = _SCRIPTS[peer]
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"7\n"
        return {"ms": (time.perf_counter() - began) * 1e3}


def image(peer: str, sizes: Sizes) -> Figures:
    """The same from a process that holds so much memory, or half of what the machine has to
    give."""
    size = min(sizes.image, available() // 2)
    _first_answer(peer)  # for the imports
    held = bytearray(size)
    held[::4096] = b"\1" * len(range(0, size, 4096))
    before = pss_of_all()
    took, after = _first_answer(peer, settle=1.0)
    return {"ms": took, "growth_mib": (after - before) / (1 << 20), "image_mib": size / (1 << 20)}


def start(peer: str, sizes: Sizes) -> Figures:
    few, idle = _many_drones(sizes.drones)
    many, _ = _many_drones(sizes.many_drones)
    return {"few_s": few, "idle_kib": idle, "many_s": many}


def _many_drones(drones: int) -> tuple[float, float]:
    """Seconds from the fork until all have answered, and then the PSS of each in KiB, the mean."""
    import polycephaly as poly

    began = time.perf_counter()
    with poly.Pool(drones) as pool:
        pids = {promise.result() for promise in pool.everywhere(os.getpid)}
        took = time.perf_counter() - began
        assert len(pids) == drones
        return took, statistics.mean(pss(pid) for pid in pids) / 1024


def imports(peer: str, sizes: Sizes) -> Figures:
    """Milliseconds beyond what the interpreter takes to start and end: medians of fresh ones, in
    turn."""
    codes = {
        "bare": "pass",
        "package": "import polycephaly",
        "pool": "import polycephaly; polycephaly.Pool",
    }
    took: dict[str, list[float]] = {name: [] for name in codes}
    for _ in range(sizes.imports):
        for name, code in codes.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            took[name].append((time.perf_counter() - began) * 1e3)
    ms = {name: statistics.median(each) for name, each in took.items()}
    return {
        "package_ms": ms["package"] - ms["bare"],
        "pool_ms": ms["pool"] - ms["bare"],
        "bare_ms": ms["bare"],
    }
