"""Work of a client's of a served pool: opened here, in a drone, and nowhere on its way.

The server gives it to its pool as a call of a `ForwardedFunction` on bytes, and sends back the
bytes that come of it. So nothing of a client's is unpickled in the server's image."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..runtime import forked
from ..wire.exceptions import pack_exception
from ..wire.messages import ERROR, VALUE
from ..wire.pickling import MainSnapshot, capture
from . import console
from .functions import LoadedFunction, define

__all__ = ["NOTHING", "ForwardedFunction", "lent", "pack_error", "relayed"]

NOTHING = MainSnapshot(())
"""What the client's `__main__` and this one have in common."""

_lent: tuple[Any, ...] = ()


def lent(index: int) -> Any:
    """In a client's arguments: one of the shared values that go beside them."""
    return _lent[index]


class ForwardedFunction(partial[tuple[int, bytes]]):
    """`relayed`, with a client's tag, and kind and bytes of its function. The drone opens the
    function once, and keeps it as long as this."""

    relays = True
    _definition: LoadedFunction | None = None

    def __call__(self, kind: int, payload: bytes, *shared: Any) -> tuple[int, bytes]:
        tag, *packed = self.args
        if self._definition is None:
            self._definition = define(*packed)
        return self.func(tag, self._definition, kind, payload, *shared)


def relayed(
    tag: str, definition: LoadedFunction, kind: int, payload: bytes, *shared: Any
) -> tuple[int, bytes]:
    """What came of it: status and payload, for its client. `shared` are the values that lie in
    shared memory.

    What is printed meanwhile is marked with `tag`. That stays on, for the client's next call,
    unless something was printed: then a line that was begun is not to wait for its end. The drone
    takes it off before work of others."""
    global _lent
    generation = forked.generation
    try:
        if console.tagged() != tag:
            console.tag(tag)
        _lent = shared
        value = definition.call(kind, payload)
        forked.leave_if_forked(generation)
        return VALUE, b"" if value is None else _packed(value)
    except (
        BaseException
    ) as error:  # all of them: what would be raised here would be rebuilt in the server's image
        forked.leave_if_forked(generation, error)
        return ERROR, pack_error(error)
    finally:
        _lent = ()
        if console.has_printed():
            console.tag("")


def pack_error(error: BaseException) -> bytes:
    """For a client."""
    return pack_exception(error, partial(capture, snapshot=NOTHING))


def _packed(value: object) -> bytes:
    try:
        return capture(value, NOTHING)
    except BaseException as error:
        error.add_note(f"while pickling the result, a {type(value).__qualname__}")
        raise
