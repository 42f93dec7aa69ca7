"""What drones print and log, on its way home: whole lines and log records, each knowing whose it
is.

drone's descriptor 1 or 2 ── pipe ──> Stream ──┬─> Merge ──> Line ──> forward (or the pool's `output`)
                                               │         └──> Record ──> the logger of that name
                                               └── chunks (chunks.py) are taken out: tags, records, their order

Records come by stderr's pipe; marks in stdout's tell which of them were before what follows, so
that records keep their order with what is printed on either. A record is in its pipe before the
mark that names it."""

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
"""Where it is set, lines and records are told in a copy of it: in a notebook that is the cell they
appear under."""

_LONGEST = 4 << 20  # bytes of a line
_CHUNK = 64 * 1024
_READS = 16  # of one pipe at a time: a drone that never stops writing must not keep the hub


class Line(str):
    """One line of a drone's output, with its prefix. ``text`` is without; ``drone`` and ``stream``
    say whose; ``tag`` on whose behalf it was printed, if somebody said so (see
    drone/console.py)."""

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
    """What a drone logged. `text` is what a log record looks like where nothing is configured."""

    __slots__ = ("drone", "number", "record")

    def __init__(self, number: int, record: logging.LogRecord, drone: str) -> None:
        self.number, self.record, self.drone = number, record, drone

    @property
    def text(self) -> str:
        record = self.record
        first = f"{record.levelname}:{record.name}:{record.msg}"
        return "\n".join(filter(None, (first, record.exc_text, record.stack_info)))

    def handle(self) -> None:
        """Gives it to the logger of its name, if that wants it. Where no handler is, it is printed
        like a line of the drone's, as the standard library prints it: from the level WARNING on."""
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
    """Makes of a drone's output whole lines, and what came between them."""

    def __init__(self, drone: str, name: str) -> None:
        self._drone = drone
        self._name = name
        self._rest: list[bytes] = []  # read, and not yet a whole line
        self._size = 0
        self._sorter = ChunkParser()
        self._tag = self._rests_tag = ""
        self.open = True

    def read(self) -> list[Line | OutputRecord | int]:
        """What has come since the last call; a number: what follows was printed after the record of
        that number. `open` turns False at the end."""
        raise NotImplementedError

    def _sort(self, new: bytes) -> list[Line | OutputRecord | int]:
        """What is `new`; the last of it, if `open` is False."""
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
                self._split(b"", heard, last=True)  # nobody ends another's line
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
        except (
            ValueError,
            TypeError,
            RecursionError,
        ):  # somebody has printed what looks like one of ours
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
        if rest and (last or len(rest) > _LONGEST):  # a line without an end is told in pieces
            whole.append(rest)
            rest = b""
        for each in whole:
            heard.append(
                Line(each.decode("utf-8", "replace"), self._drone, self._name, self._rests_tag)
            )
            self._rests_tag = self._tag
        self._rest, self._size = [rest], len(rest)


class OutputSource(LineSplitter):
    """The reading end of one of a drone's output pipes."""

    def __init__(self, fd: int, drone: str, name: str) -> None:
        super().__init__(drone, name)
        os.set_blocking(fd, False)
        self._file = parent_death.own(FileIO(fd, "r"))

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self) -> list[Line | OutputRecord | int]:
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
        return self._sort(b"".join(pieces))

    def close(self) -> None:
        self.open = False
        parent_death.close(self._file)


class OutputMerger:
    """Puts what comes through stdout's and stderr's pipes in order, as far as log records are
    concerned.

    stderr is read first. So what was printed before a record is there when the record is, and is
    told before it; and what comes after a mark whose record is not there was printed since: it is
    kept back until the next call, which the record in stderr's pipe makes sure of. What a piece of
    work printed before its result was sent never is."""

    def __init__(self) -> None:
        self._seen = 0  # the last record's number
        self._kept: list[Line | OutputRecord | int] = []

    def read(self, streams: Sequence[LineSplitter]) -> Heard:
        """Of stdout's and stderr's, those that are open."""
        came = streams[-1].read() if streams else []
        printed, kept = self._kept, len(self._kept)
        for stream in streams[:-1]:
            printed += stream.read()
        if not came and not printed:  # as nearly always
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
    """Gives lines to who is there for their tag, or else to `output`, if there is one, and records
    to their loggers. What one of these raises is logged."""
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
        except BaseException:  # SystemExit too: others wait for what comes after
            callbacks.exception("what %s printed or logged could not be told", each.drone)


def forward(line: Line) -> None:
    """Writes a drone's line to the controller's own stream of that name."""
    stream = sys.stdout if line.stream == "stdout" else sys.stderr
    if stream is not None:
        with suppress(ValueError, OSError):  # closed, or its reader has gone
            stream.write(line + "\n")
            stream.flush()
