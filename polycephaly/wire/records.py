"""A `logging` record as plain data: what a drone logged, on its way to the controller's loggers.

    LogRecord ── pack_record ──> JSON, in a chunk (chunks.py) ── unpack_fields ──> a dict ── make_record ──> LogRecord

The message is formatted and an exception told in the drone: its arguments may be anything, and may change. What `extra`
added comes along; what of it JSON does not know, as its `str`.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from .chunks import LONGEST

__all__ = ["Fields", "make_record", "pack_record", "unpack_fields"]

Fields = dict[str, Any]

_CUT = LONGEST // 32  # characters of each text in a record that would be too long: JSON may make six bytes of one
_formatter = logging.Formatter()
_NAMES: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "msg": str,
    "levelno": int,
    "levelname": str,
    "created": (int, float),
    "pathname": str,
    "lineno": int,
}
"""What a record cannot be without."""


def pack_record(record: logging.LogRecord) -> str:
    """Raises what formatting its message raises."""
    fields = dict(record.__dict__, msg=record.getMessage(), args=None, exc_info=None)
    if record.exc_info and not record.exc_text:
        fields["exc_text"] = _formatter.formatException(record.exc_info)
    fields.pop("message", None)  # a handler's formatter has left it
    try:
        body = _encode(fields)
    except (TypeError, ValueError):  # keys that are no text; a circle
        body = _encode({name: value if _is_plain(value) else _text(value) for name, value in fields.items()})
    if len(body) > LONGEST:
        body = _encode({name: _cut(value) for name, value in fields.items() if _is_plain(value)})
    return body.replace("\x7f", "\\u007f")  # all else that is no printable ASCII JSON has escaped


def unpack_fields(body: str) -> Fields:
    """Raises `ValueError` for what is no record."""
    fields = json.loads(body)
    if not isinstance(fields, dict) or not all(isinstance(fields.get(name), kind) for name, kind in _NAMES.items()):
        raise ValueError("this is no log record")
    return fields


def make_record(fields: Fields, drone: str) -> logging.LogRecord:
    """That drone's record: `record.drone` and `record.processName` say so. One that the drone has from a drone of its
    own bears both names: "p.0/q.1". Calls the record factory, which may be the user's."""
    below = fields.get("drone")
    name = f"{drone}/{below}" if isinstance(below, str) else drone
    return logging.makeLogRecord({**fields, "drone": name, "processName": name})


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<a {type(value).__qualname__} whose str raises {type(error).__qualname__}>"


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _CUT:
        return f"{value[:_CUT]} ... ({len(value) - _CUT} more characters)"
    return value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))


_encode = json.JSONEncoder(default=_text).encode
