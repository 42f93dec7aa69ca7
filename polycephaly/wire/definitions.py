"""Work that is called often is sent once: the controller's book of callables and code strings.

    fn ──> Book.define ──> Definition(number, payload) ──> a DEFINE item, once for each drone that needs it
                                                      └──> CALL items carry the number alone

When may a function pickled before be reused? A function by reference: always. A function by value: while
everything that it would capture (closure cells, globals, defaults) is the very same immutable object as it
was then; those objects are its *witnesses*. Where one of them could have been changed in place, the function
is pickled again at each call, since a call captures the values of its moment.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from ..coroutines import is_coroutine_function
from .capture import ATOMS, MainSnapshot, main_namespace, pack
from .loans import Parcel
from .messages import DEFINE_CALLABLE, DEFINE_CODE, DEFINE_OVERLAPPING
from .store import Store
from .tickets import meeting

if TYPE_CHECKING:
    from ..vault import Deposit, Vault

__all__ = ["Book", "Definition", "by_reference"]

_NOT_THERE = object()
_KEPT_CODE = 1024
_COLD = 16
"""So many reports of a shorter time are believed as they are: the first calls tell what it takes to warm up."""
_numbers = itertools.count(1)  # for all books: a drone may get definitions from two, across a refresh


class Definition:
    """One callable or code string, as it travels. `seconds` is what a call has lately taken (None: unknown)."""

    __slots__ = (
        "captures", "carries", "kept", "kind", "label", "moved", "number", "once", "overlaps", "pace", "payload",
        "reports", "seconds",
    )  # fmt: skip

    def __init__(self, number: int, kind: int, payload: bytes | Parcel, label: str) -> None:
        self.number = number
        self.kind = kind
        self.captures = False  # handles of kept values: then it is for one call
        self.carries = False  # these, or what wants to know what becomes of the call
        self.kept: dict[int, Deposit] = {}  # these values, until that call has them
        self.moved: list[Any] = []
        self.overlaps = kind == DEFINE_OVERLAPPING  # a drone may run several of these at once, as green threads
        self.payload = payload
        self.label = label
        self.seconds: float | None = None
        self.reports = 0  # of its time
        self.once = False  # for one call: what it is made of may change before the next
        self.pace: list[float | None] | None = None  # `seconds`, for the next definition of the same thing

    def took(self, seconds: float, calls: int) -> None:
        """Follows the measured time; a longer one, and that of many calls, is believed sooner."""
        if not calls:  # a slice of which the last call had just ended when it was cut
            return
        seconds /= calls
        if not 0 <= seconds < inf:  # no time: what is reckoned with it would never be one again
            return
        old = self.seconds
        self.reports += 1
        if old is None or (seconds < old and self.reports <= _COLD):
            self.seconds = seconds
        else:
            self.seconds = old + (seconds - old) * (0.5 if seconds > old or calls >= 32 else 0.3)
        if self.pace is not None:
            self.pace[0] = self.seconds


class _Entry(NamedTuple):
    function: ref[Any]
    witnesses: tuple[tuple[Any, str, Any], ...]  # (dict, cell or function; name; the object that was there)
    definition: Definition


class Book:
    """The definitions made against one snapshot. Any thread may call it: a lost race defines a thing twice."""

    def __init__(
        self, snapshot: MainSnapshot, store: Store | None, overlaps: bool = False, vault: Vault | None = None
    ) -> None:
        self.snapshot = snapshot
        self.vault = vault
        self.store = store
        self._overlaps = overlaps
        self._entries: dict[int, _Entry] = {}
        self._last: tuple[Any, Any] = (self, None)  # a function without witnesses, and its definition
        self._code: dict[str, Definition] = {}
        self._paces: WeakKeyDictionary[Any, list[float | None]] = WeakKeyDictionary()

    def define(self, work: str | Callable[..., Any]) -> Definition:
        """The definition of `work`. Raises what its pickling raises, with a note that says what it was."""
        if work is self._last[0]:
            last: Definition = self._last[1]
            return last
        if isinstance(work, str):
            return self._define_code(work)
        entry = self._entries.get(id(work))
        if entry is not None:
            function, witnesses, definition = entry
            if function() is work and (not witnesses or all(map(_stands, witnesses))):
                if not witnesses:
                    self._last = work, definition
                return definition
        try:
            with meeting(self.vault) as pickling:
                payload = pack(work, self.snapshot, self.store)
        except Exception as error:
            error.add_note(f"while pickling the work itself, {label(work)}")
            raise
        kind = DEFINE_OVERLAPPING if self._overlaps and is_coroutine_function(work) else DEFINE_CALLABLE
        definition = Definition(next(_numbers), kind, payload, label(work))
        definition.kept, definition.moved = pickling.met or {}, pickling.moved or []
        definition.captures = bool(pickling.met)
        definition.carries = bool(pickling.met or pickling.moved)
        if entry is not None:
            definition.seconds = entry.definition.seconds
        if not self._remember(work, definition):
            definition.once = True
            definition.pace = self._paces.setdefault(_kin(work), [None])
            definition.seconds = definition.pace[0]
        return definition

    def forget(self) -> None:
        """Its drones are gone: nothing of it is needed any more, and some may lie in shared memory."""
        self._entries.clear()
        self._last = self, None

    def _define_code(self, source: str) -> Definition:
        known = self._code.get(source)
        if known is None:
            payload = source.encode("utf-8", "surrogatepass")
            known = Definition(next(_numbers), DEFINE_CODE, payload, f"code {source[:60]!r}")
            if len(self._code) >= _KEPT_CODE:
                self._code.clear()
            self._code[source] = known
        return known

    def _remember(self, work: Any, definition: Definition) -> bool:
        if not isinstance(work, (FunctionType, BuiltinFunctionType, type, partial)):
            return False  # an instance or a bound method: its state may change at any time
        try:
            witnesses = tuple(_witnesses(work, self.snapshot, set()))
        except _Mutable:
            return False
        key, entries = id(work), self._entries

        def forget(_: object) -> None:
            entries.pop(key, None)

        entries[key] = _Entry(ref(work, forget), witnesses, definition)
        return True


class _Mutable(Exception):
    """Something captured could change in place."""


def label(work: object) -> str:
    """How a piece of work is called in messages."""
    if isinstance(work, str):
        return f"code {work[:60]!r}"
    name = getattr(work, "__qualname__", None) or getattr(work, "__name__", None)
    return str(name) if name else f"a {type(work).__qualname__}"


def _stands(witness: tuple[Any, str, Any]) -> bool:
    place, name, value = witness
    if type(place) is dict:
        return place.get(name, _NOT_THERE) is value if name else tuple(place) == value
    if type(place) is FunctionType or type(place) is partial:
        return getattr(place, name) is value
    try:
        return place.cell_contents is value
    except ValueError:  # the cell is empty now
        return False


def _witnesses(work: Any, snapshot: MainSnapshot, seen: set[int]) -> Iterator[tuple[Any, str, Any]]:
    """What the pickle of `work` depends on; raises `_Mutable` where looking again would not show a change."""
    if id(work) in seen or by_reference(work, snapshot):
        return
    seen.add(id(work))
    if not isinstance(work, (FunctionType, partial)) or work.__dict__:
        raise _Mutable  # a class by value, or something that has attributes
    yield work.__dict__, "", ()
    if isinstance(work, partial):
        yield from _witnesses_of_partial(work, snapshot, seen)
        return
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        yield work, name, getattr(work, name)
    for value in work.__defaults__ or ():
        yield from _witnesses_of_value(value, snapshot, seen)
    if work.__kwdefaults__:
        yield from _witnesses_of_keywords(work.__kwdefaults__, snapshot, seen)
    for cell in work.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError as empty:
            raise _Mutable from empty
        yield from _witnesses_of_value(value, snapshot, seen)
        yield cell, "", value
    namespace = work.__globals__
    of_main = namespace is main_namespace()
    for name in set(_names(work.__code__)):
        value = namespace.get(name, _NOT_THERE)
        if value is not _NOT_THERE and not (of_main and snapshot.unchanged(name, value)):
            yield from _witnesses_of_value(value, snapshot, seen)
        yield namespace, name, value


def _witnesses_of_partial(work: partial[Any], snapshot: MainSnapshot, seen: set[int]) -> Iterator[tuple[Any, str, Any]]:
    yield from _witnesses_of_keywords(work.keywords, snapshot, seen)
    for name, value in (("func", work.func), ("args", work.args)):
        yield from _witnesses_of_value(value, snapshot, seen)
        yield work, name, value


def _witnesses_of_keywords(
    keywords: dict[str, Any], snapshot: MainSnapshot, seen: set[int]
) -> Iterator[tuple[Any, str, Any]]:
    yield keywords, "", tuple(keywords)
    for name, value in keywords.items():
        yield from _witnesses_of_value(value, snapshot, seen)
        yield keywords, name, value


def _witnesses_of_value(value: Any, snapshot: MainSnapshot, seen: set[int]) -> Iterator[tuple[Any, str, Any]]:
    if isinstance(value, (*ATOMS, ModuleType)):
        return
    if isinstance(value, (FunctionType, BuiltinFunctionType, type, partial)):
        yield from _witnesses(value, snapshot, seen)
    elif type(value) is tuple:
        for each in value:
            yield from _witnesses_of_value(each, snapshot, seen)
    else:
        raise _Mutable


def by_reference(work: Any, snapshot: MainSnapshot) -> bool:
    module = getattr(work, "__module__", None)
    if module == "__main__":
        return snapshot.holds(work)
    found: Any = sys.modules.get(module or "")
    for step in getattr(work, "__qualname__", "").split("."):
        found = getattr(found, step, None)
    return found is work


def _kin(work: Any) -> Any:
    """What calls of it have in common with those of other objects: probably the time that they take."""
    if isinstance(work, partial):
        return _kin(work.func)
    if isinstance(work, FunctionType):
        return work.__code__
    return getattr(work, "__func__", None) or type(work)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names  # globals and attributes alike: an attribute's name costs a look-up, no more
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
