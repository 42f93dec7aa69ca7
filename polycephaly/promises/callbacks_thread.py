"""The thread that calls users' callbacks of the promises that a loop has settled.

    loop's thread ──settles──> hooks of the package, at once: they wake waiters
                         └───> `add`: callbacks of users, in order ──> this thread

So a callback that takes long delays other callbacks, and nothing else: results arrive, tasks are
sent, and time limits hold. The thread starts when there is something to call, and ends
when it has been idle. Waiting is allowed there, except for what the thread itself has to do.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from queue import Empty, SimpleQueue

from ..runtime.fork_guard import OwnThread

IDLE_SECONDS = 1.0
"""Seconds without a callback after which the thread ends. The next one starts another."""


class CallbacksThread:
    def __init__(self) -> None:
        # Never held by users' threads, nor while a callback is called.
        self._lock = allocate_lock()
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: OwnThread | None = None

    def is_here(self) -> bool:
        """Return whether the caller is in this thread."""
        thread = self._thread
        return thread is not None and thread.ident == get_ident()

    def add(self, callback: Callable[[], object]) -> None:
        """Have `callback` called, which raises no error. Called by the thread of a loop, which
        calls it itself if no thread can be started.
        """
        with self._lock:
            if self._thread is None:
                # Before the start, because the first callback may ask `is_here`.
                self._thread = OwnThread("polycephaly-callbacks", self._run)
                try:
                    self._thread.start()
                except RuntimeError:
                    self._thread = None
            has_thread = self._thread is not None
            if has_thread:
                self._queue.put(callback)
        if not has_thread:
            callback()

    def _run(self) -> None:
        while True:
            try:
                callback = self._queue.get(timeout=IDLE_SECONDS)
            except Empty:
                with self._lock:
                    if self._queue.empty():
                        self._thread = None
                        return
            else:
                callback()
                del callback


def _renew_in_child() -> None:
    global callbacks_thread
    callbacks_thread = CallbacksThread()


callbacks_thread = CallbacksThread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)
