"""SIGTERM in a drone: it finishes the call that it runs, begins no other, and ends.

A service manager sends SIGTERM to all processes of a service at once, and the running calls are to
be finished. So a drone has a handler for this signal from its beginning. The handler only takes a
note, and takes away what was not begun of a chunk: code of users may set a handler of its own, and
one that ignores the signal would be inherited by the programs that a task starts.
"""

from __future__ import annotations

import os
import signal
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from ..runtime import fork_guard


class Sigterm:
    """A handler that notes whether the signal has arrived."""

    def __init__(self) -> None:
        self.received = False
        self.stop: Callable[[], object] | None = None
        """Called by the handler first: leaves no call to begin of what the main thread runs."""
        self.wake: Callable[[], object] | None = None
        """Called by the handler, wherever the main thread is: wakes that thread if it waits."""
        self._forking: set[int] = set()
        """The threads that fork, and have blocked the signal for that."""

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.received = True
        if self.stop is not None:
            self.stop()
        if self.wake is not None:
            self.wake()

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self)

    def fork_with_handler(self) -> int:
        """Fork as `os.fork` does. The child has this handler from the first moment on: a signal
        that comes before it is set waits for it.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            pid = fork_guard.fork()
            if not pid:
                self.install()
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def end_process(self) -> NoReturn:
        """End this process by the signal, so that its parent sees the reason."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(128 + signal.SIGTERM)  # a task has blocked the signal

    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self

    # A child gets the default action, also for a signal that it is sent at once: until then, the
    # signal waits. Otherwise this handler would take a note for it, in vain.

    def before_fork(self) -> None:
        if self._is_installed():
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            if signal.SIGTERM not in blocked:
                self._forking.add(get_ident())

    def after_fork(self) -> None:
        if get_ident() in self._forking:
            self._forking.discard(get_ident())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def after_fork_in_child(self) -> None:
        self.received, self.stop, self.wake = False, None, None
        if self._is_installed():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.after_fork()
        self._forking.clear()


sigterm = Sigterm()
"""That of this process, if it is a drone."""

os.register_at_fork(
    before=sigterm.before_fork,
    after_in_parent=sigterm.after_fork,
    after_in_child=sigterm.after_fork_in_child,
)
