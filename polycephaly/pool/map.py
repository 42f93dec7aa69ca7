"""`map`: the results of a stream of calls.

    iterables ──Source──> tasks: chunks of calls, or single calls ──> drones ──> answers ──> values

The answers of a chunk come in parts, and the rest of it may be run elsewhere: see chunk.py.

The consumer may be plain code, which waits, or a coroutine of asyncio or of a green thread, which
awaits.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent import futures
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from .._compat import caller_stacklevel
from ..errors import stop_as_error
from ..promises.promise import Promise, fulfill, wait_settled, when_settled
from ..runtime.clock import monotonic
from ..runtime.progress import REFRESH_INTERVAL_SECONDS, Progress
from ..wire.exceptions import unpack_exception
from .chunk import Chunk, Part, with_rests
from .items import add_note
from .map_source import SLOW_INPUT_SECONDS, Source
from .mistaken_names import RESULTS_NAMES, TAKE_ALL
from .task import Task

# Seconds. No timer is set for longer, because the reactor keeps a timer after its map has ended.
MAX_TIMER_SECONDS = 1.0
MAX_CALLS_AT_END = 100_000
"""Calls up to which the end of a pool sends the rest of a map whose input has no length. An input
that has more of them may be endless.
"""
MAX_SECONDS_AT_END = 10.0
"""Seconds within which an input of unknown length must end then."""

T = TypeVar("T")
R = TypeVar("R")
Taken = tuple[list[Task], Part | None]
"""A task alone in a list, so that whoever takes it out leaves no reference to it here, and the part
of it that was taken; None if it is settled, and no chunk."""


class Results(chain[T]):
    """The results of `Pool.map`: an iterator that can be closed, like a generator.

    Steps within a chunk run in C code. In a coroutine, ``async for`` takes the values without
    blocking the other tasks there. Use one consumer, of either kind: a second one (thread, asyncio
    task or green thread), or `next` beside ``async for``, gets a `RuntimeError`.
    """

    _generator: Generator[Iterable[Any], None, None]
    _stream: Ordered
    _turns: _Turns
    _awaited_values: Iterator[Any] = iter(())  # that came together; the rest is for `__anext__`

    def close(self) -> None:
        """Cancel all calls in flight. A second call is no error."""
        self._stream.was_read = True
        self._generator.close()
        self._turns.forget_reader()

    def __repr__(self) -> str:
        return f"<Results of {self._stream.source.label}: iterate with `for` or `async for`>"

    if not TYPE_CHECKING:  # or type checkers would accept them

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in RESULTS_NAMES:
                text += f": {TAKE_ALL}"
            raise AttributeError(text, name=name, obj=self)

        def __getitem__(self, index: object) -> NoReturn:
            raise TypeError(f"'Results' object is not subscriptable: {TAKE_ALL}")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Return the next value. An error or cancellation while it is awaited cancels all calls in
        flight.
        """
        try:
            while True:
                for value in self._awaited_values:
                    return value  # type: ignore[no-any-return]
                some = await self._await_batch()
                if some is None:
                    break
                self._awaited_values = iter(some)
        except StopAsyncIteration as stop:
            self.close()
            raise stop_as_error(stop, f"map({self._stream.source.label}, ...)") from stop
        except BaseException:
            if not self._turns.were_refused:  # else another consumer may be using the generator
                self.close()
            raise
        raise StopAsyncIteration

    async def _await_batch(self) -> Iterable[Any] | None:
        turns = self._turns
        if not turns.begin(awaits=True):
            raise turns.refusal()
        try:
            await self._stream.wait()
            if turns.were_refused:
                self.close()
                raise turns.refusal()
            return turns.next_batch(self._generator)
        finally:
            turns.end()

    async def aclose(self) -> None:
        """Close the iterator, as `close` does."""
        self.close()

    def wait(self, timeout: float) -> bool:
        """Wait until `take_batch` would not block, or `timeout` seconds have passed; return whether
        it would not. For a consumer that reads by `take_batch` alone.
        """
        until = monotonic() + timeout
        self._stream.send_ahead()
        while (promise := self._stream.next_promise()) is not None:
            futures.wait([promise], max(0.0, until - monotonic()))
            if not promise.done():
                return False
        return True

    def take_batch(self) -> Iterable[T] | None:
        """Return the next results, which came together; None after the last."""
        turns = self._turns
        if not turns.begin(awaits=True):
            raise turns.refusal()
        try:
            return turns.next_batch(self._generator)
        finally:
            turns.end()


