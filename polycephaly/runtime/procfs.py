"""Facts about processes, from /proc.

For a process that is gone, or if there is no /proc, the functions return an empty value or 0.
"""

from __future__ import annotations

import os

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_X86_64 = {
    0: "read", 1: "write", 2: "open", 7: "poll", 16: "ioctl", 17: "pread64", 19: "readv",
    20: "writev", 23: "select", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept",
    44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 65: "semop",
    70: "msgrcv", 72: "fcntl", 73: "flock", 74: "fsync", 128: "rt_sigtimedwait",
    130: "rt_sigsuspend", 202: "futex", 208: "io_getevents", 220: "semtimedop",
    230: "clock_nanosleep", 232: "epoll_wait", 242: "mq_timedsend", 243: "mq_timedreceive",
    247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4",
    299: "recvmmsg", 426: "io_uring_enter", 441: "epoll_pwait2", 449: "futex_waitv",
}  # fmt: skip
_GENERIC = {
    4: "io_getevents", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat",
    63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 72: "pselect6", 73: "ppoll",
    82: "fsync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep",
    133: "rt_sigsuspend", 137: "rt_sigtimedwait", 188: "msgrcv", 192: "semtimedop", 193: "semop",
    202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg",
    242: "accept4", 243: "recvmmsg", 260: "wait4", 426: "io_uring_enter", 441: "epoll_pwait2",
    449: "futex_waitv",
}  # fmt: skip
_SYSTEM_CALLS = _X86_64 if os.uname().machine == "x86_64" else _GENERIC
"""The calls that may wait, by number.

The kernel reports numbers only. x86_64 has numbers of its own; newer architectures share theirs.
"""
_PRIVATE_FIELDS = ("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:", "Swap:")


def read_text(path: str) -> str:
    """Return the content of a file; empty if it cannot be read."""
    try:
        with open(path, errors="replace") as file:  # the name of a process may be cut
            return file.read()
    except OSError:
        return ""


def stat_of(path: str) -> list[str]:
    """Return the fields of a process or thread after the name: the first is its state, field 3."""
    return read_text(f"/proc/{path}/stat").rpartition(")")[2].split()


def state_of(pid: int, thread: str = "") -> str:
    """Return the state of the main thread of `pid`, or of `thread`, as one letter.

    R(unning), S(leeping), D(isk), T (stopped), t (traced) or Z(ombie); empty if there is no such
    thread.
    """
    return (stat_of(f"{pid}/task/{thread}" if thread else str(pid)) or [""])[0]


def start_time_of(pid: int) -> str:
    """Return text that distinguishes a process from all others with the same pid.

    The text consists of the boot of the machine and the start time after that. Empty if there is no
    such process, or only its exit status is left.
    """
    fields = stat_of(str(pid))
    if not fields or fields[0] in "ZX":
        return ""
    boot = boot_id()
    return f"{boot}:{fields[19]}" if boot else fields[19]


def boot_id() -> str:
    """Return the boot ID, which tells this machine from others and from its earlier boots."""
    return read_text("/proc/sys/kernel/random/boot_id").strip()


def threads_of(pid: int) -> list[str]:
    """Return the numbers of the threads of `pid`; the main thread's is `pid`."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def processor_times(pid: int, thread: str) -> tuple[float, float]:
    """Return the seconds that a thread has run, and that it was ready but had no processor."""
    try:
        ran, waited, _ = map(int, read_text(f"/proc/{pid}/task/{thread}/schedstat").split())
        return ran / 1e9, waited / 1e9
    except ValueError:  # ended, or a kernel that does not count waiting
        ticks = sum(int(field) for field in stat_of(f"{pid}/task/{thread}")[11:13])
        return ticks / _TICKS_PER_SECOND, 0.0


def processor_seconds_of(pid: int) -> float | None:
    """Return the processor time of a process so far; None if it has ended."""
    ticks = [int(field) for field in stat_of(str(pid))[11:13]]
    return sum(ticks) / _TICKS_PER_SECOND if ticks else None


def system_call_of(pid: int, thread: str) -> str | None:
    """Return the name of the system call in which a thread waits, or the number of a rare one.

    None if the thread runs, or the kernel does not permit the question. A process that may trace
    the other one is permitted: one of the same user, in most containers too.
    """
    try:
        number = int(read_text(f"/proc/{pid}/task/{thread}/syscall").split()[0])
    except (ValueError, IndexError):  # gone, forbidden, or "running"
        return None
    return _SYSTEM_CALLS.get(number, f"number {number}") if number >= 0 else None


def descendants(pid: int) -> list[int]:
    """Return the children of `pid`, and theirs, as `children_of` finds them."""
    family = [pid]
    for each in family:
        family += children_of(each)
    return family[1:]


def children_of(pid: int) -> list[int]:
    """Return the children of `pid`; those that start or end meanwhile may be missed."""
    found: list[int] = []
    for thread in threads_of(pid):
        found += map(int, read_text(f"/proc/{pid}/task/{thread}/children").split())
    return found


def memory_of(pid: int, at_least: int) -> int:
    """Return the bytes that `pid` and its descendants hold alone, in memory or swapped out.

    Pages that a fork shares with its parent do not count. The kernel takes milliseconds a gigabyte
    to find those, so it is asked only if the resident memory reaches `at_least`. If not, the
    resident size is returned.
    """
    pids = [pid, *descendants(pid)]
    resident = sum(map(_resident_bytes, pids))
    return resident if resident < at_least else sum(map(_private_bytes, pids))


def _resident_bytes(pid: int) -> int:
    sizes = read_text(f"/proc/{pid}/statm").split()
    return int(sizes[1]) * _PAGE_BYTES if sizes else 0


def _private_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return sum(
                int(line.split()[1]) << 10 for line in rollup if line.startswith(_PRIVATE_FIELDS)
            )
    except OSError:  # an older kernel, or a process that has changed its user
        return _resident_bytes(pid)
