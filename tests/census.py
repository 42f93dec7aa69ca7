"""Who and what is there: processes, threads, descriptors, files. Taken before and after each test.

How a process of ours is known, whoever its parent is by now:
    exec'd from here    its environment at exec carries `MARKER`   (/proc/PID/environ)
    forked from here    it holds our marker file on `MARKER_FD`    (a fork keeps descriptors)
so an orphan that init has adopted is found as well.

Several workers test side by side (see conftest.py), and each counts what is its own. Processes
carry the marker of their worker; threads and descriptors are those of this process; TMPDIR is a
folder for each worker. Files in /dev/shm do not tell whose they are: so each worker sees a /dev/shm
of its own, where it may mount one (`own_shared_memory`). Where it may not, those files are counted
once, before and after the whole run.

A Ray that runs for the tests (`engines.py`) is not counted: its daemons, its workers that are
nobody's actor yet, its sockets, what it maps; nor are the actors with which a test takes places of
the cluster: how soon they are gone is Ray's affair. All other actors are, and what they start."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from faults import stack_of

from polycephaly.engines.local import native_threads as native
from polycephaly.pool import reactor

MARKER = "POLYCEPHALY_TEST_RUN"
MARKER_FD = 700
# Seconds of a machine that lets us run (`Patience`): DESIGN's bound for everything to be gone.
DEADLINE = 2.0
# Seconds after which a test has left something. One process that stood still is late, and no leak:
# how soon all is gone, `endings.py` measures.
LEAK_SECONDS = 15.0

_marker_file: str | None = None
_shared_memory_is_ours = True


def mark_this_process() -> None:
    """From now on whatever is forked or exec'd from here can be recognized."""
    global _marker_file
    os.environ[MARKER] = f"{os.getpid()}-{os.urandom(6).hex()}"
    with tempfile.NamedTemporaryFile(prefix="marker-", delete=False) as file:
        _marker_file = file.name
        os.dup2(file.fileno(), MARKER_FD, inheritable=True)


def own_shared_memory(*, among_others: bool) -> bool:
    """From now on this thread, and what it starts, sees an empty /dev/shm that nobody else sees.
    False where that takes a right that we have not got; then, `among_others` who test, none of it
    is counted as ours."""
    global _shared_memory_is_ours
    libc = ctypes.CDLL(None)
    new_mounts, all_private = 0x20000, 0x4000 | 1 << 18  # CLONE_NEWNS; MS_REC | MS_PRIVATE
    own = not (
        libc.unshare(new_mounts)
        or libc.mount(None, b"/", None, ctypes.c_ulong(all_private), None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), None)
    )
    _shared_memory_is_ours = own or not among_others
    return own


def pids() -> Iterator[int]:
    return map(int, filter(str.isdigit, os.listdir("/proc")))


def alive(pid: int) -> bool:
    """Does `pid` run? A zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def marked(value: str) -> set[int]:
    """Living processes whose environment at exec carries the marker with this value."""
    wanted = f"{MARKER}={value}".encode()
    found = set()
    for pid in pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
            if wanted in environ.read().split(b"\0") and alive(pid):
                found.add(pid)
    return found


def holding_our_file() -> set[int]:
    found = set()
    for pid in pids():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{MARKER_FD}") == _marker_file:
                found.add(pid)
    return found


def children() -> set[int]:
    """Direct children, zombies included."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as listed:
            found.update(map(int, listed.read().split()))
    return found


def descriptors() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return {fd: target for fd, target in found.items() if not target.endswith(f"/{os.getpid()}/fd")}


def homes(place: str | None = None) -> set[str]:
    return {
        e.path
        for e in os.scandir(place or tempfile.gettempdir())
        if e.name.startswith("polycephaly-")
    }


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if shared_memory_is_counted() else set()


def shared_memory_is_counted() -> bool:
    return _shared_memory_is_ours and os.path.isdir("/dev/shm")


def native_threads() -> set[str]:
    """The libraries whose threads make a fork of this process unsafe. (OpenBLAS ends its own before
    each fork.)"""
    if ray_is_up():
        return set()
    origins = filter(None, map(native.find_origin, native._suspect_threads()))
    return {each.library for each in origins if native._is_unsafe(each) and not native._ends(each)}


