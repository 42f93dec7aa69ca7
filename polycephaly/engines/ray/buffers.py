"""Out-of-band buffers on Ray: large buffers travel beside messages, in Ray's object store.

    arguments of a call ── put, when the call is made ──> object ── argument of the actor call
                                                                      ──> views, in the drone
    result of a call ── beside the message that reports the result ──> object owned by the driver
                                                        ── when `value` is read ──> views

`OutOfBandBuffers` is a list of buffers. On arrival they are read-only views of the store's memory,
which lives as long as the views. So data are copied once, when put into the store. A result that is
only an argument of other calls never comes to the driver.

Objects in a store are lost with their *session*: one connection of this process to a cluster.
Object references and promises may outlive a session, so each knows its own. If Ray is asked for an
object of another session, Ray starts a new cluster if this process is connected to none, and
otherwise refuses the whole message."""

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
"""Bytes from which a result is not copied before it is sent: its drone runs no other task until
then."""


def _with_its_owner(ref: Any) -> tuple[Any, tuple[Any, ...]]:
    """Pickle an ObjectRef of the user by Ray's own pickler.

    Other picklers would leave out its owner, and the receiver would wait for ever. Ray keeps an
    object that is pickled in this way until this process ends.
    """
    return ray.cloudpickle.loads, (ray.cloudpickle.dumps(ref),)


copyreg.pickle(ray.ObjectRef, _with_its_owner)


def session() -> tuple[str, str] | None:
    """Return the node and worker by which this process is connected to Ray; None if unconnected.

    Two clusters differ in the node, two connections to one cluster in the worker.
    """
    if not ray.is_initialized():
        return None
    here = ray.get_runtime_context()
    try:
        return here.get_node_id(), here.get_worker_id()
    except (AttributeError, AssertionError):  # another thread is shutting Ray down
        return None


class OutOfBandBuffers:
    """Buffers that travel beside a message."""

    def __init__(self, buffers: Sequence[Any]) -> None:
        self.buffers = buffers

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Any, ...]]:
        return OutOfBandBuffers, ([PickleBuffer(each) for each in self.buffers],)


class LazyBuffers:
    """Out-of-band buffers in the object store, fetched on first access."""

    def __init__(self, ref: Any, of: tuple[str, str] | None) -> None:
        self.ref = ref
        self.session = of
        self._cargo: OutOfBandBuffers | None = None

    @property
    def buffers(self) -> Sequence[Any]:
        """The buffers. Raises `Lost` if the node or the Ray session that had them is gone."""
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
    """Out-of-band buffers that this process has made or knows: a segment for `Serialized`."""

    def __init__(self, cargo: Any, length: int, of: tuple[str, str] | None = None) -> None:
        self.cargo = cargo  # an ObjectRef, or `OutOfBandBuffers` that are still to be sent
        self.length = length
        self.session = of  # of the ObjectRef
        self.offset = 0  # of its first buffer, among all buffers that go with the same message


class RayStore:
    """The driver's store: a put writes to Ray's object store at once."""

    def __init__(self) -> None:
        self.session = session()

    def parcel(self, pieces: list[Any], buffers: list[memoryview]) -> Serialized:
        """Store the buffers. Raises `Full`, or `ConnectionError` if Ray was shut down."""
        inline, runs, lengths = _runs(pieces, buffers)
        total = sum(lengths)
        sealed = StoredBuffers(self.put(OutOfBandBuffers(runs), total), total, self.session)
        places = [(sealed, at, length) for at, length in enumerate(lengths)]
        return Serialized(inline, places, total)  # type: ignore[arg-type]

    def put(self, cargo: OutOfBandBuffers, total: int) -> Any:
        """Store `cargo`. Raises the errors of `parcel`."""
        if self.session != session():
            raise ConnectionError("the pool's Ray was shut down")
        try:
            return ray.put(cargo)
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise Full(f"no room for {total:,} bytes in Ray's object store: {error}") from error

    def warn(self, error: Exception) -> None:
        """Do nothing, because the value goes with the message instead."""


class BufferHold(RayStore):
    """A drone's store: holds results until the message that reports them is sent.

    Calls `laden` for a result so large that it is not copied: no other task may run before that.
    """

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
    """The buffers beside messages between the driver and one drone, in both directions.

    The counterpart of `RefTable` for shared memory. `loading` has the buffers of the message that
    is being made. `landed` has those of the message that is about to be read.
    """

    def __init__(self) -> None:
        self.loading: list[Any] = []
        self.landed: Sequence[Any] = ()
        self.returned: deque[int] = deque()  # Ray counts references itself

    def lend(self, sealed: StoredBuffers) -> int:
        # A result: all buffers of a message become one object.
        if isinstance(sealed.cargo, OutOfBandBuffers):
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
        """Do nothing, because Ray counts references itself."""

    def take_returned(self) -> list[int]:
        return []

    def close(self) -> None:
        self.loading.clear()


class ReceivedFromRay(Received):
    """A received payload whose buffers are in the object store."""

    __slots__ = ("_cargoes",)

    def __init__(self, waybill: Any, cargoes: Sequence[Any]) -> None:
        self._inline, loans, places = read_waybill(waybill)
        self._cargoes = [cargoes[number] for number, _, _ in loans]
        self._places = [(which, loans[which][1] + index, length) for which, index, length in places]

    def content(self) -> tuple[bytes, list[memoryview]]:
        """Return pickle and buffers. Raises `Lost` if these are gone."""
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
    """Return the pickle, the buffers that go beside it, and their lengths.

    A large pickle is the first of the buffers, and b"" is returned in its place.
    """
    pickled = b"".join(pieces)
    runs: list[Any] = [*buffers]
    if len(pickled) >= LARGE_PICKLE:
        runs.insert(0, pickled)
        pickled = b""
    return pickled, runs, [memoryview(each).nbytes for each in runs]
