"""A drone's standard streams, whose text goes to the controller; the output tail, for the promise.

    print ──> Console ──by lines──> pipe (descriptor 1 or 2) ──> reactor ──> controller's streams
                 └── output tail (4096 characters) ──> sent with the result

Output of C code and child processes goes through the same pipes, but not into the tail. Records of
`write_record` (wire/chunks.py) go through the pipes too, in order with the printed lines. They use
descriptors of their own, because a task may put files on 1 and 2. On Ray, files take the place of
the pipes (engines/ray/exit_record.py).
"""

from __future__ import annotations

import builtins
import io
import itertools
import os
import select
import sys
import types
from collections.abc import Iterator
from typing import Any

from ..runtime.fork_guard import flush_standard_streams
from ..wire.chunks import END, LOG, ORDER, TAG, chunk

MAX_TAIL_CHARS = 4096
STDOUT, STDERR = 0, 1
_MAX_TAG_CHARS = 128

_pipes: list[int] = []  # stdout's and stderr's, in a drone
_tag = ""
_record_numbers: Iterator[int] = itertools.count(1)  # of log records
_last_record = 0  # number of the log record sent last


class OutputTail:
    """The end of the text that any thread has printed on either stream since the last `take`."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._size = 0

    def add(self, text: str) -> None:
        self.pieces.append(text[-MAX_TAIL_CHARS:])
        self._size += len(text)
        if self._size > 4 * MAX_TAIL_CHARS:
            self.pieces = ["".join(self.pieces)[-MAX_TAIL_CHARS:]]
            self._size = MAX_TAIL_CHARS

    def take(self, ends_lines: bool) -> bytes:
        """Return, as UTF-8, the last `MAX_TAIL_CHARS` characters added since the last call.

        If there are any, the streams are flushed, so that the text is sent before the result. If
        `ends_lines`, lines that were begun are ended.
        """
        if not self.pieces:
            return b""
        flush_standard_streams()
        for stream in (sys.stdout, sys.stderr):
            if ends_lines and isinstance(stream, Console) and stream.has_begun_line:
                stream.has_begun_line = False
                write_record(STDOUT if stream.is_stdout else STDERR, END, "")
        text = "".join(self.pieces)[-MAX_TAIL_CHARS:]
        self.pieces.clear()
        self._size = 0
        return text.encode("utf-8", "replace")


class Console(io.TextIOWrapper):
    """A text stream on descriptor 1 or 2 that also adds its text to the output tail."""

    def __init__(self, fd: int, tail: OutputTail) -> None:
        writer = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
        super().__init__(writer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._tail = tail
        self._bytes = _Bytes(self, writer)
        self.has_begun_line = False
        self.is_stdout = fd == 1
        self._last_order = _last_record

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            return super().write(text)  # which raises TypeError
        self.note(text)
        return super().write(text)

    @property
    def buffer(self) -> io.BufferedIOBase:  # type: ignore[override]
        return self._bytes

    def note(self, text: str) -> None:
        """Take `text`, which is about to be written, into the output tail."""
        self._tail.add(text)
        self.has_begun_line = not text.endswith("\n")
        if self.is_stdout and self._last_order != _last_record:
            # A line that was begun before the record counts as printed after it.
            self._last_order = _last_record
            write_record(STDOUT, ORDER, str(self._last_order))


class _Bytes(io.BufferedIOBase):
    """What tasks find as ``sys.stdout.buffer``: the output tail has what is written here, too, so
    that it is sent with its own task.
    """

    def __init__(self, console: Console, writer: io.BufferedWriter[io.FileIO]) -> None:
        self._console = console
        self._writer = writer
        self.raw, self.name, self.mode = writer.raw, writer.name, writer.mode

    def write(self, content: Any, /) -> int:
        with memoryview(content) as view:
            if view.nbytes:
                end = view.cast("B")[-4 * MAX_TAIL_CHARS :]  # a character has at most 4 bytes
                self._console.note(bytes(end).decode("utf-8", "replace"))
        return self._writer.write(content)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        """Stay open: a text stream that a task makes of this closes it when it is collected, and
        later tasks write, too.
        """
        self.flush()

    def fileno(self) -> int:
        return self._writer.fileno()

    def isatty(self) -> bool:
        return self._writer.isatty()

    def writable(self) -> bool:
        return True


def open_console() -> OutputTail:
    """Put new streams on descriptors 1 and 2, and return their common output tail.

    The old ones are kept, because closing them would write the text in their buffers.
    """
    global _tag, _tail
    tail = _tail = OutputTail()
    _tag = ""
    while _pipes:  # those of the drone that is this one's controller
        os.close(_pipes.pop())
    _pipes.extend((os.dup(1), os.dup(2)))
    _inherited.extend((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    sys.stdout = sys.__stdout__ = Console(1, tail)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = Console(2, tail)  # type: ignore[misc]
    _replace_kernel_input()
    return tail


def _replace_kernel_input() -> None:
    """In a drone of a notebook, undo ipykernel's changes of functions that ask its user.

    The kernel's `input` and `getpass` write to its sockets and wait there for an answer. Only the
    kernel may do so, because two processes at one ZeroMQ socket harm each other. A drone's standard
    input is empty. Displayed objects are printed, as in plain Python.
    """
    # An imported ipykernel alone makes no kernel, and each drone would import IPython in vain.
    if not {"ipykernel", "IPython.core.interactiveshell"} <= sys.modules.keys():
        return
    if not isinstance(builtins.input, types.BuiltinFunctionType):
        builtins.input = _read_line
    getpass: Any = sys.modules.get("getpass")
    if getpass is not None:
        getpass.getpass = getpass.unix_getpass
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    if shell is not None:
        shell.display_pub = DisplayPublisher(shell=shell)  # type: ignore[no-untyped-call]


def _read_line(prompt: object = "", /) -> str:
    print(prompt, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError("a drone's standard input is empty")
    return line.removesuffix("\n")


_inherited: list[object] = []  # the streams before, kept from being closed
_tail = OutputTail()


def disable_record_order() -> None:
    """In a child that a task has forked: number its log records 0, outside the drone's order."""
    global _record_numbers
    _record_numbers = itertools.repeat(0)