@dataclass
class Census:
    processes: set[int]
    threads: set[threading.Thread]
    descriptors: dict[int, str]
    homes: set[str]
    shared_memory: set[str]
    native_threads: set[str]

    @classmethod
    def take(cls) -> Census:
        everyone = (marked(os.environ[MARKER]) | holding_our_file() | children()) - {os.getpid()}
        if ray_is_up():
            everyone = {pid for pid in everyone if not of_ray(pid)}
        return cls(
            everyone,
            set(threading.enumerate()),
            descriptors(),
            homes(),
            shared_memory(),
            native_threads(),
        )

    def left_since(self, before: Census) -> list[str]:
        left = [f"process {describe(pid)}" for pid in sorted(self.processes - before.processes)]
        left += [f"thread {each.name}{stack_of(each)}" for each in self.threads - before.threads]
        left += [
            f"descriptor {fd} -> {target}"
            for fd, target in self.descriptors.items()
            if before.descriptors.get(fd) != target and not _harmless(target)
        ]
        left += [f"directory {path}" for path in sorted(self.homes - before.homes)]
        left += [f"/dev/shm/{name}" for name in sorted(self.shared_memory - before.shared_memory)]
        left += [
            f"a thread of {library}, so that no test after this one can fork its drones: "
            "use a script"
            for library in sorted(self.native_threads - before.native_threads)
        ]
        return left


def _harmless(target: str) -> bool:
    if ray_is_up() and target.startswith(
        ("socket:", "pipe:", "anon_inode:", "/dev/shm/plasma", "/memfd:")
    ):
        return True
    return target.startswith(("/dev/null", "/dev/urandom")) or "/.hypothesis/" in target


# -- Ray -------------------------------------------------------------------------------------------

_RAYS_OWN = re.compile(
    rb"ray::(IDLE|DashboardAgent|RuntimeEnvAgent|PlaceTaker)"
    rb"|/ray/core/src/ray/(gcs/gcs_server|raylet/raylet)"
    rb"|/ray/_private/|/ray/autoscaler/|/ray/dashboard/"
)


def ray_is_up() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def wait_for_drones() -> None:
    """Wait until all drones of this process have been forked. A pool of a module's fixture is made
    before the first census, and does not wait for the drones after the first."""
    for tenant in reactor._reactor.tenants[:] if reactor._reactor else ():
        for handle in tenant.handles[:]:
            handle.pid_known.result()


def wait_for_actors() -> None:
    """Wait until all actors that were asked for are there. A pool of a module's fixture is made
    before the first census, and does not wait for its switch: this would come between the two."""
    if not ray_is_up():
        return
    from ray._private.state import actors

    patience = Patience(DEADLINE)
    while not patience.over and any(
        each["State"] not in ("ALIVE", "DEAD") for each in actors().values()
    ):
        patience.nap()


def of_ray(pid: int) -> bool:
    """One of Ray's own, or a worker that is no actor: these are named after their class."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return True
    return not command or _RAYS_OWN.search(command) is not None


class Patience:
    """So many seconds for others to do something: what this thread has slept and computed
    meanwhile. When the machine stood still, or was somebody else's, they could do nothing either,
    and that does not count."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self._computed = time.thread_time()

    def nap(self, seconds: float = 0.01) -> None:
        time.sleep(seconds)
        before, self._computed = self._computed, time.thread_time()
        self.left -= seconds + self._computed - before

    @property
    def over(self) -> bool:
        return self.left <= 0


def wait_until_clean(before: Census, seconds: float = LEAK_SECONDS) -> list[str]:
    """What is left since `before`, after at most `seconds` for it to go."""
    patience = Patience(seconds)
    while left := Census.take().left_since(before):
        if patience.over:
            return left
        gc.collect()
        patience.nap()
    return []


def wait_until_gone(value: str, patience: Patience | None = None) -> list[str]:
    """The processes with this marker that are left after at most `LEAK_SECONDS`, or when that
    patience is over."""
    patience = patience or Patience(LEAK_SECONDS)
    while left := marked(value):
        if patience.over:
            return [describe(pid) for pid in sorted(left)]
        patience.nap()
    return []


def describe(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode("utf-8", "replace")[:200]
        with open(f"/proc/{pid}/stat") as stat:
            state, parent = stat.read().rpartition(")")[2].split()[:2]
        return f"{pid} (state {state}, parent {parent}): {command}"
    except OSError:
        return f"{pid} (just gone)"
