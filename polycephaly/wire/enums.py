"""Enums that are pickled by value: made anew with the members that they have.

    class ──> name, value and content of each member ──> a class whose members are filled with these

Neither `__new__` nor `__init__` of the enum, or of the type that it is mixed with, run again: the
arguments that they had are not known, and what they did is in the members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import EnumType
from typing import Any

_MADE_BY_ENUM = ("_value_", "_name_", "__objclass__", "_sort_order_")
"""Attributes that `enum` gives each member."""
_OF_MAKING = ("_new_member_", "_use_args_")
"""What differs in a class that was made here, and that cloudpickle omits if a base has the same."""


def enum_arguments(kind: Any) -> tuple[Any, ...]:
    """Return the arguments with which `make_enum` makes this class."""
    members = [
        (name, vars(member)["_value_"], _reduce(member)[0])
        for name, member in kind.__members__.items()
    ]
    own = vars(kind)
    boundary = own.get("_boundary_")
    if boundary is getattr(kind.__bases__[-1], "_boundary_", None):
        boundary = None
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind), kind.__name__, kind.__bases__, names, members, boundary


def enum_state(kind: Any, class_state: tuple[dict[str, Any], Any]) -> tuple[Any, ...]:
    """Return the state with which `fill_enum` completes the class, and cloudpickle's state of it
    without the members.
    """
    own = vars(kind)
    content, rest = class_state
    members = kind.__members__
    content = {name: value for name, value in content.items() if name not in members}
    content.update((name, own[name]) for name in _OF_MAKING if name in own)
    attributes = {name: _reduce(member)[1] for name, member in members.items()}
    # A `__new__` may have given members further values. Combined flags are not among the members.
    values = [
        (value, name)
        for value, member in own["_value2member_map_"].items()
        if members.get(name := vars(member)["_name_"]) is member
    ]
    return (content, rest), attributes, values


def _reduce(member: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments for the `__new__` of the type that the enum is mixed with, and the state
    that is to be set afterwards.
    """
    reduced: Any = object.__reduce_ex__(member, 5)
    make, args, *rest = reduced
    # Either the type itself, as with dates, or what calls `__new__` of its first argument.
    return args if make is type(member) else args[1:], rest[0] if rest else None


def make_enum(
    meta: type[EnumType],
    name: str,
    bases: tuple[type, ...],
    names: dict[str, str],
    members: list[tuple[str, Any, tuple[Any, ...]]],
    boundary: Any,
) -> Any:
    content: Any = meta.__prepare__(name, bases)
    content.update(names)
    new = _new_of(bases)
    left = iter(members)

    def new_member(kind: Any, *_: Any) -> Any:
        _name, value, args = next(left)
        member = new(kind, *args)
        member._value_ = value
        return member

    content["__new__"] = new_member
    content["__init__"] = lambda self, *args: None
    for index, (member_name, _value, _args) in enumerate(members):
        content[member_name] = index
    options = {} if boundary is None else {"boundary": boundary}
    made: Any = meta.__new__(meta, name, bases, content, **options)
    del made.__init__
    if "__new_member__" in vars(made):
        del made.__new_member__
    return made


def _new_of(bases: Iterable[type]) -> Callable[..., Any]:
    """Return the `__new__` of the type that the enum is mixed with."""
    for base in bases:
        for each in base.__mro__[:-1]:  # but `object`
            if not isinstance(each, EnumType) and "__new__" in vars(each):
                new: Callable[..., Any] = each.__new__
                return new
    return object.__new__


def fill_enum(
    made: EnumType, attributes: dict[str, Any], values: Iterable[tuple[Any, str]]
) -> None:
    for name, state in attributes.items():
        member: Any = made.__members__[name]
        content, slots = state if isinstance(state, tuple) else (state, None)
        vars(member).update((n, v) for n, v in (content or {}).items() if n not in _MADE_BY_ENUM)
        for attribute, value in (slots or {}).items():
            setattr(member, attribute, value)
    by_value: dict[Any, Any] = vars(made)["_value2member_map_"]
    by_value.update((value, made.__members__[name]) for value, name in values)
