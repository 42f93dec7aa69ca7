"""The outcomes of a drone's tasks, packed, and written where the controller reads them.

    a task ends ──add──> put ──> ring, or what the engine has in its place ──> controller

What the controller is told of an outcome, beside the value or error, is written before it: the
processor time, handles of values that the drone keeps, ends of channels. What belongs to no task is
written from time to time (`put_reports`).
"""

from __future__ import annotations

from collections.abc import Callable
from pickle import dumps
from typing import Any, TypeVar

from ..errors import type_with_article
from ..memory.blocks import Store
from ..memory.references import RefTable, Serialized
from ..promises.promise import pickling_state
from ..runtime import forked
from ..timeline.event_log import EventLog
from ..wire import placeholders
from ..wire.exceptions import pack_exception
from ..wire.main_names import MainSnapshot
from ..wire.messages import (
    EVENT_LOG,
    KEPT_VALUES,
    MIN_LARGE_BYTES,
    PROCESSOR_TIME,
    RANGE_RELEASED,
    SHARED,
    VALUE,
    pack_chunk_values,
    pack_outcome,
    pack_value,
)
from ..wire.pickling import BULKY_TYPES, MIN_LARGE_BUFFER_BYTES, capture, pack
from ..wire.shareable import SMALL_TYPES
from .console import OutputTail
from .store import DroneStore

T = TypeVar("T")

MAX_VALUE_BYTES = 4096
"""Bytes of the record of a value that has no pickle of its own."""


class Outcomes:
    def __init__(
        self,
        put: Callable[..., object],  # a record, and if it `is_shared`: see `DroneExecutor._put`
        snapshot: MainSnapshot,
        store: Store,
        ref_table: RefTable,
        tail: OutputTail,
        drone_store: DroneStore,
        events: EventLog,
    ) -> None:
        self._put = put
        self._snapshot = snapshot
        self._store = store
        self._ref_table = ref_table
        self._tail = tail
        self._drone_store = drone_store
        self._events = events
        self._generation = forked.generation
        self._has_ends = False  # of channels, in the outcome that was packed last

    # -- packing -----------------------------------------------------------------------------------

    def pack(self, value: object) -> bytes | Serialized:
        """Serialize a result. Raises the errors of the value's own pickling."""
        self._exit_if_forked()
        if type(value) in SMALL_TYPES:
            pickled = dumps(value, 5)
            if len(pickled) < MIN_LARGE_BYTES:  # an int may have any size
                return pickled
        try:
            bulky = (
                type(value) in BULKY_TYPES and len(value) >= MIN_LARGE_BUFFER_BYTES  # type: ignore[arg-type]
            )
            if placeholders.last_arrived_end:
                return self._hand_on_ends_after(pack, value, self._snapshot, self._store, bulky)
            return pack(value, self._snapshot, self._store, bulky)
        except BaseException as error:
            error.add_note(f"while pickling the result, {type_with_article(value)}")
            raise

    def _hand_on_ends_after(self, pickle: Callable[..., T], *args: Any) -> T:
        """Return ``pickle(*args)``. Channel ends in the value are handed on unless that raises."""
        ends: list[Any] = []
        pickling_state.result_ends = ends
        try:
            pickled = pickle(*args)
        finally:
            pickling_state.result_ends = None
        for end in ends:
            end.hand_on()
        self._has_ends = self._has_ends or bool(ends)
        return pickled

    def _exit_if_forked(self, error: BaseException | None = None) -> None:
        """End a child that a task has forked, before the child touches objects of the drone.

        All that is written passes here.
        """
        forked.exit_if_forked(self._generation, error)

    def pack_error(self, error: BaseException) -> bytes:
        self._exit_if_forked(error)
        try:
            return pack_exception(
                error, lambda value: self._hand_on_ends_after(capture, value, self._snapshot)
            )
        except BaseException as worse:
            # The error's own code broke off its pickling: report at least its type.
            substitute = RuntimeError(
                f"{type_with_article(error)} could not be sent: pickling it raised "
                f"{type(worse).__qualname__}"
            )
            return pack_exception(substitute, lambda value: dumps(value, 5))

    # -- writing -----------------------------------------------------------------------------------

    def add(
        self,
        number: int,
        status: int,
        started: float,
        finished: float,
        payload: bytes | Serialized,
        head: bytes = b"",
        ends_lines: bool = True,
    ) -> None:
        """Write the outcome of a task."""
        self.put_events()
        self.put_kept_values(number)
        output = self._tail.take(ends_lines) if self._tail.pieces else b""
        self.put(number, status, started, finished, payload, head, output)

    def put(
        self,
        number: int,
        status: int,
        started: float,
        finished: float,
        payload: bytes | Serialized,
        head: bytes = b"",
        output: bytes = b"",
    ) -> None:
        """Write an outcome, and nothing else. Any thread may call this."""
        self._exit_if_forked()
        is_shared = isinstance(payload, Serialized)
        if isinstance(payload, Serialized):
            status, payload = status | SHARED, payload.pack_header(self._ref_table)
        record = pack_outcome(number, status, started, finished, head + payload, output)
        self._put(record, is_shared)

    def add_value(self, number: int, started: float, finished: float, value: Any) -> None:
        """Write the value of a task, of one of `BATCHED_TYPES`."""
        if self._tail.pieces or self._events.events or forked.generation != self._generation:
            self.add(number, VALUE, started, finished, dumps(value, 5))
            return
        record = pack_value(number, started, finished, value)
        if len(record) > MAX_VALUE_BYTES:  # an int may have any size
            self.add(number, VALUE, started, finished, self.pack(value))
        else:
            self._put(record)

    def put_chunk_values(
        self, number: int, first: int, started: float, finished: float, values: list[Any]
    ) -> None:
        """Write values of `BATCHED_TYPES` of some calls of a chunk, from the call `first` on."""
        self._exit_if_forked()
        self._put(pack_chunk_values(number, first, started, finished, values))

    def put_kept_values(self, number: int) -> None:
        """Write which handles of values kept by this drone, or ends of channels, are in the outcome
        that comes next.
        """
        report = self._drone_store.take_unreported() if self._drone_store.unreported else b""
        has_ends, self._has_ends = self._has_ends, False
        if report or has_ends:
            self.put(number, KEPT_VALUES, 0.0, 0.0, report)

    def add_processor_time(self, number: int, seconds: float) -> None:
        """Write the processor time of a task whose outcome comes next."""
        self.put(number, PROCESSOR_TIME, 0.0, seconds, b"")

    def put_events(self) -> None:
        """Write the events of green threads. Those of a task come before its outcome, unless the
        other thread is about to write them.
        """
        events = self._events.pop_packed()
        if events:
            self.put(0, EVENT_LOG, 0.0, 0.0, events)

    def put_reports(self) -> None:
        """Write what belongs to no task: events, and references that are not used any more."""
        self.put_events()
        if self._ref_table.returned:
            for number in self._ref_table.take_returned():
                self.put(number, RANGE_RELEASED, 0.0, 0.0, b"")
