"""`polycephaly logs`: the log of a pool, also after the pool has ended."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from .reach import POOL_NAME, Command

if TYPE_CHECKING:
    from ..engines.remote.keys import Card

CHECK_INTERVAL_SECONDS = 0.2  # between checks for new lines


@click.command(cls=Command)
@POOL_NAME
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    help="Number of last lines to print.",
)
@click.option("-f", "--follow", is_flag=True, help="Then wait for further lines.")
def logs(name: str, lines: int, follow: bool) -> None:
    """Print the log of pool NAME.

    The log is in $XDG_STATE_HOME/polycephaly (by default ~/.local/state/polycephaly). It has up to
    8 MiB, and so has one older generation. The log stays when the pool has ended.

    Examples
    --------
    polycephaly logs lab
    polycephaly logs lab -n 1000 | grep ERROR
    polycephaly logs lab -f           continues until the pool ends, or Ctrl-C
    """
    from ..engines.remote import pool_registry
    from .journal import log_path, rotated_path

    path = log_path(name)
    if not path.exists():
        pool_registry.find_card(name)  # if no such pool runs, the error lists those that do
        raise click.ClickException(
            f"{name} has no log: the pool was not started by polycephaly start"
        )
    card = next((card for card in pool_registry.running_cards() if card.name == name), None)
    last: deque[str] = deque(maxlen=lines)
    with suppress(FileNotFoundError), _open(rotated_path(path)) as file:
        last.extend(file)
    file = _open(path)
    last.extend(file)
    for line in last:
        click.echo(line, nl=False)
    if follow and card is not None:
        _follow(file, path, card)


def _follow(file: IO[str], path: Path, card: Card) -> None:
    while True:
        is_alive = card.is_server_alive()  # ask first, so that the last lines are read
        for line in file:
            click.echo(line, nl=False)
        with suppress(FileNotFoundError):  # between two generations
            if os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                for line in file:
                    click.echo(line, nl=False)
                file = _open(path)
                continue
        if not is_alive:
            return
        time.sleep(CHECK_INTERVAL_SECONDS)


def _open(path: Path) -> IO[str]:
    return open(path, encoding="utf-8", errors="replace", newline="\n")
