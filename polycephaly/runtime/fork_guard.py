"""Fork a process that has threads of this package.

A fork copies one thread only. In the child, state that another thread was changing stays half
changed for ever, and a lock that another thread held stays locked. So while `fork` forks, each
thread of this package waits at a *safe point*, where it holds no lock and its state is consistent.
Each such thread runs under a lock of its own, which `add_thread_lock` registers, and `fork` takes
all these locks first. Afterwards the parent releases them. In the child, hooks make everything
anew.

An `OwnThread` without such a lock never leaves inconsistent state of this package; of those for
callbacks and output, code of users may hold something at a fork, as any thread of users may. The
thread of green threads
runs code of users all the time and cannot hold a lock for so long. Instead it registers a context
manager (`pauses`) in which it stands still, if it can do so soon.

Lock order: `guard` before the threads' locks. A thread that holds its own lock never takes `guard`,
and runs no code of users.

Python 3.12 warns of every fork with threads. If all other Python threads belong to this package,
the warning would be wrong and is suppressed. Suppression changes the global state of `warnings` for
a moment, which is safe for the same reason: no other thread runs. If the user has threads, the
warning is shown.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from _thread import RLock
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from importlib import import_module
from time import sleep
from typing import Any

from .._compat import end_imports_elsewhere, imports_elsewhere, is_held_here
from .clock import monotonic
from .tuning import tuning

log = logging.getLogger(__name__)

IMPORT_CHECK_SECONDS = 0.002
_MODULES_LOADED_LATE = ("cloudpickle", f"{__package__.rpartition('.')[0]}.wire.by_value")


class GuardedLock(RLock):  # type: ignore[misc]
    """A lock that knows whether the calling thread holds it.

    All its methods are C code, so that no signal handler raises between the lock and the block
    under it.
    """

    is_held_here = is_held_here
    """Return True if the calling thread holds the lock."""


guard = GuardedLock()
"""Held while a reactor starts, ends or forks. A finalizer may interrupt the holder: it is refused
to wait for a promise, and to start drones.
"""


_thread_locks: dict[threading.Thread, AbstractContextManager[Any]] = {}
pauses: list[Callable[[], AbstractContextManager[None]]] = []
"""Each returns a context manager that `fork` enters before each fork."""


class OwnThread(threading.Thread):
    """A daemon thread of this package, safe to fork beside: see the module's docstring."""

    def __init__(self, name: str, target: Callable[[], object] | None = None) -> None:
        super().__init__(name=name, target=target, daemon=True)


_registry: dict[Any, int] = {}  # of the warnings that were given out
_long_imports: set[str] = set()
"""Modules whose import by another thread was waited for in vain."""


def fill_standard_descriptors() -> None:
    """Open those of the descriptors 0 to 2 that are closed. Otherwise a descriptor of this package
    could be one of them, and a forked process, which replaces these three, would lose it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # as the standard descriptors of any process are
    os.close(fd)


def flush_standard_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # None, closed, or replaced by any object
            stream.flush()


def add_thread_lock(thread: threading.Thread, lock: AbstractContextManager[Any]) -> None:
    with guard:
        _thread_locks[thread] = lock


def remove_thread_lock(thread: threading.Thread) -> None:
    with guard:
        _thread_locks.pop(thread, None)


def wait_for_imports() -> None:
    """Wait until no other thread imports a module. Call this before `fork`, without a lock.

    A fork in the middle of an import has half of the module. An import that takes too long (it may
    wait for this thread) is waited for once; the child will have to import that module anew.
    The thread that serves all pools does not wait: their time limits would not be heeded.
    """
    if threading.current_thread() in _thread_locks:
        return
    deadline = monotonic() + tuning.import_wait_seconds
    while names := set(imports_elsewhere()) - _long_imports:
        if monotonic() >= deadline:
            _long_imports.update(names)
            log.warning(
                "a thread has been importing %s for %g s: drones that need it import it anew. Make "
                "the pool after the import, or import it in the main thread first",
                ", ".join(sorted(names)),
                tuning.import_wait_seconds,
            )
            return
        sleep(IMPORT_CHECK_SECONDS)


def fork() -> int:
    """Call `os.fork` while all threads of this package are at a safe point.

    In the child, every lock of this package is new, and none of its threads exists.
    """
    flush_standard_streams()  # so that buffered text is not written twice
    with guard, ExitStack() as safe_points:
        for name in _MODULES_LOADED_LATE:
            # Of another thread that is importing it, perhaps by unpickling: wait for its end. In
            # the child, the import would never end.
            if name in sys.modules:
                import_module(name)
        for pause in pauses:
            safe_points.enter_context(pause())
        for lock in list(_thread_locks.values()):
            safe_points.enter_context(lock)
        others = _threads_of_others()
        with warnings.catch_warnings(record=True, action="always") as caught:
            pid = os.fork()
        if pid != 0:
            _tell_of_threads(caught, others)
        else:
            end_imports_elsewhere()
            # The parent's threads own these locks; `_after_fork_in_child` has forgotten them.
            safe_points.pop_all()
        return pid


def own_thread_ids() -> set[int]:
    """Return the identities of this package's threads that have such a lock or need none."""
    ours = (t for t in threading.enumerate() if t in _thread_locks or isinstance(t, OwnThread))
    return {thread.ident for thread in ours if thread.ident is not None}


def _threads_of_others() -> set[threading.Thread]:
    others = set(threading.enumerate()) - {threading.current_thread()} - set(_thread_locks)
    return {thread for thread in others if not isinstance(thread, OwnThread)}


def _tell_of_threads(caught: Iterable[warnings.WarningMessage], others: Collection[object]) -> None:
    """Give out the warnings of a fork, but for Python's own if all threads are of this package.

    They are given out after the fork, and where warnings are errors they go to the log: an error
    would lose the child.
    """
    for each in caught:
        if each.category is DeprecationWarning and not others:
            continue
        try:
            text, where = str(each.message), (each.filename, each.lineno)
            warnings.warn_explicit(text, each.category, *where, __name__, _registry)
        except Warning as error:
            log.warning("%s", error)


def _after_fork_in_child() -> None:
    global guard
    guard = GuardedLock()
    _thread_locks.clear()


if hasattr(os, "register_at_fork"):  # promises work also where no process can be forked
    os.register_at_fork(after_in_child=_after_fork_in_child)
