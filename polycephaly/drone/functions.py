"""What a drone can be asked to do: callables and code strings that the hub has defined here.

A definition arrives as bytes and is opened when it is first called, by the thread that runs work,
so that an error in opening it rejects that call and nothing else."""

from __future__ import annotations
import __future__

import ast
import itertools
import linecache
import textwrap
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from ..runtime.coroutines import is_coroutine
from ..store.references import load, load_beside, load_joined
from ..wire.messages import CALL, CALL_FILLED, CALL_KEYWORDS, DEFINE_CODE, DEFINE_OVERLAPPING
from ..wire.pickling import looked_up, main_namespace
from ..wire.slices import TOGETHER

__all__ = ["LoadedFunction", "compiled", "define", "filled", "finished"]

_CODE_SHOWN = 1000
"""So many code strings keep their source lines for tracebacks."""


_values: Sequence[Any] = ()  # of promises, while the arguments are opened among which they were


def filled(index: int) -> Any:
    """In pickled arguments: the value of a promise, which goes beside them."""
    return _values[index]


class LoadedFunction:
    """One callable or code string, called with pickled arguments."""

    def __init__(self, payload: Any) -> None:
        self._payload = payload  # bytes, or `Received`

    overlaps = False
    """It gives coroutines, to be run beside others."""

    brief = False
    """Its last call was: no more is measured than what costs nothing."""

    def relays(self) -> bool:
        """Whether it is another process's work, which says itself on whose behalf it prints: see
        forwarded.py."""
        return False

    def call(self, kind: int, payload: Any) -> Any:
        """Its value; a coroutine is run to its end, as a green thread."""
        return finished(self.begin(kind, payload))

    def call_with(self, args: tuple[Any, ...]) -> Any:
        """The same, of arguments that are here already."""
        raise NotImplementedError

    def begin(self, kind: int, payload: Any) -> Any:
        """Its value, or a coroutine that is still to be run."""
        raise NotImplementedError

    def function(self, fresh: bool) -> Callable[..., Any]:
        """What is called; `fresh`: unpickled once more."""
        raise NotImplementedError


class _Callable(LoadedFunction):
    _function: Callable[..., Any] | None = None
    _free: tuple[str, ...] = ()

    def relays(self) -> bool:
        return getattr(self._function, "relays", False) is True

    def begin(self, kind: int, payload: Any) -> Any:
        function = self.function(False)
        try:
            args, kwargs = _arguments(kind, payload)
        except BaseException as error:
            error.add_note(
                f"while unpickling the arguments of {getattr(function, '__qualname__', function)}"
            )
            raise
        return function(*args, **kwargs)

    def call_with(self, args: tuple[Any, ...]) -> Any:
        function = self._function
        if function is None or self._free:
            function = self.function(False)
        value = function(*args)
        return value if type(value) in TOGETHER else finished(value)

    def function(self, fresh: bool) -> Callable[..., Any]:
        function = self._function
        if function is None or fresh:
            function = self._open()
        if self._free:
            _graft(function, self._free)
        return function

    def _open(self) -> Callable[..., Any]:
        looked_up.clear()
        try:
            function: Callable[..., Any] = load(self._payload)
        except BaseException as error:
            error.add_note("while unpickling the work itself")
            raise
        if type(function) is FunctionType and function.__module__ == "__main__":
            self._free = tuple({*_free_names(function), *looked_up})
        self._function = function
        return function


def finished(value: Any) -> Any:
    """`value`; of a coroutine, what it comes to when it is run to its end as a green thread."""
    if is_coroutine(value):
        from ..green import run

        return run(value)
    return value


class _Code(LoadedFunction):
    _body: CodeType | None = None
    _last: CodeType | None = None

    def begin(self, kind: int, payload: Any) -> Any:
        if self._body is None:
            self._compile()
        namespace = main_namespace()
        exec(self._body, namespace)  # type: ignore[arg-type]
        return None if self._last is None else eval(self._last, namespace)

    def call_with(self, args: tuple[Any, ...]) -> Any:
        return self.call(CALL, b"")

    def _compile(self) -> None:
        source = self._payload.decode("utf-8", "surrogatepass")
        self._body, self._last = compiled(source)
        self._payload = b""


def compiled(source: str, file: str | None = None) -> tuple[CodeType, CodeType | None]:
    """The statements, and the last expression if there is one. Tracebacks will show the lines of
    `source`.

    A code string (there is no `file`) may be indented as a whole, and the ``from __future__
    import`` of those before it holds for it too, as at a prompt."""
    global _features
    name = file or f"<doit {next(_doits)}>"
    flags = _features if file is None else 0
    try:
        tree = _parsed(source, name, flags)
    except IndentationError:
        if file is not None or not source[:1].isspace():
            raise
        tree = None
    tree = tree or _parsed(textwrap.dedent(source), name, flags)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    body = compile(tree, name, "exec", flags, dont_inherit=True)
    flags |= body.co_flags & _FUTURE
    if file is None:
        _features = flags
    if not isinstance(last, ast.Expr):
        return body, None
    return body, compile(ast.Expression(last.value), name, "eval", flags, dont_inherit=True)


def _parsed(source: str, name: str, flags: int) -> ast.Module:
    if name not in linecache.cache:
        _shown.append(name)
        if len(_shown) > _CODE_SHOWN:
            linecache.cache.pop(_shown.pop(0), None)
    linecache.cache[name] = (len(source), None, [f"{line}\n" for line in source.split("\n")], name)
    tree: ast.Module = compile(source, name, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    return tree


_FUTURE = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
_features = 0  # of these, what code strings have asked for
_doits = itertools.count(1)
_shown: list[str] = []


def define(kind: int, payload: Any) -> LoadedFunction:
    if kind == DEFINE_CODE:
        return _Code(payload)
    callable_ = _Callable(payload)
    callable_.overlaps = kind == DEFINE_OVERLAPPING
    return callable_


def _arguments(kind: int, payload: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    global _values
    if kind == CALL:
        return (load(payload) if len(payload) else ()), {}
    if kind == CALL_KEYWORDS:
        args, kwargs = load(payload)
        return args, kwargs
    assert kind == CALL_FILLED
    beside, (outer, inner, *parts) = load_joined(payload)
    values = load_beside(*inner)
    for index, part in zip(beside, parts, strict=True):  # of what did not come to the controller
        values[index] = load_beside(*part)
    _values = values
    try:
        args, kwargs = load_beside(*outer)
    finally:
        _values = ()
    return args, kwargs


# A function of `__main__` that came by value has a namespace of its own, with what it captured.
# What it names beyond that (it was there at the snapshot, or was pushed here) is this image's
# `__main__`'s, as it is at each call.


def _graft(function: Any, names: tuple[str, ...]) -> None:
    namespace, main = function.__globals__, main_namespace()
    for name in names:
        if name in main:
            namespace[name] = main[name]


def _free_names(function: FunctionType) -> Iterator[str]:
    namespace = function.__globals__
    if namespace is main_namespace():
        return
    functions = [function, *(f for f in namespace.values() if isinstance(f, FunctionType))]
    codes = [f.__code__ for f in functions if f.__globals__ is namespace]
    seen: set[str] = set()
    while codes:
        code = codes.pop()
        seen.update(code.co_names)
        codes.extend(c for c in code.co_consts if isinstance(c, CodeType))
    yield from seen - namespace.keys()
