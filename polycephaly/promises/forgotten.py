"""Errors that name the cure where `.value` was forgotten, or a name of another library was meant.

Operators that are not here would change what a promise seems to be: with ``__iter__`` it would be
an `Iterable`, with ``__call__`` a callable, and code asks for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

C = TypeVar("C", bound=type[Any])

CURE = "a promise is a value to come: take its .value, or await it"

NAMES_HERE = {
    "get": ".value, or .result(timeout)",
    "join": ".value, or .result(timeout)",
    "wait": "concurrent.futures.wait([promise], timeout)",
    "ready": ".done()",
    "successful": ".done() and .exception() is None",
    "results": ".value",
    "compute": ".value",
    "error": ".exception()",
}
"""Names of other libraries' promises, and what to use here."""

_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@",
}  # fmt: skip
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_OTHERS = {
    "__getitem__": "is not subscriptable, and not iterable",
    "__contains__": "is no container",
    "__len__": "has no length",
    **dict.fromkeys(("__int__", "__float__", "__neg__", "__pos__", "__abs__"), "is no number"),
}


def shown_as_promise(cls: C) -> C:
    """Let Python's own errors call the instances of `cls` what users call them."""
    cls.__name__ = "Promise"
    return cls


def _type_name(value: object) -> str:
    return repr(type(value).__name__)


def _binary(symbol: str) -> Callable[[object, object], NoReturn]:
    def refuse(left: object, right: object, *_: object) -> NoReturn:
        names = f"{_type_name(left)} and {_type_name(right)}"
        raise TypeError(f"unsupported operand type(s) for {symbol}: {names}: {CURE}")

    return refuse


def _reflected(symbol: str) -> Callable[[object, object], NoReturn]:
    def refuse(right: object, left: object, *_: object) -> NoReturn:
        _binary(symbol)(left, right)

    return refuse


def _comparison(symbol: str) -> Callable[[object, object], NoReturn]:
    def refuse(left: object, right: object) -> NoReturn:
        names = f"{_type_name(left)} and {_type_name(right)}"
        raise TypeError(f"{symbol!r} not supported between instances of {names}: {CURE}")

    return refuse


def _other(text: str) -> Callable[..., NoReturn]:
    def refuse(promise: object, *_: object) -> NoReturn:
        raise TypeError(f"{_type_name(promise)} object {text}: {CURE}")

    return refuse


class ForgottenValue:
    """What a promise answers to those who take it for its value."""

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers would accept any name, and any format

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{_type_name(self)} object has no attribute {name!r}"
            if name in NAMES_HERE:
                text += f": use {NAMES_HERE[name]}"
            elif not name.startswith("_"):
                text += f": {CURE}"
            raise AttributeError(text, name=name, obj=self)

        def __bool__(self) -> bool:  # else Python would ask for the length
            return True

        def __format__(self, form: str) -> str:
            if form:
                raise TypeError(f"{_type_name(self)} object has no format {form!r}: {CURE}")
            return str(self)


for _name, _symbol in _BINARY.items():
    setattr(ForgottenValue, f"__{_name}__", _binary(_symbol))
    setattr(ForgottenValue, f"__r{_name}__", _reflected(_symbol))
for _name, _symbol in _COMPARISONS.items():
    setattr(ForgottenValue, f"__{_name}__", _comparison(_symbol))
for _name, _text in _OTHERS.items():
    setattr(ForgottenValue, _name, _other(_text))
