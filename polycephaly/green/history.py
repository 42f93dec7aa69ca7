"""Which foreign functions are known to take long: learned from what became of calls to them.

A call that had to be taken over speaks for "long". One that was sent away at once and came back
soon speaks for "short"; but where native threads compute, coming back takes its time, so now and
then one is tried in place again. What is long is called on another native thread from the start,
which costs some 50 us and spares the window, in which nobody else runs.

Functions are known by their code; built-in ones, which are made anew at each look-up, by their name
and the class they are of; other callables by themselves."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import ref

__all__ = ["History", "history"]

LONG = 2  # points from which on a function counts as long
MOST = 4
PROBE = 8  # calls that are sent away before one is tried in place again; and so many times more each time
ENTRIES = 1000  # then it begins again: what matters comes back soon


class _Record:
    __slots__ = ("function", "interval", "left", "points")

    def __init__(self, function: object) -> None:
        self.function = function  # so that an identity means the same for as long as it is known
        self.points = 0
        self.left = self.interval = PROBE  # calls until the next probe


class History:
    """Points for each function. Any thread may tell and ask: a lost point is no loss."""

    def __init__(self) -> None:
        self.records: dict[Hashable, _Record] = {}

    def judge(self, fn: Callable[..., Any]) -> bool | None:
        """Whether a call of it would be long; None: it was, and this call is to try whether it
        still is."""
        record = self.records.get(_key(fn))
        if record is None or record.points < LONG:
            return False
        record.left -= 1
        if record.left > 0:
            return True
        record.interval *= PROBE
        record.left = record.interval
        return None

    def was_long(self, fn: Callable[..., Any]) -> None:
        key = _key(fn)
        record = self.records.get(key)
        if record is None:
            if len(self.records) >= ENTRIES:
                self.records.clear()
            record = self.records[key] = _Record(
                _what_key_means(fn, lambda _: self.records.pop(key, None))
            )
        record.points = min(record.points + 1, MOST)

    def was_short(self, fn: Callable[..., Any]) -> None:
        key = _key(fn)
        record = self.records.get(key)
        if record is not None:
            record.points -= 1
            record.left = record.interval = PROBE
            if record.points <= 0:
                self.records.pop(key, None)

    def is_long(self, fn: Callable[..., Any]) -> bool:
        record = self.records.get(_key(fn))
        return record is not None and record.points >= LONG


def _key(fn: Any) -> Hashable:
    kind = type(fn)  # not `__class__`: that may be code of a user
    if kind is FunctionType:
        return id(fn.__code__)
    if kind is MethodType:
        return _key(fn.__func__)
    if kind is BuiltinFunctionType:
        return fn.__module__ or type(fn.__self__), fn.__name__
    if kind is partial:
        return _key(fn.func)
    return id(fn)


def _what_key_means(fn: Any, forget: Callable[[object], object]) -> object:
    """What must live for as long as the key is to mean it; or a reference that says when it has
    gone."""
    kind = type(fn)
    if kind is FunctionType:
        return fn.__code__
    if kind is MethodType:
        return _what_key_means(fn.__func__, forget)
    if kind is partial:
        return _what_key_means(fn.func, forget)
    if kind is BuiltinFunctionType:
        return None
    try:
        return ref(fn, forget)
    except TypeError:  # functions of ctypes, for one
        return fn


history = History()
