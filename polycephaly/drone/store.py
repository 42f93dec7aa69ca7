"""The shelf: what a drone keeps for work to come.

    a call with KEEP ──> value ──> shelf[17] <──ticket 17── arguments of later calls: the value itself, not a copy
    BRING 17 ── packed, from another drone ──> box ──first ticket──> opened, and on the shelf too
    FETCH 17 ──> packed once, into shared memory ──PACKED──> the hub, which lends it on
    Kept(value) in a call ──> Made ──its handle in a result──> GIVEN, and on the shelf
    DROP 17  ──> gone from here; what a call still uses lives as long as that

A value stands here as it was returned: nothing is pickled until another image asks for it. The main
thread puts and takes; FETCH is done by it between two tasks, or by the ear during a long one,
whoever takes it from `wanted`.

Claims are counted: each KEEP, BRING and GIVEN gives the hub one, and DROP says how many it gives
up. So it does not matter which of a DROP and another BRING, or GIVEN, of the same value comes
first.

BRING and DROP are heard by either thread. A box is opened by the main thread, which puts the value
on the shelf before it takes the box away, and takes the value off again if the box had gone: so a
DROP at any moment leaves neither."""

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
_MADE = 1 << 63  # of no work
_LOOKED_AT = 1000
"""So many objects of a value are looked at to tell its size."""


class DroneStore:
    def __init__(self, name: str) -> None:
        self.name = name
        self._values: dict[int, Any] = {}
        self._boxes: dict[int, Any] = {}
        self.wanted: deque[int] = deque()
        """What another image has asked for, and nobody has packed yet."""
        self.given: dict[int, KeptHere] = {}
        """Of which handles were pickled, and the hub was not told."""
        self._claims: dict[int, int] = {}  # how often the hub has a claim to each
        self._counting = threading.Lock()
        placeholders.shelf = self

    def keep(self, number: int, value: Any) -> bytes:
        """What is told of it."""
        described = _SIZE.pack(size_of(value)) + _name_of(value)
        self._claim(number)
        self._values[number] = value
        return described

    def make(self, value: Any) -> KeptHere:
        return KeptHere(self, value)

    def take_given(self) -> bytes:
        """What is to be told of them; from now on they are held here."""
        told = []
        while self.given:
            number, made = self.given.popitem()
            self._claim(number)
            self._values[number] = made.value
            name = _name_of(made.value)
            told.append(_GRANT.pack(number, made.nbytes, len(name)) + name)
        return b"".join(told)

    def bring(self, number: int, box: Any) -> None:
        """`box`: bytes, or `Received`. Not opened until it is needed."""
        self._claim(number)
        if number not in self._values:
            self._boxes[number] = box

    def value(self, number: int) -> Any:
        """Raises `LookupError` for what is not there, and what unpickling it raises."""
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
        """So many claims are given up."""
        with self._counting:
            left = self._claims.pop(number, 0) - claims
            if left > 0:
                self._claims[number] = left
                return
        self._boxes.pop(number, None)
        self._values.pop(number, None)


class KeptHere:
    """What work in this drone keeps by `Kept(value)`: its own references to it."""

    def __init__(self, shelf: DroneStore, value: Any) -> None:
        self.number = _MADE | int.from_bytes(os.urandom(8), "little")  # of all pools and for ever
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
        if placeholders.here.asked_for:  # nobody would hold what the handle is of
            raise TypeError(
                f"what drone {self.home} keeps has a handle in it, of another value that is kept there: "
                "it does not go elsewhere; let work there return the handle"
            )
        self._shelf.given[self.number] = self
        return arrive, (self.number,)


def grants(payload: Any) -> Iterator[tuple[int, int, str]]:
    """Number, bytes and name of the type, of what `take_given` told. Raises `Malformed`."""
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
    """Bytes, and the name of the type, of what `keep` told."""
    if len(payload) < _SIZE.size:
        return 0, "?"
    return _SIZE.unpack_from(payload)[0], bytes(payload[_SIZE.size :]).decode("utf-8", "replace")


def size_of(value: Any) -> int:
    """Bytes of a value, about: exact for arrays, bytes and the like, and what holds up to a
    thousand objects; reckoned from the first thousand for what holds more."""
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
        except Exception:  # code of others, which need not work
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
