"""A drone's standard streams: pipes to the controller, with a tail kept for the promise.

    print ──> Console ──line by line──> pipe on descriptor 1 or 2 ──> hub ──> controller's own streams
                 └── tail (4 KiB) ──> goes home with the result

What C code and child processes write goes through the same pipes, though not into the tail. So do
`note`'s records (wire/chunks.py), in order with what is printed; by descriptors of their own, as
work may put files on 1 and 2."""

from __future__ import annotations

import io
import itertools
import os
import select
import sys
from collections.abc import Iterator
from contextlib import suppress

from ..wire.chunks import LOG, ORDER, TAG, chunk

__all__ = [
    "STDERR", "STDOUT", "OutputTail", "has_printed", "note", "open_console", "send_record", "stay_behind",
    "tag", "tagged",
]  # fmt: skip

TAIL = 4096  # characters
STDOUT, STDERR = 0, 1
_LONGEST_TAG = 128  # characters

_pipes: list[int] = []  # stdout's and stderr's, in a drone
_tag = ""
_record_numbers: Iterator[int] = itertools.count(1)
_last_record = 0


class OutputTail:
    """The end of what one piece of work printed."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._size = 0

    def add(self, text: str) -> None:
        self.pieces.append(text[-TAIL:])
        self._size += len(text)
        if self._size > 4 * TAIL:
            self.pieces = ["".join(self.pieces)[-TAIL:]]
            self._size = TAIL

    def take(self) -> bytes:
        """What was added since the last call; the streams are flushed, so that it is out before the
        result."""
        if not self.pieces:
            return b""
        _flush()
        text = "".join(self.pieces)[-TAIL:]
        self.pieces.clear()
        self._size = 0
        return text.encode("utf-8", "replace")


class Console(io.TextIOWrapper):
    def __init__(self, fd: int, tail: OutputTail) -> None:
        raw = io.FileIO(fd, "w", closefd=False)
        super().__init__(
            io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        self._tail = tail
        self._is_stdout = fd == 1
        self._after = _last_record

    def write(self, text: str, /) -> int:
        self._tail.add(text)
        if self._is_stdout and self._after != _last_record:
            self._after = _last_record  # a line that is begun ends after this, too
            note(STDOUT, ORDER, str(self._after))
        return super().write(text)


def open_console() -> OutputTail:
    """Puts new streams on descriptors 1 and 2. The old ones are kept: closing them would write what
    they hold."""
    global _tag, _tail
    tail = _tail = OutputTail()
    _tag = ""
    while _pipes:  # of the drone that this one's controller is
        os.close(_pipes.pop())
    _pipes.extend((os.dup(1), os.dup(2)))
    _inherited.extend((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    sys.stdout = sys.__stdout__ = Console(1, tail)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = Console(2, tail)  # type: ignore[misc]
    return tail


_inherited: list[object] = []
_tail = OutputTail()


def stay_behind() -> None:
    """In a child that work has forked: what it logs has no place in the order of what the drone
    logs."""
    global _record_numbers
    _record_numbers = itertools.repeat(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(
            AttributeError, OSError, ValueError
        ):  # the work closed it, or put something else there
            stream.flush()


def note(pipe: int, kind: str, body: str) -> None:
    """Sends a record home by that pipe (`STDOUT`, `STDERR`), behind what was written to it; any
    thread may. Does nothing outside a drone, or when the controller is gone. Raises `ValueError`
    for a body that no chunk can have."""
    if _pipes:
        for piece in chunk(kind, body):
            _write(_pipes[pipe], piece)


def send_record(record: str) -> None:
    """Sends what was logged home, in order with what this process prints on either stream. Any
    thread may."""
    global _last_record
    number = next(_record_numbers)
    note(STDERR, LOG, f"{number} {record}")
    _last_record = number


def tag(name: str) -> None:
    """From here on what comes through this drone's output pipes is on behalf of `name` (`Line.tag`
    at the controller), a short name in ASCII; "": of nobody. Whoever sets it clears it. A line that
    was begun is ended by another tag.

    It holds for all that prints: other threads, C code, subprocesses. Raises `ValueError` for what
    is no such name."""
    if len(name) > _LONGEST_TAG or not (name.isascii() and name.isprintable()):
        raise ValueError(
            f"a tag is at most {_LONGEST_TAG} printable ASCII characters, not {name[:80]!r}"
        )
    global _tag
    _flush()
    _tag = name
    for pipe in (STDOUT, STDERR):
        note(pipe, TAG, name)


def tagged() -> str:
    """The tag that was set last."""
    return _tag


def has_printed() -> bool:
    """Whether the work that runs has, by Python's streams."""
    return bool(_tail.pieces)


def _write(fd: int, piece: bytes) -> None:
    while True:
        try:
            os.write(fd, piece)
            return
        except (
            BlockingIOError
        ):  # a program that shares it has made it so; what a page takes goes in whole
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
        except OSError:  # nobody reads it any more
            return
