"""A value that has arrived, and that no thread has needed yet.

    loop's thread ──settles a promise with──> Sealed ──open──> the value
                                                by the thread that reads it, or by a thread for
                                                that, where a wait has to end in time

Building a value runs code of users (`__setstate__`, imports), which may take any time, wait, or
fail. So the thread that settles promises does not build values, apart from those of small builtin
types. `done` is True before the value is built, and a value that is never read is never built.

No thread waits for another that builds a value, because the code of the value may wait for a
promise that the first thread has to settle. Of threads that read a value at the same time, each
builds it, and all get the object that was there first.
"""

from __future__ import annotations

import os
from _thread import get_ident
from collections.abc import Callable
from typing import Any, TypeGuard

from ..errors import copy_error

_building: set[tuple[int, int]] = set()
"""The `id`s of the values that are being built, each with the thread's `get_ident()`."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_building.clear)


class Sealed:
    """The value that `build` returns."""

    __slots__ = ("_build", "_values", "error", "request")

    stays_sealed = False
    """Whether promises keep this when it is open, and not only the value."""

    def __init__(self, build: Callable[[], Any] | None = None) -> None:
        self._build = build
        self._values: dict[None, Any] = {}  # at most one
        self.error: BaseException | None = None
        """Why a thread for that has failed to build it. An error in any other thread may have come
        from elsewhere (a signal handler, another thread, too little stack or memory), so the next
        one that reads the value tries again.
        """
        self.request: Any = None
        """A promise that settles when a thread for that has tried to open this, if one is to, and
        the generation (runtime/forked.py) of the process that has that thread.
        """

    def build(self) -> Any:
        """Return the value, made anew."""
        build = self._build
        return self._values[None] if build is None else build()

    def forget(self) -> None:
        """Give up what the value was built from, because this is open."""
        self._build = None

    @property
    def is_open(self) -> bool:
        return bool(self._values)

    @property
    def is_unopened(self) -> bool:
        """True if the thread that reads the value would have to build it."""
        return not (self.is_open or self.error is not None or self.is_slow())

    def is_slow(self) -> bool:
        """Return whether opening would fetch the value from another machine."""
        return False

    def serialized(self, registry: Any) -> Any:
        """Return the value as a part of arguments, a `Serialized`, as it has arrived; None if it
        must be opened.
        """
        return None

    def open(self) -> Any:
        """Return the value. Any thread may call this. Raises the errors of building it."""
        if not self._values:
            if self.error is not None:
                raise copy_error(self.error).with_traceback(self.error.__traceback__)
            here = id(self), get_ident()
            if here in _building:
                raise RuntimeError(
                    "code that rebuilds a result waited for that very result, which would then "
                    "wait for itself"
                )
            try:
                _building.add(here)
                self._values.setdefault(None, self.build())  # atomic: the first one stays
            finally:
                _building.discard(here)
            self.forget()
        return self._values[None]


def is_sealed(value: object) -> TypeGuard[Sealed]:
    """Return whether `value`, the stored value of a promise, has to be opened."""
    return issubclass(type(value), Sealed)
