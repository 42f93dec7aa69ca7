"""The thread that writes lines and log records of drones, and calls users' `output`.

    loop's thread ──give──> OutputGate ──> this thread ──> stdout, stderr, loggers, `output=`
          deliveries behind it wait <──written───┘

A promise settles when the output of its task is out. So what a loop delivers after output waits for
that, with two exceptions: while this thread itself waits for a promise, and if a write is blocked,
because a reader sleeps, for example. Then the promises settle, and the lines follow.
"""

from __future__ import annotations

import atexit
import os
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from functools import partial
from math import inf
from typing import NamedTuple

from ..runtime import forked
from ..runtime.clock import monotonic
from .lazy_thread import LazyThread
from .promise import wait_hooks, waiting_threads

BLOCKED_SECONDS = 1.0
"""Seconds after which a write counts as blocked."""
MAX_UNWRITTEN_BYTES = 4 << 20
"""Bytes of output from which a loop reads no more, but for that of a task before its result. Drones
that go on printing then wait for their reader, as any program does.
"""


class Output(NamedTuple):
    """Some output of a drone: how to write it, and about how many bytes it has."""

    write: Callable[[], object]
    size: int


class OutputThread(LazyThread):
    def __init__(self) -> None:
        super().__init__("polycephaly-output")
        self.began_at = inf
        """When the write began that is going on; if none is, infinite. Set by the thread."""
        self.gate: OutputGate | None = None
        """That of which something is being written."""

    def is_waiting(self) -> bool:
        """Return whether the thread waits for a promise that is not settled."""
        thread = self._thread
        if thread is None or thread.ident is None:
            return False
        promise, _ = waiting_threads.get(thread.ident, (None, None))
        return promise is not None and not promise.done()

    def finish(self) -> None:
        """Wait until everything is written."""
        if self._thread is not None and not self.is_here():
            done = allocate_lock()
            done.acquire()
            self.add(done.release)
            done.acquire()

    def _before_call(self) -> None:
        self.began_at = monotonic()
        wait_hooks[get_ident()] = self._on_wait

    def _after_call(self) -> None:
        self.began_at = inf

    def _on_end(self) -> None:
        wait_hooks.pop(get_ident(), None)

    def _on_wait(self) -> None:
        """Have the promise settled at once for which the thread waits from now on."""
        if self.gate is not None:
            self.gate.wake()


class OutputGate:
    """The output of one loop. Its counts of what was given belong to the loop's thread, those of
    what was written to the output thread.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self.wake = wake
        self._given = self._written = 0
        self._given_bytes = self._written_bytes = 0
        self._blocked_at = self._idle_at = 0  # how many were given when it was last found so
        self.is_waited_for = False
        """Set by the loop's thread before it sleeps until something is written."""

    @property
    def is_idle(self) -> bool:
        """True if all output is written."""
        return self._written == self._given

    def give(self, output: Output) -> None:
        self._given += 1
        self._given_bytes += output.size
        output_thread.add(partial(self._write, output))

    def _write(self, output: Output) -> None:
        output_thread.gate = self
        generation = forked.generation
        try:
            output.write()
        finally:
            forked.exit_if_forked(generation)
            output_thread.gate = None
            self._written += 1
            self._written_bytes += output.size
            if self.is_idle:
                self._idle_at = self._written
            # Counted before: so the loop sees the count, or this its wish.
            if self.is_waited_for:
                self.wake()

    def holds(self, now: float) -> bool:
        """Return whether what comes after the output has to wait for it."""
        if self.is_idle:
            return False
        if self._idle_at >= self._blocked_at and self.seconds_left(now) <= 0:
            self._blocked_at = self._given
        is_blocked = self._idle_at < self._blocked_at  # until all was written
        return not (is_blocked or output_thread.is_waiting())

    def seconds_held(self, now: float) -> float:
        """Return for how many seconds what comes after the output has to wait for it, if that is
        not written by then.
        """
        return max(0.0, self.seconds_left(now)) if self.holds(now) else 0.0

    def seconds_left(self, now: float) -> float:
        """Return in how many seconds the write that is going on will count as blocked."""
        return output_thread.began_at + BLOCKED_SECONDS - now

    def is_full(self) -> bool:
        """Return whether no more output should be read."""
        return self._given_bytes - self._written_bytes > MAX_UNWRITTEN_BYTES


def _renew_in_child() -> None:
    global output_thread
    output_thread = OutputThread()


def _finish() -> None:
    output_thread.finish()


output_thread = OutputThread()
# At the end of the program, after the pools have ended.
atexit.register(_finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)
