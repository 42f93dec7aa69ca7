"""`polycephaly join`: lend drones of this host to a pool that runs elsewhere."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from .reach import complete_pool, one_line
from .start import of_drones

EXAMPLES = """\b
Examples:
  polycephaly join ./lab.json -n 4     four drones of this host work for that pool
  polycephaly join lab -n 1            one more, on the pool's own host

\b
The connection file of a pool that was started with --tcp comes from there: start says where it is.
\b
Ctrl-C or SIGTERM: what these drones have not begun is given back, what they run is finished. Twice: at once; then what
they run is lost, and its callers are told.
"""


@click.command(epilog=EXAMPLES)
@click.argument("address", shell_complete=complete_pool)
@of_drones
def join(
    address: str, drones: int | None, modules: tuple[str, ...], file: Path | None, **options: Any
) -> None:
    """Lend drones of this host to a pool.

    ADDRESS is its connection file (a path with a / in it), or its name or tcp:// address if it runs
    on this host. Its clients need not know: it gives their calls to whichever drones are free. Use
    the same versions of Python, polycephaly and the modules that the work needs. The modules and
    the file that the pool was started with are loaded first (the file comes from there), and then
    those that are named here."""
    from ..engines.remote.client import connect
    from ..pool.pool import Pool
    from ..server.join import join as join_pool
    from .loading import CannotLoad, Setup, load

    with one_line():
        with connect(address, output="discard") as remote:
            theirs = Setup.of_plain(remote._connection.ask("setup").result())
        try:
            load(theirs, Setup.read(modules, file))
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
                f"{size} drone{'s' * (size != 1)} of this host work for {joined.name} at {joined.address}"
            )
            for number in (signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    signal.signal(number, signal.default_int_handler)
            try:
                joined.run()
            except KeyboardInterrupt:
                click.echo("they have left", err=True)
