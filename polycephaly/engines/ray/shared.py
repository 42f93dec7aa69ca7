"""`RayShared`: a value in Ray's object store, for many calls."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from ...memory.references import Serialized, load_with_buffers
from ...promises.promise import FINISHED, Promise, misplaced_error, pickling_state
from ...promises.sealed import Sealed
from ...store.handle import StoredHandle
from ...wire.functions import FunctionRegistry
from ...wire.main_names import MainSnapshot
from ...wire.pickling import pack_strictly
from .buffers import LazyBuffers, RayStore

T = TypeVar("T")


class RayShared(StoredHandle["_SettledRef"], Generic[T]):
    """The handle of a value that was put into a cluster's object store once; made by `Pool.share`.

    In a call, the handle arrives as the value, wherever the handle stands. The value lives until
    `release`, the end of the handle's ``with`` block, or the loss of the last reference. If Ray is
    shut down, the value is `Lost`.

    Notes
    -----
    Any thread may use a handle. Large buffers in the value (arrays, data frames) are not copied for
    a call: all drones on a node read the same memory, which is read-only.
    """

    def __init__(self, packed: Serialized) -> None:
        super().__init__(_SettledRef(packed), len(packed))

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
        value: T = self._get_content().result()
        return value

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        context = pickling_state.context
        if context is None or context.inputs is None:
            raise misplaced_error(
                "a value shared on Ray can be pickled only for calls of its own pool"
            )
        placeholder: tuple[Any, tuple[Any, ...]] = context.add_input(self._get_content())
        return placeholder


class _SettledRef(Promise[Any]):
    """A promise that is already settled, by a value in the object store."""

    def __init__(self, packed: Serialized) -> None:
        super().__init__()
        self._settle(FINISHED, _InStore(packed), None)


class _InStore(Sealed):
    """A value in the object store, fetched anew each time, so that the handle keeps no view of the
    store's memory.
    """

    __slots__ = ("_packed",)

    stays_sealed = True

    def __init__(self, packed: Serialized) -> None:
        super().__init__()
        self._packed = packed

    def open(self) -> Any:
        places: list[Any] = list(self._packed.places)
        views = [LazyBuffers(each.ref, each.session).buffers[index] for each, index, _ in places]
        return load_with_buffers(self._packed.inline, [memoryview(each) for each in views])

    def is_slow(self) -> bool:
        return True

    def serialized(self, registry: Any) -> Serialized | None:
        in_store = isinstance(registry.store, RayStore) and all(
            stored.session == registry.store.session  # type: ignore[attr-defined]
            for stored, _, _ in self._packed.places
        )
        return self._packed if in_store else None


def share(value: T, registry: FunctionRegistry) -> RayShared[T]:
    snapshot: MainSnapshot = registry.snapshot
    packed = pack_strictly(value, snapshot, registry.store)  # type: ignore[arg-type]
    return RayShared(packed if isinstance(packed, Serialized) else Serialized(packed, []))
