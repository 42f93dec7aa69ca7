"""How the items of a `map` are named: in errors, in the log, and beside the names of tasks."""

from __future__ import annotations

from contextlib import suppress

from ..runtime.checks import brief
from .hints import is_of_the_call
from .task import Task


def with_item(task: str, item: int | None, calls: int = 1) -> str:
    """Return the name of a task with its index in a `map`, if it has one; that of a chunk of
    several `calls` with the indices of the first and the last.
    """
    return task if item is None else f"{task}, {_item(item, calls)}"


def add_note(error: BaseException, label: str, task: Task, item: int | None = None) -> None:
    """Add a note to `error` that says which call of ``map(label, ...)`` has raised it: that of
    `item`, or, if None, the one of `task` that was running.

    Runs code of users, because the arguments are described.
    """
    first = task.first_item or 0
    found, calls = task.items if item is None else (item, 1)
    item = found or 0
    described = describe(task, item - first) if calls == 1 else ""
    with suppress(Exception):  # the exception's class may take no notes
        place = with_item(f"map({label}, ...)", item, calls)
        error.add_note(f"in {place}{described and ': '}{described}")
        if _is_row(error, task, item - first):
            error.add_note(f"if the items are rows of arguments: map({label}, *zip(*rows))")


def _is_row(error: BaseException, task: Task, index: int) -> bool:
    """Return whether a function misses an argument and has got a tuple or list as the only one."""
    if not isinstance(error, TypeError) or "required positional argument" not in str(error):
        return False
    if not is_of_the_call(error):
        return False
    args = task.item_args(index)
    return len(args) == 1 and isinstance(args[0], (tuple, list))


def describe(task: Task, index: int) -> str:
    """Return the arguments of one call of `task`, shortened; "" if they are not known here, or the
    pool does not want that.
    """
    if not task.dispatcher.describes_items:
        return ""
    try:
        return ", ".join(map(brief, task.item_args(index)))
    except Exception:  # they cannot be unpickled
        return "<unprintable>"


def _item(item: int, calls: int) -> str:
    return f"item {item}" if calls == 1 else f"one of the items {item} to {item + calls - 1}"
