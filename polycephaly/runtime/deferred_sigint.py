"""Ctrl-C must not fall into a turn.

Code that changes the hub's state may run in the main thread (it drives while it waits), where
CPython runs signal handlers between any two bytecodes, and Python's own handler for SIGINT raises.
A `DeferredSigint` puts a handler in its place that only takes a note; the real one is called when
the shield is lowered, with the state whole again. Swapping twice costs about 0.5 us.

Other signals' handlers may raise as well (an alarm used as a time limit). Their swapping would cost
more than it is worth: where the program has installed one, the shield cannot be raised, and the
work is left to the hub's thread, which no handler ever enters."""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # the C functions: a fifth of the time
from _signal import signal as set_handler
from _thread import get_ident
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

__all__ = ["DeferredSigint", "can_be_raised"]

_SIGINT = int(signal.SIGINT)
_NAMES = ("SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGCHLD")
_OTHERS = tuple(int(getattr(signal, name)) for name in _NAMES)


def can_be_raised() -> bool:
    """Whether this thread can be kept free of handlers that raise."""
    if get_ident() != threading.main_thread().ident:
        return True
    for number in _OTHERS:  # noqa: SIM110 - a plain loop: this is on the path of every round trip
        if callable(getsignal(number)):
            return False
    return True


class DeferredSigint:
    """``with Shield(on_trip):`` in any thread; does something in the main thread only.

    `tripped` tells that a SIGINT waits; `on_trip` is called when it comes, to end a wait.
    """

    __slots__ = ("_frame", "_handler", "_on_trip", "tripped")

    def __init__(self, on_trip: Callable[[], object] | None = None) -> None:
        self._on_trip = on_trip
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._frame: FrameType | None = None
        self.tripped = False

    def __enter__(self) -> Self:
        if get_ident() == threading.main_thread().ident:
            handler = getsignal(_SIGINT)
            if callable(handler):
                self._handler = handler
                set_handler(_SIGINT, self._note)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.tripped, self._frame = True, frame
        if self._on_trip is not None:
            self._on_trip()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        handler = self._handler
        if handler is not None:
            set_handler(_SIGINT, handler)
            if self.tripped:
                frame, self._frame = self._frame, None
                handler(_SIGINT, frame)
