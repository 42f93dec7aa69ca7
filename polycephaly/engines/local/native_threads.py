"""Which native threads of this process make a fork of it unsafe, and to which libraries they
belong.

A fork copies one thread. If a thread of a native library holds a lock then, or the library waits
for the thread to do something, the copy waits for ever: GNU's OpenMP, once used, hangs at the next
parallel region in every fork. So a process is forked only if each of its threads is

* Python's: one of `threading`, or started by CPython otherwise. What a user's thread holds is the
  user's affair.
* known to be harmless by its name or library: no ZeroMQ object is used across a fork; jemalloc, and
  the OpenMP of LLVM and Intel, make their locks anew in the child, by handlers of their own
  (`pthread_atfork`).
* gone after the fork. OpenBLAS has a handler, too, which ends its threads before each fork, and it
  starts others when it needs them. Nothing else tells OpenBLAS's threads from those of other
  libraries while they run.

All others make a fork unsafe, and so do those that cannot be told apart. The library of a thread is
that of the function with which the thread was started. The C library notes that function above the
thread's stack, and the kernel tells where the stack is, of a thread that waits."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import warnings
from collections import Counter
from contextlib import suppress
from time import sleep

from ...runtime.procfs import processor_times, state_of
from ...runtime.tuning import tuning

__all__ = ["UnsafeFork", "check_after_fork", "check_before_fork"]

LOOKS = 250
"""Looks in a row, a millisecond apart, at which a thread waits and its owner is not told."""
_HARMLESS_NAMES = ("ZMQbg/", "jemalloc_bg_thd")
_HARMLESS = ("libiomp5", "libomp")
_PYTHON = "<Python>"
_OF_CPP = ("libstdc++", "libc++")
_WORD = struct.calcsize("P")
_STACKS = (
    1 << 13,
    1 << 18,
)  # bytes of a stack that are looked at: a thread that waits for work has used little
_DESCRIPTION = (
    2304  # bytes of glibc's description of a thread, with the function that it was started with
)


class UnsafeFork(Exception):
    """Threads of native libraries are there, which a fork would not copy: how many of each
    library."""

    def __init__(self, threads: list[tuple[str, str]]) -> None:
        """By the library and the name of each."""
        self.owners = Counter(owner for owner, _ in threads)
        names = {
            owner: ", ".join(sorted({name for its, name in threads if its == owner}))
            for owner in self.owners
        }
        super().__init__(
            "; ".join(
                f"{self.owners[each]} of {each}, named {names[each]}" for each in sorted(names)
            )
        )

    def warn(self, name: str) -> None:
        """Tells the user, once for each set of libraries."""
        cause = frozenset(self.owners)
        if cause in _told:
            return
        warnings.warn(
            f"{name} does not fork this process, because a fork would copy the locks of its native threads ({self}) "
            "and not the threads. The drones are fresh interpreters instead: they get what __main__ holds by value, as "
            "far as it can be pickled, and import modules anew. To choose: start='fork' forks all the same, "
            "start='spawn' has each drone import the main module; made before that library was first used, a pool "
            "can be forked.",
            RuntimeWarning,
            stacklevel=_level_of_the_caller(),
        )
        _told.add(cause)  # only now: a filter may have made an error of it


_told: set[frozenset[str]] = set()


def check_before_fork() -> None:
    """Raises `UnsafeFork` for threads that have a name of their own, as OpenBLAS's have not."""
    others = _others()
    usual = _usual_names() if others else set()
    owners = {thread: _owner(thread)[0] for thread, name in others.items() if name not in usual}
    _refuse(
        [
            (owner, others[each])
            for each, owner in owners.items()
            if owner and "openblas" not in owner
        ]
    )


def check_after_fork() -> None:
    """Raises `UnsafeFork` in the parent, just after a fork, for all threads that are still there:
    then the child is not to be used.

    A thread that was there at the fork and has ended since is not seen. Only one that lives no
    longer than a fork takes can so be missed."""
    ran: dict[int, float] = {}  # seconds, when a thread of an unknown owner was first seen
    asleep: Counter[int] = Counter()
    owners: dict[
        int, tuple[str, int]
    ] = {}  # once told, kept: a thread that waits now and then tells only then
    while True:
        others = _others()
        told = {thread: owners.get(thread) or _owner(thread) for thread in others}
        owners = {thread: (owner, ident) for thread, (owner, ident) in told.items() if owner}
        _refuse([(owner, others[thread]) for thread, (owner, _) in owners.items()])
        unknown = [thread for thread in others if thread not in owners]
        # A raw thread of Python's that computes is one whose owner is unknown, since reading what
        # the kernel tells lets it run: so many of those there may be.
        raw = len(_raw_threads() - {ident for _, ident in owners.values()})
        if len(unknown) <= raw:
            return
        stay = []
        for thread in unknown:
            now, _ = processor_times(os.getpid(), str(thread))
            asleep[thread] = 0 if state_of(os.getpid(), str(thread)) == "R" else asleep[thread] + 1
            if (
                now - ran.setdefault(thread, now) >= tuning.thread_settle_seconds
                or asleep[thread] >= LOOKS
            ):
                stay.append(("an unknown library", others[thread]))
        if len(stay) > raw:
            raise UnsafeFork(stay)
        sleep(0.001)


