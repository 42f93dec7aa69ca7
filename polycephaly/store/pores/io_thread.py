"""The pore I/O thread: one native thread for all pores that a process owns, while it owns any.

    a listener is readable ──> a holder connects ──> its hello ──> greeting, with the descriptor
    a holder is readable   ──> Inbox.frames; waiting receivers are woken
    posted: the beginning and the end of an inbox, and that there is room again

A sender wakes a waiting receiver, and often has to yield the processor to it, so that each message
costs a process switch. So if data arrive less than `BATCH_DELAY_SECONDS` after the last, the thread
sleeps for that time first, wakes no receiver in that time, and then reads all data at once. A
single message is not delayed. A stream of messages takes a fifth to a quarter less time this way,
and half of the owner's processor time.

Only this thread uses the holders and the loop's lock, so receivers may be woken under it. A
finalizer may open or close a pore at any point of any thread's code. So all others `post`, and
never wait for the loop's lock or for `fork_guard.guard`. `add_inbox` and the thread's end exclude
each other by `_lock`: see docs/decisions/0008-pores.md.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import sleep

from ...promises.event_loop import EventLoop
from ...runtime.clock import monotonic
from .inbox import Inbox

BATCH_DELAY_SECONDS = 0.0002
"""See the module's docstring."""

io_thread: PoreIOThread | None = None
_lock = threading.RLock()


def add_inbox(inbox: Inbox) -> None:
    """Serve this inbox from now on.

    Raises `OSError` or `RuntimeError` if the system has no descriptor or thread left.
    """
    global io_thread
    with _lock:
        thread = io_thread or PoreIOThread()
        inbox.loop = thread
        thread.post(inbox.watch_all)
        if thread is not io_thread:
            thread.start()
            io_thread = thread


def _forget() -> None:
    """In a forked child: no pore belongs to it. `parent_death` has closed the descriptors."""
    global io_thread, _lock
    io_thread, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)


class PoreIOThread(EventLoop):
    def __init__(self) -> None:
        super().__init__("polycephaly-pores")
        self._last_poll = 0.0

    # -- any thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. A fork need not wait for it: nothing of it is used in the child."""
        try:
            self.thread.start()
        except BaseException:
            self.release_resources()
            raise

    def release_resources(self) -> None:
        self._files.close()

    # -- the loop ----------------------------------------------------------------------------------

    def _sleep(self) -> list[tuple[int, int]]:
        events = super()._sleep()
        now = monotonic()
        if now - self._last_poll < BATCH_DELAY_SECONDS:
            sleep(BATCH_DELAY_SECONDS)
        self._last_poll = now
        return events

    def _end_if_over(self) -> bool:
        global io_thread
        # An inbox that is served has a descriptor here, or will be tried again.
        if self._watched or self.timers.heap:
            return False
        with _lock:
            if self._inbox:  # another thread has just added one
                return False
            if io_thread is self:
                io_thread = None
        self.release_resources()
        return True

    def _end_by(self, error: BaseException) -> None:
        global io_thread
        with _lock:
            if io_thread is self:
                io_thread = None  # the next inbox starts another
        super()._end_by(error)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Watch `fd`, unless it is watched already."""
        if fd not in self._watched:
            super().watch(fd, callback)
