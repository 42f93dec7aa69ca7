"""Items in transit between processes: pickled by the sender and unpickled by the receiver only."""

from __future__ import annotations

from collections.abc import Sequence
from pickle import loads
from typing import Any

from ...wire import placeholders
from ...wire.exceptions import pack_exception
from ...wire.main_names import common_snapshot
from ...wire.pickling import capture

CLOSED_OR_RELEASED = "was closed, or its owning process has released it"
"""Said of a channel that the owning process knows only by number. The process that asked adds the
channel's name."""


class PackedItem:
    """A pickled item, and the ends of channels in it that this process still holds, each with the
    token that it had when it was pickled.
    """

    __slots__ = ("content", "ends")

    def __init__(self, content: bytes, ends: Sequence[tuple[Any, int]] = ()) -> None:
        self.content = content
        self.ends = ends

    def hand_on_ends(self) -> None:
        """Note that the item has been received, or will be."""
        for end, token in self.ends:
            end.hand_on(token)


def pack_item(item: Any) -> PackedItem:
    """Pickle `item`. Raises any error of the item's own pickling."""
    if isinstance(item, PackedItem):
        return item
    try:
        # Without a directory: a kept value's handle cannot go through a channel.
        with placeholders.PicklingContext(None) as pickling:
            content = capture(item, common_snapshot())
    except (SystemExit, GeneratorExit) as error:  # of the item's own code: must end no thread
        raise RuntimeError(
            f"pickling an item of a channel raised {type(error).__name__}: {error}"
        ) from error
    return PackedItem(content, [(each, each.pickled_token) for each in pickling.moved or ()])


def unpack_item(item: Any) -> Any:
    """Unpickle `item`. Raises any error of the item's own unpickling, with a note."""
    if item.__class__ is not PackedItem:
        return item
    try:
        return loads(item.content)
    # Of the item's own code: must end neither a thread nor a loop over the channel.
    except (SystemExit, GeneratorExit, StopIteration, StopAsyncIteration) as error:
        raise RuntimeError(
            "unpickling an item that another process sent through a channel raised "
            f"{type(error).__name__}: {error}"
        ) from error
    except BaseException as error:
        error.add_note("while unpickling an item that another process sent through a channel")
        raise


def pack_reason(error: BaseException) -> bytes:
    """Pickle the error of an operation that has not happened, with its causes."""
    return pack_exception(error, lambda value: pack_item(value).content)
