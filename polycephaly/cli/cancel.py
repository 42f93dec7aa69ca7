"""`polycephaly cancel`: cancel the tasks of a pool's clients."""

from __future__ import annotations

import click

from .reach import complete_pool, connect_to, one_line_errors


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
    with one_line_errors(), connect_to(name) as pool:
        cancelled = pool.cancel_tasks(*clients)
    click.echo(f"cancelled the tasks of {', '.join(cancelled) or 'no client'}", err=True)
