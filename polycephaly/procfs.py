"""What the kernel tells of a process. Of one that is gone, or where there is no /proc: nothing, or 0."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["birth_of", "descendants", "memory_of", "processor_time", "state_of"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_OWN = ("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:", "Swap:")


def _stat(what: str) -> list[str]:
    """Of a process, or of one of its threads: the fields after the name, from the state on."""
    try:
        with open(f"/proc/{what}/stat") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []


def state_of(pid: int) -> str:
    """One letter: R(unning), S(leeping), D(isk), T (stopped), t (traced), Z(ombie); empty where there is none."""
    return (_stat(str(pid)) or [""])[0]


def birth_of(pid: int) -> str:
    """What tells it from all others that have had its pid: the boot of the machine, and when it began after that.
    Empty where there is none, or nothing of it but an exit status."""
    fields = _stat(str(pid))
    if not fields or fields[0] in "ZX":
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}:{fields[19]}"
    except OSError:
        return fields[19]


def processor_time(pid: int) -> tuple[float, float]:
    """Seconds that its main thread has used, and all of its threads; in steps of a hundredth, mostly."""
    return _used(f"{pid}/task/{pid}"), _used(str(pid))


def _used(what: str) -> float:
    return sum(int(ticks) for ticks in _stat(what)[11:13]) / _TICKS


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
