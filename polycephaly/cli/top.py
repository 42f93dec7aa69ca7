"""`polycephaly top`: like `ps`, updated continuously.

    status() at each update ──> picture ──> rich's Live, on the terminal's alternate screen
    keys ── cbreak ──> order of the drones; selection; interrupt, kill; leave

The terminal is restored after a key, Ctrl-C, SIGTERM, SIGHUP or the end of the pool.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import time
from typing import TYPE_CHECKING, Any

import click

from ..runtime.clock import monotonic
from ..timeline.format import count
from .listing import DRONES, drone_row
from .reach import POOL_NAME, Command, Seconds, connect_to
from .tables import Column, duration, grid, is_terminal, mebibytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..engines.remote.client import RemotePool

_QUIT = ("q", "\x03")
_ORDERS = {"n": "", "c": "cpu", "m": "memory", "d": "tasks_done"}
"""For each key, the field by which drones are sorted, the largest first; "": the pool's order."""
_MOVES = {"\x1b[A": -1, "\x1bOA": -1, "\x1b[B": 1, "\x1bOB": 1}  # arrows
# A control sequence (also one of a key that is not known here), Alt and a key, or a character.
_KEY = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|\x1b.|[^\x1b]", re.DOTALL)
MIN_PROCESSOR_SECONDS = 0.9
"""The shortest time over which the use of processors is computed: the kernel counts hundredths of
a second, and joined hosts report once a second.
"""
OTHER_LINES = 7  # on the screen, beside those of drones
NARROW = 80  # columns of a terminal; with fewer there is no room for all of the table's
_LEFT_OUT_IF_NARROW = ("PID", "MEMORY", "CLIENT")
_HELP = "q: leave  \u2191\u2193: select  i: interrupt  k: kill  c m d n: order"
_CPU = 5
_COLUMNS = (*DRONES[:_CPU], Column("CPU", right=True), *DRONES[_CPU:])


