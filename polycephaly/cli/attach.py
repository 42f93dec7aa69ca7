"""`polycephaly attach`: debug a drone that waits at a `breakpoint()`."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import click

from ..timeline.format import printable
from .reach import Command

if TYPE_CHECKING:
    from ..wire.debugging import WaitingDebugger


@click.command(cls=Command)
@click.argument("name", required=False)
@click.argument("drone", required=False)
def attach(name: str | None, drone: str | None) -> None:
    """Debug DRONE of pool NAME, which waits at a breakpoint(), in this terminal.

    The PID of the drone will do, too. The drone is one of yours on this machine, of any pool. Only
    one terminal is attached at a time. The command returns when the debugger's session has ended.

    Examples
    --------
    polycephaly attach                  the drone that waits at a breakpoint(), if there is only one
    polycephaly attach pool-1.0         the drone of that name
    polycephaly attach lab 2            drone lab.2
    polycephaly attach 30789            the process with that PID
    """
    from ..wire import debugging

    if not os.isatty(0):
        raise click.ClickException("the standard input is no terminal")
    waiting = list(debugging.waiting_debuggers())
    chosen = [each for each in waiting if _is_meant(each, name, drone)]
    for each in waiting:
        if chosen != [each]:
            each.connection.close()
    if len(chosen) != 1:
        lines = [f"{len(chosen)} drones match. Those that wait for a debugger:"]
        lines += sorted(f"{each.drone} (pid {each.pid}): {each.where}" for each in waiting)
        elsewhere = "a breakpoint opens in the terminal of its pool's process, if there is one"
        lines.append("Give the name or the PID of one." if waiting else f"none ({elsewhere})")
        raise click.ClickException("\n".join(map(printable, lines)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session ends by pdb's own commands
    debugging.lend_terminal(chosen[0].connection, os.ttyname(0))


def _is_meant(waiting: WaitingDebugger, name: str | None, drone: str | None) -> bool:
    if name is None:
        return True
    own, pid = waiting.drone, str(waiting.pid)
    if drone is not None:
        return drone in (own, own.removeprefix(f"{name}."), pid) and own.startswith(f"{name}.")
    return name in (own, pid) or own.startswith(f"{name}.")
