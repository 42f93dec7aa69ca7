"""A command that goes on in the background, and a shell that learns whether it came up.

    shell's process ── fork ──> leader of a new session ── fork ──> the daemon: no terminal can ever be its own
        │ reads <──────────── pipe: what it says, its status ────────────┘  open until it is up, or has failed
        └──> prints that, and ends with that status

All forks come first, while this process is one thread that has loaded nothing but the command line:
ZeroMQ, threads and the drones' zygote begin in the daemon. It keeps its directory and umask, which
are those of the drones' work as well; what it writes of its own it makes with mode 0600. If whoever
waits is gone before it is up, it ends."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from io import TextIOWrapper
from typing import Protocol

from .reach import said

__all__ = ["Tell", "detached", "here"]


class Tell(Protocol):
    """Says how it went, once: with status 0, it is up. What follows goes to the log."""

    def __call__(self, text: str, status: int = 0) -> None: ...


def here(serve: Callable[[Tell], int]) -> int:
    """In the foreground."""

    def tell(text: str, status: int = 0) -> None:
        print(text, file=sys.stderr if status else sys.stdout, flush=True)

    return serve(tell)


def detached(serve: Callable[[Tell], int]) -> int:
    """In a daemon. Returns here when that has told how it went; the daemon itself never returns."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed before we began
            stream.flush()
    while (
        fd := os.open(os.devnull, os.O_RDWR)
    ) < 3:  # the pipe is not to get the number of a closed one
        pass
    os.close(fd)
    reading, writing = os.pipe()
    leader = os.fork()
    if not leader:
        try:
            os.close(reading)
            os.setsid()
            if os.fork():
                os._exit(0)
            _be_daemon(serve, writing)
        finally:
            os._exit(1)
    os.close(writing)
    os.waitpid(leader, 0)
    with open(reading) as answer:
        said = answer.readline()
    if not said:
        print(
            "Error: the pool's process ended before it was up; its log may tell why",
            file=sys.stderr,
        )
        return 1
    text, status = json.loads(said)
    print(text, file=sys.stderr if status else sys.stdout)
    return int(status)


def _be_daemon(serve: Callable[[Tell], int], writing: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.dup2(writing, 3, inheritable=False)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(
                line_buffering=True
            )  # they become the log; nothing may wait there when it forks

    from ..runtime import parent_death

    answer = parent_death.own(os.fdopen(3, "w"))  # no drone may keep the other's reader waiting

    def tell(text: str, status: int = 0) -> None:
        if not answer.closed:
            answer.write(json.dumps((text, status)) + "\n")
            answer.flush()  # raises BrokenPipeError where nobody waits any more
            parent_death.close(answer)

    status = 1
    try:
        status = serve(tell)
    except BaseException as error:
        if answer.closed or not isinstance(error, (OSError, ValueError, RuntimeError)):
            traceback.print_exc()  # to the log, if it is there already
        tell(f"Error: {said(error)}", 1)
    os._exit(status)
