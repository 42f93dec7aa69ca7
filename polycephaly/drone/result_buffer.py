"""What came of a drone's tasks, from their ends until it is sent.

    a task ends ──note──> the list ──take──> one RESULTS message
                            └──keep──> the running page, which outlives this drone

Values that are small and immutable are noted as they are, and pickled together when they are sent;
in the page each is an outcome by itself.

The main thread notes and keeps; it sends, too, between tasks, and the ear does while a task is run
for long, so that nothing waits for the end of that. Who takes holds the socket's turn until it is
sent. The two lists are appended to by the main thread alone, and taken from their beginnings: each
is one atomic step. What the ear has sent stays in the page until the main thread sends: should the
drone die meanwhile, the hub hears it once more, and knows that it did."""

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
        self._gives = False  # handles, in what was noted last
        self._entries: list[tuple[bytes, list[bytes]]] = []
        self._last: tuple[bytes, list[bytes]] = (b"", [])
        self._values: list[tuple[int, float, float, Any]] = []

    # -- packing -----------------------------------------------------------------------------------

    def pack(self, value: object) -> bytes | Serialized:
        """Raises what the value's own pickling raises."""
        self._leave_if_forked()
        try:
            bulky = type(value) in BULKY and len(value) >= LARGE_BUFFER  # type: ignore[arg-type]
            return pack(value, self._snapshot, self._store, bulky)
        except BaseException as error:
            error.add_note(f"while pickling the result, a {type(value).__qualname__}")
            raise

    def _leave_if_forked(self, error: BaseException | None = None) -> None:
        """End a child that work has forked, before anything of the drone's is touched: all that
        comes of work passes here."""
        forked.leave_if_forked(self._generation, error)

    def pack_error(self, error: BaseException) -> bytes:
        self._leave_if_forked(error)
        try:
            return pack_exception(error, lambda value: capture(value, self._snapshot))
        except (
            BaseException
        ) as worse:  # its own code broke off its packing: tell at least what it was
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
        """An entry in a RESULTS message, and what goes beside that. Any thread may call it."""
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
        """What goes before an outcome with handles of what this drone keeps; nothing, where there
        are none."""
        told = self._shelf.take_given() if self._shelf.given else b""
        return [pack_outcome(number, GIVEN, 0.0, 0.0, told, b"")] if told else []

    def keep(self) -> bool:
        """Does the one noted last outlive this drone from now on? Else it has to be sent at once:
        the page is full, or has no place for what goes beside the entry."""
        entry, large = self._last
        return not large and not self._gives and self._row.keep(entry)

    def note_value(self, number: int, started: float, finished: float, value: Any) -> bool:
        """A value that is small and immutable, of a task that printed nothing. Whether it was
        kept."""
        if self._tail.pieces or forked.generation != self._generation:
            self.note(number, VALUE, started, finished, b"" if value is None else dumps(value, 5))
            return self.keep()
        self._values.append((number, started, finished, value))
        pickled = b"" if value is None else dumps(value, 5)
        return self._row.keep(pack_outcome(number, VALUE, started, finished, pickled, b""))

    # -- sending -----------------------------------------------------------------------------------

    def take(self) -> list[bytes]:
        """The message that brings all of it, and which loans are over; nothing where there is
        nothing to say."""
        waiting = self._entries
        taken = waiting[:]
        del waiting[: len(taken)]
        told = trail.take()  # first, as the processor time of works is to be there before they are
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
