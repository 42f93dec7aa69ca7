r"""Chunks: small records that travel in a drone's output pipes, in order with what is printed
there.

    printed bytes ... \x1epoly:T;job-7\x1e ... printed bytes        a whole one: kind T, body "job-7"
    \x1epoly:L2f.1+{"msg": "aa\x1e ... \x1epoly:L2f.1;aa"}\x1e      one in parts, of the sender 2f.1

Each is written by one `write` of at most `PIPE_BUF` bytes, which the kernel does not mix with what
other processes write into the same pipe. A body is printable ASCII. What is longer goes in parts,
each but the last with a `+`; the sender's name keeps the parts of two writers apart. The reader
takes chunks out: what was around them joins again.

Whatever is no chunk is text: users may print `\x1e` too. It is held back only while it may become
one."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from select import PIPE_BUF

__all__ = ["LOG", "LONGEST", "MARK", "ORDER", "TAG", "Chunk", "ChunkParser", "chunk"]

TAG = "T"
"""What follows in this pipe is on behalf of the body, a short name; none: of nobody."""
LOG = "L"
"""In stderr's pipe. What was logged: its number, a space, the record (log_records.py)."""
ORDER = "O"
"""In stdout's pipe: what follows was printed after the log record of that number."""
MARK = b"\x1e"
LONGEST = 1 << 20  # bytes of a body, all parts together

_OPENING = MARK + b"poly:"
_CHUNK = re.compile(rb"\x1epoly:([A-Z])([0-9a-f.]*)([+;])([ -~]*)\x1e")
_NOT_IN_ONE = re.compile(rb"[^ -~]")
_PART = PIPE_BUF - 64  # bytes of a body that go into one write
_PARTS = 16 * (LONGEST // _PART)  # of unfinished chunks that are kept, of all senders

_numbers = itertools.count()

Chunk = tuple[str, str]
"""Kind (a letter) and body."""


def chunk(kind: str, body: str) -> list[bytes]:
    """What to write for it, each by one call. Raises `ValueError` for a body that is too long or no
    printable ASCII."""
    text = body.encode("ascii")
    if len(text) > LONGEST or _NOT_IN_ONE.search(text):
        raise ValueError(
            f"the body of a chunk is printable ASCII, at most {LONGEST} bytes, not {body[:80]!r}"
        )
    head = _OPENING + kind.encode()
    if len(text) <= _PART:
        return [b"%b;%b\x1e" % (head, text)]
    sender = b"%x.%x" % (os.getpid(), next(_numbers))
    starts = range(0, len(text), _PART)
    return [
        b"%b%b%b%b\x1e"
        % (head, sender, b"+" if at + _PART < len(text) else b";", text[at : at + _PART])
        for at in starts
    ]


class ChunkParser:
    """Tells chunks from text in what comes through one pipe."""

    def __init__(self) -> None:
        self.held = b""
        """The end of what has come, if it may be the beginning of a chunk."""
        self._parts: dict[bytes, list[bytes]] = {}
        self._kept = 0  # of these, all together

    def sort(self, new: bytes, last: bool) -> Iterator[bytes | Chunk]:
        """Text and chunks, in their order. With `last`, nothing is held back."""
        text, self.held = self.held + new, b""
        done = at = 0  # given away up to `done`; looked at up to `at`
        while (at := text.find(MARK, at)) >= 0:
            found = _CHUNK.match(text, at, at + PIPE_BUF)
            if found is None:
                if not last and _may_become_one(text, at):
                    self.held = text[at:]
                    break
                at += 1
                continue
            if at > done:
                yield text[done:at]
            whole = self._put_together(*found.groups())
            if whole is not None:
                yield whole
            done = at = found.end()
        rest = text[done : at if at >= 0 else len(text)]
        if rest:
            yield rest

    def _put_together(self, kind: bytes, sender: bytes, more: bytes, body: bytes) -> Chunk | None:
        if sender:
            parts = self._parts.setdefault(sender, [])
            parts.append(body)
            self._kept += 1
            if len(parts) > LONGEST // _PART + 1:  # it is none of us
                self._drop(sender)
            elif self._kept > _PARTS:  # somebody died in the middle of his
                self._drop(next(iter(self._parts)))
            if more == b"+":
                return None
            body = b"".join(self._drop(sender))
        return kind.decode(), body.decode()

    def _drop(self, sender: bytes) -> list[bytes]:
        parts = self._parts.pop(sender, [])
        self._kept -= len(parts)
        return parts


def _may_become_one(text: bytes, at: int) -> bool:
    rest = text[at : at + PIPE_BUF]
    if len(rest) < len(_OPENING):
        return _OPENING.startswith(rest)
    return rest.startswith(_OPENING) and len(rest) < PIPE_BUF and not _NOT_IN_ONE.search(rest, 1)
