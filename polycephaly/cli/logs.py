"""`polycephaly logs`: the log of a pool, also after the pool has ended."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from .reach import complete_pool, one_line

if TYPE_CHECKING:
    from ..engines.remote.keys import Card

LOOK = 0.2  # seconds between looks for new lines


@click.command(
    epilog="""\b
Examples:
  polycephaly logs lab
  polycephaly logs lab -n 1000 | grep ERROR
  polycephaly logs lab -f           goes on until the pool ends, or Ctrl-C
"""
)
@click.argument("name", shell_complete=complete_pool)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    help="So many of the last ones.",
)
@click.option("-f", "--follow", is_flag=True, help="Then wait for more.")
def logs(name: str, lines: int, follow: bool) -> None:
    """Print the log of pool NAME.

    It is in $XDG_STATE_HOME/polycephaly (by default ~/.local/state/polycephaly), 8 MiB of it and as
    much of an older generation, and is still there when the pool has ended."""
    with one_line():
        from ..engines.remote import pool_registry
        from .journal import older, path_of

        path = path_of(name)
        if not path.exists():
            pool_registry.find(name)  # if no such pool runs, the error lists those that do
            raise click.ClickException(f"{name} has no log: it was not begun by polycephaly start")
        card = next((card for card in pool_registry.running() if card.name == name), None)
        last: deque[str] = deque(maxlen=lines)
        with suppress(FileNotFoundError), _opened(older(path)) as file:
            last.extend(file)
        file = _opened(path)
        last.extend(file)
        for line in last:
            click.echo(line, nl=False)
        if follow and card is not None:
            _follow(file, path, card)


def _follow(file: IO[str], path: Path, card: Card) -> None:
    while True:
        lives = card.lives()  # ask first, so that the last lines are read
        for line in file:
            click.echo(line, nl=False)
        with suppress(FileNotFoundError):  # between two generations
            if os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                for line in file:
                    click.echo(line, nl=False)
                file = _opened(path)
                continue
        if not lives:
            return
        time.sleep(LOOK)


def _opened(path: Path) -> IO[str]:
    return open(path, encoding="utf-8", errors="replace", newline="\n")
