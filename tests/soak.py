"""Soak: the same for a long time, and whether anything grows.

    python tests/soak.py                    all parts, at full length
    python tests/soak.py --scale 0.01       all of them, a hundredth of it
    python tests/soak.py --only lambdas     one of them

    tasks     one by one and by `map`, with errors and cancels among them, through one pool
    arrays    64 KiB to 1 MiB, there and back; kept for a while, shared, dropped
    pools     opened, used, and ended in every way there is
    lambdas   and partials, each used once, with what they capture
    shared    arrays shared, used once, released
    kept      results that stay in a drone, used there, dropped
    maps      abandoned after their first result
    results   of 5 MB, in a global name while the next pool, refresh or `poly.promise` takes its
              snapshot
    clients   of a served pool, one after the other, each with functions of its own

Each part is sampled a hundred times: this process's resident memory; its drones' proportional share
(PSS); descriptors, threads; the pool's arena; /dev/shm, unless others test beside it in the same
one. Printed are the samples at five points. A part is flat if the last quarter is not above the
first: descriptors and threads exactly (their largest), memory (the medians) by no more than
`BOUNDS` says. In the end nothing of the arena may be in use. Ends with status 1 where something has
grown."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import astuple, dataclass, fields
from functools import partial
from operator import le

import census
import numpy as np
from faults import exit_hard, wait_for

import polycephaly as poly

MIB = 1 << 20
HANG = 300.0  # seconds for a hundredth of a part
ROUND = 10_000
KEPT = 16  # arrays
RESULT_BYTES = 5_000_000

# -- what is sampled -------------------------------------------------------------------------------


@dataclass
class Sample:
    done: int
    resident: float
    drones: float
    descriptors: int
    threads: int
    arena: float
    shm: float
    shm_files: int

    @classmethod
    def take(cls, done: int, pool: poly.Pool | None) -> Sample:
        used = 0.0
        if census.shared_memory_is_counted():
            shm = os.statvfs("/dev/shm")
            used = (shm.f_blocks - shm.f_bfree) * shm.f_frsize / MIB
        return cls(
            done,
            _field("/proc/self/status", "VmRSS"),
            sum(_pss(drone.pid) for drone in pool.drones) if pool is not None else 0.0,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            arena_of(pool) / MIB if pool is not None else 0.0,
            used,
            len(census.shared_memory()),
        )


BOUNDS: dict[str, Callable[[float], float]] = {
    "resident": lambda first: 1.05 * first + 4,
    "drones": lambda first: 1.05 * first + 4,
    "arena": lambda first: 1.2 * first + 4,
    "shm": lambda first: first + 1,
    "shm_files": lambda first: first,
    "descriptors": lambda first: first,
    "threads": lambda first: first,
}
"""What the last quarter may be, by what the first was."""
EXACT = ("descriptors", "threads", "shm_files")
HEADS = ("done", "RSS MiB", "PSS MiB", "fds", "threads", "arena MiB", "shm MiB", "shm files")


def _field(path: str, name: str) -> float:
    with open(path) as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(f"{name}:"))


def _pss(pid: int) -> float:
    with contextlib.suppress(OSError):  # it has just ended
        return _field(f"/proc/{pid}/smaps_rollup", "Pss")
    return 0.0


def arena_of(pool: poly.Pool) -> int:
    return pool._dispatcher.supervisor.engine._arena.used()


def grown(samples: list[Sample], slack: float) -> Iterator[str]:
    """What the last quarter has more of than the first, and than may be. `slack`: MiB beside the
    bounds."""
    quarter = max(1, len(samples) // 4)
    for name, bound in BOUNDS.items():
        middle = max if name in EXACT else statistics.median
        values = [getattr(each, name) for each in samples]
        first, last = middle(values[:quarter]), middle(values[-quarter:])
        most = bound(first) + (0 if name in EXACT else slack)
        if last > most:
            yield (
                f"{name}: {first:.1f} in the first quarter, {last:.1f} in the last, "
                f"which may be {most:.1f}"
            )


def table(samples: list[Sample]) -> str:
    assert len(HEADS) == len(fields(Sample))
    rows = ["".join(f"{head:>11}" for head in ("", *HEADS))]
    last = len(samples) - 1
    for name, at in (
        ("start", 0),
        ("25 %", last // 4),
        ("50 %", last // 2),
        ("75 %", 3 * last // 4),
        ("end", last),
    ):
        cells = (
            f"{each:,}" if isinstance(each, int) else f"{each:.1f}" for each in astuple(samples[at])
        )
        rows.append("".join(f"{cell:>11}" for cell in (name, *cells)))
    return "\n".join(rows)


# -- the parts -------------------------------------------------------------------------------------


def odd(n: int) -> int:
    if n % 100 == 99:
        raise ValueError(n)
    return n


def twice(array: np.ndarray) -> np.ndarray:
    return array * 2


def soak_tasks(
    count: int, at_least: int, dice: random.Random
) -> Iterator[tuple[int, poly.Pool | None]]:
    """Yields how many are done, and the pool."""
    done = 0
    with poly.Pool(2, output="discard") as pool:
        while done < count:
            few = min(ROUND, at_least, count - done)
            promises = [pool.promise(odd, n) for n in range(few)]
            for promise in promises[::100]:
                promise.cancel()
            for n, promise in enumerate(promises):
                try:
                    assert promise.value == n
                except ValueError as error:
                    assert error.args == (n,) and n % 100 == 99
                except CancelledError:
                    assert n % 100 == 0
            del promises, promise
            done += few
            if done % (5 * few) == 0:  # every fifth round by `map`
                few = min(few, count - done)
                assert sum(pool.map(abs, range(few))) == few * (few - 1) // 2
                done += few
            yield done, pool


def soak_arrays(
    count: int, at_least: int, dice: random.Random
) -> Iterator[tuple[int, poly.Pool | None]]:
    kept: deque[np.ndarray] = deque(maxlen=KEPT)
    under_way: deque[tuple[int, int, poly.Promise[np.ndarray]]] = deque()
    with poly.Pool(2, output="discard") as pool:
        for done in range(count + 1):
            while under_way and (len(under_way) > 16 or done == count):
                n, size, promise = under_way.popleft()
                array = promise.value
                assert len(array) == size and array[0] == 2 * n and array[-1] == 2 * n
                array += 1
                kept.append(array)
                assert kept[0][0] % 2 == 1 and kept[0][-1] == kept[0][0], (
                    "it was changed under its owner"
                )
            if done % at_least == 0:
                yield done, pool
            if done == count:
                break
            size = dice.randrange(8 << 10, 128 << 10)
            if done % 1000 == 999:
                with pool.share(np.full(size, done)) as shared:
                    assert pool.doit(np.sum, shared) == done * size
            under_way.append((done, size, pool.promise(twice, np.full(size, done))))
        del array, promise
        kept.clear()
        pool.promise(abs, 1).result()
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not arena_of(pool))
        if arena_of(pool):
            raise SystemExit(
                f"{arena_of(pool):,} bytes of the arena are in use, and nobody has an array"
            )


def soak_pools(
    count: int, at_least: int, dice: random.Random
) -> Iterator[tuple[int, poly.Pool | None]]:
    before = len(os.listdir("/proc/self/task"))
    for done in range(count):
        WAYS[done % len(WAYS)](done)
        if (done + 1) % at_least == 0:
            gc.collect()
            # Who drops a pool does not wait for its end. (The kernel's list may miss some while one
            # of them ends.)
            wait_for(
                lambda: (
                    threading.active_count() == 1 and len(os.listdir("/proc/self/task")) <= before
                ),
                30,
            )
            yield done + 1, None


def soak_lambdas(
    count: int, at_least: int, dice: random.Random
) -> Iterator[tuple[int, poly.Pool | None]]:
    with poly.Pool(2, output="discard") as pool:
        for done, few in _steps(count, at_least):
            functions = [
                partial(pow, n, 2) if n % 2 else lambda n=n, data=b"x" * 100: n * n
                for n in range(few)
            ]
            assert [p.value for p in [pool.promise(each) for each in functions]] == [
                n * n for n in range(few)
            ]
            del functions
            yield done, pool


def soak_shared(
    count: int, at_least: int, dice: random.Random
) -> Iterator[tuple[int, poly.Pool | None]]:
    with poly.Pool(2, output="discard") as pool:
        for done, few in _steps(count, at_least):
            for n in range(few):
                with pool.share(np.full(10_000, n)) as shared:
                    assert pool.doit(len, shared) == 10_000
            yield done, pool


def soak_kept(
    count: int, at_least: int, dice: random.Random
) -> Iterator[tuple[int, poly.Pool | None]]:
    with poly.Pool(2, output="discard") as pool:
        for done, few in _steps(count, at_least):
            for n in range(few):
                kept = pool.promise(np.full, 10_000, n, keep=True).value
                assert pool.doit(len, kept) == 10_000
            del kept
            yield done, pool


def soak_maps(
    count: int, at_least: int, dice: random.Random
) -> Iterator[tuple[int, poly.Pool | None]]:
    with poly.Pool(2, output="discard") as pool:
        for done, few in _steps(count, at_least):
            for n in range(few):
                assert next(pool.map(lambda i, n=n: n + i, range(1000))) == n
            yield done, pool


def soak_clients(
    count: int, at_least: int, dice: random.Random
) -> Iterator[tuple[int, poly.Pool | None]]:
    before: tuple[int, ...] = ()
    with (
        tempfile.TemporaryDirectory() as home,
        poly.Pool(2, output="discard") as pool,
        poly.serve(pool, file=f"{home}/card.json"),
    ):
        for done, few in _steps(count, at_least):
            for _ in range(few):
                with poly.connect(f"{home}/card.json") as client:
                    functions = [partial(len, bytes([n]) * 100_000) for n in range(20)]
                    assert [p.value for p in [client.promise(each) for each in functions]] == [
                        100_000
                    ] * 20
            before = _least_of(before)  # the last client may be closing yet
            yield done, pool


def soak_results(
    count: int, at_least: int, dice: random.Random
) -> Iterator[tuple[int, poly.Pool | None]]:
    before: tuple[int, ...] = ()
    with poly.Pool(1, output="discard") as lasting:
        for done in range(count):
            with poly.Pool(1, output="discard") as pool:
                _keep_result(pool.promise(bytearray, RESULT_BYTES))
            lasting.refresh()
            _keep_result(lasting.promise(bytearray, RESULT_BYTES))
            _keep_result(poly.promise(bytearray, RESULT_BYTES))
            if (done + 1) % at_least == 0:
                before = _least_of(before)  # the pool of poly.promise may be closing yet
                yield done + 1, lasting


def _keep_result(promise: poly.Promise[bytearray]) -> None:
    assert len(promise.value) == RESULT_BYTES
    # In place of the result before, which the next snapshot finds there.
    sys.modules["__main__"].results = [promise]  # type: ignore[attr-defined]


def _least_of(before: tuple[int, ...]) -> tuple[int, ...]:
    """Waits until no more is open than ever before, and says what that is. Who closes in the
    background comes down to it; a leak never does."""
    now = _open_here()
    before = tuple(map(min, before or now, now))
    wait_for(partial(_no_more_than, before))
    return before


def _no_more_than(before: tuple[int, ...]) -> bool:
    return all(map(le, _open_here(), before))


def _open_here() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _steps(count: int, at_least: int) -> Iterator[tuple[int, int]]:
    """How many will be done after each step, and how many that step does."""
    done = 0
    while done < count:
        few = min(1000, at_least, count - done)
        done += few
        yield done, few


def _use(pool: poly.Pool | poly.Drone, n: int) -> None:
    assert [p.value for p in [pool.promise(abs, -i) for i in range(n % 20)]] == list(range(n % 20))
    assert pool.doit(twice, np.full(20_000, n))[-1] == 2 * n


def _in_a_block(n: int) -> None:
    with poly.Pool(2) as pool:
        _use(pool, n)
        assert list(pool.map(abs, range(100))) == list(range(100))


def _by_an_error(n: int) -> None:
    with contextlib.suppress(KeyError), poly.Pool(2) as pool:
        pool.promise(time.sleep, 60)
        _use(pool, n)
        raise KeyError(n)


def _shut_down(n: int) -> None:
    pool = poly.Pool(1 + n % 3)
    promises = [pool.submit(abs, -i) for i in range(50)]
    pool.shutdown()
    assert [p.value for p in promises] == list(range(50))


def _dropped(n: int) -> None:
    pool = poly.Pool(1)
    _use(pool, n)


def _after_a_death(n: int) -> None:
    with poly.Pool(2, output="discard") as pool:
        assert isinstance(pool.promise(exit_hard, 3).exception(), poly.DroneDied)
        _use(pool, n)


def _with_work_under_way(n: int) -> None:
    pool = poly.Pool(2)
    promises = [pool.promise(time.sleep, 60) for _ in range(4)]
    for each in promises:
        each.cancel()
    pool.shutdown(wait=n % 3 > 0)


def _a_drone(n: int) -> None:
    with poly.Drone() as drone:
        drone["x"] = n
        _use(drone, n)
        assert drone["x"] == n


def _one_promise(n: int) -> None:
    assert poly.promise(abs, -n).value == n


WAYS = (
    _in_a_block,
    _by_an_error,
    _shut_down,
    _dropped,
    _after_a_death,
    _with_work_under_way,
    _a_drone,
    _one_promise,
)
PARTS = {
    "tasks": (soak_tasks, 5_000_000),
    "arrays": (soak_arrays, 200_000),
    "pools": (soak_pools, 2_000),
    "lambdas": (soak_lambdas, 200_000),
    "shared": (soak_shared, 100_000),
    "kept": (soak_kept, 20_000),
    "maps": (soak_maps, 10_000),
    "results": (soak_results, 300),
    "clients": (soak_clients, 500),
}
"""And how many make a long day."""
SLACK = {"results": 15.0}
"""MiB by which memory may grow in a part: one sample sees up to three results more than another, of
5 MB each. A leak would keep three in each round."""


def soak(name: str, count: int, samples: int, seed: object) -> tuple[list[Sample], float]:
    """Runs one part; gives its samples, of which the first is taken after a hundredth of it."""
    taken: list[Sample] = []
    at_least = max(1, count // samples)
    began = time.monotonic()
    due = at_least
    faulthandler.dump_traceback_later(HANG, exit=True)
    for done, pool in PARTS[name][0](count, at_least, random.Random(f"{seed}-{name}")):
        if done >= due:
            due += at_least
            taken.append(Sample.take(done, pool))
        faulthandler.dump_traceback_later(
            HANG, exit=True
        )  # a thread, and the old one is there for a moment yet
    faulthandler.cancel_dump_traceback_later()
    return taken, time.monotonic() - began


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of a long day")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    for name, (_, count) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, help=f"how many [{count:,} times the scale]")
    parser.add_argument("--samples", type=int, default=100, help="of each part")
    parser.add_argument(
        "--slack", type=float, default=0.0, help="MiB by which memory may grow more: for short runs"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args(args)
    census.own_shared_memory(among_others="PYTEST_XDIST_WORKER" in os.environ)
    print(f"seed {options.seed}", flush=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    wrong: list[str] = []
    for name in options.only:
        count = getattr(options, name)
        if count is None:
            count = int(PARTS[name][1] * options.scale)
        if not count:
            continue
        samples, seconds = soak(name, count, min(options.samples, count), options.seed)
        print(f"\n{count:,} {name} in {seconds:.0f} s\n{table(samples)}", flush=True)
        slack = options.slack + SLACK.get(name, 0.0)
        wrong += [f"{name}, {each}" for each in grown(samples, slack)]
    for each in wrong:
        print(f"GROWN {each}")
    print("flat" if not wrong else f"{len(wrong)} things have grown", f"(seed {options.seed})")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
