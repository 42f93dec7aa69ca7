"""Name the limit of the machine that was reached, because an error number alone does not."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import resource
import select
import time
from _thread import allocate_lock, get_native_id, start_new_thread
from collections.abc import Iterator
from contextlib import suppress

from .procfs import read_text


def check_descriptors(drones: int) -> None:
    """Raise `OSError` if `drones` drones would exceed the limit of file descriptors, or if there
    is no /proc.

    Each takes three (two pipes, one connection), and some are kept in reserve for the program.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, "drones need /proc, which is not mounted here (mount -t proc proc /proc)"
        ) from None
    except OSError as error:
        raise name_limit(error) from error
    needed = used + 3 * drones + 32
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise OSError(
            errno.EMFILE,
            f"about {needed} file descriptors are needed for {drones} drone{'s' * (drones != 1)}; "
            f"the file descriptor limit is {limit} (RLIMIT_NOFILE; see ulimit -n)",
        )


def check_processes(drones: int) -> None:
    """Raise `OSError` if the kernel never has as many processes as `drones`."""
    with suppress(ValueError):  # no such file
        limit = int(read_text("/proc/sys/kernel/pid_max"))
        if drones >= limit:
            raise OSError(
                errno.EAGAIN,
                f"{drones:,} drones are more than the processes that this system can have, which "
                f"are {limit:,} (kernel.pid_max)",
            )


# Of network file systems without a lock service, of FUSE and sandboxes, and of old kernels.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_ZMQ_THREADS = 2
"""Threads that a ZeroMQ context starts with its first socket."""
_ZMQ_DESCRIPTORS = 16
"""Descriptors that a ZeroMQ context and its first sockets take, and some in reserve."""


def check_room_for_zeromq() -> None:
    """Raise `OSError` if the system has no room for a ZeroMQ context, which would abort the
    process.
    """
    opened: list[int] = []
    try:
        opened += (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_ZMQ_DESCRIPTORS))
    except OSError as error:
        event = f"ZeroMQ needs {_ZMQ_DESCRIPTORS} file descriptors"
        raise name_limit(error, event) from error
    finally:
        for fd in opened:
            os.close(fd)
    _check_threads(_ZMQ_THREADS)


def _check_threads(count: int) -> None:
    """Start and end `count` threads; raise `OSError` if that fails.

    Other processes of this user, of a container or of a control group count too, so reading the
    limit would not be enough.
    """
    gate = allocate_lock()
    threads: list[int] = []
    started = allocate_lock()
    started.acquire()

    def wait() -> None:
        threads.append(get_native_id())
        started.release()
        with gate:
            pass

    gate.acquire()
    try:
        for _ in range(count):
            start_new_thread(wait, ())
            started.acquire()
    except RuntimeError as error:
        if "shutdown" in str(error):  # CPython 3.12 refuses its own threads then, not libzmq's
            return
        limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        raise OSError(
            errno.EAGAIN,
            f"ZeroMQ needs {count} threads, and this process may start {len(threads)} more: the "
            f"process limit is reached, which is {limit} for all processes and threads of a user "
            "(RLIMIT_NPROC; see ulimit -u), or that of the control group (pids.max); raise the "
            "limit, or end other programs",
        ) from None
    finally:
        gate.release()
        for each in threads:  # until the kernel no longer counts the thread
            while os.path.exists(f"/proc/self/task/{each}"):
                time.sleep(0.0001)  # without a pause, it would get the interpreter after 5 ms only


def name_limit(error: Exception, event: str = "a drone could not be started") -> BaseException:
    """Return `error`; if a limit of the system was reached, its name follows `event`."""
    if not isinstance(error, OSError):
        return error
    limits = {
        errno.EAGAIN: ("process limit", "RLIMIT_NPROC; see ulimit -u"),
        errno.EFBIG: ("file size limit", "RLIMIT_FSIZE; see ulimit -f"),
        errno.EMFILE: ("file descriptor limit", "RLIMIT_NOFILE; see ulimit -n"),
        errno.ENFILE: ("the system's file descriptor limit", "fs.file-max"),
        errno.ENOMEM: ("memory limit", "RLIMIT_AS, or the machine's memory"),
    }
    if error.errno not in limits:
        return error
    limit, setting = limits[error.errno]
    return OSError(error.errno, f"{event}: {limit} reached ({setting}): {error.strerror}")


def watch(epoll: select.epoll, fd: int, events: int) -> None:
    """Have `epoll` report events of `fd`. Raises `OSError`, with the limit that was reached."""
    try:
        epoll.register(fd, events)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        limit = read_text("/proc/sys/fs/epoll/max_user_watches").strip()
        raise OSError(
            errno.ENOSPC,
            f"the processes of this user may watch no more than {limit} descriptors with epoll "
            "(fs.epoll.max_user_watches): raise the limit with sysctl, or end other programs",
        ) from error


def lock_file(fd: int, path: str, flags: int, cure: str) -> None:
    """Lock (flock) the file `path`, open as `fd`. Raises `OSError`, with the path, and with `cure`
    if its file system knows no locks.
    """
    try:
        fcntl.flock(fd, flags)
    except OSError as error:
        error.filename = path
        if error.errno in _NO_LOCKS:
            text = f"the file system has no locks (flock): {error.strerror}; {cure}"
            raise OSError(error.errno, text, path) from error
        raise


def shared_memory_ceiling() -> int:
    """Return the bytes of shared memory that one pool may have.

    Half of the machine's memory, or half of the control group's limit if that is less.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _control_groups("memory", "/"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(ValueError):  # no such file, or "max"
                memory = min(memory, int(read_text(f"{group}/{name}")))
    return memory // 2


def usable_processors() -> int:
    """Return how many processors this process may use: by its affinity mask, or the limit of its
    control group, rounded up, if that is less.
    """
    processors = len(os.sched_getaffinity(0))
    limit = processor_limit()
    return processors if limit is None else max(1, min(processors, math.ceil(limit)))


def processor_limit(root: str = "/") -> float | None:
    """Return how many processors' time the control group of this process gets, or a group around
    it, if that is less. None if there is no limit. `root` is the root directory.
    """
    groups = _control_groups("cpu", root)
    return min((each for group in groups for each in _processor_limits_of(group)), default=None)


def _processor_limits_of(group: str) -> Iterator[float]:
    """Yield the microseconds that a control group may run, by those in which it may do so."""
    old = [read_text(f"{group}/cpu.cfs_{name}_us") for name in ("quota", "period")]
    for words in (read_text(f"{group}/cpu.max").split(), old):
        with suppress(ValueError):  # no such file, or "max"
            quota, period = map(int, words)
            if quota > 0 and period > 0:
                yield quota / period


def _control_groups(controller: str, root: str) -> Iterator[str]:
    """Yield the directories of this process's control group and of those around it, of version 2
    and of the version 1 hierarchy that has `controller`. Some may not exist.

    In a container, the path may be that outside, where only the root of the hierarchy is visible.
    """
    mount = os.path.join(root, "sys/fs/cgroup")
    for line in read_text(os.path.join(root, "proc/self/cgroup")).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        names = [name for name in path.split("/") if name and name != ".."]
        hierarchy = os.path.join(mount, controller) if controllers else mount
        for depth in range(len(names), -1, -1):
            yield os.path.join(hierarchy, *names[:depth])
