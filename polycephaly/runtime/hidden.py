"""A value that is not printed where a tool prints the locals of frames."""

from __future__ import annotations

from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Hidden(Generic[T_co]):
    """Holds a value that the frames below a task have, and that must not be in logs.

    Tools that print the locals of frames show the `repr` of objects and look into containers, so
    this is no container.
    """

    __slots__ = ("value",)

    def __init__(self, value: T_co) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hidden) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "<hidden>"
