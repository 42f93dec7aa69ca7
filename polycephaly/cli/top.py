"""`polycephaly top`: like `ps`, updated continuously.

    status() at each update ──> picture ──> rich's Live, on the terminal's alternate screen
    keys ── cbreak ──> order of the drones; q, Ctrl-C: leave

The terminal is restored after a key, Ctrl-C, SIGTERM, SIGHUP or the end of the pool.
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
from .tables import Column, duration, grid, mebibytes

if TYPE_CHECKING:
    from rich.console import ConsoleDimensions, RenderableType

_QUIT = ("q", "\x03")
_ORDERS = {"n": "", "c": "cpu", "m": "memory", "d": "tasks_done"}
"""For each key, the field by which drones are sorted, the largest first; "": the pool's order."""
MIN_PROCESSOR_SECONDS = 0.9
"""The shortest time over which the use of processors is computed: the kernel counts hundredths of
a second, and joined hosts report once a second.
"""
_CPU = 5
_COLUMNS = (*DRONES[:_CPU], Column("CPU", right=True), *DRONES[_CPU:])


@click.command(
    epilog="""\b
Examples:
  polycephaly top lab
  polycephaly top lab --every 0.2

\b
CPU is the processor time per second, measured over about a second or --every if that is longer;
100 % is one processor.

\b
Keys: c, m and d put the drones with the most CPU, MEMORY and DONE first, n sorts them by number,
q or Ctrl-C ends the command. For a single report, or for programs, use polycephaly ps.
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

        rates, order, console = Rates(), "n", Console()
        with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                status, due = pool.status(), monotonic() + every
                rates.update(status, monotonic())
                while True:
                    live.update(_render(status, rates, order, console.size), refresh=True)
                    key = _wait_for_key(keys, due - monotonic())
                    if key in _QUIT:
                        return
                    if not key:
                        break
                    order = key


class Rates:
    """Tasks done per second, and each drone's use of processors (1.0: one)."""

    def __init__(self) -> None:
        self._at = 0.0
        self._done: int | None = None
        self._measured: dict[int, tuple[float, float]] = {}  # when, and processor times then
        self.tasks = 0.0
        self.processor: dict[int, float] = {}  # of the drones, by number

    def update(self, status: dict[str, Any], now: float) -> None:
        done = status["tasks_done"]
        if self._done is not None:
            self.tasks = (done - self._done) / max(now - self._at, 1e-3)
        self._at, self._done = now, done
        for drone in status["drones"]:
            number, used = drone["number"], drone.get("processor")
            if used is None:
                continue
            at, before = self._measured.setdefault(number, (now, used))
            if now - at >= MIN_PROCESSOR_SECONDS:
                self.processor[number] = max(0.0, used - before) / (now - at)
                self._measured[number] = now, used


def _render(
    status: dict[str, Any], rates: Rates, order: str, size: ConsoleDimensions
) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    width, height = size
    drones = [drone | {"cpu": rates.processor.get(drone["number"])} for drone in status["drones"]]
    field = _ORDERS[order]
    if field:
        drones.sort(key=lambda drone: -(drone[field] or 0))
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
            f"{rates.tasks:,.0f}/s, {memory}"
        ),
        Text(),
        grid(_COLUMNS, [_row(drone, status["host"]) for drone in shown], width),
        Text(omitted),
    )


def _row(drone: dict[str, Any], host: str) -> tuple[object, ...]:
    row, cpu = drone_row(drone, host), drone["cpu"]
    return *row[:_CPU], "" if cpu is None else f"{cpu:.0%}", *row[_CPU:]


def _wait_for_key(keys: int, seconds: float) -> str:
    """Wait up to `seconds` for known keys. Return one that quits, or else the last, or "" if there
    were none. The end of the input quits.
    """
    deadline = monotonic() + seconds
    while select.select([keys], [], [], max(0.0, deadline - monotonic()))[0]:
        typed = os.read(keys, 64).decode(errors="replace").lower()
        known = [each for each in typed or "q" if each in _QUIT or each in _ORDERS]
        if known:
            return next((each for each in known if each in _QUIT), known[-1])
    return ""


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
