"""Recognise coroutines and coroutine functions.

The questions are asked often, so `inspect` is imported only if nothing cheaper answers. An object
may have each attribute that it is asked for, such as a `Mock` or a method of an `xmlrpc` server: so
an attribute counts only if it is that of a coroutine.
"""

from __future__ import annotations

from types import CodeType, CoroutineType, GeneratorType
from typing import Any

_ITERABLE = 0x100  # inspect.CO_ITERABLE_COROUTINE: set by `types.coroutine`
_FLAGS = 0x80 | _ITERABLE  # inspect.CO_COROUTINE


def is_coroutine(value: Any) -> bool:
    """Return True if `value` is a coroutine.

    Generators of `types.coroutine` count, and so does the object that a green thread's `sleep`
    returns in place of a coroutine.
    """
    if isinstance(value, GeneratorType):
        return bool(value.gi_code.co_flags & _ITERABLE)
    return isinstance(value, CoroutineType) or getattr(type(value), "is_parking", False)


def is_awaitable(value: Any) -> bool:
    return hasattr(type(value), "__await__") or is_coroutine(value)


def is_coroutine_function(fn: Any) -> bool:
    """Return True if calling `fn` gives a coroutine.

    Partials, methods and instances with ``async __call__`` count too.
    """
    code = getattr(fn, "__code__", None)
    if isinstance(code, CodeType) and code.co_flags & _FLAGS:
        return True
    if getattr(fn, "parks", False) is True:  # as `green.sleep` has: see green/parking.py
        return True
    from inspect import iscoroutinefunction

    return iscoroutinefunction(fn) or iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004
