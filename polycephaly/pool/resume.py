"""The source of a `map` that can be resumed.

    iterables ──> rows ──key──> Run.find ──found──> a settled task, whose values are in the file
                                   └──not found──> tasks as of any map ──> Run.put, when settled

Calls that were made before are tasks that have settled, so they stand in the order as all others
do. The values of all tasks here are pickles, opened when the consumer takes them.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import count, islice
from pickle import loads
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from ..promises.promise import fulfill, when_settled
from ..runtime.clock import monotonic
from ..runtime.signal_handlers import is_of_signal_handler
from ..store.resume.calls import Ended, Found
from ..store.resume.encoding import encode
from ..store.resume.identity import describe_unkeyed, identify
from ..store.resume.run import Run, warn_of_code
from ..wire.exceptions import unpack_exception
from ..wire.map_chunks import Answers
from ..wire.recorded import carries_code, record
from .chunk import Chunk, Part
from .items import describe
from .map_source import SLOW_INPUT_SECONDS, Source
from .task import Task
from .task_promise import facts_of

if TYPE_CHECKING:
    from .interfaces import TaskOptions, TaskRunner
    from .seed import Seed

MAX_FOUND = 256
"""Maximum number of stored results in one task."""
MAX_BLOCK = 256
"""Maximum number of rows that are looked up together."""
MAX_TRACEBACK_CHARACTERS = 20_000
_KEY_BYTES = 16
_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"

Key = tuple[int, bytes]
"""Indices and keys of the calls of a task."""


class ResumedSource(Source):
    """The calls of a map, of which those that a file has results of are not made again."""

    def __init__(
        self,
        dispatcher: TaskRunner,
        task_options: TaskOptions,
        fn: Callable[..., Any],
        iterables: Sequence[Iterable[Any]],
        seed: Seed | None,
        path: str | os.PathLike[str],
        key: Callable[..., str] | None,
        changed: str,
        chunksize: int | None,
    ) -> None:
        seeded = None if seed is None else seed.bind(fn, dispatcher.width)
        function = record(fn if seeded is None else seeded, seeded=seed is not None)
        indices = () if seeded is None or not iterables else (count(),)
        super().__init__(
            dispatcher, task_options, function, (*iterables, *indices), chunksize=chunksize
        )
        self._has_index = seeded is not None
        identity = identify(fn, has_keys=key is not None)
        self._user_key = key
        self._hash = blake2b(encode((identity.name, key is None)), digest_size=_KEY_BYTES)
        if seeded is not None:
            self._hash.update(encode(seeded.args[1:]))
        # How many calls of each key there were.
        self._counts: Counter[bytes] = Counter()
        # Calls are made from `_rows`, which looks at the rows of the input, and stops before the
        # next one whose result is stored.
        self._input: Iterator[Any] = iter(self._rows)
        self._rows = _Rows(self)
        # Of a list, say, many rows are looked at together. Those of other inputs are taken one by
        # one, since the input may change an item when it gives the next one.
        self._block_size = MAX_BLOCK if self._are_plain else 1
        self._range, self._are_plain = None, False
        self._looked_at: deque[_Row] = deque()
        self._looking_error: Exception | None = None  # after these rows
        self._count = 0
        # Of the calls whose tasks were not returned yet.
        self._keys: deque[Key] = deque()
        self._function_name = identity.name
        self._has_warned_of_code = False
        # The single calls whose results are to be stored. Consumer and settling thread both look.
        self._watched: dict[Task, Key] = {}
        # Of calls in chunks, by their indices in the `map`: the keys.
        self._awaited: dict[int, Key] = {}
        self._run = Run(os.fspath(path), identity, changed)

    # -- calls -------------------------------------------------------------------------------------

    def send_next(self, max_calls: int) -> Task | None:
        """Send the next task, or return one that has settled: some calls whose results were
        found.
        """
        self._run.wait_for_room()
        while True:
            if self._next is None and not self.exhausted:
                found = self._take_found()
                if found:
                    return self._settled(found)
            task = super().send_next(max_calls)
            if self.exhausted and self._looked_at:
                self.exhausted = False  # a stored result is next
            if task is not None and not isinstance(task, Chunk):
                key = self._keys.popleft()
                self._watched[task] = key
                when_settled(task.promise, partial(self._collect, task))
            elif task is None and not self.exhausted:
                continue
            return task

    def submit_chunk(self, chunk: Chunk) -> None:
        keys = [self._keys.popleft() for _ in range(chunk.count)]
        self._awaited.update(enumerate(keys, chunk.first_item))
        chunk.on_part, chunk.on_lost = self._collect_part, self._collect_lost
        super().submit_chunk(chunk)

    def _take_found(self) -> list[Found]:
        """Return the stored results of the next calls."""
        found: list[Found] = []
        until = monotonic() + SLOW_INPUT_SECONDS
        while len(found) < MAX_FOUND and self._look():
            each = self._looked_at[0].found
            if each is None:
                break
            found.append(each)
            self._looked_at.popleft()
            if monotonic() > until:
                break
        return found

    def take_missing(self) -> Any:
        """Return the row of the next call, if that is to be made. Otherwise raise `StopIteration`,
        or the error of the input.
        """
        if not self._look():
            if self._looking_error is not None:
                raise self._looking_error
            raise StopIteration
        row, index, key, found = self._looked_at[0]
        if found is not None:
            raise StopIteration
        self._looked_at.popleft()
        self._keys.append((index, key))
        return row

    def _look(self) -> bool:
        """Look at the next row, if that was not done yet. Return False at the end of the input."""
        looked_at = self._looked_at
        if not looked_at and self._looking_error is None:
            rows: list[tuple[Any, int, bytes]] = []
            try:
                for row in islice(self._input, self._block_size):
                    args = (row,) if self._has_one_iterable else row
                    rows.append((row, self._count, self._key(args, self._count)))
                    self._count += 1
            except Exception as error:
                if is_of_signal_handler(error):
                    raise
                self._looking_error = error
            found = self._run.find([key for _, _, key in rows])
            looked_at += map(
                _Row._make,
                ((*row, self._usable(each)) for row, each in zip(rows, found, strict=True)),
            )
        return bool(looked_at)

    def _key(self, args: tuple[Any, ...], index: int) -> bytes:
        hashed = self._hash.copy()
        if self._has_index:
            args = args[:-1]
        if self._user_key is not None:
            key = self._user_key(*args)
            if not isinstance(key, str):
                raise TypeError(f"key= gives a string for each item, and gave {key!r} for {index}")
            hashed.update(encode(key))
        else:
            try:
                hashed.update(encode(args))
            except Exception as error:
                if is_of_signal_handler(error):
                    raise
                item = args[0] if len(args) == 1 else args
                raise TypeError(
                    f"item {index} of map({self.label}, ...), {describe_unkeyed(item, error)}"
                ) from error
        if self._has_index:  # on which the random numbers of a call depend
            hashed.update(b"#%d" % index)
        digest = hashed.digest()
        before = self._counts[digest]
        self._counts[digest] = before + 1
        return digest + b"%d" % before if before else digest

    def _usable(self, found: Found | None) -> Found | None:
        """Return `found`, unless it has code of another Python."""
        if found is None or found.python is None or found.python == _PYTHON:
            return found
        if not self._has_warned_of_code:
            self._has_warned_of_code = True
            warn_of_code(self._function_name, self._run.path, found.python)
        return None

    def _settled(self, found: list[Found]) -> Task:
        chunk = self.latest_task = Chunk(self.dispatcher, self._definition, b"", len(found))
        chunk.first_item, self.item = self.item, self.item + len(found)
        chunk.notify = self.notify
        chunk.give(Part(chunk.first_item, _FoundAnswers(found), None))
        fulfill(chunk.promise)
        return chunk

    def take_rest(self, max_calls: int, seconds: float) -> None:
        """Take the rest of the input, as of any map."""
        self._input, self._rows = self._rows, self._input
        try:
            super().take_rest(max_calls, seconds)
        finally:
            self._input, self._rows = self._rows, self._input

    def drop_input(self) -> None:
        """Take no more of the input, store what has ended, and release the file."""
        super().drop_input()
        if self._run.is_elsewhere:  # where the locks may be held for ever
            return
        self._input, self._looking_error = iter(()), None
        self._looked_at.clear()
        for task in list(self._watched):
            if task.promise.done():
                self._collect(task)
        self._run.close()

    # -- results -----------------------------------------------------------------------------------

    def open_batches(
        self, batches: Generator[Iterable[Any], None, None]
    ) -> Generator[Iterable[Any], None, None]:
        """Yield the batches with the values in place of their pickles."""
        try:
            for batch in batches:
                yield (self._open(value) for value in batch)  # no `map`: StopIteration is an error
        finally:
            batches.close()

    def _open(self, value: Any) -> Any:
        if type(value) is Found:
            value = self._run.read(value)
        if type(value) is not bytes:  # the error of a call
            return value
        try:
            return loads(value)
        except BaseException as error:
            error.add_note(
                f"while unpickling a result of {self._function_name} that is stored in "
                f"{self._run.path!r}"
            )
            raise

    def record_task(self, task: Task) -> None:
        """Add the times of a finished task, whose result is about to be read."""
        self._collect(task)
        super().record_task(task)

    # -- storing -----------------------------------------------------------------------------------

    def _collect(self, task: Task, _: object = None) -> None:
        """Have the outcome of a single call stored, once. Called in the thread that settles it, and
        by the consumer.
        """
        key = self._watched.pop(task, None)
        if key is not None and not task.promise.cancelled():
            size = facts_of(task.promise).bytes_received
            self._run.put(partial(_ended_call, task, key), size)

    def _collect_part(self, chunk: Chunk, part: Part) -> None:
        """Have the outcomes of a part stored, before the consumer empties its answers."""
        answers = part.answers
        if not answers.plain:
            with suppress(Exception):  # which the consumer meets again
                answers.values[:] = list(answers)
        done = list(answers.values)
        items = range(part.item, part.item + part.calls)
        keys = [self._awaited.pop(item) for item in items]
        size = sum(map(len, done))
        self._run.put(partial(_ended_part, chunk, part.item, keys, done, answers.error), size)

    def _collect_lost(self, chunk: Chunk, error: BaseException) -> None:
        """Have the error stored with which the calls of a chunk are lost that were not answered, if
        it is known which of them has failed.
        """
        item, calls = chunk.items
        key = self._awaited.pop(item, None) if item is not None and calls == 1 else None
        if key is not None:
            self._run.put(partial(_ended_lost, chunk, key, error), 0)


class _Row(NamedTuple):
    """A row of arguments, its index and key, and its stored result, if there is one."""

    row: Any
    item: int
    key: bytes
    found: Found | None


class _Rows:
    """The rows of the calls that are to be made. The iteration can go on after its end."""

    def __init__(self, source: ResumedSource) -> None:
        self._source = ref(source)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        source = self._source()
        assert source is not None
        return source.take_missing()


class _FoundAnswers(Answers):
    """Stored results, in the form of a chunk's answers."""

    def __init__(self, found: list[Any]) -> None:
        self.values, self.error, self.opening = found, None, None
        self.remote_objects, self._parts = None, {}


