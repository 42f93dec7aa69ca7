"""From what was typed to a pool: names, connection files, sizes, and what is said where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from polycephaly.net.client import RemotePool
    from polycephaly.net.keys import Card
    from polycephaly.output import Line

__all__ = ["MEMORY", "POOL", "card_of", "one_line", "reached", "said"]

PATIENCE = 5.0  # seconds for an answer


class _Pool(click.ParamType):
    """The name of a running pool, or the path of a connection file (with a ``/`` in it)."""

    name = "pool"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if "/" in incomplete:
            return [CompletionItem(incomplete, type="file")]
        from polycephaly.net import places

        try:
            return [CompletionItem(card.name) for card in places.running() if card.name.startswith(incomplete)]
        except OSError:
            return []


class _Memory(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(value).strip().lower())
        if found is None:
            self.fail(f"{value!r} is no size such as 500M or 2G (of 1,024 each)", param, ctx)
        return int(float(found[1]) * 1024 ** " kmgt".index(found[2] or " "))


POOL = _Pool()
MEMORY = _Memory()


@contextmanager
def one_line() -> Iterator[None]:
    """What cannot be reached, read or written is no bug of ours: one line, status 1."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # a ConnectionError is an OSError
        raise click.ClickException(said(error)) from error


def said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def card_of(where: str) -> Card:
    """Its connection file. Raises as `connect` does."""
    from polycephaly.net import places
    from polycephaly.net.keys import Card

    return Card.read(where) if "/" in where else places.find(where)


def reached(where: str, output: str | Callable[[Line], object] = "discard") -> RemotePool:
    """The pool; a `click.ClickException` where there is none, or it does not answer."""
    with one_line():
        from polycephaly.net.client import connect

        return connect(where, timeout=PATIENCE)
