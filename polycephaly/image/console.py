"""A drone's standard streams: pipes to the controller, with a tail kept for the promise.

    print ──> Console ──line by line──> pipe on descriptor 1 or 2 ──> hub ──> controller's own streams
                 └── tail (4 KiB) ──> goes home with the result

What C code and child processes write goes through the same pipes, though not into the tail.
"""

from __future__ import annotations

import io
import sys

__all__ = ["Tail", "open_console"]

TAIL = 4096  # characters


class Tail:
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
        """What was added since the last call; the streams are flushed, so that it is out before the result."""
        if not self.pieces:
            return b""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # the work closed it, or put something else there
                pass
        text = "".join(self.pieces)[-TAIL:]
        self.pieces.clear()
        self._size = 0
        return text.encode("utf-8", "replace")


class Console(io.TextIOWrapper):
    def __init__(self, fd: int, tail: Tail) -> None:
        raw = io.FileIO(fd, "w", closefd=False)
        super().__init__(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._tail = tail

    def write(self, text: str, /) -> int:
        self._tail.add(text)
        return super().write(text)


def open_console() -> Tail:
    """Puts new streams on descriptors 1 and 2. The old ones are kept: closing them would write what they hold."""
    tail = Tail()
    _inherited.extend((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    sys.stdout = sys.__stdout__ = Console(1, tail)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = Console(2, tail)  # type: ignore[misc]
    return tail


_inherited: list[object] = []
