"""Pickling between processes that share a snapshot of `__main__`.

    value ──> plain C pickler ────────────────────────────────────> bytes  (most values: under 1 us)
               │ the output names `__main__`
               ├──> _NamePickler ────────────────────────────────> bytes
               │ fails, or meets what the snapshot does not have
               ├──> ByValuePickler (by_value.py) ────────────────> bytes
               │      content of `__main__` at the snapshot: by reference
               │      anything else that cannot be imported: by value
               │ meets a large buffer (`pack` only)
               └──> _Plain, else ByValuePickler, large ones apart ──> Serialized, in shared memory

A forked drone holds the content that `__main__` had when the snapshot was taken, so a function or
class of that time travels as its name, even if typed at a prompt. Objects defined or rebound since
then travel by value. `MainSnapshot` tells the two apart; both ends have one, because results follow
the same rule.

The plain pickler would write `__main__.f` for a function that the other side never saw. So its
output is used only if the bytes `__main__` do not occur in it; a false alarm costs time only. An
instance of a class of `__main__` that the snapshot has is written by `_NamePickler`, a plain
pickler that asks the snapshot about each class and function, in a tenth of the time that the
by-value pickler takes.
"""

from __future__ import annotations

import builtins
import copyreg
import pickle
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from io import BytesIO
from pickle import PickleBuffer, dumps
from types import FunctionType
from typing import Any
from weakref import ref

from ..memory.arena import Full
from ..memory.blocks import MIN_SHARED_PICKLE_BYTES, Store
from ..memory.references import Place, Serialized
from ..promises import promise as promises
from ..promises.promise import NeedsPlaceholder
from ..runtime import fork_guard
from ..runtime.signal_handlers import is_of_signal_handler
from .main_names import MainSnapshot
from .reducers import CACHED_TYPE, REDUCERS, PlainReducers, has_extra_reducers, with_extra

MIN_LARGE_BUFFER_BYTES = 64 * 1024
"""Minimum size in bytes of a buffer that is stored beside its pickle."""
_MIN_CONTENT_BYTES = 256 * 1024
"""Bytes; a larger piece written by a pickler is the content of one bytes or str, or a frame."""
_FRAME_OPCODES = (pickle.FRAME, pickle.PROTO)

BULKY_TYPES = frozenset((bytes, bytearray, str))
"""Types that pickle copies into its output; pass `bulky` to `pack` if such a value is large."""


def capture(value: object, snapshot: MainSnapshot, *, small: bool = False) -> bytes:
    """Return the pickle of `value` as it is now, for a process that shares `snapshot`.

    Raises the errors of the value's own pickling; if `small`, also `_LargeBuffer` for a large
    buffer in the value.
    """
    try:
        return _dump_by_reference(value, snapshot, small)
    except (_LargeBuffer, NeedsPlaceholder):
        raise
    except Exception as error:
        if is_of_signal_handler(error):
            raise
        # A lambda, a local class, ...: only the by-value pickler can report the real error.
    return b"".join(_dump(_by_value_pickler(), (value,), snapshot, None)[0])


def capture_builtins(value: object) -> bytes | None:
    """Return the pickle of `value` if it consists of builtin containers, texts and numbers; None if
    anything else may be in it.
    """
    try:
        pickled = dumps(value, 5)
    except Exception as error:
        if is_of_signal_handler(error):
            raise
        return None
    return None if GLOBAL_OPCODE in pickled and names_global(pickled) else pickled


def names_global(pickled: bytes) -> bool:
    """Return whether a class or function is named in a pickle that has `GLOBAL_OPCODE` in it. If
    not, there are only builtin containers, texts and numbers. Rarely, a number looks like a name.
    """
    return _CLASS.search(pickled) is not None


GLOBAL_OPCODE: bytes = pickle.STACK_GLOBAL
_CLASS = re.compile(rb"\x93(?:(?<=\x94\x93)|(?<=h.\x93)|(?<=j....\x93))", re.DOTALL)
"""STACK_GLOBAL, after a name that was just memoized, or was before. A class or function in a pickle
is written so."""


def pack(
    value: object, snapshot: MainSnapshot, store: Store | None, bulky: bool = False
) -> bytes | Serialized:
    """Do the same as `capture`, but put large parts into shared memory if there is room.

    Raises the errors of the value's own pickling. The value's pickling code may run several times.
    """
    if store is None:
        return capture(value, snapshot)
    names_main = False
    if not bulky and not has_extra_reducers():
        try:
            pickled = _dump_by_reference(value, snapshot, True)
            return (
                pickled if len(pickled) < MIN_SHARED_PICKLE_BYTES else store_pickle(pickled, store)
            )
        except _NeedsValue:
            names_main = True
        except NeedsPlaceholder:
            raise
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            # Else the value has large buffers, or the plain pickler cannot pickle it.
    try:
        return pack_strictly(value, snapshot, store, names_main)
    except (Full, OSError) as error:
        store.warn(error)
        return capture(value, snapshot)


