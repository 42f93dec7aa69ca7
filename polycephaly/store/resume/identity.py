"""The name by which a later run knows a function, and a digest of all that it is made of.

The digest shows whether the function itself has changed: its source, defaults, closure, and the
arguments of a `partial`. What it calls is not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from textwrap import dedent
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from ...errors import type_with_article
from ...runtime.signal_handlers import is_of_signal_handler
from .encoding import Encoder


class Identity(NamedTuple):
    """The name of a function, and the digest of its parts."""

    name: str
    digest: bytes


def identify(fn: Callable[..., Any], *, has_keys: bool) -> Identity:
    """Return the identity of `fn`. If the user gives the keys of items (`has_keys`), its name need
    not be unique.

    Raises `TypeError` for a function that has no name of its own.
    """
    module, name = _name_of(fn)
    if not has_keys:
        what = None
        if name.endswith("<lambda>"):
            what = "a lambda"
        elif "<locals>" in name and not _is_function(_innermost(fn)):
            what = "a local class"
        if what is not None:
            raise TypeError(
                f"{name} is {what}, so a later run would not know its calls by its name: use a "
                "function of a module or of the program (def), or give key=, a function from an "
                "item to a string"
            )
    encoder = _ByContent()
    encoder.add_callable(fn)
    return Identity(f"{module}:{name}", blake2b(b"".join(encoder.parts), digest_size=16).digest())


def _innermost(fn: Any) -> Any:
    while isinstance(fn, (partial, MethodType)):
        fn = fn.func if isinstance(fn, partial) else fn.__func__
    return fn


def _is_function(fn: Any) -> bool:
    """Return whether `fn` has a name of its own, and is no class."""
    return isinstance(getattr(fn, "__qualname__", None), str) and not isinstance(fn, type)


def _name_of(fn: Any) -> tuple[str, str]:
    fn = _innermost(fn)
    if not isinstance(getattr(fn, "__qualname__", None), str):
        fn = type(fn)
    return getattr(fn, "__module__", None) or "builtins", fn.__qualname__


class _ByContent(Encoder):
    """Functions are what they are made of, and what has no encoding is its type only."""

    def add_callable(self, fn: Any) -> None:
        """Append the parts of the function of a map."""
        if isinstance(fn, partial):
            self.parts.append(b"P")
            self.add_callable(fn.func)
            self.add((fn.args, sorted(fn.keywords.items())))
        elif isinstance(fn, MethodType):
            self.parts.append(b"M")
            self.add_callable(fn.__func__)
            self.add(fn.__self__)
        elif isinstance(fn, FunctionType):
            self.add(fn)
        elif isinstance(fn, type):
            self.add((_source_of(fn), *_name_of(fn)))
        else:
            call = vars(type(fn)).get("__call__")
            wrapped = getattr(fn, "__wrapped__", None)  # as of functools.lru_cache
            self.add((_name_of(fn), call if isinstance(call, FunctionType) else None, wrapped))
            if wrapped is None:
                self.add(fn)

    def add_object(self, value: Any) -> None:
        mark = self.mark()
        try:
            super().add_object(value)
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            self.go_back(mark)
            named = value if isinstance(value, ModuleType) else type(value)
            self.add(("?", getattr(named, "__qualname__", named.__name__)))

    def add_function(self, function: Any) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.parts.append(b"C")
        self.add(
            (
                function.__qualname__,
                _source_of(function) or _content_of(function.__code__),
                function.__defaults__,
                sorted((function.__kwdefaults__ or {}).items()),
                [(name, _content(cell)) for name, cell in cells],
            )
        )


def _content(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty yet
        return ()


def _source_of(defined: Any) -> str | None:
    """Return the source text of a function or class; None if there is none, as at a prompt."""
    from inspect import getsource

    try:
        text = dedent(getsource(defined))
    except (OSError, TypeError):
        return None
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()


def _content_of(code: CodeType) -> tuple[Any, ...]:
    """Return what stands for the source of code that has none; another on each Python."""
    constants = [
        _content_of(each) if isinstance(each, CodeType) else each for each in code.co_consts
    ]
    return sys.version_info[:2], code.co_code, code.co_names, code.co_varnames, constants


def describe_unkeyed(item: object, error: BaseException) -> str:
    """Return why `item` has no key, and the cure."""
    return (
        f"{type_with_article(item)}, has no key by which a later run would find its result "
        f"({error or type(error).__name__}): give key=, a function from an item to a string"
    )
