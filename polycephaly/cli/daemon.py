"""Run a command in the background, and report to the shell whether it came up.

    shell's process ── fork ──> leader of a new session ── fork ──> daemon: can never get a terminal
        │ reads <──────────── pipe: text, status ────────────┘  open until it is up, or has failed
        └──> prints the text, and ends with that status

All forks come first, while this process is one thread that has loaded only the command line.
ZeroMQ, threads and the drones' zygote begin in the daemon. The daemon keeps its directory and
umask, because the drones' tasks inherit them; its own files have mode 0600. If the waiting process
is gone before the daemon is up, the daemon ends.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from io import TextIOWrapper

from ..runtime.fork_guard import fill_standard_descriptors, flush_standard_streams
from .reach import error_text

ReportStart = Callable[[str, int], object]
"""Reports the outcome of the start, once: a text and a status. Status 0: the command is up. Later
text goes to the log.
"""


def print_report(text: str, status: int) -> None:
    """Report the outcome of the start to the terminal."""
    print(text, file=sys.stderr if status else sys.stdout, flush=True)


def run_in_background(serve: Callable[[ReportStart], int], name: str) -> int:
    """Run `serve` in a daemon. Return the status after the daemon has reported its start.

    The daemon itself never returns. `name` is that of its log.
    """
    flush_standard_streams()
    fill_standard_descriptors()  # so that the pipe gets none of their numbers
    reading, writing = os.pipe()
    leader = os.fork()
    if not leader:
        try:
            os.close(reading)
            os.setsid()
            if os.fork():
                os._exit(0)
            _run_daemon(serve, writing)
        finally:
            os._exit(1)
    os.close(writing)
    os.waitpid(leader, 0)
    with open(reading) as answer:
        report = answer.readline()
    if not report:
        print(
            "Error: the pool's process ended during its start; "
            f"see its log (polycephaly logs {name})",
            file=sys.stderr,
        )
        return 1
    text, status = json.loads(report)
    print_report(text, status)
    return int(status)


def _run_daemon(serve: Callable[[ReportStart], int], writing: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.dup2(writing, 3, inheritable=False)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # The streams become the log. A fork would copy buffered text.
            stream.reconfigure(line_buffering=True)

    from ..runtime import parent_death

    # A drone's copy would keep the reader waiting.
    answer = parent_death.close_in_child(os.fdopen(3, "w"))

    def report_start(text: str, status: int) -> None:
        if not answer.closed:
            answer.write(json.dumps((text, status)) + "\n")
            answer.flush()  # raises BrokenPipeError if the reader is gone
            parent_death.close(answer)

    status = 1
    try:
        status = serve(report_start)
    except BaseException as error:
        if answer.closed or not isinstance(error, (OSError, ValueError, RuntimeError)):
            traceback.print_exc()  # to the log, if it exists already
        report_start(f"Error: {error_text(error)}", 1)
    os._exit(status)
