"""The Python stack of a forked zygote that hangs before it is ready, in somebody's at-fork handler.

    launcher ──signal──> zygote: faulthandler's handler, which is C code ──pipe──> launcher

The handler is there before the fork, so the child has it from its first moment.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager

ASK_FOR_STACK = signal.SIGSTKFLT
"""A signal that nothing else uses: no processor that runs Linux today raises it."""
_MAX_STACK_BYTES = 1 << 16


class StartStack:
    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    @contextmanager
    def handler(self) -> Iterator[None]:
        """Give a child that is forked in the block the handler, until it leaves the block.

        From then on it ignores the signal: one that comes late, because the launcher has not yet
        read that it is ready, must not end it.
        """
        owner = os.getpid()
        try:
            faulthandler.register(ASK_FOR_STACK, self._writer, all_threads=False)
            yield
        finally:
            if os.getpid() == owner:
                faulthandler.unregister(ASK_FOR_STACK)
            else:
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, {ASK_FOR_STACK})
                faulthandler.unregister(ASK_FOR_STACK)
                signal.signal(ASK_FOR_STACK, signal.SIG_IGN)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                self.close()
            os.close(self._writer)

    def read(self, seconds: float) -> list[str]:
        """Return the lines that arrive within `seconds`; none if the process is in C code that
        blocks signals.
        """
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return []
        return os.read(self._reader, _MAX_STACK_BYTES).decode("utf-8", "replace").splitlines()

    def close(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1
