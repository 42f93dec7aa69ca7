"""The machine's limits, named when they are met: an error number alone does not tell what to
raise."""

from __future__ import annotations

import errno
import os
import resource
from _thread import allocate_lock, get_native_id, start_new_thread
from contextlib import suppress

__all__ = ["ZMQ_THREADS", "check_descriptors", "check_threads", "named", "shared_memory_ceiling"]


def check_descriptors(drones: int) -> None:
    """Three a drone (two pipes, one connection) and some for the rest, or libzmq would abort in
    mid-start."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # not Linux
        used = 0
    except OSError as error:
        raise named(error) from error
    needed = used + 3 * drones + 32
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise OSError(
            errno.EMFILE,
            f"{drones} drones need about {needed} file descriptors; the file descriptor limit is {limit} "
            "(RLIMIT_NOFILE; see ulimit -n)",
        )


ZMQ_THREADS = 2
"""Threads that a ZeroMQ context starts with its first socket."""


def check_threads(count: int) -> None:
    """Start and end `count` threads: libzmq aborts the process where it cannot start its own.

    Other processes of this user, of a container or of a control group count too, so a look at the
    limit would not tell. Raises `OSError`."""
    gate = allocate_lock()
    threads: list[int] = []
    begun = allocate_lock()
    begun.acquire()

    def wait() -> None:
        threads.append(get_native_id())
        begun.release()
        with gate:
            pass

    gate.acquire()
    try:
        for _ in range(count):
            start_new_thread(wait, ())
            begun.acquire()
    except RuntimeError:
        limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        raise OSError(
            errno.EAGAIN,
            f"ZeroMQ needs {count} threads, and this process may start {len(threads)} more: the process limit is "
            f"reached, which is {limit} for all processes and threads of a user (RLIMIT_NPROC; see ulimit -u), or that "
            "of the control group (pids.max); raise it, or end what else is running",
        ) from None
    finally:
        gate.release()
        for each in threads:  # until the kernel does not count it any more
            while os.path.exists(f"/proc/self/task/{each}"):
                pass


def named(error: Exception) -> BaseException:
    """An error of the system with the name of the limit that was reached."""
    if not isinstance(error, OSError):
        return error
    limits = {
        errno.EAGAIN: ("process limit", "RLIMIT_NPROC; see ulimit -u"),
        errno.EMFILE: ("file descriptor limit", "RLIMIT_NOFILE; see ulimit -n"),
        errno.ENFILE: ("the system's file descriptor limit", "fs.file-max"),
        errno.ENOMEM: ("memory limit", "RLIMIT_AS, or the machine's memory"),
    }
    if error.errno not in limits:
        return error
    what, where = limits[error.errno]
    return OSError(
        error.errno, f"a drone could not be started: {what} reached ({where}): {error.strerror}"
    )


def shared_memory_ceiling() -> int:
    """Bytes that one pool may have in shared memory: half of this machine's, or of what its control
    group may use."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError), open(limit) as file:
            memory = min(memory, int(file.read()))
    return memory // 2
