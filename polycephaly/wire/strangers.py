"""Modules that this image got since a snapshot, and that the other image could not import.

    sys.modules now - those of then ──> found on the path of then? ──yes──> its content goes by reference
                                                          └──no──> a stranger: its content goes by value

A module that was there at the snapshot is in a fork too. One that was imported since can be imported by the other image
where the path that it has, which is that of then, leads to the same file. One that was made of text, or loaded from a
file by itself, or lies in a directory that was put on the path since, cannot. Packages are judged as a whole, once:
mostly nothing is new, which the length of `sys.modules` and its last name tell. Threads may look at once: they find the
same.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from typing import Any

__all__ = ["Strangers"]


class Strangers:
    def __init__(self) -> None:
        self._then: list[str] = list(sys.modules)
        self._known: frozenset[str] | None = None  # the packages of these, once that is asked for
        self._path = list(sys.path)
        self._looked_at = _newest()
        self._judged: dict[str, bool] = {}  # packages that came since: whether they are strangers
        self._marks: tuple[bytes, ...] = ()  # the names of such modules, as a pickle has them

    def has(self, module: str | None) -> bool:
        if _newest() != self._looked_at:
            self._look()
        return self._judged.get(_top(module), False) if module and self._judged else False

    def may_be_in(self, pickled: bytes) -> bool:
        """Whether it names something of theirs. Maybe falsely, but never falsely not."""
        if _newest() != self._looked_at:
            self._look()
        return bool(self._marks) and any(mark in pickled for mark in self._marks)

    def _look(self) -> None:
        newest, names = _newest(), list(sys.modules)
        known = self._known = self._known or frozenset(map(_top, self._then))
        for name in names:
            top = _top(name)
            if top not in known and top not in self._judged:
                self._judged[top] = not self._can_be_imported(top)
        self._marks = tuple([_mark(name) for name in names if self._judged.get(_top(name))])
        self._looked_at = newest

    def _can_be_imported(self, name: str) -> bool:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is None:
            return False
        if spec.loader in (BuiltinImporter, FrozenImporter):
            return True
        others: list[Any] = [each for each in sys.meta_path if each is not PathFinder]
        for finder, path in [(PathFinder, self._path), *((each, None) for each in others)]:
            with suppress(Exception):  # of other people's finders
                found = finder.find_spec(name, path)
                if found is not None and found.origin == spec.origin:
                    return True
        return False


def _newest() -> tuple[int, str]:
    try:
        return len(sys.modules), next(reversed(sys.modules))
    except RuntimeError:  # it has grown just now
        return 0, ""


def _top(module: str) -> str:
    return module.partition(".")[0]


def _mark(name: str) -> bytes:
    """A short string of protocol 5 (that of a longer one begins with its content)."""
    text = name.encode("utf-8", "surrogatepass")
    return b"\x8c" + bytes((len(text),)) + text if len(text) < 256 else text
