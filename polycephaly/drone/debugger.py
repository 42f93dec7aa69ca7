"""`breakpoint()` in a drone: pdb, in the terminal of another process (see wire/debugging.py)."""

from __future__ import annotations

import os
import pdb
import socket
import sys
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any, TextIO

from ..wire import addresses
from ..wire.chunks import DEBUG
from ..wire.debugging import MAX_TEXT_BYTES, debug_address
from ..wire.status_table import Slot
from .console import STDERR, write_record

__all__ = ["open_debugger"]


def open_debugger(frame: FrameType, directory: str, slot: Slot) -> pdb.Pdb:
    """Wait until a process lends its terminal, and return a debugger that uses it.

    Raises `KeyboardInterrupt` if the task is cancelled meanwhile.
    """
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    with ExitStack() as session:
        slot.set_debugged(True)
        session.callback(slot.set_debugged, False)
        keyboard, screen = _wait_for_terminal(where, directory, session)
        print(f"{addresses.own_name}: {where}", file=screen)
        return _Debugger(keyboard, screen, session.pop_all())


def _wait_for_terminal(where: str, directory: str, session: ExitStack) -> tuple[TextIO, TextIO]:
    address = debug_address(directory, os.getpid())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        try:
            listener.listen()
            print(
                f"breakpoint at {where}. To debug it: polycephaly attach {addresses.own_name}",
                file=sys.stderr,
            )
            write_record(STDERR, DEBUG, address)
            while True:
                connection = session.enter_context(listener.accept()[0])
                with suppress(OSError):  # that process has ended, or has no such terminal
                    connection.sendall(addresses.own_name.encode())
                    path = connection.recv(MAX_TEXT_BYTES).decode()
                    return (
                        session.enter_context(open(path, opener=_open_terminal)),
                        session.enter_context(open(path, "w", 1, opener=_open_terminal)),
                    )
                connection.close()
        finally:
            os.unlink(address)


def _open_terminal(path: str, flags: int) -> int:
    return os.open(
        path, flags & ~os.O_TRUNC & ~os.O_CREAT | os.O_NOCTTY
    )  # not as this process's own


class _Debugger(pdb.Pdb):
    """A session ends with `continue` without breakpoints, `quit`, or the task."""

    def __init__(self, keyboard: TextIO, screen: TextIO, session: ExitStack) -> None:
        super().__init__(stdin=keyboard, stdout=screen, skip=["polycephaly.*"])
        self._session = session
        self._is_interrupted = False

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        super().interaction(*args, **kwargs)
        if self._is_interrupted:
            raise KeyboardInterrupt

    def cmdloop(self, intro: Any = None) -> None:
        try:
            super().cmdloop(intro)
        except KeyboardInterrupt:  # the task was cancelled; pdb would prompt again
            self._is_interrupted = True
            self.set_continue()
            self._session.close()

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self._session.close()

    def set_quit(self) -> None:
        super().set_quit()
        self._session.close()

    def get_stack(self, f: Any, t: Any) -> Any:
        """Return the frames of the task, without those of this package that run it."""
        stack, current = super().get_stack(f, t)
        first = current
        while first and not _is_ours(stack[first - 1][0]):
            first -= 1
        return stack[first:], current - first

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        trace = super().dispatch_return(frame, arg)
        if frame.f_back is None or _is_ours(frame.f_back):
            super().set_continue()
            self._session.close()
        return trace


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("polycephaly.")
