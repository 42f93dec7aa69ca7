"""What the kernel tells of a process. Of one that is gone, or where there is no /proc: nothing, or 0."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["descendants", "memory_of", "pulse_of", "state_of"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_OWN = ("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:", "Swap:")


def _stat(pid: int) -> list[str]:
    """The fields after the name, from the state on."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []


def state_of(pid: int) -> str:
    """One letter: R(unning), S(leeping), D(isk), T (stopped), t (traced), Z(ombie); empty where there is none."""
    return (_stat(pid) or [""])[0]


def pulse_of(pid: int) -> tuple[str, ...]:
    """The processor time that all its threads have used, in ticks: it changes while it computes."""
    return tuple(_stat(pid)[11:13])


def descendants(pid: int) -> list[int]:
    """What it has started, and they. Those that come or go meanwhile may be missed."""
    found: list[int] = []
    parents = [pid]
    for parent in parents:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with suppress(OSError), open(f"/proc/{parent}/task/{thread}/children") as listed:
                    parents += (children := [int(each) for each in listed.read().split()])
                    found += children
    return found


def memory_of(pid: int, at_least: int) -> int:
    """Bytes that it and its descendants hold for themselves: in memory or swapped out, and shared with nobody.

    What a fork has in common with its parent is not its own. Telling that takes the kernel milliseconds a gigabyte, so
    it is not asked while all that is in memory is less than `at_least`; then that is the answer.
    """
    everyone = [pid, *descendants(pid)]
    resident = sum(map(_resident, everyone))
    return resident if resident < at_least else sum(map(_own, everyone))


def _resident(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE
    return 0


def _own(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith(_OWN))
    except OSError:  # an older kernel; or another user's, if it has changed its user
        return _resident(pid)
