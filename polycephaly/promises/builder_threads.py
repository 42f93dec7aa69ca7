"""Threads that build values, where the thread that needs one may not wait for as long as its code
takes.

    result(timeout=), await, select ──add──> queue ──> a free thread, or a new one ──> the value

Code of one value delays another only while as many as there may be threads take long at the same
time. A thread ends when it has been idle.
"""

from __future__ import annotations

import logging
import os
from _thread import RLock, get_ident
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

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
        # A finalizer that runs meanwhile may take it again. Not held while something is called.
        self._lock = RLock()
        self._calls: deque[Callable[[], object]] = deque()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._idents: set[int] = set()
        self._count = self._free = 0  # of threads, and of those that wait for a call
        self._are_to_end = False

    def is_here(self) -> bool:
        """Return whether the caller is in one of the threads."""
        return get_ident() in self._idents

    def add(self, callback: Callable[[], object]) -> bool:
        """Have `callback` called, which raises no error; return False if there is no thread for it,
        and none can be started.
        """
        with self._lock:
            self._are_to_end = False
            self._calls.append(callback)
            starts = self._free < len(self._calls) and self._count < MAX_THREADS
        if starts and not self._start():
            with self._lock:
                if not self._count:
                    with suppress(ValueError):
                        self._calls.remove(callback)
                    return False
        self._wakes.put(None)
        return True

    def end_when_idle(self) -> None:
        """Have the threads end without waiting that have nothing to call."""
        self._are_to_end = True
        for _ in range(self._count):
            self._wakes.put(None)

    def _start(self) -> bool:
        with self._lock:
            self._count += 1
            number = self._count
        try:
            OwnThread(f"polycephaly-builder-{number}", self._run).start()
        except BaseException as error:
            with self._lock:
                self._count -= 1
            if not isinstance(error, Exception):
                raise
            return False  # the system, or the interpreter at its end, has no thread for it
        return True

    def _run(self) -> None:
        self._idents.add(get_ident())
        try:
            while self._go_on():
                pass
        finally:
            self._idents.discard(get_ident())

    def _go_on(self) -> bool:
        """Make a call, or wait for one. Return False if this thread is to end."""
        try:
            with self._lock:
                callback = self._calls.popleft() if self._calls else None
                if callback is None:
                    self._free += 1
            if callback is None:
                return self._wait_for_more()
            callback()
        except BaseException:  # an asynchronous one
            log.exception("a thread that builds values goes on after an exception")
        return True

    def _wait_for_more(self) -> bool:
        ends = True
        try:
            with suppress(Empty):
                self._wakes.get(timeout=IDLE_SECONDS)
                ends = self._are_to_end
        finally:
            with self._lock:
                self._free -= 1
                ends = ends and not self._calls
                if ends:
                    self._count -= 1
        return not ends


def _renew_in_child() -> None:
    global builder_threads
    builder_threads = BuilderThreads()


builder_threads = BuilderThreads()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)
