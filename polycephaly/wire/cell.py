"""A debugger's session in the notebook cell that runs.

    drone: pdb ──text, and `ASK` for each line──> talk ──`print`, `input`──> the cell
               <───────────────lines──────────────

The cell's own thread does this, while it waits for a promise: only that thread may call `input`.
"""

from __future__ import annotations

import builtins
import codecs
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .._compat import allows_input

__all__ = ["ASK", "asks_in_notebook", "hanging_up", "talk"]

ASK = "\x05"
"""In the text of a session: the debugger waits for a line. The text before it is the prompt."""

_READ_BYTES = 4096


def asks_in_notebook() -> bool:
    """Return whether a kernel runs a cell now that may ask its user."""
    return allows_input(builtins.input)


def talk(connection: socket.socket) -> None:
    """Show a session, until the debugger closes the connection. Ctrl-C ends the session, too."""
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
