"""What drones print, on its way home: whole lines, each knowing whose it is.

drone's descriptor 1 or 2 ── pipe ──> Stream ──> Line, Line, ... ──> forward (or the pool's `output`)
                                       └── chunks (wire/chunks.py) are taken out: on whose behalf the lines are
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import FileIO

from .launch import lifeline
from .wire.chunks import MARK, TAG, Sorter

__all__ = ["Line", "Stream", "forward", "print_all"]

_LONGEST = 4 << 20  # bytes of a line
_CHUNK = 64 * 1024
_READS = 16  # of one pipe at a time: a drone that never stops writing must not keep the hub


class Line(str):
    """One line of a drone's output, with its prefix. ``text`` is without; ``drone`` and ``stream`` say whose; ``tag`` on
    whose behalf it was printed, if somebody said so (see image/console.py)."""

    __slots__ = ("drone", "stream", "tag", "text")
    text: str
    drone: str
    stream: str
    tag: str

    def __new__(cls, text: str, drone: str, stream: str, tag: str = "") -> Line:
        line = super().__new__(cls, f"[{drone}] {text}")
        line.text, line.drone, line.stream, line.tag = text, drone, stream, tag
        return line


class Stream:
    """The reading end of one of a drone's output pipes; gives whole lines."""

    def __init__(self, fd: int, drone: str, name: str) -> None:
        os.set_blocking(fd, False)
        self._file = lifeline.own(FileIO(fd, "r"))
        self._drone = drone
        self._name = name
        self._rest: list[bytes] = []  # read, and not yet a whole line
        self._size = 0
        self._sorter = Sorter()
        self._tag = self._rests_tag = ""
        self.open = True

    def fileno(self) -> int:
        return self._file.fileno()

    def lines(self) -> list[Line]:
        """What has come since the last call. `open` turns False at end-of-file."""
        first = self._file.read(_CHUNK)
        if first is None:  # nothing, as nearly always when it is asked before a result
            return []
        pieces = [first]
        while pieces[-1] and len(pieces) < _READS:
            piece = self._file.read(_CHUNK)
            if piece is None:
                break
            pieces.append(piece)
        self.open = bool(pieces[-1])
        new = b"".join(pieces)
        heard: list[Line] = []
        if MARK in new or self._sorter.held or not self.open:
            for each in self._sorter.sort(new, last=not self.open):
                if isinstance(each, bytes):
                    self._split(each, heard)
                elif each[0] == TAG:
                    if each[1] != self._tag:
                        self._split(b"", heard, last=True)  # nobody ends another's line
                    self._tag = each[1]
            if not self.open:
                self._split(b"", heard, last=True)
        else:
            self._split(new, heard)
        return heard

    def _split(self, new: bytes, heard: list[Line], last: bool = False) -> None:
        if not self._size:
            self._rests_tag = self._tag
        self._rest.append(new)
        self._size += len(new)
        if not last and b"\n" not in new and self._size <= _LONGEST:
            return
        *whole, rest = b"".join(self._rest).split(b"\n")
        if rest and (last or len(rest) > _LONGEST):  # a line without an end is told in pieces
            whole.append(rest)
            rest = b""
        for each in whole:
            heard.append(Line(each.decode("utf-8", "replace"), self._drone, self._name, self._rests_tag))
            self._rests_tag = self._tag
        self._rest, self._size = [rest], len(rest)

    def close(self) -> None:
        self.open = False
        lifeline.close(self._file)


Output = Callable[[Line], object]


def print_all(output: Output | None, lines: list[Line], audiences: dict[str, Output]) -> None:
    """Each to who is there for its tag, or else to `output`, if there is one."""
    for line in lines:
        listener = audiences.get(line.tag, output) if audiences else output
        if listener is not None:
            listener(line)


def forward(line: Line) -> None:
    """Writes a drone's line to the controller's own stream of that name."""
    stream = sys.stdout if line.stream == "stdout" else sys.stderr
    if stream is not None:
        with suppress(ValueError, OSError):  # closed, or its reader has gone
            stream.write(line + "\n")
            stream.flush()
