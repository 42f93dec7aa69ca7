"""`polycephaly join`: lend drones of this host to a pool that runs elsewhere."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from .reach import complete_pool, one_line_errors
from .start import drone_options

EXAMPLES = """\b
Examples:
  polycephaly join ./lab.json -n 4     lends four drones of this host to that pool
  polycephaly join lab -n 1            one more, on the pool's own host

\b
Copy the connection file from the host of the pool, which was started with --tcp:
the output of start shows its path.

\b
Ctrl-C or SIGTERM: tasks that these drones have not begun are given back, running
tasks are finished. Twice: the drones end at once, and their running tasks are lost
(their callers get DroneDied).
"""


@click.command(epilog=EXAMPLES)
@click.argument("address", shell_complete=complete_pool)
@drone_options
def join(
    address: str, drones: int | None, modules: tuple[str, ...], file: Path | None, **options: Any
) -> None:
    """Lend drones of this host to a pool.

    ADDRESS is the pool's connection file (a path with a / in it). For a pool on this host, ADDRESS
    may also be its name or its tcp:// address. The pool sends calls of its clients to whichever
    drones are free. Use the same versions of Python, polycephaly and all modules that the tasks
    need. The modules and the file that the pool was started with are loaded first (the pool sends
    the file), and then those that are named here.
    """
    from ..engines.remote.client import connect
    from ..pool.pool import Pool
    from ..server.join import join as join_pool
    from .loading import CannotLoad, Setup, load

    with one_line_errors():
        with connect(address, output="discard") as remote:
            server_setup = Setup.from_plain(remote._connection.request("setup").result())
        try:
            load(server_setup, Setup.read(modules, file))
        except CannotLoad as error:
            click.echo(str(error), err=True)
            sys.exit(1)
        import socket

        with (
            Pool(drones, name=socket.gethostname(), **options) as pool,
            join_pool(pool, address) as joined,
        ):
            size = len(pool.drones)
            click.echo(
                f"{size} drone{'s' * (size != 1)} of this host joined {joined.name} "
                f"at {joined.address}"
            )
            for number in (signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    signal.signal(number, signal.default_int_handler)
            try:
                joined.run()
            except KeyboardInterrupt:
                click.echo("the drones have left", err=True)
