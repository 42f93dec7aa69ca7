"""`polycephaly interrupt`, `cancel`, `refresh`, `resize`, `stop`: act on pools and their tasks."""

from __future__ import annotations

import os
import sys

import click

from .reach import (
    ERRORS,
    POOL_NAME,
    Command,
    complete_pool,
    connect_for_requests,
    connect_to,
    error_text,
)


@click.command(cls=Command)
@click.argument("name", shell_complete=complete_pool)
@click.argument("drones", nargs=-1, metavar="[DRONE]...")
def interrupt(name: str, drones: tuple[str, ...]) -> None:
    """Interrupt the running tasks of pool NAME, or those of its DRONEs only.

    Each task gets a KeyboardInterrupt, as from Ctrl-C. Whoever submitted it gets that error.

    Examples
    --------
    polycephaly interrupt lab               the tasks of all drones
    polycephaly interrupt lab lab.0 lab.3   those of two drones
    """
    with connect_to(name) as pool:
        known = pool.drones  # drones of joined hosts may have the same name
        names = [each.name for each in known]
        missing = [each for each in drones if each not in names]
        if missing:
            raise click.ClickException(
                f"{name} has no drone {missing[0]!r}, but {', '.join(names) or 'none'}"
            )
        errors = []
        for each in known:
            if not drones or each.name in drones:
                try:
                    each.interrupt()
                except RuntimeError as error:
                    errors.append(f"{each.name}: {error}")
        if errors:
            raise click.ClickException("\n".join(errors))


@click.command(cls=Command)
@click.argument("name", shell_complete=complete_pool)
@click.argument("clients", nargs=-1, metavar="[CLIENT]...")
def cancel(name: str, clients: tuple[str, ...]) -> None:
    """Cancel all tasks of the clients of pool NAME, or of these CLIENTs only.

    polycephaly ps shows for which CLIENT a drone works. The promises of cancelled tasks raise
    CancelledError. The clients stay connected, and may submit more tasks. Tasks of the pool's own
    process are left alone.

    Examples
    --------
    polycephaly cancel lab            the tasks of all clients
    polycephaly cancel lab 4711       those of the process 4711
    polycephaly cancel lab 62@beta    those of the process 62 of another host
    """
    with connect_to(name) as pool:
        cancelled = pool.cancel_tasks(*clients)
    click.echo(f"cancelled the tasks of {', '.join(cancelled) or 'no client'}", err=True)


@click.command(cls=Command)
@POOL_NAME
def refresh(name: str) -> None:
    """Replace the drones of pool NAME by new ones.

    They are forked from the pool's process as that is now. Tasks that run are finished first.

    Examples
    --------
    polycephaly refresh lab           after: polycephaly doit lab --everywhere ...
    """
    with connect_to(name) as pool:
        pool.refresh()


@click.command(cls=Command)
@click.argument("name", shell_complete=complete_pool)
@click.argument("drones", type=click.IntRange(min=1))
def resize(name: str, drones: int) -> None:
    """Change the number of drones of pool NAME to DRONES.

    New drones start in the background. Drones that are too many end after their running tasks.

    Examples
    --------
    polycephaly resize lab 8
    """
    with connect_to(name) as pool:
        pool.resize(drones)


@click.command(cls=Command)
@click.argument("names", shell_complete=complete_pool, nargs=-1, metavar="[NAME]...")
@click.option("--now", is_flag=True, help="Do not wait for running tasks.")
def stop(names: tuple[str, ...], now: bool) -> None:
    """End pools and their drones; the pool "default" if there is no NAME.

    Processes that the drones have started end too. The command returns when the pools have ended.
    Ctrl-C ends only the command.

    Examples
    --------
    polycephaly stop lab              running tasks are finished, waiting tasks are cancelled
    polycephaly stop lab --now        running tasks are interrupted
    """
    failed = False
    for name in names or ("default",):
        try:
            _stop(name, now)
        except ERRORS as error:
            click.echo(f"Error: {error_text(error)}", err=True)
            failed = True
    sys.exit(failed)


def _stop(name: str, now: bool) -> None:
    from ..engines.remote import pool_registry
    from ..runtime.parent_death import wait_for_end

    card = pool_registry.resolve_card(name)
    pidfd = os.pidfd_open(card.pid) if card.is_server_alive() else None
    try:
        with connect_for_requests(name) as pool:
            pool.stop(now)
        if pidfd is None:
            click.echo(f"{name} was asked to end", err=True)
        else:
            wait_for_end(pidfd)
            click.echo(f"{name} has ended", err=True)
    except ERRORS as error:
        if pidfd is None:
            raise
        raise RuntimeError(
            f"{error_text(error)} (kill {card.pid} asks its process to end; "
            f"kill -9 {card.pid} ends the pool and its drones)"
        ) from None
    finally:
        if pidfd is not None:
            os.close(pidfd)
