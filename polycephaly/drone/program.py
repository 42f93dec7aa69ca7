"""A program given as text at a command line, run in a drone as `python` would run it.

    polycephaly doit ──> Program(source, file, argv) ── a plain call ──> drone's `__main__` ──> repr

The result is text, because the user has a terminal and perhaps none of the drone's classes.
"""

from __future__ import annotations

import sys
from typing import Any

from ..wire.code_strings import compile_source
from ..wire.main_names import main_namespace
from .functions import run_if_coroutine


class Program:
    """A program; `file` is the file it was read from, or None for a code string.

    `argv` is the value of `sys.argv` while it runs.
    """

    def __init__(self, source: str, file: str | None, argv: list[str]) -> None:
        self.source = source
        self.file = file
        self.argv = argv

    @property
    def __name__(self) -> str:
        """The name that `ps` and errors show."""
        return f"code {self.source[:60]!r}" if self.file is None else self.file

    def __call__(self) -> str | None:
        """Return the `repr` of the last expression.

        None if the value is None, or the program ends with a statement.
        """
        body, last = compile_source(self.source, self.file)
        namespace = main_namespace()
        old_argv, old_file = sys.argv, {k: namespace[k] for k in ["__file__"] if k in namespace}
        sys.argv = self.argv
        if self.file is not None:
            namespace["__file__"] = self.file
        try:
            exec(body, namespace)
            value: Any = None if last is None else run_if_coroutine(eval(last, namespace))
            return None if value is None else repr(value)
        finally:
            sys.argv = old_argv
            namespace.pop("__file__", None)
            namespace.update(old_file)
