"""Output of drones on its way to the controller: whole lines and log records, each with its drone.

    drone's descriptor 1 or 2 ── pipe ──> OutputSource ──> OutputMerger
                       chunks (chunks.py) taken out         ├─> Line ──> forward, or `output`
                                                            └─> OutputRecord ──> logger of its name

Records travel in stderr's pipe. Marks in stdout's pipe name the records that were logged before the
text that follows, so that records keep their order with text printed on either stream. A record is
written to its pipe before the mark that names it.
"""

from __future__ import annotations

import contextvars
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO

from ..promises.promise import callbacks
from ..runtime import parent_death
from .chunks import LOG, MARK, ORDER, TAG, ChunkParser
from .log_records import unpack_record

__all__ = [
    "Heard",
    "Line",
    "LineSplitter",
    "Listener",
    "OutputMerger",
    "OutputRecord",
    "OutputSource",
    "deliver",
    "forward",
]

told_in: contextvars.Context | None = None
"""If set, lines and records are delivered in a copy of this context: in a notebook, the context of
the cell that the output appears under.
"""

_LONGEST = 4 << 20  # limit in bytes of a line
_CHUNK = 64 * 1024
# Reads of one pipe at a time: a drone that writes without end must not occupy the reactor.
_READS = 16


class Line(str):
    """One line of a drone's output, with its prefix.

    `text` is the line without the prefix; `drone` and `stream` name its origin. `tag` names the
    party that the line was printed for, if one was set (see drone/console.py).
    """

    __slots__ = ("drone", "stream", "tag", "text")
    text: str
    drone: str
    stream: str
    tag: str

    def __new__(cls, text: str, drone: str, stream: str, tag: str = "") -> Line:
        line = super().__new__(cls, f"[{drone}] {text}")
        line.text, line.drone, line.stream, line.tag = text, drone, stream, tag
        return line


class OutputRecord:
    """A record that a drone logged. `text` is its form if logging is not configured."""

    __slots__ = ("drone", "number", "record")

    def __init__(self, number: int, record: logging.LogRecord, drone: str) -> None:
        self.number, self.record, self.drone = number, record, drone

    @property
    def text(self) -> str:
        record = self.record
        first = f"{record.levelname}:{record.name}:{record.msg}"
        return "\n".join(filter(None, (first, record.exc_text, record.stack_info)))

    def handle(self) -> None:
        """Pass the record to the logger of its name, if that logger is enabled for its level.

        If there is no handler, the record is printed like a line of the drone, from the level
        WARNING on: the standard library does the same.
        """
        record = self.record
        logger = logging.getLogger(record.name)
        if not logger.isEnabledFor(record.levelno):
            return
        if logger.hasHandlers():
            logger.handle(record)
        elif logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            for each in self.text.split("\n"):
                forward(Line(each, self.drone, "stderr"))


Heard = list[Line | OutputRecord]
Listener = Callable[[Line], object]


class LineSplitter:
    """Split a drone's output into whole lines and the log records between them."""

    def __init__(self, drone: str, name: str) -> None:
        self._drone = drone
        self._name = name
        self._rest: list[bytes] = []  # bytes read that do not end a line yet
        self._size = 0
        self._sorter = ChunkParser()
        self._tag = self._rests_tag = ""
        self.open = True

    def read(self) -> list[Line | OutputRecord | int]:
        """Return the output since the last call; set `open` to False at the end.

        A number N in the list means: the following items were printed after record N.
        """
        raise NotImplementedError

    def _sort(self, new: bytes) -> list[Line | OutputRecord | int]:
        """Return the items in `new`, which is the end of the output if `open` is False."""
        heard: list[Line | OutputRecord | int] = []
        if MARK in new or self._sorter.held or not self.open:
            for each in self._sorter.sort(new, last=not self.open):
                if isinstance(each, bytes):
                    self._split(each, heard)
                else:
                    self._take(*each, heard)
            if not self.open:
                self._split(b"", heard, last=True)
        else:
            self._split(new, heard)
        return heard

    def _take(self, kind: str, body: str, heard: list[Line | OutputRecord | int]) -> None:
        if kind == TAG:
            if body != self._tag:
                self._split(b"", heard, last=True)  # one task must not complete another task's line
            self._tag = body
            return
        try:
            if kind == LOG:
                number, _, record = body.partition(" ")
                heard.append(
                    OutputRecord(int(number), unpack_record(record, self._drone), self._drone)
                )
            elif kind == ORDER:
                heard.append(int(body))
            else:
                raise ValueError("no such kind")
        except (ValueError, TypeError, RecursionError):
            # The output contains text that looks like one of our chunks.
            self._split(f"\x1epoly:{kind};{body}\x1e".encode(), heard)

    def _split(
        self, new: bytes, heard: list[Line | OutputRecord | int], last: bool = False
    ) -> None:
        if not self._size:
            self._rests_tag = self._tag
        self._rest.append(new)
        self._size += len(new)
        if not last and b"\n" not in new and self._size <= _LONGEST:
            return
        *whole, rest = b"".join(self._rest).split(b"\n")
        # A line that is too long is delivered in pieces.
        if rest and (last or len(rest) > _LONGEST):
            whole.append(rest)
            rest = b""
        for each in whole:
            heard.append(
                Line(each.decode("utf-8", "replace"), self._drone, self._name, self._rests_tag)
            )
            self._rests_tag = self._tag
        self._rest, self._size = [rest], len(rest)


