"""Snapshot of `__main__`'s content, for drones that are not forks of the controller process.

    names of __main__ ─┬─> functions and classes: their code; globals are the drone's `__main__`
                       ├─> other picklable values; large data in shared memory if there is a store
                       └─> the rest: left out, with the reason, which a `NameError` reports

So code strings find the names that the controller's `__main__` defines, and functions and classes
then travel by name, as with a fork. Data are copies. Without a store (on Ray) the size of each
value is limited: share or push large data instead.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from ..memory.arena import Arena, Full
from ..memory.blocks import Store
from ..memory.references import RefTable, Serialized, load
from .main_names import MainSnapshot, main_namespace
from .pickling import capture, pack_strictly, pickled_size, store_pickle
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
    # By name, definitions first: headers, each with its pickle, whose large parts are in the arena.
    pickles: dict[str, bytes]
    left_out: dict[str, str]


def take_snapshot(store: Store | None = None, ref_table: RefTable | None = None) -> Snapshot:
    """Return a snapshot of this process's `__main__`.

    Ranges used in the store are lent by `ref_table`; the caller keeps them while drones may open
    them.
    """
    snapshot = Snapshot({}, {})
    main = main_namespace()
    names = {name: main[name] for name in list(main) if name not in _INTERPRETER_NAMES}
    for name, value in names.items():
        if (
            isinstance(value, (FunctionType, type, CACHED_TYPE))
            and getattr(value, "__module__", None) == "__main__"
        ):
            _add_pickle(name, snapshot, ref_table, _pickle_definition, value, store)
    defined = MainSnapshot(snapshot.pickles)
    for name, value in names.items():
        if name not in snapshot.pickles and name not in snapshot.left_out:
            _add_pickle(name, snapshot, ref_table, _pickle_data, value, store, defined)
    return snapshot


def restore_snapshot(snapshot: Snapshot, arena: Arena | None = None) -> MainSnapshot:
    """Put the snapshot into this process's `__main__`, except values that cannot be opened."""
    main = main_namespace()
    # The controller process lends the ranges for ever: no number is returned.
    ref_table = RefTable(arena, None, lambda: None)  # type: ignore[arg-type]
    for name, header in snapshot.pickles.items():
        try:
            main[name] = load(ref_table.receive(header))
        except Exception as error:
            print(
                f"{name} of the controller process could not be loaded: "
                f"{type(error).__name__}: {error}",
                file=sys.stderr,
            )
    return MainSnapshot(snapshot.pickles)


def _add_pickle(
    name: str,
    snapshot: Snapshot,
    ref_table: Any,
    pickle_value: Callable[..., bytes | Serialized],
    *args: Any,
) -> None:
    try:
        pickled = pickle_value(*args)
    except _TooLarge as error:
        snapshot.left_out[name] = str(error)
    except Exception as error:
        snapshot.left_out[name] = f"the value cannot be pickled: {type(error).__name__}: {error}"
    else:
        if not isinstance(pickled, Serialized):
            pickled = Serialized(pickled, [])
        snapshot.pickles[name] = pickled.pack_header(ref_table)


class _TooLarge(Exception):
    """The value is too large to be copied to every drone."""


def _check_size(size: int) -> None:
    if size > MAX_PICKLE_BYTES:
        raise _TooLarge(
            f"the value is too large to be copied to every drone ({size >> 20:,} MiB): share or "
            "push the value"
        )


def _pickle_data(value: Any, store: Store | None, defined: MainSnapshot) -> bytes | Serialized:
    if store is not None:
        try:
            return pack_strictly(value, defined, store)
        except (Full, OSError):
            pass
    # Measured before pickling: a value that is left out should not cost its memory a second time.
    _check_size(pickled_size(value, defined))
    return capture(value, defined)


def _pickle_definition(value: Any, store: Store | None) -> bytes | Serialized:
    from .by_value import DefinitionPickler

    file = io.BytesIO()
    DefinitionPickler(file).dump(value)
    packed = store_pickle(file.getvalue(), store)
    if isinstance(packed, bytes):
        _check_size(len(packed))
    return packed
