"""A trampoline for steps that lead to further steps, to bound the depth of recursion.

A settled promise, for one, settles the promises that follow it.

    step ──> step ──> ... `deep` steps nested ──> later steps wait until the outermost step is done

Each thread has its own state, so nothing is shared between threads. Every postponed step is run,
even if a step raises: the error is raised after all of them. Ctrl-C may also arrive between two
steps, because CPython runs signal handlers at function entry and at the end of a loop, and neither
place is inside a `try` there. If that happens, the remaining steps are run in a second pass.
"""

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
        """Run `step` now, or before the outermost step of this thread returns."""
        if self._pid != getpid():
            # This process was forked inside a step. The enclosing and the postponed steps belong to
            # the parent.
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
            except BaseException as raised:  # SystemExit and Ctrl-C too
                worst = raised
        if worst is not None:
            try:
                raise worst
            finally:
                worst = None  # break the reference cycle through this frame
