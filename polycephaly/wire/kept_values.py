"""The format in which a drone describes the values that it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any

from ..errors import Malformed

_SIZE = Struct("<Q")
_KEPT_VALUE = Struct("<QQB")


def pack_description(nbytes: int, type_name: str) -> bytes:
    return _SIZE.pack(nbytes) + _pack_name(type_name)


def pack_kept_value(number: int, nbytes: int, type_name: str) -> bytes:
    """Return one entry of a KEPT_VALUES message."""
    name = _pack_name(type_name)
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


def _pack_name(type_name: str) -> bytes:
    return type_name.encode("utf-8", "replace")[:200]


def unpack_description(payload: Any) -> tuple[int, str]:
    """Return bytes and type name from a description."""
    if len(payload) < _SIZE.size:
        return 0, "?"
    return _SIZE.unpack_from(payload)[0], bytes(payload[_SIZE.size :]).decode("utf-8", "replace")
