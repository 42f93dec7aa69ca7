"""`polycephaly refresh`: have a pool take a new snapshot."""

from __future__ import annotations

import click

from .reach import POOL_NAME, connect_to, one_line_errors


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
    with one_line_errors(), connect_to(name) as pool:
        pool.refresh()
