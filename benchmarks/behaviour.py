"""What pools do where they differ, tried out. Prints a table.

    python -m benchmarks.behaviour [PEER ...]

    a lambda            a lambda as the task
    loaded data         a task that reads 100 MB which `__main__` has loaded
    a worker's death    one task of ten kills its worker
    cancel              a task that sleeps is cancelled: is its worker free then?
    SIGKILL             the process with the pool is killed: what is left of it after five seconds

Each is tried in a fresh process. Whatever gives no answer within `PATIENCE_SECONDS` hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .memory import descendants
from .peers import OURS, PEERS, Executors

SHOWN = (OURS, "multiprocessing", "futures", "loky", "ray")
PATIENCE_SECONDS = 30
DATA_BYTES = 100_000_000

data: Any = None


def read_data(_: int) -> tuple[float, int]:
    """Return the sum of the data, and the bytes that are this process's alone."""
    total = float(data.sum())
    with open("/proc/self/smaps_rollup") as rollup:
        own = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
    return total, own * 1024


def die_if_3(n: int) -> int:
    if n == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    return n


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def try_lambda(pool: Executors) -> str:
    try:
        return "yes" if pool.result(pool.submit(lambda n: n + 1, 1)) == 2 else "wrong"
    except Exception as error:
        return f"no: {type(error).__name__}"


def try_loaded_data(pool: Executors) -> str:
    try:
        total, own = pool.result(pool.submit(read_data, 0))
    except Exception as error:
        return f"not there: {type(error).__name__}"
    assert total * 8 == DATA_BYTES
    return "shared" if own < DATA_BYTES // 2 else "a copy in each worker"


def try_death(pool: Executors) -> str:
    lost = 0
    for future in [pool.submit(die_if_3, n) for n in range(10)]:
        try:
            pool.result(future)
        except Exception:
            lost += 1
    try:
        pool.result(pool.submit(sleep, 0))
        after = "goes on"
    except Exception:
        after = "broken"
    return f"{lost} of 10 tasks lost, the pool {after}"


def try_cancel(pool: Executors) -> str:
    sleeping = [pool.submit(sleep, PATIENCE_SECONDS * 2) for _ in range(2)]
    time.sleep(1)  # until both run
    for future in sleeping:
        if hasattr(future, "cancel"):
            future.cancel()
        elif "ray" in sys.modules:
            sys.modules["ray"].cancel(future, force=True)  # without force, a sleep goes on
        else:
            return "no"
    pool.result(pool.submit(sleep, 0))  # or hangs
    return "yes"


def list_processes(pool: Executors) -> list[int]:
    for _ in range(2):
        pool.submit(sleep, 60)
    time.sleep(1)  # until both run
    return descendants(os.getpid())


TRIED: dict[str, Callable[[Executors], str | list[int]]] = {
    "a lambda": try_lambda,
    "loaded data": try_loaded_data,
    "a worker's death": try_death,
    "cancel of running work": try_cancel,
    "after SIGKILL": list_processes,
}


def observe(what: str, peer: str, answer: Path) -> str:
    """Return what `peer` does, tried in a process of its own, which writes the file `answer`."""
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.behaviour", "--one", what, peer, answer]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=null, stderr=null, start_new_session=True)
    left: list[int] = []
    end = time.monotonic() + PATIENCE_SECONDS
    try:
        while not answer.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        if not answer.exists():
            if process.poll() is not None:
                return "fails"
            return "no: its worker stays busy" if what.startswith("cancel") else "hangs"
        told: str | list[int] = json.loads(answer.read_text())
        if isinstance(told, str):
            return told
        left = told
        process.kill()
        process.wait()
        time.sleep(5)
        alive = sum(map(is_alive, left))
        return f"{alive} of {len(left)} processes left" if alive else "nothing is left"
    finally:
        for pid in {process.pid, *descendants(process.pid), *left}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main() -> None:
    global data
    if sys.argv[1:2] == ["--one"]:
        what, peer, answer = sys.argv[2:]
        if what == "loaded data":
            data = np.ones(DATA_BYTES // 8)
        with PEERS[peer].start(2) as pool:
            written = Path(f"{answer}.new")
            written.write_text(json.dumps(TRIED[what](pool)))
            written.rename(answer)
            time.sleep(PATIENCE_SECONDS)  # to be killed: some pools hang at their end
    shown = [peer for peer in sys.argv[1:] or SHOWN if PEERS[peer].installed]
    print("| |", " | ".join(PEERS[peer].title for peer in shown), "|")
    print("| ---" * (len(shown) + 1), "|")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"TMPDIR": scratch, "RAY_USAGE_STATS_ENABLED": "0"}
        answer = Path(scratch, "answer")
        for what in TRIED:
            row = [what, *(observe(what, peer, answer) for peer in shown)]
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
