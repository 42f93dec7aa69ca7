"""The source of a `map`: turns the rows of its iterables into tasks.

    iterables ──send_next──> rows ──> Chunk: twenty milliseconds of calls in one task
                      └──> large arguments, promises, unknown duration: a task per call

The number of rows in a chunk is `chunksize`, or follows from the time that calls have lately taken.
So many short calls share the cost of a task, and long calls go one by one. For a served pool all
calls go one by one, because its server neither looks into the tasks nor measures times for its
clients.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from itertools import accumulate, chain, count, islice, repeat
from math import inf, sqrt
from operator import length_hint
from pickle import dumps
from typing import TYPE_CHECKING, Any

from ..memory.blocks import Store
from ..promises.promise import Handle
from ..runtime.checks import check_iterables
from ..runtime.clock import monotonic
from ..runtime.signal_handlers import is_of_signal_handler
from ..wire.detached import (
    CONTAINER_TYPES,
    Copied,
    Detacher,
    Instances,
    copies_of,
    copies_of_rows,
    least_bytes,
)
from ..wire.map_chunks import ITEMS, PICKLED, ROWS, pack_calls
from ..wire.pickling import BULKY_TYPES, GLOBAL_OPCODE, capture, names_global
from ..wire.placeholders import PicklingContext
from ..wire.shareable import SMALL_TYPES, bytes_together
from .chunk import MIN_CHUNK_SECONDS, Chunk
from .task import Answer, Task
from .task_promise import facts_of

if TYPE_CHECKING:
    from .interfaces import TaskOptions, TaskRunner
    from .seed import Seed

SECONDS_AHEAD = 1.0
"""Seconds of calls that are kept in flight for each drone, by the mean time of a call so far. While
the results after a long call wait for it, the other drones must not run out of calls.
"""
MAX_CALLS_AHEAD = 8192
"""Maximum number of calls in flight. Also limits the results that a slow consumer leaves
waiting.
"""
SIZED_FACTOR = 4
"""Factor of this limit, and of `MAX_CHUNK_ROWS`, for an input whose length is known and whose items
are there already, so that taking them early is no loss.
"""
MAX_BYTES_AHEAD = 64 << 20
"""The same limit in bytes of arguments and results."""
CHUNK_SECONDS = 0.02
"""Seconds of calls in a chunk. Each message wakes the controller, which takes 0.1 to 0.2 ms from
the drones if they use all cores.
"""
LARGE_CHUNK_SECONDS = 0.04
"""The same while much is left of an input whose length is known."""
BRIEF_CALL_SECONDS = 30e-6
BRIEF_CHUNK_SECONDS = 0.004
"""The same for calls shorter than that, of which the drones do as many as the controller can send
and take: that begins with the results of the first chunks."""
EVEN_SECONDS = 0.004
"""Seconds of calls in chunks that need not get smaller, so that the drones end at the same time."""
SLOW_INPUT_SECONDS = 0.004
"""Time that a chunk may wait for its inputs."""
MAX_CALL_SECONDS = CHUNK_SECONDS / 2
"""Seconds of a call from which it is sent by itself."""
MANY_CALLS = 32
"""Calls of a chunk from which its time is taken for theirs, and less for that of the chunk."""
MAX_CHUNK_ROWS = 2048
MAX_CHUNK_BYTES = 16 * 1024
"""Maximum size of a chunk's rows, so that several chunks fit into a message."""
MAX_STORED_BYTES = 256 * 1024
"""The same limit where large chunks go through shared memory."""
MAX_ROW_BYTES = 64 * 1024
"""Maximum size of a row in such a chunk. Parts of a larger one may be shared memory themselves."""

_PLAIN_SOURCES = (list, tuple, range, str, bytes, set, frozenset, dict)
"""Iterating over these runs no user code, so several rows are taken at once."""
_SOURCES_AT_HAND = (*_PLAIN_SOURCES, repeat, count)
"""No item of these is waited for."""

