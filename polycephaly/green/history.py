"""A record of which foreign functions take long, learned from earlier calls.

A call that had to be handed over counts for "long". A call that ran on another native thread from
the start and returned soon counts for "short". If native threads compute, such a return takes its
time, so now and then a call is tried in place again. A long function is called on another native
thread from the start. That costs about 50 us, but saves the window in which no other green thread
runs.

The key of a function is its code. Built-in functions are made anew at each look-up: their key is
their name and module or class. Any other callable is its own key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import ref

LONG_POINTS = 2  # points from which on a function counts as long
MAX_POINTS = 4  # points that a function can have
# Calls on another native thread before one is tried in place again. Each time, the number is
# multiplied by this.
PROBE_FACTOR = 8
MAX_RECORDS = 1000  # at this size the record is cleared; functions that matter are soon back


class _Record:
    __slots__ = ("calls_until_probe", "interval", "points", "subject")

    def __init__(self, subject: object) -> None:
        # The subject, or a weak reference that removes the record, so that the key stays valid.
        self.subject = subject
        self.points = 0
        self.calls_until_probe = self.interval = PROBE_FACTOR


class History:
    """Points for each function. Any thread may read and write: losing a point is harmless."""

    def __init__(self) -> None:
        self.records: dict[Hashable, _Record] = {}

    def predict_long(self, fn: Callable[..., Any]) -> bool | None:
        """Return True if a call of `fn` is expected to be long.

        None: calls have been long, but this one should be tried in place.
        """
        record = self.records.get(_key(_subject(fn)))
        if record is None or record.points < LONG_POINTS:
            return False
        record.calls_until_probe -= 1
        if record.calls_until_probe > 0:
            return True
        record.interval *= PROBE_FACTOR
        record.calls_until_probe = record.interval
        return None

    def record_long(self, fn: Callable[..., Any]) -> None:
        subject = _subject(fn)
        key = _key(subject)
        record = self.records.get(key)
        if record is None:
            if len(self.records) >= MAX_RECORDS:
                self.records.clear()
            with suppress(TypeError):  # no reference is possible to functions of ctypes, say
                subject = ref(subject, lambda _: self.records.pop(key, None))
            record = self.records[key] = _Record(subject)
        record.points = min(record.points + 1, MAX_POINTS)

    def record_short(self, fn: Callable[..., Any]) -> None:
        key = _key(_subject(fn))
        record = self.records.get(key)
        if record is not None:
            record.points -= 1
            record.calls_until_probe = record.interval = PROBE_FACTOR
            if record.points <= 0:
                self.records.pop(key, None)


def _subject(fn: Any) -> Any:
    """Return the subject of a record: the code of a function, the names of a built-in function, or
    else the callable itself.
    """
    kind = type(fn)  # not `__class__`: that may be code of a user
    if kind is FunctionType:
        return fn.__code__
    if kind is MethodType:
        return _subject(fn.__func__)
    if kind is BuiltinFunctionType:
        return fn.__module__ or type(fn.__self__), fn.__name__
    if kind is partial:
        return _subject(fn.func)
    return fn


def _key(subject: Any) -> Hashable:
    return subject if type(subject) is tuple else id(subject)


history = History()
