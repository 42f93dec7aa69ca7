"""Pickling between processes that share a snapshot of `__main__`.

    value ──> plain C pickler ────────────────────────────────────> bytes  (most values: under 1 us)
               │ fails, or the output names `__main__`
               ├──> _Capture, a cloudpickle.Pickler ──────────────> bytes
               │      content of `__main__` at the snapshot: by reference
               │      anything else that cannot be imported: by value
               │ meets a large buffer (`pack` only)
               └──> _Plain, else _Capture, large buffers apart ───> Serialized, in shared memory

A forked drone holds the content that `__main__` had when the snapshot was taken, so a function or
class of that time travels as its name, even if typed at a prompt. Objects defined or rebound since
then travel by value. `MainSnapshot` tells the two apart; both ends have one, because results follow
the same rule.

The plain pickler would write `__main__.f` for a function that the other side never saw. So its
output is used only if the bytes `__main__` do not occur in it; a false alarm costs time only.
"""

from __future__ import annotations

import array
import copyreg
import functools
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from pickle import PickleBuffer, dumps
from types import FunctionType
from typing import Any
from weakref import WeakSet, ref

import cloudpickle
from cloudpickle.cloudpickle import _class_setstate

from ..store.arena import Full
from ..store.blocks import LARGE_PICKLE, Store
from ..store.references import Place, Serialized

__all__ = [
    "ATOMS",
    "BULKY",
    "LARGE_BUFFER",
    "MainSnapshot",
    "capture",
    "common",
    "join",
    "pack",
    "pack_beside",
    "pack_strictly",
    "pickled_size",
    "shared_with",
    "stored",
]

LARGE_BUFFER = 64 * 1024
"""Minimum size in bytes of a buffer that is stored beside its pickle."""
_CONTENT_FROM = 256 * 1024
"""Bytes; a larger piece written by a pickler is the content of one bytes or str, or a frame."""
_FRAMES = (pickle.FRAME, pickle.PROTO)

BULKY = frozenset((bytes, bytearray, str))
"""Types that pickle copies into its output; pass `bulky` to `pack` if such a value is large."""

ATOMS = (type(None), bool, int, float, complex, str, bytes)
"""Immutable types: for these, the same object has the same value for ever."""


class MainSnapshot:
    """The content of `__main__` at one moment.

    Functions, classes and all other objects that allow it are referenced weakly, so that the
    snapshot keeps only containers alive that do not (list, dict, set): these are held, because an
    `id` alone may be reused.
    """

    def __init__(self, names: Iterable[str] | None = None, left_out: Iterable[str] = ()) -> None:
        """Record `names` only, if given: a spawned process passes the names that it found when it
        imported the main module, or that were sent to that process. For the `left_out` names, only
        a change can be detected.
        """
        self._held: dict[str, Any] = {}
        main = main_namespace()
        self._left_out = {
            name: _hold(main[name])
            for name in left_out
            if name in main and not name.startswith("__")
        }
        for name in list(main) if names is None else names:
            if name in main and not name.startswith("__"):
                self._held[name] = _hold(main[name])

    def has(self, name: str) -> bool:
        return name in self._held

    def names(self) -> list[str]:
        return list(self._held)

    def unchanged(self, name: str, value: object) -> bool:
        """Return whether `value` was bound to `name` at the snapshot."""
        return self._is(self._held.get(name, self), value)

    def _is(self, held: object, value: object) -> bool:
        if isinstance(held, ref):
            held = held()
            return held is not None and held is value
        return held is value or (
            isinstance(value, ATOMS) and type(held) is type(value) and held == value
        )

    def is_current(self) -> bool:
        """Return whether `__main__` has the same names and objects as at the snapshot.

        The content of lists and other containers is not compared.
        """
        main = main_namespace()
        names = [name for name in list(main) if not name.startswith("__")]
        held = self._held | self._left_out
        return len(names) == len(held) and all(
            self._is(held.get(name, self), main.get(name)) for name in names
        )

    def holds(self, definition: Any) -> bool:
        """Return whether this function or class of `__main__` may be pickled by reference.

        The definition must still be bound to its own name.
        """
        path = getattr(definition, "__qualname__", "").split(".")
        if "<locals>" in path or not self.has(path[0]):
            return False
        found = main_namespace().get(path[0])
        if not self.unchanged(path[0], found):
            return False
        for step in path[1:]:
            found = getattr(found, step, None)
        return found is definition


class _Common(MainSnapshot):
    """The content that several snapshots have in common."""

    def __init__(self, all_of: Sequence[MainSnapshot]) -> None:
        self._all = all_of

    def has(self, name: str) -> bool:
        return bool(self._all) and all(each.has(name) for each in self._all)

    def unchanged(self, name: str, value: object) -> bool:
        return bool(self._all) and all(each.unchanged(name, value) for each in self._all)

    def names(self) -> list[str]:
        return [name for name in self._all[0].names() if self.has(name)] if self._all else []


