"""How `breakpoint()` in a drone finds a terminal or a notebook.

    drone: breakpoint() ──listens at `<pid>.d`, in the directory of its pool
                        └─DEBUG, in its output──> DebugRequest of the controller
    the controller in a terminal or a notebook, or `polycephaly attach` ──connects──> drone
                                   <── its PID and name, and where ─── drone
                                    ──── path of the terminal ───────> drone: opens it for pdb
                                    ──── or CELL ─────> drone: pdb talks over the connection
                                   <── end of the connection: the session has ended

The frames of a failed task are debugged in the same way: `frames_address` is where their keeper
listens.
"""

from __future__ import annotations

import builtins
import codecs
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple

from .._compat import allows_input, kernel_allows_input, renew_in_child
from ..promises.promise import call_in_main_thread, waiting_threads
from ..runtime.fork_guard import OwnThread

RELEASE = "release"
"""In place of a terminal's path: the frames of a failed task are not needed any more."""

CELL = "cell"
"""In place of a terminal's path: the session goes over the connection, as text, to the running cell
of a notebook.
"""
ASK = "\x05"
"""Marks in that text where the debugger waits for a line. The text since the last newline is its
prompt.
"""

MAX_KEPT_FRAMES = 8
"""Failed tasks whose frames one drone keeps at a time. Each takes a process, which keeps copies of
the pages that the drone changes later.
"""
MAX_TEXT_BYTES = 1024
"""Of the drone's first message, and of the terminal's path."""
NAME_TIMEOUT_SECONDS = 1.0
"""Longest wait for the connection and the drone's first message. The drone may be talking with
another process, or hang.
"""

# Held by a `DebugRequest` that uses this process's terminal, so that others wait for their turn.
_terminal_lock = threading.Lock()
renew_in_child(_terminal_lock)


class WaitingDebugger(NamedTuple):
    """A process that waits for a terminal, with the connection to it."""

    connection: socket.socket
    pid: int
    drone: str
    where: str  # the line of a `breakpoint()`, or the error whose frames are kept

    @classmethod
    def connect(cls, address: str) -> WaitingDebugger:
        """Connect to the process that waits there.

        Raises `OSError` if there is none, or the process does not answer.
        """
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(NAME_TIMEOUT_SECONDS)
            connection.connect(address)
            told = connection.recv(MAX_TEXT_BYTES).decode(errors="replace")
            connection.settimeout(None)
            pid, drone, where = [*told.split("\n", 2), ""][:3]  # a long name leaves no room
            return cls(connection, int(pid), drone, where)
        except OSError:
            connection.close()
            raise
        except ValueError:  # the process has ended meanwhile
            connection.close()
            raise ConnectionResetError(f"no debugger waits at {address}") from None


def greeting(drone: str, where: str) -> bytes:
    """Return the first message of a process that waits for a terminal."""
    return f"{os.getpid()}\n{drone}\n{where}".encode(errors="replace")[:MAX_TEXT_BYTES]


def debug_address(directory: str, pid: int) -> str:
    return f"{directory}/{pid}.d"


def frames_address(directory: str, task: int) -> str:
    """Return the address at which the frames of a failed task are kept."""
    return f"{directory}/task-{task}.d"


def debug_frames(address: str) -> None:
    """Debug kept frames in the running cell or this process's terminal. The session's end releases
    them.

    Raises `OSError` if no frames are kept there or their keeper does not answer, and `RuntimeError`
    without a terminal, or in the background.
    """
    if not _debug_here(address):
        raise RuntimeError(
            "this process is not in the foreground of a terminal: use `polycephaly attach` in one"
        )


def release_frames(address: str) -> None:
    """Release kept frames. Raises `OSError` if none are kept there."""
    lend_terminal(WaitingDebugger.connect(address).connection, RELEASE)


