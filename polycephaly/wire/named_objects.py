"""Objects of `typing` that name themselves, and sentinels, pickled by value: pickle takes these by
their name in a module, and the other process may not have it.

Such an object is one object in each process, however often it arrives, and is the same one again
when it comes home: type variables are compared by identity.
"""

from __future__ import annotations

import builtins
import keyword
import typing
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from .._compat import class_number, class_of_number, number_class
from .annotations import evaluated

_NEW_TYPE: Any = typing.NewType
_VARIABLES = (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple)
_ALIAS: Any = getattr(typing, "TypeAliasType", None)  # 3.12
_SENTINEL: Any = getattr(builtins, "sentinel", None)  # 3.15
NAMED_TYPES = frozenset({_NEW_TYPE, *_VARIABLES, _ALIAS, _SENTINEL} - {None})
_OPTIONS = ("bound", "covariant", "contravariant", "infer_variance")
_NO_DEFAULT = getattr(typing, "NoDefault", None)  # 3.13

_kept: dict[str, Any] = {}
_numbers: dict[int, str] = {}
"""Aliases and sentinels by number, and their numbers by `id`. No weak reference can refer to these,
so they are kept for ever.
"""
_values: dict[str, list[Any]] = {}
"""The value of each alias that was made here, by number, for it is known only later."""


def reduce_named(value: Any) -> tuple[Any, ...]:
    number, name, module = _number(value), value.__name__, value.__module__
    if type(value) is _ALIAS:
        content, parameters = evaluated(value, "value"), value.__type_params__
        # Only an alias without parameters can be made before its value, which may refer to it.
        if not parameters and name.isidentifier() and not keyword.iskeyword(name):
            alias = _arrive, (number, _make_alias, (module, name, number))
            return *alias, (number, content), None, None, _set_alias
        return _arrive, (number, _make_generic, (module, name, content, parameters))
    if type(value) is _NEW_TYPE:
        args = module, name, value.__qualname__, value.__supertype__
        return _arrive, (number, _make_new_type, args)
    if type(value) is _SENTINEL:
        return _arrive, (number, _make_sentinel, (module, name, repr(value)))
    found = ((each, evaluated(value, each)) for each in _OPTIONS)
    options = {each: option for each, option in found if option is not None and option is not False}
    default = evaluated(value, "default")
    if default is not _NO_DEFAULT:
        options["default"] = default
    constraints = evaluated(value, "constraints") or ()
    return _arrive, (number, _make_variable, (type(value), module, name, constraints, options))


def _number(value: Any) -> str:
    try:
        return class_number(value)
    except TypeError:
        number = _numbers.setdefault(id(value), uuid4().hex)
        _kept[number] = value
        return number


def _arrive(number: str, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return what this process has of this number, else make it."""
    known = _kept.get(number, class_of_number(number))
    if known is not None:
        return known
    made = make(*args)
    try:
        return number_class(number, made)
    except TypeError:
        made = _kept.setdefault(number, made)
        _numbers[id(made)] = number
        return made


def _make_variable(
    kind: Any, module: str, name: str, constraints: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    made = kind(name, *constraints, **options)
    made.__module__ = module
    return made


def _make_new_type(module: str, name: str, qualname: str, supertype: Any) -> Any:
    made = _NEW_TYPE(name, supertype)
    made.__module__, made.__qualname__ = module, qualname
    return made


def _make_alias(module: str, name: str, number: str) -> Any:
    held = _values[number] = []
    names = {"__name__": module, f"{name}_": held}
    exec(f"type {name} = {name}_[0]", names)  # evaluated when `__value__` is read first
    return names[name]


def _set_alias(alias: object, state: tuple[str, Any]) -> None:
    number, content = state
    if number in _values:
        _values[number][:] = [content]


def _make_generic(module: str, name: str, content: Any, parameters: tuple[Any, ...]) -> Any:
    names = {"__name__": module, "make": _ALIAS, "args": (name, content), "of": parameters}
    return eval("make(*args, type_params=of)", names)  # the module is that of the caller


def _make_sentinel(module: str, name: str, text: str) -> Any:
    made = _SENTINEL(name, repr=text)
    made.__module__ = module
    return made
