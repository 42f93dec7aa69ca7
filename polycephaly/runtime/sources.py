"""The source lines of code that is in no file: code strings, and functions of a notebook's cells.

`linecache` has them, and so tracebacks, stacks and debuggers show them.
"""

from __future__ import annotations

import linecache

__all__ = ["find_source", "keep_source"]

MAX_KEPT_SOURCES = 1000
MAX_SOURCE_LENGTH = 64 * 1024  # of a cell that a function carries

_kept_sources: list[str] = []


def keep_source(name: str, lines: list[str]) -> None:
    """Keep the lines of the code called `name`, and forget the oldest of many."""
    if name not in linecache.cache:
        _kept_sources.append(name)
        if len(_kept_sources) > MAX_KEPT_SOURCES:
            linecache.cache.pop(_kept_sources.pop(0), None)
    linecache.cache[name] = sum(map(len, lines)), None, lines, name


def find_source(name: str) -> list[str] | None:
    """Return the lines of the code called `name` if it is in no file, and not too long to send."""
    match linecache.cache.get(name):
        case (int(length), None, list(lines), _) if length <= MAX_SOURCE_LENGTH:
            return lines
    return None
