"""The numbers that users pass: seconds and counts. Each check of them returns a plain `float` or
`int`. Also the inputs of a `map`, and how a value that was refused is shown.

A scalar of NumPy is a number, too, but clocks, epoll and messages refuse it later, in a thread of
this package; and a wait for NaN seconds would never end.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from math import inf, isinf, isnan
from numbers import Real
from operator import index
from reprlib import Repr
from typing import Any

_repr = Repr()
_repr.maxstring = _repr.maxother = 80


def brief(value: object) -> str:
    """Return a `repr` for an error or a log, shortened: a list of promises may have thousands."""
    try:
        return _repr.repr(value)
    except Exception:  # an integer of too many digits, for example
        return "<unprintable>"


def check_seconds(name: str, seconds: Any, least: float = -inf) -> float:
    """Return `seconds`, called `name` in errors, as a `float`.

    Raises `TypeError` if it is no real number, and `ValueError` if it is NaN, too large for a clock
    or less than `least`.
    """
    number = seconds if type(seconds) is float else check_real(name, seconds, "number of seconds")
    if not number >= least:
        if isnan(number):
            raise ValueError(f"{name} is a number of seconds, not nan")
        raise ValueError(f"{name} must be at least {least:g} seconds, not {seconds!r}")
    return number


def check_positive_seconds(name: str, seconds: Any) -> float:
    """Return `seconds` as `check_seconds` does. Raises `ValueError` for 0, too."""
    number = check_seconds(name, seconds)
    if not number > 0:
        raise ValueError(f"{name} must be a positive number of seconds, not {seconds!r}")
    return number


def check_real(name: str, number: Any, kind: str = "number") -> float:
    """Return `number`, called `name` in errors, as a `float`, which may be NaN or infinite."""
    try:
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError
        converted = float(number)
    except TypeError:  # also of numpy.timedelta64, which calls itself an integer
        raise TypeError(f"{name} is a {kind}, not {brief(number)}") from None
    except OverflowError:
        converted = inf
    if isinf(converted) and abs(number) != inf:  # its digits may be thousands: not shown
        raise ValueError(f"{name} must be less than 1e308")
    return converted


def check_whole(number: Any, requirement: str) -> int:
    """Return `number` as an `int`. Raises `TypeError`, with the `requirement`, if it is not a whole
    number, as an `int` or `numpy.int64` is.
    """
    if not isinstance(number, bool):
        try:
            return index(number)
        except TypeError:
            pass
    raise TypeError(f"{requirement}, not {brief(number)}")


def check_at_least(name: str, number: Any, minimum: int) -> int:
    """Return `number`, called `name` in errors, as an `int`."""
    whole = check_whole(number, f"{name} is a whole number")
    if whole < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {whole}")
    return whole


def check_bytes(name: str, size: Any) -> int:
    """Return a number of bytes, which may be a text such as "500M", as an `int`."""
    if not isinstance(size, str):
        return check_whole(size, f"{name} is a number of bytes, or a text such as '500M' or '2G'")
    import re

    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", size.strip().lower())
    if found is None:
        raise ValueError(f"{name}: {size!r} is not a size such as 500M or 2G (in powers of 1,024)")
    return int(float(found[1]) * 1024 ** " kmgt".index(found[2] or " "))


def check_count(sentence: str, unit: str, number: Any, least: int = 1) -> int:
    """Return `number`, the count of units after `sentence`, as an `int`."""
    whole = check_whole(number, f"{sentence} a number of {unit}s")
    if whole < least:
        raise ValueError(f"{sentence} at least {least} {unit}{'s' * (least != 1)}, not {whole}")
    return whole


def check_iterables(function: str, iterables: Iterable[object]) -> None:
    """Raise `TypeError` if one of `iterables` can only be iterated over by ``async for``."""
    for each in iterables:
        if isinstance(each, AsyncIterable) and not isinstance(each, Iterable):
            raise TypeError(
                f"{function} takes iterables, not {brief(each)}, which is asynchronous: collect its"
                " items before, [item async for item in ...], or make a promise of each call"
            )
