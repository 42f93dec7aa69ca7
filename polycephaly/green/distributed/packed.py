"""Items on their way between images: pickled by who sends, opened by who receives; nobody in
between looks inside."""

from __future__ import annotations

from pickle import loads
from typing import Any

from ...store import placeholders
from ...wire import pickling as capturing
from ...wire.exceptions import pack_exception, unpack_exception

__all__ = ["NOT_KNOWN", "PackedItem", "opened", "pack_reason", "packed", "unpack_reason"]


NOT_KNOWN = "was closed, or its home has no use for it any more"
"""Of a channel whose home knows nothing of it but its number; what else it is called, who asked
knows."""


class PackedItem:
    """An item that another image has sent, as it came."""

    __slots__ = ("content",)

    def __init__(self, content: bytes) -> None:
        self.content = content


def packed(item: Any) -> bytes:
    """Raises whatever the item's own pickling raises."""
    if item.__class__ is PackedItem:
        return item.content
    try:
        with placeholders.meeting(None):  # the handle of a kept value has no way through a channel
            return capturing.capture(item, capturing.common())
    except (SystemExit, GeneratorExit) as error:  # of the item's own code: it is to end nobody
        raise RuntimeError(
            f"pickling an item of a channel raised {type(error).__name__}: {error}"
        ) from error


def opened(item: Any) -> Any:
    """Raises whatever the item's own unpickling raises, with a note."""
    if item.__class__ is not PackedItem:
        return item
    try:
        return loads(item.content)
    except Exception as error:
        error.add_note("while unpickling an item that another image sent through a channel")
        raise
    except (SystemExit, GeneratorExit) as error:  # of the item's own code: it is to end nobody
        what = f"unpickling an item that another image sent through a channel raised {type(error).__name__}"
        raise RuntimeError(f"{what}: {error}") from error


def pack_reason(error: BaseException) -> bytes:
    """Why something has not happened, with the causes."""
    return pack_exception(error, packed)


def unpack_reason(content: bytes) -> BaseException:
    return unpack_exception(content)
