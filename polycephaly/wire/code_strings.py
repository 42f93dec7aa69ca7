"""Code strings, as the process that runs them compiles and runs them: as at a prompt."""

from __future__ import annotations
import __future__

import _ast  # not `ast`, which takes a millisecond, and is a file: a task may have changed the root
import itertools
import textwrap
from types import CodeType
from typing import TYPE_CHECKING, Any

from ..runtime.sources import set_source
from .main_names import main_namespace

if TYPE_CHECKING:
    import ast


class Code:
    """A code string, compiled at its first call, so that an error rejects that call only."""

    _compiled: tuple[CodeType, CodeType | None] | None = None

    def __init__(self, source: bytes) -> None:
        self._source = source

    def __call__(self) -> Any:
        if self._compiled is None:
            self._compiled = compile_source(self._source.decode("utf-8", "surrogatepass"))
        body, last = self._compiled
        namespace = main_namespace()
        exec(body, namespace)
        return None if last is None else eval(last, namespace)


def compile_source(source: str, file: str | None = None) -> tuple[CodeType, CodeType | None]:
    """Return the compiled statements, and the last expression if there is one.

    Tracebacks will show the lines of `source`. A code string (without `file`) may be indented as a
    whole, and the ``from __future__ import`` of earlier ones holds for it too, as at a prompt.
    """
    global _future_flags
    name = file or f"<doit {next(_source_numbers)}>"
    flags = _future_flags if file is None else 0
    try:
        tree = _parse(source, name, flags)
    except IndentationError:
        if file is not None or not source[:1].isspace():
            raise
        tree = None
    tree = tree or _parse(textwrap.dedent(source), name, flags)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, _ast.Expr):
        tree.body.pop()
    body = compile(tree, name, "exec", flags, dont_inherit=True)
    flags |= body.co_flags & _ALL_FUTURE_FLAGS
    if file is None:
        _future_flags = flags
    if not isinstance(last, _ast.Expr):
        return body, None
    return body, compile(_ast.Expression(last.value), name, "eval", flags, dont_inherit=True)


def _parse(source: str, name: str, flags: int) -> ast.Module:
    set_source(name, [f"{line}\n" for line in source.split("\n")])
    tree: ast.Module = compile(source, name, "exec", flags | _ast.PyCF_ONLY_AST, dont_inherit=True)
    return tree


_ALL_FUTURE_FLAGS = sum(
    {getattr(__future__, name).compiler_flag for name in __future__.all_feature_names}
)
_future_flags = 0  # those that code strings have requested
_source_numbers = itertools.count(1)
