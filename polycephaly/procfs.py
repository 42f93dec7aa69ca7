"""What the kernel tells of a process. Of one that is gone, or where there is no /proc: nothing, or 0."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = [
    "birth_of", "boot_of_this_machine", "descendants", "memory_of", "processor_times", "state_of", "threads_of",
]  # fmt: skip

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


def state_of(pid: int, thread: str = "") -> str:
    """Of its main thread, or of another. One letter: R(unning), S(leeping), D(isk), T (stopped), t (traced), Z(ombie);
    empty where there is none."""
    return (_stat(f"{pid}/task/{thread}" if thread else str(pid)) or [""])[0]


def birth_of(pid: int) -> str:
    """What tells it from all others that have had its pid: the boot of the machine, and when it began after that.
    Empty where there is none, or nothing of it but an exit status."""
    fields = _stat(str(pid))
    if not fields or fields[0] in "ZX":
        return ""
    boot = boot_of_this_machine()
    return f"{boot}:{fields[19]}" if boot else fields[19]


def boot_of_this_machine() -> str:
    """What tells it from all other machines, and from itself before."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read().strip()
    except OSError:
        return ""


def threads_of(pid: int) -> list[str]:
    """Their numbers; the main thread's is `pid`."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def processor_times(pid: int, thread: str) -> tuple[float, float]:
    """Seconds that a thread has run, and that it was ready to but had to wait for a processor."""
    try:
        with open(f"/proc/{pid}/task/{thread}/schedstat") as told:
            ran, waited, _ = map(int, told.read().split())
        return ran / 1e9, waited / 1e9
    except (OSError, ValueError):  # it has ended, or the kernel does not count what waits
        return sum(int(ticks) for ticks in _stat(f"{pid}/task/{thread}")[11:13]) / _TICKS, 0.0


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
