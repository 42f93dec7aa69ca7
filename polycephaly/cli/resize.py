"""`polycephaly resize`: change the number of a pool's drones."""

from __future__ import annotations

import click

from .reach import complete_pool, connect_to, one_line_errors


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
    with one_line_errors(), connect_to(name) as pool:
        pool.resize(drones)
