"""In a notebook, one warning tells what the controller process has changed since the snapshot, and
drones do not see.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from .._compat import caller_stacklevel
from ..runtime.prompt import Cell, running_cell
from ..wire.functions import label, of_user
from ..wire.main_names import (
    ATOMIC_TYPES,
    MainSnapshot,
    global_names,
    goes_with_calls,
    main_namespace,
)

_UNCHANGING = (*ATOMIC_TYPES, FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
_MAX_COPIED_ITEMS = 1000


class StaleWarning:
    """In IPython and Jupyter: one warning of a pool when a call reads a global that cells may have
    changed since the snapshot. Any thread may call its methods; two at once may both warn.
    """

    def __init__(self, pool: str, cell: Cell) -> None:
        self._pool = pool
        self._snapshot_cell = cell
        self._copies = _copies_of_containers()  # at the snapshot
        self._seen: tuple[object, Cell | None] = None, None
        self._has_warned = False

    def on_snapshot(self) -> None:
        self._snapshot_cell = running_cell() or self._snapshot_cell
        self._copies = _copies_of_containers()
        self._seen = None, None

    def check(self, work: Any, snapshot: MainSnapshot) -> None:
        """Warn if `work` reads such a global."""
        cell = running_cell()
        if self._has_warned or cell is None or self._seen == (work, cell):
            return
        self._seen = work, cell
        # The cell that runs now may only have begun; one before it has run in the meantime.
        others_ran = cell.number > self._snapshot_cell.number + 1
        for name, how in _stale_globals(work, snapshot, self._copies, others_ran):
            self._has_warned = True
            warnings.warn(
                f"{label(work)} reads {name}, {how} the snapshot of {self._pool}: the drones have "
                "it as it was then. pool.refresh() takes a new snapshot, and Pool(fresh=True) one "
                "for each cell that calls the pool",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )
            return


def _stale_globals(
    work: Any, snapshot: MainSnapshot, copies: dict[str, Any], others_ran: bool
) -> Iterator[tuple[str, str]]:
    """Yield the globals that `work` reads in the drone, and that may be older there than here."""
    main = main_namespace()
    for name, in_drone in _globals_read(work, snapshot):
        value = main.get(name)
        if name not in main or not snapshot.has(name) or goes_with_calls(value):
            continue
        if not snapshot.unchanged(name, value):
            if in_drone:
                yield name, "which was bound anew after"
        elif name in copies:
            if copies[name] != value:
                yield name, "which was changed after"
        elif others_ran and not isinstance(value, _UNCHANGING):
            yield name, "which cells may have changed after"


def _copies_of_containers() -> dict[str, Any]:
    """Return copies of those globals of which a copy shows each change: small containers of
    immutable values.
    """
    copies = {
        name: value.copy()  # at once: another thread may be changing it
        for name, value in list(main_namespace().items())
        if type(value) in (list, dict, set) and len(value) <= _MAX_COPIED_ITEMS
    }
    return {
        name: copied
        for name, copied in copies.items()
        if all(type(each) in ATOMIC_TYPES for each in _items(copied))
    }


def _items(container: Any) -> Iterator[object]:
    yield from container
    if type(container) is dict:
        yield from container.values()


def _globals_read(work: Any, snapshot: MainSnapshot) -> Iterator[tuple[str, bool]]:
    """Yield the names of `__main__` that `work` and the functions called by it read, and whether
    they are looked up in the drone even if they were bound anew: by what goes by reference.
    """
    main, seen = main_namespace(), set()
    todo: list[tuple[CodeType, bool]] = []

    def add(each: Any) -> None:
        while isinstance(each, (partial, MethodType)):
            each = each.func if isinstance(each, partial) else each.__func__
        if isinstance(each, FunctionType) and each.__globals__ is main and id(each) not in seen:
            seen.add(id(each))
            todo.append((each.__code__, snapshot.goes_by_reference(each)))

    work = of_user(work)
    if isinstance(work, str):
        with suppress(SyntaxError, ValueError):
            todo.append((compile(work, "<doit>", "exec", dont_inherit=True), True))
    else:
        add(work)
    while todo:
        code, in_drone = todo.pop()
        for name in dict.fromkeys(global_names(code)):
            yield name, in_drone
            add(main.get(name))
