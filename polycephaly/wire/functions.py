"""The controller's function registry: a callable or code string is sent once to each drone.

    fn ──> FunctionRegistry.define ──> RemoteFunction(number, payload)
                                        ├─> DEFINE item, once for each drone that needs the function
                                        └─> CALL items, which carry the number only

A pickled function may be reused under these conditions. A function by reference: always. A function
by value: while everything that its pickle captures (closure cells, globals, defaults) is still the
identical immutable object; the entry's *guards* check that. If a captured object could have changed
in place, the function is pickled again at each call, because a call captures the values of its
moment; for a `map`, once when that is called, and each of its calls opens the pickle anew.

An entry is removed when its function dies, so nothing in the entry may lead back to the function:
cells, namespaces, other functions and modules could. A guard therefore reads them through a weak
reference to the function, and holds the captured objects weakly. Only objects that refer to nothing
(numbers, strings, bytes, code, tuples of these) are held strongly.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import inf
from operator import is_, itemgetter
from pickle import dumps
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

from .._compat import caller_stacklevel
from ..errors import type_with_article
from ..memory.blocks import Store
from ..memory.references import Serialized
from ..promises.promise import NeedsPlaceholder
from ..runtime.coroutines import is_coroutine_function
from ..runtime.signal_handlers import is_of_signal_handler
from .attempts import attempt, attempt_row
from .copied_generators import find_copied
from .main_names import (
    ATOMIC_TYPES,
    MainSnapshot,
    Weak,
    global_names,
    goes_with_calls,
    hold,
    main_namespace,
)
from .messages import DEFINE_CALLABLE, DEFINE_CODE, DEFINE_OVERLAPPING, FRESH
from .pickling import capture, pack, pickled_size
from .placeholders import Directory, PicklingContext, sent_bytes

_MISSING = object()
_all_missing = itertools.repeat(_MISSING)
_MAX_CODE_STRINGS = 1024
_MAX_DEFINITIONS = 256
_MAX_DEFINITION_BYTES = 8 << 20
MAX_QUIET_BYTES = 10_000_000
"""Bytes of a function and all that it captures that are sent without a warning."""
_WARMUP_REPORTS = 16
"""Number of first reports of which a shorter time is adopted at once: the first calls include
warming up.
"""
# One counter for all registries: a drone may get definitions from two, across a refresh.
_numbers = itertools.count(1)


class RemoteFunction:
    """One callable or code string in the form in which it travels.

    `seconds` is the recent duration of a call, None if unknown.
    """

    __slots__ = (
        "__weakref__", "captures", "kept", "kind", "label", "moved", "number", "overlaps",
        "payload", "reports", "seconds", "shared_seconds", "single_use", "takes_function",
        "takes_index",
    )  # fmt: skip

    def __init__(self, number: int, kind: int, payload: bytes | Serialized, label: str) -> None:
        self.number = number
        self.kind = kind
        # The function captures handles of kept values, or objects that follow the call: the
        # definition is then for one call.
        self.captures = False
        # The captured kept values, held here until that call holds them.
        self.kept: dict[int, Any] = {}
        self.moved: list[Any] = []
        # A drone may run several calls at once, as green threads.
        self.overlaps = kind == DEFINE_OVERLAPPING
        self.payload = payload
        self.label = label
        self.seconds: float | None = None
        self.reports = 0  # number of durations reported
        self.single_use = False  # for one call: a captured object may change before the next
        self.takes_function = False  # the first argument of the call is the function itself
        self.takes_index = False  # the last one is the index of the call: see seeding.py
        # `seconds`, shared with the next definition of the same function
        self.shared_seconds: list[float | None] | None = None

    def without_payload(self) -> RemoteFunction:
        """Return what is left of a definition for one call when that call is answered."""
        rest = RemoteFunction(self.number, self.kind, b"", self.label)
        rest.takes_function, rest.seconds = self.takes_function, self.seconds
        rest.captures, rest.takes_index = self.captures, self.takes_index
        return rest

    def given_args(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return those of the arguments of a call that the caller has given."""
        return args[self.takes_function : len(args) - self.takes_index]

    def record_duration(self, seconds: float, calls: int) -> None:
        """Update `seconds` from a measured time of `calls` calls.

        Longer times, and times of many calls, change the estimate faster.
        """
        seconds /= calls
        # Not a duration: any estimate computed from NaN or infinity would stay useless.
        if not 0 <= seconds < inf:
            return
        old = self.seconds
        self.reports += 1
        if old is None or (seconds < old and self.reports <= _WARMUP_REPORTS):
            self.seconds = seconds
        else:
            self.seconds = old + (seconds - old) * (0.5 if seconds > old or calls >= 32 else 0.3)
        if self.shared_seconds is not None:
            self.shared_seconds[0] = self.seconds


