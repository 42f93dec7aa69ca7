"""`Shared`: a value that lies in a pool's shared memory, for many calls.

pool.share(obj) ──one copy──> segment <── each drone that is given it maps the same pages, copy-on-write
"""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PickleBuffer
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from ..wire.pickling import MainSnapshot, pack_strictly
from .arena import Full, view
from .blocks import Store, pristine_view
from .references import Serialized, load_beside

__all__ = ["Shared"]

T = TypeVar("T")


class Shared(Generic[T]):
    """The handle of a value that was put into shared memory once; made by `Pool.share`.

    Given as an argument by itself, it arrives as the value, as a promise does. Inside another
    value, or captured by a function, it arrives as a handle: see `value`. Large buffers in the
    value (arrays, data frames) are not copied for that: every drone maps the same memory, and what
    a call writes into them is that call's alone. The rest of the value is pickled once and
    unpickled by each call. To drones of another pool all of it is copied (by itself as an argument:
    nested or captured, it is what this pool's drones would find that arrives there).

    It lives until `release`, the end of its ``with`` block, or the loss of the last reference to
    it; what drones still look at stays until they do not. Any thread may use it.

    >>> import polycephaly as poly
    >>> with poly.Pool(2) as pool, pool.share(bytearray(1_000_000)) as zeros:
    ...     pool.doit(len, zeros)
    1000000
    """

    def __init__(
        self,
        pickled: bytes,
        views: list[Any],
        own: list[Any] | None = None,
        snapshot: MainSnapshot | None = None,
    ) -> None:
        """`own`: the same places once more, where this image may write. `snapshot`: for whom it was
        pickled."""
        self._content: tuple[bytes, list[Any]] | None = (pickled, views)
        self._own = views if own is None else own
        self._snapshot = snapshot

    @property
    def value(self) -> T:
        """The value, built anew each time. Its large buffers are views of the same memory in this
        image, into which this image may write; nobody else sees that. Raises `ValueError` after
        `release`."""
        pickled, _ = self._opened()
        value: T = load_beside(pickled, self._own)
        return value

    @property
    def nbytes(self) -> int:
        """Bytes of the value, as stored. Raises `ValueError` after `release`."""
        pickled, views = self._opened()
        return len(pickled) + sum(len(each) for each in views)

    def release(self) -> None:
        """Frees the memory as soon as nobody looks at it. Twice is no error."""
        self._content, self._own = None, []

    def _opened(self) -> tuple[bytes, list[Any]]:
        if self._content is None:
            raise ValueError("this shared value was released")
        return self._content

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.release()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Any, ...]]:
        parts = self._parts()
        return _arrive, parts if protocol >= 5 else tuple(map(bytes, parts))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def stand_in(self, snapshot: MainSnapshot) -> Any:
        """What is pickled in its place, to arrive as the value, for an image that shares
        `snapshot`."""
        return Contents(self) if self._snapshot in (None, snapshot) else self.value

    def _parts(self) -> tuple[Any, ...]:
        pickled, views = self._opened()
        return (pickled, *map(PickleBuffer, views))

    def __repr__(self) -> str:
        state = "released" if self._content is None else f"{self.nbytes:,} bytes"
        return f"<Shared {state} at {id(self):#x}>"


class Contents:
    """Stands for a handle in pickled arguments, and is unpickled as its value."""

    def __init__(self, handle: Shared[Any]) -> None:
        self._handle = handle

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _open, self._handle._parts()


def share(value: T, snapshot: MainSnapshot, store: Store) -> Shared[T]:
    """Raises `Full`, a `MemoryError`, where it would be more than may be shared, or the system has
    no room for it."""
    try:
        parcel = pack_strictly(value, snapshot, store)
    except OSError as error:
        raise Full(f"no shared memory: {error}") from error
    if not isinstance(parcel, Serialized):
        return Shared(parcel, [], snapshot=snapshot)
    return _stored(parcel, snapshot)


def hold(runs: Sequence[Sequence[bytes]], store: Store) -> Shared[Any]:
    """The same for what another process has pickled: the pieces of the pickle, and of each of its
    buffers. It is not opened here. Raises as `share` does."""
    try:
        segment, places = store.put(runs)
    except OSError as error:
        raise Full(f"no shared memory: {error}") from error
    return _stored(Serialized(b"", [(segment, start, length) for start, length in places]), None)


def _stored(parcel: Serialized, snapshot: MainSnapshot | None) -> Shared[Any]:
    segments = {
        id(segment): segment for segment, _, _ in parcel.places
    }  # also others, of handles in the value
    stored = {key: pristine_view(segment) for key, segment in segments.items()}
    own = {key: view(segment) for key, segment in segments.items()}
    places = [(id(segment), slice(at, at + length)) for segment, at, length in parcel.places]
    views, own_views = [[ranges[key][part] for key, part in places] for ranges in (stored, own)]
    return Shared(parcel.inline, views, own_views, snapshot)


def _arrive(pickled: bytes, *views: Any) -> Shared[Any]:
    return Shared(pickled, list(views))


def _open(pickled: bytes, *views: Any) -> Any:
    return load_beside(pickled, list(views))
