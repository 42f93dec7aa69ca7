"""`breakpoint()` in a drone: pdb, in the terminal of another process (see wire/debugging.py)."""

from __future__ import annotations

import io
import os
import pdb
import select
import socket
import sys
from contextlib import ExitStack, suppress
from math import inf
from threading import get_ident
from types import FrameType
from typing import Any, TextIO

from ..errors import is_own_frame
from ..wire import addresses
from ..wire.chunks import DEBUG
from ..wire.debugging import ASK, CELL, MAX_TEXT_BYTES, RELEASE, debug_address, greeting, hanging_up
from ..wire.status_page import StatusPage
from .console import STDERR, write_record
from .sigterm import sigterm


def open_debugger(
    frame: FrameType, directory: str, page: StatusPage, patience: float | None
) -> Debugger:
    """Wait until a process lends its terminal, and return a debugger that uses it.

    Time limits stand still meanwhile, if `patience` is None. Otherwise only `polycephaly attach`
    can lend a terminal: limits count until it does, and after `patience` seconds `RuntimeError` is
    raised. Raises `KeyboardInterrupt` if the task is cancelled meanwhile.
    """
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    address = debug_address(directory, os.getpid())
    with ExitStack() as session:
        page.debugged = int(patience is None)
        session.callback(setattr, page, "debugged", 0)
        with _listen(address) as listener:
            if patience is not None and patience < inf:
                listener.settimeout(patience)
            try:
                print(
                    f"breakpoint at {where}. To debug it: polycephaly attach {os.getpid()}",
                    file=sys.stderr,
                )
                write_record(STDERR, DEBUG, address)
                keyboard, screen = _accept(listener, where, session)
            except TimeoutError:
                raise RuntimeError(
                    f"nobody came to debug the breakpoint at {where} within {patience:g} s "
                    "(report_waiting): the program has no terminal and no notebook, and nobody "
                    f"used `polycephaly attach {os.getpid()}`. With PYTHONBREAKPOINT=0 in the "
                    "environment, breakpoint() does nothing"
                ) from None
            finally:
                os.unlink(address)
        page.debugged = 1
        return Debugger(keyboard, screen, session.pop_all())


def _listen(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        with suppress(FileNotFoundError):  # of a killed process with the same ID
            os.unlink(address)
        listener.bind(address)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _accept(listener: socket.socket, where: str, session: ExitStack) -> tuple[TextIO, TextIO]:
    """Wait for a process that lends its terminal, and open that.

    Raises `EOFError` if a process releases the frames.
    """
    while True:
        connection = listener.accept()[0]
        # An error: that process has ended, or has no such terminal.
        with suppress(OSError), ExitStack() as lent:
            lent.enter_context(hanging_up(connection))
            connection.sendall(greeting(addresses.own_name, where))
            path = connection.recv(MAX_TEXT_BYTES).decode()
            if path == RELEASE:
                session.enter_context(lent.pop_all())  # told at the end, as of a session
                raise EOFError
            keyboard: Any
            if path == CELL:
                screen = lent.enter_context(connection.makefile("w", encoding="utf-8"))
                lines = lent.enter_context(connection.makefile("r", encoding="utf-8"))
                keyboard = _CellKeyboard(lines, screen)
            else:
                keyboard = lent.enter_context(_TerminalKeyboard(path, connection))
                screen = lent.enter_context(open(path, "w", 1, opener=_open_terminal))
            print(f"{addresses.own_name}: {where}", file=screen)
            session.enter_context(lent.pop_all())
            return keyboard, screen


class _CellKeyboard:
    """The lines of a notebook's user: what pdb needs of a stream."""

    def __init__(self, lines: TextIO, screen: TextIO) -> None:
        self._lines = lines
        self._screen = screen

    def readline(self) -> str:
        self._screen.write(ASK)
        self._screen.flush()
        return self._lines.readline()


class _TerminalKeyboard(io.TextIOWrapper):
    """The lines of a lent terminal, until the process that has lent it is gone: the terminal may
    then have another reader, such as a shell.
    """

    def __init__(self, path: str, connection: socket.socket) -> None:
        super().__init__(io.BufferedReader(io.FileIO(path, opener=_open_terminal)))
        self._connection = connection

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]  # as in typeshed
        poll = select.poll()
        for file in (self, self._connection):
            poll.register(file, select.POLLIN)
        if self._connection.fileno() in dict(poll.poll()):
            raise ConnectionResetError("the process that has lent its terminal is gone")
        return super().readline(size)


def _open_terminal(path: str, flags: int) -> int:
    flags &= ~(os.O_TRUNC | os.O_CREAT)
    return os.open(path, flags | os.O_NOCTTY)  # not as the controlling terminal


def keep_frames(error: BaseException, address: str) -> int:
    """Fork a process that keeps the frames of `error` until they were debugged or released.

    Return its process ID. The drone itself goes on.
    """
    with _listen(address) as listener:
        pid = sigterm.fork_with_handler()  # since it lasts as long as its drone
        if pid:
            return pid
        try:
            with ExitStack() as session:
                try:
                    keyboard, screen = _accept(listener, repr(error), session)
                finally:  # before the peer is told: then the drone may keep the next frames
                    os.unlink(address)
                    listener.close()
                debugger = Debugger(keyboard, screen, session)
                debugger.reset()
                debugger.interaction(None, error.__traceback__)
        finally:
            os._exit(0)


class Debugger(pdb.Pdb):
    """A session ends with `continue` without breakpoints, `quit`, the task, or the terminal.

    For a coroutine, it ends at an `await` that suspends, because another thread may resume that.
    """

    def __init__(self, keyboard: TextIO, screen: TextIO, session: ExitStack) -> None:
        # In bdb and pdb, CPython 3.13 would stop at a further `breakpoint()` of the task.
        skip = ["polycephaly.*", "bdb", "pdb"]
        # Upon `continue`, pdb would replace the handler of SIGINT, by which tasks are cancelled.
        super().__init__(stdin=keyboard, stdout=screen, skip=skip, nosigint=True)
        self._session = session
        self._thread = get_ident()
        self._is_interrupted = False
        self.is_open = True

    def takes(self, thread: int) -> bool:
        """Return whether another `breakpoint()` of that thread is to stop in this session."""
        return self.is_open and thread == self._thread

    def end(self) -> None:
        self.is_open = False
        with suppress(OSError):  # the terminal does not take the rest of the output
            self._session.close()

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        try:
            return super().trace_dispatch(frame, event, arg)
        except OSError:  # the terminal is gone
            self.forget()
            self._leave()
            return None

    def _leave(self) -> None:
        """Let the task run on: no breakpoint of this session must stop it, or a later task."""
        self.clear_all_breaks()
        self.set_continue()

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        super().interaction(*args, **kwargs)
        if self._is_interrupted:
            raise KeyboardInterrupt

    def cmdloop(self, intro: Any = None) -> None:
        try:
            super().cmdloop(intro)
        except KeyboardInterrupt:  # the task was cancelled; pdb would prompt again
            self._is_interrupted = True
            self._leave()

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self.end()

    def set_quit(self) -> None:
        super().set_quit()
        self.end()

    def get_stack(self, f: Any, t: Any) -> Any:
        """Return the frames of the task, without those of this package that run it."""
        stack, current = super().get_stack(f, t)
        first = current
        while first and not is_own_frame(stack[first - 1][0]):
            first -= 1
        return stack[first:], current - first

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        trace = super().dispatch_return(frame, arg)
        if frame.f_back is None or is_own_frame(frame.f_back):
            self._leave()
        return trace