def _refuse(threads: list[tuple[str, str]]) -> None:
    unsafe = [each for each in threads if not each[0].startswith((_PYTHON, *_HARMLESS))]
    if unsafe:
        raise UnsafeFork(unsafe)


def _others() -> dict[int, str]:
    """The threads that are not known to be harmless, with their names."""
    others: dict[int, str] = {}
    with suppress(OSError):  # no /proc
        for thread in set(map(int, os.listdir("/proc/self/task"))) - _of_python():
            with suppress(OSError):  # it has just ended
                name = _read(f"/proc/self/task/{thread}/comm")
                if not name.startswith(_HARMLESS_NAMES):
                    others[thread] = name
    return others


def _of_python() -> set[int | None]:
    return {os.getpid(), *(thread.native_id for thread in threading.enumerate())}


def _usual_names() -> set[str]:
    """What Python's threads are called, and so a thread that was started by one of them and given
    no name."""
    names = set()
    for thread in _of_python():
        with suppress(OSError):
            names.add(_read(f"/proc/self/task/{thread}/comm"))
    return names


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.fsdecode(os.read(fd, 4096)).rstrip("\n")
    finally:
        os.close(fd)


def _raw_threads() -> set[int]:
    """The identities of threads that run Python code, and that `threading` does not know of."""
    return sys._current_frames().keys() - {thread.ident for thread in threading.enumerate()}


# -- whose a thread is -----------------------------------------------------------------------------


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p)
    )  # fmt: skip


_dladdr = getattr(ctypes.CDLL(None), "dladdr", None)


def _owner(thread: int) -> tuple[str | None, int]:
    """Its library's file, or `_PYTHON`; None if the thread runs, or nothing is told. And its
    identity in Python, which is where the C library describes it."""
    try:
        *_, stack_pointer, _ = _read(f"/proc/self/task/{thread}/syscall").split()
        start = int(stack_pointer, 16) // _WORD * _WORD
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            words, at = _up_to_the_description(memory, start)
        finally:
            os.close(memory)
    except (OSError, ValueError):  # it runs, or ends; or it may not be looked at
        return None, 0
    end = start + len(words) * _WORD  # not further up: a library may lie right above a stack
    elsewhere = (word for word in words[at:] if not start <= word < end)  # no code lies on a stack
    owner = next(filter(None, map(_library, elsewhere)), None)
    if owner is not None and owner.startswith(
        _OF_CPP
    ):  # it starts threads for others: whose is the outermost call?
        # Never Python's. (A number on the stack may look like an address in an interpreter that
        # lies at a low one.)
        calls = filter(None, map(_library, reversed(words[:at])))
        owner = next(
            (each for each in calls if not each.startswith((_PYTHON, "libc.", *_OF_CPP))), owner
        )
    return owner, words[at - 3]


def _up_to_the_description(memory: int, start: int) -> tuple[tuple[int, ...], int]:
    """What is on the stack, and above it the description of its thread, which begins at that index.
    Raises `ValueError` if there is none. (On x86-64 a description lies at a multiple of 64, and has
    its own address twice.)"""
    for size in _STACKS:
        content = os.pread(memory, size, start)
        words = struct.unpack(f"{len(content) // _WORD}P", content[: len(content) // _WORD * _WORD])
        for index in range(-start % 64 // _WORD, len(words) - 2, 64 // _WORD):
            if words[index] == words[index + 2] == start + index * _WORD:
                return words[: index + _DESCRIPTION // _WORD], index + 3
    raise ValueError("no thread is described there")


def _library(address: int) -> str | None:
    """The library that is loaded there."""
    if _dladdr is None or not 1 << 16 < address < 1 << 47:  # no address of a process
        return None
    symbol = _Symbol()
    if not _dladdr(address, ctypes.byref(symbol)):
        return None
    if symbol.base == _python.base:
        return _PYTHON
    name = os.path.basename(os.fsdecode(symbol.file or b""))
    return None if name.startswith("ld-") else name  # the head of the list of all threads is there


_python = _Symbol()
if _dladdr is not None:
    _dladdr.argtypes = ctypes.c_void_p, ctypes.c_void_p
    _dladdr(ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p), ctypes.byref(_python))


def _level_of_the_caller() -> int:
    """How many frames above who asks this package was called."""
    frame, level = sys._getframe(1), 1
    package = __name__.partition(".")[0] + "."
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame, level = frame.f_back, level + 1
    return level
