"""A pseudo-terminal for a debugger, shown in the notebook cell that runs.

pdb in a drone reads the lines that the cell's `input` asks for, and the cell prints what pdb
writes.
"""

from __future__ import annotations

import builtins
import codecs
import ctypes
import os
import select
import sys
import termios
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..runtime.fork_guard import OwnThread

__all__ = ["cell_terminal", "is_cell_running"]

_PROMPT_SECONDS = 0.05  # after which text that does not end a line is a prompt
_READ_BYTES = 4096


def is_cell_running() -> bool:
    """Return whether a kernel runs a cell now: meanwhile its `input` asks in the notebook."""
    return "ipykernel" in sys.modules and not isinstance(builtins.input, types.BuiltinFunctionType)


@contextmanager
def cell_terminal() -> Iterator[str]:
    """Give the path of a pseudo-terminal that the running cell shows, for one session."""
    ours, its = os.openpty()
    try:
        attributes = termios.tcgetattr(its)
        attributes[1] &= ~termios.OPOST  # no \r before \n
        attributes[3] &= ~termios.ECHO  # the notebook shows what is typed
        termios.tcsetattr(its, termios.TCSANOW, attributes)
        user = _User(ours)
        user.start()
        try:
            yield os.ttyname(its)
        finally:
            os.close(its)
            user.end()
    finally:
        os.close(ours)


class _User(OwnThread):
    """Prints what the debugger writes, and asks for a line at each prompt."""

    def __init__(self, terminal: int) -> None:
        super().__init__("polycephaly-cell", self._converse)
        self._terminal = terminal
        self._asking = False

    def end(self) -> None:
        """End the thread, also while it waits for an answer."""
        while self.is_alive():
            if self._asking:
                assert self.ident is not None
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.ident), ctypes.py_object(KeyboardInterrupt)
                )
            self.join(_PROMPT_SECONDS)

    def _converse(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        prompt = ""
        with suppress(OSError, KeyboardInterrupt):  # the session has ended
            while True:
                timeout = _PROMPT_SECONDS if prompt else None
                if select.select([self._terminal], [], [], timeout)[0]:
                    text = prompt + decoder.decode(os.read(self._terminal, _READ_BYTES))
                    lines, newline, prompt = text.rpartition("\n")
                    print(lines, end=newline, flush=True)
                else:
                    os.write(self._terminal, self._ask(prompt).encode() + b"\n")
                    prompt = ""

    def _ask(self, prompt: str) -> str:
        self._asking = True
        try:
            return input(prompt)
        finally:
            self._asking = False
