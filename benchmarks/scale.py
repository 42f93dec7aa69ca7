"""What a pool costs on a cluster: python -m benchmarks.scale [--runs N] [--only NAME,...] [--json
FILE] [--quick]

Ray's own simulation of a cluster (`ray.cluster_utils`): each node has a raylet and an object store
of its own, but all are on this machine and share its cores. So what is told is what the work costs,
above all the controller, and what is lost with a node; not how fast many machines are. The
controller's processor time is that of all its threads, Ray's among them: by what it takes for a
task, one controller keeps at most so many drones busy.

    rates     no-ops through the pool, as Ray's tasks and as calls of Ray's actors, in turns; by
              drones
    standing  what the controller has to do, and to keep, for a drone that has nothing to do
    levels    one drone a node, with a pool of its own below it: what is left for the controller
    loss      a node is killed, or falls silent, while the pool is at work: what is lost, and when
              is it whole again
    arrays    a large array from one drone to another: by reference, and by way of the controller
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import polycephaly as poly

from .memory import descendants, private
from .table import spread

Figures = dict[str, float]


@dataclass(frozen=True)
class Sizes:
    dispatchers: tuple[tuple[int, int], ...] = ((1, 2), (2, 4), (4, 8), (8, 16))  # nodes, drones
    submits: int = 20_000
    items: int = 50_000
    tasks: int = 1_000
    calls: int = 4_000
    long: float = 0.02  # seconds
    longs: int = 40  # of these, for each drone
    idle: float = 5.0  # seconds
    naps: int = 3_000
    nap: float = 0.005  # seconds
    array: int = 100_000_000  # bytes


QUICK = Sizes(
    dispatchers=((1, 2),),
    submits=500,
    items=1_000,
    tasks=50,
    calls=100,
    longs=5,
    idle=0.5,
    naps=300,
    nap=0.002,
    array=1_000_000,
)


# -- the cluster -----------------------------------------------------------------------------------


@contextmanager
def cluster(nodes: int, processors: int) -> Iterator[list[Any]]:
    """So many nodes of so many processors each (as Ray counts them), beside a head that runs
    nothing."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    # Not below TMPDIR: sockets are in it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        import ray
        from ray.cluster_utils import Cluster

        store = {"object_store_memory": 400 << 20}
        soon = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 6,
        }
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": soon, **store}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            workers = [made.add_node(num_cpus=processors, **store) for _ in range(nodes)]
            ray.init(made.address, log_to_driver=False, logging_level="CRITICAL")
            yield workers
        finally:
            ray.shutdown()
            made.shutdown()


def processes(node: Any) -> list[int]:
    raylets = [each.process.pid for each in node.all_processes["raylet"]]
    return [*raylets, *(pid for raylet in raylets for pid in descendants(raylet))]


def pool_of(drones: int, **how: Any) -> poly.Pool:
    return poly.Pool(
        drones, engine="ray", num_cpus=1, scheduling_strategy="SPREAD", output="discard", **how
    )


def when_up(pool: poly.Pool) -> None:
    for promise in pool.everywhere(os.getpid):
        promise.result()


# -- what is measured ------------------------------------------------------------------------------


def noop(x: int) -> int:
    return x


def nap(seconds: float) -> None:
    time.sleep(seconds)


def nap_and_return(x: int, seconds: float) -> int:
    time.sleep(seconds)
    return x


def timed(run: Callable[[int], list[int]], count: int) -> tuple[float, float]:
    """How many a second, and the controller's processor time for each in microseconds; the median
    of three."""
    took = []
    for _ in range(3):
        gc.collect()
        began, used = time.perf_counter(), time.process_time()
        got = run(count)
        used, wall = time.process_time() - used, time.perf_counter() - began
        assert got == list(range(count))
        took.append((count / wall, used / count * 1e6))
    return statistics.median(rate for rate, _ in took), statistics.median(used for _, used in took)


