"""What tasks cost that compute for a while, that share one core, and that many threads submit; and
scikit-learn's search, and Ray."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .measuring import WARM_UP_TASKS, Executors, gather_us, noop, round_trip_us
from .peers import OURS, PEERS
from .processor_time import processor_time
from .suite import WORKERS, Figures, Sizes, Skipped

THREADS = 8


@contextmanager
def _on_one_core(peer: str) -> Iterator[Executors]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with PEERS[peer].start(WORKERS) as workers:
        yield workers


def one_core(peer: str, sizes: Sizes) -> Figures:
    """Many tasks at once, and one at a time, where controller and workers share a core."""
    most = PEERS[peer].most
    with _on_one_core(peer) as workers, processor_time() as spent:
        figures = {
            "gather_us": gather_us(workers, noop, min(sizes.tasks, most)),
            "trip_us": round_trip_us(workers, min(sizes.trips, most)),
        }
    return figures | spent


def threads(peer: str, sizes: Sizes) -> Figures:
    """Round trips of threads that do not know of each other, as in a server."""
    trips = max(1, min(sizes.trips, PEERS[peer].most) // THREADS)

    def client() -> None:
        for number in range(trips):
            assert workers.result(workers.submit(noop, number)) == number

    with PEERS[peer].start(WORKERS) as workers:
        workers.results([workers.submit(noop, number) for number in range(WARM_UP_TASKS)])
        clients = [threading.Thread(target=client) for _ in range(THREADS)]
        with processor_time() as spent:
            began = time.perf_counter()
            for each in clients:
                each.start()
            for each in clients:
                each.join()
            took = time.perf_counter() - began
    return {"us": took / (THREADS * trips) * 1e6, **spent}


def compute(seconds: float) -> None:
    """Compute for this processor time, whatever else runs on the core."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


CALLS = {"short": 1e-4, "middle": 6e-4, "long": 5e-3}
"""Seconds that a call computes."""


def calls(peer: str, sizes: Sizes) -> Figures:
    """By `map` and by `submit`: wall time over that of workers that do nothing but compute."""
    figures: Figures = {}
    with PEERS[peer].start(WORKERS) as workers:
        items = {
            name: [seconds] * max(2 * WORKERS, round(sizes.computing / seconds))
            for name, seconds in CALLS.items()
        }
        runs = {name: workers.map_for(compute, each) for name, each in items.items()}
        workers.results([workers.submit(noop, number) for number in range(WARM_UP_TASKS)])
        with processor_time() as spent:
            for name, seconds in CALLS.items():
                count = len(items[name])
                best = count * seconds / WORKERS
                began = time.perf_counter()
                runs[name](compute, items[name])
                between = time.perf_counter()
                workers.results([workers.submit(compute, seconds) for _ in range(count)])
                figures[f"{name}_map"] = (between - began) / best
                figures[f"{name}_submit"] = (time.perf_counter() - between) / best
    return figures | spent


def grid_search() -> tuple[Any, ...]:
    """Return a search of scikit-learn, sixty fits of 3 ms, and its data."""
    from sklearn.datasets import make_classification
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    grid = {"C": [0.1, 1, 10, 100], "gamma": [0.01, 0.1, 1]}
    x, y = make_classification(400, random_state=0)
    return GridSearchCV(SVC(), grid, cv=5, n_jobs=WORKERS), x, y


def search(peer: str, sizes: Sizes) -> Figures:
    """GridSearchCV, the second time: by our backend of joblib, or by loky."""
    try:
        import joblib

        model, x, y = grid_search()
    except ImportError as error:
        raise Skipped(f"{error.name} is not installed") from error

    if peer == OURS:
        import polycephaly as poly

        poly.joblib.register()
    with joblib.parallel_config(OURS if peer == OURS else "loky"):
        model.fit(x, y)
        with processor_time() as spent:
            began = time.perf_counter()
            model.fit(x, y)
            took = time.perf_counter() - began
    return {"ms": took * 1e3, **spent}


def on_ray(peer: str, sizes: Sizes) -> Figures:
    """Many tasks at once: of a pool whose drones are actors, or Ray's own."""
    if not PEERS["ray"].installed:
        raise Skipped("ray is not installed")
    tasks = min(sizes.tasks, PEERS["ray"].most)
    if peer != OURS:
        with PEERS[peer].start(WORKERS) as workers:
            return {"us": gather_us(workers, noop, tasks)}
    import ray

    import polycephaly as poly

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with poly.Pool(WORKERS, engine="ray") as pool:
            return {"us": gather_us(Executors(pool.submit, lambda p: p.value), noop, tasks)}
    finally:
        ray.shutdown()