def common() -> MainSnapshot:
    """Return the content shared with the parent process and with all started processes."""
    known = [each() for each in shared_with]
    return known[0] if len(known) == 1 else _Common(known)


shared_with: list[Callable[[], MainSnapshot]] = []
"""Functions that return the snapshots which this process shares with others."""


def main_namespace() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


def capture(value: object, snapshot: MainSnapshot, *, small: bool = False) -> bytes:
    """Return the pickle of `value` as it is now, for a process that shares `snapshot`.

    Raises the errors of the value's own pickling; if `small`, also `_Large` for a large buffer in
    it.
    """
    try:
        plain = dumps(value, 5, buffer_callback=_only_small if small else None)
    except _Large:
        raise
    except Exception:
        # A lambda, a local class, ...: only the by-value pickler can report the real error.
        plain = b"__main__"
    return (
        plain if b"__main__" not in plain else b"".join(_with(_Capture, value, snapshot, None)[0])
    )


def pack(
    value: object, snapshot: MainSnapshot, store: Store | None, bulky: bool = False
) -> bytes | Serialized:
    """Do the same as `capture`, but put large parts into shared memory if there is room.

    Raises the errors of the value's own pickling. The value's pickling code may run twice.
    """
    if store is None:
        return capture(value, snapshot)
    if not bulky:
        try:
            plain = dumps(value, 5, buffer_callback=_only_small)
        except Exception:  # the value has large buffers, or the plain pickler cannot pickle it
            plain = b"__main__"
        if b"__main__" not in plain:
            return plain if len(plain) < LARGE_PICKLE else stored(plain, store)
    try:
        return pack_strictly(value, snapshot, store)
    except (Full, OSError) as error:
        store.warn(error)
        return capture(value, snapshot)


def pickled_size(value: object, snapshot: MainSnapshot) -> int:
    """Return the bytes that `capture` would give, without copying large parts. Raises likewise."""
    pieces, buffers, _alive = _in_pieces(value, snapshot)
    return sum(map(len, pieces)) + sum(each.nbytes for each in buffers)


def pack_beside(value: object, snapshot: MainSnapshot) -> tuple[bytes, list[memoryview]]:
    """Return a pickle, and views of the large buffers beside it. Raises like `capture`."""
    pieces, buffers, _alive = _in_pieces(value, snapshot)
    return b"".join(pieces), buffers


def pack_strictly(value: object, snapshot: MainSnapshot, store: Store) -> bytes | Serialized:
    """Do the same as `pack`, but raise `Full` or `OSError` if there is no room.

    Large parts are copied once only.
    """
    pieces, buffers, _alive = _in_pieces(value, snapshot)
    views = _as_they_are(pieces)
    if views is None:
        return _put([capture(value, snapshot)], [], store)
    return _put(views, buffers, store)


def _as_they_are(pieces: list[bytes]) -> list[Any] | None:
    """Return the pieces, with a memoryview of each bytearray.

    The views keep other threads from resizing the bytearrays during the copy. Returns None if a
    bytearray was resized after the pickling: its length, recorded at the end of the piece before
    it, differs.
    """
    views: list[Any] = list(pieces)
    for index, piece in enumerate(views):
        if isinstance(piece, bytearray):
            view = views[index] = memoryview(piece)
            if int.from_bytes(bytes(views[index - 1][-8:]), "little") != len(view):
                return None
    return views


def _may_name_main(piece: bytes) -> bool:
    return (len(piece) < _CONTENT_FROM or piece[:1] in _FRAMES) and b"__main__" in piece


class _Large(Exception):
    """A buffer in the value is so large that it belongs beside the pickle."""


def _only_small(buffer: PickleBuffer) -> bool:
    """The plain pickler's `buffer_callback`: True puts the buffer into the pickle."""
    with buffer.raw() as raw:
        if raw.nbytes >= LARGE_BUFFER:
            raise _Large
    return True


def _with(
    maker: Any, value: object, snapshot: MainSnapshot, buffers: list[memoryview] | None
) -> tuple[list[bytes], object]:
    """Return the pieces of `value`'s pickle, and an object to keep alive as long as the pieces.

    Large pieces may be views. If `buffers` is given, large buffers are appended to that list
    instead of being put into the pickle.
    """

    def beside(buffer: PickleBuffer) -> bool:
        if buffers is None:
            return True
        raw = buffer.raw()
        if raw.nbytes < LARGE_BUFFER:
            return True
        buffers.append(raw)
        return False

    pieces = _Pieces()
    pickler = maker(pieces, snapshot, beside)
    pickler.dump(value)
    return pieces, pickler


