"""`map`: the results of a stream of calls.

    iterables ──Source──> tasks: slices of calls, or single calls ──> drones ──> answers ──> values

A slice that takes too long is cut by its drone (drone/slices.py). The drone answers with the
results so far, and *followers* take the slice's place in the order: one task for the call that is
running, and one for the rest, which any drone may run.

The consumer may be plain code, which waits, or a coroutine of asyncio or of a green thread, which
awaits.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Reversible
from contextlib import suppress
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any, TypeVar

from ..promises.promise import FINISHED, Promise
from ..wire.exceptions import unpack_exception
from ..wire.slices import Answers
from .map_source import OneByOne
from .progress import REFRESH, Progress
from .task import Slice, Task

__all__ = ["Results", "results"]

# Seconds. No timer is set for longer, because the reactor keeps a timer after its map has ended.
LOOK = 1.0

T = TypeVar("T")


class Results(chain[T]):
    """The results of `Pool.map`: an iterator that can be closed, like a generator.

    Steps within a slice run in C code. In a coroutine, ``async for`` takes the values without
    blocking the other tasks there. Use one consumer, of either kind.
    """

    _flow: Generator[Iterable[Any], None, None]
    _stream: _Ordered

    def close(self) -> None:
        """Cancel all calls in flight. A second call is no error."""
        self._stream.is_read = True
        self._flow.close()

    def __repr__(self) -> str:
        return f"<Results of {self._stream.source.label}: to be iterated, by `for` or `async for`>"

    def __aiter__(self) -> AsyncIterator[T]:
        return _Steps(self)


def results(
    pool: object,
    source: OneByOne,
    total: int | None,
    timeout: float | None,
    buffersize: int | None,
    ordered: bool,
    progress: bool,
) -> Results[Any]:
    """Send the first calls, and return an iterator over the results of all calls.

    `total` is the number of calls, if known.
    """
    end = None if timeout is None else monotonic() + timeout
    shown = Progress(source.label, total) if progress else None
    stream = (_Ordered if ordered else _Unordered)(source, buffersize, end, shown)
    stream.pool = pool
    flow = _flow(stream)
    next(flow)
    made = Results.from_iterable(flow)
    made._flow, made._stream = flow, stream  # type: ignore[attr-defined]
    return made  # type: ignore[return-value]  # made by `Results`


def _flow(stream: _Ordered) -> Generator[Iterable[Any], None, None]:
    """Yield some results at a time. The first item is empty, and is yielded after the first calls
    are sent.
    """
    values: list[Any] = []
    tasks: list[Task] = []
    try:
        stream.fill()
        yield values
        stream.is_read = True
        while True:
            stream.fill()
            tasks = stream.take()
            if not tasks:
                break
            if not isinstance(tasks[0], Slice):
                if tasks[0].exception() is not None:
                    tasks.pop().result()  # raises the error
                yield _emptied(tasks)
                continue
            answers: Answers = tasks.pop().result()
            values = answers.values
            yield values if answers.plain else _opened(answers, stream)
            if answers.failed:
                break
            if answers.error is not None:
                # No local variable: the error's traceback would refer to the variable, and the
                # error to the traceback.
                raise _failure(answers.error, stream)
        if stream.source.error is not None:
            raise stream.source.error
    finally:
        values.clear()  # if the iterator is closed in the middle, the rest is not given out
        tasks.clear()
        lacks = stream.lacks()
        stream.cancel()
        # The error's traceback refers to the frames that raised the error, and to all that they
        # hold.
        stream.source.error = None
        # Code that is written for executors, which send all calls at once, may drop the results.
        if lacks:
            warnings.warn(
                f"the results of map({stream.source.label}, ...) were never read, so it has not "
                "made all of its calls: "
                "they are sent as the results are taken, by list(...), say",
                RuntimeWarning,
                stacklevel=2,
            )


def _failure(packed: Any, stream: _Ordered) -> BaseException:
    error = unpack_exception(packed)
    stream.source.explain(error)
    return error


def _emptied(tasks: list[Task]) -> Iterator[Any]:
    """Yield the values of `tasks`, without keeping a reference to any."""
    while tasks:
        yield tasks.pop().result()


def _opened(answers: Answers, stream: _Ordered) -> Iterator[Any]:
    try:
        yield from answers
    except BaseException as error:
        stream.cancel()  # at once, because a consumer that stops here may keep the iterator
        if answers.failed:
            error.add_note(f"while unpickling a result of {stream.source.label}")
        raise


class _Ordered:
    """The tasks of a stream, in the order of the calls."""

    # Keeps the pool alive until the stream is exhausted, closed or failed.
    pool: object = None

    def __init__(
        self, source: OneByOne, buffersize: int | None, end: float | None, progress: Progress | None
    ) -> None:
        self.source = source
        self._buffersize = buffersize
        self._end = end  # the deadline (`time.monotonic`) of all waits
        self._progress = progress
        # Time of the last update of the bar. An update counts all tasks, so updates are limited.
        self._shown = 0.0
        self._under_way = 0  # calls in flight or not yet taken
        self._taken = 0
        self.is_read = False  # True if results were asked for, or will not be
        self._closed = False
        self._tasks: deque[Task] = deque()
        self._deadline: Promise[None] | None = None
        self._tick: Promise[None] | None = None

    def fill(self) -> None:
        """Send calls until as many are in flight as should be."""
        most = self._buffersize or self.source.ahead()
        tasks = self.source.works_ahead()
        if self._closed:
            return
        while (
            self._under_way < most
            and len(self._tasks) < tasks
            and (not self._tasks or self.source.has_room())
        ):
            best, room = self.source.best(), most - self._under_way
            if self._buffersize is not None:
                best = min(best, 1 + most // 32)
            elif room < best and len(self._tasks) > 1:
                # A whole slice later is better than a small one now, which would later leave room
                # for another small one only.
                return
            task = self.source.take(min(best, room))
            if task is None:
                return
            self._under_way += task.count
            self._add(task)
            self.source.latest = None

    def take(self) -> list[Task]:
        """Wait for the next settled task and return it, alone in a list; an empty list after the
        last.

        Raises `TimeoutError` after the deadline, and `CancelledError` if the task was cancelled.
        """
        if not self._tasks:
            return []
        task = self._tasks[0]
        self._wait_for(task)
        # The followers are inserted before the slice is removed, so that a Ctrl-C in between finds
        # them.
        if isinstance(task, Slice):
            for each in reversed(task.followers):
                self._tasks.insert(1, each)
            self._under_way += sum(each.count for each in task.followers)
            self._taken -= sum(each.count for each in task.followers)
        self._tasks.popleft()
        self._under_way -= task.count
        self.source.learn(task)
        self._taken += task.count
        return [task]

    def news(self) -> Promise[Any] | None:
        """Return the promise that `take` would wait for, or None if there are no tasks."""
        return self._tasks[0] if self._tasks else None

    def lacks(self) -> bool:
        """Return whether no result was ever asked for and some calls were not made."""
        if self.is_read:
            return False
        return not self.source.exhausted or any(
            not task.done() or task.cancelled() for task in self._tasks
        )

    def cancel(self) -> None:
        self._closed = True
        self.show(last=True)
        _cancel([*self._tasks, *self.source.untaken()])
        self.pool = None

    def _add(self, task: Task) -> None:
        self._tasks.append(task)

    def _wait_for(self, promise: Promise[Any]) -> None:
        while self._progress is not None and not promise.done() and not self.is_late():
            self.show()
            with suppress(TimeoutError):
                promise.exception(
                    REFRESH if self._end is None else min(REFRESH, self._end - monotonic())
                )
        promise.exception(None if self._end is None else self._end - monotonic())
        self.show()

    # -- for consumers that await ------------------------------------------------------------------

    async def wait(self) -> None:
        """Wait until `take` would not block. Breaking off this wait cancels nothing."""
        self.fill()  # before the wait: `take` would block on tasks that are sent only after it
        news = self.news()
        while news is not None and not news.done() and not self.is_late():
            self.show()
            turn: Promise[None] = Promise()
            wake = partial(_settle, turn)
            awaited = (news, *self._clocks())
            for each in awaited:
                each._hook(wake)
            try:
                await turn
            finally:
                for each in awaited:
                    each._unhook(wake)

    def is_late(self) -> bool:
        return self._end is not None and monotonic() >= self._end

    def show(self, *, last: bool = False) -> None:
        if self._progress is not None and (last or monotonic() - self._shown >= REFRESH):
            self._shown = monotonic()
            done = self._taken
            for task in self._tasks:
                if task.done():
                    done += task.count - sum(each.count for each in getattr(task, "followers", ()))
            self._progress.show(done)
            if last:
                self._progress.close()

    def _clocks(self) -> Iterator[Promise[None]]:
        """Yield promises that are settled when the deadline or the bar needs a look."""
        if self._end is not None:
            if self._deadline is None or self._deadline.done():
                self._deadline = self._clock(min(LOOK, self._end - monotonic()))
            yield self._deadline
        if self._progress is not None:
            if self._tick is None or self._tick.done():
                self._tick = self._clock(REFRESH)
            yield self._tick

    def _clock(self, seconds: float) -> Promise[None]:
        reactor, rung = self.source.reactor, Promise[None]()
        reactor.post(
            lambda: reactor.after(seconds, lambda: reactor.deliver(partial(_settle, rung, None)))
        )
        return rung


class _Unordered(_Ordered):
    """The tasks of a stream, in the order in which they settle."""

    def __init__(
        self, source: OneByOne, buffersize: int | None, end: float | None, progress: Progress | None
    ) -> None:
        super().__init__(source, buffersize, end, progress)
        self._arrived: deque[Task] = deque()
        self._news: Promise[None] = Promise()

    def take(self) -> list[Task]:
        while not self._arrived:
            if not self._tasks:
                return []
            self._wait_for(self._news)
            self._news = Promise()
        task = self._arrived.popleft()
        if isinstance(task, Slice):
            for each in task.followers:
                self._under_way += each.count
                self._taken -= each.count
                self._add(each)
        self._tasks.remove(task)
        self._under_way -= task.count
        self.source.learn(task)
        self._taken += task.count
        return [task]

    def news(self) -> Promise[Any] | None:
        # `_news` may have reported tasks that were taken without a wait.
        if self._tasks and not self._arrived and self._news.done():
            self._news = Promise()
        return self._news if self._tasks and not self._arrived else None

    def _add(self, task: Task) -> None:
        super()._add(task)
        task._hook(self._settled)

    def _settled(self, task: Promise[Any]) -> None:
        assert isinstance(task, Task)
        self._arrived.append(task)
        self._news._settle(FINISHED, None, None)


class _Steps(AsyncIterator[Any]):
    """Gives the values of `Results` to ``async for``. An error or cancellation while the next value
    is awaited, or `aclose`, cancels all calls in flight.
    """

    def __init__(self, of: Results[Any]) -> None:
        self._of = of
        self._values: Iterator[Any] = iter(())

    async def __anext__(self) -> Any:
        of = self._of
        try:
            while True:
                for value in self._values:
                    return value
                await of._stream.wait()
                some = next(of._flow, None)
                if some is None:
                    raise StopAsyncIteration
                self._values = iter(some)
        except StopAsyncIteration:
            raise
        except BaseException:
            of.close()
            raise

    async def aclose(self) -> None:
        self._of.close()


def _settle(promise: Promise[None], _: object) -> None:
    promise._settle(FINISHED, None, None)


def _cancel(tasks: Reversible[Task]) -> None:
    """Cancel `tasks`, the last one first, together with their followers.

    In the other order, a drone whose task ends would begin the next one before that is cancelled.
    Followers that another thread is just creating are not missed: that thread publishes the
    followers and then looks whether the slice was cancelled. This function cancels the slice and
    then looks for followers. So one of the two sees both.
    """
    for task in reversed(tasks):
        task.cancel()
        if isinstance(task, Slice):
            _cancel(task.followers)
