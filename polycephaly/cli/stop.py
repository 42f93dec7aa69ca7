"""`polycephaly stop`: end pools by name."""

from __future__ import annotations

import os
import select

import click

from .reach import complete_pool, one_line, reached


@click.command(
    epilog="""\b
Examples:
  polycephaly stop lab              what runs is finished; what waits is cancelled
  polycephaly stop lab --now        what runs is interrupted
"""
)
@click.argument("names", shell_complete=complete_pool, nargs=-1, required=True, metavar="NAME...")
@click.option("--now", is_flag=True, help="Do not wait for what runs.")
def stop(names: tuple[str, ...], now: bool) -> None:
    """End pools and their drones.

    What the drones have started ends too. Returns when they have ended. Ctrl-C ends the waiting
    only."""
    for name in names:
        _stop(name, now)


def _stop(name: str, now: bool) -> None:
    with one_line():
        from ..engines.remote import pool_registry

        card = pool_registry.card_of(name)
        pidfd = os.pidfd_open(card.pid) if card.lives() else None
    try:
        with one_line():
            pool = reached(name)
            try:
                pool.stop(now)
            finally:
                pool.shutdown()
        if pidfd is None:
            click.echo(f"{name} was asked to end", err=True)
        else:
            select.select([pidfd], [], [])
            click.echo(f"{name} has ended", err=True)
    except click.ClickException as error:
        if pidfd is None:
            raise
        raise click.ClickException(
            f"{error.message} (kill -9 {card.pid} ends it, and its drones)"
        ) from None
    finally:
        if pidfd is not None:
            os.close(pidfd)
