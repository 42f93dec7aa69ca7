"""Calls whose errors are values, so that one that fails ends neither a slice nor a `map`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pickle import dumps
from typing import Any

from .exceptions import pack_exception, unpack_exception


class Failed:
    """The error of a call, in the place of its value."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def error(self) -> BaseException:
        return unpack_exception(self.packed)


def attempt(fn: Callable[..., Any], /, *args: Any) -> Any:
    """Return ``fn(*args)``, or the error that it raises."""
    try:
        return fn(*args)
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # not this frame
        return Failed(pack_exception(error, partial(dumps, protocol=5)))


def attempt_row(fn: Callable[..., Any], row: Any, /) -> Any:
    """Return ``fn(*row)``, or the error that it raises."""
    return attempt(fn, *row)
