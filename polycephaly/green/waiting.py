"""Who waits for something that somebody else will do, and how it is told."""

from __future__ import annotations

from typing import Any

from .scheduler import scheduler
from .thread import GreenThread

__all__ = ["NOTHING", "Refused", "Waiter"]

NOTHING: Any = object()
"""No item is to be had."""


class Waiter:
    """Waits in a queue for its turn at one end. `Offer` (select.py) is one that may have turned elsewhere."""

    __slots__ = ("item", "thread")

    def __init__(self, thread: GreenThread[Any], item: Any = None) -> None:
        self.thread = thread
        self.item = item

    def serve(self, value: Any) -> None:
        """It has its turn: `value` is what its await gives."""
        self.thread._value = value
        scheduler.ready.append(self.thread)

    def refuse(self, error: BaseException) -> None:
        """The channel was closed."""
        self.thread._value = Refused(error)
        scheduler.ready.append(self.thread)


class Refused:
    """Given in place of a value: the error to raise."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error