def of_the_pool(drones: int, sizes: Sizes) -> Figures:
    began = time.perf_counter()
    with pool_of(drones) as pool:
        when_up(pool)
        found = {"start": (time.perf_counter() - began) / drones}
        list(pool.map(noop, range(100)))
        found["submit"], found["submit us"] = timed(
            lambda n: [p.result() for p in [pool.submit(noop, i) for i in range(n)]], sizes.submits
        )
        found["map"], found["map us"] = timed(lambda n: list(pool.map(noop, range(n))), sizes.items)
        found["long"], found["long us"] = timed(
            lambda n: list(pool.map(nap_and_return, range(n), itertools.repeat(sizes.long))),
            sizes.longs * drones,
        )
    return found


def of_rays_tasks(drones: int, sizes: Sizes) -> Figures:
    import ray

    task = ray.remote(num_cpus=1)(noop)
    ray.get(
        [ray.remote(num_cpus=1)(nap).remote(1.0) for _ in range(drones)]
    )  # until that many workers are up
    rate, used = timed(lambda n: ray.get([task.remote(i) for i in range(n)]), sizes.tasks)
    return {"task": rate, "task us": used}


class Actor:
    def call(self, x: int) -> int:
        return x


def of_rays_actors(drones: int, sizes: Sizes) -> Figures:
    import ray

    remote = ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Actor)
    actors = [remote.remote() for _ in range(drones)]
    ray.get([each.call.remote(0) for each in actors])
    rate, used = timed(
        lambda n: ray.get([actors[i % drones].call.remote(i) for i in range(n)]), sizes.calls
    )
    return {"call": rate, "call us": used}


