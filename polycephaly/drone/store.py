"""The drone store: values that a drone keeps for later tasks.

    call with KEEP ──> value ──> store[17] <──placeholder 17── later calls: the value, not a copy
    STORE 17 ── serialized, from another drone ──> packed ──first use──> value, in the store too
    FETCH 17 ──> serialized once, to shared memory ──PACKED──> reactor, which lends it on
    Kept(value) in a call ──> LocalKeptValue ──its handle in a result──> KEPT_VALUES, and the store
    DROP 17  ──> removed; a call that still uses the value keeps it alive

A value stays as returned, and is pickled only if another process requests it. The main thread
stores and takes values. FETCH is done by the control thread, or by the main thread if that is idle:
each entry of `requested` is taken by one of them.

Claims are counted: each KEEP, STORE and KEPT_VALUES gives the controller one, and DROP says how
many it gives up. So the order of a DROP and another STORE or KEPT_VALUES of the same value does not
matter.

Either thread handles STORE and DROP. The main thread unpickles a packed value, stores the value,
then removes the packed one, and removes the value again if the packed one was gone. So a DROP at
any moment leaves neither.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Collection
from itertools import islice
from typing import Any

from ..memory.references import load
from ..promises.promise import pickling_state
from ..store.kept import restore_handle
from ..wire import placeholders
from ..wire.kept_values import pack_kept_value

_DRONE_NUMBER_BIT = 1 << 63  # marks numbers that no task has
_MAX_EXAMINED_PARTS = 1000  # of a value whose size is estimated


class DroneStore:
    def __init__(self, name: str) -> None:
        self.name = name
        self._values: dict[int, Any] = {}
        self._packed: dict[int, Any] = {}
        self.requested: deque[int] = deque()
        """Numbers of values that another process has requested and that are not yet packed."""
        self.unreported: dict[int, LocalKeptValue] = {}
        """Values whose handles were pickled, and that were not yet reported to the controller."""
        self._claims: dict[int, int] = {}  # the controller's claims to each value
        self._claims_lock = threading.Lock()

    def keep(self, number: int, value: Any) -> bytes:
        """Store a value, and return the answer for the controller, which describes the value."""
        answer = pack_kept_value(number, size_of(value), type(value).__qualname__)
        self._claim(number)
        self._values[number] = value
        return answer

    def make(self, value: Any) -> LocalKeptValue:
        return LocalKeptValue(self, value)

    def take_unreported(self) -> bytes:
        """Return the report of the values in `unreported`. From now on they are held here."""
        entries = []
        while self.unreported:
            number, kept = self.unreported.popitem()
            self._claim(number)
            self._values[number] = kept.value
            entries.append(pack_kept_value(number, kept.nbytes, type(kept.value).__qualname__))
        return b"".join(entries)

    def add_packed(self, number: int, packed: Any) -> None:
        """Store a serialized value (bytes, or `Received`), which is unpickled at its first use."""
        self._claim(number)
        if number not in self._values:
            self._packed[number] = packed

    def value(self, number: int) -> Any:
        """Return a value. Raises `LookupError` if there is none, and errors of unpickling."""
        try:
            return self._values[number]
        except KeyError:
            packed = self._packed[number]
        value = self._values[number] = load(packed)
        if self._packed.pop(number, self) is self:
            self._values.pop(number, None)
        return value

    def _claim(self, number: int) -> None:
        with self._claims_lock:
            self._claims[number] = self._claims.get(number, 0) + 1

    def drop(self, number: int, claims: int = 1) -> None:
        """Give up a number of claims; without any left, the value is removed."""
        with self._claims_lock:
            left = self._claims.pop(number, 0) - claims
            if left > 0:
                self._claims[number] = left
                return
        self._packed.pop(number, None)
        self._values.pop(number, None)


class LocalKeptValue:
    """A value that a task keeps by `Kept(value)`, with the task's references to it."""

    def __init__(self, store: DroneStore, value: Any) -> None:
        # Unique among all pools, for ever.
        self.number = _DRONE_NUMBER_BIT | int.from_bytes(os.urandom(8), "little")
        self.value = value
        self.nbytes = size_of(value)
        self._store = store
        placeholders.known_owners[self.number] = self

    @property
    def holder_name(self) -> str:
        return self._store.name

    @property
    def state(self) -> str:
        return f"{type(self.value).__qualname__}, {self.nbytes:,} bytes in {self.holder_name}"

    def fetch_value(self) -> Any:
        return self.value

    def make_placeholder(self) -> tuple[Any, tuple[int]]:
        context = pickling_state.context
        if context is not None:
            where = "was sent through a channel"
            if context.directory is not None:
                where = f"was passed to a call of {context.directory.name}"
            raise TypeError(
                f"the handle of a value that drone {self.holder_name} keeps {where}: pass the "
                "handle to calls of the drone's own pool only, or return it in a result; "
                "elsewhere, send its `value`"
            )
        # No process would hold the value of the inner handle.
        if pickling_state.for_other_process:
            raise TypeError(
                f"a value that drone {self.holder_name} keeps contains the handle of another kept "
                "value, so the outer value cannot be sent to another process: let a task of that "
                "drone return the handle"
            )
        self._store.unreported[self.number] = self
        return restore_handle, (self.number,)


def size_of(value: Any) -> int:
    """Return the bytes of a value, about: its own, and those of its items or attributes, estimated
    from the first thousand. Parts of these are not counted.
    """
    parts: Collection[Any]
    if isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values()
    try:
        sizes = [_own_size(part) for part in islice(parts, _MAX_EXAMINED_PARTS)]
        size = _own_size(value) + sum(sizes) * len(parts) // max(1, len(sizes))
    except Exception:  # code of other packages, which may fail
        size = 0
    return max(0, min(size, 1 << 62))


def _own_size(value: Any) -> int:
    nbytes = getattr(value, "nbytes", None)  # of an array, a tensor, bytes elsewhere
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(value)
