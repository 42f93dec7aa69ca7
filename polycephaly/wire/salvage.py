"""Unpickling of what can be opened, if one of several values of a pickle cannot.

    values, one after another, with one memo ──> the C unpickler, for all of them
                                                   │ one of them raises
                                                   └──> Salvager: goes on behind each error

The C unpickler cannot go on after an error: its memo would no longer agree with the pickle, and
later values would get wrong objects in silence. `Salvager` puts the object as it is by then, or a
`_Missing`, in the place of one that cannot be made, and goes on. A value counts as lost if it leads
to such an object.
"""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from types import FunctionType, ModuleType
from typing import Any, ClassVar

from .main_names import main_namespace

_OPERANDS = {
    pickle.STACK_GLOBAL: 2, pickle.GLOBAL: 0, pickle.REDUCE: 2, pickle.NEWOBJ: 2,
    pickle.NEWOBJ_EX: 3, pickle.BUILD: 2, pickle.APPEND: 2, pickle.SETITEM: 3,
}  # fmt: skip
"""The operations that run code of users or import modules, and how many operands they take."""
_FILLING = (pickle.APPENDS, pickle.SETITEMS, pickle.ADDITEMS)
"""Those that fill the object on top of the stack with all that is above a mark."""
_FILLED = (pickle.BUILD, pickle.APPEND, pickle.SETITEM)


class _Missing:
    """In the place of an object that could not be made."""


class Salvager(pickle._Unpickler):
    """An unpickler in Python. After each `load`, `why_lost` tells whether the value is whole."""

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

    def __init__(self, pickled: Any, buffers: Sequence[Any]) -> None:
        super().__init__(BytesIO(pickled), buffers=buffers)
        self._failed: dict[int, tuple[object, BaseException]] = {}  # by `id`

    def why_lost(self, value: object) -> BaseException | None:
        """Return the error because of which a part of `value` is missing, or None."""
        if self._failed:
            for each in _parts(value):
                if id(each) in self._failed:
                    return self._failed[id(each)][1]
        return None

    def _note(self, failed: object, error: BaseException) -> None:
        self._failed.setdefault(id(failed), (failed, error))


def _guarded(load: Callable[[Any], None], code: bytes, operands: int) -> Callable[[Any], None]:
    def guarded(self: Any) -> None:
        stack = self.stack
        start = len(stack) - operands
        first = stack[start] if operands else None
        try:
            load(self)
        except (Exception, SystemExit) as error:
            lost = first if code in _FILLED or isinstance(first, _Missing) else _Missing()
            self._note(lost, error)
            stack[start:] = [lost]

    return guarded


def _guarded_filling(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def guarded(self: Any) -> None:
        try:
            load(self)
        except (Exception, SystemExit) as error:
            self._note(self.stack[-1], error)  # what was above the mark is gone

    return guarded


for _code, _operands in _OPERANDS.items():
    Salvager.dispatch[_code[0]] = _guarded(Salvager.dispatch[_code[0]], _code, _operands)
for _code in _FILLING:
    Salvager.dispatch[_code[0]] = _guarded_filling(Salvager.dispatch[_code[0]])


def _parts(value: object) -> Iterator[object]:
    """Yield `value` and all objects that it leads to, but not by way of other modules."""
    main = main_namespace()
    seen = {id(main), id(sys.modules)}
    todo = [value]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, ModuleType):
            continue
        seen.add(id(each))
        yield each
        if not isinstance(each, (FunctionType, type)) or each.__module__ == "__main__":
            todo += gc.get_referents(each)
