"""Threads that build values, where the thread that needs one may not wait for as long as its code
takes.

    result(timeout=), await, select ──add──> _calls ──> a free thread, or a new one ──> the value

Code of one value delays another only while as many as there may be threads take long at the same
time. A thread ends when it has been idle.

No lock: a caller may be interrupted anywhere in `add`, and the event loops add, too. A thread that
waits is in `_waiting`, and the thread that takes it out wakes it. The number of a thread that may
still be started is in `_unused`. Each step is one call of a method that is atomic.
"""

from __future__ import annotations

import logging
import os
from _thread import allocate_lock, get_ident
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import current_thread
from typing import Any

from ..runtime.fork_guard import OwnThread
from ..runtime.safe_log import SafeLog
from .lazy_thread import IDLE_SECONDS

log = SafeLog(logging.getLogger(__name__))

MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""As many as threads of asyncio's executor, and for the same reason: more would only wait for the
interpreter, unless they wait for something else.
"""


class BuilderThreads:
    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self._unused = deque(range(MAX_THREADS, 0, -1))
        self._waiting: dict[Any, None] = {}  # for each thread that waits, the lock it waits for
        self._idents: set[int] = set()
        self._are_to_end = False

    def is_here(self) -> bool:
        """Return whether the caller is in one of the threads."""
        return get_ident() in self._idents

    def add(self, callback: Callable[[], object]) -> bool:
        """Have `callback` called, which raises no error; return False if there is no thread for it,
        and none can be started.

        If the caller is interrupted, it may be called with the next one.
        """
        self._are_to_end = False
        self._calls.append(callback)
        try:
            lock, _ = self._waiting.popitem()
        except KeyError:
            if self._unused and not self._start() and len(self._unused) == MAX_THREADS:
                with suppress(ValueError):  # a thread that ends has just taken it
                    self._calls.remove(callback)
                    return False
        else:
            release(lock)
        return True

    def end_when_idle(self) -> None:
        """Have the threads end without waiting that have nothing to call."""
        self._are_to_end = True
        for lock in list(self._waiting):
            release(lock)

    def _start(self) -> bool:
        try:
            OwnThread("polycephaly-builder", self._run).start()
        except (RuntimeError, MemoryError):
            return False  # the system, or the interpreter at its end, has no thread for it
        return True

    def _run(self) -> None:
        # Taken here, because the thread that starts this one may be interrupted.
        try:
            number = self._unused.pop()
        except IndexError:  # others were started meanwhile
            return
        current_thread().name += f"-{number}"
        self._idents.add(get_ident())
        try:
            while self._go_on():
                pass
        finally:
            self._idents.discard(get_ident())
            self._unused.append(number)
            if self._calls:  # added when all threads were in use, of which this one was the last
                self._start()

    def _go_on(self) -> bool:
        """Make a call, or wait for one. Return False if this thread is to end."""
        try:
            try:
                callback = self._calls.popleft()
            except IndexError:
                return self._wait_for_more()
            callback()
        except BaseException:  # an asynchronous one
            log.exception("a thread that builds values goes on after an exception")
        return True

    def _wait_for_more(self) -> bool:
        lock = allocate_lock()
        lock.acquire()
        try:
            self._waiting[lock] = None
            # Looked at when others can see that this thread waits: so one of the two sees the
            # other.
            is_woken = bool(self._calls) or lock.acquire(timeout=IDLE_SECONDS)
        finally:
            was_taken_out = self._waiting.pop(lock, self) is self
        return was_taken_out or bool(self._calls) or (is_woken and not self._are_to_end)


def release(lock: Any) -> None:
    """Release the lock for which a thread waits, if no other has."""
    try:
        lock.release()
    except RuntimeError:
        pass


def _renew_in_child() -> None:
    global builder_threads
    builder_threads = BuilderThreads()


builder_threads = BuilderThreads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)
