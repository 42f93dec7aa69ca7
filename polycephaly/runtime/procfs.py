"""What the kernel tells of a process. Of one that is gone, or where there is no /proc: nothing, or
0."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = [
    "birth_of", "boot_of_this_machine", "descendants", "memory_of", "processor_times", "state_of", "system_call_of",
    "threads_of",
]  # fmt: skip

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_X86_64 = {
    0: "read", 1: "write", 2: "open", 7: "poll", 16: "ioctl", 17: "pread64", 19: "readv", 20: "writev", 23: "select",
    34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg",
    47: "recvmsg", 61: "wait4", 65: "semop", 70: "msgrcv", 72: "fcntl", 73: "flock", 74: "fsync",
    128: "rt_sigtimedwait", 130: "rt_sigsuspend", 202: "futex", 208: "io_getevents", 220: "semtimedop",
    230: "clock_nanosleep", 232: "epoll_wait", 242: "mq_timedsend", 243: "mq_timedreceive", 247: "waitid",
    257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4", 299: "recvmmsg",
    426: "io_uring_enter", 441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip
_GENERIC = {
    4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 63: "read", 64: "write",
    65: "readv", 66: "writev", 67: "pread64", 72: "pselect6", 73: "ppoll", 82: "fsync", 95: "waitid", 98: "futex",
    101: "nanosleep", 115: "clock_nanosleep", 133: "rt_sigsuspend", 137: "rt_sigtimedwait", 188: "msgrcv",
    192: "semtimedop", 193: "semop", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg",
    212: "recvmsg", 242: "accept4", 243: "recvmmsg", 260: "wait4", 426: "io_uring_enter", 441: "epoll_pwait2",
    449: "futex_waitv",
}  # fmt: skip
_SYSTEM_CALLS = _X86_64 if os.uname().machine == "x86_64" else _GENERIC
"""Those that may wait, by number. The kernel tells numbers only; x86_64 has its own, newer machines
common ones."""
_OWN = ("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:", "Swap:")


def _stat(what: str) -> list[str]:
    """Of a process, or of one of its threads: the fields after the name, from the state on."""
    try:
        with open(f"/proc/{what}/stat") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []


def state_of(pid: int, thread: str = "") -> str:
    """Of its main thread, or of another. One letter: R(unning), S(leeping), D(isk), T (stopped), t
    (traced), Z(ombie); empty where there is none."""
    return (_stat(f"{pid}/task/{thread}" if thread else str(pid)) or [""])[0]


def birth_of(pid: int) -> str:
    """What tells it from all others that have had its pid: the boot of the machine, and when it
    began after that. Empty where there is none, or nothing of it but an exit status."""
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


def system_call_of(pid: int, thread: str) -> str | None:
    """In which one a thread waits, by name, or by number for a rare one; None where it runs, or the
    kernel does not tell. (It tells who may trace the process: its user, in most containers too.)"""
    try:
        with open(f"/proc/{pid}/task/{thread}/syscall") as told:
            number = int(told.read().split()[0])
    except (OSError, ValueError, IndexError):  # gone, forbidden, or "running"
        return None
    return _SYSTEM_CALLS.get(number, f"number {number}") if number >= 0 else None


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
    """Bytes that it and its descendants hold for themselves: in memory or swapped out, and shared
    with nobody.

    What a fork has in common with its parent is not its own. Telling that takes the kernel
    milliseconds a gigabyte, so it is not asked while all that is in memory is less than `at_least`;
    then that is the answer."""
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
