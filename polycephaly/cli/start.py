"""`polycephaly start`: start a named pool, in the foreground or the background."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from .reach import one_line, size

EXAMPLES = """\b
Examples:
  polycephaly start                               as many drones as usable cores, named "default"
  polycephaly start lab -n 4 --daemonize          in the background; the prompt is back when it answers
  polycephaly start lab --import numpy            loaded once, before the drones are forked from it
  polycephaly start lab --file setup.py           its names are there in every drone
  polycephaly start lab --max-memory 2G           a drone that holds more is replaced
  polycephaly start lab --tcp bighost:5555        for other hosts too

\b
Ctrl-C or SIGTERM: what runs is finished, then it ends. Twice: at once.
"""


LOOPBACK = "tcp://127.0.0.1:0"


def _address(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    if value is None:
        return LOOPBACK
    host, _, port = value.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit() or int(port) >= 1 << 16:
        raise click.BadParameter(f"{value!r} is not HOST:PORT")
    if host in ("*", "0.0.0.0", "::", "[::]"):
        raise click.BadParameter(
            f"{host!r} is no address that others reach: give this host's name or number"
        )
    return f"tcp://{host}:{port}"


_Command = TypeVar("_Command", bound=Callable[..., object])


def of_drones(command: _Command) -> _Command:
    """Add the options that configure the drones."""
    for option in reversed(
        (
            click.option(
                "-n",
                "--drones",
                type=click.IntRange(1),
                help="How many drones.  [default: usable cores]",
            ),
            click.option(
                "--import",
                "modules",
                multiple=True,
                metavar="MODULE",
                help="Import it before they are forked. Repeatable.",
            ),
            click.option(
                "--file",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help="Run this file as __main__ before they are forked.",
            ),
            click.option(
                "--width",
                type=click.IntRange(1),
                default=1,
                help="Coroutines a drone runs at once.  [default: 1]",
            ),
            click.option(
                "--timeout",
                type=float,
                metavar="SECONDS",
                help="Work that runs longer is interrupted.",
            ),
            click.option(
                "--hang-timeout",
                type=float,
                metavar="SECONDS",
                help="Kill a drone that shows no sign of life.",
            ),
            click.option(
                "--report-waiting",
                type=float,
                default=60.0,
                metavar="SECONDS",
                help="Say in what a drone has waited for so long.  [default: 60; inf: never]",
            ),
            click.option(
                "--max-memory",
                callback=size,
                metavar="SIZE",
                help="What a drone may hold for itself: 500M, 2G.",
            ),
            click.option(
                "--max-tasks",
                type=click.IntRange(1),
                metavar="N",
                help="Replace a drone after so many tasks.",
            ),
            click.option(
                "--retries",
                type=click.IntRange(0),
                default=0,
                help="Run work again whose drone died.  [default: 0]",
            ),
        )
    ):
        command = option(command)
    return command


@click.command(epilog=EXAMPLES)
@click.argument("name", default="default")
@click.option(
    "-d", "--daemonize", is_flag=True, help="Go on in the background; return when the pool answers."
)
@click.option(
    "--tcp",
    metavar="HOST:PORT",
    callback=_address,
    help="Listen there, for other hosts too. Port 0: any.",
)
@of_drones
def start(
    name: str,
    daemonize: bool,
    tcp: str,
    drones: int | None,
    modules: tuple[str, ...],
    file: Path | None,
    **options: Any,
) -> None:
    """Start a pool that is found by NAME.

    The other commands find it, and polycephaly.connect(NAME) in Python. Its drones are forked from
    this process after MODULEs and the file have been loaded, so they have them without loading
    anything. The current directory is theirs, and on their sys.path. What they print goes to
    whoever gave them the work; anything else goes to the log (see `logs`), and to this terminal
    while it is in the foreground."""
    from . import daemon

    def serve(tell: daemon.Tell) -> int:
        from .serving import Serving

        return Serving(name, drones, tcp, modules, file, options, daemonize).run(tell)

    with one_line():
        sys.exit(daemon.detached(serve) if daemonize else daemon.here(serve))
