"""How the end of one process becomes the end of those that depend on it.

    controller ── lifeline (its only other end) ·· pidfd ──> zygote ── PR_SET_PDEATHSIG ──> drone ──> what it started
                                                           └── kills the process group, and each orphan ─────┘

Three means, each for what the others cannot see:

* a **lifeline**: a socket pair; the owner alone holds the other end. However the owner ends, the
  kernel closes that end, and the zygote reads end-of-file. A copy of it in any other process would
  keep it alive, so what must not cross a fork is listed in `OURS` and closed first thing in every
  forked child.
* a **pidfd** of the owner: readable when that process has ended, whatever copies of descriptors
  there are (Linux 5.3). It also covers a child that C code forked behind Python's back.
* **PR_SET_PDEATHSIG**: the kernel kills the child when the *thread* that forked it ends. So it
  serves only where that thread is a process's main one, as the zygote's. It is lost when the parent
  ends before it is armed: hence the look at `getppid()` afterwards.

`PR_SET_CHILD_SUBREAPER` makes orphans of a dead drone children of the zygote, even those that made
a session of their own, so that it can find and kill them. Where the zygote itself was killed,
nobody is their parent; then its owner finds them by the *family* in their environment, a name that
each program started by a drone inherits."""

from __future__ import annotations

import array
import ctypes
import os
import secrets
import signal
import socket
import sys
from contextlib import suppress
from typing import Protocol, TypeVar

__all__ = [
    "OURS", "Descriptor", "become_subreaper", "children", "close", "die_with_parent", "end_family", "end_process_group",
    "join_family", "new_family", "open_pidfd", "own", "receive_fds",
]  # fmt: skip


class Closable(Protocol):
    def close(self) -> object: ...


class Descriptor:
    """One that knows when it is closed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


OURS: set[Closable] = set()
"""What this image has open and no forked child may keep. Objects, not numbers: each knows when it
is closed, so that closing twice cannot hit another file that has got the number since."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


F = TypeVar("F", bound=Closable)


def own(file: F) -> F:
    OURS.add(file)
    return file


def close(file: Closable) -> None:
    with suppress(OSError):
        file.close()
    OURS.discard(
        file
    )  # after that: a child forked in between closes it once more, which is nothing


def _after_fork_in_child() -> None:
    for file in list(OURS):
        close(file)


os.register_at_fork(after_in_child=_after_fork_in_child)


def receive_fds(end: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """A message, and the descriptors that came with it, which no program started here inherits.
    (The flag for that is what `socket.recv_fds` takes, and ignores.)"""
    fds = array.array("i")
    message, beside, _, _ = end.recvmsg(
        size, socket.CMSG_SPACE(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, payload in beside:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return message, list(fds)


def open_pidfd(pid: int) -> int | None:
    """A descriptor that is readable once process `pid` has ended; None where the kernel has no such
    thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def die_with_parent(parent: int) -> None:
    """To be called in a forked child: SIGKILL for this process when the thread that forked it
    ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become_subreaper() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """The direct children of this (single-threaded) process, zombies included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return set(map(int, listed.read().split()))
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return _children_by_search()


def _children_by_search() -> set[int]:
    me, found = os.getpid(), set()
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == me:
                    found.add(int(name))
    return found


def end_process_group(leader: int) -> None:
    """SIGKILL for every process of that group. Safe while the leader is unreaped: its number is not
    reused."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


_FAMILY = "POLYCEPHALY_FAMILY"
_ROUNDS = 20


def new_family() -> str:
    """Of a zygote that is to be made; it completes it by its own number. Those of zygotes below
    begin with it."""
    return os.environ.get(_FAMILY) or secrets.token_hex(8)


def join_family(family: str) -> None:
    """In the zygote: all programs that are started below it belong to its family."""
    os.environ[_FAMILY] = f"{family}/{os.getpid()}"


def end_family(family: str, zygote: int) -> None:
    """SIGKILL for all programs of the family of a zygote that is dead: again until there is none,
    as what is about to be killed may still be starting others; not for ever, since some may be
    where even SIGKILL takes its time."""
    mark = f"{_FAMILY}={family}/{zygote}".encode()
    for _ in range(_ROUNDS):
        if not sum(
            _killed_if_marked(int(name), mark) for name in os.listdir("/proc") if name.isdigit()
        ):
            return


def _killed_if_marked(pid: int, mark: bytes) -> bool:
    """Whether there was one to kill. By a descriptor, so that it hits nobody who has got the number
    since."""
    fd = open_pidfd(pid)
    if fd is None:
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            marked = any(
                each == mark or each.startswith(mark + b"/") for each in environ.read().split(b"\0")
            )
        if marked and pid != os.getpid():
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            return True
    except OSError:  # it has just ended, or is somebody else's
        pass
    finally:
        os.close(fd)
    return False
