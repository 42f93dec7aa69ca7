"""A bell for a thread that sleeps in a poll: whoever has something for it rings.

    sleeper  B1 `asleep` is set       B2 looks whether there is something to do   B3 sleeps, with the bell's descriptor
    caller   C1 gives it something    C2 looks at `asleep`                        C3 rings

If C1 comes before B2, the sleeper sees it; if after, then B1 came before C2, so the caller rings.
Ringing and closing exclude each other, or who rings late could write into a file that has got the
descriptor since. (The same thread may enter twice: a finalizer may ring while it rings.)"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

__all__ = ["Bell"]


class Bell:
    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.asleep = False
        self._lock = threading.RLock()
        self._closed = False

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        if self.asleep:
            with self._lock:
                if not self._closed:
                    os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._fd)
