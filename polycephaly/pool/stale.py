"""What the controller process has changed since the snapshot, and drones do not see."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from .._compat import remote_traceback_type
from ..wire.main_names import MainSnapshot, main_namespace


def newer_object(error: BaseException, snapshot: MainSnapshot) -> str | None:
    """Return what this process has, and a drone missed with `error`: a key or an attribute of an
    object that the drone has from the snapshot. None if nothing is known to be newer here.

    Runs code of users: `in`, and the look-up of an attribute.
    """
    if isinstance(error, KeyError) and len(error.args) == 1:
        for name, value in _named_objects(error, snapshot):
            if hasattr(type(value), "keys") and error.args[0] in value:  # type: ignore[operator]
                return f"{name}[{error.args[0]!r}]"
    elif isinstance(error, AttributeError) and error.name:
        for name, value in _named_objects(error, snapshot):
            if type(value).__name__ in str(error) and hasattr(value, error.name):
                return f"{name}.{error.name}"
    return None


def _named_objects(error: BaseException, snapshot: MainSnapshot) -> Iterator[tuple[str, object]]:
    """Yield the globals of `__main__` that the drones have and the remote traceback shows."""
    main = main_namespace()
    for name in dict.fromkeys(re.findall(r"\w+", _remote_traceback(error))):
        if name in main and snapshot.has(name):
            yield name, main[name]


def _remote_traceback(error: BaseException) -> str:
    last = error
    while last.__cause__ is not None:
        last = last.__cause__
    return str(last) if isinstance(last, remote_traceback_type()) else ""


def add_hint(error: BaseException, snapshot: MainSnapshot, cure: str) -> None:
    """Add a note to `error` if this process has what the drone missed. Raises nothing."""
    with suppress(Exception):  # of the users' code
        newer = newer_object(error, snapshot)
        if newer is not None:
            error.add_note(
                f"the controller process has {newer}, perhaps only since the snapshot from which "
                f"the drone was started; {cure}, and Pool(fresh=True) one for each call of an idle "
                "pool"
            )
