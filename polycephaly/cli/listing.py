"""`polycephaly list` and `ps`: the running pools, and the state of one pool's drones."""

from __future__ import annotations

from contextlib import closing
from time import time
from typing import TYPE_CHECKING, Any

import click

from .reach import complete_pool, one_line, reached
from .tables import Column, as_json, duration, mebibytes, show

if TYPE_CHECKING:
    from ..engines.remote.keys import Card

__all__ = ["DRONES", "drone_row", "list_pools", "ps", "status_of"]

POOLS = (
    Column("NAME"), Column("PID", right=True), Column("DRONES", right=True), Column("BUSY", right=True),
    Column("QUEUED", right=True), Column("CLIENTS", right=True), Column("UP", right=True), Column("ADDRESS", cut=True),
)  # fmt: skip
DRONES = (
    Column("DRONE"), Column("PID", right=True), Column("STATE"), Column("FOR", right=True),
    Column("MEMORY", right=True), Column("DONE", right=True), Column("RUNNING", cut=True),
)  # fmt: skip

JSON = click.option(
    "--json", "in_json", is_flag=True, help="For programs: JSON, with all that is known."
)


@click.command(
    "list",
    epilog="""\b
Examples:
  polycephaly list
  polycephaly list --json
""",
)
@JSON
def list_pools(in_json: bool) -> None:
    """List your pools that run on this machine.

    CLIENTS does not count this command.
    """
    from ..engines.remote import pool_registry

    with one_line():
        asked = [(card, *_asked(card)) for card in pool_registry.running()]
    found = [
        (card, status, error) for card, status, error in asked if status is not None or card.lives()
    ]
    if in_json:
        as_json([status or _known(card) | {"error": error} for card, status, error in found])
    elif found:
        show(POOLS, [_pool_row(card, status, error) for card, status, error in found])
    else:
        click.echo("no pool is running: polycephaly start NAME", err=True)


@click.command(
    epilog="""\b
Examples:
  polycephaly ps lab
  polycephaly ps lab --json
  polycephaly ps ./lab.json         a pool of another host, by its connection file

\b
STATE is idle, busy, starting, retiring (ends after what it runs) or unresponsive: why. FOR tells for how long.
RUNNING tells, too, in what a drone has waited without processor time, if it was for long (a minute, by default).
MEMORY is what the drone and its own processes hold for themselves, without what they share with the image.
"""
)
@click.argument("name", shell_complete=complete_pool)
@JSON
def ps(name: str, in_json: bool) -> None:
    """Show what the drones of pool NAME do."""
    status = status_of(name)
    if in_json:
        as_json(status)
    else:
        show(DRONES, [drone_row(drone, status["host"]) for drone in status["drones"]])


def status_of(name: str) -> dict[str, Any]:
    """Return `RemotePool.status` without this command among the clients."""
    with one_line(), closing(_Leaving(name)) as asking:
        return asking.status()


def drone_row(drone: dict[str, Any], host: str) -> tuple[object, ...]:
    name = drone["name"] if drone["host"] == host else f"{drone['name']} on {drone['host']}"
    memory = mebibytes(drone["memory"])
    return (
        name,
        drone["pid"],
        drone["state"],
        duration(drone["seconds"]),
        memory,
        drone["tasks_done"],
        _running(drone),
    )


def _running(drone: dict[str, Any]) -> str:
    told = drone.get("waiting")
    if told is None:
        return drone["running"] or ""
    from ..pool.waiting import Waiting

    known = {name: told[name] for name in told.keys() - {"seconds"}}
    # Count from this host's clock: the drone's may differ.
    return str(Waiting(**known | {"since": time() - told["seconds"]}))


class _Leaving:
    """A connection for one request."""

    def __init__(self, where: str) -> None:
        self._pool = reached(where)

    def status(self) -> dict[str, Any]:
        status = self._pool.status()
        return status | {"clients": status["clients"] - 1}

    def close(self) -> None:
        self._pool.shutdown()


def _asked(card: Card) -> tuple[dict[str, Any] | None, str]:
    try:
        return status_of(card.name), ""
    except click.ClickException as error:
        return None, error.message


def _known(card: Card) -> dict[str, Any]:
    return {"name": card.name, "pid": card.pid, "address": card.address, "started": card.started}


def _pool_row(card: Card, status: dict[str, Any] | None, error: str) -> tuple[object, ...]:
    up = duration(time() - card.started)
    if status is None:
        return card.name, card.pid, "?", "?", "?", "?", up, f"{card.address}: {error}"
    busy = sum(drone["state"] == "busy" for drone in status["drones"])
    size = len(status["drones"])
    return card.name, card.pid, size, busy, status["queued"], status["clients"], up, card.address