def rates(sizes: Sizes, turn: int) -> Figures:
    found: Figures = {}
    for nodes, drones in sizes.dispatchers:
        with cluster(nodes, drones // nodes):
            contenders = [of_the_pool, of_rays_tasks, of_rays_actors]
            first = turn % len(contenders)  # in each run another begins
            for each in contenders[first:] + contenders[:first]:
                found |= {
                    f"{drones} {name}": figure for name, figure in each(drones, sizes).items()
                }
    return found


def standing(sizes: Sizes, turn: int) -> Figures:
    nodes, drones = sizes.dispatchers[-1]
    with cluster(nodes, drones // nodes):
        with pool_of(1) as pool:  # what is loaded once is not of any drone
            when_up(pool)
        gc.collect()
        memory, threads = private(os.getpid()), len(os.listdir("/proc/self/task"))
        descriptors = len(os.listdir("/proc/self/fd"))
        with pool_of(drones) as pool:
            when_up(pool)
            found = {
                "memory": (private(os.getpid()) - memory) / drones / 1024,
                "threads": (len(os.listdir("/proc/self/task")) - threads) / drones,
                "descriptors": (len(os.listdir("/proc/self/fd")) - descriptors) / drones,
            }
            began = time.process_time()
            time.sleep(sizes.idle)
            found["idle"] = (time.process_time() - began) / sizes.idle / drones * 1e6
    return found


def open_pool(drones: int) -> None:
    global below
    below = poly.Pool(drones)


def sum_below(start: int, stop: int) -> int:
    return sum(below.map(noop, range(start, stop)))


def levels(sizes: Sizes, turn: int) -> Figures:
    nodes, drones = sizes.dispatchers[-1]
    piece = 1_000
    with (
        cluster(nodes, 1),
        pool_of(nodes, initializer=open_pool, initargs=(drones // nodes,)) as pool,
    ):
        when_up(pool)

        def run() -> None:
            starts = range(0, sizes.items, piece)
            total = sum(pool.map(sum_below, starts, [*starts[1:], sizes.items]))
            assert total == sum(range(sizes.items))

        run()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(3):
            run()
        used, wall = time.process_time() - used, time.perf_counter() - began
    return {"rate": 3 * sizes.items / wall, "us": used / 3 / sizes.items * 1e6}


NODES, EACH = (
    3,
    3,
)  # in the loss of a node; two drones on each, so that those of one find room on the others


def lose_a_node(sizes: Sizes, how: int, retries: int) -> Figures:
    drones = 2 * NODES
    with cluster(NODES, EACH) as nodes, pool_of(drones, retries=retries) as pool:
        when_up(pool)
        promises = [pool.promise(nap, sizes.nap) for _ in range(sizes.naps)]
        promises[len(promises) // 3].result()
        lost = processes(nodes[-1])
        names = {drone.name for drone in pool.drones if drone.pid in lost}
        began = time.perf_counter()
        for pid in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        try:
            errors = [promise.exception() for promise in promises]
            done = time.perf_counter() - began
            while True:
                now = pool.drones
                if len(now) == drones and all(each.alive for each in now):
                    with contextlib.suppress(poly.DroneDied, RuntimeError):
                        if not {p.result() for p in pool.everywhere(os.getpid)} & set(lost):
                            break
                time.sleep(0.01)
            whole = time.perf_counter() - began
        finally:
            for pid in lost:  # those that were only stopped
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert all(error is None or isinstance(error, poly.DroneDied) for error in errors)
    return {
        "drones": len(names),
        "rejected": sum(error is not None for error in errors),
        "work done": done,
        "whole": whole,
    }


def loss(sizes: Sizes, turn: int) -> Figures:
    found: Figures = {}
    for name, how, retries in LOSSES:
        found |= {
            f"{name} {figure}": value for figure, value in lose_a_node(sizes, how, retries).items()
        }
    return found


LOSSES = (
    ("killed", signal.SIGKILL, 0),
    ("killed, retries=1", signal.SIGKILL, 1),
    ("silent", signal.SIGSTOP, 0),
)


def make(size: int) -> Any:
    import numpy

    return numpy.full(size // 8, 1.0)


def take(array: Any) -> float:
    return float(array[::512].sum())


def arrays(sizes: Sizes, turn: int) -> Figures:
    import ray

    found: Figures = {}
    wanted = float(len(range(0, sizes.array // 8, 512)))

    def measure(name: str, once: Callable[[], float]) -> None:
        took = []
        for _ in range(4):
            began, used = time.perf_counter(), time.process_time()
            assert once() == wanted
            took.append((time.perf_counter() - began, time.process_time() - used))
        found[name] = (
            statistics.median(wall for wall, _ in took[1:]) * 1e3
        )  # the first finds everybody cold
        found[f"{name} us"] = statistics.median(used for _, used in took[1:]) * 1e6

    with cluster(2, 1):
        with pool_of(2) as pool:
            one, other = pool.drones
            measure("reference", lambda: other.doit(take, one.promise(make, sizes.array)))
            measure("controller", lambda: other.doit(take, one.doit(make, sizes.array)))
        makes, takes = (
            ray.remote(num_cpus=1)(make),
            ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(take),
        )
        measure("ray", lambda: ray.get(takes.remote(makes.remote(sizes.array))))
    return found


# -- what is printed -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    title: str
    figure: str
    per: str = ""  # the ratio to this figure, of the same run
    least: float | None = None  # what the ratio should be


def rows(part: str, sizes: Sizes) -> Iterator[Row]:
    if part == "rates":
        for nodes, drones in sizes.dispatchers:
            of = f"{drones} drones, {nodes} node{'s' * (nodes > 1)}"
            yield Row(f"{of}: submit + gather, no-ops/s", f"{drones} submit")
            yield Row(
                "... times Ray's tasks, as many a second", f"{drones} task", f"{drones} submit", 5.0
            )
            yield Row("... times calls of Ray's actors", f"{drones} call", f"{drones} submit")
            yield Row("... map, no-ops/s", f"{drones} map")
            yield Row("... controller, us a task", f"{drones} submit us")
            yield Row("... controller, us an item of map", f"{drones} map us")
            yield Row(f"... map of naps of {sizes.long * 1e3:g} ms, naps/s", f"{drones} long")
            yield Row("... controller, us a nap", f"{drones} long us")
            yield Row("... driver of Ray's tasks, us a task", f"{drones} task us")
            yield Row("... driver of Ray's actors, us a call", f"{drones} call us")
            yield Row("... until all have answered, s a drone", f"{drones} start")
    elif part == "standing":
        yield Row("a drone with nothing to do: controller, us a second", "idle")
        yield Row("... controller's memory, KiB", "memory")
        yield Row("... controller's threads", "threads")
        yield Row("... controller's descriptors", "descriptors")
    elif part == "levels":
        nodes, drones = sizes.dispatchers[-1]
        yield Row(
            f"{nodes} drones, each with a pool of {drones // nodes}: no-ops/s, 1,000 a piece",
            "rate",
        )
        yield Row("... controller, us a no-op", "us")
    elif part == "loss":
        for name, _, _ in LOSSES:
            yield Row(
                f"a node of two drones of {2 * NODES} is {name}: its drones", f"{name} drones"
            )
            yield Row(f"... rejected, of {sizes.naps:,}", f"{name} rejected")
            yield Row("... all work answered, s after", f"{name} work done")
            yield Row("... all drones there again, s after", f"{name} whole")
    else:
        yield Row(f"{sizes.array / 1e6:,.0f} MB from drone to drone by reference, ms", "reference")
        yield Row("... by way of the controller, ms", "controller", "reference")
        yield Row("... between two of Ray's tasks, ms", "ray", "reference")
        yield Row("... by reference: controller, us", "reference us")
        yield Row("... by way of the controller: controller, us", "controller us")


def table(taken: dict[str, list[Figures]], sizes: Sizes) -> str:
    lines = [("measurement", "figure", "ratio", ""), ("---", "---", "---", "---")]
    for part, runs in taken.items():
        for row in rows(part, sizes):
            figures = [run[row.figure] for run in runs]
            ratio = verdict = ""
            if row.per:
                more = [run[row.per] / run[row.figure] for run in runs]
                if row.figure in ("controller", "ray"):  # times, not rates
                    more = [1 / each for each in more]
                ratio = spread(more)
                if row.least is not None:
                    holds = statistics.median(more) >= row.least
                    verdict = f"at least {row.least:g}: {'holds' if holds else 'missed'}"
            lines.append((row.title, spread(figures), ratio, verdict))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


PARTS: dict[str, Callable[[Sizes, int], Figures]] = {
    "rates": rates,
    "standing": standing,
    "levels": levels,
    "loss": loss,
    "arrays": arrays,
}


@click.command(help=__doc__.partition("\n")[0] if __doc__ else None)
@click.option(
    "--runs", type=click.IntRange(1), help="How often each is measured. [default: 3; quick: 1]"
)
@click.option("--only", metavar="NAME,...", default=",".join(PARTS), help=f"Of {', '.join(PARTS)}.")
@click.option("--quick", is_flag=True, help="Tiny sizes: does it run at all?")
@click.option(
    "--json",
    "file",
    type=click.Path(dir_okay=False, writable=True),
    help="Write all figures to this file.",
)
def main(runs: int | None, only: str, quick: bool, file: str | None) -> None:
    names = only.split(",")
    for name in names:
        if name not in PARTS:
            raise click.UsageError(
                f"there is no measurement {name!r}; there are {', '.join(PARTS)}"
            )
    sizes = QUICK if quick else Sizes()
    answer = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no figure
    taken: dict[str, list[Figures]] = {name: [] for name in names}
    for turn in range(runs or (1 if quick else 3)):
        for name in names:
            taken[name].append(PARTS[name](sizes, turn))
            print(name, taken[name][-1], file=sys.stderr)
    if file:
        Path(file).write_text(json.dumps(taken, indent=1))
    os.write(answer, f"{table(taken, sizes)}\n".encode())


if __name__ == "__main__":
    from benchmarks.scale import (
        main as run,
    )  # so that workers find what they are given by its module's name

    run()
