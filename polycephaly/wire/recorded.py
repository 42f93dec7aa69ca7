"""Calls whose results are stored, as a drone runs them.

    fn ── RecordedFunction ──> a drone:  the pickle of fn(*args)

The drone pickles the value for the file, and these bytes are the result of the call. So the value
is pickled once, as it is when the call ends, and what the controller does with it changes nothing
in the file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..runtime.coroutines import is_coroutine, is_coroutine_function
from . import attempts
from .main_names import MainSnapshot
from .pickling import capture


class RecordedFunction(partial[Any]):
    """`run_recorded` or `run_recorded_beside_others`, bound to a function."""

    is_ours = True  # `args[0]` is the user's


class RecordedSeededFunction(RecordedFunction):
    """The same for a function with a seed: see seeding.py."""

    takes_index = True


def record(fn: Callable[..., Any], *, seeded: bool) -> RecordedFunction:
    """Return a function whose results are those of `fn`, pickled."""
    run = run_recorded_beside_others if is_coroutine_function(fn) else run_recorded
    return (RecordedSeededFunction if seeded else RecordedFunction)(run, fn)


def run_recorded(fn: Callable[..., Any], /, *args: Any) -> Any:
    """Return the pickle of ``fn(*args)``, or a coroutine that does."""
    value = fn(*args)
    return _awaited(value) if is_coroutine(value) else _pickled(value)


async def run_recorded_beside_others(fn: Callable[..., Any], /, *args: Any) -> bytes:
    """Return the pickle of a call of a coroutine function."""
    return _pickled(await fn(*args))


async def _awaited(value: Any) -> bytes:
    return _pickled(await value)


def _pickled(value: Any) -> bytes:
    snapshot = attempts.shared_snapshot
    try:
        return capture(value, MainSnapshot() if snapshot is None else snapshot)
    except Exception as error:
        error.add_note("while pickling the result, which is to be stored")
        raise


def carries_code(pickled: bytes) -> bool:
    """Return whether a pickle may have code by value, which other versions of Python cannot run.

    A text that names the modules of that code counts, too: its call is made again for nothing.
    """
    return b"cloudpickle" in pickled or b"polycephaly.wire.by_value" in pickled
