"""`polycephaly join`: lend drones of this host to a pool that runs elsewhere."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..timeline.format import count
from .reach import Command, complete_pool, connect_to, error_text
from .start import drone_options

if TYPE_CHECKING:
    from ..pool.pool import Pool
    from .loading import Setup

RETRY_SECONDS = 1.0
UNREACHABLE = (OSError, ValueError)  # there is no pool yet, or its file is half copied


@click.command(cls=Command)
@click.argument("address", shell_complete=complete_pool)
@click.option(
    "--reconnect",
    is_flag=True,
    help="Join again when the connection is lost or the pool has ended, until Ctrl-C.",
)
@drone_options
def join(
    address: str,
    reconnect: bool,
    drones: int | None,
    modules: tuple[str, ...],
    file: Path | None,
    **options: Any,
) -> None:
    """Lend drones of this host to a pool.

    ADDRESS is the pool's connection file (a path with a / in it). For a pool on this host, ADDRESS
    may also be its name or its tcp:// address. The pool sends calls of its clients to whichever
    drones are free. Use the same versions of Python, polycephaly and all modules that the tasks
    need. The modules and the file that the pool was started with are loaded first (the pool sends
    the file), and then those that are named here.

    Examples
    --------
    polycephaly join ./lab.json -n 4     lends four drones of this host to that pool
    polycephaly join lab -n 1            one more, on the pool's own host
    polycephaly join lab --reconnect     joins again each time lab is restarted

    Notes
    -----
    Copy the connection file from the host of the pool, which was started with --tcp:
    the output of start shows its path.

    Ctrl-C or SIGTERM: tasks that these drones have not begun are given back, running
    tasks are finished. Twice: the drones end at once, and their running tasks are lost
    (their callers get DroneDied).
    """
    from ..pool.pool import Pool
    from .loading import CannotLoad, Setup, load

    setup = _setup_of(address)
    try:
        load(setup, Setup.read(modules, file))
    except CannotLoad as error:
        click.echo(str(error), err=True)
        sys.exit(1)
    import socket

    with Pool(drones, name=socket.gethostname(), **options) as pool:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, signal.default_int_handler)
        try:
            while True:
                _work_for(pool, address, reconnect)
                if not reconnect:
                    return
                time.sleep(RETRY_SECONDS)
                _wait_for_pool(address, setup)
        except KeyboardInterrupt:
            click.echo("the drones have left", err=True)


def _setup_of(address: str) -> Setup:
    """Return what the pool has loaded."""
    from .loading import Setup

    with connect_to(address) as remote:
        # None: a pool that was not started by a command
        return Setup(**remote._dispatcher.request("setup").result() or {})


def _work_for(pool: Pool, address: str, reconnect: bool) -> None:
    """Lend the drones of `pool` until the connection is lost or cannot be made (which raises an
    error, unless `reconnect`) or this pool has ended.
    """
    from ..server.join import join as join_pool

    try:
        with join_pool(pool, address) as joined:
            drones = count(len(pool.drones), "drone")
            click.echo(f"{drones} of this host joined {joined.name} at {joined.address}")
            joined.run()
    except BrokenPipeError:  # the output was closed
        raise
    except UNREACHABLE as error:
        if not reconnect:
            raise
        click.echo(f"{error_text(error)}; trying again", err=True)


def _wait_for_pool(address: str, setup: Setup) -> None:
    """Return when the pool can be reached again. Raises `click.ClickException` if it has loaded
    something else than before.
    """
    told = ""
    while True:
        try:
            if _setup_of(address) == setup:
                return
        except UNREACHABLE as error:
            reason = error_text(error)
            if reason != told:
                click.echo(reason, err=True)
                told = reason
            time.sleep(RETRY_SECONDS)
        else:
            raise click.ClickException(
                "the pool was started anew with other modules or another file: join anew, too"
            )
