"""A program that somebody hands over as text, at a command line: run as `python` would run it, in a
drone.

    polycephaly doit ──> Program(source, file, argv) ── a call like any other ──> `__main__` of a drone ──> repr

What comes back is text: who typed it has a terminal, and perhaps none of the classes that the drone
has."""

from __future__ import annotations

import sys
from typing import Any

from ..wire.pickling import main_namespace
from .functions import compiled, finished

__all__ = ["Program"]

_NOT_THERE = object()


class Program:
    """`file` is where it was read, or None for a code string; `argv` is what `sys.argv` shall be
    meanwhile."""

    def __init__(self, source: str, file: str | None, argv: list[str]) -> None:
        self.source = source
        self.file = file
        self.argv = argv

    @property
    def __name__(self) -> str:
        """By which `ps` and errors call it."""
        return f"code {self.source[:60]!r}" if self.file is None else self.file

    def __call__(self) -> str | None:
        """The `repr` of its last expression; None where that is None, or the last is no
        expression."""
        body, last = compiled(self.source, self.file)
        namespace = main_namespace()
        kept_argv, kept_file = sys.argv, namespace.get("__file__", _NOT_THERE)
        sys.argv = self.argv
        if self.file is not None:
            namespace["__file__"] = self.file
        try:
            exec(body, namespace)
            value: Any = None if last is None else finished(eval(last, namespace))
            return None if value is None else repr(value)
        finally:
            sys.argv = kept_argv
            if kept_file is not _NOT_THERE:
                namespace["__file__"] = kept_file
            else:
                namespace.pop("__file__", None)
