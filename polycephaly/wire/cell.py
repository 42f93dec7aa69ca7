"""A debugger session, shown in the running cell of a notebook.

    drone: pdb ──text, and `ASK` for each line──> controller: talk ──`print`, `input`──> the cell
               <───────────────lines──────────────

`talk` runs in the cell's own thread, because only that may call `input`: while the thread waits for
a promise, or in `debug_frames`.
"""

from __future__ import annotations

import builtins
import codecs
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .._compat import allows_input

ASK = "\x05"
"""Marks in the text of a session where the debugger waits for a line. The text since the last
newline is its prompt.
"""

_READ_BYTES = 4096


def can_ask_in_cell() -> bool:
    """Return whether a kernel is running a cell that may ask its user for input."""
    return allows_input(builtins.input)


def talk(connection: socket.socket) -> None:
    """Run a session until the debugger closes the connection. After the end of the input, what the
    debugger still says is shown.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, may_ask = "", True
    with suppress(OSError):
        while data := connection.recv(_READ_BYTES):
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
