"""End the processes that depend on a process when that process ends.

    controller ── parent-death pipe, pidfd ──> zygote ── PR_SET_PDEATHSIG ──> drone ──> programs
                                                 └── kills the process group, and orphans ──┘

Three means are used, because each sees cases that the others miss:

* The parent-death pipe is a socket pair. The owner alone holds the other end. However the owner
  ends, the kernel closes that end and the zygote reads end-of-file. A copy of that end in another
  process would keep it open, so `CLOSED_IN_CHILD` lists the files that every forked child closes
  first.
* A pidfd of the owner is readable when that process has ended, whatever copies of descriptors exist
  (Linux 5.3). A pidfd also covers a child that C code forked without Python's hooks.
* PR_SET_PDEATHSIG: the kernel kills the child when the *thread* that forked it ends. So it serves
  only if that thread is the main thread of its process, as in the zygote.

`PR_SET_CHILD_SUBREAPER` makes orphans of a dead drone children of the zygote, even those in a
session of their own, so that the zygote can find and kill them. If the zygote itself was killed,
its owner finds orphans by the *family* in their environment: a name that each program started by a
drone inherits.
"""

from __future__ import annotations

import array
import ctypes
import os
import select
import shutil
import signal
import socket
from contextlib import suppress
from typing import Protocol, TypeVar

from .procfs import stat_of


class Closable(Protocol):
    def close(self) -> object: ...


class Descriptor:
    """A file descriptor that records when it is closed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


CLOSED_IN_CHILD: set[Closable] = set()
"""Open files of this process that no forked child may keep.

They are objects, not numbers: each knows when it is closed, so closing twice cannot close another
file that has got the number since.
"""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None)

F = TypeVar("F", bound=Closable)


def close_in_child(file: F) -> F:
    """Return `file`, which every forked child closes first."""
    CLOSED_IN_CHILD.add(file)
    return file


def close(file: Closable) -> None:
    with suppress(OSError):
        file.close()
    # Removed after closing: a child forked in between closes the file again, which has no effect.
    CLOSED_IN_CHILD.discard(file)


def _after_fork_in_child() -> None:
    for file in list(CLOSED_IN_CHILD):
        close(file)


os.register_at_fork(after_in_child=_after_fork_in_child)


def receive_fds(end: socket.socket, size: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Return a message and the descriptors sent with it, which no program started here inherits.

    `socket.recv_fds` takes the flag for that, and ignores it.
    """
    fds = array.array("i")
    message, ancillary, _, _ = end.recvmsg(
        size, socket.CMSG_SPACE(max_fds * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return message, list(fds)


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once process `pid` has ended.

    None if the kernel has no pidfds.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def wait_for_end(pidfd: int, seconds: float | None = None) -> None:
    """Wait until the process of `pidfd` has ended, for so many seconds at most."""
    poll = select.poll()  # not select(): no descriptors from 1024 on
    poll.register(pidfd, select.POLLIN)
    poll.poll(None if seconds is None else seconds * 1000)


def die_with_parent(parent: int) -> None:
    """Have this forked child killed (SIGKILL) when the thread that forked it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The signal is lost if the parent ended before prctl.
    if os.getppid() != parent:
        os._exit(1)


def end_with_owner(owner: int, directory: str) -> None:
    """Have this zygote, which has just been forked, end when the process `owner` ends.

    That holds until `outlive_forking_thread`, also while an at-fork handler waits for a lock of
    Python. The signal's handler then removes the owner's directory, as the zygote does later.
    """

    def end_if_alone(*_: object) -> None:
        if os.getppid() != owner:  # else only the thread that forked has ended
            shutil.rmtree(directory, ignore_errors=True)
            os._exit(1)

    signal.signal(signal.SIGHUP, end_if_alone)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    end_if_alone()


def outlive_forking_thread() -> None:
    """End the effect of `end_with_owner`: from now on, this zygote looks after its owner itself."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def become_subreaper() -> None:
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the direct children of this (single-threaded) process, zombies included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return set(map(int, listed.read().split()))
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return _children_by_search()


def _children_by_search() -> set[int]:
    me, found = str(os.getpid()), set()
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            if stat_of(name)[1:2] == [me]:
                found.add(int(name))
    return found


def end_process_group(leader: int) -> None:
    """Send SIGKILL to every process of the group of `leader`.

    Safe while the leader is not reaped, because until then its number is not reused.
    """
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


_FAMILY_VARIABLE = "POLYCEPHALY_FAMILY"
_MAX_KILL_ROUNDS = 20


def new_family() -> str:
    """Return the family name for a zygote that is about to start.

    The zygote completes the name with its pid (`join_family`). Names of zygotes below begin with
    it.
    """
    return os.environ.get(_FAMILY_VARIABLE) or os.urandom(8).hex()


def join_family(family: str) -> None:
    """In the zygote: make all programs started below it members of its family."""
    os.environ[_FAMILY_VARIABLE] = f"{family}/{os.getpid()}"


def end_family(family: str, zygote: int) -> None:
    """Send SIGKILL to all programs of the family of a dead zygote.

    The search is repeated until none is found, because a program may start others just before it is
    killed. There are at most `_MAX_KILL_ROUNDS` rounds, because even SIGKILL may take long for some
    programs.
    """
    mark = f"{_FAMILY_VARIABLE}={family}/{zygote}".encode()
    for _ in range(_MAX_KILL_ROUNDS):
        if not sum(
            _kill_if_marked(int(name), mark) for name in os.listdir("/proc") if name.isdigit()
        ):
            return


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    """Kill `pid` if `mark` is in its environment, and return True if it was killed.

    The signal goes to a pidfd, so no other process that has got the number since is hit.
    """
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
    except OSError:  # just ended, or of another user
        pass
    finally:
        os.close(fd)
    return False