def start_map(stream: Ordered) -> Results[Any]:
    """Send the first calls, and return an iterator over the results of all calls."""
    generator = stream.source.open_batches(_generate(stream))
    next(generator)
    turns = _Turns(stream.source.label)

    def take_batch() -> Iterable[Any] | None:
        """Return the next batch for one thread at a time; None at the end. Others get a batch that
        raises: an error here would end the `chain`, and the next thread would take that for the
        end.
        """
        batch: Iterable[Any] | None = None
        if turns.begin(awaits=False):
            try:
                batch = turns.next_batch(generator)
            finally:
                turns.end()
        return turns.refuse() if turns.were_refused else batch

    results = Results.from_iterable(iter(take_batch, None))
    results._generator, results._stream = generator, stream  # type: ignore[attr-defined]
    results._turns = turns  # type: ignore[attr-defined]
    return results  # type: ignore[return-value]  # made by `Results`


class _Turns:
    """Who reads the results of a map: one consumer at a time, which either waits or awaits. After
    two were there at once, all are refused, because results would be missing in each of them.
    """

    def __init__(self, label: str) -> None:
        self.were_refused = False
        self._label = label
        self._lock = Lock()
        self._awaits: bool | None = None  # None: not read yet

    def begin(self, *, awaits: bool) -> bool:
        """Begin to read, and return True, if no other consumer does, or has in the other way."""
        if self.were_refused or not self._lock.acquire(blocking=False):
            self.were_refused = True
            return False
        if self._awaits is None:
            self._awaits = awaits
        if self._awaits is not awaits:
            self.were_refused = True
            self._lock.release()
            return False
        return True

    def end(self) -> None:
        self._lock.release()

    def next_batch(self, generator: Iterator[Iterable[Any]]) -> Iterable[Any] | None:
        """Return the next batch, or None after the last. Called in a turn."""
        batch = next(generator, None)
        if batch is None:
            self.forget_reader()
        return batch

    def forget_reader(self) -> None:
        """Let anybody see that no results are left."""
        self._awaits = None

    def refusal(self) -> RuntimeError:
        return RuntimeError(
            f"the results of map({self._label}, ...) have two consumers (threads, asyncio tasks, "
            "green threads, or `next` beside `async for`): read them in one, and pass them on by a "
            "queue"
        )

    def refuse(self) -> Iterator[Any]:
        raise self.refusal()
        yield


def _generate(stream: Ordered) -> Generator[Iterable[Any], None, None]:
    """Yield some results at a time. The first item is empty, and is yielded after the first calls
    are sent.
    """
    __tracebackhide__ = True
    values: list[Any] = []
    tasks: list[Task] = []
    try:
        stream.was_read = True  # if this raises, there is nothing to read
        stream.send_ahead()
        stream.was_read = False
        yield values
        stream.was_read = True
        while True:
            stream.send_ahead()
            tasks, part = stream.take_next()
            if not tasks:
                break
            if part is None:
                errors = [stream.error_of(tasks[0])]
                if errors[0] is None:
                    yield _pop_values(tasks)
                elif stream.return_exceptions:
                    yield [_pop_error(errors, tasks, stream)]
                else:
                    raise _pop_error(errors, tasks, stream)
                continue
            task, answers = tasks.pop(), part.answers
            values = answers.values
            yield values if answers.plain else _unpickle_values(part, task, stream)
            if answers.opening is not None:
                break
            if answers.error is not None:
                # No local variable: the error's traceback would refer to the variable, and the
                # error to the traceback.
                raise _failure(part, task, stream)
        if stream.source.error is not None:
            raise _input_error(stream)
    except StopIteration as stop:
        raise stop_as_error(stop, f"map({stream.source.label}, ...)") from stop
    finally:
        values.clear()  # if the iterator is closed in the middle, the rest is not given out
        tasks.clear()
        is_abandoned = stream.is_abandoned()
        stream.cancel()
        # The error's traceback refers to the frames that raised the error, and to all that they
        # hold.
        stream.source.error = None
        # Code that is written for executors, which send all calls at once, may drop the results.
        if is_abandoned:
            warnings.warn(
                f"the results of map({stream.source.label}, ...) were never read, so not all "
                "calls were made: calls are sent as results are taken, for example by list(...)",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )


