"""The thread that calls users' callbacks of the promises that a loop has settled.

    loop's thread ──settles──> hooks of the package, at once: they wake waiters
                         └───> `add`: callbacks of users, in order ──> this thread

So a callback that takes long delays other callbacks, and nothing else: results arrive, tasks are
sent, and time limits hold. Waiting is allowed there, except for what the thread itself has to do.
"""

from __future__ import annotations

import os

from .lazy_thread import LazyThread


def _renew_in_child() -> None:
    global callbacks_thread
    callbacks_thread = LazyThread("polycephaly-callbacks")


callbacks_thread = LazyThread("polycephaly-callbacks")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)