def write_record(pipe: int, kind: str, body: str) -> None:
    """Send a record to the controller by `pipe`, after the text written to that pipe.

    `pipe` is `STDOUT` or `STDERR`. Any thread may call it. Outside a drone, or if the controller is
    gone, nothing happens. Raises `ValueError` for a body that no chunk can have.
    """
    if _pipes:
        for piece in chunk(kind, body):
            _write(_pipes[pipe], piece)


def send_log_record(record: str) -> None:
    """Send a log record, in order with the lines that this process prints on either stream.

    A line that was begun before the record and ends after it comes after the record. Any thread may
    call this.
    """
    global _last_record
    number = next(_record_numbers)
    write_record(STDERR, LOG, f"{number} {record}")
    _last_record = number


def set_tag(name: str) -> None:
    """Mark further output of this drone as printed on behalf of `name`.

    The controller sees the tag as `Line.tag`. `name` is at most 128 printable ASCII characters; ""
    removes the mark. The code that sets a tag removes it, or leaves that to the executor, which
    does so before a task that sets no tag itself. A new tag ends a line that was begun. The tag
    holds for all output: of other threads, C code and subprocesses. Raises `ValueError` for an
    invalid name.
    """
    if len(name) > _MAX_TAG_CHARS or not (name.isascii() and name.isprintable()):
        raise ValueError(
            f"a tag is at most {_MAX_TAG_CHARS} printable ASCII characters, not {name[:80]!r}"
        )
    global _tag
    flush_standard_streams()
    _tag = name
    for pipe in (STDOUT, STDERR):
        write_record(pipe, TAG, name)


def current_tag() -> str:
    """Return the tag that was set last."""
    return _tag


def has_printed() -> bool:
    """Return True if the running task has printed by Python's streams."""
    return bool(_tail.pieces)


def _write(fd: int, piece: bytes) -> None:
    while True:
        try:
            os.write(fd, piece)
            return
        except BlockingIOError:
            # A program that shares the pipe has made it non-blocking. Once the poll succeeds, a
            # piece of up to a page is written whole.
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
        except OSError:  # no process reads the pipe any more
            return
