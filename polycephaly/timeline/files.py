"""Write timelines to files. The suffix of the file's name selects the format."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .page import page_of
from .picture import Bar
from .svg import svg_of
from .trace import json_of

if TYPE_CHECKING:
    from .contents import Contents


def check(path: str | os.PathLike[str]) -> Path:
    """Return `path` as a Path, if its suffix is a known format; else raise `ValueError`."""
    path = Path(path)
    if path.suffix.lower() not in _WRITERS:
        raise ValueError(f"a timeline is saved as .html, .svg or .json, not as {path.name!r}")
    return path


def write(
    timeline: Contents, path: str | os.PathLike[str], title: str, bars: Sequence[Bar] = ()
) -> None:
    """Write a timeline, with a bar chart above if there are `bars`. See `Timeline.save`."""
    path = check(path)
    path.write_bytes(_WRITERS[path.suffix.lower()](timeline, title, bars))


_WRITERS: dict[str, Callable[[Contents, str, Sequence[Bar]], bytes]] = {
    ".html": page_of,
    ".svg": svg_of,
    ".json": json_of,
}