def pickled_size(value: object, snapshot: MainSnapshot) -> int:
    """Return how many bytes `capture` would give, about, without copying large parts. Raises
    likewise.
    """
    pieces, buffers, _alive = _dump_in_pieces(value, snapshot)
    return sum(map(len, pieces)) + sum(each.nbytes for each in buffers)


def pack_out_of_band(value: object, snapshot: MainSnapshot) -> tuple[bytes, list[memoryview]]:
    """Return a pickle, and views of the large buffers beside it. Raises like `capture`."""
    pieces, buffers, _alive = _dump_in_pieces(value, snapshot)
    return b"".join(pieces), buffers


def pack_definitions(values: Iterable[object], store: Store | None) -> Any:
    """Return the pickles of `values`, one behind the other with one memo, for a process whose
    `__main__` has none of the names yet. Definitions of `__main__` go by value.

    Raises `Full` or `OSError` if there is a store without room, and the errors of pickling.
    """
    buffers: list[memoryview] | None = None if store is None else []
    pieces, _alive = _dump_definitions(values, buffers)
    if store is None:
        return b"".join(pieces)
    views = _with_views(pieces)
    if views is None:
        raise BufferError("a bytearray was resized while it was pickled")
    return _store_pieces(views, buffers or [], store)


def definitions_size(values: Iterable[object]) -> int:
    """Return how many bytes `pack_definitions` would give, about. Raises likewise."""
    buffers: list[memoryview] = []
    pieces, _alive = _dump_definitions(values, buffers)
    return sum(map(len, pieces)) + sum(each.nbytes for each in buffers)


def _dump_definitions(
    values: Iterable[object], buffers: list[memoryview] | None
) -> tuple[list[bytes], object]:
    from .by_value import DefinitionPickler

    return _dump(DefinitionPickler, values, MainSnapshot(()), buffers)


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


def _dump_by_reference(value: object, snapshot: MainSnapshot, small: bool) -> bytes:
    """Return the pickle of `value` if its classes and functions can go by their names.

    Raises `_NeedsValue` if one of `__main__` cannot, and the errors of the plain picklers.
    """
    global _expects_names
    if not _expects_names and type(value).__module__ != "__main__":
        pickled = _dump_plainly(value, small)
        if b"__main__" not in pickled:
            return pickled
    pickled = _dump_plainly(value, small, snapshot)
    _expects_names = b"__main__" in pickled
    return pickled


_expects_names = False
"""The last value named `__main__`, and so the next one probably will, too."""


def _dump_plainly(value: object, small: bool, snapshot: MainSnapshot | None = None) -> bytes:
    """Return what `pickle.dumps` would, but with exceptions as in exceptions.py. If `small`, raise
    `_LargeBuffer` for a large buffer. If `snapshot` is given, raise `_NeedsValue` for what it lacks
    of `__main__`. Raises `BufferError` if a large bytearray was resized meanwhile.

    Making a pickler takes longer than most pickles, so it is used again.
    """
    if len(copyreg.dispatch_table) != _reducers.registered:
        _reducers.update_registered()
    spare: Any = (_spare_picklers if snapshot is None else _spare_name_picklers)[small]
    one: _PlainPickler
    try:
        one = spare.pop()
    except IndexError:
        one = _PlainPickler(small) if snapshot is None else _NamePickler(small)
    if snapshot is not None:
        one.use(snapshot)
    one.dump(value)
    pieces = one.pieces
    if len(pieces) == 1:
        pickled = pieces[0]
    else:
        views = _with_views(pieces)
        if views is None:
            raise BufferError("a bytearray was resized while it was pickled")
        pickled = b"".join(views)
    if len(pickled) < _MAX_FOR_REUSE_BYTES:  # the memo of a pickler never shrinks
        pieces.clear()
        one.clear_memo()
        spare.append(one)
    return pickled


_reducers = PlainReducers()
_MAX_FOR_REUSE_BYTES = 64 * 1024


class _PlainPickler(pickle.Pickler):
    dispatch_table = _reducers

    def __init__(self, small: bool) -> None:
        self.pieces = _Pieces()
        super().__init__(self.pieces, 5, buffer_callback=_only_small if small else None)

    def use(self, snapshot: MainSnapshot) -> None:
        """Pickle for a process that shares `snapshot`, which must live until then."""


class _NamePickler(_PlainPickler):
    """A plain pickler that writes of `__main__` only what the other process has."""

    def __init__(self, small: bool) -> None:
        super().__init__(small)
        self._snapshot: ref[MainSnapshot] | None = None
        # Classes and functions that the snapshot has, by `id`. The pickler itself checks that such
        # a name is still bound to the same object. Weak, because a class may be replaced.
        self._held: dict[int, ref[Any]] = {}

    def use(self, snapshot: MainSnapshot) -> None:
        last = self._snapshot
        if last is None or last() is not snapshot or snapshot.may_shrink:
            self._snapshot = ref(snapshot)
            self._held.clear()
        if are_classes_by_value():
            raise _NeedsValue

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _DEFINITION_TYPES):
            held = self._held.get(id(obj))
            if (held is None or held() is not obj) and getattr(
                obj, "__module__", None
            ) == "__main__":
                self._check(obj)
        elif type(obj) in _TYPES_BY_VALUE or type(obj).__module__ == "typing":
            raise _NeedsValue
        return NotImplemented

    def _check(self, definition: Any) -> None:
        snapshot = None if self._snapshot is None else self._snapshot()
        if snapshot is None or not snapshot.holds(definition):
            raise _NeedsValue
        if len(self._held) >= _MAX_HELD:
            self._held.clear()
        self._held[id(definition)] = ref(definition)