class _Entry(NamedTuple):
    function: ref[Any]
    guards: tuple[_Guard, ...]  # empty: the function always goes by reference
    definition: RemoteFunction


class KnownFunctions:
    """The definitions that one other process has, so that a call of these carries only a number.

    Definitions that can be called no more, and the oldest ones if there are too many, are to be
    forgotten by that process. One thread at a time uses this object. A definition may die in any
    thread and at any point of its code: then only its number is appended to `unused`, and
    `on_unused` is called.
    """

    def __init__(self, on_unused: Callable[[], object] | None = None) -> None:
        self.unused: deque[int] = deque()
        self._on_unused = on_unused
        # number -> (definition, bytes), oldest first
        self._known: dict[int, tuple[ref[Any], int]] = {}
        self._bytes = 0

    def __contains__(self, number: int) -> bool:
        return number in self._known

    def add(self, definition: Any) -> Iterator[int]:
        """Record `definition` as sent; yield the numbers of those to forget first, to make room."""
        known, number, size = self._known, definition.number, len(definition.payload)
        while known and (
            len(known) >= _MAX_DEFINITIONS or self._bytes + size > _MAX_DEFINITION_BYTES
        ):
            oldest = next(iter(known))
            self.remove(oldest)
            yield oldest
        known[number] = ref(definition, partial(self._mark_unused, number)), size
        self._bytes += size

    def remove(self, number: int) -> None:
        """Record that the process no longer has this definition."""
        self._bytes -= self._known.pop(number, (None, 0))[1]

    def pop_unused(self) -> Iterator[int]:
        """Yield the numbers of definitions to forget because no call of these can come any more."""
        while self.unused:
            number = self.unused.popleft()
            self.remove(number)
            yield number

    def _mark_unused(self, number: int, _: object) -> None:
        self.unused.append(number)
        if self._on_unused is not None:
            self._on_unused()


