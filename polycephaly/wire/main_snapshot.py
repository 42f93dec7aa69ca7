"""Snapshot of `__main__`'s content, for drones that are not forks of the controller process.

    names of __main__ ─┬─> functions and classes: their code; globals are the drone's `__main__`
                       ├─> other picklable values; large data in shared memory if there is a store
                       └─> the rest: left out, with the reason, which a `NameError` reports

All names are pickled with one memo, one after another, so two names of one object are two names of
one object in the drone, too. They are opened in the same order, definitions first, and each is
bound before the next is opened, whose code may need it.

So code strings find the names that the controller's `__main__` defines, and functions and classes
then travel by name, as with a fork. Data are copies. Without a store (on Ray) the size of each
value is limited: share or push large data instead.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from io import BytesIO
from types import FunctionType
from typing import Any, NamedTuple

from ..memory.arena import Arena
from ..memory.blocks import Store
from ..memory.references import RefTable, Serialized
from .main_names import MainSnapshot, main_namespace
from .pickling import definitions_size, pack_definitions
from .reducers import CACHED_TYPE

MAX_PICKLE_BYTES = 16 << 20
"""Limit in bytes of the pickle of one name, if there is no shared memory for it."""
_INTERPRETER_NAMES = frozenset((
    "__annotate__", "__annotations__", "__builtins__", "__cached__", "__conditional_annotations__",
    "__loader__", "__name__", "__spec__",
))  # fmt: skip
"""Names that each `__main__` has for itself. Other names that begin with two underscores are the
user's.
"""


class Snapshot(NamedTuple):
    # Names with their pickles, in the order of opening: headers, whose large parts are in the
    # arena. One, unless the values can be pickled only one by one.
    parts: list[tuple[tuple[str, ...], bytes]]
    left_out: dict[str, str]

    @property
    def names(self) -> list[str]:
        return [name for names, _ in self.parts for name in names]


def take_snapshot(store: Store | None = None, ref_table: RefTable | None = None) -> Snapshot:
    """Return a snapshot of this process's `__main__`.

    Ranges used in the store are lent by `ref_table`; the caller keeps them while drones may open
    them.
    """
    snapshot = Snapshot([], {})
    main = main_namespace()
    names = {name: main[name] for name in list(main) if name not in _INTERPRETER_NAMES}
    names = dict(sorted(names.items(), key=lambda item: not _is_definition(item[1])))
    if store is None or not _add(names, snapshot, store, ref_table):
        for name in list(names):
            try:
                size = definitions_size([names[name]])
                if store is None:
                    _check_size(size)
            except Exception as error:
                snapshot.left_out[name] = _reason(error)
                del names[name]
        if not _add(names, snapshot, store, ref_table):
            for name, value in names.items():
                _add_alone(name, value, snapshot, store, ref_table)
    return snapshot


def _is_definition(value: object) -> bool:
    return (
        isinstance(value, (FunctionType, type, CACHED_TYPE))
        and getattr(value, "__module__", None) == "__main__"
    )


def _add(names: dict[str, Any], snapshot: Snapshot, store: Store | None, ref_table: Any) -> bool:
    """Add `names` with one memo. Return False if that fails, because of one of them or for want of
    memory.
    """
    try:
        packed = pack_definitions(names.values(), store)
    except Exception:
        return False
    if not isinstance(packed, Serialized):
        packed = Serialized(packed, [])
    snapshot.parts.append((tuple(names), packed.pack_header(ref_table)))
    return True


def _add_alone(
    name: str, value: Any, snapshot: Snapshot, store: Store | None, ref_table: Any
) -> None:
    if store is not None and _add({name: value}, snapshot, store, ref_table):
        return
    try:
        # Measured before pickling: a value that is left out should not cost its memory twice.
        _check_size(definitions_size([value]))
        header = Serialized(pack_definitions([value], None), []).pack_header(ref_table)
    except Exception as error:
        snapshot.left_out[name] = _reason(error)
    else:
        snapshot.parts.append(((name,), header))


def restore_snapshot(snapshot: Snapshot, arena: Arena | None = None) -> MainSnapshot:
    """Put the snapshot into this process's `__main__`, except values that cannot be opened."""
    # The controller process lends the ranges for ever: no number is returned.
    ref_table = RefTable(arena, None, lambda: None)  # type: ignore[arg-type]
    for names, header in snapshot.parts:
        inline, views = ref_table.receive(header).content()
        _restore(names, inline or views[0], views if inline else views[1:])
    return MainSnapshot(snapshot.names)


def _restore(names: Iterable[str], pickled: Any, buffers: list[Any]) -> None:
    main = main_namespace()
    unpickler = pickle.Unpickler(BytesIO(pickled), buffers=buffers)
    try:
        for name in names:
            main[name] = unpickler.load()
    except (Exception, SystemExit):
        # Again, because one memo means that the values after this one cannot be opened alone.
        from .salvage import Salvager

        salvager = Salvager(pickled, buffers)
        for name in names:
            main.pop(name, None)
            value = salvager.load()
            error = salvager.why_lost(value)
            if error is None:
                main[name] = value
            else:
                print(
                    f"{name} of the controller process could not be loaded: "
                    f"{type(error).__name__}: {error}",
                    file=sys.stderr,
                )


class _TooLarge(Exception):
    """The value is too large to be copied to every drone."""


def _reason(error: Exception) -> str:
    if isinstance(error, _TooLarge):
        return str(error)
    return f"the value cannot be pickled: {type(error).__name__}: {error}"


def _check_size(size: int) -> None:
    if size > MAX_PICKLE_BYTES:
        raise _TooLarge(
            f"the value is too large to be copied to every drone ({size >> 20:,} MiB): share or "
            "push the value"
        )