def are_classes_by_value() -> bool:
    """Return whether users have told cloudpickle to pickle what a module defines by value."""
    cloudpickle = sys.modules.get("cloudpickle")
    return cloudpickle is not None and bool(cloudpickle.list_registry_pickle_by_value())


_DEFINITION_TYPES = (type, FunctionType, CACHED_TYPE)
# Types that the by-value pickler reduces in a way of its own, beside those of `typing`.
_TYPES_BY_VALUE = frozenset((*REDUCERS, getattr(builtins, "sentinel", None)))
_MAX_HELD = 256


class _NeedsValue(Exception):
    """The value has content of `__main__` that may have to go by value."""


_spare_picklers: tuple[deque[_PlainPickler], deque[_PlainPickler]] = (
    deque(maxlen=4),
    deque(maxlen=4),
)
"""For any value, and for one without large buffers."""
_spare_name_picklers: tuple[deque[_NamePickler], deque[_NamePickler]] = (
    deque(maxlen=4),
    deque(maxlen=4),
)


class _LargeBuffer(Exception):
    """A buffer in the value is so large that it belongs beside the pickle."""


def _only_small(buffer: PickleBuffer) -> bool:
    """Return True if the plain pickler should put `buffer` into the pickle."""
    with buffer.raw() as raw:
        if raw.nbytes >= MIN_LARGE_BUFFER_BYTES:
            raise _LargeBuffer
    return True


@cache  # so that `guard` is taken once only: a fork of a large image may hold it for long
def _by_value_pickler() -> type[pickle.Pickler]:
    # `guard` is held, so that no other thread forks during this import. A fork needs both `guard`
    # and the reactor's lock. So a thread that holds that lock (a finalizer may run then) is safe
    # without `guard`, and would risk a deadlock by waiting for it.
    holds_lock = promises.holds_reactor_lock
    with nullcontext() if holds_lock is not None and holds_lock() else fork_guard.guard:
        from .by_value import ByValuePickler
    return ByValuePickler


def _dump(
    pickler_type: Any,
    values: Iterable[object],
    snapshot: MainSnapshot,
    buffers: list[memoryview] | None,
) -> tuple[list[bytes], object]:
    """Return the pieces of the pickles of `values`, which share a memo, and an object to keep alive
    as long as the pieces.

    If `buffers` is given, large buffers are appended to that list instead of being put into the
    pickle, and large pieces may be views. Else there is one piece, a copy.
    """

    def out_of_band(buffer: PickleBuffer) -> bool:
        if buffers is None:
            return True
        raw = buffer.raw()
        if raw.nbytes < MIN_LARGE_BUFFER_BYTES:
            return True
        buffers.append(raw)
        return False

    pieces, copy = _Pieces(), BytesIO()
    pickler = pickler_type(copy if buffers is None else pieces, snapshot, out_of_band)
    for each in values:
        pickler.dump(each)
    return [copy.getvalue()] if buffers is None else pieces, pickler


def _dump_in_pieces(
    value: object, snapshot: MainSnapshot, names_main: bool = False
) -> tuple[list[bytes], list[memoryview], object]:
    """Return the pieces of `value`'s pickle, the buffers beside it, and an object to keep alive.

    The pieces may be views of that object's memory.
    """
    buffers: list[memoryview] = []
    if not names_main:
        try:
            pieces, alive = _dump(_Plain, (value,), snapshot, buffers)
            if not any(map(_may_name_main, pieces)):
                return pieces, buffers, alive
        except NeedsPlaceholder:
            raise
        except Exception as error:  # as in `capture`
            if is_of_signal_handler(error):
                raise
        buffers = []
    pieces, alive = _dump(_by_value_pickler(), (value,), snapshot, buffers)
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
            written += part.written
            inlines.append((part.inline, len(part.places)))
            places += part.places
        else:
            inlines.append((part, 0))
    joined = store_pickle(dumps((head, inlines), 5), store)
    if isinstance(joined, Serialized):
        return Serialized(joined.inline, [*joined.places, *places], joined.written + written)
    return Serialized(joined, places, written) if places else joined


def _store_pieces(pieces: list[Any], buffers: list[memoryview], store: Store) -> bytes | Serialized:
    if not buffers and sum(map(len, pieces)) < MIN_SHARED_PICKLE_BYTES:
        return b"".join(pieces)
    return store.put_pickle(pieces, buffers)


class _Plain(pickle.Pickler):
    def __init__(
        self, target: Any, snapshot: MainSnapshot, out_of_band: Callable[[PickleBuffer], bool]
    ) -> None:
        super().__init__(target, protocol=5, buffer_callback=out_of_band)
        self.dispatch_table = with_extra(REDUCERS, copyreg.dispatch_table)
