"""`polycephaly interrupt`, `cancel`, `refresh` and `resize`: act on a pool and what it runs."""

from __future__ import annotations

import click

from .reach import POOL_NAME, complete_pool, connect_to


@click.command(
    epilog="""\b
Examples:
  polycephaly interrupt lab               what all drones run
  polycephaly interrupt lab lab.0 lab.3   what these run
"""
)
@click.argument("name", shell_complete=complete_pool)
@click.argument("drones", nargs=-1, metavar="[DRONE]...")
def interrupt(name: str, drones: tuple[str, ...]) -> None:
    """Interrupt the running tasks of pool NAME, or those of its DRONEs only.

    Each task gets a KeyboardInterrupt, as from Ctrl-C. Whoever submitted it gets that error.
    """
    with connect_to(name) as pool:
        known = pool.drones  # drones of joined hosts may have the same name
        names = [each.name for each in known]
        missing = [each for each in drones if each not in names]
        if missing:
            raise click.ClickException(
                f"{name} has no drone {missing[0]!r}, but {', '.join(names) or 'none'}"
            )
        for each in known:
            if not drones or each.name in drones:
                each.interrupt()


@click.command(
    epilog="""\b
Examples:
  polycephaly cancel lab            the tasks of all clients
  polycephaly cancel lab 4711       those of the process 4711
  polycephaly cancel lab 62@beta    those of the process 62 of another host
"""
)
@click.argument("name", shell_complete=complete_pool)
@click.argument("clients", nargs=-1, metavar="[CLIENT]...")
def cancel(name: str, clients: tuple[str, ...]) -> None:
    """Cancel all tasks of the clients of pool NAME, or of these CLIENTs only.

    polycephaly ps shows for which CLIENT a drone works. The promises of cancelled tasks raise
    CancelledError. The clients stay connected, and may submit more tasks. Tasks of the pool's own
    process are left alone.
    """
    with connect_to(name) as pool:
        cancelled = pool.cancel_tasks(*clients)
    click.echo(f"cancelled the tasks of {', '.join(cancelled) or 'no client'}", err=True)


@click.command(
    epilog="""\b
Examples:
  polycephaly refresh lab           after: polycephaly doit lab --everywhere ...
"""
)
@POOL_NAME
def refresh(name: str) -> None:
    """Replace the drones of pool NAME by new ones.

    They are forked from the pool's process as that is now. Tasks that run are finished first.
    """
    with connect_to(name) as pool:
        pool.refresh()


@click.command(
    epilog="""\b
Examples:
  polycephaly resize lab 8
"""
)
@click.argument("name", shell_complete=complete_pool)
@click.argument("drones", type=click.IntRange(min=1))
def resize(name: str, drones: int) -> None:
    """Change the number of drones of pool NAME to DRONES.

    New drones start in the background. Drones that are too many end after their running tasks.
    """
    with connect_to(name) as pool:
        pool.resize(drones)