def _failure(part: Part, task: Task, stream: Ordered) -> BaseException:
    error = unpack_exception(part.answers.error)
    dispatcher, label = stream.source.dispatcher, stream.source.label
    item = part.item + len(part.answers)
    dispatcher.explain(error)
    dispatcher.note_failure(label, item, None, error)
    add_note(error, label, task, item)
    return error


def _pop_error(
    errors: list[BaseException | None], tasks: list[Task], stream: Ordered
) -> BaseException:
    """Return the error of the task, and take both from their lists: no frame keeps them."""
    task, error = tasks.pop(), errors.pop()
    assert error is not None
    if isinstance(error, Exception):
        add_note(error, stream.source.label, task)
    elif stream.return_exceptions:
        raise error
    return error


def _input_error(stream: Ordered) -> Exception:
    source, error = stream.source, stream.source.error
    assert error is not None
    if isinstance(error, StopAsyncIteration):  # which `async for` cannot raise
        error.add_note(f"in the input of map({source.label}, ...), item {source.item}")
    return error


def _pop_values(tasks: list[Task]) -> Iterator[Any]:
    """Yield the values of `tasks`, without keeping a reference to any."""
    while tasks:
        yield tasks.pop().promise.result()


def _unpickle_values(part: Part, task: Task, stream: Ordered) -> Iterator[Any]:
    answers = part.answers
    try:
        yield from answers
    except BaseException as error:
        stream.cancel()  # at once, because a consumer that stops here may keep the iterator
        if answers.opening is not None:
            error.add_note(f"while unpickling a result of {stream.source.label}")
            add_note(error, stream.source.label, task, part.item + answers.opening)
        raise


