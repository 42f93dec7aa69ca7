"""The `polycephaly` command.

    start ──> daemon (forks, reports the start) ──> serving: a named pool, until its end ──> journal
    list, ps, top, stacks, dashboard, doit, logs, stop, ... ──> reach: connect ──> tables: show it
    demo ──> pools of its own

Each subcommand imports its dependencies when it runs, so that `--help` is quick. Exit statuses: 0
success; 1 failure, with one line that says why (or the traceback of the user's own code); 2 a wrong
command line; 130 Ctrl-C.
"""

from __future__ import annotations

from typing import Any

import click

from .._compat import check_platform

try:
    check_platform()
except ImportError as error:
    raise SystemExit(f"Error: {error}") from None

from ..runtime.version import __version__
from .attach import attach
from .control import cancel, interrupt, refresh, resize, stop
from .demo import demo
from .doit import doit
from .join import join
from .listing import dashboard, list_pools, ps
from .logs import logs
from .reach import ERRORS, error_text
from .stacks import stacks
from .start import start
from .top import top

INTERRUPTED = 130


class PoliteGroup(click.Group):
    """A group that reports `ERRORS` in one line, with the status 1. After Ctrl-C it ends without a
    traceback, with the status 128 + SIGINT.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except (click.Abort, click.exceptions.Exit, BrokenPipeError):  # click ends quietly
            raise
        except ERRORS as error:
            raise click.ClickException(error_text(error)) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "bench":
            ctx.fail("there is no command 'bench': run `python -m benchmarks` in a clone")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of use, not the alphabet's


@click.group(
    cls=PoliteGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  polycephaly start lab -n 4 --daemonize      a pool of four drones, in the background
  polycephaly doit lab "sum(range(10))"       45
  polycephaly ps lab                          the state of its drones
  polycephaly stop lab

From Python: polycephaly.connect("lab")
""",
)
@click.version_option(__version__, prog_name="polycephaly", message="%(prog)s %(version)s")
def main() -> None:
    """Run Python functions and code in forked copies of a process, called drones."""


@click.command(
    epilog="""\b
Put one of these where your shell begins:
  eval "$(polycephaly completion bash)"          ~/.bashrc
  eval "$(polycephaly completion zsh)"           ~/.zshrc, after compinit
  polycephaly completion fish | source           ~/.config/fish/config.fish
"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "polycephaly", "_POLYCEPHALY_COMPLETE").source())


for command in (
    start, list_pools, ps, top, stacks, dashboard, doit, logs, interrupt, cancel, refresh, resize,
    attach, stop, join, demo, completion,
):  # fmt: skip
    main.add_command(command)
