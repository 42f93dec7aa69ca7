"""Keep Ctrl-C out of critical sections.

CPython runs signal handlers in the main thread between any two bytecodes, and Python's own handler
for SIGINT raises. `DeferredSigint` replaces that handler by one that only records the signal. On
exit, when the state is consistent again, the original handler is called. Swapping twice costs about
0.5 us.

Handlers of other signals may raise as well (an alarm used as a time limit). Swapping those too
would cost more than it is worth. `is_safe_from_signals` tells whether there are any.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from _thread import get_ident
from collections.abc import Callable
from types import FrameType
from typing import Self

from .._compat import getsignal
from .._compat import signal as set_handler

_SIGINT = int(signal.SIGINT)
_SIGNAL_NAMES = ("SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGCHLD")
_OTHER_SIGNALS = tuple(int(getattr(signal, name)) for name in _SIGNAL_NAMES)
_main_thread_id = threading.main_thread().ident


def is_safe_from_signals() -> bool:
    """Return True if, with SIGINT deferred, no handler (of `_SIGNAL_NAMES`) can raise in this
    thread.
    """
    if get_ident() != _main_thread_id:
        return True
    # A plain loop, because this is on the path of each wake-up of a green thread.
    for number in _OTHER_SIGNALS:  # noqa: SIM110
        if callable(getsignal(number)):
            return False
    return True


def end_by_sigint() -> None:
    """Have this process, which is exiting, end by SIGINT: a shell then sees that it was Ctrl-C.

    CPython does so after an unhandled `KeyboardInterrupt`, but not after one in an exit handler.
    The signal comes after the interpreter's end, which has run all other exit handlers, flushed the
    streams, and restored the default action of signals.
    """
    libc = ctypes.CDLL(None)
    for function, argument in (libc["raise"], _SIGINT), (libc["fflush"], None):  # called in reverse
        libc["__cxa_atexit"](function, argument, None)


class DeferredSigint:
    """A context manager that defers SIGINT in the main thread, and does nothing in other threads.

    The deferred handler runs on exit.
    """

    # No `__init__`, because this is on the path of each wake-up of a green thread.
    tripped = False
    handler: Callable[[int, FrameType | None], object] | None = None
    _frame: FrameType | None = None

    def __enter__(self) -> Self:
        if get_ident() == _main_thread_id:
            handler = getsignal(_SIGINT)
            if callable(handler):
                self.handler = handler
                set_handler(_SIGINT, self._record)
        return self

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.tripped, self._frame = True, frame

    def __exit__(self, *exc: object) -> None:
        handler = self.handler
        if handler is not None:
            if getsignal(_SIGINT) == self._record:  # else a callback has set another handler
                set_handler(_SIGINT, handler)
            if self.tripped:
                frame, self._frame = self._frame, None
                handler(_SIGINT, frame)


def _on_fork() -> None:
    """In a forked child: the thread that has forked is the main thread.

    If another thread was deferring SIGINT, the child has its handler and not the thread, which
    would set the original one again.
    """
    global _main_thread_id
    if get_ident() != _main_thread_id:
        while isinstance(deferred := getattr(getsignal(_SIGINT), "__self__", None), DeferredSigint):
            set_handler(_SIGINT, deferred.handler)
    _main_thread_id = get_ident()


os.register_at_fork(after_in_child=_on_fork)