class OutputSource(LineSplitter):
    """The reading end of one output pipe of a drone."""

    def __init__(self, fd: int, drone: str, name: str) -> None:
        super().__init__(drone, name)
        os.set_blocking(fd, False)
        self._file = parent_death.own(FileIO(fd, "r"))

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self) -> list[Line | OutputRecord | int]:
        first = self._file.read(_CHUNK)
        if first is None:  # no output: nearly always so when read before a result is handled
            return []
        pieces = [first]
        while pieces[-1] and len(pieces) < _READS:
            piece = self._file.read(_CHUNK)
            if piece is None:
                break
            pieces.append(piece)
        self.open = bool(pieces[-1])
        return self._sort(b"".join(pieces))

    def close(self) -> None:
        self.open = False
        parent_death.close(self._file)


class OutputMerger:
    """Put the output of stdout and stderr in order, as far as log records are concerned.

    stderr is read first. So text printed before a record has arrived when the record has, and is
    delivered before it. Text after a mark whose record has not arrived was printed later than that
    read: the text is kept until the next call, which the record in stderr's pipe makes certain.
    Output that a task printed before its result was sent is never kept back.
    """

    def __init__(self) -> None:
        self._seen = 0  # number of the last record
        self._kept: list[Line | OutputRecord | int] = []

    def read(self, streams: Sequence[LineSplitter]) -> Heard:
        """Read the given streams: stdout's and stderr's, as far as they are open."""
        came = streams[-1].read() if streams else []
        printed, kept = self._kept, len(self._kept)
        for stream in streams[:-1]:
            printed += stream.read()
        if not came and not printed:  # nearly always
            return []
        errors = [each for each in came if not isinstance(each, int)]
        self._seen = max(
            [self._seen, *(each.number for each in errors if isinstance(each, OutputRecord))]
        )
        self._kept = []
        heard: Heard = []
        rest = deque(errors)
        for at, each in enumerate(printed):
            if not isinstance(each, int):
                heard.append(each)
            elif each > self._seen and at >= kept and sum(stream.open for stream in streams) == 2:
                self._kept = printed[at:]
                break
            else:
                while rest and not (isinstance(rest[0], OutputRecord) and rest[0].number > each):
                    heard.append(rest.popleft())
        heard += rest
        return heard


def deliver(output: Listener | None, heard: Heard, output_listeners: dict[str, Listener]) -> None:
    """Pass lines to the listener of their tag, else to `output` if set; records to their loggers.

    Errors raised by these are logged.
    """
    if told_in is not None:
        told_in.copy().run(_deliver, output, heard, output_listeners)
    else:
        _deliver(output, heard, output_listeners)


def _deliver(output: Listener | None, heard: Heard, output_listeners: dict[str, Listener]) -> None:
    for each in heard:
        try:
            if isinstance(each, OutputRecord):
                each.handle()
            else:
                listener = output_listeners.get(each.tag, output) if output_listeners else output
                if listener is not None:
                    listener(each)
        except BaseException:  # SystemExit too: the items that follow must still be delivered
            callbacks.exception("what %s printed or logged could not be told", each.drone)


def forward(line: Line) -> None:
    """Write a drone's line to the controller's own stream of the same name."""
    stream = sys.stdout if line.stream == "stdout" else sys.stderr
    if stream is not None:
        with suppress(ValueError, OSError):  # the stream is closed, or its reader is gone
            stream.write(line + "\n")
            stream.flush()
