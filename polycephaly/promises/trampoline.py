"""What leads to more of its kind, as one settled promise to those that follow it, without recursing
too deep.

    step ──> step ──> … `deep` of them one within the other ──> the next is put off until the outermost is done

Each thread has a cascade of its own, so nothing here is shared. What is put off is done whatever a
step raises: that is raised when all are. Ctrl-C may fall between two steps too (CPython runs signal
handlers where a function is entered and at the end of a loop, and neither is in a `try` there):
then the rest is gone through once more."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from os import getpid
from typing import Any

__all__ = ["Trampoline"]


class Trampoline(threading.local):
    def __init__(self, deep: int) -> None:
        self._deep = deep
        self._depth = 0
        self._pid = getpid()
        self._later: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def go(self, step: Callable[..., object], *args: Any) -> None:
        """Does this step, now or before the outermost step of this thread returns."""
        if (
            self._pid != getpid()
        ):  # forked within a step: those around it, and what is put off, are the parent's
            self._pid = getpid()
            self._depth = 0
            self._later = deque()
        before = self._depth
        if before >= self._deep:
            self._later.append((step, args))
            return
        try:
            self._depth = before + 1
            step(*args)
        finally:
            self._depth = before
            if self._later and not before:
                self._depth = 1
                try:
                    try:
                        self._do_all()
                    finally:
                        if self._later:
                            self._do_all()
                finally:
                    self._depth = 0

    def _do_all(self) -> None:
        worst: BaseException | None = None
        while self._later:
            try:
                step, args = self._later.popleft()
                step(*args)
            except BaseException as raised:  # SystemExit, Ctrl-C
                worst = raised
        if worst is not None:
            try:
                raise worst
            finally:
                worst = None  # or it would hold itself by this frame
