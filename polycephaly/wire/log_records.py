"""Conversion of `logging` records to plain data, on their way to the controller's loggers.

    LogRecord ── pack_record ──> JSON: values of `_FIELDS`, mapping of the rest ── unpack_record
                                                                                    └──> LogRecord

The drone formats the message and the exception, because the arguments may be of any type and may
change. Attributes added by `extra` or a record factory are included; values that JSON does not
support become their `str`.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from .chunks import MAX_BODY_BYTES

_FIELDS = (
    "name", "levelno", "levelname", "msg", "pathname", "lineno", "funcName", "created", "msecs",
    "relativeCreated", "process", "thread", "threadName", "exc_text", "stack_info",
)  # fmt: skip
_FIELD_TYPES = (str, int, str, str, str, int)  # of the first fields, which every record has
_STANDARD_FIELDS = {*_FIELDS, "args", "exc_info", "filename", "module", "processName", "message"}
_MAX_RECORD_BYTES = MAX_BODY_BYTES - 32  # the record's number is in the same chunk
# Limits for each text of a record that is too long, tried in this order. JSON may use twelve bytes
# for one character.
_MAX_TEXT_CHARACTERS = (MAX_BODY_BYTES // 32, MAX_BODY_BYTES // 128)

_formatter = logging.Formatter()


def pack_record(record: logging.LogRecord) -> str:
    """Return the record as JSON in printable ASCII.

    Raises the errors of formatting its message.
    """
    fields = record.__dict__
    values = [fields.get(name) for name in _FIELDS]
    values[3] = record.getMessage()
    if record.exc_info and not record.exc_text:
        values[13] = _formatter.formatException(record.exc_info)
    rest = {
        name: value
        for name, value in fields.items()
        if name not in _STANDARD_FIELDS and value is not None
    }
    try:
        body = _encode((values, rest))
    except (TypeError, ValueError):  # keys that are not strings, or a reference cycle
        body = _encode((values, {str(name): _plain(value) for name, value in rest.items()}))
    for limit in _MAX_TEXT_CHARACTERS:
        if len(body) <= _MAX_RECORD_BYTES:
            break
        body = _encode(([_shorten(value, limit) for value in values], {}))
    return body


def unpack_record(body: str, drone: str) -> logging.LogRecord:
    """Return the record of drone `drone`, named in `record.drone` and `record.processName`.

    A record that came to the drone from one of its own drones has both names: "p.0/q.1". No record
    factory is called here: the drone has called its factory. Raises `ValueError` if `body` is not a
    log record.
    """
    values, rest = json.loads(body)
    if (
        len(values) != len(_FIELDS)
        or not all(map(isinstance, values, _FIELD_TYPES))
        or not all(text is None or isinstance(text, str) for text in values[-2:])
        or not isinstance(rest, dict)
        or not _STANDARD_FIELDS.isdisjoint(rest)
    ):
        raise ValueError("malformed log record")
    record = logging.LogRecord.__new__(logging.LogRecord)
    fields = record.__dict__
    fields.update(zip(_FIELDS, values, strict=True), taskName=None)
    inner = rest.get("drone")  # if the record came from a drone of the drone
    name = f"{drone}/{inner}" if isinstance(inner, str) else drone
    filename = os.path.basename(record.pathname)
    module = os.path.splitext(filename)[0]
    fields.update(rest, args=None, exc_info=None, filename=filename, module=module)
    fields.update(drone=name, processName=name)
    return record


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (str, int, float)) else _text(value)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<a {type(value).__qualname__} whose str raises {type(error).__qualname__}>"


def _shorten(value: Any, limit: int) -> Any:
    if isinstance(value, str) and len(value) > limit:
        return f"{value[:limit]} ... ({len(value) - limit} more characters)"
    return value


_encoder = json.JSONEncoder(default=_text, separators=(",", ":"))


def _encode(fields: object) -> str:
    """Return printable ASCII: JSON escapes all other characters except DEL."""
    return _encoder.encode(fields).replace("\x7f", "\\u007f")
