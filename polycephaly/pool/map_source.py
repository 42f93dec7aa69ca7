"""The source of a `map`: turns the rows of its iterables into tasks.

    iterables ──take──> rows ──> Slice: a millisecond of calls in one task
                 └──> large arguments, promises, unknown duration: a task per call

The number of rows in a slice follows from the time that calls have lately taken. So many short
calls share the cost of a task, and long calls go one by one. For a served pool all calls go one by
one, because its server neither looks into the tasks nor measures times for its clients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import length_hint
from pickle import dumps
from typing import TYPE_CHECKING, Any

from ..promises.promise import Promise
from ..store.kept import Kept
from ..store.placeholders import meeting
from ..store.shared import Shared
from ..wire.functions import label
from ..wire.pickling import BULKY, capture
from ..wire.slices import ITEMS, PICKLED, ROWS, SMALL, TOGETHER, pack_calls
from .task import Slice, Task

if TYPE_CHECKING:
    from ..runtime.reactor import Reactor
    from .config import TaskOptions
    from .dispatcher import Dispatcher

__all__ = ["OneByOne", "Source"]

AHEAD = 1.0
"""Seconds of calls that are kept in flight for each drone, by the mean time of a call so far. While
the results after a long call wait for it, the other drones must not run out of calls.
"""
MOST_AHEAD = 8192
"""Maximum number of calls in flight. Also limits the results that a slow consumer leaves
waiting.
"""
BYTES_AHEAD = 64 << 20
"""The same limit in bytes of arguments and results."""
SLICE = 0.001
"""Seconds of calls in a slice."""
ROWS_MOST = 2048
BYTES_MOST = 16 * 1024
"""Maximum size of a slice's rows, so that several slices fit into a message."""

_PLAIN_SOURCES = (list, tuple, range, str, bytes, set, frozenset, dict)
"""Iterating over these runs no user code, so several rows are taken at once."""


_TAKE_THEM = (
    "a map sends its calls as its results are taken: take them all before the pool ends (list(...))"
)


