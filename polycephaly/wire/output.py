"""Output of drones on its way to the controller: whole lines and log records, each with its drone.

    drone's descriptor 1 or 2 ── pipe ──> OutputSource ──> OutputMerger
                       chunks (chunks.py) taken out         ├─> Line ──> forward, or `output`
                                                            └─> OutputRecord ──> logger of its name

Records travel in stderr's pipe. Marks in stdout's pipe name the records that were logged before the
text that follows, so that records keep their order with text printed on either stream. A record is
written to its pipe before the mark that names it.
"""

from __future__ import annotations

import codecs
import contextvars
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from typing import Any

from ..promises.promise import callbacks
from ..runtime import forked, parent_death
from ..runtime.clock import monotonic
from ..runtime.prompt import running_shell
from .chunks import DEBUG, END, LOG, MARK, ORDER, TAG, ChunkParser
from .debugging import DebugRequest
from .log_records import unpack_record

delivery_context: contextvars.Context | None = None
"""If set, lines and records are delivered in a copy of this context: in a notebook, the context of
the cell that the output appears under.
"""

_STATE_SECONDS = 0.25  # between two states of a line that rewrites itself
_ERASE = "\r\x1b[K"  # of a terminal's row
_MAX_LINE_BYTES = 4 << 20
_READ_BYTES = 64 * 1024
# Reads of one pipe at a time: a drone that writes without end must not occupy the reactor.
_MAX_READS = 16


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


class LineState:
    """What a line that rewrites itself, as a progress bar does, shows at the moment."""

    __slots__ = ("drone", "line", "tag")

    def __init__(self, line: Line) -> None:
        self.line, self.drone, self.tag = line, line.drone, line.tag


class OutputRecord:
    """A record that a drone logged. `text` is its form if logging is not configured."""

    __slots__ = ("drone", "number", "record")

    def __init__(self, number: int, record: logging.LogRecord, drone: str) -> None:
        self.number, self.record, self.drone = number, record, drone

    @property
    def text(self) -> str:
        record = self.record
        first = f"{record.levelname}:{record.name}:{record.msg}"
        return "\n".join(str(each) for each in (first, record.exc_text, record.stack_info) if each)

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


OutputItems = list[Line | LineState | OutputRecord | DebugRequest]
OrderedItems = list[Line | LineState | OutputRecord | DebugRequest | int]
"""As `OutputItems`. A number N means: the following items were printed after record N."""
Listener = Callable[[Line], object]


class LineSplitter:
    """Split a drone's output into whole lines and the log records between them."""

    def __init__(self, drone: str, name: str) -> None:
        self._drone = drone
        self._name = name
        self._rest: list[bytes] = []  # bytes read that do not end a line yet
        self._size = 0
        self._parser = ChunkParser()
        self._tag = self._rest_tag = ""
        self.open = True

    def read(self) -> OrderedItems:
        """Return the output since the last call; set `open` to False at the end."""
        raise NotImplementedError

    def _parse(self, new: bytes) -> OrderedItems:
        """Return the items in `new`, which is the end of the output if `open` is False."""
        items: OrderedItems = []
        if MARK in new or self._parser.unparsed or not self.open:
            for each in self._parser.parse(new, last=not self.open):
                if isinstance(each, bytes):
                    self._split(each, items)
                else:
                    self._handle_chunk(*each, items)
            if not self.open:
                self._split(b"", items, last=True)
        else:
            self._split(new, items)
        return items

    def _handle_chunk(self, kind: str, body: str, items: OrderedItems) -> None:
        if kind == TAG:
            if body != self._tag:
                self._split(b"", items, last=True)  # one task must not complete another task's line
            self._tag = body
            return
        if kind == END:
            self._split(b"", items, last=True)
            return
        try:
            if kind == LOG:
                number, _, record = body.partition(" ")
                items.append(
                    OutputRecord(int(number), unpack_record(record, self._drone), self._drone)
                )
            elif kind == DEBUG:
                items.append(DebugRequest(body, self._drone))
            elif kind == ORDER:
                items.append(int(body))
            else:
                raise ValueError("no such kind")
        except (ValueError, TypeError, RecursionError):
            # The output contains text that looks like one of our chunks.
            self._split(f"\x1epoly:{kind};{body}\x1e".encode(), items)

    def _split(self, new: bytes, items: OrderedItems, last: bool = False) -> None:
        if not self._size:
            self._rest_tag = self._tag
        self._rest.append(new)
        self._size += len(new)
        if not last and b"\n" not in new and self._size <= _MAX_LINE_BYTES:
            return
        *whole, rest = b"".join(self._rest).split(b"\n")
        # A line that is too long is delivered in parts, each of whole characters.
        if rest and (last or len(rest) > _MAX_LINE_BYTES):
            end = len(rest) if last else codecs.utf_8_decode(rest, "replace", False)[1]
            whole.append(rest[:end])
            rest = rest[end:]
        for each in whole:
            items.append(self._line(each))
            self._rest_tag = self._tag
        self._rest, self._size = [rest], len(rest)

    def _line(self, content: bytes) -> Line:
        text = _last_state(content).decode("utf-8", "replace")
        return Line(text, self._drone, self._name, self._rest_tag)

    def state(self) -> LineState | None:
        """Return what the line that has not ended shows now, if it rewrites itself."""
        rest = b"".join(self._rest)
        return LineState(self._line(rest)) if b"\r" in rest and _last_state(rest) else None


