"""The outcomes of a drone's tasks, from the end of each task until they are sent.

    a task ends ──add──> lists ──take_message──> one RESULTS message
                 └──saved──> the status page, which outlives this drone

Values that are small and immutable are stored as they are and pickled together when they are sent.
In the status page each is an outcome by itself.

The main thread adds, saves and, between tasks, sends. The control thread sends while a task runs
for long, so that no outcome waits for its end. A thread that calls `take_message` holds
`socket_lock` until the outcomes are sent. Only the main thread appends to the two lists, and
entries are taken from their beginnings: each is one atomic step. Outcomes sent by the control
thread stay in the status page until the main thread sends. If the drone dies meanwhile, the
controller receives them twice, and recognises that.
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
    LARGE,
    MIN_LARGE_BYTES,
    PROCESSOR_TIME,
    RANGE_RELEASED,
    SHARED,
    VALUE,
    pack_outcome,
    pack_outcomes,
    pack_values,
)
from ..wire.pickling import BULKY_TYPES, MIN_LARGE_BUFFER_BYTES, capture, pack
from ..wire.shareable import SMALL_TYPES
from ..wire.status_page import StatusPage
from .console import OutputTail
from .store import DroneStore

T = TypeVar("T")


class ResultBuffer:
    def __init__(
        self,
        status_page: StatusPage,
        snapshot: MainSnapshot,
        store: Store,
        ref_table: RefTable,
        tail: OutputTail,
        drone_store: DroneStore,
        events: EventLog,
    ) -> None:
        self._status_page = status_page
        self._snapshot = snapshot
        self._store = store
        self._ref_table = ref_table
        self._tail = tail
        self._drone_store = drone_store
        self._events = events
        self._generation = forked.generation
        self._entries: list[tuple[bytes, list[bytes]]] = []
        self._values: list[tuple[int, float, float, Any]] = []
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

        Every outcome of a task passes here.
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

    def entry(
        self,
        number: int,
        status: int,
        started: float,
        finished: float,
        payload: bytes | Serialized,
        head: bytes = b"",
        output: bytes = b"",
    ) -> tuple[bytes, list[bytes]]:
        """Return an entry of a RESULTS message, and the payload that is sent beside it.

        Any thread may call it.
        """
        self._exit_if_forked()
        if isinstance(payload, Serialized):
            status, payload = status | SHARED, payload.pack_header(self._ref_table)
        if head:
            payload = head + payload
        large = [payload] if len(payload) >= MIN_LARGE_BYTES else []
        if large:
            status, payload = status | LARGE, b""
        return pack_outcome(number, status, started, finished, payload, output), large

    # -- adding ------------------------------------------------------------------------------------

    def add(
        self,
        number: int,
        status: int,
        started: float,
        finished: float,
        payload: bytes | Serialized,
        head: bytes = b"",
        ends_lines: bool = True,
    ) -> bool:
        """Add an outcome; return True if it outlives this drone from now on.

        Otherwise it must be sent at once: the status page is full, or has no place for the payload
        beside the entry or for new handles of kept values.
        """
        new_handles: list[bytes] = []
        if self._drone_store.unreported or self._has_ends:
            new_handles = self.kept_value_entries(number)
            self._entries += [(entry, []) for entry in new_handles]
        output = self._tail.take(ends_lines) if self._tail.pieces else b""
        entry, large = self.entry(number, status, started, finished, payload, head, output)
        self._entries.append((entry, large))
        return self._save(entry, not (large or new_handles))

    def keep(
        self,
        number: int,
        status: int,
        started: float,
        finished: float,
        payload: bytes | Serialized,
        head: bytes,
    ) -> bool:
        """Have answers of a chunk that goes on outlive this drone, which are sent later together
        with others. Return False if they do not: they are large, or have handles that must be
        reported first.
        """
        if not isinstance(payload, bytes) or self._drone_store.unreported or self._has_ends:
            return False
        entry = pack_outcome(number, status, started, finished, head + payload, b"")
        return self._status_page.keep(entry)

    def _save(self, entry: bytes, may_save: bool) -> bool:
        return may_save and self._status_page.keep(entry)

    def kept_value_entries(self, number: int) -> list[bytes]:
        """Return the entries that precede an outcome with handles of values kept by this drone, or
        ends of channels.

        Empty if there are none.
        """
        report = self._drone_store.take_unreported() if self._drone_store.unreported else b""
        has_ends, self._has_ends = self._has_ends, False
        if not (report or has_ends):
            return []
        return [pack_outcome(number, KEPT_VALUES, 0.0, 0.0, report, b"")]

    def add_value(self, number: int, started: float, finished: float, value: Any) -> bool:
        """Add a small, immutable value of a task; return True if the page keeps it."""
        pickled = b"" if value is None else dumps(value, 5)
        if self._tail.pieces or forked.generation != self._generation:
            return self.add(number, VALUE, started, finished, pickled)
        self._values.append((number, started, finished, value))
        return self._status_page.keep(pack_outcome(number, VALUE, started, finished, pickled, b""))

    def add_processor_time(self, number: int, seconds: float) -> None:
        """Add the processor time of a task whose outcome comes next."""
        self._entries.append((pack_outcome(number, PROCESSOR_TIME, 0.0, seconds, b"", b""), []))

    # -- sending -----------------------------------------------------------------------------------

    def take_message(self) -> list[bytes]:
        """Return a message with all outcomes and returned references; empty if there are none."""
        entries: list[bytes] = []
        large: list[bytes] = []
        # Before the events: the main thread adds those of a task, and then its outcome.
        taken = self._entries[:]
        del self._entries[: len(taken)]
        events = self._events.pop_packed()
        if events:
            entries.append(pack_outcome(0, EVENT_LOG, 0.0, 0.0, events, b""))
        for entry, beside in taken:
            entries.append(entry)
            large += beside
        if self._ref_table.returned:
            for number in self._ref_table.take_returned():
                entries.append(pack_outcome(number, RANGE_RELEASED, 0.0, 0.0, b"", b""))
        values = self._values[:]
        if values:
            del self._values[: len(values)]
            entries.append(pack_values(*map(list, zip(*values, strict=True))))
        return pack_outcomes(entries, large) if entries else []
