"""Calls whose errors are values, so that one that fails ends neither a chunk nor a `map`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .exceptions import pack_exception, unpack_exception
from .main_names import MainSnapshot
from .pickling import capture

shared_snapshot: MainSnapshot | None = None
"""What of `__main__` the controller has, too. None: this process is no drone."""


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
        snapshot = MainSnapshot() if shared_snapshot is None else shared_snapshot
        return Failed(pack_exception(error, partial(capture, snapshot=snapshot)))


def attempt_row(fn: Callable[..., Any], row: Any, /) -> Any:
    """Return ``fn(*row)``, or the error that it raises."""
    return attempt(fn, *row)
