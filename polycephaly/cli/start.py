"""`polycephaly start`: start a named pool, in the foreground or the background."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from .reach import FILE, SECONDS, Command, parse_size


def _address(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    if value is None:
        return "tcp://127.0.0.1:0"
    host, _, port = value.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise click.BadParameter(f"{value!r} is not HOST:PORT")
    from ..engines.remote.keys import is_every_host

    if is_every_host(host):
        raise click.BadParameter(
            f"{host!r} is not an address that other hosts can reach: give this host's name or "
            "number"
        )
    return f"tcp://{host}:{port}"


def _resources(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, int] | None:
    sizes = {}
    for value in values:
        name, _, size = value.partition("=")
        if not name or not size.isdecimal() or int(size) < 1:
            raise click.BadParameter(f"{value!r} is not a resource and its size, such as db=2")
        sizes[name] = int(size)
    return sizes or None


_Command = TypeVar("_Command", bound=Callable[..., object])

_seconds = partial(click.option, type=SECONDS, metavar="SECONDS")

_DRONE_OPTIONS = (
    click.option(
        "-n", "--drones", type=click.IntRange(1), help="Number of drones.  [default: usable cores]"
    ),
    click.option(
        "--import",
        "modules",
        multiple=True,
        metavar="MODULE",
        help="Import MODULE before the drones are forked. Repeatable.",
    ),
    click.option(
        "--file", type=FILE, help="Run this file as __main__ before the drones are forked."
    ),
    _seconds("--timeout", help="Interrupt a task that runs longer."),
    _seconds("--hang-timeout", help="Kill a drone that does not respond for so long."),
    _seconds(
        "--report-waiting",
        default=60.0,
        help="Report where a drone has waited for so long.  [default: 60; inf: never]",
    ),
    click.option(
        "--max-memory",
        callback=parse_size,
        metavar="SIZE",
        help="Replace a drone that holds more memory for itself: 500M, 2G.",
    ),
    click.option(
        "--max-tasks",
        type=click.IntRange(1),
        metavar="N",
        help="Replace a drone after so many tasks.",
    ),
    click.option(
        "--native-threads",
        type=click.IntRange(0),
        metavar="N",
        help="Threads that BLAS, OpenMP and the like may use in a drone; 0: as many as they like.  "
        "[default: usable cores / drones]",
    ),
    click.option(
        "--retries",
        type=click.IntRange(0),
        default=0,
        help="Run a task again whose drone has died, at most so often.  [default: 0]",
    ),
)


def drone_options(command: _Command) -> _Command:
    """Add the options that configure the drones."""
    for option in reversed(_DRONE_OPTIONS):
        command = option(command)
    return command


@click.command(cls=Command)
@click.argument("name", default="default")
@click.option(
    "-d", "--daemonize", is_flag=True, help="Run in the background; return when the pool answers."
)
@click.option(
    "--tcp",
    metavar="HOST:PORT",
    callback=_address,
    help="Listen at this address, for other hosts too. Port 0: any free port.",
)
@click.option(
    "--resource",
    "resources",
    multiple=True,
    metavar="NAME=N",
    callback=_resources,
    help="Let tasks with options(resources=...) use N of NAME at a time. Repeatable.",
)
@click.option(
    "--describe-items/--no-describe-items",
    default=True,
    help="Whether errors of a map have the repr of its item.  [default: they have]",
)
@drone_options
def start(
    name: str,
    daemonize: bool,
    tcp: str,
    drones: int | None,
    modules: tuple[str, ...],
    file: Path | None,
    **options: Any,
) -> None:
    """Start a pool under NAME.

    The other commands find the pool by NAME, and so does polycephaly.connect(NAME) in Python. The
    drones are forked from this process after the MODULEs and the file have been loaded, so they
    need not load these again. The current directory is that of the drones, and is on their
    sys.path. The output of a task goes to the client that submitted the task. All other output goes
    to the log (see `logs`), and to this terminal if the pool runs in the foreground.

    Examples
    --------
    polycephaly start                               as many drones as usable cores, named "default"
    polycephaly start lab -n 4 --daemonize          in the background
    polycephaly start lab --import numpy            imported once, before the drones are forked
    polycephaly start lab --file setup.py           every drone has the names of the file
    polycephaly start lab --max-memory 2G           a drone that holds more is replaced
    polycephaly start lab --tcp bighost:5555        for other hosts too

    Notes
    -----
    Ctrl-C or SIGTERM: running tasks are finished, then the pool ends. Twice: the pool ends at once.
    """
    from . import daemon

    def serve(report_start: daemon.ReportStart) -> int:
        from .serving import serve_pool

        return serve_pool(name, drones, tcp, modules, file, options, daemonize, report_start)

    sys.exit(daemon.run_in_background(serve, name) if daemonize else serve(daemon.print_report))