class Ordered:
    """The tasks of a stream, in the order of the calls."""

    def __init__(
        self,
        source: Source,
        buffersize: int | None,
        timeout: float | None,
        progress: Progress | None,
        return_exceptions: bool = False,
        pool: object = None,
    ) -> None:
        self.source = source
        self.pool = pool  # kept alive until the stream is exhausted, closed or failed
        # Errors of calls are given in the places of their results.
        self.return_exceptions = return_exceptions
        if return_exceptions:
            source.one_by_one, source.chunksize = True, None  # a chunk ends with its first error
        # The thread that ends the pool may send while another begins to read.
        self._lock = Lock()
        self._buffersize = buffersize
        self._has_begun = False
        self._timeout = timeout
        # Of all waits (`time.monotonic`).
        self._deadline = inf if timeout is None else monotonic() + timeout
        self._progress = progress
        # Time of the last update of the bar. An update counts all tasks, so updates are limited.
        self._shown_at = 0.0
        self._inputs_are_slow = False
        self._calls_in_flight = 0  # calls in flight or not yet taken
        self._taken = 0
        self.was_read = False  # True if results were asked for, or will not be
        self._closed = False
        self._tasks: deque[Task] = deque()
        self._timer: Promise[None] | None = None

    def send_ahead(self) -> None:
        """Send calls until as many are in flight as should be."""
        with self._lock:
            self._send_ahead()

    def _send_ahead(self) -> None:
        if self._closed or self.source.is_at_end():
            return
        chunksize = self.source.chunksize if self.source.best_size() > 1 else None
        if self._buffersize is None:
            max_calls = self.source.calls_ahead()
        else:
            max_calls = self._buffersize * (chunksize or 1)
        max_tasks = self.source.tasks_ahead()
        fills_buffer = self._buffersize is not None and not self._has_begun
        self._has_begun = True
        if self._inputs_are_slow and self._has_result():
            self._inputs_are_slow = False  # until they are looked at again, for the next result
            return
        begun = monotonic()
        while (
            self._calls_in_flight < max_calls
            and len(self._tasks) < max_tasks
            and (not self._tasks or self.source.dispatcher.has_room())
        ):
            best, room = self.source.best_size(), max_calls - self._calls_in_flight
            if chunksize is not None:
                room = best
            elif self._buffersize is not None:
                best = min(best, 1 + max_calls // 32)
            elif room < best and len(self._tasks) > 1 and not self._tasks[-1].promise.done():
                # A whole chunk later is better than a small one now, which would later leave room
                # for another small one only. But nothing is gained while the drones are idle.
                return
            if not self._send(min(best, room)):
                return
            # Inputs may come slowly, from a socket for example: results do not wait for them.
            if self.source.may_be_slow:
                self._inputs_are_slow = monotonic() > begun + SLOW_INPUT_SECONDS
            if self._inputs_are_slow and self._has_result() and not fills_buffer:
                return

    def _has_result(self) -> bool:
        return bool(self._tasks) and _has_result(self._tasks[0])

    def _send(self, max_calls: int) -> bool:
        """Send one task, of at most so many calls; return False if there is none."""
        task = self.source.send_next(max_calls)
        if task is None:
            return False
        self._calls_in_flight += task.count
        self._add(task)
        self.source.latest_task = None
        return True

    def send_rest(self) -> None:
        """Send the remaining calls, because the pool ends, unless the input may be endless."""
        # Taken: another thread is sending. An input may itself have ended the pool, so this must
        # not wait.
        if not self._lock.acquire(blocking=False):
            return
        try:
            source = self.source
            # After its end, an input may block. In a fork, only the parent's pool takes calls.
            if self._closed or source.exhausted or source.dispatcher.refusal is not None:
                return
            if self._buffersize is not None:
                source.why_unsent = f"buffersize={self._buffersize} limits the calls in flight"
                return
            if self.was_read and not source.is_finite:
                source.why_unsent = "its input has no length, and results were read before"
                return
            source.take_rest(MAX_CALLS_AT_END, MAX_SECONDS_AT_END)
            if not source.why_unsent:
                self._send_all()
        finally:
            self._lock.release()

    def _send_all(self) -> None:
        # A thread that reads may meet an error, which ends the map.
        while not self._closed:
            if not self.source.dispatcher.has_room():
                self.source.why_unsent = "max_queued limits the waiting tasks"
                return
            if not self._send(self.source.best_size()):
                return
        _cancel(self._tasks)  # perhaps one that `cancel` has not seen
        self._tasks.clear()

    def take_next(self) -> Taken:
        """Wait for what comes next, and return it: a task that is settled, or a part of a chunk,
        with its task alone in a list. An empty list after the last.

        Raises `TimeoutError` after the deadline, and `CancelledError` if the task was cancelled.
        """
        while (promise := self.next_promise()) is not None:
            self._wait_for(promise)
        task = self._ready_task()
        if task is None:
            return [], None
        if isinstance(task, Chunk) and task.parts:
            return self._taken_part(task)
        self._forget(task)
        return self._taken_task(task)

    def _ready_task(self) -> Task | None:
        return self._tasks[0] if self._tasks else None

    def _forget(self, task: Task) -> None:
        """Remove the first task. The rests of a chunk take its place: to be taken, or, if it is
        lost, to be cancelled with all others. They come first, so that a Ctrl-C finds them.
        """
        if isinstance(task, Chunk):
            for each in reversed(task.rests):
                self._tasks.insert(1, each)
        self._tasks.popleft()

    def _taken_part(self, task: Chunk) -> Taken:
        part = task.parts.popleft()
        self._count_taken(part.calls)
        self.source.record_times(part.times, part.calls)
        return [task], part

    def _taken_task(self, task: Task) -> Taken:
        self._count_taken(task.calls_left)
        self.source.record_task(task)
        return [task], None

    def _count_taken(self, calls: int) -> None:
        self._calls_in_flight -= calls
        self._taken += calls

    def next_promise(self) -> Promise[Any] | None:
        """Return the promise that `take_next` would wait for; None if it would not wait."""
        promise = self._next_promise()
        if not self._tasks:  # the last chunk was taken in full
            self.send_ahead()
            promise = self._next_promise()
        return promise

    def _next_promise(self) -> Promise[Any] | None:
        while self._tasks:
            task = self._tasks[0]
            if not isinstance(task, Chunk):
                return None if task.promise.done() else task.promise
            arrival = task.next_arrival()
            if arrival is not None or not task.is_read():
                return arrival
            self._forget(task)
        return None

    @property
    def is_over(self) -> bool:
        """Whether all results were taken, or it was closed."""
        return self._closed

    def is_abandoned(self) -> bool:
        """Return whether no result was ever asked for and some calls were not made."""
        if self.was_read:
            return False
        return not self.source.exhausted or any(
            not task.promise.done() or task.promise.cancelled() for task in with_rests(self._tasks)
        )

    def cancel(self) -> None:
        self._closed = True
        tasks = [*self._tasks, *self.source.untaken_tasks()]
        try:
            self.show(last=True)
        finally:
            _cancel(tasks)
            self.pool = None
            # An error of the map refers to this by its traceback, and must not keep the results.
            self._tasks.clear()
            self.source.drop_input()

    def _add(self, task: Task) -> None:
        self._tasks.append(task)

    def _wait_for(self, promise: Promise[Any]) -> None:
        while self._progress is not None and not promise.done() and not self.is_late():
            self.show()
            with suppress(TimeoutError):
                wait_settled(promise, min(REFRESH_INTERVAL_SECONDS, self._deadline - monotonic()))
        self._in_time(lambda timeout: wait_settled(promise, timeout))
        self.show()

    def error_of(self, task: Task) -> BaseException | None:
        """Return the error of a settled task. That unpickles a value, which is part of the time."""
        return self._in_time(task.promise.exception)

    def _in_time(self, wait: Callable[[float | None], R]) -> R:
        """Return what `wait` returns, with the seconds that are left."""
        try:
            return wait(None if self._timeout is None else self._deadline - monotonic())
        except TimeoutError:
            raise TimeoutError(
                f"the results of map({self.source.label}, ...) did not come within "
                f"{self._timeout:g} s"
            ) from None

    # -- for consumers that await ------------------------------------------------------------------

    async def wait(self) -> None:
        """Wait until `take_next` would not block. Breaking off this wait cancels nothing."""
        # Before the wait: `take_next` would block on tasks that are sent only after it.
        self.send_ahead()
        while not self.is_late():
            promise = self.next_promise()
            if promise is None:
                return
            self.show()
            wakeup: Promise[object] = Promise()
            wake = partial(fulfill, wakeup)
            promises = (promise, *self._timers())
            for each in promises:
                when_settled(each, wake)
            try:
                await wakeup
            finally:
                for each in promises:
                    each.remove_done_callback(wake)

    def is_late(self) -> bool:
        return monotonic() >= self._deadline

    def show(self, *, last: bool = False) -> None:
        if self._progress is not None and (
            last or monotonic() - self._shown_at >= REFRESH_INTERVAL_SECONDS
        ):
            self._shown_at = monotonic()
            # A copy, because another thread may send.
            tasks = with_rests(self._tasks.copy())
            self._progress.show(self._taken + sum(map(_calls_to_take, tasks)))
            if last:
                self._progress.close()

    def _timers(self) -> Iterator[Promise[None]]:
        """Yield a promise that is settled when the deadline or the bar needs a look."""
        if self._timer is None or self._timer.done():
            if self._timeout is None and self._progress is None:
                return
            seconds = MAX_TIMER_SECONDS if self._progress is None else REFRESH_INTERVAL_SECONDS
            seconds = min(seconds, self._deadline - monotonic())
            reactor, timer = self.source.dispatcher.reactor, Promise[None]()
            on_time = partial(fulfill, timer)
            reactor.post(lambda: reactor.call_later(seconds, lambda: reactor.deliver(on_time)))
            self._timer = timer
        yield self._timer


class Unordered(Ordered):
    """The tasks of a stream, in the order in which they settle."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.source.notify = self._on_arrival
        self._arrived: deque[Task] = deque()
        self._next_arrival: Promise[None] = Promise()

    def _next_promise(self) -> Promise[Any] | None:
        while self._tasks:
            while self._arrived:
                task = self._arrived[0]
                if not isinstance(task, Chunk) or _has_result(task):
                    if not (isinstance(task, Chunk) and task.is_read()):
                        return None
                    self._replace_by_rests(task)
                self._arrived.popleft()
            if not self._next_arrival.done():
                return self._next_arrival
            self._next_arrival = Promise()  # before it is looked again whether anything has arrived
        return None

    def _ready_task(self) -> Task | None:
        return self._arrived[0] if self._tasks and self._arrived else None

    def _forget(self, task: Task) -> None:
        self._arrived.popleft()
        if isinstance(task, Chunk):
            self._tasks += task.rests
        with suppress(ValueError):  # a rest of a chunk that was not taken in full
            self._tasks.remove(task)

    def _taken_part(self, task: Chunk) -> Taken:
        self._arrived.popleft()
        return super()._taken_part(task)

    def _replace_by_rests(self, chunk: Chunk) -> None:
        """Forget a chunk of which all was taken. Of its rests, some may have been taken, too."""
        if chunk in self._tasks:  # else the chunk of which it is a rest was not taken in full
            self._tasks.remove(chunk)
            rests = deque(chunk.rests)
            while rests:
                each = rests.popleft()
                if each.is_read():
                    rests.extend(each.rests)
                else:
                    self._tasks.append(each)

    def cancel(self) -> None:
        super().cancel()
        self._arrived.clear()

    def _has_result(self) -> bool:
        return bool(self._arrived)

    def _add(self, task: Task) -> None:
        super()._add(task)
        if not isinstance(task, Chunk):
            when_settled(task.promise, partial(self._on_arrival, task))
        elif task.is_read():  # and was, when it was not among `_tasks` yet
            self._on_arrival(task)

    def _on_arrival(self, task: Task, _: object = None) -> None:
        if self._closed:
            return
        self._arrived.append(task)
        fulfill(self._next_arrival)


def _has_result(task: Task) -> bool:
    return task.promise.done() or (isinstance(task, Chunk) and bool(task.parts))


def _calls_to_take(task: Task) -> int:
    """Return how many results of `task` are there."""
    if isinstance(task, Chunk):
        return sum(part.calls for part in task.parts.copy())
    return task.promise.done()


def _cancel(tasks: Iterable[Task]) -> None:
    """Cancel `tasks`, the last one first, together with the rests of chunks.

    In the other order, a drone whose task ends would begin the next one before that is cancelled.
    Rests that the loop's thread is just adding to a chunk are not missed: that thread adds them,
    and then looks whether the chunk was cancelled. This function cancels the chunk, and then looks
    for rests. So one of the two sees both.
    """
    todo = [*tasks]
    while todo:
        task = todo.pop()
        task.promise.cancel()
        if isinstance(task, Chunk):
            todo += task.rests
