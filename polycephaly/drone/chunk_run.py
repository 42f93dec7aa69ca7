"""A chunk of a `map`, as a drone runs it.

    calls ──main thread: popleft, call──> done ──> the outcome
      └──control thread: pop, from the end──> returned, if the chunk takes too long

A chunk is meant for four milliseconds of work, estimated from earlier calls. If a chunk takes
longer than the control thread's window, that thread *cuts* the chunk: calls that were not begun are
returned, so that other drones can run them, and the answers so far are sent. The main thread goes
on with the current call and sends that answer by itself.

`calls` is a deque, and each of its two ends has one taker, so a call is either run or returned.
`answers_sent`, which is used while holding `socket_lock`, divides the answers sent by the control
thread from those sent by the main thread at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pickle import loads
from typing import Any

from ..memory.blocks import MIN_SHARED_PICKLE_BYTES
from ..runtime import forked
from ..runtime.clock import monotonic
from ..runtime.coroutines import is_coroutine
from ..wire import placeholders
from ..wire.detached import (
    CONTAINER_TYPES,
    HIT,
    MAX_MISSES,
    Detacher,
    Returned,
    size_of,
    size_of_container,
)
from ..wire.main_names import MainSnapshot
from ..wire.map_chunks import ITEMS, MIN_SEPARATE_LENGTH, PICKLED, Packed, unpack_calls
from ..wire.pickling import capture_builtins
from ..wire.shareable import BATCHED_TYPES, ITEM_BYTES, SMALL_TYPES, check_of
from .sigterm import Sigterm

MAX_ANSWER_BYTES = 256 * 1024
"""Bytes of answers after which a chunk ends and returns the rest."""


MAX_MARKED_CALLS = 256
"""Calls of a chunk up to which each is marked in the status page. The calls of a chunk of more take
less than 4 µs, and the mark would take some per cent of that.
"""


_BUILTIN_TYPES = BATCHED_TYPES | CONTAINER_TYPES | {tuple, frozenset, bytearray}


class ChunkRun:
    """A chunk being run. `open_function` gives the function; with True, a fresh one. `mark_call`
    displays how many calls have begun, so that the call in which the drone dies is known.
    """

    def __init__(
        self,
        number: int,
        payload: Any,
        open_function: Callable[[bool], Callable[..., Any]],
        pack: Callable[[Any], Any],
        mark_call: Callable[[int], None],
        sigterm: Sigterm,
        snapshot: MainSnapshot | None = None,
    ) -> None:
        self.number = number
        self.done: list[Any] = []
        self.answers_sent = 0  # number of answers in `done` that were sent
        self.packed = False  # some of `done` are `Packed` or `Returned`
        self.was_cut = False
        self.started = monotonic()
        self.error: BaseException | None = None
        self._form, self._fresh, rows = unpack_calls(payload)
        self.calls: deque[Any] = deque(rows)
        self._count = len(rows)
        self._cut_calls = 0
        self._open = open_function
        self._pack = pack
        self._detacher = Detacher(snapshot)
        # How to add a value, by its type. A class is asked once a chunk how its instances are
        # pickled: if a call adds a hook of pickle to it, the results of the next chunk obey.
        self._ways = _WAYS.copy()
        self._mark_call = mark_call
        self._sigterm = sigterm
        self._bytes = 0
        self._misses = 0.0

    def run(self) -> None:
        """Run the calls, up to the first that fails.

        Calls then left in `calls` were not begun: see `attribute_error`.
        """
        generation = forked.generation
        try:
            if self._form == ITEMS and not self._fresh and self._count > MAX_MARKED_CALLS:
                self._run_items(self._open(False))
            elif self._form == PICKLED and not self._fresh:
                self._run_pickled(self._open(False))
            else:
                self._run_rows()
        except BaseException as error:
            self.error = error
        # For a child that a call has forked: see `DroneExecutor.disable`.
        forked.exit_if_forked(generation, self.error)
        self._mark_call(0)

    def _run_items(self, function: Callable[..., Any]) -> None:
        # SIGTERM ends the chunk only where the control thread cuts it: a check would take a tenth
        # of the time of such short calls.
        next_item, add_small, small = self.calls.popleft, self.done.append, SMALL_TYPES
        ways, add_other = self._ways, ChunkRun._add_other
        while True:
            try:
                item = next_item()
            except IndexError:
                return
            value = function(item)
            kind = type(value)
            if kind in small:
                add_small(value)
            elif (  # as `add_text` does, in a third of the time
                kind is str and len(value) < MIN_SEPARATE_LENGTH and self._bytes < MAX_ANSWER_BYTES
            ):
                self._bytes += len(value)
                add_small(value)
            elif ways.get(kind, add_other)(self, value):
                return

    def _run_pickled(self, function: Callable[..., Any]) -> None:
        marks, take, done = self._count <= MAX_MARKED_CALLS, self.calls.popleft, self.done
        while not self._sigterm.received:
            try:
                row = take()
            except IndexError:
                return
            if marks:
                self._mark_call(len(done) + 1)
            try:
                args = loads(row)
            except BaseException as error:
                _note_unpickling(error, function)
                raise
            value = function(*args)
            del args
            if type(value) in SMALL_TYPES:
                done.append(value)
            elif self._add_answer(value):
                return
            del value

    def _run_rows(self) -> None:
        function = None if self._fresh else self._open(False)
        marks = self._count <= MAX_MARKED_CALLS
        while not self._sigterm.received:
            try:
                row = self.calls.popleft()
            except IndexError:
                return
            if marks:
                self._mark_call(len(self.done) + 1)
            if function is None or self._fresh:
                function = None  # so that the new one gets its memory
                function = self._open(True)
            if self._form == ITEMS:
                row = (row,)
            elif self._form == PICKLED:
                row = _arguments(row, function)
            value = function(*row)
            del row
            if type(value) in SMALL_TYPES:
                self.done.append(value)
            elif self._add_answer(value):
                return
            del value

    def _add_answer(self, value: Any) -> bool:
        """Add a value; return True if the chunk must end because its answers are so large."""
        return self._ways.get(type(value), ChunkRun._add_other)(self, value)

    def add_small(self, value: Any) -> bool:
        self.done.append(value)
        return False

    def add_text(self, value: str | bytes) -> bool:
        size = self._bytes + len(value)
        if size >= MAX_ANSWER_BYTES:
            return self._add_packed(value)
        self._bytes = size
        self.done.append(value)
        return False

    def add_tuple(self, value: Collection[Any]) -> bool:
        size = size_of(value)
        if not 0 <= size < MAX_ANSWER_BYTES - self._bytes:
            return self._add_packed(value)
        self._bytes += size
        self.done.append(value)
        return False

    def _add_other(self, value: Any) -> bool:
        """Add a value of a type that no call of the chunk has returned before."""
        if is_coroutine(value):
            from ..green import run

            return self._add_answer(run(value))
        kind = type(value)
        is_fit = check_of(kind)
        way: Way = ChunkRun.add_copy if is_fit is None else partial(_add_if, is_fit)
        self._ways[kind] = way
        return way(self, value)

    def add_container(self, value: Any) -> bool:
        """Add a copy of a dict, list or set. As `add_copy` does, in two thirds of the time."""
        room = MAX_ANSWER_BYTES - self._bytes
        if ITEM_BYTES * len(value) < room:
            copy = value.copy()
            size = size_of_container(copy)
            if 0 <= size < room:
                self._bytes += size
                self.done.append(copy)
                return False
        self._ways[type(value)] = ChunkRun.add_copy  # which gives up after some
        return self.add_copy(value)

    def add_copy(self, value: Any) -> bool:
        """Add a copy of a value that can change, or its pickle."""
        detached = self._detacher.one(value, MAX_ANSWER_BYTES - self._bytes)
        if detached is None:
            return self._add_packed(value)
        copy, size = detached
        if type(copy) is Returned:
            self.packed = True
        self._bytes += size
        self.done.append(copy)
        return False

    def _add_packed(self, value: Any) -> bool:
        """Add the pickle of a value; return True if the chunk must end."""
        self.packed = True
        packed: Any = None
        # With few of other types in them; ends of channels are handed on when they are pickled.
        if (
            type(value) in _BUILTIN_TYPES
            and self._misses < MAX_MISSES
            and not placeholders.last_arrived_end
        ):
            packed = capture_builtins(value)
            self._misses += 1 if packed is None else -HIT
        if packed is None or len(packed) >= MIN_SHARED_PICKLE_BYTES:
            packed = self._pack(value)
        self._bytes += len(packed)
        self.done.append(Packed(packed))
        return self._bytes > MAX_ANSWER_BYTES

    def attribute_error(self) -> None:
        """Attribute the error with which the chunk has ended to the call after those that are done.

        The error may have come between two calls, as an interrupt does, or when the function was
        unpickled. Then it belongs to the next call, or is dropped if there is none. Called holding
        `socket_lock`.
        """
        begun = self._count - self._cut_calls - len(self.calls)
        if begun == len(self.done):
            try:
                self.calls.popleft()
            except IndexError:
                self.error = None

    def cut(self) -> int:
        """Take away the calls that were not begun, and return their number.

        Any thread may call it, holding `socket_lock`.
        """
        taken = 0
        with suppress(IndexError):
            while True:
                self.calls.pop()
                taken += 1
        self._cut_calls += taken
        return taken


def _add_if(is_fit: Callable[[Any], bool], run: ChunkRun, value: Any) -> bool:
    """Add a value as it is if it `is_fit` to share a pickle."""
    if not is_fit(value):
        return run.add_copy(value)
    run.done.append(value)
    return False


Way = Callable[[ChunkRun, Any], bool]
"""Adds a value; returns True if the chunk must end because its answers are so large."""
_WAYS: dict[type, Way] = {
    **dict.fromkeys(SMALL_TYPES, ChunkRun.add_small),
    **dict.fromkeys((str, bytes), ChunkRun.add_text),
    **dict.fromkeys((tuple, frozenset), ChunkRun.add_tuple),
    **dict.fromkeys(CONTAINER_TYPES, ChunkRun.add_container),
}


def _arguments(pickled: bytes, function: Any) -> Any:
    try:
        return loads(pickled)
    except BaseException as error:
        _note_unpickling(error, function)
        raise


def _note_unpickling(error: BaseException, function: Any) -> None:
    error.add_note(
        f"while unpickling the arguments of {getattr(function, '__qualname__', function)}"
    )
