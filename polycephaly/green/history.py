"""Which foreign functions are known to take long: learned from what became of calls to them.

A call that had to be taken over speaks for "long", one that returned within the window after it had been sent away
at once, for "short". What is long is called on another native thread from the start, which costs some 50 us and
spares the window, in which nobody else runs.

Functions are known by their code; built-in ones, which are made anew at each look-up, by their name and the class
they are of; other callables by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

__all__ = ["History", "history"]

LONG = 2  # points from which on a function counts as long
MOST = 4
ENTRIES = 1000  # then it begins again: what matters comes back soon


class History:
    """Points for each function. Any thread may tell and ask: each step on the table is atomic, and a lost point is
    no loss."""

    def __init__(self) -> None:
        self.points: dict[Hashable, int] = {}
        self._kept: dict[Hashable, object] = {}  # so that an identity means the same for as long as it is known

    def is_long(self, fn: Callable[..., Any]) -> bool:
        return self.points.get(_key(fn), 0) >= LONG

    def was_long(self, fn: Callable[..., Any]) -> None:
        key = _key(fn)
        if len(self.points) >= ENTRIES:
            self.points.clear()
            self._kept.clear()
        self._kept[key] = getattr(fn, "__code__", None) or (fn if key == id(fn) else None)
        self.points[key] = min(self.points.get(key, 0) + 1, MOST)

    def was_short(self, fn: Callable[..., Any]) -> None:
        key = _key(fn)
        points = self.points.get(key, 0) - 1
        if points > 0:
            self.points[key] = points
        else:
            self.points.pop(key, None)
            self._kept.pop(key, None)


def _key(fn: Any) -> Hashable:
    kind = fn.__class__
    if kind is FunctionType:
        return id(fn.__code__)
    if kind is MethodType:
        return _key(fn.__func__)
    if kind is BuiltinFunctionType:
        return fn.__self__.__class__, fn.__name__
    if kind is partial:
        return _key(fn.func)
    return id(fn)


history = History()
