"""`polycephaly start`: a pool that outlives the shell's line, found by its name."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .reach import MEMORY, one_line

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
        raise click.BadParameter(f"{host!r} is no address that others reach: give this host's name or number")
    return f"tcp://{host}:{port}"


@click.command(epilog=EXAMPLES)
@click.argument("name", default="default")
@click.option("-n", "--drones", type=click.IntRange(1), help="How many drones.  [default: usable cores]")
@click.option("-d", "--daemonize", is_flag=True, help="Go on in the background; return when the pool answers.")
@click.option(
    "--import", "modules", multiple=True, metavar="MODULE", help="Import it before the drones are forked. Repeatable."
)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run this file as __main__ before the drones are forked.",
)
@click.option("--tcp", metavar="HOST:PORT", callback=_address, help="Listen there, and not only for this machine. Port 0: any free one.")
@click.option("--width", type=click.IntRange(1), default=1, show_default=True, help="Coroutines a drone runs at once.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Work that runs longer is interrupted.")
@click.option("--hang-timeout", type=float, metavar="SECONDS", help="Kill a drone without a sign of life for so long.")
@click.option("--max-memory", type=MEMORY, metavar="SIZE", help="What a drone may hold for itself: 500M, 2G.")
@click.option("--max-tasks", type=click.IntRange(1), metavar="N", help="Replace a drone after so many tasks.")
@click.option("--retries", type=click.IntRange(0), default=0, metavar="N", help="Run work again whose drone died.")
def start(
    name: str,
    drones: int | None,
    daemonize: bool,
    modules: tuple[str, ...],
    file: Path | None,
    tcp: str,
    width: int,
    timeout: float | None,
    hang_timeout: float | None,
    max_memory: int | None,
    max_tasks: int | None,
    retries: int,
) -> None:
    """Start a pool under NAME, for `polycephaly.connect(NAME)` and the other commands.

    Its drones are forked from this process after MODULEs and the file have been loaded, so they have them without
    loading anything. The current directory is theirs, and on their sys.path. What they print goes to the log (see
    `logs`), and to this terminal while it is in the foreground.
    """
    from . import daemon

    options = {
        "width": width,
        "timeout": timeout,
        "hang_timeout": hang_timeout,
        "max_memory": max_memory,
        "max_tasks": max_tasks,
        "retries": retries,
    }

    def serve(tell: daemon.Tell) -> int:
        from .serving import Serving

        return Serving(name, drones, tcp, modules, file, options, daemonize).run(tell)

    with one_line():
        sys.exit(daemon.detached(serve) if daemonize else daemon.here(serve))
