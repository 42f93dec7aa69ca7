"""A thread that calls what it is given, in order.

It starts when there is something to call, and ends when it has been idle.
"""

from __future__ import annotations

import logging
from _thread import RLock, get_ident
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from ..runtime.fork_guard import OwnThread
from ..runtime.safe_log import SafeLog

log = SafeLog(logging.getLogger(__name__))

IDLE_SECONDS = 1.0
"""Seconds without anything to call after which the thread ends."""


class LazyThread:
    def __init__(self, name: str) -> None:
        self._name = name
        # Not held while something is called. A finalizer that runs while the thread is made may
        # take it again.
        self._lock = RLock()
        self._calls: deque[Callable[[], object]] = deque()
        # The thread waits for one, and then looks at `_calls`: so an asynchronous exception, which
        # comes when the wait is over, loses no call.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._is_to_end = False
        self._thread: OwnThread | None = None

    def is_here(self) -> bool:
        """Return whether the caller is in this thread."""
        thread = self._thread
        return thread is not None and thread.ident == get_ident()

    def add(self, callback: Callable[[], object]) -> None:
        """Have `callback` called, which raises no error; at once if no thread can be started."""
        with self._lock:
            if self._thread is None:
                self._start()
            has_thread = self._thread is not None
            self._calls.append(callback)
        if has_thread:
            self._wakes.put(None)
        else:
            self._make_calls()

    def end_when_idle(self) -> None:
        """Have the thread end without waiting, if it has nothing to call."""
        if self._thread is not None:
            self._is_to_end = True
            self._wakes.put(None)

    def _start(self) -> None:
        thread = OwnThread(self._name, self._run)
        if self._thread is not None:  # a finalizer has started one meanwhile
            return
        self._thread = thread  # before the start, because the first callback may ask `is_here`
        try:
            thread.start()
        except BaseException as error:
            self._thread = None
            if not isinstance(error, Exception):
                raise
            # Else the system, or the interpreter at its end, has no thread for it.

    def _run(self) -> None:
        while self.is_here():
            try:
                self._make_calls()
                self._wait_for_more()
            except BaseException:  # an asynchronous one, between two calls
                log.exception("the thread %s goes on after an exception", self._name)

    def _make_calls(self) -> None:
        while self._calls:
            try:
                callback = self._calls.popleft()
            except IndexError:  # another thread was first
                return
            self._before_call()
            try:
                callback()
            finally:
                self._after_call()
            del callback

    def _wait_for_more(self) -> None:
        try:
            self._wakes.get(timeout=IDLE_SECONDS)
            ends = self._is_to_end
        except Empty:
            ends = True
        if ends:
            with self._lock:
                self._is_to_end = False
                if not self._calls:
                    self._on_end()
                    self._thread = None

    def _before_call(self) -> None:
        """Note that something is called now."""

    def _after_call(self) -> None:
        """Note that it was called."""

    def _on_end(self) -> None:
        """Undo what `_before_call` has done for the thread."""
