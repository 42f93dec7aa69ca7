"""From command-line arguments to a pool: names, connection files, sizes, and its errors."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ..runtime.checks import check_bytes

if TYPE_CHECKING:
    from ..engines.remote.client import RemotePool
    from ..wire.output import Line


_SECTION = re.compile(r"\n\n(?:Examples|Notes)\n-+\n")


class Command(click.Command):
    """A command whose help has the examples and notes of its docstring below the options."""

    def __init__(self, name: str | None, *, help: str | None, **options: Any) -> None:
        text, *sections = _SECTION.split(inspect.cleandoc(help or ""))
        parts = [part for each in sections for part in each.split("\n\n")]
        if parts:
            parts[0] = f"Examples:\n{textwrap.indent(parts[0], '  ')}"
        epilog = "\n\n".join(f"\b\n{part}" for part in parts)  # \b: click keeps the line ends
        super().__init__(name, help=text, epilog=epilog, **options)


class Seconds(click.FloatRange):
    """A number of seconds in a range. `click.FloatRange` lets nan through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if isnan(number):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return number


SECONDS = Seconds(min=0, min_open=True)


def complete_pool(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete names of running pools, or paths of connection files if there is a ``/``."""
    if "/" in incomplete:
        return [CompletionItem(incomplete, type="file")]
    from ..engines.remote import pool_registry

    try:
        return [
            CompletionItem(card.name)
            for card in pool_registry.running_cards()
            if card.name.startswith(incomplete)
        ]
    except OSError:
        return []


POOL_NAME = click.argument("name", default="default", shell_complete=complete_pool)
"""The name of a pool; that of ``polycephaly start`` without a name, if none is given."""


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def parse_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Convert a size such as 500M to bytes."""
    try:
        return None if value is None else check_bytes("size", value)
    except ValueError as error:
        raise click.BadParameter(str(error).removeprefix("size: ")) from None


ERRORS = (OSError, ValueError, RuntimeError, ImportError)
"""Errors that commands report in one line: a pool or a file cannot be reached, read or written, or
an optional package is not installed.
"""


def error_text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def connect_for_requests(where: str) -> RemotePool:
    from ..engines.remote import client

    return client.connect_for_requests(where)


def connect_to(where: str, output: str | Callable[[Line], object] = "discard") -> RemotePool:
    from ..engines.remote.client import connect

    return connect(where, output=output)