class FunctionRegistry:
    """The definitions made against one snapshot.

    Any thread may call it. Two threads that race may define the same function twice, which is
    harmless.
    """

    shares_objects = False
    """True if drones have the objects of `__main__` themselves, not copies."""

    def __init__(
        self,
        snapshot: MainSnapshot,
        store: Store | None,
        overlaps: bool = False,
        directory: Directory | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.directory = directory
        self.store = store
        self._overlaps = overlaps
        self._entries: dict[int, _Entry] = {}
        # The last function without guards, and its definition.
        self._last: tuple[ref[Any], Any] = (ref(self), None)
        self._define_code = lru_cache(_MAX_CODE_STRINGS)(_define_code)
        self._shared_seconds: WeakKeyDictionary[Any, list[float | None]] = WeakKeyDictionary()
        self._has_warned = False  # of a large function
        # Keys of the functions that were searched for generators, and the generators found.
        self._searched: WeakSet[Any] = WeakSet()
        self._warned_of: list[object] = []

    def define_for_map(self, fn: Callable[..., Any]) -> RemoteFunction:
        """Return a definition for all calls of one `map`, which may be given to `define`. It shows
        the captured values as they are now; if they can change, each call gets copies of its own.

        If it `captures`, it is for one call even so.
        """
        definition = self.define(fn)
        if definition.single_use and not definition.captures:  # so no other call has it
            definition.kind |= FRESH
        return definition

    def define(
        self, fn: str | Callable[..., Any] | RemoteFunction, warns: bool = True
    ) -> RemoteFunction:
        """Return the definition of `fn`; of a definition, itself. If it is large and `warns`, the
        user is told, once.

        Raises the errors of its pickling, with a note that names the function.
        """
        same: RemoteFunction
        last, same = self._last
        if fn is last():
            return same
        if isinstance(fn, str):
            return self._define_code(fn)
        if type(fn) is RemoteFunction:
            return fn
        entry = self._entries.get(id(fn))
        if entry is not None:
            function, guards, definition = entry
            if function() is fn and (not guards or all(map(_is_valid, guards))):
                if not guards:
                    self._last = function, definition
                return definition
        self._warn_of_generator(fn)
        try:
            with PicklingContext(self.directory, self.snapshot) as pickling:
                payload = pack(fn, self.snapshot, self.store)
        except NeedsPlaceholder:
            return self._define_as_argument(fn)
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            note = f"while pickling the function itself, {label(fn)}"
            captured = _captured(fn, self.snapshot)
            found = find_unpicklable(captured, self.directory, self.snapshot)
            if found is not None:
                note += f", which captures {found[0]}, {type_with_article(found[1])}"
            error.add_note(note)
            raise
        definition = self._definition(fn, payload)
        definition.kept, definition.moved = pickling.remote_objects or {}, pickling.moved or []
        definition.captures = bool(pickling.remote_objects or pickling.moved)
        if entry is not None:
            definition.seconds = entry.definition.seconds
        if not self._remember(fn, definition):
            self._make_single_use(fn, definition)
        if warns and not self._has_warned and (sent := sent_bytes(payload)) > MAX_QUIET_BYTES:
            self._has_warned = True
            self._warn_of_size(fn, sent)
        return definition

    def _warn_of_size(self, fn: Any, sent: int) -> None:
        # Of the global names and other captured values, the largest.
        sizes = ((self._size_of(value), name, value) for name, value in _leaves(fn, self.snapshot))
        size, name, value = max(sizes, key=itemgetter(0), default=(0, "", None))
        what, cure = "large values", "pool.share(value)"
        if size > sent / 2:
            what = f"{name}, {type_with_article(value)} of {size / 1e6:,.0f} MB"
            cure = f"pool.share({name})" if name.isidentifier() else cure
        # No drone of a served pool gets the names of its clients.
        if self.snapshot.names() and main_namespace().get(name, _MISSING) is value:
            cure += ", or call pool.refresh(), so that the drones have that name"
        warnings.warn(
            f"{label(fn)} captures {what}, which the drones do not have: {sent / 1e6:,.0f} MB are "
            "pickled for each call, or once for all calls of a map, and sent to each drone (only "
            f"once if immutable). Give the calls {cure}",
            RuntimeWarning,
            stacklevel=caller_stacklevel(),
        )

    def _warn_of_generator(self, fn: Any) -> None:
        key = _similarity_key(fn)
        if key in self._searched:
            return
        self._searched.add(key)
        found = find_copied(of_user(fn), self.snapshot, shares_objects=self.shares_objects)
        if found is None or any(found.generator is each for each in self._warned_of):
            return
        self._warned_of.append(found.generator)
        name = label(fn)
        kind = type_with_article(found.generator)
        what = f"reads {found.name}, {kind}" if found.name != name else f"is a method of {kind}"
        warnings.warn(
            f"{name} {what}, of which each drone has a copy, so drones draw the same numbers: draw "
            "from polycephaly.rng() in the function, and with map(..., seed=42) for numbers that "
            f"can be repeated, or give each call a generator of its own: map(f, {found.cure})",
            RuntimeWarning,
            stacklevel=caller_stacklevel(),
        )

    def _size_of(self, value: object) -> int:
        with suppress(Exception), PicklingContext(self.directory, self.snapshot, {}):
            return pickled_size(value, self.snapshot)
        return 0

    def _define_as_argument(self, fn: Any) -> RemoteFunction:
        """Return a definition for one call, which takes `fn` as its first argument.

        `fn` captures a promise or another handle that only the arguments of a call can carry.
        """
        definition = self._definition(fn, _CALL_ARGUMENT)
        definition.captures = definition.takes_function = True
        self._make_single_use(fn, definition)
        return definition

    def _definition(self, fn: Any, payload: bytes | Serialized) -> RemoteFunction:
        overlaps = self._overlaps and is_coroutine_function(fn)
        kind = DEFINE_OVERLAPPING if overlaps else DEFINE_CALLABLE
        definition = RemoteFunction(next(_numbers), kind, payload, label(fn))
        definition.takes_index = takes_index(fn)
        return definition

    def _make_single_use(self, fn: Any, definition: RemoteFunction) -> None:
        definition.single_use = True
        shared = self._shared_seconds.setdefault(_similarity_key(fn), [None])
        definition.shared_seconds, definition.seconds = shared, shared[0]

    def forget(self) -> None:
        """Drop all definitions, and the values of the snapshot: the drones are gone, and some
        payloads may occupy shared memory.
        """
        self.snapshot.forget_values()
        self._entries.clear()
        self._last = ref(self), None

    def _remember(self, fn: Any, definition: RemoteFunction) -> bool:
        if not isinstance(fn, (FunctionType, BuiltinFunctionType, type, partial)):
            return False  # An instance or a bound method: its state may change at any time.
        try:
            guards = tuple(_guards(fn, self.snapshot, set()))
        except _Mutable:
            return False
        key, entries = id(fn), self._entries
        # The callback pop(key, reference) runs before the memory of `fn`, and so its id, can be
        # reused.
        entries[key] = _Entry(ref(fn, partial(entries.pop, key)), guards, definition)
        return True


def _define_code(source: str) -> RemoteFunction:
    payload = source.encode("utf-8", "surrogatepass")
    return RemoteFunction(next(_numbers), DEFINE_CODE, payload, label(source))


def call_argument(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that arrived as an argument. Pickles contain this function's name."""
    return fn(*args, **kwargs)


_CALL_ARGUMENT = dumps(call_argument, 5)


class _Mutable(Exception):
    """A captured object could change in place."""


def label(fn: object) -> str:
    """Return the name of a callable or code string for messages."""
    fn = of_user(fn)
    if isinstance(fn, partial):
        fn = fn.func
    if isinstance(fn, str):
        return f"code {fn[:60]!r}"
    name = None
    with suppress(Exception):  # of the object's own code
        name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    return str(name) if name else type_with_article(fn)


def takes_index(fn: Any) -> bool:
    """Return whether `fn` is a function with a seed, which takes the index of each call, too."""
    return getattr(type(fn), "takes_index", False) is True


def of_user(fn: Any) -> Any:
    """Return the function or code string that the user gave, which one of ours may be bound to."""
    while isinstance(fn, partial) and (
        getattr(type(fn), "is_ours", False) is True or fn.func in (attempt, attempt_row)
    ):
        fn = fn.args[0]
    return fn


def find_unpicklable(
    values: Iterable[tuple[str, Any]], directory: Directory | None, snapshot: MainSnapshot
) -> tuple[str, Any] | None:
    """Return the first of these named values that cannot be pickled, or None."""
    for name, value in values:
        try:
            with PicklingContext(directory, snapshot, {}):
                capture(value, snapshot)
        except Exception:
            return name, value
    return None


def _captured(fn: Any, snapshot: MainSnapshot) -> Iterator[tuple[str, object]]:
    """Yield the names and values that go with a function or a bound method."""
    if isinstance(fn, MethodType):
        yield "self", fn.__self__
        fn = fn.__func__
    if not isinstance(fn, FunctionType) or snapshot.goes_by_reference(fn):
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is empty
            yield name, cell.cell_contents
    for name in dict.fromkeys(global_names(fn.__code__)):
        value = fn.__globals__.get(name, _MISSING)
        if value is not _MISSING and not _is_known(fn, name, value, snapshot):
            yield name, value


def _leaves(fn: Any, snapshot: MainSnapshot) -> Iterator[tuple[str, object]]:
    """Yield the names and values that go with a function and the functions that it captures."""
    seen: set[int] = set()
    todo = [fn]
    while todo:
        each = todo.pop()
        if isinstance(each, partial):
            todo.append(each.func)
            values = [*((f"argument {i}", arg) for i, arg in enumerate(each.args))]
            values += each.keywords.items()
        else:
            values = [*_captured(each, snapshot)]
        for name, value in values:
            if id(value) not in seen:
                seen.add(id(value))
                if isinstance(value, (FunctionType, MethodType, partial)):
                    todo.append(value)
                else:
                    yield name, value


def _is_known(fn: Any, name: str, value: object, snapshot: MainSnapshot) -> bool:
    """Return whether the drones have this value of a global of `fn`, so that it does not travel."""
    of_main = fn.__globals__ is main_namespace()
    return of_main and snapshot.unchanged(name, value) and not goes_with_calls(value)


class _Guard(NamedTuple):
    """The state that the pickle of one function or partial depends on."""

    fn: ref[Any]
    names: tuple[str, ...]  # names of globals
    state: list[Any]  # at pickling: see `_state` and `_comparable`


def _is_valid(guard: _Guard) -> bool:
    reference, names, state_then = guard
    fn = reference()
    if fn is None:
        return False
    try:
        state_now = _state(fn, names)
    except ValueError:  # a cell has become empty
        return False
    if len(state_now) != len(state_then):  # a keyword was added or removed
        return False
    # `strict` and a generator take longer.
    for held, value in zip(state_then, state_now):  # noqa: B905
        if held is not value and not _is_same(held, value):
            return False
    return True


def _state(fn: Any, names: tuple[str, ...]) -> list[Any]:
    """Return all parts of `fn` that can change; the values of its globals come last.

    Raises `ValueError` if a cell is empty. This runs at each call. So there is no comprehension,
    which is a call, and no new tuple in the list, which would be compared item by item.
    """
    if type(fn) is not FunctionType:
        keywords, state = fn.keywords, [not fn.__dict__, fn.func, fn.args]
    else:
        keywords, state = fn.__kwdefaults__, [not fn.__dict__, fn.__code__, fn.__defaults__]
        for cell in fn.__closure__ or ():
            state.append(cell.cell_contents)
    if keywords:
        state += *keywords, *keywords.values()
    if names:
        state += map(fn.__globals__.get, names, _all_missing)
    return state


_LEAF_TYPES = frozenset((*ATOMIC_TYPES, CodeType))
"""Types whose objects refer only to objects of these types."""


def _comparable(value: Any) -> Any:
    """Return a stand-in that identifies `value` later and never leads back to a function."""
    if type(value) is tuple:
        held = tuple(map(_comparable, value))
        return value if all(map(is_, held, value)) else held
    if type(value) in _LEAF_TYPES:
        return value
    # Without weak reference: a container of `__main__`, which the snapshot holds too, or a subclass
    # of int or bytes.
    return hold(value)


def _is_same(held: Any, value: Any) -> bool:
    if held is value:
        return True
    if type(held) is Weak:
        return held() is value
    return (
        type(held) is type(value) is tuple
        and len(held) == len(value)
        and all(map(_is_same, held, value))
    )


def _guards(fn: Any, snapshot: MainSnapshot, seen: set[int]) -> Iterator[_Guard]:
    """Yield the guards of `fn` and of all that it captures.

    Raises `_Mutable` if a later check would not show a change.
    """
    if id(fn) in seen or snapshot.goes_by_reference(fn):
        return
    seen.add(id(fn))
    if not isinstance(fn, (FunctionType, partial)) or fn.__dict__:
        raise _Mutable  # a class by value, or an object with attributes
    names = () if isinstance(fn, partial) else tuple(set(global_names(fn.__code__)))
    try:
        state = _state(fn, names)
    except ValueError as empty:
        raise _Mutable from empty
    yield _Guard(ref(fn), names, list(map(_comparable, state)))
    own = len(state) - len(names)
    for name, value in zip(names, state[own:], strict=True):
        if value is not _MISSING and not _is_known(fn, name, value, snapshot):
            yield from _guards_of_value(value, snapshot, seen)
    yield from _guards_of_value(tuple(state[:own]), snapshot, seen)


def _guards_of_value(value: Any, snapshot: MainSnapshot, seen: set[int]) -> Iterator[_Guard]:
    if isinstance(value, ModuleType):
        if sys.modules.get(value.__name__) is not value:
            raise _Mutable  # the module goes by value
        return
    # A subclass may have attributes.
    if isinstance(value, (*ATOMIC_TYPES, CodeType)) and not hasattr(value, "__dict__"):
        return
    if isinstance(value, (FunctionType, BuiltinFunctionType, type, partial)):
        yield from _guards(value, snapshot, seen)
    elif type(value) is tuple:
        for each in value:
            yield from _guards_of_value(each, snapshot, seen)
    else:
        raise _Mutable


def _similarity_key(fn: Any) -> Any:
    """Return a key that `fn` shares with similar callables, whose calls probably take as long."""
    fn = of_user(fn)
    if isinstance(fn, partial):
        return _similarity_key(fn.func)
    if isinstance(fn, FunctionType):
        return fn.__code__
    return getattr(fn, "__func__", None) or type(fn)