@click.command(cls=Command)
@POOL_NAME
@click.option(
    "--every",
    type=Seconds(0.05, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
def top(name: str, every: float) -> None:
    """Show the state of the drones of pool NAME, live.

    Examples
    --------
    polycephaly top lab
    polycephaly top lab --every 0.2

    Notes
    -----
    CPU is the processor time per second, measured over about a second or --every if that is longer;
    100 % is one processor.

    Keys: c, m and d put the drones with the most CPU, MEMORY and DONE first, n sorts them by
    number. The arrows up and down select a drone; i interrupts its task, k kills it. q or Ctrl-C
    ends the command. For a single report, or for programs, use polycephaly ps.
    """
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        raise click.ClickException(
            f"top needs a terminal; for a single report use: polycephaly ps {name}"
        )
    with suppress(KeyboardInterrupt), connect_to(name) as pool:
        from rich.console import Console
        from rich.live import Live

        rates, order, console = Rates(), "n", Console()
        selected: int | None = None
        with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                status, due = pool.status(), monotonic() + every
                rates.update(status, monotonic())
                while True:
                    drones = _sort(status["drones"], _ORDERS[order])
                    drones = drones[: max(1, console.height - OTHER_LINES)]
                    picture = _render(status, drones, rates.tasks, selected, console.width)
                    live.update(picture, refresh=True)
                    key = keys.next(due - monotonic())
                    if key in _QUIT:
                        return
                    if key in _ORDERS:
                        order = key
                    elif key in _MOVES and drones:
                        selected = _move(drones, selected, _MOVES[key])
                    elif key in ("i", "k"):
                        for drone in drones:  # only those on the screen
                            if drone["number"] == selected:
                                _act(pool, key, drone)
                    if not key or monotonic() >= due:
                        break


class Rates:
    """Tasks done per second, and each drone's use of processors (1.0: one), added as its "cpu"."""

    def __init__(self) -> None:
        self._at = 0.0
        self._done: int | None = None
        self._measured: dict[int, tuple[float, float]] = {}  # when, and processor times then
        self.tasks = 0.0
        self._cpu: dict[int, float] = {}  # of the drones, by number

    def update(self, status: dict[str, Any], now: float) -> None:
        done = status["tasks_done"]
        if self._done is not None:
            self.tasks = (done - self._done) / max(now - self._at, 1e-3)
        self._at, self._done = now, done
        for drone in status["drones"]:
            number, used = drone["number"], drone.get("processor")
            if used is not None:
                at, before = self._measured.setdefault(number, (now, used))
                if now - at >= MIN_PROCESSOR_SECONDS:
                    self._cpu[number] = max(0.0, used - before) / (now - at)
                    self._measured[number] = now, used
            drone["cpu"] = self._cpu.get(number)


def _sort(drones: list[dict[str, Any]], field: str) -> list[dict[str, Any]]:
    return sorted(drones, key=lambda drone: -(drone[field] or 0)) if field else drones


def _move(drones: list[dict[str, Any]], selected: int | None, step: int) -> int:
    """Return the number of the drone above or below the selected one; the first if none was."""
    numbers = [drone["number"] for drone in drones]
    if selected not in numbers:
        return int(numbers[0])
    return int(numbers[min(max(0, numbers.index(selected) + step), len(numbers) - 1)])


def _act(pool: RemotePool, key: str, drone: dict[str, Any]) -> None:
    from ..engines.remote.drone import RemoteDrone, RemoteHandle

    handle = RemoteHandle(drone["number"], drone["name"], drone["pid"], drone["host"])
    target = RemoteDrone(pool, handle)
    with suppress(RuntimeError):  # the drone has ended
        target.kill() if key == "k" else target.interrupt()


def _render(
    status: dict[str, Any],
    shown: list[dict[str, Any]],
    rate: float,
    selected: int | None,
    width: int,
) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    drones = status["drones"]
    busy = sum(drone["state"] == "busy" for drone in drones)
    others = status["clients"] - 1
    up = duration(time() - status["started"])
    memory = mebibytes(sum(drone["memory"] or 0 for drone in drones))
    kept = [
        place
        for place, column in enumerate(_COLUMNS)
        if width >= NARROW or column.title not in _LEFT_OUT_IF_NARROW
    ]
    rows = [_row(drone, status["host"], selected) for drone in shown]
    omitted = f"... and {len(drones) - len(shown)} more drones" if len(shown) < len(drones) else ""
    return Group(
        Text(f"{status['name']}  process {status['pid']} on {status['host']}, up {up}", "bold"),
        Text(
            f"{busy} of {len(drones)} drones busy, {status['queued']} queued, "
            f"{count(others, 'other client')}, {status['tasks_done']:,} done, "
            f"{rate:,.0f}/s, {memory}"
        ),
        Text(),
        grid([_COLUMNS[place] for place in kept], [[row[place] for place in kept] for row in rows]),
        Text(omitted),
        Text(_HELP, "dim", no_wrap=True, overflow="ellipsis"),
    )


def _row(drone: dict[str, Any], host: str, selected: int | None) -> tuple[object, ...]:
    (name, *row), cpu = drone_row(drone, host), drone["cpu"]
    row.insert(_CPU - 1, "" if cpu is None else f"{cpu:.0%}")
    return f"> {name}" if drone["number"] == selected else name, *row


class Keys:
    """The keys that are typed, in order; letters in lower case. The end of the input is a ``q``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._typed: deque[str] = deque()

    def next(self, seconds: float) -> str:
        """Return the next key, or "" if there is none within `seconds`."""
        if not self._typed and select.select([self._fd], [], [], max(0.0, seconds))[0]:
            typed = os.read(self._fd, 64).decode(errors="replace") or "q"
            self._typed.extend(re.findall(_KEY, typed))
        key = self._typed.popleft() if self._typed else ""
        return key if key in _MOVES else key.lower()


@contextmanager
def _keys() -> Iterator[Keys]:
    """Set the terminal to deliver each key at once without echo."""
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
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)