_UNASKED_TYPES = CONTAINER_TYPES | {tuple}
"""Types of arguments that are not asked themselves, when they are pickled, whether they fit."""

_EARLY_END = (
    "the rest of map(%s, ...) was not sent when the pool ended, because %s: take all results "
    "before the pool ends, with list(...)"
)


class Source:
    """Short calls of known duration go in chunks, if the `dispatcher` allows; all others are tasks.

    `error` is the exception that ended the input early: an error of the input, or the shutdown of
    the pool. The error is raised in its place, after the results of the calls that were sent
    before.
    """

    def __init__(
        self,
        dispatcher: TaskRunner,
        task_options: TaskOptions,
        fn: Callable[..., Any],
        iterables: Sequence[Iterable[Any]],
        seed: Seed | None = None,
        chunksize: int | None = None,
    ) -> None:
        self.chunksize = chunksize  # None: as the times of the calls suggest
        # Called for each chunk of which something has arrived.
        self.notify: Callable[[Chunk], None] | None = None
        self.error: Exception | None = None
        self.dispatcher = dispatcher
        self._task_options = task_options
        self._fn = fn if seed is None else seed.bind(fn, dispatcher.width)
        self.item = 0  # the index of the next call
        self.exhausted = False  # True after the end of the input was noticed
        self.why_unsent = ""  # why the end of the pool did not send the rest
        # The newest task until the caller has it, so that a Ctrl-C in between does not lose it.
        self.latest_task: Task | None = None
        self._next: Task | None = None
        check_iterables("map", iterables)
        self._has_one_iterable = len(iterables) == 1 and seed is None
        # With a seed, each call takes its index, too; last, because `zip` takes an index that it
        # cannot use if an input ends or fails.
        indices = (count(),) if seed is not None and iterables else ()
        self._rows: Iterator[Any] = (
            iter(iterables[0])
            if self._has_one_iterable
            else zip(*iterables, *indices, strict=False)
        )
        self._are_plain = all(type(each) in _PLAIN_SOURCES for each in iterables)
        self.may_be_slow = any(type(each) not in _SOURCES_AT_HAND for each in iterables)
        sized = [each for each in iterables if isinstance(each, Sized)]
        self.is_finite = bool(sized)  # False if not known
        self.length = 0  # or, if it is known, the number of calls
        with suppress(Exception):  # `len` fails for a range that is longer, or it is the user's
            self.length = min(map(len, sized), default=0)
        self._range = (
            iterables[0] if self._has_one_iterable and type(iterables[0]) is range else None
        )
        # `length_hint` of these runs no user code.
        self._sized_rows = self._rows if self._has_one_iterable and self._are_plain else ()
        self._factor = SIZED_FACTOR if self._sized_rows else 1
        self._are_mutable = False  # the last rows, which had to be copied, or pickled one by one
        self._has_copies = True  # the last rows could be copied: see detached.py
        self._detacher = Detacher()
        self._row_bytes = 1.0
        self._call_seconds: float | None = None  # of a typical call
        self._answered = 0
        self._seconds, self._bytes, self._calls = 0.0, 0, 0  # sums over all answered calls
        # A `Retry` repeats one call, so a chunk must not fail with it.
        self.one_by_one = (
            not dispatcher.sends_chunks
            or task_options.timeout is not None
            or not isinstance(task_options.retries, int)
            or bool(task_options.resources)  # which each call holds only while it runs
        )
        if self.one_by_one:
            self.chunksize = None
        self._define()

    def _define(self) -> None:
        """Pickle the function: once, at the call. Only a function that `captures` is for one call,
        and drones of a later snapshot lack what the pickle left out.
        """
        self._registry = self.dispatcher.registry
        self._definition = self._registry.define_for_map(self._fn)
        store = self._registry.store
        self._store = store if isinstance(store, Store) else None
        self._max_bytes = MAX_CHUNK_BYTES if self._store is None else MAX_STORED_BYTES
        self._max_row_bytes = min(self._max_bytes, MAX_ROW_BYTES)
        if self.chunksize is not None:  # the user's choice, however large
            self._max_bytes = self._max_row_bytes = sys.maxsize

    def _is_defined(self) -> bool:
        """Return whether the next calls may share the definition of those before."""
        return not self._definition.captures and self._registry is self.dispatcher.registry

    @property
    def label(self) -> str:
        return self._definition.label

    def calls_ahead(self) -> int:
        """Return how many calls to keep in flight."""
        dispatcher, seconds = self.dispatcher, self._definition.seconds
        if dispatcher.calls_ahead:
            return dispatcher.calls_ahead
        concurrent = dispatcher.size * (dispatcher.width if self._definition.overlaps else 1)
        if self.chunksize is not None:
            concurrent *= self.chunksize
        if seconds is None:
            return 4 * concurrent
        limit: float = MAX_CALLS_AHEAD * self._factor
        if self._calls:
            seconds = self._seconds / self._calls
            limit = min(limit, MAX_BYTES_AHEAD * self._calls / (self._bytes + 1))
        return int(max(4 * concurrent, min(limit, concurrent * SECONDS_AHEAD / max(seconds, 1e-7))))

    def tasks_ahead(self) -> int:
        """Return how many tasks to keep in flight: few at first, because the first calls may not
        show how long the others take.
        """
        dispatcher = self.dispatcher
        return dispatcher.calls_ahead or 4 * dispatcher.size * dispatcher.width + 2 * self._answered

    def record_task(self, task: Task) -> None:
        """Add the times of a task that is settled, and no chunk."""
        facts = facts_of(task.promise)
        times = None
        if facts.started is not None and facts.finished is not None:
            sent, received = facts.bytes_sent, facts.bytes_received
            times = Answer(facts.started, facts.finished, 0.0, sent, received)
        self.record_times(times, task.calls_left)

    def record_times(self, times: Answer | None, calls: int) -> None:
        """Add the times of so many answered `calls`; None if they are not known."""
        self._answered += 1
        if times is not None:
            seconds = times.finished - times.started
            self._seconds += seconds
            self._estimate(seconds, calls)
            self._bytes += times.bytes_sent + times.bytes_received
            self._calls += calls

    def _estimate(self, seconds: float, calls: int) -> None:
        """Update the time of a typical call. A drone that has lost its core for a moment makes a
        call seem a thousand times longer, so one report at most doubles it.
        """
        typical = self._call_seconds or self._definition.seconds
        if not typical or not calls or not 0 < seconds < inf:
            return
        change = seconds / calls / typical
        if change > 1:
            self._call_seconds = typical * min(2.0, sqrt(change))
        else:
            self._call_seconds = typical * (change if calls >= MANY_CALLS else sqrt(change))

    def is_at_end(self) -> bool:
        """Return whether `send_next` would return None."""
        return self.exhausted and self._next is None

    def send_next(self, max_calls: int) -> Task | None:
        """Send the next task, of at most `max_calls` calls, and return it; None at the end of the
        input.
        """
        task = self.latest_task = self._next
        self._next = None
        if task is None and not self.exhausted:
            # A single call is defined when it is submitted, if it does not share the definition.
            if max_calls > 1 and not self._is_defined():
                self._define()
                if self._definition.captures:  # perhaps a handle, which it captured only now
                    max_calls = 1
            try:
                task = self._make_task(max_calls)
            except Exception as error:
                if self.dispatcher.refusal is None:
                    raise
                self.error, self.exhausted = self._early_end(error), True
        if task is not None and not isinstance(task, Chunk):
            self.item += 1
            # Not one that the calls share: of that, a task that is settled has no payload any more.
            if not self._is_defined():  # a task that failed has none
                self._definition = getattr(task, "definition", self._definition)
        return task

    def _early_end(self, refusal: Exception) -> Exception:
        early_end = _EARLY_END % (
            self.label,
            self.why_unsent or "calls are sent as results are taken",
        )
        if isinstance(refusal, BrokenExecutor):
            refusal.add_note(early_end)
        elif isinstance(refusal, RuntimeError):  # else the connection is lost
            error = RuntimeError(early_end)
            error.__cause__ = refusal
            return error
        return refusal

    def take_rest(self, max_calls: int, seconds: float) -> None:
        """Take the rest of the input, or set `why_unsent` if it has more items than its length says
        and than `max_calls` or, without a length, does not end within `seconds`. Nothing is lost:
        such an input goes on after the items that were taken.
        """
        max_calls = max(max_calls, self.length)
        if self._range is not None:
            if self._range[max_calls:]:
                self.why_unsent = f"it has more than {max_calls:,} calls"
            return
        rows, rest = list[Any](), self._rows
        self._rows = chain(rows, rest)  # at once, because a Ctrl-C may end the loop
        until = monotonic() + (inf if self.is_finite else seconds)
        for row in self._until_error(islice(rest, max_calls + 1)):
            rows.append(row)
            if len(rows) > max_calls:
                self.why_unsent = f"it has more than {max_calls:,} calls"
            elif monotonic() > until:
                self.why_unsent = f"its input did not end within {seconds:g} s"
                break
        if self.error is not None:  # an iterator may go on after its error
            self._rows = iter(rows)

    def drop_input(self) -> None:
        """Take no more of the input. A generator, say, is closed if no other code refers to it."""
        self.exhausted, self._range = True, None
        self._rows = self._sized_rows = iter(())

    def best_size(self) -> int:
        """Return the best number of calls in a task."""
        definition = self._definition
        if self.one_by_one or definition.overlaps or definition.captures:
            return 1
        if self.chunksize is not None:
            return self.chunksize
        seconds = self._call_seconds or definition.seconds
        if seconds is None or seconds > MAX_CALL_SECONDS:
            return 1
        seconds = max(seconds, 1e-7)
        best = min(MAX_CHUNK_ROWS * self._factor, int(self._max_bytes / self._row_bytes))
        # `len` fails for a range that is longer.
        rest = self._sized_rows if self._range is None else self._range[: sys.maxsize]
        rows_left = length_hint(rest, 0)
        if rows_left:  # so that the drones end at the same time
            share = -(-rows_left // self.dispatcher.size)
            part = max(-(-share // 2), min(share, int(EVEN_SECONDS / seconds)))
            best = min(best, max(part, int(MIN_CHUNK_SECONDS / seconds)))
        limit = LARGE_CHUNK_SECONDS if rows_left else CHUNK_SECONDS
        if seconds < BRIEF_CALL_SECONDS:
            limit = BRIEF_CHUNK_SECONDS
        return max(1, min(best, int(limit / seconds)))

    def _make_task(self, max_calls: int) -> Task | None:
        form = ITEMS if self._has_one_iterable else ROWS
        if self._range is not None:
            part, self._range = self._range[:max_calls], self._range[max_calls:]
            if max_calls > 1:
                return self._chunk(form, part)
            self._rows = iter(part)
        if max_calls == 1:
            for row in self._until_error(islice(self._rows, 1)):
                return self._call(self._args(row), self.item)
            self.exhausted = True
            return None
        rows: list[Any] = []
        size = 0
        source: Iterator[Any] = islice(self._rows, max_calls)
        if self._are_plain:
            try:
                rows = list(source)
            # The input was changed since the last call, so the error is that of the first row.
            except Exception as error:
                if is_of_signal_handler(error):
                    raise
                self.error = error
            if not self._are_mutable and self._fit_together(rows):
                return self._chunk(form, rows)
            detached = self._detached(rows) if self._has_copies else None
            if detached is not None:
                return self._chunk(form, *detached)
            pickles = self._pickled_at_once(rows)
            if pickles:
                return self._chunk(PICKLED, pickles)
            self._are_plain = False  # because the next rows are probably like these
            self._rows = chain(rows, self._rows)
            rows, source = [], islice(self._rows, max_calls)
        # If inputs come slowly, those that are there go first.
        until = monotonic() + SLOW_INPUT_SECONDS if self.chunksize is None else inf
        pickling = PicklingContext(None, self.dispatcher.registry.snapshot)
        for row in self._until_error(source):
            if form != PICKLED:
                if type(row) in SMALL_TYPES or self._fit_together([row]):
                    rows.append(row)
                    if monotonic() > until:
                        break
                    continue
                detached = None
                if self._has_one_iterable:
                    detached = self._detacher.one(row, self._max_row_bytes)
                if detached is not None:
                    rows.append(detached[0])
                    size += detached[1]
                    if size > self._max_bytes or monotonic() > until:
                        break
                    continue
            args = self._args(row)
            pickled = self._pickled(args, pickling)
            if pickled is None:
                self._next = self._call(args, self.item + len(rows))
                break
            if form != PICKLED:
                rows = self._pickled_apart(rows)
                form = PICKLED
            rows.append(pickled)
            size += len(pickled)
            if size > self._max_bytes or monotonic() > until:
                break
        else:
            self.exhausted = len(rows) < max_calls
        if rows:
            return self._chunk(form, rows)
        task, self._next = self._next, None
        return task

    def _args(self, row: Any) -> tuple[Any, ...]:
        return (row,) if self._has_one_iterable else row

    def _call(self, args: tuple[Any, ...], item: int) -> Task:
        """Send a call as a task by itself."""
        task = self.latest_task = Task(self.dispatcher)
        task.first_item = item
        fn = self._definition if self._is_defined() else self._fn
        self.dispatcher.submit(fn, args, {}, None, self._task_options, task)
        return task

    def _until_error(self, source: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from source
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            self.error = error  # of the input: raised later, in its place

    def _detached(self, rows: list[Any]) -> Copied[Sequence[Any]] | None:
        """Return copies of `rows` that may share a pickle, or of the first ones, if all are too
        large; then the others will be the next rows. Return None if there are none.
        """
        found = None
        size = least_bytes(self._args_of(rows))
        for _ in range(2):
            self._cut(rows, size)
            found = self._copies_of(rows) if rows else None
            if found is None or found[1] < self._max_bytes:
                break
            size = found[1]
        else:  # a row is much larger than the others
            found = None
        self._has_copies = found is not None
        self._are_mutable = self._are_mutable or self._has_copies
        return found

    def _cut(self, rows: list[Any], size: int) -> None:
        """Leave the rest of `rows` for the next tasks, if all take too many bytes: `size`."""
        if size >= self._max_bytes:
            count = len(rows) * self._max_bytes // (2 * size)
            self._rows = chain(rows[count:], self._rows)
            del rows[count:]

    def _copies_of(self, rows: list[Any]) -> Copied[Sequence[Any]] | None:
        if self._has_one_iterable:
            return copies_of(rows, self.dispatcher.registry.snapshot)
        return copies_of_rows(rows)

    def _pickled_at_once(self, rows: list[Any]) -> list[bytes]:
        """Return the pickled arguments of the calls of `rows`, or of the first ones, if they are
        large; then the others will be the next rows. Return an empty list if they need to be
        looked at one by one.
        """
        args = self._args_of(rows)
        if not _UNASKED_TYPES.issuperset(map(type, args)):
            return []
        pickled: list[bytes] = []
        try:
            # The context keeps ends of channels from being handed on.
            with PicklingContext(None, self.dispatcher.registry.snapshot) as pickling:
                calls = zip(rows, strict=True) if self._has_one_iterable else rows
                pickled += map(dumps, calls, repeat(5))
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            return []
        if pickling.moved is not None or max(map(len, pickled), default=0) > self._max_row_bytes:
            return []
        unsure = [
            index
            for index, each in enumerate(pickled)
            if GLOBAL_OPCODE in each and names_global(each)
        ]
        if len(unsure) > len(rows) / 4:
            return []
        for index in unsure:
            call = (rows[index],) if self._has_one_iterable else rows[index]
            own = self._pickled(call, pickling)
            if own is None:
                return []
            pickled[index] = own
        self._are_mutable = True
        ends = accumulate(map(len, pickled))
        count = bisect_right([*ends], self._max_bytes) or 1
        if count < len(rows):
            self._rows = chain(rows[count:], self._rows)
        return pickled[:count]

    def _pickled(self, args: tuple[Any, ...], pickling: PicklingContext) -> bytes | None:
        """Return the pickled arguments of a call, or None if the call must be a task by itself."""
        for arg in args:
            kind = type(arg)
            if kind in _UNASKED_TYPES:
                continue
            if kind in BULKY_TYPES:
                if len(arg) >= self._max_row_bytes:
                    return None
            elif issubclass(kind, Handle):
                return None
        snapshot = pickling.snapshot
        assert snapshot is not None
        try:
            # Not around all rows: code of users runs when the next one is taken.
            with pickling:
                pickled = capture(args, snapshot, small=self.chunksize is None)
            # An argument must be notified of the outcome of its call.
            if pickling.moved is not None:
                return None
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            return None  # too large, or not picklable: then the call's promise reports the error
        return pickled if len(pickled) <= self._max_row_bytes else None

    def _pickled_apart(self, rows: Sequence[Any]) -> list[bytes]:
        """Return the pickled arguments of calls whose rows might have shared a pickle."""
        snapshot = self.dispatcher.registry.snapshot
        if isinstance(rows, Instances):
            rows = rows.made()
        calls = zip(rows, strict=True) if self._has_one_iterable else rows
        return [capture(each, snapshot) for each in calls]

    def _fit_together(self, rows: list[Any]) -> bool:
        """Return whether all arguments of these rows may share a pickle, and are small."""
        return 0 <= bytes_together(self._args_of(rows)) < self._max_bytes

    def _args_of(self, rows: list[Any]) -> list[Any]:
        """Return the arguments of all calls of these rows."""
        return rows if self._has_one_iterable else [*chain.from_iterable(rows)]

    def open_batches(
        self, batches: Generator[Iterable[Any], None, None]
    ) -> Generator[Iterable[Any], None, None]:
        """Return the batches of results as the consumer is to get them."""
        return batches

    def untaken_tasks(self) -> list[Task]:
        """Return the tasks that were made and not yet taken, in order."""
        return [each for each in (self.latest_task, self._next) if each is not None]

    def _chunk(self, form: int, rows: Sequence[Any], size: int = 0) -> Task | None:
        if not rows:
            self.exhausted = True
            return None
        fresh, is_whole = self._definition.single_use, self.chunksize is not None
        try:
            calls = pack_calls(form, fresh, rows, self._store, is_whole=is_whole)
        except Exception as error:
            if is_of_signal_handler(error) or form == PICKLED:
                raise
            # The class of some instances was replaced under its name while they were taken.
            rows = self._pickled_apart(rows)
            calls = pack_calls(PICKLED, fresh, rows, self._store, is_whole=is_whole)
        self._row_bytes = max(len(rows), len(calls), size) / len(rows)
        chunk = self.latest_task = Chunk(
            self.dispatcher, self._definition, calls, len(rows), is_whole=is_whole
        )
        chunk.set_options(self._task_options)
        chunk.first_item, self.item = self.item, self.item + len(rows)
        self.submit_chunk(chunk)
        return chunk

    def submit_chunk(self, chunk: Chunk) -> None:
        chunk.notify = self.notify
        self.dispatcher.submit_task(chunk)
