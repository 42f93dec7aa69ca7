"""What lies beside messages: large buffers, in Ray's object store.

    a call's arguments ── put, when the call is made ──> object ── an argument of the actor call ──> views, in the drone
    a call's result ── beside the message that tells of it ──> object of the driver's ── when `value` asks ──> views

`OutOfBandBuffers` are a list of buffers. Where they arrive they are read-only views of the store's
memory, which lives as long as they do. So nothing is copied but once, by whoever puts it there, and
a result that is only an argument of other calls never comes to the driver.

What is in a store is gone with its *session*, one connection of this process to a cluster: handles
and promises may outlive that, so each knows its own. Ray, asked for what another session had, would
start a cluster where there is none, and else refuse the whole message."""

from __future__ import annotations

import copyreg
from collections import deque
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any

import ray

from ...errors import Lost
from ...store.arena import Full
from ...store.blocks import LARGE_PICKLE
from ...store.references import Received, Serialized, read_waybill

__all__ = [
    "BufferHold",
    "LazyBuffers",
    "OutOfBandBuffers",
    "RayRefTable",
    "RayStore",
    "ReceivedFromRay",
    "StoredBuffers",
    "session",
]

HEAVY = 1 << 20
"""Bytes of a result from which it is not copied until it is sent: its drone runs nothing else
before."""


def _with_its_owner(ref: Any) -> tuple[Any, tuple[Any, ...]]:
    """An ObjectRef of the user's. Other picklers than Ray's own would leave out who owns it, and
    whoever gets it would wait for ever. Ray keeps what is pickled so for as long as this process
    lives."""
    return ray.cloudpickle.loads, (ray.cloudpickle.dumps(ref),)


copyreg.pickle(ray.ObjectRef, _with_its_owner)


def session() -> tuple[str, str] | None:
    """By which node this process is connected to Ray, and as whom there: two clusters differ in the
    one, two connections to one cluster in the other. None: it is not connected."""
    if not ray.is_initialized():
        return None
    here = ray.get_runtime_context()
    try:
        return here.get_node_id(), here.get_worker_id()
    except (AttributeError, AssertionError):  # another thread is shutting it down
        return None


class OutOfBandBuffers:
    """Buffers on their way."""

    def __init__(self, buffers: Sequence[Any]) -> None:
        self.buffers = buffers

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Any, ...]]:
        return OutOfBandBuffers, ([PickleBuffer(each) for each in self.buffers],)


class LazyBuffers:
    """A cargo in the object store, fetched when somebody looks at it."""

    def __init__(self, ref: Any, of: tuple[str, str] | None) -> None:
        self.ref = ref
        self.session = of
        self._cargo: OutOfBandBuffers | None = None

    @property
    def buffers(self) -> Sequence[Any]:
        """Raises `Lost`, where it lay with a node, or in a Ray, that is gone."""
        if self._cargo is None:
            if self.session != session():
                raise Lost("a value that lay in Ray's object store is lost: that Ray was shut down")
            try:
                self._cargo = ray.get(self.ref)
            except ray.exceptions.RayError as error:
                why = str(error).strip().splitlines()[0]
                raise Lost(f"a value that lay in Ray's object store is lost: {why}") from error
        return self._cargo.buffers


class StoredBuffers:
    """A cargo that this image has made, or knows of: a segment, to a `Serialized`."""

    def __init__(self, cargo: Any, length: int, of: tuple[str, str] | None = None) -> None:
        self.cargo = cargo  # an ObjectRef, or a `OutOfBandBuffers` that is still to be sent
        self.length = length
        self.session = of  # of the ObjectRef
        self.offset = 0  # of its first buffer, among those of the cargo with which it goes


