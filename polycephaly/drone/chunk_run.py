"""A chunk of a `map`, as a drone runs it.

    calls ──main thread: popleft, call──> done ──> answers, part by part
      └──either thread: pop, from the end──> given back, if the controller recalls them

Calls are marked in the status page before they begin, in *runs* of some hundred microseconds, or of
one longer call. After a run, if `WRITE_SECONDS` are over, the answers are written, so that they
reach the controller even if the drone dies. The controller is told of them when the chunk ends, or,
while it goes on, when they are large or it was told `FLUSH_SECONDS` before. So that no result waits
for a long call behind it, the control thread writes and tells what is done if a run takes long. It
also has the main thread *slow down*: what is left are runs of one call.

`calls` is a deque. The main thread takes from its beginning to run, all others from its end to give
back, and each step is atomic: so a call is either run or given back. What is written is taken from
the beginning of `done`, while holding `socket_lock`; only the main thread adds to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from itertools import repeat
from math import inf
from pickle import loads
from typing import Any, NamedTuple

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
"""Bytes of answers after which the controller is told of them."""
RUN_SECONDS = 0.0001
"""Time of calls that are marked together: to mark them, and look at the time, takes 0.5 µs."""
BULKY_BYTES = 8 * 1024
"""Bytes of answers from which they wait for others, because fewer pickles are opened faster."""
WRITE_SECONDS = 0.0005
"""Time after which answers are written: a death costs no more calls than that, unless the answers
are bulky."""
MANY_CALLS = 16
LATE_WRITE_SECONDS = 0.004
"""The same if that were more than `MANY_CALLS`, or answers that need a pickle: to write them more
often takes up to a fifth of the time of so short calls, and to open one pickle for each call takes
the controller 20 µs a call in place of 9."""
MAX_BITS = 1024
"""Bits of an int that counts as small."""
FLUSH_SECONDS = 0.02
"""Time that an answer may wait in a chunk until the controller is told of it."""


_BUILTIN_TYPES = BATCHED_TYPES | CONTAINER_TYPES | {tuple, frozenset, bytearray}


class Part(NamedTuple):
    """Answers of a chunk that are to be sent."""

    first: int
    """The index in the chunk of the first call that they answer."""
    values: list[Any]
    packed: bool
    """Whether some of the values are `Packed` or `Returned`."""
    started: float
    """When the first of these calls began."""
    finished: float
    """When the last one had ended."""

    def is_small(self) -> bool:
        """Return whether these are few values that need no pickle, of a short time: then the
        controller handles them together with those before and behind them.
        """
        return (
            0 < len(self.values) <= MANY_CALLS
            and not self.packed
            and self.finished - self.started < FLUSH_SECONDS
            and BATCHED_TYPES.issuperset(map(type, self.values))
            and all(map(_is_short, self.values))
        )


class ChunkRun:
    """A chunk being run. `open_function` gives the function; with True, a fresh one. `mark_calls`
    displays how many calls have begun, and how many of these may be running. `write` writes the
    answers in `done`; with True, it tells the controller of them.
    """

    def __init__(
        self,
        number: int,
        payload: Any,
        open_function: Callable[[bool], Callable[..., Any]],
        pack: Callable[[Any], Any],
        mark_calls: Callable[[int, int], None],
        write: Callable[[bool], None],
        sigterm: Sigterm,
        snapshot: MainSnapshot | None = None,
    ) -> None:
        self._generation = forked.generation
        self.number = number
        self.done: list[Any] = []  # answers that were not written yet
        self.answered = 0  # calls whose answers were written
        self._packed = False  # some of `done` are `Packed` or `Returned`
        self._started = monotonic()  # of the first call in `done`
        self.error: BaseException | None = None
        self._form, self._fresh, self._is_whole, rows = unpack_calls(payload)
        self.calls: deque[Any] = deque(rows)
        self._count = len(rows)  # of the calls that are not given back
        self._run_length = 1
        self._run_began = -inf
        self._open = open_function
        self._pack = pack
        self._detacher = Detacher(snapshot)
        # How to add a value, by its type. A class is asked once a chunk how its instances are
        # pickled: if a call adds a hook of pickle to it, the results of the next chunk obey.
        self._ways = _WAYS.copy()
        self._mark_calls = mark_calls
        self._write = write
        self._sigterm = sigterm
        self._stopped: deque[Any] = deque()  # those that a SIGTERM has kept from beginning
        self._begun = 0  # calls that have begun, with all of the last run
        self._write_at = self._started + WRITE_SECONDS
        self._bytes = 0  # of `done`
        self._misses = 0.0

    def run(self) -> None:
        """Run the calls, up to the first that fails, or as far as they are in `calls` now.

        After an error, calls left in `calls` were not begun: see `attribute_error`.
        """
        try:
            if self._form == ITEMS and not self._fresh:
                self._run_items(self._open(False))
            elif self._form == PICKLED and not self._fresh:
                self._run_pickled(self._open(False))
            else:
                self._run_rows()
        except BaseException as error:
            self.error = error
        # For a child that a call has forked: see `DroneExecutor.disable`.
        forked.exit_if_forked(self._generation, self.error)
        self._mark_calls(0, 0)

    def _begins_run(self) -> bool:
        """Mark the next calls as begun; return False if none is to begin after a SIGTERM."""
        forked.exit_if_forked(self._generation)
        if self._sigterm.received:
            return False
        now = monotonic()
        if now > self._write_at and self.done:
            waits = len(self.done) > MANY_CALLS or type(self.done[-1]) not in BATCHED_TYPES
            if not waits or now > self._write_at + LATE_WRITE_SECONDS - WRITE_SECONDS:
                self._write_done(False)
        seconds, self._run_began = now - self._run_began, monotonic()
        if seconds < RUN_SECONDS:
            self._run_length *= 2
        else:
            self._run_length = int(self._run_length * RUN_SECONDS / seconds) or 1
        self._begun += self._run_length
        self._mark_calls(self._begun, self._run_length)
        return True

    def _write_done(self, must_tell: bool) -> None:
        forked.exit_if_forked(self._generation)
        self._write(must_tell)
        self._write_at = monotonic() + WRITE_SECONDS
        if must_tell:
            self._ways.update(_WAYS)  # some are for containers for which there was no room

    def _run_items(self, function: Callable[..., Any]) -> None:
        next_item, add_small, small = self.calls.popleft, self.done.append, SMALL_TYPES
        ways, add_other = self._ways, ChunkRun._add_other
        while self._begins_run():
            for _ in repeat(None, self._run_length):
                try:
                    item = next_item()
                except IndexError:
                    return
                value = function(item)
                kind = type(value)
                if kind in small:
                    add_small(value)
                elif (  # as `add_text` does, in a third of the time
                    kind is str
                    and len(value) < MIN_SEPARATE_LENGTH
                    and self._bytes < MAX_ANSWER_BYTES
                ):
                    self._bytes += len(value)
                    add_small(value)
                else:
                    must_tell = ways.get(kind, add_other)(self, value)
                    del value
                    if must_tell:
                        self._write_done(True)

    def _run_pickled(self, function: Callable[..., Any]) -> None:
        take, done = self.calls.popleft, self.done
        while self._begins_run():
            for _ in repeat(None, self._run_length):
                try:
                    row = take()
                except IndexError:
                    return
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
                    self._write_done(True)
                del value

    def _run_rows(self) -> None:
        function = None if self._fresh else self._open(False)
        take, done = self.calls.popleft, self.done
        while self._begins_run():
            for _ in repeat(None, self._run_length):
                try:
                    row = take()
                except IndexError:
                    return
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
                    done.append(value)
                elif self._add_answer(value):
                    self._write_done(True)
                del value

    def _add_answer(self, value: Any) -> bool:
        """Add a value; return True if the answers are so large that they are to be sent."""
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
            self._packed = True
        self._bytes += size
        self.done.append(copy)
        return False

    def _add_packed(self, value: Any) -> bool:
        """Add the pickle of a value; return True if the answers are to be sent."""
        self._packed = True
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

    def stop(self) -> None:
        """Let no more calls begin. Called by a signal's handler, in the main thread."""
        with suppress(IndexError):
            while True:
                self._stopped.appendleft(self.calls.pop())

    # -- either thread, holding `socket_lock` ------------------------------------------------------

    def take_done(self) -> Part:
        """Take the answers that were not written yet."""
        count, now = len(self.done), monotonic()  # the main thread may add some meanwhile
        part = Part(self.answered, self.done[:count], self._packed, self._started, now)
        if count:
            del self.done[:count]
            self.answered += count
            self._bytes, self._started = 0, now
        return part

    def is_bulky(self) -> bool:
        """Return whether the answers are so large that they had better be written together."""
        return self._bytes > BULKY_BYTES

    def give_back(self, *, even_if_whole: bool = False) -> int:
        """Take away the calls that were not begun, unless the chunk is to be run as a whole, and
        return their number.
        """
        if self._is_whole and not even_if_whole:
            return 0
        given = len(_drain(self.calls)) + len(_drain(self._stopped))
        self._count -= given
        return given

    def slow_down(self) -> None:
        """Have the main thread run the calls that it has not begun one by one at first."""
        if self._run_length > 1:
            rest = _drain(self.calls)
            self._run_length, self.calls = 1, rest
            self._mark_calls(self._count - len(rest), 1)

    def may_go_on(self) -> bool:
        """Return whether the main thread, which has left its loop, has more calls to run."""
        self._begun = self._count - len(self.calls)
        return bool(self.calls) and self.error is None and not self._sigterm.received

    def attribute_error(self) -> None:
        """Attribute the error with which the chunk has ended to the call after those that are done.

        The error may have come between two calls, as an interrupt does, or when the function was
        unpickled. Then it belongs to the next call, or is dropped if there is none.
        """
        begun = self._count - len(self.calls) - len(self._stopped)
        if begun == self.answered + len(self.done):
            try:
                self.calls.popleft()
            except IndexError:
                self.error = None


def _is_short(value: Any) -> bool:
    kind = type(value)
    if kind is str or kind is bytes:
        return len(value) < MIN_SEPARATE_LENGTH
    return kind is not int or value.bit_length() < MAX_BITS


def _drain(calls: deque[Any]) -> deque[Any]:
    """Take all calls from the end of `calls`, while another thread may take from its beginning."""
    taken: deque[Any] = deque()
    with suppress(IndexError):
        while True:
            taken.appendleft(calls.pop())
    return taken


def _add_if(is_fit: Callable[[Any], bool], run: ChunkRun, value: Any) -> bool:
    """Add a value as it is if it `is_fit` to share a pickle."""
    if not is_fit(value):
        return run.add_copy(value)
    run.done.append(value)
    return False


Way = Callable[[ChunkRun, Any], bool]
"""Adds a value; returns True if the answers are so large that they are to be sent."""
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
