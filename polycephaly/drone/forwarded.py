"""Tasks of clients of a served pool, which only the drone unpickles.

The server submits a client's task to its pool as a call of a `ForwardedFunction` on bytes, and
sends back the bytes of the result. So no object of a client is unpickled in the server's process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..errors import type_with_article
from ..runtime import forked
from ..wire.exceptions import describe_error, pack_exception
from ..wire.main_names import MainSnapshot
from ..wire.messages import ERROR, VALUE
from ..wire.pickling import capture
from . import console
from .functions import LoadedFunction, define

NO_SHARED_NAMES = MainSnapshot(())
"""The names that the client's `__main__` and this one have in common: none."""

_shared_values: tuple[Any, ...] = ()


def shared_value(index: int) -> Any:
    """Return one of the shared values that are sent beside a client's arguments.

    A client's pickled arguments contain calls of this function.
    """
    return _shared_values[index]


class ForwardedFunction(partial[tuple[Any, ...]]):
    """`run_client_call`, bound to a client's tag and to the kind and bytes of its function.

    The drone unpickles the function once, and keeps it as long as this object.
    """

    sets_tag = True
    _definition: LoadedFunction | None = None

    def __call__(self, kind: int, payload: bytes, *shared: Any) -> tuple[Any, ...]:
        tag, *packed = self.args
        if self._definition is None:
            self._definition = define(*packed)
        return self.func(tag, self._definition, kind, payload, *shared)

    def is_seeded(self) -> bool:
        return self._definition is not None and self._definition.is_seeded()


def run_client_call(
    tag: str, definition: LoadedFunction, kind: int, payload: bytes, *shared: Any
) -> tuple[Any, ...]:
    """Run a client's call and return status and payload for the client and, of an error, one line
    for the server, which does not open the payload.

    `shared` are the values in shared memory. Text printed by the call is marked with `tag`. The tag
    stays on for the client's next call, unless something was printed: then it is removed, so that a
    line that was begun is not held back. The drone removes the tag before other tasks.
    """
    global _shared_values
    generation = forked.generation
    try:
        if console.current_tag() != tag:
            console.set_tag(tag)
        _shared_values = shared
        value = definition.call(kind, payload)
        forked.exit_if_forked(generation)
        return VALUE, b"" if value is None else _pack_result(value)
    except BaseException as error:
        # All errors are caught, because a raised one would be rebuilt in the server's process.
        forked.exit_if_forked(generation, error)
        return ERROR, pack_error(error), describe_error(error)
    finally:
        _shared_values = ()
        if console.has_printed():
            console.set_tag("")


def pack_error(error: BaseException) -> bytes:
    """Serialize an error for a client."""
    return pack_exception(error, partial(capture, snapshot=NO_SHARED_NAMES))


def _pack_result(value: object) -> bytes:
    try:
        return capture(value, NO_SHARED_NAMES)
    except BaseException as error:
        error.add_note(f"while pickling the result, {type_with_article(value)}")
        raise
