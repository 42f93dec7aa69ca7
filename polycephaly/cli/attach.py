"""`polycephaly attach`: debug a drone that waits at a `breakpoint()`."""

from __future__ import annotations

import os
import signal

import click

from .reach import one_line_errors


@click.command(
    epilog="""\b
Examples:
  polycephaly attach                  the drone that waits at a breakpoint(), if there is only one
  polycephaly attach pool-1.0         the drone of that name
  polycephaly attach lab 2            drone lab.2
"""
)
@click.argument("name", required=False)
@click.argument("drone", required=False)
def attach(name: str | None, drone: str | None) -> None:
    """Debug DRONE of pool NAME, which waits at a breakpoint(), in this terminal.

    The drone is one of yours on this machine, of any pool. Only one terminal is attached at a time.
    The command returns when the debugger's session has ended.
    """
    with one_line_errors():
        from ..wire.debugging import lend_terminal, waiting_debuggers

        if not os.isatty(0):
            raise click.ClickException("the standard input is no terminal")
        waiting = list(waiting_debuggers())
        chosen = [connection for each, connection in waiting if _is_meant(each, name, drone)]
        for _, connection in waiting:
            if chosen != [connection]:
                connection.close()
        if len(chosen) != 1:
            names = ", ".join(sorted(each for each, _ in waiting)) or "none"
            raise click.ClickException(
                f"{len(chosen)} drones match; waiting for a debugger: {names}. "
                "Give the name of one."
            )
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session ends by pdb's own commands
        lend_terminal(chosen[0], os.ttyname(0))


def _is_meant(waiting: str, name: str | None, drone: str | None) -> bool:
    if name is None:
        return True
    if drone is not None:
        return waiting in (f"{name}.{drone}", drone) and waiting.startswith(f"{name}.")
    return waiting == name or waiting.startswith(f"{name}.")
