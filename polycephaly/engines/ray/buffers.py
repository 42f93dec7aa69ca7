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
otherwise refuses the whole message.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any

import ray

from ...errors import Lost
from ...memory.arena import Full
from ...memory.blocks import MIN_SHARED_PICKLE_BYTES
from ...memory.references import Received, RefTable, Serialized, unpack_header

LARGE_RESULT_BYTES = 1 << 20
"""From this size, a result is not copied before it is sent: its drone runs no other task until
then."""


def _reduce_with_owner(ref: Any) -> tuple[Any, tuple[Any, ...]]:
    """Pickle an ObjectRef of the user by Ray's own pickler.

    Other picklers would leave out its owner, and the receiver would wait for ever. Ray keeps an
    object that is pickled in this way until this process ends.
    """
    return ray.cloudpickle.loads, (ray.cloudpickle.dumps(ref),)


copyreg.pickle(ray.ObjectRef, _reduce_with_owner)


def current_session() -> tuple[str, str] | None:
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
    """Buffers that travel beside a message. A segment for `Serialized`, as `LazyBuffers` are."""

    offset = length = 0
    """The first buffer's number among all buffers that go with the same message; not used."""

    def __init__(self, buffers: Sequence[Any]) -> None:
        self.buffers = buffers

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Any, ...]]:
        return OutOfBandBuffers, ([PickleBuffer(each) for each in self.buffers],)

    def nbytes(self) -> int:
        return sum(memoryview(each).nbytes for each in self.buffers)


class LazyBuffers:
    """Out-of-band buffers in the object store, fetched on first access."""

    offset = length = 0

    def __init__(self, ref: Any, session: tuple[str, str] | None) -> None:
        self.ref = ref
        self.session = session
        self._fetched: OutOfBandBuffers | None = None

    @property
    def buffers(self) -> Sequence[Any]:
        """The buffers. Raises `Lost` if the node or the Ray session that had them is gone."""
        if self._fetched is None:
            if self.session != current_session():
                raise Lost("a value in Ray's object store was lost: its Ray session was shut down")
            try:
                self._fetched = ray.get(self.ref)
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[0]
                raise Lost(f"a value in Ray's object store was lost: {reason}") from error
        return self._fetched.buffers


class RayStore:
    """The driver's store: a put writes to Ray's object store at once."""

    def __init__(self) -> None:
        self.session = current_session()

    def put_pickle(self, pieces: list[Any], buffers: list[memoryview]) -> Serialized:
        """Store the buffers, and a large pickle as the first of them.

        Raises `Full`, or `ConnectionError` if Ray was shut down.
        """
        pickled = b"".join(pieces)
        out_of_band: list[Any] = [*buffers]
        if len(pickled) >= MIN_SHARED_PICKLE_BYTES:
            out_of_band.insert(0, pickled)
            pickled = b""
        lengths = [memoryview(each).nbytes for each in out_of_band]
        stored: Any = self.put(OutOfBandBuffers(out_of_band))
        places = [(stored, at, length) for at, length in enumerate(lengths)]
        return Serialized(pickled, places, sum(lengths))

    def put(self, attachment: OutOfBandBuffers) -> LazyBuffers | OutOfBandBuffers:
        """Store `attachment`. Raises the errors of `put_pickle`."""
        if self.session != current_session():
            raise ConnectionError("the pool's Ray session was shut down")
        try:
            return LazyBuffers(ray.put(attachment), self.session)
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            size = f"{attachment.nbytes():,} bytes"
            raise Full(f"Ray's object store has no room for {size}: {error}") from error

    def warn(self, error: Exception) -> None:
        """Do nothing, because the value goes with the message instead."""


class PendingResultStore(RayStore):
    """A drone's store, which writes nothing: the buffers of a result go with the report.

    A small result is copied, because the next task may change the original. `has_large_result` is
    set for a result so large that it is not copied: no other task may run before the report.
    """

    session = None

    def __init__(self) -> None:
        self.has_large_result = False

    def put(self, attachment: OutOfBandBuffers) -> OutOfBandBuffers:
        if attachment.nbytes() < LARGE_RESULT_BYTES:
            attachment.buffers = [bytes(each) for each in attachment.buffers]
        else:
            self.has_large_result = True
        return attachment


class RayRefTable(RefTable):
    """The buffers beside messages between the driver and one drone, in both directions.

    `outgoing` has the buffers of the message that is being made. `incoming` has those of the
    message that is about to be read. No number is released or returned, because Ray counts
    references itself.
    """

    def __init__(self) -> None:
        no_arena: Any = None
        super().__init__(no_arena, None, lambda: None)
        self.outgoing: list[Any] = []
        self.incoming: Sequence[Any] = ()

    def lend(self, stored: Any) -> int:
        """Add the buffers to the message. Return their place in the message; 0 for a result."""
        # A result: all buffers of a message become one object.
        if isinstance(stored, OutOfBandBuffers):
            stored.offset = sum(len(each.buffers) for each in self.outgoing)
            self.outgoing.append(stored)
            return 0
        self.outgoing.append(stored.ref)
        return len(self.outgoing) - 1

    def take_outgoing(self) -> list[Any]:
        taken, self.outgoing = self.outgoing, []
        return taken

    def receive(self, header: Any) -> ReceivedFromRay:
        return ReceivedFromRay(header, self.incoming)

    def close(self) -> None:
        self.outgoing.clear()


class ReceivedFromRay(Received):
    """A received payload whose buffers are in the object store."""

    __slots__ = ("_attachments",)

    def __init__(self, header: Any, attachments: Sequence[Any]) -> None:
        self._inline, ranges, places = unpack_header(header)
        self._attachments = [attachments[number] for number, _, _ in ranges]
        self._places = [
            (which, ranges[which][1] + index, length) for which, index, length in places
        ]

    def content(self) -> tuple[bytes, list[memoryview]]:
        """Return pickle and buffers. Raises `Lost` if these are gone."""
        attachments = [each.buffers for each in self._attachments]
        return self._inline, [
            memoryview(attachments[which][index]) for which, index, _ in self._places
        ]

    def is_slow_to_open(self) -> bool:
        return any(isinstance(each, LazyBuffers) for each in self._attachments)

    def is_readable_in(self, store: Any) -> bool:
        return isinstance(store, RayStore) and all(
            isinstance(each, LazyBuffers) and each.session == store.session
            for each in self._attachments
        )

    def to_serialized(self) -> Serialized:
        return Serialized(
            self._inline,
            [(self._attachments[which], index, length) for which, index, length in self._places],
        )