class RayStore:
    """The driver's store: what is put there is in the object store from that moment on."""

    def __init__(self) -> None:
        self.session = session()

    def parcel(self, pieces: list[Any], buffers: list[memoryview]) -> Serialized:
        """Raises `Full`, or `ConnectionError` when Ray was shut down."""
        inline, runs, lengths = _runs(pieces, buffers)
        total = sum(lengths)
        sealed = StoredBuffers(self.put(OutOfBandBuffers(runs), total), total, self.session)
        places = [(sealed, at, length) for at, length in enumerate(lengths)]
        return Serialized(inline, places, total)  # type: ignore[arg-type]

    def put(self, cargo: OutOfBandBuffers, total: int) -> Any:
        """Raises as `parcel` does."""
        if self.session != session():
            raise ConnectionError("the pool's Ray was shut down")
        try:
            return ray.put(cargo)
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise Full(f"no room for {total:,} bytes in Ray's object store: {error}") from error

    def warn(self, error: Exception) -> None:
        """It goes with the message instead."""


class BufferHold(RayStore):
    """A drone's store: it keeps results until the message goes that tells of them. `laden` is
    called when one is so large that it is not copied: nothing else may be run before that."""

    session = None

    def __init__(self, laden: Callable[[], None]) -> None:
        self._laden = laden

    def put(self, cargo: OutOfBandBuffers, total: int) -> Any:
        if total < HEAVY:
            cargo.buffers = [bytes(each) for each in cargo.buffers]
        else:
            self._laden()
        return cargo


class RayRefTable:
    """What goes beside messages across one link, there and back; what a `RefTable` is to shared
    memory.

    `loading`: the cargoes of the message that is being made. `landed`: those of the message that is
    being read, which is set before it is."""

    def __init__(self) -> None:
        self.loading: list[Any] = []
        self.landed: Sequence[Any] = ()
        self.returned: deque[int] = deque()  # Ray counts references itself

    def lend(self, sealed: StoredBuffers) -> int:
        if isinstance(sealed.cargo, OutOfBandBuffers):  # a result: all of a message are one object
            sealed.offset = sum(len(each.buffers) for each in self.loading)
            self.loading.append(sealed.cargo)
            return 0
        self.loading.append(sealed.cargo)
        return len(self.loading) - 1

    def take(self) -> list[Any]:
        taken, self.loading = self.loading, []
        return taken

    def arrived(self, waybill: Any) -> ReceivedFromRay:
        return ReceivedFromRay(waybill, self.landed)

    def came_back(self, number: int) -> None:
        """There are no loans."""

    def take_returned(self) -> list[int]:
        return []

    def close(self) -> None:
        self.loading.clear()


class ReceivedFromRay(Received):
    """What has been received, and lies in the object store."""

    __slots__ = ("_cargoes",)

    def __init__(self, waybill: Any, cargoes: Sequence[Any]) -> None:
        self._inline, loans, places = read_waybill(waybill)
        self._cargoes = [cargoes[number] for number, _, _ in loans]
        self._places = [(which, loans[which][1] + index, length) for which, index, length in places]

    def content(self) -> tuple[bytes, list[memoryview]]:
        """Raises `Lost`."""
        cargoes = [each.buffers for each in self._cargoes]
        return self._inline, [memoryview(cargoes[which][index]) for which, index, _ in self._places]

    def is_far(self) -> bool:
        return any(isinstance(each, LazyBuffers) for each in self._cargoes)

    def lies_in(self, store: Any) -> bool:
        return isinstance(store, RayStore) and all(
            isinstance(each, LazyBuffers) and each.session == store.session
            for each in self._cargoes
        )

    def parcel(self) -> Serialized:
        sealed = [StoredBuffers(each.ref, 0, each.session) for each in self._cargoes]
        places: list[Any] = [
            (sealed[which], index, length) for which, index, length in self._places
        ]
        return Serialized(self._inline, places)


def _runs(pieces: list[Any], buffers: list[memoryview]) -> tuple[bytes, list[Any], list[int]]:
    """The pickle, if it is small; what goes beside it, and how long that is."""
    pickled = b"".join(pieces)
    runs: list[Any] = [*buffers]
    if len(pickled) >= LARGE_PICKLE:
        runs.insert(0, pickled)
        pickled = b""
    return pickled, runs, [memoryview(each).nbytes for each in runs]
