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


# A fork does not wait for this thread, wherever it is, because nothing of it is in the child:
#   - its queue and lock, with a call that was taken and not made, are those of an object that the
#     child has no more; what they were for belongs to a pool of the parent;
#   - of `settling_threads` and the other tables by thread, a child clears all (promise.py), because
#     a thread of its own may get the id of this one;
#   - a value that is half built has not been stored: the child builds it anew (sealed.py);
#   - the lock under which a class gets its number is made free (wire/by_value.py), and a class
#     that has its number, but not all its attributes, gets these with the next value of it;
#   - a module that is being imported is waited for (`fork_guard.wait_for_imports`).
# So only what users' code holds stays held, as with any thread of theirs.
def _renew_in_child() -> None:
    global opener_thread
    opener_thread = OpenerThread()
    settling_threads.clear()


opener_thread = OpenerThread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)
