"""From command-line arguments to a pool: names, connection files, sizes, and one-line errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from ..engines.remote.client import RemotePool
    from ..wire.output import Line


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
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", value.strip().lower())
    if found is None:
        raise click.BadParameter(f"{value!r} is not a size such as 500M or 2G (in powers of 1,024)")
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2] or " "))


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Report an `OSError`, `ValueError`, `RuntimeError` or `ImportError` in one line, and exit 1.

    Such an error means that a pool or file cannot be reached, read or written, or that an optional
    package is not installed, and is no bug.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of the output is gone: click ends quietly
        raise
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise click.ClickException(error_text(error)) from error


def error_text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


@contextmanager
def connect_to(
    where: str, output: str | Callable[[Line], object] = "discard"
) -> Iterator[RemotePool]:
    """Connect to a pool for a ``with`` block, with `one_line_errors`."""
    with one_line_errors():
        from ..engines.remote.client import connect

        with connect(where, output=output) as pool:
            yield pool
