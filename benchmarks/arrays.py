"""What large arrays cost: handed to a worker, handed back, and held by many at once."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from .measuring import NUMBERS_PER_PAGE, Executors, noop, sum_of_pages, transfer_ms
from .memory import available, pss_of_all
from .peers import OURS, PEERS
from .suite import WORKERS, Figures, Sizes, Skipped

try:
    import numpy as np
except ImportError:
    raise Skipped("numpy is not installed") from None

WARM_UPS = 3
MINUTE = 60.0

_kept: Any = None  # what a worker holds on to


def answer_with_another(array: Any) -> Any:
    """The other one is made once, at the first call, and says by one number that it is the answer
    to this one."""
    global _kept
    if _kept is None:
        _kept = np.zeros_like(array)
    _kept[0] = sum_of_pages(array)
    return _kept


def copy_ms(source: Any, target: Any) -> float:
    began = time.perf_counter()
    np.copyto(target, source)
    return (time.perf_counter() - began) * 1e3


def back_ms(workers: Executors, array: Any) -> float:
    began = time.perf_counter()
    other = workers.result(workers.submit(answer_with_another, workers.prepare(array)))
    total = sum_of_pages(other)
    took = time.perf_counter() - began
    assert total == other[0] == sum_of_pages(array)
    return took * 1e3


def array(peer: str, sizes: Sizes) -> Figures:
    """Milliseconds, and the same in warm copies: from one array that has been touched to
    another."""
    numbers = sizes.array // 8
    target = np.ones(numbers)

    def fresh() -> Any:
        """A new one each time: who remembers an array by its identity (joblib does) would not send
        it again."""
        return (
            np.random.default_rng()
            .integers(0, 1000, NUMBERS_PER_PAGE)
            .astype(float)
            .repeat(numbers // NUMBERS_PER_PAGE + 1)[:numbers]
        )

    with PEERS[peer].start(WORKERS) as workers:
        workers.result(workers.submit(noop, 7))
        cold = transfer_ms(workers, fresh())
        for _ in range(WARM_UPS):
            for work in (
                sum_of_pages,
                answer_with_another,
            ):  # as many at once as there are workers: all get warm
                workers.results(
                    [workers.submit(work, workers.prepare(fresh())) for _ in range(WORKERS)]
                )
        copy_ms(fresh(), target)
        there, back, copies = [], [], []
        for _ in range(sizes.repetitions):
            sent = fresh()
            copies.append(copy_ms(sent, target))
            there.append(transfer_ms(workers, sent))
            sent = fresh()
            copies.append(copy_ms(sent, target))
            back.append(back_ms(workers, sent))
    copy = statistics.median(copies)
    figures = {"there": statistics.median(there), "back": statistics.median(back), "cold": cold}
    return {
        "copy_ms": copy,
        **{f"{name}_ms": ms for name, ms in figures.items()},
        **{f"{name}_copies": ms / copy for name, ms in figures.items()},
    }


def hold(array: Any, place: str, holders: int) -> float:
    """Reads it, keeps it, and waits until so many other processes have done so too."""
    global _kept
    _kept = array
    total = sum_of_pages(array)
    Path(place, str(os.getpid())).touch()
    end = time.monotonic() + MINUTE
    while len(os.listdir(place)) < holders:
        if time.monotonic() > end:
            raise TimeoutError(f"only {len(os.listdir(place))} of {holders} workers hold the array")
        time.sleep(0.005)
    return total


def share(peer: str, sizes: Sizes) -> Figures:
    """By how much all processes together grow, in copies of the array; the controller's own is not
    counted."""
    if available() < 4 * sizes.shared:
        raise Skipped(
            f"not enough memory for an array of {sizes.shared >> 20} MiB and copies of it"
        )
    if peer == OURS:
        pool_type: Any = import_module(PEERS[OURS].module).Pool
        if not hasattr(pool_type, "share"):
            raise Skipped("Pool has no share")
        with pool_type(sizes.holders) as pool:
            for each in pool.everywhere("None"):
                each.result()
            return _growth(
                Executors(pool.promise, lambda promise: promise.result(), prepare=pool.share), sizes
            )
    with PEERS[peer].start(sizes.holders) as workers:
        return _growth(workers, sizes)


def _growth(workers: Executors, sizes: Sizes) -> Figures:
    with tempfile.TemporaryDirectory() as place:
        array = np.ones(sizes.shared // 8)
        before = pss_of_all()
        handle = workers.prepare(array)
        holding = [workers.submit(hold, handle, place, sizes.holders) for _ in range(sizes.holders)]
        assert set(workers.results(holding)) == {sum_of_pages(array)}
        growth = pss_of_all() - before
    if hasattr(handle, "release"):
        handle.release()
    return {"copies": growth / array.nbytes, "growth_mib": growth / (1 << 20)}
