"""`polycephaly dashboard`: a live page of a pool."""

from __future__ import annotations

import time

import click

from .reach import POOL_NAME, connect_to

LOOK_SECONDS = 2.0  # between two looks whether the pool still answers


@click.command(
    epilog="""\b
Examples:
  polycephaly dashboard lab
  polycephaly dashboard lab --port 8800

\b
The page shows the drones at work. With its first address, which contains a token, one may
also interrupt tasks and kill drones. /metrics at the same address, with a token, is for
Prometheus. Needs: pip install 'polycephaly[dashboard]'
"""
)
@POOL_NAME
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port; 0: a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
def dashboard(name: str, port: int, host: str) -> None:
    """Serve a live page of pool NAME, until Ctrl-C or the end of the pool."""
    with connect_to(name) as pool, pool.dashboard(port, host=host) as page:
        click.echo(f"{page.url}\nto look only: {page.read_only_url}")
        while True:
            time.sleep(LOOK_SECONDS)
            pool.status()
