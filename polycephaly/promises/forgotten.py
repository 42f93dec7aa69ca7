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
_COMPARISONS = {"lt": ("<", "gt"), "le": ("<=", "ge"), "gt": (">", "lt"), "ge": (">=", "le")}
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


def _operator(reflected: str, text: str) -> Callable[..., Any]:
    """Return an operator that asks the right operand, as Python would, and then refuses."""

    def refuse(left: object, right: object, *_: object) -> Any:
        ask = None if isinstance(right, ForgottenValue) else getattr(type(right), reflected, None)
        answer = NotImplemented if ask is None else ask(right, left)
        if answer is not NotImplemented:
            return answer
        raise TypeError(f"{text} {_type_name(left)} and {_type_name(right)}: {CURE}")

    return refuse


def _reflected(text: str) -> Callable[..., NoReturn]:
    def refuse(right: object, left: object, *_: object) -> NoReturn:
        raise TypeError(f"{text} {_type_name(left)} and {_type_name(right)}: {CURE}")

    return refuse


def _other(text: str) -> Callable[..., NoReturn]:
    def refuse(promise: object, *_: object) -> NoReturn:
        raise TypeError(f"{_type_name(promise)} object {text}: {CURE}")

    return refuse


class ForgottenValue:
    """What a promise answers to those who take it for its value."""

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers would accept any name, and any format

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that has raised: raise its own error
                return object.__getattribute__(self, name)
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
    _text = f"unsupported operand type(s) for {_symbol}:"
    setattr(ForgottenValue, f"__{_name}__", _operator(f"__r{_name}__", _text))
    setattr(ForgottenValue, f"__r{_name}__", _reflected(_text))
for _name, (_symbol, _mirrored) in _COMPARISONS.items():
    _text = f"{_symbol!r} not supported between instances of"
    setattr(ForgottenValue, f"__{_name}__", _operator(f"__{_mirrored}__", _text))
for _name, _text in _OTHERS.items():
    setattr(ForgottenValue, _name, _other(_text))
