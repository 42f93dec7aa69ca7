"""Processor time of the controller and of everything that it has started, from /proc.

Wall time tells what one user sees on an idle machine. Processor time tells what the rest of a busy
machine loses; it is what a wake-up more costs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from .memory import descendants

__all__ = ["processor_time"]

Spent = dict[str, float]


@contextmanager
def processor_time() -> Iterator[Spent]:
    """Fill a dictionary, at the end of the block, with the seconds of processor time of the block:
    `controller_s` and `workers_s`. A worker that ends in the block is not counted.
    """
    spent: Spent = {}
    before = _of_all()
    yield spent
    after = _of_all()
    own = os.getpid()
    spent["controller_s"] = (after[own] - before[own]) / 1e9
    spent["workers_s"] = (
        sum(took - before.get(pid, 0) for pid, took in after.items() if pid != own) / 1e9
    )


def _of_all() -> dict[int, int]:
    """Return nanoseconds by process."""
    return {pid: _nanoseconds(pid) for pid in (os.getpid(), *descendants(os.getpid()))}


def _nanoseconds(pid: int) -> int:
    """Return what all threads of a process have used."""
    total = 0
    with contextlib.suppress(OSError):  # it has just ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                total += int(file.read().split()[0])
    return total
