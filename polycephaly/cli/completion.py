"""`polycephaly completion`: shell completion of commands, options and names of running pools."""

from __future__ import annotations

import click


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
