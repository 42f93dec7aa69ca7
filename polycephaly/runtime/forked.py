"""End a child that code of users forked in a thread of this package.

    package frames ──> code of users ── os.fork() ──> parent: back to the package frames
                                            └───────> child: its copy of the frames must not go on

A frame that calls such code reads `generation` before the call and compares it afterwards. If the
two differ, this process is a child that was forked during the call, and the queue, socket or
promise that the frame would continue with belongs to the parent. `exit_if_forked` then ends the
child as the main program of an interpreter ends.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from .. import _compat

generation = 0
"""The number of forks between the first process and this one."""


def exit_if_forked(since: int, error: BaseException | None = None) -> None:
    """End this process if it was forked after the generation `since`.

    Called when code of users has returned, or has raised `error`. The exit status is 0 after a
    return, that of ``sys.exit`` after a `SystemExit`, and 1 after any other error, whose traceback
    is printed. Threads that the child has started end first, then its exit handlers run.
    """
    if generation != since:
        _exit(error)


def _exit(error: BaseException | None) -> NoReturn:
    status = 0
    try:
        status = _exit_status(error)
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        _compat.run_exit_handlers()
    except BaseException as worse:
        status = _exit_status(worse)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # None, or closed
                stream.flush()
        os._exit(status)


def _exit_status(error: BaseException | None) -> int:
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _count_fork() -> None:
    global generation
    generation += 1


if hasattr(os, "register_at_fork"):  # promises work also where no process can be forked
    os.register_at_fork(after_in_child=_count_fork)
