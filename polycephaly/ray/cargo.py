"""What lies beside messages: large buffers, in Ray's object store.

    a call's arguments ── put, when the call is made ──> object ── an argument of the actor call ──> views, in the drone
    a call's result ── beside the message that tells of it ──> object of the driver's ── when `value` asks ──> views

A `Cargo` is a list of buffers. Where it arrives its buffers are read-only views of the store's memory, which lives as
long as they do. So nothing is copied but once, by whoever puts it there, and a result that is only an argument of other
calls never comes to the driver.
"""

from __future__ import annotations

import copyreg
from collections import deque
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any

import ray

from ..errors import Lost
from ..wire.arena import Full
from ..wire.loans import Arrived, Parcel, read_waybill
from ..wire.store import LARGE_PICKLE

__all__ = ["Brought", "Cargo", "Hold", "Lying", "Manifest", "Plasma", "Sealed"]

HEAVY = 1 << 20
"""Bytes of a result from which it is not copied until it is sent: its drone runs nothing else before."""


def _with_its_owner(ref: Any) -> tuple[Any, tuple[Any, ...]]:
    """An ObjectRef of the user's. Other picklers than Ray's own would leave out who owns it, and whoever gets it would
    wait for ever. Ray keeps what is pickled so for as long as this process lives."""
    return ray.cloudpickle.loads, (ray.cloudpickle.dumps(ref),)


copyreg.pickle(ray.ObjectRef, _with_its_owner)


class Cargo:
    """Buffers on their way."""

    def __init__(self, buffers: Sequence[Any]) -> None:
        self.buffers = buffers

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Any, ...]]:
        return Cargo, ([PickleBuffer(each) for each in self.buffers],)


class Lying:
    """A cargo in the object store, fetched when somebody looks at it."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref
        self._cargo: Cargo | None = None

    @property
    def buffers(self) -> Sequence[Any]:
        if self._cargo is None:
            self._cargo = ray.get(self.ref)
        return self._cargo.buffers


class Sealed:
    """A cargo that this image has made, or knows of: a segment, to a `Parcel`."""

    def __init__(self, cargo: Any, length: int) -> None:
        self.cargo = cargo  # an ObjectRef, or a `Cargo` that is still to be sent
        self.length = length
        self.offset = 0  # of its first buffer, among those of the cargo with which it goes


class Plasma:
    """The driver's store: what is put there is in the object store from that moment on."""

    def parcel(self, pieces: list[Any], buffers: list[memoryview]) -> Parcel:
        """Raises `Full`."""
        inline, runs, lengths = _runs(pieces, buffers)
        total = sum(lengths)
        sealed = Sealed(self._put(Cargo(runs), total), total)
        return Parcel(inline, [(sealed, at, length) for at, length in enumerate(lengths)])  # type: ignore[misc]

    def _put(self, cargo: Cargo, total: int) -> Any:
        try:
            return ray.put(cargo)
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise Full(f"no room for {total:,} bytes in Ray's object store: {error}") from error

    def warn(self, error: Exception) -> None:
        """It goes with the message instead."""


class Hold(Plasma):
    """A drone's store: it keeps results until the message goes that tells of them. `laden` is called when one is so
    large that it is not copied: nothing else may be run before that."""

    def __init__(self, laden: Callable[[], None]) -> None:
        self._laden = laden

    def _put(self, cargo: Cargo, total: int) -> Any:
        if total < HEAVY:
            cargo.buffers = [bytes(each) for each in cargo.buffers]
        else:
            self._laden()
        return cargo


class Manifest:
    """What goes beside messages across one link, there and back; what a `Ledger` is to shared memory.

    `loading`: the cargoes of the message that is being made. `landed`: those of the message that is being read, which
    is set before it is.
    """

    def __init__(self) -> None:
        self.loading: list[Any] = []
        self.landed: Sequence[Any] = ()
        self.returned: deque[int] = deque()  # Ray counts references itself

    def lend(self, sealed: Sealed) -> int:
        if isinstance(sealed.cargo, Cargo):  # a result: all of a message are one object
            sealed.offset = sum(len(each.buffers) for each in self.loading)
            self.loading.append(sealed.cargo)
            return 0
        self.loading.append(sealed.cargo)
        return len(self.loading) - 1

    def take(self) -> list[Any]:
        taken, self.loading = self.loading, []
        return taken

    def arrived(self, waybill: Any) -> Brought:
        return Brought(waybill, self.landed)

    def came_back(self, number: int) -> None:
        """There are no loans."""

    def take_returned(self) -> list[int]:
        return []

    def close(self) -> None:
        self.loading.clear()


class Brought(Arrived):
    """What has been received, and lies in the object store."""

    __slots__ = ("_cargoes",)

    def __init__(self, waybill: Any, cargoes: Sequence[Any]) -> None:
        self._inline, loans, places = read_waybill(waybill)
        self._cargoes = [cargoes[number] for number, _, _ in loans]
        self._places = [(which, loans[which][1] + index, length) for which, index, length in places]

    def content(self) -> tuple[bytes, list[memoryview]]:
        """Raises `Lost`, where it lay with a node that is gone."""
        try:
            cargoes = [each.buffers for each in self._cargoes]
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[0]
            raise Lost(f"a value that lay in Ray's object store is lost: {why}") from error
        return self._inline, [memoryview(cargoes[which][index]) for which, index, _ in self._places]

    def is_far(self) -> bool:
        return any(isinstance(each, Lying) for each in self._cargoes)

    def lies_in(self, store: Any) -> bool:
        return isinstance(store, Plasma) and self.is_far()

    def parcel(self) -> Parcel:
        sealed = [Sealed(each.ref, 0) for each in self._cargoes]
        return Parcel(self._inline, [(sealed[which], index, length) for which, index, length in self._places])  # type: ignore[misc]


def _runs(pieces: list[Any], buffers: list[memoryview]) -> tuple[bytes, list[Any], list[int]]:
    """The pickle, if it is small; what goes beside it, and how long that is."""
    pickled = b"".join(pieces)
    runs: list[Any] = [*buffers]
    if len(pickled) >= LARGE_PICKLE:
        runs.insert(0, pickled)
        pickled = b""
    return pickled, runs, [memoryview(each).nbytes for each in runs]
