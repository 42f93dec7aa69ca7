"""Which values may share a pickle: small, immutable ones, whose pickling cannot fail."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from .main_names import ATOMIC_TYPES

BATCHED_TYPES = frozenset(ATOMIC_TYPES)
"""Types of values that are pickled together, with any others. See also `bytes_together`."""
SMALL_TYPES = BATCHED_TYPES - {str, bytes}
"""The types in `BATCHED_TYPES` whose size need not be checked."""

_CONTAINERS = frozenset((tuple, frozenset))
MAX_DEPTH = 4
"""Tuples or frozensets within each other, from which on a value has a pickle of its own."""
ITEM_BYTES = 8
"""Bytes that an item of a container counts."""


def bytes_together(values: Sequence[Any]) -> int:
    """Return about how many bytes `values` take beside their number, if they may share a pickle,
    with each other and with others; else -1.
    """
    kinds = set(map(type, values))
    size = depth = 0
    while not kinds.isdisjoint(_CONTAINERS):
        before, depth = len(values), depth + 1
        rows = values
        if not kinds <= _CONTAINERS:
            rows = [each if type(each) in _CONTAINERS else (each,) for each in values]
        values = [*chain.from_iterable(rows)]
        size += ITEM_BYTES * max(0, len(values) - before)
        kinds = set(map(type, values))
        if depth == MAX_DEPTH:
            return -1
    if kinds <= SMALL_TYPES:
        return size
    for kind in kinds - SMALL_TYPES:
        of_kind = [each for each in values if type(each) is kind] if len(kinds) > 1 else values
        if kind is str or kind is bytes:
            size += sum(map(len, of_kind))
        elif (is_fit := check_of(kind)) is None or not all(map(is_fit, of_kind)):
            return -1
    return size


def fits_together(value: Any) -> bool:
    """Return whether `value` is of a small, immutable type of the standard library or NumPy, and
    may share a pickle. For tuples and `BATCHED_TYPES`, see `bytes_together`.
    """
    is_fit = check_of(type(value))
    return is_fit is not None and is_fit(value)


def check_of(kind: type) -> Callable[[Any], bool] | None:
    """Return a function that tells whether a value of this type may share a pickle; None if none
    may.
    """
    if kind in copyreg.dispatch_table:  # then it is pickled by code of users
        return None
    known = _checks.get(kind)
    if known is None:
        module, name = kind.__module__, kind.__name__
        if module == "numpy":
            known = _is_any if _is_number_of_numpy(kind) else _is_none
        elif module in _MODULES:
            known = _CHECKS.get(name)
        if known is None or getattr(sys.modules.get(module), name, None) is not kind:
            return None
        _checks[kind] = known
    return None if known is _is_none else known


def _is_number_of_numpy(kind: type) -> bool:
    numpy = sys.modules["numpy"]
    return issubclass(kind, (numpy.number, numpy.bool_, numpy.datetime64))


def _is_any(_: Any) -> bool:
    return True


def _is_none(_: Any) -> bool:
    return False


def _is_plain_zone(zone: Any) -> bool:
    """Return whether this is a `timezone` with a name that is no subclass of str."""
    return type(zone.tzname(None)) is str


def _has_plain_zone(value: Any) -> bool:
    zone = value.tzinfo
    return zone is None or (check_of(type(zone)) is _is_plain_zone and _is_plain_zone(zone))


def _is_plain_uuid(value: Any) -> bool:
    return type(value.int) is int


def _is_plain_path(value: Any) -> bool:
    return {str}.issuperset(map(type, value.__reduce__()[1]))


_checks: dict[type, Callable[[Any], bool]] = {}
"""The types that were met, of those whose values may share a pickle."""
_MODULES = frozenset(("datetime", "decimal", "fractions", "pathlib", "pathlib._local", "uuid"))
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "date": _is_any, "timedelta": _is_any, "Decimal": _is_any, "Fraction": _is_any,
    "datetime": _has_plain_zone, "time": _has_plain_zone, "timezone": _is_plain_zone,
    "UUID": _is_plain_uuid, "PosixPath": _is_plain_path, "PurePosixPath": _is_plain_path,
    "PureWindowsPath": _is_plain_path,
}  # fmt: skip
"""By the name of a type: may a value share a pickle? One that holds an object of users may not."""
