"""What `__main__` holds, for drones that are no forks of it.

    names of __main__ ──> functions and classes: their code, with the drone's `__main__` for their globals
                     └──> all else that can be pickled, large data in shared memory if there is a store
    the rest ──> left out, with the reason, which a `NameError` tells

So code strings find what the main image has defined, and functions and classes travel as names
afterwards, as they do to a fork. Data are copies. Without a store (on Ray) a name has a limit:
large data are better shared or pushed."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pickle import loads
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle

from ..store.arena import Arena, Full, Keep, view
from ..store.blocks import Store
from ..store.references import Serialized, load_beside
from .pickling import MainSnapshot, capture, main_namespace, pack_strictly, pickled_size, stored

__all__ = ["Snapshot", "enter", "take"]

LARGEST = 16 << 20
"""Bytes of one name's pickle, where there is no shared memory for it."""
_OF_THE_INTERPRETER = frozenset((
    "__annotate__", "__annotations__", "__builtins__", "__cached__", "__conditional_annotations__", "__loader__",
    "__name__", "__spec__",
))  # fmt: skip
"""Names that each `__main__` has for itself. Others that begin with two underscores are the
user's."""


class Placed(NamedTuple):
    """A pickle of which the large parts lie in the arena. Whoever made it holds the segments."""

    inline: bytes
    places: list[
        tuple[int, int, int, int]
    ]  # offset and length of the segment; start and length in it

    def load(self, arena: Arena | None) -> Any:
        assert arena is not None  # where there was a store
        views = []
        for offset, whole, start, length in self.places:
            keep = Keep(arena, offset, whole)
            keep.lasting = True  # the main image's: its end here gives nothing back
            views.append(view(keep)[start : start + length])
        return load_beside(self.inline, views)


class Snapshot(NamedTuple):
    """Pickles by name, definitions first."""

    definitions: dict[str, bytes | Placed]
    data: dict[str, bytes | Placed]
    left_out: dict[str, str]

    def names(self) -> list[str]:
        return [*self.definitions, *self.data]


def take(store: Store | None = None, held: list[Keep] | None = None) -> Snapshot:
    """Of this image as it is now. What lies in the store is added to `held`, to be kept while
    drones may open it."""
    taken = Snapshot({}, {}, {})
    main = main_namespace()
    names = {name: main[name] for name in list(main) if name not in _OF_THE_INTERPRETER}
    for name, value in names.items():
        if (
            isinstance(value, (FunctionType, type))
            and getattr(value, "__module__", None) == "__main__"
        ):
            _try(
                name,
                taken.definitions,
                taken.left_out,
                held,
                lambda value=value: _definition(value, store),
            )
    defined = MainSnapshot(taken.definitions)
    for name, value in names.items():
        if name not in taken.definitions and name not in taken.left_out:
            _try(
                name,
                taken.data,
                taken.left_out,
                held,
                lambda value=value: _captured(value, defined, store),
            )
    return taken


def enter(snapshot: Snapshot, arena: Arena | None = None) -> MainSnapshot:
    """Puts it into this image's `__main__`; what cannot be opened here is not there."""
    main = main_namespace()
    for name, packed in {**snapshot.definitions, **snapshot.data}.items():
        try:
            main[name] = packed.load(arena) if isinstance(packed, Placed) else loads(packed)
        except Exception as error:
            print(
                f"{name} of the main image is not here: {type(error).__name__}: {error}",
                file=sys.stderr,
            )
    return MainSnapshot(snapshot.names())


def _try(
    name: str,
    into: dict[str, bytes | Placed],
    left_out: dict[str, str],
    held: list[Keep] | None,
    packed: Callable[..., bytes | Serialized],
) -> None:
    try:
        made = packed()
    except _TooLarge as error:
        left_out[name] = str(error)
    except Exception as error:
        left_out[name] = f"it cannot be pickled: {type(error).__name__}: {error}"
    else:
        if isinstance(made, Serialized):
            assert held is not None
            held += [segment for segment, _, _ in made.places]
            into[name] = Placed(
                made.inline,
                [(s.offset, s.length, start, length) for s, start, length in made.places],
            )
        else:
            into[name] = made


class _TooLarge(Exception):
    """To be copied to every drone."""


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise _TooLarge(
            f"it is too large to be copied to every drone ({size >> 20:,} MiB): share or push it"
        )


def _captured(value: Any, defined: MainSnapshot, store: Store | None) -> bytes | Serialized:
    if store is not None:
        try:
            return pack_strictly(value, defined, store)
        except (Full, OSError):
            pass
    _check_size(
        pickled_size(value, defined)
    )  # first: what is left out should not cost its memory once more
    return capture(value, defined)


def _definition(value: Any, store: Store | None) -> bytes | Serialized:
    file = io.BytesIO()
    _Definitions(file, protocol=5).dump(value)
    packed = stored(file.getvalue(), store)
    if isinstance(packed, bytes):
        _check_size(len(packed))
    return packed


class _Definitions(cloudpickle.Pickler):  # type: ignore[misc]
    """By value, and with the other image's `__main__` for globals."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if (
            isinstance(obj, FunctionType)
            and obj.__globals__ is main_namespace()
            and isinstance(reduced, tuple)
        ):
            function, args, state, *rest = reduced
            args = (args[0], _Main(), *args[2:])
            slots, attributes = state
            attributes["__globals__"] = {}
            return (function, args, (slots, attributes), *rest)
        return reduced


class _Main:
    """Is unpickled as the other image's `__main__`."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return main_namespace, ()
