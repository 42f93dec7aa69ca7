"""A wake-up for a thread that sleeps in `poll`: an eventfd, written only if the thread sleeps.

    sleeper  B1 set `asleep`            B2 look for something to do   B3 poll the eventfd
    caller   C1 hand something over     C2 read `asleep`              C3 wake if `asleep` was set

No wake-up is lost. If C1 comes before B2, the sleeper finds the item. If C1 comes after B2, then B1
came before C2, so the caller wakes the sleeper.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

__all__ = ["Wakeup"]


class Wakeup:
    """The wake-up of one sleeping thread. Any thread may call `wake`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.asleep = False
        # `wake` and `close` exclude each other: a late `wake` could otherwise write into another
        # file that has been given the descriptor's number. The lock is reentrant because a
        # finalizer may call `wake` while its thread is in `wake`.
        self._lock = threading.RLock()
        self._closed = False

    def fileno(self) -> int:
        return self._fd

    def wake(self) -> None:
        """Wake the thread if it sleeps, or is about to."""
        if self.asleep:
            with self._lock:
                if not self._closed:
                    os.eventfd_write(self._fd, 1)

    def reset(self) -> None:
        """Reset the wake-up, so that the next poll sleeps."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._fd)
