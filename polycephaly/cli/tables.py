"""Tables for people: `rich` on a terminal, aligned text elsewhere. Programs request JSON.

Text from a pool is untrusted: none is treated as markup, and control characters are replaced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from .reach import one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {
    "busy": "green",
    "idle": "dim",
    "starting": "yellow",
    "retiring": "yellow",
    "unresponsive": "bold red",
}

COLUMN_GAP = 3  # characters between two columns
MIN_CUT_WIDTH = 10  # of a column that is cut


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


@one_line_errors()  # the disk may be full
def as_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


@one_line_errors()
def show(columns: Sequence[Column], rows: Sequence[Sequence[object]]) -> None:
    if is_terminal(sys.stdout):
        from rich.console import Console

        console = Console()
        console.print(grid(columns, rows, console.width))
        return
    cells = [
        [column.title for column in columns],
        *([printable(cell) for cell in row] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        click.echo("  ".join(padded).rstrip())


def grid(columns: Sequence[Column], rows: Sequence[Sequence[object]], width: int) -> Table:
    """Return a table for a terminal of that width; columns marked `cut` lose excess text."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[printable(cell) for cell in row] for row in rows]
    widest = [
        max(map(len, (column.title, *texts)))
        for column, *texts in zip(columns, *cells, strict=True)
    ]
    fixed_width = sum(size for size, column in zip(widest, columns, strict=True) if not column.cut)
    remaining = max(MIN_CUT_WIDTH, width - fixed_width - COLUMN_GAP * (len(columns) - 1))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            max_width=remaining if column.cut else None,
        )
    for row in cells:
        table.add_row(*(Text(word, _COLOURS.get(word.partition(":")[0], "")) for word in row))
    return table


def printable(cell: object) -> str:
    """Return the text of `cell` with control characters replaced."""
    return "".join(
        each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(cell)
    )
