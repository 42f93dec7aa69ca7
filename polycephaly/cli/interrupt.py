"""`polycephaly interrupt`: interrupt what drones run."""

from __future__ import annotations

import click

from .reach import complete_pool, connect_to, one_line_errors


@click.command(
    epilog="""\b
Examples:
  polycephaly interrupt lab               what all drones run
  polycephaly interrupt lab lab.0 lab.3   what these run
"""
)
@click.argument("name", shell_complete=complete_pool)
@click.argument("drones", nargs=-1, metavar="[DRONE]...")
def interrupt(name: str, drones: tuple[str, ...]) -> None:
    """Interrupt the running tasks of pool NAME, or those of its DRONEs only.

    Each task gets a KeyboardInterrupt, as from Ctrl-C. Whoever submitted it gets that error.
    """
    with one_line_errors(), connect_to(name) as pool:
        known = pool.drones  # drones of joined hosts may have the same name
        names = [each.name for each in known]
        missing = [each for each in drones if each not in names]
        if missing:
            raise click.ClickException(
                f"{name} has no drone {missing[0]!r}, but {', '.join(names) or 'none'}"
            )
        for each in known:
            if not drones or each.name in drones:
                each.interrupt()