def _in_pieces(
    value: object, snapshot: MainSnapshot
) -> tuple[list[bytes], list[memoryview], object]:
    """Return the pieces of `value`'s pickle, the buffers beside it, and an object to keep alive.

    The pieces may be views of that object's memory.
    """
    buffers: list[memoryview] = []
    try:
        pieces, alive = _with(_Plain, value, snapshot, buffers)
        if not any(map(_may_name_main, pieces)):
            return pieces, buffers, alive
    except Exception:  # as in `capture`
        pass
    buffers = []
    pieces, alive = _with(_Capture, value, snapshot, buffers)
    return pieces, buffers, alive


class _Pieces(list[bytes]):
    """A file object that stores the pieces written, so that large pieces are not copied."""

    write = list.append


def stored(pickled: bytes, store: Store | None) -> bytes | Serialized:
    """Return the pickle, in shared memory if it is large and there is room."""
    if store is None:
        return pickled
    try:
        return _put([pickled], [], store)
    except (Full, OSError) as error:
        store.warn(error)
        return pickled


def join(head: Any, parts: Sequence[bytes | Serialized], store: Store | None) -> bytes | Serialized:
    """Return several payloads as one, preceded by `head` (plain data). See `load_joined`."""
    inlines: list[tuple[bytes, int]] = []
    places: list[Place] = []
    written = 0
    for part in parts:
        if isinstance(part, Serialized):
            written += part.travels - len(part.inline)
            inlines.append((part.inline, len(part.places)))
            places += part.places
        else:
            inlines.append((part, 0))
    together = stored(dumps((head, inlines), 5), store)
    if isinstance(together, Serialized):
        return Serialized(
            together.inline,
            [*together.places, *places],
            together.travels - len(together.inline) + written,
        )
    return Serialized(together, places, written) if places else together


def _put(pieces: list[Any], buffers: list[memoryview], store: Store) -> bytes | Serialized:
    if not buffers and sum(map(len, pieces)) < LARGE_PICKLE:
        return b"".join(pieces)
    return store.parcel(pieces, buffers)


def _reduce_memoryview(it: memoryview) -> tuple[Any, tuple[Any, ...]]:
    if it.format not in _NATIVE_FORMATS:
        raise TypeError(f"a memoryview of format {it.format!r} cannot be sent: cast it to bytes")
    if it.ndim > 1 and not it.nbytes:
        # A memoryview cannot be cast to such a shape, but can be created from an array that has
        # this shape.
        import numpy

        return memoryview, (numpy.asarray(it),)
    content = PickleBuffer(
        it if it.c_contiguous else it.tobytes() if it.readonly else bytearray(it)
    )
    return _memoryview, (content, it.format, it.shape)


