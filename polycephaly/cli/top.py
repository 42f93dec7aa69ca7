"""`polycephaly top`: `ps`, live.

    status() once a second ──> picture ──> rich's Live, on the terminal's other screen
    keys ── cbreak ──> q, Ctrl-C: leave

The terminal is restored after every end: by a key, by a signal, or because the pool has ended.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, time
from typing import TYPE_CHECKING, Any

import click

from .listing import DRONES, drone_row
from .reach import POOL_NAME, connect_to, one_line_errors
from .tables import duration, grid, mebibytes

if TYPE_CHECKING:
    from rich.console import ConsoleDimensions, RenderableType


@click.command(
    epilog="""\b
Examples:
  polycephaly top lab
  polycephaly top lab --every 0.2

\b
Keys: q or Ctrl-C ends the command. For a single report, or for programs, use polycephaly ps.
"""
)
@POOL_NAME
@click.option(
    "--every",
    type=click.FloatRange(0.05, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
def top(name: str, every: float) -> None:
    """Show the state of the drones of pool NAME, live."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.ClickException(
            f"top needs a terminal; for a single report use: polycephaly ps {name}"
        )
    with one_line_errors(), suppress(KeyboardInterrupt), connect_to(name) as pool:
        from rich.console import Console
        from rich.live import Live

        status, rate = pool.status(), Rate()
        console = Console()
        with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(
                    _render(status, rate.update(status["tasks_done"]), console.size), refresh=True
                )
                if _quit_requested(keys, every):
                    return
                status = pool.status()


class Rate:
    """Tasks per second between two updates."""

    def __init__(self) -> None:
        self._previous: tuple[float, int] | None = None

    def update(self, done: int) -> float:
        now = monotonic()
        previous, self._previous = self._previous, (now, done)
        return 0.0 if previous is None else (done - previous[1]) / max(now - previous[0], 1e-3)


def _render(status: dict[str, Any], rate: float, size: ConsoleDimensions) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    width, height = size
    drones = status["drones"]
    busy = sum(drone["state"] == "busy" for drone in drones)
    others = status["clients"] - 1
    up = duration(time() - status["started"])
    memory = mebibytes(sum(drone["memory"] or 0 for drone in drones))
    shown = drones[: max(1, height - 6)]
    omitted = f"... and {len(drones) - len(shown)} more drones" if len(shown) < len(drones) else ""
    return Group(
        Text(f"{status['name']}  process {status['pid']} on {status['host']}, up {up}", "bold"),
        Text(
            f"{busy} of {len(drones)} drones busy, {status['queued']} queued, "
            f"{others} other client{'s' * (others != 1)}, {status['tasks_done']:,} done, "
            f"{rate:,.0f}/s, {memory}"
        ),
        Text(),
        grid(DRONES, [drone_row(drone, status["host"]) for drone in shown], width),
        Text(omitted),
    )


def _quit_requested(keys: int, seconds: float) -> bool:
    """Wait so many seconds for a key; return whether it asks to end the command."""
    deadline = monotonic() + seconds
    while (left := deadline - monotonic()) > 0:
        if select.select([keys], [], [], left)[0] and os.read(keys, 64)[:1] in (
            b"q",
            b"Q",
            b"\x03",
            b"",
        ):
            return True
    return False


@contextmanager
def _keys() -> Iterator[int]:
    """Yield the terminal's descriptor, set to deliver each key at once without echo."""
    fd = sys.stdin.fileno()
    previous = termios.tcgetattr(fd)
    handlers = {
        number: signal.signal(number, _exit_on_signal) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        tty.setcbreak(fd)
        raw = termios.tcgetattr(fd)
        raw[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell on this screen
        termios.tcsetattr(fd, termios.TCSANOW, raw)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)
