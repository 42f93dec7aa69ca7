"""The source lines of code that is in no file: code strings, and functions of a notebook's cells.

`linecache` has them, and so tracebacks, stacks and debuggers show them.
"""

from __future__ import annotations

import linecache
from itertools import zip_longest
from types import CodeType
from typing import Any

MAX_KEPT_SOURCES = 1000
"""Number of sources that are kept."""
MAX_CARRIED_CHARS = 16 * 1024
"""Maximum length of the lines that a function carries."""

_kept_sources: dict[str, None] = {}  # the names, in order


def set_source(name: str, lines: list[str]) -> None:
    """Keep the lines of the code called `name`, and forget the oldest of many."""
    if name not in linecache.cache:
        _kept_sources[name] = None
        if len(_kept_sources) > MAX_KEPT_SOURCES:
            oldest = next(iter(_kept_sources))
            del _kept_sources[oldest]
            linecache.cache.pop(oldest, None)
    linecache.cache[name] = sum(map(len, lines)), None, lines, name


def lines_of(code: CodeType) -> str:
    """Return the lines of `code`, for `add_lines`; "" if they are in a file, or too long to carry.

    Also "" if another process may use the same name for other code: the names of code strings and
    of inputs at a prompt are numbers.
    """
    name = code.co_filename
    is_unique = name not in _kept_sources and not name.startswith("<python-")
    match linecache.cache.get(name):
        case (_, None, list(lines), _) if is_unique:
            last = max((line for *_, line in code.co_lines() if line), default=0)
            text = "".join(lines[code.co_firstlineno - 1 : last])
            return text if len(text) <= MAX_CARRIED_CHARS else ""
    return ""


def add_lines(name: str, first: int, text: str) -> None:
    """Add lines of the code called `name`, from number `first` on, where none are known yet."""
    new = ["\n"] * (first - 1) + text.splitlines(keepends=True)
    entry: Any = linecache.cache.get(name, (0, None, [], name))
    if len(entry) == 4:
        pairs = zip_longest(entry[2], new, fillvalue="\n")
        set_source(name, [old if old.strip() else line for old, line in pairs])
