"""Functions and code strings that the controller has defined in a drone.

A function arrives as bytes and is unpickled at its first call, by the thread that runs tasks. So an
unpickling error rejects that call only.
"""

from __future__ import annotations
import __future__

import _ast  # not `ast`, which takes a millisecond, and is a file: a task may have changed the root
import itertools
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

from ..memory.references import load, load_joined, load_with_buffers
from ..runtime.coroutines import is_coroutine
from ..runtime.sources import set_source
from ..wire.main_names import FreeNames, bind_names, collected_free_names, main_namespace
from ..wire.messages import CALL, CALL_FILLED, CALL_KEYWORDS, DEFINE_CODE, DEFINE_OVERLAPPING, FRESH
from ..wire.placeholders import promised_values
from ..wire.slices import BATCHED_TYPES

if TYPE_CHECKING:
    import ast


class LoadedFunction:
    """A callable, called with pickled arguments. A code string is one without arguments."""

    overlaps = False
    """True if calls give coroutines that are run beside others."""

    fresh = False
    """True if each call gets a function object of its own, because it may change what it captured.
    """

    brief = False
    """True if the last call was brief: then only measurements that cost nothing are made."""

    # Names that were in `__main__` at the snapshot, or pushed. They are looked up at each call,
    # because a task may have bound them to other objects.
    _free_names: FreeNames = {}  # noqa: RUF012 - not changed

    def __init__(self, payload: Any, function: Callable[..., Any] | None = None) -> None:
        self._payload = payload  # bytes, or `Received`
        self._function = function

    def sets_tag(self) -> bool:
        """Return True if calls set the output tag of a client themselves: see forwarded.py."""
        return getattr(self._function, "sets_tag", False) is True

    def call(self, kind: int, payload: Any) -> Any:
        """Return the value of a call; a coroutine is run to its end, as a green thread."""
        return run_if_coroutine(self.begin(kind, payload))

    def call_with(self, args: tuple[Any, ...]) -> Any:
        """Return the value of a call with unpickled arguments."""
        function = self._function
        if function is None or self.fresh or self._free_names:
            function = self.function(self.fresh)
        value = function(*args)
        return value if type(value) in BATCHED_TYPES else run_if_coroutine(value)

    def begin(self, kind: int, payload: Any) -> Any:
        """Return the value of a call, or a coroutine that is still to be run."""
        function = self.function(self.fresh)
        try:
            args, kwargs = _arguments(kind, payload)
        except BaseException as error:
            error.add_note(
                f"while unpickling the arguments of {getattr(function, '__qualname__', function)}"
            )
            raise
        return function(*args, **kwargs)

    def function(self, fresh: bool) -> Callable[..., Any]:
        """Return the callable; if `fresh`, unpickle it once more."""
        function = self._function
        if function is None or fresh:
            function = self._open()
        for namespace, names in self._free_names.values():
            bind_names(namespace, names)
        return function

    def _open(self) -> Callable[..., Any]:
        try:
            with collected_free_names() as self._free_names:
                function: Callable[..., Any] = load(self._payload)
        except BaseException as error:
            error.add_note("while unpickling the function itself")
            raise
        self._function = function
        return function


def run_if_coroutine(value: Any) -> Any:
    """Return `value`, or, for a coroutine, its result after a run as a green thread."""
    if is_coroutine(value):
        from ..green import run

        return run(value)
    return value


class _Code:
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


def define(kind: int, payload: Any) -> LoadedFunction:
    if kind == DEFINE_CODE:
        return LoadedFunction(b"", _Code(payload))
    definition = LoadedFunction(payload)
    definition.overlaps = kind & ~FRESH == DEFINE_OVERLAPPING
    definition.fresh = bool(kind & FRESH)
    return definition


def _arguments(kind: int, payload: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if kind == CALL:
        return (load(payload) if len(payload) else ()), {}
    if kind == CALL_KEYWORDS:
        args, kwargs = load(payload)
        return args, kwargs
    assert kind == CALL_FILLED
    separate, (outer, inner, *parts) = load_joined(payload)
    values = load_with_buffers(*inner)
    # Of values that did not pass through the controller.
    for index, part in zip(separate, parts, strict=True):
        values[index] = load_with_buffers(*part)
    promised_values.values = values
    try:
        args, kwargs = load_with_buffers(*outer)
    finally:
        promised_values.values = ()
    return args, kwargs
