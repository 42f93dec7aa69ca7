"""Tasks that a drone has received and not yet run."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

from ..wire.messages import KEEP
from .functions import LoadedFunction


class ReceivedTask:
    __slots__ = ("definition", "keeps", "kind", "number", "payload")

    def __init__(self, number: int, kind: int, definition: LoadedFunction, payload: Any) -> None:
        self.number = number
        self.kind = kind & ~KEEP
        self.keeps = bool(kind & KEEP)  # True if the value stays in this drone
        self.definition = definition
        self.payload = payload


class Calls:
    """Several tasks with one function, which came together.

    The main thread takes them from the left. The control thread takes those that it returns from
    the right or the middle.
    """

    __slots__ = ("definition", "queue")

    def __init__(
        self, definition: LoadedFunction, numbers: list[int], calls: list[tuple[Any, ...]]
    ) -> None:
        self.definition = definition
        self.queue: deque[tuple[int, tuple[Any, ...]]] = deque(zip(numbers, calls, strict=True))

    def take_from_end(self) -> list[int]:
        """Take all calls that were not begun and return their numbers, the last one first."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self.queue.pop()[0])
        return taken

    def withdraw(self, targets: set[int]) -> list[int]:
        """Take the calls in `targets` that were not begun, and return their numbers."""
        withdrawn = []
        for call in list(self.queue):
            if call[0] in targets:
                with suppress(ValueError):  # the main thread has just begun it
                    self.queue.remove(call)
                    withdrawn.append(call[0])
        return withdrawn
