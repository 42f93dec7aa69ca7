r"""Chunks: small records embedded in a drone's output pipes, in order with the printed text.

    printed bytes ... \x1epoly:T;job-7\x1e ... printed bytes    a whole chunk: kind T, body "job-7"
    \x1epoly:L2f.1+{"msg": "aa\x1e ... \x1epoly:L2f.1;aa"}\x1e  one in two parts, from sender 2f.1

Each chunk is written by one `write` of at most `PIPE_BUF` bytes, which the kernel does not mix with
the writes of other processes into the same pipe. A body is printable ASCII. A longer body is split
into parts, each but the last marked with `+`; the sender's name keeps the parts of two writers
apart. The parser takes chunks out and joins the text around them again.

Anything that is not a chunk is text, because users may print `\x1e` too. The parser holds text back
only while the text may still become a chunk.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from select import PIPE_BUF

TAG = "T"
"""The text that follows was printed on behalf of the body, a short name. An empty body ends it."""
LOG = "L"
"""In stderr's pipe: a log record. Body: its number, a space, the record (see log_records.py)."""
ORDER = "O"
"""In stdout's pipe: the text that follows was printed after the log record of that number."""
END = "E"
"""The line that was begun ends here, with its task."""
DEBUG = "D"
"""In stderr's pipe: the drone has stopped at a `breakpoint()`. Body: see debugging.py."""
MARK = b"\x1e"
MAX_BODY_BYTES = 1 << 20  # of one body, all parts together

_OPENING = MARK + b"poly:"
_CHUNK = re.compile(rb"\x1epoly:([A-Z])([0-9a-f.]*)([+;])([ -~]*)\x1e")
_NOT_PRINTABLE = re.compile(rb"[^ -~]")
_MAX_PART_BYTES = PIPE_BUF - 64  # of the part of a body that one write carries
# Kept in memory, all senders together.
_MAX_UNFINISHED_PARTS = 16 * (MAX_BODY_BYTES // _MAX_PART_BYTES)

_numbers = itertools.count()

Chunk = tuple[str, str]
"""Kind (a letter) and body."""


def chunk(kind: str, body: str) -> list[bytes]:
    """Return the byte strings of a chunk, each to be written by one call.

    Raises `ValueError` if the body is too long or not printable ASCII.
    """
    text = body.encode("ascii")
    if len(text) > MAX_BODY_BYTES or _NOT_PRINTABLE.search(text):
        raise ValueError(
            f"the body of a chunk is printable ASCII, at most {MAX_BODY_BYTES} bytes, "
            f"not {body[:80]!r}"
        )
    head = _OPENING + kind.encode()
    if len(text) <= _MAX_PART_BYTES:
        return [b"%b;%b\x1e" % (head, text)]
    sender = b"%x.%x" % (os.getpid(), next(_numbers))
    size = _MAX_PART_BYTES
    return [
        b"%b%b%b%b\x1e"
        % (head, sender, b"+" if at + size < len(text) else b";", text[at : at + size])
        for at in range(0, len(text), size)
    ]


class ChunkParser:
    """Separate chunks from text in the bytes read from one pipe."""

    def __init__(self) -> None:
        self.unparsed = b""
        """The unparsed end of the input, if it may be the beginning of a chunk."""
        self._parts: dict[bytes, list[bytes]] = {}
        self._part_count = 0  # parts in `_parts`, all senders together

    def parse(self, new: bytes, last: bool) -> Iterator[bytes | Chunk]:
        """Yield text and chunks in their order. If `last`, hold nothing back."""
        text, self.unparsed = self.unparsed + new, b""
        done = at = 0  # yielded up to `done`, examined up to `at`
        while (at := text.find(MARK, at)) >= 0:
            found = _CHUNK.match(text, at, at + PIPE_BUF)
            if found is None:
                if not last and _may_become_chunk(text, at):
                    self.unparsed = text[at:]
                    break
                at += 1
                continue
            if at > done:
                yield text[done:at]
            whole = self._join_parts(*found.groups())
            if whole is not None:
                yield whole
            done = at = found.end()
        rest = text[done : at if at >= 0 else len(text)]
        if rest:
            yield rest

    def _join_parts(self, kind: bytes, sender: bytes, more: bytes, body: bytes) -> Chunk | None:
        if sender:
            parts = self._parts.setdefault(sender, [])
            parts.append(body)
            self._part_count += 1
            # Longer than `chunk` allows: a process printed text that looks like our parts.
            if len(parts) > MAX_BODY_BYTES // _MAX_PART_BYTES + 1:
                self._drop_parts(sender)
            elif self._part_count > _MAX_UNFINISHED_PARTS:
                # A sender died between two parts: drop the oldest parts.
                self._drop_parts(next(iter(self._parts)))
            if more == b"+":
                return None
            body = b"".join(self._drop_parts(sender))
        return kind.decode(), body.decode()

    def _drop_parts(self, sender: bytes) -> list[bytes]:
        parts = self._parts.pop(sender, [])
        self._part_count -= len(parts)
        return parts


def _may_become_chunk(text: bytes, at: int) -> bool:
    rest = text[at : at + PIPE_BUF]
    if len(rest) < len(_OPENING):
        return _OPENING.startswith(rest)
    return rest.startswith(_OPENING) and len(rest) < PIPE_BUF and not _NOT_PRINTABLE.search(rest, 1)
