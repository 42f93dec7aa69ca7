"""The outcomes of a drone's tasks, from the end of each task until they are sent.

    a task ends ──note──> lists ──take──> one RESULTS message
                            └──keep──> the status table, which outlives this drone

Values that are small and immutable are stored as they are and pickled together when they are sent.
In the status table each is an outcome by itself.

The main thread notes, keeps and, between tasks, sends. The control thread sends while a task runs
for long, so that no outcome waits for its end. A thread that calls `take` holds `socket_turn` until
the outcomes are sent. Only the main thread appends to the two lists, and entries are taken from
their beginnings: each is one atomic step. Outcomes sent by the control thread stay in the status
table until the main thread sends. If the drone dies meanwhile, the controller receives them twice,
and recognises that.
"""

from __future__ import annotations

from pickle import dumps
from typing import Any

from ..engines.local.status_table import Slot
from ..runtime import forked
from ..store.blocks import Store
from ..store.references import RefTable, Serialized
from ..timeline.trail import trail
from ..wire.exceptions import pack_exception
from ..wire.messages import (
    GIVEN,
    LARGE,
    LARGE_FROM,
    LOAN_OVER,
    SHARED,
    TRAIL,
    VALUE,
    pack_outcome,
    pack_outcomes,
    pack_values,
)
from ..wire.pickling import BULKY, LARGE_BUFFER, MainSnapshot, capture, pack
from .console import OutputTail
from .store import DroneStore

__all__ = ["ResultBuffer"]


class ResultBuffer:
    def __init__(
        self,
        row: Slot,
        snapshot: MainSnapshot,
        store: Store,
        ref_table: RefTable,
        tail: OutputTail,
        shelf: DroneStore,
    ) -> None:
        self._row = row
        self._snapshot = snapshot
        self._store = store
        self._ref_table = ref_table
        self._tail = tail
        self._shelf = shelf
        self._generation = forked.generation
        self._gives = False  # True if the last outcome contains new handles of kept values
        self._entries: list[tuple[bytes, list[bytes]]] = []
        self._last: tuple[bytes, list[bytes]] = (b"", [])
        self._values: list[tuple[int, float, float, Any]] = []

    # -- packing -----------------------------------------------------------------------------------

    def pack(self, value: object) -> bytes | Serialized:
        """Serialize a result. Raises the errors of the value's own pickling."""
        self._leave_if_forked()
        try:
            bulky = type(value) in BULKY and len(value) >= LARGE_BUFFER  # type: ignore[arg-type]
            return pack(value, self._snapshot, self._store, bulky)
        except BaseException as error:
            error.add_note(f"while pickling the result, a {type(value).__qualname__}")
            raise

    def _leave_if_forked(self, error: BaseException | None = None) -> None:
        """End a child that a task has forked, before the child touches objects of the drone.

        Every outcome of a task passes here.
        """
        forked.leave_if_forked(self._generation, error)

    def pack_error(self, error: BaseException) -> bytes:
        self._leave_if_forked(error)
        try:
            return pack_exception(error, lambda value: capture(value, self._snapshot))
        except BaseException as worse:
            # The error's own code broke off its pickling: report at least its type.
            told = RuntimeError(
                f"a {type(error).__qualname__} could not be sent: {type(worse).__qualname__}"
            )
            return pack_exception(told, lambda value: dumps(value, 5))

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
        self._leave_if_forked()
        if isinstance(payload, Serialized):
            status, payload = status | SHARED, payload.waybill(self._ref_table)
        if head:
            payload = head + payload
        large = [payload] if len(payload) >= LARGE_FROM else []
        if large:
            status, payload = status | LARGE, b""
        return pack_outcome(number, status, started, finished, payload, output), large

    # -- noting ------------------------------------------------------------------------------------

    def note(
        self,
        number: int,
        status: int,
        started: float,
        finished: float,
        payload: bytes | Serialized,
        head: bytes = b"",
    ) -> None:
        self._gives = bool(self._shelf.given)
        if self._gives:
            self._entries += [(entry, []) for entry in self.given(number)]
        self._last = self.entry(number, status, started, finished, payload, head, self._tail.take())
        self._entries.append(self._last)

    def given(self, number: int) -> list[bytes]:
        """Return the entries that precede an outcome with handles of values kept by this drone.

        Empty if there are no such handles.
        """
        told = self._shelf.take_given() if self._shelf.given else b""
        return [pack_outcome(number, GIVEN, 0.0, 0.0, told, b"")] if told else []

    def keep(self) -> bool:
        """Return True if the last outcome outlives this drone from now on.

        Otherwise it must be sent at once: the status table is full, or has no place for the payload
        beside the entry.
        """
        entry, large = self._last
        return not large and not self._gives and self._row.keep(entry)

    def note_value(self, number: int, started: float, finished: float, value: Any) -> bool:
        """Note a small, immutable value of a task; return True if the table keeps it."""
        if self._tail.pieces or forked.generation != self._generation:
            self.note(number, VALUE, started, finished, b"" if value is None else dumps(value, 5))
            return self.keep()
        self._values.append((number, started, finished, value))
        pickled = b"" if value is None else dumps(value, 5)
        return self._row.keep(pack_outcome(number, VALUE, started, finished, pickled, b""))

    # -- sending -----------------------------------------------------------------------------------

    def take(self) -> list[bytes]:
        """Return a message with all outcomes and returned references; empty if there are none."""
        waiting = self._entries
        taken = waiting[:]
        del waiting[: len(taken)]
        told = trail.take()  # first: the processor time of a task must arrive before its outcome
        entries = [pack_outcome(0, TRAIL, 0.0, 0.0, told, b"")] if told else []
        entries += [entry for entry, _ in taken]
        for number in self._ref_table.take_returned():
            entries.append(pack_outcome(number, LOAN_OVER, 0.0, 0.0, b"", b""))
        values = self._values[:]
        if values:
            del self._values[: len(values)]
            entries.append(pack_values(*map(list, zip(*values, strict=True))))
        if not entries:
            return []
        return pack_outcomes(entries, [each for _, large in taken for each in large])
