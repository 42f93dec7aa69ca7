"""Hints in errors of tasks: the drone lacks a name, a key or an attribute that the controller
process has, because it came after the snapshot.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

from .._compat import remote_traceback_type
from ..wire.exceptions import last_cause, message_of
from ..wire.main_names import MainSnapshot, main_namespace

_LATER = (
    "the controller process defined this name after the snapshot from which the drone was started"
)
_UNEXPECTED_OPTION = re.compile(
    r"unexpected keyword argument '(timeout|retries|priority|resources|seed)'"
)
_OF_A_POOL = "pool", "pool.refresh() takes a new snapshot"
_OF_A_DRONE = "drone", "start a new Drone (in a pool: pool.refresh())"


def explain(
    error: BaseException,
    snapshot: MainSnapshot,
    left_out: Callable[[str], str | None],
    lone_drone: bool,
) -> None:
    """Add the cure to `error` if the controller process has what the drone missed, or if an option
    of a task was given to its function.

    Parameters
    ----------
    error
        The error of a task, of which the text or the notes are changed.
    snapshot
        The snapshot from which the drones were started.
    left_out
        Returns why no drone can have a name of ``__main__``; None for most names.
    lone_drone
        Whether the drone is a `Drone()`, which cannot be refreshed.
    """
    owner, cure = _OF_A_DRONE if lone_drone else _OF_A_POOL
    if isinstance(error, TypeError):
        option = _UNEXPECTED_OPTION.search(message_of(error))
        if option and is_of_the_call(error):
            with suppress(Exception):  # the exception's class may take no notes
                error.add_note(f"an option of a task is given by {owner}.options({option[1]}=...)")
    if isinstance(error, AttributeError):
        text = message_of(error)
        missing, module = _missing_in_module(text)
        if missing and hasattr(sys.modules.get(module), missing):
            reason = left_out(missing) if module == "__main__" else None
            if reason:
                error.args = (f"{text}: {_left_out(reason)}",)
            else:
                error.args = (f"{text}: {_LATER}; {cure}, or make the pool below the definition",)
            return
    if isinstance(error, (KeyError, AttributeError)):
        _add_note(error, snapshot, cure)
    if isinstance(error, NameError) and not isinstance(error, UnboundLocalError):
        name = error.name
        if not name or name not in main_namespace():
            return
        text = error.args[0] if error.args else name
        reason = left_out(name)
        if reason:
            error.args = (f"{text}: {_left_out(reason)}",)
        elif not snapshot.has(name):
            push = f"{owner}.push({{{name!r}:{name}}}) sends this one name"
            error.args = (f"{text}: {_LATER}; {cure}, or {push}",)


def _left_out(reason: str) -> str:
    return f"the drones do not have this name, because {reason}"


def _missing_in_module(text: str) -> tuple[str, str]:
    """Return the name that a module lacks, by an error's text, and the module; else two ""."""
    missing = re.match(r"Can't get attribute '(\w+)' on <module '([\w.]+)'", text)
    if missing:
        return missing[1], missing[2]
    # What the look-up of an attribute says; on CPython 3.15, pickle says no more.
    missing = re.match(r"(?:partially .*)?module '([\w.]+)'.* has no attribute '(\w+)'", text)
    return (missing[2], missing[1]) if missing else ("", "")


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


def is_of_the_call(error: BaseException) -> bool:
    """Return whether the call of the task itself has failed, and no line of its function."""
    return "File " not in _remote_traceback(error)


def _remote_traceback(error: BaseException) -> str:
    last = last_cause(error)
    return str(last) if isinstance(last, remote_traceback_type()) else ""


def _add_note(error: BaseException, snapshot: MainSnapshot, cure: str) -> None:
    """Add a note to `error` if this process has what the drone missed. Raises nothing."""
    with suppress(Exception):  # of the users' code
        newer = newer_object(error, snapshot)
        if newer is not None:
            error.add_note(
                f"the controller process has {newer}, perhaps only since the snapshot from which "
                f"the drone was started; {cure}, and Pool(fresh=True) one for each call of an idle "
                "pool"
            )
