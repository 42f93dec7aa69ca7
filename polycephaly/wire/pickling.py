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
import threading
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pickle import PickleBuffer, dumps
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakSet, ref

import cloudpickle

from .._compat import class_setstate, reduce_code
from ..memory.arena import Full
from ..memory.blocks import MIN_SHARED_PICKLE_BYTES, Store
from ..memory.references import Place, Serialized
from ..promises.promise import NeedsPlaceholder
from ..runtime.sources import add_lines, lines_of

MIN_LARGE_BUFFER_BYTES = 64 * 1024
"""Minimum size in bytes of a buffer that is stored beside its pickle."""
_MIN_CONTENT_BYTES = 256 * 1024
"""Bytes; a larger piece written by a pickler is the content of one bytes or str, or a frame."""
_FRAME_OPCODES = (pickle.FRAME, pickle.PROTO)

BULKY_TYPES = frozenset((bytes, bytearray, str))
"""Types that pickle copies into its output; pass `bulky` to `pack` if such a value is large."""

ATOMIC_TYPES = (type(None), bool, int, float, complex, str, bytes)
"""Immutable types: for these, the same object has the same value for ever."""


def goes_with_calls(value: object) -> bool:
    """Return True for handles and channels: a copy in a forked process cannot stand for them."""
    return hasattr(type(value), "_goes_with_calls")


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
        self._values: dict[str, Any] = {}
        main = main_namespace()
        self._left_out = {
            name: _reference_to(main[name])
            for name in left_out
            if name in main and not name.startswith("__")
        }
        for name in list(main) if names is None else names:
            if name in main and not name.startswith("__"):
                self._values[name] = _reference_to(main[name])

    def has(self, name: str) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        return list(self._values)

    def unchanged(self, name: str, value: object) -> bool:
        """Return whether `value` was bound to `name` at the snapshot."""
        return self._is_same(self._values.get(name, self), value)

    def _is_same(self, held: object, value: object) -> bool:
        if isinstance(held, ref):
            held = held()
            return held is not None and held is value
        return held is value or (
            isinstance(value, ATOMIC_TYPES) and type(held) is type(value) and held == value
        )

    def is_current(self) -> bool:
        """Return whether `__main__` has the same names and objects as at the snapshot.

        The content of lists and other containers is not compared.
        """
        main = main_namespace()
        names = [name for name in list(main) if not name.startswith("__")]
        held = self._values | self._left_out
        return len(names) == len(held) and all(
            self._is_same(held.get(name, self), main.get(name)) for name in names
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


class _CommonSnapshot(MainSnapshot):
    """The content that several snapshots have in common."""

    def __init__(self, snapshots: Sequence[MainSnapshot]) -> None:
        self._snapshots = snapshots

    def has(self, name: str) -> bool:
        return bool(self._snapshots) and all(each.has(name) for each in self._snapshots)

    def unchanged(self, name: str, value: object) -> bool:
        return bool(self._snapshots) and all(
            each.unchanged(name, value) for each in self._snapshots
        )


def common_snapshot() -> MainSnapshot:
    """Return the content shared with the parent process and with all started processes."""
    snapshots = [each() for each in shared_snapshots]
    return snapshots[0] if len(snapshots) == 1 else _CommonSnapshot(snapshots)


shared_snapshots: list[Callable[[], MainSnapshot]] = []
"""Functions that return the snapshots which this process shares with others."""


def main_namespace() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


def capture(value: object, snapshot: MainSnapshot, *, small: bool = False) -> bytes:
    """Return the pickle of `value` as it is now, for a process that shares `snapshot`.

    Raises the errors of the value's own pickling; if `small`, also `_LargeBuffer` for a large
    buffer in the value.
    """
    try:
        plain = dumps(value, 5, buffer_callback=_only_small if small else None)
    except (_LargeBuffer, NeedsPlaceholder):
        raise
    except Exception:
        # A lambda, a local class, ...: only the by-value pickler can report the real error.
        plain = b"__main__"
    return (
        plain if b"__main__" not in plain else b"".join(_dump(_Capture, value, snapshot, None)[0])
    )


def pack(
    value: object, snapshot: MainSnapshot, store: Store | None, bulky: bool = False
) -> bytes | Serialized:
    """Do the same as `capture`, but put large parts into shared memory if there is room.

    Raises the errors of the value's own pickling. The value's pickling code may run twice.
    """
    if store is None:
        return capture(value, snapshot)
    names_main = False
    if not bulky and _extra.reducers is None:
        try:
            plain = dumps(value, 5, buffer_callback=_only_small)
        except NeedsPlaceholder:
            raise
        except Exception:  # the value has large buffers, or the plain pickler cannot pickle it
            pass
        else:
            names_main = b"__main__" in plain
            if not names_main:
                return plain if len(plain) < MIN_SHARED_PICKLE_BYTES else store_pickle(plain, store)
    try:
        return pack_strictly(value, snapshot, store, names_main)
    except (Full, OSError) as error:
        store.warn(error)
        return capture(value, snapshot)


def pickled_size(value: object, snapshot: MainSnapshot) -> int:
    """Return the bytes that `capture` would give, without copying large parts. Raises likewise."""
    pieces, buffers, _alive = _dump_in_pieces(value, snapshot)
    return sum(map(len, pieces)) + sum(each.nbytes for each in buffers)


def pack_out_of_band(value: object, snapshot: MainSnapshot) -> tuple[bytes, list[memoryview]]:
    """Return a pickle, and views of the large buffers beside it. Raises like `capture`."""
    pieces, buffers, _alive = _dump_in_pieces(value, snapshot)
    return b"".join(pieces), buffers


def pack_strictly(
    value: object, snapshot: MainSnapshot, store: Store, names_main: bool = False
) -> bytes | Serialized:
    """Do the same as `pack`, but raise `Full` or `OSError` if there is no room.

    Large parts are copied once only. `names_main`: the plain pickler's output names `__main__`.
    """
    pieces, buffers, _alive = _dump_in_pieces(value, snapshot, names_main)
    views = _with_views(pieces)
    if views is None:
        return _store_pieces([capture(value, snapshot)], [], store)
    return _store_pieces(views, buffers, store)


def _with_views(pieces: list[bytes]) -> list[Any] | None:
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
    return (len(piece) < _MIN_CONTENT_BYTES or piece[:1] in _FRAME_OPCODES) and b"__main__" in piece


class _LargeBuffer(Exception):
    """A buffer in the value is so large that it belongs beside the pickle."""


def _only_small(buffer: PickleBuffer) -> bool:
    """Return True if the plain pickler should put `buffer` into the pickle."""
    with buffer.raw() as raw:
        if raw.nbytes >= MIN_LARGE_BUFFER_BYTES:
            raise _LargeBuffer
    return True


def _dump(
    pickler_type: Any, value: object, snapshot: MainSnapshot, buffers: list[memoryview] | None
) -> tuple[list[bytes], object]:
    """Return the pieces of `value`'s pickle, and an object to keep alive as long as the pieces.

    Large pieces may be views. If `buffers` is given, large buffers are appended to that list
    instead of being put into the pickle.
    """

    def out_of_band(buffer: PickleBuffer) -> bool:
        if buffers is None:
            return True
        raw = buffer.raw()
        if raw.nbytes < MIN_LARGE_BUFFER_BYTES:
            return True
        buffers.append(raw)
        return False

    pieces = _Pieces()
    pickler = pickler_type(pieces, snapshot, out_of_band)
    pickler.dump(value)
    return pieces, pickler


def _dump_in_pieces(
    value: object, snapshot: MainSnapshot, names_main: bool = False
) -> tuple[list[bytes], list[memoryview], object]:
    """Return the pieces of `value`'s pickle, the buffers beside it, and an object to keep alive.

    The pieces may be views of that object's memory.
    """
    buffers: list[memoryview] = []
    if not names_main:
        try:
            pieces, alive = _dump(_Plain, value, snapshot, buffers)
            if not any(map(_may_name_main, pieces)):
                return pieces, buffers, alive
        except NeedsPlaceholder:
            raise
        except Exception:  # as in `capture`
            pass
        buffers = []
    pieces, alive = _dump(_Capture, value, snapshot, buffers)
    return pieces, buffers, alive


class _Pieces(list[bytes]):
    """A file object that stores the pieces written, so that large pieces are not copied."""

    write = list.append


def store_pickle(pickled: bytes, store: Store | None) -> bytes | Serialized:
    """Return the pickle, in shared memory if it is large and there is room."""
    if store is None:
        return pickled
    try:
        return _store_pieces([pickled], [], store)
    except (Full, OSError) as error:
        store.warn(error)
        return pickled


def join_payloads(
    head: Any, parts: Sequence[bytes | Serialized], store: Store | None
) -> bytes | Serialized:
    """Return several payloads as one, preceded by `head` (plain data). See `load_joined`."""
    inlines: list[tuple[bytes, int]] = []
    places: list[Place] = []
    written = 0
    for part in parts:
        if isinstance(part, Serialized):
            written += part.bytes_sent - len(part.inline)
            inlines.append((part.inline, len(part.places)))
            places += part.places
        else:
            inlines.append((part, 0))
    joined = store_pickle(dumps((head, inlines), 5), store)
    if isinstance(joined, Serialized):
        return Serialized(
            joined.inline,
            [*joined.places, *places],
            joined.bytes_sent - len(joined.inline) + written,
        )
    return Serialized(joined, places, written) if places else joined


def _store_pieces(pieces: list[Any], buffers: list[memoryview], store: Store) -> bytes | Serialized:
    if not buffers and sum(map(len, pieces)) < MIN_SHARED_PICKLE_BYTES:
        return b"".join(pieces)
    return store.put_pickle(pieces, buffers)


def _reduce_memoryview(view: memoryview) -> tuple[Any, tuple[Any, ...]]:
    if view.format not in _NATIVE_FORMATS:
        raise TypeError(f"a memoryview of format {view.format!r} cannot be sent: cast it to bytes")
    if view.ndim > 1 and not view.nbytes:
        # A memoryview cannot be cast to such a shape, but can be created from an array that has
        # this shape.
        import numpy

        return memoryview, (numpy.asarray(view),)
    content = PickleBuffer(
        view if view.c_contiguous else view.tobytes() if view.readonly else bytearray(view)
    )
    return _rebuild_memoryview, (content, view.format, view.shape)


def _rebuild_memoryview(content: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    flat = memoryview(content).cast("B")
    return flat.cast(format) if 0 in shape else flat.cast(format, shape)  # type: ignore[call-overload,no-any-return]


def _reduce_array(values: array.array[Any]) -> tuple[Any, tuple[Any, ...]]:
    return _rebuild_array, (values.typecode, PickleBuffer(values))


def _rebuild_array(typecode: str, buffer: Any) -> array.array[Any]:
    made: array.array[Any] = array.array(typecode)
    made.frombytes(buffer)
    return made


def _reduce_descriptor(descriptor: Any) -> tuple[Any, ...]:
    return (
        type(descriptor),
        (descriptor.func,),
        {name: value for name, value in vars(descriptor).items() if name not in _MADE_BY_INIT},
    )


def _reduce_partial_method(method: Any) -> tuple[Any, ...]:
    """Keep the function: CPython 3.14's own pickling would lose it."""
    return type(method), (method.func, *method.args), vars(method)


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


def reduce_code_with_source(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    """Reduce a code object, together with its source lines if these are in no file."""
    reduced = reduce_code(code)
    lines = lines_of(code)
    return (_make_code, (lines, *reduced)) if lines else reduced


def _make_code(lines: str, make: Any, args: tuple[Any, ...]) -> CodeType:
    code: CodeType = make(*args)
    add_lines(code.co_filename, code.co_firstlineno, lines)
    return code


class _ExtraReducers(threading.local):
    reducers: Any = None


_extra = _ExtraReducers()


@contextmanager
def extra_reducers(reducers: Any) -> Iterator[None]:
    """In this block and thread, `pack` asks `reducers` too: a table of reducers by type, or None.

    Reducers that are registered for a type come first.
    """
    outer, _extra.reducers = _extra.reducers, reducers
    try:
        yield
    finally:
        _extra.reducers = outer


def _with_extra(*tables: Any) -> ChainMap[Any, Any]:
    return ChainMap(*tables) if _extra.reducers is None else ChainMap(*tables, _extra.reducers)


class _Plain(pickle.Pickler):
    def __init__(
        self, target: Any, snapshot: MainSnapshot, out_of_band: Callable[[PickleBuffer], bool]
    ) -> None:
        super().__init__(target, protocol=5, buffer_callback=out_of_band)
        self.dispatch_table = _with_extra(_REDUCERS, copyreg.dispatch_table)


class _Capture(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
        _REDUCERS | {CodeType: reduce_code_with_source}
    )

    def __init__(
        self, target: Any, snapshot: MainSnapshot, out_of_band: Callable[[PickleBuffer], bool]
    ) -> None:
        self.dispatch_table = _with_extra(*type(self).dispatch_table.maps)  # read by __init__
        super().__init__(target, protocol=5, buffer_callback=out_of_band)
        self._snapshot = snapshot

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (type, FunctionType, _CACHED_TYPE)):
            return super().reducer_override(obj)
        if getattr(obj, "__module__", None) == "__main__" and self._snapshot.holds(obj):
            return NotImplemented  # the default: by reference
        if isinstance(obj, _CACHED_TYPE) or (
            isinstance(obj, FunctionType) and obj.__code__ is _DISPATCH_CODE
        ):
            return NotImplemented if _is_importable(obj) else _reduce_wrapper(obj)
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and obj.__globals__ is main_namespace():
            self._replace_shared_globals(reduced)
        return _reduce_class(obj, reduced)

    def _replace_shared_globals(self, reduced: Any) -> None:
        """Replace captured globals that the other process has anyway by their names.

        Without this, `lambda i: table[i]` would carry the whole table each time.
        """
        if not (isinstance(reduced, tuple) and len(reduced) == 6 and isinstance(reduced[2], tuple)):
            return  # cloudpickle can import the function
        captured = reduced[2][1].get("__globals__", {})
        for name, value in captured.items():
            if self._snapshot.unchanged(name, value) and not goes_with_calls(value):
                captured[name] = _ByName(name)


# -- wrappers of functools that are pickled by value -----------------------------------------------

_CACHED_TYPE: Any = type(functools.cache(abs))
_DISPATCH_CODE = functools.singledispatch(abs).__code__  # type: ignore[attr-defined]
"""The code object that all functions made by `singledispatch` share."""
_MADE_ANEW = {"cache_parameters", "dispatch", "register", "registry", "_clear_cache", "__wrapped__"}
_NAME_ATTRIBUTES = ("__module__", "__name__", "__qualname__", "__doc__")


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
    state = {name: getattr(obj, name) for name in _NAME_ATTRIBUTES if hasattr(obj, name)}
    state.update((name, value) for name, value in vars(obj).items() if name not in _MADE_ANEW)
    if isinstance(obj, _CACHED_TYPE):
        return _rebuild_cached, (obj.__wrapped__, obj.cache_parameters()), (None, state)
    return _rebuild_dispatching, (list(obj.registry.items()),), (None, state)


def _rebuild_cached(wrapped: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(wrapped)


def _rebuild_dispatching(registry: list[tuple[type, Callable[..., Any]]]) -> Any:
    made = functools.singledispatch(dict(registry)[object])
    for kind, function in registry:
        made.register(kind, function)
    return made


# -- classes pickled by value ----------------------------------------------------------------------

# cloudpickle recognises a class that arrives twice, and sets all its attributes anew, even in the
# process that the class comes from, when an instance returns there. The methods would then have
# copies of their globals. So the class is left unchanged in its own process.

_sent_classes: WeakSet[type] = WeakSet()
"""Classes of this process that were sent elsewhere."""
_received_classes: WeakSet[type] = WeakSet()
"""Classes that arrived here by value."""


_class_setstate = class_setstate()


def _reduce_class(obj: object, reduced: Any) -> Any:
    if not (
        isinstance(obj, type) and isinstance(reduced, tuple) and reduced[-1] is _class_setstate
    ):
        return reduced
    if obj not in _received_classes:
        _sent_classes.add(obj)
    return *reduced[:-1], _set_received_class


def _set_received_class(made: type, state: Any) -> type:
    if made not in _sent_classes:
        _received_classes.add(made)
        _class_setstate(made, state)
    return made


def _mark_sent_as_received() -> None:
    """Treat the parent's classes as arrived ones, in a forked child.

    The parent may change these classes and send them again.
    """
    _received_classes.update(_sent_classes)
    _sent_classes.clear()


os.register_at_fork(after_in_child=_mark_sent_as_received)


class _ByName:
    """Pickled as a name, and unpickled as the value of that name in the receiver's `__main__`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _value_of_name, (self._name,)


def _value_of_name(name: str) -> Any:
    looked_up.names.append(name)
    try:
        return main_namespace()[name]
    except KeyError:
        raise NameError(
            f"name {name!r} is not defined: the name was deleted in this drone", name=name
        ) from None


class _LookedUp(threading.local):
    """Names that this thread has looked up in `__main__` while unpickling. A caller that needs the
    list clears it before.
    """

    def __init__(self) -> None:
        self.names: list[str] = []


looked_up = _LookedUp()


def _reference_to(value: Any) -> Any:
    try:
        return ref(value)
    except TypeError:
        return value
