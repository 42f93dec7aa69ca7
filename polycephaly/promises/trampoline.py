"""A trampoline for steps that lead to further steps, to bound the depth of recursion.

A settled promise, for one, settles the promises that follow it.

    step ──> step ──> ... `max_depth` steps nested ──> later steps wait for the outermost one's end

Each thread has its own state, so nothing is shared between threads. Every postponed step is run,
even if a step raises: the last error is raised after all of them. Ctrl-C may also arrive between
two steps, because CPython runs signal handlers at function entry and at the end of a loop, and
neither place is inside a `try` there. If that happens, the remaining steps are run in a second
pass.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from os import getpid
from typing import Any


class Trampoline(threading.local):
    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._depth = 0
        self._pid = getpid()
        self._postponed: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def run(self, step: Callable[..., object], *args: Any) -> None:
        """Run `step` now, or before the outermost step of this thread returns."""
        if self._pid != getpid():
            # This process was forked inside a step. The enclosing and the postponed steps belong to
            # the parent.
            self._pid = getpid()
            self._depth = 0
            self._postponed = deque()
        outer_depth = self._depth
        if outer_depth >= self._max_depth:
            self._postponed.append((step, args))
            return
        try:
            self._depth = outer_depth + 1
            step(*args)
        finally:
            self._depth = outer_depth
            if self._postponed and not outer_depth:
                self._depth = 1
                try:
                    try:
                        self._run_postponed()
                    finally:
                        if self._postponed:
                            self._run_postponed()
                finally:
                    self._depth = 0

    def _run_postponed(self) -> None:
        worst: BaseException | None = None
        while self._postponed:
            try:
                step, args = self._postponed.popleft()
                step(*args)
            except BaseException as raised:  # SystemExit and Ctrl-C too
                worst = raised
        if worst is not None:
            try:
                raise worst
            finally:
                worst = None  # break the reference cycle through this frame