class OneByOne:
    """Each call is a task.

    `error` is the exception that ended the input early: an error of the input, or the shutdown of
    the pool. The error is raised in its place, after the results of the calls that were sent
    before.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        task_options: TaskOptions | None,
        fn: Callable[..., Any],
        iterables: Sequence[Iterable[Any]],
        ahead: int,
    ) -> None:
        self.error: Exception | None = None
        self._dispatcher = dispatcher
        self._task_options = task_options
        self._fn = fn
        self._ahead = ahead
        self._item = 0  # the index of the next call
        self._rows: Iterator[Any] = zip(*iterables, strict=False)
        self.exhausted = False  # True after the end of the input was noticed
        # The newest task until the caller has it, so that a Ctrl-C in between does not lose it.
        self.latest: Task | None = None

    @property
    def label(self) -> str:
        return label(self._fn)

    @property
    def reactor(self) -> Reactor:
        return self._dispatcher.reactor

    def ahead(self) -> int:
        """Return how many calls to keep in flight."""
        return self._ahead

    def works_ahead(self) -> int:
        """Return how many tasks to keep in flight."""
        return self._ahead

    def has_room(self) -> bool:
        return True

    def best(self) -> int:
        """Return the best number of calls in a task."""
        return 1

    def take(self, most: int) -> Task | None:
        """Send the next task, of at most `most` calls, and return it; None at the end of the
        input.
        """
        try:
            for row in self._rows:
                task = self.latest = Task(self._dispatcher)
                task.item, self._item = self._item, self._item + 1
                return self._dispatcher.submit(self._fn, row, {}, None, self._task_options, task)
        except Exception as error:  # raised by the input, or the pool accepts no more tasks
            self.error, self._rows = error, iter(())
        self.exhausted = True
        return None

    def learn(self, task: Task) -> None:
        """Use the times of a finished task."""

    def untaken(self) -> list[Task]:
        """Return the tasks that were made and not yet taken, in order."""
        return [] if self.latest is None else [self.latest]

    def explain(self, error: BaseException) -> None:
        self._dispatcher.explain(error)


class Source(OneByOne):
    """Short calls of known duration go in slices."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        task_options: TaskOptions,
        fn: Callable[..., Any],
        iterables: Sequence[Iterable[Any]],
    ) -> None:
        super().__init__(dispatcher, task_options, fn, iterables, 0)
        self._given = task_options
        self._single = len(iterables) == 1
        self._at_once = all(type(each) in _PLAIN_SOURCES for each in iterables)
        self._range = iterables[0] if self._single and type(iterables[0]) is range else None
        if self._single:
            self._rows = iter(iterables[0])
        # `length_hint` of these runs no user code.
        self._length = self._rows if self._single and self._at_once else ()
        self._next: Task | None = None
        self._row_bytes = 1.0
        self._answered = 0
        self._seconds, self._bytes, self._calls = 0.0, 0, 0  # sums over all answered calls
        config = dispatcher.config
        self._one_by_one = task_options.timeout is not None or config.max_tasks is not None
        self._definition = dispatcher.registry.define(fn)

    @property
    def label(self) -> str:
        return self._definition.label

    def ahead(self) -> int:
        config, seconds = self._dispatcher.config, self._definition.seconds
        at_once = config.size * (config.width if self._definition.overlaps else 1)
        if seconds is None:
            return 4 * at_once
        most: float = MOST_AHEAD
        if self._calls:
            seconds = self._seconds / self._calls
            most = min(most, BYTES_AHEAD * self._calls / (self._bytes + 1))
        return int(max(4 * at_once, min(most, at_once * AHEAD / max(seconds, 1e-7))))

    def works_ahead(self) -> int:
        """Return few at first, because the first calls may not show how long the others take."""
        return 4 * self._dispatcher.config.size * self._dispatcher.config.width + 2 * self._answered

    def has_room(self) -> bool:
        return self._dispatcher.has_room()

    def learn(self, task: Task) -> None:
        """Add the times of a finished task. Followers of a slice that was cut count when they are
        answered.
        """
        self._answered += 1
        answer = task.answered_with()
        if answer is not None:
            self._seconds += answer.finished - answer.started
            self._bytes += answer.there + answer.back
            followers = task.followers if isinstance(task, Slice) else ()
            self._calls += task.count - sum(each.count for each in followers)

    def take(self, most: int) -> Task | None:
        task = self.latest = self._next
        self._next = None
        if task is None and not self.exhausted:
            self._definition = self._dispatcher.registry.define(self._fn)
            try:
                task = self._gather(most)
            except RuntimeError as error:
                if self._dispatcher.refusal is None:
                    raise
                error.add_note(_TAKE_THEM)
                self.error, self.exhausted = error, True
        if task is not None and not isinstance(task, Slice):
            self._item += 1
        return task

    def best(self) -> int:
        seconds = self._definition.seconds
        if (
            seconds is None
            or self._one_by_one
            or self._definition.overlaps
            or self._definition.captures
        ):
            return 1
        best = min(ROWS_MOST, int(SLICE / max(seconds, 1e-7)), int(BYTES_MOST / self._row_bytes))
        left = length_hint(self._length, 0) if self._range is None else _length(self._range)
        if left:  # the last calls are divided among the drones
            best = min(best, -(-left // self._dispatcher.config.size))
        return max(1, best)

    def _gather(self, most: int) -> Task | None:
        form = ITEMS if self._single else ROWS
        if self._range is not None:
            part, self._range = self._range[:most], self._range[most:]
            if most > 1:
                return self._slice(form, part)
            self._rows = iter(part)
        rows: list[Any] = []
        size = 0
        task: Task | None
        source: Iterator[Any] = islice(self._rows, most)
        if self._at_once and most > 1:
            try:
                rows = list(source)
            # The input was changed since the last call, so the error is that of the first row.
            except Exception as error:
                self.error = error
            if self._travel_together(rows):
                return self._slice(form, rows)
            self._at_once = False  # because the next rows are probably like these
            self._rows = chain(rows, self._rows)
            rows, source = [], islice(self._rows, most)
        for row in self._taken(source):
            if (
                form != PICKLED
                and most > 1
                and (type(row) in SMALL or self._travel_together([row]))
            ):
                rows.append(row)
                continue
            args = (row,) if self._single else row
            pickled = self._pickled(args) if most > 1 else None
            if pickled is None:
                self.latest = Task(self._dispatcher)
                self.latest.item = self._item + len(rows)
                self._next = self._dispatcher.submit(
                    self._fn, args, {}, None, self._task_options, self.latest
                )
                break
            if form != PICKLED:
                rows = [dumps((row,) if self._single else row, 5) for row in rows]
                form = PICKLED
            rows.append(pickled)
            size += len(pickled)
            if size > BYTES_MOST:
                break
        else:
            self.exhausted = len(rows) < most
        if rows:
            return self._slice(form, rows)
        task, self._next = self._next, None
        return task

    def _taken(self, source: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from source
        except Exception as error:  # of the input: raised later, in its place
            self.error = error

    def _pickled(self, args: tuple[Any, ...]) -> bytes | None:
        """Return the pickled arguments of a call, or None if the call must be a task by itself."""
        for arg in args:
            if isinstance(arg, (Promise, Shared, Kept)) or (
                type(arg) in BULKY and len(arg) >= BYTES_MOST
            ):
                return None
        try:
            with meeting(None) as pickling:
                pickled = capture(args, self._dispatcher.registry.snapshot, small=True)
            # An argument must be notified of the outcome of its call.
            if pickling.moved is not None:
                return None
        except Exception:  # too large, or not picklable: then the call's promise reports the error
            return None
        return pickled if len(pickled) <= BYTES_MOST else None

    def _travel_together(self, rows: list[Any]) -> bool:
        """Return whether all arguments of these rows are small and immutable."""
        args = rows if self._single else list(chain.from_iterable(rows))
        kinds = set(map(type, args))
        if tuple in kinds:
            args = list(chain.from_iterable(arg if type(arg) is tuple else (arg,) for arg in args))
            kinds = set(map(type, args))
        if kinds <= SMALL:
            return True
        return (
            kinds <= TOGETHER
            and sum(len(arg) for arg in args if isinstance(arg, (str, bytes))) < BYTES_MOST
        )

    def untaken(self) -> list[Task]:
        return super().untaken() + ([] if self._next is None else [self._next])

    def _slice(self, form: int, rows: Sequence[Any]) -> Task | None:
        if not rows:
            self.exhausted = True
            return None
        calls = pack_calls(form, self._definition.once, rows)
        self._row_bytes = max(1.0, len(calls) / len(rows))
        task = self.latest = Slice(self._dispatcher, self._definition, calls, len(rows))
        task.retries = self._given.retries
        task.item, self._item = self._item, self._item + len(rows)
        self._dispatcher.start(task)
        return task


def _length(numbers: range) -> int:
    try:
        return len(numbers)
    except OverflowError:
        return sys.maxsize
