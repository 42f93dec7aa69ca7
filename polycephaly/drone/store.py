"""The drone store: values that a drone keeps for later tasks.

    call with KEEP ──> value ──> store[17] <──placeholder 17── later calls: the value, not a copy
    BRING 17 ── serialized, from another drone ──> box ──first use──> unpickled, in the store too
    FETCH 17 ──> serialized once, to shared memory ──PACKED──> reactor, which lends it on
    Kept(value) in a call ──> KeptHere ──its handle in a result──> GIVEN, and in the store
    DROP 17  ──> removed; a call that still uses the value keeps it alive

A value stays as returned, and is pickled only if another process requests it. The main thread
stores and takes values. FETCH is done by the main thread between two tasks, or by the control
thread during a long one: each entry of `wanted` is taken by one of them.

Claims are counted: each KEEP, BRING and GIVEN gives the controller one, and DROP says how many it
gives up. So the order of a DROP and another BRING or GIVEN of the same value does not matter.

Either thread handles BRING and DROP. The main thread unpickles a box, stores the value, then
removes the box, and removes the value again if the box was gone. So a DROP at any moment leaves
neither.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from struct import Struct
from typing import Any

from ..store import placeholders
from ..store.kept import arrive
from ..store.references import load
from ..wire.messages import Malformed

__all__ = ["DroneStore", "described", "grants", "size_of"]

_SIZE = Struct("<Q")
_GRANT = Struct("<QQB")
_MADE = 1 << 63  # marks numbers that no task has
_LOOKED_AT = 1000
"""Number of objects of a value that are examined to estimate its size."""


class DroneStore:
    def __init__(self, name: str) -> None:
        self.name = name
        self._values: dict[int, Any] = {}
        self._boxes: dict[int, Any] = {}
        self.wanted: deque[int] = deque()
        """Numbers of values that another process has requested and that are not yet packed."""
        self.given: dict[int, KeptHere] = {}
        """Values whose handles were pickled, and that were not yet reported to the controller."""
        self._claims: dict[int, int] = {}  # the controller's claims to each value
        self._counting = threading.Lock()
        placeholders.shelf = self

    def keep(self, number: int, value: Any) -> bytes:
        """Store a value, and return its description for the controller."""
        described = _SIZE.pack(size_of(value)) + _name_of(value)
        self._claim(number)
        self._values[number] = value
        return described

    def make(self, value: Any) -> KeptHere:
        return KeptHere(self, value)

    def take_given(self) -> bytes:
        """Return the report of the values in `given`. From now on they are held here."""
        told = []
        while self.given:
            number, made = self.given.popitem()
            self._claim(number)
            self._values[number] = made.value
            name = _name_of(made.value)
            told.append(_GRANT.pack(number, made.nbytes, len(name)) + name)
        return b"".join(told)

    def bring(self, number: int, box: Any) -> None:
        """Store a serialized value (bytes, or `Received`), which is unpickled at its first use."""
        self._claim(number)
        if number not in self._values:
            self._boxes[number] = box

    def value(self, number: int) -> Any:
        """Return a value. Raises `LookupError` if there is none, and errors of unpickling."""
        try:
            return self._values[number]
        except KeyError:
            box = self._boxes[number]
        value = self._values[number] = load(box)
        if self._boxes.pop(number, self) is self:
            self._values.pop(number, None)
        return value

    def _claim(self, number: int) -> None:
        with self._counting:
            self._claims[number] = self._claims.get(number, 0) + 1

    def drop(self, number: int, claims: int = 1) -> None:
        """Give up a number of claims; without any left, the value is removed."""
        with self._counting:
            left = self._claims.pop(number, 0) - claims
            if left > 0:
                self._claims[number] = left
                return
        self._boxes.pop(number, None)
        self._values.pop(number, None)


class KeptHere:
    """A value that a task keeps by `Kept(value)`, with the task's references to it."""

    def __init__(self, shelf: DroneStore, value: Any) -> None:
        # Unique among all pools, for ever.
        self.number = _MADE | int.from_bytes(os.urandom(8), "little")
        self.value = value
        self.nbytes = size_of(value)
        self._shelf = shelf
        placeholders.known[self.number] = self

    @property
    def home(self) -> str:
        return self._shelf.name

    @property
    def state(self) -> str:
        return f"{type(self.value).__qualname__}, {self.nbytes:,} bytes in {self.home}"

    def fetched(self) -> Any:
        return self.value

    def ticket(self) -> tuple[Any, tuple[int]]:
        now = placeholders.here.now
        if now is not None:
            where = (
                "was to go through a channel"
                if now.directory is None
                else f"was given to a call of {now.directory.name}"
            )
            raise TypeError(
                f"what drone {self.home} keeps {where}: its handle goes to calls of the pool that {self.home} is of, "
                "and home in a result; send its `value`"
            )
        if placeholders.here.asked_for:  # no process would hold the value of the inner handle
            raise TypeError(
                f"what drone {self.home} keeps has a handle in it, of another value that is kept there: "
                "it does not go elsewhere; let work there return the handle"
            )
        self._shelf.given[self.number] = self
        return arrive, (self.number,)


def grants(payload: Any) -> Iterator[tuple[int, int, str]]:
    """Yield number, bytes and type name of each value that `take_given` reported.

    Raises `Malformed`.
    """
    at = 0
    while at < len(payload):
        if len(payload) < at + _GRANT.size:
            raise Malformed(f"a grant that ends after {len(payload)} bytes")
        number, nbytes, length = _GRANT.unpack_from(payload, at)
        at += _GRANT.size + length
        yield number, nbytes, bytes(payload[at - length : at]).decode("utf-8", "replace")


def _name_of(value: Any) -> bytes:
    return type(value).__qualname__.encode("utf-8", "replace")[:200]


def described(payload: Any) -> tuple[int, str]:
    """Return bytes and type name from the description that `keep` returned."""
    if len(payload) < _SIZE.size:
        return 0, "?"
    return _SIZE.unpack_from(payload)[0], bytes(payload[_SIZE.size :]).decode("utf-8", "replace")


def size_of(value: Any) -> int:
    """Return the bytes of a value, about.

    Exact for arrays, bytes and the like, and for containers of up to a thousand objects; larger
    containers are estimated from the first thousand.
    """
    left = _LOOKED_AT
    seen: set[int] = set()

    def size(value: Any) -> float:
        nonlocal left
        left -= 1
        if id(value) in seen:
            return 0
        seen.add(id(value))
        try:
            nbytes = getattr(value, "nbytes", None)
            if nbytes is not None and not isinstance(value, type):
                return int(nbytes)
            if type(value).__module__.partition(".")[0] == "pandas":
                used = value.memory_usage()
                return int(getattr(used, "sum", lambda: used)())
            own: float = sys.getsizeof(value)
        except Exception:  # code of other packages, which may fail
            return 0
        parts: Any = ()
        if isinstance(value, dict):
            parts = ((each, value[each]) for each in value)
            count = len(value)
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts, count = value, len(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            return own + size(vars(value))
        if not parts:
            return own
        looked = 0
        inner = 0.0
        for part in islice(parts, max(0, left)):
            looked += 1
            inner += size(part[0]) + size(part[1]) if isinstance(value, dict) else size(part)
            if left <= 0:
                break
        return own + (inner * count / looked if looked else 0)

    return max(0, min(int(size(value)), 1 << 62))