def _last_state(content: bytes) -> bytes:
    """Return what a terminal would show of a line in the end: what follows the last carriage
    return, but for those at its end.
    """
    return content.rstrip(b"\r").rpartition(b"\r")[2]


class OutputSource(LineSplitter):
    """The reading end of one output pipe of a drone."""

    def __init__(self, fd: int, drone: str, name: str) -> None:
        super().__init__(drone, name)
        self._state_at = 0.0
        os.set_blocking(fd, False)
        self._file = parent_death.close_in_child(FileIO(fd, "r"))

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self) -> OrderedItems:
        chunks: list[bytes] = []
        while self.open and len(chunks) < _MAX_READS:
            try:
                data = self._file.read(_READ_BYTES)
            except OSError:  # other code has closed the descriptor
                data = b""
            if data is None:  # at once, nearly always, if read before a result is handled
                break
            chunks.append(data)
            self.open = bool(data)
        if not chunks:
            return []
        items = self._parse(b"".join(chunks))
        if b"\r" in chunks[-1] and monotonic() - self._state_at >= _STATE_SECONDS:
            state = self.state()
            if state is not None:
                self._state_at = monotonic()
                items.append(state)
        return items

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
        self._last_record = 0  # its number
        self.postponed: OrderedItems = []  # text that is kept until the next call

    def read(self, streams: Sequence[LineSplitter]) -> OutputItems:
        """Read the given streams: stdout's and stderr's, as far as they are open."""
        from_stderr = streams[-1].read() if streams else []
        printed, postponed = self.postponed, len(self.postponed)
        for stream in streams[:-1]:
            printed += stream.read()
        if not from_stderr and not printed:  # nearly always
            return []
        errors = [each for each in from_stderr if not isinstance(each, int)]
        self._last_record = max(
            [self._last_record, *(each.number for each in errors if isinstance(each, OutputRecord))]
        )
        self.postponed = []
        items: OutputItems = []
        rest = deque(errors)
        for at, each in enumerate(printed):
            if not isinstance(each, int):
                items.append(each)
            elif (
                each > self._last_record
                and at >= postponed
                and sum(stream.open for stream in streams) == 2
            ):
                self.postponed = printed[at:]
                break
            else:
                while rest and not (isinstance(rest[0], OutputRecord) and rest[0].number > each):
                    items.append(rest.popleft())
        items += rest
        return items


def deliver_tagged(lines: Sequence[Line], listeners: dict[str, Listener]) -> None:
    """Pass lines to the listeners of their tags, which are of this package and do not wait."""
    for each in lines:
        listener = listeners.get(each.tag)
        if listener is not None:  # else the client has gone
            listener(each)


def deliver(output: Listener | None, items: OutputItems) -> None:
    """Pass lines to `output`, if set, and records to their loggers. Errors of these are logged."""
    if delivery_context is not None:
        delivery_context.copy().run(_deliver_items, output, items)
    else:
        _deliver_items(output, items)


def _deliver_items(output: Listener | None, items: OutputItems) -> None:
    generation = forked.generation
    for each in items:
        try:
            if isinstance(each, LineState):
                if output is forward:
                    _show(each.line)
            elif not isinstance(each, Line):
                each.handle()
            elif output is not None:
                output(each)
        except BaseException:  # SystemExit too: the items that follow must still be delivered
            callbacks.exception("output of drone %s could not be delivered", each.drone)
        forked.exit_if_forked(generation)


def forward(line: Line) -> None:
    """Write a drone's line to the controller's own stream of the same name."""
    while _shown:  # on either stream: both may be one terminal
        _write(*_shown.popitem())
    _write(line.stream, line + "\n")


_shown: dict[str, str] = {}
"""The streams whose last row shows the state of a line, and what takes that away."""


def _show(line: Line) -> None:
    """Draw the state of a line, where it can be drawn anew: in a terminal or a notebook."""
    stream = _stream(line.stream)
    with suppress(ValueError):  # it is closed
        if hasattr(stream, "isatty") and stream.isatty():
            _write(line.stream, f"{_ERASE}{line}\r")
            _shown[line.stream] = _ERASE
        elif running_shell() is not None:
            _write(line.stream, f"\r{line}")
            _shown[line.stream] = "\r"


def _stream(name: str) -> Any:
    return sys.stdout if name == "stdout" else sys.stderr


def _write(name: str, text: str) -> None:
    stream = _stream(name)
    if stream is not None:
        with suppress(ValueError, OSError):  # the stream is closed, or its reader is gone
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = getattr(stream, "encoding", None) or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
