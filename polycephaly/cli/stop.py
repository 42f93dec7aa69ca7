"""`polycephaly stop`: end pools by name."""

from __future__ import annotations

import os
import select

import click

from .reach import complete_pool, connect_to, one_line_errors


@click.command(
    epilog="""\b
Examples:
  polycephaly stop lab              running tasks are finished, waiting tasks are cancelled
  polycephaly stop lab --now        running tasks are interrupted
"""
)
@click.argument("names", shell_complete=complete_pool, nargs=-1, metavar="[NAME]...")
@click.option("--now", is_flag=True, help="Do not wait for running tasks.")
def stop(names: tuple[str, ...], now: bool) -> None:
    """End pools and their drones; the pool "default" if there is no NAME.

    Processes that the drones have started end too. The command returns when the pools have ended.
    Ctrl-C ends only the command.
    """
    for name in names or ("default",):
        _stop(name, now)


def _stop(name: str, now: bool) -> None:
    with one_line_errors():
        from ..engines.remote import pool_registry

        card = pool_registry.resolve_card(name)
        pidfd = os.pidfd_open(card.pid) if card.is_server_alive() else None
    try:
        with connect_to(name) as pool:
            pool.stop(now)
        if pidfd is None:
            click.echo(f"{name} was asked to end", err=True)
        else:
            select.select([pidfd], [], [])
            click.echo(f"{name} has ended", err=True)
    except click.ClickException as error:
        if pidfd is None:
            raise
        raise click.ClickException(
            f"{error.message} (kill -9 {card.pid} ends the pool and its drones)"
        ) from None
    finally:
        if pidfd is not None:
            os.close(pidfd)
