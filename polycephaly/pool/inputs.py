"""Promises among the arguments of a call, and the propagation of their failures.

    arguments ──pickled──> a placeholder per promise ──> the drone: `promised_value(index)`
                              └──> PicklingContext.inputs: the call waits for these

The pickler finds the promises at any depth, because it visits every object anyway. So arguments
that are no promises cost nothing. A function that captures a promise travels as an argument itself
(wire/functions.py). The drone replaces a placeholder by the value, so objects that are shared
within the arguments are shared in the drone too.

A graph of thousands of calls that wait for each other fails as one. The thread that comes first
settles the calls that a rejection reaches, one after another and never nested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from itertools import filterfalse
from typing import Any

from ..errors import copy_error
from ..promises.promise import Promise, name_of, reject, stored_error
from ..promises.trampoline import Trampoline

_MIN_STALE_HOOKS = 32
_INPUT_NOTE = "failed input: "


# -- propagation of failures -----------------------------------------------------------------------


_failures = Trampoline(max_depth=1)


def propagate_failure(
    task: Any, settled: Promise[Any], opening_error: BaseException | None = None
) -> None:
    """Reject `task`, because its input `settled` has no value, or one that cannot be opened.

    The error is a copy of the input's error, with a note that names the input; or `CancelledError`
    if the input was cancelled.
    """
    if settled.cancelled():
        error: BaseException = CancelledError(
            f"{name_of(settled)}, an input of {name_of(task.promise)}, was cancelled"
        )
    else:
        stored = stored_error(settled) if opening_error is None else opening_error
        assert stored is not None
        # A copy for one more promise. If all promises shared one error, each raise would add the
        # frames of its waiter to it, and keep these frames alive as long as any of the promises.
        trace, context = stored.__traceback__, stored.__context__
        error = copy_error(stored).with_traceback(trace)
        with suppress(Exception):  # as in `copy_error`
            error.__context__ = context
        _add_input_note(error, settled)
    _failures.run(_reject, task, error)


def _reject(task: Any, error: BaseException) -> None:
    try:
        reject(task.promise, error)
    finally:
        task.release_inputs()
        task.dispatcher.on_inputs_ready(task)


def _add_input_note(error: BaseException, settled: Promise[Any]) -> None:
    """Add a note that names the input, once: a path of a thousand calls must not add a thousand
    lines.
    """
    notes: Sequence[object] = getattr(error, "__notes__", ())
    if not any(isinstance(note, str) and note.startswith(_INPUT_NOTE) for note in notes):
        with suppress(Exception):  # if the error accepts no notes
            error.add_note(f"{_INPUT_NOTE}{name_of(settled)}")


def remove_settled_hooks(inputs: Iterable[Any]) -> None:
    """Remove the hooks of settled tasks from their inputs, now and then.

    Called when a task that waited for `inputs` has settled. An input that stays pending while many
    tasks come and go must not keep them all alive. If about half of its hooks belong to settled
    tasks, these are removed. So each hook is looked at about twice.
    """
    for each in inputs:
        if isinstance(each, Promise) and not each.done():
            each._stale_hooks += 1  # not exact if several threads do so at once, and need not be
            stale = each._stale_hooks
            if stale > _MIN_STALE_HOOKS and 2 * stale > len(each._hooks or ()):
                each._stale_hooks = 0
                for _ in waiters(each):
                    pass


def waiters(promise: Promise[Any]) -> Iterator[Any]:
    """Yield the hooks of those that wait for `promise`, the newest first.

    Hooks of settled tasks are removed on the way, many at once. An object with `_only_follows`,
    such as the end of a channel that was sent with a call, does not wait.
    """
    hooks = promise._hooks or []
    stale: set[object] = set()
    left = len(hooks)
    try:
        while left:
            left -= 1
            try:
                hook: Any = hooks[left]
            except IndexError:  # other threads call hooks meanwhile, or remove some
                continue
            waiter = getattr(hook, "__self__", None)
            awaiting = getattr(waiter, "promise", waiter)  # of a task
            if isinstance(awaiting, Promise):
                is_over = awaiting.done()
            else:
                is_over = getattr(waiter, "_only_follows", None) is True
            if not is_over:
                yield hook
            elif hook == getattr(waiter, "_on_input_settled", None):
                stale.add(hook)
    finally:
        if not left or len(stale) >= _MIN_STALE_HOOKS:
            # In C, so no hook is added or called between the look and the removal: these are bound
            # methods of tasks, which compare by identity.
            hooks[:] = filterfalse(stale.__contains__, hooks)