def _ended_part(
    chunk: Chunk, first: int, keys: Sequence[Key], done: list[Any], error: bytes | None
) -> Iterator[Ended]:
    for (item, key), result in zip(keys, done, strict=False):
        yield _ended(key, item, result)
    if error is not None:
        item, key = keys[len(done)]
        index = first + len(done) - chunk.first_item
        yield _failed(key, item, unpack_exception(error), describe(chunk, index))


def _ended_call(task: Task, key_of_call: Key) -> Iterator[Ended]:
    item, key = key_of_call
    try:
        error = task.promise.exception()
    except CancelledError:
        return
    if error is None:
        yield _ended(key, item, task.promise.result())
    else:
        yield _failed(key, item, error, describe(task, 0))


def _ended_lost(chunk: Chunk, key_of_call: Key, error: BaseException) -> Iterator[Ended]:
    item, key = key_of_call
    yield _failed(key, item, error, describe(chunk, chunk.lost_call or 0))


def _ended(key: bytes, item: int, result: bytes) -> Ended:
    return Ended(key, item, result, _PYTHON if carries_code(result) else None)


def _failed(key: bytes, item: int, error: BaseException, arguments: str) -> Ended:
    try:
        short = traceback.format_exception_only(error)[0].strip()
        text = "".join(traceback.format_exception(error))
    except Exception:  # of the error's own `__str__`
        short = text = type(error).__qualname__
    return Ended(
        key, item, None, None, _text(short), _text(text[-MAX_TRACEBACK_CHARACTERS:]),
        _text(arguments),
    )  # fmt: skip


def _text(text: str) -> str:
    """Return a text that SQLite can store."""
    return text.encode("utf-8", "replace").decode()
