"""A debugger's session in the notebook cell that runs.

    drone: pdb ──text, and `ASK` for each line──> talk ──`print`, `input`──> the cell
               <───────────────lines──────────────

A session that a thread of its own serves asks only while the cell's thread waits for a promise:
the cell may call `input` itself, and two readers would take each other's answers.
"""

from __future__ import annotations

import builtins
import codecs
import ctypes
import select
import socket
import threading
from collections.abc import Callable
from time import sleep

from .._compat import allows_input
from ..promises.promise import waiting_threads
from ..runtime.fork_guard import OwnThread

__all__ = ["ASK", "asks_in_notebook", "does_cell_wait", "talk", "talk_while_cell_waits"]

ASK = "\x05"
"""In the text of a session: the debugger waits for a line. The text before it is the prompt."""

CHECK_SECONDS = 0.05  # between checks whether the cell still waits
_READ_BYTES = 4096


def asks_in_notebook() -> bool:
    """Return whether a kernel runs a cell now that may ask its user."""
    return allows_input(builtins.input)


def does_cell_wait() -> bool:
    return asks_in_notebook() and threading.main_thread().ident in waiting_threads


def talk(
    connection: socket.socket, ask: Callable[[str], str] = lambda prompt: input(prompt)
) -> None:
    """Show a session, until the debugger closes the connection.

    The end of input ends it, too: `ask` raises `EOFError`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    while data := connection.recv(_READ_BYTES):
        text += decoder.decode(data)
        *asked, text = text.split(ASK)
        for each in asked:
            lines, newline, prompt = each.rpartition("\n")
            print(lines, end=newline, flush=True)
            try:
                line = ask(prompt)
            except EOFError:
                return
            connection.sendall(f"{line}\n".encode())
    print(text, end="", flush=True)


def talk_while_cell_waits(connection: socket.socket) -> None:
    """As `talk`, in a thread that is not the cell's."""
    talk(connection, lambda prompt: _Question(prompt, connection).ask())


class _Question:
    """Asks for one line in this thread, which a second one interrupts if it may ask no longer."""

    def __init__(self, prompt: str, connection: socket.socket) -> None:
        self._prompt = prompt
        self._connection = connection
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_open = False

    def ask(self) -> str:
        while True:
            while not does_cell_wait():
                if self._has_session_ended():
                    raise EOFError
                sleep(CHECK_SECONDS)
            try:
                try:
                    self._is_open = True
                    watcher = OwnThread("polycephaly-cell", self._watch)
                    watcher.start()
                    return input(self._prompt)
                finally:
                    with self._lock:
                        self._is_open = False
                    watcher.join()
            except KeyboardInterrupt:
                pass

    def _watch(self) -> None:
        while does_cell_wait() and not self._has_session_ended():
            sleep(CHECK_SECONDS)
            if not self._is_open:
                return
        with self._lock:
            if self._is_open:  # once: it is raised before this thread is waited for
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(KeyboardInterrupt)
                )

    def _has_session_ended(self) -> bool:
        # The debugger sends nothing while it waits for a line.
        return bool(select.select([self._connection], [], [], 0)[0])
