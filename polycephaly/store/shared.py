"""`Shared`: a value stored in a pool's shared memory, for many calls.

    pool.share(obj) ──one copy──> segment <── each receiving drone maps the same pages

The mappings are copy-on-write: the writes of a call are private to that call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any, Generic, TypeVar

from ..memory.arena import Full, view
from ..memory.blocks import Store, pristine_view
from ..memory.references import Serialized, load_with_buffers
from ..promises.promise import pickling_state
from ..wire.main_names import MainSnapshot
from ..wire.pickling import pack_strictly
from .handle import StoredHandle

T = TypeVar("T")


class Shared(StoredHandle[tuple[bytes, list[Any], list[Any]]], Generic[T]):
    """A handle of a value that was put into shared memory once; made by `Pool.share`.

    In a call, the handle arrives as the value, wherever the handle stands: as an argument, inside
    one, or captured by the function. The handle is released by `release`, by the end of its
    ``with`` block, or when its last reference is lost. The memory is freed when no drone uses it
    any more.

    Notes
    -----
    Any thread may use a handle. Large buffers in the value (arrays, data frames) are not copied for
    a call: every drone maps the same memory, and a call's writes into them are private to that
    call. The rest of the value is pickled once, and unpickled by each call. A function that
    captures the handle holds the memory for as long as the call's promise lives.

    To drones with another snapshot (of another pool, or after `refresh`) the whole value is copied
    at each call, if its pickle names classes or functions of `__main__`. Inside another shared
    value, in a result, and through a channel, the handle travels as a handle.

    Examples
    --------
    >>> import polycephaly as poly
    >>> with poly.Pool(2) as pool, pool.share(bytearray(1_000_000)) as zeros:
    ...     pool.doit(len, zeros)
    1000000
    """

    # The one that the value was pickled against, if its pickle depends on that.
    _snapshot: MainSnapshot | None = None

    def __init__(
        self, pickled: bytes, views: list[Any], writable_views: list[Any] | None = None
    ) -> None:
        """Hold `views`, and the same places again as `writable_views` of this process."""
        nbytes = len(pickled) + sum(memoryview(each).nbytes for each in views)
        super().__init__(
            (pickled, views, views if writable_views is None else writable_views), nbytes
        )

    @property
    def value(self) -> T:
        """The value, rebuilt at each access.

        Its large buffers are views of the shared memory. This process may write to them: no other
        process sees these writes.

        Raises
        ------
        ValueError
            If the handle was released.
        """
        pickled, _, writable_views = self._get_content()
        value: T = load_with_buffers(pickled, writable_views)
        return value

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Any, ...]]:
        context = pickling_state.context
        rebuild: Callable[..., Any] = Shared
        if context is not None and context.snapshot is not None:
            if self._snapshot not in (None, context.snapshot):
                return _same, (self.value,)
            rebuild = load_with_buffers
        pickled, views, _ = self._get_content()
        wrap: Any = bytes if protocol < 5 else PickleBuffer
        return rebuild, (pickled, list(map(wrap, views)))


def share(value: T, snapshot: MainSnapshot, store: Store) -> Shared[T]:
    """Put `value` into shared memory.

    Raises `Full`, a `MemoryError`, if the limit would be exceeded or the system has no room.
    """
    try:
        serialized = pack_strictly(value, snapshot, store)
    except OSError as error:
        raise Full(f"no shared memory: {error}") from error
    handle: Shared[T]
    if isinstance(serialized, Serialized):
        handle = _make_handle(serialized)
    else:
        handle = Shared(serialized, [])
    pickled, views, _ = handle._get_content()
    # A large pickle is the first of the views itself. One without that name can be opened anywhere.
    if re.search(b"__main__", pickled or views[0]):
        handle._snapshot = snapshot
    return handle


def store_pickled(runs: Sequence[Sequence[bytes]], store: Store) -> Shared[Any]:
    """Put a value pickled by another process into shared memory, without opening it.

    `runs` holds the pieces of the pickle, then those of each buffer. Raises like `share`.
    """
    try:
        segment, places = store.put(runs)
    except OSError as error:
        raise Full(f"no shared memory: {error}") from error
    serialized = Serialized(b"", [(segment, start, length) for start, length in places])
    return _make_handle(serialized)


def _make_handle(serialized: Serialized) -> Shared[Any]:
    # Segments of handles inside the value are included.
    segments = {id(segment): segment for segment, _, _ in serialized.places}
    pristine = {key: pristine_view(segment) for key, segment in segments.items()}
    writable = {key: view(segment) for key, segment in segments.items()}
    places = [
        (id(segment), slice(start, start + length)) for segment, start, length in serialized.places
    ]
    views, writable_views = [
        [ranges[key][part] for key, part in places] for ranges in (pristine, writable)
    ]
    return Shared(serialized.inline, views, writable_views)


def _same(value: T) -> T:
    return value
