"""`RayShared`: a value in Ray's object store, for many calls."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

from ...pool.inputs import Placeholder
from ...promises.promise import FINISHED, Promise, pickling
from ...store.references import Serialized, load_beside
from ...wire.functions import FunctionRegistry
from ...wire.pickling import MainSnapshot, pack_strictly
from .buffers import LazyBuffers, RayStore

__all__ = ["RayShared", "share"]

T = TypeVar("T")


class RayShared(Placeholder, Generic[T]):
    """The handle of a value that was put into a cluster's object store once; made by `Pool.share`.

    Passed as an argument by itself, the handle arrives as the value. Inside another argument, it
    arrives as a handle with that `value`. The value lives until `release`, the end of the handle's
    ``with`` block, or the loss of the last reference. If Ray is shut down, the value is `Lost`.

    Notes
    -----
    Any thread may use a handle. Large buffers in the value (arrays, data frames) are not copied for
    a call: all drones on a node read the same memory, which is read-only.
    """

    def __init__(self, part: Serialized) -> None:
        self._promise: _SettledRef | None = _SettledRef(part)

    @property
    def value(self) -> T:
        """The value, rebuilt at each access.

        Raises
        ------
        ValueError
            If the handle was released.
        Lost
            If the node or the Ray session that had the value is gone.
        """
        value: T = self._held().result()
        return value

    @property
    def nbytes(self) -> int:
        """The size of the value as stored, in bytes.

        Raises
        ------
        ValueError
            If the handle was released.
        """
        return len(self._held().where)

    def release(self) -> None:
        """Free the memory as soon as no process uses it. A second call does nothing."""
        self._promise = None

    def stands_for(self) -> Promise[T]:
        return self._held()

    def _held(self) -> _SettledRef:
        promise = self._promise
        if promise is None:
            raise ValueError("this shared value was released")
        return promise

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if pickling.stand_in is None:
            raise TypeError(
                "a value shared on Ray goes among the arguments of its pool's calls only: give it as one"
            )
        return ResolvedShared, (_Slot(self._held()), self.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<RayShared {'released' if self._promise is None else f'{self.nbytes:,} bytes'} at {id(self):#x}>"


class ResolvedShared(Generic[T]):
    """The handle as it arrives in a drone inside another value."""

    def __init__(self, value: T, nbytes: int) -> None:
        self.value = value
        self.nbytes = nbytes


class _Slot:
    """Stands for a promise in pickled arguments; unpickled as the promise's value."""

    def __init__(self, promise: Promise[Any]) -> None:
        self._promise = promise

    def __reduce__(self) -> Any:
        assert pickling.stand_in is not None
        return pickling.stand_in(self._promise)


class _SettledRef(Promise[Any]):
    """A promise that is already settled, by a value in the object store."""

    _may_be_anywhere = _lies = True

    def __init__(self, part: Serialized) -> None:
        super().__init__()
        self.where = part
        self._settle(FINISHED, None, None)

    def _bring_here(self) -> Any:
        places: list[Any] = list(self.where.places)
        views = [LazyBuffers(each.cargo, each.session).buffers[index] for each, index, _ in places]
        return load_beside(self.where.inline, [memoryview(each) for each in views])

    def _part(self, registry: Any) -> Serialized | None:
        here = isinstance(registry.store, RayStore) and all(
            sealed.session == registry.store.session  # type: ignore[attr-defined]
            for sealed, _, _ in self.where.places
        )
        return self.where if here else None


def share(value: T, registry: FunctionRegistry) -> RayShared[T]:
    snapshot: MainSnapshot = registry.snapshot
    part = pack_strictly(value, snapshot, registry.store)  # type: ignore[arg-type]
    return RayShared(part if isinstance(part, Serialized) else Serialized(part, []))
