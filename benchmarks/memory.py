"""What processes take, from /proc: the proportional set size, in which a page shared by n counts
one nth."""

from __future__ import annotations

import contextlib
import os

__all__ = ["available", "descendants", "private", "pss", "pss_of_all"]


def _field(path: str, name: str) -> int:
    """In bytes; /proc says kB and means KiB."""
    with open(path) as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise LookupError(f"{path} has no {name}")


def available() -> int:
    return _field("/proc/meminfo", "MemAvailable")


def pss(pid: int) -> int:
    return _field(f"/proc/{pid}/smaps_rollup", "Pss")


def private(pid: int) -> int:
    """What is shared with nobody."""
    return sum(
        _field(f"/proc/{pid}/smaps_rollup", name) for name in ("Private_Clean", "Private_Dirty")
    )


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as listed:
                for child in map(int, listed.read().split()):
                    found += [child, *descendants(child)]
    return found


def pss_of_all() -> int:
    """Of this process and of everything that it has started."""
    total = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        with contextlib.suppress(OSError):  # it has just ended
            total += pss(pid)
    return total
