"""Tables for people, by `rich`; aligned text without colours in a pipe. Programs request JSON.

Text from a pool is untrusted: none is treated as markup, and control characters are replaced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from ..timeline.format import printable

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

_COLOURS = {
    "busy": "green",
    "idle": "dim",
    "starting": "yellow",
    "retiring": "yellow",
    "unresponsive": "bold red",
}

MAX_PIPE_WIDTH = 1_000_000  # characters of a line


class Column(NamedTuple):
    title: str
    right: bool = False
    cut: bool = False  # cut if the terminal is too narrow


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    if hours < 1.5:
        return f"{minutes:.0f} min"
    return f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} d"


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a standard stream is a terminal. It is None if it was closed at the start."""
    return stream is not None and stream.isatty()


def mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / (1 << 20):,.1f} MiB"


def as_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def show(columns: Sequence[Column], rows: Sequence[Sequence[object]]) -> None:
    from rich.console import Console

    # In a pipe no cell is cut.
    console = Console() if is_terminal(sys.stdout) else Console(width=MAX_PIPE_WIDTH)
    with console.capture() as captured:
        console.print(grid(columns, rows, plain=not is_terminal(sys.stdout)))
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def grid(columns: Sequence[Column], rows: Sequence[Sequence[object]], plain: bool = False) -> Table:
    """Return a table; columns marked `cut` lose the text that is too much for the console."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None if plain else box.SIMPLE_HEAD,
        padding=(0, 2, 0, 0) if plain else (0, 1),
        pad_edge=False,
        show_edge=False,
    )
    for column in columns:
        # Only where a column may wrap, it is made narrower; its cells do not wrap, and are cut.
        justify: JustifyMethod = "right" if column.right else "left"
        table.add_column(column.title, justify=justify, no_wrap=not column.cut, overflow="ellipsis")
    for row in rows:
        texts = map(printable, row)
        table.add_row(*(Text(each, _style(each), no_wrap=True) for each in texts))
    return table


def _style(cell: str) -> str:
    return _COLOURS.get(cell.partition(":")[0], "")
