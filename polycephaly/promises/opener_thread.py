"""The thread that runs users' pickling code for the loops.

    loop's thread ──add──> this thread ──> unpickles errors of tasks, and values with ends of
                                           channels or handles, and settles the promises
                                           pickles values of promises that other tasks take

So code of these that takes long delays the calls behind it in this thread, and nothing else: other
values arrive, tasks are sent, waits end in time.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident

from ..runtime import forked
from .lazy_thread import LazyThread

settling_threads: set[int] = set()
"""Ids of the threads that settle promises. Such a thread would wait for itself if it waited for a
promise, so waiting there raises an error.
"""


def is_settling_thread() -> bool:
    """Return whether the caller is in one of `settling_threads`."""
    return get_ident() in settling_threads


class OpenerThread(LazyThread):
    def __init__(self) -> None:
        super().__init__("polycephaly-opener")
        self._generation = 0

    def _run(self) -> None:
        me = get_ident()
        settling_threads.add(me)
        try:
            super()._run()
        finally:
            settling_threads.discard(me)

    def _before_call(self) -> None:
        self._generation = forked.generation

    def _after_call(self) -> None:
        forked.exit_if_forked(self._generation, sys.exception())


def _renew_in_child() -> None:
    global opener_thread
    opener_thread = OpenerThread()


opener_thread = OpenerThread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)
