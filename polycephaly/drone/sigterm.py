"""SIGTERM in a drone: it finishes the call that it runs, begins no other, and ends.

A service manager sends SIGTERM to all processes of a service at once, and the running calls are to
be finished. So a drone has a handler for this signal from its beginning. The handler only takes a
note: code of users may set a handler of its own, and one that ignores the signal would be inherited
by the programs that a task starts.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn


class Sigterm:
    """A handler that notes whether the signal has arrived."""

    def __init__(self) -> None:
        self.received = False
        self.wake: Callable[[], object] | None = None
        """Called by the handler, wherever the main thread is: wakes that thread if it waits."""

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.received = True
        if self.wake is not None:
            with suppress(OSError):  # of a forked child, which has just closed the descriptor
                self.wake()

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self)

    def end_process(self) -> NoReturn:
        """End this process by the signal, so that its parent sees the reason."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(128 + signal.SIGTERM)  # a task has blocked the signal

    def _reset_in_child(self) -> None:
        """In a forked child: the signal has its default action, and was not received."""
        self.received, self.wake = False, None
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


sigterm = Sigterm()
"""That of this process, if it is a drone."""

os.register_at_fork(after_in_child=sigterm._reset_in_child)