def _memoryview(content: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    flat = memoryview(content).cast("B")
    return flat.cast(format) if 0 in shape else flat.cast(format, shape)  # type: ignore[call-overload,no-any-return]


def _reduce_array(it: array.array[Any]) -> tuple[Any, tuple[Any, ...]]:
    return _array, (it.typecode, PickleBuffer(it))


def _array(typecode: str, buffer: Any) -> array.array[Any]:
    made: array.array[Any] = array.array(typecode)
    made.frombytes(buffer)
    return made


def _reduce_descriptor(it: Any) -> tuple[Any, ...]:
    return (
        type(it),
        (it.func,),
        {name: value for name, value in vars(it).items() if name not in _MADE_BY_INIT},
    )


def _reduce_partial_method(it: Any) -> tuple[Any, ...]:
    """Keep the function: CPython 3.14's own pickling would lose it."""
    return type(it), (it.func, *it.args), vars(it)


_MADE_BY_INIT = ("lock", "_method_cache")
"""Unpicklable attributes in CPython 3.11 (cached_property), 3.13.0 (singledispatchmethod)."""


_NATIVE_FORMATS = frozenset("bBhHiIlLqQnNfdc?")
_REDUCERS: dict[Any, Any] = {
    memoryview: _reduce_memoryview,
    array.array: _reduce_array,
    functools.cached_property: _reduce_descriptor,
    functools.partialmethod: _reduce_partial_method,
    functools.singledispatchmethod: _reduce_descriptor,
}


class _Plain(pickle.Pickler):
    def __init__(
        self, target: Any, snapshot: MainSnapshot, beside: Callable[[PickleBuffer], bool]
    ) -> None:
        super().__init__(target, protocol=5, buffer_callback=beside)
        registered: Any = copyreg.dispatch_table
        self.dispatch_table = ChainMap(_REDUCERS, registered)


class _Capture(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(_REDUCERS)

    def __init__(
        self, target: Any, snapshot: MainSnapshot, beside: Callable[[PickleBuffer], bool]
    ) -> None:
        super().__init__(target, protocol=5, buffer_callback=beside)
        self._snapshot = snapshot

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (type, FunctionType, _CACHED)):
            return super().reducer_override(obj)
        if getattr(obj, "__module__", None) == "__main__" and self._snapshot.holds(obj):
            return NotImplemented  # the default: by reference
        if isinstance(obj, _CACHED) or (
            isinstance(obj, FunctionType) and obj.__code__ is _DISPATCHES
        ):
            return NotImplemented if _is_importable(obj) else _reduce_wrapper(obj)
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and obj.__globals__ is main_namespace():
            self._leave_shared_globals(reduced)
        return _as_a_guest(obj, reduced)

    def _leave_shared_globals(self, reduced: Any) -> None:
        """Replace captured globals that the other process has anyway by their names.

        Without this, `lambda i: table[i]` would carry the whole table each time.
        """
        if not (isinstance(reduced, tuple) and len(reduced) == 6 and isinstance(reduced[2], tuple)):
            return  # cloudpickle can import the function
        captured = reduced[2][1].get("__globals__", {})
        for name, value in captured.items():
            if self._snapshot.unchanged(name, value) and not hasattr(
                type(value), "is_one_in_all_images"
            ):
                captured[name] = _ByName(name)


# -- wrappers of functools that are pickled by value -----------------------------------------------

_CACHED: Any = type(functools.cache(abs))
_DISPATCHES = functools.singledispatch(abs).__code__  # type: ignore[attr-defined]
"""The code object that all functions made by `singledispatch` share."""
_MADE_ANEW = {"cache_parameters", "dispatch", "register", "registry", "_clear_cache", "__wrapped__"}
_NAMES = ("__module__", "__name__", "__qualname__", "__doc__")


def _is_importable(obj: Any) -> bool:
    found = None if obj.__module__ == "__main__" else sys.modules.get(obj.__module__)
    for step in getattr(obj, "__qualname__", "").split("."):
        found = getattr(found, step, None)
    return found is obj


def _reduce_wrapper(obj: Any) -> Any:
    """Reduce a cached or dispatching function; a cached one arrives with an empty cache.

    If the wrapped function refers to its wrapper, the wrapper is reduced again while its arguments
    are pickled, and is in the memo after that: pickle then discards the outer reduction. At that
    moment the wrapped function has no names yet in the other process. So the wrapper's own names
    are part of its state, which is set attribute by attribute.
    """
    # A wrapper of a partial has no names.
    state = {name: getattr(obj, name) for name in _NAMES if hasattr(obj, name)}
    state.update((name, value) for name, value in vars(obj).items() if name not in _MADE_ANEW)
    if isinstance(obj, _CACHED):
        return _cached, (obj.__wrapped__, obj.cache_parameters()), (None, state)
    return _dispatching, (list(obj.registry.items()),), (None, state)


def _cached(wrapped: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(wrapped)


def _dispatching(registry: list[tuple[type, Callable[..., Any]]]) -> Any:
    made = functools.singledispatch(dict(registry)[object])
    for kind, function in registry:
        made.register(kind, function)
    return made


# -- classes pickled by value ----------------------------------------------------------------------

# cloudpickle recognises a class that arrives twice, and sets all its attributes anew, even in the
# process that the class comes from, when an instance returns there. The methods would then have
# copies of their globals. So the class is left unchanged in its own process.

_ours: WeakSet[type] = WeakSet()
"""Classes of this process that were sent elsewhere."""
_guests: WeakSet[type] = WeakSet()
"""Classes that arrived here by value."""


def _as_a_guest(obj: object, reduced: Any) -> Any:
    if not (
        isinstance(obj, type) and isinstance(reduced, tuple) and reduced[-1] is _class_setstate
    ):
        return reduced
    if obj not in _guests:
        _ours.add(obj)
    return *reduced[:-1], _set_guest


def _set_guest(made: type, state: Any) -> type:
    if made not in _ours:
        _guests.add(made)
        _class_setstate(made, state)
    return made


def _ours_are_guests() -> None:
    """Treat the parent's classes as arrived ones, in a forked child.

    The parent may change these classes and send them again.
    """
    _guests.update(_ours)
    _ours.clear()


os.register_at_fork(after_in_child=_ours_are_guests)


class _ByName:
    """Pickled as a name, and unpickled as the value of that name in the receiver's `__main__`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _look_up, (self._name,)


def _look_up(name: str) -> Any:
    looked_up.append(name)
    try:
        return main_namespace()[name]
    except KeyError:
        raise NameError(
            f"name {name!r} is not defined: it was deleted in this drone", name=name
        ) from None


looked_up: list[str] = []
"""Names looked up in `__main__` while unpickling. A caller that needs the list clears it before."""


def _hold(value: Any) -> Any:
    try:
        return ref(value)
    except TypeError:
        return value