class DebugRequest:
    """An item of a drone's output: the drone has stopped at a `breakpoint()`."""

    def __init__(self, address: str, drone: str) -> None:
        self.drone = drone
        self._address = address

    def handle(self) -> None:
        """Let the drone use this process's terminal. If that is at its prompt, or there is none,
        let it use the prompt or notebook cell that next waits for a promise. Does not wait.
        """
        if _own_terminal() is not None:
            OwnThread("polycephaly-debugged", self._lend).start()
        else:
            call_in_main_thread(self._lend_waiting)

    def _lend(self) -> None:
        with _terminal_lock, suppress(OSError):  # another process may have attached
            terminal = _own_terminal()
            if terminal is not None:
                lend_terminal(WaitingDebugger.connect(self._address).connection, terminal)

    def _lend_waiting(self) -> None:
        """In the main thread, which waits for a promise."""
        try:
            _debug_here(self._address)
        except TimeoutError:  # the drone talks with another process, or has just been stopped
            call_in_main_thread(self._lend_waiting)
        except OSError:  # another process has attached
            pass


def _debug_here(address: str) -> bool:
    """Run a session in the running cell or this process's terminal; return False if there is none.

    Called in the thread that reads from these.
    """
    if allows_input(builtins.input):  # a kernel runs a cell that may ask its user
        with hanging_up(WaitingDebugger.connect(address).connection) as connection:
            connection.sendall(CELL.encode())
            _talk(connection)
        return True
    terminal = _own_terminal(at_prompt=True)
    if terminal is None:
        return False
    connection = WaitingDebugger.connect(address).connection
    with _terminal_lock:
        lend_terminal(connection, terminal)
    return True


def _talk(connection: socket.socket) -> None:
    """Run a session in the running cell until the debugger closes the connection. After the end of
    the input, the rest of the debugger's output is shown.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, may_ask = "", True
    with suppress(OSError):
        while data := connection.recv(MAX_TEXT_BYTES):
            text += decoder.decode(data)
            *asked, text = text.split(ASK)
            for each in asked:
                lines, newline, prompt = each.rpartition("\n")
                print(lines, end=newline, flush=True)
                try:
                    if may_ask:
                        connection.sendall(f"{input(prompt)}\n".encode())
                except EOFError:
                    connection.shutdown(socket.SHUT_WR)
                    may_ask = False
        print(text, end="", flush=True)


@contextmanager
def hanging_up(connection: socket.socket) -> Iterator[socket.socket]:
    """Close the connection at the end of the block, also for a process that was forked in it."""
    try:
        yield connection
    finally:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def can_be_asked() -> bool:
    """Return whether this process has a terminal, if only later in its foreground, or a notebook
    whose cells may ask.
    """
    return os.isatty(0) or allows_input(builtins.input) or kernel_allows_input()


def _own_terminal(at_prompt: bool = False) -> str | None:
    """Return the path of the terminal that this process may read now, or None.

    A process in the background may not. At an interactive prompt, the main thread itself reads,
    unless that thread waits for a promise, or (with `at_prompt`) is the caller.
    """
    try:
        if os.tcgetpgrp(0) != os.getpgrp():
            return None
        terminal = os.ttyname(0)
    except OSError:
        return None
    reads = hasattr(sys, "ps1") and threading.main_thread().ident not in waiting_threads
    return None if reads and not at_prompt else terminal


def lend_terminal(connection: socket.socket, terminal: str) -> None:
    """Let the debugger use `terminal`. Returns when the session has ended."""
    with closing(connection):
        connection.sendall(terminal.encode())
        while connection.recv(MAX_TEXT_BYTES):
            pass


def waiting_debuggers() -> Iterator[WaitingDebugger]:
    """Yield each of this user's drones that waits at a `breakpoint()`, and the keepers of the
    frames of failed tasks.

    Close the connections that you do not need.
    """
    import glob
    import tempfile

    for path in glob.glob(f"{tempfile.gettempdir()}/polycephaly-*/**/*.d", recursive=True):
        with suppress(OSError):
            if os.stat(path).st_uid == os.getuid():
                yield WaitingDebugger.connect(path)
