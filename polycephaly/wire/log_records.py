"""A `logging` record as plain data: what a drone logged, on its way to the controller's loggers.

    LogRecord ── pack_record ──> JSON: the values of `_FIELDS`, and a mapping of the rest ── unpack_record ──> LogRecord

The message is formatted and an exception told in the drone: its arguments may be anything, and may
change. What `extra` or a record factory added comes along; what of it JSON does not know, as its
`str`."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from .chunks import LONGEST

__all__ = ["pack_record", "unpack_record"]

_FIELDS = (
    "name", "levelno", "levelname", "msg", "pathname", "lineno", "funcName", "created", "msecs", "relativeCreated",
    "process", "thread", "threadName", "exc_text", "stack_info",
)  # fmt: skip
_TYPES = (str, int, str, str, str, int)  # of the first ones; a record cannot be without them
_KNOWN = {*_FIELDS, "args", "exc_info", "filename", "module", "processName", "message"}
_MOST = LONGEST - 32  # bytes: beside it stands a number
_CUTS = (
    LONGEST // 32,
    LONGEST // 128,
)  # characters of each text in a record that would be too long, if need be fewer:
# JSON may make twelve bytes of one

_formatter = logging.Formatter()


def pack_record(record: logging.LogRecord) -> str:
    """Raises what formatting its message raises."""
    fields = record.__dict__
    values = [fields.get(name) for name in _FIELDS]
    values[3] = record.getMessage()
    if record.exc_info and not record.exc_text:
        values[13] = _formatter.formatException(record.exc_info)
    rest = {
        name: value for name, value in fields.items() if name not in _KNOWN and value is not None
    }
    try:
        body = _encode((values, rest))
    except (TypeError, ValueError):  # keys that are no text; a circle
        body = _encode((values, {str(name): _plain(value) for name, value in rest.items()}))
    for most in _CUTS:
        if len(body) <= _MOST:
            break
        body = _encode(([_cut(value, most) for value in values], {}))
    return body


def unpack_record(body: str, drone: str) -> logging.LogRecord:
    """That drone's record: `record.drone` and `record.processName` say so. One that the drone has
    from a drone of its own bears both names: "p.0/q.1". Calls no record factory: the drone has
    called it. Raises `ValueError`."""
    values, rest = json.loads(body)
    if (
        len(values) != len(_FIELDS)
        or not all(map(isinstance, values, _TYPES))
        or not isinstance(rest, dict)
    ):
        raise ValueError("this is no log record")
    if not all(
        text is None or isinstance(text, str) for text in values[-2:]
    ) or not _KNOWN.isdisjoint(rest):
        raise ValueError("this is a log record with what no record has there")
    record = logging.LogRecord.__new__(logging.LogRecord)
    fields = record.__dict__
    fields.update(taskName=None)
    fields.update(zip(_FIELDS, values, strict=True))
    below = rest.get("drone")
    name = f"{drone}/{below}" if isinstance(below, str) else drone
    filename = os.path.basename(record.pathname)
    fields.update(
        rest, args=None, exc_info=None, filename=filename, module=os.path.splitext(filename)[0]
    )
    fields.update(drone=name, processName=name)
    return record


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (str, int, float)) else _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<a {type(value).__qualname__} whose str raises {type(error).__qualname__}>"


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]} ... ({len(value) - most} more characters)"
    return value


_encoder = json.JSONEncoder(default=_text, separators=(",", ":"))


def _encode(fields: object) -> str:
    """Printable ASCII: what else there is JSON has escaped, but for one."""
    return _encoder.encode(fields).replace("\x7f", "\\u007f")
