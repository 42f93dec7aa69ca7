"""Functions and code strings that the controller has defined in a drone.

A function arrives as bytes and is unpickled at its first call, by the thread that runs tasks. So an
unpickling error rejects that call only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..memory.references import load, load_again, load_joined, load_with_buffers
from ..runtime.coroutines import is_coroutine
from ..wire.code_strings import Code
from ..wire.main_names import FreeNames, bind_names, collected_free_names
from ..wire.messages import CALL, CALL_FILLED, CALL_KEYWORDS, DEFINE_CODE, DEFINE_OVERLAPPING, FRESH
from ..wire.placeholders import promised_values
from ..wire.shareable import BATCHED_TYPES


class LoadedFunction:
    """A callable, called with pickled arguments. A code string is one without arguments."""

    overlaps = False
    """True if calls give coroutines that are run beside others."""

    fresh = False
    """True if each call gets a function object of its own, because it may change what it captured.
    """

    brief = False
    """True if the last call was brief: then only measurements that cost nothing are made."""

    # Names that were in `__main__` at the snapshot, or pushed. They are looked up at each call,
    # because a task may have bound them to other objects.
    _free_names: FreeNames = {}  # noqa: RUF012 - not changed
    _may_have_free_names = True

    def __init__(self, payload: Any, function: Callable[..., Any] | None = None) -> None:
        self._payload = payload  # bytes, or `Received`
        self._function = function

    def sets_tag(self) -> bool:
        """Return True if calls set the output tag of a client themselves: see forwarded.py."""
        return getattr(self._function, "sets_tag", False) is True

    def is_seeded(self) -> bool:
        """Return True if calls seed the global generators themselves: see random_numbers.py."""
        function = self._function
        return getattr(type(function), "takes_index", False) is True or (
            self.sets_tag() and function.is_seeded()  # type: ignore[union-attr]
        )

    def call(self, kind: int, payload: Any) -> Any:
        """Return the value of a call; a coroutine is run to its end, as a green thread."""
        return run_if_coroutine(self.begin(kind, payload))

    def call_with(self, args: tuple[Any, ...]) -> Any:
        """Return the value of a call with unpickled arguments."""
        function = self._function
        if function is None or self.fresh or self._free_names:
            function = self.function(self.fresh)
        value = function(*args)
        return value if type(value) in BATCHED_TYPES else run_if_coroutine(value)

    def begin(self, kind: int, payload: Any) -> Any:
        """Return the value of a call, or a coroutine that is still to be run."""
        function = self.function(self.fresh)
        try:
            args, kwargs = _arguments(kind, payload)
        except BaseException as error:
            error.add_note(
                f"while unpickling the arguments of {getattr(function, '__qualname__', function)}"
            )
            raise
        return function(*args, **kwargs)

    def function(self, fresh: bool) -> Callable[..., Any]:
        """Return the callable; if `fresh`, unpickle it once more."""
        function = self._function
        if function is None or fresh:
            function = self._function = None  # so that the new one gets its memory
            function = self._open()
        for namespace, names in self._free_names.values():
            bind_names(namespace, names)
        return function

    def _open(self) -> Callable[..., Any]:
        try:
            function: Callable[..., Any]
            open_payload = load_again if self.fresh else load
            if self._may_have_free_names:
                with collected_free_names() as self._free_names:
                    function = open_payload(self._payload)
                self._may_have_free_names = bool(self._free_names)
            else:  # as at the first opening
                function = open_payload(self._payload)
        except BaseException as error:
            error.add_note("while unpickling the function itself")
            raise
        self._function = function
        return function


def run_if_coroutine(value: Any) -> Any:
    """Return `value`, or, for a coroutine, its result after a run as a green thread."""
    if is_coroutine(value):
        from ..green import run

        return run(value)
    return value


def define(kind: int, payload: Any) -> LoadedFunction:
    if kind == DEFINE_CODE:
        return LoadedFunction(b"", Code(payload))
    definition = LoadedFunction(payload)
    definition.overlaps = kind & ~FRESH == DEFINE_OVERLAPPING
    definition.fresh = bool(kind & FRESH)
    return definition


def _arguments(kind: int, payload: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if kind == CALL:
        return (load(payload) if len(payload) else ()), {}
    if kind == CALL_KEYWORDS:
        args, kwargs = load(payload)
        return args, kwargs
    assert kind == CALL_FILLED
    separate, (outer, inner, *parts) = load_joined(payload)
    values = load_with_buffers(*inner)
    # Of values that did not pass through the controller.
    for index, part in zip(separate, parts, strict=True):
        values[index] = load_with_buffers(*part)
    promised_values.values = values
    try:
        args, kwargs = load_with_buffers(*outer)
    finally:
        promised_values.values = ()
    return args, kwargs
