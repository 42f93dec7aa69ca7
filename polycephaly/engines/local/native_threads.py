"""Checks whether native threads or sub-interpreters make a fork of this process unsafe.

A fork copies one thread. If at that moment a thread of a native library holds a lock, or the
library waits for a thread, the copy waits for ever: GNU's OpenMP, once used, hangs at the next
parallel region in every fork. So a process is forked only if each of its threads is

* Python's: one of `threading`, or started by CPython otherwise. Locks that a user's thread holds
  are the user's responsibility.
* harmless, by its name or library: no ZeroMQ object is used across a fork; jemalloc, and the OpenMP
  of LLVM and Intel, renew their locks in the child, by `pthread_atfork` handlers of their own. So
  do the libraries of `fork_survivors`, for those of their threads that are named there.
* gone after the fork. OpenBLAS, by such a handler, ends its threads before each fork, and starts
  new ones when needed. Nothing else distinguishes its threads from those of other libraries while
  they run.

All other threads make a fork unsafe, and so do threads whose library is unknown.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from time import sleep

from ..._compat import caller_stacklevel, count_sub_interpreters, current_frames
from ...runtime.procfs import processor_times, read_text, state_of
from ...runtime.tuning import tuning
from .fork_survivors import survives_fork
from .thread_origin import PYTHON, Origin, find_origin

MAX_ASLEEP_CHECKS = 250
"""Checks in a row, a millisecond apart, after which a waiting thread counts as unknown."""
_HARMLESS_NAMES = ("ZMQbg/", "jemalloc_bg_thd")
# ZeroMQ's threads give themselves their names, so one that was just started has not got it yet.
_HARMLESS_LIBRARIES = ("libiomp5", "libomp", "libzmq")

Threads = Sequence[tuple[Origin | None, str]]


class UnsafeFork(Exception):
    """Raised if a fork of this process is not safe, with the reason."""

    def __init__(self, reason: str, cure: str, causes: frozenset[str]) -> None:
        """Take what makes `causes` differ from those of other warnings."""
        super().__init__(reason)
        self.cure, self.causes = cure, causes

    def warn(self, name: str) -> None:
        """Warn the user, once for each set of causes."""
        if self.causes in _warned_causes:
            return
        warnings.warn(
            f"{name} does not fork this process, because {self}. The drones are fresh interpreters "
            "instead: they get copies of the values in __main__ that can be pickled, and import "
            f"modules anew. To choose: {self.cure}; start='spawn' has each drone import the main "
            "module.",
            RuntimeWarning,
            stacklevel=caller_stacklevel(),
        )
        # Only now, because a filter may turn the warning into an error.
        _warned_causes.add(self.causes)


class UnsafeThreads(UnsafeFork):
    """Raised if a fork would not copy threads of native libraries; counts those of each library."""

    def __init__(self, threads: Threads) -> None:
        """Take the origin of each thread, if known, and its name, if that is its own."""
        told = [("an unknown library" if each is None else str(each), own) for each, own in threads]
        names = {
            owner: ", ".join(sorted({own for its, own in told if own and its == owner}))
            for owner, _ in told
        }
        counts = Counter(owner for owner, _ in told)
        threads_of_each = "; ".join(
            f"{counts[each]} of {each}" + (f", named {names[each]}" if names[each] else "")
            for each in sorted(names)
        )
        super().__init__(
            "a fork would copy the locks of its native threads "
            f"({threads_of_each}) and not the threads",
            "start='fork' forks all the same; a pool that is made before that library is imported "
            "or used can be forked",
            frozenset("" if each is None else each.library for each, _ in threads),
        )


_warned_causes: set[frozenset[str]] = set()


def check_interpreters() -> None:
    """Raise `UnsafeFork` if there are sub-interpreters: CPython crashes, or hangs, in the child."""
    if count := count_sub_interpreters():
        raise UnsafeFork(
            f"CPython's os.fork crashes where sub-interpreters live ({count} here)",
            "a process whose sub-interpreters have ended can be forked (close them, or shut down "
            "the InterpreterPoolExecutor)",
            frozenset({"<sub-interpreters>"}),
        )


def check_before_fork() -> None:
    """Raise `UnsafeFork` if there are unsafe threads with names of their own.

    Those without may be ended by an at-fork handler of their library, as OpenBLAS's are, so they
    wait for `check_after_fork`.
    """
    found = [(find_origin(thread), thread) for thread in _suspect_threads()]
    named = [each for each, (_, name) in zip(found, _with_names(found), strict=True) if name]
    _raise_if_unsafe((origin, thread) for origin, thread in named if origin and not _ends(origin))


def check_after_fork() -> None:
    """Raise `UnsafeFork` in the parent, just after a fork, if unsafe threads are still there.

    The child must not be used then. A thread that was there at the fork and has ended since is not
    seen. Only a thread that lives no longer than a fork takes can be missed in this way.
    """
    # Processor seconds of a thread of unknown origin when the thread was first seen.
    first_seconds: dict[int, float] = {}
    asleep: Counter[int] = Counter()
    while True:
        found = {thread: find_origin(thread) for thread in _suspect_threads()}
        _raise_if_unsafe((origin, thread) for thread, origin in found.items())
        unknown = [thread for thread, origin in found.items() if origin is None]
        # Where the kernel tells no origins, as many unknown threads are allowed as there are raw
        # threads of Python.
        known = {origin.identity for origin in found.values() if origin}
        raw_count = len(_raw_threads() - known)
        if len(unknown) <= raw_count:
            return
        unsafe: list[tuple[Origin | None, int]] = []
        for thread in unknown:
            now, _ = processor_times(os.getpid(), str(thread))
            asleep[thread] = 0 if state_of(os.getpid(), str(thread)) == "R" else asleep[thread] + 1
            if (
                now - first_seconds.setdefault(thread, now) >= tuning.thread_settle_seconds
                or asleep[thread] >= MAX_ASLEEP_CHECKS
            ):
                unsafe.append((None, thread))
        if len(unsafe) > raw_count:
            raise UnsafeThreads(_with_names(unsafe))
        sleep(0.001)


def would_lack_threads() -> bool:
    """Return whether a fork that is made all the same might lack threads of a library.

    A thread of unknown origin counts as one of these.
    """
    origins = map(find_origin, _suspect_threads())
    return any(each is None or (not _ends(each) and _is_unsafe(each)) for each in origins)


def _ends(origin: Origin) -> bool:
    return "openblas" in origin.library


def _is_unsafe(origin: Origin) -> bool:
    harmless = origin.library.startswith((PYTHON, *_HARMLESS_LIBRARIES))
    return not harmless and not survives_fork(origin)


def _raise_if_unsafe(threads: Iterable[tuple[Origin | None, int]]) -> None:
    unsafe = [(origin, thread) for origin, thread in threads if origin and _is_unsafe(origin)]
    if unsafe:
        raise UnsafeThreads(_with_names(unsafe))


def _with_names(threads: Sequence[tuple[Origin | None, int]]) -> Threads:
    """Replace each thread by its name; by "" if that is the name of a thread of Python.

    A native thread inherits such a name if it is started by a thread of Python, which may have
    ended since, and gives itself none.
    """
    usual = {name.rstrip() for name in map(_name_of, _python_threads())}
    names = [(origin, _name_of(thread).rstrip()) for origin, thread in threads]
    return [(origin, "" if name in usual else name) for origin, name in names]


def _suspect_threads() -> dict[int, str]:
    """Return the threads that are not known to be harmless, with their names."""
    others: dict[int, str] = {}
    with suppress(OSError):  # no /proc
        for thread in set(map(int, os.listdir("/proc/self/task"))) - _python_threads():
            name = _name_of(thread)
            if name and not name.startswith(_HARMLESS_NAMES):
                others[thread] = name
    return others


def _python_threads() -> set[int | None]:
    return {os.getpid(), *(thread.native_id for thread in threading.enumerate())}


def _name_of(thread: int | None) -> str:
    """Return the name of a thread, with the end of line; "" if the thread has just ended."""
    return read_text(f"/proc/self/task/{thread}/comm")


def _raw_threads() -> set[int]:
    """Return the identities of threads that run Python code and are unknown to `threading`."""
    return current_frames().keys() - {thread.ident for thread in threading.enumerate()}
