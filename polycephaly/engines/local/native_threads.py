"""Checks whether native threads or sub-interpreters make a fork of this process unsafe.

A fork copies one thread. If at that moment a thread of a native library holds a lock, or the
library waits for a thread, the copy waits for ever: GNU's OpenMP, once used, hangs at the next
parallel region in every fork. So a process is forked only if each of its threads is

* Python's: one of `threading`, or started by CPython otherwise. Locks that a user's thread holds
  are the user's responsibility.
* harmless, by its name or library: no ZeroMQ object is used across a fork; jemalloc, and the OpenMP
  of LLVM and Intel, renew their locks in the child, by `pthread_atfork` handlers of their own.
* gone after the fork. OpenBLAS, by such a handler, ends its threads before each fork, and starts
  new ones when needed. Nothing else distinguishes its threads from those of other libraries while
  they run.

All other threads make a fork unsafe, and so do threads whose library is unknown. The library of a
thread is that of its start function. The C library stores the address of that function above the
thread's stack, and the kernel reports the stack pointer of a thread that waits.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import warnings
from collections import Counter
from contextlib import suppress
from time import sleep

from ..._compat import caller_stacklevel, count_sub_interpreters, current_frames
from ...runtime.procfs import processor_times, read_text, state_of
from ...runtime.tuning import tuning

MAX_ASLEEP_CHECKS = 250
"""Checks in a row, a millisecond apart, after which a waiting thread counts as unknown."""
_HARMLESS_NAMES = ("ZMQbg/", "jemalloc_bg_thd")
# ZeroMQ's threads give themselves their names, so one that was just started has not got it yet.
_HARMLESS_LIBRARIES = ("libiomp5", "libomp", "libzmq")
_PYTHON = "<Python>"
_CPP_LIBRARIES = ("libstdc++", "libc++")
_WORD_BYTES = struct.calcsize("P")
# Bytes of a stack that are read. A thread that waits for work has used few, so the short read is
# tried first.
_STACK_READ_BYTES = (1 << 13, 1 << 18)
_DESCRIPTOR_BYTES = 2304  # of glibc's thread descriptor, which has the thread's start function


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

    def __init__(self, threads: list[tuple[str, str]]) -> None:
        """Take the library and the name of each thread."""
        owners = Counter(owner for owner, _ in threads)
        names = {
            owner: ", ".join(sorted({name.rstrip() for its, name in threads if its == owner}))
            for owner in owners
        }
        counts = "; ".join(
            f"{owners[each]} of {each}, named {names[each]}" for each in sorted(names)
        )
        super().__init__(
            f"a fork would copy the locks of its native threads ({counts}) and not the threads",
            "start='fork' forks all the same; a pool that is made before that library is imported "
            "or used can be forked",
            frozenset(owners),
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
    """Raise `UnsafeFork` if there are native threads with names of their own.

    OpenBLAS gives its threads no names, so those wait for `check_after_fork`.
    """
    others = _suspect_threads()
    usual = _python_thread_names() if others else set()
    _raise_if_unsafe(
        [
            (owner, name)
            for thread, name in others.items()
            if name not in usual and (owner := _find_owner(thread)[0]) and "openblas" not in owner
        ]
    )


def check_after_fork() -> None:
    """Raise `UnsafeFork` in the parent, just after a fork, if unsafe threads are still there.

    The child must not be used then. A thread that was there at the fork and has ended since is not
    seen. Only a thread that lives no longer than a fork takes can be missed in this way.
    """
    # Processor seconds of a thread of unknown owner when the thread was first seen.
    first_seconds: dict[int, float] = {}
    asleep: Counter[int] = Counter()
    # Owners are kept once found, because the owner of a thread shows only while the thread waits.
    owners: dict[int, tuple[str, int]] = {}
    while True:
        others = _suspect_threads()
        found = {thread: owners.get(thread) or _find_owner(thread) for thread in others}
        owners = {thread: (owner, ident) for thread, (owner, ident) in found.items() if owner}
        _raise_if_unsafe([(owner, others[thread]) for thread, (owner, _) in owners.items()])
        unknown = [thread for thread in others if thread not in owners]
        # A raw Python thread that computes has an unknown owner, because reading /proc releases
        # the interpreter and lets the thread run. So that many unknown threads are allowed.
        raw_count = len(_raw_threads() - {ident for _, ident in owners.values()})
        if len(unknown) <= raw_count:
            return
        unsafe = []
        for thread in unknown:
            now, _ = processor_times(os.getpid(), str(thread))
            asleep[thread] = 0 if state_of(os.getpid(), str(thread)) == "R" else asleep[thread] + 1
            if (
                now - first_seconds.setdefault(thread, now) >= tuning.thread_settle_seconds
                or asleep[thread] >= MAX_ASLEEP_CHECKS
            ):
                unsafe.append(("an unknown library", others[thread]))
        if len(unsafe) > raw_count:
            raise UnsafeThreads(unsafe)
        sleep(0.001)


def would_lack_threads() -> bool:
    """Return whether a fork that is made all the same might lack threads of a library.

    A thread that runs, so that its library is unknown, counts as one of these.
    """
    owners = (_find_owner(thread)[0] or "" for thread in _suspect_threads())
    return any("openblas" not in owner and _is_unsafe(owner) for owner in owners)


def _is_unsafe(owner: str) -> bool:
    return not owner.startswith((_PYTHON, *_HARMLESS_LIBRARIES))


def _raise_if_unsafe(threads: list[tuple[str, str]]) -> None:
    unsafe = [each for each in threads if _is_unsafe(each[0])]
    if unsafe:
        raise UnsafeThreads(unsafe)


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


def _python_thread_names() -> set[str]:
    """Return the names of Python's threads.

    A native thread inherits one of these if a Python thread starts it without giving a name.
    """
    return set(map(_name_of, _python_threads()))


def _name_of(thread: int | None) -> str:
    """Return the name of a thread, with the end of line; "" if the thread has just ended."""
    return read_text(f"/proc/self/task/{thread}/comm")


def _raw_threads() -> set[int]:
    """Return the identities of threads that run Python code and are unknown to `threading`."""
    return current_frames().keys() - {thread.ident for thread in threading.enumerate()}


# -- the owner of a thread -------------------------------------------------------------------------


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p), ("at", ctypes.c_void_p),
    )  # fmt: skip


_dladdr = getattr(ctypes.CDLL(None), "dladdr", None)


def _find_owner(thread: int) -> tuple[str | None, int]:
    """Return the file of a thread's library, or `_PYTHON`, and the thread's identity in Python.

    The library is None if the thread runs, or if nothing is known. The identity is the address of
    the C library's thread descriptor.
    """
    try:
        *_, stack_pointer, _ = read_text(f"/proc/self/task/{thread}/syscall").split()
        start = int(stack_pointer, 16) // _WORD_BYTES * _WORD_BYTES
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            words, at = _read_up_to_descriptor(memory, start)
        finally:
            os.close(memory)
    except (OSError, ValueError):  # the thread runs, or ends, or reading its stack is forbidden
        return None, 0
    end = start + len(words) * _WORD_BYTES  # not further up: a library may lie right above a stack
    elsewhere = (word for word in words[at:] if not start <= word < end)  # no code lies on a stack
    owner = next(filter(None, map(_find_library, elsewhere)), None)
    # The C++ library starts threads for other libraries: take the library of the outermost call.
    if owner is not None and owner.startswith(_CPP_LIBRARIES):
        # Python is never the answer. (If the interpreter lies at low addresses, a number on the
        # stack may look like an address in the interpreter.)
        calls = filter(None, map(_find_library, reversed(words[:at])))
        owner = next(
            (each for each in calls if not each.startswith((_PYTHON, "libc.", *_CPP_LIBRARIES))),
            owner,
        )
    return owner, words[at - 3]


def _read_up_to_descriptor(memory: int, start: int) -> tuple[tuple[int, ...], int]:
    """Return the words of a stack and of the thread descriptor above it, and an index into them.

    The index is that of the fourth word of the descriptor. Raises `ValueError` if there is no
    descriptor. On x86-64 a descriptor lies at a multiple of 64, and has its own address as its
    first and third words.
    """
    for size in _STACK_READ_BYTES:
        content = os.pread(memory, size, start)
        count = len(content) // _WORD_BYTES
        words = struct.unpack(f"{count}P", content[: count * _WORD_BYTES])
        for index in range(-start % 64 // _WORD_BYTES, len(words) - 2, 64 // _WORD_BYTES):
            if words[index] == words[index + 2] == start + index * _WORD_BYTES:
                return words[: index + _DESCRIPTOR_BYTES // _WORD_BYTES], index + 3
    raise ValueError("the stack has no thread descriptor above it")


def _find_library(address: int) -> str | None:
    """Return the library that is loaded at `address`; None if there is none."""
    if _dladdr is None or not 1 << 16 < address < 1 << 47:  # no user-space address
        return None
    symbol = _Symbol()
    if not _dladdr(address, ctypes.byref(symbol)):
        return None
    if symbol.base == _python.base:
        return _PYTHON
    name = os.path.basename(os.fsdecode(symbol.file or b""))
    # The dynamic linker holds the head of the list of all threads: a descriptor may point there.
    return None if name.startswith("ld-") else name


_python = _Symbol()
if _dladdr is not None:
    _dladdr.argtypes = ctypes.c_void_p, ctypes.c_void_p
    _dladdr(ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p), ctypes.byref(_python))
