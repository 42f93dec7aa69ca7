"""`polycephaly list`, `ps` and `dashboard`: the running pools, and one pool's drones."""

from __future__ import annotations

from time import sleep, time
from typing import TYPE_CHECKING, Any

import click

from .reach import ERRORS, POOL_NAME, Command, connect_for_requests, connect_to, error_text
from .tables import Column, as_json, duration, mebibytes, show

if TYPE_CHECKING:
    from ..engines.remote.keys import Card

POOLS = (
    Column("NAME"), Column("PID", right=True), Column("DRONES", right=True),
    Column("BUSY", right=True), Column("QUEUED", right=True), Column("CLIENTS", right=True),
    Column("UP", right=True), Column("ADDRESS", cut=True),
)  # fmt: skip
DRONES = (
    Column("DRONE"), Column("PID", right=True), Column("STATE"), Column("FOR", right=True),
    Column("MEMORY", right=True), Column("DONE", right=True), Column("CLIENT"),
    Column("RUNNING", cut=True),
)  # fmt: skip

LOOK_SECONDS = 2.0  # between two looks of `dashboard` whether the pool still answers

JSON = click.option(
    "--json", "in_json", is_flag=True, help="Print JSON with all fields, for programs."
)


@click.command("list", cls=Command)
@JSON
def list_pools(in_json: bool) -> None:
    """List your pools that run on this machine.

    CLIENTS does not count this command.

    Examples
    --------
    polycephaly list
    polycephaly list --json
    """
    from ..engines.remote import pool_registry

    found = [_pool(card) for card in pool_registry.running_cards()]
    pools = [pool for pool in found if pool is not None]
    if in_json:
        as_json(pools)
    elif pools:
        show(POOLS, [_pool_row(pool) for pool in pools])
    else:
        click.echo("no pool is running; start one with: polycephaly start NAME", err=True)


@click.command(cls=Command)
@POOL_NAME
@JSON
def ps(name: str, in_json: bool) -> None:
    """Show the state of the drones of pool NAME.

    Examples
    --------
    polycephaly ps lab
    polycephaly ps lab --json
    polycephaly ps ./lab.json         a pool of another host, by its connection file

    Notes
    -----
    STATE is idle, busy, starting, retiring (the drone ends after its running tasks) or
    unresponsive, with the reason. FOR is the time since that state began. RUNNING also
    shows where a drone waits, if it has waited long without processor time (by default,
    for a minute). CLIENT is the process that submitted the task, PID@HOST if that is of
    another host; none for the pool's own tasks. MEMORY is the memory that the drone and
    its own processes hold for themselves, without memory that is shared with the pool's
    process.
    """
    status = status_of(name)
    if in_json:
        as_json(status)
    else:
        show(DRONES, [drone_row(drone, status["host"]) for drone in status["drones"]])


@click.command(cls=Command)
@POOL_NAME
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port; 0: a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
def dashboard(name: str, port: int, host: str) -> None:
    """Serve a live page of pool NAME, until Ctrl-C or the end of the pool.

    Examples
    --------
    polycephaly dashboard lab
    polycephaly dashboard lab --port 8800

    Notes
    -----
    The page shows the drones at work. With its first address, which contains a token, one may
    also interrupt tasks and kill drones. /metrics at the same address, with a token, is for
    Prometheus. Needs: pip install 'starlette>=0.37' 'uvicorn>=0.29'
    """
    with connect_to(name) as pool, pool.dashboard(port, host=host) as page:
        click.echo(f"{page.url}\nto look only: {page.read_only_url}")
        while True:
            sleep(LOOK_SECONDS)
            pool.status()


def status_of(name: str) -> dict[str, Any]:
    """Return `RemotePool.status` without this command among the clients."""
    with connect_for_requests(name) as pool:
        status = pool.status()
    return status | {"clients": status["clients"] - 1}


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
        drone.get("client") or "",
        _running(drone),
    )


def _running(drone: dict[str, Any]) -> str:
    from ..pool.items import with_item
    from ..pool.waiting import Waiting

    fields = drone.get("waiting")
    if fields is None:
        return with_item(drone["running"] or "", drone.get("item"))
    attributes = {name: fields[name] for name in fields.keys() - {"seconds"}}
    # Count from this host's clock: the drone's may differ.
    return str(Waiting(**attributes | {"since": time() - fields["seconds"]}))


def _pool(card: Card) -> dict[str, Any] | None:
    """Return the status of a pool; its card's content if the pool does not answer; None if its
    process has ended.
    """
    try:
        return status_of(card.name)
    except ERRORS as error:
        known = {"name": card.name, "pid": card.pid, "address": card.address}
        if not card.is_server_alive():
            return None
        return known | {"started": card.started, "error": error_text(error)}


def _pool_row(pool: dict[str, Any]) -> tuple[object, ...]:
    name, pid, address, up = pool["name"], pool["pid"], pool["address"], time() - pool["started"]
    if "error" in pool:
        return name, pid, "?", "?", "?", "?", duration(up), f"{address}: {pool['error']}"
    busy = sum(drone["state"] == "busy" for drone in pool["drones"])
    size = len(pool["drones"])
    return name, pid, size, busy, pool["queued"], pool["clients"], duration(up), address
