"""The `polycephaly` command.

Each subcommand is a module of this package that imports what it runs when it runs: `--help` is quick.
"""

from __future__ import annotations

from typing import Any

import click

from polycephaly import __version__
from polycephaly.cli.demo import demo

INTERRUPTED = 130


class PoliteGroup(click.Group):
    """Ctrl-C ends it with the status that shells expect (128 + SIGINT), and without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(
    cls=PoliteGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: polycephaly demo securities --drones 1,2,8",
)
@click.version_option(__version__, prog_name="polycephaly", message="%(prog)s %(version)s")
def main() -> None:
    """One Python image grows more heads: forked drones, promises, and code that travels."""


main.add_command(demo)
