"""The base of the handles of values that are stored elsewhere: `Shared`, `Kept` and others."""

from __future__ import annotations

from typing import Generic, Self, TypeVar

from ..promises.promise import Handle

C = TypeVar("C")


class StoredHandle(Handle, Generic[C]):
    """A handle that is released by `release`, or by the end of its ``with`` block.

    `_content` leads to the value; it is None after the release.
    """

    __slots__ = ("_content", "_nbytes")

    _how = "shared"

    def __init__(self, content: C, nbytes: int) -> None:
        self._content: C | None = content
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        """The size of the value as stored, in bytes.

        Raises
        ------
        ValueError
            If the handle was released.
        """
        self._get_content()
        return self._nbytes

    def release(self) -> None:
        """Free the memory as soon as nothing uses the value. A second call does nothing."""
        self._content = None

    def _get_content(self) -> C:
        content = self._content
        if content is None:
            raise ValueError(f"this {self._how} value was released")
        return content

    def _state(self, content: C) -> str:
        return f"{self._nbytes:,} bytes"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        content = self._content
        state = "released" if content is None else self._state(content)
        return f"<{type(self).__name__} {state} at {id(self):#x}>"
