"""Work of a client's of a served pool: opened here, in a drone, and nowhere on its way.

The server gives it to its pool as a call of `relayed` on bytes, and sends back the bytes that come of it. So nothing
of a client's is unpickled in the server's image.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from ..wire.capture import MainSnapshot, capture
from ..wire.exceptions import pack_exception
from ..wire.messages import ERROR, VALUE
from . import console
from .definitions import Definition, define

__all__ = ["NOTHING", "lent", "pack_error", "relayed"]

NOTHING = MainSnapshot(())
"""What the client's `__main__` and this one have in common."""

_KEPT = 256


@lru_cache(_KEPT)
def _defined(kind: int, definition: bytes) -> Definition:
    return define(kind, definition)


_lent: tuple[Any, ...] = ()


def lent(index: int) -> Any:
    """In a client's arguments: one of the shared values that go beside them."""
    return _lent[index]


def relayed(
    tag: str, definition_kind: int, definition: bytes, kind: int, payload: bytes, *shared: Any
) -> tuple[int, bytes]:
    """What came of it: status and payload, for its client. `shared` are the values that lie in shared memory.

    What is printed meanwhile is marked with `tag`. That stays on, for the client's next call, unless something was
    printed: then a line that was begun is not to wait for its end. The drone takes it off before work of others.
    """
    global _lent
    try:
        if console.tagged() != tag:
            console.tag(tag)
        _lent = shared
        value = _defined(definition_kind, definition).call(kind, payload)
        return VALUE, b"" if value is None else _packed(value)
    except BaseException as error:  # all of them: what would be raised here would be rebuilt in the server's image
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
