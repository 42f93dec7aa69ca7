"""The format in which a drone describes the values that it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any

from ..errors import Malformed

_KEPT_VALUE = Struct("<QQB")


def pack_kept_value(number: int, nbytes: int, type_name: str) -> bytes:
    """Return one entry of a KEPT_VALUES message, or the answer to a call whose value is kept."""
    name = type_name.encode("utf-8", "replace")[:200]
    return _KEPT_VALUE.pack(number, nbytes, len(name)) + name


def unpack_kept_values(payload: Any) -> Iterator[tuple[int, int, str]]:
    """Yield number, bytes and type name of each value in a KEPT_VALUES message.

    Raises `Malformed`.
    """
    at = 0
    while at < len(payload):
        if len(payload) < at + _KEPT_VALUE.size:
            raise Malformed(f"an incomplete list of kept values: {len(payload)} bytes")
        number, nbytes, length = _KEPT_VALUE.unpack_from(payload, at)
        at += _KEPT_VALUE.size + length
        yield number, nbytes, bytes(payload[at - length : at]).decode("utf-8", "replace")


def unpack_answer(payload: Any) -> tuple[int, str]:
    """Return bytes and type name of the only value; 0 and "?" if the answer is malformed."""
    try:
        [(_, nbytes, type_name)] = unpack_kept_values(payload)
    except ValueError:
        return 0, "?"
    return nbytes, type_name
