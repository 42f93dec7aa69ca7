"""Conversion of `logging` records to JSON, on their way to the controller's loggers.

The drone formats the message and the exception, because the arguments may be of any type and may
change. Attributes added by `extra` or a record factory are included; values that JSON does not
support become their `str`.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from typing import Any

from .chunks import MAX_BODY_BYTES

_MAX_RECORD_BYTES = MAX_BODY_BYTES - 32  # the record's number is in the same chunk
# Of each text of a record that is too long. JSON may use twelve bytes for one character, and a
# record has up to eight such texts.
_MAX_TEXT_CHARACTERS = MAX_BODY_BYTES // 128

_formatter = logging.Formatter()


def pack_record(record: logging.LogRecord) -> str:
    """Return the record as JSON in printable ASCII.

    A record that is too long, or whose additional attributes JSON and `str` cannot tell, is sent
    without these attributes. Raises the errors of formatting its message.
    """
    fields = {**record.__dict__, "msg": record.getMessage(), "args": None, "exc_info": None}
    if record.exc_info and not record.exc_text:
        fields["exc_text"] = _formatter.formatException(record.exc_info)
    with suppress(Exception):  # of `str`, or a reference cycle
        body = _encode(fields)
        if len(body) <= _MAX_RECORD_BYTES:
            return body
    return _encode({name: _shorten(fields.get(name)) for name in _new_record().__dict__})


def unpack_record(body: str, drone: str) -> logging.LogRecord:
    """Return the record of drone `drone`, named in `record.drone` and `record.processName`.

    A record that came to the drone from one of its own drones has both names: "p.0/q.1". No record
    factory is called here: the drone has called its factory. Raises `ValueError` if `body` is not a
    log record.
    """
    fields = json.loads(body)
    if not (
        isinstance(fields, dict)
        and isinstance(fields.get("name"), str)
        and isinstance(fields.get("levelno"), int)
    ):
        raise ValueError("malformed log record")
    inner = fields.get("drone")  # if the record came from a drone of the drone
    name = f"{drone}/{inner}" if isinstance(inner, str) else drone
    record = _new_record()
    record.__dict__.update(fields, args=None, exc_info=None, drone=name, processName=name)
    return record


def _new_record() -> logging.LogRecord:
    return logging.LogRecord("", 0, "", 0, "", None, None)


def _shorten(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MAX_TEXT_CHARACTERS:
        rest = len(value) - _MAX_TEXT_CHARACTERS
        return f"{value[:_MAX_TEXT_CHARACTERS]} ... ({rest} more characters)"
    return value


def _encode(fields: dict[str, object]) -> str:
    """Return printable ASCII: JSON escapes all other characters except DEL."""
    return json.dumps(fields, default=str).replace("\x7f", "\\u007f")
